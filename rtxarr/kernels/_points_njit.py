"""numba's CPU code for points; it runs without Python's lock, and compiled code is kept on disk."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._points_core import MOST, SLACK, TINY, sorting

_compiled = njit(cache=True, error_model="numpy", nogil=True)
# Distances that are worked out together, several at a time in vector registers.
_TILE = 64


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


def _build(jit, in_space):
    """Return the functions of a search, each passed through ``jit``.

    ``in_space`` is for points with three axes only.
    """

    if in_space:

        @jit
        def distance(y, query, xt, place):
            a, b = y[query, 0] - xt[0, place], y[query, 1] - xt[1, place]
            c = y[query, 2] - xt[2, place]
            return a * a + b * b + c * c

    else:

        @jit
        def distance(y, query, xt, place):
            difference = y[query, 0] - xt[0, place]
            total = difference * difference
            for axis in range(1, y.shape[1]):
                difference = y[query, axis] - xt[axis, place]
                total += difference * difference
            return total

    @jit
    def precedes(d, i, other_d, other_i):
        return d < other_d or (d == other_d and i < other_i)

    # What is kept of a query: up to k entries from base on.

    @jit
    def insert(d, i, count, kept):
        """Keep the nearest, sorted."""
        k, base, best_d, best_i = kept
        if count == k:
            last = base + k - 1
            if not precedes(d, i, best_d[last], best_i[last]):
                return count
        else:
            count += 1
        place = base + count - 1
        while place > base and precedes(d, i, best_d[place - 1], best_i[place - 1]):
            best_d[place], best_i[place] = best_d[place - 1], best_i[place - 1]
            place -= 1
        best_d[place], best_i[place] = d, i
        return count

    @jit
    def append(d, i, count, kept):
        """Keep all, in the order in which they are met."""
        _, base, best_d, best_i = kept
        best_d[base + count], best_i[base + count] = d, i
        return count + 1

    @jit
    def tally(d, i, count, kept):
        """Keep none."""
        return count + 1

    @jit
    def worst_kept(count, kept, limit):
        """Return the distance from which on a further point is not kept."""
        k, base, best_d, _ = kept
        return best_d[base + k - 1] if count == k else limit

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
            return 0.0, np.int64(0)
        t = (y[query, axis] - lo[axis]) * inverse
        if t <= 0.0:
            return t, np.int64(0)
        if t >= dims[axis]:
            return t, dims[axis] - 1
        return t, np.int64(t)

    @jit
    def gap(t, cell, ring, n_cells):
        """Return how far, in cells, the nearest side of the cube is that has cells behind it."""
        nearest = np.inf
        if cell - ring > 0:
            nearest = t - (cell - ring)
        if cell + ring < n_cells - 1:
            nearest = min(nearest, (cell + ring + 1) - t)
        return nearest

    def searcher(scan, worst):
        """Return what finds the points around one query; it returns how many it kept."""

        @jit
        def search(y, query, batch, grid, skip, limit, kept):
            _, _, cells, lo, inverse, width, dims = grid
            # Smaller squares round by more than the slack.
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
                more = side < np.inf
                if more and side > SLACK:
                    reach = (side * MOST - SLACK) * width
                    more = worst(count, kept, limit) + tiny >= reach * reach
                ring += 1
            return count

        return search

    return SimpleNamespace(**locals())


def _scanner(jit, take, worst):
    """Return what looks at a run of points, a tile at a time: each distance is added up alike."""

    @jit
    def scan(y, query, grid, begin, end, skip, limit, count, kept):
        xt, order = grid[0], grid[1]
        found = np.empty(_TILE, xt.dtype)
        bound = worst(count, kept, limit)
        for start in range(begin, end, _TILE):
            n = min(_TILE, end - start)
            found[:n] = 0
            for axis in range(xt.shape[0]):
                here, row = y[query, axis], xt[axis, start : start + n]
                for j in range(n):
                    difference = here - row[j]
                    found[j] += difference * difference
            for j in range(n):
                if found[j] <= bound and order[start + j] != skip:
                    count = take(found[j], order[start + j], count, kept)
                    bound = worst(count, kept, limit)
        return count

    return scan


def _searcher(kind, where):
    """Return the search of one query; ``where`` is "flat" (one or two axes), "in_space", "high"."""
    jit = _named(f"{kind}_{where}")
    core = _build(jit, where == "in_space")
    take = getattr(core, kind)
    worst = core.worst_kept if kind == "insert" else core.worst_within
    scan = _scanner(jit, take, worst) if where == "high" else core.scanner(take, worst)
    return core.searcher(scan, worst)


_insert_flat = _searcher("insert", "flat")
_insert_in_space = _searcher("insert", "in_space")
_insert_high = _searcher("insert", "high")
_append_flat = _searcher("append", "flat")
_append_in_space = _searcher("append", "in_space")
_append_high = _searcher("append", "high")
_tally_flat = _searcher("tally", "flat")
_tally_in_space = _searcher("tally", "in_space")
_tally_high = _searcher("tally", "high")
_sort = sorting(_named("sort"))

# Searches of the queries visit[begin:end]. Numba keeps compiled code of functions of a module, but
# not of such as are made by others, so these are written out.


@_compiled
def insert_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def insert_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def insert_high(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_high(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _append_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _append_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_high(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _append_high(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _tally_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _tally_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_high(begin, end, visit, y, batches, grid, others, limit, k, starts, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], best_d, best_i
        skip = query if others else -1
        counts[query] = _tally_high(y, query, batches[query], grid, skip, limit, kept)


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
