"""Several maps in one launch: which may share one, and that each gives what it gives alone."""

import random

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _interpret, _multi, _patch, _streams
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._aot import _Cuda
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._loops import Buffer, Loops, Phase, Statement
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _maps, _nvrtc
from rtxarr.polygraph.codegen._dialects import CUDA
from rtxarr.polygraph.codegen._kernels import generate
from rtxarr.testing import assert_close

from . import emulator, loops_reference, test_streams
from .test_cuda_backend import FakeArray, FakeBackend
from .test_program import Reference

needs_compiler = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
SIZES = [(3, 5), (1,), (7,), (4099,), (2, 3, 4), (1, 1), (5000, 3), (8,)]


def shapes(n):
    return [SIZES[i % len(SIZES)] if i < 16 else (i % 37 + 2,) for i in range(n)]


def arrays(n, seed=0, dtype="float32", *, offset=0):
    """Give arrays of many shapes; of an odd number the address is a multiple of 4, not of 16."""
    rng = np.random.default_rng(seed)
    found = {}
    for i, shape in enumerate(shapes(n)):
        size = int(np.prod(shape))
        base = rng.random(size + 4).astype(dtype)
        found[f"w{i}"] = base[offset * (i % 2) :][:size].reshape(shape)
    return found


def sgd(params, grads, lr):
    return {k: params[k] - lr * grads[k] for k in params}


def adam(params, grads, m, v, lr, c1, c2):
    new = {}, {}, {}
    for k, p in params.items():
        new[1][k] = 0.9 * m[k] + 0.1 * grads[k]
        new[2][k] = 0.999 * v[k] + 0.001 * (grads[k] * grads[k])
        new[0][k] = p - lr * (new[1][k] / c1) / (rx.sqrt(new[2][k] / c2) + 1e-8)
    return new


def adam_in_place(params, grads, m, v, lr, c1, c2):
    for old, new in zip((params, m, v), adam(params, grads, m, v, lr, c1, c2), strict=True):
        for k in old:
            old[k][...] = new[k]


def program_of(fused):
    (programs,) = fused._programs.values()
    return programs[0].program


def launches(fused):
    """Give for each kernel how many maps are in it."""
    return launches_of(program_of(fused))


def launches_of(program):
    return [max(len(s.loops.members), 1) for s in program.steps if s.loops]


def check(f, *args, backend=None):
    """Run a function fused and as it is; the results, and what is written, have the same bits."""
    fused = rx.fuse(f, backend=backend or emulator.EmulatorBackend(seeds=(0, 1)))
    ours, theirs = copies(args), copies(args)
    got, want = fused(*ours), f(*theirs)
    assert not fused.reasons
    for a, b in zip(leaves((got, ours)), leaves((want, theirs)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return fused


def leaves(tree):
    from rtxarr.autograd._tree import flatten

    return [x for x in flatten(tree)[0] if isinstance(x, np.ndarray)]


def copies(tree):
    """Copy dicts of arrays, each with its place in a line of 16 bytes."""
    if isinstance(tree, tuple):
        return tuple(map(copies, tree))
    if isinstance(tree, dict):
        return {k: copies(x) for k, x in tree.items()}
    if not isinstance(tree, np.ndarray):
        return tree
    base = np.empty(tree.nbytes + 16, np.uint8)
    start = (tree.ctypes.data - base.ctypes.data) % 16
    copy = base[start:][: tree.nbytes].view(tree.dtype).reshape(tree.shape)
    copy[...] = tree
    return copy


# ---------------------------------------------------------------------------- which share one


@needs_compiler
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 150])
def test_one_launch_for_arrays_of_many_shapes(n, offset):
    fused = check(sgd, arrays(n, offset=offset), arrays(n, 1), 0.1)
    one = sum(np.prod(s) == 1 for s in shapes(n))  # they are read once a block
    most = _maps.pattern(*loops_and_kernel(fused))[1]
    assert sorted(launches(fused)) == sorted(
        [n for n in (one, min(n - one, most), n - one - most) if n > 0]
    )


def loops_and_kernel(fused):
    (loops, *_) = [m for s in program_of(fused).steps for m in s.loops.members or (s.loops,)]
    return loops, generate(loops, CUDA)


@needs_compiler
@pytest.mark.parametrize("f", [adam, adam_in_place])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_results_and_updates(f, dtype):
    state = [arrays(40, seed, dtype, offset=seed % 2) for seed in range(4)]
    fused = check(f, *state, 0.01, 0.1, 0.001)
    assert len(launches(fused)) == 2 and sum(launches(fused)) == 40
    program = program_of(fused)
    assert len(program.in_place) == (0 if f is adam else 3 * 40)


@needs_compiler
def test_an_empty_array_among_others():
    params, grads = arrays(5), arrays(5, 1)
    params["empty"] = grads["empty"] = np.empty((0, 3), "float32")
    check(sgd, params, grads, 0.1)


@needs_compiler
def test_maps_of_no_elements_share_a_launch():
    """Their blocks are none: wherever they stand, others find their own."""
    sizes = [0, 5, 0, 0, 3000, 2, 0]
    members = [square(n, i) for i, n in enumerate(sizes)]
    given = [np.arange(n, dtype="float32") for n in sizes]
    results = [np.full(n, -1, "float32") for n in sizes]
    emulator.EmulatorBackend(seeds=(0, 1)).build(_multi.joined(members))(*given, *results)
    for x, y in zip(given, results, strict=True):
        assert_close(y, x * x, exact=True)


def square(n, number=0):
    """Give the loops of a map that is not scheduled."""
    x = ir.input_node(number, "float32", (n,))
    node, place, dtype = ir.map_node("square", x), ix.symbol("i", n), x.dtype
    body = (
        Statement("v0", "load", ("in0", place, None), dtype),
        Statement("v1", "square", ("v0",), dtype),
        Statement("", "store", ("out0", place, "v1"), dtype),
    )
    buffers = Buffer("in0", dtype, x), Buffer("out0", dtype, node, is_output=True)
    return Loops("map", 1, n, buffers, (Phase(body),))


def test_indices_of_64_bits_stay_apart():
    small, large = square(2**20), square(2**31)
    assert _maps.pattern(small, generate(small, CUDA)) is not None
    assert _maps.pattern(large, generate(large, CUDA)) is None


@needs_compiler
def test_dtypes_and_patterns_stay_apart():
    def f(a, b, c, d, x, y):
        return a * 2, b * 2, c * 2, d * 2, x + y, x.T + y.T, y.T * 2

    rng = np.random.default_rng(0)
    given = [rng.random(n).astype(dtype) for n in (5, 6) for dtype in ("float32", "float64")]
    fused = check(f, *given, rng.random((20, 30)), rng.random((20, 30)))
    kinds = [
        sorted({str(b.dtype) for b in m.buffers if not b.is_scalar})
        for s in program_of(fused).steps
        for m in s.loops.members
    ]
    assert kinds == [["float32"]] * 2 + [["float64"]] * 2
    assert len(launches(fused)) > 2


@needs_compiler
def test_numbers_are_those_of_all():
    def f(xs, a, b):
        return [a * x for x in xs[:3]], [b * x for x in xs[3:5]], [3 * x for x in xs[5:]]

    xs = tuple(arrays(16)[f"w{i}"] for i in (0, 2, 3, 4, 6, 7, 8))
    assert launches(check(lambda a, b, *xs: f(xs, a, b), 0.5, 0.25, *xs)) == [3, 2, 2]


@needs_compiler
def test_what_needs_another_comes_after_it():
    """Maps of one pattern before and after a product share launches with their like alone."""

    def f(xs):
        made = [rx.sqrt(x) for x in xs]
        made = [rx.matmul(x, x.T) for x in made]
        return [rx.sqrt(x) for x in made]

    rng = np.random.default_rng(0)
    xs = [rng.random((n, n)).astype("float32") for n in (3, 4, 5)]
    fused = check(lambda a, b, c: f((a, b, c)), *xs)
    steps = program_of(fused).steps
    made = [set(s.results) for s in steps]
    for i, step in enumerate(steps):  # all is there when it is read
        assert all(n in set().union(*made[:i]) for n in step.sources if n.op != "input")
    assert sum(launches(fused)) == 6 and len(launches(fused)) < 6


@needs_compiler
def test_what_is_written_over_is_read_before():
    """A map that reads an input cannot be beside one of its pattern that writes over it."""

    def f(x, y, z):
        before = x[::-1] + 1
        x[...] = y[::-1] + 1
        return before, z[::-1] + 1

    fused = check(f, *(np.arange(n, dtype="float32") for n in (3000, 3000, 10)))
    program = program_of(fused)
    assert program.in_place
    assert sorted(launches(fused)) == [1, 2]
    first, last = program.steps
    assert program.in_place.keys().isdisjoint(first.results)
    assert program.in_place.keys() <= set(last.results)


def test_what_waits_is_bounded(monkeypatch):
    """Results that are made to be read by maps are kept for no more than a few of them."""

    class Counted(Apart):
        def pattern(self, loops):
            return ("map", 100) if loops.kind == "map" else None

    def f(*xs):
        return [rx.matmul(x, x) * 2 for x in xs]

    monkeypatch.setattr(_multi, "MOST_HELD", 3 * 100 * 8)
    fused = rx.fuse(f, backend=Counted())
    fused(*(np.ones((10, 10)) + i for i in range(12)))
    assert launches(fused) == [4, 4, 4]
    monkeypatch.setattr(_multi, "MOST_HELD", 0)
    fused = rx.fuse(f, backend=Counted())
    fused(*(np.ones((10, 10)) + i for i in range(12)))
    assert launches(fused) == [1] * 12


@needs_compiler
def test_what_could_have_run_with_others_does(monkeypatch):
    """Casts of weights are made when the first is needed, as long as they are small."""

    def f(x, *weights):
        for w in weights:
            x = rx.matmul(x, rx.astype(w, "float64"))
        return x

    weights = [np.random.default_rng(i).random((3, 3)).astype("float32") for i in range(6)]
    given = np.eye(3), *weights
    assert launches(check(f, *given)) == [6]
    monkeypatch.setattr(_multi, "MOST_HELD", 2 * 9 * 8)  # beside the first, which is needed
    assert launches(check(f, *given)) == [3, 3]


# -------------------------------------------------------------------- random graphs by the plan


class Apart(Reference):
    """Lets maps of many patterns share launches, and runs the last of them first."""

    most = 100

    def fuses(self, op, dtype):
        return op != "negative"

    def pattern(self, loops):
        return (loops.cols % 2, self.most) if loops.kind == "map" else None

    def build(self, loops):
        if not loops.members:
            return super().build(loops)
        at = {(b.node, b.is_output): i for i, b in enumerate(loops.buffers)}

        def run(*given):
            for m in reversed(loops.members):
                loops_reference.run(m, *(given[at[b.node, b.is_output]] for b in m.buffers))

        return run


def random_graph(seed):
    """Make maps of several sizes, with steps between them that kernels cannot have, and updates."""
    rng = random.Random(seed)
    sizes = rng.sample([(4,), (5,), (2, 3), (9,), (12,), (3, 5)], rng.randint(2, 4))
    inputs = [ir.input_node(i, "int64", rng.choice(sizes)) for i in range(rng.randint(3, 9))]
    nodes = list(inputs)
    for _ in range(rng.randint(4, 30)):
        x = rng.choice(nodes)
        like = [n for n in nodes if n.shape == x.shape]
        kind = rng.choice(["negative", "add", "multiply", "add", "turn", "square"])
        if kind == "turn":
            nodes.append(ir.slice_node(x, [n - 1 for n in x.shape], [-1] * x.ndim, x.shape))
        elif kind in ("negative", "square"):
            nodes.append(ir.map_node(kind, x))
        else:
            nodes.append(ir.map_node(kind, x, rng.choice(like)))
    made = nodes[len(inputs) :]
    updates = {}
    for i, x in enumerate(inputs):
        fitting = [n for n in made if n.shape == x.shape]
        if fitting and rng.random() < 0.5:
            updates[i] = rng.choice(fitting)
    outputs = rng.sample(made, rng.randint(1, len(made)))
    values = np.random.default_rng(seed)
    given = [values.integers(-9, 9, n.shape) for n in inputs]
    return ir.Graph(inputs, outputs, updates.items()), given


@pytest.mark.parametrize("most", [2, 100])
@pytest.mark.parametrize("block", range(4))
def test_random_graphs(block, most):
    """Everything in an order in which it can run, whatever shares launches."""
    backend = Apart()
    backend.most = most
    shared = over = 0
    for seed in range(100 * block, 100 * block + 100):
        graph, given = random_graph(seed)
        program = Program(graph, backend)
        joint = [s for s in program.steps if s.loops and s.loops.members]
        shared += len(joint)
        over += sum(n in program.in_place for s in joint for n in s.results)
        ours, theirs = ([np.array(x, copy=True) for x in given] for _ in "ab")
        want = _interpret.run(graph, theirs, np)
        for a, b in zip([*program(*ours), *ours], [*want, *theirs], strict=True):
            assert_close(a, b, exact=True)
    assert shared > 30 and over > 5


def test_what_shares_a_launch_is_one_step_on_streams(monkeypatch):
    class Shared(test_streams.Pretended):
        pattern, build = Apart.pattern, Apart.build
        most = 100

    monkeypatch.setattr(test_streams, "Pretended", Shared)
    monkeypatch.setattr(_streams, "_WORTH", 0.95)
    x, w = inputs = [ir.input_node(i, "float32", (8, 8)) for i in range(2)]
    given = [np.random.default_rng(i).random((8, 8), "float32") for i in range(2)]
    leaves = []
    for _ in range(6):
        x = ir.matmul(x, w)
        leaves.append(ir.map_node("square", ir.matmul(ir.matmul(w, x), x)))
    graph = ir.Graph(inputs, [x, *leaves])
    world = test_streams.World()
    program = test_streams.watched(graph, world, monkeypatch)
    assert launches_of(program) == [6]
    assert len(program.streams.numbers) == len(program.steps) and max(program.streams.numbers) > 0
    got = program(*(x.copy() for x in given))
    assert world.hazards == []
    for a, b in zip(got, _interpret.run(graph, given, np), strict=True):
        assert_close(a, b, exact=True)


# ------------------------------------------------------------------------- the CUDA back end


@needs_compiler
@pytest.mark.parametrize("offset", [0, 1])
def test_a_table_in_the_buffer_of_arguments(offset):
    """The addresses that a driver would be passed are those of each call."""
    backend = FakeBackend()
    inputs, outputs = [], []
    number = ir.input_node(0, "float64", ())
    for i, shape in enumerate(shapes(70)):
        x, y = (ir.input_node(1 + 2 * i + k, "float64", shape) for k in range(2))
        inputs += [x, y]
        scaled = ir.map_node("multiply", x, ir.broadcast(number, shape))
        outputs.append(ir.map_node("add", scaled, y))
    program = Program(ir.Graph([number, *inputs], outputs, scalars=[0]), backend)
    assert len(backend.gpu.started) == 0 and len(launches_of(program)) < 5
    for seed in range(2):
        a, b = (arrays(70, 2 * seed + k, "float64", offset=offset) for k in range(2))
        given = [x for k in a for x in (a[k], b[k])]
        factor = np.float64(seed + 0.5)
        got = program(factor, *map(FakeArray, given))
        for x, k in zip(got, a, strict=True):
            assert_close(x.array, factor * a[k] + b[k], exact=True)
    assert len(backend.gpu.started) == 2 * len(launches_of(program))


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)])
def test_text_compiles(cc):
    members = [square(100 + i, i) for i in range(100)]
    kernel = generate(_multi.joined(members), CUDA)
    _, log = _nvrtc.compile_text(kernel.text, cc, more=("--ptxas-options=-v",))
    assert "0 bytes stack frame, 0 bytes spill stores" in log  # the table is read where it is


def test_a_text_is_of_few_sizes():
    """One for up to 8 arrays, one for twice as many, and so on: not one for each number."""
    names = set()
    for n in range(2, 129):
        (launch,) = generate(_multi.joined([square(9 + i, i) for i in range(n)]), CUDA).launches
        names.add(launch.name)
    assert len(names) == 5


def test_parameters_fit():
    members = [square(9 + i, i) for i in range(1000)]
    _, most = _maps.pattern(members[0], generate(members[0], CUDA))
    kernel = generate(_multi.joined(members[:most]), CUDA)
    size = sum(map(len, kernel.table.arrays)) * 8 + len(kernel.table.rest) + 8
    assert size <= _maps.PARAMETER_BYTES < size + 100


# ------------------------------------------------------------- what is told, swapped and saved


@needs_compiler
def test_explain_tells_of_each(tmp_path):
    fused = check(sgd, arrays(7), arrays(7, 1), 0.1)
    text = str(fused.explain(source=True))
    assert "5 maps over 7 to 15000 elements, in one launch" in text
    assert "computes multiply x 5, subtract x 5" in text
    assert "reads x0 float32[3, 5], x7 float32[3, 5]; writes" in text
    assert "__grid_constant__" in text
    fused.explain(html=tmp_path / "sgd.html")
    assert "the same of many arrays" in (tmp_path / "sgd.html").read_text()
    assert "kernel0" in str(fused.profile(arrays(7), arrays(7, 1), 0.1))


@needs_compiler
def test_a_launch_is_swapped_as_one_kernel():
    params, grads = arrays(5), arrays(5, 1)
    backend = emulator.EmulatorBackend()
    fused = rx.fuse(sgd, backend=backend)
    want = fused(params, grads, 0.1)
    slot = next(s for s in _patch.slots_of(fused) if s.loops.members)
    text, calls = backend.source(slot.loops), [(params, grads, 0.1)]
    quick = {"calls": calls, "n_runs": 1, "max_slowdown": None}
    with pytest.raises(_patch.Refused, match="out0: it gives"):
        _patch.patch(fused, slot.name, text.replace(" = v0 - v3", " = v0 + v3"), **quick)
    done = _patch.patch(fused, slot.name, text + "// the same\n", **quick)
    again = fused(params, grads, 0.1)
    done.rollback()
    for k, x in want.items():
        assert np.array_equal(again[k], x)


def test_saved_programs_keep_them_apart():
    x, y = (ir.input_node(i, "float32", (5 + i,)) for i in range(2))
    graph = ir.Graph([x, y], [ir.map_node("square", n) for n in (x, y)])
    assert launches_of(Program(graph, _Cuda("strict", ["sm_90"]))) == [1, 1]
    assert launches_of(Program(graph, Apart())) == [1, 1]  # another pattern: one is odd


# --------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("f", [sgd, adam])
def test_two_hundred_arrays_on_a_gpu(f, offset):
    """By themselves, captured, and after that on other values: the bits of each alone."""
    cupy = pytest.importorskip("cupy")

    def given(seed):
        trees = [arrays(200, seed + k, offset=offset) for k in range(2 if f is sgd else 4)]
        return [{k: on_gpu(cupy, x) for k, x in tree.items()} for tree in trees]

    numbers = (0.1,) if f is sgd else (0.1, 0.5, 0.25)
    fused = rx.fuse(f, backend=CudaBackend())
    step = rx.capture(lambda *trees: fused(*trees, *numbers))
    trees = given(0)
    for seed in range(4):
        for tree, new in zip(trees, given(4 * seed), strict=True):
            for k in tree:
                tree[k][...] = new[k]
        want = f(*trees, *numbers)
        for got in (fused(*trees, *numbers), step(*trees)):
            for a, b in zip(pairs(got), pairs(want), strict=True):
                assert cupy.asnumpy(a).tobytes() == cupy.asnumpy(b).tobytes()
    assert sum(launches(fused)) == 200 and len(launches(fused)) < 8


def pairs(results):
    trees = results if isinstance(results, tuple) else (results,)
    return [x for tree in trees for x in tree.values()]


def on_gpu(cupy, x):
    """Copy an array with its place in a line of 16 bytes."""
    shift = x.ctypes.data % 16 // x.itemsize
    base = cupy.empty(x.size + shift, x.dtype)
    out = base[shift:].reshape(x.shape)
    out[...] = cupy.asarray(x)
    return out
