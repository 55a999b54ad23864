"""GPU kernel of the rotary embedding: each thread turns some pairs of a row, or copies its rest."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import window
from rtxarr.kernels._vector import access, load4


@functools.cache
def kernel(dtype: np.dtype, wide: bool, interleaved: bool):
    """Return the kernel that turns pairs of neighbours, or of the two halves of a row.

    Arrays are flat and C-contiguous; ``cos`` and ``sin`` have rows of ``half`` elements, in the
    type that sums are kept in. Row ``i // inner % period`` of these turns row ``i`` of ``x``.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    neighbours = window(width)
    step: Any = max(width, 2) if interleaved else width  # elements of a piece
    pieces = step // width  # loads for one
    half_step = step // 2

    @cuda.jit(device=True)
    def fetch(array, offset, kept):
        for k in range(pieces):
            values = load(array, offset + k * width)
            for i in range(width):
                kept[k * width + i] = values[i]

    @cuda.jit(device=True)
    def put(array, offset, kept):
        for k in range(pieces):
            store(array, offset + k * width, neighbours(kept, k * width))

    @cuda.jit(device=True)
    def fetch_angles(array, offset, kept):
        if width == 1:
            kept[0] = array[offset]
        else:
            values = load4(array, offset)
            for i in range(4):
                kept[i] = values[i]
        if width == 8:
            values = load4(array, offset + 4)
            for i in range(4):
                kept[half_step + i] = values[i]

    @cuda.jit(device=True)
    def find(items):
        """Give this thread's row and its number in the row."""
        i = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        row = i // items
        return row, i - row * items

    @cuda.jit(device=True)
    def copy_rest(x, out, offset, j, length):
        """Copy what is not turned."""
        for k in range(pieces):
            if j + k * width < length:
                store(out, offset + j + k * width, load(x, offset + j + k * width))

    @cuda.jit
    def of_halves(x, cos, sin, out, length, half, inner, period, sign):
        first, second = cuda.local.array(step, scalar), cuda.local.array(step, scalar)
        c, s = cuda.local.array(step, scalar), cuda.local.array(step, scalar)
        row, k = find((length - half) // width)
        offset, j = row * length, k * width
        if offset >= x.size:
            return
        if j >= half:
            copy_rest(x, out, offset, j + half, length)
            return
        fetch(x, offset + j, first)
        fetch(x, offset + half + j, second)
        place = row // inner % period * half + j
        fetch_angles(cos, place, c)
        fetch_angles(sin, place, s)
        for i in range(step):
            a, b, turn = first[i], second[i], sign * s[i]
            first[i] = a * c[i] - b * turn
            second[i] = b * c[i] + a * turn
        put(out, offset + j, first)
        put(out, offset + half + j, second)

    @cuda.jit
    def of_neighbours(x, cos, sin, out, length, half, inner, period, sign):
        kept = cuda.local.array(step, scalar)
        row, k = find((length + step - 1) // step)
        offset, j = row * length, k * step
        if offset >= x.size:
            return
        if j >= 2 * half:
            copy_rest(x, out, offset, j, length)
            return
        fetch(x, offset + j, kept)
        place = row // inner % period * half + j // 2
        for i in range(step // 2):
            a, b = kept[2 * i], kept[2 * i + 1]
            c, turn = cos[place + i], sign * sin[place + i]
            kept[2 * i] = a * c - b * turn
            kept[2 * i + 1] = b * c + a * turn
        put(out, offset + j, kept)

    return of_neighbours if interleaved else of_halves
