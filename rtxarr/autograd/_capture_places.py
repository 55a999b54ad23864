"""What a step can reach beside its arguments, and where it finds the arrays that its graph uses.

A graph goes on using the arrays that it recorded. Where a program keeps them, in attributes, lists,
dicts, closures or global names, others may be put in their place.
"""

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import is_array, is_device_array
from rtxarr.autograd._tape import Tensor

__all__ = ["Places", "modules_of"]


class _Place(NamedTuple):
    """``holder[key]`` was ``x``; ``parent`` is where the holder was found.

    ``holder`` is None where nothing else can be put: in a tuple, among arguments.
    """

    parent: Any
    holder: Any
    key: Any
    x: Any


class _Cell:
    """A variable of a closure, read like a container."""

    __slots__ = ("cell",)

    def __init__(self, cell: Any):
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents


def _reached(step: Any, leaves: Iterable) -> Iterator[_Place]:
    """Yield what a step can see; each container once, arrays and tensors wherever they are."""
    seen: set[int] = set()
    todo = [(_Place(None, None, None, step), 2)]
    todo += [(_Place(None, None, None, x), 1) for x in leaves]
    while todo:
        place, depth = todo.pop()
        x = place.x
        if isinstance(x, Tensor) or is_array(x):
            yield place
            continue
        if id(x) in seen or isinstance(x, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(x))
        yield place
        for holder, items, inner in _parts(x, depth):
            todo += [(_Place(place, holder, key, y), inner) for key, y in items]


def _parts(x: Any, depth: int) -> Iterator[tuple]:
    """Give what ``x`` holds: holder, its keys and values, and how deep to look into these."""
    if _is_module(x):
        yield vars(x), list(vars(x).items()), 0
        # Those that it keeps in ways of its own.
        yield None, [(None, module) for module in x.modules() if module is not x], 0
    elif isinstance(x, list):
        yield x, list(enumerate(x)), depth
    elif isinstance(x, dict):
        yield x, list(x.items()), depth
    elif isinstance(x, (tuple, set)):
        yield None, [(None, y) for y in x], depth
    elif isinstance(x, functools.partial):
        yield None, [(None, y) for y in (x.func, *x.args)], depth - 1
        yield x.keywords, list(x.keywords.items()), depth - 1
    elif isinstance(x, types.MethodType):
        yield None, [(None, x.__self__)], depth - 1
        yield from _of_function(x.__func__, depth)
    elif isinstance(x, types.FunctionType):
        yield from _of_function(x, depth)
    elif depth > 0:
        held = getattr(x, "__dict__", {})
        yield held, list(held.items()), depth - 1


def _of_function(x: Any, depth: int) -> Iterator[tuple]:
    """Give what a function closes over, names and has for defaults."""
    for cell in x.__closure__ or ():
        if _filled(cell):
            yield _Cell(cell), [(0, cell.cell_contents)], depth - 1
    if depth > 0:
        known = x.__globals__
        named = [(name, known[name]) for name in x.__code__.co_names if name in known]
        yield known, named, depth - 1
    yield None, [(None, y) for y in x.__defaults__ or ()], depth - 1


def _filled(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_module(x):
    kind = type(x)
    return isinstance(getattr(kind, "training", None), bool) and hasattr(kind, "modules")


def modules_of(step: Any, leaves: Iterable) -> dict[int, tuple[Any, bool]]:
    """Find the modules that a step can see and whether they train, which changes what it does.

    Those that only turn up when it runs are seen by a witness.
    """
    modules = [place.x for place in _reached(step, leaves) if _is_module(place.x)]
    return {id(x): (x, x.training) for x in modules}


class Places:
    """Where a step found the arrays on the GPU that it can reach beside its arguments.

    Parameters
    ----------
    step : callable
    leaves : iterable
        Its arguments.
    """

    def __init__(self, step: Any, leaves: Iterable):
        self._found: list[tuple[_Place, Any]] = []
        for place in _reached(step, leaves):
            data = place.x.data if isinstance(place.x, Tensor) else place.x
            if is_device_array(data) and any(_path(place)):
                self._found.append((place, data))
        self._watched: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Tensor, Any]] = []

    @property
    def arrays(self) -> list:
        """The arrays, in the order that :meth:`keep` takes."""
        return [data for _, data in self._found]

    def keep(self, used: Iterable[bool]) -> None:
        """Leave out the arrays that the graph does not use.

        Raises
        ------
        RuntimeError
            When the step, which has run since they were found, put another in place of one.
        """
        watched: dict[tuple, tuple[Any, Any, Any]] = {}
        changed: dict[int, Any] = {}
        there: set[int] = set()
        for (place, data), is_used in zip(self._found, used, strict=True):
            if not is_used:
                continue
            path = list(_path(place))
            if all(_holds(*step) for step in path):
                there.add(id(data))
                watched.update(((id(holder), key), (holder, key, x)) for holder, key, x in path)
                if isinstance(place.x, Tensor):
                    self._tensors.append((place.x, data))
            else:
                changed[id(data)] = data
        for number, data in changed.items():
            if number not in there:
                raise RuntimeError(
                    "the step puts another array in place of one that it uses, of shape "
                    f"{tuple(data.shape)}, which a replay does not: change it in place, "
                    "x[...] = ..."
                )
        self._watched = list(watched.values())
        self._found = []

    def are_unchanged(self) -> bool:
        """Tell whether all arrays that are used are where they were."""
        for x, data in self._tensors:
            if x.data is not data:
                return False
        try:
            for holder, key, x in self._watched:
                if holder[key] is not x and not _same_memory(holder[key], x):
                    return False
        except (LookupError, ValueError):
            return False
        return True


def _path(place: Any) -> Iterator[tuple[Any, Any, Any]]:
    while place is not None:
        if place.holder is not None:
            yield place.holder, place.key, place.x
        place = place.parent


def _holds(holder, key, x):
    try:
        return holder[key] is x or _same_memory(holder[key], x)
    except (LookupError, ValueError):
        return False


def _same_memory(a, b):
    """Tell whether two raw arrays are one in all but the Python object."""
    if not (is_device_array(a) and is_device_array(b)):
        return False
    return _layout(a) == _layout(b)


def _layout(x):
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return address, x.shape, x.strides, x.dtype
