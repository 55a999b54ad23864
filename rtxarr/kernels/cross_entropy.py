"""Cross entropy with class probabilities or labels, forward and backward, in one launch each."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import launch, launch_planned, namespace, runs_kernels
from rtxarr.dtypes import accumulator
from rtxarr.kernels import norm
from rtxarr.kernels._dense import packed
from rtxarr.kernels.segment import row_by_row
from rtxarr.kernels.softmax import how_wide

__all__ = [
    "fits",
    "fits_labels",
    "label_cross_entropy",
    "label_cross_entropy_gradient",
    "soft_cross_entropy",
    "soft_cross_entropy_gradient",
]

# With class probabilities a thread walks along a row, so rows must be short.
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
    out = _device.empty(logits, logits.shape[:-1], logits.dtype)
    launch_planned(_losses, (), (packed(logits), packed(targets), out, logits.shape[-1]))
    return out


def _losses(options, args):
    from rtxarr.kernels._cross_entropy_cuda import kernels

    out = args[2]
    return kernels(out.dtype)[0], out.size, None


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
    out = _device.empty(logits, logits.shape, logits.dtype)
    if grad.ndim != 1:  # one axis is read with its stride: that of a mean is 0
        grad = packed(grad)
    given = packed(logits), packed(targets), grad, out, logits.shape[-1]
    launch_planned(_soft_gradient, (), given)
    return out


def _soft_gradient(options, args):
    from rtxarr.kernels._cross_entropy_cuda import kernels

    grad = args[2]
    return kernels(grad.dtype)[1], grad.size, None


# ---------------------------------------------------------------------------------- labels

fits_labels = norm.fits


def label_cross_entropy(
    logits: Any, labels: Any, kept: Any, *, label_smoothing: float
) -> tuple[Any, Any]:
    """Give the losses, and the logarithms of the sums of the exponentials of the logits.

    Parameters
    ----------
    logits : array of a real floating dtype, shape (..., n_classes)
        One that :func:`fits_labels`.
    labels : array of int, shape (...)
        The loss of a label that is no class is NaN.
    kept : array of bool, shape (...), or None
        Where False the loss is zero.
    label_smoothing : float

    Returns
    -------
    losses, lse : array of float32 (float64 for float64), shape (...)
    """
    from rtxarr.kernels._cross_entropy_cuda import label_losses

    xp = namespace(logits, labels, kept)
    n, dtype = logits.shape[-1], accumulator(logits.dtype)
    losses, lse = (xp.empty(logits.shape[:-1], dtype=dtype) for _ in range(2))
    flat, labels = row_by_row(logits), row_by_row(labels)
    mask = labels if kept is None else row_by_row(kept)
    plan = label_plan(n, logits.dtype, *how_wide(n, flat))
    launch(
        label_losses(logits.dtype, plan, bool(label_smoothing), kept is not None),
        plan.blocks(lse.size),
        (
            flat,
            labels,
            mask,
            xp.reshape(losses, (-1,)),
            xp.reshape(lse, (-1,)),
            n,
            dtype.type(1 - label_smoothing),
            dtype.type(label_smoothing),
        ),
        block=plan.block,
    )
    return losses, lse


def label_cross_entropy_gradient(
    logits: Any, lse: Any, up: Any, down: Any, labels: Any, *, label_smoothing: float
) -> Any:
    """Give ``up`` times the probabilities, minus ``down`` times the (smoothed) labels.

    Parameters
    ----------
    logits : array of a real floating dtype, shape (..., n_classes)
        One that fits.
    lse, up, down : array of float32 (float64 for float64), shape (...)
    labels : array of int, shape (...)
    label_smoothing : float

    Returns
    -------
    array, shape and dtype of ``logits``
    """
    from rtxarr.kernels._cross_entropy_cuda import label_gradient

    xp = namespace(logits, lse, up, down, labels)
    n, dtype = logits.shape[-1], accumulator(logits.dtype)
    out = xp.empty(logits.shape, dtype=logits.dtype)
    flat = row_by_row(logits)
    lse, up, down, labels = (row_by_row(x) for x in (lse, up, down, labels))
    plan = label_plan(n, logits.dtype, *how_wide(n, flat))
    launch(
        label_gradient(logits.dtype, plan, bool(label_smoothing)),
        plan.blocks(lse.size),
        (
            flat,
            lse,
            up,
            down,
            labels,
            xp.reshape(out, (-1,)),
            n,
            dtype.type(1 - label_smoothing),
            dtype.type(label_smoothing / n),
        ),
        block=plan.block,
    )
    return out


def label_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the kernels with labels."""
    from rtxarr.kernels._rows import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose, lanes=256)
