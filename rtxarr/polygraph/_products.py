"""What stands around matrix products, as part of them: cuBLASLt's epilogues, and gated pairs.

A bias, an array that is added, a factor, a ReLU or the tanh form of GELU after a product cost
little or nothing while it is stored. The product then rounds once, at its end, so this is for mode
"fast". What the library has for the backward pass (the derivative of an activation, the gradient of
a bias) is left to kernels: on an H200 they take less time than these epilogues add to a product.

Activations are told by their values, however they are written: what is computed of a product alone
is evaluated in float64 on a line of numbers. Whether the library takes a product is asked when the
program is made. What the calls give is said by NumPy in ``rtxarr.libs.blas``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr._override import overridable
from rtxarr.libs import blas, tile
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._passes import rebuilt, value_of
from rtxarr.polygraph._program import memory_order, packed_strides

Strides = Mapping[Node, tuple[int, ...]]
_NO_COPIES = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # can be asked of `reshape`

# ----------------------------------------------------------------------------- what programs call


@overridable
def product(a: Any, b: Any, *more: Any, names: tuple = (), **options: Any) -> tuple[Any, ...]:
    """Return ``epilogue(scale * (a @ b) + addend + bias)``; ``names`` are those of ``more``."""
    return (blas.matmul(a, b, **dict(zip(names, more, strict=True)), **options),)


@overridable
def product_and_sum(a: Any, b: Any, *bias: Any, epilogue: str) -> tuple[Any, ...]:
    """Return ``epilogue(a @ b + bias)``, and the sum before it."""
    return blas.matmul_with_aux(a, b, epilogue=epilogue, bias=bias[0] if bias else None)


def _product_into(a: Any, b: Any, *more: Any, out: Any, names: tuple = (), **options: Any) -> Any:
    found = blas.matmul_into(a, b, out, **dict(zip(names, more, strict=True)), **options)
    return None if found is None else (found,)


def _product_and_sum_into(a: Any, b: Any, *bias: Any, out: Any, epilogue: str) -> Any:
    vector = bias[0] if bias else None
    return blas.matmul_with_aux(a, b, epilogue=epilogue, bias=vector, out=out)


@overridable
def gated_product(a: Any, w: Any, v: Any, *biases: Any, activation: str) -> tuple[Any, ...]:
    """Return ``(a @ w.T + bias) * activation(a @ v.T + gate_bias)``."""
    bias, gate_bias = biases or (None, None)
    return (tile.gated_linear(a, w, bias, gate=v, gate_bias=gate_bias, activation=activation),)


@overridable
def activated_product(a: Any, w: Any, *bias: Any, activation: str) -> tuple[Any, ...]:
    """Return ``activation(a @ w.T + bias)``."""
    return (tile.linear(a, w, *bias, activation=activation),)


FUNCTIONS = (product, product_and_sum, gated_product, activated_product)
product.into = _product_into  # type: ignore[attr-defined]
product_and_sum.into = _product_and_sum_into  # type: ignore[attr-defined]
for _function in FUNCTIONS:
    _function.gives_new = True  # type: ignore[attr-defined]  # memory of its own; see _program


def described(call: Node) -> str:
    """Return in words what a call of one of ``FUNCTIONS`` computes."""
    function, pairs, _ = call.attrs
    options = dict(pairs)
    if function in (gated_product, activated_product):
        words, n_matrices = (["gated matmul"], 3) if function is gated_product else (["matmul"], 2)
        words += ["bias"] * (len(call.src) > n_matrices)
        return " + ".join([*words, options["activation"]])
    words = ["matmul"]
    if function is product:
        words += ["scale"] * ("scale" in options)
        words += [name for name in ("addend", "bias") if name in options.get("names", ())]
    else:
        words += ["bias"] * (len(call.src) > 2)
    words += [options["epilogue"]] if options.get("epilogue") else []
    return " + ".join(words) + (" & its sum" if function is product_and_sum else "")


# --------------------------------------------------------------------------------------- the pass


def fuse_products(
    graph: Graph, strides: Strides, is_computed: Callable[[Node], bool]
) -> tuple[Graph, list[str]]:
    """Return the graph with products that take in what stands around them, and what was done.

    Parameters
    ----------
    graph : Graph
        After ``simplify``.
    strides : mapping
        Of inputs that are not contiguous, in elements.
    is_computed : callable
        Tells whether a kernel can compute a node.
    """
    from rtxarr.polygraph._own_products import take_activations, take_gates

    notes: list[str] = []
    if has_products(graph):
        for stage in (_sums, take_gates, _activations, take_activations):
            rewrite = Rewrite(graph, strides, is_computed, notes)
            stage(rewrite)
            graph = rewrite.result()
    return graph, notes


def has_products(graph: Graph) -> bool:
    return any(n.op == "matmul" or _is_linear(n) for n in graph.nodes())


@dataclass(frozen=True)
class Product:
    """``scale * (a @ b) + addend + bias``, each rounded as it may be."""

    a: Node
    b: Node
    bias: Node | None = None
    addend: Node | None = None
    scale: float = 1.0

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(n for n in ("bias", "addend") if getattr(self, n) is not None)

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.a, self.b, *(getattr(self, name) for name in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return ir.matmul(self.a, self.b).shape


class Rewrite:
    """A graph, who reads each of its nodes, and what is to stand in place of some."""

    def __init__(
        self, graph: Graph, strides: Strides, is_computed: Callable, notes: list[str]
    ) -> None:
        self.graph, self.strides, self.notes = graph, strides, notes
        self.is_computed = is_computed
        self.nodes = graph.nodes()
        self.users: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(node.src):
                self.users[source].append(node)
        self.roots = {*graph.roots}
        self.made: dict[Node, tuple[tuple[Node, ...], Callable]] = {}

    def put(self, node: Node, sources: Sequence[Node], make: Callable[..., Node]) -> None:
        """Let ``make`` of the new ``sources`` stand in the place of a node."""
        self.made[node] = tuple(sources), make

    def result(self) -> Graph:
        if not self.made:
            return self.graph
        new: dict[Node, Node] = {}
        for root in self.graph.roots:
            stack = [root]
            while stack:
                node = stack[-1]
                sources, make = self.made.get(node, (node.src, None))
                waiting = [s for s in sources if s not in new]
                if waiting and node not in new:
                    stack += waiting
                    continue
                stack.pop()
                if node not in new:
                    found = [new[s] for s in sources]
                    new[node] = rebuilt(node, found) if make is None else make(*found)
        graph = self.graph
        updates = [(number, new[n]) for number, n in graph.updates]
        return Graph(graph.inputs, [new[n] for n in graph.outputs], updates, graph.scalars)

    def needs(self, node: Node, without: Node, sources: Mapping[Node, Node]) -> bool:
        """Tell whether results need a node if ``without`` is computed in another way.

        ``sources`` are those of ``of_one``: what is of others too is no part of ``without``.
        """
        stack, seen = [node], {node, without}
        while stack:
            at = stack.pop()
            if at in self.roots:
                return True
            for user in self.users[at]:
                if user in seen:
                    continue
                if sources.get(user) is not node:
                    return True
                seen.add(user)
                stack.append(user)
        return False

    def in_memory(self, node: Node) -> bool:
        """Tell whether a node is stored in any case."""
        while node.op == "reshape" and node not in self.made:
            (node,) = node.src
        if node in self.made:
            return True
        if node.op == "input":
            return node.attrs[0] not in self.graph.scalars
        if node in self.roots or not (self.is_computed(node) or node.op in ir.VIEWS):
            return node.op not in ("constant", "iota")
        stack = [node]
        while stack:
            for user in self.users[stack.pop()]:
                if user.op == "reshape":
                    stack.append(user)
                elif not (user.op in ir.VIEWS or self.is_computed(user)):
                    return True
        return False

    def like(self, node: Node) -> tuple | None:
        """Return (dtype, shape, strides in bytes) of a node in memory; None if it is copied."""
        strides = strides_of(node, self.strides)
        if strides is None:
            return None
        return node.dtype, node.shape, tuple(s * node.dtype.itemsize for s in strides)

    def refusal(self, a: Node, b: Node, **options: Any) -> str:
        """Return why the library does not take a product; "" if it does."""
        left, right = self.like(a), self.like(b)
        if left is None or right is None:
            return "an operand would be copied"
        return blas.refusal(left, right, **options)

    def refusal_of(self, whole: Product, epilogue: str | None = None) -> str:
        for part in whole.sources[2:]:
            if not is_contiguous(part, self.strides):
                return "what is added has gaps"
        options = {"bias": whole.bias is not None, "addend": whole.addend is not None}
        return self.refusal(whole.a, whole.b, epilogue=epilogue, scale=whole.scale, **options)

    def note(self, node: Node, text: str) -> None:
        shape = "x".join(map(str, node.shape))
        self.notes.append(f"product {node.dtype}[{shape}]: {text}")


def _is_linear(node: Node) -> bool:
    """Tell whether a node is the result of ``rx.linear``, which is a call."""
    if node.op != "item" or node.src[0].op != "call":
        return False
    return repr(node.src[0].attrs[0]) == "rtxarr.ops._linear.linear"


def product_of(node: Node) -> Product | None:
    """Return what a product multiplies and adds; None for other nodes."""
    if node.op == "matmul":
        return Product(node.src[0], node.src[1])
    if _is_linear(node):
        x, weight, *bias = node.src[0].src
        if len({s.dtype for s in node.src[0].src}) > 1 or x.ndim < 2:
            return None
        rows = ir.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        return Product(rows, ir.permute(weight, (1, 0)), bias[0] if bias else None)
    if node.op == "item" and node.src[0].op == "call" and node.src[0].attrs[0] is product:
        call = node.src[0]
        options = dict(call.attrs[1])
        if options.get("epilogue"):
            return None
        more = dict(zip(options.get("names", ()), call.src[2:], strict=True))
        return Product(call.src[0], call.src[1], scale=options.get("scale", 1.0), **more)
    return None


def made_of(found: Product, epilogue: str | None = None) -> Callable[..., Node]:
    """Return the function of its sources that makes the node of a product."""
    options: dict[str, Any] = {"names": found.parts} if found.parts else {}
    options |= {"scale": found.scale} if found.scale != 1 else {}
    options |= {"epilogue": epilogue} if epilogue else {}
    result = found.a.dtype, found.shape

    def make(*sources: Node) -> Node:
        return ir.call(product, sources, tuple(sorted(options.items())), [result])[0]

    return make


def strides_of(node: Node, given: Strides) -> tuple[int, ...] | None:
    """Return the strides of a node in memory, in elements; None where a view would be a copy."""
    if node.op not in ir.VIEWS:
        order = memory_order(node)
        return given.get(node) or packed_strides(node.shape, order or tuple(range(node.ndim)))
    (x,) = node.src
    inner = strides_of(x, given)
    if inner is None:
        return None
    if node.op == "permute":
        return tuple(inner[a] for a in node.attrs[0])
    if node.op == "slice":
        return tuple(s * step for s, step in zip(inner, node.attrs[1], strict=True))
    if node.op == "broadcast":
        sizes = zip(inner, x.shape, node.shape, strict=True)
        return tuple(0 if a != b else s for s, a, b in sizes)
    # Never read: an array of one byte that says it has these strides.
    view = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), x.shape, inner)
    try:
        if _NO_COPIES:
            view = np.reshape(view, node.shape, copy=False)
        else:
            view.shape = node.shape
    except (AttributeError, ValueError):
        return None
    return view.strides


def is_contiguous(node: Node, given: Strides) -> bool:
    strides = strides_of(node, given)
    want = 1
    for size, stride in zip(reversed(node.shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != want:
            return False
        want *= size
    return strides is not None


# ------------------------------------------------------------------- bias, addend, and a factor


def _sums(rewrite: Rewrite) -> None:
    """Take in what is added to a product that nothing else reads, or multiplied by."""
    taken: set[Node] = set()
    for node in rewrite.nodes:
        start = product_of(node)
        if start is None or not dtypes.is_floating(node.dtype):
            continue
        passed: list[Node] = []
        best, why = None, ""
        for top, whole in _climb(rewrite, node, start):
            if top in taken:
                break
            passed.append(top)
            if why := rewrite.refusal_of(whole):
                break
            best = top, whole, len(passed)
        if why:
            rewrite.note(node, f"what is added is left out: {why}")
        if best is None:
            continue
        top, whole, n_passed = best
        taken.update(passed[:n_passed])
        rewrite.put(top, whole.sources, in_shape(made_of(whole), top.shape))
        words = (*whole.parts, *(("a factor",) if whole.scale != 1 else ()))
        rewrite.note(top, f"takes in {' and '.join(words)}")


def in_shape(make: Callable[..., Node], shape: tuple[int, ...]) -> Callable[..., Node]:
    return lambda *sources: ir.reshape(make(*sources), shape)


def _climb(rewrite: Rewrite, node: Node, whole: Product) -> Iterable[tuple[Node, Product]]:
    """Give the sums that a product begins, each with what it takes in."""
    n = whole.b.shape[-1] if whole.b.ndim > 1 else 0
    top = node
    while top not in rewrite.roots and len(rewrite.users[top]) == 1:
        (user,) = rewrite.users[top]
        if user.op == "reshape":
            top = user
            continue
        if user.op not in ("add", "multiply") or user.src[0] is user.src[1]:
            return
        other = user.src[user.src[0] is top]
        value = value_of(other)
        if user.op == "multiply":
            if value is None or whole.parts:
                return
            whole = replace(whole, scale=whole.scale * float(value))
            limits = np.finfo(dtypes.accumulator(whole.a.dtype))  # 0 would hide a NaN
            if not float(limits.tiny) <= abs(whole.scale) <= float(limits.max):
                return
        elif (bias := _row_of(other, n)) is not None:
            if whole.bias is not None or not rewrite.in_memory(bias):
                return
            whole = replace(whole, bias=bias)
        else:
            if whole.addend is not None or value is not None or not rewrite.in_memory(other):
                return
            whole = replace(whole, addend=ir.reshape(other, whole.shape))
        top = user
        yield top, whole


def _row_of(node: Node, n: int) -> Node | None:
    """Return the vector of ``n`` that a node repeats for each row of a product."""
    if node.op != "broadcast" or n < 2 or node.src[0].size != n:
        return None
    (x,) = node.src
    k = next(i for i, size in enumerate(x.shape) if size > 1)
    return ir.reshape(x, (n,)) if x.shape[k:] == node.shape[k:] else None


# ----------------------------------------------------------------------------- activations


_MOST = 64  # operations between a product and what is made of it
_FAR = np.geomspace(1e-30, 1e100, 66)  # where bounds such as 1e-7 or 100 may lie
_LINE = np.concatenate([np.linspace(-9, 9, 181), _FAR, -_FAR, [0.0, np.nan, np.inf, -np.inf]])
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@np.errstate(invalid="ignore")
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(_SCALE * (x + _CUBIC * x**3)))


# Each with how near to it a function must be.
Kinds = Mapping[str, tuple[Callable, dict[str, float]]]
_KINDS: Kinds = {
    "relu": (relu, {"rtol": 0, "atol": 0}),
    "gelu": (gelu_tanh, {"rtol": 1e-5, "atol": 1e-9}),
}


def of_one(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return, for what is computed element by element of one other node, that node."""
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.op in ir.MAPS or node.op in ("cast", "reshape"):
            of = {found.get(s, s) for s in node.src if value_of(s) is None}
            if len(of) == 1:
                (found[node],) = of
    return found


def _value(node: Node, source: Node, numbers: np.ndarray) -> np.ndarray | None:
    """Return what a node is in float64 where its source is so; None if it rounds on the way."""
    order = ir.topological([node], [source])[1:]
    if len(order) > 4 * _MOST:
        return None
    values: dict[Node, Any] = {source: numbers}
    with np.errstate(all="ignore"):
        for n in order:
            number = value_of(n)
            if number is not None:
                values[n] = np.asarray(number, bool if n.dtype == bool else np.float64)
            elif n.op in ("constant", "broadcast"):
                continue
            elif n.op in ("cast", "reshape"):
                (x,) = n.src
                if not (dtypes.is_floating(n.dtype) and dtypes.is_floating(x.dtype)):
                    return None
                if n.dtype.itemsize < x.dtype.itemsize and n is not node:
                    return None
                values[n] = values[x]
            elif n.op in ir.MAPS:
                sources = [values[s] for s in n.src]
                values[n] = _interpret.RULES[n.op](np, n, *sources)
            else:
                return None
    return values[node]


def _activations(rewrite: Rewrite) -> None:
    """Take in the ReLU or GELU of a product; GELU also where its argument is needed elsewhere."""
    sources = of_one(rewrite.nodes)
    by_base: dict[Node, list[Node]] = {}
    for node, base in sources.items():
        by_base.setdefault(base, []).append(node)
    for base, cone in by_base.items():
        whole = product_of(base)
        if whole is None or not dtypes.is_floating(base.dtype):
            continue
        for y in cone[:_MOST]:
            if y.dtype != base.dtype or y.op == "reshape":
                continue
            kind = activation_of(y, base)
            if kind is None:
                continue
            needed = rewrite.needs(base, y, sources)
            why = _take_activation(rewrite, base, whole, y, kind, needed)
            rewrite.note(base, f"{kind} left out: {why}" if why else f"takes in {kind}")
            break


def activation_of(node: Node, source: Node, kinds: Kinds = _KINDS) -> str | None:
    """Return which activation of another a node is, by its values; None for none."""
    got = _value(node, source, _LINE)
    if got is None:
        return None
    for kind, (function, error) in kinds.items():
        if np.allclose(got, function(_LINE), **error, equal_nan=True):
            return kind
    return None


def _take_activation(
    rewrite: Rewrite, base: Node, whole: Product, y: Node, kind: str, needed: bool
) -> str:
    """Put a product with an activation in the place of a node; return why not, or ""."""
    if kind == "gelu" and not dtypes.is_half(base.dtype):
        return "the library's is right to 5e-6"
    if not needed:
        why = rewrite.refusal_of(whole, kind)
        if not why:
            rewrite.put(y, whole.sources, in_shape(made_of(whole, kind), y.shape))
        return why
    if kind == "relu":
        return "what it is of is needed elsewhere"
    if whole.addend is not None or whole.scale != 1:
        return "what it is of is needed elsewhere, and has more parts than a bias"
    m, n = math.prod(whole.shape[:-1]), whole.shape[-1]
    if whole.b.ndim != 2 or n % 8:
        return f"rows of {n} elements, which is no multiple of 8"
    a = ir.reshape(whole.a, (m, whole.a.shape[-1]))
    if whole.bias is not None and not is_contiguous(whole.bias, rewrite.strides):
        return "the bias has gaps"
    why = rewrite.refusal(a, whole.b, epilogue=kind, bias=whole.bias is not None, aux_ld=n)
    if why:
        return why
    results = [(base.dtype, (m, n))] * 2

    def item(i: int) -> Callable[..., Node]:
        return lambda *s: ir.call(product_and_sum, s, (("epilogue", kind),), results)[i]

    for i, node in enumerate((y, base)):
        rewrite.put(node, (a, *whole.sources[1:]), in_shape(item(i), node.shape))
    return ""
