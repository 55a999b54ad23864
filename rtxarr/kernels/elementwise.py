"""Elementwise functions of large arrays at the memory bandwidth.

CuPy's kernels give each thread one element, which takes 40 % of the bandwidth for float32 and 20 %
for the half types; here a thread takes 16 bytes. Small arrays are better left to CuPy: its calls
cost the host less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import is_array, runs_kernels
from rtxarr.dtypes import is_half
from rtxarr.kernels._dense import map_dense

__all__ = ["BINARY", "UNARY", "apply", "convert", "fits", "fits_conversion"]

UNARY = ("abs", "exp", "log", "negative", "sqrt", "square", "tanh")
BINARY = ("add", "divide", "maximum", "minimum", "multiply", "subtract")


def _takes(dtype):
    return is_half(dtype) or dtype == np.float32


def fits(x: Any, y: Any = None) -> bool:
    """Tell whether the kernels take these operands.

    Arrays of one shape and of one dtype: float32, float16 or bfloat16. One of two may be a Python
    number.
    """
    operands = [x] if y is None else [x, y]
    arrays = [a for a in operands if is_array(a)]
    if not arrays or not all(is_array(a) or type(a) in (int, float) for a in operands):
        return False
    first = arrays[0]
    return (
        runs_kernels(first)
        and _takes(first.dtype)
        and first.size > 0
        and all(a.dtype == first.dtype and a.shape == first.shape for a in arrays)
    )


def apply(name: str, x: Any, y: Any = None) -> Any:
    """Give the function of each element.

    Parameters
    ----------
    name : str
        One of ``UNARY``, or of ``BINARY`` with ``y``.
    x, y : array or number
        Operands that :func:`fits`.

    Returns
    -------
    array of their dtype
        Half precision is computed in float32 and rounded once. NaN goes through all of them.
    """
    from rtxarr.kernels._elementwise_cuda import binary, unary

    if y is None:
        return map_dense(lambda wide: unary(name, x.dtype, wide), (x,))
    if not is_array(y):
        return map_dense(lambda wide: binary(name, x.dtype, wide, "second"), (x,), (np.float32(y),))
    if not is_array(x):
        return map_dense(lambda wide: binary(name, y.dtype, wide, "first"), (y,), (np.float32(x),))
    return map_dense(lambda wide: binary(name, x.dtype, wide, None), (x, y))


def fits_conversion(x: Any, dtype: Any) -> bool:
    """Tell whether :func:`convert` takes ``x`` to ``dtype``: float32 to a half type, or back."""
    return fits(x) and _takes(dtype) and (x.dtype == np.float32) != (dtype == np.float32)


def convert(x: Any, dtype: Any) -> Any:
    """Give ``x`` in another dtype, rounded to nearest.

    Parameters
    ----------
    x : array
    dtype : dtype
        One that :func:`fits_conversion`.
    """
    from rtxarr.kernels._elementwise_cuda import conversion

    dtype = np.dtype(dtype)
    return map_dense(lambda wide: conversion(x.dtype, dtype, wide), (x,), dtype=dtype)
