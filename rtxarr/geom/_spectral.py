"""Several steps with the normalised adjacency matrix or the Laplacian: SGC, APPNP, Chebyshev."""

from typing import Any

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._aggregate import aggregate, check_edges
from rtxarr.geom._gcn import check_degrees, gcn_norm, scaled
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, Misfit, bias_of, linear, made, with_bias
from rtxarr.ops import astype, dropout, where
from rtxarr.ops._check import check_rate

__all__ = ["APPNP", "ChebConv", "SGConv"]


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
        if self.k != 1:
            _require_square(graph)
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
    _dgl_names = {}

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
        _require_square(graph)
        graph, weight = gcn_norm(
            graph, edge_weight, add_self_loops=self.add_self_loops, dtype=raw(x).dtype
        )
        z = x
        for _ in range(self.k):
            kept = weight
            if self.training and self.dropout:
                kept = dropout(weight, self.dropout, generator=self.generator)
            z = (1 - self.alpha) * aggregate(graph, z, weight=kept) + self.alpha * x
            z = astype(z, raw(x).dtype, copy=False)  # NumPy's bfloat16 times a float is float32
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
            before, now = now, step if before is None else step + step - before
            out = out + lin(now)
        return with_bias(out, self.bias)

    def _scaled(self, graph, x, weight):
        """Multiply with ``L``."""
        scale = 2 / self.lambda_max
        out = (scale - 1) * x - scale * aggregate(graph, x, weight=weight)
        return astype(out, raw(x).dtype, copy=False)  # NumPy's bfloat16 times a float is float32

    def _from_dgl(self, arrays):
        known = dict(arrays)
        weight = known.pop("linear.weight", None)  # of all polynomials, one after the other
        if "linear.bias" in known:
            known["bias"] = known.pop("linear.bias")
        if weight is not None:
            shape = self.out_channels, self.k * self.in_channels
            if weight.shape != shape:
                raise Misfit("linear.weight", shape, weight.shape)
            for i in range(self.k):
                part = slice(i * self.in_channels, (i + 1) * self.in_channels)
                known[f"lins.{i}.weight"] = weight[:, part]
        return known

    def _weight(self, graph, weight, dtype):
        if weight is None:
            return graph.once(("laplacian", dtype), lambda: _laplacian(graph, None, dtype))
        check_edges("weight", weight, graph, real=True)
        return _laplacian(graph, weight, dtype)


def _laplacian(graph, weight, dtype):
    """Give ``w / sqrt(d_src * d_dst)``, and 0 for loops."""
    if not graph.is_square:
        raise ValueError("the Laplacian needs a graph whose sources are its destinations")
    xp = _device.namespace(graph.indptr)
    given = weight
    if weight is None:
        weight = xp.astype(xp.ones_like(graph.indices), dtype)
    dtype = raw(weight).dtype
    weight = astype(weight, accumulator(dtype), copy=False)  # products of degrees leave float16
    weight = where(graph.src == graph.dst, 0 * weight, weight)
    degree = _edges.collect(weight, graph=graph.T)
    check_degrees(raw(degree), given, graph, "begin", "Laplacian")
    return astype(scaled(weight, degree, graph), dtype, copy=False)


def _require_square(graph):
    if not graph.is_square:
        raise ValueError(
            "several steps need a graph whose sources are its destinations, got one with "
            f"{graph.n_src} and {graph.n_dst}"
        )


def _check_steps(k, least):
    if not isinstance(k, int) or isinstance(k, bool) or k < least:
        raise ValueError(f"k must be an int >= {least}, got {k!r}")
