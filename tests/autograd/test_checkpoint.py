"""Checkpointed calls: equal gradients, less memory, and the same random numbers."""

import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

X = np.array([[0.3, 0.7], [1.1, -0.4]])


def block(x, w):
    return rx.tanh(rx.matmul(x, w)) * rx.exp(x)


def test_gradients_are_equal_to_the_bit():
    w = rx.Tensor(X + 1, requires_grad=True)

    def run(call):
        x = rx.Tensor(X, requires_grad=True)
        w.grad = None
        rx.sum(call(block, call(block, x, w), w)).backward()
        return x.grad, w.grad

    plain = run(lambda f, *a: f(*a))
    for got, want in zip(run(rx.checkpoint), plain, strict=True):
        assert_close(got, want, exact=True)


def test_closures_and_nested_containers():
    w = rx.Tensor(X, requires_grad=True)
    x = rx.Tensor(X, requires_grad=True)
    out = rx.checkpoint(lambda p, *, k: {"y": rx.exp(p["x"][0] * w) * k}, {"x": [x]}, k=2.0)
    rx.sum(out["y"]).backward()
    assert_close(w.grad, 2 * X * np.exp(X * X))
    assert_close(x.grad, 2 * X * np.exp(X * X))


def test_dropout_is_repeated():
    generator = Generator(3)
    x = rx.Tensor(np.ones(1000), requires_grad=True)
    y = rx.checkpoint(lambda x: rx.exp(x) * generator.dropout_mask((1000,), 0.5), x)
    later = generator.uniform((4,))
    rx.sum(y).backward()
    assert_close(x.grad, y.data, exact=True)  # d exp(x) m = exp(x) m, under the same mask
    assert 0 < np.count_nonzero(y.data) < 1000
    # The repetition leaves the generator where it was.
    again = Generator(3)
    again.dropout_mask((1000,), 0.5)
    again.uniform((4,))
    assert_close(generator.uniform((4,)), again.uniform((4,)), exact=True)
    assert later.shape == (4,)


def test_second_order():
    gradcheck(lambda x, w: rx.checkpoint(block, x, w), (X, X + 1))
    gradgradcheck(lambda x, w: rx.checkpoint(block, x, w), (X, X + 1))


def test_nested_checkpoints():
    calls = []

    def inner(x):
        calls.append("inner")
        return rx.exp(rx.sin(x))

    def outer(x):
        calls.append("outer")
        return rx.checkpoint(inner, rx.checkpoint(inner, x) * 0.5)

    x = rx.Tensor(X, requires_grad=True)
    rx.sum(rx.checkpoint(outer, x)).backward()
    y = rx.Tensor(X, requires_grad=True)
    rx.sum(outer(y)).backward()
    assert_close(x.grad, y.grad, exact=True)
    assert calls[:3] == ["outer", "inner", "inner"] and "outer" in calls[3:]


def test_memory_of_a_deep_chain_falls():
    def layer(x):
        for _ in range(8):
            x = rx.tanh(x)
        return x

    def peak(call):
        x = rx.Tensor(np.full(200_000, 0.1), requires_grad=True)
        tracemalloc.start()
        y = x
        for _ in range(8):
            y = call(layer, y)
        rx.sum(y).backward()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(rx.checkpoint) < 0.35 * peak(lambda f, x: f(x))


def test_spawned_generators_are_spawned_again():
    rng = Generator(3)
    x = rx.Tensor(X, requires_grad=True)
    factors = []

    def f(x):
        factors.append(rng.spawn(1)[0].uniform(X.shape))
        return x * x * factors[-1]

    rx.sum(rx.checkpoint(f, x)).backward()
    assert_close(factors[1], factors[0], exact=True)
    assert_close(x.grad, 2 * X * factors[0])


def test_side_effects_can_be_skipped():
    seen = []

    def f(x):
        seen.append(rx.autograd.is_recomputing())
        return x * x

    x = rx.Tensor(X, requires_grad=True)
    rx.sum(rx.checkpoint(f, x)).backward()
    assert seen == [False, True]
    assert not rx.autograd.is_recomputing()


def test_a_function_that_changes_is_refused():
    count = []

    def f(x):
        count.append(1)
        return x * x if len(count) == 1 else rx.exp(x) * x

    x = rx.Tensor(X, requires_grad=True)
    y = rx.sum(rx.checkpoint(f, x))
    with pytest.raises(RuntimeError, match="must do the same each time.* 1 .* 2 "):
        y.backward()


def test_a_changed_argument_is_refused():
    c = rx.Tensor(X.copy())
    x = rx.Tensor(X, requires_grad=True)
    y = rx.sum(rx.checkpoint(lambda x, c: x * (c + 1), x, c))
    c[0, 0] = 5.0
    with pytest.raises(RuntimeError, match="checkpointed call was changed in place"):
        y.backward()


def test_without_recording_nothing_is_kept():
    with rx.no_grad():
        y = rx.checkpoint(block, rx.Tensor(X, requires_grad=True), X)
    assert y.node is None
