"""Steps of a captured program beside one another: on streams that become branches of its graph.

In a chain of small kernels most of a GPU is idle. What the chain does not need soon, such as the
gradient of a weight, goes to a stream beside that of the chain. Arrays that two streams touch stay
until all have met at the program's end: memory goes back to the stream that it came from, which
does not know where the other is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr._replay import on_branch, recorder
from rtxarr.libs import blas
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._ir import Node

__all__ = ["Assignment", "Streams", "assign", "list_schedule", "write"]

MOST = 4
# In microseconds: a kernel without work, and what waiting for another stream takes.
_START, _SWITCH = 1.5, 1.0
_BYTES = 4e6  # a microsecond
_OPERATIONS = {2: 5e8, 4: 4e7}  # of a product a microsecond, by the bytes of an element
# What takes longer fills the GPU by itself.
_SMALL = 15.0
# The share of the time in one stream that several must do with: branches of a graph vary in when
# they start, so that what gains little may lose.
_WORTH = 0.8


def list_schedule(
    costs: Sequence[float], needs: Sequence[Sequence[int]], movable: Sequence[bool]
) -> list[int] | None:
    """Return the stream of each step, by list scheduling; None where one stream is as good.

    Parameters
    ----------
    costs : sequence of float
        Microseconds of each step, in an order in which they can run; 0 for what starts nothing.
    needs : sequence of sequence of int
        The steps that each waits for.
    movable : sequence of bool
        Whether a step may leave stream 0.
    """
    n = len(costs)
    users: list[list[int]] = [[] for _ in range(n)]
    for i, sources in enumerate(needs):
        for p in sources:
            users[p].append(i)
    rest = [0.0] * n  # from the beginning of a step to the end of what waits for it
    for i in reversed(range(n)):
        rest[i] = costs[i] + max((rest[u] for u in users[i]), default=0.0)
    streams, ends, clocks = [0] * n, [0.0] * n, [0.0] * MOST

    def start(i: int, stream: int) -> float:
        return max(
            [clocks[stream], *(ends[p] + _SWITCH * (streams[p] != stream) for p in needs[i])]
        )

    for i in range(n):
        last = max(needs[i], key=ends.__getitem__, default=None)
        home = 0 if last is None else streams[last]
        if costs[i] == 0:
            streams[i] = home
            ends[i] = max((ends[p] for p in needs[i]), default=0.0)
            continue
        if movable[i]:
            # The longest way on keeps its stream; others go elsewhere when that is no later.
            leaves = last is not None and any(rest[u] > rest[i] for u in users[last])
            begins = {
                stream: (
                    start(i, stream) - _SWITCH * leaves * (stream != home),
                    (stream == home) == leaves,
                )
                for stream in range(MOST)
            }
            streams[i] = min(begins, key=begins.__getitem__)
        ends[i] = clocks[streams[i]] = start(i, streams[i]) + costs[i]
    return streams if max(ends, default=0.0) < _WORTH * sum(costs) else None


# ------------------------------------------------------------------------------ of a program


class Assignment(NamedTuple):
    """The steps of a program on streams.

    Attributes
    ----------
    numbers : list of int
        Of the stream of each step.
    needs : list of list of int
        The steps that each waits for.
    held : set of Node
        What more than one stream touches.
    products : tuple of bool
        For each stream, whether it has a matrix product.
    """

    numbers: list[int]
    needs: list[list[int]]
    held: set[Node]
    products: tuple[bool, ...]


def assign(steps: Sequence[Any], in_place: Any) -> Assignment | None:
    """Return the steps of a program on streams; None where one is as good.

    ``in_place`` has the results that are written into inputs.
    """
    makers = {n: i for i, step in enumerate(steps) for n in step.results}
    needs = [sorted({makers[n] for n in step.sources if n in makers}) for step in steps]
    for i, step in enumerate(steps):
        if not in_place.keys().isdisjoint(step.results):
            needs[i] = list(range(i))  # others may still read what it writes over
    costs = [_cost(step) for step in steps]
    movable = [
        0 < cost <= _SMALL and (step.loops is not None or _is_product(step))
        for cost, step in zip(costs, steps, strict=True)
    ]
    streams = list_schedule(costs, needs, movable)
    if streams is None:
        return None
    products = [False] * (max(streams) + 1)
    for stream, step in zip(streams, steps, strict=True):
        products[stream] |= _is_product(step)
    return Assignment(streams, needs, _held(steps, streams), tuple(products))


def _is_product(step: Any) -> bool:
    from rtxarr.polygraph._products import FUNCTIONS

    if step.loops is not None:
        return False
    node = step.results[0]
    return node.op == "matmul" or (node.op == "call" and node.attrs[0] in FUNCTIONS)


def _cost(step: Any) -> float:
    """Return about how many microseconds a step takes on a large GPU."""
    arrays = [n for n in (*step.sources, *step.results) if n.dtype is not None]
    moved = sum(n.size * n.dtype.itemsize for n in arrays) / _BYTES
    if step.loops is not None:
        return _START + moved
    node = step.results[0]
    if node.op in ir.VIEWS or node.op == "item":
        return 0.0
    if _is_product(step) and len(step.sources) > 1:
        a, b = step.sources[:2]
        n_columns = b.shape[-1] if b.ndim > 1 else 1
        rate = _OPERATIONS.get(a.dtype.itemsize, 3e7)
        return _START + max(moved, 2 * a.size * n_columns / rate)
    return 2 * _START + moved


def _held(steps: Sequence[Any], streams: Sequence[int]) -> set[Node]:
    """Return the results whose memory steps of several streams may touch."""
    owner: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while owner.setdefault(node, node) is not node:
            node = owner[node]
        return node

    for step in steps:
        if step.loops is None and not _is_product(step):  # it may give memory of its sources
            for n in (*step.results, *step.sources):
                owner[find(n)] = find(step.results[0])
    touched: dict[Node, set[int]] = {}
    for step, stream in zip(steps, streams, strict=True):
        for n in (*step.sources, *step.results):
            touched.setdefault(find(n), set()).add(stream)
    return {n for step in steps for n in step.results if len(touched[find(n)]) > 1}


def write(
    head: Sequence[str],
    body: Sequence[tuple[list[str], list[str]]],
    tail: Sequence[str],
    assignment: Assignment,
    names: Mapping[Node, str],
) -> str:
    """Return the text of a program whose steps are on streams.

    ``body`` has, for each step, its lines and the names that it lets go of; ``names`` those of all.
    """
    streams, needs = assignment.numbers, assignment.needs
    held = {names[n] for n in assignment.held}
    waits: list[list[int]] = []
    seen: dict[tuple[int, int], int] = {}
    for i, stream in enumerate(streams):
        waits.append([])
        for p in reversed(needs[i]):
            other = streams[p]
            if other != stream and seen.get((stream, other), -1) < p:
                seen[stream, other] = p
                waits[i].append(p)
    marked = {p for found in waits for p in found}
    lines = [*head, f"streams = Streams({assignment.products})"]
    inside = None  # the stream whose block goes on
    for i, (text, dead) in enumerate(body):
        stream = streams[i]
        events = ", ".join(f"e{p}" for p in waits[i])
        if stream == 0:
            inside = None
            lines += [f"streams.wait(0, {events})"] if events else []
        elif inside != stream:
            inside = stream
            lines.append(f"with streams.on({stream}{', ' * bool(events)}{events}):")
        elif events:
            lines.append(f"    streams.wait({stream}, {events})")
        indent = "    " * (stream > 0)
        lines += [indent + line for line in text]
        if free := [name for name in dead if name not in held]:
            lines.append(indent + " = ".join([*free, "None"]))
        if i in marked:
            lines.append(f"{indent}e{i} = streams.mark({stream})")
    return "\n    ".join([*lines, "streams.join()", *tail]) + "\n"


class _Free(threading.local):
    """Streams that no program is on: one in another takes others, which have other memory."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, int], list] = {}

    def take(self, number: int) -> tuple[list, Any]:
        """Return a stream, and where to put it when the program is over."""
        cuda, step = _device.cupy.cuda, recorder()
        # Around a branch or loop that the GPU decides others are still being captured.
        depth = 0 if step is None else step.depth
        free = self._free.setdefault((cuda.runtime.getDevice(), depth, number), [])
        return free, free.pop() if free else cuda.Stream(non_blocking=True)


_free = _Free()


class Streams:
    """The current stream, number 0, and others that begin where it is; for one run of a program.

    Parameters
    ----------
    products : tuple of bool
        For each stream, whether it needs a workspace for matrix products.
    """

    def __init__(self, products: tuple[bool, ...]) -> None:
        cuda = _device.cupy.cuda
        self._event = cuda.Event
        main = cuda.get_current_stream()
        self._taken = [*map(_free.take, range(1, len(products)))]
        self._streams = [main, *(stream for _, stream in self._taken)]
        self._products = products
        self._workspaces: dict[int, Any] = {}
        begin = self.mark(0)
        for stream in self._streams[1:]:
            stream.wait_event(begin)

    def mark(self, number: int) -> Any:
        """Return an event: what a stream has been given so far."""
        event = self._event(disable_timing=True)
        event.record(self._streams[number])
        return event

    def wait(self, number: int, *events: Any) -> None:
        """Let a stream wait for events of others."""
        for event in events:
            self._streams[number].wait_event(event)

    @contextlib.contextmanager
    def on(self, number: int, *events: Any) -> Iterator[None]:
        """Make a stream the current one for a ``with`` block, after events of others."""
        self.wait(number, *events)
        with self._streams[number], on_branch(number):
            if not self._products[number]:
                yield
                return
            if number not in self._workspaces:
                self._workspaces[number] = _device.cupy.empty(blas.WORKSPACE_BYTES, "uint8")
            with blas.use_workspace(self._workspaces[number]):
                yield

    def join(self) -> None:
        """Let the first stream wait for all that the others were given."""
        self.wait(0, *map(self.mark, range(1, len(self._streams))))
        for free, stream in self._taken:
            free.append(stream)
