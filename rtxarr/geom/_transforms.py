"""Graphs made of graphs: loops, ways back, single edges, components, line graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtxarr import _device, ops
from rtxarr.autograd._tape import raw
from rtxarr.geom._graph import Graph
from rtxarr.geom._subgraph import edge_subgraph, iota, ranges, subgraph

__all__ = [
    "add_self_loops",
    "coalesce",
    "connected_components",
    "largest_component",
    "line_graph",
    "remove_self_loops",
    "to_undirected",
]


def remove_self_loops(graph: Graph) -> Graph:
    """Leave out the edges from a node to itself.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([0, 0]), n_nodes=2)
    >>> geom.remove_self_loops(graph)
    Graph(2 nodes, 1 edges)
    """
    graph.n_nodes  # noqa: B018  (nodes of two kinds have no loops)
    return edge_subgraph(graph, graph.src != graph.dst)


def add_self_loops(
    graph: Graph, *, fill: Mapping[str, Any] | None = None, missing_only: bool = False
) -> Graph:
    """Add an edge from each node to itself.

    Parameters
    ----------
    graph : Graph
        Loops that it has stay, so that nodes with one get a second: see
        :func:`remove_self_loops` and ``missing_only``.
    fill : mapping of str to number, array or "mean", optional
        What the arrays of edges hold for the new ones; ``"mean"`` is the mean over the edges that
        end at the node, zero where none does. ``"weight"`` gets 1 when left out; there must be an
        entry for every other array.
    missing_only : bool, default False
        Add loops only to nodes without one.

    Returns
    -------
    Graph
        The new edges follow the others, in the order of the nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(
    ...     np.array([0, 1]), np.array([0, 0]), n_nodes=2, edges={"weight": np.array([5.0, 7.0])}
    ... )
    >>> geom.add_self_loops(graph).edges["weight"]
    array([5., 7., 1., 1.])
    >>> geom.add_self_loops(graph, missing_only=True).edges["weight"]
    array([5., 7., 1.])
    """
    xp = _device.namespace(graph.indptr)
    nodes = iota(graph, graph.n_nodes)
    if missing_only:
        free = xp.ones_like(nodes, dtype=xp.bool)
        free[xp.take(graph.src, xp.nonzero(graph.src == graph.dst)[0])] = False
        (nodes,) = xp.nonzero(free)
    fill = {"weight": 1, **(fill or {})}
    unknown = set(fill) - set(graph.edges) - {"weight"}
    if unknown:
        raise ValueError(f"fill names {', '.join(unknown)}, but the arrays of edges are {graph}")
    edges = {}
    for name, x in graph.edges.items():
        if name not in fill:
            raise ValueError(f"fill must say what edges[{name!r}] holds for the new edges")
        edges[name] = ops.concat([x, _loop_rows(graph, x, fill[name], nodes)], axis=0)
    return Graph._of_edges(
        xp.concat([graph.src, nodes]),
        xp.concat([graph.dst, nodes]),
        graph.n_nodes,
        graph.n_nodes,
        nodes=graph.nodes,
        edges=edges,
    )


def _loop_rows(graph, x, value, nodes):
    if isinstance(value, str):
        if value != "mean":
            raise ValueError(f"fill must be numbers, arrays or 'mean', got {value!r}")
        means = ops.segment_mean(graph.stored(x), graph.indptr)
        return ops.take(means, nodes, axis=0)
    shape = (nodes.shape[0], *x.shape[1:])
    if np.isscalar(value):
        xp = _device.namespace(raw(x))
        value = xp.full_like(iota(nodes, 1), value, dtype=x.dtype)
        value = xp.reshape(value, (1,) * len(shape))
    return ops.broadcast_to(ops.astype(value, x.dtype), shape)


def to_undirected(graph: Graph) -> Graph:
    """Add the way back of each edge that has none.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    Graph
        Edges keep their numbers and arrays; the ways back follow, in the order of their edges,
        with a copy of what those hold.

    Notes
    -----
    Edges that are there both ways are left as they are, so weights are not doubled, and twice is
    the same as once. Of several edges between two nodes the first from ``a`` to ``b`` is the way
    back of the first from ``b`` to ``a``, the second of the second, and so on; there are as many
    both ways in the end, the larger of the two numbers. A loop is its own way back. Where both ways
    have weights of their own and are to have one, say with :func:`coalesce` which it is.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(
    ...     np.array([0, 1, 1, 2]),
    ...     np.array([1, 0, 2, 2]),
    ...     n_nodes=3,
    ...     edges={"weight": np.array([1.0, 1.0, 5.0, 9.0])},
    ... )
    >>> both = geom.to_undirected(graph)
    >>> both.src, both.dst, both.edges["weight"]
    (array([0, 1, 1, 2, 2]), array([1, 0, 2, 2, 1]), array([1., 1., 5., 9., 5.]))
    """
    xp = _device.namespace(graph.indptr)
    n, src, dst = graph.n_nodes, graph.src, graph.dst
    order = xp.argsort(dst * n + src, stable=True)
    known = xp.take(dst * n + src, order)
    rank = xp.empty_like(order)
    rank[order] = iota(order, graph.n_edges) - xp.searchsorted(known, known)
    order = xp.argsort(src * n + dst, stable=True)
    back = xp.take(src * n + dst, order)
    n_back = xp.empty_like(order)
    n_back[order] = xp.searchsorted(known, back, side="right") - xp.searchsorted(known, back)
    (alone,) = xp.nonzero((rank >= n_back) & (src != dst))
    return Graph._of_edges(
        xp.concat([src, xp.take(dst, alone)]),
        xp.concat([dst, xp.take(src, alone)]),
        n,
        n,
        nodes=graph.nodes,
        edges={
            name: ops.concat([x, ops.take(x, alone, axis=0)], axis=0)
            for name, x in graph.edges.items()
        },
    )


def coalesce(graph: Graph, *, reduce: str | Mapping[str, str] = "sum") -> Graph:
    """Make one edge of all edges from a node to another.

    Parameters
    ----------
    graph : Graph
    reduce : {"sum", "mean", "max", "min", "first"} or mapping of str to these, default "sum"
        What the one edge holds of the arrays of those; a mapping has an entry for each array.

    Returns
    -------
    Graph
        Edges are numbered by destination, then source. Arrays that are tensors stay
        differentiable.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(
    ...     np.array([1, 0, 1]), np.array([0, 1, 0]), n_nodes=2, edges={"w": np.array([1.0, 2, 3])}
    ... )
    >>> single = geom.coalesce(graph)
    >>> single.src, single.dst, single.edges["w"]
    (array([1, 0]), array([0, 1]), array([4., 2.]))
    """
    how = dict.fromkeys(graph.edges, reduce) if isinstance(reduce, str) else dict(reduce)
    if set(how) != set(graph.edges):
        raise ValueError(
            f"reduce must have an entry for each of {sorted(graph.edges)}, got {sorted(how)}"
        )
    for op in {*how.values(), reduce if isinstance(reduce, str) else "sum"}:
        if op not in ("sum", "mean", "max", "min", "first"):
            raise ValueError(f"reduce must be sum, mean, max, min or first, got {op!r}")
    xp = _device.namespace(graph.indptr)
    order = xp.argsort(graph.src, stable=True)
    order = xp.take(order, xp.argsort(xp.take(graph.dst, order), stable=True))
    src, dst = xp.take(graph.src, order), xp.take(graph.dst, order)
    new = xp.concat(
        [xp.ones_like(src[:1], dtype=xp.bool), (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])]
    )
    (first,) = xp.nonzero(new)
    bounds = xp.concat([first, xp.full_like(iota(graph, 1), graph.n_edges)])
    edges = {}
    for name, x in graph.edges.items():
        if how[name] == "first":
            edges[name] = ops.take(x, xp.take(order, first), axis=0)
        else:
            reduced = getattr(ops, f"segment_{how[name]}")
            edges[name] = reduced(ops.take(x, order, axis=0), bounds)
    return Graph._of_edges(
        xp.take(src, first),
        xp.take(dst, first),
        graph.n_src,
        graph.n_dst,
        nodes=graph.nodes,
        edges=edges,
    )


def connected_components(graph: Graph) -> Any:
    """Give the component of each node: nodes of one are joined by edges, whichever way they lead.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    array of int64, shape (n_nodes,)
        Components are numbered in the order of their first nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([2]), np.array([0]), n_nodes=4)
    >>> geom.connected_components(graph)
    array([0, 1, 0, 2])
    """
    n = graph.n_nodes
    if not isinstance(graph.indptr, np.ndarray):
        return _number_first(_first_nodes(graph))
    from scipy import sparse
    from scipy.sparse import csgraph

    ones = np.ones(graph.n_edges, dtype=np.int8)
    matrix = sparse.csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
    _, labels = csgraph.connected_components(matrix, directed=True, connection="weak")
    first = np.full(n, n)
    np.minimum.at(first, labels, np.arange(n))
    return _number_first(first[labels])


def _first_nodes(graph):
    """Give the first node of each component, by handing small numbers on along edges."""
    xp = _device.namespace(graph.indptr)
    label = iota(graph, graph.n_nodes)
    while True:
        before = label
        for way in (graph, graph.T):
            least = ops.segment_min(xp.take(label, way.wide_indices), way.indptr)
            label = xp.minimum(label, least)
        label = xp.take(label, label)  # a step towards the first node that a neighbour knows
        if bool(xp.all(label == before)):
            return label


def _number_first(first):
    """Number components, given as the first node of each node's, in the order of these."""
    xp = _device.namespace(first)
    is_first = first == iota(first, first.shape[0])
    return xp.take(xp.cumulative_sum(xp.astype(is_first, xp.int64)) - 1, first)


def largest_component(graph: Graph) -> tuple[Graph, Any]:
    """Give the component with the most nodes, the first of those as large.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    component : Graph
    nodes : array of int64, shape (n_kept,)
        Which nodes those of the component were.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1]), np.array([3]), n_nodes=4)
    >>> geom.largest_component(graph)
    (Graph(2 nodes, 1 edges), array([1, 3]))
    """
    labels = connected_components(graph)
    xp = _device.namespace(labels)
    n = int(xp.max(labels)) + 1 if graph.n_nodes else 0
    if n == 0:
        return graph, labels
    order = xp.sort(labels)
    counts = xp.diff(xp.searchsorted(order, iota(labels, n + 1)))
    (nodes,) = xp.nonzero(labels == xp.argmax(counts))
    return subgraph(graph, nodes), nodes


def line_graph(graph: Graph) -> Graph:
    """Make the graph whose nodes are the edges, and whose edges go from one to those that follow.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    Graph
        Node ``i`` is edge ``i``, with its arrays. An edge leads from ``i`` to ``j`` where ``j``
        begins at the node at which ``i`` ends, also from a loop to itself.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1, 1]), np.array([1, 2, 3]), n_nodes=4)
    >>> lines = geom.line_graph(path)
    >>> lines.src, lines.dst
    (array([0, 0]), array([1, 2]))
    """
    xp = _device.namespace(graph.indptr)
    graph.n_nodes  # noqa: B018  (edges of a bipartite graph do not follow each other)
    place, following = ranges(
        xp.take(graph.indptr, graph.src), xp.take(graph.in_degrees, graph.src)
    )
    edges = xp.take(graph.edge_ids, place)
    return Graph._of_edges(edges, following, graph.n_edges, graph.n_edges, nodes=graph.edges)
