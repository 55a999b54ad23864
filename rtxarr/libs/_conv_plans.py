"""Convolutions as graphs of cuDNN, and how their arrays lie in memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from rtxarr.libs._attention_plans import dense
from rtxarr.libs._cudnn import Graph, Spec

__all__ = ["Convolution", "channels_last", "inner", "lay_out", "make", "pad", "spec"]

_ALIGNMENT = 16


class Convolution(NamedTuple):
    """One of the three products of a convolution: ``result`` names which is computed.

    Tensors are the two others of x, weight and y in this order, bias and residual if any, then
    the result. Padding is the same before and after: with unequal amounts some plans of cuDNN
    9.19 give wrong gradients.
    """

    result: str  # "x", "weight" or "y"
    x: Spec
    weight: Spec
    y: Spec
    bias: Spec | None
    residual: Spec | None
    activation: str | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    strict: bool  # float32 operands are not rounded

    @property
    def tuned(self) -> bool:
        return True

    def name(self) -> str:
        what = {"y": "a convolution", "x": "the gradient of one by its input"}
        return f"{what.get(self.result, 'the gradient of one by its weight')} in {self.y.dtype}"

    def describe(self, graph: Graph) -> None:
        geometry = {
            "padding": list(self.padding),
            "stride": list(self.stride),
            "dilation": list(self.dilation),
        }
        g = graph.graph
        given = {
            name: graph.tensor(getattr(self, name), name)
            for name in ("x", "weight", "y")
            if name != self.result
        }
        if self.result == "y":
            out = g.conv_fprop(image=given["x"], weight=given["weight"], **geometry)
        elif self.result == "x":
            out = g.conv_dgrad(loss=given["y"], filter=given["weight"], **geometry)
        else:
            out = g.conv_wgrad(image=given["x"], loss=given["y"], **geometry)
        wanted = getattr(self, self.result)
        if self.bias is not None:
            out = g.bias(input=out, bias=graph.tensor(self.bias, "bias"))
        if self.residual is not None:
            out = g.add(a=out, b=graph.tensor(self.residual, "residual"))
        if self.activation == "relu":
            out = g.relu(input=out)
        elif self.activation == "silu":
            out = g.swish(input=out)
        graph.output(out, wanted)


@functools.lru_cache(maxsize=4096)
def _orders(shape, strides, itemsize):
    """Tell whether an array is contiguous as it is, and with its second axis behind the others."""
    found = []
    for axes in (range(len(shape)), (0, *range(2, len(shape)), 1)):
        expected, contiguous = itemsize, True
        for axis in reversed(axes):
            contiguous &= shape[axis] == 1 or strides[axis] == expected
            expected *= shape[axis]
        found.append(contiguous)
    return tuple(found)


def channels_last(x: Any) -> bool | None:
    """Tell whether (n, channels, ...) lies as (n, ..., channels); None if in neither order."""
    in_order, last = _orders(x.shape, x.strides, x.itemsize)
    return last if in_order != last else None


def lay_out(x: Any, last: bool) -> Any:
    """Return ``x`` in this order, aligned; a copy unless it is already."""
    if _orders(x.shape, x.strides, x.itemsize)[last] and x.data.ptr % _ALIGNMENT == 0:
        return x
    if not last:
        return x.copy(order="C")
    return _channels_second(x.transpose(0, *range(2, x.ndim), 1).copy(order="C"))


def make(cupy: Any, shape: tuple[int, ...], dtype: Any, last: bool) -> Any:
    """Return a new array in this order."""
    if not last:
        return cupy.empty(shape, dtype)
    return _channels_second(cupy.empty((shape[0], *shape[2:], shape[1]), dtype))


def _channels_second(x):
    return x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def pad(cupy: Any, x: Any, pairs: tuple, last: bool) -> Any:
    """Return ``x`` with so many zeros before and after its spatial axes."""
    spatial = tuple(n + sum(pair) for n, pair in zip(x.shape[2:], pairs, strict=True))
    out = make(cupy, (*x.shape[:2], *spatial), x.dtype, last)
    out.fill(0)
    out[inner(spatial, pairs)] = x
    return out


def inner(spatial: tuple[int, ...], pairs: tuple) -> tuple:
    """Index what :func:`pad` has put zeros around."""
    parts = (slice(a, n - b) for n, (a, b) in zip(spatial, pairs, strict=True))
    return (slice(None), slice(None), *parts)


@functools.lru_cache(maxsize=4096)
def spec(shape: tuple[int, ...], dtype: Any, last: bool) -> Spec:
    """Describe an array in this order, with two spatial axes at least."""
    if len(shape) == 3:
        shape = (*shape[:2], 1, shape[2])
    if not last:
        return dense(shape, dtype.name)
    _, _, strides = dense((shape[0], *shape[2:], shape[1]), dtype.name)
    return Spec(dtype.name, tuple(shape), (strides[0], strides[-1], *strides[1:-1]))
