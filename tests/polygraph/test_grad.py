"""Gradients of fused functions: those of the tape, to the bit, also of the gradients."""

import gc
import weakref

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn

from .fused import BACKENDS, assert_same

rng = np.random.default_rng(0)


def array(*shape, dtype="float64"):
    return rng.normal(size=shape).astype(dtype)


def positive(*shape):
    return np.abs(array(*shape)) + 0.5


LABELS = np.array([1, 0, 2])
INDEX = np.array([2, 0, 0, 1])

CASES = {
    "arithmetic": (lambda x, y: x * y + x / y - 3 * x, array(3, 4), positive(4)),
    "powers": (lambda x, y: x**2 + y**3 + rx.sqrt(y) + y**0.5, array(3), positive(3)),
    "exponentials": (lambda x: rx.exp(x) * rx.tanh(x) + rx.sigmoid(x), array(5)),
    "logarithms": (lambda x: rx.log(x) + rx.log1p(x) * rx.expm1(x), positive(5)),
    "trigonometry": (lambda x: rx.sin(x) * rx.cos(x) + rx.atan2(x, x * x + 1), array(5)),
    "where": (lambda x: rx.where(x > 0, rx.sqrt(rx.abs(x)), x * x), array(7)),
    "maximum": (lambda x, y: rx.maximum(x, y) * rx.minimum(x, 0.5), array(6), array(6)),
    "clip": (lambda x: rx.clip(x, -0.5, 0.5) * x, array(6)),
    "views": (lambda x: (x.T[::-1, 1:] * 2).reshape((-1,)), array(4, 3)),
    "concat": (lambda x, y: rx.concat((x * 2, y), axis=0) ** 2, array(2, 3), array(1, 3)),
    "stack": (lambda x, y: rx.stack((x, y * x)), array(3), array(3)),
    "broadcast": (lambda x, y: rx.broadcast_to(x, (3, 4)) * y, array(4), array(3, 1)),
    "sums": (lambda x: rx.sum(x * x, axis=0) * rx.mean(x, axis=1, keepdims=True), array(3, 3)),
    "maxima": (lambda x: rx.max(x, axis=1) * rx.min(x * x), array(3, 4)),
    "variance": (lambda x: rx.var(x, axis=0) + rx.std(x, axis=0), array(5, 3)),
    "products": (lambda x, y: rx.matmul(x, y) @ y.T, array(3, 4), array(4, 2)),
    "batched": (lambda x, y: x @ y, array(2, 3, 4), array(4, 2)),
    "softmax": (lambda x: rx.softmax(x, axis=-1) ** 2, array(3, 5)),
    "log_softmax": (lambda x: rx.log_softmax(x) * x, array(3, 5)),
    "layer_norm": (lambda x, w: rx.layer_norm(x, w) * x, array(3, 8), array(8)),
    "rms_norm": (lambda x, w: rx.rms_norm(x, w) * x, array(3, 8), array(8)),
    "gelu": (lambda x: rx.gelu(x) + rx.silu(x) * rx.relu(x), array(9)),
    "cross_entropy": (lambda x: rx.cross_entropy(x, LABELS), array(3, 5)),
    "take": (lambda x: rx.take(x, INDEX, axis=0) * x[INDEX], array(3, 2)),
    "update": (lambda x, y: rx.index_update(x * 2, (slice(1, 2),), y) ** 2, array(3, 2), array(2)),
    "cumulative": (lambda x: rx.cumulative_sum(x * x, axis=0), array(5, 2)),
    "attention": (
        lambda q, k: rx.scaled_dot_product_attention(q, k, k * 2),
        array(1, 2, 4, 3),
        array(1, 2, 4, 3),
    ),
    "fft": (lambda x: rx.abs(rx.fft.rfft(x * x)) ** 2, array(6)),
    "complex": (lambda x: rx.real(rx.exp(1j * x) * x), array(4)),
    "unused": (lambda x, y: x * 2, array(3), array(3)),
}


def scalar(f, weights):
    """Make a scalar of what ``f`` gives, by weights that no gradient is the same for."""

    def loss(*args):
        out = f(*args)
        return rx.sum(out * weights[: out.size].reshape(out.shape))

    return loss


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_tapes(name, backend):
    f, *args = CASES[name]
    weights = np.linspace(-1.0, 2.0, 64)
    fused = rx.fuse(f, backend=backend)
    places = tuple(range(len(args)))
    for _ in range(2):
        want = rx.value_and_grad(scalar(f, weights), places)(*args)
        got = rx.value_and_grad(scalar(fused, weights), places)(*args)
        assert_same(got, want)
    assert fused.n_traces == 1
    assert fused.n_eager == 0, fused.reasons


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_the_tapes(name, backend):
    f, *args = CASES[name]
    weights = np.linspace(-1.0, 2.0, 64)
    fused = rx.fuse(f, backend=backend)

    def squares(function):
        def of(*args):
            found = rx.grad(scalar(function, weights), tuple(range(len(args))))(*args)
            return sum(rx.sum(g * g) for g in found)

        return rx.grad(of, tuple(range(len(args))))

    assert_same(squares(fused)(*args), squares(f)(*args))
    assert fused.n_eager == 0, fused.reasons


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_loss_may_be_fused(backend):
    def loss(x, w):
        return rx.mean(rx.square(rx.tanh(x @ w) - 0.5))

    x, w = array(4, 3), array(3, 2)
    fused = rx.fuse(loss, backend=backend)
    assert_same(rx.grad(fused, (0, 1))(x, w), rx.grad(loss, (0, 1))(x, w))
    assert_same(rx.hvp(fused, (x, w), (x, w)), rx.hvp(loss, (x, w), (x, w)))


def test_gradients_of_modules_reach_their_parameters():
    def train(apply):
        own = rx.random.Generator(0)
        with rx.device("cpu"):
            model = nn.Sequential(
                nn.Linear(4, 8, generator=own), nn.LayerNorm(8), nn.Linear(8, 3, generator=own)
            )
        f = apply(model)
        for step in range(3):
            loss = rx.cross_entropy(f(rx.Tensor(data[step])), LABELS)
            loss.backward()
            for p in model.parameters():
                p.assign(p.data - 0.1 * p.grad)
                p.grad = None
        return [p.data for p in model.parameters()]

    data = array(3, 3, 4, dtype="float32")
    want = train(lambda model: model)
    assert_same(train(lambda model: rx.fuse(model, backend="interpreter")), want)
    assert_same(train(rx.fuse), want)


def test_several_results_of_which_some_get_no_gradient():
    def f(x, y):
        return {"a": x * y, "b": (rx.exp(x), y.sum()), "n": x.data.shape}

    x, y = array(3), array(3)
    fused = rx.fuse(f, backend="interpreter")
    for choose in (
        lambda out: rx.sum(out["a"]),
        lambda out: rx.sum(out["b"][0]) + out["b"][1] * 2,
        lambda out: out["b"][1],
    ):
        want = rx.grad(lambda x, y: choose(f(x, y)), (0, 1))(x, y)  # noqa: B023
        assert_same(rx.grad(lambda x, y: choose(fused(x, y)), (0, 1))(x, y), want)  # noqa: B023


def test_a_gradient_passes_through_to_what_made_the_arguments():
    fused = rx.fuse(lambda x: x * x)
    x = rx.Tensor(array(3), requires_grad=True)
    rx.sum(fused(rx.exp(x)) * x).backward()
    y = rx.Tensor(x.data, requires_grad=True)
    z = rx.exp(y)
    rx.sum(z * z * y).backward()
    assert_same(x.grad, y.grad)


def test_without_recording_there_is_nothing_on_the_tape():
    fused = rx.fuse(lambda x: x * x)
    x = rx.Tensor(array(3), requires_grad=True)
    with rx.no_grad():
        assert not fused(x).requires_grad
    assert fused(x).requires_grad
    assert not fused(rx.Tensor(x.data)).requires_grad


def test_an_argument_changed_before_the_backward_pass_is_noticed():
    fused = rx.fuse(lambda x, y: x * y)
    x, y = rx.Tensor(array(3), requires_grad=True), rx.Tensor(array(3))
    out = rx.sum(fused(x, y))
    y[0] = 5.0
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


def test_a_result_changed_before_the_backward_pass_is_noticed():
    fused = rx.fuse(rx.exp)
    x = rx.Tensor(array(3), requires_grad=True)
    y = fused(x)
    with rx.no_grad():
        y[0] = 5.0
    with pytest.raises(RuntimeError, match="changed in place"):
        rx.sum(y).backward()


def test_the_graph_is_freed():
    fused = rx.fuse(lambda x: rx.exp(x) * 2)
    x = rx.Tensor(array(3), requires_grad=True)
    y = rx.sum(fused(x))
    y.backward()
    with pytest.raises(RuntimeError, match="graph was freed"):
        y.backward()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


def test_inside_a_checkpoint():
    fused = rx.fuse(lambda x: rx.tanh(x * 2) * x)
    x = array(5)
    f = rx.grad(lambda x: rx.sum(rx.checkpoint(fused, x * 2)))
    assert_same(f(x), rx.grad(lambda x: rx.sum(fused(x * 2)))(x))


def test_half_precision_and_autocast():
    def f(x, w):
        return rx.linear(x, w) * 2

    x, w = array(4, 3, dtype="float32"), array(2, 3, dtype="float32")
    fused = rx.fuse(f, backend="interpreter")
    with rx.autocast("bfloat16"):
        want = rx.grad(lambda x, w: rx.sum(f(x, w)), (0, 1))(x, w)
        got = rx.grad(lambda x, w: rx.sum(fused(x, w)), (0, 1))(x, w)
    assert_same(got, want)


def test_numbers_reach_the_backward_pass():
    def f(x, a):
        return rx.sin(x * a) * a

    fused = rx.fuse(f)
    x = array(4)
    for a in (0.5, 2.0):
        want = rx.grad(lambda x: rx.sum(f(x, a)))(x)  # noqa: B023
        assert_same(rx.grad(lambda x: rx.sum(fused(x, a)))(x), want)  # noqa: B023
    assert fused.n_traces == 1


def test_an_argument_given_twice():
    fused = rx.fuse(lambda x, y: x * y)
    x = rx.Tensor(array(3), requires_grad=True)
    rx.sum(fused(x, x)).backward()
    np.testing.assert_allclose(x.grad, 2 * x.data)


def test_what_is_kept_is_little():
    """Views, comparisons and sums of what is there are computed again."""
    fused = rx.fuse(lambda x, y: rx.where(x > 0, x, 0.0) * y.T, backend="interpreter")
    x, y = rx.Tensor(array(4, 3), requires_grad=True), rx.Tensor(array(3, 4), requires_grad=True)
    rx.sum(fused(x, y)).backward()
    ((program,),) = fused._programs.values()
    assert program._backward.kept == []
    assert "backward:" in fused.explain()


def test_second_derivatives_draw_the_numbers_of_the_first_pass():
    def f(generator, x):
        return rx.sum(rx.dropout(x * x * x, 0.5, generator=generator))

    def norm(function, x):
        generator = rx.random.Generator(5)
        g = rx.grad(lambda x: rx.sum(rx.grad(lambda x: function(generator, x))(x) ** 2))(x)
        return g, generator.state_dict()["offset"]

    x = array(50)
    want = norm(f, x)
    got = norm(rx.fuse(f, backend="interpreter"), x)
    assert_same(got, want)


def test_while_time_is_taken_and_while_writes_are_looked_for():
    fused = rx.fuse(lambda x, w: rx.tanh(x @ w))
    x, w = array(3, 4), array(4, 2)

    def run():
        p = rx.Tensor(w, requires_grad=True)
        rx.sum(fused(rx.Tensor(x), p)).backward()
        return p.grad

    want = run()
    with rx.profile() as seen:
        assert_same(run(), want)
    assert "<lambda>" in str(seen)
    with rx.autograd.debug_mutation():
        assert_same(run(), want)
    assert fused.n_eager == 0, fused.reasons


def test_gradients_for_each_sample_name_the_operation():
    from rtxarr.autograd._engine import per_sample_gradients

    fused = rx.fuse(lambda x, w: rx.sum(x @ w))
    w = rx.Tensor(array(4, 2), requires_grad=True)
    with pytest.raises(TypeError, match="has no per-sample rule"):
        per_sample_gradients(fused(rx.Tensor(array(3, 4)), w), [w])


def test_a_mask_reaches_what_is_fused():
    """What ``where`` leaves out stays out, also if the fused part is infinite there."""
    fused = rx.fuse(lambda x: rx.sqrt(x) * 2)

    def f(function, x):
        return rx.sum(rx.where(x > 0, function(x), 0.0))

    x = np.array([4.0, 0.0, 1.0])
    with np.errstate(all="ignore"):
        assert np.isfinite(rx.grad(lambda x: f(lambda x: rx.sqrt(x) * 2, x))(x)).all()
        assert_same(rx.grad(lambda x: f(fused, x))(x), rx.grad(lambda x: f(fused._function, x))(x))


def test_masks_pass_through_several_fused_functions_and_to_second_order():
    root = rx.fuse(lambda x: (rx.sqrt(x), x * 2))
    square = rx.fuse(lambda x: x * rx.sqrt(x))

    def f(root, square, x):
        a, b = root(square(x))
        return rx.sum(rx.where(x > 0, a * b, 0.0))

    def second(root, square, x):
        return rx.grad(lambda x: rx.sum(rx.grad(lambda x: f(root, square, x))(x) ** 2))(x)

    x = np.array([4.0, 0.0, 1.0])
    with np.errstate(all="ignore"):
        for fused in (True, False):
            parts = (root, square) if fused else (root._function, square._function)
            first, twice = rx.grad(lambda x: f(*parts, x))(x), second(*parts, x)  # noqa: B023
            if fused:
                got = first, twice
        assert np.isfinite(first).all()
        assert_same(got[0], first)
        assert_same(got[1], twice, exact=False)  # what comes from both is added up otherwise
