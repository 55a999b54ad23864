"""GPU kernels of group normalization, channels first, that read an array once: in clusters.

A cluster of blocks takes some whole groups of a sample, each block a chunk of its positions, which
it keeps in shared memory. The blocks exchange the sums of channels, add up those of all, in order,
and so all have the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels import _cluster
from rtxarr.kernels._cluster import (
    arrive,
    commit,
    copy_piece,
    number_of,
    place_of,
    wait,
    wait_for_all,
)
from rtxarr.kernels._rows import bounded, group_sums, window
from rtxarr.kernels._vector import access, packed

BLOCKS = _cluster.BLOCKS
# The most channels of a block.
MOST = 64 if _SIMULATING else 512


class Kernels(NamedTuple):
    """One launch each way, of ``(BLOCKS, blocks of channels, samples)`` blocks.

    Both end in ``n_positions, n_each, n_channels, n_groups, n_of_group, span``: the second is
    positions of a block, a whole number of pieces of 16 bytes, the last channels of a block.

    Attributes
    ----------
    normalize : kernel
        ``normalize(x, weight, bias, centre, inverse, out, eps, ...)``. It fills in the statistics.
    gradient : kernel
        ``gradient(grad, x, weight, centre, inverse, of_bias, of_weight, out, ...)``: the
        parameters' partial gradients have the shape (samples, channels).
    """

    normalize: Any
    gradient: Any


@cuda.jit(device=True)
def ratio(a, b):
    """Divide channels in 32 bits, which takes a fraction of the time."""
    return np.int64(np.uint32(a) // np.uint32(b))


@functools.cache
def _unpack(dtype: np.dtype):
    """Return the device function ``unpack(memory, at, kept)``: the numbers of a piece."""
    each, word, _, numbers = packed(dtype, wide=True)
    piece_of = _cluster.floats_of if word is np.float32 else _cluster.words_of
    per_word = access(dtype, wide=True).width // each

    @cuda.jit(device=True)
    def unpack(memory, at, kept):
        words = piece_of(memory, at)
        for i in range(each):
            values = numbers(words[i])
            for j in range(per_word):
                kept[i * per_word + j] = values[j]

    return unpack


@functools.cache
def _over_blocks(threads: int):
    """Return the device function ``over_blocks(sums, whole, n)``, to be followed by ``wait``.

    It adds up the sums of the blocks of the cluster, in order.
    """

    @cuda.jit(device=True)
    def over_blocks(sums, whole, n):
        arrive()
        wait()  # the sums of all blocks are in place
        lanes = cuda.blockDim.x
        for i in range(cuda.threadIdx.y * lanes + cuda.threadIdx.x, n, threads):
            total = number_of(sums, i, 0)
            for block in range(1, BLOCKS):
                total += number_of(sums, i, block)
            whole[i] = total
        arrive()  # this block has read the others'
        cuda.syncthreads()  # the sums of all channels are in place

    return over_blocks


def _launched(kernels: Kernels, n_bytes: int) -> Kernels:
    """Say how kernels are launched."""
    if not _SIMULATING:
        for kernel in kernels:
            kernel.cluster, kernel.shared_bytes = BLOCKS, n_bytes + 16
    return kernels


@functools.cache
def resident(
    dtype: np.dtype,
    block: tuple[int, int],
    affine: tuple[bool, bool],
    per_processor: int,
    n_bytes: int,
) -> Kernels:
    """Return the kernels for blocks of ``(lanes, rows)`` threads.

    Threads along x take neighbouring positions of a channel, threads along y every ``rows``-th
    channel. So many blocks share a multiprocessor, and keep so many bytes of the arrays each.
    """
    width, scalar, _, store, _ = access(dtype, wide=True)
    _, _, load, _, _ = access(dtype, wide=False)
    unpack, lanes, rows = _unpack(dtype), *block
    pair, of_three = 2 * MOST, (3, MOST)
    over_blocks, totals_of = _over_blocks(lanes * rows), group_sums(scalar, lanes, rows)
    neighbours, weighted, biased = window(width), *affine
    n_words = n_bytes // 4 if _SIMULATING else 0
    one: Any = scalar(1)
    zero: Any = scalar(0)

    @cuda.jit(device=True)
    def thread():
        return cuda.threadIdx.y * lanes + cuda.threadIdx.x

    @cuda.jit(device=True)
    def begin(n_positions, n_each, n_channels, span):
        """Give the block's first channel, its offset, and how many pieces of a channel it has."""
        channel, start = np.int64(cuda.blockIdx.y) * span, np.int64(cuda.blockIdx.x) * n_each
        offset = (np.int64(cuda.blockIdx.z) * n_channels + channel) * n_positions + start
        return channel, offset, max(min(n_each, n_positions - start), 0) // width

    @cuda.jit(device=True)
    def copy(memory, array, offset, n_pieces, n_positions, span, base):
        for c in range(cuda.threadIdx.y, span, rows):
            for j in range(cuda.threadIdx.x, n_pieces, lanes):
                at = base + c * n_pieces + j
                copy_piece(memory, at, array, offset + c * n_positions + j * width)

    @bounded(lanes * rows, per_processor)
    def normalize(
        x, weight, bias, centre, inverse, out, eps,
        n_positions, n_each, n_channels, n_groups, n_of_group, span,
    ):  # fmt: skip
        memory = place_of(cuda.shared.array(n_words, np.uint32))
        sums = cuda.shared.array(pair, scalar)
        whole = cuda.shared.array(pair, scalar)
        table = cuda.shared.array(of_three, scalar)
        kept = cuda.local.array(width, scalar)
        channel, offset, n_pieces = begin(n_positions, n_each, n_channels, span)
        copy(memory, x, offset, n_pieces, n_positions, span, 0)
        commit()
        t, sample = thread(), np.int64(cuda.blockIdx.z)
        for c in range(t, span, lanes * rows):
            head = ratio(channel + c, n_of_group) * n_of_group
            table[2, c] = load(x, (sample * n_channels + head) * n_positions)[0]
            table[0, c] = load(weight, channel + c)[0] if weighted else one
            table[1, c] = load(bias, channel + c)[0] if biased else zero
        wait_for_all()
        cuda.syncthreads()  # what belongs to channels is in place
        for base in range(0, span, rows):
            c, total, square = base + cuda.threadIdx.y, zero, zero
            if c < span:
                origin = table[2, c]
                for j in range(cuda.threadIdx.x, n_pieces, lanes):
                    unpack(memory, c * n_pieces + j, kept)
                    for i in range(width):
                        value = kept[i] - origin
                        total += value
                        square += value * value
            total, square = totals_of(total, square, 0)
            if c < span and cuda.threadIdx.x == 0:
                sums[c] = total
                sums[span + c] = square
        over_blocks(sums, whole, 2 * span)
        share, group = one / (scalar(n_positions) * scalar(n_of_group)), ratio(channel, n_of_group)
        for c in range(t, span, lanes * rows):
            g = ratio(c, n_of_group)
            total, square = zero, zero
            for other in range(g * n_of_group, (g + 1) * n_of_group):
                total += whole[other]
                square += whole[span + other]
            away = total * share
            mean = table[2, c] + away
            factor = one / math.sqrt(max(square - total * away, zero) * share + eps)
            if cuda.blockIdx.x == 0 and c == g * n_of_group:
                centre[sample * n_groups + group + g] = mean
                inverse[sample * n_groups + group + g] = factor
            factor *= table[0, c]
            table[0, c] = factor
            table[1, c] -= mean * factor
        cuda.syncthreads()  # the factors and terms of all channels are in place
        for c in range(cuda.threadIdx.y, span, rows):
            scale, shift = table[0, c], table[1, c]
            for j in range(cuda.threadIdx.x, n_pieces, lanes):
                unpack(memory, c * n_pieces + j, kept)
                for i in range(width):
                    kept[i] = kept[i] * scale + shift
                store(out, offset + c * n_positions + j * width, neighbours(kept, 0))
        wait()  # the others have read this block's sums

    @bounded(lanes * rows, per_processor)
    def gradient(
        grad, x, weight, centre, inverse, of_bias, of_weight, out,
        n_positions, n_each, n_channels, n_groups, n_of_group, span,
    ):  # fmt: skip
        memory = place_of(cuda.shared.array(n_words, np.uint32))
        sums = cuda.shared.array(pair, scalar)
        whole = cuda.shared.array(pair, scalar)
        table = cuda.shared.array(of_three, scalar)
        kept, up = cuda.local.array(width, scalar), cuda.local.array(width, scalar)
        channel, offset, n_pieces = begin(n_positions, n_each, n_channels, span)
        second = span * n_pieces
        copy(memory, x, offset, n_pieces, n_positions, span, 0)
        copy(memory, grad, offset, n_pieces, n_positions, span, second)
        commit()
        t, group_row = thread(), np.int64(cuda.blockIdx.z) * n_groups + ratio(channel, n_of_group)
        for c in range(t, span, lanes * rows):
            row = group_row + ratio(c, n_of_group)
            table[0, c] = centre[row]
            table[1, c] = inverse[row]
            table[2, c] = load(weight, channel + c)[0] if weighted else one
        wait_for_all()
        cuda.syncthreads()  # what belongs to channels is in place
        for base in range(0, span, rows):
            c, total, product = base + cuda.threadIdx.y, zero, zero
            if c < span:
                mean = table[0, c]
                for j in range(cuda.threadIdx.x, n_pieces, lanes):
                    unpack(memory, c * n_pieces + j, kept)
                    unpack(memory, second + c * n_pieces + j, up)
                    for i in range(width):
                        total += up[i]
                        product += up[i] * (kept[i] - mean)
            total, product = totals_of(total, product, 0)
            if c < span and cuda.threadIdx.x == 0:
                sums[c] = total
                sums[span + c] = product
        over_blocks(sums, whole, 2 * span)
        share = one / (scalar(n_positions) * scalar(n_of_group))
        # The gradient is g * factor + x * slope + rest, g that of the affine map's result.
        for c in range(t, span, lanes * rows):
            g, mean, scale, factor = ratio(c, n_of_group), table[0, c], table[1, c], table[2, c]
            of_mean, of_scale = zero, zero
            for other in range(g * n_of_group, (g + 1) * n_of_group):
                value = load(weight, channel + other)[0] if weighted else one
                of_mean += value * whole[other]
                of_scale += value * whole[span + other]
            if cuda.blockIdx.x == 0:
                place = np.int64(cuda.blockIdx.z) * n_channels + channel + c
                of_bias[place] = whole[c]
                of_weight[place] = whole[span + c] * scale
            slope = -of_scale * share * scale * scale * scale
            table[0, c] = factor * scale
            table[1, c] = slope
            table[2, c] = -of_mean * share * scale - mean * slope
        cuda.syncthreads()  # what belongs to channels is in place
        for c in range(cuda.threadIdx.y, span, rows):
            factor, slope, rest = table[0, c], table[1, c], table[2, c]
            for j in range(cuda.threadIdx.x, n_pieces, lanes):
                unpack(memory, c * n_pieces + j, kept)
                unpack(memory, second + c * n_pieces + j, up)
                for i in range(width):
                    kept[i] = up[i] * factor + (kept[i] * slope + rest)
                store(out, offset + c * n_positions + j * width, neighbours(kept, 0))
        wait()  # the others have read this block's sums

    return _launched(Kernels(normalize, gradient), n_bytes)
