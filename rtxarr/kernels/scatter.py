"""Scatter with duplicate indices, in a fixed order: the same bits on every run."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._checks import check_range
from rtxarr._device import namespace, runs_kernels
from rtxarr._override import overridable
from rtxarr.dtypes import accumulator
from rtxarr.kernels.segment import check_index, check_operation, reduce_masked, segment_reduce
from rtxarr.kernels.sort import group_rows

__all__ = ["scatter_reduce"]

# Rows that one group of threads adds up alone: few, as a common word's rows are read from all over
# memory.
_CHUNK = 64


@overridable
def scatter_reduce(op: str, index: Any, values: Any, n_rows: int) -> Any:
    """Combine the rows of ``values`` that share an index.

    Parameters
    ----------
    op : {"sum", "mean", "max", "min"}
    index : array of int32 or int64, shape (n_values,)
        The row of the result that each row of ``values`` goes to, in [0, n_rows). On the CPU
        anything else raises IndexError; on a GPU, where a check would read it back, such rows
        are left out.
    values : array, shape (n_values, n_features)
        Of the types that :func:`~rtxarr.kernels.segment.segment_reduce` takes.
    n_rows : int

    Returns
    -------
    array, shape (n_rows, n_features), dtype of ``values``
        Rows with the same index are combined in their order in ``values``; on a GPU more than 64
        in chunks of 64, and then over the chunks, in a fixed order. A row that no
        index names is what ``segment_reduce`` gives for an empty segment.
    """
    xp = namespace(index, values)
    check_operation(op, values.dtype)
    check_index(xp, "index", index)
    if values.ndim != 2 or values.shape[0] != index.shape[0]:
        raise ValueError(
            f"values must have shape ({index.shape[0]}, n_features), got {values.shape}"
        )
    if n_rows < 0:
        raise ValueError(f"n_rows must not be negative, got {n_rows}")
    on_host = isinstance(values, np.ndarray) and not runs_kernels(values)
    if on_host:
        check_range("index", index, 0, n_rows)
        if op == "sum" and 0 not in (n_rows, *values.shape):
            return _sum_host(index, values, n_rows)
    elif not runs_kernels(values):
        rows = xp.arange(n_rows, dtype=index.dtype)
        return reduce_masked(xp, op, values, index == rows[:, None])
    if runs_kernels(index) and 0 not in (n_rows, *values.shape):
        order, indptr = group_rows(index, n_rows)
        return segment_reduce(op, values, indptr, indices=order, chunk=_CHUNK)
    order = xp.argsort(index, stable=True)
    rows = xp.arange(n_rows + 1, dtype=index.dtype)
    indptr = xp.astype(xp.searchsorted(index[order], rows), xp.int64, copy=False)
    return segment_reduce(op, values, indptr, indices=order)


def _sum_host(index: np.ndarray, values: np.ndarray, n_rows: int) -> np.ndarray:
    """Add in order without sorting: a sparse matrix with one 1 a column, times ``values``."""
    from scipy import sparse

    n_values = index.shape[0]
    total = values.astype(accumulator(values.dtype), copy=False)
    ones = np.ones(n_values, dtype=total.dtype)
    matrix = sparse.csc_array((ones, index, np.arange(n_values + 1)), shape=(n_rows, n_values))
    return (matrix @ total).astype(values.dtype, copy=False)
