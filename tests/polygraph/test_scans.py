"""Scans in fused functions: on a CPU NumPy's bits, in one kernel with what is around them."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.autograd import Tensor
from rtxarr.testing import assert_close

DTYPES = ["float32", "float64", "float16", "complex64", "int64", "uint8", "bool"]


def some(shape, dtype="float32"):
    rng = np.random.default_rng(3)
    dtype = np.dtype(dtype)
    x = rng.normal(size=shape) * (1 if dtype.kind in "fc" else 20)
    x = x + 1j * rng.normal(size=shape) if dtype.kind == "c" else x
    return (np.abs(x) if dtype.kind == "u" else x).astype(dtype)


def same(fused, f, *args, steps=None):
    """Check bits, and how many kernels there are if nothing is a call."""
    with np.errstate(all="ignore"):
        want = f(*args)
    got = fused(*args)
    assert not fused.reasons
    got, want = ((x,) if isinstance(x, np.ndarray) else x for x in (got, want))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
        assert (np.signbit(a.real) == np.signbit(b.real)).all()
    if steps is not None:
        kinds = [s.kind for s in fused.explain().programs[-1].steps]
        assert kinds == ["rows"] * steps


@pytest.mark.parametrize(
    ("name", "dtype"),
    # NumPy's products of complex numbers depend on where they lie.
    [(n, d) for n in ("cumsum", "cumprod") for d in DTYPES if (n, d) != ("cumprod", "complex64")],
)
@pytest.mark.parametrize("shape", [(3, 7), (40, 33), (2, 5, 1000), (300,)])
def test_bits_are_those_of_numpy(name, dtype, shape):
    f = getattr(np, name)
    x = some(shape, dtype)
    for g in (
        lambda x: f(x + x, axis=-1) * 2,
        lambda x: f((x * x)[..., ::-1], axis=-1)[..., ::-1] + x,
        lambda x: f(x[..., ::-1], axis=-1) + x,
        lambda x: f(x + x, axis=-1)[..., ::-1] + x,
    ):
        same(rx.fuse(g), g, x, steps=1)


@pytest.mark.parametrize("op", ["maximum", "minimum"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("float16", "complex64")])
@pytest.mark.parametrize("shape", [(3, 7), (40, 33), (2, 5, 1000), (300,)])
def test_extrema(op, dtype, shape):
    f, x = getattr(np, op).accumulate, some(shape, dtype)
    if x.dtype.kind == "f":
        x[..., 3] = np.nan
        x.reshape(-1, shape[-1])[0] = np.where(np.arange(shape[-1]) % 3, 0.0, -0.0)
    for g in (
        lambda x: f(x * x, axis=-1) * x,
        lambda x: (
            f((x * x)[..., ::-1], axis=-1)[..., ::-1] & x if dtype == "bool" else f(x, -1) + x
        ),
        lambda x: f(x[..., ::-1], axis=x.ndim - 1) * x,
    ):
        same(rx.fuse(g), g, x, steps=1)


def test_extrema_of_other_types_and_axes():
    for dtype in ("float16", rx.bfloat16):
        x = some((6, 5), dtype)

        def f(x):
            return np.minimum.accumulate(np.maximum.accumulate(x * 2), axis=1, dtype=x.dtype)

        fused = rx.fuse(f)
        assert fused(x).tobytes() == f(x).tobytes()
        assert not fused.reasons
    fused = rx.fuse(lambda x, out: np.maximum.accumulate(x, out=out))
    x, out = some((4, 3)), np.empty((4, 3), "f4")
    assert np.array_equal(fused(x, out), np.maximum.accumulate(x))
    assert np.array_equal(out, np.maximum.accumulate(x))
    assert not fused.reasons
    fused = rx.fuse(np.maximum.accumulate)
    with pytest.warns(RuntimeWarning, match="accumulate of complex numbers"):
        x = some((4, 3), "complex64")
        assert np.array_equal(fused(x), np.maximum.accumulate(x))


def test_gradients_of_extrema():
    def f(t):
        top = rx.cumulative_max(rx.sin(t), axis=-1) - rx.cumulative_min(t * t, axis=0)
        return rx.sum(top**3)

    def twice(t):
        return rx.grad(lambda t: rx.sum(rx.grad(f)(t) ** 2))(t)

    x = np.round(some((20, 33), "float64"), 1)  # with ties
    for g in (f, rx.grad(f), twice):
        fused = rx.fuse(g)
        assert_close(fused(x), g(x), exact=True)
        assert not fused.reasons


def test_signs_of_zeros_and_what_is_not_a_number():
    x = np.array([[-0.0, -0.0, 1.0, np.inf, -np.inf, 2.0], [-0.0, np.nan, 1, 2, 3, 4]])

    def f(x):
        return np.negative(np.cumsum(x, axis=1))

    same(rx.fuse(f), f, x, steps=1)


def top_p(x):
    e = rx.exp(x - rx.max(x, axis=-1, keepdims=True))
    return rx.cumulative_sum(e / rx.sum(e, axis=-1, keepdims=True), axis=-1) < 0.9


def test_reductions_of_the_same_rows_join():
    same(rx.fuse(top_p), top_p, some((50, 129)), steps=1)
    (report,) = (fused := rx.fuse(top_p), fused(some((50, 129))))[0].explain().programs
    assert report.steps[0].operations[-2:] == ["cumulative_sum", "less"]


def test_samples_of_a_distribution():
    def f(p, u):
        total = rx.sum(p, axis=-1, keepdims=True)
        return rx.sum(rx.cumulative_sum(p, axis=-1) < u * total, axis=-1)

    p, u = np.abs(some((64, 100))), np.linspace(0, 1, 64, dtype="f4")[:, None]
    same(rx.fuse(f), f, p, u, steps=1)


def test_several_scans():
    def f(x):
        a = np.cumsum(np.tanh(x), axis=1)
        return np.cumprod(a, axis=1) - np.cumsum(a * x, axis=1), np.max(a, axis=1)

    same(rx.fuse(f), f, some((30, 70)))


def test_an_initial_element():
    def f(x):
        return rx.cumulative_sum(x * 2, axis=-1, include_initial=True) + 1

    same(rx.fuse(f), f, some((30, 70)))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (5, 1), (1, 1), (1,), (0,)])
def test_short_rows_and_empty_arrays(shape):
    def f(x):
        return np.cumsum(x * 2, axis=-1) + np.cumprod(x, axis=-1)

    same(rx.fuse(f), f, some(shape))


def test_along_other_axes():
    for axis in (0, 1, None):

        def f(x, axis=axis):
            return np.cumsum(x * 2, axis=axis) + 1

        same(rx.fuse(f), f, some((6, 5, 4)))


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((70, 70_000), "a call: rows of 70000 elements are taken in parts"),
        ((7, 9000), "a call: rows of 9000 elements are taken in parts"),
    ],
)
def test_long_rows_are_a_call(shape, why):
    fused = rx.fuse(top_p)
    assert_close(fused(some(shape)), top_p(some(shape)), exact=True)
    assert why in fused.explain()


def test_gradients():
    def f(t):
        return rx.sum(rx.cumulative_sum(rx.tanh(t), axis=-1) * t * t)

    fused, x = rx.fuse(f), some((20, 33), "float64")
    found = []
    for g in (f, fused):
        t = Tensor(x, requires_grad=True)
        g(t).backward()
        found.append(t.grad)
    np.testing.assert_array_equal(*map(np.asarray, found))
    backward = fused.explain().programs[-1]
    operations = [s.operations for s in backward.steps]
    assert all(s.kind != "eager" for s in backward.steps), operations
    assert any("cumulative_sum" in ops for ops in operations)


def test_mode_fast_differs_by_rounding_alone():
    f = rx.fuse(top_p, mode="fast")
    x = some((50, 129), "float64")
    assert (f(x) != top_p(x)).sum() <= 1
