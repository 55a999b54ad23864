"""Graph convolutions with the normalised adjacency matrix: GCN, SGC, APPNP, Chebyshev."""

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._checks import values_are_checked
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._aggregate import _check_edges, aggregate
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, bias_of, linear, made, turned, with_bias
from rtxarr.geom._loops import looped
from rtxarr.ops import astype, dropout, sqrt, where
from rtxarr.ops._check import check_rate

__all__ = ["APPNP", "ChebConv", "GCNConv", "SGConv", "gcn_norm"]


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
        When the weights at a node add up to less than zero or to NaN, naming the node. On a GPU,
        where it would wait for the device, inside :func:`rtxarr.testing.check_values` only.

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
    if not graph.is_square:
        raise ValueError("the normalised matrix needs a graph whose sources are its destinations")
    if weight is None:
        dtype = np.dtype("float32" if dtype is None else dtype)
        key = ("gcn_norm", bool(improved), bool(add_self_loops), str(dtype))
        return graph.once(key, lambda: _norm(graph, None, improved, add_self_loops, dtype))
    _check_edges("weight", weight, graph)
    if weight.ndim != 1:
        raise ValueError(f"weight must have shape ({graph.n_edges},), got {tuple(weight.shape)}")
    return _norm(graph, weight, improved, add_self_loops, dtype or raw(weight).dtype)


def _norm(graph, weight, improved, add_self_loops, dtype):
    xp = _device.namespace(graph.indptr)
    wide = accumulator(np.dtype(dtype))
    if weight is None:
        weight = xp.astype(xp.ones_like(graph.indices), wide)
    weight = astype(weight, wide, copy=False)
    if add_self_loops:
        found = looped(graph)
        weight, graph = found.weight(weight, 2.0 if improved else 1.0), found.graph
    degree = _edges.collect(weight, graph=graph)
    _check_degrees(raw(degree))
    return graph, astype(_scaled(weight, degree, graph), dtype, copy=False)


def _scaled(weight, degree, graph):
    """Give ``weight / sqrt(d_src * d_dst)``, and 0 where a degree is 0."""
    product = _edges.spread(degree, graph=graph.T) * _edges.spread(degree, graph=graph)
    alone = product == 0
    return where(alone, 0, weight) / sqrt(where(alone, 1, product))


def _check_degrees(degree):
    if _device.is_device_array(degree) and not values_are_checked():
        return
    xp = _device.namespace(degree)
    bad = xp.nonzero(~(degree >= 0))[0]
    if bad.shape[0]:
        node = int(bad[0])
        raise ValueError(
            "the weights of the edges that end at a node must add up to at least 0, got "
            f"{float(degree[node]):g} at node {node}"
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
    first or last, whatever makes the rows to add up shorter.

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
        if self.in_channels < self.out_channels:
            return with_bias(self.lin(self.propagate(graph, x, edge_weight)), self.bias)
        return with_bias(self.propagate(graph, self.lin(x), edge_weight), self.bias)

    def propagate(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        """Multiply with the normalised adjacency matrix alone."""
        if self.normalize:
            graph, edge_weight = gcn_norm(
                graph,
                edge_weight,
                improved=self.improved,
                add_self_loops=self.add_self_loops,
                dtype=raw(x).dtype,
            )
        return aggregate(graph, x, weight=edge_weight)

    def _from_dgl(self, arrays):
        return {
            ("lin.weight" if name == "weight" else name): turned(x) if name == "weight" else x
            for name, x in arrays.items()
        }


class SGConv(Layer):
    """Simple graph convolution: ``W A^k x + b``, with GCN's normalised adjacency matrix ``A``.

    Parameters
    ----------
    in_channels, out_channels : int
    k : int >= 0, default 1
        Number of steps along edges.
    add_self_loops : bool, default True
        See :func:`gcn_norm`.
    bias : bool, default True
    dtype, device, generator
        As for :class:`GCNConv`.

    Attributes
    ----------
    lin : Linear

    Notes
    -----
    Call it as ``layer(graph, x, edge_weight)``, as :class:`GCNConv`.

    References
    ----------
    Wu et al., "Simplifying Graph Convolutional Networks", 2019, arXiv:1902.07153, eq. 8.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.SGConv(8, 2, k=3)
    SGConv(8, 2, k=3)
    """

    _shown = ("in_channels", "out_channels", "k", "add_self_loops")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        k: int = 1,
        add_self_loops: bool = True,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        _check_steps(k, 0)
        self.in_channels, self.out_channels, self.k = in_channels, out_channels, k
        self.add_self_loops = add_self_loops
        self.lin = linear(in_channels, out_channels, bias=bias, **made(dtype, device, generator))

    def forward(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        graph, weight = gcn_norm(
            graph, edge_weight, add_self_loops=self.add_self_loops, dtype=raw(x).dtype
        )
        project_first = self.out_channels < self.in_channels
        if project_first:
            x = x @ self.lin.weight.T
        for _ in range(self.k):
            x = aggregate(graph, x, weight=weight)
        return with_bias(x, self.lin.bias) if project_first else self.lin(x)

    _dgl_names = {"fc": "lin"}


class APPNP(Layer):
    """Personalised PageRank of predictions: ``k`` times ``z = (1 - alpha) A z + alpha x``.

    Parameters
    ----------
    k : int >= 1, default 10
        Number of steps along edges.
    alpha : float in [0, 1], default 0.1
        Share of the start, ``x``, in every step.
    dropout : float in [0, 1), default 0
        Share of the edges' weights dropped in each step while training.
    add_self_loops : bool, default True
        See :func:`gcn_norm`.
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For dropout.

    Notes
    -----
    Call it as ``layer(graph, x, edge_weight)``; gives the shape of ``x``. No parameters.

    References
    ----------
    Klicpera, Bojchevski and Günnemann, "Predict then Propagate: Graph Neural Networks meet
    Personalized PageRank", 2018, arXiv:1810.05997, eq. 4.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.APPNP(k=5, alpha=0.2)
    APPNP(k=5, alpha=0.2)
    """

    _shown = ("k", "alpha", "dropout", "add_self_loops")

    def __init__(
        self,
        *,
        k: int = 10,
        alpha: float = 0.1,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        generator: Any = None,
    ):
        _check_steps(k, 1)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
        check_rate(dropout)
        self.k, self.alpha, self.dropout = k, alpha, dropout
        self.add_self_loops, self.generator = add_self_loops, generator

    def forward(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        graph, weight = gcn_norm(
            graph, edge_weight, add_self_loops=self.add_self_loops, dtype=raw(x).dtype
        )
        z = x
        for _ in range(self.k):
            kept = weight
            if self.training and self.dropout:
                kept = dropout(weight, self.dropout, generator=self.generator)
            z = (1 - self.alpha) * aggregate(graph, z, weight=kept) + self.alpha * x
        return z


class ChebConv(Layer):
    """Chebyshev convolution: ``sum_k W_k T_k(L) x + b`` with the scaled Laplacian ``L``.

    ``L = 2 (I - D^-1/2 A D^-1/2) / lambda_max - I`` and ``T_k`` are the Chebyshev
    polynomials. Loops are left out; ``D`` has the sums of the weights of the edges that begin at a
    node.

    Parameters
    ----------
    in_channels, out_channels : int
    k : int >= 1
        Number of polynomials; the last has degree ``k - 1``.
    lambda_max : float > 0, default 2
        The largest eigenvalue of the Laplacian, or a bound for it.
    bias : bool, default True
    dtype, device, generator
        As for :class:`GCNConv`.

    Attributes
    ----------
    lins : list of Linear, without bias
    bias : Parameter, shape (out_channels,), or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_weight)``, as :class:`GCNConv`.

    References
    ----------
    Defferrard, Bresson and Vandergheynst, "Convolutional Neural Networks on Graphs with Fast
    Localized Spectral Filtering", 2016, arXiv:1606.09375, eq. 4.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.ChebConv(8, 2, k=3)
    ChebConv(8, 2, k=3)
    """

    _shown = ("in_channels", "out_channels", "k", "lambda_max")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        k: int,
        lambda_max: float = 2.0,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        _check_steps(k, 1)
        if not lambda_max > 0:
            raise ValueError(f"lambda_max must be above 0, got {lambda_max}")
        options = made(dtype, device, generator)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.k, self.lambda_max = k, lambda_max
        self.lins = [linear(in_channels, out_channels, bias=False, **options) for _ in range(k)]
        self.bias = bias_of(out_channels, bias, **options)

    def forward(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        weight = self._weight(graph, edge_weight, raw(x).dtype)
        before, now = None, x
        out = self.lins[0](now)
        for lin in self.lins[1:]:
            step = self._scaled(graph, now, weight)
            before, now = now, step if before is None else 2 * step - before
            out = out + lin(now)
        return with_bias(out, self.bias)

    def _scaled(self, graph, x, weight):
        """Multiply with ``L``."""
        return (2 / self.lambda_max - 1) * x - 2 / self.lambda_max * aggregate(
            graph, x, weight=weight
        )

    def _weight(self, graph, weight, dtype):
        if weight is None:
            return graph.once(("laplacian", str(dtype)), lambda: _laplacian(graph, None, dtype))
        _check_edges("weight", weight, graph)
        return _laplacian(graph, weight, dtype)


def _laplacian(graph, weight, dtype):
    """Give ``w / sqrt(d_src * d_dst)``, and 0 for loops."""
    if not graph.is_square:
        raise ValueError("the Laplacian needs a graph whose sources are its destinations")
    xp = _device.namespace(graph.indptr)
    if weight is None:
        weight = xp.astype(xp.ones_like(graph.indices), dtype)
    weight = where(graph.src == graph.dst, 0 * weight, weight)
    degree = _edges.collect(weight, graph=graph.T)
    _check_degrees(raw(degree))
    return _scaled(weight, degree, graph)


def _check_steps(k, least):
    if not isinstance(k, int) or isinstance(k, bool) or k < least:
        raise ValueError(f"k must be an int >= {least}, got {k!r}")
