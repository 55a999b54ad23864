"""Tensor, the tape, and transforms of functions: gradients of any order."""

from rtxarr.autograd._autocast import autocast
from rtxarr.autograd._capture import Captured, CaptureError, capture
from rtxarr.autograd._checkpoint import checkpoint, is_recomputing
from rtxarr.autograd._engine import gradients, per_sample_gradients
from rtxarr.autograd._functional import (
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    stop_gradient,
    value_and_grad,
    vjp,
)
from rtxarr.autograd._mode import debug_mutation, enable_grad, is_recording, no_grad
from rtxarr.autograd._op import differentiable as custom_op
from rtxarr.autograd._tape import Tensor

__all__ = [
    "CaptureError",
    "Captured",
    "Tensor",
    "autocast",
    "capture",
    "checkpoint",
    "custom_op",
    "debug_mutation",
    "enable_grad",
    "grad",
    "gradients",
    "hessian",
    "hvp",
    "is_recomputing",
    "is_recording",
    "jacobian",
    "jvp",
    "no_grad",
    "per_sample_gradients",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]
