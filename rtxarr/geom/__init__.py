"""Graph and geometric learning over the array API."""

from rtxarr.geom._aggregate import aggregate, degree_scalers, edge_softmax, sddmm
from rtxarr.geom._attend import attend
from rtxarr.geom._batch import Batch, to_dense_adj, to_dense_batch
from rtxarr.geom._convert import (
    from_cudf,
    from_cugraph,
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
    to_cugraph,
    to_networkx,
    to_pyg,
    to_scipy,
)
from rtxarr.geom._encodings import degree_features, laplacian_encoding
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroConv, HeteroGraph
from rtxarr.geom._links import LinkSample, LinkSampler, negative_destinations
from rtxarr.geom._loader import NeighborLoader
from rtxarr.geom._message_passing import MessagePassing
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
from rtxarr.geom._subsampling import ClusterSampler, SaintSampler, partition
from rtxarr.geom._transforms import (
    add_self_loops,
    coalesce,
    connected_components,
    largest_component,
    line_graph,
    remove_self_loops,
    to_undirected,
)
from rtxarr.geom._walks import random_walk

__all__ = [
    "Batch",
    "ClusterSampler",
    "Graph",
    "HeteroConv",
    "HeteroGraph",
    "LaborSampler",
    "LinkSample",
    "LinkSampler",
    "MessagePassing",
    "NeighborLoader",
    "NeighborSampler",
    "SAGPooling",
    "SaintSampler",
    "Sample",
    "Set2Set",
    "TopKPooling",
    "add_self_loops",
    "aggregate",
    "attend",
    "before",
    "coalesce",
    "connected_components",
    "degree_features",
    "degree_scalers",
    "edge_softmax",
    "edge_subgraph",
    "from_cudf",
    "from_cugraph",
    "from_dgl",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "global_attention",
    "global_max",
    "global_mean",
    "global_sum",
    "k_hop",
    "laplacian_encoding",
    "largest_component",
    "line_graph",
    "negative_destinations",
    "partition",
    "random_walk",
    "remove_self_loops",
    "sddmm",
    "subgraph",
    "to_cugraph",
    "to_dense_adj",
    "to_dense_batch",
    "to_networkx",
    "to_pyg",
    "to_scipy",
    "to_undirected",
]
