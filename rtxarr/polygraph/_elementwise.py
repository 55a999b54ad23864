"""Elementwise functions on tracers: NumPy's promotion, written out as casts and broadcasts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr._device import is_array
from rtxarr.polygraph import _ir
from rtxarr.polygraph._calls import library
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import Tracer, concretization, current

BOOL = np.dtype(bool)

# NumPy's names of ufuncs that the standard calls otherwise.
STANDARD_NAMES = {theirs: ours for ours, theirs in _ir.UFUNC_NAMES.items()}
_OF_BOOLS = {
    "add": "logical_or",
    "multiply": "logical_and",
    "maximum": "logical_or",
    "minimum": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "not_equal": "logical_xor",
    "bitwise_invert": "logical_not",
}
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_FLIPPED = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}

_WEAK = (int, float, complex)  # no bool: NumPy's rules take it for an array of bool


def tensor_of(x: Any) -> Any:
    """Return a tracer for anything array-like; numbers stay what they are."""
    if isinstance(x, (Tracer, Scalar, bool, int, float, complex)) and not isinstance(x, np.generic):
        return x
    if isinstance(x, np.generic):
        return current().fresh(_ir.constant(x, x.dtype))
    if is_array(x):
        if isinstance(x, np.ndarray) and x.ndim == 0 and not current().on_numpy:
            return current().fresh(_ir.constant(x[()], x.dtype))
        return current().capture(x)
    if isinstance(x, (list, tuple)):
        return as_array(x)
    raise TypeError(f"expected an array or a number, got {type(x).__name__}")


def as_array(x: Any, dtype: Any = None) -> Tracer:
    """Return a tracer for anything that NumPy makes an array of, as ``asarray`` does."""
    if isinstance(x, Tracer):
        return x if dtype is None else cast(x, dtype)
    if isinstance(x, Scalar):
        if dtype is None and type(x.value) is int:  # which of NumPy's types holds it
            limits = "-9223372036854775808", "9223372036854775807"
            held = -(2**63) <= x.value < 2**63
            current().guards.append((f"({limits[0]} <= {x.expression} <= {limits[1]})", held))
        dtype = _default(x) if dtype is None else np.dtype(dtype)
        return current().fresh_array(operand(x, dtype))
    if isinstance(x, (list, tuple)):
        if any(isinstance(part, (Tracer, Scalar, list, tuple)) for part in _leaves(x)):
            from rtxarr.polygraph import _namespace

            return _namespace.stack([as_array(part, dtype) for part in x], axis=0)
        x = np.asarray(x, dtype=dtype)
        return from_numpy(x)
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
        return from_numpy(np.asarray(x, dtype=dtype))
    found = tensor_of(x)
    return found if dtype is None else cast(found, dtype)


def from_numpy(x: np.ndarray) -> Tracer:
    """Return a tracer for a constant that the function made on the host."""
    if x.ndim == 0:
        return current().fresh_array(_ir.constant(x[()], x.dtype))
    if x.size and (x == x.flat[0]).all():
        node = _ir.broadcast(_ir.constant(x.flat[0], x.dtype), x.shape)
        return current().fresh(node)
    trace = current()
    return trace.capture(x if trace.on_numpy else trace.xp.asarray(x))


def _leaves(x):
    for part in x:
        if isinstance(part, (list, tuple)):
            yield from _leaves(part)
        else:
            yield part


def _default(x: Any) -> np.dtype:
    value = x.value if isinstance(x, Scalar) else x
    return np.asarray(value).dtype


def kind_of(x: Any) -> Any:
    """Return the dtype of an array, or the type of a number, which is weak."""
    if isinstance(x, Tracer):
        return x.dtype
    value = x.value if isinstance(x, Scalar) else x
    return BOOL if isinstance(value, bool) else type(value)


def operand(x: Any, dtype: np.dtype) -> _ir.Node:
    """Return the node of an array or a number, in ``dtype``."""
    if isinstance(x, Tracer):
        return _ir.cast(x.node, dtype)
    if isinstance(x, Scalar):
        dtype.type(x.value)  # raises where NumPy does
        return current().scalar(x.expression, dtype)
    return _ir.constant(x, dtype)


def cast(x: Tracer, dtype: Any) -> Tracer:
    """Return ``x`` in another dtype; ``x`` itself if it is in that."""
    dtype = np.dtype(dtype)
    if dtype.kind in "OSUMm":
        raise concretization(f"an array of dtype {dtype}")
    if x.dtype == dtype:
        return x
    return current().fresh_array(cast_node(x.node, dtype), layout_of(x), like=x)


def cast_node(node: _ir.Node, dtype: np.dtype) -> _ir.Node:
    """Return a cast; to bool it is a test for what is not zero."""
    if dtype == BOOL and node.dtype != BOOL:
        zero = _ir.broadcast(_ir.constant(0, node.dtype), node.shape)
        return _ir.map_node("not_equal", node, zero)
    return _ir.cast(node, dtype)


@functools.cache
def loop_of(ufunc: np.ufunc, kinds: tuple) -> tuple:
    """Return the dtypes that a ufunc computes with, for dtypes and types of weak numbers."""
    return ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))


def layout_of(*arrays: Any) -> Any:
    """Return ``"C"`` if NumPy surely gives a C-contiguous result, None if that is not known."""
    shapes = {a.shape for a in arrays if isinstance(a, Tracer) and a.ndim}
    if len(shapes) > 1:
        widest = np.broadcast_shapes(*shapes)
        arrays = tuple(a for a in arrays if isinstance(a, Tracer) and a.shape == widest)
        if not arrays:
            return None
    for a in arrays:
        if not isinstance(a, Tracer) or a.ndim == 0:
            continue
        if not a._steps:
            if a._cell.strides != "C":
                return None
        elif a._cell.strides is None or not a.look.flags.c_contiguous:
            return None
    return "C"


def layout_from(shape: tuple[int, ...], *arrays: Tracer) -> Any:
    """Return the same for a result of this shape that is made of the arrays in another way."""
    if sum(n != 1 for n in shape) < 2 or all(layout_of(a) == "C" for a in arrays):
        return "C"
    return None


def elementwise(ufunc: np.ufunc, *args: Any) -> Tracer:
    """Return what a ufunc of one result gives, as NumPy promotes and broadcasts."""
    args = tuple(tensor_of(a) for a in args)
    name = STANDARD_NAMES.get(ufunc.__name__, ufunc.__name__)
    if name == "pow":
        args = _power_arguments(args)
    shape = np.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tracer)))
    if name in _COMPARISONS:
        known = _out_of_range(name, args, shape)
        if known is not None:
            return known
    kinds = tuple(kind_of(a) for a in args)
    *loop, result = loop_of(ufunc, kinds)
    if name in _COMPARISONS and loop[0] != loop[1]:
        nodes = [_ir.broadcast(a.node, shape) for a in args]
        return current().fresh(_mixed_comparison(name, *nodes), layout_of(*args))
    nodes = [_ir.broadcast(_operand(a, dtype), shape) for a, dtype in zip(args, loop, strict=True)]
    return current().fresh(_node(name, ufunc, nodes, result, shape), layout_of(*args))


def _operand(x: Any, dtype: np.dtype) -> _ir.Node:
    if isinstance(x, Tracer):
        return cast_node(x.node, dtype)
    return operand(x, dtype)


def _node(name, ufunc, nodes, result, shape):
    """Return the node of an operation on sources of the loop's dtypes."""
    if name in _LOGICAL:
        nodes = [cast_node(n, BOOL) for n in nodes]
    kind = nodes[0].dtype.kind
    if kind == "b":
        if name == "abs":
            return nodes[0]
        name = _OF_BOOLS.get(name, name)
    if kind in "iub" and name in ("isnan", "isinf", "isfinite"):
        return _ir.broadcast(_ir.constant(name == "isfinite", BOOL), shape)
    if kind in "iub" and name in ("floor", "ceil", "trunc", "positive", "conj"):
        return nodes[0]
    if kind != "c" and name in ("conj", "positive"):
        return nodes[0]
    if name in _ir.MAPS and name != "where":
        node = _ir.map_node(name, *nodes)
        return node if node.dtype == result else _ir.cast(node, result)
    if ufunc.signature is not None or ufunc.nout != 1:
        raise concretization(f"np.{ufunc.__name__}")
    return _ir.call(library, nodes, (("name", ufunc.__name__),), ((result, shape),))[0]


def _power_arguments(args: tuple) -> tuple:
    """Fix an exponent that is a scalar: NumPy refuses negative ones of integers."""
    base, exponent = args
    if isinstance(exponent, Scalar):
        exponent = exponent.known()
    if isinstance(exponent, int) and exponent < 0 and not isinstance(exponent, bool):
        kind = base.dtype.kind if isinstance(base, Tracer) else "f"
        if kind in "iub":
            raise ValueError("Integers to negative integer powers are not allowed.")
    return base, exponent


def power(base: Any, exponent: Any) -> Tracer:
    """Return ``base ** exponent``, by the shortcuts that NumPy takes for some exponents."""
    base, exponent = _power_arguments((tensor_of(base), tensor_of(exponent)))
    if isinstance(base, Tracer) and type(exponent) in (int, float) and base.dtype.kind in "fc":
        shortcut = _SHORTCUTS.get(exponent)
        if shortcut is not None and (base.dtype.kind == "f" or exponent == 2):
            if shortcut == "one":
                one = _ir.broadcast(_ir.constant(1, base.dtype), base.shape)
                return current().fresh(one)
            return elementwise(getattr(np, shortcut), base)
    elif isinstance(base, Tracer) and type(exponent) is int and exponent == 2:
        return elementwise(np.square, base)
    return elementwise(np.power, base, exponent)


_SHORTCUTS = {1: "positive", -1: "reciprocal", 0.5: "sqrt", 2: "square"}


def _out_of_range(name: str, args: tuple, shape: tuple) -> Tracer | None:
    """Compare integers with a Python int that their dtype cannot hold, as NumPy does."""
    for i, x in enumerate(args):
        value = x.value if isinstance(x, Scalar) else x
        other = args[1 - i]
        if type(value) is not int or not isinstance(other, Tracer) or other.dtype.kind not in "iu":
            continue
        limits = np.iinfo(other.dtype)
        if limits.min <= value <= limits.max:
            continue
        if isinstance(x, Scalar):
            value = x.known()
        above = value > limits.max
        word = name if i == 1 else _FLIPPED.get(name, name)  # array . number
        outcome = {
            "equal": False,
            "not_equal": True,
            "less": above,
            "less_equal": above,
            "greater": not above,
            "greater_equal": not above,
        }[word]
        return current().fresh(_ir.broadcast(_ir.constant(outcome, BOOL), shape))
    return None


def _mixed_comparison(name: str, a: _ir.Node, b: _ir.Node) -> _ir.Node:
    """Compare uint64 with int64, which no integer type holds both of."""
    if a.dtype.kind == "i":
        return _mixed_comparison(_FLIPPED.get(name, name), b, a)
    zero = _ir.broadcast(_ir.constant(0, b.dtype), b.shape)
    inner = _ir.map_node(name, a, _ir.cast(b, a.dtype))
    if name in ("equal", "less", "less_equal"):
        return _ir.map_node("logical_and", _ir.map_node("greater_equal", b, zero), inner)
    return _ir.map_node("logical_or", _ir.map_node("less", b, zero), inner)


def where(condition: Any, x: Any, y: Any) -> Tracer:
    """Return elements of ``x`` where the condition holds and of ``y`` elsewhere."""
    condition, x, y = tensor_of(condition), tensor_of(x), tensor_of(y)
    if not isinstance(condition, Tracer):
        condition = as_array(condition)
    dtype = where_dtype(kind_of(x), kind_of(y))
    shape = np.broadcast_shapes(*(a.shape for a in (condition, x, y) if isinstance(a, Tracer)))
    nodes = [cast_node(condition.node, BOOL), _operand(x, dtype), _operand(y, dtype)]
    node = _ir.map_node("where", *(_ir.broadcast(n, shape) for n in nodes))
    return current().fresh_array(node, layout_of(condition, x, y))


def where_dtype(*kinds: Any) -> np.dtype:
    """Return the dtype of arrays joined: NumPy's rules, and bfloat16's where it is among them."""
    strong = [k for k in kinds if not isinstance(k, type)]
    weak = [k(1) for k in kinds if isinstance(k, type)]
    return dtypes.result_type(*strong, *weak)


def stored(out: Any, value: Any) -> Any:
    """Write a result into an array that was given for it, if any, and return it.

    Raises where NumPy would not cast its kind to that of the array.
    """
    if out is None:
        return value
    out, value = as_array(out), as_array(value)
    if not np.can_cast(value.dtype, out.dtype, "same_kind"):
        raise np._core._exceptions.UFuncTypeError(  # type: ignore[attr-defined]
            f"Cannot cast output from dtype('{value.dtype}') to dtype('{out.dtype}') with casting "
            "rule 'same_kind'"
        )
    if value.shape != out.shape:
        raise ValueError(
            f"non-broadcastable output operand with shape {out.shape} doesn't match the broadcast "
            f"shape {value.shape}"
        )
    out.write(cast_node(value.node, out.dtype))
    return out
