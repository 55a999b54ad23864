"""Indexing, taking, scattering and segments."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(9)
X = rng.standard_normal((4, 5))


@pytest.mark.skip_xp("dask.array", reason="dask has no take_along_axis")
def test_take_and_take_along_axis(xp):
    x, i = xp.asarray(X), xp.asarray([3, 0, 0])
    for axis in (0, 1):
        assert_close(rx.take(x, i, axis=axis), np.take(X, [3, 0, 0], axis))
    order = np.argsort(X, axis=1)
    assert_close(rx.take_along_axis(x, xp.asarray(order), axis=1), np.sort(X, axis=1))


def test_indexing_of_tensors():
    x = rx.Tensor(X)
    i = np.array([2, 0, 2])
    for key in (
        0,
        -1,
        (1, 2),
        slice(None, None, -1),
        (slice(1, 3), slice(None, None, 2)),
        (Ellipsis, 0),
        None,
        (None, 0, None),
        i,
        (i, i),
        (slice(None), i),
        X > 0,
        (i[:, None], np.array([0, 4])),
    ):
        assert_close(x[key], X[key], exact=True)
    assert_close(x[rx.Tensor(i)], X[i], exact=True)
    with pytest.raises(IndexError, match="out of bounds"):
        x[9]


def test_writing_reads_before_it_writes():
    x = rx.Tensor(np.arange(6).reshape(3, 2))
    x[1:] = x[:-1]
    assert_close(x, np.array([[0, 1], [0, 1], [2, 3]]), exact=True)


def test_index_update_and_add_leave_their_input_alone():
    x = X.copy()
    i = np.array([1, 1, 3])
    updated = rx.index_update(x, (slice(None), 0), 7.0)
    added = rx.index_add(x, i, np.ones((3, 5)))
    assert_close(x, X, exact=True)
    assert_close(updated[:, 0], np.full(4, 7.0))
    want = X.copy()
    np.add.at(want, i, 1.0)
    assert_close(added, want)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64"])
def test_scatter_against_a_loop(shape, dtype):
    values = rx.asarray(
        np.round(rng.standard_normal(shape) * 4), dtype=getattr(rx, dtype), device="cpu"
    )
    index = rng.integers(0, 5, shape[0])
    wide = np.asarray(values).astype("float64")
    total = np.zeros((6, *shape[1:]))
    np.add.at(total, index, wide)
    got = rx.scatter_add(values, index, 6)
    assert got.dtype == values.dtype
    assert_close(got, total)
    for name, better in (("max", np.maximum), ("min", np.minimum)):
        got = getattr(rx, f"scatter_{name}")(values, index, 6)
        for row in range(6):
            if np.any(index == row):
                want = better.reduce(wide[index == row], axis=0)
                assert_close(np.asarray(got)[row].astype("float64"), want)


@pytest.mark.parametrize("lengths", [[2, 0, 3], [0], [0, 0, 5], [], [1] * 5], ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_segments_against_slices(name, lengths):
    values = rng.standard_normal((sum(lengths), 3))
    indptr = np.concatenate([[0], np.cumsum(lengths, dtype="int64")]).astype("int64")
    got = getattr(rx, f"segment_{name}")(values, indptr)
    assert got.shape == (len(lengths), 3)
    empty = {"sum": 0, "mean": 0, "max": -np.inf, "min": np.inf}[name]
    for row, (a, b) in zip(got, zip(indptr[:-1], indptr[1:], strict=True), strict=True):
        want = getattr(np, name)(values[a:b], axis=0) if b > a else np.full(3, empty)
        assert_close(row, want)


def test_scatter_does_not_depend_on_the_order_of_rows_elsewhere():
    values = rng.standard_normal((1000, 4)).astype("float32")
    index = rng.integers(0, 10, 1000)
    whole = rx.scatter_add(values, index, 10)
    for row in (0, 7):
        mine = index == row
        alone = rx.scatter_add(values[mine], np.zeros(mine.sum(), "int64"), 1)
        assert_close(whole[row], alone[0], exact=True)


def test_one_hot():
    got = rx.one_hot(np.array([[0, 2], [5, -1]]), 3, dtype=rx.float32)
    assert got.dtype == np.float32
    assert_close(got, [[[1, 0, 0], [0, 0, 1]], [[0, 0, 0], [0, 0, 0]]])
    assert rx.one_hot(np.array([0, 1]), 3, axis=0).shape == (3, 2)
    assert isinstance(rx.one_hot(rx.Tensor(np.array([1])), 2), rx.Tensor)


INDPTR = np.array([0, 2, 4])
REFUSED = [
    (
        lambda: rx.scatter_add(X, np.array([0, 1]), 3),
        ValueError,
        "one entry for each of the 4 rows",
    ),
    (lambda: rx.scatter_add(X, np.ones(4), 3), TypeError, "index must hold integers"),
    (lambda: rx.scatter_add(X, np.zeros((2, 2), int), 3), ValueError, "one-dimensional"),
    (lambda: rx.scatter_max(X, np.zeros(4, int), -1), ValueError, "n_rows must be at least 0"),
    (lambda: rx.segment_sum(X, INDPTR[None]), ValueError, "indptr must be one-dimensional"),
    (lambda: rx.segment_sum(X, INDPTR[:0]), ValueError, "at least one entry"),
    (lambda: rx.segment_sum(np.float64(1), INDPTR), ValueError, "at least one dimension"),
    (lambda: rx.one_hot(X, 3), TypeError, "indices must hold integers, got float64"),
    (lambda: rx.scatter_add(X, [0, 1, 2, 3], 4), TypeError, "index must be an array or Tensor"),
    (lambda: rx.scatter_add(X, np.arange(4), 4.0), TypeError, "n_rows must be an int, got float"),
    (lambda: rx.segment_sum([1.0], INDPTR), TypeError, "values must be an array or Tensor"),
    (lambda: rx.one_hot(INDPTR, -1), ValueError, "n_classes must be at least 0"),
    (lambda: rx.one_hot(INDPTR, 2.5), TypeError, "n_classes must be an int, got float"),
    (lambda: rx.take(X, INDPTR), ValueError, "axis must be given for an array of 2"),
]


@pytest.mark.parametrize("which", range(len(REFUSED)))
def test_refusals_name_arguments(which):
    call, kind, message = REFUSED[which]
    with pytest.raises(kind, match=message):
        call()
