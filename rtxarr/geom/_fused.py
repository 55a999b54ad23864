"""Attention over edges in one pass, for each kind of scores; composed where no kernel runs.

Forward, no array of edges is made on a GPU, and of the softmax only the logarithm of each
destination's sum of exponentials is kept. Backward, the weights are made again, once by
destinations and once by sources. The rules for tensors, and those of the CPU, are composed.
"""

from rtxarr._device import full_scalar, namespace
from rtxarr.autograd import stop_gradient
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._edges import edges_of
from rtxarr.kernels import edge_attention as kernels
from rtxarr.kernels import edges as edge_kernels
from rtxarr.kernels.edge_attention import Scores
from rtxarr.ops import astype, concat, leaky_relu, reshape, sum, where
from rtxarr.ops._dropout import _dropout_add
from rtxarr.ops._half import widen


def _in(dtype, *arrays):
    """Give arrays, or None, in a dtype."""
    return [x if x is None or x.dtype == dtype else astype(x, dtype) for x in arrays]


# ------------------------------------------------------------------------------- scores of edges


@differentiable(precision="any")
def additive_attention(values, src, dst, edge, /, *, graph, slope, place=None, rate=0.0):
    """Attend with the scores ``leaky_relu(src[source] + dst[destination] + edge)``.

    Gives the means of the values, of shape (n_dst, n_heads, n_features), and what the backward
    pass needs: the logarithms of the scores' sums of exponentials, of shape (n_dst, n_heads), or
    the weights where no kernel runs. ``src`` and ``dst`` may be None, and so may ``edge``. Nothing
    is dropped without a ``place`` in a random stream.
    """
    return _attend("additive", values, src, dst, None, edge, graph, slope, place, rate)


@differentiable(precision="any")
def mlp_attention(values, dst, vector, edge, /, *, graph, slope, place=None, rate=0.0):
    """Attend with the scores ``vector @ leaky_relu(values[source] + dst[destination] + edge)``.

    ``edge``, of shape (n_edges, n_heads, n_features), may be None.
    """
    return _attend("mlp", values, None, dst, vector, edge, graph, slope, place, rate)


@differentiable(precision="any")
def dot_attention(values, key, query, edge, /, *, graph, scale, place=None, rate=0.0):
    """Attend with the scores ``scale * (key[source] + edge) @ query[destination]``.

    ``edge``, of shape (n_edges, n_heads, n_features), is added to the values too; it may be None.
    """
    return _attend("dot", values, key, query, None, edge, graph, scale, place, rate)


@differentiable(precision="any")
def projected_attention(
    values, vector_src, vector_dst, edge, /, *, graph, slope, place=None, rate=0.0
):
    """Attend additively, to the very nodes that attend, or to more that come after them.

    The terms of sources and destinations are the products of the values with a vector of each
    head; there may be an axis of length one before the vectors'. Values whose heads lie side by
    side in one axis give means that do.
    """
    heads = in_heads(values, vector_src)
    src, dst = head_dots(heads, vector_src, vector_dst, graph)
    out, kept = _attend("additive", heads, src, dst, None, edge, graph, slope, place, rate)
    return (out if heads is values else reshape(out, (out.shape[0], values.shape[1]))), kept


def in_heads(values, vector):
    """Give values with an axis of heads, if they have none."""
    return values if values.ndim == 3 else reshape(values, (values.shape[0], *vector.shape[-2:]))


def head_dots(values, vector_src, vector_dst, graph):
    """Give the products of sources' heads with a vector, and of the destinations among them."""
    if _by_kernels(values):
        vectors = _in(values.dtype, vector_src, vector_dst)
        src, dst = edge_kernels.head_dots(values, *vectors)
        return src, dst[: graph.n_dst]
    values, vector_src, vector_dst = _wide(values, vector_src, vector_dst)
    return sum(values * vector_src, axis=-1), sum(_of_dst(values, graph) * vector_dst, axis=-1)


def _of_dst(values, graph):
    return values if graph.is_square else values[: graph.n_dst]


def _scores(kind, values, src, dst, vector, edge, factor):
    """Give what the kernels take."""
    if kind == "additive":
        src, dst = _in(accumulator(values.dtype), src, dst)
        return Scores(kind, src, dst, None, *_in(values.dtype, edge), factor)
    return Scores(kind, *_in(values.dtype, src, dst, vector, edge), factor)


def _attend(kind, values, src, dst, vector, edge, graph, factor, place, rate):
    if kernels.fits(values):
        scores = _scores(kind, values, src, dst, vector, edge, factor)
        return kernels.attend(scores, values, edges_of(graph), place=place, rate=rate)
    dtype = values.dtype
    values, src, dst, vector, edge = _wide(values, src, dst, vector, edge)
    logits = logits_of(kind, values, src, dst, vector, edge, graph, factor)
    weight = _edges.softmax_over_edges(logits, graph=graph)
    kept = _dropped(weight, place, rate)
    out = _edges.weighted_sum(kept, values, graph=graph)
    if kind == "dot" and edge is not None:
        out = out + _edges.collect(_per_head(kept) * edge, graph=graph)
    return astype(out, dtype, copy=False), weight


def _wide(*arrays):
    return [x if x is None else widen(x) for x in arrays]


def _per_head(x):
    """Give numbers of heads an axis for features."""
    return reshape(x, (*x.shape, 1))


def _dropped(weight, place, rate):
    return weight if place is None else _dropout_add(weight, None, None, place=place, rate=rate)


# --------------------------------------------------------------------------------------- rules


def _by_kernels(values):
    """Tell whether the kernels give results and gradients: those of arrays."""
    return not isinstance(values, Tensor) and kernels.fits(values)


def _gradient(kind, g, out, values, src, dst, vector, edge, graph, factor, place, rate, **options):
    """Give the gradients of all that has a part in the scores, and of the values first."""
    (g, _), (out, kept) = g, out
    if _by_kernels(values):
        (grad,) = _in(values.dtype, raw(g))
        scores = _scores(kind, values, src, dst, vector, edge, factor)
        options |= {"place": place, "rate": rate}
        sides = edges_of(graph), edges_of(graph.T)
        return kernels.attend_gradient(grad, out, kept, scores, values, *sides, **options)
    values, src, dst, vector, edge, g, out = _wide(values, src, dst, vector, edge, g, out)
    weight = kept
    if isinstance(kept, Tensor):  # which has no gradient
        logits = logits_of(kind, values, src, dst, vector, edge, graph, factor)
        weight = _edges.softmax_over_edges(logits, graph=graph)
    kept = _dropped(weight, place, rate)
    of_values = _edges.weighted_sum(kept, g, graph=graph.T)
    of_weight = _edges.edge_dot(values, g, graph=graph)
    g_of_edges = _edges.spread(g, graph=graph) if kind == "dot" and edge is not None else None
    if g_of_edges is not None:
        of_weight = of_weight + sum(edge * g_of_edges, axis=-1)
    of_weight = _dropped(of_weight, place, rate)
    of_scores = weight * (of_weight - _edges.spread(sum(g * out, axis=-1), graph=graph))
    found = _of_terms(kind, of_scores, values, src, dst, vector, edge, graph, factor)
    of_term, of_src, of_dst, of_vector, of_edge = found
    if g_of_edges is not None:
        of_edge = of_edge + _per_head(kept) * g_of_edges
    of_values = of_values if of_term is None else of_values + of_term
    return of_values, of_src, of_dst, of_vector, of_edge


def _additive_terms(src, dst, edge, graph):
    total = edge
    if src is not None:
        total = _edges.spread(src, graph=graph.T) + _edges.spread(dst, graph=graph)
        total = total if edge is None else total + edge
    return total


def _slope(x, factor):
    one, below = (full_scalar(x, value, x.dtype) for value in (1, factor))
    return where(x > 0, one, below)


def logits_of(kind, values, src, dst, vector, edge, graph, factor):
    """Give the scores of edges, in the order of their numbers."""
    if kind == "additive":
        terms = _additive_terms(src, dst, edge, graph)
        return terms if factor == 1 else leaky_relu(terms, negative_slope=factor)
    if kind == "dot":
        dst = dst * factor
        found = _edges.edge_dot(src, dst, graph=graph)
        if edge is not None:
            found = found + sum(edge * _edges.spread(dst, graph=graph), axis=-1)
        return found
    if edge is not None:
        terms = _additive_terms(values, dst, edge, graph)
        return sum(leaky_relu(terms, negative_slope=factor) * vector, axis=-1)
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
        of_dst = _edges.weighted_sum(g, src * factor, graph=graph)
        if edge is None:
            return None, of_src, of_dst, None, None
        g = _per_head(g) * factor
        of_dst = of_dst + _edges.collect(g * edge, graph=graph)
        return None, of_src, of_dst, None, g * _edges.spread(dst, graph=graph)
    if edge is not None:
        terms = _additive_terms(values, dst, edge, graph)
        g = _per_head(g) * _slope(stop_gradient(terms), factor)
        of_vector, g = sum(g * terms, axis=0), g * vector
        of_values, of_dst = (_edges.collect(g, graph=side) for side in (graph.T, graph))
        return of_values, None, of_dst, of_vector, g
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


def _mlp_rule(g, out, values, dst, vector, edge, graph, slope, place, rate):
    of_values, _, of_dst, of_vector, of_edge = _gradient(
        "mlp", g, out, values, None, dst, vector, edge, graph, slope, place, rate
    )
    return of_values, of_dst, of_vector, of_edge


def _dot_rule(g, out, values, key, query, edge, graph, scale, place, rate):
    of_values, of_key, of_query, _, of_edge = _gradient(
        "dot", g, out, values, key, query, None, edge, graph, scale, place, rate
    )
    return of_values, of_key, of_query, of_edge


def _projected_rule(g, out, values, vector_src, vector_dst, edge, graph, slope, place, rate):
    vectors, given = (vector_src, vector_dst), (edge, graph, slope, place, rate)
    shape, values = values.shape, in_heads(values, vector_src)
    if len(shape) == 2:
        g, out = ((in_heads(x[0], vector_src), x[1]) for x in (g, out))
    of_values, *of_vectors, of_edge = _of_projected(g, out, values, *vectors, *given)
    of_vectors = [reshape(x, vector_src.shape) for x in of_vectors]
    return reshape(of_values, shape), *of_vectors, of_edge


def _of_projected(g, out, values, vector_src, vector_dst, edge, graph, slope, place, rate):
    src, dst = head_dots(values, vector_src, vector_dst, graph)
    given = (g, out, values, src, dst, None, edge, graph, slope, place, rate)
    if _by_kernels(values):
        vectors = _in(values.dtype, vector_src, vector_dst)
        of_values, of_src, of_dst, _, of_edge = _gradient("additive", *given, projections=vectors)
        return of_values, *edge_kernels.head_sums(values, of_src, of_dst), of_edge
    of_values, of_src, of_dst, _, of_edge = _gradient("additive", *given)
    values, vector_src, vector_dst = _wide(values, vector_src, vector_dst)
    of_src, of_dst = _per_head(of_src), _per_head(of_dst)
    of_vectors = sum(of_src * values, axis=0), sum(of_dst * _of_dst(values, graph), axis=0)
    more = of_dst * vector_dst
    if not graph.is_square:
        n_others, xp = graph.n_src - graph.n_dst, namespace(graph.indptr)
        more = concat([more, xp.zeros((n_others, *more.shape[1:]), dtype=more.dtype)])
    return of_values + of_src * vector_src + more, *of_vectors, of_edge


additive_attention.defvjp(_additive_rule)
mlp_attention.defvjp(_mlp_rule)
dot_attention.defvjp(_dot_rule)
projected_attention.defvjp(_projected_rule)
