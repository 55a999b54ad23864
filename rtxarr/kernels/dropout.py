"""Dropout, with a bias and a residual in the same pass, on a mask that is never stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import launch, namespace
from rtxarr.dtypes import accumulator
from rtxarr.kernels.norm import fits
from rtxarr.kernels.segment import can_be_wide, row_by_row

__all__ = ["dropout_add", "fits", "threshold"]


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
    from rtxarr.kernels._dropout_cuda import THREADS, kernel, per_thread

    xp = namespace(x, residual, bias)
    dtype, scalar = x.dtype, accumulator(x.dtype).type
    n_features = x.shape[-1] if x.ndim else 1
    out = xp.empty(x.shape, dtype=dtype)
    flat, residual, bias = (None if a is None else row_by_row(a) for a in (x, residual, bias))
    wide = all(a is None or can_be_wide(a, 16) for a in (flat, residual, bias))
    if bias is not None:
        # The grid's y runs over the parts of a row.
        wide = wide and can_be_wide(bias, n_features) and n_features < 1 << 25
    from_memory = not isinstance(place, tuple)
    run = kernel(dtype, wide, residual is not None, bias is not None, from_memory)
    pieces, block = -(-out.size // per_thread(dtype, wide)), (THREADS, 1)
    grid = -(-pieces // THREADS), 1
    if bias is not None and wide:
        pieces = n_features // per_thread(dtype, wide)
        block = min(pieces, THREADS), max(1, THREADS // pieces)
        grid = -(-(out.size // n_features) // block[1]), -(-pieces // block[0])
    launch(
        run,
        grid,
        (
            flat,
            flat if residual is None else residual,
            flat if bias is None else bias,
            xp.reshape(out, (-1,)),
            *((place,) if from_memory else place),
            n_features,
            threshold(rate),
            scalar(1 / (1 - rate)),
        ),
        block=block,
    )
    return out
