"""Decompositions of matrices, what is computed by them, and their derivative rules.

Rules use the notation ``A = U S V^H`` and write ``g`` for the gradient, ``^H`` for the conjugate
transpose. Half-precision matrices are decomposed in float32 and the results rounded once.

References
----------
Giles, "An extended collection of matrix derivative results for forward and reverse mode
automatic differentiation", 2008.
Boeddeker, Hanebrink, Drude, Heymann and Haeb-Umbach, "On the computation of complex-valued
gradients with application to statistically optimum beamforming", 2017, arXiv:1701.00392.
"""

import functools
from typing import NamedTuple

import numpy as np

from rtxarr import dtypes
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, nondifferentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops._elementwise import astype, conj, imag, real, where
from rtxarr.ops._half import widen
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import concat, expand_dims, matrix_transpose
from rtxarr.ops._matrix import check_matrix, diagonal, places, tril


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


class SlogdetResult(NamedTuple):
    """Result of :func:`slogdet`."""

    sign: object
    logabsdet: object


class SVDResult(NamedTuple):
    """Result of :func:`svd`."""

    U: object
    S: object
    Vh: object


# ----------------------------------------------------------------------------- helpers


def _in_single(function):
    """Give ``function`` half-precision arrays as float32, and round what comes back."""

    @functools.wraps(function)
    def call(*arrays, **options):
        if not any(dtypes.is_half(getattr(x, "dtype", None)) for x in arrays):
            return function(*arrays, **options)
        out = function(*map(widen, arrays), **options)
        dtype = dtypes.result_type(*arrays)
        if not dtypes.is_half(dtype):
            return out
        if isinstance(out, tuple):
            return type(out)(*(_round(part, dtype) for part in out))
        return _round(out, dtype)

    return call


def _round(x, dtype):
    # Complex results of a real matrix stay complex64: there is no narrower type.
    return astype(x, dtype) if x.dtype == dtypes.float32 else x


def _adjoint(x):
    return matrix_transpose(conj(x) if dtypes.is_complex(x.dtype) else x)


def _eye(x, n):
    """Give the identity of size ``n`` as a raw mask beside ``x``."""
    place = places(x, n)
    return place[:, None] == place[None, :]


def _diagonal_matrix(x):
    return where(_eye(x, x.shape[-1]), expand_dims(x, axis=-2), 0)


def _rows(x):
    """Make row vectors of the vectors in the last axis: scales the columns of a matrix."""
    return expand_dims(x, axis=-2)


def _columns(x):
    return expand_dims(x, axis=-1)


def _over_gaps(x, values):
    """Divide ``x[i, j]`` by ``values[j] - values[i]``; zero on the diagonal.

    Equal values give NaN: the vectors that belong to them are not determined, so neither is a
    derivative.
    """
    gaps = _rows(values) - _columns(values)
    same = raw(gaps) == 0
    quotient = where(same, np.nan, x / where(same, 1, gaps))
    return where(_eye(values, values.shape[-1]), 0, quotient)


def _over(x, size):
    """Divide by ``size``; a zero gives NaN quietly."""
    zero = raw(size) == 0
    return where(zero, np.nan, x / where(zero, 1, size))


# ---------------------------------------------------------------- inverses and systems


@_in_single
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


@_in_single
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
        g, out = _columns(g), _columns(out)
    right = solve(matrix_transpose(x1), g)
    left = -matmul(right, matrix_transpose(out)) if needs[0] else None
    return left, right[..., 0] if len(x2_shape) == 1 else right


@_in_single
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
    singular = _columns(_columns(raw(out) == 0))
    nearby = where(singular, x + _rounding_error(x), x)
    cofactors = _columns(_columns(det(nearby))) * matrix_transpose(inv(nearby))
    return _columns(_columns(g)) * cofactors


def _rounding_error(x):
    """Give a raw diagonal matrix of the size of the rounding errors of ``x``."""
    data = raw(x)
    xp = namespace(data)
    eye = xp.astype(_eye(data, data.shape[-1]), data.dtype)
    if data.shape[-1] == 0:
        return eye
    info = dtypes.finfo(data.dtype)
    size = xp.max(xp.abs(data), axis=(-2, -1), keepdims=True)
    return eye * xp.where(size == 0, info.eps, info.eps * size)


det.defvjps(x=_det_rule)


@_in_single
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
        factor = factor - 1j * imag(conj(g_sign) * sign)
    elif g_log is None:
        return (None,)
    regular = where(_columns(_columns(raw(sign) == 0)), np.nan, x)
    return (_columns(_columns(factor)) * _adjoint(inv(regular)),)


@_in_single
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
    if rtol is None:
        rtol = max(x.shape[-2:]) * dtypes.finfo(x.dtype).eps
    return namespace(x).linalg.pinv(x, rtol=rtol)


def _pinv_rule(g, out, x):
    gh, ph = _adjoint(g), _adjoint(out)
    left = matmul(gh, matmul(out, ph))  # g^H P P^H
    right = matmul(matmul(ph, out), gh)  # P^H P g^H
    left = left - matmul(x, matmul(out, left))
    right = right - matmul(matmul(right, out), x)
    return left + right - matmul(matmul(ph, g), ph)


pinv.defvjps(x=_pinv_rule)


# ------------------------------------------------------------------------ factorizations


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
    return _adjoint(lower) if upper else lower


@_in_single
@differentiable(holomorphic=False)
def _cholesky(x, /):
    check_matrix(x, square=True)
    return namespace(x).linalg.cholesky(x)


def _cholesky_rule(g, out):
    lh = _adjoint(out)
    inner = 0.5 * _hermitian_from_lower(matmul(lh, g))
    # L^-H inner L^-1, by two systems.
    half = solve(lh, inner)
    return _adjoint(solve(lh, _adjoint(half)))


def _hermitian_from_lower(x):
    """Copy the strictly lower triangle to the upper one; the diagonal's real part stays."""
    below = tril(x, k=-1)
    middle = diagonal(x)
    if dtypes.is_complex(x.dtype):
        middle = real(middle)
    return below + _adjoint(below) + _diagonal_matrix(middle)


_cholesky.defvjps(x=_cholesky_rule)


@_in_single
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
    k = n if n < m else m
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
            share = matmul(matmul(q, rest), _adjoint(g_rest))
            gq = share if gq is None else gq + share
    inner = 0
    if gr is not None:
        inner = matmul(r, _adjoint(gr))
    if gq is not None:
        inner = inner - matmul(_adjoint(gq), q)
    square = matmul(q, _hermitian_from_lower(inner))
    if gq is not None:
        square = square + gq
    square = _adjoint(solve(r, _adjoint(square)))  # times R^-H
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
        gu = gu[..., :k] - matmul(rest, matmul(_adjoint(gu[..., k:]), first))
    return first, gu


@_in_single
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
    v = _adjoint(vh)
    gv = None if gvh is None else _adjoint(gvh)
    u, gu = _fold_complement(u, gu, k) if u.shape[-1] > k else (u, gu)
    v, gv = _fold_complement(v, gv, k) if v.shape[-1] > k else (v, gv)
    vh = _adjoint(v)
    if gu is None and gv is None:
        return (matmul(u * _rows(gs), vh),)
    inner = 0 if gs is None else _diagonal_matrix(gs)
    outside = 0
    squares = s * s
    if gu is not None:
        along = matmul(_adjoint(u), gu)
        inner = inner + _over_gaps(along - _adjoint(along), squares) * _rows(s)
        if dtypes.is_complex(along.dtype):
            # The phases of U are fixed by those of V.
            inner = inner + 1j * _diagonal_matrix(_over(imag(diagonal(along)), s))
        if x_shape[-2] > k:
            outside = outside + matmul(_over(gu - matmul(u, along), _rows(s)), vh)
    if gv is not None:
        along = matmul(vh, gv)
        inner = inner + _columns(s) * _over_gaps(along - _adjoint(along), squares)
        if x_shape[-1] > k:
            outside = outside + matmul(u, _adjoint(_over(gv - matmul(v, along), _rows(s))))
    return (matmul(matmul(u, inner), vh) + outside,)


@_in_single
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
    return matmul(u * _rows(g), vh)


svdvals.defvjps(x=_svdvals_rule)


@_in_single
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
    if rtol is None:
        rtol = max(x.shape[-2:]) * dtypes.finfo(x.dtype).eps
    limit = values[..., :1] * xp.asarray(rtol, dtype=values.dtype)[..., None]
    return xp.count_nonzero(values > limit, axis=-1)


# -------------------------------------------------------------------------- eigenvalues


@_in_single
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
    vh = _adjoint(v)
    if g_vectors is None:
        return (matmul(v * _rows(g_values), vh),)
    along = matmul(vh, g_vectors)
    inner = _over_gaps(0.5 * (along - _adjoint(along)), values)
    if g_values is not None:
        inner = inner + _diagonal_matrix(g_values)
    return (matmul(matmul(v, inner), vh),)


@_in_single
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
    return matmul(v * _rows(g), _adjoint(v))


eigvalsh.defvjps(x=_eigvalsh_rule)


@_in_single
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
    vh = _adjoint(v)
    inner = 0 if g_values is None else _diagonal_matrix(g_values)
    if g_vectors is not None:
        along = matmul(vh, g_vectors)
        # Each vector keeps its norm: what would stretch it is taken away.
        along = along - matmul(vh, v * _rows(real(diagonal(along))))
        inner = inner + _over_gaps(along, conj(values))
    return (solve(vh, matmul(inner, vh)),)


@_in_single
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
    vh = _adjoint(v)
    return solve(vh, _columns(g) * vh)


eigvals.defvjps(x=_eigvals_rule)
