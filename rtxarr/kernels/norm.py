"""Normalization of rows, and its gradient, each in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels
from rtxarr.dtypes import accumulator, is_half
from rtxarr.kernels.segment import can_be_wide, row_by_row

__all__ = ["fits", "normalize", "normalize_gradient"]

# Where the gradients of the parameters are added up, blocks take 8 sets of rows each, but there are
# not fewer blocks than this, if there are rows for them, and not more threads in all: a few waves
# of blocks, so that the last one costs little, and few rows of partial sums. The bits must not
# depend on the GPU, nor do these.
_FEWEST_BLOCKS, _MOST_THREADS = 264, 202_752


def fits(*arrays: Any) -> bool:
    """Tell whether the kernels take these arrays (or None), the first being normalized."""
    x = arrays[0]
    dtype = x.dtype
    return (
        runs_kernels(x)
        and (dtype in (np.float32, np.float64) or is_half(dtype))
        and x.size > 0
        and all(a is None or a.dtype == dtype for a in arrays)
    )


def normalize(
    x: Any, weight: Any, bias: Any, centre: Any, inverse: Any, *, n_features: int, eps: float
) -> Any:
    """Normalize rows of ``n_features`` elements; fill in the statistics.

    Parameters
    ----------
    x : array of a real floating dtype, any shape
        One that :func:`fits` with the weight and the bias.
    weight, bias : array of ``n_features`` elements, or None
    centre, inverse : array of float32 (float64 for float64), C-contiguous, one element a row
        Filled with the mean of each row and one over its deviation. Without ``centre`` the rows
        are not centred, and the deviation is that from zero.
    n_features : int
    eps : float
        Added to the variance.

    Returns
    -------
    array, shape and dtype of ``x``
    """
    from rtxarr.kernels._norm_cuda import forward

    xp = namespace(x, weight, bias)
    out = xp.empty(x.shape, dtype=x.dtype)
    flat, weight, bias = _flat(x, weight, bias)
    plan = forward_plan(n_features, x.dtype, _all_wide(n_features, flat, weight, bias))
    kernel = forward(x.dtype, plan, centre is not None, weight is not None, bias is not None)
    inverse = xp.reshape(inverse, (-1,))
    launch(
        kernel,
        plan.blocks(inverse.size),
        (
            flat,
            flat if weight is None else weight,
            flat if bias is None else bias,
            xp.reshape(out, (-1,)),
            inverse if centre is None else xp.reshape(centre, (-1,)),
            inverse,
            n_features,
            inverse.dtype.type(eps),
        ),
        block=plan.block,
    )
    return out


def normalize_gradient(
    grad: Any,
    x: Any,
    weight: Any,
    centre: Any,
    inverse: Any,
    *,
    n_features: int,
    needs: tuple[bool, bool],
) -> tuple[Any, Any, Any]:
    """Give the gradients of what :func:`normalize` takes.

    Parameters
    ----------
    grad, x, weight : array
        Arrays that fit; ``grad`` of the shape of ``x``.
    centre, inverse : array
        As :func:`normalize` filled them.
    n_features : int
    needs : tuple of bool
        Whether the gradients of the weight and of the bias are asked for.

    Returns
    -------
    of_x : array, shape and dtype of ``x``
    of_weight, of_bias : array of its dtype, shape (n_features,), or None
        Summed in a fixed order.
    """
    from rtxarr.kernels._norm_cuda import backward, backward_with_sums

    xp = namespace(grad, x, weight)
    dtype, centred, n = x.dtype, centre is not None, n_features
    out = xp.empty(x.shape, dtype=dtype)
    grad, x, weight = _flat(grad, x, weight)
    inverse = xp.reshape(inverse, (-1,))
    centre = xp.reshape(centre, (-1,)) if centred else inverse
    wide = _all_wide(n, grad, x, weight)
    n_params = 2 if needs[1] else int(needs[0])
    plan, target = backward_plan(n, dtype, wide, with_sums=bool(n_params)), xp.reshape(out, (-1,))
    arguments = (grad, x, x if weight is None else weight, centre, inverse, target)
    blocks, partial = plan.blocks(inverse.size), []
    if n_params and plan.resident:
        enough = min(blocks // 8, _MOST_THREADS // plan.threads)
        blocks = min(blocks, max(_FEWEST_BLOCKS, enough))
        partial = [xp.empty(blocks * n, dtype=inverse.dtype) for _ in range(n_params)]
        kernel = backward_with_sums(dtype, plan, centred, weight is not None, n_params)
        sums = (*partial, inverse)[:2]
        launch(kernel, blocks, (*arguments, *sums, n), block=plan.block)
    else:
        plan = backward_plan(n, dtype, wide, with_sums=False)
        kernel = backward(dtype, plan, centred, weight is not None)
        launch(kernel, plan.blocks(inverse.size), (*arguments, n), block=plan.block)
        if n_params:
            partial = _sum_columns(xp, grad, x, centre, inverse, n, wide=wide, centred=centred)
    return out, *sum_rows(xp, partial, n, dtype, needs)


def forward_plan(n_features: int, dtype: Any, wide: bool) -> Any:
    """Deal the rows out to the forward kernel."""
    from rtxarr.kernels._rows import plan_rows

    return plan_rows(n_features, dtype, wide=wide)


def backward_plan(n_features: int, dtype: Any, wide: bool, *, with_sums: bool) -> Any:
    """Deal the rows out to the backward kernel, with the sums of the parameters or without."""
    from rtxarr.kernels._rows import plan_rows
    from rtxarr.kernels._vector import access

    if not with_sums:
        return plan_rows(n_features, dtype, wide=wide, pieces=2, most=16)
    width = access(dtype, wide=wide).width
    if width == 1:
        return plan_rows(n_features, dtype, wide=wide, pieces=1, most=12)
    # Sixteen elements of a thread: few threads share the work that is done once a row. With more
    # lanes they would not have the registers for longer rows.
    return plan_rows(n_features, dtype, wide=wide, pieces=16 // width, lanes=256)


def _flat(*arrays: Any) -> list[Any]:
    return [None if a is None else row_by_row(a) for a in arrays]


def _all_wide(n_features: int, *arrays: Any) -> bool:
    return all(a is None or can_be_wide(a, n_features) for a in arrays)


def _sum_columns(
    xp: Any, grad: Any, x: Any, centre: Any, inverse: Any, n: int, *, wide: bool, centred: bool
) -> list[Any]:
    """Give partial sums of the gradients of the parameters, where rows are too long for one pass.

    ``wide``, ``centred``: as in the kernels.
    """
    from rtxarr.kernels._norm_cuda import columns
    from rtxarr.kernels._vector import access

    across = -(-n // (32 * access(x.dtype, wide=wide).width))
    down = min(-(-inverse.size // 8), max(1, _MOST_THREADS // 256 // across))
    partial = [xp.empty(down * n, dtype=inverse.dtype) for _ in range(2)]
    arguments = (grad, x, centre, inverse, *partial, n)
    launch(columns(x.dtype, wide, centred), (across, down), arguments, block=(32, 8))
    return partial


def sum_rows(xp: Any, partial: list, n: int, dtype: Any, needs: tuple[bool, bool]) -> tuple:
    """Add up the rows of ``n`` partial sums of two arrays, in a fixed order, or None for each."""
    from rtxarr.kernels._norm_cuda import JOIN_BLOCK, join

    return sum_pair(xp, join(dtype), dtype, partial, n, needs, JOIN_BLOCK, JOIN_BLOCK[0])


def sum_pair(
    xp: Any,
    kernel: Any,
    dtype: Any,
    partial: list,
    n: int,
    needs: tuple[bool, bool],
    block: tuple[int, int],
    per_block: int,
    *numbers: int,
) -> tuple:
    """Add up two arrays of partial sums to ``n`` elements each; None for what is not needed.

    The grid's x runs over blocks of ``per_block`` elements, its y over the arrays.
    """
    which = [i for i in range(2) if needs[i]]
    out = [xp.empty(n if needed else 0, dtype=dtype) for needed in needs]
    if which:
        first, last = which[0], which[-1]
        arguments = partial[first], partial[last], out[first], out[1 - first], *numbers
        launch(kernel, (-(-n // per_block), len(which)), arguments, block=block)
    return tuple(a if needed else None for a, needed in zip(out, needs, strict=True))


def empty_statistics(x: Any, axes: tuple[int, ...], *, centred: bool) -> tuple[Any, Any]:
    """Give arrays for :func:`normalize` to fill: of length one along the last ``axes``."""
    xp = namespace(x)
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    dtype = accumulator(x.dtype)
    centre = xp.empty(shape, dtype=dtype) if centred else None
    return centre, xp.empty(shape, dtype=dtype)
