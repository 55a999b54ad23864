"""Parts of a graph to train on, links to predict, and loaders of neighbourhoods."""

import itertools

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close


def random_graph(n_nodes=30, n_edges=120, seed=0):
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, n_nodes - 2, (2, n_edges))
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes)


def assert_induced(graph, part):
    inner = part.graphs[0]
    inside = np.isin(graph.src, part.nodes) & np.isin(graph.dst, part.nodes)
    assert_close(np.sort(part.edge_ids[0]), np.flatnonzero(inside), exact=True)
    assert_close(part.nodes[inner.src], graph.src[part.edge_ids[0]], exact=True)
    assert_close(part.nodes[inner.dst], graph.dst[part.edge_ids[0]], exact=True)


@pytest.mark.parametrize("method", ["node", "edge", "walk"])
def test_saint_gives_induced_parts_again(method):
    graph = random_graph()
    sampler = geom.SaintSampler(graph, 6, method=method, length=3, seed=5)
    parts = [sampler(i, epoch=e) for e in range(2) for i in range(3)]
    for part in parts:
        assert_induced(graph, part)
        assert np.all(np.diff(part.nodes) > 0)
    assert len({tuple(part.nodes) for part in parts}) == 6
    same = geom.SaintSampler(graph, 6, method=method, length=3, seed=5)(2, epoch=1)
    assert_close(same.nodes, parts[-1].nodes, exact=True)


def test_saint_draws_edges_in_proportion():
    """1 / deg(u) + 1 / deg(v): of a path of three nodes 3/2 and 2... by hand below."""
    # In-degrees 0, 1, 1, 1 count as 1 each, but two edges end at node 3.
    graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 3, 3]), n_nodes=4)
    sampler = geom.SaintSampler(graph, 1, method="edge", seed=1)
    drawn = [tuple(sampler(i).nodes) for i in range(6000)]
    for edge, weight in {(0, 1): 2.0, (1, 3): 1.5, (2, 3): 1.5}.items():
        chance = weight / 5
        assert abs(drawn.count(edge) - 6000 * chance) < 6 * np.sqrt(6000 * chance * (1 - chance))


def test_saint_draws_nodes_in_proportion():
    """Node 1 is half of one mean and all of another: 1/4 + 1 against 1/4 of node 0."""
    graph = geom.Graph.from_edges(np.array([0, 1, 1]), np.array([2, 2, 0]), n_nodes=3)
    sampler = geom.SaintSampler(graph, 1, method="node", seed=1)
    drawn = np.array([sampler(i).nodes[0] for i in range(4000)])
    assert abs(np.count_nonzero(drawn == 1) - 4000 * 5 / 6) < 6 * np.sqrt(4000 * 5 / 36)
    assert np.all(drawn < 2)


@pytest.mark.parametrize("method", ["edge", "walk"])
def test_saint_is_unbiased_with_its_weights(method):
    """Section 3.2 of the paper: for each node and edge the weight times its chance."""
    graph = random_graph(12, 60)
    sampler = geom.SaintSampler(graph, 4, method=method, seed=3)
    nodes, edges = sampler.estimate_weights(3000)
    met, used = np.zeros(12), np.zeros(60)
    for i in range(3000):
        part = sampler(i, epoch=1)
        met[part.nodes] += 1
        used[part.edge_ids[0]] += 1
    seen = nodes > 0
    # Both counts vary by a share of about 1 / sqrt(count).
    tolerance = 8 / np.sqrt(np.maximum(met[seen], 1))
    assert np.all(np.abs(12 * nodes[seen] * met[seen] / 3000 - 1) < tolerance)
    kept = used > 0
    share = edges[kept] * used[kept] / met[graph.dst[kept]]
    assert np.all(np.abs(share - 1) < 8 / np.sqrt(used[kept]))


def test_partition_finds_cliques():
    """Four cliques of five nodes, one edge from each to the next."""
    pairs = [
        (a, b) for c in range(4) for a, b in itertools.permutations(range(5 * c, 5 * c + 5), 2)
    ]
    pairs += [(5 * c, (5 * c + 5) % 20) for c in range(4)]
    order = np.random.default_rng(1).permutation(20)
    src, dst = order[np.array(pairs).T]
    graph = geom.Graph.from_edges(src, dst, n_nodes=20)
    parts = geom.partition(graph, 4)
    assert_close(np.bincount(parts), np.full(4, 5), exact=True)
    assert np.count_nonzero(parts[src] != parts[dst]) == 4
    assert_close(geom.partition(graph, 4), parts, exact=True)


@pytest.mark.parametrize("n_parts", [1, 3, 7, 30, 50])
def test_parts_have_about_one_size(n_parts):
    parts = geom.partition(random_graph(), n_parts)
    assert np.bincount(parts, minlength=n_parts).max() <= np.ceil(33 / n_parts)
    assert parts.min() >= 0
    assert parts.max() < n_parts


def test_clusters_have_each_node_once_an_epoch():
    graph = random_graph()
    sampler = geom.ClusterSampler(graph, 6, n_together=4, seed=2)
    assert len(sampler) == 2
    for epoch in range(2):
        batches = [sampler(i, epoch=epoch) for i in range(2)]
        assert_close(np.sort(np.concatenate([b.nodes for b in batches])), np.arange(30), exact=True)
        for batch in batches:
            assert_induced(graph, batch)
    assert not np.array_equal(sampler(0).nodes, sampler(0, epoch=1).nodes)
    given = geom.ClusterSampler(graph, np.arange(30) % 2)
    assert {tuple(given(i).nodes % 2) for i in range(2)} == {(0,) * 15, (1,) * 15}
    with pytest.raises(ValueError, match="part of each of 30 nodes"):
        geom.ClusterSampler(graph, np.zeros(4, int))


# ------------------------------------------------------------------------------------ links


def test_negatives_are_no_edges_and_equally_likely():
    graph = geom.Graph.from_edges(np.array([2, 2, 2, 0]), np.array([0, 5, 5, 1]), n_nodes=7)
    edges = np.zeros(1, int)
    drawn = geom.negative_destinations(graph, edges, 8000, seed=1)[0]
    counts = np.bincount(drawn, minlength=7)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert np.all(np.abs(counts[[1, 3, 4, 6]] - 2000) < 6 * np.sqrt(1500))


def test_negatives_follow_from_the_edge():
    graph = random_graph()
    whole = geom.negative_destinations(graph, np.arange(120), 3, seed=4, epoch=2)
    some = np.array([7, 90, 7])
    got = geom.negative_destinations(graph, some, 3, seed=4, epoch=2)
    assert_close(got, whole[some], exact=True)
    assert not np.array_equal(geom.negative_destinations(graph, some, 3, seed=4), got)


def test_links_come_with_their_neighbourhoods():
    graph = random_graph()
    hidden = geom.Graph.from_edges(graph.src[20:], graph.dst[20:], n_nodes=30)
    sampler = geom.LinkSampler(geom.NeighborSampler(hidden, [3, 2]), n_negatives=2, graph=graph)
    edges = np.array([3, 11, 3])
    batch = sampler(edges, epoch=1)
    seeds = batch.sample.seeds
    assert len(set(seeds)) == len(seeds)
    src, dst = seeds[batch.src], seeds[batch.dst]
    assert batch.labels.tolist() == [1.0] * 3 + [0.0] * 6
    assert_close(
        src, np.concatenate([graph.src[edges], np.repeat(graph.src[edges], 2)]), exact=True
    )
    assert_close(dst[:3], graph.dst[edges], exact=True)
    known = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert not known & set(zip(src[3:].tolist(), dst[3:].tolist(), strict=True))
    assert np.all(src[3:] != dst[3:])
    assert [g.n_dst for g in batch.sample.graphs][-1] == len(seeds)


@pytest.mark.parametrize("n_negatives", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_links_in_bulk_are_those_of_each_batch(size, n_negatives):
    graph = random_graph()
    sampler = geom.LinkSampler(geom.NeighborSampler(graph, [3, 2]), n_negatives=n_negatives)
    edges = np.arange(graph.n_edges - 1, 0, -3)
    found = sampler.bulk(edges, size, epoch=2)
    assert len(found) == -(-len(edges) // size)
    for i, got in enumerate(found):
        want = sampler(edges[i * size : (i + 1) * size], epoch=2)
        for name in ("src", "dst", "labels"):
            assert_close(getattr(got, name), getattr(want, name), exact=True)
        assert got.sample.n_seeds == want.sample.n_seeds
        assert_close(got.sample.nodes, want.sample.nodes, exact=True)
        for a, b in zip(got.sample.edge_ids, want.sample.edge_ids, strict=True):
            assert_close(a, b, exact=True)
    assert sampler.bulk(edges[:0], size) == []


def test_links_refuse_nodes_with_edges_to_all():
    graph = geom.Graph.from_edges(np.array([0, 1, 1]), np.array([1, 0, 2]), n_nodes=3)
    assert geom.negative_destinations(graph, np.array([0])).tolist() == [[2]]
    with pytest.raises(ValueError, match="node 1 has edges to all"):
        geom.negative_destinations(graph, np.array([0, 1]))
    sampler = geom.LinkSampler(geom.NeighborSampler(graph, [1]))
    with pytest.raises(IndexError, match=r"edges must lie in \[0, 3\)"):
        sampler(np.array([3]))
    empty = sampler(np.zeros(0, int))
    assert empty.labels.shape == (0,)
    assert empty.sample.nodes.shape == (0,)


# ----------------------------------------------------------------------------------- loaders


def make_loader(graph=None, prefetch=2, **options):
    graph = random_graph() if graph is None else graph
    x, y = np.arange(60.0).reshape(30, 2), np.arange(30)
    sampler = geom.NeighborSampler(graph, [3, 2], seed=7)
    return geom.NeighborLoader(
        sampler, np.arange(25), 8, nodes={"x": x}, targets={"y": y}, prefetch=prefetch, **options
    )


def test_loaders_gather_what_belongs_to_the_nodes():
    met = []
    loader = make_loader()
    assert len(loader) == 4
    for sample, arrays in loader:
        assert_close(arrays["x"][:, 0], 2.0 * sample.nodes, exact=True)
        assert_close(arrays["y"], sample.seeds, exact=True)
        met += sample.seeds.tolist()
    assert sorted(met) == list(range(25))
    assert met != sorted(met)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_loaders_go_on_where_they_were(prefetch):
    first, second = make_loader(prefetch=prefetch), make_loader(pin=True, bulk=3)
    want = [sample for _ in range(2) for sample, _ in first]
    for i, (sample, _) in enumerate(second):
        assert_close(sample.nodes, want[i].nodes, exact=True)
        if i == 1:
            break
    third = make_loader(prefetch=prefetch)
    third.load_state_dict(second.state_dict())
    got = [sample for _ in range(2) for sample, _ in third]
    for a, b in zip(want[2:], got, strict=True):
        assert_close(a.nodes, b.nodes, exact=True)
        assert_close(a.edge_ids[0], b.edge_ids[0], exact=True)
    epochs = [{int(n) for s in part for n in s.seeds} for part in (want[:4], want[4:])]
    assert epochs[0] == epochs[1]
    assert not np.array_equal(want[0].nodes, want[4].nodes)


def test_loaders_take_the_graphs_own_arrays_and_masks():
    graph = random_graph().replace(nodes={"x": np.arange(30.0)})
    mask = np.arange(30) % 2 == 0
    sampler = geom.NeighborSampler(graph, [2])
    for sample, arrays in geom.NeighborLoader(sampler, mask, 4, shuffle=False):
        assert_close(arrays["x"], sample.nodes.astype(float), exact=True)
        assert np.all(sample.seeds % 2 == 0)
    with pytest.raises(
        ValueError, match=r"nodes\['x'\] must be an array with a row for each of 30"
    ):
        geom.NeighborLoader(sampler, mask, 4, nodes={"x": np.zeros(3)})
    with pytest.raises(ValueError, match="entry for each of 30 nodes"):
        geom.NeighborLoader(sampler, mask[:4], 4)
    with pytest.raises(ValueError, match="different names, got"):
        geom.NeighborLoader(sampler, mask, 4, targets={"x": np.zeros(30)})
