"""Parts that all generated kernels share: numbers, index expressions, statements, packets.

The kernels of ``_kernels`` let a thread work on tiles of a few packets of ``lanes`` elements
that lie side by side. Where all that is read and written side by side is aligned (``packed``, which
the host says), a packet is consecutive elements and moves in 16-byte accesses; else neighbouring
threads take neighbouring elements. Both orders give a thread its elements in rising order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rtxarr.polygraph._index import Div, Expr, Loaded, Mod, Symbol
from rtxarr.polygraph._loops import Loops, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._dialects import Dialect
from rtxarr.polygraph.codegen._launch import Argument, Launches
from rtxarr.polygraph.codegen._snippets import SNIPPETS, needed, plain

BATCH = 2  # packets of a tile, at least


@dataclass(frozen=True)
class Kernel(Launches):
    """Generated text and how to run it.

    Attributes
    ----------
    dialect : Dialect
    head : str
        What all kernels of this index width and language begin with.
    snippets : tuple of str
        Names of the functions that it calls, in the order in which they must stand.
    bodies : tuple of str
        The text of each entry point.
    """

    dialect: Dialect
    head: str
    snippets: tuple[str, ...]
    bodies: tuple[str, ...]

    @property
    def body(self) -> str:
        return "\n".join(self.bodies)

    @property
    def text(self) -> str:
        return join_texts([self])


def join_texts(kernels: Iterable[Kernel]) -> str:
    """Return one translation unit of kernels of one language and index width."""
    kernels = list(kernels)
    names = dict.fromkeys(name for k in kernels for name in k.snippets)
    order = [name for name in SNIPPETS if name in names]
    wanted: dict[str, None] = {}
    for name in order:
        wanted |= dict.fromkeys((*needed(SNIPPETS[name]), name))
    bodies = dict.fromkeys(body for k in kernels for body in k.bodies)
    snippets = [SNIPPETS[name].strip("\n") for name in wanted]
    library = kernels[0].dialect.library
    return "\n".join([kernels[0].head, *map(library, map(plain, snippets)), "", *bodies])


class Lines:
    """Text being written, indented by blocks."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def block(self, opening: str = "", closing: str = "}") -> Iterator[None]:
        self(f"{opening} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self(closing)

    @contextmanager
    def unrolled(self, counter: str, count: int) -> Iterator[None]:
        self("UNROLL")
        with self.block(f"for (int {counter} = 0; {counter} < {count}; ++{counter})"):
            yield


class Texts:
    """The parameters of a kernel, and how expressions and statements are said with them."""

    def __init__(self, loops: Loops, dialect: Dialect, *, strict: bool, wide: bool) -> None:
        self.loops = loops
        self.dialect = dialect
        self.strict = strict
        self.wide = wide
        self.buffers = {b.name: b for b in loops.buffers}
        self.dtypes: dict[str, np.dtype] = {}
        self.of_row: set[str] = set()  # names whose value belongs to a row, not an element
        self.numbers: dict[int, str] = {}
        self.divisors: dict[int, str] = {}
        self.written: set[str] = {b.name for b in loops.buffers if b.is_output}
        for s in loops.statements:
            if s.op != "store":
                self.dtypes[s.name] = s.dtype
        for phase in loops.phases:
            self.of_row |= {s.name for s in phase.after} | {a.name for a in phase.accumulators}
            self.dtypes |= {a.name: a.result for a in phase.accumulators}
        self.of_row |= {s.name for s in loops.before}

    # ------------------------------------------------------------------------------ numbers

    def number(self, n: int) -> str:
        if abs(n) <= 1:
            return str(n)
        name = self.numbers.setdefault(abs(n), f"n{len(self.numbers)}")
        return name if n > 0 else f"-{name}"

    def divisor(self, n: int) -> str:
        return self.divisors.setdefault(n, f"d{len(self.divisors)}")

    def expr(self, e: Expr) -> str:
        """Return the text of an index expression over the counters in scope."""
        words = []
        for atom, factor in e.terms:
            text = self._atom(atom)
            if abs(factor) != 1:
                text = f"{text} * {self.number(abs(factor))}"
            words.append(("- " if factor < 0 else "+ ") + text)
        if e.offset or not words:
            words.append(("- " if e.offset < 0 else "+ ") + self.number(abs(e.offset)))
        text = " ".join(words)
        return text[2:] if text.startswith("+ ") else text.replace("- ", "-", 1)

    def _atom(self, atom: Any) -> str:
        if type(atom) is Symbol:
            return atom.name
        if type(atom) is Loaded:
            return f"(Index){atom.name}"
        call = "quotient" if type(atom) is Div else "rest"
        return f"{call}({self.expr(atom.numerator)}, {self.divisor(atom.divisor)})"

    def numbers_of(self) -> list[Argument]:
        """Return the parameters for all numbers that were said."""
        return [
            *(Argument("number", "Index", name, n) for n, name in self.numbers.items()),
            *(Argument("divisor", "Divisor", name, n) for n, name in self.divisors.items()),
        ]

    # --------------------------------------------------------------------------- statements

    def value_of(self, s: Statement) -> str:
        """Return the text of what a statement gives, but for a store."""
        if s.op == "load":
            buffer, place, mask = s.args
            text = f"#value({buffer}[{self.expr(place)}])"
            return text if mask is None else f"{mask} ? {text} : {ops.zero(s.dtype)}"
        if s.op == "scalar":
            return f"#value({s.args[0]})"
        if s.op == "index":
            return ops.cast_text(f"({self.expr(s.args[0])})", np.dtype(np.int64), s.dtype)
        if s.op == "in_range":
            place, low, high = s.args
            at = self.expr(place)
            tests = [] if low <= place.bounds[0] else [f"{at} >= {self.number(low)}"]
            return " && ".join([*tests, f"{at} < {self.number(high)}"])
        if s.op == "divides":
            place, n = s.args
            return f"rest({self.expr(place)}, {self.divisor(n)}) == 0"
        if s.op == "cast":
            return ops.cast_text(s.args[0], self.dtypes[s.args[0]], s.dtype)
        return ops.map_text(s.op, s.args, self.dtypes[s.args[-1]], strict=self.strict)

    def let(self, s: Statement) -> str:
        return f"const {ops.value(s.dtype)} {s.name} = {self.value_of(s)};"

    def store(self, s: Statement) -> str:
        buffer, place, name = s.args
        element = ops.stored(self.buffers[buffer].dtype)
        return f"{buffer}[{self.expr(place)}] = #Store<{element}>::of({name});"

    # ------------------------------------------------------------------------------ packets

    def step(self, e: Expr, counter: str) -> int | None:
        """Return how far ``e`` moves with ``counter`` inside an aligned packet: 0, 1 or None.

        None is any other way. It is told by the form of the expression alone, so that the text does
        not depend on sizes; :meth:`packs` says whether the sizes of these loops allow it.
        """
        total = 0
        for atom, factor in e.terms:
            if type(atom) is Symbol:
                step: int | None = int(atom.name == counter)
            elif type(atom) is Loaded:
                step = 0 if atom.name in self.of_row else None
            else:
                step = self.step(atom.numerator, counter)
                if type(atom) is Div and step == 1:
                    step = 0
            if step is None or (step and factor != 1):
                return None
            total += step
        return total if total <= 1 else None

    def packs(self, e: Expr, counter: str, lanes: int) -> bool:
        """Tell whether ``e`` moves as :meth:`step` says from multiples of ``lanes``."""
        for atom, _ in e.terms:
            if type(atom) in (Div, Mod):
                if not self.packs(atom.numerator, counter, lanes):
                    return False
                if self.step(atom.numerator, counter) == 1 and (
                    atom.divisor % lanes or not self._multiple(atom.numerator, counter, lanes)
                ):
                    return False
        return self.step(e, counter) != 1 or self._multiple(e, counter, lanes)

    def _multiple(self, e: Expr, counter: str, lanes: int) -> bool:
        """Tell whether ``e`` is a multiple of ``lanes`` where ``counter`` is one."""
        if e.offset % lanes:
            return False
        for atom, factor in e.terms:
            whole = (type(atom) is Symbol and atom.name == counter) or (
                type(atom) is Mod
                and atom.divisor % lanes == 0
                and self._multiple(atom.numerator, counter, lanes)
            )
            if not whole and factor % lanes:
                return False
        return True

    def hoisted(self, s: Statement) -> bool:
        """Tell whether a load of an element depends on counters and values of its row alone."""
        if s.op != "load" or s.args[2] is not None:
            return False
        return all(name in self.of_row for name in loaded_names(s.args[1]))

    def snippets_for(self, text: str) -> tuple[str, ...]:
        """Return the names of the snippets that ``text`` needs, for the dtypes of these loops."""
        names = set(needed(text))
        types = self._types()
        for name, short in (("float16", "f16"), ("bfloat16", "bf16")):
            if name in types:
                names |= {f"value_{short}"} if "value" in names else set()
                names |= {f"Store_{short}"} if "Store" in names else set()
        for exchange in names & {"shuffled", "from_lane"}:
            complex_ = (("complex64", "c64"), ("complex128", "c128"))
            names |= {f"{exchange}_{short}" for name, short in complex_ if name in types}
        if "Divisor " in text:
            names.add("Divisor_wide" if self.wide else "Divisor")
        return tuple(sorted(names))

    def _types(self) -> set[str]:
        values = {d.name for d in self.dtypes.values()}
        return {b.dtype.name for b in self.loops.buffers} | values

    def halves(self) -> str:
        """Return what comes before kernels with float16 or bfloat16 in them."""
        return self.dialect.halves if self._types() & set(ops.HALVES) else ""


def loaded_names(e: Expr) -> Iterator[str]:
    for atom, _ in e.terms:
        if type(atom) is Loaded:
            yield atom.name
        elif type(atom) is not Symbol:
            yield from loaded_names(atom.numerator)


def sources_of(s: Statement) -> list[str]:
    """Return the names of the values that a statement reads."""
    if s.op == "scalar":
        return []
    if s.op in ("load", "store"):
        extra = [] if s.args[2] is None else [s.args[2]]
        return [*loaded_names(s.args[1]), *extra]
    if s.op in ("index", "in_range", "divides"):
        return list(loaded_names(s.args[0]))
    return list(s.args)
