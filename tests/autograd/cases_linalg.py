"""A small case for each operation of linalg and fft, made independent of signs and phases."""

import functools

import numpy as np

import rtxarr as rx
from rtxarr import fft, linalg
from rtxarr.ops._decompose import _cholesky
from rtxarr.ops._fft import _fftn, _irfftn, _rfftn

rng = np.random.default_rng(11)


def real(*shape):
    return rng.standard_normal(shape)


def cplx(*shape):
    return real(*shape) + 1j * real(*shape)


SQUARE, STACK = real(3, 3), real(2, 2, 2)
TALL, WIDE = real(4, 2), real(2, 4)
CSQUARE, CTALL, CWIDE = cplx(3, 3), cplx(4, 2), cplx(2, 4)
MATRICES = (SQUARE, STACK, TALL, WIDE, CSQUARE, CTALL, CWIDE)


def adjoint(x):
    return rx.conj(rx.matrix_transpose(x))


def hermitian(x):
    return x + adjoint(x)


def definite(x):
    n = x.shape[-1]
    return rx.matmul(x, adjoint(x)) + n * rx.eye(n)


def weights(n):
    return rx.arange(1, n + 1, dtype=rx.float64)


def projectors(vectors):
    """Sum projectors onto the columns, each with another weight: phases drop out."""
    return rx.matmul(vectors * weights(vectors.shape[-1]), adjoint(vectors))


def through_svd(full_matrices):
    def function(x):
        u, s, vh = linalg.svd(x, full_matrices=full_matrices)
        k = s.shape[-1]
        u1, u2, v1, v2 = u[..., :k], u[..., k:], adjoint(vh[..., :k, :]), adjoint(vh[..., k:, :])
        # With the values of S this would be x itself, whatever the rule says about U and V.
        both = rx.matmul(u1 * weights(k), adjoint(v1))
        rests = rx.matmul(u2, adjoint(u2)), rx.matmul(v2, adjoint(v2))
        return both, s, projectors(u1), projectors(v1), *rests

    return function


def through_qr(x):
    q, r = linalg.qr(x, mode="complete")
    k = min(x.shape[-2:])
    rest = q[..., k:]
    return q[..., :k], r, rx.matmul(rest, adjoint(rest))


def through_eigh(x):
    values, vectors = linalg.eigh(hermitian(x))
    return values, projectors(vectors)


def through_eig(x):
    values, vectors = linalg.eig(x)
    return values, rx.matmul(vectors * values[..., None, :], adjoint(vectors))


def norms(ord, *matrices, axis=None):
    return [(lambda x: linalg.vector_norm(x, ord=ord, axis=axis), (x,)) for x in matrices]


def transforms(op, x, **options):
    return [
        (functools.partial(op, s=s, axes=axes, norm=norm, **options), (x,))
        for s, axes in (((4,), (1,)), ((7,), (0,)), ((2, 5), (1, 0)), ((5, 3, 3), (0, 1, 2)))
        for norm in ("backward", "ortho", "forward")
    ]


CASES = {
    "_cholesky": [
        (lambda x: _cholesky(definite(x)), (SQUARE,)),
        (lambda x: linalg.cholesky(definite(x), upper=True), (CSQUARE,)),
        (lambda x: linalg.cholesky(definite(x)), (STACK,)),
    ],
    "_fftn": [
        *transforms(_fftn, cplx(5, 4, 2), inverse=False),
        *transforms(_fftn, real(5, 4, 2), inverse=True),
        (lambda x: fft.fft(x, n=3), (cplx(2, 5),)),
    ],
    "_irfftn": [
        *transforms(_irfftn, cplx(5, 4, 2)),
        (fft.irfft, (cplx(2, 4),)),
        (lambda x: fft.hfft(x, n=5), (cplx(2, 4),)),
    ],
    "_rfftn": [
        *transforms(_rfftn, real(5, 4, 2)),
        (fft.rfft, (real(2, 4),)),
        (lambda x: fft.ihfft(x, n=5), (real(2, 4),)),
    ],
    "cross": [
        (linalg.cross, (real(2, 3), real(3))),
        (lambda x, y: linalg.cross(x, y, axis=0), (cplx(3, 2), real(3, 2))),
    ],
    "det": [(linalg.det, (x,)) for x in (SQUARE, STACK, CSQUARE, real(1, 1))],
    "eig": [(through_eig, (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "eigh": [(through_eigh, (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "eigvals": [(linalg.eigvals, (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "eigvalsh": [(lambda x: linalg.eigvalsh(hermitian(x)), (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "inv": [(linalg.inv, (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "pinv": [(linalg.pinv, (x,)) for x in MATRICES],
    "qr": [
        *((linalg.qr, (x,)) for x in MATRICES),
        *((through_qr, (x,)) for x in MATRICES),
        (lambda x: linalg.qr(x).Q, (TALL,)),
        (lambda x: linalg.qr(x).R, (CWIDE,)),
        (lambda x: linalg.qr(x).Q, (WIDE,)),
    ],
    "slogdet": [(linalg.slogdet, (x,)) for x in (SQUARE, STACK, CSQUARE)],
    "solve": [
        (linalg.solve, (SQUARE, real(3))),
        (linalg.solve, (CSQUARE, real(3, 2))),
        (linalg.solve, (real(2, 1, 3, 3), real(4, 3, 2))),
        (linalg.solve, (real(2, 3, 3), real(3))),
    ],
    "svd": [
        *((through_svd(False), (x,)) for x in MATRICES),
        *((through_svd(True), (x,)) for x in MATRICES),
        (lambda x: projectors(linalg.svd(x).U[..., :2]), (CTALL,)),
        (lambda x: projectors(adjoint(linalg.svd(x).Vh[..., :2, :])), (CWIDE,)),
        (lambda x: linalg.svd(x).S, (CTALL,)),
    ],
    "svdvals": [(linalg.svdvals, (x,)) for x in MATRICES],
    "vecdot": [
        (rx.vecdot, (cplx(2, 3), cplx(2, 3))),
        (rx.vecdot, (real(2, 3), cplx(3))),
        (lambda x, y: rx.vecdot(x, y, axis=-2), (cplx(3, 2), real(4, 3, 1))),
        (lambda x, y: rx.vecdot(x, y, axis=0), (real(3, 2), real(3, 2))),
    ],
    "vector_norm": [
        *(case for ord in (1, 2, 3, 0.5, -1, np.inf, -np.inf) for case in norms(ord, TALL, CWIDE)),
        *norms(2, STACK, axis=(0, -1)),
        *norms(4, STACK, axis=1),
        (lambda x: linalg.vector_norm(x, axis=0, keepdims=True), (np.array([[0.0, 2], [3, 0]]),)),
    ],
}
