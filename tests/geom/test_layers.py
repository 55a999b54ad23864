"""Layers against the plainest loops, and what all of them must do."""

import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom, nn
from rtxarr.geom import _edges, _gcn
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

KINDS = np.array([0, 1, 2, 0, 1, 2, 0, 0, 2, 1, 1, 0, 2])


def options(dtype):
    return {"dtype": dtype, "generator": rx.random.Generator(0)}


def network(n_in, n_out, dtype):
    return nn.Sequential(
        nn.Linear(n_in, 4, **options(dtype)), rx.tanh, nn.Linear(4, n_out, **options(dtype))
    )


# For each layer how to make it, for 3 features, and what it needs of edges.
LAYERS = {
    "gcn": (lambda d: geom.GCNConv(3, 2, **options(d)), None),
    "gcn-wide": (lambda d: geom.GCNConv(3, 4, **options(d)), "weight"),
    "sgc": (lambda d: geom.SGConv(3, 2, k=2, **options(d)), "weight"),
    "appnp": (lambda d: geom.APPNP(k=3), "weight"),
    "cheb": (lambda d: geom.ChebConv(3, 2, k=3, lambda_max=1.5, **options(d)), None),
    "gat": (lambda d: geom.GATConv(3, 2, heads=2, **options(d)), None),
    "gat-edges": (lambda d: geom.GATConv(3, 2, heads=2, edge_channels=2, **options(d)), "attr"),
    "gat-residual": (
        lambda d: geom.GATConv(3, 2, heads=2, concat=False, residual=True, **options(d)),
        None,
    ),
    "gatv2-residual": (
        lambda d: geom.GATv2Conv(3, 2, heads=2, residual=True, **options(d)),
        None,
    ),
    "gatv2": (lambda d: geom.GATv2Conv(3, 2, heads=2, **options(d)), None),
    "gatv2-edges": (lambda d: geom.GATv2Conv(3, 2, edge_channels=2, **options(d)), "attr"),
    "transformer": (lambda d: geom.TransformerConv(3, 2, heads=2, beta=True, **options(d)), None),
    "transformer-edges": (
        lambda d: geom.TransformerConv(3, 2, heads=2, edge_channels=2, **options(d)),
        "attr",
    ),
    "sage-mean": (lambda d: geom.SAGEConv(3, 2, **options(d)), None),
    "sage-max": (lambda d: geom.SAGEConv(3, 4, aggr="max", normalize=True, **options(d)), None),
    "sage-pool": (lambda d: geom.SAGEConv(3, 2, aggr="pool", **options(d)), None),
    "sage-lstm": (lambda d: geom.SAGEConv(3, 2, aggr="lstm", **options(d)), None),
    "graph-conv": (lambda d: geom.GraphConv(3, 2, **options(d)), "weight"),
    "gin": (lambda d: geom.GINConv(network(3, 2, d), train_eps=True, dtype=d), None),
    "gine": (
        lambda d: geom.GINEConv(
            network(3, 2, d), in_channels=3, edge_channels=2, eps=0.5, **options(d)
        ),
        "attr",
    ),
    "edge-conv": (lambda d: geom.EdgeConv(network(6, 2, d)), None),
    "rgcn": (lambda d: geom.RGCNConv(3, 2, 3, **options(d)), "kind"),
    "rgcn-blocks": (
        lambda d: geom.RGCNConv((3, 3), 6, 3, n_blocks=3, **options(d)),
        "kind",
    ),
    "rgcn-bases": (lambda d: geom.RGCNConv(3, 4, 3, n_bases=2, **options(d)), "kind"),
    "pna": (
        lambda d: geom.PNAConv(
            3,
            4,
            ["mean", "max", "min", "var", "sum"],
            ["identity", "amplification", "attenuation"],
            mean_degree=2.0,
            mean_log_degree=0.8,
            towers=2,
            **options(d),
        ),
        None,
    ),
    "pna-edges": (
        lambda d: geom.PNAConv(
            3,
            2,
            ["mean", "max"],
            ["identity", "linear"],
            mean_degree=2.0,
            mean_log_degree=0.8,
            pre_layers=2,
            post_layers=2,
            edge_channels=2,
            **options(d),
        ),
        "attr",
    ),
}
FIXED_ORDER = {"sage-lstm"}  # what an LSTM gives depends on the order of the edges


def edges(seed=0):
    """Give loops, two on one node, duplicates, a hub and nodes without edges, in mixed order."""
    src = np.array([0, 1, 1, 2, 3, 3, 4, 0, 2, 2, 4, 1, 3])
    dst = np.array([2, 1, 1, 2, 2, 2, 2, 3, 0, 0, 2, 0, 4])
    rng = np.random.default_rng(seed)
    return src, dst, rng.uniform(0.5, 1.5, 13), rng.standard_normal((13, 2))


def given(kind, weight, attr, kinds=KINDS):
    return {None: (), "weight": (weight,), "attr": (attr,), "kind": (kinds,)}[kind]


@pytest.fixture(params=[None, 8], ids=["whole", "in runs"])
def chunk(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(_edges.CHUNK, "cpu", request.param)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("chunk")
def test_gradients_of_both_orders(name):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(1).standard_normal((6, 3))
    layer = make("float64")
    values = given(kind, weight, attr)
    names = list(layer.state_dict())

    def call(x, *arrays):
        own = dict(zip(names, arrays, strict=False))
        extra = arrays[len(names) :] or values
        return nn.functional_call(layer, own, graph, x, *extra)

    floats = values if kind in ("weight", "attr") else ()
    args = (x, *(a.copy() for a in layer.state_dict().values()), *floats)
    gradcheck(call, args)
    if "lstm" not in name:
        gradgradcheck(call, args)


@pytest.mark.parametrize("name", LAYERS)
def test_permuted_nodes_and_edges_permute_the_result(name):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 3))
    nodes, order = rng.permutation(6), rng.permutation(13)
    if name in FIXED_ORDER:
        order = np.arange(13)
    if kind == "weight":  # of two loops on a node the last one counts
        loops = np.flatnonzero((src == 1) & (dst == 1))
        weight[loops] = weight[loops[0]]
    layer = make("float64")
    want = layer(geom.Graph.from_edges(src, dst, n_nodes=6), x, *given(kind, weight, attr))
    other = geom.Graph.from_edges(nodes[src][order], nodes[dst][order], n_nodes=6)
    moved = np.empty_like(x)
    moved[nodes] = x
    values = given(kind, weight[order], attr[order], KINDS[order])
    got = layer(other, moved, *values)
    assert_close(rx.Tensor(got).numpy()[nodes], rx.Tensor(want).numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_equal_inputs_give_equal_bits(name):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(3).standard_normal((6, 3)).astype("float32")
    values = given(kind, weight.astype("float32"), attr.astype("float32"))
    layer = make("float32")

    def run():
        layer.zero_grad()
        t = rx.Tensor(x, requires_grad=True)
        out = layer(graph, t, *values)
        out.backward(np.ones(out.shape, "float32"))
        return [out.data, t.grad, *(p.grad for p in layer.parameters())]

    first = run()
    assert first[0].dtype == np.float32
    for _ in range(20):
        for a, b in zip(run(), first, strict=True):
            assert_close(a, b, exact=True)


@pytest.mark.parametrize("n_nodes", [0, 1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_without_edges(name, n_nodes):
    """dgl#2777, PyG#1129: no NaN, nothing that was never written."""
    make, kind = LAYERS[name]
    none = np.zeros(0, np.int64)
    graph = geom.Graph.from_edges(none, none, n_nodes=n_nodes)
    layer = make("float64")
    x = rx.Tensor(np.ones((n_nodes, 3)), requires_grad=True)
    out = layer(graph, x, *given(kind, np.zeros(0), np.zeros((0, 2)), none))
    assert out.shape[0] == n_nodes
    assert np.isfinite(out.data).all()
    out.backward(np.ones(out.shape))
    assert np.isfinite(x.grad).all()
    if name == "edge-conv":
        assert not out.data.any()
    if name == "sage-mean":
        own = x.data @ layer.lin_r.weight.data.T + layer.lin_l.bias.data
        assert_close(out.data, own)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_half_types_are_near(name, dtype):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(4).standard_normal((6, 3)).astype("float32")
    weight, attr = weight.astype("float32"), attr.astype("float32")
    layer = make("float32")
    want = rx.Tensor(layer(graph, x, *given(kind, weight, attr))).numpy()
    layer.astype(dtype)
    x, weight, attr = (rx.astype(a, dtype) for a in (x, weight, attr))
    got = rx.Tensor(layer(graph, x, *given(kind, weight, attr))).numpy()
    assert str(got.dtype) == dtype
    assert_close(got.astype("float32"), want, rtol=0.1, atol=0.1)


BIPARTITE = ["gat", "gatv2", "transformer", "sage-mean", "sage-pool", "graph-conv", "gin", "rgcn"]


@pytest.mark.parametrize("name", BIPARTITE)
def test_sources_and_destinations_that_differ(name):
    make, kind = LAYERS[name]
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, 5, 13), rng.integers(0, 3, 13)
    graph = geom.Graph.from_edges(src, dst, n_src=5, n_dst=4)
    layer = make("float64")
    if hasattr(layer, "add_self_loops"):
        with pytest.raises(ValueError, match="use add_self_loops=False"):
            layer(graph, (np.ones((5, 3)), np.ones((4, 3))))
        layer.add_self_loops = False
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((4, 3))
    values = given(kind, np.ones(13), None)
    got = layer(graph, (a, b), *values)
    # The same as among nodes of which the first 5 only send and the others only receive.
    both = geom.Graph.from_edges(src, dst + 5, n_nodes=9)
    want = layer(both, np.concatenate([a, b]), *values)
    assert_close(got.data, want.data[5:])
    assert not graph.is_nested
    with pytest.raises(ValueError, match="x must be a pair"):
        layer(graph, a, *values)


@pytest.mark.parametrize("name", [name for name in BIPARTITE if name != "rgcn"])
def test_sampled_neighbourhoods(name):
    """All edges of some nodes give these nodes what the whole graph gives them."""
    make, _ = LAYERS[name]
    src, dst, *_ = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(5).standard_normal((6, 3))
    layer = make("float64")
    seeds = np.array([2, 5, 0])
    sample = geom.NeighborSampler(graph, fanout=[-1], seed=0)(seeds)
    got = layer(sample.graphs[0], x[sample.nodes])
    assert_close(got.data, layer(graph, x).data[seeds])


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv"])
def test_training_needs_less_memory_than_the_messages(name, monkeypatch):
    """PyG#459, #2074, #8316: several arrays as large as all messages there."""
    n, degree, width = 1000, 100, 64
    monkeypatch.setitem(_edges.CHUNK, "cpu", 50_000)
    rng = np.random.default_rng(16)
    src = rng.integers(0, n, n * degree)
    graph = geom.Graph.from_edges(src, np.repeat(np.arange(n), degree), n_nodes=n)
    layer = getattr(geom, name)(width, width, **options("float64"))
    x = rng.standard_normal((n, width))

    def run():
        out = layer(graph, rx.Tensor(x, requires_grad=True))
        out.backward(np.ones(out.shape))

    run()  # what graphs keep is made once
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * degree * width * 8 / 2


# ---------------------------------------------------------------------------- by plain loops


def case(name):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(6).standard_normal((6, 3))
    layer = make("float64")
    out = layer(graph, x, *given(kind, weight, attr))
    return layer, x, src, dst, rx.Tensor(out).numpy()


def neighbours(src, dst, i):
    return src[dst == i]


def apply(module, x):
    return rx.Tensor(module(x)).numpy()


def test_edge_convolution():
    layer, x, src, dst, out = case("edge-conv")
    for i in range(6):
        rows = [apply(layer.nn, np.concatenate([x[i], x[j] - x[i]])) for j in src[dst == i]]
        assert_close(out[i], np.max(rows, axis=0) if rows else np.zeros(2))


def test_pooling_sage():
    layer, x, src, dst, out = case("sage-pool")
    sent = np.maximum(apply(layer.lin_pool, x), 0)
    for i in range(6):
        own = src[dst == i]
        found = sent[own].max(axis=0) if own.size else np.zeros(3)
        assert_close(out[i], apply(layer.lin_l, found) + apply(layer.lin_r, x[i]))


def test_lstm_sage():
    layer, x, src, dst, out = case("sage-lstm")
    for i in range(6):
        own = src[dst == i]
        found = np.zeros(3)
        if own.size:
            found = rx.Tensor(layer.lstm(x[None, own])[0]).numpy()[0, -1]
        assert_close(out[i], apply(layer.lin_l, found) + apply(layer.lin_r, x[i]))


@pytest.mark.parametrize("name", ["rgcn", "rgcn-bases"])
def test_relational_convolution(name):
    layer, x, src, dst, out = case(name)
    weight = layer.weight.data
    if layer.comp is not None:
        weight = np.einsum("rb,bio->rio", layer.comp.data, weight)
    for i in range(6):
        want = x[i] @ layer.root.data + layer.bias.data
        for kind in range(3):
            own = src[(dst == i) & (kind == KINDS)]
            if own.size:
                want = want + x[own].mean(axis=0) @ weight[kind]
        assert_close(out[i], want)


@pytest.mark.parametrize("name", ["pna", "pna-edges"])
def test_principal_neighbourhoods(name):
    layer, x, src, dst, out = case(name)
    attr = edges()[3]
    operations = {
        "mean": np.mean, "max": np.max, "min": np.min, "var": np.var, "sum": np.sum
    }  # fmt: skip
    rows = []
    for i in range(6):
        own, degree = np.flatnonzero(dst == i), np.sum(dst == i)
        factors = {
            "identity": 1,
            "amplification": np.log(degree + 1) / 0.8,
            "attenuation": 0.8 / np.log(max(degree, 1) + 1),
            "linear": degree / 2,
        }
        outputs = []
        for pre, post in zip(layer.pre_nns, layer.post_nns, strict=True):
            sent = []
            for e in own:
                parts = [x[i], x[src[e]]]
                if layer.edge_encoder is not None:
                    parts.append(apply(layer.edge_encoder, attr[e]))
                sent.append(apply(pre, np.concatenate(parts)))
            found = [
                operations[op](sent, axis=0) if sent else np.zeros(3) for op in layer.aggregators
            ]
            scaled = [factors[s] * np.concatenate(found) for s in layer.scalers]
            outputs.append(apply(post, np.concatenate([x[i], *scaled])))
        rows.append(np.concatenate(outputs))
    assert_close(out, apply(layer.lin, np.stack(rows)))


def test_principal_neighbourhoods_are_normalised_in_training():
    means = {"mean_degree": 2.0, "mean_log_degree": 0.8, **options("float64")}
    layer = geom.PNAConv(3, 2, ["mean", "max"], ["identity"], batch_norm=True, **means)
    graph = geom.Graph.from_edges(*edges()[:2], n_nodes=6)
    x = np.random.default_rng(1).standard_normal((6, 3))
    out = rx.Tensor(layer(graph, x)).numpy()
    share = np.linalg.solve(layer.lin.weight.data, (out - layer.lin.bias.data).T).T
    assert_close(share.mean(axis=0), np.zeros(2), atol=1e-12)
    assert np.all(share.var(axis=0) > 0.9)
    assert np.all(layer.norms[0].running_mean.data != 0)
    layer.eval()
    assert np.abs(rx.Tensor(layer(graph, x)).numpy() - out).max() > 0.1
    names = [name for name, p in layer.named_parameters() if p.requires_grad]

    def call(x, *arrays):
        return nn.functional_call(layer, dict(zip(names, arrays, strict=True)), graph, x)

    gradcheck(call, (x, *(layer.state_dict()[name].copy() for name in names)))


def normalised(src, dst, weight, n):
    """Give GCN's matrix with loops, of which the last one on a node counts."""
    matrix = np.zeros((n, n))
    loops = np.ones(n)
    for s, d, w in zip(src, dst, weight, strict=True):
        if s == d:
            loops[s] = w
        else:
            matrix[d, s] += w
    matrix += np.diag(loops)
    degree = matrix.sum(axis=1)
    return matrix / np.sqrt(np.outer(degree, degree))


def test_simple_graph_convolution():
    layer, x, src, dst, out = case("sgc")
    matrix = normalised(src, dst, edges()[2], 6)
    assert_close(out, apply(layer.lin, matrix @ matrix @ x))


def test_personalised_page_rank():
    layer, x, src, dst, out = case("appnp")
    matrix = normalised(src, dst, edges()[2], 6)
    z = x
    for _ in range(3):
        z = 0.9 * matrix @ z + 0.1 * x
    assert_close(out, z)
    layer.dropout = 0.5
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    assert not np.allclose(layer(graph, x, edges()[2]), out)
    assert_close(layer.eval()(graph, x, edges()[2]), out)


def test_chebyshev_convolution():
    layer, x, src, dst, out = case("cheb")
    matrix = np.zeros((6, 6))
    for s, d in zip(src, dst, strict=True):
        matrix[d, s] += s != d
    root = np.sqrt(matrix.sum(axis=0))  # of the edges that begin at a node
    root = np.divide(1, root, out=np.zeros(6), where=root > 0)
    scaled = 2 / 1.5 * (np.eye(6) - matrix * np.outer(root, root)) - np.eye(6)
    terms = [x, scaled @ x, 2 * scaled @ scaled @ x - x]
    want = np.sum([t @ lin.weight.data.T for t, lin in zip(terms, layer.lins, strict=True)], axis=0)
    assert_close(out, want + layer.bias.data)


def softmax(x):
    x = np.exp(x - x.max(axis=0))
    return x / x.sum(axis=0)


def heads(x):
    return x.reshape(*x.shape[:-1], 2, -1)


def test_transformer_with_edge_features():
    layer, x, src, dst, out = case("transformer-edges")
    query, key, value = (
        heads(apply(lin, x)) for lin in (layer.lin_query, layer.lin_key, layer.lin_value)
    )
    edge = heads(apply(layer.lin_edge, edges()[3]))
    for i in range(6):
        own = np.flatnonzero(dst == i)
        want = apply(layer.lin_skip, x[i])
        if own.size:
            logits = (query[i] * (key[src[own]] + edge[own])).sum(axis=-1) / np.sqrt(2)
            rows = value[src[own]] + edge[own]
            want = want + (softmax(logits)[:, :, None] * rows).sum(axis=0).ravel()
        assert_close(out[i], want)


def test_transformer_with_gates():
    layer, x, src, dst, out = case("transformer")
    layer.lin_beta, gate = None, layer.lin_beta
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    own = apply(layer.lin_skip, x)
    found = layer(graph, x).data - own
    share = 1 / (1 + np.exp(-apply(gate, np.concatenate([found, own, found - own], axis=1))))
    assert_close(out, share * own + (1 - share) * found)


def test_gatv2_with_edge_features():
    layer, x, src, dst, out = case("gatv2-edges")
    keep = src != dst
    attr, src, dst = edges()[3][keep], src[keep], dst[keep]
    left, right = apply(layer.lin_l, x), apply(layer.lin_r, x)
    for i in range(6):
        own = np.flatnonzero(dst == i)
        loop = attr[own].mean(axis=0) if own.size else np.zeros(2)
        rows = left[np.append(src[own], i)]
        total = rows + right[i] + apply(layer.lin_edge, np.vstack([attr[own], loop]))
        logits = np.where(total > 0, total, 0.2 * total) @ layer.att.data[0, 0]
        assert_close(out[i], softmax(logits) @ rows + layer.bias.data)


def test_weights_of_attention():
    make, _ = LAYERS["gat"]
    src, dst, *_ = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    out, (looped, alpha) = make("float64")(graph, np.ones((6, 3)), return_attention=True)
    assert looped.n_edges == np.sum(src != dst) + 6
    assert_close(geom.aggregate(looped, np.ones(6), weight=alpha.data[:, 0]), np.ones(6))
    assert out.shape == (6, 4)


@pytest.mark.parametrize(
    "name", ["gat", "gat-edges", "gatv2", "gatv2-edges", "transformer", "transformer-edges"]
)
def test_weights_of_attention_have_gradients(name):
    make, kind = LAYERS[name]
    src, dst, _, attr = edges()
    graph, layer = geom.Graph.from_edges(src, dst, n_nodes=6), make("float64")
    given = (attr,) if kind else ()
    _, (used, alpha) = layer(graph, np.ones((6, 3)), *given, return_attention=True)
    totals = _edges.collect(alpha, graph=used).data
    assert_close(totals, np.broadcast_to(used.in_degrees[:, None] > 0, totals.shape).astype(float))
    x = np.random.default_rng(0).standard_normal((6, 3))
    gradcheck(lambda x: layer(graph, x, *given, return_attention=True)[1][1], (x,))


def test_attention_to_the_nodes_of_a_sample():
    """One array for sources and destinations gives what a pair of arrays does."""
    src, dst = edges()[:2]
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    (block,) = geom.NeighborSampler(graph, [-1])(np.array([4, 0])).graphs
    assert block.n_src > block.n_dst
    x = np.random.default_rng(17).standard_normal((block.n_src, 3))
    layer, found = geom.GATConv(3, 2, heads=2, add_self_loops=False, **options("float64")), []
    for is_pair in (False, True):
        t = rx.Tensor(x, requires_grad=True)
        out = layer(block, (t, t[: block.n_dst]) if is_pair else t)
        layer.att_dst.grad = None
        rx.sum(out * out).backward()
        found.append((out.data, t.grad, layer.att_dst.grad))
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


def test_dropout_of_attention_is_for_training():
    graph = geom.Graph.from_edges(*edges()[:2], n_nodes=6)
    x = np.random.default_rng(7).standard_normal((6, 3))
    for name in ("GATConv", "GATv2Conv", "TransformerConv"):
        layer = getattr(geom, name)(3, 2, dropout=0.5, **options("float64"))
        assert not np.allclose(layer(graph, x).data, layer(graph, x).data)
        layer.eval()
        assert_close(layer(graph, x).data, layer(graph, x).data, exact=True)


# ------------------------------------------------------------------------------------ loops


def test_weights_that_cannot_be_normalised_name_the_node():
    """PyG#795, #61: NaN there."""
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=3)
    layer = geom.GCNConv(2, 2, dtype="float64")
    with pytest.raises(ValueError, match="got -2 at node 1"):
        layer(graph, np.ones((3, 2)), np.array([-3.0, 1.0]))
    with pytest.raises(ValueError, match="got nan at node 0"):
        layer(graph, np.ones((3, 2)), np.array([1.0, np.nan]))
    # A sum of zero is no division by zero.
    assert_close(geom.gcn_norm(graph, np.array([-1.0, 1.0]))[1], np.array([0, 0, 0.5, 0, 1.0]))


@pytest.mark.parametrize("weighted", [False, True])
def test_degrees_may_leave_the_range_of_a_half_type(weighted):
    """Products of degrees do, at 256 edges."""
    n = 300
    nodes = np.arange(1, n)
    src, dst = (np.concatenate(x) for x in ((nodes, 0 * nodes), (0 * nodes, nodes)))
    graph = geom.Graph.from_edges(np.tile(src, 300), np.tile(dst, 300), n_nodes=n)
    x = np.random.default_rng(8).standard_normal((n, 3)).astype("float16")
    layer = geom.ChebConv(3, 2, k=2, **options("float64"))
    given = [np.ones(graph.n_edges, "float16")] if weighted else []
    want = layer(graph, x.astype("float64"), *given).data
    assert_close(layer.astype("float16")(graph, x, *given).data, want.astype("float16"), atol=5e-3)


def test_a_gpu_is_waited_for_when_weights_are_first_seen(monkeypatch):
    found = []
    monkeypatch.setattr(_gcn, "_require_positive", lambda degree, side: found.append(degree))
    monkeypatch.setattr(_device, "is_device_array", lambda x: True)
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=2)
    weight, degree = np.ones(2), np.ones(2)
    leaf = rx.Tensor(weight, requires_grad=True)
    for given in (weight, weight, rx.Tensor(weight), leaf, None, leaf * 2, np.ones(2), np.ones(2)):
        _gcn.check_degrees(degree, given, graph, "end", False)
    assert len(found) == 3
    del given
    keys = [key for key in graph._kept if key[0] == "checked"]
    assert keys == [("checked", "end", False, id(weight))]
    for side, rule in (("end", True), ("begin", "Laplacian"), ("begin", "Laplacian")):
        _gcn.check_degrees(degree, weight, graph, side, rule)
    assert len(found) == 5


def test_weights_of_edges_are_real():
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=2)
    for layer in (geom.GCNConv(2, 2), geom.ChebConv(2, 2, k=2)):
        with pytest.raises(
            TypeError, match="weight must be .* real floating dtype, got complex128"
        ):
            layer(graph, np.ones((2, 2), np.float32), np.array([1 + 5j, 2]))
    with pytest.raises(ValueError, match="n_bases must be"):
        geom.RGCNConv(6, 9, 2, n_bases=0)


def test_improved_without_weights():
    """PyG's gcn_norm ignores it there: A + 2 I is meant."""
    src, dst = np.array([0, 1, 2, 3, 1, 2, 3, 0]), np.array([1, 2, 3, 0, 0, 1, 2, 3])
    graph = geom.Graph.from_edges(src, dst, n_nodes=4)
    layer = geom.GCNConv(4, 4, improved=True, **options("float64"))
    x = np.random.default_rng(8).standard_normal((4, 4))
    matrix = 2 * np.eye(4)
    matrix[dst, src] += 1
    want = matrix @ x @ layer.lin.weight.data.T / 4
    assert_close(layer(graph, x).data, want)
    assert_close(layer(graph, x, np.ones(8)).data, want)


def test_loops_have_one_rule_for_all_representations():
    """PyG gives 5.50 for edge lists and 4.75 for compressed rows here."""
    x = np.array([[1.0], [10.0]])
    src, dst = np.array([0, 0, 1]), np.array([0, 1, 0])
    by_list = geom.Graph.from_edges(src, dst, n_nodes=2)
    by_rows = geom.Graph(np.array([0, 2, 3]), np.array([1, 0, 0]))
    layer = geom.GCNConv(1, 1, dtype="float64", bias=False)
    layer.lin.weight.assign(np.ones((1, 1)))
    for graph in (by_list, by_rows):
        assert_close(layer(graph, x).data, np.array([[5.5], [5.5]]))
        assert_close(layer(graph, x, np.ones(3)).data, np.array([[5.5], [5.5]]))


def test_of_two_loops_the_last_one_stays():
    graph = geom.Graph.from_edges(np.array([0, 0, 1]), np.array([0, 0, 0]), n_nodes=2)
    _, weight = geom.gcn_norm(graph, np.array([5.0, 3.0, 1.0]))
    # The edge from 1, then the loops: degrees are 4 and 1.
    assert_close(weight, np.array([0.5, 0.75, 1.0]))


def test_normalised_weights_are_worked_out_once():
    graph = geom.Graph.from_edges(np.array([0]), np.array([1]), n_nodes=2)
    first, other = geom.gcn_norm(graph), geom.gcn_norm(graph.replace(nodes={"x": np.ones(2)}))
    assert first[0] is other[0]
    assert first[1] is other[1]


def test_weights_are_taken_as_they_are():
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=2)
    layer = geom.GCNConv(1, 1, normalize=False, bias=False, dtype="float64")
    layer.lin.weight.assign(np.ones((1, 1)))
    got = layer(graph, np.array([[1.0], [2.0]]), np.array([10.0, 100.0]))
    assert_close(got.data, np.array([[200.0], [10.0]]))


# ------------------------------------------------------------------------------- other modules


def test_jumping_knowledge():
    rng = np.random.default_rng(12)
    a, b = (rx.Tensor(rng.standard_normal((4, 6)), requires_grad=True) for _ in range(2))
    assert_close(geom.JumpingKnowledge("cat")([a, b]).data, np.hstack([a.data, b.data]))
    assert_close(geom.JumpingKnowledge("max")([a, b]).data, np.maximum(a.data, b.data))
    layer = geom.JumpingKnowledge("lstm", channels=6, n_layers=2, **options("float64"))
    out = layer([a, b])
    weight = rx.softmax(layer.att(layer.lstm(rx.stack([a, b], axis=1))[0]), axis=1).data
    assert_close(out.data, weight[:, 0] * a.data + weight[:, 1] * b.data)
    with pytest.raises(ValueError, match="mode must be one of cat, max, lstm"):
        geom.JumpingKnowledge("mean")
    with pytest.raises(ValueError, match="at least one array"):
        layer([])


BAD = [
    (lambda g: geom.RGCNConv(3, 6, 2, n_blocks=2), "n_blocks must divide 3 and 6 features"),
    (lambda g: geom.RGCNConv(4, 6, 2, n_blocks=2, n_bases=2), "without n_bases, got n_blocks=2"),
    (lambda g: geom.SAGEConv(3, 2, aggr="std"), "aggr must be one of mean, max"),
    (lambda g: geom.GraphConv(3, 2, aggr="best"), "op must be one of sum"),
    (lambda g: geom.SGConv(3, 2, k=-1), "k must be an int >= 0, got -1"),
    (lambda g: geom.APPNP(alpha=2), r"alpha must lie in \[0, 1\], got 2"),
    (lambda g: geom.ChebConv(3, 2, k=2, lambda_max=0), "lambda_max must be above 0"),
    (lambda g: geom.GATConv(3, 2)(g, np.ones((3, 3)), np.ones((2, 1))), "edge_attr must be given"),
    (lambda g: geom.GINEConv(abs, in_channels=3), "must be given together"),
    (lambda g: geom.RGCNConv(3, 2, 2)(g, np.ones((3, 3)), np.zeros(3, int)), "edge_type must have"),
    (
        lambda g: geom.PNAConv(3, 2, ["mul"], [], mean_degree=1.0, mean_log_degree=1.0),
        "aggregators must be among",
    ),
    (
        lambda g: geom.PNAConv(3, 2, ["sum"], [], mean_degree=1, mean_log_degree=1, towers=3),
        "towers must divide",
    ),
    (
        lambda g: geom.GCNConv(3, 2, dtype="float64")(g, np.ones((3, 3)), np.ones(3)),
        "weight must have an entry for each of 2 edges",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=range(len(BAD)))
def test_bad_arguments(call, message):
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    with pytest.raises(ValueError, match=message):
        call(graph)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_gpu_gives_the_same(name):
    make, kind = LAYERS[name]
    src, dst, weight, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x = np.random.default_rng(15).standard_normal((6, 3))
    found = []
    for device in ("cpu", "cuda:0"):
        with rx.device(device):
            layer = make("float64").to_device(device)
        if device == "cpu":
            state = {key: value.copy() for key, value in layer.state_dict().items()}
        layer.load_state_dict(state)
        values = [rx.asarray(a, device=device) for a in given(kind, weight, attr)]
        t = rx.Tensor(rx.asarray(x, device=device), requires_grad=True)
        out = layer(graph.to_device(device), t, *values)
        out.backward(rx.ones(out.shape, dtype=out.dtype, device=device))
        grads = [p.grad for p in layer.parameters()]
        found.append([rx.Tensor(a).numpy() for a in (out.data, t.grad, *grads)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("edge_channels", [None, 2])
def test_a_gpu_drops_the_same_weights_of_attention(name, edge_channels):
    src, dst, _, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    x, found = np.random.default_rng(16).standard_normal((6, 3)), []
    for device in ("cpu", "cuda:0"):
        make = getattr(geom, name)
        kept = {"heads": 2, "dropout": 0.5, "edge_channels": edge_channels}
        layer = make(3, 2, **kept, **options("float64"), device=device)
        layer.generator = rx.random.Generator(5)
        given = [rx.asarray(a, device=device) for a in ([attr] if edge_channels else [])]
        t = rx.Tensor(rx.asarray(x, device=device), requires_grad=True)
        out = layer(graph.to_device(device), t, *given)
        rx.sum(out * out).backward()
        found.append([rx.Tensor(a).numpy() for a in (out.data, t.grad)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GATv2Conv", "TransformerConv"])
def test_features_of_edges_in_chunks_and_at_once_give_the_same(name, monkeypatch):
    monkeypatch.setitem(_edges.CHUNK, "cuda", 8)
    src, dst, _, attr = edges()
    graph = geom.Graph.from_edges(src, dst, n_nodes=6).to_device("cuda:0")
    x = rx.asarray(np.random.default_rng(16).standard_normal((6, 3)), device="cuda:0")
    attr, found = rx.asarray(attr, device="cuda:0"), []
    layer = getattr(geom, name)(3, 2, heads=2, edge_channels=2, **options("float64"), device="cuda")
    for share in (1, 2**62):
        monkeypatch.setattr(_edges, "SHARE", share)
        t = rx.Tensor(x, requires_grad=True)
        out = layer(graph, t, attr)
        layer.zero_grad()
        rx.sum(out * out).backward()
        found.append([rx.Tensor(a).numpy() for a in (out.data, t.grad, layer.lin_edge.weight.grad)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)
