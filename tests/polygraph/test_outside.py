"""What a function finds outside of it, wherever that is, and what it does to it."""

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import functools
import itertools
import operator
import os
import queue
import random
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn

from .fused import assert_same

X = np.arange(4, dtype=np.float32)


def fuse(f):
    return rx.fuse(f, backend="interpreter")


def follows(f, *changes, args=(X,), n_eager=0):
    """Compare a fused function with the function, at first and after each change of the outside."""
    fused = fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in (lambda: None, *changes):
            change()
            assert_same(fused(*args), f(*args))
    assert fused.n_eager == n_eager, fused.reasons


# ------------------------------------------------------------------ what is found elsewhere

SCALE = 2.0


def set_scale(value):
    globals()["SCALE"] = value


class Config:
    scale = 2.0
    table = np.ones(4, np.float32)


class Scaler:
    base = 2.0
    table = np.ones(4, np.float32)

    def __init__(self):
        self.k = 1.0
        self.parts = [np.ones(4, np.float32), np.ones(4, np.float32)]

    def apply(self, x):
        return x * SCALE * self.k

    @property
    def both(self):
        return SCALE + self.k

    @staticmethod
    def still(x):
        return x * SCALE

    @classmethod
    def of_class(cls, x):
        return x * SCALE * cls.base

    def __getattr__(self, name):
        if name == "computed":
            return self.k * 10
        raise AttributeError(name)

    def __getitem__(self, i):
        return self.k * i

    def __len__(self):
        return int(self.k)

    def __iter__(self):
        return iter([self.k])


class Slotted:
    __slots__ = ("scale", "w")

    def __init__(self):
        self.scale, self.w = 2.0, np.ones(4, np.float32)


class Scaled(nn.Module):
    def __init__(self):
        self.scales = [2.0]
        self.options = {"shift": np.ones(4, np.float32)}

    def forward(self, x):
        return x * SCALE * self.scales[0] + self.options["shift"].sum()


def test_classes_hold_numbers_and_arrays(monkeypatch):
    monkeypatch.setattr(Config, "table", Config.table.copy())
    follows(lambda x: x * Config.scale, lambda: monkeypatch.setattr(Config, "scale", 3.0))
    follows(lambda x: x * Config.table.sum(), lambda: operator.iadd(Config.table, 1))


def test_objects_have_what_their_class_has(monkeypatch):
    monkeypatch.setattr(Scaler, "table", Scaler.table.copy())
    s = Scaler()
    follows(
        lambda x: x * s.base * s.table.sum(),
        lambda: monkeypatch.setattr(Scaler, "base", 3.0),
        lambda: setattr(s, "base", 4.0),
        lambda: delattr(s, "base"),
        lambda: operator.iadd(Scaler.table, 1),
        lambda: setattr(Scaler, "table", np.zeros(4, np.float32)),
    )


@pytest.mark.parametrize("kind", [types.SimpleNamespace, argparse.Namespace])
def test_namespaces(kind):
    n = kind(scale=2.0, w=np.ones(4, np.float32))
    follows(
        lambda x: x * n.scale * n.w.sum(),
        lambda: setattr(n, "scale", 3.0),
        lambda: operator.iadd(n.w, 1),
        lambda: setattr(n, "w", np.zeros(4, np.float32)),
    )


def test_slots():
    s = Slotted()
    follows(
        lambda x: x * s.scale * s.w.sum(),
        lambda: setattr(s, "scale", 3.0),
        lambda: operator.iadd(s.w, 1),
        lambda: setattr(s, "w", np.zeros(4, np.float32)),
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda s, x: sum(getattr(s, f"k{i}"[:1]) * x for i in range(2)),
        lambda s, x: vars(s)["k"] * x,
        lambda s, x: s.__dict__["k"] * x,
        lambda s, x: operator.attrgetter("k")(s) * x,
        lambda s, x: s.computed * x,
        lambda s, x: s[2] * x,
        lambda s, x: len(s) * x,
        lambda s, x: sum(s) * x,
        lambda s, x: x * s.extra if hasattr(s, "extra") else s.k * x,
    ],
)
def test_attributes_by_other_ways_than_a_name(read):
    s = Scaler()
    follows(lambda x: read(s, x), lambda: setattr(s, "k", 5.0), lambda: setattr(s, "extra", 7.0))


def test_globals_of_methods():
    s, module = Scaler(), Scaled()
    functions = [
        lambda x: s.apply(x),
        lambda x: s.both * x,
        lambda x: s.still(x),
        lambda x: s.of_class(x),
        lambda x: Scaler.still(x),
        s.apply,
        Scaler.of_class,
        module,
    ]
    for f in functions:
        set_scale(2.0)
        follows(f, lambda: set_scale(3.0))
    set_scale(2.0)


def test_containers_in_modules_are_changed_in_place():
    module = Scaled()
    follows(
        module,
        lambda: operator.setitem(module.scales, 0, 3.0),
        lambda: operator.iadd(module.options["shift"], 1),
        lambda: module.options.update(shift=np.zeros(4, np.float32)),
    )


def test_methods_are_replaced(monkeypatch):
    s = Scaler()
    follows(
        lambda x: s.apply(x),
        lambda: monkeypatch.setattr(Scaler, "apply", lambda self, x: x * 3),
        lambda: setattr(s, "apply", lambda x: x * 4),
    )


def test_arrays_in_lists_of_objects():
    s = Scaler()
    follows(
        lambda x: x * (s.parts[0] * s.parts[1]),
        lambda: operator.iadd(s.parts[0], 4),
        lambda: operator.setitem(s.parts, 1, np.zeros(4, np.float32)),
    )


def test_other_containers():
    queue = collections.deque([1.0, np.ones(4, np.float32)])
    numbers = {2.0}
    inner = {"a": 1.0}
    view = types.MappingProxyType(inner)
    follows(
        lambda x: x * queue[0] * queue[1].sum() * sum(numbers) * view["a"],
        lambda: operator.setitem(queue, 0, 5.0),
        lambda: operator.iadd(queue[1], 1),
        lambda: numbers.add(7.0),
        lambda: inner.update(a=3.0),
    )


def test_two_functions_that_look_at_one_object():
    s = types.SimpleNamespace(a=1.0, b=2.0)

    def helper(x):
        return x * s.b

    follows(lambda x: helper(x) + s.a, lambda: setattr(s, "b", 3.0), lambda: setattr(s, "a", 3.0))


def test_names_of_functions_are_bound_anew():
    space = {"np": np, "act": np.tanh, "abs": abs}
    exec("def f(x):\n    return abs(act(x)) + round(2.5)", space)
    follows(
        space["f"],
        lambda: space.update(act=np.sin),
        lambda: space.update(round=lambda x: 7.0),
    )


def test_keyword_defaults():
    w = np.ones(4, np.float32)

    def f(x, *, w=w):
        return x * w.sum()

    follows(f, lambda: operator.iadd(w, 1))


# ------------------------------------------------------------------- what happens but once


def runs_as_it_is(make, n=3):
    """Compare calls of a function that changes what it finds: ``make`` gives it, and the state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f, state = make()
        g, own = make()
        fused = fuse(g)
        for _ in range(n):
            assert_same(fused(X), f(X))
        assert_same(own, state)
        assert fused.n_eager == n


def test_lists_with_arrays_are_appended_to():
    def make():
        kept = [np.ones(4, np.float32)]

        def f(x):
            kept.append(x + 1)
            return kept[0] + len(kept)

        return f, kept

    runs_as_it_is(make)


def test_sets_and_queues_are_changed():
    def make():
        kept, seen = collections.deque([1.0]), set()

        def f(x):
            kept.append(kept[-1] + 1)
            seen.add(len(kept))
            return x * kept[-1] * len(seen)

        return f, None

    runs_as_it_is(make)


def test_classes_and_slots_are_set():
    def make():
        s = Slotted()

        class Count:
            n = 0

        def f(x):
            Count.n += 1
            s.scale += 1
            return x * s.scale * Count.n

        return f, None

    runs_as_it_is(make)


def test_iterators_move_on():
    def make():
        numbers = itertools.count(1)
        return lambda x: x * next(numbers), None

    runs_as_it_is(make)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: random.Random(0), "random"),
        (lambda: np.random.RandomState(0), "rand"),
        (lambda: np.random.default_rng(0), "random"),
    ],
)
def test_generators_of_others_draw_what_they_would(make, name):
    def with_generator():
        g = make()
        return lambda x: x * getattr(g, name)(), None

    runs_as_it_is(with_generator)


def test_the_generators_of_numpy_and_python_draw_what_they_would():
    def f(x):
        return x * random.random() * np.random.rand()  # noqa: NPY002

    def seeded():
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    before = copy.deepcopy((random.getstate(), np.random.get_state()))  # noqa: NPY002
    try:
        fused = fuse(f)
        seeded()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = [fused(X) for _ in range(3)]
        seeded()
        assert_same(got, [f(X) for _ in range(3)])
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


def test_captured_arrays_are_given_another_shape():
    w = np.ones((2, 2), np.float32)
    follows(lambda x: x + w.sum(axis=0)[0], lambda: setattr(w, "shape", (4, 1)))
    v = np.ones(4, np.float32)
    follows(lambda x: x + v, lambda: setattr(v, "dtype", np.int32))


# ------------------------------------------------------------------------------ other places


class Doubled:
    def __get__(self, owner, kind=None):
        return owner.raw * 2


class Kind(type):
    factor = 2.0


class Odd(metaclass=Kind):
    doubled = Doubled()

    def __init__(self):
        self.raw = 1.0


def test_numbers_in_all_sorts_of_places(monkeypatch):
    local, variable = threading.local(), contextvars.ContextVar("variable", default=2.0)
    local.value = 2.0
    odd, held = Odd(), array.array("d", [2.0])
    reference, chained = weakref.ref(odd), collections.ChainMap({"a": 2.0})
    nested, cycle = [[[[[[[[[2.0]]]]]]]]], [2.0]
    cycle.append(cycle)
    module = types.ModuleType("of_the_test")
    module.value = 2.0
    monkeypatch.setitem(sys.modules, "of_the_test", module)
    monkeypatch.setenv("RTXARR_OF_THE_TEST", "2")

    def imported(x):
        import of_the_test

        return x * of_the_test.value

    def imported_from(x):
        from of_the_test import value

        return x * value

    for f, change in (
        (lambda x: x * local.value, lambda: setattr(local, "value", 3.0)),
        (lambda x: x * variable.get(), lambda: variable.set(3.0)),
        (lambda x: x * reference().raw, lambda: setattr(odd, "raw", 3.0)),
        (lambda x: x * odd.doubled, lambda: setattr(odd, "raw", 4.0)),
        (lambda x: x * Odd.factor, lambda: monkeypatch.setattr(Kind, "factor", 3.0)),
        (lambda x: x * held[0], lambda: operator.setitem(held, 0, 3.0)),
        (lambda x: x * chained["a"], lambda: operator.setitem(chained, "a", 3.0)),
        (
            lambda x: x * nested[0][0][0][0][0][0][0][0][0],
            lambda: operator.setitem(nested[0][0][0][0][0][0][0][0], 0, 3.0),
        ),
        (lambda x: x * cycle[1][1][0], lambda: operator.setitem(cycle, 0, 3.0)),
        (lambda x: x * globals()["SCALE"], lambda: set_scale(3.0)),
        (lambda x: x * sys.modules[__name__].SCALE, lambda: set_scale(2.0)),
        (
            lambda x: x * float(os.environ["RTXARR_OF_THE_TEST"]),
            lambda: os.environ.update(RTXARR_OF_THE_TEST="3"),
        ),
        (imported, lambda: setattr(module, "value", 3.0)),
        (imported_from, lambda: setattr(module, "value", 4.0)),
    ):
        follows(f, change)


class Base:
    k = 2.0

    def go(self, x):
        return x * self.k + self.shift()

    def shift(self):
        return 1.0


class Derived(Base):
    def __init__(self):
        self.extra = 0.0

    def shift(self):
        return super().shift() + self.extra


class Sequence(list):
    scale = 2.0


def test_what_classes_inherit(monkeypatch):
    b = Derived()
    follows(
        lambda x: b.go(x),
        lambda: setattr(b, "extra", 5.0),
        lambda: monkeypatch.setattr(Base, "k", 3.0),
        lambda: monkeypatch.setattr(Base, "shift", lambda self: 10.0),
    )


def test_numbers_behind_functions():
    s, counts = Scaler(), {"n": 1.0}
    scaled = functools.partial(lambda x, k: x * k, k=2.0)
    single = functools.singledispatch(lambda x: x * s.k)
    read, get = s.__iter__, counts.get

    @contextlib.contextmanager
    def inside():
        yield s.k

    def within(x):
        with inside() as k:
            return x * k

    def own(x):
        return x * own.factor

    own.factor = 2.0
    values, arrays = Sequence([1.0]), Sequence([np.ones(4, np.float32)])
    for f, *changes in (
        (lambda x: scaled(x), lambda: scaled.keywords.update(k=3.0)),
        (lambda x: single(x), lambda: setattr(s, "k", 3.0)),
        (lambda x: x * sum(read()), lambda: setattr(s, "k", 4.0)),
        (within, lambda: setattr(s, "k", 5.0)),
        (lambda x: x * get("n"), lambda: counts.update(n=2.0)),
        (own, lambda: setattr(own, "factor", 3.0)),
        (
            lambda x: x * values[0] * values.scale,
            lambda: setattr(values, "scale", 3.0),
            lambda: operator.setitem(values, 0, 3.0),
        ),
        (
            lambda x: x * arrays[0].sum() * arrays.scale,
            lambda: setattr(arrays, "scale", 3.0),
            lambda: operator.iadd(arrays[0], 1),
        ),
    ):
        follows(f, *changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(0).random,
        lambda: np.random.default_rng(0).random,
        lambda: np.random.RandomState(0).rand,
        lambda: itertools.count(1).__next__,
        lambda: iter([1.0, 2.0, 3.0]).__next__,
        lambda: [1.0, 2.0, 3.0].pop,
    ],
)
def test_methods_of_what_moves_on(make):
    def of_function():
        draw = make()
        return lambda x: x * draw(), None

    runs_as_it_is(of_function)


def test_functions_that_count_themselves():
    def make():
        waiting = queue.Queue()
        for i in range(3):
            waiting.put(i)

        def f(x):
            f.n = getattr(f, "n", 0) + 1
            return x * f.n * waiting.get()

        return f, None

    runs_as_it_is(make)
