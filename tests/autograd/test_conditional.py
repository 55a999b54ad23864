"""Branches and loops that a GPU decides in captured steps, and what they refuse."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _replay, optim
from rtxarr.autograd import CaptureError, _capture_errors, _conditional
from rtxarr.autograd._witness import Witness
from rtxarr.polygraph import cond, while_loop
from rtxarr.random import Generator
from rtxarr.testing import assert_close

from . import pretended
from .pretended import Array, Captured, array, machine, plain


@pytest.fixture
def gpu(monkeypatch):
    pretended.install(monkeypatch)


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


def collatz(n):
    def body(state):
        n, steps, total = state
        n = cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
        # As often as there were steps, a loop whose rounds the outer one decides.
        count = while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + 1), (steps, total))
        return n, steps + 1, count[1]

    return while_loop(lambda s: s[0] != 1, body, (n, n * 0, n * 0))


def test_branches_and_loops_in_loops(gpu):
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
    except (_device.DynamicLibNotFoundError, RuntimeError) as error:
        pytest.skip(f"nvJitLink does not load: {error}")
    code = _conditional._SETTER
    link.add_data(handle, link.InputType.PTX, code, len(code), "setter")
    link.complete(handle)
    assert link.get_linked_cubin_size(handle) > 1000
