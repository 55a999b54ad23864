"""The kernels of the normalizations against the formula in float64."""

import os

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import norm
from rtxarr.testing import TOLERANCES, assert_close

DTYPES = ["float32", "float16", "bfloat16", "float64"]
SMALL = [(1, 1), (5, 3), (3, 8), (2, 3, 24), (2, 70)]
LARGE = [(1, 1), (70_001, 5), (1000, 64), (333, 768), (4099, 1000), (2000, 1024), (77, 8192)]
LARGE += [(65, 8200), (9, 33_000), (3, 65_536), (2, 65_535)]


if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    from rtxarr.kernels import _plan


def near(got, want, dtype):
    """Compare, allowing for the rounding of sums of many terms."""
    rtol, atol = TOLERANCES[dtype]
    assert_close(got, want, rtol=rtol, atol=atol * max(1.0, np.abs(want).max(initial=0.0)))


def formula(x, weight, bias, grad, centred, eps):
    """Give the result and the gradients of x, weight and bias; all in float64."""
    x, weight, bias, grad = (np.asarray(a, np.float64) for a in (x, weight, bias, grad))
    mean = x.mean(-1, keepdims=True) if centred else 0.0
    scale = ((x - mean) ** 2).mean(-1, keepdims=True)
    scale = (scale + eps) ** -0.5
    hat = (x - mean) * scale
    g = grad * weight
    of_x = g - hat * (g * hat).mean(-1, keepdims=True)
    if centred:
        of_x -= g.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return hat * weight + bias, of_x * scale, (grad * hat).sum(rows), grad.sum(rows)


def make(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    kind = getattr(ml_dtypes, dtype, dtype)
    x, grad = rng.standard_normal((2, *shape))
    x = 2 * x + 1
    weight, bias = (rng.standard_normal(shape[-1:]) for _ in range(2))
    return [a.astype(kind) for a in (x, weight, bias, grad)]


def run(place, function, arrays, grad):
    """Give the result of a function of arrays on a device and its gradients."""
    tensors = [rx.Tensor(_device.to_device(a, place), requires_grad=True) for a in arrays]
    out = function(*tensors)
    out.backward(_device.to_device(grad, place))
    return out, *(t.grad for t in tensors)


def shapes(place, dtype):
    if place != "cpu":
        return LARGE
    return SMALL if dtype in ("float32", "bfloat16") else SMALL[1:3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(place, dtype):
    for shape in shapes(place, dtype):
        x, weight, bias, grad = make(shape, dtype)
        assert norm.fits(_device.to_device(x, place))
        got = run(place, lambda *a: rx.layer_norm(*a, eps=1e-3), (x, weight, bias), grad)
        for a, b in zip(got, formula(x, weight, bias, grad, True, 1e-3), strict=True):
            assert a.dtype == x.dtype
            near(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(place, dtype):
    for shape in shapes(place, dtype):
        x, weight, _, grad = make(shape, dtype)
        got = run(place, lambda *a: rx.rms_norm(*a, eps=1e-3), (x, weight), grad)
        want = formula(x, weight, 0.0, grad, False, 1e-3)[:3]
        for a, b in zip(got, want, strict=True):
            near(a, b, dtype)


@pytest.mark.sim
@pytest.mark.parametrize("centred", [True, False])
def test_rows_longer_than_the_registers(monkeypatch, centred):
    monkeypatch.setattr(_plan, "_MOST_LANES", 2)
    monkeypatch.setattr(norm, "_FEWEST_BLOCKS", 1)
    for shape in ((3, 72), (11, 70)):
        x, weight, bias, grad = make(shape, "float32")
        arrays = (x, weight, bias) if centred else (x, weight)
        got = run("cpu", rx.layer_norm if centred else rx.rms_norm, arrays, grad)
        want = formula(
            x, weight, bias if centred else 0.0, grad, centred, 1e-5 if centred else 1e-6
        )
        for a, b in zip(got, want, strict=False):
            near(a, b, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_parameters_and_over_several_axes(place, dtype):
    shape = (3, 2, 4, 8) if place == "cpu" else (100, 3, 16, 40)
    x, _, _, grad = make(shape, dtype)
    flat = (*shape[:2], shape[2] * shape[3])
    got = run(place, lambda x: rx.layer_norm(x, n_axes=2), (x,), grad)
    want = formula(x.reshape(flat), 1.0, 0.0, grad.reshape(flat), True, 1e-5)[:2]
    for a, b in zip(got, want, strict=True):
        near(a, b.reshape(shape), dtype)


def test_bias_alone_gets_its_gradient(place):
    x, weight, bias, grad = make((5, 8), "float32")
    x, weight, grad = (_device.to_device(a, place) for a in (x, weight, grad))
    b = rx.Tensor(_device.to_device(bias, place), requires_grad=True)
    rx.layer_norm(x, weight, b).backward(grad)
    near(b.grad, np.sum(_device.to_device(grad, "cpu"), axis=0), "float32")


def test_views_that_are_not_aligned_or_not_contiguous(place):
    x, weight, bias, grad = make((6, 16), "float32")
    want = formula(x, weight, bias, grad, True, 1e-5)
    storage = _device.to_device(np.zeros(6 * 16 + 1, np.float32), place)
    storage[1:] = _device.to_device(x.reshape(-1), place)
    odd = storage[1:].reshape(6, 16)
    turned = _device.to_device(np.ascontiguousarray(x.T), place).T
    for view in (odd, turned):
        t = rx.Tensor(view, requires_grad=True)
        out = rx.layer_norm(t, *(_device.to_device(a, place) for a in (weight, bias)))
        out.backward(_device.to_device(np.ascontiguousarray(grad.T), place).T)
        near(out, want[0], "float32")
        near(t.grad, want[1], "float32")


def test_rows_with_a_large_mean_keep_their_deviation(place):
    """The mean is taken off before anything is squared."""
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32) + 4096
    got = rx.layer_norm(_device.to_device(x, place))
    wide = x.astype(np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_nothing_to_normalize(place):
    x = rx.Tensor(_device.to_device(np.zeros((0, 3), np.float32), place), requires_grad=True)
    assert rx.layer_norm(x).shape == (0, 3)


@pytest.mark.gpu
def test_repeated_runs_give_equal_bits():
    arrays = make((5000, 1024), "bfloat16")
    first = run("cuda:0", rx.layer_norm, arrays[:3], arrays[3])
    for _ in range(3):
        for a, b in zip(run("cuda:0", rx.layer_norm, arrays[:3], arrays[3]), first, strict=True):
            assert_close(a, b, exact=True)
