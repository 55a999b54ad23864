"""Maps of one pattern in one launch, as those of an optimizer over many arrays.

A map waits for others of its pattern until a step needs what it writes, or writes over what it
reads; those that waited then run together. What they read is kept for that long, so that they wait
for no more than fits a GPU's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rtxarr.polygraph._ir import Node
from rtxarr.polygraph._loops import Buffer, Loops
from rtxarr.polygraph._schedule import Group

__all__ = ["joined", "share_launches"]

MOST_HELD = 16 << 20  # bytes of results that wait to be read


class _Waiting:
    """Steps of one pattern."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.reads: set[Node] = set()  # with what is looked at through views
        self.writes: set[Node] = set()
        self.held: set[Node] = set()

    @property
    def n_bytes(self) -> int:
        return sum(n.size * n.dtype.itemsize for n in self.held)


def share_launches(
    steps: Sequence[Any],
    pattern: Callable[[Loops], tuple[Hashable, int] | None],
    targets: Mapping[Node, Node],
    looked_at: Callable[[Sequence[Node]], set[Node]],
) -> list[Any]:
    """Return steps of which each may be several of the given ones.

    Parameters
    ----------
    steps : sequence of Step
        In an order in which they can run.
    pattern : callable
        Gives of loops what is the same for those that can share a launch, and how many can; None
        for what cannot.
    targets : mapping of Node to Node
        From results to the inputs that they are written over.
    looked_at : callable
        Gives nodes and those whose memory they may share.
    """
    waiting: dict[Hashable, _Waiting] = {}
    made = {n for step in steps for n in step.results}
    joint: list[list[list[int]]] = [[] for _ in range(len(steps) + 1)]  # before each step

    def let_run(key: Hashable, place: int) -> None:
        found = waiting.pop(key)
        if len(found.steps) > 1:
            joint[place].append(found.steps)

    for i, step in enumerate(steps):
        over = {targets[n] for n in step.results if n in targets}
        for key, others in list(waiting.items()):
            if not (others.writes.isdisjoint(step.sources) and others.reads.isdisjoint(over)):
                let_run(key, i)
        found = pattern(step.loops) if step.loops is not None else None
        if found is None:
            continue
        key, most = found
        mine = waiting.setdefault(key, _Waiting())
        mine.steps.append(i)
        mine.reads |= looked_at(step.sources)
        mine.writes.update(step.results)
        mine.held.update(made.intersection(step.sources))
        if len(mine.steps) == most or mine.n_bytes > MOST_HELD:
            let_run(key, i + 1)
    for key in list(waiting):
        let_run(key, len(steps))
    moved = {i for many in joint for some in many for i in some}
    result = []
    for i in range(len(steps) + 1):
        result += [_together([steps[k] for k in some]) for some in joint[i]]
        if i < len(steps) and i not in moved:
            result.append(steps[i])
    return result


def _together(steps: Sequence[Any]) -> Any:
    """Return one step for several."""
    loops = joined([step.loops for step in steps])
    group = Group(steps[0].group.space)
    for step in steps:
        group.outputs.update(step.group.outputs)
        group.need.update(step.group.need)
        group.members |= step.group.members
    sources = tuple(b.node for b in loops.buffers if not b.is_output)
    results = tuple(b.node for b in loops.buffers if b.is_output)
    return steps[0]._replace(sources=sources, results=results, loops=loops, group=group)


def joined(members: Sequence[Loops]) -> Loops:
    """Return the loops of maps that share a launch: what several read is one buffer."""
    buffers = [b for loops in members for b in loops.buffers]
    inputs: dict[Node, Buffer] = {}
    for b in buffers:
        if not b.is_output and b.node not in inputs:
            inputs[b.node] = dataclasses.replace(b, name=f"in{len(inputs)}")
    results = [b for b in buffers if b.is_output]
    outputs = [dataclasses.replace(b, name=f"out{k}") for k, b in enumerate(results)]
    cols = sum(loops.cols for loops in members)
    return Loops("maps", 1, cols, (*inputs.values(), *outputs), (), members=tuple(members))
