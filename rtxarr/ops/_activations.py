"""Activation functions and softmax, with their derivative rules.

Each keeps for the backward pass only what its rule needs: the output where that is enough.
"""

import functools
import math

import numpy as np

from rtxarr import _device
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import Tensor
from rtxarr.kernels import activation as kernels
from rtxarr.kernels import softmax as rows
from rtxarr.ops._check import (
    check_floating,
    check_number,
)
from rtxarr.ops._elementwise import abs, exp, maximum, tanh, where
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._manipulate import normalize_axis
from rtxarr.ops._reduce import any, logsumexp, sum

__all__ = [
    "elu",
    "erf",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]

_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
# Of the tanh form of gelu: sqrt(2 / pi) * x * (1 + 0.044715 * x * x).
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715

_SHARED_DOC = """

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
        Half precision is computed in float32 and rounded once.
"""


def _activation(formula):
    """Make an elementwise operation out of a formula over float32 or float64 arrays."""
    compute = rounded_once(formula)
    name = formula.__name__

    @functools.wraps(formula)
    def checked(x, /, **options):
        check_floating(x=x)
        kernel = _kernel_of(name, options)
        if kernel is not None and kernels.fits(x):
            return kernels.activation(kernel, x)
        return compute(x, **options)

    if "Parameters" not in (checked.__doc__ or ""):
        checked.__doc__ = (checked.__doc__ or "") + _SHARED_DOC
    return differentiable(checked, elementwise=True)


def _kernel_of(name, options):
    """Give the name of the kernel for a formula with these options; None if there is none."""
    if options == {"approximate": "tanh"}:
        return "gelu_tanh"
    plain = not options or options == {"approximate": "none"}
    return name if plain and name in kernels.FORWARD else None


def _gradient(name, saved, g, formula):
    """Give the gradient in one launch where there is a kernel and nothing is recorded."""
    if kernels.fits(saved, g):
        return kernels.activation_gradient(name, saved, g)
    return formula(saved, g)


# ---------------------------------------------------------------------------- rectifiers


@functools.partial(differentiable, elementwise=True)
def relu(x, /):
    """Give ``max(x, 0)``; the gradient at zero is zero.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
    """
    check_floating(x=x)
    if kernels.fits(x):
        return kernels.activation("relu", x)
    if _device.is_device_array(x):
        return maximum(x, 0)
    xp = namespace(x)
    out = xp.maximum(x, 0)
    # NumPy may give float32 for bfloat16.
    return out if out.dtype == x.dtype else xp.astype(out, x.dtype)


relu.defvjps(
    x=lambda g, out: _gradient("relu", out, g, lambda out, g: where(out <= 0, 0, g)),
)


@_activation
def leaky_relu(x, /, *, negative_slope: float = 0.01):
    """Give ``x`` where it is positive and ``negative_slope * x`` elsewhere."""
    check_number("negative_slope", negative_slope)
    return namespace(x).where(x > 0, x, x * negative_slope)


leaky_relu.defvjps(x=lambda g, x, negative_slope: where(x > 0, g, widen(g) * negative_slope))


@_activation
def elu(x, /, *, alpha: float = 1.0, scale: float = 1.0):
    """Give ``scale * x`` where ``x`` is positive, ``scale * alpha * (exp(x) - 1)`` elsewhere.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
    alpha : float, at least 0, default 1.0
    scale : float, above 0, default 1.0

    References
    ----------
    Clevert et al., "Fast and Accurate Deep Network Learning by Exponential Linear Units", 2015,
    arXiv:1511.07289, eq. 15.
    """
    check_number("alpha", alpha, at_least=0)
    check_number("scale", scale, above=0)
    if alpha == scale == 1 and kernels.fits(x):
        return kernels.activation("elu", x)
    xp = namespace(x)
    negative = xp.where(x > 0, xp.zeros_like(x), x)  # expm1 must not overflow where unused
    return scale * xp.where(x > 0, x, alpha * xp.expm1(negative))


def _elu_rule(g, out, alpha, scale):
    def formula(out, g):
        return widen(g) * where(out > 0, scale, widen(out) + scale * alpha)

    return _gradient("elu", out, g, formula) if alpha == scale == 1 else formula(out, g)


elu.defvjps(x=_elu_rule)


@explained
def selu(x, /):
    """Give the self-normalizing :func:`elu`: zero mean and unit variance are a fixed point.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape

    References
    ----------
    Klambauer et al., "Self-Normalizing Neural Networks", 2017, arXiv:1706.02515, eq. 2 and 14.
    """
    return elu(x, alpha=1.6732632423543772, scale=1.0507009873554805)


# ------------------------------------------------------------------------------- sigmoids


@_activation
def sigmoid(x, /):
    """Give ``1 / (1 + exp(-x))``, without overflow."""
    xp = namespace(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, xp.ones_like(x), small) / (1 + small)


def _sigmoid_slope(out, g):
    out = widen(out)
    return g * (out * (1 - out))


sigmoid.defvjps(x=lambda g, out: _gradient("sigmoid", out, g, _sigmoid_slope))


@_activation
def log_sigmoid(x, /):
    """Give ``log(sigmoid(x))``, exact in both tails."""
    xp = namespace(x)
    return xp.minimum(x, xp.zeros((), dtype=x.dtype)) - xp.log1p(xp.exp(-xp.abs(x)))


log_sigmoid.defvjps(x=lambda g, x: g * sigmoid(-widen(x)))


@_activation
def softplus(x, /, *, beta: float = 1.0):
    """Give ``log(1 + exp(beta * x)) / beta``, without overflow.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
    beta : float, above 0, default 1.0
        Sharpness: the larger, the nearer to :func:`relu`.
    """
    check_number("beta", beta, above=0)
    xp = namespace(x)
    tail = xp.log1p(xp.exp(-beta * xp.abs(x))) / beta
    return xp.maximum(x, xp.zeros((), dtype=x.dtype)) + tail


softplus.defvjps(x=lambda g, x, beta: g * sigmoid(beta * widen(x)))


@_activation
def hardsigmoid(x, /):
    """Give ``x / 6 + 1 / 2`` limited to ``[0, 1]``."""
    return _share(x)


hardsigmoid.defvjps(x=lambda g, x: where(abs(x) < 3, widen(g) / 6, 0))

# ------------------------------------------------------------------ smooth rectifiers


@_activation
def silu(x, /):
    """Give ``x * sigmoid(x)``, also known as swish."""
    return x * sigmoid(x)


def _silu_slope(x, g):
    x = widen(x)
    s = sigmoid(x)
    return g * (s * (1 + x * (1 - s)))


silu.defvjps(x=lambda g, x: _gradient("silu", x, g, _silu_slope))


@_activation
def hardswish(x, /):
    """Give ``x * hardsigmoid(x)``."""
    return x * _share(x)


def _share(x):
    xp = namespace(x)
    return xp.minimum(xp.maximum(x / 6 + 0.5, 0), 1)


def _hardswish_rule(g, x):
    x = widen(x)
    return g * where(x <= -3, 0, where(x >= 3, 1, x / 3 + 0.5))


hardswish.defvjps(x=_hardswish_rule)


@_activation
def mish(x, /):
    """Give ``x * tanh(softplus(x))``.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape

    References
    ----------
    Misra, "Mish: A Self Regularized Non-Monotonic Activation Function", 2019, arXiv:1908.08681.
    """
    return x * namespace(x).tanh(softplus(x))


def _mish_slope(x, g):
    x = widen(x)
    t = tanh(softplus(x))
    return g * (t + x * sigmoid(x) * (1 - t * t))


mish.defvjps(x=lambda g, x: _gradient("mish", x, g, _mish_slope))


@_activation
def erf(x, /):
    """Give the error function."""
    if isinstance(x, np.generic) or hasattr(x, "__array_ufunc__"):  # NumPy, CuPy and dask
        return _device.special(x).erf(x)
    # Another library's array: no copy, and it must be in the host's memory.
    values = _device.special(x).erf(np.from_dlpack(x))
    return namespace(x).from_dlpack(values)


def _erf_rule(g, x):
    x = widen(x)
    return g * (_TWO_OVER_SQRT_PI * exp(-(x * x)))


erf.defvjps(x=_erf_rule)


@_activation
def gelu(x, /, *, approximate: str = "none"):
    """Give ``x`` times the standard normal distribution function at ``x``.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
    approximate : {"none", "tanh"}, default "none"
        "tanh" replaces the error function, as in the paper and in GPT-2; it differs by less
        than 5e-4.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, arXiv:1606.08415, sec. 2.
    """
    if approximate == "none":
        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        inner = _TANH_SCALE * x * (1 + _TANH_CUBIC * (x * x))
        return 0.5 * x * (1 + namespace(x).tanh(inner))
    raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")


def _gelu_rule(g, x, approximate):
    if kernels.fits(x, g):
        name = "gelu" if approximate == "none" else "gelu_tanh"
        return kernels.activation_gradient(name, x, g)
    x = widen(x)
    if approximate == "none":
        density = exp(-0.5 * (x * x)) / math.sqrt(2 * math.pi)
        return g * (0.5 * (1 + erf(x * math.sqrt(0.5))) + x * density)
    square = x * x
    t = tanh(_TANH_SCALE * x * (1 + _TANH_CUBIC * square))
    slope = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * square)
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


gelu.defvjps(x=_gelu_rule)

# --------------------------------------------------------------------------------- softmax


@differentiable
def softmax(x, /, *, axis: int = -1):
    """Give the exponentials divided by their sum along an axis.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, at least 1-D
    axis : int, default -1

    Returns
    -------
    array or Tensor, shape of ``x``
        Where all elements along the axis are -inf the result is zero.
    """
    check_floating(x=x)
    if normalize_axis(axis, x.ndim) == x.ndim - 1 and rows.fits(x):
        return rows.softmax(x, logarithm=False)
    return _softmax(x, axis)


@rounded_once
def _softmax(x, axis):
    shifted, xp = _shifted(x, axis)
    e = xp.exp(shifted)
    total = xp.sum(e, axis=axis, keepdims=True)
    return e / xp.where(total == 0, xp.ones_like(total), total)


def _shifted(x, axis):
    """Subtract the largest element along the axis, where it is finite."""
    axis = normalize_axis(axis, x.ndim)
    xp = namespace(x)
    if x.shape[axis] == 0:
        return x, xp
    top = xp.max(x, axis=axis, keepdims=True)
    return x - xp.where(xp.isfinite(top), top, xp.zeros_like(top)), xp


def _has_kernel(g, out, axis):
    arrays = not isinstance(g, Tensor) and not isinstance(out, Tensor)
    return arrays and normalize_axis(axis, out.ndim) == out.ndim - 1 and rows.fits(out, g)


def _softmax_rule(g, out, axis):
    if _has_kernel(g, out, axis):
        return rows.softmax_gradient(g, out, logarithm=False)
    out = widen(out)
    return out * (g - sum(g * out, axis=axis, keepdims=True))


def _rows(mask, axis):
    return any(mask, axis=axis, keepdims=True)


softmax.defvjps(x=_softmax_rule)
softmax.defrows(_rows)


@differentiable
def log_softmax(x, /, *, axis: int = -1):
    """Give the logarithm of :func:`softmax`, exact where that underflows.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, at least 1-D
    axis : int, default -1
    """
    check_floating(x=x)
    if normalize_axis(axis, x.ndim) == x.ndim - 1 and rows.fits(x):
        return rows.softmax(x, logarithm=True)
    return _log_softmax(x, axis)


@rounded_once
def _log_softmax(x, axis):
    shifted, xp = _shifted(x, axis)
    return shifted - logsumexp(shifted, axis=axis, keepdims=True) if x.size else shifted


def _log_softmax_rule(g, out, axis):
    if _has_kernel(g, out, axis):
        return rows.softmax_gradient(g, out, logarithm=True)
    return g - exp(widen(out)) * sum(widen(g), axis=axis, keepdims=True)


log_softmax.defvjps(x=_log_softmax_rule)
log_softmax.defrows(_rows)
