"""Graph and geometric learning over the array API."""

from rtxarr.geom._aggregate import aggregate, attend, degree_scalers, edge_softmax, sddmm
from rtxarr.geom._batch import Batch, to_dense_adj, to_dense_batch
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroConv, HeteroGraph
from rtxarr.geom._pooling import (
    SAGPooling,
    Set2Set,
    TopKPooling,
    global_attention,
    global_max,
    global_mean,
    global_sum,
)
from rtxarr.geom._sampling import LaborSampler, NeighborSampler, Sample
from rtxarr.geom._subgraph import before, edge_subgraph, k_hop, subgraph

__all__ = [
    "Batch",
    "Graph",
    "HeteroConv",
    "HeteroGraph",
    "LaborSampler",
    "NeighborSampler",
    "SAGPooling",
    "Sample",
    "Set2Set",
    "TopKPooling",
    "aggregate",
    "attend",
    "before",
    "degree_scalers",
    "edge_softmax",
    "edge_subgraph",
    "global_attention",
    "global_max",
    "global_mean",
    "global_sum",
    "k_hop",
    "sddmm",
    "subgraph",
    "to_dense_adj",
    "to_dense_batch",
]
