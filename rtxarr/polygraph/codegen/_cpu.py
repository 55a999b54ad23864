"""Kernels as loops for the CPU: LLVM assembly that calls NumPy's inner loops.

What a processor does in one instruction (arithmetic, comparisons, casts) is written out, and LLVM
makes vector instructions of it. What it does not (exponentials, powers, sums in NumPy's order) is
done by NumPy's own loops, which a kernel calls on a *tile*: a part of the work whose values fit in
cache. So the results have NumPy's bits. Statements are thereby cut into *stages*: loops over the
tile, with calls between them; a value of one stage that a later one needs is kept in a *slot*, an
array of a tile's length, unless it is cheaper to compute it again.

A kernel is one function::

    int kernel(PyObject *objects, int64_t *numbers)

of a tuple of arrays and NumPy scalars: where their memory is stands behind the head of each object.
``numbers`` begin with what ``_cpu_start.FIXED`` names: which elements (map) or rows are to be done,
and sizes; then come the numbers of index expressions and the addresses of NumPy's loops. A kernel
that takes rows in parts does one step (``Plan.sections``), of rows or of parts of rows; what the
steps share is in memory of the caller, its third argument. A kernel gives 1, and does nothing, if
an object is not of the very type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._index import Div, Expr, Mod, Symbol
from rtxarr.polygraph._ir import REPEATED
from rtxarr.polygraph._loops import Accumulator, Loops, Scan, Statement
from rtxarr.polygraph.codegen import _ufuncs
from rtxarr.polygraph.codegen._assembly import is_native, kind

_BOOL = np.dtype(bool)
NOT_MAPS = frozenset(("load", "scalar", "index", "in_range", "divides"))

# A value that takes more than this to compute again is kept in a slot.
_CHEAP = 4
_COSTS = {"divide": 6, "sqrt": 6, "rsqrt": 12, "reciprocal": 6}
_COSTS |= {"exp": 20, "expm1": 24, "tanh": 30, "erf": 60}  # written out in mode "fast"

# Elements of a tile, by the largest number of bytes that one has.
TILE_BYTES = 16384
# Rows longer than this are taken in parts: their values do not stay in cache. And few rows are, so
# that threads share them.
LONG_ROW, FEW_ROWS, LONG_OF_FEW = 65536, 64, 8192

# Splitting a counter in two pays only if the inner loop is this long.
_SHORT = 16

BINARY = {**REPEATED, "mean": "add"}


def in_parts(loops: Loops) -> bool:
    """Tell whether rows are taken in parts."""
    return loops.kind == "rows" and _rows_in_parts(loops.rows, loops.cols)


def _rows_in_parts(rows: int, cols: int) -> bool:
    return (rows < FEW_ROWS and cols > LONG_OF_FEW) or cols > LONG_ROW


def scan_refusal(scans: Sequence[tuple[str, np.dtype]], rows: int, cols: int) -> str:
    """Return why a kernel cannot contain scans of such rows; "" if it can."""
    for op, dtype in scans:
        if not is_native(_SCANNED[op], dtype):
            return f"{op} of {dtype} is left to NumPy"
    if _rows_in_parts(rows, cols):
        return f"rows of {cols} elements are taken in parts"
    return ""


_SCANNED = {f"cumulative_{op}": REPEATED[op] for op in ("sum", "prod", "max", "min")}


def halves(n: int, most: int, unit: int) -> tuple[list[int], list[int]]:
    """Cut ``n`` elements as NumPy does to add them up, into parts of up to ``most``.

    Returns where the parts begin, with the end, and the pairs of parts to add, in order; ``unit``
    is in how many elements NumPy goes on.
    """
    edges = [0]
    pairs: list[int] = []

    def visit(start: int, length: int) -> int:
        if length <= most:
            edges.append(start + length)
            return len(edges) - 2
        half = length // 2
        half -= half % unit
        a, b = visit(start, half), visit(start + half, length - half)
        pairs.extend((a, b))
        return a

    visit(0, n)
    return edges, pairs


def fuses(op: str, dtype: np.dtype) -> bool:
    """Tell whether ``op``, a map, cast or reduction of values of ``dtype``, can be written."""
    if op == "segment_reduce":
        return kind(dtype) == "f"
    if op in ("argmax", "argmin"):
        return kind(dtype) != "c" and _ufuncs.find(op[3:], dtype) is not None
    if op in BINARY:
        return (op not in ("max", "min") or kind(dtype) != "c") and bool(_ufuncs.find(op, dtype))
    if op == "pow" and kind(dtype) in "iu":
        return False  # a negative exponent raises
    if op in _COMPOSED and kind(dtype) in "fh":
        return True
    return is_native(op, dtype) or _ufuncs.find(op, dtype) is not None


# ------------------------------------------------------------------------------ preparation


def _sigmoid(s: Statement) -> list[Statement]:
    half = kind(s.dtype) == "h"
    wide = np.dtype(np.float32) if half else s.dtype
    out: list[Statement] = []

    def say(op, *args, dtype=wide):
        out.append(Statement(f"{s.name}_{len(out)}", op, args, dtype))
        return out[-1].name

    x = say("cast", *s.args) if half else s.args[0]
    one, zero = say("index", ix.number(1)), say("index", ix.number(0))
    small = say("exp", say("negative", say("abs", x)))
    above = say("greater_equal", x, zero, dtype=_BOOL)
    result = say("divide", say("where", above, one, small), say("add", one, small))
    if half:
        say("cast", result, dtype=s.dtype)
    last = out.pop()
    return [*out, Statement(s.name, last.op, last.args, last.dtype)]


def _erf(s: Statement) -> list[Statement]:
    if kind(s.dtype) != "h":
        return [s]
    wide = np.dtype(np.float32)
    return [
        Statement(f"{s.name}_0", "cast", s.args, wide),
        Statement(f"{s.name}_1", "erf", (f"{s.name}_0",), wide),
        Statement(s.name, "cast", (f"{s.name}_1",), s.dtype),
    ]


_COMPOSED: dict[str, Callable] = {"sigmoid": _sigmoid, "erf": _erf}


def _expanded(statements: Sequence[Statement]) -> list[Statement]:
    out: list[Statement] = []
    for s in statements:
        native = s.op in NOT_MAPS or s.op == "store"
        out += _COMPOSED[s.op](s) if not native and s.op in _COMPOSED else [s]
    return out


def _divisors(x: Expr, symbol: str, found: set[int]) -> None:
    """Add what ``symbol`` is divided by, anywhere in ``x``."""
    for atom, _ in x.terms:
        if type(atom) in (Div, Mod):
            if symbol in ix.names_in(atom.numerator):
                found.add(atom.divisor)
            _divisors(atom.numerator, symbol, found)


def _split_length(statements: Sequence[Statement], symbol: str, size: int) -> int | None:
    """Return the length of an inner loop over ``symbol`` that makes its divisions few."""
    found: set[int] = set()
    for s in statements:
        for arg in s.args:
            if isinstance(arg, Expr):
                _divisors(arg, symbol, found)
    found = {n for n in found if 1 < n < size}
    if not found:
        return None
    return min((n for n in found if n >= _SHORT), default=max(found))


# ----------------------------------------------------------------------------------- values


class Planned:
    """The result of a statement or accumulator, and where it is found."""

    def __init__(self, name: str, op: str, args: tuple, dtype: np.dtype, deps: dict) -> None:
        self.name, self.op, self.args, self.dtype = name, op, args, dtype
        self.original = args  # before counters were split
        self.deps: dict[str, Planned] = deps
        self.in_row = False
        self.time = (0, 0)  # number of its section, and stage there
        self.needs_slot = False
        self.counters: set[str] = set()  # those that it varies with
        self.level = 2  # segments: 0 if it is the same for all features, 1 for each run of them
        self.slot: int | None = None  # the slot's number, once it has one
        self.best_slot: int | None = None  # argmax, argmin: where the value itself is
        self.native = True
        self.loop: _ufuncs.Loop | None = None

    def is_cheap(self) -> bool:
        """Tell whether it takes little to compute it where it is needed."""
        left, stack = _CHEAP, [self]
        while stack and left >= 0:  # no step is free but those without sources
            v = stack.pop()
            if v.needs_slot and v.op not in ("scalar", "index"):
                left -= 1
            elif v.op not in ("scalar", "index"):
                left -= _COSTS.get(v.op, 1)
                stack += v.deps.values()
        return left >= 0


class Section:
    """Statements of rows or of elements, cut into stages."""

    def __init__(self, number: int, in_row: bool) -> None:
        self.number, self.in_row = number, in_row
        self.values: list[Planned] = []
        self.stores: list[tuple[str, Expr, Planned, dict]] = []
        self.reductions: list[tuple[Accumulator, Planned, Planned]] = []  # (it, result, of)
        self.scans: list[tuple[Scan, Planned, Planned]] = []  # the same

    def stages(self) -> int:
        ends = [v.time[1] + (not v.native) for v in self.values]
        return max(ends, default=0) + 1


class Plan:
    """What is done in which order: sections of stages, and which values are kept.

    ``in_parts`` says that a tile holds a part of a row only: then no value of an element outlives
    its section, and each pass goes over the parts. ``fast`` says that exponentials are written out
    and sums are added up in the order that is fastest.
    """

    def __init__(self, loops: Loops, in_parts: bool, *, fast: bool = False) -> None:
        self.loops = loops
        self.fast = fast
        self.kind = loops.kind
        self.separate = in_parts  # each section is a step of its own
        self.in_parts = in_parts or loops.kind in ("columns", "segments")
        self.buffers = {b.name: b for b in loops.buffers}
        inner = {"map": "i", "rows": "c", "columns": "r", "segments": "f"}
        self.inner = inner[loops.kind] if loops.features > 1 or loops.kind != "segments" else "c"
        size = {"i": loops.cols, "c": loops.cols, "r": loops.rows, "f": loops.features}[self.inner]
        self.split = _split_length(loops.statements, self.inner, size)
        if self.split:
            high = ix.symbol(self.inner + "_hi", -(-size // self.split))
            low = ix.symbol(self.inner + "_lo", self.split)
            self._whole = ix.add(ix.mul(high, self.split), low)
        self.known: dict[str, Planned] = {}  # by name
        self.last_use: dict[Planned, tuple[int, int]] = {}
        self.sections: list[Section] = []
        self.section(loops.before, in_row=True)
        for phase in loops.phases:
            section = self.section(phase.body, in_row=False)
            for a in phase.accumulators:
                self._accumulator(section, a)
            for scan in phase.scans:
                self._scanned(section, scan)
            self.section(phase.after, in_row=True)
        self._decide()

    def section(self, statements: Sequence[Statement], in_row: bool) -> Section:
        out = Section(len(self.sections), in_row)
        self.sections.append(out)
        if not in_row and self.in_parts:
            self.known = {k: v for k, v in self.known.items() if v.in_row}
        for s in _expanded(statements):
            deps = {n: self.known[n] for n in _names(s) if n in self.known}
            args: tuple[Any, ...] = tuple(
                self._rewritten(a) if isinstance(a, Expr) else a for a in s.args
            )
            if s.op == "store":
                buffer, place, name = args
                out.stores.append((buffer, place, self.known[name], deps))
                continue
            if s.name in self.known:
                continue
            if self._loop_of(s, deps) is not None:
                level = max((d.level for d in deps.values()), default=0)
                deps = {n: self._for_each(d, out, level) for n, d in deps.items()}
                args = tuple(deps[n].name for n in args)
                deps = {d.name: d for d in deps.values()}
            value = Planned(s.name, s.op, args, s.dtype, deps)
            value.original = s.args
            self._place(value, out)
            self.known[s.name] = value
            out.values.append(value)
        return out

    def _rewritten(self, x: Expr) -> Expr:
        return ix.substitute(x, self.inner, self._whole) if self.split else x

    def _place(self, v: Planned, section: Section) -> None:
        """Find out whether NumPy computes it, and in which stage."""
        v.in_row = section.in_row
        names = {n for a in v.args if isinstance(a, Expr) for n in ix.names_in(a)}
        v.counters = (names - v.deps.keys()).union(*(d.counters for d in v.deps.values()))
        v.level = max([self.level_of(v.counters), *(d.level for d in v.deps.values())])
        v.loop = self._loop_of(v, v.deps)
        if v.loop is not None:
            v.native, v.needs_slot = False, True
        stage = 0
        for d in v.deps.values():
            if d.time[0] == section.number and d.in_row == section.in_row:
                stage = max(stage, d.time[1] + (v.native and not d.native))
        v.time = section.number, stage

    def _loop_of(self, v: Any, deps: dict) -> _ufuncs.Loop | None:
        """Return NumPy's loop of a map that is not written out."""
        if v.op in NOT_MAPS:
            return None
        dtype = next(iter(deps.values())).dtype if v.op != "where" else v.dtype
        return None if is_native(v.op, dtype, fast=self.fast) else _ufuncs.find(v.op, dtype)

    def _for_each(self, d: Planned, section: Section, level: int) -> Planned:
        """Return a value with one lane for each of the section's, which NumPy can step along."""
        if d.op == "scalar" or (d.in_row == section.in_row and d.level == level):
            return d
        return self._spread(d, section, level)

    def _spread(self, d: Planned, section: Section, level: int) -> Planned:
        name = f"{d.name}_each{level}" if section.in_row else f"{d.name}_of_each{level}"
        if name not in self.known:
            value = Planned(name, "positive", (d.name,), d.dtype, {d.name: d})
            self._place(value, section)
            value.level = level
            self.known[name] = value
            section.values.append(value)
        return self.known[name]

    def _accumulator(self, section: Section, a: Accumulator) -> None:
        of = self.known[a.of]
        if of.in_row:  # the same for each element
            of = self._spread(of, section, of.level)
        result = Planned(a.name, a.op, (), a.result, {of.name: of})
        result.in_row = result.needs_slot = True
        result.native = False
        result.counters, result.level = of.counters - {"c", "c_hi", "c_lo"} | {"r"}, of.level
        result.time = section.number, section.stages()
        self.known[a.name] = result
        section.reductions.append((a, result, of))

    def _scanned(self, section: Section, scan: Scan) -> None:
        of = self.known[scan.of]
        if of.in_row:
            of = self._spread(of, section, of.level)
        of.needs_slot = True
        result = Planned(scan.name, "scanned", (), scan.dtype, {of.name: of})
        result.needs_slot, result.native = True, False
        result.counters = of.counters | {self.inner}
        result.time = section.number, section.stages()
        self.known[scan.name] = result
        section.scans.append((scan, result, of))

    def level_of(self, counters: set[str]) -> int:
        """Return the level of what varies with these counters; see :class:`Planned`."""
        if self.kind != "segments":
            return 2
        by_feature = {n for n in counters if n.startswith("f")}
        return 0 if not by_feature else 1 if by_feature == {"f_hi"} else 2

    def adds_up_in_stage(self, a: Accumulator) -> bool:
        """Tell whether a reduction is part of a stage's loop: each lane has its own total."""
        if self.kind == "segments":
            return True
        if self.kind == "rows":  # in any order
            return self.fast and a.op == "sum" and kind(a.dtype) == "f"
        return self.kind == "columns" and (
            a.op.startswith("arg") or is_native(BINARY[a.op], a.dtype)
        )

    def _decide(self) -> None:
        """Choose the values that are kept in slots."""
        for section in self.sections:
            for a, _, of in section.reductions:
                if not self.adds_up_in_stage(a) and self.direct(of, "reduce") is None:
                    of.needs_slot = True
            for v in section.values:
                for d in v.deps.values():
                    if not v.native:
                        d.needs_slot |= not self._has_address(d, v)
                    elif d.level == 1 and v.level == 2 and not d.is_cheap():
                        d.needs_slot = True  # else it is computed for each feature
        last_use = self.last_use
        for section in self.sections:
            last = section.number, section.stages() - 1
            for v in section.values:
                for d in v.deps.values():
                    last_use[d] = max(last_use.get(d, (0, 0)), v.time)
            for _, _, value, deps in section.stores:
                for d in (value, *deps.values()):
                    last_use[d] = max(last_use.get(d, (0, 0)), last)
            for _, _, of in section.reductions:
                last_use[of] = max(last_use.get(of, (0, 0)), last)
            for _, result, of in section.scans:  # others may scan it, too
                last_use[of] = max(last_use.get(of, (0, 0)), result.time)
        for section in self.sections:
            for v in section.values:
                if v.native and last_use.get(v, (0, 0)) > v.time and not v.is_cheap():
                    v.needs_slot = True

        for section in reversed(self.sections):
            for v in reversed(section.values):
                if v.native and not v.needs_slot:  # computed again at its last use
                    for d in v.deps.values():
                        last_use[d] = max(last_use[d], last_use.get(v, (0, 0)))

    def kept(self) -> list[Planned]:
        """Return the values that need slots, in the order in which they are computed."""
        found = []
        for section in self.sections:
            found += [v for v in section.values if v.needs_slot]
            found += [result for _, result, _ in (*section.reductions, *section.scans)]
        return sorted(found, key=lambda v: v.time)

    def _has_address(self, d: Planned, user: Planned) -> bool:
        """Tell whether NumPy can read an operand where it lies."""
        if d.op == "scalar":
            return True
        return d.in_row == user.in_row and self.direct(d, "row" if d.in_row else "map") is not None

    def direct(self, v: Planned, use: str) -> tuple[Expr, int] | None:
        """Return the place and the step of a load that NumPy can read from memory, or None.

        ``use`` is "map" (all elements of the tile in one call), "reduce" or "row".
        """
        if v.op != "load" or v.args[2] is not None or v.needs_slot or self.kind == "segments":
            return None
        place = v.original[1]
        if any(type(atom) is not Symbol for atom, _ in place.terms):
            return None
        factors = {atom.name: f for atom, f in place.terms}
        if use == "row":
            return place, factors.get("r", 0)
        if self.kind == "columns":
            return (place, factors.get("r", 0)) if use == "reduce" else None
        step = factors.get(self.inner, 0)
        whole = self.kind == "rows" and not self.in_parts and self.loops.rows > 1
        if use == "map" and whole and factors.get("r", 0) != step * self.loops.cols:
            return None
        return place, step


def _names(s: Statement) -> list[str]:
    """Return the names of values and counters in a statement."""
    found: list[str] = []
    for arg in s.args:
        if isinstance(arg, Expr):
            found += sorted(ix.names_in(arg))
        elif isinstance(arg, str):
            found.append(arg)
    return found
