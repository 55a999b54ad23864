"""The kernel of the sparse product in the simulator, and what it compiles to."""

import numpy as np
import pytest

from rtxarr.kernels.spmm import spmm
from rtxarr.testing import assert_close


@pytest.mark.sim
@pytest.mark.parametrize("n_features", [1, 3, 4, 12])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_kernel_matches_dense_product(dtype, n_features):
    rng = np.random.default_rng(0)
    indptr = np.array([0, 2, 2, 5, 6])
    indices = rng.integers(0, 3, 6)
    values = rng.integers(-2, 3, 6).astype(dtype)
    matrix = np.zeros((4, 3), dtype=dtype)
    np.add.at(matrix, ([0, 0, 2, 2, 2, 3], indices), values)
    dense = rng.integers(-2, 3, (3, n_features)).astype(dtype)
    assert_close(spmm(values, dense, indptr, indices), matrix @ dense, exact=True)
