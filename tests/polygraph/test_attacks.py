"""What a hostile user does to a fused function: it gives what the function gives."""

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import decimal
import enum
import functools
import itertools
import operator
import os
import pickle
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
from rtxarr.polygraph import cond, scan, while_loop

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


# ---------------------------------------------------------------------------------- arguments


def agrees(f, *calls, eager=None):
    """Compare calls of one fused function with those of the function; also what they raise."""
    fused = fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in calls:
            mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
            got, want = outcome(fused, theirs), outcome(f, mine)
            assert_same((got, theirs), (want, mine))
    if eager is not None:
        assert fused.n_eager == eager, fused.reasons


def outcome(f, args):
    try:
        return f(*args)
    except Exception as error:
        return type(error).__name__


@dataclasses.dataclass(frozen=True)
class Options:
    value: object
    hidden: object = dataclasses.field(default=1, compare=False)


class Chosen(enum.Enum):
    one, two = 1, 2


def test_arguments_that_are_equal_and_are_not_the_same():
    numbers = np.arange(3)
    options = [Options(1), Options(True), Options(1.0), Options(1, 2), Options(np.float64(1))]
    agrees(lambda x, o: x * o.value * o.hidden, *[(numbers, o) for o in options], eager=0)
    sets = [frozenset([1]), frozenset([1.0])]
    agrees(lambda x, s: x * next(iter(s)), *[(numbers, s) for s in sets], eager=0)
    halves = [decimal.Decimal("1.50"), decimal.Decimal("1.5")]
    agrees(lambda x, d: x + len(str(d)), *[(numbers, d) for d in halves], eager=0)
    agrees(lambda x, s: x[s], *[(numbers, slice(n)) for n in (1, 2, 1)], eager=0)
    agrees(lambda x, c: x * c.value, *[(numbers, c) for c in Chosen], eager=0)


@pytest.mark.parametrize("dtype", [">f4", "U1", "M8[D]", "O", [("a", "f4")]])
def test_dtypes_of_other_kinds_run_as_they_are(dtype):
    x = np.array(["1", "2"]) if dtype == "U1" else np.zeros(2, dtype)
    agrees(lambda x: x if x.dtype.names else x + x[:1], (x,), (x,), eager=2)


def test_containers_keep_their_kinds():
    agrees(lambda d: collections.OrderedDict(d, b=d["a"] + 1), (collections.OrderedDict(a=X),))
    missing = collections.defaultdict(lambda: 5, a=X)
    assert_same(fuse(lambda d: d["a"] + 1)({"a": X}), X + 1)
    with pytest.warns(RuntimeWarning, match="defaultdict"):
        assert fuse(lambda d: d["b"])(missing) == 5


def test_read_only_arguments_are_not_written():
    def f(x):
        x += 1
        return x.sum()

    fused, fixed = fuse(f), X.copy()
    fixed.flags.writeable = False
    assert fused(X.copy()) == 10
    with pytest.raises(ValueError, match="read-only"):
        fused(fixed)
    assert_same(fixed, X)
    assert fused(X.copy()) == 10


def test_captured_arrays_are_given_another_shape():
    w = np.ones((2, 2), np.float32)
    follows(lambda x: x + w.sum(axis=0)[0], lambda: setattr(w, "shape", (4, 1)))
    v = np.ones(4, np.float32)
    follows(lambda x: x + v, lambda: setattr(v, "dtype", np.int32))


# ------------------------------------------------------------------------------------ numbers


def test_numbers_of_which_others_are_of_another_type():
    n = np.arange(1, 4)
    agrees(lambda x, a, b: x * a**b, (n, 2, 2), (n, 2, -1), (n, 2.0, 3.0), (n, -8.0, 1 / 3))
    agrees(lambda x, a: x + rx.asarray(a), (n, 2), (n, 2**63), (n, 2**64))
    agrees(lambda x, a: x * (1 / a), (n, 2), (n, 0))


def test_numbers_that_a_dtype_cannot_hold():
    x = np.array([1, 200], np.uint8)
    for f in (
        lambda x, n: x > n,
        lambda x, n: x == n,
        lambda x, n: np.where(x > n, n, x),
        lambda x, n: np.maximum(x, n),
    ):
        agrees(f, (x, 5), (x, -1), (x, 300), (x, 7))


def test_arrays_of_numbers():
    agrees(lambda x, n: x + np.array([n, 1.0, 2.0, 3.0]), (X, 2.0), (X, 3.0), eager=0)
    agrees(lambda x, n: x[:n] * np.arange(n), (X, 2), (X, 3), eager=0)
    agrees(lambda x, n: x * np.linspace(0, n, 4), (X, 2.0), (X, 3.0), eager=0)


def test_what_isinstance_tells():
    def f(x, n):
        if isinstance(x, np.ndarray) and isinstance(x[0], np.floating):
            x = x + 1
        match n:
            case int():
                return x * 2
            case float():
                return x * 3

    agrees(f, (X, 1), (X, 1.0), (np.arange(3), 1), eager=0)


# ------------------------------------------------------------------------- NumPy's own rules


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.copyto(x, np.array([1.5, 2.5, 3.5, 4.5])) or x,
        lambda x: (np.nan_to_num(x, copy=False), x),
        lambda x: np.outer(x, x, out=np.zeros((4, 4), x.dtype) + x[0]),
        lambda x: np.vstack([x, x], dtype=np.float64),
        lambda x: np.hstack([x, x], dtype=np.float64),
        lambda x: np.concatenate([x, x], dtype=np.int8),
        lambda x: np.concatenate([x, x], dtype=np.int8, casting="unsafe"),
        lambda x: np.stack([x, x], dtype=np.int8),
        lambda x: x.clip(0, 2),
        lambda x: np.clip(x, -1, -0.0),
        lambda x: np.einsum("i,i->", x, x),
        lambda x: x == None,  # noqa: E711
        lambda x: x != "a",
        lambda x: x in [None],
        lambda x: {x[2]: x}[x[2]],
        lambda x: f"{x}",
        lambda x: x.base is None,
        lambda x: setattr(x, "shape", (2, 2)) or x,
        lambda x: x * 2 if hasattr(x, "searchsorted") else x,
        lambda x: x.conj() is x and x.squeeze() is x,
    ],
)
@pytest.mark.parametrize(
    "x", [np.array([1, -2, 100, 3], np.int8), np.float32([np.nan, -0.0, 3, 0])]
)
def test_what_numpy_does(f, x):
    agrees(f, (x,), (x,))


# -------------------------------------------------------------------------- branches and loops

LONG = np.arange(12, dtype=np.float32)


def test_branches_that_write():
    def outer(x):
        y = x + 1

        def then(x):
            y[0] = 99
            return x

        return cond(x.sum() > 0, then, lambda x: x, x) + y

    def operand(x):
        def then(z):
            z += 5
            return z * 1

        return cond(x.sum() > 0, then, lambda z: z * 1, x), x

    def state(x):
        y = x * 2
        return while_loop(lambda s: s.sum() < 50, lambda s: operator.iadd(s, 1), y), y

    def every_step(x):
        y = x * 2

        def body(s, v):
            y[0] += v
            return s + v, s

        return scan(body, x[0] + 0, x), y

    for f in (outer, operand, state, every_step):
        agrees(f, (X,), (-X,), (LONG,))


def test_numbers_in_branches_and_loops():
    def branch(x, n):
        return cond(x.sum() > 0, lambda x, n: x * n, lambda x, n: x + n, x, n)

    agrees(branch, (X, 2.0), (-X, 3.0), eager=0)
    agrees(lambda x: cond(x.sum() > 0, lambda: 1.0, lambda: 2.0) * x, (X,), (-X,))
    agrees(lambda x: while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x)), (X,))
    agrees(lambda x: scan(lambda s, v: (s + 1, v * s), 1.0, x), (X,), (LONG,))


@pytest.mark.parametrize("kind", ["cond", "while_loop", "scan"])
def test_branches_and_loops_draw_what_they_would(kind):
    def f(x):
        def draw(s):
            return s + rx.random.default_generator().uniform((4,), dtype=np.float32)

        if kind == "cond":
            return cond(x.sum() > 0, draw, lambda x: x, x)
        if kind == "while_loop":
            return while_loop(lambda s: s.sum() < 20, draw, x)
        return scan(lambda s, _: (draw(s), s), x, length=9)[0]

    found = []
    for call in (f, fuse(f)):
        rx.random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([call(x) for x in (X, -X, X)])
    assert_same(*found)


def test_gradients_of_what_branches_and_loops_find():
    w = rx.Tensor(X + 1, requires_grad=True)

    def branch(x):
        return cond(x.sum() > 0, lambda x: w * x, lambda x: w * 3, x)

    def steps(x):
        return scan(lambda s, v: (s * w[0] + v, s), x.sum(), x)[1]

    for f, x in ((branch, X), (branch, -X), (steps, X), (steps, LONG)):
        found = []
        for call in (f, fuse(f)):
            w.grad = None
            y = call(x)
            rx.sum(y).backward()
            found.append((y.data, w.grad))
        assert_same(*found)


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


def triple(x):
    return x * 3


@rx.fuse
def decorated(x):
    return x * 5


class Holder(nn.Module):
    def __init__(self):
        self.w = nn.Parameter(np.ones(4, np.float32))
        self.run = fuse(self.scaled)

    def scaled(self, x):
        return x * self.w

    def forward(self, x):
        return self.run(x)


def test_fused_functions_are_copied_and_pickled():
    fused = fuse(triple)
    for made in (copy.copy(fused), copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_same(made(X), X * 3)
        assert made.backend == "interpreter"
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    step = rx.jit(triple, mode="fast", capture=False)
    assert copy.copy(step)._options() == step._options()
    holder = Holder()
    assert_same(holder(X).data, X)
    other = copy.deepcopy(holder)
    other.w.assign(np.zeros(4, np.float32))
    assert_same(other(X).data, X * 0)
    assert_same(holder(X).data, X)


def test_a_step_takes_tensors_of_a_graph():
    p = nn.Parameter(np.ones(4, np.float32))

    def step(x):
        loss = rx.sum(x * x * p)
        loss.backward()
        return loss

    found = []
    for call in (step, rx.jit(step, backend="interpreter")):
        p.grad = None
        leaf = rx.Tensor(X.copy(), requires_grad=True)
        call(leaf)
        call(rx.tanh(leaf))
        found.append((leaf.grad, p.grad))
    assert_same(*found)


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


# -------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.zeros(3),
        lambda x: np.zeros(()),
        lambda x: {"a": [np.arange(3), np.zeros(3)[1:]]},
        lambda x: rx.arange(3),
        lambda x: rx.Tensor(np.zeros(3)),
        lambda x: np.eye(2)[0],
        lambda x: (c := np.ones(4), x + c, c)[1:],
        lambda x: x * 0,
    ],
)
def test_results_may_be_written_and_begin_anew(f):
    fused = fuse(f)
    for _ in range(3):
        got = fused(X)
        assert_same(got, f(X))
        for leaf in rx.autograd._tree.flatten(got)[0]:
            array = leaf.data if isinstance(leaf, rx.Tensor) else leaf
            array[...] = 9


def test_what_is_set_of_tensors():
    def require(t):
        t.requires_grad = True
        return t * 2

    def replace(t):
        t.data = t.data * 2
        return t * 1

    for f in (require, replace):
        mine, theirs = rx.Tensor(X.copy()), rx.Tensor(X.copy())
        fused = fuse(f)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                want, got = f(mine), fused(theirs)
                assert_same((got.data, theirs.data), (want.data, mine.data))
                assert got.requires_grad is want.requires_grad
                assert theirs.requires_grad is mine.requires_grad


def test_variables_made_by_the_function():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert type(fuse(lambda x: nn.Parameter(x * 2))(X)) is nn.Parameter
        assert fuse(lambda x: rx.Tensor(x * 2, requires_grad=True))(X).requires_grad
