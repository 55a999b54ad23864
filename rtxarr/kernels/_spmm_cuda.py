"""The GPU kernel of the sparse product."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access


@functools.cache
def kernel(dtype: np.dtype, wide: bool):
    """Return the kernel for one element type, four neighbours at a time if ``wide``."""
    width, scalar, load, store, _ = access(dtype, wide=wide)
    nothing = (scalar(0),) * width

    if width == 4:

        @cuda.jit(device=True)
        def add_scaled(total, weight, x):
            return (
                total[0] + weight * x[0],
                total[1] + weight * x[1],
                total[2] + weight * x[2],
                total[3] + weight * x[3],
            )

    else:

        @cuda.jit(device=True)
        def add_scaled(total, weight, x):
            return (total[0] + weight * x[0],)

    @cuda.jit
    def multiply(values, dense, indptr, indices, out, n_features):
        # Neighbouring threads (x) take neighbouring features; y and the grid run over rows.
        row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if row >= indptr.size - 1:
            return
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            total = nothing
            for j in range(indptr[row], indptr[row + 1]):
                x = load(dense, np.int64(indices[j]) * n_features + feature)
                total = add_scaled(total, values[j], x)
            store(out, row * n_features + feature, total)
            feature += cuda.blockDim.x * width

    return multiply
