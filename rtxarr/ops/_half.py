"""Computing in float32 on half-precision arrays, rounding once at the end."""

import functools

from rtxarr._device import namespace
from rtxarr.dtypes import is_floating, is_half, result_type
from rtxarr.ops._elementwise import astype


def widen(x):
    """Give a half-precision array or Tensor as float32, and anything else unchanged."""
    return astype(x, "float32") if is_half(getattr(x, "dtype", None)) else x


def rounded_once(function):
    """Let a function over raw arrays compute in float32 where they are half-precision ones.

    The result has the arguments' common dtype.
    """

    @functools.wraps(function)
    def wrapper(*args, **options):
        if not any(is_half(getattr(a, "dtype", None)) for a in args):
            return function(*args, **options)
        floats = [a for a in args if is_floating(getattr(a, "dtype", "int64"))]
        out = function(*map(widen, args), **options)
        return namespace(out).astype(out, result_type(*(a.dtype for a in floats)), copy=False)

    return wrapper
