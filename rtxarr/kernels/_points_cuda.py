"""GPU code for points: a thread for each query; a block for each cloud that is thinned out."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _add, _add32, _device, _mul, _mul32
from rtxarr.kernels._points_core import build

# Threads of the block that thins a cloud out; a power of two.
THREADS = 4 if _SIMULATING else 1024


@functools.cache
def _core(dtype: np.dtype, in_space: bool = False):
    single = np.dtype(dtype) == np.float32
    mul, add = (_mul32, _add32) if single else (_mul, _add)
    return build(_device, mul, add, np.dtype(dtype).type, in_space=in_space)


@functools.cache
def search(kind: str, dtype: np.dtype, in_space: bool):
    """Return the search; ``kind`` as in ``points``; ``in_space``: with three axes."""
    core = _core(dtype, in_space)
    worst = core.worst_kept if kind == "insert" else core.worst_within
    find = core.searcher(core.scanner(getattr(core, kind), worst), worst)

    @cuda.jit
    def kernel(
        visit, y, batches, xt, order, cells, lo, inverse, width, dims,
        others, limit, k, starts, step, counts, best_d, best_i,
    ):  # fmt: skip
        v = np.int64(cuda.grid(1))
        if v < visit.size:
            query = visit[v]  # neighbours in space, so that a warp looks at the same cells
            grid = xt, order, cells, lo, inverse, width, dims
            kept = k, starts[query], step, best_d, best_i
            skip = query if others else np.int64(-1)
            counts[query] = find(y, query, batches[query], grid, skip, limit, kept)

    return kernel


@functools.cache
def sort_rows(dtype: np.dtype):
    """Return the sorting of rows; a thread a row."""
    sort = _core(dtype).sort

    @cuda.jit
    def kernel(offsets, best_d, best_i):
        row = np.int64(cuda.grid(1))
        if row < offsets.size - 1:
            sort(offsets[row], offsets[row + 1], best_d, best_i)

    return kernel


@functools.cache
def farthest(dtype: np.dtype):
    """Return the thinning out of clouds; a block of ``THREADS`` a cloud."""
    scalar = np.dtype(dtype).type
    single = np.dtype(dtype) == np.float32
    mul, add = (_mul32, _add32) if single else (_mul, _add)
    zero, infinity, taken, none = scalar(0), scalar(np.inf), scalar(-1), scalar(-2)
    kept = np.dtype(dtype).name

    @cuda.jit
    def kernel(x, ptr, starts, out, nearest):
        distances = cuda.shared.array(THREADS, kept)
        points = cuda.shared.array(THREADS, "int64")
        cloud, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        begin, end = ptr[cloud], ptr[cloud + 1]
        chosen = starts[cloud]
        for i in range(out.shape[1]):
            # Each thread goes over every THREADS-th point and finds the furthest of them.
            best, furthest = begin, none
            point = begin + thread
            while point < end:
                total = zero
                for axis in range(x.shape[1]):
                    difference = x[point, axis] - x[chosen, axis]
                    total = add(total, mul(difference, difference))
                held = infinity if i == 0 else nearest[point]
                if total < held:
                    held = total
                if point == chosen:
                    held = taken
                nearest[point] = held
                if held > furthest:
                    best, furthest = point, held
                point += THREADS
            if thread == 0:
                out[cloud, i] = chosen
            distances[thread], points[thread] = furthest, best
            cuda.syncthreads()
            half = THREADS // 2
            while half > 0:  # the furthest of all, of equals the first
                if thread < half:
                    d, p = distances[thread + half], points[thread + half]
                    nearer = d < distances[thread]
                    if not nearer and (d > distances[thread] or p < points[thread]):
                        distances[thread], points[thread] = d, p
                cuda.syncthreads()
                half //= 2
            chosen = points[0]
            cuda.syncthreads()  # before the next round writes

    return kernel
