"""Neighbours in space: GPU code against numba's CPU code, to the bit."""

import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import points
from rtxarr.testing import assert_close

DTYPES = ["float32", "float64"]


@pytest.fixture
def both(place, monkeypatch):
    """Give a function that calls another on the host and where kernels run, and compares."""

    def moved(x):
        if isinstance(x, points.Grid):
            return points.Grid(*map(moved, x))
        return _device.to_device(x, place) if isinstance(x, np.ndarray) else x

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(points, "runs_kernels", lambda x: False)
            want = function(*arguments, **options)
        got = function(*map(moved, arguments), **options)
        return want, got

    return call


def equal(want, got):
    assert want.dtype == got.dtype
    assert_close(_device.to_device(got, "cpu"), want, exact=True)


def cloud(place, dtype, n_axes, seed=0):
    """Give points of three clouds, some of which coincide, and one cloud without any."""
    rng = np.random.default_rng(seed)
    n = 16 if place == "cpu" else 3000
    x = rng.normal(size=(n, n_axes))
    x[1::5] = x[::5][: x[1::5].shape[0]]
    ptr = np.array([0, n // 2, n // 2, n - 5, n])
    return x.astype(dtype), ptr, np.repeat(np.arange(4), np.diff(ptr))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_axes", "width"), [(1, 0.5), (2, 0.7), (3, 0.9), (3, None), (5, None)])
def test_neighbours_are_those_of_the_host(place, both, dtype, n_axes, width):
    x, ptr, batches = cloud(place, dtype, n_axes)
    want_grid, grid = both(points.build_grid, x, ptr, width)
    for a, b in zip(want_grid, grid, strict=True):
        equal(np.asarray(a), b if _device.is_device_array(b) else np.asarray(b))
    visit = want_grid.order
    for others in (False, True):
        want, got = both(points.nearest, x, batches, visit, want_grid, 6, others=others)
        equal(want[0], got[0])
        found = np.arange(6) < want[0][:, None]
        for a, b in zip(want[1:], got[1:], strict=True):
            equal(a[found], _device.to_device(b, "cpu")[found])
        want, got = both(points.all_within, x, batches, visit, want_grid, 0.8, others=others)
        for a, b in zip(want, got, strict=True):
            equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4])
def test_far_points_are_those_of_the_host(place, both, dtype, n):
    x, _, _ = cloud(place, dtype, 3)
    x[:6] = x[0]  # equally far, all of them
    ptr = np.array([0, 6, x.shape[0]])
    want, got = both(points.farthest, x, ptr, np.array([2, 7]), n)
    equal(want, got)
    assert all(len(set(row)) == n for row in want)


def test_compiled_code_that_was_kept_cannot_be_taken_for_another():
    """Of functions with one name numba linked any: a search that kept all for one that sorts."""
    from rtxarr.kernels import _points_njit as host

    made = [
        getattr(host, f"_{kind}_{where}").py_func
        for kind in ("insert", "append", "tally")
        for where in ("flat", "in_space", "high")
    ]
    inner = {cell.cell_contents for f in made for cell in f.__closure__}
    names = [f.py_func.__qualname__ for f in inner if hasattr(f, "py_func")]
    names += [f.__qualname__ for f in made]
    assert len(names) > 30
    assert len(set(names)) == len(names)
