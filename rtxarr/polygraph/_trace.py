"""Arrays that note what is computed from them: how a function becomes a graph.

A :class:`Tracer` is a handle on memory, as an array is: several may look at the same memory through
views, and writing through one is seen by all. The memory is a :class:`Cell`, which holds the node
of its present contents; a write gives it another.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rtxarr import _device
from rtxarr._override import thread
from rtxarr.autograd._mode import state
from rtxarr.autograd._op import checksum
from rtxarr.polygraph import _ir


class Concretization(TypeError):
    """Raised where a traced function asks for what is in an array: there is no value yet."""


class Changed(Concretization):
    """Raised where a traced function changes what it finds, which may be that it does but once."""


_PACKAGES = tuple(
    os.path.dirname(sys.modules[name].__file__ or "") + os.sep
    for name in ("rtxarr", "numpy", "array_api_compat")
)


def where_called() -> str:
    """Return the file and line of the innermost frame outside of the libraries."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_PACKAGES, "<")) and f"{os.sep}cupy" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def levels_outside() -> int:
    """Return the ``stacklevel`` with which the caller warns of a line outside of the libraries."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
        level += 1
    return level


def concretization(what: str) -> Concretization:
    """Make the error of asking for values, with the line that does.

    The function is refused also if it catches the error.
    """
    error = Concretization(f"{what} needs the values of an array, at {where_called()}")
    if thread.trace is not None and thread.trace.refused is None:
        thread.trace.refused = error
    return error


class Cell:
    """Memory that tracers look at.

    Attributes
    ----------
    node : Node
        Its present contents.
    number : int or None
        Which input of the graph it is.
    strides : tuple of int or None
        How it lies in memory, in bytes; None where NumPy's choice is not known here.
    shared : set of Cell
        Cells that may or may not be the same memory: a reshape of one of unknown strides.
    is_written : bool
    is_readonly : bool
    is_scalar : bool
        Whether NumPy gives a scalar for it, should it be of no dimensions.
    scope : object or None
        The function of a branch or loop that it was made in.
    """

    __slots__ = (
        "node",
        "number",
        "strides",
        "shared",
        "is_written",
        "is_readonly",
        "is_scalar",
        "trace",
        "scope",
    )

    def __init__(self, trace, node, number=None, strides=None, is_readonly=False):
        self.trace = trace
        self.node = node
        self.number = number
        self.strides = strides
        self.shared: set[Cell] = set()
        self.is_written = False
        self.is_readonly = is_readonly
        self.is_scalar = True
        self.scope = trace.scope

    def write(self, node):
        """Give it other contents."""
        if self.is_readonly:
            raise ValueError("assignment destination is read-only")
        if self.scope is not self.trace.scope:
            raise Concretization(
                f"a function of a branch or loop must not write into outer arrays, at "
                f"{where_called()}"
            )
        if self.shared:
            raise Concretization(
                f"a write to an array that may share memory with a reshape, at {where_called()}"
            )
        self.node = node
        self.is_written = True


def current() -> Trace:
    """Return the trace that this thread is making."""
    if thread.trace is None:
        raise RuntimeError("an array of a traced function was used after the trace had ended")
    return thread.trace


class Trace:
    """One run of a function on tracers; as a context manager, the run of this thread.

    Parameters
    ----------
    xp : module
        The namespace of the arrays that the program will run on.

    Attributes
    ----------
    inputs : list of Node
    sources : list
        What each input is: a leaf's number, a :class:`Captured` or a scalar's expression.
    guards : list
        What values of scalars the traced function asked for; see ``_scalar``.
    found : set of int
        The identities of arrays that are known to live outside of the function.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.on_numpy = xp.__name__ in ("array_api_compat.numpy", "numpy")
        self.inputs: list[_ir.Node] = []
        self.sources: list[Any] = []
        self.cells: list[Cell] = []  # of inputs that are arrays
        self.guards: list[tuple] = []
        self.notes: dict[Any, Any] = {}  # what those who make nodes know of them
        self.found: set[int] = set()
        self.refused: Concretization | None = None
        self.scope: Any = None  # the function of a branch or loop that runs
        self.stand_in: Any = None  # gives containers with tracers for arrays
        self.joins_equal = False  # whether arrays that are made are inputs but once if equal
        self._made: list[tuple[Any, tuple, int]] = []
        self._captured: dict[int, Tracer] = {}
        self._scalars: dict[tuple, _ir.Node] = {}

    def __enter__(self) -> Trace:
        self._outer = thread.trace
        thread.trace = self
        return self

    def __exit__(self, *exc: object) -> None:
        thread.trace = self._outer
        if "draws" in self.__dict__:
            self.draws.restore()

    @contextlib.contextmanager
    def inside(self, scope: Any) -> Iterator[None]:
        """Let the block be of a function of a branch or loop."""
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer

    @functools.cached_property
    def draws(self) -> Any:
        """The random numbers that the function draws; see ``_draws``."""
        from rtxarr.polygraph._draws import Draws

        return Draws(self)

    def defer(self, function: Any, params: Any, *, changes: bool = True) -> None:
        """Leave to ``function`` what it does to ``params``, after the traced function."""
        state.tracing.defer(function, params, changes)

    def refuse(self, why: str, *, once: bool = False) -> NoReturn:
        """Raise the error that lets the function run as it is, if ``once`` this time alone."""
        raise (Changed if once else Concretization)(f"{why}, at {where_called()}")

    def input(self, source: Any, dtype: Any, shape: tuple, strides: Any = None) -> Tracer:
        """Add an input that is an array."""
        node = self._new_input(source, dtype, shape)
        cell = Cell(self, node, len(self.inputs) - 1, strides)
        cell.scope = None
        self.cells.append(cell)
        return Tracer(cell)

    def _new_input(self, source, dtype, shape):
        kind = np.dtype(dtype)
        if kind.kind in "OSUMm" or kind.names is not None or not kind.isnative:
            raise Concretization(f"it takes or finds an array of dtype {kind}")
        node = _ir.input_node(len(self.inputs), dtype, shape)
        self.inputs.append(node)
        self.sources.append(source)
        return node

    def scalar(self, expression: str, dtype: np.dtype) -> _ir.Node:
        """Return the input of no dimensions that holds a number computed on the host."""
        key = expression, dtype
        if key not in self._scalars:
            self._scalars[key] = self._new_input(ScalarSource(expression, dtype), dtype, ())
        return self._scalars[key]

    def capture(self, array: Any, holder: Any = None) -> Tracer:
        """Return the input for an array that the function found elsewhere than in its arguments.

        ``holder`` is the Tensor whose ``data`` it is, if it is to be read from there. An array that
        is not in ``found`` was made by the function itself: each call then begins with its present
        contents.
        """
        found = self._captured.get(id(array))
        if found is None:
            on_gpu = _device.is_device_array(array)
            if on_gpu is self.on_numpy:
                raise TypeError(
                    "arrays must all belong to one library, got numpy and cupy; move them with "
                    "to_device"
                )
            is_made = holder is None and id(array) not in self.found
            found = self._made_before(array) if is_made else None
            if found is None:
                source = Captured(array, holder)
                found = self.input(source, array.dtype, array.shape, strides_of(array))
            if is_made:
                strides = found._cell.strides
                found = Tracer(Cell(self, found.node, strides=strides))
                found._cell.scope, found._cell.is_scalar = None, isinstance(array, np.generic)
            writable = on_gpu or array.flags.writeable
            found._cell.is_readonly = not writable
            self._captured[id(array)] = found
        return found

    def _made_before(self, array: Any) -> Tracer | None:
        """Note an array that the function made; return the input of its equal, if asked for."""
        kind = type(array), array.dtype, array.shape, strides_of(array), checksum(array)
        equal = (n for x, of, n in self._made if of == kind and _same_bytes(x, array))
        number = next(equal, None) if self.joins_equal else None
        self._made.append((array, kind, len(self.inputs) if number is None else number))
        if number is None:
            return None
        return next(Tracer(c) for c in self.cells if c.number == number)

    def check_made(self) -> None:
        """Refuse arrays that the function made, used and then changed, each by NumPy."""
        for array, (*_, before), _ in self._made:
            if checksum(array) != before:
                raise Concretization(
                    "it changes an array by NumPy that it has used; make it by rx.zeros or by the "
                    "namespace of an argument, or copy it"
                )

    def fresh(self, node: _ir.Node, strides: Any = "C") -> Tracer:
        """Return a tracer of memory of its own that holds ``node``."""
        return Tracer(Cell(self, node, strides=strides))

    def fresh_array(
        self, node: _ir.Node, strides: Any = "C", *, like: Tracer | None = None
    ) -> Tracer:
        """Return the same for what NumPy makes no scalar of, unless ``like`` is one."""
        made = self.fresh(node, strides)
        made._cell.is_scalar = like is not None and like.is_scalar
        return made


class Captured:
    """An input that is an array found in a closure, a module or the like."""

    __slots__ = ("array", "holder")

    def __init__(self, array, holder=None):
        self.array = array
        self.holder = holder


class ScalarSource:
    """An input that is a number: an expression of the scalar arguments, in a dtype."""

    __slots__ = ("expression", "dtype")

    def __init__(self, expression, dtype):
        self.expression = expression
        self.dtype = dtype


def strides_of(array: Any) -> Any:
    """Return ``"C"`` for a C-contiguous array, else its strides."""
    if isinstance(array, np.generic):
        return "C"
    return "C" if array.flags.c_contiguous else tuple(array.strides)


def _same_bytes(a: Any, b: Any) -> bool:
    a, b = (np.ascontiguousarray(_device.to_device(x, "cpu")) for x in (a, b))
    return a.tobytes() == b.tobytes()


def _dummy(shape: tuple, dtype: np.dtype, strides: Any) -> np.ndarray:
    """Make an array of no memory to speak of, whose elements must not be read."""
    if strides == "C" or strides is None:
        strides, step = [], dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= max(n, 1)
        strides = tuple(reversed(strides))
    return np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, strides)


# ------------------------------------------------------------------------------------- views


class Index:
    """A view by a basic index."""

    __slots__ = ("key",)

    def __init__(self, key):
        self.key = key  # a tuple of ints, slices, None and one Ellipsis

    def read(self, node):
        starts, steps, lengths, shape = self._parts(node.shape)
        return _ir.reshape(_ir.slice_node(node, starts, steps, lengths), shape)

    def write(self, node, value):
        starts, steps, lengths, _ = self._parts(node.shape)
        return _ir.update(node, _ir.reshape(value, lengths), starts, steps)

    def apply(self, array, xp):
        return array[self.key]

    def _parts(self, shape):
        """Give starts, steps and lengths for each axis, and the shape of the result."""
        n_axes = sum(k is not None and k is not Ellipsis for k in self.key)
        starts, steps, lengths, out = [], [], [], []
        axis = 0
        for k in self.key:
            if k is None:
                out.append(1)
            elif k is Ellipsis:
                for _ in range(len(shape) - n_axes):
                    starts.append(0)
                    steps.append(1)
                    lengths.append(shape[axis])
                    out.append(shape[axis])
                    axis += 1
            elif isinstance(k, slice):
                start, stop, step = k.indices(shape[axis])
                length = len(range(start, stop, step))
                starts.append(start if length else 0)
                steps.append(step if length > 1 else 1)
                lengths.append(length)
                out.append(length)
                axis += 1
            else:
                starts.append(k + shape[axis] if k < 0 else k)
                steps.append(1)
                lengths.append(1)
                axis += 1
        return starts, steps, lengths, tuple(out)


class Permute:
    """A view with the axes in another order."""

    __slots__ = ("axes",)

    def __init__(self, axes):
        self.axes = tuple(axes)

    def read(self, node):
        return _ir.permute(node, self.axes)

    def write(self, node, value):
        back = tuple(self.axes.index(i) for i in range(len(self.axes)))
        return _ir.permute(value, back)

    def apply(self, array, xp):
        return xp.permute_dims(array, self.axes)


class Reshape:
    """A view of another shape."""

    __slots__ = ("shape",)

    def __init__(self, shape):
        self.shape = tuple(map(operator.index, shape))

    def read(self, node):
        return _ir.reshape(node, self.shape)

    def write(self, node, value):
        return _ir.reshape(value, node.shape)

    def apply(self, array, xp):
        return xp.reshape(array, self.shape)


class Broadcast(Reshape):
    """A view that repeats axes; nothing can be written through it."""

    __slots__ = ()

    def read(self, node):
        return _ir.broadcast(node, self.shape)

    def write(self, node, value):
        raise ValueError("assignment destination is read-only")

    def apply(self, array, xp):
        return xp.broadcast_to(array, self.shape)


class Part:
    """The real or imaginary part of a complex array."""

    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name

    def read(self, node):
        return _ir.map_node(self.name, node)

    def write(self, node, value):
        raise concretization(f"writing to the .{self.name} of an array")

    def apply(self, array, xp):
        return getattr(array, self.name)


def _write(node, steps, value):
    """Return ``node`` after ``value`` was written through a chain of views."""
    seen = [node]
    for step in steps:
        seen.append(step.read(seen[-1]))
    for step, node in zip(reversed(steps), reversed(seen[:-1]), strict=True):
        value = step.write(node, value)
    return value


class Tracer:
    """An array of a function that is being traced; its operators are attached elsewhere.

    Attributes
    ----------
    node : Node
        What it holds now.
    shape, dtype
        Those of NumPy.
    """

    __slots__ = ("_cell", "_steps", "_look", "shape", "dtype", "_known", "__weakref__")
    __array_priority__ = 2000
    __rtxarr_tracer__ = True  # see rtxarr._device

    def __hash__(self) -> int:
        if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGES):
            raise concretization("hash()")
        return object.__hash__(self)

    if TYPE_CHECKING:  # what _methods attaches

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, key: Any) -> Tracer: ...
        def __setitem__(self, key: Any, value: Any) -> None: ...

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name in ("shape", "dtype"):
                name_of_file = sys._getframe(1).f_code.co_filename
                if not name_of_file.startswith(_PACKAGES):
                    raise concretization(f"setting .{name}")
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(np.ndarray, name):
                raise concretization(f".{name}")
            raise AttributeError(f"an array of a traced function has no attribute {name!r}")

    def __init__(
        self,
        cell: Cell,
        steps: tuple = (),
        look: np.ndarray | None = None,
        known: tuple[Any, Any] = (None, None),
    ) -> None:
        self._cell = cell
        self._steps = steps
        self._look = look  # a dummy of its shape, dtype and strides, made when asked for
        self._known = known  # a node of the cell, and what this is of it
        node = self.node
        self.shape = node.shape
        self.dtype = node.dtype

    @property
    def node(self) -> _ir.Node:
        base, found = self._known
        node = self._cell.node
        if base is node:
            return found
        for step in self._steps:
            node = step.read(node)
        self._known = self._cell.node, node
        return node

    @property
    def look(self) -> np.ndarray:
        if self._look is None:
            base = self._cell.node
            self._look = _dummy(base.shape, base.dtype, self._cell.strides)
        return self._look

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: self.node.size)
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.dtype.itemsize)

    @property
    def device(self) -> Any:
        """Where the arrays will be."""
        return _device.device() if not self._cell.trace.on_numpy else _device.device("cpu")

    @property
    def is_scalar(self) -> bool:
        """Whether NumPy gives a scalar here, which nothing can be written into."""
        cell = self._cell
        return not self.shape and not self._steps and cell.is_scalar and cell.trace.on_numpy

    @property  # type: ignore[misc]
    def __class__(self):
        """What ``isinstance`` finds: to programs of others, the type of the array."""
        name = sys._getframe(1).f_code.co_filename
        if name.startswith(_PACKAGES):
            return Tracer
        if self._cell.trace.on_numpy:
            return self.dtype.type if self.is_scalar else np.ndarray
        return sys.modules["cupy"].ndarray

    @property
    def base(self) -> Any:
        """What owns its memory, as NumPy's arrays say it of views; to the library alone."""
        if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGES):
            raise concretization(".base")
        return self._cell

    strides = property(lambda self: self.look.strides)

    def view_by(self, step: Any, look: np.ndarray) -> Tracer:
        """Return a view through one more step."""
        known = self._cell.node, step.read(self.node)
        return Tracer(self._cell, (*self._steps, step), look, known)

    def write(self, node: _ir.Node) -> None:
        """Replace the contents; ``node`` has this shape and dtype."""
        cell = self._cell
        if cell.trace is not current():
            raise RuntimeError("an array of a traced function was used after the trace had ended")
        cell.write(_write(cell.node, self._steps, node))

    def snapshot(self) -> Tracer:
        """Return a copy: memory of its own with what this holds now."""
        return current().fresh_array(self.node, like=self)

    # ------------------------------------------------------------- views of the standard's kinds

    def reshaped(self, shape: Sequence[int]) -> Tracer:
        """Return a view of another shape, or a copy where NumPy makes one."""
        shape = tuple(shape)
        if shape == self.shape:
            return self.view_by(Reshape(shape), self.look)
        node = _ir.reshape(self.node, shape)
        squeezed = [n for n in self.shape if n != 1]
        if self._cell.strides is None and squeezed != [n for n in shape if n != 1]:
            # Whether NumPy copies is not known here; only a write would tell.
            copy = current().fresh(node, None)
            copy._cell.shared.add(self._cell)
            self._cell.shared.add(copy._cell)
            return copy
        try:
            look = np.reshape(self.look, shape, copy=False)
        except ValueError:
            return current().fresh(node)
        return self.view_by(Reshape(shape), look)

    def permuted(self, axes: Sequence[int]) -> Tracer:
        """Return a view with the axes in another order."""
        if self.is_scalar:
            return self
        return self.view_by(Permute(axes), self.look.transpose(axes))

    def broadcasted(self, shape: Sequence[int]) -> Tracer:
        """Return a view that repeats axes of length one."""
        return self.view_by(Broadcast(shape), np.broadcast_to(self.look, shape))

    def indexed(self, key: tuple) -> Tracer:
        """Return a view by a basic index; a copy where NumPy gives a scalar."""
        if Ellipsis in key:
            look = self.look[key]
        else:
            look = self.look[(*key, Ellipsis)]
            if look.ndim == 0 and self._cell.trace.on_numpy:
                return current().fresh(self.view_by(Index(key), look).node)
            key = (*key, Ellipsis)
        return self.view_by(Index(key), look)

    def part(self, name: str) -> Tracer:
        """Return the real or imaginary part, a view of a complex array."""
        return self.view_by(Part(name), getattr(self.look, name))


def replay(steps: Sequence[Any], array: Any, xp: Any) -> Any:
    """Return the view of a real array that a tracer was of its cell."""
    for step in steps:
        array = step.apply(array, xp)
    return array
