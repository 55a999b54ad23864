"""Neighbours in space, exact: the nearest points, those within a distance, and thinning out.

See ``_points_core`` for the arithmetic, which is the same on the CPU and on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, launch, namespace, runs_kernels, to_device
from rtxarr.kernels._points_core import MOST_CELLS
from rtxarr.kernels.sampling import offsets_of

__all__ = ["Grid", "all_within", "build_grid", "ends", "farthest", "nearest", "visits"]

# Work of a thread on the CPU, at least: queries, or rows to sort.
_SHARE = 2048
# Blocks that a GPU runs at once, of those that go over points several times.
_BLOCKS = 4 if _SIMULATING else 264
# Points of a cloud that one block thins out, which then takes one launch in all.
_ONE_BLOCK = 8 if _SIMULATING else 32_768
# Lengths of the lists in which GPU code keeps nearest points; the last is for float32 alone.
_LENGTHS = (1, 4, 8, 16, 32, 64)


class Grid(NamedTuple):
    """Points sorted by the cells of a grid.

    Attributes
    ----------
    xt : array, shape (n_axes, n_points)
        The points' coordinates in that order. On a GPU those of up to three axes are packed, shape
        (4 * n_points,); see ``_points_grid_cuda``.
    order : array of int64, shape (n_points,)
        Their numbers. On a GPU they come in any order within a cell.
    cells : array of int64, shape (n_batches * n_cells + 1,)
        Where each cell begins; those of a batch follow each other. On a GPU int32.
    lo : NumPy array, shape (3,)
        The corner of the grid.
    inverse, width : scalar
        Cells a unit of length, and the width of a cell.
    dims : NumPy array of int64, shape (3,)
        Cells along each axis.
    """

    xt: Any
    order: Any
    cells: Any
    lo: np.ndarray
    inverse: Any
    width: Any
    dims: np.ndarray


def ends(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest coordinates of points, with a wait for a GPU.

    Those of an axis with a NaN are NaN.
    """
    xp = namespace(x)
    n, n_axes = x.shape
    if n == 0:
        return np.zeros(n_axes, x.dtype), np.zeros(n_axes, x.dtype)
    if not runs_kernels(x) or n_axes > 3:
        found = to_device(xp.stack([xp.min(x, axis=0), xp.max(x, axis=0)]), "cpu")
        return found[0], found[1]
    from rtxarr.kernels import _points_grid_cuda as gpu

    n_blocks = max(1, min(_BLOCKS, x.size // (8 * gpu.ENDS_THREADS)))
    out = xp.empty((2, n_blocks, n_axes), dtype=x.dtype)
    flat = xp.reshape(x, (-1,))
    launch(gpu.ends(x.dtype), n_blocks, (flat, n_axes, out), block=gpu.ENDS_THREADS)
    low, high = to_device(out, "cpu")
    return np.min(low, axis=0), np.max(high, axis=0)


def build_grid(
    x: Any,
    batches: Any,
    n_batches: int,
    found: tuple[np.ndarray, np.ndarray],
    width: float | None,
    *,
    crowd: float | None = None,
) -> Grid:
    """Sort points by cells.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes)
    batches : array of int64, shape (n_points,)
        The batch of each point, in order.
    n_batches : int
    found : tuple of two NumPy arrays, shape (n_axes,)
        The :func:`ends` of the points.
    width : float or None
        Of a cell; None puts all points of a batch into one. Cells become wider if there would be
        too many.
    crowd : float, optional
        Points that a cell should have, of those that have any. If they have many more, cells
        become narrower; on a GPU with a wait for how many they have.

    Returns
    -------
    Grid
    """
    scalar = x.dtype.type
    n = x.shape[0]
    lo, dims = np.zeros(3, x.dtype), np.ones(3, np.int64)
    width = None if n == 0 else width
    if width is not None:
        low, high = (end[:3].astype(np.float64) for end in found)
        lo[: low.size] = low
    while True:
        size = scalar(1)
        if width is not None:
            width, dims = _cut(high - low, width, n, n_batches)
            size = scalar(width)
        grid = Grid(None, None, None, lo, scalar(1) / size, size, dims)
        sort, n_occupied = _sorting(x, batches, n_batches, grid)
        if width is None or crowd is None:
            break
        # On a surface few cells have points, and those many: make the cells narrower, once.
        mean = n / n_occupied()
        if mean <= 2 * crowd:
            break
        width, crowd = float(size) * (crowd / mean) ** 0.5, None
    xt, order, cells = sort()
    return grid._replace(xt=xt, order=order, cells=cells)


def visits(y: Any, batches: Any, n_batches: int, grid: Grid, *, same: bool) -> Any:
    """Return an order of queries in which those that are near in space follow each other.

    Parameters
    ----------
    y : array of the points' dtype, shape (n_queries, n_axes)
    batches : array of int64, shape (n_queries,)
    n_batches : int
    grid : Grid
    same : bool
        The queries are the points.

    Returns
    -------
    array
        What searches take: their numbers, or on a GPU the packed queries.
    """
    if same:
        return grid.xt if _packs(y) else grid.order
    xt, order, _ = _sorting(y, batches, n_batches, grid)[0]()
    return xt if _packs(y) else order


def _packs(x):
    """Tell whether a search takes points packed."""
    return runs_kernels(x) and x.shape[1] <= 3


def _sorting(x, batches, n_batches, grid):
    """Begin to sort points by cells.

    Returns
    -------
    sort : function
        Gives the first three fields of a grid.
    n_occupied : function
        Tells how many cells have points.
    """
    if runs_kernels(x) and x.shape[0] >= 2**31 - 1:
        raise ValueError(f"a GPU searches fewer than 2**31 - 1 points, got {x.shape[0]}")
    return (_sorting_on_gpu if _packs(x) else _sorting_plainly)(x, batches, n_batches, grid)


def _sorting_plainly(x, batches, n_batches, grid):
    xp = namespace(x, batches)
    n, n_cells = x.shape[0], n_batches * int(np.prod(grid.dims))
    cell = batches
    if np.all(grid.dims == 1):
        order = xp.arange(n, dtype=np.int64)
    else:
        cell = _cells_of(xp, x, batches, grid)
        order = xp.astype(xp.argsort(cell, stable=True), np.int64, copy=False)
        cell = xp.take(cell, order)

    def sort():
        cells = xp.searchsorted(cell, xp.arange(n_cells + 1, dtype=np.int64))
        xt = xp.ascontiguousarray(xp.take(x, order, axis=0).T)
        return xt, order, xp.astype(cells, np.int64, copy=False)

    return sort, lambda: 1 + int(xp.count_nonzero(cell[1:] != cell[:-1]))


def _cells_of(xp, x, batches, grid):
    """Return the number of each point's cell; outside the grid the nearest one's."""
    cell = batches
    for axis in (2, 1, 0):
        if grid.dims[axis] == 1:
            continue
        t = (x[:, axis] - grid.lo[axis]) * grid.inverse
        t = xp.clip(xp.floor(t), 0, float(grid.dims[axis] - 1))
        cell = cell * int(grid.dims[axis]) + xp.astype(t, np.int64)
    return cell


def _sorting_on_gpu(x, batches, n_batches, grid):
    from rtxarr.kernels import _points_grid_cuda as gpu

    xp = namespace(x, batches)
    n, n_cells = x.shape[0], n_batches * int(np.prod(grid.dims))
    kernels = gpu.sort(x.dtype)
    cell, place = xp.empty(n, dtype=np.int32), xp.empty(n, dtype=np.int32)
    counts = xp.zeros(n_cells, dtype=np.int32)
    box = (*grid.lo, grid.inverse, *grid.dims)
    launch(kernels.count, n, (x, batches, *box, cell, place, counts))

    def sort():
        begins = xp.zeros(n_cells + 1, dtype=np.int32)
        begins[1:] = xp.cumulative_sum(counts, dtype=np.int32)
        packed, order = xp.empty(4 * n, dtype=x.dtype), xp.empty(n, dtype=np.int64)
        launch(kernels.move, n, (x, cell, place, begins, packed, order))
        return packed, order, begins

    return sort, lambda: int(xp.count_nonzero(counts))


def _cut(extents, width, n, n_batches):
    """Return a width of cells, at least that asked for, and the cells along each axis."""
    width = max(width, float(extents.max(initial=0)) / (MOST_CELLS - 1))
    dims = np.ones(3, np.int64)
    while True:
        dims[: extents.size] = np.floor(extents / width).astype(np.int64) + 1
        most = min(4 * (n + n_batches) + 64, 2**31 - 2)
        if n_batches * float(np.prod(dims, dtype=np.float64)) <= most:
            return width, dims
        width *= 1.2


def nearest(
    y: Any, batches: Any, visit: Any, grid: Grid, k: int, *, others: bool, limit: float = np.inf
) -> tuple[Any, Any, Any]:
    """Find the ``k`` nearest points of each query.

    Parameters
    ----------
    y : array of the points' dtype, shape (n_queries, n_axes)
    batches : array of int64, shape (n_queries,)
        Whose points to look at.
    visit : array
        The queries' :func:`visits`.
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
    best_d, best_i = xp.empty(n * k, dtype=y.dtype), xp.empty(n * k, dtype=np.int64)
    starts = xp.arange(n, dtype=np.int64) * k
    counts = xp.empty(n, dtype=np.int64)
    arguments = y, batches, visit, grid, int(others), y.dtype.type(limit), k, starts
    if runs_kernels(y):
        _nearest_on_gpu(*arguments, (counts, best_d, best_i))
    else:
        _search("insert", *arguments, (counts, best_d, best_i))
    return counts, xp.reshape(best_d, (n, k)), xp.reshape(best_i, (n, k))


def _nearest_on_gpu(y, batches, visit, grid, others, limit, k, starts, found):
    """Find a few of the nearest points of each query, then those that come after them."""
    from rtxarr.kernels import _points_cuda as gpu

    longest = _longest_list(y)
    for first in range(0, k, longest):
        part = min(k - first, longest)
        n = next(length for length in _LENGTHS if length >= part)
        options = others, limit, part, first, starts
        _launch_search(gpu.search(y.dtype, n, _packs(y)), y, batches, visit, grid, options, found)


def _longest_list(y):
    return _LENGTHS[-1] if y.dtype.itemsize == 4 else _LENGTHS[-2]


def _launch_search(kernel, y, batches, visit, grid, options, found):
    from rtxarr.kernels import _points_cuda as gpu

    if _packs(y):
        box = (*grid.lo, grid.inverse, grid.width, *grid.dims)
        arguments = visit, batches, grid.xt, grid.cells, *box
    else:
        arguments = y, batches, grid.xt, grid.cells
    n_blocks = -(-y.shape[0] // gpu.THREADS)
    launch(kernel, n_blocks, (*arguments, *options, *found), block=gpu.THREADS)


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
    counts = xp.empty(n, dtype=np.int64)
    none = xp.empty(0, dtype=y.dtype), xp.empty(0, dtype=np.int64)
    search = _all_on_gpu if runs_kernels(y) else _search
    options = y, batches, visit, grid, int(others), limit
    search("tally", *options, 0, xp.zeros(n, dtype=np.int64), (counts, *none))
    offsets = offsets_of(xp, counts)
    longest = xp.max(counts) if n else offsets[0]
    total, longest = to_device(xp.stack([offsets[-1], longest]), "cpu").tolist()
    found = xp.empty(total, dtype=y.dtype), xp.empty(total, dtype=np.int64)
    if runs_kernels(y) and longest <= _longest_list(y):
        _nearest_on_gpu(*options, max(longest, 1), offsets, (counts, *found))
        return offsets, *found
    search("append", *options, 0, offsets, (counts, *found))
    if runs_kernels(y):
        from rtxarr.kernels import _points_cuda as gpu

        launch(gpu.sort_rows(y.dtype), n, (offsets, *found))
    else:
        from rtxarr.kernels import _points_njit as host

        _in_threads(host.sort_rows, n, (offsets, *found))
    return offsets, *found


def _all_on_gpu(kind, y, batches, visit, grid, others, limit, _, starts, found):
    from rtxarr.kernels import _points_cuda as gpu

    kernel = getattr(gpu, kind)(y.dtype, _packs(y))
    _launch_search(kernel, y, batches, visit, grid, (others, limit, starts), found)


def _search(kind, y, batches, visit, grid, others, limit, k, starts, found):
    """Go over the queries; ``kind`` is "insert", "append" or "tally", as in ``_points_core``."""
    from rtxarr.kernels import _points_njit as host

    where = "flat" if y.shape[1] < 3 else "in_space" if y.shape[1] == 3 else "high"
    loop = getattr(host, f"{kind}_{where}")
    options = others, limit, k, starts
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
    if not runs_kernels(x):
        from rtxarr.kernels import _points_njit as host

        held = xp.empty(x.shape[0], dtype=x.dtype)
        _in_threads(host.farthest, n_clouds, (x, ptr, starts, out, held), share=1)
    elif n_clouds:
        _farthest_on_gpu(xp, x, ptr, starts, out)
    return out


def _farthest_on_gpu(xp, x, ptr, starts, out):
    from rtxarr.kernels import _farthest_cuda as gpu

    n_clouds, n = out.shape
    # Large clouds are for many blocks. On average: sizes are not known without a wait.
    each = x.shape[0] // n_clouds
    n_blocks = 1
    if each > _ONE_BLOCK:
        n_blocks = max(1, min(gpu.THREADS, _BLOCKS // n_clouds, -(-each // (4 * gpu.THREADS))))
    shape = (2, n_clouds, n_blocks)
    between = xp.empty(shape, dtype=x.dtype), xp.empty(shape, dtype=np.int64)
    packed = x.shape[1] <= 3
    held = xp.full(0 if packed else x.shape[0], np.inf, dtype=x.dtype)
    if packed:
        x, plain = xp.empty(4 * x.shape[0], dtype=x.dtype), x
        launch(gpu.pack(x.dtype), plain.shape[0], (plain, x))
    kernel = gpu.rounds(x.dtype, packed)
    for first in range(0, n, n if n_blocks == 1 else 1):
        last = n if n_blocks == 1 else first + 1
        arguments = x, held, ptr, starts, *between, out, first, last
        launch(kernel, n_clouds * n_blocks, arguments, block=gpu.THREADS)


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
