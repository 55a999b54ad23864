"""Normalization layers."""

import math
import numbers
from typing import Any

from rtxarr import ops
from rtxarr._device import Device
from rtxarr.autograd import is_recomputing
from rtxarr.dtypes import accumulator
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Buffer, Parameter
from rtxarr.nn._text import call_text
from rtxarr.ops._check import check_sizes


class LayerNorm(Module):
    """Normalize each vector along the last axis; see :func:`rtxarr.layer_norm`.

    Parameters
    ----------
    n_features : int
    eps : float > 0, default 1e-5
        Added to the variance.
    bias : bool, default True
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight : Parameter, shape (n_features,)
    bias : Parameter, shape (n_features,), or None
    """

    def __init__(
        self,
        n_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: Any = None,
        device: str | Device | None = None,
    ):
        check_sizes(n_features=n_features)
        self.n_features = n_features
        self.eps = eps
        self.weight = Parameter((n_features,), init="ones", dtype=dtype, device=device)
        options = {"init": "zeros", "dtype": dtype, "device": device}
        self.bias = Parameter((n_features,), **options) if bias else None

    def forward(self, x):
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def __repr__(self):
        return call_text(self, "n_features", "eps")


class RMSNorm(Module):
    """Scale each vector along the last axis to unit root mean square; see :func:`rtxarr.rms_norm`.

    Parameters
    ----------
    n_features : int
    eps : float > 0, default 1e-6
        Added to the mean square.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight : Parameter, shape (n_features,)
    """

    def __init__(
        self,
        n_features: int,
        *,
        eps: float = 1e-6,
        dtype: Any = None,
        device: str | Device | None = None,
    ):
        check_sizes(n_features=n_features)
        self.n_features = n_features
        self.eps = eps
        self.weight = Parameter((n_features,), init="ones", dtype=dtype, device=device)

    def forward(self, x):
        return ops.rms_norm(x, self.weight, eps=self.eps)

    def __repr__(self):
        return call_text(self, "n_features", "eps")


class GroupNorm(Module):
    """Normalize groups of channels of each sample; see :func:`rtxarr.group_norm`.

    Parameters
    ----------
    n_groups, n_channels : int
        ``n_channels`` is a multiple of ``n_groups``; channels lie along axis 1.
    eps : float > 0, default 1e-5
        Added to the variance.
    activation : {None, "silu"}, default None
        To apply to the result.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight, bias : Parameter, shape (n_channels,)
    """

    def __init__(
        self,
        n_groups: int,
        n_channels: int,
        *,
        eps: float = 1e-5,
        activation: str | None = None,
        dtype: Any = None,
        device: str | Device | None = None,
    ):
        check_sizes(n_groups=n_groups, n_channels=n_channels)
        if activation not in (None, "silu"):
            raise ValueError(f"activation must be None or 'silu', got {activation!r}")
        if n_channels % n_groups:
            raise ValueError(
                f"n_channels must be a multiple of n_groups, got {n_channels} and {n_groups}"
            )
        self.n_groups, self.n_channels = n_groups, n_channels
        self.eps = eps
        self.activation = activation
        self.weight = Parameter((n_channels,), init="ones", dtype=dtype, device=device)
        self.bias = Parameter((n_channels,), init="zeros", dtype=dtype, device=device)

    def forward(self, x):
        return ops.group_norm(
            x, self.n_groups, self.weight, self.bias, eps=self.eps, activation=self.activation
        )

    def __repr__(self):
        return call_text(self, "n_groups", "n_channels", "eps")


class BatchNorm(Module):
    """Normalize each channel over the batch and all other axes; see :func:`rtxarr.batch_norm`.

    In evaluation mode the running averages take the place of the batch's mean and variance.

    Parameters
    ----------
    n_channels : int
        Channels lie along axis 1; any number of axes may follow.
    eps : float > 0, default 1e-5
        Added to the variance.
    momentum : float in (0, 1], default 0.1
        Weight of a batch in the running averages.
    dtype : dtype, default float32
    device : Device or str, default the current one

    Attributes
    ----------
    weight, bias : Parameter, shape (n_channels,)
    running_mean, running_var : Buffer, shape (n_channels,)
        Float32 where ``dtype`` is a half type. The variance is the unbiased one.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, arXiv:1502.03167, alg. 1 and 2.
    """

    def __init__(
        self,
        n_channels: int,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        dtype: Any = None,
        device: str | Device | None = None,
    ):
        check_sizes(n_channels=n_channels)
        if not isinstance(momentum, numbers.Real) or not 0 < momentum <= 1:
            raise ValueError(f"momentum must lie in (0, 1], got {momentum!r}")
        self.n_channels = n_channels
        self.eps = eps
        self.momentum = momentum
        self.weight = Parameter((n_channels,), init="ones", dtype=dtype, device=device)
        self.bias = Parameter((n_channels,), init="zeros", dtype=dtype, device=device)
        wide = accumulator(self.weight.dtype)
        self.running_mean = Buffer(ops.zeros(n_channels, dtype=wide, device=device))
        self.running_var = Buffer(ops.ones(n_channels, dtype=wide, device=device))

    def forward(self, x):
        if not self.training:
            return ops.batch_norm(
                x,
                self.weight,
                self.bias,
                mean=self.running_mean,
                var=self.running_var,
                eps=self.eps,
            )[0]
        out, mean, var = ops.batch_norm(x, self.weight, self.bias, eps=self.eps)
        n = math.prod(x.shape) // self.n_channels
        if n == 1:
            raise ValueError(f"{self!r} needs several elements in each channel, got {x.shape}")
        if not is_recomputing():  # a checkpointed call is repeated; the batch counts once
            self._average(self.running_mean, mean)
            self._average(self.running_var, var * (n / (n - 1)))
        return out

    def _average(self, running, value):
        value = ops.astype(value, running.dtype, copy=False)
        running.assign((1 - self.momentum) * running.data + self.momentum * value)

    def __repr__(self):
        return call_text(self, "n_channels", "eps", "momentum")
