"""Exact quotients of a packet at a time, for mode "strict" in CUDA.

The compiler's own division asks of each quotient whether its steps suffice, which parts what comes
before from what comes after. Here the elements of a packet take those steps and ask together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rtxarr.polygraph._loops import Statement
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._text import sources_of


class Stage(NamedTuple):
    """What each element of a packet computes, and the quotients of what is there then."""

    body: list[Statement]
    quotients: list[Statement]

    def sources(self) -> set[str]:
        return {name for s in (*self.body, *self.quotients) for name in sources_of(s)}


def is_quotient(s: Statement) -> bool:
    return s.op in ("divide", "reciprocal") and ops.kind(s.dtype) in "hf"


def stages_of(body: Sequence[Statement], given: Collection[str]) -> list[Stage]:
    """Return the statements of an element in stages, but those whose values are given.

    Each is as early as what it reads allows, but stores are last.
    """
    ready: dict[str, int] = {}
    numbers = []
    for s in body:
        numbers.append(max((ready.get(name, 0) for name in sources_of(s)), default=0))
        if s.op != "store" and s.name not in given:
            ready[s.name] = numbers[-1] + is_quotient(s)
    last = max(ready.values(), default=0)
    stages = [Stage([], []) for _ in range(last + 1)]
    for s, number in zip(body, numbers, strict=True):
        if s.op == "store":
            stages[last].body.append(s)
        elif s.name not in given:
            (stages[number].quotients if is_quotient(s) else stages[number].body).append(s)
    return stages
