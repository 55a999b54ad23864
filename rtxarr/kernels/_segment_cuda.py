"""GPU kernels of the segment reductions: one for segments of moderate length, two for long ones."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
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


@cuda.jit(device=True)
def first_slot(start, chunk_rows):
    """Give where the chunks of a long segment begin, from its first row alone.

    A segment of more than ``chunk_rows`` rows has at most as many chunks as lie between its
    slot and that of the next segment.
    """
    return 2 * (start // chunk_rows)


@cuda.jit(device=True)
def find_segment(indptr, slot, chunk_rows):
    """Return the last segment whose slot is at or before this one."""
    low, high = np.int64(0), np.int64(indptr.size - 2)
    while low < high:
        middle = (low + high + 1) >> 1
        if first_slot(indptr[middle], chunk_rows) <= slot:
            low = middle
        else:
            high = middle - 1
    return low


# Threads of a block that joins chunks: slots or features, and parts of the chunks.
JOIN_BLOCK = (4, 2) if _SIMULATING else (32, 16)

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

    @cuda.jit
    def chunks(values, indptr, indices, partial, n_features, chunk_rows):
        """Reduce each chunk of ``chunk_rows`` rows of the long segments into its slot."""
        slot = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if slot * n_features >= partial.size:
            return
        segment = find_segment(indptr, slot, chunk_rows)
        start, stop = indptr[segment], indptr[segment + 1]
        if stop - start <= chunk_rows:
            return
        start += (slot - first_slot(start, chunk_rows)) * chunk_rows
        if start >= stop:
            return
        stop = min(start + chunk_rows, stop)
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            total = reduce_rows(values, indices, start, stop, feature, n_features)
            store_scalars(partial, slot * n_features + feature, total)
            feature += cuda.blockDim.x * width

    store_one = access(dtype, wide=False).store
    n_lanes, n_parts = JOIN_BLOCK

    @cuda.jit
    def join(indptr, partial, out, n_features, chunk_rows):
        """Combine the chunks of each long segment that begins among the block's slots.

        The grid's x runs over blocks of slots and its y over blocks of features; in a block x
        runs over those, and y over parts of the chunks.
        """
        owners = cuda.shared.array(n_lanes, np.int64)
        shared = cuda.shared.array((n_parts, n_lanes), scalar)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        base = np.int64(cuda.blockIdx.x) * n_lanes
        feature = np.int64(cuda.blockIdx.y) * n_lanes + x
        if y == 0:
            slot, owner = base + x, np.int64(-1)
            if slot * n_features < partial.size:
                segment = find_segment(indptr, slot, chunk_rows)
                start = indptr[segment]
                is_long = indptr[segment + 1] - start > chunk_rows
                if is_long and first_slot(start, chunk_rows) == slot:
                    owner = segment
            owners[x] = owner
        cuda.syncthreads()  # the owners of all slots are in place
        for i in range(n_lanes):
            segment = owners[i]
            if segment < 0:
                continue  # so do all threads of the block
            n_rows = indptr[segment + 1] - indptr[segment]
            stop = base + i + (n_rows + chunk_rows - 1) // chunk_rows
            total = nothing
            if feature < n_features:
                j = base + i + y
                while j + 3 * n_parts < stop:  # four loads in flight
                    a = partial[j * n_features + feature]
                    b = partial[(j + n_parts) * n_features + feature]
                    c = partial[(j + 2 * n_parts) * n_features + feature]
                    d = partial[(j + 3 * n_parts) * n_features + feature]
                    total = operation(operation(operation(operation(total, a), b), c), d)
                    j += 4 * n_parts
                while j < stop:
                    total = operation(total, partial[j * n_features + feature])
                    j += n_parts
            shared[y, x] = total
            cuda.syncthreads()  # the partial totals of all parts are in place
            if y == 0 and feature < n_features:
                for other in range(1, n_parts):
                    total = operation(total, shared[other, x])
                store_one(out, segment * n_features + feature, (finish(total, scalar(n_rows)),))
            cuda.syncthreads()  # row 0 has read them before the next segment overwrites them

    return rows, chunks, join
