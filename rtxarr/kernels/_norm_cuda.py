"""GPU kernels of the normalization of rows, forward and backward."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import (
    Plan,
    add,
    bounded,
    group_reduce,
    group_sums,
    packed_rows_of,
    rows_of,
    window,
)
from rtxarr.kernels._vector import access

# Threads of the block that adds up partial sums: columns, and parts of each.
JOIN_BLOCK = (4, 2) if _SIMULATING else (32, 32)
# Bytes of a row that a thread may hold for registers to be left for those of the next.
_AHEAD = 64


@functools.cache
def forward(dtype: np.dtype, plan: Plan, centred: bool, weighted: bool, biased: bool):
    """Return the kernel that normalizes rows and keeps their statistics.

    Arrays are flat and C-contiguous. Of what the flags rule out it takes any array.
    """
    width, scalar, load, store, _ = access(dtype, wide=plan.width > 1)
    chunks, size, neighbours = plan.chunks, plan.kept, window(width)
    begin, _, place, fetch, _ = rows_of(dtype, plan)
    total_of = group_reduce(add, scalar, plan.lanes, plan.groups, 2)
    resident, tile_size, zero, one = plan.resident, plan.tile, scalar(0), scalar(1)

    @cuda.jit(device=True)
    def total(kept):
        part = zero
        for i in range(size):
            part += kept[i]
        return part

    @cuda.jit(device=True)
    def square(kept, mean, tile, n):
        part = zero
        for k in range(chunks):
            if place(0, tile, k) < n:
                for i in range(width):
                    deviation = kept[k * width + i] - mean
                    part += deviation * deviation
        return part

    @bounded(plan.threads)
    def kernel(x, weight, bias, out, centre, inverse, n, eps):
        kept = cuda.local.array(size, scalar)
        row, live = begin(inverse.size)
        first = row * n if live else 0  # idle threads take part in the reductions
        tiles = 1 if resident else (n + tile_size - 1) // tile_size
        mean, part = zero, zero
        if resident:
            fetch(x, first, 0, n, zero, kept)
        if centred:
            for tile in range(tiles):
                if not resident:
                    fetch(x, first, tile, n, zero, kept)
                part += total(kept)
            mean = total_of(part, 0) / scalar(n)
            part = zero
        for tile in range(tiles):
            if not resident:
                fetch(x, first, tile, n, zero, kept)
            part += square(kept, mean, tile, n)
        scale = one / math.sqrt(total_of(part, 1) / scalar(n) + eps)
        if not live:
            return
        if cuda.threadIdx.x == 0:
            inverse[row] = scale
            if centred:
                centre[row] = mean
        for tile in range(tiles):
            if not resident:
                fetch(x, first, tile, n, zero, kept)
            for k in range(chunks):
                j = place(0, tile, k)
                if j < n:
                    for i in range(width):
                        kept[k * width + i] = (kept[k * width + i] - mean) * scale
                    if weighted:
                        values = load(weight, j)
                        for i in range(width):
                            kept[k * width + i] *= values[i]
                    if biased:
                        values = load(bias, j)
                        for i in range(width):
                            kept[k * width + i] += values[i]
                    store(out, first + j, neighbours(kept, k * width))

    return kernel


@functools.cache
def backward(dtype: np.dtype, plan: Plan, centred: bool, weighted: bool):
    """Return the kernel of the gradient of the rows alone, a row for each group of threads."""
    scalar: Any = access(dtype, wide=plan.width > 1).scalar
    size, resident, tile_size, zero = plan.kept, plan.resident, plan.tile, scalar(0)
    begin, _, _, fetch, put = rows_of(dtype, plan)
    sums = group_sums(scalar, plan.lanes, plan.groups)

    @cuda.jit(device=True)
    def read(grad, x, weight, first, tile, n, mean, scale, of_hat, hat, factor):
        fetch(grad, first, tile, n, zero, of_hat)
        fetch(x, first, tile, n, mean, hat)
        if weighted:
            fetch(weight, 0, tile, n, zero, factor)
        for i in range(size):
            hat[i] = (hat[i] - mean) * scale
            if weighted:
                of_hat[i] *= factor[i]

    @bounded(plan.threads)
    def kernel(grad, x, weight, centre, inverse, out, n):
        hat, of_hat = cuda.local.array(size, scalar), cuda.local.array(size, scalar)
        factor = cuda.local.array(size, scalar)
        row, live = begin(inverse.size)
        row = row if live else 0  # idle threads take part in the reductions
        first, scale = row * n, inverse[row]
        mean = centre[row] if centred else zero
        tiles = 1 if resident else (n + tile_size - 1) // tile_size
        dot, total = zero, zero
        for tile in range(tiles):
            read(grad, x, weight, first, tile, n, mean, scale, of_hat, hat, factor)
            for i in range(size):
                dot += of_hat[i] * hat[i]
                total += of_hat[i]
        dot, total = sums(dot, total, 0)
        dot /= scalar(n)
        total = total / scalar(n) if centred else zero
        if not live:
            return
        for tile in range(tiles):
            if not resident:
                read(grad, x, weight, first, tile, n, mean, scale, of_hat, hat, factor)
            for i in range(size):
                of_hat[i] = (of_hat[i] - total - hat[i] * dot) * scale
            put(out, first, tile, n, of_hat)

    return kernel


@functools.cache
def backward_with_sums(dtype: np.dtype, plan: Plan, centred: bool, weighted: bool, n_params: int):
    """Return the kernel that also adds up the gradients of the weight and, of two, the bias.

    Each block takes every ``gridDim.x``-th set of rows, in order, and leaves its sums in its row
    of the partial sums. Rows must be resident.
    """
    width, scalar, _, _, store_sums = access(dtype, wide=plan.width > 1)
    n_words, word, fetch, unpack = packed_rows_of(dtype, plan)
    chunks, groups, threads, size = plan.chunks, plan.groups, plan.threads, plan.kept
    _, _, place, _, put = rows_of(dtype, plan)
    sums = group_sums(scalar, plan.lanes, groups, 2)
    neighbours, shared_shape = window(width), (groups, plan.tile if groups > 1 else 1)
    ahead = size * np.dtype(scalar).itemsize <= _AHEAD
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def add_groups(kept, shared, partial, n):
        """Add up the groups of the block, in order, into its row of ``partial``."""
        first = np.int64(cuda.blockIdx.x) * n
        if groups == 1:
            for k in range(chunks):
                column = place(0, 0, k)
                if column < n:
                    store_sums(partial, first + column, neighbours(kept, k * width))
            return
        for k in range(chunks):
            for i in range(width):
                shared[cuda.threadIdx.y, place(0, 0, k) + i] = kept[k * width + i]
        cuda.syncthreads()  # the sums of all groups are in place
        column = np.int64(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        while column < n:
            part = shared[0, column]
            for other in range(1, groups):
                part += shared[other, column]
            partial[first + column] = part
            column += threads
        cuda.syncthreads()  # all have read them before the next sums overwrite them

    @bounded(threads)
    def kernel(grad, x, weight, centre, inverse, out, of_weight, of_bias, n):
        shared = cuda.shared.array(shared_shape, scalar)
        weight_sum, bias_sum = cuda.local.array(size, scalar), cuda.local.array(size, scalar)
        hat, of_hat = cuda.local.array(size, scalar), cuda.local.array(size, scalar)
        factor, weights = cuda.local.array(size, scalar), cuda.local.array(n_words, word)
        next_x, next_grad = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        for i in range(size):
            weight_sum[i] = zero
            bias_sum[i] = zero
        if weighted:
            fetch(weight, 0, n, weights)
        n_rows, share = np.int64(inverse.size), one / scalar(n)
        step = np.int64(cuda.gridDim.x) * groups
        row, slot = np.int64(cuda.blockIdx.x) * groups + cuda.threadIdx.y, 0
        base, next_scale, next_mean = row - cuda.threadIdx.y, zero, zero
        here = row if row < n_rows else 0  # idle threads take part in the reductions
        if ahead:
            next_scale, next_mean = inverse[here], centre[here] if centred else zero
            fetch(grad, here * n, n, next_grad)
            fetch(x, here * n, n, next_x)
        while base < n_rows:
            live = row < n_rows
            if not ahead:
                here = row if live else 0
                next_scale, next_mean = inverse[here], centre[here] if centred else zero
                fetch(grad, here * n, n, next_grad)
                fetch(x, here * n, n, next_x)
            scale, mean = next_scale, next_mean
            unpack(next_grad, of_hat)
            unpack(next_x, hat)
            base += step
            if ahead:  # the next row is under way while the threads wait for each other
                here = row + step if row + step < n_rows else 0
                next_scale, next_mean = inverse[here], centre[here] if centred else zero
                fetch(grad, here * n, n, next_grad)
                fetch(x, here * n, n, next_x)
            for i in range(size):
                hat[i] = (hat[i] - mean) * scale
            if live:
                for i in range(size):
                    weight_sum[i] += of_hat[i] * hat[i]
                    if n_params == 2:
                        bias_sum[i] += of_hat[i]
            if weighted:
                unpack(weights, factor)
                for i in range(size):
                    of_hat[i] *= factor[i]
            dot, total = zero, zero
            for i in range(size):
                dot += of_hat[i] * hat[i]
                total += of_hat[i]
            dot, total = sums(dot, total, slot)
            slot = 1 - slot
            if live:
                slope = dot * share * scale
                shift = total * share * scale if centred else zero
                for i in range(size):
                    of_hat[i] = of_hat[i] * scale - shift - hat[i] * slope
                put(out, row * n, 0, n, of_hat)
            row += step
        add_groups(weight_sum, shared, of_weight, n)
        if n_params == 2:
            add_groups(bias_sum, shared, of_bias, n)

    return kernel


@functools.cache
def columns(dtype: np.dtype, wide: bool, centred: bool):
    """Return the kernel of the parameters' partial gradients where rows are too long.

    Blocks of ``(32, 8)`` threads: x runs over columns, y and the grid's y over rows.
    """
    width, scalar, load, _, store = access(dtype, wide=wide)
    zero: Any = scalar(0)
    shape = (8, 32 * width)

    @bounded(256)
    def kernel(grad, x, centre, inverse, of_weight, of_bias, n):
        shared_weight = cuda.shared.array(shape, scalar)
        shared_bias = cuda.shared.array(shape, scalar)
        weight_sum = cuda.local.array(width, scalar)
        bias_sum = cuda.local.array(width, scalar)
        for i in range(width):
            weight_sum[i] = zero
            bias_sum[i] = zero
        y = cuda.threadIdx.y
        column = (np.int64(cuda.blockIdx.x) * 32 + cuda.threadIdx.x) * width
        row = np.int64(cuda.blockIdx.y) * 8 + y
        if column < n:
            while row < inverse.size:
                values, grads = load(x, row * n + column), load(grad, row * n + column)
                mean, scale = centre[row] if centred else zero, inverse[row]
                for i in range(width):
                    weight_sum[i] += grads[i] * ((values[i] - mean) * scale)
                    bias_sum[i] += grads[i]
                row += np.int64(cuda.gridDim.y) * 8
        for i in range(width):
            shared_weight[y, cuda.threadIdx.x * width + i] = weight_sum[i]
            shared_bias[y, cuda.threadIdx.x * width + i] = bias_sum[i]
        cuda.syncthreads()  # the sums of all rows of threads are in place
        if y == 0 and column < n:
            for i in range(width):
                for other in range(1, 8):
                    weight_sum[i] += shared_weight[other, cuda.threadIdx.x * width + i]
                    bias_sum[i] += shared_bias[other, cuda.threadIdx.x * width + i]
                of_weight[cuda.blockIdx.y * n + column + i] = weight_sum[i]
                of_bias[cuda.blockIdx.y * n + column + i] = bias_sum[i]

    return kernel


@functools.cache
def join(dtype: np.dtype):
    """Return the kernel that adds up the rows of partial sums, in a fixed order.

    The grid's y runs over the two arrays and their results; with one, the others are not read.
    """
    _, scalar, _, store, _ = access(dtype, wide=False)
    n_columns, n_parts = JOIN_BLOCK
    zero: Any = scalar(0)

    @bounded(n_columns * n_parts)
    def kernel(first, second, first_out, second_out):
        # Neighbouring threads (x) take neighbouring columns; y takes every n_parts-th row.
        shared = cuda.shared.array((n_parts, n_columns), scalar)
        partial = first if cuda.blockIdx.y == 0 else second
        out = first_out if cuda.blockIdx.y == 0 else second_out
        x, y, n = cuda.threadIdx.x, cuda.threadIdx.y, np.int64(out.size)
        column = np.int64(cuda.blockIdx.x) * n_columns + x
        total = zero
        if column < n:
            i, step = y * n + column, n_parts * n
            while i + 3 * step < partial.size:  # four loads in flight
                a, b = partial[i], partial[i + step]
                c, d = partial[i + 2 * step], partial[i + 3 * step]
                total = total + a + b + c + d
                i += 4 * step
            while i < partial.size:
                total += partial[i]
                i += step
        shared[y, x] = total
        cuda.syncthreads()  # the sums of all parts are in place
        if y == 0 and column < n:
            for other in range(1, n_parts):
                total += shared[other, x]
            store(out, column, (total,))

    return kernel
