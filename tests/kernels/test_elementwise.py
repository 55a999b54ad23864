"""Elementwise kernels against NumPy in float64, rounded once."""

import itertools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels.elementwise import BINARY, UNARY, apply, convert, fits, fits_conversion
from rtxarr.testing import assert_close

DTYPES = ["float32", "float16", "bfloat16"]
EXACT = {"abs", "negative", "add", "multiply", "subtract", "maximum", "minimum", "square"}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan]


def lay_out(xp, x, way):
    if way == "shifted":  # not at a multiple of 16 bytes
        return xp.asarray(np.concatenate([x.reshape(-1)[:1], x.reshape(-1)]))[1:].reshape(x.shape)
    if way == "transposed":
        return xp.asarray(np.ascontiguousarray(x.T)).T
    if way == "gaps":
        return xp.asarray(np.repeat(x, 2, axis=-1))[..., ::2]
    return xp.asarray(x)


def values(rng, shape, dtype, special):
    x = rng.standard_normal(shape).astype(np.float32).reshape(-1)
    if special:
        n = min(x.size, len(SPECIAL))
        x[:n] = SPECIAL[:n]
    return rng.permutation(x).reshape(shape).astype(getattr(rx, dtype))


def check(got, want, name):
    host = rx.Tensor(got).numpy()
    want = np.asarray(want, np.float32).astype(host.dtype)
    if name in EXACT or host.dtype.itemsize == 2 and name in ("divide", "sqrt"):
        assert_close(host, want, exact=True)
    else:
        assert_close(host, want, rtol=2e-6 if host.dtype == np.float32 else 1e-2)


def compare(xp, dtype, shape, ways):
    rng = np.random.default_rng(0)
    special = xp is not np  # the simulator warns of them
    x, y = (values(rng, shape, dtype, special) for _ in range(2))
    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    on_x, on_y = lay_out(xp, x, ways[0]), lay_out(xp, y, ways[1])
    with np.errstate(all="ignore"):
        for name in UNARY:
            assert fits(on_x)
            if not special and name in ("log", "sqrt"):
                positive = np.abs(x) + np.asarray(0.5, x.dtype)
                want = getattr(np, name)(positive.astype(np.float32))
                check(apply(name, lay_out(xp, positive, ways[0])), want, name)
            else:
                check(apply(name, on_x), getattr(np, name)(wide_x), name)
        for name in BINARY:
            function = getattr(np, name)
            assert fits(on_x, on_y)
            check(apply(name, on_x, on_y), function(wide_x, wide_y), name)
            for number in (0.3, -2):
                number32 = np.float32(number)
                check(apply(name, on_x, number), function(wide_x, number32), name)
                check(apply(name, number, on_x), function(number32, wide_x), name)
    for other in DTYPES:
        target = np.dtype(getattr(rx, other))
        if fits_conversion(on_x, target):
            got = convert(on_x, target)
            assert got.dtype == target
            assert_close(rx.Tensor(got).numpy(), x.astype(target), exact=True)


WAYS = [("plain", "plain"), ("shifted", "plain"), ("transposed", "gaps"), ("gaps", "transposed")]


@pytest.mark.sim
@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_simulated(dtype, ways):
    compare(np, dtype, (3, 7), ways)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (3, 7), (1000, 33), (2, 3, 1 << 18)], ids=str)
@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_device(dtype, ways, shape):
    compare(_device.cupy, dtype, shape, ways)


@pytest.mark.sim
def test_what_fits():
    x = np.ones((2, 3), np.float32)
    assert fits(x) and fits(x, 2) and fits(2.5, x) and fits(x, x.T.copy().T)
    assert not fits(x, np.ones(3, np.float32))
    assert not fits(x, x.astype(np.float16))
    assert not fits(x.astype(np.int32))
    assert not fits(x, True)
    assert not fits(x, np.float64(2))
    assert not fits(2.0, 3.0)
    assert not fits(x[:0])
    assert fits_conversion(x, np.dtype(np.float16))
    for a, b in itertools.product((np.float16, rx.bfloat16), repeat=2):
        assert not fits_conversion(x.astype(a), np.dtype(b))
    assert not fits_conversion(x, np.dtype(np.float64))


@pytest.mark.skipif(_device._SIMULATING, reason="needs NUMBA_ENABLE_CUDASIM unset")
def test_no_two_kernels_are_one_on_disk():
    from rtxarr._kernel_cache import fingerprint
    from rtxarr.kernels import _elementwise_cuda as made

    dtypes = [np.dtype(getattr(rx, name)) for name in DTYPES]
    kernels = []
    for dtype, wide in itertools.product(dtypes, (False, True)):
        kernels += [made.unary(name, dtype, wide) for name in UNARY]
        for name, scalar in itertools.product(BINARY, (None, "first", "second")):
            kernels.append(made.binary(name, dtype, wide, scalar))
    assert len({fingerprint(kernel) for kernel in kernels}) == len(kernels)
