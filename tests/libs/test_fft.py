"""Fourier transforms on the GPU, through plans that are kept."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay
from rtxarr.libs import fft as provider
from rtxarr.testing import assert_close

SHAPES = [
    ((6,), (0,)), ((4, 7), (1,)), ((4, 7), (0,)), ((4, 6, 5), (0, 1, 2)), ((4, 6, 5), (1, 2)),
    ((4, 6, 5), (2, 0)), ((2, 3, 4, 5), (0, 1, 2, 3)), ((1, 1, 8), (1, 2)), ((0, 4), (1,)),
]  # fmt: skip


def test_plans_are_kept_with_the_captured_step():
    made = []

    def make():
        made.append(object())
        return made[-1]

    own = {}
    with _replay.keeping(own):
        first = provider._kept(("a",), make)
        with _replay.keeping({}):
            assert provider._kept(("a",), make) is not first
        assert provider._kept(("a",), make) is first
    assert list(own.values()) == [first]
    assert _replay.kept_resources() is None
    outside = provider._kept(("a",), make)
    assert outside is not first
    for i in range(provider._MOST):
        provider._kept((i,), make)
    assert provider._kept(("a",), make) is not outside
    provider._thread.plans.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gpu_transforms_match_numpy(name, norm, dtype):
    cupy = _device.cupy
    rng = np.random.default_rng(0)
    for shape, axes in SHAPES:
        for stretch in (0, 1, -1):
            x = rng.standard_normal(shape)
            if name != "rfftn":
                x = x + 1j * rng.standard_normal(shape)
            s = [shape[a] for a in axes]
            if name == "irfftn":
                s[-1] = 2 * (s[-1] - 1)
            s = tuple(max(n + stretch, 1) for n in s)
            want = getattr(np.fft, name)(x, s=s, axes=axes, norm=norm)
            narrow = x.astype(dtype if x.dtype.kind == "f" else np.result_type(dtype, "complex64"))
            for on_gpu in (cupy.asarray(narrow), cupy.asarray(np.asfortranarray(narrow))):
                got = getattr(rx.fft, name)(on_gpu, s=s, axes=axes, norm=norm)
                assert got.dtype == (dtype if name == "irfftn" else np.result_type(dtype, "c8"))
                tolerance = 1e-4 if dtype == "float32" else 1e-10
                assert_close(cupy.asnumpy(got), want, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_gpu_captured_transforms_work_in_memory_of_their_own():
    cupy = _device.cupy
    rng = np.random.default_rng(1)

    def step(x):
        spectrum = rx.fft.rfftn(x, axes=(1, 2))
        return rx.fft.irfftn(spectrum * 2, s=x.shape[1:], axes=(1, 2)), rx.fft.fft(x, axis=1)

    with rx.device("cuda:0"):
        run = rx.capture(step)
        for i in range(6):
            x = cupy.asarray(rng.standard_normal((3, 30, 14)).astype(np.float32))
            for got, want in zip(run(x), step(x), strict=True):
                assert got.tobytes() == want.tobytes(), i
            for _ in range(80):  # eager plans come and go
                step(cupy.ones((2, int(rng.integers(2, 200)), 8), "float32"))
        assert run.n_captures == 1
