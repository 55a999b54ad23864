"""A node or an edge of a graph, to look at."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from rtxarr import _device
from rtxarr.geom._subgraph import iota

if TYPE_CHECKING:
    from rtxarr.geom._graph import Graph

__all__ = ["Edge", "Node"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a graph, as :meth:`Graph.node` gives it. It holds nothing of its own.

    For looking at some of them: each question reads the graph, so work on all nodes belongs into
    operations on arrays.

    Attributes
    ----------
    graph : Graph
    number : int

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(
    ...     np.array([0, 2, 2]), np.array([1, 1, 0]), n_nodes=3, nodes={"x": np.array([5, 6, 7])}
    ... )
    >>> node = graph.node(1)
    >>> node, node.in_degree, node.predecessors.tolist(), node["x"]
    (Node(1), 2, [0, 2], np.int64(6))
    """

    graph: Graph
    number: int

    def __repr__(self) -> str:
        return f"Node({self.number})"

    def __getitem__(self, name: str) -> Any:
        """Give the node's row of one of ``graph.nodes``."""
        return self.graph.nodes[name][self.number]

    @property
    def in_edges(self) -> Any:
        """Numbers of the edges that end here, in rising order; array of int64."""
        return _edges_of(self.graph, self.number)

    @property
    def out_edges(self) -> Any:
        """Numbers of the edges that begin here, in rising order; array of int64."""
        return _edges_of(self.graph.T, self.number)

    @property
    def in_degree(self) -> int:
        return int(self.graph.in_degrees[self.number])

    @property
    def out_degree(self) -> int:
        return int(self.graph.out_degrees[self.number])

    @property
    def predecessors(self) -> Any:
        """Where ``in_edges`` begin, one for each; array of int64."""
        return _device.namespace(self.graph.src).take(self.graph.src, self.in_edges)

    @property
    def successors(self) -> Any:
        """Where ``out_edges`` end, one for each; array of int64."""
        return _device.namespace(self.graph.dst).take(self.graph.dst, self.out_edges)


@dataclasses.dataclass(frozen=True)
class Edge:
    """An edge of a graph, as :meth:`Graph.edge` gives it. It holds nothing of its own.

    Attributes
    ----------
    graph : Graph
    number : int

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(
    ...     np.array([0, 2]), np.array([1, 0]), n_nodes=3, edges={"w": np.array([0.5, 2.0])}
    ... )
    >>> edge = graph.edge(1)
    >>> edge, edge.src, edge["w"]
    (Edge(1: 2 -> 0), 2, np.float64(2.0))
    """

    graph: Graph
    number: int

    def __repr__(self) -> str:
        return f"Edge({self.number}: {self.src} -> {self.dst})"

    def __getitem__(self, name: str) -> Any:
        """Give the edge's row of one of ``graph.edges``."""
        return self.graph.edges[name][self.number]

    @property
    def src(self) -> int:
        return int(self.graph.src[self.number])

    @property
    def dst(self) -> int:
        return int(self.graph.dst[self.number])


def numbered(name: str, number: Any, n: int) -> int:
    """Give a number in ``[0, n)`` as an int, or refuse it."""
    number = operator.index(number)
    if not 0 <= number < n:
        raise IndexError(f"{name} must lie in [0, {n}), got {number}")
    return number


def _edges_of(graph, node):
    first, last = int(graph.indptr[node]), int(graph.indptr[node + 1])
    if graph.is_ordered:
        return iota(graph, last - first) + first
    return _device.namespace(graph.indptr).sort(graph.edge_ids[first:last])
