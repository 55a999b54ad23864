"""A training step of the two-layer GCN on Cora, against PyTorch Geometric and plain PyTorch.

The same network, loss and optimizer (1433-16-7, dropout 0.5, Adam) on the same data. A step is
forward, backward and the optimizer's update; nothing is read back to the host. All contestants
take turns in one process: each round times a block of steps of each, with one synchronisation at
the end of the block. Figures are medians over rounds with the lowest and highest round.

``rtxarr`` multiplies by the 49,216 words that are there; the peers by the dense features, as
PyTorch Geometric's own example does.
"""

import argparse
import json
import os
import platform
import statistics
import time

import numpy as np

import rtxarr as rx
from rtxarr.data import load_cora
from rtxarr.recipes import load

LR, DROPOUT, HIDDEN, WEIGHT_DECAY = 0.01, 0.5, 16, 5e-4


class Ours:
    def __init__(self, device):
        self.device = device
        with rx.device(device):
            kind = load("gcn-cora")
            self.recipe = kind(kind.Config(), seed=0)

    def step(self):
        with rx.device(self.device):
            self.recipe.model.train()
            self.recipe.captured(self.recipe.step)()

    def synchronize(self):
        rx.synchronize(self.device)

    def test_accuracy(self):
        with rx.device(self.device):
            return float(self.recipe.evaluate("test")[1])


class Captured(Ours):
    """The same step as one CUDA graph."""

    def __init__(self, device):
        super().__init__(device)
        self.recipe.capture = True


class Torch:
    """Dense features times weights; the normalised adjacency as a sparse matrix."""

    def __init__(self, device):
        import torch

        self.torch, self.device = torch, device
        torch.manual_seed(0)
        self.cora = cora = load_cora(device="cpu")
        x = cora.features()
        self.x = torch.tensor(x / x.sum(axis=1, keepdims=True), device=device)
        self.edge_index = torch.tensor(cora.edge_index, device=device)
        self.labels = torch.tensor(cora.labels, device=device)
        self.train = torch.tensor(cora.train, device=device)
        self.build()

    def build(self):
        torch, n = self.torch, self.cora.n_nodes
        loops = torch.arange(n, device=self.device).expand(2, n)
        edges = torch.cat([self.edge_index, loops], dim=1)
        degree = torch.bincount(edges[1], minlength=n).float()
        values = (degree[edges[0]] * degree[edges[1]]) ** -0.5
        self.adjacency = torch.sparse_coo_tensor(edges.flip(0), values, (n, n)).coalesce()
        sizes = [self.cora.n_features, HIDDEN, self.cora.n_classes]
        self.layers = [
            torch.nn.Linear(a, b, bias=False, device=self.device)
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        ]
        for layer in self.layers:
            torch.nn.init.xavier_uniform_(layer.weight)
        self.biases = [torch.zeros(b, device=self.device, requires_grad=True) for b in sizes[1:]]
        self.make_optimizer([self.layers[0].weight], [self.layers[1].weight, *self.biases])

    def make_optimizer(self, first, rest):
        groups = [{"params": first, "weight_decay": WEIGHT_DECAY}, {"params": rest}]
        self.optimizer = self.torch.optim.Adam(groups, lr=LR)

    def convolve(self, layer, x):
        return self.torch.sparse.mm(self.adjacency, self.layers[layer](x)) + self.biases[layer]

    def forward(self, training):
        dropout = self.torch.nn.functional.dropout
        x = self.torch.relu(self.convolve(0, dropout(self.x, DROPOUT, training)))
        return self.convolve(1, dropout(x, DROPOUT, training))

    def step(self):
        self.optimizer.zero_grad()
        cross_entropy = self.torch.nn.functional.cross_entropy
        loss = cross_entropy(self.forward(True)[self.train], self.labels[self.train])
        loss.backward()
        self.optimizer.step()

    def synchronize(self):
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def test_accuracy(self):
        with self.torch.no_grad():
            guess = self.forward(False).argmax(dim=1).cpu().numpy()
        return float(np.mean((guess == self.cora.labels)[self.cora.test]))


class PyG(Torch):
    """GCNConv with its cache, in eager mode."""

    def build(self):
        from torch_geometric.nn import GCNConv

        sizes = [self.cora.n_features, HIDDEN, self.cora.n_classes]
        self.layers = [
            GCNConv(a, b, cached=True).to(self.device)
            for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        ]
        first, second = self.layers
        self.make_optimizer(list(first.parameters()), list(second.parameters()))

    def convolve(self, layer, x):
        return self.layers[layer](x, self.edge_index)


CONTESTANTS = {
    "rtxarr": Ours,
    "rtxarr captured": Captured,
    "torch-geometric": PyG,
    "torch": Torch,
}


def measure(contestants, rounds, steps):
    """Give, for each contestant, the milliseconds of a step in each round."""
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            contestant.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                contestant.step()
            contestant.synchronize()
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    return times


def bound(device):
    """Give the milliseconds that the step's memory traffic takes at the copy speed measured here.

    Two products with the words' entries and four with the graph's, each reading a value, an index
    and a row of the dense matrix for every entry, and ten passes over the hidden units.
    """
    with rx.device(device):
        x = rx.zeros(2**28 if device != "cpu" else 2**23, dtype=rx.float32)
        y = rx.zeros_like(x)
        seconds = []
        for _ in range(7):
            rx.synchronize(device)
            start = time.perf_counter()
            for _ in range(5):
                y[...] = x
            rx.synchronize(device)
            seconds.append((time.perf_counter() - start) / 5)
        speed = 2 * x.nbytes / statistics.median(seconds)
    n_words, n_edges, n_nodes = 49216, 13264, 2708
    traffic = (2 * n_words + 4 * n_edges) * (12 + 4 * HIDDEN) + 10 * n_nodes * 4 * HIDDEN
    return speed, traffic / speed * 1e3


def versions():
    found = {"python": platform.python_version(), "rtxarr": rx.__version__}
    for name in ("numpy", "scipy", "cupy", "torch", "torch_geometric"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--json", "--out", default=None, help="also write the figures here")
    options = parser.parse_args()
    device = str(rx.device(options.device))
    contestants, missing = {}, []
    for name, kind in CONTESTANTS.items():
        try:
            contestants[name] = kind(device)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    measure(contestants, 1, 200)  # compiles, fills caches, and trains for the accuracy
    accuracies = {name: c.test_accuracy() for name, c in contestants.items()}
    times = measure(contestants, options.rounds, options.steps)
    speed, floor = bound(device)
    print(f"GCN on Cora, training step, {rx.device(device)!r}, {versions()}")
    print(f"memory traffic at the copy speed of {speed / 1e9:.0f} GB/s: {floor:.3f} ms")
    ours = statistics.median(times["rtxarr"])
    figures = {}
    for name, values in times.items():
        middle = statistics.median(values)
        figures[name] = {
            "ms": {"median": middle, "low": min(values), "high": max(values)},
            "ratio_to_rtxarr": middle / ours,
            "test_accuracy_after_200_steps": accuracies[name],
        }
        print(
            f"{name:16} {middle:7.3f} ms ({min(values):.3f} - {max(values):.3f})  "
            f"{middle / ours:5.2f} x rtxarr  200 steps {middle / 5:.2f} s  "
            f"test accuracy {accuracies[name]:.3f}"
        )
    for name in missing:
        print(f"left out: {name}")
    path = options.json or (os.environ.get("OUT") and f"{os.environ['OUT']}/cora_gcn.json")
    if path:
        content = {
            "case": "GCN on Cora, 1433-16-7, training step",
            "device": repr(rx.device(device)),
            "versions": versions(),
            "rounds": options.rounds,
            "steps_of_a_round": options.steps,
            "copy_bytes_per_s": speed,
            "memory_floor_ms": floor,
            "left_out": missing,
            "contestants": figures,
        }
        with open(path, "w") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    main()
