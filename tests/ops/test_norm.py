"""Normalizations against NumPy and PyTorch."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(12)
X = rng.standard_normal((3, 4, 5)) * 2 + 1
ROW, ROW_BIAS = rng.standard_normal((2, 5))
CHANNEL, CHANNEL_BIAS = rng.standard_normal((2, 4))


def normalized(x, axes, eps=1e-5):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def test_layer_norm(xp):
    got = rx.layer_norm(*map(xp.asarray, (X, ROW, ROW_BIAS)))
    assert_close(got, normalized(X, -1) * ROW + ROW_BIAS)
    assert_close(rx.layer_norm(xp.asarray(X), eps=0.5), normalized(X, -1, eps=0.5))
    assert_close(rx.layer_norm(xp.asarray(X), n_axes=2), normalized(X, (1, 2)))
    weight = X[0] / 3
    got = rx.layer_norm(xp.asarray(X), weight=xp.asarray(weight), n_axes=2)
    assert_close(got, normalized(X, (1, 2)) * weight)


def test_rms_norm(xp):
    got = rx.rms_norm(xp.asarray(X), xp.asarray(ROW))
    assert_close(got, X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * ROW)


def test_group_norm(xp):
    groups = normalized(X.reshape(3, 2, 2, 5), (2, 3)).reshape(X.shape)
    got = rx.group_norm(xp.asarray(X), 2, xp.asarray(CHANNEL), xp.asarray(CHANNEL_BIAS))
    assert_close(got, groups * CHANNEL[:, None] + CHANNEL_BIAS[:, None])
    assert_close(rx.group_norm(xp.asarray(X), 4), normalized(X, 2))
    want = normalized(X, 2)
    got = rx.group_norm(xp.asarray(X), 4, activation="silu")
    assert_close(got, want / (1 + np.exp(-want)))
    with pytest.raises(ValueError, match="activation must be None or 'silu', got 'relu'"):
        rx.group_norm(xp.asarray(X), 4, activation="relu")


def test_batch_norm(xp):
    out, mean, var = rx.batch_norm(*map(xp.asarray, (X, CHANNEL, CHANNEL_BIAS)))
    assert_close(out, normalized(X, (0, 2)) * CHANNEL[:, None] + CHANNEL_BIAS[:, None])
    assert_close(mean, X.mean((0, 2)))
    assert_close(var, X.var((0, 2)))
    mean, var = np.arange(4.0), np.arange(1.0, 5)
    out, same, _ = rx.batch_norm(xp.asarray(X), mean=xp.asarray(mean), var=xp.asarray(var))
    assert_close(out, (X - mean[:, None]) / np.sqrt(var[:, None] + 1e-5))
    assert_close(same, mean)


def test_statistics_of_a_tensor_are_raw_arrays():
    _, mean, var = rx.batch_norm(rx.Tensor(X.astype("float16"), requires_grad=True))
    assert isinstance(mean, np.ndarray) and mean.dtype == var.dtype == np.float32


NORMS = {
    "layer": lambda x, w, b: rx.layer_norm(x, w, b),
    "rms": lambda x, w, b: rx.rms_norm(x, w),
    "group": lambda x, w, b: rx.group_norm(x, 2, w, b),
    "batch": lambda x, w, b: rx.batch_norm(x, w, b)[0],
    "inference": lambda x, w, b: rx.batch_norm(x, w, b, mean=CHANNEL, var=CHANNEL**2)[0],
}


def parameters(name):
    return (ROW, ROW_BIAS) if name in ("layer", "rms") else (CHANNEL, CHANNEL_BIAS)


@pytest.mark.parametrize("name", ["layer", "group", "batch"])
def test_half_precision(check_half, name):
    check_half(NORMS[name], X, *parameters(name))


def test_half_precision_of_rms_norm(check_half):
    check_half(rx.rms_norm, X, ROW)


def test_statistics_of_float16_do_not_overflow():
    x = np.full((2, 512), 300, dtype="float16")
    x[:, ::2] = -300
    assert_close(rx.layer_norm(x), np.sign(x))
    assert_close(rx.rms_norm(x), np.sign(x))


def test_variance_of_far_values_is_exact():
    """Squared deviations are averaged, not squares subtracted."""
    x = (np.array([[0.0, 1.0, 2.0, 3.0]]) + 4096).astype("float32")
    assert_close(rx.layer_norm(x), normalized(x.astype("float64"), -1), rtol=1e-4)


def test_constant_rows_stay_finite():
    for function in (rx.layer_norm, rx.rms_norm):
        x = rx.Tensor(np.zeros((2, 4)), requires_grad=True)
        out = function(x)
        rx.sum(out).backward()
        assert_close(out, np.zeros((2, 4)))
        assert np.isfinite(x.grad).all()


def test_what_is_kept_for_the_backward_pass():
    x, w, b = (rx.Tensor(a, requires_grad=True) for a in (X, ROW, ROW_BIAS))
    saved = [a for a in rx.layer_norm(x, w, b).node.saved if isinstance(a, np.ndarray)]
    assert sum(a.nbytes for a in saved) == X.nbytes + ROW.nbytes + 2 * X[..., 0].nbytes


def test_the_input_is_left_alone():
    x, weight = X.copy(), np.ones(5)
    rx.layer_norm(x, weight, weight)
    rx.rms_norm(x, weight)
    assert_close(x, X, exact=True)


@pytest.mark.parametrize("name", ["layer", "rms", "group", "inference"])
def test_per_sample_gradients(check_per_sample, name):
    weight, bias = parameters(name)
    if name == "rms":
        check_per_sample(lambda x, w: rx.rms_norm(x, w), X, weight)
    else:
        check_per_sample(NORMS[name], X, weight, bias)
    if name == "layer":
        check_per_sample(rx.layer_norm, X[:, 0], weight, bias)
        check_per_sample(lambda *a: rx.layer_norm(*a, n_axes=2), X, X[0], X[1])


def test_per_sample_gradients_of_mixed_samples_are_refused():
    for call, values in (
        (lambda w: rx.batch_norm(X, w)[0], CHANNEL),
        (lambda w: rx.layer_norm(X[0], w, n_axes=2), X[0]),
    ):
        weight = rx.Tensor(values, requires_grad=True)
        with pytest.raises(ValueError, match="statistics over the batch axis mix its samples"):
            rx.autograd.per_sample_gradients(rx.sum(call(weight)), [weight])


@pytest.mark.parametrize("name", ["layer", "rms", "group", "inference"])
def test_empty_batches(name):
    x = rx.Tensor(X[:0], requires_grad=True)
    weight, bias = (rx.Tensor(a, requires_grad=True) for a in parameters(name))
    out = NORMS[name](x, weight, bias)
    rx.sum(out).backward()
    assert out.shape == x.grad.shape == x.shape
    assert_close(weight.grad, np.zeros(weight.shape))


@pytest.mark.parametrize("name", NORMS)
def test_strided_views(name):
    view = np.moveaxis(rng.standard_normal((5, 6, 4)), 0, -1)[::-2]
    weight, bias = parameters(name)
    want = NORMS[name](np.ascontiguousarray(view), weight, bias)
    assert_close(NORMS[name](view, weight, bias), want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rx.layer_norm(X, CHANNEL),
            ValueError,
            r"weight must have shape \(5,\), got \(4,\)",
        ),
        (lambda: rx.layer_norm(X, ROW, CHANNEL), ValueError, r"bias must have shape \(5,\)"),
        (lambda: rx.layer_norm(X, n_axes=4), ValueError, r"n_axes must lie in \[1, 3\] .* got 4"),
        (lambda: rx.layer_norm(X, eps=0.0), ValueError, "eps must be above 0, got 0.0"),
        (lambda: rx.layer_norm(X, eps=np.inf), ValueError, "eps must be finite, got inf"),
        (lambda: rx.rms_norm(X, n_axes=0), ValueError, "n_axes must lie in"),
        (
            lambda: rx.rms_norm(X.astype("int64")),
            TypeError,
            "x must have a real floating-point dtype",
        ),
        (
            lambda: rx.group_norm(X, 3),
            ValueError,
            "n_groups must divide the 4 channels of x, got 3",
        ),
        (
            lambda: rx.group_norm(X[0, 0], 1),
            ValueError,
            r"x must have shape \(batch, channels, ...",
        ),
        (lambda: rx.batch_norm(X, ROW), ValueError, r"weight must have shape \(4,\), got \(5,\)"),
        (lambda: rx.batch_norm(X, mean=CHANNEL), ValueError, "mean and var must be given together"),
        (
            lambda: rx.batch_norm(X, mean=CHANNEL, var=ROW),
            ValueError,
            r"var must have shape \(4,\), got \(5,\)",
        ),
        (lambda: rx.batch_norm(X[:0]), ValueError, "x must have elements in each channel"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
def test_agreement_with_torch(against_torch):
    import torch
    from torch.nn import functional as F

    against_torch(rx.layer_norm, lambda x, w, b: F.layer_norm(x, (5,), w, b), X, ROW, ROW_BIAS)
    against_torch(
        lambda *a: rx.layer_norm(*a, n_axes=2),
        lambda x, w, b: F.layer_norm(x, (4, 5), w, b),
        X,
        X[0],
        X[1],
    )
    against_torch(rx.rms_norm, lambda x, w: F.rms_norm(x, (5,), w, 1e-6), X, ROW)
    channels = (X, CHANNEL, CHANNEL_BIAS)
    against_torch(NORMS["group"], lambda x, w, b: F.group_norm(x, 2, w, b), *channels)
    against_torch(
        NORMS["batch"], lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), *channels
    )
    mean, var = torch.tensor(CHANNEL), torch.tensor(CHANNEL**2)
    against_torch(NORMS["inference"], lambda x, w, b: F.batch_norm(x, mean, var, w, b), *channels)
