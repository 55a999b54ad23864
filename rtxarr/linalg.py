"""Linear algebra: the standard's extension, over arrays and tensors, batched.

A stack of matrices lies in the last two axes. Functions of the standard that are also in the
main namespace (``matmul``, ``matrix_transpose``, ``tensordot``, ``vecdot``) are the same ones.
"""

from rtxarr._names import no_attribute
from rtxarr.ops._decompose import (
    EighResult,
    EigResult,
    QRResult,
    SVDResult,
    cholesky,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    matrix_rank,
    qr,
    svd,
    svdvals,
)
from rtxarr.ops._inverse import SlogdetResult, det, inv, pinv, slogdet, solve
from rtxarr.ops._linalg import matmul, tensordot, vecdot
from rtxarr.ops._manipulate import matrix_transpose
from rtxarr.ops._matrix import (
    cross,
    diagonal,
    matrix_norm,
    matrix_power,
    outer,
    trace,
    vector_norm,
)

__all__ = [
    "EigResult",
    "EighResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


def __getattr__(name):
    raise no_attribute(__name__, name)
