"""Tables and traces of where the time goes."""

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, _profile, nn
from rtxarr.autograd._mode import PROFILED, profiles, state
from rtxarr.testing import assert_close


class Clock:
    """Stands still until it is told to go on."""

    now = 0

    def perf_counter_ns(self):
        return self.now

    def spend(self, ms):
        self.now += int(ms * 1e6)


clock = Clock()


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    monkeypatch.setattr(_profile, "time", clock)


@rx.custom_op
def slow(x, /, *, forward, backward):
    clock.spend(forward)
    return x * 1


@slow.defvjp
def _slow_rule(g, backward):
    clock.spend(backward)
    return (g,)


class Slow(nn.Module):
    def __init__(self, forward, backward):
        self.times = {"forward": forward, "backward": backward}

    def forward(self, x):
        return slow(x, **self.times)


class Pair(nn.Module):
    def __init__(self):
        self.parts = [Slow(20, 40), Slow(10, 0)]

    def forward(self, x):
        clock.spend(5)
        return self.parts[1](self.parts[0](x))


def tracked(*shape):
    return rx.Tensor(np.ones(shape or 3), requires_grad=True)


def rows(found):
    return {row.name: row for row in found}


def test_operations_and_their_gradients_are_counted():
    x = tracked()
    with rx.profile(device="cpu") as p:
        for _ in range(3):
            rx.sum(rx.tanh(x * 2) + x).backward()
    found = rows(p.operations())
    assert set(found) == {
        *("multiply", "tanh", "add", "sum"),
        *("multiply backward", "tanh backward", "add backward", "sum backward"),
    }
    assert {row.calls for row in found.values()} == {3}
    assert p.modules() == p.ranges() == []


def test_time_goes_to_the_operation_and_the_module_that_took_it():
    model = Pair()
    with rx.profile(device="cpu") as p:
        y = model(tracked())
        rx.sum(y).backward()
    operations, modules = rows(p.operations()), rows(p.modules())
    assert list(operations)[0] == "slow backward"  # the slowest first
    assert operations["slow"].host_ms == 30
    assert operations["slow backward"].host_ms == 40
    assert set(modules) == {"Pair", "Pair.parts.0", "Pair.parts.1"}
    # Both ways; a module has what is inside it, an operation only its own.
    assert modules["Pair"].host_ms == 75 == p.total_ms
    assert modules["Pair.parts.0"].host_ms == 60
    assert modules["Pair.parts.1"].host_ms == 10
    assert {row.calls for row in modules.values()} == {1}


def test_what_a_checkpoint_repeats_is_named_and_counted_apart():
    model = Pair()
    with rx.profile(device="cpu") as p:
        rx.sum(rx.checkpoint(lambda x: rx.exp(model(x)), tracked())).backward()
    operations, modules = rows(p.operations()), rows(p.modules())
    assert operations["slow"].calls == operations["slow recompute"].calls == 2
    assert operations["slow recompute"].host_ms == 30
    assert operations["slow backward"].host_ms == 40  # without what was repeated in it
    assert modules["Pair"].calls == 1
    assert modules["Pair"].host_ms == 105


def test_recorded_backward_passes_count_their_operations_once():
    def inner(x):
        return rx.sum(slow(x, forward=20, backward=30) ** 2)

    with rx.profile(device="cpu") as p:
        rx.grad(lambda x: rx.sum(rx.grad(inner)(x)))(np.ones(3))
    found = rows(p.operations())
    assert found["slow"].host_ms == 20
    assert found["slow backward"].host_ms == 30 * found["slow backward"].calls >= 60
    assert sum(row.host_ms for row in found.values()) == p.total_ms


def test_two_models_of_one_class_have_two_names():
    a, b = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    x = np.ones((1, 3), np.float32)
    with rx.profile(device="cpu") as p:
        a(x), b(x), b(x)
    calls = {row.name: row.calls for row in p.modules()}
    assert calls == {
        "Sequential": 1,
        "Sequential.layers.0": 1,
        "Sequential-2": 2,
        "Sequential-2.layers.0": 2,
    }


def test_ranges_of_ones_own_and_several_blocks_add_up():
    p = rx.profile(device="cpu")
    for _ in range(2):
        with p, p.range("data"):
            clock.spend(10)
    (row,) = p.ranges()
    assert row.name == "data" and row.calls == 2 and row.host_ms == 20 == p.total_ms


def test_results_are_the_same_bits():
    model = nn.TransformerBlock(8, 2, dropout=0.2)
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype("float32")
    grads = []
    for profiled in (False, True):
        rx.random.seed(4)
        model.zero_grad()
        if profiled:
            with rx.profile(device="cpu"):
                rx.sum(rx.checkpoint(model, x)).backward()
        else:
            rx.sum(rx.checkpoint(model, x)).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, exact=True)


def test_blocks_nest_and_leave_nothing_behind():
    x = tracked()
    with pytest.raises(ZeroDivisionError), rx.profile(device="cpu"):
        raise ZeroDivisionError
    with rx.profile(device="cpu") as outer:
        x * 2
        with rx.profile(device="cpu") as inner:
            x + 2
        x - 2
        with rx.no_grad():
            rx.tanh(x)
    assert state.mode & PROFILED == 0 and state.profile is None and profiles == []
    x * 3
    assert {row.name for row in outer.operations()} == {"multiply", "subtract", "tanh"}
    assert {row.name for row in inner.operations()} == {"add"}


def test_it_is_of_one_thread():
    x, model = tracked(), Slow(0, 0)
    with rx.profile(device="cpu") as p:
        thread = threading.Thread(target=lambda: model(x * 2))
        thread.start()
        thread.join()
    assert p.operations() == p.modules() == []


def test_an_error_inside_closes_what_was_open():
    x = tracked()
    with rx.profile(device="cpu") as p:
        with pytest.raises(ValueError):
            x + np.ones(7)
        x + 1
    assert rows(p.operations())["add"].calls == 2
    assert p._open is None


def test_the_table_has_shares_and_says_what_it_leaves_out():
    with rx.profile(device="cpu") as p:
        Pair()(tracked())
        rx.tanh(tracked())
    lines = str(p).splitlines()
    assert lines[0].endswith("of them in operations") and " ms on cpu, " in lines[0]
    header = next(line for line in lines if line.startswith("operation"))
    assert header.split() == ["operation", "calls", "host", "ms", "share"]
    row = lines[lines.index(header) + 1].split()
    assert row[:2] == ["slow", "2"] and row[3] == "85.7%"  # 30 of 35 ms
    assert any(line.startswith("Pair.parts.1") for line in lines)
    assert "... and 1 more" in p.table(1)


# -------------------------------------------------------------------------------- traces


def check_trace(path):
    """Check a file against the trace event format; give its complete events by thread."""
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert set(event["args"]) == {"name"}
            continue
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0 and event["dur"] >= 0
        threads.setdefault(event["tid"], []).append(event)
    for events in threads.values():
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        ends = []  # complete events of a thread must nest
        for event in events:
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)
    return threads


def test_a_trace_keeps_to_the_format(tmp_path):
    model = Pair()
    with rx.profile(device="cpu") as p, p.range("step"):
        rx.sum(rx.checkpoint(lambda x: rx.exp(model(x)), tracked())).backward()
    p.save(tmp_path / "trace.json")
    events = check_trace(tmp_path / "trace.json")[1]
    names = [event["name"] for event in events]
    assert names[:3] == ["step", "Pair", "Pair.parts.0"]
    assert {"slow", "slow recompute", "slow backward", "sum backward"} <= set(names)
    assert {e["cat"] for e in events} == {
        *("range", "module", "recomputed module", "forward", "recompute", "backward"),
    }
    of = {e["name"]: e for e in events}
    assert of["slow backward"]["args"] == {"module": "Pair.parts.0"}
    assert of["step"]["dur"] == 110e3  # microseconds


def test_an_empty_trace_is_one_too(tmp_path):
    with rx.profile(device="cpu") as p:
        pass
    p.save(tmp_path / "trace.json")
    assert check_trace(tmp_path / "trace.json") == {}
    assert "ms on cpu" in str(p)


# -------------------------------------------------------------------------- on a device


class FakeCuda:
    """Events whose times are the host's, and a device that does everything in 1 ms."""

    def __init__(self):
        self.now = 0.0
        self.ranges, self.depth = [], 0
        fake = self

        class Event:
            def record(self):
                fake.now += 1.0
                self.time = fake.now

        nvtx = SimpleNamespace(RangePush=self.push, RangePop=self.pop)
        self.cuda = SimpleNamespace(
            Event=Event, get_elapsed_time=lambda a, b: b.time - a.time, nvtx=nvtx
        )

    def push(self, name):
        self.ranges.append((self.depth, name))
        self.depth += 1

    def pop(self):
        self.depth -= 1


@pytest.fixture
def fake_gpu(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(vars(_device), "cupy", fake)
    monkeypatch.setattr(_device, "device", lambda spec=None: _device.Device("cuda", 0))
    monkeypatch.setattr(_device, "synchronize", lambda place: None)
    return fake


def test_device_times_come_from_events(fake_gpu, tmp_path):
    class Layer(nn.Module):
        def forward(self, x):
            return x * x + x

    x = tracked()
    with rx.profile() as p:
        Layer()(x)
    found = rows(p.operations())
    # Each event is 1 ms after the one before: an operation has two.
    assert found["multiply"].device_ms == found["add"].device_ms == 1.0
    assert rows(p.modules())["Layer"].device_ms == 5.0
    assert "device ms" in str(p)
    p.save(tmp_path / "trace.json")
    threads = check_trace(tmp_path / "trace.json")
    assert [e["dur"] for e in threads[2]] == [5000.0, 1000.0, 1000.0]
    assert len(threads[1]) == 3


@pytest.mark.parametrize("step", [0.1, 0.15, 0.3, 0.35, 0.7])
def test_a_trace_of_coarse_device_times_nests(fake_gpu, tmp_path, step):
    """The resolution of events may be coarser than the time between two of them."""
    fake_gpu.cuda.get_elapsed_time = lambda a, b: round(2 * step * (b.time - a.time)) / 2
    x = tracked()
    with rx.profile() as p:
        for _ in range(3):
            with p.range("all"), p.range("part"):
                x * x + x
        clock.spend(1)
    p.save(tmp_path / "trace.json")
    check_trace(tmp_path / "trace.json")


def test_a_trace_begins_with_what_came_first(fake_gpu, tmp_path):
    """The device's clock may have a first operation before the host does."""
    fake_gpu.cuda.get_elapsed_time = lambda a, b: b.time - a.time - 1.5
    with rx.profile() as p:
        tracked() * 2
    p.save(tmp_path / "trace.json")
    assert check_trace(tmp_path / "trace.json")[2][0]["ts"] == 0


def test_a_captured_step_records_no_events(fake_gpu, monkeypatch):
    monkeypatch.setattr(_profile, "recorder", object)
    with rx.profile() as p:
        tracked() * 2
    assert p.operations()[0].device_ms == 0.0
    assert fake_gpu.now == 1.0  # the origin alone


def test_nvtx_ranges_are_balanced_and_named(fake_gpu):
    model = Pair()
    with rx.profile(nvtx=True):
        rx.sum(model(tracked())).backward()
    assert fake_gpu.depth == 0
    assert fake_gpu.ranges[:3] == [(0, "Pair"), (1, "Pair.parts.0"), (2, "slow")]
    assert (0, "sum backward") in fake_gpu.ranges


@pytest.mark.gpu
def test_a_gpu_has_device_times_and_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(_profile, "time", time)  # the clock here stands still
    with rx.device("cuda:0"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        x = rx.ones((4096, 1024), dtype="float32")
        rx.sum(model(x)).backward()
        with rx.profile(nvtx=True) as p:
            rx.sum(model(x)).backward()
    found = rows(p.operations())
    assert found["linear"].calls == 2
    assert 0 < found["linear"].device_ms <= p.total_ms
    assert rows(p.modules())["Sequential"].device_ms >= found["linear"].device_ms
    p.save(tmp_path / "trace.json")
    assert set(check_trace(tmp_path / "trace.json")) == {1, 2}
