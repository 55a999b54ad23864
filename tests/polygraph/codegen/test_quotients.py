"""Quotients of mode "strict": IEEE's bits, a packet at a time."""

import dataclasses

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _nvrtc
from rtxarr.polygraph.codegen._quotients import stages_of

from ..emulator import HAS_COMPILER, EmulatorBackend

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")


def numbers():
    """Return float32 of many exponents, with fractions that are hard to divide by."""
    fractions = np.array([0, 1, 0x555555, 0x7FFFFE, 0x7FFFFF], np.uint32)
    exponents = np.r_[0:4, 20:30, 45:52, 98:130, 200:210, 248:256].astype(np.uint32) << 23
    bits = (exponents[:, None] | fractions).reshape(-1)
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def pairs():
    x, y = np.meshgrid(numbers(), numbers())
    rng = np.random.default_rng(0)
    many = rng.integers(0, 1 << 32, (2, 200_000), np.uint32).view(np.float32)
    near = rng.standard_normal((2, 200_000), np.float32)
    parts = zip((x, y), many, near, strict=True)
    return [np.concatenate([a.reshape(-1), b, c]) for a, b, c in parts]


def same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.uint8), want[~nan].view(np.uint8))


def divide(a, b):
    return ir.map_node("divide", a, b)


def run(function, *arrays, backend=None):
    given = [ir.input_node(i, a.dtype, a.shape) for i, a in enumerate(arrays)]
    program = Program(ir.Graph(given, [function(*given)]), backend or EmulatorBackend())
    with np.errstate(all="ignore"):
        return program(*arrays)[0]


class Texts(EmulatorBackend):
    """Keeps the texts, and changes them."""

    change = ("", "")

    def generate(self, loops):
        kernel = super().generate(loops)
        self.text = kernel.text
        if not self.change[0]:
            return kernel
        assert self.change[0] in kernel.text
        head, at, body = kernel.text.replace(*self.change).partition('extern "C" __global__')
        return dataclasses.replace(kernel, head=head, snippets=(), bodies=(at + body,))


@needs_compiler
def test_all_pairs_of_numbers():
    x, y = pairs()
    backend = Texts()
    with np.errstate(all="ignore"):
        same_bits(run(divide, x, y, backend=backend), x / y)
    assert "quotients<4>" in backend.text


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("easy &= fabsf(y) >= 5.9604645e-8f;", ""),
        ("easy &= fabsf(to[k]) >= 3.3087225e-24f;", ""),
        ("y > 0 ? x : -x", "x"),
        ("fmaf(inverse, fmaf(-y, near, x), near)", "near"),
    ],
)
def test_each_part_is_needed(change):
    x, y = pairs()
    backend = Texts()
    backend.change = change
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        same_bits(run(divide, x, y, backend=backend), x / y)


@needs_compiler
@pytest.mark.parametrize("cols", [1024, 1003])
def test_by_what_a_row_has_in_common(cols):
    def shares(x):
        most = ir.reduce_node("max", x, (1,))
        return divide(x, ir.broadcast(ir.reshape(most, (x.shape[0], 1)), x.shape))

    x = np.random.default_rng(0).standard_normal((8, cols), np.float32)
    for row, scale in enumerate((1, 1e-42, 1e-30, 1e30, 1e-6, -1)):
        x[row] *= np.float32(scale)
    x[:, ::5] = 0
    x[:, 1::7] = -0.0
    x[5] = -1 - np.abs(x[5])  # a negative divisor
    x[6, 0], x[7, 0] = np.inf, np.nan
    with np.errstate(all="ignore"):
        want = x / x.max(1, keepdims=True)
        same_bits(run(shares, x), want)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_quotients_of_quotients(dtype):
    def function(x, y):
        one = ir.broadcast(ir.constant(1, dtype), x.shape)
        below = ir.map_node("add", ir.map_node("abs", y), one)
        inner = divide(ir.map_node("subtract", x, y), below)
        outer = divide(ir.map_node("reciprocal", below), divide(x, below))
        return ir.map_node("add", divide(inner, outer), ir.map_node("multiply", inner, y))

    x, y = np.random.default_rng(0).standard_normal((2, 1003)).astype(dtype)
    x[::9], x[5], y[7] = 0, np.inf, np.nan
    one = np.asarray(1, dtype)
    with np.errstate(all="ignore"):
        below = np.abs(y) + one
        inner = (x - y) / below
        want = inner / ((one / below) / (x / below)) + inner * y
    same_bits(run(function, x, y), want)


def test_what_waits_for_quotients():
    x, y = (ir.input_node(i, "float32", (64,)) for i in range(2))
    out = ir.map_node("add", ir.map_node("exp", divide(x, y)), divide(y, ir.map_node("exp", x)))
    backend = EmulatorBackend()
    (phase,) = Program(ir.Graph([x, y], [out]), backend).steps[0].loops.phases
    stages = stages_of(phase.body, {s.name for s in phase.body if s.op == "load"})
    assert [[s.op for s in stage.body] for stage in stages] == [["exp"], ["exp", "add", "store"]]
    assert [len(stage.quotients) for stage in stages] == [2, 0]


@pytest.mark.parametrize(
    "mode, dialect", [("fast", "cuda"), ("strict", "hip"), ("strict", "metal")]
)
def test_others_have_the_operator(mode, dialect):
    x, y = (ir.input_node(i, "float32", (64,)) for i in range(2))
    backend = EmulatorBackend(mode=mode, dialect=dialect)
    program = Program(ir.Graph([x, y], [divide(x, y)]), backend)
    assert "quotients" not in backend.source(program.steps[0].loops)


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)])
def test_they_compile(cc):
    x, y = (ir.input_node(i, "float32", (1 << 20,)) for i in range(2))
    backend = EmulatorBackend()
    program = Program(ir.Graph([x, y], [divide(x, y)]), backend)
    text = backend.source(program.steps[0].loops)
    _, log = _nvrtc.compile_text(text, cc, more=("--ptxas-options=-v",))
    assert "0 bytes spill stores" in log and "0 bytes stack frame" in log
