"""Matrix products over tracers, and the ``linalg`` extension as calls of the library."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from rtxarr.linalg import EighResult, EigResult, QRResult, SlogdetResult, SVDResult
from rtxarr.polygraph import _ir
from rtxarr.polygraph._calls import called
from rtxarr.polygraph._elementwise import as_array, cast_node, elementwise, where_dtype
from rtxarr.polygraph._trace import Tracer, current


def matmul(x1, x2, /):
    """Multiply matrices, or stacks of them."""
    a, b = as_array(x1), as_array(x2)
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("matmul: operands must have at least one dimension, got a scalar")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(
            "matmul: the last axis of x1 must match the second-to-last of x2, got shapes "
            f"{a.shape} and {b.shape}"
        )
    dtype = where_dtype(a.dtype, b.dtype)
    return current().fresh(_ir.matmul(cast_node(a.node, dtype), cast_node(b.node, dtype)))


def matrix_transpose(x, /):
    """Swap the last two axes."""
    x = as_array(x)
    if x.ndim < 2:
        raise ValueError(f"x must be at least 2-dimensional for matrix_transpose, got {x.ndim}")
    axes = list(range(x.ndim))
    axes[-2:] = axes[-1], axes[-2]
    return x.permuted(axes)


def tensordot(x1, x2, /, *, axes=2):
    """Contract axes of two arrays."""
    a, b = as_array(x1), as_array(x2)
    if isinstance(axes, int):
        mine, other = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        mine, other = ((n,) if isinstance(n, int) else tuple(n) for n in axes)
    mine = tuple(i % a.ndim for i in mine)
    other = tuple(i % b.ndim for i in other)
    rest_a = [i for i in range(a.ndim) if i not in mine]
    rest_b = [i for i in range(b.ndim) if i not in other]
    left = _matrix(a.permuted((*rest_a, *mine)), len(rest_a))
    right = _matrix(b.permuted((*other, *rest_b)), len(other))
    shape = (*(a.shape[i] for i in rest_a), *(b.shape[i] for i in rest_b))
    return current().fresh(_ir.reshape(matmul(left, right).node, shape))


def _matrix(x: Tracer, n_rows: int) -> Tracer:
    shape = int(np.prod(x.shape[:n_rows])), int(np.prod(x.shape[n_rows:]))
    return current().fresh(_ir.reshape(x.node, shape))


def vecdot(x1, x2, /, *, axis=-1):
    """Return the dot products along an axis, the first conjugated."""
    from rtxarr.polygraph._namespace import moveaxis

    a, b = as_array(x1), as_array(x2)
    if a.dtype.kind == "c":
        a = elementwise(np.conjugate, a)
    a, b = moveaxis(a, axis, -1), moveaxis(b, axis, -1)
    left = a.reshaped((*a.shape[:-1], 1, a.shape[-1]))
    right = b.reshaped((*b.shape, 1))
    out = matmul(left, right)
    return out.reshaped(out.shape[:-2])


def outer(x1, x2, /):
    """Return the outer product of two vectors."""
    a, b = as_array(x1), as_array(x2)
    return elementwise(np.multiply, a.reshaped((a.size, 1)), b.reshaped((1, b.size)))


def diagonal(x, /, *, offset=0):
    """Return the diagonals of matrices."""
    from rtxarr.polygraph._namespace import take_along_axis

    x = as_array(x)
    rows, columns = x.shape[-2:]
    first = max(-offset, 0)
    n = max(min(rows - first, columns - max(offset, 0)), 0)
    part = x[..., first : first + n, :]
    index = np.reshape(np.arange(n) + max(offset, 0), (1,) * (x.ndim - 2) + (n, 1))
    index = np.broadcast_to(index, (*x.shape[:-2], n, 1))
    return take_along_axis(part, current().xp.asarray(index), axis=-1)[..., 0]


def trace(x, /, *, offset=0, dtype=None):
    """Return the sums of diagonals."""
    from rtxarr.polygraph._reduce import sum

    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def _call(name: str, kind: Any = None) -> Any:
    def function(*arrays, **options):
        out = called(f"linalg.{name}", [as_array(a) for a in arrays], options)
        return out if kind is None else kind(*out)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"See ``linalg.{name}`` of the array API standard."
    return function


cholesky = _call("cholesky")
cross = _call("cross")
det = _call("det")
eig = _call("eig", EigResult)
eigh = _call("eigh", EighResult)
eigvals = _call("eigvals")
eigvalsh = _call("eigvalsh")
inv = _call("inv")
matrix_norm = _call("matrix_norm")
matrix_rank = _call("matrix_rank")
pinv = _call("pinv")
qr = _call("qr", QRResult)
slogdet = _call("slogdet", SlogdetResult)
solve = _call("solve")
svd = _call("svd", SVDResult)
svdvals = _call("svdvals")
vector_norm = _call("vector_norm")


def matrix_power(x, n, /):
    """Return a power of square matrices."""
    return called("linalg.matrix_power", (as_array(x),), {"n": operator.index(n)})
