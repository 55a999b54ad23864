"""Aggregation of what sources send to destinations, without an array of messages."""

import math
from typing import Any

from rtxarr import _device
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import raw
from rtxarr.ops import reshape

__all__ = ["aggregate"]


def aggregate(graph: Any, x: Any) -> Any:
    """Add up, for each destination, the rows of its sources.

    Parameters
    ----------
    graph : Graph
    x : array or Tensor of a floating dtype, shape (n_src, ...)

    Returns
    -------
    array or Tensor, shape (n_dst, ...)
        Zero where no edge ends. Half precision accumulates in float32.
    """
    if x.ndim < 1 or x.shape[0] != graph.n_src:
        raise ValueError(f"x must have a row for each of {graph.n_src} sources, got {x.shape}")
    place = _device.device_of(raw(x))
    if place != graph.device:
        raise ValueError(f"x must be on {graph.device}, where the graph is, got {place}")
    rows = reshape(x, (x.shape[0], math.prod(x.shape[1:])))
    return reshape(_gather_sum(rows, graph=graph), (graph.n_dst, *x.shape[1:]))


@differentiable
def _gather_sum(x, /, *, graph):
    from rtxarr.kernels.segment import segment_reduce

    return segment_reduce("sum", x, graph.indptr, indices=graph.wide_indices)


_gather_sum.defvjps(x=lambda g, graph: _gather_sum(g, graph=graph.T))
