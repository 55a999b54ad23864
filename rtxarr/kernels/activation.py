"""Activation functions and their gradients in one pass each: every array is read or written once.

The formulas over arrays, in ``rtxarr.ops``, are the CPU path; there each is about half a dozen
passes over memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import is_array, launch, namespace, runs_kernels
from rtxarr.dtypes import is_half

__all__ = ["BACKWARD", "FORWARD", "activation", "activation_gradient", "fits"]

FORWARD = ("gelu", "gelu_tanh", "mish", "sigmoid", "silu")
# What the gradient is computed from: the input, or the output.
BACKWARD = {
    "gelu": "x",
    "gelu_tanh": "x",
    "mish": "x",
    "relu": "out",
    "sigmoid": "out",
    "silu": "x",
}


def fits(*arrays: Any) -> bool:
    """Tell whether the kernels take these arrays: of one dtype and shape, and not empty."""
    first = arrays[0]
    dtype = getattr(first, "dtype", None)
    return (
        is_array(first)
        and runs_kernels(first)
        and (is_half(dtype) or dtype in (np.float32, np.float64))
        and first.size > 0
        and all(is_array(x) and x.dtype == dtype and x.shape == first.shape for x in arrays[1:])
    )


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

    return _map(forward, name, x)


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

    return _map(backward, name, saved, grad)


def _map(kernel, name, *arrays):
    xp = namespace(*arrays)
    order = _dense_order(arrays[0])
    if order is None:
        arrays = (xp.asarray(arrays[0], copy=True, order="C"), *arrays[1:])
        order = tuple(range(arrays[0].ndim))
    flat = []
    for x in arrays:
        x = x.transpose(order)
        flat.append((x if x.flags.c_contiguous else x.copy(order="C")).reshape(-1))
    out = xp.empty(tuple(arrays[0].shape[i] for i in order), dtype=arrays[0].dtype)
    flat.append(out.reshape(-1))
    wide = all(_address(x) % 16 == 0 for x in flat)
    run = kernel(name, out.dtype, wide)
    launch(run, -(-out.size // run.per_thread), tuple(flat))
    return out.transpose(tuple(np.argsort(order)))


def _dense_order(x):
    """Give the order of axes in which ``x`` is C-contiguous; None if there is none."""
    if x.flags.c_contiguous:
        return tuple(range(x.ndim))
    order = tuple(sorted(range(x.ndim), key=lambda i: (-x.strides[i], x.shape[i] > 1)))
    return order if x.transpose(order).flags.c_contiguous else None


def _address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
