"""Programs on streams: which step goes where, and that no stream reads or writes too early.

Streams are pretended: each has a clock, memory comes from the stream that asks and goes back to it,
and what a step reads and writes is held against what its stream has waited for.
"""

import contextlib
import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph import _program, _streams
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._ir import Graph
from rtxarr.polygraph._program import Program
from rtxarr.testing import assert_close

from .random_graphs import Maker


@pytest.fixture(autouse=True)
def what_gains_little_too(monkeypatch):
    monkeypatch.setattr(_streams, "_WORTH", 0.95)


class World:
    """Streams with clocks, and the memory that their steps touch."""

    def __init__(self):
        self.stream, self.n_streams = 0, 1
        self.clocks = {0: {}}
        self.free, self.writes, self.reads = {}, {}, {}
        self.hazards = []
        self.deaf = False  # waits are lost

    def tick(self):
        clock = self.clocks[self.stream]
        clock[self.stream] = clock.get(self.stream, 0) + 1
        return self.stream, clock[self.stream]

    def knows(self, event):
        stream, time = event
        return self.clocks[self.stream].get(stream, 0) >= time

    def empty(self, shape, dtype):
        dtype = np.dtype(dtype)
        n = int(np.prod(shape)) * dtype.itemsize
        blocks = self.free.setdefault((self.stream, n), [])
        block = blocks.pop() if blocks else bytearray(max(n, 1))
        block[:] = b"\xff" * len(block)
        out = np.frombuffer(block, dtype, int(np.prod(shape)))
        weakref.finalize(out, blocks.append, block)
        return out.reshape(shape)

    def arena(self, n_bytes, parts):
        def take():
            block = self.empty((n_bytes,), np.uint8)
            made = {p: np.ndarray(*p[1:], block, p[0]) for p in parts}
            return [made[p] for p in parts]

        return take, None

    def touch(self, sources, results):
        now = self.tick()
        for x in sources:
            place = byte_bounds(x)
            if not all(map(self.knows, among(self.writes, place))):
                self.hazards.append("read before it is written")
            self.reads.setdefault(place, []).append(now)
        for x in results:
            place = byte_bounds(x)
            before = [*itertools.chain(*among(self.reads, place)), *among(self.writes, place)]
            if not all(map(self.knows, before)):
                self.hazards.append("written before it is read")
            self.writes[place] = now

    def streams(self, products):
        self.n_streams = len(products)
        for stream in range(1, self.n_streams):
            self.clocks[stream] = dict(self.clocks[0])
        return self

    def mark(self, stream):
        return dict(self.clocks[stream])

    def wait(self, stream, *events):
        clock = self.clocks[stream]
        for event in () if self.deaf else events:
            for other, time in event.items():
                clock[other] = max(clock.get(other, 0), time)

    @contextlib.contextmanager
    def on(self, stream, *events):
        self.wait(stream, *events)
        self.stream = stream
        yield
        self.stream = 0

    def join(self):
        self.wait(0, *map(self.mark, range(1, self.n_streams)))


def among(known, place):
    """Return what is known of memory that a place overlaps."""
    low, high = place
    return [what for (begin, end), what in known.items() if begin < high and low < end]


class Pretended(CpuBackend):
    def __init__(self, world):
        super().__init__()
        self.world = world
        self.empty, self.arena, self.streams = world.empty, world.arena, world.streams


def watched(graph, world, monkeypatch):
    """Return a program on streams that notes what it touches; None if one stream is as good."""
    program = Program(graph, Pretended(world))
    if program.streams is None:
        return None

    def watch(step):
        def kernel(*arrays):
            n = len(step.sources)
            world.touch([a for a in arrays[:n] if isinstance(a, np.ndarray)], arrays[n:])
            step.run(*arrays)

        def operation(*sources, **options):
            arrays = [a for a in sources if isinstance(a, np.ndarray)]
            out = step.run(*sources, **options)
            if out is options.get("out", 0):
                world.touch(arrays, [out])
                return out
            if not isinstance(out, np.ndarray) or any(np.shares_memory(out, a) for a in arrays):
                world.touch(arrays, [])
                return out
            copy = world.empty(out.shape, out.dtype)
            copy[...] = out
            world.touch(arrays, [copy])
            return copy

        if step.run is None:
            return step
        operation.writes = getattr(step.run, "writes", None)
        return step._replace(run=operation if step.loops is None else kernel)

    program.steps = [watch(step) for step in program.steps]
    program.assemble()
    monkeypatch.setattr(_program, "recorder", lambda: "one")
    return program


def of_seeds(monkeypatch, n, change=lambda world, program: None):
    """Run random graphs on streams; give how many there were and the hazards."""
    count, hazards = 0, []
    for seed in range(n):
        maker = Maker(seed, n_steps=24)
        graph = maker.graph()
        monkeypatch.setattr(_program, "recorder", lambda: None)
        want = Program(graph, CpuBackend())(*(x.copy() for x in maker.arrays()))
        world = World()
        program = watched(graph, world, monkeypatch)
        if program is None:
            continue
        count += 1
        change(world, program)
        arrays = [x.copy() for x in maker.arrays()]
        with np.errstate(all="ignore"):
            got = program(*arrays)
        hazards += world.hazards
        if not world.hazards:
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, exact=True)
    return count, hazards


def test_random_programs_touch_nothing_too_early(monkeypatch):
    count, hazards = of_seeds(monkeypatch, 80)
    assert count > 10
    assert hazards == []


def test_lost_waits_are_seen(monkeypatch):
    def deafen(world, program):
        world.deaf = True

    assert of_seeds(monkeypatch, 60, deafen)[1]


def chain_with_leaves():
    first, w = inputs = [ir.input_node(i, np.dtype("float32"), (8, 8)) for i in range(2)]
    x, leaves = first, []
    for _ in range(6):
        x = ir.matmul(x, w)
        leaves.append(ir.matmul(ir.matmul(w, x), x))
    return Graph(tuple(inputs), (x, *leaves))


@pytest.mark.parametrize("holds", [True, False])
def test_memory_goes_back_when_all_streams_have_met(holds, monkeypatch):
    world = World()
    world.arena = None  # all memory is of one stream
    program = watched(chain_with_leaves(), world, monkeypatch)
    if not holds:
        forgotten = program.streams._replace(held=set())
        parts = [program._head()], program._body(), program._write_back([])
        exec(_streams.write(*parts, forgotten, program._names), program._values)
        program.run = program._values["program"]
    program(*np.eye(8, dtype=np.float32)[None].repeat(2, 0))
    assert ("written before it is read" in world.hazards) is not holds


def test_a_chain_stays_on_one_stream():
    n = 6
    assert (
        _streams.list_schedule([2.0] * n, [[i - 1] if i else [] for i in range(n)], [True] * n)
        is None
    )


def test_what_the_chain_does_not_need_leaves_it():
    """A chain whose every step has a leaf, as products and the gradients of their weights."""
    needs = [[], [0], [0], [1], [1], [3], [3]]
    streams = _streams.list_schedule([2.0] * 7, needs, [True] * 7)
    assert [streams[i] for i in (0, 1, 3)] == [0, 0, 0]
    assert 0 not in (streams[2], streams[4])
    fixed = _streams.list_schedule([2.0] * 7, needs, [True, True, False, True, False, True, False])
    assert {fixed[i] for i in (2, 4, 6)} == {0}


def test_long_kernels_stay():
    shape = (4096, 4096)
    x = ir.input_node(0, np.dtype("float32"), shape)
    sums = [ir.reduce_node("sum", ir.map_node(op, x), (0,)) for op in ("tanh", "sin", "abs")]
    program = Program(Graph((x,), tuple(sums)), Pretended(World()))
    assert program.streams is None


def training_step():
    rx.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 64), rx.tanh, nn.Linear(64, 64), rx.tanh, nn.Linear(64, 8))
    optimizer = optim.Adam(model.parameters(), 1e-3)

    def step(x, labels):
        optimizer.zero_grad()
        loss = rx.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def programs_of(run):
    return [compiled.program for found in run._programs.values() for compiled in found]


def test_gradients_of_weights_run_beside_the_chain():
    run = rx.jit(training_step(), backend=Pretended(World()))
    x, labels = np.ones((16, 64), np.float32), np.zeros(16, np.int64)
    run(x, labels)
    (program,) = programs_of(run)
    assert program.streams is not None
    assert "captured, on " in str(run.explain())


class Stream:
    """Notes what it waits for."""

    def __init__(self, non_blocking=True):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class Event:
    def __init__(self, disable_timing):
        self.stream = None

    def record(self, stream):
        self.stream = stream


def test_a_program_in_another_has_other_streams(monkeypatch):
    """What it frees would be used by the other's streams, which do not wait for its end."""
    main, runtime = Stream(), SimpleNamespace(getDevice=lambda: 0)
    cuda = {"Stream": Stream, "Event": Event, "runtime": runtime}
    cupy = SimpleNamespace(cuda=SimpleNamespace(**cuda, get_current_stream=lambda: main))
    monkeypatch.setattr(_streams, "_device", SimpleNamespace(cupy=cupy))
    monkeypatch.setattr(_streams, "_free", _streams._Free())
    outer, inner = (_streams.Streams((False,) * 3) for _ in range(2))
    streams = [{*found._streams} - {main} for found in (outer, inner)]
    assert [len(found) for found in streams] == [2, 2]
    assert not streams[0] & streams[1]
    inner.join()
    assert {event.stream for event in main.waits} == streams[1]
    again = _streams.Streams((False, False))
    assert {*again._streams} - {main} < streams[1]


@pytest.mark.gpu
def test_captured_steps_on_streams_give_the_bits_of_one_stream(monkeypatch):
    cupy = pytest.importorskip("cupy")
    x = cupy.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    labels = cupy.arange(64) % 8

    def losses(capture):
        run = rx.jit(training_step(), capture=capture)
        found = [float(run(x, labels).data) for _ in range(20)]
        return run, found

    with rx.device("cuda:0"):
        run, got = losses(True)
        _, want = losses(False)
    assert run._captured.n_captures == 1
    assert any(program.streams is not None for program in programs_of(run))
    assert got == want
