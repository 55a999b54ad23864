"""Calls of NumPy's loops, and reductions, in kernels for the CPU; see ``_cpu_text``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr.polygraph._loops import Accumulator, Scan
from rtxarr.polygraph.codegen import _ufuncs
from rtxarr.polygraph.codegen._assembly import Value, kind, llvm_type
from rtxarr.polygraph.codegen._cpu import BINARY, Planned, Section
from rtxarr.polygraph.codegen._cpu_values import INT64, Values, identity

# Values that are searched as a whole.
_STRETCH = 256


class Totals(Values):
    """Writes calls of NumPy's loops on a tile, and what makes totals of rows.

    Attributes
    ----------
    r0, r1, n_rows : str
        The tile's rows.
    c0, c1, n_cols : str
        Its elements, or edges.
    widths : list of str
        Lanes of a row or edge, by level.
    """

    r0: str
    r1: str
    n_rows: str
    c1: str
    n_cols: str
    widths: list[str]

    def _set_part(self, low: str, high: str) -> None:
        self.c0, self.c1 = low, high
        self.n_cols = self._difference(high, low)

    def _edge(self, r: str) -> str:
        """Return where the edges of row ``r`` begin."""
        indptr = self.plan.buffers[self.plan.loops.indptr or ""]
        x = self._fetch(f"%b_{indptr.name}", r, indptr.dtype)
        return self.asm.cast(x, indptr.dtype, INT64)

    def _table(self, i: str) -> str:
        at = self._sum("%tables", i)
        return self._fetch("%numbers", at, INT64)

    def _origin(self) -> str:
        """Return the row that the first lane of a row's slots belongs to."""
        return "0" if self.plan.separate else self.r0

    def _slot_pointer(self, v: Planned) -> str:
        """Return where the slot's values of the tile are."""
        if not (v.in_row and self.plan.separate):
            return f"%slot{v.slot}"
        return self._pointer(f"%slot{v.slot}", self._product(self.r0, str(v.dtype.itemsize)), "i8")

    def _call_map(self, v: Planned, section: Section) -> None:
        in_row = section.in_row
        if self.plan.kind == "segments":
            n = self._product(self.n_rows if in_row else self.n_cols, self.widths[v.level])
        else:
            n = self._product(self.n_rows, "1" if in_row else self.n_cols)
        operands = [self._operand(v.deps[name], in_row) for name in v.args]
        operands.append((self._slot_pointer(v), str(v.dtype.itemsize)))
        assert v.loop is not None
        self._call(v.loop, operands, n)

    def _operand(self, d: Planned, in_row: bool) -> tuple[str, str]:
        """Return where all of a tile's values of ``d`` lie, and their step in bytes."""
        if d.slot is not None:
            return self._slot_pointer(d), str(d.dtype.itemsize)
        if d.op == "scalar":
            return f"%a_{d.args[0]}", "0"
        return self._direct(d, "row" if in_row else "map", self.r0, self.c0)

    def _direct(self, d: Planned, use: str, r: str, c: str) -> tuple[str, str]:
        found = self.plan.direct(d, use)
        assert found is not None
        place, step = found
        self.counters = {"r": r, "c": c, "i": c}
        size = d.dtype.itemsize
        at = self._product(self._place(place, {}), str(size))
        step_bytes = (
            self._product(self._signed(step), str(size)) if step not in (0, 1) else str(step * size)
        )
        return self._pointer(f"%b_{d.args[0]}", at, "i8"), step_bytes

    def _total_place(
        self, result: Planned, lane: str = "", *, best: bool = False
    ) -> tuple[str, str]:
        """Return where the total of a row is, or of this part of a row."""
        slot = result.best_slot if best else result.slot
        if self._item is not None:
            return f"%part{slot}", self._item
        return f"%slot{slot}", lane or self.lanes[True, result.level]

    def _start_reductions(self, section: Section) -> None:
        def start(a, result, lane):
            if a.op.startswith("arg"):
                self._put(*self._total_place(result, lane), INT64, "-1")
                value = identity(a.op[3:], a.dtype)
                self._put(*self._total_place(result, lane, best=True), a.dtype, value)
            else:
                value = identity(a.op, a.dtype)
                self._put(*self._total_place(result, lane), a.dtype, value)

        for a, result, _ in section.reductions:
            if self._item is not None:
                start(a, result, "")
                continue
            n = self._product(self.n_rows, self.widths[result.level])
            self._loop("0", n, lambda lane, a=a, result=result: start(a, result, lane), inner=True)

    def _total(self, a: Accumulator, result: Planned, of: Planned, register: Any) -> Callable:
        """Read and add up; return what writes the new total."""
        x, lane = self._get(of), self.lanes.get((True, result.level), "")
        if register is not None:
            old = self._fetch(f"%total{register}", "0", a.dtype)
            if self.plan.fast and BINARY[a.op] == "add" and kind(a.dtype) == "f":
                new = self.asm.let(f"fadd reassoc contract {llvm_type(a.dtype)} {old}, {x}")
            else:
                new = self.asm.apply(BINARY[a.op], a.dtype, [old, x])
            return lambda: self._put(f"%total{register}", "0", a.dtype, new)
        if a.op.startswith("arg"):
            return self._best(a, result, x, lane, self.counters["c"])
        old = self._fetch(f"%slot{result.slot}", lane, a.dtype)
        new = self.asm.apply(BINARY[a.op], a.dtype, [old, x])
        return lambda: self._put(f"%slot{result.slot}", lane, a.dtype, new)

    def _best(self, a: Accumulator, result: Planned, x: str, lane: str, c: str) -> Callable:
        """Compare with the best so far: the first NaN wins, then the first of equals."""
        asm, dtype = self.asm, a.dtype
        index_place = self._total_place(result, lane)
        best_place = self._total_place(result, lane, best=True)
        index = self._fetch(*index_place, INT64)
        best = self._fetch(*best_place, dtype)
        better = asm.let(f"icmp slt i64 {index}, 0")
        beyond = asm.apply("greater" if a.op == "argmax" else "less", dtype, [x, best])
        better = asm.let(f"or i1 {better}, {beyond}")
        if kind(dtype) in "fh":
            nan, was = (asm.apply("isnan", dtype, [y]) for y in (x, best))
            new = asm.let(f"and i1 {nan}, {asm.let(f'xor i1 {was}, true')}")
            better = asm.let(f"or i1 {better}, {new}")
        index = asm.let(f"select i1 {better}, i64 {c}, i64 {index}")
        best = asm.apply("where", dtype, [better, x, best])

        def write():
            self._put(*index_place, INT64, index)
            self._put(*best_place, dtype, best)

        return write

    def _merge(self, a: Accumulator, result: Planned, r: str) -> None:
        """Make a row's total of those of its parts, two at a time as NumPy adds."""
        asm, base = self.asm, self._product(r, "%leaves")
        pairs = asm.let("add i64 %leaves, 1")

        def one(k):
            at = self._sum(pairs, asm.let(f"shl i64 {k}, 1"))
            to, other = (self._sum(base, self._table(self._sum(at, "0", j))) for j in (0, 1))
            self._item = to
            if a.op.startswith("arg"):
                index = self._fetch(f"%part{result.slot}", other, INT64)
                x = self._fetch(f"%part{result.best_slot}", other, a.dtype)
                self._best(a, result, x, to, index)()
            else:
                both = [self._fetch(f"%part{result.slot}", lane, a.dtype) for lane in (to, other)]
                total = asm.apply(BINARY[a.op], a.dtype, both)
                self._put(f"%part{result.slot}", to, a.dtype, total)
            self._item = None

        self._loop("0", asm.let("sub i64 %leaves, 1"), one)
        total = self._fetch(f"%part{result.slot}", base, result.dtype)
        self._put(f"%slot{result.slot}", r, result.dtype, total)

    def _average(self, a: Accumulator, result: Planned) -> None:
        def one_r(r):
            n = self._difference(self._edge(self._sum(r, "0", 1)), self._edge(r))
            n = self.asm.cast(self._largest(n, "1"), INT64, a.dtype)
            width = self.widths[result.level]
            base = self._product(self._difference(r, self.r0), width)

            def one(f):
                lane = self._sum(base, f)
                total = self._fetch(f"%slot{result.slot}", lane, a.dtype)
                mean = self.asm.apply("divide", a.dtype, [total, n])
                self._put(f"%slot{result.slot}", lane, a.dtype, mean)

            self._loop("0", width, one, inner=True)

        self._loop(self.r0, self.r1, one_r)

    def _reduce(self, a: Accumulator, result: Planned, of: Planned) -> None:
        """Reduce the tile's values of ``of``, kept or in memory, into the totals of its rows."""
        size = str(of.dtype.itemsize)
        if self.plan.kind == "columns":
            loop = _ufuncs.find(a.op, a.dtype)
            total = f"%slot{result.slot}", size

            def one_c(c):
                if of.slot is None:
                    values = self._direct(of, "reduce", self.r0, c)
                else:
                    line = self._product(self._difference(c, self.c0), self.n_rows)
                    at = self._product(line, size)
                    values = self._pointer(f"%slot{of.slot}", at, "i8"), size
                self._call(loop, [total, values, total], self.n_rows)

            self._loop(self.c0, self.c1, one_c)
            return

        def one_r(r):
            lane = self._difference(r, self.r0)
            if of.slot is None:
                pointer, step = self._direct(of, "reduce", r, self.c0)
            else:
                at = self._product(self._product(lane, self.n_cols), size)
                pointer, step = self._pointer(f"%slot{of.slot}", at, "i8"), size
            is_index = a.op.startswith("arg")
            base, at = self._total_place(result, lane, best=is_index)
            at = self._product(at, str(a.dtype.itemsize))
            total = self._pointer(base, at, "i8")
            loop = _ufuncs.find(a.op.removeprefix("arg"), a.dtype)
            self._call(loop, [(total, "0"), (pointer, step), (total, "0")], self.n_cols)
            if is_index:
                found = self._find(pointer, step, a.dtype, self._fetch(total, "0", a.dtype))
                index = self._sum(self.c0, found)
                self._put(*self._total_place(result, lane), INT64, index)

        self._loop(self.r0, self.r1, one_r)

    def _scan(self, scan: Scan, result: Planned, of: Planned) -> None:
        """Write the running totals of the tile's rows, each added to the one before it."""
        last = self._difference(self.n_cols, "1")

        def one_r(r):
            start = self._product(self._difference(r, self.r0), self.n_cols)

            def lane(c):
                return self._sum(start, self._difference(last, c) if scan.backwards else c)

            first = lane("0")
            self._put(f"%slot{result.slot}", first, scan.dtype, self._value(of, first))

            def one_c(c):
                before = lane(self.asm.let(f"sub nsw i64 {c}, 1"))
                total = self._fetch(f"%slot{result.slot}", before, scan.dtype)
                x = self._value(of, lane(c))
                new = self.asm.apply(BINARY[scan.op], scan.dtype, [total, x])
                self._put(f"%slot{result.slot}", lane(c), scan.dtype, new)

            self._loop("1", self.n_cols, one_c)

        self._loop(self.r0, self.r1, one_r)

    def _value(self, of: Planned, lane: str) -> Value:
        return self._fetch(f"%slot{of.slot}", lane, of.dtype)

    def _find(self, pointer: str, step: str, dtype: np.dtype, wanted: str) -> str:
        """Return where the first of a row's values is that equals ``wanted``, or is NaN as it is.

        Stretches are searched as a whole, in vector instructions, before the values of one.
        """
        asm = self.asm
        is_nan = asm.apply("isnan", dtype, [wanted]) if kind(dtype) in "fh" else None
        stretch, single, end = (asm.fresh(word) for word in ("stretch", "single", "found"))
        before = asm.block

        def test(i):
            x = self._fetch(self._pointer(pointer, self._product(i, step), "i8"), "0", dtype)
            same = asm.apply("equal", dtype, [x, wanted])
            if is_nan is None:
                return same
            return asm.let(f"select i1 {is_nan}, i1 {asm.apply('isnan', dtype, [x])}, i1 {same}")

        asm.say(f"br label %{stretch}")
        asm.start(stretch)
        start, following = "%" + asm.fresh("i"), "%" + asm.fresh("i")
        at = len(asm.lines)
        asm.lines.append("")
        last = self._smallest(self._sum(start, str(_STRETCH)), self.n_cols)
        asm.say("store i8 0, ptr %hit")

        def look(i):
            hit = asm.let("load i8, ptr %hit")
            new = asm.let(f"zext i1 {test(i)} to i8")
            asm.say(f"store i8 {asm.let(f'or i8 {hit}, {new}')}, ptr %hit")

        self._loop(start, last, look)
        is_here = asm.let(f"icmp ne i8 {asm.let('load i8, ptr %hit')}, 0")
        over = asm.let(f"icmp sge i64 {last}, {self.n_cols}")
        here = asm.let(f"or i1 {is_here}, {over}")
        asm.lines[at] = f"  {start} = phi i64 [0, %{before}], [{following}, %{asm.block}]"
        asm.say(f"{following} = add i64 {start}, {_STRETCH}")
        from_ = asm.block
        asm.say(f"br i1 {here}, label %{single}, label %{stretch}")
        asm.start(single)
        i, more = "%" + asm.fresh("i"), "%" + asm.fresh("i")
        at = len(asm.lines)
        asm.lines.append("")
        found = test(i)
        asm.lines[at] = f"  {i} = phi i64 [{start}, %{from_}], [{more}, %{asm.block}]"
        asm.say(f"{more} = add i64 {i}, 1")
        asm.say(f"br i1 {found}, label %{end}, label %{single}")
        asm.start(end)
        return i
