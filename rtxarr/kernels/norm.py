"""Normalization of rows, and its gradient, each in one pass over memory."""

from __future__ import annotations

from typing import Any

from rtxarr._device import empty, launch_planned, namespace, runs_kernels
from rtxarr.dtypes import FLOATING, accumulator
from rtxarr.kernels._dense import packed
from rtxarr.kernels.segment import can_be_wide

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
    if not (runs_kernels(x) and dtype in FLOATING and x.size):
        return False
    return not [a for a in arrays if a is not None and a.dtype != dtype]


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
    x, weight, bias = _packed(x, weight, bias)
    out = empty(x, x.shape, x.dtype)
    flags = centre is not None, weight is not None, bias is not None
    given = x, *(x if a is None else a for a in (weight, bias)), out
    numbers = inverse if centre is None else centre, inverse, n_features, inverse.dtype.type(eps)
    launch_planned(_forward, (*flags, n_features), (*given, *numbers))
    return out


def _forward(options, args):
    """Choose the kernel, the blocks and the block."""
    from rtxarr.kernels._norm_cuda import forward

    *flags, n_features = options
    x, inverse = args[0], args[5]
    plan = forward_plan(n_features, x.dtype, _all_wide(n_features, *args[:3]))
    return forward(x.dtype, plan, *flags), plan.blocks(inverse.size), plan.block


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
    dtype, n = x.dtype, n_features
    grad, x, weight = _packed(grad, x, weight)
    out = empty(x, x.shape, dtype)
    flags = centre is not None, weight is not None
    centre, weight = inverse if centre is None else centre, x if weight is None else weight
    n_params = 2 if needs[1] else int(needs[0])
    wide = _all_wide(n, grad, x, weight)
    plan = backward_plan(n, dtype, wide, with_sums=bool(n_params))
    arguments, partial = (grad, x, weight, centre, inverse, out), []
    if n_params and plan.resident:
        blocks = plan.blocks(inverse.size)
        enough = min(blocks // 8, _MOST_THREADS // plan.threads)
        blocks = min(blocks, max(_FEWEST_BLOCKS, enough))
        partial = [empty(x, (blocks * n,), inverse.dtype) for _ in range(n_params)]
        options = *flags, n_params, plan, blocks
        launch_planned(_backward_with_sums, options, (*arguments, *(*partial, inverse)[:2], n))
    else:
        launch_planned(_backward, (*flags, n), (*arguments, n))
        if n_params:
            partial = _sum_columns(grad, x, centre, inverse, n, wide=wide, centred=flags[0])
    return out, *sum_rows(x, partial, n, dtype, needs)


def _backward_with_sums(options, args):
    from rtxarr.kernels._norm_cuda import backward_with_sums

    centred, weighted, n_params, plan, blocks = options
    kernel = backward_with_sums(args[0].dtype, plan, centred, weighted, n_params)
    return kernel, blocks, plan.block


def _backward(options, args):
    from rtxarr.kernels._norm_cuda import backward

    centred, weighted, n = options
    grad, x, weight, _, inverse = args[:5]
    plan = backward_plan(n, x.dtype, _all_wide(n, grad, x, weight), with_sums=False)
    return backward(x.dtype, plan, centred, weighted), plan.blocks(inverse.size), plan.block


def forward_plan(n_features: int, dtype: Any, wide: bool) -> Any:
    """Deal the rows out to the forward kernel."""
    from rtxarr.kernels._plan import plan_rows

    return plan_rows(n_features, dtype, wide=wide)


def backward_plan(n_features: int, dtype: Any, wide: bool, *, with_sums: bool) -> Any:
    """Deal the rows out to the backward kernel, with the sums of the parameters or without."""
    from rtxarr.kernels._plan import plan_rows
    from rtxarr.kernels._vector import access

    if not with_sums:
        return plan_rows(n_features, dtype, wide=wide, pieces=2, most=16)
    width = access(dtype, wide=wide).width
    if width == 1:
        return plan_rows(n_features, dtype, wide=wide, pieces=1, most=12)
    # Sixteen elements of a thread: few threads share the work that is done once a row. With more
    # lanes they would not have the registers for longer rows.
    return plan_rows(n_features, dtype, wide=wide, pieces=16 // width, lanes=256)


def _packed(*arrays: Any) -> list[Any]:
    return [None if a is None else packed(a) for a in arrays]


def _all_wide(n_features: int, *arrays: Any) -> bool:
    return all(can_be_wide(a, n_features) for a in arrays)


def _sum_columns(
    grad: Any, x: Any, centre: Any, inverse: Any, n: int, *, wide: bool, centred: bool
) -> list[Any]:
    """Give partial sums of the gradients of the parameters, where rows are too long for one pass.

    ``wide``, ``centred``: as in the kernels.
    """
    from rtxarr.kernels._vector import access

    across = -(-n // (32 * access(x.dtype, wide=wide).width))
    down = min(-(-inverse.size // 8), max(1, _MOST_THREADS // 256 // across))
    partial = [empty(x, (down * n,), inverse.dtype) for _ in range(2)]
    arguments = (grad, x, centre, inverse, *partial, n)
    launch_planned(_columns, (wide, centred, across, down), arguments)
    return partial


def _columns(options, args):
    from rtxarr.kernels._norm_cuda import columns

    wide, centred, across, down = options
    return columns(args[0].dtype, wide, centred), (across, down), (32, 8)


def sum_rows(like: Any, partial: list, n: int, dtype: Any, needs: tuple[bool, bool]) -> tuple:
    """Add up the rows of ``n`` partial sums of two arrays, in a fixed order, or None for each."""
    return sum_pair(like, _join, dtype, partial, n, needs)


def _join(options, args):
    from rtxarr.kernels._norm_cuda import JOIN_BLOCK, join

    n, dtype, n_arrays = options
    return join(dtype), (-(-n // JOIN_BLOCK[0]), n_arrays), JOIN_BLOCK


def sum_pair(
    like: Any, plan: Any, dtype: Any, partial: Any, n: int, needs: tuple, *numbers: int
) -> tuple:
    """Add up two arrays of partial sums to ``n`` elements each; None for what is not needed.

    ``plan((n, dtype, n_arrays), args)`` chooses the kernel for arguments ``(first, second,
    first_out, second_out, *numbers)``; the grid's y runs over the arrays.
    """
    which = [i for i in range(2) if needs[i]]
    out = [empty(like, (n if needed else 0,), dtype) for needed in needs]
    if which:
        first, last = which[0], which[-1]
        arguments = partial[first], partial[last], out[first], out[1 - first], *numbers
        launch_planned(plan, (n, dtype, len(which)), arguments)
    return tuple(a if needed else None for a, needed in zip(out, needs, strict=True))


def empty_statistics(x: Any, axes: tuple[int, ...], *, centred: bool) -> tuple[Any, Any]:
    """Give arrays for :func:`normalize` to fill: of length one along the last ``axes``."""
    xp = namespace(x)
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    dtype = accumulator(x.dtype)
    centre = xp.empty(shape, dtype=dtype) if centred else None
    return centre, xp.empty(shape, dtype=dtype)
