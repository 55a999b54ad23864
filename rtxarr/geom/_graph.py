"""Graphs as compressed rows: for each destination, the sources of its edges.

The rules, once for all of ``rtxarr.geom``:

- An edge leads from its source to its destination, and messages go along it: ``graph @ x`` adds up,
  for each destination, the rows of ``x`` of its sources.
- Edges keep the numbers that they have in the list that the graph is made from. Arrays that belong
  to edges, weights and features, are in the order of these numbers, whatever order the graph stores
  the edges in.
- Several edges between two nodes are several edges, until :func:`coalesce` makes one of them.
- Nodes without edges, edges from a node to itself and graphs without any edge are nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr._override import overridable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import isdtype

if TYPE_CHECKING:
    from rtxarr.geom._views import Edge, Node

__all__ = ["Graph"]


@overridable
def _by_number(stored, graph):
    xp = _device.namespace(stored)
    out = xp.empty_like(stored)
    out[graph._edge_ids] = stored
    return out


@overridable
def _as_stored(values, graph):
    from rtxarr.ops import take

    return take(values, graph._edge_ids, axis=0)


class Graph:
    """A directed graph, which may have several edges between two nodes.

    Make one with :meth:`from_edges` or one of the ``from_...`` functions. Graphs do not change:
    methods that seem to change one give another, attributes cannot be set, and the arrays that hold
    the edges in the host's memory are read-only. Arrays that a graph was given without a copy must
    not be changed either. Copies and pickles are of the arrays alone, not of what was worked out of
    them; CuPy's come out of a pickle on the current device.

    Parameters
    ----------
    indptr : array of int, shape (n_dst + 1,)
        Destination ``i`` has the edges ``indptr[i]:indptr[i + 1]`` of those below. NumPy's or
        CuPy's, like all arrays here; those of other libraries become NumPy's.
    indices : array of int, shape (n_edges,)
        Their sources, in ``[0, n_src)``.
    n_src : int, default ``n_dst``
        Number of source nodes. Another number than ``n_dst`` makes the graph bipartite: sources
        and destinations are then nodes of two kinds.
    edge_ids : array of int, shape (n_edges,), optional
        The edges' numbers, each of ``0`` to ``n_edges - 1`` once; in this order when left out.
    nodes, edges : mapping of str to array or Tensor, optional
        What belongs to nodes and edges: arrays whose first axis has ``n_nodes`` or ``n_edges``
        entries.

    Attributes
    ----------
    indptr : array of int64, shape (n_dst + 1,)
    indices : array of int32, or of int64 where ``n_src`` needs it, shape (n_edges,)
    n_src, n_dst, n_edges : int
    nodes, edges : mapping of str to array or Tensor
        Read-only.

    Raises
    ------
    ValueError, IndexError, TypeError
        When the arrays do not fit together. Their values are read to the host for that, once.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 2, 2]), np.array([1, 1, 0]), n_nodes=4)
    >>> graph
    Graph(4 nodes, 3 edges)
    >>> graph @ np.array([1.0, 10.0, 100.0, 1000.0])
    array([100., 101.,   0.,   0.])
    """

    indptr: Any
    indices: Any
    n_src: int
    n_dst: int
    nodes: Mapping[str, Any]
    edges: Mapping[str, Any]
    mask: Any = None  # factors of messages, of a graph that is explained

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        *,
        n_src: int | None = None,
        edge_ids: Any = None,
        nodes: Mapping[str, Any] | None = None,
        edges: Mapping[str, Any] | None = None,
    ):
        _require_integers(indptr=indptr, indices=indices, edge_ids=edge_ids)
        indptr, indices, edge_ids = plain(indptr), plain(indices), plain(edge_ids)
        if indptr.shape[0] < 1:
            raise ValueError("indptr must have at least one entry, got none")
        n_dst = indptr.shape[0] - 1
        n_src = n_dst if n_src is None else _count("n_src", n_src)
        _check_rows(indptr, indices, n_src, edge_ids)
        xp = _device.namespace(indptr, indices, edge_ids)
        self._set(
            xp.astype(indptr, xp.int64, copy=False),
            xp.astype(indices, _index_dtype(xp, n_src), copy=False),
            n_src,
            edge_ids if edge_ids is None else xp.astype(edge_ids, xp.int64, copy=False),
            nodes,
            edges,
        )

    def _set(self, indptr, indices, n_src, edge_ids, nodes, edges):
        self._keep(indptr=frozen(indptr), indices=frozen(indices), n_src=n_src)
        self._keep(n_dst=indptr.shape[0] - 1)
        self._edge_ids = frozen(edge_ids)
        self._kept: dict = {}
        self._nested = False
        self._keep(edges=_attributes("edges", edges, self.n_edges))
        if nodes and not self.is_square:
            raise ValueError(
                "nodes of a bipartite graph are of two kinds: keep their arrays beside it, got "
                f"{', '.join(nodes)}"
            )
        self._keep(nodes=_attributes("nodes", nodes, self.n_dst))

    def _keep(self, **attributes):
        """Set what cannot be set from outside."""
        self.__dict__.update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"graphs do not change, got {name!r} to set: make another graph")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"graphs do not change, got {name!r} to delete: make another graph")

    def __getstate__(self) -> dict[str, Any]:
        """Give what the graph was made of, for copies and pickles, not what was worked out."""
        worked_out = {"_kept"}
        for kind in type(self).__mro__:
            worked_out |= {name for name, x in vars(kind).items() if isinstance(x, cached_property)}
        return {name: unproxied(x) for name, x in vars(self).items() if name not in worked_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._keep(**{name: proxied(frozen(x)) for name, x in state.items()}, _kept={})

    @classmethod
    def _made(cls, indptr, indices, n_src, edge_ids, nodes=None, edges=None, nested=False):
        """Build a graph of arrays that are known to be right."""
        self = cls.__new__(cls)
        self._set(indptr, indices, n_src, edge_ids, nodes, edges)
        self._nested = nested
        return self

    @classmethod
    def from_edges(
        cls,
        src: Any,
        dst: Any,
        *,
        n_nodes: int | None = None,
        n_src: int | None = None,
        n_dst: int | None = None,
        nodes: Mapping[str, Any] | None = None,
        edges: Mapping[str, Any] | None = None,
    ) -> Graph:
        """Make a graph of a list of edges.

        Parameters
        ----------
        src, dst : array of any integer dtype, shape (n_edges,)
            Where each edge begins and ends. Edge ``i`` of the graph is entry ``i``.
        n_nodes : int
            Number of nodes. Never taken from the edges, since the last nodes may have none.
        n_src, n_dst : int
            In place of ``n_nodes``, for a bipartite graph.
        nodes, edges : mapping of str to array or Tensor, optional
            As for :class:`Graph`.

        Returns
        -------
        Graph
            The edges of a destination are in the order of the list.

        Raises
        ------
        IndexError
            When an entry is not the number of a node.
        """
        _require_integers(src=src, dst=dst)
        src, dst = plain(src), plain(dst)
        if src.shape != dst.shape:
            raise ValueError(
                f"src and dst must have one length, got {src.shape[0]} and {dst.shape[0]}"
            )
        n_src, n_dst = _sizes(n_nodes, n_src, n_dst)
        check_range("src", src, 0, n_src)
        check_range("dst", dst, 0, n_dst)
        return cls._of_edges(src, dst, n_src, n_dst, nodes, edges)

    @classmethod
    def _of_edges(cls, src, dst, n_src, n_dst, nodes=None, edges=None):
        """Build a graph of a list of edges that is known to be right."""
        xp = _device.namespace(src, dst)
        dst = xp.astype(dst, xp.int64, copy=False)
        order = None
        if not bool(xp.all(dst[1:] >= dst[:-1])):
            order = xp.argsort(dst, stable=True)
            src, dst = xp.take(src, order), xp.take(dst, order)
        indptr = xp.searchsorted(dst, xp.arange(n_dst + 1, dtype=xp.int64))
        return cls._made(
            xp.astype(indptr, xp.int64, copy=False),
            xp.astype(src, _index_dtype(xp, n_src), copy=False),
            n_src,
            order,
            nodes,
            edges,
        )

    # -------------------------------------------------------------------------------- sizes

    @property
    def n_edges(self) -> int:
        return self.indices.shape[0]

    @property
    def n_nodes(self) -> int:
        """Number of nodes; a bipartite graph has ``n_src`` and ``n_dst`` instead."""
        if not self.is_square:
            raise ValueError(
                f"a bipartite graph has {self.n_src} sources and {self.n_dst} destinations: use "
                "n_src and n_dst"
            )
        return self.n_dst

    @property
    def is_square(self) -> bool:
        """Whether sources and destinations are the same nodes."""
        return self.n_src == self.n_dst

    @property
    def is_nested(self) -> bool:
        """Whether the destinations are the first sources, in the same order.

        So it is in all graphs but bipartite ones, and in what samplers give: layers take one array
        for sources and destinations.
        """
        return self._nested or self.is_square

    @cached_property
    def device(self) -> Any:
        return _device.device_of(self.indptr)

    def __repr__(self):
        sizes = f"{self.n_dst} nodes" if self.is_square else f"{self.n_src} to {self.n_dst} nodes"
        parts = [sizes, f"{self.n_edges} edges"]
        for kind, held in (("nodes", self.nodes), ("edges", self.edges)):
            if held:
                parts.append(f"{kind}: {', '.join(held)}")
        return f"Graph({', '.join(parts)})"

    # -------------------------------------------------------------------------------- edges

    @cached_property
    def edge_ids(self) -> Any:
        """Number of each stored edge; int64, shape (n_edges,)."""
        if self._edge_ids is None:
            xp = _device.namespace(self.indices)
            return frozen(_like(self, xp.arange, self.n_edges, dtype=xp.int64))
        return self._edge_ids

    @property
    def is_ordered(self) -> bool:
        """Whether edges are stored in the order of their numbers."""
        return self._edge_ids is None

    @cached_property
    def wide_indices(self) -> Any:
        """Source of each stored edge as int64."""
        xp = _device.namespace(self.indices)
        return frozen(xp.astype(self.indices, xp.int64, copy=False))

    @cached_property
    def _rows(self) -> Any:
        """Destination of each stored edge; int64, shape (n_edges,)."""
        xp = _device.namespace(self.indptr)
        stored = _like(self, xp.arange, self.n_edges, dtype=xp.int64)
        return frozen(xp.searchsorted(self.indptr, stored, side="right") - 1)

    @cached_property
    def src(self) -> Any:
        """Source of each edge; int64, shape (n_edges,), in the order of their numbers."""
        return frozen(self._by_number(self.wide_indices))

    @cached_property
    def dst(self) -> Any:
        """Destination of each edge; int64, shape (n_edges,), in the order of their numbers."""
        return frozen(self._by_number(self._rows))

    def _by_number(self, stored):
        return stored if self._edge_ids is None else _by_number(stored, self)

    def _places(self):
        """Give where the edge of each number is stored."""

        def find():
            xp = _device.namespace(self._edge_ids)
            return _by_number(xp.arange(self.n_edges, dtype=xp.int64), self)

        return self.once("places", find)

    def stored(self, values: Any) -> Any:
        """Give an array or Tensor of the edges in the order in which the graph stores them."""
        if values.shape[0] != self.n_edges:
            raise ValueError(
                f"values must have an entry for each of {self.n_edges} edges, got {values.shape}"
            )
        return values if self._edge_ids is None else _as_stored(values, self)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Give what ``make`` gives, made once for this graph and those of :meth:`replace`."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def node(self, number: int) -> Node:
        """Give a node to look at; of a graph that is not bipartite."""
        from rtxarr.geom._views import Node, numbered

        return Node(self, numbered("number", number, self.n_nodes))

    def edge(self, number: int) -> Edge:
        """Give an edge to look at."""
        from rtxarr.geom._views import Edge, numbered

        return Edge(self, numbered("number", number, self.n_edges))

    @cached_property
    def in_degrees(self) -> Any:
        """Edges that end at each destination; int64, shape (n_dst,)."""
        return frozen(self.indptr[1:] - self.indptr[:-1])

    @cached_property
    def out_degrees(self) -> Any:
        """Edges that begin at each source; int64, shape (n_src,)."""
        return self.T.in_degrees

    @cached_property
    def T(self) -> Graph:
        """The graph with all edges turned round; their numbers stay."""
        xp = _device.namespace(self.indices)
        # Sources as they are: sorting wide ones takes twice the time, and more memory than edges.
        order = xp.argsort(self.indices, stable=True)
        sources = xp.take(self.indices, order)
        bounds = _like(self, xp.arange, self.n_src, dtype=sources.dtype)
        ends = xp.searchsorted(sources, bounds, side="right")
        indptr = xp.concat([xp.zeros_like(self.indptr[:1]), xp.astype(ends, xp.int64)])
        turned = Graph._made(
            indptr,
            xp.astype(xp.take(self._rows, order), _index_dtype(xp, self.n_dst), copy=False),
            self.n_dst,
            order if self._edge_ids is None else xp.take(self._edge_ids, order),
            self.nodes,
            self.edges,
        )
        turned.__dict__["T"] = self
        return turned

    # --------------------------------------------------------------------------- new graphs

    def replace(
        self, *, nodes: Mapping[str, Any] | None = None, edges: Mapping[str, Any] | None = None
    ) -> Graph:
        """Give the same graph with other arrays for nodes or edges, or both."""
        other = Graph._made(
            self.indptr,
            self.indices,
            self.n_src,
            self._edge_ids,
            self.nodes if nodes is None else nodes,
            self.edges if edges is None else edges,
            self._nested,
        )
        for name in ("edge_ids", "_rows", "src", "dst", "in_degrees", "out_degrees"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        other._kept = self._kept
        return other

    def to_device(self, device: Any) -> Graph:
        """Give the graph, and what belongs to it, on another device."""
        if self.device == _device.device(device):
            return self

        def moved(x):
            if x is None:
                return None
            return x.to_device(device) if isinstance(x, Tensor) else _device.to_device(x, device)

        return Graph._made(
            moved(self.indptr),
            moved(self.indices),
            self.n_src,
            moved(self._edge_ids),
            {name: moved(x) for name, x in self.nodes.items()},
            {name: moved(x) for name, x in self.edges.items()},
            self._nested,
        )

    def __matmul__(self, x):
        from rtxarr.geom._aggregate import aggregate

        return aggregate(self, x)


def _like(graph, make, *args, **options):
    """Make an array where the graph is."""
    place = graph.device
    if isinstance(place, _device.Device) and place.kind == "cuda":
        with place:
            return make(*args, **options)
    return make(*args, **options)


def _index_dtype(xp, n):
    return xp.int32 if n <= 2**31 else xp.int64


def _count(name, n):
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 0:
        raise ValueError(f"{name} must be an int >= 0, got {n!r}")
    return int(n)


def _sizes(n_nodes, n_src, n_dst):
    if n_nodes is not None:
        if n_src is not None or n_dst is not None:
            raise ValueError("give n_nodes, or n_src and n_dst for a bipartite graph, not both")
        n_src = n_dst = n_nodes
    if n_src is None or n_dst is None:
        raise ValueError("n_nodes must be given, or n_src and n_dst for a bipartite graph")
    return _count("n_nodes" if n_nodes is not None else "n_src", n_src), _count("n_dst", n_dst)


def frozen(x: Any) -> Any:
    """Give an array of NumPy's as one that cannot be written to; others as they are."""
    if not isinstance(x, np.ndarray) or not x.flags.writeable:
        return x
    x = x.view()
    x.flags.writeable = False
    return x


def proxied(x: Any) -> Any:
    """Give a dict, and those in it, as mappings that cannot be written to; others as they are."""
    if not isinstance(x, dict):
        return x
    return MappingProxyType({name: proxied(held) for name, held in x.items()})


def unproxied(x: Any) -> Any:
    """Give such mappings as dicts: they can be copied and pickled."""
    if not isinstance(x, (dict, MappingProxyType)):
        return x
    return {name: unproxied(held) for name, held in x.items()}


def plain(x: Any) -> Any:
    """Give another library's array as NumPy's, and NumPy's and CuPy's as they are."""
    if isinstance(x, np.ndarray) or not _device.is_array(x) or _device.is_device_array(x):
        return x
    return np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)


def _require_integers(**arrays):
    for name, x in arrays.items():
        if x is None:
            continue
        if not _device.is_array(x):
            raise TypeError(f"{name} must be an array of integers, got {type(x).__name__}")
        if not isdtype(x.dtype, "integral"):
            raise TypeError(f"{name} must hold integers, got {x.dtype}")
        if x.ndim != 1:
            raise ValueError(f"{name} must be one-dimensional, got shape {x.shape}")


def _check_rows(indptr, indices, n_src, edge_ids):
    xp = _device.namespace(indptr, indices, edge_ids)
    n_edges = indices.shape[0]
    first, last = int(indptr[0]), int(indptr[-1])
    if first != 0 or last != n_edges or bool(xp.any(indptr[1:] < indptr[:-1])):
        raise ValueError(
            f"indptr must rise from 0 to the number of edges, {n_edges}, got {first} to {last}"
        )
    check_range("indices", indices, 0, n_src)
    if edge_ids is None:
        return
    if edge_ids.shape != indices.shape:
        raise ValueError(f"edge_ids must have {n_edges} entries, got {edge_ids.shape[0]}")
    check_range("edge_ids", edge_ids, 0, n_edges)
    ids = xp.sort(edge_ids)
    if n_edges and bool(xp.any(ids[1:] == ids[:-1])):
        raise ValueError("edge_ids must hold each number once, got one twice")


def _attributes(name, held, n):
    found = {}
    for key, x in dict(held or {}).items():
        array = raw(x)
        if not _device.is_array(array) or array.ndim < 1:
            raise TypeError(f"{name}[{key!r}] must be an array with an axis of {name}, got {x!r}")
        if array.shape[0] != n:
            raise ValueError(
                f"{name}[{key!r}] must have an entry for each of {n} {name}, got shape "
                f"{tuple(array.shape)}"
            )
        found[key] = x
    return MappingProxyType(found)
