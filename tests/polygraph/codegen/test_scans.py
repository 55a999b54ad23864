"""Scans in generated kernels: the order of the library's own kernel, and what is around them."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from rtxarr.kernels.scan import row_plan, scan
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _nvrtc
from rtxarr.polygraph.codegen._text import join_texts
from rtxarr.testing import assert_close

from ..emulator import HAS_COMPILER, EmulatorBackend
from .test_kernels import reduced, softmax

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

# Rows of one piece, of a few threads, of a warp, of warps, of several tiles; whole and ragged ends.
COLS = [2, 5, 20, 33, 64, 127, 517, 4096, 4099, 9000]
DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "complex64", "complex128", "int64"]


def in_order(op, row, dtype, cols, first, backwards):
    """Scan a row, which begins at element ``first``, in the order of ``kernels._scan_cuda``."""
    half = dtype.itemsize == 2
    has_wide = half or dtype == np.float32
    plan = row_plan(cols, dtype, has_wide and cols * dtype.itemsize % 16 == 0, has_wide)
    before = first % plan.width if plan.loose else 0
    scalar = np.dtype(np.float32) if half else dtype
    nothing = scalar.type(1 if op is np.multiply else -0.0)
    if scalar.kind == "c":
        nothing = scalar.type(complex(-0.0, -0.0))
    n_tiles = -(-(before + cols) // plan.tile)
    slots = np.full(n_tiles * plan.tile, nothing, scalar)
    slots[before : before + cols] = row
    slots = slots[::-1] if backwards else slots
    together = min(plan.lanes, 32)
    pieces = slots.reshape(n_tiles, -1, together, plan.width)  # of each warp in turn
    kept = op.accumulate(pieces, axis=-1, dtype=scalar)
    values = within(op, kept[..., -1])
    apart = np.roll(values, 1, axis=-1)
    apart[..., 0] = nothing
    ends, carried = values[..., -1].copy(), nothing
    each = -(-ends.shape[1] // together)
    for tile in range(n_tiles):
        of_lane = np.full((together, each), nothing, scalar)
        of_lane.reshape(-1)[: ends.shape[1]] = ends[tile]
        sums = nothing
        for i in range(each):
            sums = op(sums, of_lane[:, i])
        sums = np.roll(within(op, sums), 1)
        sums[0] = nothing
        value = op(carried, sums)
        for i in range(each):
            total = op(value, of_lane[:, i])
            of_lane[:, i], value = value, total
        carried = value[-1]
        ends[tile] = of_lane.reshape(-1)[: ends.shape[1]]
    first = op(ends[..., None], apart)
    out = op(first[..., None], kept).reshape(-1)
    out = out[::-1] if backwards else out
    return out[before : before + cols].astype(dtype)


def within(op, values):
    """Combine values along the last axis with those before, as the threads of a warp do."""
    apart = 1
    while apart < values.shape[-1]:
        values = np.concatenate(
            [values[..., :apart], op(values[..., :-apart], values[..., apart:])], axis=-1
        )
        apart *= 2
    return values


def flipped(x):
    lengths = x.shape
    starts = (*(0 for _ in lengths[:-1]), lengths[-1] - 1)
    return ir.slice_node(x, starts, (*(1 for _ in lengths[:-1]), -1), lengths)


def some(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(-9, 9, shape).astype(dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if dtype.kind == "c" else x).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_order_is_that_of_the_library(dtype):
    dtype = np.dtype(dtype)
    backend = EmulatorBackend(seeds=(3,), mode="fast")  # else few long rows are a call
    made, rows = [], 3
    for cols in COLS[:-1] if dtype.itemsize > 8 else COLS:
        for op, backwards in (("sum", False), ("sum", True), ("prod", False)):
            if op == "prod" and dtype.kind == "c":
                continue
            x = ir.input_node(0, dtype, (rows, cols))
            scanned = flipped(x) if backwards else x
            node = ir.scan_node(f"cumulative_{op}", scanned, 1)
            out = flipped(node) if backwards else node
            graph = ir.Graph([x], [ir.map_node("negative", out)])
            made.append((op, backwards, cols, Program(graph, backend)))
    for op, backwards, cols, program in made:
        assert [s.loops and bool(s.loops.scans) for s in program.steps] == [True]
        x = some((rows, cols), dtype)
        (got,) = program(x)
        for r in range(rows):
            f = {"sum": np.add, "prod": np.multiply}[op]
            with np.errstate(all="ignore"):
                want = -in_order(f, x[r], dtype, cols, r * cols, backwards)
            assert got[r].tobytes() == want.tobytes(), (op, backwards, cols, r)


# ------------------------------------------------------------------------------ what is around


def top_p(x):
    p = softmax(x)
    limit = ir.broadcast(ir.constant(0.8, x.dtype), x.shape)
    return [ir.map_node("less", running(p), limit)]


def running(x, op="cumulative_sum"):
    return ir.scan_node(op, x, x.ndim - 1)


def normalized(x):
    """Running sums over the whole sum, and the largest of them."""
    total = running(ir.map_node("abs", x))
    share = ir.map_node("divide", total, reduced("sum", ir.map_node("abs", x), (1,)))
    return [share, ir.reduce_node("max", share, (1,))]


def several(x):
    small = ir.map_node("tanh", x)
    a, b = running(small), running(small, "cumulative_prod")
    return [ir.map_node("subtract", a, b), running(ir.map_node("multiply", a, b))]


def gradient(x):
    """The gradient of a running sum: the same from the other end."""
    g = ir.map_node("multiply", x, x)
    return [ir.map_node("add", flipped(running(flipped(g))), x)]


def turned(x):
    """What is scanned forwards is used flipped, and the other way round."""
    squares = ir.map_node("square", x)
    return [flipped(running(squares)), ir.map_node("negative", running(flipped(x)))]


def of_rows(x):
    """Scan what is the same along a row."""
    return [running(ir.map_node("add", reduced("max", x, (1,)), reduced("min", x, (1,))))]


def extrema(x):
    """The greatest so far, less the least of what comes after; of integers too."""
    after = flipped(running(flipped(x), "cumulative_min"))
    apart = ir.map_node("subtract", running(x, "cumulative_max"), after)
    tens = ir.cast(
        ir.map_node("multiply", x, ir.broadcast(ir.constant(10, x.dtype), x.shape)), "int8"
    )
    return [apart, ir.map_node("negative", running(tens, "cumulative_max"))]


def counted(x):
    zero = ir.broadcast(ir.constant(0, x.dtype), x.shape)
    return [running(ir.cast(ir.map_node("greater", x, zero), "int64"))]


AROUND = {
    f.__name__: f for f in (top_p, normalized, several, gradient, turned, of_rows, counted, extrema)
}
SHAPES = [(1, 7), (5, 33), (3, 128), (70, 260), (3, 1001), (2, 4000)]


@functools.cache
def programs(dialect="cuda", mode="strict"):
    backend = EmulatorBackend(seeds=(0, 1, 7), dialect=dialect, mode=mode)
    made = {}
    for name, f in AROUND.items():
        for shape in SHAPES if dialect == "cuda" else SHAPES[1:5:2]:
            x = ir.input_node(0, "float32", shape)
            made[name, shape] = Program(ir.Graph([x], f(x)), backend)
    return made


@needs_compiler
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(
    "dialect, mode", [("cuda", "strict"), ("cuda", "fast"), ("hip", "strict"), ("metal", "strict")]
)
def test_what_is_before_and_after_a_scan(name, dialect, mode):
    for (of, shape), program in programs(dialect, mode).items():
        if of != name:
            continue
        assert all(s.loops is not None for s in program.steps), program.text
        x = some(shape, "float32", 4)
        want = _interpret.run(program.graph, [x], np)
        for a, b in zip(program(x), want, strict=True):
            assert a.dtype == b.dtype
            if a.dtype == bool:  # where the sum is as large as the limit but for its rounding
                assert (a != b).sum() <= 1
            else:
                # NumPy adds equal numbers one after the other, and rounds each time alike.
                loose = 1e-4 if name == "of_rows" else 2e-6
                assert_close(a, b, rtol=1e-5, atol=loose * np.abs(b).max())


@pytest.mark.parametrize("name", ["top_p", "gradient", "of_rows", "counted"])
def test_they_are_one_kernel(name):
    assert len(programs()[name, (70, 260)].steps) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "mode", "why"),
    [
        ((600, 50_000), "float32", "fast", "rows of 50000 do not stay on a processor"),
        ((64, 8192), "float32", "strict", "64 rows of 8192 are scanned in chunks"),
        ((600, 30), "int32", "fast", "there are no kernels with cumulative_sum of int32"),
    ],
)
def test_a_call_says_why(shape, dtype, mode, why):
    x = ir.input_node(0, dtype, shape)
    graph = ir.Graph([x], [ir.map_node("negative", running(x))])
    program = Program(graph, EmulatorBackend(mode=mode))
    assert [s.loops is None for s in program.steps] == [True, False]
    assert f"a call: {why}" in program.explain()


def test_few_long_rows_are_one_kernel_in_mode_fast():
    x = ir.input_node(0, "float32", (64, 20_000))
    program = Program(ir.Graph([x], top_p(x)), EmulatorBackend(mode="fast"))
    assert [s.loops.kind for s in program.steps] == ["rows"]


@needs_compiler
@pytest.mark.parametrize("dialect", ["cuda", "hip", "metal"])
def test_extrema_of_every_type(dialect):
    dtypes = [*"int8 int16 int32 int64 uint8 uint16 uint32 uint64".split(), *DTYPES[:4]]
    backend = EmulatorBackend(seeds=(0, 5), dialect=dialect)
    made = []
    for dtype, cols, op in zip(
        map(np.dtype, dtypes), [5, 1001, 33] * 4, ["max", "min"] * 6, strict=True
    ):
        if dtype.name in backend.dialect.lacks:
            continue
        x = ir.input_node(0, dtype, (3, cols))
        forth = running(ir.map_node("negative", x), f"cumulative_{op}")
        back = flipped(running(flipped(forth), f"cumulative_{op}"))
        made.append((dtype, op, Program(ir.Graph([x], [forth, back]), backend)))
    for dtype, op, program in made:
        assert all(s.loops is not None for s in program.steps), program.explain()
        x = some(program.graph.inputs[0].shape, dtype, 5)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            x = np.random.default_rng(5).integers(limits.min, limits.max, x.shape, dtype)
        for a, b in zip(program(x), _interpret.run(program.graph, [x], np), strict=True):
            assert a.tobytes() == b.tobytes(), (dtype, op)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(9, 33), (600, 100), (600, 4099), (600, 8192)], ids=str)
def test_bits_of_the_library_on_a_gpu(dtype, shape):
    cupy = pytest.importorskip("cupy")
    x = cupy.asarray(some(shape, dtype))
    node = ir.input_node(0, dtype, shape)
    for before, after in ((0, 0), (1, 1), (1, 0), (0, 1)):
        scanned = running(flipped(node) if before else node)
        graph = ir.Graph([node], [ir.map_node("negative", flipped(scanned) if after else scanned)])
        program = Program(graph, CudaBackend())
        assert [s.loops is not None for s in program.steps] == [True]
        want = scan("sum", x[:, ::-1] if before else x, axis=1)
        (got,) = program(x)
        assert got.tobytes() == (-(want[:, ::-1] if after else want)).tobytes()


@needs_compiler
def test_a_scan_along_columns_is_a_call():
    x = ir.input_node(0, "float32", (6, 4))
    graph = ir.Graph([x], [ir.map_node("negative", ir.scan_node("cumulative_sum", x, 0))])
    program = Program(graph, EmulatorBackend())
    assert "a call: it is along an axis that lies apart in memory" in program.explain()
    x = some((6, 4), "float32")
    assert_close(program(x)[0], -np.cumsum(x, axis=0))


@needs_compiler
def test_a_missing_barrier_is_found():
    backend = EmulatorBackend(seeds=(0, 1, 2, 3, 4))
    x = ir.input_node(0, "float32", (3, 1001))
    (step,) = Program(ir.Graph([x], gradient(x)), backend).steps
    text = backend.source(step.loops)
    parts = text.split("BARRIER();")
    assert len(parts) == 3
    for k in (1, 2):
        broken = "BARRIER();".join([*parts[: k - 1], parts[k - 1] + parts[k], *parts[k + 1 :]])
        run = backend.build_text(step.loops, broken)
        values = some((3, 1001), "float32")
        out = np.empty_like(values)
        try:
            run(values, out)
        except AssertionError:
            continue
        want = np.cumsum((values**2)[:, ::-1], axis=1)[:, ::-1] + values
        assert not np.allclose(out, want), f"barrier {k} is not missed"


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_nvrtc_compiles(cc):
    backend = EmulatorBackend()
    for dtype, *lengths in (
        ("float32", 20, 4099, 8192, 32_000),
        ("float16", 1000, 8000),
        ("complex64", 1000),
        ("int64", 1000, 8000),
    ):
        for cols in lengths:
            x = ir.input_node(0, dtype, (600, cols))
            squares = ir.map_node("multiply", x, x)
            out = top_p(x) if cols > 8000 else [running(squares)]
            Program(ir.Graph([x], out), backend)
    built = backend.all_kernels
    for head in dict.fromkeys(k.head for k in built):
        text = join_texts(k for k in built if k.head == head)
        cubin, log = _nvrtc.compile_text(text, cc, more=("--ptxas-options=-v",))
        assert cubin[:4] == b"\x7fELF"
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        assert max(spilled) <= 100, log  # of rows that take all registers
