"""Graphs whose messages have factors that can be learned, for explanations of models.

The messages of a layer are what it aggregates: with attention the values times their weights, and
for a message of one's own what :meth:`MessagePassing.message` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rtxarr.geom import _messages
from rtxarr.geom._aggregate import aggregate, edge_softmax, sddmm
from rtxarr.geom._fused import in_heads
from rtxarr.geom._gcn import gcn_norm
from rtxarr.geom._graph import Graph
from rtxarr.geom._loops import looped
from rtxarr.ops import dropout, leaky_relu, reshape, sum, take


class MaskedGraph(Graph):
    """A graph with a factor for the message of each edge; shares what is kept with the other."""

    _base: Graph

    @classmethod
    def of(cls, base: Graph, mask: Any) -> MaskedGraph:
        """Give a graph factors: an array or Tensor of shape (n_edges,), by number."""
        self = cls.__new__(cls)
        self.__dict__.update(base.__dict__)
        self._base = base
        self._keep(mask=mask)
        return self

    @property
    def T(self) -> Graph:  # type: ignore[override]
        return self._base.T  # of values at edges, which have no factors

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        kind = key if isinstance(key, str) else key[0]
        if kind == "looped":
            found = looped(self._base)
            return found._replace(graph=self.of(found.graph, found.weight(self.mask, 1.0)))
        if kind == "gcn_norm":
            _, improved, add_self_loops, dtype = key
            graph, weight = gcn_norm(
                self._base, improved=improved, add_self_loops=add_self_loops, dtype=dtype
            )
            mask = looped(self).graph.mask if add_self_loops else self.mask
            return self.of(graph, mask), weight
        if kind == "by_kind":
            kinds, parts = self._base.once(key, make)
            masks = (self.mask[kinds == i] for i in range(len(parts)))
            return kinds, [self.of(part, mask) for part, mask in zip(parts, masks, strict=True)]
        return self._base.once(key, make)


# ----------------------------------------------------------- attention, as formulas of the edges


def attend_additive(graph, values, src, dst, edge=None, *, slope, **drops):
    """Attend as :func:`rtxarr.geom._attend.attend_additive`."""
    logits = sddmm(graph, src, dst, "add")
    logits = leaky_relu(logits if edge is None else logits + edge, negative_slope=slope)
    return attended(graph, values, None, logits, **drops)


def attend_projected(graph, values, src, dst, edge=None, **options):
    """Attend as :func:`rtxarr.geom._attend.attend_projected`."""
    values = in_heads(values, src)
    src, dst = sum(values * src, axis=-1), sum(values[: graph.n_dst] * dst, axis=-1)
    return attend_additive(graph, values, src, dst, edge, **options)


def attend_mlp(graph, src, dst, vector, edge=None, *, project, slope, **drops):
    """Attend as :func:`rtxarr.geom._attend.attend_mlp`."""
    total = sddmm(graph, src, dst, "add")
    if edge is not None:
        total = total + reshape(project(edge), total.shape)
    logits = sum(leaky_relu(total, negative_slope=slope) * vector, axis=-1)
    return attended(graph, src, None, logits, **drops)


def attend_dot(graph, query, key, value, edge=None, *, project, **drops):
    """Attend as :func:`rtxarr.geom._attend.attend_dot`."""
    query = query * (1 / math.sqrt(query.shape[-1]))
    if edge is None:
        logits = sddmm(graph, key, query)
    else:
        edge = reshape(project(edge), (graph.n_edges, *key.shape[1:]))
        logits = sum(
            (take(key, graph.src, axis=0) + edge) * take(query, graph.dst, axis=0), axis=-1
        )
    return attended(graph, value, edge, logits, **drops)


def attended(
    graph: Graph,
    values: Any,
    edge: Any,
    logits: Any,
    *,
    dropout_rate: float,
    generator: Any,
    return_attention: bool = False,
) -> tuple[Any, Any]:
    """Give the means of the values by logits, to which ``edge`` may be added, and the weights."""
    alpha = edge_softmax(graph, logits)
    weight = dropout(alpha, dropout_rate, generator=generator) if dropout_rate else alpha
    if edge is None:
        return aggregate(graph, values, weight=weight), alpha
    rows = (take(values, graph.src, axis=0) + edge) * weight[:, :, None]
    return total(graph, rows * reshape(graph.mask, (-1, 1, 1))), alpha


def total(graph: Graph, messages: Any) -> Any:
    """Add up the messages of the edges, in the order of their numbers, at each destination."""
    stored = graph.stored(messages)
    return _messages.reduce_messages("sum", stored, graph.indptr)
