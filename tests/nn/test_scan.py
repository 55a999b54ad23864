"""The recurrences over time against a loop over steps, over every array library."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.nn._scan import gru_scan, lstm_scan
from rtxarr.testing import assert_close

BATCH, TIME, N = 2, 4, 3
KEPT = np.array([[True, True, True, False], [True, False, True, True]])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_lstm(gates, h, c, weight, kept, order):
    hs = np.zeros((BATCH, TIME, N))
    for b in range(BATCH):
        h_b, c_b = h[b], c[b]
        for t in order:
            i, f, a, o = np.split(gates[b, t] + weight @ h_b, 4)
            if kept[b, t]:
                c_b = sigmoid(f) * c_b + sigmoid(i) * np.tanh(a)
                h_b = sigmoid(o) * np.tanh(c_b)
            hs[b, t] = h_b
    return hs


def plain_gru(gates, h, weight, bias, kept, order):
    hs = np.zeros((BATCH, TIME, N))
    for b in range(BATCH):
        h_b = h[b]
        for t in order:
            x, y = np.split(gates[b, t], 3), np.split(weight @ h_b + bias, 3)
            r, z = sigmoid(x[0] + y[0]), sigmoid(x[1] + y[1])
            a = np.tanh(x[2] + r * y[2])
            if kept[b, t]:
                h_b = (1 - z) * a + z * h_b
            hs[b, t] = h_b
    return hs


LSTM = (draw(BATCH, TIME, 4 * N), draw(BATCH, N, seed=1), draw(BATCH, N, seed=2), draw(4 * N, N))
GRU = (draw(BATCH, TIME, 3 * N), draw(BATCH, N, seed=1), draw(3 * N, N), draw(3 * N, seed=3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("scan", "plain", "args"),
    [(lstm_scan, plain_lstm, LSTM), (gru_scan, plain_gru, GRU)],
    ids=["lstm", "gru"],
)
def test_states_follow_the_equations(xp, scan, plain, args, masked, reverse):
    kept = KEPT if masked else np.ones_like(KEPT)
    order = range(TIME)[::-1] if reverse else range(TIME)
    want = plain(*args, kept, order)
    mask = xp.asarray(KEPT) if masked else None
    tensors = [rx.Tensor(xp.asarray(a), requires_grad=True) for a in args]
    hs = scan(*tensors, mask, reverse=reverse)[0]
    assert_close(hs, want)
    rx.sum(hs * hs).backward()
    numpy = [rx.Tensor(a, requires_grad=True) for a in args]
    hs = scan(*numpy, KEPT if masked else None, reverse=reverse)[0]
    rx.sum(hs * hs).backward()
    for tensor, same in zip(tensors, numpy, strict=True):
        assert_close(tensor.grad, same.grad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_at_the_end_alone(dtype):
    kind = np.dtype(dtype)
    narrow = [a.astype(kind) for a in LSTM]
    want = lstm_scan(*(a.astype("float32") for a in narrow))[0]
    assert_close(lstm_scan(*narrow)[0], want.astype(kind), exact=True)
