"""Fourier transforms in fused functions."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL = ["fftn", "ifftn", "rfftn", "irfftn"]


def array(name, dtype, shape=(3, 4, 6)):
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return x if name in ("rfft", "ihfft", "rfftn") else x + x.dtype.type(0.5) * x * 1j


def check(name, x, **options):
    fused = rx.fuse(lambda x: getattr(rx.fft, name)(x * 2, **options) * 3)
    want = getattr(rx.fft, name)(x * 2, **options) * 3
    got = fused(x)
    assert not fused.reasons
    assert got.dtype == want.dtype
    assert_close(got, want, exact=True)
    assert sum("fft" in line for line in fused.explain().splitlines() if "computes" in line) == 1


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ONE)
def test_along_an_axis(name, dtype, norm):
    x = array(name, dtype)
    for options in ({}, {"axis": 1}, {"n": 5}, {"n": 9, "axis": 0}):
        check(name, x, norm=norm, **options)


@pytest.mark.parametrize("name", SEVERAL)
def test_along_several_axes(name):
    x = array(name, "float32")
    for options in ({}, {"axes": (0, 2)}, {"axes": (2, 0)}, {"s": (5, 3)}, {"norm": "ortho"}):
        if "s" in options:
            options["axes"] = (0, 1)
        check(name, x, **options)


@pytest.mark.parametrize("name", ["fft", "rfft", "irfftn"])
def test_gradients(name):
    x = array(name, "float64")

    def f(x):
        out = getattr(rx.fft, name)(x)
        return rx.sum(rx.real(out * rx.conj(out)))

    assert_close(rx.fuse(rx.grad(f))(x), rx.grad(f)(x))
