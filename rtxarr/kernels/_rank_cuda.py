"""GPU kernels that find the numbers of two ranks in each segment, feature by feature.

Numbers are compared as integers in the same order, so nothing is rounded. A thread has one feature
of a short segment, whose numbers lie in shared memory. For a longer one the bits of the number
are found two at a time, by counting how many numbers are below: by a warp or a block, which keep
those of 8 features, or by a block that reads those of 32 again each time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.dtypes import accumulator
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset


class Sizes(NamedTuple):
    """How segments are dealt out.

    Attributes
    ----------
    short, middle, wide : int
        The longest segments that a thread takes, a warp, and a block that keeps the numbers.
    middle_kept, wide_kept : int
        Bytes of the numbers of a segment and a feature that those keep in shared memory; longer
        ones are read for each two bits.
    threads : int
        Of a block for short segments.
    middles, wides, longs : tuple of 3 ints
        Features side by side, threads that share each, and how many such groups a block has.
    """

    short: int
    middle: int
    wide: int
    middle_kept: int
    wide_kept: int
    threads: int
    middles: tuple[int, int, int]
    wides: tuple[int, int, int]
    longs: tuple[int, int, int]


SIZES = (
    Sizes(3, 5, 8, 16, 28, 4, (2, 2, 1), (2, 3, 1), (2, 4, 1))
    if _SIMULATING
    else Sizes(32, 256, 1024, 1024, 4096, 128, (8, 4, 4), (8, 16, 1), (32, 16, 1))
)

if _SIMULATING:

    def _bits_of(kind):
        return lambda x: kind(x.view(kind))

    def _number_of(kind):
        scalar = np.float32 if kind is np.int32 else np.float64
        return lambda bits: kind(bits).view(scalar)

else:

    def _bits_of(kind):
        device = cuda.libdevice
        return device.float_as_int if kind is np.int32 else device.double_as_longlong

    def _number_of(kind):
        device = cuda.libdevice
        return device.int_as_float if kind is np.int32 else device.longlong_as_double


class Keys(NamedTuple):
    """Integers in the order of numbers, NaN being the largest and zero having no sign.

    Attributes
    ----------
    kind : type
    n_bits : int
        How many they have.
    nan : int
    key, number : device function
        ``key(x)`` of a number, and ``number(key)``.
    """

    kind: Any
    n_bits: int
    nan: int
    key: Any
    number: Any


@functools.cache
def keys_of(dtype: np.dtype) -> Keys:
    """Return the keys of a floating type; those of half types, being float32, have fewer bits."""
    scalar: Any = np.dtype(accumulator(dtype)).type
    kind: Any = np.int32 if scalar is np.float32 else np.int64
    width = 8 * np.dtype(kind).itemsize
    # Low bits of the significand that a half type has not: an even number is left, 20 or 16.
    unused = {"float16": 12, "bfloat16": 16}.get(np.dtype(dtype).name, 0)
    largest = kind(np.iinfo(kind).max)
    shift, sign, low = kind(unused), kind(width - 1), kind((1 << unused) - 1)
    nan, zero, nothing = kind(largest >> shift), scalar(0), kind(0)
    bits_of, to_number = _bits_of(kind), _number_of(kind)

    @cuda.jit(device=True)
    def key(x):
        if x != x:
            return nan
        bits = bits_of(x) if x != zero else nothing
        return kind((bits ^ ((bits >> sign) & largest)) >> shift)

    @cuda.jit(device=True)
    def number(key):
        bits = kind(key << shift)
        if key < nothing:
            bits = kind((bits | low) ^ largest)
        return to_number(bits)

    return Keys(kind, width - unused, int(nan), key, number)


@functools.cache
def ranked(dtype: np.dtype, gathered: bool):
    """Return ``(short, middle, wide, long)``, the kernels for segments of all lengths.

    Arrays are flat. Segment ``s`` has the rows ``indptr[s]:indptr[s + 1]`` of ``n_features``, or
    if ``gathered`` those that ``indices`` names there, and ``ranks[2 * s]`` and
    ``ranks[2 * s + 1]``, which follow on each other or are the same. ``low`` and ``high`` get the
    numbers of these ranks: NaN where there is one, zero for a segment without rows.
    """
    keys = keys_of(dtype)
    kind, key, number, nan = keys.kind, keys.key, keys.number, keys.kind(keys.nan)
    scalar: Any = np.dtype(accumulator(dtype)).type
    load, store = by_offset(dtype, 1)
    size = np.dtype(kind).itemsize
    n_short, threads = SIZES.short, SIZES.threads
    zero, none = scalar(0), np.int32(0)

    @cuda.jit(device=True)
    def count(a, b, c, d):
        return np.int32(a) + np.int32(b) + np.int32(c) + np.int32(d)

    @cuda.jit(device=True)
    def key_at(values, indices, j, n_features, feature):
        row = np.int64(indices[j] if gathered else j)
        return key(load(values, row * n_features + feature)[0])

    @cuda.jit(device=True)
    def put(low, high, at, first, second, has_nan):
        store(low, at, (number(nan if has_nan else first),))
        store(high, at, (number(nan if has_nan else second),))

    @bounded(threads)
    def short(values, indptr, indices, ranks, low, high, n_features):
        """Find those of short segments; neighbouring threads take neighbouring features."""
        # Each thread has a column of its own.
        held = cuda.shared.array((n_short, threads), kind)
        t = cuda.threadIdx.x
        at = np.int64(cuda.blockIdx.x) * threads + t
        if at >= low.size:
            return
        segment = at // n_features
        start, stop = indptr[segment], indptr[segment + 1]
        n = stop - start
        if n > n_short:
            return
        if n == 0:
            store(low, at, (zero,))
            store(high, at, (zero,))
            return
        feature = at - segment * n_features
        for j in range(n):
            held[j, t] = key_at(values, indices, start + j, n_features, feature)
        first_rank, second_rank = ranks[2 * segment], ranks[2 * segment + 1]
        first, second, has_nan = nan, nan, False
        for j in range(n):
            mine = held[j, t]
            below, upto = 0, 0
            for k in range(n):
                below += held[k, t] < mine
                upto += held[k, t] <= mine
            if below <= first_rank and first_rank < upto:
                first = mine
            if below <= second_rank and second_rank < upto:
                second = mine
            has_nan = has_nan or mine == nan
        put(low, high, at, first, second, has_nan)

    def of_groups(least, most, shape, n_kept):
        """Give the kernel for segments of ``least`` to ``most`` rows."""
        n_features_of, parts, n_groups = shape
        n_digits, top = keys.n_bits // 2, keys.n_bits - 2
        kept_shape = n_groups, max(1, n_kept), n_features_of
        lowest, one = kind(-(1 << (keys.n_bits - 1))), kind(1)
        add_up, smallest = _together(kind, shape)

        @bounded(n_features_of * parts * n_groups)
        def kernel(values, indptr, indices, ranks, low, high, n_features):
            # Neighbouring threads (x) take neighbouring features, y parts of a segment and z
            # segments; so does x of the grid, and y of it blocks of features.
            held = cuda.shared.array(kept_shape, kind)
            x, y, z = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z
            feature = np.int64(cuda.blockIdx.y) * n_features_of + x
            is_mine = y == 0 and feature < n_features
            feature = min(feature, np.int64(n_features) - 1)  # all threads of a group stay
            segment = np.int64(cuda.blockIdx.x) * n_groups + z
            while segment < indptr.size - 1:
                this, start, stop = segment, indptr[segment], indptr[segment + 1]
                segment += np.int64(cuda.gridDim.x) * n_groups
                n = stop - start
                if n < least or n > most:
                    continue  # so do all threads of the group
                is_kept = n <= n_kept
                if is_kept:  # a thread reads what it wrote itself
                    for j in range(y, n, parts):
                        held[z, j, x] = key_at(values, indices, start + j, n_features, feature)
                first_rank, second_rank = ranks[2 * this], ranks[2 * this + 1]
                found = lowest
                for digit in range(n_digits):
                    step = one << kind(top - 2 * digit)
                    # In three steps: a multiple of it may be no number of this type.
                    a = kind(found + step)
                    b = kind(a + step)
                    c = kind(b + step)
                    n_a, n_b, n_c = none, none, none
                    if is_kept:
                        for j in range(y, n, parts):
                            k = held[z, j, x]
                            n_a += np.int32(k < a)
                            n_b += np.int32(k < b)
                            n_c += np.int32(k < c)
                    else:
                        j = start + y
                        while j + 3 * parts < stop:  # four loads in flight
                            k = key_at(values, indices, j, n_features, feature)
                            m = key_at(values, indices, j + parts, n_features, feature)
                            p = key_at(values, indices, j + 2 * parts, n_features, feature)
                            q = key_at(values, indices, j + 3 * parts, n_features, feature)
                            n_a += count(k < a, m < a, p < a, q < a)
                            n_b += count(k < b, m < b, p < b, q < b)
                            n_c += count(k < c, m < c, p < c, q < c)
                            j += 4 * parts
                        while j < stop:
                            k = key_at(values, indices, j, n_features, feature)
                            n_a += np.int32(k < a)
                            n_b += np.int32(k < b)
                            n_c += np.int32(k < c)
                            j += parts
                    below_a, below_b, below_c = add_up(n_a, n_b, n_c)
                    if below_c <= first_rank:
                        found = c
                    elif below_b <= first_rank:
                        found = b
                    elif below_a <= first_rank:
                        found = a
                # What comes after it, how many come up to it, and how many NaN there are.
                n_a, n_b, next_key = none, none, nan
                for j in range(y, n, parts):
                    if is_kept:
                        k = held[z, j, x]
                    else:
                        k = key_at(values, indices, start + j, n_features, feature)
                    n_a += np.int32(k <= found)
                    n_b += np.int32(k == nan)
                    if k > found:
                        next_key = min(next_key, k)
                upto, n_nan, _ = add_up(n_a, n_b, none)
                next_key = smallest(next_key)
                if is_mine:
                    second = found if second_rank < upto else next_key
                    put(low, high, this * n_features + feature, found, second, n_nan > 0)

        return kernel

    most = np.iinfo(np.int64).max
    return (
        short,
        of_groups(n_short + 1, SIZES.middle, SIZES.middles, SIZES.middle_kept // size),
        of_groups(SIZES.middle + 1, SIZES.wide, SIZES.wides, SIZES.wide_kept // size),
        of_groups(SIZES.wide + 1, most, SIZES.longs, 0),
    )


@functools.cache
def _together(kind: type, shape: tuple[int, int, int]):
    """Return what the threads of a feature do together: all of a group call it.

    ``add_up(a, b, c)`` gives three sums, as int64, and ``smallest(key)`` the least key.
    """
    n_features_of, parts, _ = shape
    counts_shape, keys_shape = (3, parts, n_features_of), (parts, n_features_of)
    if n_features_of * parts == 32 and not _SIMULATING:  # a warp

        @cuda.jit(device=True)
        def add_up(a, b, c):
            mask = n_features_of
            while mask < 32:
                a += cuda.shfl_xor_sync(0xFFFFFFFF, a, mask)
                b += cuda.shfl_xor_sync(0xFFFFFFFF, b, mask)
                c += cuda.shfl_xor_sync(0xFFFFFFFF, c, mask)
                mask <<= 1
            return np.int64(a), np.int64(b), np.int64(c)

        @cuda.jit(device=True)
        def smallest(key):
            mask = n_features_of
            while mask < 32:
                key = min(key, cuda.shfl_xor_sync(0xFFFFFFFF, key, mask))
                mask <<= 1
            return key

        return add_up, smallest

    @cuda.jit(device=True)
    def add_up_all(a, b, c):
        counts = cuda.shared.array(counts_shape, np.int32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        counts[0, y, x], counts[1, y, x], counts[2, y, x] = a, b, c
        cuda.syncthreads()  # the counts of all parts are in place
        total_a, total_b, total_c = np.int64(0), np.int64(0), np.int64(0)
        for part in range(parts):
            total_a += counts[0, part, x]
            total_b += counts[1, part, x]
            total_c += counts[2, part, x]
        cuda.syncthreads()  # all have read them
        return total_a, total_b, total_c

    @cuda.jit(device=True)
    def smallest_of_all(key):
        found = cuda.shared.array(keys_shape, kind)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        found[y, x] = key
        cuda.syncthreads()  # the keys of all parts are in place
        for part in range(parts):
            key = min(key, found[part, x])
        cuda.syncthreads()  # all have read them
        return key

    return add_up_all, smallest_of_all
