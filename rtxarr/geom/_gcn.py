"""Graph convolution with the normalised adjacency matrix: GCN."""

import weakref
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._checks import values_are_checked
from rtxarr._override import tracing
from rtxarr._replay import recorder
from rtxarr.autograd._tape import Node, Tensor, raw
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._aggregate import check_edges, weighted_sum
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, bias_of, linear, made, turned, with_bias
from rtxarr.geom._loops import looped
from rtxarr.geom._projected import fits, projected_sum
from rtxarr.ops import astype, sqrt, where

__all__ = ["GCNConv", "gcn_norm"]


def gcn_norm(
    graph: Graph,
    weight: Any = None,
    *,
    improved: bool = False,
    add_self_loops: bool = True,
    dtype: Any = None,
) -> tuple[Graph, Any]:
    """Give the graph and the weights of the normalised adjacency matrix of GCN.

    Parameters
    ----------
    graph : Graph
        Its sources and destinations are the same nodes.
    weight : array or Tensor, shape (n_edges,), optional
        One for each edge when left out.
    improved : bool, default False
        Give new loops weight 2 instead of 1, with weights and without.
    add_self_loops : bool, default True
        Give every node one loop. One that it had keeps its weight, of several the last one by
        number; loops come after the other edges.
    dtype : dtype, default that of ``weight``, else float32

    Returns
    -------
    graph : Graph
    weight : array or Tensor, shape (n_edges,)
        ``weight / sqrt(d_src * d_dst)``, where ``d`` is the sum of the weights of the edges that
        end at a node, loops included; 0 where ``d`` is 0. Without ``weight`` it is worked out once
        for each graph.

    Raises
    ------
    ValueError
        When the weights at a node add up to less than zero or to NaN, naming the node. On a GPU
        that waits for the device when an array of weights is first used with a graph; weights that
        are computed with gradients or used first in a captured step are checked inside
        :func:`rtxarr.testing.check_values` only.

    References
    ----------
    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2016,
    arXiv:1609.02907, section 2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=2)
    >>> geom.gcn_norm(graph)
    (Graph(2 nodes, 4 edges), array([0.5, 0.5, 0.5, 0.5], dtype=float32))
    """
    if weight is None:
        dtype = np.dtype("float32" if dtype is None else dtype)
        key = ("gcn_norm", bool(improved), bool(add_self_loops), dtype)
        return graph.once(key, lambda: _kept_norm(graph, improved, add_self_loops, dtype))
    check_edges("weight", weight, graph, real=True)
    if weight.ndim != 1:
        raise ValueError(f"weight must have shape ({graph.n_edges},), got {tuple(weight.shape)}")
    return _norm(graph, weight, improved, add_self_loops, dtype or raw(weight).dtype)


def _kept_norm(graph, *options):
    graph, weight = _norm(graph, None, *options)
    _edges.keep_weights(graph, weight)
    return graph, weight


def _norm(graph, weight, improved, add_self_loops, dtype):
    if not graph.is_square:
        raise ValueError(
            "the normalised matrix needs a graph whose sources are its destinations; for parts of "
            "one give the weights of gcn_norm to layers with normalize=False"
        )
    xp = _device.namespace(graph.indptr)
    wide = accumulator(np.dtype(dtype))
    given = weight
    if weight is None:
        weight = xp.astype(xp.ones_like(graph.indices), wide)
    weight = astype(weight, wide, copy=False)
    if add_self_loops:
        found = looped(graph)
        weight, graph = found.weight(weight, 2.0 if improved else 1.0), found.graph
    degree = _edges.collect(weight, graph=graph)
    check_degrees(raw(degree), given, graph, "end", improved)
    return graph, astype(scaled(weight, degree, graph), dtype, copy=False)


def scaled(weight, degree, graph):
    """Give ``weight / sqrt(d_src * d_dst)``, and 0 where a degree is 0."""
    product = _edges.spread(degree, graph=graph.T) * _edges.spread(degree, graph=graph)
    alone = product == 0
    return where(alone, 0, weight) / sqrt(where(alone, 1, product))


def check_degrees(degree: Any, weight: Any, graph: Graph, side: str, rule: Any) -> None:
    """Refuse sums of weights below zero and NaN; on a GPU once for each array of weights.

    ``rule`` tells apart what else is added up at one ``side``.
    """
    if not _device.is_device_array(degree) or values_are_checked():
        _require_positive(degree, side)
    elif weight is not None and not _is_computed(weight):
        array = raw(weight)
        key = ("checked", side, rule, id(array))
        if key not in graph._kept:
            _require_positive(degree, side)
            # Noted while the array lives, since another one may get its id.
            kept = graph._kept
            kept[key] = weakref.ref(array, lambda _: kept.pop(key, None))


def _is_computed(weight):
    if recorder() is not None or tracing() is not None:
        return True
    return isinstance(weight, Tensor) and isinstance(weight.node, Node)


def _require_positive(degree, side):
    xp = _device.namespace(degree)
    bad = xp.nonzero(~((degree >= 0) & (degree < xp.inf)))[0]
    if bad.shape[0]:
        node = int(bad[0])
        raise ValueError(
            f"the weights of the edges that {side} at a node must add up to at least 0 and less "
            f"than infinity, got {float(degree[node]):g} at node {node}"
        )


class GCNConv(Layer):
    """Graph convolution: ``y_i = sum_j w_ij / sqrt(d_i d_j) W x_j + b``.

    The sum is over the edges from ``j`` to ``i``, with one loop at each node; ``d_i`` is the sum of
    the weights of those that end at ``i``.

    Parameters
    ----------
    in_channels, out_channels : int
    improved : bool, default False
        Give new loops weight 2, with weights and without.
    add_self_loops : bool, default True
        See :func:`gcn_norm`. Without them a node without edges gets the bias alone.
    normalize : bool, default True
        False takes the edges' weights as they are, without loops: those of :func:`gcn_norm`, or
        any others.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    lin : Linear, without bias
    bias : Parameter, shape (out_channels,), or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_weight)``, with ``x`` of shape (n_nodes, in_channels) and
    weights of shape (n_edges,) or None; gives (n_nodes, out_channels). It multiplies with ``W``
    first or last, whatever makes the rows to add up shorter. On a GPU it multiplies rows of 68 to
    128 float32 while it gathers others, in graphs of a million nodes and more.

    References
    ----------
    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2016,
    arXiv:1609.02907, eq. 8.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> geom.GCNConv(8, 2)(graph, rx.ones((4, 8), dtype="float32")).shape
    (4, 2)
    """

    _shown = ("in_channels", "out_channels", "improved", "add_self_loops", "normalize")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        improved: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        options = made(dtype, device, generator)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.add_self_loops, self.normalize = improved, add_self_loops, normalize
        self.lin = linear(in_channels, out_channels, bias=False, **options)
        self.bias = bias_of(out_channels, bias, **options)

    def forward(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        if self.in_channels <= self.out_channels and fits(graph, x, self.lin.weight):
            graph, edge_weight = self._normalized(graph, x, edge_weight)
            return projected_sum(graph, x, edge_weight, self.lin.weight, self.bias)
        if self.in_channels < self.out_channels:
            return with_bias(self.lin(self.propagate(graph, x, edge_weight)), self.bias)
        return self.propagate(graph, self.lin(x), edge_weight, bias=self.bias)

    def propagate(self, graph: Graph, x: Any, edge_weight: Any = None, *, bias: Any = None) -> Any:
        """Multiply with the normalised adjacency matrix alone, and add a bias if there is one."""
        graph, edge_weight = self._normalized(graph, x, edge_weight)
        return weighted_sum(graph, x, edge_weight, bias)

    def _normalized(self, graph, x, edge_weight):
        if not self.normalize:
            return graph, edge_weight
        return gcn_norm(
            graph,
            edge_weight,
            improved=self.improved,
            add_self_loops=self.add_self_loops,
            dtype=raw(x).dtype,
        )

    def _from_dgl(self, arrays):
        return {
            ("lin.weight" if name == "weight" else name): turned(x) if name == "weight" else x
            for name, x in arrays.items()
        }
