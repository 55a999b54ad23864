"""Weighted sums over edges times a matrix: in the simulator, and on a GPU at full size."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.autograd import gradients
from rtxarr.geom import _bins, _projected
from rtxarr.kernels.gather import gather_reduce
from rtxarr.kernels.gather_product import fits, gather_product
from rtxarr.testing import assert_close

sparse = pytest.importorskip("scipy.sparse")


@pytest.fixture(autouse=True)
def on_small_graphs(monkeypatch):
    monkeypatch.setattr(_projected.kernels, "_FEW", 0)


@pytest.fixture(params=["few", "many"])
def skewed(request, place, monkeypatch):
    """Give a graph with isolated nodes and hubs, whose pieces come in pieces or not, and widths."""
    if place.kind == "cpu":
        monkeypatch.setattr(_bins, "_EDGES", 4)
        monkeypatch.setattr(_bins, "_PARTS", 2)
        n, hubs, widths = 13, [25, 9, 3], [(4, 8), (8, 4)]
    else:
        n, hubs, widths = 70_001, [200_000, 513, 512], [(128, 128), (128, 100)]
    if request.param == "few":
        hubs, widths = [3], widths[1:]
    rng = np.random.default_rng(2)
    src, dst = rng.integers(0, n, (2, 3 * n))
    src[src >= n - n // 3], dst[dst >= n - n // 3] = 1, 0  # the last are isolated
    for i, count in enumerate(hubs):
        dst[:count] = np.where(rng.random(count) < 0.9, i, dst[:count])
    order = np.argsort(dst, kind="stable")
    indptr = np.searchsorted(dst[order], np.arange(n + 1))
    x = rng.standard_normal((n, widths[0][0]), dtype="float32")
    matrix = rng.standard_normal(widths[0], dtype="float32")
    return indptr, src[order].astype(np.int32), x, rng.random(3 * n, dtype="float32"), matrix


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_products_are_those_of_float64(skewed, place, turned, biased, keep):
    indptr, indices, x, weight, matrix = skewed
    there = [_device.to_device(a, place) for a in (indptr, indices, x, weight)]
    to = _device.to_device(np.ascontiguousarray(matrix.T), place).T if turned else None
    to = _device.to_device(matrix, place) if to is None else to
    bias = np.arange(matrix.shape[1], dtype="float32")
    levels = _bins.deal_out(there[0], *((4, 2) if place.kind == "cpu" else ()))
    assert fits(there[2], to, indptr.shape[0] - 1)

    def run():
        given = there[2], there[0], there[1], levels, there[3], to
        row = _device.to_device(bias, place) if biased else None
        return gather_product(*given, bias=row, keep=keep)

    out, sums = run()
    shape = indptr.shape[0] - 1, x.shape[0]
    want = sparse.csr_array((weight.astype("f8"), indices, indptr), shape=shape) @ x.astype("f8")
    exact = want @ matrix.astype("f8") + bias * biased
    scale = np.abs(want) @ np.abs(matrix) + 1
    assert np.all(np.abs(_device.to_device(out, "cpu") - exact) < 1e-5 * scale)
    assert sums.shape == ((want.shape[0] if keep else 0), x.shape[1])
    if keep:
        options = {"extra": there[3]}
        same = gather_reduce("weighted", there[2], there[0], there[1], levels, **options)
        assert_close(_device.to_device(sums, "cpu"), _device.to_device(same, "cpu"), exact=True)
    again = run()
    assert_close(_device.to_device(again[0], "cpu"), _device.to_device(out, "cpu"), exact=True)


@pytest.mark.parametrize(
    "kinds",
    [
        {1: 1.0},
        {0: 1.0},
        {1: 0.5, 0: 0.5},
        {2: 0.9, 1: 0.1},
        {4: 0.2, 3: 0.4, 2: 0.2, 0: 0.2},
        {17: 0.02, 3: 0.3, 1: 0.4, 0: 0.28},
        {17: 1.0},
    ],
    ids=str,
)
def test_tiles_of_rows_of_all_lengths(kinds, place, monkeypatch):
    """Of pieces, of sums, of single entries and of none, and such in which they meet."""
    empty = _device.empty

    def poisoned(*arguments):
        out = empty(*arguments)
        out[...] = np.nan
        return out

    monkeypatch.setattr(_device, "empty", poisoned)  # what is not written shows
    n, cut = (19, (4, 2)) if place.kind == "cpu" else (50_003, (16, 4))
    width = 8 if place.kind == "cpu" else 128
    rng = np.random.default_rng(4)
    degrees = rng.permutation(np.repeat([*kinds], [1 + int(n * part) for part in kinds.values()]))
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, 31, indptr[-1]).astype("int32")
    x, weight = rng.standard_normal((31, width), "float32"), rng.random(indptr[-1], "float32")
    matrix = rng.standard_normal((width, width), "float32")
    there = [_device.to_device(a, place) for a in (x, indptr, indices, weight, matrix)]
    levels = _bins.deal_out(there[1], *cut)
    out, sums = gather_product(*there[:3], levels, *there[3:], keep=True)
    shape = degrees.size, 31
    want = sparse.csr_array((weight.astype("f8"), indices, indptr), shape=shape) @ x.astype("f8")
    for got, exact in ((sums, want), (out, want @ matrix)):
        close = {"rtol": 0, "atol": 1e-5 * max(1, np.abs(exact).max())}
        np.testing.assert_allclose(_device.to_device(got, "cpu"), exact, **close)
    again = gather_product(*there[:3], levels, *there[3:])[0]
    assert_close(_device.to_device(again, "cpu"), _device.to_device(out, "cpu"), exact=True)


class Guarded(np.ndarray):
    """An array that refuses negative indices, which NumPy counts from the end."""

    def __getitem__(self, index):
        self._check(index)
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self._check(index)
        super().__setitem__(index, value)

    def _check(self, index):
        for i in index if isinstance(index, tuple) else (index,):
            if isinstance(i, (int, np.integer)) and not 0 <= int(i) < self.size:
                raise IndexError(f"index {i} of {self.size}")


@pytest.mark.parametrize(
    "degrees",
    [
        [0],
        [1],
        [7],
        [0] * 9,
        [0, 0, 0, 3, 1, 2],
        [5, 1, 0, 0, 0, 1, 2],
        [2, 1, 9, 0, 0],
        [1, 1, 1, 0],
        [17, 0, 17],
    ],
    ids=str,
)
def test_nothing_beyond_the_arrays_is_read(degrees, place):
    """On a GPU ``compute-sanitizer`` tells, where there are no entries even a plain run."""
    width = 8 if place.kind == "cpu" else 68
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    rng = np.random.default_rng(1)
    n_src = 3 if indptr[-1] else 0
    indices = rng.integers(0, max(n_src, 1), indptr[-1]).astype("int32")
    x, weight = rng.standard_normal((n_src, width), "float32"), rng.random(indptr[-1], "float32")
    matrix, bias = rng.standard_normal((width, width), "float32"), np.arange(width, dtype="float32")
    there = [_device.to_device(a, place) for a in (x, indptr, indices, weight, matrix, bias)]
    levels = _bins.deal_out(there[1], 4, 2)
    if place.kind == "cpu":
        there = [a.view(Guarded) for a in there]
        levels = [
            _bins.Level(*(a.view(Guarded) for a in level[:3]), level.n_pieces) for level in levels
        ]
    for keep in (False, True):
        out, sums = gather_product(*there[:3], levels, *there[3:5], bias=there[5], keep=keep)
        want = np.zeros((len(degrees), width))
        for i, (start, stop) in enumerate(zip(indptr[:-1], indptr[1:], strict=True)):
            for j in range(start, stop):
                want[i] += weight[j].astype("f8") * x[indices[j]]
        np.testing.assert_allclose(
            _device.to_device(out, "cpu"), want @ matrix + bias, rtol=0, atol=1e-4
        )
        if keep:
            np.testing.assert_allclose(_device.to_device(sums, "cpu"), want, rtol=0, atol=1e-5)


def test_rows_that_are_nan_stay_where_they_are(skewed, place):
    indptr, indices, x, weight, matrix = skewed
    x[indices[-1]] = np.nan
    there = [_device.to_device(a, place) for a in (x, indptr, indices)]
    levels = _bins.deal_out(there[1])
    given = (*there, levels, *(_device.to_device(a, place) for a in (weight, matrix)))
    out = _device.to_device(gather_product(*given)[0], "cpu")
    rows = np.repeat(np.arange(out.shape[0]), np.diff(indptr))[indices == indices[-1]]
    assert np.array_equal(np.flatnonzero(np.isnan(out).any(axis=1)), np.unique(rows))


@pytest.fixture(params=[False, True], ids=["", "loops"])
def layer(request, skewed, place, monkeypatch):
    """Give a function that runs a layer with the kernel or without it, and what it runs on."""
    indptr, indices, x, _, matrix = skewed
    n_in, n_out = sorted(matrix.shape)  # else it multiplies first
    n, x = indptr.shape[0] - 1, x[:, :n_in].copy()
    dst = np.repeat(np.arange(n), np.diff(indptr))
    order = np.random.default_rng(0).permutation(dst.size)
    with rx.device(place):
        edges = (_device.to_device(a[order].astype(np.int64), place) for a in (indices, dst))
        graph = geom.Graph.from_edges(*edges, n_nodes=n)
        layer = geom.GCNConv(n_in, n_out, add_self_loops=request.param, device=place)
        layer.bias.assign(_device.to_device(np.arange(n_out, dtype="float32"), place))
    called = []

    def spy(*arguments, **options):
        called.append(options["keep"])
        return gather_product(*arguments, **options)

    monkeypatch.setattr(_projected.kernels, "gather_product", spy)

    def run(function, *, by_kernel=True):
        called.clear()
        with monkeypatch.context() as patch, rx.device(place):
            if not by_kernel:
                patch.setattr(_projected.kernels, "fits", lambda *_: False)
            found = function(graph, layer, rx.Tensor(_device.to_device(x, place)))
        return [rx.Tensor(a).numpy() for a in found], list(called)

    return run, graph, x, n


def test_a_layer_and_its_gradients_are_those_of_float64(layer):
    run, graph, x, n = layer
    g = np.random.default_rng(1).standard_normal((n, 1), dtype="float32")

    def step(graph, layer, x):
        x.requires_grad = True
        out = layer(graph, x)
        out.backward(_device.namespace(x.data).asarray(g) * out.data)
        return out, x.grad, layer.lin.weight.grad, layer.bias.grad, layer.lin.weight

    (out, *found, matrix), called = run(step)
    assert called == [True, False]
    loops = run(lambda graph, layer, x: [int(layer.add_self_loops)])[0][0]
    used, weight = geom.gcn_norm(graph, add_self_loops=bool(loops))
    weight, dst, src = (rx.Tensor(a).numpy() for a in (weight, used.dst, used.src))
    normal = sparse.csr_array((weight.astype("f8"), (dst, src)), shape=(n, n))
    sums = normal @ x.astype("f8")
    exact = sums @ matrix.T + np.arange(matrix.shape[0])
    given = g * out.astype("f8")
    wanted = normal.T @ given @ matrix, given.T @ sums, given.sum(axis=0)
    for got, want in zip((out, *found), (exact, *wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert run(lambda graph, layer, x: [layer(graph, x)])[1] == [True]
    with rx.no_grad():
        found, called = run(lambda graph, layer, x: [layer(graph, x)])
    assert called == [False]
    np.testing.assert_array_equal(found[0], out)
    with rx.autocast("bfloat16"):
        assert run(lambda graph, layer, x: [layer(graph, x)])[1] == []


def test_what_the_layer_gets_is_checked_before_the_kernel(layer):
    run, graph, x, n = layer
    n_in = x.shape[1]
    for shape, message in (
        ((n, n_in + 4), "x must have"),
        ((n, n_in - 4), "x must have"),
        ((n - 1, n_in), f"x must have a row for each of {n} sources"),
        ((n + 1, n_in), f"x must have a row for each of {n} sources"),
    ):
        with pytest.raises(ValueError, match=message):
            run(
                lambda graph, layer, x, shape=shape: [layer(graph, rx.ones(shape, dtype="float32"))]
            )

    def weighted(graph, layer, x):
        layer.normalize = False
        return [layer(graph, x, rx.ones(graph.n_edges + 2, dtype="float32"))]

    with pytest.raises(ValueError, match="an entry for each of"):
        run(weighted)


def test_wide_indices(skewed, place):
    indptr, indices, x, weight, matrix = (_device.to_device(a, place) for a in skewed)
    levels = _bins.deal_out(indptr, *((4, 2) if place.kind == "cpu" else ()))
    got, want = (
        gather_product(x, indptr, i, levels, weight, matrix)[0]
        for i in (indices.astype("int64"), indices)
    )
    assert_close(_device.to_device(got, "cpu"), _device.to_device(want, "cpu"), exact=True)


def test_a_bias_that_is_part_of_a_vector(skewed, place):
    indptr, indices, x, weight, matrix = (_device.to_device(a, place) for a in skewed)
    levels = _bins.deal_out(indptr, *((4, 2) if place.kind == "cpu" else ()))
    n_out = matrix.shape[1]
    vector = _device.to_device(np.arange(n_out + 5, dtype="float32"), place)
    given = x, indptr, indices, levels, weight, matrix
    for start in (1, 4, 5):
        bias = vector[start : start + n_out]
        got, want = (gather_product(*given, bias=b)[0] for b in (bias, bias.copy()))
        assert_close(_device.to_device(got, "cpu"), _device.to_device(want, "cpu"), exact=True)


def test_gradients_of_gradients_are_those_of_the_parts(layer):
    def step(graph, layer, x):
        x.requires_grad = True
        layer.zero_grad()
        wanted = x, layer.lin.weight
        grads = gradients([rx.mean(layer(graph, x) ** 2)], wanted, create_graph=True)
        sum(rx.sum(part**2) for part in grads).backward()
        return [part.grad for part in wanted]

    found, called = layer[0](step)
    assert called
    for got, want in zip(found, layer[0](step, by_kernel=False)[0], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_weights_of_edges_get_their_gradient(layer):
    n_edges = layer[1].n_edges
    weight = 1 + np.random.default_rng(3).random(n_edges, dtype="float32")

    def step(graph, layer, x):
        x.requires_grad = True
        layer.zero_grad()
        of_edges = rx.Tensor(_device.namespace(x.data).asarray(weight), requires_grad=True)
        rx.mean(layer(graph, x, of_edges) ** 2).backward()
        return x.grad, layer.lin.weight.grad, of_edges.grad

    found, _ = layer[0](step)
    for got, want in zip(found, layer[0](step, by_kernel=False)[0], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
