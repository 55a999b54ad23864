"""numba's CPU code of the random numbers: for large draws; compiled code is kept on disk."""

from __future__ import annotations

import functools
import math

import numpy as np

from rtxarr._device import njit
from rtxarr.kernels._philox_core import Arithmetic, build, kinds

_compiled = njit(cache=True, error_model="numpy")


@_compiled
def _mul(a, b):
    return a * b


@_compiled
def _add(a, b):
    return a + b


@_compiled
def _div(a, b):
    return a / b


@_compiled
def _sqrt(a):
    return math.sqrt(a)


@_compiled
def _frexp(a):
    return math.frexp(a)


@_compiled
def _select(condition, x, y):
    return x if condition else y


# Without fastmath numba's CPU code never contracts, so plain operators round as written.
_ARITHMETIC = Arithmetic(_mul, _add, _div, _sqrt, _frexp, _select, _mul, _add)
_core = build(_compiled, _ARITHMETIC)
_kinds = kinds(_compiled, _ARITHMETIC, _core)


@functools.cache
def loop(kind: str):
    """Return ``fill(first_block, out, stream, key, p0, ..., p5)``, for whole blocks."""
    value = _kinds[kind]
    philox = _core.philox

    @_compiled
    def words32(first, out, stream, key, p0, p1, p2, p3, p4, p5):
        """Fill whole blocks; ``out`` holds four values of each."""
        for b in range(out.size // 4):
            w0, w1, w2, w3 = philox(first + np.uint64(b), stream, key)
            out[4 * b] = value(w0, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 1] = value(w1, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 2] = value(w2, stream, key, p0, p1, p2, p3, p4, p5)
            out[4 * b + 3] = value(w3, stream, key, p0, p1, p2, p3, p4, p5)

    @_compiled
    def words64(first, out, stream, key, p0, p1, p2, p3, p4, p5):
        """Fill whole blocks; ``out`` holds two values of each."""
        for b in range(out.size // 2):
            w0, w1, w2, w3 = philox(first + np.uint64(b), stream, key)
            low, high = w0 | (w1 << np.uint64(32)), w2 | (w3 << np.uint64(32))
            out[2 * b] = value(low, stream, key, p0, p1, p2, p3, p4, p5)
            out[2 * b + 1] = value(high, stream, key, p0, p1, p2, p3, p4, p5)

    return words64 if kind.endswith("64") else words32
