"""Neighbours in space, exact and the same on every device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import is_half, isdtype
from rtxarr.geom._graph import Graph, _index_dtype, plain
from rtxarr.geom._sampling import _integer, like, on_host
from rtxarr.geom._subgraph import iota
from rtxarr.kernels import points
from rtxarr.kernels.sampling import offsets_of

__all__ = [
    "Neighbors",
    "Voxels",
    "WithinRadius",
    "chamfer_distance",
    "estimate_normals",
    "farthest_point_sampling",
    "knn",
    "knn_graph",
    "radius",
    "radius_graph",
    "voxel_grid",
]


class Neighbors(NamedTuple):
    """The nearest points of each query.

    Attributes
    ----------
    indices : array of int64, shape (n_queries, k)
        The nearest first; of equally distant points the one with the smaller number.
    distances : array, shape (n_queries, k)
    """

    indices: Any
    distances: Any


class WithinRadius(NamedTuple):
    """The points within a distance of each query.

    Attributes
    ----------
    indptr : array of int64, shape (n_queries + 1,)
        Query ``i`` has the entries ``indptr[i]:indptr[i + 1]``.
    indices : array of int64, shape (n_found,)
        Of each query the nearest first; of equally distant points the one with the smaller
        number.
    distances : array, shape (n_found,)
    """

    indptr: Any
    indices: Any
    distances: Any


def knn(
    x: Any, k: int, *, y: Any = None, ptr: Any = None, y_ptr: Any = None, loops: bool = True
) -> Neighbors:
    """Find the ``k`` nearest points, exactly.

    Parameters
    ----------
    x : array of floats, shape (n_points, n_axes)
        Half types are widened to float32. With more than three axes all points are looked at.
    k : int, at least 1
    y : array of floats, shape (n_queries, n_axes), optional
        Where to look from; the points themselves by default.
    ptr : array of int, shape (n_clouds + 1,), optional
        Cloud ``c`` has the points ``ptr[c]:ptr[c + 1]``, and only these are each other's
        neighbours; one cloud by default.
    y_ptr : array of int, shape (n_clouds + 1,), optional
        The same of ``y``; needed with both ``y`` and ``ptr``.
    loops : bool, default True
        Whether a point is among its own neighbours; matters without ``y`` only.

    Returns
    -------
    Neighbors

    Raises
    ------
    ValueError
        When a coordinate is not finite, or a cloud that is looked at has fewer than ``k`` points.

    Notes
    -----
    Squared differences are added in the order of the axes, in the dtype of the points, and each
    operation rounds once; so all devices find the same points.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> x = np.array([[0.0], [1.0], [3.0]])
    >>> geom.knn(x, 1, loops=False)
    Neighbors(indices=array([[1],
           [0],
           [1]]), distances=array([[1.],
           [1.],
           [2.]]))
    """
    job = _Job(x, y, ptr, y_ptr, loops)
    k = _integer("k", k, 1, 2**31)
    job.require_enough(k)
    _, squares, indices = job.nearest(k)
    return Neighbors(indices, job.xp.sqrt(squares))


def radius(
    x: Any,
    r: float,
    *,
    y: Any = None,
    ptr: Any = None,
    y_ptr: Any = None,
    max_neighbors: int | None = None,
    loops: bool = True,
) -> WithinRadius:
    """Find the points within a distance, exactly.

    Parameters
    ----------
    x, y, ptr, y_ptr, loops
        As for :func:`knn`.
    r : float
        Points at this distance count; squared distances are compared with ``r * r``, both rounded
        to the dtype of the points.
    max_neighbors : int, optional
        Of more points than this the nearest are kept.

    Returns
    -------
    WithinRadius

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.radius(np.array([[0.0], [1.0], [3.0]]), 2.0, loops=False).indices
    array([1, 0, 2, 1])
    """
    job = _Job(x, y, ptr, y_ptr, loops)
    scalar = job.x.dtype.type
    if not (r >= 0 and math.isfinite(r)):
        raise ValueError(f"r must be finite and not negative, got {r}")
    limit = scalar(r) * scalar(r)
    if not np.isfinite(limit):
        raise ValueError(f"the square of r must be finite in {job.x.dtype}, got {r}")
    if max_neighbors is None:
        offsets, squares, indices = job.all_within(float(r), limit)
        return WithinRadius(offsets, indices, job.xp.sqrt(squares))
    k = _integer("max_neighbors", max_neighbors, 1, 2**31)
    k = min(k, max(job.x.shape[0], 1))
    counts, squares, indices = job.nearest(k, float(r), limit)
    xp = job.xp
    found = iota(counts, k)[None, :] < counts[:, None]
    return WithinRadius(offsets_of(xp, counts), indices[found], xp.sqrt(squares[found]))


def knn_graph(
    x: Any, k: int, *, y: Any = None, ptr: Any = None, y_ptr: Any = None, loops: bool = False
) -> Graph:
    """Connect each point with its ``k`` nearest: edges lead from these to the point.

    Parameters
    ----------
    x, k, y, ptr, y_ptr
        As for :func:`knn`. With ``y`` the graph is bipartite, from ``x`` to ``y``.
    loops : bool, default False
        Whether a point is among its own neighbours.

    Returns
    -------
    Graph
        With ``distance`` among its arrays of edges; ``k`` edges end at each point.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.knn_graph(np.array([[0.0], [1.0], [3.0]]), 1)
    Graph(3 nodes, 3 edges, edges: distance)
    """
    found = knn(x, k, y=y, ptr=ptr, y_ptr=y_ptr, loops=loops)
    n = found.indices.shape[0]
    indptr = iota(found.indices, n + 1) * k
    xp = _device.namespace(found.indices)
    indices, distances = (xp.reshape(values, (-1,)) for values in found)
    return _graph(indptr, indices, distances, x.shape[0])


def radius_graph(
    x: Any,
    r: float,
    *,
    y: Any = None,
    ptr: Any = None,
    y_ptr: Any = None,
    max_neighbors: int | None = None,
    loops: bool = False,
) -> Graph:
    """Connect each point with those within a distance: edges lead from these to the point.

    Parameters
    ----------
    x, r, y, ptr, y_ptr, max_neighbors
        As for :func:`radius`. With ``y`` the graph is bipartite, from ``x`` to ``y``.
    loops : bool, default False
        Whether a point is connected with itself.

    Returns
    -------
    Graph
        With ``distance`` among its arrays of edges.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.radius_graph(np.array([[0.0], [1.0], [3.0]]), 2.0)
    Graph(3 nodes, 4 edges, edges: distance)
    """
    found = radius(x, r, y=y, ptr=ptr, y_ptr=y_ptr, max_neighbors=max_neighbors, loops=loops)
    return _graph(*found, x.shape[0])


def _graph(indptr, indices, distances, n_src):
    xp = _device.namespace(indices)
    indices = xp.astype(indices, _index_dtype(xp, n_src), copy=False)
    return Graph._made(indptr, indices, n_src, None, edges={"distance": distances})


class _Job:
    """A search: points and queries that were checked, and the clouds that they belong to."""

    def __init__(self, x, y, ptr, y_ptr, loops):
        self.x, self.ends = _checked("x", x)
        self.xp = _device.namespace(self.x)
        ptr_given = ptr is not None
        ptr = _ptr_on_host("ptr", ptr, self.x)
        self.others = y is None and not loops
        if y is None:
            if y_ptr is not None:
                raise ValueError("y_ptr must be left out without y")
            self.y, y_ptr = self.x, ptr
        else:
            self.y = checked("y", y)
            if self.y.dtype != self.x.dtype or self.y.shape[1] != self.x.shape[1]:
                raise ValueError(
                    f"y must be {self.x.dtype} with {self.x.shape[1]} axes as x is, got "
                    f"{self.y.dtype} of shape {self.y.shape}"
                )
            if ptr_given != (y_ptr is not None):
                raise ValueError("ptr and y_ptr must be given together when y is")
            y_ptr = _ptr_on_host("y_ptr", y_ptr, self.y)
            if y_ptr.shape != ptr.shape:
                raise ValueError(
                    f"y_ptr must have {ptr.shape[0]} entries as ptr has, got {y_ptr.shape[0]}"
                )
        self.sizes, self.n_queries = np.diff(ptr), np.diff(y_ptr)
        self.ptr, self.y_ptr = ptr, y_ptr

    def require_enough(self, k):
        """Refuse a cloud that is looked at and has fewer than ``k`` points to be found."""
        sizes = np.where(self.n_queries > 0, self.sizes - self.others, k)
        if sizes.size and sizes.min() < k:
            cloud = int(np.argmin(sizes))
            raise ValueError(
                f"k must be at most {max(sizes[cloud], 0)}, the number of points that cloud "
                f"{cloud} has{' beside each' if self.others else ''}, got {k}"
            )

    def nearest(self, k, r=None, limit=np.inf):
        return points.nearest(self.prepare(k, r), k, others=self.others, limit=limit)

    def all_within(self, r, limit):
        return points.all_within(self.prepare(None, r), limit, others=self.others)

    def prepare(self, k, r):
        batches = y_batches = cloud_of(self.ptr, self.x)
        if self.y is not self.x:
            y_batches = cloud_of(self.y_ptr, self.y)
        there = self.x, batches, like(self.x, self.ptr), self.ends
        return points.prepare(*there, self.y, y_batches, k=k, r=r)


def checked(name: str, x: Any) -> Any:
    """Return points as NumPy's or CuPy's float32 or float64, or refuse them."""
    return _checked(name, x)[0]


def _checked(name, x):
    """Return the same, and the lowest and highest coordinates."""
    x = raw(x)
    if not _device.is_array(x) or x.ndim != 2 or not isdtype(x.dtype, "real floating"):
        got = f"shape {x.shape} of {x.dtype}" if _device.is_array(x) else type(x).__name__
        raise TypeError(f"{name} must be an array of floats of shape (n_points, n_axes), got {got}")
    x = plain(x)
    xp = _device.namespace(x)
    if is_half(x.dtype):
        x = xp.astype(x, xp.float32)
    if x.shape[1] == 0:
        raise ValueError(f"{name} must have at least one axis, got shape {x.shape}")
    x = xp.ascontiguousarray(x)
    ends = points.ends(x)
    if not np.all(np.isfinite(ends)):
        point = int(xp.argmax(~xp.all(xp.isfinite(x), axis=1)))
        raise ValueError(
            f"{name} must have finite coordinates, got {on_host(x[point])} at point {point}"
        )
    return x, ends


def checked_ptr(name: str, ptr: Any, x: Any) -> Any:
    """Return where each cloud begins as int64, where ``x`` is."""
    return like(x, _ptr_on_host(name, ptr, x))


def _ptr_on_host(name, ptr, x):
    if ptr is None:
        return np.array([0, x.shape[0]])
    if not _device.is_array(ptr) or ptr.ndim != 1 or not isdtype(ptr.dtype, "integral"):
        raise TypeError(f"{name} must be a one-dimensional array of integers, got {ptr!r}")
    ptr = _device.to_device(plain(ptr), "cpu").astype(np.int64)
    rises = ptr.size > 0 and ptr[0] == 0 and ptr[-1] == x.shape[0] and np.all(np.diff(ptr) >= 0)
    if not rises:
        raise ValueError(
            f"{name} must rise from 0 to the number of points, {x.shape[0]}, got {ptr.tolist()}"
        )
    return ptr


def cloud_of(ptr: Any, x: Any) -> Any:
    """Return the cloud of each point; ``ptr`` may be on the host."""
    xp = _device.namespace(x)
    if ptr.shape[0] == 2:
        return xp.zeros_like(x[:, 0], dtype=xp.int64)
    found = xp.searchsorted(like(x, ptr), iota(x, x.shape[0]), side="right") - 1
    return xp.astype(found, xp.int64, copy=False)


# ------------------------------------------------------------------------- fewer points, surfaces


def farthest_point_sampling(x: Any, n: int, *, ptr: Any = None, start: Any = None) -> Any:
    """Choose points one by one, each the furthest from all before.

    Parameters
    ----------
    x : array of floats, shape (n_points, n_axes)
    n : int, at least 1
        How many of each cloud.
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.
    start : array of int, shape (n_clouds,), optional
        The first point of each cloud, counted within it; 0 by default.

    Returns
    -------
    array of int64, shape (n_clouds * n,)
        Numbers in ``x``, cloud by cloud, all different. Of equally distant points the first is
        taken.

    References
    ----------
    Eldar, Lindenbaum, Porat and Zeevi, "The farthest point strategy for progressive image
    sampling", 1997, doi:10.1109/83.623193.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.farthest_point_sampling(np.array([[0.0], [1.0], [5.0], [9.0]]), 3)
    array([0, 3, 2])
    """
    x = checked("x", x)
    ptr = checked_ptr("ptr", ptr, x)
    sizes = np.diff(on_host(ptr))
    n = _integer("n", n, 1, 2**31)
    if sizes.size and sizes.min() < n:
        cloud = int(np.argmin(sizes))
        raise ValueError(
            f"n must be at most {sizes[cloud]}, the number of points of cloud {cloud}, got {n}"
        )
    first = ptr[:-1]
    if start is not None:
        start = np.asarray(on_host(start))
        if start.shape != sizes.shape or np.any((start < 0) | (start >= sizes)):
            raise ValueError(
                f"start must be a point of each of {sizes.size} clouds, got {start.tolist()}"
            )
        first = first + like(x, start)
    chosen = points.farthest(x, ptr, first, n)
    return _device.namespace(chosen).reshape(chosen, (-1,))


class Voxels(NamedTuple):
    """Which cube each point is in.

    Attributes
    ----------
    ids : array of int64, shape (n_points,)
        Numbers of the cubes with points: cloud by cloud, by the last axis, then the one before.
    ptr : array of int64, shape (n_clouds + 1,)
        Cloud ``c`` has the cubes ``ptr[c]:ptr[c + 1]``.
    """

    ids: Any
    ptr: Any


def voxel_grid(x: Any, size: float, *, ptr: Any = None) -> Voxels:
    """Sort points into cubes that have a corner at the origin.

    Parameters
    ----------
    x : array of floats, shape (n_points, n_axes)
    size : float
        Edge of a cube; those along an axis begin at multiples of it.
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.

    Returns
    -------
    Voxels
        Cubes without points are left out.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> geom.voxel_grid(np.array([[0.1], [2.5], [0.9], [-0.1]]), 1.0).ids
    array([1, 2, 1, 0])
    """
    x = checked("x", x)
    ptr = checked_ptr("ptr", ptr, x)
    if not (size > 0 and math.isfinite(size)):
        raise ValueError(f"size must be positive and finite, got {size}")
    xp = _device.namespace(x)
    if x.shape[0] == 0:
        return Voxels(like(x, np.zeros(0, np.int64)), xp.zeros_like(ptr))
    cubes = xp.floor(x / x.dtype.type(size))
    low = xp.min(cubes, axis=0)
    spans = [int(s) + 1 for s in on_host(xp.max(cubes, axis=0) - low)]
    if math.prod(spans) * ptr.shape[0] >= 2**63:
        raise ValueError(f"size must give fewer than 2**63 cubes, got {size}")
    key = cloud_of(ptr, x)
    for axis in reversed(range(x.shape[1])):
        key = key * spans[axis] + xp.astype(cubes[:, axis] - low[axis], xp.int64)
    found = xp.unique_inverse(key)
    ids = xp.astype(xp.reshape(found.inverse_indices, (-1,)), xp.int64, copy=False)
    clouds = found.values // math.prod(spans)
    bounds = xp.searchsorted(clouds, iota(x, ptr.shape[0]))
    return Voxels(ids, xp.astype(bounds, xp.int64, copy=False))


def estimate_normals(x: Any, k: int = 16, *, ptr: Any = None, towards: Any = None) -> Any:
    """Estimate the normal of a surface at each of its points.

    The direction in which the ``k`` nearest points, with the point itself, vary least.

    Parameters
    ----------
    x : array of float32 or float64, shape (n_points, n_axes)
    k : int, default 16
    ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end; one cloud by default.
    towards : array of floats, shape (n_axes,) or (n_points, n_axes), optional
        Normals point to the side of this. By default their largest component is positive.

    Returns
    -------
    array, shape (n_points, n_axes)
        Of length one.

    References
    ----------
    Hoppe, DeRose, Duchamp, McDonald and Stuetzle, "Surface reconstruction from unorganized
    points", SIGGRAPH 1992, doi:10.1145/133994.134011, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> flat = np.array([[0.0, 0, 1], [1, 0, 1], [0, 1, 1], [2, 2, 1]])
    >>> geom.estimate_normals(flat, 4, towards=np.zeros(3))[0] + 0.0
    array([ 0.,  0., -1.])
    """
    x = checked("x", x)
    xp = _device.namespace(x)
    near = xp.take(x, xp.reshape(knn(x, k, ptr=ptr).indices, (-1,)), axis=0)
    near = xp.reshape(near, (x.shape[0], k, x.shape[1]))
    near = near - xp.mean(near, axis=1, keepdims=True)
    _, vectors = xp.linalg.eigh(xp.matmul(xp.matrix_transpose(near), near))
    normals = vectors[:, :, 0]
    if towards is None:
        largest = xp.argmax(xp.abs(normals), axis=1)
        side = xp.take_along_axis(normals, largest[:, None], axis=1)
    else:
        side = xp.sum(normals * (raw(towards) - x), axis=1, keepdims=True)
    return xp.where(side < 0, -normals, normals)


def chamfer_distance(x: Any, y: Any, *, ptr: Any = None, y_ptr: Any = None) -> Any:
    """Return how far two clouds are apart: the mean squared distance to the other's nearest point.

    The mean over the points of ``x`` plus that over those of ``y``.

    Parameters
    ----------
    x, y : array or Tensor of floats, shape (n_x, n_axes) and (n_y, n_axes)
        Differentiable; which points are nearest is taken as it is.
    ptr, y_ptr : array of int, shape (n_clouds + 1,), optional
        Where each cloud begins, and the end.

    Returns
    -------
    array or Tensor, shape (n_clouds,), or () without ``ptr``

    References
    ----------
    Fan, Su and Guibas, "A point set generation network for 3D object reconstruction from a single
    image", 2017, arXiv:1612.00603, section 4.2; here with means in place of sums.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> float(geom.chamfer_distance(np.array([[0.0], [4.0]]), np.array([[1.0]])))
    6.0
    """
    total = 0
    for here, there, bounds, others in ((y, x, y_ptr, ptr), (x, y, ptr, y_ptr)):
        job = _Job(there, here, others, bounds, True)
        for name, sizes in (("x", job.sizes), ("y", job.n_queries)):
            if not sizes.all():
                cloud = int(np.argmin(sizes))
                raise ValueError(f"{name} must have points, got none in cloud {cloud}")
        found = job.nearest(1)[2][:, 0]
        squares = ops.sum((here - ops.take(there, found, axis=0)) ** 2, axis=1)
        if bounds is None:
            total = total + ops.mean(squares)
        else:
            total = total + ops.segment_mean(squares, checked_ptr("ptr", bounds, raw(here)))
    return total
