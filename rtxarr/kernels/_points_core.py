"""How neighbours in space are found, once for numba's CPU and GPU code: the same to the bit.

A squared distance is the sum of the squared differences, added in the order of the axes, each
operation rounded once to the type of the points. Of equally distant points that with the smaller
number comes first. So what is found depends on neither the device nor the grid.

Points are sorted by the cells of a grid over their first three axes, or are all in one cell. A
search looks at cells in cubes of growing size around the query's own, until what is outside the
cube is further than what has been found. ``SLACK``, a part of a cell's width, is far more than
rounding can move a point in a grid of up to ``MOST_CELLS`` an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

MOST_CELLS = 4096
SLACK = np.float32(0.01)
TINY = float(np.finfo(np.float32).tiny), float(np.finfo(np.float64).tiny)


def build(
    jit: Callable, mul: Callable, add: Callable, scalar: type, *, in_space: bool = False
) -> SimpleNamespace:
    """Return the functions below, each passed through ``jit``.

    ``scalar`` is the type in which cells are reckoned, and ``in_space`` is for points with three
    axes only.
    """
    zero, infinity, slack = scalar(0), scalar(np.inf), scalar(SLACK)

    if in_space:

        @jit
        def distance(y, query, xt, place):
            a, b = y[query, 0] - xt[0, place], y[query, 1] - xt[1, place]
            c = y[query, 2] - xt[2, place]
            return add(add(mul(a, a), mul(b, b)), mul(c, c))

    else:

        @jit
        def distance(y, query, xt, place):
            difference = y[query, 0] - xt[0, place]
            total = mul(difference, difference)
            for axis in range(1, y.shape[1]):
                difference = y[query, axis] - xt[axis, place]
                total = add(total, mul(difference, difference))
            return total

    @jit
    def precedes(d, i, other_d, other_i):
        return d < other_d or (d == other_d and i < other_i)

    # What is kept of a query: up to k entries from base on, at a distance of step.

    @jit
    def insert(d, i, count, kept):
        """Keep the nearest, sorted."""
        k, base, step, best_d, best_i = kept
        if count == k:
            last = base + (k - 1) * step
            if not precedes(d, i, best_d[last], best_i[last]):
                return count
        else:
            count += 1
        place = base + (count - 1) * step
        while place > base and precedes(d, i, best_d[place - step], best_i[place - step]):
            best_d[place], best_i[place] = best_d[place - step], best_i[place - step]
            place -= step
        best_d[place], best_i[place] = d, i
        return count

    @jit
    def append(d, i, count, kept):
        """Keep all, in the order in which they are met."""
        _, base, _, best_d, best_i = kept
        best_d[base + count], best_i[base + count] = d, i
        return count + 1

    @jit
    def tally(d, i, count, kept):
        """Keep none."""
        return count + 1

    @jit
    def worst_kept(count, kept, limit):
        """Return the distance from which on a further point is not kept."""
        k, base, step, best_d, _ = kept
        return best_d[base + (k - 1) * step] if count == k else limit

    @jit
    def worst_within(count, kept, limit):
        return limit

    def scanner(take, worst):
        """Return what looks at a run of points, one by one."""

        @jit
        def scan(y, query, grid, begin, end, skip, limit, count, kept):
            xt, order = grid[0], grid[1]
            bound = worst(count, kept, limit)
            for place in range(begin, end):
                d = distance(y, query, xt, place)
                if d <= bound and order[place] != skip:
                    count = take(d, order[place], count, kept)
                    bound = worst(count, kept, limit)
            return count

        return scan

    @jit
    def position(y, query, axis, lo, inverse, dims):
        """Return where a query is along an axis, in cells, and its cell."""
        if axis >= y.shape[1] or dims[axis] == 1:
            return zero, np.int64(0)
        t = (y[query, axis] - lo[axis]) * inverse
        if t <= zero:
            return t, np.int64(0)
        if t >= scalar(dims[axis]):
            return t, dims[axis] - 1
        return t, np.int64(t)

    @jit
    def gap(t, cell, ring, n_cells):
        """Return how far, in cells, the nearest side of the cube is that has cells behind it."""
        nearest = infinity
        if cell - ring > 0:
            nearest = t - scalar(cell - ring)
        if cell + ring < n_cells - 1:
            nearest = min(nearest, scalar(cell + ring + 1) - t)
        return nearest

    def searcher(scan, worst):
        """Return what finds the points around one query; it returns how many it kept."""

        @jit
        def search(y, query, batch, grid, skip, limit, kept):
            _, _, cells, lo, inverse, width, dims = grid
            # Squares so small round by more than the slack.
            tiny = TINY[0] if y.itemsize == 4 else TINY[1]
            tx, cx = position(y, query, 0, lo, inverse, dims)
            ty, cy = position(y, query, 1, lo, inverse, dims)
            tz, cz = position(y, query, 2, lo, inverse, dims)
            nx, ny, nz = dims[0], dims[1], dims[2]
            count, ring, more = np.int64(0), np.int64(0), True
            while more:
                left, right = max(cx - ring, 0), min(cx + ring, nx - 1)
                for z in range(max(cz - ring, 0), min(cz + ring, nz - 1) + 1):
                    for row in range(max(cy - ring, 0), min(cy + ring, ny - 1) + 1):
                        first = ((batch * nz + z) * ny + row) * nx
                        whole = abs(z - cz) == ring or abs(row - cy) == ring
                        # Cells of a row follow each other, and so do their points.
                        if whole or cx - ring >= 0:
                            begin = cells[first + left]
                            end = cells[first + (right if whole else left) + 1]
                            count = scan(y, query, grid, begin, end, skip, limit, count, kept)
                        if not whole and cx + ring < nx:
                            begin, end = cells[first + right], cells[first + right + 1]
                            count = scan(y, query, grid, begin, end, skip, limit, count, kept)
                side = min(gap(tx, cx, ring, nx), gap(ty, cy, ring, ny), gap(tz, cz, ring, nz))
                more = side < infinity
                if more and side > slack:
                    reach = (side - slack) * width
                    more = worst(count, kept, limit) + tiny >= reach * reach
                ring += 1
            return count

        return search

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

    return SimpleNamespace(**locals())
