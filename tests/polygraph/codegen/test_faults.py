"""Kernels over columns, chunks, tiles and edges, each wrong in one place: every fault shows."""

import functools

import numpy as np
import pytest

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from .. import emulator, loops_reference
from ..faults import planted
from . import test_kernels, test_segments

pytestmark = pytest.mark.skipif(not emulator.HAS_COMPILER, reason="needs g++")


def columns():
    x = ir.input_node(0, "float32", (65, 300))
    return ir.Graph([x], [test_kernels.softmax(x, (0,))])


def chunks():
    x = ir.input_node(0, "float32", (30_011,))
    return ir.Graph([x], [ir.reduce_node("sum", x, (0,))])


def tiles():
    x = ir.input_node(0, "float32", (40, 70))
    return ir.Graph([x], [test_kernels.across(x, (1, 0))])


def edges(features):
    graph, _ = test_segments.attention(test_segments.DEGREES["hubs"], features, "float32")
    return graph


GRAPHS = {
    "columns": columns,
    "chunks": chunks,
    "tiles": tiles,
    "edges": functools.partial(edges, 1),
    "features": functools.partial(edges, 8),
    "many": functools.partial(edges, 64),
}
FAULTS = [
    ("columns", "no barrier", r"BARRIER\(\);", ""),
    ("columns", "no barrier after parts are joined", r"BARRIER\(\);", "", 1),
    ("columns", "no barrier before the sums", r"BARRIER\(\);", "", 2),
    ("columns", "sums lie where maxima are read", r"1 \* values", "0 * values"),
    ("columns", "skips a part", r"part = 1; part < parts", "part = 2; part < parts", 1),
    ("columns", "parts in one place", r"thread / stretch \* width \+ x", "x"),
    ("columns", "reads the next column", r"in0 \+ \(c \* n0 \+ r\)", "in0 + (c * n0 + r + 1)"),
    ("columns", "one packet too many", r"own < rows;", "own <= rows;"),
    ("columns", "rows of others", r"place = tile \+ j \* along", "place = tile + j"),
    ("columns", "sums what is not there", r"if \(valid\) a1_sum", "a1_sum"),
    ("columns", "keeps for another thread", r"\* width \+ x\) \* 4, v0_at", "* width) * 4, v0_at"),
    ("chunks", "no barrier", r"BARRIER\(\);", ""),
    ("chunks", "leaves out the last chunk", r"live \? chunks : 0", "live ? chunks - 1 : 0"),
    ("chunks", "chunks overlap", r"begin = chunk \* span", "begin = chunk * (span - 4)"),
    ("chunks", "all chunks in one place", r"r \* chunks \+ chunk", "r * chunks"),
    ("chunks", "another thread stores", r"\[thread / 32\] = a0_sum", "[0] = a0_sum"),
    ("tiles", "no barrier", r"BARRIER\(\);", ""),
    ("tiles", "not turned", r"x \* 33 \+ y", "y * 33 + x"),
    ("tiles", "past the edge", r"a < n_a && b < n_b\) \{", "b < n_b) {"),
    ("tiles", "the last one missing", r"valid = a < n_a", "valid = a < n_a - 1", 1),
    ("edges", "no barrier", r"BARRIER\(\);", "", 3),
    ("edges", "short rows missing", r"count < hub", "count < hub / 128"),
    ("edges", "hubs too late", r">= hub;", "> hub;"),
    ("edges", "rows of others", r"\* turns \+ \(thread >> bits\)", "* turns"),
    ("edges", "an edge of the next row", r"begin \+ count : begin", "begin + count + 1 : begin"),
    ("edges", "the last edge missing", r"begin \+ count : begin", "begin + count - 1 : begin"),
    ("edges", "lanes not combined", r"apart \*= 2", "apart *= 64"),
    ("features", "no barrier", r"BARRIER\(\);", "", 3),
    ("features", "no barrier after", r"BARRIER\(\);", "", 4),
    ("features", "packets overlap", r"packed \? x \* 4", "packed ? x"),
    ("features", "edges that are not there", r"if \(valid\) a1_sum", "if (true) a1_sum"),
    ("features", "of another edge", r"_e\[i\] =", "_e[0] ="),
    ("features", "of another lane's edge", r"from = slot <<", "from = 0 <<"),
    ("features", "of another lot", r"lot \+ j / 1\)", "lot)"),
    ("features", "of another head", r"own \+ from", "home + from", 1),
    ("features", "kept in one place", r"\(lot \+ i\) \* 256", "lot * 256"),
    ("many", "of another lane's edge", r"from = slot <<", "from = e <<"),
    ("many", "of another head", r"own \+ from", "home + from", 1),
    ("many", "the last edge missing", r"slot < left;", "slot < left - 1;", 2),
    ("many", "packets overlap", r"packed \? x \* 4", "packed ? x"),
]  # fmt: skip


@functools.cache
def built():
    """For each fault its kernel's loops, the kernel, and its inputs; all compiled together."""
    backend = emulator.EmulatorBackend(seeds=(1, 2, 3))
    many, what = [], []
    for name, make in GRAPHS.items():
        (step, *_) = Program(make(), emulator.EmulatorBackend()).steps
        text = backend.source(step.loops)
        many.append((step.loops, text))
        what.append((name, "nothing"))
        for fault in FAULTS:
            spoilt = planted(text, *fault[2:]) if fault[0] == name else None
            if spoilt is not None and spoilt != text:
                many.append((step.loops, spoilt))
                what.append(fault[:2])
    kernels = backend.build_texts(many)
    return {key: (loops, k) for key, (loops, _), k in zip(what, many, kernels, strict=True)}


def run(name, loops, kernel):
    rng = np.random.default_rng(0)
    arrays = []
    edges_of = dict(enumerate(test_segments.Edges(test_segments.DEGREES["hubs"], 3).arrays, 3))
    for b in loops.buffers:
        number = b.node.attrs[0] if b.node.op == "input" else None
        if b.is_output:
            arrays.append(np.full(b.node.shape, np.nan, b.dtype))
        elif name in ("edges", "features", "many") and number in edges_of:
            arrays.append(edges_of[number])
        else:
            arrays.append(rng.standard_normal(b.node.shape).astype(b.dtype))
    want = [np.array(x) for x in arrays]
    loops_reference.run(loops, *want)
    kernel(*arrays)
    for a, b in zip(arrays, want, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_not_spoilt_is_right(name):
    run(name, *built()[name, "nothing"])


def test_every_fault_shows():
    unseen = []
    for (name, what), found in built().items():
        if what == "nothing":
            continue
        try:
            run(name, *found)
        except AssertionError:
            continue
        unseen.append((name, what))
    assert not unseen
    assert len(built()) >= 30  # else some pattern has no match: plant it anew
