"""Keep gradients within bounds."""

import numbers
from collections.abc import Iterable
from typing import Any

from rtxarr._device import namespace
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr._override import overridable, tracing
from rtxarr.dtypes import accumulator
from rtxarr.kernels.multi_tensor import norm_and_factor, on_one_gpu, scaled_copies
from rtxarr.ops._elementwise import clip
from rtxarr.ops._half import widen
from rtxarr.optim._optimizer import require_params


@explains_out_of_memory
def clip_grad_norm(params: Iterable, max_norm: float) -> Any:
    """Scale all gradients down together so that their joint 2-norm is at most ``max_norm``.

    Parameters
    ----------
    params : iterable of Parameter
        Those without a gradient are passed over.
    max_norm : float > 0
        Infinity only measures.

    Returns
    -------
    array of float32 or float64, shape ()
        The norm before. On a GPU it stays there, so nothing waits, and all gradients are taken
        together in three launches. NaN or infinite gradients make it, and the scaled gradients,
        NaN.
    """
    max_norm = _bound("max_norm", max_norm)
    params = [p for p in require_params(params) if p.grad is not None]
    if not params:
        return namespace().zeros((), dtype="float32")
    norm, *grads = _clipped(max_norm, *(p.grad for p in params))
    for param, grad in zip(params, grads, strict=False):
        # New arrays: someone may keep the old ones. They fit: no need of the property's checks.
        if tracing() is None:
            param.node.grad = grad
        else:
            param.grad = grad
    return norm


@overridable
def _clipped(max_norm, *grads):
    """Return the joint norm, and all gradients scaled if there is a bound."""
    xp, bounded = namespace(*grads), max_norm < float("inf")
    if on_one_gpu(grads) and len({accumulator(dtype) for dtype in {g.dtype for g in grads}}) == 1:
        found = norm_and_factor(grads, max_norm)
        return xp.reshape(found[:1], ()), *(scaled_copies(grads, found, 1) if bounded else ())
    total = None
    for grad in map(widen, grads):
        square = xp.sum(grad * grad)
        total = square if total is None else total + square
    norm = xp.sqrt(total)
    if not bounded:
        return (norm,)
    scale = clip(max_norm / (norm + 1e-6), max=1.0)
    return norm, *(grad * xp.astype(scale, grad.dtype) for grad in grads)


@explains_out_of_memory
def clip_grad_value(params: Iterable, max_value: float) -> None:
    """Clip each element of the gradients to ``[-max_value, max_value]``.

    Parameters
    ----------
    params : iterable of Parameter
        Those without a gradient are passed over.
    max_value : float > 0
    """
    max_value = _bound("max_value", max_value)
    for param in require_params(params):
        if param.grad is not None:
            param.grad = clip(param.grad, min=-max_value, max=max_value)


def _bound(name, value):
    """Give a number, or an array of one without axes, as a positive float."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    value = float(value)
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")
    return value
