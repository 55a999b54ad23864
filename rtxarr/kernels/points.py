"""Neighbours in space, exact: the nearest points, those within a distance, and thinning out.

See ``_points_core`` for the arithmetic, which is the same on the CPU and on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import namespace, runs_kernels, to_device
from rtxarr.kernels._points_tree import build_tree, follow, in_threads
from rtxarr.kernels.sampling import offsets_of

__all__ = ["all_within", "ends", "farthest", "nearest", "prepare"]


def ends(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest coordinates of points, with a wait for a GPU.

    Those of an axis with a NaN are NaN.
    """
    xp = namespace(x)
    n, n_axes = x.shape
    if n == 0:
        return np.zeros(n_axes, x.dtype), np.zeros(n_axes, x.dtype)
    if runs_kernels(x) and n_axes <= 3:
        from rtxarr.kernels import _points_gpu as gpu

        return gpu.ends(x)
    found = to_device(xp.stack([xp.min(x, axis=0), xp.max(x, axis=0)]), "cpu")
    return found[0], found[1]


class Search(NamedTuple):
    """What searches look at.

    Attributes
    ----------
    y : array, shape (n_queries, n_axes)
    batches : array of int64, shape (n_queries,)
        Whose points to look at.
    where : tuple
        The points, and the order of the queries, as GPU code or numba's CPU code takes them.
    """

    y: Any
    batches: Any
    where: tuple


def prepare(
    x: Any,
    batches: Any,
    ptr: Any,
    found: tuple[np.ndarray, np.ndarray],
    y: Any,
    y_batches: Any,
    *,
    k: int | None = None,
    r: float | None = None,
) -> Search:
    """Sort points, and queries, by where they are.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes)
    batches : array of int64, shape (n_points,)
        The batch of each point, in order.
    ptr : array of int64, shape (n_batches + 1,)
        Where each batch begins, and the end.
    found : tuple of two NumPy arrays, shape (n_axes,)
        The :func:`ends` of the points.
    y : array of the points' dtype, shape (n_queries, n_axes)
        The queries, which may be the points themselves.
    y_batches : array of int64, shape (n_queries,)
        Whose points to look at.
    k, r : int, float, optional
        How many are looked for, and within which distance; at least one of them. What is found
        does not depend on them.
    """
    if runs_kernels(x):
        from rtxarr.kernels import _points_gpu as gpu

        where = gpu.prepare(x, batches, ptr, found, y, y_batches, k, r)
        return Search(y, y_batches, where)
    # What the loops take: queries, and for each its number and the place of a point nearby; where
    # batches begin, the points and their numbers.
    if x.shape[1] > 3:
        here = np.arange(max(x.shape[0], y.shape[0]))
        tree = np.ascontiguousarray(x.T), x[:0, 0], 0, 0
        rest = here[: y.shape[0]], y_batches, here[: y.shape[0]], ptr, tree, here
        return Search(y, y_batches, (y, rest))
    made = build_tree(x, batches, ptr.shape[0] - 1, found)
    queries = made.points, made.order, np.arange(x.shape[0])
    if y is not x:
        queries = follow(y, y_batches, made)
    tree = made.points, made.boxes, made.n_leaves, made.highest
    rest = queries[1], y_batches, queries[2], ptr, tree, made.order
    return Search(y, y_batches, (queries[0], rest))


def nearest(search: Search, k: int, *, others: bool, limit: float = np.inf) -> tuple[Any, Any, Any]:
    """Find the ``k`` nearest points of each query.

    Parameters
    ----------
    search : Search
    k : int, at least 1
    others : bool
        Leave the point out that has the query's number.
    limit : float
        Squared distances above this do not count.

    Returns
    -------
    counts : array of int64, shape (n_queries,)
        How many were found.
    distances : array, shape (n_queries, k)
        Squared; those found are sorted by distance and then by number.
    indices : array of int64, shape (n_queries, k)
    """
    xp, y = namespace(search.y), search.y
    n, limit = y.shape[0], y.dtype.type(limit)
    best_d, best_i = xp.empty(n * k, dtype=y.dtype), xp.empty(n * k, dtype=np.int64)
    counts, starts = xp.empty(n, dtype=np.int64), xp.arange(n, dtype=np.int64) * k
    found = counts, best_d, best_i
    if runs_kernels(y):
        from rtxarr.kernels import _points_gpu as gpu

        gpu.nearest(search, others, limit, k, starts, found)
    else:
        _search("insert", search, others, limit, k, starts, found)
    return counts, xp.reshape(best_d, (n, k)), xp.reshape(best_i, (n, k))


def all_within(search: Search, limit: float, *, others: bool) -> tuple[Any, Any, Any]:
    """Find all points within a distance of each query.

    Parameters
    ----------
    search, others
        As of :func:`nearest`.
    limit : float
        The distance's square.

    Returns
    -------
    offsets : array of int64, shape (n_queries + 1,)
    distances : array, shape (n_found,)
        Squared. Query ``i`` has the entries from ``offsets[i]`` to ``offsets[i + 1] - 1``, sorted
        by distance and then by number.
    indices : array of int64, shape (n_found,)
    """
    xp, y = namespace(search.y), search.y
    n, limit = y.shape[0], y.dtype.type(limit)
    counts, zeros = xp.empty(n, dtype=np.int64), xp.zeros(n, dtype=np.int64)
    none = counts, xp.empty(0, dtype=y.dtype), xp.empty(0, dtype=np.int64)
    if runs_kernels(y):
        from rtxarr.kernels import _points_gpu as gpu

        gpu.tally(search, others, limit, zeros, none)
    else:
        _search("tally", search, others, limit, 0, zeros, none)
    offsets = offsets_of(xp, counts)
    longest = xp.max(counts) if n else offsets[0]
    total, longest = to_device(xp.stack([offsets[-1], longest]), "cpu").tolist()
    found = counts, xp.empty(total, dtype=y.dtype), xp.empty(total, dtype=np.int64)
    if not runs_kernels(y):
        from rtxarr.kernels import _points_njit as host

        _search("append", search, others, limit, 0, offsets, found)
        in_threads(host.sort_rows, n, (offsets, *found[1:]))
    elif longest <= gpu.longest_list(y.dtype):
        gpu.nearest(search, others, limit, max(longest, 1), offsets, found)
    else:
        gpu.append(search, others, limit, offsets, found)
    return offsets, *found[1:]


def _search(kind, search, others, limit, k, starts, found):
    """Go over the queries; ``kind`` is "insert", "append" or "tally", as in ``_points_njit``."""
    from rtxarr.kernels import _points_njit as host

    queries, rest = search.where
    if rest[-1].shape[0] == 0:  # no points
        found[0][...] = 0
        return
    loop = getattr(host, f"{kind}_{'packed' if queries.ndim == 1 else 'plain'}")
    arguments = queries, rest, int(others), limit, k, starts
    in_threads(loop, search.y.shape[0], (*arguments, *found))


def farthest(x: Any, ptr: Any, starts: Any, n: int) -> Any:
    """Choose points one by one, each the furthest from those before.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes)
    ptr : array of int64, shape (n_clouds + 1,)
    starts : array of int64, shape (n_clouds,)
        The first point of each cloud.
    n : int
        At most the size of the smallest cloud.

    Returns
    -------
    array of int64, shape (n_clouds, n)
        Numbers in ``x``. Of points that are equally far the first is taken.
    """
    xp = namespace(x, ptr, starts)
    n_clouds = starts.shape[0]
    out = xp.empty((n_clouds, n), dtype=np.int64)
    if not runs_kernels(x):
        from rtxarr.kernels import _points_njit as host

        held = xp.empty(x.shape[0], dtype=x.dtype)
        in_threads(host.farthest, n_clouds, (x, ptr, starts, out, held), share=1)
    elif n_clouds:
        from rtxarr.kernels import _points_gpu as gpu

        gpu.farthest(x, ptr, starts, out)
    return out
