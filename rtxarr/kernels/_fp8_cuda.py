"""GPU kernels of the rounding to 8-bit floating point and of its scales.

A block takes a tile of a matrix and a thread parts of 4 rows by 8 columns: eight codes of a row are
stored at once, and four of a column are a word of the transpose, which goes through shared memory.
What bounds the kernel beside the memory are its instructions, so numbers that are not finite, which
are rare, are left to a branch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import group_reduce
from rtxarr.kernels._vector import access, by_offset
from rtxarr.kernels.fp8 import COLUMNS, KINDS, ROWS

THREADS = 256
BLOCKS = 4  # at least that many on a multiprocessor


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

    def _larger(most, value):
        return np.fmax(most, abs(value))

    def _checked(value):
        return value if np.isfinite(value) else np.float32(np.nan)

    def _product(a, b):
        with np.errstate(over="ignore"):
            return a * b

    def _permuted(a, b, order):
        found = np.asarray([a, b], np.uint32).view(np.uint8)
        return found[[order >> n & 7 for n in (0, 4, 8, 12)]].view(np.uint32)[0]

    def _converted(kind):
        largest = float(ml_dtypes.finfo(KINDS[kind]).max)

        def four(a, b, c, d):
            limited = np.clip(np.asarray([a, b, c, d], np.float32), -largest, largest)
            return limited.astype(KINDS[kind]).view(np.uint32)[0]

        return four

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    from rtxarr._device import intrinsic, types

    _I32, _F32 = ir.IntType(32), ir.FloatType()
    _KINDS = {"r": (types.uint32, _I32), "f": (types.float32, _F32)}

    def _instruction(text, out, arguments):
        """Return the intrinsic that is the PTX ``text``; letters say what is in registers."""
        kinds = [_KINDS[letter][0] for letter in arguments]
        llvm = ir.FunctionType(_KINDS[out][1], [_KINDS[letter][1] for letter in arguments])
        asm = ir.InlineAsm(llvm, text, ",".join((f"={out}", *arguments)), side_effect=False)
        signature = _KINDS[out][0](*kinds)

        def codegen(context, builder, signature, args):
            return builder.call(asm, args)

        if len(arguments) == 1:

            @intrinsic
            def instruction(typingctx, a):
                return signature, codegen

        elif len(arguments) == 2:

            @intrinsic
            def instruction(typingctx, a, b):
                return signature, codegen

        elif len(arguments) == 3:

            @intrinsic
            def instruction(typingctx, a, b, c):
                return signature, codegen

        else:

            @intrinsic
            def instruction(typingctx, a, b, c, d):
                return signature, codegen

        return instruction

    _bits = _instruction("mov.b32 $0, $1;", "r", "f")
    # The larger of a number and the size of another, which does not count if it is NaN.
    _larger = _instruction("{ .reg .f32 size; abs.f32 size, $2; max.f32 $0, $1, size; }", "f", "ff")
    # NaN for what is not finite.
    _checked = _instruction("fma.rn.f32 $0, $1, 0f00000000, $1;", "f", "f")
    _product = _instruction("mul.rn.f32 $0, $1, $2;", "f", "ff")
    # The bytes of two words, numbered from the lowest, that the digits of the third name.
    _permuted = _instruction("prmt.b32 $0, $1, $2, $3;", "r", "rrr")

    def _converted(kind):
        """Return the intrinsic that gives the codes of four float32, the first lowest."""
        convert = f"cvt.rn.satfinite.{kind}x2.f32"  # its first operand goes to the upper half
        return _instruction(
            f"{{ .reg .b16 low, high; {convert} low, $2, $1; {convert} high, $4, $3; "
            "mov.b32 $0, {low, high}; }",
            "r",
            "ffff",
        )


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
        sign = _bits(value) >> 24 & 128
        if bits > _INFINITY:
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
    """Return what reads eight neighbours, and stores eight codes and four.

    ``n_left`` is how many there are before the end of the row. ``wide``: all at once, into arrays
    of uint64 and uint32.
    """
    if wide:
        load = by_offset(dtype, 8).load

        @cuda.jit(device=True)
        def read(x, at, n_left):
            return load(x, at)

        @cuda.jit(device=True)
        def put8(out, at, n_left, low, high):
            out[at >> 3] = np.uint64(low) | np.uint64(high) << np.uint64(32)

        @cuda.jit(device=True)
        def put4(out, at, n_left, word):
            out[at >> 2] = word

    else:
        load = access(dtype, wide=False).load

        @cuda.jit(device=True)
        def one(x, at, is_there):
            return load(x, at)[0] if is_there else _ZERO

        @cuda.jit(device=True)
        def read(x, at, n_left):
            return (
                one(x, at, n_left > 0),
                one(x, at + 1, n_left > 1),
                one(x, at + 2, n_left > 2),
                one(x, at + 3, n_left > 3),
                one(x, at + 4, n_left > 4),
                one(x, at + 5, n_left > 5),
                one(x, at + 6, n_left > 6),
                one(x, at + 7, n_left > 7),
            )

        @cuda.jit(device=True)
        def put4(out, at, n_left, word):
            for i in range(4):
                if i < n_left:
                    out[at + i] = np.uint8(word >> (8 * i) & 255)

        @cuda.jit(device=True)
        def put8(out, at, n_left, low, high):
            put4(out, at, n_left, low)
            put4(out, at + 4, n_left - 4, high)

    return read, put8, put4


@cuda.jit(device=True)
def _largest(a):
    """Give the largest size; NaN does not count."""
    most = _larger(_larger(_larger(_larger(_ZERO, a[0]), a[1]), a[2]), a[3])
    return _larger(_larger(_larger(_larger(most, a[4]), a[5]), a[6]), a[7])


@cuda.jit(device=True)
def _all_checked(a):
    return (
        _checked(a[0]),
        _checked(a[1]),
        _checked(a[2]),
        _checked(a[3]),
        _checked(a[4]),
        _checked(a[5]),
        _checked(a[6]),
        _checked(a[7]),
    )


@functools.cache
def quantize(dtype: np.dtype, kind: str, turned: bool, wide: bool, converts: bool) -> Any:
    """Return the kernel that gives the codes of a matrix (and of its transpose, if ``turned``).

    ``wide``: for whole parts at multiples of 16 bytes, and codes in words of 8 bytes, those of the
    transpose of 4. ``converts``: the GPU has instructions for it.
    """
    four = _four_codes(kind, converts)
    read, put8, put4 = _accesses(dtype, wide)
    one = np.float32(1)
    lanes, groups = COLUMNS // 8, ROWS // 4  # parts of a row and of a column
    spread = max(32 // lanes, 1)
    reduce = group_reduce(_larger, np.float32, THREADS, 1)
    even, odd = (np.uint32(order) for order in (0x5140, 0x7362))  # bytes of two rows, in turn
    lower, upper = (np.uint32(order) for order in (0x5410, 0x7632))  # halves

    @cuda.jit(device=True)
    def four_scaled(a, b, c, d, scale):
        return four(_product(a, scale), _product(b, scale), _product(c, scale), _product(d, scale))

    @cuda.jit(device=True)
    def words(a, scale):
        """Give the codes of eight neighbours as two words, and the largest size."""
        most = _largest(a)
        if not most < _HUGE:
            a = _all_checked(a)
            most = _largest(a)
        low = four_scaled(a[0], a[1], a[2], a[3], scale)
        return low, four_scaled(a[4], a[5], a[6], a[7], scale), most

    @cuda.jit(device=True)
    def turn(tile, j, place, a, b, c, d):
        """Store the four columns that the words of four rows have."""
        first, second = _permuted(a, b, even), _permuted(c, d, even)
        tile[j, place] = _permuted(first, second, lower)
        tile[j + 1, place] = _permuted(first, second, upper)
        first, second = _permuted(a, b, odd), _permuted(c, d, odd)
        tile[j + 2, place] = _permuted(first, second, lower)
        tile[j + 3, place] = _permuted(first, second, upper)

    # What waits at the barrier needs others beside it. The other variants take more registers.
    blocks = BLOCKS if turned and wide and converts else 1
    bounds = {} if _SIMULATING else {"launch_bounds": (THREADS, blocks)}

    @cuda.jit(**bounds)
    def kernel(x, scale, codes, transposed, amax, m, n, across):
        tile = cuda.shared.array((COLUMNS, groups), np.uint32)
        thread, block = cuda.threadIdx.x, np.uint32(cuda.blockIdx.x)
        n_across = np.uint32(across)  # short divisions
        first_row = np.int64(block // n_across) * ROWS
        first_column = np.int64(block % n_across) * COLUMNS
        inverse = one / scale[0]
        most = _ZERO
        lane = thread % lanes
        column = first_column + 8 * lane
        for k in range(groups * lanes // THREADS):
            group = thread // lanes + k * (THREADS // lanes)
            row = first_row + 4 * group
            if row < m and column < n:
                at, left = row * n + column, n - column
                # Rows beyond the last are read as the last one.
                second = at + (n if wide or row + 1 < m else 0)
                third = second + (n if wide or row + 2 < m else 0)
                fourth = third + (n if wide or row + 3 < m else 0)
                a, b = read(x, at, left), read(x, second, left)
                c, d = read(x, third, left), read(x, fourth, left)
                a_low, a_high, size = words(a, inverse)
                put8(codes, at, left, a_low, a_high)
                most = max(most, size)
                b_low, b_high, size = words(b, inverse)
                put8(codes, second, left, b_low, b_high)
                most = max(most, size)
                c_low, c_high, size = words(c, inverse)
                put8(codes, third, left, c_low, c_high)
                most = max(most, size)
                d_low, d_high, size = words(d, inverse)
                put8(codes, fourth, left, d_low, d_high)
                most = max(most, size)
                if turned:
                    # The threads of a warp write to different banks.
                    j, place = 8 * lane, group ^ (spread * lane & (groups - 1))
                    turn(tile, j, place, a_low, b_low, c_low, d_low)
                    turn(tile, j + 4, place, a_high, b_high, c_high, d_high)
        most = reduce(most, 0)  # has a barrier: the tile is in place, too
        if turned:
            # Neighbouring threads store neighbours of a column.
            group, j = thread % groups, thread // groups
            row, at = first_row + 4 * group, (first_column + j) * m + first_row + 4 * group
            for _ in range(COLUMNS * groups // THREADS):
                if row < m and first_column + j < n:
                    put4(
                        transposed, at, m - row, tile[j, group ^ (spread * (j >> 3) & (groups - 1))]
                    )
                j += THREADS // groups
                at += THREADS // groups * m
        if thread == 0:
            # The bits of numbers that are not negative are in their order: the same in any order.
            cuda.atomic.max(amax, 0, np.int32(_bits(most)))

    return kernel


@functools.cache
def advance() -> Any:
    """Return the kernel that moves sizes into their history and makes scales of it.

    A block of 32 threads takes a tensor.
    """

    @cuda.jit
    def kernel(history, amax, scales, limit0, limit1, limit2, n_steps):
        shared = cuda.shared.array(32, np.float32)
        i, thread = cuda.blockIdx.x, cuda.threadIdx.x
        limit = limit0 if i == 0 else limit1 if i == 1 else limit2
        newest = amax[4 * i]
        largest = newest
        for start in range(0, n_steps, 32):
            j = start + thread + 1
            size = history[i * n_steps + j] if j < n_steps else newest
            largest = max(largest, size)
            cuda.syncthreads()  # all have read
            if j <= n_steps:
                history[i * n_steps + j - 1] = size
        shared[thread] = largest
        half = 16
        while half > 0:
            cuda.syncthreads()  # what is added next is in place
            if thread < half:
                shared[thread] = max(shared[thread], shared[thread + half])
            half //= 2
        if thread == 0:
            amax[4 * i] = _ZERO
            if shared[0] > _ZERO:
                scales[4 * i] = shared[0] / limit

    return kernel
