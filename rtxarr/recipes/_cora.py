"""What the recipes on the Cora citation graph share: 2708 papers, 7 topics, the public split."""

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.data import load_cora
from rtxarr.recipes._config import low_precision
from rtxarr.recipes._recipe import Recipe

TOPICS = (
    "theory",
    "reinforcement learning",
    "genetic algorithms",
    "neural networks",
    "probabilistic methods",
    "case-based reasoning",
    "rule learning",
)


class CoraRecipe(Recipe):
    """Tells the topics of papers, with a model called as ``model(graph, words, pattern)``.

    ``words`` are the values, at the places of ``pattern``, of the sparse matrix that has a row for
    each paper: each of its words gets the same share. ``read`` gives another citation graph in a
    subclass, ``precision`` that of the products, and ``schedule`` the learning rate of each epoch.
    """

    read = staticmethod(load_cora)
    precision = "float32"
    schedule = None

    def load(self):
        """Read the data onto the current device."""
        self.cora = cora = self.read()
        self.graph = geom.Graph.from_edges(*cora.edge_index, n_nodes=cora.n_nodes)
        self.pattern = rx.SparsityPattern(cora.x_indptr, cora.x_indices, cora.x_shape)
        n_words = rx.segment_sum(cora.x_data, cora.x_indptr)
        self.words = cora.x_data / n_words[self.pattern.rows]
        one_hot = rx.one_hot(cora.labels, cora.n_classes, dtype=rx.float32)
        self.answers, self.targets = {}, {}
        for part in ("train", "val", "test"):
            nodes = getattr(cora, part)
            mask = rx.zeros(cora.n_nodes, dtype=rx.bool)
            mask[nodes] = True
            self.answers[part] = rx.where(mask, cora.labels, -1)
            self.targets[part] = one_hot * mask[:, None] / len(nodes)

    def train_epoch(self, epoch, progress):
        self.model.train()
        if self.schedule is not None:
            self.optimizer.lr = self.schedule(epoch)
        return self.captured(self.step)()

    def step(self):
        """Make one step of the optimizer, over the whole graph; give the loss and accuracy."""
        self.optimizer.zero_grad()
        loss, logits = self.loss("train")
        self.minimize(loss)
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
        with low_precision(self.precision):
            logits = self.model(self.graph, self.words, self.pattern)
            return rx.sum(rx.soft_cross_entropy(logits, self.targets[part])), logits

    def accuracy(self, part, logits):
        return nn.accuracy(logits.data, self.answers[part], ignore_index=-1)
