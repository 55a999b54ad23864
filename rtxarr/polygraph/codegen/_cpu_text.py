"""Plans of kernels for the CPU as text: loops, slots and calls; see ``_cpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._cpu_start import FIXED
from rtxarr.polygraph.codegen import _ufuncs
from rtxarr.polygraph.codegen._assembly import Value
from rtxarr.polygraph.codegen._cpu import Plan, Planned, Section
from rtxarr.polygraph.codegen._cpu_totals import Totals
from rtxarr.polygraph.codegen._cpu_values import Before

# Where an object's memory begins, or the pointer to it: behind what every object starts with.
_HEAD = object.__basicsize__


class Writer(Totals):
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
        super().__init__(plan, contract=contract, literal=literal)
        self._allocate_slots()
        self._write()
        self.text = self._assembled()

    # ---------------------------------------------------------------------------------- parts

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
        self._of_parts: set[Any] = set()  # slots of totals
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
            room.append("  %hit = alloca i8")
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
                    self._loop(
                        "%begin", "%end", lambda r, a=a, result=result: self._merge(a, result, r)
                    )
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
        for scan, result, of in section.scans:
            self._scan(scan, result, of)

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
        places: list[Before] = []
        by_row = plan.kind == "rows" or (plan.kind == "segments" and level == 0)
        inner = plan.inner
        if plan.kind == "segments":
            inner = "c" if level == 0 else "f"
        wanted = section, kept, stores, totals, level
        first = self._before_inner(*wanted, {inner, f"{inner}_hi", f"{inner}_lo"})
        by_run = self._before_inner(*wanted, {inner, f"{inner}_lo"}) if plan.split else []
        of_run: dict[Planned, Value] = {}
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
            places.append(Before(self.asm, counters))
            self._levels = [places[-1]]

        def at_run(counters):
            self.counters, self.cache = counters, dict(early)
            for v in by_run:
                self._get(v)
            of_run.clear()
            of_run.update(self.cache)

        def after():
            for i, (a, result, _) in enumerate(registers):
                total = self._fetch(f"%total{i}", "0", a.dtype)
                self._put(*self._total_place(result), a.dtype, total)

        def body(counters, lanes):
            self.counters, self.lanes, self.cache = counters, lanes, {**early, **of_run}
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
        self._at_run = at_run
        self._nest(section.in_row, level, outside, body, after)
        self._independent, self._at_run = True, lambda counters: None
        for place in places:
            place.close()
        self._levels = []

    def _before_inner(
        self, section: Section, kept: list, stores: list, totals: list, level: int, inner: set
    ) -> list:
        """Return the values that are the same in the whole of a loop over ``inner``."""
        plan = self.plan
        if section.in_row and (plan.kind != "segments" or level == 0):
            return []
        same: dict[Planned, bool] = {}

        def is_same(v):
            """Tell it of ``v``, given that of what it is made of."""
            if inner & v.counters:
                return False
            if v.slot is None:
                return all(same[d] for d in v.deps.values())
            if plan.kind == "segments":
                return v.level == 0 and (v.in_row or level > 0)
            return v.in_row and plan.kind == "rows"

        wanted = [v for _, _, value, deps in stores for v in (value, *deps.values())]
        wanted += [of for _, _, of in totals]
        roots = [d for v in kept for d in v.deps.values()] + wanted
        for v in _in_order(roots, lambda v: () if v.slot is not None else v.deps.values()):
            same[v] = is_same(v)
        # From the roots down to what is the same, which is then enough.
        below = _in_order(
            roots,
            lambda v: () if same[v] or v.slot is not None else v.deps.values(),
        )
        return [v for v in below if same[v]]


def _in_order(roots: Iterable[Planned], sources: Callable) -> list[Planned]:
    """Return values and all that they are made of, each once and after its sources."""
    order: dict[Planned, None] = {}
    stack = [(v, False) for v in reversed([*roots])]
    while stack:
        v, ready = stack.pop()
        if ready:
            order[v] = None
        elif v not in order:
            stack.append((v, True))
            stack += [(d, False) for d in reversed([*sources(v)])]
    return list(order)
