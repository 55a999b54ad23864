"""The intermediate representation: typed nodes, each of which exists once.

A node is an operation on other nodes, with the dtype and shape of its result. Whatever NumPy does
between the lines is written out when a node is made: operands have been promoted (``cast``) and
broadcast (``broadcast``) to one another, so that a pass or a code generator never needs a rule for
it. ``rtxarr.polygraph._interpret`` says by NumPy what each operation gives.

===============  ===================================  =============================================
kind             operations                           attrs
===============  ===================================  =============================================
leaf             input                                (number,): of the graph's inputs
leaf             constant                             (value,): a NumPy scalar; shape ()
leaf             iota                                 (axis,): the index along that axis
map              those of ``MAPS``, cast              (); sources have the shape of the result
reduce           those of ``REDUCES``                 (axes,): removed from the shape
scan             cumulative_sum, _prod, _max, _min    (axis,)
view             reshape, broadcast, permute, slice   (), (), (axes,), (starts, steps)
index            concat, update, gather, take_along,  (axis,), (starts, steps), (axis,), (axis,),
                 scatter_add                          (axis,)
segment          segment_reduce, spread               (op,), ()
scatter          scatter_reduce                       (op,)
product          matmul                               ()
transform        fft, ifft, rfft, irfft               (axes, lengths, norm)
call             call, item                           (function, options), (number,)
control          cond, while_loop, scan, item         graphs, numbers; (number,)
===============  ===================================  =============================================

``spread`` and ``segment_reduce`` take the row pointers of a CSR matrix: ``spread(x, indptr)`` gives
each edge the row of its destination, ``segment_reduce(values, indptr)`` reduces the edges of each.
A sparse product is ``segment_reduce(weights * gather(x, indices), indptr)``. ``scatter_reduce``
takes the row that each value goes to.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np

from rtxarr import dtypes

_UNARY = """
    positive negative abs sign square reciprocal sqrt rsqrt exp expm1 log log1p log2 log10 erf
    sigmoid sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh floor ceil trunc round
    conj bitwise_invert logical_not
"""
_BINARY = """
    add subtract multiply divide floor_divide remainder pow maximum minimum atan2 hypot copysign
    logaddexp nextafter bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
"""
_BINARY_TESTS = """
    equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
"""

# name: (number of sources, dtype of the result: "same" as the first source's, "bool", or "real")
MAPS: dict[str, tuple[int, str]] = {
    **dict.fromkeys(_UNARY.split(), (1, "same")),
    **dict.fromkeys(("isnan", "isinf", "isfinite", "signbit"), (1, "bool")),
    **dict.fromkeys(("real", "imag"), (1, "real")),
    **dict.fromkeys(_BINARY.split(), (2, "same")),
    **dict.fromkeys(_BINARY_TESTS.split(), (2, "bool")),
    "where": (3, "same"),  # (condition, then, else): the dtype of the second
}
# NumPy's names of those that it calls otherwise.
UFUNC_NAMES = {
    "abs": "absolute",
    "pow": "power",
    "atan2": "arctan2",
    "round": "rint",
    "conj": "conjugate",
    "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    **{name: "arc" + name[1:] for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
}
# What reductions are that repeat an operation.
REPEATED = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
}
REDUCES = frozenset(("sum", "prod", "max", "min", "any", "all", "argmax", "argmin"))
SCANS = frozenset(f"cumulative_{op}" for op in ("sum", "prod", "max", "min"))
VIEWS = frozenset(("reshape", "broadcast", "permute", "slice"))
SEGMENTS = frozenset(("sum", "mean", "max", "min"))
CONTROL = frozenset(("cond", "while_loop", "scan"))
TRANSFORMS = frozenset(("fft", "ifft", "rfft", "irfft"))


class Node:
    """One operation, its sources, and the dtype and shape of what it gives.

    Made by the functions of this file, which give the same object for the same operation: nodes
    are compared by identity. A node of several results (``call``) has dtype None.
    """

    __slots__ = ("op", "src", "attrs", "dtype", "shape", "__weakref__")

    op: str
    src: tuple[Node, ...]
    attrs: tuple
    dtype: Any
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        attrs = f" {self.attrs}" if self.attrs else ""
        return f"<{self.op}{attrs} {self.dtype}{list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


_nodes: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def make(op: str, src: Sequence[Node], attrs: tuple, dtype: Any, shape: tuple[int, ...]) -> Node:
    """Return the node of this description, unchecked; see the functions below."""
    src = tuple(src)
    dtype = None if dtype is None else np.dtype(dtype)
    attrs, shape = settled(attrs), settled(shape)
    key = op, tuple([id(s) for s in src]), _identity(attrs), dtype, shape
    with _lock:
        node = _nodes.get(key)
        if node is None:
            node = object.__new__(Node)
            node.op, node.src, node.attrs, node.dtype, node.shape = op, src, attrs, dtype, shape
            _nodes[key] = node
    return node


def settled(x: Any) -> Any:
    """Return attributes with numbers that vary from call to call (``_scalar``) as they are now."""
    if isinstance(x, tuple):
        found = [settled(part) for part in x]
        return x if all(a is b for a, b in zip(found, x, strict=True)) else tuple(found)
    known = getattr(type(x), "known", None)
    return x if known is None else known(x)


def _identity(attrs: tuple) -> tuple:
    """Tell apart what compares equal: 0.0 and -0.0, True and 1; and let NaN be itself."""
    return tuple(
        (type(a), a.dtype.str, a.tobytes()) if isinstance(a, np.generic) else (type(a), a)
        for a in attrs
    )


# ----------------------------------------------------------------------------------- leaves


def input_node(number: int, dtype: Any, shape: Sequence[int]) -> Node:
    """Return the graph's input ``number``."""
    return make("input", (), (number,), dtype, tuple(shape))


def constant(value: Any, dtype: Any) -> Node:
    """Return a number, of shape ()."""
    return make("constant", (), (np.dtype(dtype).type(value),), dtype, ())


def iota(shape: Sequence[int], axis: int, dtype: Any) -> Node:
    """Return the index along ``axis`` of an array of ``shape``."""
    return make("iota", (), (axis,), dtype, tuple(shape))


# ------------------------------------------------------------------------------------- maps


def map_node(op: str, *src: Node) -> Node:
    """Return an elementwise operation; sources of one shape, and of one dtype but for ``where``."""
    n_sources, result = MAPS[op]
    if len(src) != n_sources or len({s.shape for s in src}) != 1:
        raise ValueError(f"{op} takes {n_sources} sources of one shape, got {src}")
    if len({s.dtype for s in (src[1:] if op == "where" else src)}) != 1:
        raise ValueError(f"{op} takes sources of one dtype, got {src}")
    dtype = src[-1].dtype
    if result == "bool":
        dtype = np.dtype(bool)
    elif result == "real" or (op == "abs" and dtypes.is_complex(dtype)):
        dtype = np.empty(0, dtype).real.dtype
    return make(op, src, (), dtype, src[0].shape)


def cast(x: Node, dtype: Any) -> Node:
    """Return ``x`` in another dtype, rounded to it: never taken out again, but for no change."""
    return x if x.dtype == dtype else make("cast", (x,), (), dtype, x.shape)


# ------------------------------------------------------------------------ reductions and scans


def reduce_node(op: str, x: Node, axes: Iterable[int]) -> Node:
    """Return a reduction in the dtype of ``x`` (int64 for argmax, argmin); axes are removed.

    ``sum`` and ``prod`` are of the dtype that they add up in: cast before and after. ``argmax`` and
    ``argmin`` take one axis, ``any`` and ``all`` bools.
    """
    axes = tuple(sorted(axes))
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    dtype = np.dtype(np.int64) if op.startswith("arg") else x.dtype
    return make(op, (x,), (axes,), dtype, shape)


def scan_node(op: str, x: Node, axis: int) -> Node:
    """Return running sums, products or extrema along an axis, in the dtype of ``x``."""
    return make(op, (x,), (axis,), x.dtype, x.shape)


# ------------------------------------------------------------------------------------- views


def reshape(x: Node, shape: Sequence[int]) -> Node:
    """Return ``x`` in row-major order in another shape of as many elements."""
    shape = tuple(shape)
    if math.prod(shape) != x.size:
        raise ValueError(f"cannot reshape {x.shape} into {shape}")
    if x.op == "reshape":
        x = x.src[0]
    return x if shape == x.shape else make("reshape", (x,), (), x.dtype, shape)


def broadcast(x: Node, shape: Sequence[int]) -> Node:
    """Return ``x`` repeated along its axes of length one, new ones put in front."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    x = reshape(x, (1,) * (len(shape) - x.ndim) + x.shape)
    if any(a != b and a != 1 for a, b in zip(x.shape, shape, strict=True)):
        raise ValueError(f"cannot broadcast {x.shape} to {shape}")
    if x.op == "broadcast" and x.src[0].ndim == len(shape):
        x = x.src[0]
    return x if x.shape == shape else make("broadcast", (x,), (), x.dtype, shape)


def permute(x: Node, axes: Sequence[int]) -> Node:
    """Return ``x`` with its axes in another order."""
    axes = tuple(axes)
    if x.op == "permute":
        (inner,) = x.attrs
        x, axes = x.src[0], tuple(inner[a] for a in axes)
    if axes == tuple(range(x.ndim)):
        return x
    return make("permute", (x,), (axes,), x.dtype, tuple(x.shape[a] for a in axes))


def slice_node(
    x: Node, starts: Sequence[int], steps: Sequence[int], lengths: Sequence[int]
) -> Node:
    """Return ``lengths`` elements along each axis, from ``starts``, ``steps`` (not 0) apart."""
    starts, steps, lengths = tuple(starts), tuple(steps), tuple(lengths)
    if lengths == x.shape and not any(starts) and set(steps) <= {1}:
        return x
    return make("slice", (x,), (starts, steps), x.dtype, lengths)


# -------------------------------------------------------------------------- joining, indexing


def concat(parts: Sequence[Node], axis: int) -> Node:
    """Return arrays of one dtype joined along an axis."""
    first = parts[0]
    if len(parts) == 1:
        return first
    length = sum(p.shape[axis] for p in parts)
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    return make("concat", parts, (axis,), first.dtype, shape)


def update(x: Node, value: Node, starts: Sequence[int], steps: Sequence[int]) -> Node:
    """Return ``x`` with the part that ``slice_node`` would give replaced by ``value``."""
    if value.size == 0:
        return x
    if value.shape == x.shape and not any(starts) and set(steps) <= {1}:
        return value
    return make("update", (x, value), (tuple(starts), tuple(steps)), x.dtype, x.shape)


def gather(x: Node, index: Node, axis: int) -> Node:
    """Return ``take(x, index, axis)``: the index's axes in place of ``axis``; never negative."""
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return make("gather", (x, index), (axis,), x.dtype, shape)


def take_along(x: Node, index: Node, axis: int) -> Node:
    """Return ``take_along_axis(x, index, axis)``; indices are not negative."""
    return make("take_along", (x, index), (axis,), x.dtype, index.shape)


def scatter_add(x: Node, index: Node, values: Node, axis: int) -> Node:
    """Return ``x`` with ``values`` added at the 1-D ``index`` of an axis, in the index's order."""
    return make("scatter_add", (x, index, values), (axis,), x.dtype, x.shape)


def spread(x: Node, indptr: Node, n_edges: int) -> Node:
    """Return, for each edge of a CSR matrix, the row of ``x`` that it belongs to."""
    return make("spread", (x, indptr), (), x.dtype, (n_edges, *x.shape[1:]))


def segment_reduce(op: str, values: Node, indptr: Node) -> Node:
    """Return the reduction of the edges of each row.

    Rows without edges give zeros; the least number of the dtype for max, the largest for min.
    """
    n_rows = indptr.shape[0] - 1
    return make(
        "segment_reduce", (values, indptr), (op,), values.dtype, (n_rows, *values.shape[1:])
    )


def scatter_reduce(op: str, index: Node, values: Node, n_rows: int) -> Node:
    """Return the reduction of the rows of a matrix that go to each row, which ``index`` names.

    Rows that nothing goes to are those of ``segment_reduce``. Maxima and minima do not depend on
    the order of what they are of.
    """
    return make("scatter_reduce", (index, values), (op,), values.dtype, (n_rows, values.shape[1]))


# ------------------------------------------------------------------- products, transforms, calls


def matmul(a: Node, b: Node) -> Node:
    """Return the product of matrices, stacks of them that broadcast, and vectors."""
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*stack, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))
    return make("matmul", (a, b), (), a.dtype, shape)


def transform(op: str, x: Node, axes: Sequence[int], lengths: Sequence[int], norm: str) -> Node:
    """Return a Fourier transform of so many elements along each axis, in the time domain.

    The last of ``axes`` is the one that ``rfft`` and ``irfft`` halve and double. ``norm`` is
    NumPy's, or "none": no scale in either direction.
    """
    kinds = {"rfft": {"f": "c8", "d": "c16"}, "irfft": {"F": "f4", "D": "f8"}}
    dtype = kinds[op][x.dtype.char] if op in kinds else x.dtype
    shape = list(x.shape)
    for axis, n in zip(axes, lengths, strict=True):
        shape[axis] = n
    if op == "rfft":
        shape[axes[-1]] = lengths[-1] // 2 + 1
    return make(op, (x,), (tuple(axes), tuple(lengths), norm), np.dtype(dtype), tuple(shape))


def call(
    function: Callable, src: Sequence[Node], options: tuple, results: Sequence[tuple]
) -> tuple[Node, ...]:
    """Return what ``function(*arrays, **dict(options))`` gives: an opaque call.

    ``results`` has (dtype, shape) for each array of the tuple that it gives. ``options`` are
    hashable (name, value) pairs.
    """
    return _items(make("call", src, (function, options, tuple(results)), None, ()), results)


def control(
    op: str, src: Sequence[Node], attrs: Sequence[Any], results: Sequence[tuple]
) -> tuple[Node, ...]:
    """Return what a branch or loop gives: (dtype, shape) of each are ``results``.

    ``cond`` takes its test, of shape (), and the inputs of both graphs in ``attrs``. ``while_loop``
    takes those of the graphs of its test and its body, of which the state comes first. ``scan`` has
    the body's graph, how many of its inputs are the state and how many a step's inputs, and the
    number of steps; it takes the state, arrays with a row for each step, and what is the same in
    all steps. Into the body's remaining inputs a step writes its outputs.
    """
    return _items(make(op, src, tuple(attrs), None, ()), results)


def _items(whole: Node, results: Sequence[tuple]) -> tuple[Node, ...]:
    return tuple(
        make("item", (whole,), (i,), dtype, tuple(shape))
        for i, (dtype, shape) in enumerate(results)
    )


# ------------------------------------------------------------------------------------- graphs


class Graph:
    """Inputs, outputs, and what is written back into inputs.

    Attributes
    ----------
    inputs : tuple of Node
    outputs : tuple of Node
    updates : tuple of (int, Node)
        Numbers of inputs and what they hold afterwards. Everything is read before any is written.
    scalars : frozenset of int
        Numbers of inputs, of shape (), that are given as Python numbers and not as arrays.
    """

    __slots__ = ("inputs", "outputs", "updates", "scalars")

    def __init__(
        self,
        inputs: Iterable[Node],
        outputs: Iterable[Node],
        updates: Iterable[tuple[int, Node]] = (),
        scalars: Iterable[int] = (),
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.updates = tuple(updates)
        self.scalars = frozenset(scalars)

    @property
    def roots(self) -> tuple[Node, ...]:
        return (*self.outputs, *(node for _, node in self.updates))

    def nodes(self) -> list[Node]:
        """Return all nodes that the outputs need, sources before what uses them, in fixed order."""
        return topological(self.roots)

    def rewritten(self, rule: Callable[[Node, list[Node]], Node]) -> Graph:
        """Return the graph with what ``rule(node, its new sources)`` gives in each node's place."""
        new: dict[Node, Node] = {}
        for node in self.nodes():
            new[node] = rule(node, [new[s] for s in node.src])
        return Graph(
            self.inputs,
            [new[n] for n in self.outputs],
            [(number, new[n]) for number, n in self.updates],
            self.scalars,
        )


def topological(roots: Iterable[Node], leaves: Iterable[Node] = ()) -> list[Node]:
    """Return the nodes that ``roots`` need, sources first, each once; the order is fixed.

    ``leaves`` come first, and what only they need is left out.
    """
    order: dict[Node, None] = dict.fromkeys(leaves)
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in order:
                continue
            if ready:
                order[node] = None
            else:
                stack.append((node, True))
                stack.extend((s, False) for s in reversed(node.src) if s not in order)
    return list(order)


def behind_views(node: Node, kept: Container[Node] = ()) -> Node:
    """Return the node whose elements a view looks at, through all views but those ``kept``."""
    while node.op in VIEWS and node not in kept:
        (node,) = node.src
    return node


def owners(node: Node, kept: Container[Node] = ()) -> set[Any]:
    """Return what may have made a node's memory: branches and loops may give what they are given.

    What is made inside of one is a pair of that and a node. Views in ``kept`` have memory of their
    own.
    """
    node = behind_views(node, kept)
    whole = node.src[0] if node.op == "item" else node
    if node in kept or whole.op not in CONTROL:
        return {node}
    (number,) = node.attrs
    graphs, sources, n_state = _parts(whole)
    if whole.op == "scan" and number >= n_state:
        return {node}  # the rows of all steps
    found: set[Any] = set()
    stack, seen = [number], {number}
    while stack:
        number = stack.pop()
        if number < n_state:  # there may be no rounds
            found |= owners(sources[number], kept)
        for graph in graphs:
            for owner in owners(graph.outputs[number]):
                if not isinstance(owner, Node) or owner.op != "input":
                    found.add((whole, owner))
                elif (given := owner.attrs[0]) >= n_state:
                    found |= owners(sources[given], kept)
                elif given not in seen:
                    seen.add(given)
                    stack.append(given)
    return found


def _parts(node: Node) -> tuple[Sequence[Graph], Sequence[Node], int]:
    """Return which graphs give results of a branch or loop, on what, and how much is state."""
    if node.op == "cond":
        return node.attrs, node.src[1:], 0
    if node.op == "while_loop":
        return node.attrs[1:], node.src, len(node.attrs[1].outputs)
    return node.attrs[:1], node.src, node.attrs[1]


def sharing(nodes: Sequence[Node], meant: Sequence[Node], kept: Container[Node] = ()) -> set[int]:
    """Return which nodes may share memory with one before though what is ``meant`` does not.

    Inputs are left out: a view of one is what it is.
    """
    found = set()
    seen: dict[Any, Node] = {}
    for i, (node, old) in enumerate(zip(nodes, meant, strict=True)):
        base = behind_views(old)
        for owner in {behind_views(node, kept), *owners(node, kept)}:
            is_input = isinstance(owner, Node) and owner.op == "input"
            if not is_input and seen.setdefault(owner, base) is not base:
                found.add(i)
    return found


def cut(leaves: Sequence[Node], roots: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Return new inputs in place of ``leaves``, and ``roots`` on these."""
    inputs = [input_node(i, n.dtype, n.shape) for i, n in enumerate(leaves)]
    new = dict(zip(leaves, inputs, strict=True))
    for node in topological(roots, new)[len(new) :]:
        sources = [new[s] for s in node.src]
        new[node] = make(node.op, sources, node.attrs, node.dtype, node.shape)
    return inputs, [new[root] for root in roots]


def text(graph: Graph) -> str:
    """Return the graph as one line a node: its canonical form."""
    names: dict[Node, str] = {}
    lines = []
    for node in graph.nodes():
        names[node] = f"%{len(names)}"
        attrs = "".join(f" {_word(a)}" for a in node.attrs)
        sources = " ".join(names[s] for s in node.src)
        shape = "x".join(map(str, node.shape))
        lines.append(f"{names[node]} = {node.op}{attrs} {sources} : {node.dtype}[{shape}]")
    lines.append("return " + " ".join(names[n] for n in graph.outputs))
    lines += [f"input {number} <- {names[node]}" for number, node in graph.updates]
    return "\n".join(lines)


def _word(attr: Any) -> str:
    if isinstance(attr, Graph):
        return "{" + text(attr).replace("\n", "; ") + "}"
    if callable(attr) and hasattr(attr, "__qualname__"):
        return f"{attr.__module__}.{attr.__qualname__}"
    return repr(attr)
