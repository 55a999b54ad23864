"""Reductions of small arrays on a GPU, each in one launch: less host time than CuPy takes.

Sums over the first axes of larger ones are those of :func:`rtxarr.kernels.segment.column_sums`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import launch_planned, runs_here
from rtxarr.kernels._dense import memory_order, packed
from rtxarr.kernels.multi_tensor import contiguous
from rtxarr.kernels.segment import column_sums

__all__ = ["accuracy", "fits_accuracy", "leading_sum"]

# A thread adds up 128 rows at most; of larger arrays more than a block should take part.
_MOST = 131_072
# From so many on CuPy is slow, at a hundredth of the memory's speed.
_FEW_COLUMNS = 8
_MAX_CLASSES = 64
_DTYPES = frozenset((np.dtype("float32"), np.dtype("float64")))


def leading_sum(x: Any, axis: Any, keepdims: bool) -> Any:
    """Give the sum over the axes that lie outermost in memory; None for what CuPy does as well.

    Parameters
    ----------
    x : array
    axis : int, tuple of int or None
        As for :func:`rtxarr.sum`.
    keepdims : bool

    Returns
    -------
    array of the dtype of ``x``, or None
        Threads add up some rows in order, then the threads' sums are added: equal inputs give
        equal bits.
    """
    if not (x.dtype in _DTYPES and x.size and runs_here(x)):
        return None
    if not contiguous(x):
        return _turned_sum(x, axis, keepdims)
    if axis is None:
        n_axes = x.ndim
    elif axis == 0:
        n_axes = 1
    elif type(axis) is tuple and axis == tuple(range(len(axis))):
        n_axes = len(axis)
    else:
        return None
    if n_axes > x.ndim:
        return None
    rest = x.shape[n_axes:]
    n_columns = math.prod(rest)
    n_rows = x.size // n_columns
    shape = (1,) * n_axes + rest if keepdims else rest
    if n_rows * _width(n_columns) > _MOST:
        if n_columns < _FEW_COLUMNS:
            return None
        return column_sums(x.reshape(n_rows, n_columns)).reshape(shape)
    out = _device.empty(x, shape, x.dtype)
    launch_planned(_columns, (), (x, out, n_rows, n_columns))
    return out


def _turned_sum(x, axis, keepdims):
    """Add up an array whose axes lie in another order, such as images with channels last."""
    order = memory_order(x)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if order is None or any(a not in range(-x.ndim, x.ndim) for a in axes):
        return None
    reduced = {a % x.ndim for a in axes}
    outer, inner = order[: len(axes)], order[len(axes) :]
    if set(outer) != reduced or list(inner) != sorted(inner):
        return None
    out = leading_sum(x.transpose(order), tuple(range(len(outer))), False)
    if out is None or not keepdims:
        return out
    return out.reshape(tuple(1 if i in reduced else n for i, n in enumerate(x.shape)))


def _columns(options, args):
    from rtxarr.kernels import _small_cuda
    from rtxarr.kernels._small_cuda import THREADS, WIDEST

    out = args[1]
    width = min(WIDEST, _width(out.size))
    return (
        _small_cuda.column_sums(out.dtype, width),
        -(-out.size // width),
        (width, THREADS // width),
    )


def _width(n_columns):
    return min(32, 1 << (n_columns - 1).bit_length())


def fits_accuracy(logits: Any, labels: Any) -> bool:
    """Tell whether :func:`accuracy` takes these arrays, with the classes last."""
    return (
        runs_here(logits)
        and runs_here(labels)
        and logits.dtype in _DTYPES
        and labels.dtype.kind in "iu"
        and labels.shape == logits.shape[:-1]
        and 0 < labels.size <= _MOST
        and 0 < logits.shape[-1] <= _MAX_CLASSES
    )


def accuracy(logits: Any, labels: Any, ignored: int | None = None) -> Any:
    """Give the share of labels that are the class with the largest logit.

    Parameters
    ----------
    logits : array of float32 or float64, shape (..., n_classes)
        NaN counts as the largest, and of equal ones the first.
    labels : array of int, shape (...)
        Arrays that fit.
    ignored : int, optional
        The label of what does not count.

    Returns
    -------
    array of float64, a scalar
    """
    out = _device.empty(logits, (), np.float64)
    given = packed(logits), packed(labels), out, logits.shape[-1], ignored or 0
    launch_planned(_share, (ignored is not None,), given)
    return out


def _share(options, args):
    from rtxarr.kernels._small_cuda import THREADS, share_right

    return share_right(args[0].dtype, *options), 1, THREADS
