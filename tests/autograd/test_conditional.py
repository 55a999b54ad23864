"""Branches and loops that a GPU decides in captured steps, and what they refuse."""

import copy
import gc
import os
from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay, optim
from rtxarr.autograd import CaptureError, _capture_errors, _conditional
from rtxarr.autograd._witness import Witness
from rtxarr.polygraph import _control_steps, _explain, cond, patch, scan, while_loop
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._backends import Interpreted
from rtxarr.polygraph._program import Program
from rtxarr.polygraph._trace import Captured as Found
from rtxarr.polygraph._trace import Trace
from rtxarr.random import Generator
from rtxarr.testing import assert_close
from tests.polygraph import loops_reference

from . import pretended
from .pretended import Array, Captured, array, machine


@pytest.fixture
def gpu(monkeypatch):
    pretended.install(monkeypatch)


def plain(x):
    return np.asarray(x.data if isinstance(x, rx.Tensor) else x)


# ------------------------------------------------------------------------- recorded Python


@pytest.mark.parametrize("first", [1.0, 60.0, 300.0, 99.0], ids=lambda x: f"from {x}")
def test_a_loop_goes_on_as_the_data_of_each_replay_ask(gpu, first):
    calls = []

    def step(x):
        def body(x):
            calls.append(x)
            return 3 * x

        return while_loop(lambda x: x.max() < 100, body, x) + 1

    run = Captured(step, array([1.0, 2.0]))
    assert len(calls) == 1
    for values in ([first, 0.5], [1.0, 1.0]):
        want = step(np.array(values))
        n = len(calls)
        assert_close(plain(run(values)), want)
        assert len(calls) == n  # no Python runs in a replay
    assert_close(plain(run([500.0, 1.0])), np.array([501.0, 2.0]))  # of no rounds


def test_ten_thousand_rounds(gpu):
    run = Captured(lambda n: while_loop(lambda n: n > 0, lambda n: n - 1, n), array(3))
    assert run(10_000) == 0
    assert machine.n_rounds == 10_000


def test_a_state_may_be_made_of_itself(gpu):
    def fibonacci(n):
        def body(state):
            i, (a, b), kept = state
            return i + 1, (b, a + b), kept

        _, (a, _), kept = while_loop(lambda s: s[0] < n, body, (n * 0, (n * 0, n * 0 + 1), n + 5))
        return a, kept

    run = Captured(fibonacci, array(4))
    for n, want in ((10, 55), (0, 0), (1, 1), (30, 832040)):
        assert tuple(map(int, map(np.asarray, run(n)))) == (want, n + 5)


def test_views_of_the_state_are_read_before_they_are_written(gpu):
    def step(x):
        return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1][::-1]), (0, x))[1]

    assert_close(plain(Captured(lambda x: step_from_gpu(x), array([0.0, 0.0]))([1, 2])), [2.0, 1.0])
    assert_close(plain(step(np.array([1.0, 2.0]))), [2.0, 1.0])


def step_from_gpu(x):
    """Reverse three times, counted by the GPU."""
    n = (x[0] * 0).astype(np.int64)
    return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1][::-1]), (n, x))[1]


def test_numbers_and_tensors_of_a_state(gpu):
    kinds = []

    def step(x):
        def body(state):
            kinds.append(tuple(map(type, state.values())))
            return {"n": state["n"] + 1, "x": state["x"] * 2.0}

        return while_loop(lambda s: raw(s["x"]).max() < 10, body, {"n": 0, "x": rx.Tensor(x)})

    raw = plain_if_host
    run = Captured(step, array([1.0, 3.0]))
    assert kinds == [(Array, rx.Tensor)]
    found = run([1.0, 3.0])
    assert int(np.asarray(found["n"])) == 2
    assert isinstance(found["x"], rx.Tensor)
    assert_close(plain(found["x"]), [4.0, 12.0])


def plain_if_host(x):
    return x.data if isinstance(x, rx.Tensor) else x


def test_the_host_decides_what_it_knows(gpu):
    calls = []

    def step(x):
        def body(state):
            calls.append(state)
            return state[0] + 1, state[1] * 2

        return while_loop(lambda s: s[0] < 4, body, (0, x))[1]

    run = Captured(step, array([1.0]))
    assert len(calls) == 4
    assert_close(plain(run([3.0])), [48.0])


def test_a_branch_is_chosen_at_each_replay(gpu):
    def step(x, y):
        out = cond(
            x.sum() > 0, lambda x, y: {"a": x, "b": x + y}, lambda x, y: {"a": -x, "b": y}, x, y
        )
        x = out["a"] * 10
        return x, out["b"]

    run = Captured(step, array([1.0]), array([2.0]))
    for x, y, want in ((1.0, 2.0, (10, 3)), (-1.0, 2.0, (10, 2)), (4.0, 0.0, (40, 4))):
        assert tuple(float(np.asarray(v)[0]) for v in run([x], [y])) == want


def test_branches_and_loops_in_loops(gpu):
    def collatz(n):
        def body(state):
            n, steps, total = state
            n = cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
            # As often as there were steps, a loop whose rounds the outer one decides.
            count = while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + 1), (steps, total))
            return n, steps + 1, count[1]

        return while_loop(lambda s: s[0] != 1, body, (n, n * 0, n * 0))

    run = Captured(collatz, array(3))
    for n in (27, 1, 2, 6):
        want = collatz(np.array(n))
        for got, right in zip(run(n), want, strict=True):
            assert int(np.asarray(got)) == int(right)


def test_two_steps_with_loops(gpu):
    double = Captured(lambda x: while_loop(lambda x: x < 50, lambda x: 2 * x, x), array(1.0))
    triple = Captured(lambda x: while_loop(lambda x: x < 50, lambda x: 3 * x, x), array(1.0))
    for _ in range(2):
        assert float(np.asarray(double(1.0))) == 64.0
        assert float(np.asarray(triple(1.0))) == 81.0


def test_a_branch_of_what_needs_a_gradient_is_selected(gpu):
    w = rx.Tensor(array([2.0, 3.0]), requires_grad=True)

    def step(x):
        return cond(x.max() > 0, lambda w: w * 3.0, lambda w: w * w, w)

    with _replay.Recorder(), machine.recording() as graph:
        out = step(array([1.0]))
        assert out.requires_grad
    assert len(graph) > 3
    assert not any(getattr(f, "__name__", "") == "_branch" for f in graph)


def test_what_has_no_gradient_is_refused(gpu):
    w = rx.Tensor(array([2.0]), requires_grad=True)
    x = array([1.0])
    with _replay.Recorder(), machine.recording():
        with pytest.raises(
            TypeError, match="a while_loop whose test is on the GPU has no gradient"
        ):
            while_loop(lambda w: w.data.max() < 9, lambda w: w * 2, w)
        with pytest.raises(TypeError, match="a while_loop .* no gradient .* use scan"):
            while_loop(lambda x: plain_if_host(x).max() < 9, lambda x: x * w, rx.Tensor(x))
        with pytest.raises(TypeError, match="a cond whose test .* give it as operand"):
            cond(x.max() < 9, lambda x: x * w, lambda x: x * w, rx.Tensor(x))
        with rx.no_grad():
            while_loop(lambda x: plain_if_host(x).max() < 9, lambda x: x * w, rx.Tensor(x))


def test_other_states_are_refused(gpu):
    x = array([1.0, 2.0])
    refused = {
        r"body must give what it gets, float64\[2\], got float64\[1\]": lambda x: x[:1] * 2,
        r"got float32\[2\]": lambda x: x.astype(np.float32),
        "a state of the structure": lambda x: (x, x),
        "take and give arrays on it, and numbers, got ndarray": lambda x: np.ones(2),
    }
    with _replay.Recorder(), machine.recording():
        for text, body in refused.items():
            with pytest.raises(TypeError, match=text):
                while_loop(lambda x: x.max() < 9, body, x)
        with pytest.raises(TypeError, match=r"then and otherwise must give the same, .*\[2\], got"):
            cond(x.max() < 9, lambda x: x, lambda x: x[:1], x)
        with pytest.raises(TypeError, match="must give the same structure"):
            cond(x.max() < 9, lambda x: x, lambda x: [x], x)
        with pytest.raises(TypeError, match=r"a test must be one bool, got .* \(2,\)"):
            while_loop(lambda x: x < 9, lambda x: x, x)


def test_what_the_host_does_once_a_step_is_refused_by_line(gpu):
    def draw(x):
        with rx.random.record_draws():
            return x + rng._reserve_in_memory("uniform32", 1)[0]

    rng = Generator(1)
    w = rx.Tensor(np.ones(1), requires_grad=True)
    optimizer = optim.SGD([w], lr=0.1)
    ema = optim.ExponentialMovingAverage([w])

    def train(x):
        w.grad = np.ones(1)
        optimizer.step()
        return x

    v = rx.Tensor(array([1.0]), requires_grad=True)

    def gradient(x):
        rx.sum(v * x).backward()
        return x

    def cleared(x):
        v.grad = None
        return x

    v.grad = array([1.0])
    made = lambda x: x + Generator(1).uniform(1)  # noqa: E731
    for body in (draw, train, lambda x: ema.update(), made, gradient, cleared):
        with Witness(), pretended.Recorder() as recorder, machine.recording():
            with pytest.raises(_replay.OncePerStep) as caught:
                while_loop(lambda x: x.max() < 9, body, array([1.0]))
            assert recorder.depth == 0
        error = _capture_errors.explained(caught.value, body)
        assert isinstance(error, CaptureError)
        assert "test_conditional.py" in str(error)
        assert "the host cannot know how often" in str(error)
    assert _replay.recorder() is None
    _replay.once("outside it may")


def descend(x):
    """Follow a gradient until it is small: of a tensor that each round makes."""

    def body(state):
        x, _ = state
        w = rx.Tensor(x, requires_grad=True)
        rx.sum((w * w - 2.0) ** 2).backward()
        return x - 0.05 * w.grad, rx.max(rx.abs(w.grad))

    return while_loop(lambda s: s[1] > 1e-3, body, (x, rx.max(x) * 0 + 1))[0]


def test_gradients_within_a_round(gpu):
    seen = Witness()
    with seen:
        run = Captured(descend, array([1.0, 0.5]))
    assert not seen.grads
    for x in ([1.0, 0.5], [2.0, 1.25]):
        assert_close(plain(run(x)), descend(np.array(x)))
        assert_close(plain(run(x)), np.full(2, 2**0.5), atol=1e-3)


def draws(rng, x):
    """Draw before, in and after loops and branches; as often as the values say."""
    first = rng.uniform(2)

    def body(x):
        x = x + rng.normal(3, dtype=np.float32).sum() ** 2
        return cond(x.max() > 3, lambda x: x + rng.uniform(2, dtype=np.float32), lambda x: x, x)

    x = while_loop(lambda x: x.sum() < 9, body, x)
    return x, first, rng.uniform(1, dtype=np.float32), rng.integers(0, 10, (2,))


def test_draws_in_loops_and_branches_are_those_of_the_host(gpu, monkeypatch):
    real, place = rx.device, SimpleNamespace(kind="cuda")
    monkeypatch.setattr("rtxarr.random._device.device", lambda spec=None: real("cpu"))
    ours, theirs, other = Generator(5), Generator(5), Generator(7)
    for rng in (ours, theirs):
        rng.uniform(1, dtype=np.float32)  # an odd place to begin
    monkeypatch.setattr("rtxarr.random._require_current", lambda target: None)
    monkeypatch.setattr("rtxarr.random._device.device", lambda spec=None: place)
    run = Captured(lambda x: (other.uniform(1), *draws(ours, x))[1:], array([0.0, 0.0], "float32"))
    cases = [[0.0, 0.0], [20.0, 0.0], [-30.0, 0.0], [0.0, 1.0]]
    found = []
    for case in cases:
        found.append([plain(x).copy() for x in run(case)])
    assert pretended.Event.n_waits == len(cases) - 1  # once a replay, for the one before
    monkeypatch.setattr("rtxarr.random._device.device", lambda spec=None: real("cpu"))
    for case, got in zip(cases, found, strict=True):
        for a, b in zip(got, draws(theirs, np.array(case, "float32")), strict=True):
            np.testing.assert_array_equal(a, b)
    assert ours.state_dict() == theirs.state_dict()
    assert pretended.Event.n_waits == len(cases)
    assert copy.deepcopy(ours).state_dict() == theirs.state_dict()


def test_a_failed_capture_takes_draws_in_a_loop_back(gpu):
    rng = Generator(3)
    rng._reserve("uniform32", 5)
    before = rng.state_dict()
    recorder = pretended.Recorder()

    def body(x):
        rng._reserve_in_memory("uniform32", 5)
        return x

    with recorder, machine.recording():
        while_loop(lambda x: x < 3, body, array(5.0))
        rng._reserve_in_memory("uniform64", 5)
        rng.load_state_dict(Generator(2).state_dict())
        rng._reserve_in_memory("uniform64", 5)
    assert rng.state_dict() != before
    recorder.fail()
    assert rng.state_dict() == before


def test_where_there_are_no_such_nodes_tests_are_read(gpu, monkeypatch):
    monkeypatch.setattr(_conditional, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="stream is capturing"):
        Captured(lambda x: while_loop(lambda x: x < 50, lambda x: 2 * x, x), array(1.0))


# ----------------------------------------------------------------------- recorded programs


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


@pytest.mark.parametrize("recorded", [20, 19], ids=["one by one", "counted by the GPU"])
def test_scans_of_programs_are_recorded(gpu, monkeypatch, recorded):
    monkeypatch.setattr(_control_steps, "MOST_RECORDED", recorded)

    def f(x, y):
        def body(state, x):
            return (state[1], rx.tanh(state[0] + x * y)), {"sum": state[0], "twice": 2 * x}

        last, seen = scan(body, (x[0], x[1]), x)
        return *last, seen["sum"], seen["twice"]

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 3)), np.array([0.5, 1.0, 2.0])
    program, found = program_of(f, x, y)
    run = Captured(lambda *xs: program.run(*xs, *found), array(x), array(y))
    for _ in range(2):
        x = rng.standard_normal((20, 3))
        for got, want in zip(run(x, y), f(x, y), strict=True):
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


# ------------------------------------------------------------------------------ the driver's part


class Driver:
    """Writes down what is asked of it."""

    def __init__(self, cuda):
        self.log = []
        self.graph = {0: "main"}
        self.last = ["node0"]
        self.capturing = []
        names = ["cuGraphAddNode", "cuStreamUpdateCaptureDependencies", "cuStreamGetCaptureInfo"]
        for name in names:
            function = getattr(self, f"_{name}")
            suffix = {12: "_v3" if "Info" in name else "_v2", 13: ""}[cuda]
            if suffix:
                setattr(self, name, lambda *args: pytest.fail("knows of no edges"))
            setattr(self, name + suffix, function)
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUstream = lambda ptr: ptr
        self.CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL="conditional")
        self.CUgraphConditionalNodeType = SimpleNamespace(
            CU_GRAPH_COND_TYPE_IF="if", CU_GRAPH_COND_TYPE_WHILE="while"
        )
        self.CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(
            CU_STREAM_SET_CAPTURE_DEPENDENCIES="set"
        )
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
        self.CUgraphNodeParams = lambda: SimpleNamespace(conditional=SimpleNamespace())

    def cuCtxGetCurrent(self):
        return 0, "context"

    def cuGraphConditionalHandleCreate(self, graph, context, default, flags):
        self.log.append(("handle in", graph, context, default, flags))
        return 0, 100 + len(self.log)

    def _cuStreamGetCaptureInfo(self, stream):
        return 0, "active", 1, self.graph[stream], list(self.last), ["edge"], len(self.last)

    def _cuGraphAddNode(self, graph, nodes, edges, n, params):
        c = params.conditional
        self.log.append(("node in", graph, tuple(nodes), edges, n, c.type, c.size, c.handle, c.ctx))
        c.phGraph_out = [f"body{i}" for i in range(c.size)]
        return 0, "node1"

    def _cuStreamUpdateCaptureDependencies(self, stream, nodes, edges, n, flags):
        self.log.append(("after", stream, tuple(nodes), edges, n, flags))
        return (0,)

    def cuStreamBeginCaptureToGraph(self, stream, graph, nodes, edges, n, mode):
        self.log.append(("begin", stream, graph, mode))
        self.graph[stream] = graph
        return (0,)

    def cuStreamEndCapture(self, stream):
        self.log.append(("end", stream))
        return 0, self.graph.pop(stream)


class Stream:
    current = [SimpleNamespace(ptr=0)]
    made = 0

    def __init__(self, non_blocking):
        assert non_blocking
        Stream.made += 1
        self.ptr = Stream.made

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *exc):
        Stream.current.pop()


@pytest.fixture(params=[12, 13], ids=lambda n: f"CUDA {n}")
def driver(request, monkeypatch):
    fake = Driver(request.param)
    cuda = SimpleNamespace(Stream=Stream, get_current_stream=lambda: Stream.current[-1])
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setitem(_device.__dict__, "driver", fake)
    monkeypatch.setitem(_device.__dict__, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_replay, "_Block", lambda n_bytes: None)
    monkeypatch.setattr(
        _conditional,
        "_setter",
        lambda device_id: lambda grid, block, args: fake.log.append(("set", int(args[0]), args[1])),
    )
    return fake


def test_a_node_comes_after_what_was_captured_and_before_what_follows(driver):
    class Test(np.ndarray):
        data = SimpleNamespace(device_id=0)

    test = np.array(True).view(Test)
    with _replay.Recorder() as recorder:
        node = _conditional._Node("IF", test, 2)
        handle = 101
        assert driver.log == [
            ("handle in", "main", "context", 0, 0),
            ("set", handle, test),
            ("node in", "main", ("node0",), ["edge"], 1, "if", 2, handle, "context"),
            ("after", 0, ("node1",), None, 1, "set"),
        ]
        driver.log.clear()
        with node.body(0):
            inner = _conditional._Node("WHILE", test, 1)
            with inner.body(0):
                inner.set(test)
        inner_handle = driver.log[2][1]
        assert [entry[:3] for entry in driver.log] == [
            ("begin", 1, "body0"),
            ("handle in", "body0", "context"),
            ("set", inner_handle, test),
            ("node in", "body0", ("node0",)),
            ("after", 1, ("node1",)),
            ("begin", 2, "body0"),
            ("set", inner_handle, test),
            ("end", 2),
            ("end", 1),
        ]
        driver.log.clear()
        with pytest.raises(ZeroDivisionError), node.body(1):
            1 / 0  # noqa: B018
        assert [entry[:3] for entry in driver.log] == [("begin", 1, "body1"), ("end", 1)]
        assert recorder.bodies == ["body0", "body0", "body1"]
        assert recorder.depth == 0


def test_a_failing_driver_is_named(driver):
    driver.cuGraphConditionalHandleCreate = lambda *args: (SimpleNamespace(name="NO_GRAPH"), None)
    driver.cuGraphConditionalHandleCreate.__name__ = "cuGraphConditionalHandleCreate"
    with _replay.Recorder(), pytest.raises(RuntimeError, match="HandleCreate failed with NO_GRAPH"):
        _conditional._Node("IF", None, 2)


@pytest.mark.parametrize("cc", [80, 90, 100])
def test_the_kernel_that_sets_a_test_is_machine_code(cc):
    link = pytest.importorskip("cuda.bindings.nvjitlink")
    try:
        handle = link.create(1, [f"-arch=sm_{cc}"])
    except Exception as error:
        pytest.skip(f"nvJitLink does not load: {error}")
    code = _conditional._SETTER
    link.add_data(handle, link.InputType.PTX, code, len(code), "setter")
    link.complete(handle)
    assert link.get_linked_cubin_size(handle) > 1000


# ---------------------------------------------------------------------------------- on the GPU

on_gpu = pytest.mark.gpu


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        if not _conditional.is_available():
            pytest.skip("needs a driver of CUDA 12.8")
        yield found
    gc.collect()


def on_host(x):
    return _device.to_device(x.data if isinstance(x, rx.Tensor) else x, "cpu")


def agree(step, function, *cases, exact=True):
    """Call a captured or fused step in turn, and compare with the function on the host."""
    for values in (*cases, *cases):
        arrays = [rx.asarray(v, device="cuda:0") for v in values]
        got, want = step(*arrays), function(*values)
        got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        for a, b in zip(got, want, strict=True):
            assert_close(on_host(a), np.asarray(b), exact=exact)


def until_large(x):
    return while_loop(lambda x: rx.max(x) < 100, lambda x: 3 * x, x) + 1


LINES = [np.array(v, "float32") for v in ([1, 2], [300, 1], [50, 60], [0.5, 0.25])]


@on_gpu
@pytest.mark.parametrize("make", [rx.capture, rx.jit, rx.fuse])
def test_gpu_loops_are_those_of_the_host(cupy, make):
    agree(make(until_large), until_large, *([x] for x in LINES))


@on_gpu
@pytest.mark.parametrize("make", [rx.capture, rx.jit, rx.fuse])
@pytest.mark.parametrize("first", [27, 1], ids=["rounds", "no round"])
def test_gpu_branches_and_loops_in_loops(cupy, make, first):
    def collatz(n):
        def body(state):
            n, steps, total = state
            n = cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
            count = while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + 1), (steps, total))
            return n, steps + 1, count[1]

        return while_loop(lambda s: s[0] != 1, body, (n, n * 0, n * 0))

    agree(make(collatz), collatz, *([np.array(n)] for n in (first, 2, 1, 97)))


@on_gpu
@pytest.mark.parametrize("make", [rx.capture, rx.jit])
@pytest.mark.parametrize("first", [1, -1], ids=["then", "otherwise"])
def test_gpu_branches(cupy, make, first):
    """``first`` is the branch that the eager call takes; the other's plans come later."""
    weight = np.arange(16.0, dtype="float32").reshape(4, 4)
    on_device = rx.asarray(weight, device="cuda:0")

    def step(x, weight):
        def product(x):
            return rx.tanh(rx.matmul(x, weight)), rx.sum(x)

        return cond(rx.sum(x) > 0, product, lambda x: (x, rx.max(x)), x)

    captured = make(lambda x: step(x, on_device))
    xs = [sign * np.full((2, 4), 0.25, "float32") for sign in (first, -first)]
    agree(captured, lambda x: step(x, weight), *([x] for x in xs), exact=False)
    if make is rx.capture:
        assert captured.n_captures == 1


@on_gpu
def test_gpu_constants_that_a_capture_needs_first(cupy):
    def step(x):
        def shifted(x):
            return x + _device.constant(x, np.arange, 5, dtype=np.dtype("float32"))

        return cond(rx.sum(x) > 0, shifted, lambda x: x, x)

    _device._on_gpu.cache_clear()
    agree(rx.capture(step), step, *([np.full(5, v, "float32")] for v in (-1, 1, 2)))


@on_gpu
def test_gpu_ten_thousand_rounds(cupy):
    step = rx.capture(
        lambda n: while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + 1), (n, n * 0))
    )
    agree(step, lambda n: (n * 0, n), [np.array(10_000)], [np.array(0)], [np.array(9_999)])


@on_gpu
def test_gpu_products_in_a_loop(cupy):
    a = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")
    a = (a @ a.T / 64).astype("float32")

    def largest(a, x):
        def body(state):
            i, x, _ = state
            y = rx.matmul(a, x)
            return i + 1, y / rx.sqrt(rx.sum(y * y)), rx.max(rx.abs(y / rx.sqrt(rx.sum(y * y)) - x))

        zero = rx.max(x) * 0
        return while_loop(lambda s: s[2] > 1e-5, body, (zero, x, zero + 1))[1]

    x = np.full((64, 1), 0.125, "float32")
    want = np.abs(np.linalg.eigh(a.astype("float64"))[1][:, -1:])
    for make in (rx.capture, rx.jit):
        step = make(lambda a, x: largest(a, x))
        for _ in range(3):
            got = step(cupy.asarray(a), cupy.asarray(x))
            np.testing.assert_allclose(np.abs(on_host(got)), want, atol=1e-2)


@on_gpu
@pytest.mark.parametrize("n", [20, 3000], ids=["one by one", "counted by the GPU"])
def test_gpu_scans(cupy, monkeypatch, n):
    monkeypatch.setattr(_control_steps, "MOST_RECORDED", 1024)

    def f(x, y):
        def body(state, x):
            return (state[1], rx.tanh(state[0] + x * y)), {"sum": state[0], "twice": 2 * x}

        last, seen = scan(body, (x[0], x[1]), x)
        return *last, seen["sum"], seen["twice"]

    rng = np.random.default_rng(0)
    cases = [[rng.standard_normal((n, 3)), np.array([0.5, 1.0, 2.0])] for _ in range(3)]
    agree(rx.jit(f), f, *cases, exact=False)


@on_gpu
def test_gpu_training_with_a_loop_inside(cupy):
    """A step whose forward pass refines its input, as often as that takes; with an optimizer."""

    def train(make):
        w = rx.Tensor(cupy.full(8, 0.5, "float32"), requires_grad=True)
        optimizer = optim.Adam([w], lr=0.1)

        def step(x):
            optimizer.zero_grad()
            x = while_loop(lambda x: rx.sum(x * x) > 1, lambda x: x * 0.5, x)
            loss = rx.mean((x * w - 1) ** 2)
            loss.backward()
            optimizer.step()
            return loss

        step = make(step)
        losses = [step(cupy.full(8, 10.0**i, "float32")).item() for i in (0, 1, -1, 2, 3, 1)]
        return losses, on_host(w)

    want = train(lambda f: f)
    got = train(rx.capture)
    assert got[0] == want[0]
    assert_close(got[1], want[1], exact=True)


@on_gpu
@pytest.mark.parametrize("place", ["loop", "branch", "inner loop"])
def test_gpu_reading_in_a_body_is_refused_by_line(cupy, place):
    def step(x):
        def read(x):
            return x + float(x[0])  # refused here

        if place == "branch":
            return cond(x[1] > 0, lambda x: x, read, x)
        if place == "loop":
            return while_loop(lambda x: x[0] < 5, read, x)
        return while_loop(lambda x: x[0] < 5, lambda x: while_loop(lambda x: x[0] < 5, read, x), x)

    run = rx.capture(step)
    x = cupy.asarray([1.0, -1.0])
    run(x)
    for _ in range(2):
        with pytest.raises(CaptureError, match="test_conditional.py:.*float.* waits for the GPU"):
            run(x)
    good = rx.capture(until_large)
    agree(good, until_large, *([x] for x in LINES))


@on_gpu
def test_gpu_draws_in_loops_and_branches_are_those_of_the_host(cupy):
    ours, theirs = Generator(5), Generator(5)
    run = rx.capture(lambda x: draws(ours, x))
    for case in ([0.0, 0.0], [20.0, 0.0], [-30.0, 0.0], [0.0, 1.0], [1.0, 0.0]):
        x = cupy.asarray(case, "float32")
        for a, b in zip(run(x), draws(theirs, x), strict=True):
            assert_close(on_host(a), on_host(b), exact=True)
        if case[0]:  # the host asks in between, or does not
            assert ours.state_dict() == theirs.state_dict()
            assert_close(on_host(ours.uniform(3)), on_host(theirs.uniform(3)), exact=True)
    assert run.n_captures == 1


@on_gpu
def test_gpu_gradients_within_a_round(cupy):
    agree(
        rx.capture(descend), descend, [np.array([1.0, 0.5])], [np.array([2.0, 1.25])], exact=False
    )


@on_gpu
def test_gpu_dropout_in_a_loop(cupy):
    """A network called as often as its result asks, with dropout in it."""

    def make(seed):
        rng = Generator(seed)

        def step(x, w):
            def body(x):
                return rx.dropout(rx.matmul(x, w), 0.3, generator=rng)

            return while_loop(lambda x: rx.sum(rx.abs(x)) > 1, body, x)

        return step

    w = rx.asarray(np.random.default_rng(0).standard_normal((64, 64)) / 16, device="cuda:0")
    w = rx.astype(w, "float32")
    ours, theirs = rx.capture(make(1)), make(1)
    for scale in (1, 100, 0, 10):
        x = cupy.full((8, 64), scale, "float32")
        assert_close(on_host(ours(x, w)), on_host(theirs(x, w)), exact=True)


@on_gpu
def test_gpu_arrays_that_only_a_body_uses_are_watched(cupy):
    held = {"scale": cupy.full(2, 3.0)}

    def step(x):
        return while_loop(lambda x: x[0] < 100, lambda x: x * held["scale"], x)

    run = rx.capture(step)
    x = cupy.ones(2)
    assert [float(run(x)[0]) for _ in range(3)] == [243, 243, 243]
    held["scale"] = cupy.full(2, 10.0)  # noticed: recorded anew
    assert [float(run(x)[0]) for _ in range(2)] == [100, 100]
    assert run.n_captures == 2

    def replaces(x):
        def body(x):
            out = x * held["scale"]
            held["scale"] = out * 0 + 2
            return out

        return while_loop(lambda x: x[0] < 100, body, x)

    run = rx.capture(replaces)
    run(x)
    with pytest.raises(CaptureError, match="in place of one that it uses|lets go of an array"):
        run(x)


@on_gpu
def test_gpu_two_steps_and_their_memory(cupy):
    double = rx.capture(lambda x: while_loop(lambda x: rx.max(x) < 50, lambda x: 2 * x, x))
    triple = rx.capture(lambda x: while_loop(lambda x: rx.max(x) < 50, lambda x: 3 * x, x))
    x = cupy.ones(1 << 20, "float32")
    for _ in range(4):
        assert float(double(x)[0]) == 64
        assert float(triple(x)[7]) == 81
    assert double.pool_bytes(rx.device("cuda:0")) >= 4 << 20
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.cuda.runtime.memGetInfo()[0]
    double.clear()
    triple.clear()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers use the GPU, too
        assert cupy.cuda.runtime.memGetInfo()[0] - before >= 8 << 20
    assert float(double(x)[0]) == 64


@on_gpu
def test_gpu_many_captures_leak_nothing(cupy):
    def work():
        for i in range(50):
            step = rx.capture(until_large)
            for _ in range(3):
                step(cupy.full(2, 1.0 + i))

    def held():
        gc.collect()
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.get_default_memory_pool().used_bytes()

    work()
    used = held()
    work()
    assert held() == used


@on_gpu
def test_gpu_kernels_of_a_captured_loop_are_patched(cupy):
    f = rx.fuse(lambda x: while_loop(lambda s: s[0] < 100, lambda s: s * 3, x))
    x = cupy.asarray([1.0, 2.0])
    for _ in range(3):
        assert on_host(f(x)).tolist() == [243, 486]
    (program,) = (m.program for found in f._programs.values() for m in found)
    body = program.parts[1]

    def kernel(x, three, out):
        cupy.multiply(x, three, out=out)

    (name,) = (step.name for step in body.steps if step.loops is not None)
    done = patch(body, name, kernel, max_slowdown=None, calls=[(x,)])
    for _ in range(3):
        assert on_host(f(x)).tolist() == [243, 486]
    done.rollback()
    assert on_host(f(x)).tolist() == [243, 486]


@on_gpu
def test_gpu_fused_loops_launch_once(cupy):
    step = rx.fuse(until_large)
    for n in range(4):
        assert_close(on_host(step(cupy.asarray(LINES[0]))), until_large(LINES[0]))
        (program,) = (m.program for found in step._programs.values() for m in found)
        (loop,) = (s.run for s in program.steps if s.name.startswith("while_loop"))
        assert loop._captured.n_captures == min(n, 1)
    assert loop.round is not None

    def waits(x):
        return while_loop(lambda x: rx.max(x) < 100, lambda x: rx.sort(x * 2), x)

    agree(rx.fuse(waits), waits, *([x] for x in LINES))
