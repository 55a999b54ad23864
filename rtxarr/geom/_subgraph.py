"""Parts of a graph: some of its nodes, some of its edges, and what is within a few steps."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rtxarr import _device, ops
from rtxarr._checks import check_range
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import isdtype
from rtxarr.geom._graph import Graph, plain

__all__ = ["before", "edge_subgraph", "k_hop", "subgraph"]


def subgraph(graph: Graph, nodes: Any) -> Graph:
    """Keep some nodes, and the edges between them.

    Parameters
    ----------
    graph : Graph
    nodes : array of int, shape (n_kept,), or of bool, shape (n_nodes,)
        Node ``nodes[i]`` becomes node ``i``; none may be named twice.

    Returns
    -------
    Graph
        With the arrays of nodes and edges that are kept. Edges stay in the order of their numbers
        and are numbered anew. To know which they were, give the graph an array of edges with
        their numbers before.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 3]), n_nodes=4)
    >>> part = geom.subgraph(path, np.array([2, 1]))
    >>> part.src, part.dst
    (array([1]), array([0]))
    """
    n_nodes = graph.n_nodes
    nodes = chosen("nodes", nodes, n_nodes, graph)
    xp = _device.namespace(nodes)
    count = nodes.shape[0]
    place = xp.full_like(iota(graph, n_nodes), -1)
    place[nodes] = iota(graph, count)
    if count and bool(xp.any(xp.take(place, nodes) != iota(graph, count))):
        raise ValueError("nodes must name each node once, got one twice")
    src, dst = xp.take(place, graph.src), xp.take(place, graph.dst)
    (kept,) = xp.nonzero((src >= 0) & (dst >= 0))
    return Graph._of_edges(
        xp.take(src, kept),
        xp.take(dst, kept),
        count,
        count,
        nodes={name: ops.take(x, nodes, axis=0) for name, x in graph.nodes.items()},
        edges={name: ops.take(x, kept, axis=0) for name, x in graph.edges.items()},
    )


def edge_subgraph(graph: Graph, edges: Any) -> Graph:
    """Keep some edges, and all nodes.

    Parameters
    ----------
    graph : Graph
    edges : array of int, shape (n_kept,), or of bool, shape (n_edges,)
        Edge ``edges[i]`` becomes edge ``i``; one that is named twice becomes two.

    Returns
    -------
    Graph
        With the arrays of the nodes, and of the edges that are kept.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 3]), n_nodes=4)
    >>> geom.edge_subgraph(path, path.dst != 2)
    Graph(4 nodes, 2 edges)
    """
    edges = chosen("edges", edges, graph.n_edges, graph)
    xp = _device.namespace(edges)
    return Graph._of_edges(
        xp.take(graph.src, edges),
        xp.take(graph.dst, edges),
        graph.n_src,
        graph.n_dst,
        nodes=graph.nodes,
        edges={name: ops.take(x, edges, axis=0) for name, x in graph.edges.items()},
    )


def before(graph: Graph, time: Any, *, name: str = "time", inclusive: bool = False) -> Graph:
    """Keep the edges from before a moment, so that nothing is learned from later ones.

    Parameters
    ----------
    graph : Graph
        With the time of each edge as ``graph.edges[name]``.
    time : number
    name : str, default "time"
    inclusive : bool, default False
        Whether edges of that very moment are kept too.

    Returns
    -------
    Graph

    Raises
    ------
    ValueError
        When ``time`` or that of an edge is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> talks = geom.Graph.from_edges(
    ...     np.array([0, 1]), np.array([1, 0]), n_nodes=2, edges={"time": np.array([3, 8])}
    ... )
    >>> geom.before(talks, 8)
    Graph(2 nodes, 1 edges, edges: time)
    """
    if name not in graph.edges:
        raise ValueError(f"the graph must have {name!r} among its arrays of edges, got {graph}")
    times = raw(graph.edges[name])
    if times.ndim != 1:
        raise ValueError(f"edges[{name!r}] must be one number an edge, got shape {times.shape}")
    if time != time:
        raise ValueError(f"time must not be NaN, got {time}")
    if bool((times != times).any()):
        raise ValueError(f"edges[{name!r}] must not be NaN: no moment is before or after it")
    return edge_subgraph(graph, times <= time if inclusive else times < time)


def k_hop(graph: Graph, nodes: Any, k: int, *, direction: str = "in") -> tuple[Any, Any]:
    """Find the nodes within ``k`` steps of some nodes.

    Parameters
    ----------
    graph : Graph
    nodes : array of int, shape (n_seeds,), or of bool, shape (n_nodes,)
        None may be named twice.
    k : int
    direction : {"in", "out", "both"}, default "in"
        Whether to step against the edges, to those whose messages reach ``nodes`` within ``k``
        layers; along them; or either way.

    Returns
    -------
    found : array of int64, shape (n_found,)
        ``nodes`` first, as they came, then those one step away by number, and so on. Give it to
        :func:`subgraph` for the graph between them.
    steps : array of int64, shape (n_found,)
        How many steps away each is.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 3]), n_nodes=4)
    >>> geom.k_hop(path, np.array([3]), 2)
    (array([3, 2, 1]), array([0, 1, 2]))
    """
    ways = {"in": (graph,), "out": (graph.T,), "both": (graph, graph.T)}
    if direction not in ways:
        raise ValueError(f"direction must be one of {', '.join(ways)}, got {direction!r}")
    if not isinstance(k, (int, np.integer)) or k < 0:
        raise ValueError(f"k must be an int >= 0, got {k!r}")
    n_nodes = graph.n_nodes
    nodes = chosen("nodes", nodes, n_nodes, graph)
    xp = _device.namespace(nodes)
    steps = xp.full_like(iota(graph, n_nodes), -1)
    steps[nodes] = 0
    if int(xp.count_nonzero(steps == 0)) != nodes.shape[0]:
        raise ValueError("nodes must name each node once, got one twice")
    found = [nodes]
    for step in range(1, k + 1):
        for way in ways[direction]:
            reached = xp.take(way.wide_indices, _row_entries(way, found[-1]))
            reached = xp.take(reached, xp.nonzero(xp.take(steps, reached) < 0)[0])
            steps[reached] = step
        (new,) = xp.nonzero(steps == step)
        if new.shape[0] == 0:
            break
        found.append(new)
    every = xp.concat(found)
    return every, xp.take(steps, every)


def _row_entries(graph, rows):
    """Give the places of the stored edges of some destinations, row by row."""
    xp = _device.namespace(rows)
    return ranges(xp.take(graph.indptr, rows), xp.take(graph.in_degrees, rows))[0]


def ranges(start: Any, length: Any) -> tuple[Any, Any]:
    """Give ``start[i], start[i] + 1, ...``, ``length[i]`` numbers each, and the ``i`` of each."""
    xp = _device.namespace(start, length)
    if start.shape[0] == 0:
        return start, start
    end = xp.cumulative_sum(length)
    entry = iota(start, int(end[-1]))
    which = xp.searchsorted(end, entry, side="right")
    return entry + xp.take(start - end + length, which), which


def chosen(name: str, entries: Any, n: int, graph: Graph) -> Any:
    """Give numbers in ``[0, n)``, or the places of True in ``n`` bools, as int64."""
    entries = plain(entries)
    if not _device.is_array(entries) or entries.ndim != 1:
        raise TypeError(f"{name} must be an array of integers or bools, got {entries!r}")
    if _device.device_of(entries) != graph.device:
        raise ValueError(
            f"{name} must be on {graph.device}, where the graph is, got "
            f"{_device.device_of(entries)}"
        )
    xp = _device.namespace(entries)
    if entries.dtype == xp.bool:
        if entries.shape[0] != n:
            raise ValueError(f"{name} must have {n} bools, got {entries.shape[0]}")
        return xp.nonzero(entries)[0]
    if not isdtype(entries.dtype, "integral"):
        raise TypeError(f"{name} must hold integers or bools, got {entries.dtype}")
    check_range(name, entries, 0, n)
    return xp.astype(entries, xp.int64, copy=False)


def iota(like: Any, n: int) -> Any:
    """Give ``0 .. n - 1`` as int64, beside an array or the arrays of a graph."""
    like = like.indptr if isinstance(like, Graph) else like
    xp, place = _device.namespace(like), _device.device_of(like)
    with place if isinstance(place, _device.Device) else contextlib.nullcontext():
        return xp.arange(n, dtype=xp.int64)
