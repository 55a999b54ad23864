"""Scans in kernels: along which axis, and in which order rows lie that are scanned."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rtxarr.polygraph._ir import VIEWS, Node


def why_not_scanned(node: Node, strides: Mapping[Node, tuple[int, ...]]) -> str:
    """Return why no kernel can contain a scan, whatever the back end; "" if one may."""
    (axis,) = node.attrs
    if math.prod(node.shape[axis + 1 :]) > 1:
        return "it is along an axis that lies apart in memory"
    if is_backwards(node, strides) is None:
        return "flipped rows are cut anew"
    return ""


def is_backwards(node: Node, strides: Mapping[Node, tuple[int, ...]]) -> bool | None:
    """Tell whether what is scanned is a flipped view along the axis, which is scanned backwards.

    ``strides`` are those of inputs that are not contiguous. None: it is told by its strides alone.
    """
    (axis,) = node.attrs
    x, sign = node.src[0], 1
    while x.op in VIEWS:
        if x.op == "reshape":
            return None if _is_flipped(x.src[0], strides) else sign < 0
        if x.op == "permute":
            axis = x.attrs[0][axis]
        elif x.op == "slice":
            sign *= x.attrs[1][axis]
        elif x.src[0].shape[axis] != x.shape[axis]:
            return False  # one element, repeated
        (x,) = x.src
    return sign * strides.get(x, (1,) * x.ndim)[axis] < 0


def _is_flipped(x: Node, strides: Mapping[Node, tuple[int, ...]]) -> bool:
    """Tell whether a view is flipped along any axis."""
    while x.op in VIEWS:
        if x.op == "slice" and min(x.attrs[1], default=1) < 0:
            return True
        (x,) = x.src
    return min(strides.get(x, (1,)), default=1) < 0
