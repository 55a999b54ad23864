"""Sampling of neighbours over several kinds of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtxarr import _device
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroGraph, Relation
from rtxarr.geom._sampling import HETERO, _fanout, _integer, check_nodes, like, rows_of, stream_of
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
        epoch = _integer("epoch", epoch, 0, 2**63)
        some = next(iter(self.graph.graphs.values()))
        nodes = {}
        for kind, count in self.graph.n_nodes.items():
            given = seeds.get(kind, np.zeros(0, np.int64))
            nodes[kind] = check_nodes(f"seeds[{kind!r}]", given, some, n_nodes=count)
        n_seeds = {kind: found.shape[0] for kind, found in nodes.items()}
        graphs, edge_ids = [], []
        for hop in range(self.n_hops):
            nodes, graph, ids = self._hop(nodes, hop, epoch)
            graphs.append(graph)
            edge_ids.append(ids)
        return HeteroSample(tuple(graphs[::-1]), nodes, tuple(edge_ids[::-1]), n_seeds)

    def _hop(self, nodes, hop, epoch):
        drawn, ids = {}, {}
        for relation, fanout in self.fanout.items():
            graph, here = self.graph.graphs[relation], nodes[relation[2]]
            xp = _device.namespace(here)
            key, stream = stream_of(self.seed, HETERO, epoch, hop, self._places[relation])
            offsets, edges = sampling.draw(
                here, *rows_of(graph, here), fanout[hop], key=key, stream=stream,
                replace=self.replace,
            )  # fmt: skip
            drawn[relation] = offsets, xp.take(graph.indices, edges)
            ids[relation] = xp.take(graph.edge_ids, edges)
        local, reached = {}, {}
        for kind, here in nodes.items():
            # The sources of this kind, of all relations, are numbered together.
            relations = [relation for relation in drawn if relation[0] == kind]
            if not relations:
                reached[kind] = here
                continue
            sources = [drawn[relation][1] for relation in relations]
            src = _device.namespace(here).concat(sources)
            ptr, edge_ptr = (like(here, np.array([0, x.shape[0]])) for x in (here, src))
            n = self.graph.n_nodes[kind]
            numbers, reached[kind], _ = sampling.renumber(here, ptr, src, edge_ptr, n)
            ends = np.cumsum([x.shape[0] for x in sources])
            for relation, end, part in zip(relations, ends, sources, strict=True):
                local[relation] = numbers[end - part.shape[0] : end]
        graphs = {}
        for relation, (offsets, _) in drawn.items():
            n_src, n_dst = (reached[kind].shape[0] for kind in (relation[0], relation[2]))
            xp = _device.namespace(offsets)
            # Those reached just now have no edges yet.
            rest = like(offsets, np.zeros(n_dst + 1 - offsets.shape[0], np.int64)) + offsets[-1]
            indptr = xp.concat([offsets, rest])
            graphs[relation] = Graph._made(indptr, local[relation], n_src, None)
        counts = {kind: found.shape[0] for kind, found in reached.items()}
        return reached, HeteroGraph(graphs, counts), ids
