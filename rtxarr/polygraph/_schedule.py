"""Which nodes share a kernel.

Nodes are taken from the outputs backwards. Each joins the kernel that uses it, unless several do or
it does not fit in; then its result is kept in memory and a kernel of its own begins, or one of its
users stores it on the way. What decides is *places*: for each node of a kernel, the index at which
it is needed, as an expression of the kernel's counters. A view changes the place and nothing else.
A reduction fits in when all places at which its result is needed are that of the kernel's row.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._index import Expr
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._scans import is_backwards, why_not_scanned

# Beyond these a kernel is cut: registers and parameters are finite.
_MAX_MEMBERS = 160
_MAX_BUFFERS = 40

# A node needed at a place of more terms than this is kept: reshapes and transposes that do not fit
# one another make places that grow by a factor with each.
_MAX_TERMS = 100

# A node needed at several places of a kernel is computed for each if it is as cheap as this. One
# needed by several kernels is computed in each, if that reads hardly more than its result would be.
_MAX_PLACES_COST, _MAX_USERS_COST = 4, 12

# So many reductions of the same rows leave on-chip memory to scans.
_MAX_REDUCTIONS = 16

# Fewer rows than this, each longer, are reduced in two stages: nothing may follow in the kernel.
FEW_ROWS, LONG_ROW = 64, 8192

_ARITHMETIC = """
    cast positive negative abs add subtract multiply maximum minimum where equal not_equal less
    less_equal greater greater_equal logical_and logical_or logical_not bitwise_and bitwise_or
    bitwise_xor bitwise_invert conj real imag
"""
_CHEAP = frozenset(_ARITHMETIC.split())
_LEAVES = ("input", "constant", "iota")
_REDUCTIONS = frozenset((*ir.REDUCES, "segment_reduce"))
# What makes rows of a kernel that has none.
_OF_ROWS = frozenset((*_REDUCTIONS, *ir.SCANS, "spread"))
_POINTWISE = frozenset((*ir.MAPS, "cast", *ir.VIEWS, "concat", "update", "gather", "take_along"))


class Space(NamedTuple):
    """What a kernel with a reduction goes over; see ``_loops``.

    ``full`` is the place of an element of what is reduced, ``row`` that of a result. ``counter`` is
    what the counter ``i`` of a kernel without rows becomes when it gets them.
    """

    kind: str
    rows: int
    cols: int
    full: Expr
    row: Expr
    features: int = 1
    indptr: Node | None = None
    counter: Expr = ix.ZERO


# Of a node that the interpreter runs.
EAGER = Space("eager", 1, 1, ix.ZERO, ix.ZERO)


@dataclass(eq=False)
class Group:
    """Nodes that one kernel computes, or (``kind`` "eager") a node that the interpreter runs.

    Attributes
    ----------
    space : Space
        Of kind "map", "rows", "columns" or "segments", or "eager".
    outputs : dict of Node to Expr
        What it leaves in memory, and the place of each.
    need : dict of Node to set of Expr
        All nodes that it computes or reads, and where.
    members : set of Node
        Those that it computes.
    pieces : dict of Node to list of (Expr, Node)
        Of a "concat" that it leaves in memory part by part: where each goes, all read at ``row``.
    """

    space: Space
    outputs: dict[Node, Expr] = field(default_factory=dict)
    need: dict[Node, set[Expr]] = field(default_factory=dict)
    members: set[Node] = field(default_factory=set)
    pieces: dict[Node, list[tuple[Expr, Node]]] = field(default_factory=dict)

    kind = property(lambda self: self.space.kind)
    rows = property(lambda self: self.space.rows)
    cols = property(lambda self: self.space.cols)
    full = property(lambda self: self.space.full)
    row = property(lambda self: self.space.row)

    @property
    def read(self) -> list[Node]:
        """Nodes that it takes from memory."""
        return [n for n in self.need if n not in self.members]


def _extent(place: Expr) -> int:
    """Return how many elements a place runs over."""
    return place.bounds[1] + 1


def is_pointwise(node: Node, backend: Any) -> bool:
    if node.op in ir.MAPS or node.op == "cast":
        kinds = {s.dtype for s in node.src} | {node.dtype}
        return all(backend.fuses(node.op, dtype) for dtype in kinds)
    if node.op == "spread":
        return _has_edges(node.shape[0]) and backend.fuses("segment_reduce", node.dtype)
    return node.op in _POINTWISE and backend.fuses("cast", node.dtype)  # there is such a type


def is_reduction(node: Node, backend: Any) -> bool:
    if node.op == "segment_reduce" and not _has_edges(node.src[0].shape[0]):
        return False
    return node.op in _REDUCTIONS and backend.fuses(node.op, node.src[0].dtype)


def _has_edges(n: int) -> bool:
    """Tell whether a counter of edges can be told from none, as places of edges must."""
    return n > 1


def sources_at(node: Node, place: Expr, loaded: Any) -> list[tuple[Node, Expr]]:
    """Return where the sources of a pointwise node are needed for its element at ``place``.

    ``loaded(index, place)`` gives the expression for an element of an array of indices.
    """
    op = node.op
    if op in ir.MAPS or op == "cast":
        return [(s, place) for s in node.src]
    if op in ir.VIEWS:
        return [(node.src[0], view_place(node, place))]
    if op == "spread":
        _, feature = edge_and_feature(node, place)
        return [(node.src[0], ix.add(ix.mul(row_of_edge(node), width(node)), feature))]
    axes = ix.unravel(place, node.shape)
    if op == "concat":
        (axis,) = node.attrs
        found, start = [], 0
        for part in node.src:
            at = ix.assumed(ix.add(axes[axis], ix.number(-start)), part.shape[axis])
            moved = (*axes[:axis], at, *axes[axis + 1 :])
            found.append((part, ix.ravel(moved, part.shape)))
            start += part.shape[axis]
        return found
    if op == "update":
        x, value = node.src
        starts, steps = node.attrs
        apart = [
            ix.floordiv(ix.mul(ix.add(a, ix.number(-start)), 1 if step > 0 else -1), abs(step))
            for a, start, step in zip(axes, starts, steps, strict=True)
        ]
        moved = tuple(ix.assumed(a, n) for a, n in zip(apart, value.shape, strict=True))
        return [(x, place), (value, ix.ravel(moved, value.shape))]
    x, index = node.src
    (axis,) = node.attrs
    if op == "gather":
        after = axis + index.ndim
        at = ix.ravel(axes[axis:after], index.shape)
        moved = (*axes[:axis], loaded(index, at), *axes[after:])
    else:
        at = place
        moved = (*axes[:axis], loaded(index, at), *axes[axis + 1 :])
    return [(x, ix.ravel(moved, x.shape)), (index, at)]


def view_place(node: Node, place: Expr) -> Expr:
    """Return where a view's source is read for the view's element at ``place``."""
    (x,) = node.src
    if node.op == "reshape":
        return place
    axes = ix.unravel(place, node.shape)
    if node.op == "broadcast":
        moved = [ix.ZERO if n == 1 else a for a, n in zip(axes, x.shape, strict=True)]
    elif node.op == "permute":
        (order,) = node.attrs
        moved = [axes[order.index(i)] for i in range(x.ndim)]
    else:
        starts, steps = node.attrs
        moved = [
            ix.add(ix.mul(a, step), ix.number(start))
            for a, start, step in zip(axes, starts, steps, strict=True)
        ]
    return ix.ravel(moved, x.shape)


def width(node: Node) -> int:
    """Return the elements of an edge or row."""
    return math.prod(node.shape[1:])


def edge_and_feature(node: Node, place: Expr) -> tuple[Expr, Expr]:
    """Return the two coordinates of a place in an array of edges or rows."""
    edge, feature = ix.unravel(place, (node.shape[0], width(node)))
    return edge, feature


def row_of_edge(node: Node) -> Expr:
    return ix.symbol("r", node.src[1].shape[0] - 1)


def reduction_space(node: Node) -> Space:
    """Return the space of a kernel made for a reduction."""
    shape = node.src[0].shape
    if node.op == "segment_reduce":
        return segment_space(node.src[1], shape[0], width(node))
    (axes,) = node.attrs
    kept = [i for i in range(len(shape)) if i not in axes]
    rows, cols = (math.prod(shape[i] for i in part) for part in (kept, axes))
    r, c = ix.symbol("r", rows), ix.symbol("c", cols)
    at = dict(zip(kept, ix.unravel(r, [shape[i] for i in kept]), strict=True))
    at |= dict(zip(axes, ix.unravel(c, [shape[i] for i in axes]), strict=True))
    full = ix.ravel([at[i] for i in range(len(shape))], shape)
    last = max((i for i, n in enumerate(shape) if n > 1), default=None)
    kind = "rows" if last is None or last in axes else "columns"
    return Space(kind, rows, cols, full, r)


def scan_space(node: Node) -> Space:
    """Return the space of a kernel made for a scan along the last axis that is long."""
    (axis,) = node.attrs
    cols = node.shape[axis]
    r, c = ix.symbol("r", node.size // cols), ix.symbol("c", cols)
    return Space("rows", node.size // cols, cols, ix.add(ix.mul(r, cols), c), r)


def turned(space: Space) -> Expr:
    """Return the place of a row's element, counted from its end."""
    last = ix.number(space.cols - 1)
    c = ix.symbol("c", space.cols)
    return ix.add(ix.mul(space.row, space.cols), last, ix.mul(c, -1))


def reduced_edge(node: Node, place: Expr) -> Expr:
    """Return where a segment reduction reads edge ``c`` for its result at ``place``."""
    values = node.src[0]
    _, feature = edge_and_feature(node, place)
    return ix.add(ix.mul(ix.symbol("c", values.shape[0]), width(node)), feature)


def segment_space(indptr: Node, n_edges: int, features: int) -> Space:
    """Return the space of a kernel over the edges of each row, with so many features."""
    n_rows = indptr.shape[0] - 1
    r, c, f = ix.symbol("r", n_rows), ix.symbol("c", n_edges), ix.symbol("f", features)
    full, row = (ix.add(ix.mul(at, features), f) for at in (c, r))
    return Space("segments", n_rows, n_edges, full, row, features, indptr)


def _scans_of(group: Group) -> list[Node]:
    return [n for n in group.need if n.op in ir.SCANS and n in group.members]


class Scheduler:
    """Makes the groups of a graph; ``why`` collects, for each kept node, why it is kept."""

    def __init__(
        self, graph: Graph, backend: Any, strides: Mapping[Node, tuple[int, ...]] | None = None
    ) -> None:
        self.graph = graph
        self.backend = backend
        self.strides = strides or {}  # of inputs that are not contiguous
        self.order = {node: i for i, node in enumerate(graph.nodes())}
        self.groups: list[Group] = []
        self.owner: dict[Node, Group] = {}  # of each node that is kept in memory
        self.users: dict[Node, list[Group]] = {n: [] for n in self.order}
        self.kept: set[Node] = {n for n in graph.roots if n.op not in _LEAVES}
        self.why: dict[Node, str] = dict.fromkeys(self.kept, "result")
        self._memories: dict[Node, Node] = {}  # what _memory has found
        self._loaded: dict[tuple[Node, Expr], Expr] = {}

    def run(self) -> list[Group]:
        for node in reversed(self.order):
            if node.op not in _LEAVES:
                self._place(node)
        self._merge_siblings()
        return self._sorted()

    # ------------------------------------------------------------------ one node at a time

    def _place(self, node: Node) -> None:
        users = self.users[node]
        if not users and node not in self.kept:
            return
        pointwise = is_pointwise(node, self.backend)
        if not pointwise and not self._fuses(node):
            self._eager(node)
            if node.op in ir.SCANS:
                self.why[node] = f"a call: {self._scan_refusal([node])}"
            return
        if node in self.kept and node.op in ir.VIEWS and self._view_is_free(node):
            self._eager(node)
            for group in users:
                self._try(node, group)  # else it reads the view's memory
            return
        if node not in self.kept:
            if len(users) == 1 or (pointwise and self._is_cheaper_again(node, users)):
                refusals = [why for g in users if (why := self._refusal(node, g))]
                if not refusals:
                    for group in users:
                        self._join(node, group)
                    return
                self.why[node] = refusals[0]
            else:
                self.why[node] = f"used by {len(users)} kernels"
            self.kept.add(node)
        self._keep(node, users)

    def _view_is_free(self, node: Node) -> bool:
        if node.op == "permute" and self._is_for_transforms(node):
            base = ir.behind_views(node.src[0], self.kept)
            return base.op in _LEAVES or base in self.kept or not self._fuses(base)
        if node.op in ("reshape", "permute"):
            return True
        x = ir.behind_views(node.src[0], self.kept)
        return x.op == "input" or x in self.kept or not self._fuses(x)

    def _is_for_transforms(self, node: Node) -> bool:
        """Tell whether all that reads a node are transforms, which take it in its own order."""
        readers = [
            n for g in self.users[node] for n in (g.outputs if g.kind == "eager" else (node,))
        ]
        for_transforms = bool(readers) and all(n.op in ir.TRANSFORMS for n in readers)
        return for_transforms and node not in self.graph.roots

    def _fuses(self, node: Node) -> bool:
        if node.op in ir.SCANS:
            return not self._scan_refusal([node])
        return is_pointwise(node, self.backend) or is_reduction(node, self.backend)

    def _scan_refusal(self, scans: Collection[Node]) -> str:
        """Return why one kernel cannot contain all of these scans of the same rows; "" if it can.

        The back end has the last word.
        """
        for node in scans:
            if why := why_not_scanned(node, self.strides):
                return why
        refusal = getattr(self.backend, "scan_refusal", None)
        if refusal is None:
            return "the back end has no scans"
        space = scan_space(next(iter(scans)))
        kinds = sorted((n.op, n.dtype) for n in scans)
        return refusal(kinds, space.rows, space.cols)

    def _eager(self, node: Node) -> None:
        """Let the interpreter run a node, on arrays in memory."""
        group = Group(EAGER, outputs={node: ix.ZERO}, members={node}, need={node: set()})
        self.groups.append(group)
        self.owner[node] = group
        for source in node.src:
            self._request(source, group, None)
            if source.op not in _LEAVES:
                self.kept.add(source)
                self.why.setdefault(source, f"read by {node.op}")

    def _request(self, node: Node, group: Group, place: Expr | None) -> None:
        if node not in group.need:
            group.need[node] = set()
            self.users[node].append(group)
        if place is not None:
            group.need[node].add(place)

    def _keep(self, node: Node, users: list[Group]) -> None:
        """Store a node's result: on the way in a kernel that computes it, or by a new one."""
        for group in users:
            if group.kind == "eager" or self._refusal(node, group):
                continue
            others = [g for g in users if g is not group]
            if self._own_place(node, group) is None or self._reaches(group, others):
                continue
            self._join(node, group)  # which may give the kernel rows, and move places
            (moved,) = {group.row} if node.op in _REDUCTIONS else group.need[node]
            group.outputs[node] = moved
            self.owner[node] = group
            return
        if node.op == "concat" and (space := self._space_of_parts(node)) is not None:
            self._keep_parts(node, space)
            return
        if node.op in _REDUCTIONS:
            group = Group(reduction_space(node))
            place = group.row
        elif node.op in ir.SCANS:
            group = Group(scan_space(node))
            place = self._scan_place(node, group.space)
        else:
            place = ix.symbol("i", node.size)
            group = Group(Space("map", 1, node.size, place, ix.ZERO))
        group.outputs[node] = place
        self.groups.append(group)
        self.owner[node] = group
        group.need[node] = {place}
        self._join(node, group)

    def _space_of_parts(self, node: Node) -> Space | None:
        """Return the space of a kernel over edges that can write all parts of a "concat".

        One of them is made of a reduction, and all are as wide as it is.
        """
        (axis,) = node.attrs
        shapes = {part.shape for part in node.src}
        if axis == 0 or len(shapes) > 1:
            return None
        stack = [*node.src]
        while stack:
            n = stack.pop()
            if n in self.kept or self.users[n] or n.size != node.src[0].size:
                continue
            if n.op == "segment_reduce":
                if n.shape[0] == node.shape[0] and is_reduction(n, self.backend):
                    return reduction_space(n)
            elif n.op in ir.MAPS or n.op in ("cast", "reshape"):
                stack += n.src
        return None

    def _keep_parts(self, node: Node, space: Space) -> None:
        """Store a "concat" by a kernel over edges, part by part."""
        (axis,) = node.attrs
        group = Group(space, members={node})
        for k, part in enumerate(node.src):
            axes = list(ix.unravel(space.row, part.shape))
            axes[axis] = ix.add(axes[axis], ix.number(k * part.shape[axis]))
            group.pieces.setdefault(node, []).append((ix.ravel(axes, node.shape), part))
            self._request(part, group, space.row)
        group.outputs[node], _ = group.pieces[node][0]
        group.need[node] = {group.outputs[node]}
        assert space.indptr is not None
        self._request(space.indptr, group, None)
        self.groups.append(group)
        self.owner[node] = group

    def _own_place(self, node: Node, group: Group) -> Expr | None:
        """Return the place of a node if it is that of the kernel's elements or rows."""
        space = group.space
        if node.op in _REDUCTIONS:  # it fits, so its place is that of a row
            whole = node.op != "segment_reduce" or (group.need[node] == {space.row})
            return space.row if whole else None
        places = group.need[node]
        if len(places) != 1:
            return None
        (place,) = places
        if node.op in ir.SCANS:  # the same holds
            return place
        if place == space.full and node.size == _extent(space.full):
            return place
        if space.kind != "map" and place == space.row and node.size == _extent(space.row):
            return place
        return None

    # ------------------------------------------------------------------------- fitting in

    def _try(self, node: Node, group: Group) -> bool:
        if self._refusal(node, group):
            return False
        self._join(node, group)
        return True

    def _refusal(self, node: Node, group: Group) -> str:
        """Return why a node cannot be computed inside a kernel that uses it; "" if it can."""
        if group.kind == "eager":
            return f"read by {next(iter(group.outputs)).op}"
        if len(group.members) >= _MAX_MEMBERS or len(group.read) >= _MAX_BUFFERS:
            return "the kernel is full"
        if node.op in _OF_ROWS:
            if node.op in _REDUCTIONS and self._is_full_of_scans(group):
                return "the kernel is full"
            return "" if self._fitting_space(node, group) else self._misfit(node, group)
        places = group.need[node]
        if len(places) > 1 and self._below(node)[0] > _MAX_PLACES_COST:
            return f"needed at {len(places)} places of one kernel"
        if any(ix.length(place) > _MAX_TERMS for place in places):
            return "where it is needed is too long to say"
        return ""

    def _misfit(self, node: Node, group: Group) -> str:
        if len(group.need[node]) > 1:
            return f"{node.op} is needed at several places"
        if node.op in ir.SCANS and (why := self._scan_refusal({node, *_scans_of(group)})):
            return why
        if group.kind == "map":
            (place,) = group.need[node]
            if node.op in ("segment_reduce", "spread") and ix.has_assumptions(place):
                return f"{node.op} is a part of what its user makes"
            return f"{node.op} is over other rows than those of its user"
        return f"{node.op} is over other rows than the kernel's ({group.rows} x {group.cols})"

    def _is_cheaper_again(self, node: Node, users: list[Group]) -> bool:
        """Tell whether to compute a node in each of its users rather than to keep it."""
        cost, read = self._below(node)
        return cost <= _MAX_USERS_COST and all(len(read - g.need.keys()) <= 1 for g in users)

    def _below(self, node: Node) -> tuple[int, set[Node]]:
        """Return the cost of computing a node from memory, and the arrays of its size there.

        What is smaller than the node is of a row, and costs little.
        """
        seen: set[Node] = set()
        read: set[Node] = set()
        stack, cost = [node], 0
        while stack and cost <= _MAX_USERS_COST:
            if len(seen) > _MAX_MEMBERS:  # of views, which cost nothing
                return _MAX_USERS_COST + 1, read
            n = stack.pop()
            if n in seen or n.size < node.size or n.op in ("constant", "iota"):
                continue
            seen.add(n)
            in_memory = n.op == "input" or (n in self.kept and n is not node)
            if in_memory or not is_pointwise(n, self.backend):
                read.add(n)
                continue
            cost += 0 if n.op in ir.VIEWS else 1 if n.op in _CHEAP or n.op not in ir.MAPS else 4
            stack.extend(n.src)
        return cost, read

    def _fitting_space(self, node: Node, group: Group) -> Space | None:
        """Return the space in which ``group`` can compute the reduction ``node``, if it can."""
        if node.op in ("segment_reduce", "spread"):
            return self._fitting_segments(node, group)
        if node.op in ir.SCANS:
            return self._fitting_scan(node, group)
        space = reduction_space(node)
        rows, cols, needed = space.rows, space.cols, group.need[node]
        long_rows = rows < FEW_ROWS and cols > LONG_ROW
        if group.kind != "map":
            fits = space == group.space and needed == {space.row}
            is_split = long_rows and not _scans_of(group)
            return space if fits and not (is_split and self._feeds(node, group)) else None
        counters = []
        if rows * cols == group.cols and cols > 1 and not long_rows:
            counters.append(space.full)
        if rows == group.cols:
            counters.append(space.row)
        for counter in counters:
            if self._moved(needed, counter) == {space.row}:
                return space._replace(counter=counter)
        return None

    def _scan_place(self, node: Node, space: Space) -> Expr:
        """Return where a kernel needs a scan whose rows are the kernel's."""
        return turned(space) if is_backwards(node, self.strides) else space.full

    def _fitting_scan(self, node: Node, group: Group) -> Space | None:
        """Return the same for a scan: its rows are the kernel's, in the order in which they lie."""
        space, needed = scan_space(node), group.need[node]
        place = self._scan_place(node, space)
        if self._scan_refusal({node, *_scans_of(group)}):
            return None
        if group.kind != "map":
            return space if space == group.space and needed == {place} else None
        for counter in (space.full, turned(space)):
            if node.size == group.cols and self._moved(needed, counter) == {place}:
                return space._replace(counter=counter)
        return None

    def _is_full_of_scans(self, group: Group) -> bool:
        """Tell whether a kernel with scans has no room for another reduction."""
        count = sum(n.op in _REDUCTIONS for n in group.members)
        return count >= _MAX_REDUCTIONS and bool(_scans_of(group))

    def _fitting_segments(self, node: Node, group: Group) -> Space | None:
        """Return the same for a reduction of edges, or for what gives edges the row's values.

        Several features may need one element: that of an attention head, say. A kernel does not
        begin with what only some features need: the others would go over the edges for nothing.
        """
        indptr = node.src[1]
        n_rows, spreads = indptr.shape[0] - 1, node.op == "spread"
        n_edges = node.shape[0] if spreads else node.src[0].shape[0]
        space = group.space
        if space.kind == "map":
            features, rest = divmod(space.cols, n_edges if spreads else n_rows)
            if rest:
                return None
            space = segment_space(indptr, n_edges, features)
            space = space._replace(counter=space.full if spreads else space.row)
        elif space.indptr is not indptr or space.cols != n_edges:
            return None
        places = group.need[node]
        if group.kind == "map":
            places = self._moved(places, space.counter)
        if len(places) != 1:
            return None
        at, feature = edge_and_feature(node, *places)
        if group.kind == "map" and ix.has_assumptions(feature):
            return None
        want = ix.symbol("c", n_edges) if spreads else ix.symbol("r", n_rows)
        return space if at == want and ix.names_in(feature) <= {"f"} else None

    def _feeds(self, node: Node, group: Group) -> bool:
        """Tell whether a kernel uses ``node`` before the end of its pass over the elements."""
        stack = [s for n in group.members if n.op in _REDUCTIONS for s in n.src]
        while stack:
            n = stack.pop()
            if n is node:
                return True
            if n in group.members:
                stack.extend(n.src)
        return False

    def _moved(self, places: Iterable[Expr], counter: Expr) -> set[Expr]:
        return {ix.substitute(p, "i", counter) for p in places}

    def _join(self, node: Node, group: Group) -> None:
        """Let a kernel compute a node, and ask for its sources at their places."""
        group.members.add(node)
        if node.op in _OF_ROWS:
            if group.kind == "map":
                self._give_rows(node, group)
            if group.space.indptr is not None:
                self._request(group.space.indptr, group, None)
        if node.op in ir.REDUCES:
            self._request(node.src[0], group, group.full)
        elif node.op in ir.SCANS:
            (place,) = group.need[node]
            self._request(node.src[0], group, place)
        elif node.op == "segment_reduce":
            (place,) = group.need[node]
            self._request(node.src[0], group, reduced_edge(node, place))
        else:
            for place in sorted(group.need[node], key=repr):
                for source, at in sources_at(node, place, self.loaded):
                    self._request(source, group, at)

    def _give_rows(self, node: Node, group: Group) -> None:
        space = self._fitting_space(node, group)
        if space is None:
            raise AssertionError("a reduction joins a kernel that it fits into")
        group.space = space._replace(counter=ix.ZERO)
        for n, places in group.need.items():
            group.need[n] = self._moved(places, space.counter)
        group.outputs = {
            n: ix.substitute(place, "i", space.counter) for n, place in group.outputs.items()
        }

    def loaded(self, index: Node, place: Expr) -> Expr:
        """Return the expression for an element of an array of indices."""
        key = index, place
        if key not in self._loaded:
            name = f"{self.order[index]}[{len(self._loaded)}]"
            self._loaded[key] = ix.loaded(name, 2**62)
        return self._loaded[key]

    # ------------------------------------------------------------------ between the groups

    def _sources(self, group: Group) -> list[Group]:
        return [self.owner[n] for n in group.read if n in self.owner]

    def _reaches(self, group: Group, others: list[Group]) -> bool:
        """Tell whether a group needs, over any number of steps, what one of the others gives."""
        if not others:
            return False
        targets = set(map(id, others))
        seen: set[int] = set()
        stack = [group]
        while stack:
            g = stack.pop()
            for n in g.need:
                source = self.owner.get(n)
                if source is None or id(source) in seen or n in g.members:
                    continue
                if id(source) in targets:
                    return True
                seen.add(id(source))
                stack.append(source)
        return False

    def _merge_siblings(self) -> None:
        """Let kernels over the same elements that read the same memory be one."""
        left: list[Group] = []
        readers: dict[tuple, dict[Node, set[int]]] = {}  # by space: who of ``left`` reads a node
        bits = {id(g): 1 << k for k, g in enumerate(self.groups)}
        below = self._needed(bits)
        above = {i for i, needed in below.items() if needed}
        for group in list(self.groups):
            if group.kind == "eager":
                continue
            of_space = readers.setdefault(group.space, {})
            arrays = [n for n in group.read if n.ndim and n.op not in _LEAVES[1:]]
            for i in sorted(set().union(*(of_space.get(n, ()) for n in arrays))):
                a, b = id(group), id(left[i])
                if below[a] & bits[b] or below[b] & bits[a] or not self._siblings(group, left[i]):
                    continue
                self._merge(group, left[i])
                bits[b] |= bits[a]
                below[b] |= below[a]
                if below[b]:
                    above.add(b)
                for k in above:
                    if below[k] & bits[b]:
                        below[k] |= below[b] | bits[b]
                break
            else:
                i = len(left)
                left.append(group)
            for n in arrays:
                of_space.setdefault(n, set()).add(i)

    def _needed(self, bits: dict[int, int]) -> dict[int, int]:
        """Return for each group the bits of those that it needs, over any number of steps."""
        found: dict[int, int] = {}
        stack = [*self.groups]
        while stack:
            group = stack[-1]
            sources = [g for g in self._sources(group) if g is not group]
            missing = [g for g in sources if id(g) not in found]
            if id(group) not in found and missing:
                stack += missing
                continue
            stack.pop()
            of_all = (bits[id(g)] | found[id(g)] for g in sources)
            found[id(group)] = functools.reduce(operator.or_, of_all, 0)
        return found

    def _siblings(self, a: Group, b: Group) -> bool:
        """Tell whether two groups, neither of which needs the other, can be one."""
        if len(a.members) + len(b.members) > _MAX_MEMBERS + len(a.members & b.members):
            return False
        shared = set(a.read) & set(b.read)
        if not any(n.ndim and n.op not in _LEAVES[1:] for n in shared):
            return False
        if len({*a.read, *b.read}) > _MAX_BUFFERS:
            return False
        scans = {*_scans_of(a), *_scans_of(b)}
        if scans:
            reductions = [n for n in a.members | b.members if n.op in _REDUCTIONS]
            if len(reductions) > _MAX_REDUCTIONS or self._scan_refusal(scans):
                return False
        return a.kind == "map" or a.rows >= FEW_ROWS or a.cols <= LONG_ROW

    def _merge(self, group: Group, into: Group) -> None:
        into.outputs |= group.outputs
        into.members |= group.members
        into.pieces |= group.pieces
        for node, places in group.need.items():
            into.need.setdefault(node, set()).update(places)
        for node in group.outputs:
            self.owner[node] = into
        self.groups.remove(group)

    def _sorted(self) -> list[Group]:
        """Order the groups so that each comes after those that it reads from.

        Of those that can be next, one that lets go of no less memory than it takes comes first:
        a layer's gradients are made while what they need is there. Else it is the first of the
        graph.
        """
        readers: dict[Node, set[int]] = {}  # of memory that can be given back
        for group in self.groups:
            for node in map(self._memory, group.read):
                if node in self.owner and node not in self.kept_for_good:
                    readers.setdefault(node, set()).add(id(group))
        waiting = {id(g): {id(s) for s in self._sources(g)} for g in self.groups}
        users: dict[int, list[Group]] = {id(g): [] for g in self.groups}
        for group in self.groups:
            for source in waiting[id(group)]:
                users[source].append(group)
        position = {id(g): min(self.order[n] for n in g.outputs) for g in self.groups}
        by_id = {id(g): g for g in self.groups}

        sizes = {n: n.size * n.dtype.itemsize if n.dtype is not None else 0 for n in self.order}
        for node in self.order:
            if node.op == "item":
                sizes[node.src[0]] += sizes[node]

        def shrinks(group: Group) -> bool:  # once it does, it does until it is taken
            taken = sum(sizes[n] for n in group.outputs if self._memory(n) is n)
            read = {self._memory(n) for n in group.read}
            return taken <= sum(sizes[n] for n in read if readers.get(n) == {id(group)})

        ready: dict[int, Group] = {}  # by position, as the heaps
        heap: list[int] = []
        shrinking: list[int] = []
        found = [g for g in self.groups if not waiting[id(g)]]
        done: list[Group] = []
        while True:
            for group in found:
                if position[id(group)] not in ready:
                    ready[position[id(group)]] = group
                    heapq.heappush(heap, position[id(group)])
                if shrinks(group):
                    heapq.heappush(shrinking, position[id(group)])
            first = shrinking or heap
            if not first:
                return done
            number, found = heapq.heappop(first), []
            if number not in ready:  # taken from the other heap
                continue
            group = ready.pop(number)
            done.append(group)
            for node in map(self._memory, group.read):
                left = readers.get(node, set())
                left.discard(id(group))
                if len(left) == 1:
                    found += [by_id[i] for i in left if position[i] in ready]
            for user in users[id(group)]:
                waiting[id(user)].discard(id(group))
                if not waiting[id(user)]:
                    found.append(user)

    @functools.cached_property
    def kept_for_good(self) -> set[Node]:
        """What the program gives back, or writes."""
        return {self._memory(n) for n in self.graph.roots}

    def _memory(self, node: Node) -> Node:
        """Return the node in whose memory a node lies: that of which it is a view, or a call.

        It is asked when all groups are made.
        """
        views, passed = (*ir.VIEWS, "item"), []
        while node not in self._memories and node.op in views and node in self.owner:
            if self.owner[node].kind != "eager":
                break
            passed.append(node)
            (node,) = node.src
        node = self._memories.get(node, node)
        self._memories.update(dict.fromkeys(passed, node))
        return node
