"""Computing in float32 on half-precision arrays, rounding once at the end."""

import functools

from rtxarr.dtypes import is_floating, is_half, result_type
from rtxarr.ops._elementwise import astype


def widen(x):
    """Give a half-precision array or Tensor as float32, and anything else unchanged."""
    return astype(x, "float32") if is_half(getattr(x, "dtype", None)) else x


def rounded_once(function):
    """Let a function of arrays or tensors compute in float32 where they are half-precision ones.

    Its floating-point result, or those in a named tuple of results, get the arguments' common
    dtype. A ``dtype`` option that is given says itself what to compute in.
    """

    @functools.wraps(function)
    def wrapper(*args, **options):
        for x in args:
            if is_half(getattr(x, "dtype", None)):
                break
        else:
            return function(*args, **options)
        if options.get("dtype") is not None:
            return function(*args, **options)
        out = function(*map(widen, args), **options)
        dtype = result_type(*(x.dtype for x in args if hasattr(x, "dtype")))
        if not is_half(dtype):
            return out
        if isinstance(out, tuple):
            return type(out)(*(_round(part, dtype) for part in out))
        return _round(out, dtype)

    return wrapper


def _round(x, dtype):
    # Complex results of a real matrix stay complex64: there is no narrower type.
    return astype(x, dtype, copy=False) if is_floating(x.dtype) else x
