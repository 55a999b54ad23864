"""Rotary position embedding in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels
from rtxarr.dtypes import accumulator, is_half
from rtxarr.kernels.segment import can_be_wide, row_by_row

__all__ = ["fits", "rotate"]

_ROWS = 4  # with the same angles, that a thread takes: these are read once


def fits(x: Any) -> bool:
    """Tell whether the kernel takes this array."""
    if not runs_kernels(x) or x.size == 0:
        return False
    return x.dtype in (np.float32, np.float64) or is_half(x.dtype)


def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool, inverse: bool) -> Any:
    """Turn pairs of elements along the last axis.

    Parameters
    ----------
    x : array of a real floating dtype, shape (..., head_dim)
        One that :func:`fits`.
    cos, sin : array of a real floating dtype, broadcast to (..., n_pairs)
        ``2 * n_pairs`` is at most ``head_dim``, and what is beyond is copied.
    interleaved : bool
        Whether pairs are neighbours, or elements ``i`` and ``i + n_pairs``.
    inverse : bool
        Turn the other way.

    Returns
    -------
    array, shape and dtype of ``x``
        In the memory order of ``x`` if the last axis is the innermost one, else row by row.
    """
    from rtxarr.kernels._rotary_cuda import THREADS, kernel

    xp = namespace(x, cos, sin)
    order = _memory_order(x)
    x = x.transpose(order)
    length, half, scalar = x.shape[-1], cos.shape[-1], accumulator(x.dtype)
    out = xp.empty(x.shape, dtype=x.dtype)
    flat, target = row_by_row(x), xp.reshape(out, (-1,))
    cos, sin, inner, period = _angles(xp, (cos, sin), x.shape, order, scalar)
    # Every piece that a thread takes must begin at a multiple of 16 bytes.
    pairs = half if not interleaved else 2 * half
    wide = all(can_be_wide(flat, n) for n in (length, pairs)) and _aligned(cos, sin)
    width = 16 // x.dtype.itemsize if wide else 1
    items = -(-length // max(width, 2)) if interleaved else (length - half) // width
    n_rows = flat.size // length
    # Rows with the same angles: neighbours, or else every ``period``-th.
    apart, count = (1, inner) if inner > 1 else (period, n_rows // period)
    bases, rows = n_rows // count, min(_ROWS, 1 << count.bit_length() - 1)
    block = min(items, THREADS), max(1, THREADS // items)
    n_chunks = bases * -(-count // rows)
    sizes = length, half, bases, count if inner > 1 else 1, apart, count, period
    launch(
        kernel(x.dtype, wide, interleaved, rows),
        (-(-n_chunks // block[1]), -(-items // block[0])),
        (flat, cos, sin, target, *sizes, scalar.type(-1 if inverse else 1)),
        block=block,
    )
    return out.transpose(tuple(int(i) for i in np.argsort(order)))


def _aligned(*arrays: Any) -> bool:
    return all(can_be_wide(a, 4) for a in arrays)


def _memory_order(x: Any) -> tuple[int, ...]:
    """Order the axes but the last, which stays, as they lie in memory."""
    leading = sorted(range(x.ndim - 1), key=lambda i: -x.strides[i])
    order = (*leading, x.ndim - 1)
    return order if x.transpose(order).flags.c_contiguous else tuple(range(x.ndim))


def _angles(xp: Any, angles: tuple, shape: tuple, order: tuple, dtype: Any) -> tuple:
    """Give the flat cosines and sines, and which of their rows turns which row of the array."""
    found = []
    for a in angles:
        a = xp.reshape(a, (1,) * (len(shape) - a.ndim) + tuple(a.shape)).transpose(order)
        found.append(xp.astype(a, dtype, copy=False))
    sizes = [c for c, n in zip(found[0].shape[:-1], shape[:-1], strict=True) if n > 1]
    lengths = [n for n in shape[:-1] if n > 1]
    # Axes that the angles have must be neighbours, with others before and after them.
    has = [c > 1 for c in sizes]
    first = has.index(True) if any(has) else 0
    last = len(has) - has[::-1].index(True) if any(has) else 0
    if found[0].shape == found[1].shape and all(has[first:last]):
        inner, period = math.prod(lengths[last:]), math.prod(lengths[first:last])
    else:
        full = (*shape[:-1], found[0].shape[-1])
        found = [xp.broadcast_to(a, full) for a in found]
        inner, period = 1, math.prod(shape[:-1])
    return *(row_by_row(a) for a in found), max(1, inner), max(1, period)
