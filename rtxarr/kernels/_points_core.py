"""How neighbours in space are found: what numba's CPU and GPU code share.

A squared distance is the sum of the squared differences, added in the order of the axes, each
operation rounded once to the type of the points. Of equally distant points that with the smaller
number comes first. So what is found depends on neither the device nor the order of the points.

With up to three axes the CPU searches a tree, see ``_points_tree``, and a GPU a grid: it looks at
cells in cubes of growing size around the query's own, until what is outside the cube is further
than what has been found. ``SLACK``, a part of a cell's width, is far more than rounding can move a
point in a grid of up to ``MOST_CELLS`` an axis. Queries outside may be further off, by a part of
their distance less than ``1 - MOST``; and squares below ``TINY`` round by more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST_CELLS = 4096
SLACK, MOST = 0.01, 1 - 2.0**-16
TINY = float(np.finfo(np.float32).tiny), float(np.finfo(np.float64).tiny)


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
