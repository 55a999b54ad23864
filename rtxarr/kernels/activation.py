"""Activation functions and their gradients in one pass each: every array is read or written once.

The formulas over arrays, in ``rtxarr.ops``, are the CPU path; there each is about half a dozen
passes over memory.
"""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import is_array, launch_planned, runs_here
from rtxarr.dtypes import FLOATING
from rtxarr.kernels._dense import _address, map_dense, packed

__all__ = [
    "BACKWARD", "FORWARD", "activation", "activation_gradient", "fits", "fits_halves", "gate",
    "gate_gradient", "gate_halves", "gate_halves_gradient",
]  # fmt: skip

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


def gate(name: str, value: Any, gate: Any) -> Any:
    """Give ``value`` times the activation of ``gate``, rounded once.

    Parameters
    ----------
    name : str
        One of ``FORWARD``.
    value, gate : array
        Together arrays that :func:`fits`.

    Returns
    -------
    array, like ``value``
    """
    from rtxarr.kernels._activation_cuda import gate as kernel

    return map_dense(kernel, (name, False), (value, gate), (0,))


def gate_gradient(name: str, value: Any, gate: Any, grad: Any) -> tuple[Any, Any]:
    """Give the gradients of the arguments of :func:`gate`, in one pass.

    Parameters
    ----------
    name : str
        One of ``FORWARD``.
    value, gate, grad : array
        Together arrays that :func:`fits`.

    Returns
    -------
    of_value, of_gate : array
        Row by row in memory.
    """
    value, gate, grad = map(packed, (value, gate, grad))
    outs = tuple(_device.empty(value, value.shape, value.dtype) for _ in range(2))
    launch_planned(_plan_gates, ("gate_backward", name, False), (value, gate, grad, *outs, 0))
    return outs


def fits_halves(x: Any, *arrays: Any) -> bool:
    """Tell whether kernels take the halves of rows, and gradients half as long."""
    return fits(x) and x.shape[-1] % 2 == 0 and x.size < 1 << 32 and (not arrays or fits(*arrays))


def gate_halves(name: str, x: Any) -> Any:
    """Give the first halves of rows times the activation of the second, rounded once.

    Parameters
    ----------
    name : str
        One of ``FORWARD``.
    x : array, shape (..., 2 * n)
        One that :func:`fits_halves`.

    Returns
    -------
    array, shape (..., n)
        Row by row in memory.
    """
    x, n = packed(x), x.shape[-1] // 2
    out = _device.empty(x, (*x.shape[:-1], n), x.dtype)
    # The kernel finds values and gates in one array.
    launch_planned(_plan_gates, ("gate", name, n % 8 == 0), (x, x, out, n))
    return out


def gate_halves_gradient(name: str, x: Any, grad: Any) -> Any:
    """Give the gradient of the argument of :func:`gate_halves`, in one pass.

    Parameters
    ----------
    name : str
        One of ``FORWARD``.
    x : array, shape (..., 2 * n)
    grad : array, shape (..., n)
        Of the dtype of ``x``.

    Returns
    -------
    array, shape (..., 2 * n)
        Row by row in memory.
    """
    x, grad, n = packed(x), packed(grad), x.shape[-1] // 2
    out = _device.empty(x, x.shape, x.dtype)
    options = "gate_backward", name, n % 8 == 0
    # `out` holds both gradients; `grad` stands where the second would be, and is not written to.
    launch_planned(_plan_gates, options, (x, x, grad, out, grad, n))
    return out


def _plan_gates(options, args):
    from rtxarr.kernels import _activation_cuda

    which, name, rows_are_wide = options
    x, result = args[0], args[2]  # or the gradient of that
    halves = x.size != result.size
    wide = all(_address(a) % 16 == 0 for a in args[:-1]) and (rows_are_wide or not halves)
    kernel = getattr(_activation_cuda, which)(name, halves, x.dtype, wide)
    return kernel, -(-result.size // kernel.per_thread), None
