"""Convolutions through cuDNN, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rtxarr.dtypes import is_half
from rtxarr.libs import _conv_plans, _dnn, blas
from rtxarr.libs._conv_plans import Convolution
from rtxarr.libs._dnn import MAX_SIZE
from rtxarr.libs._layout import Unsupported

__all__ = ["try_convolution", "try_convolution_input", "try_convolution_weight"]

_F32 = np.dtype("float32")


def try_convolution(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    windows: Any,
    groups: int,
    residual: Any = None,
    activation: str | None = None,
) -> Any:
    """Return ``activation(x * weight + bias + residual)``; None if not by cuDNN.

    Rounded once, or where cuDNN has no plan for all of it, after the convolution too.

    Parameters
    ----------
    x : CuPy array, shape (batch, in_channels, *spatial)
    weight : CuPy array, shape (out_channels, in_channels / groups, *kernel)
    bias : CuPy array, shape (out_channels,), optional
    windows : Windows
        Stride, padding and dilation.
    groups : int
    residual : CuPy array, the shape of the result, optional
    activation : {"relu", "silu"}, optional

    Returns
    -------
    CuPy array, shape (batch, out_channels, *counts)
        With channels last in memory if they are in ``x``.
    """
    if activation not in (None, "relu", "silu"):
        raise ValueError(f"activation must be 'relu', 'silu' or None, got {activation!r}")
    shape = (x.shape[0], weight.shape[0], *windows.counts(x.shape[2:]))
    return _convolve("y", shape, x, weight, None, windows, bias, residual, activation)


def try_convolution_input(
    y: Any, weight: Any, *, windows: Any, groups: int, spatial: tuple[int, ...]
) -> Any:
    """Return the gradient of a convolution by its input; None if not by cuDNN.

    Parameters
    ----------
    y : CuPy array, shape (batch, out_channels, *counts)
    weight : CuPy array, shape (out_channels, in_channels / groups, *kernel)
    windows : Windows
    groups : int
    spatial : tuple of int

    Returns
    -------
    CuPy array, shape (batch, in_channels, *spatial)
        With channels last in memory if they are in ``y``.
    """
    shape = (y.shape[0], weight.shape[1] * groups, *spatial)
    return _convolve("x", shape, None, weight, y, windows)


def try_convolution_weight(
    x: Any, y: Any, *, windows: Any, groups: int, channels_last: bool | None = None
) -> Any:
    """Return the gradient of a convolution by its weight; None if not by cuDNN.

    Parameters
    ----------
    x : CuPy array, shape (batch, in_channels, *spatial)
    y : CuPy array, shape (batch, out_channels, *counts)
    windows : Windows
    groups : int
    channels_last : bool, optional
        Whether channels are to be last in the memory of the result; as in ``x`` when left out.

    Returns
    -------
    CuPy array, shape (out_channels, in_channels / groups, *kernel)
    """
    if groups > 1 and x.shape[0] == 1:
        _dnn.refuse(Unsupported("the gradient of one sample by the weights of groups"))
        return None
    shape = (y.shape[1], x.shape[1] // groups, *windows.kernel)
    out = _convolve("weight", shape, x, None, y, windows)
    if out is None or channels_last is None:
        return out
    return _conv_plans.lay_out(out, channels_last)


def _convolve(result, shape, x, weight, y, windows, bias=None, residual=None, activation=None):
    given = [a for a in (x, weight, y) if a is not None]
    dtype = given[0].dtype
    try:
        if dtype != _F32 and not is_half(dtype):
            raise Unsupported(f"convolutions in {dtype}")
        others = [a for a in (*given, bias, residual) if a is not None and a.dtype != dtype]
        if others:
            raise Unsupported(f"convolutions in {dtype} and {others[0].dtype}")
        library = _dnn.library()
        if library is None:
            return None
        _dnn.check(library, *given, bias, residual)
        if not 0 < math.prod(shape) < MAX_SIZE:
            raise Unsupported("" if 0 in shape else f"arrays of {MAX_SIZE} elements or more")
        operands = (library, result, shape, x, weight, y, windows)
        added = (bias, residual, activation)
        try:
            return _run_convolution(*operands, *added)
        except Unsupported as error:
            if all(x is None for x in added):
                raise
            reason = str(error)
            out = _run_convolution(*operands, None, None, None)
        names = ("bias", "residual", "activation")
        found = [name for name, x in zip(names, added, strict=True) if x is not None]
        what = f"{' and '.join(found)} after a convolution in {dtype}"
        _dnn.refuse(Unsupported(f"{what}: {reason}" if reason else what))
        return _finished(library.cupy, out, *added)
    except Unsupported as reason:
        _dnn.refuse(reason)
        return None


def _finished(cupy, out, bias, residual, activation):
    """Add to a convolution in place what it was not fused with, in float32."""
    wide = out.astype(_F32, copy=False)
    if bias is not None:
        wide += bias.astype(_F32, copy=False).reshape(-1, *(1,) * (out.ndim - 2))
    if residual is not None:
        wide += residual.astype(_F32, copy=False)
    if activation == "relu":
        cupy.maximum(wide, 0, out=wide)
    elif activation == "silu":
        wide /= 1 + cupy.exp(-wide)
    if wide is not out:
        out[...] = wide
    return out


def _run_convolution(library, result, shape, x, weight, y, windows, bias, residual, activation):
    cupy = library.cupy
    given = {name: a for name, a in (("x", x), ("weight", weight), ("y", y)) if a is not None}
    dtype = next(iter(given.values())).dtype
    # What is not a weight decides; where both orders are one, the weight.
    orders = [_conv_plans.channels_last(a) for a in (x, y, weight) if a is not None]
    last = next((order for order in orders if order is not None), is_half(dtype))
    given = {name: _conv_plans.lay_out(a, last) for name, a in given.items()}
    padding = tuple(map(min, windows.padding))
    uneven = None
    if any(before != after for before, after in windows.padding):
        uneven = tuple(
            (before - n, after - n)
            for n, (before, after) in zip(padding, windows.padding, strict=True)
        )
        if x is None:
            spatial = tuple(n + sum(pair) for n, pair in zip(shape[2:], uneven, strict=True))
            shape = (*shape[:2], *spatial)
        else:
            given["x"] = _conv_plans.pad(cupy, given["x"], uneven, last)
    out = _conv_plans.make(cupy, shape, dtype, last)
    specs = {name: _conv_plans.spec(a.shape, dtype, last) for name, a in given.items()}
    specs[result] = _conv_plans.spec(shape, dtype, last)
    pointers = [a.data.ptr for a in given.values()]
    bias_spec = residual_spec = None
    if bias is not None:
        bias_spec = _conv_plans.spec((1, bias.size, *(1,) * (out.ndim - 2)), dtype, True)
        bias = bias if bias.flags.c_contiguous and bias.data.ptr % 16 == 0 else bias.copy()
        pointers.append(bias.data.ptr)
    if residual is not None:
        residual = _conv_plans.lay_out(residual, last)
        residual_spec = specs[result]
        pointers.append(residual.data.ptr)
    flat = out.ndim == 3  # a spatial axis of length 1 comes before the only one
    problem = Convolution(
        result,
        **specs,
        bias=bias_spec,
        residual=residual_spec,
        activation=activation,
        stride=(1, *windows.stride) if flat else windows.stride,
        padding=(0, *padding) if flat else padding,
        dilation=(1, *windows.dilation) if flat else windows.dilation,
        strict=dtype == _F32 and not blas._tf32[0],
    )
    library.run(problem, (*pointers, out.data.ptr))
    if uneven is not None and result == "x":
        out = _conv_plans.lay_out(out[_conv_plans.inner(shape[2:], uneven)], last)
    return out
