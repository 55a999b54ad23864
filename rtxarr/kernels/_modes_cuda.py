"""GPU kernels of real Fourier transforms of which only low frequencies are not zero, or wanted.

A thread takes four neighbours along the last axis and all points along the middle one. It keeps
the sums of all frequencies (forward) or their numbers (back) in registers, so that each point is
read or written once; the arithmetic, ``n_modes`` products a point, takes less time than that. The
points ``p`` and ``n - p`` share their cosines and sines, so both are taken together.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset

THREADS = 128
WIDTH = 4


@functools.cache
def forward(n_modes: int):
    """Return the kernel that sums up the first frequencies, a multiple of 4.

    ``x`` is flat, of (outer, n, inner) float32, and ``out`` of (outer, n_modes, inner) pairs of
    float32. A row of ``table`` has the cosines of all frequencies at one point, then their sines.
    """
    load, _ = by_offset(np.float32, WIDTH)
    _, store_pairs = by_offset(np.float32, 2 * WIDTH)
    add, add_signed, sums = _sums(n_modes)
    zero: Any = np.float32(0)
    size = n_modes * WIDTH

    @bounded(THREADS)
    def kernel(x, table, out, n, inner):
        number = np.int64(cuda.grid(1))
        pieces = inner // WIDTH
        outer, at = number // pieces, number % pieces * WIDTH
        if number >= out.size // (2 * size):
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
            sums(re, im, table, p * 2 * n_modes, a, b)
            sums(re, im, table, (p + 1) * 2 * n_modes, c, d)
        if last % 2:
            a = load(x, first + last * inner)
            b = load(x, first + (n - last) * inner)
            sums(re, im, table, last * 2 * n_modes, a, b)
        first = outer * n_modes * inner + at
        for k in range(n_modes):
            i = k * WIDTH
            pairs = (re[i], im[i], re[i + 1], im[i + 1], re[i + 2], im[i + 2], re[i + 3], im[i + 3])
            store_pairs(out, 2 * (first + k * inner), pairs)

    return kernel


def _sums(n_modes: int):
    load, _ = by_offset(np.float32, WIDTH)

    @cuda.jit(device=True)
    def add(re, a):
        for k in range(n_modes):
            for j in range(WIDTH):
                re[k * WIDTH + j] += a[j]

    @cuda.jit(device=True)
    def add_signed(re, a):
        for k in range(0, n_modes, 2):
            for j in range(WIDTH):
                re[k * WIDTH + j] += a[j]
                re[(k + 1) * WIDTH + j] -= a[j]

    @cuda.jit(device=True)
    def sums(re, im, table, row, a, b):
        even = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
        odd = (b[0] - a[0], b[1] - a[1], b[2] - a[2], b[3] - a[3])
        for q in range(0, n_modes, 4):
            cosine = load(table, row + q)
            sine = load(table, row + n_modes + q)
            for k in range(4):
                for j in range(WIDTH):
                    re[(q + k) * WIDTH + j] += cosine[k] * even[j]
                    im[(q + k) * WIDTH + j] += sine[k] * odd[j]

    return add, add_signed, sums


@functools.cache
def back(n_modes: int):
    """Return the kernel that gives the points of a spectrum that is zero beyond ``n_modes``.

    ``spectrum`` is flat, of (outer, n_modes, inner) pairs of float32, ``out`` of (outer, n, inner).
    """
    load, store = by_offset(np.float32, WIDTH)
    load_pairs, _ = by_offset(np.float32, 2 * WIDTH)
    size = n_modes * WIDTH
    two: Any = np.float32(2)

    @cuda.jit(device=True)
    def at_middle(re):
        a, b, c, d = re[0], re[1], re[2], re[3]
        for k in range(1, n_modes):
            i = k * WIDTH
            if k % 2:
                a, b, c, d = a - re[i], b - re[i + 1], c - re[i + 2], d - re[i + 3]
            else:
                a, b, c, d = a + re[i], b + re[i + 1], c + re[i + 2], d + re[i + 3]
        return a, b, c, d

    @cuda.jit(device=True)
    def at_start(re):
        a, b, c, d = re[0], re[1], re[2], re[3]
        for k in range(1, n_modes):
            i = k * WIDTH
            a, b, c, d = a + re[i], b + re[i + 1], c + re[i + 2], d + re[i + 3]
        return a, b, c, d

    @bounded(THREADS)
    def kernel(spectrum, table, out, n, inner):
        number = np.int64(cuda.grid(1))
        pieces = inner // WIDTH
        outer, at = number // pieces, number % pieces * WIDTH
        if number >= spectrum.size // (2 * size):
            return
        re = cuda.local.array(size, np.float32)
        im = cuda.local.array(size, np.float32)
        first = outer * n_modes * inner + at
        for k in range(n_modes):
            pairs = load_pairs(spectrum, 2 * (first + k * inner))
            # Frequencies but the first stand in the whole spectrum twice.
            scale = two if k else np.float32(1)
            for j in range(WIDTH):
                re[k * WIDTH + j] = scale * pairs[2 * j]
                im[k * WIDTH + j] = scale * pairs[2 * j + 1]
        first = outer * n * inner + at
        store(out, first, at_start(re))
        if n % 2 == 0:
            store(out, first + n // 2 * inner, at_middle(re))
        even = cuda.local.array(WIDTH, np.float32)
        odd = cuda.local.array(WIDTH, np.float32)
        for p in range(1, (n + 1) // 2):
            for j in range(WIDTH):
                even[j] = np.float32(0)
                odd[j] = np.float32(0)
            for q in range(0, n_modes, 4):
                cosine = load(table, p * 2 * n_modes + q)
                sine = load(table, p * 2 * n_modes + n_modes + q)
                for k in range(4):
                    for j in range(WIDTH):
                        even[j] += cosine[k] * re[(q + k) * WIDTH + j]
                        odd[j] += sine[k] * im[(q + k) * WIDTH + j]
            e0, e1, e2, e3 = even[0], even[1], even[2], even[3]
            o0, o1, o2, o3 = odd[0], odd[1], odd[2], odd[3]
            store(out, first + p * inner, (e0 - o0, e1 - o1, e2 - o2, e3 - o3))
            store(out, first + (n - p) * inner, (e0 + o0, e1 + o1, e2 + o2, e3 + o3))

    return kernel
