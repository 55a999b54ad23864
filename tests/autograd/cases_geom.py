"""Cases of the operations on graphs."""

import functools

import numpy as np

import rtxarr as rx
from rtxarr import geom
from rtxarr.geom import _edges, _fused, _products, _ranks
from rtxarr.geom._projected import projected_rows

rng = np.random.default_rng(11)
# Two edges between the same nodes, one from a node to itself, nodes without edges.
GRAPH = geom.Graph.from_edges(
    np.array([0, 2, 2, 1, 1, 0]), np.array([1, 1, 0, 0, 0, 0]), n_src=4, n_dst=3
)
X = rng.standard_normal((4, 2))
Y = rng.standard_normal((3, 2))
EDGES = rng.standard_normal((6, 2))
HEADS = rng.standard_normal((4, 2, 3))
X3, Y3 = HEADS, rng.standard_normal((3, 2, 3))
KEYS = np.array([[0.0], [1], [2], [3]]), np.array([[2.0], [0], [1]])


def on(x, graph=GRAPH):
    """Give the graph where ``x`` is."""
    return moved(graph, rx.device_of(rx.Tensor(x).data))


@functools.cache  # a step that is recorded moves nothing, and makes nothing that a graph keeps
def moved(graph, device):
    return graph.to_device(device)


@functools.cache
def keys_on(device):
    return [rx.asarray(key, device=device) for key in KEYS]


def matched(values):
    graph = on(values)
    return _edges.matched_sum(values, *keys_on(graph.device), graph=graph)


def shared(whole):
    graph = on(whole)
    return _edges.tie_share(whole, *keys_on(graph.device), graph=graph)


def slopes(x):
    """Give keys of sources and destinations, where ``x`` is."""
    return slopes_on(rx.device_of(rx.Tensor(x).data))


@functools.cache
def slopes_on(device):
    return [rx.asarray(key, device=device) for key in (-X3, Y3)]


def _projected(weight, x, matrix, bias):
    return projected_rows(weight, x, matrix, bias, graph=on(x), keep=True)


# A multigraph of nodes that attend to themselves.
SQUARE = geom.Graph.from_edges(
    np.array([0, 2, 2, 1, 1, 0, 3]), np.array([1, 1, 0, 0, 0, 0, 3]), n_nodes=5
)
X5, SCORES = rng.standard_normal((5, 2, 3)), rng.standard_normal((7, 2))
SRC, DST = rng.standard_normal((4, 2)), rng.standard_normal((3, 2))
EDGES3 = rng.standard_normal((6, 2, 3))
VECTORS = rng.standard_normal((2, 2, 3))
PLACE = {"place": (np.uint64(1), np.uint64(2), np.uint64(3)), "rate": 0.3}


def attention(name, factor, *, graph=GRAPH, **options):
    """Give the function of its arrays that attends over the edges of a graph."""
    operation = getattr(_fused, f"{name}_attention")
    options["scale" if name == "dot" else "slope"] = factor

    def attend(*arrays):
        return operation(*arrays, graph=on(arrays[0], graph), **options)[0]

    return attend


def pointers(x):
    """Give the pointers of segments of messages, where ``x`` is."""
    return pointers_on(rx.device_of(rx.Tensor(x).data))


@functools.cache
def pointers_on(device):
    return rx.asarray(np.array([0, 3, 3, 4, 6]), device=device)


CASES = {
    "additive_attention": [
        (attention("additive", 0.2), (X3, SRC, DST, None)),
        (attention("additive", 0.2, **PLACE), (X3, SRC, DST, EDGES)),
        (attention("additive", 1.0), (X3, None, None, EDGES)),
    ],
    "mlp_attention": [
        (attention("mlp", 0.2), (X3, Y3, VECTORS[0], None)),
        (attention("mlp", 0.2, **PLACE), (X3, Y3, VECTORS[0], EDGES3)),
    ],
    "dot_attention": [
        (attention("dot", 0.5), (X3, -X3, Y3, None)),
        (attention("dot", 0.5, **PLACE), (X3, -X3, Y3, EDGES3)),
    ],
    "projected_attention": [
        (attention("projected", 0.2, graph=SQUARE), (X5, *VECTORS, None)),
        (attention("projected", 0.2), (X3, *VECTORS, None)),
        (attention("projected", 0.2, graph=SQUARE, **PLACE), (X5, *VECTORS, SCORES)),
    ],
    "gather_sum": [(lambda x: on(x) @ x, (X,))],
    "gather_mean": [(lambda x: geom.aggregate(on(x), x, "mean"), (X,))],
    "gather_extremum": [
        (lambda x: geom.aggregate(on(x), x, "max", empty=2.0), (X,)),
        (lambda x: geom.aggregate(on(x), x, "min"), (X,)),
    ],
    "gather_product": [
        (lambda x: geom.aggregate(on(x), x, "mul", empty=2.0), (X,)),
        (lambda x: geom.aggregate(on(x), x * (x > 0), "mul"), (X,)),  # with zeros
    ],
    "gather_ranked": [
        (lambda x: geom.aggregate(on(x), x, "median", empty=2.0), (X,)),
        (lambda x: geom.aggregate(on(x), x, "quantile", q=0.3), (X,)),
    ],
    "segment_product": [
        (lambda x: _products.segment_product(x, pointers(x)), (EDGES,)),
        (lambda x: _products.segment_product(x * (x > 0), pointers(x)), (EDGES3,)),
    ],
    "segment_ranked": [
        (lambda x: _ranks.segment_ranked(x, pointers(x), q=0.5)[0], (EDGES,)),
        (lambda x: _ranks.segment_ranked(x, pointers(x), q=0.3), (EDGES3,)),
    ],
    "gather_var": [(lambda x: geom.aggregate(on(x), x, "var"), (X,))],
    "weighted_sum": [
        (lambda w, x: geom.aggregate(on(x), x, weight=w), (EDGES, HEADS)),
        (lambda w, x: geom.aggregate(on(x), x, "mean", weight=w), (EDGES, X)),
        (lambda w, x: geom.aggregate(on(x), x, weight=w), (EDGES[:, 0], HEADS)),
        (lambda w, x: geom.aggregate(on(x), x, weight=w), (EDGES[:, 0], X)),
    ],
    "biased_sum": [
        (lambda w, x, b: _edges.biased_sum(w, x, b, graph=on(x)), (EDGES[:, 0], X, X[0])),
    ],
    "projected_rows": [
        (lambda w, x, m, b: _projected(w, x, m, b)[0], (EDGES[:, 0], X, EDGES[:3], EDGES[:3, 0])),
        (lambda w, x, m: _projected(w, x, m, None)[0], (EDGES[:, 0], X, EDGES[:3])),
    ],
    "edge_dot": [
        (lambda u, v: geom.sddmm(on(u), u, v), (X, Y)),
        (lambda u, v: geom.sddmm(on(u), u, v), (HEADS, HEADS[:3])),
    ],
    "gated_dot": [
        (lambda a, b: _edges.gated_dot(a, b, *slopes(a), graph=on(a), slope=0.2), (X3, Y3)),
        (lambda b: _edges.gated_dot(None, b, *slopes(b), graph=on(b), slope=0.2), (Y3,)),
    ],
    "gated_sum": [
        (lambda e: _edges.gated_sum(e, *slopes(e), graph=on(e), slope=0.2), (EDGES,)),
    ],
    "spread": [(lambda u, v: geom.sddmm(on(u), u, v, "mul"), (X, Y))],
    "collect": [(lambda x: _edges.collect(x, graph=on(x)), (EDGES,))],
    "numbered": [(lambda x: _edges.numbered(x, graph=on(x)), (EDGES,))],
    "softmax_over_edges": [(lambda x: geom.edge_softmax(on(x), x), (EDGES,))],
    "matched_sum": [(matched, (X[:, :1],))],
    "share_sum": [(lambda x: _edges.share_sum(x, graph=on(x)), (X,))],
    "tie_share": [(shared, (Y[:, :1],))],
    "difference_sum": [(lambda s, a, b: _edges.difference_sum(s, a, b, graph=on(s)), (X, Y, -X))],
}
