"""Plans of kernels for the CPU as text: loops, slots and calls; see ``_cpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._cpu_start import FIXED
from rtxarr.polygraph._index import Div, Expr, Loaded, Mod
from rtxarr.polygraph._loops import Accumulator
from rtxarr.polygraph.codegen import _ufuncs
from rtxarr.polygraph.codegen._assembly import (
    Assembly,
    Value,
    kind,
    llvm_type,
    memory_type,
    part,
)
from rtxarr.polygraph.codegen._cpu import BINARY, Plan, Planned, Section

_INT64 = np.dtype(np.int64)
# Where an object's memory begins, or the pointer to it: behind what every object starts with.
_HEAD = object.__basicsize__


def identity(op: str, dtype: np.dtype) -> Value:
    """Return what a reduction starts from."""
    k = kind(dtype)
    if op in ("any", "all") or k == "b":
        return "true" if op in ("all", "prod", "min") else "false"
    if op in ("sum", "mean", "prod"):
        one = op == "prod"
        if k == "c":
            return ("1.0" if one else "0.0"), "0.0"
        if dtype.name == "bfloat16":
            return "16256" if one else "0"
        return {"f": ("0.0", "1.0"), "h": ("0xH0000", "0xH3C00")}.get(k, ("0", "1"))[one]
    if k in "iu":
        info = np.iinfo(dtype)
        return str(int(info.min if op == "max" else info.max))
    below = op == "max"
    if dtype.name == "bfloat16":
        return "-128" if below else "32640"
    if k == "h":
        return "0xHFC00" if below else "0xH7C00"
    return "0xFFF0000000000000" if below else "0x7FF0000000000000"


class _Level:
    """A place before a loop, for what its iterations share; ``known`` are the counters there."""

    def __init__(self, asm: Assembly, known: dict[str, str]) -> None:
        self.known = known
        self.lines: list[str] = []
        self.terms: dict[tuple, str] = {}
        self._asm, self._at = asm, len(asm.lines)
        asm.lines.append("")

    def close(self) -> None:
        self._asm.lines[self._at] = "\n".join(self.lines)


class Writer:
    """Writes the text of a plan.

    Parameters
    ----------
    plan : Plan
    contract : bool, default False
        Whether a product and a sum may be rounded together.
    literal : bool, default False
        Write the numbers of index expressions into the text, for this shape alone: LLVM makes
        products of divisions by them, which are many times as fast.

    Attributes
    ----------
    text : str
    numbers : list of int
        What the kernel's array of numbers holds after ``FIXED``.
    divides : bool
        Whether an index is divided by a number.
    """

    def __init__(self, plan: Plan, *, contract: bool = False, literal: bool = False) -> None:
        self.plan = plan
        self.divides = False
        self._literal = literal
        self.asm = Assembly(contract=contract)
        self.asm.block = "known"
        self.numbers: list[int] = []
        self._number_names: dict[int, str] = {}
        self._loop_names: dict[_ufuncs.Loop, tuple[str, str, str]] = {}
        self._entry: list[str] = []  # what the other lines stand on
        self._late_entry: list[str] = []
        self._metadata: list[str] = []
        self._group = ""
        self._scalars: dict[str, Value] = {}
        self.c0 = "0"
        self._levels: list[_Level] = []
        self._n_totals = 0
        self._item: str | None = None  # in parts: which part of all parts of all rows
        self._independent = True
        self._allocate_slots()
        self._write()
        self.text = self._assembled()

    # ---------------------------------------------------------------------------------- parts

    def _number(self, n: int) -> str:
        """Return the name of a number above 1 of an index expression: a parameter."""
        if n in (0, 1) or self._literal:
            return str(n)
        if n not in self._number_names:
            self._number_names[n] = self._parameter(n, "n")
        return self._number_names[n]

    def _parameter(self, n: int, stem: str) -> str:
        name = f"%{stem}{len(self.numbers)}"
        self._take(name, len(FIXED) + len(self.numbers))
        self.numbers.append(n)
        return name

    def _take(self, name: str, i: int) -> None:
        self._entry.append(f"  {name}_p = getelementptr i64, ptr %numbers, i64 {i}")
        self._entry.append(f"  {name} = load i64, ptr {name}_p")

    def _allocate_slots(self) -> None:
        """Give each kept value a slot; values that are not needed at once share one."""
        # (of rows, level, bytes of an element) of each
        self._slots: list[tuple[bool, int, int]] = []
        free: list[tuple[tuple[int, int], int]] = []  # (until when it is used, slot)
        for v in self.plan.kept():
            key = v.in_row, v.level, v.dtype.itemsize
            reused = None
            if not v.in_row:
                for i, (until, slot) in enumerate(free):
                    if until < v.time and self._slots[slot] == key:
                        reused = slot
                        del free[i]
                        break
            v.slot = len(self._slots) if reused is None else reused
            if reused is None:
                self._slots.append(key)
            if not v.in_row:
                free.append((self.plan.last_use.get(v, v.time), v.slot))
        self._of_parts: set[int] = set()  # slots of totals
        for section in self.plan.sections:
            for a, result, _ in section.reductions:
                self._of_parts.add(result.slot)
                if a.op.startswith("arg"):
                    self._of_parts.add(len(self._slots))
                    result.best_slot = len(self._slots)
                    self._slots.append((True, result.level, a.dtype.itemsize))

    def _assembled(self) -> str:
        plan, asm = self.plan, self.asm
        more = ", ptr %shared" if plan.separate else ""
        head = [f"define i32 @kernel(ptr %objects, ptr %numbers{more}) {{", "entry:"]
        for i, name in enumerate(FIXED):
            if name != "tuple":
                self._take(f"%{name}", i)
        for b in plan.loops.buffers:
            self._entry.append(f"  %a_{b.name} = getelementptr i8, ptr %o_{b.name}, i64 {_HEAD}")
            if not b.is_scalar:
                self._entry.append(f"  %b_{b.name} = load ptr, ptr %a_{b.name}")
        room = [f"  %total{i} = alloca double" for i in range(self._n_totals)]
        if self._loop_names:
            room.append("  %data = alloca [4 x ptr]")
            room.append("  %steps = alloca [4 x i64]")
            room.append("  %count = alloca i64")
        free = []
        if self._slots:
            self._entry += self._scratch()
            free = ["  call void @free(ptr %scratch)"]
            asm.declared |= {"declare ptr @malloc(i64)", "declare void @free(ptr)"}
        checks = self._checks()
        lines = [*head, *room, *checks, *self._entry, *self._late_entry, *asm.lines, *free]
        lines += ["  ret i32 0", "}"]
        return "\n".join([*lines, *sorted(asm.declared), *self._metadata, ""])

    def _checks(self) -> list[str]:
        """Return lines that end with 1 unless each object is of the very type it must be."""
        lines = [
            f"  %tuple_q = getelementptr i64, ptr %numbers, i64 {FIXED.index('tuple')}",
            "  %tuple_n = load i64, ptr %tuple_q",
            "  %objects_p = getelementptr i8, ptr %objects, i64 %tuple_n",
        ]
        checked = "true"
        for i, b in enumerate(self.plan.loops.buffers):
            where = FIXED.index("array")
            if b.is_scalar:
                where = len(FIXED) + len(self.numbers)
                self.numbers.append(_ufuncs.address("type", b.dtype.name))
            name = f"%is_{b.name}"
            lines += [
                f"  %p_{b.name} = getelementptr ptr, ptr %objects_p, i64 {i}",
                f"  %o_{b.name} = load ptr, ptr %p_{b.name}",
                f"  {name}_p = getelementptr i8, ptr %o_{b.name}, i64 {_HEAD - 8}",
                f"  {name}_t = load i64, ptr {name}_p",
                f"  {name}_q = getelementptr i64, ptr %numbers, i64 {where}",
                f"  {name}_k = load i64, ptr {name}_q",
                f"  {name}_e = icmp eq i64 {name}_t, {name}_k",
                f"  {name} = and i1 {checked}, {name}_e",
            ]
            checked = name
        lines.append(f"  br i1 {checked}, label %known, label %unknown")
        return [*lines, "unknown:", "  ret i32 1", "known:"]

    def _scratch(self) -> list[str]:
        """Return lines that lay out the slots, each from a multiple of 64 bytes on."""
        lines = [
            f"  %run_lanes = mul i64 %chunk, {self.widths[1]}",
            f"  %run_row_lanes = mul i64 %tile, {self.widths[1]}",
        ]
        layout: list[str] = []

        def place(name, count, size, base, start):
            layout.append(f"  {name} = getelementptr i8, ptr {base}, i64 {start}")
            lines.extend(
                [
                    f"  {name}_n = mul i64 {count}, {size}",
                    f"  {name}_m = add i64 {name}_n, 63",
                    f"  {name}_b = and i64 {name}_m, -64",
                    f"  {name}_e = add i64 {start}, {name}_b",
                ]
            )
            return f"{name}_e"

        start = shared = "0"
        for i, (of_rows, level, size) in enumerate(self._slots):
            if not of_rows:
                count = ("%chunk", "%run_lanes", "%lanes")[level]
                start = place(f"%slot{i}", count, size, "%scratch_start", start)
            elif not self.plan.separate:
                count = ("%tile", "%run_row_lanes", "%row_lanes")[level]
                start = place(f"%slot{i}", count, size, "%scratch_start", start)
            else:
                shared = place(f"%slot{i}", "%rows", size, "%shared", shared)
                if i in self._of_parts:
                    shared = place(f"%part{i}", "%items", size, "%shared", shared)
        return [
            *lines,
            f"  %scratch_bytes = add i64 {start}, 64",
            "  %scratch = call ptr @malloc(i64 %scratch_bytes)",
            "  %scratch_number = ptrtoint ptr %scratch to i64",
            "  %scratch_up = sub i64 0, %scratch_number",
            "  %scratch_gap = and i64 %scratch_up, 63",
            "  %scratch_start = getelementptr i8, ptr %scratch, i64 %scratch_gap",
            *layout,
        ]

    def shared_bytes(self, rows: int, items: int) -> int:
        """Return how much memory the steps share."""
        counts = [(rows, size) for of_rows, _, size in self._slots if of_rows]
        counts += [(items, self._slots[i][2]) for i in self._of_parts]
        return sum(-(-n * size // 64) * 64 for n, size in counts)

    # ---------------------------------------------------------------------------------- loops

    def _loop(
        self, low: str, high: str, body: Callable, *, step: str = "1", inner: bool = False
    ) -> None:
        """Write ``for (i = low; i < high; i += step) body(i)``.

        The iterations of an ``inner`` loop are independent.
        """
        asm = self.asm
        before, head, end = asm.block, asm.fresh("loop"), asm.fresh("end")
        some = asm.let(f"icmp slt i64 {low}, {high}")
        asm.say(f"br i1 {some}, label %{head}, label %{end}")
        asm.start(head)
        i, following = "%" + asm.fresh("i"), "%" + asm.fresh("i")
        at = len(asm.lines)
        asm.lines.append("")
        tail, outer_group = "", self._group
        if inner and self._independent:
            group, loop, parallel = (len(self._metadata) + k for k in range(3))
            self._metadata += [
                f"!{group} = distinct !{{}}",
                f"!{loop} = distinct !{{!{loop}, !{parallel}}}",
                f'!{parallel} = !{{!"llvm.loop.parallel_accesses", !{group}}}',
            ]
            self._group = f", !llvm.access.group !{group}"
            tail = f", !llvm.loop !{loop}"
        body(i)
        self._group = outer_group
        asm.lines[at] = f"  {i} = phi i64 [{low}, %{before}], [{following}, %{asm.block}]"
        asm.say(f"{following} = add nsw i64 {i}, {step}")
        more = asm.let(f"icmp slt i64 {following}, {high}")
        asm.say(f"br i1 {more}, label %{head}, label %{end}{tail}")
        asm.start(end)

    def _inner_loop(self, low: str, high: str, base: str, body: Callable) -> None:
        """Loop over the inner counter: ``body(counters, lane)``, lanes being ``base + counter``."""
        name, split = self.plan.inner, self.plan.split
        asm = self.asm
        if not split:
            self._loop(low, high, lambda i: body({name: i}, self._sum(base, i)), inner=True)
            return
        n = self._number(split)
        first = asm.let(f"udiv i64 {low}, {n}")
        last = asm.let(f"udiv i64 {self._sum(high, self._number(split), -1)}, {n}")

        def outer(hi):
            start = asm.let(f"mul nsw i64 {hi}, {n}")
            lowest = self._largest(asm.let(f"sub nsw i64 {low}, {start}"), "0")
            highest = self._smallest(asm.let(f"sub nsw i64 {high}, {start}"), n)
            lane_base = self._sum(base, start)

            def one(lo):
                whole = self._sum(start, lo)
                counters = {name: whole, name + "_hi": hi, name + "_lo": lo}
                body(counters, self._sum(lane_base, lo))

            known = self._levels[-1].known if self._levels else {}
            self._levels.append(_Level(asm, {**known, name + "_hi": hi}))
            self._loop(lowest, highest, one, inner=True)
            self._levels.pop().close()

        self._loop(first, last, outer)

    def _sum(self, a: str, b: str, offset: int = 0) -> str:
        out = b if a == "0" else self.asm.let(f"add nsw i64 {a}, {b}")
        return self.asm.let(f"add nsw i64 {out}, {offset}") if offset else out

    def _difference(self, a: str, b: str) -> str:
        return a if b == "0" else self.asm.let(f"sub nsw i64 {a}, {b}")

    def _product(self, a: str, b: str) -> str:
        if b == "1":
            return a
        return self.asm.let(f"mul nsw i64 {a}, {b}")

    def _smallest(self, a: str, b: str) -> str:
        less = self.asm.let(f"icmp slt i64 {a}, {b}")
        return self.asm.let(f"select i1 {less}, i64 {a}, i64 {b}")

    def _largest(self, a: str, b: str) -> str:
        less = self.asm.let(f"icmp slt i64 {a}, {b}")
        return self.asm.let(f"select i1 {less}, i64 {b}, i64 {a}")

    # ---------------------------------------------------------------------------------- tiles

    def _write(self) -> None:
        kind_ = self.plan.kind
        # Lanes of a row or edge, by level.
        self.widths = ["1", "1", "1"]
        if kind_ == "segments":
            features, run = self.plan.loops.features, self.plan.split
            runs = -(-features // run) if run and self.plan.inner == "f" else 1
            self.widths = ["1", self._number(runs), self._number(features)]
        if kind_ == "map":
            self._write_map()
        elif self.plan.separate:
            self._write_steps()
        else:
            self._loop("%begin", "%end", self._row_tile, step="%tile")

    def _write_map(self) -> None:
        (section,) = (s for s in self.plan.sections if not s.in_row)
        self.r0, self.r1, self.n_rows = "0", "1", "1"
        if not self._slots:
            self._set_part("%begin", "%end")
            self._stages(section)
            return

        def one(i):
            self._set_part(i, self._smallest(self._sum(i, "%chunk"), "%end"))
            self._stages(section)

        self._loop("%begin", "%end", one, step="%chunk")

    def _write_steps(self) -> None:
        """Write each section as a step of its own: of rows, and of all parts of all rows."""
        asm, sections = self.asm, self.plan.sections
        cases = " ".join(f"i64 {k}, label %step{k}" for k in range(len(sections)))
        asm.say(f"switch i64 %step, label %done [{cases}]")
        for k, section in enumerate(sections):
            asm.start(f"step{k}")
            if section.in_row:
                self.r0, self.r1, self.n_rows = "%begin", "%end", asm.let("sub i64 %end, %begin")
                for a, result, _ in sections[k - 1].reductions if k else ():
                    self._loop("%begin", "%end", lambda r, x=(a, result): self._merge(*x, r))
                self._stages(section)
            else:
                self._loop("%begin", "%end", lambda i, section=section: self._part(section, i))
            asm.say("br label %done")
        asm.start("done")

    def _part(self, section: Section, item: str) -> None:
        asm = self.asm
        self.r0 = asm.let(f"udiv i64 {item}, %leaves")
        leaf = asm.let(f"urem i64 {item}, %leaves")
        self.r1, self.n_rows = self._sum(self.r0, "0", 1), "1"
        self._set_part(self._table(leaf), self._table(self._sum(leaf, "0", 1)))
        self._item = item
        if section.reductions:
            self._start_reductions(section)
        self._stages(section)
        self._item = None

    def _table(self, i: str) -> str:
        at = self._sum("%tables", i)
        return self._fetch("%numbers", at, _INT64)

    def _merge(self, a: Accumulator, result: Planned, r: str) -> None:
        """Make a row's total of those of its parts, two at a time as NumPy adds."""
        asm, base = self.asm, self._product(r, "%leaves")
        pairs = asm.let("add i64 %leaves, 1")

        def one(k):
            at = self._sum(pairs, asm.let(f"shl i64 {k}, 1"))
            to, other = (self._sum(base, self._table(self._sum(at, "0", j))) for j in (0, 1))
            self._item = to
            if a.op.startswith("arg"):
                index = self._fetch(f"%part{result.slot}", other, _INT64)
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

    def _set_part(self, low: str, high: str) -> None:
        self.c0, self.c1 = low, high
        self.n_cols = self._difference(high, low)

    def _row_tile(self, r: str) -> None:
        self.r0, self.r1 = r, self._smallest(self._sum(r, "%tile"), "%end")
        self.n_rows = self._difference(self.r1, self.r0)
        for section in self.plan.sections:
            if section.in_row:
                self._stages(section)
                continue
            if section.reductions:
                self._start_reductions(section)
            if self.plan.kind == "segments":
                self._edges(section)
                continue
            if self.plan.kind != "columns":
                self._set_part("0", "%cols")
                self._stages(section)
                continue

            def part_(c, section=section):
                self._set_part(c, self._smallest(self._sum(c, "%chunk"), "%cols"))
                self._stages(section)

            self._loop("0", "%cols", part_, step="%chunk")

    def _edges(self, section: Section) -> None:
        """Go over the edges of the tile's rows, as many at once as the slots have room for."""
        first, last = (self._edge(r) for r in (self.r0, self.r1))

        def part_(c):
            self._set_part(c, self._smallest(self._sum(c, "%chunk"), last))
            self._stages(section)

        self._loop(first, last, part_, step="%chunk")
        for a, result, _ in section.reductions:
            if a.op == "mean":
                self._average(a, result)

    def _edge(self, r: str) -> str:
        """Return where the edges of row ``r`` begin."""
        indptr = self.plan.buffers[self.plan.loops.indptr]
        x = self._fetch(f"%b_{indptr.name}", r, indptr.dtype)
        return self.asm.cast(x, indptr.dtype, _INT64)

    def _average(self, a: Accumulator, result: Planned) -> None:
        def one_r(r):
            n = self._difference(self._edge(self._sum(r, "0", 1)), self._edge(r))
            n = self.asm.cast(self._largest(n, "1"), _INT64, a.dtype)
            width = self.widths[result.level]
            base = self._product(self._difference(r, self.r0), width)

            def one(f):
                lane = self._sum(base, f)
                total = self._fetch(f"%slot{result.slot}", lane, a.dtype)
                mean = self.asm.apply("divide", a.dtype, [total, n])
                self._put(f"%slot{result.slot}", lane, a.dtype, mean)

            self._loop("0", width, one, inner=True)

        self._loop(self.r0, self.r1, one_r)

    def _stages(self, section: Section) -> None:
        n_stages = section.stages()
        for stage in range(n_stages):
            last = stage == n_stages - 1
            kept = [v for v in section.values if v.native and v.slot is not None]
            kept = [v for v in kept if v.time[1] == stage]
            stores = section.stores if last else []
            totals = [x for x in section.reductions if last and self.plan.adds_up_in_stage(x[0])]
            for level in (0, 1, 2):
                parts = (
                    [v for v in kept if v.level == level],
                    [s for s in stores if self._store_level(s) == level],
                    [x for x in totals if x[1].level == level],
                )
                if any(parts):
                    self._stage(section, *parts, level)
            for v in section.values:
                if not v.native and v.time[1] == stage:
                    self._call_map(v, section)
        for a, result, of in section.reductions:
            if not self.plan.adds_up_in_stage(a):
                self._reduce(a, result, of)

    def _store_level(self, store: tuple) -> int:
        _, place, value, deps = store
        levels = [self.plan.level_of(ix.names_in(place)), *(d.level for d in deps.values())]
        return max(value.level, *levels)

    def _nest(
        self, in_row: bool, level: int, outside: Callable, body: Callable, after: Callable
    ) -> None:
        """Loop over the tile's rows or elements.

        ``outside(counters, lanes)`` is written before the inner loop of a row, ``after()`` behind
        it, and ``body(counters, lanes)`` for each element. ``lanes`` has those that are known, by
        (whether of rows, level).
        """
        plan = self.plan
        if plan.kind == "segments":
            self._nest_segments(in_row, level, outside, body, after)
            return
        row, element = (True, 2), (False, 2)
        if plan.kind == "map":
            base = self._difference("0", self.c0) if self.c0 != "0" else "0"
            outside({}, {})
            self._inner_loop(self.c0, self.c1, base, lambda c, lane: body(c, {element: lane}))
        elif plan.kind == "columns":
            base = self._difference("0", self.r0)
            if in_row:
                outside({}, {})
                self._inner_loop(self.r0, self.r1, base, lambda c, lane: body(c, {row: lane}))
                return

            def one_c(c):
                line = self._product(self._difference(c, self.c0), self.n_rows)
                outside({"c": c}, {})
                self._inner_loop(
                    self.r0,
                    self.r1,
                    base,
                    lambda r, lane: body(
                        {"c": c, **r}, {element: self._sum(line, lane), row: lane}
                    ),
                )

            self._loop(self.c0, self.c1, one_c)
        elif in_row:
            outside({}, {})

            def one(r):
                body({"r": r}, {row: self._difference(r, self._origin())})

            self._loop(self.r0, self.r1, one, inner=True)
        else:

            def one_r(r):
                lanes = {row: self._difference(r, self._origin())}
                start = self._product(self._difference(r, self.r0), self.n_cols)
                base = self._difference(start, self.c0)
                outside({"r": r}, lanes)
                self._inner_loop(
                    self.c0,
                    self.c1,
                    base,
                    lambda c, lane: body({"r": r, **c}, {element: lane, **lanes}),
                )
                after()

            self._loop(self.r0, self.r1, one_r)

    def _origin(self) -> str:
        """Return the row that the first lane of a row's slots belongs to."""
        return "0" if self.plan.separate else self.r0

    def _slot_pointer(self, v: Planned) -> str:
        """Return where the slot's values of the tile are."""
        if not (v.in_row and self.plan.separate):
            return f"%slot{v.slot}"
        return self._pointer(f"%slot{v.slot}", self._product(self.r0, str(v.dtype.itemsize)), "i8")

    def _nest_segments(
        self, in_row: bool, level: int, outside: Callable, body: Callable, after: Callable
    ) -> None:
        """Loop over the tile's rows, or over the edges of each, and over features (level 2).

        At level 1 the last loop is over runs of features, at level 0 over the edges or rows.
        """

        def lanes_of(of_rows, at):
            """Return the lane of a row or edge at level 0, and the first ones at 1 and 2."""
            known = {(of_rows, k): self._product(at, self.widths[k]) for k in (0, 1, 2)}
            return {key: lane for key, lane in known.items() if key[1] <= level}

        def features(counters, starts):
            """Write the loop over features or runs; ``starts`` are the lanes it begins at."""
            outside(counters, {key: lane for key, lane in starts.items() if key[1] == 0})
            runs = {key: lane for key, lane in starts.items() if key[1] == 1}

            def in_run(hi):
                return {key: self._sum(lane, hi) for key, lane in runs.items()}

            def one(f, lane):
                known = in_run(f["f_hi"]) if "f_hi" in f else {}
                ends = {k: self._sum(x, lane) for k, x in starts.items() if k[1] == 2}
                body({**counters, **f}, {**starts, **known, **ends})

            if level == 2:
                self._inner_loop("0", self.widths[2], "0", one)
            else:
                self._loop(
                    "0",
                    self.widths[1],
                    lambda hi: body({**counters, "f_hi": hi}, {**starts, **in_run(hi)}),
                    inner=True,
                )

        def one_r(r):
            rows = lanes_of(True, self._difference(r, self.r0))
            if in_row:
                features({"r": r}, rows)
                return
            first = self._largest(self._edge(r), self.c0)
            last = self._smallest(self._edge(self._sum(r, "0", 1)), self.c1)
            if level:

                def one_c(c):
                    edges = lanes_of(False, self._difference(c, self.c0))
                    features({"r": r, "c": c}, {**rows, **edges})

                self._loop(first, last, one_c)
                return
            outside({"r": r}, rows)

            if self.plan.inner == "f":

                def one(c):
                    body({"r": r, "c": c}, {**rows, (False, 0): self._difference(c, self.c0)})

                self._loop(first, last, one, inner=True)
            else:
                base = self._difference("0", self.c0)
                self._inner_loop(
                    first,
                    last,
                    base,
                    lambda c, lane: body({"r": r, **c}, {**rows, (False, 0): lane}),
                )
            after()

        if in_row and level == 0:
            outside({}, {})

            def one_row(r):
                body({"r": r}, {(True, 0): self._difference(r, self.r0)})

            self._loop(self.r0, self.r1, one_row, inner=True)
        else:
            self._loop(self.r0, self.r1, one_r)

    def _stage(self, section: Section, kept: list, stores: list, totals: list, level: int) -> None:
        plan = self.plan
        early: dict[Planned, Value] = {}
        places: list[_Level] = []
        by_row = plan.kind == "rows" or (plan.kind == "segments" and level == 0)
        first = self._before_inner(section, kept, stores, totals, level)
        # Totals of a row whose elements the inner loop runs over are kept in registers.
        registers = totals if by_row and totals else []

        def outside(counters, lanes):
            early.clear()
            self.counters, self.lanes, self.cache = counters, lanes, early
            for v in first:
                self._get(v)
            for i, (a, result, _) in enumerate(registers):
                total = self._fetch(*self._total_place(result), a.dtype)
                self._put(f"%total{i}", "0", a.dtype, total)
            places.append(_Level(self.asm, counters))
            self._levels = [places[-1]]

        def after():
            for i, (a, result, _) in enumerate(registers):
                total = self._fetch(f"%total{i}", "0", a.dtype)
                self._put(*self._total_place(result), a.dtype, total)

        def body(counters, lanes):
            self.counters, self.lanes, self.cache = counters, lanes, dict(early)
            for v in kept:
                self.cache[v] = x = self._compute(v)
                self._put(f"%slot{v.slot}", self.lanes[v.in_row, v.level], v.dtype, x)
            # All is read before any is written: an output may lie where an input does.
            values = [(s, self._get(s[2]), self._place(s[1], s[3])) for s in stores]
            sums = [self._total(*x, i if registers else None) for i, x in enumerate(totals)]
            for (name, _, value, _), x, place in values:
                self._put(f"%b_{name}", place, value.dtype, x)
            for write in sums:
                write()

        self._n_totals = max(self._n_totals, len(registers))
        self._independent = not registers
        self._nest(section.in_row, level, outside, body, after)
        self._independent = True
        for place in places:
            place.close()
        self._levels = []

    def _before_inner(
        self, section: Section, kept: list, stores: list, totals: list, level: int
    ) -> list:
        """Return the values that are the same in the whole of the inner loop."""
        plan = self.plan
        if section.in_row and (plan.kind != "segments" or level == 0):
            return []
        inner = {plan.inner + end for end in ("", "_hi", "_lo")}
        if plan.kind == "segments":
            inner = {"c", "c_hi", "c_lo"} if level == 0 else {"f", "f_hi", "f_lo"}
        found: dict[Planned, None] = {}

        def is_same(v):
            if inner & v.counters:
                return False
            if v.slot is None:
                return all(is_same(d) for d in v.deps.values())
            if plan.kind == "segments":
                return v.level == 0 and (v.in_row or level > 0)
            return v.in_row and plan.kind == "rows"

        def visit(v, root=False):
            if not root and is_same(v):
                found[v] = None
            elif v.slot is None or root:
                for d in v.deps.values():
                    visit(d)

        for v in kept:
            visit(v, root=True)
        for _, _, value, deps in stores:
            for d in (value, *deps.values()):
                visit(d)
        for _, _, of in totals:
            visit(of)
        return list(found)

    # --------------------------------------------------------------------------------- values

    def _get(self, v: Planned) -> Value:
        """Return the register of a value: known, read from its slot, or computed here."""
        if v not in self.cache:
            if v.slot is not None:
                lane = self.lanes[v.in_row, v.level]
                self.cache[v] = self._fetch(f"%slot{v.slot}", lane, v.dtype)
            else:
                self.cache[v] = self._compute(v)
        return self.cache[v]

    def _compute(self, v: Planned) -> Value:
        asm, op = self.asm, v.op
        if op == "load":
            name, place, mask = v.args
            at = self._place(place, v.deps)
            if mask is None:
                return self._fetch(f"%b_{name}", at, v.dtype)
            return self._masked(self._get(v.deps[mask]), f"%b_{name}", at, v.dtype)
        if op == "scalar":
            return self._scalar(v.args[0], v.dtype)
        if op == "index":
            return asm.cast(self._place(v.args[0], v.deps), _INT64, v.dtype)
        if op == "in_range":
            place, low, high = v.args
            x = self._place(place, v.deps)
            above = asm.let(f"icmp sge i64 {x}, {self._signed(low)}")
            below = asm.let(f"icmp slt i64 {x}, {self._signed(high)}")
            return asm.let(f"and i1 {above}, {below}")
        if op == "divides":
            self.divides = True
            rest = asm.let(f"srem i64 {self._place(v.args[0], v.deps)}, {self._number(v.args[1])}")
            return asm.let(f"icmp eq i64 {rest}, 0")
        args = [self._get(v.deps[name]) for name in v.args]
        operand = v.deps[v.args[0]].dtype
        if op == "cast":
            return asm.cast(args[0], operand, v.dtype)
        return asm.apply(op, v.dtype if op == "where" else operand, args)

    def _scalar(self, name: str, dtype: np.dtype) -> Value:
        """Return a number that is an argument; it is read on entry."""
        if name not in self._scalars:
            lines, self.asm.lines = self.asm.lines, []
            group, self._group = self._group, ""
            self._scalars[name] = self._fetch(f"%a_{name}", "0", dtype)
            self._late_entry += self.asm.lines
            self.asm.lines, self._group = lines, group
        return self._scalars[name]

    def _signed(self, n: int) -> str:
        return self._difference("0", self._number(-n)) if n < 0 else self._number(n)

    def _place(self, x: Expr, deps: dict) -> str:
        """Return an index expression as an int64."""
        asm = self.asm
        out = None
        for atom, factor in x.terms:
            term = self._term(atom, abs(factor), deps)
            if out is None and factor > 0:
                out = term
            else:
                out = asm.let(f"{'add' if factor > 0 else 'sub'} nsw i64 {out or 0}, {term}")
        if x.offset or out is None:
            word = "add" if x.offset >= 0 else "sub"
            out = asm.let(f"{word} nsw i64 {out or 0}, {self._number(abs(x.offset))}")
        return out

    def _term(self, atom: Any, factor: int, deps: dict) -> str:
        """Return a term, computed before the loops that do not change it if it has a division.

        LLVM does not move divisions, and goes wrong where it moves one behind a mask.
        """
        if type(atom) in (Div, Mod):
            needed = ix.names_in(atom.numerator)
            level = next((x for x in self._levels if needed <= x.known.keys()), None)
            if level is not None and (atom, factor) in level.terms:
                return level.terms[atom, factor]
            lines, counters = self.asm.lines, self.counters
            if level is not None:
                self.asm.lines, self.counters = level.lines, level.known
            self.divides = True
            word = "udiv" if type(atom) is Div else "urem"
            numerator = self._place(atom.numerator, deps)
            term = self.asm.let(f"{word} i64 {numerator}, {self._number(atom.divisor)}")
            term = self._product(term, self._number(factor))
            if level is not None:
                level.terms[atom, factor] = term
                self.asm.lines, self.counters = lines, counters
            return term
        if type(atom) is Loaded:
            loaded = deps[atom.name]
            term = self.asm.cast(self._get(loaded), loaded.dtype, _INT64)
        else:
            term = self.counters[atom.name]
        return self._product(term, self._number(factor))

    def _pointer(self, base: str, index: str, type_: str) -> str:
        if index == "0":
            return base
        return self.asm.let(f"getelementptr {type_}, ptr {base}, i64 {index}")

    def _fetch(self, base: str, index: str, dtype: np.dtype) -> Value:
        asm = self.asm
        if kind(dtype) == "c":
            p = part(dtype)
            t = llvm_type(p)
            first = self._pointer(base, index, f"{{{t}, {t}}}")
            second = asm.let(f"getelementptr {t}, ptr {first}, i64 1")
            return self._fetch(first, "0", p), self._fetch(second, "0", p)
        t = memory_type(dtype)
        pointer = self._pointer(base, index, t)
        x = asm.let(f"load {t}, ptr {pointer}, align {dtype.itemsize}{self._group}")
        return asm.let(f"icmp ne i8 {x}, 0") if kind(dtype) == "b" else x

    def _put(self, base: str, index: str, dtype: np.dtype, x: Value) -> None:
        asm = self.asm
        if kind(dtype) == "c":
            p = part(dtype)
            t = llvm_type(p)
            first = self._pointer(base, index, f"{{{t}, {t}}}")
            second = asm.let(f"getelementptr {t}, ptr {first}, i64 1")
            self._put(first, "0", p, x[0])
            self._put(second, "0", p, x[1])
            return
        t = memory_type(dtype)
        if kind(dtype) == "b":
            x = asm.let(f"zext i1 {x} to i8")
        pointer = self._pointer(base, index, t)
        asm.say(f"store {t} {x}, ptr {pointer}, align {dtype.itemsize}{self._group}")

    def _masked(self, mask: str, base: str, index: str, dtype: np.dtype) -> Value:
        """Return what is in memory, or zero where it must not be read."""
        asm = self.asm
        before, inside, after = asm.block, asm.fresh("read"), asm.fresh("on")
        asm.say(f"br i1 {mask}, label %{inside}, label %{after}")
        asm.start(inside)
        # Not a parallel access: LLVM would take that for leave to read where it must not.
        group, self._group = self._group, ""
        x = self._fetch(base, index, dtype)
        self._group = group
        asm.say(f"br label %{after}")
        asm.start(after)

        def joined(value, dtype_):
            zero = identity("sum", dtype_)
            t = llvm_type(dtype_)
            return asm.let(f"phi {t} [{zero}, %{before}], [{value}, %{inside}]")

        if kind(dtype) == "c":
            return tuple(joined(value, part(dtype)) for value in x)
        return joined(x, dtype)

    # ---------------------------------------------------------------------------- NumPy's loops

    def _call(self, loop: _ufuncs.Loop, operands: list[tuple[str, str]], n: str) -> None:
        """Call a loop of NumPy on (pointer, step in bytes) of each array."""
        asm = self.asm
        if loop not in self._loop_names:
            names = [self._parameter(address, "f") for address in loop]
            self._entry.append(f"  {names[0]}_c = inttoptr i64 {names[0]} to ptr")
            self._loop_names[loop] = names[0] + "_c", names[1], names[2]
        function, context, auxdata = self._loop_names[loop]
        for i, (pointer, step) in enumerate(operands):
            at = self._pointer("%data", str(i), "ptr")
            asm.say(f"store ptr {pointer}, ptr {at}")
            at = self._pointer("%steps", str(i), "i64")
            asm.say(f"store i64 {step}, ptr {at}")
        asm.say(f"store i64 {n}, ptr %count")
        asm.let(
            f"call i32 {function}(i64 {context}, ptr %data, ptr %count, ptr %steps, i64 {auxdata})"
        )

    def _call_map(self, v: Planned, section: Section) -> None:
        in_row = section.in_row
        if self.plan.kind == "segments":
            n = self._product(self.n_rows if in_row else self.n_cols, self.widths[v.level])
        else:
            n = self._product(self.n_rows, "1" if in_row else self.n_cols)
        operands = [self._operand(v.deps[name], in_row) for name in v.args]
        operands.append((self._slot_pointer(v), str(v.dtype.itemsize)))
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

    # ------------------------------------------------------------------------------ reductions

    def _total_place(self, result: Planned, lane: str = "", *, best: bool = False) -> tuple:
        """Return where the total of a row is, or of this part of a row."""
        slot = result.best_slot if best else result.slot
        if self._item is not None:
            return f"%part{slot}", self._item
        return f"%slot{slot}", lane or self.lanes[True, result.level]

    def _start_reductions(self, section: Section) -> None:
        def start(a, result, lane):
            if a.op.startswith("arg"):
                self._put(*self._total_place(result, lane), _INT64, "-1")
                zero = identity("sum", a.dtype)
                self._put(*self._total_place(result, lane, best=True), a.dtype, zero)
            else:
                value = identity(a.op, a.dtype)
                self._put(*self._total_place(result, lane), a.dtype, value)

        for a, result, _ in section.reductions:
            if self._item is not None:
                start(a, result, "")
                continue
            n = self._product(self.n_rows, self.widths[result.level])
            self._loop("0", n, lambda lane, x=(a, result): start(*x, lane), inner=True)

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
        index = self._fetch(*index_place, _INT64)
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
            self._put(*index_place, _INT64, index)
            self._put(*best_place, dtype, best)

        return write

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
            if not a.op.startswith("arg"):
                base, at = self._total_place(result, lane)
                at = self._product(at, str(a.dtype.itemsize))
                total = self._pointer(base, at, "i8"), "0"
                loop = _ufuncs.find(a.op, a.dtype)
                self._call(loop, [total, (pointer, step), total], self.n_cols)
                return

            def one(c):
                at = self._product(self._difference(c, self.c0), step)
                x = self._fetch(self._pointer(pointer, at, "i8"), "0", a.dtype)
                self._best(a, result, x, lane, c)()

            self._loop(self.c0, self.c1, one)

        self._loop(self.r0, self.r1, one_r)
