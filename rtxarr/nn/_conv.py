"""Convolutions and their transposes over one to three spatial axes."""

from collections.abc import Callable
from typing import Any

from rtxarr import ops
from rtxarr.nn import initializers
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Parameter
from rtxarr.nn._text import call_text
from rtxarr.ops._activated import check_activation
from rtxarr.ops._check import check_sizes
from rtxarr.ops._conv import ACTIVATIONS
from rtxarr.ops._windows import per_axis

Ints = int | tuple[int, ...]


class _Conv(Module):
    n_axes: int
    function: Callable

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        *,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        activation: str | None = None,
        weight_init: str | Callable = "fan_in_uniform",
        bias_init: str | Callable = "zeros",
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        kernel = _kernel(self, kernel_size, in_channels, out_channels, groups)
        check_activation(activation, tuple(ACTIVATIONS))
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups, self.activation = groups, activation
        options = {"dtype": dtype, "device": device, "generator": generator}
        shape = (out_channels, in_channels // groups, *kernel)
        self.weight = Parameter(shape, init=weight_init, **options)
        self.bias = Parameter((out_channels,), init=bias_init, **options) if bias else None

    def forward(self, x, residual=None):
        return type(self).function(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            residual=residual,
            activation=self.activation,
        )

    def __repr__(self):
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
        return call_text(self, *names, "groups", "activation")


class _ConvTranspose(Module):
    n_axes: int
    function: Callable

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        *,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        weight_init: str | Callable = "fan_in_uniform",
        bias_init: str | Callable = "zeros",
        dtype: Any = None,
        device: Any = None,
        generator: Any = None,
    ):
        kernel = _kernel(self, kernel_size, in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.output_padding = output_padding
        self.groups = groups
        options = {"dtype": dtype, "device": device, "generator": generator}
        shape = (in_channels, out_channels // groups, *kernel)
        init = initializers.get(weight_init, in_axis=0, out_axis=1)
        self.weight = Parameter(shape, init=init, **options)
        self.bias = Parameter((out_channels,), init=bias_init, **options) if bias else None

    def forward(self, x):
        return type(self).function(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
        )

    def __repr__(self):
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
        return call_text(self, *names, "output_padding", "groups")


def _kernel(module, kernel_size, in_channels, out_channels, groups):
    """Give the kernel's shape after checking it and the channels."""
    kernel = per_axis("kernel_size", kernel_size, module.n_axes, 1)
    channels = {"in_channels": in_channels, "out_channels": out_channels}
    check_sizes(**channels, groups=groups)
    for name, value in channels.items():
        if value % groups:
            raise ValueError(f"{name} must be a multiple of groups, got {value} and {groups}")
    return kernel


class Conv1d(_Conv):
    n_axes = 1
    function = staticmethod(ops.conv1d)


class Conv2d(_Conv):
    n_axes = 2
    function = staticmethod(ops.conv2d)


class Conv3d(_Conv):
    n_axes = 3
    function = staticmethod(ops.conv3d)


class ConvTranspose1d(_ConvTranspose):
    n_axes = 1
    function = staticmethod(ops.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose):
    n_axes = 2
    function = staticmethod(ops.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose):
    n_axes = 3
    function = staticmethod(ops.conv_transpose3d)


_DOC = """{summary}

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size : int or one for each axis
    {options}
    groups : int, default 1
        Groups of channels that do not see each other.
    bias : bool, default True
    weight_init, bias_init : str or callable, default "fan_in_uniform" and "zeros"
        See :mod:`rtxarr.nn.initializers`.
    dtype : dtype, default float32
    device : Device or str, default the current one
    generator : Generator, default :func:`rtxarr.random.default_generator`
        For the first values.

    Attributes
    ----------
    weight : Parameter, shape {weight}
    bias : Parameter, shape (out_channels,), or None
    {notes}"""
_OPTIONS = """stride, dilation : int or one for each axis, default 1
    padding : int, one for each axis, "same" or "valid", default 0
    activation : {"relu", "silu"}, optional"""
_NOTES = """
    Notes
    -----
    Call it as ``layer(x, residual)`` to add something of the shape of the result before the
    activation.
    """
_TRANSPOSE_OPTIONS = """stride, dilation : int or one for each axis, default 1
    padding, output_padding : int or one for each axis, default 0"""

for _plain in (Conv1d, Conv2d, Conv3d):
    _plain.__doc__ = _DOC.format(
        summary=f"Convolution over {_plain.n_axes} axes; see :func:`rtxarr.conv{_plain.n_axes}d`.",
        options=_OPTIONS,
        weight="(out_channels, in_channels // groups, kernel_size...)",
        notes=_NOTES,
    )
for _transposed in (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d):
    _transposed.__doc__ = _DOC.format(
        summary=f"Transposed convolution; see :func:`rtxarr.conv_transpose{_transposed.n_axes}d`.",
        options=_TRANSPOSE_OPTIONS,
        weight="(in_channels, out_channels // groups, kernel_size...)",
        notes="",
    )
del _plain, _transposed
