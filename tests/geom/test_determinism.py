"""Equal inputs give equal bits, and permuted nodes and edges permuted results, on every device."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom, nn
from rtxarr.geom import _bins
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck
from tests.geom.test_layers import LAYERS

OPS = ["sum", "mean", "max", "min", "std", "var", "mul", "softmax", "median", "quantile"]
F64 = {"dtype": "float64"}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def put(request):
    """Give a function that brings arrays to the device."""

    def move(x, dtype=None):
        return rx.asarray(np.asarray(x), dtype=dtype, device=request.param)

    move.n_runs = 3 if request.param == "cpu" else 20
    with rx.device(request.param):
        yield move


def back(x):
    return rx.Tensor(x).numpy()


def hubs(n_nodes=300, degree=2000):
    """Give the ends of edges with a node that many end at, and one that many begin at."""
    rng = np.random.default_rng(0)
    src, dst = (rng.integers(0, n_nodes - 1, 2 * degree + n_nodes) for _ in range(2))
    dst[:degree], src[degree : 2 * degree] = 2, 3
    order = rng.permutation(src.size)
    return src[order], dst[order]


def bits(x):
    return back(x).tobytes()


def equal_bits(put, run):
    first = [bits(x) for x in run()]
    for _ in range(put.n_runs - 1):
        for got, want in zip(run(), first, strict=True):
            assert bits(got) == want


# ------------------------------------------------------------------------------------- equal bits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of products of halves
def test_operations_give_equal_bits(put, op, dtype):
    src, dst = hubs()
    graph = geom.Graph.from_edges(put(src), put(dst), n_nodes=300)
    rng = np.random.default_rng(1)
    x, g = (put(rng.uniform(0.9, 1.1, (300, 5)), dtype) for _ in range(2))
    options = {"q": 0.3} if op == "quantile" else {}

    def run():
        t = rx.Tensor(x, requires_grad=True)
        out = geom.aggregate(graph, t, op, **options)
        out.backward(g)
        return out.data, t.grad

    equal_bits(put, run)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "sage-lstm"])
def test_layers_give_equal_bits(put, name, dtype):
    make, kind = LAYERS[name]
    src, dst = hubs()
    graph = geom.Graph.from_edges(put(src), put(dst), n_nodes=300)
    rng = np.random.default_rng(2)
    layer = make("float32").astype(dtype)
    given = {
        None: (),
        "weight": (put(rng.uniform(0.5, 1.5, src.size), dtype),),
        "attr": (put(rng.standard_normal((src.size, 2)), dtype),),
        "kind": (put(rng.integers(0, 3, src.size)),),
    }[kind]
    x = put(rng.standard_normal((300, 3)), dtype)

    def run():
        layer.zero_grad()
        t = rx.Tensor(x, requires_grad=True)
        out = layer(graph, t, *given)
        rx.sum(out).backward()
        return [out, t.grad, *(p.grad for p in layer.parameters())]

    equal_bits(put, run)


# --------------------------------------------------------------------------------- permutations


@pytest.fixture
def moved(put):
    """Give a graph, the same with nodes and edges in another order, and the orders.

    Node ``i`` becomes ``nodes[i]``; edge ``i`` is edge ``edges[i]`` of the first one.
    """
    src, dst = hubs(40, 600)
    rng = np.random.default_rng(3)
    nodes, edges = rng.permutation(40), rng.permutation(src.size)
    one = geom.Graph.from_edges(put(src), put(dst), n_nodes=40)
    two = geom.Graph.from_edges(put(nodes[src][edges]), put(nodes[dst][edges]), n_nodes=40)
    return one, two, nodes, edges


def by_node(nodes, x):
    out = np.empty_like(x)
    out[nodes] = x
    return out


@pytest.mark.parametrize("op", ["dot", "add", "sub", "mul", "div"])
def test_functions_of_both_nodes_permute(put, moved, op):
    one, two, nodes, edges = moved
    u, v = np.random.default_rng(4).uniform(1, 2, (2, 40, 3))
    want = geom.sddmm(one, put(u), put(v), op)
    got = geom.sddmm(two, put(by_node(nodes, u)), put(by_node(nodes, v)), op)
    assert_close(back(got), back(want)[edges])


def test_attention_permutes(put, moved):
    one, two, nodes, edges = moved
    rng = np.random.default_rng(5)
    values, logits = rng.standard_normal((40, 2, 3)), rng.standard_normal((one.n_edges, 2))
    want = back(geom.edge_softmax(one, put(logits)))
    assert_close(back(geom.edge_softmax(two, put(logits[edges]))), want[edges])
    want = back(geom.attend(one, put(values), put(logits)))
    got = geom.attend(two, put(by_node(nodes, values)), put(logits[edges]))
    assert_close(back(got)[nodes], want)


class Sum(nn.Module):
    def forward(self, graph, x):
        return geom.aggregate(graph, x[0] if isinstance(x, tuple) else x)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_relations_permute(put, moved, aggr):
    one, two, nodes, edges = moved
    other = np.random.default_rng(6).permutation(40)
    own, ahead = ("a", "r", "a"), ("b", "s", "a")
    src, dst = (back(x) for x in (one.src, one.dst))
    layer = geom.HeteroConv({own: Sum(), ahead: Sum()}, aggr=aggr)
    a, b = np.random.default_rng(7).standard_normal((2, 40, 3))
    first = {own: (put(src), put(dst)), ahead: (put(src[:500]), put(dst[:500]))}
    some = np.flatnonzero(edges < 500)
    second = {
        own: (two.src, two.dst),
        ahead: (put(other[src[edges[some]]]), put(nodes[dst[edges[some]]])),
    }
    counts = {"a": 40, "b": 40}
    want = layer(geom.HeteroGraph.from_edges(first, counts), {"a": put(a), "b": put(b)})["a"]
    x = {"a": put(by_node(nodes, a)), "b": put(by_node(other, b))}
    got = layer(geom.HeteroGraph.from_edges(second, counts), x)["a"]
    assert_close(back(got)[nodes], back(want))


PTR = np.array([0, 12, 12, 40])


@pytest.fixture
def within():
    """An order of nodes that leaves each in its graph."""
    rng = np.random.default_rng(8)
    return np.concatenate([rng.permutation(12), 12 + rng.permutation(28)])


@pytest.mark.parametrize("kind", ["GraphNorm", "InstanceNorm", "GraphLayerNorm", "PairNorm"])
def test_norms_permute(put, within, kind):
    x = np.random.default_rng(9).standard_normal((40, 3))
    layer = geom.PairNorm() if kind == "PairNorm" else getattr(geom, kind)(3, **F64)
    want, got = (back(layer(put(rows), put(PTR))) for rows in (x, by_node(within, x)))
    assert_close(got[within], want)


def test_pooling_does_not_know_the_order(put, within):
    x, score = np.random.default_rng(10).standard_normal((2, 40, 3))
    set2set = geom.Set2Set(3, n_steps=2, **F64)
    for call in (
        lambda x, score: geom.global_sum(x, put(PTR)),
        lambda x, score: geom.global_mean(x, put(PTR)),
        lambda x, score: geom.global_max(x, put(PTR)),
        lambda x, score: geom.global_attention(x, score, put(PTR)),
        lambda x, score: set2set(x, put(PTR)),
    ):
        want = call(put(x), put(score))
        got = call(put(by_node(within, x)), put(by_node(within, score)))
        assert_close(back(got), back(want))


def batch_of(put, src, dst):
    graph = geom.Graph.from_edges(put(src), put(dst), n_nodes=40)
    return geom.Batch(graph, put(PTR))


@pytest.mark.parametrize("kind", ["topk", "sag"])
def test_nodes_that_stay_permute(put, within, kind):
    rng = np.random.default_rng(11)
    src = rng.integers(0, 40, 300)
    dst = np.where(src < 12, rng.integers(0, 12, 300), rng.integers(12, 40, 300))
    x = rng.standard_normal((40, 3))
    conv = geom.GraphConv(3, 1, **F64)
    pool = geom.TopKPooling(3, **F64) if kind == "topk" else geom.SAGPooling(conv)
    small, rows, kept = pool(batch_of(put, src, dst), put(x))
    order = rng.permutation(300)
    other = batch_of(put, within[src][order], within[dst][order])
    small2, rows2, kept2 = pool(other, put(by_node(within, x)))
    assert_close(back(rows2), back(rows))  # by falling score
    assert_close(back(kept2), within[back(kept)], exact=True)
    assert_close(back(small2.ptr), back(small.ptr), exact=True)
    pairs = [sorted(zip(back(g.src), back(g.dst), strict=True)) for g in (small, small2)]
    assert pairs[0] == pairs[1]


# ------------------------------------------------------------------------ gradients, with hubs


@pytest.fixture
def hub(put, monkeypatch):
    """A multigraph with loops and a node without edges, whose hubs are cut into pieces twice."""
    monkeypatch.setattr(_bins, "_EDGES", 4)
    monkeypatch.setattr(_bins, "_PARTS", 2)
    src = np.array([0, 1, 1, 2, 3, 3, 4, 0, 2, 2, 4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    dst = np.array([2, 1, 1, 2, 2, 2, 2, 3, 0, 0, 2, 2, 4, 2, 1, 0, 4, 4, 4, 2, 2, 2])
    graph = geom.Graph.from_edges(put(src), put(dst), n_nodes=6)
    assert _bins.bins(graph)[0].n_pieces
    assert _bins.bins(graph.T)[0].n_pieces
    assert len(_bins.bins(graph)) > 2
    return graph


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weighted", [False, True])
def test_operations_with_hubs_have_right_gradients(put, hub, op, weighted):
    rng = np.random.default_rng(12)
    x, weight = put(rng.uniform(1, 2, (6, 2))), put(rng.uniform(1, 2, 22))
    options = {"q": 0.3} if op == "quantile" else {}
    args = (x, weight) if weighted else (x,)
    gradcheck(lambda x, w=None: geom.aggregate(hub, x, op, weight=w, **options), args, rtol=1e-5)


def test_functions_of_edges_with_hubs_have_right_gradients(put, hub):
    rng = np.random.default_rng(13)
    u, v = (put(rng.uniform(1, 2, (6, 2, 3))) for _ in range(2))
    for op in ("dot", "mul", "div"):
        gradcheck(lambda u, v, op=op: geom.sddmm(hub, u, v, op), (u, v))
    logits = put(rng.standard_normal((22, 2)))
    gradcheck(lambda logits: geom.edge_softmax(hub, logits), (logits,))
    gradcheck(lambda u, logits: geom.attend(hub, u, logits), (u, logits))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_hubs_have_right_gradients(put, hub, name):
    make, kind = LAYERS[name]
    rng = np.random.default_rng(14)
    layer = make("float64")
    given = {
        None: (),
        "weight": (put(rng.uniform(0.5, 1.5, 22)),),
        "attr": (put(rng.standard_normal((22, 2))),),
        "kind": (put(rng.integers(0, 3, 22)),),
    }[kind]
    names = list(layer.state_dict())

    def call(x, *arrays):
        return nn.functional_call(layer, dict(zip(names, arrays, strict=True)), hub, x, *given)

    gradcheck(call, (put(rng.standard_normal((6, 3))), *layer.state_dict().values()))


def of_module(module, x, *args):
    names = list(module.state_dict())

    def call(x, *arrays):
        return nn.functional_call(module, dict(zip(names, arrays, strict=True)), x, *args)

    gradcheck(call, (x, *module.state_dict().values()))


@pytest.mark.parametrize("individually", [False, True])
def test_pair_norm_has_right_gradients(put, individually):
    layer = geom.PairNorm(scale_individually=individually)
    x = put(np.random.default_rng(15).standard_normal((6, 3)))
    gradcheck(lambda x: layer(x, put([0, 2, 2, 6])), (x,))


@pytest.mark.parametrize("mode", ["cat", "max", "lstm"])
def test_jumping_knowledge_has_right_gradients(put, mode):
    options = {"channels": 2, "n_layers": 3} if mode == "lstm" else {}
    layer = geom.JumpingKnowledge(mode, **options, **F64)
    names = list(layer.state_dict())

    def call(a, b, c, *arrays):
        return nn.functional_call(layer, dict(zip(names, arrays, strict=True)), [a, b, c])

    outputs = (put(x) for x in np.random.default_rng(16).standard_normal((3, 4, 2)))
    gradcheck(call, (*outputs, *layer.state_dict().values()))


def test_set2set_has_right_gradients(put):
    x = put(np.random.default_rng(17).standard_normal((6, 3)))
    of_module(geom.Set2Set(3, n_steps=2, **F64), x, put([0, 2, 2, 6]))


@pytest.mark.parametrize("kind", ["topk", "sag"])
def test_pooling_of_nodes_has_right_gradients(put, kind):
    batch = geom.Batch(
        geom.Graph.from_edges(put([0, 1, 1, 2, 3, 3]), put([1, 0, 1, 3, 4, 5]), n_nodes=6),
        put([0, 2, 2, 6]),
    )
    generator = Generator(0)
    conv = geom.GraphConv(3, 1, generator=generator, **F64)
    pool = (
        geom.SAGPooling(conv) if kind == "sag" else geom.TopKPooling(3, generator=generator, **F64)
    )
    x = put(np.random.default_rng(18).standard_normal((6, 3)))
    names = [name for name, _ in pool.named_parameters()]

    def call(x, *arrays):
        return nn.functional_call(pool, dict(zip(names, arrays, strict=True)), batch, x)[1]

    gradcheck(call, (x, *(p.data for p in pool.parameters())))
    assert _device.namespace(x) is _device.namespace(pool(batch, x)[2])
