"""Kernels on the CPU, against the interpreter: the same bits, but for sums."""

import functools
import math
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.polygraph import _cache, _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _llvm
from rtxarr.testing import assert_close

from .random_graphs import Maker

DTYPES = (
    *"float32 float64 float16 bfloat16 int8 int16 int32 int64".split(),
    *"uint8 uint16 uint32 uint64 bool complex64 complex128".split(),
)


class Poisoned(CpuBackend):
    """Allocates memory that holds no zeros."""

    def empty(self, shape, dtype):
        out = np.empty(shape, dtype)
        out.reshape(-1).view(np.uint8)[:] = 0xA5
        return out


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def is_float(dtype):
    return dtypes.is_half(dtype) or dtype.kind == "f"


@functools.cache
def operations(dtype):
    """Return the maps that NumPy has for this dtype, as (name, number of sources)."""
    one = np.ones(2, dtype)
    found = []
    for op, (n_sources, _) in ir.MAPS.items():
        if n_sources == 3 or (op == "pow" and dtype.kind in "iu"):
            continue
        node = ir.map_node(op, *[ir.input_node(0, dtype, (2,))] * n_sources)
        try:
            out = _interpret.RULES[op](namespace(one), node, *[one] * n_sources)
        except TypeError:
            continue
        # Else NumPy casts, which a tracer writes out.
        if out.dtype == node.dtype or (op in ("erf", "sigmoid") and dtypes.is_half(dtype)):
            found.append((op, n_sources))
    return found


def special(dtype):
    """Return numbers at which operations are hard."""
    if dtype.kind == "b":
        return np.asarray([False, True, True, False])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = [0, 1, 2, 3, 5, 7, 8, 31, 63, 64, 100, info.min, info.min + 1, info.max]
        values += [-1, -2, -3, -7] if info.min else []
        return np.asarray(values).astype(dtype)
    if dtype.kind == "c":
        parts = np.asarray([0.0, -0.0, 1, -1, 0.5, -2.5, np.inf, -np.inf, np.nan])
        out = np.empty((len(parts), len(parts)), dtype)
        out.real, out.imag = parts[:, None], parts
        return out.reshape(-1)
    values = [0.0, -0.0, 0.5, 1, 1.5, 2, 2.5, 3, 1e-3, 0.7, 11, 100.25, 1e4, 6e4, 1e-7, 3e38, 1e-40]
    values = [*values, *(-v for v in values), np.inf, -np.inf, np.nan]
    return np.asarray(values).astype(dtype)


def same(got, want, *, exact=True):
    """Check that arrays are equal to the bit, but that one NaN is another."""
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    a, b = (np.ascontiguousarray(x).reshape(-1).view(part(x)) for x in (got, want))
    if not exact:
        assert_close(a, b)
        return
    different = a.view(f"u{a.dtype.itemsize}") != b.view(f"u{a.dtype.itemsize}")
    if is_float(a.dtype):
        different &= ~((a != a) & (b != b))
    assert not different.any(), (got, want, np.flatnonzero(different))


def part(x):
    return np.empty(0, x.dtype).real.dtype if x.dtype.kind == "c" else x.dtype


def run(graph, arrays, *, exact=True, backend=None, **options):
    """Run by kernels and by the interpreter; check that they agree; give the program."""
    program = Program(graph, backend or Poisoned(), **options)
    ours, theirs = ([np.array(a, copy=True) for a in arrays] for _ in range(2))
    want = _interpret.run(graph, theirs, np)
    for x, y in zip(program(*ours), want, strict=True):
        same(np.asarray(x), np.asarray(y), exact=exact)
    for x, y in zip(ours, theirs, strict=True):
        same(x, y, exact=exact)
    return program


class WideMaker(Maker):
    """Takes any operation that there is for a dtype, and now and then changes it."""

    def __init__(self, seed, dtype, n_steps):
        self.first = np.dtype(dtype)
        super().__init__(seed, dtype, n_steps)

    def input(self, shape, dtype=None, high=None):
        node = super().input(shape, dtype or self.dtype, high)
        if high is None:
            chosen = self.numpy.choice(special(node.dtype), node.shape)
            mild = self.numpy.uniform(-3, 9, node.shape).astype(node.dtype)
            self.values[-1] = np.where(self.numpy.random(node.shape) < 0.2, chosen, mild)
        return node

    def step(self):
        self.dtype = (x := self.pick()).dtype
        self.pick_now = x
        kinds = ["unary", "binary", "binary", "where", "reduce", "reduce", "view", "normalize"]
        kinds += ["concat", "update", "gather", "cast", "view"]
        return getattr(self, self.rng.choice(kinds))(x)

    def like(self, shape):
        everything, self.pool = self.pool, [n for n in self.pool if n.dtype == self.dtype]
        out = super().like(shape)
        self.pool = everything
        return out

    def unary(self, x):
        return ir.map_node(self.operation(x.dtype, 1), x)

    def operation(self, dtype, n):
        # The sign of a NaN is anything.
        known = [o for o, k in operations(dtype) if k == n and o not in ("signbit", "copysign")]
        return self.rng.choice(known)

    def binary(self, x):
        return ir.map_node(self.operation(x.dtype, 2), x, self.like(x.shape))

    def where(self, x):
        test = ir.map_node(self.rng.choice(("equal", "not_equal")), x, self.like(x.shape))
        return ir.map_node("where", test, x, self.like(x.shape))

    def cast(self, x):
        to = self.first if self.rng.random() < 0.5 else np.dtype(self.rng.choice(DTYPES))
        defined = to.kind not in "iu" or x.dtype.kind in "iub"
        return ir.cast(x, to) if defined else self.unary(x)

    def reduce(self, x):
        ops = ["max", "min", "argmax", "argmin"] if x.dtype.kind != "c" else ["sum"]
        if x.dtype.kind == "b":
            ops = ["any", "all"]
        elif x.dtype.kind in "iu":
            ops += ["sum", "prod"]
        op, axes = self.rng.choice(ops), self.axes(x)
        if not x.ndim:
            return self.unary(x)
        return ir.reduce_node(op, x, axes[:1] if op.startswith("arg") else axes)

    def normalize(self, x):
        if x.dtype.kind == "c" or not x.ndim:
            return self.unary(x)
        axes = self.axes(x)
        kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        top = ir.reshape(ir.reduce_node("max", x, axes), kept)
        return ir.map_node("maximum", x, ir.broadcast(top, x.shape))

    def concat(self, x):
        if not x.ndim:
            return self.unary(x)
        return ir.concat([x, self.like(x.shape), x][: self.rng.randint(2, 3)], 0)


@pytest.mark.parametrize("name", DTYPES)
def test_maps_have_the_bits_of_numpy(name):
    dtype = np.dtype(name)
    values = special(dtype)
    a = np.repeat(values, len(values))
    b = np.tile(values, len(values))
    x, y = (ir.input_node(i, dtype, a.shape) for i in range(2))
    for op, n_sources in operations(dtype):
        run(ir.Graph([x, y], [ir.map_node(op, *(x, y)[:n_sources])]), [a, b])
    assert len(operations(dtype)) > 15


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("name", DTYPES)
def test_casts_have_the_bits_of_numpy(name):
    dtype = np.dtype(name)
    values = special(dtype)
    x = ir.input_node(0, dtype, values.shape)
    for other in map(np.dtype, DTYPES):
        if dtype.kind in "fcV" and other.kind in "iu":
            values = np.abs(np.nan_to_num(values.real.astype(np.float64))) % 100  # else undefined
        run(ir.Graph([x], [ir.cast(x, other)]), [values.astype(dtype)])


@pytest.mark.parametrize("seed", range(int(os.environ.get("RTXARR_FUZZ", 60))))
def test_random_graphs(seed):
    rng = random.Random(seed)
    maker = WideMaker(seed, rng.choice(DTYPES), rng.randint(3, 15))
    graph = maker.graph()
    sums = [n for n in graph.nodes() if n.op == "sum" and n.dtype.kind == "c"]
    run(graph, maker.arrays(), exact=not sums)


class Edges:
    """A random graph: input nodes for its row pointers and sources, and their arrays."""

    def __init__(self, degrees, first, seed=0):
        degrees = np.asarray(degrees)
        self.n, self.n_rows = int(degrees.sum()), len(degrees)
        self.indptr = ir.input_node(first, "int64", (self.n_rows + 1,))
        self.src = ir.input_node(first + 1, "int32", (self.n,))
        rng = np.random.default_rng(seed)
        self.arrays = [
            np.concatenate([[0], np.cumsum(degrees)]),
            rng.integers(0, self.n_rows, self.n, dtype="i4"),
        ]
        self.inputs = [self.indptr, self.src]


def degrees_of(name):
    few = {"one": [3], "empty rows": [0, 3, 0, 0, 1, 7, 2, 0], "hub": [1, 9000, 0, 4]}
    return few[name] if name in few else np.random.default_rng(1).poisson(6, 3000)


def broadcast_last(x, n):
    return ir.broadcast(ir.reshape(x, (*x.shape, 1)), (*x.shape, n))


GRAPHS = ["one", "empty rows", "hub", "many"]


@pytest.mark.parametrize("op", sorted(ir.SEGMENTS))
@pytest.mark.parametrize("features", [1, 5, 40])
@pytest.mark.parametrize("name", GRAPHS)
def test_gather_map_reduce(op, features, name):
    edges = Edges(degrees_of(name), 2)
    x = ir.input_node(0, "float32", (edges.n_rows, features))
    weight = ir.input_node(1, "float32", (edges.n,))
    messages = ir.map_node("tanh", ir.gather(x, edges.src, 0))
    messages = ir.map_node("multiply", messages, broadcast_last(weight, features))
    out = ir.map_node("exp", ir.map_node("negative", ir.segment_reduce(op, messages, edges.indptr)))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n.shape, "f4") for n in (x, weight)]
    program = run(ir.Graph([x, weight, *edges.inputs], [out]), arrays + edges.arrays, exact=False)
    assert [s.loops.kind for s in program.steps] == ["segments"]


@pytest.mark.parametrize(("heads", "features"), [(1, 1), (1, 8), (2, 3), (4, 16)])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_attention_over_edges(mode, heads, features, name):
    edges = Edges(degrees_of(name), 3)
    x = ir.input_node(0, "float64", (edges.n_rows, heads, features))
    to, at = (ir.input_node(i, "float64", (edges.n_rows, heads)) for i in (1, 2))
    spread = ir.spread(at, edges.indptr, edges.n)
    logits = ir.map_node("add", ir.gather(to, edges.src, 0), spread)
    top = ir.segment_reduce("max", logits, edges.indptr)
    logits = ir.map_node("subtract", logits, ir.spread(top, edges.indptr, edges.n))
    e = ir.map_node("exp", logits)
    total = ir.segment_reduce("sum", e, edges.indptr)
    weights = ir.map_node("divide", e, ir.spread(total, edges.indptr, edges.n))
    messages = ir.gather(x, edges.src, 0)
    messages = ir.map_node("multiply", messages, broadcast_last(weights, features))
    graph = ir.Graph(
        [x, to, at, *edges.inputs], [weights, ir.segment_reduce("sum", messages, edges.indptr)]
    )
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n.shape) for n in (x, to, at)]
    backend = Poisoned(mode)
    program = run(graph, arrays + edges.arrays, exact=False, backend=backend)
    assert {s.loops.kind for s in program.steps if s.loops} == {"segments"}


def row_of(x, n):
    return ir.broadcast(ir.reshape(n, (*n.shape, 1)), x.shape)


def softmax(x):
    e = ir.map_node("subtract", x, row_of(x, ir.reduce_node("max", x, (1,))))
    e = ir.map_node("exp", e)
    return ir.map_node("divide", e, row_of(x, ir.reduce_node("sum", e, (1,))))


LONG = [(1, 100_001), (3, 20_000), (70, 65_540), (1, 8193)]


@pytest.mark.parametrize("name", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_rows_add_up_as_numpy_does(shape, name):
    rng = np.random.default_rng(0)
    x = ir.input_node(0, name, shape)
    square = ir.map_node("multiply", x, x)
    outputs = [ir.reduce_node("sum", n, (1,)) for n in (x, square)]
    outputs.append(ir.map_node("negative", outputs[0]))
    array = rng.standard_normal((*shape, 2))
    array = (array.view(complex) if x.dtype.kind == "c" else array)[..., 0].astype(name)
    program = run(ir.Graph([x], outputs), [array])
    assert {s.loops.kind for s in program.steps} == {"rows"}


@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin", "prod"])
@pytest.mark.parametrize("name", ["float32", "int16", "float16"])
@pytest.mark.parametrize("shape", LONG[:2], ids=str)
def test_long_rows_are_reduced(shape, name, op):
    rng = np.random.default_rng(0)
    x = ir.input_node(0, name, shape)
    array = rng.integers(-9, 10, shape).astype(name)
    array[:, 5000] = array[:, 12000] = 10  # the first of equals
    array[-1, [7000, 9000]] = np.nan if x.dtype.kind == "f" else 10
    run(ir.Graph([x], [ir.reduce_node(op, x, (1,))]), [array])
    if op == "max":
        flags = ir.map_node("equal", x, ir.broadcast(ir.constant(10, name), shape))
        outputs = [ir.reduce_node(o, flags, (1,)) for o in ("any", "all")]
        run(ir.Graph([x], outputs), [array])


@pytest.mark.parametrize("shape", LONG, ids=str)
def test_softmax_of_long_rows(shape):
    x = ir.input_node(0, "float32", shape)
    run(ir.Graph([x], [softmax(x)]), [np.random.default_rng(0).standard_normal(shape, "f4")])


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    shape = (2, 300_000)
    x = ir.input_node(0, "float32", shape)
    graph = ir.Graph([x], [softmax(x), ir.reduce_node("prod", ir.map_node("cos", x), (1,))])
    array = np.random.default_rng(0).standard_normal(shape, "f4")
    found = []
    for n in ("1", "2", "5"):
        monkeypatch.setenv("RTXARR_NUM_THREADS", n)
        found.append([out.tobytes() for out in Program(graph, Poisoned())(array)])
    assert found[0] == found[1] == found[2]


def chain(x):
    return ir.map_node("tanh", ir.map_node("add", x, ir.map_node("exp", x)))


@pytest.mark.parametrize("cols", [9, 5000])
def test_what_is_added_up_in_the_end_stays_until_then(cols):
    """NumPy adds up when the whole row is there: also what it gives in several stages."""
    x = ir.input_node(0, np.dtype("float32"), (cols,))
    y = ir.input_node(1, np.dtype("float64"), (cols,))
    late = ir.cast(ir.map_node("cos", y), np.float32)
    first, second = (ir.reduce_node("sum", ir.map_node("square", n), (0,)) for n in (x, late))
    scaled = ir.map_node("multiply", x, ir.broadcast(ir.reshape(first, (1,)), (cols,)))
    total = ir.map_node("add", ir.reduce_node("sum", scaled, (0,)), second)
    graph = ir.Graph((x, y), (first, total))
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal(cols).astype(np.float32), rng.standard_normal(cols)
    program = Program(graph, CpuBackend())
    assert len(program.steps) == 1
    for got, want in zip(program(*arrays), _interpret.run(graph, arrays, np), strict=True):
        assert_close(got, want, rtol=1e-5)


def test_shapes_of_a_pattern_share_machine_code():
    def text(*shape):
        x = ir.input_node(0, "float32", shape)
        program = Program(ir.Graph([x], [softmax(chain(x))]), CpuBackend())
        return [program.backend.source(s.loops) for s in program.steps]

    assert text(5, 7) == text(300, 1000)
    assert text(2, 20_000) == text(3, 9_000)


def test_objects_of_other_types_are_read_as_arrays(tmp_path):
    x, y = ir.input_node(0, "float32", ()), ir.input_node(1, "float32", (5,))
    graph = ir.Graph([x, y], [ir.map_node("add", y, ir.broadcast(x, (5,)))])
    program = Program(graph, Poisoned())
    values = np.memmap(tmp_path / "y", "f4", "w+", shape=(5,))
    values[:] = np.arange(5)
    (got,) = program(np.float32(2), values)
    assert got.tolist() == [2, 3, 4, 5, 6]


def test_a_scalar_of_another_type_is_converted():
    x, a = ir.input_node(0, "float32", (3,)), ir.input_node(1, "float32", ())
    graph = ir.Graph([x, a], [ir.map_node("multiply", x, ir.broadcast(a, (3,)))], scalars=[1])
    (got,) = Program(graph, Poisoned())(np.ones(3, "f4"), 2.5)
    assert got.tolist() == [2.5, 2.5, 2.5]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_single_elements(shape):
    x = ir.input_node(0, "float32", shape)
    outputs = [chain(x), ir.reduce_node("sum", chain(x), range(len(shape)))]
    run(ir.Graph([x], outputs), [np.full(shape, 0.3, "f4")])


def test_threads_compile_and_run_at_once():
    def work(k):
        shape = (k % 4 + 1, 40_000 * (k % 3) + k + 1)
        x = ir.input_node(0, "float32", shape)
        graph = ir.Graph([x], [softmax(chain(x))])
        array = np.random.default_rng(k).standard_normal(shape, "f4")
        want = _interpret.run(graph, [array], np)[0].tobytes()
        program = Program(graph, Poisoned())
        return all(program(array)[0].tobytes() == want for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_a_forked_process_runs_kernels():
    shape = (1, 300_000)
    x = ir.input_node(0, "float32", shape)
    array = np.random.default_rng(0).standard_normal(shape, "f4")
    program = Program(ir.Graph([x], [softmax(x)]), Poisoned())
    want = program(array)[0].tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        pid = os.fork()
    if not pid:
        os._exit(0 if program(array)[0].tobytes() == want else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_machine_code_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("RTXARR_CACHE_DIR", str(tmp_path))
    x = ir.input_node(0, "float32", (7, 9))
    graph, array = ir.Graph([x], [softmax(x)]), np.ones((7, 9), "f4")
    for compiled in (1, 0):
        monkeypatch.setattr(_cache, "kernels", _cache.KernelCache())  # as in a new process
        _llvm.compiled.cache_clear()
        (got,) = Program(graph, Poisoned())(array)
        assert_close(got, np.full((7, 9), 1 / 9, "f4"))
        assert _cache.kernels.info().compiled == compiled


class PoisonedFast(Poisoned):
    def __init__(self):
        super().__init__("fast")


def exactly(op, x):
    """Return a function's values with more digits than ``x`` has."""
    if op == "erf":
        return np.asarray([math.erf(v) for v in x.astype(float)], np.longdouble)
    return getattr(np, op)(x.astype(np.longdouble))


@pytest.mark.parametrize("op", ["exp", "expm1", "tanh", "erf"])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_fast_functions_are_near(name, op):
    rng = np.random.default_rng(0)
    parts = [rng.uniform(-w, w, 20_000) for w in (1.2, 7, 100, 720)]
    parts.append(rng.standard_normal(20_000) * 10 ** rng.uniform(-37, 1, 20_000))
    array = np.concatenate(parts).astype(name)
    x = ir.input_node(0, name, array.shape)
    (got,) = Program(ir.Graph([x], [ir.map_node(op, x)]), PoisonedFast())(array)
    want = exactly(op, array)
    rounded = want.astype(name)
    usual = np.isfinite(rounded) & (abs(rounded) >= np.finfo(name).tiny)
    error = abs(got[usual] - want[usual]) / np.spacing(abs(rounded[usual]))
    assert error.max() < 3 + (op == "erf")  # math.erf() is rounded too
    np.testing.assert_array_equal(np.isinf(got), np.isinf(rounded))
    subnormal = abs(rounded) < np.finfo(name).tiny
    assert abs(got[subnormal] - rounded[subnormal]).max(initial=0) < 2 * np.finfo(name).tiny * 1e-6


@pytest.mark.parametrize("op", ["exp", "expm1", "tanh", "erf", "sigmoid"])
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_fast_functions_at_special_numbers(name, op):
    array = special(np.dtype(name))
    x = ir.input_node(0, name, array.shape)
    graph = ir.Graph([x], [ir.map_node(op, x)])
    (got,) = Program(graph, PoisonedFast())(array)
    (want,) = _interpret.run(graph, [array], np)
    assert_close(got, want)
    zero = (want == 0) & (array == 0)
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("shape", [(5, 7), (300, 129), (3, 20_000), (70, 65_540)], ids=str)
def test_fast_rows(shape):
    x = ir.input_node(0, "float32", shape)
    mean = ir.reduce_node("sum", ir.map_node("square", x), (1,))
    graph = ir.Graph([x], [softmax(chain(x)), mean, ir.reduce_node("prod", x, (1,))])
    array = np.random.default_rng(0).standard_normal(shape, "f4")
    run(graph, [array], exact=False, backend=PoisonedFast())


@pytest.mark.parametrize("seed", range(40))
def test_fast_random_graphs(seed):
    maker = Maker(seed, dtype=("float32", "float64")[seed % 2], n_steps=seed % 20 + 3)
    run(maker.graph(), maker.arrays(), exact=False, backend=PoisonedFast())


@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "uint8", "int64", "bool"])
@pytest.mark.parametrize("cols", [1, 2, 255, 256, 257, 1000])
def test_the_first_of_equals_is_found(cols, name, op):
    rng = np.random.default_rng(cols)
    x = ir.input_node(0, name, (40, cols))
    array = rng.integers(0, 3, (40, cols)).astype(name)
    if is_float(x.dtype):
        array[rng.random((40, cols)) < 0.2] = -0.0
        array[30:][rng.random((10, cols)) < 2 / cols] = np.nan
        array[7] = -np.inf
        array[8] = np.inf
    doubled = ir.map_node("maximum", x, ir.broadcast(ir.reduce_node("min", x, (1, 0)), x.shape))
    graph = ir.Graph([x], [ir.reduce_node(op, n, (1,)) for n in (x, doubled)])
    run(graph, [array])
