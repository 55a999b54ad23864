"""Modules through ``rx.fuse``: results, gradients and buffers are the tape's."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn

from .fused import BACKENDS, assert_same

EDGES = np.array([[0, 1, 2, 3, 3, 4, 0], [1, 0, 1, 2, 4, 3, 4]])


def graph():
    return geom.Graph.from_edges(*EDGES, n_nodes=5)


def data(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


MODULES = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "embedding": (lambda: nn.Embedding(6, 3), np.array([0, 5, 5, 2])),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), (5, 4)),
    "activations": (
        lambda: nn.Sequential(
            nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Mish(), nn.ELU(), nn.Softplus(), nn.LeakyReLU()
        ),
        (5, 4),
    ),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax()), (5, 4)),
    "layer_norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "rms_norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "batch_norm": (lambda: nn.BatchNorm(4), (6, 4)),
    "batch_norm_2d": (lambda: nn.BatchNorm(3), (2, 3, 4, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 5, 5)),
    "conv_transpose": (lambda: nn.ConvTranspose1d(2, 3, 3), (2, 2, 5)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)), (1, 2, 8, 8)),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d(2), (1, 2, 5, 7)),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(36, 2),
        ),
        (2, 1, 8, 8),
    ),
    "attention": (lambda: nn.MultiHeadAttention(8, 2), (2, 5, 8)),
    "transformer": (lambda: nn.TransformerBlock(8, 2), (2, 5, 8)),
    "lstm": (lambda: nn.LSTM(3, 4), (2, 5, 3)),
    "gru": (lambda: nn.GRU(3, 4), (2, 5, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5)), (5, 4)),
}  # fmt: skip

LAYERS = {
    "gcn": lambda: geom.GCNConv(4, 3),
    "sage": lambda: geom.SAGEConv(4, 3),
    "gin": lambda: geom.GINConv(nn.Linear(4, 3)),
    "gat": lambda: geom.GATConv(4, 3, heads=2),
    "gatv2": lambda: geom.GATv2Conv(4, 3, heads=2),
    "transformer": lambda: geom.TransformerConv(4, 3, heads=2),
    "cheb": lambda: geom.ChebConv(4, 3, k=2),
    "appnp": lambda: geom.APPNP(k=2),
    "graph_conv": lambda: geom.GraphConv(4, 3),
}


def outcome(model, apply, *args, rounds=2):
    """Give results, gradients and buffers of some calls."""
    found = []
    for _ in range(rounds):
        out = apply(*args)
        out = out[0] if isinstance(out, tuple) else out
        total = rx.sum(out * np.cos(np.arange(out.size, dtype="float32")).reshape(out.shape))
        if total.requires_grad:
            total.backward()
        found.append(out.data)
    found += [p.grad for p in model.parameters()]
    found += [x.grad for x in args if isinstance(x, rx.Tensor) and x.requires_grad]
    return found + [b.data for b in model.buffers()]


def made(make):
    rx.random.seed(3)
    with rx.device("cpu"):
        return make()


@pytest.mark.parametrize("backend", BACKENDS, ids=["interpreter", "kernels"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, training, backend):
    make, shape = MODULES[name]
    found = []
    for fused in (False, True):
        model = made(make)
        model.train() if training else model.eval()
        if isinstance(shape, tuple):
            x = rx.Tensor(data(*shape), requires_grad=True)
        else:
            x = shape
        apply = rx.fuse(model, backend=backend) if fused else model
        found.append(outcome(model, apply, x))
        assert not fused or apply.n_eager == 0, apply.reasons
    assert_same(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS, ids=["interpreter", "kernels"])
@pytest.mark.parametrize("name", LAYERS)
def test_graph_layers(name, backend):
    found = []
    for fused in (False, True):
        model, g = made(LAYERS[name]), graph()
        x = rx.Tensor(data(5, 4), requires_grad=True)
        apply = rx.fuse(model, backend=backend) if fused else model
        found.append(outcome(model, apply, g, x))
        assert not fused or apply.n_eager == 0, apply.reasons
    assert_same(found[1], found[0])


def test_losses():
    logits, labels = data(6, 4), np.array([0, 3, 1, 1, 2, 0])
    target = data(6, 4)
    losses = [
        lambda x: nn.cross_entropy(x, labels),
        lambda x: nn.cross_entropy(x, labels, label_smoothing=0.1),
        lambda x: nn.mse_loss(x, target),
        lambda x: nn.huber_loss(x, target),
        lambda x: nn.l1_loss(x, target),
        lambda x: nn.binary_cross_entropy_with_logits(x, (target > 0).astype("float32")),
        lambda x: nn.nll_loss(rx.log_softmax(x), labels),
        lambda x: nn.kl_div(rx.log_softmax(x), rx.softmax(rx.asarray(target))),
    ]
    for loss in losses:
        fused = rx.fuse(loss, backend="interpreter")
        assert_same(rx.value_and_grad(fused)(logits), rx.value_and_grad(loss)(logits))
        assert fused.n_eager == 0, fused.reasons
        assert_same(rx.value_and_grad(rx.fuse(loss))(logits), rx.value_and_grad(loss)(logits))
