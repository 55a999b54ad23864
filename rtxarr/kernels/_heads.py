"""Heads of nodes inside kernels over edges: how they are dealt out to threads, loaded and stored.

An *item* is a node with its edges, or some of the edges of a node that has many: one of the first
level that ``rtxarr.geom._bins`` makes. The threads along x of a block share one head of an item,
those along y are heads and those along z are items. A thread holds ``chunks`` pieces of ``width``
neighbouring features; piece ``k`` begins at feature ``(k * lanes + threadIdx.x) * width``. Numbers
of heads and features are constants of a kernel.

Only kernel files import this module: it imports numba.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _core
from rtxarr.kernels._rows import add, group_reduce, window
from rtxarr.kernels._vector import access

_THREADS = 128
_MOST_ITEMS = 64  # of a block: the hardware's limit along z
_MOST_KEPT = 16  # registers of 4 bytes for the features of one head that a thread may hold


class Plan(NamedTuple):
    """How heads are dealt out.

    Attributes
    ----------
    n_heads, n_features : int
        Of a node, and of one head.
    width, chunks : int
        Features in a piece, and pieces that a thread holds.
    lanes, heads, items : int
        Threads that share a head, a power of two up to 32; heads and items of a block.
    """

    n_heads: int
    n_features: int
    width: int
    chunks: int
    lanes: int
    heads: int
    items: int

    @property
    def kept(self) -> int:
        """Features that a thread holds."""
        return self.width * self.chunks

    @property
    def block(self) -> tuple[int, int, int]:
        return self.lanes, self.heads, self.items

    @property
    def threads(self) -> int:
        return self.lanes * self.heads * self.items

    def grid(self, n_items: int) -> tuple[int, int]:
        return -(-n_items // self.items), -(-self.n_heads // self.heads)

    def unroll(self, rows: int, dtype: Any) -> int:
        """Give the edges to take at a time where each has ``rows`` heads to load."""
        most = 1 if dtype == np.float64 else 4
        return max(1, min(most, 32 // (rows * self.kept)))


@functools.cache
def plan_heads(dtype: Any, n_heads: int, n_features: int, *, wide: bool) -> Plan | None:
    """Deal heads out; None where one has more features than the threads of a warp can hold.

    ``wide``: all heads begin at multiples of 16 bytes.
    """
    width, scalar, *_ = access(dtype, wide=wide)
    n_pieces = max(1, -(-n_features // width))
    lanes = min(32, 1 << (n_pieces - 1).bit_length())
    chunks = -(-n_pieces // lanes)
    if chunks * width * np.dtype(scalar).itemsize > 4 * _MOST_KEPT:
        return None
    return _plan(n_heads, n_features, width, chunks, lanes)


def share_edges(n_heads: int, lanes: int) -> Plan:
    """Deal heads out to so many threads each, which share the edges of an item."""
    return _plan(n_heads, 1, 1, 1, lanes)


def _plan(n_heads, n_features, width, chunks, lanes):
    if _SIMULATING:  # its barriers are for whole blocks
        return Plan(n_heads, n_features, width, chunks, lanes, 1, 1)
    heads = max(1, min(n_heads, _THREADS // lanes))
    items = min(_MOST_ITEMS, _THREADS // (lanes * heads))
    return Plan(n_heads, n_features, width, chunks, lanes, heads, items)


class Heads(NamedTuple):
    """Device functions over the part of a head that a thread holds.

    Attributes
    ----------
    begin : device function
        ``begin()`` gives this thread's first item and its head; the head may be none.
    fetch : device function
        ``fetch(array, first, kept, at)`` reads the head whose features begin at element ``first``
        into ``kept[at:at + plan.kept]``, with zeros for features there are not.
    put : device function
        ``put(array, first, kept)`` writes it.
    put_sums : device function
        The same into an array of the type that sums are kept in.
    total : device function
        ``total(value)`` adds up a number of each thread of the head: :func:`combine`.
    """

    begin: Any
    fetch: Any
    put: Any
    put_sums: Any
    total: Any


@functools.cache
def heads_of(dtype: np.dtype, plan: Plan) -> Heads:
    """Return how the threads of ``plan`` read and write heads of ``dtype``."""
    width, scalar, load, store, store_sums = access(dtype, wide=plan.width > 1)
    chunks, lanes, heads, items = plan.chunks, plan.lanes, plan.heads, plan.items
    n_features, exact = plan.n_features, plan.n_features == plan.kept * plan.lanes
    neighbours, zero = window(width), scalar(0)

    @cuda.jit(device=True)
    def begin():
        item = np.int64(cuda.blockIdx.x) * items + cuda.threadIdx.z
        return item, np.int64(cuda.blockIdx.y) * heads + cuda.threadIdx.y

    @cuda.jit(device=True)
    def fetch(array, first, kept, at):
        for k in range(chunks):
            j = (k * lanes + cuda.threadIdx.x) * width
            inside = exact or j < n_features
            # No branch around a load, so that those of several edges are under way together.
            values = load(array, first + (j if inside else 0))
            for i in range(width):
                kept[at + k * width + i] = values[i] if inside else zero

    @cuda.jit(device=True)
    def put(array, first, kept):
        for k in range(chunks):
            j = (k * lanes + cuda.threadIdx.x) * width
            if exact or j < n_features:
                store(array, first + j, neighbours(kept, k * width))

    @cuda.jit(device=True)
    def put_sums(array, first, kept):
        for k in range(chunks):
            j = (k * lanes + cuda.threadIdx.x) * width
            if exact or j < n_features:
                store_sums(array, first + j, neighbours(kept, k * width))

    return Heads(begin, fetch, put, put_sums, combine(add, scalar, plan))


@functools.cache
def combine(operation: Any, scalar: type, plan: Plan):
    """Return the device function that combines a number of each thread of a head.

    All threads of the head call it, and all get the same bits.
    """
    lanes, heads = plan.lanes, plan.heads
    if lanes == 1:
        return cuda.jit(device=True)(lambda value: value)
    if _SIMULATING:
        reduce = group_reduce(operation, scalar, lanes, 1)
        return lambda value: reduce(value, 0)
    half, all_of_head = lanes >> 1, (1 << lanes) - 1

    @cuda.jit(device=True)
    def combined(value):
        # The heads of a warp have edges of their own: only the threads of this one take part.
        thread = (cuda.threadIdx.z * heads + cuda.threadIdx.y) * lanes + cuda.threadIdx.x
        members = all_of_head if lanes == 32 else all_of_head << (thread & (32 - lanes))
        mask = half
        while mask > 0:
            value = operation(value, cuda.shfl_xor_sync(members, value, mask))
            mask >>= 1
        return value

    return combined


@functools.cache
def leaky(scalar: Any):
    """Return the device function ``slope_at(x, slope)`` of the leaky ReLU."""
    one, zero = scalar(1), scalar(0)

    @cuda.jit(device=True)
    def slope_at(x, slope):
        return one if x > zero else slope

    return slope_at


@functools.cache
def keeps():
    """Return the device function that tells whether dropout keeps a number of an edge.

    ``keep(i, offset, stream, key, threshold)`` looks at word ``offset + i`` of the stream, as
    :func:`rtxarr.kernels.dropout.dropout_add` does for element ``i``. Kernels get the place in the
    stream as three numbers and an array of three, to be added up: eager and captured steps then
    run the same machine code, and so give the same bits.
    """
    philox = _core.philox

    @cuda.jit(device=True)
    def keep(i, offset, stream, key, threshold):
        word = offset + np.uint64(i)
        w0, w1, w2, w3 = philox(word >> np.uint64(2), stream, key)
        lead = word & np.uint64(3)
        low = w0 if lead == np.uint64(0) else w1
        high = w2 if lead == np.uint64(2) else w3
        return (low if lead < np.uint64(2) else high) < threshold

    return keep
