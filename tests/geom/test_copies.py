"""Copies and pickles of graphs: what they are made of, without what was worked out."""

import copy
import pickle
import weakref
from types import MappingProxyType

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.geom._blocks import Block, cut
from rtxarr.geom._masks import MaskedGraph
from rtxarr.testing import assert_close
from tests.geom.conftest import assert_same, random_graph

PICKLES = {f"pickle {n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in (2, 4, 5)}
WAYS = PICKLES | {"copy": copy.copy, "deepcopy": copy.deepcopy}
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture(params=DEVICES)
def graph(request):
    """Give a graph on a device with as much worked out of it as there may be."""
    graph = random_graph(9, 40).to_device(request.param)
    weight, x = (_device.to_device(x, request.param) for x in (np.ones(40), np.ones((9, 3))))
    with rx.device(request.param):
        layer = geom.GCNConv(3, 3, dtype="float64", device=request.param)
        for of_edges in (weight, None):
            layer(graph, x, of_edges)
        graph.T @ (graph @ x)
    assert "T" in vars(graph)
    graph.once("cannot be pickled", lambda: weakref.ref(weight))
    return graph


def on_host(x):
    return x.to_device("cpu") if isinstance(x, geom.Graph) else _device.to_device(x, "cpu")


def test_a_copy_is_what_the_graph_was_made_of(graph, way):
    other = way(graph)
    assert type(other) is geom.Graph and other.device == graph.device
    assert other._kept == {} and not {"T", "_rows", "src"} & set(vars(other))
    assert_same(on_host(other), on_host(graph))
    x = _device.to_device(np.arange(9.0), graph.device)
    assert_close(on_host(other @ x), on_host(graph @ x), exact=True)
    assert other.T.T is other


def test_copies_do_not_change_either(graph, way):
    other = way(graph)
    with pytest.raises(AttributeError, match="graphs do not change"):
        other.indptr = graph.indptr
    for held in (other.nodes, other.edges):
        assert isinstance(held, MappingProxyType)
        with pytest.raises(TypeError, match="does not support item assignment"):
            held["x"] = 1
    if graph.device == "cpu":
        for name in ("indptr", "indices", "edge_ids"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(other, name)[...] = 0


def test_copies_share_their_arrays_and_deep_ones_do_not(graph):
    shallow, deep = copy.copy(graph), copy.deepcopy(graph)
    assert shallow.indices is graph.indices and shallow.nodes["x"] is graph.nodes["x"]
    deep.nodes["x"][...] = 7
    assert not np.any(on_host(graph.nodes["x"]) == 7)
    held = [graph, graph]
    one, two = copy.deepcopy(held)
    assert one is two


def test_what_is_worked_out_of_a_copy_is_its_own(graph):
    copy.copy(graph).once("mine", lambda: 1)
    assert "mine" not in graph._kept


def test_tensors_go_along_unless_they_were_computed(way):
    x = rx.Tensor(np.arange(3.0), requires_grad=True)
    graph = geom.Graph(np.array([0, 1, 1, 2]), np.array([2, 0]), nodes={"x": x})
    held = way(graph).nodes["x"]
    assert isinstance(held, rx.Tensor) and held.requires_grad
    assert_close(held.data, x.data, exact=True)
    if way is not copy.copy:
        with pytest.raises(RuntimeError, match="only a leaf"):
            way(graph.replace(nodes={"x": 2 * x}))


def test_batches(way):
    graphs = [random_graph(n, 3 * n, seed=n) for n in (4, 1, 3)]
    batch = geom.Batch.from_graphs(graphs, graph={"y": np.arange(3)})
    assert batch.graph_ids.shape == (8,) and batch.edge_ptr.shape == (4,)
    other = way(batch)
    assert type(other) is geom.Batch and repr(other) == repr(batch)
    assert not {"graph_ids", "edge_ptr", "_bounds", "_edge_bounds"} & set(vars(other))
    for one, two in zip(other.unbatch(), graphs, strict=True):
        assert_same(one, two)
    assert_close(other.graph["y"], np.arange(3), exact=True)
    with pytest.raises(TypeError, match="does not support item assignment"):
        other.graph["y"] = 1
    with pytest.raises(ValueError, match="read-only"):
        other.ptr[0] = 1


def test_graphs_of_several_kinds(way):
    plain = random_graph(5, 9)
    graphs = {("a", "to", "a"): plain, ("a", "also", "a"): plain}
    nodes = {"b": {"x": np.arange(2.0)}}
    graph = geom.HeteroGraph(graphs, {"a": 5, "b": 2}, nodes=nodes)
    other = way(graph)
    assert repr(other) == repr(graph) and other.kinds == ("a", "b")
    assert_same(other["a", "to", "a"], plain)
    assert other["a", "to", "a"] is other["a", "also", "a"]
    assert_close(other.nodes["b"]["x"], np.arange(2.0), exact=True)
    for held in (other.graphs, other.n_nodes, other.nodes, other.nodes["b"]):
        with pytest.raises(TypeError, match="does not support item assignment"):
            held["a"] = 1


def test_graphs_made_of_others(way):
    graph = random_graph(9, 40)
    mask = np.linspace(0, 1, 40)
    masked = MaskedGraph.of(graph, mask)
    assert_close(way(masked) @ np.ones((9, 1)), masked @ np.ones((9, 1)), exact=True)
    assert way(masked).T.n_edges == 40
    block = Block.of(graph, cut(graph, np.arange(4)), "cpu")
    other = way(block)
    assert_close(geom.gcn_norm(other)[1], geom.gcn_norm(block)[1], exact=True)


def test_samplers_draw_the_same_elsewhere(way):
    graph, seeds = random_graph(9, 60), np.array([3, 1, 8])
    for options in ({}, {"weight": np.linspace(0, 1, 60)}):
        sampler = geom.NeighborSampler(graph, [3, 2], seed=5, **options)
        got, want = way(sampler)(seeds), sampler(seeds)
        assert_close(got.nodes, want.nodes, exact=True)
        for a, b in zip(way(want).graphs, got.graphs, strict=True):
            assert_same(a, b)
            assert a.is_nested == b.is_nested
