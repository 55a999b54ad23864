"""Layers against PyTorch: the same weights, outputs and gradients, in float64."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn
from rtxarr.testing import assert_close

pytestmark = pytest.mark.compare


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def copy_weights(layer, theirs, names=None):
    """Randomize our parameters and give the other side the same values, by name or in order."""
    import torch

    ours = dict(layer.named_parameters())
    other = dict(theirs.named_parameters())
    pairs = names or dict(zip(ours, other, strict=True))
    assert set(pairs) == set(ours)
    for seed, (mine, its) in enumerate(pairs.items(), start=1):
        values = draw(*ours[mine].shape, seed=seed) / 2
        ours[mine].assign(values)
        with torch.no_grad():
            other[its].copy_(torch.tensor(values).reshape(other[its].shape))
    return [(ours[mine], other[its]) for mine, its in pairs.items()]


def compare(layer, theirs, *inputs, pairs=None, convert=lambda out: out, **options):
    """Check outputs, and the gradients of a weighted sum of them by inputs and parameters."""
    import torch

    pairs = copy_weights(layer, theirs) if pairs is None else pairs
    mine = [rx.Tensor(x, requires_grad=True) for x in inputs]
    its = [torch.tensor(x, requires_grad=True) for x in inputs]
    got, want = layer(*mine, **options), convert(theirs(*its))
    got, want = (o if isinstance(o, tuple) else (o,) for o in (got, want))
    total, their_total = 0.0, 0.0
    for seed, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(g, w.detach().numpy(), rtol=1e-9, atol=1e-10)
        weights = draw(*g.shape, seed=seed)
        total = total + rx.sum(g * weights)
        their_total = their_total + (w * torch.tensor(weights)).sum()
    total.backward()
    their_total.backward()
    for g, w in [*zip(mine, its, strict=True), *pairs]:
        assert_close(g.grad, w.grad.numpy().reshape(g.shape), rtol=1e-8, atol=1e-9)


FLOAT64 = {"dtype": "float64", "device": "cpu"}


def test_linear():
    import torch

    compare(nn.Linear(3, 5, **FLOAT64), torch.nn.Linear(3, 5, dtype=torch.float64), draw(2, 4, 3))


def test_embedding():
    import torch

    indices = np.array([[0, 3, 3], [2, 2, 0]])
    layer = nn.Embedding(5, 4, padding_index=2, **FLOAT64)
    theirs = torch.nn.Embedding(5, 4, padding_idx=2, dtype=torch.float64)
    ((mine, its),) = copy_weights(layer, theirs)
    weights = draw(2, 3, 4)
    out, want = layer(indices), theirs(torch.tensor(indices))
    assert_close(out, want.detach().numpy())
    rx.sum(out * weights).backward()
    (want * torch.tensor(weights)).sum().backward()
    assert_close(mine.grad, its.grad.numpy())


CONVOLUTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2, "bias": False},
    "grouped": {"groups": 2, "padding": 1},
}


@pytest.mark.parametrize("n_axes", [1, 2, 3])
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(n_axes, options):
    import torch

    layer = getattr(nn, f"Conv{n_axes}d")(4, 6, 3, **options, **FLOAT64)
    theirs = getattr(torch.nn, f"Conv{n_axes}d")(4, 6, 3, **options, dtype=torch.float64)
    compare(layer, theirs, draw(2, 4, *(7, 6, 5)[:n_axes]))


@pytest.mark.parametrize("n_axes", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "dilation": 2}],
    ids=["plain", "strided", "grouped"],
)
def test_transposed_convolutions(n_axes, options):
    import torch

    layer = getattr(nn, f"ConvTranspose{n_axes}d")(4, 6, 3, **options, **FLOAT64)
    theirs = getattr(torch.nn, f"ConvTranspose{n_axes}d")(4, 6, 3, **options, dtype=torch.float64)
    compare(layer, theirs, draw(2, 4, *(4, 3, 3)[:n_axes]))


@pytest.mark.parametrize("n_axes", [1, 2, 3])
def test_pooling(n_axes):
    import torch

    x = draw(2, 3, *(7, 6, 5)[:n_axes])
    for name, ours, theirs in (
        ("MaxPool", {"stride": 2, "padding": 1}, {"stride": 2, "padding": 1}),
        ("AvgPool", {"padding": 1, "count_padding": False}, {"padding": 1}),
        ("AvgPool", {"stride": 1}, {"stride": 1}),
    ):
        if "count_padding" in ours:
            theirs = {**theirs, "count_include_pad": False}
        layer = getattr(nn, f"{name}{n_axes}d")(3, **ours)
        compare(layer, getattr(torch.nn, f"{name}{n_axes}d")(3, **theirs), x, pairs=[])
    layer, theirs = (getattr(m, f"AdaptiveAvgPool{n_axes}d")(2) for m in (nn, torch.nn))
    compare(layer, theirs, x, pairs=[])


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("ReLU", {}, {}),
        ("LeakyReLU", {"negative_slope": 0.2}, {"negative_slope": 0.2}),
        ("ELU", {"alpha": 0.7}, {"alpha": 0.7}),
        ("GELU", {}, {}),
        ("GELU", {"approximate": "tanh"}, {"approximate": "tanh"}),
        ("SiLU", {}, {}),
        ("Mish", {}, {}),
        ("Hardswish", {}, {}),
        ("Softplus", {"beta": 2.0}, {"beta": 2.0}),
        ("Sigmoid", {}, {}),
        ("Tanh", {}, {}),
        ("Softmax", {"axis": 1}, {"dim": 1}),
        ("LogSoftmax", {"axis": -1}, {"dim": -1}),
    ],
)
def test_activations(name, ours, theirs):
    import torch

    layer, other = getattr(nn, name)(**ours), getattr(torch.nn, name)(**theirs)
    compare(layer, other, draw(3, 4, 5), pairs=[])


RECURRENT = {
    "plain": {},
    "deep": {"n_layers": 2},
    "bidirectional": {"n_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
}


def recurrent_pair(name, options):
    import torch

    layer = getattr(nn, name)(3, 4, **options, **FLOAT64)
    options = {{"n_layers": "num_layers"}.get(k, k): v for k, v in options.items()}
    theirs = getattr(torch.nn, name)(3, 4, **options, batch_first=True, dtype=torch.float64)
    names = {}
    for i, directions in enumerate(layer.layers):
        for j, direction in enumerate(directions):
            for parameter, _ in direction.named_parameters():
                suffix = "_reverse" if j else ""
                names[f"layers.{i}.{j}.{parameter}"] = f"{parameter}_l{i}{suffix}"
    return layer, theirs, copy_weights(layer, theirs, names)


def starts(layer, batch):
    """Our first state, and what to give the other side for it."""
    shape = (layer.n_layers * (2 if layer.bidirectional else 1), batch, layer.n_features)
    return [draw(*shape, seed=7 + i) for i in range(2 if isinstance(layer, nn.LSTM) else 1)]


class WithState:
    """Take the parts of a state as separate inputs, and give them as separate outputs."""

    def __init__(self, layer, **options):
        self.layer, self.options = layer, options

    def __call__(self, x, *state):
        out, state = self.layer(x, state if len(state) == 2 else state[0], **self.options)
        return (out, *state) if isinstance(state, tuple) else (out, state)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers(name, options):
    layer, theirs, pairs = recurrent_pair(name, options)
    compare(WithState(layer), WithState(theirs), draw(2, 5, 3), *starts(layer, 2), pairs=pairs)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_with_lengths(name, bidirectional):
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    layer, theirs, pairs = recurrent_pair(name, {"n_layers": 2, "bidirectional": bidirectional})
    lengths = np.array([5, 2, 4])

    class Packed:
        def __call__(self, x, *state):
            x = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
            out, state = theirs(x, state if len(state) == 2 else state[0])
            out, _ = pad_packed_sequence(out, batch_first=True)
            return (out, *state) if isinstance(state, tuple) else (out, state)

    ours = WithState(layer, lengths=lengths)
    compare(ours, Packed(), draw(3, 5, 3), *starts(layer, 3), pairs=pairs)


def test_layer_norm():
    import torch

    theirs = torch.nn.LayerNorm(5, dtype=torch.float64)
    compare(nn.LayerNorm(5, **FLOAT64), theirs, draw(2, 3, 5))


def test_rms_norm():
    import torch

    theirs = torch.nn.RMSNorm(5, eps=1e-6, dtype=torch.float64)
    compare(nn.RMSNorm(5, **FLOAT64), theirs, draw(2, 3, 5))


def test_group_norm():
    import torch

    theirs = torch.nn.GroupNorm(2, 6, dtype=torch.float64)
    compare(nn.GroupNorm(2, 6, **FLOAT64), theirs, draw(3, 6, 4, 5))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)])
def test_batch_norm_and_its_running_averages(shape):
    import torch

    layer = nn.BatchNorm(3, momentum=0.3, **FLOAT64)
    kind = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}[len(shape)]
    theirs = getattr(torch.nn, kind)(3, momentum=0.3, dtype=torch.float64)
    for seed in range(3):
        compare(layer, theirs, draw(*shape, seed=seed) * 2 + 1)
        layer.zero_grad()
        theirs.zero_grad()
    assert_close(layer.running_mean, theirs.running_mean.numpy())
    assert_close(layer.running_var, theirs.running_var.numpy())
    layer.eval()
    theirs.eval()
    compare(layer, theirs, draw(*shape, seed=9))
    assert_close(layer.running_mean, theirs.running_mean.numpy())


class SplitProjections:
    """PyTorch's attention, whose query, key and value weights are one parameter."""

    def __init__(self, theirs, layer, prefix=""):
        import torch

        self.theirs = theirs
        weights, biases = [], []
        for seed, name in enumerate(("query", "key", "value")):
            part = getattr(layer, name)
            part.weight.assign(draw(*part.weight.shape, seed=seed) / 2)
            part.bias.assign(draw(*part.bias.shape, seed=seed + 5))
            weights.append(torch.tensor(part.weight.data))
            biases.append(torch.tensor(part.bias.data))
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.cat(weights))
            theirs.in_proj_bias.copy_(torch.cat(biases))
            theirs.out_proj.weight.copy_(torch.tensor(layer.out.weight.data))
            theirs.out_proj.bias.copy_(torch.tensor(layer.out.bias.data))

    def check_gradients(self, layer):
        parts = [getattr(layer, name) for name in ("query", "key", "value")]
        weights = np.concatenate([p.weight.grad for p in parts])
        biases = np.concatenate([p.bias.grad for p in parts])
        assert_close(weights, self.theirs.in_proj_weight.grad.numpy(), rtol=1e-8, atol=1e-9)
        assert_close(biases, self.theirs.in_proj_bias.grad.numpy(), rtol=1e-8, atol=1e-9)
        out = self.theirs.out_proj
        assert_close(layer.out.weight.grad, out.weight.grad.numpy(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("masked", ["all", "causal", "bool", "added"])
def test_self_attention(masked):
    import torch

    layer = nn.MultiHeadAttention(6, 3, causal=masked == "causal", **FLOAT64)
    theirs = torch.nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    split = SplitProjections(theirs, layer)
    seen = draw(5, 5) > -0.5
    np.fill_diagonal(seen, True)
    ours, its = {
        "all": (None, None),
        "causal": (None, torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)),
        "bool": (seen, torch.tensor(~seen)),
        "added": (draw(5, 5), torch.tensor(draw(5, 5))),
    }[masked]
    x = draw(2, 5, 6)
    compare(
        layer,
        lambda x: theirs(x, x, x, attn_mask=its, need_weights=False)[0],
        x,
        pairs=[],
        attn_mask=ours,
    )
    split.check_gradients(layer)


def test_cross_attention():
    import torch

    layer = nn.MultiHeadAttention(6, 2, **FLOAT64)
    theirs = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    split = SplitProjections(theirs, layer)
    compare(
        layer,
        lambda x, y: theirs(x, y, y, need_weights=False)[0],
        draw(2, 5, 6),
        draw(2, 7, 6, seed=1),
        pairs=[],
    )
    split.check_gradients(layer)


def test_grouped_attention():
    """Two key heads for four query heads: PyTorch's with each key head repeated."""
    import torch

    layer = nn.MultiHeadAttention(8, 4, n_kv_heads=2, context_features=3, **FLOAT64)
    names = ("query", "key", "value", "out")
    theirs = torch.nn.ModuleDict(
        {
            name: torch.nn.Linear(*getattr(layer, name).weight.shape[::-1], dtype=torch.float64)
            for name in names
        }
    )
    pairs = copy_weights(layer, theirs)

    def reference(x, context):
        q = theirs["query"](x).reshape(2, 5, 4, 2).transpose(1, 2)
        k, v = (
            theirs[n](context).reshape(2, 6, 2, 2).transpose(1, 2).repeat_interleave(2, dim=1)
            for n in ("key", "value")
        )
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return theirs["out"](heads.transpose(1, 2).reshape(2, 5, 8))

    compare(layer, reference, draw(2, 5, 8), draw(2, 6, 3, seed=1), pairs=pairs)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_transformer_block(activation):
    import torch

    block = nn.TransformerBlock(8, 2, mlp_ratio=2, activation=activation, causal=True, **FLOAT64)
    theirs = torch.nn.TransformerEncoderLayer(
        8,
        2,
        dim_feedforward=16,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    split = SplitProjections(theirs.self_attn, block.attention)
    names = {
        f"{mine}.{part}": f"{its}.{part}"
        for mine, its in (
            ("norm1", "norm1"),
            ("norm2", "norm2"),
            ("up", "linear1"),
            ("down", "linear2"),
        )
        for part in ("weight", "bias")
    }
    ours, other = dict(block.named_parameters()), dict(theirs.named_parameters())
    for mine, its in names.items():
        with torch.no_grad():
            other[its].copy_(torch.tensor(ours[mine].data))
    hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    compare(
        block,
        lambda x: theirs(x, src_mask=hidden),
        draw(2, 5, 8),
        pairs=[(ours[mine], other[its]) for mine, its in names.items()],
    )
    split.check_gradients(block.attention)
