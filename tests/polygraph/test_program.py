"""Programs: what is fused, and that running the kernels gives what the interpreter does."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from rtxarr.polygraph import _interpret, _program
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from . import loops_reference
from .random_graphs import Maker


class Reference:
    """The back end that runs loops as they are written; what it allocates holds no zeros."""

    def fuses(self, op, dtype):
        return True

    def scan_refusal(self, scans, rows, cols):
        return ""

    def empty(self, shape, dtype):
        out = np.empty(shape, dtype)
        out.reshape(-1).view(np.uint8)[:] = 0xA5
        return out

    def build(self, loops):
        return lambda *arrays: loops_reference.run(loops, *arrays)


def run(graph, arrays, **options):
    """Run by kernels and by the interpreter; check that they agree; give the program."""
    program = Program(graph, Reference(), **options)
    ours = [np.array(a, copy=True) for a in arrays]
    theirs = [np.array(a, copy=True) for a in arrays]
    for got, want in zip(program(*ours), _interpret.run(graph, theirs, np), strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)
    return program


def kernels(program):
    return [(s.loops.kind, s.loops.rows, s.loops.cols) for s in program.steps if s.loops]


def rows_of(x, n):
    """Broadcast one value a row back to the shape of ``x``."""
    return ir.broadcast(ir.reshape(n, (*x.shape[:-1], 1)), x.shape)


def softmax(x):
    e = ir.map_node("exp", ir.map_node("subtract", x, rows_of(x, last("max", x))))
    return ir.map_node("divide", e, rows_of(x, last("sum", e)))


def last(op, x):
    return ir.reduce_node(op, x, (x.ndim - 1,))


def number(value, x):
    return ir.broadcast(ir.constant(value, x.dtype), x.shape)


def mean(x):
    total = last("sum", x)
    return ir.map_node("divide", total, number(x.shape[-1], total))


def normalized(x):
    d = ir.map_node("subtract", x, rows_of(x, mean(x)))
    variance = mean(ir.map_node("square", d))
    deviation = ir.map_node("sqrt", ir.map_node("add", variance, number(1e-5, variance)))
    return ir.map_node("divide", d, rows_of(x, deviation))


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_a_chain_is_one_kernel(rng):
    x = ir.input_node(0, "float32", (5, 7))
    y = ir.map_node("tanh", ir.map_node("add", ir.map_node("multiply", x, x), number(0.5, x)))
    program = run(ir.Graph([x], [y]), [rng.standard_normal((5, 7), "f4")])
    assert kernels(program) == [("map", 1, 35)]


@pytest.mark.parametrize("function", [softmax, normalized])
def test_a_row_is_reduced_and_used_in_one_kernel(rng, function):
    x = ir.input_node(0, "float32", (3, 4, 10))
    program = run(ir.Graph([x], [function(x)]), [rng.standard_normal((3, 4, 10), "f4")])
    assert kernels(program) == [("rows", 12, 10)]


def test_group_norm_with_what_follows_is_one_kernel(rng):
    shape = (2, 8, 3, 5)
    x, weight = ir.input_node(0, "float32", shape), ir.input_node(1, "float32", (8,))
    y = ir.reshape(normalized(ir.reshape(x, (2, 4, 30))), shape)
    y = ir.map_node("multiply", y, ir.broadcast(ir.reshape(weight, (1, 8, 1, 1)), shape))
    y = ir.map_node("multiply", y, ir.map_node("sigmoid", y))
    arrays = [rng.standard_normal(shape, "f4"), rng.standard_normal(8, "f4")]
    assert kernels(run(ir.Graph([x, weight], [y]), arrays)) == [("rows", 8, 30)]


def test_a_map_goes_into_a_reduction_of_columns(rng):
    x = ir.input_node(0, "float32", (6, 10))
    total = ir.reduce_node("sum", ir.map_node("exp", x), (0,))
    program = run(ir.Graph([x], [total]), [rng.standard_normal((6, 10), "f4")])
    assert kernels(program) == [("columns", 10, 6)]


def test_few_long_rows_are_not_followed_by_maps(rng):
    x = ir.input_node(0, "float32", (2, 10000))
    program = run(ir.Graph([x], [softmax(x)]), [rng.standard_normal((2, 10000), "f4")])
    assert [k[0] for k in kernels(program)] == ["rows", "rows", "map"]


def test_results_over_the_same_elements_share_a_kernel(rng):
    x = ir.input_node(0, "float32", (20,))
    graph = ir.Graph([x], [ir.map_node("sin", x), ir.map_node("cos", x)])
    assert len(kernels(run(graph, [rng.standard_normal(20, "f4")]))) == 1


def test_a_result_that_is_also_used_is_stored_on_the_way(rng):
    x = ir.input_node(0, "float32", (4, 6))
    e = ir.map_node("exp", x)
    graph = ir.Graph([x], [e, ir.map_node("tanh", e)])
    assert kernels(run(graph, [rng.standard_normal((4, 6), "f4")])) == [("map", 1, 24)]


def test_no_kernel_waits_for_itself(rng):
    """A result stored on the way may not be needed by what its kernel waits for."""
    x = ir.input_node(0, "float32", (4, 4))
    e = ir.map_node("exp", x)
    product = ir.matmul(e, e)
    graph = ir.Graph([x], [ir.map_node("add", e, product)])
    run(graph, [rng.standard_normal((4, 4), "f4")])


def test_updates_are_written_where_they_belong(rng):
    p, g = ir.input_node(0, "float32", (10,)), ir.input_node(1, "float32", (10,))
    m = ir.map_node("add", p, g)
    graph = ir.Graph([p, g], [], [(0, m), (1, ir.map_node("multiply", m, g))])
    program = run(graph, [rng.standard_normal(10, "f4"), rng.standard_normal(10, "f4")])
    assert sorted(program.in_place.values()) == [0, 1]


def test_everything_is_read_before_an_update_is_written(rng):
    x = ir.input_node(0, "float32", (8,))
    shifted = ir.concat([ir.slice_node(x, (7,), (1,), (1,)), ir.slice_node(x, (0,), (1,), (7,))], 0)
    run(ir.Graph([x], [ir.slice_node(x, (2,), (1,), (3,))], [(0, shifted)]), [rng.random(8, "f4")])


@pytest.mark.parametrize("kind", ["shifted", "exchanged", "reversed"])
def test_inputs_that_become_one_another_are_copied_where_they_must(rng, kind):
    x, y, z = (ir.input_node(i, "float32", (6,)) for i in range(3))
    turned = ir.slice_node(y, (5,), (-1,), (6,))
    total = ir.map_node("add", y, ir.broadcast(ir.reduce_node("sum", y, (0,)), (6,)))
    updates = {
        "shifted": [(1, total), (0, turned)],
        "exchanged": [(0, turned), (1, x)],
        "reversed": [(1, turned)],
    }[kind]
    program = run(ir.Graph([x, y, z], [], updates), [rng.standard_normal(6, "f4") for _ in "xyz"])
    assert program.text.count("copy(") == {"shifted": 0, "exchanged": 2, "reversed": 1}[kind]


def test_inputs_that_overlap_are_read_before_any_is_written(rng):
    x, y = ir.input_node(0, "float32", (7,)), ir.input_node(1, "float32", (7,))
    graph = ir.Graph([x, y], [], [(0, ir.map_node("add", x, y))])
    program = Program(graph, Reference(), disjoint=False)
    memory = rng.random(8, "f4")
    want = memory.copy()
    want[1:] = want[1:] + want[:-1]
    program(memory[1:], memory[:-1])
    assert_close(memory, want)


def test_strided_inputs_are_read_in_place(rng):
    base = rng.standard_normal((6, 8), "f4")
    x = ir.input_node(0, "float32", (4, 3))
    view = base[::2, ::-2].T
    program = Program(ir.Graph([x], [softmax(x)]), Reference(), strides=[(-2, 16)])
    (got,) = program(view)
    assert_close(got, _interpret.run(ir.Graph([x], [softmax(x)]), [view], np)[0])


def test_a_number_is_a_parameter(rng):
    x, a = ir.input_node(0, "float32", (5,)), ir.input_node(1, "float32", ())
    graph = ir.Graph([x, a], [ir.map_node("multiply", x, ir.broadcast(a, (5,)))], scalars=[1])
    program = Program(graph, Reference())
    assert [b.is_scalar for b in program.steps[0].loops.buffers] == [False, True, False]
    array = rng.standard_normal(5, "f4")
    assert_close(program(array, np.float32(2))[0], 2 * array)


@pytest.mark.parametrize("first", ["array", "number"])
def test_numbers_are_put_where_the_arrays_are_for_what_is_no_kernel(first, monkeypatch):
    """As CuPy's arrays need it, which take none of NumPy's."""
    places = [0, 1] if first == "array" else [1, 0]
    x, n = (ir.input_node(k, "float64", s) for k, s in zip(places, [(3,), ()], strict=True))
    two = ir.broadcast(ir.constant(2, np.float64), (3,))
    node = ir.map_node("add", ir.map_node("multiply", x, ir.broadcast(n, (3,))), two)
    inputs = (x, n) if first == "array" else (n, x)
    program = Program(ir.Graph(inputs, [node], scalars=[places[1]]), Nothing())
    likes, number = [], _program._number

    def noted(value, like):
        likes.append(like)
        return number(value, like)

    (name,) = [k for k, v in program._values.items() if v is number]
    monkeypatch.setitem(program._values, name, noted)
    array, five = np.array([1.0, 2.0, 3.0]), np.float64(5)
    (got,) = program(*((array, five) if first == "array" else (five, array)))
    np.testing.assert_array_equal(got, [7, 12, 17])
    assert len(likes) == 1 and likes[0] is array
    assert f".array(x{places[0]})" in program.text  # the constant too

    made = SimpleNamespace(full=lambda shape, value, dtype: (shape, value, dtype))
    monkeypatch.setattr(_program, "namespace", lambda like: made)
    assert number(five, object()) == ((), five, np.dtype("f8"))
    assert number(five, array) is five


class Nothing:
    """A back end without kernels."""

    build = empty = None

    def fuses(self, op, dtype):
        return False


def test_empty_arrays_are_left_to_the_interpreter():
    x = ir.input_node(0, "float32", (0, 3))
    total = ir.reduce_node("sum", ir.map_node("exp", x), (0,))
    run(ir.Graph([x], [total]), [np.empty((0, 3), "f4")])


@pytest.mark.parametrize("seed", range(300))
def test_random_graphs(seed):
    maker = Maker(seed, dtype="float64", n_steps=random.Random(seed).randint(3, 25))
    run(maker.graph(), maker.arrays())


class Edges:
    """A small graph: input nodes for its row pointers and sources, and their arrays."""

    def __init__(self, rng, first, n_rows=5):
        degrees = np.array([0, 3, 1, 7, 2])[:n_rows]
        self.n = int(degrees.sum())
        self.n_rows = n_rows
        self.indptr = ir.input_node(first, "int64", (n_rows + 1,))
        self.src = ir.input_node(first + 1, "int32", (self.n,))
        self.arrays = [
            np.concatenate([[0], np.cumsum(degrees)]),
            rng.integers(0, n_rows, self.n, dtype="i4"),
        ]
        self.inputs = [self.indptr, self.src]


def edge_softmax(logits, edges):
    top = ir.segment_reduce("max", logits, edges.indptr)
    e = ir.map_node("exp", ir.map_node("subtract", logits, ir.spread(top, edges.indptr, edges.n)))
    total = ir.segment_reduce("sum", e, edges.indptr)
    return ir.map_node("divide", e, ir.spread(total, edges.indptr, edges.n))


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_gather_map_reduce_and_what_follows_are_one_kernel(rng, op):
    x, edges = ir.input_node(0, "float32", (5, 6)), Edges(rng, 2)
    weight = ir.input_node(1, "float32", (edges.n,))
    wide = ir.broadcast(ir.reshape(weight, (edges.n, 1)), (edges.n, 6))
    messages = ir.map_node("multiply", ir.gather(x, edges.src, 0), wide)
    out = ir.map_node("tanh", ir.segment_reduce(op, messages, edges.indptr))
    graph = ir.Graph([x, weight, *edges.inputs], [out])
    arrays = [rng.standard_normal((5, 6), "f4"), rng.standard_normal(edges.n, "f4"), *edges.arrays]
    program = run(graph, arrays)
    assert kernels(program) == [("segments", 5, edges.n)]
    assert program.steps[0].loops.features == 6


def test_edges_are_gone_over_for_the_features_that_need_them(rng):
    x, y = (ir.input_node(i, "float32", (5, n)) for i, n in enumerate((6, 4)))
    edges = Edges(rng, 2)
    heard = ir.segment_reduce("sum", ir.gather(x, edges.src, 0), edges.indptr)
    graph = ir.Graph([x, y, *edges.inputs], [ir.concat([heard, y], 1)])
    arrays = [rng.standard_normal((5, n), "f4") for n in (6, 4)]
    program = run(graph, [*arrays, *edges.arrays])
    assert kernels(program) == [("segments", 5, edges.n), ("map", 1, 50)]
    assert program.steps[0].loops.features == 6


@pytest.mark.parametrize(("shape", "axis"), [((5, 6), 1), ((5, 2, 3), 1), ((5, 2, 3), 2)])
def test_a_kernel_over_edges_stores_what_is_put_beside_its_sums(rng, shape, axis):
    x, edges = ir.input_node(0, "float32", shape), Edges(rng, 1)
    heard = ir.map_node("tanh", ir.segment_reduce("sum", ir.gather(x, edges.src, 0), edges.indptr))
    parts = [heard, x, ir.map_node("multiply", x, heard)]
    graph = ir.Graph([x, *edges.inputs], [ir.concat(parts, axis)])
    program = run(graph, [rng.standard_normal(shape, "f4"), *edges.arrays])
    assert kernels(program) == [("segments", 5, edges.n)]
    assert program.steps[0].loops.features == 6


def test_sums_that_are_put_together_and_needed_elsewhere(rng):
    x, edges = ir.input_node(0, "float32", (5, 6)), Edges(rng, 1)
    heard = ir.segment_reduce("sum", ir.gather(x, edges.src, 0), edges.indptr)
    again = ir.segment_reduce("max", ir.gather(heard, edges.src, 0), edges.indptr)
    graph = ir.Graph([x, *edges.inputs], [ir.concat([heard, again], 1), heard])
    run(graph, [rng.standard_normal((5, 6), "f4"), *edges.arrays])


def test_attention_over_edges_is_one_kernel(rng):
    heads, features = 2, 3
    x, edges = ir.input_node(0, "float32", (5, heads, features)), Edges(rng, 3)
    score_src, score_dst = (ir.input_node(i, "float32", (5, heads)) for i in (1, 2))
    logits = ir.map_node(
        "add", ir.gather(score_src, edges.src, 0), ir.spread(score_dst, edges.indptr, edges.n)
    )
    weights = edge_softmax(logits, edges)
    shape = (edges.n, heads, features)
    wide = ir.broadcast(ir.reshape(weights, (edges.n, heads, 1)), shape)
    messages = ir.map_node("multiply", ir.gather(x, edges.src, 0), wide)
    out = ir.segment_reduce("sum", messages, edges.indptr)
    graph = ir.Graph([x, score_src, score_dst, *edges.inputs], [out])
    arrays = [rng.standard_normal((5, heads, features), "f4")]
    arrays += [rng.standard_normal((5, heads), "f4") for _ in range(2)] + edges.arrays
    program = run(graph, arrays)
    assert kernels(program) == [("segments", 5, edges.n)]


def test_rows_that_edges_get_and_that_are_a_result(rng):
    """The kernel of maps that stores them gets rows by them: their place moves with it."""
    x, edges = ir.input_node(0, "float32", (5, 4)), Edges(rng, 2)
    y = ir.input_node(1, "float32", (edges.n, 4))
    rows = ir.spread(x, edges.indptr, edges.n)
    graph = ir.Graph([x, y, *edges.inputs], [ir.map_node("multiply", rows, y), rows])
    arrays = [rng.standard_normal(shape, "f4") for shape in ((5, 4), (edges.n, 4))]
    program = run(graph, [*arrays, *edges.arrays])
    assert kernels(program) == [("segments", 5, edges.n)]


def test_a_softmax_over_edges_alone_is_one_kernel(rng):
    edges = Edges(rng, 1)
    logits = ir.input_node(0, "float32", (edges.n, 4))
    graph = ir.Graph([logits, *edges.inputs], [edge_softmax(logits, edges)])
    program = run(graph, [rng.standard_normal((edges.n, 4), "f4"), *edges.arrays])
    assert kernels(program) == [("segments", 5, edges.n)]


def test_segments_of_two_graphs_are_two_kernels(rng):
    x, one, two = ir.input_node(0, "float32", (5, 6)), Edges(rng, 1), Edges(rng, 3)
    once = ir.segment_reduce("sum", ir.gather(x, one.src, 0), one.indptr)
    again = ir.segment_reduce("sum", ir.gather(once, two.src, 0), two.indptr)
    graph = ir.Graph([x, *one.inputs, *two.inputs], [again])
    program = run(graph, [rng.standard_normal((5, 6), "f4"), *one.arrays, *two.arrays])
    assert len(kernels(program)) == 2


def test_a_cheap_node_is_computed_in_each_kernel_that_needs_it(rng):
    """The normalized rows and a sum over their columns: the rows are not kept in memory."""
    x, g = (ir.input_node(i, "float32", (6, 8)) for i in range(2))
    y = normalized(x)
    column = ir.reduce_node("sum", ir.map_node("multiply", y, g), (0,))
    graph = ir.Graph([x, g], [ir.map_node("multiply", y, g), column])
    program = run(graph, [rng.standard_normal((6, 8), "f4") for _ in range(2)])
    assert kernels(program) == [("rows", 6, 8), ("columns", 8, 6)]
    kept = [n.shape for s in program.steps for n in s.results]
    assert sorted(kept) == [(6,), (6,), (6, 8), (8,)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ir.map_node("multiply", x, ir.broadcast(ir.constant(1, "f4"), x.shape)),
        lambda x: ir.map_node("negative", ir.map_node("negative", x)),
        lambda x: ir.reshape(ir.map_node("negative", ir.map_node("negative", x)), (12,)),
    ],
    ids=["times one", "twice negative", "view"],
)
def test_results_that_turn_out_to_be_inputs_are_copies(function):
    x = ir.input_node(0, "float32", (3, 4))
    array = np.ones((3, 4), "f4")
    other = ir.map_node("exp", x)
    outs = Program(ir.Graph([x], [function(x), other, function(other), other]), Reference())(array)
    assert not np.may_share_memory(outs[0], array)
    assert not np.may_share_memory(outs[1], outs[2])
    assert outs[1] is outs[3]


def test_one_value_repeated_is_written_out():
    x = ir.input_node(0, "float32", (4,))
    y = ir.map_node("multiply", *[ir.broadcast(n, (3, 4)) for n in (x, ir.constant(1, "f4"))])
    (out,) = Program(ir.Graph([x], [y]), Reference())(np.ones(4, "f4"))
    assert out.strides == (16, 4)


def test_what_lets_go_of_memory_comes_first():
    """As in a backward pass: what needs a large array comes before the next but one."""
    x = ir.input_node(0, "float64", (100, 100))
    large, totals = [x], []
    for _ in range(5):
        large.append(ir.call(_next, (large[-1],), (), [(x.dtype, x.shape)])[0])
        totals.append(ir.call(_total, (large[-1],), (), [(x.dtype, (100,))])[0])
    program = Program(ir.Graph([x], totals[::-1]), Reference())
    calls = [step.results[0].attrs[0] for step in program.steps if step.name.startswith("call")]
    places = [i for i, function in enumerate(calls) if function is _total]
    assert all(place <= 2 * i + 2 for i, place in enumerate(places))
    assert_close(program(np.ones((100, 100)))[0], np.full(100, 600.0))


def _next(x):
    return (x + 1,)


def _total(x):
    return (x.sum(axis=0),)


def test_rows_that_are_rolled_are_read_without_divisions_by_the_parts(rng):
    x = ir.input_node(0, "float32", (6, 10))
    parts = ir.slice_node(x, (0, 1), (1, 1), (6, 9)), ir.slice_node(x, (0, 0), (1, 1), (6, 1))
    graph = ir.Graph([x], [ir.map_node("tanh", ir.concat(parts, 1))])
    program = run(graph, [rng.standard_normal((6, 10), "f4")])
    (step,) = program.steps
    loads = [s.args[1] for s in step.loops.phases[0].body if s.op == "load"]
    assert len(loads) == 2
    assert all("divisor=9)" not in repr(place) for place in loads)
