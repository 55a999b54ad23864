"""Loops, values and memory of kernels for the CPU, as text; see ``_cpu_text``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._cpu_start import FIXED
from rtxarr.polygraph._index import Div, Expr, Loaded, Mod
from rtxarr.polygraph.codegen import _ufuncs
from rtxarr.polygraph.codegen._assembly import (
    Assembly,
    Value,
    kind,
    llvm_type,
    memory_type,
    part,
)
from rtxarr.polygraph.codegen._cpu import NOT_MAPS, Plan, Planned

INT64 = np.dtype(np.int64)


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


class Before:
    """A place before a loop, for what its iterations share; ``known`` are the counters there."""

    def __init__(self, asm: Assembly, known: dict[str, str]) -> None:
        self.known = known
        self.lines: list[str] = []
        self.terms: dict[tuple, str] = {}
        self._asm, self._at = asm, len(asm.lines)
        asm.lines.append("")

    def close(self) -> None:
        self._asm.lines[self._at] = "\n".join(self.lines)


class Values:
    """Writes loops, and the values of a plan where the counters and lanes are known.

    Attributes
    ----------
    counters : dict of str to str
        Registers of the counters of the loops that are open.
    lanes : dict of (bool, int) to str
        Where in slots the current row's (True) or element's value of a level is.
    cache : dict of Planned to Value
        Values that are in registers.
    """

    counters: dict[str, str]
    lanes: dict[tuple[bool, int], str]
    cache: dict[Planned, Value]

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
        self._levels: list[Before] = []
        self._n_totals = 0
        self._item: str | None = None  # in parts: which part of all parts of all rows
        self._independent = True
        # Writes what is the same in the whole of a run of the inner counter.
        self._at_run: Callable = lambda counters: None

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
            self._at_run({**known, name + "_hi": hi})
            self._levels.append(Before(asm, {**known, name + "_hi": hi}))
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

    def _get(self, v: Planned) -> Value:
        """Return the register of a value: known, read from its slot, or computed here."""
        cache, waiting = self.cache, [v]
        while waiting:
            x = waiting[-1]
            if x in cache:
                waiting.pop()
            elif x.slot is not None:
                lane = self.lanes[x.in_row, x.level]
                cache[x] = self._fetch(f"%slot{x.slot}", lane, x.dtype)
            else:
                operands = [] if x.op in NOT_MAPS else [x.deps[name] for name in x.args]
                missing = [d for d in operands if d not in cache]
                if missing:  # they first: a call for each would go as deep as their chain is long
                    waiting += reversed(missing)
                else:
                    cache[x] = self._compute(x)
        return cache[v]

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
            return asm.cast(self._place(v.args[0], v.deps), INT64, v.dtype)
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
            term = self.asm.cast(self._get(loaded), loaded.dtype, INT64)
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
