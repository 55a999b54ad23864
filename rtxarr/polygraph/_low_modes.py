"""Real transforms of which few frequencies are used, or are not zero, in parts that leave out more.

Where all that reads a spectrum takes its first frequencies along the last axis of the transform,
the other axes need not be transformed beyond these; where a spectrum ends early, the same holds on
the way back. Along an axis that cuFFT would have to move, the frequencies are added up instead
(``kernels.modes``). The bits are others, so it is for mode "fast".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rtxarr.kernels import modes
from rtxarr.polygraph import _interpret
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._passes import filled, value_of

_KEEP_ZEROS = ("negative", "positive", "conj", "cast")
_COMPUTED = {"constant", "iota", "cast", *ir.MAPS, *ir.VIEWS}  # of what is known


def shorten(graph: Graph) -> Graph:
    """Return the graph with transforms of low frequencies in parts."""
    nodes = graph.nodes()
    if not any(n.op in ("rfft", "irfft") for n in nodes):
        return graph
    users: dict[Node, list[Node]] = {n: [] for n in nodes}
    for node in nodes:
        for source in node.src:
            users[source].append(node)

    def rule(node: Node, sources: list[Node]) -> Node:
        found = None
        if node.op == "rfft":
            found = _forward(node, sources[0], _used(node, users, {*graph.roots}))
        elif node.op == "irfft":
            found = _back(node, sources[0], _ends(node.src[0], node.attrs[0][-1]))
        return found or ir.make(node.op, sources, node.attrs, node.dtype, node.shape)

    return graph.rewritten(rule)


# -------------------------------------------------------------------------- what is looked at


def _used(node: Node, users: dict[Node, list[Node]], roots: set[Node]) -> int:
    """Return how many of the first frequencies are read along a transform's last axis."""
    axis = node.attrs[0][-1]
    most, waiting, seen = 0, [node], {node}
    while waiting:
        x = waiting.pop()
        if x in roots:
            return node.shape[axis]
        for user in users[x]:
            if user.op == "slice":
                most = max(most, _end(user, axis))
            elif not _is_elementwise(user, x):
                return node.shape[axis]
            elif user not in seen:
                seen.add(user)
                waiting.append(user)
    return most


def _is_elementwise(node: Node, x: Node) -> bool:
    """Tell whether elements of a node are read of the same places of ``x`` alone."""
    if node.op == "update":
        return node.src[1] is not x
    return node.op in ir.MAPS or node.op == "cast"


def _end(node: Node, axis: int) -> int:
    """Return the end of what a slice reads along an axis."""
    if node.size == 0:
        return 0
    starts, steps = node.attrs
    return max(starts[axis], starts[axis] + steps[axis] * (node.shape[axis] - 1)) + 1


def _ends(x: Node, axis: int) -> int:
    """Return beyond which index along an axis all elements are zero."""
    known: dict[Node, int] = {}
    order = [n for n in ir.topological([x]) if n.shape[axis : axis + 1] and n.ndim == x.ndim]
    for node in order:
        known[node] = _end_of(node, axis, known)
    return known[x]


def _end_of(x: Node, axis: int, known: dict[Node, int]) -> int:
    """Return the same, given that of sources of as many dimensions."""
    whole = x.shape[axis]
    if value_of(x) == 0 or x.size == 0:
        return 0
    ends = [known.get(s, whole) for s in x.src]
    if x.op == "update":
        starts, steps = x.attrs
        last = starts[axis] + steps[axis] * (x.src[1].shape[axis] - 1)
        return max(ends[0], starts[axis] + 1, last + 1)
    if x.op in _KEEP_ZEROS:
        return ends[0]
    if x.op in ("add", "subtract"):
        return max(ends)
    if x.op == "multiply":
        keep = [_keeps_zeros(s) for s in x.src[::-1]]
        return min([end for end, good in zip(ends, keep, strict=True) if good], default=whole)
    if x.op == "divide":
        return ends[0] if _keeps_zeros(x.src[1], divides=True) else whole
    if x.op == "concat":
        if x.attrs[0] != axis:
            return max(ends)
        start, end = 0, 0
        for part, one in zip(x.src, ends, strict=True):
            end = start + one if one else end
            start += part.shape[axis]
        return end
    return whole


def _keeps_zeros(x: Node, *, divides: bool = False) -> bool:
    """Tell whether 0 times ``x`` (or divided by it) is 0 everywhere, as far as that is known."""
    while x.op in ("broadcast", "reshape"):
        (x,) = x.src
    if any(n.op not in _COMPUTED for n in ir.topological([x])):
        return False
    with np.errstate(all="ignore"):
        (value,) = _interpret.run(Graph([], [x]), [], np)
    return bool(np.all(np.isfinite(value)) and not (divides and np.any(value == 0)))


# ------------------------------------------------------------------------------- what replaces


def _parts(node: Node, n_modes: int) -> tuple[int, bool] | None:
    """Return how many frequencies to take, and whether they are added up; None to leave it."""
    axes, lengths, norm = node.attrs
    real = node if node.op == "irfft" else node.src[0]
    shape = real.shape
    axis, n = axes[-1], lengths[-1]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if norm != "none" or not n_modes:
        return None
    rounded = modes.rounded(n_modes)
    if real.dtype == np.float32 and modes.fits(outer, n, inner, rounded):
        return rounded, True
    if inner == 1 and len(axes) > 1 and 4 * n_modes <= n:
        return n_modes, False
    return None


def _forward(node: Node, x: Node, n_modes: int) -> Node | None:
    found = _parts(node, n_modes)
    if found is None:
        return None
    n_modes, added_up = found
    axes, lengths, _ = node.attrs
    axis = axes[-1]
    shape = (*x.shape[:axis], n_modes, *x.shape[axis + 1 :])
    if added_up:
        low = _called(modes.rfft_low, x, axis, {"n_modes": n_modes}, np.complex64, shape)
    else:
        low = _first(ir.transform("rfft", x, axes[-1:], lengths[-1:], "none"), axis, n_modes)
    if len(axes) > 1:
        low = ir.transform("fft", low, axes[:-1], lengths[:-1], "none")
    zeros = filled(0, node.dtype, node.shape)
    return ir.update(zeros, low, (0,) * node.ndim, (1,) * node.ndim)


def _back(node: Node, x: Node, n_modes: int) -> Node | None:
    found = _parts(node, n_modes)
    if found is None:
        return None
    n_modes, added_up = found
    axes, lengths, _ = node.attrs
    axis, n = axes[-1], lengths[-1]
    low = _first(x, axis, n_modes)
    if len(axes) > 1:
        low = ir.transform("ifft", low, axes[:-1], lengths[:-1], "none")
    if added_up:
        return _called(modes.irfft_low, low, axis, {"n": n}, np.float32, node.shape)
    whole = filled(0, low.dtype, (*low.shape[:axis], n // 2 + 1, *low.shape[axis + 1 :]))
    whole = ir.update(whole, low, (0,) * low.ndim, (1,) * low.ndim)
    return ir.transform("irfft", whole, axes[-1:], lengths[-1:], "none")


def _first(x: Node, axis: int, n: int) -> Node:
    lengths = (*x.shape[:axis], n, *x.shape[axis + 1 :])
    return ir.slice_node(x, (0,) * x.ndim, (1,) * x.ndim, lengths)


def _called(
    function: Callable, x: Node, axis: int, options: dict, dtype: type, shape: tuple[int, ...]
) -> Node:
    """Return the call of a function along the middle axis of three."""

    def folded(shape: tuple[int, ...]) -> tuple[int, int, int]:
        return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])

    flat = ir.reshape(x, folded(x.shape))
    results = [(np.dtype(dtype), folded(shape))]
    (out,) = ir.call(function, (flat,), tuple(options.items()), results)
    return ir.reshape(out, shape)
