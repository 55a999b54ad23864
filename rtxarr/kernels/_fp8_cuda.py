"""GPU kernels of the rounding to 8-bit floating point and of its scales.

A block takes a tile of a matrix and a thread parts of 4 rows by 8 columns: eight codes of a row are
stored at once, and four of a column are a word of the transpose, which goes through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import access, by_offset, maximum
from rtxarr.kernels.fp8 import KINDS, TILE

THREADS = 256
_LANES = TILE // 8  # threads along a row
_GROUPS = TILE // 4  # parts along a column
_WARPS = THREADS // 32


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
_ZERO, _HUGE = np.float32(0), np.float32(np.inf)

if _SIMULATING:

    def _bits(value):
        return int(np.float32(value).view(np.int32))

    def _converted(kind):
        largest = float(ml_dtypes.finfo(KINDS[kind]).max)

        def four(a, b, c, d):
            values = np.asarray([a, b, c, d], np.float32)
            limited = np.clip(values, -largest, largest)
            limited[np.isinf(values)] = np.nan
            return limited.astype(KINDS[kind]).view(np.uint32)[0]

        return four

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    from rtxarr._device import intrinsic, types
    from rtxarr.kernels._vector import _convert

    _I32, _F32 = ir.IntType(32), ir.FloatType()
    _bits = _convert("mov.b32 $0, $1;", "=r,f", (types.int32, types.float32), (_I32, _F32))

    def _converted(kind):
        """Return the intrinsic that gives the codes of four float32, the first lowest."""
        # The instruction would make the largest number of an infinity: 0 * x + x makes it NaN. Its
        # first operand goes to the upper half.
        checked = " ".join(f"fma.rn.f32 f{i}, ${i}, 0f00000000, ${i};" for i in (1, 2, 3, 4))
        convert = f"cvt.rn.satfinite.{kind}x2.f32"
        text = (
            f"{{ .reg .f32 f<5>; .reg .b16 low, high; {checked} {convert} low, f2, f1; "
            f"{convert} high, f4, f3; mov.b32 $0, {{low, high}}; }}"
        )
        asm = ir.InlineAsm(ir.FunctionType(_I32, [_F32] * 4), text, "=r,f,f,f,f", side_effect=False)

        @intrinsic
        def four(typingctx, a, b, c, d):
            def codegen(context, builder, signature, args):
                return builder.call(asm, args)

            return types.uint32(*(types.float32,) * 4), codegen

        return four


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
def _four_codes(kind: str, converts: bool) -> Any:
    """Return the device function that gives the codes of four float32 as a word."""
    if converts:
        return _converted(kind)
    code = encode(kind)

    @cuda.jit(device=True)
    def four(a, b, c, d):
        return np.uint32(code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24)

    return four


@functools.cache
def _accesses(dtype: np.dtype, wide: bool) -> tuple:
    """Return what reads eight numbers of a row, and stores eight codes of one and four of one.

    ``wide``: at once, into arrays of uint64 and uint32; their parts lie all inside or outside.
    """
    if wide:
        load = by_offset(dtype, 8).load

        @cuda.jit(device=True)
        def read(x, row, column, m, n):
            return load(x, row * n + column)

        @cuda.jit(device=True)
        def put8(out, row, column, m, n, low, high):
            out[(row * n + column) // 8] = np.uint64(low) | np.uint64(high) << np.uint64(32)

        @cuda.jit(device=True)
        def put4(out, row, column, n, word):
            out[(row * n + column) // 4] = word

    else:
        load = access(dtype, wide=False).load

        @cuda.jit(device=True)
        def one(x, row, column, m, n):
            return load(x, row * n + column)[0] if row < m and column < n else _ZERO

        @cuda.jit(device=True)
        def read(x, row, column, m, n):
            return (
                one(x, row, column, m, n),
                one(x, row, column + 1, m, n),
                one(x, row, column + 2, m, n),
                one(x, row, column + 3, m, n),
                one(x, row, column + 4, m, n),
                one(x, row, column + 5, m, n),
                one(x, row, column + 6, m, n),
                one(x, row, column + 7, m, n),
            )

        @cuda.jit(device=True)
        def put4(out, row, column, n, word):
            for i in range(4):
                if column + i < n:
                    out[row * n + column + i] = np.uint8(word >> (8 * i) & 255)

        @cuda.jit(device=True)
        def put8(out, row, column, m, n, low, high):
            if row < m:
                put4(out, row, column, n, low)
                put4(out, row, column + 4, n, high)

    return read, put8, put4


@cuda.jit(device=True)
def _size(value):
    """Give the size of a number, zero of one that is not finite."""
    size = abs(value)
    return size if size < _HUGE else _ZERO


@cuda.jit(device=True)
def _largest(a):
    first = maximum(maximum(_size(a[0]), _size(a[1])), maximum(_size(a[2]), _size(a[3])))
    return maximum(
        first, maximum(maximum(_size(a[4]), _size(a[5])), maximum(_size(a[6]), _size(a[7])))
    )


@cuda.jit(device=True)
def _scaled(a, s):
    return (a[0] * s, a[1] * s, a[2] * s, a[3] * s, a[4] * s, a[5] * s, a[6] * s, a[7] * s)


@functools.cache
def quantize(dtype: np.dtype, kind: str, turned: bool, wide: bool, converts: bool) -> Any:
    """Return the kernel that gives the codes of a matrix (and of its transpose, if ``turned``).

    ``wide``: for whole parts at multiples of 16 bytes, and codes in words of 8 bytes, those of the
    transpose of 4. ``converts``: the GPU has instructions for it.
    """
    four = _four_codes(kind, converts)
    read, put8, put4 = _accesses(dtype, wide)
    one = np.float32(1)

    @bounded(THREADS)
    def kernel(x, scale, codes, transposed, amax, m, n, across):
        tile = cuda.shared.array((TILE, _GROUPS), np.uint32)
        largest = cuda.shared.array(THREADS, np.float32)
        thread, block = cuda.threadIdx.x, np.int64(cuda.blockIdx.x)
        first_row, first_column = block // across * TILE, block % across * TILE
        inverse = one / scale[0]
        most = _ZERO
        lane = thread % _LANES
        column = first_column + 8 * lane
        for k in range(_GROUPS * _LANES // THREADS):
            group = thread // _LANES + k * (THREADS // _LANES)
            row = first_row + 4 * group
            if row < m and column < n:
                a = read(x, row, column, m, n)
                b = read(x, row + 1, column, m, n)
                c = read(x, row + 2, column, m, n)
                d = read(x, row + 3, column, m, n)
                most = maximum(most, maximum(_largest(a), _largest(b)))
                most = maximum(most, maximum(_largest(c), _largest(d)))
                a, b = _scaled(a, inverse), _scaled(b, inverse)
                c, d = _scaled(c, inverse), _scaled(d, inverse)
                low, high = four(a[0], a[1], a[2], a[3]), four(a[4], a[5], a[6], a[7])
                put8(codes, row, column, m, n, low, high)
                low, high = four(b[0], b[1], b[2], b[3]), four(b[4], b[5], b[6], b[7])
                put8(codes, row + 1, column, m, n, low, high)
                low, high = four(c[0], c[1], c[2], c[3]), four(c[4], c[5], c[6], c[7])
                put8(codes, row + 2, column, m, n, low, high)
                low, high = four(d[0], d[1], d[2], d[3]), four(d[4], d[5], d[6], d[7])
                put8(codes, row + 3, column, m, n, low, high)
                if turned:
                    # The threads of a warp write to different banks.
                    j, place = 8 * lane, group ^ (2 * lane)
                    tile[j, place] = four(a[0], b[0], c[0], d[0])
                    tile[j + 1, place] = four(a[1], b[1], c[1], d[1])
                    tile[j + 2, place] = four(a[2], b[2], c[2], d[2])
                    tile[j + 3, place] = four(a[3], b[3], c[3], d[3])
                    tile[j + 4, place] = four(a[4], b[4], c[4], d[4])
                    tile[j + 5, place] = four(a[5], b[5], c[5], d[5])
                    tile[j + 6, place] = four(a[6], b[6], c[6], d[6])
                    tile[j + 7, place] = four(a[7], b[7], c[7], d[7])
        largest[thread] = most
        cuda.syncthreads()  # the tile and the sizes of all threads are in place
        if turned:
            # A warp stores a column of the tile.
            group = thread % 32
            row = first_row + 4 * group
            for k in range(TILE // _WARPS):
                j = thread // 32 + k * _WARPS
                if row < m and first_column + j < n:
                    word = tile[j, group ^ (2 * (j // 8))]
                    put4(transposed, first_column + j, row, m, word)
        half = THREADS // 2
        while half > 0:
            if thread < half:
                largest[thread] = maximum(largest[thread], largest[thread + half])
            cuda.syncthreads()  # this half is reduced
            half //= 2
        if thread == 0:
            # The bits of numbers that are not negative are in their order: the same in any order.
            cuda.atomic.max(amax, 0, _bits(largest[0]))

    return kernel


@functools.cache
def advance() -> Any:
    """Return the kernel that moves sizes into their history and makes scales of it."""

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
        amax[4 * i] = _ZERO
        if largest > _ZERO:
            scales[4 * i] = largest / limit

    return kernel
