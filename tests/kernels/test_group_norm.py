"""The kernels of group normalization, in both memory layouts, against the formula in float64."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device
from rtxarr.kernels import group_norm as kernels
from rtxarr.testing import TOLERANCES, assert_close

DTYPES = ["float32", "float16", "bfloat16", "float64"]
# Shape and groups.
SMALL = [((2, 8, 3, 2), 2), ((2, 6, 8), 3), ((1, 6, 5), 3), ((2, 16, 2), 4)]
LARGE = [
    ((2, 8, 3, 2), 2),
    ((3, 6, 5), 3),
    ((8, 320, 32, 32), 32),
    ((2, 320, 64, 64), 32),
    ((3, 96, 24), 32),
    ((2, 64, 1000), 32),
    ((2, 96, 513, 8), 32),
    ((2, 64, 129, 67), 8),
    ((2, 2560, 8, 8), 32),
    ((2, 2080, 9), 32),
    ((2, 4112, 5), 1),
    ((1, 30, 100_003), 5),
    ((300, 32), 4),
    ((4, 96, 4, 5, 6), 1),
]


def near(got, want, dtype, n_terms=1):
    """Compare, allowing for the rounding of sums of many terms."""
    rtol, atol = TOLERANCES[dtype]
    scale = max(1.0, np.abs(want).max(initial=0.0), n_terms / 10)
    assert_close(got, want, rtol=rtol, atol=atol * scale)


def formula(x, weight, bias, grad, n_groups, eps, silu):
    """Give the result and the gradients of x, weight and bias; all in float64."""
    x, weight, bias, grad = (np.asarray(a, np.float64) for a in (x, weight, bias, grad))
    shape, groups = x.shape, (x.shape[0], n_groups, -1)
    channels = (-1,) + (1,) * (x.ndim - 2)
    flat = x.reshape(groups)
    scale = (flat.var(-1, keepdims=True) + eps) ** -0.5
    hat = ((flat - flat.mean(-1, keepdims=True)) * scale).reshape(shape)
    out = hat * weight.reshape(channels) + bias.reshape(channels)
    if silu:
        s = 1 / (1 + np.exp(-out))
        grad = grad * s * (1 + out * (1 - s))
        out = out * s
    g, h = ((a).reshape(groups) for a in (grad * weight.reshape(channels), hat))
    of_x = (g - g.mean(-1, keepdims=True) - h * (g * h).mean(-1, keepdims=True)) * scale
    axes = (0, *range(2, x.ndim))
    return out, of_x.reshape(shape), (grad * hat).sum(axes), grad.sum(axes)


def make(shape, dtype):
    rng = np.random.default_rng(0)
    kind = getattr(ml_dtypes, dtype, dtype)
    x, grad = rng.standard_normal((2, *shape))
    x = 2 * x + 1
    weight, bias = (rng.standard_normal(shape[1]) for _ in range(2))
    return [a.astype(kind) for a in (x, weight, bias, grad)]


def put(x, place, last=False):
    """Copy to a device, with the channels last in memory or first."""
    if not last:
        return _device.to_device(x, place)
    moved = _device.to_device(np.ascontiguousarray(np.moveaxis(x, 1, -1)), place)
    return _device.namespace(moved).moveaxis(moved, -1, 1)


@pytest.fixture
def twice(monkeypatch):
    """Let arrays be read in two passes, as where blocks have no clusters."""
    monkeypatch.setattr(kernels, "_has_clusters", lambda x: False)


@pytest.mark.sim
def test_two_passes(twice):
    test_group_norm("cpu", "float32", False, False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_pass(place, monkeypatch, dtype):
    """Several groups a block, and channels that are no multiple of the rows of threads."""
    monkeypatch.setattr(kernels, "_LEAST", 0)
    monkeypatch.setattr(kernels, "_RESIDENT_BLOCKS", 1)
    monkeypatch.setattr(kernels, "_deal_out_once", kernels._deal_out_once.__wrapped__)
    large = [((3, 320, 64, 64), 32, 60_000), ((2, 96, 520), 8, 24_000)]
    for shape, n_groups, little in [((2, 48, 40), 12, 5000)] if place == "cpu" else large:
        grids = []
        for room in (little, 224 << 10):
            monkeypatch.setattr(kernels, "_ROOM", ((1, room, 32 if place == "cpu" else 256),))
            x, weight, bias, grad = make(shape, dtype)
            tensors = [rx.Tensor(put(a, place), requires_grad=True) for a in (x, weight, bias)]
            kept = kernels._keep(shape, (tensors[0].data,) * 2, (None, None), n_groups)
            grids.append(kept.grid[1])
            out = rx.group_norm(tensors[0], n_groups, *tensors[1:], eps=1e-3)
            out.backward(put(grad, place))
            want = formula(x, weight, bias, grad, n_groups, 1e-3, False)
            for a, b in zip((out, *(t.grad for t in tensors)), want, strict=True):
                near(a, b, dtype, 1 if a.shape == shape else x.size // shape[1])
        assert grids[0] > grids[1]


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm(place, dtype, last, silu):
    small = SMALL if dtype == "float32" else SMALL[1:2]
    for shape, n_groups in small if place == "cpu" else LARGE:
        x, weight, bias, grad = make(shape, dtype)
        tensors = [
            rx.Tensor(put(a, place, last and a is x), requires_grad=True) for a in (x, weight, bias)
        ]
        assert kernels.fits(*(t.data for t in tensors))
        out = rx.group_norm(
            tensors[0], n_groups, *tensors[1:], eps=1e-3, activation="silu" if silu else None
        )
        # The gradient comes in the other layout.
        out.backward(put(grad, place, not last))
        got = out, *(t.grad for t in tensors)
        for a, b in zip(got, formula(x, weight, bias, grad, n_groups, 1e-3, silu), strict=True):
            assert a.dtype == x.dtype
            near(a, b, dtype, 1 if a.shape == shape else x.size // shape[1])
        assert out.data.strides == tensors[0].data.strides


@pytest.mark.sim
@pytest.mark.parametrize("few", [0, 4], ids=["ahead", "not"])
@pytest.mark.parametrize("shape", [(2, 4, 75), (2, 4, 80)], ids=["ragged", "whole"])
def test_positions_of_several_blocks(monkeypatch, twice, shape, few):
    from rtxarr.kernels import _plan

    monkeypatch.setattr(kernels, "_FEW_TILES", few)

    monkeypatch.setattr(_plan, "_MOST_LANES", 2)
    monkeypatch.setattr(kernels, "_BLOCKS", 16)  # chunks of two tiles, and less
    x, weight, bias, grad = make(shape, "float32")
    tensors = [rx.Tensor(a, requires_grad=True) for a in (x, weight, bias)]
    out = rx.group_norm(tensors[0], 2, *tensors[1:], eps=1e-3, activation="silu")
    out.backward(grad)
    want = formula(x, weight, bias, grad, 2, 1e-3, True)
    for a, b in zip((out, *(t.grad for t in tensors)), want, strict=True):
        near(a, b, "float32", 1 if a.shape == shape else x.size // shape[1])


@pytest.mark.sim
@pytest.mark.parametrize("n_groups", [2, 4, 12], ids=["cut", "whole", "many"])
def test_channels_of_several_blocks(monkeypatch, n_groups):
    monkeypatch.setattr(kernels, "_SPAN", 16)  # three blocks of 16 channels
    monkeypatch.setattr(kernels, "_ONE_WAVE", 18)
    x, weight, bias, grad = make((2, 48, 7), "float32")
    tensors = [rx.Tensor(put(a, "cpu", a is x), requires_grad=True) for a in (x, weight, bias)]
    out = rx.group_norm(tensors[0], n_groups, *tensors[1:], eps=1e-3)
    out.backward(put(grad, "cpu", True))
    want = formula(x, weight, bias, grad, n_groups, 1e-3, False)
    for a, b in zip((out, *(t.grad for t in tensors)), want, strict=True):
        near(a, b, "float32")


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_without_parameters(place, last):
    shape = (2, 8, 3, 2) if place == "cpu" else (3, 64, 33, 17)
    x, _, _, grad = make(shape, "float32")
    t = rx.Tensor(put(x, place, last), requires_grad=True)
    out = rx.group_norm(t, 4)
    out.backward(put(grad, place, last))
    ones = np.ones(shape[1])
    want = formula(x, ones, 0 * ones, grad, 4, 1e-5, False)
    near(out, want[0], "float32")
    near(t.grad, want[1], "float32")


def test_groups_with_a_large_mean_keep_their_deviation(place):
    """Sums are of differences from an element of the group or of the channel."""
    x = np.random.default_rng(1).standard_normal((1, 8, 6, 5)).astype(np.float32) + 4096
    want = formula(x, np.ones(8), np.zeros(8), x, 2, 1e-5, False)[0]
    for last in (False, True):
        assert_close(rx.group_norm(put(x, place, last), 2), want, rtol=1e-3, atol=1e-3)


def test_half_precision_meets_parameters_of_float32(place):
    x, weight, bias, grad = make((2, 8, 3, 2), "bfloat16")
    t = rx.Tensor(put(x, place, True), requires_grad=True)
    weight, bias = (a.astype(np.float32) for a in (weight, bias))
    out = rx.group_norm(t, 2, put(weight, place), put(bias, place))
    assert out.dtype == np.float32
    out.backward(put(grad.astype(np.float32), place, True))
    want = formula(x, weight, bias, grad, 2, 1e-5, False)
    near(out, want[0], "float32")
    near(t.grad, want[1], "bfloat16")


def test_gradients_of_each_sample(place):
    x, weight, bias, _ = make((2, 4, 2) if place == "cpu" else (3, 8, 3, 2), "float64")
    x = put(x, place)
    params = [rx.Tensor(put(a, place), requires_grad=True) for a in (weight, bias)]

    def loss(x):
        return rx.sum(rx.sin(rx.group_norm(x, 2, *params, activation="silu")))

    got = rx.autograd.per_sample_gradients(loss(x), params)
    for i in range(x.shape[0]):
        for p, each in zip(params, got, strict=True):
            p.grad = None
            loss(x[i : i + 1]).backward()
            assert_close(each[i], p.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_repeated_runs_give_equal_bits():
    x, weight, bias, grad = make((4, 320, 64, 64), "bfloat16")
    first = None
    for _ in range(3):
        tensors = [
            rx.Tensor(put(a, "cuda:0", a is x), requires_grad=True) for a in (x, weight, bias)
        ]
        out = rx.group_norm(tensors[0], 32, *tensors[1:], activation="silu")
        out.backward(put(grad, "cuda:0", True))
        found = [out, *(t.grad for t in tensors)]
        for a, b in zip(found, first or found, strict=True):
            assert_close(a, b, exact=True)
        first = found
