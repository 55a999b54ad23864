"""Samplers: what they may draw, how often, and that nothing but the node decides it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close


def random_graph(n_nodes=40, n_edges=300, seed=0):
    """Give a multigraph with loops, a hub and isolated nodes, its edges in no order."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, n_nodes - 2, n_edges)
    dst = np.where(rng.random(n_edges) < 0.3, 1, rng.integers(0, n_nodes - 2, n_edges))
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes)


def star(n_leaves):
    return geom.Graph.from_edges(
        np.arange(1, n_leaves + 1), np.zeros(n_leaves, np.int64), n_nodes=n_leaves + 1
    )


SAMPLERS = {
    "uniform": lambda graph, **kw: geom.NeighborSampler(graph, [4, 3], **kw),
    "again": lambda graph, **kw: geom.NeighborSampler(graph, [4, 3], replace=True, **kw),
    "weighted": lambda graph, **kw: geom.NeighborSampler(
        graph, [4, 3], weight=1.0 + np.arange(graph.n_edges), **kw
    ),
    "weighted-again": lambda graph, **kw: geom.NeighborSampler(
        graph, [4, 3], weight=1.0 + np.arange(graph.n_edges), replace=True, **kw
    ),
    "all": lambda graph, **kw: geom.NeighborSampler(graph, [-1, -1], **kw),
    "labor": lambda graph, **kw: geom.LaborSampler(graph, [4, 3], **kw),
}


@pytest.fixture(params=SAMPLERS)
def make(request):
    return SAMPLERS[request.param]


def drawn(sample):
    """Give, for each hop from the seeds on, the edges drawn at each node."""
    found = []
    for graph, ids in zip(sample.graphs[::-1], sample.edge_ids[::-1], strict=True):
        hop = {}
        for i in range(graph.n_dst):
            hop[int(sample.nodes[i])] = ids[graph.indptr[i] : graph.indptr[i + 1]].tolist()
        found.append(hop)
    return found


def test_blocks_hold_edges_of_the_graph(make):
    graph = random_graph()
    seeds = np.array([1, 39, 7, 7, 0])
    sample = make(graph, seed=3)(seeds)
    assert_close(sample.seeds, seeds, exact=True)
    assert len(sample.graphs) == 2
    outer, inner = sample.graphs
    assert (inner.n_dst, inner.n_src, outer.n_src) == (5, outer.n_dst, len(sample.nodes))
    for block, ids in zip(sample.graphs, sample.edge_ids, strict=True):
        assert_close(sample.nodes[block.src], graph.src[ids], exact=True)
        assert_close(sample.nodes[block.dst], graph.dst[ids], exact=True)
    others = sample.nodes[len(seeds) :]
    assert len(set(others)) == len(others)
    assert not set(others) & set(seeds)


def test_edge_numbers_hold_for_edges_in_any_order():
    """PyG PR 7953: numbers of edges were wrong when the edges were not sorted."""
    graph = geom.Graph.from_edges(np.array([2, 0, 1]), np.array([1, 2, 0]), n_nodes=3)
    sample = geom.NeighborSampler(graph, [1])(np.array([2, 0]))
    assert sample.edge_ids[0].tolist() == [1, 2]


def test_seeds_come_first_and_twice():
    """PyG 9924 and 10144: seeds were not the first nodes of a batch."""
    seeds = np.array([5, 2, 5], dtype=np.int32)
    sample = geom.NeighborSampler(random_graph(), [2, 2])(seeds)
    assert sample.nodes[:3].tolist() == [5, 2, 5]
    assert sample.nodes.dtype == np.int64


def test_isolated_seeds_stay():
    """cugraph 4326: nodes without edges vanished."""
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    sample = geom.NeighborSampler(graph, [5])(np.array([2]))
    assert sample.nodes.tolist() == [2]
    assert (sample.graphs[0].n_dst, sample.graphs[0].n_edges) == (1, 0)
    assert_close(sample.graphs[0] @ np.ones((1, 2)), np.zeros((1, 2)), exact=True)


def test_a_nodes_sample_does_not_depend_on_its_batch(make):
    """pyg-lib 527, dgl 1110 and 5099, cugraph 2761: the same seed gave different samples."""
    graph = random_graph()
    sampler = make(graph, seed=1)
    nodes = np.arange(40)
    whole = drawn(sampler(nodes, epoch=2))
    turned = drawn(make(graph, seed=1)(nodes[::-1], epoch=2))
    assert whole == turned
    for batch in sampler.bulk(nodes, 7, epoch=2):
        for hop, want in zip(drawn(batch), whole, strict=True):
            assert hop.items() <= want.items()


def test_bulk_gives_what_batches_give(make):
    graph = random_graph()
    sampler = make(graph, seed=1)
    seeds = np.random.default_rng(0).integers(0, 40, 50)
    many = sampler.bulk(seeds, 16, epoch=1)
    assert [s.n_seeds for s in many] == [16, 16, 16, 2]
    for i, one in enumerate(many):
        alone = sampler(seeds[16 * i : 16 * i + 16], epoch=1)
        assert_close(one.nodes, alone.nodes, exact=True)
        for a, b in zip(one.graphs, alone.graphs, strict=True):
            assert_close(a.indptr, b.indptr, exact=True)
            assert_close(a.indices, b.indices, exact=True)
        for a, b in zip(one.edge_ids, alone.edge_ids, strict=True):
            assert_close(a, b, exact=True)
    assert sampler.bulk(seeds[:0], 4) == []


def test_workers_draw_the_same(make):
    """pyg-lib 527: results differed with the number of threads."""
    sampler, batches = make(random_graph(), seed=1), np.arange(40).reshape(8, 5)
    alone = [drawn(sampler(batch)) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda batch: drawn(sampler(batch)), batches)) == alone


@pytest.mark.skip_xp("dask.array", reason="a graph looks at its edges")
def test_takes_arrays_of_any_library(xp):
    graph = random_graph()
    other = geom.Graph.from_edges(xp.asarray(graph.src), xp.asarray(graph.dst), n_nodes=40)
    seeds = np.array([1, 5, 1])
    for options in ({}, {"weight": np.arange(300.0)}):
        want = geom.NeighborSampler(graph, [3, 2], **options)(seeds)
        options = {name: xp.asarray(x) for name, x in options.items()}
        got = geom.NeighborSampler(other, [3, 2], **options)(xp.asarray(seeds))
        assert_close(got.nodes, want.nodes, exact=True)
        for a, b in zip(got.edge_ids, want.edge_ids, strict=True):
            assert_close(a, b, exact=True)


def test_epochs_hops_and_seeds_draw_anew():
    graph = star(500)
    sampler = geom.NeighborSampler(graph, [20], seed=1)
    sets = [
        sampler(np.array([0])).edge_ids[0],
        sampler(np.array([0]), epoch=1).edge_ids[0],
        geom.NeighborSampler(graph, [20], seed=2)(np.array([0])).edge_ids[0],
    ]
    assert len({tuple(x) for x in sets}) == 3


@pytest.mark.parametrize("weight", [None, "ones"])
def test_enough_edges_keep_all_once(weight):
    graph = random_graph()
    weight = np.ones(300) if weight else None
    for fanout in (-1, 300):
        sample = geom.NeighborSampler(graph, [fanout], weight=weight)(np.arange(40))
        assert_close(np.sort(sample.edge_ids[0]), np.arange(300), exact=True)


def test_fewer_edges_are_different_ones():
    graph = random_graph()
    for weight in (None, np.ones(300)):
        sample = geom.NeighborSampler(graph, [3], weight=weight)(np.arange(40))
        assert_close(sample.graphs[0].in_degrees, np.minimum(graph.in_degrees, 3), exact=True)
        assert len(set(sample.edge_ids[0])) == sample.edge_ids[0].size


def test_with_replacement_there_are_as_many_as_asked():
    graph = random_graph()
    sample = geom.NeighborSampler(graph, [50], replace=True)(np.arange(40))
    wanted = np.where(graph.in_degrees > 0, 50, 0)
    assert_close(sample.graphs[0].in_degrees, wanted, exact=True)


def frequencies(sampler, n_edges, n_epochs, pairs=False):
    """Count how often each edge, or each pair of edges, is drawn at node 0."""
    counts = np.zeros((n_edges,) * (2 if pairs else 1))
    for epoch in range(n_epochs):
        (ids,) = sampler(np.array([0]), epoch=epoch).edge_ids
        np.add.at(counts, tuple(np.sort(ids)) if pairs else ids, 1)
    return counts


def assert_likely(counts, chances, n):
    """Six standard deviations: once in 500 million, and the seeds are fixed."""
    spread = 6 * np.sqrt(n * chances * (1 - chances)) + 1e-9
    assert np.all(np.abs(counts - n * chances) <= spread), (counts, n * chances)


def test_pairs_are_equally_likely():
    counts = frequencies(geom.NeighborSampler(star(6), [2], seed=5), 6, 4000, pairs=True)
    chances = np.triu(np.full((6, 6), 1 / 15), 1)
    assert_likely(counts, chances, 4000)


def test_edges_are_equally_likely():
    counts = frequencies(geom.NeighborSampler(star(37), [11], seed=5), 37, 3000)
    assert_likely(counts, np.full(37, 11 / 37), 3000)


def test_draws_with_replacement_follow_the_weights():
    weight = np.array([1.0, 0.0, 2.0, 5.0, 0.5])
    sampler = geom.NeighborSampler(star(5), [10], replace=True, weight=weight, seed=5)
    assert_likely(frequencies(sampler, 5, 1000), weight / weight.sum(), 10_000)
    sampler = geom.NeighborSampler(star(5), [10], replace=True, seed=5)
    assert_likely(frequencies(sampler, 5, 1000), np.full(5, 0.2), 10_000)


def test_draws_without_replacement_follow_the_weights():
    """The chance of a pair: one first in proportion, then the other among the rest."""
    weight = np.array([1.0, 0.0, 2.0, 5.0, 0.5])
    p = weight / weight.sum()
    ordered = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(ordered, 0)
    sampler = geom.NeighborSampler(star(5), [2], weight=weight, seed=5)
    assert_likely(frequencies(sampler, 5, 4000, pairs=True), np.triu(ordered + ordered.T), 4000)


def test_edges_without_weight_are_not_drawn():
    weight = np.array([1.0, 0.0, 0.0, 3.0])
    for fanout in (-1, 3, 2):
        sampler = geom.NeighborSampler(star(4), [fanout], weight=weight)
        assert sampler(np.array([0])).edge_ids[0].tolist() == [0, 3]
    none = geom.NeighborSampler(star(4), [2], weight=np.zeros(4), replace=True)
    assert none(np.array([0])).graphs[0].n_edges == 0


def test_labor_keeps_what_was_asked_for_on_average_and_shares_it():
    """Two nodes with the same 50 neighbours keep the same ones."""
    src, dst = np.tile(np.arange(2, 52), 2), np.repeat([0, 1], 50)
    graph = geom.Graph.from_edges(src, dst, n_nodes=52)
    sampler, counts = geom.LaborSampler(graph, [10], seed=3), []
    for epoch in range(400):
        sample = sampler(np.array([0, 1]), epoch=epoch)
        (block,) = sample.graphs
        assert (
            block.indices[: block.indptr[1]].tolist() == block.indices[block.indptr[1] :].tolist()
        )
        counts.append(block.indptr[1])
    assert abs(np.mean(counts) - 10) < 6 * np.sqrt(50 * 0.2 * 0.8 / 400)


def test_induced_graphs_have_all_edges_between_the_nodes():
    graph = random_graph()
    seeds = np.array([4, 9, 4])
    sample = geom.NeighborSampler(graph, [3, 2], directional=False)(seeds)
    inner = sample.graphs[0]
    assert sample.graphs[1] is inner
    assert inner.n_nodes == len(sample.nodes)
    assert sample.seeds.tolist() == seeds.tolist()
    inside = np.isin(graph.src, sample.nodes) & np.isin(graph.dst, sample.nodes)
    assert_close(np.sort(sample.edge_ids[0]), np.flatnonzero(inside), exact=True)
    assert_close(sample.nodes[inner.src], graph.src[sample.edge_ids[0]], exact=True)
    assert_close(sample.nodes[inner.dst], graph.dst[sample.edge_ids[0]], exact=True)
    assert inner.in_degrees[2] == 0  # the edges of a seed are at its first place


def test_graphs_without_edges_or_seeds(make):
    empty = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=2)
    sample = make(empty)(np.array([1, 1]))
    assert sample.nodes.tolist() == [1, 1]
    assert [g.n_edges for g in sample.graphs] == [0, 0]
    sample = make(random_graph())(np.zeros(0, np.int64))
    assert sample.nodes.shape == (0,)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"fanout": 5}, TypeError, "fanout must be a sequence of ints"),
        ({"fanout": [5, -2]}, ValueError, r"fanout must lie in \[-1, .*got -2"),
        ({"fanout": [1.5]}, TypeError, "fanout must be an int, got 1.5"),
        ({"fanout": [1], "weight": np.ones(3)}, ValueError, r"weight must have shape \(4,\)"),
        ({"fanout": [1], "weight": -np.ones(4)}, ValueError, "finite and not negative"),
        ({"fanout": [1], "weight": np.full(4, np.nan)}, ValueError, "finite and not negative"),
        ({"fanout": [1], "weight": np.full(4, np.inf)}, ValueError, "finite and not negative"),
        ({"fanout": [1], "weight": np.full(4, 1e308)}, ValueError, "at most 4.49e[+]307"),
        ({"fanout": [1], "weight": np.full(4, 1j)}, TypeError, "real numbers, got complex128"),
        ({"fanout": [1], "weight": np.full(4, "1")}, TypeError, "real numbers, got <U1"),
        ({"fanout": [1], "seed": -1}, ValueError, "seed must lie in"),
    ],
)
def test_refuses_options(options, error, match):
    with pytest.raises(error, match=match):
        geom.NeighborSampler(star(4), **options)


def test_refuses_seeds_and_graphs():
    sampler = geom.NeighborSampler(star(4), [1])
    with pytest.raises(IndexError, match=r"seeds must lie in \[0, 5\)"):
        sampler(np.array([5]))
    with pytest.raises(TypeError, match="array of integers"):
        sampler(np.array([0.5]))
    with pytest.raises(TypeError, match="array of node numbers"):
        sampler([0])
    with pytest.raises(ValueError, match="same nodes"):
        geom.NeighborSampler(
            geom.Graph.from_edges(np.array([0]), np.array([0]), n_src=1, n_dst=2), [1]
        )


@pytest.mark.parametrize("directional", [True, False])
def test_layers_on_whole_neighbourhoods_give_what_the_whole_graph_gives(directional):
    graph = random_graph()
    x = np.random.default_rng(5).normal(size=(40, 4))
    layers = [geom.SAGEConv(4, 3, dtype="float64"), geom.SAGEConv(3, 2, dtype="float64")]
    want = x
    for layer in layers:
        want = layer(graph, want)
    seeds = np.array([1, 12, 39])
    sampler = geom.NeighborSampler(graph, [-1, -1], directional=directional)
    sample = sampler(seeds)
    got = x[sample.nodes]
    for layer, block in zip(layers, sample.graphs, strict=True):
        got = layer(block, got)
    assert_close(got.data[:3], want.data[seeds])
