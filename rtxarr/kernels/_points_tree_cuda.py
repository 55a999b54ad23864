"""GPU code of the tree over points that the CPU searches, see ``_points_tree``.

Points are packed as ``_points_grid_cuda`` does it, in the order of the tree. Queries that follow
each other on the curve are near each other: those of a warp go through the tree together, down to
each node that one of them needs, and look at the same points.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _device
from rtxarr.kernels._points_core import LEAF_BITS, NODE_BITS, TOP_BITS, along
from rtxarr.kernels._points_cuda import THREADS, _nearest, arithmetic
from rtxarr.kernels._points_list import of_length, words
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset, maximum, minimum

_key = along(_device)

if _SIMULATING:  # where a block is a warp

    def _any(flag):
        flags = cuda.shared.array(THREADS, np.int32)
        flags[cuda.threadIdx.x] = flag
        cuda.syncthreads()  # those of all threads are in place
        found = any(flags)
        cuda.syncthreads()  # all have read them
        return found

else:

    @_device
    def _any(flag):
        return cuda.any_sync(0xFFFFFFFF, flag)


class Making(NamedTuple):
    """Kernels that make a tree, a thread a point, leaf or node.

    Attributes
    ----------
    keys : kernel
        ``keys(x, batches, low, scale, side, bits, drop, room, out)`` writes a word of the place of
        each point on the curve.
    pack : kernel
        ``pack(x, order, packed)`` writes points to where they belong.
    leaves, level : kernel
        ``leaves(packed, boxes, n)`` writes the boxes around leaves, and
        ``level(boxes, below, n_below, above, n)`` those around nodes.
    """

    keys: Any
    pack: Any
    leaves: Any
    level: Any


@functools.cache
def making(dtype: np.dtype) -> Making:
    """Return the kernels that make a tree of points of ``dtype``."""
    load, store = by_offset(dtype, 4)
    _, word_of = words(dtype)
    zero = np.dtype(dtype).type(0)

    @cuda.jit
    def keys(x, batches, l0, l1, l2, scale, side, bits, drop, room, out):
        i = np.int64(cuda.grid(1))
        if i < out.size:
            out[i] = _key(x, i, batches[i], l0, l1, l2, scale, side, bits, drop, room)

    @cuda.jit
    def pack(x, order, packed):
        place = np.int64(cuda.grid(1))
        if place < order.size:
            i, n_axes = order[place], x.shape[1]
            second = x[i, 1] if n_axes > 1 else zero
            third = x[i, 2] if n_axes > 2 else zero
            store(packed, 4 * place, (x[i, 0], second, third, word_of(i)))

    @_device
    def lower(a, b):
        return minimum(a[0], b[0]), minimum(a[1], b[1]), minimum(a[2], b[2]), zero

    @_device
    def higher(a, b):
        return maximum(a[0], b[0]), maximum(a[1], b[1]), maximum(a[2], b[2]), zero

    @cuda.jit
    def leaves(packed, boxes, n):
        leaf = np.int64(cuda.grid(1))
        if leaf < n:
            first = leaf << LEAF_BITS
            low = high = load(packed, 4 * first)
            for place in range(first, min(first + (1 << LEAF_BITS), packed.size >> 2)):
                here = load(packed, 4 * place)
                low, high = lower(low, here), higher(high, here)
            store(boxes, 8 * leaf, low)
            store(boxes, 8 * leaf + 4, high)

    @cuda.jit
    def level(boxes, below, n_below, above, n):
        node = np.int64(cuda.grid(1))
        if node < n:
            first = node << NODE_BITS
            low = load(boxes, 8 * (below + first))
            high = load(boxes, 8 * (below + first) + 4)
            for child in range(first + 1, min(first + (1 << NODE_BITS), n_below)):
                at = 8 * (below + child)
                low, high = lower(low, load(boxes, at)), higher(high, load(boxes, at + 4))
            store(boxes, 8 * (above + node), low)
            store(boxes, 8 * (above + node) + 4, high)

    return Making(keys, pack, leaves, level)


@functools.cache
def _climber(dtype: np.dtype, take, worst):
    """Return what looks at the points around the queries of a warp, near ones first.

    ``take`` and ``worst`` are as in ``_points_cuda``. A query looks at points from the place
    ``begin`` to ``end``; where they are the same, at none.
    """
    zero = np.dtype(dtype).type(0)
    mul, add = arithmetic(dtype)
    load = by_offset(dtype, 4).load
    number_of, _ = words(dtype)
    some, most = (1 << NODE_BITS) - 1, (1 << TOP_BITS) - 1

    @_device
    def square(a, b, c):
        return add(add(mul(a, a), mul(b, b)), mul(c, c))

    @_device
    def scan(query, begin, end, points, leaf, state, keep):
        place = leaf << LEAF_BITS
        last = min(place + (1 << LEAF_BITS), points.size >> 2)
        while place < last:
            x, y, z, word = load(points, 4 * place)
            d = square(query[0] - x, query[1] - y, query[2] - z)
            if d <= worst(state, keep) and place >= begin and place < end:
                state = take(d, number_of(word), state, keep)
            place += 1
        return state

    @_device
    def to_box(query, boxes, node):
        """Return the squared distance of a box, which is not beyond that of its points."""
        low, high = load(boxes, 8 * node), load(boxes, 8 * node + 4)
        a = max(max(low[0] - query[0], query[0] - high[0]), zero)
        b = max(max(low[1] - query[1], query[1] - high[1]), zero)
        c = max(max(low[2] - query[2], query[2] - high[2]), zero)
        return square(a, b, c)

    @_device
    def climb(query, begin, end, near, points, boxes, n_leaves, highest, state, keep):
        # A node: its level, where boxes of that begin, and its place among them. It is that of the
        # whole warp, and so is ``near``, a place.
        level, base, node = 0, np.int64(0), near >> LEAF_BITS
        # What is below ``done``, a node of the level ``top``, has been looked at.
        top, done = 0, node
        state = scan(query, begin, end, points, node, state, keep)
        last = some if highest > 0 else most
        node &= ~last
        while True:
            size = LEAF_BITS + NODE_BITS * level
            first = node << size
            within = first < end and first + (np.int64(1) << size) > begin
            if within and (level < top or node != done):
                within = to_box(query, boxes, base + node) <= worst(state, keep)
            else:
                within = False
            if _any(within):
                if level > 0:
                    level -= 1
                    base -= n_leaves >> NODE_BITS * level
                    node <<= NODE_BITS
                    continue
                if within:
                    state = scan(query, begin, end, points, node, state, keep)
            while level < top and node & some == some:
                base += n_leaves >> NODE_BITS * level
                level += 1
                node >>= NODE_BITS
            if level < top or node & last != last:
                node += 1
            elif top == highest:
                return state
            else:
                base += n_leaves >> NODE_BITS * top
                top += 1
                level, done = top, done >> NODE_BITS
                last = some if highest > top else most
                node = done & ~last

    return climb


@functools.cache
def search(dtype: np.dtype, n: int):
    """Return the search of the nearest points, up to ``n`` at once; see ``_points_cuda.search``.

    ``near`` has for each query, in the order in which they are looked from, the place of a point
    nearby.
    """
    start, _, write = of_length(n, dtype)
    before = np.dtype(dtype).type(-1)
    take, worst = _nearest(dtype, n)
    climb = _climber(dtype, take, worst)
    load = by_offset(dtype, 4).load
    number_of, _ = words(dtype)
    warp = min(32, THREADS)

    @bounded(THREADS)
    def kernel(
        queries, batches, near, ptr, points, boxes, n_leaves, highest,
        others, limit, k, first, starts, counts, best_d, best_i,
    ):  # fmt: skip
        v = np.int64(cuda.grid(1))
        leader = v // warp * warp
        if leader >= counts.size:
            return
        place = load(queries, 4 * min(v, counts.size - 1))
        number = number_of(place[3])
        query = np.int64(number)
        begin, end = np.int64(0), np.int64(0)  # all of a warp stay together
        last_d, last = before, np.int32(0)
        is_looking = v < counts.size and (first == 0 or counts[query] == first)
        if is_looking:
            batch = batches[query]
            begin, end = ptr[batch], ptr[batch + 1]
            if first > 0:
                at = starts[query] + first - 1
                last_d, last = best_d[at], np.int32(best_i[at])
        keep = number if others else np.int32(-1), last_d, last
        state = start(n - k, limit)
        state = climb(
            place, begin, end, near[leader], points, boxes, n_leaves, highest, state, keep
        )
        if is_looking:
            base = starts[query] + first
            counts[query] = first + write(state[0], state[1], n - k, base, best_d, best_i)

    return kernel
