"""Parts, products and norms of matrices that are built from other operations."""

import builtins
import math
from typing import Literal

import numpy as np

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, explained, nondifferentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops._elementwise import abs, astype, conj, multiply, where
from rtxarr.ops._half import rounded_once
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import (
    common_axis,
    expand_dims,
    matrix_transpose,
    normalize_axes,
    reshape,
)
from rtxarr.ops._reduce import max, min, sum

__all__ = ["tril", "triu"]


def check_matrix(x, *, name="x", square=False):
    """Refuse what is not a matrix (or a square one) or a stack of them."""
    if getattr(x, "ndim", 0) < 2:
        raise ValueError(
            f"{name} must have at least two dimensions, got shape {getattr(x, 'shape', ())}"
        )
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name} must be square in its last two axes, got shape {x.shape}")


def places(x, n):
    """Count from 0 to ``n - 1`` in a raw array on the device of ``x``."""
    data = raw(x)
    return namespace(data).arange(n, device=getattr(data, "device", None))  # dask has none


def identity_mask(x, n):
    """Give the identity of size ``n`` as a raw mask beside ``x``."""
    place = places(x, n)
    return place[:, None] == place[None, :]


def adjoint(x):
    """Conjugate and transpose each matrix."""
    return matrix_transpose(conj(x) if dtypes.is_complex(x.dtype) else x)


def row_vectors(x):
    """Make row vectors of the vectors in the last axis: scales the columns of a matrix."""
    return expand_dims(x, axis=-2)


def column_vectors(x):
    """Make column vectors of the vectors in the last axis."""
    return expand_dims(x, axis=-1)


# ------------------------------------------------------------------ parts of matrices


def _below(x, k):
    """Tell, for each place of the matrices in ``x``, whether its column is at most ``row + k``."""
    if not isinstance(k, (int, np.integer)):
        raise TypeError(f"k must be an int, got {type(k).__name__}")
    return places(x, x.shape[-1])[None, :] <= places(x, x.shape[-2])[:, None] + k


def _zero(x):
    return False if dtypes.isdtype(x.dtype, "bool") else 0


@explained
def tril(x, /, *, k: int = 0):
    """Keep the lower triangle of each matrix and set the rest to zero.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    k : int, default 0
        The last diagonal kept; negative ones lie below the main diagonal.
    """
    check_matrix(x)
    return where(_below(x, k), x, _zero(x))


@explained
def triu(x, /, *, k: int = 0):
    """Keep the upper triangle of each matrix and set the rest to zero.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    k : int, default 0
        The first diagonal kept; negative ones lie below the main diagonal.
    """
    check_matrix(x)
    return where(_below(x, k - 1), _zero(x), x)


@explained
def diagonal(x, /, *, offset: int = 0):
    """Give a diagonal of each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    offset : int, default 0
        Which diagonal; positive ones lie above the main one.

    Returns
    -------
    array or Tensor, shape (..., length of the diagonal)
        A view where the matrices lie row by row in memory.
    """
    check_matrix(x)
    *stack, n, m = x.shape
    # In the flattened matrix neighbours on a diagonal are m + 1 places apart.
    first = offset if offset >= 0 else -offset * m
    length = builtins.min(n + offset, m) if offset < 0 else builtins.min(n, m - offset)
    flat = reshape(x, (*stack, n * m))
    if length <= 0:
        return flat[..., :0]
    return flat[..., first : first + (length - 1) * (m + 1) + 1 : m + 1]


def diagonal_matrix(x):
    """Put the vectors in the last axis on the diagonals of matrices."""
    return where(identity_mask(x, x.shape[-1]), expand_dims(x, axis=-2), 0)


@explained
def trace(x, /, *, offset: int = 0, dtype=None):
    """Sum a diagonal of each matrix; integers widen to int64.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    offset : int, default 0
        Which diagonal; positive ones lie above the main one.
    dtype : dtype, optional
        To sum in.
    """
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# --------------------------------------------------------------------------- products


@explained
def outer(x1, x2, /):
    """Give the products of all pairs of elements of two vectors.

    Parameters
    ----------
    x1 : array or Tensor, shape (n,)
    x2 : array or Tensor, shape (m,)

    Returns
    -------
    array or Tensor, shape (n, m)
    """
    for name, x in (("x1", x1), ("x2", x2)):
        if x.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {x.shape}")
    return multiply(expand_dims(x1, axis=1), x2)


@differentiable
def cross(x1, x2, /, *, axis=-1):
    """Give the cross products of vectors of length three.

    Parameters
    ----------
    x1, x2 : array or Tensor
        Of length three along ``axis``, broadcast against each other along the others.
    axis : int, default -1
        Must be negative when the numbers of dimensions differ.
    """
    for name, x in (("x1", x1), ("x2", x2)):
        if not -x.ndim <= axis < x.ndim or x.shape[axis] != 3:
            raise ValueError(f"{name} must have length 3 along axis {axis}, got shape {x.shape}")
    axis = common_axis(axis, x1, x2)
    return namespace(x1, x2).linalg.cross(x1, x2, axis=axis)


cross.defvjps(
    x1=lambda g, x2, axis: cross(x2, g, axis=axis),
    x2=lambda g, x1, axis: cross(g, x1, axis=axis),
)


@explained
def matrix_power(x, n: int, /):
    """Multiply each matrix ``n`` times with itself.

    Parameters
    ----------
    x : array or Tensor, shape (..., m, m)
    n : int
        Zero gives identities; a negative power is that of the inverse.
    """
    from rtxarr.ops._inverse import inv

    check_matrix(x, square=True)
    if not isinstance(n, (int, np.integer)):
        raise TypeError(f"n must be an int, got {type(n).__name__}")
    if n == 0:
        return _identities(x)
    if n < 0:
        x, n = inv(x), -n
    power = None
    while True:  # square and multiply, from the lowest binary digit of n
        if n & 1:
            power = x if power is None else matmul(power, x)
        n >>= 1
        if n == 0:
            return power
        x = matmul(x, x)


@nondifferentiable
def _identities(x):
    xp = namespace(x)
    eye = xp.astype(identity_mask(x, x.shape[-1]), x.dtype)
    return xp.asarray(xp.broadcast_to(eye, x.shape), copy=True)


# ------------------------------------------------------------------------------ norms


@differentiable(holomorphic=False)
@rounded_once
def vector_norm(x, /, *, axis=None, keepdims=False, ord=2):
    """Give the norm of vectors; half-precision ones are added up in float32.

    Parameters
    ----------
    x : array or Tensor
    axis : int, tuple of int or None
        The axes that together make a vector; all of them by default.
    keepdims : bool, default False
        Keep these axes with length one.
    ord : float, default 2
        ``sum(abs(x)**ord)**(1/ord)``; inf and -inf for the largest and the smallest absolute
        value, 0 for the number of elements that are not zero.

    Returns
    -------
    array or Tensor of real dtype

    Notes
    -----
    The gradient of a norm that is zero is taken to be zero, and so is that of an element which
    is zero where the norm has a kink (``ord`` below 2). Elements that tie for the largest share
    the gradient evenly.
    """
    if isinstance(ord, str) or ord is None or ord != ord:
        raise ValueError(f"ord must be a number, got {ord!r}")
    axes = normalize_axes(axis, x.ndim)
    return namespace(x).linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)


def _vector_norm_rule(g, x, out, x_shape, axis, ord):
    if ord == 0:
        return None
    axes = normalize_axes(axis, len(x_shape))
    kept = tuple(1 if i in axes else n for i, n in enumerate(x_shape))
    g, out = reshape(g, kept), reshape(out, kept)
    if ord == 2:
        return _over(where(out == 0, 0, g), out) * x
    size = abs(x)
    direction = _over(x, size)
    if math.isinf(ord):
        chosen = size == out
        count = sum(astype(chosen, out.dtype), axis=axes, keepdims=True)
        return where(chosen, g / count, 0) * direction
    if ord == 1:
        return g * direction
    share = _over(where(size == 0, 1, size), out) ** (ord - 1)
    return where((size == 0) | (out == 0), 0, g) * share * direction


def _over(x, size):
    """Divide, with one in place of a zero ``size``."""
    return x / where(size == 0, 1, size)


vector_norm.defvjps(x=_vector_norm_rule)


@vector_norm.defrows
def _vector_norm_rows(mask, x_shape, axis):
    axes = normalize_axes(axis, len(x_shape))
    return reshape(mask, tuple(1 if i in axes else n for i, n in enumerate(x_shape)))


@explained
def matrix_norm(
    x,
    /,
    *,
    keepdims: bool = False,
    ord: float | Literal["fro", "nuc"] | None = "fro",
):
    """Give the norm of each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    keepdims : bool, default False
        Keep the last two axes with length one.
    ord : {"fro", "nuc", 1, -1, 2, -2, inf, -inf}, default "fro"
        "fro" for the root of the sum of squares, "nuc" for the sum of singular values, 2 and
        -2 for the largest and smallest of them; 1 and inf for the largest sum of absolute
        values in a column and a row, -1 and -inf for the smallest. None means "fro".

    Returns
    -------
    array or Tensor of real dtype, shape (...)

    Notes
    -----
    What ties for the largest or smallest shares the gradient evenly.
    """
    from rtxarr.ops._decompose import svdvals

    check_matrix(x)
    if ord is None or ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord == "nuc":
        out = sum(svdvals(x), axis=-1)
    elif ord in (2, -2):
        out = _extreme(svdvals(x), ord)
    elif ord in (1, -1, np.inf, -np.inf):
        out = _extreme(sum(abs(x), axis=-2 if ord in (1, -1) else -1), ord)
    else:
        raise ValueError(f"ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}")
    return expand_dims(out, axis=(-2, -1)) if keepdims else out


def _extreme(values, ord):
    if ord < 0:
        return min(values, axis=-1)
    # Norms are not negative, so of nothing the largest is zero.
    return max(values, axis=-1) if values.shape[-1] else sum(values, axis=-1)
