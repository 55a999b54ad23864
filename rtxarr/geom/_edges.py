"""The differentiable operations between nodes and edges that all layers are made of.

Each is linear in every argument that has a rule, and the rules are these operations again, on the
graph or on the graph turned round: gradients of every order make no array of messages. Arrays of
nodes are 2-D, or 3-D with heads; arrays of edges are in the order of the edges' numbers.

Kernels that take whole passes at once belong into the functions with "one pass" in their comment.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr._device import (
    device_of,
    full_scalar,
    is_device_array,
    memory_stats,
    namespace,
    runs_kernels,
)
from rtxarr._override import overridable, tracing
from rtxarr.autograd import stop_gradient
from rtxarr.autograd._op import differentiable, nondifferentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import FLOATING, accumulator, result_type
from rtxarr.geom._bins import bins
from rtxarr.kernels import edges as edge_kernels
from rtxarr.kernels import gather, segment, spmm
from rtxarr.kernels.edge_attention import Edges
from rtxarr.ops import astype, reshape, where
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._reduce import attained

# A row of a sparse product longer than this is summed in pieces on a GPU.
_PIECE = 256

# Elements of the messages that are in memory at a time, where there must be any.
CHUNK = {"cpu": 2**20, "cuda": 2**26}

# What part of a GPU's memory the features of edges may take that kernels of attention read.
SHARE = 32


def chunk_of(x: Any) -> int:
    """Give how many elements of messages may be in memory at a time."""
    if tracing() is not None:  # a fused program makes none
        return 2**62
    return CHUNK["cuda" if is_device_array(x) else "cpu"]


def has_room(x: Any, n: int) -> bool:
    """Tell whether ``n`` numbers like those of ``x`` may be in memory for all edges at a time.

    They may where they take a small share of a GPU's memory, if there is something to gain.
    """
    if n <= chunk_of(x):
        return True
    return is_device_array(x) and n * x.dtype.itemsize <= _memory_of(str(device_of(x))) // SHARE


@functools.cache
def _memory_of(device):
    return memory_stats(device)["total"]


def row_chunks(graph: Any, n_edges: int) -> list[tuple[int, int, int, int]]:
    """Cut the destinations into runs with up to ``n_edges`` edges, or one destination with more.

    Gives ``(first row, last row + 1, first edge, last edge + 1)`` of each run.
    """

    def cut():
        indptr = graph.indptr.get() if is_device_array(graph.indptr) else graph.indptr
        runs, row = [], 0
        while row < graph.n_dst or not runs:
            start = indptr[row]
            stop = int(np.searchsorted(indptr, start + n_edges, side="right")) - 1
            stop = min(max(stop, row + 1), graph.n_dst)
            runs.append((row, stop, int(start), int(indptr[stop])))
            row = max(stop, row + 1)
        return runs

    return graph.once(("row_chunks", n_edges), cut)


def _reduce(op: str, graph: Any, n_features: int, message: Callable, like: Any) -> Any:
    """Reduce, for each destination, ``message(source, destination, place)`` of stored edges."""
    parts = []
    for first, last, start, stop in row_chunks(graph, max(1, chunk_of(like) // max(1, n_features))):
        edges = slice(start, stop)
        messages = message(graph.indices[edges], graph._rows[edges], edges)
        parts.append(segment.segment_reduce(op, messages, graph.indptr[first : last + 1] - start))
    return parts[0] if len(parts) == 1 else namespace(like).concat(parts, axis=0)


def edges_of(graph: Any) -> Edges:
    """Give the edges of a graph as kernels take them."""
    return graph.once("edges", lambda: _edges_of(graph))


def _edges_of(graph):
    ids = None if graph.is_ordered else graph.edge_ids
    return Edges(graph.indptr, graph.indices, ids, bins(graph))


def _has_kernel(*arrays: Any) -> bool:
    return runs_kernels(arrays[0]) and not [x for x in arrays if x.dtype not in FLOATING]


def _gathered(kind: str, graph: Any, x: Any, **options: Any) -> Any:
    return gather.gather_reduce(kind, x, graph.indptr, graph.indices, bins(graph), **options)


def _alike(*arrays: Any) -> list[Any]:
    """Give arrays in one dtype, unless they are accumulated in one as they are."""
    if len({accumulator(x.dtype) for x in arrays}) == 1:
        return list(arrays)
    dtype = result_type(*arrays)
    return [astype(x, dtype, copy=False) for x in arrays]


def owners(indptr: Any, n: int) -> Any:
    """Give the segment that each of ``n`` rows belongs to."""
    xp = namespace(indptr)
    return xp.searchsorted(indptr[1:], xp.arange(n, dtype=indptr.dtype), side="right")


def as_rows(x: Any) -> Any:
    """Give an array with all but the first axis as one."""
    return reshape(x, (x.shape[0], math.prod(x.shape[1:])))


# ------------------------------------------------------------------------- sums over the sources


@differentiable(movement=True)
def gather_sum(x, /, *, graph):
    """Add up, for each destination, the rows of its sources."""
    if _has_kernel(x):
        return _gathered("sum", graph, x)
    return segment.segment_reduce("sum", x, graph.indptr, indices=graph.indices)


gather_sum.defvjps(x=lambda g, graph: gather_sum(g, graph=graph.T))


def counts(graph: Any, dtype: Any) -> Any:
    """Give the edges of each destination as floats, at least 1; shape (n_dst, 1)."""

    def count():
        xp = namespace(graph.indptr)
        return xp.astype(xp.where(graph.in_degrees == 0, 1, graph.in_degrees), dtype)[:, None]

    return graph.once(("counts", np.dtype(dtype)), count)


@differentiable(movement=True)
def gather_mean(x, /, *, graph):
    """Average, for each destination, the rows of its sources."""
    if _has_kernel(x):
        return _gathered("sum", graph, x, end="mean")
    return segment.segment_reduce("mean", x, graph.indptr, indices=graph.indices)


@differentiable
def share_sum(x, /, *, graph):
    """Add up, for each destination, the rows of its sources, each over the source's out-degree."""
    # In float32 for half types, whose shares of a hub's gradient would vanish.
    dtype = accumulator(x.dtype)
    if _has_kernel(x):
        factors = graph.once(("shares", dtype), lambda: 1 / counts(graph.T, dtype))
        return _gathered("scaled", graph, x, extra=factors)
    shares = widen(x) / counts(graph.T, dtype)
    return segment.segment_reduce("sum", shares, graph.indptr, indices=graph.indices)


gather_mean.defvjps(x=lambda g, graph: share_sum(g, graph=graph.T))
share_sum.defvjps(x=lambda g, graph: gather_mean(g, graph=graph.T))


@differentiable
@overridable
def weighted_sum(weight, x, /, *, graph):
    """Add up the rows of sources times the weights of edges and heads.

    ``weight`` has shape (n_edges, n_heads), ``x`` (n_src, n_heads, n_features), and so does the
    result; or without the axis of heads (n_edges,) and (n_src, n_features).
    """
    if not _has_kernel(weight, x):
        return _host_weighted_sum(weight, x, graph)
    dtype, n_heads = x.dtype, x.shape[1] if x.ndim > 2 else 1
    if weight.dtype != dtype:
        dtype = result_type(weight, x)
        weight, x = _alike(weight, x)
    rows = x if x.ndim == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    weight, order = _as_stored(weight, graph)
    options = {"extra": weight, "order": order, "n_heads": n_heads, "dtype": dtype}
    out = _gathered("weighted", graph, rows, **options)
    return out if x.ndim == 2 else out.reshape(graph.n_dst, *x.shape[1:])


@differentiable
def biased_sum(weight, x, bias, /, *, graph):
    """Give :func:`weighted_sum`, without heads, plus a row ``bias``."""
    if not adds_bias(weight, x, bias):
        return weighted_sum(weight, x, graph=graph) + bias
    weight, order = _as_stored(weight, graph)
    options = {"extra": weight, "order": order, "own": bias, "end": "biased"}
    return _gathered("weighted", graph, x, **options)


def adds_bias(weight: Any, x: Any, bias: Any) -> bool:
    """Tell whether a kernel adds a bias to the sums: where the bits are those of two steps."""
    dtype = x.dtype
    right = runs_kernels(x) and dtype in FLOATING and accumulator(dtype) == dtype
    return (
        right
        and weight.dtype == bias.dtype == dtype
        and (weight.ndim, x.ndim, bias.ndim) == (1, 2, 1)
    )


def keep_weights(graph: Any, weight: Any) -> None:
    """Note weights that will not change: sums on a GPU sort them as the graph is stored, once."""
    graph.once(("weights", id(weight)), lambda: weight)


def _as_stored(weight, graph):
    """Give weights, and the order to read them in: 32 bytes come for each that is out of order."""
    if graph.is_ordered:
        return weight, None
    stored = graph._kept.get(("stored", id(weight)))
    if stored is None:
        key, turned = ("weights", id(weight)), graph.__dict__.get("T", graph)
        if key not in graph._kept and key not in turned._kept:
            return weight, graph.edge_ids
        stored = graph.once(("stored", id(weight)), lambda: graph.stored(weight))
    return stored, None


@rounded_once
def _host_weighted_sum(weight, x, graph):
    if x.ndim == 2:
        return _product(weight, x, graph)
    xp = namespace(weight, x)
    n_heads, n_features = x.shape[1:]
    if n_heads > n_features:
        weight = graph.stored(weight)

        def message(src, dst, edges):
            scaled = weight[edges, :, None] * xp.take(x, src, axis=0)
            return xp.reshape(scaled, (src.shape[0], n_heads * n_features))

        out = _reduce("sum", graph, n_heads * n_features, message, x)
        return xp.reshape(out, (graph.n_dst, n_heads, n_features))
    parts = [_product(weight[:, head], x[:, head], graph) for head in range(n_heads)]
    return parts[0][:, None] if n_heads == 1 else xp.stack(parts, axis=1)


def _product(weight, x, graph):
    indptr, rows = _pieces(graph)
    order = None if graph.is_ordered else graph.edge_ids
    weight = namespace(weight).ascontiguousarray(weight)
    return spmm.spmm(weight, x, indptr, graph.indices, order=order, rows=rows)


def _pieces(graph):
    """Cut long rows for the sparse product: pointers of pieces, and of rows into the pieces."""
    if not runs_kernels(graph.indptr) or tracing() is not None:
        return graph.indptr, None

    def cut():
        xp = namespace(graph.indptr)
        n_pieces = xp.where(graph.in_degrees == 0, 1, (graph.in_degrees + _PIECE - 1) // _PIECE)
        rows = xp.concat([xp.zeros(1, dtype=xp.int64), xp.cumulative_sum(n_pieces)])
        total = int(rows[-1])
        if total == graph.n_dst:
            return graph.indptr, None
        piece = xp.arange(total, dtype=xp.int64)
        row = xp.searchsorted(rows, piece, side="right") - 1
        starts = xp.take(graph.indptr, row) + (piece - xp.take(rows, row)) * _PIECE
        return xp.concat([starts, graph.indptr[-1:]]), rows

    return graph.once("pieces", cut)


@differentiable
@overridable
def edge_dot(u, v, /, *, graph):
    """Give, for each edge and head, the inner product of its two nodes' rows.

    ``u`` has shape (n_src, n_heads, n_features), ``v`` (n_dst, n_heads, n_features); the result
    (n_edges, n_heads). The axis of heads may be left out.
    """
    if u.ndim == 2 and runs_kernels(u):
        return edge_dot(u[:, None], v[:, None], graph=graph)[:, 0]
    if edge_kernels.fit(u, v):
        return edge_kernels.edge_dot(u, v, edges_of(graph))
    return _composed_dot(u, v, graph)


@rounded_once
def _composed_dot(u, v, graph):
    xp = namespace(u, v)
    size = max(1, chunk_of(u) // max(1, math.prod(u.shape[1:])))
    out = xp.empty((graph.n_edges, *u.shape[1:-1]), dtype=u.dtype)
    for start in range(0, graph.n_edges, size):
        edges = slice(start, start + size)
        a = xp.take(u, graph.src[edges], axis=0)
        b = xp.take(v, graph.dst[edges], axis=0)
        if isinstance(a, np.ndarray):  # CuPy's einsum makes a product for each edge and head
            np.einsum("...i,...i->...", a, b, out=out[edges])
        else:
            out[edges] = xp.sum(a * b, axis=-1)
    return out


weighted_sum.defvjps(
    weight=lambda g, x, graph: edge_dot(x, g, graph=graph),
    x=lambda g, weight, graph: weighted_sum(weight, g, graph=graph.T),
)
biased_sum.defvjps(
    weight=lambda g, x, graph: edge_dot(x, g, graph=graph),
    x=lambda g, weight, graph: weighted_sum(weight, g, graph=graph.T),
    bias=lambda g: g,  # the engine sums it up
)
edge_dot.defvjps(
    u=lambda g, v, graph: weighted_sum(g, v, graph=graph.T),
    v=lambda g, u, graph: weighted_sum(g, u, graph=graph),
)


# ------------------------------------------------------------ a leaky ReLU of the sum of two nodes


@differentiable
def gated_dot(y_src, y_dst, key_src, key_dst, /, *, graph, slope):
    """Add up, for each edge and head, its nodes' ``y`` times the slope of a leaky ReLU.

    The slope is that at the sum of its nodes' keys. All have shape (n, n_heads, n_features);
    ``y_src`` may be None for zeros. With ``y`` a multiple of the keys, it is that multiple of the
    leaky ReLU itself.
    """
    if edge_kernels.fit(y_dst, y_src, key_src, key_dst):
        return edge_kernels.gated_dot(y_src, y_dst, key_src, key_dst, edges_of(graph), slope=slope)
    return _composed_gated_dot(y_src, y_dst, key_src, key_dst, graph, slope)


@rounded_once
def _composed_gated_dot(y_src, y_dst, key_src, key_dst, graph, slope):
    xp = namespace(y_dst, key_src, key_dst)
    size = max(1, chunk_of(key_src) // max(1, math.prod(key_src.shape[1:])))
    out = xp.empty((graph.n_edges, key_src.shape[1]), dtype=key_src.dtype)
    for start in range(0, graph.n_edges, size):
        edges = slice(start, start + size)
        src, dst = graph.src[edges], graph.dst[edges]
        rows = xp.take(y_dst, dst, axis=0)
        if y_src is not None:
            rows += xp.take(y_src, src, axis=0)
        rows *= _slopes(xp, key_src, key_dst, src, dst, slope)
        out[edges] = xp.sum(rows, axis=-1)
    return out


def _slopes(xp, key_src, key_dst, src, dst, slope):
    above = xp.take(key_src, src, axis=0) + xp.take(key_dst, dst, axis=0) > 0
    one, below = (full_scalar(key_src, value, key_src.dtype) for value in (1, slope))
    return xp.where(above, one, below)


@differentiable
def gated_sum(values, key_src, key_dst, /, *, graph, slope):
    """Add up, for each destination, its edges' values times the slopes of :func:`gated_dot`.

    ``values`` has shape (n_edges, n_heads), the result that of ``key_dst``.
    """
    if values.dtype == key_dst.dtype and edge_kernels.fit(key_dst, key_src):
        return edge_kernels.gated_sum(values, key_src, key_dst, edges_of(graph), slope=slope)
    return _composed_gated_sum(values, key_src, key_dst, graph, slope)


@rounded_once
def _composed_gated_sum(values, key_src, key_dst, graph, slope):
    xp = namespace(values, key_src, key_dst)
    width = math.prod(key_dst.shape[1:])
    stored = graph.stored(values)

    def message(src, dst, edges):
        rows = _slopes(xp, key_src, key_dst, src, dst, slope) * stored[edges, :, None]
        return xp.reshape(rows, (src.shape[0], width))

    return xp.reshape(_reduce("sum", graph, width, message, key_dst), key_dst.shape)


gated_dot.defvjps(
    y_src=lambda g, key_src, key_dst, graph, slope: gated_sum(
        g, key_dst, key_src, graph=graph.T, slope=slope
    ),
    y_dst=lambda g, key_src, key_dst, graph, slope: gated_sum(
        g, key_src, key_dst, graph=graph, slope=slope
    ),
)
gated_sum.defvjps(
    values=lambda g, key_src, key_dst, graph, slope: gated_dot(
        None, g, key_src, key_dst, graph=graph, slope=slope
    )
)


# ------------------------------------------------------------------------------ nodes and edges


@differentiable(movement=True)
@overridable
def spread(x, /, *, graph):
    """Give each edge the row of its destination."""
    return namespace(x).take(x, graph.dst, axis=0)


@differentiable(movement=True)
@overridable
def collect(values, /, *, graph):
    """Add up, for each destination, the rows of its edges."""
    xp = namespace(values)
    rows = xp.reshape(values, (values.shape[0], math.prod(values.shape[1:])))
    order = None if graph.is_ordered else graph.edge_ids
    out = segment.segment_reduce("sum", rows, graph.indptr, indices=order)
    return xp.reshape(out, (graph.n_dst, *values.shape[1:]))


spread.defvjps(x=lambda g, graph: collect(g, graph=graph))
collect.defvjps(values=lambda g, graph: spread(g, graph=graph))


@differentiable(movement=True)
def numbered(values, /, *, graph):
    """Put values of stored edges into the order of the edges' numbers."""
    return graph._by_number(values)


numbered.defvjps(values=lambda g, graph: graph.stored(g))


@differentiable
def softmax_over_edges(logits, /, *, graph):
    """Give the softmax over the edges of each destination; ``logits`` is 2-D."""
    if edge_kernels.fits_softmax(logits):
        return edge_kernels.edge_softmax(logits, edges_of(graph))
    return _composed_softmax(logits, graph)


@rounded_once
def _composed_softmax(logits, graph):
    xp = namespace(logits)
    logits = graph.stored(logits)
    top = segment.segment_reduce("max", logits, graph.indptr)
    # Where all are -inf, -inf - 0 gives zeros; 0 / 1 is 0.
    top = xp.where(top == -xp.inf, 0, top)
    shares = xp.exp(logits - segment.spread(top, graph.indptr, graph._rows))
    total = segment.segment_reduce("sum", shares, graph.indptr)
    shares /= segment.spread(xp.where(total == 0, 1, total), graph.indptr, graph._rows)
    return graph._by_number(shares)


def _softmax_rule(g, out, graph):
    tensors = isinstance(g, Tensor) or isinstance(out, Tensor)
    if not tensors and edge_kernels.fits_softmax(out):
        return edge_kernels.edge_softmax_gradient(
            astype(g, out.dtype, copy=False), out, edges_of(graph)
        )
    g = g * out
    return g - out * spread(collect(g, graph=graph), graph=graph)


softmax_over_edges.defvjps(logits=_softmax_rule)


# ------------------------------------------------------------------------- maximum and minimum


@differentiable
def gather_extremum(x, /, *, graph, op, empty):
    """Give the largest or smallest element of each destination's sources, feature by feature.

    Destinations without edges get ``empty``.
    """
    if _has_kernel(x):
        return _gathered(op, graph, x, end="filled", empty=empty)
    out = segment.segment_reduce(op, x, graph.indptr, indices=graph.indices)
    return fill_empty(graph, out, empty)


@differentiable
def matched_sum(values, key_src, key_dst, /, *, graph, dtype=None):
    """Add up the elements of sources whose key is that of the destination."""
    dtype = result_type(values, key_src, key_dst) if dtype is None else dtype
    if _has_kernel(values, key_src, key_dst):
        values, key_src, key_dst = _alike(values, key_src, key_dst)
        options = {"own": key_dst, "extra": values, "dtype": dtype}
        return _gathered("matched", graph, key_src, **options)
    values, key_src, key_dst = map(widen, (values, key_src, key_dst))
    xp = namespace(values, key_src, key_dst)

    def message(src, dst, edges):
        chosen = attained(
            xp.take(key_src, src, axis=0), xp.take(key_dst, dst, axis=0), values.dtype
        )
        return xp.take(values, src, axis=0) * chosen

    return astype(_reduce("sum", graph, values.shape[1], message, values), dtype, copy=False)


matched_sum.defvjps(
    values=lambda g, key_src, key_dst, graph: matched_sum(g, key_dst, key_src, graph=graph.T)
)


@differentiable
def tie_share(whole, key_src, key_dst, /, *, graph):
    """Divide ``whole`` by how many sources reach the extremum, at least 1; halves as float32."""
    dtype = accumulator(result_type(whole, key_src))
    if _has_kernel(whole, key_src, key_dst):
        whole, key_src, key_dst = _alike(whole, key_src, key_dst)
        options = {"own": key_dst, "extra": whole, "end": "share", "dtype": dtype}
        return _gathered("ties", graph, key_src, **options)
    return widen(whole) / _ties(key_src, key_dst, graph)


tie_share.defvjps(
    whole=lambda g, key_src, key_dst, graph: tie_share(g, key_src, key_dst, graph=graph)
)


@nondifferentiable
def _ties(key_src, key_dst, graph):
    """Count the sources that reach the extremum, at least 1."""
    xp = namespace(key_src, key_dst)

    def message(src, dst, edges):
        return attained(xp.take(key_src, src, axis=0), xp.take(key_dst, dst, axis=0), xp.int64)

    count = _reduce("sum", graph, key_src.shape[1], message, key_src)
    return xp.astype(xp.where(count == 0, 1, count), accumulator(key_dst.dtype))


def _extremum_rule(g, x, out, graph):
    x, out = stop_gradient(x), stop_gradient(out)
    return matched_sum(tie_share(g, x, out, graph=graph), out, x, graph=graph.T, dtype=raw(x).dtype)


gather_extremum.defvjps(x=_extremum_rule)


# ------------------------------------------------------------------------------------- variance


@differentiable
def gather_var(x, /, *, graph):
    """Give the variance over each destination's sources: mean squared deviation from the mean."""
    if _has_kernel(x):
        # Two passes: what the first rounds does not grow with the mean.
        mean = _gathered("sum", graph, x, end="mean", dtype=accumulator(x.dtype))
        return _gathered("squares", graph, x, end="mean", own=mean)
    return _host_var(x, graph)


@rounded_once
def _host_var(x, graph):
    xp = namespace(x)
    mean = segment.segment_reduce("mean", x, graph.indptr, indices=graph.indices)

    def message(src, dst, edges):
        deviation = xp.take(x, src, axis=0) - xp.take(mean, dst, axis=0)
        return deviation * deviation

    return _reduce("mean", graph, x.shape[1], message, x)


@differentiable
def difference_sum(scale, own, other, /, *, graph):
    """Add up ``scale * (own - other)``, with ``own`` of destinations and the rest of sources."""
    if _has_kernel(scale, own, other):
        dtype = result_type(scale, own, other)
        scale, own, other = _alike(scale, own, other)
        return _gathered("difference", graph, scale, own=own, extra=other, dtype=dtype)
    return _host_difference_sum(scale, own, other, graph)


@rounded_once
def _host_difference_sum(scale, own, other, graph):
    xp = namespace(scale, own, other)

    def message(src, dst, edges):
        apart = xp.take(own, dst, axis=0) - xp.take(other, src, axis=0)
        return xp.take(scale, src, axis=0) * apart

    return _reduce("sum", graph, own.shape[1], message, own)


difference_sum.defvjps(
    scale=lambda g, own, other, graph: -difference_sum(g, other, own, graph=graph.T),
    own=lambda g, scale, graph: g * gather_sum(scale, graph=graph),
    other=lambda g, scale, graph: -scale * gather_sum(g, graph=graph.T),
)


def _var_rule(g, x, graph):
    x = widen(x)
    scale = 2 * widen(g) / counts(graph, x.dtype)
    return difference_sum(scale, x, gather_mean(x, graph=graph), graph=graph.T)


gather_var.defvjps(x=_var_rule)


def fill_empty(graph: Any, out: Any, empty: float) -> Any:
    """Put ``empty`` into the rows of destinations without edges."""
    alone = reshape(graph.in_degrees == 0, (graph.n_dst,) + (1,) * (out.ndim - 1))
    return where(alone, full_scalar(graph.indptr, empty, out.dtype), out)
