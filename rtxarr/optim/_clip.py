"""Keep gradients within bounds."""

from collections.abc import Iterable
from typing import Any

from rtxarr._device import namespace
from rtxarr.dtypes import accumulator
from rtxarr.kernels.multi_tensor import norm_and_factor, on_one_gpu, scaled_copies
from rtxarr.ops._elementwise import clip
from rtxarr.ops._half import widen
from rtxarr.optim._optimizer import require_params


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
    if not max_norm > 0:
        raise ValueError(f"max_norm must be > 0, got {max_norm}")
    params = [p for p in require_params(params) if p.grad is not None]
    if not params:
        return namespace().zeros((), dtype="float32")
    grads = [p.grad for p in params]
    xp = namespace(*grads)
    if on_one_gpu(grads) and len({accumulator(dtype) for dtype in {g.dtype for g in grads}}) == 1:
        found = norm_and_factor(grads, max_norm)
        if max_norm < float("inf"):
            for param, grad in zip(params, scaled_copies(grads, found, 1), strict=True):
                param.node.grad = grad  # it fits: no need of the property's checks
        return xp.reshape(found[:1], ())
    total = None
    for grad in map(widen, grads):
        square = xp.sum(grad * grad)
        total = square if total is None else total + square
    norm = xp.sqrt(total)
    if max_norm < float("inf"):
        scale = clip(max_norm / (norm + 1e-6), max=1.0)
        for param in params:
            # A new array: the old one may be shared with someone who keeps it.
            param.grad = param.grad * xp.astype(scale, param.dtype)
    return norm


def clip_grad_value(params: Iterable, max_value: float) -> None:
    """Clip each element of the gradients to ``[-max_value, max_value]``.

    Parameters
    ----------
    params : iterable of Parameter
        Those without a gradient are passed over.
    max_value : float > 0
    """
    if not max_value > 0:
        raise ValueError(f"max_value must be > 0, got {max_value}")
    for param in require_params(params):
        if param.grad is not None:
            param.grad = clip(param.grad, min=-max_value, max=max_value)
