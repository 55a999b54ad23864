"""Layers: shapes, modes, text, bad arguments, and gradients by their parameters."""

import math
import re
from functools import partial

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import nn, optim
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck

FLOAT64 = {"dtype": "float64", "device": "cpu"}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def check_gradients(layer, *inputs, **options):
    """Compare the gradients by inputs and parameters with differences."""
    names, values = zip(*layer.named_parameters(), strict=True)
    n = len(inputs)

    def call(*arrays):
        parameters = dict(zip(names, arrays[n:], strict=True))
        return nn.functional_call(layer, parameters, *arrays[:n], **options)

    gradcheck(call, [*inputs, *(np.array(v.data) for v in values)])


LENGTHS = np.array([3, 1])
LAYERS = {
    "Linear": (lambda: nn.Linear(3, 2, **FLOAT64), (draw(4, 3),), {}),
    "Conv2d": (lambda: nn.Conv2d(2, 2, 2, padding="same", **FLOAT64), (draw(2, 2, 3, 3),), {}),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(2, 3, 2, stride=2, **FLOAT64),
        (draw(2, 2, 3),),
        {},
    ),
    "LSTM": (lambda: nn.LSTM(2, 2, n_layers=2, **FLOAT64), (draw(2, 3, 2),), {}),
    "LSTM lengths": (
        lambda: nn.LSTM(2, 2, bidirectional=True, **FLOAT64),
        (draw(2, 3, 2),),
        {"lengths": LENGTHS},
    ),
    "GRU": (lambda: nn.GRU(2, 2, n_layers=2, **FLOAT64), (draw(2, 3, 2),), {}),
    "GRU lengths": (
        lambda: nn.GRU(2, 2, bidirectional=True, bias=False, **FLOAT64),
        (draw(2, 3, 2),),
        {"lengths": LENGTHS},
    ),
    "LayerNorm": (lambda: nn.LayerNorm(4, **FLOAT64), (draw(3, 4),), {}),
    "RMSNorm": (lambda: nn.RMSNorm(4, **FLOAT64), (draw(3, 4),), {}),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4, **FLOAT64), (draw(2, 4, 3),), {}),
    "BatchNorm": (lambda: nn.BatchNorm(3, **FLOAT64), (draw(4, 3, 2),), {}),
    "BatchNorm eval": (lambda: nn.BatchNorm(3, **FLOAT64).eval(), (draw(4, 3, 2),), {}),
    "Linear gelu": (lambda: nn.Linear(4, 3, activation="gelu_tanh", **FLOAT64), (draw(5, 4),), {}),
    "GatedLinear": (lambda: nn.GatedLinear(4, 3, **FLOAT64), (draw(5, 4),), {}),
    "GatedLinear without bias": (
        lambda: nn.GatedLinear(4, 3, bias=False, activation="gelu", **FLOAT64),
        (draw(5, 4),),
        {},
    ),
    "Conv2d residual": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, activation="silu", **FLOAT64),
        (draw(2, 2, 4, 3), draw(2, 3, 4, 3)),
        {},
    ),
    "MultiHeadAttention": (
        lambda: nn.MultiHeadAttention(4, 2, causal=True, **FLOAT64),
        (draw(2, 3, 4),),
        {},
    ),
    "cross attention": (
        lambda: nn.MultiHeadAttention(4, 2, n_kv_heads=1, context_features=3, **FLOAT64),
        (draw(2, 3, 4), draw(2, 5, 3)),
        {"attn_mask": draw(3, 5) > -1},
    ),
    "TransformerBlock": (lambda: nn.TransformerBlock(4, 2, **FLOAT64), (draw(2, 3, 4),), {}),
    "gated TransformerBlock": (
        lambda: nn.TransformerBlock(
            4, 2, n_kv_heads=1, activation="swiglu", norm="rms_norm", bias=False, **FLOAT64
        ),
        (draw(2, 3, 4),),
        {},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_by_inputs_and_parameters(name):
    make, inputs, options = LAYERS[name]
    check_gradients(make(), *inputs, **options)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Linear(3, 2), "Linear(3, 2)"),
        (nn.Linear(3, 2, bias=False), "Linear(3, 2, bias=False)"),
        (nn.Linear(3, 2, activation="relu"), "Linear(3, 2, activation='relu')"),
        (nn.GatedLinear(3, 2), "GatedLinear(3, 2)"),
        (nn.GatedLinear(3, 2, bias=False), "GatedLinear(3, 2, bias=False)"),
        (nn.GatedLinear(3, 2, activation="gelu"), "GatedLinear(3, 2, activation='gelu')"),
        (nn.Conv1d(3, 8, 5, activation="silu"), "Conv1d(3, 8, (5,), activation='silu')"),
        (nn.Embedding(9, 4), "Embedding(9, 4)"),
        (nn.Embedding(9, 4, padding_index=0), "Embedding(9, 4, padding_index=0)"),
        (nn.Conv2d(3, 8, 5, padding="same"), "Conv2d(3, 8, (5, 5), padding='same')"),
        (nn.ConvTranspose1d(4, 8, 3, groups=2), "ConvTranspose1d(4, 8, (3,), groups=2)"),
        (nn.MaxPool2d(2), "MaxPool2d(2)"),
        (nn.AvgPool1d(3, stride=1), "AvgPool1d(3, stride=1)"),
        (nn.AdaptiveAvgPool2d((1, 2)), "AdaptiveAvgPool2d((1, 2))"),
        (nn.Dropout(0.25), "Dropout(0.25)"),
        (nn.GELU(approximate="tanh"), "GELU(approximate='tanh')"),
        (nn.ReLU(), "ReLU()"),
        (nn.Flatten(start_axis=2), "Flatten(start_axis=2)"),
        (nn.LayerNorm(4, eps=1e-3), "LayerNorm(4, eps=0.001)"),
        (nn.RMSNorm(4), "RMSNorm(4)"),
        (nn.GroupNorm(2, 4), "GroupNorm(2, 4)"),
        (nn.BatchNorm(4, momentum=0.2), "BatchNorm(4, momentum=0.2)"),
        (nn.MultiHeadAttention(4, 2, causal=True), "MultiHeadAttention(4, 2, causal=True)"),
    ],
)
def test_text(layer, text):
    assert repr(layer) == text


def test_recurrent_text():
    assert repr(nn.LSTM(2, 3, n_layers=2)).startswith("LSTM(2, 3, n_layers=2)")
    assert repr(nn.GRU(2, 3, bidirectional=True)).startswith("GRU(2, 3, bidirectional=True)")


def test_layers_with_an_activation_are_the_two_steps():
    layer = nn.Linear(4, 3, activation="gelu_tanh", **FLOAT64)
    x = draw(5, 4)
    want = rx.gelu(rx.linear(x, layer.weight, layer.bias), approximate="tanh")
    assert_close(layer(x), want, exact=True)
    conv = nn.Conv1d(4, 3, 3, padding=1, activation="relu", **FLOAT64)
    x, residual = draw(2, 4, 5), draw(2, 3, 5)
    plain = rx.conv1d(x, conv.weight, conv.bias, padding=1)
    assert_close(conv(x, residual), rx.relu(plain + residual), exact=True)
    assert_close(conv(x), rx.relu(plain), exact=True)
    gated = nn.GatedLinear(4, 3, **FLOAT64)
    x = draw(5, 4)
    gate, up = x @ gated.w_gate.data.T + gated.b_gate.data, x @ gated.w_up.data.T + gated.b_up.data
    assert_close(gated(x), rx.silu(gate) * up)
    assert [name for name, _ in gated.named_parameters()] == ["w_gate", "w_up", "b_gate", "b_up"]


@pytest.mark.parametrize(
    "activation",
    ["relu", "gelu_tanh", "gelu", "swiglu", rx.tanh],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_block_applies_its_activation_once(activation):
    """Also where another layer takes the place of the inner one."""
    block = nn.TransformerBlock(8, 2, activation=activation, **FLOAT64)
    x = draw(2, 3, 8)
    found = block(x)
    up = nn.Linear(8, block.up.out_features, **FLOAT64)
    up.weight, up.bias = block.up.weight, block.up.bias
    block.up = up
    assert_close(block(x), found, exact=True)
    inner = block.activation(up(block.norm2(y := x + block.attention(block.norm1(x)))))
    assert_close(found, y + block.down(inner), exact=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda d: nn.Linear(3, 2, dtype=d), (4, 3)),
        (lambda d: nn.GatedLinear(3, 2, dtype=d), (4, 3)),
        (lambda d: nn.Conv1d(2, 3, 3, dtype=d), (2, 2, 5)),
        (lambda d: nn.ConvTranspose1d(2, 3, 3, dtype=d), (2, 2, 5)),
        (lambda d: nn.GRU(2, 3, dtype=d), (2, 4, 2)),
        (lambda d: nn.LSTM(2, 3, dtype=d), (2, 4, 2)),
        (lambda d: nn.BatchNorm(2, dtype=d), (4, 2)),
        (lambda d: nn.TransformerBlock(4, 2, dtype=d, dropout=0.1), (2, 3, 4)),
        (lambda d: nn.TransformerBlock(4, 2, dtype=d, norm="rms_norm"), (2, 3, 4)),
    ],
    ids=[
        "Linear",
        "GatedLinear",
        "Conv1d",
        "ConvTranspose1d",
        "GRU",
        "LSTM",
        "BatchNorm",
        "block",
        "rms block",
    ],
)
def test_dtypes_stay(make, shape, dtype):
    with rx.device("cpu"):
        layer = make(dtype)
        out = layer(rx.ones(shape, dtype=dtype))
    out = out[0] if isinstance(out, tuple) else out
    assert out.dtype == np.dtype(dtype)
    rx.sum(out).backward()
    assert {p.grad.dtype for p in layer.parameters()} == {np.dtype(dtype)}


# ------------------------------------------------------------------------------- containers


def test_sequential_runs_in_order_and_can_be_cut():
    model = nn.Sequential(nn.Linear(3, 4, **FLOAT64), rx.tanh, nn.Linear(4, 2, **FLOAT64))
    x = draw(5, 3)
    want = model[2](rx.tanh(model[0](x)))
    assert_close(model(x), want, exact=True)
    assert_close(model[1:](model[:1](x)), want, exact=True)
    assert [type(layer).__name__ for layer in model] == ["Linear", "function", "Linear"]
    assert len(model) == 3
    with pytest.raises(TypeError, match="layer 1 must be callable, got int"):
        nn.Sequential(rx.relu, 3)


def test_flatten():
    x = draw(2, 3, 4, 5)
    assert nn.Flatten()(x).shape == (2, 60)
    assert nn.Flatten(start_axis=0, end_axis=1)(x).shape == (6, 4, 5)
    with pytest.raises(ValueError, match=r"Flatten\(start_axis=4\) got x of shape \(2, 3, 4, 5\)"):
        nn.Flatten(start_axis=4)(x)


# ---------------------------------------------------------------------------------- dropout


def test_dropout_is_off_in_evaluation():
    layer = nn.Dropout(0.5, generator=Generator(0))
    x = np.ones((100, 100))
    out = layer(x)
    assert set(np.unique(out)) == {0.0, 2.0}
    assert abs(out.mean() - 1) < 5 / 100  # five standard errors
    assert layer.eval()(x) is x


def test_the_generator_decides_what_is_dropped():
    x = np.ones(64)
    first, second = (nn.Dropout(0.5, generator=Generator(3))(x) for _ in range(2))
    assert_close(first, second, exact=True)
    rx.random.seed(5)
    third = nn.Dropout(0.5)(x)
    rx.random.seed(5)
    assert_close(nn.Dropout(0.5)(x), third, exact=True)


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_dropout_rate_is_checked(rate):
    with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\), got"):
        nn.Dropout(rate)


# ------------------------------------------------------------------------------ normalization


def test_running_averages_by_hand():
    layer = nn.BatchNorm(2, momentum=0.25, **FLOAT64)
    x = np.array([[1.0, 10.0], [3.0, 30.0]])
    layer(x)
    assert_close(layer.running_mean, [0.25 * 2, 0.25 * 20])
    assert_close(layer.running_var, [0.75 + 0.25 * 2, 0.75 + 0.25 * 200])  # over n - 1
    layer.eval()
    assert_close(layer(x), (x - [0.5, 5.0]) / np.sqrt(np.array([1.25, 50.75]) + 1e-5))
    assert_close(layer.running_mean, [0.5, 5.0])
    assert [name for name, _ in layer.named_buffers()] == ["running_mean", "running_var"]


def test_a_repeated_checkpoint_counts_a_batch_once():
    layer, plain = (nn.BatchNorm(2, **FLOAT64) for _ in range(2))
    x = rx.Tensor(draw(5, 2), requires_grad=True)
    rx.sum(rx.checkpoint(layer, x) ** 3).backward()
    want = rx.Tensor(x.data, requires_grad=True)
    rx.sum(plain(want) ** 3).backward()
    assert_close(x.grad, want.grad)
    assert_close(layer.running_mean, plain.running_mean, exact=True)
    assert_close(layer.running_var, plain.running_var, exact=True)


def test_running_averages_of_half_precision_are_float32():
    layer = nn.BatchNorm(2, dtype="float16", device="cpu")
    layer(draw(4, 2).astype("float16"))
    assert layer.running_var.dtype == np.float32


def test_batch_norm_needs_several_elements():
    layer = nn.BatchNorm(2, **FLOAT64)
    with pytest.raises(ValueError, match=r"BatchNorm\(2\) needs several elements .* \(1, 2\)"):
        layer(draw(1, 2))
    layer.eval()(draw(1, 2))


# ---------------------------------------------------------------------------------- attention


def test_attention_dropout_is_off_in_evaluation():
    layer = nn.MultiHeadAttention(8, 2, dropout=0.5, generator=Generator(0), **FLOAT64)
    x = draw(2, 6, 8)
    assert not np.array_equal(layer(x).data, layer(x).data)
    layer.eval()
    assert_close(layer(x), layer(x), exact=True)


def test_causal_attention_does_not_look_ahead():
    block = nn.TransformerBlock(8, 2, causal=True, **FLOAT64)
    x, other = draw(1, 5, 8), draw(1, 5, 8)
    other[:, 3:] = 0
    assert_close(block(x)[:, :3], block(other)[:, :3])
    assert not np.allclose(block(x)[:, 4].data, block(other)[:, 4].data)


def test_a_block_takes_more_batch_axes():
    block = nn.TransformerBlock(8, 2, **FLOAT64)
    x = draw(2, 3, 5, 8)
    assert_close(block(x)[1, 2], block(x[1, 2]))


# ------------------------------------------------------------------------ recurrent layers


def parts(state):
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_comes_after_the_length_changes_nothing(kind):
    layer = kind(2, 3, n_layers=2, bidirectional=True, **FLOAT64)
    x = draw(2, 5, 2)
    spoiled = x.copy()
    spoiled[0, 2:] = np.nan
    lengths = np.array([2, 5])
    out, state = layer(x, lengths=lengths)
    other, other_state = layer(spoiled, lengths=lengths)
    assert_close(other, out, exact=True)
    assert_close(out[0, 2:], np.zeros((3, 6)), exact=True)
    short, _ = layer(x[:1, :2])
    assert_close(out[0, :2], short[0])
    for a, b in zip(parts(state), parts(other_state), strict=True):
        assert_close(a, b, exact=True)
    rx.sum(other).backward()
    assert all(np.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_state_continues_a_sequence(kind):
    layer = kind(2, 3, n_layers=2, **FLOAT64)
    x = draw(2, 6, 2)
    whole, last = layer(x)
    first, state = layer(x[:, :4])
    second, state = layer(x[:, 4:], state)
    assert_close(rx.concat([first, second], axis=1), whole)
    for a, b in zip(parts(state), parts(last), strict=True):
        assert_close(a, b)


def test_dropout_between_recurrent_layers():
    layer = nn.GRU(2, 8, n_layers=2, dropout=0.5, generator=Generator(0), **FLOAT64)
    x = draw(2, 3, 2)
    assert not np.array_equal(layer(x)[0].data, layer(x)[0].data)
    layer.eval()
    assert_close(layer(x)[0], layer(x)[0], exact=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.LSTM(2, 3)(draw(2, 4)), ValueError, r"\(batch, time >= 1, 2\), got \(2, 4\)"),
        (lambda: nn.GRU(2, 3)(draw(2, 4, 5)), ValueError, r"time >= 1, 2\), got \(2, 4, 5\)"),
        (lambda: nn.GRU(2, 3)(draw(2, 0, 2)), ValueError, r"got \(2, 0, 2\)"),
        (
            lambda: nn.GRU(2, 3)(draw(2, 4, 2), draw(1, 2, 2)),
            ValueError,
            r"h must have shape \(1, 2, 3\), got \(1, 2, 2\)",
        ),
        (
            lambda: nn.LSTM(2, 3)(draw(2, 4, 2), (draw(1, 2, 3), draw(2, 3))),
            ValueError,
            r"c must have shape \(1, 2, 3\), got \(2, 3\)",
        ),
        (
            lambda: nn.GRU(2, 3)(draw(2, 4, 2), lengths=np.array([1.0, 2.0])),
            ValueError,
            r"lengths must be integers of shape \(2,\), got dtype float64",
        ),
        (
            lambda: nn.GRU(2, 3)(draw(2, 4, 2), lengths=np.array([1, 2, 3])),
            ValueError,
            r"lengths must be integers of shape \(2,\), got dtype int64 and shape \(3,\)",
        ),
        (lambda: nn.GRU(2, 0), ValueError, "n_features must be at least 1, got 0"),
        (lambda: nn.LSTM(2, 3, n_layers=0), ValueError, "n_layers must be at least 1, got 0"),
    ],
)
def test_bad_recurrent_arguments(call, error, message):
    with rx.device("cpu"), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.Conv2d(3, 4, (3, 3, 3)), r"kernel_size must be an int >= 1 or 2 of them"),
        (lambda: nn.Conv2d(3, 4, 0), "kernel_size must be an int >= 1 or 2 of them, got 0"),
        (lambda: nn.Conv1d(3, 4, 3, groups=2), "in_channels must be a multiple of groups"),
        (lambda: nn.Conv1d(4, 3, 3, groups=2), "out_channels must be a multiple"),
        (lambda: nn.Conv1d(4, 4, 3, groups=0), "groups must be at least 1, got 0"),
        (lambda: nn.GroupNorm(3, 4), "n_channels must be a multiple of n_groups, got 4"),
        (lambda: nn.BatchNorm(3, momentum=0), r"momentum must lie in \(0, 1\], got 0"),
        (lambda: nn.MultiHeadAttention(7, 2), "n_features must be a multiple of n_heads"),
        (lambda: nn.MultiHeadAttention(8, 4, n_kv_heads=3), "n_kv_heads must divide n_heads"),
        (lambda: nn.MultiHeadAttention(8, 2)(draw(8)), r"x must have shape \(..., n_steps, n_fea"),
        (lambda: nn.TransformerBlock(8, 2, norm="norm"), "norm must be one of layer_norm, rms_n"),
        (lambda: nn.TransformerBlock(8, 2, mlp_ratio=0), "mlp_ratio must be > 0, got 0"),
        (lambda: nn.TransformerBlock(8, 2, activation="gelo"), "activation must be callable or"),
        (lambda: nn.Linear(3, 2, activation="elu"), "activation must be one of 'relu', .* or None"),
        (lambda: nn.GatedLinear(3, 2, activation=None), "activation must be one of .*, got None"),
        (
            lambda: nn.Conv1d(3, 2, 1, activation="gelu"),
            "one of 'relu', 'silu' or None, got 'gelu'",
        ),
        (lambda: nn.Linear(3, 2)(draw(4, 2)), r"x must have shape \(..., 3\).*got \(4, 2\)"),
    ],
)
def test_bad_layer_arguments(call, message):
    with rx.device("cpu"), pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nn.LayerNorm, ["n_features"]),
        (nn.RMSNorm, ["n_features"]),
        (nn.BatchNorm, ["n_channels"]),
        (nn.GroupNorm, ["n_groups", "n_channels"]),
        (nn.Linear, ["in_features", "out_features"]),
        (nn.GatedLinear, ["in_features", "out_features"]),
        (nn.Embedding, ["n_embeddings", "n_features"]),
        (partial(nn.Conv2d, kernel_size=3), ["in_channels", "out_channels", "groups"]),
        (partial(nn.ConvTranspose1d, kernel_size=3), ["in_channels", "out_channels", "groups"]),
        (nn.LSTM, ["in_features", "n_features", "n_layers"]),
        (nn.MultiHeadAttention, ["n_features", "n_heads", "n_kv_heads", "context_features"]),
        (nn.TransformerBlock, ["n_features", "n_heads"]),
    ],
)
def test_sizes_are_positive_ints(layer, sizes):
    good = dict.fromkeys(sizes, 2)
    layer(**good, device="cpu")
    for name in sizes:
        for bad, said in [((3,), "an int, got (3,)"), (2.0, "an int, got 2.0"), (True, "an int")]:
            with pytest.raises(TypeError, match=re.escape(f"{name} must be {said}")):
                layer(**{**good, name: bad})
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            layer(**{**good, name: 0})


# ------------------------------------------------------------------------- functional_call


def test_functional_call_uses_other_values_for_one_call():
    model = nn.Sequential(nn.Linear(2, 3, **FLOAT64), rx.tanh, nn.Linear(3, 1, **FLOAT64))
    x = draw(4, 2)
    before = model(x)
    zeros = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
    assert_close(nn.functional_call(model, zeros, x), np.zeros((4, 1)))
    assert_close(model(x), before, exact=True)
    with pytest.raises(ValueError, match="parameters must be named .*, got nothing"):
        nn.functional_call(model, {"nothing": x}, x)
    with pytest.raises(ValueError, match=r"layers.2.bias must have shape \(1,\), got \(4, 2\)"):
        nn.functional_call(model, {"layers.2.bias": x}, x)


def test_functional_call_holds_when_a_checkpoint_is_repeated():
    class Checkpointed(nn.Module):
        def __init__(self):
            self.inner = nn.Linear(2, 2, **FLOAT64)

        def forward(self, x):
            return rx.checkpoint(lambda x: rx.tanh(self.inner(x)), x)

    model, x = Checkpointed(), draw(3, 2)
    parameters = {"inner.weight": draw(2, 2, seed=1), "inner.bias": draw(2, seed=2)}

    def loss(parameters):
        return rx.sum(nn.functional_call(model, parameters, x) ** 2)

    got = rx.grad(loss)(parameters)
    out = np.tanh(x @ parameters["inner.weight"].T + parameters["inner.bias"])
    assert_close(got["inner.bias"], (2 * out * (1 - out**2)).sum(axis=0))


# --------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.SGD, {"lr": 0.5, "momentum": 0.9}),
        (optim.AdamW, {"lr": 0.05}),
        (optim.RMSprop, {"lr": 0.02}),
        (optim.Lion, {"lr": 0.01}),
        (optim.Adafactor, {"lr": 0.3}),
    ],
)
def test_two_layers_learn_exclusive_or(kind, settings):
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], "float32")
    y = np.array([0, 1, 1, 0])
    with rx.device("cpu"):
        generator = Generator(1)
        model = nn.Sequential(
            nn.Linear(2, 8, generator=generator), nn.Tanh(), nn.Linear(8, 2, generator=generator)
        )
        optimizer = kind(model.parameters(), **settings)
        for _ in range(300):
            optimizer.zero_grad()
            nn.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert (rx.argmax(model(x), axis=-1).data == y).all()
