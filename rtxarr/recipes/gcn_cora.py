"""Classify the papers of Cora with a two-layer graph convolutional network.

Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2016,
arXiv:1609.02907: table 2 has a test accuracy of 81.5 % on the public split.
"""

import dataclasses

import rtxarr as rx
from rtxarr import geom, nn, optim
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, option, precision_option
from rtxarr.recipes._cora import TOPICS, CoraRecipe
from rtxarr.recipes._explanation_picture import draw_explanation, mixed_node
from rtxarr.recipes._layout import neighbor_layout


@dataclasses.dataclass(frozen=True)
class GCNConfig(Config):
    """Settings; the defaults are those of the paper."""

    epochs: int = option(200, "passes over the graph", at_least=1)
    hidden: int = option(16, "hidden units", at_least=1)
    dropout: float = option(0.5, "share of features and hidden units dropped", at_least=0, below=1)
    lr: float = option(0.01, "learning rate of Adam", above=0)
    weight_decay: float = option(5e-4, "L2 penalty of the first layer's weights", at_least=0)
    schedule: bool = option(False, "warm the learning rate up, then lower it along a cosine")
    precision: str = precision_option()
    explain: int = option(
        -1, "number of the paper that is explained; -1: a test paper among mixed topics",
        at_least=-1, below=2708,
    )  # fmt: skip


class GCN(nn.Module):
    """Two graph convolutions: eq. 9 of the paper, without the softmax."""

    def __init__(self, n_features, n_hidden, n_classes, dropout):
        self.conv1 = geom.GCNConv(n_features, n_hidden)
        self.conv2 = geom.GCNConv(n_hidden, n_classes)
        self.dropout = dropout

    def embed(self, graph, words, pattern):
        """Give the hidden units, shape (n_nodes, n_hidden), for sparse word counts."""
        if self.training:  # a word that is not there needs no dropout
            words = rx.dropout(words, self.dropout)
        x = rx.spmm(words, self.conv1.lin.weight.T, pattern)
        return rx.relu(self.conv1.propagate(graph, x, bias=self.conv1.bias))

    def forward(self, graph, words, pattern):
        x = self.embed(graph, words, pattern)
        if self.training:
            x = rx.dropout(x, self.dropout)
        return self.conv2(graph, x)

    def dense(self, graph, x):
        """Give the logits for words as a dense array."""
        return self.conv2(graph, rx.relu(self.conv1(graph, x)))


class Recipe(CoraRecipe):
    """Graph convolutional network on the Cora citation graph: 2708 papers, 7 topics."""

    name = "gcn-cora"
    fuses = True
    files = ("embedding.png", "explanation.png")
    Config = GCNConfig

    def __init__(self, config, *, seed):
        self.load()
        self.explained = config.explain
        self.model = model = GCN(
            self.cora.n_features, config.hidden, self.cora.n_classes, config.dropout
        )
        first = {"params": [model.conv1.lin.weight], "weight_decay": config.weight_decay}
        rest = {"params": [model.conv1.bias, *model.conv2.parameters()]}
        self.optimizer = optim.Adam([first, rest], lr=config.lr)
        if config.schedule:
            n_steps = config.epochs
            self.schedule = optim.CosineSchedule(config.lr, n_steps, warmup=n_steps // 10)
        self.precision, self.scaler = config.precision, self.loss_scaler(config)

    def finish(self, folder):
        self.model.eval()
        labels, edges = (rx.Tensor(x).numpy() for x in (self.cora.labels, self.cora.edge_index))
        with rx.no_grad():
            hidden = self.model.embed(self.graph, self.words, self.pattern).numpy()
        _pictures.draw_embedding(
            folder / "embedding.png",
            f"Cora: the {hidden.shape[1]} hidden units of each paper, laid out in the plane",
            neighbor_layout(hidden),
            labels,
            TOPICS,
            edges,
        )
        return [self.explain(folder / "explanation.png", labels, edges)]

    def explain(self, path, labels, edges):
        """Draw on which citations the topic of a paper rests, and say what is left without them."""
        words = rx.zeros(self.cora.x_shape, dtype=self.words.dtype)
        words[self.pattern.rows, self.cora.x_indices] = self.words
        chances = self._chances(self.graph, words)
        paper = self.explained
        if paper < 0:
            test = rx.Tensor(self.cora.test).numpy()
            paper = mixed_node(test, edges, labels, chances)
        topic = int(chances[paper].argmax())
        # The words are as they are; papers three citations away count in the degrees alone.
        found = geom.explain(
            self.model.dense, self.graph, words, paper, features=None, n_hops=3, edge_size=0.05
        )
        most = found.top_edges(5)
        kept = rx.zeros(edges.shape[1], dtype=rx.bool)
        kept[most] = True
        whole, alone, rest = (
            100 * float(self._chances(graph, words)[paper, topic])
            for graph in (
                self.graph,
                geom.edge_subgraph(self.graph, kept),
                geom.edge_subgraph(self.graph, ~kept),
            )
        )
        name, truth = TOPICS[topic], TOPICS[labels[paper]]
        draw_explanation(
            path,
            f"Which citations make the network say {name} of paper {paper} ({truth}):\n"
            "the wider a line, the more it counts; the colours are the true topics",
            paper,
            edges,
            rx.Tensor(found.edges).numpy(),
            labels,
            TOPICS,
        )
        return (
            f"paper {paper}: {name} with {whole:.0f} %; by the {len(most)} strongest citations "
            f"alone {alone:.0f} %, without them {rest:.0f} %"
        )

    @rx.no_grad()
    def _chances(self, graph, words):
        return rx.softmax(self.model.dense(graph, words), axis=1).numpy()
