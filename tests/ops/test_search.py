"""Sorting, searching and sets over every backend."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

X = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 5.0]])


@pytest.mark.skip_xp("dask.array", reason="dask cannot sort")
def test_sorting(xp):
    x = xp.asarray(X)
    for axis in (0, 1, -1):
        assert_close(rx.sort(x, axis=axis), np.sort(X, axis))
        assert_close(rx.sort(x, axis=axis, descending=True), -np.sort(-X, axis))
        assert_close(rx.argsort(x, axis=axis), np.argsort(X, axis, kind="stable"))
    assert_close(rx.argsort(xp.asarray([2, 2, 1]), descending=True), [0, 1, 2])


def test_extreme_places(xp):
    x = xp.asarray(X)
    for name in ("argmax", "argmin"):
        for axis in (None, 0, 1):
            assert_close(getattr(rx, name)(x, axis=axis), getattr(np, name)(X, axis=axis))
        assert getattr(rx, name)(x, axis=1, keepdims=True).shape == (2, 1)


@pytest.mark.skip_xp("dask.array", reason="dask does not know its shapes")
def test_sets_and_nonzero(xp):
    x = xp.asarray([3, 1, 3, 2])
    assert_close(rx.sort(rx.unique_values(x)), [1, 2, 3])
    values, counts = rx.unique_counts(x)
    assert_close(values, [1, 2, 3])
    assert_close(counts, [1, 1, 2])
    values, inverse = rx.unique_inverse(x)
    assert_close(values[inverse], [3, 1, 3, 2])
    found = rx.unique_all(x)
    assert_close(x[found.indices], found.values)
    (places,) = rx.nonzero(x > 1)
    assert_close(places, [0, 2, 3])
    assert_close(rx.isin(x, xp.asarray([1, 2])), [False, True, False, True])


@pytest.mark.skip_xp("dask.array", reason="dask cannot sort")
def test_searchsorted(xp):
    edges, values = xp.asarray([1.0, 2.0, 2.0, 4.0]), xp.asarray([2.0, 0.0, 5.0])
    for side in ("left", "right"):
        want = np.searchsorted([1.0, 2.0, 2.0, 4.0], [2.0, 0.0, 5.0], side=side)
        assert_close(rx.searchsorted(edges, values, side=side), want)


def test_results_of_tensors_are_untracked_tensors():
    x = rx.Tensor(X, requires_grad=True)
    for out in (rx.argmax(x), rx.argsort(x), *rx.unique_all(x), *rx.nonzero(x)):
        assert isinstance(out, rx.Tensor) and not out.requires_grad
    assert type(rx.unique_all(x)).__name__ == "UniqueAll"


def test_equal_elements_keep_their_order_in_the_gradient():
    x = rx.Tensor(np.array([2.0, 1.0, 2.0]), requires_grad=True)
    rx.sum(rx.sort(x) * np.array([1.0, 10.0, 100.0])).backward()
    assert_close(x.grad, [10.0, 1.0, 100.0])
