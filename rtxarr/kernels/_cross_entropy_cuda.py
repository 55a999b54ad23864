"""GPU kernels of the cross entropy, with class probabilities and with labels."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._rows import Plan, bounded, rows_of
from rtxarr.kernels._softmax_cuda import exponential, log_sum
from rtxarr.kernels._vector import access


@functools.cache
def kernels(dtype: np.dtype):
    """Return ``(losses, gradient)`` with class probabilities, a thread for each row.

    Logits and targets are flat C-contiguous arrays of rows of ``n_classes``.
    """
    scalar = np.dtype(dtype).type
    lowest = scalar(-np.inf)

    @cuda.jit(device=True)
    def largest(logits, first, n_classes):
        top = lowest
        for c in range(n_classes):
            top = max(top, logits[first + c])
        return top

    @cuda.jit
    def losses(logits, targets, out, n_classes):
        row = cuda.grid(1)
        if row >= out.size:
            return
        first = row * n_classes
        top = largest(logits, first, n_classes)
        total, weight, dot = scalar(0), scalar(0), scalar(0)
        for c in range(n_classes):
            x, target = logits[first + c] - top, targets[first + c]
            total += math.exp(x)
            weight += target
            if target != scalar(0):  # a class ruled out by a logit of -inf may have no share
                dot += target * x
        out[row] = math.log(total) * weight - dot

    @cuda.jit
    def gradient(logits, targets, grad, out, n_classes):
        row = cuda.grid(1)
        if row >= grad.size:
            return
        first = row * n_classes
        top = largest(logits, first, n_classes)
        total, weight = scalar(0), scalar(0)
        for c in range(n_classes):
            total += math.exp(logits[first + c] - top)
            weight += targets[first + c]
        share = weight / total
        for c in range(n_classes):
            p = math.exp(logits[first + c] - top) * share
            out[first + c] = grad[row] * (p - targets[first + c])

    return losses, gradient


@functools.cache
def label_losses(dtype: np.dtype, plan: Plan, smooth: bool, masked: bool):
    """Return the kernel of the losses with labels, and of the logarithms that they need.

    Of what the flags rule out it takes any array.
    """
    _, kind, load, *_ = access(dtype, wide=False)
    scalar: Any = kind
    begin, _, fetch, _ = rows_of(dtype, plan)
    gather, finite, largest_of, total_of = log_sum(dtype, plan)
    size, tile_size = plan.kept, plan.tile
    exp, zero = exponential(dtype), scalar(0)
    lowest, nan = scalar(-np.inf), scalar(np.nan)

    @cuda.jit(device=True)
    def add_up(logits, first, n, kept):
        total = zero
        for tile in range((n + tile_size - 1) // tile_size):
            fetch(logits, first, tile, n, zero, kept)
            for i in range(size):
                total += kept[i]
        return total

    @bounded(plan.threads)
    def kernel(logits, labels, mask, losses, lse, n, keep, share):
        kept = cuda.local.array(size, scalar)
        row, live = begin(lse.size)
        first = row * n if live else 0  # idle threads take part in the reductions
        top, total = gather(logits, first, n, kept)
        shift = finite(largest_of(top))
        total = total_of(total * exp(top - shift))
        mean = total_of(add_up(logits, first, n, kept)) / scalar(n) if smooth else zero
        if live and cuda.threadIdx.x == 0:
            normalizer = lowest if total == zero else shift + math.log(total)
            lse[row] = normalizer
            label = np.int64(labels[row])
            loss = nan  # of a label that is no class
            if label >= 0 and label < n:
                loss = normalizer - keep * load(logits, first + label)[0]
                if smooth:
                    loss -= share * mean
            losses[row] = zero if masked and not mask[row] else loss

    return kernel


@functools.cache
def label_gradient(dtype: np.dtype, plan: Plan, smooth: bool):
    """Return the kernel of the gradient of the logits with labels."""
    scalar: Any = access(dtype, wide=plan.wide).scalar
    begin, place, fetch, put = rows_of(dtype, plan)
    chunks, width, size, tile_size = plan.chunks, plan.width, plan.kept, plan.tile
    exp, lowest = exponential(dtype), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(logits, lse, up, down, labels, out, n, keep, share):
        kept = cuda.local.array(size, scalar)
        row, live = begin(lse.size)
        if not live:
            return
        first = row * n
        normalizer, factor = lse[row], up[row]
        of_label, of_all = keep * down[row], share * down[row]
        label = np.int64(labels[row])
        for tile in range((n + tile_size - 1) // tile_size):
            fetch(logits, first, tile, n, lowest, kept)
            for k in range(chunks):
                j = place(tile, k)
                for i in range(width):
                    value = exp(kept[k * width + i] - normalizer) * factor
                    if smooth:
                        value -= of_all
                    if j + i == label:
                        value -= of_label
                    kept[k * width + i] = value
            put(out, first, tile, n, kept)

    return kernel
