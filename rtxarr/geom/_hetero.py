"""Graphs with several kinds of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rtxarr import _device, ops
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.geom._graph import Graph, _attributes, _count, proxied, unproxied
from rtxarr.geom._subgraph import before
from rtxarr.nn import Module

__all__ = ["HeteroConv", "HeteroGraph"]

Relation = tuple[str, str, str]
"""``(kind of the sources, name, kind of the destinations)``."""


class HeteroGraph:
    """Several kinds of nodes, and a graph for each relation between two of them.

    Parameters
    ----------
    graphs : mapping of (str, str, str) to Graph
        The key is ``(kind of the sources, name, kind of the destinations)``. Where the two kinds
        differ the graph is bipartite.
    n_nodes : mapping of str to int
        How many nodes of each kind there are; kinds without edges are kinds like others.
    nodes : mapping of str to mapping of str to array or Tensor, optional
        What belongs to the nodes of each kind.

    Attributes
    ----------
    graphs : mapping of (str, str, str) to Graph
    n_nodes : mapping of str to int
    nodes : mapping of str to mapping of str to array or Tensor
        All read-only; what belongs to the edges of a relation is in its graph's ``edges``.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.HeteroGraph.from_edges(
    ...     {
    ...         ("author", "writes", "paper"): (np.array([0, 1, 1]), np.array([0, 0, 1])),
    ...         ("paper", "cites", "paper"): (np.array([1]), np.array([0])),
    ...     },
    ...     n_nodes={"author": 2, "paper": 2, "venue": 3},
    ... )
    >>> graph
    HeteroGraph(2 author, 2 paper, 3 venue; author-writes-paper: 3, paper-cites-paper: 1)
    >>> graph["author", "writes", "paper"] @ np.array([1.0, 10.0])
    array([11., 10.])
    """

    def __init__(
        self,
        graphs: Mapping[Relation, Graph],
        n_nodes: Mapping[str, int],
        *,
        nodes: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        counts = {kind: _count(f"n_nodes[{kind!r}]", n) for kind, n in n_nodes.items()}
        for relation, graph in graphs.items():
            src, _, dst = _relation(relation)
            for kind, n, side in (
                (src, graph.n_src, "sources"),
                (dst, graph.n_dst, "destinations"),
            ):
                if kind not in counts:
                    raise ValueError(
                        f"n_nodes must have each kind of {relation}, got {', '.join(counts)}"
                    )
                if counts[kind] != n:
                    raise ValueError(
                        f"the graph of {relation} must have {counts[kind]} {side}, got {n}"
                    )
        unknown = set(nodes or ()) - set(counts)
        if unknown:
            raise ValueError(f"nodes must be of {', '.join(counts)}, got {', '.join(unknown)}")
        self.graphs = MappingProxyType(dict(graphs))
        self.n_nodes = MappingProxyType(counts)
        self.nodes = MappingProxyType(
            {
                kind: _attributes(f"nodes[{kind!r}]", (nodes or {}).get(kind), n)
                for kind, n in counts.items()
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: unproxied(x) for name, x in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: proxied(x) for name, x in state.items()})

    @classmethod
    def from_edges(
        cls,
        pairs: Mapping[Relation, tuple[Any, Any]],
        n_nodes: Mapping[str, int],
        *,
        nodes: Mapping[str, Mapping[str, Any]] | None = None,
        edges: Mapping[Relation, Mapping[str, Any]] | None = None,
    ) -> HeteroGraph:
        """Make the graph of each relation of a list of edges.

        Parameters
        ----------
        pairs : mapping of (str, str, str) to (array, array)
            Sources and destinations, as :meth:`Graph.from_edges` takes them.
        n_nodes, nodes
            As for :class:`HeteroGraph`.
        edges : mapping of (str, str, str) to mapping of str to array or Tensor, optional
            What belongs to the edges of each relation.
        """
        unknown = set(edges or ()) - set(pairs)
        if unknown:
            raise ValueError(f"edges must be of relations in pairs, got {unknown}")
        graphs = {}
        for relation, (src, dst) in pairs.items():
            for kind in (_relation(relation)[0], relation[2]):
                if kind not in n_nodes:
                    raise ValueError(
                        f"n_nodes must have each kind of {relation}, got {', '.join(n_nodes)}"
                    )
            graphs[relation] = Graph.from_edges(
                src,
                dst,
                n_src=n_nodes[relation[0]],
                n_dst=n_nodes[relation[2]],
                edges=(edges or {}).get(relation),
            )
        return cls(graphs, n_nodes, nodes=nodes)

    def __getitem__(self, relation: Relation) -> Graph:
        """Give the graph of a relation."""
        if relation not in self.graphs:
            raise KeyError(
                f"there is no relation {relation}, only {', '.join(map(str, self.graphs))}"
            )
        return self.graphs[relation]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of nodes."""
        return tuple(self.n_nodes)

    @property
    def relations(self) -> tuple[Relation, ...]:
        return tuple(self.graphs)

    @property
    def n_edges(self) -> int:
        """Number of edges of all relations."""
        return sum(graph.n_edges for graph in self.graphs.values())

    @property
    def T(self) -> HeteroGraph:
        """All edges turned round; a relation keeps its name."""
        turned = {(dst, name, src): g.T for (src, name, dst), g in self.graphs.items()}
        return HeteroGraph(turned, self.n_nodes, nodes=self.nodes)

    def before(self, time: Any, *, name: str = "time", inclusive: bool = False) -> HeteroGraph:
        """Keep the edges from before a moment; those of relations without times all stay.

        See :func:`rtxarr.geom.before`.
        """
        graphs = {
            relation: before(graph, time, name=name, inclusive=inclusive)
            if name in graph.edges
            else graph
            for relation, graph in self.graphs.items()
        }
        return HeteroGraph(graphs, self.n_nodes, nodes=self.nodes)

    def to_device(self, device: Any) -> HeteroGraph:
        """Give the graph, and what belongs to it, on another device."""

        def moved(x):
            return x.to_device(device) if isinstance(x, Tensor) else _device.to_device(x, device)

        return HeteroGraph(
            {relation: graph.to_device(device) for relation, graph in self.graphs.items()},
            self.n_nodes,
            nodes={
                kind: {name: moved(x) for name, x in held.items()}
                for kind, held in self.nodes.items()
            },
        )

    def __repr__(self):
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.n_nodes.items())
        edges = ", ".join(f"{'-'.join(key)}: {g.n_edges}" for key, g in self.graphs.items())
        return f"HeteroGraph({kinds}; {edges})"


class HeteroConv(Module):
    """A layer for each relation, and for each node what they give put together.

    Parameters
    ----------
    convs : mapping of (str, str, str) to Module
        ``layer(graph, x)`` where sources and destinations are of one kind, else
        ``layer(graph, (x of the sources, x of the destinations))``.
    aggr : {"sum", "mean", "max", "min"}, default "sum"
        How to put the outputs for a node together. The sum is over all relations that lead to its
        kind. Mean, maximum and minimum look only at those of which an edge ends at the node, or at
        all where none does: no edge is no zero.
    skip_empty : bool, default True
        False looks at all relations in any case, as PyTorch Geometric does.

    Notes
    -----
    Parameters are named as in PyTorch Geometric's layer of this name, as in
    ``convs.<author___writes___paper>.lin.weight``.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> a, b = ("user", "likes", "item"), ("user", "buys", "item")
    >>> graph = geom.HeteroGraph.from_edges(
    ...     {a: (np.array([0]), np.array([0])), b: (np.array([], int), np.array([], int))},
    ...     n_nodes={"user": 1, "item": 1},
    ... )
    >>> layer = geom.HeteroConv(
    ...     {relation: lambda graph, x: graph @ x[0] for relation in (a, b)}, aggr="max"
    ... )
    >>> layer(graph, {"user": np.array([[-2.0]]), "item": np.array([[0.0]])})
    {'item': array([[-2.]])}
    """

    def __init__(
        self, convs: Mapping[Relation, Any], *, aggr: str = "sum", skip_empty: bool = True
    ):
        if aggr not in ("sum", "mean", "max", "min"):
            raise ValueError(f"aggr must be one of sum, mean, max, min, got {aggr!r}")
        if not convs:
            raise ValueError("convs must have at least one relation, got none")
        self.relations = tuple(_relation(relation) for relation in convs)
        names = (f"<{'___'.join(relation)}>".replace(".", "#") for relation in self.relations)
        self.convs = dict(zip(names, convs.values(), strict=True))
        self.aggr, self.skip_empty = aggr, skip_empty

    def forward(self, graph: HeteroGraph, x: Mapping[str, Any]) -> dict[str, Any]:
        """Give the outputs by kind, of the kinds that a relation of the layer leads to.

        Parameters
        ----------
        graph : HeteroGraph
            Has all relations of the layer; others are left out.
        x : mapping of str to array or Tensor, shape (n_nodes of the kind, n_features)
        """
        outputs: dict[str, list] = {}
        for relation, conv in zip(self.relations, self.convs.values(), strict=True):
            src, _, dst = relation
            part = graph[relation]
            given = x[src] if src == dst else (x[src], x[dst])
            outputs.setdefault(dst, []).append((conv(part, given), part))
        return {kind: self._together(found) for kind, found in outputs.items()}

    def _together(self, found: Sequence[tuple[Any, Graph]]) -> Any:
        outputs = [out for out, _ in found]
        if len(outputs) == 1:
            return outputs[0]
        if self.aggr == "sum":
            return sum(outputs[1:], start=outputs[0])
        stacked = ops.stack(outputs, axis=0)
        if not self.skip_empty:
            return getattr(ops, self.aggr)(stacked, axis=0)
        xp = _device.namespace(raw(stacked))
        counts = xp.stack([graph.in_degrees > 0 for _, graph in found])
        counts = counts | ~xp.any(counts, axis=0)  # where no relation has an edge all count
        counts = xp.reshape(counts, (*counts.shape, *(1,) * (stacked.ndim - 2)))
        if self.aggr == "mean":
            n_counted = xp.astype(xp.count_nonzero(counts, axis=0), stacked.dtype)
            return ops.sum(ops.where(counts, stacked, 0), axis=0) / n_counted
        nothing = float("-inf") if self.aggr == "max" else float("inf")
        return getattr(ops, self.aggr)(ops.where(counts, stacked, nothing), axis=0)

    def __repr__(self):
        names = ", ".join("-".join(relation) for relation in self.relations)
        return f"HeteroConv({names}, aggr={self.aggr!r})"


def _relation(key):
    if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(k, str) for k in key)):
        raise TypeError(
            "a relation must be (kind of the sources, name, kind of the destinations), all str, "
            f"got {key!r}"
        )
    return key
