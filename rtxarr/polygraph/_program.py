"""A graph made ready to run: kernels and other operations in order, as a Python function.

What runs is straight-line code, written once for each program and shown by ``Program.text``::

    def program(x0, x1):
        v2, v4 = held = arena()
        kernel0(x0, x1, c3, v2)
        v4 = matmul1(v2, x1, out=v4)
        v5 = empty((4096,), float32)
        kernel2(v4, v5)
        v4 = None
        outputs = [v5]
        give(held)
        return outputs
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import namespace
from rtxarr._replay import recorder
from rtxarr.kernels.transpose import contiguous
from rtxarr.libs.blas import matmul_into
from rtxarr.polygraph import _arena, _interpret, _streams
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._control_steps import control_step
from rtxarr.polygraph._ir import CONTROL, TRANSFORMS, VIEWS, Graph, Node, behind_views, sharing
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._lower import lower
from rtxarr.polygraph._multi import share_launches
from rtxarr.polygraph._passes import simplify
from rtxarr.polygraph._schedule import EAGER, Group, Scheduler


class Step(NamedTuple):
    """A kernel, or (``loops`` is None) an operation that the interpreter runs.

    ``run`` takes the arrays of ``sources`` and, for a kernel, of ``results``; ``name`` is its name
    in the program's text. A view is part of the text, and ``run`` None. ``group`` is empty for a
    step that was not scheduled here.
    """

    name: str
    run: Callable | None
    sources: tuple[Node, ...]
    results: tuple[Node, ...]
    loops: Loops | None = None
    group: Group = Group(EAGER)


class Program:
    """What runs a graph on a back end.

    Parameters
    ----------
    graph : Graph
    backend : object
        With ``build(loops)``, ``fuses(op, dtype)``, ``empty(shape, dtype)``; see ``_cpu_backend``.
        May have ``rewrite``, ``pattern``, ``new``, ``streams``, ``arena`` and ``arena_limit``; see
        ``_cuda_backend``.
    strides : sequence of (tuple of int or None), optional
        For each input that is not contiguous its strides, in elements.
    disjoint : bool, default True
        That no two inputs share memory: an input may then be written by the kernel that is the
        last to read it.

    Attributes
    ----------
    steps : list of Step
    parts : list of Program
        Those of branches and loops.
    copied : set of int
        Outputs that are copied.
    text : str
        The function that runs them.
    why : dict of Node to str
        For each result that is kept in memory, why it is.
    streams : Assignment or None
        Which steps run beside others where the program is captured.
    arena : Arena or None
        Where in one block of memory the results lie that steps leave to one another.
    over : dict of Node to Node
        Results of maps that are written over what the map is the last to read.
    n_between, most_between : int
        Bytes of all that steps leave to one another, and of what of it is there at one time.
    notes : list of str
        What the back end changed in the graph, and what not and why.
    """

    def __init__(
        self,
        graph: Graph,
        backend: Any,
        *,
        strides: Sequence[tuple[int, ...] | None] = (),
        disjoint: bool = True,
    ) -> None:
        before, graph = graph, simplify(graph)
        self.backend = backend
        self.disjoint = disjoint
        self._strides = {
            node: s for node, s in zip(graph.inputs, strides, strict=False) if s is not None
        }
        self.notes: list[str] = []
        if any(n.size == 0 for n in graph.nodes() if n.dtype is not None):
            backend = _NothingFused()
        elif hasattr(backend, "rewrite"):
            graph, self.notes = backend.rewrite(graph, self._strides)
        self.graph = graph
        scheduler = Scheduler(graph, backend, self._strides)
        groups = scheduler.run()
        self.why = scheduler.why
        self.in_place = self._update_targets(groups) if disjoint else {}
        self.parts: list[Program] = []
        self.steps = self._steps(groups)
        self.copied = _copied(before, graph, {n for s in self.steps if s.loops for n in s.results})
        self.assemble()

    def assemble(self) -> None:
        """Write the program's text, from its steps, and make it a function."""
        self._names: dict[Node, str] = {n: f"x{i}" for i, n in enumerate(self.graph.inputs)}
        self._values: dict[str, Any] = {"empty": self.backend.empty}
        make_streams = getattr(self.backend, "streams", None)
        self.streams = None
        if make_streams is not None:
            self.streams = _streams.assign(self.steps, self.in_place)
        self._plan()
        head, body = self._head(), self._body()
        take, give = self._block(self.arena)
        self.text = _text([head, *take], body, self._write_back(give))
        exec(compile(self.text, "<program>", "exec"), self._values)
        self.run: Callable = self._values["program"]
        if self.streams is not None:
            self._values["Streams"] = make_streams
            take, _ = self._block(self._arena_on_streams)
            lines = [head, *take], body, self._write_back([])
            text = _streams.write(*lines, self.streams, self._names)
            exec(compile(text, "<program on streams>", "exec"), self._values)
            self.run = functools.partial(_one_of, self.run, self._values["program"])

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run on arrays (numbers for the graph's scalars); return the outputs."""
        return self.run(*inputs)

    def explain(self) -> str:
        """Return what the program does, step by step."""
        from rtxarr.polygraph._explain import explain_program

        return explain_program(self)

    # ------------------------------------------------------------------------------- making

    def _update_targets(self, groups: list[Group]) -> dict[Node, int]:
        """Return the updates that a kernel can write where they belong, with the input's number.

        The kernel must be the last to read the input, and read each element only where it is then
        written.
        """
        last: dict[Node, int] = {}
        for i in reversed(range(len(groups))):
            last.update(dict.fromkeys(_looked_at(groups[i].need, last), i))
        found: dict[Node, int] = {}
        outputs = _looked_at(self.graph.outputs)
        values = _looked_at([value for _, value in self.graph.updates])
        writers = {n: i for i, group in enumerate(groups) for n in group.outputs}
        for number, node in self.graph.updates:
            target = self.graph.inputs[number]
            writer = writers.get(node)
            if writer is None or node in outputs or node in found or target in self._strides:
                continue
            group = groups[writer]
            if group.kind == "eager" or last.get(target, 0) > writer:
                continue
            if target in outputs or target in values:
                continue
            if group.need.get(target, set()) <= {group.outputs[node]} and group.kind == "map":
                found[node] = number
        return found

    def _steps(self, groups: list[Group]) -> list[Step]:
        read_by_kernels = {n for g in groups if g.kind != "eager" for n in g.read}
        steps = []
        for i, group in enumerate(groups):
            results = tuple(group.outputs)
            if group.kind == "eager":
                (node,) = results
                run: Callable | None
                if node.op in CONTROL:
                    parts = [Program(a, self.backend) for a in node.attrs if isinstance(a, Graph)]
                    make = functools.partial(Program, backend=self.backend)
                    run = self.control_step(node, parts, make)
                elif node.op in VIEWS and node.ndim and node not in read_by_kernels:
                    run = None  # it is written out
                else:
                    run = eager_step(node, contiguous=node in read_by_kernels)
                steps.append(Step(f"{node.op}{i}", run, node.src, results, None, group))
                continue
            for node in group.read:
                if (order := memory_order(node)) is not None:
                    self._strides[node] = packed_strides(node.shape, order)
            loops = lower(group, self._strides, self.graph.scalars)
            sources = tuple(b.node for b in loops.buffers if not b.is_output)
            steps.append(Step(f"kernel{i}", None, sources, results, loops, group))
        pattern = getattr(self.backend, "pattern", None)
        if pattern is not None:
            targets = {n: self.graph.inputs[number] for n, number in self.in_place.items()}
            steps = share_launches(steps, pattern, targets, _looked_at)
        build = self.backend.build
        return [s if s.loops is None else s._replace(run=build(s.loops)) for s in steps]

    def control_step(
        self, node: Node, parts: list[Program], make: Callable | None = None
    ) -> Callable:
        """Return what runs a branch or loop, given the programs of its graphs."""
        self.parts += parts
        return control_step(node, [_on_contiguous(p) for p in parts], self.backend.empty, make)

    def _plan(self) -> None:
        """Plan where results lie that steps leave to one another."""
        made = _arena.made_by(self.steps, self.graph, self.in_place, self.copied)
        self.n_between = sum(m.n_bytes for m in made if not m.leaves)
        on_streams = None
        if self.streams is not None:
            on_streams = _arena.on_streams(self.streams.numbers, self.streams.needs)
        before = on_streams or _arena.in_order(len(self.steps))
        self.over = _arena.written_over(self.steps, made, before, _lies_in_order)
        self.most_between = _arena.at_one_time(m for m in made if not m.leaves)
        self.arena = self._arena_on_streams = None
        if getattr(self.backend, "arena", None) is not None:
            most = self.backend.arena_limit
            self.arena = _arena.plan(made, None, most)
            if self.arena is not None and on_streams is not None:
                self._arena_on_streams = _arena.plan(made, on_streams, math.inf)

    def _block(self, arena: _arena.Arena | None) -> tuple[list[str], list[str]]:
        """Return the lines that take the arrays of an arena, and those that give them back."""
        if arena is None:
            return [], []
        take, give = self.backend.arena(arena.n_bytes, arena.parts())
        names = ", ".join(map(self._name, arena.places))
        if give is None:
            return [f"{names} = {self._refer('arena', take)}()"], []
        line = f"{names} = held = {self._refer('arena', take)}()"
        return [line], [f"{self._refer('give', give)}(held)"]

    def _head(self) -> str:
        return f"def program({', '.join(f'x{i}' for i in range(len(self.graph.inputs)))}):"

    def _body(self) -> list[tuple[list[str], list[str]]]:
        """Return the lines of each step, and what it is the last to use.

        What they refer to is put into ``_values``.
        """
        body = []
        last = {n: i for i, step in enumerate(self.steps) for n in (*step.sources, *step.results)}
        kept = {*self.graph.roots, *self.graph.inputs}
        spent = self._used_once()
        placed: Container[Node] = () if self.arena is None else self.arena.places
        for i, step in enumerate(self.steps):
            lines = []
            run = step.run
            if run is not None and step.results[0].op in TRANSFORMS:
                run = functools.partial(run, owned=spent.issuperset(step.sources))
            self._values[step.name] = run
            arguments = [self._name(n, step.loops is not None) for n in step.sources]
            if step.run is None:
                lines.append(f"{self._name(step.results[0])} = {self._view(step, *arguments)}")
            elif step.loops is None:
                name = self._name(step.results[0])
                out = _arena.written_by(step)
                if out is not None and out in placed:
                    arguments.append(f"out={self._name(out)}")
                lines.append(f"{name} = {step.name}({', '.join(arguments)})")
            else:
                for node in step.results:
                    if node in self.in_place:
                        self._names[node] = f"x{self.in_place[node]}"
                    elif node in self.over:
                        lines.append(f"{self._name(node)} = {self._name(self.over[node])}")
                    elif node not in placed:
                        lines.append(f"{self._name(node)} = {self._empty(node)}")
                    arguments.append(self._name(node))
                lines.append(f"{step.name}({', '.join(arguments)})")
            kept.update(n for n in step.results if step.loops is not None and n in placed)
            dead = [n for n in (*step.sources, *step.results) if last[n] == i and n not in kept]
            dead = [n for n in dict.fromkeys(dead) if n.op not in ("constant", "iota")]
            body.append((lines, [self._name(n) for n in dead] if i + 1 < len(self.steps) else []))
        return body

    def _empty(self, node: Node) -> str:
        """Return the text of a new array."""
        new = getattr(self.backend, "new", lambda *kind: None)(node.shape, node.dtype)
        if new is None:
            return f"empty({node.shape}, {self._refer(f'{node.dtype}', node.dtype)})"
        return f"{self._refer('new', new)}()  # {node.dtype} {node.shape}"

    def _used_once(self) -> set[Node]:
        """Return what kernels store for one step alone: nobody needs it when that has run."""
        found = {n for step in self.steps if step.loops is not None for n in step.results}
        found.difference_update(self.graph.roots, self.in_place)
        users = Counter(n for step in self.steps for n in step.sources)
        return {n for n in found if users[n] == 1}

    def _view(self, step: Step, source: str) -> str:
        """Return the text of a view."""
        (node,) = step.results
        if node.op == "reshape":
            if step.sources[0].op == "permute" and node.ndim < step.sources[0].ndim:
                source = f"{self._refer('contiguous', as_contiguous)}({source})"
            return f"{source}.reshape({node.shape})"
        if node.op == "permute":
            return f"{source}.transpose({node.attrs[0]})"
        if node.op == "slice":
            starts, steps = node.attrs
            key = _interpret.key_of(starts, steps, node.shape)
            return f"{source}[{self._refer('key', key)}]"
        broadcast = self._refer("broadcast", _broadcast)
        return f"{broadcast}({source}, {node.shape})"

    def _write_back(self, give: list[str]) -> list[str]:
        """Write the updates into the inputs; what looks at an input is copied before.

        ``give`` are the lines for when all has been read.
        """
        graph = self.graph
        names = [self._name(n) for n in graph.outputs]
        self._values["copy"] = _copy
        for i, node in enumerate(graph.outputs):
            looks = bool(graph.updates) and any(s.op == "input" for s in _looked_at([node]))
            if looks or i in self.copied:
                names[i] = f"copy({names[i]})"
        left = [pair for pair in graph.updates if self.in_place.get(pair[1]) != pair[0]]
        stored = {n for step in self.steps if step.loops is not None for n in step.results}
        stored.difference_update(self.in_place)
        # First what may be an input's memory, before that is written; what kernels stored later.
        left.sort(key=lambda pair: pair[1] in stored)
        looking = [number for number, node in left if node not in stored]
        spoilt = {graph.inputs[number] for number in looking}
        copies, writes = [], []
        for i, (number, node) in enumerate(left):
            value = self._name(node)
            base = behind_views(node, stored)
            is_input = base.op == "input"
            is_safe = base in stored or (base not in spoilt if is_input else len(looking) == 1)
            if node not in stored and not (self.disjoint and is_safe):
                copies.append(f"new{i} = copy({value})")
                value = f"new{i}"
            writes.append(f"x{number}[...] = {value}")
        outputs = f"[{', '.join(names)}]"
        if not writes and not give:
            return [f"return {outputs}"]
        return [f"outputs = {outputs}", *copies, *writes, *give, "return outputs"]

    def _name(self, node: Node, in_kernel: bool = False) -> str:
        """Return what a node is called in the text; constants and counters are made at first."""
        if node.op == "constant" and in_kernel:
            return self._refer("c", node.attrs[0])
        if node.op == "input" and not in_kernel and node.attrs[0] in self.graph.scalars:
            return f"{self._refer('number', _number)}(x{node.attrs[0]}, {self._like()})"
        if node not in self._names:
            if node.op in ("constant", "iota"):
                self._names[node] = f"{self._refer(node.op, _Leaf(node))}.array({self._like()})"
            else:
                self._names[node] = f"v{len(self._names)}"
        return self._names[node]

    def _like(self) -> str:
        """Return the text of an array among the inputs, or of a number if there is none."""
        arrays = [i for i in range(len(self.graph.inputs)) if i not in self.graph.scalars]
        return f"x{min(arrays, default=0)}" if self.graph.inputs else ""

    def _refer(self, word: str, value: Any) -> str:
        """Return a name by which the text can refer to ``value``."""
        name = word if self._values.get(word, value) is value else f"{word}{len(self._values)}"
        self._values[name] = value
        return name


def _text(
    head: Sequence[str], body: Sequence[tuple[list[str], list[str]]], tail: Sequence[str]
) -> str:
    """Return the text of a program, from the lines of its steps and the names they let go of."""
    lines = [*head]
    for text, dead in body:
        lines += [*text, " = ".join([*dead, "None"])] if dead else text
    return "\n    ".join([*lines, *tail]) + "\n"


def _one_of(plain: Callable, on_streams: Callable, *inputs: Any) -> list[Any]:
    return (plain if recorder() is None else on_streams)(*inputs)


class _Leaf:
    """A constant or counter as an array, where the program's arrays are."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def array(self, *like: Any) -> Any:
        return _interpret.evaluate(self._node, (), namespace(*like))


def _number(value: Any, like: Any) -> Any:
    """Return a number that operations take, as an array where the program's arrays are."""
    if isinstance(like, (np.ndarray, np.generic)):
        return value
    return namespace(like).full((), value, dtype=value.dtype)


class _NothingFused:
    """Stands in for a back end where an array is empty."""

    def fuses(self, op: str, dtype: Any) -> bool:
        return False


def as_contiguous(array: Any) -> Any:
    """Return an array in row-major order, as programs take what they have not seen."""
    return array if array.flags.c_contiguous else contiguous(array)


def memory_order(node: Node) -> tuple[int, ...] | None:
    """Return the order of axes in which kernels take a node from memory; None is C order."""
    if node.op != "item":
        return None
    (call,) = node.src
    order = getattr(call.attrs[0], "order", None) if call.op == "call" else None
    return None if order is None else order(call, node.attrs[0])


def packed_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array without gaps whose axes lie in this order."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _lies_in_order(node: Node) -> bool:
    """Tell whether kernels take a node from memory in C order, if it is no input."""
    return memory_order(node) is None


def in_order(array: Any, order: tuple[int, ...] | None) -> Any:
    """Return an array whose axes lie in this order in memory, without gaps."""
    if order is None:
        return as_contiguous(array)
    back = tuple(map(order.index, range(len(order))))
    return as_contiguous(array.transpose(order)).transpose(back)


def _on_contiguous(program: Program) -> Callable:
    return lambda *arrays: program.run(*map(as_contiguous, arrays))


def _broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    return namespace(array).broadcast_to(array, shape)


def _copy(array: Any) -> Any:
    return namespace(array).asarray(array, copy=True, order="C")


def _copied(before: Graph, after: Graph, made: set[Node]) -> set[int]:
    """Return which outputs must be copied, so that they are memory of their own as they were.

    A pass may find that an output is an input, or the same as another, or one value repeated; a
    branch or loop may give what another output is.
    ``made`` are the nodes that kernels store.
    """
    found = sharing(after.outputs, before.outputs, made)
    for i, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        old_base, new_base = behind_views(old), behind_views(new, made)
        repeats = new.op == "broadcast" and new not in made and old.op not in VIEWS
        taken = new_base.op == "input" and new_base is not old_base
        if repeats or taken:
            found.add(i)
    return found


def _looked_at(nodes: Iterable[Node], known: Container[Node] = ()) -> set[Node]:
    """Return nodes and those whose memory they may share: through views, or by an opaque call.

    What is ``known``, and what they look at, is left out.
    """
    found: set[Node] = set()
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node in found or node in known:
            continue
        found.add(node)
        if node.op in VIEWS:
            stack += node.src
        elif node.op == "item" and not getattr(node.src[0].attrs[0], "gives_new", False):
            stack += node.src[0].src
    return found


def eager_step(node: Node, *, contiguous: bool) -> Callable:
    """Return what runs a node on arrays; ``contiguous`` if kernels read what it gives."""
    into = _into(node)
    if into is not None:
        return _Writer(node, into, contiguous)
    order = memory_order(node)

    def run(*sources, owned=False):
        out = _interpret.evaluate(node, sources, namespace(*sources), owned=owned)
        return in_order(out, order) if contiguous else out

    return run


def _into(node: Node) -> Callable | None:
    """Return what computes a node and writes it to ``out``, where that can be."""
    if node.op == "matmul":
        return matmul_into
    if node.op == "call" and (into := getattr(node.attrs[0], "into", None)) is not None:
        return functools.partial(into, **dict(node.attrs[1]))
    return None


class _Writer:
    """Runs a product, and writes it to the memory that it is given where it can.

    Attributes
    ----------
    writes : Node
        Its result, or the first of those of a call.
    """

    def __init__(self, node: Node, into: Callable, contiguous: bool) -> None:
        self._node, self._contiguous = node, contiguous
        self._into: Callable | None = into
        self.writes = node
        if node.op == "call":
            dtype, shape = node.attrs[2][0]
            self.writes = ir.make("item", (node,), (0,), dtype, shape)

    def __call__(self, *sources: Any, out: Any = None) -> Any:
        into = self._into
        if out is not None and into is not None:
            with np.errstate(all="ignore"):
                found = into(*sources, out=out)
            if found is not None:
                return found
            self._into = None  # nor will it another time
        found = _interpret.evaluate(self._node, sources, namespace(*sources))
        return as_contiguous(found) if self._contiguous else found
