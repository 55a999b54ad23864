"""GraphSAGE and the plain graph convolution: a node and the aggregate of its neighbours."""

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.geom._aggregate import aggregate
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, linear, made, sizes, with_bias
from rtxarr.geom._message_passing import pair
from rtxarr.geom._messages import check_op
from rtxarr.nn import LSTM
from rtxarr.ops import concat, maximum, relu, reshape, sqrt, sum, take

__all__ = ["GraphConv", "SAGEConv"]

_AGGRS = ("mean", "max", "sum", "pool", "lstm")


class SAGEConv(Layer):
    """GraphSAGE: ``y_i = L agg_j x_j + R x_i + b`` over the edges from ``j`` to ``i``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    out_channels : int
    aggr : {"mean", "max", "sum", "pool", "lstm"}, default "mean"
        "pool" is the maximum of ``relu(P x_j + p)``; "lstm" the last state of an LSTM over the
        neighbours, in the order in which the graph stores the edges.
    normalize : bool, default False
        Divide ``y_i`` by its norm, or by 1e-12 if that is more.
    root_weight : bool, default True
        False leaves out ``R x_i``.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    lin_l : Linear
    lin_r : Linear without bias, or None
    lin_pool : Linear, for "pool" alone
    lstm : LSTM, for "lstm" alone

    Notes
    -----
    Call it as ``layer(graph, x)``, with ``x`` of shape (n_nodes, in_channels), or a pair for
    sources and destinations; gives (n_dst, out_channels). The aggregate of no neighbours is zero.
    Means and sums are multiplied with ``L`` first or last, whatever makes the rows to add up
    shorter.

    References
    ----------
    Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", 2017,
    arXiv:1706.02216, alg. 1 and section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> geom.SAGEConv(8, 2, aggr="max")(graph, rx.ones((4, 8), dtype="float32")).shape
    (4, 2)
    """

    _shown = ("in_channels", "out_channels", "aggr", "normalize", "root_weight")
    _dgl_names = {"fc_neigh": "lin_l", "fc_self": "lin_r", "fc_pool": "lin_pool"}

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        if aggr not in _AGGRS:
            raise ValueError(f"aggr must be one of {', '.join(_AGGRS)}, got {aggr!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.aggr, self.normalize, self.root_weight = aggr, normalize, root_weight
        options = made(dtype, device, generator)
        n_src, n_dst = sizes(in_channels)
        if aggr == "pool":
            self.lin_pool = linear(n_src, n_src, **options)
        if aggr == "lstm":
            self.lstm = LSTM(n_src, n_src, **options)
        self.lin_l = linear(n_src, out_channels, bias=bias, **options)
        self.lin_r = linear(n_dst, out_channels, bias=False, **options) if root_weight else None

    def forward(self, graph: Graph, x: Any) -> Any:
        src, dst = pair(graph, x)
        if self.aggr == "lstm":
            out = self.lin_l(_last_states(graph, self.lstm, src))
        elif self.aggr == "pool":
            out = self.lin_l(aggregate(graph, relu(self.lin_pool(src)), "max"))
        else:
            out = mapped(graph, src, self.aggr, self.lin_l)
        if self.lin_r is not None:
            out = out + self.lin_r(dst)
        if self.normalize:
            # Half the way below the square root, so that a row of zeros has a gradient.
            norm = sqrt(maximum(sum(out * out, axis=-1, keepdims=True), 1e-24))
            out = out / norm
        return out

    def _from_pyg(self, arrays):
        renamed = {}
        for name, x in arrays.items():
            if self.aggr == "pool" and name.startswith("lin."):
                name = f"lin_pool.{name.removeprefix('lin.')}"
            renamed[name.removeprefix("aggr_module.")] = x
        return renamed

    def _from_dgl(self, arrays):
        arrays = super()._from_dgl(arrays)
        # The bias has been in different places in different versions, in two even.
        for name in ("bias", "lin_r.bias"):
            if name in arrays:
                arrays["lin_l.bias"] = arrays.get("lin_l.bias", 0) + arrays.pop(name)
        return arrays


class GraphConv(Layer):
    """Graph convolution of k-GNNs: ``y_i = W_rel agg_j w_ij x_j + W_root x_i + b``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    out_channels : int
    aggr : str, default "sum"
        An operation of :func:`rtxarr.geom.aggregate`.
    bias : bool, default True
    dtype, device, generator
        As for :class:`SAGEConv`.

    Attributes
    ----------
    lin_rel : Linear
    lin_root : Linear, without bias

    Notes
    -----
    Call it as ``layer(graph, x, edge_weight)``, with weights of shape (n_edges,) or None, else as
    :class:`SAGEConv`.

    References
    ----------
    Morris et al., "Weisfeiler and Leman Go Neural: Higher-order Graph Neural Networks", 2018,
    arXiv:1810.02244, eq. 5.

    Examples
    --------
    >>> from rtxarr import geom
    >>> geom.GraphConv(8, 2, aggr="mean")
    GraphConv(8, 2, aggr='mean')
    """

    _shown = ("in_channels", "out_channels", "aggr")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        aggr: str = "sum",
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        check_op(aggr)
        self.in_channels, self.out_channels, self.aggr = in_channels, out_channels, aggr
        options = made(dtype, device, generator)
        n_src, n_dst = sizes(in_channels)
        self.lin_rel = linear(n_src, out_channels, bias=bias, **options)
        self.lin_root = linear(n_dst, out_channels, bias=False, **options)

    def forward(self, graph: Graph, x: Any, edge_weight: Any = None) -> Any:
        src, dst = pair(graph, x)
        return mapped(graph, src, self.aggr, self.lin_rel, edge_weight) + self.lin_root(dst)


def mapped(graph, x, aggr, lin, weight=None):
    """Give ``lin`` of the aggregate, in the order that makes the rows to add up shorter."""
    if aggr in ("sum", "mean") and lin.out_features < lin.in_features:
        return with_bias(aggregate(graph, x @ lin.weight.T, aggr, weight=weight), lin.bias)
    return lin(aggregate(graph, x, aggr, weight=weight))


def _last_states(graph, lstm, x):
    """Run an LSTM over the sources of each destination, all with as many edges at a time."""
    batches, places = graph.once("by_degree", lambda: _by_degree(graph))
    xp = _device.namespace(graph.indptr)
    found = [xp.zeros((1, lstm.n_features), dtype=lstm.layers[0][0].weight_hh.dtype)]
    for columns, stored in batches:
        n, degree = columns.shape
        steps = reshape(take(x, reshape(columns, (-1,)), axis=0), (n, degree, x.shape[1]))
        if graph.mask is not None:
            mask = take(graph.stored(graph.mask), reshape(stored, (-1,)))
            steps = steps * reshape(mask, (n, degree, 1))
        found.append(lstm(steps)[1][0][-1])
    return take(concat(found), places, axis=0)


def _by_degree(graph):
    """Give the destinations with 1, 2, ... edges, and where each of those went.

    Of each the sources and the places where the edges are stored, shape (n, degree).
    """
    xp = _device.namespace(graph.indptr)
    degrees = np.asarray(_device.to_device(graph.in_degrees, "cpu"))
    places = np.zeros(graph.n_dst, dtype=np.int64)
    batches, n_placed = [], 1
    for degree in np.unique(degrees[degrees > 0]):
        (rows,) = np.nonzero(degrees == degree)
        places[rows] = n_placed + np.arange(rows.size)
        n_placed += rows.size
        starts = xp.take(graph.indptr, _device.to_device(rows, graph.device))
        stored = starts[:, None] + xp.arange(int(degree), dtype=xp.int64)
        columns = xp.take(graph.indices, xp.reshape(stored, (-1,)))
        batches.append((xp.reshape(columns, stored.shape), stored))
    return batches, _device.to_device(places, graph.device)
