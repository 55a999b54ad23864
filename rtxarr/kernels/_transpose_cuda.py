"""GPU kernels that exchange the last two axes of a stack of matrices.

A block of threads takes a square tile: it reads 16 bytes a thread with neighbours along the rows of
the source, and writes them with neighbours along those of the result. In between the tile lies in
shared memory, where rows begin in different banks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import access, by_offset
from rtxarr.kernels.transpose import word

THREADS = 256


def side(n_bytes: int) -> int:
    """Return the items along each side of a tile, by the bytes of an item."""
    return 32 if n_bytes == 16 else 64


@functools.cache
def swap(n_bytes: int, wide_in: bool, wide_out: bool) -> Any:
    """Return the kernel for items of so many bytes.

    ``x`` is flat, of shape (n_stacked, a, b), and ``out`` of (n_stacked, b, a), both in words.
    ``wide_in`` says that rows of ``x`` begin at multiples of 16 bytes, ``wide_out`` those of
    ``out``. There is a block for each tile.
    """
    kind, n = word(n_bytes), side(n_bytes)
    words = 2 if n_bytes == 16 else 1
    per_load, per_store = (16 // n_bytes if wide else 1 for wide in (wide_in, wide_out))
    load = _accesses(kind, per_load * words)[0]
    store = _accesses(kind, per_store * words)[1]
    take = _taken(per_store, words)
    lanes_in, lanes_out = n // per_load, n // per_store
    rows_in, rows_out = THREADS // lanes_in, THREADS // lanes_out
    loads, stores = n // rows_in, n // rows_out
    held_by_load = per_load * words
    n_held = loads * held_by_load
    tile_shape = (n, (n + 1) * words)

    @bounded(THREADS)
    def kernel(x, out, a, b):
        tile = cuda.shared.array(tile_shape, kind)
        held = cuda.local.array(n_held, kind)
        thread, block = cuda.threadIdx.x, np.int64(cuda.blockIdx.x)
        tiles_a, tiles_b = (a + n - 1) // n, (b + n - 1) // n
        rest, first_a = block // tiles_a, block % tiles_a * n
        first = rest // tiles_b * a * b
        first_b = rest % tiles_b * n
        i, j = thread // lanes_in, thread % lanes_in * per_load
        for k in range(loads):
            row, column = first_a + i + k * rows_in, first_b + j
            if row < a and column < b:
                values = load(x, (first + row * b + column) * words)
                for w in range(held_by_load):
                    held[k * held_by_load + w] = values[w]
        for k in range(loads):
            for w in range(held_by_load):
                tile[i + k * rows_in, j * words + w] = held[k * held_by_load + w]
        cuda.syncthreads()  # the tile is in place
        i, j = thread % lanes_out * per_store, thread // lanes_out
        for k in range(stores):
            row, column = first_b + j + k * rows_out, first_a + i
            if row < b and column < a:
                values = take(tile, i, j + k * rows_out)
                store(out, (first + row * a + column) * words, values)

    return kernel


def _accesses(kind: type, n_words: int) -> Any:
    if n_words == 1:
        one = access(np.dtype(kind), wide=False)
        return one.load, one.store
    return by_offset(np.dtype(kind), n_words)


def _taken(n_items: int, words: int) -> Any:
    """Return what takes neighbours along the columns of a tile."""
    if words == 2:

        def take(tile, i, j):
            return tile[i, 2 * j], tile[i, 2 * j + 1]

    elif n_items == 4:

        def take(tile, i, j):
            return tile[i, j], tile[i + 1, j], tile[i + 2, j], tile[i + 3, j]

    elif n_items == 2:

        def take(tile, i, j):
            return tile[i, j], tile[i + 1, j]

    else:

        def take(tile, i, j):
            return (tile[i, j],)

    return cuda.jit(device=True)(take)
