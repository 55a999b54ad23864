"""Softmax of rows and its logarithm, forward and backward, each in one launch."""

from __future__ import annotations

from typing import Any

from rtxarr._device import launch, namespace
from rtxarr.kernels.norm import fits
from rtxarr.kernels.segment import can_be_wide, row_by_row

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
    from rtxarr.kernels._softmax_cuda import forward

    xp = namespace(x)
    out = xp.empty(x.shape, dtype=x.dtype)
    n, flat = x.shape[-1], row_by_row(x)
    plan = forward_plan(n, x.dtype, *how_wide(n, flat))
    n_rows = flat.size // n
    launch(
        forward(x.dtype, plan, logarithm),
        plan.blocks(n_rows),
        (flat, xp.reshape(out, (-1,)), n, n_rows),
        block=plan.block,
    )
    return out


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
    from rtxarr.kernels._softmax_cuda import backward

    xp = namespace(grad, out)
    of_x = xp.empty(out.shape, dtype=out.dtype)
    n = out.shape[-1]
    grad, out = row_by_row(grad), row_by_row(out)
    plan = backward_plan(n, out.dtype, *how_wide(n, grad, out))
    n_rows = out.size // n
    launch(
        backward(out.dtype, plan, logarithm),
        plan.blocks(n_rows),
        (grad, out, xp.reshape(of_x, (-1,)), n, n_rows),
        block=plan.block,
    )
    return of_x


def how_wide(n: int, *arrays: Any) -> tuple[bool, bool]:
    """Tell whether all rows begin at multiples of 16 bytes, and whether the arrays do."""
    return all(can_be_wide(a, n) for a in arrays), all(can_be_wide(a, 16) for a in arrays)


def forward_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the forward kernel."""
    from rtxarr.kernels._rows import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose)


def backward_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the backward kernel, which holds two arrays."""
    from rtxarr.kernels._rows import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose, pieces=2, most=16)
