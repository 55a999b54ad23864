"""Where results that a program needs for itself lie: in one block of memory, planned beforehand.

Kernels and matrix products write into memory that they are given, so what they leave to one another
can lie anywhere. A result has its place from the step that writes it until all that looks at it has
run; two share bytes if all that touches the one is over before the other is written. On streams
"before" is what a stream has waited for. The largest are placed first, each into the smallest gap
that holds it. What the library's other functions give, and the program's results, come from the
memory pool, and so does all where a block would keep too much of it.

In both a map that is the last to read an array, element by element, writes over it.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtxarr.polygraph._ir import REDUCES, SCANS, TRANSFORMS, Graph, Node

__all__ = [
    "Arena",
    "Memory",
    "at_one_time",
    "in_order",
    "made_by",
    "on_streams",
    "plan",
    "written_by",
    "written_over",
]

ALIGNMENT = 512  # bytes: of the beginning of each result, as of what a memory pool gives
KEPT = 1 << 20  # bytes of a block that is kept between calls; larger ones go back to the pool
MOST_RESULTS = 2000  # of a block: each is held against all others

_BY_PLACE = operator.itemgetter(0)

# Operations that the interpreter runs without giving memory of their sources.
_NEW = frozenset(
    ["matmul", "gather", "take_along", "concat", "update", "scatter_add", "scatter_reduce", "cast"]
).union(SCANS)


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
class Memory:
    """What a step makes.

    Attributes
    ----------
    node : Node
    n_bytes : int
    first : int
        The step.
    is_given : bool
        Whether the step writes where it is told.
    is_own : bool
        Whether it is certainly no memory of the step's sources.
    touched : int
        A bit for each step that reads or writes it, and for the end of the program.
    seen_as : set of Node
        The node and what may be a view of it.
    leaves : bool
        Whether it is a result of the program.
    place : int
        Where it begins in the block.
    """

    node: Node
    n_bytes: int
    first: int
    is_given: bool = True
    is_own: bool = True
    touched: int = 0
    seen_as: set[Node] = field(default_factory=set)
    leaves: bool = False
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


def plan(made: Sequence[Memory], before: Sequence[int] | None, most: float) -> Arena | None:
    """Return where the results that steps leave to one another lie; None where a pool is better.

    Parameters
    ----------
    made : sequence of Memory
    before : sequence of int or None
        As :func:`on_streams` gives it; None where one step runs after the other.
    most : float
        How many times what is there at one time a program may need with a block that is not kept.
    """
    found = [m for m in made if m.is_given and not m.leaves]
    if not 2 <= len(found) <= MOST_RESULTS:  # nothing to plan, or seconds to do it
        return None
    n_bytes = _placed(found, before)
    if n_bytes > KEPT:
        rest = at_one_time(m for m in made if not m.is_given or m.leaves)
        if n_bytes + rest > most * at_one_time(made):
            return None
    n_apart = sum(m.n_bytes for m in found)
    return Arena({m.node: m.place for m in found}, n_bytes, n_apart, at_one_time(found))


def made_by(
    steps: Sequence[Any], graph: Graph, in_place: Container[Node], copied: Iterable[int]
) -> list[Memory]:
    """Return the memory that steps make, with what touches it, be it through views.

    Parameters
    ----------
    steps : sequence of Step
    graph : Graph
    in_place : container of Node
        Results that are written into inputs.
    copied : iterable of int
        Outputs that are copied at the end.
    """
    found: list[Memory] = []
    of: dict[Node, tuple[Memory, ...]] = {}  # where a node may lie
    makers = {n: i for i, step in enumerate(steps) for n in step.results}
    for i, step in enumerate(steps):
        is_kernel = step.loops is not None
        for node in step.results:
            lies: dict[Memory, None] = {}
            is_own = is_kernel or _is_new(node)
            if not is_own:
                lies = dict.fromkeys(m for s in step.sources for m in of.get(s, ()))
            if node not in in_place and (is_own or node.op == "item"):
                first = makers[node.src[0]] if node.op == "item" else i
                is_given = is_kernel or node is written_by(steps[first])
                memory = Memory(node, _rounded(node), first, is_given, is_own, 1 << first)
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


def written_over(
    steps: Sequence[Any], made: list[Memory], before: Sequence[int], can_be: Callable[[Node], bool]
) -> dict[Node, Node]:
    """Return the results that maps write over what they read, and what that is.

    The two become one memory in ``made``. ``can_be`` tells of what is read whether it lies as the
    map's results do.
    """
    of = {m.node: m for m in made}
    over: dict[Node, Node] = {}
    for i, step in enumerate(steps):
        if step.loops is None or step.loops.kind != "map":
            continue
        taken: set[Memory] = set()
        need, places = step.group.need, step.group.outputs
        for node in step.results:
            for source in step.sources:
                old, new = of.get(source), of.get(node)
                if old is None or new is None or not old.is_own or old in taken:
                    continue
                same = (source.shape, source.dtype) == (node.shape, node.dtype)
                at_place = node in places and need.get(source) == {places[node]}
                alone = old.seen_as.intersection(step.sources) == {source}
                is_last = old.is_over(before[i] | 1 << i)
                if same and at_place and alone and is_last and can_be(source):
                    old.touched |= new.touched
                    old.seen_as |= new.seen_as
                    old.leaves |= new.leaves
                    of[node] = old
                    over[node] = source
                    made.remove(new)
                    taken.add(old)
                    break
    return over


def _placed(found: Sequence[Memory], before: Sequence[int] | None) -> int:
    """Give each memory its place; return the bytes of all together."""
    placed: list[tuple] = []  # by place, with what tells who is there at one time with another
    n_bytes = 0
    for memory in sorted(found, key=lambda m: (-m.n_bytes, m.first)):
        size = memory.n_bytes
        # One is over before another is written: that is so if it touches nothing of these.
        mine, late = memory.touched, 0 if before is None else ~before[memory.first]
        first, last = memory.first, memory.last
        smallest, end = None, 0
        for begin, after, touched, its_late, its_first, its_last in placed:
            if before is None:
                if its_last < first or last < its_first:
                    continue
            elif not touched & late or not mine & its_late:
                continue
            gap = begin - end
            if gap >= size and (smallest is None or gap < smallest):
                smallest, memory.place = gap, end
            end = max(end, after)
        if smallest is None:
            memory.place = end
        n_bytes = max(n_bytes, memory.place + size)
        bisect.insort(
            placed, (memory.place, memory.place + size, mine, late, first, last), key=_BY_PLACE
        )
    return n_bytes


def at_one_time(memories: Iterable[Memory]) -> int:
    """Return the bytes that are needed at one time, where they are most, by steps in order."""
    change: dict[int, int] = {}
    for m in memories:
        change[m.first] = change.get(m.first, 0) + m.n_bytes
        change[m.last + 1] = change.get(m.last + 1, 0) - m.n_bytes
    now = most = 0
    for i in sorted(change):
        now += change[i]
        most = max(most, now)
    return most
