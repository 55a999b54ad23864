"""Explanations: messages with factors in each layer, and what is found where it is known."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn, optim
from rtxarr.autograd._tape import raw
from rtxarr.geom._masks import MaskedGraph
from rtxarr.random import Generator
from rtxarr.testing import assert_close, gradcheck

N, E, F = 9, 40, 4
F64 = {"dtype": "float64"}
rng = np.random.default_rng(0)
SRC, DST = rng.integers(0, N - 1, E), rng.integers(0, N - 1, E)
X, KINDS = rng.standard_normal((N, F)), rng.integers(0, 3, E)
ATTR, WEIGHT = rng.standard_normal((E, 2)), rng.random(E)


class Custom(geom.MessagePassing):
    def message(self, src, dst, edge):
        return rx.tanh(src - dst) * edge[:, :1]


TWO = {"edge_channels": 2, **F64}
# For each layer how it is made, and what it takes of the edges.
LAYERS = {
    "gcn": (lambda: geom.GCNConv(F, 3, **F64), None),
    "gcn-weights": (lambda: geom.GCNConv(F, 3, **F64), "w"),
    "gcn-plain": (lambda: geom.GCNConv(F, 3, add_self_loops=False, **F64), None),
    "sage": (lambda: geom.SAGEConv(F, 3, **F64), None),
    "sage-max": (lambda: geom.SAGEConv(F, 3, aggr="max", **F64), None),
    "sage-lstm": (lambda: geom.SAGEConv(F, 3, aggr="lstm", **F64), None),
    "graph": (lambda: geom.GraphConv(F, 3, **F64), "w"),
    "gin": (lambda: geom.GINConv(nn.Linear(F, 3, **F64)), None),
    "gine": (lambda: geom.GINEConv(nn.Linear(F, 3, **F64), in_channels=F, **TWO), "a"),
    "gat": (lambda: geom.GATConv(F, 3, heads=2, **F64), None),
    "gat-edges": (lambda: geom.GATConv(F, 3, **TWO), "a"),
    "gatv2": (lambda: geom.GATv2Conv(F, 3, heads=2, **F64), None),
    "gatv2-edges": (lambda: geom.GATv2Conv(F, 3, **TWO), "a"),
    "transformer": (lambda: geom.TransformerConv(F, 3, heads=2, **F64), None),
    "transformer-edges": (lambda: geom.TransformerConv(F, 3, heads=2, **TWO), "a"),
    "edge": (lambda: geom.EdgeConv(nn.Linear(2 * F, 3, **F64), aggr="sum"), None),
    "rgcn": (lambda: geom.RGCNConv(F, 3, 3, **F64), "k"),
    "pna": (
        lambda: geom.PNAConv(
            F, 3, ["mean", "max", "std"], ["identity"], mean_degree=4, mean_log_degree=1, **F64
        ),
        None,
    ),
    "sgc": (lambda: geom.SGConv(F, 3, k=2, **F64), None),
    "appnp": (lambda: geom.APPNP(k=2), None),
    "cheb": (lambda: geom.ChebConv(F, 3, k=3, **F64), None),
    "custom": (lambda: Custom(aggr="mean"), "a"),
    "matmul": (lambda: lambda g, x: g @ x, None),
}


def layer_of(name):
    """Make a layer, as a function of a graph, the features and what edges have."""
    make, key = LAYERS[name]
    conv = make()
    return lambda g, x, e: conv(g, x) if key is None else conv(g, x, e[key])


def edges(keep=slice(None)):
    return {"w": WEIGHT[keep], "a": ATTR[keep], "k": KINDS[keep]}


def graph(keep=slice(None)):
    return geom.Graph.from_edges(SRC[keep], DST[keep], n_nodes=N)


# Without an edge these give what they give with a factor of 0 for it; others normalise by it.
WITHOUT = ("graph", "gin", "gine", "edge", "matmul")


@pytest.mark.parametrize("name", LAYERS)
def test_factors_of_one_change_nothing_and_each_edge_matters(name):
    layer, plain = layer_of(name), graph()
    want = layer(plain, X, edges())
    got = layer(MaskedGraph.of(plain, np.ones(E)), X, edges())
    assert_close(raw(got), raw(want), rtol=1e-10, atol=1e-10)
    again = layer(plain, X, edges())  # nothing masked was kept with the graph
    assert_close(raw(again), raw(want), exact=True)

    def total(mask):
        return rx.sum(layer(MaskedGraph.of(plain, mask), X, edges()) ** 2)

    g = raw(rx.value_and_grad(total)(0.5 + WEIGHT)[1])
    is_loop = SRC == DST
    if name in ("gat", "gatv2", "gcn", "gcn-weights", "gat-edges", "gatv2-edges", "sgc", "appnp"):
        assert np.count_nonzero(g[~is_loop]) == np.count_nonzero(~is_loop)
    elif name == "cheb":
        assert np.count_nonzero(g[~is_loop]) == np.count_nonzero(~is_loop)
        assert not g[is_loop].any()
    elif name not in ("sage-max", "pna", "gine", "custom"):  # where a message may be zero
        assert np.count_nonzero(g) == E
    assert np.count_nonzero(g) > E // 2 or name == "sage-max"


@pytest.mark.parametrize("name", WITHOUT)
def test_a_factor_of_zero_is_no_edge(name):
    layer, keep = layer_of(name), rng.random(E) < 0.6
    got = layer(MaskedGraph.of(graph(), keep.astype(float)), X, edges())
    want = layer(graph(keep), X, edges(keep))
    assert_close(raw(got), raw(want), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_factors(name):
    layer, plain = layer_of(name), graph()
    mask = 0.5 + rng.random(E)
    gradcheck(lambda mask: layer(MaskedGraph.of(plain, mask), X, edges()), (mask,))


def test_loops_that_a_layer_adds_have_the_factor_one():
    plain = graph()
    for conv in (geom.GCNConv(F, 3, **F64), geom.GATConv(F, 3, **F64)):
        out = conv(MaskedGraph.of(plain, np.zeros(E)), X)
        rest = out.data - conv.bias.data
        alone = ~np.isin(np.arange(N), SRC[SRC == DST])
        assert (np.abs(rest[alone]).sum(axis=1) > 0).all()  # its own row is left
        assert_close(rest[~alone], 0 * rest[~alone])  # a loop of the graph has its factor


def planted(n=30, seed=0):
    """Give a random graph and a model that looks at one feature of all neighbours but those."""
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, n, 6 * n), rng.integers(0, n, 6 * n)
    src, dst = src[src != dst], dst[src != dst]
    x = rng.random((n, 5)) * 0.1
    return geom.Graph.from_edges(src, dst, n_nodes=n), x


@pytest.mark.parametrize("n_hops", [None, 1, 2])
@pytest.mark.parametrize("features", ["common", "each", "nodes", None])
def test_the_edge_and_the_feature_that_decide_are_found(features, n_hops):
    graph, x = planted()
    row = int(np.argmax(graph.in_degrees))
    (mine,) = np.nonzero(graph.dst == row)
    x[graph.src[mine[2]], 3] = 8.0  # this alone makes it class 1

    def model(graph, x):
        return (graph @ x)[:, 3:4] * np.array([-1.0, 1.0]) - np.array([-3.0, 3.0])

    weights = {"edge_size": 0.1, "edge_entropy": 0.1}
    found = geom.explain(model, graph, x, row, features=features, n_hops=n_hops, **weights)
    assert found.target == 1
    assert graph.src[found.top_edges(1)[0]] == graph.src[mine[2]]
    ours = graph.src == graph.src[mine[2]]
    assert found.edges[mine[2]] > max(0.5, 1.3 * found.edges[mine[~ours[mine]]].max())
    assert not found.edges[graph.dst != row].any()  # have no part in it
    assert found.losses[-1] < found.losses[0]
    if features in ("common", "each"):
        assert found.top_features(5)[0] == 3
    shapes = {"common": (5,), "each": x.shape, "nodes": (30,), None: None}
    assert getattr(found.features, "shape", None) == shapes[features]
    if features == "nodes":
        assert np.argmax(found.features) == graph.src[mine[2]]


def test_within_the_hops_the_answer_is_the_same():
    graph, x = planted(60, 1)
    first, second = geom.GCNConv(5, 8, **F64), geom.GCNConv(8, 3, **F64)
    seen = []

    def model(graph, x):
        out = second(graph, rx.relu(first(graph, x)))
        seen.append((graph.n_nodes, rx.Tensor(out).data))
        return out

    row = 7
    near, _ = geom.k_hop(graph, np.array([row]), 3)
    geom.explain(model, graph, x, row, n_hops=3, n_steps=1)
    n, out = seen[0]
    assert n == len(near)
    want = model(graph, x).data[row]
    assert_close(out[np.searchsorted(np.sort(near), row)], want)


class Dropping(nn.Module):
    def __init__(self):
        self.conv, self.drop = geom.GATConv(5, 3, dropout=0.5, **F64), nn.Dropout(0.5)

    def forward(self, graph, x):
        return self.drop(self.conv(graph, x))


def test_equal_seeds_give_equal_bits_and_the_model_stays_as_it_is():
    graph, x = planted()
    model = Dropping()
    before = {name: value.copy() for name, value in model.state_dict().items()}
    found = [geom.explain(model, graph, x, 3, n_steps=5, generator=Generator(4)) for _ in range(2)]
    assert_close(found[0].edges, found[1].edges, exact=True)
    assert_close(found[0].features, found[1].features, exact=True)
    assert model.training
    assert model.drop.training
    for name, value in model.state_dict().items():
        assert_close(value, before[name], exact=True)
    assert all(p.grad is None for p in model.parameters())


def test_whole_graphs_are_explained():
    """The class of a graph is whether its one heavy edge is there."""
    src, dst = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0])
    graph = geom.Graph.from_edges(src, dst, n_nodes=4)
    x = np.array([[0.1], [0.1], [7.0], [0.1]])

    def model(graph, x):
        pooled = geom.global_max(graph @ x, np.array([0, 4]))
        return (pooled - 2) * np.array([-1.0, 1.0])

    found = geom.explain(model, graph, x, 0)
    assert found.target == 1
    assert found.top_edges(1) == [2]


def houses(n_base=300, n_houses=80, n_each=5, seed=0):
    """Give a scale-free graph with houses of five nodes tied to it, and which edges are theirs."""
    rng = np.random.default_rng(seed)
    pairs, ends = [], list(range(n_each))
    for node in range(n_each, n_base):  # edges to nodes as these have edges
        others = list(dict.fromkeys(rng.choice(ends, 3 * n_each).tolist()))[:n_each]
        pairs += [(node, other) for other in others]
        ends += [node] * n_each + others
    labels, house = [0] * n_base, []
    for first in range(n_base, n_base + 5 * n_houses, 5):
        sides = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 0), (4, 1)]
        house += [(first + a, first + b) for a, b in sides]
        labels += [1, 1, 2, 2, 3]  # in the middle, on the ground, and the top
        pairs.append((int(rng.integers(n_base)), first))
    more = rng.integers(0, len(labels), (len(pairs + house) // 10, 2))
    pairs += more[more[:, 0] != more[:, 1]].tolist()
    src, dst = np.array(pairs + house).T
    graph = geom.Graph.from_edges(np.append(src, dst), np.append(dst, src), n_nodes=len(labels))
    return graph, np.array(labels), np.tile(np.arange(len(src)) >= len(pairs), 2)


def trained_on(graph, labels, x, n_steps=1000):
    """Give three graph convolutions, trained, and their answers."""
    sizes = [(x.shape[1], 20), (20, 20), (20, 4)]
    model = nn.Sequential(
        *(geom.GCNConv(*s, generator=Generator(i), **F64) for i, s in enumerate(sizes))
    )

    def run(graph, x):
        for layer in model[:-1]:
            x = rx.relu(layer(graph, x))
        return model[-1](graph, x)

    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for _ in range(n_steps):
        optimizer.zero_grad()
        rx.cross_entropy(run(graph, x), labels).backward()
        optimizer.step()
    return model, run, np.argmax(run(graph, x).data, axis=1)


def test_the_houses_are_found_that_nodes_are_a_part_of():
    """BA-Shapes of the paper, section 5, where the area under the curve is 0.925."""
    graph, labels, is_house = houses()
    x = np.ones((graph.n_nodes, 10))
    _, model, guesses = trained_on(graph, labels, x)
    assert np.mean(guesses == labels) > 0.85
    rows = np.arange(300, 700, 50)
    scores, truth = [], []
    for row in rows[guesses[rows] == labels[rows]]:
        found = geom.explain(model, graph, x, int(row), features=None, n_hops=4)
        scores.append(found.edges[found.edges > 0])
        truth.append(is_house[found.edges > 0])
    assert len(scores) > 5
    scores, truth = np.concatenate(scores), np.concatenate(truth)
    assert np.mean(truth) < 0.2  # there are far more edges without a part in a house
    assert geom.auc(scores[truth], scores[~truth]) > 0.88


@pytest.mark.compare
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_pytorch_geometric_finds_the_same():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("torch_geometric")
    graph, labels, _ = houses()
    x = np.ones((graph.n_nodes, 10))
    ours, model, _ = trained_on(graph, labels, x)
    other = theirs.nn.GCN(10, 20, 3, 4).double()
    state = {f"convs.{name}": torch.tensor(a) for name, a in ours.state_dict().items()}
    other.load_state_dict({name.replace("layers.", ""): a for name, a in state.items()})
    explainer = theirs.explain.Explainer(
        other,
        theirs.explain.GNNExplainer(epochs=200, lr=0.01),
        explanation_type="model",
        node_mask_type="common_attributes",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification", "task_level": "node", "return_type": "raw",
        },
    )  # fmt: skip
    torch.manual_seed(0)
    edge_index = torch.tensor(np.stack([graph.src, graph.dst]), dtype=torch.int64)
    for row in (300, 340):
        want = explainer(torch.tensor(x), edge_index, index=row)
        got = geom.explain(model, graph, x, row)
        np.testing.assert_array_equal(got.edges > 0, want.edge_mask.numpy() > 0)
        assert np.corrcoef(got.edges, want.edge_mask.numpy())[0, 1] > 0.9  # from other beginnings
        # Equal features differ by where they begin.
        assert_close(np.mean(got.features), float(want.node_mask.mean()), rtol=0.02)


def test_another_class_is_asked_for():
    graph, x = planted()
    model = geom.SAGEConv(5, 3, **F64)
    row = int(np.argmax(graph.in_degrees))
    assert geom.explain(model, graph, x, row, target=2, n_steps=3).target == 2


def test_a_node_without_edges_rests_on_none():
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 0]), n_nodes=3)
    found = geom.explain(geom.SAGEConv(2, 2, **F64), graph, np.ones((3, 2)), 2, n_steps=2)
    assert not found.edges.any()
    assert len(found.top_edges(5)) == 0
    assert repr(found) == f"Explanation(class {found.target} of row 2 by 0 edges)"


def test_what_does_not_fit_is_refused():
    graph, x = planted()
    model = geom.SAGEConv(5, 3, **F64)
    with pytest.raises(ValueError, match="features must be 'common', 'each', 'nodes' or None"):
        geom.explain(model, graph, x, 0, features="all")
    with pytest.raises(TypeError, match="x must be a floating-point array"):
        geom.explain(model, graph, x.astype(int), 0)
    with pytest.raises(ValueError, match="x must have a row for each of 30 nodes"):
        geom.explain(model, graph, x[:4], 0)
    with pytest.raises(ValueError, match=r"row must be one of the model's output.*got 30"):
        geom.explain(model, graph, x, 30)
    with pytest.raises(ValueError, match=r"target must lie in \[0, 3\), got 3"):
        geom.explain(model, graph, x, 0, target=3)
    row = int(np.argmax(graph.in_degrees))
    with pytest.raises(ValueError, match="must send messages along the graph"):
        geom.explain(lambda g, x: model(graph, x), graph, x, row)
    found = geom.explain(model, graph, x, row, features="nodes", n_steps=1)
    with pytest.raises(ValueError, match="features must have been explained one by one"):
        found.top_features(2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2", "transformer", "edge", "rgcn"])
def test_factors_on_a_gpu(name):
    """Also for layers that a GPU does in one kernel."""
    make, key = LAYERS[name]
    with rx.device("cpu"):
        conv = make()
    mask = 0.5 + rng.random(E)
    given = () if key is None else (edges()[key],)
    want = conv(MaskedGraph.of(graph(), mask), X, *given)
    x, mask, *given = (rx.asarray(a, device="cuda:0") for a in (X, mask, *given))
    conv.to_device("cuda:0")
    got = conv(MaskedGraph.of(graph().to_device("cuda:0"), mask), x, *given)
    assert_close(rx.Tensor(got).numpy(), rx.Tensor(want).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("n_hops", [None, 2])
@pytest.mark.parametrize("features", ["common", "each", "nodes", None])
def test_explanations_on_a_gpu(features, n_hops):
    graph, x = planted()
    row, found = int(np.argmax(graph.in_degrees)), []
    for device in ("cpu", "cuda:0"):
        model = geom.GCNConv(5, 3, generator=Generator(0), device=device, **F64)
        got = geom.explain(
            model, graph.to_device(device), rx.asarray(x, device=device), row,
            features=features, n_hops=n_hops, n_steps=20,
        )  # fmt: skip
        arrays = [got.edges] if features is None else [got.edges, got.features]
        found.append([*(rx.Tensor(a).numpy() for a in arrays), np.array(got.losses)])
        assert len(got.top_edges(3)) == 3
    for got, want in zip(*found[::-1], strict=True):
        assert_close(got, want, rtol=1e-8, atol=1e-8)
