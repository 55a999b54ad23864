"""Inverses, linear systems and determinants, and their derivative rules.

Rules write ``g`` for the gradient and ``^H`` for the conjugate transpose. Half-precision matrices
are inverted in float32 and the results rounded once.

References
----------
Giles, "An extended collection of matrix derivative results for forward and reverse mode
automatic differentiation", 2008.
"""

from typing import NamedTuple

import numpy as np

from rtxarr import dtypes
from rtxarr._device import is_array, namespace
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops._check import check_number
from rtxarr.ops._elementwise import conj, imag, where
from rtxarr.ops._half import rounded_once
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import expand_dims, matrix_transpose
from rtxarr.ops._matrix import adjoint, check_matrix, column_vectors, identity_mask


class SlogdetResult(NamedTuple):
    """Result of :func:`slogdet`."""

    sign: object
    logabsdet: object


def _scalars(x):
    """Make each number a matrix of one element."""
    return expand_dims(x, axis=(-2, -1))


@rounded_once
@differentiable
def inv(x, /):
    """Invert each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)
        What a singular matrix gives is up to the library: NumPy raises LinAlgError.
    """
    check_matrix(x, square=True)
    return namespace(x).linalg.inv(x)


def _inv_rule(g, out):
    transposed = matrix_transpose(out)
    return -matmul(matmul(transposed, g), transposed)


inv.defvjps(x=_inv_rule)


@rounded_once
@differentiable
def solve(x1, x2, /):
    """Solve the linear systems ``x1 @ x = x2``.

    Parameters
    ----------
    x1 : array or Tensor, shape (..., n, n)
    x2 : array or Tensor, shape (n,) or (..., n, k)
        A single vector, or as many right-hand sides as there are columns. The leading axes
        of both are broadcast against each other.

    Returns
    -------
    array or Tensor, shape (..., n) or (..., n, k)
    """
    check_matrix(x1, name="x1", square=True)
    if x2.ndim == 0 or x2.shape[-2 if x2.ndim > 1 else 0] != x1.shape[-1]:
        raise ValueError(
            f"x2 must have {x1.shape[-1]} rows for x1 of shape {x1.shape}, got shape {x2.shape}"
        )
    xp = namespace(x1, x2)
    # CuPy does not broadcast, and a single vector is treated differently by each library.
    right = x2[:, None] if x2.ndim == 1 else x2
    stack = np.broadcast_shapes(x1.shape[:-2], right.shape[:-2])
    left = x1 if x1.shape[:-2] == stack else xp.broadcast_to(x1, stack + x1.shape[-2:])
    right = right if right.shape[:-2] == stack else xp.broadcast_to(right, stack + right.shape[-2:])
    out = xp.linalg.solve(left, right)
    return out[..., 0] if x2.ndim == 1 else out


@solve.defvjp
def _solve_rule(g, out, x1, x2_shape, needs):
    if len(x2_shape) == 1:
        g, out = column_vectors(g), column_vectors(out)
    right = solve(matrix_transpose(x1), g)
    left = -matmul(right, matrix_transpose(out)) if needs[0] else None
    return left, right[..., 0] if len(x2_shape) == 1 else right


@rounded_once
@differentiable
def det(x, /):
    """Give the determinant of each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)

    Notes
    -----
    The gradient is right at singular matrices too; second derivatives need regular ones.
    """
    check_matrix(x, square=True)
    return namespace(x).linalg.det(x)


def _det_rule(g, out, x):
    # The matrix of cofactors is det(A) A^-T. At a singular matrix it is that of a neighbour one
    # rounding error away: cofactors are polynomials, so they hardly differ.
    singular = _scalars(raw(out) == 0)
    nearby = where(singular, x + _rounding_error(x), x)
    cofactors = _scalars(det(nearby)) * matrix_transpose(inv(nearby))
    return _scalars(g) * cofactors


def _rounding_error(x):
    """Give a raw diagonal matrix of the size of the rounding errors of ``x``."""
    data = raw(x)
    xp = namespace(data)
    eye = xp.astype(identity_mask(data, data.shape[-1]), data.dtype)
    if data.shape[-1] == 0:
        return eye
    info = dtypes.finfo(data.dtype)
    size = xp.max(xp.abs(data), axis=(-2, -1), keepdims=True)
    return eye * xp.where(size == 0, info.eps, info.eps * size)


det.defvjps(x=_det_rule)


@rounded_once
@differentiable(holomorphic=False)
def slogdet(x, /):
    """Give sign and logarithm of the absolute value of each determinant.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)

    Returns
    -------
    sign : array or Tensor, shape (...)
        -1, 0 or 1; of absolute value one (or zero) for complex matrices.
    logabsdet : array or Tensor of real dtype, shape (...)
        -inf for a singular matrix, where the gradient is NaN.
    """
    check_matrix(x, square=True)
    return SlogdetResult(*namespace(x).linalg.slogdet(x))


@slogdet.defvjp
def _slogdet_rule(g, out, x):
    g_sign, g_log = g
    sign = out[0]
    factor = 0 if g_log is None else g_log
    if g_sign is not None and dtypes.is_complex(sign.dtype):
        # sign = exp(i phase), and the phase is the imaginary part of log(det).
        factor = factor - imag(conj(g_sign) * sign) * 1j
    elif g_log is None:
        return (None,)
    regular = where(_scalars(raw(sign) == 0), np.nan, x)
    return (_scalars(factor) * adjoint(inv(regular)),)


def checked_rtol(x, rtol):
    """Give ``rtol``, the default one for None; refuse a number that compares with nothing."""
    if rtol is None:
        return default_rtol(x)
    if not is_array(rtol):
        check_number("rtol", rtol, at_least=0)
    return rtol


def default_rtol(x):
    """Give the share of the largest singular value up to which others are taken for zero."""
    return max(x.shape[-2:]) * dtypes.finfo(x.dtype).eps


@rounded_once
@differentiable(holomorphic=False)
def pinv(x, /, *, rtol=None):
    """Give the Moore-Penrose pseudo-inverse of each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    rtol : float or array, shape (...), optional
        Singular values at most this fraction of the largest are taken for zero; by default
        the larger of n and m times the dtype's ``eps``.

    Returns
    -------
    array or Tensor, shape (..., m, n)

    Notes
    -----
    The derivative is that among matrices of the same rank.

    References
    ----------
    Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
    problems whose variables separate", 1973, eq. 4.12.
    """
    check_matrix(x)
    rtol = checked_rtol(x, rtol)
    return namespace(x).linalg.pinv(x, rtol=rtol)


def _pinv_rule(g, out, x):
    gh, ph = adjoint(g), adjoint(out)
    left = matmul(gh, matmul(out, ph))  # g^H P P^H
    right = matmul(matmul(ph, out), gh)  # P^H P g^H
    left = left - matmul(x, matmul(out, left))
    right = right - matmul(matmul(right, out), x)
    return left + right - matmul(matmul(ph, g), ph)


pinv.defvjps(x=_pinv_rule)
