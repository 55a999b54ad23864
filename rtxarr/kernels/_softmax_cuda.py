"""GPU kernels of the softmax of rows and of its logarithm, forward and backward."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._rows import Plan, add, bounded, group_reduce, rows_of
from rtxarr.kernels._vector import access


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
    scalar: Any = access(dtype, wide=False).scalar
    _, tiles, _, fetch, _ = rows_of(dtype, plan)
    larger, _, exp, base, power = arithmetic(dtype)
    size, zero, lowest, highest = plan.kept, scalar(0), scalar(-np.inf), scalar(np.inf)

    @cuda.jit(device=True)
    def finite(top):
        return top if top > lowest and top < highest else zero

    @cuda.jit(device=True)
    def gather(x, first, n, kept):
        top, total = lowest, zero
        for tile in range(tiles(first, n)):
            fetch(x, first, tile, n, lowest, kept)
            above = top
            for i in range(size):
                above = larger(above, kept[i])
            shift = finite(above)
            total *= exp(top - shift)
            shift *= base
            for i in range(size):
                total += power(kept[i], shift)
            top = above
        return top, total

    largest_of = group_reduce(larger, scalar, plan.lanes, plan.groups)
    total_of = group_reduce(add, scalar, plan.lanes, plan.groups, 2)
    return LogSum(gather, finite, largest_of, total_of)


@functools.cache
def forward(dtype: np.dtype, plan: Plan, logarithm: bool):
    """Return the kernel of the softmax, or of its logarithm; flat C-contiguous arrays."""
    scalar: Any = access(dtype, wide=False).scalar
    begin, tiles, _, fetch, put = rows_of(dtype, plan)
    gather, finite, largest_of, total_of = log_sum(dtype, plan)
    larger, _, exp, base, power = arithmetic(dtype)
    size, resident = plan.kept, plan.resident
    zero, one, lowest = scalar(0), scalar(1), scalar(-np.inf)

    @cuda.jit(device=True)
    def scale_of(total):
        """Give what is taken off the logarithms, or what the exponentials are multiplied by."""
        if logarithm:
            return lowest if total == zero else math.log(total)
        return zero if total == zero else one / total  # a row of -inf gives zeros

    @bounded(plan.threads)
    def once(x, out, n, n_rows):
        kept = cuda.local.array(size, scalar)
        row, live = begin(n_rows)
        first = row * n if live else 0  # idle threads take part in the reductions
        fetch(x, first, 0, n, lowest, kept)
        top = lowest
        for i in range(size):
            top = larger(top, kept[i])
        shift = finite(largest_of(top, 0))
        scaled, total = shift * base, zero
        for i in range(size):
            value = power(kept[i], scaled)
            total += value
            if not logarithm:
                kept[i] = value
        scale = scale_of(total_of(total, 0))
        if live:
            for i in range(size):
                kept[i] = kept[i] - shift - scale if logarithm else kept[i] * scale
            put(out, first, 0, n, kept)

    @bounded(plan.threads)
    def twice(x, out, n, n_rows):
        kept = cuda.local.array(size, scalar)
        row, live = begin(n_rows)
        first = row * n if live else 0
        top, total = gather(x, first, n, kept)
        shift = finite(largest_of(top, 0))
        scale = scale_of(total_of(total * exp(top - shift), 0))
        if not live:
            return
        scaled = shift * base
        for tile in range(tiles(first, n)):
            fetch(x, first, tile, n, lowest, kept)
            for i in range(size):
                if logarithm:
                    kept[i] = kept[i] - shift - scale
                else:
                    kept[i] = power(kept[i], scaled) * scale
            put(out, first, tile, n, kept)

    return once if resident else twice


@functools.cache
def backward(dtype: np.dtype, plan: Plan, logarithm: bool):
    """Return the kernel of the gradient, from the result and its gradient."""
    scalar: Any = access(dtype, wide=False).scalar
    begin, tiles, _, fetch, put = rows_of(dtype, plan)
    total_of = group_reduce(add, scalar, plan.lanes, plan.groups)
    resident, size, exp, zero = plan.resident, plan.kept, arithmetic(dtype).exp, scalar(0)

    @bounded(plan.threads)
    def kernel(grad, out, of_x, n, n_rows):
        up = cuda.local.array(size, scalar)
        result = cuda.local.array(size, scalar)
        row, live = begin(n_rows)
        first = row * n if live else 0
        n_tiles = 1 if resident else tiles(first, n)
        total = zero
        for tile in range(n_tiles):
            fetch(grad, first, tile, n, zero, up)
            fetch(out, first, tile, n, zero, result)
            for i in range(size):
                total += up[i] if logarithm else up[i] * result[i]
        total = total_of(total, 0)
        if not live:
            return
        for tile in range(n_tiles):
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
