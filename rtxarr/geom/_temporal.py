"""Sampling of what came before: each seed has a moment, and a neighbourhood of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import raw
from rtxarr.geom._graph import Graph, plain
from rtxarr.geom._sampling import (
    TEMPORAL,
    _edge_weights,
    _fanout,
    _integer,
    check_nodes,
    like,
    on_host,
    stream_of,
)
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
    weight : array of float, shape (n_edges,), optional
        How likely each edge is drawn, as :class:`NeighborSampler` takes it.
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
        weight: Any = None,
        seed: int = 0,
    ):
        _require_square(graph)
        if isinstance(time, str):
            if time not in graph.edges:
                names = ", ".join(graph.edges) or "none: the graph's edges have no arrays"
                raise ValueError(f"time must name an array of edges ({names}), got {time!r}")
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
        self._weights = self._sums = self._positive = None
        if weight is not None:
            self._weights = xp.take(_edge_weights(graph, weight), order)
            self._sums, _ = sampling.sum_rows(graph.indptr, self._weights)
            positive = xp.cumulative_sum(xp.astype(self._weights > 0, xp.int64))
            self._positive = xp.concat([xp.zeros_like(graph.indptr[:1]), positive])

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
        seeds, times = self._checked(seeds, times)
        return self._sample(seeds, times, [0, seeds.shape[0]], epoch)[0]

    def bulk(
        self, seeds: Any, times: Any, batch_size: int, *, epoch: int = 0
    ) -> list[TemporalSample]:
        """Sample around many batches of seeds in one go.

        Parameters
        ----------
        seeds : array of int, shape (n_seeds,)
        times : array of numbers, shape (n_seeds,)
        batch_size : int, at least 1
            The last batch may be smaller.
        epoch : int, default 0

        Returns
        -------
        list of TemporalSample
            Each as the sampler gives it for its batch alone.
        """
        seeds, times = self._checked(seeds, times)
        size, n = _integer("batch_size", batch_size, 1, 2**63), seeds.shape[0]
        return self._sample(seeds, times, [*range(0, n, size), n], epoch) if n else []

    def _checked(self, seeds, times):
        seeds = check_nodes("seeds", seeds, self.graph)
        times = plain(times)
        if not _device.is_array(times) or times.shape != seeds.shape:
            shape = getattr(times, "shape", type(times).__name__)
            raise ValueError(f"times must have shape {seeds.shape}, one a seed, got {shape}")
        xp = _device.namespace(times)
        if bool(xp.any(times != times)):
            raise ValueError("times must not be NaN")
        return seeds, _device.to_device(times, self.graph.device)

    def _sample(self, seeds, times, bounds, epoch):
        """Sample for batches, of the seeds ``bounds[b]`` to ``bounds[b + 1]`` each."""
        graph = self.graph
        epoch = _integer("epoch", epoch, 0, 2**63)
        xp = _device.namespace(seeds, times)
        side = "right" if self.inclusive else "left"
        ranks = xp.astype(xp.searchsorted(self._moments, times, side=side), xp.int64)
        n, batches = seeds.shape[0], like(seeds, np.asarray(bounds, dtype=np.int64))
        # Nodes are kept seed by seed; place is where each is among all, the seeds first.
        nodes, ptr = seeds, iota(seeds, n + 1)
        owners = place = iota(seeds, n)
        # Where the places that a hop gives begin, for each batch and at the end.
        hops, parts = [], [batches]
        for hop, fanout in enumerate(self.fanout):
            key, stream = stream_of(self.seed, TEMPORAL, epoch, hop)
            first = xp.take(graph.indptr, nodes)
            moment = nodes * self._moments.shape[0] + xp.take(ranks, owners)
            degrees = xp.searchsorted(self._keys, moment, side="left") - first
            available = None
            if self._weights is not None:
                end = xp.take(self._positive, first + degrees)
                available = end - xp.take(self._positive, first)
            offsets, edges = sampling.draw(
                nodes, first, degrees, fanout, key=key, stream=stream, replace=self.replace,
                weights=self._weights, sums=self._sums, available=available, prefixes=True,
            )  # fmt: skip
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
            ends_of = xp.take(after, start + local), xp.take(place, rows)
            hops.append((*ends_of, xp.take(self._edge_ids, edges), xp.take(edge_ptr, batches)))
            parts.append(begun + xp.take(ends - ptr, batches))
            nodes, ptr, owners, place = reached, ends, owners_after, after
        ordered = xp.argsort(place)
        found = xp.take(nodes, ordered), xp.take(owners, ordered)
        return self._cut(hops, parts, found, bounds)

    def _cut(self, hops, parts, found, bounds):
        """Cut the batches out of what was drawn for all."""
        xp = _device.namespace(*found)
        parts = np.asarray([on_host(part) for part in parts], dtype=np.int64)
        sizes = np.diff(parts, axis=1)  # of each hop's new nodes, for each batch
        begins = np.cumsum(sizes, axis=0) - sizes
        n_batches = len(bounds) - 1
        shifts = like(found[0], (begins - parts[:, :-1]).reshape(-1))
        firsts = like(found[0], parts[:, 0])
        made: list[list[tuple]] = [[] for _ in range(n_batches)]
        for hop, (src, dst, ids, edge_ptr) in enumerate(hops):
            batch = _owners(xp, edge_ptr, src.shape[0])

            def moved(place, batch=batch):
                """Give the place in its batch: hop by hop, as in the whole."""
                hop = xp.searchsorted(firsts, place, side="right") - 1
                return place + xp.take(shifts, hop * n_batches + batch)

            src, dst, ends = moved(src), moved(dst), on_host(edge_ptr)
            for b in range(n_batches):
                part = slice(ends[b], ends[b + 1])
                n_dst = int(sizes[: hop + 1, b].sum())
                n_src = n_dst + int(sizes[hop + 1, b])
                made[b].append((Graph._of_edges(src[part], dst[part], n_src, n_dst), ids[part]))
        samples = []
        for b, drawn in enumerate(made):
            runs = [slice(part[b], part[b + 1]) for part in parts.tolist()]
            nodes, owners = (xp.concat([x[run] for run in runs]) for x in found)
            graphs, edge_ids = zip(*drawn[::-1], strict=True)
            n_seeds = bounds[b + 1] - bounds[b]
            samples.append(TemporalSample(graphs, nodes, edge_ids, n_seeds, owners - bounds[b]))
        return samples


def _owners(xp, offsets, n):
    """Give the row of each of ``n`` entries."""
    found = xp.searchsorted(offsets, iota(offsets, n), side="right") - 1
    return xp.astype(found, xp.int64, copy=False)
