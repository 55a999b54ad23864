"""Which edges and features a model's answer rests on: GNNExplainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from rtxarr import _device
from rtxarr.autograd._engine import gradients
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import is_floating
from rtxarr.geom._graph import Graph
from rtxarr.geom._masks import MaskedGraph
from rtxarr.geom._subgraph import iota, k_hop, subgraph
from rtxarr.nn import Module, Parameter
from rtxarr.ops import argmax, log, log_softmax, sigmoid, sum, where
from rtxarr.optim import Adam
from rtxarr.random import Generator

__all__ = ["Explanation", "explain"]

_FEATURES = ("common", "each", "nodes", None)
_TINY = 1e-15


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found.

    Attributes
    ----------
    edges : array of the dtype of ``x``, shape (n_edges,)
        How much the answer rests on each edge, in [0, 1], in the order of their numbers; 0 for
        those that have no part in it.
    features : array, shape (n_features,), (n_nodes, n_features), (n_nodes,), or None
        The same for features, as ``kind`` says.
    kind : {"common", "each", "nodes", None}
    row, target : int
        What was explained: the row of the model's output, and the class.
    losses : tuple of float
        Of each step.
    """

    edges: Any
    features: Any
    kind: str | None
    row: int
    target: int
    losses: tuple[float, ...]

    def __repr__(self) -> str:
        n_edges = int(_device.namespace(self.edges).count_nonzero(self.edges))
        return f"Explanation(class {self.target} of row {self.row} by {n_edges} edges)"

    def top_edges(self, n: int) -> Any:
        """Give the numbers of the ``n`` edges of most weight, or of all that have any."""
        return _top(self.edges, n)

    def top_features(self, n: int) -> Any:
        """Give the numbers of the ``n`` features of most weight, on average over the nodes."""
        if self.kind not in ("common", "each"):
            raise ValueError(f"features must have been explained one by one, got {self.kind!r}")
        xp = _device.namespace(self.features)
        return _top(self.features if self.kind == "common" else xp.mean(self.features, axis=0), n)


def _top(weights, n):
    xp = _device.namespace(weights)
    order = xp.argsort(-weights, stable=True)[:n]
    return order[xp.take(weights, order) > 0]


def explain(
    model: Callable[[Graph, Any], Any],
    graph: Graph,
    x: Any,
    row: int,
    *,
    target: int | None = None,
    features: str | None = "common",
    n_hops: int | None = None,
    n_steps: int = 200,
    lr: float = 0.01,
    edge_size: float = 0.005,
    edge_entropy: float = 1.0,
    feature_size: float = 1.0,
    feature_entropy: float = 0.1,
    generator: Generator | None = None,
) -> Explanation:
    """Find the few edges and features that a model needs to give its answer.

    Messages and features get factors between 0 and 1, and these are learned so that the answer
    stays likely while they are small and near 0 or 1.

    Parameters
    ----------
    model : callable
        Called as ``model(graph, x)``; gives logits of shape (n_rows, n_classes), a row for each
        node or each graph. Any layers of this package in it, also one's own of
        :class:`MessagePassing`, multiply the messages of ``graph`` with the factors. A module is
        called as in evaluation.
    graph : Graph
    x : array of a floating dtype, shape (n_nodes, n_features)
    row : int
        Row of the output to be explained: a node's number.
    target : int, default the most likely class
    features : {"common", "each", "nodes", None}, default "common"
        One factor for each feature, the same at all nodes; for each feature of each node; for each
        node; or none.
    n_hops : int, optional
        Look only at what is so many steps or less from node ``row``, which is faster. With as many
        as the model has layers, and one more where weights depend on the degrees of sources, as in
        :class:`GCNConv`, the answer is the same.
    n_steps : int, default 200
    lr : float, default 0.01
        Of Adam.
    edge_size, edge_entropy, feature_size, feature_entropy : float
        Weights of the sum of the edges' factors, the mean of their entropies, the mean of the
        features' factors, and that of their entropies.
    generator : Generator, default one with seed 0
        For the first values.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError
        When no edge has an influence on the answer, although some end at the node.

    Notes
    -----
    Loops that a layer adds keep the factor 1. Edges and features without any influence, by their
    gradient in the first step, are left out.

    References
    ----------
    Ying, Bourgeois, You, Zitnik and Leskovec, "GNNExplainer: Generating Explanations for Graph
    Neural Networks", 2019, arXiv:1903.03894, eq. 5 to 7 and section 4.2.

    Examples
    --------
    >>> import numpy as np
    >>> from rtxarr import geom
    >>> graph = geom.Graph.from_edges(np.array([1, 2]), np.array([0, 0]), n_nodes=3)
    >>> x = np.array([[0.0], [9.0], [0.1]])
    >>> def model(graph, x):  # class 1 where the neighbours add up to more than 1
    ...     return (graph @ x - 1) * np.array([-1.0, 1.0])
    >>> found = geom.explain(model, graph, x, 0)
    >>> found.target, found.top_edges(1)
    (1, array([0]))
    """
    data = raw(x)
    if features not in _FEATURES:
        raise ValueError(f"features must be 'common', 'each', 'nodes' or None, got {features!r}")
    if not _device.is_array(data) or not is_floating(data.dtype) or data.ndim != 2:
        raise TypeError(
            f"x must be a floating-point array of shape (n_nodes, n_features), got {x!r}"
        )
    if data.shape[0] != graph.n_src:
        raise ValueError(f"x must have a row for each of {graph.n_src} nodes, got {data.shape}")
    modules = list(model.modules()) if isinstance(model, Module) else []
    modes = [module.training for module in modules]
    weights = _Weights(edge_size, edge_entropy, feature_size, feature_entropy)
    try:
        for module in modules:
            module.training = False
        part = _Part(graph, data, row) if n_hops is None else _around(graph, data, row, n_hops)
        learned = _Factors(model, part, target, features, generator or Generator(0), weights, lr)
        losses = [learned.step() for _ in range(n_steps)]
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    edges, found = learned.values()
    edges = part.spread(edges, part.numbers, graph.n_edges)
    if features in ("each", "nodes"):
        found = part.spread(found, part.nodes, data.shape[0])
    # Read here, so that no step waits for a GPU.
    losses = _device.namespace(*losses).stack(losses).tolist() if losses else []
    return Explanation(edges, found, features, row, learned.target, tuple(losses))


class _Weights(NamedTuple):
    """Of the parts of the loss."""

    edge_size: float
    edge_entropy: float
    feature_size: float
    feature_entropy: float


class _Part:
    """What the model is called with, and where its nodes and edges are in the whole graph."""

    def __init__(self, graph, x, row, nodes=None, numbers=None):
        self.graph, self.x, self.row = graph, x, row
        self.nodes, self.numbers = nodes, numbers
        _ = graph.T, graph.src, graph.dst  # made once, for all steps

    def spread(self, values, places, n):
        """Give the values of this part among those of the whole graph, which are 0."""
        if places is None:
            return values
        out = _device.namespace(values).zeros((n, *values.shape[1:]), dtype=values.dtype)
        out[places] = values
        return out


def _around(graph, x, row, n_hops):
    """Give the part within some steps of a node, with the edges in their order."""
    xp = _device.namespace(graph.indptr)
    nodes, _ = k_hop(graph, iota(graph, 1) + row, n_hops)
    nodes = xp.sort(nodes)
    place = xp.full_like(graph.in_degrees, -1)
    place[nodes] = xp.cumulative_sum(xp.ones_like(nodes)) - 1
    inside = xp.take(place >= 0, graph.src) & xp.take(place >= 0, graph.dst)
    (numbers,) = xp.nonzero(inside)
    part = subgraph(graph, nodes)
    return _Part(part, xp.take(x, nodes, axis=0), int(place[row]), nodes, numbers)


class _Factors:
    """The factors of edges and features, before the sigmoid, and the loss that they minimise."""

    def __init__(self, model, part, target, kind, generator, weights, lr):
        self.model, self.part, self.kind, self.weights = model, part, kind, weights
        n, n_features = part.x.shape
        shapes = {"common": (n_features,), "each": (n, n_features), "nodes": (n, 1), None: (0,)}
        with _device.device_of(part.x):
            # As wide as He's initialization of a layer with two weights for each node.
            deviation = (2.0 / max(n, 1)) ** 0.5
            edges = generator.normal(part.graph.n_edges, dtype=part.x.dtype) * deviation
            features = generator.normal(shapes[kind], dtype=part.x.dtype) * 0.1
        self.parameters = [Parameter(edges), Parameter(features)]
        self.optimizer = Adam(self.parameters, lr=lr)
        logits = raw(model(part.graph, part.x))
        if logits.ndim != 2 or not 0 <= part.row < logits.shape[0]:
            raise ValueError(
                "row must be one of the model's output, of shape (n_rows, n_classes), got "
                f"{part.row} and shape {tuple(logits.shape)}"
            )
        self.target = int(argmax(logits[part.row])) if target is None else int(target)
        if not 0 <= self.target < logits.shape[1]:
            raise ValueError(f"target must lie in [0, {logits.shape[1]}), got {self.target}")
        self._leave_out(is_node=logits.shape[0] == part.graph.n_dst)

    def _leave_out(self, is_node):
        """Find what has an influence."""
        xp = _device.namespace(self.part.x)
        self.kept = [xp.ones(p.shape, dtype=xp.bool) for p in self.parameters]
        _, grads = self._differentiate(self._surprise)
        self.kept = [
            xp.zeros(p.shape, dtype=xp.bool) if g is None else g != 0
            for p, g in zip(self.parameters, grads, strict=True)
        ]
        self.counts = [max(int(xp.count_nonzero(kept)), 1) for kept in self.kept]
        has_edges = is_node and int(self.part.graph.in_degrees[self.part.row]) > 0
        if has_edges and not bool(xp.any(self.kept[0])):
            raise ValueError(
                "the model must send messages along the graph that it is called with: no edge has "
                "an influence on the answer"
            )

    def _differentiate(self, function):
        """Give the value, and gradients of the factors alone: not of the model's parameters."""
        value = function(*self.parameters)
        return value.data, gradients([value], self.parameters)

    def _used(self, edges, features):
        """Give the factors: 0 for what is left out."""
        pairs = zip(self.kept, (edges, features), strict=True)
        return [where(kept, sigmoid(value), 0 * raw(value)) for kept, value in pairs]

    def _surprise(self, edges, features):
        """Give the negative log-likelihood of the answer."""
        edges, features = self._used(edges, features)
        x = self.part.x if self.kind is None else self.part.x * features
        logits = self.model(MaskedGraph.of(self.part.graph, edges), x)
        return -log_softmax(logits[self.part.row], axis=-1)[self.target]

    def _loss(self, edges, features):
        loss, weights = self._surprise(edges, features), self.weights
        edges, features = self._used(edges, features)
        n_edges, n_features = self.counts
        loss = loss + weights.edge_size * sum(edges)
        loss = loss + weights.edge_entropy * sum(_entropy(edges)) / n_edges
        loss = loss + weights.feature_size * sum(features) / n_features
        return loss + weights.feature_entropy * sum(_entropy(features)) / n_features

    def step(self):
        loss, grads = self._differentiate(self._loss)
        for parameter, g in zip(self.parameters, grads, strict=True):
            parameter.grad = g
        self.optimizer.step()
        return loss

    def values(self):
        edges, features = self._used(*(p.data for p in self.parameters))
        if self.kind is None:
            return edges, None
        return edges, features[:, 0] if self.kind == "nodes" else features


def _entropy(x):
    """Give the entropy of a factor taken as a chance; 0 at 0 and 1."""
    return -x * log(x + _TINY) - (1 - x) * log(1 - x + _TINY)
