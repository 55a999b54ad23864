"""Products of sparse and dense matrices against dense ones."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

# Name: lengths of the rows, number of columns. Columns may repeat within a row.
PATTERNS = {
    "ragged": ([2, 0, 3, 1], 5),
    "no_entries": ([0, 0], 3),
    "no_rows": ([], 3),
    "long_rows": ([3, 1025, 0, 2048], 7),
}
BACKENDS = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def make(lengths, n_columns, dtype, seed=0):
    """Return a pattern and small integers as entries, and the same as a dense matrix."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = rng.integers(0, n_columns, indptr[-1])
    values = rng.integers(-2, 3, indptr[-1]).astype(dtype)
    matrix = np.zeros((len(lengths), n_columns), dtype=dtype)
    np.add.at(matrix, (np.repeat(np.arange(len(lengths)), lengths), indices), values)
    pattern = rx.SparsityPattern(rx.asarray(indptr), rx.asarray(indices), matrix.shape)
    return pattern, rx.asarray(values), matrix


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("n_features", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("lengths, n_columns", PATTERNS.values(), ids=PATTERNS)
def test_spmm_matches_dense_product(lengths, n_columns, dtype, n_features, device):
    with rx.device(device):
        pattern, values, matrix = make(lengths, n_columns, dtype)
        dense = np.random.default_rng(1).integers(0, 2, (n_columns, n_features)).astype(dtype)
        got = rx.spmm(values, rx.asarray(dense), pattern)
    assert got.dtype == np.dtype(dtype)
    assert_close(got, (matrix @ dense).astype(dtype), exact=True)  # integers: nothing is rounded


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("n_features", [1, 3, 8])
@pytest.mark.parametrize("lengths, n_columns", PATTERNS.values(), ids=PATTERNS)
def test_transposed_product(lengths, n_columns, n_features, device):
    with rx.device(device):
        pattern, values, matrix = make(lengths, n_columns, "float32")
        dense = np.random.default_rng(1).integers(0, 2, (len(lengths), n_features))
        dense = dense.astype("float32")
        got = rx.spmm(values, rx.asarray(dense), pattern, transpose=True)
    assert_close(got, matrix.T @ dense, exact=True)


@pytest.mark.parametrize("device", BACKENDS)
def test_gradients_are_those_of_the_dense_product(device):
    with rx.device(device):
        pattern, values, matrix = make(*PATTERNS["long_rows"], "float64")
        dense = np.random.default_rng(1).integers(-2, 3, (7, 3)).astype("float64")
        weight = np.random.default_rng(2).integers(-2, 3, (4, 3)).astype("float64")
        v, d = (rx.Tensor(x, requires_grad=True) for x in (values, rx.asarray(dense)))
        rx.sum(rx.spmm(v, d, pattern) * rx.asarray(weight)).backward()
    rows, columns = (rx.Tensor(x).numpy() for x in (pattern.rows, pattern.indices))
    assert_close(d.grad, matrix.T @ weight, exact=True)
    assert_close(v.grad, (weight @ dense.T)[rows, columns], exact=True)


def test_transposed_pattern_moves_entries_to_their_place():
    pattern, values, matrix = make([2, 0, 3, 1], 5, "float64")
    got = rx.spmm(values[pattern.order], np.eye(4), pattern.T)
    assert_close(got, matrix.T, exact=True)
    assert pattern.T.shape == (5, 4)


def test_rows_of_up_to_a_piece_stay_whole():
    pattern, _, _ = make([256, 2], 4, "float32")
    assert pattern.pieces == (pattern.indptr, None)
    pieces, rows = make([257, 2, 0], 4, "float32")[0].pieces
    assert pieces.tolist() == [0, 256, 257, 259, 259]
    assert rows.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "indptr, indices, shape, message",
    [
        ([0, 2], [0, 1], (2, 2), r"indptr must have 3 entries, got 2"),
        ([0, 2, 1], [0, 1], (2, 2), r"indptr must rise from 0 to the number of entries, 2"),
        ([0, 1, 3], [0, 1], (2, 2), r"indptr must rise from 0 to the number of entries, 2"),
        ([0.0, 1.0], [0], (1, 1), r"indptr must be 1-D int64, got 1-D float64"),
        ([0, 1], [[0]], (1, 1), r"indices must be 1-D int64, got 2-D int64"),
    ],
)
def test_pattern_refuses_what_does_not_fit(indptr, indices, shape, message):
    with pytest.raises(ValueError, match=message):
        rx.SparsityPattern(np.asarray(indptr), np.asarray(indices), shape)


@pytest.mark.parametrize("indices, got", [([0, 2], "0 to 2"), ([-1, 0], "-1 to 0")])
def test_pattern_refuses_columns_out_of_range(indices, got):
    with pytest.raises(IndexError, match=rf"indices must lie in \[0, 2\), got values from {got}"):
        rx.SparsityPattern(np.asarray([0, 1, 2]), np.asarray(indices), (2, 2))


def test_spmm_refuses_what_does_not_fit():
    pattern, values, _ = make([1, 2], 4, "float32")
    with pytest.raises(ValueError, match=r"values must have shape \(3,\), got \(2,\)"):
        rx.spmm(values[:2], np.ones((4, 1), "float32"), pattern)
    with pytest.raises(ValueError, match=r"dense must have shape \(4, n_features\), got \(3, 1\)"):
        rx.spmm(values, np.ones((3, 1), "float32"), pattern)
    with pytest.raises(ValueError, match=r"dense must have shape \(2, n_features\), got \(4, 1\)"):
        rx.spmm(values, np.ones((4, 1), "float32"), pattern, transpose=True)
    with pytest.raises(TypeError, match="one floating-point or complex dtype, got float32 and fl"):
        rx.spmm(values, np.ones((4, 1)), pattern)
