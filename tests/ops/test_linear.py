"""Affine maps and table look-ups."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(4)
X = rng.standard_normal((3, 2, 4))
WEIGHT = rng.standard_normal((5, 4))
BIAS = rng.standard_normal(5)
INDICES = np.array([[0, 3, 3], [2, 0, 3]])
TABLE = rng.standard_normal((4, 2))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 2, 4), (0, 4)], ids=str)
def test_linear(xp, shape):
    x = rng.standard_normal(shape)
    got = rx.linear(xp.asarray(x), xp.asarray(WEIGHT), xp.asarray(BIAS))
    assert_close(got, np.einsum("...i,oi->...o", x, WEIGHT) + BIAS)
    assert_close(
        rx.linear(xp.asarray(x), xp.asarray(WEIGHT)), np.einsum("...i,oi->...o", x, WEIGHT)
    )


def test_linear_of_strided_views_and_mixed_dtypes():
    x = X[::-1, :, ::2]
    assert_close(rx.linear(x, WEIGHT[:, 1:3]), x @ WEIGHT[:, 1:3].T)
    out = rx.linear(X.astype("float32"), WEIGHT.astype("float32"), BIAS)
    assert out.dtype == np.float64


def test_linear_leaves_its_input_alone():
    x, weight, bias = X.copy(), np.eye(4), np.ones(4)
    rx.linear(x, weight, bias)
    assert_close(x, X, exact=True)


def test_half_precision(check_half):
    check_half(rx.linear, X, WEIGHT, BIAS)
    check_half(lambda table: rx.embedding(INDICES, table), TABLE)


def test_per_sample_gradients(check_per_sample):
    check_per_sample(rx.linear, X, WEIGHT, BIAS)
    check_per_sample(rx.linear, X[:, 0], WEIGHT, BIAS)
    check_per_sample(rx.embedding, INDICES, TABLE)
    check_per_sample(lambda i, t: rx.embedding(i, t, padding_index=3), INDICES, TABLE)
    check_per_sample(rx.embedding, INDICES[:, 0], TABLE)


def test_per_sample_gradients_need_a_batch():
    weight = rx.Tensor(WEIGHT, requires_grad=True)
    with pytest.raises(ValueError, match="need a batch axis"):
        rx.autograd.per_sample_gradients(rx.sum(rx.linear(X[0, 0], weight)), [weight])


def test_embedding(xp):
    got = rx.embedding(xp.asarray(INDICES), xp.asarray(TABLE))
    assert_close(got, TABLE[INDICES], exact=True)
    assert rx.embedding(xp.asarray(INDICES[:0]), xp.asarray(TABLE)).shape == (0, 3, 2)


def test_gradient_of_embedding_adds_up_and_spares_the_padding():
    table = rx.Tensor(TABLE, requires_grad=True)
    rx.sum(rx.embedding(INDICES, table, padding_index=0) * np.array([1.0, 2.0])).backward()
    assert_close(table.grad, [[0, 0], [0, 0], [1, 2], [3, 6]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rx.linear(X, WEIGHT[0]), ValueError, "weight must have shape"),
        (
            lambda: rx.linear(X[..., :3], WEIGHT),
            ValueError,
            r"x must have shape \(..., 4\) for weight of shape \(5, 4\), got \(3, 2, 3\)",
        ),
        (lambda: rx.linear(X, WEIGHT, X[0, 0]), ValueError, r"bias must have shape \(5,\), got"),
        (lambda: rx.linear(INDICES, WEIGHT), TypeError, "x must have a real floating-point dtype"),
        (
            lambda: rx.embedding(TABLE, TABLE),
            TypeError,
            "indices must be an array of integers, got float64",
        ),
        (
            lambda: rx.embedding(INDICES + 1, TABLE),
            IndexError,
            r"indices must lie in \[0, 4\), got values from 1 to 4",
        ),
        (lambda: rx.embedding(INDICES - 1, TABLE), IndexError, "got values from -1 to 2"),
        (
            lambda: rx.embedding(INDICES, TABLE, padding_index=4),
            ValueError,
            r"padding_index must lie in \[0, 4\), got 4",
        ),
        (lambda: rx.embedding(INDICES, TABLE[0]), ValueError, "weight must have shape"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
def test_agreement_with_torch(against_torch):
    import torch
    from torch.nn import functional as F

    against_torch(rx.linear, F.linear, X, WEIGHT, BIAS)
    indices = torch.tensor(INDICES)
    against_torch(
        lambda table: rx.embedding(INDICES, table, padding_index=3),
        lambda table: F.embedding(indices, table, padding_idx=3),
        TABLE,
    )
