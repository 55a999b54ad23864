"""Tell mutagenic compounds from others with graph isomorphism networks, in ten folds at once.

Xu et al., "How Powerful are Graph Neural Networks?", 2018, arXiv:1810.00826: table 1 has an
accuracy of 89.4 % for GIN-0, with a standard deviation of 5.6 % between folds.
"""

import dataclasses

import numpy as np

import rtxarr as rx
from rtxarr import geom, nn, optim
from rtxarr.random import Generator
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, option
from rtxarr.recipes._layout import distance_layout
from rtxarr.recipes._recipe import Recipe as Base

ELEMENTS = ("Br", "Cl", "C", "F", "I", "N", "O")


@dataclasses.dataclass(frozen=True)
class GINConfig(Config):
    """Settings; the defaults are among those that the paper tries, but for fewer epochs."""

    epochs: int = option(100, "passes over the training graphs of each fold", at_least=1)
    batch_size: int = option(32, "graphs a step", at_least=2)
    hidden: int = option(32, "hidden units", at_least=1)
    layers: int = option(4, "graph layers", at_least=1)
    dropout: float = option(0.5, "share of a layer's class scores dropped", at_least=0, below=1)
    lr: float = option(0.01, "learning rate of Adam at the start", above=0)
    halve_every: int = option(50, "epochs after which the learning rate is halved", at_least=1)


class GIN(nn.Module):
    """Graph isomorphism network; the classes' scores add up over all layers (section 4.2)."""

    def __init__(self, n_features, n_classes, config):
        widths = [n_features, *config.layers * [config.hidden]]
        self.convs = [
            geom.GINConv(
                nn.Sequential(
                    nn.Linear(n, config.hidden),
                    nn.BatchNorm(config.hidden),
                    rx.relu,
                    nn.Linear(config.hidden, config.hidden),
                )
            )
            for n in widths[:-1]
        ]
        self.norms = [nn.BatchNorm(config.hidden) for _ in self.convs]
        self.heads = [nn.Linear(n, n_classes) for n in widths]
        self.dropout = config.dropout

    def forward(self, batch, x):
        scores = self.heads[0](geom.global_sum(x, batch.ptr))
        for conv, norm, head in zip(self.convs, self.norms, self.heads[1:], strict=True):
            x = rx.relu(norm(conv(batch, x)))
            score = head(geom.global_sum(x, batch.ptr))
            scores = scores + (rx.dropout(score, self.dropout) if self.training else score)
        return scores


class Recipe(Base):
    """Graph isomorphism networks on MUTAG: 188 compounds, 10-fold cross-validation.

    As in the paper, validation and test are both the mean over the test parts of the ten folds, at
    the epoch at which that is best.
    """

    name = "gin-mutag"
    files = ("compounds.png",)
    Config = GINConfig
    read = staticmethod(geom.load_mutag)

    def __init__(self, config, *, seed):
        self.config, self.seed = config, seed
        self.mutag = mutag = self.read()
        self.model = nn.Module()
        self.model.networks = [GIN(mutag.n_tags, mutag.n_classes, config) for _ in mutag.folds]
        self.optimizer = optim.Adam(self.model.parameters(), lr=config.lr)
        self.tests = [self.inputs(test) for _, test in mutag.folds]

    def inputs(self, indices):
        """Give some graphs as a batch, and their atoms' elements as ones among zeros."""
        batch = self.mutag.batch(indices)
        return batch, rx.one_hot(batch.nodes["tag"], self.mutag.n_tags, dtype=rx.float32)

    def train_epoch(self, epoch, progress):
        self.model.train()
        size, folds = self.config.batch_size, self.mutag.folds
        self.optimizer.lr = self.config.lr * 0.5 ** (epoch // self.config.halve_every)
        generators = [Generator(self.seed, key=(epoch, fold)) for fold in range(len(folds))]
        orders = [g.permutation(train) for g, (train, _) in zip(generators, folds, strict=True)]
        measured, longest = [], max(map(len, orders))
        for start in range(0, longest - 1, size):
            # One step of all networks: none has a part in another's loss.
            self.optimizer.zero_grad()
            parts = [order[start : start + size] for order in orders]
            found = [
                self.measure(network, *self.inputs(part))
                for network, part in zip(self.model.networks, parts, strict=True)
                if len(part) > 1  # one cannot be normalised
            ]
            rx.sum(rx.stack([loss for loss, _ in found])).backward()
            self.optimizer.step()
            measured += [(loss.data, right) for loss, right in found]
            progress(min((start + size) / longest, 1.0))
        return means(measured)

    @rx.no_grad()
    def evaluate(self, part):
        self.model.eval()
        pairs = zip(self.model.networks, self.tests, strict=True)
        return means([self.measure(network, *inputs) for network, inputs in pairs])

    def measure(self, network, batch, x):
        """Give the mean cross entropy and the accuracy over the graphs of a batch."""
        logits, labels = network(batch, x), batch.graph["label"]
        return nn.cross_entropy(logits, labels), nn.accuracy(logits, labels)

    @rx.no_grad()
    def finish(self, folder):
        self.model.eval()
        rights, rows = [], []
        for network, (batch, x) in zip(self.model.networks, self.tests, strict=True):
            chances = rx.Tensor(rx.softmax(network(batch, x), axis=1)).numpy()
            labels = rx.Tensor(batch.graph["label"]).numpy()
            rights.append((chances.argmax(axis=1) == labels).mean())
            rows += list(zip(batch.unbatch(), labels, chances[:, 1], strict=True))
        rows.sort(key=lambda row: abs(row[2] - row[1]), reverse=True)
        compounds = []
        for graph, label, chance in rows[:18]:
            bonds, atoms = rx.stack([graph.src, graph.dst]), graph.nodes["tag"]
            bonds, atoms = rx.Tensor(bonds).numpy(), rx.Tensor(atoms).numpy()
            compounds.append((distance_layout(bonds), bonds, atoms, label, chance))
        _pictures.draw_compounds(folder / "compounds.png", compounds, ELEMENTS)
        mean, deviation = np.mean(rights), np.std(rights)
        return [f"accuracy {mean:.3f}, standard deviation {deviation:.3f} between folds"]


def means(measured):
    """Average losses and accuracies, each on its own."""
    columns = zip(*measured, strict=True)
    return tuple(rx.mean(rx.stack([rx.Tensor(x).data for x in column])) for column in columns)
