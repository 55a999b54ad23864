"""Objects that a traced function finds: their arrays are tracers, their changes are taken back.

While a function is traced, its thread finds tracers in the attributes that hold arrays; other
threads find the arrays. What the call changes in the objects, lists and dicts that it finds would
not change when its program runs, so it is put back, and the function runs as it is.
"""

from __future__ import annotations

import argparse
import collections
import functools
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rtxarr._device import is_device_array
from rtxarr._override import tracing
from rtxarr.polygraph._trace import Changed, Tracer

NAMESPACES = types.SimpleNamespace, argparse.Namespace
CONTAINERS = list, tuple, dict, types.MappingProxyType, *NAMESPACES
_MISSING = object()
_OF_PROGRAM = 1 << 9  # a flag of types that are made by class statements
_lock = threading.Lock()
_watched: dict[int, list[Any]] = {}  # by id: how many traces watch an object, and its class


class Slots:
    """What is in the slots of an object, as a dict of it."""

    def __init__(self, x: Any, names: tuple[str, ...]) -> None:
        self._x = x
        self._names = names

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute; ``default`` if there is none."""
        held = getattr(self._x, "__dict__", {})
        return held[name] if name in held else _in_slot(self._x, name, default)

    def keys(self) -> list[str]:
        """Return the names of attributes that are there."""
        found = [n for n in self._names if _in_slot(self._x, n, _MISSING) is not _MISSING]
        return [*found, *getattr(self._x, "__dict__", ())]

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __contains__(self, name: str) -> bool:
        return self.get(name, _MISSING) is not _MISSING

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


def _in_slot(x: Any, name: str, default: Any) -> Any:
    kind: Any = type(x)
    slot = _slots(kind).get(name)
    if slot is None:
        return default
    try:
        return slot.__get__(x)
    except AttributeError:
        return default


@functools.lru_cache(maxsize=256)
def _slots(kind: Any) -> dict[str, Any]:
    """Return the slots that the classes of an object describe."""
    found = {}
    for one in reversed(kind.__mro__):
        if not one.__flags__ & _OF_PROGRAM:
            continue
        for name, value in vars(one).items():
            if isinstance(value, types.MemberDescriptorType):
                found[name] = value
    return found


def held_by(x: Any) -> Any:
    """Return the attributes of an object, class or module themselves, as a dict of it."""
    if isinstance(x, (type, types.ModuleType)):
        return vars(x)
    kind: Any = type(x)
    names = tuple(_slots(kind))
    if names or not hasattr(x, "__dict__") or isinstance(x, threading.local):
        return Slots(x, names)
    return vars(x)


@contextmanager
def watching(objects: Iterable[Any]) -> Iterator[None]:
    """Let arrays in attributes be tracers to the thread that traces, for a ``with`` block."""
    begun = []
    try:
        for x in objects:
            if not isinstance(x, type) and _begin(x):
                begun.append(x)
        yield
    finally:
        for x in begun:
            _end(x)


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_device_array(x)


def _is_held(x: Any, depth: int = 0) -> bool:
    """Tell whether a value is an array or a container with arrays."""
    if isinstance(x, NAMESPACES):
        x = vars(x)
    if isinstance(x, CONTAINERS):
        parts = x if isinstance(x, (list, tuple)) else x.values()
        return depth < 8 and any(_is_held(part, depth + 1) for part in parts)
    return _is_array(x)


def _names(x: Any) -> frozenset[str]:
    """Return the names of the attributes that hold arrays, those of its class among them."""
    held = held_by(x)
    found = {name for name in held if _is_held(held[name])}
    if not isinstance(x, types.ModuleType):
        for kind in type(x).__mro__:
            found.update(name for name, value in vars(kind).items() if _is_held(value))
    return frozenset(n for n in found if not (n.startswith("__") and n.endswith("__")))


def _begin(x: Any) -> bool:
    with _lock:
        known = _watched.get(id(x))
        if known is not None:
            known[0] += 1
            return True
        kind = type(x)
        names = _names(x)
        if not names:
            return False
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
    inside: dict[str, Any] = {name: _property(kind, name) for name in names}
    inside |= {"__slots__": (), "__doc__": kind.__doc__, "__module__": kind.__module__}
    inside["__qualname__"] = kind.__qualname__
    return type.__new__(type(kind), kind.__name__, (kind,), inside)


def _property(kind: type, name: str) -> property:
    slot = _slots(kind).get(name)

    def get(self):
        if slot is not None:
            value = slot.__get__(self)
        elif name in vars(self):
            value = vars(self)[name]
        elif not hasattr(kind, name):
            raise AttributeError(name)
        else:
            value = getattr(kind, name)
        trace = tracing()
        if trace is None or isinstance(value, Tracer) or not _is_held(value):
            return value
        if not _is_array(value):
            return trace.stand_in(value)
        trace.found.add(id(value))
        return trace.capture(value)

    def put(self, value):
        if slot is not None:
            slot.__set__(self, value)
        else:
            vars(self)[name] = value

    def delete(self):
        if slot is not None:
            slot.__delete__(self)
        else:
            del vars(self)[name]

    return property(get, put, delete)


class Snapshot:
    """What is in the attributes of objects, and in dicts, lists and sets, that a function finds.

    Parameters
    ----------
    objects : iterable
    containers : iterable of dict, list, set or deque
    """

    def __init__(self, objects: Iterable[Any], containers: Iterable[Any]) -> None:
        self._objects = [(x, _copy_of(held_by(x))) for x in objects]
        self._dicts = []
        self._lists = []
        for x in containers:
            if isinstance(x, dict):
                self._dicts.append((x, dict(x)))
            elif isinstance(x, (list, set, collections.deque)):
                self._lists.append((x, list(x)))

    def take_back(self) -> None:
        """Undo changes since.

        Raises
        ------
        Changed
            If there were any.
        """
        found = ""
        for x, before in self._objects:
            held = held_by(x)
            if len(held) == len(before) and all(held.get(k) is v for k, v in before.items()):
                continue
            for k in {*held, *before}:
                if held.get(k, _MISSING) is not before.get(k, _MISSING):
                    found = f"it sets {k!r}, which it finds outside of it"
                    _put_back(x, held, k, before.get(k, _MISSING))
        for held, before in self._dicts:
            changed = [k for k in {*held, *before} if _differ(held, before, k)]
            if changed or list(held) != list(before):
                found = f"it sets {(*changed, '?')[0]!r}, which it finds outside of it"
                dict.clear(held)
                dict.update(held, before)
        for kept, parts in self._lists:
            if len(kept) != len(parts) or any(a is not b for a, b in zip(kept, parts, strict=True)):
                found = f"it changes a {type(kept).__name__} that it finds outside of it"
                kept.clear()
                (kept.update if isinstance(kept, set) else kept.extend)(parts)
        if found:
            raise Changed(found)


def _copy_of(held: Any) -> dict:
    return {name: held[name] for name in held}


def _put_back(x: Any, held: Any, name: str, value: Any) -> None:
    if isinstance(held, dict):
        if value is _MISSING:
            del held[name]
        else:
            held[name] = value
    elif value is _MISSING:
        delattr(x, name)
    else:
        setattr(x, name, value)


def _differ(held: dict, before: dict, key: Any) -> bool:
    return dict.get(held, key, _MISSING) is not before.get(key, _MISSING)
