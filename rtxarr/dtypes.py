"""Data types: the promotion table, accumulators and limits, with bfloat16 a full member.

NumPy's rules hold for its own types (NEP 50: Python scalars are weak). NumPy does not know what
becomes of bfloat16, so this table adds it:

===================  ============================================================
bfloat16 with        gives
===================  ============================================================
bool, any integer    bfloat16
float16              float32, the narrowest type that holds both
float32, float64     the other type
complex64, 128       the other type
Python bool, int     bfloat16
Python float         bfloat16 (weak, though NumPy itself would give float32)
Python complex       complex64
===================  ============================================================

The default types are NumPy's on every device: float64, int64, complex128 and bool.
"""

from __future__ import annotations

import builtins
import functools
import sys
from dataclasses import dataclass
from typing import Any

import array_api_compat
import ml_dtypes
import numpy as np

__all__ = [
    "DTYPES",
    "FLOATING",
    "FInfo",
    "IInfo",
    "accumulator",
    "can_cast",
    "default_dtypes",
    "finfo",
    "iinfo",
    "is_complex",
    "is_floating",
    "is_half",
    "is_inexact",
    "is_integral",
    "isdtype",
    "result_type",
]

bool = np.bool  # noqa: A001  (the standard's name)
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
float16, float32, float64 = np.float16, np.float32, np.float64
complex64, complex128 = np.complex64, np.complex128
bfloat16 = ml_dtypes.bfloat16

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
_KINDS = {
    "bool": ("bool",),
    "signed integer": _SIGNED,
    "unsigned integer": _UNSIGNED,
    "integral": _SIGNED + _UNSIGNED,
    "real floating": _FLOATS,
    "complex floating": _COMPLEX,
    "numeric": _SIGNED + _UNSIGNED + _FLOATS + _COMPLEX,
}

DTYPES: dict[str, type] = {
    name: globals()[name] for name in ("bool", *_SIGNED, *_UNSIGNED, *_FLOATS, *_COMPLEX)
}
"""All element types by name; ``rtxarr`` exports each of them."""

_BF16 = np.dtype(bfloat16)
_F16 = np.dtype("float16")
_F32 = np.dtype("float32")
_HALF = (_F16, _BF16)
_HALVES = frozenset(_HALF)  # for dtypes: a tuple would compare with each, and convert types

FLOATING = frozenset((*_HALF, _F32, np.dtype("float64")))
"""The real floating types, as NumPy's and CuPy's arrays have them."""

# What bfloat16 holds exactly; and what holds every bfloat16.
_INTO_BF16 = frozenset(("bool", "int8", "uint8", "bfloat16"))
_FROM_BF16 = frozenset(("bfloat16", "float32", "float64", *_COMPLEX))

_PY_BOOL = builtins.bool
_PY_SCALARS = (_PY_BOOL, int, float, complex)


def _foreign(dtype: Any, name: str = "dtype") -> Any:
    """Return the namespace of a dtype object that is not NumPy's (array_api_strict, torch)."""
    library: Any = sys.modules.get(type(dtype).__module__.partition(".")[0])
    if not hasattr(library, "empty"):
        raise TypeError(f"{name} must be a dtype or an array, got {type(dtype).__name__}")
    # Any array of that library leads to its wrapped namespace.
    return array_api_compat.array_namespace(library.empty(0))


def _dtype(x: Any, name: str = "dtype") -> Any:
    """Return the dtype of an array, or the dtype itself; NumPy's and CuPy's as ``np.dtype``."""
    if isinstance(x, np.dtype):
        return x
    if not isinstance(x, (type, str)) and hasattr(x, "dtype"):
        return x.dtype
    if isinstance(x, (type, str)):
        try:
            return np.dtype(x)
        except TypeError:
            raise TypeError(f"{name} must be one of {', '.join(DTYPES)}, got {x!r}") from None
    _foreign(x, name)  # raises unless it is another library's dtype
    return x


def as_dtype(dtype: Any) -> np.dtype:
    """Return NumPy's dtype object of an argument called ``dtype``."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}") from None


def result_type(*arrays_and_dtypes: Any) -> Any:
    """Return the dtype that an operation over the arguments computes in.

    Parameters
    ----------
    *arrays_and_dtypes : array, dtype or Python scalar
        At least one. Python scalars are weak: they give their kind, not their width.

    Returns
    -------
    dtype
        See the module's table.
    """
    if not arrays_and_dtypes:
        raise ValueError("result_type needs at least one array or dtype, got none")
    kinds = []
    for x in arrays_and_dtypes:
        kind = type(x)
        if kind is np.ndarray:
            kinds.append(x.dtype)
        elif kind in _PY_SCALARS:
            kinds.append(kind)
        else:
            dtype = _dtype(x, "arrays_and_dtypes")
            if not isinstance(dtype, np.dtype):
                return _foreign(dtype).result_type(*arrays_and_dtypes)
            kinds.append(dtype)
    return _promote(tuple(kinds))


@functools.cache
def _promote(kinds: tuple) -> np.dtype:
    """Promote dtypes and, for the scalars among the arguments, Python types."""
    found = [kind for kind in kinds if not isinstance(kind, type)]
    weak = [kind(1) for kind in kinds if isinstance(kind, type)]
    if _BF16 not in found:
        return np.result_type(*found, *weak)
    rest = [dtype for dtype in found if dtype != _BF16]
    if complex in kinds:
        rest.append(np.dtype("complex64"))
    if not rest:
        return _BF16
    other = np.result_type(*rest)
    if other == _F16:
        return _F32
    return other if other.kind in "fc" else _BF16


def can_cast(from_: Any, to: Any, /) -> _PY_BOOL:
    """Tell whether every value of ``from_`` (a dtype or an array) fits in the dtype ``to``."""
    from_, to = _dtype(from_, "from_"), _dtype(to, "to")
    if not isinstance(from_, np.dtype):
        return _foreign(from_).can_cast(from_, to)
    if from_ == _BF16:
        return to.name in _FROM_BF16
    if to == _BF16:
        return from_.name in _INTO_BF16
    return _PY_BOOL(np.can_cast(from_, to))


def isdtype(dtype: Any, kind: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` is of ``kind``.

    Parameters
    ----------
    dtype : dtype
    kind : dtype, str or tuple of them
        A dtype, or "bool", "signed integer", "unsigned integer", "integral", "real floating"
        (bfloat16 too), "complex floating" or "numeric".
    """
    dtype = _dtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if not isinstance(dtype, np.dtype):
        return _foreign(dtype).isdtype(dtype, kind)
    if isinstance(kind, str):
        try:
            return dtype.name in _KINDS[kind]
        except KeyError:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}") from None
    return dtype == kind


def _kind(dtype: Any) -> str:
    """Return NumPy's letter for the dtype's kind, with bfloat16 a float."""
    # The cache must not mix libraries: array_api_strict's dtypes hash like NumPy's, but warn
    # when compared with them.
    return _NUMPY_KINDS[dtype] if isinstance(dtype, np.dtype) else _foreign_kind(dtype)


class _Kinds(dict):
    def __missing__(self, dtype: np.dtype) -> str:
        self[dtype] = "f" if dtype == _BF16 else dtype.kind
        return self[dtype]


_NUMPY_KINDS: dict[np.dtype, str] = _Kinds()  # a look-up costs half a call of a cached function


_INEXACT_NUMBERS = frozenset(np.dtype(c).num for c in "efdgFDG") | {_BF16.num}


@functools.cache
def _foreign_kind(dtype: Any) -> str:
    for kind, letter in (("real floating", "f"), ("complex floating", "c"), ("bool", "b")):
        if isdtype(dtype, kind):
            return letter
    return "i"


def is_floating(dtype: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` (as arrays have it) is a real floating type; fast, cached."""
    return (_NUMPY_KINDS[dtype] if isinstance(dtype, np.dtype) else _foreign_kind(dtype)) == "f"


def is_complex(dtype: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` (as arrays have it) is a complex type; fast, cached."""
    return _kind(dtype) == "c"


def is_inexact(dtype: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` (as arrays have it) is a floating or complex type; fast."""
    try:  # every operation of the tape asks: isinstance(dtype, np.dtype) takes three times as long
        return dtype.num in _INEXACT_NUMBERS
    except AttributeError:
        return _foreign_kind(dtype) in "fc"


def is_integral(dtype: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` (as arrays have it) is an integer type; fast, cached."""
    return _kind(dtype) in "iu"


def is_half(dtype: Any) -> _PY_BOOL:
    """Tell whether ``dtype`` is float16 or bfloat16."""
    if isinstance(dtype, np.dtype):
        return dtype in _HALVES
    # array_api_strict warns when its dtypes are compared with NumPy's.
    return isinstance(dtype, type) and dtype in _HALF


def accumulator(dtype: Any) -> Any:
    """Return the dtype to sum in: float32 for the half types, else ``dtype`` itself."""
    return _F32 if is_half(dtype) else dtype


def default_dtypes() -> dict[str, type]:
    """Return the types that creation functions use when none is given, on every device."""
    return {
        "real floating": float64,
        "complex floating": complex128,
        "integral": int64,
        "indexing": int64,
    }


@dataclass(frozen=True)
class FInfo:
    """Limits of a floating type, as Python floats. ``tiny`` is NumPy's ``smallest_normal``."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Any

    @property
    def tiny(self) -> float:
        return self.smallest_normal


@dataclass(frozen=True)
class IInfo:
    """Limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: Any


def finfo(type: Any, /) -> FInfo:  # noqa: A002  (the standard's name)
    """Return the limits of a floating type; of its parts for a complex one.

    Parameters
    ----------
    type : dtype or array
    """
    dtype = _dtype(type, "type")
    if not isinstance(dtype, np.dtype):
        return _foreign(dtype).finfo(dtype)
    if not is_inexact(dtype):
        raise TypeError(f"type must be a floating or complex dtype, got {dtype}")
    info = (ml_dtypes.finfo if dtype == _BF16 else np.finfo)(dtype)
    return FInfo(
        bits=info.bits,
        eps=float(info.eps),
        max=float(info.max),
        min=float(info.min),
        smallest_normal=float(info.smallest_normal),
        dtype=np.dtype(info.dtype),
    )


def iinfo(type: Any, /) -> IInfo:  # noqa: A002
    """Return the limits of an integer type.

    Parameters
    ----------
    type : dtype or array
    """
    dtype = _dtype(type, "type")
    if not isinstance(dtype, np.dtype):
        return _foreign(dtype).iinfo(dtype)
    if dtype.kind not in "iu":
        raise TypeError(f"type must be an integer dtype, got {dtype}")
    info = np.iinfo(dtype)
    return IInfo(info.bits, info.max, info.min, dtype)
