"""GPU kernels of the cross entropy, with class probabilities and with labels."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._arithmetic import arithmetic
from rtxarr.kernels._rows import Plan, bounded, rows_of
from rtxarr.kernels._softmax_cuda import log_sum
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
    begin, tiles, _, fetch, _ = rows_of(dtype, plan)
    gather, finite, largest_of, total_of = log_sum(dtype, plan)
    size, exp, zero = plan.kept, arithmetic(dtype).exp, scalar(0)
    lowest, nan = scalar(-np.inf), scalar(np.nan)

    @cuda.jit(device=True)
    def add_up(logits, first, n, kept):
        total = zero
        for tile in range(tiles(first, n)):
            fetch(logits, first, tile, n, zero, kept)
            for i in range(size):
                total += kept[i]
        return total

    @bounded(plan.threads)
    def kernel(logits, labels, mask, losses, lse, n, keep, share):
        kept = cuda.local.array(size, scalar)
        row, live = begin(lse.size)
        row = row if live else 0  # idle threads take part in the reductions
        first, label = row * n, np.int64(labels[row])
        # The loss of a label that is no class is NaN. Read early, while the row is under way.
        picked = load(logits, first + label)[0] if label >= 0 and label < n else nan
        top, total = gather(logits, first, n, kept)
        shift = finite(largest_of(top, 0))
        total = total_of(total * exp(top - shift), 0)
        mean = total_of(add_up(logits, first, n, kept), 1) / scalar(n) if smooth else zero
        if live and cuda.threadIdx.x == 0:
            normalizer = lowest if total == zero else shift + math.log(total)
            lse[row] = normalizer
            loss = normalizer - keep * picked
            if smooth:
                loss -= share * mean
            losses[row] = zero if masked and not mask[row] else loss

    return kernel


@functools.cache
def label_gradient(dtype: np.dtype, plan: Plan, smooth: bool):
    """Return the kernel of the gradient of the logits with labels."""
    scalar: Any = access(dtype, wide=False).scalar
    begin, tiles, place, fetch, put = rows_of(dtype, plan)
    chunks, width, size = plan.chunks, plan.width, plan.kept
    _, _, _, base, power = arithmetic(dtype)
    zero, lowest = scalar(0), scalar(-np.inf)

    @bounded(plan.threads)
    def kernel(logits, lse, up, down, labels, out, n, keep, share):
        kept = cuda.local.array(size, scalar)
        row, live = begin(lse.size)
        if not live:
            return
        first = row * n
        normalizer, factor = lse[row] * base, up[row]
        of_label, of_all = keep * down[row], share * down[row]
        label = np.int64(labels[row])
        for tile in range(tiles(first, n)):
            fetch(logits, first, tile, n, lowest, kept)
            for i in range(size):
                value = power(kept[i], normalizer) * factor
                kept[i] = value - of_all if smooth else value
            for k in range(chunks):
                # At most one piece has the label in it.
                at = label - place(first, tile, k)
                if at >= 0 and at < width:
                    for i in range(width):
                        kept[k * width + i] -= of_label if i == at else zero
            put(out, first, tile, n, kept)

    return kernel
