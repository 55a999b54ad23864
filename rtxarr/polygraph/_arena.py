"""Where results that a program needs for itself lie: in one block of memory, planned beforehand.

Kernels and matrix products write into memory that they are given, so what they leave to one another
can lie anywhere. A result has its place from the step that writes it until all that looks at it has
run; two share bytes if all that touches the one is over before the other is written. On streams
"before" is what a stream has waited for. A map that is the last to read an array, element by
element, writes over it. The largest are placed first, each into the smallest gap that holds it.

What the library's other functions give, and the program's results, come from the memory pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtxarr.polygraph._ir import REDUCES, SCANS, TRANSFORMS, Graph, Node

__all__ = ["Arena", "in_order", "needed", "on_streams", "plan", "written_by"]

ALIGNMENT = 512  # bytes: of the beginning of each result, as of what a memory pool gives
KEPT = 1 << 20  # bytes of a block that is kept between calls; larger ones go back to the pool

# A large block may make a program need so much more than what is there at one time: a pool that
# gives each array by itself, and gets it back at once, keeps about half as much again in pieces.
_MOST = 4 / 3

# Operations that the interpreter runs without giving memory of their sources.
_NEW = frozenset(
    ("matmul", "gather", "take_along", "concat", "update", "scatter_add", "cast", *SCANS)
)


@dataclass(frozen=True)
class Arena:
    """A plan of one block of memory.

    Attributes
    ----------
    places : dict of Node to int
        Where in it each result begins.
    n_bytes : int
    n_apart : int
        Bytes of all results in it, each for itself.
    floor : int
        Bytes of those that are needed at one time, where they are most.
    """

    places: Mapping[Node, int]
    n_bytes: int
    n_apart: int
    floor: int

    def parts(self) -> list[tuple[int, tuple[int, ...], Any]]:
        """Return the place, shape and dtype of each result."""
        return [(place, n.shape, n.dtype) for n, place in self.places.items()]


@dataclass(eq=False)
class _Memory:
    """What a step makes."""

    nodes: list[Node]
    n_bytes: int
    first: int  # the step
    is_given: bool  # whether it writes where it is told
    touched: int = 0  # a bit for each step that reads or writes it, and for the end
    seen_as: set[Node] = field(default_factory=set)  # it and what may be a view of it
    leaves: bool = False  # as a result of the program
    place: int = 0

    @property
    def last(self) -> int:
        return self.touched.bit_length() - 1

    def is_over(self, before: int) -> bool:
        return not self.touched & ~before


def in_order(n: int) -> list[int]:
    """Return for each of ``n`` steps, and for the end, the bits of the steps before it."""
    return [(1 << i) - 1 for i in range(n + 1)]


def on_streams(numbers: Sequence[int], needs: Sequence[Sequence[int]]) -> list[int]:
    """Return the same for steps on streams, each of which waits for some."""
    latest: dict[int, int] = {}
    before: list[int] = []
    for i, stream in enumerate(numbers):
        bits = 0
        for p in (*needs[i], latest.get(stream)):
            if p is not None:
                bits |= before[p] | 1 << p
        before.append(bits)
        latest[stream] = i
    return [*before, (1 << len(numbers)) - 1]


def plan(
    steps: Sequence[Any],
    graph: Graph,
    in_place: Container[Node],
    copied: Iterable[int],
    before: Sequence[int] | None = None,
) -> Arena | None:
    """Return where the results that steps leave to one another lie; None where a pool is better.

    Parameters
    ----------
    steps : sequence of Step
    graph : Graph
    in_place : container of Node
        Results that are written into inputs.
    copied : iterable of int
        Outputs that are copied at the end.
    before : sequence of int, optional
        As :func:`on_streams` gives it; by default one step runs after the other.
    """
    made = _made_by(steps, graph, in_place, copied)
    found = [m for m in made if m.is_given and not m.leaves]
    if len(found) < 2:  # nothing to plan
        return None
    n_apart = sum(m.n_bytes for m in found)
    rest = [m for m in made if not m.is_given or m.leaves]
    of_pool = _most(made, len(steps))
    found = _in_place(steps, found, before or in_order(len(steps)))
    n_bytes = _placed(found, before or in_order(len(steps)))
    floor = _most(found, len(steps))
    if before is None and n_bytes > KEPT and n_bytes + _most(rest, len(steps)) > _MOST * of_pool:
        return None
    places = {n: m.place for m in found for n in m.nodes}
    return Arena(places, n_bytes, n_apart, floor)


def needed(
    steps: Sequence[Any], graph: Graph, in_place: Container[Node], copied: Iterable[int]
) -> tuple[int, int]:
    """Return the bytes of all that steps make for one another, and the most at one time."""
    found = [m for m in _made_by(steps, graph, in_place, copied) if not m.leaves]
    return sum(m.n_bytes for m in found), _most(found, len(steps))


def _made_by(
    steps: Sequence[Any], graph: Graph, in_place: Container[Node], copied: Iterable[int]
) -> list[_Memory]:
    """Return the memory that steps make, with what touches it, be it through views."""
    found: list[_Memory] = []
    of: dict[Node, tuple[_Memory, ...]] = {}  # where a node may lie
    makers = {n: i for i, step in enumerate(steps) for n in step.results}
    for i, step in enumerate(steps):
        is_kernel = step.loops is not None
        for node in step.results:
            lies: dict[_Memory, None] = {}
            if not is_kernel and not _is_new(node):
                lies = dict.fromkeys(m for s in step.sources for m in of.get(s, ()))
            if node not in in_place and (is_kernel or node.op == "item" or _is_new(node)):
                first = makers[node.src[0]] if node.op == "item" else i
                is_given = is_kernel or node is written_by(steps[first])
                memory = _Memory([node], _rounded(node), first, is_given, 1 << first)
                found.append(memory)
                lies[memory] = None
            of[node] = tuple(lies)
            for memory in lies:
                memory.seen_as.add(node)
        for node in (*step.sources, *step.results):
            for memory in of.get(node, ()):
                memory.touched |= 1 << i
    kept = {*copied}
    ends = [(node, i not in kept) for i, node in enumerate(graph.outputs)]
    ends += [(node, False) for _, node in graph.updates]
    for node, leaves in ends:
        for memory in of.get(node, ()):
            memory.touched |= 1 << len(steps)
            memory.leaves |= leaves
    return found


def written_by(step: Any) -> Node | None:
    """Return which result an operation can write where it is told, if there is one."""
    return getattr(step.run, "writes", None)


def _is_new(node: Node) -> bool:
    """Tell whether what the interpreter gives of a node is no memory of its sources."""
    if node.op in TRANSFORMS:
        return any(n > 1 for n in node.attrs[1])
    if node.op in REDUCES:
        return bool(node.attrs[0])
    if node.op == "item":
        (call,) = node.src
        return call.op == "call" and getattr(call.attrs[0], "gives_new", False)
    return node.op in _NEW


def _rounded(node: Node) -> int:
    n = node.size * node.dtype.itemsize
    return -(-n // ALIGNMENT) * ALIGNMENT


def _in_place(
    steps: Sequence[Any], found: Sequence[_Memory], before: Sequence[int]
) -> list[_Memory]:
    """Let maps write over what they are the last to read: the two are one memory."""
    of = {node: m for m in found for node in m.nodes}
    left = dict.fromkeys(found)
    for i, step in enumerate(steps):
        if step.loops is None or step.loops.kind != "map":
            continue
        taken: set[_Memory] = set()
        need, places = step.group.need, step.group.outputs
        for node in step.results:
            for source in step.sources:
                old, new = of.get(source), of.get(node)
                if old is None or new is None or old in taken or old.first == i:
                    continue
                same = (source.shape, source.dtype) == (node.shape, node.dtype)
                at_place = node in places and need.get(source) == {places[node]}
                alone = old.seen_as.intersection(step.sources) == {source}
                if same and at_place and alone and old.is_over(before[i] | 1 << i):
                    old.nodes += new.nodes
                    old.touched |= new.touched
                    old.seen_as |= new.seen_as
                    of.update(dict.fromkeys(new.nodes, old))
                    del left[new]
                    taken.add(old)
                    break
    return list(left)


def _placed(found: Sequence[_Memory], before: Sequence[int]) -> int:
    """Give each memory its place; return the bytes of all together."""
    n_bytes = 0
    placed: list[_Memory] = []
    for memory in sorted(found, key=lambda m: (-m.n_bytes, m.first)):
        here = before[memory.first]
        busy = sorted(
            (m.place, m.place + m.n_bytes)
            for m in placed
            if not (m.is_over(here) or memory.is_over(before[m.first]))
        )
        smallest, end = None, 0
        for begin, after in busy:
            gap = begin - end
            if gap >= memory.n_bytes and (smallest is None or gap < smallest):
                smallest, memory.place = gap, end
            end = max(end, after)
        if smallest is None:
            memory.place = end
        placed.append(memory)
        n_bytes = max(n_bytes, memory.place + memory.n_bytes)
    return n_bytes


def _most(memories: Iterable[_Memory], n_steps: int) -> int:
    """Return the bytes that are needed at one time, where they are most, by steps in order."""
    change = [0] * (n_steps + 2)
    for m in memories:
        change[m.first] += m.n_bytes
        change[m.last + 1] -= m.n_bytes
    now = most = 0
    for n in change:
        now += n
        most = max(most, now)
    return most
