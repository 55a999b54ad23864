"""GPU code that sorts points by the cells of a grid.

Sorted points are packed: each is four words of one array, up to three coordinates, zeros in place
of those that it lacks, and the bits of its number.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _device
from rtxarr.kernels._points_list import words
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset, maximum, minimum

# Threads of a block that looks for the ends of points: a multiple of 1, 2 and 3, so that each
# thread stays on one axis.
ENDS_THREADS = 6 if _SIMULATING else 384


@functools.cache
def ends(dtype: np.dtype):
    """Return the kernel that finds the ends of points along each axis; NaN if there is one.

    ``kernel(flat, n_axes, out)``; ``out`` has shape (2, n_blocks, n_axes), lowest and highest.
    """
    kept = np.dtype(dtype).name

    @bounded(ENDS_THREADS)
    def kernel(flat, n_axes, out):
        lowest = cuda.shared.array(ENDS_THREADS, kept)
        highest = cuda.shared.array(ENDS_THREADS, kept)
        thread, block = np.int64(cuda.threadIdx.x), np.int64(cuda.blockIdx.x)
        low = high = flat[thread % n_axes]
        for i in range(block * ENDS_THREADS + thread, flat.size, cuda.gridDim.x * ENDS_THREADS):
            value = flat[i]
            low, high = minimum(low, value), maximum(high, value)
        lowest[thread], highest[thread] = low, high
        cuda.syncthreads()  # those of all threads are in place
        if thread < n_axes:
            for other in range(thread + n_axes, ENDS_THREADS, n_axes):
                low, high = minimum(low, lowest[other]), maximum(high, highest[other])
            out[0, block, thread], out[1, block, thread] = low, high

    return kernel


class Sort(NamedTuple):
    """Kernels that sort points by cells, a thread a point.

    Attributes
    ----------
    count : kernel
        ``count(x, batches, low, inverse, dims, cell, place, counts)`` writes the cell of each
        point and its place among those of the cell, which come in any order.
    move : kernel
        ``move(x, cell, place, begins, packed, order)`` writes points to where they belong.
    """

    count: Any
    move: Any


@functools.cache
def sort(dtype: np.dtype) -> Sort:
    """Return the kernels for points with up to three axes."""
    scalar = np.dtype(dtype).type
    zero = scalar(0)
    store = by_offset(dtype, 4).store
    _, word_of = words(dtype)

    @_device
    def cell_along(value, low, inverse, n_cells):
        t = (value - low) * inverse
        if not t > zero:
            return np.int64(0)
        return np.int64(t) if t < scalar(n_cells) else n_cells - 1

    @cuda.jit
    def count(x, batches, l0, l1, l2, inverse, n0, n1, n2, cell, place, counts):
        i = np.int64(cuda.grid(1))
        if i < cell.size:
            n_axes = x.shape[1]
            found = batches[i] * n2
            if n_axes > 2:
                found += cell_along(x[i, 2], l2, inverse, n2)
            found *= n1
            if n_axes > 1:
                found += cell_along(x[i, 1], l1, inverse, n1)
            found = found * n0 + cell_along(x[i, 0], l0, inverse, n0)
            cell[i] = found
            # What is found among sorted points does not depend on their order in a cell.
            place[i] = cuda.atomic.add(counts, found, np.int32(1))

    @cuda.jit
    def move(x, cell, place, begins, packed, order):
        i = np.int64(cuda.grid(1))
        if i < cell.size:
            n_axes = x.shape[1]
            to = np.int64(begins[cell[i]]) + place[i]
            second = x[i, 1] if n_axes > 1 else zero
            third = x[i, 2] if n_axes > 2 else zero
            store(packed, 4 * to, (x[i, 0], second, third, word_of(i)))
            order[to] = i

    return Sort(count, move)
