"""Reductions and cumulative functions over every backend, against NumPy in float64."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(5)
X = rng.standard_normal((2, 3, 4))

NAMES = ("sum", "mean", "prod", "max", "min", "std", "var")
AXES = (None, 0, -1, (0, 2), (-1, 1))


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_reductions(xp, name, axis):
    for keepdims in (False, True):
        got = getattr(rx, name)(xp.asarray(X), axis=axis, keepdims=keepdims)
        assert_close(got, getattr(np, name)(X, axis=axis, keepdims=keepdims), rtol=1e-11)


@pytest.mark.parametrize("name", ["all", "any", "count_nonzero"])
def test_logical_reductions(xp, name):
    x = np.array([[True, False], [True, True], [False, False]])
    for axis in (None, 0, 1):
        assert_close(getattr(rx, name)(xp.asarray(x), axis=axis), getattr(np, name)(x, axis=axis))


def test_correction_of_variance(xp):
    for correction in (0, 1, 0.5):
        got = rx.var(xp.asarray(X), axis=1, correction=correction)
        want = np.sum((X - X.mean(1, keepdims=True)) ** 2, axis=1) / (3 - correction)
        assert_close(got, want)
        assert_close(rx.std(xp.asarray(X), axis=1, correction=correction), np.sqrt(want))


def test_empty_reductions(xp):
    x = xp.zeros((0, 3))
    assert_close(rx.sum(x, axis=0), np.zeros(3))
    assert_close(rx.prod(x, axis=0), np.ones(3))
    assert_close(rx.logsumexp(x, axis=0), np.full(3, -np.inf))
    assert rx.sum(x, axis=1).shape == (0,)
    assert_close(rx.all(xp.zeros(0)), True)
    assert_close(rx.any(xp.zeros(0)), False)


@pytest.mark.parametrize("function", [rx.var, rx.std])
def test_a_correction_that_is_no_number_is_refused(function):
    with pytest.raises(ValueError, match="correction must be finite, got nan"):
        function(np.ones(3), correction=np.nan)
    with pytest.raises(TypeError, match="correction must be a number, got str"):
        function(np.ones(3), correction="1")


def test_variance_without_freedom_has_a_gradient_of_nan():
    x = rx.Tensor(np.array([[1.0], [2.0]]), requires_grad=True)
    with np.errstate(all="ignore"), pytest.warns(RuntimeWarning, match="freedom"):
        rx.sum(rx.var(x, axis=1, correction=1)).backward()
    assert np.isnan(x.grad).all()


def test_empty_extremes_are_refused():
    for name in ("max", "min"):
        with pytest.raises(ValueError, match="no identity"):
            getattr(rx, name)(np.zeros(0))


def test_nan_wins(xp):
    x = xp.asarray([1.0, np.nan, 3.0])
    assert np.isnan(float(rx.max(x))) and np.isnan(float(rx.min(x)))
    assert_close(rx.argmax(x), 1)


def test_result_dtypes():
    assert rx.sum(np.ones(3, "int8")).dtype == np.int64
    assert rx.sum(np.ones(3, "uint8")).dtype == np.uint64
    assert rx.prod(np.ones(3, "bool")).dtype == np.int64
    assert rx.cumulative_sum(np.ones(3, "int16")).dtype == np.int64
    assert rx.sum(np.ones(3, "float32"), dtype=rx.float64).dtype == np.float64
    for dtype in ("float16", "bfloat16", "float32"):
        x = rx.ones((3, 2), dtype=getattr(rx, dtype), device="cpu")
        for name in (*NAMES, "logsumexp"):
            assert getattr(rx, name)(x, axis=0).dtype == x.dtype


def test_half_sums_accumulate_in_float32():
    x = np.full(70000, 0.5, dtype="float16")
    assert float(rx.sum(x)) == 35008
    assert float(rx.mean(x)) == 0.5
    # In bfloat16 itself, 256 + 1 is 256: a running sum would stop there.
    assert float(rx.sum(rx.ones(1000, dtype=rx.bfloat16, device="cpu"))) == 1000
    with np.errstate(over="ignore"):
        assert float(rx.sum(np.ones(70000, dtype="float16"))) == np.inf
    running = rx.cumulative_sum(rx.ones(1000, dtype=rx.bfloat16, device="cpu"))
    assert float(running[-1]) == 1000


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumulative_functions(xp, axis):
    x = xp.asarray(X)
    assert_close(rx.cumulative_sum(x, axis=axis), np.cumsum(X, axis=axis))
    assert_close(rx.cumulative_prod(x, axis=axis), np.cumprod(X, axis=axis))
    got = rx.cumulative_sum(x, axis=axis, include_initial=True)
    assert got.shape[axis] == X.shape[axis] + 1
    assert_close(rx.diff(got, axis=axis), X)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumulative_extrema(xp, axis):
    for x in (X, np.rint(9 * X).astype(int), np.where(np.arange(X.shape[-1]) == 1, np.nan, X)):
        x = np.concatenate([x] * 5, axis=axis)
        for name, f in (("max", np.maximum), ("min", np.minimum)):
            got = getattr(rx, f"cumulative_{name}")(xp.asarray(x), axis=axis)
            assert_close(got, f.accumulate(x, axis=axis), exact=True)
    assert rx.cumulative_max(xp.asarray(np.zeros((0, 3))), axis=axis % 2).shape == (0, 3)


def test_the_first_of_equals_gets_the_gradient_of_cumulative_extrema():
    x = rx.Tensor(np.array([2.0, 1.0, 2.0, 3.0, np.nan, 3.0, np.nan]), requires_grad=True)
    rx.sum(rx.cumulative_max(x) * np.arange(1.0, 8.0)).backward()
    assert_close(x.grad, [1 + 2 + 3, 0, 0, 4, 5 + 6 + 7, 0, 0])
    with pytest.raises(ValueError, match="axis must be given for an array of 2"):
        rx.cumulative_min(np.ones((2, 2)))


def test_logsumexp_values(xp):
    big = np.array([[1000.0, 1000.0], [-np.inf, -np.inf], [np.inf, 1.0], [-1000.0, 0.0]])
    want = [1000 + np.log(2), -np.inf, np.inf, 0.0]
    assert_close(rx.logsumexp(xp.asarray(big), axis=1), want)
    assert_close(rx.logsumexp(xp.asarray(X)), np.log(np.sum(np.exp(X))))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logsumexp_gradient_of_minus_infinity():
    x = rx.Tensor(np.array([-np.inf, -np.inf]), requires_grad=True)
    rx.logsumexp(x).backward()
    assert_close(x.grad, [0.0, 0.0])


def test_refusals_name_arguments():
    with pytest.raises(ValueError, match="axis 5 is out of bounds"):
        rx.sum(X, axis=5)
    with pytest.raises(ValueError, match="axis must be given for an array of 3"):
        rx.cumulative_sum(X)
    with pytest.raises(ValueError, match="axis must not name an axis twice"):
        rx.logsumexp(X, axis=(0, -3))


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    x = np.broadcast_to(np.int8(1), (2**31 + 8,))
    assert int(rx.sum(x, dtype=rx.int64)) == 2147483656
