"""Attention over the edges that end at a node: composed here, one function for each score.

A kernel that makes scores, softmax and sum in one pass takes the place of the body of
:func:`attend_additive`, :func:`attend_mlp` or :func:`attend_dot`.
"""

import math
from collections.abc import Callable
from typing import Any

from rtxarr.autograd import stop_gradient
from rtxarr.geom import _edges, _messages
from rtxarr.geom._aggregate import aggregate, edge_softmax, sddmm
from rtxarr.ops import dropout, leaky_relu, reshape, sum

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

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=2)
    >>> values = np.array([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> geom.attend(graph, values, np.zeros((2, 1)))[1]
    array([[2., 3.]])
    """
    weight = _dropped(edge_softmax(graph, logits), dropout_rate, generator)
    return aggregate(graph, values, weight=weight)


def _dropped(weight, rate, generator):
    return dropout(weight, rate, generator=generator) if rate else weight


def attend_additive(graph, values, src, dst, edge=None, *, slope, dropout_rate, generator):
    """Attend with the scores of GAT; gives the weights before dropout too."""
    weight = edge_softmax(graph, additive_logits(graph, src, dst, edge, slope=slope))
    return aggregate(graph, values, weight=_dropped(weight, dropout_rate, generator)), weight


def additive_logits(graph, src, dst, edge=None, *, slope):
    """Give ``leaky_relu(src[source] + dst[destination] + edge)``, all of shape (n, n_heads)."""
    logits = sddmm(graph, src, dst, "add")
    return leaky_relu(logits if edge is None else logits + edge, negative_slope=slope)


def attend_mlp(graph, src, dst, vector, edge=None, *, project, slope, dropout_rate, generator):
    """Attend with the scores of GATv2 to ``src``; gives the weights before dropout too."""
    logits = mlp_logits(graph, src, dst, vector, edge, project=project, slope=slope)
    weight = edge_softmax(graph, logits)
    return aggregate(graph, src, weight=_dropped(weight, dropout_rate, generator)), weight


def mlp_logits(
    graph: Any, src: Any, dst: Any, vector: Any, edge: Any, *, project: Callable, slope: float
) -> Any:
    """Give ``vector @ leaky_relu(src[source] + dst[destination] + project(edge))``.

    ``src`` and ``dst`` have shape (n, n_heads, n_features), ``vector`` (n_heads, n_features).
    """
    if edge is None:
        keys = stop_gradient(src), stop_gradient(dst)  # the slopes are constant
        return _edges.gated_dot(src * vector, dst * vector, *keys, graph=graph, slope=slope)

    def message(src, dst, edge):
        total = src + dst + reshape(project(edge), src.shape)
        return sum(leaky_relu(total, negative_slope=slope) * vector, axis=-1)

    return _of_edges(graph, message, src, dst, edge)


def attend_dot(graph, query, key, value, edge=None, *, project, dropout_rate, generator):
    """Attend with scaled products of queries and keys; gives the weights before dropout too.

    ``project(edge)`` is added to keys and values.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    query = query * scale
    if edge is None:
        weight = edge_softmax(graph, sddmm(graph, key, query))
        return aggregate(graph, value, weight=_dropped(weight, dropout_rate, generator)), weight

    def score(key, query, edge):
        return sum((key + reshape(project(edge), key.shape)) * query, axis=-1)

    def message(value, _, edge):
        features, weight = edge
        return (value + reshape(project(features), value.shape)) * weight[:, :, None]

    def total(messages, indptr):
        return _messages.reduce_messages("sum", messages, indptr)

    weight = edge_softmax(graph, _of_edges(graph, score, key, query, edge))
    kept = _dropped(weight, dropout_rate, generator)
    return _messages.map_reduce(graph, message, total, value, None, (edge, kept)), weight


def _of_edges(graph, message, src, dst, edge):
    """Give what ``message`` gives for each edge, in the order of the edges' numbers."""
    stored = _messages.map_reduce(graph, message, lambda rows, indptr: rows, src, dst, edge)
    return _edges.numbered(stored, graph=graph)
