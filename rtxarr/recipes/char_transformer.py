"""Write like Python's documentation: a transformer that predicts the next character."""

import dataclasses

import numpy as np

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.data import load_topics_text
from rtxarr.data._atomic import atomic_write
from rtxarr.random import Generator
from rtxarr.recipes._config import Config, low_precision, option, precision_option
from rtxarr.recipes._recipe import Recipe as Base


@dataclasses.dataclass(frozen=True)
class CharConfig(Config):
    """Settings."""

    epochs: int = option(10, "an epoch is a number of steps, not a pass over the text", at_least=1)
    steps: int = option(200, "steps of an epoch", at_least=1)
    batch_size: int = option(8, "pieces of text a step", at_least=1)
    context: int = option(64, "characters that a piece has and a prediction sees", at_least=1)
    layers: int = option(2, "transformer blocks", at_least=1)
    width: int = option(96, "features of a character; a multiple of heads", at_least=1)
    heads: int = option(4, "attention heads", at_least=1)
    dropout: float = option(0.0, "in the blocks", at_least=0, below=1)
    lr: float = option(3e-3, "highest learning rate of AdamW", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay of the matrices", at_least=0)
    sample: int = option(400, "characters to write at the end", at_least=0)
    precision: str = precision_option()

    def __post_init__(self):
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads ({self.heads}), got {self.width}")


class CharTransformer(nn.Module):
    """Transformer blocks between an embedding and a linear layer."""

    def __init__(self, n_characters, context, n_layers, width, n_heads, dropout):
        small = nn.initializers.normal(0.02)
        self.characters = nn.Embedding(n_characters, width, weight_init=small)
        self.places = nn.Parameter((context, width), init=small)
        self.blocks = [
            nn.TransformerBlock(width, n_heads, causal=True, dropout=dropout, activation="relu")
            for _ in range(n_layers)
        ]
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, n_characters)

    def forward(self, tokens):
        x = self.characters(tokens) + self.places[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Recipe(Base):
    """Transformer on the characters of Python's help topics."""

    name = "char-transformer"
    fuses = True
    files = ("sample.txt",)
    Config = CharConfig

    def __init__(self, config, *, seed):
        self.config, self.seed = config, seed
        self.text = text = load_topics_text()
        half = len(text.val) // 2
        self.parts = {"train": text.train, "val": text.val[:half], "test": text.val[half:]}
        counts = np.unique(rx.Tensor(text.train).numpy(), return_counts=True)[1]
        shares = counts / counts.sum()
        self.unigram_entropy = -float(np.sum(shares * np.log(shares)))
        self.baselines = {"loss": (self.unigram_entropy, "frequencies alone")}
        sizes = len(text.vocabulary), config.context, config.layers, config.width, config.heads
        self.model = CharTransformer(*sizes, config.dropout)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = optim.AdamW(
            groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.scaler = self.loss_scaler(config)
        n_steps = config.epochs * config.steps
        self.schedule = optim.CosineSchedule(config.lr, n_steps, warmup=n_steps // 10)

    def train_epoch(self, epoch, progress):
        config, text = self.config, self.parts["train"]
        rng = Generator(self.seed, key=epoch)
        self.model.train()
        totals = []
        for step in range(config.steps):
            starts = rng.integers(0, len(text) - config.context, (config.batch_size, 1))
            pieces = text[starts + rx.arange(config.context + 1)]
            self.optimizer.lr = self.schedule(epoch * config.steps + step)
            totals.append(self.captured(self.step)(pieces))
            progress((step + 1) / config.steps)
        return tuple(sum(column) / config.steps for column in zip(*totals, strict=True))

    def step(self, pieces):
        """Make one step of the optimizer; give what :meth:`measure` does."""
        self.optimizer.zero_grad()
        loss, right = self.measure(pieces)
        self.minimize(loss, max_norm=1.0)
        return loss.data, right

    def evaluate(self, part):
        """Measure on pieces that follow each other; each character sees those of its piece."""
        text, length = self.parts[part], self.config.context
        n_pieces = (len(text) - 1) // length
        pieces = text[rx.arange(n_pieces)[:, None] * length + rx.arange(length + 1)]
        self.model.eval()
        loss = right = 0.0
        with rx.no_grad():
            for first in range(0, n_pieces, 64):
                batch = pieces[first : first + 64]
                batch_loss, batch_right = self.captured(self.measure)(batch)
                loss = loss + batch_loss.data * (len(batch) / n_pieces)
                right = right + batch_right * (len(batch) / n_pieces)
        return loss, right

    def measure(self, pieces):
        """Give the mean loss, in nats a character, and the share of characters foretold."""
        with low_precision(self.config.precision):
            logits, wanted = self.model(pieces[:, :-1]), pieces[:, 1:]
            loss = rx.cross_entropy(logits, wanted)
        right = rx.count_nonzero(rx.argmax(logits.data, axis=-1) == wanted)
        return loss, right / wanted.size

    def finish(self, folder):
        written = self.write(self.config.sample)
        with atomic_write(folder / "sample.txt") as file:
            file.write(written.encode())
        return [f"{written}\n", f"frequencies alone give a loss of {self.unigram_entropy:.3f}"]

    def write(self, n_characters, temperature=0.8):
        """Let the model write, character by character."""
        rng = Generator(self.seed, key=self.config.epochs)
        tokens = [self.text.vocabulary.index("\n")]
        self.model.eval()
        with rx.no_grad():
            for _ in range(n_characters):
                seen = rx.asarray([tokens[-self.config.context :]])
                logits = self.model(seen)[0, -1] / temperature
                chances = rx.softmax(rx.astype(logits, rx.float64))
                tokens.append(int(rng.choice(len(self.text.vocabulary), p=chances.numpy())))
        return self.text.decode(tokens[1:])
