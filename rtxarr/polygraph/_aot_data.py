"""What programs are made of as JSON, and back: types, numbers, views, containers, expressions.

What is read is taken to be anyone's: each reader takes what its writer gives and nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr import dtypes  # noqa: F401  (makes bfloat16 known to NumPy)
from rtxarr.kernels import philox
from rtxarr.polygraph import _ir as ir
from rtxarr.polygraph import _trace
from rtxarr.polygraph._draws import draw_at

_CONTAINERS = {"tuple": tuple, "list": list}

# Functions of programs that are called, not compiled, live in these packages.
_PACKAGES = ("rtxarr.geom.", "rtxarr.kernels.", "rtxarr.libs.", "rtxarr.ops.", "rtxarr.polygraph.")
# Of those that look a function up by name, the names that they may be given.
_LIBRARY = re.compile(r"(linalg|fft)\.[a-z_0-9]+|argsort|invert|isin|round|searchsorted|sort")


class NotSaved(TypeError):
    """Raised for what a file of programs cannot hold."""


# ------------------------------------------------------------------------------------- values


def encode(x: Any) -> Any:
    """Return what JSON can hold for a value that describes an operation."""
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, np.generic):
        return {"number": [x.dtype.name, x.tobytes().hex()]}
    if isinstance(x, int):
        return int(x)
    if isinstance(x, float):
        return {"float": x.hex()}
    if isinstance(x, complex):
        return {"complex": [x.real.hex(), x.imag.hex()]}
    if isinstance(x, bytes):
        return {"bytes": x.hex()}
    if isinstance(x, np.dtype) and x.isnative:
        return {"dtype": x.name}
    if type(x) in (tuple, list):
        return [encode(v) for v in x]
    if isinstance(x, slice):
        return {"slice": [encode(v) for v in (x.start, x.stop, x.step)]}
    if x is Ellipsis:
        return {"ellipsis": True}
    if _is_record(type(x)):
        names = _fields(type(x))
        return {"record": [_name(type(x)), [encode(getattr(x, name)) for name in names]]}
    if callable(x):
        return {"function": function_name(x)}
    raise NotSaved(f"a {type(x).__name__} cannot be saved: {x!r}")


def decode(x: Any) -> Any:
    """Return the value of :func:`encode`'s result; sequences become tuples."""
    if x is None or isinstance(x, (bool, str, int)):
        return x
    if isinstance(x, list):
        return tuple([decode(v) for v in x])
    if not isinstance(x, dict) or len(x) != 1:
        raise ValueError(f"not a value: {x!r}")
    ((kind, value),) = x.items()
    if kind == "number":
        return np.frombuffer(bytes.fromhex(value[1]), dtype_of(value[0]), 1)[0]
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "dtype":
        return dtype_of(value)
    if kind == "slice":
        return slice(*map(decode, value))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "record":
        made = function_of(value[0])
        if not _is_record(made):
            raise ValueError(f"not a record: {value[0]!r}")
        return made(*decode(value[1]))
    if kind == "function":
        return function_of(value)
    raise ValueError(f"not a value: {x!r}")


def _is_record(kind: Any) -> bool:
    """Tell whether a type of this library holds named values and nothing else."""
    if not isinstance(kind, type) or not f"{kind.__module__}.".startswith(_PACKAGES):
        return False
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore
    return frozen or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(f.name for f in dataclasses.fields(kind))
    return kind._fields


@functools.cache
def dtype_of(name: Any) -> np.dtype:
    """Return a dtype of numbers by its name."""
    dtype = np.dtype(str(name))
    if dtype.name != name or (dtype.kind not in "biufc" and name != "bfloat16"):
        raise ValueError(f"not a dtype of numbers: {name!r}")
    return dtype


def shape_of(x: Any) -> tuple[int, ...]:
    """Return a tuple of lengths."""
    if not isinstance(x, list) or any(type(n) is not int or n < 0 for n in x):
        raise ValueError(f"not a shape: {x!r}")
    return tuple(x)


def index_of(x: Any, n: int) -> int:
    """Return a number in ``[0, n)``."""
    if type(x) is not int or not 0 <= x < n:
        raise ValueError(f"not a number below {n}: {x!r}")
    return x


# ---------------------------------------------------------------------------------- functions


def _name(f: Any) -> str:
    return f"{getattr(f, '__module__', '')}:{getattr(f, '__qualname__', '')}"


def function_name(f: Callable) -> str:
    """Return the name by which another process finds a function of this library."""
    name = _name(f)
    try:
        found: Any = function_of(name)
        while found is not None:  # decorators may stand around it
            if found is f:
                return name
            found = getattr(found, "__wrapped__", None)
    except (ValueError, ImportError, AttributeError):
        pass
    raise NotSaved(f"a program that calls {name.replace(':', '.')} cannot be saved")


def function_of(name: str) -> Callable:
    """Return a function of this library by its name."""
    module, _, path = name.partition(":")
    if not module.startswith(_PACKAGES) or not path.isidentifier():
        raise ValueError(f"not a function of a program: {name!r}")
    found = getattr(importlib.import_module(module), path)
    if not callable(found) or getattr(found, "__module__", None) != module:
        raise ValueError(f"not a function of a program: {name!r}")
    return found


def check_attrs(op: str, attrs: tuple) -> None:
    """See that the attributes of an operation are such as it has: some become text."""
    if op == "call":
        check_call(*attrs)
        return
    if op == "constant":
        good = len(attrs) == 1 and isinstance(attrs[0], np.generic)
    elif op in ir.TRANSFORMS:
        *sizes, norm = attrs
        good = _are_ints(tuple(sizes)) and norm in ("backward", "ortho", "forward", "none")
    elif op in ("segment_reduce", "scatter_reduce"):
        good = len(attrs) == 1 and attrs[0] in ir.SEGMENTS
    else:
        good = _are_ints(attrs)
    if not good:
        raise ValueError(f"not what {op} has: {attrs!r:.100}")


def _are_ints(x: Any) -> bool:
    return all(map(_are_ints, x)) if type(x) is tuple else type(x) is int


def check_call(function: Any, options: tuple, results: tuple) -> None:
    """See that a call is of one of the library's functions of arrays, or draws as many numbers."""
    inner = getattr(function, "function", function)  # it may come with some of its arguments
    name = dict(options).get("name")
    if _name(inner) == "rtxarr.polygraph._calls:library":
        is_ufunc = isinstance(getattr(np, str(name), None), np.ufunc)
        good = is_ufunc or _LIBRARY.fullmatch(str(name)) is not None
    elif inner is draw_at:
        given = dict(options)
        dtype, n, params = given.pop("dtype"), given.pop("n"), given.pop("params")
        good = given.keys() == {"kind", "shift"} and type(given["shift"]) is int
        good = good and given["kind"] in philox.KINDS and results == ((dtype, (n,)),)
        good = good and all(isinstance(x, (int, float, np.number)) for x in params)
    else:
        good = _name(inner) == "rtxarr.polygraph._indexing:put" or hasattr(inner, "__wrapped__")
    if not good:
        raise ValueError(f"not a function of arrays: {_name(inner)} {name or ''}")


# --------------------------------------------------------------------------------- containers


def encode_structure(structure: Any) -> Any:
    """Return nested tuples, lists and dicts (see ``autograd._tree``) as JSON."""
    if structure is None:
        return None
    kind, keys, parts = structure
    inner = [encode_structure(p) for p in parts]
    if kind is dict:
        if not all(isinstance(k, (str, int)) and not isinstance(k, bool) for k in keys):
            raise NotSaved(f"keys of dicts must be str or int to be saved, got {keys}")
        return ["dict", list(keys), inner]
    for name, known in _CONTAINERS.items():
        if kind is known:
            return [name, None, inner]
    raise NotSaved(f"containers must be tuples, lists and dicts to be saved, got {kind.__name__}")


def decode_structure(x: Any) -> Any:
    if x is None:
        return None
    name, keys, parts = x
    inner = tuple([decode_structure(p) for p in parts])
    if name == "dict":
        if len(keys) != len(inner) or not all(isinstance(k, (str, int)) for k in keys):
            raise ValueError(f"not the keys of a dict: {keys!r}")
        return dict, tuple(keys), inner
    return _CONTAINERS[name], None, inner


def n_leaves(structure: Any) -> int:
    """Return how many leaves nested containers have."""
    return 1 if structure is None else sum(map(n_leaves, structure[2]))


# -------------------------------------------------------------------------------------- views

_VIEWS = {
    "index": (_trace.Index, "key"),
    "permute": (_trace.Permute, "axes"),
    "broadcast": (_trace.Broadcast, "shape"),
    "reshape": (_trace.Reshape, "shape"),
    "part": (_trace.Part, "name"),
}


def encode_view(step: Any) -> list:
    for name, (kind, field) in _VIEWS.items():
        if type(step) is kind:
            return [name, encode(getattr(step, field))]
    raise NotSaved(f"a view by {type(step).__name__} cannot be saved")


def decode_view(x: Any) -> Any:
    name, value = x
    kind, _ = _VIEWS[name]
    if name == "part" and value not in ("real", "imag"):
        raise ValueError(f"not a part of a complex array: {value!r}")
    return kind(decode(value))


# -------------------------------------------------------------------------------- expressions

_NODES = (
    ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.operator,
    ast.unaryop, ast.cmpop, ast.Load, ast.Subscript, ast.Name, ast.Attribute, ast.Call,
)  # fmt: skip
_NAMES = frozenset(("a", "inf", "nan", "abs", "round", "divmod", "complex"))
_FIELDS = frozenset(("real", "imag", "conjugate"))


def checked_expression(text: Any, n_numbers: int) -> str:
    """Return an expression of the numbers ``a[0]``, ``a[1]``, ... if it is one of arithmetic."""
    if not isinstance(text, str) or len(text) > 10_000:
        raise ValueError(f"not an expression of numbers: {text!r:.100}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"not an expression of numbers: {text!r:.100}") from error
    for node in ast.walk(tree):
        good = isinstance(node, _NODES)
        if isinstance(node, ast.Name):
            good = node.id in _NAMES
        elif isinstance(node, ast.Attribute):
            good = node.attr in _FIELDS
        elif isinstance(node, ast.Constant):
            good = type(node.value) in (bool, int, float, complex)
        elif isinstance(node, ast.Call):
            f = node.func
            named = isinstance(f, ast.Name) and f.id in _NAMES - {"a"}
            good = not node.keywords and (
                named or (isinstance(f, ast.Attribute) and f.attr == "conjugate")
            )
        elif isinstance(node, ast.Subscript):
            at = node.slice.value if isinstance(node.slice, ast.Constant) else None
            good = type(at) is int and 0 <= at < max(n_numbers, 2)
        if not good:
            raise ValueError(f"not an expression of numbers: {text!r:.100}")
    return ast.unparse(tree)
