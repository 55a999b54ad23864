"""Nodes and edges to look at are those of the arrays."""

import numpy as np
import pytest

from rtxarr import geom


def test_nodes_have_their_edges(multigraph, pairs):
    for node in range(multigraph.n_nodes):
        view = multigraph.node(node)
        into = [i for i, (_, dst) in enumerate(pairs(multigraph)) if dst == node]
        out = [i for i, (src, _) in enumerate(pairs(multigraph)) if src == node]
        assert (view.in_edges.tolist(), view.out_edges.tolist()) == (into, out)
        assert (view.in_degree, view.out_degree) == (len(into), len(out))
        assert view.predecessors.tolist() == [pairs(multigraph)[i][0] for i in into]
        assert view.successors.tolist() == [pairs(multigraph)[i][1] for i in out]
        np.testing.assert_array_equal(view["x"], multigraph.nodes["x"][node])
        assert repr(view) == f"Node({node})"


def test_edges_have_their_ends(multigraph, pairs):
    for number, (src, dst) in enumerate(pairs(multigraph)):
        view = multigraph.edge(number)
        assert (view.src, view.dst, view["number"]) == (src, dst, number)
        assert repr(view) == f"Edge({number}: {src} -> {dst})"


def test_views_of_what_is_not_there(random):
    graph = random(4, 10)
    with pytest.raises(IndexError, match=r"number must lie in \[0, 4\), got 4"):
        graph.node(4)
    with pytest.raises(IndexError, match=r"number must lie in \[0, 10\), got -1"):
        graph.edge(np.int64(-1))
    with pytest.raises(TypeError):
        graph.node(1.0)
    with pytest.raises(KeyError):
        graph.node(1)["y"]
    bipartite = random(4, 10, n_dst=6)
    with pytest.raises(ValueError, match="a bipartite graph has 4 sources and 6 destinations"):
        bipartite.node(0)
    assert bipartite.edge(3).src == bipartite.src[3]


@pytest.mark.gpu
def test_views_on_a_gpu(random):
    graph = random(9, 40)
    there = graph.to_device("cuda:0")
    view, want = there.node(2), graph.node(2)
    assert view.in_edges.tolist() == want.in_edges.tolist()
    assert view.successors.tolist() == want.successors.tolist()
    assert view.in_degree == want.in_degree
    assert repr(there.edge(5)) == repr(graph.edge(5))
    ordered = geom.Graph(there.indptr, there.indices).node(2)
    assert ordered.in_degree == len(ordered.in_edges)
