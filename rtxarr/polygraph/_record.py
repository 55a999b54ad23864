"""Run a function on tracers once: its graph, and how to make its result of the graph's outputs."""

from __future__ import annotations

import collections
import contextlib
import enum
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd import Tensor
from rtxarr.autograd._mode import OBSERVED, PROFILED, TRACED, WITNESSED, state
from rtxarr.autograd._tape import Leaf, Node, make_tensor
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir, _namespace
from rtxarr.polygraph._draws import Place
from rtxarr.polygraph._guards import Surroundings, is_plain
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import (
    Captured,
    Changed,
    Concretization,
    ScalarSource,
    Trace,
    Tracer,
    strides_of,
)
from rtxarr.polygraph._watch import watching

SCALARS = (int, float, complex)


class Output:
    """How one leaf of the result is made.

    ``kind`` is "root" (output ``source`` of the program), "input" (input ``source`` itself),
    "leaf" (argument ``source`` itself), "scalar" (an expression) or "plain" (a Python object);
    ``steps`` are views to take of an array; ``apart`` lists what the output may share memory with
    and must not: ("r", number) of outputs, ("x", number) of inputs; it is None for what is surely
    of its own. ``tensor`` says that it is to be a Tensor; ``scalar`` that NumPy gives a scalar.
    """

    __slots__ = ("kind", "source", "steps", "apart", "tensor", "scalar")

    def __init__(self, kind, source, steps=(), *, apart=None, tensor=False, scalar=False):
        self.kind = kind
        self.source = source
        self.steps = steps
        self.apart = apart
        self.tensor = tensor
        self.scalar = scalar

    @property
    def is_direct(self) -> bool:
        """Whether it is the program's output as it comes."""
        return self.kind == "root" and not (
            self.steps or self.tensor or self.scalar or self.apart is not None
        )


class Recording:
    """One traced call of a function.

    Parameters
    ----------
    function : callable
    leaves : list
        Of the arguments.
    structure : object
        Theirs, as ``flatten`` gives it.
    xp : module
        The namespace of the arrays.
    plain : bool, default False
        Whether numbers among the arguments are part of the program.

    Attributes
    ----------
    trace : Trace
    tensors : list of Tensor
        With tracers for data: those of arguments and those found elsewhere.
    originals : list
        For each of ``tensors`` the leaf's number, or the Tensor it stands for.
    roots : list of Tensor
        What each of ``tensors`` was in the beginning: writes may put others in their place.
    result : list
        The leaves of what the function gave.
    """

    def __init__(
        self,
        function: Callable,
        leaves: Sequence[Any],
        structure: Any,
        xp: Any,
        *,
        plain: bool = False,
    ) -> None:
        self.trace = trace = Trace(xp)
        data = [own_data(x) if isinstance(x, Tensor) else x for x in leaves]
        self._numbers = {i for i, x in enumerate(data) if isinstance(x, np.generic)}
        self.tensors: list[Tensor] = []
        self.originals: list[Any] = []
        self.roots: list[Tensor] = []
        self.scalars: list[int] = []  # places of the numbers among the leaves
        self._lifted: dict[int, tuple[Any, Tensor]] = {}
        _refuse_kinds(structure)
        with trace, _tracing(self):
            args, kwargs = unflatten(
                structure, [self._leaf(i, x, plain) for i, x in enumerate(leaves)]
            )
            self.surroundings = Surroundings(function, trace, self.lift)
            for x in leaves:
                if not _is_value(x):
                    self.surroundings.add(x)
            snapshot = self.surroundings.snapshot(*args, *kwargs.values())
            try:
                with watching(self.surroundings.objects), self._answering():
                    result = self.surroundings.function(*args, **kwargs)
            finally:
                moved = self.surroundings.set_back()
                snapshot.take_back()
            if moved:
                raise Concretization(
                    "it draws random numbers of NumPy or Python, which a program would repeat"
                )
            if trace.refused is not None:
                raise trace.refused
            trace.check_made()
            for tensor, root in zip(self.tensors, self.roots, strict=True):
                if own_data(tensor) is not own_data(root):
                    raise Changed("it sets the data of a tensor: write into it, or assign to it")
                if tensor.node is not root.node and type(tensor.node) is not Node:
                    raise Changed("it sets whether a tensor requires a gradient")
            self._known = set(map(id, (*leaves, *self.surroundings.found())))
            self.result, structure = flatten(result)
            self.structure = _ir.settled(structure)  # numbers may be keys of dicts
            _refuse_kinds(self.structure)
            self._finished()

    def _answering(self) -> contextlib.AbstractContextManager:
        if self.trace.on_numpy:
            return contextlib.nullcontext()
        from rtxarr.polygraph._cupy import answering

        return answering()

    def _finished(self) -> None:
        """Look at what the call leaves behind, while it is still traced."""
        if any(type(t.node) is Leaf and t.node.grad is not None for t in self.tensors):
            raise Concretization("it calls backward(), which sets gradients: use rx.jit")

    def reads_gradient(self, x: Tensor) -> None:
        """Note that the function reads the gradient of a Tensor."""
        raise Concretization("it reads gradients: use rx.jit")

    def sets_gradient(self, x: Tensor) -> None:
        """Note that it sets it."""
        raise Concretization("it sets gradients: use rx.jit")

    def defer(self, function: Callable, params: Sequence[Tensor], changes: bool) -> None:
        """Note that it calls ``function``, which changes ``params`` or state of its own."""
        raise Concretization("it changes parameters by an optimizer or an average: use rx.jit")

    # ---------------------------------------------------------------------------- arguments

    def _leaf(self, place: int, x: Any, plain: bool) -> Any:
        if isinstance(x, Tensor):
            tensor = self._tensor(self._array(place, own_data(x)), x, place)
            self._lifted.setdefault(id(x), (x, tensor))
            return tensor
        if _device.is_array(x):
            return self._array(place, x)
        if type(x) in SCALARS and not plain:
            self.scalars.append(place)
            return Scalar(x, f"a[{len(self.scalars) - 1}]")
        return x

    def _tensor(self, tracer, x, original):
        node = None if x.node is None else Leaf()
        tensor = make_tensor(tracer, node, 0, None)
        self.tensors.append(tensor)
        self.roots.append(make_tensor(tracer, node, 0, None))
        self.originals.append(original)
        return tensor

    def _array(self, place, x):
        tracer = self.trace.input(place, x.dtype, x.shape, strides_of(x))
        tracer._cell.is_scalar = tracer._cell.is_readonly = isinstance(x, np.generic)
        if isinstance(x, np.ndarray):
            tracer._cell.is_readonly = not x.flags.writeable
        return tracer

    def is_scalar(self, source: Any) -> bool:
        """Tell whether an input of the graph is a number, and not an array."""
        if isinstance(source, ScalarSource):
            return True
        if isinstance(source, Place):
            return False
        if isinstance(source, Captured):
            return isinstance(source.array, np.generic)
        return source in self._numbers

    # --------------------------------------------------------------- tensors found elsewhere

    def lift(self, x: Any) -> Any:
        """Return the tensor of tracers that stands for a Tensor; anything else as it is."""
        if not isinstance(x, Tensor) or isinstance(data := own_data(x), Tracer):
            return x
        found = self._lifted.get(id(x))
        if found is None:
            tensor = self._tensor(self.trace.capture(data, x), x, x)
            found = self._lifted[id(x)] = x, tensor
        return found[1]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace what the block does."""
        with self.trace, _tracing(self):
            yield

    def stand_in(self, x: Tensor, tensor: Tensor) -> None:
        """Let ``tensor`` stand for a Tensor that the function finds elsewhere."""
        self._lifted[id(x)] = x, tensor

    def namespace_at(self, device: Any) -> Any:
        """Return what makes new arrays on a device (None: the current) for the function."""
        place = _device.device() if device is None else _device.device(device)
        if (place.kind == "cpu") is not self.trace.on_numpy:
            raise Concretization(f"it makes an array on {place}, where its arguments are not")
        return _namespace

    # ------------------------------------------------------------------------------- results

    def outputs(self, values: Sequence[Any]) -> tuple[list[_ir.Node], list[Output]]:
        """Return the nodes to compute for these leaves of a result, and how each leaf is made."""
        nodes: list[_ir.Node] = []
        places: dict[Any, Any] = {}  # of cells and nodes among them
        made = []
        with self.trace:
            for x in values:
                made.append(self._output(x, nodes, places))
        return nodes, made

    def _output(self, x, nodes, places):
        is_tensor = isinstance(x, Tensor)
        if is_tensor:
            for tensor, root, original in zip(
                self.tensors, self.roots, self.originals, strict=True
            ):
                if x is tensor and x.node is root.node and x.data is root.data:
                    return Output("leaf" if isinstance(original, int) else "plain", original)
            if type(x) is not Tensor or type(x.node) is Leaf:
                raise Concretization(f"it gives a {type(x).__name__} that it made a variable")
        data = x.data if is_tensor else x
        if isinstance(data, Scalar):
            return Output("scalar", data.expression)
        if not isinstance(data, Tracer):
            if not _device.is_array(data) or isinstance(data, np.generic):
                if not _is_fixed(data) and id(data) not in self._known:
                    raise Concretization(f"it gives a {type(data).__name__} that it made")
                if isinstance(data, str) and "text" in self.trace.notes:
                    raise Concretization("it gives a text, having written an array as one")
                return Output("plain", data)
            data = self.trace.capture(data)
        cell = data._cell
        if cell.number is not None:
            return Output("input", cell.number, data._steps, tensor=is_tensor)
        if cell not in places:
            places[cell] = self._place(cell.node, nodes, places)
        number, apart = places[cell]
        return Output(
            "root", number, data._steps, apart=apart, tensor=is_tensor, scalar=data.is_scalar
        )

    def _place(self, node, nodes, places):
        """Give the program's output for a node, and what it may share memory with."""
        base = node
        while base.op in _ir.VIEWS:
            base = base.src[0]
        apart = None
        if base.op == "input":
            apart = [("x", base.attrs[0])]
        elif node.op in _ir.VIEWS or base in places or base.op in ("constant", "iota"):
            apart = []
        if base in places and apart is not None:
            apart += [("r", n) for n in places[base]]
        number = len(nodes)
        nodes.append(node)
        places.setdefault(base, []).append(number)
        return number, apart

    def graph(self, nodes: Sequence[_ir.Node], updates: Sequence) -> _ir.Graph:
        """Return the graph with these outputs."""
        trace = self.trace
        scalars = [i for i, s in enumerate(trace.sources) if self.is_scalar(s)]
        graph = _ir.Graph(trace.inputs, nodes, updates, scalars)
        inputs = {*graph.inputs}
        if any(n.op == "input" and n not in inputs for n in graph.nodes()):
            raise Concretization("it uses, elsewhere, what a function of a branch or loop computes")
        return graph

    def updates(self) -> list[tuple[int, _ir.Node]]:
        """Return what is written back into inputs."""
        return [
            (cell.number, cell.node)
            for cell in self.trace.cells
            if cell.is_written and cell.node is not self.trace.inputs[cell.number]
        ]


_WATCHED = OBSERVED | PROFILED | WITNESSED  # what nodes of tracers are not shown to

# While a function is traced, its thread finds tracers in ``data`` of all tensors; what they hold:
_slot = Tensor.__dict__["data"]
own_data: Callable[[Tensor], Any] = _slot.__get__
_lock = threading.Lock()
_n_traced = 0


def _seen_data(x: Tensor) -> Any:
    data = own_data(x)
    if not state.mode & TRACED or isinstance(data, Tracer):
        return data
    return own_data(state.tracing.lift(x))


_seen = property(_seen_data, _slot.__set__)


def _trace_tensors(change: int) -> None:
    """Let tensors show tracers, from the first of the functions traced at a time to the last."""
    global _n_traced
    with _lock:
        _n_traced += change
        setattr(Tensor, "data", _seen if _n_traced else _slot)  # noqa: B010


class _tracing:
    """Let the tape hand its tensors to a recording, for a ``with`` block."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._before = state.tracing, state.mode & (_WATCHED | TRACED)
        state.tracing = self._recording
        state.mode = state.mode & ~_WATCHED | TRACED
        _trace_tensors(1)

    def __exit__(self, *exc: object) -> None:
        state.tracing, bits = self._before
        state.mode = state.mode & ~(_WATCHED | TRACED) | bits
        _trace_tensors(-1)


def _is_fixed(x: Any) -> bool:
    """Tell whether a result is the same whatever the function computes."""
    if isinstance(x, (slice, range)):
        return all(type(n) in (int, type(None)) for n in (x.start, x.stop, x.step))
    if isinstance(x, types.BuiltinFunctionType):
        return isinstance(x.__self__, types.ModuleType)
    return is_plain(x) or isinstance(x, (type, types.ModuleType, enum.Enum, np.ufunc))


_KINDS = dict, list, tuple, collections.OrderedDict


def _refuse_kinds(structure: Any) -> None:
    """Refuse containers that may be more than their parts."""
    if structure is not None:
        kind, _, parts = structure
        if kind not in _KINDS and not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise Concretization(
                f"it takes or gives a {kind.__name__}, which is no plain container"
            )
        for part in parts:
            _refuse_kinds(part)


def _is_value(x: Any) -> bool:
    return isinstance(x, (str, bytes, bool, *SCALARS, type(None), slice, type, Tensor)) or (
        _device.is_array(x)
    )


def fetch(source: Any, leaves: Sequence[Any]) -> Any:
    """Return the array of an input."""
    if isinstance(source, Captured):
        return source.array if source.holder is None else source.holder.data
    x = leaves[source]
    return x.data if isinstance(x, Tensor) else x


def own(xp: Any, value: Any, *others: Any) -> Any:
    """Return an output as memory of its own, apart from ``others``, that can be written."""
    fixed = value.size > 1 and 0 in value.strides
    fixed = fixed or isinstance(value, np.ndarray) and not value.flags.writeable
    arrays = [x for x in others if not isinstance(x, np.generic)]  # numbers are in no memory
    if fixed or any(xp.may_share_memory(value, x) for x in arrays):
        return xp.asarray(value, copy=True, order="C")
    return value
