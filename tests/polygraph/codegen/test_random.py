"""Random graphs on the emulator, and all that the tests generate through NVRTC."""

import functools
import os
import re

import numpy as np
import pytest

from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.polygraph.codegen import _nvrtc
from rtxarr.polygraph.codegen._text import join_texts
from rtxarr.testing import assert_close

from .. import emulator
from ..random_graphs import Maker
from . import test_kernels, test_segments

N = int(os.environ.get("RTXARR_RANDOM_GRAPHS", "80"))
BATCH = 40  # graphs of one run of the compiler


class Smooth(Maker):
    """Leaves out what turns a last bit into a whole number."""

    def unary(self, x):
        return ir.map_node(self.rng.choice(("negative", "abs", "square", "tanh", "sigmoid")), x)


@functools.cache
def batch(number):
    backend = emulator.EmulatorBackend(seeds=(0, 1, number + 2))
    made = []
    for seed in range(number * BATCH, (number + 1) * BATCH):
        dtype = ("float64", "float32")[seed % 2]
        maker = Smooth(seed, dtype=dtype, n_steps=3 + seed * 7 % 23)
        made.append((maker, Program(maker.graph(), backend)))
    return made


@pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("seed", range(N))
def test_random_graphs(seed):
    maker, program = batch(seed // BATCH)[seed % BATCH]
    want = _interpret.run(program.graph, [np.array(x) for x in maker.arrays()], np)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if maker.dtype == np.float32 else {}
    for a, b in zip(program(*maker.arrays()), want, strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, **tolerance)


SOME = [
    "softmax rows 5x1027",
    "float16 over (1,)",
    "complex64 over (0, 2)",
    "one long row",
    "passes over long columns",
    "three passes of halves",
]


@functools.cache
def units():
    """Kernels of the other tests in translation units: all if many random graphs are asked for."""
    backend = emulator.EmulatorBackend()
    thorough = "RTXARR_RANDOM_GRAPHS" in os.environ
    for name in test_kernels.CASES if thorough else SOME:
        Program(test_kernels.graph_of(name), backend)
    for make in test_segments.MAKERS.values() if thorough else [test_segments.attention]:
        graph, _ = make(test_segments.DEGREES["hubs"], 8, "float32")
        Program(graph, backend)
    built = backend.all_kernels
    heads = dict.fromkeys(k.head for k in built)
    return [join_texts(k for k in built if k.head == head) for head in heads]


@pytest.mark.nvrtc
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_nvrtc_compiles(cc):
    for text in units():
        cubin, log = _nvrtc.compile_text(text, cc, more=("--ptxas-options=-v",))
        assert cubin[:4] == b"\x7fELF"
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        assert len(spilled) >= text.count('extern "C" __global__')  # and functions apart
        assert max(spilled) <= 64, log  # four reductions of halves at once are near the limit
