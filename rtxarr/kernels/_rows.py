"""Rows of an array inside kernels: how they are dealt out to threads, loaded, stored and reduced.

The threads along x of a block share a row and those along y are groups with a row each. A thread
holds ``chunks`` pieces of ``width`` neighbouring elements; piece ``k`` of a tile begins at element
``(k * lanes + threadIdx.x) * width``, so neighbouring threads touch neighbouring memory. A row
that fits into one tile is *resident*: it is read once and stays in registers.

Only kernel files import this module: it imports numba.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._vector import access

_MOST_LANES = 512


class Plan(NamedTuple):
    """How rows of one length are dealt out.

    Attributes
    ----------
    wide : bool
        Whether a thread moves 16 bytes at once.
    width, chunks : int
        Elements in a piece, and pieces that a thread holds.
    lanes, groups : int
        Threads that share a row, a power of two, and rows in a block.
    resident : bool
        Whether a whole row fits into the registers of its threads.
    """

    wide: bool
    width: int
    chunks: int
    lanes: int
    groups: int
    resident: bool

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    @property
    def kept(self) -> int:
        """Elements that a thread holds."""
        return self.width * self.chunks

    @property
    def tile(self) -> int:
        """Elements that the threads of a row hold together."""
        return self.kept * self.lanes

    @property
    def block(self) -> tuple[int, int]:
        return self.lanes, self.groups

    def blocks(self, n_rows: int) -> int:
        return -(-n_rows // self.groups)


def plan_rows(
    n: int,
    dtype: Any,
    *,
    wide: bool,
    pieces: int = 4,
    most: int = 32,
    threads: int = 128,
    lanes: int = 512,
) -> Plan:
    """Deal rows of ``n`` elements out.

    Parameters
    ----------
    n : int
    dtype : dtype
    wide : bool
        Whether all rows begin at multiples of 16 bytes.
    pieces : int
        Pieces of 16 bytes to give to a thread before a second warp shares the row: the more, the
        more loads are under way.
    most : int
        Registers of 4 bytes for elements that a thread may hold.
    threads : int
        Of a block, where a row takes no more.
    lanes : int
        The most threads of a row: with fewer, each has more registers.
    """
    width, scalar, *_ = access(dtype, wide=wide)
    most //= np.dtype(scalar).itemsize // 4
    pieces = pieces if width > 1 else 2 * pieces
    n_pieces = max(1, -(-n // width))
    most_lanes = min(lanes, _MOST_LANES)
    lanes = min(32, most_lanes, _power_of_two(n_pieces))
    if n_pieces > lanes * pieces:
        lanes = min(most_lanes, _power_of_two(-(-n_pieces // pieces)))
    chunks = -(-n_pieces // lanes)
    resident = chunks * width <= most
    if not resident:
        chunks = min(most // width, pieces)
    threads = min(threads, 32) if _SIMULATING else threads
    return Plan(width > 1, width, chunks, lanes, max(1, threads // lanes), resident)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def bounded(threads: int) -> Any:
    """Give the decorator of a kernel whose blocks never have more threads than this.

    It may then use more registers; without it the compiler does not know.
    """
    return cuda.jit if _SIMULATING else cuda.jit(launch_bounds=threads)


# ------------------------------------------------------------------------------- reductions


@cuda.jit(device=True)
def add(a, b):
    return a + b


@cuda.jit(device=True)
def larger(a, b):
    return a if a > b else b


@functools.cache
def group_reduce(operation: Any, scalar: type, lanes: int, groups: int):
    """Return the device function that combines one value of each thread of a row.

    All threads of the block call it, and all of a row get the same bits, on every run.
    """
    if _SIMULATING:  # which has no shuffles
        shape = (groups, lanes)

        @cuda.jit(device=True)
        def through_memory(value):
            shared = cuda.shared.array(shape, scalar)
            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            shared[y, x] = value
            cuda.syncthreads()  # all values are in place
            total = shared[y, 0]
            for i in range(1, lanes):
                total = operation(total, shared[y, i])
            cuda.syncthreads()  # all have read them
            return total

        return through_memory

    @cuda.jit(device=True)
    def within(value, n):
        """Combine groups of ``n`` neighbouring threads of a warp."""
        mask = n >> 1
        while mask > 0:
            value = operation(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, mask))
            mask >>= 1
        return value

    if lanes <= 32:

        @cuda.jit(device=True)
        def in_warp(value):
            return within(value, lanes)

        return in_warp

    warps = lanes // 32
    n_shared = warps * groups

    @cuda.jit(device=True)
    def across_warps(value):
        shared = cuda.shared.array(n_shared, scalar)
        x, first = cuda.threadIdx.x, cuda.threadIdx.y * warps
        value = within(value, 32)
        if x % 32 == 0:
            shared[first + x // 32] = value
        cuda.syncthreads()  # the values of all warps are in place
        value = shared[first + x % warps]
        cuda.syncthreads()  # all have read them
        return within(value, warps)

    return across_warps


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
    place : device function
        ``place(tile, k)`` gives where piece ``k`` of a tile begins in the row.
    fetch : device function
        ``fetch(array, first, tile, n, fill, kept)`` reads a tile of the row of ``n`` elements that
        begins at ``first``; beyond the row it gives ``fill``.
    put : device function
        ``put(array, first, tile, n, kept)`` writes a tile.
    """

    begin: Any
    place: Any
    fetch: Any
    put: Any


@functools.cache
def rows_of(dtype: np.dtype, plan: Plan) -> Rows:
    """Return how the threads of ``plan`` read and write rows of ``dtype``."""
    width, _, load, store, _ = access(dtype, wide=plan.wide)
    chunks, lanes, groups = plan.chunks, plan.lanes, plan.groups
    neighbours = window(width)

    @cuda.jit(device=True)
    def begin(n_rows):
        row = np.int64(cuda.blockIdx.x) * groups + cuda.threadIdx.y
        return row, row < n_rows

    @cuda.jit(device=True)
    def place(tile, k):
        return np.int64(((tile * chunks + k) * lanes + cuda.threadIdx.x) * width)

    @cuda.jit(device=True)
    def fetch(array, first, tile, n, fill, kept):
        for k in range(chunks):
            j = place(tile, k)
            inside = j < n
            # No branch around the load, so that those of all pieces are under way together.
            values = load(array, first + (j if inside else 0))
            for i in range(width):
                kept[k * width + i] = values[i] if inside else fill

    @cuda.jit(device=True)
    def put(array, first, tile, n, kept):
        for k in range(chunks):
            j = place(tile, k)
            if j < n:
                store(array, first + j, neighbours(kept, k * width))

    return Rows(begin, place, fetch, put)
