"""A training step of the two-layer GAT on Cora, against PyTorch Geometric; as ``cora_gcn.py``.

The network of the paper (1433-8x8-7, dropout 0.6 of inputs and attention, Adam). ``rtxarr``
multiplies by the words that are there, PyTorch Geometric by the dense features, as in its example.
"""

import argparse
import json
import statistics

from cora_gcn import PyG, measure, versions

import rtxarr as rx
from rtxarr.recipes import load

HIDDEN, HEADS, DROPOUT, LR, WEIGHT_DECAY = 8, 8, 0.6, 0.005, 5e-4


class Ours:
    capture = False

    def __init__(self, device):
        self.device = device
        with rx.device(device):
            kind = load("gat-cora")
            self.recipe = kind(kind.Config(), seed=0)
            self.recipe.capture = self.capture

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

    capture = True


class Theirs(PyG):
    """GATConv in eager mode."""

    def build(self):
        from torch_geometric.nn import GATConv

        n_in, n_out = self.cora.n_features, self.cora.n_classes
        self.layers = self.torch.nn.ModuleList(
            [
                GATConv(n_in, HIDDEN, heads=HEADS, dropout=DROPOUT),
                GATConv(HEADS * HIDDEN, n_out, dropout=DROPOUT),
            ]
        ).to(self.device)
        self.optimizer = self.torch.optim.Adam(
            self.layers.parameters(), lr=LR, weight_decay=WEIGHT_DECAY
        )

    def forward(self, training):
        self.layers.train(training)
        functional = self.torch.nn.functional
        x = self.convolve(0, functional.dropout(self.x, DROPOUT, training))
        return self.convolve(1, functional.dropout(functional.elu(x), DROPOUT, training))


CONTESTANTS = {"rtxarr": Ours, "rtxarr captured": Captured, "torch-geometric": Theirs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    device = str(rx.device(options.device))
    contestants = {}
    for name, kind in CONTESTANTS.items():
        try:
            contestants[name] = kind(device)
        except ImportError as error:
            print(f"left out: {name} ({error})")
    measure(contestants, 1, 200)  # compiles, fills caches, and trains for the accuracy
    accuracies = {name: c.test_accuracy() for name, c in contestants.items()}
    times = measure(contestants, options.rounds, options.steps)
    print(f"GAT on Cora, training step, {rx.device(device)!r}, {versions()}")
    ours, figures = statistics.median(times["rtxarr"]), {}
    for name, values in times.items():
        middle = statistics.median(values)
        figures[name] = {
            "ms": {"median": middle, "low": min(values), "high": max(values)},
            "ratio_to_rtxarr": middle / ours,
            "test_accuracy_after_200_steps": accuracies[name],
        }
        print(
            f"{name:16} {middle:7.3f} ms ({min(values):.3f} - {max(values):.3f})  "
            f"{middle / ours:5.2f} x rtxarr  test accuracy {accuracies[name]:.3f}"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"versions": versions(), "contestants": figures}, file, indent=1)


if __name__ == "__main__":
    main()
