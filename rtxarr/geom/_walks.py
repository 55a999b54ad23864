"""Random walks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.geom._graph import Graph
from rtxarr.geom._sampling import WALK, _integer, check_nodes, stream_of
from rtxarr.kernels import sampling

__all__ = ["random_walk"]


def random_walk(
    graph: Graph,
    start: Any,
    length: int,
    *,
    p: float = 1.0,
    q: float = 1.0,
    walks_per_node: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> Any:
    """Walk along the edges, each of a node's edges as likely, or as node2vec does.

    Parameters
    ----------
    graph : Graph
    start : array of int, shape (n_start,)
        Nodes.
    length : int
        Steps.
    p, q : float, default 1
        An edge back to the node before counts ``1 / p``; one to a node that the node before has
        an edge to too counts 1; any other ``1 / q``. To one part in 2**32 of the largest.
    walks_per_node : int, default 1
    seed, epoch : int, default 0

    Returns
    -------
    array of int64, shape (n_start * walks_per_node, length + 1)
        The walks from one start follow each other, and begin with it. Where a walk comes to a node
        that no edge leads on from, the rest is -1.

    Notes
    -----
    A walk follows from the seed, the epoch, its start and its number among the walks from there: a
    start that is given twice has the same walks twice.

    References
    ----------
    Grover and Leskovec, "node2vec: scalable feature learning for networks", 2016,
    arXiv:1607.00653, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 3]), n_nodes=4)
    >>> geom.random_walk(path, np.array([2, 0]), 3)
    array([[ 2,  3, -1, -1],
           [ 0,  1,  2,  3]])
    """
    _require_square(graph)
    start = check_nodes("start", start, graph)
    length = _integer("length", length, 0, 2**31)
    per_start = _integer("walks_per_node", walks_per_node, 1, 2**31)
    for name, value in (("p", p), ("q", q)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    seed, epoch = _integer("seed", seed, 0, 2**64), _integer("epoch", epoch, 0, 2**63)
    least = min(p, 1.0, q)  # a small p or q has no inverse
    weights = tuple(np.uint64(max(1, round(least / x * 2**32))) for x in (p, 1.0, q))
    place = stream_of(seed, WALK, epoch)
    return walk_along(graph, start, length, place, per_start=per_start, weights=weights)


def walk_along(
    graph: Graph, start: Any, length: int, place: tuple, *, per_start: int = 1, **options: Any
) -> Any:
    """Do so with what is drawn from ``place``, a key and a stream."""
    key, stream = place
    indptr, indices = neighbors(graph)
    return sampling.walks(
        start, per_start, length, indptr, indices, key=key, stream=stream, **options
    )


def neighbors(graph: Graph) -> tuple[Any, Any]:
    """Give where each node's edges lead, rising; kept with the graph."""

    def sort():
        xp = _device.namespace(graph.indptr)
        keys = xp.sort(graph.wide_indices * graph.n_dst + graph._rows)
        turned = graph.T
        ends = xp.astype(keys % max(graph.n_dst, 1), turned.indices.dtype, copy=False)
        return turned.indptr, ends

    return graph.once("neighbors", sort)


def _require_square(graph):
    if not graph.is_square:
        raise ValueError(
            f"graph must lead from nodes to the same nodes, got {graph.n_src} sources and "
            f"{graph.n_dst} destinations"
        )
