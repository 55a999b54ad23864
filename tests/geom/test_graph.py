"""Graphs: what they hold, in which order, and what they refuse."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close, gradcheck, gradgradcheck


def multigraph(rng, n_src, n_dst, n_edges):
    """Give edges with duplicates, and nodes without any."""
    src = rng.integers(0, max(n_src - 1, 1), n_edges)
    dst = rng.integers(0, max(n_dst - 1, 1), n_edges)
    return src, dst


def dense(src, dst, n_src, n_dst):
    out = np.zeros((n_dst, n_src))
    np.add.at(out, (dst, src), 1)
    return out


SIZES = [(5, 5, 12), (1, 1, 3), (4, 7, 20), (3, 3, 0), (0, 0, 0), (6, 2, 1)]


@pytest.mark.skip_xp("dask.array", reason="a graph looks at its edges")
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "int16"])
@pytest.mark.parametrize(("n_src", "n_dst", "n_edges"), SIZES)
def test_edges_keep_their_numbers(xp, n_src, n_dst, n_edges, dtype):
    rng = np.random.default_rng(n_edges)
    src, dst = multigraph(rng, n_src, n_dst, n_edges)
    graph = geom.Graph.from_edges(
        *(xp.asarray(x.astype(dtype)) for x in (src, dst)), n_src=n_src, n_dst=n_dst
    )
    assert (graph.n_src, graph.n_dst, graph.n_edges) == (n_src, n_dst, n_edges)
    assert_close(graph.src, src, exact=True)
    assert_close(graph.dst, dst, exact=True)
    order = np.argsort(dst, kind="stable")
    assert_close(graph.edge_ids, order, exact=True)
    assert_close(graph.indices, src[order].astype(np.int32), exact=True)
    assert_close(graph.in_degrees, np.bincount(dst, minlength=n_dst), exact=True)
    assert_close(graph.out_degrees, np.bincount(src, minlength=n_src), exact=True)
    turned = graph.T
    assert turned.T is graph
    assert (turned.n_src, turned.n_dst) == (n_dst, n_src)
    assert_close(turned.src, dst, exact=True)
    assert_close(turned.dst, src, exact=True)


@pytest.mark.parametrize(("n_src", "n_dst", "n_edges"), SIZES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_products_are_those_of_the_dense_matrix(device, n_src, n_dst, n_edges):
    rng = np.random.default_rng(n_edges)
    src, dst = multigraph(rng, n_src, n_dst, n_edges)
    graph = geom.Graph.from_edges(
        *(rx.asarray(x, device=device) for x in (src, dst)), n_src=n_src, n_dst=n_dst
    )
    matrix = dense(src, dst, n_src, n_dst)
    for turned, wanted in ((graph, matrix), (graph.T, matrix.T)):
        for trailing in ((), (3,), (2, 4)):
            x = rng.standard_normal((wanted.shape[1], *trailing))
            got = rx.Tensor(turned @ rx.asarray(x, device=device)).numpy()
            assert_close(got, np.tensordot(wanted, x, 1))


def test_isolated_nodes_have_rows():
    """cugraph#4326."""
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=3)
    assert_close(graph @ np.ones((3, 2)), np.array([[0, 0], [1, 1], [0, 0]], float))


def test_values_of_edges_are_stored_in_order():
    graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([2, 0, 1]), n_nodes=3)
    assert not graph.is_ordered
    assert_close(graph.stored(np.array([10, 20, 30])), np.array([20, 30, 10]), exact=True)
    ordered = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([0, 0, 1]), n_nodes=3)
    assert ordered.is_ordered
    weight = np.ones(3)
    assert ordered.stored(weight) is weight
    with pytest.raises(ValueError, match="an entry for each of 3 edges, got"):
        graph.stored(np.ones(2))


def test_from_rows():
    graph = geom.Graph(np.array([0, 2, 2]), np.array([4, 0]), n_src=5, edge_ids=np.array([1, 0]))
    assert_close(graph.src, np.array([0, 4]), exact=True)
    assert_close(graph.dst, np.array([0, 0]), exact=True)
    assert repr(graph) == "Graph(5 to 2 nodes, 2 edges)"
    assert repr(graph.replace(edges={"w": np.ones(2)})).endswith("2 edges, edges: w)")


def test_attributes():
    x, w = np.ones((3, 2)), np.arange(2)
    graph = geom.Graph.from_edges(
        np.array([0, 1]), np.array([2, 0]), n_nodes=3, nodes={"x": x}, edges={"w": w}
    )
    assert graph.nodes["x"] is x
    assert graph.T.edges["w"] is w
    with pytest.raises(TypeError):
        graph.nodes["y"] = x
    other = graph.replace(nodes={"y": rx.Tensor(x)})
    assert list(other.nodes) == ["y"]
    assert other.edges["w"] is w
    with pytest.raises(ValueError, match=r"nodes\['x'\] must have an entry for each of 3 nodes"):
        graph.replace(nodes={"x": w})
    with pytest.raises(TypeError, match=r"edges\['w'\] must be an array"):
        graph.replace(edges={"w": 3})


def test_a_count_of_one_says_nothing_of_what_an_array_is():
    """PyG#9912: with one edge, an array of the graph's with one entry is not the edges'."""
    graph = geom.Graph.from_edges(np.array([0]), np.array([0]), n_nodes=1, nodes={"y": np.ones(1)})
    assert list(graph.nodes) == ["y"]
    assert list(graph.edges) == []


BAD = [
    ({"src": [0, 3], "dst": [0, 0], "n_nodes": 3}, IndexError, r"src must lie in \[0, 3\)"),
    ({"src": [0], "dst": [-1], "n_nodes": 3}, IndexError, r"dst must lie in \[0, 3\)"),
    ({"src": [0.0], "dst": [0], "n_nodes": 3}, TypeError, "src must hold integers, got float64"),
    ({"src": [0, 1], "dst": [0], "n_nodes": 3}, ValueError, "one length, got 2 and 1"),
    ({"src": [[0]], "dst": [0], "n_nodes": 3}, ValueError, "src must be one-dimensional"),
    ({"src": [0], "dst": [0]}, ValueError, "n_nodes must be given"),
    ({"src": [0], "dst": [0], "n_nodes": 2, "n_src": 2}, ValueError, "not both"),
    ({"src": [0], "dst": [0], "n_nodes": -1}, ValueError, "n_nodes must be an int >= 0, got -1"),
    (
        {"src": [0], "dst": [0], "n_src": 2, "n_dst": 3, "nodes": {"x": np.ones(3)}},
        ValueError,
        "two kinds",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_edges(options, error, message):
    src, dst = (np.asarray(options.pop(name)) for name in ("src", "dst"))
    options = dict(options)
    try:
        with pytest.raises(error, match=message):
            geom.Graph.from_edges(src, dst, **options)
    finally:
        options.update(src=src, dst=dst)


def test_bad_rows():
    indptr, indices = np.array([0, 1, 2]), np.array([0, 1])
    with pytest.raises(ValueError, match="rise from 0 to the number of edges, 2, got 0 to 3"):
        geom.Graph(np.array([0, 3]), indices)
    with pytest.raises(ValueError, match="rise from 0"):
        geom.Graph(np.array([0, 2, 1, 2]), indices)
    with pytest.raises(IndexError, match=r"indices must lie in \[0, 2\)"):
        geom.Graph(indptr, np.array([0, 2]))
    with pytest.raises(ValueError, match="edge_ids must hold each number once"):
        geom.Graph(indptr, indices, edge_ids=np.array([1, 1]))
    with pytest.raises(ValueError, match="at least one entry"):
        geom.Graph(np.empty(0, int), indices[:0])
    graph = geom.Graph(indptr, indices)
    with pytest.raises(ValueError, match="a row for each of 2 sources"):
        graph @ np.ones(3)
    with pytest.raises(ValueError, match="n_src and n_dst"):
        geom.Graph(indptr, indices, n_src=7).n_nodes  # noqa: B018


def test_more_sources_than_32_bits_count():
    graph = geom.Graph.from_edges(np.array([2**31, 5]), np.array([1, 0]), n_src=2**31 + 1, n_dst=2)
    assert graph.indices.dtype == np.int64
    assert (
        geom.Graph.from_edges(np.array([5]), np.array([0]), n_src=2**31, n_dst=1).indices.dtype
        == np.int32
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_gradients_of_the_sum(device):
    rng = np.random.default_rng(0)
    src, dst = (rx.asarray(x, device=device) for x in multigraph(rng, 5, 4, 11))
    graph = geom.Graph.from_edges(src, dst, n_src=5, n_dst=4)
    x = rx.asarray(rng.standard_normal((5, 2)), device=device)
    gradcheck(lambda x: graph @ x, (x,))
    gradgradcheck(lambda x: (graph @ x) ** 2, (x,))
    assert graph.to_device(device) is graph


def test_graphs_do_not_change(random):
    graph = random(5, 9)
    batch = geom.Batch.from_graphs([graph, graph])
    for name in ("n_src", "n_nodes", "indptr", "edges", "src", "other"):
        with pytest.raises(AttributeError):
            setattr(graph, name, 7)
    with pytest.raises(AttributeError, match="graphs do not change, got 'ptr' to set"):
        batch.ptr = np.array([0, 10])
    with pytest.raises(AttributeError, match="graphs do not change, got 'indices' to delete"):
        del graph.indices
    for one in (
        graph,
        graph.T,
        batch,
        geom.to_undirected(graph),
        geom.Graph(graph.indptr, graph.indices),
    ):
        names = ("indptr", "indices", "edge_ids", "src", "dst", "in_degrees", "out_degrees")
        for x in [getattr(one, name) for name in names] + [batch.ptr, batch.graph_ids]:
            with pytest.raises(ValueError, match="read-only"):
                x[0] = 1
    own = np.array([0, 1, 1])
    assert np.shares_memory(geom.Graph(own, np.array([0], np.int32), n_src=1).indptr, own)
    own[1] = 1  # the caller's array stays the caller's


@pytest.mark.gpu
def test_moving_to_a_gpu():
    graph = geom.Graph.from_edges(
        np.array([1, 0]), np.array([1, 0]), n_nodes=2, edges={"w": np.ones(2)}
    )
    there = graph.to_device("cuda:0")
    assert there.device == "cuda:0"
    assert_close((there @ rx.ones((2, 1), device="cuda:0")).get(), np.ones((2, 1)))
    with pytest.raises(ValueError, match="x must be on cuda:0"):
        there @ np.ones(2)
