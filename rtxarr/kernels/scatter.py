"""Scatter with duplicate indices, in a fixed order: the same bits on every run."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._checks import check_range
from rtxarr._device import (
    _SIMULATING,
    empty,
    launch_planned,
    namespace,
    nothing,
    runs_kernels,
)
from rtxarr._override import overridable
from rtxarr.dtypes import accumulator
from rtxarr.kernels._limits import shared_memory
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
_CHUNK, _CHUNK_OF_FEW = 64, 16
# The most entries that each block looks at all of, and the part of its rows that it fills before it
# knows which entries name.
_FEW, _BLIND = (32 if _SIMULATING else 8192), 0.3
# Bytes of shared memory of a block that orders entries, at most.
_ROOM = 99 << 10
# Threads of a warp, and blocks that add up the units of rows, for each block of features.
_LANES, _JOINS = (4, 2) if _SIMULATING else (32, 32)


def _spread(n_bytes: int) -> tuple[int, int]:
    """Return about how many blocks there are, and the bytes of a row that one takes."""
    if _SIMULATING:
        return 6, 32
    return (264, 128) if n_bytes == 2 else (528, 256)


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
        Rows with the same index are combined in their order in ``values``; on a GPU in chunks of
        16 of up to 8192 values, and of 64 of more, and then over the chunks, in a fixed order. A
        row that no index names is what ``segment_reduce`` gives for an empty segment.
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
        # A grid has no more than 65535 blocks along y.
        if _has_room(index):
            if index.shape[0] <= _FEW and n_rows <= 1 << 26:
                return _combine_few(op, index, values, n_rows)
            if _can_sort(index.shape[0], n_rows):
                return _sort_and_sum(op, index, values, n_rows)
        order, indptr = group_rows(index, n_rows)
        return segment_reduce(op, values, indptr, indices=order, chunk=_CHUNK)
    order = xp.argsort(index, stable=True)
    rows = xp.arange(n_rows + 1, dtype=index.dtype)
    indptr = xp.astype(xp.searchsorted(index[order], rows), xp.int64, copy=False)
    return segment_reduce(op, values, indptr, indices=order)


def _combine_few(op: str, index: Any, values: Any, n_rows: int) -> Any:
    """Combine in one launch, by blocks that own rows and look for their entries."""
    from rtxarr.kernels._scatter_few_cuda import EACH, MOST_ROWS, THREADS

    n, n_features = values.shape
    flat = row_by_row(values)
    scalar, n_bytes = accumulator(values.dtype), values.dtype.itemsize
    out = empty(flat, (n_rows, n_features), values.dtype)
    n_slots = 2 * (n // _CHUNK_OF_FEW)
    partial = empty(flat, (n_slots * n_features,), scalar) if n_slots else nothing(flat, scalar)
    wide = can_be_wide(flat, n_features)
    width = {2: 8, 4: 4}[n_bytes] if wide else 1
    n_blocks, piece = _spread(n_bytes)
    lanes = min(_LANES, max(1, piece // (width * n_bytes)), -(-n_features // width))
    lanes = 1 << (lanes - 1).bit_length()
    n_pieces = -(-n_features // (lanes * width))
    # Rows of few bytes are owned in runs of neighbours.
    low = (max(1, piece // (n_features * n_bytes)) - 1).bit_length()
    n_runs = -(-n_rows >> low)
    bits = min(n_runs, max(1, n_blocks // n_pieces)).bit_length() - 1
    bits = max(bits, (-((-n_runs << low) // MOST_ROWS) - 1).bit_length())
    n_blind = int(_BLIND * (-(-n_runs >> bits) << low))
    per_thread = next(each for each in EACH if n <= THREADS * each)
    grid = n_pieces, min(n_runs, 1 << bits)
    options = op, values.dtype, wide, _CHUNK_OF_FEW, lanes, low, per_thread, grid
    numbers = n_features, n_rows, bits, -(-n // THREADS), n_blind
    launch_planned(_few, options, (index, flat, partial, out, *numbers))
    return out


def _few(options, args):
    """Choose the kernel, the blocks and the block."""
    from rtxarr.kernels._scatter_few_cuda import THREADS, combine_few

    *given, n_blocks = options
    return combine_few(*given), n_blocks, THREADS


def _has_room(index: Any) -> bool:
    """Tell whether a block can have the shared memory that kernels which order entries take."""
    return _SIMULATING or shared_memory(index.data.device_id) >= _ROOM


def _can_sort(n: int, n_rows: int) -> bool:
    """Tell whether two launches sort: a row of a run and an entry share a word of 32 bits."""
    from rtxarr.kernels import _scatter_cuda as kernels

    n_own = -(-n_rows >> kernels.RUN_BITS)
    most = kernels.MOST_TILES * kernels.GROUP_THREADS * kernels.GROUP_EACH
    return (
        n <= most
        and n_own < kernels.COUNTERS // 4
        and n_own.bit_length() + (n - 1).bit_length() <= 32
    )


def _sort_and_sum(op: str, index: Any, values: Any, n_rows: int) -> Any:
    """Sort in two launches, and add up."""
    from rtxarr.kernels import _scatter_cuda as kernels

    n, n_features = values.shape
    flat = row_by_row(values)
    scalar, int32, uint32 = accumulator(values.dtype), np.dtype(np.int32), np.dtype(np.uint32)
    out = empty(flat, (n_rows, n_features), values.dtype)
    wide = can_be_wide(flat, n_features)
    width = {2: 8, 4: 4}[values.dtype.itemsize] if wide else 1
    n_slots, n_long = 2 * (n // _CHUNK), n // (_CHUNK + 1)
    places, longs = empty(flat, (4 * n,), int32), empty(flat, (2 + 3 * n_long,), int32)
    counts = empty(flat, (n_rows,), int32)
    partial = empty(flat, (n_slots * n_features,), scalar) if n_slots else nothing(flat, scalar)

    n_tiles = -(-n // (kernels.GROUP_THREADS * kernels.GROUP_EACH))
    n_runs = 1 << kernels.RUN_BITS
    n_own = -(-n_rows // n_runs)
    most = max(kernels.COUNTERS * kernels.LANES // kernels.ORDER_THREADS, 1 << n_own.bit_length())
    entry_bits = 33 - most.bit_length()  # all that a row of a run leaves of a word
    grouped, starts = empty(flat, (n,), uint32), empty(flat, (n_tiles * (n_runs + 1),), uint32)
    launch_planned(_group, (entry_bits, n_tiles), (index, grouped, starts, longs, n_rows))
    arguments: tuple[Any, ...] = grouped, starts, places, longs, counts, n_rows, n_tiles
    launch_planned(_order, (entry_bits, most, _CHUNK, min(n_rows, n_runs)), arguments)

    block = row_block(n_features, width)
    n_sums = -(-n // (block[1] * kernels.places_each(block[1])))
    n_blocks = n_sums + -(-n_rows // (block[1] * kernels.ROWS_EACH))
    arguments = flat, places, longs, counts, partial, out, n_features, n_sums
    launch_planned(_add_up, (op, values.dtype, wide, _CHUNK, n_blocks, block), arguments)
    if n_long:  # else no row has several units
        grid = min(n_long, _JOINS), -(-n_features // kernels.JOIN_BLOCK[0])
        launch_planned(_join, (op, values.dtype, _CHUNK, grid), (longs, partial, out, n_features))
    return out


def _group(options, args):
    """Choose the kernel of the first launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import GROUP_THREADS, group

    return group(options[0]), options[1], GROUP_THREADS


def _order(options, args):
    """Choose the kernel of the second launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import ORDER_THREADS, order

    return order(*options[:3]), options[3], ORDER_THREADS


def _add_up(options, args):
    """Choose the kernel of the third launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import add_up

    *given, n_blocks, block = options
    return add_up(*given, block[1]), n_blocks, block


def _join(options, args):
    """Choose the kernel of the last launch, the blocks and the block."""
    from rtxarr.kernels._scatter_cuda import JOIN_BLOCK, join

    return join(*options[:3]), options[3], JOIN_BLOCK


def _sum_host(index: np.ndarray, values: np.ndarray, n_rows: int) -> np.ndarray:
    """Add in order without sorting: a sparse matrix with one 1 a column, times ``values``."""
    from scipy import sparse

    n_values = index.shape[0]
    total = values.astype(accumulator(values.dtype), copy=False)
    ones = np.ones(n_values, dtype=total.dtype)
    matrix = sparse.csc_array((ones, index, np.arange(n_values + 1)), shape=(n_rows, n_values))
    return (matrix @ total).astype(values.dtype, copy=False)
