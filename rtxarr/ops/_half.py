"""Computing in float32 on half-precision arrays, rounding once at the end."""

import functools

from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor
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
    if isinstance(x, Tensor) and active_dtype() is not None:
        return x  # autocast stays in float32
    # Complex results of a real matrix stay complex64: there is no narrower type.
    return astype(x, dtype, copy=False) if is_floating(x.dtype) else x


@differentiable
def _lowered(x, /):
    return x


_lowered.defvjps(x=lambda g: g)
lowered_op = _lowered.op


def lowered(*arrays):
    """Give tensors in the dtype of ``autocast`` where it is on, and anything else unchanged.

    For functions that do something else with their arguments before they multiply them.
    """
    return arrays if active_dtype() is None else tuple(map(_lowered, arrays))
