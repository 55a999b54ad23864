"""Segment and scatter reductions against plain loops."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import segment
from rtxarr.kernels.scatter import scatter_reduce
from rtxarr.kernels.segment import segment_reduce
from rtxarr.testing import assert_close

LENGTHS = {
    "ragged": [2, 0, 3, 1, 0],
    "one": [4],
    "all_empty": [0, 0],
    "no_segments": [],
    "long": [5, 1025, 0, 3000, 1024],
}
FLOATS = ["float32", "float64", "float16", ml_dtypes.bfloat16]
DTYPES = [*FLOATS, "int32", "uint16", "int64"]
CASES = [(op, d) for op in ("sum", "max", "min") for d in DTYPES] + [("mean", d) for d in FLOATS]


def lowest(op, dtype):
    if np.dtype(dtype).kind in "iu":
        return np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max
    return -np.inf if op == "max" else np.inf


def reference(op, values, groups):
    """Reduce the listed rows of each group in the widest type, one group at a time."""
    wide = values.astype(values.dtype if values.dtype.kind in "iu" else np.float64)
    out = np.zeros((len(groups), values.shape[1]), dtype=wide.dtype)
    for i, rows in enumerate(groups):
        if op in ("max", "min"):
            start = np.full((1, values.shape[1]), lowest(op, values.dtype), dtype=wide.dtype)
            out[i] = getattr(np, op)(np.concatenate([start, wide[rows]]), axis=0)
        elif len(rows):
            out[i] = wide[rows].sum(axis=0) / (len(rows) if op == "mean" else 1)
    return out


def make_segments(lengths, n_features, dtype, seed=0):
    """Return small integers, whose sums no type has to round, and row pointers."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = rng.integers(0, 2, (int(indptr[-1]), n_features)).astype(dtype)
    groups = [np.arange(a, b) for a, b in zip(indptr[:-1], indptr[1:], strict=True)]
    return values, indptr, groups


def close(got, want, dtype):
    assert got.dtype == np.dtype(dtype)
    assert_close(got, want.astype(dtype))


@pytest.mark.parametrize("n_features", [1, 3, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("op, dtype", CASES, ids=[f"{op}-{np.dtype(d).name}" for op, d in CASES])
def test_segments_match_loops(op, dtype, lengths, n_features):
    values, indptr, groups = make_segments(lengths, n_features, dtype)
    close(segment_reduce(op, values, indptr), reference(op, values, groups), dtype)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_gathered_rows(op, index_dtype):
    values, indptr, groups = make_segments([2, 0, 3], 4, "float32")
    indices = np.array([4, 4, 0, 2, 1], dtype=index_dtype)
    want = reference(op, values, [indices[g] for g in groups])
    close(segment_reduce(op, values, indptr, indices=indices), want, "float32")


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_segments_over_backends(xp, op):
    values, indptr, groups = make_segments([2, 0, 3], 4, "float32")
    got = segment_reduce(op, xp.asarray(values), xp.asarray(indptr))
    assert_close(got, reference(op, values, groups).astype("float32"))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_scatter_over_backends(xp, op):
    index = np.array([3, 0, 3, 1], dtype=np.int64)
    values = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=np.float32)
    got = scatter_reduce(op, xp.asarray(index), xp.asarray(values), 5)
    want = reference(op, values, [np.flatnonzero(index == row) for row in range(5)])
    assert_close(got, want.astype("float32"))


def test_half_sums_do_not_stall():
    """Ones added in float16 stop at 2048, in bfloat16 at 256."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        got = segment_reduce("sum", np.ones((4096, 1), dtype), np.array([0, 4096]))
        assert float(got[0, 0]) == 4096


def test_rows_are_added_in_order():
    values = np.array([[1e8], [1.0], [-1e8], [1.0]], dtype=np.float32)
    assert segment_reduce("sum", values, np.array([0, 4]))[0, 0] == 1.0
    assert scatter_reduce("sum", np.zeros(4, np.int64), values, 1)[0, 0] == 1.0


def test_nan_wins():
    values = np.array([[np.nan], [1.0], [2.0]])
    for op in ("max", "min"):
        assert np.isnan(segment_reduce(op, values, np.array([0, 3]))).all()
        assert segment_reduce(op, values, np.array([1, 3])).item() == (2.0 if op == "max" else 1.0)


def test_complex_sums():
    values = np.array([[1 + 2j], [3 - 1j]])
    assert segment_reduce("sum", values, np.array([0, 2]))[0, 0] == 4 + 1j


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_scatter_matches_loops(dtype):
    rng = np.random.default_rng(1)
    index = rng.integers(0, 7, 40)
    values = rng.integers(0, 3, (40, 3)).astype(dtype)
    for op in ("sum", "max", "min"):
        want = reference(op, values, [np.flatnonzero(index == row) for row in range(9)])
        close(scatter_reduce(op, index, values, 9), want, dtype)


@pytest.mark.parametrize("n_values, n_features, n_rows", [(0, 3, 2), (3, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_scatter_of_nothing(op, n_values, n_features, n_rows):
    index, values = np.zeros(n_values, np.int64), np.ones((n_values, n_features))
    got = scatter_reduce(op, index, values, n_rows)
    assert got.shape == (n_rows, n_features)
    assert (got == (0 if op == "sum" else -np.inf)).all()


def test_noncontiguous_inputs():
    values, indptr, groups = make_segments([3, 2], 8, "float32")
    spread = np.repeat(values, 2, axis=0)[::2].T.copy().T
    assert not spread.flags.c_contiguous
    close(segment_reduce("sum", spread, indptr), reference("sum", values, groups), "float32")


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (("prod", np.ones((2, 1)), np.array([0, 2])), ValueError, "op must be one of sum, mean"),
        (("sum", np.ones(2), np.array([0, 2])), ValueError, "values must have shape"),
        (("sum", np.ones((2, 1)), np.array([[0, 2]])), ValueError, "indptr must have shape"),
        (("sum", np.ones((2, 1)), np.array([], np.int64)), ValueError, "indptr must have shape"),
        (("sum", np.ones((2, 1)), np.array([0, 2], np.int32)), TypeError, "indptr must be int64"),
        (("sum", np.ones((2, 1)), np.array([0, 3])), ValueError, r"lie in \[0, 2\]"),
        (("sum", np.ones((2, 1)), np.array([0, 2, 1])), ValueError, "must not decrease"),
        (("mean", np.ones((2, 1), int), np.array([0, 2])), TypeError, "'mean' does not take"),
        (("sum", np.ones((2, 1), bool), np.array([0, 2])), TypeError, "does not take .* bool"),
        (("max", np.ones((2, 1), complex), np.array([0, 2])), TypeError, "'max' does not take"),
    ],
)  # fmt: skip
def test_bad_segments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        segment_reduce(*arguments)


def test_bad_indices_are_refused():
    values, indptr = np.ones((2, 1)), np.array([0, 1])
    with pytest.raises(IndexError, match=r"indices must lie in \[0, 2\), got values from 2 to 2"):
        segment_reduce("sum", values, indptr, indices=np.array([2]))
    with pytest.raises(TypeError, match="indices must be 1-D int32 or int64, got 1-D float64"):
        segment_reduce("sum", values, indptr, indices=np.array([0.0]))


@pytest.mark.parametrize(
    "index, values, n_rows, error, match",
    [
        (
            [0, -1],
            np.ones((2, 1)),
            2,
            IndexError,
            r"index must lie in \[0, 2\), got values from -1 to 0",
        ),
        ([0, 2], np.ones((2, 1)), 2, IndexError, "got values from 0 to 2"),
        ([0, 1], np.ones((3, 1)), 2, ValueError, r"values must have shape \(2, n_features\)"),
        ([0, 1], np.ones(2), 2, ValueError, "values must have shape"),
        ([0, 1], np.ones((2, 1)), -1, ValueError, "n_rows must not be negative, got -1"),
        ([0.0, 1.0], np.ones((2, 1)), 2, TypeError, "index must be 1-D int32 or int64"),
    ],
)
def test_bad_scatters_are_refused(index, values, n_rows, error, match):
    with pytest.raises(error, match=match):
        scatter_reduce("sum", np.array(index), values, n_rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("n_rows, n_features", [(1, 3), (2, 8), (40, 5), (300, 8), (9, 0), (0, 2)])
def test_columns_add_up_in_any_number_of_passes(place, monkeypatch, n_rows, n_features, dtype):
    times = 1
    if place.kind == "cpu":
        monkeypatch.setattr(segment, "_PARTS", 8)
        monkeypatch.setattr(segment, "_JOINED", 5)
    else:
        times = 1000
    x = np.random.default_rng(0).standard_normal((times * n_rows, n_features)).astype(dtype)
    values = _device.to_device(x, place)
    found, again = segment.column_sums(values), segment.column_sums(values)
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    assert found.dtype == wide
    got, again = (_device.to_device(x, "cpu") for x in (found, again))
    x = x.astype(np.float64)
    bound = 20 * np.finfo(wide).eps * np.abs(x).sum(axis=0)  # partial sums are of tens of rows
    assert (np.abs(got - x.sum(axis=0)) <= bound).all()
    assert got.tobytes() == again.tobytes()


def test_long_segments_begin_where_the_documentation_says():
    assert segment._CHUNK == 1024
