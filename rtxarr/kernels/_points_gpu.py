"""Searches on a GPU, seen from the host: points in a grid or a tree, and launches.

Points with up to three axes are sorted by the cells of a grid over them, those of a cell in any
order; with more axes each batch is one cell. Where nearest points are looked for and some cells
have many more than others, a tree takes the place of the grid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, launch, namespace, to_device
from rtxarr.kernels._points_core import MOST_CELLS, NODE_BITS
from rtxarr.kernels._points_tree import curves, sizes_of

__all__ = ["Grid", "append", "ends", "farthest", "longest_list", "nearest", "prepare", "tally"]

# Blocks that a GPU runs at once, of those that go over points several times.
_BLOCKS = 4 if _SIMULATING else 264
# Points of a batch, on average, below which all are in one cell.
_FEW = 64
# How many times the points of a cell a point may have around it in its own, on average: about twice
# as many in even clouds and on surfaces.
_UNEVEN = 2.5
# Points of a cloud that one block thins out, which then takes one launch in all.
_ONE_BLOCK = 8 if _SIMULATING else 32_768
# Lengths of the lists in which nearest points are kept; the last is for float32 alone.
_LENGTHS = (1, 4, 8, 16, 32, 64)


class Grid(NamedTuple):
    """Points sorted by the cells of a grid.

    Attributes
    ----------
    xt : array, shape (n_axes, n_points)
        The points' coordinates in that order. Those of up to three axes are packed, shape
        (4 * n_points,); see ``_points_grid_cuda``.
    cells : array, shape (n_batches * n_cells + 1,)
        Where each cell begins; those of a batch follow each other. int32 where there is a grid.
    lo : NumPy array, shape (3,)
        The corner of the grid.
    inverse, width : scalar
        Cells a unit of length, and the width of a cell.
    dims : NumPy array of int64, shape (3,)
        Cells along each axis.
    """

    xt: Any
    cells: Any
    lo: np.ndarray
    inverse: Any
    width: Any
    dims: np.ndarray


class Tree(NamedTuple):
    """Points in the order of a tree, see ``_points_tree``, and where queries begin.

    Attributes
    ----------
    points, boxes : array
        Packed, see ``_points_grid_cuda``.
    ptr : array of int64, shape (n_batches + 1,)
    n_leaves, highest : int
    near : array of int64, shape (n_queries,)
        The place of a point near each query, in the order in which they are looked from.
    """

    points: Any
    boxes: Any
    ptr: Any
    n_leaves: int
    highest: int
    near: Any


def ends(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest coordinates of up to three axes, with a wait."""
    from rtxarr.kernels import _points_grid_cuda as gpu

    xp, n_axes = namespace(x), x.shape[1]
    n_blocks = max(1, min(_BLOCKS, x.size // (8 * gpu.ENDS_THREADS)))
    out = xp.empty((2, n_blocks, n_axes), dtype=x.dtype)
    flat = xp.reshape(x, (-1,))
    launch(gpu.ends(x.dtype), n_blocks, (flat, n_axes, out), block=gpu.ENDS_THREADS)
    low, high = to_device(out, "cpu")
    return np.min(low, axis=0), np.max(high, axis=0)


def prepare(
    x: Any,
    batches: Any,
    ptr: Any,
    found: tuple[np.ndarray, np.ndarray],
    y: Any,
    y_batches: Any,
    k: int | None,
    r: float | None,
) -> tuple[Grid | Tree, Any]:
    """Sort points, and queries, by cells that suit a search; see ``points.prepare``.

    Returns
    -------
    where : Grid or Tree
    visit : array
        The queries as they are looked from: packed, or with more than three axes anything.
    """
    n_batches = ptr.shape[0] - 1
    if x.shape[1] > 3:
        xt = namespace(x).ascontiguousarray(x.T)
        return _grid(x.dtype)._replace(xt=xt, cells=ptr), y_batches
    grid = build_grid(x, batches, n_batches, found, *_cells_for(x.shape, n_batches, found, k, r))
    if grid is None:
        return build_tree(x, batches, ptr, found, y, y_batches)
    if y is x:
        return grid, grid.xt
    xt, _ = _sorting(y, y_batches, n_batches, grid)[0]()
    return grid, xt


def _cells_for(shape, n_batches, found, k, r):
    """Return the width of cells for a search, and how many points those should have."""
    if k is None:
        width = _width(shape, n_batches, found, 1)
        return (None if width is None else max(1.05 * r, width)), None
    width, crowd = _width(shape, n_batches, found, 3 * k / 8), max(3 * k / 8, 1)
    if width is not None and r is not None:
        within = max(1.05 * r, _width(shape, n_batches, found, 1))
        if within < width:
            return within, None
    return width, crowd


def _width(shape, n_batches, found, per_cell):
    """Give the width of cells with so many points on average, or None for no grid."""
    n = shape[0]
    if n < _FEW * n_batches:
        return None
    low, high = (end.astype(np.float64) for end in found)
    extents = high - low
    extents = np.sort(extents[extents > 0])
    while extents.size and np.all(np.isfinite(extents)):
        share = max(per_cell, 1) * n_batches / n
        width = float(np.exp((np.log(extents).sum() + np.log(share)) / extents.size))
        if extents[0] >= width:
            return width
        extents = extents[1:]  # flat along this axis
    return None


def build_grid(
    x: Any,
    batches: Any,
    n_batches: int,
    found: tuple[np.ndarray, np.ndarray],
    width: float | None,
    crowd: float | None,
) -> Grid | None:
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
    crowd : float or None
        Points that a cell should have, of those that have any. If they have many more, cells
        become narrower; that takes a wait or two.

    Returns
    -------
    Grid, or None if some cells have many more than others whatever their width
    """
    scalar, n, grid = x.dtype.type, x.shape[0], _grid(x.dtype)
    width = None if n == 0 else width
    if width is not None:
        low, high = (end.astype(np.float64) for end in found)
        grid.lo[: low.size] = low
    for is_first in (True, False):
        if width is not None:
            width, dims = _cut(high - low, width, n, n_batches)
            size = scalar(width)
            grid = grid._replace(inverse=scalar(1) / size, width=size, dims=dims)
        sort, crowds = _sorting(x, batches, n_batches, grid)
        if width is None or crowd is None:
            break
        mean, around = crowds()
        if around > _UNEVEN * (mean + 1) or (mean > 4 * crowd and not is_first):
            return None
        if mean <= 2 * crowd:
            break
        # On a surface few cells have points, and those many: make the cells narrower, once.
        if is_first:
            width = float(grid.width) * (crowd / mean) ** 0.5
    xt, cells = sort()
    return grid._replace(xt=xt, cells=cells)


def _grid(dtype):
    """Return a grid of one cell, without points."""
    one = dtype.type(1)
    return Grid(None, None, np.zeros(3, dtype), one, one, np.ones(3, np.int64))


def _sorting(x, batches, n_batches, grid):
    """Begin to sort points by cells.

    Returns
    -------
    sort : function
        Gives the points in their order, packed, and where each cell begins.
    crowds : function
        Tells how many points a cell has that has any, and how many that of a point has, on average.
    """
    from rtxarr.kernels import _points_grid_cuda as gpu

    xp = namespace(x, batches)
    n, n_cells = x.shape[0], n_batches * int(np.prod(grid.dims))
    if n >= 2**31 - 1:
        raise ValueError(f"a GPU searches fewer than 2**31 - 1 points, got {n}")
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
        return packed, begins

    def crowds():
        squares = xp.sum(xp.square(xp.astype(counts, xp.float64)))
        occupied = xp.astype(xp.count_nonzero(counts), xp.float64)
        n_occupied, squares = to_device(xp.stack([occupied, squares]), "cpu").tolist()
        return n / n_occupied, squares / n

    return sort, crowds


def build_tree(
    x: Any, batches: Any, ptr: Any, found: tuple[np.ndarray, np.ndarray], y: Any, y_batches: Any
) -> tuple[Tree, Any]:
    """Build a tree of points; see :func:`prepare`."""
    from rtxarr.kernels import _points_tree_cuda as gpu

    xp, n, kernels = namespace(x), x.shape[0], gpu.making(x.dtype)
    for curve in curves(x.dtype, ptr.shape[0] - 1, found):
        order, keys = _along(x, batches, curve)
        # If many are in one place, as where some are far away: look at them more closely.
        if 4 * int(xp.count_nonzero(keys[1:] == keys[:-1])) <= n:
            break
    packed = _packed(x, order)
    count, n_leaves, highest, n_boxes = sizes_of(n)
    boxes, base = xp.empty(8 * n_boxes, dtype=x.dtype), 0
    launch(kernels.leaves, count, (packed, boxes, count))
    for level in range(highest):
        above = base + (n_leaves >> NODE_BITS * level)
        n_below, count = count, -(-count // (1 << NODE_BITS))
        launch(kernels.level, count, (boxes, base, n_below, above, count))
        base = above
    if y is x:
        return Tree(packed, boxes, ptr, n_leaves, highest, xp.arange(n)), packed
    order, y_keys = _along(y, y_batches, curve)
    near = xp.clip(xp.searchsorted(keys, y_keys), 0, n - 1)
    return Tree(packed, boxes, ptr, n_leaves, highest, near), _packed(y, order)


def _along(x, batches, curve):
    """Return the order of points along a curve, and their keys in that order."""
    from rtxarr.kernels import _points_tree_cuda as gpu

    xp, n, order = namespace(x), x.shape[0], None
    side = x.dtype.type(2.0**curve.bits)
    for drop in range(0, curve.bits, curve.room):  # the lower bits of coordinates first
        keys = xp.empty(n, dtype=np.int64)
        where = (*curve.lo, curve.scale, side, curve.bits, drop, curve.room)
        launch(gpu.making(x.dtype).keys, n, (x, batches, *where, keys))
        keys = keys if order is None else xp.take(keys, order)
        step = xp.argsort(keys, stable=True)
        order = step if order is None else xp.take(order, step)
        keys = xp.take(keys, step)
    return order, keys


def _packed(x, order):
    from rtxarr.kernels import _points_tree_cuda as gpu

    packed = namespace(x).empty(4 * x.shape[0], dtype=x.dtype)
    launch(gpu.making(x.dtype).pack, x.shape[0], (x, order, packed))
    return packed


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


def nearest(search: Any, others: bool, limit: Any, k: int, starts: Any, found: tuple) -> None:
    """Find a few of the nearest points of each query, then those that come after them.

    Parameters
    ----------
    search : Search
    others : bool
    limit : scalar
        Of the squared distance.
    k : int
    starts : array of int64, shape (n_queries,)
        Where those of a query go.
    found : tuple of arrays
        Counts, squared distances and numbers.
    """
    from rtxarr.kernels import _points_cuda as gpu

    y = search.y
    longest = longest_list(y.dtype)
    for first in range(0, k, longest):
        part = min(k - first, longest)
        n = next(length for length in _LENGTHS if length >= part)
        options = int(others), limit, part, first, starts
        if isinstance(search.where[0], Tree):
            _launch_climb(n, search, options, found)
        else:
            _launch_search(gpu.search(y.dtype, n, y.shape[1] <= 3), search, options, found)


def tally(search: Any, others: bool, limit: Any, starts: Any, found: tuple) -> None:
    """Count the points within a distance; see :func:`nearest`."""
    from rtxarr.kernels import _points_cuda as gpu

    kernel = gpu.tally(search.y.dtype, search.y.shape[1] <= 3)
    _launch_search(kernel, search, (int(others), limit, starts), found)


def append(search: Any, others: bool, limit: Any, starts: Any, found: tuple) -> None:
    """Find all points within a distance, and sort them; see :func:`nearest`."""
    from rtxarr.kernels import _points_cuda as gpu

    y = search.y
    kernel = gpu.append(y.dtype, y.shape[1] <= 3)
    _launch_search(kernel, search, (int(others), limit, starts), found)
    launch(gpu.sort_rows(y.dtype), y.shape[0], (starts, *found[1:]))


def longest_list(dtype: np.dtype) -> int:
    """Return how many nearest points a search finds at once."""
    return _LENGTHS[-1] if dtype.itemsize == 4 else _LENGTHS[-2]


def _launch_search(kernel, search, options, found):
    from rtxarr.kernels import _points_cuda as gpu

    y, batches, (grid, visit) = search
    if y.shape[1] <= 3:
        box = (*grid.lo, grid.inverse, grid.width, *grid.dims)
        arguments = visit, batches, grid.xt, grid.cells, *box
    else:
        arguments = y, batches, grid.xt, grid.cells
    n_blocks = -(-y.shape[0] // gpu.THREADS)
    launch(kernel, n_blocks, (*arguments, *options, *found), block=gpu.THREADS)


def _launch_climb(n, search, options, found):
    from rtxarr.kernels._points_cuda import THREADS
    from rtxarr.kernels._points_tree_cuda import search as climbing

    y, batches, (tree, visit) = search
    arguments = visit, batches, tree.near, tree.ptr, tree.points, tree.boxes
    arguments += tree.n_leaves, tree.highest
    n_blocks = -(-y.shape[0] // THREADS)
    launch(climbing(y.dtype, n), n_blocks, (*arguments, *options, *found), block=THREADS)


def farthest(x: Any, ptr: Any, starts: Any, out: Any) -> None:
    """Thin clouds out; see ``points.farthest``."""
    from rtxarr.kernels import _farthest_cuda as gpu

    xp = namespace(x)
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
