"""Indexing, taking and scattering, and their derivative rules."""

import math

import numpy as np

from rtxarr._device import namespace
from rtxarr.autograd._mode import TRACED, is_recording, state
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import Leaf, Tensor, mark_changed, raw
from rtxarr.ops._manipulate import broadcast_to, only_axis

__all__ = [
    "getitem",
    "index_add",
    "index_update",
    "take",
    "take_along_axis",
]


def unwrap(key):
    """Take raw arrays out of the tensors in an index."""
    if isinstance(key, tuple):
        return tuple(unwrap(k) for k in key)
    return raw(key)


def _is_basic(key):
    """Tell whether an index only slices, so that no element is taken twice."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in parts)


@differentiable(movement=True, view=True)
def getitem(x, key, /):
    """Give ``x[key]``.

    Parameters
    ----------
    x : array or Tensor
    key : any NumPy index
        Slices, integers, None, masks and index arrays.
    """
    return x[key]


getitem.defvjps(x=lambda g, key, x_shape: _index_add_zeros(g, key, x_shape))


@differentiable(movement=True)
def _index_add_zeros(values, key, shape, /):
    """Add ``values`` at ``key`` into zeros of ``shape``, duplicates included."""
    xp = namespace(values)
    if _is_basic(key):
        out = xp.zeros(shape, dtype=values.dtype)
        out[key] = values
        return out
    rows = xp.reshape(xp.arange(math.prod(shape)), shape)[key]  # flat positions that were read
    return _scatter_flat(xp, values, rows, shape)


_index_add_zeros.defvjps(values=lambda g, key: getitem(g, key))


def _scatter_flat(xp, values, positions, shape):
    from rtxarr.ops._segment import scatter_add_rows

    size = math.prod(shape)
    flat = scatter_add_rows(xp.reshape(values, (-1, 1)), xp.reshape(positions, (-1,)), size)
    return xp.reshape(flat, shape)


def _refuse_none(values):
    if values is None:  # which NumPy writes as NaN
        raise TypeError("values must be an array or a number, got None")


@differentiable
def index_update(x, key, values, /):
    """Give a copy of ``x`` with ``x[key] = values``.

    Parameters
    ----------
    x : array or Tensor
    key : any NumPy index
        Where it names an element twice, which value is kept is not defined, and the gradient
        goes to both.
    values : array, Tensor or scalar, broadcast to the shape of ``x[key]``
    """
    _refuse_none(values)
    out = namespace(x).asarray(x, copy=True)
    out[key] = values
    return out


index_update.defvjps(
    x=lambda g, key: index_update(g, key, 0),
    values=lambda g, key: getitem(g, key),
)


@explained
def index_add(x, key, values, /):
    """Give a copy of ``x`` with ``values`` added at ``key``, duplicates included.

    Parameters
    ----------
    x : array or Tensor
    key : any NumPy index
    values : array, Tensor or scalar, broadcast to the shape of ``x[key]``
    """
    _refuse_none(values)
    array = raw(x)
    key = unwrap(key)
    if not hasattr(values, "dtype"):
        values = namespace(array).asarray(values, dtype=array.dtype)
    shape = array[key].shape
    try:
        values = broadcast_to(values, shape)
    except ValueError:
        raise ValueError(
            f"values must broadcast to the shape of x[key], {shape}, got {values.shape}"
        ) from None
    return x + _index_add_zeros(values, key, array.shape)


@differentiable(movement=True)
def take(x, indices, /, *, axis=None):
    """Take elements along one axis.

    Parameters
    ----------
    x : array or Tensor
    indices : array of int, 1-D (any shape for NumPy and CuPy)
        Negative indices count from the end. On a GPU indices are not checked.
    axis : int, optional
        May be left out for a 1-D array.
    """
    return namespace(x).take(x, indices, axis=only_axis(axis, x.ndim))


def _take_rule(g, indices, x_shape, axis):
    axis = only_axis(axis, len(x_shape))
    if axis == 0:
        return _scatter_rows(g, indices, x_shape)
    return _index_add_zeros(g, (slice(None),) * axis + (indices,), x_shape)


take.defvjps(x=_take_rule)


@differentiable(movement=True)
def _scatter_rows(values, indices, shape, /, *, from_end=True):
    """Add rows of ``values`` at ``indices`` of the first axis of zeros of ``shape``.

    ``from_end``: negative indices count from the end.
    """
    from rtxarr.ops._segment import scatter_add_rows

    xp = namespace(values)
    indices = xp.reshape(indices, (-1,))
    rows = xp.reshape(values, (indices.shape[0], math.prod(shape[1:])))
    if from_end:
        indices = xp.where(indices < 0, indices + shape[0], indices)
    return xp.reshape(scatter_add_rows(rows, indices, shape[0]), shape)


_scatter_rows.defvjps(values=lambda g, indices: take(g, indices, axis=0))


@differentiable(movement=True)
def take_along_axis(x, indices, /, *, axis=-1):
    """Take, along one axis, the elements that ``indices`` names for each other position.

    Parameters
    ----------
    x : array or Tensor
    indices : array of int, as many dimensions as ``x``
        Broadcast against ``x`` except along ``axis``.
    axis : int, default -1
    """
    return namespace(x).take_along_axis(x, indices, axis=axis)


def along_axis_key(xp, indices, x_shape, axis):
    """Give the index tuple that ``take_along_axis`` stands for."""
    key = []
    for i, n in enumerate(x_shape):
        if i == axis:
            key.append(indices)
        else:
            key.append(
                xp.reshape(xp.arange(n), tuple(-1 if j == i else 1 for j in range(len(x_shape))))
            )
    return tuple(key)


def take_along_axis_gradient(g, indices, x_shape, axis):
    """Add ``g`` to zeros where ``take_along_axis`` took it from."""
    xp = namespace(indices)
    key = along_axis_key(xp, indices, x_shape, axis % len(x_shape))
    return _index_add_zeros(g, key, x_shape)


take_along_axis.defvjps(x=take_along_axis_gradient)


def set_item(tensor, key, value):
    """Implement ``tensor[key] = value``; see the notes of :class:`Tensor`."""
    key = unwrap(key)
    if state.mode & TRACED:
        tensor = state.tracing.lift(tensor)
    tracked = tensor.node is not None or (isinstance(value, Tensor) and value.node is not None)
    if tracked and is_recording():
        if type(tensor.node) is Leaf:
            raise RuntimeError(
                "a leaf that requires_grad cannot be written into while recording; use "
                "rx.index_update(x, key, values), or no_grad()"
            )
        new = index_update(tensor, key, value)
        tensor.data, tensor.node, tensor.slot, tensor.store = new.data, new.node, new.slot, None
        return
    value = raw(value)
    if isinstance(tensor.data, np.generic):
        tensor.data = np.asarray(tensor.data)
    tensor.data[key] = value
    mark_changed(tensor)
