"""GPU kernels of group normalization, with the channels last in memory or first.

Each way takes two passes: one leaves partial sums, and the other adds up those of its groups and
computes. A sample is an array (channels, positions) or, with the channels last, (positions,
channels). Its positions are cut into chunks, of which a block takes one. With ``silu`` the result
is ``y * sigmoid(y)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._rows import Plan, bounded, group_sums, rows_of, window
from rtxarr.kernels._vector import access, packed

# Threads of the blocks that add up the parameters' partial sums: parts of them, and channels.
MERGE_BLOCK = (4, 3) if _SIMULATING else (32, 8)
# Pieces of 16 bytes whose loads a thread has under way together, where the channels are last.
AT_ONCE = 4
# Partial sums whose loads it has, and threads that add up those of a channel.
FLIGHT, COLUMN_PARTS = 4, 4 if _SIMULATING else 32


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


class Kernels(NamedTuple):
    """Two passes each way over channels that are last in memory.

    The first pass leaves partial sums: those of groups with the shape (samples, groups, blocks of
    channels, chunks), where those of a group are neighbours, and each block of the second pass
    adds them up itself. All kernels end in ``n_positions, n_each, n_channels, n_groups,
    n_of_group``: the second is positions of a chunk, the last channels of a group.

    Attributes
    ----------
    sums : kernel
        ``sums(x, first, second, ...)``: of the differences from the group's first element, and of
        their squares.
    apply : kernel
        ``apply(x, weight, bias, first, second, centre, inverse, out, eps, ...)``. It fills in the
        statistics.
    gradient_sums : kernel
        ``gradient_sums(grad, x, weight, bias, centre, inverse, first, second, of_bias, of_weight,
        ...)``: of the gradient of the affine map's result, and of that times the normalized input;
        for groups with the weight as a factor, and for channels as (samples, chunks, channels).
    gradient : kernel
        ``gradient(grad, x, weight, bias, centre, inverse, first, second, of_bias, of_weight, out,
        bias_out, weight_out, ...)``. It adds up the parameters' gradients too, where there is room
        for them.
    """

    sums: Any
    apply: Any
    gradient_sums: Any
    gradient: Any


@functools.cache
def channels_last(
    dtype: np.dtype,
    wide: bool,
    block: tuple[int, int],
    affine: tuple[bool, bool],
    silu: bool,
    back: bool,
) -> Kernels:
    """Return the kernels for channels that are neighbours in memory.

    ``back``: whether the second pass takes the positions of a block from its last. Where all blocks
    run at once, those are what is in the cache.

    Threads along x of a block take ``width`` neighbouring channels each, threads along y every
    ``block[1]``-th position; the grid runs over chunks, blocks of channels and samples. What
    belongs to channels is worked out once for a block, in shared memory.
    """
    width, scalar, _, store, _ = access(dtype, wide=wide)
    _, _, load, store_one, _ = access(dtype, wide=False)
    each, word, load_packed, numbers = packed(dtype, wide=wide)
    lanes, rows = block
    threads, span, per_word = lanes * rows, lanes * width, width // each
    activate, through = _activations(dtype, silu)
    neighbours, weighted, biased = window(width), *affine
    rows_shape, parts_shape = (2, rows, span), (2, max(threads, span))
    two, three, four = (2, span), (3, span), (4, span)
    # Pieces whose loads are under way together.
    at_once, of_two = AT_ONCE, AT_ONCE // 2
    of_sums = 1 if silu and width == 8 else of_two  # for want of registers
    n_words, n_words_of_two, n_words_of_sums = at_once * each, of_two * each, of_sums * each
    n_columns = threads // COLUMN_PARTS
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def begin(n_positions, n_each, n_channels, back):
        """Give the offset of the block's first position, the way to the next, and how many are.

        Threads with no channel have no position, and the offset of the first channel.
        """
        channel = (np.int64(cuda.blockIdx.y) * lanes + cuda.threadIdx.x) * width
        start = np.int64(cuda.blockIdx.x) * n_each
        stop, live = min(start + n_each, n_positions), channel < n_channels
        first = np.int64(cuda.blockIdx.z) * n_positions + (stop - 1 if back else start)
        offset = first * n_channels + (channel if live else 0)
        return offset, -n_channels if back else n_channels, stop - start if live else 0

    # No branch around the loads.

    @cuda.jit(device=True)
    def fetch(array, offset, position, stop, stride, words):
        place, step = offset + position * stride, rows * stride
        for k in range(at_once):
            values = load_packed(array, place if position + k * rows < stop else offset)
            for i in range(each):
                words[k * each + i] = values[i]
            place += step

    def reader(count):
        @cuda.jit(device=True)
        def read(array, other, offset, position, stop, stride, words, others):
            place, step = offset + position * stride, rows * stride
            for k in range(count):
                at = place if position + k * rows < stop else offset
                values, others_values = load_packed(array, at), load_packed(other, at)
                for i in range(each):
                    words[k * each + i] = values[i]
                    others[k * each + i] = others_values[i]
                place += step

        return read

    fetch_both, fetch_for_sums = reader(of_two), reader(of_sums)

    @cuda.jit(device=True)
    def unpack(words, k, kept):
        for i in range(each):
            values = numbers(words[k * each + i])
            for j in range(per_word):
                kept[i * per_word + j] = values[j]

    @cuda.jit(device=True)
    def thread():
        return cuda.threadIdx.y * lanes + cuda.threadIdx.x

    @cuda.jit(device=True)
    def ratio(a, b):
        """Divide channels in 32 bits, which takes a fraction of the time."""
        return np.int64(np.uint32(a) // np.uint32(b))

    @cuda.jit(device=True)
    def slot(column):
        """Give where a channel of the block lies in shared memory: no two threads in one bank."""
        piece = ratio(column, width)
        return (column - piece * width) * lanes + piece

    @cuda.jit(device=True)
    def look_up(table, k, kept):
        for i in range(width):
            kept[i] = table[k, i * lanes + cuda.threadIdx.x]

    @cuda.jit(device=True)
    def here(n_channels, n_of_group):
        """Give the block's first channel and how many there are, its first group and how many."""
        start = np.int64(cuda.blockIdx.y) * span
        n_here, group = min(n_channels - start, span), ratio(start, n_of_group)
        return start, n_here, group, ratio(start + n_here - 1, n_of_group) + 1 - group

    @cuda.jit(device=True)
    def over_rows(first, second, shared):
        """Add up the rows of threads of the block, in order, into the first of ``shared``."""
        for i in range(width):
            shared[0, cuda.threadIdx.y, i * lanes + cuda.threadIdx.x] = first[i]
            shared[1, cuda.threadIdx.y, i * lanes + cuda.threadIdx.x] = second[i]
        cuda.syncthreads()  # the sums of all rows of threads are in place
        for column in range(thread(), span, threads):
            a, b = shared[0, 0, column], shared[1, 0, column]
            for other in range(1, rows):
                a += shared[0, other, column]
                b += shared[1, other, column]
            shared[0, 0, column] = a
            shared[1, 0, column] = b
        cuda.syncthreads()  # so are those of all channels

    @cuda.jit(device=True)
    def put_groups(shared, weight, first, second, n_channels, n_groups, n_of_group, with_weight):
        """Add up the channels of each group, in order, into the block's place in both arrays."""
        start, n_here, group, n_groups_here = here(n_channels, n_of_group)
        for g in range(thread(), n_groups_here, threads):
            channel = (group + g) * n_of_group
            a, b = zero, zero
            for column in range(max(channel - start, 0), min(channel + n_of_group - start, n_here)):
                factor = load(weight, start + column)[0] if with_weight else one
                a += factor * shared[0, 0, slot(column)]
                b += factor * shared[1, 0, slot(column)]
            place = np.int64(cuda.blockIdx.z) * n_groups + group + g
            place = (place * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
            first[place] = a
            second[place] = b

    @cuda.jit(device=True)
    def sum_parts(first, second, shared, n_channels, n_groups, n_of_group):
        """Add up what belongs to the block's groups, so many parts of each in ``shared``."""
        _, _, group, n_here = here(n_channels, n_of_group)
        parts = max(ratio(threads, n_here), 1)
        for i in range(thread(), n_here * parts, threads):
            g = ratio(i, parts)
            begins = ratio((group + g) * n_of_group, span)
            ends = ratio((group + g + 1) * n_of_group - 1, span) + 1
            place = np.int64(cuda.blockIdx.z) * n_groups + group + g
            place = (place * cuda.gridDim.y + begins) * cuda.gridDim.x
            count = (ends - begins) * cuda.gridDim.x
            a, b = zero, zero
            for j in range(i - g * parts, count, FLIGHT * parts):
                for k in range(FLIGHT):  # no branch around the loads
                    inside = j + k * parts < count
                    at = place + (j + k * parts if inside else 0)
                    c, d = first[at], second[at]
                    a += c if inside else zero
                    b += d if inside else zero
            shared[0, i] = a
            shared[1, i] = b
        cuda.syncthreads()  # the sums of all parts are in place
        return parts

    @cuda.jit(device=True)
    def total_of(shared, k, g, parts):
        total = shared[k, g * parts]
        for other in range(1, parts):
            total += shared[k, g * parts + other]
        return total

    @bounded(threads, 2)
    def sums(x, first, second, n_positions, n_each, n_channels, n_groups, n_of_group):
        shared = cuda.shared.array(rows_shape, scalar)
        table = cuda.shared.array(two, scalar)
        totals, squares = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        kept, origin = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        offset, stride, stop = begin(n_positions, n_each, n_channels, False)
        position = np.int64(cuda.threadIdx.y)
        fetch(x, offset, position, stop, stride, words)
        start, n_here, _, _ = here(n_channels, n_of_group)
        sample = np.int64(cuda.blockIdx.z) * n_positions * n_channels
        for column in range(thread(), n_here, threads):
            head = ratio(start + column, n_of_group) * n_of_group
            table[0, slot(column)] = load(x, sample + head)[0]
        cuda.syncthreads()  # the origins of all channels are in place
        look_up(table, 0, origin)
        for i in range(width):
            totals[i] = zero
            squares[i] = zero
        while position < stop:
            fetch(x, offset, position + at_once * rows, stop, stride, coming)
            for k in range(at_once):
                if position + k * rows < stop:
                    unpack(words, k, kept)
                    for i in range(width):
                        value = kept[i] - origin[i]
                        totals[i] += value
                        squares[i] += value * value
            for k in range(n_words):
                words[k] = coming[k]
            position += at_once * rows
        over_rows(totals, squares, shared)
        put_groups(shared, x, first, second, n_channels, n_groups, n_of_group, False)

    @bounded(threads, 2)
    def apply(
        x, weight, bias, first, second, centre, inverse, out, eps,
        n_positions, n_each, n_channels, n_groups, n_of_group,
    ):  # fmt: skip
        shared = cuda.shared.array(parts_shape, scalar)
        table = cuda.shared.array(three, scalar)
        scale, shift = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        kept = cuda.local.array(width, scalar)
        offset, stride, stop = begin(n_positions, n_each, n_channels, back)
        position = np.int64(cuda.threadIdx.y)
        fetch(x, offset, position, stop, stride, words)  # under way while sums are added up
        start, n_here, group, _ = here(n_channels, n_of_group)
        sample = np.int64(cuda.blockIdx.z) * n_positions * n_channels
        for column in range(thread(), n_here, threads):
            head = ratio(start + column, n_of_group) * n_of_group
            table[0, slot(column)] = load(weight, start + column)[0] if weighted else one
            table[1, slot(column)] = load(bias, start + column)[0] if biased else zero
            table[2, slot(column)] = load(x, sample + head)[0]
        parts = sum_parts(first, second, shared, n_channels, n_groups, n_of_group)
        share = one / (scalar(n_positions) * scalar(n_of_group))
        for column in range(thread(), n_here, threads):
            of_channel, at = ratio(start + column, n_of_group), slot(column)
            total = total_of(shared, 0, of_channel - group, parts)
            square = total_of(shared, 1, of_channel - group, parts)
            away = total * share
            mean = table[2, at] + away
            factor = one / math.sqrt(max(square - total * away, zero) * share + eps)
            if cuda.blockIdx.x == 0 and of_channel * n_of_group == start + column:
                centre[np.int64(cuda.blockIdx.z) * n_groups + of_channel] = mean
                inverse[np.int64(cuda.blockIdx.z) * n_groups + of_channel] = factor
            factor *= table[0, at]
            table[0, at] = factor
            table[1, at] -= mean * factor
        cuda.syncthreads()  # the factors and terms of all channels are in place
        look_up(table, 0, scale)
        look_up(table, 1, shift)
        place, step = offset + position * stride, rows * stride
        while position < stop:
            fetch(x, offset, position + at_once * rows, stop, stride, coming)
            for k in range(at_once):
                if position + k * rows < stop:
                    unpack(words, k, kept)
                    for i in range(width):
                        kept[i] = activate(kept[i] * scale[i] + shift[i])
                    store(out, place, neighbours(kept, 0))
                place += step
            for k in range(n_words):
                words[k] = coming[k]
            position += at_once * rows

    @bounded(threads, 2)
    def gradient_sums(
        grad, x, weight, bias, centre, inverse, first, second, of_bias, of_weight,
        n_positions, n_each, n_channels, n_groups, n_of_group,
    ):  # fmt: skip
        shared = cuda.shared.array(rows_shape, scalar)
        table = cuda.shared.array(three, scalar)
        totals, products = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        mean, kept = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        factor, shift = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        up, words = cuda.local.array(width, scalar), cuda.local.array(n_words_of_sums, word)
        ups = cuda.local.array(n_words_of_sums, word)
        coming = cuda.local.array(n_words_of_sums, word)
        coming_ups = cuda.local.array(n_words_of_sums, word)
        offset, stride, stop = begin(n_positions, n_each, n_channels, False)
        position = np.int64(cuda.threadIdx.y)
        fetch_for_sums(x, grad, offset, position, stop, stride, words, ups)
        start, n_here, _, _ = here(n_channels, n_of_group)
        for column in range(thread(), n_here, threads):
            row = np.int64(cuda.blockIdx.z) * n_groups + ratio(start + column, n_of_group)
            table[0, slot(column)] = centre[row]
            if silu:
                value = inverse[row]
                value *= load(weight, start + column)[0] if weighted else one
                table[1, slot(column)] = value
                table[2, slot(column)] = load(bias, start + column)[0] if biased else zero
        cuda.syncthreads()  # what belongs to channels is in place
        look_up(table, 0, mean)
        if silu:
            look_up(table, 1, factor)
            look_up(table, 2, shift)
        for i in range(width):
            totals[i] = zero
            products[i] = zero
        while position < stop:
            ahead = position + of_sums * rows
            fetch_for_sums(x, grad, offset, ahead, stop, stride, coming, coming_ups)
            for k in range(of_sums):
                if position + k * rows < stop:
                    unpack(words, k, kept)
                    unpack(ups, k, up)
                    for i in range(width):
                        away, g = kept[i] - mean[i], up[i]
                        if silu:
                            g = through(away * factor[i] + shift[i], g)
                        totals[i] += g
                        products[i] += g * away
            for k in range(n_words_of_sums):
                words[k] = coming[k]
                ups[k] = coming_ups[k]
            position += of_sums * rows
        over_rows(totals, products, shared)
        chunk = np.int64(cuda.blockIdx.z) * cuda.gridDim.x + cuda.blockIdx.x
        for column in range(thread(), n_here, threads):
            row = np.int64(cuda.blockIdx.z) * n_groups + ratio(start + column, n_of_group)
            product = shared[1, 0, slot(column)] * inverse[row]
            shared[1, 0, slot(column)] = product
            of_bias[chunk * n_channels + start + column] = shared[0, 0, slot(column)]
            of_weight[chunk * n_channels + start + column] = product
        cuda.syncthreads()  # the products of all channels are in place
        put_groups(shared, weight, first, second, n_channels, n_groups, n_of_group, weighted)

    @cuda.jit(device=True)
    def sum_columns(of_bias, of_weight, bias_out, weight_out, shared, n_channels):
        """Add up the parameters' partial gradients; each block takes some of the channels."""
        n_blocks = np.int64(cuda.gridDim.z) * cuda.gridDim.y * cuda.gridDim.x
        block = (np.int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x
        block, n_rows = block + cuda.blockIdx.x, of_bias.size // n_channels
        part, y = thread() % COLUMN_PARTS, thread() // COLUMN_PARTS
        for base in range(block * n_columns, 2 * n_channels, n_blocks * n_columns):
            i, total = base + y, zero
            inside = i < 2 * n_channels and y < n_columns
            channel = i if i < n_channels else i - n_channels
            partial = of_bias if i < n_channels else of_weight
            out = bias_out if i < n_channels else weight_out
            if inside and channel < out.size:
                for row in range(part, n_rows, 2 * FLIGHT * COLUMN_PARTS):
                    for k in range(2 * FLIGHT):
                        within = row + k * COLUMN_PARTS < n_rows
                        at = row + k * COLUMN_PARTS if within else 0
                        value = partial[at * n_channels + channel]
                        total += value if within else zero
            cuda.syncthreads()  # what lay there has been read
            shared[0, thread()] = total
            cuda.syncthreads()  # the sums of all parts are in place
            if inside and part == 0 and channel < out.size:
                for other in range(1, COLUMN_PARTS):
                    total += shared[0, thread() + other]
                store_one(out, channel, (total,))

    @bounded(threads, 2)
    def gradient(
        grad, x, weight, bias, centre, inverse, first, second, of_bias, of_weight,
        out, bias_out, weight_out,
        n_positions, n_each, n_channels, n_groups, n_of_group,
    ):  # fmt: skip
        shared = cuda.shared.array(parts_shape, scalar)
        table = cuda.shared.array(four, scalar)
        factor, shift = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        slope, rest = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        kept, up = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        words = cuda.local.array(n_words_of_two, word)
        ups = cuda.local.array(n_words_of_two, word)
        coming = cuda.local.array(n_words_of_two, word)
        coming_ups = cuda.local.array(n_words_of_two, word)
        offset, stride, stop = begin(n_positions, n_each, n_channels, back)
        position = np.int64(cuda.threadIdx.y)
        fetch_both(x, grad, offset, position, stop, stride, words, ups)
        start, n_here, group, _ = here(n_channels, n_of_group)
        for column in range(thread(), n_here, threads):
            row = np.int64(cuda.blockIdx.z) * n_groups + ratio(start + column, n_of_group)
            table[0, slot(column)] = load(weight, start + column)[0] if weighted else one
            table[1, slot(column)] = load(bias, start + column)[0] if biased else zero
            table[2, slot(column)] = centre[row]
            table[3, slot(column)] = inverse[row]
        parts = sum_parts(first, second, shared, n_channels, n_groups, n_of_group)
        share = one / (scalar(n_positions) * scalar(n_of_group))
        # The gradient is g * factor + x * slope + rest, g that of the affine map's result.
        for column in range(thread(), n_here, threads):
            g, at = ratio(start + column, n_of_group) - group, slot(column)
            mean, scale = table[2, at], table[3, at]
            value = scale * table[0, at]
            table[0, at] = value
            table[1, at] -= mean * value
            value = -total_of(shared, 1, g, parts) * share * scale * scale
            table[2, at] = value
            table[3, at] = -total_of(shared, 0, g, parts) * share * scale - mean * value
        cuda.syncthreads()  # what belongs to channels is in place
        look_up(table, 0, factor)
        if silu:
            look_up(table, 1, shift)
        look_up(table, 2, slope)
        look_up(table, 3, rest)
        place, step = offset + position * stride, rows * stride
        while position < stop:
            ahead = position + of_two * rows
            fetch_both(x, grad, offset, ahead, stop, stride, coming, coming_ups)
            for k in range(of_two):
                if position + k * rows < stop:
                    unpack(words, k, kept)
                    unpack(ups, k, up)
                    for i in range(width):
                        g = up[i]
                        if silu:
                            g = through(kept[i] * factor[i] + shift[i], g)
                        kept[i] = g * factor[i] + (kept[i] * slope[i] + rest[i])
                    store(out, place, neighbours(kept, 0))
                place += step
            for k in range(n_words_of_two):
                words[k] = coming[k]
                ups[k] = coming_ups[k]
            position += of_two * rows

        sum_columns(of_bias, of_weight, bias_out, weight_out, shared, n_channels)

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
    dtype: np.dtype, plan: Plan, affine: tuple[bool, bool], silu: bool, ahead: bool
) -> KernelsFirst:
    """Return the kernels for channels that are rows in memory.

    ``ahead``: whether the next tile is on its way while one is computed with. Where blocks have
    few tiles more blocks at once, for which there are registers then, do more.
    """
    _, scalar, load, *_ = access(dtype, wide=False)
    width, _, _, store, _ = access(dtype, wide=plan.width > 1)
    each, word, load_packed, numbers = packed(dtype, wide=plan.width > 1)
    place, neighbours = rows_of(dtype, plan).place, window(width)
    activate, through = _activations(dtype, silu)
    totals_of = group_sums(scalar, plan.lanes, plan.groups)
    chunks, tile_size, lanes, groups = plan.chunks, plan.tile, plan.lanes, plan.groups
    n_words, per_word = chunks * each, width // each
    weighted, biased = affine
    zero, one = scalar(0), scalar(1)

    @cuda.jit(device=True)
    def begin(n_channels, back):
        """Give this thread's channel, whether there is one, and the offset of the sample's first.

        Idle threads take part in the reductions, with the first channel. The second pass begins
        with the blocks that were the last of the first: what they read is in the cache.
        """
        block, sample = np.int64(cuda.blockIdx.x), np.int64(cuda.blockIdx.z)
        if back:
            block, sample = cuda.gridDim.x - 1 - block, cuda.gridDim.z - 1 - sample
        channel = block * groups + cuda.threadIdx.y
        live = channel < n_channels
        return channel if live else 0, live, sample * n_channels

    @cuda.jit(device=True)
    def tiles_of(n_positions, n_tiles, back):
        """Give the first tile of the block's chunk, and the one after its last."""
        chunk = np.int64(cuda.blockIdx.y)
        start = (cuda.gridDim.y - 1 - chunk if back else chunk) * n_tiles
        return start, min(start + n_tiles, (n_positions + tile_size - 1) // tile_size)

    @cuda.jit(device=True)
    def fetch(array, offset, tile, stop, n_positions, words):
        """Read a tile as it lies in memory, with no branch around the loads."""
        for k in range(chunks):
            j = place(0, tile, k)
            values = load_packed(array, offset + (j if tile < stop and j < n_positions else 0))
            for i in range(each):
                words[k * each + i] = values[i]

    @cuda.jit(device=True)
    def unpack(words, k, kept):
        for i in range(each):
            values = numbers(words[k * each + i])
            for j in range(per_word):
                kept[i * per_word + j] = values[j]

    @cuda.jit(device=True)
    def put_sums(total, square, first, second, row, live):
        total, square = totals_of(total, square, 0)
        if live and cuda.threadIdx.x == 0:
            place = row * cuda.gridDim.y + cuda.blockIdx.y
            first[place] = total
            second[place] = square

    @bounded(plan.threads)
    def sums(x, first, second, n_positions, n_channels, n_of_group, n_tiles):
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        kept = cuda.local.array(width, scalar)
        channel, live, sample = begin(n_channels, False)
        offset, head = (sample + channel) * n_positions, channel // n_of_group * n_of_group
        tile, stop = tiles_of(n_positions, n_tiles, False)
        fetch(x, offset, tile, stop, n_positions, words)
        origin = load(x, (sample + head) * n_positions)[0]
        total, square = zero, zero
        while tile < stop:
            if ahead:
                fetch(x, offset, tile + 1, stop, n_positions, coming)
            for k in range(chunks):
                if place(0, tile, k) < n_positions:
                    unpack(words, k, kept)
                    for i in range(width):
                        value = kept[i] - origin
                        total += value
                        square += value * value
            tile += 1
            if ahead:
                for k in range(n_words):
                    words[k] = coming[k]
            else:
                fetch(x, offset, tile, stop, n_positions, words)
        put_sums(total, square, first, second, sample + channel, live)

    @bounded(plan.threads)
    def apply(
        x, weight, bias, first, second, centre, inverse, out, eps,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        kept = cuda.local.array(width, scalar)
        channel, live, sample = begin(n_channels, True)
        offset, group = (sample + channel) * n_positions, channel // n_of_group
        tile, stop = tiles_of(n_positions, n_tiles, True)
        # Under way while sums are added up.
        fetch(x, offset, tile, stop, n_positions, words)
        if ahead:
            fetch(x, offset, tile + 1, stop, n_positions, coming)
        head, n_sums = sample + group * n_of_group, n_of_group * cuda.gridDim.y
        origin, factor = load(x, head * n_positions)[0], one
        if weighted:
            factor = load(weight, channel)[0]
        shift = load(bias, channel)[0] if biased else zero
        total, square = zero, zero
        for i in range(cuda.threadIdx.x, n_sums, lanes):
            total += first[head * cuda.gridDim.y + i]
            square += second[head * cuda.gridDim.y + i]
        total, square = totals_of(total, square, 0)
        share = one / (scalar(n_positions) * scalar(n_of_group))
        away = total * share
        mean = origin + away
        scale = one / math.sqrt(max(square - total * away, zero) * share + eps)
        if not live:
            return
        if cuda.threadIdx.x == 0 and cuda.blockIdx.y == 0 and head == sample + channel:
            centre[head // n_of_group] = mean
            inverse[head // n_of_group] = scale
        scale *= factor
        while tile < stop:
            for k in range(chunks):
                j = place(0, tile, k)
                if j < n_positions:
                    unpack(words, k, kept)
                    for i in range(width):
                        kept[i] = activate((kept[i] - mean) * scale + shift)
                    store(out, offset + j, neighbours(kept, 0))
            tile += 1
            if ahead:
                for k in range(n_words):
                    words[k] = coming[k]
                fetch(x, offset, tile + 1, stop, n_positions, coming)
            else:
                fetch(x, offset, tile, stop, n_positions, words)

    @bounded(plan.threads)
    def gradient_sums(
        grad, x, weight, bias, centre, inverse, first, second,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        ups, coming_ups = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        kept, up = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        channel, live, sample = begin(n_channels, False)
        offset, group = (sample + channel) * n_positions, (sample + channel) // n_of_group
        tile, stop = tiles_of(n_positions, n_tiles, False)
        fetch(x, offset, tile, stop, n_positions, words)
        fetch(grad, offset, tile, stop, n_positions, ups)
        mean, scale = centre[group], inverse[group]
        factor = load(weight, channel)[0] if weighted else one
        shift = load(bias, channel)[0] if biased else zero
        total, product = zero, zero
        while tile < stop:
            if ahead:
                fetch(x, offset, tile + 1, stop, n_positions, coming)
                fetch(grad, offset, tile + 1, stop, n_positions, coming_ups)
            for k in range(chunks):
                if place(0, tile, k) < n_positions:
                    unpack(words, k, kept)
                    unpack(ups, k, up)
                    for i in range(width):
                        hat = (kept[i] - mean) * scale
                        g = through(hat * factor + shift, up[i])
                        total += g
                        product += g * hat
            tile += 1
            if ahead:
                for k in range(n_words):
                    words[k] = coming[k]
                    ups[k] = coming_ups[k]
            else:
                fetch(x, offset, tile, stop, n_positions, words)
                fetch(grad, offset, tile, stop, n_positions, ups)
        put_sums(total, product, first, second, sample + channel, live)

    @bounded(plan.threads)
    def gradient(
        grad, x, weight, bias, centre, inverse, first, second, out,
        n_positions, n_channels, n_of_group, n_tiles,
    ):  # fmt: skip
        words, coming = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        ups, coming_ups = cuda.local.array(n_words, word), cuda.local.array(n_words, word)
        kept, up = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        channel, live, sample = begin(n_channels, True)
        offset, group = (sample + channel) * n_positions, (sample + channel) // n_of_group
        tile, stop = tiles_of(n_positions, n_tiles, True)
        # Under way while sums are added up.
        fetch(x, offset, tile, stop, n_positions, words)
        fetch(grad, offset, tile, stop, n_positions, ups)
        if ahead:
            fetch(x, offset, tile + 1, stop, n_positions, coming)
            fetch(grad, offset, tile + 1, stop, n_positions, coming_ups)
        mean, scale = centre[group], inverse[group]
        own_factor = load(weight, channel)[0] if weighted else one
        shift = load(bias, channel)[0] if biased else zero
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
        while tile < stop:
            for k in range(chunks):
                j = place(0, tile, k)
                if j < n_positions:
                    unpack(words, k, kept)
                    unpack(ups, k, up)
                    for i in range(width):
                        hat = (kept[i] - mean) * scale
                        g = through(hat * own_factor + shift, up[i]) * own_factor
                        kept[i] = (g - of_mean - hat * of_scale) * scale
                    store(out, offset + j, neighbours(kept, 0))
            tile += 1
            if ahead:
                for k in range(n_words):
                    words[k] = coming[k]
                    ups[k] = coming_ups[k]
                fetch(x, offset, tile + 1, stop, n_positions, coming)
                fetch(grad, offset, tile + 1, stop, n_positions, coming_ups)
            else:
                fetch(x, offset, tile, stop, n_positions, words)
                fetch(grad, offset, tile, stop, n_positions, ups)

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
