"""Layers on points: DGCNN's edge convolution and PointNet++'s set abstraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.geom._gin import EdgeConv
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import MessageLayer, _renamed, widest
from rtxarr.geom._points import (
    checked,
    checked_ptr,
    farthest_point_sampling,
    knn_graph,
    radius_graph,
)
from rtxarr.geom._sampling import _integer
from rtxarr.geom._subgraph import iota
from rtxarr.nn import Module

__all__ = ["DynamicEdgeConv", "PointNetSetAbstraction"]


class DynamicEdgeConv(EdgeConv):
    """Edge convolution over the nearest neighbours in the space of the features.

    ``y_i = agg_j nn([x_i, x_j - x_i])`` over the ``k`` points ``j``, with ``i`` itself among them,
    whose features are nearest to those of ``i``.

    Parameters
    ----------
    nn : Module or callable
        Of rows with twice the features of a point.
    k : int
    aggr : str or sequence of str, default "max"
        As for :class:`EdgeConv`.

    Notes
    -----
    Call it as ``layer(x, ptr)``, with ``x`` of shape (n_points, n_features) and ``ptr``, where each
    cloud begins and the end; one cloud without it. The choice of neighbours is exact, and is not
    differentiated.

    References
    ----------
    Wang et al., "Dynamic Graph CNN for Learning on Point Clouds", 2018, arXiv:1801.07829,
    section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom, nn
    >>> layer = geom.DynamicEdgeConv(nn.Sequential(nn.Linear(6, 16), rx.relu), k=4)
    >>> layer(np.zeros((10, 3), np.float32)).shape
    (10, 16)
    """

    def __init__(self, nn: Callable, *, k: int, aggr: str | Sequence[str] = "max"):
        super().__init__(nn, aggr=aggr)
        self.k = _integer("k", k, 1, 2**31)

    def forward(self, x: Any, ptr: Any = None) -> Any:  # type: ignore[override]
        return self.propagate(knn_graph(raw(x), self.k, ptr=ptr, loops=True), x)


class PointNetSetAbstraction(MessageLayer):
    """Fewer points, each with the features of the ball around it.

    ``y_i = max_j nn([x_j, p_j - p_i])`` over the points ``j`` within a radius of each of some
    points ``i`` that are far from each other.

    Parameters
    ----------
    nn : Module or callable
        Of rows with a point's features and as many further ones as there are axes.
    n_points : int, optional
        How many points of each cloud are kept, by farthest-point sampling. Without it and ``r`` a
        cloud becomes one point, at the origin, whose ball has all points.
    r : float, optional
        Radius of a ball.
    max_neighbors : int, default 64
        Of more points in a ball the nearest count.

    Notes
    -----
    Call it as ``x, pos, ptr = layer(x, pos, ptr)``, with features ``x`` of shape (n_points,
    n_features) or None, positions of shape (n_points, n_axes), and ``ptr``, where each cloud begins
    and the end; one cloud without it. Differentiable in ``x`` and ``pos``, the choice of points
    aside.

    References
    ----------
    Qi, Yi, Su and Guibas, "PointNet++: deep hierarchical feature learning on point sets in a metric
    space", 2017, arXiv:1706.02413, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom, nn
    >>> pos = np.random.default_rng(0).random((50, 3), np.float32)
    >>> near = nn.Sequential(nn.Linear(3, 8), rx.relu)
    >>> balls = geom.PointNetSetAbstraction(near, n_points=10, r=0.3)
    >>> whole = geom.PointNetSetAbstraction(nn.Sequential(nn.Linear(11, 16), rx.relu))
    >>> x, pos, ptr = balls(None, pos)
    >>> x.shape, pos.shape, whole(x, pos, ptr)[0].shape
    ((10, 8), (10, 3), (1, 16))
    """

    def __init__(
        self,
        nn: Callable,
        *,
        n_points: int | None = None,
        r: float | None = None,
        max_neighbors: int = 64,
    ):
        if (n_points is None) != (r is None):
            raise ValueError(f"n_points and r must be given together, got {n_points} and {r}")
        super().__init__(aggr="max")
        self.nn = nn
        self.width = widest(nn)
        self.n_points = None if n_points is None else _integer("n_points", n_points, 1, 2**31)
        self.r = r
        self.max_neighbors = _integer("max_neighbors", max_neighbors, 1, 2**31)

    def message(self, src, dst, edge):
        moved = src["pos"] - dst["pos"]
        return self.nn(ops.concat([src["x"], moved], axis=1) if "x" in src else moved)

    def forward(self, x: Any, pos: Any, ptr: Any = None) -> tuple[Any, Any, Any]:  # type: ignore[override]
        points = checked("pos", pos)
        ptr = checked_ptr("ptr", ptr, points)
        src = {"pos": pos} if x is None else {"x": x, "pos": pos}
        n_clouds = ptr.shape[0] - 1
        if self.n_points is None or self.r is None:
            xp = _device.namespace(points)
            indices = xp.astype(iota(points, points.shape[0]), xp.int32)
            graph = Graph._made(ptr, indices, points.shape[0], None)
            centres = xp.zeros((n_clouds, points.shape[1]), dtype=points.dtype)
            bounds = iota(ptr, n_clouds + 1)
        else:
            chosen = farthest_point_sampling(points, self.n_points, ptr=ptr)
            centres = ops.take(pos, chosen, axis=0)
            bounds = iota(ptr, n_clouds + 1) * self.n_points
            graph = radius_graph(
                points,
                self.r,
                y=raw(centres),
                ptr=ptr,
                y_ptr=bounds,
                max_neighbors=self.max_neighbors,
            )
        return self.propagate(graph, (src, {"pos": centres})), centres, bounds

    def _from_pyg(self, arrays):
        return {_renamed(name, {"local_nn": "nn"}): x for name, x in arrays.items()}

    def __repr__(self):
        return Module.__repr__(self)
