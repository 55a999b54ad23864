"""Fourier transforms against NumPy and the definition, and their refusals.

Gradients of first and second order, with all norms and with cut and filled axes, are checked by
the registry test.
"""

import inspect

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import fft
from rtxarr.testing import assert_close, gradcheck

NORMS = ["backward", "ortho", "forward"]
SINGLE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL = ["fftn", "ifftn", "rfftn", "irfftn"]
REAL_INPUT = ("rfft", "ihfft", "rfftn")
few_in_dask = pytest.mark.skip_xp("dask.array", reason="dask's transforms lack norm and s")


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def make(name, rng, shape, *, single=False):
    x = rng.standard_normal(shape)
    if name not in REAL_INPUT:
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(x.dtype.kind + str(x.itemsize // 2)) if single else x


def compute(xp, name, x, **options):
    """Transform by rtxarr and by NumPy, both in the precision of ``x``."""
    got = getattr(fft, name)(xp.asarray(x), **options)
    want = getattr(np.fft, name)(x, **options)
    return got, want


@few_in_dask
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [None, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("name", SINGLE)
def test_transforms_of_one_axis(xp, name, n, norm, rng):
    for shape, axis in (((5,), -1), ((2, 4), 1), ((5, 3), 0), ((2, 3, 4), -2)):
        got, want = compute(xp, name, make(name, rng, shape), n=n, axis=axis, norm=norm)
        assert_close(got, want)


@few_in_dask
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SEVERAL)
def test_transforms_of_several_axes(xp, name, norm, rng):
    x = make(name, rng, (4, 3, 5))
    for s, axes in ((None, None), (None, (0, 2)), ((3, 6), (2, 0)), ((4, 3, 4), (0, 1, 2))):
        assert_close(*compute(xp, name, x, s=s, axes=axes, norm=norm))
    # NumPy deprecates s without axes.
    got = getattr(fft, name)(xp.asarray(x), s=(2, 6), norm=norm)
    assert_close(got, getattr(np.fft, name)(x, s=(2, 6), axes=(1, 2), norm=norm))


def test_the_definition(xp, rng):
    x = rng.standard_normal(5) + 1j * rng.standard_normal(5)
    k = np.arange(5)
    matrix = np.exp(-2j * np.pi * np.outer(k, k) / 5)
    assert_close(fft.fft(xp.asarray(x)), matrix @ x)
    assert_close(fft.ifft(xp.asarray(x)), np.conj(matrix) @ x / 5)


@few_in_dask
@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_single_precision_stays_single(xp, name, rng):
    x = make(name, rng, (3, 4), single=True)
    out = getattr(fft, name)(xp.asarray(x))
    real = name in ("irfft", "hfft", "irfftn")
    assert out.dtype == xp.asarray(np.zeros(0, "f4" if real else "c8")).dtype
    assert_close(out, getattr(np.fft, name)(x.astype("c16" if x.dtype.kind == "c" else "f8")))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_transformed_in_single(dtype, rng):
    x = rng.standard_normal((3, 4)).astype(dtype)
    for name in ("fft", "rfft", "fftn", "ihfft"):
        out = getattr(fft, name)(x)
        assert out.dtype == np.complex64
        assert_close(out, getattr(fft, name)(x.astype("f4")), exact=True)
    tensor = rx.Tensor(x, requires_grad=True)
    rx.sum(rx.abs(fft.rfft(tensor))).backward()
    assert tensor.grad.dtype == dtype


@few_in_dask
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 3)], ids=str)
def test_empty_stacks(xp, shape):
    for name in SINGLE:
        x = make(name, np.random.default_rng(0), shape)
        assert_close(*compute(xp, name, x))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_frequencies(n):
    assert_close(fft.fftfreq(n, d=0.5, device="cpu"), np.fft.fftfreq(n, 0.5))
    assert_close(fft.rfftfreq(n, d=0.5, device="cpu"), np.fft.rfftfreq(n, 0.5))
    assert fft.fftfreq(n, dtype=rx.float32, device="cpu").dtype == np.float32


def test_frequencies_belong_to_the_current_device():
    with rx.device("cpu"):
        assert isinstance(fft.fftfreq(4), np.ndarray)


@pytest.mark.parametrize("axes", [None, 0, (0, 2), -1])
@pytest.mark.parametrize("shape", [(4, 5, 3), (1, 2, 0)], ids=str)
def test_shifts(xp, shape, axes, rng):
    x = rng.standard_normal(shape)
    assert_close(fft.fftshift(xp.asarray(x), axes=axes), np.fft.fftshift(x, axes), exact=True)
    assert_close(fft.ifftshift(xp.asarray(x), axes=axes), np.fft.ifftshift(x, axes), exact=True)


def test_gradients_of_shifts(rng):
    x = rng.standard_normal((3, 4))
    gradcheck(lambda x: fft.fftshift(x), (x,))
    gradcheck(lambda x: fft.ifftshift(x, axes=0), (x,))


@few_in_dask
@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_gradients_are_the_same_over_every_library(xp, name, rng):
    x = make(name, rng, (3, 5))

    def gradient(module):
        tensor = rx.Tensor(module.asarray(x), requires_grad=True)
        rx.sum(rx.abs(getattr(fft, name)(tensor)) ** 2).backward()
        return tensor.grad

    assert_close(gradient(xp), gradient(np))


def test_energy_is_kept(rng):
    # Parseval: the gradient of half the energy of an orthonormal transform is its input.
    x = rng.standard_normal((4, 6))
    g = rx.grad(lambda x: rx.sum(rx.abs(fft.fftn(x, norm="ortho")) ** 2) / 2)(x)
    assert_close(g, x)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: fft.fft(x, norm="none"), ValueError, "norm must be .*, got 'none'"),
        (lambda x: fft.fft(x, n=0), ValueError, "at least one point along each axis, got"),
        (lambda x: fft.fft(x, axis=2), ValueError, "axis must lie in"),
        (lambda x: fft.fftn(x, axes=(0, 0)), ValueError, "must not name an axis twice"),
        (lambda x: fft.fftn(x, s=(2,), axes=(0, 1)), ValueError, "s and axes must have one length"),
        (lambda x: fft.fftn(x, s=(2, 2, 2)), ValueError, "s must have at most 2 lengths"),
        (lambda x: fft.fftn(x, axes=()), ValueError, "axes must name at least one axis"),
        (lambda x: fft.fft(x[:, :0]), ValueError, "at least one point along each axis"),
        (lambda x: fft.irfft(x[:, :1]), ValueError, "at least one point along each axis"),
        (lambda x: fft.rfft(x + 0j), TypeError, "x must be real, got dtype complex128"),
        (lambda x: fft.ihfft(x + 0j), TypeError, "x must be real"),
        (lambda x: fft.hfft(x, norm="none"), ValueError, "norm must be"),
        (lambda x: fft.fftfreq(0), ValueError, "n must be an int of at least 1, got 0"),
        (lambda x: fft.rfftfreq(2.5), ValueError, "n must be an int of at least 1, got 2.5"),
        (lambda x: fft.fftfreq(4, d=0), ValueError, "d must not be 0"),
        (lambda x: fft.fftfreq(4, d=np.nan), ValueError, "d must be finite, got nan"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(call, error, match):
    for x in (np.ones((2, 3)), rx.Tensor(np.ones((2, 3)))):
        with pytest.raises(error, match=match):
            call(x)


def test_every_function_of_the_standard_is_there():
    import array_api_strict

    for name in array_api_strict.fft.__all__:
        theirs = inspect.signature(getattr(array_api_strict.fft, name)).parameters
        ours = inspect.signature(getattr(fft, name)).parameters
        assert list(ours) == list(theirs)
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


@pytest.mark.compare
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_values_and_gradients_agree_with_torch(name, norm, rng):
    import torch

    x = make(name, rng, (4, 3, 5))
    if name in SINGLE:
        choices = [({"n": n, "axis": 1}, {"n": n, "dim": 1}) for n in (None, 2, 3, 7)]
    else:
        choices = [
            ({"s": s, "axes": axes}, {"s": s, "dim": axes})
            for s, axes in ((None, None), ((3, 6), (2, 0)), (None, (0, 2)))
        ]
    for options, torch_options in choices:
        ours, theirs = rx.Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
        out = getattr(fft, name)(ours, norm=norm, **options)
        expected = getattr(torch.fft, name)(theirs, norm=norm, **torch_options)
        assert_close(out, expected.detach().resolve_conj().numpy())
        rx.sum(rx.abs(out) ** 2).backward()
        (expected.abs() ** 2).sum().backward()
        assert_close(ours.grad, theirs.grad.resolve_conj().numpy())
