"""A GPU that is not there: arrays whose operations are recorded, and run again at each replay.

What NumPy does to an :class:`Array` during a capture is done at once, too, so that results have the
shapes and dtypes that they will have; a branch or loop is recorded by doing its parts once.
"""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np

from rtxarr import _allocation, _device, _replay, random
from rtxarr.autograd import _conditional
from rtxarr.autograd._tape import Tensor
from rtxarr.kernels import philox
from rtxarr.polygraph import _control_steps, _program


class Machine:
    """What is being recorded, and the tests that nodes look at."""

    def __init__(self):
        self.open = []  # graphs, the innermost last
        self.tests = {}
        self.n_rounds = 0  # that loops have made

    def do(self, function):
        """Do something, now and in each replay."""
        function()
        if self.open:
            self.open[-1].append(function)

    @contextlib.contextmanager
    def recording(self):
        self.open.append([])
        try:
            yield self.open[-1]
        finally:
            self.open.pop()

    def run(self, graph):
        for function in graph:
            function()


machine = Machine()


class Array(np.ndarray):
    """On the GPU, as it were."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        inputs = [_plain(x) for x in inputs]
        function = getattr(ufunc, method)
        if out is None:
            made = np.asarray(function(*inputs, **options))
        else:
            made = np.asarray(out[0])
        machine.do(lambda: function(*inputs, out=made, **options))
        return made.view(Array) if out is None else out[0]

    def __array_function__(self, function, types, args, options):
        if function is not np.take:
            return super().__array_function__(function, types, args, options)
        args = [_plain(x) for x in args]
        made = function(*args, **options)
        machine.do(lambda: made.__setitem__(..., function(*args, **options)))
        return made.view(Array)

    def __setitem__(self, key, value):
        keys = key if isinstance(key, tuple) else (key,)
        keys, value, to = tuple(map(_plain, keys)), _plain(value), np.asarray(self)
        machine.do(lambda: to.__setitem__(keys, value))

    def copy(self, order="C"):
        return self.astype(self.dtype)

    def astype(self, dtype, **options):
        made, source = np.empty(self.shape, dtype), np.asarray(self)
        machine.do(lambda: made.__setitem__(..., source))
        return made.view(Array)

    def get(self, stream):
        return np.array(self)

    def __bool__(self):
        if machine.open:
            raise RuntimeError("operation not permitted when stream is capturing")
        return bool(np.asarray(self))


def _plain(x):
    return np.asarray(x) if isinstance(x, Array) else x


class Recorder(_replay.Recorder):
    """One whose memory is the host's."""

    def section(self, values, make):
        out = values.copy().view(Array)
        self._blocks.append((out, values))
        self.updates.append(lambda: values.__setitem__(..., make()))
        return out

    def upload(self):
        for out, values in self._blocks[1:]:
            np.asarray(out)[...] = values


class Event:
    """Where ``stream.record()`` was called."""

    n_waits = 0

    def record(self):
        return self

    def synchronize(self):
        Event.n_waits += 1


def array(values, dtype=None):
    return np.array(values, dtype).view(Array)


class Node:
    """Stands in for the driver's part of a branch or loop."""

    def __init__(self, kind, test, n_bodies):
        self._bodies = [[] for _ in range(n_bodies)]
        self.set(test)
        (machine.open[-1]).append(self._loop if kind == "WHILE" else self._branch)

    def set(self, test):
        test = np.asarray(test)
        assert test.size == 1
        machine.do(lambda: machine.tests.__setitem__(id(self), bool(test)))

    def _loop(self):
        while machine.tests[id(self)]:
            machine.n_rounds += 1
            machine.run(self._bodies[0])

    def _branch(self):
        machine.run(self._bodies[0 if machine.tests[id(self)] else 1])

    @contextlib.contextmanager
    def body(self, number):
        with _replay.recorder().inside(None), machine.recording() as graph:
            yield
        self._bodies[number] = graph


def fill(kind, n, dtype, params, *, place, shift=0):
    """Draw from a place in memory."""
    made = np.empty(n, dtype)

    def draw():
        offset, stream, key = np.asarray(place)
        options = {"key": key, "stream": stream, "offset": int(offset) + shift}
        made[...] = _fill(kind, n, dtype, params, device=_device.Device("cpu"), **options)

    machine.do(draw)
    return made.view(Array)


_fill = philox.fill


def advanced(cursor, n, width):
    """Move a place in memory."""
    made = np.empty(3, np.uint64)

    def advance():
        made[...] = cursor
        made[0] += made[0] % np.uint64(width)
        np.asarray(cursor)[0] = made[0] + np.uint64(n * width)

    machine.do(advance)
    return made.view(Array)


def allocation_on_host(x, allocation):
    return (_allocation.owner_of(x), 0) if isinstance(x, Array) else allocation(x)


def install(monkeypatch):
    """Let arrays of this file be those of a GPU whose driver has conditional nodes."""
    real, allocation = _device.is_device_array, _allocation.allocation_of
    monkeypatch.setattr(_device, "is_device_array", lambda x: isinstance(x, Array) or real(x))
    monkeypatch.setattr(_allocation, "allocation_of", lambda x: allocation_on_host(x, allocation))
    monkeypatch.setattr(
        _device, "constant", lambda like, make, *key, dtype=None: array(make(*key), dtype)
    )
    monkeypatch.setattr(_device, "full_scalar", lambda like, value, dtype: array(value, dtype))
    cuda = SimpleNamespace(
        Stream=lambda **options: contextlib.nullcontext(),
        runtime=SimpleNamespace(getDevice=lambda: 0),
    )
    monkeypatch.setitem(_device.__dict__, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_program, "_copy", lambda x: x.copy())
    for module in (_program, _control_steps):
        monkeypatch.setattr(module, "contiguous", lambda x: x.copy())
    broadcast = functools.partial(np.broadcast_to, subok=True)
    monkeypatch.setattr(_program, "_broadcast", broadcast)
    monkeypatch.setattr(_replay, "_Block", lambda n_bytes: None)
    monkeypatch.setattr(philox, "fill_from_memory", fill)
    monkeypatch.setattr(random, "advanced", advanced)
    monkeypatch.setattr(_conditional, "_Node", Node)
    monkeypatch.setattr(_conditional, "is_available", lambda: True)
    monkeypatch.setattr(_conditional, "_setter", lambda device_id: None)
    machine.__init__()
    Event.n_waits = 0


def plain(x):
    """Return what NumPy sees of an array or Tensor."""
    return np.asarray(x.data if isinstance(x, Tensor) else x)


class Captured:
    """A step that is recorded once, on arguments that stay where they are."""

    def __init__(self, step, *args):
        self.args = args
        self.recorder = Recorder()
        self.n_replays = 0
        with self.recorder, machine.recording() as self.graph:
            self.result = step(*args)

    def __call__(self, *values):
        if self.n_replays:
            self.recorder.refresh()
        self.n_replays += 1
        self.recorder.upload()
        for x, value in zip(self.args, values, strict=True):
            np.asarray(x)[...] = value
        machine.run(self.graph)
        self.recorder.started(Event())
        return self.result
