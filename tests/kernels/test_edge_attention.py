"""Attention over edges against float64: in the simulator, and on a GPU at full size."""

import ml_dtypes
import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.geom import _fused, _trace
from rtxarr.kernels import dropout, edge_attention, philox
from rtxarr.testing import assert_close

DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16]
KINDS = ["additive", "terms-of-edges", "edges-alone", "mlp", "dot", "projected"]
KINDS += ["mlp-edges", "dot-edges"]
ON_GPU = pytest.mark.parametrize(
    "place", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
PLACE, RATE = (np.uint64(6), np.uint64(7), np.uint64(9)), 0.3


# One thread for a head, and several (which take seconds in the simulator), with odd features too.
SOME = [(kind, "float32", 2, 4) for kind in KINDS] + [
    ("additive", "float16", 2, 8),
    ("terms-of-edges", "float64", 3, 1),
    ("edges-alone", ml_dtypes.bfloat16, 1, 8),
    ("mlp", "float16", 2, 8),
    ("mlp", "float32", 2, 2),
    ("dot", ml_dtypes.bfloat16, 1, 8),
    ("mlp-edges", ml_dtypes.bfloat16, 1, 8),
    ("dot-edges", "float64", 1, 2),
    ("dot", "float64", 1, 3),
    ("projected", "float32", 1, 3),
    ("projected", "float64", 2, 1),
]
SHAPES = [(4, 32), (3, 7), (1, 150), (8, 8)]  # each compiles for seconds: one for each type
ALL = [
    (kind, dtype, *SHAPES[(i + j) % 4])
    for i, kind in enumerate(KINDS)
    for j, dtype in enumerate(DTYPES)
]


def arguments(kind, graph, n_heads, n_features, dtype):
    rng = np.random.default_rng(1)

    def draw(*shape):
        # Sums of three are exact, so that all agree where the leaky ReLU bends.
        return (np.round(64 * rng.standard_normal((*shape, n_heads, n_features))) / 64).astype(
            dtype
        )

    def numbers(n):
        return draw(n)[..., 0]

    values = draw(graph.n_src)
    edge = draw(graph.n_edges) if kind.endswith("-edges") else None
    if kind.startswith("mlp"):
        return {"values": values, "dst": draw(graph.n_dst), "vector": draw(), "edge": edge}
    if kind.startswith("dot"):
        src, dst = draw(graph.n_src), draw(graph.n_dst)
        return {"values": values, "src": src, "dst": dst, "edge": edge}
    if kind == "projected":
        return {"values": values, "vector": draw(), "vector_dst": draw(), "edge": None}
    given = {"values": values, "src": numbers(graph.n_src), "dst": numbers(graph.n_dst)}
    given["edge"] = numbers(graph.n_edges)
    if kind == "additive":
        given["edge"] = None
    if kind == "edges-alone":
        given["src"] = given["dst"] = None
    return given


def call(kind, graph, given, **options):
    if kind[:3] in ("mlp", "dot"):
        function = {"mlp": _fused.mlp_attention, "dot": _fused.dot_attention}[kind[:3]]
        options["scale" if kind.startswith("dot") else "slope"] = 0.3
    else:
        projected = kind == "projected"
        function = _fused.projected_attention if projected else _fused.additive_attention
        options["slope"] = 1.0 if kind == "edges-alone" else 0.3
    return function(*given.values(), graph=graph, **options)


def logits_of(kind, graph, values, src=None, dst=None, vector=None, vector_dst=None, edge=None):
    """Give the scores of edges."""
    at_src, at_dst = graph.src, graph.dst
    if kind.startswith("mlp"):
        x = values[at_src] + dst[at_dst] + (0 if edge is None else edge)
        return (np.where(x > 0, x, 0.3 * x) * vector).sum(-1)
    if kind.startswith("dot"):
        return 0.3 * ((src[at_src] + (0 if edge is None else edge)) * dst[at_dst]).sum(-1)
    if kind == "projected":
        src, dst = (values * vector).sum(-1), (values * vector_dst).sum(-1)
    x = 0 if src is None else src[at_src] + dst[at_dst]
    x = x if edge is None else x + edge
    return x if kind == "edges-alone" else np.where(x > 0, x, 0.3 * x)


def weights_of(graph, logits):
    """Give the softmax over the edges of a destination, and the logarithms of the sums."""
    weights = np.zeros_like(logits)
    lse = np.full((graph.n_dst, logits.shape[1]), -np.inf, logits.dtype)
    for i in range(graph.n_dst):
        of_row = graph.edge_ids[graph.indptr[i] : graph.indptr[i + 1]]
        if of_row.size:
            top = logits[of_row].max(0)
            shares = np.exp(logits[of_row] - top)
            weights[of_row], lse[i] = shares / shares.sum(0), top + np.log(shares.sum(0))
    return weights, lse


def summed(rows, at, n):
    out = np.zeros((n, *rows.shape[1:]), rows.dtype)
    np.add.at(out, at, rows)
    return out


def reference(kind, graph, given, grad, kept, *, sizes=False):
    """Give the results and the gradients, in numbers wider than float64 where there are such.

    With ``sizes`` instead what is added up for them without signs, times how many roundings a
    weight may have seen: some, and more the larger the parts of its score and the logarithm are.
    """
    wide = np.longdouble
    given = {k: x if x is None else x.astype(wide) for k, x in given.items()}
    grad, at_src, at_dst = grad.astype(wide), graph.src, graph.dst
    logits = logits_of(kind, graph, **given)
    weights, lse = weights_of(graph, logits)
    above = logits > 0  # at which the slopes of additive scores are taken
    weights_once = weights
    if sizes:
        given = {k: x if x is None else np.abs(x) for k, x in given.items()}
        grad = np.abs(grad)
        lse = np.abs(np.where(np.isfinite(lse), lse, 0))
        weights = weights * (4 + logits_of(kind, graph, **given) + lse[at_dst])
        lse = lse + summed(weights, at_dst, graph.n_dst)
    values = given["values"]
    edge = 0 if given["edge"] is None else given["edge"]
    messages = values[at_src] + (edge if kind.startswith("dot") else 0)

    def attended(weights):
        return summed((weights * kept)[..., None] * messages, at_dst, graph.n_dst)

    out = attended(weights)
    delta = (out * grad).sum(-1)
    of_weights = kept * (grad[at_dst] * messages).sum(-1)
    of_logits = weights * (of_weights - delta[at_dst])
    if sizes:
        once = (attended(weights_once) * grad).sum(-1)
        of_logits = weights * (of_weights + once[at_dst]) + weights_once * delta[at_dst]
    of_messages = (weights * kept)[..., None] * grad[at_dst]
    of = {"values": summed(of_messages, at_src, graph.n_src)}
    if kind.startswith("dot"):
        key, query = given["src"][at_src] + edge, given["dst"][at_dst]
        of["src"] = 0.3 * summed(of_logits[..., None] * query, at_src, graph.n_src)
        of["dst"] = 0.3 * summed(of_logits[..., None] * key, at_dst, graph.n_dst)
        of["edge"] = 0.3 * of_logits[..., None] * query + of_messages
    elif kind.startswith("mlp"):
        x = values[at_src] + given["dst"][at_dst] + edge
        slope = np.where(x > 0, 1, 0.3) * of_logits[..., None]
        of["edge"] = slope * given["vector"]
        of["values"] += summed(of["edge"], at_src, graph.n_src)
        of["dst"] = summed(of["edge"], at_dst, graph.n_dst)
        of["vector"] = (slope * x).sum(0)
    else:
        if kind != "edges-alone":
            of_logits = of_logits * np.where(above, 1, 0.3)
        of_src = summed(of_logits, at_src, graph.n_src)
        of_dst = summed(of_logits, at_dst, graph.n_dst)
        if kind == "projected":
            of["values"] += of_src[..., None] * given["vector"]
            of["values"][: graph.n_dst] += of_dst[..., None] * given["vector_dst"]
            of["vector"] = (of_src[..., None] * values).sum(0)
            of["vector_dst"] = (of_dst[..., None] * values[: graph.n_dst]).sum(0)
        of |= {"src": of_src, "dst": of_dst, "edge": of_logits}
    return out, lse, of


def there(x, place):
    return None if x is None else _device.to_device(x, place)


def near(got, want, size, dtype):
    """Check results of ``dtype``, each to so much of ``size`` as rounding may make of it."""
    got = np.asarray(_device.to_device(got, "cpu")).astype(np.longdouble)
    finite = np.isfinite(want)
    assert (finite == np.isfinite(got)).all()
    precision = 4 * np.finfo("float64" if np.dtype(dtype) == np.float64 else "float32").eps
    if np.dtype(dtype).itemsize == 2:  # in which results are rounded, and taken up again
        precision += ml_dtypes.finfo(dtype).eps / 4
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    over = error - (float(precision) * size + smallest)
    worst = np.unravel_index(np.argmax(over), over.shape)
    assert over[worst] <= 0, (worst, got[worst], want[worst], size[worst])


def run(kind, graph, given, grad, device, /, **options):
    """Give results and gradients where kernels run."""
    moved = {k: there(x, device) for k, x in given.items()}
    tensors = {k: None if x is None else rx.Tensor(x, requires_grad=True) for k, x in moved.items()}
    out, lse = call(kind, graph.to_device(device), tensors, **options)
    out.backward(there(grad, device))
    return out.data, lse.data, {k: x.grad for k, x in tensors.items() if x is not None}


def check(graph, device, kind, dtype, n_heads, n_features):
    given = arguments(kind, graph, n_heads, n_features, dtype)
    grad = np.random.default_rng(2).standard_normal((graph.n_dst, n_heads, n_features))
    grad = grad.astype(dtype)
    out, lse, of = run(kind, graph, given, grad, device)
    assert out.dtype == np.dtype(dtype)
    for x in of.values():
        assert x.dtype == np.dtype(dtype)
    compare((out, lse, of), kind, graph, given, grad, np.longdouble(1), dtype)


def compare(found, kind, graph, given, grad, kept, dtype):
    """Check results and gradients against the reference."""
    (out, lse, of), options = found, (kind, graph, given, grad, kept)
    want, want_lse, want_of = reference(*options)
    size, size_lse, size_of = reference(*options, sizes=True)
    near(out, want, size, dtype)
    near(lse, want_lse, size_lse, "float64" if np.dtype(dtype) == np.float64 else "float32")
    assert set(of) == {name for name, x in given.items() if x is not None}
    for name, x in of.items():
        near(x, want_of[name], size_of[name], dtype)


def name_of(x):
    return x if isinstance(x, (str, int)) else np.dtype(x).name


@pytest.mark.parametrize("kind, dtype, n_heads, n_features", SOME, ids=name_of)
def test_results_and_gradients(place, skewed, kind, dtype, n_heads, n_features):
    check(skewed, place, kind, dtype, n_heads, n_features)


@ON_GPU
@pytest.mark.parametrize("kind, dtype, n_heads, n_features", ALL, ids=name_of)
def test_all_types_and_widths(place, skewed, kind, dtype, n_heads, n_features):
    check(skewed, place, kind, dtype, n_heads, n_features)


@pytest.mark.sim
@pytest.mark.parametrize("kind", KINDS)
def test_threads_go_round_with_those_of_longer_items(monkeypatch, kind):
    """On a GPU all of a warp do; in the simulator, which has no warps, all go round too often."""
    from rtxarr.kernels import _edge_attention_back_cuda as back
    from rtxarr.kernels import _edge_attention_cuda as ahead

    kernels = ahead.forward, back.by_destinations, back.by_sources
    for module in (ahead, back):
        monkeypatch.setattr(module, "widest", lambda plan: lambda n: np.int32(n + 5))
    for kernel in kernels:
        kernel.cache_clear()
    try:
        src, dst = np.array([0, 1, 4, 4, 4, 4, 4, 2]), np.array([1, 1, 3, 3, 3, 0, 0, 0])
        graph = geom.Graph.from_edges(src, dst, n_nodes=6)  # nodes 2, 4 and 5 end no edge
        check(graph, _device.device("cpu"), kind, "float32", 2, 4)
    finally:
        for kernel in kernels:
            kernel.cache_clear()


def test_destinations_that_are_the_first_sources(place, skewed):
    """As in what samplers give."""
    n_dst = skewed.n_dst // 2
    kept = skewed.dst < n_dst
    graph = geom.Graph.from_edges(
        skewed.src[kept], skewed.dst[kept], n_src=skewed.n_src, n_dst=n_dst
    )
    check(graph, place, "projected", "float32", 2, 4)


@pytest.mark.parametrize("kind", ["terms-of-edges", "mlp", "dot", "dot-edges"])
def test_dropout_takes_the_words_of_the_stream(place, skewed, kind):
    """Word ``e * n_heads + h`` from the offset on: as dropout of the weights does."""
    n_heads, n_features = 3, 4
    given = arguments(kind, skewed, n_heads, n_features, "float32")
    grad = np.random.default_rng(2).standard_normal((skewed.n_dst, n_heads, n_features))
    n, (offset, stream, key) = skewed.n_edges * n_heads, PLACE
    words = philox.stream_words(int(offset), n, key=key, stream=stream)
    kept = np.reshape(words < dropout.threshold(RATE), (-1, n_heads)) / (1 - RATE)
    kept = kept.astype(np.longdouble)
    bits: list = []
    places = [PLACE, there(np.array(PLACE), place)]  # the second as in a captured step
    for words_at in places if place.kind == "cuda" else places[kind == "mlp" :][:1]:
        options = {"rate": RATE, "place": words_at}
        grad = grad.astype("float32")
        found = run(kind, skewed, given, grad, place, **options)
        compare(found, kind, skewed, given, grad, kept, "float32")
        bits.append(
            [_device.to_device(x, "cpu").tobytes() for x in (*found[:2], *found[2].values())]
        )
    assert all(x == bits[0] for x in bits)


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_change(place, skewed, kind):
    given = arguments(kind, skewed, 4, 32, "float32")
    grad = np.ones((skewed.n_dst, 4, 32), np.float32)
    first = run(kind, skewed, given, grad, place)
    for _ in range(20):
        again = run(kind, skewed, given, grad, place)
        for a, b in zip(
            (*first[:2], *first[2].values()), (*again[:2], *again[2].values()), strict=True
        ):
            assert_close(a, b, exact=True)


@pytest.mark.parametrize("kind", ["terms-of-edges", "mlp", "dot-edges", "projected"])
def test_second_derivatives_are_slopes_of_the_first(place, kind):
    """They are composed of other operations, where the results are those of the kernels."""
    src, dst = np.array([0, 2, 2, 1, 1, 0]), np.array([1, 1, 0, 0, 0, 0])
    graph, rng = geom.Graph.from_edges(src, dst, n_nodes=4), np.random.default_rng(3)
    given = arguments(kind, graph, 2, 1, "float64")
    names = [name for name, x in given.items() if x is not None]
    weight = there(rng.standard_normal((graph.n_dst, 2, 1)), place)
    along = {name: rng.standard_normal(given[name].shape) for name in names}

    def first(step, **options):
        moved = dict.fromkeys(given)
        for name in names:
            x = there(given[name] + step * along[name], place)
            moved[name] = rx.Tensor(x, requires_grad=True)
        total = rx.sum(call(kind, graph.to_device(place), moved)[0] * weight)
        inputs = [moved[name] for name in names]
        return rx.autograd.gradients([total], inputs, **options), inputs

    found, inputs = first(0.0, create_graph=True)
    slope = rx.sum(found[0] * there(along[names[0]], place))
    for name, x in zip(names[1:], found[1:], strict=True):
        slope = slope + rx.sum(x * there(along[name], place))
    second = rx.autograd.gradients([slope], inputs)
    above, below = first(1e-5)[0], first(-1e-5)[0]
    for got, a, b in zip(second, above, below, strict=True):
        a, b, got = (_device.to_device(rx.Tensor(x).data, "cpu") for x in (a, b, got))
        assert_close(got, (a - b) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the simulator: infinity minus itself
def test_scores_that_are_not_finite(place):
    """A row of -inf gives zeros, a NaN stays in its row, and the largest takes it all."""
    src, dst = np.array([0, 1, 0, 1, 0, 1, 2, 2]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    graph = geom.Graph.from_edges(src, dst, n_nodes=5)
    edge = np.array([-np.inf, -np.inf, -np.inf, 1, np.nan, 0, -3e38, 3e38], np.float32)[:, None]
    given = {"values": np.arange(5, dtype=np.float32).reshape(5, 1, 1) + 1}
    given |= {"src": None, "dst": None, "edge": edge}
    grad = np.ones((5, 1, 1), np.float32)
    out, lse, of = run("edges-alone", graph, given, grad, place)
    out = _device.to_device(out, "cpu")[:, 0, 0]
    assert_close(out, np.array([0, 2, np.nan, 3, 0], np.float32))
    lse = _device.to_device(lse, "cpu")[:, 0]
    assert_close(lse, np.array([-np.inf, 1, np.nan, 3e38, -np.inf], np.float32))
    of_edge = _device.to_device(of["edge"], "cpu")[:, 0]
    assert_close(of_edge[[0, 1, 2, 3, 6, 7]], np.zeros(6, np.float32))


@pytest.mark.parametrize("n_src, n_dst, n_edges", [(3, 2, 0), (0, 2, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "projected"])
def test_graphs_without_edges(place, kind, n_src, n_dst, n_edges):
    none = np.zeros(n_edges, np.int64)
    graph = geom.Graph.from_edges(none, none, n_src=n_src, n_dst=n_dst)
    given = arguments(kind, graph, 2, 3, "float32")
    out, lse, of = run(kind, graph, given, np.ones((n_dst, 2, 3), np.float32), place)
    assert_close(out, np.zeros((n_dst, 2, 3), np.float32))
    assert_close(lse, np.full((n_dst, 2), -np.inf, np.float32))
    for x in of.values():
        assert_close(x, np.zeros(x.shape, np.float32))


def test_wide_indices(place, skewed):
    given = arguments("mlp", skewed, 2, 4, "float32")
    grad = np.ones((skewed.n_dst, 2, 4), np.float32)
    want = run("mlp", skewed, given, grad, place)
    for graph in (skewed, skewed.T):
        vars(graph)["indices"] = graph.indices.astype(np.int64)
    got = run("mlp", skewed, given, grad, place)
    assert_close(got[0], want[0], exact=True)
    assert_close(got[2]["values"], want[2]["values"], exact=True)


def test_what_does_not_fit():
    assert not edge_attention.fits(np.zeros((3, 2), np.float32))
    assert not edge_attention.fits(np.zeros((3, 0, 2), np.float32))
    assert not edge_attention.fits(np.zeros((3, 1, 2), np.int32))
    assert not edge_attention.fits(np.zeros((3, 1, 2000), np.float32))


@pytest.mark.sim
@pytest.mark.parametrize(
    "kind, n_heads, dtype",
    [
        ("additive", 2, "float32"),
        ("projected", 2, "float32"),
        ("projected", 2, "float16"),
        ("dot", 1, "float32"),
        ("dot", 1, "float16"),
    ],
)
def test_plans_count_what_the_gradient_makes(monkeypatch, kind, n_heads, dtype):
    """Of short rows, which need no parts."""
    graph = geom.Graph.from_edges(np.array([0, 1, 4, 2, 2]), np.array([1, 1, 3, 0, 0]), n_nodes=6)
    given = arguments(kind, graph, n_heads, 8, dtype)
    tensors = {k: None if x is None else rx.Tensor(x, requires_grad=True) for k, x in given.items()}
    out, lse = call(kind, graph, tensors)
    made, empty = [], edge_attention.empty

    def counted(like, shape, dtype):
        made.append(empty(like, shape, dtype))
        return made[-1]

    monkeypatch.setattr(edge_attention, "empty", counted)
    out.backward(np.ones(out.shape, dtype))

    def held(name, x):
        rows = "nodes" if x.shape[0] == graph.n_nodes else ""
        return _trace.Held(name, x.shape, x.dtype.itemsize, rows)

    arrays = [held(k, x) for k, x in given.items() if x is not None]
    outputs = held("", out.data), held("", lse.data)
    step = _trace.Step(f"{kind}_attention", False, False, True, tuple(arrays), outputs)
    passes = _trace.passes_back(step)
    planned = sum(x.nbytes for one in passes for x in one.outputs if x.rows == "nodes")
    again = 2 * lse.data.nbytes if kind == "projected" else 0  # which other kernels make
    assert planned == sum(x.nbytes for x in made) + again
    meter = _trace._Meter(graph, {6: (6, "nodes"), 5: (5, "edges")}, out.data)
    monkeypatch.setattr(meter, "_on_host", False)
    assert [meter._extra(one) for one in passes] == [0, 0]  # no wider copies either


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind):
    """Forward takes the results; backward the gradients, and little more."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 20_000, (2, 2_000_000))
    graph = geom.Graph.from_edges(src, dst, n_nodes=20_000).to_device("cuda:0")
    given = arguments(kind, graph, 4, 32, "float32")
    given = {k: there(x, _device.device("cuda:0")) for k, x in given.items()}
    tensors = {k: None if x is None else rx.Tensor(x, requires_grad=True) for k, x in given.items()}
    grad = cupy.ones((20_000, 4, 32), cupy.float32)
    call(kind, graph, tensors)[0].backward(grad)  # deals the edges out
    results = grad.nbytes + sum(x.nbytes for x in given.values() if x is not None)
    pool = cupy.cuda.MemoryPool()
    for x in tensors.values():
        if x is not None:
            x.grad = None
    with cupy.cuda.using_allocator(pool.malloc):
        out = call(kind, graph, tensors)[0]
        assert pool.total_bytes() < 1.2 * grad.nbytes + 2**23
        out.backward(grad)
        assert pool.total_bytes() < 1.2 * results + 2**25
