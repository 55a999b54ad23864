"""Programs of thousands of operations, and values with many users: no walk may go over them anew.

Each would take forever, or too deep a recursion, if one did.
"""

import sys

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _interpret, load
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._call_text import some_overlap
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._lower import _Lowering
from rtxarr.polygraph._passes import simplify
from rtxarr.polygraph._program import Program
from rtxarr.polygraph._schedule import _MAX_TERMS, Scheduler
from rtxarr.polygraph.codegen import _cpu, _dialects
from rtxarr.polygraph.codegen._kernels import generate
from rtxarr.testing import assert_close

N_DOUBLINGS = 60  # 2**60 ways lead from the result to the argument


class Texts:
    """A back end that writes kernels in all its languages and runs none."""

    empty = staticmethod(np.empty)

    def __init__(self):
        self.statements = []

    def fuses(self, op, dtype):
        return _cpu.fuses(op, np.dtype(dtype))

    def build(self, loops):
        self.statements.append(len(loops.statements))
        for strict in (True, False):
            assert generate(loops, _dialects.CUDA, strict=strict).text
            assert CpuBackend("strict" if strict else "fast").source(loops)
        return lambda *arrays: None


def doubled(x, n=N_DOUBLINGS):
    for _ in range(n):
        x = x + 0.5 * x
    return x


def doubled_nodes(x, n, op="add"):
    for _ in range(n):
        x = ir.map_node(op, x, ir.map_node("multiply", x, x))
    return x


def vector(n=37):
    return np.linspace(0.1, 1, n, dtype=np.float32)


# ----------------------------------------------------------------------------- many users


@pytest.mark.parametrize("op", ["add", "pow"])  # in one loop, and with calls of NumPy's
@pytest.mark.parametrize("kind", ["map", "rows", "columns"])
def test_text_of_values_with_two_users_each(kind, op):
    x = ir.input_node(0, "float32", (16, 24))
    y = doubled_nodes(x, N_DOUBLINGS, op)
    if kind != "map":
        axis = 1 if kind == "rows" else 0
        top = ir.reduce_node("max", y, [axis])
        kept = ir.reshape(top, (16, 1) if axis else (1, 24))
        y = ir.map_node("subtract", y, ir.broadcast(kept, x.shape))
    backend = Texts()
    Program(ir.Graph([x], [y]), backend)
    assert max(backend.statements) < 20 * N_DOUBLINGS


def test_text_of_segments_of_values_with_two_users_each():
    x = ir.input_node(0, "float32", (10, 4))
    indices = ir.input_node(1, "int64", (50,))
    indptr = ir.input_node(2, "int64", (11,))
    edges = doubled_nodes(ir.gather(x, indices, 0), 30)
    y = doubled_nodes(ir.segment_reduce("sum", edges, indptr), 30)
    backend = Texts()
    Program(ir.Graph([x, indices, indptr], [y]), backend)
    assert max(backend.statements) < 1000


def test_each_value_is_lowered_once(monkeypatch):
    made = []
    of_one = _Lowering._made

    def counted(self, *wanted):
        made.append(wanted)
        return of_one(self, *wanted)

    monkeypatch.setattr(_Lowering, "_made", counted)
    x = ir.input_node(0, "float32", (37,))
    Program(ir.Graph([x], [doubled_nodes(x, N_DOUBLINGS)]), Texts())
    assert len(made) == 2 * N_DOUBLINGS + 1


def test_values_with_two_users_each_in_fuse_and_jit():
    x = vector()
    for f in (rx.fuse(doubled), rx.fuse(doubled, mode="fast"), rx.jit(doubled)):
        assert_close(f(x), doubled(x))


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_gradients_of_values_with_two_users_each(mode):
    def gradient(f):
        x = rx.Tensor(vector(), requires_grad=True)
        rx.sum(f(x)).backward()
        return x.grad

    assert_close(gradient(rx.fuse(doubled, mode=mode)), gradient(doubled))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: rx.where(x > 0.5, x, -x) * 0.9,
        lambda x: rx.concat([x[:5], x[5:]]),
        lambda x: rx.concat([x[20:] * 0.5, x[:20]]),
        lambda x: rx.take(x, np.arange(37)[::-1].copy(), axis=0) * 0.5 + x,
        lambda x: x[::-1] - 0.5 * x,
    ],
    ids=["where", "parts", "moved parts", "gather", "flip"],
)
def test_repeated_views_and_joins(step):
    def f(x):
        for _ in range(N_DOUBLINGS):
            x = step(x)
        return x

    assert_close(rx.fuse(f)(vector()), f(vector()), exact=True)


def test_gathers_of_gathers():
    index = np.random.default_rng(0).permutation(37)

    def f(x, index):
        for _ in range(N_DOUBLINGS):
            x = rx.take(x, index, axis=0)
            index = rx.take(index, index, axis=0)
        return x

    assert_close(rx.fuse(f)(vector(), index), f(vector(), index), exact=True)


def test_calls_that_look_at_calls():
    """What an array may share memory with is looked for through all sources of opaque calls."""
    x = ir.input_node(0, "float32", (4,))
    y = x
    for _ in range(N_DOUBLINGS):
        (y,) = ir.call(_added, (y, y), (), [("float32", (4,))])
    new = ir.map_node("negative", y)
    program = Program(ir.Graph([x], [y], [(0, new)]), CpuBackend())
    start = np.zeros(4, np.float32)
    (out,) = program(start)
    assert_close(out, np.zeros(4, np.float32))


def _added(a, b):
    return (a + b,)


# ---------------------------------------------------------------------------------- places


def test_places_stay_short_enough_to_say():
    """Shapes that do not fit one another make an index grow by a factor with each transpose."""
    shapes = [(6, 385), (10, 231), (14, 165), (22, 105), (15, 154), (21, 110)]

    def f(x):
        for i in range(40):
            x = rx.permute_dims(rx.reshape(x + 1.5, shapes[i % 6]), (1, 0))
        return x

    x = np.arange(2310, dtype=np.float32)
    assert_close(rx.fuse(f)(x), f(x), exact=True)
    node = ir.input_node(0, "float32", (2310,))
    for i in range(40):
        node = ir.permute(ir.reshape(ir.map_node("negative", node), shapes[i % 6]), (1, 0))
    for group in Scheduler(ir.Graph([], [node]), CpuBackend()).run():
        for places in group.need.values():
            assert all(ix.length(place) <= 6 * _MAX_TERMS for place in places)


def test_length_of_an_index():
    i = ix.symbol("i", 100)
    assert ix.length(ix.number(7)) == 0
    assert ix.length(ix.add(ix.mul(i, 2), ix.number(1))) == 1
    x = ix.add(ix.mul(ix.mod(i, 7), 20), ix.floordiv(i, 7))
    assert ix.length(x) == 4


# ---------------------------------------------------------------------------------- chains


def chained(x, n):
    for i in range(n):
        x = (x * 1.01, x + 0.1, -x, abs(x))[i % 4]
    return x


@pytest.fixture
def shallow():
    """Let calls go no deeper than what a chain of a kernel's 160 members must do without."""
    limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 120)
    yield
    sys.setrecursionlimit(limit)


def test_a_chain_of_5000_operations():
    x = vector()
    for f in (rx.fuse(chained), rx.jit(chained)):
        with np.errstate(over="ignore"):
            assert_close(f(x, 5000), chained(x, 5000), exact=True)


def test_the_gradient_of_a_chain_of_2000_operations():
    def gradient(f):
        x = rx.Tensor(vector(), requires_grad=True)
        rx.sum(f(x, 2000)).backward()
        return x.grad

    assert_close(gradient(rx.fuse(chained)), gradient(chained), exact=True)


def test_a_chain_of_2000_views():
    def f(x):
        for _ in range(2000):
            x = rx.permute_dims(x, (1, 0))[::-1]
        x[0] = 7
        return x * 2

    x = np.arange(9.0).reshape(3, 3)
    got, want = x.copy(), x.copy()
    assert_close(rx.fuse(f)(got), f(want), exact=True)
    assert_close(got, want, exact=True)


@pytest.mark.parametrize("op", ["sigmoid", "add", "tanh", "where"])
def test_kernels_need_no_deep_calls(op, shallow):
    x = y = ir.input_node(0, "float32", (64,))
    for _ in range(150):
        if op == "add":
            y = ir.map_node(op, x, y)
        elif op == "where":
            y = ir.map_node(op, ir.map_node("less", x, y), x, y)
        else:
            y = ir.map_node(op, y)
    graph = ir.Graph([x], [y])
    Program(graph, Texts())
    program = Program(graph, CpuBackend())
    (want,) = _interpret.run(graph, [vector(64)], np)
    assert_close(program(vector(64))[0], want, exact=op != "sigmoid")


def test_walks_of_a_graph_need_no_deep_calls(shallow):
    x = ir.input_node(0, "float32", (3,))
    y = doubled_nodes(x, 3000)
    graph = ir.Graph([x], [y])
    assert len(graph.nodes()) == 6001
    assert ir.text(graph).count("\n") == 6001
    assert len(simplify(graph).nodes()) == 6001
    assert repr(y) == "<add float32[3]>"
    assert ir.cut([x], [y])[1] == [y]


# ------------------------------------------------------------------------------- many kernels


def test_order_of_many_kernels():
    """Of those that can be next comes first what lets go of memory, then the graph's first."""
    x = ir.input_node(0, "float32", (8, 8))
    parts = [ir.matmul(x, ir.broadcast(ir.constant(i, "float32"), (8, 8))) for i in range(500)]
    total = parts[0]
    for part in parts[1:]:
        total = ir.matmul(total, part)
    groups = Scheduler(ir.Graph([x], [total]), CpuBackend()).run()
    order = [next(iter(g.outputs)) for g in groups if next(iter(g.outputs)).op == "matmul"]
    assert len(order) == 999
    # Each product is taken in as soon as it is there: no more than two wait.
    waiting = most = 0
    for node in order:
        waiting += 1 - sum(source.op == "matmul" for source in node.src)
        most = max(most, waiting)
    assert most <= 2


def test_many_arrays_that_are_written():
    """Whether they overlap is one line of the call's text, not one for each pair."""
    rng = np.random.default_rng(0)

    def make():
        memory = np.zeros(4000, np.float32)
        return [memory[5 * i : 5 * i + 5] for i in range(600)], memory

    def f(found, x, y):
        for w in found:
            w[...] = w * 0.5 + x
        return y + 1

    x, y = rng.standard_normal((2, 5)).astype(np.float32)
    (ours, memory), (theirs, expected) = make(), make()
    fused = rx.fuse(lambda x, y: f(ours, x, y))
    for _ in range(2):
        assert_close(fused(x, y), f(theirs, x, y), exact=True)
        assert_close(memory, expected, exact=True)
    # An argument that is the memory of one that is written is read anew after each write.
    assert_close(fused(memory[2:7], y), f(theirs, expected[2:7], y), exact=True)
    assert_close(memory, expected, exact=True)


@pytest.mark.parametrize(
    ("written", "others", "meet"),
    [
        ([slice(0, 4), slice(4, 8)], [slice(8, 12), slice(8, 10)], False),
        ([slice(0, 4), slice(3, 8)], [], True),
        ([slice(0, 4)], [slice(3, 5)], True),
        ([slice(8, 3, -1)], [slice(0, 4)], False),
        ([slice(8, 3, -1)], [slice(0, 5)], True),
        ([slice(5, 7)], [slice(0, 20), slice(0, 1)], True),
        ([slice(0, 20), slice(25, 30)], [slice(21, 23), slice(2, 2)], False),
        ([slice(0, 20), slice(25, 30)], [slice(29, 30)], True),
    ],
)
def test_memory_that_overlaps(written, others, meet):
    x = np.zeros(30)
    of = [[x[s] for s in part] for part in (written, others)]
    pairs = [(a, b) for i, a in enumerate(of[0]) for b in (*of[0][i + 1 :], *of[1])]
    assert any(np.may_share_memory(a, b) for a, b in pairs) is meet
    assert some_overlap(*of) is meet


def test_explanation_of_many_steps(monkeypatch):
    walks = []
    topological = ir.topological
    monkeypatch.setattr(ir, "topological", lambda *a: walks.append(a) or topological(*a))

    def f(x):
        for _ in range(200):
            x = rx.permute_dims(rx.matmul(x, x), (1, 0))
        return x

    fused = rx.fuse(f)
    fused(np.eye(3))
    walks.clear()
    text = fused.explain()
    assert text.count("matmul") >= 200
    assert len(walks) < 20


def test_many_kernels_that_read_one_array():
    """Each two of them are candidates to be one kernel, but each needs the one before."""
    index = np.random.default_rng(0).permutation(37)

    def f(x):
        for _ in range(400):
            x = rx.take(x, index, axis=0) * 0.5 + x
        return x

    with np.errstate(over="ignore"):
        assert_close(rx.fuse(f)(vector()), f(vector()), exact=True)


def test_kernels_that_become_one_need_what_both_need():
    """No two kernels are made one if that would let each wait for the other."""
    x = ir.input_node(0, "float32", (8, 8))
    rng = np.random.default_rng(0)
    for _ in range(20):
        pool = [x]
        for _ in range(40):
            a, b = (pool[rng.integers(max(0, len(pool) - 12), len(pool))] for _ in range(2))
            if rng.random() < 0.4:
                pool.append(ir.matmul(a, b))
            else:
                pool.append(ir.map_node("multiply", ir.map_node("tanh", a), x))
        graph = ir.Graph([x], pool[-8:])
        groups = Scheduler(graph, CpuBackend()).run()
        made = set(graph.inputs)
        for group in groups:
            assert made.issuperset(n for n in group.read if n.op != "constant")
            made |= group.outputs.keys()
        assert made.issuperset(graph.outputs)


def test_many_arrays_that_a_saved_program_writes(tmp_path):
    def f(arrays, x):
        for w in arrays:
            w[...] = w * 0.5 + x
        return x + 1

    def make():
        return [np.full(5, i, np.float32) for i in range(40)]

    ours, theirs, x = make(), make(), vector(5)
    rx.fuse(f).aot([(ours, x)]).save(tmp_path / "f")
    loaded = load(tmp_path / "f")
    assert_close(loaded(ours, x), f(theirs, x), exact=True)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, exact=True)
    with pytest.raises(ValueError, match="memory"):
        loaded([*ours[:-1], ours[0]], x)
