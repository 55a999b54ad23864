"""Reading and writing by index: basic ones are views, those with arrays gather."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from rtxarr._device import is_array, namespace
from rtxarr.polygraph import _ir
from rtxarr.polygraph._elementwise import (
    BOOL,
    as_array,
    cast,
    cast_node,
    elementwise,
    layout_from,
    operand,
    tensor_of,
    where,
)
from rtxarr.polygraph._scalar import Scalar
from rtxarr.polygraph._trace import Index, Tracer, concretization, current


def _is_listed(k: Any) -> bool:
    return isinstance(k, (Tracer, list)) or (is_array(k) and not isinstance(k, np.generic))


def _normal(key: Any) -> tuple:
    """Return the parts of an index, its numbers plain ints."""
    key = key if isinstance(key, tuple) else (key,)
    parts: list[Any] = []
    for k in key:
        if k is None or k is Ellipsis:
            parts.append(k)
        elif isinstance(k, slice):
            parts.append(slice(*(n if n is None else operator.index(n) for n in _ends(k))))
        elif isinstance(k, (bool, np.bool)):
            raise concretization("an index by a bool")
        elif _is_listed(k):
            parts.append(k)
        elif isinstance(k, (int, np.integer, Scalar)):
            parts.append(operator.index(k))
        else:
            raise IndexError(
                "only integers, slices (`:`), ellipsis (`...`), numpy.newaxis (`None`) and integer "
                "or boolean arrays are valid indices"
            )
    return tuple(parts)


def _ends(k: slice) -> tuple:
    return k.start, k.stop, k.step


def getitem(x: Tracer, key: Any) -> Tracer:
    """Return ``x[key]``."""
    key = _normal(key)
    if not any(_is_listed(k) for k in key):
        return x.indexed(key)
    base, places, indices, split = _prepared(x, key)
    flat, position, before, after, shape = _gathered(base, places, indices, split)
    node = _ir.reshape(_ir.gather(flat.node, position.node, before), shape)
    return current().fresh(node, layout_from(shape, x, *indices))


def _prepared(x: Tracer, key: tuple) -> tuple[Tracer, list[int], list[Tracer], bool]:
    """Split an index into a view, and arrays along axes of it.

    Gives the view, the axes that arrays index, the arrays, and whether other axes come between.
    """
    n_axes = sum(k is not None and k is not Ellipsis for k in key)
    if any(_is_listed(k) and _dtype(k) == BOOL for k in key):
        raise concretization("an index by a mask")
    if n_axes > x.ndim:
        raise IndexError(
            f"too many indices for array: array is {x.ndim}-dimensional, but {n_axes} were indexed"
        )
    if not any(k is Ellipsis for k in key):
        key = (*key, Ellipsis)
    basic: list[Any] = []
    places, indices = [], []
    groups = []  # for each part of the key, whether it is an array: where they stand
    axis = 0
    for k in key:
        if k is None:
            basic.append(None)
            groups.append(False)
            axis += 1
        elif k is Ellipsis:
            for _ in range(x.ndim - n_axes):
                basic.append(slice(None))
                groups.append(False)
                axis += 1
            if x.ndim == n_axes:
                groups.append(False)
        elif isinstance(k, slice):
            basic.append(k)
            groups.append(False)
            axis += 1
        else:  # ints count as arrays here
            basic.append(slice(None))
            places.append(axis)
            indices.append(as_array(k) if _is_listed(k) else k)
            groups.append(True)
            axis += 1
    runs = sum(now and not before for before, now in zip([False, *groups], groups, strict=False))
    view = x.indexed((*basic, Ellipsis))
    found = []
    for place, k in zip(places, indices, strict=True):
        n = view.shape[place]
        if isinstance(k, int):
            if not -n <= k < n:
                raise IndexError(f"index {k} is out of bounds for axis {place} with size {n}")
            k = as_array(np.asarray(k % n))
        elif k.size == 0 and k.dtype == np.float64:  # NumPy takes an empty list
            k = cast(k, np.int64)
        found.append(wrapped(k, n))
    return view, places, found, runs > 1


def _dtype(k: Any) -> Any:
    return k.dtype if hasattr(k, "dtype") else np.asarray(k).dtype


def _gathered(base, places, indices, split):
    """Bring the axes that arrays index together as one, and the arrays to flat places in it.

    Gives the array, the places, how many axes come before, the order in which the axes were put,
    and the shape of the result.
    """
    rest = [i for i in range(base.ndim) if i not in places]
    before = 0 if split else sum(i < places[0] for i in rest)
    order = (*rest[:before], *places, *rest[before:])
    lengths = [base.shape[p] for p in places]
    moved = _ir.permute(base.node, order)
    shape = (*moved.shape[:before], math.prod(lengths), *moved.shape[before + len(places) :])
    index_shape = np.broadcast_shapes(*(k.shape for k in indices))
    place = None
    for k, n in zip(indices, lengths, strict=True):
        node = _ir.broadcast(cast_node(k.node, np.dtype(np.int64)), index_shape)
        if place is None:
            place = node
        else:
            width = _ir.broadcast(_ir.constant(n, np.int64), index_shape)
            place = _ir.map_node("add", _ir.map_node("multiply", place, width), node)
    trace = current()
    out = (*shape[:before], *index_shape, *shape[before + 1 :])
    return trace.fresh(_ir.reshape(moved, shape)), trace.fresh(place), before, order, out


def wrapped(index: Tracer, n: int) -> Tracer:
    """Return integer indices with negative ones counted from the end, and so none below 0."""
    if index.dtype.kind not in "iu":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    if index.dtype.kind == "u":
        return cast(index, np.int64)
    index = cast(index, np.int64)
    if index.node.op == "iota":
        return index
    if index.node.op == "constant":
        return current().fresh(_ir.constant(int(index.node.attrs[0]) % max(n, 1), np.int64))
    return where(elementwise(np.less, index, 0), elementwise(np.add, index, n), index)


def setitem(x: Tracer, key: Any, value: Any) -> None:
    """Do ``x[key] = value``."""
    if isinstance(value, (list, tuple)):
        value = as_array(value)
    if isinstance(key, (Tracer, np.ndarray)) and key.dtype == BOOL:
        _set_where(x, as_array(key), value)
        return
    key = _normal(key)
    if any(_is_listed(k) for k in key):
        _set_listed(x, key, value)
        return
    if Ellipsis not in key:
        key = (*key, Ellipsis)
    part = x.view_by(Index(key), x.look[key])
    part.write(_filling(value, part))


def _filling(value: Any, part: Tracer) -> _ir.Node:
    """Return the node of a value in the dtype and shape of what it is written to."""
    value = tensor_of(value)
    if not isinstance(value, Tracer):
        if isinstance(value, (Scalar, complex, float, int)) and part.dtype.kind in "iub":
            value = as_array(value) if part.dtype.kind == "b" or _is_float(value) else value
        elif part.dtype.kind == "f" and isinstance(value, complex):
            float(value)  # type: ignore[arg-type]  # raises as NumPy does
    if isinstance(value, Tracer):
        if value.dtype.kind == "c" and part.dtype.kind not in "cb":
            raise concretization("writing complex numbers to a real array")
        node = cast_node(value.node, part.dtype)
        if node.ndim > part.ndim and math.prod(node.shape[: node.ndim - part.ndim]) == 1:
            node = _ir.reshape(node, node.shape[node.ndim - part.ndim :])
    else:
        node = operand(value, part.dtype)
    try:
        return _ir.broadcast(node, part.shape)
    except ValueError:
        raise ValueError(
            f"could not broadcast input array from shape {node.shape} into shape {part.shape}"
        ) from None


def _is_float(value: Any) -> bool:
    return isinstance(value.value if isinstance(value, Scalar) else value, (float, complex))


def _set_where(x: Tracer, mask: Tracer, value: Any) -> None:
    """Do ``x[mask] = value`` for a value of one element."""
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexError(
            f"boolean index did not match indexed array: its shape is {mask.shape}, the array's "
            f"{x.shape}"
        )
    if getattr(value, "size", 1) != 1:
        raise concretization("writing an array by a mask")
    filled = _filling(value, x)
    test = _ir.reshape(mask.node, (*mask.shape, *(1,) * (x.ndim - mask.ndim)))
    x.write(_ir.map_node("where", _ir.broadcast(test, x.shape), filled, x.node))


def put(x: Any, value: Any, place: Any, *, axis: int) -> Any:
    """Return ``x`` with slices along an axis replaced; of several to one place the last stays."""
    out = namespace(x).asarray(x, copy=True)
    out[(*(slice(None),) * axis, place)] = value
    return out


def _set_listed(x: Tracer, key: tuple, value: Any) -> None:
    view, places, indices, split = _prepared(x, key)
    flat, place, axis, order, shape = _gathered(view, places, indices, split)
    target = current().fresh(_ir.broadcast(_ir.constant(0, x.dtype), shape))
    filled = _filling(value, target)
    filled = _ir.reshape(filled, (*shape[:axis], place.size, *shape[axis + place.ndim :]))
    position = _ir.reshape(place.node, (place.size,))
    out = _ir.call(
        put, (flat.node, filled, position), (("axis", axis),), ((flat.dtype, flat.shape),)
    )[0]
    moved = _ir.reshape(out, tuple(view.shape[i] for i in order))
    back = tuple(order.index(i) for i in range(len(order)))
    view.write(_ir.permute(moved, back))
