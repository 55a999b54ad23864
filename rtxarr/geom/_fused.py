"""Attention over edges in one pass, for each kind of scores; composed where no kernel runs.

Forward, no array of edges is made on a GPU, and of the softmax only the logarithm of each
destination's sum of exponentials is kept. Backward, the weights are made again, once by
destinations and once by sources. The rules for tensors, and those of the CPU, are composed.
"""

from rtxarr._device import full_scalar, namespace
from rtxarr.autograd import stop_gradient
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._edges import edges_of
from rtxarr.kernels import edge_attention as kernels
from rtxarr.kernels import edges as edge_kernels
from rtxarr.kernels import segment
from rtxarr.kernels.edge_attention import Scores
from rtxarr.ops import astype, exp, reshape, sum, where
from rtxarr.ops._dropout import _dropout_add
from rtxarr.ops._half import widen


def _narrow(like, *arrays):
    """Give arrays in the dtype of one of them."""
    return [x if x is None else astype(x, like.dtype, copy=False) for x in arrays]


# ------------------------------------------------------------------------------- scores of edges


@differentiable(precision="any")
def additive_attention(values, src, dst, edge, /, *, graph, slope, place=None, rate=0.0):
    """Attend with the scores ``leaky_relu(src[source] + dst[destination] + edge)``.

    Gives the means of the values, of shape (n_dst, n_heads, n_features), and the logarithms of
    the scores' sums of exponentials, of shape (n_dst, n_heads). ``src`` and ``dst`` may be None,
    and so may ``edge``. Nothing is dropped without a ``place`` in a random stream.
    """
    return _attend("additive", values, src, dst, None, edge, graph, slope, place, rate)


@differentiable(precision="any")
def mlp_attention(values, dst, vector, /, *, graph, slope, place=None, rate=0.0):
    """Attend with the scores ``vector @ leaky_relu(values[source] + dst[destination])``."""
    return _attend("mlp", values, None, dst, vector, None, graph, slope, place, rate)


@differentiable(precision="any")
def dot_attention(values, key, query, /, *, graph, scale, place=None, rate=0.0):
    """Attend with the scores ``scale * key[source] @ query[destination]``."""
    return _attend("dot", values, key, query, None, None, graph, scale, place, rate)


@differentiable(precision="any")
def projected_attention(
    values, vector_src, vector_dst, edge, /, *, graph, slope, place=None, rate=0.0
):
    """Attend additively, to the very nodes that attend.

    The terms of sources and destinations are the products of the values with a vector of each
    head.
    """
    src, dst = _projected(values, vector_src, vector_dst)
    return _attend("additive", values, src, dst, None, edge, graph, slope, place, rate)


def _projected(values, *vectors):
    vectors = _narrow(values, *vectors)
    if kernels.fits(values):
        return edge_kernels.head_dots(values, *vectors)
    return [sum(widen(values) * widen(vector), axis=-1) for vector in vectors]


def _scores(kind, values, src, dst, vector, edge, factor):
    """Give what the kernels take."""
    if kind == "additive":
        wide = accumulator(values.dtype)
        src, dst = (x if x is None else astype(x, wide, copy=False) for x in (src, dst))
        return Scores(kind, src, dst, None, *_narrow(values, edge), factor)
    return Scores(kind, *_narrow(values, src, dst, vector), None, factor)


def _attend(kind, values, src, dst, vector, edge, graph, factor, place, rate):
    if kernels.fits(values):
        scores = _scores(kind, values, src, dst, vector, edge, factor)
        return kernels.attend(scores, values, edges_of(graph), place=place, rate=rate)
    xp, dtype = namespace(values), values.dtype
    values, *terms = (x if x is None else widen(x) for x in (values, src, dst, vector, edge))
    logits = graph.stored(_logits(kind, values, *terms, graph, factor))
    top = segment.segment_reduce("max", logits, graph.indptr)
    top = xp.where(top == -xp.inf, 0, top)
    shares = xp.exp(logits - xp.take(top, graph._rows, axis=0))
    total = segment.segment_reduce("sum", shares, graph.indptr)
    some = xp.where(total == 0, 1, total)
    weight = graph._by_number(shares / xp.take(some, graph._rows, axis=0))
    lse = xp.where(total == 0, -xp.inf, top + xp.log(some))
    out = _edges.weighted_sum(_dropped(weight, place, rate), values, graph=graph)
    return xp.astype(out, dtype, copy=False), xp.astype(lse, accumulator(dtype), copy=False)


def _dropped(weight, place, rate):
    return weight if place is None else _dropout_add(weight, None, None, place=place, rate=rate)


# --------------------------------------------------------------------------------------- rules


def _by_kernels(g, values):
    """Tell whether the kernels give the gradients: of arrays, and of the first result alone."""
    of_out, of_lse = g
    tensors = isinstance(of_out, Tensor) or isinstance(values, Tensor)
    return of_lse is None and not tensors and kernels.fits(values)


def _gradient(kind, g, out, values, src, dst, vector, edge, graph, factor, place, rate, **options):
    """Give the gradients of all that has a part in the scores, and of the values first."""
    if _by_kernels(g, values):
        (grad,), scores = (
            _narrow(values, g[0]),
            _scores(kind, values, src, dst, vector, edge, factor),
        )
        options |= {"place": place, "rate": rate}
        sides = edges_of(graph), edges_of(graph.T)
        return kernels.attend_gradient(grad, *out, scores, values, *sides, **options)
    (of_out, of_lse), (out, lse) = g, out
    of_out = out * 0 if of_out is None else of_out
    values, src, dst, vector, edge, of_out, out = (
        x if x is None else widen(x) for x in (values, src, dst, vector, edge, of_out, out)
    )
    delta = sum(of_out * out, axis=-1)
    delta = delta if of_lse is None else delta - of_lse
    logits = _logits(kind, values, src, dst, vector, edge, graph, factor)
    weight = exp(logits - _edges.spread(where(lse == -float("inf"), 0, lse), graph=graph))
    kept = _dropped(weight, place, rate)
    of_values = _edges.weighted_sum(kept, of_out, graph=graph.T)
    of_weight = _dropped(_edges.edge_dot(values, of_out, graph=graph), place, rate)
    of_scores = weight * (of_weight - _edges.spread(delta, graph=graph))
    of_term, *of_terms = _of_terms(kind, of_scores, values, src, dst, vector, edge, graph, factor)
    return of_values if of_term is None else of_values + of_term, *of_terms


def _additive_terms(src, dst, edge, graph):
    total = edge
    if src is not None:
        total = _edges.spread(src, graph=graph.T) + _edges.spread(dst, graph=graph)
        total = total if edge is None else total + edge
    return total


def _slope(x, factor):
    one, below = (full_scalar(x, value, x.dtype) for value in (1, factor))
    return where(x > 0, one, below)


def _logits(kind, values, src, dst, vector, edge, graph, factor):
    if kind == "additive":
        terms = _additive_terms(src, dst, edge, graph)
        return terms * _slope(stop_gradient(terms), factor)
    if kind == "dot":
        return _edges.edge_dot(src, dst * factor, graph=graph)
    keys = stop_gradient(values), stop_gradient(dst)  # the slopes are constant
    return _edges.gated_dot(values * vector, dst * vector, *keys, graph=graph, slope=factor)


def _of_terms(kind, g, values, src, dst, vector, edge, graph, factor):
    """Give the gradients of values (None for zeros), src, dst, vector and edge from the scores'."""
    if kind == "additive":
        g = g * _slope(stop_gradient(_additive_terms(src, dst, edge, graph)), factor)
        of_edge = None if edge is None else g
        if src is None:
            return None, None, None, None, of_edge
        of_src, of_dst = (_edges.collect(g, graph=side) for side in (graph.T, graph))
        return None, of_src, of_dst, None, of_edge
    if kind == "dot":
        of_src = _edges.weighted_sum(g, dst * factor, graph=graph.T)
        return None, of_src, _edges.weighted_sum(g, src * factor, graph=graph), None, None
    keys = stop_gradient(values), stop_gradient(dst)
    of_values = _edges.gated_sum(g, keys[1], keys[0], graph=graph.T, slope=factor)
    of_dst = _edges.gated_sum(g, *keys, graph=graph, slope=factor)
    of_vector = sum(of_values * values, axis=0) + sum(of_dst * dst, axis=0)
    return of_values * vector, None, of_dst * vector, of_vector, None


def _additive_rule(g, out, values, src, dst, edge, graph, slope, place, rate):
    of_values, of_src, of_dst, _, of_edge = _gradient(
        "additive", g, out, values, src, dst, None, edge, graph, slope, place, rate
    )
    return of_values, of_src, of_dst, of_edge


def _mlp_rule(g, out, values, dst, vector, graph, slope, place, rate):
    of_values, _, of_dst, of_vector, _ = _gradient(
        "mlp", g, out, values, None, dst, vector, None, graph, slope, place, rate
    )
    return of_values, of_dst, of_vector


def _dot_rule(g, out, values, key, query, graph, scale, place, rate):
    return _gradient("dot", g, out, values, key, query, None, None, graph, scale, place, rate)[:3]


def _projected_rule(g, out, values, vector_src, vector_dst, edge, graph, slope, place, rate):
    src, dst = _projected(values, vector_src, vector_dst)
    given = (g, out, values, src, dst, None, edge, graph, slope, place, rate)
    if _by_kernels(g, values):
        vectors = _narrow(values, vector_src, vector_dst)
        of_values, of_src, of_dst, _, of_edge = _gradient("additive", *given, projections=vectors)
        return of_values, *edge_kernels.head_sums(values, of_src, of_dst), of_edge
    of_values, of_src, of_dst, _, of_edge = _gradient("additive", *given)
    shape = (*values.shape[:2], 1)
    of_src, of_dst = reshape(of_src, shape), reshape(of_dst, shape)
    of_values = of_values + of_src * widen(vector_src) + of_dst * widen(vector_dst)
    of_vectors = (sum(x * widen(values), axis=0) for x in (of_src, of_dst))
    return of_values, *of_vectors, of_edge


additive_attention.defvjp(_additive_rule)
mlp_attention.defvjp(_mlp_rule)
dot_attention.defvjp(_dot_rule)
projected_attention.defvjp(_projected_rule)
