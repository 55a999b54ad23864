"""GPU kernel of the rotary embedding: each thread turns some pairs of a few rows, or copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import bounded, window
from rtxarr.kernels._vector import access, load4, packed

THREADS = 256  # of a block


@functools.cache
def kernel(dtype: np.dtype, wide: bool, interleaved: bool, rows: int):
    """Return the kernel that turns pairs of neighbours, or of the two halves of a row.

    Arrays are flat and C-contiguous; ``cos`` and ``sin`` have rows of ``half`` elements, in the
    type that sums are kept in. Of ``x``, rows ``b * spread + i * apart`` for ``i`` in
    ``range(count)`` and ``b`` in ``range(bases)`` are turned by row ``b % period`` of these.
    Threads along x of a block share a row, those along y take other ones; the grid runs over
    rows and, along y, over parts of a row.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    each, word, load_words, numbers = packed(dtype, wide=wide)
    neighbours = window(width)
    step: Any = max(width, 2) if interleaved else 2 * width  # elements of a row for a thread
    pieces, per_word = step // width, width // each
    pairs, n_words = step // 2, pieces * each
    all_words = rows * n_words

    @cuda.jit(device=True)
    def begin(bases, spread, apart, count, length):
        """Give the first row's offset, the next one's distance, how many there are, and a base."""
        i = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        chunk = i // bases
        base, first = i - chunk * bases, chunk * rows
        offset = (base * spread + first * apart) * length
        return offset, apart * length, min(count - first, np.int64(rows)), base

    @cuda.jit(device=True)
    def fetch_angles(array, offset, kept):
        if pairs % 4 == 0:
            for k in range(pairs // 4):
                values = load4(array, offset + 4 * k)
                for i in range(4):
                    kept[4 * k + i] = values[i]
        else:
            for k in range(pairs):
                kept[k] = array[offset + k]

    @cuda.jit(device=True)
    def copy(x, out, offset, hop, n_rows, stop):
        """Copy what is not turned, up to ``stop`` elements after ``offset``."""
        for row in range(n_rows):
            for k in range(pieces):
                if k * width < stop:
                    at = offset + row * hop + k * width
                    store(out, at, load(x, at))

    @cuda.jit(device=True)
    def turn(x, cos, sin, out, offset, hop, n_rows, far, place, sign):
        """Turn the pairs of some rows; ``far`` is from one piece to the next."""
        words = cuda.local.array(all_words, word)
        kept = cuda.local.array(step, scalar)
        c, s = cuda.local.array(pairs, scalar), cuda.local.array(pairs, scalar)
        # No branch around a load, so that those of all rows are under way together.
        for row in range(rows):
            first = offset + min(row, n_rows - 1) * hop
            for k in range(pieces):
                values = load_words(x, first + k * far)
                for i in range(each):
                    words[row * n_words + k * each + i] = values[i]
        fetch_angles(cos, place, c)
        fetch_angles(sin, place, s)
        for i in range(pairs):
            s[i] *= sign
        for row in range(rows):
            if row < n_rows:
                for k in range(n_words):
                    values = numbers(words[row * n_words + k])
                    for i in range(per_word):
                        kept[k * per_word + i] = values[i]
                for i in range(pairs):
                    p, q = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
                    a, b = kept[p], kept[q]
                    kept[p] = a * c[i] - b * s[i]
                    kept[q] = b * c[i] + a * s[i]
                for k in range(pieces):
                    store(out, offset + row * hop + k * far, neighbours(kept, k * width))

    @bounded(THREADS)
    def rotate(x, cos, sin, out, length, half, bases, spread, apart, count, period, sign):
        offset, hop, n_rows, base = begin(bases, spread, apart, count, length)
        j = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * (
            step if interleaved else width
        )
        if n_rows <= 0 or j >= (length if interleaved else length - half):
            return
        angle = base if base < period else base % period
        if interleaved:
            if j >= 2 * half:
                copy(x, out, offset + j, hop, n_rows, length - j)
            else:
                turn(x, cos, sin, out, offset + j, hop, n_rows, width, angle * half + j // 2, sign)
        elif j >= half:
            copy(x, out, offset + half + j, hop, n_rows, width)
        else:
            turn(x, cos, sin, out, offset + j, hop, n_rows, half, angle * half + j, sign)

    return rotate
