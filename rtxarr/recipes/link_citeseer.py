"""Predict which papers of Citeseer cite each other with a graph autoencoder.

Kipf and Welling, "Variational Graph Auto-Encoders", 2016, arXiv:1611.07308: table 1 has an AUC of
89.5 % and an average precision of 89.9 % for the autoencoder without noise.
"""

import dataclasses

import rtxarr as rx
from rtxarr import geom, nn, optim
from rtxarr.data import load_citeseer
from rtxarr.random import Generator
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, option
from rtxarr.recipes._recipe import Recipe as Base


@dataclasses.dataclass(frozen=True)
class LinkConfig(Config):
    """Settings; the defaults are those of the paper, but for dropout and half of the epochs."""

    epochs: int = option(100, "steps, each over all edges and as many other pairs", at_least=1)
    hidden: int = option(32, "hidden units", at_least=1)
    out: int = option(16, "numbers that stand for a paper", at_least=1)
    dropout: float = option(0.5, "share of words and hidden units dropped", at_least=0, below=1)
    lr: float = option(0.01, "learning rate of Adam", above=0)


class Encoder(nn.Module):
    """Two graph convolutions: eq. 3 of the paper."""

    def __init__(self, n_words, config):
        self.lin = nn.Parameter((n_words, config.hidden), init="xavier_uniform")
        self.conv = geom.GCNConv(config.hidden, config.out)
        self.dropout = config.dropout

    def forward(self, graph, words, pattern):
        if self.training:  # a word that is not there needs no dropout
            words = rx.dropout(words, self.dropout)
        x = rx.relu(self.conv.propagate(graph, rx.spmm(words, self.lin, pattern)))
        if self.training:
            x = rx.dropout(x, self.dropout)
        return self.conv(graph, x)


score = geom.DotDecoder()  # eq. 2 of the paper, before the sigmoid


class Recipe(Base):
    """Graph autoencoder on Citeseer: which of 5.5 million pairs of papers have a citation.

    5 % of the 4552 citations are kept for validation and 10 % for testing, with as many other
    pairs, the same for all seeds. The AUC is how often the citation of a citation and another pair
    is told.
    """

    name = "link-citeseer"
    fuses = True
    metric = "AUC"
    files = ("scores.png",)
    Config = LinkConfig

    def __init__(self, config, *, seed):
        self.seed = seed
        papers = load_citeseer()
        self.pattern = rx.SparsityPattern(papers.x_indptr, papers.x_indices, papers.x_shape)
        squares = rx.segment_sum(papers.x_data**2, papers.x_indptr)
        self.words = papers.x_data / rx.sqrt(squares)[self.pattern.rows]
        known = geom.Graph.from_edges(*papers.edge_index, n_nodes=papers.n_nodes)
        self.split = geom.random_link_split(
            known, val=0.05, test=0.1, undirected=True, generator=Generator(0)
        )
        self.model = Encoder(papers.n_features, config)
        self.optimizer = optim.Adam(self.model.parameters(), lr=config.lr)

    def encode(self):
        return self.model(self.split.graph, self.words, self.pattern)

    def train_epoch(self, epoch, progress):
        self.model.train()
        negative = geom.negative_sampling(
            self.split.graph,
            self.split.train.shape[1],
            undirected=True,
            generator=Generator(self.seed, key=epoch),
        )
        loss, scores = self.captured(self.step)(negative)
        return loss, geom.auc(*scores)

    def step(self, negative):
        """Make one step of the optimizer; give the loss, and the logits of both kinds of pairs."""
        self.optimizer.zero_grad()
        loss, scores = self.loss(self.encode(), self.split.train, negative)
        loss.backward()
        self.optimizer.step()
        return loss.data, scores

    def evaluate(self, part):
        self.model.eval()
        loss, scores = self.captured(self.measure)(part)
        return loss, geom.auc(*scores)

    @rx.no_grad()
    def measure(self, part):
        """Give the loss, and the logits of both kinds of pairs, of a part."""
        pairs = getattr(self.split, part)
        loss, scores = self.loss(self.encode(), pairs.positive, pairs.negative)
        return rx.Tensor(loss).data, scores

    def loss(self, z, positive, negative):
        """Give the mean cross entropy of the logits, and these."""
        scores = score(z, positive), score(z, negative)
        ones, zeros = rx.ones_like(scores[0]), rx.zeros_like(scores[1])
        logits, labels = rx.concat(scores), rx.concat([ones, zeros])
        loss = nn.binary_cross_entropy_with_logits(logits, labels)
        return loss, [rx.Tensor(x).data for x in scores]

    def finish(self, folder):
        self.model.eval()
        _, (positive, negative) = self.measure("test")
        chances = [rx.Tensor(rx.sigmoid(x)).numpy() for x in (positive, negative)]
        title = "Citeseer: the citations kept for testing, and as many other pairs"
        _pictures.draw_scores(folder / "scores.png", title, *chances)
        hits = (f"hits@{k} {geom.hits_at_k(positive, negative, k):.3f}" for k in (10, 50, 100))
        return [
            f"AUC {geom.auc(positive, negative):.3f}, average precision "
            f"{geom.average_precision(positive, negative):.3f}",
            f"MRR {geom.mrr(positive, negative):.3f}, {', '.join(hits)} among "
            f"{len(negative)} other pairs",
        ]
