"""Sampling for link prediction: edges, nodes that they could have led to, and what is around."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr.dtypes import isdtype
from rtxarr.geom._graph import Graph, plain
from rtxarr.geom._sampling import (
    NEGATIVES,
    Sample,
    _HopSampler,
    _integer,
    like,
    on_host,
    stream_of,
)
from rtxarr.geom._subgraph import iota
from rtxarr.kernels import sampling

__all__ = ["LinkSample", "LinkSampler", "negative_destinations"]


class LinkSample(NamedTuple):
    """Edges to predict, with what was sampled around their ends.

    Attributes
    ----------
    sample : Sample
        Its seeds are the ends of the edges, each once.
    src, dst : array of int, shape (n_positive + n_negative,)
        The ends as places among the seeds: first the edges asked for, then those that are none.
    labels : array of float32, shape (n_positive + n_negative,)
        1 and 0.
    """

    sample: Sample
    src: Any
    dst: Any
    labels: Any


class LinkSampler:
    """Give edges and pairs of nodes without an edge, and sample around them.

    Parameters
    ----------
    sampler : NeighborSampler or LaborSampler
        Samples around the ends. Its graph may lack the edges to predict.
    n_negatives : int, default 1
        For each edge, how many pairs of its source with a node that it has no edge to.
    graph : Graph, optional
        All edges that are known, which the numbers given later are of and no negative pair is
        among; the sampler's graph by default.
    seed : int, default 0

    Notes
    -----
    The pairs of an edge follow from the seed, the epoch and the edge's number. A node is not paired
    with itself.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 0]), np.array([1, 2]), n_nodes=4)
    >>> batch = geom.LinkSampler(geom.NeighborSampler(graph, [-1]))(np.array([1]))
    >>> batch.sample.nodes[batch.dst], batch.labels  # node 0 lacks an edge to 3 alone
    (array([2, 3]), array([1., 0.], dtype=float32))
    """

    def __init__(
        self,
        sampler: _HopSampler,
        *,
        n_negatives: int = 1,
        graph: Graph | None = None,
        seed: int = 0,
    ):
        self.sampler = sampler
        self.graph = sampler.graph if graph is None else graph
        if self.graph.n_nodes != sampler.graph.n_nodes:
            raise ValueError(
                f"graph must have the {sampler.graph.n_nodes} nodes of the sampler's, got "
                f"{self.graph.n_nodes}"
            )
        self.n_negatives = _integer("n_negatives", n_negatives, 0, 2**31)
        self.seed = _integer("seed", seed, 0, 2**64)

    def __repr__(self):
        return f"LinkSampler({self.sampler!r}, n_negatives={self.n_negatives})"

    def __call__(self, edges: Any, *, epoch: int = 0) -> LinkSample:
        """Sample for some edges.

        Parameters
        ----------
        edges : array of int, shape (n_positive,)
            Their numbers.
        epoch : int, default 0

        Returns
        -------
        LinkSample

        Raises
        ------
        ValueError
            When a source has edges to all nodes.
        """
        edges = _check_edges(edges, self.graph)
        return self._sample(edges, [0, edges.shape[0]], epoch)[0]

    def bulk(self, edges: Any, batch_size: int, *, epoch: int = 0) -> list[LinkSample]:
        """Sample for many batches of edges in one go.

        Parameters
        ----------
        edges : array of int, shape (n_positive,)
        batch_size : int, at least 1
            Edges of a batch; the last one may be smaller.
        epoch : int, default 0

        Returns
        -------
        list of LinkSample
            Each as the sampler gives it for its batch alone.
        """
        edges, size = _check_edges(edges, self.graph), _integer("batch_size", batch_size, 1, 2**63)
        n = edges.shape[0]
        return self._sample(edges, [*range(0, n, size), n], epoch) if n else []

    def _sample(self, edges, ptr, epoch):
        graph, k = self.graph, self.n_negatives
        xp = _device.namespace(edges)
        others = negative_destinations(graph, edges, k, seed=self.seed, epoch=epoch)
        src, dst = xp.take(graph.src, edges), xp.take(graph.dst, edges)
        # For each batch the sources of all its pairs and then where these lead.
        n = edges.shape[0]
        order = []
        for first, last in zip(ptr[:-1], ptr[1:], strict=True):
            batch = np.arange(first, last)
            order += [batch, np.repeat(batch, k), n + batch, 2 * n + np.arange(first * k, last * k)]
        all_ends = xp.concat([src, dst, xp.reshape(others, (-1,))])
        ends = xp.take(all_ends, like(edges, np.concatenate(order)))
        bounds = 2 * (1 + k) * np.asarray(ptr, dtype=np.int64)
        none = like(edges, np.zeros(len(ptr), np.int64))
        local, nodes, seeds = sampling.renumber(
            ends[:0], none, ends, like(edges, bounds), graph.n_dst
        )
        samples = self.sampler._sample(nodes, on_host(seeds), epoch)
        found = []
        for b, sample in enumerate(samples):
            pairs = local[bounds[b] : bounds[b + 1]]
            half = pairs.shape[0] // 2
            labels = xp.zeros_like(pairs[:half], dtype=xp.float32)
            labels[: ptr[b + 1] - ptr[b]] = 1
            found.append(LinkSample(sample, pairs[:half], pairs[half:], labels))
        return found


def negative_destinations(
    graph: Graph, edges: Any, n: int = 1, *, seed: int = 0, epoch: int = 0
) -> Any:
    """Draw for each edge nodes that its source has no edge to, each as likely.

    Parameters
    ----------
    graph : Graph
    edges : array of int, shape (n_edges,)
        Numbers of edges, which the draws depend on besides seed and epoch.
    n : int, default 1
    seed, epoch : int, default 0

    Returns
    -------
    array of int64, shape (n_edges, n)
        Drawn independently, so that a node may come twice. Never the source itself.

    Raises
    ------
    ValueError
        When a source has edges to all nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    >>> geom.negative_destinations(path, np.array([1, 0]), 2)
    array([[0, 0],
           [2, 2]])
    """
    edges = _check_edges(edges, graph)
    n = _integer("n", n, 0, 2**31)
    key, stream = stream_of(
        _integer("seed", seed, 0, 2**64), NEGATIVES, _integer("epoch", epoch, 0, 2**63)
    )
    xp = _device.namespace(edges)
    src = xp.take(graph.src, edges)
    indptr, linked = _linked(graph)
    found = sampling.negatives(edges, src, n, indptr, linked, graph.n_dst, key=key, stream=stream)
    if bool(xp.any(found < 0)):
        node = int(src[xp.argmax(xp.any(found < 0, axis=1))])
        raise ValueError(f"node {node} has edges to all other nodes, so none is left to draw")
    return found


def _linked(graph):
    """Give what each node has an edge to, and itself: rising, each once; kept with the graph."""

    def sort():
        xp = _device.namespace(graph.indptr)
        nodes = iota(graph.indptr, graph.n_nodes)
        n = max(graph.n_nodes, 1)
        keys = xp.concat([graph.wide_indices * n + graph._rows, nodes * (n + 1)])
        keys = xp.unique_values(keys)
        bounds = xp.searchsorted(keys, iota(keys, graph.n_nodes + 1) * n)
        return xp.astype(bounds, xp.int64, copy=False), keys % n

    return graph.once("linked", sort)


def _check_edges(edges, graph):
    if not _device.is_array(edges) or edges.ndim != 1 or not isdtype(edges.dtype, "integral"):
        raise TypeError(f"edges must be a one-dimensional array of integers, got {edges!r}")
    edges = plain(edges)
    check_range("edges", edges, 0, graph.n_edges)
    edges = _device.to_device(edges, graph.device)
    xp = _device.namespace(edges)
    return xp.ascontiguousarray(xp.astype(edges, np.int64, copy=False))
