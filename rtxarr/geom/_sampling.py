"""Sampling of neighbours: what is drawn at a node depends on no batch, order, worker or device."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr._checks import check_range
from rtxarr.dtypes import isdtype
from rtxarr.geom._graph import Graph, plain
from rtxarr.geom._subgraph import iota
from rtxarr.kernels import philox, sampling

__all__ = ["LaborSampler", "NeighborSampler", "Sample"]

# What the samplers draw for: the first part of their keys.
_NEIGHBORS, _LABOR, WALK, SAINT, CLUSTER, NEGATIVES, TEMPORAL, HETERO = range(8)

# Seeds of a pass on the CPU.
_AT_ONCE = 1024


class Sample(NamedTuple):
    """What was sampled around some seeds.

    Attributes
    ----------
    graphs : tuple of Graph
        One for each hop, in the order in which layers use them: the last ends at the seeds. Sources
        begin with the destinations, in the same order, so ``layer(graph, x)[:n_dst]`` goes with
        ``x[:n_dst]``. The destinations of one graph are the sources of the next.
    nodes : array of int64, shape (graphs[0].n_src,)
        The nodes' numbers in the whole graph; the seeds come first, as they were given. The nodes
        of each graph are the first of these.
    edge_ids : tuple of array of int64
        For each graph the numbers of its edges in the whole graph.
    n_seeds : int
    """

    graphs: tuple[Graph, ...]
    nodes: Any
    edge_ids: tuple[Any, ...]
    n_seeds: int

    @property
    def seeds(self) -> Any:
        """The seeds: the first of the nodes."""
        return self.nodes[: self.n_seeds]


class _HopSampler:
    """Samples hop by hop, for many batches at once; subclasses draw the edges."""

    _domain: int

    def __init__(self, graph, fanout, *, seed, directional=True):
        if not graph.is_square:
            raise ValueError(
                f"graph must lead from nodes to the same nodes, got {graph.n_src} sources and "
                f"{graph.n_dst} destinations"
            )
        self.graph = graph
        self.fanout = _fanout(fanout)
        self.directional = directional
        self.seed = _integer("seed", seed, 0, 2**64)

    def __repr__(self):
        return f"{type(self).__name__}({self.graph!r}, fanout={list(self.fanout)})"

    def __call__(self, seeds: Any, *, epoch: int = 0) -> Sample:
        """Sample around one batch of seeds.

        Parameters
        ----------
        seeds : array of int, shape (n_seeds,)
            Nodes; one that comes twice stays twice.
        epoch : int, default 0
            Each epoch draws anew.

        Returns
        -------
        Sample
        """
        seeds = self._seeds(seeds)
        return self._sample(seeds, [0, seeds.shape[0]], epoch)[0]

    def bulk(self, seeds: Any, batch_size: int, *, epoch: int = 0) -> list[Sample]:
        """Sample around many batches in one go.

        Parameters
        ----------
        seeds : array of int, shape (n_seeds,)
        batch_size : int, at least 1
            The last batch may be smaller.
        epoch : int, default 0

        Returns
        -------
        list of Sample
            Each as the sampler gives it for its batch alone.
        """
        seeds = self._seeds(seeds)
        size = _integer("batch_size", batch_size, 1, 2**63)
        n = seeds.shape[0]
        # All at once on a GPU; on the CPU no more than its caches hold, in threads.
        step = n if _device.is_device_array(seeds) else max(1, _AT_ONCE // size) * size
        parts = [seeds[begin : begin + step] for begin in range(0, n, step or 1)]

        def sample(part):
            ptr = [*range(0, part.shape[0], size), part.shape[0]]
            return self._sample(part, ptr, epoch)

        found: Iterable[list[Sample]]
        if len(parts) < 2:
            found = map(sample, parts)
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = pool.map(sample, parts)
        return [one for samples in found for one in samples]

    def _seeds(self, seeds):
        return check_nodes("seeds", seeds, self.graph)

    def _sample(self, nodes, ptr, epoch):
        epoch = _integer("epoch", epoch, 0, 2**63)
        graph = self.graph
        n_seeds = _sizes(ptr)
        ptr = like(nodes, np.asarray(ptr, dtype=np.int64))
        hops: list[list[tuple]] = []  # of each hop the graphs and edge numbers of all batches
        drawn: Any = ()
        cuts: Any = ()
        for hop, n in enumerate(self.fanout):
            key, stream = stream_of(self.seed, self._domain, epoch, hop)
            offsets, write = self._begin_draw(nodes, ptr, n, key, stream)
            indptrs, bounds = sampling.cut_offsets(offsets, ptr)
            if hop > 0:  # the host does its part while a GPU is busy
                cuts = _cut(*drawn)
            part, edge_part = on_host(bounds)  # a hop waits here, and only here
            nodes, edges = nodes[: sampling.room(nodes, part[-1])], write(edge_part[-1])
            src, ids = sampling.gather_edges(edges, edge_part[-1], graph.indices, graph.edge_ids)
            local, nodes, ptr = sampling.number_reached(nodes, ptr, src, bounds[1], graph.n_src)
            if hop > 0:
                hops.append(_blocks(cuts, part))
            drawn = indptrs, local, ids, part, edge_part
        cuts = _cut(*drawn)
        part = on_host(ptr)
        hops.append(_blocks(cuts, part))
        samples = []
        for b, (begin, end) in enumerate(itertools.pairwise(part)):
            own = nodes[begin:end]
            graphs, edge_ids = zip(*[hop[b] for hop in reversed(hops)], strict=True)
            if not self.directional:
                inner, ids = induced(graph, own)
                graphs, edge_ids = (inner,) * len(hops), (ids,) * len(hops)
            samples.append(Sample(graphs, own, edge_ids, n_seeds[b]))
        return samples


def _cut(indptrs, local, ids, part, edge_part):
    """Cut what a hop has drawn into offsets, sources and edge numbers of batches."""
    found = []
    for b, (begin, end) in enumerate(itertools.pairwise(edge_part)):
        rows = slice(part[b] + b, part[b + 1] + b + 1)
        found.append((indptrs[rows], local[begin:end], ids[begin:end]))
    return found


def _blocks(cuts, part):
    """Make the graphs of a hop, whose sources are the nodes of ``part``."""
    return [
        (Graph._made(indptr, local, n_src, None, nested=True), ids)
        for (indptr, local, ids), n_src in zip(cuts, _sizes(part), strict=True)
    ]


def _sizes(part):
    return [end - begin for begin, end in itertools.pairwise(part)]


class NeighborSampler(_HopSampler):
    """Draw neighbours around seeds: from each node some of the edges that end there, hop by hop.

    Parameters
    ----------
    graph : Graph
    fanout : sequence of int
        For each hop, from the seeds on, how many edges of a node are drawn; -1 takes all.
    replace : bool, default False
        Whether an edge may be drawn again. Without, a node with no more edges than asked for
        keeps each of them once.
    weight : array of float, shape (n_edges,), optional
        How likely each edge is drawn, in proportion; in the order of the edges' numbers. An edge
        of weight zero is never drawn.
    directional : bool, default True
        Whether a hop's graph has just the edges drawn in it. Without, all graphs are the
        one of all edges between the nodes that were reached.
    seed : int, default 0

    Notes
    -----
    What is drawn at a node follows from the seed, the epoch, the hop and the node alone. So it
    does not matter which batch the node comes in, or which device or worker draws.

    References
    ----------
    Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", 2017,
    arXiv:1706.02216, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1, 2, 3]), np.array([0, 0, 2]), n_nodes=5)
    >>> sample = geom.NeighborSampler(graph, [-1, -1])(np.array([4, 0]))
    >>> sample.nodes
    array([4, 0, 1, 2, 3])
    >>> sample.graphs
    (Graph(5 to 4 nodes, 3 edges), Graph(4 to 2 nodes, 2 edges))
    """

    _domain = _NEIGHBORS

    def __init__(
        self,
        graph: Graph,
        fanout: Sequence[int],
        *,
        replace: bool = False,
        weight: Any = None,
        directional: bool = True,
        seed: int = 0,
    ):
        super().__init__(graph, fanout, seed=seed, directional=directional)
        self.replace = replace
        self._weights = self._sums = self._available = None
        if weight is not None:
            self._weights = _edge_weights(graph, weight)
            self._sums, self._available = sampling.sum_rows(graph.indptr, self._weights)

    def _begin_draw(self, nodes, ptr, n, key, stream):
        first, degrees, usable = sampling.look_up(self.graph.indptr, nodes, ptr, self._available)
        return sampling.begin_draw(
            nodes,
            first,
            degrees,
            n,
            key=key,
            stream=stream,
            replace=self.replace,
            weights=self._weights,
            sums=self._sums,
            available=usable,
        )


class LaborSampler(_HopSampler):
    """Draw neighbours so that nodes of a batch share them: fewer nodes for the same variance.

    Each source gets a random number; a destination with ``d`` edges keeps those whose source's
    number is below ``n / d``: ``n`` on average. Since all destinations look at the same numbers,
    they tend to keep the same sources.

    Parameters
    ----------
    graph : Graph
    fanout : sequence of int
        For each hop, from the seeds on, how many edges a node keeps on average; -1 for all.
    directional, seed
        As of :class:`NeighborSampler`.

    References
    ----------
    Balin and Catalyurek, "Layer-neighbor sampling: defusing neighborhood explosion in GNNs", 2023,
    arXiv:2210.13339, LABOR-0 of section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1, 2, 1, 2]), np.array([0, 0, 3, 3]), n_nodes=4)
    >>> sample = geom.LaborSampler(graph, [1], seed=1)(np.array([0, 3]))
    >>> sample.graphs[0].src.tolist() == [2, 2]  # both keep the same
    True
    """

    _domain = _LABOR

    def __init__(
        self, graph: Graph, fanout: Sequence[int], *, directional: bool = True, seed: int = 0
    ):
        super().__init__(graph, fanout, seed=seed, directional=directional)

    def _begin_draw(self, nodes, ptr, n, key, stream):
        first, degrees, _ = sampling.look_up(self.graph.indptr, nodes, ptr)
        indices = self.graph.indices
        return sampling.begin_labor(first, degrees, indices, n, key=key, stream=stream)


# ------------------------------------------------------------------------------ shared by samplers


@functools.lru_cache(maxsize=1024)
def stream_of(seed: int, *numbers: int) -> tuple[np.uint64, np.uint64]:
    """Return the key and stream of what is drawn for ``numbers``."""
    if not numbers:
        return np.uint64(seed), np.uint64(0)
    return philox.derive(*stream_of(seed, *numbers[:-1]), numbers[-1])


def rows_of(graph: Graph, nodes: Any) -> tuple[Any, Any]:
    """Return where the stored edges of each node begin, and how many they are."""
    xp = _device.namespace(nodes)
    first = xp.take(graph.indptr, nodes)
    return first, xp.take(graph.indptr, nodes + 1) - first


def induced(graph: Graph, nodes: Any) -> tuple[Graph, Any]:
    """Return the graph of all edges between ``nodes``, and their numbers in the whole one.

    A node that comes twice has its edges at its first place.
    """
    xp = _device.namespace(nodes)
    first, degrees = rows_of(graph, nodes)
    offsets, edges = sampling.draw(nodes, first, degrees, -1, key=_ZERO, stream=_ZERO)
    src = xp.take(graph.indices, edges)
    n = nodes.shape[0]
    ptr, edge_ptr = (like(nodes, np.array([0, x.shape[0]])) for x in (nodes, edges))
    local, reached, _ = sampling.renumber(nodes, ptr, src, edge_ptr, graph.n_src)
    # Where each node first comes, by numbering the nodes themselves.
    own = sampling.renumber(nodes, ptr, nodes, like(nodes, np.array([0, n])), graph.n_src)[0]
    is_first = own == iota(nodes, n)
    rows = xp.searchsorted(offsets, iota(nodes, edges.shape[0]), side="right") - 1
    inside = (local < n) & xp.take(is_first, rows)
    counts = xp.searchsorted(rows[inside], iota(nodes, n + 1))
    indptr = xp.astype(counts, xp.int64, copy=False)
    return (
        Graph._made(indptr, xp.astype(local[inside], xp.int32, copy=False), n, None),
        xp.take(graph.edge_ids, edges[inside]),
    )


_ZERO = np.uint64(0)


def like(x: Any, values: np.ndarray) -> Any:
    """Return a NumPy array where ``x`` is."""
    return _device.to_device(values, _device.device_of(x))


def on_host(x: Any) -> list:
    return _device.to_device(x, "cpu").tolist()


def check_nodes(name: str, nodes: Any, graph: Graph, *, n_nodes: int | None = None) -> Any:
    """Return node numbers as int64 where the graph is, or refuse them."""
    if not _device.is_array(nodes):
        raise TypeError(f"{name} must be an array of node numbers, got {type(nodes).__name__}")
    if nodes.ndim != 1 or not isdtype(nodes.dtype, "integral"):
        raise TypeError(
            f"{name} must be a one-dimensional array of integers, got shape {nodes.shape} of "
            f"{nodes.dtype}"
        )
    nodes = plain(nodes)
    n_nodes = graph.n_dst if n_nodes is None else n_nodes
    if not sampling.are_below(nodes, n_nodes):
        check_range(name, nodes, 0, n_nodes)
    nodes = _device.to_device(nodes, graph.device)
    xp = _device.namespace(nodes)
    return xp.ascontiguousarray(xp.astype(nodes, np.int64, copy=False))


def _edge_weights(graph, weight, name="weight"):
    """Return the weights in stored order as float64."""
    weight = plain(weight)
    if not _device.is_array(weight) or weight.shape != (graph.n_edges,):
        shape = getattr(weight, "shape", type(weight).__name__)
        raise ValueError(f"{name} must have shape ({graph.n_edges},), one an edge, got {shape}")
    if not isdtype(weight.dtype, ("bool", "integral", "real floating")):
        raise TypeError(f"{name} must hold real numbers, got {weight.dtype}")
    xp = _device.namespace(weight, graph.indptr)
    weight = xp.astype(graph.stored(weight), xp.float64)
    most = float(np.finfo(np.float64).max) / max(graph.n_edges, 1)  # so that no sum overflows
    if not bool(xp.all((weight >= 0) & (weight <= most))):
        raise ValueError(
            f"{name} must be finite and not negative, and at most {most:.3g}, got other values"
        )
    return weight


def _fanout(fanout):
    if not isinstance(fanout, Sequence) or isinstance(fanout, str) or not fanout:
        raise TypeError(f"fanout must be a sequence of ints, one a hop, got {fanout!r}")
    return tuple(_integer("fanout", n, -1, 2**62) for n in fanout)


def _integer(name, value, low, high):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if not low <= number < high:
        raise ValueError(f"{name} must lie in [{low}, {high}), got {number}")
    return number
