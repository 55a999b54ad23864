"""Fp8Linear: what it computes, how its scales follow the past, and that it trains."""

import copy
import pickle

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.kernels import fp8
from rtxarr.testing import assert_close

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def made(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rounded(x, scale, kind):
    """Round to multiples of a scale that the format has."""
    codes = fp8.quantize(x.reshape(-1, x.shape[-1]), np.float32([scale]), kind, np.zeros(1, "f4"))
    return (fp8.decode(codes, kind) * np.float32(scale)).reshape(x.shape).astype(np.float64)


def scale_of(x, kind, margin=1.0):
    return np.float32(np.abs(x).max() / (fp8.LARGEST[kind] / margin))


def layer_of(n_in=32, n_out=16, *, device="cpu", **options):
    rx.random.seed(1)
    return nn.Fp8Linear(n_in, n_out, device=device, bias_init="ones", **options)


def numpy_of(x):
    return rx.Tensor(x).numpy().astype(np.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("margin", [1.0, 2.0])
def test_products_and_gradients_are_those_of_rounded_numbers(device, margin):
    layer = layer_of(device=device, margin=margin)
    x, g = made(2, 24, 32), made(2, 24, 16, seed=1)
    tensor = rx.Tensor(rx.asarray(x, device=device), requires_grad=True)
    y = layer(tensor)
    y.backward(rx.asarray(g, device=device))
    w = layer.weight.numpy()
    x8 = rounded(x, scale_of(x, "e4m3", margin), "e4m3")
    w8 = rounded(w, scale_of(w, "e4m3", margin), "e4m3")
    g8 = rounded(g, scale_of(g, "e5m2", margin), "e5m2")
    close = {"rtol": 1e-3, "atol": 4e-3}  # the tensor cores add with some 14 bits
    assert y.dtype == tensor.grad.dtype == layer.weight.grad.dtype == "float32"
    assert_close(y.numpy(), (x8 @ w8.T + 1).astype("float32"), **close)
    assert_close(numpy_of(tensor.grad), g8 @ w8, **close)
    want = np.einsum("bmn,bmk->nk", g8, x8)
    assert_close(numpy_of(layer.weight.grad), want, rtol=1e-3, atol=5e-2)
    assert_close(numpy_of(layer.bias.grad), g.sum(axis=(0, 1), dtype="float64"), rtol=1e-5)
    # Rounding to three bits is not nothing.
    assert np.abs(x8 - x).max() > 0.05 / margin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_in_gives_half_precision_out(device, dtype):
    layer = layer_of(device=device)
    x = rx.Tensor(rx.asarray(made(32, 32), dtype=dtype, device=device), requires_grad=True)
    y = layer(x)
    assert y.dtype == dtype
    rx.sum(y).backward()
    assert x.grad.dtype == dtype and layer.weight.grad.dtype == "float32"
    with rx.autocast(dtype):
        assert layer(rx.asarray(made(32, 32), device=device)).dtype == dtype
    assert layer(rx.asarray(made(32, 32), device=device)).dtype == "float32"
    halved = layer.astype(dtype)
    assert halved(x).dtype == dtype
    assert halved.scales.dtype == "float32"  # the state is what it was


def test_scales_are_those_of_the_steps_before():
    layer = layer_of(n_steps=2)
    sizes = [1.0, 4.0, 2.0, 0.5, 0.5, 8.0]
    used = []
    for size in sizes:
        x = made(16, 32)
        layer(x * np.float32(size / np.abs(x).max()))
        used.append(layer.scales.numpy()[0, 0] * 448)
    # The first is its own; then the larger of the last two.
    assert_close(np.asarray(used), np.asarray([1, 1, 4, 4, 2, 0.5]), rtol=1e-6)
    assert layer.amax.numpy()[0, 0] == pytest.approx(8.0)


def test_what_outgrows_the_past_is_limited():
    layer = layer_of(16, 16, bias=False)
    layer.weight.assign(np.eye(16, dtype="float32"))
    layer(np.eye(16, dtype="float32"))
    y = layer(np.eye(16, dtype="float32") * 5)
    assert_close(y.numpy(), np.eye(16, dtype="float32"), rtol=1e-6)
    y = layer(np.eye(16, dtype="float32") * 5)
    assert_close(y.numpy(), 5 * np.eye(16, dtype="float32"), rtol=1e-6)


def test_an_overflow_is_seen_and_does_not_stay():
    layer = layer_of()
    x = rx.Tensor(made(16, 32), requires_grad=True)
    layer(x).backward(made(16, 16))
    layer(x).backward(np.full((16, 16), np.inf, "float32"))
    assert np.isnan(layer.weight.grad).all()  # what a loss scaler looks for
    layer.zero_grad()
    layer(x).backward(made(16, 16))
    assert np.isfinite(layer.weight.grad).all()
    assert np.isfinite(layer.scales.numpy()).all()


def test_an_input_of_zeros_has_a_scale():
    layer = layer_of()
    y = layer(np.zeros((16, 32), "float32"))
    assert_close(y.numpy(), np.ones((16, 16), "float32"), exact=True)
    assert layer.scales.numpy()[0, 0] == 1


def test_evaluation_changes_nothing():
    layer = layer_of()
    layer(made(16, 32))
    layer.eval()
    before = {name: x.copy() for name, x in layer.state_dict().items()}
    first = layer(made(16, 32, seed=2) * 3)
    assert_close(layer(made(16, 32, seed=2) * 3).data, first.data, exact=True)
    for name, x in layer.state_dict().items():
        assert_close(x, before[name], exact=True)


@pytest.fixture
def rounded_weights(monkeypatch):
    """Give the list of the weights that are rounded, and whether their transposes are."""
    found = []
    quantize = fp8.quantize

    def noted(x, scale, kind, amax, *, turned):
        if x.shape == (16, 32):
            found.append((x, turned))
        return quantize(x, scale, kind, amax, turned=turned)

    monkeypatch.setattr(fp8, "quantize", noted)
    return found


def test_a_weight_is_rounded_once_a_step(rounded_weights):
    layer, x = layer_of(), rx.Tensor(made(48, 32), requires_grad=True)
    for n_done in range(3):
        first, second = layer(x), layer(x)
        assert len(rounded_weights) == n_done + 1
        assert_close(first.data, second.data, rtol=0.2)
        (rx.sum(first) + rx.sum(second)).backward()
    del first, second
    layer(x)
    layer.weight.assign(layer.weight.data * 2)
    y = layer(x)  # while the graph of the call before is gone
    again = layer(x)
    layer.weight.assign(layer.weight.data * 2)
    layer(x)
    assert len(rounded_weights) == 6
    assert y.shape == again.shape


def test_a_weight_is_rounded_once_for_good_in_evaluation(rounded_weights):
    layer, x = layer_of(), made(48, 32)
    layer(x)
    layer.eval()
    first = layer(x).data
    rounded_weights.clear()
    assert_close(layer(x).data, first, exact=True)
    assert not rounded_weights
    layer.load_state_dict(layer.state_dict())
    assert_close(layer(x).data, first, exact=True)
    assert len(rounded_weights) == 1
    layer.weight.assign(layer.weight.data * 0.5)
    assert not np.array_equal(layer(x).data, first)
    layer.train()(x)
    layer.eval()(x)
    assert len(rounded_weights) == 4


def test_transposes_are_made_where_a_gradient_needs_them(rounded_weights):
    layer, x = layer_of(), made(48, 32)
    layer(x)  # no gradient of the input
    y = layer(rx.Tensor(x, requires_grad=True))
    with rx.no_grad():
        layer(rx.Tensor(x, requires_grad=True))
    del y
    with rx.no_grad():
        layer(rx.Tensor(x, requires_grad=True))
    assert [turned for _, turned in rounded_weights] == [False, True, False]


def test_a_copy_of_a_layer_has_its_own_weight():
    layer = layer_of()
    layer(made(16, 32))
    layer.eval()
    want = layer(made(16, 32)).data
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(again(made(16, 32)).data, want, exact=True)
        again.weight.assign(again.weight.data * 2)
        assert not np.array_equal(again(made(16, 32)).data, want)
    assert_close(layer(made(16, 32)).data, want, exact=True)


def steps(layer, optimizer, n, first=0):
    for step in range(first, first + n):
        x = made(32, 32, seed=step)
        optimizer.zero_grad()
        rx.mean((layer(x) - x[:, :16]) ** 2).backward()
        optimizer.step()


def test_a_saved_layer_goes_on_to_the_bit():
    whole, part = layer_of(), layer_of()
    optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (whole, part)]
    steps(whole, optimizers[0], 6)
    steps(part, optimizers[1], 3)
    again = nn.Fp8Linear(32, 16, device="cpu")
    optimizer = optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(part.state_dict())
    optimizer.load_state_dict(optimizers[1].state_dict())
    steps(again, optimizer, 3, first=3)
    for name, x in whole.state_dict().items():
        assert_close(again.state_dict()[name], x, exact=True)


def test_a_checkpoint_repeats_with_the_same_scales():
    grads = []
    for call in (lambda f, x: f(x), rx.checkpoint):
        model = nn.Sequential(layer_of(), rx.gelu, layer_of(16, 16))
        x = rx.Tensor(made(32, 32), requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            rx.mean(call(model, x) ** 2).backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
        grads[-1] += [b.data for b in model.buffers()]
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, exact=True)


def test_checkpoints_of_one_layer_repeat_each_with_its_scales(rounded_weights):
    grads = []
    for call in (lambda f, x: f(x), rx.checkpoint, lambda f, x: rx.checkpoint(rx.checkpoint, f, x)):
        layer = layer_of(32, 16)
        x = rx.Tensor(made(32, 32), requires_grad=True)
        rounded_weights.clear()
        for step in range(3):
            layer.zero_grad()
            x.grad = None
            parts = [call(layer, x * (step + n)) for n in (1, 2, 3)]
            rx.mean((parts[0] * parts[1] - parts[2]) ** 2).backward()
        assert len(rounded_weights) == 3
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
        grads[-1] += [b.data for b in layer.buffers()]
    for found in grads[1:]:
        for a, b in zip(grads[0], found, strict=True):
            assert_close(a, b, exact=True)


@pytest.mark.parametrize("device", DEVICES)
def test_it_trains_almost_as_a_linear_layer_does(device):
    losses = []
    target = made(64, 16, seed=9)
    for kind in (nn.Linear, nn.Fp8Linear):
        rx.random.seed(0)
        with rx.device(device):
            model = nn.Sequential(kind(64, 64), rx.gelu, kind(64, 16))
            optimizer = optim.Adam(model.parameters(), lr=3e-3)
            for step in range(150):
                x = rx.asarray(made(64, 64, seed=step), device=device)
                y = rx.asarray(made(64, 64, seed=step) @ target / 8, device=device)
                optimizer.zero_grad()
                loss = rx.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    assert losses[1] < 1.25 * losses[0] + 0.01
    assert losses[0] < 0.2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_captured_steps_are_eager_ones_to_the_bit(device, checkpointed):
    states = []
    for capture in (lambda f: f, rx.capture):
        rx.random.seed(0)
        with rx.device(device):
            model = nn.Sequential(nn.Fp8Linear(64, 64), rx.gelu, nn.Fp8Linear(64, 16))
            optimizer = optim.Adam(model.parameters(), lr=3e-3)

            @capture
            def step(x, y, *, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                for part in (x[:32], x[32:]):  # two forward and backward passes a step
                    with rx.autocast("bfloat16"):
                        out = rx.checkpoint(model, part) if checkpointed else model(part)
                    rx.mse_loss(out, y[:32]).backward()
                optimizer.step()

            for i in range(6):
                x, y = (rx.asarray(made(64, n, seed=i), device=device) for n in (64, 16))
                step(x, y)
        states.append(model.state_dict())
    for name, x in states[0].items():
        assert_close(numpy_of(x), numpy_of(states[1][name]), exact=True)


def test_a_second_derivative_is_refused():
    layer = layer_of()
    x = rx.Tensor(made(16, 32), requires_grad=True)
    with pytest.raises(TypeError, match="fp8 layers can be differentiated once"):
        rx.autograd.gradients([rx.sum(layer(x))], [x], create_graph=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_steps": 0}, "n_steps must be an int >= 1, got 0"),
        ({"margin": 0.5}, "margin must be at least 1 and finite, got 0.5"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nn.Fp8Linear(16, 16, **options)


def test_wrong_inputs_are_refused():
    layer = layer_of()
    with pytest.raises(ValueError, match=r"x must have shape \(..., 32\), got \(4, 31\)"):
        layer(made(4, 31))
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="x must be a NumPy or CuPy array"):
        layer(strict.ones((4, 32), dtype=strict.float32))
    assert repr(layer) == "Fp8Linear(32, 16)"


def test_an_empty_batch_gives_nothing():
    layer = layer_of()
    x = rx.Tensor(np.zeros((0, 32), "float32"), requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 16)
    rx.sum(y).backward()
    assert not layer.weight.grad.any()
