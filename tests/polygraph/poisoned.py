"""Arenas that are filled with 0xFF where nothing is alive: a read of dead memory shows."""

import contextlib

import numpy as np

from rtxarr.polygraph import _arena
from rtxarr.polygraph._cpu_backend import CpuBackend
from rtxarr.polygraph._program import Program


def fill(*arrays):
    for x in arrays:
        x.reshape(-1).view(np.uint8)[:] = 0xFF


class Poisoned(CpuBackend):
    """Gives one block again and again; programs must be made in a ``with`` block of it.

    Attributes
    ----------
    programs : list of Program
        Those with an arena.
    """

    def __init__(self, mode="strict"):
        super().__init__(mode)
        self.programs = []

    def arena(self, n_bytes, parts):
        take, give = super().arena(n_bytes, parts)

        def poisoned():
            arrays = take()
            fill(*arrays)
            return arrays

        return poisoned, give

    def __enter__(self):
        self._body = body = Program._body

        def with_poison(program):
            lines = body(program)
            if program.arena is not None and program.backend is self:
                self.programs.append(program)
                program._values["fill"] = fill
                for (text, _), dead in zip(lines, dead_after(program), strict=True):
                    if dead:
                        text.append(f"fill({', '.join(map(program._name, dead))})")
            return lines

        Program._body = with_poison
        return self

    def __exit__(self, *error):
        Program._body = self._body


def dead_after(program):
    """Return for each step the results whose place holds nothing that is needed any more."""
    steps, places = program.steps, program.arena.places
    made = _arena.made_by(steps, program.graph, program.in_place, program.copied)
    kernels = {n for step in steps if step.loops is not None for n in step.results}

    def root(memory):
        node = memory.node
        while node in program.over:
            node = program.over[node]
        return node

    def span(memory):
        node = root(memory)
        return (places[node], places[node] + memory.n_bytes) if node in places else None

    spans = {m: span(m) for m in made if span(m) is not None}
    found = []
    for i in range(len(steps)):
        alive = [spans[m] for m in spans if m.first <= i < m.last]
        # What a product gave may have come from elsewhere: its name is another array's.
        dead = [m for m in spans if m.last == i and root(m) in kernels]
        found.append([root(m) for m in dead if not any(overlap(spans[m], x) for x in alive)])
    return found


def overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


class Pooled(CpuBackend):
    """Gives each array by itself."""

    arena = None


@contextlib.contextmanager
def apart():
    """Let programs that are made in the ``with`` block write nothing over what they read."""
    before = _arena.written_over
    _arena.written_over = lambda *given: {}
    yield Pooled()
    _arena.written_over = before
