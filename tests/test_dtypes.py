"""The promotion table against the standard's rules, NumPy's and the bfloat16 rows."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from rtxarr import dtypes
from rtxarr.dtypes import accumulator, can_cast, finfo, iinfo, isdtype, result_type

bf16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMPY = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
ALL = [np.dtype(dtypes.DTYPES[name]) for name in dtypes.DTYPES]
WITH_BFLOAT16 = {
    **dict.fromkeys(["bool", *INTEGERS], "bfloat16"),
    "bfloat16": "bfloat16",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}


def test_all_types_are_listed():
    assert set(dtypes.DTYPES) == {*NUMPY, "bfloat16"}
    assert dtypes.bfloat16 is ml_dtypes.bfloat16
    assert np.ones(1, dtypes.bool).dtype == np.bool


@pytest.mark.parametrize("a, b", list(itertools.combinations_with_replacement(NUMPY, 2)))
def test_numpys_types_promote_as_in_numpy(a, b):
    want = np.result_type(np.dtype(a), np.dtype(b))
    assert result_type(np.dtype(a), np.dtype(b)) == want
    assert result_type(np.ones(2, a), b) == want


@pytest.mark.parametrize("other, want", WITH_BFLOAT16.items())
def test_bfloat16_promotes_by_the_table(other, want):
    other = np.dtype(dtypes.DTYPES[other])
    for arguments in ((bf16, other), (other, bf16), (np.ones(2, bf16), np.ones(2, other))):
        assert result_type(*arguments) == np.dtype(dtypes.DTYPES[want])


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_promotion_is_commutative_and_idempotent(dtype):
    assert result_type(dtype) == result_type(dtype, dtype) == dtype
    for other in ALL:
        assert result_type(dtype, other) == result_type(other, dtype)


@pytest.mark.parametrize(
    "names", list(itertools.combinations(["bfloat16", "float16", "float32"], 2))
)
def test_floats_promote_to_what_holds_both(names):
    a, b = (np.dtype(dtypes.DTYPES[name]) for name in names)
    want = result_type(a, b)
    assert can_cast(a, want)
    assert can_cast(b, want)


@pytest.mark.parametrize(
    "dtype, scalar, want",
    [
        (bf16, True, "bfloat16"),
        (bf16, 3, "bfloat16"),
        (bf16, 3.5, "bfloat16"),
        (bf16, 1j, "complex64"),
        ("float16", 3.5, "float16"),
        ("float32", 3.5, "float32"),
        ("float32", 1j, "complex64"),
        ("int8", 3, "int8"),
        ("int8", 3.5, "float64"),
        ("bool", 3, "int64"),
    ],
)
def test_python_scalars_are_weak(dtype, scalar, want):
    want = np.dtype(dtypes.DTYPES[want])
    assert result_type(np.dtype(dtype), scalar) == want
    assert result_type(scalar, np.ones(3, dtype)) == want


def test_scalars_alone_and_numpy_scalars():
    assert result_type(1) == np.int64
    assert result_type(1.0) == np.float64
    assert result_type(1j, True) == np.complex128
    assert result_type(np.float64(1), np.float32) == np.float64, "a NumPy scalar is not weak"


def test_many_arguments_in_any_order():
    for order in itertools.permutations([bf16, np.dtype("float16"), np.dtype("int8"), 2.0]):
        assert result_type(*order) == np.float32


def test_other_libraries_dtypes():
    strict = pytest.importorskip("array_api_strict")
    assert result_type(strict.float32, strict.ones(2)) == strict.float64
    assert result_type(strict.float32, 2.0) == strict.float32
    assert can_cast(strict.float32, strict.float64)
    assert not can_cast(strict.ones(1), strict.float32)
    assert isdtype(strict.float32, "real floating")
    assert isdtype(strict.int8, (strict.int8, "bool"))
    assert finfo(strict.float32).bits == 32
    assert iinfo(strict.int8).max == 127
    assert dtypes.is_inexact(strict.complex64)
    assert not dtypes.is_inexact(strict.int8)


def test_nothing_and_nonsense_are_refused():
    with pytest.raises(ValueError, match="needs at least one array or dtype, got none"):
        result_type()
    with pytest.raises(TypeError, match="arrays_and_dtypes must be one of bool.*got 'float31'"):
        result_type("float31")
    with pytest.raises(TypeError, match="arrays_and_dtypes must be a dtype or an array, got list"):
        result_type([1.0])


# --------------------------------------------------------------------------------- casts, kinds


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_can_cast_says_whether_values_survive(dtype):
    """Compare with a round trip of the type's extreme and finest values."""
    if isdtype(dtype, "integral"):
        info = iinfo(dtype)
        samples = np.array([info.min, info.max, info.max - 1, 1], dtype)
    elif dtype == np.bool:
        samples = np.array([True, False])
    else:
        info = finfo(dtype)
        samples = np.array([info.max, info.smallest_normal, 1 + info.eps]).astype(dtype)
    assert can_cast(dtype, bf16) == _survives(samples, bf16)
    assert can_cast(samples, np.float32) == _survives(samples, np.dtype("float32"))


def _survives(samples, to):
    with np.errstate(all="ignore"):
        if samples.dtype.kind == "c":
            return to.kind == "c"
        return bool(
            (samples.astype(to).astype(np.float64) == samples.astype(np.float64)).all()
        ) and (samples.dtype.itemsize < 8 or samples.dtype.kind == to.kind)


def test_can_cast_from_bfloat16():
    fits = {name for name in dtypes.DTYPES if can_cast(bf16, dtypes.DTYPES[name])}
    assert fits == {"bfloat16", "float32", "float64", "complex64", "complex128"}


@pytest.mark.parametrize(
    "kind, names",
    [
        ("bool", {"bool"}),
        ("signed integer", {"int8", "int16", "int32", "int64"}),
        ("unsigned integer", {"uint8", "uint16", "uint32", "uint64"}),
        ("integral", set(INTEGERS)),
        ("real floating", {"float16", "bfloat16", "float32", "float64"}),
        ("complex floating", {"complex64", "complex128"}),
        ("numeric", {*NUMPY, "bfloat16"} - {"bool"}),
        (("bool", np.dtype("float32"), dtypes.bfloat16), {"bool", "float32", "bfloat16"}),
        ((), set()),
    ],
    ids=lambda x: "-".join(sorted(map(str, x))) if isinstance(x, set) else str(x),
)
def test_kinds(kind, names):
    assert {name for name, dtype in dtypes.DTYPES.items() if isdtype(dtype, kind)} == names


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="kind must be one of bool, signed.*got 'floating'"):
        isdtype(np.float32, "floating")


def test_predicates():
    for dtype in ALL:
        assert dtypes.is_floating(dtype) == isdtype(dtype, "real floating")
        assert dtypes.is_inexact(dtype) == isdtype(dtype, ("real floating", "complex floating"))
        assert dtypes.is_half(dtype) == (dtype.name in ("float16", "bfloat16"))
        assert accumulator(dtype) == (np.float32 if dtypes.is_half(dtype) else dtype)


# --------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("dtype", ["float16", bf16, "float32", "float64"], ids=str)
def test_limits_of_floats(dtype):
    dtype = np.dtype(dtype)
    info = finfo(dtype)
    assert info.dtype == dtype
    assert info.bits == 8 * dtype.itemsize
    for name in ("eps", "max", "min", "smallest_normal"):
        assert type(getattr(info, name)) is float
    one = np.ones((), dtype)
    assert float(np.nextafter(one, one * 2)) - 1 == info.eps
    assert float(np.asarray(info.max).astype(dtype)) == info.max == -info.min
    with np.errstate(over="ignore"):
        beyond = np.nextafter(np.asarray(info.max, dtype), np.asarray(np.inf, dtype))
    assert np.isinf(beyond)
    assert info.tiny == info.smallest_normal


def test_limits_of_complex_are_of_the_parts():
    assert finfo(np.complex64) == finfo(np.float32)
    assert finfo(np.ones(2, np.complex128)) == finfo(np.float64)


@pytest.mark.parametrize("name", INTEGERS)
def test_limits_of_integers(name):
    info, bits = iinfo(name), int(name.lstrip("uint"))
    signed = name[0] == "i"
    assert (info.bits, info.dtype) == (bits, np.dtype(name))
    assert info.max == 2 ** (bits - signed) - 1
    assert info.min == (-(2 ** (bits - 1)) if signed else 0)
    assert type(info.max) is int


def test_limits_of_other_types_are_refused():
    with pytest.raises(TypeError, match="type must be a floating or complex dtype, got int32"):
        finfo(np.int32)
    with pytest.raises(TypeError, match="type must be an integer dtype, got bfloat16"):
        iinfo(bf16)


def test_default_types_are_numpys():
    found = dtypes.default_dtypes()
    assert found["real floating"] == np.asarray(1.0).dtype
    assert found["integral"] == np.asarray(1).dtype
    assert found["complex floating"] == np.asarray(1j).dtype
    assert found["indexing"] == np.argsort(np.ones(2)).dtype
