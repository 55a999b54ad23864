"""Rewrites: what they make of a graph, and that no bit of the result changes."""

import itertools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._passes import simplify, sums_in_parts

from .random_graphs import Maker

X = ir.input_node(0, "float32", (3, 4))


def number(value, like=X):
    return ir.broadcast(ir.constant(value, like.dtype), like.shape)


def simplified(node):
    (out,) = simplify(ir.Graph([X], [node])).outputs
    return out


@pytest.mark.parametrize(
    "node",
    [
        ir.map_node("multiply", X, number(1)),
        ir.map_node("multiply", number(1), X),
        ir.map_node("divide", X, number(1)),
        ir.map_node("subtract", X, number(0.0)),
        ir.map_node("add", X, number(-0.0)),
        ir.map_node("positive", X),
        ir.map_node("negative", ir.map_node("negative", X)),
        ir.map_node("where", ir.map_node("less", X, X), X, X),
        ir.cast(ir.cast(X, "float64"), "float32"),
        ir.slice_node(ir.slice_node(X, (2, 3), (-1, -1), (3, 4)), (2, 3), (-1, -1), (3, 4)),
    ],
    ids=lambda node: node.op,
)
def test_what_changes_nothing_is_dropped(node):
    assert simplified(node) is X


@pytest.mark.parametrize(
    "node",
    [
        ir.map_node("add", X, number(0.0)),  # -0 + 0 is 0
        ir.map_node("subtract", X, number(-0.0)),
        ir.map_node("subtract", number(0.0), X),
        ir.map_node("divide", number(1), X),
        ir.map_node("multiply", X, number(0)),  # NaN
        ir.cast(ir.cast(X, "float16"), "float32"),
        ir.cast(ir.cast(X, "int32"), "float32"),
        ir.cast(ir.cast(ir.input_node(0, "float16", (3, 4)), "float32"), "float16"),  # it rounds
    ],
    ids=lambda node: node.op,
)
def test_what_may_change_a_bit_stays(node):
    leaves = [n for n in ir.topological([node]) if n.op == "input"]
    assert simplify(ir.Graph(leaves, [node])).outputs == (node,)


def test_numbers_are_folded():
    two = ir.map_node("add", number(1.5), number(0.5))
    assert simplified(ir.map_node("multiply", X, two)) is ir.map_node("multiply", X, number(2.0))


def test_maps_come_before_broadcasts():
    row = ir.input_node(1, "float32", (3, 1))
    wide = ir.broadcast(row, (3, 4))
    root = ir.map_node("sqrt", ir.map_node("add", wide, number(1e-5)))
    small = ir.broadcast(ir.constant(1e-5, "float32"), (3, 1))
    want = ir.broadcast(ir.map_node("sqrt", ir.map_node("add", row, small)), (3, 4))
    (out,) = simplify(ir.Graph([X, row], [root])).outputs
    assert out is want


@pytest.mark.parametrize(("op", "dtype"), [("max", "float32"), ("sum", "int64")])
def test_a_reduction_of_one_element_is_none(op, dtype):
    x = ir.input_node(0, dtype, (3, 1))
    (out,) = simplify(ir.Graph([x], [ir.reduce_node(op, x, (1,))])).outputs
    assert out is ir.reshape(x, (3,))


def test_a_sum_of_one_element_has_no_negative_zero():
    x = ir.input_node(0, "float32", (3, 1))
    graph = simplify(ir.Graph([x], [ir.reduce_node("sum", x, (1,))]))
    assert all(n.op != "sum" for n in graph.nodes())
    (out,) = _interpret.run(graph, [np.full((3, 1), -0.0, "f4")], np)
    assert not np.signbit(out).any()


@pytest.mark.parametrize("n", [1, 32, 33, 200, 1100])
@pytest.mark.parametrize("axis", [0, 1])
def test_many_arrays_are_joined_a_few_at_a_time(n, axis):
    x = ir.input_node(0, "float32", (2, 3))
    parts = [ir.map_node("add", x, ir.broadcast(ir.constant(i, "f4"), (2, 3))) for i in range(n)]
    graph = ir.Graph([x], [ir.concat(parts, axis)])
    simple = simplify(graph)
    joins = [node for node in simple.nodes() if node.op == "concat"]
    assert max((len(node.src) for node in joins), default=0) <= 32
    assert len(joins) <= n / 16
    values = [np.arange(6, dtype="f4").reshape(2, 3)]
    want = _interpret.run(graph, values, np)[0]
    assert _interpret.run(simple, values, np)[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("seed", range(150))
def test_random_graphs_keep_their_bits(seed, dtype):
    maker = Maker(seed, dtype=dtype, n_steps=20)
    graph = maker.graph()
    want = _interpret.run(graph, maker.arrays(), np)
    for a, b in zip(_interpret.run(simplify(graph), maker.arrays(), np), want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


SHAPES = [(2, 4, 6), (3, 4, 300), (5, 3, 4, 7), (9, 3, 1, 40), (2, 1, 300), (130, 2, 140)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_sums_over_any_axes_have_numpys_bits(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    for n in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), n):
            fused = rx.fuse(lambda x: rx.sum(x * 3, axis=axes))  # noqa: B023
            np.testing.assert_array_equal(fused(x), np.sum(x * 3, axis=axes))


def test_only_sums_that_round_are_taken_apart():
    for dtype in ("int64", "float32"):
        x = ir.input_node(0, dtype, (2, 3, 4))
        for op in ("sum", "max"):
            graph = ir.Graph([x], [ir.reduce_node(op, x, (0, 2))])
            ops = [n.op for n in sums_in_parts(graph).nodes()]
            assert ops.count(op) == 1 + (dtype == "float32" and op == "sum")
