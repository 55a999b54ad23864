"""Factorizations and eigenvalues of matrices, and their derivative rules.

Rules use the notation ``A = U S V^H`` and write ``g`` for the gradient, ``^H`` for the conjugate
transpose. Half-precision matrices are decomposed in float32 and the results rounded once.

References
----------
Giles, "An extended collection of matrix derivative results for forward and reverse mode
automatic differentiation", 2008.
Boeddeker, Hanebrink, Drude, Heymann and Haeb-Umbach, "On the computation of complex-valued
gradients with application to statistically optimum beamforming", 2017, arXiv:1701.00392.
"""

from typing import NamedTuple

import numpy as np

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, explained, nondifferentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops._elementwise import conj, imag, real, where
from rtxarr.ops._half import rounded_once
from rtxarr.ops._inverse import checked_rtol, solve
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import concat
from rtxarr.ops._matrix import (
    adjoint,
    check_matrix,
    column_vectors,
    diagonal,
    diagonal_matrix,
    identity_mask,
    row_vectors,
    tril,
)


class EigResult(NamedTuple):
    """Result of :func:`eig`."""

    eigenvalues: object
    eigenvectors: object


class EighResult(NamedTuple):
    """Result of :func:`eigh`."""

    eigenvalues: object
    eigenvectors: object


class QRResult(NamedTuple):
    """Result of :func:`qr`."""

    Q: object
    R: object


class SVDResult(NamedTuple):
    """Result of :func:`svd`."""

    U: object
    S: object
    Vh: object


def _over_gaps(x, values):
    """Divide ``x[i, j]`` by ``values[j] - values[i]``; zero on the diagonal.

    Equal values give NaN: the vectors that belong to them are not determined, so neither is a
    derivative.
    """
    gaps = row_vectors(values) - column_vectors(values)
    same = raw(gaps) == 0
    quotient = where(same, np.nan, x / where(same, 1, gaps))
    return where(identity_mask(values, values.shape[-1]), 0, quotient)


def _over(x, size):
    """Divide by ``size``; a zero gives NaN quietly."""
    zero = raw(size) == 0
    return where(zero, np.nan, x / where(zero, 1, size))


# ------------------------------------------------------------------------ factorizations


@explained
def cholesky(x, /, *, upper: bool = False):
    """Factor Hermitian positive definite matrices as ``L @ L^H``.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)
        Only the lower triangle is read. The gradient is that with respect to a Hermitian
        matrix.
    upper : bool, default False
        Give ``L^H`` in place of ``L``.

    References
    ----------
    Murray, "Differentiation of the Cholesky decomposition", 2016, arXiv:1602.07527, eq. 10.
    """
    lower = _cholesky(x)
    return adjoint(lower) if upper else lower


@rounded_once
@differentiable(holomorphic=False)
def _cholesky(x, /):
    check_matrix(x, square=True)
    return namespace(x).linalg.cholesky(x)


def _cholesky_rule(g, out):
    lh = adjoint(out)
    inner = 0.5 * _hermitian_from_lower(matmul(lh, g))
    # L^-H inner L^-1, by two systems.
    half = solve(lh, inner)
    return adjoint(solve(lh, adjoint(half)))


def _hermitian_from_lower(x):
    """Copy the strictly lower triangle to the upper one; the diagonal's real part stays."""
    below = tril(x, k=-1)
    middle = diagonal(x)
    if dtypes.is_complex(x.dtype):
        middle = real(middle)
    return below + adjoint(below) + diagonal_matrix(middle)


_cholesky.defvjps(x=_cholesky_rule)


@rounded_once
@differentiable(holomorphic=False)
def qr(x, /, *, mode="reduced"):
    """Factor each matrix into one with orthonormal columns and an upper triangular one.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    mode : {"reduced", "complete"}, default "reduced"
        How many columns ``Q`` has: k, the smaller of n and m, or n.

    Returns
    -------
    Q : array or Tensor, shape (..., n, k) or (..., n, n)
    R : array or Tensor, shape (..., k, m) or (..., n, m)

    Notes
    -----
    The gradient needs the first k columns of ``x`` to be independent. In "complete" mode the
    columns of ``Q`` beyond k are any basis of the rest, so that what is differentiated must
    not depend on which.

    References
    ----------
    Walter and Lehmann, "Algorithmic differentiation of linear algebra functions with
    application in optimum experimental design", 2010, arXiv:1001.1654.
    Roberts and Roberts, "QR and LQ decomposition matrix backpropagation algorithms for square,
    wide, and deep matrices", 2020, arXiv:2009.10071 (wide matrices).
    """
    check_matrix(x)
    if mode not in ("reduced", "complete"):
        raise ValueError(f"mode must be 'reduced' or 'complete', got {mode!r}")
    return QRResult(*namespace(x).linalg.qr(x, mode=mode))


@qr.defvjp
def _qr_rule(g, out, x_shape):
    gq, gr = g
    q, r = out
    n, m = x_shape[-2:]
    k = min(n, m)
    if q.shape[-1] > k:
        q, gq = _fold_complement(q, gq, k)
        r, gr = r[..., :k, :], None if gr is None else gr[..., :k, :]
    wide = None
    if m > n:  # x = [x1, x2] with x1 square, x1 = Q R1 and x2 = Q R2
        r, rest = r[..., :n], r[..., n:]
        if gr is not None:
            gr, g_rest = gr[..., :n], gr[..., n:]
            wide = matmul(q, g_rest)
            # R2 = Q^H x2, so its gradient reaches Q as well.
            share = matmul(matmul(q, rest), adjoint(g_rest))
            gq = share if gq is None else gq + share
    inner = 0
    if gr is not None:
        inner = matmul(r, adjoint(gr))
    if gq is not None:
        inner = inner - matmul(adjoint(gq), q)
    square = matmul(q, _hermitian_from_lower(inner))
    if gq is not None:
        square = square + gq
    square = adjoint(solve(r, adjoint(square)))  # times R^-H
    if m <= n:
        return (square,)
    if wide is None:
        wide = matmul(q, rest) * 0
    return (concat((square, wide), axis=-1),)


def _fold_complement(u, gu, k):
    """Move the gradient of the columns beyond ``k`` of a unitary ``u`` to the first ``k``.

    They stay orthogonal to the first ones: ``dU2 = -U1 dU1^H U2`` up to a turn among
    themselves, which must not matter.
    """
    first, rest = u[..., :k], u[..., k:]
    if gu is not None:
        gu = gu[..., :k] - matmul(rest, matmul(adjoint(gu[..., k:]), first))
    return first, gu


@rounded_once
@differentiable(holomorphic=False)
def svd(x, /, *, full_matrices=True):
    """Give the singular value decomposition ``x = U @ diag(S) @ Vh`` of each matrix.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    full_matrices : bool, default True
        Give square ``U`` and ``Vh``; else only the first k columns and rows, k being the
        smaller of n and m.

    Returns
    -------
    U : array or Tensor, shape (..., n, n) or (..., n, k)
    S : array or Tensor of real dtype, shape (..., k), descending
    Vh : array or Tensor, shape (..., m, m) or (..., k, m)

    Notes
    -----
    The gradient through ``S`` alone always exists. Through ``U`` and ``Vh`` it needs singular
    values that differ (and are not zero where x is not square), else it is NaN; and what is
    differentiated must not depend on the signs (phases) of the vectors nor, for full matrices,
    on the choice of the additional ones.

    References
    ----------
    Townsend, "Differentiating the singular value decomposition", 2016.
    Wan and Zhang, "Automatic differentiation for complex valued SVD", 2019, arXiv:1909.02659.
    """
    check_matrix(x)
    return SVDResult(*namespace(x).linalg.svd(x, full_matrices=full_matrices))


@svd.defvjp
def _svd_rule(g, out, x_shape):
    gu, gs, gvh = g
    u, s, vh = out
    k = s.shape[-1]
    v = adjoint(vh)
    gv = None if gvh is None else adjoint(gvh)
    u, gu = _fold_complement(u, gu, k) if u.shape[-1] > k else (u, gu)
    v, gv = _fold_complement(v, gv, k) if v.shape[-1] > k else (v, gv)
    vh = adjoint(v)
    if gu is None and gv is None:
        return (matmul(u * row_vectors(gs), vh),)
    inner = 0 if gs is None else diagonal_matrix(gs)
    outside = 0
    squares = s * s
    if gu is not None:
        along = matmul(adjoint(u), gu)
        inner = inner + _over_gaps(along - adjoint(along), squares) * row_vectors(s)
        if dtypes.is_complex(along.dtype):
            # The phases of U are fixed by those of V.
            inner = inner + 1j * diagonal_matrix(_over(imag(diagonal(along)), s))
        if x_shape[-2] > k:
            outside = outside + matmul(_over(gu - matmul(u, along), row_vectors(s)), vh)
    if gv is not None:
        along = matmul(vh, gv)
        inner = inner + column_vectors(s) * _over_gaps(along - adjoint(along), squares)
        if x_shape[-1] > k:
            outside = outside + matmul(u, adjoint(_over(gv - matmul(v, along), row_vectors(s))))
    return (matmul(matmul(u, inner), vh) + outside,)


@rounded_once
@differentiable(holomorphic=False)
def svdvals(x, /):
    """Give the singular values of each matrix, largest first.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)

    Returns
    -------
    array or Tensor of real dtype, shape (..., k), k the smaller of n and m
        The gradient exists everywhere, the second derivative where no two are equal.
    """
    check_matrix(x)
    return namespace(x).linalg.svdvals(x)


def _svdvals_rule(g, x):
    u, _, vh = svd(x, full_matrices=False)
    return matmul(u * row_vectors(g), vh)


svdvals.defvjps(x=_svdvals_rule)


@rounded_once
@nondifferentiable
def matrix_rank(x, /, *, rtol=None):
    """Count the singular values that are not negligible.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, m)
    rtol : float or array, shape (...), optional
        Singular values at most this fraction of the largest are taken for zero; by default
        the larger of n and m times the dtype's ``eps``.

    Returns
    -------
    array or Tensor of int64, shape (...)
    """
    check_matrix(x)
    xp = namespace(x)
    values = xp.linalg.svdvals(x)
    if values.shape[-1] == 0:
        return xp.count_nonzero(values, axis=-1)
    rtol = checked_rtol(x, rtol)
    limit = values[..., :1] * xp.asarray(rtol, dtype=values.dtype)[..., None]
    return xp.count_nonzero(values > limit, axis=-1)


# -------------------------------------------------------------------------- eigenvalues


@rounded_once
@differentiable(holomorphic=False)
def eigh(x, /):
    """Give eigenvalues and eigenvectors of Hermitian matrices.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)
        Only the lower triangle is read. The gradient is that with respect to a Hermitian
        matrix.

    Returns
    -------
    eigenvalues : array or Tensor of real dtype, shape (..., n), ascending
    eigenvectors : array or Tensor, shape (..., n, n), in the columns

    Notes
    -----
    The gradient through the eigenvalues alone always exists. Through the eigenvectors it needs
    eigenvalues that differ, else it is NaN; and what is differentiated must not depend on the
    signs (phases) of the vectors.

    References
    ----------
    Giles 2008, section 3.1; see the module.
    """
    check_matrix(x, square=True)
    return EighResult(*namespace(x).linalg.eigh(x))


@eigh.defvjp
def _eigh_rule(g, out):
    g_values, g_vectors = g
    values, v = out
    vh = adjoint(v)
    if g_vectors is None:
        return (matmul(v * row_vectors(g_values), vh),)
    along = matmul(vh, g_vectors)
    inner = _over_gaps(0.5 * (along - adjoint(along)), values)
    if g_values is not None:
        inner = inner + diagonal_matrix(g_values)
    return (matmul(matmul(v, inner), vh),)


@rounded_once
@differentiable(holomorphic=False)
def eigvalsh(x, /):
    """Give the eigenvalues of Hermitian matrices, smallest first.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)
        Only the lower triangle is read.

    Returns
    -------
    array or Tensor of real dtype, shape (..., n)
        The gradient exists everywhere, the second derivative where no two are equal.
    """
    check_matrix(x, square=True)
    return namespace(x).linalg.eigvalsh(x)


def _eigvalsh_rule(g, x):
    v = eigh(x)[1]
    return matmul(v * row_vectors(g), adjoint(v))


eigvalsh.defvjps(x=_eigvalsh_rule)


@rounded_once
@differentiable(holomorphic=False)
def eig(x, /):
    """Give eigenvalues and eigenvectors of square matrices, as complex numbers.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)

    Returns
    -------
    eigenvalues : array or Tensor of complex dtype, shape (..., n), in no particular order
    eigenvectors : array or Tensor of complex dtype, shape (..., n, n)
        In the columns, each of norm one.

    Notes
    -----
    The gradient needs eigenvalues that differ; through the eigenvectors it is NaN otherwise,
    and what is differentiated must not depend on their phases.

    References
    ----------
    Boeddeker et al. 2017, eq. 4.77; see the module.
    """
    check_matrix(x, square=True)
    xp = namespace(x)
    values, vectors = xp.linalg.eig(x)
    dtype = dtypes.result_type(x.dtype, xp.complex64)
    return EigResult(xp.astype(values, dtype, copy=False), xp.astype(vectors, dtype, copy=False))


@eig.defvjp
def _eig_rule(g, out):
    g_values, g_vectors = g
    values, v = out
    vh = adjoint(v)
    inner = 0 if g_values is None else diagonal_matrix(g_values)
    if g_vectors is not None:
        along = matmul(vh, g_vectors)
        # Each vector keeps its norm: what would stretch it is taken away.
        along = along - matmul(vh, v * row_vectors(real(diagonal(along))))
        inner = inner + _over_gaps(along, conj(values))
    return (solve(vh, matmul(inner, vh)),)


@rounded_once
@differentiable(holomorphic=False)
def eigvals(x, /):
    """Give the eigenvalues of square matrices, as complex numbers in no particular order.

    Parameters
    ----------
    x : array or Tensor, shape (..., n, n)

    Returns
    -------
    array or Tensor of complex dtype, shape (..., n)
        The gradient needs eigenvalues that differ.
    """
    check_matrix(x, square=True)
    xp = namespace(x)
    dtype = dtypes.result_type(x.dtype, xp.complex64)
    return xp.astype(xp.linalg.eigvals(x), dtype, copy=False)


def _eigvals_rule(g, x):
    v = eig(x)[1]
    vh = adjoint(v)
    return solve(vh, column_vectors(g) * vh)


eigvals.defvjps(x=_eigvals_rule)
