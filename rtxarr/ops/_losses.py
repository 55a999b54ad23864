"""Losses, and their derivative rules.

Half-precision inputs are widened to float32 and the reduced loss is rounded once. The mean of
no elements is zero, so that an empty batch neither warns nor spoils a running sum.
"""

import math

import numpy as np

from rtxarr._checks import values_are_checked
from rtxarr._device import is_device_array, namespace
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._op import differentiable, explained, nondifferentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import result_type
from rtxarr.kernels import cross_entropy as kernels
from rtxarr.kernels import small
from rtxarr.ops._activations import softplus
from rtxarr.ops._check import check_floating, check_index, check_number
from rtxarr.ops._elementwise import abs, astype, clip, exp, log, maximum, sqrt, where
from rtxarr.ops._half import widen
from rtxarr.ops._index import along_axis_key, take_along_axis
from rtxarr.ops._manipulate import moveaxis, normalize_axis
from rtxarr.ops._reduce import logsumexp, mean, sum

__all__ = [
    "accuracy",
    "binary_cross_entropy_with_logits",
    "cosine_similarity",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
]


def _reduce(values, reduction, dtype, count=None):
    """Reduce elementwise losses, of which ``count`` (all, when None) enter the mean."""
    if reduction == "mean":
        values = sum(values) / (max(1, math.prod(values.shape)) if count is None else count)
    elif reduction == "sum":
        values = sum(values)
    elif reduction != "none":
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if values.dtype == dtype or (isinstance(values, Tensor) and active_dtype() is not None):
        return values  # autocast keeps losses in float32
    return astype(values, dtype)


_REDUCTION_DOC = """
    reduction : {"mean", "sum", "none"}, default "mean"
"""

# -------------------------------------------------------------------------- of classes


def _classes_last(x, labels, axis, ignore_index, name):
    """Move the classes to the end; give also the labels and which of them count (None: all)."""
    check_floating(**{name: x})
    axis = normalize_axis(axis, x.ndim)
    if axis != x.ndim - 1:
        x = moveaxis(x, axis, -1)
    labels = raw(labels)
    if getattr(labels, "shape", None) != x.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of {name} without axis {axis}, {x.shape[:-1]}, got "
            f"{getattr(labels, 'shape', type(labels).__name__)}"
        )
    kept = None
    if ignore_index is not None:
        xp = namespace(labels)
        kept = labels != ignore_index
        labels = xp.where(kept, labels, xp.zeros_like(labels))
    check_index("labels", labels, x.shape[-1])
    return x, labels, kept


def _count(kept, dtype):
    """Give how many labels count, at least one; None when all do."""
    if kept is None:
        return None
    xp = namespace(kept)
    count = xp.sum(xp.astype(kept, dtype))
    return xp.maximum(count, xp.ones_like(count))


_LABEL_DOC = """
    labels : array of int, shape of the above without ``axis``
        In ``[0, n_classes)``. On a GPU not checked, unless inside
        ``rtxarr.testing.check_values()``.
    axis : int, default -1
        Where the classes are.
    ignore_index : int, optional
        Label of what to leave out; it counts neither in the sum nor in the mean."""


@differentiable
def _cross_entropy(logits, labels, kept, /, *, label_smoothing):
    """Give the losses, and the logarithms of the sums of the exponentials of the logits."""
    if kernels.fits_labels(logits):
        return kernels.label_cross_entropy(logits, labels, kept, label_smoothing=label_smoothing)
    xp = namespace(logits, labels)
    logits = widen(logits)
    lse = logsumexp(logits, axis=-1)
    picked = xp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        losses = losses - label_smoothing * xp.mean(logits, axis=-1)
    if kept is not None:
        losses = xp.where(kept, losses, xp.zeros_like(losses))
    return losses, lse


def _cross_entropy_rule(g, out, logits, labels, kept, label_smoothing):
    of_loss, of_lse = g
    if of_loss is None:
        of_loss = of_lse * 0
    if kept is not None:
        of_loss = where(kept, of_loss, 0)
    total = of_loss if of_lse is None else of_loss + of_lse
    return _cross_entropy_gradient(
        logits, out[1], total, of_loss, labels, label_smoothing=label_smoothing
    )


_cross_entropy.defvjps(logits=_cross_entropy_rule)


@differentiable
def _cross_entropy_gradient(logits, lse, up, down, labels, /, *, label_smoothing):
    """Give ``up`` times the probabilities, minus ``down`` times the (smoothed) labels.

    One array as large as the logits, and one more while it is made where there is no kernel.
    """
    if kernels.fits_labels(logits) and lse.dtype == up.dtype == down.dtype:
        return kernels.label_cross_entropy_gradient(
            logits, lse, up, down, labels, label_smoothing=label_smoothing
        )
    xp = namespace(logits, labels)
    grad = xp.exp(widen(logits) - lse[..., None])
    grad *= up[..., None]
    n_classes = logits.shape[-1]
    if label_smoothing:
        grad -= (label_smoothing / n_classes) * down[..., None]
    down = (1 - label_smoothing) * down[..., None]
    labels = labels[..., None]
    if isinstance(grad, np.ndarray) or is_device_array(grad):
        grad[along_axis_key(xp, labels, grad.shape, grad.ndim - 1)] -= down
        return grad
    return grad - xp.where(labels == xp.arange(n_classes), down, xp.zeros_like(down))


def _probabilities(logits, lse):
    return exp(widen(logits) - lse[..., None])


def _pull_down(g, labels, label_smoothing):
    picked = take_along_axis(g, labels[..., None], axis=-1)[..., 0]
    smooth = label_smoothing * mean(g, axis=-1) if label_smoothing else 0
    return -(1 - label_smoothing) * picked - smooth


_cross_entropy_gradient.defvjps(
    logits=lambda g, logits, lse, up: g * _probabilities(logits, lse) * up[..., None],
    lse=lambda g, logits, lse, up: -up * sum(g * _probabilities(logits, lse), axis=-1),
    up=lambda g, logits, lse: sum(g * _probabilities(logits, lse), axis=-1),
    down=_pull_down,
)


@explained
def cross_entropy(
    logits,
    labels,
    *,
    axis: int = -1,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
):
    """Give the negative log-likelihood of the labels under the softmax of the logits.

    Parameters
    ----------
    logits : array or Tensor of a real floating dtype, at least 1-D{labels}
    label_smoothing : float in [0, 1], default 0
        Share of each label that is spread evenly over all classes.{reduction}
    Returns
    -------
    array or Tensor of the dtype of ``logits``, a scalar or the shape of ``labels``

    Notes
    -----
    The backward pass keeps the logits and one number for each label.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    logits, labels, kept = _classes_last(logits, labels, axis, ignore_index, "logits")
    losses, _ = _cross_entropy(logits, labels, kept, label_smoothing=label_smoothing)
    return _reduce(losses, reduction, logits.dtype, _count(kept, losses.dtype))


@explained
def nll_loss(
    log_probs,
    labels,
    *,
    axis: int = -1,
    ignore_index: int | None = None,
    reduction: str = "mean",
):
    """Give the negative log-probability of the labels.

    Parameters
    ----------
    log_probs : array or Tensor of a real floating dtype, at least 1-D{labels}{reduction}
    Returns
    -------
    array or Tensor of the dtype of ``log_probs``, a scalar or the shape of ``labels``
    """
    log_probs, labels, kept = _classes_last(log_probs, labels, axis, ignore_index, "log_probs")
    losses = -widen(take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0])
    if kept is not None:
        losses = where(kept, losses, 0)
    return _reduce(losses, reduction, log_probs.dtype, _count(kept, losses.dtype))


@nondifferentiable
def accuracy(logits, labels, *, axis: int = -1, ignore_index: int | None = None):
    """Give the share of labels that are the class with the largest logit.

    Parameters
    ----------
    logits : array or Tensor of a real floating dtype, at least 1-D{labels}

    Returns
    -------
    array of float64, a scalar; not differentiable
    """
    last = is_device_array(logits) and axis in (-1, logits.ndim - 1)
    if last and small.fits_accuracy(logits, labels) and not values_are_checked():
        return small.accuracy(logits, labels, ignore_index)
    logits, labels, kept = _classes_last(logits, labels, axis, ignore_index, "logits")
    xp = namespace(logits, labels)
    right = xp.argmax(logits, axis=-1) == labels
    if kept is not None:
        right = right & kept
    return _reduce(xp.astype(right, xp.float64), "mean", xp.float64, _count(kept, xp.float64))


# --------------------------------------------------------------------- of two arrays


def _pair(**arrays):
    """Widen two arrays of one shape; give also the dtype of their result."""
    check_floating(**arrays)
    (name1, x1), (name2, x2) = arrays.items()
    if x1.shape != x2.shape:
        raise ValueError(f"{name2} must have the shape of {name1}, {x1.shape}, got {x2.shape}")
    return widen(x1), widen(x2), result_type(x1.dtype, x2.dtype)


_PAIR_DOC = """
    prediction, target : array or Tensor of a real floating dtype, of one shape
        Differentiable in both."""


@explained
def binary_cross_entropy_with_logits(logits, targets, *, pos_weight=None, reduction: str = "mean"):
    """Give the negative log-likelihood of ``targets`` under the sigmoid of ``logits``.

    Parameters
    ----------
    logits, targets : array or Tensor of a real floating dtype, of one shape
        Targets are probabilities in [0, 1].
    pos_weight : array or float, broadcast to the shape of ``logits``, optional
        Factor on the loss of positive targets.{reduction}
    Returns
    -------
    array or Tensor, a scalar or the shape of ``logits``
    """
    x, t, dtype = _pair(logits=logits, targets=targets)
    positive = t * softplus(-x)
    if pos_weight is not None:
        positive = pos_weight * positive
    return _reduce(positive + (1 - t) * softplus(x), reduction, dtype)


@explained
def mse_loss(prediction, target, *, reduction: str = "mean"):
    """Give the squared differences.

    Parameters
    ----------{pair}{reduction}
    Returns
    -------
    array or Tensor, a scalar or the shape of ``prediction``
    """
    x, t, dtype = _pair(prediction=prediction, target=target)
    difference = x - t
    return _reduce(difference * difference, reduction, dtype)


@explained
def l1_loss(prediction, target, *, reduction: str = "mean"):
    """Give the absolute differences; where they are zero so is the gradient.

    Parameters
    ----------{pair}{reduction}
    Returns
    -------
    array or Tensor, a scalar or the shape of ``prediction``
    """
    x, t, dtype = _pair(prediction=prediction, target=target)
    return _reduce(abs(x - t), reduction, dtype)


@differentiable(elementwise=True)
def _huber(x, /, *, delta):
    xp = namespace(x)
    size = xp.abs(x)
    return xp.where(size <= delta, 0.5 * x * x, delta * (size - 0.5 * delta))


_huber.defvjps(x=lambda g, x, delta: g * clip(x, -delta, delta))


@explained
def huber_loss(prediction, target, *, delta: float = 1.0, reduction: str = "mean"):
    """Give half the squared differences up to ``delta``, and straight lines beyond.

    Parameters
    ----------{pair}
    delta : float, above 0, default 1.0{reduction}
    Returns
    -------
    array or Tensor, a scalar or the shape of ``prediction``

    References
    ----------
    Huber, "Robust Estimation of a Location Parameter", Annals of Statistics 35, 1964.
    """
    check_number("delta", delta, above=0)
    x, t, dtype = _pair(prediction=prediction, target=target)
    return _reduce(_huber(x - t, delta=float(delta)), reduction, dtype)


@explained
def smooth_l1_loss(prediction, target, *, beta: float = 1.0, reduction: str = "mean"):
    """Give :func:`l1_loss` with a parabola where the difference is below ``beta``.

    Parameters
    ----------{pair}
    beta : float, at least 0, default 1.0
        It is :func:`huber_loss` divided by ``beta``.{reduction}
    Returns
    -------
    array or Tensor, a scalar or the shape of ``prediction``
    """
    check_number("beta", beta, at_least=0)
    if beta == 0:
        return l1_loss(prediction, target, reduction=reduction)
    x, t, dtype = _pair(prediction=prediction, target=target)
    return _reduce(_huber(x - t, delta=float(beta)) / beta, reduction, dtype)


@explained
def kl_div(log_probs, target, *, log_target: bool = False, reduction: str = "mean"):
    """Give the terms ``target * (log(target) - log_probs)`` of the divergence from ``target``.

    Parameters
    ----------
    log_probs, target : array or Tensor of a real floating dtype, of one shape
        A target of zero contributes zero.
    log_target : bool, default False
        Whether ``target`` holds logarithms of probabilities.
    reduction : {{"mean", "sum", "none", "batchmean"}}, default "mean"
        "batchmean" divides the sum by the length of the first axis, which gives the divergence
        itself; "mean" divides by the number of elements.

    Returns
    -------
    array or Tensor, a scalar or the shape of ``log_probs``
    """
    q, p, dtype = _pair(log_probs=log_probs, target=target)
    if log_target:
        terms = exp(p) * (p - q)
    else:
        positive = p > 0
        terms = where(positive, p * (log(where(positive, p, 1)) - q), 0)
    if reduction != "batchmean":
        return _reduce(terms, reduction, dtype)
    if q.ndim == 0:
        raise ValueError("log_probs must have a batch axis for reduction 'batchmean', got a scalar")
    return _reduce(terms, "mean", dtype, count=max(1, q.shape[0]))


@explained
def cosine_similarity(x1, x2, *, axis: int = -1, eps: float = 1e-8):
    """Give the cosine of the angle between vectors along one axis.

    Parameters
    ----------
    x1, x2 : array or Tensor of a real floating dtype, of one shape
    axis : int, default -1
    eps : float, above 0, default 1e-8
        Least length that is divided by; keeps the result and the gradient of a zero vector
        finite.

    Returns
    -------
    array or Tensor, shape of ``x1`` without ``axis``
    """
    check_number("eps", eps, above=0)
    a, b, dtype = _pair(x1=x1, x2=x2)
    axis = normalize_axis(axis, a.ndim)

    def length(x):
        return sqrt(maximum(sum(x * x, axis=axis), eps * eps))

    return _reduce(sum(a * b, axis=axis) / (length(a) * length(b)), "none", dtype)


for _function in (
    accuracy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
):
    _function.__doc__ = (_function.__doc__ or "").format(
        labels=_LABEL_DOC, pair=_PAIR_DOC, reduction=_REDUCTION_DOC
    )
del _function
