"""Reductions and running sums over tracers: NumPy's dtypes, written out as casts."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr.polygraph import _ir
from rtxarr.polygraph._elementwise import (
    BOOL,
    as_array,
    cast,
    cast_node,
    elementwise,
    layout_from,
)
from rtxarr.polygraph._trace import Tracer, current

_FLOAT32 = np.dtype(np.float32)


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return one axis or several as numbers from 0; None names all."""
    if axis is None:
        return tuple(range(ndim))
    return np.lib.array_utils.normalize_axis_tuple(axis, ndim, argname="axis")


def _result(node: _ir.Node, x: Tracer, axes: tuple, keepdims: bool) -> Tracer:
    if keepdims:
        node = _ir.reshape(node, tuple(1 if i in axes else n for i, n in enumerate(x.shape)))
    return current().fresh(node, layout_from(node.shape, x))


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return what NumPy sums a dtype in."""
    if dtype.kind in "bi" and dtype.itemsize < 8:
        return np.dtype(np.int64)
    if dtype.kind == "u" and dtype.itemsize < 8:
        return np.dtype(np.uint64)
    return dtype


def _total(op: str, x: Any, axis: Any, dtype: Any, keepdims: bool) -> Tracer:
    x = as_array(x)
    axes = axes_of(axis, x.ndim)
    result = _sum_dtype(x.dtype) if dtype is None else np.dtype(dtype)
    node = cast_node(x.node, result)
    if dtypes.is_half(result):
        # What was not wider is not rounded to half precision first.
        node = _ir.reduce_node(op, _ir.cast(x.node, _FLOAT32), axes)
        node = _ir.cast(node, result)
    elif axes:
        node = _ir.reduce_node(op, node, axes)
    elif op == "sum" and result.kind in "fc":  # NumPy begins with 0, which makes 0 of -0
        zero = _ir.broadcast(_ir.constant(0, result), node.shape)
        node = _ir.map_node("add", node, zero)
    return _result(node, x, axes, keepdims)


def sum(x, /, *, axis=None, dtype=None, keepdims=False):
    """Sum over axes; narrow integers widen to 64 bits."""
    return _total("sum", x, axis, dtype, keepdims)


def prod(x, /, *, axis=None, dtype=None, keepdims=False):
    """Multiply over axes; narrow integers widen to 64 bits."""
    return _total("prod", x, axis, dtype, keepdims)


def _extremum(op: str, word: str, x: Any, axis: Any, keepdims: bool) -> Tracer:
    x = as_array(x)
    axes = axes_of(axis, x.ndim)
    if builtins.any(x.shape[a] == 0 for a in axes):
        raise ValueError(f"zero-size array to reduction operation {word} which has no identity")
    node = x.node
    if x.dtype == BOOL:
        op = "any" if op == "max" else "all"
    return _result(_ir.reduce_node(op, node, axes) if axes else node, x, axes, keepdims)


def max(x, /, *, axis=None, keepdims=False):
    """Return the largest element; NaN wins."""
    return _extremum("max", "maximum", x, axis, keepdims)


def min(x, /, *, axis=None, keepdims=False):
    """Return the smallest element; NaN wins."""
    return _extremum("min", "minimum", x, axis, keepdims)


def _logical(op: str, x: Any, axis: Any, keepdims: bool) -> Tracer:
    x = as_array(x)
    axes = axes_of(axis, x.ndim)
    node = cast_node(x.node, BOOL)
    return _result(_ir.reduce_node(op, node, axes) if axes else node, x, axes, keepdims)


def all(x, /, *, axis=None, keepdims=False):
    """Tell whether all elements are true."""
    return _logical("all", x, axis, keepdims)


def any(x, /, *, axis=None, keepdims=False):
    """Tell whether any element is true."""
    return _logical("any", x, axis, keepdims)


def _place(op: str, x: Any, axis: Any, keepdims: bool) -> Tracer:
    x = as_array(x)
    node, place = x.node, axis
    if axis is None:
        node, place = _ir.reshape(node, (x.size,)), 0
    (place,) = axes_of(place, node.ndim)
    if node.shape[place] == 0:
        raise ValueError(f"attempt to get {op} of an empty sequence")
    node = _ir.reduce_node(op, node, (place,))
    axes = axes_of(None, x.ndim) if axis is None else (place,)
    return _result(node, x, axes, keepdims)


def argmax(x, /, *, axis=None, keepdims=False):
    """Return the index of the first largest element, or of the first NaN."""
    return _place("argmax", x, axis, keepdims)


def argmin(x, /, *, axis=None, keepdims=False):
    """Return the index of the first smallest element, or of the first NaN."""
    return _place("argmin", x, axis, keepdims)


def count_nonzero(x, /, *, axis=None, keepdims=False):
    """Count the elements that are not zero."""
    return sum(cast(cast(as_array(x), BOOL), np.int64), axis=axis, keepdims=keepdims)


def _over(x: Tracer, count: float) -> Tracer:
    """Divide by a number of elements as NumPy does: rounded once."""
    wide = {"f": np.float64, "c": np.complex128}[x.dtype.kind]
    if x.dtype.kind == "f" and x.dtype.type(count) == count:
        wide = x.dtype
    number = _ir.broadcast(_ir.constant(count, np.dtype(wide)), x.shape)
    out = _ir.map_node("divide", _ir.cast(x.node, np.dtype(wide)), number)
    return current().fresh(_ir.cast(out, x.dtype), layout_from(x.shape, x))


def _floating(x: Tracer) -> Tracer:
    return cast(x, np.float64) if x.dtype.kind in "iub" else x


def mean(x, /, *, axis=None, dtype=None, keepdims=False):
    """Return the arithmetic mean over axes; of nothing it is NaN."""
    x = as_array(x)
    if dtype is not None:
        x = cast(x, dtype)
    x = _floating(x)
    half = x.dtype if dtypes.is_half(x.dtype) else None
    axes = axes_of(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    total = sum(cast(x, np.float32) if half is not None else x, axis=axes, keepdims=keepdims)
    out = _over(total, count)
    return out if half is None else cast(out, half)


def var(x, /, *, axis=None, correction=0.0, keepdims=False):
    """Return the variance over axes: squared deviations over ``n - correction``."""
    x = _floating(as_array(x))
    half = x.dtype if dtypes.is_half(x.dtype) else None
    wide = cast(x, np.float32) if half is not None else x
    axes = axes_of(axis, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    deviation = elementwise(np.subtract, wide, mean(wide, axis=axes, keepdims=True))
    if x.dtype.kind == "c":
        squares = [elementwise(np.square, deviation.part(name)) for name in ("real", "imag")]
        square = elementwise(np.add, *squares)
    else:
        square = elementwise(np.multiply, deviation, deviation)
    out = _over(sum(square, axis=axes, keepdims=keepdims), builtins.max(count - correction, 0))
    return out if half is None else cast(out, half)


def std(x, /, *, axis=None, correction=0.0, keepdims=False):
    """Return the standard deviation over axes."""
    return elementwise(np.sqrt, var(x, axis=axis, correction=correction, keepdims=keepdims))


def _running(op: str, x: Any, axis: Any, dtype: Any, start: int | None) -> Tracer:
    x = as_array(x)
    if axis is None:
        if x.ndim > 1:
            x = x.reshaped((x.size,))
        axis = 0
    x = x.reshaped((1,)) if x.ndim == 0 else x
    (axis,) = axes_of(axis, x.ndim)
    result = _sum_dtype(x.dtype) if dtype is None else np.dtype(dtype)
    node = _ir.scan_node(op, cast_node(x.node, result), axis)
    if start is not None:
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        first = _ir.broadcast(_ir.constant(start, result), shape)
        node = _ir.concat((first, node), axis)
    return current().fresh(node, layout_from(node.shape, x))


def cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False):
    """Return the running sums along one axis."""
    return _running("cumulative_sum", x, axis, dtype, 0 if include_initial else None)


def running_extremum(op: str, x: Any, axis: Any, dtype: Any = None) -> Tracer:
    """Return the largest ("max") or least ("min") so far along an axis, in the dtype of ``x``."""
    x = as_array(x) if dtype is None else cast(as_array(x), dtype)
    (axis,) = axes_of(axis, x.ndim)
    of_bools = x.dtype == BOOL
    node = _ir.cast(x.node, np.dtype(np.uint8)) if of_bools else x.node
    node = _ir.scan_node(f"cumulative_{op}", node, axis)
    out = current().fresh(node, layout_from(node.shape, x))
    return cast(out, BOOL) if of_bools else out


def cumulative_max(x, /, *, axis):
    """Return the largest element so far along one axis."""
    return running_extremum("max", x, axis)


def cumulative_min(x, /, *, axis):
    """Return the least element so far along one axis."""
    return running_extremum("min", x, axis)


def cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False):
    """Return the running products along one axis."""
    return _running("cumulative_prod", x, axis, dtype, 1 if include_initial else None)
