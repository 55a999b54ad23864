"""Layers one after the other."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from rtxarr import ops
from rtxarr.nn._module import Module
from rtxarr.nn._text import call_text


class Sequential(Module):
    """Call layers one after the other.

    Parameters
    ----------
    *layers : Module or callable
        Functions such as ``rx.relu`` may stand between modules.

    Examples
    --------
    >>> import rtxarr as rx
    >>> from rtxarr import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), rx.relu, nn.Linear(8, 2))
    >>> model
    Sequential(
      (layers.0): Linear(4, 8)
      (layers.1): relu
      (layers.2): Linear(8, 2)
    )
    >>> len(model)
    3
    """

    def __init__(self, *layers: Callable):
        for place, layer in enumerate(layers):
            if not callable(layer):
                raise TypeError(f"layer {place} must be callable, got {type(layer).__name__}")
        self.layers = list(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Callable]:
        return iter(self.layers)

    def __getitem__(self, key: int | slice) -> Any:
        """Give one layer, or a Sequential of a slice of them."""
        return Sequential(*self.layers[key]) if isinstance(key, slice) else self.layers[key]

    def __repr__(self):
        lines = [
            f"  (layers.{i}): {_describe(layer)}".replace("\n", "\n  ")
            for i, layer in enumerate(self.layers)
        ]
        return "\n".join(["Sequential(", *lines, ")"])


def _describe(layer):
    return repr(layer) if isinstance(layer, Module) else getattr(layer, "__name__", repr(layer))


class Flatten(Module):
    """Join axes into one.

    Parameters
    ----------
    start_axis, end_axis : int, default 1 and -1
        First and last axis to join.
    """

    def __init__(self, *, start_axis: int = 1, end_axis: int = -1):
        self.start_axis = start_axis
        self.end_axis = end_axis

    def forward(self, x):
        if not hasattr(x, "ndim"):
            raise TypeError(f"x must be an array or Tensor, got {type(x).__name__}")
        start, end = (a + x.ndim if a < 0 else a for a in (self.start_axis, self.end_axis))
        if not 0 <= start <= end < x.ndim:
            raise ValueError(f"{self!r} got x of shape {x.shape}")
        n = math.prod(x.shape[start : end + 1])
        return ops.reshape(x, (*x.shape[:start], n, *x.shape[end + 1 :]))

    def __repr__(self):
        return call_text(self, "start_axis", "end_axis")
