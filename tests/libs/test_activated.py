"""Layers that GPU libraries compute in one: first with stand-ins on the host, then on a GPU.

Against float64.
"""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, nn
from rtxarr.libs import dnn, tile
from rtxarr.ops import _activated, _conv, _gates
from rtxarr.testing import assert_close

from .conftest import FakeArray
from .products import gelu, host

HALVES = ["float16", "bfloat16"]
# Of a result, relative to its largest element.
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-8}
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: np.asarray(rx.gelu(x)),
    "gelu_tanh": gelu,
}
PLACES = ["stand-in", pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def array(request, monkeypatch):
    """Make an array on a GPU, or one that cuBLASLt's stand-in takes for such."""
    if request.param == "cupy":
        request.getfixturevalue("poisoned")
        return _device.cupy.asarray
    fake = request.getfixturevalue("fake")
    for module in (_activated, _gates):
        monkeypatch.setattr(module, "is_device_array", lambda x: isinstance(x, FakeArray))
    return fake.array


def close(got, want, dtype):
    got, want = host(got.data if isinstance(got, rx.Tensor) else got), np.asarray(want)
    assert got.shape == want.shape
    assert np.all(np.isfinite(got))
    assert np.max(np.abs(got - want), initial=0) <= TOLERANCE[dtype] * np.abs(want).max(initial=1)


def draw(array, dtype, *shapes):
    rng = np.random.default_rng(0)
    kind = np.dtype(getattr(rx, dtype))
    values = [rng.standard_normal(s).astype(np.float32).astype(kind) for s in shapes]
    return [array(v) for v in values], [v.astype(np.float64) for v in values]


def slopes(name, x):
    return (FORMULAS[name](x + 1e-6) - FORMULAS[name](x - 1e-6)) / 2e-6


SHAPES = [((16, 24), 40), ((2, 3, 16), 8), ((5, 8), 13), ((24,), 16), ((0, 8), 8)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("shape", "n"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
@pytest.mark.parametrize("name", FORMULAS)
def test_linear(array, name, dtype, shape, n, has_bias):
    (x, w, b, g), wide = draw(array, dtype, shape, (n, shape[-1]), (n,), (*shape[:-1], n))
    before = wide[0] @ wide[1].T + (wide[2] if has_bias else 0)
    close(rx.linear(x, w, b if has_bias else None, activation=name), FORMULAS[name](before), dtype)
    x, w, b = (rx.Tensor(a, requires_grad=True) for a in (x, w, b))
    out = rx.linear(x, w, b if has_bias else None, activation=name)
    close(out, FORMULAS[name](before), dtype)
    out.backward(g)
    of_sum = wide[3] * slopes(name, before)
    close(x.grad, of_sum @ wide[1], dtype)
    rows = of_sum.reshape(-1, n)
    close(w.grad, rows.T @ wide[0].reshape(-1, shape[-1]), dtype)
    if has_bias:
        close(b.grad, rows.sum(axis=0), dtype)


def test_what_the_product_takes_in(fake, monkeypatch):
    monkeypatch.setattr(_activated, "is_device_array", lambda x: isinstance(x, FakeArray))
    monkeypatch.setattr(_activated, "on_gpu", lambda x: True)

    def epilogues(name, dtype, *, tracked):
        (x, w, b), _ = draw(fake.array, dtype, (16, 8), (8, 8), (8,))
        w = rx.Tensor(w, requires_grad=tracked)
        before = len(fake.calls)
        rx.linear(x, w, b, activation=name)
        return [desc[7] for desc, *_ in fake.calls[before:]]

    relu, gelu, kept = 6, 36, 164
    for dtype in ("float32", "bfloat16"):
        for tracked in (True, False):
            assert epilogues("relu", dtype, tracked=tracked) == [relu]
    assert epilogues("gelu_tanh", "bfloat16", tracked=False) == [gelu]
    assert epilogues("gelu_tanh", "bfloat16", tracked=True) == [kept]
    # The library's is too coarse for float32, and no other is the exact one.
    assert relu not in epilogues("relu", "float64", tracked=True)
    for name, dtype in (("gelu_tanh", "float32"), ("gelu", "bfloat16"), ("silu", "bfloat16")):
        for tracked in (True, False):
            assert not {gelu, kept} & {*epilogues(name, dtype, tracked=tracked)}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", [(64, 32, 48), (7, 24, 16)], ids=str)
def test_gated_linear(array, name, dtype, size, has_bias):
    m, k, n = size
    shapes = (m, k), (n, k), (n, k), (n,), (n,), (m, n)
    (x, w, v, b, c, g), wide = draw(array, dtype, *shapes)
    b, c = (b, c) if has_bias else (None, None)
    key, up = (wide[0] @ wide[i + 1].T + (wide[i + 3] if has_bias else 0) for i in range(2))
    want = FORMULAS[name](key) * up
    close(rx.gated_linear(x, w, v, b, c, activation=name), want, dtype)
    tensors = [a if a is None else rx.Tensor(a, requires_grad=True) for a in (x, w, v, b, c)]
    out = rx.gated_linear(*tensors, activation=name)
    close(out, want, dtype)
    out.backward(g)
    of_key, of_up = wide[5] * up * slopes(name, key), wide[5] * FORMULAS[name](key)
    close(tensors[0].grad, of_key @ wide[1] + of_up @ wide[2], dtype)
    close(tensors[1].grad, of_key.T @ wide[0], dtype)
    close(tensors[2].grad, of_up.T @ wide[0], dtype)
    if has_bias:
        close(tensors[3].grad, of_key.sum(axis=0), dtype)
        close(tensors[4].grad, of_up.sum(axis=0), dtype)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 14), (10, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
@pytest.mark.parametrize(
    ("name", "gate"), [("glu", "sigmoid"), ("geglu", "gelu"), ("swiglu", "silu")]
)
def test_halves(array, name, gate, dtype, shape, axis):
    (x,), (wide,) = draw(array, dtype, shape)
    value, key = np.split(wide, 2, axis=axis)
    x = rx.Tensor(x, requires_grad=True)
    out = getattr(rx, name)(x, axis=axis)
    close(out, value * FORMULAS[gate](key), dtype)
    g = np.cos(np.arange(out.size)).reshape(out.shape)
    rx.sum(out * array(g.astype(x.dtype))).backward()
    g = g.astype(x.dtype).astype(float)
    of_value, of_key = g * FORMULAS[gate](key), g * value * slopes(gate, key)
    close(x.grad, np.concatenate([of_value, of_key], axis=axis), dtype)


@pytest.mark.gpu
def test_rows_that_where_leaves_out_give_their_halves_no_nan():
    x = _device.cupy.asarray([[1.0, np.inf], [2.0, 3.0]])
    x = rx.Tensor(x, requires_grad=True)
    rx.sum(rx.where(_device.cupy.asarray([[False], [True]]), rx.swiglu(x), 0)).backward()
    assert host(x.grad)[0].tolist() == [0, 0]


def test_when_our_kernels_are_asked(monkeypatch):
    """In half precision, at sizes that pay, where nothing is recorded and cuTile is there."""
    asked = []

    def fused(run, *args):
        asked.append(run.__name__)

    monkeypatch.setattr(tile, "_fused", fused)
    monkeypatch.setattr(tile, "_can_compile", lambda: True)
    monkeypatch.setattr(_activated, "is_device_array", lambda x: True)
    monkeypatch.setattr(_activated, "on_gpu", lambda x: True)
    monkeypatch.setattr(_activated, "try_matmul", lambda *args, **options: None)
    x, w = np.ones((2, 8), rx.bfloat16), np.ones((16, 8), rx.bfloat16)

    def calls(function, *args, **options):
        asked.clear()
        function(*args, **options)
        return asked

    tracked = rx.Tensor(w, requires_grad=True)
    assert calls(rx.gated_linear, x, w, w) == ["_gated_linear"]
    assert calls(rx.gated_linear, x, tracked, w) == []
    with rx.no_grad():
        assert calls(rx.gated_linear, x, tracked, w) == ["_gated_linear"]
    assert calls(rx.gated_linear, x, w, w, w[:, 0], None) == []
    assert calls(rx.gated_linear, *(a.astype("float32") for a in (x, w, w))) == []
    for name in ("silu", "gelu", "sigmoid"):
        assert calls(rx.linear, x, w, activation=name) == ["_linear"]
        assert calls(rx.linear, x, tracked, activation=name) == []
    for name in ("relu", "gelu_tanh"):  # the library takes those
        assert calls(rx.linear, x, w, activation=name) == []
    monkeypatch.setattr(tile, "pays", lambda *size: False)
    assert calls(rx.gated_linear, x, w, w) == calls(rx.linear, x, w, activation="silu") == []


# -------------------------------------------------------------------------------- convolutions


@pytest.fixture(params=PLACES)
def image(request, monkeypatch):
    """Likewise for cuDNN."""
    if request.param == "cupy":
        pytest.importorskip("cudnn")
        return _device.cupy.asarray
    cupy = request.getfixturevalue("fake_dnn").cupy
    monkeypatch.setattr(_conv, "on_gpu", lambda x: True)
    return cupy.asarray


def conv_gradients(arrays, g, activation, **options):
    tensors = [a if a is None else rx.Tensor(a, requires_grad=True) for a in arrays]
    *arrays, residual = tensors
    out = rx.conv2d(*arrays, residual=residual, activation=activation, **options)
    rx.sum(out * g).backward()
    return [out.data, *(None if t is None else t.grad for t in tensors)]


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("adds", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_convolution(image, dtype, activation, adds, last):
    before = dnn.status().refused.copy()
    shapes = (2, 8, 6, 5), (16, 8, 3, 3), (16,), (2, 16, 6, 5), (2, 16, 6, 5)
    arrays, wide = draw(image, dtype, *shapes)
    if last:
        for i in (0, 1, 3, 4):
            arrays[i] = arrays[i].transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    arrays, wide = ((*a[:3], a[3] if adds else None, a[4]) for a in (arrays, wide))
    want = conv_gradients(wide[:4], wide[4], activation, padding=1)
    got = conv_gradients(arrays[:4], arrays[4], activation, padding=1)
    for mine, its in zip(got, want, strict=True):
        if its is not None:
            close(mine, its, dtype)
    *given, residual = arrays[:4]
    options = {"residual": residual, "activation": activation, "padding": 1}
    close(rx.conv2d(*given, **options), want[0], dtype)
    found = dnn.status().refused - before
    # Where there is no plan for all of it. (The stand-in's ReLU gives a plain array to its rule.)
    found.pop("an array that is not CuPy's", None)
    assert all(" after a convolution in " in reason for reason in found), found


def test_a_residual_of_another_dtype_is_added_apart(fake_dnn, monkeypatch):
    monkeypatch.setattr(_conv, "on_gpu", lambda x: True)
    (x, w), wide = draw(fake_dnn.cupy.asarray, "float16", (1, 8, 4, 4), (8, 8, 1, 1))
    residual = fake_dnn.cupy.asarray(np.full((1, 8, 4, 4), 0.25, np.float32))
    got = rx.conv2d(x, w, residual=residual, activation="relu")
    assert got.dtype == np.float32
    close(got, np.asarray(rx.relu(rx.conv2d(*wide) + 0.25)), "float16")
    assert dnn.status().refused == {}


def test_silu_of_a_convolution_is_apart_where_its_rule_needs_what_comes_before(
    fake_dnn, monkeypatch
):
    asked = []
    found = _conv.try_convolution

    def note(*args, **options):
        asked.append(options.get("activation"))
        return found(*args, **options)

    monkeypatch.setattr(_conv, "try_convolution", note)
    monkeypatch.setattr(_conv, "on_gpu", lambda x: True)
    (x, w), _ = draw(fake_dnn.cupy.asarray, "float16", (1, 8, 4, 4), (8, 8, 1, 1))
    tracked = rx.Tensor(w, requires_grad=True)
    for name, weight, want in (
        ("silu", w, "silu"), ("silu", tracked, None), ("relu", w, "relu"), ("relu", tracked, "relu")
    ):  # fmt: skip
        asked.clear()
        rx.conv2d(x, weight, activation=name)
        assert asked == [want]


# ------------------------------------------------------------------------------ captured steps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_have_the_bits_of_eager_ones(dtype):
    cupy = _device.cupy
    (x, image, w, v, b, kernel), _ = draw(
        cupy.asarray, "float32", (64, 32), (2, 8, 6, 6), (32, 32), (32, 32), (32,), (8, 8, 3, 3)
    )

    def run(wrap):
        weights = [rx.Tensor(a.copy(), requires_grad=True) for a in (w, v, b, kernel)]

        def step(x, image):
            for weight in weights:
                weight.grad = None
            with rx.autocast(dtype if dtype != "float32" else None):
                y = rx.linear(x, weights[0], weights[2], activation="relu")
                y = rx.linear(y, weights[1], weights[2], activation="gelu_tanh")
                y = rx.gated_linear(y, weights[0], weights[1], weights[2], weights[2])
                z = rx.conv2d(image, weights[3], padding=1, residual=image, activation="relu")
                loss = rx.sum(y * y) + rx.sum(z * z)
            loss.backward()
            return loss

        step = wrap(step)
        for _ in range(4):
            loss = step(x, image)
        return [host(a) for a in (loss.data, *(t.grad for t in weights))]

    for got, want in zip(run(rx.capture), run(lambda step: step), strict=True):
        assert_close(got, want, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu", "swiglu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks(dtype, activation):
    def gradients(device, dtype):
        rx.random.seed(0)
        block = nn.TransformerBlock(32, 2, activation=activation, dtype="float64", device="cpu")
        block.to_device(device).astype(dtype)
        x = np.random.default_rng(0).standard_normal((2, 16, 32)).astype(np.float32)
        x = rx.Tensor(rx.asarray(x, dtype=dtype, device=device), requires_grad=True)
        out = block(x)
        rx.sum(rx.astype(out, "float64") ** 2).backward()
        with rx.no_grad():
            again = block(x)
        return [
            host(a) for a in (out.data, again.data, x.grad, *(p.grad for p in block.parameters()))
        ]

    for got, want in zip(gradients("cuda:0", dtype), gradients("cpu", "float64"), strict=True):
        error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
        assert error < {"float32": 1e-4, "bfloat16": 0.3}[dtype]
