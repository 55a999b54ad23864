"""Infinities, signed zeros and NaN in elementwise functions, as the standard's tables have them.

Known gap, NumPy's and allowed by the standard: ``floor_divide`` follows Python where an operand is
infinite, so an infinite dividend gives NaN ("libraries may return NaN to match Python behavior").
"""

import itertools
import math

import numpy as np
import pytest

import rtxarr as rx

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflow and NaN

REAL = ("float32", "float64")


@pytest.fixture(params=["array", "tensor"])
def wrap(request):
    """Make what rtxarr gets of a NumPy array: itself, or a Tensor."""
    return (lambda x: x) if request.param == "array" else rx.Tensor


nan, inf = math.nan, math.inf
ZEROS = [(0.0, 0.0), (-0.0, -0.0)]
INFINITIES = [(inf, inf), (-inf, -inf)]
NAN = [(nan, nan)]
OUTSIDE_ONE = [(1.5, nan), (-1.5, nan), (inf, nan), (-inf, nan)]
LOG = [*NAN, (-1.0, nan), (-inf, nan), (0.0, -inf), (-0.0, -inf), (1.0, 0.0), (inf, inf)]
ROUNDING = [*NAN, *ZEROS, *INFINITIES, (3.0, 3.0), (-3.0, -3.0)]

SPECIAL_UNARY = {
    "abs": [*NAN, (-0.0, 0.0), (-inf, inf)],
    "acos": [*NAN, *OUTSIDE_ONE, (1.0, 0.0)],
    "acosh": [*NAN, (0.5, nan), (-inf, nan), (1.0, 0.0), (inf, inf)],
    "asin": [*NAN, *OUTSIDE_ONE, *ZEROS],
    "asinh": [*NAN, *ZEROS, *INFINITIES],
    "atan": [*NAN, *ZEROS, (inf, math.pi / 2), (-inf, -math.pi / 2)],
    "atanh": [*NAN, *OUTSIDE_ONE, *ZEROS, (1.0, inf), (-1.0, -inf)],
    "ceil": [*ROUNDING, (-0.5, -0.0), (0.5, 1.0)],
    "cos": [*NAN, (0.0, 1.0), (-0.0, 1.0), (inf, nan), (-inf, nan)],
    "cosh": [*NAN, (0.0, 1.0), (-0.0, 1.0), (inf, inf), (-inf, inf)],
    "exp": [*NAN, (0.0, 1.0), (-0.0, 1.0), (inf, inf), (-inf, 0.0)],
    "expm1": [*NAN, *ZEROS, (inf, inf), (-inf, -1.0)],
    "floor": [*ROUNDING, (-0.5, -1.0), (0.5, 0.0)],
    "log": LOG,
    "log10": LOG,
    "log1p": [*NAN, (-2.0, nan), (-1.0, -inf), *ZEROS, (inf, inf)],
    "log2": LOG,
    "reciprocal": [*NAN, (0.0, inf), (-0.0, -inf), (inf, 0.0), (-inf, -0.0)],
    "round": [*ROUNDING, (0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, -0.0), (-2.5, -2.0)],
    "sign": [*NAN, (-0.0, 0.0), (0.0, 0.0), (-inf, -1.0), (inf, 1.0), (-3.0, -1.0), (3.0, 1.0)],
    "sin": [*NAN, *ZEROS, (inf, nan), (-inf, nan)],
    "sinh": [*NAN, *ZEROS, *INFINITIES],
    "sqrt": [*NAN, (-1.0, nan), (-inf, nan), *ZEROS, (inf, inf)],
    "square": [*NAN, (-0.0, 0.0), (-inf, inf)],
    "tan": [*NAN, *ZEROS, (inf, nan), (-inf, nan)],
    "tanh": [*NAN, *ZEROS, (inf, 1.0), (-inf, -1.0)],
    "trunc": [*ROUNDING, (-0.5, -0.0), (0.5, 0.0), (-1.5, -1.0)],
}


def same_bits(got, want):
    """Equal, with the sign of zeros, and NaN equal to NaN."""
    if math.isnan(want):
        return math.isnan(got)
    return math.isclose(got, want, rel_tol=1e-6) and math.copysign(1, got) == math.copysign(1, want)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", SPECIAL_UNARY)
def test_special_values_of_one_argument(wrap, name, dtype):
    for x, want in SPECIAL_UNARY[name]:
        got = float(getattr(rx, name)(wrap(np.asarray([x], dtype)))[0])
        # The sign of zero is not specified where the standard says only 0.
        assert same_bits(got, want) or (name == "sign" and got == want == 0), (x, got, want)


@pytest.mark.parametrize(
    ("name", "true"),
    [("isfinite", (0.0, -0.0, 1.0)), ("isinf", (inf, -inf)), ("isnan", (nan,)),
     ("signbit", (-0.0, -1.0, -inf))],
)  # fmt: skip
def test_special_values_of_tests(wrap, name, true):
    for x in (nan, inf, -inf, 0.0, -0.0, 1.0, -1.0):
        if name == "isfinite":
            expected = math.isfinite(x)
        else:
            expected = any(same_bits(x, t) for t in true)
        assert bool(getattr(rx, name)(wrap(np.asarray([x])))[0]) is expected


# Classes of operands, as the standard's tables name them.
PZ, NZ, PI, NI, N = [0.0], [-0.0], [inf], [-inf], [nan]
POS, NEG = [0.25, 1.0, 2.0, 3.0], [-0.25, -1.0, -2.0, -3.0]
ODD, EVEN = [1.0, 3.0], [0.5, 2.0]
ZERO, INF, FINITE = PZ + NZ, PI + NI, [0.25, 3.0, -0.25, -3.0]
ANY = ZERO + INF + POS + NEG + N
NUMBER = ZERO + INF + POS + NEG
UP, DOWN = POS + PI, NEG + NI


def first(a, b):
    return a


def second(a, b):
    return b


NAN_EITHER = [(N, ANY, nan), (ANY, N, nan)]
DIVISION = [
    *NAN_EITHER,
    (INF, INF, nan), (ZERO, ZERO, nan),
    (PZ, UP, 0.0), (NZ, UP, -0.0), (PZ, DOWN, -0.0), (NZ, DOWN, 0.0),
    (POS, PZ, inf), (POS, NZ, -inf), (NEG, PZ, -inf), (NEG, NZ, inf),
]  # fmt: skip

SPECIAL_BINARY = {
    "add": [
        *NAN_EITHER,
        (PI, NI, nan), (NI, PI, nan), (PI, PI, inf), (NI, NI, -inf), (PI, FINITE, inf),
        (NI, FINITE, -inf), (FINITE, PI, inf), (FINITE, NI, -inf), (NZ, NZ, -0.0), (NZ, PZ, 0.0),
        (PZ, NZ, 0.0), (PZ, PZ, 0.0), (ZERO, FINITE, second), (FINITE, ZERO, first),
        ([1.0], [-1.0], 0.0), ([-3.0], [3.0], 0.0),
    ],
    "atan2": [
        *NAN_EITHER,
        (UP, ZERO, math.pi / 2), (DOWN, ZERO, -math.pi / 2),
        (PZ, UP + PZ, 0.0), (PZ, DOWN + NZ, math.pi),
        (NZ, UP + PZ, -0.0), (NZ, DOWN + NZ, -math.pi),
        (POS, PI, 0.0), (POS, NI, math.pi), (NEG, PI, -0.0), (NEG, NI, -math.pi),
        (PI, FINITE, math.pi / 2), (NI, FINITE, -math.pi / 2),
        (PI, PI, math.pi / 4), (PI, NI, 3 * math.pi / 4),
        (NI, PI, -math.pi / 4), (NI, NI, -3 * math.pi / 4),
    ],
    "copysign": [
        (UP + DOWN + ZERO, DOWN + NZ, lambda a, b: -abs(a)),
        (UP + DOWN + ZERO, UP + PZ, lambda a, b: abs(a)),
    ],
    "divide": [
        *DIVISION,
        (PI, POS, inf), (PI, NEG, -inf), (NI, POS, -inf), (NI, NEG, inf),
        (POS, PI, 0.0), (POS, NI, -0.0), (NEG, PI, -0.0), (NEG, NI, 0.0),
    ],
    "floor_divide": [
        *DIVISION,
        # "libraries may return NaN to match Python behavior" for an infinite dividend,
        # and -1 for an infinite divisor of the other sign.
        (POS, PI, 0.0), (NEG, NI, 0.0),
    ],
    "hypot": [
        (INF, ANY, inf), (ANY, INF, inf), (ZERO, FINITE, lambda a, b: abs(b)),
        (FINITE, ZERO, lambda a, b: abs(a)), (N, FINITE + ZERO, nan), (FINITE + ZERO, N, nan),
    ],
    "logaddexp": [*NAN_EITHER, (PI, NUMBER, inf), (NUMBER, PI, inf)],
    "maximum": NAN_EITHER,
    "minimum": NAN_EITHER,
    "multiply": [
        *NAN_EITHER,
        (INF, ZERO, nan), (ZERO, INF, nan),
        (UP + PZ, PZ, lambda a, b: nan if a == inf else 0.0),
        (POS, NZ, -0.0), (NEG, PZ, -0.0), (NEG, NZ, 0.0), (NZ, NZ, 0.0), (PZ, NZ, -0.0),
        (PI, UP, inf), (PI, DOWN, -inf), (NI, UP, -inf), (NI, DOWN, inf), (POS, NI, -inf),
    ],
    "nextafter": [*NAN_EITHER, (PZ, NZ, -0.0), (NZ, PZ, 0.0)],
    "pow": [
        ([0.0, 2.0, -1.0, inf], N, nan), (ANY, ZERO, 1.0), (N, UP + DOWN, nan),
        ([2.0, -2.0, inf, -inf], PI, inf), ([2.0, -2.0, inf, -inf], NI, 0.0),
        ([1.0, -1.0], INF, 1.0), ([1.0], NUMBER, 1.0),
        ([0.25, -0.25, 0.0], PI, 0.0), ([0.25, -0.25], NI, inf),
        (PI, UP, inf), (PI, DOWN, 0.0), (NI, ODD, -inf), (NI, EVEN, inf),
        (NI, [-1.0, -3.0], -0.0), (NI, [-0.5, -2.0], 0.0),
        (PZ, UP, 0.0), (PZ, DOWN, inf), (NZ, ODD, -0.0), (NZ, EVEN, 0.0),
        (NZ, [-1.0, -3.0], -inf), (NZ, [-0.5, -2.0], inf), (NEG, [0.5, -1.5], nan),
    ],
    "remainder": [
        *NAN_EITHER,
        (INF, INF, nan), (ZERO, ZERO, nan), (ZERO, UP, 0.0), (ZERO, DOWN, -0.0),
        (POS + NEG, ZERO, nan), (INF, POS + NEG, nan),
        (POS, PI, first), (POS, NI, second), (NEG, PI, second), (NEG, NI, first),
        (FINITE, [2.0, -2.0], lambda a, b: a % b),
    ],
    "subtract": [*NAN_EITHER, (PI, PI, nan), (NI, NI, nan), (PZ, PZ, 0.0), (NZ, PZ, -0.0)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", SPECIAL_BINARY)
def test_special_values_of_two_arguments(wrap, name, dtype):
    for class1, class2, want in SPECIAL_BINARY[name]:
        for a, b in itertools.product(class1, class2):
            got = getattr(rx, name)(wrap(np.asarray([a], dtype)), wrap(np.asarray([b], dtype)))
            expected = want(a, b) if callable(want) else want
            assert same_bits(float(got[0]), expected), (a, b, float(got[0]), expected)


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("exp", complex(-inf, 1.0), 0j),
        ("exp", complex(0.0, 0.0), 1 + 0j),
        ("log", complex(-0.0, 0.0), complex(-inf, math.pi)),
        ("log", complex(1.0, inf), complex(inf, math.pi / 2)),
        ("sign", 0j, 0j),
        ("sign", 3 + 4j, 0.6 + 0.8j),
        ("sqrt", complex(-4.0, 0.0), 2j),
        ("sqrt", complex(-4.0, -0.0), -2j),
        ("abs", complex(inf, nan), inf),
        ("abs", complex(nan, -inf), inf),
        ("round", complex(1.5, -2.5), complex(2.0, -2.0)),
    ],
)
def test_special_values_of_complex_arguments(wrap, name, x, want):
    got = complex(getattr(rx, name)(wrap(np.asarray([x])))[0])
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_comparisons_of_special_values(wrap):
    values = np.asarray([nan, inf, -inf, 0.0, -0.0, 1.0])
    x1, x2 = wrap(values[:, None]), wrap(values[None, :])
    for name, operator in (("equal", np.equal), ("not_equal", np.not_equal), ("less", np.less)):
        got = getattr(rx, name)(x1, x2)
        table = [[bool(operator(a, b)) for b in values.tolist()] for a in values.tolist()]
        assert np.asarray(got).tolist() == table


def test_the_sign_of_nan_counts(wrap):
    positive = np.copysign(np.asarray([nan]), 1.0)
    negative = np.copysign(np.asarray([nan]), -1.0)
    assert np.asarray(rx.signbit(wrap(negative))).tolist() == [True]
    assert np.asarray(rx.signbit(wrap(positive))).tolist() == [False]
    for x2, sign in ((positive, 1.0), (negative, -1.0)):
        assert np.asarray(rx.copysign(wrap(np.asarray([-2.0])), wrap(x2))).tolist() == [2.0 * sign]
        for x1 in (positive, negative):
            got = np.asarray(rx.copysign(wrap(x1), wrap(x2)))
            assert np.isnan(got).all() and np.signbit(got).tolist() == [sign < 0]


def test_nan_among_values_and_limits_of_clip(wrap):
    x = wrap(np.asarray([nan, 1.0, 1.0, 1.0]))
    low, high = wrap(np.asarray([0.0, nan, 0.0, 0.0])), wrap(np.asarray([2.0, 2.0, nan, 2.0]))
    got = np.asarray(rx.clip(x, low, high))
    assert np.isnan(got).tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", REAL)
def test_hypotenuses_do_not_depend_on_signs_and_order_nor_overflow(wrap, dtype):
    limits = np.finfo(dtype)
    values = np.asarray([3.0, 0.25, limits.max / 2, limits.tiny, 0.0, inf], dtype)
    x1, x2 = wrap(values[:, None]), wrap(values[None, :])
    want = np.asarray(rx.hypot(x1, x2))
    for a, b in ((x2, x1), (-x1, x2), (x1, -x2), (-x1, -x2)):
        np.testing.assert_array_equal(np.asarray(rx.hypot(a, b)), want)
    assert np.isfinite(want[:5, :5]).all() and (want[:4, :4] > 0).all()
