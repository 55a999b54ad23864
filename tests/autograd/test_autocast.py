"""Mixed precision: which dtypes operations run in, and whose gradients arrive in which."""

import gc
import threading

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay, nn, optim
from rtxarr.autograd import _autocast
from rtxarr.autograd._mode import state
from rtxarr.autograd._op import OPS
from rtxarr.testing import assert_close

HALVES = ["bfloat16", "float16"]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def leaf(*shape, dtype="float32", seed=0, device="cpu"):
    values = np.random.default_rng(seed).standard_normal(shape)
    return rx.Tensor(rx.asarray(values, dtype=dtype, device=device), requires_grad=True)


def test_the_table_names_operations():
    assert {*_autocast.LOW, *_autocast.FULL} - set(OPS) == set()


PRODUCTS = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: rx.linear(x, x, x[0]),
    "einsum": lambda x: rx.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: rx.tensordot(x, x, axes=1),
    "conv1d": lambda x: rx.conv1d(x[None], x[:, :, None], x[0]),
    "conv_transpose1d": lambda x: rx.conv_transpose1d(x[None], x[:, :, None], x[0]),
    "attention": lambda x: rx.scaled_dot_product_attention(x[None], x[None], x[None]),
}
DELICATE = {
    "pow": lambda x: x**2.0,
    "exp": rx.exp,
    "log1p": lambda x: rx.log1p(rx.abs(x)),
    "softplus": rx.softplus,
    "sum": rx.sum,
    "mean": lambda x: rx.mean(x, axis=0),
    "var": rx.var,
    "cumulative_sum": lambda x: rx.cumulative_sum(x, axis=0),
    "vecdot": lambda x: rx.vecdot(x, x),
    "logsumexp": rx.logsumexp,
    "softmax": rx.softmax,
    "log_softmax": rx.log_softmax,
    "vector_norm": rx.linalg.vector_norm,
    "solve": lambda x: rx.linalg.solve(x, x),
    "cross_entropy": lambda x: rx.cross_entropy(x, np.arange(4)),
    "soft_cross_entropy": lambda x: rx.soft_cross_entropy(x, rx.softmax(x)),
    "mse_loss": lambda x: rx.mse_loss(x, x * 0),
    "binary_cross_entropy": lambda x: rx.binary_cross_entropy_with_logits(x, x * 0),
}
INDIFFERENT = {
    "add": lambda x: x + x,
    "tanh": rx.tanh,
    "gelu": rx.gelu,
    "reshape": lambda x: rx.reshape(x, (2, 8)),
    "max": rx.max,
    "layer_norm": rx.layer_norm,
    "dropout": lambda x: rx.dropout(x, 0.5),
    "where": lambda x: rx.where(x.data > 0, x, 0.0),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_in_the_low_dtype(name, half):
    x = leaf(4, 4)
    with rx.autocast(half):
        y = PRODUCTS[name](x)
    assert y.dtype == half
    assert_close(y.numpy().astype("float32"), PRODUCTS[name](x).numpy(), rtol=0.05, atol=0.1)
    assert PRODUCTS[name](x).dtype == "float32"


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", DELICATE)
def test_delicate_operations_run_in_float32(name, half):
    x = leaf(4, 4, dtype=half)
    with rx.autocast(half):
        y = DELICATE[name](x)
    assert y.dtype == "float32"
    # In float32 all the way: the values are those of the widened argument.
    wide = rx.Tensor(x.data.astype("float32"), requires_grad=True)
    want = DELICATE[name](wide)
    assert_close(y.data, want.data, exact=True)
    g = np.ones(y.shape, "float32")
    y.backward(g)
    want.backward(g)
    assert x.grad.dtype == half
    assert_close(x.grad, wide.grad.astype(half), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", INDIFFERENT)
def test_other_operations_keep_the_dtype(name):
    for dtype in ("bfloat16", "float32"):
        with rx.autocast("bfloat16"):
            assert INDIFFERENT[name](leaf(4, 4, dtype=dtype)).dtype == dtype


def test_half_and_single_meet_in_single():
    x, w = leaf(4, 4, dtype="bfloat16"), leaf(4, 4)
    with rx.autocast("bfloat16"):
        assert (x + w).dtype == "float32"
        assert rx.concat([x, w]).dtype == "float32"
        assert (x @ w).dtype == "bfloat16"
        assert rx.layer_norm(x, w[0]).dtype == "float32"


def test_wide_and_complex_numbers_and_integers_are_left_alone():
    with rx.autocast("bfloat16"):
        for dtype in ("float64", "complex64"):
            x = leaf(4, 4, dtype=dtype)
            assert (x @ x).dtype == dtype
            assert rx.exp(x).dtype == dtype
        assert (leaf(4, 4, dtype="float64") @ leaf(4, 4)).dtype == "float64"
        n = rx.Tensor(np.arange(4))
        assert (n @ n).dtype == "int64"


def test_raw_arrays_are_left_alone():
    x = np.ones((4, 4), "float32")
    with rx.autocast("bfloat16"):
        assert rx.matmul(x, x).dtype == "float32"
        assert rx.softmax(x.astype("float16")).dtype == "float16"
        assert rx.matmul(x, rx.Tensor(x)).dtype == "bfloat16"


def test_a_mask_of_attention_keeps_its_range():
    q = leaf(2, 3, 4)
    mask = np.asarray([[0, -1e9, -1e9]] * 3, "float32")
    with rx.autocast("float16"):
        y = rx.scaled_dot_product_attention(q, q, q, mask)
    assert y.dtype == "float16"
    assert_close(y.data, np.broadcast_to(q.data[:, :1], y.shape).astype("float16"), exact=True)


# ------------------------------------------------------------------------------- gradients


def mlp(w1, w2, x, low=None):
    """Two layers; with ``low``, as autocast should run them."""

    def to(x):
        return x if low is None else rx.astype(x, low)

    hidden = rx.gelu(rx.linear(to(x), to(w1)))
    return rx.mse_loss(rx.astype(rx.linear(hidden, to(w2)), "float32"), rx.zeros_like(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALVES)
def test_gradients_are_those_of_casts_by_hand_in_float32(half, device):
    x = leaf(5, 4, device=device).detach()
    weights = [leaf(8, 4, seed=1, device=device), leaf(4, 8, seed=2, device=device)]
    by_hand = [rx.Tensor(w.data, requires_grad=True) for w in weights]
    with rx.autocast(half):
        loss = mlp(*weights, x)
    want = mlp(*by_hand, x, low=half)
    loss.backward()
    want.backward()
    assert loss.dtype == "float32"
    assert_close(loss.numpy(), want.numpy(), exact=True)
    for w, v in zip(weights, by_hand, strict=True):
        assert w.grad.dtype == "float32"
        assert_close(rx.Tensor(w.grad).numpy(), rx.Tensor(v.grad).numpy(), exact=True)


def test_the_gradient_of_a_bias_is_not_rounded_on_the_way():
    x, w, b = leaf(3, 4).detach(), leaf(2, 4), leaf(2)
    g = np.full((3, 2), 1 + 2**-7)  # exact in bfloat16, three of them are not
    with rx.autocast("bfloat16"):
        y = rx.linear(x, w, b)
    y.backward(g.astype(y.dtype))
    assert_close(b.grad, np.full(2, 3 * (1 + 2**-7), "float32"), exact=True)


def test_a_backward_pass_inside_the_block_gives_the_same_bits():
    grads = []
    for inside in (True, False):
        w1, w2 = leaf(8, 4, seed=1), leaf(4, 8, seed=2)
        with rx.autocast("bfloat16"):
            loss = mlp(w1, w2, leaf(5, 4).detach())
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append((w1.grad, w2.grad))
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, exact=True)


def test_higher_orders_are_float32_and_near_the_wide_ones():
    x = leaf(5, 4).detach()
    w = leaf(4, 4, seed=1)

    def loss(w):
        return rx.mean(rx.tanh(x @ w) ** 2)

    def penalty(w):
        return rx.sum(rx.grad(loss)(w) ** 2)

    want = rx.grad(penalty)(w.data)
    product = rx.hvp(loss, (w.data,), (np.ones((4, 4), "float32"),))[0]
    with rx.autocast("bfloat16"):
        got = rx.grad(penalty)(w.data)
        low_product = rx.hvp(loss, (w.data,), (np.ones((4, 4), "float32"),))[0]
    assert got.dtype == low_product.dtype == "float32"
    assert_close(got, want, rtol=0.1, atol=0.02 * np.abs(want).max())
    assert_close(low_product, product, rtol=0.1, atol=0.02 * np.abs(product).max())
    assert np.any(got != want)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)])
def test_gradients_of_each_sample_are_float32_and_add_up(make):
    layer = make()
    x = leaf(5, 4) if isinstance(layer, nn.Linear) else leaf(5, 4, 6)
    with rx.autocast("bfloat16"):
        loss = rx.sum(layer(x.detach()) ** 2)
    each = rx.autograd.per_sample_gradients(loss, list(layer.parameters()))
    with rx.autocast("bfloat16"):
        rx.sum(layer(x.detach()) ** 2).backward()
    for g, p in zip(each, layer.parameters(), strict=True):
        assert g.dtype == "float32" and g.shape == (5, *p.shape)
        assert_close(g.sum(axis=0), p.grad, rtol=0.03, atol=0.03)


def test_checkpoint_repeats_under_the_same_policy():
    block = nn.TransformerBlock(8, 2, dropout=0.3)
    x = leaf(2, 5, 8)
    grads = []
    for call in (lambda f, x: f(x), rx.checkpoint):
        block.zero_grad()
        x.grad = None
        rx.random.seed(3)
        with rx.autocast("bfloat16"):
            loss = rx.mean(call(block, x) ** 2)
        loss.backward()  # outside the block
        grads.append([x.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*grads, strict=True):
        assert a.dtype == "float32"
        assert_close(a, b, exact=True)


def test_a_checkpoint_outside_repeats_without_it():
    w = leaf(4, 4)
    loss = rx.sum(rx.checkpoint(lambda: w @ w))
    with rx.autocast("bfloat16"):
        loss.backward()
    plain = rx.Tensor(w.data, requires_grad=True)
    rx.sum(plain @ plain).backward()
    assert_close(w.grad, plain.grad, exact=True)


def test_a_changed_parameter_is_still_refused_by_the_backward_pass():
    w, x = leaf(4, 4), leaf(4, 4, seed=1)
    with rx.autocast("bfloat16"):
        y = rx.sum(x @ w)
    w.assign(w.data * 2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.TransformerBlock(8, 2, causal=True, dropout=0.1), (2, 5, 8)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm(4), rx.relu), (2, 3, 6, 6)),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), rx.silu), (2, 4, 6, 6)),
        (lambda: nn.LSTM(8, 4, bidirectional=True), (2, 5, 8)),
        (lambda: nn.GRU(8, 4), (2, 5, 8)),
    ],
    ids=["transformer", "conv-batch-norm", "conv-group-norm", "lstm", "gru"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_layers_train_near_their_float32_gradients(model, shape, device):
    rx.random.seed(1)
    with rx.device(device):
        model = model()
        x = leaf(*shape, device=device).detach()
        found = []
        for dtype in (None, "bfloat16"):
            model.zero_grad()
            rx.random.seed(2)
            with rx.autocast(dtype):
                out = model(x)
                out = out[0] if isinstance(out, tuple) else out
                rx.mean(rx.square(out)).backward()
            found.append([rx.Tensor(p.grad).numpy() for p in model.parameters()])
    for wide, low in zip(*found, strict=True):
        assert low.dtype == "float32"
        assert np.linalg.norm(low - wide) <= 0.06 * np.linalg.norm(wide) + 1e-3
    assert any(np.any(low != wide) for wide, low in zip(*found, strict=True))


# ---------------------------------------------------------------------------- custom operations


@pytest.mark.parametrize(
    ("precision", "given", "got"),
    [
        (None, "bfloat16", "float32"),
        (None, "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("low", "float32", "bfloat16"),
        ("any", "bfloat16", "bfloat16"),
        ("any", "float32", "float32"),
    ],
)
def test_a_custom_operation_runs_as_declared(precision, given, got):
    seen = []

    @rx.custom_op(precision=precision)
    def double(x):
        seen.append(x.dtype)
        return x * 2

    double.defvjps(x=lambda g: g * 2)
    x = leaf(3, dtype=given)
    with rx.autocast("bfloat16"):
        y = double(x)
    assert seen == [got] and y.dtype == got
    y.backward(np.ones(3, got))
    assert x.grad.dtype == given
    assert double(x).dtype == given  # outside, whatever it is given


def test_a_wrong_precision_is_refused():
    with pytest.raises(ValueError, match="precision must be 'low', 'float32' or 'any', got 'half'"):
        rx.custom_op(lambda x: x, precision="half")


# --------------------------------------------------------------------------------- blocks


def test_blocks_nest_and_switch_off():
    x = leaf(2, 2)
    assert _autocast.active_dtype() is None
    with rx.autocast("bfloat16"):
        with rx.autocast(None):
            assert (x @ x).dtype == "float32"
            with rx.autocast(rx.float16):
                assert (x @ x).dtype == "float16"
        with rx.no_grad():
            y = x @ x
            assert y.dtype == "bfloat16" and not y.requires_grad
        assert (x @ x).dtype == "bfloat16"
    assert (x @ x).dtype == "float32"
    with pytest.raises(ZeroDivisionError), rx.autocast("bfloat16"):
        raise ZeroDivisionError
    assert _autocast.active_dtype() is None and state.casts is None


def test_functions_and_generators_can_be_decorated():
    x = leaf(2, 2)

    @rx.autocast("bfloat16")
    def product():
        return x @ x

    @rx.autocast("bfloat16")
    def products():
        yield x @ x
        yield x @ x

    assert product().dtype == "bfloat16"
    found = products()
    assert next(found).dtype == "bfloat16"
    assert (x @ x).dtype == "float32"
    assert next(found).dtype == "bfloat16"


def test_blocks_of_both_kinds_may_end_out_of_turn():
    def off():
        with rx.no_grad():
            yield

    def low():
        with rx.autocast("bfloat16"):
            yield

    first, second = off(), low()
    next(first), next(second)
    first.close()
    assert rx.is_recording() and _autocast.active_dtype() == "bfloat16"
    second.close()
    assert rx.is_recording() and _autocast.active_dtype() is None


def test_it_is_of_one_thread():
    seen = []
    with rx.autocast("bfloat16"):
        thread = threading.Thread(target=lambda: seen.append(_autocast.active_dtype()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("dtype", ["float32", "int8", "half precision", 3])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16 or None, got"):
        rx.autocast(dtype)


# ------------------------------------------------------------------------- casts of parameters


def used_weights(*outputs):
    """Give the arrays that were multiplied by, as saved for the gradient of the other factor."""
    return [y.node.saved[0] for y in outputs]


def test_a_parameter_is_cast_once_in_the_outermost_block():
    w, x = nn.Parameter((4, 4), init="ones", device="cpu"), leaf(4, 4)
    with rx.autocast("bfloat16"):
        y = x @ w
        with rx.autocast(None), rx.autocast("bfloat16"):
            z = x @ w
        first, again = used_weights(y, z)
        assert first is again and first.dtype == "bfloat16"
        w.assign(w.data + 1)
        changed = x @ w
        assert np.all(used_weights(changed)[0] == 2)
        w.data = np.zeros_like(w.data)  # behind its back
        assert np.all(used_weights(x @ w)[0] == 0)
    with rx.autocast("bfloat16"):
        assert used_weights(x @ w)[0] is not first


def test_a_frozen_parameter_is_cast_once_too():
    w, x = nn.Parameter((4, 4), init="ones", device="cpu", requires_grad=False), leaf(4, 4)
    with rx.autocast("bfloat16"):
        first, again = used_weights(x @ w, x @ w)
    assert first is again


def test_a_computed_tensor_is_cast_once_for_all_that_use_it():
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    with rx.autocast("bfloat16"):
        hidden = rx.tanh(x)
        first, again = (y.node.saved[2] for y in (hidden @ w, hidden @ w))
        assert first is again
        hidden[0] = 0.0  # a new array, and node
        assert np.all((hidden @ w).data[0] == 0)
        del hidden
        assert len(state.casts) == 1  # of w


def test_a_buffer_that_is_refilled_is_cast_again():
    buffer, w = np.ones((4, 4), "float32"), leaf(4, 4)
    x = rx.Tensor(buffer)
    with rx.autocast("bfloat16"):
        assert np.any((x @ w).data != 0)
        buffer[:] = 0
        assert np.all((x @ w).data == 0)


def test_casts_go_with_what_they_were_made_of():
    with rx.autocast("bfloat16"):
        for _ in range(3):
            rx.grad(lambda w: rx.sum(w @ w))(np.ones((2, 2), "float32"))
        gc.collect()
        assert state.casts == {}


def test_a_captured_step_makes_its_own_casts(monkeypatch):
    w, x = nn.Parameter((4, 4), init="ones", device="cpu"), leaf(4, 4)
    with rx.autocast("bfloat16"):
        outside = x @ w
        step = object()
        monkeypatch.setattr(_replay._thread, "recorder", step)
        captured = x @ w, x @ w
        monkeypatch.undo()
        after = x @ w
    first, second, third, last = used_weights(outside, *captured, after)
    assert second is third
    assert first is not second and last is not second


def test_parameters_are_cast_again_after_a_replay(monkeypatch):
    w, x = nn.Parameter((4, 4), init="ones", device="cpu"), leaf(4, 4)
    with rx.autocast("bfloat16"):
        before = x @ w
        w.data[:] = 3  # as a graph does: without the host's knowing
        monkeypatch.setattr(_replay, "_n_replays", 1)
        after = x @ w
    first, second = used_weights(before, after)
    assert np.all(first == 1) and np.all(second == 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Fp8Linear])
def test_a_captured_step_has_the_bits_of_an_eager_one(kind, device):
    found = []
    for capture in (lambda step: step, rx.capture):
        rx.random.seed(0)
        with rx.device(device):
            model = nn.Sequential(kind(32, 32), nn.LayerNorm(32), rx.gelu, nn.Dropout(0.2))
            model = nn.Sequential(model, kind(32, 16))
            optimizer = optim.AdamW(model.parameters(), lr=1e-2)

            def step(x, y, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                with rx.autocast("bfloat16"):
                    loss = rx.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                return loss

            step, losses, seen = capture(step), [], []
            rng = np.random.default_rng(0)
            with rx.autocast("bfloat16"):
                for _ in range(8):
                    x, y = (
                        rx.asarray(rng.standard_normal((32, n)), dtype="float32", device=device)
                        for n in (32, 16)
                    )
                    losses.append(step(x, y).item())
                    with rx.no_grad():
                        seen.append(model(x).numpy())  # with the parameters of now
        found.append([losses, *seen, *(rx.Tensor(p.data).numpy() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert_close(np.asarray(a), np.asarray(b), exact=True)
