"""GPU kernels of the sparse product: one over pieces of rows, one to add the pieces up."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access


@functools.cache
def multiply(dtype: np.dtype, wide: bool, ordered: bool):
    """Return the kernel for one element type.

    ``wide``: four neighbours at a time. ``ordered``: entry ``j`` is ``values[order[j]]``.
    """
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
    def kernel(values, dense, indptr, indices, order, out, n_features):
        # Neighbouring threads (x) take neighbouring features; y and the grid run over pieces.
        piece = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if piece >= indptr.size - 1:
            return
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            total = nothing
            for j in range(indptr[piece], indptr[piece + 1]):
                weight = values[order[j] if ordered else j]
                x = load(dense, np.int64(indices[j]) * n_features + feature)
                total = add_scaled(total, weight, x)
            store(out, piece * n_features + feature, total)
            feature += cuda.blockDim.x * width

    return kernel


@functools.cache
def join(dtype: np.dtype):
    """Return the kernel that adds up the pieces of each row, in order; a thread an element."""
    scalar = np.dtype(dtype).type

    @cuda.jit
    def kernel(partial, rows, out, n_features):
        i = cuda.grid(1)
        if i < out.size:
            row, feature = i // n_features, i % n_features
            total = scalar(0)
            for piece in range(rows[row], rows[row + 1]):
                total += partial[piece * n_features + feature]
            out[i] = total

    return kernel
