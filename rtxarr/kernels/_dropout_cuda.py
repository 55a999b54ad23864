"""GPU kernel of dropout, with a bias and a residual in the same pass; the mask is never stored."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._philox_cuda import _core
from rtxarr.kernels._rows import window
from rtxarr.kernels._vector import access

# Threads of a block.
THREADS = 256

_U32, _U64, _philox = np.uint32, np.uint64, _core.philox


@cuda.jit(device=True)
def _draw(block, stream, key, words, at):
    """Write the four words of a counter to ``words[at:at + 4]``."""
    w0, w1, w2, w3 = _philox(block, stream, key)
    words[at], words[at + 1], words[at + 2], words[at + 3] = w0, w1, w2, w3


@functools.cache
def kernel(dtype: np.dtype, wide: bool, residual: bool, bias: bool, from_memory: bool):
    """Return the kernel; flat C-contiguous arrays, of which it takes any for what is left out.

    Element ``i`` is kept where word ``offset + i`` of the stream is below ``threshold``. The place
    in the stream is ``(offset, stream, key)``, three numbers or, ``from_memory``, in an array.
    Each thread takes :func:`per_thread` elements. Where the bias is read 16 bytes at a time, the
    threads along x of a block share a row of ``n_features``, those along y have a row each, and
    the grid runs over rows and, along y, over parts of a row: finding the feature by a division
    would take as long as all the rest.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    _, _, load_one, store_one, _ = access(dtype, wide=False)
    neighbours, by_rows = window(width), wide and bias
    step: Any = max(4, width)  # elements of a thread, whole blocks of words
    n_blocks, n_words, zero = step // 4, step + 4, scalar(0)

    @cuda.jit(device=True)
    def begin(n_features):
        """Give the thread's first element, and that one's feature (past the end: none)."""
        if by_rows:
            row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
            feature = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * step
            return row * n_features + feature, feature
        first = (np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * step
        return first, np.int64(0)

    @cuda.jit(device=True)
    def fetch(array, first, whole, kept):
        if whole:
            values = load(array, first)
            for k in range(step):
                kept[k] = values[k if wide else 0]
        else:
            for k in range(step):
                kept[k] = load_one(array, min(first + k, array.size - 1))[0]

    @cuda.jit(device=True)
    def shift(kept, shifts, first, feature, n_features):
        if by_rows:
            values = load(shifts, feature)
            for k in range(step):
                kept[k] += values[k if wide else 0]
        else:
            feature = first % n_features
            for k in range(step):
                kept[k] += load_one(shifts, feature)[0]
                feature = feature + 1 if feature + 1 < n_features else 0

    @cuda.jit(device=True)
    def word(words, k, lead):
        """Give word ``lead + k``; a select, as registers have no index."""
        if lead < 2:
            return words[k] if lead == 0 else words[k + 1]
        return words[k + 2] if lead == 2 else words[k + 3]

    @cuda.jit(device=True)
    def drop(kept, first, offset, stream, key, threshold, scale):
        words = cuda.local.array(n_words, np.uint32)
        block, lead = (offset + _U64(first)) >> _U64(2), offset & _U64(3)
        # In 32 bits, where a comparison is one instruction; all words are below 2**32.
        limit, everything = _U32(threshold & _U64(0xFFFFFFFF)), threshold >> _U64(32) != _U64(0)
        for b in range(n_blocks):
            _draw(block + _U64(b), stream, key, words, 4 * b)
        if lead == _U64(0):  # the same for all threads
            for k in range(step):
                keep = (words[k] < limit) | everything
                kept[k] = kept[k] * scale if keep else zero
        else:
            _draw(block + _U64(n_blocks), stream, key, words, step)
            for k in range(step):
                keep = (word(words, k, lead) < limit) | everything
                kept[k] = kept[k] * scale if keep else zero

    @cuda.jit(device=True)
    def run(x, added, shifts, out, offset, stream, key, n_features, threshold, scale):
        kept, others = cuda.local.array(step, scalar), cuda.local.array(step, scalar)
        first, feature = begin(n_features)
        if first >= out.size or (by_rows and feature >= n_features):
            return
        whole = wide and (by_rows or first + step <= out.size)
        fetch(x, first, whole, kept)
        if residual:  # under way while the words are made
            fetch(added, first, whole, others)
        if bias:
            shift(kept, shifts, first, feature, n_features)
        drop(kept, first, offset, stream, key, threshold, scale)
        if residual:
            for k in range(step):
                kept[k] += others[k]
        if whole:
            store(out, first, neighbours(kept, 0))
        else:
            for k in range(step):
                if first + k < out.size:
                    store_one(out, first + k, (kept[k],))

    if from_memory:

        @cuda.jit
        def found(x, added, shifts, out, place, n_features, threshold, scale):
            offset, stream, key = place[0], place[1], place[2]
            run(x, added, shifts, out, offset, stream, key, n_features, threshold, scale)

    else:

        @cuda.jit
        def found(x, added, shifts, out, offset, stream, key, n_features, threshold, scale):
            run(x, added, shifts, out, offset, stream, key, n_features, threshold, scale)

    return found


def per_thread(dtype: np.dtype, wide: bool) -> int:
    """Give how many elements a thread takes."""
    return max(4, access(dtype, wide=wide).width)
