"""Activation functions as modules, so that they show in a model's text."""

from collections.abc import Callable
from typing import Any

from rtxarr import ops
from rtxarr.nn._module import Module
from rtxarr.ops._gates import ACTIVATIONS as LINEAR_ACTIVATIONS


class _Activation(Module):
    function: Callable

    def __init__(self, **options: Any):
        self.options = options

    def forward(self, x):
        return type(self).function(x, **self.options)

    def __repr__(self):
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"


class ReLU(_Activation):
    function = staticmethod(ops.relu)


class LeakyReLU(_Activation):
    function = staticmethod(ops.leaky_relu)


class ELU(_Activation):
    function = staticmethod(ops.elu)


class GELU(_Activation):
    function = staticmethod(ops.gelu)


class SiLU(_Activation):
    function = staticmethod(ops.silu)


class Mish(_Activation):
    function = staticmethod(ops.mish)


class Hardswish(_Activation):
    function = staticmethod(ops.hardswish)


class Softplus(_Activation):
    function = staticmethod(ops.softplus)


class Sigmoid(_Activation):
    function = staticmethod(ops.sigmoid)


class Tanh(_Activation):
    function = staticmethod(ops.tanh)


class Softmax(_Activation):
    function = staticmethod(ops.softmax)


class LogSoftmax(_Activation):
    function = staticmethod(ops.log_softmax)


ACTIVATIONS = (
    ReLU,
    LeakyReLU,
    ELU,
    GELU,
    SiLU,
    Mish,
    Hardswish,
    Softplus,
    Sigmoid,
    Tanh,
    Softmax,
    LogSoftmax,
)
for _layer in ACTIVATIONS:
    _name = _layer.function.__name__
    _layer.__doc__ = f"Call :func:`rtxarr.{_name}` with the keyword arguments given here."
del _layer, _name

_BY_NAME = {layer.function.__name__: layer.function for layer in ACTIVATIONS}
GATED = {"glu": ops.glu, "geglu": ops.geglu, "swiglu": ops.swiglu}


def get_activation(activation: str | Callable) -> Callable:
    """Give the function of a name; a callable is returned unchanged."""
    if callable(activation):
        return activation
    known = {**_BY_NAME, "gelu_tanh": LINEAR_ACTIVATIONS["gelu_tanh"], **GATED}
    if activation not in known:
        raise ValueError(
            f"activation must be callable or one of {', '.join(known)}, got {activation!r}"
        )
    return known[activation]
