"""GPU code of the samplers: a thread for each row where rows are scanned, else for each edge."""

from __future__ import annotations

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._philox_cuda import _core, _device, _div
from rtxarr.kernels._sampling_core import build

_sampling = build(_device, _core, _div)
_subset, _first_arrivals, _positive = (
    _sampling.subset,
    _sampling.first_arrivals,
    _sampling.positive,
)
_one_of, _weighted_one_of, _is_kept = (
    _sampling.one_of,
    _sampling.weighted_one_of,
    _sampling.is_kept,
)
_row_of, _slot_of = _sampling.row_of, _sampling.slot_of
_walk, _negative = _sampling.walk, _sampling.negative


@cuda.jit
def keep(first, degrees, offsets, out):
    """Write the edges of rows that keep all; a thread an edge."""
    i = np.int64(cuda.grid(1))
    if i < out.size:
        row = _row_of(offsets, i)
        if offsets[row + 1] - offsets[row] == degrees[row]:
            out[i] = first[row] + i - offsets[row]


@cuda.jit
def draw_subsets(nodes, first, degrees, offsets, out, stream, key):
    """Draw in the rows that do not keep all; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < nodes.size:
        begin = offsets[row]
        n = offsets[row + 1] - begin
        if n != degrees[row]:
            _subset(out, begin, n, first[row], degrees[row], nodes[row], stream, key)


@cuda.jit
def draw_weighted(nodes, first, degrees, available, offsets, weights, arrivals, out, stream, key):
    """Draw by weight; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < nodes.size:
        begin, start, degree = offsets[row], first[row], degrees[row]
        n = offsets[row + 1] - begin
        if n == available[row]:
            _positive(out, begin, start, degree, weights)
        else:
            _first_arrivals(
                out, arrivals, begin, n, start, degree, weights, nodes[row], stream, key
            )


@cuda.jit
def draw_again(nodes, first, degrees, offsets, out, stream, key):
    """Draw what may come again; a thread an edge."""
    i = np.int64(cuda.grid(1))
    if i < out.size:
        row = _row_of(offsets, i)
        out[i] = _one_of(i - offsets[row], first[row], degrees[row], nodes[row], stream, key)


@cuda.jit
def draw_weighted_again(nodes, first, degrees, offsets, sums, out, stream, key):
    """Draw by weight what may come again; a thread an edge."""
    i = np.int64(cuda.grid(1))
    if i < out.size:
        row = _row_of(offsets, i)
        out[i] = _weighted_one_of(
            i - offsets[row], first[row], degrees[row], sums, nodes[row], stream, key
        )


@cuda.jit
def sum_rows(indptr, weights, sums, available):
    """Add up the weights of a row, in order; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < available.size:
        total, count = np.float64(0.0), np.int64(0)
        for edge in range(indptr[row], indptr[row + 1]):
            total += weights[edge]
            sums[edge] = total
            count += weights[edge] > 0.0
        available[row] = count


@cuda.jit
def count_kept(first, degrees, indices, n, counts, stream, key):
    """Count the edges that LABOR keeps; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < first.size:
        count = np.int64(0)
        for edge in range(first[row], first[row] + degrees[row]):
            count += _is_kept(indices[edge], n, degrees[row], stream, key)
        counts[row] = count


@cuda.jit
def write_kept(first, degrees, indices, n, offsets, out, stream, key):
    """Write them; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < first.size:
        place = offsets[row]
        for edge in range(first[row], first[row] + degrees[row]):
            if _is_kept(indices[edge], n, degrees[row], stream, key):
                out[place] = edge
                place += 1


# Numbering: an item is a node that a batch begins with, or the source of one of its edges. Those of
# a batch follow each other, the nodes before the edges. The table holds for each node of each batch
# the least of its items, whichever thread came first.


@_device
def _item(i, nodes, ptr, src, edge_ptr, n_nodes):
    """Return the key and the place of thread ``i``'s item, its batch and what to write."""
    if i < nodes.size:
        batch = _row_of(ptr, i)
        node = nodes[i]
        place = i + edge_ptr[batch]
    else:
        edge = i - nodes.size
        batch = _row_of(edge_ptr, edge)
        node = np.int64(src[edge])
        place = ptr[batch + 1] + edge
    return batch * n_nodes + node, place, batch, node


@_device
def _find(slots, key):
    slot = _slot_of(key, slots.size)
    while slots[slot] != key:
        slot = (slot + 1) & (slots.size - 1)
    return slot


@cuda.jit
def enter(nodes, ptr, src, edge_ptr, slots, places, n_nodes):
    """Enter the items into the table; a thread an item."""
    i = np.int64(cuda.grid(1))
    if i < nodes.size + src.size:
        key, place, _, _ = _item(i, nodes, ptr, src, edge_ptr, n_nodes)
        slot = _slot_of(key, slots.size)
        while True:
            held = cuda.atomic.cas(slots, slot, np.int64(-1), key)
            if held == -1 or held == key:
                break
            slot = (slot + 1) & (slots.size - 1)
        cuda.atomic.min(places, slot, place)


@cuda.jit
def mark_first(nodes, ptr, src, edge_ptr, slots, places, fresh, n_nodes):
    """Mark the edges whose source comes with no item before; a thread an edge."""
    edge = np.int64(cuda.grid(1))
    if edge < src.size:
        key, place, _, _ = _item(nodes.size + edge, nodes, ptr, src, edge_ptr, n_nodes)
        fresh[edge] = np.int64(places[_find(slots, key)] == place)


@cuda.jit
def number(nodes, ptr, src, edge_ptr, slots, places, before, out_ptr, local, out, n_nodes):
    """Write each node where it first comes, and the numbers of the sources; a thread an item."""
    i = np.int64(cuda.grid(1))
    if i >= nodes.size + src.size:
        return
    key, place, batch, node = _item(i, nodes, ptr, src, edge_ptr, n_nodes)
    n_begun = ptr[batch + 1] - ptr[batch]
    start = out_ptr[batch]
    if i < nodes.size:
        out[start + i - ptr[batch]] = node
        return
    least = places[_find(slots, key)]
    found = least - (ptr[batch] + edge_ptr[batch])  # its place among the batch's items
    if found >= n_begun:  # not one of those it begins with
        edge = edge_ptr[batch] + found - n_begun
        found = n_begun + before[edge] - before[edge_ptr[batch]]
    edge = i - nodes.size
    local[edge] = found
    if least == place:
        out[start + found] = node


@cuda.jit
def walks(out, starts, per_start, indptr, indices, back, near, far, stream, key):
    """Walk; a thread a walk."""
    row = np.int64(cuda.grid(1))
    if row < out.shape[0]:
        start, which = starts[row // per_start], row % per_start
        _walk(out, row, start, which, indptr, indices, back, near, far, stream, key)


@cuda.jit
def negatives(out, edges, src, indptr, indices, n_nodes, stream, key):
    """Write nodes that sources have no edge to; a thread each."""
    i = np.int64(cuda.grid(1))
    if i < out.size:
        row, j = i // out.shape[1], i % out.shape[1]
        out[row, j] = _negative(edges[row], j, src[row], indptr, indices, n_nodes, stream, key)
