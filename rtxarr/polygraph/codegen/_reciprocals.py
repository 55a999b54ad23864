"""Quotients as products, for mode "fast": by what a row has in common, and in sigmoids."""

from __future__ import annotations

import dataclasses
from collections import Counter

from rtxarr.polygraph._loops import Loops, Statement
from rtxarr.polygraph.codegen import _operations as ops


def by_reciprocals(loops: Loops) -> Loops:
    """Return loops that divide once a row where they would divide each element.

    Quotients are then right to two units in the last place, and infinite where the divisor is so
    small that its reciprocal is.
    """
    divisors = _divisors(loops)
    if not divisors:
        return loops
    names = {name: f"{name}_reciprocal" for name in divisors}

    def product(s: Statement) -> Statement:
        if s.op != "divide" or s.args[1] not in names:
            return s
        return dataclasses.replace(s, op="multiply", args=(s.args[0], names[s.args[1]]))

    def with_reciprocals(statements, known):
        made = [
            Statement(names[name], "reciprocal", (name,), dtype)
            for name, dtype in divisors.items()
            if name in known
        ]
        return (*statements, *made)

    phases = [
        dataclasses.replace(
            p,
            body=tuple(map(product, p.body)),
            after=with_reciprocals(
                p.after, {*(s.name for s in p.after), *(a.name for a in p.accumulators)}
            ),
        )
        for p in loops.phases
    ]
    before = with_reciprocals(loops.before, {s.name for s in loops.before})
    return dataclasses.replace(loops, phases=tuple(phases), before=before)


_ROUGH = {"divide": "rough_divide", "reciprocal": "rough_reciprocal", "sigmoid": "rough_sigmoid"}


def with_rough_sigmoids(loops: Loops) -> Loops:
    """Return loops whose quotients by something plus an exponential take a GPU's reciprocal.

    It is zero for divisors over 8.5e37, so the exponential must not be in what is divided, and what
    is added to it is a number, as that of a divisor below the normal ones would be infinite.
    Exponentials that nothing else needs are a GPU's own, too.
    """
    if not any(s.op in _ROUGH for p in loops.phases for s in p.body):
        return loops
    phases = [
        dataclasses.replace(p, body=_with_rough_sigmoids(loops, p.body)) for p in loops.phases
    ]
    return dataclasses.replace(loops, phases=tuple(phases))


def _with_rough_sigmoids(loops: Loops, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    everything = {s.name: s for s in loops.statements if s.op != "store"}
    made = {s.name: s for s in body if s.op != "store" and ops.kind(s.dtype) in "hf"}
    used = Counter(name for s in loops.statements for name in s.args if isinstance(name, str))
    used += Counter(a.of for p in loops.phases for a in p.accumulators)
    used += Counter(s.of for p in loops.phases for s in p.scans)
    rough: dict[str, str] = {}
    for s in made.values():
        if s.op == "sigmoid":
            rough[s.name] = _ROUGH[s.op]
        total = made.get(s.args[-1]) if s.op in _ROUGH else None
        if total is None or total.op != "add":
            continue
        exponentials = [n for n in total.args if n in made and made[n].op == "exp"]
        rest = [n for n in total.args if n not in exponentials]
        if len(exponentials) != 1 or not all(_is_number(n, everything) for n in rest):
            continue
        if s.op == "divide" and exponentials[0] in _sources(s.args[0], made):
            continue
        rough[s.name] = _ROUGH[s.op]
        if used[exponentials[0]] == used[total.name] == 1:
            rough[exponentials[0]] = "rough_exp"
    return tuple(dataclasses.replace(s, op=rough.get(s.name, s.op)) for s in body)


def _is_number(name: str, made: dict[str, Statement]) -> bool:
    """Tell whether a value is one of the program's numbers, the same for all elements."""
    s = made.get(name)
    while s is not None and s.op == "cast":
        s = made.get(s.args[0])
    return s is not None and s.op == "scalar"


def _sources(name: str, made: dict[str, Statement]) -> set[str]:
    """Return the values that one is computed from, and its own name."""
    found, left = set(), [name]
    while left:
        name = left.pop()
        if name in made and name not in found:
            found.add(name)
            left += [x for x in made[name].args if isinstance(x, str)]
    return found


def _divisors(loops: Loops) -> dict:
    """Return what elements are divided by that belongs to their row, with the dtypes."""
    known = {s.name for s in loops.before}
    found = {}
    for phase in loops.phases:
        for s in phase.body:
            if s.op == "divide" and s.args[1] in known and ops.kind(s.dtype) in "hfd":
                found[s.args[1]] = s.dtype
        known |= {s.name for s in phase.after} | {a.name for a in phase.accumulators}
    return found
