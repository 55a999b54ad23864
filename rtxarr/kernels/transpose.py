"""Copies of transposed arrays on a GPU, at the memory bandwidth."""

from __future__ import annotations

import math
from typing import Any

from rtxarr._device import _SIMULATING, launch, namespace, runs_kernels
from rtxarr.kernels._dense import memory_order

__all__ = ["contiguous"]

_FEWEST = 4 if _SIMULATING else 1 << 14  # elements; fewer are copied as fast by CuPy
_LEAST = 2 if _SIMULATING else 8  # along either side; less is hardly transposed


def contiguous(x: Any) -> Any:
    """Give a copy of an array whose axes lie in memory in their order, without gaps.

    Parameters
    ----------
    x : array
        On a GPU fast for arrays of at least two bytes an element that have no gaps, and of which a
        group of neighbouring axes lies behind the axes that follow it.

    Returns
    -------
    array of the same shape and dtype, C-contiguous
    """
    sizes = _matrices(x) if runs_kernels(x) and x.size >= _FEWEST else None
    if sizes is None:
        return x.copy(order="C")
    from rtxarr.kernels._transpose_cuda import THREADS, side, swap, word

    source, n_stacked, a, b = sizes
    n_bytes = x.dtype.itemsize
    out = namespace(x).empty(x.shape, dtype=x.dtype)
    flat = [array.reshape(-1).view(word(n_bytes)) for array in (source, out)]
    # An item of 16 bytes is moved at once or not at all.
    wide = [16 % n_bytes == 0 and n_bytes > 2 and n * n_bytes % 16 == 0 for n in (b, a)]
    tiles = n_stacked * math.prod(-(-n // side(n_bytes)) for n in (a, b))
    launch(swap(n_bytes, *wide), tiles, (*flat, a, b), block=THREADS)
    return out


def _matrices(x: Any) -> tuple[Any, int, int, int] | None:
    """Return the array as it lies in memory, and the shape of that as a stack of matrices.

    None if ``x`` is not those matrices transposed.
    """
    if x.dtype.itemsize not in (2, 4, 8, 16):
        return None
    order = memory_order(x)
    if order is None:
        return None
    source = x.transpose(order)
    if _address(source) % 16:
        return None
    long = [i for i in order if x.shape[i] > 1]
    places = sorted(long)
    while long and long[0] == places[0]:
        long, places = long[1:], places[1:]
    if not long:
        return None
    m = places.index(long[0])
    if long != places[m:] + places[:m]:
        return None
    a, b = (math.prod(x.shape[i] for i in part) for part in (places[m:], places[:m]))
    return (source, x.size // (a * b), a, b) if min(a, b) >= _LEAST else None


def _address(x: Any) -> int:
    return x.data.ptr if hasattr(x.data, "ptr") else x.ctypes.data
