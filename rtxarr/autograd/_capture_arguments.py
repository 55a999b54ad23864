"""Arguments of captured steps: which are copied, and which are part of what is recorded."""

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd._tape import Leaf, Tensor
from rtxarr.autograd._tree import flatten, unflatten

__all__ = [
    "array_of",
    "copy_of",
    "device_arrays",
    "is_copied",
    "kind",
    "on_device",
    "place_of",
    "require_hashable",
    "untracked",
]


def is_copied(x: Any) -> bool:
    """Tell whether an argument is an array to copy or bind: no leaf and no parameter."""
    if isinstance(x, Tensor):
        return type(x) is Tensor and x.node is None
    return _device.is_array(x)


def array_of(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


class _Same:
    """Equal to what stands for the very same object."""

    __slots__ = ("x",)

    def __init__(self, x: Any):
        self.x = x

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


def kind(x: Any) -> Any:
    """Give what two arguments must have in common for one graph."""
    if isinstance(x, Tensor):
        if is_copied(x):
            return Tensor, kind(x.data)
        if x.node is not None and type(x.node) is not Leaf:
            raise ValueError(
                "arguments of a captured step must not be parts of a graph, as no gradient can "
                "go through it; got a computed Tensor: pass x.detach()"
            )
        return Tensor, x.shape, x.dtype, _Same(x)
    if _device.is_device_array(x):
        strides = None if x._c_contiguous else x.strides
        return x.shape, x.dtype, x.data.device_id, strides
    if _device.is_array(x):
        return x.shape, x.dtype
    return type(x), x


def require_hashable(x: Any) -> None:
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            "arguments of a captured step must be arrays, or nested tuples, lists and dicts of "
            f"them, or hashable, got {type(x).__name__}"
        ) from None


def place_of(leaves: list) -> Any:
    """Give the device of the first array on a GPU, else the current one."""
    for x in leaves:
        x = array_of(x)
        if _device.is_device_array(x):
            return _device.device_of(x)
    return _device.device()


def device_arrays(leaves: list) -> list:
    """Give the arrays on the GPU among the arguments, None for what is none."""
    return [
        x if is_copied(leaf) and _device.is_device_array(x := array_of(leaf)) else None
        for leaf in leaves
    ]


def on_device(x: Any) -> Any:
    """Give host arrays as the graph will see them."""
    if isinstance(x, Tensor):
        if _device.is_device_array(x.data):
            return x
        if not is_copied(x):
            raise ValueError(
                f"a {type(x).__name__} that is an argument of a captured step must be on the GPU, "
                f"got one on {_device.device_of(x.data)}"
            )
        return Tensor(on_device(x.data))
    return _device.to_device(x, _device.device()) if isinstance(x, np.ndarray) else x


def copy_of(x: Any) -> Any:
    """Copy an array to the GPU, in its own memory order."""
    cupy = _device.cupy
    if isinstance(x, np.ndarray):
        return cupy.asarray(x)
    out = cupy.empty_like(x)
    out[...] = x
    return out


def untracked(tree: Any) -> Any:
    """Give results without their graph, whose memory goes back."""
    leaves, structure = flatten(tree)
    return unflatten(structure, [x.detach() if isinstance(x, Tensor) else x for x in leaves])
