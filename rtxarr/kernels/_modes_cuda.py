"""GPU kernels of real Fourier transforms of which only low frequencies are not zero, or wanted.

A thread takes a few neighbours along the last axis and all points along the middle one. It keeps
the sums of frequencies (forward) or their numbers (back) in registers, so that each point is read
or written once; the arithmetic, ``n_modes`` products a point, takes less time than that. The
points ``p`` and ``n - p`` share their cosines and sines, so both are taken together.

Of more than 16 frequencies, two blocks side by side sum up half each: what one reads, the other
finds in the cache. On the way back a thread takes fewer neighbours.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset

THREADS = 64  # a thread uses up to 255 registers
WIDTH = 4


def n_groups(n_modes: int) -> int:
    """Return how many blocks share the frequencies of what is transformed."""
    return 1 if n_modes <= 16 else 2


def width_back(n_modes: int) -> int:
    """Return how many neighbours a thread takes on the way back; it is always four forward."""
    return 4 if n_modes <= 16 else 2


@functools.cache
def forward(n_modes: int):
    """Return the kernel that sums up the first frequencies, a multiple of 4 or, beyond 16, of 8.

    ``x`` is flat, of (outer, n, inner) float32, and ``out`` of (outer, n_modes, inner) pairs of
    float32. A row of ``table`` has the cosines of all frequencies at one point, then their sines.
    """
    load, _ = by_offset(np.float32, WIDTH)
    _, store_pairs = by_offset(np.float32, 2 * WIDTH)
    groups = n_groups(n_modes)
    own = n_modes // groups
    add, add_signed, sums = _sums(own, n_modes)
    zero: Any = np.float32(0)
    size = own * WIDTH

    @bounded(THREADS)
    def kernel(x, table, out, n, inner):
        block = np.int64(cuda.blockIdx.x)
        number = block // groups * THREADS + cuda.threadIdx.x
        start = block % groups * own
        pieces = inner // WIDTH
        outer, at = number // pieces, number % pieces * WIDTH
        if number >= out.size // (2 * WIDTH * n_modes):
            return
        first = outer * n * inner + at
        re = cuda.local.array(size, np.float32)
        im = cuda.local.array(size, np.float32)
        for i in range(size):
            re[i] = zero
            im[i] = zero
        add(re, load(x, first))
        if n % 2 == 0:
            add_signed(re, load(x, first + n // 2 * inner))
        last = (n - 1) // 2
        for p in range(1, last, 2):  # two at a time: memory answers late
            a = load(x, first + p * inner)
            b = load(x, first + (n - p) * inner)
            c = load(x, first + (p + 1) * inner)
            d = load(x, first + (n - p - 1) * inner)
            sums(re, im, table, p * 2 * n_modes + start, a, b)
            sums(re, im, table, (p + 1) * 2 * n_modes + start, c, d)
        if last % 2:
            a = load(x, first + last * inner)
            b = load(x, first + (n - last) * inner)
            sums(re, im, table, last * 2 * n_modes + start, a, b)
        first = (outer * n_modes + start) * inner + at
        for k in range(own):
            i = k * WIDTH
            pairs = (re[i], im[i], re[i + 1], im[i + 1], re[i + 2], im[i + 2], re[i + 3], im[i + 3])
            store_pairs(out, 2 * (first + k * inner), pairs)

    return kernel


def _sums(own: int, n_modes: int) -> Any:
    load, _ = by_offset(np.float32, 4)

    def part(q: int, before: Any) -> Any:
        @cuda.jit(device=True)
        def four(re, im, table, row, even, odd):
            cosine = load(table, row + q)
            sine = load(table, row + n_modes + q)
            for k in range(4):
                for j in range(WIDTH):
                    re[(q + k) * WIDTH + j] += cosine[k] * even[j]
                    im[(q + k) * WIDTH + j] += sine[k] * odd[j]
            if q:
                before(re, im, table, row, even, odd)

        return four

    parts = None
    for q in range(0, own, 4):  # no loop in the kernel: compilers leave long ones as they are
        parts = part(q, parts)

    @cuda.jit(device=True)
    def add(re, a):
        for k in range(own):
            for j in range(WIDTH):
                re[k * WIDTH + j] += a[j]

    @cuda.jit(device=True)
    def add_signed(re, a):
        for k in range(0, own, 2):
            for j in range(WIDTH):
                re[k * WIDTH + j] += a[j]
                re[(k + 1) * WIDTH + j] -= a[j]

    @cuda.jit(device=True)
    def sums(re, im, table, row, a, b):
        even = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
        odd = (b[0] - a[0], b[1] - a[1], b[2] - a[2], b[3] - a[3])
        parts(re, im, table, row, even, odd)

    return add, add_signed, sums


def _copied(lanes: int) -> Any:
    """Return what makes a tuple of neighbours."""
    if lanes == 2:

        def copied(x):
            return x[0], x[1]

    else:

        def copied(x):
            return x[0], x[1], x[2], x[3]

    return cuda.jit(device=True)(copied)


@functools.cache
def back(n_modes: int):
    """Return the kernel that gives the points of a spectrum that is zero beyond ``n_modes``.

    ``spectrum`` is flat, of (outer, n_modes, inner) pairs of float32, ``out`` of (outer, n, inner).
    """
    lanes = width_back(n_modes)
    _, store = by_offset(np.float32, lanes)
    load, _ = by_offset(np.float32, 4)
    load_pairs, _ = by_offset(np.float32, 2 * lanes)
    copied = _copied(lanes)
    size = n_modes * lanes
    two: Any = np.float32(2)

    @bounded(THREADS)
    def kernel(spectrum, table, out, n, inner):
        number = np.int64(cuda.grid(1))
        pieces = inner // lanes
        outer, at = number // pieces, number % pieces * lanes
        if number >= spectrum.size // (2 * size):
            return
        re = cuda.local.array(size, np.float32)
        im = cuda.local.array(size, np.float32)
        even = cuda.local.array(lanes, np.float32)
        odd = cuda.local.array(lanes, np.float32)
        first = outer * n_modes * inner + at
        for j in range(lanes):
            even[j] = np.float32(0)
            odd[j] = np.float32(0)
        for k in range(n_modes):
            pairs = load_pairs(spectrum, 2 * (first + k * inner))
            # Frequencies but the first stand in the whole spectrum twice.
            scale = two if k else np.float32(1)
            for j in range(lanes):
                real = scale * pairs[2 * j]
                re[k * lanes + j] = real
                im[k * lanes + j] = scale * pairs[2 * j + 1]
                even[j] += real
                odd[j] += -real if k % 2 else real
        first = outer * n * inner + at
        store(out, first, copied(even))
        if n % 2 == 0:
            store(out, first + n // 2 * inner, copied(odd))
        for p in range(1, (n + 1) // 2):
            for j in range(lanes):
                even[j] = np.float32(0)
                odd[j] = np.float32(0)
            for q in range(0, n_modes, 4):
                cosine = load(table, p * 2 * n_modes + q)
                sine = load(table, p * 2 * n_modes + n_modes + q)
                for k in range(4):
                    for j in range(lanes):
                        even[j] += cosine[k] * re[(q + k) * lanes + j]
                        odd[j] += sine[k] * im[(q + k) * lanes + j]
            for j in range(lanes):
                total = even[j]
                even[j] = total - odd[j]
                odd[j] = total + odd[j]
            store(out, first + p * inner, copied(even))
            store(out, first + (n - p) * inner, copied(odd))

    return kernel
