"""Reductions of contiguous row segments (CSR row pointers), and of gathered rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr._checks import check_range
from rtxarr._device import constant, launch, namespace, runs_kernels
from rtxarr._override import overridable
from rtxarr.dtypes import accumulator, iinfo, is_floating, is_half, is_inexact, isdtype
from rtxarr.kernels.multi_tensor import contiguous

__all__ = ["column_sums", "segment_reduce", "spread"]

_OPS = ("sum", "mean", "max", "min")

# Rows that one group of threads adds up alone. A longer segment is cut into chunks of so many rows,
# counted from its own start, so its bits do not depend on what else is in the batch.
_CHUNK = 1024
# Of the rows of one array, as many partial sums in the first pass; and what is joined at once.
_PARTS, _JOINED = 8192, 512


@overridable
def segment_reduce(
    op: str, values: Any, indptr: Any, *, indices: Any = None, chunk: int | None = None
) -> Any:
    """Reduce the rows of each segment.

    Parameters
    ----------
    op : {"sum", "mean", "max", "min"}
    values : array of any real type, shape (n_values, n_features)
        For "sum" also complex; for "mean" not of integers. Half types are summed in float32.
    indptr : array of int64, shape (n_segments + 1,)
        Segment ``i`` owns rows ``indptr[i]:indptr[i + 1]``. On a GPU not checked to be
        non-decreasing and within range: that would read it back to the host.
    indices : array of int32 or int64, shape (n_indices,), optional
        If given, ``indptr`` points into it: segment ``i`` owns the rows of ``values`` that
        ``indices[indptr[i]:indptr[i + 1]]`` names. On a GPU not checked to be in range.
    chunk : int, default 1024
        Rows that one group of threads adds up alone on a GPU.

    Returns
    -------
    array, shape (n_segments, n_features), dtype of ``values``
        Segments of up to ``chunk`` rows are reduced in order, longer ones in chunks of so many rows
        and then over the chunks, in a fixed order: equal inputs give equal bits. An empty segment
        gives 0 for "sum" and "mean", and for "max" and "min" the type's lowest or highest value
        (an infinity for floating types). NaN wins in "max" and "min".
    """
    xp = namespace(values, indptr, indices)
    _check(xp, op, values, indptr, indices)
    shape = (indptr.shape[0] - 1, values.shape[1])
    if 0 in shape:
        return xp.empty(shape, dtype=values.dtype)
    if runs_kernels(values):
        return _reduce_gpu(xp, op, values, indptr, indices, shape, chunk or _CHUNK)
    if isinstance(values, np.ndarray):
        return _reduce_host(op, values, indptr, indices, shape)
    if indices is not None:
        values = xp.take(values, indices, axis=0)
    rows = xp.arange(values.shape[0], dtype=indptr.dtype)
    owned = (rows >= indptr[:-1, None]) & (rows < indptr[1:, None])
    return reduce_masked(xp, op, values, owned)


@overridable
def spread(values: Any, indptr: Any, rows: Any) -> Any:
    """Give each of the segments' rows the row of ``values`` that belongs to its segment.

    Parameters
    ----------
    values : array, shape (n_segments, ...)
    indptr : array of int64, shape (n_segments + 1,)
        As :func:`segment_reduce` takes it.
    rows : array of int64, shape (n_values,)
        The segment of each.

    Returns
    -------
    array, shape (n_values, ...)
    """
    return namespace(values).take(values, rows, axis=0)


def _check(xp: Any, op: str, values: Any, indptr: Any, indices: Any) -> None:
    check_operation(op, values.dtype)
    if values.ndim != 2:
        raise ValueError(f"values must have shape (n_values, n_features), got {values.shape}")
    if indptr.ndim != 1 or indptr.shape[0] == 0:
        raise ValueError(f"indptr must have shape (n_segments + 1,), got {indptr.shape}")
    if indptr.dtype != xp.int64:
        raise TypeError(f"indptr must be int64, got {indptr.dtype}")
    if indices is not None:
        check_index(xp, "indices", indices)


def check_operation(op: str, dtype: Any) -> None:
    """Refuse an unknown operation, or one that values of this type have not."""
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    right = is_inexact(dtype) if op in ("sum", "mean") else is_floating(dtype)
    if not (right or (op != "mean" and isdtype(dtype, "integral"))):
        raise TypeError(f"{op!r} does not take values of {dtype}")


def check_index(xp: Any, name: str, index: Any) -> None:
    """Refuse what is not a list of row numbers, by its metadata alone."""
    if index.ndim != 1 or index.dtype not in (xp.int32, xp.int64):
        raise TypeError(f"{name} must be 1-D int32 or int64, got {index.ndim}-D {index.dtype}")


def identity(op: str, dtype: Any) -> float:
    """Return what ``op`` over no rows gives, as a Python number."""
    if op in ("sum", "mean"):
        return 0
    if is_floating(dtype):
        return -math.inf if op == "max" else math.inf
    info = iinfo(dtype)
    return info.min if op == "max" else info.max


# ----------------------------------------------------------------------------------- on a GPU


def _reduce_gpu(
    xp: Any, op: str, values: Any, indptr: Any, indices: Any, shape: tuple, chunk: int
) -> Any:
    from rtxarr.kernels._segment_cuda import JOIN_BLOCK, kernels

    n_features = shape[1]
    flat = row_by_row(values)
    out = xp.empty(shape[0] * n_features, dtype=values.dtype)
    width = {2: 8, 4: 4}[values.dtype.itemsize] if can_be_wide(flat, n_features) else 1
    rows, chunks, join = kernels(op, values.dtype, width > 1, indices is not None)
    n_rows = flat.shape[0] // n_features if indices is None else indices.shape[0]
    indices = indptr if indices is None else indices

    block = row_block(n_features, width)  # y and the grid run over segments or chunks

    def blocks(n: int) -> int:
        return -(-n // block[1])

    launch(rows, blocks(shape[0]), (flat, indptr, indices, out, n_features, chunk), block=block)
    if n_rows > chunk:  # else no segment can be long
        slots = 2 * (n_rows // chunk)
        partial = xp.empty(slots * n_features, dtype=accumulator(values.dtype))
        arguments = (flat, indptr, indices, partial, n_features, chunk)
        launch(chunks, blocks(slots), arguments, block=block)
        grid = -(-slots // JOIN_BLOCK[0]), -(-n_features // JOIN_BLOCK[0])
        launch(join, grid, (indptr, partial, out, n_features, chunk), block=JOIN_BLOCK)
    return xp.reshape(out, shape)


def column_sums(values: Any) -> Any:
    """Add up the rows of an array where kernels run, at the speed of memory however many there are.

    Parameters
    ----------
    values : array of a floating type, shape (n_rows, n_features)

    Returns
    -------
    array of float32 for half types, else of their dtype, shape (n_features,)
        Summed in a fixed order.
    """
    from rtxarr.kernels._segment_cuda import JOIN_BLOCK, kernels

    xp, scalar = namespace(values), accumulator(values.dtype)
    n_rows, n_features = values.shape
    if n_rows < 2 or n_features == 0:
        return xp.sum(xp.astype(values, scalar, copy=False), axis=0)
    flat = row_by_row(values)
    while n_rows > _JOINED or flat.dtype != scalar:
        each = max(min(32, n_rows - 1), n_rows // _PARTS)
        n_parts = -(-n_rows // each)
        partial = xp.empty(n_parts * n_features, dtype=scalar)
        width = {2: 8, 4: 4}[flat.dtype.itemsize] if can_be_wide(flat, n_features) else 1
        _, chunks, _ = kernels("sum", flat.dtype, width > 1, False)
        pointers, block = _pointers(values, n_rows), row_block(n_features, width)
        arguments = (flat, pointers, pointers, partial, n_features, each)
        launch(chunks, -(-n_parts // block[1]), arguments, block=block)
        flat, n_rows = partial, n_parts
    out = xp.empty(n_features, dtype=scalar)
    _, _, join = kernels("sum", scalar, False, False)
    grid = 1, -(-n_features // JOIN_BLOCK[0])  # the first block alone has a segment to join
    launch(join, grid, (_pointers(values, n_rows), flat, out, n_features, 1), block=JOIN_BLOCK)
    return out


def _pointers(like: Any, n_rows: int) -> Any:
    """Give the pointers of one segment with all rows."""
    return constant(like, _ends, n_rows, dtype=np.int64)


def _ends(n_rows: int) -> list[int]:
    return [0, n_rows]


def row_block(n_features: int, width: int) -> tuple[int, int]:
    """Give the block whose threads along x share a row, each with ``width`` features at a time."""
    lanes = min(128, 1 << (-(-n_features // width) - 1).bit_length())
    return lanes, 256 // lanes


def row_by_row(x: Any) -> Any:
    """Give the elements of an array row by row, as one contiguous axis; copied if they lie else."""
    # One axis of a strided array, and several of a broadcast one, become one without a copy.
    flat = x if x.ndim == 1 else x.reshape(-1)
    return flat if contiguous(flat) else flat.copy()


def can_be_wide(flat: Any, n_features: int) -> bool:
    """Tell whether every row starts at a multiple of 16 bytes and the type has wide access."""
    dtype = flat.dtype
    if not (is_half(dtype) or dtype == np.float32):
        return False
    address = flat.ctypes.data if isinstance(flat, np.ndarray) else flat.data.ptr
    return n_features * dtype.itemsize % 16 == 0 and address % 16 == 0


# ---------------------------------------------------------------------------------- on the CPU


def _reduce_host(op: str, values: Any, indptr: Any, indices: Any, shape: tuple) -> Any:
    _check_pointers(indptr, values.shape[0] if indices is None else indices.shape[0])
    if indices is not None:
        check_range("indices", indices, 0, values.shape[0])
    if op in ("sum", "mean"):
        total = _sum_host(values, indptr, indices, shape)
        if op == "mean":
            count = np.maximum(np.diff(indptr), 1).astype(total.dtype)
            total /= count[:, None]
        return total.astype(values.dtype, copy=False)
    wide = values.astype(accumulator(values.dtype), copy=False)
    return _extremum_host(op, wide, indptr, indices, shape).astype(values.dtype, copy=False)


# Segments up to this long are reduced side by side, all first rows, then all second rows, ...
_SIDE_BY_SIDE = 32


def _extremum_host(op: str, values: Any, indptr: Any, indices: Any, shape: tuple) -> np.ndarray:
    # np.maximum.reduceat gives the same at a tenth of the speed.
    ufunc = np.maximum if op == "max" else np.minimum
    out = np.full(shape, identity(op, values.dtype), dtype=values.dtype)
    lengths = np.diff(indptr)
    for i in np.flatnonzero(lengths > _SIDE_BY_SIDE):
        rows = slice(indptr[i], indptr[i + 1])
        out[i] = ufunc.reduce(values[rows if indices is None else indices[rows]], axis=0)
    short = np.flatnonzero((lengths > 0) & (lengths <= _SIDE_BY_SIDE))
    short = short[np.argsort(-lengths[short], kind="stable")]
    start, lengths = indptr[short], lengths[short]
    best = out[short]
    for k in range(lengths[0] if short.size else 0):
        n = np.searchsorted(-lengths, -k)  # the first n are longer than k
        rows = start[:n] + k
        rows = rows if indices is None else indices[rows]
        ufunc(best[:n], values[rows], out=best[:n])
    out[short] = best
    return out


def _sum_host(values: np.ndarray, indptr: Any, indices: Any, shape: tuple) -> np.ndarray:
    """Sum as a sparse matrix of ones times ``values``: rows in order, in compiled code."""
    from scipy import sparse

    values = values.astype(accumulator(values.dtype), copy=False)
    columns = np.arange(values.shape[0]) if indices is None else indices
    ones = np.ones(columns.shape[0], dtype=values.dtype)
    matrix = sparse.csr_array((ones, columns, indptr), shape=(shape[0], values.shape[0]))
    return matrix @ values


def _check_pointers(indptr: np.ndarray, n: int) -> None:
    if indptr[0] < 0 or indptr[-1] > n or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"indptr must not decrease and must lie in [0, {n}]")


# ---------------------------------------------------------- other libraries' arrays: plain and slow


def reduce_masked(xp: Any, op: str, values: Any, owned: Any) -> Any:
    """Reduce, for each row of the boolean matrix ``owned``, the values it is True for."""
    total_type = accumulator(values.dtype)
    owned, wide = owned[:, :, None], xp.astype(values, total_type, copy=False)[None, :, :]
    nothing = identity(op, values.dtype)
    chosen = xp.where(owned, wide, xp.asarray(nothing, dtype=total_type))
    if op in ("sum", "mean"):
        out = xp.sum(chosen, axis=1, dtype=total_type)
        if op == "mean":
            count = xp.sum(xp.astype(owned, total_type), axis=1)
            out = out / xp.where(count > 0, count, xp.asarray(1, dtype=total_type))
    elif values.shape[0] == 0:
        out = xp.full((owned.shape[0], values.shape[1]), nothing, dtype=total_type)
    else:
        out = (xp.max if op == "max" else xp.min)(chosen, axis=1)
    return xp.astype(out, values.dtype, copy=False)
