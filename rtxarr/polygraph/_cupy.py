"""CuPy's functions on tracers: those that ask their arguments for nothing answer here.

CuPy's ufuncs and kernels hand over to an argument that takes over, its other functions do not.
While a function of CuPy arrays is traced these are replaced in CuPy's modules, for the thread that
traces; other threads, and calls without tracers, reach CuPy's own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rtxarr._override import tracing
from rtxarr.polygraph import _namespace, _protocols
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import Tracer

_lock = threading.Lock()
_n_traces = 0
_MAKERS = "zeros ones empty full".split()
_ARRAYS = "array asarray ascontiguousarray".split()


@contextmanager
def answering() -> Iterator[None]:
    """Let CuPy's functions take tracers, for a ``with`` block."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _n_traces
    with _lock:
        before, _n_traces = _n_traces, _n_traces + change
        if not before or not _n_traces:
            for module, name, own, answer in _functions():
                setattr(module, name, answer if _n_traces else own)


@functools.cache
def _functions() -> list[tuple[Any, str, Callable, Callable]]:
    """Return modules of CuPy's, names in them, what they have there, and what answers."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return []
    handlers = _protocols._handlers()
    found = []
    for ours, theirs in ((np, cupy), (np.fft, cupy.fft), (np.linalg, cupy.linalg)):
        for name in dir(theirs):
            function = getattr(ours, name, None)
            if getattr(function, "__hash__", None) and function in handlers:
                found.append((theirs, name, handlers[function]))
    found += [
        (cupy, "matmul", _namespace.matmul),
        (cupy, "zeros", _full_of(0)),
        (cupy, "ones", _full_of(1)),
        (cupy, "empty", _full_of(0)),
        (cupy, "full", _full),
        *((cupy, name, _as_array) for name in _ARRAYS),
    ]
    return [
        (module, name, own, _answering(own, handler, name in _MAKERS))
        for module, name, handler in found
        if callable(own := getattr(module, name, None))
    ]


def _full(shape: Any, fill_value: Any, dtype: Any = None, order: Any = "C") -> Any:
    return _namespace.full(shape, fill_value, dtype=dtype)


def _full_of(value: float) -> Callable:
    return lambda shape, dtype=float, order="C": _full(shape, value, dtype)


def _as_array(x: Any, dtype: Any = None, copy: Any = None, **options: Any) -> Any:
    return _namespace.asarray(x, dtype=dtype, copy=copy)


def _answering(own: Callable, handler: Callable, always: bool) -> Callable:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = tracing()
        if trace is None or trace.on_numpy:
            return own(*args, **kwargs)
        if always and _is_users(sys._getframe(1)):
            return handler(*args, **kwargs)
        if any(map(_is_traced, (*args, *kwargs.values()))):
            return handler(*args, **kwargs)
        return own(*args, **kwargs)

    return call


def _is_users(frame: Any) -> bool:
    """Tell whether a call is not one of the libraries' own."""
    root = frame.f_globals.get("__name__", "").partition(".")[0]
    return root not in ("cupy", "cupyx", "array_api_compat", "rtxarr")


def _is_traced(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any(map(_is_traced, x))
    return isinstance(x, (Tracer, Scalar))
