"""Principal neighbourhood aggregation: several operations, scaled by the number of neighbours."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom import _edges
from rtxarr.geom._aggregate import aggregate, check_mean_degrees, degree_scalers
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import MessageLayer, Misfit, linear, made, widest
from rtxarr.geom._message_passing import MessagePassing, check_rows
from rtxarr.geom._subgraph import iota
from rtxarr.nn import BatchNorm, Sequential
from rtxarr.ops import astype, concat, relu, reshape, stack, where
from rtxarr.ops._check import check_sizes

__all__ = ["PNAConv"]

_OPS = ("sum", "mean", "max", "min", "var", "std")
# What a term of the destination adds to each operation: itself once, not at all, or by edge.
_SHIFTED = ("mean", "max", "min")


class PNAConv(MessageLayer):
    """Principal neighbourhood aggregation: several operations, scaled by the degree.

    ``y_i = W post([x_i, S(d_i) agg_j pre([x_i, x_j, e_ij])]) + b``.

    Parameters
    ----------
    in_channels, out_channels : int
    aggregators : sequence of str
        Among "sum", "mean", "max", "min", "var" and "std".
    scalers : sequence of str
        ``S``; see :func:`rtxarr.geom.degree_scalers`.
    mean_degree, mean_log_degree : float > 0
        The means of ``d`` and ``log(d + 1)`` over the nodes that the model is trained on, where
        ``d`` is the number of edges that end at a node.
    towers : int, default 1
        Divides ``out_channels``: networks side by side, mixed by a last linear map.
    divide_input : bool, default False
        Give each tower its part of the features instead of all.
    pre_layers, post_layers : int, default 1
        Linear maps, with ReLU between them.
    edge_channels : int, optional
        Features of an edge; none when left out.
    batch_norm : bool, default False
        Divide what a tower gives by the root of the number of its graph's nodes, the graphs being
        those of a :class:`Batch`, and normalise it over all nodes, before the last linear map.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    pre_nns, post_nns : list of Sequential, one a tower
    lin : Linear
    edge_encoder : Linear, or None
    norms : list of BatchNorm, one a tower, or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_attr)``, with ``x`` of shape (n_nodes, in_channels); gives
    (n_nodes, out_channels). With one layer before and no edge features, what a destination adds to
    all its messages is added after the aggregation, and there are no messages.

    References
    ----------
    Corso et al., "Principal Neighbourhood Aggregation for Graph Nets", 2020, arXiv:2004.05718,
    eq. 7 and 8.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> layer = geom.PNAConv(
    ...     8, 4, ["mean", "max", "std"], ["identity", "attenuation"], mean_degree=0.5,
    ...     mean_log_degree=0.35,
    ... )
    >>> layer(graph, rx.ones((4, 8), dtype="float32")).shape
    (4, 4)
    """

    _shown = ("in_channels", "out_channels", "aggregators", "scalers", "towers", "edge_channels")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggregators: Sequence[str],
        scalers: Sequence[str],
        *,
        mean_degree: float,
        mean_log_degree: float,
        towers: int = 1,
        divide_input: bool = False,
        pre_layers: int = 1,
        post_layers: int = 1,
        edge_channels: int | None = None,
        batch_norm: bool = False,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        check_sizes(towers=towers, pre_layers=pre_layers, post_layers=post_layers)
        for name in aggregators:
            if name not in _OPS:
                raise ValueError(f"aggregators must be among {', '.join(_OPS)}, got {name!r}")
        if out_channels % towers or (divide_input and in_channels % towers):
            raise ValueError(
                f"towers must divide the features, got {towers} for {in_channels} and "
                f"{out_channels}"
            )
        MessagePassing.__init__(self, aggr=aggregators)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.aggregators, self.scalers = tuple(aggregators), tuple(scalers)
        check_mean_degrees(scalers, mean_degree, mean_log_degree)
        self.mean_degree, self.mean_log_degree = mean_degree, mean_log_degree
        self.towers, self.divide_input = towers, divide_input
        self.edge_channels = edge_channels
        options = made(dtype, device, generator)
        width = self._width = in_channels // towers if divide_input else in_channels
        n_parts = 2 if edge_channels is None else 3
        self.edge_encoder = None
        if edge_channels is not None:
            self.edge_encoder = linear(edge_channels, width, **options)
        n_found = len(self.aggregators) * len(self.scalers) + 1
        n_out = out_channels // towers
        self.pre_nns = [
            _network(n_parts * width, width, pre_layers, options) for _ in range(towers)
        ]
        self.post_nns = [
            _network(n_found * width, n_out, post_layers, options) for _ in range(towers)
        ]
        self.norms = None
        if batch_norm:
            self.norms = [BatchNorm(n_out, dtype=dtype, device=device) for _ in range(towers)]
        self.lin = linear(out_channels, out_channels, **options)
        self.width = 3 * towers * max(map(widest, self.pre_nns))

    def forward(self, graph: Graph, x: Any, edge_attr: Any = None) -> Any:
        if (edge_attr is None) != (self.edge_channels is None):
            raise ValueError(
                f"edge_attr must be given if and only if edge_channels is, got {edge_attr!r} with "
                f"edge_channels={self.edge_channels}"
            )
        n = x.shape[0]
        parts = [x[:, i * self._width : (i + 1) * self._width] for i in range(self.towers)]
        parts = parts if self.divide_input else self.towers * [x]
        if edge_attr is None and len(self.pre_nns[0]) == 1 and graph.mask is None:
            found = self._without_messages(graph, x, parts)
        else:
            check_rows("edge_attr", edge_attr, graph.n_edges, "edges")
            found = self.propagate(graph, parts, edge_attr)
        # From (n, operations, towers, features) to one row of all scaled operations a tower.
        found = reshape(found, (n, len(self.aggregators), self.towers, self._width))
        scale = self._scale(graph, raw(x))
        outputs = []
        for tower, (own, post) in enumerate(zip(parts, self.post_nns, strict=True)):
            rows = reshape(found[:, :, tower], (n, len(self.aggregators) * self._width))
            scaled = [rows * scale[:, i : i + 1] for i in range(len(self.scalers))]
            outputs.append(post(concat([own, *scaled], axis=1)))
        if self.norms is not None:
            share = _share(graph, raw(x))
            pairs = zip(self.norms, outputs, strict=True)
            outputs = [norm(out * share) for norm, out in pairs]
        return self.lin(concat(outputs, axis=1))

    def _scale(self, graph, x):
        key = ("scalers", self.scalers, self.mean_degree, self.mean_log_degree, x.dtype)

        def make():
            factors = degree_scalers(
                graph,
                self.scalers,
                mean_degree=self.mean_degree,
                mean_log_degree=self.mean_log_degree,
            )
            return astype(factors, x.dtype)

        return graph.once(key, make)

    def message(self, src, dst, edge):
        encoded = [] if edge is None else [self.edge_encoder(edge)]
        parts = zip(dst, src, self.pre_nns, strict=True)
        return concat([pre(concat([i, j, *encoded], axis=1)) for i, j, pre in parts], axis=1)

    def update(self, out, dst):
        return out

    def _without_messages(self, graph, x, parts):
        """Aggregate ``W_j x_j`` and add ``W_i x_i + b`` as each operation has it."""
        own, sent = [], []
        for part, pre in zip(parts, self.pre_nns, strict=True):
            weight = pre[0].weight
            own.append(part @ weight[:, : self._width].T + pre[0].bias)
            sent.append(part @ weight[:, self._width :].T)
        own, sent = concat(own, axis=1), concat(sent, axis=1)
        degree = _edges.counts(graph, raw(sent).dtype)
        alone = reshape(graph.in_degrees == 0, (-1, 1))
        own = where(alone, _device.namespace(raw(sent)).zeros_like(raw(own)), own)
        found = []
        for op in self.aggregators:
            out = aggregate(graph, sent, op)
            if op in _SHIFTED:
                out = out + own
            elif op == "sum":
                out = out + degree * own
            found.append(out)
        return stack(found, axis=1)

    def _from_dgl(self, arrays):
        if self.norms is None or not (self.divide_input or self.towers == 1):
            raise ValueError(
                "PNAConv must have batch_norm=True and divide_input=True to take the parameters of "
                f"DGL's, got batch_norm={self.norms is not None} and "
                f"divide_input={self.divide_input}"
            )
        width, n_edge = self._width, self.edge_channels or 0
        if n_edge > width:
            raise ValueError(
                f"edge_channels must be at most the {width} features of a tower to take DGL's, "
                f"got {n_edge}"
            )
        known, weight = {}, None
        for name, x in arrays.items():
            tower = re.fullmatch(r"towers\.(\d+)\.(M|U|batchnorm)\.(\w+)", name)
            place, kind, rest = tower.groups() if tower else (None, None, None)
            if kind == "M" and rest == "weight":
                shape = width, 2 * width + n_edge
                if x.shape != shape:
                    raise Misfit(name, shape, x.shape)
                # Sources come first there; features of edges are not encoded.
                weight, parts = x, [x[:, width : 2 * width], x[:, :width]]
                if n_edge:
                    nothing = np.zeros_like(x, shape=(width, width - n_edge))
                    parts += [x[:, 2 * width :], nothing]
                known[f"pre_nns.{place}.0.weight"] = concat(parts, axis=1)
            elif kind == "batchnorm":
                known[f"norms.{place}.{rest}"] = x
            elif tower:
                known[f"{'pre_nns' if kind == 'M' else 'post_nns'}.{place}.0.{rest}"] = x
            else:
                known[name.replace("mixing_layer.0.", "lin.")] = x
        if n_edge and weight is not None:
            known["edge_encoder.weight"] = np.eye(width, n_edge, dtype=weight.dtype)
            known["edge_encoder.bias"] = np.zeros(width, weight.dtype)
        return known

    def _from_pyg(self, arrays):
        # The means over the training set are settings here.
        return {name: x for name, x in arrays.items() if not name.startswith("aggr_module.")}


def _share(graph, x):
    """Give, for each node, one over the root of how many nodes its graph has."""

    def make():
        xp = _device.namespace(graph.indptr)
        size = xp.full_like(graph.in_degrees, graph.n_dst)
        ptr = getattr(graph, "ptr", None)
        if ptr is not None:  # of a batch
            owner = xp.searchsorted(ptr, iota(graph, graph.n_dst), side="right") - 1
            size = xp.take(ptr[1:] - ptr[:-1], owner)
        return xp.astype(1 / xp.sqrt(xp.astype(size, xp.float64)), x.dtype)[:, None]

    return graph.once(("share", x.dtype), make)


def _network(n_inputs, n_outputs, n_layers, options):
    layers: list = [linear(n_inputs, n_outputs, **options)]
    for _ in range(n_layers - 1):
        layers += [relu, linear(n_outputs, n_outputs, **options)]
    return Sequential(*layers)
