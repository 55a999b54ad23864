"""How programs run branches and loops, on a GPU that is not there."""

from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _replay
from rtxarr.autograd import CaptureError, _conditional
from rtxarr.polygraph import _control_steps, _explain, cond, scan, while_loop
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._backends import Interpreted
from rtxarr.polygraph._program import Program
from rtxarr.polygraph._trace import Captured as Found
from rtxarr.polygraph._trace import Trace
from rtxarr.testing import assert_close
from tests.autograd import pretended
from tests.autograd.pretended import Array, Captured, array, machine, plain

from . import loops_reference


@pytest.fixture
def gpu(monkeypatch):
    pretended.install(monkeypatch)


class Kernels:
    """Runs loops as they are written, recorded."""

    def fuses(self, op, dtype):
        return True

    def empty(self, shape, dtype):
        return np.full(shape, 77).astype(dtype).view(Array)

    def source(self, loops):
        return ""

    def build(self, loops):
        def run(*arrays):
            machine.do(lambda: loops_reference.run(loops, *map(np.asarray, arrays)))

        return run


def program_of(function, *arrays, interpreted=False):
    """Trace a function of NumPy arrays; give its program and the arrays that it found."""
    with Trace(xp) as trace:
        inputs = [trace.input(i, a.dtype, a.shape, a.strides) for i, a in enumerate(arrays)]
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        graph = ir.Graph(trace.inputs, [o.node for o in outs])
        found = [array(s.array) for s in trace.sources if isinstance(s, Found)]
    return (Interpreted(graph, xp) if interpreted else Program(graph, Kernels())), found


def grow(x, factor):
    def body(state):
        n, x = state
        return n + 1, cond(rx.min(x) < 5, lambda x: x * factor, lambda x: x + factor, x)

    n, x = while_loop(lambda s: rx.max(s[1]) < 100, body, (rx.asarray(0, device="cpu"), x))
    return n, rx.tanh(x / 500)


@pytest.mark.parametrize("way", ["rounds", "test and body", "interpreted"])
def test_loops_of_programs_are_recorded(gpu, way):
    x, factor = np.array([1.0, 2.0]), np.array(3.0)
    program, found = program_of(grow, x, factor, interpreted=way == "interpreted")
    if way != "interpreted":
        (loop,) = (step.run for step in program.steps if step.name.startswith("while_loop"))
        assert loop.round is None
    if way == "rounds":  # made by the eager call
        with _replay.keeping({}):
            program.run(array(x), array(factor), *found)
        assert loop.round is not None
        count, grown = grow(x, factor)
        assert_close(plain(program.run(array(x), array(factor), *found)[1]), grown)
    run = Captured(lambda *xs: program.run(*xs, *found), array(x), array(factor))
    for values, by in (([1.0, 2.0], 3.0), ([150.0, 1.0], 2.0), ([7.0, 9.0], 30.0)):
        for got, want in zip(run(values, by), grow(np.array(values), np.array(by)), strict=True):
            assert_close(plain(got), want)


def test_a_round_is_one_program_that_writes_in_place(gpu):
    def f(x):
        return while_loop(
            lambda s: s[0] < 5, lambda s: (s[0] + 1, 2 * s[1], s[2]), (x[0], x, x + 1)
        )

    x = np.array([1.0, 2.0])
    program, found = program_of(f, x)
    with _replay.keeping({}):
        program.run(array(x), *found)
    (loop,) = (step.run for step in program.steps if step.name.startswith("while_loop"))
    # Both kernels write where they read; what stays is not written, and the test is the last.
    assert loop.round.in_place.keys() == set(loop.round.graph.roots[1:])
    for _ in range(2):  # a patched kernel would not be in it
        run = Captured(lambda x: program.run(x, *found), array(x))
        for values in ([1.0, 2.0], [9.0, 2.0]):
            for got, want in zip(run(values), f(np.array(values)), strict=True):
                assert_close(plain(got), want)
        _replay.swapped()


def scanned(x, y):
    def body(state, x):
        return (state[1], rx.tanh(state[0] + x * y)), {"sum": state[0], "twice": 2 * x}

    last, seen = scan(body, (x[0], x[1]), x)
    return *last, seen["sum"], seen["twice"]


@pytest.mark.parametrize("recorded", [20, 19], ids=["one by one", "counted by the GPU"])
def test_scans_of_programs_are_recorded(gpu, monkeypatch, recorded):
    monkeypatch.setattr(_control_steps, "MOST_RECORDED", recorded)

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 3)), np.array([0.5, 1.0, 2.0])
    program, found = program_of(scanned, x, y)
    run = Captured(lambda *xs: program.run(*xs, *found), array(x), array(y))
    for _ in range(2):
        x = rng.standard_normal((20, 3))
        for got, want in zip(run(x, y), scanned(x, y), strict=True):
            assert_close(plain(got), want)
    assert machine.n_rounds == (0 if recorded == 20 else 40)


def test_what_an_eager_call_leaves_out_is_rehearsed(gpu):
    ran = []

    def inner(x):
        found = _conditional.repeat(
            lambda x: array(True), lambda x: (ran.append("inner"), [x])[1], [x]
        )
        return list(found)

    def step(test):
        x = array(1.0)
        _conditional.choose(test, lambda: [x], lambda: (ran.append("other"), inner(x))[1])
        _conditional.repeat(lambda x: x > 2, lambda x: (ran.append("body"), inner(x))[1], [x])

    with _replay.keeping({}):
        step(array(True))
    assert ran == ["other", "inner", "body", "inner"]  # loops without an end, once
    ran.clear()
    step(array(True))
    assert ran == []


def test_small_loops_of_programs_are_captured_for_themselves(gpu, monkeypatch):
    import rtxarr.autograd

    captured = []

    def capture(step):
        captured.append(step)

        def run(*args):
            if len(args[0]) == 3:
                raise CaptureError("it reads")
            return step(*args)

        return run

    monkeypatch.setattr(rtxarr.autograd, "capture", capture)

    def doubled(n):
        loop = _control_steps._Loop(lambda x: [x.max() < 9], lambda x: [x * 2], 1, None)
        return loop, lambda: [plain(loop(array(np.ones(n)))[0])[0] for _ in range(2)]

    loop, call = doubled(2)
    assert call() == [16.0, 16.0]
    assert captured == [loop.run]
    with _replay.watching():
        assert doubled(2)[1]() == [16.0, 16.0]
    assert len(captured) == 1
    loop, call = doubled(3)
    assert call() == [16.0, 16.0]
    assert loop._captured is False
    assert len(captured) == 2
    monkeypatch.setattr(_control_steps, "MOST_CAPTURED_BYTES", 8)
    assert doubled(2)[1]() == [16.0, 16.0]
    assert len(captured) == 2


def test_explain_tells_how_loops_run(gpu, monkeypatch):
    x, factor = np.array([1.0, 2.0]), np.array(3.0)

    def f(x, factor):
        long = scan(lambda s, v: (s * v, s), x[0], rx.broadcast_to(x[:1], (40,)))[0]
        return *grow(x, factor), cond(x[0] > 0, lambda x: x, lambda x: -x, x), long

    def titles(program):
        return [step.title for step in _explain.ProgramReport("", program).steps]

    program, found = program_of(f, x, factor)
    assert {"a loop", "a branch", "a scan of 40 steps"} <= {*titles(program)}
    monkeypatch.setattr(_explain, "_on_gpu", lambda program: True)
    monkeypatch.setattr(_control_steps, "MOST_RECORDED", 39)
    with _replay.keeping({}):
        program.run(array(x), array(factor), *found)
    told = "\n".join(titles(program))
    assert "a branch; the GPU decides where captured" in told
    assert "elsewhere the host waits for each test; 3 kernels a round, with the test" in told
    assert "40 steps, counted by the GPU where captured" in told
    (loop,) = (step.run for step in program.steps if step.name.startswith("while_loop"))
    loop._captured = SimpleNamespace(n_graphs=1)
    assert "a loop, captured for itself: the GPU decides; 3 kernels" in "\n".join(titles(program))
    monkeypatch.setattr(_conditional, "is_available", lambda: False)
    assert "the driver is older than CUDA 12.8" in "\n".join(titles(program))
