"""Aggregation of features that stay in the host's memory, some columns at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr.autograd import no_grad
from rtxarr.data._prefetch import Prefetch, copied_ahead, in_turn, pin
from rtxarr.geom._aggregate import aggregate, slices_of
from rtxarr.geom._graph import Graph

__all__ = ["aggregate_streamed"]


@no_grad()
def aggregate_streamed(
    graph: Graph,
    x: Any,
    op: str = "sum",
    *,
    n_slices: int = 8,
    weight: Any = None,
    empty: float = 0.0,
    out: Any = None,
) -> Any:
    """Reduce the rows of sources as :func:`aggregate` does, for features in the host's memory.

    Parameters
    ----------
    graph : Graph
        On any device.
    x : NumPy array of a floating dtype, shape (n_src, n_features)
        May be mapped from a file. It is read once.
    op, weight, empty
        As for :func:`aggregate`; ``weight`` of shape (n_edges,).
    n_slices : int, default 8
        In how many parts of the features. On a GPU two of them are there at a time: one is copied,
        through pinned memory, while the one before is worked on.
    out : NumPy array, shape (n_dst, n_features), optional
        Where the result goes, also mapped from a file.

    Returns
    -------
    NumPy array, shape (n_dst, n_features)
        The same to the bit as :func:`aggregate` gives. No gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=2)
    >>> geom.aggregate_streamed(graph, np.array([[1.0, 2.0], [3.0, 4.0]]), n_slices=2)
    array([[0., 0.],
           [4., 6.]])
    """
    if not isinstance(x, np.ndarray) or x.ndim != 2:
        raise ValueError(f"x must be a two-dimensional NumPy array, got {type(x).__name__}")
    shape = (graph.n_dst, x.shape[1])
    if out is None:
        out = np.empty(shape, dtype=x.dtype)
    elif not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != x.dtype:
        raise ValueError(
            f"out must be a NumPy array of shape {shape} and {x.dtype}, got "
            f"{getattr(out, 'shape', type(out).__name__)} of {getattr(out, 'dtype', 'none')}"
        )
    jobs = slices_of(x.shape[1], n_slices)
    parts = parts_on(graph.device, lambda columns: np.ascontiguousarray(x[:, columns]), jobs)
    for columns, part in zip(jobs, parts, strict=True):
        found = aggregate(graph, part, op, weight=weight, empty=empty)
        out[:, columns] = _device.to_device(found, "cpu")
    return out


def parts_on(place: Any, make: Any, jobs: Any) -> Any:
    """Yield what ``make(job)`` gives, a NumPy array or a tuple or dict of them, on a device.

    For a GPU a thread makes the next ones, in pinned memory, and a stream of its own copies them.
    """
    is_gpu = isinstance(place, _device.Device) and place.kind == "cuda"
    source = Prefetch((lambda job: pin(make(job))) if is_gpu else make, jobs, 1 if is_gpu else 0)
    items = copied_ahead(source, place, 1) if is_gpu else in_turn(source)
    try:
        for item in items:
            if item.error is not None:
                raise item.error
            yield item.value
    finally:
        items.close()
        source.close()
