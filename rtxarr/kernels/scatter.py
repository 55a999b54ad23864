"""Scatter with duplicate indices, in a fixed order: the same bits on every run."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._checks import check_range
from rtxarr._device import (
    _SIMULATING,
    empty,
    launch,
    launch_planned,
    namespace,
    nothing,
    runs_kernels,
)
from rtxarr._override import overridable
from rtxarr.dtypes import accumulator
from rtxarr.kernels.segment import (
    can_be_wide,
    check_index,
    check_operation,
    reduce_masked,
    row_block,
    row_by_row,
    segment_reduce,
)
from rtxarr.kernels.sort import group_rows

__all__ = ["scatter_reduce"]

# Rows that one group of threads adds up alone: few, as a common word's rows are read from all over
# memory.
_CHUNK = 64
# What is sorted by digits is marked and added up like few entries where rows have at least _WIDE
# bytes, and there are fewer than _MOST entries, for which the bits of a mark suffice.
_MOST, _WIDE = 1 << 28, 32 if _SIMULATING else 1024
# Blocks that fill the result, and the one that sorts meanwhile.
_BLOCKS = 3 if _SIMULATING else 529


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
        sort = _sort_of(index.shape[0], n_rows)
        is_wide = values.shape[1] * values.dtype.itemsize >= _WIDE
        if sort or is_wide and index.shape[0] < _MOST and n_rows < 2**31:
            return _sort_and_sum(op, index, values, n_rows, sort)
        order, indptr = group_rows(index, n_rows)
        return segment_reduce(op, values, indptr, indices=order, chunk=_CHUNK)
    order = xp.argsort(index, stable=True)
    rows = xp.arange(n_rows + 1, dtype=index.dtype)
    indptr = xp.astype(xp.searchsorted(index[order], rows), xp.int64, copy=False)
    return segment_reduce(op, values, indptr, indices=order)


def _sort_of(n: int, n_rows: int) -> tuple[int, int] | None:
    """Give the threads of the block that sorts, and entries of each; None if they are too many.

    A row and an entry share a word of 32 bits.
    """
    from rtxarr.kernels._scatter_cuda import SORTS

    for threads, each in SORTS:
        most = threads * each
        if n <= most and n_rows.bit_length() + (most - 1).bit_length() <= 32:
            return threads, each
    return None


def _sort_and_sum(op: str, index: Any, values: Any, n_rows: int, sort: tuple | None) -> Any:
    """Sort by a block, or by digits, and add up."""
    from rtxarr.kernels._scatter_cuda import AT_ONCE, DIGIT_BITS, ROWS_EACH, mark, scratch_part

    n, n_features = values.shape
    flat = row_by_row(values)
    scalar, int32 = accumulator(values.dtype), np.dtype(np.int32)
    out = empty(flat, (n_rows, n_features), values.dtype)
    wide = can_be_wide(flat, n_features)
    width = {2: 8, 4: 4}[values.dtype.itemsize] if wide else 1
    n_slots = 2 * (n // _CHUNK)
    n_counters = n_slots * (n_features // width)
    scratch = empty(flat, (4 * scratch_part(n) + n_counters,), int32)
    partial = empty(flat, (n_slots * n_features,), scalar) if n_slots else nothing(flat, scalar)
    given = op, values.dtype, wide, _CHUNK
    block = row_block(n_features, width)
    n_sums = n_blocks = -(-n // (min(AT_ONCE, _CHUNK) * block[1]))
    if sort:
        n_passes = -(-n_rows.bit_length() // DIGIT_BITS)
        arguments: tuple[Any, ...] = index, out, scratch, n_counters, n_rows, n_passes, sort[1]
        launch_planned(_fill_and_sort, (*given, *sort), arguments)
        starts = nothing(flat, int32)
    else:
        order, starts = group_rows(index, n_rows)
        n_threads = max(n_counters, scratch_part(n))
        launch(mark(_CHUNK), n_threads, (order, starts, scratch, n_counters))
        n_blocks += -(-n_rows // (block[1] * ROWS_EACH))
    arguments = flat, scratch, starts, partial, out, n, n_features, n_rows, n_sums
    launch_planned(_add_up, (*given, n_blocks, block), arguments)
    return out


def _fill_and_sort(options, args):
    """Choose the kernel of the first launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import fill_and_sort

    return fill_and_sort(*options), _BLOCKS, options[-2]


def _add_up(options, args):
    """Choose the kernel of the second launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import add_up

    *given, n_blocks, block = options
    return add_up(*given), n_blocks, block


def _sum_host(index: np.ndarray, values: np.ndarray, n_rows: int) -> np.ndarray:
    """Add in order without sorting: a sparse matrix with one 1 a column, times ``values``."""
    from scipy import sparse

    n_values = index.shape[0]
    total = values.astype(accumulator(values.dtype), copy=False)
    ones = np.ones(n_values, dtype=total.dtype)
    matrix = sparse.csc_array((ones, index, np.arange(n_values + 1)), shape=(n_rows, n_values))
    return (matrix @ total).astype(values.dtype, copy=False)
