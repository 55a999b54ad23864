"""How NumPy's, CuPy's and rtxarr's own functions reach tracers."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr.dtypes import bfloat16
from rtxarr.polygraph import _ir
from rtxarr.polygraph._elementwise import (
    as_array,
    cast,
    cast_node,
    elementwise,
    kind_of,
    loop_of,
    operand,
    stored,
    tensor_of,
    where,
    where_dtype,
)
from rtxarr.polygraph._indexing import wrapped
from rtxarr.polygraph._ir import REPEATED
from rtxarr.polygraph._reduce import running_extremum
from rtxarr.polygraph._trace import Tracer, concretization


def _namespace():
    from rtxarr.polygraph import _namespace

    return _namespace


# --------------------------------------------------------------------------- NumPy's functions


def array_ufunc(ufunc: np.ufunc, method: str, inputs: tuple, kwargs: dict) -> Any:
    """Answer ``ufunc.method(*inputs, **kwargs)``."""
    outs = kwargs.pop("out", ())
    outs = outs if isinstance(outs, tuple) else (outs,)
    mask = kwargs.pop("where", True)
    dtype = kwargs.pop("dtype", None)
    if method == "reduce" and ufunc.__name__ in _REDUCTIONS:
        return _ufunc_reduce(ufunc, inputs, outs, mask, dtype, kwargs)
    if method == "accumulate" and ufunc in (np.add, np.multiply):
        name = "cumulative_sum" if ufunc is np.add else "cumulative_prod"
        axis = inputs[1] if len(inputs) > 1 else kwargs.get("axis", 0)
        result = getattr(_namespace(), name)(inputs[0], axis=axis, dtype=dtype)
        return stored(outs[0] if outs else None, result)
    if method == "accumulate" and ufunc in _EXTREMA and not kwargs.keys() - {"axis"}:
        axis = operator.index(inputs[1] if len(inputs) > 1 else kwargs.get("axis", 0))
        x = as_array(inputs[0])
        if (x.dtype if dtype is None else np.dtype(dtype)).kind == "c":
            raise concretization(f"np.{ufunc.__name__}.accumulate of complex numbers")
        result = running_extremum(_EXTREMA[ufunc], x, axis, dtype)
        return stored(outs[0] if outs else None, result)
    if method == "outer" and ufunc.nin == 2:
        a, b = map(as_array, inputs)
        inputs, method = (a.reshaped((*a.shape, *(1,) * b.ndim)), b), "__call__"
    if method == "at":
        return _write_extrema(ufunc, *inputs)
    kwargs = {k: v for k, v in kwargs.items() if v is not None and v != "same_kind" and v != "K"}
    kwargs.pop("subok", None)
    if method != "__call__" or kwargs:
        words = ", ".join([method, *kwargs])
        raise concretization(f"np.{ufunc.__name__} with {words}")
    if ufunc.nin != len(inputs):
        raise TypeError(f"{ufunc.__name__}() takes {ufunc.nin} arrays, got {len(inputs)}")
    result = _call_ufunc(ufunc, inputs, dtype)
    if not outs or outs[0] is None:
        if mask is not True:
            raise concretization(f"np.{ufunc.__name__} with where and no out")
        return result
    if isinstance(result, tuple):
        return tuple(stored(o, r) for o, r in zip(outs, result, strict=True))
    target = as_array(outs[0])
    if mask is not True:
        result = where(mask, cast(result, target.dtype), target)
    return stored(target, result)


def _call_ufunc(ufunc, inputs, dtype):
    if dtype is not None:
        inputs = tuple(cast(as_array(x), dtype) for x in inputs)
    if ufunc is np.matmul:
        return _namespace().matmul(*inputs)
    if ufunc.__name__ == "clip":
        return clip(*inputs)
    if ufunc is np.divmod:
        return elementwise(np.floor_divide, *inputs), elementwise(np.remainder, *inputs)
    if ufunc.__name__ == "vecdot":
        return _namespace().vecdot(*inputs)
    return elementwise(ufunc, *inputs)


_EXTREMA = {np.maximum: "max", np.minimum: "min"}


def _write_extrema(ufunc: np.ufunc, x: Any, index: Any, *values: Any) -> None:
    """Do ``ufunc.at(x, index, values)`` where its order does not matter: at a list of rows."""
    x, values = as_array(x), tuple(map(tensor_of, values))
    *_, result = loop_of(ufunc, (x.dtype, *map(kind_of, values)))
    if ufunc not in _EXTREMA or x.ndim == 0 or result != x.dtype or x.dtype.kind in "bc":
        raise concretization(f"np.{ufunc.__name__}.at")
    if isinstance(index, (tuple, slice, int)) or as_array(index).dtype.kind not in "iu":
        raise concretization(f"np.{ufunc.__name__}.at with an index that is no list of rows")
    rows = wrapped(as_array(index), x.shape[0]).node
    shape = (*rows.shape, *x.shape[1:])
    sent = _ir.broadcast(cast_node(operand(values[0], result), result), shape)
    sent = _ir.reshape(sent, (rows.size, x.size // x.shape[0] if x.size else 0))
    rows = _ir.reshape(rows, (rows.size,))
    found = _ir.scatter_reduce(_EXTREMA[ufunc], rows, sent, x.shape[0])
    x.write(_ir.map_node(ufunc.__name__, x.node, _ir.reshape(found, x.shape)))


_REDUCTIONS = {ufunc: op for op, ufunc in REPEATED.items()}


def _ufunc_reduce(ufunc, inputs, outs, mask, dtype, kwargs):
    x = as_array(inputs[0])
    names = ("axis", "dtype", "out", "keepdims", "initial", "where")
    options = {**dict(zip(names, inputs[1:], strict=False)), **kwargs}
    dtype = options.pop("dtype", dtype)
    initial = options.pop("initial", None)
    if initial is not None and initial is not np._NoValue:
        raise concretization(f"np.{ufunc.__name__}.reduce with initial")
    name = _REDUCTIONS[ufunc.__name__]
    if mask is not True:
        neutral = {"sum": 0, "prod": 1, "all": True, "any": False}
        if name not in neutral:
            raise concretization(f"np.{name} with where")
        x = where(mask, x, neutral[name])
    axis = options.get("axis", 0)
    given = {} if dtype is None else {"dtype": dtype}
    result = getattr(_namespace(), name)(
        x, axis=axis, keepdims=bool(options.get("keepdims", False)), **given
    )
    return stored(outs[0] if outs else None, result)


def clip(x: Any, low: Any = None, high: Any = None) -> Tracer:
    """Limit elements as ``np.clip`` does, in the common dtype."""
    x = as_array(x)
    if low is not None and high is not None:
        kinds = (x.dtype, kind_of(tensor_of(low)), kind_of(tensor_of(high)))
        # NumPy has no loop of its own for bfloat16.
        x = cast(x, where_dtype(*(np.dtype("f4") if k == bfloat16 else k for k in kinds)))
    for bound, larger, beyond in ((low, np.maximum, np.less), (high, np.minimum, np.greater)):
        if bound is not None:
            zero = x.dtype.kind == "f" and np.isscalar(bound) and bool(bound == 0)
            # Which of 0.0 and -0.0 is there stays, where the bound is one number.
            x = where(beyond(x, bound), bound, x) if zero else larger(x, bound)
    return x


def dot(a: Any, b: Any) -> Tracer:
    """Return ``np.dot(a, b)``."""
    a, b = tensor_of(a), tensor_of(b)
    if not isinstance(a, Tracer) or not isinstance(b, Tracer) or a.ndim == 0 or b.ndim == 0:
        return elementwise(np.multiply, a, b)
    if b.ndim <= 2 and a.ndim <= 2:
        return _namespace().matmul(a, b)
    return _namespace().tensordot(a, b, axes=((a.ndim - 1,), (max(b.ndim - 2, 0),)))


def array_function(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Answer a function of NumPy's that is no ufunc."""
    handler = _handlers().get(function)
    if handler is None:
        raise concretization(f"np.{function.__name__}")
    return handler(*args, **kwargs)


def _adapted(name: str, renamed: dict | None = None) -> Callable:
    """Call the standard's function under NumPy's names of parameters."""

    def handler(*args, **kwargs):
        function: Any = _namespace()
        for part in name.split("."):
            function = getattr(function, part)
        options = {}
        for key, value in kwargs.items():
            if value is np._NoValue or (value is None and key in _OPTIONAL):
                continue
            options[(renamed or {}).get(key, key)] = value
        return _bound(function, args, options)

    return handler


_OPTIONAL = (
    "out",
    "dtype",
    "subok",
    "like",
    "device",
    "order",
    "stable",
    "kind",
    "initial",
    "where",
)


def _bound(function, args, options):
    """Call with positional arguments at the places of keyword-only parameters too."""
    out = options.pop("out", None)
    for name in ("order", "subok", "like"):
        if options.get(name) in ("K", "C", True, None):
            options.pop(name, None)
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not variadic and len(args) > len(plain):
        args, rest = args[: len(plain)], args[len(plain) :]
        options.update(zip(keyword, rest, strict=False))
    for p in plain[len(args) :]:
        if p.name in options and p.kind is p.POSITIONAL_ONLY:
            args = (*args, options.pop(p.name))
    known = {p.name for p in parameters}
    for name in options:
        if name not in known and not variadic:
            raise concretization(f"np.{function.__name__}({name}=)")
    result = function(*args, **options)
    return stored(out, result)


def _method(name: str) -> Callable:
    def handler(x, *args, **kwargs):
        kwargs = {k: v for k, v in kwargs.items() if v is not np._NoValue}
        return getattr(as_array(x), name)(*args, **kwargs)

    return handler


def _where(condition, x=None, y=None):
    if x is None or y is None:
        raise concretization("np.where with one argument")
    x, y = tensor_of(x), tensor_of(y)
    if bfloat16 in (getattr(x, "dtype", None), getattr(y, "dtype", None)):
        x, y = as_array(x), as_array(y)  # NumPy's rules for weak numbers do not know it
    return where(condition, x, y)


def _split(x, indices_or_sections, axis=0):
    x = as_array(x)
    axis = axis % x.ndim
    n = x.shape[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        sections = int(indices_or_sections)
        each, extra = divmod(n, sections)
        bounds = np.cumsum([0, *[each + 1] * extra, *[each] * (sections - extra)]).tolist()
    else:
        bounds = [0, *map(operator.index, indices_or_sections), n]
    before = (slice(None),) * axis
    return [x[(*before, slice(a, b))] for a, b in zip(bounds, bounds[1:], strict=False)]


def _even_split(x, indices_or_sections, axis=0):
    if isinstance(indices_or_sections, (int, np.integer)) and x.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return _split(x, indices_or_sections, axis)


def _sort(x, axis=-1, kind=None, order=None, *, stable=None):
    if order is not None:
        raise concretization("np.sort with order")
    x = as_array(x)
    return _namespace().sort(x.ravel() if axis is None else x, axis=-1 if axis is None else axis)


def _joined(result, out, dtype, casting):
    """Return arrays put together, in the dtype and place asked for."""
    if casting != "same_kind":
        raise concretization(f"casting={casting!r}")
    if dtype is not None:
        result = as_array(result).astype(dtype, casting=casting)
    return stored(out, result)


def _concatenate(arrays, axis=0, out=None, dtype=None, casting="same_kind"):
    return _joined(_namespace().concat(list(arrays), axis=axis), out, dtype, casting)


def _stack(arrays, axis=0, out=None, dtype=None, casting="same_kind"):
    return _joined(_namespace().stack(list(arrays), axis=axis), out, dtype, casting)


def _with_ndim(x, ndim):
    x = as_array(x)
    return x if x.ndim >= ndim else x.reshaped((1,) * (ndim - x.ndim) + x.shape)


def _vstack(arrays, *, dtype=None, casting="same_kind"):
    result = _namespace().concat([_with_ndim(a, 2) for a in arrays], axis=0)
    return _joined(result, None, dtype, casting)


def _hstack(arrays, *, dtype=None, casting="same_kind"):
    found = [_with_ndim(a, 1) for a in arrays]
    result = _namespace().concat(found, axis=0 if found[0].ndim == 1 else 1)
    return _joined(result, None, dtype, casting)


def _outer(a, b, out=None):
    result = _namespace().linalg.outer(as_array(a).ravel(), as_array(b).ravel())
    return stored(out, result)


def _pad(x, pad_width, mode="constant", constant_values=0):
    x = as_array(x)
    if mode != "constant":
        raise concretization(f"np.pad(mode={mode!r})")
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, widths, strict=True))
    out = _namespace().full(shape, constant_values, dtype=x.dtype)
    out[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True))] = x
    return out


def _copyto(dst, src, casting="same_kind", where=True):
    target = as_array(dst)
    source = tensor_of(src)
    if isinstance(source, Tracer) and not np.can_cast(source.dtype, target.dtype, casting):
        raise TypeError(f"cannot cast {source.dtype} to {target.dtype} by the rule {casting!r}")
    if not isinstance(source, Tracer) and casting != "same_kind":
        raise concretization(f"np.copyto(casting={casting!r})")
    target[...] = src if where is True else _where(where, src, target)


def _full_like(x, fill_value, dtype=None, order="K", subok=True, shape=None, *, device=None):
    x = as_array(x)
    return _namespace().full(
        x.shape if shape is None else shape, fill_value, dtype=x.dtype if dtype is None else dtype
    )


def _like(value):
    def handler(x, dtype=None, order="K", subok=True, shape=None, *, device=None):
        return _full_like(x, value, dtype, shape=shape)

    return handler


def _average(x, axis=None, weights=None, returned=False, *, keepdims=False):
    if weights is not None or returned:
        raise concretization("np.average with weights")
    return _namespace().mean(x, axis=axis, keepdims=keepdims is True)


def _einsum(*operands, **options):
    from rtxarr.ops import einsum

    if not isinstance(operands[0], str) or any(
        v not in (None, False, "K") for v in options.values()
    ):
        raise concretization("np.einsum in another form than a text and arrays")
    result = einsum(*operands)
    return result[()] if result.ndim == 0 else result


def _nan_to_num(x, copy=True, nan=0.0, posinf=None, neginf=None):
    x = as_array(x)
    if x.dtype.kind != "f":
        raise concretization("np.nan_to_num of no real floating array")
    limits = np.finfo(x.dtype)
    out = where(elementwise(np.isnan, x), nan, x)
    above = limits.max if posinf is None else posinf
    below = limits.min if neginf is None else neginf
    out = where(elementwise(np.equal, x, np.inf), x.dtype.type(above), out)
    out = where(elementwise(np.equal, x, -np.inf), x.dtype.type(below), out)
    return out if copy else stored(x, out)


@functools.cache
def _handlers() -> dict[Callable, Callable]:
    """Return what answers each function of NumPy's."""
    found: dict[Callable, Callable] = {
        np.array_split: _split,
        np.average: _average,
        np.clip: lambda x, *bounds, **options: as_array(x).clip(*bounds, **options),
        np.concatenate: _concatenate,
        np.copyto: _copyto,
        np.dot: dot,
        np.einsum: _einsum,
        np.full_like: _full_like,
        np.zeros_like: _like(0),
        np.ones_like: _like(1),
        np.empty_like: _like(0),
        np.hstack: _hstack,
        np.inner: lambda a, b: dot(a, as_array(b).T if as_array(b).ndim == 2 else b),
        np.nan_to_num: _nan_to_num,
        np.ndim: lambda x: as_array(x).ndim,
        np.pad: _pad,
        np.shape: lambda x: as_array(x).shape,
        np.size: lambda x, axis=None: as_array(x).size if axis is None else as_array(x).shape[axis],
        np.split: _even_split,
        np.sort: _sort,
        np.stack: _stack,
        np.vstack: _vstack,
        np.where: _where,
        np.result_type: lambda *args: _namespace().result_type(*args),
        np.can_cast: lambda a, b, casting="safe": np.can_cast(
            getattr(a, "dtype", a),  # type: ignore[arg-type]
            b,
            casting,
        ),
        np.real: lambda x: as_array(x).real,
        np.imag: lambda x: as_array(x).imag,
        np.iscomplexobj: lambda x: as_array(x).dtype.kind == "c",
        np.isrealobj: lambda x: as_array(x).dtype.kind != "c",
        np.copy: lambda x, order="K", subok=False: as_array(x).snapshot(),
        np.rollaxis: lambda x, axis, start=0: _namespace().moveaxis(
            x, axis, start - (axis % as_array(x).ndim < start)
        ),
        np.atleast_1d: lambda *xs: _several([_with_ndim(x, 1) for x in xs]),
        np.atleast_2d: lambda *xs: _several([_with_ndim(x, 2) for x in xs]),
        np.outer: _outer,
    }
    for name in """
        sum prod mean max min all any argmax argmin var std cumsum cumprod ravel reshape transpose
        squeeze swapaxes take repeat round argsort diagonal trace
    """.split():
        found[getattr(np, name)] = _method(name)
    found[np.amax], found[np.amin], found[np.around] = (
        _method("max"),
        _method("min"),
        _method("round"),
    )
    for name in """
        broadcast_to broadcast_arrays count_nonzero cumulative_sum cumulative_prod diff expand_dims
        flip meshgrid moveaxis roll take_along_axis tensordot tile tril triu searchsorted isin
        permute_dims matrix_transpose concat unstack astype
    """.split():
        if hasattr(np, name):
            found.setdefault(
                getattr(np, name), _adapted(name, {"arr": "x", "a": "x", "reps": "repetitions"})
            )
    for name in (
        "fft",
        "ifft",
        "rfft",
        "irfft",
        "hfft",
        "ihfft",
        "fftn",
        "ifftn",
        "rfftn",
        "irfftn",
    ):
        found[getattr(np.fft, name)] = _adapted(f"fft.{name}", {"a": "x"})
    for name in ("fftshift", "ifftshift"):
        found[getattr(np.fft, name)] = _adapted(f"fft.{name}")
    for name in """
        cholesky det eig eigh eigvals eigvalsh inv matrix_norm matrix_power matrix_rank pinv qr
        slogdet solve svd svdvals vector_norm
    """.split():
        found[getattr(np.linalg, name)] = _adapted(f"linalg.{name}", {"a": "x"})
    return found


def _several(found: list) -> Any:
    return found[0] if len(found) == 1 else tuple(found)


# ----------------------------------------------------------------------------------- CuPy's


def cupy_kernel(kernel: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a ufunc of CuPy's, or an elementwise kernel."""
    name = getattr(kernel, "name", "").removeprefix("cupy_")
    special = _CUPY_SPECIAL.get(name.removeprefix("cupyx_scipy_special_"))
    if special is not None and not kwargs and len(args) == 1:
        return getattr(importlib.import_module("rtxarr.ops"), special)(*args)
    if name in ("where", "_where_ufunc"):
        return where(*args[:3])
    ufunc = getattr(np, _CUPY_NAMES.get(name, name), None)
    if not isinstance(ufunc, np.ufunc):
        raise concretization(f"CuPy's kernel {name}")
    n_in = ufunc.nin
    out = kwargs.pop("out", None)
    outs = args[n_in:] or (() if out is None else out)
    return array_ufunc(ufunc, "__call__", args[:n_in], {**kwargs, "out": outs})


_CUPY_SPECIAL = {"erf": "erf", "expit": "sigmoid"}
_CUPY_NAMES = {"true_divide": "divide", "rint_": "rint", "abs": "absolute", "power": "power"}
