"""What a function finds outside of its arguments: numbers to guard, arrays to read anew.

A program made of a function is right for as long as the global names, closures, attributes and
modules that the function reads hold what they held. :class:`Surroundings` notes them, and gives a
copy of the function in which arrays are tracers.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from rtxarr._device import is_array
from rtxarr.autograd import Tensor
from rtxarr.polygraph._trace import Concretization, Trace
from rtxarr.polygraph._watch import Snapshot

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype, type(Ellipsis))
_LIBRARIES = frozenset(
    (
        "rtxarr",
        "numpy",
        "cupy",
        "cupyx",
        "array_api_compat",
        "scipy",
        "numba",
        "ml_dtypes",
        "pytest",
    )
) | frozenset(sys.stdlib_module_names)
_MISSING = object()
_DEPTH = 6  # how far to follow attributes of attributes


def _of_library(name: str | None) -> bool:
    name = name or ""
    return name.partition(".")[0] in _LIBRARIES and not name.startswith("rtxarr.recipes.")


def _is_plain(x: Any) -> bool:
    if isinstance(x, (tuple, frozenset)):
        return all(_is_plain(part) for part in x)
    return isinstance(x, _PLAIN)


class Surroundings:
    """The outside of one function, for one trace.

    Parameters
    ----------
    function : callable
    trace : Trace
    lift : callable
        Gives the tensor of tracers for a Tensor.

    Attributes
    ----------
    function : callable
        The same with tracers for arrays, to be called in the trace.
    """

    def __init__(self, function: Any, trace: Trace, lift: Any) -> None:
        self._trace = trace
        self._lift = lift
        self._entries: list[tuple[Any, Any, Any]] = []  # a dict, its key, what it held
        self._cells: list[tuple[Any, Any]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self.checks: list[Any] = []  # functions that tell the same, each of something else
        self._modules: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._names: dict[str, None] = {}  # that functions use
        self._rebuilt: dict[int, Any] = {}
        self.generators: list[Any] = []
        self.objects: list[Any] = []  # with attributes, modules among them
        self.function = self._function(function)
        self._module_state = [(m, _state_of(m)) for m in self._modules.values()]
        self._moment = _changes()

    # ------------------------------------------------------------------------------ checking

    @property
    def has_any(self) -> bool:
        """Whether there is anything to check."""
        kinds = self._entries, self._cells, self._lists, self._module_state, self.checks
        return any(map(bool, kinds))

    def hold(self) -> bool:
        """Tell whether everything that was noted is as it was."""
        for holder, key, value in self._entries:
            if holder.get(key, _MISSING) is not value and not _same(
                holder.get(key, _MISSING), value
            ):
                return False
        for cell, value in self._cells:
            if cell.cell_contents is not value and not _same(cell.cell_contents, value):
                return False
        for kept, parts in self._lists:
            if len(kept) != len(parts) or not all(map(_same, kept, parts)):
                return False
        if not all(check() for check in self.checks):
            return False
        if self._module_state and self._moment != _changes():
            for module, before in self._module_state:
                if not _same_state(_state_of(module), before):
                    return False
            self._moment = _changes()
        return True

    def snapshot(self) -> Snapshot:
        """Return what is in the objects, dicts and lists that were found."""
        dicts = [vars(x) for x in self.objects]
        dicts += [kept for kept, _ in self._lists if isinstance(kept, dict)]
        return Snapshot(dicts, [kept for kept, _ in self._lists if isinstance(kept, list)])

    def add(self, x: Any) -> None:
        """Note an argument that is no array: a module, or an object with attributes."""
        self._object(x, tuple(self._names), 0)

    # ------------------------------------------------------------------------------- noting

    def _function(self, f: Any) -> Any:
        """Note what a function reads; return it with arrays replaced, or itself if it has none."""
        if isinstance(f, functools.partial):
            inner = self._function(f.func)
            args = [self._value(a, (), 0) for a in f.args]
            keywords = {k: self._value(v, (), 0) for k, v in f.keywords.items()}
            return functools.partial(inner, *args, **keywords)
        if isinstance(f, types.MethodType):
            code = getattr(f.__func__, "__code__", None)
            self._object(f.__self__, () if code is None else _names(code), 0)
            inner = self._function(f.__func__)
            return f if inner is f.__func__ else types.MethodType(inner, f.__self__)
        if not isinstance(f, types.FunctionType):
            names: tuple = ()
            call = type(f).__call__
            if isinstance(call, types.FunctionType):
                names = _names(call.__code__)
                if not _of_library(call.__module__):
                    self._function(call)
            self._object(f, names, 0)
            return f
        if id(f) in self._rebuilt:
            return self._rebuilt[id(f)]
        self._rebuilt[id(f)] = f
        code = f.__code__
        _refuse_writes(code)
        names = _names(code)
        self._names.update(dict.fromkeys(names))
        changed_globals = {}
        for name in _globals_of(code):
            if name not in f.__globals__:
                continue
            value = f.__globals__[name]
            new = self._noted(f.__globals__, name, value, names)
            if new is not value:
                changed_globals[name] = new
        cells = []
        for cell in f.__closure__ or ():
            cells.append(self._cell(cell, names))
        defaults = tuple(self._value(d, names, 0) for d in f.__defaults__ or ())
        same_cells = all(a is b for a, b in zip(cells, f.__closure__ or (), strict=True))
        same_defaults = all(a is b for a, b in zip(defaults, f.__defaults__ or (), strict=True))
        if not changed_globals and same_cells and same_defaults:
            return f
        new_globals = {**f.__globals__, **changed_globals} if changed_globals else f.__globals__
        new = types.FunctionType(
            code, new_globals, f.__name__, defaults or None, tuple(cells) or None
        )
        new.__kwdefaults__ = f.__kwdefaults__
        new.__dict__.update(f.__dict__)
        self._rebuilt[id(f)] = new
        return new

    def _noted(self, holder: Any, key: Any, value: Any, names: tuple) -> Any:
        """Note one value of a dict; return what the function is to see instead."""
        if isinstance(value, types.ModuleType):
            if not _of_library(value.__name__):
                self._attributes(vars(value), names, 0)
            return value
        if isinstance(value, (type, types.BuiltinFunctionType, np.ufunc)):
            return value
        self._entries.append((holder, key, value))
        return self._value(value, names, 0)

    def _cell(self, cell: Any, names: tuple) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # a name that is not bound yet
            return cell
        if isinstance(value, (type, types.ModuleType)):
            return cell
        self._cells.append((cell, value))
        new = self._value(value, names, 0)
        return cell if new is value else types.CellType(new)

    def _value(self, value: Any, names: tuple, depth: int) -> Any:
        """Look into a value; return it with tracers for its arrays."""
        if _is_plain(value):
            return value
        if isinstance(value, Tensor):
            return self._lift(value)
        if is_array(value):
            self._trace.found.add(id(value))
            return self._trace.capture(value)
        if isinstance(value, (list, tuple, dict)):
            return self._container(value, names, depth)
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            name = getattr(value, "__module__", None)
            wrapped = getattr(value, "__wrapped__", None)
            if _of_library(name) and wrapped is None:
                return value
            return self._function(value)
        self._object(value, names, depth)
        return value

    def _container(self, value: Any, names: tuple, depth: int) -> Any:
        if depth > _DEPTH:
            return value
        keys = list(value) if isinstance(value, dict) else range(len(value))
        new = {k: self._value(value[k], names, depth + 1) for k in keys}
        if isinstance(value, dict):
            for k in keys:
                self._entries.append((value, k, value[k]))
            self._lists.append((value, tuple(value)))
            return value if all(new[k] is value[k] for k in keys) else new
        if isinstance(value, list):
            self._lists.append((value, tuple(value)))
        if all(new[k] is value[k] for k in keys):
            return value
        parts = [new[k] for k in keys]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _object(self, x: Any, names: tuple, depth: int) -> None:
        """Note the attributes of an object that the function may read."""
        if id(x) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(x))
        if _is_module(x):
            self._module(x)
            return
        if isinstance(x, np.random.Generator):
            self.generators.append(x)
            return
        if _of_library(type(x).__module__):
            return
        held = getattr(x, "__dict__", None)
        if isinstance(held, dict):
            self.objects.append(x)
            more = tuple(dict.fromkeys((*names, *_names_of_methods(x, names))))
            self._attributes(held, more, depth + 1)

    def _attributes(self, held: dict, names: tuple, depth: int) -> None:
        for name in names:
            value = held.get(name, _MISSING)
            if value is _MISSING or isinstance(value, (type, types.ModuleType)):
                continue
            self._entries.append((held, name, value))
            if is_array(value):
                self._trace.found.add(id(value))
            elif isinstance(value, (types.FunctionType, types.MethodType)):
                if not _of_library(value.__module__):
                    self._function(value)
            elif isinstance(value, (list, tuple, dict)):
                self._container_of_object(value, names, depth)
            elif not _is_plain(value) and not isinstance(value, Tensor):
                self._object(value, names, depth)

    def _container_of_object(self, value: Any, names: tuple, depth: int) -> None:
        """Note what an attribute's container holds, arrays by identity."""
        if depth > _DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        parts = tuple(value.items()) if isinstance(value, dict) else tuple(value)
        if isinstance(value, list):
            self._lists.append((value, parts))
        elif isinstance(value, dict):
            self._lists.append((value, tuple(value)))
            self._entries += [(value, k, v) for k, v in parts]
            parts = tuple(value.values())
        for part in parts:
            if isinstance(part, (list, tuple, dict)):
                self._container_of_object(part, names, depth + 1)
            elif is_array(part):
                self._trace.found.add(id(part))
            elif not _is_plain(part) and not isinstance(part, Tensor):
                self._object(part, names, depth + 1)

    def _module(self, x: Any) -> None:
        for module in x.modules():
            self._seen.add(id(module))
            self._modules.setdefault(id(module), module)
            self.objects.append(module)
            self._trace.found.update(id(v) for v in vars(module).values() if is_array(v))


def _refuse_writes(code: types.CodeType) -> None:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Concretization(f"{code.co_name}() sets the global name {instruction.argval}")
        if instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars:
            raise Concretization(f"{code.co_name}() sets {instruction.argval} outside of it")
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            _refuse_globals(part)


def _refuse_globals(code: types.CodeType) -> None:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Concretization(f"{code.co_name}() sets the global name {instruction.argval}")


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple:
    """Return all names of globals and attributes in a function and those inside it."""
    found = dict.fromkeys(code.co_names)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found.update(dict.fromkeys(_names(part)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple:
    """Return the names that a function, or one inside it, looks up as globals."""
    found: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[instruction.argval] = None
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found.update(dict.fromkeys(_globals_of(part)))
    return tuple(found)


def _names_of_methods(x: Any, names: tuple) -> Iterator[str]:
    """Give the names that the methods of ``x`` among ``names`` use themselves."""
    todo, seen = list(names), set(names)
    while todo:
        method = getattr(type(x), todo.pop(), None)
        if isinstance(method, property):
            method = method.fget
        if isinstance(method, types.FunctionType) and not _of_library(method.__module__):
            for name in _names(method.__code__):
                yield name
                if name not in seen:
                    seen.add(name)
                    todo.append(name)


def _is_module(x: Any) -> bool:
    kind = type(x)
    return isinstance(getattr(kind, "training", None), bool) and hasattr(kind, "modules")


def _changes() -> int:
    nn = sys.modules.get("rtxarr.nn._module")
    return nn.changes[0] if nn is not None else 0


def _state_of(module: Any) -> dict[str, Any]:
    """Return the attributes of a module, with the parts of its lists, to compare with later."""
    held = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(module).items()}
    return {"training": module.training, **held}


def _same_state(now: dict, before: dict) -> bool:
    return now.keys() == before.keys() and all(_same(now[k], before[k]) for k in before)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, frozenset)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (float, complex, np.generic)):
        return a == b and repr(a) == repr(b)
    return isinstance(a, _PLAIN) and a == b
