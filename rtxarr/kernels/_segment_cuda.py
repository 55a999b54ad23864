"""GPU kernels of the segment reductions: one for segments of moderate length, two for long ones."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._vector import access, lift
from rtxarr.kernels.segment import identity


@cuda.jit(device=True)
def _add(a, b):
    return a + b


@cuda.jit(device=True)
def _maximum(a, b):
    # NaN wins, as in NumPy: a comparison with NaN is false.
    return a if a > b or a != a else b


@cuda.jit(device=True)
def _minimum(a, b):
    return a if a < b or a != a else b


@cuda.jit(device=True)
def _keep(total, count):
    return total


@cuda.jit(device=True)
def _divide(total, count):
    return total / count


OPERATIONS = {"sum": _add, "mean": _add, "max": _maximum, "min": _minimum}


@functools.cache
def kernels(op: str, dtype: np.dtype, wide: bool, gathered: bool):
    """Return ``(rows, chunks, join)`` for one operation and element type.

    Values and results are flat C-contiguous arrays of rows of ``n_features``. Segment ``s``
    reduces rows ``indptr[s]:indptr[s + 1]``, or if ``gathered`` those that ``indices`` names there.
    """
    width, scalar, load, store, store_scalars = access(dtype, wide=wide)
    operation = OPERATIONS[op]
    combine = lift(operation, width)
    finish = _divide if op == "mean" else _keep
    finish_all = lift(finish, width)
    nothing = scalar(identity(op, dtype))
    nothing_all = (nothing,) * width

    @cuda.jit(device=True)
    def row_offset(indices, j, n_features):
        return np.int64(indices[j] if gathered else j) * n_features

    @cuda.jit(device=True)
    def reduce_rows(values, indices, start, stop, feature, n_features):
        """Combine ``width`` features of rows ``start:stop``, in order."""
        total = nothing_all
        j = start
        while j + 3 < stop:  # four loads in flight hide most of the memory's latency
            a = load(values, row_offset(indices, j, n_features) + feature)
            b = load(values, row_offset(indices, j + 1, n_features) + feature)
            c = load(values, row_offset(indices, j + 2, n_features) + feature)
            d = load(values, row_offset(indices, j + 3, n_features) + feature)
            total = combine(combine(combine(combine(total, a), b), c), d)
            j += 4
        while j < stop:
            total = combine(total, load(values, row_offset(indices, j, n_features) + feature))
            j += 1
        return total

    @cuda.jit(device=True)
    def counts(n_rows):
        count = scalar(max(n_rows, 1))
        if width == 1:
            return (count,)
        if width == 4:
            return (count, count, count, count)
        return (count, count, count, count, count, count, count, count)

    @cuda.jit
    def rows(values, indptr, indices, out, n_features, longest):
        """Reduce the segments of up to ``longest`` rows."""
        # Neighbouring threads (x) take neighbouring features; y runs over segments.
        segment = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if segment >= indptr.size - 1:
            return
        start, stop = indptr[segment], indptr[segment + 1]
        if stop - start > longest:
            return
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            total = reduce_rows(values, indices, start, stop, feature, n_features)
            store(out, segment * n_features + feature, finish_all(total, counts(stop - start)))
            feature += cuda.blockDim.x * width

    @cuda.jit(device=True)
    def find_segment(first_chunk, chunk):
        """Return the last segment whose first chunk is at or before ``chunk``."""
        low, high = np.int64(0), np.int64(first_chunk.size - 1)
        while low < high:
            middle = (low + high + 1) >> 1
            if first_chunk[middle] <= chunk:
                low = middle
            else:
                high = middle - 1
        return low

    @cuda.jit
    def chunks(values, indptr, indices, first_chunk, partial, n_features, chunk_rows):
        """Reduce each chunk of ``chunk_rows`` rows of the long segments into ``partial``."""
        chunk = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if chunk >= first_chunk[first_chunk.size - 1]:
            return
        segment = find_segment(first_chunk, chunk)
        start = indptr[segment] + (chunk - first_chunk[segment]) * chunk_rows
        stop = min(start + chunk_rows, indptr[segment + 1])
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            total = reduce_rows(values, indices, start, stop, feature, n_features)
            store_scalars(partial, chunk * n_features + feature, total)
            feature += cuda.blockDim.x * width

    store_one = access(dtype, wide=False).store

    @cuda.jit
    def join(indptr, first_chunk, partial, out, n_features):
        """Combine the partial results of each long segment: one block each, (32, 8) threads."""
        chunk = np.int64(cuda.blockIdx.x)
        if chunk >= first_chunk[first_chunk.size - 1]:
            return
        segment = find_segment(first_chunk, chunk)
        if chunk != first_chunk[segment]:
            return
        stop = first_chunk[segment + 1]
        count = scalar(indptr[segment + 1] - indptr[segment])
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        shared = cuda.shared.array((8, 32), scalar)
        for base in range(0, n_features, 32):
            feature = base + x
            total = nothing
            if feature < n_features:
                for j in range(chunk + y, stop, 8):
                    total = operation(total, partial[j * n_features + feature])
            shared[y, x] = total
            cuda.syncthreads()  # all eight partial totals of a feature are in place
            if y == 0 and feature < n_features:
                for other in range(1, 8):
                    total = operation(total, shared[other, x])
                store_one(out, segment * n_features + feature, (finish(total, count),))
            cuda.syncthreads()  # row 0 has read them before the next features overwrite them

    return rows, chunks, join
