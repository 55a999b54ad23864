"""Cross entropy with class probabilities or labels, forward and backward, in one launch each."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import launch_planned, runs_kernels
from rtxarr.dtypes import accumulator
from rtxarr.kernels import norm
from rtxarr.kernels._dense import packed
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
_WIDE = frozenset((np.dtype("float32"), np.dtype("float64")))


def fits(logits: Any, targets: Any) -> bool:
    """Tell whether the kernels take these arrays."""
    return (
        runs_kernels(logits)
        and logits.dtype == targets.dtype
        and logits.dtype in _WIDE
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
    given = packed(logits), packed(targets), _of_rows(grad), out, logits.shape[-1]
    launch_planned(_soft_gradient, (), given)
    return out


def _of_rows(grad):
    """Give a gradient of each row; one axis is read with its stride: that of a mean is 0."""
    return grad if grad.ndim == 1 else packed(grad)


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
    n, dtype = logits.shape[-1], accumulator(logits.dtype)
    losses, lse = (_device.empty(logits, logits.shape[:-1], dtype) for _ in range(2))
    labels = packed(labels)
    launch_planned(
        _label_losses,
        (bool(label_smoothing), kept is not None),
        (
            packed(logits),
            labels,
            labels if kept is None else packed(kept),
            losses,
            lse,
            n,
            dtype.type(1 - label_smoothing),
            dtype.type(label_smoothing),
        ),
    )
    return losses, lse


def _label_losses(flags, args):
    from rtxarr.kernels._cross_entropy_cuda import label_losses

    logits, lse = args[0], args[4]
    n = logits.size // lse.size
    plan = label_plan(n, logits.dtype, *how_wide(n, logits))
    return label_losses(logits.dtype, plan, *flags), plan.blocks(lse.size), plan.block


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
    n, dtype = logits.shape[-1], accumulator(logits.dtype)
    out = _device.empty(logits, logits.shape, logits.dtype)
    launch_planned(
        _label_gradient,
        (bool(label_smoothing),),
        (
            packed(logits),
            packed(lse),
            _of_rows(up),
            _of_rows(down),
            packed(labels),
            out,
            n,
            dtype.type(1 - label_smoothing),
            dtype.type(label_smoothing / n),
        ),
    )
    return out


def _label_gradient(flags, args):
    from rtxarr.kernels._cross_entropy_cuda import label_gradient

    logits, lse = args[:2]
    n = logits.size // lse.size
    plan = label_plan(n, logits.dtype, *how_wide(n, logits))
    return label_gradient(logits.dtype, plan, *flags), plan.blocks(lse.size), plan.block


def label_plan(n: int, dtype: Any, wide: bool, loose: bool) -> Any:
    """Deal the rows out to the kernels with labels."""
    from rtxarr.kernels._plan import plan_rows

    return plan_rows(n, dtype, wide=wide, loose=loose, lanes=256)
