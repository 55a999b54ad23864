"""numba's CPU code for points; it runs without Python's lock, and compiled code is kept on disk."""

from __future__ import annotations

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._points_core import build

_compiled = njit(cache=True, error_model="numpy", nogil=True)
# Distances that are worked out together, several at a time in vector registers.
_TILE = 64


@_compiled
def _mul(a, b):
    return a * b


@_compiled
def _add(a, b):
    return a + b


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
    # Cells are reckoned in float64, whatever the points' type.
    core = build(jit, _mul, _add, np.float64, in_space=where == "in_space")
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
_sort = build(_named("sort"), _mul, _add, np.float64).sort

# Searches of the queries visit[begin:end]. Numba keeps compiled code of functions of a module, but
# not of such as are made by others, so these are written out.


@_compiled
def insert_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def insert_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def insert_high(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _insert_high(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _append_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _append_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def append_high(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _append_high(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_flat(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _tally_flat(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_in_space(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
        skip = query if others else -1
        counts[query] = _tally_in_space(y, query, batches[query], grid, skip, limit, kept)


@_compiled
def tally_high(begin, end, visit, y, batches, grid, others, limit, k, starts, step, *out):
    counts, best_d, best_i = out
    for v in range(begin, end):
        query = visit[v]
        kept = k, starts[query], step, best_d, best_i
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
