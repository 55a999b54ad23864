"""First values of parameters.

An initializer is a function ``(shape, *, dtype, generator) -> array`` that makes its array on the
current device. Layers take one, or the name of one of the functions here, which then has its
default settings. The functions make initializers with other settings.

A weight of shape ``(n_outputs, n_inputs, *kernel)`` has fan-in ``n_inputs * prod(kernel)`` and
fan-out ``n_outputs * prod(kernel)``. With groups, ``n_inputs`` is what one output sees. Weights
of transposed convolutions are ``(n_inputs, n_outputs, *kernel)``: their layers swap the axes.

Examples
--------
>>> from rtxarr import nn
>>> nn.Linear(64, 32, weight_init="xavier_normal")
Linear(64, 32)
>>> nn.Linear(64, 32, weight_init=nn.initializers.truncated_normal(std=0.02))
Linear(64, 32)
"""

import math
from collections.abc import Callable

import numpy as np

from rtxarr._device import device, namespace, to_device
from rtxarr._names import did_you_mean
from rtxarr.ops._check import generator_or_default

__all__ = [
    "constant",
    "fan_in_uniform",
    "get",
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "ones",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]


def get(init: str | Callable, *, in_axis: int = 1, out_axis: int = 0) -> Callable:
    """Give the initializer of a name; a callable is returned unchanged.

    Parameters
    ----------
    init : str or callable
    in_axis, out_axis : int, default 1 and 0
        The axes of inputs and outputs of the weight.
    """
    if callable(init):
        return init
    makers = {name: globals()[name] for name in __all__ if name not in ("get", "constant")}
    if init not in makers:
        hint = did_you_mean(init, makers)
        raise ValueError(f"init must be callable or one of {', '.join(makers)}, got {init!r}{hint}")
    maker = makers[init]
    return maker(in_axis=in_axis, out_axis=out_axis) if maker in _FAN_MAKERS else maker()


def constant(value: float) -> Callable:
    """Fill with one value."""

    def init(shape, *, dtype, generator=None):
        return namespace().full(shape, value, dtype=dtype)

    return init


def zeros() -> Callable:
    """Fill with zeros."""
    return constant(0.0)


def ones() -> Callable:
    """Fill with ones."""
    return constant(1.0)


def uniform(low: float = -0.05, high: float = 0.05) -> Callable:
    """Draw uniformly from ``[low, high)``."""
    if not low < high:
        raise ValueError(f"low must be less than high, got {low} and {high}")

    def init(shape, *, dtype, generator=None):
        return generator_or_default(generator).uniform(shape, low, high, dtype=dtype)

    return init


def normal(std: float = 0.02, *, mean: float = 0.0) -> Callable:
    """Draw from a normal distribution."""
    _check_positive("std", std)

    def init(shape, *, dtype, generator=None):
        return generator_or_default(generator).normal(shape, mean, std, dtype=dtype)

    return init


def truncated_normal(std: float = 0.02, *, mean: float = 0.0) -> Callable:
    """Draw from a normal distribution cut off two standard deviations from its mean.

    ``std`` is that of the normal distribution before the cut; the values' is 0.88 times it.
    """
    _check_positive("std", std)

    def init(shape, *, dtype, generator=None):
        return generator_or_default(generator).truncated_normal(
            shape, mean, std, mean - 2 * std, mean + 2 * std, dtype=dtype
        )

    return init


def fan_in_uniform(*, in_axis: int = 1, out_axis: int = 0) -> Callable:
    """Draw uniformly from ``(-1 / sqrt(fan_in), 1 / sqrt(fan_in))``, the layers' default.

    PyTorch's layers draw their weights from the same distribution.
    """
    return kaiming_uniform(math.sqrt(1 / 3), in_axis=in_axis, out_axis=out_axis)


def xavier_uniform(gain: float = 1.0, *, in_axis: int = 1, out_axis: int = 0) -> Callable:
    """Draw uniformly with standard deviation ``gain * sqrt(2 / (fan_in + fan_out))``.

    References
    ----------
    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", 2010, AISTATS, eq. 16.
    """
    return _scaled("uniform", "fan_average", gain, in_axis, out_axis)


def xavier_normal(gain: float = 1.0, *, in_axis: int = 1, out_axis: int = 0) -> Callable:
    """Draw normally with standard deviation ``gain * sqrt(2 / (fan_in + fan_out))``."""
    return _scaled("normal", "fan_average", gain, in_axis, out_axis)


def kaiming_uniform(
    gain: float = math.sqrt(2), *, mode: str = "fan_in", in_axis: int = 1, out_axis: int = 0
) -> Callable:
    """Draw uniformly with standard deviation ``gain / sqrt(fan)``.

    Parameters
    ----------
    gain : float, default sqrt(2)
        The right one for ReLU.
    mode : {"fan_in", "fan_out"}, default "fan_in"
        Keep the variance of the activations, or of the gradients.

    References
    ----------
    He et al., "Delving Deep into Rectifiers", 2015, arXiv:1502.01852, eq. 10 and 14.
    """
    return _scaled("uniform", mode, gain, in_axis, out_axis)


def kaiming_normal(
    gain: float = math.sqrt(2), *, mode: str = "fan_in", in_axis: int = 1, out_axis: int = 0
) -> Callable:
    """Draw normally with standard deviation ``gain / sqrt(fan)``; see :func:`kaiming_uniform`."""
    return _scaled("normal", mode, gain, in_axis, out_axis)


def orthogonal(gain: float = 1.0) -> Callable:
    """Make the flattened weight ``(shape[0], -1)`` orthonormal in rows or columns, times ``gain``.

    References
    ----------
    Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear neural
    networks", 2013, arXiv:1312.6120.
    """
    _check_positive("gain", gain)

    def init(shape, *, dtype, generator=None):
        if len(shape) < 2:
            raise ValueError(f"orthogonal needs at least 2 dimensions, got shape {shape}")
        rows, columns = shape[0], math.prod(shape[1:])
        tall = (max(rows, columns), min(rows, columns))
        # On the host, to have the same bits for every device.
        z = generator_or_default(generator).normal(tall, dtype="float64", device="cpu")
        q, r = np.linalg.qr(z)
        # With a positive diagonal of r the decomposition is unique and q uniformly distributed.
        q = q * np.where(np.diagonal(r) < 0, -1.0, 1.0)
        q = q.T if rows < columns else q
        return to_device((gain * q).reshape(shape).astype(dtype), device())

    return init


def _scaled(distribution, mode, gain, in_axis, out_axis):
    """Draw with mean zero and standard deviation ``gain / sqrt(fan)``."""
    _check_positive("gain", gain)
    if mode not in ("fan_in", "fan_out", "fan_average"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")

    def init(shape, *, dtype, generator=None):
        if len(shape) < 2:
            raise ValueError(
                f"an initializer that counts fans needs at least 2 dimensions, got shape {shape}"
            )
        area = math.prod(shape) // max(1, shape[in_axis] * shape[out_axis])
        fans = {"fan_in": shape[in_axis] * area, "fan_out": shape[out_axis] * area}
        fan = fans.get(mode, sum(fans.values()) / 2)
        std = gain / math.sqrt(max(1, fan))
        source = generator_or_default(generator)
        if distribution == "normal":
            return source.normal(shape, 0.0, std, dtype=dtype)
        bound = math.sqrt(3) * std
        return source.uniform(shape, -bound, bound, dtype=dtype)

    return init


def _check_positive(name, value):
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value}")


_FAN_MAKERS = (fan_in_uniform, xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal)
