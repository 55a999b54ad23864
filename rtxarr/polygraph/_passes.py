"""Rewrites of graphs that keep every bit of the result.

A rule is a function from a node to a simpler one that gives the same bits, or to None; it is
registered for the operations it looks at. :func:`simplify` rebuilds a graph from its inputs on and
applies the rules to each node until none does; nodes exist once, so common subexpressions are found
and dead code is left behind without a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node

Rule = Callable[[Node], Node | None]

_rules: dict[str, list[Rule]] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule for nodes of these operations."""

    def register(function: Rule) -> Rule:
        for op in ops:
            _rules.setdefault(op, []).append(function)
        return function

    return register


def simplify(graph: Graph) -> Graph:
    """Return the graph after all rules; its inputs are the same."""
    return graph.rewritten(
        lambda node, new: _settled(node if (*new,) == node.src else rebuilt(node, new))
    )


def sums_in_parts(graph: Graph) -> Graph:
    """Return the graph with sums over axes that others stand between in NumPy's order.

    It adds up the last axes by themselves, and these sums one after the other.
    """

    def parts(node: Node, sources: list[Node]) -> Node:
        node = node if (*sources,) == node.src else rebuilt(node, sources)
        if node.op != "sum" or node.dtype.kind not in "fc":
            return node
        (x,), (axes,) = node.src, node.attrs
        kept = [i for i, n in enumerate(x.shape) if n > 1 and i not in axes]
        last = [i for i in axes if i > max(kept, default=-1)]
        first = axes[: len(axes) - len(last)]
        if all(x.shape[i] == 1 for i in last) or all(x.shape[i] == 1 for i in first):
            return node
        return ir.reduce_node("sum", ir.reduce_node("sum", x, last), first)

    return graph.rewritten(parts)


def rebuilt(node: Node, sources: list[Node]) -> Node:
    """Return a node on other sources, by the function that makes views canonical."""
    if node.op == "reshape":
        return ir.reshape(sources[0], node.shape)
    if node.op == "broadcast":
        return ir.broadcast(sources[0], node.shape)
    if node.op == "permute":
        return ir.permute(sources[0], node.attrs[0])
    return ir.make(node.op, sources, node.attrs, node.dtype, node.shape)


def _settled(node: Node) -> Node:
    while True:
        for apply in _rules.get(node.op, ()):
            simpler = apply(node)
            if simpler is not None:
                node = simpler
                break
        else:
            return node


def value_of(node: Node) -> Any:
    """Return the number that all elements of a node are, or None if that is not known."""
    while node.op in ("broadcast", "reshape"):
        (node,) = node.src
    return node.attrs[0] if node.op == "constant" else None


def filled(value: Any, dtype: Any, shape: tuple[int, ...]) -> Node:
    """Return a constant of this dtype and shape."""
    return ir.broadcast(ir.constant(value, dtype), shape)


# What depends on a machine's functions, or on what it does with a division by zero; the others
# give the same everywhere.
_ROUNDED = """
    exp expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf
    rsqrt sigmoid pow atan2 hypot logaddexp divide floor_divide remainder
"""
_EXACT = {*ir.MAPS, "cast"}.difference(_ROUNDED.split())


@rule(*sorted(_EXACT))
def of_constants(node: Node) -> Node | None:
    """Compute what is known."""
    values = [value_of(s) for s in node.src]
    if any(v is None for v in values) or dtypes.is_complex(node.dtype):
        return None
    small = ir.make(
        node.op,
        [ir.constant(v, s.dtype) for v, s in zip(values, node.src, strict=True)],
        node.attrs,
        node.dtype,
        (),
    )
    arrays = [np.asarray(v) for v in values]
    return filled(_interpret.evaluate(small, arrays, np)[()], node.dtype, node.shape)


@rule(*ir.MAPS, "cast")
def before_broadcast(node: Node) -> Node | None:
    """Compute on the small array, then broadcast."""
    inner = [s.src[0] if s.op == "broadcast" else s for s in node.src]
    shapes = {x.shape for x, s in zip(inner, node.src, strict=True) if value_of(s) is None}
    if len(shapes) != 1 or node.ndim == 0:
        return None
    (shape,) = shapes
    if shape == node.shape:
        return None
    sources = [
        x if value_of(s) is None else filled(value_of(s), s.dtype, shape)
        for x, s in zip(inner, node.src, strict=True)
    ]
    small = _settled(ir.make(node.op, sources, node.attrs, node.dtype, shape))
    return ir.broadcast(small, node.shape)


# For each operation the numbers that leave the other operand as it is: (first, second). In floats
# adding 0 turns -0 into 0, adding -0 changes nothing.
_NEUTRAL: dict[str, tuple[Any, Any]] = {
    "multiply": (1, 1),
    "divide": (None, 1),
    "subtract": (None, 0),
    "add": (-0.0, -0.0),
    "bitwise_or": (0, 0),
    "bitwise_xor": (0, 0),
    "bitwise_left_shift": (None, 0),
    "bitwise_right_shift": (None, 0),
}


@rule(*_NEUTRAL)
def neutral(node: Node) -> Node | None:
    """Drop an operation with a number that changes nothing."""
    for i, unit in enumerate(_NEUTRAL[node.op]):
        value = value_of(node.src[i])
        if unit is None or value is None or dtypes.is_complex(node.dtype):
            continue
        if value != unit:
            continue
        exact = not dtypes.is_floating(node.dtype)
        same_zero = exact or unit == 1 or bool(np.signbit(value)) == bool(np.signbit(unit))
        if same_zero and node.src[1 - i].dtype == node.dtype:
            return node.src[1 - i]
    return None


@rule("positive")
def plus(node: Node) -> Node | None:
    return node.src[0]


@rule("negative", "logical_not", "bitwise_invert", "conj")
def twice(node: Node) -> Node | None:
    """Drop an operation and its inverse."""
    (x,) = node.src
    if x.op != node.op or x.src[0].dtype != node.dtype:
        return None
    return x.src[0]


@rule("abs", "floor", "ceil", "trunc", "round", "sign")
def once(node: Node) -> Node | None:
    """Do only once what makes no difference a second time."""
    (x,) = node.src
    return x if x.op == node.op and x.dtype == node.dtype else None


@rule("where")
def chosen(node: Node) -> Node | None:
    """Take the branch that is known."""
    test, then, otherwise = node.src
    if then is otherwise:
        return then
    value = value_of(test)
    return None if value is None else then if value else otherwise


@rule("cast")
def there_and_back(node: Node) -> Node | None:
    """Drop a cast to a dtype that holds all of the first one's values, and back.

    Casts of half precision stay: where it is computed in float32 it is they that round.
    """
    (x,) = node.src
    if dtypes.is_half(node.dtype) or x.op != "cast" or x.src[0].dtype != node.dtype:
        return None
    return x.src[0] if dtypes.can_cast(node.dtype, x.dtype) else None


@rule("permute", "slice")
def view_of_number(node: Node) -> Node | None:
    value = value_of(node.src[0])
    return None if value is None else filled(value, node.dtype, node.shape)


@rule("slice")
def slice_of_slice(node: Node) -> Node | None:
    (x,) = node.src
    if x.op != "slice":
        return None
    starts, steps = node.attrs
    inner_starts, inner_steps = x.attrs
    at = [a + s * i for a, s, i in zip(inner_starts, inner_steps, starts, strict=True)]
    by = [a * b for a, b in zip(inner_steps, steps, strict=True)]
    return ir.slice_node(x.src[0], at, by, node.shape)


# A kernel that joins more arrays than this would ask of each element in which of them it lies.
_MOST_JOINED = 32


@rule("concat")
def joined_by_parts(node: Node) -> Node | None:
    """Join many arrays by joining a few at a time."""
    (axis,) = node.attrs
    parts = node.src
    if len(parts) <= _MOST_JOINED:
        return None
    each = _MOST_JOINED
    while each * _MOST_JOINED < len(parts):
        each *= _MOST_JOINED
    starts = range(0, len(parts), each)
    return ir.concat([_settled(ir.concat(parts[k : k + each], axis)) for k in starts], axis)


@rule(*sorted(ir.SCANS))
def scan_of_one(node: Node) -> Node | None:
    """Scan nothing where the axis has one element."""
    return node.src[0] if node.shape[node.attrs[0]] == 1 else None


@rule("sum", "prod", "max", "min", "any", "all")
def of_one(node: Node) -> Node | None:
    """Reduce nothing where the axes have one element."""
    (x,) = node.src
    (axes,) = node.attrs
    if any(x.shape[a] != 1 for a in axes):
        return None
    one = ir.reshape(x, node.shape)
    if node.op == "sum" and x.dtype.kind not in "biu":  # -0.0 adds up to 0.0
        one = ir.map_node("add", one, filled(0, x.dtype, node.shape))
    return one


@rule("max", "min", "any", "all")
def of_copies(node: Node) -> Node | None:
    """Take one of equal elements."""
    (x,) = node.src
    (axes,) = node.attrs
    if x.op != "broadcast" or x.size == 0:
        return None
    inner = x.src[0]
    if any(inner.shape[a] != 1 for a in axes):
        return None
    kept = [n for i, n in enumerate(inner.shape) if i not in axes]
    return ir.broadcast(ir.reshape(inner, kept), node.shape)
