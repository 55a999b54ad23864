"""Which values of elements stay on chip between the passes of a kernel."""

from __future__ import annotations

import numpy as np

from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph.codegen import _operations as ops
from rtxarr.polygraph.codegen._text import Texts, sources_of

_NUMBERS = frozenset(("scalar", "index", "in_range", "divides"))
_CHEAP = frozenset("add subtract multiply negative positive abs where cast square".split())


def keep_plan(
    loops: Loops, texts: Texts, strict: bool, *, least: bool = False
) -> tuple[list[tuple[int, np.dtype]], list[dict[str, tuple[int, int, int]]]]:
    """Choose which values of elements stay on chip between passes.

    A later pass takes what an earlier one computed too, but for what is a cheap operation away from
    values that are on chip anyway; with ``least``, what cannot be computed anew and no more.

    Returns
    -------
    slots : list of (int, dtype)
        The bytes of an element of each array on chip, the largest first.
    keeps : list of dict
        For each phase the names that it writes or reads there: (slot, the phase that writes it,
        the last one that reads it).
    """
    made: dict[str, int] = {}
    bodies = [{s.name: s for s in p.body if s.op != "store"} for p in loops.phases]
    lives: dict[str, list[int]] = {}
    for number, phase in enumerate(loops.phases):
        found = _frontier(phase, bodies[number], made, lives, texts)
        if least:
            found = [name for name, s in bodies[number].items() if s.op == "scanned"]
        for name in found:
            lives.setdefault(name, [made[name], number])[1] = number
        for name in (*bodies[number], *(s.name for s in phase.scans)):
            made.setdefault(name, number)
    slots: list[tuple[int, np.dtype, int]] = []
    keeps: list[dict[str, tuple[int, int, int]]] = [{} for _ in loops.phases]

    def size(name: str) -> int:
        dtype = texts.dtypes[name]
        return dtype.itemsize if strict else max(dtype.itemsize, 4 * (ops.kind(dtype) == "h"))

    for name in sorted(lives, key=lambda n: (-size(n), lives[n])):
        begin, end = lives[name]
        dtype = texts.dtypes[name]
        free = [k for k, (_, other, used) in enumerate(slots) if other == dtype and used <= begin]
        slot = free[0] if free else len(slots)
        slots[slot : slot + 1] = [(size(name), dtype, end)]
        for number in range(begin, end + 1):
            if number == begin or name in bodies[number]:
                keeps[number][name] = (slot, begin, end)
    return [(s, dtype) for s, dtype, _ in slots], keeps


def _frontier(phase, body, made, lives, texts) -> list[str]:
    """Return the names that this pass takes from earlier ones instead of computing them anew."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    stack = [a.of for a in (*phase.accumulators, *phase.scans)]
    stack += [s.args[2] for s in phase.body if s.op == "store"]

    def leaves(name: str, depth: int) -> set[str] | None:
        """Return what lies on chip or is loaded that a few cheap operations make ``name`` of."""
        if name not in body or body[name].op in _NUMBERS:
            return set()
        if name in lives or body[name].op == "load":
            return {name}
        if depth == 0 or body[name].op not in _CHEAP:
            return None
        every: set[str] = set()
        for a in body[name].args:
            part = leaves(a, depth - 1)
            if part is None:
                return None
            every |= part
        return every

    def cheaper_anew(name: str) -> bool:
        found = leaves(name, 4)
        if name in lives or found is None or found == {name}:
            return False
        added = sum(texts.dtypes[n].itemsize for n in found - lives.keys())
        return added <= texts.dtypes[name].itemsize

    while stack:
        name = stack.pop()
        if name in seen or name not in body:
            continue
        seen.add(name)
        s = body[name]
        if name in made and s.op not in _NUMBERS:
            is_same = s.op == "load" and texts.step(s.args[1], "c") == 0
            if not is_same and not cheaper_anew(name):
                found[name] = None
                continue
        stack += sources_of(s)
    return list(found)
