"""Linear maps with what follows them in a layer: an activation, or a gate.

On a GPU a product stores what the activation makes of it where a library can do that; see
``rtxarr.libs``. The tape has the product and the activation one after the other all the same, with
the rules that they have by themselves.
"""

import functools

import numpy as np

from rtxarr._device import is_device_array
from rtxarr._override import overridable
from rtxarr.autograd._mode import is_recording
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import bfloat16, is_half
from rtxarr.libs.blas import try_matmul, try_matmul_with_aux
from rtxarr.libs.tile import try_gated_linear, try_linear
from rtxarr.ops import _linear
from rtxarr.ops._activations import _gelu_rule, _gradient
from rtxarr.ops._check import check_floating
from rtxarr.ops._elementwise import where
from rtxarr.ops._gates import ACTIVATIONS, _gate, on_gpu
from rtxarr.ops._manipulate import reshape

__all__ = ["gated_linear", "linear"]

# In which cuBLASLt stores ReLU of a product.
_RELU_DTYPES = tuple(map(np.dtype, ("float32", "float16", bfloat16)))


def check_activation(activation, known=tuple(ACTIVATIONS), *, optional=True):
    """Refuse what is no name of an activation."""
    if activation not in known and not (optional and activation is None):
        names = ", ".join(map(repr, known)) + (" or None" if optional else "")
        raise ValueError(f"activation must be one of {names}, got {activation!r}")


def is_tracked(*arrays):
    """Tell whether an operation on these is recorded."""
    return is_recording() and any(isinstance(x, Tensor) and x.requires_grad for x in arrays)


# ------------------------------------------------------------------------------ an activation


@explained
def linear(x, weight, bias=None, *, activation: str | None = None):
    """Give ``activation(x @ weight.T + bias)``.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., in_features)
    weight : array or Tensor, shape (out_features, in_features)
    bias : array or Tensor, shape (out_features,), optional
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, optional
        "gelu_tanh" is the tanh form of :func:`gelu`.

    Returns
    -------
    array or Tensor, shape (..., out_features)
        Half-precision products accumulate in float32.

    Notes
    -----
    On a GPU the product takes in ReLU and, in half precision, the tanh form of GELU, and rounds
    once, at its end. Where no gradient is recorded and cuTile is installed, small products in half
    precision take in the others too.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> rx.linear(np.ones((1, 2)), np.asarray([[1.0, 2.0], [-1.0, 0.0]]), activation="relu")
    array([[3., 0.]])
    """
    if activation is None:
        return _linear.linear(x, weight, bias)
    check_activation(activation)
    if on_gpu(x):
        return _in_product(x, weight, bias, activation)
    return ACTIVATIONS[activation](_linear.linear(x, weight, bias))


def _in_product(x, weight, bias, activation):
    if activation == "relu":
        return _stored_relu(_activated_linear(x, weight, bias, activation="relu"))
    if not is_tracked(x, weight, bias):
        return _activated_linear(x, weight, bias, activation=activation)
    if activation != "gelu_tanh":
        return ACTIVATIONS[activation](_linear.linear(x, weight, bias))
    before, out = _activated_linear(x, weight, bias, activation=activation, keep=True)
    return _stored_gelu(before, raw(out))


@differentiable
@overridable
def _activated_linear(x, weight, bias=None, *, activation, keep=False):
    """Give ``activation(x @ weight.T + bias)``; ``keep`` the sum before it, in front of it.

    The rules are those of the sum. Of ReLU, whose gradient the result tells, it is not kept: the
    result stands in for it.
    """
    found = _by_library(x, weight, bias, activation, keep) if is_device_array(x) else None
    if found is not None:
        return found
    before = _linear.linear(x, weight, bias)
    out = ACTIVATIONS[activation](before)
    return (before, out) if keep else out


def epilogue_of(activation, dtype):
    """Give the library's name of an activation that a product can take in; None of others."""
    if activation == "relu" and dtype in _RELU_DTYPES:
        return "relu"
    # The library's GELU is too coarse for float32.
    return "gelu" if activation == "gelu_tanh" and is_half(dtype) else None


def _by_library(x, weight, bias, activation, keep):
    fits = weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits or len({a.dtype for a in (x, weight, bias) if a is not None}) > 1:
        return None  # not for the library, or wrong, which the plain product says
    epilogue = epilogue_of(activation, x.dtype)
    if epilogue is None:
        return try_linear(x, weight, bias, activation=activation)
    if not keep:
        return try_matmul(x, weight.T, bias=bias, epilogue=epilogue)
    rows = _linear._rows(x)
    found = try_matmul_with_aux(rows, weight.T, bias=bias, epilogue=epilogue)
    if found is None or rows is x:
        return found and found[::-1]
    shape = (*x.shape[:-1], weight.shape[0])
    return reshape(found[1], shape), reshape(found[0], shape)


def _of_sum(g):
    return g[0] if isinstance(g, (tuple, list)) else g


_activated_linear.defvjps(
    x=lambda g, weight, x_shape: _linear._x_rule(_of_sum(g), weight, x_shape),
    weight=lambda g, x: _linear._weight_rule(_of_sum(g), x),
    bias=lambda g: _linear._bias_rule(_of_sum(g)),
)
_activated_linear.defper_sample(
    weight=lambda g, x: _linear._weight_per_sample(_of_sum(g), x),
    bias=lambda g: _linear._bias_per_sample(_of_sum(g)),
)


@functools.partial(differentiable, elementwise=True)
def _stored_relu(x, /):
    """Give ``x``, which ReLU has made of what the tape takes for ``x``."""
    return x


_stored_relu.defvjps(
    x=lambda g, out: _gradient("relu", out, g, lambda out, g: where(out <= 0, 0, g))
)


@functools.partial(differentiable, elementwise=True)
def _stored_gelu(x, out, /):
    """Give ``out``, which the tanh form of GELU has made of ``x``."""
    return out


_stored_gelu.defvjps(x=lambda g, x: _gelu_rule(g, x, "tanh"))


# ------------------------------------------------------------------------------------- a gate


@explained
def gated_linear(x, w_gate, w_up, b_gate=None, b_up=None, *, activation: str = "silu"):
    """Give ``activation(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)``: SwiGLU, GEGLU and others.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., in_features)
    w_gate, w_up : array or Tensor, shape (out_features, in_features)
    b_gate, b_up : array or Tensor, shape (out_features,), optional
    activation : {"relu", "sigmoid", "silu", "gelu", "gelu_tanh"}, default "silu"
        "silu" makes it SwiGLU, "gelu" GEGLU, "sigmoid" GLU, "relu" ReGLU.

    Returns
    -------
    array or Tensor, shape (..., out_features)
        In half precision, the product with the gate is computed in float32 and rounded once.

    Notes
    -----
    On a GPU the gate is one pass over memory, and so is its gradient. Where no gradient is recorded
    and cuTile is installed it is all one kernel, at sizes at which that was measured to be faster.

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, eq. 6.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> x, w = np.asarray([[1.0, 2.0]]), np.eye(2)
    >>> rx.gated_linear(x, w, 3 * w, activation="relu")
    array([[ 3., 12.]])
    """
    check_activation(activation, optional=False)
    check_floating(x=x, w_gate=w_gate, w_up=w_up, b_gate=b_gate, b_up=b_up)
    if w_gate.ndim != 2:
        raise ValueError(f"w_gate must have shape (out_features, in_features), got {w_gate.shape}")
    if w_gate.shape != w_up.shape:
        raise ValueError(f"w_up must have the shape of w_gate, {w_gate.shape}, got {w_up.shape}")
    for name, bias in (("b_gate", b_gate), ("b_up", b_up)):
        if bias is not None and bias.shape != w_gate.shape[:1]:
            raise ValueError(f"{name} must have shape {w_gate.shape[:1]}, got {bias.shape}")
    arrays = x, w_gate, w_up, b_gate, b_up
    if on_gpu(x) and not is_tracked(*arrays):
        return _gated_product(*arrays, activation=activation)
    gate = _linear.linear(x, w_gate, b_gate)
    return _gate(_linear.linear(x, w_up, b_up), gate, activation=activation)


@functools.partial(differentiable, precision="low")
@overridable
def _gated_product(x, w_gate, w_up, b_gate, b_up, /, *, activation):
    """Give :func:`gated_linear` where nothing is recorded."""
    if is_device_array(x) and len({a.dtype for a in (x, w_gate, w_up)}) == 1:
        out = try_gated_linear(x, w_up, w_gate, b_up, b_gate, activation=activation)
        if out is not None:
            return out
    gate = _linear.linear(x, w_gate, b_gate)
    return _gate(_linear.linear(x, w_up, b_up), gate, activation=activation)
