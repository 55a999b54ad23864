"""Maps that read an array across: tiles go through shared memory, so that all accesses are in line.

The counter ``i`` is ``(o * n_a + a) * n_b + b``. Results lie along ``b``; what is read across lies
along ``a``. A block of 32 x 8 threads reads a tile of 32 x 32 with neighbouring threads along ``a``
and computes with them along ``b``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from rtxarr.polygraph import _index as ix
from rtxarr.polygraph._index import Div, Expr, Mod, Symbol
from rtxarr.polygraph._loops import Loops, Phase, Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._launch import Argument
from rtxarr.polygraph.codegen._text import Kernel, loaded_names
from rtxarr.polygraph.codegen._writer import Entry, Writer

_LEAST = 8  # sides below this are not worth a tile
_SIDE, _THREADS_Y = 32, 8


class Sides(NamedTuple):
    a: int
    b: int


def sides_of(loops: Loops) -> Sides | None:
    """Return the sides of the tiles for the loads that go across; None if there is no need."""
    if loops.kind != "map":
        return None
    found = {_sides_of_load(s, loops.cols) for s in loops.phases[0].body if _is_plain_load(s)}
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _is_plain_load(s: Statement) -> bool:
    """Tell whether a load needs no other value."""
    return s.op == "load" and s.args[2] is None and not any(loaded_names(s.args[1]))


def _sides_of_load(s: Statement, total: int) -> Sides | None:
    """Return the sides if what neighbours in memory is ``(i // n_b) % n_a``."""
    place = s.args[1]
    for atom, factor in place.terms:
        if factor == 1 and type(atom) in (Div, Mod):
            whole = type(atom) is Div
            inner = atom if whole else _only(atom.numerator)
            if type(inner) is Div and type(_only(inner.numerator)) is Symbol:
                n_b = inner.divisor
                sides = Sides(total // n_b if whole else atom.divisor, n_b)
                fits = min(sides) >= _LEAST and total % (sides.a * n_b) == 0
                # What does not change along b is of a row, and read as it is.
                if fits and "b" in ix.names_in(_in_tiles(place, sides, total)):
                    return sides
    return None


def _only(e: Expr) -> Any:
    """Return the atom that an expression is, if it is one."""
    return e.terms[0][0] if len(e.terms) == 1 and e.terms[0][1] == 1 and not e.offset else None


def _in_tiles(e: Expr, sides: Sides, total: int) -> Expr:
    """Return an expression with ``i`` written in terms of ``o``, ``a`` and ``b``."""
    o, a, b = ix.symbol("o", total // (sides.a * sides.b)), *map(ix.symbol, "ab", sides)
    return ix.substitute(e, "i", ix.add(ix.mul(o, sides.a * sides.b), ix.mul(a, sides.b), b))


def tiled(loops: Loops, sides: Sides) -> Loops:
    body = tuple(
        dataclasses.replace(
            s,
            args=tuple(
                _in_tiles(x, sides, loops.cols) if isinstance(x, Expr) else x for x in s.args
            ),
        )
        for s in loops.phases[0].body
    )
    return dataclasses.replace(loops, phases=(Phase(body),))


class Tiles(Writer):
    counter = "b"

    def __init__(self, loops: Loops, *args) -> None:
        sides = sides_of(loops)
        assert sides is not None
        self.sides = sides
        super().__init__(tiled(loops, sides), *args)

    def run(self) -> Kernel:
        d, out, texts = self.dialect, self.out, self.texts
        (phase,) = self.loops.phases
        across = [s for s in phase.body if _is_plain_load(s) and self._goes_across(s)]
        direct = [s for s in phase.body if texts.hoisted(s) and s not in across]
        count = _SIDE // _THREADS_Y
        out(d.shared_memory)
        out(f"const Index x = {d.thread_x}, y = {d.thread_y}, block = {d.block_x};")
        for name, rest, start in (("b", "rest", "block"), ("a", "rest", "rest_b")):
            out(f"const Index rest_{name} = quotient({start}, tiles_{name});")
            out(f"const Index {name}_0 = {rest}({start}, tiles_{name}) * {_SIDE};")
        out("const Index o = rest_a;")
        for s in self.loops.before:
            out(texts.let(s))
        size = 0
        for s in across:
            element = ops.value(s.dtype)
            out(
                f"SHARED {element}* const {s.name}_tile = "
                f"(SHARED {element}*)(shared_memory + {size});"
            )
            size += -(-_SIDE * (_SIDE + 1) * max(s.dtype.itemsize, 4) // 16) * 16
        for s in across:
            with out.unrolled("k", count):
                out(f"const Index a = a_0 + x, b = b_0 + y + k * {_THREADS_Y};")
                with out.block("if (a < n_a && b < n_b)"):
                    at = f"(y + k * {_THREADS_Y}) * {_SIDE + 1} + x"
                    out(f"{s.name}_tile[{at}] = {texts.value_of(s)};")
        for s in direct:
            out(f"{ops.value(s.dtype)} {s.name}_at[{count}];")
        with out.unrolled("k", count):
            self._place()
            for s in direct:
                out(f"{s.name}_at[k] = valid ? {texts.value_of(s)} : {ops.zero(s.dtype)};")
        out("BARRIER();")
        with out.unrolled("k", count):
            self._place()
            with out.block("if (valid)"):
                for s in phase.body:
                    kind = ops.value(s.dtype)
                    if s in across:
                        at = f"x * {_SIDE + 1} + y + k * {_THREADS_Y}"
                        out(f"const {kind} {s.name} = {s.name}_tile[{at}];")
                    elif s in direct:
                        out(f"const {kind} {s.name} = {s.name}_at[k];")
                    else:
                        out(texts.let(s) if s.op != "store" else texts.store(s))
        return self._finish(size)

    def _place(self) -> None:
        self.out(f"const Index a = a_0 + y + k * {_THREADS_Y}, b = b_0 + x;")
        self.out("const bool valid = a < n_a && b < n_b;")

    def _goes_across(self, s: Statement) -> bool:
        return (Symbol("a", self.sides.a), 1) in s.args[1].terms

    def _finish(self, shared: int) -> Kernel:
        n_a, n_b = self.sides
        tiles_a, tiles_b = -(-n_a // _SIDE), -(-n_b // _SIDE)
        grid = self.loops.cols // (n_a * n_b) * tiles_a * tiles_b
        arguments = [
            Argument("number", "Index", "n_a", n_a),
            Argument("number", "Index", "n_b", n_b),
            Argument("divisor", "Divisor", "tiles_a", tiles_a),
            Argument("divisor", "Divisor", "tiles_b", tiles_b),
        ]
        block = _SIDE, _THREADS_Y
        return self.finish([Entry("tiles", self.out, (grid, 1), block, shared, arguments, 256)])
