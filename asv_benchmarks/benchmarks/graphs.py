"""Graphs: making them, aggregation, layers, samplers and neighbours in space."""

import numpy as np

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator

# Nodes, edges and features, for the CPU and for a GPU.
SIZES = {"cpu": (20_000, 200_000, 32), "cuda:0": (1 << 20, 1 << 24, 128)}
DEVICES = list(SIZES)


def random_graph(device):
    """Give a graph with the degrees of a power law, and features."""
    if device not in map(str, rx.devices()):
        raise NotImplementedError(f"needs {device}")
    n_nodes, n_edges, n_features = SIZES[device]
    rng = np.random.default_rng(0)
    src = rng.integers(0, n_nodes, n_edges)
    dst = (n_nodes * rng.random(n_edges) ** 3).astype("int64")
    x = rng.standard_normal((n_nodes, n_features)).astype("float32")
    src, dst, x = (rx.asarray(a, device=device) for a in (src, dst, x))
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes), rx.Tensor(x, requires_grad=True)


class Making:
    """A graph of a list of edges, the graph turned round, and one of chunks."""

    params = [DEVICES]
    param_names = ["device"]

    def setup(self, device):
        graph, _ = random_graph(device)
        self.ends, self.n_nodes = (graph.src, graph.dst), graph.n_nodes
        self.chunks = geom.EdgeChunks(*self.ends, size=1 << 20)

    def time_from_edges(self, device):
        geom.Graph.from_edges(*self.ends, n_nodes=self.n_nodes)
        rx.synchronize(device)

    def time_from_edges_and_turn(self, device):
        _ = geom.Graph.from_edges(*self.ends, n_nodes=self.n_nodes).T
        rx.synchronize(device)

    def time_from_chunks(self, device):
        geom.from_chunks(self.chunks, n_nodes=self.n_nodes, device=device)
        rx.synchronize(device)


class Layers:
    """One call, and one call with the gradients of the input and of all parameters."""

    LAYERS = {
        "sum": lambda n: lambda graph, x: graph @ x,
        "max": lambda n: lambda graph, x: geom.aggregate(graph, x, "max"),
        "GCNConv": lambda n: geom.GCNConv(n, n),
        "SAGEConv": lambda n: geom.SAGEConv(n, n),
        "GATConv": lambda n: geom.GATConv(n, n // 4, heads=4),
        "GATv2Conv": lambda n: geom.GATv2Conv(n, n // 4, heads=4),
    }
    params = [list(LAYERS), DEVICES]
    param_names = ["layer", "device"]
    timeout = 300

    def setup(self, name, device):
        self.graph, self.x = random_graph(device)
        with rx.device(device):
            self.layer = self.LAYERS[name](self.x.shape[1])
        self.ones = rx.ones_like(self.layer(self.graph, self.x).data)
        self.time_forward_backward(name, device)

    def time_forward(self, name, device):
        with rx.no_grad():
            self.layer(self.graph, self.x)
        rx.synchronize(device)

    def time_forward_backward(self, name, device):
        self.x.grad = None
        self.layer(self.graph, self.x).backward(self.ones)
        rx.synchronize(device)


class Samplers:
    """Batches of 512 seeds in bulk, and walks of ten steps."""

    params = [["neighbor", "labor", "walk"], DEVICES]
    param_names = ["sampler", "device"]

    def setup(self, name, device):
        self.graph, _ = random_graph(device)
        n = 4096 if device == "cpu" else 65_536
        self.seeds = Generator(0).integers(0, self.graph.n_nodes, n, device=device)
        kinds = {"neighbor": geom.NeighborSampler, "labor": geom.LaborSampler}
        self.sampler = kinds[name](self.graph, [10, 5]) if name in kinds else None
        self.time_sample(name, device)

    def time_sample(self, name, device):
        if self.sampler is None:
            geom.random_walk(self.graph, self.seeds, 10, p=2.0, q=0.5)
        else:
            self.sampler.bulk(self.seeds, 512)
        rx.synchronize(device)


class Points:
    """Neighbours of each point of a cloud in space."""

    params = [["knn", "radius", "fps"], DEVICES]
    param_names = ["search", "device"]

    def setup(self, name, device):
        if device not in map(str, rx.devices()):
            raise NotImplementedError(f"needs {device}")
        n = 10_000 if device == "cpu" else 1_000_000
        x = np.random.default_rng(0).random((n, 3), dtype=np.float32)
        self.x, self.r = rx.asarray(x, device=device), float((12 / n) ** (1 / 3) / 2)
        self.time_search(name, device)

    def time_search(self, name, device):
        if name == "knn":
            geom.knn(self.x, 16)
        elif name == "radius":
            geom.radius(self.x, self.r)
        else:
            geom.farthest_point_sampling(self.x, 256)
        rx.synchronize(device)
