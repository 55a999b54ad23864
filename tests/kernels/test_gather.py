"""Reductions over gathered rows against float64: in the simulator, and on a GPU at full size."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.geom import _bins, _edges
from rtxarr.geom._aggregate import weighted_sum
from rtxarr.kernels import product
from rtxarr.kernels.gather import gather_reduce
from rtxarr.testing import assert_close

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]
KINDS = {
    "sum": "plain", "mean": "mean", "max": "filled", "min": "filled", "weighted": "plain",
    "scaled": "plain", "squares": "mean", "ties": "share", "matched": "plain",
    "difference": "plain", "others": "plain",
}  # fmt: skip


@pytest.fixture(params=["few", "many"])
def skewed(request, place, monkeypatch):
    """Give a multigraph with loops, duplicates, isolated nodes and hubs, and a wide one or not.

    Hubs need pieces of pieces: in the simulator pieces are small.
    """
    if place.kind == "cpu":
        monkeypatch.setattr(_bins, "_EDGES", 4)
        monkeypatch.setattr(_bins, "_PARTS", 2)
        hubs, n_nodes, n_edges = [9, 4, 5], 10, 14
    else:
        hubs, n_nodes, n_edges = [512, 513, 40_000, 1], 1000, 5000
    if request.param == "few":
        hubs = hubs[:1]
    rng = np.random.default_rng(0)
    dst = np.concatenate([np.full(n, i) for i, n in enumerate(hubs)])
    dst = np.concatenate([dst, (n_nodes - 1) * rng.random(n_edges) ** 2]).astype(np.int64)
    src = rng.integers(0, n_nodes - 2, dst.size)
    src[-3:], dst[-3:] = (1, 1, 2), (2, 2, 2)
    order = rng.permutation(dst.size)
    return geom.Graph.from_edges(src[order], dst[order], n_src=n_nodes, n_dst=n_nodes + 1)


def narrow(x, dtype):
    """Give numbers of ``dtype``, and the same ones in float64."""
    x = np.asarray(x).astype(dtype)
    return x, x.astype(np.float64)


def there(x, place):
    return None if x is None else _device.to_device(x, place)


def same(a, b):
    return (a == b) | (np.isnan(a) & np.isnan(b))


MESSAGES = {
    "weighted": lambda x, own, extra: x * extra,
    "scaled": lambda x, own, extra: x * extra,
    "squares": lambda x, own, extra: (x - own) ** 2,
    "ties": lambda x, own, extra: same(x, own).astype(np.float64),
    "matched": lambda x, own, extra: np.where(same(x, own), extra, 0),
    "difference": lambda x, own, extra: x * (own - extra),
    "others": lambda x, own, extra: product.without(x, extra, own),
}


def reference(kind, graph, x, own, extra, empty, *, sizes=False):
    """Reduce, one destination after the other; with ``sizes``, what is added up without signs.

    The sums are wider than float64 where the machine has such numbers: those of many terms would
    be less precise than the kernels'.
    """
    out = np.zeros((graph.n_dst, x.shape[1]), np.longdouble)
    for i in range(graph.n_dst):
        edges = slice(graph.indptr[i], graph.indptr[i + 1])
        src, ids = graph.indices[edges], graph.edge_ids[edges]
        rows = x[src]
        if kind in ("max", "min"):
            out[i] = getattr(rows, kind)(axis=0) if src.size else empty
            continue
        if kind in MESSAGES:
            second = extra
            if kind == "weighted":
                second = np.repeat(extra[ids], x.shape[1] // extra.shape[1], axis=1)
            elif kind in ("scaled", "matched", "difference", "others"):
                second = extra[src]
            rows = MESSAGES[kind](rows, None if own is None else own[i], second)
        out[i] = (np.abs(rows) if sizes else rows).sum(axis=0, dtype=np.longdouble)
        if KINDS[kind] == "mean":
            out[i] /= max(1, src.size)
        if kind == "ties":
            out[i] = extra[i] / np.maximum(out[i], 1)
    return out


def inputs(kind, graph, n_features, dtype, n_heads=1):
    """Give ``(x, own, extra)``, each as an array of ``dtype`` or wider and as float64, or None."""
    rng = np.random.default_rng(1)
    wide = "float64" if np.dtype(dtype) == np.float64 else "float32"
    x = rng.standard_normal((graph.n_src, n_features))
    own = rng.standard_normal((graph.n_dst, n_features))
    extra = rng.standard_normal((graph.n_src, n_features))
    if kind in ("max", "min", "ties", "matched"):  # ties, infinities and NaN
        x, own = np.round(2 * x) / 2, np.round(2 * own) / 2
        x[0, 0], x[1, :], own[3, :] = np.nan, np.inf, np.nan
    kinds = {"x": (x, dtype), "own": (own, dtype), "extra": (extra, dtype)}
    if kind == "weighted":
        kinds["extra"] = rng.standard_normal((graph.n_edges, n_heads)), dtype
    elif kind == "scaled":
        kinds["extra"] = rng.random((graph.n_src, 1)), wide
    elif kind == "squares":
        kinds["own"] = own, wide
    elif kind == "ties":
        kinds["extra"] = rng.standard_normal(own.shape), dtype
    elif kind == "matched":
        kinds["extra"] = extra, wide
    elif kind == "others":  # exponents and zeros
        codes = 16 * rng.integers(-9, -3, extra.shape) + rng.choice([0, 0, 0, 4, 8], extra.shape)
        own[2], own[3, 0] = 0, 0
        kinds |= {"x": (1 + np.abs(x) % 1, wide), "own": (own, dtype), "extra": (codes, wide)}
    both = {"own", "extra"}
    used = {"squares": {"own"}, "weighted": {"extra"}, "scaled": {"extra"}}
    used |= dict.fromkeys(("ties", "matched", "difference", "others"), both)
    used = {"x"} | used.get(kind, set())
    return [narrow(*kinds[name]) if name in used else (None, None) for name in kinds]


def reduced(kind, graph, place, arrays, *, dtype=None, n_heads=1, empty=-7.0):
    x, own, extra = (there(a, place) for a in arrays)
    options = {"own": own, "extra": extra, "dtype": dtype, "empty": empty, "end": KINDS[kind]}
    if kind == "weighted":
        order = None if graph.is_ordered else graph.edge_ids
        options |= {"order": order, "n_heads": n_heads}
    levels = _bins.bins(graph)
    return gather_reduce(
        "sum" if kind == "mean" else kind, x, graph.indptr, graph.indices, levels, **options
    )


def check(kind, graph, place, n_features, dtype, **options):
    pairs = inputs(kind, graph, n_features, dtype, options.get("n_heads", 1))
    arrays, exact = zip(*pairs, strict=True)
    with np.errstate(invalid="ignore"):
        want = reference(kind, graph, *exact, empty=-7.0)
    if kind == "others":  # whose numbers are wide
        options["dtype"] = dtype
    got = reduced(kind, graph.to_device(place), place, arrays, **options)
    assert got.dtype == np.dtype(dtype)
    if kind in ("max", "min", "ties"):
        assert_close(got, want.astype(dtype))
    else:
        near(got, want, reference(kind, graph, *exact, empty=0, sizes=True), dtype)
    return got


def near(got, want, size, dtype):
    """Check results of ``dtype`` whose terms add up to ``size`` without their signs.

    Pieces of up to 512 terms are added up one after the other: where all have one sign, the error
    of the sum is about a third of the square root of that, times the precision.
    """
    got = np.asarray(_device.to_device(got, "cpu")).astype(np.longdouble)
    eps = float(ml_dtypes.finfo(dtype).eps)
    inner = float(np.finfo("float64" if np.dtype(dtype) == np.float64 else "float32").eps)
    size = np.broadcast_to(size, got.shape)
    over = np.abs(got - want) - (eps * (1 + 2 * np.abs(want)) + 16 * inner * size)
    worst = np.unravel_index(np.argmax(over), over.shape)
    assert over[worst] <= 0, (worst, got[worst], want[worst], size[worst])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_and_types(place, skewed, kind, dtype):
    for n_features in (8,) if place.kind == "cpu" else (1, 3, 16, 100, 128):
        check(kind, skewed, place, n_features, dtype)


@pytest.mark.parametrize("kind", ["sum", "max", "weighted", "ties", "matched"])
def test_rows_of_many_features(place, skewed, kind):
    """More than the threads of a block reach at once."""
    check(kind, skewed, place, 20 if place.kind == "cpu" else 1000, "float32")
    check(kind, skewed, place, 36 if place.kind == "cpu" else 1056, "float16")


@pytest.mark.parametrize("n_features", [1, 2, 3, 12, 20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_rows_of_any_length(place, skewed, dtype, n_features):
    for kind in ("sum", "matched"):
        check(kind, skewed, place, n_features, dtype)


@pytest.mark.parametrize("ordered", [False, True], ids=["by number", "as stored"])
@pytest.mark.parametrize("n_heads, size", [(2, 4), (4, 8), (3, 1), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_factor_for_each_head(place, skewed, dtype, n_heads, size, ordered):
    graph = skewed
    if ordered:
        graph = geom.Graph(graph.indptr, graph.indices, n_src=graph.n_src)
    check("weighted", graph, place, n_heads * size, dtype, n_heads=n_heads)


def test_indices_of_64_bits(place, skewed):
    graph = geom.Graph(skewed.indptr, skewed.indices, n_src=skewed.n_src)
    vars(graph)["indices"] = graph.indices.astype(np.int64)
    for kind in ("sum", "scaled", "max"):
        check(kind, graph, place, 8, "float32")


def test_rows_that_are_not_aligned(place, skewed):
    """A view that begins off a multiple of 16 bytes, and one that is not contiguous."""
    x = np.random.default_rng(2).standard_normal((skewed.n_src, 8)).astype(np.float32)
    graph = skewed.to_device(place)
    exact = x.astype(np.float64), None, None, 0
    want, size = (reference("sum", skewed, *exact, sizes=sizes) for sizes in (False, True))
    flat = there(np.concatenate([np.zeros(1, np.float32), x.ravel()]), place)
    for view in (flat[1:].reshape(x.shape), there(np.ascontiguousarray(x.T), place).T):
        got = reduced("sum", graph, place, (view, None, None))
        near(got, want, size, "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_inputs_give_equal_bits(place, skewed, kind):
    graph = skewed.to_device(place)
    arrays = [a for a, _ in inputs(kind, skewed, 8, "float32")]
    first = reduced(kind, graph, place, arrays)
    for _ in range(2 if place.kind == "cpu" else 20):
        assert_close(reduced(kind, graph, place, arrays), first, exact=True)


def test_short_rows_are_added_in_order(place):
    """As on the CPU, and so to the same bits."""
    rng = np.random.default_rng(3)
    graph = geom.Graph.from_edges(rng.integers(0, 6, 9), np.repeat([0, 1, 2], 3), n_nodes=6)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    got = reduced("sum", graph.to_device(place), place, (x, None, None))
    for i in range(3):
        a, b, c = x[graph.indices[3 * i : 3 * i + 3]]
        assert_close(got[i], (a + b) + c, exact=True)


@pytest.mark.parametrize("sizes", [(3, 2, 0), (0, 2, 0), (2, 0, 0), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("n_features", [0, 4])
def test_nothing_to_reduce(place, sizes, n_features):
    n_src, n_dst, n_edges = sizes
    ends = np.zeros(n_edges, np.int64)
    graph = geom.Graph.from_edges(ends, ends, n_src=n_src, n_dst=n_dst)
    x = np.ones((n_src, n_features), np.float32)
    for kind in ("sum", "mean", "max"):
        got = reduced(kind, graph.to_device(place), place, (x, None, None))
        want = reference(kind, graph, x.astype(np.float64), None, None, -7.0)
        assert_close(got, want.astype(np.float32), exact=True)


# --------------------------------------------------------------------------- through the operations


@pytest.fixture
def both_paths(place, monkeypatch):
    """Give a function that calls another with kernels and without."""

    def call(function):
        with_kernels = function(place)
        monkeypatch.setattr(_edges, "_has_kernel", lambda *arrays: False)
        if place.kind == "cpu":  # else the CPU has none anyway
            monkeypatch.setattr(_edges, "runs_kernels", lambda x: False)
            for module in ("_products", "_ranks"):
                monkeypatch.setattr(f"rtxarr.geom.{module}.runs_kernels", lambda x: False)
            for module in ("segment", "spmm", "product"):
                monkeypatch.setattr(f"rtxarr.kernels.{module}.runs_kernels", lambda x: False)
        return with_kernels, function(_device.device("cpu"))

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "var", "weighted", "headed"])
def test_aggregates_and_gradients_are_those_of_the_cpu(both_paths, skewed, op, dtype):
    rng = np.random.default_rng(4)
    x = np.round(4 * rng.standard_normal((skewed.n_src, 8))) / 4  # ties
    weight = rng.standard_normal((skewed.n_edges, 2) if op == "headed" else skewed.n_edges)
    g = rng.standard_normal((skewed.n_dst, 8))
    x, weight, g = (a.astype(dtype) for a in (x, weight, g))

    def run(place, x=x, weight=weight, g=g):
        graph = skewed.to_device(place)
        tracked = rx.Tensor(there(x, place), requires_grad=True)
        rows = rx.reshape(tracked, (-1, 2, 4)) if op == "headed" else tracked
        if op in ("weighted", "headed"):
            out = geom.aggregate(graph, rows, weight=there(weight, place))
        else:
            out = geom.aggregate(graph, rows, op, empty=1.5)
        out = rx.reshape(out, (-1, 8))
        out.backward(there(g, place))
        return [rx.Tensor(a).numpy() for a in (out.data, tracked.grad)]

    found, _ = both_paths(run)  # from here on no kernel runs
    wide = [a.astype(np.float64) for a in (x, weight, g)]
    want = run(_device.device("cpu"), *wide)
    if op == "var":
        sizes = [2 * int(skewed.in_degrees.max()) ** 0.5] * 2
    else:
        signed = wide[:1] if op in ("max", "min") else []  # whose signs say what is taken
        sizes = run(_device.device("cpu"), *signed, *map(np.abs, wide[len(signed) :]))
    for a, exact, size in zip(found, want, sizes, strict=True):
        assert a.dtype == np.dtype(dtype)
        near(a, exact, np.abs(size), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("n_features", [1, 3, 8])
def test_a_bias_is_added_to_the_bit_as_in_a_step_of_its_own(place, skewed, n_features, dtype):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((skewed.n_src, n_features)).astype(dtype)
    weight, bias = (rng.standard_normal(n).astype(dtype) for n in (skewed.n_edges, n_features))
    graph = skewed.to_device(place)
    given = [there(a, place) for a in (x, weight, bias)]
    kernel_adds = np.dtype(dtype).itemsize > 2  # halves would be rounded once, not twice
    assert _edges.adds_bias(given[1], given[0], given[2]) == kernel_adds
    got = weighted_sum(graph, *given)
    alone = geom.aggregate(graph, given[0], weight=given[1])
    assert_close(got, alone + given[2], exact=True)
    lonely = np.asarray(skewed.in_degrees) == 0
    assert lonely.any()
    assert (_device.to_device(got, "cpu")[lonely] == bias).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("op", ["mul", "median", "quantile"])
@pytest.mark.parametrize("messages", [False, True], ids=["rows", "messages"])
def test_products_and_quantiles_are_those_of_the_cpu(both_paths, skewed, op, dtype, messages):
    """With zeros and infinities, ties, and a NaN, which wins."""
    rng = np.random.default_rng(4)
    x = rng.uniform(0.8, 1.2, (skewed.n_src, 5)) * rng.choice([-1, 1], (skewed.n_src, 5))
    x[:, 4] = np.round(5 * x[:, 4]) / 5
    x[:3, 0], x[3, 1], x[4, 1], x[5, 3] = 0, np.inf, 0, np.nan
    g = rng.standard_normal((skewed.n_dst, 5))
    x, g = (a.astype(dtype) for a in (x, g))
    options = {"q": 0.3} if op == "quantile" else {}
    if messages:
        options["weight"] = np.ones(skewed.n_edges, dtype)

    def run(place):
        moved = {k: there(v, place) if k == "weight" else v for k, v in options.items()}
        tracked = rx.Tensor(there(x, place), requires_grad=True)
        out = geom.aggregate(skewed.to_device(place), tracked, op, empty=1.5, **moved)
        out.backward(there(g, place))
        return [rx.Tensor(a).numpy() for a in (out.data, tracked.grad)]

    (out, grad), (want, want_grad) = both_paths(run)
    assert out.dtype == grad.dtype == np.dtype(dtype)
    # Products of up to 513 numbers are finite: each may be rounded.
    inner = float(np.finfo("float64" if np.dtype(dtype) == np.float64 else "float32").eps)
    eps = 8 * float(ml_dtypes.finfo(dtype).eps) + 200 * inner * (op == "mul")
    with np.errstate(invalid="ignore"):
        if op == "mul":
            least = 2 * float(ml_dtypes.finfo(dtype).smallest_subnormal)
            assert_close(out, want, rtol=eps, atol=least)
        else:
            assert_close(out, want, exact=True)
    finite = np.isfinite(want_grad.astype(np.float64))
    np.testing.assert_array_equal(np.isfinite(grad.astype(np.float64)), finite)
    size = np.abs(want_grad.astype(np.float64))[finite].max(initial=1)
    got, exact = grad.astype(np.float64)[finite], want_grad.astype(np.float64)[finite]
    np.testing.assert_allclose(got, exact, rtol=eps, atol=eps * size)


def test_weights_that_do_not_change_are_sorted_once(both_paths, skewed, monkeypatch):
    square = geom.Graph.from_edges(skewed.src, skewed.dst, n_nodes=skewed.n_dst)
    rng = np.random.default_rng(6)
    x, g = rng.standard_normal((2, square.n_dst, 4))
    orders = []

    def observed(*args, order=None, **options):
        orders.append(order)
        return gather_reduce(*args, order=order, **options)

    monkeypatch.setattr("rtxarr.kernels.gather.gather_reduce", observed)

    def run(place):
        graph, weight = geom.gcn_norm(square.to_device(place), dtype="float64")
        assert not graph.is_ordered
        tracked = rx.Tensor(there(x, place), requires_grad=True)
        out = geom.aggregate(graph, tracked, weight=weight)
        out.backward(there(g, place))
        return [rx.Tensor(a).numpy() for a in (out.data, tracked.grad)]

    for got, want in zip(*both_paths(run), strict=True):
        assert_close(got, want)
    assert orders == [None, None]


@pytest.mark.parametrize("op", ["mean", "max", "var"])
def test_second_gradients_are_those_of_the_cpu(both_paths, skewed, op):
    rng = np.random.default_rng(5)
    x, v = rng.standard_normal((2, skewed.n_src, 4))
    g = rng.standard_normal((skewed.n_dst, 4))

    def run(place):
        graph = skewed.to_device(place)
        tracked = rx.Tensor(there(x, place), requires_grad=True)
        whole = rx.Tensor(there(g, place), requires_grad=True)
        out = geom.aggregate(graph, tracked, op)
        (first,) = rx.autograd.gradients([rx.sum(out * whole)], [tracked], create_graph=True)
        rx.sum(first * there(v, place)).backward()
        return [rx.Tensor(a.grad).numpy() for a in (tracked, whole) if a.grad is not None]

    for got, want in zip(*both_paths(run), strict=True):
        assert_close(got, want)
