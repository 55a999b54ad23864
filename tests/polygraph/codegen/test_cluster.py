"""Kernels of long rows that the blocks of a cluster share."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph import _schedule
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _cluster, _kernels, _nvrtc

from ..emulator import HAS_COMPILER, EmulatorBackend
from .test_kernels import (
    Checked,
    array,
    every_reduction,
    reduced,
    softmax,
    standardized,
    with_gradient,
)

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")


@contextlib.contextmanager
def short_rows():
    """Let few rows that are not long have a kernel with clusters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cluster, "_LONG", 4000)
        patch.setattr(_cluster, "FULL", 0)
        patch.setattr(_cluster, "_BLOCK", 0)
        patch.setattr(_cluster, "_AHEAD", 200_000)
        patch.setattr(_schedule, "FEW_ROWS", 1)
        yield


def times_the_sum(x):
    return ir.map_node("multiply", x, reduced("sum", x, (1,)))


def shares(x):
    """One reduction, so that nothing but its own exchange holds blocks back."""
    e = ir.map_node("exp", x)
    return ir.map_node("divide", e, reduced("sum", e, (1,)))


def of_a_part(x):
    return softmax(ir.slice_node(x, (1, 4), (1, 1), (3, 5004)))


def reductions_and_a_row(x):
    """Every reduction, and something of the row's size that needs two of them."""
    most, total = reduced("max", x, (1,)), reduced("sum", x, (1,))
    return [*every_reduction(x, (1,)), ir.map_node("subtract", ir.map_node("add", x, most), total)]


def group_norm(x):
    """Normalize groups of four channels; the channel's own factor belongs to packets of a row."""
    n, channels, size = x.shape
    factor = ir.reshape(ir.slice_node(x, (0, 0, 0), (1, 1, 1), (1, channels, 1)), (channels, 1))
    out = standardized(ir.reshape(x, (n * channels // 4, 4 * size)), (1,))[0]
    return ir.map_node("multiply", ir.reshape(out, x.shape), ir.broadcast(factor, x.shape))


CASES = {
    "softmax": (softmax, (3, 40_960), "float32"),
    "shares": (shares, (5, 10_240), "float32"),
    "a row that fills no block": (softmax, (2, 5004), "float32"),
    "a block without elements": (softmax, (2, 10_240 + 8), "float32"),
    "sums": (lambda x: with_gradient(x, (1,)), (2, 7000), "float64"),
    "halves": (softmax, (2, 9000), "float16"),
    "group norm": (group_norm, (1, 8, 1536), "float32"),
    "a part": (of_a_part, (4, 5012), "float32"),
    "complex": (times_the_sum, (2, 3202), "complex64"),
    "every reduction": (reductions_and_a_row, (2, 6004), "float32"),
    "integers": (reductions_and_a_row, (2, 4100), "int64"),
}


def program(name, backend):
    function, shape, dtype = CASES[name]
    x = ir.input_node(0, dtype, shape)
    out = function(x)
    with short_rows():
        return Program(ir.Graph([x], out if isinstance(out, list) else [out]), backend)


def launches(found):
    with short_rows():
        kernel = found.backend.generate(found.steps[0].loops)
    return [(x.name.rsplit("_", 1)[0], x.grid, x.block) for x in kernel.launches]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_rows_that_blocks_share(name):
    _, shape, dtype = CASES[name]
    found = program(name, Checked(seeds=(0, 1, 2), clusters=True))
    ((kind, grid, _),) = launches(found)
    assert kind == "rows_cluster"
    assert grid[0] % 2 == 0
    (out,) = found(array(shape, dtype))[:1]
    if name == "softmax":  # arrays that do not lie at multiples of 16 bytes
        x = np.frombuffer(bytearray(4 + 4 * np.prod(shape)), np.float32)[1:].reshape(shape)
        x[:] = array(shape, dtype)
        assert np.array_equal(found(x)[0], out)


@needs_compiler
def test_rows_that_fill_a_block(monkeypatch):
    monkeypatch.setattr(_schedule, "FEW_ROWS", 1)
    monkeypatch.setattr(_cluster, "FULL", 0)
    monkeypatch.setattr(_cluster, "_AHEAD", 1 << 15)
    shape = (3, 8192)
    x = ir.input_node(0, "float32", shape)
    found = Program(ir.Graph([x], [softmax(x)]), Checked(seeds=(0, 1, 2), clusters=True))
    assert found.backend.all_kernels[0].launches[0].name.startswith("rows_whole")
    y = np.frombuffer(bytearray(4 + 4 * 3 * 8192), np.float32)[1:].reshape(shape)
    y[:] = array(shape, "float32")
    for given in array(shape, "float32"), y:
        found(given)


def shape_of(rows, cols, dtype="float32", *, clusters=True, mode="strict"):
    backend = EmulatorBackend(clusters=clusters, mode=mode)
    x = ir.input_node(0, dtype, (rows, cols))
    step = Program(ir.Graph([x], [softmax(x)]), backend).steps[0]
    kernel = backend.generate(step.loops)
    (launch,) = kernel.launches
    blocks = re.search(r"__cluster_dims__\((\d+)", kernel.body)
    kind, size = launch.name.rsplit("_", 1)[0], int(blocks[1]) if blocks else 1
    return kind, launch.grid[0], size, launch.block[0]


def test_how_rows_are_shared():
    assert shape_of(512, 40_960) == ("rows_cluster", 4096, 8, 128)
    assert shape_of(512, 40_960, mode="fast") == ("rows_cluster", 4096, 8, 160)
    assert shape_of(512, 65_536) == ("rows_cluster", 4096, 8, 256)
    assert shape_of(512, 50_004) == ("rows_cluster", 4096, 8, 224)
    assert shape_of(512, 262_144) == ("rows_cluster", 4096, 8, 1024)
    assert shape_of(1024, 20_480) == ("rows_whole", 1024, 1, 512)  # a block does
    assert shape_of(1024, 20_000) == ("rows", 1024, 1, 640)  # not to the last thread
    assert shape_of(512, 50_001)[0] == "rows"  # not at multiples of 16 bytes
    assert shape_of(512, 400_000)[0] == "rows"  # too long for any registers
    assert shape_of(512, 262_144, clusters=False)[0] == "rows"


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(9, 0), (10, 0)])
@pytest.mark.parametrize("name", CASES)
def test_shared_rows_compile(name, cc):
    found = program(name, EmulatorBackend(clusters=_kernels.has_clusters(cc)))
    with short_rows():
        text = found.backend.source(found.steps[0].loops)
    _, log = _nvrtc.compile_text(text, cc, more=("--ptxas-options=-v",))
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert spilled and max(map(int, spilled)) <= 48  # addresses, of arrays that do not pack


def test_which_gpus_have_clusters():
    found = [_kernels.has_clusters(cc) for cc in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert found == [False, False, True, True, False]


FAULTS = [
    ("does not wait for the values", r"wait_for_box\(boxes \+ 1\);", ""),
    ("waits for the wrong box", r"wait_for_box\(boxes \+ 1\)", "wait_for_box(boxes + 0)"),
    ("expects too little", r"(boxes \+ 1, sizeof\(Sent<f32>\)) \* \d+\);", r"\1 * 3);"),
    ("expects too much", r"(boxes \+ 1, sizeof\(Sent<f32>\)) \* \d+\);", r"\1 * 300);"),
    ("does not wait for blocks to begin", r"CLUSTER_WAIT\(\);", ""),
    ("sends to too few blocks", r"lane < (\d)\)", r"lane < \1 - 1)"),
    ("has one place for two values", r"(a1_of = .*?shared_memory \+) \d+\)", r"\1 32)"),
    ("leaves out warps", r"(a1_sum = \(f32\)0;\s+).*?;", r"\1"),
    ("takes another block's part", r"rank = (\S+) % (\d)", r"rank = (\1 + 1) % (\2 - 1)"),
    ("fetches what is not there", r"row \+ ahead < rows", "true"),
]


@needs_compiler
@pytest.mark.parametrize("what, pattern, other", FAULTS, ids=[f[0] for f in FAULTS])
def test_faults_show(what, pattern, other):
    class Spoilt(EmulatorBackend):
        def generate(self, loops):
            kernel = super().generate(loops)
            body, n = re.subn(pattern, other, kernel.bodies[0], count=1, flags=re.DOTALL)
            assert n == 1, f"no place for: {what}"
            return dataclasses.replace(kernel, bodies=(body,))

    x = array((3, 40_960), "float32")
    spoilt = program("softmax", Spoilt(seeds=(0, 1, 2, 3), clusters=True))
    want = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    try:
        (got,) = spoilt(x)
    except AssertionError:  # the order of threads shows, or memory that may not be touched
        return
    assert not np.allclose(got, want, rtol=1e-4)
