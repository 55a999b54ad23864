"""The kernel of the sparse product in the simulator, and what it compiles to."""

import numpy as np
import pytest

from rtxarr.kernels.spmm import spmm
from rtxarr.testing import assert_close


@pytest.mark.sim
@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("rows", [None, [0, 1, 3, 3, 4]], ids=["whole", "pieces"])
@pytest.mark.parametrize("n_features", [1, 3, 4, 12])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_kernel_matches_dense_product(dtype, n_features, rows, ordered):
    rng = np.random.default_rng(0)
    indptr = np.array([0, 2, 2, 5, 6])
    indices = rng.integers(0, 3, 6)
    values = rng.integers(-2, 3, 6).astype(dtype)
    order = rng.permutation(6) if ordered else None
    matrix = np.zeros((4, 3), dtype=dtype)
    entries = values[order] if ordered else values
    np.add.at(matrix, ([0, 0, 2, 2, 2, 3], indices), entries)
    if rows is not None:
        rows = np.array(rows)
        matrix = np.stack(
            [matrix[a:b].sum(axis=0) for a, b in zip(rows[:-1], rows[1:], strict=True)]
        )
    dense = rng.integers(-2, 3, (3, n_features)).astype(dtype)
    got = spmm(values, dense, indptr, indices, order=order, rows=rows)
    assert_close(got, matrix @ dense, exact=True)
