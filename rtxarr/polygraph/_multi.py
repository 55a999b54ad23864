"""Horizontal fusion: maps of one pattern in one launch, as those of an optimizer.

A map waits for others of its pattern until a step needs what it writes, or writes over what it
reads; those that waited then run together. Later ones whose sources were there already, such as
casts of weights, join them. What is kept in memory by that, of what waits and of what is made
early, is no more than fits a GPU's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from rtxarr.polygraph._ir import Node
from rtxarr.polygraph._loops import Buffer, Loops
from rtxarr.polygraph._schedule import Group

__all__ = ["joined", "share_launches"]

MOST_HELD = 16 << 20  # bytes of results that wait to be read, or that are made early


class _Joint:
    """Steps of one pattern; ``place`` is the step before which they run, None while they wait."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.place: int | None = None
        self.reads: set[Node] = set()  # with what is looked at through views
        self.writes: set[Node] = set()
        self.waiting: set[Node] = set()
        self.early: set[Node] = set()


def _n_bytes(nodes: Iterable[Node]) -> int:
    return sum(n.size * n.dtype.itemsize for n in nodes)


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
    latest: dict[Hashable, _Joint] = {}
    makers = {n: i for i, step in enumerate(steps) for n in step.results}
    joint_of: dict[int, _Joint] = {}

    def is_there(node: Node, place: int) -> bool:
        """Tell whether a result is known before the step at ``place`` runs."""
        maker = makers.get(node, -1)
        if maker in joint_of:
            made_at = joint_of[maker].place
            return made_at is not None and made_at < place
        return maker < place

    for i, step in enumerate(steps):
        over = {targets[n] for n in step.results if n in targets}
        for joint in latest.values():
            if joint.place is None and not (
                joint.writes.isdisjoint(step.sources) and joint.reads.isdisjoint(over)
            ):
                joint.place = i
        found = pattern(step.loops) if step.loops is not None else None
        if found is None:
            continue
        key, most = found
        mine = latest.get(key)
        if mine is None or len(mine.steps) == most:
            mine = latest[key] = _Joint()
        elif mine.place is not None:
            place, early = mine.place, mine.early.union(step.results)
            fits = not over and all(is_there(n, place) for n in step.sources)
            if fits and _n_bytes(early) <= MOST_HELD:
                mine.early = early
            else:
                mine = latest[key] = _Joint()
        mine.steps.append(i)
        joint_of[i] = mine
        if mine.place is None:
            mine.reads |= looked_at(step.sources)
            mine.writes.update(step.results)
            mine.waiting.update(makers.keys() & step.sources)
            if _n_bytes(mine.waiting) > MOST_HELD or len(mine.steps) == most:
                mine.place = i + 1
    return _in_order(steps, dict.fromkeys(joint_of.values()))


def _in_order(steps: Sequence[Any], joints: Iterable[_Joint]) -> list[Any]:
    """Return steps with one in place of those of each joint."""
    places: list[list[_Joint]] = [[] for _ in range(len(steps) + 1)]
    taken: set[int] = set()
    for joint in joints:
        if len(joint.steps) > 1:
            places[len(steps) if joint.place is None else joint.place].append(joint)
            taken.update(joint.steps)
    result = []
    for i, here in enumerate(places):
        result += [_together([steps[k] for k in joint.steps]) for joint in here]
        if i < len(steps) and i not in taken:
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
