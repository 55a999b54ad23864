"""What our own kernels take in that cuBLASLt does not: gated pairs, and other activations.

A gated pair is ``(x @ w + b) * activation(x @ v + c)``: SwiGLU, GEGLU and the like. Neither
product, which may be halves of one, is written to memory. The kernels are those of
``rtxarr.libs.tile``; what they do not take stays products and a map, as do sizes at which that is
as fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rtxarr import dtypes
from rtxarr.libs import tile
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph import _products
from rtxarr.polygraph._ir import Node
from rtxarr.polygraph._products import Kinds, Product, Rewrite

# ------------------------------------------------------------------- functions of one number


@np.errstate(all="ignore")
def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@np.errstate(all="ignore")
def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@np.errstate(all="ignore")
def _gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


_CLOSE = {"rtol": 1e-5, "atol": 1e-9}
_ACTIVATIONS: Kinds = {
    "sigmoid": (_sigmoid, _CLOSE),
    "silu": (_silu, _CLOSE),
    "gelu": (_gelu, _CLOSE),
}
_GATES: Kinds = {
    "relu": (_products.relu, {"rtol": 0, "atol": 0}),
    "gelu_tanh": (_products.gelu_tanh, _CLOSE),
    **_ACTIVATIONS,
}


# ------------------------------------------------------------------------------- activations


def take_activations(rewrite: Rewrite) -> None:
    """Let products in half precision that nothing else reads take in their activation."""
    of = _products.of_one(rewrite.nodes)
    taken: set[Node] = set()
    for y, base in of.items():
        if y.dtype != base.dtype or not dtypes.is_half(y.dtype) or y.op == "reshape":
            continue
        if base in taken or _products.product_of(base) is None:
            continue
        kind = _products.activation_of(y, base, _ACTIVATIONS)
        found = None if kind is None else _product_part(base, base, 0)
        if found is None or not _leads_only_to(rewrite, base, y):
            continue
        taken.add(base)
        biases = [found.bias] if found.bias is not None else []
        sources = [found.a, _transposed(found.b), *biases]
        if why := _refusal(rewrite, "activation", sources, 2):
            rewrite.note(base, f"{kind} left out: {why}")
            continue
        _put(rewrite, y, _products.activated_product, sources, str(kind))
        rewrite.note(base, f"takes in {kind}")


def _put(rewrite: Rewrite, node: Node, function: Any, sources: list[Node], kind: str) -> None:
    """Put a call of a product with an activation in the place of a node."""
    result = node.dtype, (sources[0].shape[0], sources[1].shape[0])

    def make(*sources: Node) -> Node:
        return ir.call(function, sources, (("activation", kind),), [result])[0]

    rewrite.put(node, sources, _products.in_shape(make, node.shape))


# --------------------------------------------------------------------------------- gated pairs


def take_gates(rewrite: Rewrite) -> None:
    """Make one call of two products, of which one is the other's gate, that nothing else reads."""
    of = _products.of_one(rewrite.nodes)
    for y in rewrite.nodes:
        top = _rounded(rewrite, y) if y.op == "multiply" else None
        if top is None:
            continue
        for value, gate in (y.src, y.src[::-1]):
            base = of.get(value, value)
            if _is_plain(value, base) and _take(rewrite, y, top, base, gate, of):
                break


def _rounded(rewrite: Rewrite, y: Node) -> Node | None:
    """Return a product in half precision: itself, or what alone reads it and rounds it."""
    if y not in rewrite.roots and len(rewrite.users[y]) == 1 and not dtypes.is_half(y.dtype):
        (user,) = rewrite.users[y]
        y = user if user.op == "cast" else y
    return y if dtypes.is_half(y.dtype) else None


def _is_plain(node: Node, base: Node) -> bool:
    """Tell whether a node has the values of another."""
    while node is not base and node.op in ("cast", "reshape"):
        (x,) = node.src
        if node.op == "cast" and not dtypes.can_cast(x.dtype, node.dtype):
            return False
        node = x
    return node is base


def _take(
    rewrite: Rewrite, y: Node, top: Node, base: Node, gate: Node, of: Mapping[Node, Node]
) -> bool:
    """Put a gated pair in the place of a node, if it is one; tell whether."""
    gate_base = of.get(gate)
    if gate_base is None or gate_base is base:
        return False
    (w, start), (v, gate_start) = _part_of(base), _part_of(gate_base)
    if w is None or v is None:
        return False
    pair, gating = _product_part(w, base, start), _product_part(v, gate_base, gate_start)
    if pair is None or gating is None or pair.a is not gating.a or pair.b.shape != gating.b.shape:
        return False
    if base.dtype != top.dtype or (pair.bias is None) != (gating.bias is None):
        return False
    kind = _products.activation_of(gate, gate_base, _GATES)
    if kind is None or not all(_leads_only_to(rewrite, n, y) for n in (w, v)):
        return False
    sources = [pair.a, _transposed(pair.b), _transposed(gating.b)]
    if pair.bias is not None and gating.bias is not None:
        sources += [pair.bias, gating.bias]
    if why := _refusal(rewrite, "gate", sources, 3):
        rewrite.note(top, f"{kind} gate left out: {why}")
        return False
    _put(rewrite, top, _products.gated_product, sources, kind)
    rewrite.note(top, f"two products and a {kind} gate are one")
    return True


def _part_of(base: Node) -> tuple[Node | None, int]:
    """Return the product of which a node is all columns, or those from one on."""
    start = 0
    if base.op == "slice":
        (x,) = base.src
        starts, steps = base.attrs
        if any(starts[:-1]) or set(steps) != {1} or x.shape[:-1] != base.shape[:-1]:
            return None, 0
        base, start = x, starts[-1]
        while base.op == "reshape" and base.src[0].shape[-1:] == base.shape[-1:]:
            (base,) = base.src
    return (None if _products.product_of(base) is None else base), start


def _product_part(node: Node, part: Node, start: int) -> Product | None:
    """Return the product of matrices that gives these columns of one; None for other products."""
    whole: Any = _products.product_of(node)
    if whole.addend is not None or whole.scale != 1 or whole.b.ndim != 2 or whole.a.ndim < 2:
        return None
    k, n = whole.b.shape[0], part.shape[-1]
    rows = ir.reshape(whole.a, (math.prod(whole.a.shape[:-1]), k))
    if part is node:
        return replace(whole, a=rows)
    bias = whole.bias
    if bias is not None:
        bias = ir.slice_node(bias, (start,), (1,), (n,))
    return Product(rows, ir.slice_node(whole.b, (0, start), (1, 1), (k, n)), bias)


def _transposed(x: Node) -> Node:
    return ir.permute(x, (1, 0))


def _leads_only_to(rewrite: Rewrite, node: Node, y: Node) -> bool:
    """Tell whether all that reads a node is part of another."""
    stack, seen = [node], {node, y}
    while stack:
        at = stack.pop()
        if at in rewrite.roots:
            return False
        for user in rewrite.users[at]:
            if user not in seen:
                if not (rewrite.is_computed(user) or user.op in ir.VIEWS):
                    return False
                seen.add(user)
                stack.append(user)
    return True


def _refusal(rewrite: Rewrite, kind: str, sources: list[Node], n_matrices: int) -> str:
    """Return why our kernels do not take some matrices and then biases; "" if they do."""
    matrices = sources[:n_matrices]
    likes = [like for like in map(rewrite.like, matrices) if like is not None]
    if len(likes) < n_matrices:
        return "an operand would be copied"
    if not all(_products.is_contiguous(s, rewrite.strides) for s in sources[n_matrices:]):
        return "a bias has gaps"
    if why := tile.refusal(*likes):
        return why
    (m, k), n = matrices[0].shape, matrices[1].shape[0]
    return "" if tile.pays(kind, m, k, n) else "at this size separate steps take less time"
