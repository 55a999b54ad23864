"""GPU kernels of the softmax of rows and of its logarithm, forward and backward."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.dtypes import is_half
from rtxarr.kernels._rows import Plan, add, bounded, group_reduce, larger, rows_of
from rtxarr.kernels._vector import access


def exponential(dtype: Any) -> Any:
    """Return the exponential function of float32 or float64 numbers that kernels use.

    For the half types the hardware's, whose error is far below their rounding.
    """
    return cuda.libdevice.fast_expf if is_half(dtype) and not _SIMULATING else math.exp


class LogSum(NamedTuple):
    """Device functions for the sum of the exponentials of a row.

    ``gather(x, first, n, kept)`` reads the row and gives the largest of this thread's elements,
    ``top``, and the sum of the exponentials of their differences from ``finite(top)``: that is
    ``top``, or zero where it is not finite. ``largest_of`` and ``total_of`` combine the values of
    the threads of a row; a kernel calls them itself, since numba links only one way to the
    shared memory of a function.
    """

    gather: Any
    finite: Any
    largest_of: Any
    total_of: Any


@functools.cache
def log_sum(dtype: np.dtype, plan: Plan) -> LogSum:
    """Return these functions for one element type."""
    scalar: Any = access(dtype, wide=plan.wide).scalar
    fetch, size, tile_size = rows_of(dtype, plan).fetch, plan.kept, plan.tile
    exp, zero, lowest, highest = exponential(dtype), scalar(0), scalar(-np.inf), scalar(np.inf)

    @cuda.jit(device=True)
    def finite(top):
        return top if top > lowest and top < highest else zero

    @cuda.jit(device=True)
    def gather(x, first, n, kept):
        top, total = lowest, zero
        for tile in range((n + tile_size - 1) // tile_size):
            fetch(x, first, tile, n, lowest, kept)
            above = top
            for i in range(size):
                above = larger(above, kept[i])
            shift = finite(above)
            total *= exp(top - shift)
            for i in range(size):
                total += exp(kept[i] - shift)
            top = above
        return top, total

    largest_of = group_reduce(larger, scalar, plan.lanes, plan.groups)
    total_of = group_reduce(add, scalar, plan.lanes, plan.groups)
    return LogSum(gather, finite, largest_of, total_of)


@functools.cache
def forward(dtype: np.dtype, plan: Plan, logarithm: bool):
    """Return the kernel of the softmax, or of its logarithm; flat C-contiguous arrays."""
    scalar: Any = access(dtype, wide=plan.wide).scalar
    begin, _, fetch, put = rows_of(dtype, plan)
    gather, finite, largest_of, total_of = log_sum(dtype, plan)
    resident, size, tile_size = plan.resident, plan.kept, plan.tile
    exp, zero, one, lowest = exponential(dtype), scalar(0), scalar(1), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(x, out, n, n_rows):
        kept = cuda.local.array(size, scalar)
        row, live = begin(n_rows)
        first = row * n if live else 0  # idle threads take part in the reductions
        top, total = gather(x, first, n, kept)
        shift = finite(largest_of(top))
        total = total_of(total * exp(top - shift))
        if not live:
            return
        if logarithm:
            total = lowest if total == zero else math.log(total)
        elif total != zero:  # a row of -inf gives zeros
            total = one / total
        for tile in range(1 if resident else (n + tile_size - 1) // tile_size):
            if not resident:
                fetch(x, first, tile, n, lowest, kept)
            for i in range(size):
                value = kept[i] - shift
                kept[i] = value - total if logarithm else exp(value) * total
            put(out, first, tile, n, kept)

    return kernel


@functools.cache
def backward(dtype: np.dtype, plan: Plan, logarithm: bool):
    """Return the kernel of the gradient, from the result and its gradient."""
    scalar: Any = access(dtype, wide=plan.wide).scalar
    begin, _, fetch, put = rows_of(dtype, plan)
    total_of = group_reduce(add, scalar, plan.lanes, plan.groups)
    resident, size, tile_size = plan.resident, plan.kept, plan.tile
    exp, zero = exponential(dtype), scalar(0)

    @bounded(plan.threads)
    def kernel(grad, out, of_x, n, n_rows):
        up = cuda.local.array(size, scalar)
        result = cuda.local.array(size, scalar)
        row, live = begin(n_rows)
        first = row * n if live else 0
        tiles = 1 if resident else (n + tile_size - 1) // tile_size
        total = zero
        for tile in range(tiles):
            fetch(grad, first, tile, n, zero, up)
            fetch(out, first, tile, n, zero, result)
            for i in range(size):
                total += up[i] if logarithm else up[i] * result[i]
        total = total_of(total)
        if not live:
            return
        for tile in range(tiles):
            if not resident:
                fetch(grad, first, tile, n, zero, up)
                fetch(out, first, tile, n, zero, result)
            for i in range(size):
                if logarithm:
                    up[i] -= exp(result[i]) * total
                else:
                    up[i] = result[i] * (up[i] - total)
            put(of_x, first, tile, n, up)

    return kernel
