"""The kernels of the cross entropy in the simulator."""

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from rtxarr.kernels.cross_entropy import fits, soft_cross_entropy, soft_cross_entropy_gradient
from rtxarr.testing import assert_close


@pytest.mark.sim
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_match_scipy(dtype, shape):
    rng = np.random.default_rng(0)
    logits, targets = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    targets[..., 0] = 0
    grad = rng.standard_normal(shape[:-1]).astype(dtype)
    assert fits(logits, targets)
    want = -np.sum(targets * log_softmax(logits, axis=-1), axis=-1)
    assert_close(soft_cross_entropy(logits, targets), want)
    total = targets.sum(axis=-1, keepdims=True)
    want = grad[..., None] * (total * softmax(logits, axis=-1) - targets)
    assert_close(soft_cross_entropy_gradient(logits, targets, grad), want)


@pytest.mark.sim
def test_kernels_leave_out_classes_that_are_ruled_out():
    logits, targets = np.array([[-np.inf, 0.0]]), np.array([[0.0, 1.0]])
    assert_close(soft_cross_entropy(logits, targets), np.array([0.0]))
    assert_close(soft_cross_entropy_gradient(logits, targets, np.ones(1)), np.zeros((1, 2)))


@pytest.mark.sim
def test_other_arrays_do_not_fit():
    x = np.zeros((2, 3), "float32")
    assert not fits(x, x.astype("float64"))
    assert not fits(x.astype("float16"), x.astype("float16"))
    assert not fits(np.zeros((2, 65)), np.zeros((2, 65)))
    assert not fits(x[:0], x[:0])
