"""Run a function on tracers once: its graph, and how to make its result of the graph's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd import Tensor
from rtxarr.autograd._mode import TRACED, state
from rtxarr.autograd._tape import Leaf, make_tensor
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.polygraph import _ir, _namespace
from rtxarr.polygraph._guards import Surroundings
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import (
    Captured,
    Concretization,
    Trace,
    Tracer,
    replay,
    strides_of,
)

SCALARS = (int, float, complex)


class Output:
    """How one leaf of the result is made.

    ``kind`` is "root" (output ``source`` of the program), "input" (input ``source`` itself),
    "scalar" (an expression) or "plain" (a Python object); ``steps`` are views to take of an array;
    ``copy`` says that another leaf is the same array; ``tensor`` that it is to be a Tensor;
    ``scalar`` that NumPy would give a scalar.
    """

    __slots__ = ("kind", "source", "steps", "copy", "tensor", "scalar")

    def __init__(self, kind, source, steps=(), *, copy=False, tensor=False, scalar=False):
        self.kind = kind
        self.source = source
        self.steps = steps
        self.copy = copy
        self.tensor = tensor
        self.scalar = scalar

    @property
    def is_direct(self) -> bool:
        """Whether it is the program's output as it comes."""
        return self.kind == "root" and not (self.steps or self.copy or self.tensor or self.scalar)


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
        self.tensors: list[Tensor] = []
        self.originals: list[Any] = []
        self.scalars: list[int] = []  # places of the numbers among the leaves
        self._lifted: dict[int, tuple[Any, Tensor]] = {}
        before = np.random.get_state()[2]  # noqa: NPY002  (to see whether it is drawn from)
        with trace, _tracing(self):
            args, kwargs = unflatten(
                structure, [self._leaf(i, x, plain) for i, x in enumerate(leaves)]
            )
            self.surroundings = Surroundings(function, trace, self.lift)
            for x in leaves:
                if not _is_value(x):
                    self.surroundings.add(x)
            states = [g.bit_generator.state for g in self.surroundings.generators]
            result = self.surroundings.function(*args, **kwargs)
            if np.random.get_state()[2] != before or any(  # noqa: NPY002
                repr(g.bit_generator.state) != repr(s)
                for g, s in zip(self.surroundings.generators, states, strict=True)
            ):
                raise Concretization(
                    "it draws NumPy's random numbers, which a program would repeat"
                )
            self.result, self.structure = flatten(result)
            if any(type(t.node) is Leaf and t.node.grad is not None for t in self.tensors):
                raise Concretization("it calls backward(), which sets gradients: use rx.jit")

    # ---------------------------------------------------------------------------- arguments

    def _leaf(self, place: int, x: Any, plain: bool) -> Any:
        if isinstance(x, Tensor):
            tracer = self._array(place, x.data)
            tensor = make_tensor(tracer, None if x.node is None else Leaf(), 0, None)
            self.tensors.append(tensor)
            self.originals.append(place)
            self._lifted.setdefault(id(x), (x, tensor))
            return tensor
        if _device.is_array(x):
            return self._array(place, x)
        if type(x) in SCALARS and not plain:
            self.scalars.append(place)
            return Scalar(x, f"a[{len(self.scalars) - 1}]")
        return x

    def _array(self, place, x):
        tracer = self.trace.input(place, x.dtype, x.shape, strides_of(x))
        if isinstance(x, np.generic):
            tracer._cell.is_readonly = True
        return tracer

    # --------------------------------------------------------------- tensors found elsewhere

    def lift(self, x: Any) -> Any:
        """Return the tensor of tracers that stands for a Tensor; anything else as it is."""
        if not isinstance(x, Tensor) or isinstance(x.data, Tracer):
            return x
        found = self._lifted.get(id(x))
        if found is None:
            tracer = self.trace.capture(x.data, x)
            tensor = make_tensor(tracer, None if x.node is None else Leaf(), 0, None)
            self.tensors.append(tensor)
            self.originals.append(x)
            found = self._lifted[id(x)] = x, tensor
        return found[1]

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
        places: dict[Any, int] = {}
        made = []
        with self.trace:
            for x in values:
                made.append(self._output(x, nodes, places))
        return nodes, made

    def _output(self, x, nodes, places):
        is_tensor = isinstance(x, Tensor)
        data = x.data if is_tensor else x
        if isinstance(data, Scalar):
            return Output("scalar", data.expression)
        if not isinstance(data, Tracer):
            if _device.is_array(data) and not isinstance(data, np.generic):
                data = self.trace.capture(data).snapshot()
            else:
                return Output("plain", data)
        cell = data._cell
        if cell.number is not None:
            return Output("input", cell.number, data._steps, tensor=is_tensor)
        number = places.get(cell)
        copy = False
        if number is None:
            known = places.get(cell.node)
            copy = known is not None
            if known is None:
                known = places[cell.node] = len(nodes)
                nodes.append(cell.node)
            number = known
            if not copy:
                places[cell] = number
        scalar = self.trace.on_numpy and not data._steps and data.ndim == 0
        return Output("root", number, data._steps, copy=copy, tensor=is_tensor, scalar=scalar)

    def updates(self) -> list[tuple[int, _ir.Node]]:
        """Return what is written back into inputs."""
        return [
            (cell.number, cell.node)
            for cell in self.trace.cells
            if cell.is_written and cell.node is not self.trace.inputs[cell.number]
        ]


class _tracing:
    """Let the tape hand its tensors to a recording, for a ``with`` block."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._before = state.tracing, state.mode & TRACED
        state.tracing = self._recording
        state.mode |= TRACED

    def __exit__(self, *exc: object) -> None:
        state.tracing, bit = self._before
        state.mode = state.mode & ~TRACED | bit


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


def finish(
    output: Output, roots: Sequence[Any], inputs: Sequence[Any], scalars: Any, xp: Any
) -> Any:
    """Make one leaf of the result."""
    if output.kind == "plain":
        return output.source
    if output.kind == "scalar":
        return scalars[output.source]
    value = (roots if output.kind == "root" else inputs)[output.source]
    if output.copy:
        value = xp.asarray(value, copy=True)
    if output.steps:
        value = replay(output.steps, value, xp)
    elif output.scalar:
        value = value[()]
    return make_tensor(value, None, 0, None) if output.tensor else value
