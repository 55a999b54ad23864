"""Transforms of multigraphs, loops, isolated nodes and nothing, against loops and networkx."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.geom._transforms import _first_nodes, _number_first
from rtxarr.testing import assert_close, gradcheck


def small(src, dst, n_nodes, **arrays):
    return geom.Graph.from_edges(np.array(src, int), np.array(dst, int), n_nodes=n_nodes, **arrays)


# --------------------------------------------------------------------------------- self loops


def test_loops_are_added_behind_the_edges(multigraph, pairs):
    graph = geom.add_self_loops(multigraph, fill={"number": -1})
    n, n_edges = multigraph.n_nodes, multigraph.n_edges
    assert pairs(graph) == [*pairs(multigraph), *zip(range(n), range(n), strict=True)]
    assert graph.edges["weight"][:n_edges].tolist() == multigraph.edges["weight"].tolist()
    assert graph.edges["weight"][n_edges:].tolist() == [1.0] * n
    assert graph.edges["number"][n_edges:].tolist() == [-1] * n
    assert graph.nodes["x"] is multigraph.nodes["x"]


def test_loops_are_added_where_there_is_none(multigraph, pairs):
    graph = geom.add_self_loops(multigraph, fill={"number": -1}, missing_only=True)
    has = {s for s, d in pairs(multigraph) if s == d}
    missing = [v for v in range(multigraph.n_nodes) if v not in has]
    assert pairs(graph) == [*pairs(multigraph), *zip(missing, missing, strict=True)]


def test_removing_loops_undoes_adding_them(multigraph, same):
    bare = geom.remove_self_loops(multigraph)
    assert not (bare.src == bare.dst).any()
    same(geom.remove_self_loops(geom.add_self_loops(bare, fill={"number": 0})), bare)


def test_what_loops_hold():
    e = np.array([[1.0, 2.0], [3.0, 6.0]])
    graph = small([0, 1], [1, 1], 3, edges={"e": e})
    loops = geom.add_self_loops(graph, fill={"e": "mean"}).edges["e"][2:]
    assert_close(loops, np.array([[0.0, 0.0], [2.0, 4.0], [0.0, 0.0]]))
    loops = geom.add_self_loops(graph, fill={"e": np.array([7.0, 8.0])}).edges["e"][2:]
    assert_close(loops, np.array([[7.0, 8.0]] * 3))
    tracked = rx.Tensor(e, requires_grad=True)
    again = geom.add_self_loops(graph.replace(edges={"e": tracked}), fill={"e": "mean"})
    rx.sum(again.edges["e"]).backward()
    assert_close(tracked.grad, np.full((2, 2), 1.5))
    with pytest.raises(ValueError, match=r"fill must say what edges\['e'\] holds"):
        geom.add_self_loops(graph)
    with pytest.raises(ValueError, match="fill names w, but"):
        geom.add_self_loops(graph, fill={"e": 0, "w": 1})
    with pytest.raises(ValueError, match="numbers, arrays or 'mean', got 'max'"):
        geom.add_self_loops(graph, fill={"e": "max"})
    with pytest.raises(ValueError, match="n_src and n_dst"):
        geom.add_self_loops(geom.Graph.from_edges(np.array([0]), np.array([0]), n_src=1, n_dst=2))


# ------------------------------------------------------------------------------------ ways back


def test_every_edge_has_its_way_back(multigraph, pairs):
    graph = geom.to_undirected(multigraph)
    before, after = Counter(pairs(multigraph)), Counter(pairs(graph))
    for s, d in after:
        assert after[s, d] == max(before[s, d], before[d, s])
    assert pairs(graph)[: multigraph.n_edges] == pairs(multigraph)
    number = graph.edges["number"]
    for i in range(multigraph.n_edges, graph.n_edges):
        edge = number[i]
        assert (graph.src[i], graph.dst[i]) == (multigraph.dst[edge], multigraph.src[edge])
        assert graph.edges["weight"][i] == multigraph.edges["weight"][edge]


def test_twice_is_once(multigraph, same):
    once = geom.to_undirected(multigraph)
    same(geom.to_undirected(once), once)


def test_weights_of_symmetric_graphs_and_of_loops_are_not_doubled(same):
    graph = small([0, 1, 2], [1, 0, 2], 3, edges={"weight": np.array([2.0, 2.0, 3.0])})
    same(geom.to_undirected(graph), graph)


def test_what_is_not_of_edges_stays():
    """PyG#9912: one edge, and an array with one entry that belongs to the graph."""
    y = np.array([7])
    graph = geom.Batch.from_graphs([small([0], [1], 2)], graph={"y": y})
    assert geom.to_undirected(graph).n_edges == 2
    assert graph.graph["y"] is y


# ------------------------------------------------------------------------------------- coalesce


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "first"])
def test_coalesce(multigraph, pairs, reduce):
    how = {"weight": reduce, "number": "first"}
    graph = geom.coalesce(multigraph, reduce=how)
    assert graph.is_ordered
    assert pairs(graph) == sorted(set(pairs(multigraph)), key=lambda edge: edge[::-1])
    function = {"first": lambda w: w[0]}.get(reduce) or getattr(np, reduce)
    listed = np.array(pairs(multigraph)).reshape(-1, 2)
    for i, edge in enumerate(pairs(graph)):
        same = np.flatnonzero((listed == edge).all(axis=1))
        assert graph.edges["number"][i] == same[0]
        assert_close(graph.edges["weight"][i], function(multigraph.edges["weight"][same]))


def test_coalesce_keeps_kinds_and_gradients():
    graph = geom.Graph.from_edges(np.array([3, 3, 0]), np.array([1, 1, 0]), n_src=4, n_dst=2)
    assert (geom.coalesce(graph).n_src, geom.coalesce(graph).n_edges) == (4, 2)

    def total(w):
        return geom.coalesce(graph.replace(edges={"w": w}), reduce="max").edges["w"] ** 2

    gradcheck(total, (np.array([1.0, 2.0, 3.0]),))
    with pytest.raises(ValueError, match="reduce must be sum, mean, max, min or first, got 'add'"):
        geom.coalesce(graph, reduce="add")
    with pytest.raises(ValueError, match=r"an entry for each of \['w'\], got \[\]"):
        geom.coalesce(graph.replace(edges={"w": np.ones(3)}), reduce={})


# ----------------------------------------------------------------------------------- components


def test_components(multigraph):
    labels = geom.connected_components(multigraph)
    walk = nx.Graph()
    walk.add_nodes_from(range(multigraph.n_nodes))
    walk.add_edges_from(zip(multigraph.src.tolist(), multigraph.dst.tolist(), strict=True))
    wanted = sorted(nx.connected_components(walk), key=min)
    assert labels.tolist() == [
        i for v in range(multigraph.n_nodes) for i, part in enumerate(wanted) if v in part
    ]
    assert_close(_number_first(_first_nodes(multigraph)), labels, exact=True)
    part, nodes = geom.largest_component(multigraph)
    assert set(nodes.tolist()) == (max(wanted, key=len) if wanted else set())
    assert part.n_nodes == len(nodes)


def test_components_of_long_paths():
    order = np.random.default_rng(0).permutation(500)
    graph = small(order[:-1], order[1:], 501)
    assert _first_nodes(graph).tolist() == [0] * 500 + [500]
    assert geom.connected_components(graph).tolist() == [0] * 500 + [1]


# ---------------------------------------------------------------------------------- line graphs


def test_line_graphs(multigraph, pairs):
    lines = geom.line_graph(multigraph)
    edges = pairs(multigraph)
    wanted = [(i, j) for j, b in enumerate(edges) for i, a in enumerate(edges) if a[1] == b[0]]
    assert sorted(pairs(lines)) == sorted(wanted)
    assert lines.n_nodes == multigraph.n_edges
    assert lines.nodes["number"] is multigraph.edges["number"]


# ------------------------------------------------------------------------------------ encodings


def test_degree_features(multigraph):
    for direction, ends in (("in", multigraph.dst), ("out", multigraph.src)):
        degrees = np.bincount(ends, minlength=multigraph.n_nodes)
        got = geom.degree_features(multigraph, 3, direction=direction)
        assert_close(got, np.eye(4, dtype=np.float32)[np.minimum(degrees, 3)], exact=True)
    with pytest.raises(ValueError, match="direction must be 'in' or 'out'"):
        geom.degree_features(multigraph, 3, direction="both")


def laplacian(graph):
    a = np.zeros((graph.n_nodes,) * 2)
    np.add.at(a, (graph.dst, graph.src), 1.0)
    a = (a + a.T) / 2
    degree = a.sum(axis=1)
    root = np.divide(1, np.sqrt(degree), where=degree > 0, out=np.zeros_like(degree))
    return np.diag((degree > 0) * 1.0) - root[:, None] * a * root


def test_laplacian_encodings_are_the_first_eigenvectors(multigraph):
    n = multigraph.n_nodes
    with pytest.raises(ValueError, match=r"weight must be an array of shape \(\d+,\), got list"):
        geom.laplacian_encoding(multigraph, 1, weight=[1.0])
    got = geom.laplacian_encoding(multigraph, 4)
    assert got.shape == (n, 4)
    matrix = laplacian(multigraph)
    values = np.linalg.eigvalsh(matrix)[1:5]
    found = got[:, : len(values)]
    assert_close(found.T @ found, np.eye(len(values)), atol=1e-10)
    assert_close(matrix @ found, found * values, atol=1e-10)
    assert not got[:, len(values) :].any()


def test_large_graphs_take_the_same_eigenvectors(monkeypatch):
    rng = np.random.default_rng(0)
    graph = small(rng.integers(0, 60, 400), rng.integers(0, 60, 400), 60)
    dense = geom.laplacian_encoding(graph, 5)
    monkeypatch.setattr("rtxarr.geom._encodings._DENSE", 10)
    lanczos = geom.laplacian_encoding(graph, 5)
    assert_close(lanczos, dense, atol=1e-8)
    assert_close(geom.laplacian_encoding(graph, 5), lanczos, exact=True)
    top = np.abs(dense).argmax(axis=0)
    assert (dense[top, np.arange(5)] > 0).all()


def test_eigenvectors_of_a_path():
    """L of the path of three nodes has the eigenvalues 0, 1, 2."""
    graph = small([0, 1], [1, 2], 3)
    half = np.sqrt(0.5)
    got = geom.laplacian_encoding(graph, 2)
    assert_close(np.abs(got), np.array([[half, 0.5], [0, half], [half, 0.5]]), atol=1e-12)
    assert_close(np.abs(geom.laplacian_encoding(graph, 2, weight=np.full(2, 5.0))), np.abs(got))
    for bad in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"finite and not negative, got {bad} at an edge to"):
            geom.laplacian_encoding(graph, 1, weight=np.array([1.0, bad]))
    with pytest.raises(ValueError, match="k must be an int >= 1, got 0"):
        geom.laplacian_encoding(graph, 0)


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_transforms_on_a_gpu(multigraph):
    there = multigraph.to_device("cuda:0")
    for function in (
        geom.remove_self_loops,
        lambda g: geom.add_self_loops(g, fill={"number": 0}, missing_only=True),
        geom.to_undirected,
        geom.coalesce,
        geom.line_graph,
        lambda g: geom.largest_component(g)[0],
    ):
        got, want = function(there), function(multigraph)
        assert_close(got.src.get(), want.src, exact=True)
        assert_close(got.dst.get(), want.dst, exact=True)
        for name, x in want.edges.items():
            assert_close(got.edges[name].get(), x)
    assert_close(
        geom.connected_components(there).get(), geom.connected_components(multigraph), exact=True
    )
