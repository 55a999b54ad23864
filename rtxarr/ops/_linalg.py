"""Matrix products, and their derivative rules; decompositions are in ``rtxarr.linalg``."""

import math

import numpy as np

from rtxarr._device import is_device_array, namespace
from rtxarr._override import overridable
from rtxarr.autograd._op import differentiable, explained
from rtxarr.dtypes import result_type
from rtxarr.libs.blas import try_matmul
from rtxarr.ops._elementwise import astype, conj
from rtxarr.ops._half import rounded_once
from rtxarr.ops._manipulate import (
    common_axis,
    expand_dims,
    listed_axes,
    matrix_transpose,
    permute_dims,
    reshape,
)

__all__ = [
    "matmul",
    "tensordot",
    "vecdot",
]


@differentiable
@overridable
def matmul(x1, x2, /):
    """Multiply matrices, or stacks of them.

    Parameters
    ----------
    x1 : array or Tensor, shape (..., n, k) or (k,)
    x2 : array or Tensor, shape (..., k, m) or (k,)
        Half-precision products accumulate in float32.

    Returns
    -------
    array or Tensor, shape (..., n, m); the axis of a vector is left out
    """
    for name, x in (("x1", x1), ("x2", x2)):
        if getattr(x, "ndim", 0) == 0:
            raise ValueError(f"{name} must have at least one dimension, got a scalar")
    if x1.shape[-1] != x2.shape[-2 if x2.ndim > 1 else 0]:
        raise ValueError(
            "the last axis of x1 must match the second-to-last of x2 (the only one of a vector), "
            f"got shapes {x1.shape} and {x2.shape}"
        )
    return (_matmul_on_device if is_device_array(x1) else _matmul_in_single)(x1, x2)


def _matmul(x1, x2):
    return namespace(x1, x2).matmul(x1, x2)


_matmul_in_single = rounded_once(_matmul)


def _matmul_on_device(x1, x2):
    if x1.dtype != x2.dtype:
        return _matmul_of_two_dtypes(x1, x2)
    out = try_matmul(x1, x2, or_unsplit=True)
    # CuPy's promotes bfloat16 and accumulates in float32 by itself.
    return _matmul(x1, x2) if out is None else out


@rounded_once
def _matmul_of_two_dtypes(x1, x2):
    # Here, because CuPy's would go to cuBLAS, which a graph cannot hold.
    dtype = result_type(x1.dtype, x2.dtype)
    return _matmul_on_device(*(astype(x, dtype, copy=False) for x in (x1, x2)))


def _matmul_rule1(g, x2, x1_shape):
    if x2.ndim == 1:
        # An outer product with the vector; with two vectors g is a scalar.
        return expand_dims(g, axis=-1) * x2
    if len(x1_shape) == 1:
        return matmul(x2, expand_dims(g, axis=-1))[..., 0]
    return matmul(g, matrix_transpose(x2))


def _matmul_rule2(g, x1, x2_shape):
    if x1.ndim == 1 and len(x2_shape) == 1:
        return g * x1
    if x1.ndim == 1:
        return expand_dims(x1, axis=-1) * expand_dims(g, axis=-2)
    if len(x2_shape) > 2 or (x1.ndim == 2 and len(x2_shape) == 2):
        return matmul(matrix_transpose(x1), g)
    # One matrix (or vector) met a whole stack: one flat product instead of a sum of them.
    n_rows = math.prod(x1.shape[:-1])
    rows = matrix_transpose(reshape(x1, (n_rows, x1.shape[-1])))
    return matmul(rows, reshape(g, (n_rows, *x2_shape[1:])))


matmul.defvjps(x1=_matmul_rule1, x2=_matmul_rule2)


@differentiable(holomorphic=False)
@rounded_once
def vecdot(x1, x2, /, *, axis=-1):
    """Give the dot products along one axis; the first argument is conjugated.

    Parameters
    ----------
    x1, x2 : array or Tensor
        Of one length along ``axis``, broadcast against each other along the others.
        Half-precision products accumulate in float32.
    axis : int, default -1
        Counted in each array by itself, so it should be negative when their numbers of
        dimensions differ.

    Returns
    -------
    array or Tensor, without ``axis``
    """
    for name, x in (("x1", x1), ("x2", x2)):
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"axis must be an axis of {name} of shape {x.shape}, got {axis}")
    axis = common_axis(axis, x1, x2)
    if x1.shape[axis] != x2.shape[axis]:
        raise ValueError(
            f"x1 and x2 must have the same length along axis {axis}, got shapes {x1.shape} and "
            f"{x2.shape}"
        )
    xp = namespace(x1, x2)
    if is_device_array(x1):  # CuPy's goes to cuBLAS, which a graph cannot hold
        return xp.sum(xp.conj(x1) * x2, axis=axis)
    return xp.vecdot(x1, x2, axis=axis)


def _vecdot_restore(g, x1_shape, x2_shape, axis):
    """Put the summed axis back with length one."""
    ndim = max(len(x1_shape), len(x2_shape))
    return expand_dims(g, axis=axis % ndim)


def _vecdot_rule1(g, x2, x1_shape, x2_shape, axis):
    return conj(_vecdot_restore(g, x1_shape, x2_shape, axis)) * x2


def _vecdot_rule2(g, x1, x1_shape, x2_shape, axis):
    return _vecdot_restore(g, x1_shape, x2_shape, axis) * x1


vecdot.defvjps(x1=_vecdot_rule1, x2=_vecdot_rule2)


@explained
def tensordot(x1, x2, /, *, axes=2):
    """Sum products over pairs of axes.

    Parameters
    ----------
    x1, x2 : array or Tensor
        Half-precision products accumulate in float32.
    axes : int or (sequence of int, sequence of int), default 2
        How many last axes of ``x1`` to pair with the first of ``x2``, or which with which.

    Returns
    -------
    array or Tensor, the unpaired axes of ``x1``, then those of ``x2``
    """
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ValueError(f"axes must lie in [0, {min(x1.ndim, x2.ndim)}], got {axes}")
        axes1 = list(range(x1.ndim - axes, x1.ndim))
        axes2 = list(range(axes))
    elif len(axes) != 2:
        raise ValueError(f"axes must be an int or two sequences of int, got {axes}")
    else:
        axes1, axes2 = (listed_axes(a, x.ndim) for a, x in zip(axes, (x1, x2), strict=True))
    if [x1.shape[a] for a in axes1] != [x2.shape[a] for a in axes2]:
        raise ValueError(
            f"axes must pair axes of equal lengths, got {axes} for shapes {x1.shape} and {x2.shape}"
        )
    free1 = [a for a in range(x1.ndim) if a not in axes1]
    free2 = [a for a in range(x2.ndim) if a not in axes2]
    shape1, shape2 = [x1.shape[a] for a in free1], [x2.shape[a] for a in free2]
    n_paired = math.prod(x1.shape[a] for a in axes1)
    left = reshape(permute_dims(x1, (*free1, *axes1)), (math.prod(shape1), n_paired))
    right = reshape(permute_dims(x2, (*axes2, *free2)), (n_paired, math.prod(shape2)))
    return reshape(matmul(left, right), (*shape1, *shape2))
