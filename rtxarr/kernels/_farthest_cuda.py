"""GPU code that thins clouds out: in each round the point furthest from those chosen is added.

A cloud has one block, which goes through all rounds, or several. Then each round is a launch, which
begins with the furthest point of each block of the launch before: no block waits for another.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _device
from rtxarr.kernels._points_cuda import arithmetic
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset

# Threads of a block, a power of FAN: how many a thread combines at once. There are no more blocks
# of a cloud than threads of a block.
THREADS, FAN = (4, 2) if _SIMULATING else (512, 8)


@functools.cache
def pack(dtype: np.dtype):
    """Return what packs points of up to three axes: zeros for those they lack, and infinity."""
    scalar = np.dtype(dtype).type
    zero, infinity = scalar(0), scalar(np.inf)
    store = by_offset(dtype, 4).store

    @cuda.jit
    def kernel(x, packed):
        i = np.int64(cuda.grid(1))
        if i < x.shape[0]:
            second = x[i, 1] if x.shape[1] > 1 else zero
            third = x[i, 2] if x.shape[1] > 2 else zero
            store(packed, 4 * i, (x[i, 0], second, third, infinity))

    return kernel


def _packed(dtype):
    """Return ``locate``, ``visit`` and ``put`` for packed points, four words each."""
    mul, add = arithmetic(dtype)
    load = by_offset(dtype, 4).load

    @_device
    def locate(x, chosen):
        """Return what ``visit`` wants to know of the point chosen last."""
        return load(x, 4 * chosen)

    @_device
    def visit(x, held, point, here):
        """Return how far a point is from that one, squared, and from those chosen before."""
        there = load(x, 4 * point)
        a, b, c = there[0] - here[0], there[1] - here[1], there[2] - here[2]
        return add(add(mul(a, a), mul(b, b)), mul(c, c)), there[3]

    @_device
    def put(x, held, point, value):
        x[4 * point + 3] = value

    return locate, visit, put


def _plain(dtype):
    """Return the same for points of any number of axes, and an array of what they hold."""
    mul, add = arithmetic(dtype)

    @_device
    def locate(x, chosen):
        return chosen

    @_device
    def visit(x, held, point, here):
        difference = x[point, 0] - x[here, 0]
        total = mul(difference, difference)
        for axis in range(1, x.shape[1]):
            difference = x[point, axis] - x[here, axis]
            total = add(total, mul(difference, difference))
        return total, held[point]

    @_device
    def put(x, held, point, value):
        held[point] = value

    return locate, visit, put


@functools.cache
def rounds(dtype: np.dtype, packed: bool):
    """Return the kernel of rounds ``first`` to ``last - 1``; more than one only with one block.

    ``ends_d`` and ``ends_i``, of shape (2, n_clouds, n_blocks), hold the furthest points of blocks,
    those of odd rounds and of even ones.
    """
    scalar = np.dtype(dtype).type
    taken, none = scalar(-1), scalar(-2)
    kept = np.dtype(dtype).name
    locate, visit, put = (_packed if packed else _plain)(dtype)

    @_device
    def precedes(d, point, other_d, other):
        return d > other_d or (d == other_d and point < other)

    @_device
    def furthest_of(d, point):
        """Return the furthest point of all threads, of equals the first; all threads call it."""
        distances = cuda.shared.array(THREADS, kept)
        points = cuda.shared.array(THREADS, "int64")
        thread = np.int64(cuda.threadIdx.x)
        distances[thread], points[thread] = d, point
        size = THREADS
        while size > 1:
            size //= FAN
            cuda.syncthreads()  # what is combined is in place
            if thread < size:
                for i in range(1, FAN):
                    other_d, other = distances[thread + i * size], points[thread + i * size]
                    if precedes(other_d, other, d, point):
                        d, point = other_d, other
                distances[thread], points[thread] = d, point
        cuda.syncthreads()  # so is the furthest
        d, point = distances[0], points[0]
        cuda.syncthreads()  # all have read it, before the next call overwrites it
        return d, point

    @_device
    def keep(x, held, point, chosen, d, before, best, furthest):
        """Note how far a point is, and return the furthest so far."""
        now = min(d, before)
        if point == chosen:
            now = taken
        if now < before:
            put(x, held, point, now)
        if now > furthest:
            return point, now
        return best, furthest

    @bounded(THREADS)
    def kernel(x, held, ptr, starts, ends_d, ends_i, out, first, last):
        n_blocks = ends_d.shape[2]
        cloud, block = cuda.blockIdx.x // n_blocks, cuda.blockIdx.x % n_blocks
        thread = np.int64(cuda.threadIdx.x)
        begin, end, stride = ptr[cloud], ptr[cloud + 1], n_blocks * THREADS
        for i in range(first, last):
            chosen = starts[cloud]
            if i > 0:
                furthest, best = none, end
                if thread < n_blocks:
                    furthest, best = ends_d[i & 1, cloud, thread], ends_i[i & 1, cloud, thread]
                _, chosen = furthest_of(furthest, best)
            if block == 0 and thread == 0:
                out[cloud, i] = chosen
            here = locate(x, chosen)
            best, furthest = end, none
            point = begin + block * THREADS + thread
            while point + 3 * stride < end:  # all four are read before any is written
                p0, p1, p2, p3 = point, point + stride, point + 2 * stride, point + 3 * stride
                d0, before0 = visit(x, held, p0, here)
                d1, before1 = visit(x, held, p1, here)
                d2, before2 = visit(x, held, p2, here)
                d3, before3 = visit(x, held, p3, here)
                best, furthest = keep(x, held, p0, chosen, d0, before0, best, furthest)
                best, furthest = keep(x, held, p1, chosen, d1, before1, best, furthest)
                best, furthest = keep(x, held, p2, chosen, d2, before2, best, furthest)
                best, furthest = keep(x, held, p3, chosen, d3, before3, best, furthest)
                point += 4 * stride
            while point < end:
                d, before = visit(x, held, point, here)
                best, furthest = keep(x, held, point, chosen, d, before, best, furthest)
                point += stride
            furthest, best = furthest_of(furthest, best)
            if thread == 0:
                ends_d[(i + 1) & 1, cloud, block] = furthest
                ends_i[(i + 1) & 1, cloud, block] = best
            cuda.syncthreads()  # a block that goes on reads it

    return kernel
