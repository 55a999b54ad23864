"""GPU kernels of the rounding to 8-bit floating point and of its scales."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._vector import access
from rtxarr.kernels.fp8 import TILE

if _SIMULATING:

    def _bits(value):
        return int(np.float32(value).view(np.int32))

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    from rtxarr._device import types
    from rtxarr.kernels._vector import _convert

    _bits = _convert(
        "mov.b32 $0, $1;",
        "=r,f",
        (types.int32, types.float32),
        (ir.IntType(32), ir.FloatType()),
    )


class _Format(NamedTuple):
    """What rounding to a format needs, of float32 numbers or as their bits."""

    fraction: int  # its bits
    offset: int  # difference of the exponents' biases
    largest: int
    normal: int  # the smallest one that is
    step: float  # adding it leaves as many bits as a number below the normal ones has


_FORMATS = {
    "e4m3": _Format(3, 120, 0x43E00000, 0x3C800000, 2.0**14),
    "e5m2": _Format(2, 112, 0x47600000, 0x38800000, 2.0**7),
}
_INFINITY = 0x7F800000


@functools.cache
def encode(kind: str) -> Any:
    """Return the device function that gives the code of a float32, rounded to the nearest even."""
    fraction, offset, largest, normal, above = _FORMATS[kind]
    drop = 23 - fraction
    half = (1 << (drop - 1)) - 1
    step = np.float32(above)
    step_bits = int(step.view(np.int32))

    @cuda.jit(device=True)
    def code(value):
        size = abs(value)
        bits = _bits(size)
        sign = 0 if _bits(value) >= 0 else 128
        if bits >= _INFINITY:
            return sign | 127
        if bits >= largest:
            bits = largest
        if bits < normal:
            return sign | (_bits(size + step) - step_bits)
        bits += half + ((bits >> drop) & 1)
        return sign | ((bits >> drop) - (offset << fraction))

    return code


@functools.cache
def quantize(dtype: np.dtype, kind: str, turned: bool) -> Any:
    """Return the kernel that gives the codes of a matrix (and of its transpose, if ``turned``).

    A block of 32 by 8 threads takes a tile of 32 by 32; threads along x are neighbours in memory,
    for the transpose too.
    """
    load: Any = access(dtype, wide=False).load
    code = encode(kind)
    zero, one, huge = np.float32(0), np.float32(1), np.float32(np.inf)
    tile_shape = (TILE, TILE + 4)  # rows do not begin in one bank

    @cuda.jit
    def kernel(x, scale, codes, transposed, amax, m, n, across):
        tile = cuda.shared.array(tile_shape, np.uint8)
        largest = cuda.shared.array(256, np.float32)
        i, j = cuda.threadIdx.y, cuda.threadIdx.x
        first_row = np.int64(cuda.blockIdx.x) // across * TILE
        first_column = np.int64(cuda.blockIdx.x) % across * TILE
        inverse = one / scale[0]
        most = zero
        for part in range(i, TILE, 8):
            row, column = first_row + part, first_column + j
            if row < m and column < n:
                value = load(x, row * n + column)[0]
                size = abs(value)
                if size > most and size < huge:
                    most = size
                bits = np.uint8(code(value * inverse))
                codes[row * n + column] = bits
                if turned:
                    tile[part, j] = bits
        largest[i * TILE + j] = most
        cuda.syncthreads()  # the tile and the sizes of all threads are in place
        if turned:
            for part in range(i, TILE, 8):
                row, column = first_row + j, first_column + part
                if row < m and column < n:
                    transposed[column * m + row] = tile[j, part]
        half = 128
        while half > 0:
            if i * TILE + j < half:
                other = largest[i * TILE + j + half]
                if other > largest[i * TILE + j]:
                    largest[i * TILE + j] = other
            cuda.syncthreads()  # this half is reduced
            half //= 2
        if i == 0 and j == 0:
            # The bits of numbers that are not negative are in their order: the same in any order.
            cuda.atomic.max(amax, 0, _bits(largest[0]))

    return kernel


@functools.cache
def advance() -> Any:
    """Return the kernel that moves sizes into their history and makes scales of it."""
    zero = np.float32(0)

    @cuda.jit
    def kernel(history, amax, scales, limit0, limit1, limit2, n_steps):
        i = cuda.grid(1)
        if i >= 3:
            return
        limit = limit0 if i == 0 else limit1 if i == 1 else limit2
        largest = amax[4 * i]
        for j in range(n_steps - 1):
            size = history[i * n_steps + j + 1]
            history[i * n_steps + j] = size
            largest = max(largest, size)
        history[(i + 1) * n_steps - 1] = amax[4 * i]
        amax[4 * i] = zero
        if largest > zero:
            scales[4 * i] = largest / limit

    return kernel
