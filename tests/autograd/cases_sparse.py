"""A small case for each differentiable operation on sparse matrices."""

import numpy as np

import rtxarr as rx

rng = np.random.default_rng(3)
# Two entries of the last row lie in the same column; the second row is empty.
PATTERN = (np.array([0, 2, 2, 5]), np.array([0, 2, 1, 1, 2]))


def multiply(values, dense, indptr, indices):
    return rx.spmm(values, dense, rx.SparsityPattern(indptr, indices, (3, 3)))


CASES = {"spmm": [(multiply, (rng.standard_normal(5), rng.standard_normal((3, 2)), *PATTERN))]}
