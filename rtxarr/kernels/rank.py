"""Numbers by their rank within each segment, on a GPU."""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import _SIMULATING, launch_planned
from rtxarr.kernels._dense import packed

__all__ = ["segment_ranked"]

# Blocks that take the longer segments in turn.
_BLOCKS = 2 if _SIMULATING else 2048


def segment_ranked(values: Any, indptr: Any, ranks: Any, *, indices: Any = None) -> tuple[Any, Any]:
    """Give the numbers of two ranks in each segment, feature by feature.

    Parameters
    ----------
    values : array of a real floating dtype, shape (n_values, n_features), on a GPU
    indptr : array of int64, shape (n_segments + 1,)
        Segment ``i`` owns rows ``indptr[i]:indptr[i + 1]``.
    ranks : array of int64, shape (n_segments, 2)
        Numbers from 0 to the segment's length less 1: two that follow on each other, or the same
        one twice. Those of a segment without rows are not read.
    indices : array of int32 or int64, shape (n_indices,), optional
        If given, ``indptr`` points into it: segment ``i`` owns the rows of ``values`` that
        ``indices[indptr[i]:indptr[i + 1]]`` names.

    Returns
    -------
    low, high : array, shape (n_segments, n_features), dtype of ``values``
        NaN where the segment has one, zero where it has no rows. Zeros have no sign.

    Notes
    -----
    Long segments are read once for each two bits of the type. No index is checked, and nothing
    waits for the GPU.
    """
    n_segments, n_features = indptr.shape[0] - 1, values.shape[1]
    low, high = (_device.empty(values, (n_segments, n_features), values.dtype) for _ in range(2))
    if low.size:
        gathered = indices is not None
        arrays = packed(values), indptr, indices if gathered else indptr, packed(ranks)
        for part in range(4):
            launch_planned(_plan, (part, gathered), (*arrays, low, high, n_features))
    return low, high


def _plan(options, args):
    from rtxarr.kernels._rank_cuda import SIZES, ranked

    part, gathered = options
    values, indptr, _, _, low = args[:5]
    kernel, n_segments = ranked(values.dtype, gathered)[part], indptr.shape[0] - 1
    if part == 0:
        return kernel, -(-low.size // SIZES.threads), SIZES.threads
    shape = (SIZES.middles, SIZES.wides, SIZES.longs)[part - 1]
    width, _, n_groups = shape
    blocks = min(-(-n_segments // n_groups), _BLOCKS), -(-low.size // n_segments // width)
    return kernel, blocks, shape
