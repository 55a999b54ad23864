"""Pooling over one to three spatial axes."""

from collections.abc import Callable

from rtxarr import ops
from rtxarr.nn._module import Module
from rtxarr.nn._text import call_text

Ints = int | tuple[int, ...]


class _MaxPool(Module):
    function: Callable

    def __init__(
        self,
        kernel_size: Ints,
        *,
        stride: Ints | None = None,
        padding: Ints | str = 0,
        dilation: Ints = 1,
    ):
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.dilation = padding, dilation

    def forward(self, x):
        return type(self).function(
            x,
            self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )

    def __repr__(self):
        return call_text(self, "kernel_size", "stride", "padding", "dilation")


class _AvgPool(Module):
    function: Callable

    def __init__(
        self,
        kernel_size: Ints,
        *,
        stride: Ints | None = None,
        padding: Ints | str = 0,
        count_padding: bool = True,
    ):
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.count_padding = padding, count_padding

    def forward(self, x):
        return type(self).function(
            x,
            self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            count_padding=self.count_padding,
        )

    def __repr__(self):
        return call_text(self, "kernel_size", "stride", "padding", "count_padding")


class _AdaptiveAvgPool(Module):
    function: Callable

    def __init__(self, output_size: Ints):
        self.output_size = output_size

    def forward(self, x):
        return type(self).function(x, self.output_size)

    def __repr__(self):
        return call_text(self, "output_size")


class MaxPool1d(_MaxPool):
    function = staticmethod(ops.max_pool1d)


class MaxPool2d(_MaxPool):
    function = staticmethod(ops.max_pool2d)


class MaxPool3d(_MaxPool):
    function = staticmethod(ops.max_pool3d)


class AvgPool1d(_AvgPool):
    function = staticmethod(ops.avg_pool1d)


class AvgPool2d(_AvgPool):
    function = staticmethod(ops.avg_pool2d)


class AvgPool3d(_AvgPool):
    function = staticmethod(ops.avg_pool3d)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    function = staticmethod(ops.adaptive_avg_pool1d)


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    function = staticmethod(ops.adaptive_avg_pool2d)


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    function = staticmethod(ops.adaptive_avg_pool3d)


POOLS = (
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
)
for _layer in POOLS:
    _name = _layer.function.__name__
    _layer.__doc__ = f"Call :func:`rtxarr.{_name}` with the arguments given here."
del _layer, _name
