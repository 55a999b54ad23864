"""Group normalization and its gradient, on memory with the channels last or first."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from rtxarr._device import _SIMULATING, empty, launch_planned
from rtxarr.kernels import norm
from rtxarr.kernels._dense import packed
from rtxarr.kernels._limits import capability
from rtxarr.kernels.multi_tensor import contiguous
from rtxarr.kernels.segment import can_be_wide

__all__ = ["fits", "group_normalize", "group_normalize_gradient"]

# Constants, so that the bits do not depend on the GPU.
# Where the channels are first: blocks to deal an array out to, several waves, so that the last one
# costs little; pieces of 16 bytes of a thread, and the most threads of a channel; and up to how
# many tiles of a block there are no loads ahead.
_BLOCKS, _PIECES, _LANES, _FEW_TILES = 4224, 2, 128, 4
# Where they are last: threads of a block, positions that each takes at least, and the most channels
# of a block; how many blocks there are where they would make few waves, which is one, and
# otherwise.
_THREADS, _EACH, _SPAN = (32, 1, 64) if _SIMULATING else (320, 8, 1024)
_ONE_WAVE, _WAVES = 264, 1056
# Where they are first and clusters of blocks keep arrays in shared memory: the least bytes of one,
# and how many blocks there are to be; and ways to deal it out, the best first: blocks that share a
# multiprocessor, bytes of shared memory that each has, and its threads.
_LEAST, _RESIDENT_BLOCKS = (0, 4) if _SIMULATING else (20 << 20, 128)
_ROOM = (
    ((2, 4000, 32), (1, 8000, 32))
    if _SIMULATING
    else ((4, 56 << 10, 256), (2, 112 << 10, 512), (1, 224 << 10, 512))
)


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

    def sums(self, shape: tuple, n_groups: int) -> int:
        """Give how many partial sums of groups, or of channels that are first, there are."""
        if self.last:
            return shape[0] * n_groups * self.grid[1] * self.chunks
        return shape[0] * shape[1] * self.chunks


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
    from rtxarr.kernels._plan import plan_rows
    from rtxarr.kernels._vector import access

    numbers: tuple[int, ...]
    made_of: tuple[Any, ...]
    flags, dtype = tuple(a is not None for a in affine), arrays[0].dtype
    n_samples, n_channels, n_positions = shape[0], shape[1], math.prod(shape[2:])
    if last:
        present = [a for a in (*arrays, *affine) if a is not None]
        wide = all(can_be_wide(a, n_channels) for a in present)
        width = access(dtype, wide=wide).width
        pieces = -(-n_channels // width)
        across = -(-pieces // min(_THREADS, _SPAN // width))
        lanes = -(-pieces // across)
        block = lanes, max(1, _THREADS // lanes)
        most, apart = -(-n_positions // (block[1] * _EACH)), across * n_samples
        n_blocks = _ONE_WAVE if most * apart < 4 * _ONE_WAVE else _WAVES
        each = -(-n_positions // min(most, max(1, n_blocks // apart)))
        chunks = -(-n_positions // each)
        made_of = dtype, width > 1, block, flags, silu, n_blocks == _ONE_WAVE
        grid = chunks, across, n_samples
        numbers = n_positions, each, n_channels, n_groups, n_channels // n_groups
        return _Dealt(True, made_of, grid, block, chunks, numbers)
    wide = all(can_be_wide(a, n_positions) for a in arrays)
    plan = plan_rows(n_positions, dtype, wide=wide, pieces=_PIECES, most=16, lanes=_LANES)
    blocks, n_tiles = plan.blocks(n_channels), -(-n_positions // plan.tile)
    each = -(-n_tiles // min(n_tiles, max(1, _BLOCKS // (blocks * n_samples))))
    grid = blocks, -(-n_tiles // each), n_samples
    numbers = n_positions, n_channels, n_channels // n_groups, each
    made_of = dtype, plan, flags, silu, each > _FEW_TILES
    return _Dealt(False, made_of, grid, plan.block, grid[1], numbers)


class _Kept(NamedTuple):
    """How arrays with the channels first are dealt out to clusters that read them once.

    Attributes
    ----------
    kernels : tuple
        Arguments of what makes the kernels.
    grid, block : tuple of int
    numbers : tuple of int
        What the arguments of all kernels end in.
    """

    kernels: tuple
    grid: tuple[int, int, int]
    block: tuple[int, int]
    numbers: tuple[int, ...]


def _keep(shape: tuple, arrays: tuple, affine: tuple, n_groups: int) -> _Kept | None:
    """Deal out ``arrays`` of this ``shape`` to clusters; None where that does not fit."""
    x, n_positions = arrays[0], math.prod(shape[2:])
    if x.nbytes < _LEAST or not _has_clusters(x):
        return None
    if not all(can_be_wide(a, n_positions) for a in arrays):
        return None
    flags = tuple(a is not None for a in affine)
    return _deal_out_once(shape[:2], n_positions, n_groups, x.dtype, len(arrays), flags)


@functools.lru_cache(maxsize=1024)
def _deal_out_once(
    shape: tuple, n_positions: int, n_groups: int, dtype: Any, n_arrays: int, flags: tuple
) -> _Kept | None:
    """A block has the channels of some groups, and a chunk of their positions."""
    from rtxarr.kernels._group_norm_cluster_cuda import BLOCKS, MOST

    n_samples, n_channels = shape
    n_of_group, width = n_channels // n_groups, 16 // dtype.itemsize
    pieces = -(-n_positions // (BLOCKS * width))
    lanes = min(32, 1 << (pieces - 1).bit_length())
    if n_positions < BLOCKS * width:
        return None
    for per_processor, room, threads in _ROOM:
        room -= 32 * MOST  # for what belongs to channels
        found = None
        for span in range(n_of_group, min(n_channels, MOST) + 1, n_of_group):
            across = n_channels // span
            if n_channels % span or across > 65_535 or 16 * span * pieces * n_arrays > room:
                continue
            if found is None or across * BLOCKS * n_samples >= _RESIDENT_BLOCKS:
                found = span, across
        if found:
            span, across = found
            block = lanes, min(span, threads // lanes)
            numbers = n_positions, pieces * width, n_channels, n_groups, n_of_group, span
            made_of = dtype, block, flags, per_processor, room
            return _Kept(made_of, (BLOCKS, across, n_samples), block, numbers)
    return None


def _has_clusters(x: Any) -> bool:
    """Tell whether blocks reach one another's shared memory, of 227 KB for each multiprocessor."""
    return _SIMULATING or 90 <= capability(x.data.device_id) < 120


def _once(options, args):
    """Choose the kernel of clusters."""
    from rtxarr.kernels._group_norm_cluster_cuda import resident

    name, kept = options
    return getattr(resident(*kept.kernels), name), kept.grid, kept.block


def _over_all(options, args):
    """Choose the kernel of a pass over all elements."""
    from rtxarr.kernels._group_norm_cuda import channels_first, channels_last

    name, (last, made_of, grid, block, _, _) = options
    kernels: Any = channels_last if last else channels_first
    return getattr(kernels(*made_of), name), grid, block


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
    weight, bias = (x if a is None else a for a in affine)
    if not (last or silu) and (kept := _keep(shape, (x,), affine, n_groups)):
        given = x, weight, bias, centre, inverse, out, dtype.type(eps)
        launch_planned(_once, ("normalize", kept), (*given, *kept.numbers))
        return out
    dealt = _deal_out(last, shape, (x,), affine, silu, n_groups)
    partial = [empty(x, (dealt.sums(shape, n_groups),), dtype) for _ in range(2)]
    launch_planned(_over_all, ("sums", dealt), (x, *partial, *dealt.numbers))
    given = x, weight, bias, *partial, centre, inverse, out, dtype.type(eps)
    launch_planned(_over_all, ("apply", dealt), (*given, *dealt.numbers))
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
    weight, bias = (x if a is None else a for a in affine)
    if not (last or silu) and (kept := _keep(shape, (grad, x), affine, n_groups)):
        partial = [empty(x, (n_samples * n_channels,), dtype) for _ in range(2)]
        given = grad, x, weight, centre, inverse, *partial, out
        launch_planned(_once, ("gradient", kept), (*given, *kept.numbers))
        sums = norm.sum_pair(x, _over_samples, kind, partial[::-1], n_channels, needs, n_samples, 1)
        return out, *sums
    dealt = _deal_out(last, shape, (grad, x), affine, silu, n_groups)
    inputs, numbers = (grad, x, weight, bias, centre, inverse), dealt.numbers
    partial = [empty(x, (dealt.sums(shape, n_groups),), dtype) for _ in range(2)]
    if last:
        of_both = [empty(x, (n_samples * dealt.chunks * n_channels,), dtype) for _ in range(2)]
        found = [empty(x, (n_channels if needed else 0,), kind) for needed in needs[::-1]]
        sums = *inputs, *partial, *of_both
        launch_planned(_over_all, ("gradient_sums", dealt), (*sums, *numbers))
        launch_planned(_over_all, ("gradient", dealt), (*sums, out, *found, *numbers))
        of_weight, of_bias = (
            a if needed else None for a, needed in zip(found[::-1], needs, strict=True)
        )
        return _standing(out, last), of_weight, of_bias
    launch_planned(_over_all, ("gradient_sums", dealt), (*inputs, *partial, *numbers))
    launch_planned(_over_all, ("gradient", dealt), (*inputs, *partial, out, *numbers))
    counts = n_samples, dealt.chunks
    return out, *norm.sum_pair(x, _over_samples, kind, partial[::-1], n_channels, needs, *counts)
