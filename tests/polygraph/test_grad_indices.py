"""Gradients of fused functions that make their own indices, behind operations on the tape."""

import numpy as np
import pytest

import rtxarr as rx

from .fused import assert_same

rng = np.random.default_rng(0)
X, W = rng.normal(size=(6, 4)), rng.normal(size=(4, 5))


def along(np, n):
    """Give an index that ``np`` makes anew, of ``n`` rows of one element."""
    return np.argsort(np.cos(np.arange(n)))[:, None] % 5


CASES = {
    "take": lambda np, x: rx.take(x, np.array([5, 0, 0, 3]), axis=0),
    "take columns": lambda np, x: rx.take(x, np.array([[4, 0], [0, 2]]), axis=1),
    "take of all": lambda np, x: rx.take(rx.reshape(x, (-1,)), np.arange(0, 30, 7)),
    "take along": lambda np, x: rx.take_along_axis(x, along(np, 6), axis=1),
    "take along rows": lambda np, x: rx.take_along_axis(x, np.array([[5, 0, 5, 1, 2]]), axis=0),
    "getitem": lambda np, x: x[np.array([2, 0, 0, -1])],
    "getitem of pairs": lambda np, x: x[np.arange(6), np.array([0, 1, 2, 3, 4, 0])],
    "getitem beside slices": lambda np, x: x[1:, np.array([0, 4, 4])],
    "cross entropy": lambda np, x: rx.cross_entropy(x, np.array([0, 1, 2, 3, 4, 0])),
    "soft labels": lambda np, x: rx.cross_entropy(x, np.arange(6) % 5, label_smoothing=0.1),
    "nll": lambda np, x: rx.nll_loss(rx.log_softmax(x), np.arange(6) % 5),
    "one hot": lambda np, x: rx.one_hot(np.arange(6) % 5, 5, dtype=rx.float64) * x,
    "embedding": lambda np, x: rx.embedding(np.array([[1, 3], [3, 5]]), x),
    "embedding, padded": lambda np, x: rx.embedding(np.array([1, 3, 3]), x, padding_index=3),
    "update": lambda np, x: rx.index_update(x, (np.array([0, 3]),), x[4:]),
    "add": lambda np, x: rx.index_add(x, (np.array([0, 3, 3]),), x[3:]),
    "scatter": lambda np, x: rx.scatter_add(x, np.array([3, 0, 3, 1, 1, 3]), 4),
    "scatter max": lambda np, x: rx.scatter_max(x, np.array([3, 0, 3, 1, 1, 3]), 4),
    "scatter min": lambda np, x: rx.scatter_min(x, np.array([3, 0, 3, 1, 1, 3]), 4),
    "segments": lambda np, x: rx.segment_sum(x, np.array([0, 2, 2, 6])),
    "segments' means": lambda np, x: rx.segment_mean(x, np.array([0, 2, 2, 6])),
    "segments' maxima": lambda np, x: rx.segment_max(x, np.array([0, 2, 2, 6])),
    "segments' minima": lambda np, x: rx.segment_min(x, np.array([0, 2, 2, 6])),
    "where": lambda np, x: rx.where(np.arange(5) % 2 == 0, rx.sqrt(rx.abs(x)), x),
    "factor": lambda np, x: x * np.linspace(0, 1, 5) + np.float64(2),
    "masked": lambda np, x: rx.where(x > 0, x[:, np.array([1, 0, 3, 2, 4])] ** 2, 0.0),
}


def first(f, then):
    """Give the gradients of a scalar of ``f``, which stands between operations."""

    def loss(x, w):
        out = f(x @ w)
        weights = rx.cos(rx.arange(out.size, dtype=out.dtype, device=out.device))
        return rx.sum(then(out * out) * weights.reshape(out.shape))

    return rx.value_and_grad(loss, (0, 1))


def second(f, then):
    def squares(x, w):
        _, found = first(f, then)(x, w)
        return sum(rx.sum(g * g) for g in found)

    return rx.grad(squares, (0, 1))


THEN = {
    "plain": lambda out: out,
    "behind where": lambda out: rx.where(out > 0.1, rx.sqrt(out), 0.0),
}


def function(name, library):
    """Give the case's function, whose arrays ``library`` makes."""
    case = CASES[name]
    return lambda x: case(library, x)


@pytest.mark.parametrize("backend", ["interpreter", None], ids=["interpreter", "kernels"])
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("order", [first, second])
@pytest.mark.parametrize("name", CASES)
def test_indices_made_inside(name, order, then, backend):
    f, then = function(name, np), THEN[then]
    fused = rx.fuse(f, backend=backend)
    with np.errstate(all="ignore"):
        want = order(f, then)(X, W)
        for _ in range(2):
            # What f gets from its first and from its second use is added up in another order.
            assert_same(order(fused, then)(X, W), want, exact=order is first)
    assert fused.n_eager == 0, fused.reasons
    assert fused.n_traces == 1


@pytest.mark.gpu
@pytest.mark.parametrize("order", [first, second])
@pytest.mark.parametrize("name", CASES)
def test_indices_made_inside_on_gpu(name, order):
    cupy = pytest.importorskip("cupy")
    f, then = function(name, cupy), THEN["behind where"]
    fused = rx.fuse(f)
    args = cupy.asarray(X), cupy.asarray(W)
    assert_same(order(fused, then)(*args), order(f, then)(*args), exact=False)
    assert fused.n_eager == 0, fused.reasons


LIVE = np.arange(6)[:, None] % 2 == 0

ROWS = {  # operations whose rules leave out the rows of their results that ``where`` left out
    "log_softmax": lambda x: rx.log_softmax(x) * 2,
    "softmax": lambda x: rx.softmax(x * 2) + 1,
    "layer_norm": lambda x: rx.layer_norm(x) * 2,
    "rms_norm": lambda x: rx.rms_norm(rx.exp(x)) * 2,
    "logsumexp": lambda x: rx.logsumexp(x, axis=1, keepdims=True) * 2,
    "running": lambda x: rx.cumulative_prod(rx.exp(x), axis=1) * 2,
    "norm": lambda x: rx.linalg.vector_norm(x, axis=1, keepdims=True) * 2,
}


@pytest.mark.parametrize("backend", ["interpreter", None], ids=["interpreter", "kernels"])
@pytest.mark.parametrize("name", ROWS)
def test_masks_that_need_more_than_was_kept(name, backend):
    """The more is computed again, in the values of the call."""

    def then(out):
        return rx.where(LIVE, out, 0.0)

    f = ROWS[name]
    fused = rx.fuse(f, backend=backend)
    full = X @ W
    for x in (np.where(LIVE, full, np.nan), full):
        with np.errstate(all="ignore"):
            want = rx.grad(lambda x: rx.sum(then(f(x))))(x)
            got = rx.grad(lambda x: rx.sum(then(fused(x))))(x)
        assert np.isfinite(want).all()
        assert_same(got, want)
    assert fused.n_eager == 0, fused.reasons


def test_what_is_computed_again_must_not_have_changed():
    fused = rx.fuse(ROWS["log_softmax"])
    x = rx.Tensor(X.copy(), requires_grad=True)
    out = rx.sum(rx.where(LIVE, fused(x), 0.0))
    with rx.no_grad():
        x[0] = 5.0
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


def test_an_array_that_is_written_and_needed_runs_as_it_is():
    def f(x, buffer):
        y = x * buffer
        buffer += 1
        return y

    def slope(f):
        return rx.grad(lambda x: rx.sum(f(x, np.full(3, 2.0))))(np.ones(3))

    fused = rx.fuse(f)
    with pytest.warns(RuntimeWarning, match="writes into an array that its gradient needs"):
        assert_same(slope(fused), slope(f))
