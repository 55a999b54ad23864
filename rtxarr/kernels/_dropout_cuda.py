"""GPU kernel of dropout, with a bias and a residual in the same pass; the mask is never stored."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._philox_cuda import _core
from rtxarr.kernels._rows import window
from rtxarr.kernels._vector import access, packed

# Threads of a block, and pieces of half types that each takes.
THREADS, PIECES = 256, 2

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
    Each thread takes ``width`` elements or a block of words, in half types ``PIECES`` of such, of
    which it reads all before it makes a word. Where the bias is read 16 bytes at a time, the
    threads along x of a block share a row of ``n_features``, those along y have a row each, and
    the grid runs over rows and, along y, over parts of a row: finding the feature by a division
    would take as long as all the rest.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    _, _, load_one, store_one, _ = access(dtype, wide=False)
    neighbours, by_rows = window(width), wide and bias
    each, register, load_packed, numbers = packed(dtype, wide=wide)
    per_register, pieces = width // each, per_thread(dtype, wide, by_rows) // max(4, width)
    step: Any = max(4, width)  # elements of a piece, whole blocks of words
    n_registers = pieces * each
    n_blocks, n_words, zero = step // 4, step + 4, scalar(0)

    @cuda.jit(device=True)
    def begin(n_features):
        """Give the thread's first element, and that one's feature (past the end: none)."""
        if by_rows:
            row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
            feature = (np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) * step
            return row * n_features + feature, feature
        block = np.int64(cuda.blockIdx.x) * pieces
        return (block * cuda.blockDim.x + cuda.threadIdx.x) * step, np.int64(0)

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
    def unpack(words, k, kept):
        for i in range(each):
            values = numbers(words[k * each + i])
            for j in range(per_register):
                kept[i * per_register + j] = values[j]

    @cuda.jit(device=True)
    def whole_pieces(x, added, shifts, out, first, feature, place, n_features, threshold, scale):
        kept, others = cuda.local.array(step, scalar), cuda.local.array(step, scalar)
        of_x = cuda.local.array(n_registers, register)
        of_added = cuda.local.array(n_registers, register)
        stride = cuda.blockDim.x * step
        # All is under way while the words are made, as it lies in memory.
        for k in range(pieces):
            values = load_packed(x, first + k * stride)
            for i in range(each):
                of_x[k * each + i] = values[i]
        if residual:
            for k in range(pieces):
                values = load_packed(added, first + k * stride)
                for i in range(each):
                    of_added[k * each + i] = values[i]
        offset, stream, key = place[0], place[1], place[2]
        for k in range(pieces):
            here = first + k * stride
            unpack(of_x, k, kept)
            if bias:
                shift(kept, shifts, here, feature, n_features)
            drop(kept, here, offset, stream, key, threshold, scale)
            if residual:
                unpack(of_added, k, others)
                for i in range(step):
                    kept[i] += others[i]
            store(out, here, neighbours(kept, 0))

    @cuda.jit(device=True)
    def piece(x, added, shifts, out, first, feature, place, n_features, threshold, scale):
        """Take a piece that the end of the arrays may cut in two."""
        kept, others = cuda.local.array(step, scalar), cuda.local.array(step, scalar)
        whole = wide and first + step <= out.size
        fetch(x, first, whole, kept)
        if residual:
            fetch(added, first, whole, others)
        offset, stream, key = place[0], place[1], place[2]
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

    @cuda.jit(device=True)
    def run(x, added, shifts, out, place, n_features, threshold, scale):
        first, feature = begin(n_features)
        stride = cuda.blockDim.x * step
        if by_rows:
            whole = first < out.size and feature < n_features
        else:  # the same for all threads of the block
            whole = wide and (np.int64(cuda.blockIdx.x) + 1) * pieces * stride <= out.size
        if whole:
            whole_pieces(x, added, shifts, out, first, feature, place, n_features, threshold, scale)
            return
        if by_rows:
            return
        for k in range(pieces):
            at = first + k * stride
            if at < out.size:
                piece(x, added, shifts, out, at, feature, place, n_features, threshold, scale)

    if from_memory:

        @cuda.jit
        def found(x, added, shifts, out, place, n_features, threshold, scale):
            run(x, added, shifts, out, place, n_features, threshold, scale)

    else:

        @cuda.jit
        def found(x, added, shifts, out, offset, stream, key, n_features, threshold, scale):
            place = offset, stream, key
            run(x, added, shifts, out, place, n_features, threshold, scale)

    return found


def per_thread(dtype: np.dtype, wide: bool, by_rows: bool) -> int:
    """Give how many elements a thread takes."""
    width = access(dtype, wide=wide).width
    return max(4, width) * (PIECES if width == 8 and not by_rows else 1)
