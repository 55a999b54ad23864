"""Several graphs as one, whose parts have no edges between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rtxarr import _device, ops
from rtxarr._checks import check_range, values_are_checked
from rtxarr._override import tracing
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import isdtype
from rtxarr.geom._graph import Graph, _attributes, _index_dtype, frozen, plain
from rtxarr.geom._subgraph import iota, subgraph

__all__ = ["Batch", "to_dense_adj", "to_dense_batch"]


class Batch(Graph):
    """Several graphs as one: graph ``i`` has the nodes ``ptr[i]`` to ``ptr[i + 1]``.

    Most are made by :meth:`from_graphs`. Which array belongs to nodes, which to edges and which to
    graphs is said when a batch is made, never guessed from lengths, and graphs without edges or
    nodes are graphs like others.

    Parameters
    ----------
    blocks : Graph
        Without edges from one of its graphs to another.
    ptr : array of int, shape (n_graphs + 1,)
        Rises from 0 to the number of nodes.
    graph : mapping of str to array or Tensor, optional
        What belongs to the graphs: arrays whose first axis has ``n_graphs`` entries.

    Attributes
    ----------
    ptr : array of int64, shape (n_graphs + 1,)
    graph : mapping of str to array or Tensor
        Read-only.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> edge = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    >>> point = geom.Graph.from_edges(np.array([], int), np.array([], int), n_nodes=1)
    >>> batch = geom.Batch.from_graphs([edge, point, edge], graph={"y": np.array([1, 0, 1])})
    >>> batch
    Batch(3 graphs, 5 nodes, 2 edges, graph: y)
    >>> batch.ptr, batch.src, batch.dst
    (array([0, 2, 3, 5]), array([0, 3]), array([1, 4]))
    >>> batch[2]
    Graph(2 nodes, 1 edges)
    """

    ptr: Any
    graph: Mapping[str, Any]

    def __init__(self, blocks: Graph, ptr: Any, *, graph: Mapping[str, Any] | None = None):
        ptr = _pointers(ptr, blocks.n_nodes)
        xp = _device.namespace(ptr, blocks.indptr)
        self._take_over(blocks, xp.astype(ptr, xp.int64, copy=False), graph)
        owner = self.graph_ids
        if bool(xp.any(xp.take(owner, blocks.src) != xp.take(owner, blocks.dst))):
            raise ValueError("blocks must have no edge from one of its graphs to another, got one")

    def _take_over(self, blocks, ptr, graph):
        edge_ids = blocks._edge_ids
        self._set(blocks.indptr, blocks.indices, blocks.n_src, edge_ids, blocks.nodes, blocks.edges)
        self._keep(ptr=frozen(ptr))
        self._keep(graph=_attributes("graph", graph, self.n_graphs))

    @classmethod
    def _of(cls, blocks, ptr, graph):
        """Build a batch of parts that are known to fit."""
        self = cls.__new__(cls)
        self._take_over(blocks, ptr, graph)
        return self

    @classmethod
    def from_graphs(
        cls,
        graphs: Sequence[Graph],
        *,
        nodes: Sequence[str] | None = None,
        edges: Sequence[str] | None = None,
        graph: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Put graphs side by side.

        Parameters
        ----------
        graphs : sequence of Graph
            All on one device; may be empty. The edges of each follow those of the one before.
        nodes, edges : sequence of str, optional
            Which arrays of nodes and edges to join; every graph must have them. By default all,
            and then all graphs must have the same ones.
        graph : mapping of str to array or Tensor, optional
            What belongs to the graphs, with an entry for each of them.

        Returns
        -------
        Batch
        """
        graphs = list(graphs)
        for i, one in enumerate(graphs):
            if not isinstance(one, Graph):
                raise TypeError(f"graphs[{i}] must be a Graph, got {type(one).__name__}")
            if not one.is_square:
                raise ValueError(f"graphs[{i}] must have nodes of one kind, got {one}")
        xp = _device.namespace(*(one.indptr for one in graphs))
        zero = xp.zeros_like(graphs[0].indptr[:1]) if graphs else xp.zeros(1, dtype=xp.int64)
        bounds, edge_bounds = [0], [0]
        for one in graphs:
            bounds.append(bounds[-1] + one.n_nodes)
            edge_bounds.append(edge_bounds[-1] + one.n_edges)
        indptr, indices, ids = [zero], [xp.zeros_like(zero[:0])], [zero[:0]]
        ordered = all(one.is_ordered for one in graphs)
        for one, node, edge in zip(graphs, bounds, edge_bounds, strict=False):
            indptr.append(one.indptr[1:] + edge)
            indices.append(one.wide_indices + node)
            if not ordered:
                ids.append(one.edge_ids + edge)
        blocks = Graph._made(
            xp.concat(indptr),
            xp.astype(xp.concat(indices), _index_dtype(xp, bounds[-1]), copy=False),
            bounds[-1],
            None if ordered else xp.concat(ids),
            _joined("nodes", graphs, nodes),
            _joined("edges", graphs, edges),
        )
        with _place(blocks):
            self = cls._of(blocks, xp.asarray(bounds, dtype=xp.int64), graph)
        self.__dict__["_bounds"] = bounds
        return self

    @classmethod
    def from_ids(
        cls,
        blocks: Graph,
        graph_ids: Any,
        *,
        n_graphs: int,
        graph: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Make a batch of a graph whose nodes say which graph they belong to, in any order.

        Parameters
        ----------
        blocks : Graph
        graph_ids : array of int, shape (n_nodes,)
            In ``[0, n_graphs)``. If they do not rise, the nodes are sorted by them, the arrays of
            nodes with them: ``argsort(graph_ids, stable=True)`` says which node went where.
        n_graphs : int
            Never taken from ``graph_ids``, since the last graphs may have no nodes.
        graph : mapping of str to array or Tensor, optional

        Returns
        -------
        Batch
            Edges keep their numbers.

        Examples
        --------
        >>> import numpy as np
        >>> from rtxarr import geom
        >>> pairs = geom.Graph.from_edges(np.array([0, 1]), np.array([3, 2]), n_nodes=4)
        >>> batch = geom.Batch.from_ids(pairs, np.array([0, 1, 1, 0]), n_graphs=2)
        >>> batch.src, batch.dst
        (array([0, 2]), array([1, 3]))
        """
        ids = plain(graph_ids)
        if not _device.is_array(ids) or not isdtype(ids.dtype, "integral"):
            raise TypeError(f"graph_ids must be an array of integers, got {graph_ids!r}")
        if ids.shape != (blocks.n_nodes,):
            raise ValueError(f"graph_ids must have shape ({blocks.n_nodes},), got {ids.shape}")
        check_range("graph_ids", ids, 0, n_graphs)
        xp = _device.namespace(ids, blocks.indptr)
        if bool(xp.any(ids[1:] < ids[:-1])):
            order = xp.argsort(ids, stable=True)
            blocks, ids = subgraph(blocks, order), xp.take(ids, order)
        bounds = iota(blocks, n_graphs + 1)
        ptr = xp.searchsorted(xp.astype(ids, xp.int64), bounds)
        return cls(blocks, ptr, graph=graph)

    @classmethod
    def from_edges(cls, *args: Any, **options: Any) -> Any:
        """Not for batches: make a :class:`Graph` and give it to :class:`Batch`."""
        raise TypeError("make a graph with Graph.from_edges, then Batch(graph, ptr)")

    # ------------------------------------------------------------------------------- parts

    @property
    def n_graphs(self) -> int:
        return self.ptr.shape[0] - 1

    @cached_property
    def graph_ids(self) -> Any:
        """Graph of each node; int64, shape (n_nodes,)."""
        xp = _device.namespace(self.ptr)
        return frozen(xp.searchsorted(self.ptr, iota(self, self.n_nodes), side="right") - 1)

    @cached_property
    def edge_ptr(self) -> Any:
        """Where the stored edges of each graph begin; int64, shape (n_graphs + 1,)."""
        xp = _device.namespace(self.ptr)
        return frozen(xp.take(self.indptr, self.ptr))

    @cached_property
    def _bounds(self):
        """``ptr`` on the host."""
        return self.ptr.tolist()

    @cached_property
    def _edge_bounds(self):
        return self.edge_ptr.tolist()

    def __getitem__(self, i: int) -> Graph:
        """Give graph ``i``, with its arrays of nodes and edges."""
        if not -self.n_graphs <= i < self.n_graphs:
            raise IndexError(f"the batch has {self.n_graphs} graphs, got {i}")
        i %= self.n_graphs
        first, last = self._bounds[i : i + 2]
        begin, end = self._edge_bounds[i : i + 2]
        xp = _device.namespace(self.indices)
        ids, numbers = None, None
        if not self.is_ordered:
            ids = self.edge_ids[begin:end]
            numbers = xp.sort(ids)  # edges are numbered anew, in the same order
            ids = xp.searchsorted(numbers, ids)

        def of_edges(x):
            return x[begin:end] if numbers is None else ops.take(x, numbers, axis=0)

        return Graph._made(
            self.indptr[first : last + 1] - begin,
            xp.astype(self.wide_indices[begin:end] - first, _index_dtype(xp, last - first)),
            last - first,
            ids,
            {name: x[first:last] for name, x in self.nodes.items()},
            {name: of_edges(x) for name, x in self.edges.items()},
        )

    def unbatch(self) -> list[Graph]:
        """Give all graphs, those without nodes or edges among them."""
        return [self[i] for i in range(self.n_graphs)]

    # --------------------------------------------------------------------------- new batches

    def replace(
        self,
        *,
        nodes: Mapping[str, Any] | None = None,
        edges: Mapping[str, Any] | None = None,
        graph: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Give the same batch with other arrays for nodes, edges or graphs."""
        blocks = super().replace(nodes=nodes, edges=edges)
        other = Batch._of(blocks, self.ptr, self.graph if graph is None else graph)
        kept = ("edge_ids", "_rows", "src", "dst", "in_degrees", "out_degrees", "wide_indices")
        for name in (*kept, "graph_ids", "edge_ptr", "_bounds", "_edge_bounds"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        other._kept = self._kept
        return other

    def to_device(self, device: Any) -> Batch:
        """Give the batch, and what belongs to it, on another device."""
        if self.device == _device.device(device):
            return self

        def moved(x):
            return x.to_device(device) if isinstance(x, Tensor) else _device.to_device(x, device)

        graph = {name: moved(x) for name, x in self.graph.items()}
        return Batch._of(super().to_device(device), moved(self.ptr), graph)

    def __repr__(self):
        text = super().__repr__().removeprefix("Graph(").removesuffix(")")
        graph = f", graph: {', '.join(self.graph)}" if self.graph else ""
        return f"Batch({self.n_graphs} graphs, {text}{graph})"


def _place(graph):
    place = graph.device
    return place if isinstance(place, _device.Device) else _device.device("cpu")


def _pointers(ptr, n_nodes):
    ptr = plain(ptr)
    _check_pointers(ptr, n_nodes)
    return ptr


def _check_pointers(ptr, n_nodes):
    _check_kind(ptr, n_nodes)
    xp = _device.namespace(ptr)
    if bool(xp.any(ptr[1:] < ptr[:-1])) or (ptr[0], ptr[-1]) != (0, n_nodes):
        raise ValueError(f"ptr must rise from 0 to the number of nodes, {n_nodes}, got {ptr}")


def _check_kind(ptr, n_nodes):
    if not _device.is_array(ptr) or not isdtype(ptr.dtype, "integral") or ptr.ndim != 1:
        raise TypeError(f"ptr must be a one-dimensional array of integers, got {ptr!r}")
    if ptr.shape[0] < 1 or (ptr.shape[0] == 1 and n_nodes):
        raise ValueError(f"ptr must rise from 0 to the number of nodes, {n_nodes}, got {ptr}")


def check_pointers(ptr: Any, n_nodes: int) -> None:
    """Refuse boundaries that do not fit; values of a GPU inside ``check_values`` alone."""
    _check_kind(ptr, n_nodes)
    if tracing() is None and (not _device.is_device_array(ptr) or values_are_checked()):
        _check_pointers(ptr, n_nodes)


def _joined(kind, graphs, names):
    """Join the arrays of nodes or edges of several graphs."""
    held = [getattr(one, kind) for one in graphs]
    if names is None and held:
        names = list(held[0])
        for i, found in enumerate(held):
            if set(found) != set(names):
                raise ValueError(
                    f"all graphs must have the same arrays of {kind}, got {sorted(names)} and, for "
                    f"graphs[{i}], {sorted(found)}: say with {kind}= which to join"
                )
    out = {}
    for name in names or ():
        for i, found in enumerate(held):
            if name not in found:
                raise ValueError(f"graphs[{i}] has no {kind}[{name!r}], got {list(found)}")
            if found[name].shape[1:] != held[0][name].shape[1:]:
                raise ValueError(
                    f"{kind}[{name!r}] must have rows of one shape, got {held[0][name].shape[1:]} "
                    f"and, for graphs[{i}], {found[name].shape[1:]}"
                )
        if held:
            out[name] = ops.concat([found[name] for found in held], axis=0)
    return out


# ---------------------------------------------------------------------------------- dense arrays


def to_dense_batch(
    x: Any, ptr: Any, *, max_nodes: int | None = None, fill: float = 0.0
) -> tuple[Any, Any]:
    """Give the rows of each graph as one entry of a dense array.

    Parameters
    ----------
    x : array or Tensor, shape (n_nodes, ...)
    ptr : array of int64, shape (n_graphs + 1,)
        As :attr:`Batch.ptr`; read to the host.
    max_nodes : int, default the size of the largest graph
        At least that: no node is left out.
    fill : float, default 0
        Stands where a graph has no more nodes.

    Returns
    -------
    dense : array or Tensor, shape (n_graphs, max_nodes, ...)
        Differentiable in ``x``.
    present : array of bool, shape (n_graphs, max_nodes)

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> dense, present = geom.to_dense_batch(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 1, 3]))
    >>> dense
    array([[1., 0.],
           [0., 0.],
           [2., 3.]])
    """
    xp, present, row = _grid(x, ptr, max_nodes)
    shape = (*present.shape, *x.shape[1:])
    shown = xp.reshape(present, (*present.shape, *(1,) * (x.ndim - 1)))
    if x.shape[0] == 0:
        return xp.broadcast_to(xp.full_like(shown, fill, dtype=x.dtype), shape), present
    rows = ops.reshape(ops.take(x, xp.reshape(row, (-1,)), axis=0), shape)
    return ops.where(shown, rows, fill), present


def _grid(x, ptr, max_nodes):
    """Give for each place of a dense array whether a node is there, and which."""
    _check_pointers(ptr, x.shape[0])
    xp = _device.namespace(raw(x), ptr)
    ptr = xp.astype(ptr, xp.int64, copy=False)
    size = ptr[1:] - ptr[:-1]
    largest = int(xp.max(size)) if size.shape[0] else 0
    if max_nodes is None:
        max_nodes = largest
    elif max_nodes < largest:
        raise ValueError(
            f"max_nodes must be at least {largest}, the size of the largest graph, got {max_nodes}"
        )
    column = iota(ptr, max_nodes)[None, :]
    present = column < size[:, None]
    return xp, present, xp.where(present, ptr[:-1, None] + column, xp.zeros_like(column))


def to_dense_adj(batch: Batch, weight: Any = None, *, max_nodes: int | None = None) -> Any:
    """Give the adjacency matrix of each graph as one entry of a dense array.

    Parameters
    ----------
    batch : Batch
    weight : array or Tensor, shape (n_edges,), optional
        Ones of float32 when left out.
    max_nodes : int, default the size of the largest graph
        At least that.

    Returns
    -------
    array or Tensor, shape (n_graphs, max_nodes, max_nodes)
        ``[g, d, s]`` is the sum of the weights of the edges from node ``s`` of graph ``g`` to node
        ``d``, so that ``to_dense_adj(batch) @ x`` adds up what ``batch @ x`` does. Differentiable
        in ``weight``.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> edge = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    >>> geom.to_dense_adj(geom.Batch.from_graphs([edge]))
    array([[[0., 0.],
            [1., 0.]]], dtype=float32)
    """
    xp = _device.namespace(batch.ptr)
    nodes = iota(batch, batch.n_nodes)
    n = _grid(nodes, batch.ptr, max_nodes)[1].shape[1]
    if weight is None:
        weight = xp.ones_like(batch.indices, dtype=xp.float32)
    elif weight.shape != (batch.n_edges,):
        raise ValueError(f"weight must have shape ({batch.n_edges},), got {weight.shape}")
    owner = xp.take(batch.graph_ids, batch.dst)
    first = xp.take(batch.ptr, owner)
    place = (owner * n + batch.dst - first) * n + batch.src - first
    shape = (batch.n_graphs, n, n)
    return ops.reshape(ops.scatter_add(weight, place, math.prod(shape)), shape)
