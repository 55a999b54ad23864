"""``rx.jit``: whole steps, with their backward passes and optimizers, as fused programs.

While a step is traced, the tensors that it finds elsewhere than in its arguments hold tracers, and
so do their gradients; then they get their arrays back. What the program has computed it writes
where the step would. What an optimizer does to parameters is left to the optimizer: it is called
after the program, with the gradients that the program gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rtxarr import _device
from rtxarr.autograd import Tensor
from rtxarr.autograd import capture as _capture
from rtxarr.autograd._capture_errors import Unsettled
from rtxarr.autograd._tape import Leaf, Node, mark_changed, raw
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph._aot_data import NotSaved
from rtxarr.polygraph._backends import input_strides, program_for
from rtxarr.polygraph._call_text import call_text, result_words
from rtxarr.polygraph._draws import Place
from rtxarr.polygraph._fuse import Fused
from rtxarr.polygraph._record import Recording, own_data
from rtxarr.polygraph._trace import Captured, Concretization, Tracer, where_called


def jit(
    step: Callable | None = None,
    *,
    mode: str = "strict",
    capture: bool = True,
    backend: Any = None,
) -> Any:
    """Give a function that does what a training step does, in few kernels.

    Parameters
    ----------
    step : callable
        A function of arrays and tensors, and of nested tuples, lists and dicts of them, which may
        call ``backward()`` and change what it finds in closures, globals and modules: parameters,
        their gradients, buffers, optimizers, averages, generators.
    mode : {"strict", "fast"}, default "strict"
        As :func:`rtxarr.fuse` takes it.
    capture : bool, default True
        On a GPU, launch the kernels as one CUDA graph, by :func:`rtxarr.capture`, whose conditions
        hold.
    backend : object or "interpreter", optional

    Returns
    -------
    Jitted
        Gives what ``step`` gives, untracked.

    Warns
    -----
    RuntimeWarning
        Once, where ``step`` cannot be fused; it then runs as it is, captured on a GPU.

    Notes
    -----
    Optimizers, loss scalers and averages do their work after all that is computed: a parameter must
    not be used after the call of the optimizer's ``step()`` that changes it.

    While a step is traced, its parameters hold no values: other threads must not use them then.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn, optim
    >>> model = nn.Linear(3, 1)
    >>> optimizer = optim.Adam(model.parameters())
    >>> @rx.jit
    ... def step(x, y):
    ...     optimizer.zero_grad()
    ...     loss = rx.mean((model(x) - y) ** 2)
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> losses = [step(rx.ones((5, 3), dtype="float32"), 2.0).item() for _ in range(3)]
    >>> losses[2] < losses[0]
    True
    """
    if step is None:
        return functools.partial(jit, mode=mode, capture=capture, backend=backend)
    return Jitted(step, mode=mode, capture=capture, backend=backend)


class Jitted(Fused):
    """A step and its programs; see :func:`jit`. Attributes are those of :class:`Fused`."""

    def __init__(
        self, step: Callable, *, mode: str = "strict", capture: bool = True, backend: Any = None
    ) -> None:
        super().__init__(step, mode=mode, backend=backend)
        self._captured = _capture(super().__call__) if capture else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._captured is None:
            return super().__call__(*args, **kwargs)
        on_gpu = any(_device.is_device_array(raw(x)) for x in flatten((args, kwargs))[0])
        if on_gpu or _device.device().kind == "cuda":
            return self._captured(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def aot(self, signatures: Sequence[tuple | dict], **options: Any) -> Any:
        """Raise :class:`rtxarr.polygraph.NotSaved`: what a step changes is of this process."""
        raise NotSaved(
            "a step of rx.jit cannot be saved: the parameters, gradients and optimizers that it "
            "changes are objects of this process; save rx.fuse of a function that takes what it "
            "changes as arrays and gives the new ones, or of the model alone"
        )

    def _new(self, *call: Any) -> Any:
        if self._captured is not None and self._captured.is_recording:
            raise Unsettled  # tracing looks at values, and kernels must be loaded
        return super()._new(*call)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "capture": self._captured is not None}

    def _record(self, leaves: Sequence, structure: Any, xp: Any, plain: bool) -> Recording:
        return StepRecording(self._function, leaves, structure, xp, plain=plain)

    def _compiled(self, recording: Any, leaves: Sequence, structure: Any) -> Any:
        return CompiledStep(self, recording, leaves)


class _Gradient:
    """The gradient of a tensor, as an input that is read anew at each call."""

    __slots__ = ("_tensor",)

    node = None

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def data(self) -> Any:
        return self._tensor.grad


class _Unused(Place):
    """An input that the program does not read."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, "", 0, True)

    def reserve(self) -> None:
        return None


class _Stale:
    """Memory that is changed when the program is over: reading it in the step is refused."""

    __slots__ = ("number", "trace", "shared", "strides")

    def __init__(self, cell: Any) -> None:
        self.number, self.trace = None, cell.trace
        self.shared, self.strides = cell.shared, cell.strides

    @property
    def node(self) -> ir.Node:
        raise Concretization(
            f"it uses what an optimizer or an average has changed in the same step, at "
            f"{where_called()}"
        )


class _Swapped:
    """A tensor that holds tracers while a step is traced, and what it held before."""

    __slots__ = (
        *("tensor", "data", "node", "grad", "tracer", "grad_tracer"),
        *("is_set", "is_cleared", "is_read"),
    )

    def __init__(self, tensor: Tensor, tracer: Tracer) -> None:
        self.tensor, self.data = tensor, own_data(tensor)
        self.node: Any = tensor.node
        self.grad = self.node.grad if type(self.node) is Leaf else None
        self.tracer = tracer
        self.grad_tracer: Any = None
        self.is_set = False  # its gradient was, by the step
        self.is_cleared = False  # before one was added
        self.is_read = False  # before it was set or added to: there may be none

    def restore(self) -> None:
        self.tensor.data = self.data
        if type(self.node) is Leaf:
            self.node.grad = self.grad


class StepRecording(Recording):
    """A step that was traced.

    Attributes
    ----------
    effects : list of (callable, list of (Tensor, array or None))
        What is to be called after the program, with the gradients that tensors have then.
    grads : list of (Tensor, Tracer or None)
        The gradients at the end, where they are not those of the beginning.
    set_anew : set
        Places of arguments whose gradient is set, not added to.
    replaced : list of (Tensor, Tracer)
        Tensors that hold other memory at the end: it is copied into their own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._swapped: dict[int, _Swapped] = {}
        self.effects: list[tuple[Callable, list]] = []
        self.grads: list[tuple[Any, Any]] = []
        self.set_anew: set[int] = set()
        self.replaced: list[tuple[Tensor, Any]] = []
        if any(isinstance(x, Tensor) and type(x.node) is Node for x in args[1]):
            raise Concretization("it takes a tensor whose graph began outside of it")
        try:
            super().__init__(*args, **options)
        finally:
            for swapped in self._swapped.values():
                swapped.restore()

    def lift(self, x: Any) -> Any:
        """Let a Tensor found elsewhere hold tracers."""
        if not isinstance(x, Tensor) or isinstance(own_data(x), Tracer):
            return x
        if id(x) in self._lifted:
            return self._lifted[id(x)][1]
        if type(x.node) is Node:
            raise Concretization("it uses a tensor whose graph began outside of it")
        tracer = self.trace.capture(own_data(x), x)
        swapped = self._swapped[id(x)] = _Swapped(x, tracer)
        x.data = tracer
        if swapped.grad is not None:
            swapped.grad_tracer = self.trace.capture(swapped.grad, _Gradient(x))
            swapped.node.grad = swapped.grad_tracer
        return x

    def reads_gradient(self, x: Tensor) -> None:
        place = self._argument(x)
        if place is not None and place not in self.set_anew:
            raise Concretization("it reads the gradient that an argument came with")
        swapped = self._swapped.get(id(self.lift(x)))
        if swapped is not None and type(swapped.node) is Leaf and not swapped.is_set:
            swapped.is_read |= swapped.node.grad is swapped.grad_tracer

    def _argument(self, x: Tensor) -> Any:
        """Return the place among the arguments of a Tensor that is one."""
        pairs = zip(self.tensors, self.originals, strict=True)
        return next((place for tensor, place in pairs if tensor is x), None)

    def sets_gradient(self, x: Tensor) -> None:
        place = self._argument(x)
        if place is not None:
            self.set_anew.add(place)
            return
        swapped = self._swapped.get(id(self.lift(x)))
        if swapped is not None:
            swapped.is_cleared |= not swapped.is_set and swapped.node.grad is swapped.grad_tracer
            swapped.is_set = True

    def defer(self, function: Callable, params: Sequence[Tensor], changes: bool) -> None:
        """Call ``function`` when the program is over, with the gradients that ``params`` have now.

        Where it ``changes`` them, their values cannot be read in the step from here on.
        """
        held = []
        for x in params:
            self.lift(x)
            held.append((x, x.grad))
        self.effects.append((function, held))
        for x in params if changes else ():
            stale: Any = Tracer(x.data._cell)
            stale._cell = _Stale(x.data._cell)
            x.data = stale

    def _finished(self) -> None:
        """Note what the step leaves behind, while its tensors hold tracers."""
        for s in self._swapped.values():
            data = s.tensor.data
            if data is not s.tracer and not isinstance(data._cell, _Stale):
                self.replaced.append((s.tensor, data))
            if type(s.node) is Leaf and (s.node.grad is not s.grad_tracer or s.is_set):
                self.grads.append((s.tensor, s.node.grad))
                # Added to none: another program adds to one that is there.
                s.is_read |= s.grad_tracer is None and not s.is_cleared
            if s.is_read:
                is_there = functools.partial(_has_gradient, s.tensor, s.grad is not None)
                self.surroundings.checks.append(is_there)
        for tensor, place in zip(self.tensors, self.originals, strict=True):
            if type(tensor.node) is not Leaf:
                continue
            if tensor.node.grad is not None or place in self.set_anew:
                self.grads.append((place, tensor.node.grad))


def _has_gradient(tensor: Tensor, wanted: bool) -> bool:
    return (tensor.grad is not None) is wanted


class CompiledStep:
    """A program for one kind of arguments of a step; see ``_fuse.Compiled``."""

    def __init__(self, jitted: Jitted, recording: StepRecording, leaves: Sequence) -> None:
        trace = recording.trace
        held = [pair for _, pairs in recording.effects for pair in pairs]
        left = [pair for pair in (*held, *recording.grads) if pair[1] is not None]
        extra = [g for _, g in (*left, *recording.replaced)]
        self._owners = [*(x for x, _ in left), *(object() for _ in recording.replaced)]
        n_results = len(recording.result)
        nodes, outputs = recording.outputs([*recording.result, *extra])
        updates = recording.updates()
        self.graph = recording.graph(nodes, updates)
        used = {n for n in self.graph.nodes() if n.op == "input"}
        for i, source in enumerate(trace.sources):
            unread = trace.inputs[i] not in used and i not in {n for n, _ in updates}
            if unread and isinstance(source, Captured) and isinstance(source.holder, _Gradient):
                trace.sources[i] = _Unused()
        self.program = program_for(jitted, trace, self.graph, input_strides(trace))
        self._recording = recording
        self.effects = recording.effects
        text, names = call_text(recording, leaves, updates)
        tracked = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.node is not None]
        if tracked:
            names["Leaf"] = Leaf
            tests = " or ".join(f"type(L[{i}].node) is not Leaf" for i in tracked)
            if len(tracked) > 1:  # the gradients of one that is given twice are one
                names_of = ", ".join(f"id(L[{i}])" for i in tracked)
                tests += f" or len({{{names_of}}}) < {len(tracked)}"
            first, rest = text.split("\n", 1)
            text = f"{first}\n    if {tests}: return EAGER\n{rest}"
        words = result_words(outputs, names, trace.xp)
        self.text = text + f"    return done(L, [{', '.join(words)}])\n"
        names["program"] = self.program.run
        names["done"] = functools.partial(self._done, n_results)
        exec(compile(self.text, "<fused step>", "exec"), names)
        self.run: Callable = names["run"]

    def _done(self, n_results: int, leaves: Sequence, made: list) -> Any:
        """Leave behind what the step would, and give its result."""
        recording = self._recording
        given = iter(_apart(made[n_results:], self._owners))
        effects = [
            (function, [(x, None if g is None else next(given)) for x, g in held])
            for function, held in recording.effects
        ]
        grads = [(x, None if g is None else next(given)) for x, g in recording.grads]
        for tensor, _ in recording.replaced:
            tensor.data[...] = next(given)
            mark_changed(tensor)
        for function, held in effects:
            for tensor, g in held:
                if tensor.node is not None:
                    tensor.grad = g
            function()
        for x, g in grads:
            if isinstance(x, Tensor):
                x.grad = g
            else:
                leaf = leaves[x]
                adds = leaf.grad is not None and x not in recording.set_anew
                leaf.grad = leaf.grad + g if adds else g
        return unflatten(recording.structure, made[:n_results])


def _apart(arrays: list, owners: list) -> list:
    """Copy arrays that have two owners: what one tensor does to its gradient is its own."""
    seen: dict[int, Any] = {}
    found = []
    for x, owner in zip(arrays, owners, strict=True):
        if seen.setdefault(id(x), owner) is not owner:
            x = _device.namespace(x).asarray(x, copy=True)
        found.append(x)
    return found
