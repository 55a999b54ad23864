"""The library's functions of memory in fused functions: graphs, convolutions, attention."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.autograd import grad
from rtxarr.ops._activated import _activated_linear, _gated_product, _in_product
from rtxarr.ops._attention import is_one_block
from rtxarr.polygraph import _library
from rtxarr.polygraph._program import in_order, memory_order
from rtxarr.testing import assert_close

from .test_program import Reference

RNG = np.random.default_rng(0)
N, E = 30, 200
SRC, DST = RNG.integers(0, N, E), RNG.integers(0, N - 3, E)
GRAPHS = {
    "as listed": geom.Graph.from_edges(SRC, DST, n_nodes=N),
    "in order": geom.Graph.from_edges(SRC, np.sort(DST), n_nodes=N),
}
WEIGHT = RNG.random(E)
X = RNG.standard_normal((N, 8))


def kernels(fused):
    (programs,) = fused._programs.values()
    return [step.loops.kind for step in programs[0].program.steps if step.loops]


def heads(x):
    return rx.reshape(x, (N, 4, 2))


def attended(graph, x):
    scores = rx.sum(heads(x), axis=2)
    logits = rx.take(scores, graph.src, axis=0) + rx.take(scores, graph.dst, axis=0)
    share = geom.edge_softmax(graph, rx.leaky_relu(logits, negative_slope=0.2))
    return geom.aggregate(graph, heads(x), "sum", weight=share)


class Difference(geom.MessagePassing):
    def message(self, src, dst, edge):
        return rx.tanh(dst - src) * edge[:, None]

    def update(self, out, dst):
        return rx.relu(out) + dst


OVER_EDGES = {
    "sum": lambda graph, x: geom.aggregate(graph, x, "sum"),
    "mean": lambda graph, x: geom.aggregate(graph, x, "mean"),
    "max": lambda graph, x: geom.aggregate(graph, x, "max"),
    "std": lambda graph, x: geom.aggregate(graph, x, "std"),
    "weighted": lambda graph, x: geom.aggregate(graph, x, "sum", weight=WEIGHT),
    "heads": lambda graph, x: geom.aggregate(
        graph, heads(x), "sum", weight=np.stack([WEIGHT] * 4, axis=1)
    ),
    "dot": lambda graph, x: geom.sddmm(graph, x, 2 * x),
    "softmax": lambda graph, x: geom.edge_softmax(graph, rx.take(x, graph.src, axis=0)),
    "attention": attended,
    "messages": lambda graph, x: Difference()(graph, x, WEIGHT),
}


@pytest.mark.parametrize("name", OVER_EDGES)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_over_edges(graph, name):
    f = OVER_EDGES[name]
    fused = rx.fuse(lambda x: f(graph, x))
    assert_close(fused(X), f(graph, X), rtol=1e-9, atol=1e-9)
    half = X.astype(np.float16)
    assert_close(fused(half), f(graph, half))
    assert not fused.reasons


@pytest.mark.parametrize("name", [n for n in OVER_EDGES if n != "std"])
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_gradients_over_edges(graph, name):
    gradient = rx.grad(lambda x: rx.sum(OVER_EDGES[name](graph, x) ** 2))
    fused = rx.fuse(gradient)
    assert_close(fused(X), gradient(X), rtol=1e-9, atol=1e-9)
    assert not fused.reasons


@pytest.mark.parametrize("name", ["weighted", "softmax", "messages"])
@pytest.mark.parametrize("which", GRAPHS)
def test_messages_are_not_kept(which, name):
    """What is made for each edge is made where it is reduced."""
    graph = GRAPHS[which]
    fused = rx.fuse(lambda x: OVER_EDGES[name](graph, x), backend=Reference())
    fused(X)
    by_number = name == "softmax" and not graph.is_ordered  # a result of edges
    assert kernels(fused) == ["segments", *["map"] * by_number]


def test_softmax_and_sum_over_edges_are_one_kernel():
    for graph in GRAPHS.values():
        fused = rx.fuse(lambda x, graph=graph: attended(graph, x), backend=Reference())
        assert_close(fused(X), attended(graph, X), rtol=1e-9)
        assert kernels(fused) == ["rows", "segments"]  # the scores of nodes come first


@pytest.mark.parametrize("which", GRAPHS)
def test_attention_and_its_gradient_take_edges_as_they_are_stored(which):
    graph = GRAPHS[which]
    layer = geom.GATConv(8, 3, heads=2, add_self_loops=False, dtype=rx.float64)

    def step(x):
        x = rx.Tensor(x, requires_grad=True)
        rx.sum(layer(graph, x) ** 2).backward()
        return x.grad

    fused = rx.jit(step, backend=Reference())
    assert_close(fused(X), step(X), rtol=1e-9)
    (programs,) = fused._programs.values()
    loops = [s.loops for s in programs[0].program.steps if s.loops]
    over_edges = [k for k in loops if k.kind == "segments"]
    assert all(map(accumulators, over_edges))  # none that only gives edges their rows
    # Of arrays of edges the others make the products of both nodes' rows alone.
    made = [b.node for k in loops if k.kind != "segments" for b in k.buffers if b.is_output]
    assert [n.op for n in made if n.shape[0] == E] == ["sum"]


def accumulators(loops):
    return [a for phase in loops.phases for a in phase.accumulators]


def test_edges_of_a_graph_and_of_it_turned_round():
    """Edges by number, read in either order, of values that are known in one, the other or none."""
    for graph in (*GRAPHS.values(), *(g.T for g in GRAPHS.values())):

        def f(x, weight, graph=graph):
            share = geom.edge_softmax(graph, rx.take(x, graph.src, axis=0))
            both = rx.exp(share * weight[:, None] - rx.take(x, graph.dst, axis=0))
            there = geom.aggregate(graph.T, x, "sum", weight=rx.mean(both, axis=1))
            there += geom.aggregate(graph.T, x, "sum", weight=(both * 2 + 1)[:, 0])
            return there, geom.aggregate(graph, x, "sum", weight=both[:, 0]), both

        fused = rx.fuse(f)
        for got, want in zip(fused(X, WEIGHT), f(X, WEIGHT), strict=True):
            assert_close(got, want, rtol=1e-9)
        assert not fused.reasons


def test_weights_that_a_graph_keeps_are_sorted_once():
    graph, layer = GRAPHS["as listed"], geom.GCNConv(8, 8, dtype=rx.float64)
    n_edges = geom.gcn_norm(graph, dtype=rx.float64)[0].n_edges

    def f(x):
        return layer.propagate(graph, x)

    fused = rx.fuse(f, backend=Reference())
    assert_close(fused(X), f(X), rtol=1e-9)
    (programs,) = fused._programs.values()
    gathered = [n for n in programs[0].program.graph.nodes() if n.op == "gather"]
    assert [n.shape for n in gathered] == [(n_edges, 8)]


@pytest.mark.parametrize("transpose", [False, True])
def test_a_sparse_product_with_long_rows_is_one_kernel(transpose):
    lengths = np.array([300, 0, 2, 5])
    columns = np.concatenate([RNG.permutation(400)[:n] for n in lengths])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    pattern = rx.SparsityPattern(indptr, columns, (4, 400))
    pattern = pattern.T if transpose else pattern
    values, x = RNG.random(307), RNG.standard_normal((400, 3))
    fused = rx.fuse(lambda v, x: rx.spmm(v, x, pattern, transpose=transpose), backend=Reference())
    want = np.zeros((4, 3))
    np.add.at(want, np.repeat(np.arange(4), lengths), values[:, None] * x[columns])
    given = values[np.argsort(columns, kind="stable")] if transpose else values
    assert_close(fused(given, x), want, rtol=1e-9)
    assert kernels(fused) == ["segments"]


@pytest.mark.parametrize("n_columns", [400, 40_000])
def test_a_sparse_product_with_a_large_transposed_matrix(n_columns):
    """Its rows are put together in memory before they are read for each entry."""
    columns = RNG.integers(0, n_columns, 50)
    pattern = rx.SparsityPattern(np.array([0, 30, 30, 50]), columns, (3, n_columns))
    values, w = RNG.random(50), RNG.standard_normal((4, n_columns))

    def f(v, w):
        return rx.spmm(v, w.T, pattern)

    fused = rx.fuse(f, backend=Reference())
    assert_close(fused(values, w), f(values, w), rtol=1e-9)
    (programs,) = fused._programs.values()
    calls = [n for n in programs[0].program.graph.nodes() if n.op == "call"]
    assert len(calls) == (n_columns == 40_000)


OPAQUE = {
    "conv1d": lambda x: rx.conv1d(rx.reshape(x, (2, 4, N)), np.ones((6, 2, 3)), groups=2),
    "conv_transpose1d": lambda x: rx.conv_transpose1d(
        rx.reshape(x, (2, 4, N)), np.ones((4, 3, 3)), stride=2
    ),
    "attention": lambda x: rx.scaled_dot_product_attention(
        *[rx.reshape(x, (1, 2, N // 2, 8))] * 3, causal=True
    ),
    "masked attention": lambda x: rx.scaled_dot_product_attention(
        *[rx.reshape(x, (1, 2, N // 2, 8))] * 3, x[None, None, : N // 2, :1]
    ),
    "linear, relu": lambda x: _in_product(x, np.ones((6, x.shape[1])), np.ones(6), "relu"),
    "linear, gelu": lambda x: _in_product(x, np.ones((6, x.shape[1])), None, "gelu_tanh"),
    "embedding": lambda x: rx.take(x, SRC, axis=0),
    "scatter": lambda x: rx.scatter_max(x, SRC[:N], 40),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_calls_of_the_library(name):
    f = OPAQUE[name]
    for function in (f, rx.grad(lambda x: rx.sum(f(x) ** 2))):
        fused = rx.fuse(lambda x, function=function: function(2 * x))
        assert_close(fused(X), function(2 * X), exact=True)
        assert not fused.reasons


def test_what_is_said_to_be_new_memory_is(monkeypatch):
    """Kernels write over it, and what it is made of is dead when it has been read."""
    call, seen = _library.Opaque.__call__, set()

    def watched(opaque, *arrays):
        results = call(opaque, *arrays)
        if opaque.gives_new:
            seen.add(repr(opaque))
            for i, out in enumerate(results):
                assert not any(np.shares_memory(out, x) for x in (*arrays, *results[:i]))
        return results

    monkeypatch.setattr(_library.Opaque, "__call__", watched)
    half = np.ones((4, N), np.float16)
    for f in (
        *OPAQUE.values(),
        lambda x: rx.conv2d(rx.reshape(x, (1, 2, 4, N)), np.ones((3, 2, 1, 1))),  # of one tap
        lambda x: rx.conv1d(np.ones((2, 8, 12)), x[:3, :, None]),
        lambda x: rx.linear(rx.astype(x[:4], rx.float16).T, half.T[:3, :4]),
        lambda x: (
            x[:4, :1]
            * _gated_product(
                rx.stop_gradient(x[:4].T), *[np.ones((4, 4))] * 2, None, None, activation="silu"
            ).T
        ),
    ):
        for function in (f, rx.grad(lambda x, f=f: rx.sum(rx.astype(f(x), rx.float64) ** 2))):
            rx.fuse(lambda x, function=function: function(2 * x))(X)
    assert seen == _library._GIVE_NEW


@pytest.mark.parametrize("name", ["attention", "masked attention"])
def test_attention_that_no_library_has(name, monkeypatch):
    """As on a GPU in float32: its softmax is one kernel, and what surrounds it is in it."""
    monkeypatch.setattr(_library, "_is_apart", lambda q, k: is_one_block(q, k))
    f = OPAQUE[name]
    for function in (f, rx.grad(lambda x: rx.sum(f(x) ** 2))):
        fused = rx.fuse(lambda x, function=function: function(2 * x))
        assert_close(fused(X), function(2 * X), rtol=1e-9, atol=1e-12)
        assert not fused.reasons
        (programs,) = fused._programs.values()
        assert not any(n.op == "call" for n in programs[0].program.graph.nodes())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "masked attention"])
@pytest.mark.parametrize("dtype", [rx.float32, rx.float64])
def test_attention_that_no_library_has_on_a_gpu(name, dtype):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(X, dtype)
    f = OPAQUE[name]
    for function in (f, rx.grad(lambda x: rx.sum(f(x) ** 2))):
        fused = rx.fuse(lambda x, function=function: function(2 * x))
        assert_close(fused(x), function(2 * x), **({} if dtype == rx.float64 else {"rtol": 1e-4}))
        assert not fused.reasons


def test_second_gradients_of_attention():
    def f(x):
        return rx.sum(rx.grad(lambda x: rx.sum(OPAQUE["attention"](x) ** 2))(x) ** 2)

    assert_close(rx.fuse(rx.grad(f))(X), rx.grad(f)(X), rtol=1e-9)


def test_kernels_read_what_attention_gives_as_it_lies():
    """Heads lie behind the queries: kernels take strides, so that nothing is copied on a GPU."""
    x = RNG.standard_normal((3, 5, 24)).astype(np.float32)

    def attended(x):
        parts = rx.reshape(x, (3, 5, 3, 4, 2))
        q, k, v = (rx.permute_dims(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
        return rx.scaled_dot_product_attention(q, k, v)

    def gradient(x):
        return rx.grad(lambda x: rx.sum(attended(x) ** 2))(x)

    fused = rx.fuse(gradient)
    assert_close(fused(x), gradient(x), rtol=1e-6, atol=1e-6)
    (programs,) = fused._programs.values()
    steps = programs[0].program.steps
    read = {n for s in steps if s.loops for n in s.sources if n.op == "item"}
    assert len(read) >= 3
    for node in read:
        assert memory_order(node) == (0, 2, 1, 3)
    behind = np.zeros((3, 5, 4, 2)).transpose(0, 2, 1, 3)
    assert in_order(behind, (0, 2, 1, 3)).ctypes.data == behind.ctypes.data
    front = np.arange(120.0).reshape(3, 4, 5, 2)
    laid = in_order(front, (0, 2, 1, 3))
    assert laid.strides == behind.strides
    assert_close(laid, front, exact=True)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "mul", "median"])
@pytest.mark.parametrize("shape", [(3, 2), (3, 0), (0, 2)])
def test_graphs_without_edges(op, shape):
    none = np.zeros(0, int)
    graph = geom.Graph.from_edges(none, none, n_nodes=shape[0])

    def f(x):
        return geom.aggregate(graph, x, op, empty=2.0) * 3

    x = np.ones(shape, "float32")
    assert_close(rx.fuse(f)(x), f(x), exact=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_products_stay_in_the_range_of_their_type(weighted):
    graph = geom.Graph.from_edges(np.arange(6), np.array([0, 0, 0, 0, 2, 2]), n_nodes=6)
    x = np.array([1e30, 1e30, 1e-30, 1e-30, 0, 3], "float32")[:, None] * np.ones(2, "float32")
    weight = np.ones(6, "float32") if weighted else None

    def f(x):
        return geom.aggregate(graph, x, "mul", weight=weight, empty=5.0) * 2

    assert f(x)[:3, 0].tolist() == pytest.approx([2, 10, 0])
    fused, gradient = rx.fuse(f), grad(lambda x: rx.sum(f(x)))
    assert_close(fused(x), f(x), exact=True)
    assert_close(rx.fuse(gradient)(x), gradient(x))
    assert not fused.reasons


def test_products_write_their_activation_where_it_belongs(monkeypatch):
    asked = []
    monkeypatch.setattr(
        _library.blas, "matmul_into", lambda a, b, out, **options: asked.append(options) or out
    )

    def write(activation, dtype, keep=False):
        options = (("activation", activation), ("keep", keep))
        opaque = _library.Opaque(_activated_linear, (0, 1, 2), (None,) * 3, options)
        x, bias = np.ones((4, 4), dtype), np.ones(4, dtype)
        asked.clear()
        if opaque.into is None:
            return None
        found = opaque.into(x, x, bias, out=x)
        return found and asked[0]["epilogue"]

    assert write("relu", np.float32) == "relu"
    assert write("gelu_tanh", np.float16) == "gelu"
    # The others are no part of the library's product: GELU of float32 is too coarse there.
    assert write("gelu_tanh", np.float32) is write("silu", np.float16) is None
    assert write("relu", np.float64) is write("gelu_tanh", np.float16, keep=True) is None
