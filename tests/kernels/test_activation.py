"""Activation kernels against float64 formulas."""

import numpy as np
import pytest
from scipy.special import erf, expit, log1p

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels.activation import (
    BACKWARD,
    FORWARD,
    activation,
    activation_gradient,
    fits,
    fits_halves,
    gate,
    gate_gradient,
    gate_halves,
    gate_halves_gradient,
)
from rtxarr.testing import assert_close


def softplus(x):
    return np.maximum(x, 0) + log1p(np.exp(-np.abs(x)))


SCALE = np.sqrt(2 / np.pi)
FORMULAS = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(SCALE * (x + 0.044715 * x**3))),
    "mish": lambda x: x * np.tanh(softplus(x)),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": expit,
    "silu": lambda x: x * expit(x),
}


def tanh_slope(x):
    t = np.tanh(SCALE * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * SCALE * (1 + 3 * 0.044715 * x * x)


def mish_slope(x):
    t = np.tanh(softplus(x))
    return t + x * expit(x) * (1 - t * t)


SLOPES = {
    "elu": lambda out: np.where(out > 0, 1.0, out + 1),
    "gelu": lambda x: 0.5 * (1 + erf(x / np.sqrt(2))) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi),
    "gelu_tanh": tanh_slope,
    "mish": mish_slope,
    "relu": lambda out: np.where(out <= 0, 0.0, 1.0),
    "sigmoid": lambda out: out * (1 - out),
    "silu": lambda x: expit(x) * (1 + x * (1 - expit(x))),
}


def lay_out(xp, x, way):
    """Store an array in memory in some way."""
    if way == "shifted":  # not at a multiple of 16 bytes
        wide = xp.asarray(np.concatenate([x.reshape(-1)[:1], x.reshape(-1)]))
        return wide[1:].reshape(x.shape)
    if way == "transposed":
        return xp.asarray(np.ascontiguousarray(x.T)).T
    if way == "gaps":
        return xp.asarray(np.repeat(x, 2, axis=-1))[..., ::2]
    return xp.asarray(x)


def compare(xp, dtype, shape, ways):
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(rx, dtype))
    values = (6 * rng.standard_normal(shape)).astype(np.float32)
    values.reshape(-1)[:4] = [0, -0.0, 80, -80]
    x, g = values.astype(dtype), rng.standard_normal(shape).astype(np.float32).astype(dtype)
    wide, wide_g = x.astype(np.float64), g.astype(np.float64)
    rtol, atol = {2: (1e-2, 1e-2), 4: (2e-6, 1e-6), 8: (1e-12, 1e-12)}[dtype.itemsize]
    device_x, device_g = (lay_out(xp, a, way) for a, way in zip((x, g), ways, strict=True))
    assert fits(device_x, device_g)
    for name in FORWARD:
        got = activation(name, device_x)
        assert (got.shape, got.dtype) == (x.shape, dtype)
        assert_close(rx.Tensor(got).numpy(), FORMULAS[name](wide), rtol=rtol, atol=atol)
    for name in BACKWARD:
        got = activation_gradient(name, device_x, device_g)
        assert (got.shape, got.dtype) == (x.shape, dtype)
        want = wide_g * SLOPES[name](wide)
        # A sigmoid's output lies in (0, 1); here it is anything, so the slope may be large.
        assert_close(rx.Tensor(got).numpy(), want, rtol=rtol, atol=atol * (1 + np.abs(want).max()))


def compare_gates(xp, dtype, shape, ways):
    """In two arrays, and in the halves of the rows of one."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(rx, dtype))
    x, y, g = (rng.standard_normal((3, *shape)) * [[[3]], [[2]], [[1]]]).astype(np.float32)
    x.reshape(-1)[:3] = [0, 80, -80]
    halves = [a.astype(dtype) for a in (y, x, g)]
    wide_y, wide_x, wide_g = (a.astype(np.float64) for a in halves)
    value, key, grad = (lay_out(xp, a, way) for a, way in zip(halves, ways, strict=True))
    rtol, atol = {2: (1e-2, 1e-2), 4: (4e-6, 2e-6), 8: (1e-12, 1e-12)}[dtype.itemsize]
    both = lay_out(xp, np.concatenate(halves[:2], axis=-1), ways[0])
    for name in FORWARD:
        formula = FORMULAS[name](wide_x)
        saved = formula if BACKWARD[name] == "out" else wide_x
        wanted = wide_y * formula, wide_g * formula, wide_g * wide_y * SLOPES[name](saved)
        found = gate(name, value, key), *gate_gradient(name, value, key, grad)
        for got, want in zip(found, wanted, strict=True):
            assert (got.shape, got.dtype) == (x.shape, dtype)
            assert_close(rx.Tensor(got).numpy(), want, rtol=rtol, atol=atol * (1 + abs(want).max()))
        assert fits_halves(both, grad)
        of_both = rx.Tensor(gate_halves_gradient(name, both, grad)).numpy()
        found = [rx.Tensor(a).numpy() for a in found]
        assert_close(rx.Tensor(gate_halves(name, both)).numpy(), found[0], exact=True)
        assert_close(of_both, np.concatenate(found[1:], axis=-1), exact=True)


WAYS = [("plain", "plain"), ("shifted", "plain"), ("transposed", "gaps"), ("gaps", "transposed")]


@pytest.mark.sim
@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_simulated(dtype, ways):
    compare(np, dtype, (3, 7), ways)


@pytest.mark.sim
@pytest.mark.parametrize("ways", [("plain", *way) for way in WAYS], ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("n", [7, 16])
def test_simulated_gates(dtype, ways, n):
    compare_gates(np, dtype, (3, n), ways)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 7), (1000, 33), (512, 1 << 11)], ids=str)
@pytest.mark.parametrize("ways", [("plain", *way) for way in WAYS], ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_gates_on_device(dtype, ways, shape):
    compare_gates(_device.cupy, dtype, shape, ways)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4,), (3, 7), (1000, 33), (2, 3, 1 << 18)], ids=str)
@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_on_device(dtype, ways, shape):
    compare(_device.cupy, dtype, shape, ways)


@pytest.mark.gpu
def test_memory_layout_is_kept():
    x = _device.cupy.ones((2, 5, 6, 8), "float32").transpose(0, 3, 1, 2)
    assert activation("silu", x).strides == x.strides
    assert activation_gradient("silu", x, x.copy(order="C")).strides == x.strides


@pytest.mark.gpu
def test_nan_and_infinities_are_those_of_the_formulas():
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    for name in ("elu", "gelu", "silu", "mish", "relu", "sigmoid"):
        with np.errstate(all="ignore"):
            want = getattr(rx, name)(x)
        assert_close(rx.Tensor(getattr(rx, name)(_device.cupy.asarray(x))).numpy(), want)


def test_what_fits():
    x = np.ones(3, np.float32)
    assert not fits(x)  # on the host
    assert not fits(rx.Tensor(x))
    assert not fits(3.0)
