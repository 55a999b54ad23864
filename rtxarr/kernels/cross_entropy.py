"""Cross entropy with class probabilities, forward and backward, in one launch each."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels

__all__ = ["fits", "soft_cross_entropy", "soft_cross_entropy_gradient"]

# A thread walks along a row, so rows must be short.
MAX_CLASSES = 64


def fits(logits: Any, targets: Any) -> bool:
    """Tell whether the kernels take these arrays."""
    return (
        runs_kernels(logits)
        and logits.dtype == targets.dtype
        and logits.dtype in (np.float32, np.float64)
        and 0 < logits.shape[-1] <= MAX_CLASSES
        and logits.size > 0
    )


def soft_cross_entropy(logits: Any, targets: Any) -> Any:
    """Give ``-sum(targets * log_softmax(logits))`` of each row.

    Parameters
    ----------
    logits, targets : array of float32 or float64, shape (..., n_classes)
        Arrays that :func:`fits`.

    Returns
    -------
    array of their dtype, shape (...)
    """
    from rtxarr.kernels._cross_entropy_cuda import kernels

    xp = namespace(logits, targets)
    out = xp.empty(logits.shape[:-1], dtype=logits.dtype)
    logits, targets, flat = (xp.reshape(x, (-1,)) for x in (logits, targets, out))
    losses, _ = kernels(out.dtype)
    launch(losses, flat.size, (logits, targets, flat, logits.size // flat.size))
    return out


def soft_cross_entropy_gradient(logits: Any, targets: Any, grad: Any) -> Any:
    """Give ``grad * (sum(targets) * softmax(logits) - targets)`` of each row.

    Parameters
    ----------
    logits, targets : array of float32 or float64, shape (..., n_classes)
        Arrays that :func:`fits`.
    grad : array of their dtype, shape (...)

    Returns
    -------
    array of their dtype, shape (..., n_classes)
    """
    from rtxarr.kernels._cross_entropy_cuda import kernels

    xp = namespace(logits, targets, grad)
    out = xp.empty(logits.shape, dtype=logits.dtype)
    logits, targets, grad, flat = (xp.reshape(x, (-1,)) for x in (logits, targets, grad, out))
    _, gradient = kernels(out.dtype)
    launch(gradient, grad.size, (logits, targets, grad, flat, flat.size // grad.size))
    return out
