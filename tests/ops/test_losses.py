"""Losses against plain float64 formulas and PyTorch."""

import math
import tracemalloc

import numpy as np
import pytest
from scipy import special

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(2)
LOGITS = rng.standard_normal((4, 3))
LABELS = np.array([2, 0, 0, 1])
IGNORED = np.array([2, -100, 0, -100])
P = rng.standard_normal((4, 3))
Q = P + rng.uniform(0.2, 1.5, (4, 3)) * np.where(rng.random((4, 3)) < 0.5, -1, 1)
SHARES = rng.uniform(0.1, 0.9, (4, 3))
REDUCTIONS = ("mean", "sum", "none")


def reduced(losses, reduction):
    return {"mean": np.mean, "sum": np.sum, "none": np.asarray}[reduction](losses)


def plain_cross_entropy(logits, labels, smoothing=0.0):
    losses = []
    for row, label in zip(logits, labels, strict=True):
        log_probs = [x - math.log(sum(map(math.exp, row))) for x in row]
        losses.append(-(1 - smoothing) * log_probs[label] - smoothing * np.mean(log_probs))
    return np.array(losses)


@pytest.mark.skip_xp("dask.array", reason="dask has no take_along_axis")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(xp, reduction, smoothing):
    logits, labels = xp.asarray(LOGITS), xp.asarray(LABELS)
    got = rx.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
    assert_close(got, reduced(plain_cross_entropy(LOGITS, LABELS, smoothing), reduction))
    if not smoothing:
        got = rx.nll_loss(rx.log_softmax(logits), labels, reduction=reduction)
        assert_close(got, reduced(plain_cross_entropy(LOGITS, LABELS), reduction))


@pytest.mark.skip_xp("dask.array", reason="dask has no take_along_axis")
def test_ignored_labels(xp):
    kept = plain_cross_entropy(LOGITS[[0, 2]], LABELS[[0, 2]])
    options = {"ignore_index": -100}
    logits, labels = xp.asarray(LOGITS), xp.asarray(IGNORED)
    assert_close(rx.cross_entropy(logits, labels, **options), kept.mean())
    each = rx.cross_entropy(logits, labels, reduction="none", **options)
    assert_close(each, [kept[0], 0, kept[1], 0])
    assert_close(rx.nll_loss(rx.log_softmax(logits), labels, **options), kept.mean())
    right = np.argmax(LOGITS, axis=1) == IGNORED
    assert_close(rx.accuracy(logits, labels, **options), right[[0, 2]].mean())


def test_gradient_of_cross_entropy_is_probabilities_minus_labels():
    for axis, logits in ((1, LOGITS), (0, np.ascontiguousarray(LOGITS.T))):
        x = rx.Tensor(logits, requires_grad=True)
        rx.cross_entropy(x, LABELS, axis=axis, reduction="sum").backward()
        want = special.softmax(LOGITS, axis=1) - np.eye(3)[LABELS]
        assert_close(x.grad, want if axis else want.T)


@pytest.mark.parametrize(
    "labels", [np.full(4, 7), np.zeros(0, dtype="int64")], ids=["all", "empty"]
)
def test_nothing_to_learn_from_gives_zero(labels):
    x = rx.Tensor(LOGITS[: labels.size], requires_grad=True)
    for loss in (
        rx.cross_entropy(x, labels, ignore_index=7, label_smoothing=0.1),
        rx.nll_loss(x, labels, ignore_index=7),
    ):
        loss.backward()
        assert loss.item() == 0
        assert_close(x.grad, np.zeros(x.shape))
    assert rx.accuracy(x, labels, ignore_index=7).item() == 0
    if not labels.size:
        assert rx.mse_loss(x, x).item() == 0
        assert rx.kl_div(x, x, reduction="batchmean").item() == 0


def test_large_and_hidden_logits():
    logits = rx.Tensor(np.array([[1000.0, 0.0, -np.inf]], dtype="float32"), requires_grad=True)
    loss = rx.cross_entropy(logits, np.array([1]))
    loss.backward()
    assert_close(loss, 1000.0)
    assert_close(logits.grad, [[1, -1, 0]])


def test_cross_entropy_of_a_vector_and_of_images():
    assert_close(rx.cross_entropy(LOGITS[0], LABELS[0]), plain_cross_entropy(LOGITS, LABELS)[0])
    images = rng.standard_normal((2, 3, 4, 5))
    labels = rng.integers(0, 3, (2, 4, 5))
    rows = np.moveaxis(images, 1, -1).reshape(-1, 3)
    want = plain_cross_entropy(rows, labels.reshape(-1)).reshape(2, 4, 5)
    assert_close(rx.cross_entropy(images, labels, axis=1, reduction="none"), want)


def test_memory_of_cross_entropy():
    logits = rng.standard_normal((256, 8192)).astype("float32")
    labels = rng.integers(0, 8192, 256)
    x = rx.Tensor(logits, requires_grad=True)
    rx.cross_entropy(x, labels).backward()
    x.grad = None
    tracemalloc.start()
    loss = rx.cross_entropy(x, labels)
    after_forward, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    loss.backward()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after_forward < logits.nbytes / 16  # no table of probabilities is kept
    assert peak < 2.2 * logits.nbytes  # the gradient, and one more while it is made


# --------------------------------------------------------------------- of two arrays


def huber(d, delta):
    return np.where(abs(d) <= delta, 0.5 * d * d, delta * (abs(d) - 0.5 * delta))


TWO = {
    "mse_loss": ({}, (P, Q), lambda x, y: (x - y) ** 2),
    "l1_loss": ({}, (P, Q), lambda x, y: abs(x - y)),
    "huber_loss": ({"delta": 0.7}, (P, Q), lambda x, y: huber(x - y, 0.7)),
    "smooth_l1_loss": ({"beta": 0.7}, (P, Q), lambda x, y: huber(x - y, 0.7) / 0.7),
    "binary_cross_entropy_with_logits": (
        {},
        (P, SHARES),
        lambda x, t: -t * np.log(special.expit(x)) - (1 - t) * np.log(1 - special.expit(x)),
    ),
    "kl_div": ({}, (P, SHARES), lambda q, p: p * (np.log(p) - q)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", TWO)
def test_losses_of_two_arrays(xp, name, reduction):
    options, arrays, formula = TWO[name]
    got = getattr(rx, name)(*map(xp.asarray, arrays), reduction=reduction, **options)
    assert_close(got, reduced(formula(*arrays), reduction))


def test_smooth_l1_without_parabola():
    assert_close(rx.smooth_l1_loss(P, Q, beta=0), np.mean(abs(P - Q)))


def test_weight_of_positive_targets(xp):
    weight = np.array([1.0, 2.0, 0.5])
    got = rx.binary_cross_entropy_with_logits(
        xp.asarray(P), xp.asarray(SHARES), pos_weight=xp.asarray(weight), reduction="none"
    )
    p = special.expit(P)
    assert_close(got, -weight * SHARES * np.log(p) - (1 - SHARES) * np.log(1 - p))


def test_binary_cross_entropy_is_exact_in_the_tail():
    logits = np.array([60.0, -60.0, 800.0])
    got = rx.binary_cross_entropy_with_logits(logits, np.array([1.0, 0.0, 0.0]), reduction="none")
    assert_close(got, [math.exp(-60), math.exp(-60), 800.0], rtol=1e-12, atol=0)


def test_kl_div_of_certain_targets_and_of_logarithms(xp):
    target = np.array([[1.0, 0.0], [0.5, 0.5]])
    log_probs = np.log(np.array([[0.8, 0.2], [0.5, 0.5]]))
    got = rx.kl_div(xp.asarray(log_probs), xp.asarray(target), reduction="batchmean")
    assert_close(got, -math.log(0.8) / 2)
    logs = xp.asarray(np.log(SHARES))
    got = rx.kl_div(xp.asarray(P), logs, log_target=True, reduction="none")
    assert_close(got, SHARES * (np.log(SHARES) - P))
    tensor = rx.Tensor(target, requires_grad=True)
    rx.kl_div(log_probs, tensor, reduction="sum").backward()
    assert np.isfinite(tensor.grad).all()


def test_cosine_similarity(xp):
    got = rx.cosine_similarity(xp.asarray(P), xp.asarray(Q), axis=0)
    want = (P * Q).sum(0) / np.linalg.norm(P, axis=0) / np.linalg.norm(Q, axis=0)
    assert_close(got, want)


def test_cosine_similarity_of_zero_is_zero_with_a_finite_gradient():
    x = rx.Tensor(np.zeros(3), requires_grad=True)
    out = rx.cosine_similarity(x, np.ones(3))
    out.backward()
    assert out.item() == 0 and np.isfinite(x.grad).all()


# -------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", TWO)
def test_half_precision(check_half, name):
    options, arrays, _ = TWO[name]
    check_half(lambda *a: getattr(rx, name)(*a, **options), *arrays)


def test_half_precision_of_class_losses(check_half):
    check_half(lambda x: rx.cross_entropy(x, LABELS, label_smoothing=0.1), LOGITS)
    check_half(lambda x: rx.nll_loss(x, LABELS, reduction="none"), LOGITS)
    check_half(rx.cosine_similarity, P, Q)


def test_squares_of_float16_do_not_overflow():
    x = np.full(8, 300, dtype="float16")
    assert_close(rx.mse_loss(x, np.zeros_like(x) + np.float16(100)), 40000.0)


def test_accuracy_is_not_differentiable():
    out = rx.accuracy(rx.Tensor(LOGITS, requires_grad=True), LABELS)
    assert not out.requires_grad
    assert_close(out, (np.argmax(LOGITS, axis=1) == LABELS).mean())


# -------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rx.cross_entropy(LOGITS, LABELS.astype("float64")),
            TypeError,
            "labels must be an array of integers, got float64",
        ),
        (
            lambda: rx.cross_entropy(LOGITS, LABELS[:3]),
            ValueError,
            r"labels must have the shape of logits without axis 1, \(4,\), got \(3,\)",
        ),
        (
            lambda: rx.cross_entropy(LOGITS, LABELS + 1),
            IndexError,
            r"labels must lie in \[0, 3\), got values from 1 to 3",
        ),
        (
            lambda: rx.cross_entropy(LOGITS, IGNORED),
            IndexError,
            r"labels must lie in \[0, 3\), got values from -100",
        ),
        (
            lambda: rx.cross_entropy(LOGITS, LABELS, label_smoothing=1.5),
            ValueError,
            r"label_smoothing must lie in \[0, 1\], got 1.5",
        ),
        (
            lambda: rx.cross_entropy(LOGITS, LABELS, reduction="batch"),
            ValueError,
            "reduction must be 'mean', 'sum' or 'none', got 'batch'",
        ),
        (
            lambda: rx.cross_entropy(LABELS, LABELS),
            TypeError,
            "logits must have a real floating-point dtype, got int64",
        ),
        (lambda: rx.nll_loss(LOGITS, [0, 1, 2, 0]), ValueError, "labels must have the shape"),
        (
            lambda: rx.mse_loss(P, Q[0]),
            ValueError,
            r"target must have the shape of prediction, \(4, 3\), got \(3,\)",
        ),
        (
            lambda: rx.l1_loss(P, LABELS),
            TypeError,
            "target must have a real floating-point dtype, got int64",
        ),
        (lambda: rx.huber_loss(P, Q, delta=0), ValueError, "delta must be above 0, got 0"),
        (lambda: rx.smooth_l1_loss(P, Q, beta=-1), ValueError, "beta must be at least 0, got -1"),
        (lambda: rx.cosine_similarity(P, Q, eps=0), ValueError, "eps must be above 0, got 0"),
        (lambda: rx.huber_loss(P, Q, delta=np.inf), ValueError, "delta must be finite, got inf"),
        (lambda: rx.smooth_l1_loss(P, Q, beta="1"), TypeError, "beta must be a number, got str"),
        (
            lambda: rx.kl_div(np.float64(0), np.float64(1), reduction="batchmean"),
            ValueError,
            "log_probs must have a batch axis",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------- PyTorch


@pytest.mark.compare
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_agreement_with_torch(against_torch, reduction):
    import torch
    from torch.nn import functional as F

    options = {"reduction": reduction}
    labels = torch.tensor(IGNORED)
    for smoothing in (0.0, 0.2):
        against_torch(
            lambda x, s=smoothing: rx.cross_entropy(
                x, IGNORED, ignore_index=-100, label_smoothing=s, **options
            ),
            lambda x, s=smoothing: F.cross_entropy(x, labels, label_smoothing=s, **options),
            LOGITS,
        )
    against_torch(
        lambda x: rx.nll_loss(x, IGNORED, ignore_index=-100, **options),
        lambda x: F.nll_loss(x, labels, **options),
        LOGITS,
    )
    weight = np.array([1.0, 2.0, 0.5])
    against_torch(
        lambda x, t: rx.binary_cross_entropy_with_logits(x, t, pos_weight=weight, **options),
        lambda x, t: F.binary_cross_entropy_with_logits(
            x, t, pos_weight=torch.tensor(weight), **options
        ),
        P,
        SHARES,
    )


@pytest.mark.compare
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_agreement_of_two_arrays_with_torch(against_torch, name, reduction):
    from torch.nn import functional as F

    options, arrays, _ = TWO[name]
    options = {"reduction": reduction, **options}
    against_torch(
        lambda *a: getattr(rx, name)(*a, **options),
        lambda *a: getattr(F, name)(*a, **options),
        *arrays,
    )


@pytest.mark.compare
def test_agreement_of_cosine_similarity_with_torch(against_torch):
    from torch.nn import functional as F

    against_torch(rx.cosine_similarity, lambda x, y: F.cosine_similarity(x, y, -1), P, Q)
