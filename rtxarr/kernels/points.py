"""Neighbours in space, exact: the nearest points, those within a distance, and thinning out.

See ``_points_core`` for the arithmetic, which is the same on the CPU and on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels, to_device
from rtxarr.kernels._points_core import MOST_CELLS
from rtxarr.kernels.sampling import offsets_of

__all__ = ["Grid", "all_within", "build_grid", "farthest", "nearest"]

# Work of a thread on the CPU, at least: queries, or rows to sort.
_SHARE = 2048


class Grid(NamedTuple):
    """Points sorted by the cells of a grid.

    Attributes
    ----------
    xt : array, shape (n_axes, n_points)
        The points' coordinates in that order.
    order : array of int64, shape (n_points,)
        Their numbers.
    cells : array of int64, shape (n_batches * n_cells + 1,)
        Where each cell begins; those of a batch follow each other.
    lo : array, shape (3,)
        The corner of the grid.
    inverse, width : scalar
        Cells a unit of length, and the width of a cell.
    dims : array of int64, shape (3,)
        Cells along each axis.
    """

    xt: Any
    order: Any
    cells: Any
    lo: Any
    inverse: Any
    width: Any
    dims: Any


def build_grid(x: Any, ptr: Any, width: float | None, *, crowd: float | None = None) -> Grid:
    """Sort points by cells, on a GPU with a wait for the extent of the points.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes)
    ptr : array of int64, shape (n_batches + 1,)
        Batch ``b`` has the points ``ptr[b]`` to ``ptr[b + 1] - 1``.
    width : float or None
        Of a cell; None puts all points of a batch into one. Cells become wider if there would be
        too many.
    crowd : float, optional
        Points that a cell should have, of those that have any. If they have many more, cells
        become narrower.

    Returns
    -------
    Grid
    """
    xp = namespace(x, ptr)
    scalar = x.dtype.type
    n, n_batches = x.shape[0], ptr.shape[0] - 1
    lo, dims = np.zeros(3, x.dtype), np.ones(3, np.int64)
    if width is None or n == 0:
        order = xp.arange(n, dtype=np.int64)
        return _grid(xp, x, order, ptr, lo, scalar(1), dims)
    low, extents = extent(x)
    lo[: low.size] = low
    batch = xp.searchsorted(ptr, xp.arange(n, dtype=np.int64), side="right") - 1
    while True:
        width, dims = _cut(extents, width, n, n_batches)
        width = scalar(width)
        cell = cells_of(x, batch, lo, scalar(1) / width, dims)
        order = xp.argsort(cell, stable=True)
        cell = xp.take(cell, order)
        if crowd is None:
            break
        # On a surface few cells have points, and those many: make the cells narrower, once.
        mean = n / (1 + int(xp.count_nonzero(cell[1:] != cell[:-1])))
        if mean <= 2 * crowd:
            break
        width, crowd = float(width) * (crowd / mean) ** 0.5, None
    n_cells = n_batches * int(np.prod(dims))
    bounds = xp.searchsorted(cell, xp.arange(n_cells + 1, dtype=np.int64))
    return _grid(xp, x, order, bounds, lo, width, dims)


def _cut(extents, width, n, n_batches):
    """Return a width of cells, at least that asked for, and the cells along each axis."""
    width = max(width, float(extents.max(initial=0)) / (MOST_CELLS - 1))
    dims = np.ones(3, np.int64)
    while True:
        dims[: extents.size] = np.floor(extents / width).astype(np.int64) + 1
        if n_batches * float(np.prod(dims, dtype=np.float64)) <= 4 * (n + n_batches) + 64:
            return width, dims
        width *= 1.2


def _grid(xp, x, order, cells, lo, width, dims):
    xt = xp.ascontiguousarray(xp.take(x, order, axis=0).T)
    order, cells = (xp.astype(a, np.int64, copy=False) for a in (order, cells))
    inverse = lo.dtype.type(1) / width
    return Grid(xt, order, cells, xp.asarray(lo), inverse, width, xp.asarray(dims))


def extent(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest coordinates, and the extents as float64, of up to three axes."""
    xp = namespace(x)
    first = x[:, :3]
    ends = xp.stack([xp.min(first, axis=0), xp.max(first, axis=0)])
    low, high = to_device(ends, "cpu").astype(np.float64)
    return low, high - low


def cells_of(x: Any, batch: Any, lo: np.ndarray, inverse: Any, dims: np.ndarray) -> Any:
    """Return the number of each point's cell; outside the grid the nearest one's."""
    xp = namespace(x)
    cell = batch
    for axis in (2, 1, 0):
        if dims[axis] == 1:
            continue
        t = (x[:, axis] - lo[axis]) * inverse
        t = xp.clip(xp.floor(t), 0, float(dims[axis] - 1))
        cell = cell * int(dims[axis]) + xp.astype(t, np.int64)
    return cell


def nearest(
    y: Any, batches: Any, visit: Any, grid: Grid, k: int, *, others: bool, limit: float = np.inf
) -> tuple[Any, Any, Any]:
    """Find the ``k`` nearest points of each query.

    Parameters
    ----------
    y : array of the points' dtype, shape (n_queries, n_axes)
    batches : array of int64, shape (n_queries,)
        Whose points to look at.
    visit : array of int64, shape (n_queries,)
        An order of the queries in which those that are near in space follow each other.
    grid : Grid
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
    xp = namespace(y, grid.xt)
    n = y.shape[0]
    on_gpu = runs_kernels(y)
    # Neighbouring threads write neighbouring words; on the CPU a row is one piece of memory.
    shape, step = ((k, n), n) if on_gpu else ((n, k), 1)
    best_d, best_i = xp.empty(n * k, dtype=y.dtype), xp.empty(n * k, dtype=np.int64)
    starts = xp.arange(n, dtype=np.int64) * (1 if on_gpu else k)
    counts = xp.empty(n, dtype=np.int64)
    options = int(others), y.dtype.type(limit), k, starts, step
    _search("insert", y, batches, visit, grid, options, (counts, best_d, best_i))
    best_d, best_i = xp.reshape(best_d, shape), xp.reshape(best_i, shape)
    if on_gpu:
        best_d, best_i = xp.ascontiguousarray(best_d.T), xp.ascontiguousarray(best_i.T)
    return counts, best_d, best_i


def all_within(
    y: Any, batches: Any, visit: Any, grid: Grid, limit: float, *, others: bool
) -> tuple[Any, Any, Any]:
    """Find all points within a distance of each query.

    Parameters
    ----------
    y, batches, visit, grid, others
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
    xp = namespace(y, grid.xt)
    n = y.shape[0]
    limit = y.dtype.type(limit)
    none_d, none_i = xp.empty(0, dtype=y.dtype), xp.empty(0, dtype=np.int64)
    counts = xp.empty(n, dtype=np.int64)
    starts = xp.zeros(n, dtype=np.int64)
    options = int(others), limit, 0, starts, 1
    _search("tally", y, batches, visit, grid, options, (counts, none_d, none_i))
    offsets = offsets_of(xp, counts)
    total = int(offsets[-1])
    best_d, best_i = xp.empty(total, dtype=y.dtype), xp.empty(total, dtype=np.int64)
    options = int(others), limit, 0, offsets, 1
    _search("append", y, batches, visit, grid, options, (counts, best_d, best_i))
    if runs_kernels(y):
        from rtxarr.kernels import _points_cuda as gpu

        launch(gpu.sort_rows(y.dtype), n, (offsets, best_d, best_i))
    else:
        from rtxarr.kernels import _points_njit as host

        _in_threads(host.sort_rows, n, (offsets, best_d, best_i))
    return offsets, best_d, best_i


def _search(kind, y, batches, visit, grid, options, found):
    """Go over the queries; ``kind`` is "insert", "append" or "tally", as in ``_points_core``."""
    if runs_kernels(y):
        from rtxarr.kernels import _points_cuda as gpu

        kernel = gpu.search(kind, y.dtype, y.shape[1] == 3)
        launch(kernel, y.shape[0], (visit, y, batches, *grid, *options, *found))
    else:
        from rtxarr.kernels import _points_njit as host

        where = "flat" if y.shape[1] < 3 else "in_space" if y.shape[1] == 3 else "high"
        loop = getattr(host, f"{kind}_{where}")
        _in_threads(loop, y.shape[0], (visit, y, batches, tuple(grid), *options, *found))


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
    held = xp.empty(x.shape[0], dtype=x.dtype)
    arguments = (x, ptr, starts, out, held)
    if runs_kernels(x):
        from rtxarr.kernels import _points_cuda as gpu

        launch(gpu.farthest(x.dtype), n_clouds, arguments, block=gpu.THREADS)
    else:
        from rtxarr.kernels import _points_njit as host

        _in_threads(host.farthest, n_clouds, arguments, share=1)
    return out


def _in_threads(loop: Callable, n: int, arguments: tuple, share: int = _SHARE) -> None:
    """Call ``loop(begin, end, *arguments)`` for pieces of ``range(n)``, which are independent."""
    n_threads = min(os.cpu_count() or 1, n // share)
    if n_threads <= 1:
        loop(0, n, *arguments)
        return
    # Several pieces a thread, since some take longer than others.
    bounds = np.linspace(0, n, 4 * n_threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(n_threads) as pool:
        pieces = [
            pool.submit(loop, begin, end, *arguments)
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        for piece in pieces:
            piece.result()
