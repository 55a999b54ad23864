"""Dropout, with a bias and a residual in the same pass, on a mask that is never stored."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import launch_planned
from rtxarr.dtypes import accumulator
from rtxarr.kernels._dense import packed
from rtxarr.kernels.norm import fits
from rtxarr.kernels.segment import can_be_wide

__all__ = ["dropout_add", "fits", "threshold"]


@functools.cache
def threshold(rate: float) -> np.uint64:
    """Give the number below which a word of the stream keeps its element."""
    return np.uint64(round((1.0 - rate) * 2**32))


def dropout_add(x: Any, residual: Any, bias: Any, *, place: Any, rate: float) -> Any:
    """Give ``residual + dropout(x + bias)``.

    Parameters
    ----------
    x : array of a real floating dtype
        One that :func:`fits` with the others.
    residual : array, shape and dtype of ``x``, or None
    bias : array, shape (n_features,), or None
        Added along the last axis.
    place : tuple of 3 np.uint64, or array of uint64, shape (3,)
        Offset, stream and key of the random words: one for each element of ``x``, in its order.
    rate : float in [0, 1)

    Returns
    -------
    array, shape and dtype of ``x``, row by row in memory
    """
    out = _device.empty(x, x.shape, x.dtype)
    x, residual, bias = [None if a is None else packed(a) for a in (x, residual, bias)]
    from_memory = not isinstance(place, tuple)
    launch_planned(
        _plan,
        (residual is not None, bias is not None, from_memory),
        (
            x,
            x if residual is None else residual,
            x if bias is None else bias,
            out,
            *((place,) if from_memory else place),
            x.shape[-1] if x.ndim else 1,
            threshold(rate),
            accumulator(x.dtype).type(1 / (1 - rate)),
        ),
    )
    return out


def _plan(options, args):
    """Choose the kernel, the blocks and the block."""
    from rtxarr.kernels._dropout_cuda import THREADS, kernel, per_thread

    has_residual, has_bias, from_memory = options
    x, residual, bias, out = args[:4]
    dtype, n_features = x.dtype, x.shape[-1] if x.ndim else 1
    wide = can_be_wide(x, 16) and can_be_wide(residual, 16)
    if has_bias:
        # The grid's y runs over the parts of a row.
        wide = wide and can_be_wide(bias, n_features) and n_features < 1 << 25
    by_rows, block = has_bias and wide, (THREADS, 1)
    each = per_thread(dtype, wide, by_rows)
    grid = -(-out.size // (each * THREADS)), 1
    if by_rows:
        pieces = n_features // each
        block = min(pieces, THREADS), max(1, THREADS // pieces)
        grid = -(-(out.size // n_features) // block[1]), -(-pieces // block[0])
    return kernel(dtype, wide, has_residual, has_bias, from_memory), grid, block
