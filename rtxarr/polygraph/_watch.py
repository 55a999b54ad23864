"""Objects that a traced function finds: their arrays are tracers, their changes are taken back.

While a function is traced, its thread finds tracers in the attributes that hold arrays; other
threads find the arrays. What the call changes in the objects, lists and dicts that it finds would
not change when its program runs, so it is put back, and the function runs as it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rtxarr._device import is_device_array
from rtxarr._override import tracing
from rtxarr.polygraph._trace import Concretization, Tracer

_MISSING = object()
_lock = threading.Lock()
_watched: dict[int, list[Any]] = {}  # by id: how many traces watch an object, and its class


class Changed(Concretization):
    """Raised where a traced function changes what it finds."""


@contextmanager
def watching(objects: Iterable[Any]) -> Iterator[None]:
    """Let arrays in attributes be tracers to the thread that traces, for a ``with`` block."""
    kept = [x for x in objects if any(map(_is_held_array, vars(x).values()))]
    begun = []
    try:
        for x in kept:
            if _begin(x):
                begun.append(x)
        yield
    finally:
        for x in begun:
            _end(x)


def _is_held_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_device_array(x)


def _begin(x: Any) -> bool:
    with _lock:
        known = _watched.get(id(x))
        if known is not None:
            known[0] += 1
            return True
        kind = type(x)
        names = frozenset(name for name, value in vars(x).items() if _is_held_array(value))
        try:
            x.__class__ = _class_of(kind, names)  # type: ignore[arg-type]
        except TypeError:  # of a layout of its own
            return False
        _watched[id(x)] = [1, kind]
        return True


def _end(x: Any) -> None:
    with _lock:
        known = _watched[id(x)]
        known[0] -= 1
        if not known[0]:
            x.__class__ = known[1]
            del _watched[id(x)]


@functools.lru_cache(maxsize=256)
def _class_of(kind: type, names: frozenset[str]) -> type:
    """Return a subclass with properties in place of attributes that hold arrays."""
    inside: dict[str, Any] = {name: _property(name) for name in names}
    inside |= {"__slots__": (), "__doc__": kind.__doc__, "__module__": kind.__module__}
    inside["__qualname__"] = kind.__qualname__
    return type.__new__(type(kind), kind.__name__, (kind,), inside)


def _property(name: str) -> property:
    def get(self):
        try:
            value = vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None
        trace = tracing()
        if trace is None or isinstance(value, Tracer) or not _is_held_array(value):
            return value
        trace.found.add(id(value))
        return trace.capture(value)

    def put(self, value):
        vars(self)[name] = value

    def delete(self):
        del vars(self)[name]

    return property(get, put, delete)


class Snapshot:
    """What is in the dicts and lists that a function finds.

    Parameters
    ----------
    dicts : iterable of dict
    lists : iterable of list
    """

    def __init__(self, dicts: Iterable[dict], lists: Iterable[list]) -> None:
        self._dicts = {id(x): (x, dict(x)) for x in dicts}
        self._lists = {id(x): (x, list(x)) for x in lists}

    def take_back(self) -> None:
        """Undo changes since.

        Raises
        ------
        Changed
            If there were any.
        """
        found = ""
        for held, before in self._dicts.values():
            changed = [k for k in {*held, *before} if _differ(held, before, k)]
            if changed:
                found = f"it sets {changed[0]!r}, which it finds outside of it"
            for k in changed:
                if k in before:
                    held[k] = before[k]
                else:
                    del held[k]
        for kept, parts in self._lists.values():
            if len(kept) != len(parts) or any(a is not b for a, b in zip(kept, parts, strict=True)):
                found = "it changes a list that it finds outside of it"
                kept[:] = parts
        if found:
            raise Changed(found)


def _differ(held: dict, before: dict, key: Any) -> bool:
    return held.get(key, _MISSING) is not before.get(key, _MISSING)
