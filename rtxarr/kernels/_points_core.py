"""How neighbours in space are found: what numba's CPU and GPU code share.

A squared distance is the sum of the squared differences, added in the order of the axes, each
operation rounded once to the type of the points. Of equally distant points that with the smaller
number comes first. So what is found depends on neither the device nor the order of the points.

With up to three axes the CPU searches a tree, see ``_points_tree``, and so does a GPU where the
points are much denser in some places than in others; else it searches a grid: it looks at cells in
cubes of growing size around the query's own, until what is outside the cube is further than what
has been found. ``SLACK``, a part of a cell's width, is far more than rounding can move a point in a
grid of up to ``MOST_CELLS`` an axis. Queries outside may be further off, by a part of their
distance less than ``1 - MOST``; and squares below ``TINY`` round by more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST_CELLS = 4096
# Of a tree, powers of two: points of a leaf, nodes below a node, nodes of the top level at most.
LEAF_BITS, NODE_BITS, TOP_BITS = 3, 2, 4
SLACK, MOST = 0.01, 1 - 2.0**-16
TINY = float(np.finfo(np.float32).tiny), float(np.finfo(np.float64).tiny)


def along(jit: Callable) -> Callable:
    """Return ``key(x, i, ...)``, the place of a point on a curve, made through ``jit``."""

    @jit
    def coordinate(value, low, scale, side, bits, zero):
        t = (value - low) * scale
        if not t > zero:
            return np.int64(0)
        last = (np.int64(1) << bits) - 1
        return min(np.int64(t), last) if t < side else last

    @jit
    def key(x, i, batch, l0, l1, l2, scale, side, bits, drop, room):
        """Return a word of the place of point ``i`` on a Hilbert curve, and its batch above that.

        The curve is in a cube of ``side = 2**bits`` an axis; the word has ``room`` bits of each
        coordinate, those above the lowest ``drop``. See Skilling, "Programming the Hilbert curve",
        2004, doi:10.1063/1.1751381.
        """
        zero, b, c = x.dtype.type(0), np.int64(0), np.int64(0)
        a = coordinate(x[i, 0], l0, scale, side, bits, zero)
        if x.shape[1] > 1:
            b = coordinate(x[i, 1], l1, scale, side, bits, zero)
        if x.shape[1] > 2:
            c = coordinate(x[i, 2], l2, scale, side, bits, zero)
        bit = np.int64(1) << (bits - 1)
        while bit > 1:
            below = bit - 1
            if a & bit:
                a ^= below
            if b & bit:
                a ^= below
            else:
                swap = (a ^ b) & below
                a ^= swap
                b ^= swap
            if c & bit:
                a ^= below
            else:
                swap = (a ^ c) & below
                a ^= swap
                c ^= swap
            bit >>= 1
        b ^= a
        c ^= b
        bit, turn = np.int64(1) << (bits - 1), np.int64(0)
        while bit > 1:
            if c & bit:
                turn ^= bit - 1
            bit >>= 1
        a, b, c = (a ^ turn) >> drop, (b ^ turn) >> drop, (c ^ turn) >> drop
        found = batch << 3 * room
        for j in range(room):
            found |= (a >> j & 1) << 3 * j + 2 | (b >> j & 1) << 3 * j + 1 | (c >> j & 1) << 3 * j
        return found

    return key


def sorting(jit: Callable) -> Callable:
    """Return ``sort(begin, end, best_d, best_i)``, made of functions passed through ``jit``."""

    @jit
    def precedes(d, i, other_d, other_i):
        return d < other_d or (d == other_d and i < other_i)

    @jit
    def sift(begin, root, size, best_d, best_i):
        """Move an entry of a heap down, until none below it comes later."""
        d, i = best_d[begin + root], best_i[begin + root]
        child = 2 * root + 1
        while child < size:
            at = begin + child
            if child + 1 < size and precedes(
                best_d[at], best_i[at], best_d[at + 1], best_i[at + 1]
            ):
                child += 1
                at += 1
            if not precedes(d, i, best_d[at], best_i[at]):
                break
            best_d[begin + root], best_i[begin + root] = best_d[at], best_i[at]
            root, child = child, 2 * child + 1
        best_d[begin + root], best_i[begin + root] = d, i

    @jit
    def sort(begin, end, best_d, best_i):
        """Sort a row by distance and number, with a heap: long rows are no worse."""
        n = end - begin
        for root in range(n // 2 - 1, -1, -1):
            sift(begin, root, n, best_d, best_i)
        for size in range(n - 1, 0, -1):
            last = begin + size
            best_d[begin], best_d[last] = best_d[last], best_d[begin]
            best_i[begin], best_i[last] = best_i[last], best_i[begin]
            sift(begin, 0, size, best_d, best_i)

    return sort
