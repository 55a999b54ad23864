"""Group normalization and its gradient, on memory with the channels last or first."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rtxarr._device import _SIMULATING, empty, launch_planned
from rtxarr.kernels import norm
from rtxarr.kernels._dense import packed
from rtxarr.kernels.multi_tensor import contiguous
from rtxarr.kernels.segment import can_be_wide

__all__ = ["fits", "group_normalize", "group_normalize_gradient"]

# Blocks to deal an array out to: several waves, so that the last one costs little. A constant, so
# that the bits do not depend on the GPU.
_BLOCKS = 4224
# Threads of a block, and positions that each takes at least.
_THREADS, _EACH = (32, 1) if _SIMULATING else (256, 8)


def fits(x: Any, *others: Any) -> bool:
    """Tell whether the kernels take these arrays (or None), the first being normalized."""
    return norm.fits(x, *others) and x.shape[0] <= 65_535


class _Dealt(NamedTuple):
    """How an array is dealt out to blocks.

    Attributes
    ----------
    last : bool
        Whether the channels are last in memory.
    kernels : tuple
        Arguments of what makes the kernels.
    grid, block : tuple of int
    chunks : int
        Of the positions.
    numbers : tuple of int
        What the arguments of all kernels end in.
    """

    last: bool
    kernels: tuple
    grid: tuple[int, int, int]
    block: tuple[int, int]
    chunks: int
    numbers: tuple[int, ...]


def _lying(x: Any, last: bool) -> Any:
    """Give an array as it lies in memory."""
    return packed(x.transpose(0, *range(2, x.ndim), 1) if last else x)


def _is_last(x: Any) -> bool:
    return not contiguous(x) and contiguous(x.transpose(0, *range(2, x.ndim), 1))


def _standing(x: Any, last: bool) -> Any:
    """Undo :func:`_lying`."""
    return x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1)) if last else x


def _deal_out(
    last: bool, shape: tuple, arrays: tuple, affine: tuple, silu: bool, n_groups: int
) -> _Dealt:
    """Deal out ``arrays``, as they lie in memory, of this ``shape`` (samples, channels, ...)."""
    from rtxarr.kernels._rows import plan_rows
    from rtxarr.kernels._vector import access

    flags, dtype = tuple(a is not None for a in affine), arrays[0].dtype
    n_samples, n_channels, n_positions = shape[0], shape[1], math.prod(shape[2:])
    if last:
        present = [a for a in (*arrays, *affine) if a is not None]
        wide = all(can_be_wide(a, n_channels) for a in present)
        width = access(dtype, wide=wide).width
        pieces = -(-n_channels // width)
        across = -(-pieces // _THREADS)
        lanes = -(-pieces // across)
        block = lanes, max(1, _THREADS // lanes)
        most = -(-n_positions // (block[1] * _EACH))
        chunks = min(most, max(1, _BLOCKS // (across * n_samples)))
        made_of, grid = (dtype, width > 1, block, flags, silu), (chunks, across, n_samples)
        return _Dealt(True, made_of, grid, block, chunks, (n_positions, n_channels, n_groups))
    wide = all(can_be_wide(a, n_positions) for a in arrays)
    plan = plan_rows(n_positions, dtype, wide=wide, most=16)
    blocks, n_tiles = plan.blocks(n_channels), -(-n_positions // plan.tile)
    each = -(-n_tiles // min(n_tiles, max(1, _BLOCKS // (blocks * n_samples))))
    grid = blocks, -(-n_tiles // each), n_samples
    numbers = n_positions, n_channels, n_channels // n_groups, each
    return _Dealt(False, (dtype, plan, flags, silu), grid, plan.block, grid[1], numbers)


def _over_all(options, args):
    """Choose the kernel of a pass over all elements."""
    from rtxarr.kernels._group_norm_cuda import channels_first, channels_last

    name, (last, made_of, grid, block, _, _) = options
    kernels: Any = channels_last if last else channels_first
    return getattr(kernels(*made_of), name), grid, block


def _over_groups(options, args):
    """Choose the kernel that combines partial sums of the channels of groups."""
    from rtxarr.kernels._group_norm_cuda import MERGE_BLOCK, merges

    name, dtype, weighted, n_groups = options
    return getattr(merges(dtype, weighted), name), n_groups, MERGE_BLOCK


def _over_samples(options, args):
    """Choose the kernel that adds up partial sums over samples and chunks."""
    from rtxarr.kernels._group_norm_cuda import MERGE_BLOCK, of_parameters

    n_channels, dtype, n_arrays = options
    return of_parameters(dtype), (-(-n_channels // MERGE_BLOCK[1]), n_arrays), MERGE_BLOCK


def group_normalize(
    x: Any,
    weight: Any,
    bias: Any,
    centre: Any,
    inverse: Any,
    *,
    n_groups: int,
    eps: float,
    silu: bool,
) -> Any:
    """Normalize groups of channels of each sample; fill in the statistics.

    Parameters
    ----------
    x : array of a real floating dtype, shape (n_samples, n_channels, ...)
        One that :func:`fits` with the weight and the bias.
    weight, bias : array, shape (n_channels,), or None
    centre, inverse : array of float32 (float64 for float64), n_samples * n_groups elements
        C-contiguous. Filled with the mean and one over the deviation.
    n_groups : int
    eps : float
        Added to the variance.
    silu : bool
        Whether to apply the SiLU function to the result.

    Returns
    -------
    array, shape, dtype and memory layout of ``x``
        Channels first in memory if ``x`` is neither that nor channels last.
    """
    last, dtype, shape, kind = _is_last(x), inverse.dtype, x.shape, x.dtype
    x, affine = _lying(x, last), tuple(None if a is None else packed(a) for a in (weight, bias))
    out = empty(x, x.shape, kind)
    dealt = _deal_out(last, shape, (x,), affine, silu, n_groups)
    weight, bias = (x if a is None else a for a in affine)
    n_sums = shape[0] * shape[1] * dealt.chunks
    partial = empty(x, (n_sums,), dtype), empty(x, (n_sums,), dtype)
    epsilon, numbers = dtype.type(eps), dealt.numbers
    if last:
        launch_planned(_over_all, ("sums", dealt), (x, *partial, *numbers[:2]))
        sizes = dealt.chunks, shape[1], n_groups, numbers[0], epsilon
        options = "statistics", kind, affine[0] is not None, inverse.size
        launch_planned(_over_groups, options, (x, *partial, centre, inverse, *sizes))
        given: tuple = (x, weight, bias, centre, inverse, out)
    else:  # the second pass adds up the sums of its groups
        launch_planned(_over_all, ("sums", dealt), (x, *partial, *numbers))
        given = x, weight, bias, *partial, centre, inverse, out, epsilon
    launch_planned(_over_all, ("apply", dealt), (*given, *numbers))
    return _standing(out, last)


def group_normalize_gradient(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    centre: Any,
    inverse: Any,
    *,
    n_groups: int,
    silu: bool,
    needs: tuple[bool, bool],
) -> tuple[Any, Any, Any]:
    """Give the gradients of what :func:`group_normalize` takes.

    Parameters
    ----------
    grad : array, shape and dtype of ``x``
    x, weight, bias, centre, inverse, n_groups, silu
        As there, with the statistics filled in.
    needs : tuple of bool
        Whether the gradients of the weight and of the bias are asked for.

    Returns
    -------
    of_x : array, shape, dtype and memory layout of ``x``
    of_weight, of_bias : array of its dtype, shape (n_channels,), or None
        Summed in a fixed order.
    """
    last, dtype, shape, kind = _is_last(x), inverse.dtype, x.shape, x.dtype
    n_samples, n_channels = shape[:2]
    grad, x = _lying(grad, last), _lying(x, last)
    affine = tuple(None if a is None else packed(a) for a in (weight, bias))
    out = empty(x, x.shape, kind)
    dealt = _deal_out(last, shape, (grad, x), affine, silu, n_groups)
    weight, bias = (x if a is None else a for a in affine)
    n_sums = n_samples * n_channels * dealt.chunks
    partial = empty(x, (n_sums,), dtype), empty(x, (n_sums,), dtype)
    inputs, numbers = (grad, x, weight, bias, centre, inverse), dealt.numbers
    launch_planned(_over_all, ("gradient_sums", dealt), (*inputs, *partial, *numbers))
    if not last:
        launch_planned(_over_all, ("gradient", dealt), (*inputs, *partial, out, *numbers))
        counts = n_samples, dealt.chunks
        of_both = norm.sum_pair(x, _over_samples, kind, partial[::-1], n_channels, needs, *counts)
        return out, *of_both
    sums = [empty(x, (n_samples * n_channels,), dtype) for _ in range(2)]
    terms = [empty(x, (inverse.size,), dtype) for _ in range(2)]
    sizes = dealt.chunks, n_channels, n_groups, numbers[0]
    options = "terms", kind, affine[0] is not None, inverse.size
    launch_planned(_over_groups, options, (weight, *partial, *sums, *terms, *sizes))
    launch_planned(_over_all, ("gradient", dealt), (*inputs, *terms, out, *numbers))
    return _standing(out, last), *norm.sum_rows(x, sums, n_channels, kind, needs)
