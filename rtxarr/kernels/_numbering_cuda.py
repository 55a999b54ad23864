"""GPU code that adds up counts and numbers what was reached, in a fixed order.

Arrays of nodes and of edges may be longer than what their batches have, so that arrays of a few
sizes will do; ``ptr[-1]`` and ``edge_ptr[-1]`` say how many there are.

An item is a node that a batch begins with, or the source of one of its edges; the place of an item
is its number among those of its batch, nodes before edges. A hash table, a part for each batch,
holds for each node of the batch the least of its places, whichever thread came first: a word is the
node and, in its lowest ``bits`` bits, the place.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _device
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._sampling_core import LOW_HALF, MIX, SPREAD
from rtxarr.kernels._sampling_cuda import _row_of

# Threads of a block, and how many entries each adds up; and the threads that add up the sums.
_THREADS, _EACH, _SUMMING = (4, 2, 4) if _SIMULATING else (256, 4, 1024)
TILE, SUMMING = _THREADS * _EACH, _SUMMING
BLOCK = _THREADS

_U = np.uint64
_S32 = _U(32)


@functools.cache
def running(threads: int):
    """Return the device function that adds up a value of each thread of a block.

    ``add_up(sums, value)`` gives the sum of those of the threads before, and of all. All of the
    block, a multiple of 32, call it, with ``sums`` of int64 in shared memory, an entry each.
    """
    if _SIMULATING:  # which has no shuffles

        @_device
        def add_up_all(sums, value):
            t = cuda.threadIdx.x
            sums[t] = value
            cuda.syncthreads()  # all values are in place
            before, total = np.int64(0), np.int64(0)
            for i in range(threads):
                before += sums[i] if i < t else np.int64(0)
                total += sums[i]
            cuda.syncthreads()  # all have read them before the next call overwrites them
            return before, total

        return add_up_all

    @_device
    def add_up(sums, value):
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        within = np.int64(value)
        for i in range(5):
            other = cuda.shfl_up_sync(0xFFFFFFFF, within, 1 << i)
            within += other if lane >= 1 << i else np.int64(0)
        if lane == 31:
            sums[warp] = within
        cuda.syncthreads()  # the sums of all warps are in place
        before, total = within - np.int64(value), np.int64(0)
        for i in range(threads // 32):
            here = sums[i]
            before += here if i < warp else np.int64(0)
            total += here
        cuda.syncthreads()  # all have read them before the next call overwrites them
        return before, total

    return add_up


_add_up, _add_up_sums = running(_THREADS), running(_SUMMING)


@_device
def _count(some, n, again):
    """Return how many of ``some`` edges are drawn: ``n``, all if it is negative."""
    if n < 0:
        return some
    if again:
        return np.int64(n if some > 0 else 0)
    return min(some, n)


@_device
def _tile():
    """Return the first entry of the block's tile and of this thread's part of it."""
    start = np.int64(cuda.blockIdx.x) * TILE
    return start, start + np.int64(cuda.threadIdx.x) * _EACH


@bounded(_THREADS)
def sum_counts(some, n, again, totals):
    """Add up how many edges the rows of each tile draw; a block a tile."""
    start, _ = _tile()
    total = np.int64(0)
    for i in range(start + cuda.threadIdx.x, min(start + TILE, some.size), _THREADS):
        total += _count(np.int64(some[i]), n, again)
    _, total = _add_up(cuda.shared.array(_THREADS, np.int64), total)
    if cuda.threadIdx.x == 0:
        totals[cuda.blockIdx.x] = total


@bounded(_SUMMING)
def sum_totals(totals):
    """Replace each total by the sum of those before; one block."""
    t, n = np.int64(cuda.threadIdx.x), np.int64(totals.size)
    each = (n + _SUMMING - 1) // _SUMMING
    start, stop = min(t * each, n), min((t + 1) * each, n)
    total = np.int64(0)
    for i in range(start, stop):
        total += totals[i]
    before, _ = _add_up_sums(cuda.shared.array(_SUMMING, np.int64), total)
    for i in range(start, stop):
        here = totals[i]
        totals[i] = before
        before += here


@bounded(_THREADS)
def write_offsets(some, n, again, totals, out):
    """Write where the edges of each row begin, and the end; a block a tile."""
    _, first = _tile()
    total = np.int64(0)
    for i in range(first, min(first + _EACH, some.size)):
        total += _count(np.int64(some[i]), n, again)
    before, _ = _add_up(cuda.shared.array(_THREADS, np.int64), total)
    before += totals[cuda.blockIdx.x]
    for i in range(first, min(first + _EACH, out.size)):
        out[i] = before
        if i < some.size:
            before += _count(np.int64(some[i]), n, again)


@cuda.jit
def find_outside(x, n, outside):
    """Write 1 if any of ``x`` is not in [0, n); a thread each."""
    i = np.int64(cuda.grid(1))
    if i < x.size and not (x[i] >= 0 and x[i] < n):
        outside[0] = 1


@cuda.jit
def look_up(nodes, ptr, indptr, available, first, degrees, usable):
    """Write where the edges of each node begin, how many they are and how many have a weight.

    None for what follows the nodes of the last batch. A thread a row.
    """
    row = np.int64(cuda.grid(1))
    if row >= nodes.size:
        return
    start, degree, some = np.int64(0), np.int64(0), np.int64(0)
    if row < ptr[ptr.size - 1]:
        node = nodes[row]
        start = indptr[node]
        degree = indptr[node + 1] - start
        some = available[node] if available.size > 0 else degree
    first[row], degrees[row], usable[row] = start, degree, some


@cuda.jit
def gather_edges(edges, n, indices, edge_ids, src, ids):
    """Write the source and the number of each of the first ``n`` edges; a thread an edge."""
    i = np.int64(cuda.grid(1))
    if i < n:
        edge = edges[i]
        src[i] = indices[edge]
        ids[i] = edge_ids[edge]


@cuda.jit
def cut_offsets(offsets, ptr, out, bounds):
    """Write offsets for each batch, and where its rows and its edges begin among all.

    A thread an entry; some threads have none.
    """
    i = np.int64(cuda.grid(1))
    if i < ptr.size:
        bounds[0, i] = ptr[i]
        bounds[1, i] = offsets[ptr[i]]
    n_batches = np.int64(ptr.size - 1)
    if i >= ptr[n_batches] + n_batches:
        return
    low, high = np.int64(0), n_batches
    while high - low > 1:
        middle = (low + high) >> 1
        if ptr[middle] + middle <= i:
            low = middle
        else:
            high = middle
    out[i] = offsets[i - low] - offsets[ptr[low]]


# ------------------------------------------------------------------------------ the table


@_device
def first_slot(item, n_slots):
    """Return where a part of the table of ``n_slots`` begins to be searched for ``item``."""
    low, high = _U(item) & LOW_HALF, _U(item) >> _S32
    mixed = (low * SPREAD) ^ (high * MIX)
    mixed = (mixed ^ (mixed >> _S32)) & LOW_HALF
    return np.int64((mixed * _U(n_slots)) >> _S32)


@_device
def enter_word(slots, start, n_slots, item, place, bits):
    """Let the table have ``item`` at ``place`` or before."""
    word = (np.int64(item) << bits) | place
    slot = first_slot(item, n_slots)
    while True:
        held = slots[start + slot]
        if held == -1:
            held = cuda.atomic.cas(slots, start + slot, np.int64(-1), word)
            if held == -1:
                return
        if held >> bits == item:
            if held > word:
                cuda.atomic.min(slots, start + slot, word)
            return
        slot = slot + 1 if slot + 1 < n_slots else np.int64(0)


@_device
def find_place(slots, start, n_slots, item, bits):
    """Return the least place of ``item``, which the table has."""
    slot = first_slot(item, n_slots)
    while slots[start + slot] >> bits != item:
        slot = slot + 1 if slot + 1 < n_slots else np.int64(0)
    return slots[start + slot] & ((np.int64(1) << bits) - 1)


# ------------------------------------------------------------------------------ numbering


@_device
def _part(batch, ptr, edge_ptr):
    """Return where the batch's part of the table begins, and its size: twice its items."""
    start = ptr[batch] + edge_ptr[batch]
    return 2 * start, 2 * (ptr[batch + 1] + edge_ptr[batch + 1] - start)


@_device
def _last(ptr):
    return ptr[ptr.size - 1]


@cuda.jit
def enter(nodes, ptr, src, edge_ptr, slots, bits):
    """Enter the items into the table; a thread an item."""
    i, n_nodes = np.int64(cuda.grid(1)), _last(ptr)
    if i >= n_nodes + _last(edge_ptr):
        return
    if i < n_nodes:
        batch = _row_of(ptr, i)
        node, place = nodes[i], i - ptr[batch]
    else:
        edge = i - n_nodes
        batch = _row_of(edge_ptr, edge)
        node = np.int64(src[edge])
        place = ptr[batch + 1] - ptr[batch] + edge - edge_ptr[batch]
    start, n_slots = _part(batch, ptr, edge_ptr)
    enter_word(slots, start, n_slots, node, place, bits)


@bounded(_THREADS)
def find(ptr, src, edge_ptr, slots, bits, local, totals):
    """Write the least place of each edge's source, and count those that come first.

    A block a tile.
    """
    start, _ = _tile()
    total = np.int64(0)
    for edge in range(start + cuda.threadIdx.x, min(start + TILE, _last(edge_ptr)), _THREADS):
        batch = _row_of(edge_ptr, edge)
        begin, n_slots = _part(batch, ptr, edge_ptr)
        least = find_place(slots, begin, n_slots, np.int64(src[edge]), bits)
        local[edge] = least
        if least == ptr[batch + 1] - ptr[batch] + edge - edge_ptr[batch]:
            total += 1
    _, total = _add_up(cuda.shared.array(_THREADS, np.int64), total)
    if cuda.threadIdx.x == 0:
        totals[cuda.blockIdx.x] = total


@bounded(_THREADS)
def rank(ptr, src, edge_ptr, local, totals, before, out):
    """Write how many edges before each are the first to come from a node, and those nodes.

    A block a tile of the edges and the end.
    """
    _, first = _tile()
    n_edges, total = _last(edge_ptr), np.int64(0)
    for edge in range(first, min(first + _EACH, n_edges)):
        batch = _row_of(edge_ptr, edge)
        if local[edge] == ptr[batch + 1] - ptr[batch] + edge - edge_ptr[batch]:
            total += 1
    count, _ = _add_up(cuda.shared.array(_THREADS, np.int64), total)
    count += totals[cuda.blockIdx.x]
    for edge in range(first, min(first + _EACH, n_edges + 1)):
        before[edge] = count
        if edge < n_edges:
            batch = _row_of(edge_ptr, edge)
            if local[edge] == ptr[batch + 1] - ptr[batch] + edge - edge_ptr[batch]:
                out[ptr[batch + 1] + count] = src[edge]
                count += 1


@cuda.jit
def number(nodes, ptr, edge_ptr, before, local, out, out_ptr):
    """Write the nodes that batches begin with, the sources' numbers and ``out_ptr``.

    A thread an item; the first write ``out_ptr`` too.
    """
    i, n_nodes = np.int64(cuda.grid(1)), _last(ptr)
    if i < ptr.size:
        out_ptr[i] = ptr[i] + before[edge_ptr[i]]
    if i < n_nodes:
        batch = _row_of(ptr, i)
        out[i + before[edge_ptr[batch]]] = nodes[i]
    elif i < n_nodes + _last(edge_ptr):
        edge = i - n_nodes
        batch = _row_of(edge_ptr, edge)
        n_begun = ptr[batch + 1] - ptr[batch]
        least = np.int64(local[edge])
        if least >= n_begun:  # the number follows from the edge that comes first
            begin = edge_ptr[batch]
            local[edge] = n_begun + before[begin + least - n_begun] - before[begin]
