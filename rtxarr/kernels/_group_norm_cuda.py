"""GPU kernels of group normalization, with the channels last in memory or first.

Forward: sums of each channel of each sample, statistics of the groups out of them, and one pass
that normalizes. Backward: sums again, the terms of the groups out of them, and one pass for the
gradient. A sample is an array (channels, positions) or, with the channels last, (positions,
channels). Its positions are cut into chunks, of which a block takes one. With the channels last
partial sums have the shape (samples, chunks, channels), and kernels of their own combine them.
With ``silu`` the result is ``y * sigmoid(y)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._rows import Plan, bounded, group_sums, rows_of, window
from rtxarr.kernels._vector import access

# Threads of the blocks that combine partial sums: channels of a group, and parts of the chunks.
MERGE_BLOCK = (4, 3) if _SIMULATING else (32, 8)


class Kernels(NamedTuple):
    """One pass each.

    Attributes
    ----------
    sums : kernel
        ``sums(x, first, second, n_positions, n_channels)``: of the differences from the sample's
        first element of the channel, and of their squares.
    apply : kernel
        ``apply(x, weight, bias, centre, inverse, out, n_positions, n_channels, n_groups)``.
    gradient_sums : kernel
        ``gradient_sums(grad, x, weight, bias, centre, inverse, first, second, n_positions,
        n_channels, n_groups)``: of the gradient of the affine map's result, and of that times
        the normalized input.
    gradient : kernel
        ``gradient(grad, x, weight, bias, centre, inverse, of_mean, of_scale, out, n_positions,
        n_channels, n_groups)``.
    """

    sums: Any
    apply: Any
    gradient_sums: Any
    gradient: Any


@functools.cache
def _activations(dtype: np.dtype, silu: bool):
    """Return device functions: the activation of a number, and a gradient through it."""
    _, quotient, exp, _, _ = arithmetic(dtype)
    one: Any = access(dtype, wide=False).scalar(1)

    @cuda.jit(device=True)
    def activate(y):
        return quotient(y, one + exp(-y)) if silu else y

    @cuda.jit(device=True)
    def through(y, grad):
        if silu:
            s = quotient(one, one + exp(-y))
            return grad * s * (one + y * (one - s))
        return grad

    return activate, through


@functools.cache
def channels_last(
    dtype: np.dtype, wide: bool, block: tuple[int, int], affine: tuple[bool, bool], silu: bool
) -> Kernels:
    """Return the kernels for channels that are neighbours in memory.

    Threads along x of a block take ``width`` neighbouring channels each, threads along y every
    ``block[1]``-th position; the grid runs over chunks, blocks of channels and samples.
    """
    width, scalar, load, store, _ = access(dtype, wide=wide)
    lanes, groups = block
    activate, through = _activations(dtype, silu)
    neighbours, shape = window(width), (groups, lanes * width)
    weighted, biased = affine
    # Positions whose loads are under way together; of one array alone, more.
    at_once, alone = 2 if width == 8 else 4, 4
    size, size_alone = at_once * width, alone * width
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def begin(n_positions, n_channels):
        """Give the first channel, its offset, and the first and last position of this thread."""
        each = (n_positions + cuda.gridDim.x - 1) // cuda.gridDim.x
        start = np.int64(cuda.blockIdx.x) * each
        channel = (np.int64(cuda.blockIdx.y) * lanes + cuda.threadIdx.x) * width
        offset = np.int64(cuda.blockIdx.z) * n_positions * n_channels + channel
        return channel, offset, start + cuda.threadIdx.y, min(start + each, n_positions)

    def reader(count):
        @cuda.jit(device=True)
        def read(array, offset, position, stop, n_channels, kept):
            """Read the elements of several positions, with no branch around the loads."""
            for k in range(count):
                p = position + k * groups
                values = load(array, offset + (p if p < stop else 0) * n_channels)
                for i in range(width):
                    kept[k * width + i] = values[i]

        return read

    fetch, fetch_alone = reader(at_once), reader(alone)

    @cuda.jit(device=True)
    def put(array, offset, position, stop, n_channels, kept):
        for k in range(at_once):
            p = position + k * groups
            if p < stop:
                store(array, offset + p * n_channels, neighbours(kept, k * width))

    @cuda.jit(device=True)
    def combine(sums, shared, partial, channel, n_channels):
        """Add up the rows of threads of the block, in order."""
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        for i in range(width):
            shared[y, x * width + i] = sums[i]
        cuda.syncthreads()  # the sums of all rows of threads are in place
        if y == 0 and channel < n_channels:
            chunk = np.int64(cuda.blockIdx.z) * cuda.gridDim.x + cuda.blockIdx.x
            for i in range(width):
                total = shared[0, x * width + i]
                for other in range(1, groups):
                    total += shared[other, x * width + i]
                partial[chunk * n_channels + channel + i] = total
        cuda.syncthreads()  # they have been read before the next ones overwrite them

    @cuda.jit(device=True)
    def read_groups(array, channel, n_channels, n_groups, kept):
        """Read what a group has, for each channel of this thread, with one division."""
        size = n_channels // n_groups
        group = channel // size
        left = (group + 1) * size - channel  # channels of the first group from here on
        group += np.int64(cuda.blockIdx.z) * n_groups
        for i in range(width):
            step = i >= left
            group += 1 if step else 0
            left += size if step else 0
            kept[i] = array[group]

    @bounded(lanes * groups)
    def sums(x, first, second, n_positions, n_channels):
        shared = cuda.shared.array(shape, scalar)
        totals, squares = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        kept = cuda.local.array(size_alone, scalar)
        channel, offset, position, stop = begin(n_positions, n_channels)
        for i in range(width):
            totals[i] = zero
            squares[i] = zero
        if channel < n_channels:
            origin = load(x, offset)
            while position < stop:
                fetch_alone(x, offset, position, stop, n_channels, kept)
                for k in range(alone):
                    inside = position + k * groups < stop
                    for i in range(width):
                        value = kept[k * width + i] - origin[i] if inside else zero
                        totals[i] += value
                        squares[i] += value * value
                position += alone * groups
        combine(totals, shared, first, channel, n_channels)
        combine(squares, shared, second, channel, n_channels)

    @bounded(lanes * groups)
    def apply(x, weight, bias, centre, inverse, out, n_positions, n_channels, n_groups):
        mean, scale = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        shift, kept = cuda.local.array(width, scalar), cuda.local.array(size, scalar)
        channel, offset, position, stop = begin(n_positions, n_channels)
        if channel >= n_channels:
            return
        read_groups(centre, channel, n_channels, n_groups, mean)
        read_groups(inverse, channel, n_channels, n_groups, scale)
        if weighted:
            factors = load(weight, channel)
            for i in range(width):
                scale[i] *= factors[i]
        if biased:
            terms = load(bias, channel)
            for i in range(width):
                shift[i] = terms[i]
        while position < stop:
            fetch(x, offset, position, stop, n_channels, kept)
            for j in range(size):
                i = j % width
                y = (kept[j] - mean[i]) * scale[i]
                kept[j] = activate(y + shift[i] if biased else y)
            put(out, offset, position, stop, n_channels, kept)
            position += at_once * groups

    @bounded(lanes * groups)
    def gradient_sums(
        grad, x, weight, bias, centre, inverse, first, second, n_positions, n_channels, n_groups
    ):
        shared = cuda.shared.array(shape, scalar)
        totals, products = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        mean, scale = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        factor, shift = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        kept = cuda.local.array(size, scalar)
        up = cuda.local.array(size, scalar)
        channel, offset, position, stop = begin(n_positions, n_channels)
        for i in range(width):
            totals[i] = zero
            products[i] = zero
        if channel < n_channels:
            read_groups(centre, channel, n_channels, n_groups, mean)
            read_groups(inverse, channel, n_channels, n_groups, scale)
            for i in range(width):
                factor[i] = one
                shift[i] = zero
            if silu and weighted:
                factors = load(weight, channel)
                for i in range(width):
                    factor[i] = factors[i]
            if silu and biased:
                terms = load(bias, channel)
                for i in range(width):
                    shift[i] = terms[i]
            while position < stop:
                fetch(x, offset, position, stop, n_channels, kept)
                fetch(grad, offset, position, stop, n_channels, up)
                for k in range(at_once):
                    inside = position + k * groups < stop
                    for i in range(width):
                        hat = (kept[k * width + i] - mean[i]) * scale[i]
                        g = through(hat * factor[i] + shift[i], up[k * width + i])
                        g = g if inside else zero
                        totals[i] += g
                        products[i] += g * hat
                position += at_once * groups
        combine(totals, shared, first, channel, n_channels)
        combine(products, shared, second, channel, n_channels)

    @bounded(lanes * groups)
    def gradient(
        grad,
        x,
        weight,
        bias,
        centre,
        inverse,
        of_mean,
        of_scale,
        out,
        n_positions,
        n_channels,
        n_groups,
    ):
        mean, scale = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        factor, shift = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        first, second = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        kept = cuda.local.array(size, scalar)
        up = cuda.local.array(size, scalar)
        channel, offset, position, stop = begin(n_positions, n_channels)
        if channel >= n_channels:
            return
        read_groups(centre, channel, n_channels, n_groups, mean)
        read_groups(inverse, channel, n_channels, n_groups, scale)
        read_groups(of_mean, channel, n_channels, n_groups, first)
        read_groups(of_scale, channel, n_channels, n_groups, second)
        for i in range(width):
            factor[i] = one
            shift[i] = zero
        if weighted:
            factors = load(weight, channel)
            for i in range(width):
                factor[i] = factors[i]
        if silu and biased:
            terms = load(bias, channel)
            for i in range(width):
                shift[i] = terms[i]
        while position < stop:
            fetch(x, offset, position, stop, n_channels, kept)
            fetch(grad, offset, position, stop, n_channels, up)
            for j in range(size):
                i = j % width
                hat = (kept[j] - mean[i]) * scale[i]
                g = through(hat * factor[i] + shift[i], up[j]) * factor[i]
                kept[j] = (g - first[i] - hat * second[i]) * scale[i]
            put(out, offset, position, stop, n_channels, kept)
            position += at_once * groups

    return Kernels(sums, apply, gradient_sums, gradient)


class KernelsFirst(NamedTuple):
    """One pass each over channels that are rows in memory.

    The grid runs over blocks of channels, chunks and samples. Partial sums have the shape
    (samples, channels, chunks), so those of a group are neighbours, and each block of the second
    pass adds them up itself. All kernels end in ``n_positions, n_channels, n_of_group, n_tiles``:
    the last two are channels of a group, and tiles of a chunk.

    Attributes
    ----------
    sums : kernel
        ``sums(x, first, second, ...)``: of the differences from the group's first element, and of
        their squares.
    apply : kernel
        ``apply(x, weight, bias, first, second, centre, inverse, out, eps, ...)``. It fills in the
        statistics.
    gradient_sums : kernel
        ``gradient_sums(grad, x, weight, bias, centre, inverse, first, second, ...)``: of the
        gradient of the affine map's result, and of that times the normalized input.
    gradient : kernel
        ``gradient(grad, x, weight, bias, centre, inverse, first, second, out, ...)``.
    """

    sums: Any
    apply: Any
    gradient_sums: Any
    gradient: Any


@functools.cache
def channels_first(
    dtype: np.dtype, plan: Plan, affine: tuple[bool, bool], silu: bool
) -> KernelsFirst:
    """Return the kernels for channels that are rows in memory."""
    _, scalar, load, *_ = access(dtype, wide=False)
    _, _, _, fetch, put = rows_of(dtype, plan)
    activate, through = _activations(dtype, silu)
    totals_of = group_sums(scalar, plan.lanes, plan.groups)
    size, tile_size, lanes, groups = plan.kept, plan.tile, plan.lanes, plan.groups
    weighted, biased = affine
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def begin(n_channels):
        """Give this thread's channel, whether there is one, and the offset of the sample's first.

        Idle threads take part in the reductions, with the first channel.
        """
        channel = np.int64(cuda.blockIdx.x) * groups + cuda.threadIdx.y
        live = channel < n_channels
        return channel if live else 0, live, np.int64(cuda.blockIdx.z) * n_channels

    @cuda.jit(device=True)
    def tiles_of(n_positions, n_tiles):
        """Give the first tile of the block's chunk, and the one after its last."""
        start = np.int64(cuda.blockIdx.y) * n_tiles
        return start, min(start + n_tiles, (n_positions + tile_size - 1) // tile_size)

    @cuda.jit(device=True)
    def put_sums(total, square, first, second, row, live):
        total, square = totals_of(total, square, 0)
        if live and cuda.threadIdx.x == 0:
            place = row * cuda.gridDim.y + cuda.blockIdx.y
            first[place] = total
            second[place] = square

    @bounded(plan.threads)
    def sums(x, first, second, n_positions, n_channels, n_of_group, n_tiles):
        kept = cuda.local.array(size, scalar)
        channel, live, sample = begin(n_channels)
        offset, head = (sample + channel) * n_positions, channel // n_of_group * n_of_group
        origin = load(x, (sample + head) * n_positions)[0]
        total, square = zero, zero
        start, stop = tiles_of(n_positions, n_tiles)
        for tile in range(start, stop):
            fetch(x, offset, tile, n_positions, origin, kept)
            for i in range(size):
                value = kept[i] - origin
                total += value
                square += value * value
        put_sums(total, square, first, second, sample + channel, live)

    @bounded(plan.threads)
    def apply(
        x, weight, bias, first, second, centre, inverse, out, eps,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        kept = cuda.local.array(size, scalar)
        channel, live, sample = begin(n_channels)
        offset, group = (sample + channel) * n_positions, channel // n_of_group
        tile, stop = tiles_of(n_positions, n_tiles)
        fetch(x, offset, tile, n_positions, zero, kept)  # under way while sums are added up
        head, n_sums = sample + group * n_of_group, n_of_group * cuda.gridDim.y
        total, square = zero, zero
        for i in range(cuda.threadIdx.x, n_sums, lanes):
            total += first[head * cuda.gridDim.y + i]
            square += second[head * cuda.gridDim.y + i]
        total, square = totals_of(total, square, 0)
        share = one / (scalar(n_positions) * scalar(n_of_group))
        away = total * share
        mean = load(x, head * n_positions)[0] + away
        scale = one / math.sqrt(max(square - total * away, zero) * share + eps)
        if not live:
            return
        if cuda.threadIdx.x == 0 and cuda.blockIdx.y == 0 and head == sample + channel:
            centre[head // n_of_group] = mean
            inverse[head // n_of_group] = scale
        if weighted:
            scale *= load(weight, channel)[0]
        shift = load(bias, channel)[0] if biased else zero
        while tile < stop:
            for i in range(size):
                kept[i] = activate((kept[i] - mean) * scale + shift)
            put(out, offset, tile, n_positions, kept)
            tile += 1
            if tile < stop:
                fetch(x, offset, tile, n_positions, zero, kept)

    @bounded(plan.threads)
    def gradient_sums(
        grad, x, weight, bias, centre, inverse, first, second,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        kept, up = cuda.local.array(size, scalar), cuda.local.array(size, scalar)
        channel, live, sample = begin(n_channels)
        offset, group = (sample + channel) * n_positions, (sample + channel) // n_of_group
        mean, scale = centre[group], inverse[group]
        factor = load(weight, channel)[0] if weighted else one
        shift = load(bias, channel)[0] if biased else zero
        total, product = zero, zero
        start, stop = tiles_of(n_positions, n_tiles)
        for tile in range(start, stop):
            fetch(x, offset, tile, n_positions, zero, kept)
            fetch(grad, offset, tile, n_positions, zero, up)
            for i in range(size):
                hat = (kept[i] - mean) * scale
                g = through(hat * factor + shift, up[i])
                total += g
                product += g * hat
        put_sums(total, product, first, second, sample + channel, live)

    @bounded(plan.threads)
    def gradient(
        grad, x, weight, bias, centre, inverse, first, second, out,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        kept, up = cuda.local.array(size, scalar), cuda.local.array(size, scalar)
        channel, live, sample = begin(n_channels)
        offset, group = (sample + channel) * n_positions, (sample + channel) // n_of_group
        tile, stop = tiles_of(n_positions, n_tiles)
        fetch(x, offset, tile, n_positions, zero, kept)  # under way while sums are added up
        fetch(grad, offset, tile, n_positions, zero, up)
        mean, scale = centre[group], inverse[group]
        head, n_sums = group * n_of_group, n_of_group * cuda.gridDim.y
        of_mean, of_scale = zero, zero
        for i in range(cuda.threadIdx.x, n_sums, lanes):
            factor = one
            if weighted:
                other = i if cuda.gridDim.y == 1 else i // cuda.gridDim.y
                factor = load(weight, head - sample + other)[0]
            of_mean += factor * first[head * cuda.gridDim.y + i]
            of_scale += factor * second[head * cuda.gridDim.y + i]
        of_mean, of_scale = totals_of(of_mean, of_scale, 0)
        if not live:
            return
        share = one / (scalar(n_positions) * scalar(n_of_group))
        of_mean, of_scale = of_mean * share, of_scale * share
        factor = load(weight, channel)[0] if weighted else one
        shift = load(bias, channel)[0] if biased else zero
        while tile < stop:
            for i in range(size):
                hat = (kept[i] - mean) * scale
                g = through(hat * factor + shift, up[i]) * factor
                kept[i] = (g - of_mean - hat * of_scale) * scale
            put(out, offset, tile, n_positions, kept)
            tile += 1
            if tile < stop:
                fetch(x, offset, tile, n_positions, zero, kept)
                fetch(grad, offset, tile, n_positions, zero, up)

    return KernelsFirst(sums, apply, gradient_sums, gradient)


@functools.cache
def of_parameters(dtype: np.dtype):
    """Return the kernel that adds up (samples, channels, chunks) over all but the channels.

    A block of ``MERGE_BLOCK`` threads takes a channel of each row of them; the grid's y runs over
    the two arrays and their results.
    """
    _, scalar, _, store, _ = access(dtype, wide=False)
    n_lanes, n_rows = MERGE_BLOCK
    zero: Any = scalar(0)
    sums = group_sums(scalar, n_lanes, n_rows)

    @bounded(n_lanes * n_rows)
    def kernel(first, second, first_out, second_out, n_samples, n_chunks):
        partial = first if cuda.blockIdx.y == 0 else second
        out = first_out if cuda.blockIdx.y == 0 else second_out
        n_channels, total = np.int64(out.size), zero
        channel = np.int64(cuda.blockIdx.x) * n_rows + cuda.threadIdx.y
        if channel < n_channels:
            for i in range(cuda.threadIdx.x, n_samples * n_chunks, n_lanes):
                sample = i if n_chunks == 1 else i // n_chunks
                row = sample * n_channels + channel
                total += partial[row * n_chunks + i - sample * n_chunks]
        total, _ = sums(total, zero, 0)
        if channel < n_channels and cuda.threadIdx.x == 0:
            store(out, channel, (total,))

    return kernel


class Merges(NamedTuple):
    """Kernels for channels last: a block of ``MERGE_BLOCK`` threads for each group of a sample.

    Attributes
    ----------
    statistics : kernel
        ``statistics(x, first, second, centre, inverse, n_chunks, n_channels, n_groups,
        n_positions, eps)``: of a group, out of the sums.
    terms : kernel
        ``terms(weight, first, second, of_weight, of_bias, of_mean, of_scale, n_chunks,
        n_channels, n_groups, n_positions)``: the gradients of the parameters for each sample, and
        the means over the group that its elements' gradients lack.
    """

    statistics: Any
    terms: Any


@functools.cache
def merges(dtype: np.dtype, weighted: bool) -> Merges:
    """Return the kernels that combine partial sums, in a fixed order."""
    _, scalar, load, *_ = access(dtype, wide=False)
    n_lanes, n_parts = MERGE_BLOCK
    shape = (n_parts, n_lanes)
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def over_chunks(partial, shared, sample, channel, inside, n_chunks, n_channels):
        """Give the sum over all chunks of a channel, to the first row of threads."""
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        total = zero
        if inside:
            for chunk in range(y, n_chunks, n_parts):
                total += partial[(sample * n_chunks + chunk) * n_channels + channel]
        shared[y, x] = total
        cuda.syncthreads()  # the sums of all parts are in place
        if y == 0:
            for other in range(1, n_parts):
                total += shared[other, x]
        cuda.syncthreads()  # they have been read before the next ones overwrite them
        return total

    @bounded(n_lanes * n_parts)
    def statistics(
        x,
        first,
        second,
        centre,
        inverse,
        n_chunks,
        n_channels,
        n_groups,
        n_positions,
        eps,
    ):
        shared = cuda.shared.array(shape, scalar)
        block = np.int64(cuda.blockIdx.x)
        sample, group = block // n_groups, block % n_groups
        size = n_channels // n_groups
        count, mean, square = zero, zero, zero
        for base in range(0, size, n_lanes):
            inside = base + cuda.threadIdx.x < size
            channel = group * size + base + cuda.threadIdx.x
            total = over_chunks(first, shared, sample, channel, inside, n_chunks, n_channels)
            squares = over_chunks(second, shared, sample, channel, inside, n_chunks, n_channels)
            if inside and cuda.threadIdx.y == 0:
                n = scalar(n_positions)
                origin = load(x, sample * n_channels * n_positions + channel)[0]
                away = total / n
                # Chan et al.: the mean and the sum of squares of two sets together.
                delta = origin + away - mean
                squares -= total * away
                both = count + n
                mean += delta * (n / both)
                square += squares + delta * delta * (count * n / both)
                count = both
        if cuda.threadIdx.y == 0:
            shared[0, cuda.threadIdx.x] = mean
            shared[1, cuda.threadIdx.x] = square
            shared[2, cuda.threadIdx.x] = count
        cuda.syncthreads()  # the results of all channels are in place
        if cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
            for i in range(1, n_lanes):
                n = shared[2, i]
                if n > zero:
                    both = count + n
                    delta = shared[0, i] - mean
                    mean += delta * (n / both)
                    square += shared[1, i] + delta * delta * (count * n / both)
                    count = both
            centre[block] = mean
            inverse[block] = one / math.sqrt(max(square, zero) / count + eps)

    @bounded(n_lanes * n_parts)
    def terms(
        weight,
        first,
        second,
        of_weight,
        of_bias,
        of_mean,
        of_scale,
        n_chunks,
        n_channels,
        n_groups,
        n_positions,
    ):
        shared = cuda.shared.array(shape, scalar)
        block = np.int64(cuda.blockIdx.x)
        sample, group = block // n_groups, block % n_groups
        size = n_channels // n_groups
        mean, scale = zero, zero
        for base in range(0, size, n_lanes):
            inside = base + cuda.threadIdx.x < size
            channel = group * size + base + cuda.threadIdx.x
            total = over_chunks(first, shared, sample, channel, inside, n_chunks, n_channels)
            product = over_chunks(second, shared, sample, channel, inside, n_chunks, n_channels)
            if inside and cuda.threadIdx.y == 0:
                of_bias[sample * n_channels + channel] = total
                of_weight[sample * n_channels + channel] = product
                factor = load(weight, channel)[0] if weighted else one
                mean += factor * total
                scale += factor * product
        if cuda.threadIdx.y == 0:
            shared[0, cuda.threadIdx.x] = mean
            shared[1, cuda.threadIdx.x] = scale
        cuda.syncthreads()  # the results of all channels are in place
        if cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
            for i in range(1, n_lanes):
                mean += shared[0, i]
                scale += shared[1, i]
            n = scalar(n_positions) * scalar(size)
            of_mean[block] = mean / n
            of_scale[block] = scale / n

    return Merges(statistics, terms)
