"""``rx.fuse``: what a fused function gives, writes, guards, and does where it cannot be fused."""

import gc
import math
import random
import threading
import warnings
import weakref
from typing import NamedTuple

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.polygraph import _call_text
from rtxarr.polygraph._record import own

from .fused import assert_same, check

rng = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return rng.normal(size=shape).astype(dtype)


# ------------------------------------------------------------------------------ array code


def test_maps_reductions_and_maps():
    def softmax(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    check(softmax, array(7, 33), exact=False)


@pytest.mark.parametrize("style", ["rx", "np", "namespace", "methods"])
def test_all_styles_of_array_code(style):
    def f(x, y):
        if style == "rx":
            return rx.where(x > 0, rx.tanh(x) + y, rx.abs(x))
        if style == "np":
            return np.where(x > 0, np.tanh(x) + y, np.abs(x))
        if style == "namespace":
            xp = x.__array_namespace__()
            return xp.where(x > 0, xp.tanh(x) + y, xp.abs(x))
        return (x.clip(0, 2) + y).reshape(-1).max()

    check(f, array(4, 5), array(5))


def test_views_share_memory_with_their_base():
    def f(x):
        y = x * 2
        top = y[1:, ::2]
        top += 1
        y[0] = top.sum(axis=0).sum()
        return y, top, y.T, y[::-1, 0]

    check(f, np.arange(12.0).reshape(3, 4))
    y, top, turned, _ = rx.fuse(f)(np.arange(12.0).reshape(3, 4))
    assert np.shares_memory(y, top)
    assert np.shares_memory(y, turned)


def test_what_is_no_view_is_a_copy():
    def f(x):
        y = x.T.reshape(-1)
        y[0] = 9
        z = x.reshape(-1)
        z[1] = 7
        w = x[[0, 1]]
        w[...] = 0
        return y, z, w

    check(f, np.arange(6.0).reshape(2, 3))


def test_a_view_of_an_argument_is_one_of_it():
    def f(x):
        return x[1:], x

    x = np.arange(4.0)
    part, whole = rx.fuse(f)(x)
    assert whole is x
    assert np.shares_memory(part, x)
    assert_same((part, whole), f(x))


def test_in_place_operations_write_into_arguments():
    def f(x, y):
        x += y
        x[0] *= 3
        np.multiply(x, 2, out=y)
        x[1:] = x[:-1]
        return x.sum()

    check(f, np.arange(5.0), np.ones(5))


def test_augmented_assignment_of_a_strided_argument():
    def f(x, y):
        x[::2] -= y

    base = np.arange(12.0).reshape(4, 3)

    def on_part(x):
        return f(x.T, 2.0)

    check(on_part, base)


def test_arguments_that_share_memory_run_eagerly_where_one_is_written():
    def f(x, y):
        x += 1
        return x * y

    fused = rx.fuse(f)
    base = np.arange(6.0)
    want_base = base.copy()
    want = f(want_base[:4], want_base[2:])
    got = fused(base[:4], base[2:])
    assert_same((got, base), (want, want_base))
    assert fused.n_eager == 1


def test_out_and_where():
    def f(x, y, out):
        np.add(x, y, out=out)
        np.exp(out, out=out, where=out > 1)
        np.sum(x, axis=0, out=out[0])
        return np.concatenate([out, x])

    check(f, array(3, 4), array(3, 4), np.zeros((3, 4), "f4"), exact=False)


def test_a_result_cast_that_numpy_refuses_is_refused():
    def f(x):
        x += 1.5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(np._core._exceptions.UFuncTypeError):
            rx.fuse(f)(np.arange(3))


def test_nested_results_and_arguments():
    class Pair(NamedTuple):
        first: object
        second: object

    def f(d, *, scale):
        return {"a": d["x"] * scale, "b": [d["y"][0], (d["y"][1] + 1,)], "c": Pair(d["x"], None)}

    check(f, {"x": array(3), "y": (array(2), array(2))}, scale=2.0)


def test_one_result_twice_is_two_arrays():
    def f(x):
        y = x + 1
        return y, x + 1, y

    a, b, c = rx.fuse(f)(np.zeros(3))
    assert a is c or np.shares_memory(a, c)
    assert not np.shares_memory(a, b)


def test_results_are_memory_of_their_own():
    def f(x):
        y = x + 1
        return x.copy(), x.T.copy(), y, y.T.copy(), rx.ones(3, device="cpu"), np.ones(2)

    x = np.arange(6.0).reshape(2, 3)
    fused = rx.fuse(f)
    for _ in range(2):
        got = fused(x)
        assert_same(got, f(x))
        for a in got:
            assert not any(np.shares_memory(a, b) for b in (x, *got) if b is not a)
            a[...] = 7


def test_results_that_are_no_arrays():
    def f(x, n):
        return x.sum(), x.shape, "text", None, n * 2, x.ndim

    check(f, np.ones((2, 3)), 5)


def test_zero_dimensional_results_are_scalars_as_in_numpy():
    def f(x):
        return x.sum(), x[0], x.mean() * 2, np.asarray(1.5)

    fused = rx.fuse(f)
    got = fused(np.ones(3))
    assert [type(g) for g in got[:3]] == [np.float64] * 3


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1)])
def test_small_shapes(shape):
    def f(x):
        return x * 2 + 1, x.sum(), np.where(x > 0, x, -x).sum(axis=tuple(range(x.ndim)))

    check(f, np.ones(shape, "f4"))


def test_integer_arrays_as_indices():
    def f(x, i):
        return x[i], x[i, i], x[:, i], x[i[:, None], i], np.take(x, i, axis=1)

    check(f, array(4, 4), np.array([0, -1, 2]))


def test_writing_by_integer_arrays():
    def f(x, i, v):
        x[i] = v
        x[i, 0] = 7
        x[x > 1] = 0
        return x

    check(f, array(4, 3), np.array([0, 2]), array(2, 3))


def test_matrix_products_sorts_and_transforms():
    def f(x, y):
        return x @ y, np.sort(x, axis=0), np.fft.rfft(y), np.linalg.inv(x @ x.T), np.cumsum(x)

    check(f, array(4, 5, dtype="f8"), array(5, 3, dtype="f8"), exact=False)


# ---------------------------------------------------------------------------------- numbers


def test_numbers_do_not_recompile():
    fused = rx.fuse(lambda x, a, n: x * a + n)
    for a in (0.5, -2.0, 1e30):
        for n in (0, 3):
            assert_same(fused(np.ones(3, "f4"), a, n), np.ones(3, "f4") * np.float32(a) + n)
    assert fused.n_traces == 1


def test_arithmetic_of_numbers_is_pythons():
    def f(x, a, n):
        return x * (a**2 / (n + 1)) + (n // 2) % 3 - round(a) + abs(-n)

    fused = rx.fuse(f)
    for a, n in ((0.5, 1), (2.5, 7), (-1.25, 2)):
        assert_same(fused(np.ones(3), a, n), f(np.ones(3), a, n))
    assert fused.n_traces == 1


def test_decisions_by_numbers_are_checked():
    def f(x, n):
        return x * n if n > 2 else x - n

    fused = rx.fuse(f)
    for n in (1, 5, 2, 9):
        assert_same(fused(np.ones(3), n), f(np.ones(3), n))
    assert fused.n_traces == 2


def test_numbers_as_shapes_and_indices():
    def f(x, n):
        return x[:n].reshape(n, 1), [x[i] for i in range(n)], x[n]

    fused = rx.fuse(f)
    for n in (1, 2, 1, 3, 2):
        assert_same(fused(np.arange(5.0), n), f(np.arange(5.0), n))
    assert fused.n_traces == 3


def test_a_bool_and_an_int_are_not_one_kind():
    def f(x, flag):
        return x * flag

    fused = rx.fuse(f)
    x = np.arange(3, dtype=np.int8)
    for value in (True, 2, False, 1):
        assert_same(fused(x, value), f(x, value))


def test_strings_and_other_statics_are_part_of_the_key():
    def f(x, how):
        return x.sum() if how == "sum" else x.mean()

    fused = rx.fuse(f)
    for how in ("sum", "mean", "sum"):
        assert_same(fused(np.arange(4.0), how), f(np.arange(4.0), how))
    assert fused.n_traces == 2


def test_numpy_scalars_are_arrays_of_their_dtype():
    def f(x, s):
        return x * s

    for s in (np.float64(2), np.float32(2), np.int8(3)):
        check(f, np.ones(3, "f4"), s)


# ----------------------------------------------------------------------------- falling back


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda x: x if x.sum() > 0 else -x, "bool()"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x * float(x[0]), "float()"),
        (lambda x: np.unique(x), "unique"),
        (lambda x: x.nonzero()[0], "nonzero()"),
        (lambda x: x * x.tolist()[0], "tolist()"),
        (lambda x: [x[int(i)] for i in x.argsort()], "int()"),
        (lambda x: np.add.at(x, [0], 1), "at"),
    ],
    ids=["bool", "mask", "float", "unique", "nonzero", "tolist", "int", "at"],
)
def test_what_needs_values_runs_eagerly_with_one_warning(f, word):
    fused = rx.fuse(f)
    x = np.array([1.0, 2.0, 0.5])
    with pytest.warns(RuntimeWarning, match="is not fused") as seen:
        got = fused(x.copy())
    assert len(seen) == 1
    assert word in str(seen[0].message)
    assert_same(got, f(x.copy()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fused(x.copy()), f(x.copy()))
    assert fused.n_eager == 2
    assert word in " ".join(fused.reasons)
    assert "eager" in fused.explain()


def test_the_warning_names_the_line_and_points_to_the_call():
    fused = rx.fuse(lambda x: bool(x[0]))
    with pytest.warns(RuntimeWarning) as seen:
        fused(np.ones(2))
    assert "test_fuse.py:" in str(seen[0].message)
    assert seen[0].filename == __file__


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ValueError, match="could not be broadcast|broadcast"):
        rx.fuse(lambda x, y: x + y)(np.ones(2), np.ones(3))


def test_numpys_random_numbers_are_not_repeated():
    generator = np.random.default_rng(0)
    fused = rx.fuse(lambda x: x + generator.normal(size=3))
    with pytest.warns(RuntimeWarning, match="random"):
        a = fused(np.zeros(3))
    assert (a != fused(np.zeros(3))).all()


def test_pythons_random_numbers_are_not_repeated():
    fused = rx.fuse(lambda x: x + random.random())
    with pytest.warns(RuntimeWarning, match="random"):
        a = fused(np.zeros(3))
    assert (a != fused(np.zeros(3))).all()


def test_numbers_that_are_not_a_number_or_negative_zero():
    def f(x, a):
        return x + math.copysign(1.0, a)

    fused = rx.fuse(f)
    for a in (0.0, -0.0, math.nan, -1.0, 2.0, 0.0):
        assert_same(fused(np.zeros(2), a), f(np.zeros(2), a))


def test_arrays_that_share_memory_outside_of_the_arguments():
    base = np.arange(6.0)
    first, second = base[:4], base[2:]

    def f(x):
        np.add(first, x, out=first)
        return second * 2

    fused = rx.fuse(f)
    for _ in range(2):
        want_base = base.copy()
        want_base[:4] += 1
        assert_same(fused(1.0), want_base[2:] * 2)
        assert_same(base, want_base)
    assert fused.n_eager == 2


def test_arguments_are_not_kept():
    fused = rx.fuse(lambda x, y: (x + 1, y))
    x = np.ones(3)
    gone = weakref.ref(x)
    fused(x, 2.0)
    del x
    gc.collect()
    assert gone() is None


def test_unhashable_arguments_run_eagerly():
    class Odd:
        __hash__ = None

    fused = rx.fuse(lambda x, odd: x + 1)
    with pytest.warns(RuntimeWarning, match="hashable"):
        fused(np.ones(2), Odd())
    assert fused.n_eager == 1


def test_options_are_checked():
    with pytest.raises(ValueError, match="mode must be 'strict' or 'fast', got 'slow'"):
        rx.fuse(lambda x: x, mode="slow")
    with pytest.raises(ValueError, match="backend must be an object or 'interpreter', got 'cuda'"):
        rx.jit(lambda x: x, backend="cuda")
    with pytest.raises(TypeError, match="f must be callable, got int"):
        rx.fuse(3)


# ---------------------------------------------------------------------------------- threads


def test_threads_with_different_shapes():
    def f(x, a):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True) * a

    fused = rx.fuse(f)
    errors = []
    start = threading.Barrier(8)

    def work(n):
        try:
            start.wait()
            own = np.random.default_rng(n)
            for i in range(25):
                x = own.normal(size=(n + 1, 8 * (i % 3 + 1))).astype("f4")
                assert_same(fused(x, float(i)), f(x, float(i)), exact=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert fused.n_traces == 24
    assert fused.n_eager == 0


# ----------------------------------------------------------------------------------- modes


def test_fast_mode_is_near():
    def f(x, y):
        return rx.tanh(x * y + x) * y - rx.sum(x * y, axis=1, keepdims=True)

    check(f, array(9, 33), array(9, 33), exact=False, mode="fast")
    x = rx.astype(array(50), rx.bfloat16)
    fast, strict = (rx.fuse(lambda x: (x * x + x) * x - x, mode=m)(x) for m in ("fast", "strict"))
    assert fast.dtype == strict.dtype == rx.bfloat16
    np.testing.assert_allclose(fast.astype("f4"), strict.astype("f4"), rtol=0.05, atol=0.1)


# ------------------------------------------------------------- what a trace must not get wrong


def eager_once(f, *args, match):
    """Check that a function runs as it is, with one warning."""
    fused = rx.fuse(f)
    with pytest.warns(RuntimeWarning, match=match):
        got = fused(*args)
    fused(*args)
    assert fused.n_eager == 2
    return got


def test_a_container_among_the_arguments_is_changed():
    def f(d):
        d["twice"] = d["x"] * 2
        return d["x"]

    fused = rx.fuse(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            d = {"x": np.ones(2)}
            fused(d)
            assert_same(d["twice"], np.full(2, 2.0))
    assert fused.n_eager == 4


def test_an_error_that_the_function_catches():
    def f(x):
        try:
            return x * float(x[0])
        except TypeError:
            return x

    assert_same(eager_once(f, np.full(2, 3.0), match=r"float\(\)"), np.full(2, 9.0))


def test_objects_that_the_function_makes_and_gives():
    class Result:
        def __init__(self, y):
            self.y = y

    got = eager_once(lambda x: Result(x * 2), np.ones(2), match="gives a Result that it made")
    assert_same(got.y, np.full(2, 2.0))
    eager_once(lambda x: (y * 2 for y in x), np.ones(2), match="gives a generator that it made")
    eager_once(lambda x: lambda: x, np.ones(2), match="gives a function that it made")


@pytest.mark.parametrize("kind", [np.memmap, np.matrix])
def test_subclasses_of_arrays_run_as_they_are(kind, tmp_path):
    if kind is np.memmap:
        x = np.memmap(tmp_path / "x", "f8", "w+", shape=(2, 2))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    assert_same(eager_once(lambda x: x + x, x, match="arguments"), x + x)


def test_numbers_are_what_they_are():
    def f(x, a, n):
        if isinstance(a, float) and isinstance(n, int) and not isinstance(n, float):
            x = x + 1
        axes = (n,) if isinstance(n, int) else tuple(n)
        return x.sum(axis=axes) * a + math.exp(a)

    fused = rx.fuse(f)
    x = np.arange(6.0).reshape(2, 3)
    for a, n in ((0.5, 0), (2.0, 1), (0.5, -1)):
        assert_same(fused(x, a, n), f(x, a, n))
    assert fused.n_eager == 0


@pytest.mark.parametrize("dtype", ["?", "i8", "f4"])
def test_reductions_of_what_is_the_same_everywhere(dtype):
    def f(x):
        ones = np.ones_like(x, dtype=dtype)
        wide = np.broadcast_to(x[:, :1].astype(dtype), x.shape)
        return [
            reduce(y, axis=1)
            for reduce in (np.sum, np.prod, np.max, np.min, np.argmax, np.argmin, np.any, np.all)
            for y in (ones, wide)
        ]

    check(f, np.ones((5, 7), "f4"))


def test_results_are_held_apart_from_arrays_alone():
    class Library:
        """As CuPy, which looks at no numbers."""

        @staticmethod
        def may_share_memory(a, b):
            assert not isinstance(b, np.generic)
            return np.may_share_memory(a, b)

        asarray = staticmethod(np.asarray)

    x = np.ones(3)
    assert own(Library, x, np.float64(2)) is x
    assert not np.may_share_memory(own(Library, x, np.float64(2), x[1:]), x)


def test_a_number_of_numpy_is_in_no_memory_that_is_written(monkeypatch):
    seen = []
    monkeypatch.setattr(_call_text, "_overlaps", lambda *pair: bool(seen.append(pair)))

    def f(x, y, n):
        x += y * n

    x = np.ones(3)
    rx.fuse(f)(x, np.ones(3), np.float64(2))
    assert (x == 3).all()
    assert [[type(a) for a in pair] for pair in seen] == [[np.ndarray] * 2]
