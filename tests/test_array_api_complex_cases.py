"""Elementwise functions of complex infinities, zeros and NaN, as the standard has them."""

import cmath
import itertools
import math

import numpy as np
import pytest

import rtxarr as rx

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflow and NaN

nan, inf, pi = math.nan, math.inf, math.pi


@pytest.fixture(params=["array", "tensor"])
def wrap(request):
    """Make what rtxarr gets of a NumPy array: itself, or a Tensor."""
    return (lambda x: x) if request.param == "array" else rx.Tensor


class Either:
    """A value whose sign the standard leaves open."""

    def __init__(self, value):
        self.value = value


def cis(b):
    return cmath.exp(1j * b)


# Classes of components, as the tables name them.
PZ, NZ, PI, NI, N = [0.0], [-0.0], [inf], [-inf], [nan]
POS, NEG = [0.5, 1.0, 3.0], [-0.5, -1.0, -3.0]
ZERO, INF, NONZERO = PZ + NZ, PI + NI, POS + NEG
FINITE = ZERO + NONZERO
ANY = FINITE + INF + N
NO0, ZERO_OR_INF = Either(0.0), Either(inf)

LOG = [
    (NZ, PZ, -inf, pi), (PZ, PZ, -inf, 0.0), (FINITE, PI, inf, pi / 2), (FINITE, N, nan, nan),
    (NI, POS, inf, pi), (PI, POS, inf, 0.0), (NI, PI, inf, 3 * pi / 4), (PI, PI, inf, pi / 4),
    (INF, N, inf, nan), (N, FINITE, nan, nan), (N, PI, inf, nan), (N, N, nan, nan),
]  # fmt: skip

# a, b, and the real and the imaginary part of the result.
CASES = {
    "acos": [
        (ZERO, PZ, pi / 2, -0.0), (ZERO, N, pi / 2, nan), (FINITE, PI, pi / 2, -inf),
        (NONZERO, N, nan, nan), (NI, POS, pi, -inf), (PI, POS, 0.0, -inf),
        (NI, PI, 3 * pi / 4, -inf), (PI, PI, pi / 4, -inf), (INF, N, nan, ZERO_OR_INF),
        (N, FINITE, nan, nan), (N, PI, nan, -inf), (N, N, nan, nan),
    ],
    "acosh": [
        (ZERO, PZ, 0.0, pi / 2), (FINITE, PI, inf, pi / 2), (NONZERO, N, nan, nan),
        (PZ, N, nan, Either(pi / 2)), (NI, POS, inf, pi), (PI, POS, inf, 0.0),
        (NI, PI, inf, 3 * pi / 4), (PI, PI, inf, pi / 4), (INF, N, inf, nan),
        (N, FINITE, nan, nan), (N, PI, inf, nan), (N, N, nan, nan),
    ],
    "asinh": [
        (PZ, PZ, 0.0, 0.0), (POS, PI, inf, pi / 2), (FINITE, N, nan, nan), (PI, POS, inf, 0.0),
        (PI, PI, inf, pi / 4), (N, PZ, nan, 0.0), (N, NONZERO, nan, nan),
        (N, PI, ZERO_OR_INF, nan), (N, N, nan, nan),
    ],
    "atanh": [
        (PZ, PZ, 0.0, 0.0), (PZ, N, 0.0, nan), ([1.0], PZ, inf, 0.0), (POS, PI, 0.0, pi / 2),
        (NONZERO, N, nan, nan), (PI, POS, 0.0, pi / 2), (PI, PI, 0.0, pi / 2), (PI, N, 0.0, nan),
        (N, FINITE, nan, nan), (N, PI, NO0, pi / 2), (N, N, nan, nan),
    ],
    "cosh": [
        (PZ, PZ, 1.0, 0.0), (PZ, PI, nan, NO0), (PZ, N, nan, NO0), (NONZERO, PI + N, nan, nan),
        (PI, PZ, inf, 0.0), (PI, NONZERO, lambda b: inf * cis(b).real, lambda b: inf * cis(b).imag),
        (PI, PI, ZERO_OR_INF, nan), (PI, N, inf, nan), (N, ZERO, nan, NO0),
        (N, NONZERO, nan, nan), (N, N, nan, nan),
    ],
    "exp": [
        (ZERO, PZ, 1.0, 0.0), (FINITE, PI + N, nan, nan), (PI, PZ, inf, 0.0),
        (NI, FINITE, lambda b: 0 * math.cos(b), lambda b: 0 * math.sin(b)),
        (PI, NONZERO, lambda b: inf * math.cos(b), lambda b: inf * math.sin(b)),
        (NI, PI + N, NO0, NO0), (PI, PI + N, ZERO_OR_INF, nan), (N, PZ, nan, 0.0),
        (N, NONZERO + INF + N, nan, nan),
    ],
    "expm1": [
        (ZERO, PZ, Either(0.0), 0.0), (FINITE, PI + N, nan, nan), (PI, PZ, inf, 0.0),
        (NI, FINITE, -1.0, lambda b: 0 * math.sin(b)),
        (PI, NONZERO, lambda b: inf * math.cos(b), lambda b: inf * math.sin(b)),
        (NI, PI + N, -1.0, NO0), (PI, PI + N, ZERO_OR_INF, nan), (N, PZ, nan, 0.0),
        (N, NONZERO + INF + N, nan, nan),
    ],
    "log": LOG,
    "log2": [(a, b, re / math.log(2), im / math.log(2)) for a, b, re, im in LOG],
    "log10": [(a, b, re / math.log(10), im / math.log(10)) for a, b, re, im in LOG],
    "log1p": [([-1.0], PZ, -inf, 0.0), *LOG[2:]],
    "sign": [(ZERO, ZERO, Either(0.0), Either(0.0)), (N, ANY, nan, nan), (ANY, N, nan, nan)],
    "sinh": [
        (PZ, PZ, 0.0, 0.0), (PZ, PI + N, NO0, nan), (POS, PI + N, nan, nan), (PI, PZ, inf, 0.0),
        (PI, POS, lambda b: inf * math.cos(b), lambda b: inf * math.sin(b)),
        (PI, PI + N, ZERO_OR_INF, nan), (N, PZ, nan, 0.0), (N, NONZERO, nan, nan), (N, N, nan, nan),
    ],
    "sqrt": [
        (ZERO, PZ, 0.0, 0.0), (ANY, PI, inf, inf), (FINITE, N, nan, nan), (NI, POS, 0.0, inf),
        (PI, POS, inf, 0.0), (NI, N, nan, ZERO_OR_INF), (PI, N, inf, nan),
        (N, FINITE + N, nan, nan),
    ],
    "tanh": [
        # C, and so NumPy, gives the imaginary zero the sign of sin(2 * b).
        (PZ, PZ, 0.0, 0.0), (NONZERO, PI + N, nan, nan), (PI, [0.5, 1.0], 1.0, 0.0),
        (PI, [3.0], 1.0, -0.0), (PI, PI + N, 1.0, NO0), (N, PZ, nan, 0.0),
        (N, NONZERO, nan, nan), (N, N, nan, nan),
    ],
}  # fmt: skip


def same(got, want, b, tolerance):
    want = want(b) if callable(want) else want
    if isinstance(want, Either):
        got, want = abs(got), want.value
    if math.isnan(want):
        return math.isnan(got)
    return math.isclose(got, want, rel_tol=tolerance) and (
        math.copysign(1, got) == math.copysign(1, want)
    )


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", CASES)
def test_special_values(wrap, name, dtype):
    tolerance = 1e-6 if dtype == "complex64" else 1e-14
    failed = []
    for real, imag, want_real, want_imag in CASES[name]:
        for a, b in itertools.product(real, imag):
            got = complex(getattr(rx, name)(wrap(np.asarray([complex(a, b)], dtype)))[0])
            if not (
                same(got.real, want_real, b, tolerance) and same(got.imag, want_imag, b, tolerance)
            ):
                failed.append((complex(a, b), got))
    assert not failed


EVERY = np.asarray([complex(a, b) for a in ANY for b in ANY])


def signs(x):
    """Give the sign of each component, 0 for NaN."""
    parts = np.stack([np.real(x), np.imag(x)])
    return np.where(np.isnan(parts), 0.0, np.copysign(1.0, parts))


def sign_is_open(name, z):
    """Tell where the standard, or C, leaves the sign of a component open."""
    if name in ("cos", "sin"):  # cosh and sinh of the number turned
        z = complex(-z.imag, z.real)
    a, b = z.real, z.imag
    if name == "acosh":
        return a == 0 and math.isnan(b)
    if name in ("cosh", "cos", "sin"):
        return a in (0, inf, -inf) and not math.isfinite(b) or math.isnan(a) and b == 0
    return False


@pytest.mark.parametrize(
    "name", [*sorted(set(CASES) - {"sign"}), "asin", "atan", "cos", "sin", "tan"]
)
def test_functions_of_conjugates(name):
    """f(conj(x)) is conj(f(x)), with the signs of zeros."""
    f = getattr(rx, name)
    x = np.asarray([z for z in EVERY if not sign_is_open(name, complex(z))])
    got, want = f(np.conj(x)), np.conj(f(x))
    np.testing.assert_allclose(got, want, rtol=1e-14)
    np.testing.assert_array_equal(signs(got), signs(want))


@pytest.mark.parametrize(
    ("name", "hyperbolic"), [("asin", "asinh"), ("atan", "atanh"), ("sin", "sinh"), ("tan", "tanh")]
)
def test_circular_functions_are_turned_hyperbolic_ones(name, hyperbolic):
    """f(x) is -1j * h(x * 1j), as the standard defines their special values."""
    turned = getattr(rx, hyperbolic)(np.asarray([complex(-z.imag, z.real) for z in EVERY]))
    want = np.asarray([complex(z.imag, -z.real) for z in turned])
    np.testing.assert_allclose(getattr(rx, name)(EVERY), want, rtol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [("complex64", 1e-6), ("complex128", 1e-14)])
def test_near_zero_the_real_parts_of_expm1_and_log1p_are_exact(wrap, dtype, tolerance):
    for z in (1e-12, 1e-9 + 1e-9j, -1e-12 + 3e-7j, 1e-15j, 3e-3 - 2e-3j):
        power, series = 1, {"expm1": 0, "log1p": 0}
        for n in range(1, 9):
            power *= z
            series["expm1"] += power / math.factorial(n)
            series["log1p"] -= (-1) ** n * power / n
        for name, want in series.items():
            got = complex(getattr(rx, name)(wrap(np.asarray([z], dtype)))[0])
            assert math.isclose(got.real, want.real, rel_tol=tolerance)
            assert math.isclose(got.imag, want.imag, rel_tol=tolerance)


def test_large_exponents_overflow_along_the_real_axis(wrap):
    for z in (800 + 0j, 800 - 0j):
        got = complex(rx.expm1(wrap(np.asarray([z])))[0])
        assert got.real == inf
        assert math.copysign(1, got.imag) == math.copysign(1, z.imag) and got.imag == 0


@pytest.mark.parametrize("name", ["expm1", "log1p"])
@pytest.mark.filterwarnings("error")
def test_without_axes_they_are_numbers_and_say_nothing(name):
    """As those of real numbers, and where a part of a formula overflows that is not taken."""
    for z in (1e-9 + 1j, 1e-9 - 2e-9j, 3 + 4j):
        got = getattr(rx, name)(np.asarray(z))
        assert isinstance(got, np.complex128)
        assert getattr(rx, name)(np.asarray([z]))[0] == got
    assert rx.expm1(np.asarray([complex(-800, 1)]))[0] == -1
