"""Splits of nodes and links, and pairs without an edge."""

from collections import Counter

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.geom._splits import _Cells
from rtxarr.random import Generator
from rtxarr.testing import assert_close


def columns(pairs):
    return list(zip(*pairs.tolist(), strict=True))


# ---------------------------------------------------------------------------------------- nodes


def test_nodes_are_split_into_parts():
    train, val, test = geom.random_node_split(101, val=0.2, test=30, generator=Generator(0))
    assert (len(train), len(val), len(test)) == (51, 20, 30)
    assert sorted([*train, *val, *test]) == list(range(101))
    for part in (train, val, test):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    again = geom.random_node_split(101, val=0.2, test=30, generator=Generator(0))
    assert_close(again[0], train, exact=True)
    other = geom.random_node_split(101, val=0.2, test=30, generator=Generator(1))
    assert train.tolist() != other[0].tolist()
    assert [len(p) for p in geom.random_node_split(0, val=0.5, test=0.5)] == [0, 0, 0]


def test_as_many_of_each_class():
    labels = np.array([0] * 10 + [1] * 5 + [-1] * 4 + [2] * 7)
    train, val, test = geom.random_node_split(
        26, val=4, test=0.25, labels=labels, per_class=3, generator=Generator(3)
    )
    assert np.bincount(labels[train]).tolist() == [3, 3, 3]
    assert (len(val), len(test)) == (4, 6)  # 4 and a quarter of the 22 with a label, 9.5
    parts = np.concatenate([train, val, test])
    assert len(set(parts.tolist())) == len(parts)
    assert (labels[parts] >= 0).all()
    with pytest.raises(ValueError, match="no more than the smallest class has, got 6"):
        geom.random_node_split(26, val=0, test=0, labels=labels, per_class=6)


def test_bad_node_splits():
    with pytest.raises(ValueError, match="leave training some of 10 nodes, got 6 and 5"):
        geom.random_node_split(10, val=6, test=5)
    for part in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="val must be a count or a share"):
            geom.random_node_split(10, val=part, test=0)
    with pytest.raises(ValueError, match=r"labels must have shape \(10,\)"):
        geom.random_node_split(10, val=1, test=1, labels=np.zeros(9, int))
    with pytest.raises(ValueError, match="per_class needs labels"):
        geom.random_node_split(10, val=1, test=1, per_class=1)


# ------------------------------------------------------------------------------------ negatives


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("undirected", [False, True])
def test_all_pairs_without_an_edge_are_found(multigraph, undirected, loops):
    n = multigraph.n_nodes
    edges = set(zip(multigraph.src.tolist(), multigraph.dst.tolist(), strict=True))
    if undirected:
        edges |= {(d, s) for s, d in edges}
    wanted = [
        (s, d)
        for s in range(n)
        for d in range(n)
        if (s, d) not in edges and (loops or s != d) and (not undirected or s <= d)
    ]
    options = {"undirected": undirected, "loops": loops}
    drawn = geom.negative_sampling(multigraph, len(wanted), **options, generator=Generator(0))
    assert drawn.dtype == np.int64
    assert sorted(columns(drawn)) == wanted
    with pytest.raises(ValueError, match=f"n must be at most {len(wanted)}, the number of pairs"):
        geom.negative_sampling(multigraph, len(wanted) + 1, **options)


def test_pairs_of_a_bipartite_graph(random):
    graph = random(5, 9, n_dst=3)
    edges = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    drawn = columns(geom.negative_sampling(graph, 15 - len(edges)))
    assert sorted([*drawn, *edges]) == [(s, d) for s in range(5) for d in range(3)]
    with pytest.raises(ValueError, match="undirected pairs are of one kind"):
        geom.negative_sampling(graph, 1, undirected=True)


@pytest.mark.parametrize("n", [1, 2])
def test_pairs_are_equally_likely(random, n):
    graph = random(5, 6)
    free = len(geom.negative_sampling(graph, 1)[0]) and 20 - len(
        {(s, d) for s, d in zip(graph.src.tolist(), graph.dst.tolist(), strict=True) if s != d}
    )
    counts = Counter()
    generator = Generator(5)
    for _ in range(4000):
        counts.update(columns(geom.negative_sampling(graph, n, generator=generator)))
    assert len(counts) == free
    expected = 4000 * n / free
    chi2 = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi2 < 60  # 99.99 % of chi-square with fewer than 20 degrees of freedom lie below 53


def test_few_pairs_of_many():
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=100_000)
    drawn = geom.negative_sampling(graph, 1000, generator=Generator(0))
    assert len(set(columns(drawn))) == 1000
    assert (drawn >= 0).all()
    assert (drawn < 100_000).all()
    assert (drawn[0] != drawn[1]).all()


@pytest.fixture
def hollow():
    """A graph of many nodes, made without an array of them."""

    def make(n):
        return type("Hollow", (), {"n_src": n, "n_dst": n, "is_square": True})()

    return make


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("n", [2, 3, 1000, 2**31, 3_000_000_000])
def test_numbers_of_pairs_are_exact(hollow, n, undirected, loops):
    cells = _Cells(hollow(n), undirected, loops)
    rng = np.random.default_rng(0)
    last = cells.n - 1
    keys = np.concatenate([[0, last], rng.integers(0, last, 200, endpoint=True)])
    if undirected:  # the first and last pair of a row
        d = rng.integers(1, n, 200)
        shift = 1 if loops else -1
        keys = np.concatenate([keys, d * (d + shift) // 2, d * (d + shift) // 2 - (d > 1)])
    src, dst = cells.pairs(keys)
    assert (src >= 0).all()
    assert (dst < n).all()
    assert (src < n).all()
    if undirected:
        assert (src <= dst).all()
    if not loops:
        assert (src != dst).all()
    again, is_pair = cells.keys(src, dst)
    assert is_pair.all()
    assert_close(again, keys, exact=True)


def test_more_pairs_than_64_bits_number(hollow):
    with pytest.raises(ValueError, match="cannot be numbered with 64 bits"):
        _Cells(hollow(4_000_000_000), False)


# ---------------------------------------------------------------------------------------- links


def loop_free(graph, undirected=False):
    pairs = zip(graph.src.tolist(), graph.dst.tolist(), strict=True)
    return {tuple(sorted(p)) if undirected else p for p in pairs if p[0] != p[1]}


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_links_are_split_into_parts(random, undirected, seed):
    graph = random(15, 60, seed)
    split = geom.random_link_split(
        graph, val=0.2, test=0.3, undirected=undirected, negatives=1.5, generator=Generator(seed)
    )
    edges = loop_free(graph, undirected)
    parts = [columns(p) for p in (split.train, split.val.positive, split.test.positive)]
    assert sorted(sum(parts, [])) == sorted(edges)
    n_val, n_test = len(parts[1]), len(parts[2])
    assert abs(n_val - 0.2 * len(edges)) <= 0.5
    assert abs(n_val + n_test - 0.5 * len(edges)) <= 0.5
    assert loop_free(split.graph, undirected) == set(parts[0])
    negative = columns(split.val.negative) + columns(split.test.negative)
    assert abs(split.val.negative.shape[1] - 1.5 * n_val) <= 0.5
    assert abs(split.test.negative.shape[1] - 1.5 * n_test) <= 0.5
    assert len(set(negative)) == len(negative)
    assert not set(negative) & edges
    assert all(s != d for s, d in negative)


def test_several_edges_of_two_nodes_stay_together(random):
    """An edge whose twin is in training would be known before it is predicted."""
    graph = random(4, 40)
    split = geom.random_link_split(graph, val=0.3, test=0.3, negatives=0, generator=Generator(1))
    kept = split.graph.edges["number"]
    out = loop_free(graph) - set(columns(split.train))
    every = list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert kept.tolist() == [i for i, pair in enumerate(every) if pair not in out]
    assert any(every[i][0] == every[i][1] for i in kept)


def test_no_negative_pair_is_in_two_parts():
    """PyG#10706."""
    path = geom.Graph.from_edges(
        np.array([0, 1, 1, 2, 2, 3]), np.array([1, 0, 2, 1, 3, 2]), n_nodes=4
    )
    for seed in range(50):
        split = geom.random_link_split(
            path, val=0.4, test=0.4, undirected=True, generator=Generator(seed)
        )
        val, test = columns(split.val.negative), columns(split.test.negative)
        assert len(val) == len(test) == 1
        assert val != test
        assert {*val, *test} <= {(0, 2), (1, 3), (0, 3)}


def test_links_of_a_bipartite_graph(random):
    graph = random(6, 20, n_dst=9)
    split = geom.random_link_split(graph, val=3, test=4, generator=Generator(0))
    edges = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    parts = sum((columns(p) for p in (split.train, split.val.positive, split.test.positive)), [])
    assert sorted(parts) == sorted(edges)
    assert not edges & set(columns(split.test.negative))
    assert (split.graph.n_src, split.graph.n_dst) == (6, 9)


def test_links_of_small_graphs(multigraph):
    split = geom.random_link_split(multigraph, val=0.5, test=0.5, negatives=0)
    assert split.train.shape == (2, 0)
    assert (split.graph.src == split.graph.dst).all()
    assert split.graph.n_nodes == multigraph.n_nodes


def test_bad_link_splits(random):
    full = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=2)
    with pytest.raises(ValueError, match="n must be at most 0, the number of pairs without an"):
        geom.random_link_split(full, val=1, test=0)
    with pytest.raises(ValueError, match="val and test must be at most the 2 pairs, got 2 and 1"):
        geom.random_link_split(full, val=2, test=1)
    with pytest.raises(ValueError, match="negatives must be at least 0"):
        geom.random_link_split(full, val=1, test=0, negatives=-1)
    with pytest.raises(TypeError, match="generator must be an rtxarr.random.Generator, got int"):
        geom.negative_sampling(full, 0, generator=3)


@pytest.mark.gpu
def test_splits_on_a_gpu(random):
    graph = random(30, 200)
    options = {"val": 0.2, "test": 0.2, "undirected": True}
    here = geom.random_link_split(graph, **options, generator=Generator(3))
    there = geom.random_link_split(graph.to_device("cuda:0"), **options, generator=Generator(3))
    assert_close(there.train.get(), here.train, exact=True)
    assert_close(there.test.positive.get(), here.test.positive, exact=True)
    assert_close(there.test.negative.get(), here.test.negative, exact=True)
    assert_close(there.graph.src.get(), here.graph.src, exact=True)
