"""Transforms along axes that are not the last in memory: what is moved for them, in the graph.

``libs.fft`` moves such axes to the end in a copy. As nodes of the graph, the move before the
transform is done by the kernel that stores what is transformed, and the one after it by those that
read the result. The plans are the same, and so are the bits.
"""

from __future__ import annotations

from rtxarr.libs._fft_plans import inverse, kept_axes, passes
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Graph, Node


def move_axes(graph: Graph) -> Graph:
    """Return the graph with transforms along the last axes, where one plan does."""
    nodes = graph.nodes()
    if not any(n.op in ir.TRANSFORMS for n in nodes):
        return graph

    def rule(node: Node, sources: list[Node]) -> Node:
        found = _moved(node, sources[0]) if node.op in ir.TRANSFORMS else None
        return found or ir.make(node.op, sources, node.attrs, node.dtype, node.shape)

    return graph.rewritten(rule)


def _moved(node: Node, x: Node) -> Node | None:
    axes, lengths, norm = node.attrs
    if node.op in ("rfft", "irfft") and lengths[-1] == 1:
        return None
    long = kept_axes(x.shape)
    pairs = [(n, long.index(a)) for n, a in zip(lengths, axes, strict=True) if n > 1]
    shape = [x.shape[a] for a in long]
    plans = passes(f"{node.op}n", shape, [n for n, _ in pairs], [a for _, a in pairs])
    if len(plans) != 1 or plans[0].order is None:
        return None
    order = *(i for i in range(x.ndim) if i not in long), *(long[i] for i in plans[0].order)
    moved = ir.permute(x, order)
    out = ir.transform(node.op, moved, [order.index(a) for a in axes], lengths, norm)
    return ir.permute(out, inverse(order))
