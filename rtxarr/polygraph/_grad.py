"""Gradients of fused functions: one operation on the tape, with a fused backward pass.

The backward pass is traced where the function was, by the tape's own rules on tracers. What the two
share is cut: values of the forward pass that the backward pass needs are kept, but for those that
cost little to compute again from others. Higher derivatives fuse, in the same way, the function
that gives the gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rtxarr import random
from rtxarr.autograd._engine import _check_unchanged, gradients, masked_gradients
from rtxarr.autograd._mode import OBSERVED, PROFILED, RECORDED, TRACED, enable_grad, state
from rtxarr.autograd._op import _observe
from rtxarr.autograd._tape import Node, Tensor, make_tensor, store_of
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir
from rtxarr.polygraph._backends import input_strides, program_for
from rtxarr.polygraph._call_text import call_text, result_words, tensors_of
from rtxarr.polygraph._elementwise import as_array
from rtxarr.polygraph._program import as_contiguous
from rtxarr.polygraph._record import Recording
from rtxarr.polygraph._trace import Concretization, Tracer

if TYPE_CHECKING:
    from rtxarr.polygraph._fuse import Fused

_FREE = (*_ir.VIEWS, "constant", "iota")
_CHEAP = frozenset(
    """
    cast positive negative abs add subtract multiply maximum minimum where equal not_equal less
    less_equal greater greater_equal logical_and logical_or logical_not square sign
    """.split()
)


class Differentiable:
    """A program for one kind of arguments of which some need a gradient.

    Attributes
    ----------
    graph : Graph
        The forward pass; its last outputs are what is kept for the backward pass.
    program : Program or Interpreted
        Runs it.
    plan : _Plan
        The tape's view of the operation.
    run : callable
        Takes the leaves of the arguments; gives the result.
    """

    def __init__(
        self, fused: Fused, recording: Recording, leaves: Sequence[Any], structure: Any
    ) -> None:
        self._backward = backward = _Backward(fused, recording, structure)
        nodes, outputs = recording.outputs(recording.result)
        updates = recording.updates()
        backward.written = {number for number, _ in updates}
        if backward.written & backward.tracked_inputs:
            raise Concretization("it writes into a tensor that requires a gradient")
        backward.cut(nodes)
        if backward.written.intersection(backward.used_inputs):
            raise Concretization("it writes into an array that its gradient needs")
        self.graph, trace = recording.graph([*nodes, *backward.kept], updates), recording.trace
        self.program = program_for(fused, trace, self.graph, input_strides(trace))
        self.plan = _Plan(fused, backward)
        self._outputs = outputs
        self._structure = recording.structure
        text, names = call_text(recording, leaves, updates)
        tensors = tensors_of(trace, leaves, range(len(trace.sources)))
        words = result_words(outputs, names, trace.xp, tensors)
        arrays = "".join(f"x{i}, " for i in range(len(recording.trace.inputs)))
        self.text = text + f"    return done(L, r, ({arrays}), [{', '.join(words)}])\n"
        names["program"] = self.program.run
        names["done"] = self._done
        exec(compile(self.text, "<fused call>", "exec"), names)
        self.run: Callable = names["run"]
        self._drawn = threading.local()
        if backward.draws:
            self._plain_run, self.run = self.run, self._run_with_draws

    def _run_with_draws(self, leaves: Sequence[Any]) -> Any:
        with random.record_draws() as log:
            self._drawn.log = log
            return self._plain_run(leaves)

    def _done(
        self, leaves: Sequence[Any], roots: Sequence[Any], inputs: Sequence[Any], made: list
    ) -> Any:
        """Put the results on the tape."""
        backward = self._backward
        if state.mode & RECORDED:
            tensors = [x if isinstance(x, Tensor) else leaves[x] for x in backward.originals]
            edges = [(t.node, t.slot, t.data.shape, t.data.dtype) for t in tensors]
            known = {n: _guard(x) for n, x in zip(backward.numbers, tensors, strict=True)}
            for number, place in backward.guarded_arguments:
                known[number] = _guard(leaves[place] if isinstance(place, int) else place)
            guards = [known[n] for n in backward.used_inputs if n in known]
            kept = [roots[i] for i in backward.kept_places]
            arrays = [*map(as_contiguous, kept), *(inputs[i] for i in backward.used_inputs)]
            call = _Call(leaves, edges, getattr(self._drawn, "log", None), inputs, known)
            first = inputs[backward.numbers[0]]
            node = Node(self.plan, edges, (arrays, first, call), guards)
            results = [made[i] for i in backward.places]
            for slot, tensor in enumerate(results):
                tensor.node, tensor.slot = node, slot
                if backward.kept_results[slot]:
                    guards.append(_guard(tensor))
            if len(results) > 1:
                node.outputs = [(t.data.shape, t.data.dtype) for t in results]
            if state.mode & (OBSERVED | PROFILED):
                _observe(node, state.mode & ~PROFILED)
        return unflatten(self._structure, made)


def _guard(tensor: Tensor) -> tuple[list[int], int]:
    """Return the mutation counter of a tensor, and where it stands."""
    store = store_of(tensor)
    return store, store[0]


class _Call:
    """One call: what its higher derivatives begin from, and what is rarely computed again."""

    __slots__ = ("leaves", "edges", "draws", "passes_masks", "inputs", "guards")

    def __init__(
        self, leaves: Sequence[Any], edges: list, draws: Any, inputs: Sequence[Any], guards: dict
    ) -> None:
        # Raw data only: holding the tensors would keep the graph before this call alive.
        self.leaves = [(x.data,) if isinstance(x, Tensor) else x for x in leaves]
        self.edges = edges
        self.draws = draws
        self.passes_masks = any(type(edge[0]) is Node for edge in edges)
        self.inputs = inputs
        self.guards = guards

    def input(self, number: int, op: _Op) -> Any:
        """Return an input of the forward pass, which must not have changed."""
        if number in self.guards:
            _check_unchanged(op, *self.guards[number])
        return self.inputs[number]


class _Op:
    """What the tape asks of an operation."""

    elementwise = movement = view = holomorphic = False
    takes_masks = True
    variadic = "args"
    arg_names: tuple = ()

    def __init__(self, name: str) -> None:
        self.name = name


class _Plan:
    """The tape's plan of a fused operation: how to run its rules."""

    rows_call = None
    guards_all = saves_out = False

    def __init__(self, fused: Fused, backward: _Backward) -> None:
        self.op = backward.op
        n = len(backward.originals)
        self.tracked = tuple(range(n))
        self.inputs = [None, 0, None]  # the second tells whether to record the backward pass
        self.calls: list = []
        self.mask_calls: list = [None] * n
        self.per_sample_calls: list = [None] * n
        self.call = backward


class _Backward:
    """The backward pass of one recording.

    Attributes
    ----------
    originals : list
        For each tensor that needs a gradient, the leaf's number or the Tensor itself.
    numbers : list of int
        The program's inputs that these are.
    places : list of int
        The leaves of the result that gradients come to.
    kept : list of Node
        What is kept beside the outputs.
    """

    def __init__(self, fused: Fused, recording: Recording, structure: Any) -> None:
        self._fused = fused
        self._recording = recording
        self._structure = structure
        self.op = _Op(fused.name)
        self.programs: dict[tuple, Any] = {}
        self.written: set[int] = set()
        self._second: Any = None
        trace = recording.trace
        self.draws = trace.__dict__.get("draws") is not None
        tensors = list(zip(recording.roots, recording.originals, strict=True))
        self._variables = [x for x, _ in tensors if x.node is not None]
        self.originals = [original for x, original in tensors if x.node is not None]
        self.numbers = [x.data._cell.number for x in self._variables]
        self.tracked_inputs = set(self.numbers)
        self.guarded_arguments = [
            (x.data._cell.number, original) for x, original in tensors if x.node is None
        ]
        self.places = [
            i
            for i, x in enumerate(recording.result)
            if isinstance(x, Tensor) and type(x.node) is Node
        ]
        self._results: list[Tensor] = [recording.result[i] for i in self.places]
        self._gradient_inputs = [
            trace.fresh(_ir.make("input", (), (("gradient", k),), x.data.dtype, x.data.shape))
            for k, x in enumerate(self._results)
        ]
        self._mask_inputs = [
            trace.fresh(_ir.make("input", (), (("mask", k),), bool, x.data.shape))
            for k, x in enumerate(self._results)
        ]
        self._lock = threading.Lock()
        self.kept: list[_ir.Node] = []

    # ------------------------------------------------------------------------------ cutting

    def _traced(self, pattern: Sequence[int], masked: bool) -> list[Tracer | None]:
        """Return the gradients, and then, where they are asked for, their masks.

        ``pattern`` says of each result whether its gradient is not given (0), given (1), or given
        with a mask (2).
        """
        recording = self._recording
        given = [k for k, how in enumerate(pattern) if how]
        results = [self._results[k] for k in given]
        grads = [self._gradient_inputs[k] for k in given]
        masks: list = []
        with recording.tracing():
            if masked or 2 in pattern:
                own = [self._mask_inputs[k] if pattern[k] == 2 else None for k in given]
                found, masks = masked_gradients(results, self._variables, grads, own)
            else:
                found = gradients(results, self._variables, grads, retain_graph=True)
            return [None if x is None else as_array(x) for x in (*found, *masks)]

    def cut(self, outputs: list[_ir.Node]) -> None:
        """Choose what to keep; ``outputs`` are there anyway."""
        found = self._traced([1] * len(self._results), False)
        trace = self._recording.trace
        roots = [x.node for x in found if x is not None]
        gradient_nodes = {g.node for g in self._gradient_inputs}
        late: set[_ir.Node] = set()
        order = _ir.topological(roots)
        for node in order:
            if node in gradient_nodes or any(s in late for s in node.src):
                late.add(node)
        there = {*outputs}
        inputs = set(trace.inputs)
        kept: dict[_ir.Node, None] = {}
        wanted = [s for node in order if node in late for s in node.src if s not in late]
        wanted += [node for node in roots if node not in late]

        def keep(node: _ir.Node) -> None:
            stack = [node]
            while stack:
                n = stack.pop()
                if n in inputs or n in kept or n.op in ("constant", "iota"):
                    continue
                if n in there:
                    kept[n] = None
                elif n.op in _FREE or (n.op in _CHEAP and self._is_cheap(n, there, kept, inputs)):
                    stack.extend(n.src)
                elif n.dtype is None:
                    raise Concretization("its gradient needs all results of a call at once")
                else:
                    kept[n] = None

        for node in wanted:
            keep(node)
        self._kept_nodes = list(kept)
        self.kept = [n for n in kept if n not in there]
        places = {n: i for i, n in enumerate(outputs)}
        extra = {n: len(outputs) + i for i, n in enumerate(self.kept)}
        self.kept_places = [places[n] if n in places else extra[n] for n in self._kept_nodes]
        self.kept_results = [x.data._cell.node in kept for x in self._results]
        used = [n for n in _ir.topological(roots, kept) if n.op == "input"]
        self.used_inputs = sorted(n.attrs[0] for n in used if n in inputs)
        self._full = found
        self._n_inputs = len(trace.inputs)
        trace.joins_equal = True

    @staticmethod
    def _is_cheap(node: _ir.Node, there: set, kept: dict, inputs: set) -> bool:
        """Tell whether a node can be computed again from what is kept anyway."""
        stack, cost = list(node.src), 1
        while stack:
            n = stack.pop()
            if n in there or n in kept or n in inputs or n.op in ("constant", "iota"):
                continue
            if n.op in _ir.VIEWS:
                stack.extend(n.src)
            elif n.op in _CHEAP and cost < 4:
                cost += 1
                stack.extend(n.src)
            else:
                return False
        return True

    # ------------------------------------------------------------------------------ running

    def __call__(self, g: Any, saved: tuple) -> Sequence[Any]:
        """Return the gradients; ``g`` is one or, where there are several results, a list."""
        return self.masked(g, saved, None)[0]

    def masked(self, g: Any, saved: tuple, mask: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the gradients and their masks; ``mask`` is that of ``g``, or a list of them."""
        found = self._pulled(g, saved, mask)
        n = len(self.originals)
        return found[:n], found[n:] or [None] * n

    def _pulled(self, g: Any, saved: tuple, mask: Any) -> Sequence[Any]:
        given = g if isinstance(g, list) else [g]
        masks = mask if isinstance(mask, list) else [mask] * len(given)
        arrays, first, call = saved
        if isinstance(first, Tensor):
            return self._differentiable(given, masks, call)
        pairs = list(zip(given, masks, strict=True))
        how = [0 if x is None else 1 if m is None else 2 for x, m in pairs]
        pattern = (*how, call.passes_masks)
        program = self.programs.get(pattern)
        if program is None:
            with self._lock:
                program = self.programs.get(pattern)
                if program is None:
                    program = self.programs[pattern] = self._program(pattern)
        more = [x for x in given if x is not None]
        more += [m for x, m in pairs if x is not None and m is not None]
        return program(arrays, list(map(as_contiguous, more)), call, self.op)

    def _program(self, pattern: tuple) -> _BackwardProgram:
        recording = self._recording
        trace = recording.trace
        *how, masked = pattern
        found = self._full if {*how} == {1} and not masked else self._traced(how, masked)
        used = [trace.inputs[i] for i in self.used_inputs]
        given = [x.node for x, h in zip(self._gradient_inputs, how, strict=True) if h]
        given += [x.node for x, h in zip(self._mask_inputs, how, strict=True) if h == 2]
        leaves = [*self._kept_nodes, *used, *given]
        roots = [x.node for x in found if x is not None]
        nodes = _ir.topological(roots, leaves)[len(leaves) :]
        numbers = [n.attrs[0] for n in nodes if n.op == "input"]
        again = [n for n in numbers if n < self._n_inputs]
        made = [n for n in numbers if n >= self._n_inputs]  # by the rules, for masks alone
        if self.written.intersection(again):
            raise RuntimeError(
                f"the gradient of {self._fused.name} behind where() needs an array that it wrote "
                "into; call it without rx.fuse"
            )
        constants = [trace.sources[n].array for n in made]
        inputs, roots = _ir.cut([*leaves, *(trace.inputs[n] for n in (*again, *made))], roots)
        # Inputs of the forward pass that it uses too lie as they lie there.
        strides = input_strides(trace)
        places = dict(enumerate(self.used_inputs, len(self._kept_nodes)))
        places |= enumerate((*again, *made), len(leaves))
        if strides is not None:
            strides = [strides[places[i]] if i in places else None for i in range(len(inputs))]
        scalars = [p for p, n in places.items() if recording.is_scalar(trace.sources[n])]
        graph = _ir.Graph(inputs, roots, (), scalars)
        place = iter(range(len(roots)))
        outputs = [None if x is None else (next(place), x.is_scalar) for x in found]
        program = program_for(self._fused, trace, graph, strides)
        return _BackwardProgram(program, again, constants, outputs)

    # --------------------------------------------------------------------- higher derivatives

    def _differentiable(self, given: list, masks: list, call: _Call) -> Sequence[Any]:
        """Return the gradients, tensors on the tape, and masks, from the call's arguments."""
        edges = iter(call.edges)
        by_place = {p: next(edges) for p in self.originals}
        leaves = []
        for i, x in enumerate(call.leaves):
            if isinstance(x, tuple):
                edge = by_place.get(i)
                node, slot = (None, 0) if edge is None else edge[:2]
                x = make_tensor(x[0], node, slot, None)
            leaves.append(x)
        if self._second is None:
            function = functools.partial(pull, self._fused._function, self.places, self.originals)
            self._second = self._fused.of(function, f"gradient of {self._fused.name}")
        args, kwargs = unflatten(self._structure, leaves)
        if call.draws is None:
            found = self._second(args, kwargs, tuple(given), tuple(masks))
        else:
            with random.replay_draws(call.draws):
                found = self._second(args, kwargs, tuple(given), tuple(masks))
        n = len(self.originals)
        return [*found[:n], *(m.data if isinstance(m, Tensor) else m for m in found[n:])]


def pull(
    function: Callable,
    places: list,
    originals: list,
    args: tuple,
    kwargs: dict,
    given: tuple,
    masks: tuple,
) -> tuple:
    """Call ``function``; return the gradients of ``originals``, on the tape, and their masks."""
    with enable_grad():
        leaves = flatten((args, kwargs))[0]
        result = flatten(function(*args, **kwargs))[0]
    lift = state.tracing.lift if state.mode & TRACED else (lambda x: x)
    inputs = [lift(x) if isinstance(x, Tensor) else leaves[x] for x in originals]
    there = [i for i, g in enumerate(given) if g is not None]
    results = [result[places[i]] for i in there]
    grads = [given[i] for i in there]
    found, passed = masked_gradients(
        results, inputs, grads, [masks[i] for i in there], create_graph=True
    )
    return (*found, *passed)


class _BackwardProgram:
    """Runs a backward pass: gradients of the variables, None for those it does not reach.

    ``again`` are inputs of the forward pass from which more than was kept is computed again: masks
    of gradients, which that pass cannot foresee, may ask for it. ``constants`` are arrays that the
    tape's rules made.
    """

    def __init__(self, program: Any, again: list, constants: list, places: list) -> None:
        self.program = program
        self._again = again
        self._constants = constants
        self._places = places

    def __call__(self, arrays: list, given: list, call: _Call, op: _Op) -> list:
        again = [call.input(n, op) for n in self._again]
        out = self.program.run(*arrays, *given, *again, *self._constants)
        return [
            None if place is None else out[place[0]][()] if place[1] else out[place[0]]
            for place in self._places
        ]
