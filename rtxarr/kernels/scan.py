"""Running sums, products and extrema along one axis of an array on a GPU, in a fixed order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, launch, namespace, runs_kernels
from rtxarr.dtypes import accumulator, is_half
from rtxarr.kernels.segment import can_be_wide, row_by_row

__all__ = ["fits", "running_extrema", "scan"]

_DTYPES = ("float32", "float64", "complex64", "complex128", "int64", "uint64")

# Rows. A thread holds so many registers of elements at most; so many threads make a block, and so
# many at most share a row. A row that needs more is cut into chunks, so many at most that their
# totals fit in a block; but not if there are rows enough to keep a GPU busy with a block each.
_REGISTERS, _SHARED, _LANES = (8, 4, 4) if _SIMULATING else (16, 128, 256)
_CHUNKS, _ENOUGH = (3, 5) if _SIMULATING else (1024, 512)

# Columns. Below so many threads columns are cut into chunks, of so many rows or more.
_THREADS, _ROWS, _BLOCK = (64, 4, 8) if _SIMULATING else (1 << 17, 32, 256)


def fits(x: Any, dtype: Any) -> bool:
    """Tell whether the kernels take the raw array ``x``, scanned as numbers of ``dtype``."""
    return runs_kernels(x) and (is_half(dtype) or dtype in _DTYPES)


def scan(op: str, x: Any, *, axis: int) -> Any:
    """Combine each element with all before it.

    Parameters
    ----------
    op : {"sum", "prod", "max", "min"}
    x : array of a floating or complex type, int64 or uint64, on a GPU
        Half types are accumulated in float32 and rounded once. Complex numbers have no extrema.
    axis : int, not negative
        Where ``x`` is a flipped view, so is the result: nothing is copied then.

    Returns
    -------
    array, shape and dtype of ``x``

    Raises
    ------
    ValueError
        When ``op`` or ``axis`` is none of these.
    TypeError
        When extrema of complex numbers are asked for.

    Notes
    -----
    The order is fixed by the shape and the type: equal inputs give equal bits. Memory is read
    once, and twice where one block a row would not keep a GPU busy; an array that begins between
    multiples of 16 bytes is copied before. Nothing waits for the GPU.
    """
    if op not in ("sum", "prod", "max", "min"):
        raise ValueError(f"op must be 'sum', 'prod', 'max' or 'min', got {op!r}")
    if op in ("max", "min") and x.dtype.kind == "c":
        raise TypeError(f"{op!r} takes real numbers, got {x.dtype}")
    if not 0 <= axis < x.ndim:
        raise ValueError(f"axis must be from 0 to {x.ndim - 1}, got {axis}")
    xp = namespace(x)
    shape, dtype, n = x.shape, x.dtype, x.shape[axis]
    if x.size == 0:
        return xp.empty(shape, dtype=dtype)
    reverse = x.strides[axis] < 0
    flat = row_by_row(xp.flip(x, axis=axis) if reverse else x)
    if (is_half(dtype) or dtype == np.float32) and not can_be_wide(flat, 0):
        flat = flat.copy()  # elsewhere in memory the order would be another
    turn = None
    if dtype == np.uint64:  # sums and products have the same bits
        flat = flat.view(np.int64)
        if op in ("max", "min"):  # the order of the others is that of numbers less 2**63
            turn = np.int64(-(2**63))
            flat = flat ^ turn
    n_columns = math.prod(shape[axis + 1 :])
    if n_columns == 1:
        out = _along_rows(xp, op, flat, n, reverse)
    else:
        out = _along_columns(xp, op, flat, n, n_columns, reverse)
    if turn is not None:
        out = out ^ turn
    out = xp.reshape(out.view(dtype), shape)
    return xp.flip(out, axis=axis) if reverse else out


def running_extrema(op: str, x: Any, *, axis: int) -> Any:
    """Give the largest or the least of each element and all before it, of any array's library.

    Parameters
    ----------
    op : {"max", "min"}
    x : array of real numbers or bools
    axis : int, not negative

    Returns
    -------
    array, shape and dtype of ``x``
        NaN wins.
    """
    xp, dtype = namespace(x), x.dtype
    if runs_kernels(x):
        wide = dtype if fits(x, dtype) else np.dtype(np.int64)
        return xp.astype(scan(op, xp.astype(x, wide, copy=False), axis=axis), dtype, copy=False)
    if isinstance(x, np.ndarray):
        return (np.maximum if op == "max" else np.minimum).accumulate(x, axis=axis)
    combine = xp.maximum if op == "max" else xp.minimum
    before: Any = (slice(None),) * axis
    apart = 1
    while apart < x.shape[axis]:  # each is combined with what lies so far before it
        first, later = (*before, slice(None, apart), ...), (*before, slice(apart, None), ...)
        earlier = (*before, slice(None, -apart), ...)
        x = xp.concat([x[first], combine(x[earlier], x[later])], axis=axis)
        apart *= 2
    return x


def _along_rows(xp: Any, op: str, flat: Any, n: int, reverse: bool) -> Any:
    from rtxarr.kernels._scan_cuda import along_rows

    dtype, n_rows = flat.dtype, flat.size // n
    out = xp.empty(flat.size, dtype=dtype)
    wide, loose = can_be_wide(flat, n), can_be_wide(flat, 0)
    plan = row_plan(n, dtype, wide, loose)
    totals, kernel = along_rows(op, dtype, plan, reverse)
    n_tiles, n_chunks = cut(n, n_rows, plan)
    blocks = plan.blocks(n_rows * n_chunks)
    ends = xp.empty(n_rows * n_chunks if n_chunks > 1 else 1, dtype=accumulator(dtype))
    if n_chunks > 1:
        launch(totals, blocks, (flat, ends, n, n_chunks, n_tiles), block=plan.block)
        ends = _along_rows(xp, op, ends, n_chunks, reverse)
    launch(kernel, blocks, (flat, ends, out, n, n_chunks, n_tiles), block=plan.block)
    return out


def cut(n: int, n_rows: int, plan: Any) -> tuple[int, int]:
    """Return of how many tiles a chunk of a row is, and how many chunks are in a row."""
    # A loose row may begin late in its first tile.
    all_tiles = -(-(n + (plan.width - 1) * plan.loose) // plan.tile)
    n_tiles = all_tiles if n_rows >= _ENOUGH else -(-all_tiles // _CHUNKS)
    return n_tiles, -(-all_tiles // n_tiles)


def row_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal rows out, so that the threads of a row that is cut into tiles are a block."""
    from rtxarr.kernels._plan import plan_rows

    # A piece of half numbers takes twice the registers; products of complex numbers take more.
    fewer = 2 if is_half(dtype) or dtype.kind == "c" else 1
    return plan_rows(
        n,
        dtype,
        wide=wide,
        loose=loose,
        pieces=_REGISTERS // 4 // fewer,
        most=_REGISTERS,
        threads=_SHARED,
        lanes=_LANES,
    )


def _along_columns(xp: Any, op: str, flat: Any, n: int, n_columns: int, reverse: bool) -> Any:
    from rtxarr.kernels._scan_cuda import along_columns

    dtype = flat.dtype
    out = xp.empty(flat.size, dtype=dtype)
    wide = can_be_wide(flat, n_columns)
    totals, kernel = along_columns(op, dtype, wide, reverse)
    per_thread = 16 // dtype.itemsize if wide else 1
    n_threads = flat.size // n // per_thread
    length = -(-n // max(1, min(n // _ROWS, _THREADS // n_threads)))
    n_chunks = -(-n // length)
    ends = xp.empty(flat.size // n * n_chunks if n_chunks > 1 else 1, dtype=accumulator(dtype))
    grid = -(-n_threads * n_chunks // _BLOCK)
    if n_chunks > 1:
        arguments = (flat, ends, n, n_columns, n_chunks, length)
        launch(totals, grid, arguments, block=_BLOCK)
        ends = _along_columns(xp, op, ends, n_chunks, n_columns, reverse)
    launch(kernel, grid, (flat, ends, out, n, n_columns, n_chunks, length), block=_BLOCK)
    return out
