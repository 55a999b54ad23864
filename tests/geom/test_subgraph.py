"""Parts of graphs, on multigraphs, loops, isolated nodes and nothing."""

import networkx as nx
import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close


def test_a_subgraph_has_the_edges_between_its_nodes(multigraph):
    n = multigraph.n_nodes
    for nodes in (np.arange(n)[::-1][: n // 2], np.arange(n), np.arange(0)):
        part = geom.subgraph(multigraph, nodes)
        number = part.edges["number"]
        inside = np.isin(multigraph.src, nodes) & np.isin(multigraph.dst, nodes)
        assert number.tolist() == np.flatnonzero(inside).tolist()
        assert (nodes[part.src] == multigraph.src[number]).all()
        assert (nodes[part.dst] == multigraph.dst[number]).all()
        assert_close(part.nodes["x"], multigraph.nodes["x"][nodes], exact=True)


def test_all_nodes_give_the_same_graph(multigraph, same):
    same(geom.subgraph(multigraph, np.ones(multigraph.n_nodes, bool)), multigraph)
    same(geom.edge_subgraph(multigraph, np.arange(multigraph.n_edges)), multigraph)


def test_edges_are_chosen_by_number_or_mask(multigraph):
    loops = multigraph.src == multigraph.dst
    part = geom.edge_subgraph(multigraph, ~loops)
    assert part.edges["number"].tolist() == np.flatnonzero(~loops).tolist()
    assert not (part.src == part.dst).any()
    assert part.n_nodes == multigraph.n_nodes
    assert part.nodes["x"] is multigraph.nodes["x"]
    if multigraph.n_edges > 2:
        twice = geom.edge_subgraph(multigraph, np.array([2, 0, 2]))
        assert twice.edges["number"].tolist() == [2, 0, 2]
        assert twice.src.tolist() == multigraph.src[[2, 0, 2]].tolist()


def test_edges_of_a_bipartite_graph(random):
    graph = random(4, 9, n_dst=2)
    part = geom.edge_subgraph(graph, np.array([1, 8]))
    assert (part.n_src, part.n_dst, part.n_edges) == (4, 2, 2)


def test_before():
    graph = geom.Graph.from_edges(
        np.array([0, 1, 2]), np.array([1, 2, 0]), n_nodes=3, edges={"time": np.array([5, 1, 3])}
    )
    assert geom.before(graph, 3).edges["time"].tolist() == [1]
    assert geom.before(graph, 3, inclusive=True).edges["time"].tolist() == [1, 3]
    assert geom.before(graph, 0).n_edges == 0
    with pytest.raises(ValueError, match="must have 'when' among its arrays of edges"):
        geom.before(graph, 3, name="when")
    with pytest.raises(ValueError, match="one number an edge"):
        geom.before(graph.replace(edges={"time": np.ones((3, 1))}), 3)


@pytest.mark.parametrize("direction", ["in", "out", "both"])
def test_k_hop_matches_networkx(multigraph, direction):
    walk = nx.MultiDiGraph()
    walk.add_nodes_from(range(multigraph.n_nodes))
    walk.add_edges_from(zip(multigraph.src.tolist(), multigraph.dst.tolist(), strict=True))
    walk = {"in": walk.reverse, "out": walk.copy, "both": walk.to_undirected}[direction]()
    for seed in range(multigraph.n_nodes):
        for k in (0, 1, 2, 5):
            wanted = nx.single_source_shortest_path_length(walk, seed, cutoff=k)
            found, steps = geom.k_hop(multigraph, np.array([seed]), k, direction=direction)
            wanted = sorted((step, node) for node, step in wanted.items())
            assert list(zip(steps.tolist(), found.tolist(), strict=True)) == wanted


def test_k_hop_starts_with_its_nodes_as_they_came():
    graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 0]), n_nodes=5)
    found, steps = geom.k_hop(graph, np.array([4, 1, 3]), 9)
    assert found.tolist() == [4, 1, 3, 0, 2]
    assert steps.tolist() == [0, 0, 0, 1, 2]
    assert geom.k_hop(graph, np.array([], int), 3)[0].shape == (0,)


def test_bad_choices():
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    with pytest.raises(ValueError, match="nodes must name each node once"):
        geom.subgraph(graph, np.array([1, 1]))
    with pytest.raises(ValueError, match="nodes must name each node once"):
        geom.k_hop(graph, np.array([1, 1]), 1)
    with pytest.raises(IndexError, match=r"nodes must lie in \[0, 3\)"):
        geom.subgraph(graph, np.array([-1]))
    with pytest.raises(TypeError, match="integers or bools, got float64"):
        geom.subgraph(graph, np.array([1.0]))
    with pytest.raises(TypeError, match="must be an array of integers or bools"):
        geom.subgraph(graph, [1])
    with pytest.raises(ValueError, match="edges must have 1 bools, got 2"):
        geom.edge_subgraph(graph, np.ones(2, bool))
    with pytest.raises(ValueError, match="direction must be one of in, out, both, got 'up'"):
        geom.k_hop(graph, np.array([1]), 1, direction="up")
    with pytest.raises(ValueError, match="k must be an int >= 0"):
        geom.k_hop(graph, np.array([1]), -1)


def test_no_moment_is_before_or_after_nan():
    src, time = np.array([0, 1]), np.array([1.0, np.nan])
    graph = geom.Graph.from_edges(src, src, n_nodes=2, edges={"time": time})
    with pytest.raises(ValueError, match=r"edges\['time'\] must not be NaN"):
        geom.before(graph, 2.0)
    with pytest.raises(ValueError, match="time must not be NaN, got nan"):
        geom.before(graph.replace(edges={"time": src}), np.nan)
