"""Sorting, searching and sets: results are untracked, except sorted values."""

from typing import NamedTuple

from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, nondifferentiable
from rtxarr.ops._index import take_along_axis

__all__ = [
    "argmax",
    "argmin",
    "argsort",
    "isin",
    "nonzero",
    "searchsorted",
    "sort",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
]


@nondifferentiable
def argmax(x, /, *, axis=None, keepdims=False):
    """Give the index of the first largest element (of the first NaN, if there is one).

    Parameters
    ----------
    x : array or Tensor
    axis : int, optional
        The flattened array by default.
    keepdims : bool, default False
        Keep the reduced axis with length one.

    Returns
    -------
    array or Tensor of int64; not differentiable
    """
    return namespace(x).argmax(x, axis=axis, keepdims=keepdims)


@nondifferentiable
def argmin(x, /, *, axis=None, keepdims=False):
    """Give the index of the first smallest element (of the first NaN, if there is one).

    Parameters
    ----------
    x : array or Tensor
    axis : int, optional
        The flattened array by default.
    keepdims : bool, default False
        Keep the reduced axis with length one.

    Returns
    -------
    array or Tensor of int64; not differentiable
    """
    return namespace(x).argmin(x, axis=axis, keepdims=keepdims)


@nondifferentiable
def nonzero(x, /):
    """Give the indices of the nonzero elements, one array an axis.

    Parameters
    ----------
    x : array or Tensor, at least 1-D

    Returns
    -------
    tuple of array or Tensor of int64, shape (n_nonzero,); not differentiable
    """
    return tuple(namespace(x).nonzero(x))


@nondifferentiable
def searchsorted(x1, x2, /, *, side="left", sorter=None):
    """Give where to insert the values ``x2`` into the sorted 1-D array ``x1``.

    Parameters
    ----------
    x1 : array or Tensor of a real dtype, shape (n,)
    x2 : array or Tensor of a real dtype, any shape
    side : {"left", "right"}, default "left"
        Before or after elements of ``x1`` that are equal.
    sorter : array of int, shape (n,), optional
        Indices that sort ``x1``, if it is not sorted.

    Returns
    -------
    array or Tensor of int64, shape of ``x2``; not differentiable
    """
    return namespace(x1, x2).searchsorted(x1, x2, side=side, sorter=sorter)


@nondifferentiable
def argsort(x, /, *, axis=-1, descending=False, stable=True):
    """Give the indices that sort ``x`` along one axis.

    Parameters
    ----------
    x : array or Tensor
    axis : int, default -1
    descending : bool, default False
    stable : bool, default True
        Equal elements keep their order.

    Returns
    -------
    array or Tensor of int64, shape of ``x``; not differentiable
    """
    return namespace(x).argsort(x, axis=axis, descending=descending, stable=stable)


@differentiable
def sort(x, /, *, axis=-1, descending=False, stable=True):
    """Sort along one axis.

    Parameters
    ----------
    x : array or Tensor
    axis : int, default -1
    descending : bool, default False
    stable : bool, default True
        Equal elements keep their order (and the gradient follows it).
    """
    return namespace(x).sort(x, axis=axis, descending=descending, stable=stable)


def _sort_rule(g, x, axis, descending):
    order = argsort(x, axis=axis, descending=descending, stable=True)
    return take_along_axis(g, argsort(order, axis=axis, stable=True), axis=axis)


sort.defvjps(x=_sort_rule)


class UniqueAll(NamedTuple):
    """Result of :func:`unique_all`."""

    values: object
    indices: object
    inverse_indices: object
    counts: object


class UniqueCounts(NamedTuple):
    """Result of :func:`unique_counts`."""

    values: object
    counts: object


class UniqueInverse(NamedTuple):
    """Result of :func:`unique_inverse`."""

    values: object
    inverse_indices: object


@nondifferentiable
def unique_all(x, /):
    """Give the distinct values, their first places, how to rebuild ``x``, and their counts.

    Parameters
    ----------
    x : array or Tensor

    Returns
    -------
    UniqueAll
        ``values``, ``indices`` and ``counts`` of shape (n_distinct,), ``inverse_indices`` of the
        shape of ``x``; not differentiable.
    """
    return UniqueAll(*namespace(x).unique_all(x))


@nondifferentiable
def unique_counts(x, /):
    """Give the distinct values and how often each occurs.

    Parameters
    ----------
    x : array or Tensor

    Returns
    -------
    UniqueCounts
        ``values`` and ``counts``, of shape (n_distinct,); not differentiable.
    """
    return UniqueCounts(*namespace(x).unique_counts(x))


@nondifferentiable
def unique_inverse(x, /):
    """Give the distinct values and, for each element of ``x``, which one it is.

    Parameters
    ----------
    x : array or Tensor

    Returns
    -------
    UniqueInverse
        ``values`` of shape (n_distinct,), ``inverse_indices`` of the shape of ``x``; not
        differentiable.
    """
    return UniqueInverse(*namespace(x).unique_inverse(x))


@nondifferentiable
def unique_values(x, /):
    """Give the distinct values.

    Parameters
    ----------
    x : array or Tensor

    Returns
    -------
    array or Tensor, shape (n_distinct,); not differentiable
    """
    return namespace(x).unique_values(x)


@nondifferentiable
def isin(x1, x2, /, *, invert=False):
    """Tell which elements of ``x1`` occur in ``x2``.

    Parameters
    ----------
    x1, x2 : array, Tensor or scalar, any shape
    invert : bool, default False
        Tell which do not.

    Returns
    -------
    array or Tensor of bool, shape of ``x1``
    """
    return namespace(x1, x2).isin(x1, x2, invert=invert)
