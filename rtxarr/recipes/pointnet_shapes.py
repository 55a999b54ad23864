"""Tell surfaces apart by points on them, with a network that pools over balls of points.

Qi, Yi, Su and Guibas, "PointNet++: deep hierarchical feature learning on point sets in a metric
space", 2017, arXiv:1706.02413; one scale, with the nearest points of a centre as its ball.
"""

import dataclasses

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.data import DataLoader
from rtxarr.random import Generator
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, option
from rtxarr.recipes._recipe import Recipe as Base
from rtxarr.recipes._surfaces import SURFACES, find_balls, sample_surfaces


@dataclasses.dataclass(frozen=True)
class PointNetConfig(Config):
    """Settings."""

    epochs: int = option(5, "passes over the training clouds", at_least=1)
    batch_size: int = option(32, "clouds a step", at_least=2)
    clouds: int = option(3200, "clouds to train on; a quarter as many to test", at_least=16)
    points: int = option(256, "of a cloud", at_least=64)
    noise: float = option(0.02, "standard deviation of the points off the surface", at_least=0)
    width: int = option(32, "features of the first level", at_least=1)
    dropout: float = option(0.3, "share of the last hidden units dropped", at_least=0, below=1)
    lr: float = option(4e-3, "highest learning rate of AdamW", above=0)


class PointNet(nn.Module):
    """Two levels of balls around points far from each other, then the whole cloud as one."""

    def __init__(self, width, dropout, n_classes):
        self.levels = [
            network(3, width, 2 * width),
            network(2 * width + 3, 2 * width, 4 * width),
            network(4 * width + 3, 4 * width, 8 * width),
        ]
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8 * width, n_classes))

    def forward(self, points, balls):
        features = None
        for level, (centres, near) in zip(self.levels, balls, strict=False):
            here = gather(points, centres)
            rows = gather(points, near) - here[:, :, None]
            if features is not None:
                rows = rx.concat([gather(features, near), rows], axis=3)
            features = rx.max(by_rows(level, rows), axis=2)
            points = here
        rows = rx.concat([features, points], axis=2)
        return self.head(rx.max(by_rows(self.levels[-1], rows), axis=1))


def network(n_in, n_hidden, n_out):
    first, second = nn.Linear(n_in, n_hidden), nn.Linear(n_hidden, n_out)
    return nn.Sequential(
        first, nn.BatchNorm(n_hidden), rx.relu, second, nn.BatchNorm(n_out), rx.relu
    )


def by_rows(level, x):
    rows = level(rx.reshape(x, (-1, x.shape[-1])))
    return rx.reshape(rows, (*x.shape[:-1], rows.shape[-1]))


def gather(x, index):
    """Give the rows of each cloud, shape (n_clouds, n, n_features), that ``index`` names."""
    n_clouds, n = x.shape[:2]
    first = rx.reshape(rx.arange(n_clouds) * n, (-1, *(1,) * (index.ndim - 1)))
    flat = rx.reshape(x, (n_clouds * n, x.shape[2]))
    return rx.reshape(rx.take(flat, rx.reshape(index + first, (-1,)), axis=0), (*index.shape, -1))


class Recipe(Base):
    """PointNet++ on points of generated surfaces, turned and stretched: 8 kinds."""

    name = "pointnet-shapes"
    fuses = True
    files = ("clouds.png",)
    Config = PointNetConfig
    stateful = ("model", "optimizer", "loader")

    def __init__(self, config, *, seed):
        self.parts = {}
        for number, (part, share) in enumerate((("train", 1), ("val", 8), ("test", 4))):
            # The same clouds whatever the seed, which is of the training.
            rng = Generator(0, key=number)
            clouds, labels = sample_surfaces(
                config.clouds // share, config.points, rng, noise=config.noise
            )
            here = rx.device()
            points = rx.asarray(clouds, dtype=rx.float32, device=here)
            (a, b), (c, d) = find_balls(points)
            self.parts[part] = points, a, b, c, d, rx.asarray(labels, device=here)
        self.loader = DataLoader(self.parts["train"], config.batch_size, seed=seed, drop_last=True)
        self.model = PointNet(config.width, config.dropout, len(SURFACES))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=0.01)
        n_steps = config.epochs * len(self.loader)
        self.schedule = optim.CosineSchedule(config.lr, n_steps, warmup=len(self.loader) // 2)

    def train_epoch(self, epoch, progress):
        self.model.train()
        n_batches, totals = len(self.loader), []
        for batch, arrays in enumerate(self.loader):
            self.optimizer.lr = self.schedule(epoch * n_batches + batch)
            totals.append(self.captured(self.step)(*arrays))
            progress((batch + 1) / n_batches)
        return tuple(sum(column) / n_batches for column in zip(*totals, strict=True))

    def step(self, *arrays):
        """Make one step of the optimizer; give the mean loss and the accuracy."""
        self.optimizer.zero_grad()
        loss, accuracy = self.measure(*arrays)
        self.minimize(loss)
        return loss.data, accuracy

    def evaluate(self, part):
        self.model.eval()
        with rx.no_grad():
            loss, accuracy = self.captured(self.measure)(*self.parts[part])
        return loss.data, accuracy

    def measure(self, points, a, b, c, d, labels):
        """Give the mean loss and the accuracy."""
        logits = self.model(points, ((a, b), (c, d)))
        return rx.cross_entropy(logits, labels), nn.accuracy(logits, labels)

    def finish(self, folder):
        points, a, b, c, d, labels = self.parts["test"]
        self.model.eval()
        with rx.no_grad():
            chances = rx.softmax(self.model(points, ((a, b), (c, d)))).numpy()
        points, labels = (rx.Tensor(x).numpy() for x in (points, labels))
        _pictures.draw_clouds(folder / "clouds.png", points, labels, chances, tuple(SURFACES))
        guesses = chances.argmax(axis=1)
        right = [np.mean(guesses[labels == i] == i) for i in range(len(SURFACES))]
        worst = int(np.argmin(right))
        return [f"hardest to tell: {tuple(SURFACES)[worst]}, {right[worst]:.3f} right"]
