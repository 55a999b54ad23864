"""GPU kernel of dropout, with a bias and a residual in the same pass; the mask is never stored."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._philox_cuda import _core
from rtxarr.kernels._rows import window
from rtxarr.kernels._vector import access

_U64, _philox = np.uint64, _core.philox


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
    Each thread takes :func:`per_thread` elements.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    _, _, load_one, store_one, _ = access(dtype, wide=False)
    neighbours = window(width)
    step: Any = max(4, width)  # elements of a thread, whole blocks of words
    n_blocks, n_words, zero = step // 4, step + 4, scalar(0)

    @cuda.jit(device=True)
    def word(words, k, lead):
        """Give word ``lead + k``; a select, as registers have no index."""
        if lead < 2:
            return words[k] if lead == 0 else words[k + 1]
        return words[k + 2] if lead == 2 else words[k + 3]

    @cuda.jit(device=True)
    def run(x, added, shifts, out, offset, stream, key, n_features, threshold, scale):
        words = cuda.local.array(n_words, np.uint32)
        kept = cuda.local.array(step, scalar)
        first = (np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * step
        if first >= out.size:
            return
        whole = wide and first + step <= out.size
        if whole:
            values = load(x, first)
            for k in range(step):
                kept[k] = values[k if wide else 0]
        else:
            for k in range(step):
                kept[k] = load_one(x, min(first + k, out.size - 1))[0]
        block, lead = (offset + _U64(first)) >> _U64(2), offset & _U64(3)
        for b in range(n_blocks):
            _draw(block + _U64(b), stream, key, words, 4 * b)
        if lead != _U64(0):  # the same for all threads
            _draw(block + _U64(n_blocks), stream, key, words, step)
        if bias:
            feature = first % n_features
            if whole:
                values = load(shifts, feature)
                for k in range(step):
                    kept[k] += values[k if wide else 0]
            else:
                for k in range(step):
                    kept[k] += load_one(shifts, (feature + k) % n_features)[0]
        for k in range(step):
            keep = _U64(word(words, k, lead)) < threshold
            kept[k] = kept[k] * scale if keep else zero
        if residual:
            if whole:
                values = load(added, first)
                for k in range(step):
                    kept[k] += values[k if wide else 0]
            else:
                for k in range(step):
                    kept[k] += load_one(added, min(first + k, out.size - 1))[0]
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
