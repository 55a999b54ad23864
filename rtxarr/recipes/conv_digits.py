"""Recognise handwritten digits of 8x8 pixels with a small convolutional network."""

import dataclasses

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.data import DataLoader, load_digits
from rtxarr.recipes import _pictures
from rtxarr.recipes._config import Config, low_precision, option, precision_option
from rtxarr.recipes._recipe import Recipe as Base


@dataclasses.dataclass(frozen=True)
class DigitsConfig(Config):
    """Settings."""

    epochs: int = option(30, "passes over the training images", at_least=1)
    batch_size: int = option(64, "images a step", at_least=1)
    channels: int = option(32, "of the first convolution; the second has twice as many", at_least=1)
    dropout: float = option(0.3, "share of the last hidden units dropped", at_least=0, below=1)
    lr: float = option(3e-3, "highest learning rate of AdamW", above=0)
    weight_decay: float = option(0.01, "decoupled weight decay", at_least=0)
    precision: str = precision_option()


class DigitNet(nn.Sequential):
    """Two convolutions, each followed by pooling, then a linear layer."""

    def __init__(self, channels, dropout, n_classes):
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            rx.relu,
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            rx.relu,
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * 2 * 2, n_classes),
        )


class Recipe(Base):
    """Convolutional network on 1797 handwritten digits of 8x8 pixels."""

    name = "conv-digits"
    fuses = True
    files = ("digits.png",)
    Config = DigitsConfig
    stateful = ("model", "optimizer", "loader")

    def __init__(self, config, *, seed):
        self.precision = config.precision
        digits = load_digits()
        images = rx.astype(digits.images[:, None], rx.float32) / 8 - 1  # ink from -1 to 1
        self.parts = {
            part: (images[indices], digits.labels[indices])
            for part, indices in (
                ("train", digits.train),
                ("val", digits.val),
                ("test", digits.test),
            )
        }
        self.loader = DataLoader(self.parts["train"], config.batch_size, seed=seed)
        self.model = DigitNet(config.channels, config.dropout, digits.n_classes)
        self.optimizer = optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.scaler = self.loss_scaler(config)
        n_steps = config.epochs * len(self.loader)
        self.schedule = optim.CosineSchedule(config.lr, n_steps, warmup=len(self.loader) // 2)

    def train_epoch(self, epoch, progress):
        self.model.train()
        n_batches, totals = len(self.loader), []
        for batch, (images, labels) in enumerate(self.loader):
            self.optimizer.lr = self.schedule(epoch * n_batches + batch)
            totals.append(self.captured(self.step)(images, labels))
            progress((batch + 1) / n_batches)
        loss, right = (sum(column) for column in zip(*totals, strict=True))
        return loss / self.loader.n_samples, right / self.loader.n_samples

    def step(self, images, labels):
        """Make one step of the optimizer; give the loss, summed, and how many were right."""
        self.optimizer.zero_grad()
        loss, right = self.measure(images, labels)
        self.minimize(loss)
        return loss.data * len(labels), right

    def evaluate(self, part):
        images, labels = self.parts[part]
        self.model.eval()
        with rx.no_grad():
            loss, right = self.captured(self.measure)(images, labels)
        return loss.data, right / len(labels)

    def measure(self, images, labels):
        """Give the mean loss, and how many were right."""
        with low_precision(self.precision):
            logits = self.model(images)
            loss = rx.cross_entropy(logits, labels)
        return loss, n_right(logits, labels)

    def finish(self, folder):
        images, labels = self.parts["test"]
        self.model.eval()
        with rx.no_grad():
            chances = rx.softmax(self.model(images)).numpy()
        _pictures.draw_guesses(
            folder / "digits.png",
            rx.Tensor(images).numpy()[:, 0],
            rx.Tensor(labels).numpy(),
            chances,
        )
        return []


def n_right(logits, labels):
    """Count the samples whose largest logit is that of their label."""
    return rx.count_nonzero(rx.argmax(logits.data, axis=-1) == labels)
