"""A graph made ready to run: kernels and other operations in order, and where their results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rtxarr._device import namespace
from rtxarr.polygraph import _interpret
from rtxarr.polygraph._ir import VIEWS, Graph, Node
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._lower import lower
from rtxarr.polygraph._passes import simplify
from rtxarr.polygraph._schedule import Group, Scheduler


class Step(NamedTuple):
    """A kernel (``loops`` is not None) or an operation that the interpreter runs.

    ``sources`` and ``results`` are slots of the running program; ``drop`` those that nothing after
    it needs. ``made`` has, for each result of a kernel, its shape and dtype, or the slot of the
    array that it is written into.
    """

    run: Callable
    sources: tuple[int, ...]
    results: tuple[int, ...]
    made: tuple
    drop: tuple[int, ...]
    group: Group
    loops: Loops | None


class Program:
    """What runs a graph on a back end.

    Parameters
    ----------
    graph : Graph
    backend : object
        With ``build(loops)``, ``fuses(op, dtype)``, ``empty(shape, dtype)``; see ``_cpu_backend``.
    strides : sequence of (tuple of int or None), optional
        For each input that is not contiguous its strides, in elements.
    disjoint : bool, default True
        That no two inputs share memory: an input may then be written by the kernel that is the
        last to read it.

    Attributes
    ----------
    steps : list of Step
    why : dict of Node to str
        For each result that is kept in memory, why it is.
    """

    def __init__(
        self,
        graph: Graph,
        backend: Any,
        *,
        strides: Sequence[tuple[int, ...] | None] = (),
        disjoint: bool = True,
    ) -> None:
        graph = self.graph = simplify(graph)
        self.backend = backend
        self.disjoint = disjoint
        self._strides = {
            node: s for node, s in zip(graph.inputs, strides, strict=False) if s is not None
        }
        nodes = graph.nodes()
        self._slots: dict[Node, int] = {node: i for i, node in enumerate(graph.inputs)}
        if any(n.size == 0 for n in nodes if n.dtype is not None):
            backend = _NothingFused()
        scheduler = Scheduler(graph, backend)
        groups = scheduler.run()
        self.why = scheduler.why
        for node in (*graph.roots, *(n for g in groups for n in (*g.need, *g.outputs))):
            self._slots.setdefault(node, len(self._slots))
        self._constants = self._leaves(groups)
        self._in_place = self._update_targets(groups) if disjoint else {}
        self.steps = self._steps(groups)
        self._outputs = tuple(self._slots[n] for n in graph.outputs)
        self._updates = tuple(
            (number, self._slots[node])
            for number, node in graph.updates
            if self._in_place.get(node) != number
        )

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run on arrays (numbers for the graph's scalars); return the outputs."""
        values: list[Any] = [*inputs, *(None,) * (len(self._slots) - len(inputs))]
        for slot, node in self._constants:
            values[slot] = _interpret.evaluate(node, (), namespace(*inputs))
        empty = self.backend.empty
        for step in self.steps:
            arguments = [values[s] for s in step.sources]
            if step.loops is None:
                values[step.results[0]] = step.run(*arguments)
            else:
                for result, made in zip(step.results, step.made, strict=True):
                    out = values[made] if type(made) is int else empty(*made)
                    values[result] = out
                    arguments.append(out)
                step.run(*arguments)
            for slot in step.drop:
                values[slot] = None
        outputs = [values[s] for s in self._outputs]
        if self.graph.updates:
            self._write_back(inputs, values, outputs)
        return outputs

    def _write_back(self, inputs: Sequence[Any], values: list[Any], outputs: list[Any]) -> None:
        """Write the updates into the inputs; what still looks at an input is copied before."""
        for i, node in enumerate(self.graph.outputs):
            if _looked_at(node).op == "input":
                outputs[i] = namespace(outputs[i]).asarray(outputs[i], copy=True)
        pairs = [(inputs[number], values[slot]) for number, slot in self._updates]
        if not self.disjoint or len(pairs) > 1:
            pairs = [(to, namespace(value).asarray(value, copy=True)) for to, value in pairs]
        for to, value in pairs:
            to[...] = value

    # ------------------------------------------------------------------------------- making

    def _leaves(self, groups: list[Group]) -> tuple[tuple[int, Node], ...]:
        """Return the constants and counters that are needed as arrays."""
        wanted = dict.fromkeys(n for n in self.graph.roots if n.op in ("constant", "iota"))
        for group in groups:
            if group.kind == "eager":
                wanted |= dict.fromkeys(n for n in group.need if n.op in ("constant", "iota"))
        return tuple((self._slots[n], n) for n in wanted)

    def _update_targets(self, groups: list[Group]) -> dict[Node, int]:
        """Return the updates that a kernel can write where they belong, with the input's number.

        The kernel must be the last to read the input, and read each element only where it is then
        written.
        """
        last: dict[Node, int] = {}
        for i, group in enumerate(groups):
            for node in group.need:
                last[_looked_at(node)] = last[node] = i
        found: dict[Node, int] = {}
        outputs = {*self.graph.outputs, *map(_looked_at, self.graph.outputs)}
        for number, node in self.graph.updates:
            target = self.graph.inputs[number]
            writer = next((i for i, g in enumerate(groups) if node in g.outputs), None)
            if writer is None or node in outputs or node in found or target in self._strides:
                continue
            group = groups[writer]
            if group.kind == "eager" or target in outputs or last.get(target, 0) > writer:
                continue
            if group.need.get(target, set()) <= {group.outputs[node]} and group.kind == "map":
                found[node] = number
        return found

    def _steps(self, groups: list[Group]) -> list[Step]:
        read_by_kernels = {n for g in groups if g.kind != "eager" for n in g.read}
        last: dict[int, int] = {}
        kept = {self._slots[n] for n in self.graph.roots}
        prepared = []
        for group in groups:
            if group.kind == "eager":
                (node,) = group.outputs
                run = _eager_step(node, contiguous=node in read_by_kernels)
                sources = tuple(self._slots[s] for s in node.src)
                prepared.append((run, sources, (self._slots[node],), (), group, None))
                continue
            loops = lower(group, self._strides, self.graph.scalars)
            inputs = [b.node for b in loops.buffers if not b.is_output]
            made = tuple(self._in_place.get(n, (n.shape, n.dtype)) for n in group.outputs)
            prepared.append(
                (
                    None,
                    tuple(self._slots.get(n, -1) for n in inputs),
                    tuple(self._slots[n] for n in group.outputs),
                    made,
                    group,
                    loops,
                )
            )
        for i, (_, sources, results, *_) in enumerate(prepared):
            for slot in (*sources, *results):
                last[slot] = i
        n_inputs = len(self.graph.inputs)
        steps = []
        for i, (run, sources, results, made, group, loops) in enumerate(prepared):
            if loops is not None:
                run = self._kernel(loops)
                constants = [b for b in loops.buffers if b.node.op == "constant"]
                if constants:
                    sources = tuple(
                        s
                        for s, b in zip(sources, loops.buffers, strict=False)
                        if b.node.op != "constant"
                    )
            drop = tuple(
                s for s in {*sources, *results} if last[s] == i and s not in kept and s >= n_inputs
            )
            steps.append(Step(run, sources, results, made, drop, group, loops))
        return steps

    def _kernel(self, loops: Loops) -> Callable:
        """Return the compiled kernel, with the graph's constants in their places."""
        kernel = self.backend.build(loops)
        fixed = [
            (i, b.node.attrs[0]) for i, b in enumerate(loops.buffers) if b.node.op == "constant"
        ]
        if not fixed:
            return kernel

        def run(*arguments):
            arguments = list(arguments)
            for i, value in fixed:
                arguments.insert(i, value)
            kernel(*arguments)

        return run


def _looked_at(node: Node) -> Node:
    """Return the node whose memory a chain of views may share."""
    while node.op in VIEWS:
        (node,) = node.src
    return node


class _NothingFused:
    """Stands in for a back end where an array is empty."""

    def fuses(self, op: str, dtype: Any) -> bool:
        return False


def _eager_step(node: Node, *, contiguous: bool) -> Callable:
    def run(*sources):
        out = _interpret.evaluate(node, sources, namespace(*sources))
        if contiguous and not _is_contiguous(out):
            out = namespace(out).ascontiguousarray(out)
        return out

    return run


def _is_contiguous(array: Any) -> bool:
    return array.flags.c_contiguous
