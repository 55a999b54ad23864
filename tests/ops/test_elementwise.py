"""Elementwise functions over every array backend, dtype and awkward shape, against float64."""

import math

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import AWKWARD_SHAPES, assert_close

rng = np.random.default_rng(3)

UNARY = {
    "abs": (np.abs, -3, 3),
    "acos": (np.arccos, -1, 1),
    "acosh": (np.arccosh, 1, 4),
    "asin": (np.arcsin, -1, 1),
    "asinh": (np.arcsinh, -3, 3),
    "atan": (np.arctan, -3, 3),
    "atanh": (np.arctanh, -0.9, 0.9),
    "ceil": (np.ceil, -3, 3),
    "cos": (np.cos, -3, 3),
    "cosh": (np.cosh, -3, 3),
    "exp": (np.exp, -3, 3),
    "expm1": (np.expm1, -3, 3),
    "floor": (np.floor, -3, 3),
    "log": (np.log, 0.1, 4),
    "log10": (np.log10, 0.1, 4),
    "log1p": (np.log1p, -0.5, 4),
    "log2": (np.log2, 0.1, 4),
    "negative": (np.negative, -3, 3),
    "positive": (np.positive, -3, 3),
    "reciprocal": (np.reciprocal, 0.5, 3),
    "round": (np.round, -3, 3),
    "sign": (np.sign, -3, 3),
    "sin": (np.sin, -3, 3),
    "sinh": (np.sinh, -3, 3),
    "sqrt": (np.sqrt, 0, 4),
    "square": (np.square, -3, 3),
    "tan": (np.tan, -1, 1),
    "tanh": (np.tanh, -3, 3),
    "trunc": (np.trunc, -3, 3),
}
BINARY = {
    "add": np.add,
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "divide": np.divide,
    "floor_divide": np.floor_divide,
    "hypot": np.hypot,
    "logaddexp": np.logaddexp,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "pow": np.power,
    "remainder": np.remainder,
    "subtract": np.subtract,
}
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float32", "float64")


def draw(low, high, shape, dtype):
    """Draw values that ``dtype`` holds exactly, as float64 and as they are."""
    values = rng.uniform(low, high, shape)
    if dtype in HALF:
        values = np.asarray(np.round(values * 8) / 8)
    exact = rx.asarray(values, dtype=getattr(rx, dtype), device="cpu")
    return np.asarray(exact).astype("float64"), exact


def tolerance(dtype):
    return {"rtol": 2e-5, "atol": 1e-5} if dtype == "float32" else {}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(xp, name, dtype):
    if dtype in HALF and type(xp.empty(0)).__module__ not in ("numpy", "cupy"):
        pytest.skip(f"no {dtype} in this backend")
    function, low, high = UNARY[name]
    for shape in ((), (0,), (2, 3)):
        wide, narrow = draw(low, high, shape, dtype)
        x = xp.asarray(narrow) if dtype in HALF else xp.asarray(wide, dtype=getattr(xp, dtype))
        got = getattr(rx, name)(x)
        assert got.dtype == x.dtype
        with np.errstate(all="ignore"):
            want = function(wide)
        assert_close(got, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_broadcast(xp, name, dtype):
    for left, right in (((2, 3), (3,)), ((), (4,)), ((0, 3), (1, 3)), ((2, 1), (1, 3))):
        a, _ = draw(0.5, 3, left, dtype)
        b, _ = draw(0.5, 3, right, dtype)
        a, b = a.astype(dtype), b.astype(dtype)
        got = getattr(rx, name)(xp.asarray(a), xp.asarray(b))
        assert str(got.dtype).endswith(dtype)
        want = BINARY[name](a.astype("float64"), b.astype("float64"))
        assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_half_types(name, dtype):
    a, x = draw(0.5, 3, (4, 5), dtype)
    b, y = draw(0.5, 3, (5,), dtype)
    for other, value in ((y, b), (2, 2.0), (1.5, 1.5)):
        got = getattr(rx, name)(x, other)
        assert got.dtype == x.dtype
        assert_close(got, BINARY[name](a, value))
        got = getattr(rx, name)(other, x)
        assert got.dtype == x.dtype


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(xp, name):
    a, b = xp.asarray([1.0, 2.0, np.nan]), xp.asarray([1.0, 3.0, np.nan])
    want = getattr(np, name)([1.0, 2.0, np.nan], [1.0, 3.0, np.nan])
    assert_close(getattr(rx, name)(a, b), want)
    x = rx.asarray([1, 2], dtype=rx.bfloat16, device="cpu")
    assert getattr(rx, name)(x, 2).dtype == rx.bool


def test_bfloat16_promotes_as_the_table_says():
    x = rx.asarray([1.0, 2.0], dtype=rx.bfloat16, device="cpu")
    for other, want in (
        ("float16", rx.float32),
        ("float32", rx.float32),
        ("float64", rx.float64),
        ("int64", rx.bfloat16),
        ("bool", rx.bfloat16),
        ("complex64", rx.complex64),
    ):
        y = rx.asarray([1, 1], dtype=getattr(rx, other), device="cpu")
        for got in (rx.add(x, y), rx.multiply(y, x), rx.where(y != 0, x, y)):
            assert got.dtype == want, (other, got.dtype)
        assert rx.concat([x, y]).dtype == want


@pytest.mark.parametrize("shape", AWKWARD_SHAPES, ids=str)
def test_awkward_shapes(xp, shape):
    x = xp.asarray(rng.standard_normal(shape))
    for got in (rx.tanh(x), x + rx.exp(x), rx.where(x > 0, x, xp.zeros_like(x)), rx.clip(x, -1, 1)):
        assert got.shape == shape


def test_strided_and_reversed_inputs():
    base = rng.standard_normal((6, 8))
    for view in (base[::-1], base[:, ::2], base.T, base[1:, 3], np.broadcast_to(base[:1], (4, 8))):
        assert_close(rx.tanh(view), np.tanh(np.array(view)))
        assert_close(rx.add(view, view), 2 * np.array(view))
    assert_close(np.arange(4.0)[::-1] - rx.Tensor(np.asarray(0.25)), [2.75, 1.75, 0.75, -0.25])


INTEGERS = [
    ("remainder", [-135], 360, [225]),
    ("floor_divide", [7, -7], [-2, 2], [-4, -4]),
    ("remainder", [7, -7], [-2, 2], [-1, 1]),
    ("pow", [123456789], 2, [15241578750190521]),
    ("bitwise_and", [12, 10], 6, [4, 2]),
    ("bitwise_left_shift", [1, 3], 4, [16, 48]),
    ("bitwise_right_shift", [-8, 8], 2, [-2, 2]),
]


@pytest.mark.parametrize(("name", "x1", "x2", "want"), INTEGERS)
def test_integer_values(name, x1, x2, want):
    for wrap in (np.asarray, lambda v: rx.Tensor(np.asarray(v))):
        got = getattr(rx, name)(wrap(x1), x2 if isinstance(x2, int) else wrap(x2))
        assert_close(got, np.asarray(want), exact=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_values():
    nan, inf = math.nan, math.inf
    assert_close(rx.maximum(np.array([nan, 1]), np.array([2, nan])), [nan, nan])
    assert_close(rx.minimum(np.array([nan, 1]), np.array([2, nan])), [nan, nan])
    assert_close(rx.sign(np.array([nan, -0.0, -2])), [nan, 0, -1])
    assert_close(rx.round(np.array([0.5, 1.5, 2.5, -0.5])), [0, 2, 2, -0.0])
    assert_close(
        rx.logaddexp(np.array([-inf, inf, 1000.0]), np.array([-inf, 1, 1000.0])),
        [-inf, inf, 1000 + math.log(2)],
    )
    assert_close(rx.hypot(np.array([1e300]), np.array([1e300])), [math.sqrt(2) * 1e300])
    assert_close(rx.floor_divide(np.array([1]), np.array([0])), np.array([0]))
    int8 = np.asarray([100], dtype="int8")
    assert_close(
        int8 * rx.Tensor(np.asarray([3], dtype="int8")), np.asarray([44], "int8"), exact=True
    )
    with pytest.raises(OverflowError):
        rx.add(np.asarray([1], dtype="uint8"), 300)


def test_weak_python_scalars():
    x = np.asarray([1, 2], dtype="float32")
    assert rx.multiply(x, 2.0 * 1.0).dtype == np.float32
    assert rx.multiply(x, np.float64(1)).dtype == np.float64
    got = 1 + rx.Tensor(np.asarray(0.1, "float32")) * np.asarray(0.5, "float32") * np.full(
        (2,), 9.999999e-7, "float32"
    )
    assert got.dtype == np.float32
    assert_close(got, [1, 1])


def test_explicit_casts_are_kept():
    x = rx.astype(rx.astype(np.arange(3, dtype="float32") / 7, rx.float16), rx.float32)
    assert_close(x, np.float32([0, 0.14282227, 0.28564453]), exact=True)
    assert_close(np.float16([2049]) + rx.Tensor(np.float16([1])) - np.float16([2049]), [0])


def test_refusals_name_arguments():
    with pytest.raises(ValueError, match=r"x1 and x2 must have shapes that broadcast.*\(3,\) and"):
        rx.add(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="x1 and x2 must have shapes that broadcast"):
        rx.Tensor(np.ones(3)) * np.ones(4)
    with pytest.raises(TypeError) as caught:
        rx.bitwise_and(np.ones(3), 1)
    assert caught.value.__notes__ == ["in bitwise_and(x1: float64 array of shape (3,), x2: 1)"]
