"""Aggregation over edges against the plainest loops, on graphs with everything that is odd."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.geom import _edges
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

OPS = ["sum", "mean", "max", "min", "std", "var", "mul", "softmax", "median"]


def shares(rows):
    weight = np.exp(rows - rows.max(axis=0))
    return (weight / weight.sum(axis=0) * rows).sum(axis=0)


PLAIN = {
    "sum": lambda rows: rows.sum(axis=0),
    "mean": lambda rows: rows.mean(axis=0),
    "max": lambda rows: rows.max(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "std": lambda rows: rows.std(axis=0),
    "var": lambda rows: rows.var(axis=0),
    "mul": lambda rows: rows.prod(axis=0),
    "softmax": shares,
    "median": lambda rows: np.median(rows, axis=0),
}


def plain(src, dst, n_dst, x, op, weight, empty):
    out = np.full((n_dst, *x.shape[1:]), empty, dtype=np.float64)
    for i in range(n_dst):
        edges = np.flatnonzero(dst == i)
        if edges.size:
            rows = x[src[edges]].astype(np.float64)
            if weight is not None:
                own = weight[edges].astype(np.float64)
                rows = rows * own.reshape(own.shape + (1,) * (rows.ndim - own.ndim))
            out[i] = PLAIN[op](rows)
    return out


def multigraph(n_src=9, n_dst=7, n_edges=40, seed=0):
    """Give a graph with loops, duplicates, nodes without edges, a hub, and edges in any order."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, n_src - 1, n_edges)
    dst = np.where(rng.random(n_edges) < 0.4, 2, rng.integers(0, n_dst - 1, n_edges))
    src[:3], dst[:3] = (1, 1, 1), (1, 1, 4)
    return geom.Graph.from_edges(src, dst, n_src=n_src, n_dst=n_dst), src, dst


@pytest.fixture(params=[None, 8], ids=["whole", "in runs"])
def chunk(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(_edges.CHUNK, "cpu", request.param)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", [(9, 7, 40), (1, 1, 5), (3, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("weighted", [None, (), (2,), (2, 3)], ids=str)
@pytest.mark.usefixtures("chunk")
def test_aggregates_are_those_of_loops(op, sizes, weighted):
    n_src, n_dst, n_edges = sizes
    rng = np.random.default_rng(1)
    src, dst = (rng.integers(0, max(n, 1), n_edges) for n in (n_src, n_dst))
    graph = geom.Graph.from_edges(src, dst, n_src=n_src, n_dst=n_dst)
    x = rng.standard_normal((n_src, 2, 3))
    weight = None if weighted is None else rng.standard_normal((n_edges, *weighted))
    for empty in (0.0, -3.0):
        got = geom.aggregate(graph, x, op, weight=weight, empty=empty)
        assert_close(got, plain(src, dst, n_dst, x, op, weight, empty))


@pytest.mark.parametrize("q", [0.0, 0.25, 0.9, 1.0])
@pytest.mark.usefixtures("chunk")
def test_quantiles(q):
    graph, src, dst = multigraph()
    x = np.random.default_rng(1).standard_normal((9, 3))
    got = geom.aggregate(graph, x, "quantile", q=q, empty=-1.0)
    for i in range(7):
        own = x[src[dst == i]]
        assert_close(got[i], np.quantile(own, q, axis=0) if own.size else np.full(3, -1.0))
    gradcheck(lambda x: geom.aggregate(graph, x, "quantile", q=q), (x,))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("chunk")
def test_gradients_of_both_orders(op, weighted):
    graph, *_ = multigraph(5, 6, 11)
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((5, 2)), rng.standard_normal(11) + 3
    if op in ("std", "mul"):  # destinations with one edge, or products of many: no kinks, no noise
        x = x + 2

    def function(x, weight):
        return geom.aggregate(graph, x, op, weight=weight if weighted else None, empty=0.5)

    if op == "std":
        graph = geom.Graph.from_edges(
            np.array([0, 1, 2, 2, 3]), np.array([0, 0, 0, 1, 1]), n_nodes=5
        )
        weight = weight[:5]
    args = (x, weight) if weighted else (x,)
    call = function if weighted else lambda x: function(x, None)
    gradcheck(call, args)
    gradgradcheck(call, args)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_half_types_are_rounded_once(op, dtype):
    graph, src, dst = multigraph()
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = np.random.default_rng(3).uniform(0.5, 1.5, (9, 4)).astype(kind)
    got = geom.aggregate(graph, x, op)
    assert got.dtype == kind
    assert_close(got, plain(src, dst, 7, x, op, None, 0).astype(kind))


@pytest.mark.parametrize("kind", ["float16", ml_dtypes.bfloat16])
def test_the_mean_of_a_million_halves(kind):
    """pytorch_scatter#269: float32 totals, integer counts."""
    n = 1_000_000
    x = np.random.default_rng(4).standard_normal((n, 1)).astype(kind)
    graph = geom.Graph.from_edges(np.arange(n), np.zeros(n, np.int64), n_src=n, n_dst=1)
    tensor = rx.Tensor(x, requires_grad=True)
    out = geom.aggregate(graph, tensor, "mean")
    assert abs(float(out.data[0, 0]) - x.astype(np.float64).mean()) < 1e-3
    out.backward(np.ones((1, 1), kind))
    assert_close(tensor.grad.astype(np.float64), np.full((n, 1), 1e-6), rtol=0.06)


def test_infinities_are_numbers():
    """dgl#2849, #761: the maximum of inf and 1 is inf; only a row without edges is empty."""
    graph = geom.Graph.from_edges(np.array([0, 1, 2]), np.array([0, 0, 1]), n_nodes=3)
    x = np.array([np.inf, 1.0, -np.inf])
    for op in ("max", "sum", "mean", "median", "mul"):
        assert_close(geom.aggregate(graph, x, op), np.array([np.inf, -np.inf, 0]), exact=True)
    assert_close(geom.aggregate(graph, -x, "min"), np.array([-np.inf, np.inf, 0]), exact=True)
    assert_close(geom.aggregate(graph, x, "max", empty=np.nan), np.array([np.inf, -np.inf, np.nan]))


def test_a_maximum_below_zero_is_not_compared_with_the_empty_value():
    """dgl#3564."""
    graph = geom.Graph.from_edges(np.array([0]), np.array([0]), n_nodes=2)
    assert_close(geom.aggregate(graph, np.array([-2.0, 5.0]), "max"), np.array([-2.0, 0.0]))


def test_ties_share_the_gradient():
    graph = geom.Graph.from_edges(np.array([0, 1, 1, 2]), np.zeros(4, np.int64), n_src=3, n_dst=1)
    for op, sign in (("max", 1), ("min", -1)):
        x = rx.Tensor(sign * np.array([2.0, 2.0, 1.0]), requires_grad=True)
        geom.aggregate(graph, x, op).backward(np.array([3.0]))
        assert_close(x.grad, np.array([1.0, 2.0, 0.0]))
        whole = rx.Tensor(sign * np.array([2.0, 2.0, 2.0, 1.0]), requires_grad=True)
        (rx.max if op == "max" else rx.min)(whole).backward(np.array(3.0))
        assert_close(whole.grad, np.array([1.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_variances_do_not_cancel(dtype):
    """PyG's VarAggregation gives 0.0 here."""
    graph = geom.Graph.from_edges(np.arange(3), np.zeros(3, np.int64), n_src=3, n_dst=1)
    x = rx.Tensor(np.array([1e4, 1e4 + 1, 1e4 + 2], dtype=dtype), requires_grad=True)
    out = geom.aggregate(graph, x, "var")
    assert_close(out.data, np.array([2 / 3], dtype=dtype), rtol=1e-6)
    out.backward(np.ones(1, dtype=dtype))
    assert_close(x.grad, np.array([-2 / 3, 0, 2 / 3], dtype=dtype), atol=1e-6)


def test_the_slope_of_no_deviation_is_zero():
    graph = geom.Graph.from_edges(np.arange(2), np.zeros(2, np.int64), n_src=2, n_dst=1)
    x = rx.Tensor(np.array([5.0, 5.0]), requires_grad=True)
    geom.aggregate(graph, x, "std").backward(np.ones(1))
    assert_close(x.grad, np.zeros(2), exact=True)


def test_products_with_zeros_have_gradients():
    graph = geom.Graph.from_edges(np.arange(3), np.zeros(3, np.int64), n_src=3, n_dst=1)
    x = rx.Tensor(np.array([2.0, 0.0, 5.0]), requires_grad=True)
    geom.aggregate(graph, x, "mul").backward(np.ones(1))
    assert_close(x.grad, np.array([0.0, 10.0, 0.0]))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_products_with_zeros_are_right_to_second_order(weighted):
    """Destinations with one zero, with two, and with one that counts twice."""
    src, dst = np.array([0, 1, 2, 0, 1, 3, 3, 0, 2, 3]), np.array([0, 0, 0, 1, 1, 1, 2, 3, 3, 3])
    graph = geom.Graph.from_edges(np.append(src, 3), np.append(dst, 3), n_nodes=5)
    x = np.array([[2.0, 0], [0.0, 0], [3.0, -2], [0.0, 5], [1.0, 1]])
    weight = np.random.default_rng(0).uniform(1, 2, 11) if weighted else None

    def function(x):
        return geom.aggregate(graph, x, "mul", weight=weight)

    gradcheck(function, (x,))
    gradgradcheck(function, (x,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_do_not_leave_the_range_on_the_way(dtype):
    big, small = np.finfo(dtype).max / 4, np.finfo(dtype).tiny * 4
    x = np.array([big, big, small, small, 3, np.inf, 0.0], dtype)
    src, dst = (
        np.array([0, 1, 2, 3, 4, 2, 2, 4, 5, 4, 6, 5, 6]),
        np.repeat([0, 1, 2, 3], [5, 3, 2, 3]),
    )
    graph = geom.Graph.from_edges(src, dst, n_nodes=7)
    tensor = rx.Tensor(x, requires_grad=True)
    out = geom.aggregate(graph, tensor, "mul")
    wide = x.astype(np.longdouble)
    assert_close(out.data[0], wide[:5].prod().astype(dtype))
    assert_close(out.data[1:3], np.array([0, np.inf], dtype))
    assert np.isnan(out.data[3])
    rx.sum(out[:3]).backward()  # of the first three, where no infinity meets a zero
    assert_close(tensor.grad[0], (wide[1:5].prod()).astype(dtype))
    assert_close(tensor.grad[5], np.array(3, dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:invalid value")  # of comparisons of bfloat16
def test_nan_wins(op):
    graph = geom.Graph.from_edges(np.array([0, 1, 2, 0, 2, 3]), np.repeat([0, 1], 3), n_nodes=4)
    x = np.array([[1.0, 2], [np.nan, 3], [4.0, -1], [2.0, 2]])
    for kind in (np.float64, np.float16, ml_dtypes.bfloat16):
        got = geom.aggregate(graph, x.astype(kind), op).astype(np.float64)
        assert (np.isnan(got) == [[True, False], [False, False], [False] * 2, [False] * 2]).all()


def test_messages_that_a_quantile_is_share_its_gradient():
    x = np.array([1.0, 2.0, 2.0, 3.0, 7.0])
    graph = geom.Graph.from_edges(np.arange(5), np.zeros(5, np.int64), n_src=5, n_dst=1)
    for weight in (None, np.ones(5)):
        for q, want in ((0.0, [1, 0, 0, 0, 0]), (0.5, [0, 0.5, 0.5, 0, 0]), (1.0, [0, 0, 0, 0, 1])):
            tensor = rx.Tensor(x, requires_grad=True)
            geom.aggregate(graph, tensor, "quantile", q=q, weight=weight).backward(np.ones(1))
            assert_close(tensor.grad, np.array(want, np.float64))
        tensor = rx.Tensor(x, requires_grad=True)
        geom.aggregate(graph, tensor, "quantile", q=0.6, weight=weight).backward(np.ones(1))
        assert_close(tensor.grad, np.array([0, 0.3, 0.3, 0.4, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_captured_steps_give_the_same_bits(op, dtype):
    graph, *_ = multigraph(50, 40, 2000)
    graph, rng = graph.to_device("cuda:0"), np.random.default_rng(5)
    x, g = (
        rx.asarray(rng.uniform(0.5, 1.5, (n, 8)), dtype=dtype, device="cuda:0") for n in (50, 40)
    )

    def step(x, g):
        x = rx.Tensor(x, requires_grad=True)
        out = geom.aggregate(graph, x, op)
        out.backward(g)
        return out.data, x.grad

    captured, want = rx.capture(step), step(x, g)
    for _ in range(3):
        for a, b in zip(captured(x, g), want, strict=True):
            assert_close(a, b, exact=True)


@pytest.mark.parametrize("op", [*OPS, "quantile"])
def test_equal_inputs_give_equal_bits_and_permuted_ones_permuted_results(op):
    """PyG#446, #2788, #3175, #8866: results differ from run to run there, on GPUs."""
    graph, src, dst = multigraph(9, 9)
    rng = np.random.default_rng(5)
    x, g = (rng.standard_normal((9, 3)).astype("float32") for _ in range(2))
    if op in ("max", "min", "mul", "median", "quantile"):  # ties and zeros
        x = np.round(x)
    options = {"q": 0.3} if op == "quantile" else {}

    def run(graph, x, g):
        x = rx.Tensor(x, requires_grad=True)
        out = geom.aggregate(graph, x, op, **options)
        out.backward(g)
        return out.data, x.grad

    first = run(graph, x, g)
    for _ in range(20):
        for a, b in zip(run(graph, x, g), first, strict=True):
            assert_close(a, b, exact=True)
    nodes, edges = rng.permutation(9), rng.permutation(40)  # node i becomes nodes[i]
    other = geom.Graph.from_edges(nodes[src][edges], nodes[dst][edges], n_nodes=9)
    moved = [np.empty_like(x), np.empty_like(g)]
    moved[0][nodes], moved[1][nodes] = x, g
    for a, b in zip(run(other, *moved), first, strict=True):
        assert_close(a[nodes], b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gpu_gives_the_same(op, weighted):
    graph, *_ = multigraph(50, 40, 2000)
    rng = np.random.default_rng(5)
    x, weight, g = (rng.standard_normal(shape) for shape in ((50, 8), 2000, (40, 8)))
    found = []
    for device in ("cpu", "cuda:0"):
        arrays = [rx.asarray(a, device=device) for a in (x, weight, g)]
        tracked = [rx.Tensor(a, requires_grad=True) for a in arrays[:2]]
        weights = tracked[1] if weighted else None
        out = geom.aggregate(graph.to_device(device), tracked[0], op, weight=weights)
        out.backward(arrays[2])
        grads = [t.grad for t in tracked if t.grad is not None]
        found.append([rx.Tensor(a).numpy() for a in (out.data, *grads)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


# ------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("dot", lambda a, b: (a * b).sum(axis=-1)),
    ],
)
@pytest.mark.usefixtures("chunk")
def test_functions_of_both_nodes(op, function):
    graph, src, dst = multigraph()
    rng = np.random.default_rng(6)
    u, v = rng.standard_normal((9, 2, 3)), rng.uniform(1, 2, (7, 2, 3))
    assert_close(geom.sddmm(graph, u, v, op), function(u[src], v[dst]))
    gradcheck(lambda u, v: geom.sddmm(graph, u, v, op), (u, v))


def test_softmax_over_edges_sums_to_one():
    graph, _, dst = multigraph()
    logits = np.random.default_rng(7).standard_normal((40, 2)) * 100
    got = geom.edge_softmax(graph, logits)
    for i in range(7):
        own = np.exp(logits[dst == i] - logits[dst == i].max(axis=0, initial=-np.inf))
        assert_close(got[dst == i], own / own.sum(axis=0))


def test_a_group_that_is_masked_out_gets_zeros():
    """PyG's softmax gives NaN."""
    graph = geom.Graph.from_edges(np.array([0, 1, 0]), np.array([0, 0, 1]), n_nodes=2)
    logits = rx.Tensor(np.array([-np.inf, -np.inf, 3.0]), requires_grad=True)
    out = geom.edge_softmax(graph, logits)
    assert_close(out.data, np.array([0.0, 0.0, 1.0]), exact=True)
    out.backward(np.array([1.0, 2.0, 3.0]))
    assert_close(logits.grad, np.zeros(3), exact=True)


def test_attention_drops_weights_while_asked():
    graph, src, dst = multigraph()
    rng = np.random.default_rng(8)
    values, logits = rng.standard_normal((9, 2, 3)), rng.standard_normal((40, 2))
    weight = geom.edge_softmax(graph, logits)
    got = geom.attend(graph, values, logits)
    assert_close(got, plain(src, dst, 7, values, "sum", weight, 0))
    one = rx.random.Generator(3)
    dropped = geom.attend(graph, values, logits, dropout_rate=0.5, generator=one)
    again = geom.attend(graph, values, logits, dropout_rate=0.5, generator=rx.random.Generator(3))
    assert_close(dropped, again, exact=True)
    assert not np.allclose(dropped, got)
    kept = rx.random.Generator(3).dropout_mask((40, 2), 0.5)  # by number, as everywhere
    assert_close(dropped, plain(src, dst, 7, values, "sum", 2 * weight * kept, 0))


def test_attention_in_a_common_type():
    graph, *_ = multigraph()
    values, logits = np.ones((9, 2, 3), np.float32), np.zeros((40, 2))
    assert geom.attend(graph, values, logits).dtype == np.float64
    half = geom.attend(graph, values.astype(np.float16), logits.astype(np.float16))
    assert half.dtype == np.float16


@pytest.mark.parametrize(
    "values, logits, rate, match",
    [
        ((9, 3), (40, 2), 0.0, r"n_heads\), got \(9, 3\) and \(40, 2\)"),
        ((9, 2, 3), (40, 3), 0.0, r"got \(9, 2, 3\) and \(40, 3\)"),
        ((8, 2, 3), (40, 2), 0.0, "values must have a row for each of 9 sources"),
        ((9, 2, 3), (39, 2), 0.0, "logits must have an entry for each of 40 edges"),
        ((9, 2, 3), (40, 2), 1.0, r"rate must lie in \[0, 1\), got 1.0"),
    ],
)
def test_attention_refuses_what_does_not_fit(values, logits, rate, match):
    graph, *_ = multigraph()
    with pytest.raises(ValueError, match=match):
        geom.attend(graph, np.ones(values), np.ones(logits), dropout_rate=rate)


@pytest.mark.parametrize("name", [*OPS, "weighted", "dot", "attend"])
def test_memory_does_not_grow_with_the_messages(name, monkeypatch):
    """PyG#527, #459, #2074, #8316: there, an array as large as all messages and more."""
    n, degree, width = 2000, 100, 32
    monkeypatch.setitem(_edges.CHUNK, "cpu", 50_000)
    rng = np.random.default_rng(9)
    src = rng.integers(0, n, n * degree)
    graph = geom.Graph.from_edges(src, np.repeat(np.arange(n), degree), n_nodes=n)
    data = rng.standard_normal((n, width))
    weight = rng.standard_normal((n * degree, 1))

    def run():
        x = rx.Tensor(data, requires_grad=True)
        if name == "weighted":
            out = geom.aggregate(graph, x, weight=rx.Tensor(weight[:, 0], requires_grad=True))
        elif name == "dot":
            out = geom.sddmm(graph, x, x)
        elif name == "attend":
            logits = rx.Tensor(weight, requires_grad=True)
            out = geom.attend(graph, rx.reshape(x, (n, 1, width)), logits)
        else:
            out = geom.aggregate(graph, x, name)
        out.backward(np.ones(out.shape))

    run()  # what graphs keep is made once
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    messages = n * degree * width * 8
    assert peak < messages / 2


BAD = [
    (lambda g: geom.aggregate(g, np.ones(3), "quantile"), ValueError, "alone takes q, in"),
    (lambda g: geom.aggregate(g, np.ones(3), "quantile", q=2), ValueError, r"in \[0, 1\], got 2"),
    (lambda g: geom.aggregate(g, np.ones(3), "quantile", q="a"), TypeError, "q must be a number"),
    (lambda g: geom.aggregate(g, np.ones(3), "max", q=0.5), ValueError, "op='max' and q=0.5"),
    (lambda g: geom.aggregate(g, np.ones(3), "avg"), ValueError, "op must be one of sum, mean"),
    (lambda g: geom.aggregate(g, np.ones(3), "prod"), ValueError, "median, quantile, got 'prod'"),
    (
        lambda g: geom.aggregate(g, np.ones(2)),
        ValueError,
        "x must have a row for each of 3 sources",
    ),
    (lambda g: geom.aggregate(g, np.ones(3, int)), TypeError, "floating dtype, got int64"),
    (
        lambda g: geom.aggregate(g, np.ones(3), weight=np.ones(3)),
        ValueError,
        "weight must have an entry for each of 2 edges",
    ),
    (
        lambda g: geom.aggregate(g, np.ones((3, 2)), weight=np.ones((2, 3))),
        ValueError,
        "weight must have the first axes of a row of x",
    ),
    (lambda g: geom.sddmm(g, np.ones(3), np.ones(3)), ValueError, "'dot' needs rows"),
    (lambda g: geom.sddmm(g, np.ones((3, 1)), np.ones((3, 2))), ValueError, "rows of one shape"),
    (lambda g: geom.sddmm(g, np.ones(3), np.ones(3), "pow"), ValueError, "op must be one of dot"),
    (lambda g: geom.edge_softmax(g, np.ones(3)), ValueError, "logits must have an entry"),
    (lambda g: geom.degree_scalers(g, ["log"]), ValueError, "scalers must be among identity"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_arguments(call, error, message):
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    with pytest.raises(error, match=message):
        call(graph)


def test_factors_of_degrees():
    graph = geom.Graph.from_edges(np.array([0, 0, 0]), np.array([0, 0, 1]), n_nodes=3)
    names = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    got = geom.degree_scalers(graph, names, mean_degree=2.0, mean_log_degree=0.5)
    one, two = np.log(2), np.log(3)
    want = [
        [1, two / 0.5, 0.5 / two, 1, 1],
        [1, one / 0.5, 0.5 / one, 0.5, 2],
        [1, 0, 0.5 / one, 0, 2],
    ]
    assert_close(got, np.array(want))


@pytest.mark.parametrize("name", ["mean_degree", "mean_log_degree"])
@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
def test_means_of_degrees_are_positive(name, bad):
    graph = geom.Graph.from_edges(np.array([0]), np.array([0]), n_nodes=2)
    means = {"mean_degree": 1.0, "mean_log_degree": 1.0, name: bad}
    uses, others = ["inverse_linear"], ["identity", "amplification"]
    if name == "mean_log_degree":
        uses, others = ["attenuation"], ["identity", "linear"]
    with pytest.raises(ValueError, match=f"{name} must be (above 0|finite), got {bad}"):
        geom.degree_scalers(graph, uses, **means)
    with pytest.raises(ValueError, match=f"{name} must be (above 0|finite), got {bad}"):
        geom.PNAConv(2, 2, ["mean"], uses, **means)
    with pytest.raises(TypeError, match=f"{name} must be a number, got NoneType"):
        geom.PNAConv(2, 2, ["mean"], uses, **{**means, name: None})
    geom.degree_scalers(graph, others, **means)
    geom.PNAConv(2, 2, ["mean"], others, **means)
