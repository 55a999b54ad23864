"""Sampling of neighbours over several kinds of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroGraph, Relation
from rtxarr.geom._sampling import (
    HETERO,
    _edge_weights,
    _fanout,
    _integer,
    check_nodes,
    like,
    on_host,
    rows_of,
    stream_of,
)
from rtxarr.geom._subgraph import iota
from rtxarr.kernels import sampling

__all__ = ["HeteroNeighborSampler", "HeteroSample"]


class HeteroSample(NamedTuple):
    """What was sampled around some seeds.

    Attributes
    ----------
    graphs : tuple of HeteroGraph
        One for each hop, in the order in which layers use them: the last ends at the seeds. The
        nodes of each kind are the first of those of the graph before; further ones have no edges
        that end there.
    nodes : mapping of str to array of int64
        The nodes' numbers in the whole graph, of each kind; the seeds come first, as they were
        given.
    edge_ids : tuple of mapping of (str, str, str) to array of int64
        For each graph the numbers of its edges in the whole graph.
    n_seeds : mapping of str to int
    """

    graphs: tuple[HeteroGraph, ...]
    nodes: Mapping[str, Any]
    edge_ids: tuple[Mapping[Relation, Any], ...]
    n_seeds: Mapping[str, int]


class HeteroNeighborSampler:
    """Draw neighbours around seeds of several kinds, hop by hop, for each relation.

    Parameters
    ----------
    graph : HeteroGraph
    fanout : sequence of int, or mapping of (str, str, str) to sequence of int
        For each hop, from the seeds on, how many edges of a relation are drawn at a node; -1 takes
        all. In a mapping all have one length, and relations that are left out are not followed.
    replace : bool, default False
        Whether an edge may be drawn again.
    weight : mapping of (str, str, str) to array of float, shape (n_edges,), optional
        How likely each edge of a relation is drawn, as :class:`NeighborSampler` takes it. Edges of
        relations that are left out are equally likely.
    seed : int, default 0

    Notes
    -----
    What is drawn at a node follows from the seed, the epoch, the hop, the relation's place among
    the sorted ones and the node alone.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.HeteroGraph.from_edges(
    ...     {
    ...         ("author", "writes", "paper"): (np.array([0, 1, 1]), np.array([0, 0, 1])),
    ...         ("paper", "cites", "paper"): (np.array([1]), np.array([0])),
    ...     },
    ...     n_nodes={"author": 2, "paper": 2},
    ... )
    >>> sample = geom.HeteroNeighborSampler(graph, [-1])({"paper": np.array([0])})
    >>> sample.nodes
    {'author': array([0, 1]), 'paper': array([0, 1])}
    >>> sample.graphs[0]
    HeteroGraph(2 author, 2 paper; author-writes-paper: 2, paper-cites-paper: 1)
    """

    def __init__(
        self,
        graph: HeteroGraph,
        fanout: Sequence[int] | Mapping[Relation, Sequence[int]],
        *,
        replace: bool = False,
        weight: Mapping[Relation, Any] | None = None,
        seed: int = 0,
    ):
        self.graph = graph
        if isinstance(fanout, Mapping):
            unknown = set(fanout) - set(graph.graphs)
            if unknown:
                raise ValueError(f"fanout must be of relations of the graph, got {unknown}")
        else:
            fanout = dict.fromkeys(graph.graphs, fanout)
        self.fanout = {relation: _fanout(fanout[relation]) for relation in sorted(fanout)}
        lengths = {len(hops) for hops in self.fanout.values()}
        if len(lengths) != 1:
            raise ValueError(f"fanout must have one number of hops, got {sorted(lengths)}")
        self.n_hops = lengths.pop()
        self.replace = replace
        self.seed = _integer("seed", seed, 0, 2**64)
        self._places = {relation: i for i, relation in enumerate(sorted(graph.graphs))}
        weight = {} if weight is None else weight
        if not isinstance(weight, Mapping):
            raise TypeError(f"weight must be a mapping of relations, got {type(weight).__name__}")
        unknown = set(weight) - set(graph.graphs)
        if unknown:
            raise ValueError(f"weight must be of relations of the graph, got {unknown}")
        self._weights = {
            relation: _weights_of(graph.graphs[relation], of_edges, f"weight[{relation}]")
            for relation, of_edges in weight.items()
        }

    def __repr__(self):
        return f"HeteroNeighborSampler({self.graph!r}, {self.n_hops} hops)"

    def __call__(self, seeds: Mapping[str, Any], *, epoch: int = 0) -> HeteroSample:
        """Sample around seeds.

        Parameters
        ----------
        seeds : mapping of str to array of int, shape (n_seeds,)
            Nodes of each kind; one that comes twice stays twice.
        epoch : int, default 0

        Returns
        -------
        HeteroSample
        """
        unknown = set(seeds) - set(self.graph.n_nodes)
        if unknown:
            raise ValueError(f"seeds must be of {', '.join(self.graph.n_nodes)}, got {unknown}")
        nodes = {
            kind: self._seeds(f"seeds[{kind!r}]", seeds.get(kind, _NONE), kind)
            for kind in self.graph.n_nodes
        }
        return self._sample(nodes, {kind: [0, x.shape[0]] for kind, x in nodes.items()}, epoch)[0]

    def bulk(self, kind: str, seeds: Any, batch_size: int, *, epoch: int = 0) -> list[HeteroSample]:
        """Sample around many batches of seeds of one kind in one go.

        Parameters
        ----------
        kind : str
        seeds : array of int, shape (n_seeds,)
        batch_size : int, at least 1
            The last batch may be smaller.
        epoch : int, default 0

        Returns
        -------
        list of HeteroSample
            Each as the sampler gives it for its batch alone.
        """
        if kind not in self.graph.n_nodes:
            raise ValueError(f"kind must be of {', '.join(self.graph.n_nodes)}, got {kind!r}")
        size = _integer("batch_size", batch_size, 1, 2**63)
        nodes = {name: self._seeds("seeds", _NONE, name) for name in self.graph.n_nodes}
        nodes[kind] = self._seeds("seeds", seeds, kind)
        n = nodes[kind].shape[0]
        if n == 0:
            return []
        bounds = [*range(0, n, size), n]
        none = [0] * len(bounds)
        return self._sample(nodes, dict.fromkeys(nodes, none) | {kind: bounds}, epoch)

    def _seeds(self, name, seeds, kind):
        some = next(iter(self.graph.graphs.values()))
        return check_nodes(name, seeds, some, n_nodes=self.graph.n_nodes[kind])

    def _sample(self, nodes, bounds, epoch):
        """Sample for batches that have ``bounds`` among the nodes of each kind."""
        epoch = _integer("epoch", epoch, 0, 2**63)
        n_batches = len(next(iter(bounds.values()))) - 1
        ptr = {kind: like(nodes[kind], np.asarray(b, np.int64)) for kind, b in bounds.items()}
        hops, ptrs = [], [ptr]
        for hop in range(self.n_hops):
            nodes, ptr, drawn = self._hop(nodes, ptr, hop, epoch)
            hops.append(drawn)
            ptrs.append(ptr)
        # All bounds in one wait for a GPU.
        bounds_of_all = [at for ptr in ptrs for at in ptr.values()]
        bounds_of_all += [edge_ptr for drawn in hops for *_, edge_ptr in drawn.values()]
        found = iter(on_host(_device.namespace(*bounds_of_all).stack(bounds_of_all)))
        ends = [{kind: next(found) for kind in ptr} for ptr in ptrs]
        hops = [{r: (*rest, next(found)) for r, (*rest, _) in drawn.items()} for drawn in hops]
        return [self._batch(hops, ends, nodes, b) for b in range(n_batches)]

    def _hop(self, nodes, ptr, hop, epoch):
        begun = {}
        for relation, fanout in self.fanout.items():
            graph, here = self.graph.graphs[relation], nodes[relation[2]]
            key, stream = stream_of(self.seed, HETERO, epoch, hop, self._places[relation])
            options = {}
            if relation in self._weights:
                weights, sums, available = self._weights[relation]
                available = _device.namespace(here).take(available, here)
                options = {"weights": weights, "sums": sums, "available": available}
            begun[relation] = sampling.begin_draw(
                here, *rows_of(graph, here), fanout[hop], key=key, stream=stream,
                replace=self.replace, **options,
            )  # fmt: skip
        sizes = _last([offsets for offsets, _ in begun.values()])
        drawn = {}
        for (relation, (offsets, write)), size in zip(begun.items(), sizes, strict=True):
            graph, edges = self.graph.graphs[relation], write(size)[:size]
            src, ids = sampling.gather_edges(edges, size, graph.indices, graph.edge_ids)
            xp = _device.namespace(offsets)
            drawn[relation] = offsets, src, ids, xp.take(offsets, ptr[relation[2]])
        reached, reached_ptr = dict(nodes), dict(ptr)
        for kind, here in nodes.items():
            # The sources of this kind, of all relations, are numbered together.
            relations = [relation for relation in drawn if relation[0] == kind]
            if not relations:
                continue
            src, places, src_ptr = _by_batch([drawn[r][1] for r in relations],
                                             [drawn[r][3] for r in relations])  # fmt: skip
            xp = _device.namespace(src)
            n = self.graph.n_nodes[kind]
            local, reached[kind], reached_ptr[kind] = sampling.number_reached(
                here, ptr[kind], src, src_ptr, n
            )
            for relation, place in zip(relations, places, strict=True):
                offsets, _, ids, edge_ptr = drawn[relation]
                drawn[relation] = offsets, xp.take(local, place), ids, edge_ptr
        for kind, size in zip(reached, _last(reached_ptr.values()), strict=True):
            reached[kind] = reached[kind][:size]
        return reached, reached_ptr, drawn

    def _batch(self, hops, ends, nodes, b):
        """Cut batch ``b`` out of what was drawn for all."""
        graphs, edge_ids = [], []
        for drawn, before, after in zip(hops, ends[:-1], ends[1:], strict=True):
            counts = {kind: at[b + 1] - at[b] for kind, at in after.items()}
            parts, ids = {}, {}
            for relation, (offsets, local, numbers, edge_ptr) in drawn.items():
                begin, end = before[relation[2]][b : b + 2]
                first, last = edge_ptr[b : b + 2]
                indptr = offsets[begin : end + 1] - first
                # Those reached just now have no edges yet.
                n_more = counts[relation[2]] - (end - begin)
                xp = _device.namespace(indptr)
                indptr = xp.concat([indptr, xp.full_like(iota(indptr, n_more), last - first)])
                parts[relation] = Graph._made(indptr, local[first:last], counts[relation[0]], None)
                ids[relation] = numbers[first:last]
            graphs.append(HeteroGraph(parts, counts))
            edge_ids.append(ids)
        own = {kind: nodes[kind][at[b] : at[b + 1]] for kind, at in ends[-1].items()}
        n_seeds = {kind: at[b + 1] - at[b] for kind, at in ends[0].items()}
        return HeteroSample(tuple(graphs[::-1]), own, tuple(edge_ids[::-1]), n_seeds)


_NONE = np.zeros(0, np.int64)


def _weights_of(graph, weight, name):
    """Give the weights of stored edges, these added up along rows, and how many are above zero."""
    weights = _edge_weights(graph, weight, name)
    return weights, *sampling.sum_rows(graph.indptr, weights)


def _last(arrays):
    """Give the last entry of each array, all in one wait for a GPU."""
    ends = [x[-1:] for x in arrays]
    return on_host(_device.namespace(*ends).concat(ends)) if ends else []


def _by_batch(parts, ptrs):
    """Join arrays batch by batch; give it, where the entries of each are in it, and its bounds."""
    xp = _device.namespace(*parts)
    total = ptrs[0]
    for ptr in ptrs[1:]:
        total = total + ptr
    joined = xp.concat(parts)
    begin, places = total[:-1], []
    for part, ptr in zip(parts, ptrs, strict=True):
        entry = iota(part, part.shape[0])
        batch = xp.searchsorted(ptr, entry, side="right") - 1
        places.append(entry + xp.take(begin - ptr[:-1], batch))
        joined[places[-1]] = part
        begin = begin + ptr[1:] - ptr[:-1]
    return joined, places, total
