"""What a function finds outside of its arguments: numbers to guard, arrays to read anew.

A program made of a function is right for as long as the global names, closures, attributes and
modules that the function reads hold what they held. :class:`Surroundings` notes them, and gives a
copy of the function in which arrays are tracers.
"""

from __future__ import annotations

import collections.abc
import contextvars
import copy
import dis
import functools
import operator
import os
import random
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from rtxarr._device import is_array, is_device_array
from rtxarr.autograd import Tensor
from rtxarr.autograd._op import checksum
from rtxarr.polygraph._trace import Concretization, Trace
from rtxarr.polygraph._watch import CONTAINERS, NAMESPACES, Snapshot, held_by

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype, type(Ellipsis))
_LIBRARIES = frozenset(
    """
    array_api_compat cuda cudnn cupy cupyx jax matplotlib ml_dtypes networkx numba numpy
    nvmath pandas PIL pytest rtxarr scipy sklearn torch tqdm
    """.split()
) | frozenset(sys.stdlib_module_names)
_MISSING = object()
_MOST_OBJECTS = 10_000
_MOST_BYTES = 1 << 20  # of an array that is compared with what it was at each call

_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools._lru_cache_wrapper,
)
_BY_TEXT = frozenset("getattr hasattr attrgetter methodcaller __getattribute__".split())
_DYNAMIC = frozenset("getattr attrgetter vars __dict__ __getattribute__ __getattr__".split())
_MODULES = frozenset("modules import_module __import__".split())
_ENVIRONMENT = frozenset("environ getenv environb getenvb".split())
_SPECIAL = frozenset(
    f"__{name}__"
    for name in """
        add sub mul truediv floordiv mod pow matmul and or xor lshift rshift radd rsub rmul rtruediv
        rfloordiv rmod rpow rmatmul rand ror rxor iadd isub imul itruediv imatmul neg pos abs invert
        eq ne lt le gt ge getitem len iter contains call bool float int index complex enter exit
        getattr getattribute array array_ufunc array_function hash str repr get set delete
    """.split()
)


def _of_library(name: str | None) -> bool:
    name = name or ""
    return name.partition(".")[0] in _LIBRARIES and not name.startswith("rtxarr.recipes.")


def _of_standard_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _is_of_library(kind: type) -> bool:
    return _of_library(kind.__module__)


def is_plain(x: Any) -> bool:
    """Tell whether a value says all by itself and never changes."""
    if isinstance(x, (tuple, frozenset)):
        return all(is_plain(part) for part in x)
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
    objects : list
        What was found that has attributes: objects, classes and modules.
    """

    def __init__(self, function: Any, trace: Trace, lift: Any) -> None:
        self._trace = trace
        self._lift = lift
        self._entries: list[tuple[Any, Any, Any]] = []  # a dict, its key, what it held
        self._cells: list[tuple[Any, Any]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self._sizes: list[tuple[Any, int]] = []  # of dicts of attributes
        self.checks: list[Any] = []  # functions that tell the same, each of something else
        self._modules: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._names: dict[str, None] = {}  # that functions use
        self._is_dynamic = False  # whether names of attributes are computed
        self._noted: dict[int, set[str]] = {}
        self._rebuilt: dict[int, Any] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}  # containers with tracers for arrays
        self._stateful: list[tuple[Any, Any]] = [(x, _state(x)) for x in (None, random._inst)]  # type: ignore[attr-defined]
        self.objects: list[Any] = []
        trace.stand_in = self._container
        self.function = self._function(function)
        self._settle()
        self._module_state = [(m, _state_of(m)) for m in self._modules.values()]
        self._moment = _changes()

    # ------------------------------------------------------------------------------ checking

    @property
    def has_any(self) -> bool:
        """Whether there is anything to check."""
        kinds = (
            self._entries,
            self._cells,
            self._lists,
            self._sizes,
            self._module_state,
            self.checks,
        )
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
        for held, n in self._sizes:
            if len(held) != n:
                return False
        if not all(check() for check in self.checks):
            return False
        if self._module_state and self._moment != _changes():
            for module, before in self._module_state:
                if not _same_state(_state_of(module), before):
                    return False
            self._moment = _changes()
        return True

    def found(self) -> list[Any]:
        """Return the objects, and what the dicts and cells held that were noted."""
        entries = [value for _, _, value in self._entries]
        return [*self.objects, *entries, *(value for _, value in self._cells)]

    def snapshot(self, *trees: Any) -> Snapshot:
        """Return what is in the objects, dicts and lists that were found, and in ``trees``."""
        dicts = [kept for kept, _ in self._lists if type(kept) is not types.MappingProxyType]
        found = [*dicts, *(copy for _, copy in self._copies.values())]
        for tree in trees:
            _containers(tree, found, set())
        return Snapshot(self.objects, found)

    def set_back(self) -> bool:
        """Let generators of NumPy and Python stand where they stood; tell whether they moved."""
        moved = [(x, before) for x, before in self._stateful if repr(_state(x)) != repr(before)]
        for x, before in moved:
            _set_state(x, before)
        return bool(moved)

    def add(self, x: Any) -> None:
        """Note an argument that is no array: a module, or an object with attributes."""
        self._follow(x)
        self._settle()

    # ------------------------------------------------------------------------------- noting

    def _function(self, f: Any) -> Any:
        """Note what a function reads; return it with arrays replaced, or itself if it has none."""
        if isinstance(f, functools.partial):
            inner = self._function(f.func)
            args = [self._value(a) for a in f.args]
            keywords = self._container(f.keywords)
            return functools.partial(inner, *args, **keywords)
        if isinstance(f, types.MethodType):
            self._follow(f.__self__)
            inner = self._function(f.__func__)
            return f if inner is f.__func__ else types.MethodType(inner, f.__self__)
        if not isinstance(f, types.FunctionType):
            call = type(f).__call__
            if isinstance(call, types.FunctionType) and not _of_library(call.__module__):
                self._function(call)
            self._follow(f)
            return f
        if id(f) in self._rebuilt:
            return self._rebuilt[id(f)]
        self._rebuilt[id(f)] = f
        self.objects.append(f)
        code = f.__code__
        _refuse_writes(code)
        self._use(code, f.__globals__)
        changed_globals = {}
        for name in _globals_of(code):
            value = f.__globals__.get(name, _MISSING)
            self._entries.append((f.__globals__, name, value))
            if value is not _MISSING:
                new = self._value(value)
                if new is not value:
                    changed_globals[name] = new
        cells = [self._cell(cell) for cell in f.__closure__ or ()]
        defaults = tuple(self._value(d) for d in f.__defaults__ or ())
        keywords = {k: self._value(v) for k, v in (f.__kwdefaults__ or {}).items()}
        if (
            not changed_globals
            and all(a is b for a, b in zip(cells, f.__closure__ or (), strict=True))
            and all(a is b for a, b in zip(defaults, f.__defaults__ or (), strict=True))
            and all(v is (f.__kwdefaults__ or {})[k] for k, v in keywords.items())
        ):
            return f
        new_globals = {**f.__globals__, **changed_globals} if changed_globals else f.__globals__
        new = types.FunctionType(
            code, new_globals, f.__name__, defaults or None, tuple(cells) or None
        )
        new.__kwdefaults__ = keywords or None
        new.__dict__.update(f.__dict__)
        self._rebuilt[id(f)] = new
        return new

    def _use(self, code: types.CodeType, around: dict) -> None:
        """Note the names that a function uses; ``around`` are its globals."""
        names = _names(code)
        self._names.update(dict.fromkeys(names))
        self._is_dynamic |= not _DYNAMIC.isdisjoint(names)
        if not _BY_TEXT.isdisjoint(names):
            self._names.update(dict.fromkeys(_texts(code)))
        if "globals" in names:
            for name in _texts(code):
                self._entries.append((around, name, around.get(name, _MISSING)))
                self._follow(around.get(name))
        imported = _imported(code)
        if not _MODULES.isdisjoint(names):
            imported = (*imported, *_texts(code), str(around.get("__name__")))
        for name in imported:
            for full in (name, f"{around.get('__package__')}.{name}"):
                if not _of_library(full):
                    self._entries.append((sys.modules, full, sys.modules.get(full, _MISSING)))
                    self._follow(sys.modules.get(full))
        if not _ENVIRONMENT.isdisjoint(names):
            self.checks.append(functools.partial(operator.eq, os.environ, dict(os.environ)))

    def _cell(self, cell: Any) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # a name that is not bound yet
            return cell
        self._cells.append((cell, value))
        new = self._value(value)
        return cell if new is value else types.CellType(new)

    def _value(self, value: Any) -> Any:
        """Look into a value; return it with tracers for its arrays."""
        if isinstance(value, Tensor):
            return self._lift(value)
        if is_array(value) and not isinstance(value, np.generic):
            self._trace.found.add(id(value))
            return self._trace.capture(value)
        if isinstance(value, CONTAINERS):
            return self._container(value)
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            name = getattr(value, "__module__", None)
            if _of_library(name) and getattr(value, "__wrapped__", None) is None:
                self._follow(value)
                return value
            return self._function(value)
        self._follow(value)
        if isinstance(value, type):
            self._hold_arrays(value)
        return value

    def _container(self, value: Any) -> Any:
        """Note what a container holds; return it with tracers for its arrays, if it has any."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        self._copies[id(value)] = value, value  # should it hold itself
        self._attributes_of_container(value)
        held = vars(value) if isinstance(value, NAMESPACES) else value
        by_key = not isinstance(held, (list, tuple))
        parts = list(held.items()) if by_key else list(enumerate(held))
        if by_key:
            self._lists.append((held, tuple(held)))
            self._entries += [(held, k, v) for k, v in parts]
        elif not isinstance(value, tuple):
            self._lists.append((value, tuple(value)))
        new = [(k, self._value(v)) for k, v in parts]
        if all(a is b for (_, a), (_, b) in zip(new, parts, strict=True)):
            del self._copies[id(value)]
            self._seen.add(id(value))
            return value
        made: Any
        if isinstance(value, types.MappingProxyType):
            made = types.MappingProxyType(dict(new))
        elif isinstance(value, tuple):
            kind, found = type(value), [v for _, v in new]
            made = kind(*found) if hasattr(kind, "_fields") else kind(found)
        else:
            made = copy.copy(value)
            for k, v in new:
                if isinstance(value, NAMESPACES):
                    setattr(made, k, v)  # type: ignore[arg-type]
                elif by_key:
                    dict.__setitem__(made, k, v)
                else:
                    list.__setitem__(made, k, v)  # type: ignore[call-overload]
        self._copies[id(value)] = value, made
        return made

    def _follow(self, x: Any) -> None:
        """Note what is to be known of a value that stays what it is."""
        if is_plain(x) or isinstance(x, (Tensor, np.ufunc)):
            return
        if is_array(x):
            self._trace.found.add(id(x))
            return
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        if isinstance(x, _WRAPPERS):
            for name in ("__func__", "__wrapped__", "fget", "func"):
                inner = getattr(x, name, None)
                if isinstance(inner, types.FunctionType) and not _of_library(inner.__module__):
                    self._hold_found(inner)
        elif isinstance(x, types.FunctionType):
            if not _of_library(x.__module__) or getattr(x, "__wrapped__", None) is not None:
                self._hold_found(x)
            elif x.__module__ in sys.stdlib_module_names:  # as of functools, around another
                for cell in filter(_is_bound, x.__closure__ or ()):
                    self._follow(cell.cell_contents)
        elif isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if not isinstance(x.__self__, types.ModuleType):
                self._follow(x.__self__)
        elif isinstance(x, (types.MethodType, functools.partial)):
            self._function(x)
        elif isinstance(x, CONTAINERS):
            self._attributes_of_container(x)
            self._parts(x)
        elif isinstance(x, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            pass  # what is kept of others
        elif isinstance(x, collections.abc.Collection) and _of_standard_library(type(x)):
            for parts in (x, x.values()) if isinstance(x, collections.abc.Mapping) else (x,):
                self._lists.append((parts, tuple(parts)))
                for part in parts:
                    self._hold_array(part) if is_array(part) else self._follow(part)
        elif isinstance(x, weakref.ref):
            self.checks.append(functools.partial(_gives, x, x()))
            self._follow(x())
        elif isinstance(x, contextvars.ContextVar):
            get = functools.partial(x.get, _MISSING)
            self.checks.append(functools.partial(_gives, get, get()))
            self._follow(get())
        elif isinstance(x, (np.random.Generator, np.random.RandomState, random.Random)):
            self._stateful.append((x, _state(x)))
        elif isinstance(x, Iterator) or "queue" in type(x).__module__:
            raise Concretization(f"it finds an iterator, {type(x).__name__}, which moves on")
        elif isinstance(x, (type, types.ModuleType)):
            if not _of_library(getattr(x, "__module__", x.__name__)):
                self.objects.append(x)
                self._follow(type(x))
                for base in x.__bases__ if isinstance(x, type) else ():
                    self._follow(base)
        else:
            self._object(x)

    def _object(self, x: Any) -> None:
        """Note an object, whose attributes the function may read."""
        kind = type(x)
        if _is_module(x):
            self._module(x)
        elif not _of_library(kind.__module__):
            self.objects.append(x)
            self._follow(kind)
        elif _of_standard_library(kind) and hasattr(x, "__dict__"):
            self.objects.append(x)

    def _attributes_of_container(self, x: Any) -> None:
        """Note those of a list, tuple or dict of a class of the program's own."""
        if not _of_library(type(x).__module__):
            self._follow(type(x))
            if hasattr(x, "__dict__"):
                self.objects.append(x)

    def _parts(self, x: Any) -> None:
        """Note what an attribute's container holds; arrays by identity."""
        held = vars(x) if isinstance(x, NAMESPACES) else x
        if isinstance(held, (list, tuple)):
            parts = tuple(held)
            if not isinstance(held, tuple):
                self._lists.append((held, parts))
        else:
            self._lists.append((held, tuple(held)))
            self._entries += [(held, k, v) for k, v in held.items()]
            parts = tuple(held.values())
        for part in parts:
            self._follow(part)

    def _module(self, x: Any) -> None:
        for module in x.modules():
            self._seen.add(id(module))
            self._modules.setdefault(id(module), module)
            self.objects.append(module)
            self._follow(type(module))
            for value in vars(module).values():
                self._follow(value)

    def _settle(self) -> None:
        """Note the attributes that functions may read of objects, until there are no more."""
        before = None
        while before != (before := (len(self.objects), len(self._names), self._is_dynamic)):
            if len(self.objects) > _MOST_OBJECTS:
                raise Concretization(f"it finds more than {_MOST_OBJECTS} objects")
            for x in tuple(self.objects):
                self._attributes(x)

    def _attributes(self, x: Any) -> None:
        if id(x) in self._modules:  # compared as a whole
            return
        known = self._noted.setdefault(id(x), set())
        held = held_by(x)
        if not known and not isinstance(x, types.ModuleType):
            self._sizes.append((held, len(held)))
            known.add("")
        everything = self._is_dynamic and not isinstance(x, types.ModuleType)
        is_new = [n for n in (held if everything else self._names) if n not in known and n in held]
        if isinstance(x, type):  # operators and what a library calls are used without a name
            called = held if any(map(_is_of_library, x.__mro__[:-1])) else _SPECIAL
            is_new += [n for n in held if n in called and n not in known and callable(held[n])]
        known.update(is_new)
        for name in dict.fromkeys(is_new):
            value = held[name]
            self._entries.append((held, name, value))
            if isinstance(x, types.FunctionType) and isinstance(value, np.ndarray):
                self._hold_array(value)
            self._follow(value)

    # ------------------------------------------------------------- arrays that stay what they are

    def _hold_array(self, x: Any) -> None:
        """Let the program hold for the present contents of an array that NumPy may be given."""
        self._trace.found.add(id(x))
        if x.nbytes <= _MOST_BYTES and not is_device_array(x):
            self.checks.append(functools.partial(_unchanged, x, checksum(x)))

    def _hold_arrays(self, kind: type) -> None:
        """Do so for those in the attributes of a class."""
        if not _of_library(kind.__module__):
            for value in vars(kind).values():
                if isinstance(value, np.ndarray):
                    self._hold_array(value)

    def _hold_found(self, f: types.FunctionType) -> None:
        """Note what a function reads that is called as it is, on the arrays that it finds."""
        if self._function(f) is not f:
            values = [f.__globals__.get(name) for name in _globals_of(f.__code__)]
            values += [c.cell_contents for c in f.__closure__ or () if _is_bound(c)]
            for value in values:
                if isinstance(value, np.ndarray):
                    self._hold_array(value)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Give the code of a function and of those inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _refuse_writes(code: types.CodeType) -> None:
    """Refuse functions that set global names, or names of the functions around them."""
    for inner in _codes(code):
        outside = {*inner.co_freevars}.intersection(code.co_freevars)
        for instruction in dis.get_instructions(inner):
            name = instruction.argval
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Concretization(f"{inner.co_name}() sets the global name {name}")
            if instruction.opname == "STORE_DEREF" and name in outside:
                raise Concretization(f"{inner.co_name}() sets {name} outside of it")


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple:
    """Return all names of globals and attributes in a function and those inside it."""
    return tuple(dict.fromkeys(name for inner in _codes(code) for name in inner.co_names))


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple:
    """Return the names that a function, or one inside it, looks up as globals."""
    found = {
        instruction.argval: None
        for inner in _codes(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _imported(code: types.CodeType) -> tuple:
    """Return the names of modules that a function imports."""
    found = [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found += _imported(part)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _texts(code: types.CodeType) -> tuple:
    """Return the strings in a function and those inside it."""
    texts = [x for inner in _codes(code) for x in inner.co_consts if isinstance(x, str)]
    return tuple(word for text in texts for word in text.split("."))


def _containers(tree: Any, found: list, seen: set[int]) -> None:
    """Add the lists and dicts in a tree."""
    if isinstance(tree, (list, tuple, dict)) and id(tree) not in seen:
        seen.add(id(tree))
        if not isinstance(tree, tuple):
            found.append(tree)
        for part in tree.values() if isinstance(tree, dict) else tree:
            _containers(part, found, seen)


def _state(x: Any) -> Any:
    """Return where a generator stands; None is the one that NumPy shares among all."""
    if isinstance(x, np.random.Generator):
        return x.bit_generator.state
    if isinstance(x, random.Random):
        return x.getstate()
    found = np.random.get_state() if x is None else x.get_state()  # noqa: NPY002
    return tuple(v.tolist() if isinstance(v, np.ndarray) else v for v in found)


def _set_state(x: Any, state: Any) -> None:
    if isinstance(x, np.random.Generator):
        x.bit_generator.state = state
    elif isinstance(x, random.Random):
        x.setstate(state)
    elif x is None:
        np.random.set_state(state)  # noqa: NPY002
    else:
        x.set_state(state)


def _is_bound(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _gives(read: Any, before: Any) -> bool:
    return _same(read(), before)


def _unchanged(x: Any, before: int) -> bool:
    return checksum(x) == before


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
