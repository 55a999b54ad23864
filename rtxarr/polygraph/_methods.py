"""Give Tracer the operators and methods of an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import is_array
from rtxarr.polygraph import _elementwise as maps
from rtxarr.polygraph import _indexing, _library, _protocols
from rtxarr.polygraph import _namespace as namespace
from rtxarr.polygraph._elementwise import as_array, cast, elementwise, stored
from rtxarr.polygraph._ir import REPEATED
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import Tracer, concretization

_NUMBERS = (bool, int, float, complex)


def _takes(x: Any) -> bool:
    return isinstance(x, (Tracer, Scalar, *_NUMBERS)) or is_array(x) and not _is_tensor(x)


def _is_tensor(x: Any) -> bool:
    return getattr(x, "__array_ufunc__", 0) is None


def _operator(function: Any) -> tuple:
    def forward(self, other):
        if isinstance(other, (list, tuple)):
            other = as_array(other)
        return function(self, other) if _takes(other) else NotImplemented

    def reflected(self, other):
        if isinstance(other, (list, tuple)):
            other = as_array(other)
        return function(other, self) if _takes(other) else NotImplemented

    def in_place(self, other):
        if self.is_scalar:
            return forward(self, other)
        return stored(self, function(self, other))

    return forward, reflected, in_place


def _comparison(function: Any) -> Any:
    forward, _, _ = _operator(function)

    def compare(self, other):
        out = forward(self, other)
        if out is NotImplemented and not _is_tensor(other):
            raise concretization(f"a comparison with a {type(other).__name__}")
        return out

    return compare


def _unary(ufunc: np.ufunc) -> Any:
    return lambda self: elementwise(ufunc, self)


def _of(ufunc: np.ufunc) -> Any:
    return lambda x, y: elementwise(ufunc, x, y)


for _name, _function in {
    "add": _of(np.add),
    "sub": _of(np.subtract),
    "mul": _of(np.multiply),
    "truediv": _of(np.divide),
    "floordiv": _of(np.floor_divide),
    "mod": _of(np.remainder),
    "pow": maps.power,
    "matmul": namespace.matmul,
    "and": _of(np.bitwise_and),
    "or": _of(np.bitwise_or),
    "xor": _of(np.bitwise_xor),
    "lshift": _of(np.left_shift),
    "rshift": _of(np.right_shift),
}.items():
    _forward, _reflected, _in_place = _operator(_function)
    setattr(Tracer, f"__{_name}__", _forward)
    setattr(Tracer, f"__r{_name}__", _reflected)
    setattr(Tracer, f"__i{_name}__", _in_place)
for _name, _ufunc in {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}.items():
    setattr(Tracer, f"__{_name}__", _comparison(_of(_ufunc)))
for _name, _one in {
    "neg": np.negative,
    "pos": np.positive,
    "abs": np.absolute,
    "invert": np.invert,
}.items():
    setattr(Tracer, f"__{_name}__", _unary(_one))


def _divmod(self, other):
    return self // other, self % other


def _pow(self, other, modulus=None):
    return maps.power(self, other) if modulus is None and _takes(other) else NotImplemented


def _refuse(what: str) -> Any:
    def method(self, *args, **kwargs):
        raise concretization(what)

    return method


def _length(self):
    if not self.shape:
        raise TypeError("len() of unsized object")
    return self.shape[0]


def _iterate(self):
    if not self.shape:
        raise TypeError("iteration over a 0-d array")
    return (self[i] for i in range(self.shape[0]))


def _bool(self):
    if self.size == 1 and self.node.op == "constant":
        return bool(self.node.attrs[0])
    raise concretization("bool()")


def _represent(self):
    self._cell.trace.notes["text"] = True  # which must not be among the results
    return f"Tracer({self.dtype}, shape={self.shape})"


# ------------------------------------------------------------------------------------ methods


def _reduction(name: str) -> Any:
    function = getattr(namespace, name)

    def method(self, axis=None, dtype=None, out=None, keepdims=False, **options):
        if options:  # where, initial
            options |= {"axis": axis, "dtype": dtype, "out": out, "keepdims": keepdims}
            return _by_ufunc(name, self, options)
        if dtype is not None:
            options["dtype"] = dtype
        result = function(self, axis=axis, keepdims=bool(keepdims), **options)
        return stored(out, result)

    return method


def _by_ufunc(name: str, x: Tracer, options: dict) -> Any:
    ufunc = _UFUNCS.get(name)
    if ufunc is None:
        raise concretization(f"{name}() with {', '.join(options)}")
    return _protocols.array_ufunc(ufunc, "reduce", (x,), options)


_UFUNCS = {name: getattr(np, ufunc) for name, ufunc in REPEATED.items()}


def _argument(name: str) -> Any:
    function = getattr(namespace, name)

    def method(self, axis=None, out=None, *, keepdims=False):
        result = function(self, axis=axis, keepdims=bool(keepdims))
        return stored(out, result)

    return method


def _spread(name: str) -> Any:
    function = getattr(namespace, name)

    def method(self, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, correction=None):
        x = self if dtype is None else cast(self, dtype)
        ddof = ddof if correction is None else correction
        result = function(x, axis=axis, correction=ddof, keepdims=bool(keepdims))
        return stored(out, result)

    return method


def _logical(name: str) -> Any:
    function = getattr(namespace, name)

    def method(self, axis=None, out=None, keepdims=False, **options):
        if options:
            options |= {"axis": axis, "out": out, "keepdims": keepdims}
            return _by_ufunc(name, self, options)
        result = function(self, axis=axis, keepdims=bool(keepdims))
        return stored(out, result)

    return method


def _lengths(args: tuple) -> Any:
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _reshape(self, *shape, order="C", copy=None):
    shape = shape[0] if len(shape) == 1 else shape
    if order == "F":
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return namespace.reshape(_transpose(self), shape[::-1]).T
    if order not in ("C", "A", "K"):
        raise concretization(f"reshape(order={order!r})")
    return namespace.reshape(self, shape, copy=copy)


def _transpose(self, *axes):
    axes = _lengths(axes)
    if not axes or axes == (None,):
        axes = range(self.ndim)[::-1]
    return namespace.permute_dims(self, axes)


def _ravel(self, order="C"):
    return _reshape(self, -1, order=order)


def _flatten(self, order="C"):
    return _ravel(self, order).snapshot()


def _astype(self, dtype, order="K", casting="unsafe", subok=True, copy=True):
    if casting != "unsafe" and not np.can_cast(self.dtype, dtype, casting):
        raise TypeError(
            f"Cannot cast array data from {self.dtype!r} to {np.dtype(dtype)!r} according to the "
            f"rule {casting!r}"
        )
    return namespace.astype(self, dtype, copy=copy)


def _fill(self, value):
    _indexing.setitem(self, Ellipsis, value)


def _clip(self, min=None, max=None, out=None, **options):
    result = _protocols.clip(self, min, max)
    return stored(out, result)


def _round(self, decimals=0, out=None):
    result = namespace.round(self, decimals)
    return stored(out, result)


def _take(self, indices, axis=None, out=None, mode="raise"):
    if mode != "raise":
        raise concretization(f"take(mode={mode!r})")
    result = namespace.take(self, indices, axis=axis)
    return stored(out, result)


def _cumulative(name: str) -> Any:
    function = getattr(namespace, name)

    def method(self, axis=None, dtype=None, out=None):
        result = function(self, axis=axis, dtype=dtype)
        return stored(out, result)

    return method


def _dot(self, other):
    return _protocols.dot(self, other)


def _sort(self, axis=-1, **options):
    self.write(namespace.sort(self, axis=axis).node)


def _view(self, dtype=None):
    if dtype is not None and np.dtype(dtype) != self.dtype:
        raise concretization("view() in another dtype")
    return self.reshaped(self.shape)


def _to_device(self, device, /, *, stream=None):
    from rtxarr._device import device as resolve

    if resolve(device) != self.device:
        raise concretization("to_device() to another device")
    return self


def _set_part(name: str) -> Any:
    def get(self):
        return getattr(namespace, name)(self) if name == "imag" or self.dtype.kind == "c" else self

    return property(get)


def _transposed(self):
    return _transpose(self)


for _name in ("sum", "prod", "mean", "max", "min"):
    setattr(Tracer, _name, _reduction(_name))
for _name in ("all", "any"):
    setattr(Tracer, _name, _logical(_name))
for _name in ("argmax", "argmin"):
    setattr(Tracer, _name, _argument(_name))
for _name in ("var", "std"):
    setattr(Tracer, _name, _spread(_name))
for _name, _other in (("cumsum", "cumulative_sum"), ("cumprod", "cumulative_prod")):
    setattr(Tracer, _name, _cumulative(_other))
for _name, _function in {
    "__divmod__": _divmod,
    "__pow__": _pow,
    "__len__": _length,
    "__iter__": _iterate,
    "__bool__": _bool,
    "__repr__": _represent,
    "__getitem__": _indexing.getitem,
    "__setitem__": _indexing.setitem,
    "__array_ufunc__": lambda self, ufunc, method, *inputs, **kwargs: _protocols.array_ufunc(
        ufunc, method, inputs, kwargs
    ),
    "__array_function__": lambda self, function, types, args, kwargs: _protocols.array_function(
        function, args, kwargs
    ),
    "__cupy_override_elementwise_kernel__": lambda self, kernel, *args, **kwargs: (
        _protocols.cupy_kernel(kernel, args, kwargs)
    ),
    "__rtxarr_function__": lambda self, function, args, kwargs: _library.take_over(
        function, args, kwargs
    ),
    "__array_namespace__": lambda self, /, *, api_version=None: namespace,
    "argsort": lambda self, axis=-1, **options: namespace.argsort(self, axis=axis),
    "astype": _astype,
    "clip": _clip,
    "conj": lambda self: elementwise(np.conjugate, self) if self.dtype.kind == "c" else self,
    "conjugate": lambda self: elementwise(np.conjugate, self) if self.dtype.kind == "c" else self,
    "copy": lambda self, order="C": self.snapshot(),
    "__copy__": lambda self: self.snapshot(),
    "__deepcopy__": lambda self, memo: self.snapshot(),
    "diagonal": lambda self, offset=0: namespace.linalg.diagonal(self, offset=offset),
    "dot": _dot,
    "fill": _fill,
    "flatten": _flatten,
    "ravel": _ravel,
    "repeat": lambda self, repeats, axis=None: namespace.repeat(self, repeats, axis=axis),
    "reshape": _reshape,
    "round": _round,
    "sort": _sort,
    "squeeze": lambda self, axis=None: namespace.squeeze(self, axis) if 1 in self.shape else self,
    "swapaxes": lambda self, a, b: namespace.swapaxes(self, a, b),
    "take": _take,
    "to_device": _to_device,
    "trace": lambda self, offset=0: namespace.linalg.trace(self, offset=offset),
    "transpose": _transpose,
    "view": _view,
}.items():
    setattr(Tracer, _name, _function)
for _name, _what in {
    "__float__": "float()",
    "__int__": "int()",
    "__complex__": "complex()",
    "__index__": "use as an index or a size",
    "__array__": "conversion to a NumPy array",
    "__dlpack__": "DLPack",
    "__dlpack_device__": "DLPack",
    "__contains__": "the operator in",
    "__reduce_ex__": "pickling",
    "get": "get()",
    "item": "item()",
    "nonzero": "nonzero()",
    "tobytes": "tobytes()",
    "tolist": "tolist()",
}.items():
    setattr(Tracer, _name, _refuse(_what))
for _name, _property in {
    "T": property(_transposed),
    "mT": property(namespace.matrix_transpose),
    "real": _set_part("real"),
    "imag": _set_part("imag"),
    "flat": property(_refuse("flat")),
    "flags": property(_refuse("flags")),
    "ctypes": property(_refuse("ctypes")),
    "data": property(_refuse("data")),
}.items():
    setattr(Tracer, _name, _property)
