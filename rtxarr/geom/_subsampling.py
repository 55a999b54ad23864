"""Training on parts of a graph: GraphSAINT's random ones, and clusters."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.geom._graph import Graph
from rtxarr.geom._sampling import CLUSTER, SAINT, WALK, Sample, _integer, induced, like, stream_of
from rtxarr.geom._walks import _require_square, walk_along
from rtxarr.kernels import sampling
from rtxarr.random import Generator

__all__ = ["ClusterSampler", "SaintSampler", "partition"]


class SaintSampler:
    """Draw parts of a graph, whose training losses are unbiased once they are weighted.

    Parameters
    ----------
    graph : Graph
    size : int
        Draws a part: nodes, edges or walks, which may coincide.
    method : {"node", "edge", "walk"}, default "walk"
        Draw nodes, by how much they weigh in the means of others; edges ``u -> v``, in proportion
        to ``1 / deg(u) + 1 / deg(v)``, ``deg`` being the number of edges that end there or 1; or
        walks from nodes that are equally likely. A part has what was drawn, or met, and all edges
        between.
    length : int, default 2
        Steps of a walk.
    seed : int, default 0

    References
    ----------
    Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: graph sampling based inductive
    learning method", 2020, arXiv:1907.04931, sections 3.2 and 3.4.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.arange(9), np.arange(1, 10), n_nodes=10)
    >>> part = geom.SaintSampler(path, 1, length=3, seed=4)(0)
    >>> part.nodes, part.graphs[0]
    (array([1, 2, 3, 4]), Graph(4 nodes, 3 edges))
    """

    def __init__(
        self, graph: Graph, size: int, *, method: str = "walk", length: int = 2, seed: int = 0
    ):
        _require_square(graph)
        if method not in ("node", "edge", "walk"):
            raise ValueError(f"method must be 'node', 'edge' or 'walk', got {method!r}")
        if graph.n_nodes == 0 or (method != "walk" and graph.n_edges == 0):
            raise ValueError(f"graph must have something to draw, got {graph!r}")
        self.graph = graph
        self.size = _integer("size", size, 1, 2**62)
        self.method = method
        self.length = _integer("length", length, 0, 2**31)
        self.seed = _integer("seed", seed, 0, 2**64)
        self._sums = None if method == "walk" else self._weigh()

    def __repr__(self):
        return f"SaintSampler({self.graph!r}, {self.size}, method={self.method!r})"

    def _weigh(self):
        """Give the weights of nodes or edges, added up; on the host, so equal everywhere."""
        src, dst, degrees = (
            _device.to_device(x, "cpu")
            for x in (self.graph.src, self.graph.dst, self.graph.in_degrees)
        )
        share = 1.0 / np.maximum(degrees, 1)
        if self.method == "node":  # the squared norm of a column of D^-1 A
            weights = np.bincount(src, share[dst] ** 2, self.graph.n_nodes)
        else:
            weights = share[src] + share[dst]
        sums = np.cumsum(weights)
        return like(self.graph.indptr, sums / sums[-1])

    def __call__(self, batch: int, *, epoch: int = 0) -> Sample:
        """Draw part number ``batch`` of an epoch.

        Returns
        -------
        Sample
            One graph; its nodes rise, and all are seeds.
        """
        batch, epoch = _integer("batch", batch, 0, 2**63), _integer("epoch", epoch, 0, 2**63)
        return self._part(0, epoch, batch)

    def _part(self, *key):
        graph = self.graph
        xp = _device.namespace(graph.indptr)
        rng = Generator(self.seed, key=(SAINT, *key))
        if self.method == "walk":
            start = rng.integers(0, graph.n_nodes, self.size, device=graph.device)
            walks = walk_along(graph, start, self.length, stream_of(self.seed, WALK, SAINT, *key))
            nodes = xp.unique_values(walks)
            nodes = nodes[nodes >= 0]
        else:
            u = rng.uniform(self.size, device=graph.device)
            drawn = xp.searchsorted(self._sums, u, side="right")
            if self.method == "edge":
                drawn = xp.concat([xp.take(graph.src, drawn), xp.take(graph.dst, drawn)])
            nodes = xp.astype(xp.unique_values(drawn), xp.int64, copy=False)
        inner, ids = induced(graph, nodes)
        return Sample((inner,), nodes, (ids,), nodes.shape[0])

    def estimate_weights(self, n: int) -> tuple[Any, Any]:
        """Estimate, from ``n`` parts, what makes training on parts unbiased.

        Parameters
        ----------
        n : int

        Returns
        -------
        nodes : array of float64, shape (n_nodes,)
            ``1 / (n_nodes p_v)``: the weight of a node's loss, summed over a part.
        edges : array of float64, shape (n_edges,)
            ``p_v / p_uv``: the weight of an edge's message to ``v``, in sums over edges. Zero, as
            for nodes, for what no part has.
        """
        xp = _device.namespace(self.graph.indptr)
        nodes = xp.zeros_like(self.graph.in_degrees, dtype=xp.float64)
        edges = xp.zeros_like(self.graph.src, dtype=xp.float64)
        for batch in range(_integer("n", n, 1, 2**62)):
            part = self._part(1, batch)  # not the parts that are trained on
            nodes[part.nodes] += 1
            edges[part.edge_ids[0]] += 1
        of_edges = xp.take(nodes, self.graph.dst) / xp.where(edges > 0, edges, xp.inf)
        return n / self.graph.n_nodes / xp.where(nodes > 0, nodes, xp.inf), of_edges


class ClusterSampler:
    """Train on a few clusters at a time: their nodes and all edges between these.

    Parameters
    ----------
    graph : Graph
    parts : int or array of int, shape (n_nodes,)
        How many parts :func:`partition` is to make, or the part of each node.
    n_together : int, default 1
        Parts of a batch.
    seed : int, default 0

    Notes
    -----
    ``len(sampler)`` batches make an epoch and have each node once. Which parts are together
    follows from the seed and the epoch.

    References
    ----------
    Chiang, Liu, Si, Li, Bengio and Hsieh, "Cluster-GCN: an efficient algorithm for training deep
    and large graph convolutional networks", 2019, arXiv:1905.07953, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> path = geom.Graph.from_edges(np.arange(5), np.arange(1, 6), n_nodes=6)
    >>> sampler = geom.ClusterSampler(path, 2)
    >>> len(sampler), sampler(0).nodes
    (2, array([3, 4, 5]))
    """

    def __init__(self, graph: Graph, parts: Any, *, n_together: int = 1, seed: int = 0):
        _require_square(graph)
        self.graph = graph
        if not _device.is_array(parts) or parts.ndim == 0:
            parts = partition(graph, parts)
        parts = _device.to_device(parts, "cpu")
        if parts.shape != (graph.n_nodes,) or parts.dtype.kind not in "iu":
            raise ValueError(
                f"parts must be the part of each of {graph.n_nodes} nodes, got shape "
                f"{parts.shape} of {parts.dtype}"
            )
        if parts.size and parts.min() < 0:
            raise ValueError(f"parts must not be negative, got {parts.min()}")
        self.n_parts = int(parts.max(initial=-1)) + 1
        self.n_together = _integer("n_together", n_together, 1, 2**62)
        self.seed = _integer("seed", seed, 0, 2**64)
        self._nodes = np.argsort(parts, kind="stable")
        self._ptr = np.concatenate([[0], np.cumsum(np.bincount(parts, minlength=self.n_parts))])

    def __repr__(self):
        return f"ClusterSampler({self.graph!r}, {self.n_parts} parts)"

    def __len__(self):
        return -(-self.n_parts // self.n_together)

    def __call__(self, batch: int, *, epoch: int = 0) -> Sample:
        """Give batch number ``batch`` of an epoch.

        Returns
        -------
        Sample
            One graph; its nodes rise, and all are seeds.
        """
        batch = _integer("batch", batch, 0, len(self))
        rng = Generator(self.seed, key=(CLUSTER, _integer("epoch", epoch, 0, 2**63)))
        order = rng.permutation(self.n_parts, device="cpu")
        chosen = order[batch * self.n_together :][: self.n_together]
        nodes = [self._nodes[self._ptr[part] : self._ptr[part + 1]] for part in chosen]
        nodes = like(self.graph.indptr, np.sort(np.concatenate(nodes)))
        inner, ids = induced(self.graph, nodes)
        return Sample((inner,), nodes, (ids,), nodes.shape[0])


def partition(graph: Graph, n_parts: int, *, method: str = "greedy", n_passes: int = 10) -> Any:
    """Cut a graph into parts of about one size, with few edges between them.

    Nodes go, in the order of a breadth-first search, to the part that has most of their neighbours,
    less the more it is full; later passes do it again, knowing where all nodes were.

    Parameters
    ----------
    graph : Graph
        Directions do not matter.
    n_parts : int
    method : {"greedy", "ranges"}, default "greedy"
        "ranges" takes the nodes as they are numbered, in runs of about as many nodes and edges that
        end there.
    n_passes : int, default 10
        Of "greedy".

    Returns
    -------
    array of int64, shape (n_nodes,)
        The part of each node, in [0, n_parts). With "greedy" none has more than
        ``ceil(1.1 n_nodes / n_parts)``. Found on the host, always the same.

    References
    ----------
    Stanton and Kliot, "Streaming graph partitioning for large distributed graphs", KDD 2012,
    doi:10.1145/2339530.2339722 (linear deterministic greedy). Nishimura and Ugander, "Restreaming
    graph partitioning", KDD 2013, doi:10.1145/2487575.2487696.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> pairs = geom.Graph.from_edges(np.array([0, 1]), np.array([2, 3]), n_nodes=4)
    >>> geom.partition(pairs, 2)
    array([0, 1, 0, 1])
    """
    _require_square(graph)
    n_parts = _integer("n_parts", n_parts, 1, 2**31)
    n_passes = _integer("n_passes", n_passes, 1, 2**31)
    if method == "ranges":
        work = _device.to_device(graph.indptr, "cpu") + np.arange(graph.n_nodes + 1)
        middles = (work[1:] + work[:-1]) / 2
        parts = np.minimum(n_parts * middles // max(work[-1], 1), n_parts - 1)
        return like(graph.indptr, parts.astype(np.int64))
    if method != "greedy":
        raise ValueError(f"method must be 'greedy' or 'ranges', got {method!r}")
    rows, turned = (
        (_device.to_device(part.indptr, "cpu"), _device.to_device(part.indices, "cpu"))
        for part in (graph, graph.T)
    )
    return like(graph.indptr, sampling.partition(rows, turned, n_parts, n_passes))
