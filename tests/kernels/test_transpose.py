"""Copies of transposed arrays, in the simulator and on a GPU."""

import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import transpose

# Shape in memory, and the order of axes in which it is read.
SMALL = [
    ((5, 7), (1, 0)), ((3, 8, 12), (0, 2, 1)), ((2, 4, 3, 8), (0, 3, 1, 2)),
    ((2, 4, 3, 8), (0, 2, 3, 1)), ((66, 70), (1, 0)), ((1, 9, 1, 4, 1), (3, 0, 1, 4, 2)),
    ((2, 1, 68, 36), (0, 3, 1, 2)),
]  # fmt: skip
LARGE = [
    ((16, 256, 64, 24), (0, 3, 1, 2)), ((16, 24, 256, 129), (0, 2, 3, 1)), ((1000, 1001), (1, 0)),
    ((3, 129, 4097), (0, 2, 1)), ((70_000, 8), (1, 0)), ((8, 70_000), (1, 0)),
    ((3000, 8, 64), (0, 2, 1)),
]  # fmt: skip
TYPES = ["float16", "float32", "float64", "complex64", "complex128", "int64", "uint16"]


def made(rng, shape, dtype):
    """Return any bits at all: NaN and the like are moved as they are."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, n_bytes, dtype=np.uint8).view(dtype).reshape(shape)


@pytest.fixture
def launches(monkeypatch):
    found = []
    launch = transpose.launch_planned
    monkeypatch.setattr(transpose, "launch_planned", lambda *a: (found.append(a), launch(*a)))
    return found


@pytest.mark.parametrize("dtype", TYPES)
def test_copies(place, dtype, launches):
    rng = np.random.default_rng(0)
    for shape, order in SMALL if place.kind == "cpu" else SMALL + LARGE:
        x = made(rng, shape, dtype)
        given = _device.to_device(x, place).transpose(order)
        n_launches = len(launches)
        got = transpose.contiguous(given)
        assert got.flags.c_contiguous
        assert got.shape == given.shape and got.dtype == dtype
        assert _device.to_device(got, "cpu").tobytes() == x.transpose(order).tobytes()
        if place.kind == "cpu" or (shape, order) in LARGE:
            assert len(launches) == n_launches + 1


def test_other_arrays_are_copied_as_well(place, launches):
    rng = np.random.default_rng(1)
    x = _device.to_device(made(rng, (66, 68, 70), "float32"), place)
    for given in (
        x, x[:, ::2], x[1:], x[:, :, 1:].transpose(0, 2, 1), x.transpose(2, 1, 0),
        x.reshape(-1)[1:-67].reshape(-1, 4).T, x[::-1].transpose(1, 0, 2),
    ):  # fmt: skip
        got = transpose.contiguous(given)
        assert got.flags.c_contiguous
        want = np.ascontiguousarray(_device.to_device(given, "cpu"))
        assert _device.to_device(got, "cpu").tobytes() == want.tobytes()
    assert not launches


def test_without_kernels():
    x = np.arange(12.0).reshape(3, 4).T
    got = transpose.contiguous(x)
    assert got.flags.c_contiguous
    assert np.array_equal(got, x)
