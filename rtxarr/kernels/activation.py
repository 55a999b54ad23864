"""Activation functions and their gradients in one pass each: every array is read or written once.

The formulas over arrays, in ``rtxarr.ops``, are the CPU path; there each is about half a dozen
passes over memory.
"""

from __future__ import annotations

from typing import Any

from rtxarr._device import is_array, runs_here
from rtxarr.dtypes import FLOATING
from rtxarr.kernels._dense import map_dense

__all__ = ["BACKWARD", "FORWARD", "activation", "activation_gradient", "fits"]

FORWARD = ("elu", "gelu", "gelu_tanh", "mish", "relu", "sigmoid", "silu")
# What the gradient is computed from: the input, or the output.
BACKWARD = {
    "elu": "out",
    "gelu": "x",
    "gelu_tanh": "x",
    "mish": "x",
    "relu": "out",
    "sigmoid": "out",
    "silu": "x",
}


def fits(*arrays: Any) -> bool:
    """Tell whether the kernels take these arrays: of one dtype and shape, not empty, and here."""
    first, *others = arrays
    if not (is_array(first) and runs_here(first) and first.dtype in FLOATING and first.size):
        return False
    for x in others:
        if not is_array(x) or x.dtype != first.dtype or x.shape != first.shape:
            return False
    return True


def activation(name: str, x: Any) -> Any:
    """Give the activation of each element.

    Parameters
    ----------
    name : str
        One of ``FORWARD``.
    x : array of a real floating dtype
        One that :func:`fits`.

    Returns
    -------
    array of the dtype, shape and, if it is dense, memory layout of ``x``
    """
    from rtxarr.kernels._activation_cuda import forward

    return map_dense(forward, (name,), (x,))


def activation_gradient(name: str, saved: Any, grad: Any) -> Any:
    """Give ``grad`` times the derivative of the activation.

    Parameters
    ----------
    name : str
        A key of ``BACKWARD``.
    saved : array
        The input or the output, as ``BACKWARD`` says.
    grad : array
        Together with ``saved`` arrays that :func:`fits`.

    Returns
    -------
    array, like ``saved``
    """
    from rtxarr.kernels._activation_cuda import backward

    return map_dense(backward, (name,), (saved, grad))
