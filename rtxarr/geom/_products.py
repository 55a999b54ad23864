"""Products over edges and over segments of messages, and their gradients, which zeros leave whole.

A gradient of first order comes from each destination's product as a number and an exponent, so no
array of messages is made for it. Those of higher order, and of other arrays, go through a tree of
products of pairs.
"""

from typing import Any

from rtxarr._device import namespace, runs_kernels
from rtxarr.autograd import vjp
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import is_floating
from rtxarr.geom import _edges
from rtxarr.geom._edges import as_rows, owners
from rtxarr.kernels import product
from rtxarr.ops import astype, reshape, segment_sum, take, where
from rtxarr.ops._half import widen


def fits(x: Any, indptr: Any) -> bool:
    """Tell whether products of an array or Tensor are taken by functions of their own."""
    return is_floating(raw(x).dtype) and product.fits(indptr)  # what is traced has no place


# ------------------------------------------------------------------------------- over the sources


@differentiable
def gather_product(x, /, *, graph):
    """Multiply, for each destination, the rows of its sources; 1 for one without edges."""
    return _of_runs(product.segment_product, x, graph)


def _of_runs(function, x, graph):
    """Give ``function(x, indptr, indices=...)``, on the CPU of some destinations at a time."""
    if runs_kernels(x):
        return function(x, graph.indptr, indices=graph.indices)
    xp, parts = namespace(x), []
    size = max(1, _edges.chunk_of(x) // max(1, x.shape[1]))
    for first, last, start, stop in _edges.row_chunks(graph, size):
        pointers = graph.indptr[first : last + 1] - start
        parts.append(function(x, pointers, indices=graph.indices[start:stop]))
    if isinstance(parts[0], tuple):
        return tuple(xp.concat(found, axis=0) for found in zip(*parts, strict=True))
    return xp.concat(parts, axis=0)


def _gather_rule(g, x, graph):
    if isinstance(g, Tensor) or isinstance(x, Tensor):
        return vjp(lambda x: _gathered_tree(x, graph=graph), x)[1](g)[0]
    number, code = _of_runs(product.factors, x, graph)
    number *= astype(g, number.dtype, copy=False)
    if runs_kernels(x):
        options = {"own": x, "extra": code, "dtype": number.dtype}
        return _edges._gathered("others", graph.T, number, **options)
    xp = namespace(x)

    def message(src, dst, edges):
        rows = (xp.take(a, at, axis=0) for a, at in ((number, src), (code, src), (x, dst)))
        return product.without(*rows)

    return _edges._reduce("sum", graph.T, x.shape[1], message, number)


gather_product.defvjps(x=_gather_rule)


def _gathered_tree(x, *, graph):
    from rtxarr.geom._messages import map_reduce

    return map_reduce(graph, lambda src, dst, edge: widen(src), tree, x, None, None)


# ---------------------------------------------------------------------------------- over messages


@differentiable
def segment_product(messages, indptr, /):
    """Multiply the messages of each segment; 1 for one without messages."""
    rows = as_rows(messages)
    out = product.segment_product(rows, indptr)
    return reshape(out, (indptr.shape[0] - 1, *messages.shape[1:]))


def _segment_rule(g, messages, indptr):
    if isinstance(g, Tensor) or isinstance(messages, Tensor):
        return vjp(lambda x: tree(x, indptr), messages)[1](g)[0]
    rows = as_rows(messages)
    number, code = product.factors(rows, indptr)
    number = number * as_rows(astype(g, number.dtype, copy=False))
    at = owners(indptr, rows.shape[0])
    found = product.without(take(number, at, axis=0), take(code, at, axis=0), rows)
    return reshape(found, messages.shape)


segment_product.defvjps(messages=_segment_rule)


def tree(x, indptr):
    """Multiply neighbours in pairs, then the products in pairs, until one is left a segment.

    Waits for a GPU. Gives 0 for a segment without messages.
    """
    xp = namespace(indptr)
    lengths = indptr[1:] - indptr[:-1]
    longest = int(xp.max(lengths)) if lengths.shape[0] else 0
    while longest > 1:
        halves = (lengths + 1) // 2
        starts = xp.concat([xp.zeros(1, dtype=xp.int64), xp.cumulative_sum(halves)])
        total = int(starts[-1])
        rows = owners(starts, total)
        place = 2 * (xp.arange(total, dtype=xp.int64) - xp.take(starts, rows))
        first = xp.take(indptr, rows) + place
        paired = place + 1 < xp.take(lengths, rows)
        second = take(x, xp.where(paired, first + 1, first), axis=0)
        paired = xp.reshape(paired, (-1,) + (1,) * (x.ndim - 1))
        x = take(x, first, axis=0) * where(paired, second, 1)
        indptr, lengths, longest = starts, halves, (longest + 1) // 2
    return segment_sum(x, indptr)
