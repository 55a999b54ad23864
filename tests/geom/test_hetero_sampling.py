"""Sampling over several kinds of nodes and edges."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close

COUNTS = {"author": 12, "paper": 15, "venue": 3}
RELATIONS = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "by", "author"),
    ("venue", "prints", "paper"),
]


def pairs():
    rng = np.random.default_rng(8)
    return {
        (src, name, dst): (rng.integers(0, COUNTS[src], 60), rng.integers(0, COUNTS[dst] - 1, 60))
        for src, name, dst in RELATIONS
    }


PAIRS = pairs()
GRAPH = geom.HeteroGraph.from_edges(PAIRS, COUNTS)
SEEDS = {"paper": np.array([4, 14, 4, 0]), "author": np.array([3])}


def drawn(sample):
    """Give, for each hop from the seeds on and each relation, the edges drawn at each node."""
    found = []
    for graph, ids in zip(sample.graphs[::-1], sample.edge_ids[::-1], strict=True):
        hop = {}
        for relation, part in graph.graphs.items():
            for i, node in enumerate(sample.nodes[relation[2]][: part.n_dst]):
                edges = ids[relation][part.indptr[i] : part.indptr[i + 1]].tolist()
                if edges:
                    hop[relation, int(node)] = edges
        found.append(hop)
    return found


@pytest.mark.parametrize("replace", [False, True])
def test_edges_are_those_of_the_relations(replace):
    sample = geom.HeteroNeighborSampler(GRAPH, [3, 2], replace=replace, seed=1)(SEEDS, epoch=4)
    assert dict(sample.n_seeds) == {"author": 1, "paper": 4, "venue": 0}
    for kind, seeds in SEEDS.items():
        assert_close(sample.nodes[kind][: len(seeds)], seeds, exact=True)
    counts = dict(sample.n_seeds)
    for hop, graph in enumerate(sample.graphs[::-1]):
        ids = sample.edge_ids[::-1][hop]
        assert set(graph.graphs) == set(RELATIONS)
        for relation, part in graph.graphs.items():
            src, dst = PAIRS[relation]
            assert_close(sample.nodes[relation[0]][part.src], src[ids[relation]], exact=True)
            assert_close(sample.nodes[relation[2]][part.dst], dst[ids[relation]], exact=True)
            nodes = sample.nodes[relation[2]][: counts[relation[2]]]
            degrees = np.bincount(dst, minlength=COUNTS[relation[2]])[nodes]
            want = np.where(degrees > 0, 3 - hop, 0) if replace else np.minimum(degrees, 3 - hop)
            assert_close(part.in_degrees[: len(nodes)], want, exact=True)
            assert not part.in_degrees[len(nodes) :].any()
        counts = dict(graph.n_nodes)
    for kind, nodes in sample.nodes.items():
        assert len(nodes) == counts[kind]
        others = nodes[sample.n_seeds[kind] :]
        assert len(set(others)) == len(others)
        assert not set(others) & set(SEEDS.get(kind, []))


def test_what_is_drawn_follows_from_the_node():
    sampler = geom.HeteroNeighborSampler(GRAPH, [2, 2], seed=1)
    everything = {kind: np.arange(n) for kind, n in COUNTS.items()}
    whole = drawn(sampler(everything))
    for hop, want in zip(drawn(sampler(SEEDS)), whole, strict=True):
        assert hop
        assert hop.items() <= want.items()
    turned = geom.HeteroGraph(dict(reversed(GRAPH.graphs.items())), COUNTS)
    assert drawn(geom.HeteroNeighborSampler(turned, [2, 2], seed=1)(everything)) == whole
    assert drawn(sampler(everything, epoch=1)) != whole


WEIGHTS = {
    relation: np.round(4 * np.random.default_rng(i).random(60)) / 4
    for i, relation in enumerate(RELATIONS[:2])
}


@pytest.mark.parametrize("replace", [False, True])
def test_edges_without_a_weight_are_not_drawn(replace):
    options = {"replace": replace, "seed": 1}
    sampler = geom.HeteroNeighborSampler(GRAPH, [3, -1], weight=WEIGHTS, **options)
    sample = sampler(SEEDS, epoch=4)
    plain = drawn(geom.HeteroNeighborSampler(GRAPH, [3, -1], **options)(SEEDS, epoch=4))[0]
    for hop, (found, fanout) in enumerate(zip(drawn(sample), (3, -1), strict=True)):
        for (relation, node), edges in found.items():
            weight = WEIGHTS.get(relation, np.ones(60))
            into = np.flatnonzero((PAIRS[relation][1] == node) & (weight > 0))
            assert set(edges) <= set(into.tolist())
            if fanout < 0:
                assert sorted(edges) == into.tolist()
            else:
                assert len(edges) == (fanout if replace else min(fanout, into.size))
        assert hop or {relation for relation, _ in found} == {r for r, _ in plain}
    # Weights of others change nothing.
    whole = drawn(sample)[0]
    for key, edges in plain.items():
        assert key[0] in WEIGHTS or whole[key] == edges


def test_edges_are_drawn_in_proportion_to_their_weights():
    relation = ("a", "r", "b")
    weight = np.array([1.0, 0.0, 3.0, 4.0])
    star = geom.Graph.from_edges(np.arange(4), np.zeros(4, int), n_src=4, n_dst=1)
    graph = geom.HeteroGraph({relation: star}, {"a": 4, "b": 1})
    for options in ({"replace": True}, {}):
        sampler = geom.HeteroNeighborSampler(graph, [1], weight={relation: weight}, **options)
        counts = np.zeros(4)
        for epoch in range(2000):
            counts[sampler({"b": np.array([0])}, epoch=epoch).edge_ids[0][relation]] += 1
        share = weight / weight.sum()
        assert np.all(np.abs(counts - 2000 * share) <= 6 * np.sqrt(2000 * share * (1 - share)))


def test_layers_on_whole_neighbourhoods_give_what_the_whole_graph_gives():
    rng = np.random.default_rng(2)
    x = {kind: rng.normal(size=(n, 4)) for kind, n in COUNTS.items()}

    def sums(graph, x):
        return graph @ (x[0] if isinstance(x, tuple) else x)

    def add_up(graph, x):
        layer = geom.HeteroConv(dict.fromkeys(RELATIONS, sums))
        return x | {kind: x[kind] + out for kind, out in layer(graph, x).items()}

    want = add_up(GRAPH, add_up(GRAPH, x))
    sample = geom.HeteroNeighborSampler(GRAPH, [-1, -1])(SEEDS)
    got = {kind: x[kind][nodes] for kind, nodes in sample.nodes.items()}
    for graph in sample.graphs:
        got = add_up(graph, {kind: rows[: graph.n_nodes[kind]] for kind, rows in got.items()})
    for kind, seeds in SEEDS.items():
        assert_close(got[kind][: len(seeds)], want[kind][seeds])


def test_only_some_relations():
    sampler = geom.HeteroNeighborSampler(GRAPH, {RELATIONS[0]: [2], RELATIONS[3]: [-1]})
    sample = sampler(SEEDS)
    assert set(sample.graphs[0].graphs) == {RELATIONS[0], RELATIONS[3]}
    assert sample.nodes["paper"].tolist() == [4, 14, 4, 0]
    none = sampler({})
    assert all(nodes.shape == (0,) for nodes in none.nodes.values())


def test_refuses():
    with pytest.raises(ValueError, match="fanout must be of relations of the graph"):
        geom.HeteroNeighborSampler(GRAPH, {("a", "b", "c"): [1]})
    with pytest.raises(ValueError, match=r"one number of hops, got \[1, 2\]"):
        geom.HeteroNeighborSampler(GRAPH, {RELATIONS[0]: [1], RELATIONS[1]: [1, 2]})
    with pytest.raises(ValueError, match="weight must be of relations of the graph"):
        geom.HeteroNeighborSampler(GRAPH, [1], weight={("a", "b", "c"): np.ones(1)})
    with pytest.raises(TypeError, match="weight must be a mapping of relations, got ndarray"):
        geom.HeteroNeighborSampler(GRAPH, [1], weight=np.ones(60))
    for weight, message in (
        (np.ones(3), r"must have shape \(60,\), one an edge, got \(3,\)"),
        (-np.ones(60), "must be finite and not negative"),
    ):
        with pytest.raises(
            ValueError, match=r"weight\[\('author', 'writes', 'paper'\)\] " + message
        ):
            geom.HeteroNeighborSampler(GRAPH, [1], weight={RELATIONS[0]: weight})
    sampler = geom.HeteroNeighborSampler(GRAPH, [1])
    with pytest.raises(ValueError, match="seeds must be of author, paper, venue"):
        sampler({"city": np.array([0])})
    with pytest.raises(IndexError, match=r"seeds\['venue'\] must lie in \[0, 3\)"):
        sampler({"venue": np.array([3])})


@pytest.mark.parametrize("size", [1, 4, 50])
@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True}, {"fanout": {RELATIONS[2]: [2, 2]}}, {"weight": WEIGHTS}],
    ids=["plain", "replace", "fanout", "weight"],
)
def test_bulk_gives_what_batches_give(options, size):
    fanout = options.get("fanout", [3, 2])
    options = {name: value for name, value in options.items() if name != "fanout"}
    sampler = geom.HeteroNeighborSampler(GRAPH, fanout, seed=1, **options)
    seeds = np.array([4, 14, 4, 0, 1, 2, 9, 11, 3])
    found = sampler.bulk("paper", seeds, size, epoch=2)
    assert len(found) == -(-len(seeds) // size)
    for i, got in enumerate(found):
        want = sampler({"paper": seeds[i * size : (i + 1) * size]}, epoch=2)
        assert got.n_seeds == want.n_seeds
        for kind in COUNTS:
            assert_close(got.nodes[kind], want.nodes[kind], exact=True)
        for a, b in zip(got.graphs, want.graphs, strict=True):
            assert a.n_nodes == b.n_nodes
            for relation in a.graphs:
                assert_close(a[relation].indptr, b[relation].indptr, exact=True)
                assert_close(a[relation].indices, b[relation].indices, exact=True)
        for a, b in zip(got.edge_ids, want.edge_ids, strict=True):
            assert all(np.array_equal(a[relation], b[relation]) for relation in b)
    assert sampler.bulk("paper", seeds[:0], size) == []
    with pytest.raises(ValueError, match="kind must be of author, paper, venue, got 'film'"):
        sampler.bulk("film", seeds, size)
