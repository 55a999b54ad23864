"""The public checks find what they are there to find."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close, check_values, gradcheck, gradgradcheck

X = np.array([0.3, -0.7, 1.1])


def planted(rule):
    @rx.custom_op
    def op(x):
        return x**3

    op.defvjps(x=rule)
    return op


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, x: g * 2 * x**2,
        lambda g, x: g * 3 * x**2 + 1e-4,
        lambda g, x: g * x * np.nan,
        lambda g: None,
    ],
    ids=["factor", "offset", "nan", "missing"],
)
def test_gradcheck_finds_wrong_rules(rule):
    with pytest.raises(AssertionError, match="gradient of argument 0 at"):
        gradcheck(planted(rule), (X,))


def test_gradcheck_accepts_the_right_rule():
    gradcheck(planted(lambda g, x: g * 3 * x**2), (X,))


def test_gradgradcheck_finds_a_rule_that_drops_out_of_the_graph():
    op = planted(lambda g, x: g * rx.stop_gradient(3 * x**2))
    gradcheck(op, (X,))
    with pytest.raises(AssertionError, match="gradient of argument 0"):
        gradgradcheck(op, (X,))


def test_gradcheck_of_complex_functions():
    gradcheck(lambda z: z * z, (X + 1j,))

    @rx.custom_op(holomorphic=False)
    def op(z):
        return z * z

    op.defvjps(z=lambda g, z: 2 * g * z)  # the conjugate is missing
    with pytest.raises(AssertionError, match="gradient of argument 0"):
        gradcheck(op, (X + 1j,))


def test_gradcheck_needs_something_to_check():
    with pytest.raises(ValueError, match="at least one float64"):
        gradcheck(rx.sin, (X.astype("float32"),))
    for check in (gradcheck, gradgradcheck):
        with pytest.raises(TypeError, match="args must be a tuple .* got ndarray"):
            check(rx.sin, X)


def test_assert_close_compares_shape_value_and_bits():
    assert_close(np.float32([1.0]), [1.0 + 1e-7])
    assert_close([np.nan], [np.nan])
    for got, want, options in (
        (np.zeros(3), np.zeros((3, 1)), {}),
        (np.float64([1.0]), [1.0 + 1e-9], {}),
        (np.float64([1.0]), np.float64([1.0 + 1e-15]), {"exact": True}),
        (np.float32([1.0]), np.float64([1.0]), {"exact": True}),
        (np.int64([1]), [2], {}),
    ):
        with pytest.raises(AssertionError):
            assert_close(got, want, **options)


def test_assert_close_knows_bfloat16():
    x = rx.asarray([1.0, 2.0], dtype=rx.bfloat16, device="cpu")
    assert_close(x, [1.001, 2.001])
    with pytest.raises(AssertionError):
        assert_close(x, [1.1, 2.0])


def test_check_values_reads_indices_only_when_asked():
    values, index = np.ones((2, 1)), np.array([0, -1])
    with check_values(), pytest.raises(IndexError, match=r"index must lie in \[0, 3\), .* -1 to 0"):
        rx.scatter_add(values, index, 3)
    with check_values(), pytest.raises(IndexError, match="indptr"):
        rx.segment_sum(values, np.array([0, 5]))
