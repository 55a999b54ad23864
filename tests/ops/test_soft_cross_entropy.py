"""Cross entropy with class probabilities against SciPy."""

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

import rtxarr as rx
from rtxarr.testing import assert_close


def make(xp, shape, dtype="float64"):
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal(shape) * 3, rng.random(shape)
    targets[..., 0] = 0
    want = -np.sum(targets * log_softmax(logits, axis=-1), axis=-1)
    return xp.asarray(logits.astype(dtype)), xp.asarray(targets.astype(dtype)), want


@pytest.mark.parametrize("shape", [(3,), (5, 1), (2, 3, 7), (4, 100)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_match_scipy(xp, shape, dtype):
    logits, targets, want = make(xp, shape, dtype)
    got = rx.soft_cross_entropy(logits, targets)
    assert got.dtype == logits.dtype
    assert_close(got, want, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-6)


def test_no_rows_give_no_losses():
    assert rx.soft_cross_entropy(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0,)


def test_half_precision_is_rounded_once():
    logits, targets, _ = make(np, (4, 6), "float16")
    want = rx.soft_cross_entropy(logits.astype("float32"), targets.astype("float32"))
    got = rx.soft_cross_entropy(logits, targets)
    assert got.dtype == np.float16
    assert_close(got, want.astype("float16"), exact=True)


def test_large_logits_and_rows_without_targets(xp):
    logits = xp.asarray([[1000.0, 0.0], [0.0, -1000.0], [1.0, 2.0], [-np.inf, 0.0]])
    targets = xp.asarray([[0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.0, 1.0]])
    assert_close(rx.soft_cross_entropy(logits, targets), np.array([1000.0, 500.0, 0.0, 0.0]))


@pytest.mark.skip_xp("dask.array", reason="the comparison reads values on the host")
def test_one_hot_targets_give_the_cross_entropy_of_labels(xp):
    logits, _, _ = make(xp, (5, 4))
    labels = xp.asarray(np.array([0, 3, 1, 1, 2]))
    targets = rx.one_hot(labels, 4, dtype=logits.dtype)
    want = rx.cross_entropy(logits, labels, reduction="none")
    assert_close(rx.soft_cross_entropy(logits, targets), want)


@pytest.mark.skip_xp("dask.array", reason="the comparison reads values on the host")
def test_gradient_is_the_difference_of_probabilities(xp):
    logits, targets, _ = make(xp, (3, 4))
    got = rx.grad(lambda x: rx.sum(rx.soft_cross_entropy(x, targets)))(logits)
    logits, targets = rx.Tensor(logits).numpy(), rx.Tensor(targets).numpy()
    want = np.sum(targets, axis=-1, keepdims=True) * softmax(logits, axis=-1) - targets
    assert_close(got, want)


def test_shapes_and_dtypes_must_fit():
    with pytest.raises(ValueError, match=r"targets must have the shape of logits, \(3,\), got"):
        rx.soft_cross_entropy(np.zeros(3), np.zeros((1, 3)))
    with pytest.raises(TypeError, match="targets must"):
        rx.soft_cross_entropy(np.zeros(3), np.zeros(3, dtype=int))
