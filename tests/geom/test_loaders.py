"""Loaders over links, over several kinds of nodes, and over moments."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close

RNG = np.random.default_rng(0)
SRC, DST = RNG.integers(0, 30, 200), RNG.integers(0, 30, 200)
X, TIME = RNG.standard_normal((30, 2)), RNG.random(200)
GRAPH = geom.Graph.from_edges(SRC, DST, n_nodes=30, edges={"time": TIME})
RATES, CITES = ("user", "rates", "film"), ("film", "cites", "film")
HETERO = geom.HeteroGraph.from_edges(
    {
        RATES: (RNG.integers(0, 9, 40), RNG.integers(0, 20, 40)),
        CITES: (RNG.integers(0, 20, 30), RNG.integers(0, 20, 30)),
    },
    {"user": 9, "film": 20},
    nodes={"user": {"x": np.arange(9.0)}, "film": {"x": np.arange(20.0), "z": np.arange(20)}},
)


def links(bulk=1, **options):
    sampler = geom.LinkSampler(geom.NeighborSampler(GRAPH, [4, 2], seed=1), n_negatives=2)
    return geom.LinkLoader(
        sampler, np.arange(0, 200, 3), 16, nodes={"x": X}, links={"t": TIME}, bulk=bulk, **options
    )


@pytest.mark.parametrize("bulk", [1, 2, 30])
def test_links_come_with_the_nodes_around_their_ends(bulk):
    met = []
    loader = links(bulk, seed=3)
    assert len(loader) == 5
    for sample, arrays in loader:
        assert_close(arrays["x"], X[sample.sample.nodes], exact=True)
        n = int(sample.labels.sum())
        assert len(sample.labels) == 3 * n
        src, dst = sample.sample.nodes[sample.src[:n]], sample.sample.nodes[sample.dst[:n]]
        # By the time of an edge it is known which one it is.
        edges = [int(np.flatnonzero(t == TIME)[0]) for t in arrays["t"]]
        assert_close(src, SRC[edges], exact=True)
        assert_close(dst, DST[edges], exact=True)
        met += edges
    assert sorted(met) == list(range(0, 200, 3))
    assert met != sorted(met)


def test_link_loaders_go_on_where_they_were():
    first, second, third = links(), links(4), links(3, prefetch=0)
    want = [sample for _ in range(2) for sample, _ in first]
    for i, _ in enumerate(second):
        if i == 2:
            break
    third.load_state_dict(second.state_dict())
    for a, (b, _) in zip(want[3:], (batch for _ in range(2) for batch in third), strict=True):
        for name in ("src", "dst", "labels"):
            assert_close(getattr(a, name), getattr(b, name), exact=True)
        assert_close(a.sample.nodes, b.sample.nodes, exact=True)


def test_links_by_mask_and_the_graphs_own_arrays():
    graph = GRAPH.replace(nodes={"x": X})
    sampler = geom.LinkSampler(geom.NeighborSampler(graph, [2]))
    loader = geom.LinkLoader(sampler, TIME < 0.1, 5, shuffle=False)
    assert loader.n_samples == np.count_nonzero(TIME < 0.1)
    for sample, arrays in loader:
        assert_close(arrays["x"], X[sample.sample.nodes], exact=True)
    assert repr(loader).endswith(f"{loader.n_samples} edges, 5)")


@pytest.mark.parametrize("seeds", [np.arange(12), np.arange(20) < 12], ids=["numbers", "mask"])
def test_kinds_come_with_their_arrays(seeds):
    sampler = geom.HeteroNeighborSampler(HETERO, [3, 3], seed=2)
    loader = geom.HeteroNeighborLoader(
        sampler, "film", seeds, 5, targets={"y": np.arange(20) ** 2}, bulk=2
    )
    met = []
    for sample, arrays, targets in loader:
        assert set(arrays) == {"user", "film"}
        for kind in arrays:
            assert_close(arrays[kind]["x"], sample.nodes[kind].astype(float), exact=True)
        mine = sample.nodes["film"][: sample.n_seeds["film"]]
        assert_close(targets["y"], mine**2, exact=True)
        want = sampler({"film": mine}, epoch=0)
        assert_close(want.nodes["user"], sample.nodes["user"], exact=True)
        met += mine.tolist()
    assert sorted(met) == list(range(12))


def test_moments_go_with_their_seeds():
    sampler = geom.TemporalSampler(GRAPH, [-1])
    seeds, times = np.arange(30), RNG.random(30)
    loader = geom.NeighborLoader(sampler, seeds, 7, times=times, nodes={"x": X}, bulk=3)
    for sample, arrays in loader:
        assert_close(arrays["x"], X[sample.nodes], exact=True)
        mine = sample.nodes[: sample.n_seeds]
        assert (TIME[sample.edge_ids[0]] < times[mine[sample.graphs[0].dst]]).all()
        counts = [np.count_nonzero((node == DST) & (times[node] > TIME)) for node in mine]
        assert_close(sample.graphs[0].in_degrees, np.array(counts), exact=True)


def test_what_does_not_fit_is_refused():
    temporal, plain = geom.TemporalSampler(GRAPH, [2]), geom.NeighborSampler(GRAPH, [2])
    with pytest.raises(ValueError, match="times must be given for a TemporalSampler"):
        geom.NeighborLoader(temporal, np.arange(3), 2)
    with pytest.raises(ValueError, match="for no other sampler"):
        geom.NeighborLoader(plain, np.arange(3), 2, times=np.arange(3))
    with pytest.raises(ValueError, match=r"times must have shape \(3,\), one a seed, got \(2,\)"):
        geom.NeighborLoader(temporal, np.arange(3), 2, times=np.arange(2))
    sampler = geom.LinkSampler(plain)
    with pytest.raises(
        ValueError, match=r"links\['w'\] must be an array with a row for each of 200"
    ):
        geom.LinkLoader(sampler, np.arange(3), 2, links={"w": np.ones(3)})
    with pytest.raises(ValueError, match="edges must have an entry for each of 200 edges"):
        geom.LinkLoader(sampler, np.ones(3, bool), 2)
    with pytest.raises(ValueError, match="nodes and links must have different names"):
        geom.LinkLoader(sampler, np.arange(3), 2, nodes={"x": X}, links={"x": TIME})
    hetero = geom.HeteroNeighborSampler(HETERO, [2])
    with pytest.raises(ValueError, match="kinds must be of user, film, got 'actor'"):
        geom.HeteroNeighborLoader(hetero, "actor", np.arange(3), 2)
    with pytest.raises(ValueError, match=r"nodes\['user'\]\['x'\] must be an array with a row"):
        geom.HeteroNeighborLoader(
            hetero, "film", np.arange(3), 2, nodes={"user": {"x": np.ones(3)}}
        )
