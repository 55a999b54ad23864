"""A GPU that is not there: arrays whose operations are recorded, and run again at each replay.

What NumPy does to an :class:`Array` during a capture is done at once, too, so that results have the
shapes and dtypes that they will have; a branch or loop is recorded by doing its parts once.
"""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np

from rtxarr import _device, _replay
from rtxarr.autograd import _conditional
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

    def __bool__(self):
        if machine.open:
            raise RuntimeError("operation not permitted when stream is capturing")
        return bool(np.asarray(self))


def _plain(x):
    return np.asarray(x) if isinstance(x, Array) else x


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


def allocation_on_host(x, allocation):
    return (_device.owner_of(x), 0) if isinstance(x, Array) else allocation(x)


def install(monkeypatch):
    """Let arrays of this file be those of a GPU whose driver has conditional nodes."""
    real, allocation = _device.is_device_array, _device.allocation_of
    monkeypatch.setattr(_device, "is_device_array", lambda x: isinstance(x, Array) or real(x))
    monkeypatch.setattr(_device, "allocation_of", lambda x: allocation_on_host(x, allocation))
    monkeypatch.setattr(_device, "full_scalar", lambda like, value, dtype: array(value, dtype))
    cuda = SimpleNamespace(
        Stream=lambda **options: None, runtime=SimpleNamespace(getDevice=lambda: 0)
    )
    monkeypatch.setitem(_device.__dict__, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_program, "_copy", lambda x: x.copy())
    for module in (_program, _control_steps):
        monkeypatch.setattr(module, "contiguous", lambda x: x.copy())
    broadcast = functools.partial(np.broadcast_to, subok=True)
    monkeypatch.setattr(_program, "_broadcast", broadcast)
    monkeypatch.setattr(_replay, "_Block", lambda n_bytes: None)
    monkeypatch.setattr(_conditional, "_Node", Node)
    monkeypatch.setattr(_conditional, "is_available", lambda: True)
    monkeypatch.setattr(_conditional, "_setter", lambda device_id: None)
    machine.__init__()


class Captured:
    """A step that is recorded once, on arguments that stay where they are."""

    def __init__(self, step, *args):
        self.args = args
        with _replay.Recorder(), machine.recording() as self.graph:
            self.result = step(*args)

    def __call__(self, *values):
        for x, value in zip(self.args, values, strict=True):
            np.asarray(x)[...] = value
        machine.run(self.graph)
        return self.result
