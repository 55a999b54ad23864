"""Kernels over the edges of rows, on the emulator: features, degrees, hubs."""

import functools
import re

import numpy as np
import pytest

from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from ..emulator import HAS_COMPILER, EmulatorBackend

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

DEGREES = {
    "few": [3, 0, 5],
    "one edge": [0, 1],
    "none": [0, 0, 0, 1],
    "many rows": list(np.random.default_rng(5).integers(0, 9, 40)),
    "hubs": [300, 0, 2, 3, 256] + [1] * 12,
    "dense": [90, 130, 111],
}
FEATURES = [1, 5, 8, 130]  # lanes along edges; packets of features, whole ones or not


class Edges:
    """Row pointers and sources of edges: nodes, and arrays."""

    def __init__(self, degrees, first):
        self.n_rows, self.n = len(degrees), int(np.sum(degrees))
        self.indptr = ir.input_node(first, "int64", (self.n_rows + 1,))
        self.src = ir.input_node(first + 1, "int32", (self.n,))
        self.inputs = [self.indptr, self.src]
        src = np.random.default_rng(3).integers(0, self.n_rows, self.n)
        self.arrays = [np.concatenate([[0], np.cumsum(degrees)]), src.astype("int32")]

    def softmax(self, logits):
        def spread(x):
            return ir.spread(x, self.indptr, self.n)

        top = spread(ir.segment_reduce("max", logits, self.indptr))
        e = ir.map_node("exp", ir.map_node("subtract", logits, top))
        return ir.map_node("divide", e, spread(ir.segment_reduce("sum", e, self.indptr)))


def messages(op, degrees, features, dtype):
    """Reduce weighted features of the neighbours, and apply a function."""
    edges = Edges(degrees, 2)
    x = ir.input_node(0, dtype, (edges.n_rows, features))
    weight = ir.input_node(1, dtype, (edges.n,))
    wide = ir.broadcast(ir.reshape(weight, (edges.n, 1)), (edges.n, features))
    m = ir.map_node("multiply", ir.gather(x, edges.src, 0), wide)
    out = ir.map_node("tanh", ir.segment_reduce(op, m, edges.indptr))
    return ir.Graph([x, weight, *edges.inputs], [out]), edges


def attention(degrees, features, dtype, heads=2):
    """Softmax over the edges of a row for each head, and the sum it weights."""
    edges = Edges(degrees, 3)
    x = ir.input_node(0, dtype, (edges.n_rows, heads, features))
    at_src, at_dst = (ir.input_node(i, dtype, (edges.n_rows, heads)) for i in (1, 2))
    logits = ir.map_node(
        "add", ir.gather(at_src, edges.src, 0), ir.spread(at_dst, edges.indptr, edges.n)
    )
    shape = (edges.n, heads, features)
    weights = ir.reshape(edges.softmax(logits), (edges.n, heads, 1))
    m = ir.map_node("multiply", ir.gather(x, edges.src, 0), ir.broadcast(weights, shape))
    out = ir.segment_reduce("sum", m, edges.indptr)
    return ir.Graph([x, at_src, at_dst, *edges.inputs], [out]), edges


def softmax(degrees, features, dtype):
    edges = Edges(degrees, 1)
    logits = ir.input_node(0, dtype, (edges.n, features))
    return ir.Graph([logits, *edges.inputs], [edges.softmax(logits)]), edges


def halves(degrees, features, dtype):
    """Gather halves, add them up in float32 with a weight of the edge and one of the feature."""
    edges = Edges(degrees, 3)
    x = ir.input_node(0, "float16", (edges.n_rows, features))
    weight = ir.input_node(1, "float32", (edges.n,))
    scale = ir.input_node(2, "float32", (features,))
    shape = (edges.n, features)
    m = ir.cast(ir.gather(x, edges.src, 0), "float32")
    m = ir.map_node("multiply", m, ir.broadcast(ir.reshape(weight, (edges.n, 1)), shape))
    m = ir.map_node("multiply", m, ir.broadcast(scale, shape))
    degree = ir.segment_reduce("sum", weight, edges.indptr)
    total = ir.segment_reduce("sum", m, edges.indptr)
    wide = ir.broadcast(ir.reshape(degree, (edges.n_rows, 1)), total.shape)
    return ir.Graph([x, weight, scale, *edges.inputs], [ir.map_node("add", total, wide)]), edges


def beside(degrees, features, dtype):
    """Put the neighbours' sum beside the features themselves."""
    edges = Edges(degrees, 1)
    x = ir.input_node(0, dtype, (edges.n_rows, features))
    total = ir.segment_reduce("sum", ir.gather(x, edges.src, 0), edges.indptr)
    return ir.Graph([x, *edges.inputs], [ir.concat([total, ir.map_node("tanh", x)], 1)]), edges


def of_rows(degrees, features, dtype):
    """Weigh features by what is the same for all edges of a row."""
    edges = Edges(degrees, 2)
    x = ir.input_node(0, dtype, (edges.n_rows, features))
    y = ir.input_node(1, dtype, (edges.n_rows,))
    weight = edges.softmax(ir.spread(y, edges.indptr, edges.n))
    wide = ir.broadcast(ir.reshape(weight, (edges.n, 1)), (edges.n, features))
    m = ir.map_node("multiply", ir.spread(x, edges.indptr, edges.n), wide)
    return ir.Graph([x, y, *edges.inputs], [ir.segment_reduce("sum", m, edges.indptr)]), edges


MAKERS = {
    **{op: functools.partial(messages, op) for op in ("sum", "mean", "max", "min")},
    "attention": attention,
    "softmax": softmax,
    "halves": halves,
    "beside": beside,
    "of rows": of_rows,
}


@functools.cache
def programs():
    backend = EmulatorBackend(seeds=(0, 1))
    found = {}
    for name, make in MAKERS.items():
        for which, degrees in DEGREES.items():
            for features in FEATURES:
                graph, edges = make(degrees, features, "float64")
                found[name, which, features] = Program(graph, backend), graph, edges
    return found


@pytest.mark.parametrize("which", DEGREES)
@pytest.mark.parametrize("name", MAKERS)
def test_one_kernel_gives_what_the_interpreter_does(name, which):
    rng = np.random.default_rng(1)
    for features in FEATURES:
        program, graph, edges = programs()[name, which, features]
        inputs = graph.inputs[:-2]
        arrays = [rng.standard_normal(n.shape).astype(n.dtype) for n in inputs] + edges.arrays
        if edges.n > 1 and name != "halves":
            assert [s.loops.kind for s in program.steps if s.loops] == ["segments"]
        (got,) = program(*arrays)
        with np.errstate(all="ignore"):
            (want,) = _interpret.run(graph, arrays, np)
        loose = {"rtol": 1e-4, "atol": 1e-4} if name == "halves" else {}
        assert_close(got, want, **loose)


@pytest.mark.parametrize("make", [attention, softmax])
def test_fast_kernels_divide_once_a_row(make):
    backend = EmulatorBackend(mode="fast", seeds=(0, 1))
    for features in (1, 8):
        graph, edges = make(DEGREES["hubs"], features, "float32")
        program = Program(graph, backend)
        rng = np.random.default_rng(1)
        arrays = [rng.standard_normal(n.shape).astype(n.dtype) for n in graph.inputs[:-2]]
        (want,) = _interpret.run(graph, [*arrays, *edges.arrays], np)
        assert_close(program(*arrays, *edges.arrays)[0], want, rtol=1e-5, atol=1e-5)
        (step,) = program.steps
        assert any(s.op == "divide" for s in step.loops.statements)
        assert not re.search(r"v\d+ / a", backend.source(step.loops))


def launch_of(degrees, features=8):
    graph, _ = messages("sum", degrees, features, "float32")
    (step,) = Program(graph, EmulatorBackend()).steps
    (launch,) = EmulatorBackend().generate(step.loops).launches
    numbers = {a.name: a.value for a in launch.arguments if a.kind == "number"}
    return launch, numbers


def test_hubs_have_blocks_of_their_own():
    few, numbers = launch_of([3, 0, 5])
    assert few.grid == (1, 1) and numbers["hub_blocks"] == 0
    launch, numbers = launch_of(DEGREES["hubs"])
    assert numbers["hub_blocks"] == len(DEGREES["hubs"]) and launch.name == few.name
    assert launch.grid[0] == numbers["hub_blocks"] + 3  # of 17 rows, 8 have a block
    many, numbers = launch_of([20] * 50_000)
    assert numbers["hub_blocks"] == 512 and many.name == few.name


@pytest.mark.parametrize("features", [1, 8])
def test_blocks_that_take_several_hubs(monkeypatch, features):
    monkeypatch.setattr("rtxarr.polygraph.codegen._segments._HUB_BLOCKS", 3)
    monkeypatch.setattr("rtxarr.polygraph.codegen._segments._HUB", 2)
    # More than a block looks at in one go, and none among some of them.
    degrees = [*DEGREES["hubs"], *([1, 2, 0] * 300), *([1] * 1500), 90]
    backend = EmulatorBackend(seeds=(0, 1))
    graph, edges = attention(degrees, features, "float64")
    program = Program(graph, backend)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(n.shape) for n in graph.inputs[:-2]] + edges.arrays
    (want,) = _interpret.run(graph, arrays, np)
    assert_close(program(*arrays)[0], want)


SHARES = [(4, 16), (8, 8), (3, 20), (1, 64), (5, 7), (2, 80), (3, 50), (2, 160), (33, 4)]


@functools.cache
def attentions():
    backend = EmulatorBackend(seeds=(0, 1))
    made = {}
    for heads, features in SHARES:
        for dtype in ("float32", "float16"):
            graph, edges = attention(DEGREES["hubs"], features, dtype, heads)
            made[heads, features, dtype] = Program(graph, backend), graph, edges
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("heads", "features"), SHARES)
def test_what_a_head_shares_is_computed_once(heads, features, dtype):
    program, graph, edges = attentions()[heads, features, dtype]
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(n.shape).astype(n.dtype) for n in graph.inputs[:-2]]
    (got,) = program(*arrays, *edges.arrays)
    (want,) = _interpret.run(graph, [*arrays, *edges.arrays], np)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    assert_close(got, want, **tolerance)
    apart = []  # not aligned, so that packets are not whole
    for x in arrays:
        memory = np.empty(x.size + 1, x.dtype)
        apart.append(memory[1:].reshape(x.shape))
        apart[-1][...] = x
    assert program(*apart, *edges.arrays)[0].tobytes() == got.tobytes()


def test_packets_of_features_are_whole_where_they_can_be():
    backend = EmulatorBackend()

    def packed(make, features):
        graph, _ = make(DEGREES["hubs"], features, "float32")
        (step,) = Program(graph, backend).steps
        kernel = backend.generate(step.loops)
        return kernel.packed, {size for _, size in kernel.alignments}

    assert packed(MAKERS["sum"], 128) == (True, {16})
    assert packed(MAKERS["sum"], 130) == (False, {16})
    assert packed(attention, 8) == (True, {16})
    assert packed(attention, 6)[0] is False  # a packet would be of two heads
