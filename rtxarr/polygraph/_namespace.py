"""The array API over tracers: what ``tracer.__array_namespace__()`` gives.

Functions have the names, parameters and results of the standard's, with NumPy's promotion. This
module is itself the namespace.
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

import numpy as np
from numpy import e, inf, nan, newaxis, pi

from rtxarr import dtypes
from rtxarr._info import API_VERSION as __array_api_version__
from rtxarr._info import NamespaceInfo as __array_namespace_info__
from rtxarr.dtypes import (
    bfloat16,
    bool,
    can_cast,
    complex64,
    complex128,
    finfo,
    float16,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    uint8,
    uint16,
    uint32,
    uint64,
)
from rtxarr.polygraph import _elementwise as maps
from rtxarr.polygraph import _fft as fft
from rtxarr.polygraph import _ir
from rtxarr.polygraph import _linalg as linalg
from rtxarr.polygraph._calls import called
from rtxarr.polygraph._elementwise import as_array, cast_node, elementwise, layout_from, where
from rtxarr.polygraph._indexing import wrapped
from rtxarr.polygraph._linalg import matmul, matrix_transpose, tensordot, vecdot
from rtxarr.polygraph._reduce import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    cumulative_max,
    cumulative_min,
    cumulative_prod,
    cumulative_sum,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from rtxarr.polygraph._trace import Tracer, concretization, current


def result_type(*arrays_and_dtypes: Any) -> Any:
    """Return the dtype that an operation over the arguments computes in."""
    kinds = [
        maps.kind_of(x) if isinstance(x, (Tracer, maps.Scalar)) else x for x in arrays_and_dtypes
    ]
    return dtypes.result_type(
        *(k(1) if isinstance(k, type) and k in maps._WEAK else k for k in kinds)
    )


# ------------------------------------------------------------------------------- elementwise


_UFUNCS = (
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "reciprocal",
    "remainder",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
)


def _ufunc(name: str, ufunc: np.ufunc) -> Any:
    function: Any
    if ufunc.nin == 1:
        function = lambda x, /: elementwise(ufunc, x)  # noqa: E731
    else:
        function = lambda x1, x2, /: elementwise(ufunc, x1, x2)  # noqa: E731
    function.__name__ = function.__qualname__ = name
    return function


for _ufunc_name in _UFUNCS:
    globals()[_ufunc_name] = _ufunc(_ufunc_name, getattr(np, _ufunc_name))


def sign(x, /):
    """Return -1, 0 or 1; NaN stays NaN."""
    return elementwise(np.sign, x)


def round(x, /, decimals=0):
    """Round to the nearest integer, halves to even."""
    x = as_array(x)
    if decimals:
        return called("round", (x,), {"decimals": decimals}, [(x.dtype, x.shape)])
    return x if x.dtype.kind in "iub" else elementwise(np.rint, x)


def real(x, /):
    """Return the real part."""
    x = as_array(x)
    return x.part("real") if x.dtype.kind == "c" else x


def imag(x, /):
    """Return the imaginary part."""
    x = as_array(x)
    return x.part("imag") if x.dtype.kind == "c" else zeros_like(x)


def astype(x, dtype, /, *, copy=True, device=None):
    """Return ``x`` in another dtype: a copy unless ``copy`` is False."""
    x = as_array(x)
    same = x.dtype == np.dtype(dtype)
    if same:
        return x.snapshot() if copy else x
    return maps.cast(x, dtype)


def clip(x, /, min=None, max=None):
    """Limit elements to ``[min, max]``, in the dtype of ``x``; a NaN bound gives NaN."""
    x = as_array(x)
    for bound, test in ((min, np.less), (max, np.greater)):
        if bound is None:
            continue
        if type(bound) is int and x.dtype.kind in "iu":
            limits = np.iinfo(x.dtype)
            if bound < limits.min if test is np.less else bound > limits.max:
                continue  # nothing is beyond it
        limit = as_array(bound)
        beyond = elementwise(
            np.logical_or, elementwise(test, x, bound), elementwise(np.isnan, limit)
        )
        x = where(beyond, maps.cast(limit, x.dtype), x)
    return x


# ------------------------------------------------------------------------------------ shapes


def _axis(axis: int, ndim: int) -> int:
    return np.lib.array_utils.normalize_axis_index(axis, ndim)


def reshape(x, /, shape, *, copy=None):
    """Return ``x`` in another shape; one length may be -1."""
    x = as_array(x)
    shape = (shape,) if not isinstance(shape, (tuple, list)) else tuple(shape)
    shape = tuple(operator.index(n) for n in shape)
    if shape.count(-1) == 1:
        rest = math.prod(n for n in shape if n != -1)
        if not rest or x.size % rest:
            raise ValueError(f"cannot reshape array of size {x.size} into shape {shape}")
        shape = tuple(x.size // rest if n == -1 else n for n in shape)
    if math.prod(shape) != x.size or builtins.any(n < 0 for n in shape):
        raise ValueError(f"cannot reshape array of size {x.size} into shape {shape}")
    out = x.reshaped(shape)
    if copy is False and out._cell is not x._cell:
        raise ValueError("Unable to avoid creating a copy while reshaping.")
    return out.snapshot() if copy else out


def permute_dims(x, /, axes):
    """Return ``x`` with its axes in another order."""
    x = as_array(x)
    axes = tuple(_axis(a, x.ndim) for a in axes)
    if sorted(axes) != list(range(x.ndim)):
        raise ValueError(f"axes must name each of the {x.ndim} axes once, got {axes}")
    return x.permuted(axes)


def moveaxis(x, source, destination, /):
    """Move axes to other places and keep the order of the rest."""
    x = as_array(x)
    sources = (source,) if isinstance(source, int) else tuple(source)
    places = (destination,) if isinstance(destination, int) else tuple(destination)
    sources = [_axis(a, x.ndim) for a in sources]
    places = [_axis(a, x.ndim) for a in places]
    if len(sources) != len(places):
        raise ValueError(
            "`source` and `destination` arguments must have the same number of elements"
        )
    order = [a for a in range(x.ndim) if a not in sources]
    for place, a in sorted(zip(places, sources, strict=True)):
        order.insert(place, a)
    return x.permuted(order)


def swapaxes(x, axis1, axis2, /):
    """Return ``x`` with two axes exchanged, as NumPy's function of that name."""
    x = as_array(x)
    axes = list(range(x.ndim))
    a, b = _axis(axis1, x.ndim), _axis(axis2, x.ndim)
    axes[a], axes[b] = axes[b], axes[a]
    return x.permuted(axes)


def expand_dims(x, /, axis=0):
    """Insert axes of length one."""
    x = as_array(x)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    ndim = x.ndim + len(axes)
    axes = tuple(_axis(a, ndim) for a in axes)
    lengths = iter(x.shape)
    return x.reshaped(tuple(1 if i in axes else next(lengths) for i in range(ndim)))


def squeeze(x, /, axis=None):
    """Remove axes of length one."""
    x = as_array(x)
    if axis is None:
        axis = tuple(i for i, n in enumerate(x.shape) if n == 1)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(_axis(a, x.ndim) for a in axes)
    if builtins.any(x.shape[a] != 1 for a in axes):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    return x.reshaped(tuple(n for i, n in enumerate(x.shape) if i not in axes))


def broadcast_to(x, /, shape):
    """Repeat ``x`` along axes of length one to fill ``shape``."""
    x = as_array(x)
    return x.broadcasted((shape,) if isinstance(shape, int) else tuple(shape))


def broadcast_shapes(*shapes):
    """Return the shape that arrays of ``shapes`` broadcast to."""
    return np.broadcast_shapes(*shapes)


def broadcast_arrays(*arrays):
    """Broadcast all arrays against each other."""
    found = [as_array(a) for a in arrays]
    shape = np.broadcast_shapes(*(a.shape for a in found))
    return tuple(a.broadcasted(shape) for a in found)


def flip(x, /, *, axis=None):
    """Reverse the order of the elements along axes."""
    x = as_array(x)
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = {_axis(a, x.ndim) for a in axes}
    key = tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim))
    return x.indexed((*key, Ellipsis))


def concat(arrays, /, *, axis=0):
    """Join arrays along an existing axis; None flattens them first."""
    found = [as_array(a) for a in arrays]
    if not found:
        raise ValueError("need at least one array to concatenate")
    if axis is None:
        found, axis = [reshape(a, (-1,)) for a in found], 0
    axis = _axis(axis, found[0].ndim)
    shapes = {a.shape[:axis] + a.shape[axis + 1 :] for a in found}
    if len(shapes) > 1 or len({a.ndim for a in found}) > 1:
        raise ValueError(
            "all the input array dimensions except for the concatenation axis must match"
        )
    dtype = maps.where_dtype(*(a.dtype for a in found))
    node = _ir.concat([cast_node(a.node, dtype) for a in found], axis)
    return current().fresh(node, layout_from(node.shape, *found))


def stack(arrays, /, *, axis=0):
    """Join arrays of one shape along a new axis."""
    found = [as_array(a) for a in arrays]
    if not found:
        raise ValueError("need at least one array to stack")
    if len({a.shape for a in found}) > 1:
        raise ValueError("all input arrays must have the same shape")
    axis = _axis(axis, found[0].ndim + 1)
    return concat([expand_dims(a, axis) for a in found], axis=axis)


def unstack(x, /, *, axis=0):
    """Split an array along one axis into arrays without that axis."""
    x = moveaxis(x, axis, 0)
    return tuple(x[i, ...] for i in range(x.shape[0]))


def roll(x, /, shift, *, axis=None):
    """Shift the elements along axes, those pushed out coming back at the other end."""
    x = given = as_array(x)
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    shifts = (shift,) if not isinstance(shift, (tuple, list)) else tuple(shift)
    axes, shifts = np.broadcast_arrays(axes, shifts)
    for a, n in zip(axes.tolist(), shifts.tolist(), strict=True):
        a = _axis(a, x.ndim)
        n = n % x.shape[a] if x.shape[a] else 0
        if n:
            before = (slice(None),) * a
            x = concat(
                (x[(*before, slice(-n, None), ...)], x[(*before, slice(None, -n), ...)]), axis=a
            )
    return current().fresh(x.node, layout_from(x.shape, given))


def tile(x, repetitions, /):
    """Put copies of ``x`` side by side, ``repetitions[i]`` of them along axis ``i``."""
    x = as_array(x)
    repetitions = (repetitions,) if isinstance(repetitions, int) else tuple(repetitions)
    ndim = builtins.max(len(repetitions), x.ndim)
    counts = (1,) * (ndim - len(repetitions)) + repetitions
    shape = (1,) * (ndim - x.ndim) + x.shape
    wide = x.reshaped(tuple(n for length in shape for n in (1, length)))
    wide = wide.broadcasted(tuple(n for pair in zip(counts, shape, strict=True) for n in pair))
    return current().fresh(
        _ir.reshape(wide.node, tuple(c * n for c, n in zip(counts, shape, strict=True)))
    )


def repeat(x, repeats, /, *, axis=None):
    """Repeat each element along one axis (of the flattened array by default)."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    if not isinstance(repeats, int):
        raise concretization("repeat() by an array of counts")
    axis = _axis(axis, x.ndim)
    before, n, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    wide = _ir.reshape(x.node, (*before, n, 1, *after))
    wide = _ir.broadcast(wide, (*before, n, repeats, *after))
    return current().fresh(_ir.reshape(wide, (*before, n * repeats, *after)))


def meshgrid(*arrays, indexing="xy"):
    """Make coordinate arrays of a grid from 1-D coordinate vectors."""
    found = [as_array(a) for a in arrays]
    n = len(found)
    order = list(range(n))
    if indexing == "xy" and n > 1:
        order[0], order[1] = 1, 0
    shape = [0] * n
    for i, place in enumerate(order):
        shape[place] = found[i].size
    out = []
    for i, a in enumerate(found):
        line = reshape(a, tuple(-1 if j == order[i] else 1 for j in range(n)))
        out.append(line.broadcasted(tuple(shape)).snapshot())
    return tuple(out)


def tril(x, /, *, k=0):
    """Return the lower triangle of matrices, zeros above."""
    return _triangle(x, k, "greater_equal")


def triu(x, /, *, k=0):
    """Return the upper triangle of matrices, zeros below."""
    x = as_array(x)
    return _triangle(x, k - 1, "less")


def _triangle(x, k, test):
    x = as_array(x)
    shape = x.shape[-2:]
    rows, columns = (_ir.iota(shape, axis, np.int64) for axis in (0, 1))
    shift = _ir.broadcast(_ir.constant(operator.index(k), np.int64), shape)
    inside = _ir.map_node(test, _ir.map_node("add", rows, shift), columns)
    return where(current().fresh(inside), x, _zero(x.dtype))


def _zero(dtype):
    return current().fresh(_ir.constant(0, dtype))


# --------------------------------------------------------------------------------- creation


def asarray(obj, /, *, dtype=None, device=None, copy=None):
    """Return a tracer for anything that is or becomes an array."""
    out = as_array(obj, dtype)
    return out.snapshot() if copy and out is obj else out


def ascontiguousarray(x):
    """Return an array of at least one axis; programs lay out their own memory."""
    x = as_array(x)
    return x if x.ndim else reshape(x, (1,))


def full(shape, fill_value, *, dtype=None, device=None):
    """Return an array filled with one value."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    value = as_array(fill_value, dtype)
    return current().fresh_array(_ir.broadcast(value.node, shape))


def zeros(shape, *, dtype=None, device=None):
    """Return an array of zeros."""
    return full(shape, 0, dtype=float64 if dtype is None else dtype)


def ones(shape, *, dtype=None, device=None):
    """Return an array of ones."""
    return full(shape, 1, dtype=float64 if dtype is None else dtype)


def empty(shape, *, dtype=None, device=None):
    """Return an array, of zeros here."""
    return zeros(shape, dtype=dtype)


def full_like(x, /, fill_value, *, dtype=None, device=None):
    """Return an array of the shape of ``x`` filled with one value."""
    x = as_array(x)
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype)


def zeros_like(x, /, *, dtype=None, device=None):
    """Return zeros of the shape of ``x``."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x, /, *, dtype=None, device=None):
    """Return ones of the shape of ``x``."""
    return full_like(x, 1, dtype=dtype)


empty_like = zeros_like


def arange(start, /, stop=None, step=1, *, dtype=None, device=None):
    """Return evenly spaced values in ``[start, stop)``."""
    if stop is None:
        start, stop = 0, start
    numbers = [n.known() if isinstance(n, maps.Scalar) else n for n in (start, stop, step)]
    if builtins.all(type(n) is int for n in numbers) and (
        dtype is None or np.dtype(dtype).kind in "iu"
    ):
        start, stop, step = numbers
        kind = np.dtype(np.int64 if dtype is None else dtype)
        shape = (len(range(start, stop, step)),)
        node = _ir.iota(shape, 0, kind)
        for op, n, plain in (("multiply", step, 1), ("add", start, 0)):
            if n != plain:
                node = _ir.map_node(op, node, _ir.broadcast(_ir.constant(n, kind), shape))
        return current().fresh(node)
    return maps.from_numpy(np.arange(*numbers, dtype=dtype))


def linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True):
    """Return ``num`` evenly spaced values from ``start`` to ``stop``."""
    numbers = [n.known() if isinstance(n, maps.Scalar) else n for n in (start, stop)]
    if builtins.any(isinstance(n, Tracer) for n in numbers):
        raise concretization("linspace()")
    return maps.from_numpy(
        np.linspace(*numbers, operator.index(num), dtype=dtype, endpoint=endpoint)
    )


def eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None):
    """Return a matrix with ones on the ``k``-th diagonal."""
    shape = (operator.index(n_rows), operator.index(n_rows if n_cols is None else n_cols))
    rows, columns = (_ir.iota(shape, axis, np.int64) for axis in (0, 1))
    shift = _ir.broadcast(_ir.constant(k, np.int64), shape)
    on = _ir.map_node("equal", _ir.map_node("add", rows, shift), columns)
    return current().fresh(cast_node(on, np.dtype(float64 if dtype is None else dtype)))


def from_dlpack(x, /, *, device=None, copy=None):
    """Take over an array of another library."""
    if isinstance(x, Tracer):
        return x.snapshot() if copy else x
    return as_array(current().xp.from_dlpack(x))


# --------------------------------------------------------------------------------- indexing


def take(x, indices, /, *, axis=None):
    """Take elements along one axis."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    axis = _axis(axis, x.ndim)
    index = as_array(indices)
    return current().fresh(_ir.gather(x.node, wrapped(index, x.shape[axis]).node, axis))


def take_along_axis(x, indices, /, *, axis=-1):
    """Take, along one axis, the elements that ``indices`` names for each other position."""
    x, index = as_array(x), as_array(indices)
    if x.ndim != index.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    axis = _axis(axis, x.ndim)
    rest = np.broadcast_shapes(
        x.shape[:axis] + (1,) + x.shape[axis + 1 :],
        index.shape[:axis] + (1,) + index.shape[axis + 1 :],
    )
    node = _ir.broadcast(x.node, rest[:axis] + (x.shape[axis],) + rest[axis + 1 :])
    index = wrapped(index, x.shape[axis])
    index_node = _ir.broadcast(index.node, rest[:axis] + (index.shape[axis],) + rest[axis + 1 :])
    return current().fresh(_ir.take_along(node, index_node, axis))


def diff(x, /, *, axis=-1, n=1, prepend=None, append=None):
    """Return the differences of neighbours along one axis, ``n`` times."""
    x = as_array(x)
    axis = _axis(axis, x.ndim)
    ends = [as_array(end) for end in (prepend, append) if end is not None]
    if ends:
        parts = [as_array(part) for part in (prepend, x, append) if part is not None]
        x = concat(parts, axis=axis)
    before = (slice(None),) * axis
    test = np.not_equal if x.dtype == np.bool else np.subtract
    for _ in range(n):
        x = elementwise(test, x[(*before, slice(1, None), ...)], x[(*before, slice(None, -1), ...)])
    return x


# ----------------------------------------------------------------------- calls of the library


def sort(x, /, *, axis=-1, descending=False, stable=True):
    """Sort along one axis."""
    x = as_array(x)
    options = {"axis": _axis(axis, x.ndim), "descending": descending, "stable": stable}
    return called("sort", (x,), options, [(x.dtype, x.shape)])


def argsort(x, /, *, axis=-1, descending=False, stable=True):
    """Return the indices that sort ``x`` along one axis."""
    x = as_array(x)
    options = {"axis": _axis(axis, x.ndim), "descending": descending, "stable": stable}
    return called("argsort", (x,), options, [(np.dtype(int64), x.shape)])


def searchsorted(x1, x2, /, *, side="left", sorter=None):
    """Return where to insert the values ``x2`` into the sorted 1-D array ``x1``."""
    x1, x2 = as_array(x1), as_array(x2)
    if sorter is not None:
        x1 = take(x1, sorter, axis=0)
    return called("searchsorted", (x1, x2), {"side": side}, [(np.dtype(int64), x2.shape)])


def isin(x1, x2, /, *, invert=False):
    """Tell which elements of ``x1`` occur in ``x2``."""
    x1 = as_array(x1)
    return called("isin", (x1, as_array(x2)), {"invert": invert}, [(np.dtype(bool), x1.shape)])


def nonzero(x, /):
    """Refuse: how many there are depends on the values."""
    raise concretization("nonzero()")


def _refused(name: str) -> Any:
    def function(x, /):
        raise concretization(f"{name}()")

    function.__name__ = function.__qualname__ = name
    return function


unique_all = _refused("unique_all")
unique_counts = _refused("unique_counts")
unique_inverse = _refused("unique_inverse")
unique_values = _refused("unique_values")

__all__ = [
    *_UFUNCS,
    "__array_api_version__",
    "__array_namespace_info__",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "astype",
    "bfloat16",
    "bool",
    "broadcast_arrays",
    "broadcast_shapes",
    "broadcast_to",
    "can_cast",
    "clip",
    "complex128",
    "complex64",
    "concat",
    "count_nonzero",
    "cumulative_max",
    "cumulative_min",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "e",
    "empty",
    "empty_like",
    "expand_dims",
    "eye",
    "fft",
    "finfo",
    "flip",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "full",
    "full_like",
    "iinfo",
    "imag",
    "inf",
    "int16",
    "int32",
    "int64",
    "int8",
    "isdtype",
    "isin",
    "linalg",
    "linspace",
    "matmul",
    "matrix_transpose",
    "max",
    "mean",
    "meshgrid",
    "min",
    "moveaxis",
    "nan",
    "newaxis",
    "nonzero",
    "ones",
    "ones_like",
    "permute_dims",
    "pi",
    "prod",
    "real",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "searchsorted",
    "sign",
    "sort",
    "squeeze",
    "stack",
    "std",
    "sum",
    "swapaxes",
    "take",
    "take_along_axis",
    "tensordot",
    "tile",
    "tril",
    "triu",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]
