"""Checkpointed calls: equal gradients, less memory, and the same random numbers."""

import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

X = np.array([[0.3, 0.7], [1.1, -0.4]])


def block(x, w):
    return rx.tanh(rx.matmul(x, w)) * rx.exp(x)


def test_gradients_are_equal_to_the_bit():
    w = rx.Tensor(X + 1, requires_grad=True)

    def run(call):
        x = rx.Tensor(X, requires_grad=True)
        w.grad = None
        rx.sum(call(block, call(block, x, w), w)).backward()
        return x.grad, w.grad

    plain = run(lambda f, *a: f(*a))
    for got, want in zip(run(rx.checkpoint), plain, strict=True):
        assert_close(got, want, exact=True)


def test_closures_and_nested_containers():
    w = rx.Tensor(X, requires_grad=True)
    x = rx.Tensor(X, requires_grad=True)
    out = rx.checkpoint(lambda p, *, k: {"y": rx.exp(p["x"][0] * w) * k}, {"x": [x]}, k=2.0)
    rx.sum(out["y"]).backward()
    assert_close(w.grad, 2 * X * np.exp(X * X))
    assert_close(x.grad, 2 * X * np.exp(X * X))


def test_dropout_is_repeated():
    generator = Generator(3)
    x = rx.Tensor(np.ones(1000), requires_grad=True)
    y = rx.checkpoint(lambda x: rx.exp(x) * generator.dropout_mask((1000,), 0.5), x)
    later = generator.uniform((4,))
    rx.sum(y).backward()
    assert_close(x.grad, y.data, exact=True)  # d exp(x) m = exp(x) m, under the same mask
    assert 0 < np.count_nonzero(y.data) < 1000
    # The repetition leaves the generator where it was.
    again = Generator(3)
    again.dropout_mask((1000,), 0.5)
    again.uniform((4,))
    assert_close(generator.uniform((4,)), again.uniform((4,)), exact=True)
    assert later.shape == (4,)


def test_second_order():
    gradcheck(lambda x, w: rx.checkpoint(block, x, w), (X, X + 1))
    gradgradcheck(lambda x, w: rx.checkpoint(block, x, w), (X, X + 1))


def test_nested_checkpoints():
    calls = []

    def inner(x):
        calls.append("inner")
        return rx.exp(rx.sin(x))

    def outer(x):
        calls.append("outer")
        return rx.checkpoint(inner, rx.checkpoint(inner, x) * 0.5)

    x = rx.Tensor(X, requires_grad=True)
    rx.sum(rx.checkpoint(outer, x)).backward()
    y = rx.Tensor(X, requires_grad=True)
    rx.sum(outer(y)).backward()
    assert_close(x.grad, y.grad, exact=True)
    assert calls[:3] == ["outer", "inner", "inner"] and "outer" in calls[3:]


def test_memory_of_a_deep_chain_falls():
    def layer(x):
        for _ in range(8):
            x = rx.tanh(x)
        return x

    def peak(call):
        x = rx.Tensor(np.full(200_000, 0.1), requires_grad=True)
        tracemalloc.start()
        y = x
        for _ in range(8):
            y = call(layer, y)
        rx.sum(y).backward()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(rx.checkpoint) < 0.35 * peak(lambda f, x: f(x))


def test_spawned_generators_are_spawned_again():
    rng = Generator(3)
    x = rx.Tensor(X, requires_grad=True)
    factors = []

    def f(x):
        factors.append(rng.spawn(1)[0].uniform(X.shape))
        return x * x * factors[-1]

    rx.sum(rx.checkpoint(f, x)).backward()
    assert_close(factors[1], factors[0], exact=True)
    assert_close(x.grad, 2 * X * factors[0])


def test_side_effects_can_be_skipped():
    seen = []

    def f(x):
        seen.append(rx.autograd.is_recomputing())
        return x * x

    x = rx.Tensor(X, requires_grad=True)
    rx.sum(rx.checkpoint(f, x)).backward()
    assert seen == [False, True]
    assert not rx.autograd.is_recomputing()


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (lambda x: x * x, lambda x: rx.exp(x) * x, r"operation 1 was multiply\(\) .* exp\(\) when"),
        (lambda x: rx.exp(x * x), lambda x: x * x, "recorded 2 operations at first, 1 when"),
        (lambda x: x * x, lambda x: rx.checkpoint(rx.exp, x), r"was multiply\(\) .* checkpoint"),
    ],
)
def test_a_function_that_changes_is_refused(first, then, message):
    functions = iter((first, then))
    x = rx.Tensor(X, requires_grad=True)
    y = rx.sum(rx.checkpoint(lambda x: next(functions)(x), x))
    with pytest.raises(RuntimeError, match=f"must do the same each time.*{message}"):
        y.backward()


def test_a_changed_argument_is_refused():
    c = rx.Tensor(X.copy())
    x = rx.Tensor(X, requires_grad=True)
    y = rx.sum(rx.checkpoint(lambda x, c: x * (c + 1), x, c))
    c[0, 0] = 5.0
    with pytest.raises(RuntimeError, match="checkpointed call was changed in place"):
        y.backward()


def test_without_recording_nothing_is_kept():
    with rx.no_grad():
        y = rx.checkpoint(block, rx.Tensor(X, requires_grad=True), X)
    assert y.node is None


# ------------------------------------------------------------ what is not run a second time


@rx.custom_op
def scaled(x, w):
    """Give ``x * w``, and count."""
    scaled.calls += 1
    return x * w


scaled.defvjps(x=lambda g, w: g * w, w=lambda g, x: g * x)


@rx.custom_op
def rooted(x):
    """Give the square root, whose rule reads it, and count."""
    rooted.calls += 1
    return x**0.5


rooted.defvjps(x=lambda g, out: g / (2 * out))


@rx.custom_op
def split(x):
    """Give the whole part, which is no number with a gradient, and count."""
    split.calls += 1
    return x.astype(np.int64)


split.defvjps(x=lambda g, x: g)


@pytest.fixture(autouse=True)
def counted():
    scaled.calls = rooted.calls = split.calls = 0


def compare(function, *arrays, call=rx.checkpoint, second=False):
    """Check the gradients against those without a checkpoint; give the calls of the repetition."""
    found = []
    for run in (lambda f, *a: f(*a), call):
        xs = [rx.Tensor(a, requires_grad=True) for a in arrays]
        y = run(function, *xs)
        before = scaled.calls, rooted.calls, split.calls
        grads = rx.autograd.gradients([rx.sum(y * y)], xs, create_graph=second)
        if second:
            grads = rx.autograd.gradients([sum(rx.sum(g * g) for g in grads)], xs)
        found.append(grads)
        after = scaled.calls, rooted.calls, split.calls
    for a, b in zip(*found, strict=True):
        assert_close(a, b, exact=True)
    return tuple(b - a for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("second", [False, True])
def test_the_last_product_is_not_run_again(second):
    def f(x, w):
        return x + scaled(rx.exp(scaled(x, w)), w) * 2.0

    assert compare(f, X, X + 1, second=second) == (1, 0, 0)


def test_an_output_that_its_own_rule_reads_is_made_again():
    def f(x, w):
        return x + rooted(scaled(x, w))

    assert compare(f, abs(X), X * X + 1) == (1, 1, 0)


def test_an_output_that_a_later_rule_reads_is_made_again():
    assert compare(lambda x, w: scaled(x, w) ** 2, X, X + 1) == (1, 0, 0)
    assert compare(lambda x, w: scaled(x, w)[::2] * x[::2], X, X + 1) == (1, 0, 0)


def test_an_output_that_other_code_reads_is_made_again():
    def f(x, w):
        y = scaled(x, w)
        return x * y.data

    assert compare(f, X, X + 1) == (1, 0, 0)
    # A number stays what it was.
    assert compare(lambda x, w: x * float(scaled(x, w).data.sum()), X, X + 1) == (0, 0, 0)


def test_operations_without_a_gradient_are_told_from_the_last():
    assert compare(lambda x, w: scaled(x, w) + split(x * 3.0), X, X + 1) == (0, 0, 0)
    assert compare(lambda x, w: scaled(x + split(x * 3.0), w), X, X + 1) == (0, 0, 1)
    # The one before the last, of the same operation and arguments, gives whole numbers.
    half = rx.custom_op(lambda x, *, whole: x.astype(np.int64) if whole else x * x)
    half.defvjps(x=lambda g, x: 2 * g * x)
    compare(lambda x: half(x, whole=False) + half(x + 1, whole=True), X)
    compare(lambda x: half(x + half(x * 2, whole=True), whole=False), X)


def test_a_checkpoint_at_the_end_of_another_is_not_entered():
    calls = []

    def inner(x, w):
        calls.append("inner")
        return scaled(rx.exp(x), w)

    def outer(x, w):
        calls.append("outer")
        return x + rx.checkpoint(inner, rx.sin(x), w)

    compare(outer, X, X + 1)
    # Without and with a checkpoint around both: what comes after is their repetition.
    assert calls == ["outer", "inner", "inner", "outer", "inner", "outer", "inner"]
    compare(outer, X, X + 1, second=True)


def test_masks_and_normalizations_in_the_last_block():
    norm = rx.nn.BatchNorm(4, device="cpu")
    layers = [rx.nn.Linear(4, 4, device="cpu", dtype="float64") for _ in range(2)]
    norm = norm.astype("float64")
    generator = Generator(5)
    states = []

    def block(x):
        y = norm(layers[0](x))
        return x + rx.dropout(layers[1](rx.gelu(y)), 0.5, generator=generator)

    for call in (lambda f, x: f(x), rx.checkpoint):
        generator.load_state_dict(Generator(5).state_dict())
        norm.load_state_dict(rx.nn.BatchNorm(4, device="cpu").astype("float64").state_dict())
        x = rx.Tensor(np.linspace(-1, 1, 32).reshape(8, 4), requires_grad=True)
        for layer in layers:
            layer.zero_grad()
        rx.sum(call(block, call(block, x)) ** 2).backward()
        states.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        states[-1] += [b.numpy().copy() for b in norm.buffers()]
    for a, b in zip(*states, strict=True):
        assert_close(a, b, exact=True)


# Elsewhere than on a GPU the mask of dropout is kept, and made after the product.
@pytest.mark.parametrize(
    ("device", "rate"), [("cpu", 0.0), pytest.param("cuda:0", 0.1, marks=pytest.mark.gpu)]
)
def test_a_block_of_a_transformer_repeats_all_but_its_last_product(device, rate):
    with rx.device(device):
        block = rx.nn.TransformerBlock(32, 4, dropout=rate)
        data = rx.random.Generator(0).normal((2, 8, 32), dtype="float32")
    grads = []
    for call in (lambda f, x: f(x), rx.checkpoint):
        block.zero_grad()
        rx.random.seed(3)
        x = rx.Tensor(data, requires_grad=True)
        with rx.profile(device=device) as p:
            rx.sum(call(block, call(block, x)) ** 2).backward()
        grads.append(
            [rx.Tensor(g).numpy() for g in (x.grad, *(w.grad for w in block.parameters()))]
        )
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, exact=True)
    calls = {row.name: row.calls for row in p.operations()}
    assert calls["linear"] == 2 * 6 and calls["linear recompute"] == 2 * 5


def test_a_function_that_handles_exceptions_ends_all_the_same():
    ended = []

    def f(x, w):
        try:
            return x + scaled(rx.exp(x), w)
        except Exception:
            ended.append("handled")
            raise
        finally:
            ended.append("ended")

    assert compare(f, X, X + 1) == (0, 0, 0)
    assert ended == ["ended"] * 3


def test_a_function_may_even_go_on():
    def f(x, w):
        try:
            y = scaled(rx.exp(x), w)
        except BaseException:
            y = x * 2.0
        return rx.tanh(x) + y if rx.autograd.is_recomputing() else x + y

    assert compare(f, X, X + 1) == (0, 0, 0)


def test_a_graph_that_is_kept_repeats_again():
    w = rx.Tensor(X + 1, requires_grad=True)
    x = rx.Tensor(X, requires_grad=True)
    y = rx.sum(rx.checkpoint(lambda x: x + scaled(rx.exp(x), w), x))
    y.backward(retain_graph=True)
    once = x.grad.copy()
    y.backward()
    assert_close(x.grad, 2 * once, exact=True)


def test_other_precisions_in_the_repetition():
    layer = rx.nn.Linear(8, 8, device="cpu")
    results = []
    for call in (lambda f, x: f(x), rx.checkpoint):
        layer.zero_grad()
        x = rx.Tensor(np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8), requires_grad=True)
        with rx.autocast("bfloat16"):
            y = call(lambda x: x + layer(rx.gelu(layer(x))), x)
        rx.sum(y).backward()
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, exact=True)
