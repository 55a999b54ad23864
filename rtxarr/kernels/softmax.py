"""Softmax of rows and its logarithm, forward and backward, each in one launch."""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import launch_planned
from rtxarr.kernels._dense import packed
from rtxarr.kernels.norm import fits
from rtxarr.kernels.segment import can_be_wide

__all__ = ["fits", "softmax", "softmax_gradient"]


def softmax(x: Any, *, logarithm: bool) -> Any:
    """Give the softmax along the last axis, or its logarithm.

    Parameters
    ----------
    x : array of a real floating dtype, at least 1-D
        One that :func:`fits`.
    logarithm : bool

    Returns
    -------
    array, shape and dtype of ``x``
        The softmax of a row of -inf is zero.
    """
    out = _device.empty(x, x.shape, x.dtype)
    n = x.shape[-1]
    launch_planned(_forward, (logarithm, n), (packed(x), out, n, x.size // n))
    return out


def _forward(options, args):
    from rtxarr.kernels._softmax_cuda import forward

    (logarithm, n), x = options, args[0]
    plan = forward_plan(n, x.dtype, *how_wide(n, x))
    return forward(x.dtype, plan, logarithm), plan.blocks(x.size // n), plan.block


def softmax_gradient(grad: Any, out: Any, *, logarithm: bool) -> Any:
    """Give the gradient of what :func:`softmax` takes, from that of its result ``out``.

    Parameters
    ----------
    grad, out : array of one real floating dtype and shape
        Arrays that fit.
    logarithm : bool

    Returns
    -------
    array of their shape and dtype
    """
    of_x = _device.empty(out, out.shape, out.dtype)
    n = out.shape[-1]
    given = packed(grad), packed(out), of_x, n, out.size // n
    launch_planned(_backward, (logarithm, n), given)
    return of_x


def _backward(options, args):
    from rtxarr.kernels._softmax_cuda import backward

    (logarithm, n), (grad, out) = options, args[:2]
    plan = backward_plan(n, out.dtype, *how_wide(n, grad, out))
    return backward(out.dtype, plan, logarithm), plan.blocks(out.size // n), plan.block


def how_wide(n: int, *arrays: Any) -> tuple[bool, bool]:
    """Tell whether all rows begin at multiples of 16 bytes, and whether the arrays do."""
    return all(can_be_wide(a, n) for a in arrays), all(can_be_wide(a, 16) for a in arrays)


def forward_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the forward kernel."""
    from rtxarr.kernels._plan import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose)


def backward_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the backward kernel, which holds two arrays."""
    from rtxarr.kernels._plan import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose, pieces=2, most=16)
