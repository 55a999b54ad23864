"""Layers around a network of one's own: GIN, GINE and EdgeConv."""

from collections.abc import Callable
from typing import Any

from rtxarr.geom._aggregate import aggregate
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, MessageLayer, Misfit, _renamed, linear, made, widest
from rtxarr.geom._message_passing import MessagePassing, pair
from rtxarr.nn import Buffer, Linear, Module, Parameter, Sequential
from rtxarr.ops import concat, relu

__all__ = ["EdgeConv", "GINConv", "GINEConv"]


def _epsilon(value, trained, options):
    kind = Parameter if trained else Buffer
    return kind([float(value)], dtype=options["dtype"], device=options["device"])


class GINConv(Layer):
    """Graph isomorphism layer: ``y_i = nn((1 + eps) x_i + sum_j x_j)``.

    Parameters
    ----------
    nn : Module or callable
    eps : float, default 0
    train_eps : bool, default False
        Train ``eps`` too.
    dtype : dtype, default float32
        Of ``eps``.
    device : Device or str, default the current one

    Attributes
    ----------
    nn : Module
    eps : Parameter, or Buffer if it is not trained, shape (1,)

    Notes
    -----
    Call it as ``layer(graph, x)``, with ``x`` of shape (n_nodes, n_features), or a pair for sources
    and destinations.

    References
    ----------
    Xu et al., "How Powerful are Graph Neural Networks?", 2018, arXiv:1810.00826, eq. 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom, nn
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> layer = geom.GINConv(nn.Sequential(nn.Linear(8, 16), rx.relu, nn.Linear(16, 2)))
    >>> layer(graph, rx.ones((4, 8), dtype="float32")).shape
    (4, 2)
    """

    _dgl_names = {"apply_func": "nn"}

    def __init__(
        self,
        nn: Callable,
        *,
        eps: float = 0.0,
        train_eps: bool = False,
        dtype: Any = None,
        device: Any = None,
    ):
        self.nn = nn
        self.eps = _epsilon(eps, train_eps, {"dtype": dtype, "device": device})

    def forward(self, graph: Graph, x: Any) -> Any:
        src, dst = pair(graph, x)
        return self.nn((1 + self.eps) * dst + aggregate(graph, src))

    def __repr__(self):
        return Module.__repr__(self)


class GINEConv(MessageLayer):
    """GIN with edge features: ``y_i = nn((1 + eps) x_i + sum_j relu(x_j + W e_ij + b))``.

    Parameters
    ----------
    nn : Module or callable
    in_channels, edge_channels : int, optional
        Features of a node and of an edge, to map the latter to as many as the former; without them
        edges have the features that nodes have, and there are no ``W`` and ``b``.
    eps, train_eps
        As for :class:`GINConv`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values of ``lin``.

    Attributes
    ----------
    nn : Module
    eps : Parameter, or Buffer if it is not trained, shape (1,)
    lin : Linear, or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_attr)``, with edge features of shape (n_edges, n_features).

    References
    ----------
    Hu et al., "Strategies for Pre-training Graph Neural Networks", 2019, arXiv:1905.12265,
    appendix A.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=2)
    >>> layer = geom.GINEConv(lambda x: x, dtype="float64")
    >>> layer(graph, np.ones((2, 1)), np.array([[2.0], [-5.0]])).data
    array([[1.],
           [4.]])
    """

    _dgl_names = {"apply_func": "nn"}

    def __init__(
        self,
        nn: Callable,
        *,
        in_channels: int | None = None,
        edge_channels: int | None = None,
        eps: float = 0.0,
        train_eps: bool = False,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        if (in_channels is None) != (edge_channels is None):
            raise ValueError(
                "in_channels and edge_channels must be given together, got "
                f"{in_channels} and {edge_channels}"
            )
        options = made(dtype, device, generator)
        self.nn = nn
        self.eps = _epsilon(eps, train_eps, options)
        self.lin = None
        if in_channels is not None and edge_channels is not None:
            self.lin = linear(edge_channels, in_channels, **options)

    def message(self, src, dst, edge):
        return relu(src + (edge if self.lin is None else self.lin(edge)))

    def update(self, out, dst):
        return self.nn((1 + self.eps) * dst + out)

    def __repr__(self):
        return Module.__repr__(self)


class EdgeConv(MessageLayer):
    """Edge convolution: ``y_i = agg_j nn([x_i, x_j - x_i])``.

    Parameters
    ----------
    nn : Module or callable
        Of rows with twice the features of a node. Must treat each row by itself.
    aggr : str or sequence of str, default "max"
        As for :class:`MessagePassing`.

    Notes
    -----
    Call it as ``layer(graph, x)``, with ``x`` of shape (n_nodes, n_features), or a pair for sources
    and destinations. A node without edges gets zeros.

    References
    ----------
    Wang et al., "Dynamic Graph CNN for Learning on Point Clouds", 2018, arXiv:1801.07829, eq. 1
    and 7.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom, nn
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> layer = geom.EdgeConv(nn.Sequential(nn.Linear(6, 16), rx.relu))
    >>> layer(graph, rx.ones((4, 3), dtype="float32")).shape
    (4, 16)
    """

    def __init__(self, nn: Callable, *, aggr: Any = "max"):
        MessagePassing.__init__(self, aggr=aggr)
        self.nn = nn
        self.width = widest(nn)

    def message(self, src, dst, edge):
        return self.nn(concat([dst, src - dst], axis=-1))

    def forward(self, graph: Graph, x: Any) -> Any:  # type: ignore[override]
        return self.propagate(graph, x)

    def _from_dgl(self, arrays):
        # theta (x_i - x_j) + phi x_i there.
        known, own = dict(arrays), {}
        first = "nn.0." if isinstance(self.nn, Sequential) else "nn."
        self._check_of_dgl(known)
        if {"phi.weight", "theta.weight"} <= set(known):
            parts = [known.pop("phi.weight"), -known.pop("theta.weight")]
            own[f"{first}weight"] = concat(parts, axis=1)
        if {"phi.bias", "theta.bias"} <= set(known):
            own[f"{first}bias"] = known.pop("phi.bias") + known.pop("theta.bias")
        return own | {_renamed(name, {"bn": "nn.1"}): x for name, x in known.items()}

    def _check_of_dgl(self, arrays):
        """Refuse what does not become one linear map."""
        first = self.nn.layers[0] if isinstance(self.nn, Sequential) else self.nn
        if not isinstance(first, Linear):
            return
        n_out, n_in = first.weight.shape
        for name in ("theta", "phi"):
            for kind, shape in (("weight", (n_out, n_in // 2)), ("bias", (n_out,))):
                x = arrays.get(f"{name}.{kind}")
                if x is not None and x.shape != shape:
                    raise Misfit(f"{name}.{kind}", shape, x.shape)

    def __repr__(self):
        return Module.__repr__(self)
