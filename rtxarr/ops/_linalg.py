"""Matrix products, and their derivative rules; decompositions are in ``linalg``."""

import numpy as np

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops._elementwise import conj
from rtxarr.ops._manipulate import expand_dims, matrix_transpose, permute_dims, reshape
from rtxarr.ops._reduce import sum

__all__ = [
    "matmul",
    "tensordot",
    "vecdot",
]


_BFLOAT16 = np.dtype(dtypes.bfloat16)


@differentiable
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
    xp = namespace(x1, x2)
    if x1.ndim == 0 or x2.ndim == 0:
        raise ValueError("x1 and x2 must have at least one dimension, got a scalar")
    if x1.shape[-1] != x2.shape[-2 if x2.ndim > 1 else 0]:
        raise ValueError(
            f"the last axis of x1 must match the second-to-last of x2, got {x1.shape} and {x2.shape}"
        )
    if isinstance(x1, np.ndarray) and (dtypes.is_half(x1.dtype) or dtypes.is_half(x2.dtype)):
        dtype = dtypes.result_type(x1, x2)
        wide = np.dtype("float32") if dtypes.is_half(dtype) else dtype
        return xp.matmul(x1.astype(wide), x2.astype(wide)).astype(dtype)
    return xp.matmul(x1, x2)


def _matmul_rule1(g, x2, x1_shape):
    if x2.ndim == 1:
        # (..., n): an outer product with the vector; with two vectors g is a scalar.
        return expand_dims(g, axis=-1) * x2
    if len(x1_shape) == 1:
        return matmul(x2, expand_dims(g, axis=-1))[..., 0]
    return matmul(g, matrix_transpose(x2))


def _matmul_rule2(g, x1, x2_shape):
    if x1.ndim == 1 and len(x2_shape) == 1:
        return g * x1
    if x1.ndim == 1:
        return expand_dims(x1, axis=-1) * expand_dims(g, axis=-2)
    if len(x2_shape) == 1:
        return reshape(x1 * expand_dims(g, axis=-1), (-1, x2_shape[0])) if g.ndim > 0 else x1 * g
    if len(x2_shape) == 2 and x1.ndim > 2:
        # One flat product instead of a batch of products to add up.
        return matmul(
            matrix_transpose(reshape(x1, (-1, x1.shape[-1]))), reshape(g, (-1, g.shape[-1]))
        )
    return matmul(matrix_transpose(x1), g)


matmul.defvjps(x1=_matmul_rule1, x2=_matmul_rule2)


def vecdot(x1, x2, /, *, axis=-1):
    """Give the dot products along one axis; the first argument is conjugated.

    Parameters
    ----------
    x1, x2 : array or Tensor, broadcast against each other except along ``axis``
    axis : int, default -1
    """
    if x1.shape[axis] != x2.shape[axis]:
        raise ValueError(
            f"x1 and x2 must have the same length along axis {axis}, got {x1.shape} and {x2.shape}"
        )
    first = conj(x1) if np.dtype(raw(x1).dtype).kind == "c" else x1
    return sum(first * x2, axis=axis)


def tensordot(x1, x2, /, *, axes=2):
    """Sum products over pairs of axes.

    Parameters
    ----------
    x1, x2 : array or Tensor
    axes : int or (sequence of int, sequence of int), default 2
        How many last axes of ``x1`` to pair with the first of ``x2``, or which with which.
    """
    if isinstance(axes, int):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ValueError(f"axes must lie in [0, {min(x1.ndim, x2.ndim)}], got {axes}")
        axes1 = list(range(x1.ndim - axes, x1.ndim))
        axes2 = list(range(axes))
    else:
        axes1 = [a % x1.ndim for a in axes[0]]
        axes2 = [a % x2.ndim for a in axes[1]]
    if [x1.shape[a] for a in axes1] != [x2.shape[a] for a in axes2]:
        raise ValueError(f"axes {axes} pair lengths that differ: {x1.shape} and {x2.shape}")
    free1 = [a for a in range(x1.ndim) if a not in axes1]
    free2 = [a for a in range(x2.ndim) if a not in axes2]
    n = int(np.prod([x1.shape[a] for a in axes1], dtype=int))
    left = reshape(
        permute_dims(x1, (*free1, *axes1)),
        (int(np.prod([x1.shape[a] for a in free1], dtype=int)), n),
    )
    right = reshape(
        permute_dims(x2, (*axes2, *free2)),
        (n, int(np.prod([x2.shape[a] for a in free2], dtype=int))),
    )
    return reshape(
        matmul(left, right), (*(x1.shape[a] for a in free1), *(x2.shape[a] for a in free2))
    )
