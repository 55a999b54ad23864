"""Values times gates, the activations of other values, and the halves of an axis as such pairs."""

import functools

from rtxarr._device import is_device_array
from rtxarr._override import tracing
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import raw
from rtxarr.kernels import activation as kernels
from rtxarr.ops._activations import _gelu_rule, _silu_slope, gelu, relu, sigmoid, silu
from rtxarr.ops._check import check_floating
from rtxarr.ops._elementwise import where
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._manipulate import concat, normalize_axis, part_along
from rtxarr.ops._reduce import any

__all__ = ["geglu", "glu", "swiglu"]

ACTIVATIONS = {
    "relu": relu,
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}


def _sigmoid_slope(x, g):
    s = sigmoid(x)
    return g * (s * (1 - s))


_SLOPES = {
    "relu": lambda x, g: where(x <= 0, 0, g),
    "sigmoid": _sigmoid_slope,
    "silu": _silu_slope,
    "gelu": lambda x, g: _gelu_rule(g, x, "none"),
    "gelu_tanh": lambda x, g: _gelu_rule(g, x, "tanh"),
}


def on_gpu(x):
    """Tell whether ``x`` is on a GPU, or stands for an array that is."""
    trace = tracing()
    return is_device_array(raw(x)) if trace is None else not trace.on_numpy


@functools.partial(differentiable, elementwise=True)
def _gate(x, gate, /, *, activation):
    """Give ``x`` times the activation of ``gate``."""
    if kernels.fits(x, gate):
        return kernels.gate(activation, x, gate)
    return _gate_formula(x, gate, activation=activation)


@rounded_once
def _gate_formula(x, gate, *, activation):
    return x * ACTIVATIONS[activation](gate)


def _gate_rule(g, x, gate, activation):
    if kernels.fits(x, gate, g):
        return kernels.gate_gradient(activation, x, gate, g)
    g, x, gate = widen(g), widen(x), widen(gate)
    return g * ACTIVATIONS[activation](gate), _SLOPES[activation](gate, g * x)


_gate.defvjp(_gate_rule)


# -------------------------------------------------------------------------------------- halves


def _parts(x, axis):
    n = x.shape[axis] // 2
    return part_along(x, axis, 0, n), part_along(x, axis, n, 2 * n)


@differentiable
def _gate_halves(x, /, *, activation):
    """Give the first half of the last axis times the activation of the second."""
    if kernels.fits_halves(x):
        return kernels.gate_halves(activation, x)
    return _gate_formula(*_parts(x, x.ndim - 1), activation=activation)


def _gate_halves_rule(g, x, activation):
    if kernels.fits_halves(x, g):
        return kernels.gate_halves_gradient(activation, x, g)
    return concat(_gate_rule(g, *_parts(x, x.ndim - 1), activation), axis=-1)


_gate_halves.defvjps(x=_gate_halves_rule)
_gate_halves.defrows(lambda mask: any(mask, axis=-1, keepdims=True))


def _gated(x, axis, activation):
    """Multiply the first half along ``axis`` by the activation of the second."""
    check_floating(x=x)
    axis = normalize_axis(axis, x.ndim)
    n = x.shape[axis]
    if n % 2:
        raise ValueError(f"x must have an even length along axis {axis}, got {n}")
    if on_gpu(x):
        if axis == x.ndim - 1:
            return _gate_halves(x, activation=activation)
        return _gate(*_parts(x, axis), activation=activation)
    value, gate = _parts(x, axis)
    return value * ACTIVATIONS[activation](gate)


_GATE_DOC = """

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, of even length along ``axis``
    axis : int, default -1

    Returns
    -------
    array or Tensor, half as long along ``axis``

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, eq. 5.
"""


@explained
def glu(x, /, *, axis: int = -1):
    """Multiply the first half of ``x`` by the :func:`sigmoid` of the second."""
    return _gated(x, axis, "sigmoid")


@explained
def geglu(x, /, *, axis: int = -1):
    """Multiply the first half of ``x`` by the :func:`gelu` of the second."""
    return _gated(x, axis, "gelu")


@explained
def swiglu(x, /, *, axis: int = -1):
    """Multiply the first half of ``x`` by the :func:`silu` of the second."""
    return _gated(x, axis, "silu")


for _function in (glu, geglu, swiglu):
    _function.__doc__ = (_function.__doc__ or "") + _GATE_DOC
del _function
