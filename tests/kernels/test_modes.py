"""The kernels of transforms of low frequencies, in the simulator and on a GPU."""

import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import modes
from rtxarr.testing import assert_close

SIZES = [
    (1, 16, 4, 4),
    (3, 17, 8, 4),
    (2, 33, 12, 8),
    (5, 48, 4, 12),
    (1, 67, 8, 16),
    (2, 96, 4, 24),
    (1, 129, 8, 32),
]
LARGE = [
    (16, 256, 64, 12),
    (300, 128, 32, 32),
    (2, 1001, 260, 8),
    (1, 64, 40_000, 4),
    (16, 256, 64, 24),
]


def sizes(place):
    return SIZES if place.kind == "cpu" else SIZES + LARGE


def spectra(rng, shape):
    z = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    return z.astype("complex64")


def test_forward(place):
    rng = np.random.default_rng(0)
    for outer, n, inner, n_modes in sizes(place):
        x = rng.standard_normal((outer, n, inner)).astype("float32")
        want = np.fft.rfft(x.astype("float64"), axis=1)[:, :n_modes]
        got = modes.rfft_low(_device.to_device(x, place), n_modes=n_modes)
        assert got.dtype == np.complex64
        assert_close(_device.to_device(got, "cpu"), want, rtol=0, atol=2e-7 * n)


def test_back(place):
    rng = np.random.default_rng(1)
    for outer, n, inner, n_modes in sizes(place):
        z = spectra(rng, (outer, n_modes, inner))
        want = np.fft.irfft(z.astype("complex128"), n=n, axis=1, norm="forward")
        got = modes.irfft_low(_device.to_device(z, place), n=n)
        assert got.dtype == np.float32
        assert_close(_device.to_device(got, "cpu"), want, rtol=0, atol=1e-6 * n_modes)


def test_arrays_that_start_between_packets(place):
    rng = np.random.default_rng(2)
    x = rng.standard_normal(2 * 16 * 4 + 1).astype("float32")
    z = spectra(rng, 2 * 4 * 4 + 1)
    real = _device.to_device(x, place)[1:].reshape(2, 16, 4)
    half = _device.to_device(z, place)[1:].reshape(2, 4, 4)
    want = np.fft.rfft(x[1:].reshape(2, 16, 4), axis=1)[:, :4]
    got = modes.rfft_low(real, n_modes=4)
    assert_close(_device.to_device(got, "cpu"), want, rtol=0, atol=1e-5)
    want = np.fft.irfft(z[1:].reshape(2, 4, 4), n=16, axis=1, norm="forward")
    got = modes.irfft_low(half, n=16)
    assert_close(_device.to_device(got, "cpu"), want, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_gpu_captured():
    import rtxarr as rx

    cupy = _device.cupy
    rng = np.random.default_rng(3)

    def step(x):
        low = modes.rfft_low(x, n_modes=8)
        return low, modes.irfft_low(low * 2, n=64)

    with rx.device("cuda:0"):
        run = rx.capture(step)
        for _ in range(4):
            x = cupy.asarray(rng.standard_normal((40, 64, 32)).astype("float32"))
            for got, want in zip(run(x), step(x), strict=True):
                assert got.tobytes() == want.tobytes()


def test_without_kernels():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((3, 20, 4)).astype("float32")
    spectrum = np.fft.rfft(x, axis=1)
    assert_close(modes.rfft_low(x, n_modes=4), spectrum[:, :4].astype("complex64"))
    spectrum[:, 4:] = 0
    want = np.fft.irfft(spectrum, n=20, axis=1, norm="forward").astype("float32")
    assert_close(modes.irfft_low(spectrum[:, :4].astype("complex64"), n=20), want)


@pytest.mark.parametrize(
    ("sizes", "result"),
    [
        ((4096, 256, 64, 12), True),
        ((4096, 256, 64, 10), False),
        ((4096, 256, 64, 20), False),
        ((4096, 256, 64, 24), True),
        ((4096, 256, 64, 36), False),
        ((4096, 256, 64, 0), False),
        ((4096, 40, 64, 12), False),
        ((4096, 256, 62, 12), False),
        ((4, 256, 64, 12), False),
    ],
)
def test_what_fits(sizes, result):
    assert modes.fits(*sizes) is result
