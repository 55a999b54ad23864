"""Reductions of messages that must be there as arrays, some destinations at a time.

For what no kernel does without them: the messages of a run of destinations are made, reduced, and
made again in the backward pass, so that memory is bounded.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rtxarr._device import full_scalar
from rtxarr.autograd import checkpoint, stop_gradient
from rtxarr.autograd._mode import profiles, state
from rtxarr.autograd._tape import raw
from rtxarr.autograd._tree import flatten, unflatten
from rtxarr.geom import _edges, _products, _ranks
from rtxarr.geom._edges import owners
from rtxarr.ops import (
    concat,
    exp,
    reshape,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
    sqrt,
    take,
    where,
)
from rtxarr.ops._half import rounded_once

OPS = ("sum", "mean", "max", "min", "std", "var", "mul", "softmax", "median")


def check_op(op: Any, names: tuple[str, ...] = OPS) -> None:
    """Refuse what is not the name of a reduction."""
    if op not in names:
        raise ValueError(f"op must be one of {', '.join(names)}, got {op!r}")


def map_reduce(
    graph: Any,
    message: Callable,
    reduce: Callable,
    src: Any,
    dst: Any,
    edge: Any,
    *,
    width: int = 1,
) -> Any:
    """Give ``reduce(message(rows of src, of dst, of edge), indptr)``, in runs of destinations.

    ``src``, ``dst`` and ``edge`` are arrays, nested tuples, lists and dicts of them, or None, with
    the edges in the order of their numbers. ``indptr`` points into the messages of a run. ``width``
    is how many elements the function makes for an edge, if more than it gets.
    """
    width = max(width, _width(src, dst, edge))
    size = max(1, _edges.chunk_of(graph.indptr) // max(1, width))
    runs = _edges.row_chunks(graph, size)
    if len(runs) == 1:
        return _run(graph, message, reduce, src, dst, edge, runs[0])
    parts = [checkpoint(_run, graph, message, reduce, src, dst, edge, run) for run in runs]
    return concat(parts, axis=0)


def _width(*trees):
    """Give the elements that the given arrays have for an edge."""
    arrays = [x for tree in trees for x in flatten(tree)[0] if x is not None]
    return sum(raw(x).size // max(1, x.shape[0]) for x in arrays)


def _run(graph, message, reduce, src, dst, edge, run):
    with state.profile.range("messages") if profiles and state.profile else nullcontext():
        return _reduced(graph, message, reduce, src, dst, edge, run)


def _reduced(graph, message, reduce, src, dst, edge, run):
    first, last, start, stop = run
    edges = slice(start, stop)
    # A whole graph in one run keeps its index arrays; views of them are made otherwise.
    columns, rows, ids = graph.indices[edges], graph._rows[edges], graph._edge_ids
    ids = slice(start, stop) if ids is None else ids[edges]
    messages = message(_at(src, columns), _at(dst, rows), _at(edge, ids))
    return reduce(messages, graph.indptr[first : last + 1] - start)


def _at(tree, index):
    leaves, structure = flatten(tree)
    found = [
        x if x is None else x[index] if isinstance(index, slice) else take(x, index, axis=0)
        for x in leaves
    ]
    return unflatten(structure, found)


# ------------------------------------------------------------------------- reductions of messages


def reduce_messages(
    op: str, messages: Any, indptr: Any, empty: float = 0.0, *, q: float | None = None
) -> Any:
    """Reduce the messages of each segment by the operation of that name.

    Parameters
    ----------
    op : str
        See :func:`rtxarr.geom.aggregate`.
    messages : array or Tensor, shape (n_messages, ...)
    indptr : array of int64, shape (n_segments + 1,)
    empty : float, default 0
        What a segment without messages gives.
    q : float in [0, 1], for "quantile" alone

    Returns
    -------
    array or Tensor, shape (n_segments, ...)
    """
    out = _reduce(messages, op=op, indptr=indptr, q=q)
    if empty == 0 and op in ("sum", "mean", "var", "std", "softmax", "median", "quantile"):
        return out
    alone = reshape(indptr[1:] == indptr[:-1], (-1,) + (1,) * (out.ndim - 1))
    return where(alone, full_scalar(indptr, empty, out.dtype), out)


@rounded_once
def _reduce(messages, *, op, indptr, q):
    if op == "quantile":
        return _quantile(messages, indptr, q)
    return _REDUCTIONS[op](messages, indptr)


def _var(x, indptr):
    rows = owners(indptr, x.shape[0])
    deviation = x - take(segment_mean(x, indptr), rows, axis=0)
    return segment_mean(deviation * deviation, indptr)


def root(var: Any) -> Any:
    """Give the square root, whose slope at zero is taken as zero."""
    positive = var > 0
    return where(positive, sqrt(where(positive, var, 1)), 0 * var)


def _softmax(x, indptr):
    rows = owners(indptr, x.shape[0])
    top = stop_gradient(segment_max(x, indptr))
    top = where(top == -float("inf"), 0, top)
    shares = exp(x - take(top, rows, axis=0))
    total = segment_sum(shares, indptr)
    x = where(shares == 0, 0, x)  # an infinity that has no share
    return segment_sum(shares * x, indptr) / where(total == 0, 1, total)


def _mul(x, indptr):
    function = _products.segment_product if _products.fits(x, indptr) else _products.tree
    return function(x, indptr)


def _quantile(x, indptr, q):
    return _ranks.between(*_ranks.segment_ranked(x, indptr, q=q), indptr=indptr, q=q)


_REDUCTIONS = {
    "sum": segment_sum,
    "mean": segment_mean,
    "max": segment_max,
    "min": segment_min,
    "var": _var,
    "std": lambda x, indptr: root(_var(x, indptr)),
    "softmax": _softmax,
    "mul": _mul,
    "median": lambda x, indptr: _quantile(x, indptr, 0.5),
}
