"""Quotients by what a whole row has in common as products with its reciprocal, for mode "fast"."""

from __future__ import annotations

import dataclasses

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
