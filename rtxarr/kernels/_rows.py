"""Rows of an array inside kernels: how they are dealt out to threads, loaded, stored and reduced.

The threads along x of a block share a row and those along y are groups with a row each. A thread
holds ``chunks`` pieces of ``width`` neighbouring elements; piece ``k`` of a tile begins at element
``(k * lanes + threadIdx.x) * width``, so neighbouring threads touch neighbouring memory. A row
that fits into one tile is *resident*: it is read once and stays in registers. ``_plan`` deals rows
out.

Only kernel files import this module: it imports numba.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._plan import Plan
from rtxarr.kernels._vector import access, packed


def bounded(threads: int, blocks: int = 1) -> Any:
    """Give the decorator of a kernel whose blocks never have more threads than this.

    It may then use more registers; without it the compiler does not know. Of these it takes no
    more than leave room for so many blocks on a multiprocessor.
    """
    return cuda.jit if _SIMULATING else cuda.jit(launch_bounds=(threads, blocks))


# ------------------------------------------------------------------------------- reductions


@cuda.jit(device=True)
def add(a, b):
    return a + b


@functools.cache
def group_reduce(operation: Any, scalar: type, lanes: int, groups: int, slots: int = 1):
    """Return the device function that combines one value of each thread of a row.

    ``reduce(value, slot)``: all threads of the block call it, and all of a row get the same bits,
    on every run. Between two calls with the same ``slot`` (of ``slots``) there must be one with
    another, or another barrier.
    """
    return _group_reduce(operation, scalar, lanes, groups, slots, False)


@functools.cache
def group_sums(scalar: type, lanes: int, groups: int, slots: int = 1):
    """Return the device function ``sums(a, b, slot)`` that adds up two values at once."""
    return _group_reduce(add, scalar, lanes, groups, slots, True)


def _group_reduce(operation, scalar, lanes, groups, slots, pair):
    values = 2 if pair else 1
    if _SIMULATING:  # which has no shuffles
        shape = (values, groups, lanes)

        @cuda.jit(device=True)
        def through_memory(a, b):
            shared = cuda.shared.array(shape, scalar)
            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            shared[0, y, x] = a
            if pair:
                shared[1, y, x] = b
            cuda.syncthreads()  # all values are in place
            totals = list(shared[:, y, 0])
            for i in range(1, lanes):
                for k in range(values):
                    totals[k] = operation(totals[k], shared[k, y, i])
            cuda.syncthreads()  # all have read them
            return tuple(totals)

        if pair:
            return lambda a, b, slot: through_memory(a, b)
        return lambda a, slot: through_memory(a, a)[0]

    @cuda.jit(device=True)
    def within(value, n):
        """Combine groups of ``n`` neighbouring threads of a warp."""
        mask = n >> 1
        while mask > 0:
            value = operation(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, mask))
            mask >>= 1
        return value

    warps = max(1, lanes // 32)
    shape = (slots, values, warps * groups)

    if lanes <= 32 and pair:

        @cuda.jit(device=True)
        def reduce(a, b, slot):
            return within(a, lanes), within(b, lanes)

    elif lanes <= 32:

        @cuda.jit(device=True)
        def reduce(value, slot):
            return within(value, lanes)

    elif pair:

        @cuda.jit(device=True)
        def reduce(a, b, slot):
            shared = cuda.shared.array(shape, scalar)
            x, first = cuda.threadIdx.x, cuda.threadIdx.y * warps
            a, b = within(a, 32), within(b, 32)
            if x % 32 == 0:
                shared[slot, 0, first + x // 32] = a
                shared[slot, 1, first + x // 32] = b
            cuda.syncthreads()  # the values of all warps are in place
            a, b = shared[slot, 0, first + x % warps], shared[slot, 1, first + x % warps]
            return within(a, warps), within(b, warps)

    else:

        @cuda.jit(device=True)
        def reduce(value, slot):
            shared = cuda.shared.array(shape, scalar)
            x, first = cuda.threadIdx.x, cuda.threadIdx.y * warps
            value = within(value, 32)
            if x % 32 == 0:
                shared[slot, 0, first + x // 32] = value
            cuda.syncthreads()  # the values of all warps are in place
            return within(shared[slot, 0, first + x % warps], warps)

    return reduce


# ------------------------------------------------------------------------- loads and stores


@functools.cache
def window(width: int):
    """Return the device function that gives ``width`` neighbours of an array as a tuple."""
    if width == 1:

        @cuda.jit(device=True)
        def neighbours(a, i):
            return (a[i],)

    elif width == 4:

        @cuda.jit(device=True)
        def neighbours(a, i):
            return (a[i], a[i + 1], a[i + 2], a[i + 3])

    else:

        @cuda.jit(device=True)
        def neighbours(a, i):
            return (
                a[i],
                a[i + 1],
                a[i + 2],
                a[i + 3],
                a[i + 4],
                a[i + 5],
                a[i + 6],
                a[i + 7],
            )

    return neighbours


class Rows(NamedTuple):
    """Device functions over the part of a row that a thread holds, an array of ``plan.kept``.

    Attributes
    ----------
    begin : device function
        ``begin(n_rows)`` gives this thread's row, and whether there is one.
    tiles : device function
        ``tiles(first, n)`` gives how many tiles the row of ``n`` elements at ``first`` takes.
    place : device function
        ``place(first, tile, k)`` gives where piece ``k`` of a tile begins in the row.
    fetch : device function
        ``fetch(array, first, tile, n, fill, kept)`` reads a tile of that row; beyond the row it
        gives ``fill``.
    put : device function
        ``put(array, first, tile, n, kept)`` writes a tile.
    """

    begin: Any
    tiles: Any
    place: Any
    fetch: Any
    put: Any


@functools.cache
def rows_of(dtype: np.dtype, plan: Plan) -> Rows:
    """Return how the threads of ``plan`` read and write rows of ``dtype``.

    Pieces begin at multiples of 16 bytes also where rows do not: then the first begins before
    the row, at a negative place.
    """
    width, _, load, store, _ = access(dtype, wide=plan.width > 1)
    _, _, load_one, store_one, _ = access(dtype, wide=False)
    chunks, lanes, groups = plan.chunks, plan.lanes, plan.groups
    tile_size, loose, exact = plan.tile, plan.loose, plan.exact
    neighbours = window(width)

    @cuda.jit(device=True)
    def begin(n_rows):
        row = np.int64(cuda.blockIdx.x) * groups + cuda.threadIdx.y
        return row, row < n_rows

    @cuda.jit(device=True)
    def before(first):
        """Give how many elements lie between a multiple of 16 bytes and the row."""
        return first % width if loose else 0

    @cuda.jit(device=True)
    def tiles(first, n):
        return (before(first) + n + tile_size - 1) // tile_size

    @cuda.jit(device=True)
    def place(first, tile, k):
        j = np.int64(((tile * chunks + k) * lanes + cuda.threadIdx.x) * width)
        return j - before(first) if loose else j

    @cuda.jit(device=True)
    def inner(first, tile, n):
        """Tell whether all of a tile lies in the row: the same for all threads of the row."""
        if exact:
            return True
        if loose:
            lead = before(first)
            return (tile > 0 or lead == 0) and (tile + 1) * tile_size - lead <= n
        return (tile + 1) * tile_size <= n

    # No branch around a load, so that those of all pieces are under way together.

    @cuda.jit(device=True)
    def fetch_whole(array, first, tile, kept):
        for k in range(chunks):
            values = load(array, first + place(first, tile, k))
            for i in range(width):
                kept[k * width + i] = values[i]

    @cuda.jit(device=True)
    def fetch(array, first, tile, n, fill, kept):
        if inner(first, tile, n):
            fetch_whole(array, first, tile, kept)
            return
        for k in range(chunks):
            j = place(first, tile, k)
            inside = j < n
            values = load(array, first + (j if inside else 0))
            for i in range(width):
                kept[k * width + i] = values[i] if inside else fill

    @cuda.jit(device=True)
    def fetch_loose(array, first, tile, n, fill, kept):
        if inner(first, tile, n):
            fetch_whole(array, first, tile, kept)
            return
        for k in range(chunks):
            j = place(first, tile, k)
            # What lies in the array but not in the row may be read.
            whole = j < n and first + j + width <= array.size
            values = load(array, first + j if whole else 0)
            for i in range(width):
                inside = whole and j + i >= 0 and j + i < n
                kept[k * width + i] = values[i] if inside else fill
        if array.size - first - n < width:  # the end of the array may cut a piece in two
            for k in range(chunks):
                j = place(first, tile, k)
                if j < n and first + j + width > array.size:
                    for i in range(width):
                        if j + i >= 0 and j + i < n:
                            kept[k * width + i] = load_one(array, first + j + i)[0]

    @cuda.jit(device=True)
    def put_whole(array, first, tile, kept):
        for k in range(chunks):
            store(array, first + place(first, tile, k), neighbours(kept, k * width))

    @cuda.jit(device=True)
    def put(array, first, tile, n, kept):
        if inner(first, tile, n):
            put_whole(array, first, tile, kept)
            return
        for k in range(chunks):
            j = place(first, tile, k)
            if j < n:
                store(array, first + j, neighbours(kept, k * width))

    @cuda.jit(device=True)
    def put_loose(array, first, tile, n, kept):
        if inner(first, tile, n):
            put_whole(array, first, tile, kept)
            return
        for k in range(chunks):
            j = place(first, tile, k)
            if j >= 0 and j + width <= n:
                store(array, first + j, neighbours(kept, k * width))
            else:
                for i in range(width):
                    if j + i >= 0 and j + i < n:
                        store_one(array, first + j + i, (kept[k * width + i],))

    if loose:
        return Rows(begin, tiles, place, fetch_loose, put_loose)
    return Rows(begin, tiles, place, fetch, put)


class PackedRows(NamedTuple):
    """Device functions over a resident row of a thread as it lies in memory, ``n_words`` registers.

    Attributes
    ----------
    n_words, word : int, type
        Registers that a thread's part of a row takes, and their NumPy type.
    fetch : device function
        ``fetch(array, first, n, words)`` reads it; beyond the row it gives zeros.
    unpack : device function
        ``unpack(words, kept)`` gives the numbers, ``plan.kept`` of them.
    """

    n_words: int
    word: type
    fetch: Any
    unpack: Any


@functools.cache
def packed_rows_of(dtype: np.dtype, plan: Plan) -> PackedRows:
    """Return how the threads of ``plan``, whose rows are resident, keep rows of ``dtype``."""
    each, word, load, numbers = packed(dtype, wide=plan.width > 1)
    chunks, lanes, exact, width = plan.chunks, plan.lanes, plan.exact, plan.width
    n_words, per_word, nothing = chunks * each, width // each, word(0)

    @cuda.jit(device=True)
    def fetch(array, first, n, words):
        # No branch around a load, so that those of all pieces are under way together.
        for k in range(chunks):
            j = np.int64((k * lanes + cuda.threadIdx.x) * width)
            inside = exact or j < n
            values = load(array, first + (j if inside else 0))
            for i in range(each):
                words[k * each + i] = values[i] if inside else nothing

    @cuda.jit(device=True)
    def unpack(words, kept):
        for k in range(n_words):
            values = numbers(words[k])
            for i in range(per_word):
                kept[k * per_word + i] = values[i]

    return PackedRows(n_words, word, fetch, unpack)
