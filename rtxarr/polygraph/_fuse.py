"""``rx.fuse``: functions of arrays as fused programs, one for each kind of arguments."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtxarr import _device
from rtxarr._out_of_memory import explain_out_of_memory
from rtxarr._override import thread
from rtxarr.autograd import Tensor
from rtxarr.autograd._mode import AUTOCAST, OBSERVED, RECORDED, state
from rtxarr.autograd._tape import Node
from rtxarr.autograd._tree import flatten
from rtxarr.polygraph._backends import input_strides, program_for
from rtxarr.polygraph._call_text import EAGER, MISS, call_text, result_text, tensors_of
from rtxarr.polygraph._record import SCALARS, Recording
from rtxarr.polygraph._trace import (
    Changed,
    Concretization,
    levels_outside,
)

if TYPE_CHECKING:
    from rtxarr.polygraph._explain import Explanation, Profile

_KEY_MODES = RECORDED | OBSERVED | AUTOCAST  # of the mode, what a program depends on
_OF_GPU: set[type] = set()  # CuPy's type of arrays, once one was seen

MOST_PROGRAMS = 256
MOST_CHANGES = 2  # calls of one kind that may change what they find, as when they begin something
MOST_GUARDED = 16  # programs of one kind of arguments that differ in what numbers decided


def fuse(
    f: Callable | None = None, *, mode: str = "strict", backend: Any = None
) -> Callable[..., Any]:
    """Give a function that does what ``f`` does in as few kernels as can be.

    Parameters
    ----------
    f : callable
        Plain array code: ``rx.`` functions, ``xp = x.__array_namespace__()``, ``np.`` or ``cp.``;
        views, in-place operations, several results and nested containers are as in NumPy.
    mode : {"strict", "fast"}, default "strict"
        "strict" rounds after every operation, as ``f`` itself does. "fast" lets half precision stay
        in float32 inside a kernel and contracts products and sums.
    backend : object or "interpreter", optional
        What makes kernels; by default that of the arrays' device. The interpreter runs one
        operation of the array library after the other.

    Returns
    -------
    Fused
        Gives what ``f`` gives, with the same dtypes, shapes and views.

    Warns
    -----
    RuntimeWarning
        Once, where ``f`` cannot be fused because it asks for the values of arrays: it then runs as
        it is.

    Notes
    -----
    ``f`` runs once for each kind of arguments (dtypes, shapes, strides, and objects that are no
    arrays) on arrays that note what is done with them. Python floats and ints may vary without
    another run: what ``f`` decides by them is checked at each call. Arrays and numbers that ``f``
    finds in global names, closures, objects and modules are read anew. Where ``f`` changes what it
    finds, such as a counter or a list, it runs as it is; other side effects, such as prints, happen
    in that one run alone. Indices in arrays are not checked.

    Where a Tensor among the arguments, or one that ``f`` finds, needs a gradient, the function is
    one operation on the tape. Its backward pass is traced and fused too. In mode "strict" on NumPy
    arrays it gives the bits that the tape gives for ``f``, and so do second derivatives, with two
    exceptions: sums over the edges of graphs may be in another order, and where an array is used
    more than once, what its gradient gets from within ``f`` is added up before the rest.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> @rx.fuse
    ... def scaled(x, factor):
    ...     return (x - x.mean(axis=-1, keepdims=True)) * factor
    >>> scaled(np.asarray([[1.0, 3.0]]), 2.0)
    array([[-2.,  2.]])
    """
    if f is None:
        return functools.partial(fuse, mode=mode, backend=backend)
    return Fused(f, mode=mode, backend=backend)


class Fused:
    """A function and its programs; see :func:`fuse`.

    Attributes
    ----------
    n_traces : int
        How often the function was traced.
    n_eager : int
        How many calls ran the function as it is.
    reasons : dict of str to int
        Why, and for how many kinds of calls.
    """

    def __init__(self, f: Callable, *, mode: str = "strict", backend: Any = None) -> None:
        if not callable(f):
            raise TypeError(f"f must be callable, got {type(f).__name__}")
        if mode not in ("strict", "fast"):
            raise ValueError(f"mode must be 'strict' or 'fast', got {mode!r}")
        if isinstance(backend, str) and backend != "interpreter":
            raise ValueError(f"backend must be an object or 'interpreter', got {backend!r}")
        functools.update_wrapper(self, f, updated=())
        self._function = f
        self.mode = mode
        self.backend = backend
        self._programs: dict[tuple, list[Any]] = {}
        self._by_value: set[tuple] = set()  # keys of calls whose numbers are part of the program
        self._n_changed: dict[tuple, int] = {}  # how often a call changed what it found
        self._lock = threading.RLock()
        self.n_traces = 0
        self.n_eager = 0
        self.reasons: dict[str, int] = {}

    def __repr__(self) -> str:
        n = sum(map(len, self._programs.values()))
        return f"<{type(self).__name__} {self.name}, {n} program{'s' * (n != 1)}>"

    def __reduce__(self) -> Any:
        """Copy the function, and no programs; one of a module is itself."""
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__
        return functools.partial(type(self), **self._options()), (self._function,)

    def _options(self) -> dict[str, Any]:
        return {"mode": self.mode, "backend": self.backend}

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self, "__name__", type(self._function).__name__)

    def of(self, function: Callable, name: str) -> Fused:
        """Return another function fused in the same way."""
        made = Fused(function, mode=self.mode, backend=self.backend)
        made.__dict__["__name__"] = name
        return made

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    # ------------------------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if thread.trace is not None:  # part of a larger function
                return self._function(*args, **kwargs)
            mode = state.mode & _KEY_MODES
            if kwargs or mode & AUTOCAST:
                return self._call(args, kwargs)
            parts: list[Any] = [mode]
            for x in args:
                kind = type(x)
                if kind is np.ndarray:
                    parts += (x.dtype, x.shape, x.strides)
                elif kind is float or kind is int:
                    parts.append(kind)
                elif kind is Tensor:
                    data = x.data
                    if type(data) is np.ndarray:
                        parts += (x.node is None, data.dtype, data.shape, data.strides)
                    elif type(data) in _OF_GPU or _is_of_gpu(data):
                        on = data.data.device_id
                        parts += (x.node is None, on, data.dtype, data.shape, data.strides)
                    else:
                        return self._call(args, kwargs)
                elif kind in _OF_GPU or _is_of_gpu(x):
                    parts += (x.data.device_id, x.dtype, x.shape, x.strides)
                else:
                    return self._call(args, kwargs)
            key = tuple(parts)
            found = self._programs.get(key)
            if found is not None:
                for program in found:
                    out = program.run(args)
                    if out is not MISS:
                        return self._eager(args, kwargs) if out is EAGER else out
            if key in self._by_value:
                return self._valued(key, args, None, args, kwargs)
            return self._new(key, args, None, args, kwargs)
        except MemoryError as error:
            explain_out_of_memory(error)
            raise

    def _call(self, args: tuple, kwargs: dict) -> Any:
        """Call with arguments of any kind."""
        leaves, structure = flatten((args, kwargs))
        try:
            key = (state.mode & _KEY_MODES, state.low, structure, *map(_kind, leaves))
            found = self._programs.get(key, ())
        except TypeError as error:
            self._refused(f"it cannot tell apart such arguments: {error}")
            return self._eager(args, kwargs)
        out = self._run(found, leaves, args, kwargs)
        if out is not MISS:
            return out
        if key in self._by_value:
            return self._valued(key, leaves, structure, args, kwargs)
        return self._new(key, leaves, structure, args, kwargs)

    def _valued(
        self, key: tuple, leaves: Sequence, structure: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Call with the numbers as part of the key."""
        key = _Valued((*key, *((type(x), repr(x)) for x in leaves if type(x) in SCALARS)))
        out = self._run(self._programs.get(key, ()), leaves, args, kwargs)
        return self._new(key, leaves, structure, args, kwargs) if out is MISS else out

    def _run(self, programs: Sequence, leaves: Sequence, args: tuple, kwargs: dict) -> Any:
        """Run the first program that holds for a call; ``MISS`` if none does."""
        for program in programs:
            out = program.run(leaves)
            if out is not MISS:
                return self._eager(args, kwargs) if out is EAGER else out
        return MISS

    def _eager(self, args: tuple, kwargs: dict) -> Any:
        self.n_eager += 1
        return self._function(*args, **kwargs)

    def _refused(self, reason: str) -> None:
        """Count a kind of calls that run eagerly, and warn of the first."""
        first = not self.reasons
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if first:
            warnings.warn(
                f"{self.name}() is not fused: {reason}; it runs as it is",
                RuntimeWarning,
                stacklevel=levels_outside(),
            )

    # -------------------------------------------------------------------------------- tracing

    def _new(self, key: tuple, leaves: Sequence, structure: Any, args: tuple, kwargs: dict) -> Any:
        """Make a program for a call that there is none for, and run it."""
        if structure is None:
            structure = flatten((args, kwargs))[1]
        with self._lock:
            known = self._programs.setdefault(key, [])
            out = self._run(known, leaves, args, kwargs)  # of another thread
            if out is not MISS:
                return out
            try:
                made = self._traced(key, leaves, structure, len(known))
            except Exception as error:
                out = self._eager(args, kwargs)  # raises what is wrong with the arguments
                if isinstance(error, Changed):  # it may be that it does so but once
                    self._n_changed[key] = self._n_changed.get(key, 0) + 1
                    if self._n_changed[key] <= MOST_CHANGES:
                        return out
                self._refused(_reason(error))
                known.append(_Eager())
                return out
            if made is None:  # by the values of its numbers from now on
                del self._programs[key]
                self._by_value.add(key)
                return self._valued(key, leaves, structure, args, kwargs)
            known.append(made)
            while len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        out = made.run(leaves)
        return self._eager(args, kwargs) if out is EAGER or out is MISS else out

    def _traced(self, key: tuple, leaves: Sequence, structure: Any, n_known: int) -> Any:
        if n_known >= MOST_GUARDED:
            raise Concretization(
                f"it decides by numbers in more than {MOST_GUARDED} ways; pass arrays instead"
            )
        xp = _namespace_of(leaves)
        by_value = isinstance(key, _Valued)
        self.n_traces += 1
        try:
            recording = self._record(leaves, structure, xp, by_value)
        except Exception:
            numbers = any(type(x) in SCALARS for x in leaves)
            if by_value or not numbers:
                raise
            # It may be the numbers that stand for others: look again with them as they are.
            self._record(leaves, structure, xp, True)
            return None
        return self._compiled(recording, leaves, structure)

    def _record(self, leaves: Sequence, structure: Any, xp: Any, plain: bool) -> Recording:
        return Recording(self._function, leaves, structure, xp, plain=plain)

    def _compiled(self, recording: Recording, leaves: Sequence, structure: Any) -> Any:
        """Make what runs a recorded call."""
        if state.mode & RECORDED and any(
            isinstance(x, Tensor) and type(x.node) is Node for x in recording.result
        ):
            from rtxarr.polygraph._grad import Differentiable

            return Differentiable(self, recording, leaves, structure)
        return Compiled(self, recording, leaves)

    # ------------------------------------------------------------------------- ahead of time

    def aot(self, signatures: Sequence[tuple | dict], **options: Any) -> Any:
        """Compile for kinds of arguments, to be saved; see :func:`rtxarr.polygraph.aot`."""
        from rtxarr.polygraph._aot import aot

        return aot(self, signatures, **options)

    # ----------------------------------------------------------------------------- explaining

    def explain(self, *, source: bool = False, html: Any = None) -> Explanation:
        """Return what the programs do: kernels, why results are kept in memory, bytes moved.

        Parameters
        ----------
        source : bool, default False
            With the generated text of each kernel.
        html : path, optional
            Also write a page there, with a picture of each graph and the generated texts.

        Returns
        -------
        Explanation
            A str, which ``to_html(path)`` writes as a page; ``programs`` has it in parts. The
            times in it are of a copy of as many bytes, by the rate of a copy on this device.
        """
        from rtxarr.polygraph import _explain

        return _explain.explain(self, source=source, html=html)

    def profile(self, *args: Any, rounds: int = 20, html: Any = None, **kwargs: Any) -> Profile:
        """Measure each step of the program for these arguments.

        Parameters
        ----------
        *args, **kwargs
            Of the function. It is called ``rounds + 4`` times: what it changes in place it changes
            as often.
        rounds : int, default 20
        html : path, optional
            Also write a page there, with a picture of the graph.

        Returns
        -------
        Profile
            A str: median and quartiles of each step's time, its share of the whole, bytes a
            second. ``seconds`` has the times, ``to_html(path)`` writes a page. Of a function whose
            gradient is recorded, the forward pass.

        Raises
        ------
        ValueError
            If the function is not fused for these arguments.
        """
        from rtxarr.polygraph import _explain

        return _explain.profile(self, args, kwargs, rounds=rounds, html=html)

    def clear(self) -> None:
        """Forget all programs."""
        with self._lock:
            self._programs.clear()
            self._by_value.clear()
            self._n_changed.clear()
            self.reasons.clear()


class _Valued(tuple):
    """A key that the values of the numbers are part of."""

    __slots__ = ()


def _reason(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, Concretization) else f"{type(error).__name__}: {text}"


def _kind(x: Any) -> Any:
    """Return what of an argument is part of the key."""
    kind = type(x)
    if kind in SCALARS:
        return kind
    if kind is np.ndarray:
        return x.dtype, x.shape, x.strides
    if isinstance(x, Tensor):
        data = x.data
        strides = None if isinstance(data, np.generic) else data.strides
        return Tensor, x.node is not None, type(data), data.dtype, data.shape, strides
    if _device.is_array(x):
        if isinstance(x, np.generic):
            return np.generic, x.dtype
        if _is_of_gpu(x):
            return x.device.id, x.dtype, x.shape, x.strides
        raise TypeError(f"arrays must be NumPy's or CuPy's, got {kind.__name__}")
    return _static(x)


def _is_of_gpu(x: Any) -> bool:
    """Tell whether this is an array of CuPy's, and keep its type."""
    if not _device.is_device_array(x):
        return False
    _OF_GPU.add(type(x))
    return True


def _static(x: Any) -> Any:
    """Return a key that tells objects apart where a function may: 1, 1.0 and True are three."""
    kind = type(x)
    if kind in SCALARS or isinstance(x, np.generic):
        return kind, repr(x)
    if kind is frozenset or kind is tuple:
        return kind, kind(map(_static, x))
    if kind is slice:
        return kind, _static(x.start), _static(x.stop), _static(x.step)
    if dataclasses.is_dataclass(x) and kind.__dataclass_params__.frozen:
        return kind, *[_static(getattr(x, field.name)) for field in dataclasses.fields(x)]
    hash(x)
    if (
        kind in (str, bytes, bool)
        or kind.__eq__ is object.__eq__
        or isinstance(x, (type, np.dtype))
    ):
        return kind, x
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return kind, x, repr(x)
    return kind, _Same(x)


class _Same:
    """A key that is equal to that of the same object alone."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x


def _namespace_of(leaves: Sequence) -> Any:
    """Return the namespace of the arrays among the arguments, or of the current device."""
    arrays = [x.data if isinstance(x, Tensor) else x for x in leaves]
    arrays = [x for x in arrays if _device.is_array(x)]
    return _device.namespace(*arrays)


class _Eager:
    """Stands for a kind of calls that run the function as it is."""

    def run(self, leaves: Any) -> Any:
        return EAGER


class Compiled:
    """A program for one kind of arguments, with what must hold for it.

    Attributes
    ----------
    graph : Graph
    program : Program or Interpreted
        Takes the arrays and numbers of the graph's inputs; gives its outputs.
    run : callable
        Takes the leaves of the arguments; gives the result, ``MISS`` or ``EAGER``.
    """

    def __init__(self, fused: Fused, recording: Recording, leaves: Sequence) -> None:
        nodes, outputs = recording.outputs(recording.result)
        updates = recording.updates()
        self.graph, trace = recording.graph(nodes, updates), recording.trace
        self.program = program_for(fused, trace, self.graph, input_strides(trace))
        text, names = call_text(recording, leaves, updates)
        tensors = tensors_of(trace, leaves, range(len(trace.sources)))
        self.text = text + result_text(outputs, recording.structure, names, trace.xp, tensors)
        names["program"] = self.program.run
        exec(compile(self.text, "<fused call>", "exec"), names)
        self.run: Callable = names["run"]
