"""NumPy's own inner loops, for kernels that must give NumPy's bits.

A ufunc gives away the C function that it runs along an axis::

    int loop(void *context, char **arrays, intptr_t *n, intptr_t *strides, void *auxdata)

with strides in bytes. It needs no lock of Python, so that several threads may run it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr.polygraph._ir import MAPS, REPEATED, UFUNC_NAMES

_NAMES = {**UFUNC_NAMES, **REPEATED}


class Address(int):
    """An address of this process; ``origin`` is how another process finds what lies there.

    ("loop", operation, dtype, field) of a :class:`Loop`, ("type", dtype) of NumPy's scalars,
    ("array",) for the type of arrays, or ("tuple",): how many bytes into a tuple its items are.
    """

    origin: tuple[str, ...]

    def __new__(cls, value: int, *origin: str) -> Address:
        address = super().__new__(cls, value)
        address.origin = origin
        return address


def address(*origin: str) -> Address:
    """Return the address of what ``origin`` names; ValueError if this NumPy does not have it."""
    if origin == ("array",):
        return Address(id(np.ndarray), *origin)
    if origin == ("tuple",):
        return Address(tuple.__basicsize__, *origin)
    if len(origin) == 2 and origin[0] == "type":
        return Address(id(np.dtype(origin[1]).type), *origin)
    if len(origin) == 4 and origin[0] == "loop" and origin[3] in Loop._fields:
        loop = find(origin[1], np.dtype(origin[2]))
        if loop is not None:
            return getattr(loop, origin[3])
    raise ValueError(f"NumPy {np.__version__} has no {' '.join(map(str, origin))}")


class Loop(NamedTuple):
    """Addresses of the function and of what it takes first and last."""

    function: Address
    context: Address
    auxdata: Address


class _CallInfo(ctypes.Structure):
    """NumPy's ``ufunc_call_info``; its layout belongs to the capsule's name."""

    _fields_ = (
        ("strided_loop", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("auxdata", ctypes.c_void_p),
        ("requires_pyapi", ctypes.c_bool),
        ("no_floatingpoint_errors", ctypes.c_bool),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_capsules: list[Any] = []  # the addresses live as long as these


def _ufunc(op: str) -> Any:
    if op == "erf":
        from scipy.special import erf

        return erf
    return getattr(np, _NAMES.get(op, op), None)


@functools.cache
def find(op: str, dtype: np.dtype) -> Loop | None:
    """Return NumPy's loop of a map or reduction on ``dtype``; None if there is none.

    Only loops that keep to the dtype count: NumPy has none for the sine of an int32, but casts.
    """
    ufunc = _ufunc(op)
    if not isinstance(ufunc, np.ufunc) or ufunc.nout != 1:
        return None
    result = np.dtype(bool) if MAPS.get(op, (0, ""))[1] == "bool" else dtype
    if op == "abs" and dtype.kind == "c":
        result = np.empty(0, dtype).real.dtype
    given = (*(dtype,) * ufunc.nin, None)
    try:
        dtypes, capsule = ufunc._resolve_dtypes_and_context(given)  # type: ignore[attr-defined]
        if dtypes != (*given[:-1], result):
            return None
        ufunc._get_strided_loop(capsule)  # type: ignore[attr-defined]
    except (TypeError, AttributeError):  # no such loop; no such door in this NumPy
        return None
    address = _capsule_pointer(capsule, b"numpy_1.24_ufunc_call_info")
    info = _CallInfo.from_address(address)
    if info.requires_pyapi:
        return None
    _capsules.append(capsule)
    found = info.strided_loop or 0, info.context or 0, info.auxdata or 0
    origin = "loop", op, dtype.name
    return Loop(*(Address(a, *origin, f) for a, f in zip(found, Loop._fields, strict=True)))
