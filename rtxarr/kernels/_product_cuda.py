"""GPU kernels for the product of the rows of each segment.

A product is kept as a number near one and an exponent of two, apart from how many factors are zero
or infinite: so none on the way is too large or too small, and what is left without one of the
factors is known (:func:`others`). ``product`` says what a code holds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.dtypes import accumulator
from rtxarr.kernels._segment_cuda import find_segment, first_slot
from rtxarr.kernels._vector import by_offset
from rtxarr.kernels.product import _FAR

# Threads of a block that joins chunks: slots or features, and parts of the chunks.
JOIN_BLOCK = (4, 2) if _SIMULATING else (32, 8)

if _SIMULATING:

    def _exponents(scalar):
        def exponent(x):
            return np.frexp(x)[1] - 1

        def scaled(x, exponent):
            with np.errstate(all="ignore"):
                return np.ldexp(x, int(exponent))

        return exponent, scaled

else:

    def _exponents(scalar):
        device = cuda.libdevice
        if scalar is np.float32:
            return device.ilogbf, device.scalbnf
        return device.ilogb, device.scalbn


@functools.cache
def _special(scalar: Any):
    """Return ``special(m, zeros, infinities)``: a product times so many zeros and infinities."""
    zero, infinity, nan = scalar(0), scalar(np.inf), scalar(np.nan)

    @cuda.jit(device=True)
    def special(m, zeros, infinities):
        if zeros > 0:
            return nan if infinities > 0 else m * zero
        if infinities > 0:
            return nan if m == zero else m * infinity
        return m

    return special


@functools.cache
def _steps(scalar: Any):
    """Return ``(times, join, normal, value)`` of products ``(m, e, counts)``."""
    (exponent, scaled), special = _exponents(scalar), _special(scalar)
    step = 64 if scalar is np.float32 else 512
    up, down = scalar(2.0**step), scalar(2.0**-step)
    most, least = scalar(2.0 ** (step // 2)), scalar(2.0 ** -(step // 2))
    zero, infinity, e_step = scalar(0), scalar(np.inf), np.int32(step)

    @cuda.jit(device=True)
    def centred(m, e):
        """Bring ``m``, between ``2 ** -(2.5 * step)`` and ``2 ** (1.5 * step)``, near one."""
        for _ in range(2):
            size = abs(m)
            if size > most and size < infinity:
                m *= down
                e += e_step
            elif size < least and size > zero:
                m *= up
                e -= e_step
        return m, e

    @cuda.jit(device=True)
    def times(m, e, counts, x):
        size = abs(x)
        if size == zero:
            return m, e, np.int32(counts + 4 if counts < 8 else counts)
        if size == infinity:
            return m if x > zero else -m, e, np.int32(counts + 1 if counts & 3 < 2 else counts)
        x, e = centred(x, e)
        m, e = centred(m * x, e)
        return m, e, counts

    @cuda.jit(device=True)
    def join(m, e, counts, other, code):
        code = np.int64(code)
        m, e = centred(m * other, np.int32(e + (code >> 4)))
        zeros = min(8, (counts & 12) + (int(code) & 12))
        infinities = min(2, (counts & 3) + (int(code) & 3))
        return m, e, np.int32(zeros + infinities)

    @cuda.jit(device=True)
    def normal(m, e, counts):
        """Give a number from 1 to 2, and the code of the rest."""
        if m == m:
            shift = exponent(m)
            m = scaled(m, -shift)
            e += shift
        e = max(-_FAR, min(_FAR - 1, e))
        return m, scalar(np.int64(e) * 16 + counts)

    @cuda.jit(device=True)
    def value(m, e, counts):
        m = special(m, counts & 12, counts & 3)
        return scaled(m, max(-_FAR, min(_FAR - 1, e)))

    return times, join, normal, value


@functools.cache
def others(scalar: Any):
    """Return ``others(m, code, x)``: a product without its factor ``x``."""
    (exponent, scaled), special = _exponents(scalar), _special(scalar)
    zero, infinity = scalar(0), scalar(np.inf)

    @cuda.jit(device=True)
    def without(m, code, x):
        code = np.int64(code)
        e, zeros, infinities = int(code >> 4), int(code) & 12, int(code) & 3
        size = abs(x)
        if size == zero:
            zeros -= 4
        elif size == infinity:
            infinities -= 1
            m = m if x > zero else -m
        else:
            shift = exponent(x) if x == x else 0
            m /= scaled(x, -shift)
            e -= shift
        return scaled(special(m, zeros, infinities), e)

    return without


@functools.cache
def products(dtype: np.dtype, width: int, gathered: bool, in_parts: bool):
    """Return ``(rows, chunks, join)``; a thread of the first two takes ``width`` features.

    Arrays are flat. Segment ``s`` has the rows ``indptr[s]:indptr[s + 1]`` of ``n_features``, or
    if ``gathered`` those that ``indices`` names there. ``first`` gets the products, or if
    ``in_parts`` numbers from 1 to 2, and ``second`` the codes of the rest.
    """
    scalar: Any = np.dtype(accumulator(dtype)).type
    load, _ = by_offset(dtype, width)
    _, store = by_offset(dtype, 1)
    times, combine, normal, value = _steps(scalar)
    one, none = scalar(1), np.int32(0)

    @cuda.jit(device=True)
    def fetch(values, indices, j, n_features, feature):
        row = np.int64(indices[j] if gathered else j)
        return load(values, row * n_features + feature)

    @cuda.jit(device=True)
    def multiply(values, indices, start, stop, feature, n_features, m, e, counts):
        for i in range(width):
            m[i], e[i], counts[i] = one, none, none
        j = start
        while j < stop:
            # Four loads in flight; of the last ones, some are made again and not looked at.
            last = stop - 1
            a = fetch(values, indices, j, n_features, feature)
            b = fetch(values, indices, min(j + 1, last), n_features, feature)
            c = fetch(values, indices, min(j + 2, last), n_features, feature)
            d = fetch(values, indices, min(j + 3, last), n_features, feature)
            for i in range(width):
                m[i], e[i], counts[i] = times(m[i], e[i], counts[i], a[i])
            if j + 1 < stop:
                for i in range(width):
                    m[i], e[i], counts[i] = times(m[i], e[i], counts[i], b[i])
            if j + 2 < stop:
                for i in range(width):
                    m[i], e[i], counts[i] = times(m[i], e[i], counts[i], c[i])
            if j + 3 < stop:
                for i in range(width):
                    m[i], e[i], counts[i] = times(m[i], e[i], counts[i], d[i])
            j += 4

    @cuda.jit(device=True)
    def put(first, second, at, m, e, counts):
        if in_parts:
            first[at], second[at] = normal(m, e, counts)
        else:
            store(first, at, (value(m, e, counts),))

    @cuda.jit
    def rows(values, indptr, indices, first, second, n_features, longest):
        """Multiply the segments of up to ``longest`` rows; neighbouring threads take features."""
        at = (np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * width
        if at >= first.size:
            return
        m, e = cuda.local.array(width, scalar), cuda.local.array(width, np.int32)
        counts = cuda.local.array(width, np.int32)
        segment = at // n_features
        start, stop = indptr[segment], indptr[segment + 1]
        if stop - start <= longest:
            feature = at - segment * n_features
            multiply(values, indices, start, stop, feature, n_features, m, e, counts)
            for i in range(width):
                put(first, second, at + i, m[i], e[i], counts[i])

    @cuda.jit
    def chunks(values, indptr, indices, numbers, codes, n_features, chunk_rows):
        """Multiply each chunk of ``chunk_rows`` rows of the long segments into its slot."""
        at = (np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * width
        if at >= numbers.size:
            return
        m, e = cuda.local.array(width, scalar), cuda.local.array(width, np.int32)
        counts = cuda.local.array(width, np.int32)
        slot = at // n_features
        segment = find_segment(indptr, slot, chunk_rows)
        start, stop = indptr[segment], indptr[segment + 1]
        if stop - start <= chunk_rows:
            return
        start += (slot - first_slot(start, chunk_rows)) * chunk_rows
        if start < stop:
            stop, feature = min(start + chunk_rows, stop), at - slot * n_features
            multiply(values, indices, start, stop, feature, n_features, m, e, counts)
            for i in range(width):
                numbers[at + i], codes[at + i] = normal(m[i], e[i], counts[i])

    n_lanes, n_parts = JOIN_BLOCK

    @cuda.jit
    def join(indptr, numbers, codes, first, second, n_features, chunk_rows):
        """Multiply the chunks of each long segment that begins among the block's slots.

        The grid's x runs over blocks of slots and its y over blocks of features; in a block x
        runs over those, and y over parts of the chunks.
        """
        owners = cuda.shared.array(n_lanes, np.int64)
        shared = cuda.shared.array((n_parts, n_lanes), scalar)
        shared_codes = cuda.shared.array((n_parts, n_lanes), scalar)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        base = np.int64(cuda.blockIdx.x) * n_lanes
        feature = np.int64(cuda.blockIdx.y) * n_lanes + x
        if y == 0:
            slot, owner = base + x, np.int64(-1)
            if slot * n_features < numbers.size:
                segment = find_segment(indptr, slot, chunk_rows)
                start = indptr[segment]
                is_long = indptr[segment + 1] - start > chunk_rows
                if is_long and first_slot(start, chunk_rows) == slot:
                    owner = segment
            owners[x] = owner
        cuda.syncthreads()  # the owners of all slots are in place
        for i in range(n_lanes):
            segment = owners[i]
            if segment < 0:
                continue  # so do all threads of the block
            n_rows = indptr[segment + 1] - indptr[segment]
            stop = base + i + (n_rows + chunk_rows - 1) // chunk_rows
            m, e, counts = one, none, none
            if feature < n_features:
                for j in range(base + i + y, stop, n_parts):
                    at = j * n_features + feature
                    m, e, counts = combine(m, e, counts, numbers[at], codes[at])
            shared[y, x], shared_codes[y, x] = normal(m, e, counts)
            cuda.syncthreads()  # the products of all parts are in place
            if y == 0 and feature < n_features:
                for part in range(1, n_parts):
                    m, e, counts = combine(m, e, counts, shared[part, x], shared_codes[part, x])
                put(first, second, segment * n_features + feature, m, e, counts)
            cuda.syncthreads()  # they have been read before the next segment overwrites them

    return rows, chunks, join
