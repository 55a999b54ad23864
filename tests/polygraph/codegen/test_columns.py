"""Kernels over columns: packets of neighbours, what they share, and how they are dealt out."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._cuda_backend import CudaBackend
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _nvrtc
from rtxarr.polygraph.codegen._dialects import CUDA
from rtxarr.polygraph.codegen._kernels import generate
from rtxarr.testing import assert_close

from .. import emulator
from .test_kernels import Checked, array, standardized

needs_compiler = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")


def wide(x):
    return ir.cast(x, "float32")


def total(x, axis=0):
    return ir.cast(ir.reduce_node("sum", wide(x), (axis,)), x.dtype)


def product(x, y):
    """A sum over the tokens of each image."""
    return [total(ir.map_node("multiply", x, y), 1)]


def and_terms(x, y):
    """What is added up is a result too."""
    x, y = (ir.reshape(a, (a.shape[0] * a.shape[1], a.shape[2])) for a in (x, y))
    z = ir.map_node("multiply", ir.map_node("tanh", x), y)
    return [total(z), z]


def of_normal_rows(x, y):
    """Each row has its own mean and scale."""
    mean = ir.input_node(2, "float32", x.shape[:2])
    scale = ir.map_node("sqrt", ir.map_node("abs", mean))
    mean, scale = (ir.broadcast(ir.reshape(a, (*x.shape[:2], 1)), x.shape) for a in (mean, scale))
    apart = ir.map_node("multiply", ir.map_node("subtract", wide(x), mean), scale)
    sums = apart, ir.map_node("multiply", apart, wide(y))
    return [ir.reduce_node("sum", s, (1,)) for s in sums]


def joined(x, y):
    """Parts of each row come from different arrays."""
    z = ir.concat([x, y, x], 2)
    flat = ir.reshape(z, (z.shape[0] * z.shape[1], z.shape[2]))
    return [total(flat), flat]


def padded(x, y):
    """Rows that are not there count as zero, and columns."""
    n = x.shape[1]
    zeros = ir.broadcast(ir.constant(0, x.dtype), (x.shape[0], n + 3, x.shape[2] + 8))
    return [total(ir.update(zeros, x, (0, 2, 8), (1, 1, 1)), 1)]


def scaled_columns(x, y):
    """Columns have a weight each, before and after."""
    weight = ir.input_node(2, x.dtype, x.shape[2:])
    each = ir.broadcast(weight, x.shape)
    sum_ = total(ir.map_node("multiply", x, each), 1)
    return [ir.map_node("add", sum_, ir.broadcast(weight, sum_.shape))]


def looked_up(x, y):
    """Rows are found by a table, for all columns alike."""
    table = ir.input_node(2, "int64", (x.shape[1],))
    return [total(ir.gather(x, table, 1), 1)]


def turned(x, y):
    """The columns do not lie side by side in what is read."""
    z = ir.permute(ir.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])), (1, 0))
    return [total(z)]


def one_of_all(x, y):
    """A total of which the columns have no part."""
    rows = ir.reshape(ir.slice_node(y, (0, 0, 0), (1, 1, 1), (1, y.shape[1], 1)), (y.shape[1], 1))
    rows = ir.broadcast(rows, x.shape[1:])
    z = ir.map_node("add", ir.reshape(ir.slice_node(x, (0, 0, 0), (1, 1, 1), (1, *x.shape[1:])),
                                      x.shape[1:]), rows)  # fmt: skip
    return [total(z), total(rows)]


def passes(x, y):
    out, variance = standardized(wide(x), (1,))
    return [ir.cast(out, x.dtype), variance]


def extremes(x, y):
    return [ir.reduce_node(op, x, (1,)) for op in ("max", "argmin")]


FUNCTIONS = [
    product, and_terms, of_normal_rows, joined, padded, scaled_columns, looked_up, turned,
    one_of_all, passes, extremes,
]  # fmt: skip
SHAPES = [
    (3, 50, 24),  # packets of 8
    (3, 37, 12),  # of 4
    (2, 33, 7),  # none
    (1, 130, 136),  # blocks of whole packets, and one that is not full
    (2, 3, 264),  # short columns
    (1, 3000, 8),  # long ones, in chunks
]


def graph_of(function, shape, dtype="bfloat16"):
    kind = array((0,), dtype).dtype
    x, y = (ir.input_node(i, kind, shape) for i in range(2))
    roots = function(x, y)
    graph = ir.Graph([x, y], roots)
    third = next((n for n in graph.nodes() if n.op == "input" and n.attrs == (2,)), None)
    return graph if third is None else ir.Graph([x, y, third], roots)


def arrays_of(graph):
    found = []
    for i, n in enumerate(graph.inputs):
        if n.dtype.kind == "i":
            found.append(np.random.default_rng(i).permutation(n.shape[0]).astype(n.dtype))
        else:
            found.append(array(n.shape, str(n.dtype), i))
    return found


@functools.cache
def programs():
    backend = Checked(seeds=(0, 1, 2))
    return {
        (f.__name__, shape, dtype): Program(graph_of(f, shape, dtype), backend)
        for f in FUNCTIONS
        for shape in SHAPES
        for dtype in ("bfloat16", "float32")
    }


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", [f.__name__ for f in FUNCTIONS])
def test_columns(function, shape, dtype):
    program = programs()[function, shape, dtype]
    assert "columns" in {s.loops.kind for s in program.steps if s.loops} or function == "turned"
    program(*arrays_of(program.graph))


@needs_compiler
def test_elements_that_lie_anywhere_give_the_bits_of_packets():
    backend = emulator.EmulatorBackend(seeds=(1,))
    for function in (product, and_terms, of_normal_rows, joined, scaled_columns, passes, extremes):
        for shape in ((3, 50, 24), (1, 3000, 8)):
            graph = graph_of(function, shape)
            program = Program(graph, backend)
            given = arrays_of(graph)
            assert all(k.packed for k in backend.all_kernels)
            moved = [np.empty(x.size + 1, x.dtype)[1:].reshape(x.shape) for x in given]
            for to, x in zip(moved, given, strict=True):
                to[...] = x
            for a, b in zip(program(*given), program(*moved), strict=True):
                assert a.tobytes() == b.tobytes()


def kernel_of(function, shape, dtype="bfloat16"):
    class Noted(emulator.EmulatorBackend):
        def build(self, loops):
            self.all_kernels.append((loops, self.generate(loops)))
            return lambda *arrays: None

    backend = Noted()
    Program(graph_of(function, shape, dtype), backend)
    return next(found for found in backend.all_kernels if found[0].kind == "columns")


def test_packets_are_as_wide_as_sizes_allow():
    widths = {24: 8, 12: 4, 6: 2, 7: None}
    for n, lanes in widths.items():
        _, kernel = kernel_of(product, (3, 50, n))
        assert kernel.packed == (lanes is not None)
        if lanes is not None:
            assert f"load_packet<{lanes}>" in kernel.body


def test_large_sizes_keep_all_multiprocessors_busy():
    for function, shape, dtype in (
        (and_terms, (1, 8192, 1152), "bfloat16"),
        (and_terms, (1, 65536, 1152), "float32"),
        (product, (32, 256, 1152), "bfloat16"),
        (product, (1, 4096, 1152), "float32"),
        (joined, (1, 8192, 1152), "bfloat16"),
    ):
        _, kernel = kernel_of(function, shape, dtype)
        first = kernel.launches[0]
        assert first.grid[0] * first.grid[1] >= 264
        assert kernel.packed
        assert len(kernel.launches) == 1 + (first.grid[1] > 1)


def test_blocks_are_no_larger_than_the_compiler_is_told():
    for function in FUNCTIONS:
        for shape in (*SHAPES, (1, 8192, 1152), (1, 70_000, 4), (64, 4096, 64)):
            for dtype in ("bfloat16", "float64"):
                loops, kernel = kernel_of(function, shape, dtype)
                (bound,) = set(re.findall(r"__launch_bounds__\((\d+)\)", kernel.body))
                for launch in kernel.launches:
                    assert launch.block[0] * launch.block[1] <= int(bound)


def test_terms_that_are_results_are_stored_in_the_pass_that_adds_them_up():
    loops, kernel = kernel_of(and_terms, (1, 8192, 1152))
    assert len(loops.phases) == 1
    assert kernel.body.count("tanh") == 2  # of packets, and of elements that lie anywhere
    assert kernel.body.count("store_packet") >= 1


def test_what_a_packet_shares_is_computed_once():
    _, kernel = kernel_of(of_normal_rows, (32, 256, 1152))
    packets, elements = re.split(r"^  else \{$", kernel.body, maxsplit=1, flags=re.MULTILINE)
    for text, inside in ((packets, False), (elements, True)):
        before_lanes = text[: text.index("sqrtf")].rsplit("UNROLL", 1)[1]
        assert ("int k = 0" in before_lanes) == inside


def test_parts_of_whole_packets_are_read_in_packets():
    _, kernel = kernel_of(joined, (4, 256, 1152))
    assert kernel.packed
    assert kernel.body.count("load_packet_if<8>(") == 3
    _, kernel = kernel_of(joined, (4, 256, 1152 - 4))
    assert kernel.packed
    assert "load_packet_if<4>(" in kernel.body
    _, kernel = kernel_of(joined, (4, 256, 1152 - 1))
    assert not kernel.packed


def test_few_long_columns_have_a_chunk_for_each_tile():
    def chunks(n, m):
        first, *_ = kernel_of(and_terms, (1, n, m), "float32")[1].launches
        return first.grid[1]

    assert [chunks(n, 64) for n in (1000, 2708)] == [16, 43]  # of 64 rows
    assert chunks(10_000, 64) == 53  # of 192


def test_sizes_of_one_pattern_share_the_text():
    texts = {kernel_of(and_terms, (1, n, m))[1].text for n, m in ((300, 24), (90, 1152), (50, 33))}
    assert len(texts) == 1
    assert kernel_of(and_terms, (1, 5000, 24))[1].text not in texts  # in chunks


TEXTS = """
import hashlib
from tests.polygraph.codegen import test_columns as cases
for function in (cases.joined, cases.of_normal_rows, cases.passes):
    text = cases.kernel_of(function, (4, 256, 1152))[1].text
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_processes_write_the_same_text():
    """Whatever the order of their sets is: else each would compile for itself."""
    folder = Path(__file__).parents[3]
    found = {
        subprocess.run(
            [sys.executable, "-c", TEXTS],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)},
            capture_output=True, check=True, text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1 and found != {""}


def test_short_columns_have_few_threads_each():
    _, kernel = kernel_of(product, (512, 2, 4096))
    assert kernel.launches[0].block == (128, 2)


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_nothing_is_spilled(cc):
    for function in (product, and_terms, of_normal_rows, joined, scaled_columns):
        loops, _ = kernel_of(function, (32, 256, 1152))
        text = generate(loops, CUDA).text
        _, log = _nvrtc.compile_text(text, cc, more=("--ptxas-options=-v",))
        assert sum(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= 32, log
        assert max(map(int, re.findall(r"Used (\d+) registers", log))) <= 80


LARGE = [(8, 128, 1152), (1, 4096, 1152), (3, 1099, 1001), (2, 30_000, 24), (1024, 2, 264)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_columns_on_a_gpu(function, dtype):
    cupy = pytest.importorskip("cupy")
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 1e-3, "atol": 1e-3}
    for shape in (*SHAPES, *LARGE):
        graph = graph_of(function, shape, dtype)
        program = Program(graph, CudaBackend())
        arrays = arrays_of(graph)
        given = [cupy.asarray(x) for x in arrays]
        moved = [cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape) for x in given]
        for to, x in zip(moved, given, strict=True):  # not where packets are aligned
            to[...] = x
        results = program(*given), program(*given), program(*moved)
        want = _interpret.run(graph, arrays, np)
        for *found, w in zip(*results, want, strict=True):
            a, b, c = map(cupy.asnumpy, found)
            assert a.tobytes() == b.tobytes()
            assert_close(c, a, **loose)
            assert_close(a, w, **loose)
