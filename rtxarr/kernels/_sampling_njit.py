"""numba's CPU code of the samplers; it runs without Python's lock, and is kept on disk."""

from __future__ import annotations

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._philox_njit import _core, _div
from rtxarr.kernels._sampling_core import build

_compiled = njit(cache=True, error_model="numpy", nogil=True)
_sampling = build(njit(error_model="numpy", nogil=True), _core, _div)
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
_slot_of, _walk, _negative = _sampling.slot_of, _sampling.walk, _sampling.negative


@_compiled
def keep(offsets, first, out):
    """Write all edges of each row."""
    for row in range(first.size):
        for j in range(offsets[row + 1] - offsets[row]):
            out[offsets[row] + j] = first[row] + j


@_compiled
def draw_subsets(nodes, first, degrees, offsets, out, stream, key):
    """Write as many different edges of each row as its part of ``out`` holds."""
    for row in range(nodes.size):
        begin, start = offsets[row], first[row]
        n = offsets[row + 1] - begin
        if n == degrees[row]:
            for j in range(n):
                out[begin + j] = start + j
        else:
            _subset(out, begin, n, start, degrees[row], nodes[row], stream, key)


@_compiled
def draw_weighted(nodes, first, degrees, available, offsets, weights, arrivals, out, stream, key):
    """Write as many different edges with a weight as each row's part of ``out`` holds."""
    for row in range(nodes.size):
        begin, start, degree = offsets[row], first[row], degrees[row]
        n = offsets[row + 1] - begin
        if n == available[row]:
            _positive(out, begin, start, degree, weights)
        else:
            _first_arrivals(
                out, arrivals, begin, n, start, degree, weights, nodes[row], stream, key
            )


@_compiled
def draw_again(nodes, first, degrees, offsets, out, stream, key):
    """Write draws that may come again."""
    for row in range(nodes.size):
        begin = offsets[row]
        for j in range(offsets[row + 1] - begin):
            out[begin + j] = _one_of(j, first[row], degrees[row], nodes[row], stream, key)


@_compiled
def draw_weighted_again(nodes, first, degrees, offsets, sums, out, stream, key):
    """Write draws by weight that may come again."""
    for row in range(nodes.size):
        begin = offsets[row]
        for j in range(offsets[row + 1] - begin):
            out[begin + j] = _weighted_one_of(
                j, first[row], degrees[row], sums, nodes[row], stream, key
            )


@_compiled
def sum_rows(indptr, weights, sums, available):
    """Add the weights of each row up, in order, and count those above zero."""
    for row in range(indptr.size - 1):
        total, count = 0.0, 0
        for edge in range(indptr[row], indptr[row + 1]):
            total += weights[edge]
            sums[edge] = total
            count += weights[edge] > 0.0
        available[row] = count


@_compiled
def count_kept(first, degrees, indices, n, counts, stream, key):
    """Count the edges of each row that LABOR keeps."""
    for row in range(first.size):
        count = 0
        for edge in range(first[row], first[row] + degrees[row]):
            count += _is_kept(indices[edge], n, degrees[row], stream, key)
        counts[row] = count


@_compiled
def write_kept(first, degrees, indices, n, offsets, out, stream, key):
    """Write them."""
    for row in range(first.size):
        place = offsets[row]
        for edge in range(first[row], first[row] + degrees[row]):
            if _is_kept(indices[edge], n, degrees[row], stream, key):
                out[place] = edge
                place += 1


@_compiled
def renumber(nodes, ptr, src, edge_ptr, slots, places, local, out, out_ptr):
    """Number the nodes of each batch: those it begins with, then others as they first come.

    ``slots`` (the node) and ``places`` (its number) are a table with open addressing, larger than
    any batch has nodes.
    """
    total = np.int64(0)
    out_ptr[0] = 0
    last = slots.size - 1
    for batch in range(ptr.size - 1):
        slots[:] = -1
        start = total
        for i in range(ptr[batch], ptr[batch + 1]):
            node = nodes[i]
            slot = _slot_of(node, slots.size)
            while slots[slot] != -1 and slots[slot] != node:
                slot = (slot + 1) & last
            if slots[slot] == -1:
                slots[slot], places[slot] = node, total - start
            out[total] = node
            total += 1
        for edge in range(edge_ptr[batch], edge_ptr[batch + 1]):
            node = np.int64(src[edge])
            slot = _slot_of(node, slots.size)
            while slots[slot] != -1 and slots[slot] != node:
                slot = (slot + 1) & last
            if slots[slot] == -1:
                slots[slot], places[slot] = node, total - start
                out[total] = node
                total += 1
            local[edge] = places[slot]
        out_ptr[batch + 1] = total


@_compiled
def walks(out, starts, per_start, indptr, indices, back, near, far, stream, key):
    """Write ``per_start`` walks from each start."""
    for row in range(out.shape[0]):
        start, number = starts[row // per_start], row % per_start
        _walk(out, row, start, number, indptr, indices, back, near, far, stream, key)


@_compiled
def negatives(out, edges, src, indptr, indices, n_nodes, stream, key):
    """Write for each edge nodes that its source has no edge to."""
    for i in range(edges.size):
        for j in range(out.shape[1]):
            out[i, j] = _negative(edges[i], j, src[i], indptr, indices, n_nodes, stream, key)


@_compiled
def partition(order, indptr, indices, indptr2, indices2, parts, sizes, most):
    """Put each node, in order, where most of its neighbours are and there is room.

    ``parts`` holds where nodes are, -1 for nowhere yet, and ``sizes`` how many are in each part.
    """
    votes = np.zeros(sizes.size, np.int64)
    for node in order:
        if parts[node] >= 0:
            sizes[parts[node]] -= 1
        for edge in range(indptr[node], indptr[node + 1]):
            if parts[indices[edge]] >= 0 and indices[edge] != node:
                votes[parts[indices[edge]]] += 1
        for edge in range(indptr2[node], indptr2[node + 1]):
            if parts[indices2[edge]] >= 0 and indices2[edge] != node:
                votes[parts[indices2[edge]]] += 1
        best, best_score = -1, 0.0
        for part in range(sizes.size):
            if sizes[part] >= most:
                continue
            score = votes[part] * (1.0 - sizes[part] / most)
            smaller = best >= 0 and score == best_score and sizes[part] < sizes[best]
            if best < 0 or score > best_score or smaller:
                best, best_score = part, score
        votes[:] = 0
        parts[node] = best
        sizes[best] += 1


@_compiled
def breadth_first(indptr, indices, indptr2, indices2, order):
    """Write the nodes as a search over edges in both directions comes to them."""
    seen = np.zeros(order.size, np.bool_)
    count = 0
    for root in range(order.size):
        if seen[root]:
            continue
        seen[root] = True
        order[count] = root
        done, count = count, count + 1
        while done < count:
            node = order[done]
            done += 1
            for edge in range(indptr[node], indptr[node + 1]):
                other = indices[edge]
                if not seen[other]:
                    seen[other] = True
                    order[count] = other
                    count += 1
            for edge in range(indptr2[node], indptr2[node + 1]):
                other = indices2[edge]
                if not seen[other]:
                    seen[other] = True
                    order[count] = other
                    count += 1
