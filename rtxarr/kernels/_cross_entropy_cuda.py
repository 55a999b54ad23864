"""GPU kernels of the cross entropy with class probabilities, a thread for each row."""

from __future__ import annotations

import functools
import math

import numpy as np

from rtxarr._device import cuda


@functools.cache
def kernels(dtype: np.dtype):
    """Return ``(losses, gradient)`` for one element type.

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
