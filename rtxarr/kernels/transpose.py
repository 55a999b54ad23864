"""Copies of transposed arrays on a GPU, at the memory bandwidth."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, empty, launch_planned, runs_here
from rtxarr.kernels._dense import _address

__all__ = ["contiguous", "word"]

_FEWEST = 4 if _SIMULATING else 1 << 12  # elements; fewer are copied as fast by CuPy
_LEAST = 2 if _SIMULATING else 8  # along either side; less is hardly transposed


def word(n_bytes: int) -> type:
    """Return the type in whose elements an item is moved; one of 16 bytes is two of them."""
    return {2: np.uint16, 4: np.float32}.get(n_bytes, np.float64)


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
    found = None
    if runs_here(x) and x.size >= _FEWEST and not _address(x) % 16:
        found = _matrices(x.shape, x.strides, x.dtype.itemsize)
    if found is None:
        return x.copy(order="C")
    order, sizes = found
    out = empty(x, x.shape, x.dtype)
    source, target, kind = x.transpose(order), out, word(x.dtype.itemsize)
    if x.dtype != kind:
        source, target = source.view(kind), target.view(kind)
    launch_planned(_swap, (x.dtype.itemsize, *sizes), (source, target, *sizes[1:]))
    return out


def _swap(options, args):
    from rtxarr.kernels._transpose_cuda import THREADS, side, swap

    n_bytes, n_stacked, a, b = options
    # An item of 16 bytes is moved at once or not at all.
    wide = [16 % n_bytes == 0 and n_bytes > 2 and n * n_bytes % 16 == 0 for n in (b, a)]
    tiles = n_stacked * math.prod(-(-n // side(n_bytes)) for n in (a, b))
    return swap(n_bytes, *wide), tiles, THREADS


@functools.lru_cache(maxsize=1024)
def _matrices(shape: tuple, strides: tuple, n_bytes: int) -> tuple[tuple, tuple] | None:
    """Return the axes as they lie in memory, and the array there as a stack of matrices.

    None if it is not those matrices transposed.
    """
    if n_bytes not in (2, 4, 8, 16):
        return None
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], shape[i] > 1))
    expected = n_bytes
    for i in reversed(order):
        if shape[i] > 1 and strides[i] != expected:
            return None  # there are gaps
        expected *= shape[i]
    long = [i for i in order if shape[i] > 1]
    places = sorted(long)
    while long and long[0] == places[0]:
        long, places = long[1:], places[1:]
    if not long:
        return None
    m = places.index(long[0])
    if long != places[m:] + places[:m]:
        return None
    a, b = (math.prod(shape[i] for i in part) for part in (places[m:], places[:m]))
    n_stacked = math.prod(shape) // (a * b)
    return (tuple(order), (n_stacked, a, b)) if min(a, b) >= _LEAST else None
