"""How a BLAS can read the operands of a product, told from shapes and strides alone."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

__all__ = ["Copies", "Matrix", "Product", "Unsupported", "describe", "matrix"]

# A batch that no single step describes takes several launches, up to this many.
MAX_LAUNCHES = 32
# cuBLAS 12.6 to 13.2 read wrong elements when a row (column) starts this many bytes after another.
_MAX_LD_BYTES = 2**31


class Unsupported(Exception):
    """The library does not take this; the message says why, and is empty for empty operands."""


class SplitsOnly(Unsupported):
    """Every algorithm that the library names would split the sum where it may lose a part."""


class Matrix(NamedTuple):
    """A matrix whose rows lie ``ld`` elements apart; its columns do if it is ``transposed``."""

    transposed: bool
    ld: int


class Copies(NamedTuple):
    """Which operands must be made contiguous first."""

    a: bool
    b: bool


class Product(NamedTuple):
    """``batch`` products of (m, k) and (k, n) matrices, started once for each of ``offsets``.

    All distances are in elements: ``ld`` between rows of the result, ``steps`` from one matrix of
    a batch to the next, and ``offsets`` from where an array begins, each for (a, b, result).
    """

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    ld: int
    batch: int
    steps: tuple[int, int, int]
    offsets: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]


def matrix(
    rows: int, cols: int, row_stride: int, col_stride: int, *, itemsize: int = 1
) -> Matrix | None:
    """Describe a matrix by its strides (in elements); None if only a copy could be."""
    if (cols == 1 or col_stride == 1) and (rows == 1 or row_stride >= cols):
        found = Matrix(False, row_stride if rows > 1 else cols)
    elif (rows == 1 or row_stride == 1) and (cols == 1 or col_stride >= rows):
        found = Matrix(True, col_stride if cols > 1 else rows)
    else:
        return None
    return found if found.ld * itemsize < _MAX_LD_BYTES else None


def describe(
    a_shape: tuple,
    a_strides: tuple,
    b_shape: tuple,
    b_strides: tuple,
    itemsize: int,
    *,
    out_strides: tuple | None = None,
    out_itemsize: int | None = None,
) -> Product | Copies:
    """Say how to compute ``a @ b`` from operands that lie like this.

    Parameters
    ----------
    a_shape, b_shape : tuple of int
        As ``matmul`` takes them: vectors, matrices, or stacks of matrices that broadcast.
    a_strides, b_strides : tuple of int, bytes
    itemsize : int
        Of both operands.
    out_strides : tuple of int, bytes, optional
        Of the result; contiguous when left out.
    out_itemsize : int, optional
        Of the result, if it differs.

    Returns
    -------
    Product or Copies

    Raises
    ------
    Unsupported
        Where copies would not help either, or there is nothing to compute.
    ValueError
        When the shapes do not go together.
    """
    if not a_shape or not b_shape:
        raise ValueError(f"a product takes no scalars, got shapes {a_shape} and {b_shape}")
    vector_a, vector_b = len(a_shape) == 1, len(b_shape) == 1
    if vector_a:
        a_shape, a_strides = (1, *a_shape), (0, *a_strides)
    if vector_b:
        b_shape, b_strides = (*b_shape, 1), (*b_strides, 0)
    m, k = a_shape[-2:]
    n = b_shape[-1]
    if b_shape[-2] != k:
        raise ValueError(f"matrices of shapes {a_shape} and {b_shape} do not go together")
    stack = np.broadcast_shapes(a_shape[:-2], b_shape[:-2])
    shape = (*stack, *(m,) * (not vector_a), *(n,) * (not vector_b))
    if 0 in (m, n, k, *stack):
        raise Unsupported("")

    a = _operand(a_shape, a_strides, itemsize)
    b = _operand(b_shape, b_strides, itemsize)
    if a is None or b is None:
        return Copies(a is None, b is None)
    (a_matrix, a_steps), (b_matrix, b_steps) = a, b
    ld, out_steps = _result(
        (*stack, m, n), shape, out_strides, out_itemsize or itemsize, vector_a, vector_b
    )
    missing = len(stack) - len(a_steps), len(stack) - len(b_steps)
    dims = _merged(
        (size, (sa, sb, so))
        for size, sa, sb, so in zip(
            stack, (0,) * missing[0] + a_steps, (0,) * missing[1] + b_steps, out_steps, strict=True
        )
    )
    # Where a stack meets one matrix, its rows may form one tall matrix.
    while dims and not a_matrix.transposed:
        size, (sa, sb, so) = dims[-1]
        if sb or not (sa >= k and so >= n if m == 1 else (sa, so) == (m * a_matrix.ld, m * ld)):
            break
        if m == 1:
            a_matrix, ld = Matrix(False, sa), so
        m *= size
        dims.pop()
    if max(a_matrix.ld * itemsize, ld * (out_itemsize or itemsize)) >= _MAX_LD_BYTES:
        raise Unsupported("rows more than 2 GiB apart")

    batch, steps = 1, (0, 0, 0)
    if dims:
        batch, steps = dims.pop(max(range(len(dims)), key=lambda i: dims[i][0]))
    if math.prod(size for size, _ in dims) > MAX_LAUNCHES:
        copies = Copies(
            not _contiguous(a_shape, a_strides, itemsize),
            not _contiguous(b_shape, b_strides, itemsize),
        )
        if not any(copies):
            raise Unsupported("stacks that no single step describes")
        return copies
    offsets = tuple(
        tuple(
            sum(i * part[side] for i, (_, part) in zip(index, dims, strict=True))
            for side in range(3)
        )
        for index in itertools.product(*(range(size) for size, _ in dims))
    )
    return Product(m, n, k, a_matrix, b_matrix, ld, batch, steps, offsets, shape)


def _operand(shape, strides, itemsize):
    """Give the matrix and the steps between matrices, in elements; None if it needs a copy."""
    if any(stride % itemsize for stride in strides):
        return None
    *steps, row, col = (
        0 if size == 1 else stride // itemsize for size, stride in zip(shape, strides, strict=True)
    )
    found = matrix(*shape[-2:], row, col, itemsize=itemsize)
    return None if found is None or min(steps, default=0) < 0 else (found, tuple(steps))


def _result(full_shape, shape, strides, itemsize, vector_a, vector_b):
    """Give the distance between rows of the result, and the steps between its matrices."""
    *stack, m, n = full_shape
    if strides is None:
        steps = itertools.accumulate((m * n, *stack[:0:-1]), lambda x, y: x * y)
        return n, tuple(steps)[::-1][: len(stack)] if stack else ()
    if len(strides) != len(shape):
        raise ValueError(f"out must have shape {shape}")
    strides = list(strides)
    if vector_a:
        strides.insert(len(stack), 0)
    if vector_b:
        strides.append(0)
    found = _operand(full_shape, strides, itemsize)
    if found is None or found[0].transposed:
        raise Unsupported("an out that is not stored row by row")
    if any(step == 0 and size > 1 for size, step in zip(stack, found[1], strict=True)):
        raise Unsupported("an out whose elements share memory")
    return found[0].ld, found[1]


def _merged(dims):
    """Join neighbouring axes that one step describes, and drop those of length one."""
    found: list = []
    for size, steps in dims:
        if size == 1:
            continue
        if found and all(
            outer == inner * size for outer, inner in zip(found[-1][1], steps, strict=True)
        ):
            size *= found.pop()[0]
        found.append((size, steps))
    return found


def _contiguous(shape, strides, itemsize):
    """Tell whether an array is stored in order without gaps, as a copy would be."""
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
