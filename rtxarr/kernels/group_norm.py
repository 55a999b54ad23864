"""Group normalization and its gradient, on memory with the channels last or first."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rtxarr._device import _SIMULATING, launch, namespace
from rtxarr.kernels import norm
from rtxarr.kernels.segment import can_be_wide, row_by_row

__all__ = ["fits", "group_normalize", "group_normalize_gradient"]

# Blocks to deal an array out to: several waves, so that the last one costs little. A constant, so
# that the bits do not depend on the GPU.
_BLOCKS = 4224
# Threads of a block, and positions that each takes at least.
_THREADS, _EACH = (32, 1) if _SIMULATING else (256, 8)


def fits(x: Any, *others: Any) -> bool:
    """Tell whether the kernels take these arrays (or None), the first being normalized."""
    return norm.fits(x, *others) and x.shape[0] <= 65_535


class _Layout(NamedTuple):
    """How an array (samples, channels, positions) lies in memory: channels last, or first."""

    last: bool
    n_samples: int
    n_channels: int
    n_positions: int


def _layout(xp: Any, x: Any) -> _Layout:
    last = not x.flags.c_contiguous and xp.moveaxis(x, 1, -1).flags.c_contiguous
    return _Layout(last, x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _flat(xp: Any, x: Any, layout: _Layout) -> Any:
    return row_by_row(xp.moveaxis(x, 1, -1) if layout.last else x)


def _empty_like(xp: Any, x: Any, layout: _Layout) -> Any:
    if layout.last:
        return xp.moveaxis(xp.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype), -1, 1)
    return xp.empty(x.shape, dtype=x.dtype)


def _deal_out_last(layout: _Layout, dtype: Any, arrays: tuple, affine: tuple, silu: bool) -> tuple:
    """Give the kernels for passes over these arrays, their grid and block, and the chunks."""
    from rtxarr.kernels._group_norm_cuda import channels_last
    from rtxarr.kernels._vector import access

    flags = tuple(a is not None for a in affine)
    _, n_samples, n_channels, n_positions = layout
    present = [a for a in (*arrays, *affine) if a is not None]
    wide = all(can_be_wide(a, n_channels) for a in present)
    width = access(dtype, wide=wide).width
    pieces = -(-n_channels // width)
    across = -(-pieces // _THREADS)
    lanes = -(-pieces // across)
    block = lanes, max(1, _THREADS // lanes)
    most = -(-n_positions // (block[1] * _EACH))
    chunks = min(most, max(1, _BLOCKS // (across * n_samples)))
    kernels = channels_last(dtype, width > 1, block, flags, silu)
    return kernels, (chunks, across, n_samples), block, chunks


def _deal_out_first(
    layout: _Layout, dtype: Any, arrays: tuple, affine: tuple, silu: bool, n_groups: int
) -> tuple:
    """Give the kernels, their grid and block, and the numbers that all their arguments end in."""
    from rtxarr.kernels._group_norm_cuda import channels_first
    from rtxarr.kernels._rows import plan_rows

    _, n_samples, n_channels, n_positions = layout
    wide = all(can_be_wide(a, n_positions) for a in arrays)
    plan = plan_rows(n_positions, dtype, wide=wide, pieces=2 if len(arrays) > 1 else 4, most=16)
    blocks, n_tiles = plan.blocks(n_channels), -(-n_positions // plan.tile)
    chunks = min(n_tiles, max(1, _BLOCKS // (blocks * n_samples)))
    each = -(-n_tiles // chunks)
    kernels = channels_first(dtype, plan, tuple(a is not None for a in affine), silu)
    grid = blocks, -(-n_tiles // each), n_samples
    return kernels, grid, plan.block, (n_positions, n_channels, n_channels // n_groups, each)


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
    from rtxarr.kernels._group_norm_cuda import MERGE_BLOCK, merges

    xp = namespace(x, weight, bias)
    layout, dtype = _layout(xp, x), inverse.dtype
    out = _empty_like(xp, x, layout)
    flat, target = _flat(xp, x, layout), _flat(xp, out, layout)
    affine = tuple(None if a is None else row_by_row(a) for a in (weight, bias))
    weight, bias = (flat if a is None else a for a in affine)
    centre, inverse = xp.reshape(centre, (-1,)), xp.reshape(inverse, (-1,))
    _, n_samples, n_channels, n_positions = layout
    if not layout.last:
        dealt = _deal_out_first(layout, x.dtype, (flat,), affine, silu, n_groups)
        first, grid, block, numbers = dealt
        partial = [xp.empty(n_samples * n_channels * grid[1], dtype=dtype) for _ in range(2)]
        launch(first.sums, grid, (flat, *partial, *numbers), block=block)
        arguments = (flat, weight, bias, *partial, centre, inverse, target, dtype.type(eps))
        launch(first.apply, grid, (*arguments, *numbers), block=block)
        return out
    kernels, grid, block, chunks = _deal_out_last(layout, x.dtype, (flat,), affine, silu)
    partial = [xp.empty(n_samples * chunks * n_channels, dtype=dtype) for _ in range(2)]
    launch(kernels.sums, grid, (flat, *partial, n_positions, n_channels), block=block)
    sizes = chunks, n_channels, n_groups, n_positions, dtype.type(eps)
    kernel = merges(x.dtype, affine[0] is not None).statistics
    launch(kernel, inverse.size, (flat, *partial, centre, inverse, *sizes), block=MERGE_BLOCK)
    arguments = (flat, weight, bias, centre, inverse, target, n_positions, n_channels, n_groups)
    launch(kernels.apply, grid, arguments, block=block)
    return out


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
    from rtxarr.kernels._group_norm_cuda import MERGE_BLOCK, merges, of_parameters

    xp = namespace(grad, x, weight, bias)
    layout, dtype, kind = _layout(xp, x), inverse.dtype, x.dtype
    out = _empty_like(xp, x, layout)
    flat, up, target = (_flat(xp, a, layout) for a in (x, grad, out))
    affine = tuple(None if a is None else row_by_row(a) for a in (weight, bias))
    weight, bias = (flat if a is None else a for a in affine)
    centre, inverse = xp.reshape(centre, (-1,)), xp.reshape(inverse, (-1,))
    _, n_samples, n_channels, n_positions = layout
    inputs = up, flat, weight, bias, centre, inverse
    if not layout.last:
        dealt = _deal_out_first(layout, kind, (flat, up), affine, silu, n_groups)
        first, grid, block, numbers = dealt
        partial = [xp.empty(n_samples * n_channels * grid[1], dtype=dtype) for _ in range(2)]
        launch(first.gradient_sums, grid, (*inputs, *partial, *numbers), block=block)
        launch(first.gradient, grid, (*inputs, *partial, target, *numbers), block=block)
        arguments = of_parameters(kind), kind, partial[::-1], n_channels, needs, MERGE_BLOCK
        return out, *norm.sum_pair(xp, *arguments, MERGE_BLOCK[1], n_samples, grid[1])
    kernels, grid, block, chunks = _deal_out_last(layout, kind, (flat, up), affine, silu)
    partial = [xp.empty(n_samples * chunks * n_channels, dtype=dtype) for _ in range(2)]
    sizes = n_positions, n_channels, n_groups
    launch(kernels.gradient_sums, grid, (*inputs, *partial, *sizes), block=block)
    of_weight, of_bias = (xp.empty(n_samples * n_channels, dtype=dtype) for _ in range(2))
    terms = [xp.empty(inverse.size, dtype=dtype) for _ in range(2)]
    arguments = (weight, *partial, of_weight, of_bias, *terms)
    numbers = chunks, n_channels, n_groups, n_positions
    kernel = merges(kind, affine[0] is not None).terms
    launch(kernel, inverse.size, (*arguments, *numbers), block=MERGE_BLOCK)
    launch(kernels.gradient, grid, (*inputs, *terms, target, *sizes), block=block)
    return out, *norm.sum_rows(xp, [of_weight, of_bias], n_channels, kind, needs)
