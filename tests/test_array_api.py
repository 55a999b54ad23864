"""The namespace against the array API standard 2025.12, over raw arrays and over tensors.

``array_api_strict`` is the reference: what it accepts must give the same dtype, shape and values
here. ``test_array_api_special_cases.py`` has the infinities, zeros and NaN.
"""

import functools
import inspect
import itertools
import math

import array_api_strict as strict
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import rtxarr as rx

strict.set_array_api_strict_flags(api_version="2025.12")

BOOL = ("bool",)
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
REAL = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS, FLOATS = SIGNED + UNSIGNED, REAL + COMPLEX
DTYPES = BOOL + INTEGERS + FLOATS

few = settings(max_examples=40)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflow and NaN


@pytest.fixture(params=["array", "tensor"])
def wrap(request):
    """Make what rtxarr gets of a NumPy array: itself, or a Tensor."""
    return (lambda x: x) if request.param == "array" else rx.Tensor


def convert(value, make, namespace):
    """Replace arrays and dtype names inside arguments by those of a namespace."""
    if isinstance(value, (np.ndarray, np.generic)):
        return make(value)
    if isinstance(value, str) and value in DTYPES:
        return getattr(namespace, value)
    if isinstance(value, (list, tuple)):
        return type(value)(convert(v, make, namespace) for v in value)
    if isinstance(value, dict):
        return {k: convert(v, make, namespace) for k, v in value.items()}
    return value


def check_same(got, want, *, tensor, zeros=False):
    """Compare a result of rtxarr with the reference's: kind, dtype, shape, values."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        assert getattr(got, "_fields", None) == getattr(want, "_fields", None)
        for a, b in zip(got, want, strict=True):
            check_same(a, b, tensor=tensor, zeros=zeros)
        return
    assert isinstance(got, rx.Tensor) == tensor
    got = got.data if tensor else got
    assert rx.asarray(got).dtype.name == str(want.dtype).rpartition(".")[2]
    want = np.asarray(want)
    assert got.shape == want.shape
    single = want.dtype.name in ("float32", "complex64")
    np.testing.assert_allclose(got, want, rtol=1e-5 if single else 1e-12, atol=1e-30)
    if zeros and want.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def compare(wrap, name, *args, creation=False, **options):
    """Call a function of both namespaces; tell whether the reference accepts the arguments."""
    theirs, ours = strict, rx
    for part in name.split("."):
        theirs, ours = getattr(theirs, part), getattr(ours, part)
    try:
        want = theirs(
            *convert(args, strict.asarray, strict), **convert(options, strict.asarray, strict)
        )
    except (TypeError, OverflowError):
        return False
    got = ours(*convert(args, wrap, rx), **convert(options, wrap, rx))
    check_same(got, want, tensor=wrap is rx.Tensor and not creation)
    return True


def sample(dtype, shape=(3,)):
    """Small numbers of either sign, zero and one among them, valid for every dtype."""
    values = np.arange(math.prod(shape)).reshape(shape) % 5
    if dtype == "bool":
        return values % 2 == 1
    if dtype in UNSIGNED:
        return values.astype(dtype)
    values = values - 2
    if dtype in COMPLEX:
        return (values * 0.5 + 0.25j).astype(dtype)
    return (values * 0.5).astype(dtype) if dtype in REAL else values.astype(dtype)


# -------------------------------------------------------------------- names, signatures

NOT_IN_THE_STANDARD = {
    "ArrayAPIStrictFlags",
    "get_array_api_strict_flags",
    "reset_array_api_strict_flags",
    "set_array_api_strict_flags",
}


EXTENSIONS = [f"{room}.{n}" for room in ("fft", "linalg") for n in getattr(strict, room).__all__]


@pytest.mark.parametrize("name", sorted(set(strict.__all__) - NOT_IN_THE_STANDARD) + EXTENSIONS)
def test_name_and_signature(name):
    theirs, ours = (functools.reduce(getattr, name.split("."), xp) for xp in (strict, rx))
    if not inspect.isfunction(theirs):
        return
    theirs, ours = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    assert [(p.name, p.kind) for p in theirs.values()] == [(p.name, p.kind) for p in ours.values()]
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        # array_api_strict marks arguments of later versions by an object of its own.
        if other.default is not other.empty and type(other.default).__name__ != "Undef":
            assert mine.default == other.default


def test_every_public_name_exists():
    for name in rx.__all__:
        assert hasattr(rx, name)


def test_constants():
    assert rx.e == math.e
    assert rx.pi == math.pi
    assert rx.inf == math.inf
    assert math.isnan(rx.nan)
    assert rx.newaxis is None
    assert rx.__array_api_version__ == "2025.12"


# ----------------------------------------------------------------- elementwise functions

UNARY = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_invert", "ceil", "conj",
    "cos", "cosh", "exp", "expm1", "floor", "imag", "isfinite", "isinf", "isnan", "log", "log10",
    "log1p", "log2", "logical_not", "negative", "positive", "real", "reciprocal", "round", "sign",
    "signbit", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc",
]  # fmt: skip
BINARY = [
    "add", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "copysign", "divide", "equal", "floor_divide", "greater", "greater_equal",
    "hypot", "less", "less_equal", "logaddexp", "logical_and", "logical_or", "logical_xor",
    "maximum", "minimum", "multiply", "nextafter", "not_equal", "pow", "remainder", "subtract",
]  # fmt: skip


def positive_where_needed(name, x):
    """Negative exponents and shifts of integers are not defined."""
    if name.endswith("shift") or (name == "pow" and x.dtype.kind == "i"):
        return abs(x)
    if name in ("floor_divide", "remainder") and x.dtype.kind in "iu":
        return np.where(x == 0, x.dtype.type(1), x)
    return x


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(wrap, name):
    accepted = [compare(wrap, name, sample(d, s)) for d in DTYPES for s in [(5,), (), (0, 2)]]
    assert any(accepted)


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_promote(wrap, name):
    accepted = 0
    for dtype1, dtype2 in itertools.product(DTYPES, DTYPES):
        x2 = positive_where_needed(name, sample(dtype2, (5,)))
        accepted += compare(wrap, name, sample(dtype1, (5,)), x2)
    assert accepted


@pytest.mark.parametrize("name", BINARY)
def test_python_scalars_take_the_dtype_of_the_array(wrap, name):
    for dtype, scalar in itertools.product(DTYPES, (True, 1, 1.5, 1.5j)):
        x = positive_where_needed(name, sample(dtype, (5,)))
        compare(wrap, name, sample(dtype, (5,)), scalar)
        if not isinstance(scalar, bool):
            compare(wrap, name, scalar, x)


@pytest.mark.parametrize("name", BINARY)
@few
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=3))
def test_binary_functions_broadcast(name, shapes):
    dtype = (
        "float64" if name in ("atan2", "copysign", "hypot", "logaddexp", "nextafter") else "int64"
    )
    dtype = "bool" if name.startswith("logical") else dtype
    x1, x2 = (np.ones(s, dtype) for s in shapes.input_shapes)
    for wrap in (np.asarray, rx.Tensor):
        assert getattr(rx, name)(wrap(x1), wrap(x2)).shape == shapes.result_shape


def test_shapes_that_do_not_broadcast_are_refused(wrap):
    for name in BINARY:
        with pytest.raises((ValueError, TypeError)):
            getattr(rx, name)(wrap(np.ones((2, 3))), wrap(np.ones((2, 4))))


OPERATORS = {
    "__add__": "add", "__sub__": "subtract", "__mul__": "multiply", "__truediv__": "divide",
    "__floordiv__": "floor_divide", "__mod__": "remainder", "__pow__": "pow",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__eq__": "equal", "__ne__": "not_equal", "__lt__": "less", "__le__": "less_equal",
    "__gt__": "greater", "__ge__": "greater_equal",
}  # fmt: skip


@pytest.mark.parametrize("method", OPERATORS)
def test_operators_are_their_functions(method):
    name = OPERATORS[method]
    for dtype in ("int32", "float64") if "bitwise" not in name else ("int32",):
        x1, x2 = sample(dtype, (5,)), positive_where_needed(name, sample(dtype, (5,)))
        want = getattr(rx, name)(x1, x2)
        for got in (
            getattr(rx.Tensor(x1), method)(rx.Tensor(x2)),
            getattr(rx.Tensor(x1), method)(x2),
            getattr(rx.Tensor(x1), method)(x2[1].item()),
        )[:2]:
            check_same(got, strict.asarray(want), tensor=True)
        reflected = f"__r{method[2:]}"
        if hasattr(strict.asarray(x1), reflected):
            check_same(getattr(rx.Tensor(x2), reflected)(x1), strict.asarray(want), tensor=True)


def test_operators_between_arrays_and_tensors_give_tensors():
    x = np.asarray([1.0, 2.0])
    t = rx.Tensor(x)
    for out in (x + t, t + x, x @ t, t @ x, x < t, 1 - t, t**2, 2**t, -t, +t, abs(t)):
        assert isinstance(out, rx.Tensor)
    other = t
    other += x
    assert other is not t
    assert t.numpy().tolist() == [1.0, 2.0]
    assert (~rx.Tensor(np.asarray([True, False]))).numpy().tolist() == [False, True]


def test_where_and_clip(wrap):
    condition = np.asarray([True, False, True])
    for dtype in DTYPES:
        x = sample(dtype)
        assert compare(wrap, "where", condition, x, x[::-1].copy())
    compare(wrap, "where", condition, sample("float32"), 1.5)
    compare(wrap, "where", condition, 1, sample("int8"))
    for dtype in INTEGERS + REAL:
        x = sample(dtype, (5,))
        assert compare(wrap, "clip", x, 0, 1)
        assert compare(wrap, "clip", x, None, 1)
        assert compare(wrap, "clip", x, 0)
        assert compare(wrap, "clip", x, x[:1], x[1:2])
        assert compare(wrap, "clip", x)


# ---------------------------------------------------------------------------- reductions

ARITHMETIC = ["sum", "prod", "mean", "max", "min", "var", "std", "all", "any", "count_nonzero"]
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)


@st.composite
def shape_and_axis(draw, *, tuples=True):
    shape = draw(shapes)
    choices = [st.none()]
    if shape:
        single = st.integers(-len(shape), len(shape) - 1)
        choices.append(single)
        if tuples:
            choices.append(
                st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1).map(tuple)
            )
    return shape, draw(st.one_of(choices))


@pytest.mark.parametrize("name", ARITHMETIC)
@few
@given(case=shape_and_axis(), dtype=st.sampled_from(DTYPES), keepdims=st.booleans())
def test_reductions(name, case, dtype, keepdims):
    shape, axis = case
    for wrap in (np.asarray, rx.Tensor):
        compare(wrap, name, sample(dtype, shape), axis=axis, keepdims=keepdims)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@few
@given(case=shape_and_axis(tuples=False), dtype=st.sampled_from(INTEGERS + REAL))
def test_searches_along_an_axis(name, case, dtype):
    shape, axis = case
    for wrap, keepdims in itertools.product((np.asarray, rx.Tensor), (False, True)):
        assert compare(wrap, name, sample(dtype, shape), axis=axis, keepdims=keepdims)


@pytest.mark.parametrize("name", ["sum", "prod", "cumulative_sum", "cumulative_prod"])
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_dtypes_of_sums(wrap, name, dtype):
    assert compare(wrap, name, sample(dtype, (4,)))
    for other in ("int64", "uint64", "float64", "complex128"):
        compare(wrap, name, sample(dtype, (4,)), dtype=other)


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_cumulative_functions(wrap, name):
    for dtype, initial in itertools.product(("int8", "float32", "complex128"), (False, True)):
        assert compare(wrap, name, sample(dtype, (4,)), include_initial=initial)
        for axis in (0, 1, -1):
            assert compare(wrap, name, sample(dtype, (2, 3)), axis=axis, include_initial=initial)
            assert compare(wrap, name, sample(dtype, (0, 2)), axis=axis, include_initial=initial)
    with pytest.raises(ValueError, match="axis must be given"):
        getattr(rx, name)(wrap(sample("float32", (2, 3))))


@pytest.mark.parametrize("name", ["sum", "prod", "all", "any", "count_nonzero"])
def test_reductions_of_nothing(wrap, name):
    for dtype in DTYPES:
        for axis in (None, 0, 1, (0, 1)):
            compare(wrap, name, sample(dtype, (0, 2)), axis=axis)


def test_variance_options(wrap):
    x = sample("float64", (3, 4))
    for name, correction in itertools.product(("var", "std"), (0, 1, 0.5)):
        assert compare(wrap, name, x, axis=1, correction=correction)


def test_nan_wins_in_reductions(wrap):
    x = wrap(np.asarray([[1.0, math.nan], [2.0, 3.0]]))
    for name in ("sum", "prod", "mean", "max", "min", "var", "std"):
        got = np.asarray(getattr(rx, name)(x, axis=1))
        assert np.isnan(got[0])
        assert not np.isnan(got[1])


def test_differences(wrap):
    x = sample("float64", (3, 4))
    for options in ({}, {"n": 2}, {"axis": 0}, {"prepend": x[:, :1]}, {"append": x[:, :2]}):
        assert compare(wrap, "diff", x, **options)


# ----------------------------------------------------------------------- shape functions


@few
@given(shape=shapes, data=st.data())
def test_moving_axes_and_elements(shape, data):
    x = sample("int32", shape)
    ndim = len(shape)
    axes = data.draw(st.permutations(range(ndim)))
    axis = data.draw(st.integers(-ndim - 1, ndim))
    one = data.draw(st.integers(-ndim, ndim - 1)) if ndim else None
    some = (
        data.draw(st.none() | st.lists(st.integers(0, ndim - 1), unique=True).map(tuple))
        if ndim
        else None
    )
    shift = data.draw(st.integers(-4, 4))
    repetitions = tuple(data.draw(st.lists(st.integers(0, 2), max_size=3)))
    wide = tuple(data.draw(st.lists(st.integers(1, 2), max_size=2)))
    for wrap in (np.asarray, rx.Tensor):
        assert compare(wrap, "permute_dims", x, tuple(axes))
        assert compare(wrap, "reshape", x, (-1,))
        assert compare(wrap, "reshape", x, shape[::-1])
        assert compare(wrap, "broadcast_to", x, wide + shape)
        assert compare(wrap, "flip", x, axis=some)
        assert compare(wrap, "roll", x, shift)
        assert compare(wrap, "tile", x, repetitions)
        if -ndim - 1 <= axis <= ndim:
            assert compare(wrap, "expand_dims", x, axis=axis)
            assert compare(wrap, "stack", [x, x + 1], axis=axis)
        if ndim:
            assert compare(wrap, "moveaxis", x, 0, one)
            assert compare(wrap, "roll", x, shift, axis=one)
            assert compare(wrap, "concat", [x, x], axis=one)
            assert compare(wrap, "concat", [x, x], axis=None)
            assert compare(wrap, "unstack", x, axis=one)
            assert compare(wrap, "repeat", x, 2, axis=one)
            assert compare(wrap, "repeat", x, 2)
            assert compare(wrap, "squeeze", sample("int32", (1, *shape)), 0)
            for dtype in ("int64", "uint8"):
                assert compare(wrap, "repeat", x, np.arange(shape[one]).astype(dtype), axis=one)
            # array_api_strict refuses uint64 as NumPy does.
            counts = np.arange(shape[one])
            unsigned = rx.repeat(wrap(x), wrap(counts.astype("uint64")), axis=one)
            np.testing.assert_array_equal(np.asarray(unsigned), np.repeat(x, counts, axis=one))


def test_joining_promotes(wrap):
    for dtype1, dtype2 in itertools.product(DTYPES, DTYPES):
        compare(wrap, "concat", [sample(dtype1), sample(dtype2)])
        compare(wrap, "stack", [sample(dtype1), sample(dtype2)])


def test_grids_and_triangles(wrap):
    x, y = sample("float32", (2,)), sample("float32", (3,))
    for indexing in ("xy", "ij"):
        check = rx.meshgrid(wrap(x), wrap(y), indexing=indexing)
        want = strict.meshgrid(strict.asarray(x), strict.asarray(y), indexing=indexing)
        check_same(check, tuple(want), tensor=wrap is rx.Tensor)
        assert isinstance(check, tuple)
    for k in (-1, 0, 2):
        assert compare(wrap, "tril", sample("int8", (2, 3, 4)), k=k)
        assert compare(wrap, "triu", sample("float32", (3, 3)), k=k)
    for name in ("broadcast_arrays",):
        assert compare(wrap, name, sample("int8", (2, 1)), sample("float32", (3,)))
    assert rx.broadcast_shapes((2, 1), (3,), ()) == (2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rx.squeeze(x, axis=0),
        lambda x: rx.reshape(x, (4, 4)),
        lambda x: rx.reshape(x, (-1, -1)),
        lambda x: rx.permute_dims(x, (0,)),
        lambda x: rx.expand_dims(x, axis=4),
        lambda x: rx.concat([x, x[:1, :2]], axis=0),
        lambda x: rx.stack([x, x[:1]]),
        lambda x: rx.broadcast_to(x, (2, 4)),
        lambda x: rx.flip(x, axis=2),
        lambda x: rx.sum(x, axis=2),
        lambda x: rx.take(x, np.asarray([0]), axis=2),
        lambda x: rx.unstack(x, axis=2),
    ],
)
def test_bad_axes_and_shapes_are_refused(wrap, call):
    with pytest.raises((ValueError, IndexError)):
        call(wrap(sample("float64", (2, 3))))


# ------------------------------------------------------------------ indexing and set_item


@few
@given(
    case=shapes.flatmap(
        lambda s: st.tuples(
            st.just(s), hnp.basic_indices(s, allow_newaxis=True, allow_ellipsis=True)
        )
    )
)
def test_basic_indices(case):
    shape, key = case
    x = np.arange(math.prod(shape)).reshape(shape)
    got = rx.Tensor(x)[key]
    assert isinstance(got, rx.Tensor)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.numpy(), x[key])
    for value in (7, np.zeros((), x.dtype), rx.Tensor(np.asarray(3))):
        changed, tensor = x.copy(), rx.Tensor(x.copy())
        changed[key] = value.numpy() if isinstance(value, rx.Tensor) else value
        tensor[key] = value
        np.testing.assert_array_equal(tensor.numpy(), changed)


def test_masks_and_integer_arrays_as_indices():
    x = np.arange(12.0).reshape(3, 4)
    mask = x % 3 == 0
    rows, columns = np.asarray([0, 2, -1]), np.asarray([1, 1, 3])
    for key in (mask, mask[:, 0], rows, (rows, columns), (1, columns), (slice(None), columns),
                (rows[:, None], columns), (Ellipsis, rows), np.asarray(True)):  # fmt: skip
        np.testing.assert_array_equal(rx.Tensor(x)[key].numpy(), x[key])
        wrapped = convert(key, rx.Tensor, rx)
        np.testing.assert_array_equal(rx.Tensor(x)[wrapped].numpy(), x[key])
        changed, tensor = x.copy(), rx.Tensor(x.copy())
        changed[key] = -1.0
        tensor[wrapped] = -1.0
        np.testing.assert_array_equal(tensor.numpy(), changed)
    with pytest.raises(IndexError):
        rx.Tensor(x)[3]
    with pytest.raises(IndexError):
        rx.Tensor(x)[0, 0, 0]


def test_taking(wrap):
    x, indices = sample("float32", (3, 4)), np.asarray([2, 0, 0])
    for axis in (0, 1, -1):
        assert compare(wrap, "take", x, indices, axis=axis)
    assert compare(wrap, "take", x[0], indices)
    for axis in (0, 1):
        assert compare(wrap, "take_along_axis", x, np.argsort(x, axis=axis), axis=axis)


# ------------------------------------------------------------- searching, sorting and sets


@few
@given(
    hnp.arrays("int16", hnp.array_shapes(max_dims=2, max_side=5), elements=st.integers(-3, 3)),
    st.booleans(),
    st.sampled_from(INTEGERS + REAL),
)
def test_sorting(x, descending, dtype):
    x = abs(x).astype(dtype)
    for wrap, axis in itertools.product((np.asarray, rx.Tensor), (-1, 0)):
        assert compare(wrap, "sort", x, axis=axis, descending=descending)
        assert compare(wrap, "argsort", x, axis=axis, descending=descending)


@few
@given(
    hnp.arrays(
        "int16", hnp.array_shapes(max_dims=2, min_side=0, max_side=5), elements=st.integers(-3, 3)
    ),
    st.sampled_from(DTYPES),
)
def test_sets(x, dtype):
    x = abs(x).astype(dtype)
    for wrap in (np.asarray, rx.Tensor):
        # The order of the values is not specified, but ours and the reference's are sorted.
        for name in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
            assert compare(wrap, name, x)
        if dtype in INTEGERS:
            assert compare(wrap, "isin", x, np.asarray([0, 2], dtype))
            # array_api_strict 2.6 ignores invert.
            inverted = np.asarray(rx.isin(wrap(x), wrap(np.asarray([0, 2], dtype)), invert=True))
            np.testing.assert_array_equal(inverted, np.isin(x, [0, 2], invert=True))
            assert compare(wrap, "isin", x, 1)


def test_unique_keeps_every_nan_and_both_zeros_equal(wrap):
    x = wrap(np.asarray([math.nan, 0.0, -0.0, math.nan, 1.0]))
    values, counts = rx.unique_counts(x)
    assert np.isnan(np.asarray(values)).sum() == 2
    assert sorted(np.asarray(counts).tolist()) == [1, 1, 1, 2]
    assert rx.unique_values(x).shape == (4,)


def test_searching(wrap):
    x = np.asarray([0.0, 1.0, 1.0, 3.0])
    for side in ("left", "right"):
        assert compare(wrap, "searchsorted", x, np.asarray([[-1.0, 1.0], [2.0, 5.0]]), side=side)
        assert compare(wrap, "searchsorted", x, 1.0, side=side)
        order = np.asarray([3, 0, 2, 1])
        assert compare(wrap, "searchsorted", x[[1, 3, 2, 0]], np.asarray([1.0]), sorter=order)
    for dtype in DTYPES:
        assert compare(wrap, "nonzero", sample(dtype, (2, 3)))
    assert isinstance(rx.nonzero(wrap(x)), tuple)


# ----------------------------------------------------------------------------- data types

KINDS = ["bool", "signed integer", "unsigned integer", "integral", "real floating",
         "complex floating", "numeric"]  # fmt: skip


def test_kinds_of_dtypes():
    for dtype in DTYPES:
        ours, theirs = getattr(rx, dtype), getattr(strict, dtype)
        for kind in [*KINDS, ("bool", "numeric"), ("integral", "real floating")]:
            assert rx.isdtype(ours, kind) == strict.isdtype(theirs, kind)
        for other in DTYPES:
            assert rx.isdtype(ours, getattr(rx, other)) == (dtype == other)


def test_promotion_of_dtypes(wrap):
    for pair in itertools.product(DTYPES, DTYPES):
        try:
            want = strict.result_type(*(getattr(strict, d) for d in pair))
        except TypeError:
            continue
        want = getattr(rx, str(want).rpartition(".")[2])
        assert rx.result_type(*(getattr(rx, d) for d in pair)) == want
        assert rx.result_type(wrap(sample(pair[0])), getattr(rx, pair[1])) == want
    for dtype in INTEGERS:
        assert rx.result_type(getattr(rx, dtype), 1) == getattr(rx, dtype)
    assert rx.result_type(rx.float32, 1.0, 2) == rx.float32
    assert rx.result_type(rx.float32, 1j) == rx.complex64


def test_casts():
    for a, b in itertools.product(DTYPES, DTYPES):
        if (a in INTEGERS) == (b in INTEGERS):  # across kinds NumPy allows more
            want = strict.can_cast(getattr(strict, a), getattr(strict, b))
            assert rx.can_cast(getattr(rx, a), getattr(rx, b)) == want or a == "bool"


@pytest.mark.parametrize("dtype", FLOATS)
def test_limits_of_floats(wrap, dtype):
    want = strict.finfo(getattr(strict, dtype))
    for given_type in (getattr(rx, dtype), wrap(sample(dtype))):
        got = rx.finfo(given_type)
        for name in ("bits", "eps", "max", "min", "smallest_normal"):
            value = getattr(got, name)
            assert type(value) is (int if name == "bits" else float)
            assert value == getattr(want, name)
        assert got.dtype == getattr(rx, str(want.dtype).rpartition(".")[2])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_limits_of_integers(wrap, dtype):
    want = strict.iinfo(getattr(strict, dtype))
    for given_type in (getattr(rx, dtype), wrap(sample(dtype))):
        got = rx.iinfo(given_type)
        for name in ("bits", "max", "min"):
            assert type(getattr(got, name)) is int
            assert getattr(got, name) == getattr(want, name)
        assert got.dtype == getattr(rx, dtype)


def test_conversions(wrap):
    for a, b in itertools.product(DTYPES, DTYPES):
        if a in COMPLEX and b not in COMPLEX:
            continue
        assert compare(wrap, "astype", sample(a, (5,)), b)
    x = wrap(sample("float64"))
    same = rx.astype(x, rx.float64, copy=False)
    assert (same.data if isinstance(same, rx.Tensor) else same) is (
        x.data if isinstance(x, rx.Tensor) else x
    )
    assert rx.astype(x, rx.float64) is not x


# ------------------------------------------------------------------------------- creation


@pytest.fixture
def on_cpu():
    with rx.device("cpu"):
        yield


def make(name, *args, **options):
    """Compare a creation function, which gives raw arrays whatever it gets."""
    return compare(np.asarray, name, *args, creation=True, **options)


@pytest.mark.usefixtures("on_cpu")
def test_creation():
    for dtype in (None, *DTYPES):
        for shape in ((), 3, (2, 0), (2, 3)):
            assert make("zeros", shape, dtype=dtype)
            assert make("ones", shape, dtype=dtype)
            assert rx.empty(shape).shape == ((shape,) if isinstance(shape, int) else shape)
        for k in (-1, 0, 2):
            assert make("eye", 3, 4, k=k, dtype=dtype)
    for value in (True, 2, 1.5, 1j):
        assert make("full", (2, 2), value)
    for args in ((5,), (1, 5), (5, 1, -2), (0, 1, 0.25), (0.5, 3), (3, 0)):
        assert make("arange", *args)
    assert make("arange", 3, dtype="float32")
    for num, endpoint in itertools.product((0, 1, 5), (True, False)):
        assert make("linspace", 0, 1, num, endpoint=endpoint)
    assert make("linspace", -1, 1, 4, dtype="float32")
    for obj in (True, 1, 1.5, 1j, [1, 2], [[1.0], [2.0]], [True, 2], [1, 2.5], []):
        assert make("asarray", obj)
    assert make("asarray", [1, 0], dtype="bool")
    assert rx.asarray(2**64 - 1, dtype=rx.uint64) == 2**64 - 1
    with pytest.raises(OverflowError, match="64 bits, got 36893488147419103232"):
        rx.asarray(2**65)


def test_creation_like(wrap):
    for dtype in DTYPES:
        x = sample(dtype, (2, 3))
        for name in ("zeros_like", "ones_like"):
            got = getattr(rx, name)(wrap(x))
            want = getattr(strict, name)(strict.asarray(x))
            check_same(got, want, tensor=isinstance(got, rx.Tensor))
        assert rx.empty_like(wrap(x)).dtype == x.dtype
        assert rx.full_like(wrap(x), 1).dtype == x.dtype
        assert rx.zeros_like(wrap(x), dtype=rx.float32).dtype == rx.float32


def test_copies():
    x = np.asarray([1.0, 2.0])
    assert not np.shares_memory(rx.asarray(x, copy=True), x)
    assert np.shares_memory(rx.asarray(x, copy=False), x)
    assert np.shares_memory(rx.asarray(x), x)
    assert np.shares_memory(rx.from_dlpack(x), x)
    assert np.shares_memory(rx.asarray(rx.Tensor(x), copy=False).data, x)
    assert not np.shares_memory(rx.asarray(rx.Tensor(x), copy=True).data, x)
    with pytest.raises(ValueError, match="copy"):
        rx.asarray(x, dtype=rx.float32, copy=False)
    assert not np.shares_memory(rx.reshape(x, (2, 1), copy=True), x)
    with pytest.raises((ValueError, AttributeError)):
        rx.reshape(np.ones((4, 4)).T[1:], (12,), copy=False)


# ------------------------------------------------------------------- inspection, the array


def test_devices_are_taken_where_they_are_given():
    for device in rx.__array_namespace_info__().devices():
        x = rx.ones((2, 2), device=device)
        assert x.device == device
        for made in (
            rx.zeros(2, device=device), rx.full(2, 1.0, device=device), rx.eye(2, device=device),
            rx.arange(2, device=device), rx.linspace(0, 1, 2, device=device),
            rx.empty(2, device=device), rx.asarray([1, 2], device=device),
            rx.asarray(x, device=device), rx.zeros_like(x, device=device),
            rx.ones_like(x, device=device), rx.full_like(x, 2, device=device),
            rx.empty_like(x, device=device), rx.astype(x, rx.float32, device=device),
            rx.from_dlpack(x, device=device), rx.fft.fftfreq(3, device=device),
            rx.Tensor(x).to_device(device), x + x, rx.sum(x), x[0],
        ):  # fmt: skip
            assert made.device == device


def test_inspection():
    info = rx.__array_namespace_info__()
    assert set(info.capabilities()) == {
        "boolean indexing",
        "data-dependent shapes",
        "max dimensions",
    }
    assert info.default_device() in info.devices()
    assert info.default_dtypes() == {
        "real floating": rx.float64,
        "complex floating": rx.complex128,
        "integral": rx.int64,
        "indexing": rx.int64,
    }
    assert set(info.dtypes()) == set(DTYPES)
    for kind in KINDS:
        want = strict.__array_namespace_info__().dtypes(kind=kind)
        assert set(info.dtypes(kind=kind)) == set(want)
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu'"):
        info.dtypes(device="tpu")
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu'"):
        info.default_dtypes(device="tpu")
    assert info.dtypes(device="cpu") == info.dtypes()
    assert set(info.dtypes(kind=("bool", "real floating"))) == {"bool", *REAL}
    assert all(getattr(rx, name) == dtype for name, dtype in info.dtypes().items())


def test_the_array_object():
    x = rx.Tensor(sample("float32", (2, 3)))
    assert x.__array_namespace__() is rx
    assert x.__array_namespace__(api_version="2025.12") is rx
    with pytest.raises(ValueError, match="api_version"):
        x.__array_namespace__(api_version="1999.12")
    assert (x.shape, x.ndim, x.size, x.dtype, x.device) == ((2, 3), 2, 6, rx.float32, "cpu")
    assert x.T.shape == x.mT.shape == (3, 2)
    assert x.to_device("cpu").numpy().tolist() == x.numpy().tolist()
    assert np.shares_memory(np.from_dlpack(x), x.data)
    with pytest.raises(ValueError, match="two dimensions"):
        _ = rx.Tensor(np.zeros(3)).T
    # In-place operators fall back on the plain ones: arithmetic on tensors is never in place.
    in_place = {f"__i{method[2:]}" for method in (*OPERATORS, "__matmul__")}
    names = {n for n in dir(strict.asarray(1.0)) if n.startswith("__") or n[0] != "_"}
    assert names - set(dir(x)) - in_place <= {"__annotations__", "__buffer__"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_conversions(dtype):
    for value in (0, 1):
        x = rx.Tensor(np.asarray(value, dtype))
        assert bool(x) is bool(value)
        assert complex(x) == value
        if dtype not in COMPLEX:
            assert int(x) == value
            assert float(x) == value
        if dtype in INTEGERS:
            assert [10, 20][x] == (20 if value else 10)
        else:
            with pytest.raises(TypeError):
                [10, 20][x]


# ------------------------------------------------------------------------- linear algebra


def test_linear_algebra_in_the_main_namespace(wrap):
    assert rx.linalg.matmul is rx.matmul
    for a, b in itertools.product(INTEGERS + FLOATS, INTEGERS + FLOATS):
        x1, x2 = sample(a, (2, 3)), sample(b, (3, 2))
        compare(wrap, "matmul", x1, x2)
        compare(wrap, "vecdot", x1, x2.T.copy())
        compare(wrap, "tensordot", x1, x2, axes=1)
        compare(wrap, "linalg.outer", x1[0], x2[:, 0].copy())
    for dtype in DTYPES:
        assert compare(wrap, "matrix_transpose", sample(dtype, (2, 3, 4)))
        compare(wrap, "linalg.trace", sample(dtype, (2, 3, 4)), offset=1)
        assert compare(wrap, "linalg.diagonal", sample(dtype, (2, 3, 4)), offset=-1)
