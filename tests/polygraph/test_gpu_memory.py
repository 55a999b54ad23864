"""Small results come back when nobody has them, and only then."""

import threading
import weakref

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _gpu_memory as memory

FLOAT = np.dtype("float32")


class Memory:
    pass


class Pointer:
    def __init__(self):
        self.mem = Memory()


class Array:
    """As CuPy's: a view holds what it looks at, an array made on its memory the memory alone."""

    def __init__(self, shape, dtype, data=None):
        self.shape, self.data = shape, data or Pointer()

    def view(self):
        found = Array(self.shape, None, self.data)
        found.base = self
        return found

    def other(self):
        data = Pointer()
        data.mem = self.data.mem
        return Array(self.shape, None, data)


@pytest.fixture
def place():
    return [0, 7]


@pytest.fixture
def new(place):
    return memory.keeping(Array, (3,), FLOAT, lambda: tuple(place))


def test_an_array_that_nobody_has_comes_back(new):
    x = new()
    name = id(x)
    del x
    assert all(id(new()) == name for _ in range(5))
    x, y = new(), new()
    assert x is not y


HOLD = {
    "itself": lambda x: x,
    "a view": Array.view,
    "another on its memory": Array.other,
    "another on its pointer": lambda x: Array((3,), FLOAT, x.data),
    "the memory": lambda x: x.data.mem,
    "a weak reference": weakref.ref,
}


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
def test_an_array_that_somebody_has_does_not(new, hold):
    held = hold(new())
    memory = held().data.mem if isinstance(held, weakref.ref) else held
    assert new().data.mem is not getattr(getattr(memory, "data", None), "mem", memory)
    del memory
    x = new()
    name = id(x)
    del x, held
    assert id(new()) == name


def test_an_array_of_another_shape_does_not(new):
    new().shape = (3, 1)
    assert new().shape == (3,)


def test_another_stream_has_another_array(new, place):
    x = new()
    owner = x.data.mem
    del x
    place[1] = 8
    assert new().data.mem is not owner


def test_threads_have_their_own(new):
    names, together = {}, threading.Barrier(4, timeout=60)

    def work(i):
        names[i] = id(new())  # nobody has it
        together.wait()  # each thread is there, and keeps its own

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({*names.values()}) == 4


def test_a_captured_graph_has_memory_of_its_own(new, monkeypatch):
    name = id(new())
    monkeypatch.setattr(memory, "recorder", lambda: "one")
    assert id(new()) != name
    monkeypatch.undo()
    assert id(new()) == name


@pytest.fixture
def cupy():
    found = pytest.importorskip("cupy")
    with rx.device("cuda:0"):
        yield found


@pytest.mark.gpu
def test_gpu_results_that_are_kept_stay_as_they_are(cupy):
    f = rx.fuse(lambda x: rx.tanh(x) * 2)
    xs = [cupy.full(1000, i, "float32") for i in range(20)]
    kept = [f(x) for x in xs]
    views = [f(x)[10:20] for x in xs]
    other = [cupy.ndarray(1000, "float32", f(x).data) for x in xs]
    for x, a, b, c in zip(xs, kept, views, other, strict=True):
        want = 2 * cupy.tanh(x)
        for got in (a, c):
            assert bool(cupy.all(got == want))
        assert bool(cupy.all(b == want[10:20]))


@pytest.mark.gpu
def test_gpu_results_come_back(cupy):
    f = rx.fuse(lambda x: rx.tanh(x) * 2)
    x = cupy.ones(1000, "float32")
    f(x)
    places = set()
    for _ in range(10):
        y = f(x)
        places.add(id(y))
        del y
    assert len(places) == 1


@pytest.mark.gpu
def test_gpu_chains_of_calls(cupy):
    """A result that is an argument of the next call is not written over."""
    f = rx.fuse(lambda x: x * 2 + 1)
    x = cupy.arange(1000, dtype="float32")
    want = x.copy()
    for _ in range(10):
        x, want = f(x), want * 2 + 1
    assert bool(cupy.all(x == want))
