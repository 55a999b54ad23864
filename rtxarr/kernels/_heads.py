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
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda, intrinsic, types
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._philox_cuda import _core
from rtxarr.kernels._rows import add, group_reduce, window
from rtxarr.kernels._vector import access, by_address, packed

_THREADS = 128
_WARP = 32
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
    unit = _WARP // math.gcd(_WARP, lanes * heads)  # items of whole warps
    items = min(_MOST_ITEMS, _THREADS // (lanes * heads)) // unit * unit
    if not items:
        heads = 1 << (heads - 1).bit_length()
        items = _THREADS // (lanes * heads)
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
    total_together : device function
        The same, called by all threads of the warp at once.
    """

    begin: Any
    fetch: Any
    put: Any
    put_sums: Any
    total: Any
    total_together: Any


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

    totals = (combine(add, scalar, plan, together=together) for together in (False, True))
    return Heads(begin, fetch, put, put_sums, *totals)


@functools.cache
def combine(operation: Any, scalar: type, plan: Plan, *, together: bool = False):
    """Return the device function that combines a number of each thread of a head.

    All threads of the head call it, and all get the same bits. ``together``: so do all threads of
    the warp that have not ended, which takes a third of the instructions.
    """
    lanes, heads = plan.lanes, plan.heads
    if lanes == 1:
        return cuda.jit(device=True)(lambda value: value)
    if _SIMULATING:
        reduce = group_reduce(operation, scalar, lanes, 1)
        return lambda value: reduce(value, 0)
    half, all_of_head, every_thread = lanes >> 1, (1 << lanes) - 1, 0xFFFFFFFF
    together = together or lanes == _WARP

    @cuda.jit(device=True)
    def combined(value):
        # The heads of a warp have edges of their own: only the threads of this one take part.
        members = every_thread
        if not together:
            thread = (cuda.threadIdx.z * heads + cuda.threadIdx.y) * lanes + cuda.threadIdx.x
            members = all_of_head << (thread & (32 - lanes))
        mask = half
        while mask > 0:
            value = operation(value, cuda.shfl_xor_sync(members, value, mask))
            mask >>= 1
        return value

    return combined


# ------------------------------------------------------- what the nodes at the ends of edges have

if _SIMULATING:

    def place_of(array, offset):
        return offset

    def element(array, place, offset):
        return array[place + offset]

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    from rtxarr.kernels._vector import _address_of as place_of

    @intrinsic  # type: ignore[misc]
    def element(typingctx, array, place, offset):
        """Give an element of ``array`` by how many lie between it and the one at ``place``."""

        def codegen(context, builder, signature, args):
            kind = context.get_data_type(array.dtype)
            size = context.get_abi_sizeof(kind)
            offset = builder.mul(args[2], ir.Constant(args[2].type, size))
            pointer = builder.inttoptr(builder.add(args[1], offset), kind.as_pointer(1))
            return builder.load(pointer, align=size)

        return array.dtype(array, place, offset), codegen

    @intrinsic  # type: ignore[misc]
    def load_words(typingctx, address):
        """Give the four words at an address that is a multiple of 16."""
        signature = types.UniTuple(types.uint32, 4)(types.int64)

        def codegen(context, builder, signature, args):
            kind = ir.VectorType(ir.IntType(32), 4)
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer(1)), align=16)
            words = [builder.extract_element(value, ir.Constant(kind.element, i)) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, words)

        return signature, codegen


class Near(NamedTuple):
    """Device functions that read what nodes have of one head, whatever node comes next.

    A thread keeps its part of a head as it lies in memory, in ``n_words`` registers, until the
    numbers are needed.

    Attributes
    ----------
    n_words, word : int, type
        Registers of a part, and their NumPy type.
    place : device function
        ``place(array, head)`` gives where this thread's part of the head of node 0 begins.
    fetch : device function
        ``fetch(array, place, node, words, at)`` reads that of a node into
        ``words[at:at + n_words]``.
    unpack : device function
        ``unpack(words, at, kept)`` gives its ``plan.kept`` numbers.
    """

    n_words: int
    word: Any
    place: Any
    fetch: Any
    unpack: Any


@functools.cache
def near_of(dtype: np.dtype, plan: Plan) -> Near:
    """Return how the threads of ``plan`` read heads of nodes with the fewest instructions."""
    n_heads, n_features, width, chunks, lanes = plan[:5]
    size, n_row = plan.kept, n_heads * n_features
    if _SIMULATING:
        fetch_at = heads_of(dtype, plan).fetch

        def copy(words, at, kept):
            kept[:] = words[at : at + size]

        return Near(
            size,
            access(dtype, wide=False).scalar,
            lambda array, head: head * n_features,
            lambda array, place, node, kept, at: fetch_at(array, place + node * n_row, kept, at),
            copy,
        )
    n_bytes, load, _ = by_address(dtype, width)
    row_bytes, piece_bytes = np.int64(n_row * n_bytes), width * n_bytes
    exact = n_features == plan.kept * lanes
    each, word, _, numbers = packed(dtype, wide=width > 1)
    per_word, nothing = width // each, word(0)
    load = load_words if per_word > 1 else load

    @cuda.jit(device=True)
    def place(array, head):
        return place_of(array, head * n_features + np.int64(cuda.threadIdx.x * width))

    @cuda.jit(device=True)
    def fetch(array, place, node, words, at):
        for k in range(chunks):
            j = (k * lanes + cuda.threadIdx.x) * width
            inside = exact or j < n_features
            # No branch around a load, so that those of several edges are under way together.
            further = k * lanes * piece_bytes if inside else -cuda.threadIdx.x * piece_bytes
            values = load(place + np.int64(node) * row_bytes + further)
            for i in range(each):
                words[at + k * each + i] = values[i] if inside else nothing

    @cuda.jit(device=True)
    def unpack(words, at, kept):
        for k in range(chunks * each):
            values = numbers(words[at + k])
            for i in range(per_word):
                kept[k * per_word + i] = values[i]

    return Near(chunks * each, word, place, fetch, unpack)


@functools.cache
def records_of(scalar: type, n: int, n_heads: int):
    """Return how 2 or 4 numbers of each node and head, side by side, are read and written.

    ``load(array, place, node)`` gives those of a node, ``place_of(array, n * head)`` being where
    those of node 0 are; ``store(array, unit, numbers)`` writes those of a node and a head.
    """
    if _SIMULATING:

        def loaded(array, place, node):
            first = place + n * n_heads * node
            return tuple(array[first : first + n])

        def stored(array, unit, numbers):
            array[n * unit : n * unit + n] = numbers

        return loaded, stored
    n_bytes, load_at, store_at = by_address(np.dtype(scalar), n)
    step = np.int64(n * n_heads * n_bytes)

    @cuda.jit(device=True)
    def load(array, place, node):
        return load_at(place + np.int64(node) * step)

    @cuda.jit(device=True)
    def store(array, unit, numbers):
        store_at(place_of(array, n * unit), numbers)

    return load, store


@functools.cache
def widest(plan: Plan):
    """Return the device function that gives the largest int32 of the warp, where items share one.

    All threads of the warp call it.
    """
    shared = plan.lanes * plan.heads
    if _SIMULATING or shared % _WARP == 0:
        return cuda.jit(device=True)(lambda n: n)
    nearest = shared if shared & (shared - 1) == 0 else plan.lanes

    @cuda.jit(device=True)
    def largest(n):
        mask = 16
        while mask >= nearest:
            n = max(n, cuda.shfl_xor_sync(0xFFFFFFFF, n, mask))
            mask >>= 1
        return n

    return largest


@functools.cache
def exponential(dtype: np.dtype):
    """Return the device function ``exp(x)``, but for float64 the hardware's."""
    if _SIMULATING or dtype == np.float64:
        return arithmetic(dtype).exp
    if dtype != np.float16:
        return cuda.libdevice.fast_expf
    from rtxarr.kernels._vector import two_to

    to_two = np.float32(math.log2(math.e))

    @cuda.jit(device=True)
    def exp(x):
        return two_to(x * to_two)  # zero for numbers that float16 has not

    return exp


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
