"""Layers written as functions of an edge and its two nodes."""

import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.geom import _edges
from rtxarr.testing import assert_close, gradcheck, gradgradcheck


class Gated(geom.MessagePassing):
    """Messages from everything there is, in a dict and a tuple."""

    def __init__(self, n, **options):
        super().__init__(**options)
        self.lin = nn.Linear(2 * n, n, dtype="float64", generator=rx.random.Generator(0))

    def message(self, src, dst, edge):
        scale, shift = edge
        both = rx.concat([src["x"], dst["x"]], axis=1)
        return rx.sigmoid(self.lin(both)) * scale + shift

    def update(self, out, dst):
        return out + dst["x"]


def parts(seed=0):
    rng = np.random.default_rng(seed)
    src = np.concatenate([rng.integers(0, 8, 30), [1, 1, 2]])
    dst = np.concatenate([np.where(rng.random(30) < 0.5, 3, rng.integers(0, 8, 30)), [1, 1, 0]])
    graph = geom.Graph.from_edges(src, dst, n_nodes=9)
    x, scale = rng.standard_normal((9, 2)), rng.standard_normal((33, 1))
    return graph, src, dst, x, scale, rng.standard_normal((33, 2))


def by_hand(layer, src, dst, x, scale, shift, n):
    out = x.copy()
    w, b = layer.lin.weight.data, layer.lin.bias.data
    for e, (i, j) in enumerate(zip(src, dst, strict=True)):
        z = np.concatenate([x[i], x[j]]) @ w.T + b
        out[j] += scale[e] / (1 + np.exp(-z)) + shift[e]
    return out


@pytest.mark.parametrize("chunk", [2**20, 40, 1])
def test_messages_of_everything(chunk, monkeypatch):
    monkeypatch.setitem(_edges.CHUNK, "cpu", chunk)
    graph, src, dst, x, scale, shift = parts()
    layer = Gated(2)
    got = layer(graph, {"x": x}, (scale, shift))
    assert_close(got, by_hand(layer, src, dst, x, scale, shift, 9))

    def call(x, scale, shift):
        return layer(graph, {"x": x}, (scale, shift))

    gradcheck(call, (x, scale, shift))
    gradgradcheck(call, (x, scale, shift))


def test_gradients_do_not_depend_on_the_runs(monkeypatch):
    graph, _, _, x, scale, shift = parts()
    found = []
    for chunk in (2**20, 60):
        monkeypatch.setitem(_edges.CHUNK, "cpu", chunk)
        layer = Gated(2, aggr="max")
        layer(graph, {"x": x}, (scale, shift)).backward(np.ones((9, 2)))
        found.append([p.grad for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


def test_random_messages_are_repeated(monkeypatch):
    monkeypatch.setitem(_edges.CHUNK, "cpu", 20)

    class Noisy(geom.MessagePassing):
        def message(self, src, dst, edge):
            return rx.dropout(src, 0.5)

    graph, _, _, x, *_ = parts()
    rx.random.seed(1)
    t = rx.Tensor(x, requires_grad=True)
    out = Noisy()(graph, t)
    out.backward(np.ones((9, 2)))
    # The sum is linear, so the gradient knows which elements were kept.
    assert_close(np.sum(t.grad * x), np.sum(out.data))


def test_several_operations_and_the_default_message():
    graph, src, dst, x, *_ = parts()
    layer = geom.MessagePassing(aggr=["mean", "max"])
    want = np.concatenate([geom.aggregate(graph, x, op) for op in ("mean", "max")], axis=1)
    assert_close(layer(graph, x), want, exact=True)


def test_own_reductions():
    class Last(geom.MessagePassing):
        def aggregate(self, messages, indptr):
            return rx.take(messages, indptr[1:] - 1, axis=0)

    graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([0, 0, 1]), n_src=3, n_dst=2)
    x = np.array([[1.0], [2.0], [3.0]])
    assert_close(Last()(graph, (x, None)), np.array([[2.0], [3.0]]), exact=True)


def test_memory_is_that_of_a_run(monkeypatch):
    n, degree, width = 1000, 100, 32
    monkeypatch.setitem(_edges.CHUNK, "cpu", 100_000)
    rng = np.random.default_rng(9)
    src = rng.integers(0, n, n * degree)
    graph = geom.Graph.from_edges(src, np.repeat(np.arange(n), degree), n_nodes=n)
    data = rng.standard_normal((n, width))

    class Difference(geom.MessagePassing):
        def message(self, src, dst, edge):
            return rx.tanh(src - dst)

    def run():
        x = rx.Tensor(data, requires_grad=True)
        out = Difference()(graph, x)
        out.backward(np.ones(out.shape))

    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * degree * width * 8 / 2


def test_bad_arguments():
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_src=1, n_dst=2)
    with pytest.raises(ValueError, match="op must be one of sum, mean"):
        geom.MessagePassing(aggr="avg")
    layer = geom.MessagePassing()
    with pytest.raises(ValueError, match="x must be a pair, of 1 sources and 2 destinations"):
        layer(graph, np.ones((2, 1)))
    with pytest.raises(ValueError, match="x must have a row for each of 2 destinations"):
        layer(graph, (np.ones((1, 1)), np.ones((1, 1))))
    with pytest.raises(ValueError, match="edge_attr must have a row for each of 1 edges"):
        layer(graph, (np.ones((1, 1)), None), np.ones(2))
