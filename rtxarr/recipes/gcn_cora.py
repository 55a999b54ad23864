"""Classify the papers of Cora with a two-layer graph convolutional network.

Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2016,
arXiv:1609.02907: table 2 has a test accuracy of 81.5 % on the public split.
"""

import dataclasses

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.data import load_cora
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, option
from rtxarr.recipes._layout import neighbor_layout
from rtxarr.recipes._recipe import Recipe as Base

TOPICS = (
    "theory",
    "reinforcement learning",
    "genetic algorithms",
    "neural networks",
    "probabilistic methods",
    "case-based reasoning",
    "rule learning",
)


@dataclasses.dataclass(frozen=True)
class GCNConfig(Config):
    """Settings; the defaults are those of the paper."""

    epochs: int = option(200, "passes over the graph", at_least=1)
    hidden: int = option(16, "hidden units", at_least=1)
    dropout: float = option(0.5, "share of features and hidden units dropped", at_least=0, below=1)
    lr: float = option(0.01, "learning rate of Adam", above=0)
    weight_decay: float = option(5e-4, "L2 penalty of the first layer's weights", at_least=0)


class GCN(nn.Module):
    """Two graph convolutions: eq. 9 of the paper, without the softmax.

    ``graph`` and ``weights`` are what :func:`normalized_adjacency` gives.
    """

    def __init__(self, graph, weights, n_features, n_hidden, n_classes, dropout):
        self.graph, self.weights = graph, weights
        self.dropout = dropout
        self.weight1 = nn.Parameter((n_features, n_hidden), init="xavier_uniform")
        self.bias1 = nn.Parameter((n_hidden,), init="zeros")
        self.weight2 = nn.Parameter((n_hidden, n_classes), init="xavier_uniform")
        self.bias2 = nn.Parameter((n_classes,), init="zeros")

    def embed(self, words, pattern):
        """Give the hidden units, shape (n_nodes, n_hidden), for sparse word counts."""
        if self.training:  # a word that is not there needs no dropout
            words = rx.dropout(words, self.dropout)
        x = rx.spmm(words, self.weight1, pattern)
        return rx.relu(rx.spmm(self.weights, x, self.graph) + self.bias1)

    def forward(self, words, pattern):
        x = self.embed(words, pattern)
        if self.training:
            x = rx.dropout(x, self.dropout)
        return rx.spmm(self.weights, x @ self.weight2, self.graph) + self.bias2


def normalized_adjacency(edge_index, n_nodes):
    """Give ``D^-1/2 (A + I) D^-1/2`` as a pattern and its values (section 3.1 of the paper)."""
    loops = rx.stack([rx.arange(n_nodes)] * 2)
    edges = rx.concat([edge_index, loops], axis=1)
    src, dst = edges[:, rx.argsort(edges[1], stable=True)]
    indptr = rx.searchsorted(dst, rx.arange(n_nodes + 1))
    degree = rx.astype(rx.diff(indptr), rx.float32)
    values = 1 / rx.sqrt(degree[src] * degree[dst])
    return rx.SparsityPattern(indptr, src, (n_nodes, n_nodes)), values


class Recipe(Base):
    """Graph convolutional network on the Cora citation graph: 2708 papers, 7 topics."""

    name = "gcn-cora"
    files = ("embedding.png",)
    Config = GCNConfig

    def __init__(self, config, *, seed):
        self.cora = cora = load_cora()
        self.pattern = rx.SparsityPattern(cora.x_indptr, cora.x_indices, cora.x_shape)
        n_words = rx.segment_sum(cora.x_data, cora.x_indptr)
        self.words = cora.x_data / n_words[self.pattern.rows]
        one_hot = rx.one_hot(cora.labels, cora.n_classes, dtype=rx.float32)
        self.masks, self.targets, self.sizes = {}, {}, {}
        for part in ("train", "val", "test"):
            nodes = getattr(cora, part)
            mask = rx.zeros(cora.n_nodes, dtype=rx.bool)
            mask[nodes] = True
            self.masks[part], self.sizes[part] = mask, len(nodes)
            self.targets[part] = one_hot * mask[:, None] / len(nodes)
        graph, weights = normalized_adjacency(cora.edge_index, cora.n_nodes)
        self.model = GCN(
            graph, weights, cora.n_features, config.hidden, cora.n_classes, config.dropout
        )
        first = {"params": [self.model.weight1], "weight_decay": config.weight_decay}
        rest = {"params": [self.model.bias1, self.model.weight2, self.model.bias2]}
        self.optimizer = optim.Adam([first, rest], lr=config.lr)

    def train_epoch(self, epoch, progress):
        self.model.train()
        return self.captured(self.step)()

    def step(self):
        """Make one step of the optimizer, over the whole graph; give the loss and accuracy."""
        self.optimizer.zero_grad()
        loss, logits = self.loss("train")
        loss.backward()
        self.optimizer.step()
        return loss.data, self.accuracy("train", logits)

    def evaluate(self, part):
        self.model.eval()
        return self.captured(self.measure)(part)

    @rx.no_grad()
    def measure(self, part):
        """Give the loss and the accuracy over the nodes of a part."""
        loss, logits = self.loss(part)
        return loss.data, self.accuracy(part, logits)

    def loss(self, part):
        """Give the mean cross entropy over the nodes of a part, and the logits of all nodes."""
        logits = self.model(self.words, self.pattern)
        return rx.sum(rx.soft_cross_entropy(logits, self.targets[part])), logits

    def accuracy(self, part, logits):
        right = (rx.argmax(logits.data, axis=1) == self.cora.labels) & self.masks[part]
        return rx.count_nonzero(right) / self.sizes[part]

    def finish(self, folder):
        self.model.eval()
        with rx.no_grad():
            hidden = self.model.embed(self.words, self.pattern).numpy()
        _pictures.draw_embedding(
            folder / "embedding.png",
            f"Cora: the {hidden.shape[1]} hidden units of each paper, laid out in the plane",
            neighbor_layout(hidden),
            rx.Tensor(self.cora.labels).numpy(),
            TOPICS,
            rx.Tensor(self.cora.edge_index).numpy(),
        )
        return []
