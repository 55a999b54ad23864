"""Sampling of what came before each seed's moment."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close

rng = np.random.default_rng(6)
SRC, DST, TIME = *rng.integers(0, 18, (2, 150)), rng.integers(0, 40, 150)
GRAPH = geom.Graph.from_edges(SRC, DST, n_nodes=20, edges={"time": TIME})
SEEDS, MOMENTS = np.array([3, 0, 3, 19, 7, 3]), np.array([20, 35, 5, 99, -1, 20])


def trees(sample):
    """Give for each seed, hop by hop, the edges that were drawn."""
    found = [[] for _ in range(sample.n_seeds)]
    for graph, ids in zip(sample.graphs[::-1], sample.edge_ids[::-1], strict=True):
        for owner, tree in enumerate(found):
            tree.append(sorted(ids[sample.owners[graph.dst] == owner].tolist()))
    return found


def check(sample, inclusive=False):
    assert_close(sample.nodes[: sample.n_seeds], SEEDS, exact=True)
    assert_close(sample.owners[: sample.n_seeds], np.arange(6), exact=True)
    outer = sample.graphs[0].n_src
    assert (len(sample.nodes), len(sample.owners)) == (outer, outer)
    pairs = set(zip(sample.nodes.tolist(), sample.owners.tolist(), strict=True))
    assert len(pairs) == outer  # a node once for each seed
    for graph, ids in zip(sample.graphs, sample.edge_ids, strict=True):
        assert graph.n_src == outer
        outer = graph.n_dst
        assert_close(sample.nodes[graph.src], SRC[ids], exact=True)
        assert_close(sample.nodes[graph.dst], DST[ids], exact=True)
        assert_close(sample.owners[graph.src], sample.owners[graph.dst], exact=True)
        moments = MOMENTS[sample.owners[graph.dst]]
        assert np.all(TIME[ids] <= moments if inclusive else TIME[ids] < moments)


@pytest.mark.parametrize("inclusive", [False, True])
def test_all_edges_from_before_are_those_of_a_search(inclusive):
    sample = geom.TemporalSampler(GRAPH, [-1, -1], inclusive=inclusive)(SEEDS, MOMENTS)
    check(sample, inclusive)
    for seed, moment, tree in zip(SEEDS, MOMENTS, trees(sample), strict=True):
        early = moment >= TIME if inclusive else moment > TIME
        nodes = {int(seed)}
        for edges in tree:
            want = np.flatnonzero(early & np.isin(DST, list(nodes)))
            assert edges == want.tolist()
            nodes |= set(SRC[want].tolist())


@pytest.mark.parametrize("replace", [False, True])
def test_draws_are_from_before_and_of_the_node_alone(replace):
    sampler = geom.TemporalSampler(GRAPH, [3, 2], time=TIME, replace=replace, seed=4)
    sample = sampler(SEEDS, MOMENTS, epoch=2)
    check(sample)
    whole = trees(sample)
    assert whole[0] == whole[5] != whole[2]
    order = np.array([4, 2, 0])
    assert trees(sampler(SEEDS[order], MOMENTS[order], epoch=2)) == [whole[i] for i in order]
    for graph in sample.graphs:
        degrees = graph.in_degrees[graph.in_degrees > 0]
        assert degrees.size
        assert degrees.max() <= 3
    if not replace:
        assert all(len(set(hop)) == len(hop) for tree in whole for hop in tree)


def test_draws_are_equally_likely():
    leaves = geom.Graph.from_edges(np.arange(1, 9), np.zeros(8, int), n_nodes=9)
    sampler = geom.TemporalSampler(leaves, [2], time=np.arange(8.0)[::-1])
    counts = np.zeros(8)
    for epoch in range(2000):
        counts[sampler(np.array([0]), np.array([5.0]), epoch=epoch).edge_ids[0]] += 1
    assert counts[:3].tolist() == [0, 0, 0]
    assert np.all(np.abs(counts[3:] - 800) < 6 * np.sqrt(2000 * 0.4 * 0.6))


WEIGHT = np.round(4 * np.random.default_rng(3).random(150)) / 4


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_edges_without_a_weight_are_not_drawn(replace, inclusive):
    options = {"replace": replace, "inclusive": inclusive, "weight": WEIGHT, "seed": 4}
    sample = geom.TemporalSampler(GRAPH, [3, -1], **options)(SEEDS, MOMENTS, epoch=2)
    check(sample, inclusive)
    moments = MOMENTS[:, None]
    early = moments >= TIME if inclusive else moments > TIME
    for graph, ids, fanout in zip(sample.graphs, sample.edge_ids, (-1, 3), strict=True):
        assert np.all(WEIGHT[ids] > 0)
        for place in range(graph.n_dst):
            node, owner = sample.nodes[place], sample.owners[place]
            most = np.count_nonzero(early[owner] & (node == DST) & (WEIGHT > 0))
            want = most if fanout < 0 else (fanout if most and replace else min(fanout, most))
            assert graph.in_degrees[place] == want
            if not replace:
                assert np.unique(ids[graph.dst == place]).size == want


def test_draws_are_in_proportion_to_weights():
    """The edges of before 5 have the weights 1, 0, 3 and 4 and come neither first nor last."""
    leaves = geom.Graph.from_edges(np.arange(1, 9), np.zeros(8, int), n_nodes=9)
    time, weight = np.array([7.0, 2, 9, 4, 1, 8, 3, 6]), np.array([9.0, 1, 9, 0, 3, 9, 4, 9])
    share = np.where(time < 5, weight, 0) / 8
    for options in ({"replace": True}, {}):
        sampler = geom.TemporalSampler(leaves, [1], time=time, weight=weight, **options)
        counts = np.zeros(8)
        for epoch in range(2000):
            counts[sampler(np.array([0]), np.array([5.0]), epoch=epoch).edge_ids[0]] += 1
        assert np.all(np.abs(counts - 2000 * share) <= 6 * np.sqrt(2000 * share * (1 - share)))


@pytest.mark.parametrize("fanout", [[-1], [3, 2], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 9])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["", "weighted"])
def test_bulk_gives_what_batches_give(size, fanout, weight):
    sampler = geom.TemporalSampler(GRAPH, fanout, weight=weight, seed=4)
    found = sampler.bulk(SEEDS, MOMENTS, size, epoch=2)
    assert len(found) == -(-len(SEEDS) // size)
    for i, got in enumerate(found):
        part = slice(i * size, (i + 1) * size)
        want = sampler(SEEDS[part], MOMENTS[part], epoch=2)
        assert got.n_seeds == want.n_seeds
        for name in ("nodes", "owners"):
            assert_close(getattr(got, name), getattr(want, name), exact=True)
        for a, b in zip(got.graphs, want.graphs, strict=True):
            assert (a.n_src, a.n_dst) == (b.n_src, b.n_dst)
            assert_close(a.src, b.src, exact=True)
            assert_close(a.dst, b.dst, exact=True)
        for a, b in zip(got.edge_ids, want.edge_ids, strict=True):
            assert_close(a, b, exact=True)
    assert sampler.bulk(SEEDS[:0], MOMENTS[:0], size) == []


def test_nothing_before():
    sample = geom.TemporalSampler(GRAPH, [4, 4])(np.array([7]), np.array([-1]))
    assert sample.nodes.tolist() == [7]
    none = geom.TemporalSampler(GRAPH, [4])(np.zeros(0, int), np.zeros(0, int))
    assert none.nodes.shape == (0,)
    empty = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=2)
    assert geom.TemporalSampler(empty, [1], time=np.zeros(0))(
        np.array([1]), np.array([3.0])
    ).nodes.tolist() == [1]


def test_refuses():
    with pytest.raises(ValueError, match=r"time must name an array of edges \(time\), got 'when'"):
        geom.TemporalSampler(GRAPH, [1], time="when")
    with pytest.raises(ValueError, match="time must name an array of edges .none: the graph's"):
        geom.TemporalSampler(GRAPH.replace(edges={}), [1])
    with pytest.raises(ValueError, match=r"time must have shape \(150,\)"):
        geom.TemporalSampler(GRAPH, [1], time=TIME[:3])
    with pytest.raises(ValueError, match=r"weight must have shape \(150,\), one an edge"):
        geom.TemporalSampler(GRAPH, [1], weight=WEIGHT[:3])
    with pytest.raises(ValueError, match="weight must be finite and not negative"):
        geom.TemporalSampler(GRAPH, [1], weight=-np.ones(150))
    with pytest.raises(TypeError, match="weight must hold real numbers, got complex128"):
        geom.TemporalSampler(GRAPH, [1], weight=np.full(150, 1j))
    with pytest.raises(ValueError, match="time must not be NaN"):
        geom.TemporalSampler(GRAPH, [1], time=np.full(150, np.nan))
    with pytest.raises(ValueError, match=r"times must have shape \(1,\)"):
        geom.TemporalSampler(GRAPH, [1])(np.array([1]), np.zeros(2))
