"""A small case for each differentiable operation on sparse matrices."""

import numpy as np

import rtxarr as rx

rng = np.random.default_rng(3)
# Two entries of the last row lie in the same column; the second row is empty.
PATTERN = (np.array([0, 2, 2, 5]), np.array([0, 2, 1, 1, 2]))


def multiply(values, dense, indptr, indices):
    return rx.spmm(values, dense, rx.SparsityPattern(indptr, indices, (3, 3)))


def multiply_transposed(values, dense, indptr, indices):
    pattern = rx.SparsityPattern(indptr, indices, (3, 3))
    return rx.spmm(values, dense, pattern, transpose=True)


VALUES, DENSE = rng.standard_normal(5), rng.standard_normal((3, 2))
CASES = {
    "spmm": [
        (multiply, (VALUES, DENSE, *PATTERN)),
        (multiply_transposed, (VALUES, DENSE, *PATTERN)),
    ],
}
