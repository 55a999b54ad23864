"""Attention over the edges that end at a node: a function for each kind of scores.

Those of the layers give the weights before dropout too where they are asked for, else None: in
their one pass no array of edges is made on a GPU.
"""

import math
from typing import Any

from rtxarr.autograd._tape import raw
from rtxarr.dtypes import result_type
from rtxarr.geom import _edges, _fused, _masks, _messages
from rtxarr.geom._aggregate import check_edges, check_nodes, edge_softmax
from rtxarr.kernels import edge_attention
from rtxarr.ops import astype, dropout, leaky_relu, reshape, sum
from rtxarr.ops._check import check_rate, generator_or_default
from rtxarr.ops._half import widen

__all__ = ["attend"]


def attend(
    graph: Any, values: Any, logits: Any, *, dropout_rate: float = 0.0, generator: Any = None
) -> Any:
    """Average, for each destination, the values of its sources with weights from logits of edges.

    Parameters
    ----------
    graph : Graph
    values : array or Tensor of a real floating dtype, shape (n_src, n_heads, n_features)
    logits : array or Tensor, shape (n_edges, n_heads)
        In the order of the edges' numbers; the weights are their softmax over the edges of a
        destination.
    dropout_rate : float in [0, 1), default 0
        Share of the weights to drop; the others are scaled up.
    generator : Generator, default :func:`rtxarr.random.default_generator`

    Returns
    -------
    array or Tensor, shape (n_dst, n_heads, n_features)
        Zero for a destination without edges, or with logits of ``-inf`` alone.

    Notes
    -----
    On a GPU it is one pass over the edges, and the weights are kept neither forward nor backward.
    What is dropped is the same on every device.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=2)
    >>> values = np.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> geom.attend(graph, values, np.zeros((2, 1)))[1]
    array([[2., 3.]])
    """
    check_nodes("values", values, graph, graph.n_src, "sources")
    check_edges("logits", logits, graph)
    check_rate(dropout_rate)
    if values.ndim != 3 or tuple(logits.shape) != (graph.n_edges, values.shape[1]):
        raise ValueError(
            "values and logits must have shapes (n_src, n_heads, n_features) and (n_edges, "
            f"n_heads), got {tuple(values.shape)} and {tuple(logits.shape)}"
        )
    dtype = result_type(raw(values).dtype, raw(logits).dtype)
    values, logits = (astype(x, dtype, copy=False) for x in (values, logits))
    drops = {"dropout_rate": dropout_rate, "generator": generator}
    if graph.mask is not None:
        return _masks.attended(graph, values, None, logits, **drops)[0]
    return _by_logits(graph, values, logits, **drops)


def _by_logits(graph, values, logits, *, dropout_rate, generator):
    place = _place(graph, values.shape[1], dropout_rate, generator)
    options = {"graph": graph, "slope": 1.0, **place}
    return _fused.additive_attention(values, None, None, logits, **options)[0]


def _place(graph, n_heads, rate, generator):
    """Set aside the random words of what is dropped: one for each edge and head."""
    if not rate:
        return {}
    source = generator_or_default(generator)
    return {"place": source.dropout_place(graph.n_edges * n_heads), "rate": float(rate)}


def attend_additive(
    graph, values, src, dst, edge=None, *, slope, dropout_rate, generator, return_attention=False
):
    """Attend with the scores ``leaky_relu(src[source] + dst[destination] + edge)``.

    All have shape (n, n_heads), but for the values.
    """
    place = _place(graph, values.shape[1], dropout_rate, generator)
    options = {"graph": graph, "slope": slope}
    out, _ = _fused.additive_attention(values, src, dst, edge, **options, **place)
    if not return_attention:
        return out, None
    return out, _weights("additive", values, src, dst, None, edge, graph, slope)


def attend_projected(
    graph, values, src, dst, edge=None, *, slope, dropout_rate, generator, return_attention=False
):
    """Attend additively to the very nodes that attend, or to more that come after them.

    The terms are products of the values with ``src`` and ``dst``, of shape (..., n_heads,
    n_features). The values may have their heads side by side in one axis, as the result then has.
    """
    place = _place(graph, src.shape[-2], dropout_rate, generator)
    options = {"graph": graph, "slope": slope}
    out, _ = _fused.projected_attention(values, src, dst, edge, **options, **place)
    if not return_attention:
        return out, None
    values = _fused.in_heads(values, src)
    src, dst = _fused.head_dots(values, src, dst, graph)
    return out, _weights("additive", values, src, dst, None, edge, graph, slope)


def attend_mlp(
    graph, src, dst, vector, edge=None, *, project, slope, dropout_rate, generator,
    return_attention=False,
):  # fmt: skip
    """Attend to ``src`` by ``vector @ leaky_relu(src[source] + dst[destination] + project(edge))``.

    ``src`` and ``dst`` have shape (n, n_heads, n_features), ``vector`` (n_heads, n_features).
    """
    rows = _rows(graph, src, edge, project)
    if edge is not None and rows is None:

        def score(src, dst, edge):
            total = src + dst + reshape(project(edge), src.shape)
            return sum(leaky_relu(total, negative_slope=slope) * vector, axis=-1)

        logits = _of_edges(graph, score, src, dst, edge)
        out = _by_logits(graph, src, logits, dropout_rate=dropout_rate, generator=generator)
        return out, edge_softmax(graph, logits) if return_attention else None
    place = _place(graph, src.shape[1], dropout_rate, generator)
    out, _ = _fused.mlp_attention(src, dst, vector, rows, graph=graph, slope=slope, **place)
    if not return_attention:
        return out, None
    return out, _weights("mlp", src, None, dst, vector, rows, graph, slope)


def attend_dot(
    graph, query, key, value, edge=None, *, project, dropout_rate, generator, return_attention=False
):
    """Attend with scaled products of queries and keys; ``project(edge)`` is added to the latter.

    It is added to the values too.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    rows = _rows(graph, value, edge, project)
    if edge is None or rows is not None:
        place = _place(graph, value.shape[1], dropout_rate, generator)
        out, _ = _fused.dot_attention(value, key, query, rows, graph=graph, scale=scale, **place)
        if not return_attention:
            return out, None
        return out, _weights("dot", value, key, query, None, rows, graph, scale)

    def score(key, query, edge):
        return sum((key + reshape(project(edge), key.shape)) * query, axis=-1)

    def message(value, _, edge):
        features, weight = edge
        return (value + reshape(project(features), value.shape)) * weight[:, :, None]

    def total(messages, indptr):
        return _messages.reduce_messages("sum", messages, indptr)

    weight = edge_softmax(graph, _of_edges(graph, score, key, query * scale, edge))
    kept = dropout(weight, dropout_rate, generator=generator) if dropout_rate else weight
    return _messages.map_reduce(graph, message, total, value, None, (edge, kept)), weight


def _rows(graph, values, edge, project):
    """Give the features of edges, head by head, if kernels take them and there is room for all."""
    data = raw(values)
    if edge is None or not edge_attention.fits(data):
        return None
    shape = (graph.n_edges, *values.shape[1:])
    if not _edges.has_room(data, math.prod(shape)):
        return None
    return reshape(project(edge), shape)


def _weights(kind, values, src, dst, vector, edge, graph, factor):
    """Give the weights of edges before dropout."""
    arrays = (x if x is None else widen(x) for x in (values, src, dst, vector, edge))
    weight = edge_softmax(graph, _fused.logits_of(kind, *arrays, graph, factor))
    return astype(weight, values.dtype, copy=False)


def _of_edges(graph, message, src, dst, edge):
    """Give what ``message`` gives for each edge, in the order of the edges' numbers."""
    stored = _messages.map_reduce(graph, message, lambda rows, indptr: rows, src, dst, edge)
    return _edges.numbered(stored, graph=graph)
