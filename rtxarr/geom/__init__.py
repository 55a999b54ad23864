"""Graph and geometric learning over the array API."""

from rtxarr.geom._aggregate import aggregate, degree_scalers, edge_softmax, sddmm
from rtxarr.geom._attend import attend
from rtxarr.geom._batch import Batch, to_dense_adj, to_dense_batch
from rtxarr.geom._chunks import EdgeChunks, from_chunks, open_graph
from rtxarr.geom._convert import (
    from_cudf,
    from_cugraph,
    from_dgl,
    from_networkx,
    from_pyg,
    from_scipy,
    to_cudf,
    to_cugraph,
    to_networkx,
    to_pyg,
    to_scipy,
)
from rtxarr.geom._datasets import GraphSet, load_karate, load_mutag, read_dgcnn
from rtxarr.geom._decoders import ComplEx, DistMult, DotDecoder, MLPDecoder, RotatE, TransE
from rtxarr.geom._encodings import degree_features, laplacian_encoding
from rtxarr.geom._explain import Explanation, explain
from rtxarr.geom._gat import GATConv, GATv2Conv, TransformerConv
from rtxarr.geom._gcn import GCNConv, gcn_norm
from rtxarr.geom._gin import EdgeConv, GINConv, GINEConv
from rtxarr.geom._graph import Graph
from rtxarr.geom._hetero import HeteroConv, HeteroGraph
from rtxarr.geom._hetero_sampling import HeteroNeighborSampler, HeteroSample
from rtxarr.geom._inference import LocalExchange, PartitionedGraph, Shard, infer_layerwise
from rtxarr.geom._jumping import JumpingKnowledge
from rtxarr.geom._layer import load_arrays
from rtxarr.geom._links import LinkSample, LinkSampler, negative_destinations
from rtxarr.geom._loader import HeteroNeighborLoader, LinkLoader, NeighborLoader
from rtxarr.geom._message_passing import MessagePassing
from rtxarr.geom._metrics import auc, average_precision, hits_at_k, mrr
from rtxarr.geom._norms import GraphLayerNorm, GraphNorm, InstanceNorm, PairNorm
from rtxarr.geom._plan import Plan, PlannedStep, plan
from rtxarr.geom._pna import PNAConv
from rtxarr.geom._point_layers import DynamicEdgeConv, PointNetSetAbstraction
from rtxarr.geom._point_transforms import (
    center_points,
    drop_points,
    flip_points,
    jitter_points,
    normalize_points,
    rotate_points,
    sample_points,
    scale_points,
    shear_points,
    translate_points,
)
from rtxarr.geom._points import (
    Neighbors,
    Voxels,
    WithinRadius,
    chamfer_distance,
    estimate_normals,
    farthest_point_sampling,
    knn,
    knn_graph,
    radius,
    radius_graph,
    voxel_grid,
)
from rtxarr.geom._pooling import (
    SAGPooling,
    Set2Set,
    TopKPooling,
    global_attention,
    global_max,
    global_mean,
    global_sum,
)
from rtxarr.geom._rgcn import RGCNConv
from rtxarr.geom._rmat import RMATEdges
from rtxarr.geom._sage import GraphConv, SAGEConv
from rtxarr.geom._sampling import LaborSampler, NeighborSampler, Sample
from rtxarr.geom._spectral import APPNP, ChebConv, SGConv
from rtxarr.geom._splits import (
    Links,
    LinkSplit,
    negative_sampling,
    random_link_split,
    random_node_split,
)
from rtxarr.geom._stream import aggregate_streamed
from rtxarr.geom._subgraph import before, edge_subgraph, k_hop, subgraph
from rtxarr.geom._subsampling import ClusterSampler, SaintSampler, partition
from rtxarr.geom._temporal import TemporalSample, TemporalSampler
from rtxarr.geom._transforms import (
    add_self_loops,
    coalesce,
    connected_components,
    largest_component,
    line_graph,
    remove_self_loops,
    to_undirected,
)
from rtxarr.geom._views import Edge, Node
from rtxarr.geom._walks import random_walk

__all__ = [
    "APPNP",
    "Batch",
    "ChebConv",
    "ClusterSampler",
    "ComplEx",
    "DistMult",
    "DotDecoder",
    "DynamicEdgeConv",
    "Edge",
    "EdgeChunks",
    "EdgeConv",
    "Explanation",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "Graph",
    "GraphConv",
    "GraphLayerNorm",
    "GraphNorm",
    "GraphSet",
    "HeteroConv",
    "HeteroGraph",
    "HeteroNeighborLoader",
    "HeteroNeighborSampler",
    "HeteroSample",
    "InstanceNorm",
    "JumpingKnowledge",
    "LaborSampler",
    "LinkLoader",
    "LinkSample",
    "LinkSampler",
    "LinkSplit",
    "Links",
    "LocalExchange",
    "MLPDecoder",
    "MessagePassing",
    "NeighborLoader",
    "NeighborSampler",
    "Neighbors",
    "Node",
    "PNAConv",
    "PairNorm",
    "PartitionedGraph",
    "Plan",
    "PlannedStep",
    "PointNetSetAbstraction",
    "RGCNConv",
    "RMATEdges",
    "RotatE",
    "SAGEConv",
    "SAGPooling",
    "SGConv",
    "SaintSampler",
    "Sample",
    "Set2Set",
    "Shard",
    "TemporalSample",
    "TemporalSampler",
    "TopKPooling",
    "TransE",
    "TransformerConv",
    "Voxels",
    "WithinRadius",
    "add_self_loops",
    "aggregate",
    "aggregate_streamed",
    "attend",
    "auc",
    "average_precision",
    "before",
    "center_points",
    "chamfer_distance",
    "coalesce",
    "connected_components",
    "degree_features",
    "degree_scalers",
    "drop_points",
    "edge_softmax",
    "edge_subgraph",
    "estimate_normals",
    "explain",
    "farthest_point_sampling",
    "flip_points",
    "from_chunks",
    "from_cudf",
    "from_cugraph",
    "from_dgl",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "gcn_norm",
    "global_attention",
    "global_max",
    "global_mean",
    "global_sum",
    "hits_at_k",
    "infer_layerwise",
    "jitter_points",
    "k_hop",
    "knn",
    "knn_graph",
    "laplacian_encoding",
    "largest_component",
    "line_graph",
    "load_arrays",
    "load_karate",
    "load_mutag",
    "mrr",
    "negative_destinations",
    "negative_sampling",
    "normalize_points",
    "open_graph",
    "partition",
    "plan",
    "radius",
    "radius_graph",
    "random_link_split",
    "random_node_split",
    "random_walk",
    "read_dgcnn",
    "remove_self_loops",
    "rotate_points",
    "sample_points",
    "scale_points",
    "sddmm",
    "shear_points",
    "subgraph",
    "to_cudf",
    "to_cugraph",
    "to_dense_adj",
    "to_dense_batch",
    "to_networkx",
    "to_pyg",
    "to_scipy",
    "to_undirected",
    "translate_points",
    "voxel_grid",
]
