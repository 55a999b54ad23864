"""Some destinations of a graph with all their edges, as a graph of its own on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom._gcn import gcn_norm
from rtxarr.geom._graph import Graph


class Cut(NamedTuple):
    """Destinations, sources and edges of a part, in the host's memory.

    Attributes
    ----------
    own : array of int64, shape (n_dst,)
        The destinations, rising; they are the first sources.
    halo : array of int64, shape (n_src - n_dst,)
        The other sources.
    indptr, indices, edge_ids : array
        As of a :class:`Graph` between these; the numbers of its edges rise as those of the whole
        graph's do.
    numbers : array of int64, shape (n_edges,)
        Number of each edge in the whole graph.
    """

    own: np.ndarray
    halo: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    edge_ids: np.ndarray | None
    numbers: np.ndarray

    @property
    def sources(self) -> np.ndarray:
        return np.concatenate([self.own, self.halo])


def cut(graph: Graph, own: np.ndarray, owner: np.ndarray | None = None) -> Cut:
    """Cut destinations, in rising order, out of a graph in the host's memory.

    The halo rises, or with the ``owner`` of each node is in the order of these first.
    """
    starts = graph.indptr[own]
    lengths = graph.indptr[own + 1] - starts
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    stored = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
    sources = graph.indices[stored]
    place = np.minimum(np.searchsorted(own, sources), max(own.size - 1, 0))
    is_own = own[place] == sources if own.size else np.zeros(0, dtype=bool)
    halo, of_halo = np.unique(sources[~is_own], return_inverse=True)
    if owner is not None:
        order = np.argsort(owner[halo], kind="stable")
        of_halo, halo = np.argsort(order)[of_halo], halo[order]
    place[~is_own] = own.size + of_halo
    kind = np.int32 if own.size + halo.size <= 2**31 else np.int64
    ids = numbers = stored
    if graph.is_ordered:
        ids = None
    else:
        numbers = graph.edge_ids[stored]
        order = np.argsort(numbers, kind="stable")
        ids = np.argsort(order, kind="stable")
        numbers = numbers[order]
    return Cut(own, halo.astype(np.int64), indptr, place.astype(kind), ids, numbers)


class Block(Graph):
    """A cut as a graph, which knows the whole one: for weights that depend on other nodes."""

    _whole: Graph
    _cut: Cut

    @classmethod
    def of(cls, whole: Graph, part: Cut, place: Any, edges: dict[str, Any] | None = None) -> Block:
        """Make the graph of a cut on a device, with arrays for its edges."""
        indptr, indices, ids = (
            x if x is None else _device.to_device(x, place)
            for x in (part.indptr, part.indices, part.edge_ids)
        )
        n_src = part.own.size + part.halo.size
        self = cls._made(indptr, indices, n_src, ids, edges=edges, nested=True)
        self._whole, self._cut = whole, part
        return self

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if isinstance(key, tuple) and key[0] == "gcn_norm":
            return super().once(key, lambda: self._norm(*key[1:]))
        return super().once(key, make)

    def _norm(self, improved, add_self_loops, dtype):
        """Give the rows of the whole graph's normalised matrix; loops bring no new sources."""
        whole, weight = gcn_norm(
            self._whole, improved=improved, add_self_loops=add_self_loops, dtype=dtype
        )
        part = cut(whole, self._cut.own)
        order = np.argsort(self._cut.halo)  # the halo may be in another order
        place = np.concatenate([np.arange(part.own.size), part.own.size + order])
        part = part._replace(halo=self._cut.halo, indices=place[part.indices])
        weight = _device.to_device(weight[part.numbers], self.device)
        return Block.of(whole, part, self.device), weight


def on_host(graph: Graph) -> Graph:
    """Give a graph in the host's memory, with its arrays of edges."""
    if not graph.is_square:
        raise ValueError(f"graph must have sources that are its destinations, got {graph!r}")
    return graph.to_device("cpu")


def edge_arrays(graph: Graph, part: Cut) -> dict[str, Any]:
    """Give the arrays of the edges of a cut, of a graph in the host's memory."""
    return {name: raw(x)[part.numbers] for name, x in graph.edges.items()}
