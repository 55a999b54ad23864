"""numba's CPU code of the random numbers: for large draws; compiled code is kept on disk."""

from __future__ import annotations

import math

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._philox_core import Arithmetic, build, kinds, product

_compiled = njit(cache=True, error_model="numpy")
_part = njit(error_model="numpy")  # of compiled code, which keeps it


@_part
def _mul(a, b):
    return a * b


@_part
def _add(a, b):
    return a + b


@_part
def _div(a, b):
    return a / b


@_part
def _sqrt(a):
    return math.sqrt(a)


@_part
def _frexp(a):
    return math.frexp(a)


@_part
def _select(condition, x, y):
    return x if condition else y


# Without fastmath numba's CPU code never contracts, so plain operators round as written.
_ARITHMETIC = Arithmetic(_mul, _add, _div, _sqrt, _frexp, _select, _mul, _add, _part(product))
_core = build(_part, _ARITHMETIC)
_kinds = kinds(_part, _ARITHMETIC, _core)


def _loop(kind):
    """Return ``fill(first_block, out, stream, key, p0, ..., p5)``, for whole blocks."""
    value = _kinds[kind]
    philox = _core.philox

    def words32(first, out, stream, key, p0, p1, p2, p3, p4, p5):
        """Fill whole blocks; ``out`` holds four values of each."""
        for b in range(out.size // 4):
            w0, w1, w2, w3 = philox(first + np.uint64(b), stream, key)
            out[4 * b] = value(w0, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 1] = value(w1, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 2] = value(w2, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 3] = value(w3, stream, key, p0, p1, p2, p3, p4, p5)

    def words64(first, out, stream, key, p0, p1, p2, p3, p4, p5):
        """Fill whole blocks; ``out`` holds two values of each."""
        for b in range(out.size // 2):
            w0, w1, w2, w3 = philox(first + np.uint64(b), stream, key)
            low, high = w0 | (w1 << np.uint64(32)), w2 | (w3 << np.uint64(32))
            out[2 * b] = value(low, stream, key, p0, p1, p2, p3, p4, p5)
            out[2 * b + 1] = value(high, stream, key, p0, p1, p2, p3, p4, p5)

    function = words64 if kind.endswith("64") else words32
    # Code that numba kept calls functions by names: those of each kind need one of their own.
    function.__qualname__ = f"{kind}.{function.__qualname__}"
    return _part(function)


_word32, _below32 = _loop("word32"), _loop("below32")
_uniform32, _uniform64 = _loop("uniform32"), _loop("uniform64")
_normal32, _normal64 = _loop("normal32"), _loop("normal64")
_exponential32, _exponential64 = _loop("exponential32"), _loop("exponential64")
_signed64, _unsigned64 = _loop("signed64"), _loop("unsigned64")

# Numba finds the compiled code of a module's functions again, but not of such as others made, so
# there is one for each kind. It does not see a change of ``_philox_core``: touch this file too.


@_compiled
def word32(*arguments):
    _word32(*arguments)


@_compiled
def below32(*arguments):
    _below32(*arguments)


@_compiled
def uniform32(*arguments):
    _uniform32(*arguments)


@_compiled
def uniform64(*arguments):
    _uniform64(*arguments)


@_compiled
def normal32(*arguments):
    _normal32(*arguments)


@_compiled
def normal64(*arguments):
    _normal64(*arguments)


@_compiled
def exponential32(*arguments):
    _exponential32(*arguments)


@_compiled
def exponential64(*arguments):
    _exponential64(*arguments)


@_compiled
def signed64(*arguments):
    _signed64(*arguments)


@_compiled
def unsigned64(*arguments):
    _unsigned64(*arguments)
