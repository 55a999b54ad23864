"""Groups of nodes to loops: which statement runs where, and in which pass."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._index import Expr
from rtxarr.polygraph._ir import Node
from rtxarr.polygraph._loops import Accumulator, Buffer, Loops, Phase, Scan, Statement
from rtxarr.polygraph._schedule import Group, reduced_edge, sources_at, view_place

_BOOL = np.dtype(bool)

# Makes a value: asks for others by what they are of, and is sent their names.
_Making = Generator[tuple[Node, Expr, "str | None"], str, str]


def lower(group: Group, strides: Mapping[Node, tuple[int, ...]], scalars: frozenset[int]) -> Loops:
    """Return the loops of a group.

    Parameters
    ----------
    group : Group
        Any but of kind "eager".
    strides : mapping
        Of what it reads and is not contiguous, in elements.
    scalars : frozenset of int
        Inputs that are numbers.
    """
    return _Lowering(group, strides, scalars).run()


class _Lowering:
    def __init__(self, group, strides, scalars):
        self.group = group
        self.strides = strides
        self.scalars = scalars
        self.buffers: dict[Node, Buffer] = {}
        self.statements: dict[str, Statement] = {}  # in the order they were made
        self.names: dict[tuple, str] = {}  # from what a statement is to its name
        self.emitted: dict[tuple, str] = {}  # from (node, place, mask) to the name of its value
        self.depth: dict[str, int] = {}  # passes to be made before a value is known
        self.in_row: dict[str, bool] = {}  # it is the same for the whole row
        self.accumulators: dict[str, Accumulator] = {}
        self.scans: dict[str, Scan] = {}

    def run(self) -> Loops:
        space = self.group.space
        indptr = None if space.indptr is None else self._buffer(space.indptr)
        stores: list[tuple[Buffer, Expr, str]] = []
        for number, (node, place) in enumerate(self.group.outputs.items()):
            buffer = Buffer(f"out{number}", node.dtype, node, is_output=True)
            for to, part in self.group.pieces.get(node, [(place, node)]):
                at = self.group.row if node in self.group.pieces else place
                stores.append((buffer, to, self.emit(part, at, None)))
        outputs = [self._store(*store) for store in stores]
        buffers = (*self.buffers.values(), *dict.fromkeys(store[0] for store in stores))
        phases, before = self._phases(outputs)
        return Loops(
            space.kind, space.rows, space.cols, buffers, phases, before, space.features, indptr
        )

    # -------------------------------------------------------------------------- statements

    def _say(self, op: str, args: tuple, dtype: Any, depends: tuple[str, ...] = ()) -> str:
        """Return the name of the value of a statement, which is made if it is new."""
        args = tuple(ix.released(a) if isinstance(a, Expr) else a for a in args)
        key = op, args, dtype
        if key in self.names:
            return self.names[key]
        name = f"v{len(self.names)}"
        self.names[key] = name
        self.statements[name] = Statement(name, op, args, np.dtype(dtype))
        indexed = {n for arg in args if isinstance(arg, Expr) for n in ix.names_in(arg)}
        counters = indexed - self.in_row.keys()
        values = [*depends, *(indexed & self.in_row.keys())]
        self.depth[name] = max((self.depth[v] for v in values), default=0)
        rows_only = self.group.kind != "map" and "c" not in counters
        self.in_row[name] = rows_only and all(self.in_row[v] for v in values)
        return name

    def emit(self, node: Node, place: Expr, mask: str | None) -> str:
        """Return the name of the value of ``node`` at ``place``; anything where not ``mask``.

        Each is made once. What needs others first is a generator that yields what they are of, and
        waits in a list: no chain of nodes is too long.
        """
        known = self.emitted
        wanted = node, place, mask
        waiting = [(wanted, self._made(*wanted))]
        answer: Any = None
        while waiting:
            key, making = waiting[-1]
            try:
                asked = making.send(answer)
            except StopIteration as made:
                waiting.pop()
                answer = known[key] = made.value
                continue
            answer = known.get(asked)
            if answer is None:
                waiting.append((asked, self._made(*asked)))
        return known[wanted]

    def _made(self, node: Node, place: Expr, mask: str | None) -> _Making:
        if node.op == "constant" or (node.op == "input" and node.attrs[0] in self.scalars):
            return self._say("scalar", (self._buffer(node, is_scalar=True),), node.dtype)
        if node.op == "iota":
            (axis,) = node.attrs
            at = ix.unravel(place, node.shape)[axis]
            return self._say("index", (at,), node.dtype)
        if node not in self.group.members:
            return self._load(node, place, mask)
        if node.op in ir.REDUCES:
            return (yield from self._reduce(node, self.group.full))
        if node.op == "segment_reduce":
            return (yield from self._reduce(node, reduced_edge(node, place)))
        if node.op in ir.SCANS:
            return (yield from self._scan(node, place))
        if node.op == "spread":
            ((x, at),) = sources_at(node, place, None)
            return (yield x, at, mask)
        if node.op in ir.VIEWS:
            return (yield node.src[0], view_place(node, place), mask)
        if node.op == "concat":
            return (yield from self._concat(node, place, mask))
        if node.op == "update":
            return (yield from self._update(node, place, mask))
        if node.op in ("gather", "take_along"):
            _, (index, at) = sources_at(node, place, lambda *_: ix.ZERO)
            name = yield index, at, mask
            (x, at), _ = sources_at(node, place, lambda *_: ix.loaded(name, 2**62))
            return (yield x, at, mask)
        values = []
        for source in node.src:
            values.append((yield source, place, mask))
        return self._say(node.op, tuple(values), node.dtype, tuple(values))

    def _buffer(self, node: Node, *, is_scalar: bool = False) -> str:
        if node not in self.buffers:
            name = f"in{len(self.buffers)}"
            self.buffers[node] = Buffer(name, node.dtype, node, is_scalar=is_scalar)
        return self.buffers[node].name

    def _load(self, node: Node, place: Expr, mask: str | None) -> str:
        if node in self.strides:
            axes = ix.unravel(place, node.shape)
            steps = self.strides[node]
            place = ix.add(*(ix.mul(a, step) for a, step in zip(axes, steps, strict=True)))
        args = self._buffer(node), place, mask
        return self._say("load", args, node.dtype, () if mask is None else (mask,))

    def _store(self, buffer: Buffer, place: Expr, value: str) -> Statement:
        return Statement("", "store", (buffer.name, place, value), buffer.dtype)

    def _reduce(self, node: Node, place: Expr) -> _Making:
        key = "reduce", node
        if key in self.names:
            return self.names[key]
        of = yield node.src[0], place, None
        op = node.attrs[0] if node.op == "segment_reduce" else node.op
        name = self.names[key] = f"a{len(self.accumulators)}"
        self.accumulators[name] = Accumulator(name, op, of, node.src[0].dtype, node.dtype)
        self.depth[name] = self.depth[of] + 1
        self.in_row[name] = True
        return name

    def _scan(self, node: Node, place: Expr) -> _Making:
        key = "scan", node
        if key in self.names:
            return self.names[key]
        of = yield node.src[0], place, None
        name = self.names[key] = f"s{len(self.scans)}"
        op = node.op.removeprefix("cumulative_")
        self.scans[name] = Scan(name, op, of, node.dtype, place != self.group.full)
        self.statements[name] = Statement(name, "scanned", (), node.dtype)
        self.depth[name] = self.depth[of] + 1
        self.in_row[name] = False
        return name

    # ------------------------------------------------------------------------------ joining

    def _concat(self, node: Node, place: Expr, mask: str | None) -> _Making:
        (axis,) = node.attrs
        at = ix.unravel(place, node.shape)[axis]
        out, start = None, 0
        for part, moved in sources_at(node, place, None):
            length = part.shape[axis]
            inside = self._in_range(at, start, start + length)
            start += length
            if inside is False:
                continue
            if inside is True:
                return (yield part, moved, mask)
            value = yield part, moved, self._both(mask, inside)
            out = value if out is None else self._where(inside, value, out)
        if out is None:  # only where the mask leaves nothing
            return (yield ir.constant(0, node.dtype), place, mask)
        return out

    def _update(self, node: Node, place: Expr, mask: str | None) -> _Making:
        x, value = node.src
        starts, steps = node.attrs
        inside: Any = True  # or the name of a test
        axes = ix.unravel(place, node.shape)
        for at, start, step, length in zip(axes, starts, steps, value.shape, strict=True):
            last = start + step * (length - 1)
            tests = [self._in_range(at, min(start, last), max(start, last) + 1)]
            if abs(step) > 1:
                apart = ix.add(at, ix.number(-min(start, last)))
                tests.append(self._say("divides", (apart, abs(step)), _BOOL))
            for test in tests:
                if test is False:
                    return (yield x, place, mask)
                if test is not True:
                    inside = test if inside is True else self._both(inside, test)
        (_, _), (_, moved) = sources_at(node, place, None)
        if inside is True:
            return (yield value, moved, mask)
        new = yield value, moved, self._both(mask, inside)
        return self._where(inside, new, (yield x, place, mask))

    def _in_range(self, at: Expr, low: int, high: int) -> str | bool:
        """Return the name of the test ``low <= at < high``, or its outcome if that is known."""
        least, most = at.bounds
        if not ix.names_in(at) or (low <= least and most < high):
            return low <= least and most < high
        if most < low or least >= high:
            return False
        values = tuple(n for n in ix.names_in(at) if n in self.in_row)
        return self._say("in_range", (at, low, high), _BOOL, values)

    def _both(self, a: str | None, b: str) -> str:
        return b if a is None or a == b else self._say("logical_and", (a, b), _BOOL, (a, b))

    def _where(self, test: str, a: str, b: str) -> str:
        dtype = self.statements[a].dtype if a in self.statements else self.accumulators[a].result
        return self._say("where", (test, a, b), dtype, (test, a, b))

    # ------------------------------------------------------------------------------- passes

    def _phases(self, stores: list[Statement]) -> tuple[tuple[Phase, ...], tuple[Statement, ...]]:
        made = (*self.accumulators, *self.scans)
        n_passes = max((self.depth[name] for name in made), default=0)
        ready: list[list[str]] = [[] for _ in range(n_passes + 1)]  # wanted of a row, by depth
        wanted: list[list[str]] = [[] for _ in range(n_passes + 1)]  # of each element, by pass
        by_pass: list[list[Accumulator]] = [[] for _ in range(n_passes + 1)]
        for name, accumulator in self.accumulators.items():
            by_pass[self.depth[name] - 1].append(accumulator)
            wanted[self.depth[name] - 1].append(accumulator.of)
        scans: list[list[Scan]] = [[] for _ in range(n_passes + 1)]
        for name, scan in self.scans.items():
            scans[self.depth[name] - 1].append(scan)
            wanted[self.depth[name] - 1].append(scan.of)
        row_stores: list[list[Statement]] = [[] for _ in range(n_passes + 1)]
        full_stores: list[list[Statement]] = [[] for _ in range(n_passes + 1)]
        for store in stores:
            _, place, value = store.args
            if self.group.kind != "map" and "c" not in ix.names_in(place) and self.in_row[value]:
                row_stores[self.depth[value]].append(store)
                ready[self.depth[value]].append(value)
            else:  # in the first pass that knows it
                full_stores[self.depth[value]].append(store)
                wanted[self.depth[value]].append(value)
        bodies = []
        for names in wanted:
            body, rows = self._closure(names)
            bodies.append(body)
            for name in rows:
                ready[self.depth[name]].append(name)
        rows_at: list[list[Statement]] = [[] for _ in range(n_passes + 1)]
        _, needed = self._closure([name for names in ready for name in names])
        for name in needed:
            if name in self.statements:
                rows_at[self.depth[name]].append(self.statements[name])
        for depth in range(n_passes + 1):
            rows_at[depth] += row_stores[depth]
        for body, full in zip(bodies, full_stores, strict=True):
            body += full
        phases = [
            Phase(tuple(bodies[k]), tuple(by_pass[k]), tuple(rows_at[k + 1]), tuple(scans[k]))
            for k in range(n_passes)
        ]
        if bodies[n_passes]:
            phases.append(Phase(tuple(bodies[n_passes])))
        return tuple(phases), tuple(rows_at[0])

    def _closure(self, names: list[str]) -> tuple[list[Statement], list[str]]:
        """Return the statements of elements that ``names`` need, and the names of rows."""
        elements: set[str] = set()
        rows: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name in elements or name in rows:
                continue
            (rows if self.in_row[name] else elements).add(name)
            if name in self.statements:
                stack += self._arguments(self.statements[name])
        order = [*self.statements]
        body = [self.statements[n] for n in order if n in elements]
        known = [n for n in order if n in rows] + [n for n in self.accumulators if n in rows]
        return body, known

    def _arguments(self, statement: Statement) -> list[str]:
        found = []
        for arg in statement.args:
            if isinstance(arg, Expr):
                found += [n for n in ix.names_in(arg) if n in self.in_row]
            elif isinstance(arg, str) and arg in self.in_row:
                found.append(arg)
        return found
