"""Attention over neighbours: GAT, GATv2 and the graph transformer."""

from typing import Any

from rtxarr.geom import _attend, _masks
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, bias_of, linear, made, sizes, vectors, with_bias
from rtxarr.geom._loops import looped
from rtxarr.geom._message_passing import check_rows, pair
from rtxarr.ops import concat as join
from rtxarr.ops import eye, mean, reshape, sigmoid, sum, zeros
from rtxarr.ops._check import check_rate, check_sizes

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]


class _Attention(Layer):
    """What the three layers share: heads, loops, edge features, dropout."""

    _shown: tuple[str, ...] = ("in_channels", "out_channels", "heads", "concat", "edge_channels")

    def _set(self, in_channels, out_channels, heads, concat, dropout, edge_channels, generator):
        check_sizes(out_channels=out_channels, heads=heads)
        check_rate(dropout)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.edge_channels, self.generator = edge_channels, generator

    @property
    def _n_outputs(self):
        return self.out_channels * (self.heads if self.concat else 1)

    def _per_head(self, x):
        return reshape(x, (x.shape[0], self.heads, self.out_channels))

    def _drops(self):
        rate = self.dropout if self.training else 0.0
        return {"dropout_rate": rate, "generator": self.generator}

    def _edges(self, graph, edge_attr):
        """Check edge features, and add loops to the graph and to them."""
        if (edge_attr is None) != (self.edge_channels is None):
            raise ValueError(
                f"edge_attr must be given if and only if edge_channels is, got {edge_attr!r} with "
                f"edge_channels={self.edge_channels}"
            )
        check_rows("edge_attr", edge_attr, graph.n_edges, "edges")
        if not getattr(self, "add_self_loops", False):
            return graph, edge_attr
        found = looped(graph)
        return found.graph, edge_attr if edge_attr is None else found.features(edge_attr)

    def _residual(self, wanted, options):
        if not wanted:
            return None
        return linear(sizes(self.in_channels)[1], self._n_outputs, bias=False, **options)

    def _from_dgl(self, arrays):
        arrays = super()._from_dgl(arrays)
        if getattr(self, "res", None) is not None:
            if "res.weight" not in arrays:  # the identity there, where the numbers fit
                shape, dtype = self.res.weight.shape, self.res.weight.dtype
                arrays["res.weight"] = eye(*shape, dtype=dtype, device="cpu")
            if "res.bias" in arrays:
                arrays["bias"] = arrays.get("bias", 0) + arrays.pop("res.bias")
        return arrays

    def _put_together(self, out):
        if self.concat:
            wide = out.shape[0], self.heads * self.out_channels
            return out if out.ndim == 2 else reshape(out, wide)
        return mean(out, axis=1)


def _attending(graph):
    """Give the functions that attend, or those for explanations."""
    return _attend if graph.mask is None else _masks


class GATConv(_Attention):
    """Graph attention: ``y_i = sum_j alpha_ij W x_j + b``, for each head.

    ``alpha_ij`` is the softmax over the edges from ``j`` to ``i`` of
    ``leaky_relu(a_src . W x_j + a_dst . W x_i + a_edge . W_edge e_ij)``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations with weights of their own
    out_channels : int
        Of each head.
    heads : int, default 1
    concat : bool, default True
        Put the heads' outputs one after the other; False averages them.
    slope : float, default 0.2
        Of the leaky ReLU below zero.
    dropout : float in [0, 1), default 0
        Share of the ``alpha`` dropped while training.
    residual : bool, default False
        Add a linear map of ``x_i``.
    add_self_loops : bool, default True
        Give every node one loop, in place of those it has. Its features are the mean of those of
        the other edges that end there.
    edge_channels : int, optional
        Features of an edge; none when left out.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values and dropout.

    Attributes
    ----------
    lin : Linear, or lin_src and lin_dst for a pair of ``in_channels``; without bias
    att_src, att_dst : Parameter, shape (1, heads, out_channels)
    lin_edge : Linear, or None
    att_edge : Parameter, shape (1, heads, out_channels), or None
    res : Linear without bias, or None
    bias : Parameter, shape (heads * out_channels,), or (out_channels,) of averages, or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_attr)``, with ``x`` of shape (n_nodes, in_channels), or a pair
    for sources and destinations; gives (n_dst, heads * out_channels), or (n_dst, out_channels) of
    averages. With ``return_attention=True`` it gives ``(y, (graph, alpha))``: the graph with its
    loops, and ``alpha`` of shape (n_edges, heads) for its edges, before dropout.

    References
    ----------
    Veličković et al., "Graph Attention Networks", 2017, arXiv:1710.10903, eq. 3 to 6.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> layer = geom.GATConv(8, 3, heads=2)
    >>> layer(graph, rx.ones((4, 8), dtype="float32")).shape
    (4, 6)
    """

    _dgl_names = {
        "fc": "lin",
        "fc_src": "lin_src",
        "fc_dst": "lin_dst",
        "attn_l": "att_src",
        "attn_r": "att_dst",
        "res_fc": "res",
    }

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        heads: int = 1,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        residual: bool = False,
        add_self_loops: bool = True,
        edge_channels: int | None = None,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        self._set(in_channels, out_channels, heads, concat, dropout, edge_channels, generator)
        self.slope, self.add_self_loops = slope, add_self_loops
        options = made(dtype, device, generator)
        width = heads * out_channels
        if isinstance(in_channels, tuple):
            self.lin_src, self.lin_dst = (
                linear(n, width, bias=False, **options) for n in in_channels
            )
        else:
            self.lin = linear(in_channels, width, bias=False, **options)
        self.att_src = vectors(heads, out_channels, **options)
        self.att_dst = vectors(heads, out_channels, **options)
        self.lin_edge = self.att_edge = None
        if edge_channels is not None:
            self.lin_edge = linear(edge_channels, width, bias=False, **options)
            self.att_edge = vectors(heads, out_channels, **options)
        self.bias = bias_of(self._n_outputs, bias, **options)
        self.res = self._residual(residual, options)

    def forward(
        self, graph: Graph, x: Any, edge_attr: Any = None, *, return_attention: bool = False
    ) -> Any:
        if isinstance(self.in_channels, tuple):
            src, dst = pair(graph, x)
            z = self.lin_src(src), self.lin_dst(dst)
        else:
            z = tuple(map(self.lin, x)) if isinstance(x, tuple) else self.lin(x)
        found = self.propagate(graph, z, edge_attr, return_attention=return_attention)
        if self.res is None:
            return found
        own = self.res(pair(graph, x)[1])
        return (found[0] + own, found[1]) if return_attention else found + own

    def propagate(
        self, graph: Graph, z: Any, edge_attr: Any = None, *, return_attention: bool = False
    ) -> Any:
        """Do all but the products of ``x``: ``z`` is that with ``W``, or a pair."""
        src, dst = pair(graph, z)
        apart = dst is not src and isinstance(z, tuple)
        values = src if self.concat and not apart else self._per_head(src)
        graph, edge_attr = self._edges(graph, edge_attr)
        edge = None if edge_attr is None else edge_attr @ self._edge_vectors().T
        options = {"slope": self.slope, "return_attention": return_attention, **self._drops()}
        if apart:
            dst = self._per_head(dst)
            terms = sum(values * self.att_src, axis=-1), sum(dst * self.att_dst, axis=-1)
            attend = _attending(graph).attend_additive
            out, alpha = attend(graph, values, *terms, edge, **options)
        else:
            attend = _attending(graph).attend_projected
            out, alpha = attend(graph, values, self.att_src, self.att_dst, edge, **options)
        out = with_bias(self._put_together(out), self.bias)
        return (out, (graph, alpha)) if return_attention else out

    def _edge_vectors(self):
        """Give ``W_edge.T a_edge`` of each head, as the product with ``e`` needs no more."""
        shape = (self.heads, self.out_channels, self.edge_channels)
        weight = reshape(self.lin_edge.weight, shape)
        return sum(weight * reshape(self.att_edge, (*shape[:2], 1)), axis=1)

    def _from_pyg(self, arrays):
        # Earlier versions held one matrix under two names, one of which may be absent.
        if not isinstance(self.in_channels, tuple) and "lin_src.weight" in arrays:
            arrays["lin.weight"] = arrays.pop("lin_src.weight")
            arrays.pop("lin_dst.weight", None)
        return arrays


class GATv2Conv(_Attention):
    """Attention that depends on the destination: ``y_i = sum_j alpha_ij L x_j + b``, by head.

    ``alpha_ij`` is the softmax over the edges from ``j`` to ``i`` of
    ``a . leaky_relu(L x_j + R x_i + W_edge e_ij)``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    out_channels : int
        Of each head.
    share_weights : bool, default False
        Take ``L`` for ``R`` too.
    heads, concat, slope, dropout, residual, add_self_loops, edge_channels
        As for :class:`GATConv`.
    bias, dtype, device, generator
        As for :class:`GATConv`.

    Attributes
    ----------
    lin_l, lin_r : Linear
    att : Parameter, shape (1, heads, out_channels)
    lin_edge, res : Linear without bias, or None
    bias : Parameter, shape (heads * out_channels,), or (out_channels,) of averages, or None

    Notes
    -----
    Call it as :class:`GATConv`. On a GPU the features of all edges are mapped at once, so that
    attention is one pass, where they take up to a 32nd of its memory; else those of some edges at a
    time.

    References
    ----------
    Brody, Alon and Yahav, "How Attentive are Graph Attention Networks?", 2021, arXiv:2105.14491,
    eq. 7.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.GATv2Conv(8, 3, heads=2)
    GATv2Conv(8, 3, heads=2)
    """

    _dgl_names = {"fc_src": "lin_l", "fc_dst": "lin_r", "attn": "att", "res_fc": "res"}

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        heads: int = 1,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        residual: bool = False,
        add_self_loops: bool = True,
        edge_channels: int | None = None,
        share_weights: bool = False,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        self._set(in_channels, out_channels, heads, concat, dropout, edge_channels, generator)
        self.slope, self.add_self_loops = slope, add_self_loops
        self.share_weights = share_weights
        options = made(dtype, device, generator)
        n_src, n_dst = sizes(in_channels)
        width = heads * out_channels
        self.lin_l = linear(n_src, width, bias=bias, **options)
        self.lin_r = self.lin_l if share_weights else linear(n_dst, width, bias=bias, **options)
        self.att = vectors(heads, out_channels, **options)
        self.lin_edge = None
        if edge_channels is not None:
            self.lin_edge = linear(edge_channels, width, bias=False, **options)
        self.bias = bias_of(self._n_outputs, bias, **options)
        self.res = self._residual(residual, options)

    def forward(
        self, graph: Graph, x: Any, edge_attr: Any = None, *, return_attention: bool = False
    ) -> Any:
        src, dst = pair(graph, x)
        left = self._per_head(self.lin_l(src))
        right = left if self.share_weights and dst is src else self._per_head(self.lin_r(dst))
        graph, edge_attr = self._edges(graph, edge_attr)
        out, alpha = _attending(graph).attend_mlp(
            graph,
            left,
            right,
            reshape(self.att, self.att.shape[1:]),
            edge_attr,
            project=self.lin_edge,
            slope=self.slope,
            return_attention=return_attention,
            **self._drops(),
        )
        out = with_bias(self._put_together(out), self.bias)
        out = out if self.res is None else out + self.res(dst)
        return (out, (graph, alpha)) if return_attention else out

    def _from_pyg(self, arrays):
        if self.share_weights:
            arrays = {name: x for name, x in arrays.items() if not name.startswith("lin_r.")}
        return arrays

    def _from_dgl(self, arrays):
        arrays = self._from_pyg(super()._from_dgl(arrays))
        if self.bias is not None:  # there the maps alone have one
            arrays.setdefault("bias", zeros(self.bias.shape, dtype=self.bias.dtype, device="cpu"))
        return arrays


class TransformerConv(_Attention):
    """Graph transformer: ``y_i = W_skip x_i + sum_j alpha_ij (V x_j + W_edge e_ij)``, by head.

    ``alpha_ij`` is the softmax over the edges from ``j`` to ``i`` of
    ``(Q x_i) . (K x_j + W_edge e_ij) / sqrt(out_channels)``. No loops are added.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    out_channels : int
        Of each head.
    beta : bool, default False
        Weigh the two terms with ``beta_i`` and ``1 - beta_i``, the sigmoid of a linear function of
        both and their difference.
    root_weight : bool, default True
        False leaves out ``W_skip x_i``.
    heads, concat, dropout, edge_channels, bias, dtype, device, generator
        As for :class:`GATConv`. ``bias`` is that of ``W_skip``.

    Attributes
    ----------
    lin_key, lin_query, lin_value : Linear
    lin_skip, lin_edge, lin_beta : Linear, or None; the last two without bias

    Notes
    -----
    Call it as :class:`GATConv`. On a GPU the features of all edges are mapped at once, so that
    attention is one pass, where they take up to a 32nd of its memory; else those of some edges at a
    time.

    References
    ----------
    Shi et al., "Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification", 2020, arXiv:2009.03509, eq. 3 to 5.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.TransformerConv(8, 3, heads=2, beta=True)
    TransformerConv(8, 3, heads=2, beta=True)
    """

    _shown = (*_Attention._shown, "beta", "root_weight")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_channels: int | None = None,
        root_weight: bool = True,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        self._set(in_channels, out_channels, heads, concat, dropout, edge_channels, generator)
        self.beta, self.root_weight = beta and root_weight, root_weight
        options = made(dtype, device, generator)
        n_src, n_dst = sizes(in_channels)
        width = heads * out_channels
        self.lin_key = linear(n_src, width, **options)
        self.lin_query = linear(n_dst, width, **options)
        self.lin_value = linear(n_src, width, **options)
        self.lin_skip = self.lin_edge = self.lin_beta = None
        if edge_channels is not None:
            self.lin_edge = linear(edge_channels, width, bias=False, **options)
        if root_weight:
            self.lin_skip = linear(n_dst, self._n_outputs, bias=bias, **options)
        if self.beta:
            self.lin_beta = linear(3 * self._n_outputs, 1, bias=False, **options)

    def forward(
        self, graph: Graph, x: Any, edge_attr: Any = None, *, return_attention: bool = False
    ) -> Any:
        src, dst = pair(graph, x)
        graph, edge_attr = self._edges(graph, edge_attr)
        out, alpha = _attending(graph).attend_dot(
            graph,
            self._per_head(self.lin_query(dst)),
            self._per_head(self.lin_key(src)),
            self._per_head(self.lin_value(src)),
            edge_attr,
            project=self.lin_edge,
            return_attention=return_attention,
            **self._drops(),
        )
        out = self._put_together(out)
        if self.lin_skip is not None:
            own = self.lin_skip(dst)
            if self.lin_beta is not None:
                share = sigmoid(self.lin_beta(join([out, own, out - own], axis=-1)))
                out = share * own + (1 - share) * out
            else:
                out = out + own
        return (out, (graph, alpha)) if return_attention else out
