"""Generated kernels on the emulator against loops run as they are written, kind by kind."""

import contextlib
import functools
import re

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from .. import loops_reference
from ..emulator import HAS_COMPILER, EmulatorBackend

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")


class Checked(EmulatorBackend):
    """Holds each kernel to its loops as it runs."""

    def run(self, kernel, loops, *arrays):
        want = [np.array(x, copy=True) if b.is_output else x for b, x in self._zip(loops, arrays)]
        loops_reference.run(loops, *want)
        super().run(kernel, loops, *arrays)
        for b, got, w in zip(loops.buffers, arrays, want, strict=True):
            if b.is_output:
                assert_close(got, w)

    def _zip(self, loops, arrays):
        return zip(loops.buffers, arrays, strict=True)


# ------------------------------------------------------------------------------- the cases


def reduced(op, x, axes):
    """Reduce and keep the axes, broadcast back."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return ir.broadcast(ir.reshape(ir.reduce_node(op, x, axes), kept), x.shape)


def softmax(x, axes=(1,)):
    e = ir.map_node("exp", ir.map_node("subtract", x, reduced("max", x, axes)))
    return ir.map_node("divide", e, reduced("sum", e, axes))


def standardized(x, axes):
    n = ir.broadcast(ir.constant(np.prod([x.shape[a] for a in axes]), x.dtype), x.shape)
    mean = ir.map_node("divide", reduced("sum", x, axes), n)
    apart = ir.map_node("subtract", x, mean)
    variance = ir.map_node("divide", reduced("sum", ir.map_node("square", apart), axes), n)
    return ir.map_node("multiply", apart, ir.map_node("rsqrt", variance)), variance


def every_reduction(x, axes):
    ops = ["sum", "prod", "max", "min", "argmax", "argmin"][: 4 if len(axes) > 1 else 6]
    if x.dtype.kind == "c":
        ops = ["sum", "prod"]
    if x.dtype.kind == "b":
        ops = ["max", "min", "any", "all"]
    return [ir.reduce_node(op, x, axes) for op in ops]


def with_gradient(x, axes):
    """Something of the size of the rows and something of their number, both from three passes."""
    out, variance = standardized(x, axes)
    total = ir.reduce_node("sum", ir.map_node("abs", out), axes)
    return [out, ir.map_node("tanh", total), variance]


def running_shares(x):
    """Running sums over the whole sum, from both ends."""
    n = x.shape[1]
    part = (0, n - 1), (1, -1), x.shape
    back = ir.slice_node(ir.scan_node("cumulative_sum", ir.slice_node(x, *part), 1), *part)
    both = ir.map_node("add", ir.scan_node("cumulative_sum", x, 1), back)
    return ir.map_node("divide", both, reduced("sum", x, (1,)))


def running_range(x):
    """How far apart the greatest and the least so far are, in units of the greatest of the rest."""
    n = x.shape[1]
    part = (0, n - 1), (1, -1), x.shape
    rest = ir.slice_node(ir.scan_node("cumulative_max", ir.slice_node(x, *part), 1), *part)
    both = [ir.scan_node(f"cumulative_{op}", x, 1) for op in ("max", "min")]
    return ir.map_node("floor_divide", ir.map_node("subtract", *both), rest)


def of_a_part(x):
    return softmax(ir.slice_node(x, (1, 30), (1, -2), (4, 14)))


def across(x, axes):
    """Use an array with its axes in another order, and a counter that is in line."""
    y = ir.permute(x, axes)
    return ir.map_node(
        "add", ir.map_node("square", y), ir.cast(ir.iota(y.shape, 0, "int64"), x.dtype)
    )


def gathered_across(x):
    """The same beside what is read at places that come from memory."""
    index = ir.cast(ir.map_node("abs", ir.slice_node(x, (0, 0), (1, 1), (40, 1))), "int64")
    at = ir.gather(x, ir.reshape(index, (40,)), 0)
    return ir.permute(ir.map_node("add", at, x), (1, 0))


def cut_off(x):
    """Rows that begin where packets do and end elsewhere."""
    return every_reduction(ir.slice_node(x, (0, 4), (1, 1), (x.shape[0], 1003)), (1,))


ROWS = [(1, 1), (5, 1), (7, 3), (300, 33), (9, 64), (6, 130), (5, 1027), (3, 3000), (40, 2051)]
COLUMNS = [(1, 7), (3, 5), (64, 33), (100, 40), (777, 3), (1200, 65)]


def cases():
    """Pairs of a name, and (function of a node, shape, dtype)."""
    for n, m in ROWS:
        yield f"softmax rows {n}x{m}", softmax, (n, m), "float32"
    for n, m in COLUMNS:
        yield f"softmax columns {n}x{m}", lambda x: softmax(x, (0,)), (n, m), "float32"
    for dtype in ("float16", "float64", "int8", "int64", "uint16", "bool", "complex64"):
        for axes, shape in (((1,), (6, 519)), ((0,), (519, 6)), ((0, 2), (3, 5, 17))):
            yield f"{dtype} over {axes}", lambda x, a=axes: every_reduction(x, a), shape, dtype
    # Few long rows and columns: launches for chunks, then one that combines them.
    yield "one long row", lambda x: every_reduction(x, (0,)), (70_001,), "float32"
    yield "long rows", lambda x: every_reduction(x, (1,)), (2, 18_011), "int64"
    yield "all of it", lambda x: every_reduction(x, (0, 1)), (211, 301), "float64"
    yield "long over two axes", lambda x: every_reduction(x, (0, 2)), (130, 3, 101), "float32"
    yield "long columns", lambda x: every_reduction(x, (0,)), (6007, 5), "float32"
    yield "long complex columns", lambda x: every_reduction(x, (0,)), (3001, 2), "complex128"
    yield "running sums", running_shares, (7, 533), "float32"
    yield "running sums of halves", running_shares, (9, 64), "float16"
    yield "running extrema", running_range, (9, 130), "int16"
    yield "three passes", lambda x: with_gradient(x, (1,)), (11, 517), "float64"
    yield "three passes of halves", lambda x: with_gradient(x, (1,)), (11, 512), "bfloat16"
    yield "passes over columns", lambda x: with_gradient(x, (0,)), (317, 11), "float64"
    yield "passes over long columns", lambda x: with_gradient(x, (0,)), (5000, 3), "float64"
    yield "passes over two axes", lambda x: with_gradient(x, (0, 2)), (5, 6, 40), "float64"
    for dtype, axes, shape in (
        ("float32", (1, 0), (40, 70)),
        ("float16", (0, 2, 1), (3, 33, 9)),
        ("float64", (0, 2, 1), (2, 65, 64)),
        ("complex64", (0, 3, 1, 2), (2, 5, 7, 12)),
        ("int8", (0, 2, 3, 1), (2, 9, 5, 12)),
        ("float32", (1, 0), (40, 5)),  # too narrow for tiles
    ):
        yield f"{dtype} across {shape}", lambda x, a=axes: across(x, a), shape, dtype
    yield "gathered and turned", gathered_across, (40, 70), "float32"
    yield "transposed", lambda x: softmax(ir.permute(x, (1, 0))), (40, 9), "float32"
    yield "a part", of_a_part, (6, 31), "float32"
    yield "turned as a whole", lambda x: softmax(ir.permute(x, (1, 0)), (0, 1)), (5, 6), "float32"
    yield "whole packets", softmax, (6, 1100), "float32"
    yield "packets cut off", cut_off, (6, 1200), "float32"


CASES = {name: rest for name, *rest in cases()}
CHIPLESS = [
    "softmax columns 1200x65",
    "softmax rows 5x1027",
    "three passes",
    "passes over columns",
    "three passes of halves",
]


def array(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    if np.dtype(dtype).kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    out = rng.uniform(0.9, 1.1, shape)
    return (out + 0.01j * rng.uniform(-1, 1, shape) if np.dtype(dtype).kind == "c" else out).astype(
        dtype
    )


def graph_of(name):
    function, shape, dtype = CASES[name]
    x = ir.input_node(0, array((0,), dtype).dtype, shape)
    out = function(x)
    return ir.Graph([x], out if isinstance(out, list) else [out])


def launches(graph, **options):
    backend = EmulatorBackend(**options)
    step = Program(graph, backend).steps[0]
    return [x.name.rsplit("_", 1)[0] for x in backend.generate(step.loops).launches]


def test_what_is_cut_into_chunks():
    def softmax_of(*shape):
        return ir.Graph([x := ir.input_node(0, "float32", shape)], [softmax(x)])

    assert launches(softmax_of(4096, 8192)) == ["rows"]
    assert launches(softmax_of(100, 30_000)) == ["rows"]
    assert launches(softmax_of(100, 100_000)) == ["rows_split"] * 3  # does not fit on chip
    assert launches(softmax_of(4096, 100_000)) == ["rows"]
    assert launches(softmax_of(4096, 70_000)) == ["rows"]
    assert launches(graph_of("all of it")) == ["rows_split"] * 2
    assert launches(graph_of("long columns")) == ["columns_split"] * 2


def test_rows_of_all_lengths_have_one_text():
    def text_of(name):
        backend = EmulatorBackend()
        return backend.source(Program(graph_of(name), backend).steps[0].loops)

    some = {text_of(f"softmax rows {n}x{m}") for n, m in ROWS if m > 1}
    assert some == {text_of("whole packets")}
    (text,) = some
    assert "load_packet<4>(v0_at[j], in0 + (r * n0 + c), end - first)" not in text
    assert "end - first)" in text_of("packets cut off")


def test_the_first_part_of_a_wide_row_stays_on_chip():
    x = ir.input_node(0, "float64", (3, 8000))
    graph = ir.Graph([x], [softmax(x)])

    def first_launch(limit):
        backend = EmulatorBackend(shared_limit=limit)
        with no_registers():
            kernel = backend.generate(Program(graph, backend).steps[0].loops)
        return kernel.launches[0].shared, kernel.body.count("tile = padded")

    assert first_launch(100_000) == (2 * 32_768 + 1024, 0)  # two tiles: all of it
    assert first_launch(40_000) == (32_768 + 1024, 3)  # the rest is read again in each pass
    assert first_launch(20_000) == (1024, 0)
    with no_registers():
        program = Program(graph, Checked(seeds=(0, 1), shared_limit=40_000))
    program(array((3, 8000), "float64"))


@pytest.mark.parametrize(
    "shape, dtype, block",
    [
        ((4096, 8192), "float32", (256, 1)),  # 32 elements a thread
        ((4096, 40_960), "float32", (1024, 1)),  # 40
        ((4096, 1000), "float32", (32, 8)),
        ((4096, 8192), "float64", (512, 1)),
        ((5, 1000), "float32", (32, 2)),
        ((4096, 8191), "float16", (256, 1)),
    ],
)
def test_rows_in_registers(shape, dtype, block):
    x = ir.input_node(0, array((0,), dtype).dtype, shape)
    backend = EmulatorBackend(shared_limit=20_000)
    step = Program(ir.Graph([x], [softmax(x)]), backend).steps[0]
    (launch,) = backend.generate(step.loops).launches
    assert launch.block == block
    assert launch.shared <= 1024


@pytest.mark.parametrize("cols, parts", [(1024, False), (1020, True), (1023, True)])
def test_long_texts_are_for_whole_rows_or_for_parts(cols, parts):
    x = ir.input_node(0, "float32", (3, cols))
    y = x
    for _ in range(12):
        y = ir.map_node("sin", ir.map_node("multiply", y, x))
    graph = ir.Graph([x], [softmax(y)])
    backend = Checked(seeds=(0, 1))
    program = Program(graph, backend)
    text = backend.source(program.steps[0].loops)
    assert "cols ==" not in text
    assert text.count("if (packed)") == 1
    assert ("first < end ? first : end - 4" in text) is parts
    program(array((3, cols), "float32"))
    short = backend.source(Program(ir.Graph([x], [softmax(x)]), backend).steps[0].loops)
    assert "cols ==" in short


def test_passes_over_chunks_of_rows():
    backend = Checked(seeds=(1,), shared_limit=20_000)
    x = ir.input_node(0, "float32", (64, 8200))
    with no_registers():
        program = Program(ir.Graph([x], with_gradient(x, (1,))), backend)
        assert len(backend.generate(program.steps[0].loops).launches) == 3
    program(array((64, 8200), "float32"))


@contextlib.contextmanager
def no_registers():
    """Let rows stay in shared memory, as those that are too long for registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rtxarr.polygraph.codegen._rows._HELD", 0)
        yield


@functools.cache
def programs():
    """All cases, compiled in one run: rows in registers, in shared memory, and in neither."""
    roomy, cramped = Checked(seeds=(0, 1, 2)), Checked(seeds=(3,), shared_limit=20_000)
    cramped.kernels, cramped.waiting = roomy.kernels, roomy.waiting
    found = {(name, "on chip"): Program(graph_of(name), roomy) for name in CASES}
    with no_registers():
        found |= {(name, "shared"): Program(graph_of(name), roomy) for name in CHIPLESS}
        return found | {(name, "not"): Program(graph_of(name), cramped) for name in CHIPLESS}


def kernels(program):
    return [s.loops.kind for s in program.steps if s.loops]


@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    _, shape, dtype = CASES[name]
    program = programs()[name, "on chip"]
    assert kernels(program)
    program(array(shape, dtype))


def test_what_is_read_across_goes_through_tiles():
    backend = EmulatorBackend()
    for name in CASES:
        if "across" in name:
            (step,) = Program(graph_of(name), backend).steps
            tiles = backend.generate(step.loops).launches[0].name.startswith("tiles")
            assert tiles == (name != "float32 across (40, 5)")


@pytest.mark.parametrize("place", ["shared", "not"])
@pytest.mark.parametrize("name", CHIPLESS)
def test_rows_that_do_not_fit_in_registers(name, place):
    _, shape, dtype = CASES[name]
    programs()[name, place](array(shape, dtype))


@pytest.mark.parametrize("name", ["float16 over (1,)", "float64 over (0,)", "one long row"])
def test_not_a_number_comes_through(name):
    _, shape, dtype = CASES[name]
    x = array(shape, dtype)
    x[(-1,) * x.ndim] = np.nan
    x[(2,) * x.ndim] = np.nan
    programs()[name, "on chip"](x)


def test_indices_of_64_bits(monkeypatch):
    """Kernels for large arrays, run on small ones."""
    monkeypatch.setattr("rtxarr.polygraph.codegen._writer.is_wide", lambda loops: True)
    backend = Checked(seeds=(1,))
    names = [
        "softmax rows 5x1027",
        "softmax columns 100x40",
        "int8 over (0, 2)",
        "one long row",
        "long columns",
        "float16 across (3, 33, 9)",
        "a part",
    ]
    made = [Program(graph_of(name), backend) for name in names]
    assert all(k.wide for k in backend.all_kernels)
    for name, program in zip(names, made, strict=True):
        program(array(*CASES[name][1:]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fast_halves_are_rounded_at_the_end(dtype):
    """In mode "fast" a kernel gives what float32 gives, rounded once; a cast rounds anyhow."""
    x = ir.input_node(0, array((0,), dtype).dtype, (7, 300))
    y = ir.map_node("multiply", ir.map_node("exp", x), x)
    wide = ir.map_node("square", ir.cast(x, "float32"))
    cut = ir.map_node("subtract", wide, ir.cast(ir.cast(wide, x.dtype), "float32"))
    out = ir.map_node("exp", ir.map_node("subtract", y, reduced("max", y, (1,))))
    graph = ir.Graph([x], [out, cut])
    given = array((7, 300), dtype)
    z = given.astype("float32")
    once = np.exp(np.exp(z) * z - (np.exp(z) * z).max(axis=1, keepdims=True)).astype(given.dtype)
    fast, strict = (Program(graph, EmulatorBackend(mode=m))(given) for m in ("fast", "strict"))
    assert_close(fast[0], once)
    assert np.mean(fast[0] == once) > 0.99 > 0.9 > np.mean(strict[0] == once)
    for _, rest in (fast, strict):
        assert_close(rest, z * z - (z * z).astype(given.dtype).astype("float32"), exact=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_fast_kernels_divide_once_a_row(axis):
    x = ir.input_node(0, "float32", (70, 33))
    graph = ir.Graph([x], [softmax(x, (axis,))])
    backend = EmulatorBackend(mode="fast")
    program = Program(graph, backend)

    def n_reciprocals(program):
        texts = [program.backend.source(s.loops) for s in program.steps]
        return sum(len(re.findall(r"_reciprocal\w*(?:\[k\])? = 1.0f / [av]\d+;", t)) for t in texts)

    assert n_reciprocals(program) == 1 + 2 * axis  # rows in registers are written three times
    given = array((70, 33), "float32")
    want = np.exp(given - given.max(axis, keepdims=True))
    assert_close(program(given)[0], want / want.sum(axis, keepdims=True), rtol=1e-6)
    assert n_reciprocals(Program(graph, EmulatorBackend())) == 0


LOGISTIC = {
    "sigmoid": lambda x, one: ir.map_node("sigmoid", x),
    "SiLU": lambda x, one: ir.map_node(
        "divide", x, ir.map_node("add", one, ir.map_node("exp", ir.map_node("negative", x)))
    ),
    "reciprocal": lambda x, one: ir.map_node(
        "reciprocal", ir.map_node("add", ir.map_node("exp", ir.map_node("negative", x)), one)
    ),
}


@pytest.mark.parametrize("dialect", ["cuda", "hip", "metal"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LOGISTIC)
def test_fast_logistic_functions(name, dtype, dialect):
    given = np.linspace(-30, 30, 333).astype(dtype)
    given[:5] = 0, -100, 100, -np.inf, np.nan
    x = ir.input_node(0, dtype, given.shape)
    out = LOGISTIC[name](x, ir.broadcast(ir.constant(1, dtype), x.shape))
    backend = EmulatorBackend(mode="fast", dialect=dialect)
    program = Program(ir.Graph([x], [out]), backend)
    text = backend.source(program.steps[0].loops)
    assert "RECIPROCAL" in text.partition("__global__" if dialect != "metal" else "[[kernel")[2]
    with np.errstate(all="ignore"):
        wide = given.astype("float64")
        want = (wide if name == "SiLU" else 1) / (1 + np.exp(-wide))
        (got,) = program(given)
    rtol = 1e-3 if dtype == "float16" else 4e-6
    assert_close(got[4:].astype("float64"), want[4:], rtol=rtol, atol=1e-7)
    assert_close(got[:3].astype("float64"), want[:3], rtol=rtol, atol=1e-7)
    assert got[3] == 0 or name == "SiLU" and np.isnan(got[3])


def one(x):
    return ir.broadcast(ir.constant(1, "float32"), x.shape)


def test_an_exponential_that_is_needed_elsewhere_is_exact():
    x = ir.input_node(0, "float32", (333,))
    e = ir.map_node("exp", x)
    graph = ir.Graph([x], [ir.map_node("divide", x, ir.map_node("add", e, one(x))), e])
    backend = EmulatorBackend(mode="fast")
    program = Program(graph, backend)
    text = backend.source(program.steps[0].loops).partition("__global__")[2]
    assert "expf(" in text and "RECIPROCAL" in text and "ROUGH_EXP" not in text
    given = np.linspace(-85, 85, 333, dtype="float32")
    wide = np.exp(given.astype("float64"))
    assert_close(program(given)[0].astype("float64"), given / (wide + 1), rtol=1e-6, atol=1e-36)


SHARES = {
    "exp(x) / (exp(x) + 1)": lambda x, y: (x, ir.map_node("add", x, one(x))),
    "2 exp(x) / (1 + exp(x))": lambda x, y: (
        ir.map_node("add", x, x),
        ir.map_node("add", one(x), x),
    ),
    "exp(x) / (exp(x) + exp(y))": lambda x, y: (x, ir.map_node("add", x, y)),
    "y / (exp(x) + y)": lambda x, y: (y, ir.map_node("add", x, y)),
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_large_and_small_exponentials(name):
    """A GPU's own reciprocal is zero for large divisors and infinite for small ones."""
    x, y = (ir.input_node(i, "float32", (8,)) for i in range(2))
    made = SHARES[name](ir.map_node("exp", x), ir.map_node("exp", y))
    program = Program(
        ir.Graph([x, y], [ir.map_node("divide", *made)]), EmulatorBackend(mode="fast")
    )
    given = np.array(
        [[-90, -87, -1, 0, 1, 87, 88, 88.5], [-90, -87, 1, 0, 2, 87, 80, 60]], "float32"
    )
    e = dict(zip("xy", np.exp(given.astype("float64")), strict=True))
    first = {"exp(x)": e["x"], "2 exp(x)": 2 * e["x"], "y": e["y"]}[name.partition(" / ")[0]]
    total = e["x"] + (1 if "1" in name else e["y"])
    with np.errstate(over="ignore"):
        got = program(*given)[0].astype("float64")
    fits = np.maximum(first, total) < 3.4e38
    assert_close(got[fits], (first / total)[fits], rtol=1e-4)
