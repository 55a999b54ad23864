"""Tensor, the tape, and transforms of functions: gradients of any order."""

from rtxarr.autograd._engine import gradients
from rtxarr.autograd._mode import enable_grad, is_recording, no_grad
from rtxarr.autograd._op import differentiable as custom_op
from rtxarr.autograd._tape import Tensor

__all__ = ["Tensor", "custom_op", "enable_grad", "gradients", "is_recording", "no_grad"]
