"""HIP and Metal: run on the emulator, and compiled or checked by clang; no such GPU was used."""

import functools
import re
import shutil
import subprocess

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen._dialects import METAL
from rtxarr.polygraph.codegen._text import join_texts

from .. import emulator
from . import test_kernels, test_segments

DIALECTS = ["hip", "metal"]
CLANG = next(filter(None, map(shutil.which, ("clang-19", "clang-18", "clang"))), None)
needs_gxx = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
needs_clang = pytest.mark.skipif(CLANG is None, reason="needs clang")
NAMES = [
    "softmax rows 7x3",
    "softmax rows 5x1027",
    "softmax columns 100x40",
    "float16 over (1,)",
    "int8 over (0,)",
    "int64 over (0, 2)",
    "bool over (1,)",
    "one long row",
    "long columns",
    "three passes of halves",
    "float16 across (3, 33, 9)",
    "running sums",
    "running sums of halves",
]


@functools.cache
def backend(dialect):
    return test_kernels.Checked(dialect=dialect, seeds=(0, 1), shared_limit=32 << 10)


@functools.cache
def programs(dialect):
    found = {name: Program(test_kernels.graph_of(name), backend(dialect)) for name in NAMES}
    graph, edges = test_segments.attention(test_segments.DEGREES["hubs"], 3, "float32")
    return found, Program(graph, backend(dialect)), edges


@functools.cache
def texts(dialect):
    """All kernels of a language, in translation units."""
    programs(dialect)
    built = [*backend(dialect).all_kernels]
    heads = dict.fromkeys(k.head for k in built)
    return [join_texts(k for k in built if k.head == head) for head in heads]


@needs_gxx
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_kernels_run(dialect, name):
    _, shape, dtype = test_kernels.CASES[name]
    programs(dialect)[0][name](test_kernels.array(shape, dtype))


@needs_gxx
@pytest.mark.parametrize("dialect", DIALECTS)
def test_kernels_over_edges_run(dialect):
    _, program, edges = programs(dialect)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n.shape, "f4") for n in program.graph.inputs[:-2]]
    program(*arrays, *edges.arrays)
    assert [s.loops.kind for s in program.steps] == ["segments"]


@needs_clang
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx1100"])
def test_hip_compiles(gpu, tmp_path):
    shim = emulator.HERE / "hip_shim.h"
    for text in texts("hip"):
        done = clang(
            ["-x", "hip", "--offload-device-only", f"--offload-arch={gpu}", "-nogpulib"]
            + ["-nogpuinc", "-S", "-include", str(shim), "-o", str(tmp_path / "out.s")],
            text,
        )
        assert not done.returncode, done.stderr[:3000]
        assert "s_barrier" in (tmp_path / "out.s").read_text()


def clang(flags, text):
    return subprocess.run([CLANG, *flags, "-w", "-"], input=text, capture_output=True, text=True)


def address_spaces(text):
    """Have clang check a Metal text as C++ for OpenCL."""
    folder = emulator.HERE / "address_spaces"
    flags = ["-x", "cl", "-cl-std=clc++2021", "--target=spir64", "-fsyntax-only", f"-I{folder}"]
    return clang(flags, text)


@needs_clang
def test_metal_keeps_address_spaces():
    for text in texts("metal"):
        done = address_spaces(text)
        assert not done.returncode, done.stderr[:3000]


@needs_clang
@pytest.mark.parametrize(
    "right, wrong",
    [("GLOBAL const S* from", "PRIVATE const S* from"), ("(SHARED f32*)(sh", "(GLOBAL f32*)(sh")],
)
def test_a_wrong_address_space_is_found(right, wrong):
    spoilt = texts("metal")[0].replace(right, wrong)
    assert spoilt != texts("metal")[0]
    assert address_spaces(spoilt).returncode


def test_every_pointer_of_metal_has_an_address_space():
    for text in texts("metal"):
        body = re.sub(r"<[^<>]*>", "", text[len(METAL.head) :])
        pointers = re.findall(r"[^;(,{}]*\w\*", body)
        assert len(pointers) > 20
        wrong = [p for p in pointers if not re.search(r"GLOBAL|SHARED|PRIVATE|threadgroup", p)]
        assert not wrong


@pytest.mark.parametrize(
    "op, dtype", [("erf", "float32"), ("exp", "float64"), ("abs", "complex64")]
)
def test_metal_leaves_what_it_lacks_to_the_interpreter(op, dtype):
    x = ir.input_node(0, dtype, (4,))
    program = Program(ir.Graph([x], [ir.map_node(op, x)]), backend("metal"))
    assert [s.loops for s in program.steps] == [None]
    (got,) = program(np.ones(4, dtype))
    assert got.dtype.kind == "f"


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("move", ["concat", "gather", "update"])
def test_metal_moves_no_dtype_that_it_lacks(move, dtype):
    x, y, index = (ir.input_node(i, d, (2,)) for i, d in enumerate([dtype, dtype, "int64"]))
    node, want = {
        "concat": (ir.concat([x, y], 0), [1, 2, 7, 8]),
        "gather": (ir.gather(x, index, 0), [2, 1]),
        "update": (ir.update(x, ir.slice_node(y, (1,), (1,), (1,)), (0,), (1,)), [8, 2]),
    }[move]
    program = Program(ir.Graph([x, y, index], [node]), backend("metal"))
    assert not any(s.loops for s in program.steps)
    (got,) = program(np.array([1, 2], dtype), np.array([7, 8], dtype), np.array([1, 0]))
    np.testing.assert_array_equal(got, want)
