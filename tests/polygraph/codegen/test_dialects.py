"""HIP and Metal: run on the emulator, and compiled or checked by clang; no such GPU was used."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._dialects import HIP, METAL
from rtxarr.polygraph.codegen._text import join_texts

from .. import emulator
from . import test_kernels, test_operations, test_segments

DIALECTS = ["hip", "metal"]
CLANG = [c for c in map(shutil.which, ("clang-19", "clang-18", "clang")) if c][:1]
if not CLANG and importlib.util.find_spec("ziglang"):  # a wheel with a clang in it
    CLANG = [sys.executable, "-m", "ziglang", "clang"]
needs_gxx = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")


def needs_clang(test):
    return pytest.mark.clang(pytest.mark.skipif(not CLANG, reason="needs clang")(test))


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
    "running extrema",
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


@functools.cache
def all_operations(dialect):
    """Kernels of every map and cast that a language has, in one translation unit."""
    language = backend(dialect).dialect
    built = []
    for dtype in test_operations.DTYPES:
        if dtype.name in language.lacks:
            continue
        names = [op for op in ir.MAPS if ops.fuses(op, dtype, language.lacks)]
        results = [(op, test_operations.result_dtype(op, dtype)) for op in names]
        casts = [("cast", d) for d in test_operations.DTYPES if d.name not in language.lacks]
        sources = (dtype, dtype, np.dtype(bool), dtype)
        for mode in "strict", "fast":
            made = test_kernels.Checked(dialect=dialect, mode=mode)
            for loops in (
                test_operations.one_kernel(sources, results),
                test_operations.one_kernel((dtype,), casts),
            ):
                made.build(loops)
            built += made.all_kernels
    heads = dict.fromkeys(k.head for k in built)
    return [join_texts(dict.fromkeys(k for k in built if k.head == head)) for head in heads]


def clang(flags, text):
    return subprocess.run([*CLANG, *flags, "-w", "-"], input=text, capture_output=True, text=True)


def compile_hip(text, gpu, *flags):
    flags = ["-x", "hip", "--offload-device-only", f"--offload-arch={gpu}", *flags]
    flags += ["-nogpulib", "-nogpuinc", "-include", str(emulator.HERE / "hip_shim.h")]
    return clang(flags, text)


def address_spaces(text):
    """Have clang check a Metal text as C++ for OpenCL, of which the text sees no function."""
    flags = ["-cc1", "-x", "cl", "-cl-std=clc++2021", "-triple", "spir64", "-fsyntax-only"]
    text = re.sub(r"\b(T|c64)\{\}", r"\1(\1{})", text)  # clang puts an empty structure in a space
    return clang([*flags, f"-I{emulator.HERE / 'address_spaces'}"], text)


@needs_clang
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx1100"])
def test_hip_compiles(gpu, tmp_path):
    out = tmp_path / "out.s"
    for text in texts("hip"):
        done = compile_hip(text, gpu, "-S", "-o", str(out))
        assert not done.returncode, done.stderr[:3000]
        made = out.read_text()
        assert f"amdgcn-amd-amdhsa--{gpu}" in made
        assert made.count(".amdhsa_kernel ") == text.count('extern "C" __global__')
        assert ("s_barrier" in made) == ("BARRIER();" in text)


@needs_clang
def test_every_operation_is_hip():
    for text in all_operations("hip"):
        done = compile_hip(text, "gfx90a", "-fsyntax-only")
        assert not done.returncode, done.stderr[:3000]


@needs_clang
@pytest.mark.parametrize(
    "right, wrong, complaint",
    [
        ("BARRIER();", "BARIER();", "undeclared identifier 'BARIER'"),
        ("const Index ", "const Indices ", "unknown type name 'Indices'"),
        ("$expf(", "$exq(", "undeclared identifier 'exq'"),
        ("extern __shared__", "extern", "__host__ variable 'shared_memory'"),
    ],
)
def test_a_planted_error_of_hip_is_found(right, wrong, complaint):
    text = texts("hip")[0]
    spoilt = text.replace(*(HIP.library(x) for x in (right, wrong)))
    assert spoilt != text
    done = compile_hip(spoilt, "gfx90a", "-fsyntax-only")
    assert done.returncode
    assert re.search(complaint, done.stderr), done.stderr[:3000]


@needs_clang
@pytest.mark.parametrize("made", [texts, all_operations])
def test_metal_keeps_address_spaces(made):
    for text in made("metal"):
        done = address_spaces(text)
        assert not done.returncode, done.stderr[:3000]


@needs_clang
@pytest.mark.parametrize(
    "right, wrong, complaint",
    [
        ("GLOBAL const S* from", "PRIVATE const S* from", "address space|no matching function"),
        ("(SHARED f32*)(sh", "(GLOBAL f32*)(sh", "address space"),
        ("BARRIER();", "BARIER();", "undeclared identifier 'BARIER'"),
        ("precise::exp(", "precise::erf(", "no member named 'erf'"),
        ("precise::exp(", "exp(", "undeclared identifier 'exp'"),
    ],
)
def test_a_planted_error_of_metal_is_found(right, wrong, complaint):
    text = texts("metal")[0]
    spoilt = text.replace(right, wrong)
    assert spoilt != text
    done = address_spaces(spoilt)
    assert done.returncode
    assert re.search(complaint, done.stderr), done.stderr[:3000]


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
