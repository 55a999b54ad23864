"""Rotary position embedding in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr._device import empty, launch_planned, namespace, runs_kernels
from rtxarr.dtypes import accumulator, is_half
from rtxarr.kernels._dense import packed
from rtxarr.kernels.multi_tensor import contiguous
from rtxarr.kernels.segment import can_be_wide

__all__ = ["fits", "rotate"]

_ROWS = 2  # with the same angles, that a thread takes: these are read once


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
    order, scalar = None, accumulator(x.dtype)
    if not contiguous(x):
        order = _memory_order(x)
        x = packed(x.transpose(order))
    cos, sin, inner, period = _angles((cos, sin), x.shape, order, scalar)
    out = empty(x, x.shape, x.dtype)
    length, half = x.shape[-1], cos.shape[-1]
    # Rows with the same angles: neighbours, or else every ``period``-th.
    n_rows = x.size // length
    apart, count = (1, inner) if inner > 1 else (period, n_rows // period)
    bases = n_rows // count
    sizes = length, half, bases, count if inner > 1 else 1, apart, count, period
    sign = scalar.type(-1 if inverse else 1)
    launch_planned(_plan, (interleaved, bases, count), (x, cos, sin, out, *sizes, sign))
    return out if order is None else out.transpose(tuple(int(i) for i in np.argsort(order)))


def _plan(options, args):
    """Choose the kernel, the blocks and the block."""
    from rtxarr.kernels._rotary_cuda import THREADS, kernel

    interleaved, bases, count = options
    x, cos, sin = args[:3]
    length, half = x.shape[-1], cos.shape[-1]
    # Every piece that a thread takes must begin at a multiple of 16 bytes.
    pairs = half if not interleaved else 2 * half
    wide = all(can_be_wide(x, n) for n in (length, pairs)) and _aligned(cos, sin)
    width = 16 // x.dtype.itemsize if wide else 1
    items = -(-length // max(width, 2)) if interleaved else (length - half) // width
    rows = min(_ROWS, 1 << count.bit_length() - 1)
    block = min(items, THREADS), max(1, THREADS // items)
    grid = -(-(bases * -(-count // rows)) // block[1]), -(-items // block[0])
    return kernel(x.dtype, wide, interleaved, rows), grid, block


def _aligned(*arrays: Any) -> bool:
    return all(can_be_wide(a, 4) for a in arrays)


def _memory_order(x: Any) -> tuple[int, ...]:
    """Order the axes but the last, which stays, as they lie in memory."""
    leading = sorted(range(x.ndim - 1), key=lambda i: -x.strides[i])
    order = (*leading, x.ndim - 1)
    return order if x.transpose(order).flags.c_contiguous else tuple(range(x.ndim))


def _angles(angles: tuple, shape: tuple, order: tuple | None, dtype: Any) -> tuple:
    """Give packed cosines and sines, and which of their rows turns which row of the array.

    ``order``: of the axes of the array, which has got ``shape`` by it; None if they were in order.
    """
    cos, sin = angles
    own = cos.shape[:-1]
    alike = cos.dtype == sin.dtype == dtype and own == sin.shape[:-1]
    if order is None and alike and own == shape[len(shape) - cos.ndim : -1]:
        return packed(cos), packed(sin), 1, math.prod(own)  # the usual case, at little cost
    xp, order, found = namespace(*angles), order or tuple(range(len(shape))), []
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
    return *(packed(a) for a in found), max(1, inner), max(1, period)
