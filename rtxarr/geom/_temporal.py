"""Sampling of what came before: each seed has a moment, and a neighbourhood of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom._graph import Graph, plain
from rtxarr.geom._sampling import TEMPORAL, _fanout, _integer, check_nodes, stream_of
from rtxarr.geom._subgraph import iota
from rtxarr.geom._walks import _require_square
from rtxarr.kernels import sampling

__all__ = ["TemporalSample", "TemporalSampler"]


class TemporalSample(NamedTuple):
    """What was sampled around some seeds, each at a moment.

    Attributes
    ----------
    graphs, nodes, edge_ids, n_seeds
        As of :class:`Sample`. A node that several seeds reach is there once for each.
    owners : array of int64, shape (graphs[0].n_src,)
        Which of the seeds each node was reached from.
    """

    graphs: tuple[Graph, ...]
    nodes: Any
    edge_ids: tuple[Any, ...]
    n_seeds: int
    owners: Any


class TemporalSampler:
    """Draw neighbours along edges from before each seed's moment.

    Parameters
    ----------
    graph : Graph
    fanout : sequence of int
        For each hop, from the seeds on, how many edges of a node are drawn; -1 takes all.
    time : str or array of numbers, shape (n_edges,), default "time"
        When each edge came about, or the name among the graph's arrays of edges.
    inclusive : bool, default False
        Whether edges of the very moment count.
    replace : bool, default False
        Whether an edge may be drawn again.
    seed : int, default 0

    Notes
    -----
    Each node is sampled at the moment of its seed. What is drawn follows from the seed number, the
    epoch, the hop, the node and the edges that it had at that moment, and from nothing else.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1, 2, 3]), np.array([0, 0, 1]), n_nodes=4)
    >>> sampler = geom.TemporalSampler(graph, [-1, -1], time=np.array([1.0, 5.0, 3.0]))
    >>> sampler(np.array([0, 0]), np.array([4.0, 9.0])).nodes
    array([0, 0, 1, 1, 2, 3, 3])
    """

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        *,
        time: Any = "time",
        inclusive: bool = False,
        replace: bool = False,
        seed: int = 0,
    ):
        _require_square(graph)
        if isinstance(time, str):
            if time not in graph.edges:
                raise ValueError(f"time must be one of {', '.join(graph.edges)}, got {time!r}")
            time = graph.edges[time]
        times = plain(raw(time))
        if not _device.is_array(times) or times.shape != (graph.n_edges,):
            shape = getattr(times, "shape", type(times).__name__)
            raise ValueError(f"time must have shape ({graph.n_edges},), one an edge, got {shape}")
        self.graph = graph
        self.fanout = _fanout(fanout)
        self.inclusive, self.replace = inclusive, replace
        self.seed = _integer("seed", seed, 0, 2**64)
        xp = _device.namespace(times, graph.indptr)
        if bool(xp.any(times != times)):
            raise ValueError("time must not be NaN")
        # Edges of a node by time, so that those before a moment are the first of them.
        found = xp.unique_inverse(times)
        self._moments = found.values
        ranks = graph.stored(xp.reshape(found.inverse_indices, (-1,)))
        keys = graph._rows * self._moments.shape[0] + ranks
        order = xp.argsort(keys, stable=True)
        self._keys = xp.take(keys, order)
        self._indices = xp.take(graph.indices, order)
        self._edge_ids = xp.take(graph.edge_ids, order)

    def __repr__(self):
        return f"TemporalSampler({self.graph!r}, fanout={list(self.fanout)})"

    def __call__(self, seeds: Any, times: Any, *, epoch: int = 0) -> TemporalSample:
        """Sample around seeds.

        Parameters
        ----------
        seeds : array of int, shape (n_seeds,)
        times : array of numbers, shape (n_seeds,)
            The moment of each.
        epoch : int, default 0

        Returns
        -------
        TemporalSample
        """
        graph = self.graph
        seeds = check_nodes("seeds", seeds, graph)
        times = plain(times)
        if not _device.is_array(times) or times.shape != seeds.shape:
            shape = getattr(times, "shape", type(times).__name__)
            raise ValueError(f"times must have shape {seeds.shape}, one a seed, got {shape}")
        epoch = _integer("epoch", epoch, 0, 2**63)
        times = _device.to_device(times, graph.device)
        xp = _device.namespace(seeds, times)
        side = "right" if self.inclusive else "left"
        ranks = xp.astype(xp.searchsorted(self._moments, times, side=side), xp.int64)
        n = seeds.shape[0]
        # Nodes are kept seed by seed; place is where each is among all, the seeds first.
        nodes, ptr = seeds, iota(seeds, n + 1)
        owners = place = iota(seeds, n)
        graphs, edge_ids = [], []
        for hop, fanout in enumerate(self.fanout):
            key, stream = stream_of(self.seed, TEMPORAL, epoch, hop)
            first = xp.take(graph.indptr, nodes)
            moment = nodes * self._moments.shape[0] + xp.take(ranks, owners)
            degrees = xp.searchsorted(self._keys, moment, side="left") - first
            offsets, edges = sampling.draw(
                nodes, first, degrees, fanout, key=key, stream=stream, replace=self.replace
            )
            src = xp.take(self._indices, edges)
            edge_ptr = xp.take(offsets, ptr)
            local, reached, ends = sampling.renumber(nodes, ptr, src, edge_ptr, graph.n_src)
            rows = _owners(xp, offsets, edges.shape[0])
            begun, count = nodes.shape[0], reached.shape[0]
            owners_after = _owners(xp, ends, count)
            within = iota(nodes, count) - xp.take(ends, owners_after)
            sizes = xp.take(ptr[1:] - ptr[:-1], owners_after)
            old = within < sizes
            # Of what a seed reached anew, so many come before: all but those begun with.
            fresh = begun + iota(nodes, count) - xp.take(ptr[1:], owners_after)
            kept = xp.where(old, xp.take(ptr, owners_after) + within, 0)
            after = xp.where(old, xp.take(place, kept) if begun else fresh, fresh)
            start = xp.take(ends, xp.take(owners, rows))
            graphs.append(
                Graph._of_edges(xp.take(after, start + local), xp.take(place, rows), count, begun)
            )
            edge_ids.append(xp.take(self._edge_ids, edges))
            nodes, ptr, owners, place = reached, ends, owners_after, after
        ordered = xp.argsort(place)
        return TemporalSample(
            tuple(graphs[::-1]),
            xp.take(nodes, ordered),
            tuple(edge_ids[::-1]),
            n,
            xp.take(owners, ordered),
        )


def _owners(xp, offsets, n):
    """Give the row of each of ``n`` entries."""
    found = xp.searchsorted(offsets, iota(offsets, n), side="right") - 1
    return xp.astype(found, xp.int64, copy=False)
