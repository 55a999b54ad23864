"""numba's CPU code for points; it runs without Python's lock, and compiled code is kept on disk."""

from __future__ import annotations

import functools

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


def _scanner(take, zero):
    """Return what looks at a run of points, a tile at a time: each distance is added up alike."""

    @_compiled
    def scan(y, query, xt, order, begin, end, skip, limit, count, k, base, step, best_d, best_i):
        found = np.empty(_TILE, xt.dtype)
        for start in range(begin, end, _TILE):
            n = min(_TILE, end - start)
            found[:n] = zero
            for axis in range(xt.shape[0]):
                here, row = y[query, axis], xt[axis, start : start + n]
                for j in range(n):
                    difference = here - row[j]
                    found[j] += difference * difference
            for j in range(n):
                if found[j] <= limit and order[start + j] != skip:
                    i = order[start + j]
                    count = take(found[j], i, count, k, base, step, best_d, best_i)
        return count

    return scan


@functools.cache
def search(kind: str, dtype: np.dtype, n_axes: int):
    """Return the search of queries ``visit[begin:end]``; ``kind`` as in ``points``.

    ``n_axes``: up to 3, or 4 for any more.
    """
    scalar = np.dtype(dtype).type
    core = build(_compiled, _mul, _add, scalar, in_space=n_axes == 3)
    take = getattr(core, kind)
    worst = core.worst_kept if kind == "insert" else core.worst_within
    scan = _scanner(take, scalar(0)) if n_axes > 3 else core.scanner(take)
    find = core.searcher(scan, worst)

    @_compiled
    def loop(
        begin, end, visit, y, batches, xt, order, cells, lo, inverse, width, dims,
        other, limit, k, starts, step, counts, best_d, best_i,
    ):  # fmt: skip
        for v in range(begin, end):
            query = visit[v]
            counts[query] = find(
                y, query, batches[query], xt, order, cells, lo, inverse, width, dims,
                query if other else -1, limit, k, starts[query], step, best_d, best_i,
            )  # fmt: skip

    return loop


@functools.cache
def sort_rows(dtype: np.dtype):
    """Return the sorting of rows ``begin`` to ``end - 1``."""
    sort = build(_compiled, _mul, _add, np.dtype(dtype).type).sort

    @_compiled
    def loop(begin, end, offsets, best_d, best_i):
        for row in range(begin, end):
            sort(offsets[row], offsets[row + 1], best_d, best_i)

    return loop


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
