"""Functions of numbers inside kernels: exact ones, and the hardware's quick ones for half types.

A quick function's error of a few units of float32 is far below the rounding to a half type. Only
kernel files import this module: it imports numba.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.dtypes import is_half
from rtxarr.kernels._vector import access


class Arithmetic(NamedTuple):
    """Device functions of float32 or float64 numbers for arrays of one element type.

    Attributes
    ----------
    larger : device function
        ``larger(a, b)``: of a NaN and a number, the number.
    quotient : device function
        ``quotient(a, b)``.
    exp : device function
        ``exp(x)``.
    base : number
        What shifts are multiplied by, once, for the next.
    power : device function
        ``power(x, base * shift)`` is ``exp(x - shift)``; for the half types its relative error
        grows with the shift, alike for all ``x``.
    """

    larger: Any
    quotient: Any
    exp: Any
    base: Any
    power: Any


@functools.cache
def arithmetic(dtype: np.dtype) -> Arithmetic:
    """Return the functions for one element type."""
    scalar: Any = access(dtype, wide=False).scalar
    quick = is_half(dtype) and not _SIMULATING
    base = scalar(math.log2(math.e) if quick else 1)

    @cuda.jit(device=True)
    def divide(a, b):
        return a / b

    @cuda.jit(device=True)
    def power(x, shift):
        return math.exp(x - shift)

    if _SIMULATING:
        return Arithmetic(max, divide, math.exp, base, power)
    if not quick:
        larger = cuda.libdevice.fmaxf if scalar is np.float32 else cuda.libdevice.fmax
        return Arithmetic(larger, divide, math.exp, base, power)
    from rtxarr.kernels._vector import two_to

    @cuda.jit(device=True)
    def quick_power(x, shift):
        return two_to(x * base - shift)

    device = cuda.libdevice
    return Arithmetic(device.fmaxf, device.fast_fdividef, device.fast_expf, base, quick_power)
