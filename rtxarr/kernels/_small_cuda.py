"""GPU kernels that reduce small arrays, each in one launch."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded

THREADS, WIDEST = (16, 4) if _SIMULATING else (1024, 32)  # in a block, and columns of one


@functools.cache
def column_sums(dtype: np.dtype, width: int):
    """Return the kernel that adds up rows; a block takes ``width`` columns, a power of two.

    Its x runs over columns. Each thread adds up every so-manieth row, then they are added pairwise.
    """
    scalar, lanes = np.dtype(dtype).type, THREADS // width

    @bounded(THREADS)
    def kernel(x, out, n_rows, n_columns):
        sums = cuda.shared.array(THREADS, scalar)
        lane, place = cuda.threadIdx.y, cuda.threadIdx.y * width + cuda.threadIdx.x
        column = np.int64(cuda.blockIdx.x) * width + cuda.threadIdx.x
        total = scalar(0)
        if column < n_columns:
            row, step = np.int64(lane), lanes * n_columns
            i = row * n_columns + column
            while row + 7 * lanes < n_rows:  # eight loads are under way together
                first = (x[i] + x[i + step]) + (x[i + 2 * step] + x[i + 3 * step])
                i += 4 * step
                second = (x[i] + x[i + step]) + (x[i + 2 * step] + x[i + 3 * step])
                i += 4 * step
                total += first + second
                row += 8 * lanes
            while row < n_rows:
                total += x[i]
                i += step
                row += lanes
        sums[place] = total
        half = lanes // 2
        while half > 0:
            cuda.syncthreads()
            if lane < half:
                sums[place] += sums[place + half * width]
            half //= 2
        if lane == 0 and column < n_columns:
            out[column] = sums[place]

    return kernel


@functools.cache
def share_right(dtype: np.dtype, ignores: bool):
    """Return the kernel, of one block, that counts the rows of which the label is the largest.

    It gives their share; without those with the label ``ignored``, if it ``ignores`` one.
    """
    scalar = np.dtype(dtype).type

    @bounded(THREADS)
    def kernel(logits, labels, out, n_classes, ignored):
        counts = cuda.shared.array((THREADS, 2), np.int64)
        place = cuda.threadIdx.x
        n_right = n_kept = np.int64(0)
        row = np.int64(place)
        while row < labels.size:
            label = np.int64(labels[row])
            if not ignores or label != ignored:
                n_kept += 1
                best, top = np.int64(0), scalar(logits[row * n_classes])
                for c in range(1, n_classes):
                    x = logits[row * n_classes + c]
                    if x > top or (x != x and top == top):  # the first NaN wins
                        best, top = c, x
                n_right += np.int64(best == label)
            row += THREADS
        counts[place, 0] = n_right
        counts[place, 1] = n_kept
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()
            if place < half:
                counts[place, 0] += counts[place + half, 0]
                counts[place, 1] += counts[place + half, 1]
            half //= 2
        if place == 0:
            out[0] = np.float64(counts[0, 0]) / np.float64(max(counts[0, 1], np.int64(1)))

    return kernel
