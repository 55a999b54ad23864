"""numba's CPU code for points; it runs without Python's lock, and compiled code is kept on disk."""

from __future__ import annotations

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._points_core import LEAF_BITS, NODE_BITS, TOP_BITS, along, sorting

_compiled = njit(cache=True, error_model="numpy", nogil=True)
# Distances that are worked out together, several at a time in vector registers.
_TILE = 64
# What makes numbers smaller by more than float32 rounds them.
_BELOW = 1 - 2.0**-22


def _named(name):
    """Return a decorator for functions that are made more than once, in different ways.

    Code that numba kept calls functions by names that another process numbered; so those of each
    kind need names of their own, lest one is taken for another.
    """
    compiled = njit(error_model="numpy", nogil=True)

    def decorate(function):
        function.__qualname__ = f"{name}.{function.__qualname__}"
        return compiled(function)

    return decorate


_named_here = _named("points")
_key = along(_named_here)


@_named_here
def _load(array, at):
    return array[at], array[at + 1], array[at + 2], array[at + 3]


@_named_here
def _store(array, at, words):
    array[at], array[at + 1], array[at + 2], array[at + 3] = words


# ------------------------------------------------------------------------------ a tree is made


@_named_here
def _pack(x, i, packed, place):
    """Write point ``i`` to a place among the sorted ones, and a number not above its own."""
    zero, n_axes = packed.dtype.type(0), x.shape[1]
    number = packed.dtype.type(i * _BELOW)
    second = x[i, 1] if n_axes > 1 else zero
    third = x[i, 2] if n_axes > 2 else zero
    _store(packed, 4 * place, (x[i, 0], second, third, number))


@_named_here
def _lower(a, b):
    return min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


@_named_here
def _higher(a, b):
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), a[3]


@_named_here
def _box_leaf(packed, boxes, leaf):
    """Write the box around the points of a leaf."""
    first = leaf << LEAF_BITS
    low = high = _load(packed, 4 * first)
    for place in range(first + 1, min(first + (1 << LEAF_BITS), packed.size >> 2)):
        here = _load(packed, 4 * place)
        low, high = _lower(low, here), _higher(high, here)
    _store(boxes, 8 * leaf, low)
    _store(boxes, 8 * leaf + 4, high)


@_named_here
def _box_node(boxes, below, n_below, above, node):
    """Write the box around those of the level below, ``n_below`` from box ``below`` on."""
    first = node << NODE_BITS
    low, high = _load(boxes, 8 * (below + first)), _load(boxes, 8 * (below + first) + 4)
    for child in range(first + 1, min(first + (1 << NODE_BITS), n_below)):
        at = 8 * (below + child)
        low, high = _lower(low, _load(boxes, at)), _higher(high, _load(boxes, at + 4))
    _store(boxes, 8 * (above + node), low)
    _store(boxes, 8 * (above + node) + 4, high)


# --------------------------------------------------------------------------------- and searched

# What is kept of a query. ``keep`` is what does not change during a search: the number to leave
# out, the limit, up to how many to keep, from where on, in which arrays, and the points' numbers.


@_named_here
def _precedes(d, i, other_d, other_i):
    return d < other_d or (d == other_d and i < other_i)


@_named_here
def _insert(d, place, count, keep):
    """Keep the nearest, sorted."""
    skip, _, k, base, best_d, best_i, order = keep
    i = order[place]
    if i == skip:
        return count
    if count == k:
        last = base + k - 1
        if not _precedes(d, i, best_d[last], best_i[last]):
            return count
    else:
        count += 1
    at = base + count - 1
    while at > base and _precedes(d, i, best_d[at - 1], best_i[at - 1]):
        best_d[at], best_i[at] = best_d[at - 1], best_i[at - 1]
        at -= 1
    best_d[at], best_i[at] = d, i
    return count


@_named_here
def _append(d, place, count, keep):
    """Keep all, in the order in which they are met."""
    skip, _, _, base, best_d, best_i, order = keep
    if order[place] == skip:
        return count
    best_d[base + count], best_i[base + count] = d, order[place]
    return count + 1


@_named_here
def _tally(d, place, count, keep):
    """Keep none."""
    return count + (keep[6][place] != keep[0])


@_named_here
def _worst_kept(count, keep):
    _, limit, k, base, best_d, _, _ = keep
    return best_d[base + k - 1] if count == k else limit


@_named_here
def _worst_within(count, keep):
    return keep[1]


@_named_here
def _nearer(d, number, count, keep):
    """Tell whether a point as far as this, and with this number or a higher one, may be kept."""
    _, limit, k, base, best_d, best_i, _ = keep
    if count < k:
        return d <= limit
    last = base + k - 1
    return d < best_d[last] or (d == best_d[last] and number < best_i[last])


@_named_here
def _within(d, number, count, keep):
    return d <= keep[1]


def _searcher(kind, take, worst, may):
    """Return what looks at the points around a query, near ones first.

    ``take(d, place, count, keep)`` gives how many are kept after a point, and ``worst(count,
    keep)`` the squared distance above which none is taken. ``may(d, number, count, keep)`` tells
    whether to look into a box at a distance, whose points have no lower numbers: of many points in
    one place those with the lowest are kept, and all boxes around the others are passed by.
    """
    jit, some, most = _named(kind), (1 << NODE_BITS) - 1, (1 << TOP_BITS) - 1

    @jit
    def scan(query, begin, end, points, leaf, count, keep):
        place = leaf << LEAF_BITS
        last = min(place + (1 << LEAF_BITS), points.size >> 2)
        while place < last:
            x, y, z, _ = _load(points, place << 2)
            a, b, c = query[0] - x, query[1] - y, query[2] - z
            d = a * a + b * b + c * c
            if d <= worst(count, keep) and place >= begin and place < end:
                count = take(d, place, count, keep)
            place += 1
        return count

    @jit
    def to_box(query, boxes, node):
        """Return the squared distance of a box."""
        at, zero = node << 3, boxes.dtype.type(0)
        low, high = _load(boxes, at), _load(boxes, at + 4)
        a = max(max(low[0] - query[0], query[0] - high[0]), zero)
        b = max(max(low[1] - query[1], query[1] - high[1]), zero)
        c = max(max(low[2] - query[2], query[2] - high[2]), zero)
        return a * a + b * b + c * c

    @jit
    def walk(query, begin, end, near, tree, count, keep):
        points, boxes, n_leaves, highest = tree
        # A node: its level, where boxes of that begin, and its place among them.
        level, base, node = 0, 0, near >> LEAF_BITS
        # What is below ``done``, a node of the level ``top``, has been looked at.
        top, done = 0, node
        count = scan(query, begin, end, points, node, count, keep)
        last = some if highest > 0 else most
        node &= ~last
        while True:
            size = LEAF_BITS + NODE_BITS * level
            first = node << size
            within = first < end and first + (1 << size) > begin
            if (
                within
                and (level < top or node != done)
                and may(
                    to_box(query, boxes, node + base), boxes[(node + base << 3) + 3], count, keep
                )
            ):
                if level > 0:
                    level -= 1
                    base -= n_leaves >> NODE_BITS * level
                    node <<= NODE_BITS
                    continue
                count = scan(query, begin, end, points, node, count, keep)
            while level < top and node & some == some:
                base += n_leaves >> NODE_BITS * level
                level += 1
                node >>= NODE_BITS
            if level < top or node & last != last:
                node += 1
            elif top == highest:
                return count
            else:
                base += n_leaves >> NODE_BITS * top
                top += 1
                level, done = top, done >> NODE_BITS
                last = some if highest > top else most
                node = done & ~last

    return walk


def _scanner(kind, take, worst):
    """Return what looks at all points of a batch, a tile at a time: all are added alike."""

    @_named(kind)
    def scan(y, query, xt, begin, end, count, keep):
        found = np.empty(_TILE, xt.dtype)
        for start in range(begin, end, _TILE):
            n = min(_TILE, end - start)
            found[:n] = 0
            for axis in range(xt.shape[0]):
                here, row = y[query, axis], xt[axis, start : start + n]
                for j in range(n):
                    difference = here - row[j]
                    found[j] += difference * difference
            for j in range(n):
                if found[j] <= worst(count, keep):
                    count = take(found[j], start + j, count, keep)
        return count

    return scan


_walk_insert = _searcher("insert", _insert, _worst_kept, _nearer)
_walk_append = _searcher("append", _append, _worst_within, _within)
_walk_tally = _searcher("tally", _tally, _worst_within, _within)
_scan_insert = _scanner("insert", _insert, _worst_kept)
_scan_append = _scanner("append", _append, _worst_within)
_scan_tally = _scanner("tally", _tally, _worst_within)
_sort = sorting(_named("sort"))

# Numba keeps compiled code of functions of a module, but not of such as are made by others, so
# these are written out.


@_compiled
def keys(begin, end, x, batches, l0, l1, l2, scale, side, bits, drop, room, out):
    for i in range(begin, end):
        out[i] = _key(x, i, batches[i], l0, l1, l2, scale, side, bits, drop, room)


@_compiled
def pack(begin, end, x, order, packed):
    for place in range(begin, end):
        _pack(x, order[place], packed, place)


@_compiled
def leaves(begin, end, packed, boxes):
    for leaf in range(begin, end):
        _box_leaf(packed, boxes, leaf)


@_compiled
def level(begin, end, boxes, below, n_below, above):
    for node in range(begin, end):
        _box_node(boxes, below, n_below, above, node)


@_compiled
def insert_packed(begin, end, queries, where, others, limit, k, starts, counts, best_d, best_i):
    visit, batches, near, ptr, tree, order = where
    for v in range(begin, end):
        query, batch = visit[v], batches[visit[v]]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        here = _load(queries, 4 * v)
        bounds = ptr[batch], ptr[batch + 1]
        counts[query] = _walk_insert(here, bounds[0], bounds[1], near[v], tree, 0, keep)


@_compiled
def append_packed(begin, end, queries, where, others, limit, k, starts, counts, best_d, best_i):
    visit, batches, near, ptr, tree, order = where
    for v in range(begin, end):
        query, batch = visit[v], batches[visit[v]]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        here = _load(queries, 4 * v)
        bounds = ptr[batch], ptr[batch + 1]
        counts[query] = _walk_append(here, bounds[0], bounds[1], near[v], tree, 0, keep)


@_compiled
def tally_packed(begin, end, queries, where, others, limit, k, starts, counts, best_d, best_i):
    visit, batches, near, ptr, tree, order = where
    for v in range(begin, end):
        query, batch = visit[v], batches[visit[v]]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        here = _load(queries, 4 * v)
        bounds = ptr[batch], ptr[batch + 1]
        counts[query] = _walk_tally(here, bounds[0], bounds[1], near[v], tree, 0, keep)


@_compiled
def insert_plain(begin, end, y, where, others, limit, k, starts, counts, best_d, best_i):
    _, batches, _, ptr, tree, order = where
    for query in range(begin, end):
        batch = batches[query]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        counts[query] = _scan_insert(y, query, tree[0], ptr[batch], ptr[batch + 1], 0, keep)


@_compiled
def append_plain(begin, end, y, where, others, limit, k, starts, counts, best_d, best_i):
    _, batches, _, ptr, tree, order = where
    for query in range(begin, end):
        batch = batches[query]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        counts[query] = _scan_append(y, query, tree[0], ptr[batch], ptr[batch + 1], 0, keep)


@_compiled
def tally_plain(begin, end, y, where, others, limit, k, starts, counts, best_d, best_i):
    _, batches, _, ptr, tree, order = where
    for query in range(begin, end):
        batch = batches[query]
        keep = query if others else -1, limit, k, starts[query], best_d, best_i, order
        counts[query] = _scan_tally(y, query, tree[0], ptr[batch], ptr[batch + 1], 0, keep)


@_compiled
def sort_rows(begin, end, offsets, best_d, best_i):
    """Sort rows ``begin`` to ``end - 1``."""
    for row in range(begin, end):
        _sort(offsets[row], offsets[row + 1], best_d, best_i)


@_compiled
def farthest(first, last, x, ptr, starts, out, nearest):
    """Write for clouds ``first`` to ``last - 1`` points that are far from those before.

    ``nearest`` holds how far each point is from them; -1 for those that are among them.
    """
    zero = nearest.dtype.type(0)
    for cloud in range(first, last):
        begin, end = ptr[cloud], ptr[cloud + 1]
        nearest[begin:end] = np.inf
        chosen = starts[cloud]
        for i in range(out.shape[1]):
            out[cloud, i] = chosen
            nearest[chosen] = -1
            best, furthest = begin, zero - 2
            for point in range(begin, end):
                total = zero
                for axis in range(x.shape[1]):
                    difference = x[point, axis] - x[chosen, axis]
                    total += difference * difference
                nearest[point] = min(nearest[point], total)
                if nearest[point] > furthest:
                    best, furthest = point, nearest[point]
            chosen = best
