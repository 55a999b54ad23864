"""Cases of the operations on graphs."""

import numpy as np

import rtxarr as rx
from rtxarr import geom

rng = np.random.default_rng(11)
# Two edges between the same nodes, one from a node to itself, nodes without edges.
GRAPH = geom.Graph.from_edges(
    np.array([0, 2, 2, 1, 1, 0]), np.array([1, 1, 0, 0, 0, 0]), n_src=4, n_dst=3
)
X = rng.standard_normal((4, 2))


def on(x):
    """Give the graph where ``x`` is."""
    return GRAPH.to_device(rx.device_of(rx.Tensor(x).data))


CASES = {
    "_gather_sum": [(lambda x: on(x) @ x, (X,))],
}
