"""Kernels between nodes and edges against float64: in the simulator, and on a GPU at full size."""

import ml_dtypes
import numpy as np
import pytest

from rtxarr import _device, geom
from rtxarr.dtypes import accumulator
from rtxarr.geom import _edges
from rtxarr.geom._edges import edges_of
from rtxarr.kernels import edges

# Relative to the largest number.
PRECISION = {"float32": 3e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1e-2}
SHAPES = [("float32", 2, 4), ("float16", 1, 8), ("bfloat16", 3, 1), ("float64", 2, 3)]
ON_GPU = pytest.mark.parametrize(
    "place", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)


def sizes(place, shape):
    """Give heads and features: those of the case, and on a GPU wider ones too."""
    return [shape] if place.kind == "cpu" else [shape, (4, 32), (1, 150)]


@pytest.fixture(params=SHAPES, ids=lambda case: "-".join(map(str, case)))
def case(request, place):
    """Give an element type, and numbers of heads and features."""
    name, *shape = request.param
    return dtype_of(name), sizes(place, tuple(shape))


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def draw(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


def there(place, *arrays):
    return [None if x is None else _device.to_device(x, place) for x in arrays]


def near(got, want, dtype):
    assert got.dtype == dtype
    got = np.asarray(_device.to_device(got, "cpu"), np.float64)
    assert got.shape == want.shape
    largest = np.abs(want).max(initial=1)
    assert np.abs(got - want).max(initial=0) <= PRECISION[dtype.name] * largest


def float64(*arrays):
    return [x.astype(np.float64) for x in arrays]


def summed(rows, at, n):
    out = np.zeros((n, *rows.shape[1:]))
    np.add.at(out, at, rows)
    return out


def slopes(graph, key_src, key_dst):
    """Give the slopes of a leaky ReLU, in the type of the keys: their sums are rounded in it."""
    dtype = accumulator(key_src.dtype)
    key_src, key_dst = key_src.astype(dtype), key_dst.astype(dtype)
    return np.where(key_src[graph.src] + key_dst[graph.dst] > 0, 1, 0.3)


def test_inner_products(place, skewed, case):
    dtype, shapes = case
    graph, rng = skewed, np.random.default_rng(0)
    on = edges_of(graph.to_device(place))
    for shape in shapes:
        u, v = draw(rng, dtype, graph.n_src, *shape), draw(rng, dtype, graph.n_dst, *shape)
        moved = there(place, u, v)
        assert edges.fit(*moved)
        got = edges.edge_dot(*moved, on)
        u, v = float64(u, v)
        near(got, (u[graph.src] * v[graph.dst]).sum(-1), dtype)


@pytest.mark.parametrize("both", [True, False], ids=["both", "destination"])
def test_gated_products(place, skewed, case, both):
    dtype, shapes = case
    graph, rng = skewed, np.random.default_rng(1)
    on = edges_of(graph.to_device(place))
    for shape in shapes:
        key_src, y_src = (draw(rng, dtype, graph.n_src, *shape) for _ in range(2))
        key_dst, y_dst = (draw(rng, dtype, graph.n_dst, *shape) for _ in range(2))
        moved = there(place, y_src if both else None, y_dst, key_src, key_dst)
        got = edges.gated_dot(*moved, on, slope=0.3)
        slope = slopes(graph, key_src, key_dst)
        y_src, y_dst = float64(y_src, y_dst)
        rows = y_dst[graph.dst] + (y_src[graph.src] if both else 0)
        near(got, (rows * slope).sum(-1), dtype)


def test_gated_sums(place, skewed, case):
    dtype, shapes = case
    graph, rng = skewed, np.random.default_rng(2)
    on = edges_of(graph.to_device(place))
    for shape in shapes:
        values = draw(rng, dtype, graph.n_edges, shape[0])
        key_src, key_dst = (draw(rng, dtype, n, *shape) for n in (graph.n_src, graph.n_dst))
        moved = there(place, values, key_src, key_dst)
        got = edges.gated_sum(*moved, on, slope=0.3)
        slope = slopes(graph, key_src, key_dst)
        want = summed(values.astype(np.float64)[..., None] * slope, graph.dst, graph.n_dst)
        near(got, want, dtype)


def softmax(graph, logits):
    """Give the softmax over the edges of each destination."""
    out = np.zeros(logits.shape)
    for i in range(graph.n_dst):
        own = graph.edge_ids[graph.indptr[i] : graph.indptr[i + 1]]
        if own.size:
            shares = np.exp(logits[own] - logits[own].max(0))
            out[own] = shares / shares.sum(0)
    return out


def test_softmax_and_its_gradient(place, skewed, case):
    dtype, shapes = case
    graph, rng = skewed, np.random.default_rng(3)
    on = edges_of(graph.to_device(place))
    for n_heads, _ in shapes:
        logits, grad = (draw(rng, dtype, graph.n_edges, n_heads) for _ in range(2))
        (moved,) = there(place, 4 * logits)
        assert edges.fits_softmax(moved)
        near(edges.edge_softmax(moved, on), softmax(graph, *float64(4 * logits)), dtype)
        out = softmax(graph, *float64(logits)).astype(dtype)
        got = edges.edge_softmax_gradient(*there(place, grad, out), on)
        grad, out = float64(grad, out)
        total = summed(out * grad, graph.dst, graph.n_dst)
        near(got, out * (grad - total[graph.dst]), dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the simulator: infinity minus itself
def test_softmax_of_what_is_not_finite(place):
    """Rows of -inf give zeros, also hubs cut into pieces; a NaN spoils its row alone."""
    n = 6 if place.kind == "cpu" else 2000
    dst = np.concatenate([np.full(n, 0), np.full(n, 1), [2, 2, 3, 3]])
    graph = geom.Graph.from_edges(np.zeros_like(dst), dst, n_nodes=5)
    logits = np.full((dst.size, 1), -np.inf, np.float32)
    logits[n + 3], logits[-4:, 0] = 5, [-3e38, 3e38, np.nan, 1]
    want = np.zeros(dst.size, np.float32)
    want[n + 3], want[-4:] = 1, [0, 1, np.nan, np.nan]
    got = edges.edge_softmax(*there(place, logits), edges_of(graph.to_device(place)))
    np.testing.assert_array_equal(_device.to_device(got, "cpu")[:, 0], want)


def test_heads_and_vectors(place, skewed, case):
    dtype, shapes = case
    n, rng = skewed.n_dst, np.random.default_rng(4)
    for shape in shapes:
        x, a, b = (draw(rng, dtype, *lead, *shape) for lead in ((n,), (), ()))
        wide = accumulator(dtype)
        for got, vector in zip(edges.head_dots(*there(place, x, a, b)), (a, b), strict=True):
            near(got, np.multiply(*float64(x, vector)).sum(-1), wide)
        numbers = [draw(rng, wide, n, shape[0]) for _ in range(2)]
        for got, y in zip(edges.head_sums(*there(place, x, *numbers)), numbers, strict=True):
            near(got, (y[..., None] * x.astype(np.float64)).sum(0), wide)


def test_arrays_in_any_layout(place, skewed):
    """Rows that lie apart or backwards, and edges in the order in which they are stored."""
    rng = np.random.default_rng(5)
    graph = skewed
    order = np.argsort(graph.dst, kind="stable")
    ordered = geom.Graph.from_edges(graph.src[order], graph.dst[order], n_nodes=graph.n_dst)
    assert ordered.is_ordered and not graph.is_ordered
    u = rng.standard_normal((graph.n_src, 2, 10)).astype(np.float32)
    v = rng.standard_normal((2, 4, graph.n_dst)).astype(np.float32)
    want = (u[..., 1:9:2][graph.src] * v.T.transpose(0, 2, 1)[graph.dst]).sum(-1, dtype=np.float64)
    a, b = there(place, u, v)
    a, b = a[..., 1:9:2], b.transpose(2, 0, 1)
    dtype = np.dtype(np.float32)
    near(edges.edge_dot(a, b, edges_of(graph.to_device(place))), want, dtype)
    near(edges.edge_dot(a, b, edges_of(ordered.to_device(place))), want[order], dtype)
    (logits,) = there(place, want.astype(np.float32)[::-1].copy())
    got = edges.edge_softmax(logits[::-1], edges_of(graph.to_device(place)))
    near(got, softmax(graph, want), dtype)


@pytest.mark.parametrize("n_src, n_dst", [(3, 2), (0, 2), (2, 0), (0, 0)])
def test_graphs_without_edges(place, n_src, n_dst):
    none = np.zeros(0, np.int64)
    graph = geom.Graph.from_edges(none, none, n_src=n_src, n_dst=n_dst).to_device(place)
    src, dst, values = there(
        place, *(np.ones(shape, np.float32) for shape in [(n_src, 2, 4), (n_dst, 2, 4), (0, 2)])
    )
    on = edges_of(graph)
    assert edges.edge_dot(src, dst, on).shape == (0, 2)
    assert edges.gated_dot(src, dst, src, dst, on, slope=0.3).shape == (0, 2)
    got = edges.gated_sum(values, src, dst, on, slope=0.3)
    near(got, np.zeros((n_dst, 2, 4)), np.dtype(np.float32))
    assert not edges.fits_softmax(values)
    assert _edges.softmax_over_edges(values, graph=graph).shape == (0, 2)


def test_what_does_not_fit(place):
    x, y = there(place, np.zeros((3, 2, 4), np.float32), np.zeros((3, 2, 4)))
    assert edges.fit(x, x[:2], None)
    assert not edges.fit(x, y)
    assert not edges.fit(x, x[:, :1])
    assert not edges.fit(x[:, 0], x[:, 0])
    assert not edges.fits_softmax(x[0].astype(np.int32))


@ON_GPU
def test_bits_do_not_change(place, skewed):
    graph, rng = skewed, np.random.default_rng(6)
    on = edges_of(graph.to_device(place))
    src, dst = (draw(rng, np.float32, n, 4, 32) for n in (graph.n_src, graph.n_dst))
    logits = draw(rng, np.float32, graph.n_edges, 4)
    src, dst, logits = there(place, src, dst, logits)

    def results():
        yield edges.edge_dot(src, dst, on)
        yield edges.gated_dot(src, dst, src, dst, on, slope=0.3)
        yield edges.gated_sum(logits, src, dst, on, slope=0.3)
        yield edges.edge_softmax(logits, on)
        yield edges.edge_softmax_gradient(logits, logits, on)
        yield from edges.head_sums(src, logits[: graph.n_src], logits[-graph.n_src :])

    first = [_device.to_device(x, "cpu").tobytes() for x in results()]
    for _ in range(20):
        assert [_device.to_device(x, "cpu").tobytes() for x in results()] == first
