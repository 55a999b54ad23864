"""Graph convolution with a matrix for each kind of edge."""

import math
from typing import Any

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import isdtype
from rtxarr.geom._aggregate import aggregate
from rtxarr.geom._graph import Graph
from rtxarr.geom._layer import Layer, bias_of, made, sizes, with_bias
from rtxarr.geom._message_passing import pair
from rtxarr.geom._messages import check_op
from rtxarr.nn import Parameter
from rtxarr.nn.initializers import xavier_uniform
from rtxarr.ops import moveaxis, reshape
from rtxarr.ops._check import check_sizes

__all__ = ["RGCNConv"]


class RGCNConv(Layer):
    """Relational graph convolution: ``y_i = W_root x_i + sum_r agg_j W_r x_j + b``.

    The aggregate for kind ``r`` is over the edges of that kind from ``j`` to ``i``.

    Parameters
    ----------
    in_channels : int, or pair of int for sources and destinations
    out_channels : int
    n_relations : int
        Kinds of edges.
    n_bases : int, optional
        Make each ``W_r`` a combination of so many matrices.
    n_blocks : int, optional
        Make each ``W_r`` of so many blocks on its diagonal instead; divides both numbers of
        features.
    aggr : str, default "mean"
        An operation of :func:`rtxarr.geom.aggregate`.
    root_weight : bool, default True
        False leaves out ``W_root x_i``.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    weight : Parameter, shape (n_relations or n_bases, in_channels, out_channels)
        Or (n_relations, n_blocks, in_channels // n_blocks, out_channels // n_blocks).
    comp : Parameter, shape (n_relations, n_bases), or None
    root : Parameter, shape (in_channels, out_channels), or None
    bias : Parameter, shape (out_channels,), or None

    Notes
    -----
    Call it as ``layer(graph, x, edge_type)``, with ``x`` of shape (n_nodes, in_channels), or a pair
    for sources and destinations, and integers of shape (n_edges,) in ``[0, n_relations)``. The
    graph is taken apart by kind once for each array of kinds.

    References
    ----------
    Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", 2017,
    arXiv:1703.06103, eq. 2 and 3.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=4)
    >>> layer = geom.RGCNConv(8, 2, 3)
    >>> layer(graph, rx.ones((4, 8), dtype="float32"), np.array([2, 0])).shape
    (4, 2)
    """

    _shown = ("in_channels", "out_channels", "n_relations", "n_bases", "aggr", "root_weight")
    _dgl_names = {
        "linear_r.W": "weight",
        "linear_r.coeff": "comp",
        "loop_weight": "root",
        "h_bias": "bias",
    }

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        n_relations: int,
        *,
        n_bases: int | None = None,
        n_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        check_sizes(n_relations=n_relations)
        if n_bases is not None:
            check_sizes(n_bases=n_bases)
        check_op(aggr)
        n_src, n_dst = sizes(in_channels)
        if n_blocks is not None:
            check_sizes(n_blocks=n_blocks)
            if n_bases is not None or n_src % n_blocks or out_channels % n_blocks:
                raise ValueError(
                    f"n_blocks must divide {n_src} and {out_channels} features and stand without "
                    f"n_bases, got n_blocks={n_blocks} and n_bases={n_bases}"
                )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.n_relations, self.n_bases, self.n_blocks = n_relations, n_bases, n_blocks
        self.aggr, self.root_weight = aggr, root_weight
        options = made(dtype, device, generator)
        shape: tuple[int, ...] = (n_bases or n_relations, n_src, out_channels)
        if n_blocks is not None:
            shape = (n_relations, n_blocks, n_src // n_blocks, out_channels // n_blocks)
        self.weight = Parameter(shape, init=_matrices, **options)
        self.comp = self.root = None
        if n_bases is not None:
            self.comp = Parameter((n_relations, n_bases), init="xavier_uniform", **options)
        if root_weight:
            self.root = Parameter((n_dst, out_channels), init="xavier_uniform", **options)
        self.bias = bias_of(out_channels, bias, **options)

    def forward(self, graph: Graph, x: Any, edge_type: Any) -> Any:
        src, dst = pair(graph, x)
        weight = self.weight
        if self.comp is not None:
            flat = reshape(weight, (self.n_bases, -1))
            weight = reshape(self.comp @ flat, (self.n_relations, *weight.shape[1:]))
        out = None if self.root is None else dst @ self.root
        first = self.aggr in ("sum", "mean") and self.out_channels < src.shape[1]
        for kind, part in enumerate(by_kind(graph, edge_type, self.n_relations)):
            if first:
                found = aggregate(part, self._product(src, weight[kind]), self.aggr)
            else:
                found = self._product(aggregate(part, src, self.aggr), weight[kind])
            out = found if out is None else out + found
        return with_bias(out, self.bias)

    def _product(self, x, weight):
        if self.n_blocks is None:
            return x @ weight
        blocks = moveaxis(
            reshape(x, (x.shape[0], self.n_blocks, x.shape[1] // self.n_blocks)), 1, 0
        )
        return reshape(moveaxis(blocks @ weight, 0, 1), (x.shape[0], self.out_channels))

    def _flat_blocks(self):
        """Give the shape in which DGL keeps the blocks."""
        n_relations, *block = self.weight.shape
        return n_relations, math.prod(block)

    def _from_dgl(self, arrays):
        arrays = super()._from_dgl(arrays)
        weight = arrays.get("weight")
        if self.n_blocks is not None and getattr(weight, "shape", None) == self._flat_blocks():
            arrays["weight"] = reshape(weight, self.weight.shape)
        return arrays


def _matrices(shape, *, dtype, generator=None):
    """Initialize a stack of matrices, each by its own number of inputs and outputs."""
    init = xavier_uniform(in_axis=1, out_axis=2)
    n = math.prod(shape[:-2])
    parts = [init((1, *shape[-2:]), dtype=dtype, generator=generator) for _ in range(n)]
    xp = _device.namespace(parts[0])
    return xp.reshape(xp.concat(parts, axis=0), shape)


def by_kind(graph: Graph, kinds: Any, n_kinds: int) -> list[Graph]:
    """Take a graph apart by the kinds of its edges, all nodes staying in each part."""
    kinds = raw(kinds)
    if not _device.is_array(kinds) or not isdtype(kinds.dtype, "integral"):
        raise TypeError(f"edge_type must be an array of integers, got {kinds!r}")
    if kinds.shape != (graph.n_edges,):
        raise ValueError(f"edge_type must have shape ({graph.n_edges},), got {kinds.shape}")
    key = ("by_kind", id(kinds), n_kinds)
    # The array is kept beside the parts, so that no other one gets its id.
    return graph.once(key, lambda: (kinds, _parts(graph, kinds, n_kinds)))[1]


def _parts(graph, kinds, n_kinds):
    check_range("edge_type", kinds, 0, n_kinds)
    xp = _device.namespace(graph.indptr)
    parts = []
    for kind in range(n_kinds):
        (numbers,) = xp.nonzero(kinds == kind)
        parts.append(
            Graph._of_edges(
                xp.take(graph.src, numbers), xp.take(graph.dst, numbers), graph.n_src, graph.n_dst
            )
        )
    return parts
