"""Medians and quantiles over edges and over segments of messages.

They are made of the numbers of two ranks that follow on each other. The gradient of such a number
goes to the messages that are equal to it, in even shares, as that of a maximum does.
"""

from typing import Any

from rtxarr._device import full_scalar, namespace, runs_kernels
from rtxarr._override import tracing
from rtxarr.autograd import stop_gradient
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import accumulator, is_floating
from rtxarr.geom import _edges
from rtxarr.geom._edges import as_rows, owners
from rtxarr.kernels import rank
from rtxarr.ops import astype, reshape, segment_sum, take, where
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._reduce import attained


def fits(x: Any) -> bool:
    """Tell whether quantiles of an array or Tensor can be taken without messages."""
    return tracing() is None and is_floating(raw(x).dtype)


def gather_quantile(x: Any, graph: Any, q: float) -> Any:
    """Give a quantile over each destination's sources; zero for one without edges."""
    return between(*gather_ranked(x, graph=graph, q=q), indptr=graph.indptr, q=q)


@rounded_once
def between(low: Any, high: Any, *, indptr: Any, q: float) -> Any:
    """Interpolate between the numbers of the two ranks."""
    place = _places(indptr, q)
    xp = namespace(place)
    below = xp.floor(place)
    share = place - below + 0.5 * xp.astype(place == below, place.dtype)  # of one number twice
    share = astype(reshape(share, (-1,) + (1,) * (low.ndim - 1)), low.dtype)
    return (1 - share) * low + share * high


def _places(indptr, q):
    """Give where the quantile of each segment is, counted from 0."""
    xp, lengths = namespace(indptr), indptr[1:] - indptr[:-1]
    return q * xp.astype(lengths - xp.astype(lengths > 0, lengths.dtype), xp.float64)


def _ranked(x, indptr, q, indices=None):
    """Give the numbers of the two ranks, zero for none; of 2-D arrays."""
    xp, place = namespace(x), _places(indptr, q)
    ranks = [xp.astype(at, xp.int64) for at in (xp.floor(place), xp.ceil(place))]
    if runs_kernels(x):
        return rank.segment_ranked(x, indptr, xp.stack(ranks, axis=1), indices=indices)
    dtype, x = x.dtype, widen(x)  # NumPy does not know the NaN of bfloat16
    x = x if indices is None else xp.take(x, indices, axis=0)
    if not x.shape[0]:
        return (xp.zeros((indptr.shape[0] - 1, x.shape[1]), dtype=dtype),) * 2
    rows = xp.broadcast_to(owners(indptr, x.shape[0])[:, None], x.shape)
    order = xp.argsort(x, axis=0, stable=True)  # NaN last
    sorted_rows = xp.take_along_axis(rows, order, axis=0)
    order = xp.take_along_axis(order, xp.argsort(sorted_rows, axis=0, stable=True), axis=0)
    x = xp.take_along_axis(x, order, axis=0)
    last = x.shape[0] - 1  # segments without rows take any
    top = xp.take(x, xp.clip(indptr[1:] - 1, 0, last), axis=0)
    found = (xp.take(x, xp.clip(indptr[:-1] + at, 0, last), axis=0) for at in ranks)
    found = (xp.where(xp.isnan(top), top, y) for y in found)
    alone = (indptr[1:] == indptr[:-1])[:, None]
    found = (xp.where(alone, xp.zeros_like(y), y) for y in found)
    return tuple(xp.astype(y, dtype, copy=False) for y in found)


@differentiable
def gather_ranked(x, /, *, graph, q):
    """Give, for each destination, the numbers of its sources that its quantile lies between."""
    if runs_kernels(x):
        return _ranked(x, graph.indptr, q, graph.indices)
    parts, size = [], max(1, _edges.chunk_of(x) // max(1, x.shape[1]))
    for first, last, start, stop in _edges.row_chunks(graph, size):
        pointers = graph.indptr[first : last + 1] - start
        parts.append(_ranked(x, pointers, q, graph.indices[start:stop]))
    return tuple(namespace(x).concat(found, axis=0) for found in zip(*parts, strict=True))


def _gather_rule(g, x, out, graph):
    x, dtype = stop_gradient(x), accumulator(raw(x).dtype)

    def of(whole, number):
        number = stop_gradient(number)
        share = _edges.tie_share(whole, x, number, graph=graph)
        return _edges.matched_sum(share, number, x, graph=graph.T, dtype=dtype)

    return _added(of, g, out)


def _added(of, g, out):
    """Add up what comes of the gradients of both results; one may be None."""
    found = [of(*each) for each in zip(g, out, strict=True) if each[0] is not None]
    return found[0] + found[1] if len(found) == 2 else found[0]


gather_ranked.defvjps(x=_gather_rule)


@differentiable
def segment_ranked(messages, indptr, /, *, q):
    """Give, for each segment, the messages that its quantile lies between."""
    xp, shape = namespace(messages), (indptr.shape[0] - 1, *messages.shape[1:])
    return tuple(xp.reshape(y, shape) for y in _ranked(as_rows(messages), indptr, q))


def _segment_rule(g, messages, indptr, out):
    ids, dtype = owners(indptr, messages.shape[0]), accumulator(raw(messages).dtype)

    def of(whole, number):
        chosen = attained(messages, take(number, ids, axis=0), dtype)
        total = segment_sum(chosen, indptr)
        one = full_scalar(indptr, 1, total.dtype)
        return chosen * take(whole / where(total == 0, one, total), ids, axis=0)

    return _added(of, g, out)


segment_ranked.defvjps(messages=_segment_rule)
