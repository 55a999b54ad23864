"""Product of a sparse matrix in CSR form with a dense one."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels

__all__ = ["spmm"]


def spmm(values: Any, dense: Any, indptr: Any, indices: Any) -> Any:
    """Multiply a CSR matrix with a dense one.

    Parameters
    ----------
    values : array of float32, float64, complex64 or complex128, shape (n_entries,)
    dense : array of the same dtype, shape (n_columns, n_features)
    indptr : array of int64, shape (n_rows + 1,)
    indices : array of int64, shape (n_entries,)
        Neither is checked on a GPU: that would read them back to the host.

    Returns
    -------
    array, shape (n_rows, n_features), dtype of ``values``
        The entries of a row are added in order by one thread for each feature, so rows of
        thousands of entries should be given in pieces.
    """
    xp = namespace(values, dense, indptr, indices)
    n_rows, n_features = indptr.shape[0] - 1, dense.shape[1]
    if 0 in (n_rows, n_features):
        return xp.empty((n_rows, n_features), dtype=values.dtype)
    if not runs_kernels(values):
        from scipy import sparse

        shape = (n_rows, dense.shape[0])
        return sparse.csr_array((values, indices, indptr), shape=shape) @ dense
    from rtxarr.kernels._spmm_cuda import kernel

    flat = xp.reshape(dense, (-1,))  # copies when dense is not contiguous
    out = xp.empty(n_rows * n_features, dtype=values.dtype)
    # A pool's or NumPy's fresh array is aligned; a slice of one may not be.
    address = flat.ctypes.data if isinstance(flat, np.ndarray) else flat.data.ptr
    wide = values.dtype == np.float32 and n_features % 4 == 0 and address % 16 == 0
    width = 4 if wide else 1
    lanes = min(32, 1 << (-(-n_features // width) - 1).bit_length())
    block = (lanes, 256 // lanes)
    args = (values, flat, indptr, indices, out, n_features)
    launch(kernel(values.dtype, wide), -(-n_rows // block[1]), args, block=block)
    return xp.reshape(out, (n_rows, n_features))
