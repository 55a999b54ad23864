"""What a hostile user does to a fused function: it gives what the function gives."""

import collections
import copy
import dataclasses
import decimal
import enum
import operator
import pickle
import warnings

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr.polygraph import cond, scan, while_loop

from .fused import assert_same

X = np.arange(4, dtype=np.float32)


def fuse(f):
    return rx.fuse(f, backend="interpreter")


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


# --------------------------------------------------------------------------- copies and steps


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


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: rx.repeat(x, n, axis=0),
        lambda x, n: rx.tile(x, (n, 1)),
        lambda x, n: rx.linalg.vector_norm(x, ord=n),
        lambda x, n: rx.reshape(x, (n, -1)),
        lambda x, n: rx.eye(n),
        lambda x, n: rx.roll(x, n),
        lambda x, n: rx.sum(x, axis=n - 2),
        lambda x, n: rx.concat([x] * n),
        lambda x, n: rx.tril(x, k=n),
        lambda x, n: np.split(x, [n]),
        lambda x, n: np.fft.rfft(x, n).real.sum() > 1e9,
        lambda x, n: {n: x},
    ],
)
def test_numbers_as_options(f):
    for x in (np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((6, 1), np.float32)):
        agrees(f, (x, 2), (x, 3), (x, 2), (x, 1))
        agrees(f, (x, 2.5), (x, 1.5))
