"""Reductions over segments and scatters with duplicate indices, and their rules.

Both work along the first axis. Segments are given by CSR row pointers, ``indptr``; scatters
by the row that each value goes to. Orders are fixed, so equal inputs give equal bits.
"""

import math

from rtxarr._checks import check_range_if_asked
from rtxarr._device import is_array, namespace
from rtxarr.autograd._op import differentiable
from rtxarr.dtypes import isdtype
from rtxarr.ops._check import check_count
from rtxarr.ops._elementwise import where
from rtxarr.ops._index import take
from rtxarr.ops._reduce import attained

__all__ = [
    "one_hot",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_sum",
]


_SEGMENT_DOC = """

    Parameters
    ----------
    values : array or Tensor, shape (n_values, ...)
    indptr : array of int, shape (n_segments + 1,)
        Segment ``i`` owns ``values[indptr[i]:indptr[i + 1]]``. On a GPU not checked to be
        non-decreasing and in range: that would read it back to the host.

    Returns
    -------
    array or Tensor, shape (n_segments, ...)

    Raises
    ------
    ValueError
        On the CPU, when ``indptr`` decreases or leaves ``[0, n_values]``.
"""

_SCATTER_DOC = """

    Parameters
    ----------
    values : array or Tensor, shape (n_values, ...)
    index : array of int, shape (n_values,)
        The row each value goes to, in ``[0, n_rows)``; may repeat. On a GPU values for other
        rows are left out.
    n_rows : int

    Returns
    -------
    array or Tensor, shape (n_rows, ...)

    Raises
    ------
    IndexError
        On the CPU, when ``index`` leaves ``[0, n_rows)``.
"""


def _check(values, index, name):
    for what, x in (("values", values), (name, index)):
        if not is_array(x):
            raise TypeError(f"{what} must be an array or Tensor, got {type(x).__name__}")
    if values.ndim < 1:
        raise ValueError("values must have at least one dimension, got a scalar")
    if index.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {index.shape}")
    _check_integer(index, name)


def _check_integer(index, name):
    if not isdtype(index.dtype, "integral"):
        raise TypeError(f"{name} must hold integers, got {index.dtype}")


def _rows(values):
    return namespace(values).reshape(values, (values.shape[0], math.prod(values.shape[1:])))


def _segment_reduce(op, values, indptr):
    from rtxarr.kernels.segment import segment_reduce

    _check(values, indptr, "indptr")
    if indptr.shape[0] < 1:
        raise ValueError("indptr must have at least one entry, got none")
    check_range_if_asked("indptr", indptr, 0, values.shape[0] + 1)
    xp = namespace(values, indptr)
    out = segment_reduce(op, _rows(values), xp.astype(indptr, xp.int64, copy=False))
    return xp.reshape(out, (indptr.shape[0] - 1, *values.shape[1:]))


def _scatter_reduce(op, values, index, n_rows):
    from rtxarr.kernels.scatter import scatter_reduce

    _check(values, index, "index")
    if index.shape[0] != values.shape[0]:
        raise ValueError(
            f"index must have one entry for each of the {values.shape[0]} rows of values, got "
            f"{index.shape[0]}"
        )
    check_count("n_rows", n_rows)
    check_range_if_asked("index", index, 0, n_rows)
    xp = namespace(values, index)
    if index.dtype != xp.int32:  # which kernels take as it is
        index = xp.astype(index, xp.int64, copy=False)
    out = scatter_reduce(op, index, _rows(values), n_rows)
    return xp.reshape(out, (n_rows, *values.shape[1:]))


def scatter_add_rows(values, index, n_rows):
    """Add raw rows at ``index`` into zeros of ``n_rows`` rows."""
    return _scatter_reduce("sum", values, index, n_rows)


def _segment_ids(indptr, n_values):
    """Give the segment that each value belongs to."""
    xp = namespace(indptr)
    return xp.searchsorted(indptr[1:], xp.arange(n_values, dtype=indptr.dtype), side="right")


@differentiable(movement=True)
def segment_sum(values, indptr, /):
    """Sum the values of each segment; an empty one gives zero."""
    return _segment_reduce("sum", values, indptr)


segment_sum.defvjps(
    values=lambda g, indptr, values_shape: take(g, _segment_ids(indptr, values_shape[0]), axis=0)
)


def _counts(indptr, ndim, dtype):
    xp = namespace(indptr)
    counts = xp.reshape(indptr[1:] - indptr[:-1], (-1,) + (1,) * (ndim - 1))
    return xp.astype(xp.where(counts == 0, xp.ones_like(counts), counts), dtype)


@differentiable(movement=True)
def segment_mean(values, indptr, /):
    """Average the values of each segment; an empty one gives zero."""
    return _segment_reduce("mean", values, indptr)


def _segment_mean_rule(g, indptr, values_shape, values_dtype):
    share = g / _counts(indptr, len(values_shape), values_dtype)
    return take(share, _segment_ids(indptr, values_shape[0]), axis=0)


segment_mean.defvjps(values=_segment_mean_rule)


@differentiable
def segment_max(values, indptr, /):
    """Give the largest value of each segment; -inf (or the dtype's lowest) for an empty one."""
    return _segment_reduce("max", values, indptr)


@differentiable
def segment_min(values, indptr, /):
    """Give the smallest value of each segment; inf (or the dtype's highest) for an empty one."""
    return _segment_reduce("min", values, indptr)


def _segment_extremum_rule(g, values, indptr, out):
    ids = _segment_ids(indptr, values.shape[0])
    chosen = attained(values, take(out, ids, axis=0), g.dtype)
    total = segment_sum(chosen, indptr)
    return chosen * take(g / where(total == 0, 1, total), ids, axis=0)


segment_max.defvjps(values=_segment_extremum_rule)
segment_min.defvjps(values=_segment_extremum_rule)


@differentiable(movement=True)
def scatter_add(values, index, n_rows, /):
    """Add each value to the row that ``index`` names; untouched rows are zero."""
    return _scatter_reduce("sum", values, index, n_rows)


scatter_add.defvjps(values=lambda g, index: take(g, index, axis=0))


@differentiable
def scatter_max(values, index, n_rows, /):
    """Give the largest value sent to each row; -inf (or the dtype's lowest) where none was."""
    return _scatter_reduce("max", values, index, n_rows)


@differentiable
def scatter_min(values, index, n_rows, /):
    """Give the smallest value sent to each row; inf (or the dtype's highest) where none was."""
    return _scatter_reduce("min", values, index, n_rows)


def _scatter_extremum_rule(g, values, index, out, n_rows):
    chosen = attained(values, take(out, index, axis=0), g.dtype)
    total = scatter_add(chosen, index, n_rows)
    return chosen * take(g / where(total == 0, 1, total), index, axis=0)


scatter_max.defvjps(values=_scatter_extremum_rule)
scatter_min.defvjps(values=_scatter_extremum_rule)

for _function in (segment_sum, segment_mean, segment_max, segment_min):
    _function.__doc__ = (_function.__doc__ or "") + _SEGMENT_DOC
for _function in (scatter_add, scatter_max, scatter_min):
    _function.__doc__ = (_function.__doc__ or "") + _SCATTER_DOC
del _function


@differentiable
def one_hot(indices, n_classes, /, *, dtype=None, axis=-1):
    """Give ones at the classes named by ``indices`` and zeros elsewhere.

    Parameters
    ----------
    indices : array of int, any shape
        An index outside ``[0, n_classes)`` gives a row of zeros.
    n_classes : int
    dtype : dtype, default the namespace's default floating type
    axis : int, default -1
        Place of the new axis in the result.
    """
    check_count("n_classes", n_classes)
    _check_integer(indices, "indices")
    xp = namespace(indices)
    classes = xp.arange(n_classes, dtype=indices.dtype)
    hot = xp.astype(
        indices[..., None] == classes, xp.asarray(0.0).dtype if dtype is None else dtype
    )
    return hot if axis == -1 else xp.moveaxis(hot, -1, axis)
