"""Kernels of long rows that follow one another through a ring in shared memory."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph import _schedule
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _ring

from ..emulator import HAS_COMPILER, EmulatorBackend
from .test_kernels import Checked, array, reduced, softmax, standardized, with_gradient

ROOM = 100_000  # three chunks


@contextlib.contextmanager
def few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ring, "_BLOCKS", 2)
        patch.setattr(_schedule, "FEW_ROWS", 1)
        yield


def share(x):
    """Shares of a sum: one reduction, so that nothing but the ring's own barrier is left."""
    e = ir.map_node("exp", x)
    return ir.map_node("divide", e, reduced("sum", e, (1,)))


def times_the_sum(x):
    return ir.map_node("multiply", x, reduced("sum", x, (1,)))


def of_a_part(x):
    return softmax(ir.slice_node(x, (1, 3), (1, 1), (5, 14_001)))


def beside_another(x):
    y = ir.map_node("add", ir.iota(x.shape, 1, "int64"), ir.iota(x.shape, 0, "int64"))
    return ir.map_node("add", standardized(x, (1,))[0], ir.cast(y, x.dtype))


CASES = {
    "softmax": (softmax, (5, 16_384), "float32"),
    "two chunks but a bit": (share, (5, 16_001), "float32"),
    "sums": (with_gradient, (5, 7000), "float64"),
    "a part": (of_a_part, (6, 14_010), "float32"),
    "complex": (times_the_sum, (3, 6401), "complex64"),
    "counted": (beside_another, (5, 14_336), "float32"),
}


def program(name, backend):
    function, shape, dtype = CASES[name]
    x = ir.input_node(0, dtype, shape)
    out = function(x, (1,)) if function is with_gradient else function(x)
    with few_rows():
        return Program(ir.Graph([x], out if isinstance(out, list) else [out]), backend)


def names_of(found):
    backend, loops = found.backend, found.steps[0].loops
    with few_rows():
        return [x.name.rsplit("_", 1)[0] for x in backend.generate(loops).launches]


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("name", CASES)
def test_rows_that_follow_one_another(name):
    _, shape, dtype = CASES[name]
    found = program(name, Checked(seeds=(0, 1, 2), shared_limit=ROOM))
    assert names_of(found) == ["rows_ring"]
    found(array(shape, dtype))
    if name == "softmax":  # arrays that do not lie at multiples of 16 bytes
        x = np.frombuffer(bytearray(4 + 5 * 16_384 * 4), np.float32)[1:].reshape(5, 16_384)
        x[:] = array(shape, dtype)
        found(x)


def test_which_rows_follow_one_another():
    def kind(rows, cols, dtype="float32"):
        backend = EmulatorBackend()
        x = ir.input_node(0, dtype, (rows, cols))
        step = Program(ir.Graph([x], [softmax(x)]), backend).steps[0]
        return [x.name.rsplit("_", 1)[0] for x in backend.generate(step.loops).launches]

    assert kind(512, 40_960) == ["rows_ring"]
    assert kind(512, 20_480) == ["rows"]
    assert kind(4096, 8192) == ["rows"]  # several are in registers at once
    assert kind(100, 40_960) == ["rows"]  # nothing follows
    assert kind(512, 60_000) == ["rows"]  # no room for more than one
    assert kind(512, 40_960, "float16") == ["rows"]  # copies have 4 bytes at least


FAULTS = [
    ("does not wait", r"COPIES_WAIT\(2\)", "COPIES_WAIT(9)"),
    ("waits for one group too few", r"COPIES_WAIT\(2\)", "COPIES_WAIT(3)"),
    ("counts no groups", r"COPIES_WAIT\(2\);\n\s*COPIES_END\(\);", "COPIES_WAIT(2);"),
    ("asks for a row twice", r"asked_row \+= n_blocks", "asked_row += 0"),
    ("reads where the row before lay", r"held_first = held;", ""),
    ("asks too early", r"\+\+free_chunk == 3", "++free_chunk == 2"),
    ("no barrier between rows", r"BARRIER\(\);", ""),
]


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("what, pattern, other", FAULTS, ids=[f[0] for f in FAULTS])
def test_faults_show(what, pattern, other):
    class Spoilt(EmulatorBackend):
        def generate(self, loops):
            kernel = super().generate(loops)
            body, n = re.subn(pattern, other, kernel.bodies[0], count=1)
            assert n == 1, f"no place for: {what}"
            return dataclasses.replace(kernel, bodies=(body,))

    x = array((5, 16_001), "float32")
    spoilt = program("two chunks but a bit", Spoilt(seeds=(0, 1, 2, 3), shared_limit=ROOM))
    want = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    try:
        (got,) = spoilt(x)
    except AssertionError:  # the order of threads shows
        return
    assert not np.allclose(got, want, rtol=1e-4)
