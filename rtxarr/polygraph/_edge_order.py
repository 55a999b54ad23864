"""Values of edges in the order of the edges' numbers, and in that in which a graph stores them.

Kernels over the edges of rows take edges as they are stored. What was computed elementwise of edges
by number is therefore written down again, of values as they are stored: no array of edges is made
only to be read in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._elementwise import as_array
from rtxarr.polygraph._ir import Node
from rtxarr.polygraph._trace import current

_MOST = 64  # nodes that are written down again


class _Known(NamedTuple):
    """What a node of edges by number is made of.

    ``node`` has the values as ``graph`` stores them ("stored"), or those of the edges' nodes in it
    ("dst", "src").
    """

    node: Node
    graph: Any
    kind: str


def by_number(stored: Node, graph: Any) -> Node:
    """Return values of stored edges in the order of their numbers."""
    out = ir.gather(stored, as_array(graph._places()).node, 0)
    current().notes["edges", out] = _Known(stored, graph, "stored")
    return out


def of_rows(x: Node, graph: Any) -> Node:
    """Return, for each stored edge, the row of its destination."""
    return ir.spread(x, as_array(graph.indptr).node, graph.n_edges)


def of_sources(x: Node, graph: Any) -> Node:
    """Return, for each stored edge, the row of its source."""
    return ir.gather(x, as_array(graph.indices).node, 0)


def rows_by_number(x: Node, graph: Any) -> Node:
    """Return the row of each edge's destination, in the order of the edges' numbers."""
    out = of_rows(x, graph) if graph.is_ordered else ir.gather(x, as_array(graph.dst).node, 0)
    current().notes["edges", out] = _Known(x, graph, "dst")
    return out


def as_stored(values: Node, graph: Any) -> Node:
    """Return values of edges, given by number, in the order in which a graph stores them."""
    parts = _elementwise(values)
    known = {n: found for n in parts if (found := _known(n, graph)) is not None}
    if not known:
        return _gathered(values, graph)
    # What is stored by the graph turned round is put into order once, at the end.
    stored = [k.graph for k in known.values() if k.kind == "stored"]
    if "T" in graph.__dict__ and graph.T.is_ordered and not all(n in known for n in _leaves(parts)):
        stored.append(graph.T)  # whose numbers are its places
    turned = bool(stored) and not any(_same(g, graph) for g in stored)
    side = graph.T if turned else graph
    out = _written(parts, known, side)[values]
    return ir.gather(out, _places_in(graph.T, graph), 0) if turned else out


def _same(a: Any, b: Any) -> bool:
    """Tell whether two graphs store the same edges in the same order."""
    return a._edge_ids is b._edge_ids and a.indices is b.indices


def _known(node: Node, graph: Any) -> _Known | None:
    """Return what is known of a node that has to do with this graph."""
    found = current().notes.get(("edges", node))
    sides = [graph, graph.__dict__["T"]] if "T" in graph.__dict__ else [graph]
    if found is not None:
        return found if any(_same(found.graph, side) for side in sides) else None
    if node.op == "gather" and node.attrs == (0,) and node.src[1].op == "input":
        x, index = node.src
        for kind, n_nodes in (("dst", graph.n_dst), ("src", graph.n_src)):
            known = graph.__dict__.get(kind) if x.shape[0] == n_nodes else None
            if known is not None and as_array(known).node is index:
                return _Known(x, graph, kind)
    return None


def _elementwise(values: Node) -> list[Node]:
    """Return what a node is computed of, edge by edge, sources first; it alone if that is much."""
    n_edges = values.shape[0]
    order: dict[Node, None] = {}
    waiting = [values]
    while waiting:
        node = waiting[-1]
        new = [s for s in _sources(node, n_edges) if s not in order]
        if new:
            waiting += new
            continue
        order[waiting.pop()] = None
        if len(order) + len(waiting) > _MOST:
            return [values]
    return [*order]


def _sources(node: Node, n_edges: int) -> tuple[Node, ...]:
    """Return the sources of a node that has for each edge what they have."""
    if ("edges", node) in current().notes:
        return ()
    if node.op in ir.MAPS or node.op == "cast":
        return node.src
    if node.op in ("reshape", "broadcast") and node.src[0].shape[:1] == (n_edges,):
        return node.src
    return ()


def _leaves(parts: list[Node]) -> list[Node]:
    """Return the parts that are computed otherwise than edge by edge, but for constants."""
    n_edges = parts[-1].shape[0]
    return [n for n in parts if not _sources(n, n_edges) and not _is_same(n)]


def _is_same(node: Node) -> bool:
    """Tell whether a node has the same for all edges."""
    return node.op == "broadcast" and node.src[0].shape[0] == 1


def _written(parts: list[Node], known: dict[Node, _Known], graph: Any) -> dict[Node, Node]:
    """Return for each part its values as ``graph`` stores them."""
    n_edges, out = parts[-1].shape[0], dict[Node, Node]()
    for node in parts:
        sources = [out[s] for s in _sources(node, n_edges)]
        if node in known:
            out[node] = _of_known(node, known[node], graph)
        elif sources:
            out[node] = _again(node)(*sources)
        elif _is_same(node):
            out[node] = node
        else:
            out[node] = _gathered(node, graph)
    return out


def _again(node: Node) -> Callable[..., Node]:
    """Return what makes a node like this one of other sources."""
    if node.op == "cast":
        return lambda x: ir.cast(x, node.dtype)
    if node.op == "reshape":
        return lambda x: ir.reshape(x, node.shape)
    if node.op == "broadcast":
        return lambda x: ir.broadcast(x, node.shape)
    return lambda *sources: ir.map_node(node.op, *sources)


def _of_known(node: Node, known: _Known, graph: Any) -> Node:
    is_same = _same(known.graph, graph)
    if known.kind == "stored":
        if is_same:
            return known.node
        return ir.gather(known.node, _places_in(known.graph, graph), 0)
    make = of_rows if (known.kind == "dst") == is_same else of_sources
    return make(known.node, graph)


def _gathered(values: Node, graph: Any) -> Node:
    return values if graph.is_ordered else ir.gather(values, as_array(graph._edge_ids).node, 0)


def _places_in(graph: Any, turned: Any) -> Node:
    """Return where ``graph`` stores each edge of ``turned``, which is ``graph`` turned round."""

    def find():
        from rtxarr._device import namespace

        if graph.is_ordered:
            return turned.edge_ids
        places = graph._places()
        return namespace(places).take(places, turned.edge_ids, axis=0)

    return as_array(turned.once("turned places", find)).node
