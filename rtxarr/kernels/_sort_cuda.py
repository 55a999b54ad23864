"""GPU kernels that sort row numbers: stable, in a fixed order, and with no word from the host."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import bounded


@cuda.jit(device=True)
def _key(index, i, n_rows):
    """Give the row that entry ``i`` goes to: ``n_rows`` for one that does not exist."""
    key = np.int64(index[i])
    return key if key >= 0 and key < n_rows else n_rows


@functools.cache
def by_rank(n_entries: int, n_parts: int, kind: type):
    """Return the kernel that compares each key with all others, for few keys.

    Blocks of ``(n_entries, n_parts)`` threads: x runs over entries, y over parts of the others.
    ``kind`` is the NumPy type of integers that hold ``n_rows * n`` and more.
    """
    n_threads = n_entries * n_parts
    shape, last = (n_parts, n_entries), np.iinfo(kind).max

    @cuda.jit(device=True)
    def number(index, i, n_rows, n):
        """Give a number to compare by: different for all entries, and in the order asked for."""
        return kind(_key(index, i, n_rows) * n + i) if i < n else kind(last)

    @bounded(n_threads)
    def kernel(index, keys_out, order_out, n_rows):
        others = cuda.shared.array(n_threads, kind)
        counts = cuda.shared.array(shape, np.int32)
        x, y, n = cuda.threadIdx.x, cuda.threadIdx.y, np.int64(index.size)
        i = np.int64(cuda.blockIdx.x) * n_entries + x
        mine, before = number(index, i, n_rows, n), np.int32(0)
        j = np.int64(y * n_entries + x)
        coming = number(index, j, n_rows, n)
        for _ in range(0, n, n_threads):
            others[y * n_entries + x] = coming
            cuda.syncthreads()  # the others are in place
            j += n_threads
            coming = number(index, j, n_rows, n)  # under way while these are compared with
            for k in range(n_entries):
                before += np.int32(others[y * n_entries + k] < mine)
            cuda.syncthreads()  # all have been compared with
        counts[y, x] = before
        cuda.syncthreads()  # the counts of all parts are in place
        if y == 0 and i < n:
            for part in range(1, n_parts):
                before += counts[part, x]
            keys_out[before] = _key(index, i, n_rows)
            order_out[before] = i

    return kernel


class Radix(NamedTuple):
    """The kernels of one pass of a radix sort, over tiles of ``tile`` entries, a block each.

    ``count(keys, counts, shift, n_rows)`` counts the digits of each tile, ``scan(counts, totals)``
    adds up what lies before each tile, a block for each digit, and
    ``scatter(keys, order, counts, totals, keys_out, order_out, shift, n_rows)`` moves the entries.
    ``counts`` has shape (digits, tiles).
    """

    tile: int
    count: Any
    scan: Any
    scatter: Any


@functools.cache
def radix(bits: int, threads: int, per_thread: int, first: bool) -> Radix:
    """Return the kernels for digits of so many bits; in the first pass entries are in order."""
    n_digits, tile = 1 << bits, threads * per_thread
    per_scan = n_digits  # counters that a thread scans: digits * threads / threads
    # Two more, so that the threads of a warp do not all scan in one bank of the memory.
    shape = (n_digits, threads + 2)

    @cuda.jit(device=True)
    def digit_of(key, shift):
        return (key >> shift) & (n_digits - 1)

    @cuda.jit(device=True)
    def sum_before(value):
        """Give the sum of the values of the threads before this one; all of the block call it."""
        sums = cuda.shared.array(threads, np.int64)
        t = cuda.threadIdx.x
        sums[t] = value
        cuda.syncthreads()  # all values are in place
        step = 1
        while step < threads:
            other = sums[t - step] if t >= step else np.int64(0)
            cuda.syncthreads()  # all have read them
            sums[t] += other
            cuda.syncthreads()  # the longer sums are in place
            step *= 2
        result = sums[t] - value
        cuda.syncthreads()  # all have read theirs before the next call overwrites them
        return result

    @bounded(threads)
    def count(keys, counts, shift, n_rows):
        found = cuda.shared.array(n_digits, np.int32)
        t, block = cuda.threadIdx.x, np.int64(cuda.blockIdx.x)
        for digit in range(t, n_digits, threads):
            found[digit] = 0
        cuda.syncthreads()  # all are zero
        for i in range(block * tile + t, min((block + 1) * tile, keys.size), threads):
            # The order of these additions of integers does not matter.
            cuda.atomic.add(found, digit_of(_key(keys, i, n_rows), shift), 1)
        cuda.syncthreads()  # all entries are counted
        for digit in range(t, n_digits, threads):
            counts[digit, block] = found[digit]

    @bounded(threads)
    def scan(counts, totals):
        t, digit, n_tiles = cuda.threadIdx.x, cuda.blockIdx.x, counts.shape[1]
        each = (n_tiles + threads - 1) // threads
        start = min(t * each, n_tiles)
        stop = min(start + each, n_tiles)
        total = np.int64(0)
        for i in range(start, stop):
            total += counts[digit, i]
        before = sum_before(total)
        if t == threads - 1:
            totals[digit] = before + total
        for i in range(start, stop):
            here = counts[digit, i]
            counts[digit, i] = before
            before += here

    @bounded(threads)
    def scatter(keys, order, counts, totals, keys_out, order_out, shift, n_rows):
        # Each thread owns neighbouring entries and a counter for each digit.
        counters = cuda.shared.array(shape, np.uint16)
        bases = cuda.shared.array(n_digits, np.int64)
        t, block = cuda.threadIdx.x, np.int64(cuda.blockIdx.x)
        start = block * tile + t * per_thread
        stop = min(start + per_thread, keys.size)
        for digit in range(n_digits):
            counters[digit, t] = 0
        for i in range(start, stop):
            counters[digit_of(_key(keys, i, n_rows), shift), t] += np.uint16(1)
        base = sum_before(totals[t] if t < n_digits else np.int64(0))  # which also waits for all
        if t < n_digits:
            bases[t] = base + counts[t, block]
        # Entries come after those of lower digits, then after those of earlier threads.
        total = np.int64(0)
        for k in range(t * per_scan, (t + 1) * per_scan):
            total += counters[k // threads, k % threads]
        before = sum_before(total)
        for k in range(t * per_scan, (t + 1) * per_scan):
            here = counters[k // threads, k % threads]
            counters[k // threads, k % threads] = before
            before += here
        cuda.syncthreads()  # all counters are in place
        if t < n_digits:
            bases[t] -= counters[t, 0]
        cuda.syncthreads()  # so are all bases
        for i in range(start, stop):
            key = _key(keys, i, n_rows)
            digit = digit_of(key, shift)
            place = bases[digit] + counters[digit, t]
            counters[digit, t] += np.uint16(1)
            keys_out[place] = key
            order_out[place] = i if first else order[i]

    return Radix(tile, count, scan, scatter)


@cuda.jit
def bounds(keys, indptr):
    """Find where the entries of each row begin among the sorted keys; a thread a row."""
    row = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if row >= indptr.size:
        return
    low, high = np.int64(0), np.int64(keys.size)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < row:
            low = middle + 1
        else:
            high = middle
    indptr[row] = low
