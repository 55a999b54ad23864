"""Cross entropy between class probabilities and logits, and its derivative rules."""

from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable
from rtxarr.kernels import cross_entropy as kernels
from rtxarr.ops._activations import log_softmax, softmax
from rtxarr.ops._check import check_floating
from rtxarr.ops._half import rounded_once
from rtxarr.ops._reduce import sum

__all__ = ["soft_cross_entropy"]


@differentiable
def soft_cross_entropy(logits, targets, /):
    """Give ``-sum(targets * log_softmax(logits))`` along the last axis.

    Parameters
    ----------
    logits : array or Tensor of a real floating dtype, shape (..., n_classes)
    targets : array or Tensor, shape and dtype of ``logits``
        Probabilities of the classes, or any weights: a row of zeros counts for nothing. A class
        with a logit of -inf must have none.

    Returns
    -------
    array or Tensor, shape (...)
        Half precision is computed in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> float(rx.soft_cross_entropy(np.zeros(4), np.asarray([0.5, 0.5, 0.0, 0.0])))
    1.3862943611198906
    """
    check_floating(logits=logits, targets=targets)
    if logits.ndim < 1 or logits.shape != targets.shape:
        raise ValueError(
            f"targets must have the shape of logits, {logits.shape}, got {targets.shape}"
        )
    if kernels.fits(logits, targets):
        return kernels.soft_cross_entropy(logits, targets)
    return _losses(logits, targets)


@rounded_once
def _losses(logits, targets):
    xp = namespace(logits, targets)
    zero = xp.zeros((), dtype=targets.dtype)
    log_probs = xp.where(targets == zero, zero, log_softmax(logits))
    return -xp.sum(targets * log_probs, axis=-1)


@differentiable
def _soft_cross_entropy_gradient(logits, targets, grad, /):
    """Give ``grad * (sum(targets) * softmax(logits) - targets)`` for each row."""
    if kernels.fits(logits, targets) and grad.dtype == logits.dtype:
        return kernels.soft_cross_entropy_gradient(logits, targets, grad)
    return _gradient(logits, targets, grad)


@rounded_once
def _gradient(logits, targets, grad):
    xp = namespace(logits, targets, grad)
    weights = xp.sum(targets, axis=-1, keepdims=True)
    return grad[..., None] * (weights * softmax(logits) - targets)


soft_cross_entropy.defvjps(
    logits=lambda g, logits, targets: _soft_cross_entropy_gradient(logits, targets, g),
    targets=lambda g, logits: -(g[..., None] * log_softmax(logits)),
)


def _weights(targets):
    return sum(targets, axis=-1, keepdims=True)


def _logits_rule(g, logits, targets, grad):
    p, g = softmax(logits), grad[..., None] * g
    return p * _weights(targets) * (g - sum(g * p, axis=-1, keepdims=True))


def _targets_rule(g, logits, grad):
    g = grad[..., None] * g
    return sum(g * softmax(logits), axis=-1, keepdims=True) - g


_soft_cross_entropy_gradient.defvjps(
    logits=_logits_rule,
    targets=_targets_rule,
    grad=lambda g, logits, targets: sum(
        g * (_weights(targets) * softmax(logits) - targets), axis=-1
    ),
)
