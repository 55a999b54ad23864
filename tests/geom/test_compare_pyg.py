"""The layers against PyTorch Geometric itself, with its parameters loaded by name."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.testing import assert_close

pytestmark = pytest.mark.compare
torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch_geometric").nn

F64 = {"dtype": "float64"}
HISTOGRAM = [1, 2, 3, 2, 1]
MEANS = {
    "mean_degree": float(np.dot(HISTOGRAM, range(5)) / 9),
    "mean_log_degree": float(np.dot(HISTOGRAM, np.log(np.arange(5) + 1)) / 9),
}
PNA = (["mean", "max", "min", "var", "sum"], ["identity", "amplification", "attenuation", "linear"])


def network(n_in, n_out, library):
    if library is nn:
        return nn.Sequential(nn.Linear(n_in, 4, **F64), rx.relu, nn.Linear(4, n_out, **F64))
    modules = torch.nn
    return modules.Sequential(modules.Linear(n_in, 4), modules.ReLU(), modules.Linear(4, n_out))


def mlp(*sizes):
    """Give the network of theirs, with norms."""
    layers = []
    for n_in, n_out in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(n_in, n_out, **F64), nn.BatchNorm(n_out, **F64), rx.relu]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:], **F64))


# For each layer theirs, ours, and what it needs of edges. Not SAGE with an LSTM, which there runs
# on over what pads shorter neighbourhoods.
LAYERS = {
    "sgc": (lambda: theirs.SGConv(3, 2, K=2), lambda: geom.SGConv(3, 2, k=2, **F64), "weight"),
    "appnp": (lambda: theirs.APPNP(3, 0.1), lambda: geom.APPNP(k=3), "weight"),
    "cheb": (lambda: theirs.ChebConv(3, 2, 3), lambda: geom.ChebConv(3, 2, k=3, **F64), "weight"),
    "gatv2": (
        lambda: theirs.GATv2Conv(3, 2, heads=2, edge_dim=2, concat=False),
        lambda: geom.GATv2Conv(3, 2, heads=2, edge_channels=2, concat=False, **F64),
        "attr",
    ),
    "gat-residual": (
        lambda: theirs.GATConv(3, 2, heads=2, residual=True),
        lambda: geom.GATConv(3, 2, heads=2, residual=True, **F64),
        None,
    ),
    "gat-residual-mean": (
        lambda: theirs.GATConv(3, 2, heads=2, residual=True, concat=False, edge_dim=2),
        lambda: geom.GATConv(3, 2, heads=2, residual=True, concat=False, edge_channels=2, **F64),
        "attr",
    ),
    "gatv2-residual": (
        lambda: theirs.GATv2Conv(3, 2, heads=2, residual=True),
        lambda: geom.GATv2Conv(3, 2, heads=2, residual=True, **F64),
        None,
    ),
    "gatv2-shared": (
        lambda: theirs.GATv2Conv(3, 2, share_weights=True),
        lambda: geom.GATv2Conv(3, 2, share_weights=True, **F64),
        None,
    ),
    "transformer": (
        lambda: theirs.TransformerConv(3, 2, heads=2, edge_dim=2, beta=True),
        lambda: geom.TransformerConv(3, 2, heads=2, edge_channels=2, beta=True, **F64),
        "attr",
    ),
    "sage-pool": (
        lambda: theirs.SAGEConv(3, 2, aggr="max", project=True),
        lambda: geom.SAGEConv(3, 2, aggr="pool", **F64),
        None,
    ),
    "edge-conv": (
        lambda: theirs.EdgeConv(network(6, 2, torch)),
        lambda: geom.EdgeConv(network(6, 2, nn)),
        None,
    ),
    "rgcn": (
        lambda: theirs.RGCNConv(3, 2, 3, num_bases=2),
        lambda: geom.RGCNConv(3, 2, 3, n_bases=2, **F64),
        "kind",
    ),
    "rgcn-blocks": (
        lambda: theirs.RGCNConv(3, 6, 3, num_blocks=3),
        lambda: geom.RGCNConv(3, 6, 3, n_blocks=3, **F64),
        "kind",
    ),
    "gin-norm": (
        lambda: theirs.GINConv(
            torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(),
                torch.nn.Linear(4, 2),
            )
        ),
        lambda: geom.GINConv(
            nn.Sequential(
                nn.Linear(3, 4, **F64), nn.BatchNorm(4, **F64), rx.relu, nn.Linear(4, 2, **F64)
            ),
            **F64,
        ),
        None,
    ),
    "gin-mlp": (
        lambda: theirs.GINConv(theirs.MLP([3, 4, 5, 2]), train_eps=True),
        lambda: geom.GINConv(mlp(3, 4, 5, 2), train_eps=True, **F64),
        None,
    ),
    "edge-conv-mlp": (
        lambda: theirs.EdgeConv(theirs.MLP([6, 4, 2], norm=None)),
        lambda: geom.EdgeConv(network(6, 2, nn)),
        None,
    ),
    "pna": (
        lambda: theirs.PNAConv(3, 4, *PNA, torch.tensor(HISTOGRAM), towers=2),
        lambda: geom.PNAConv(3, 4, *PNA, towers=2, **MEANS, **F64),
        None,
    ),
    "pna-edges": (
        lambda: theirs.PNAConv(
            4, 4, *PNA, torch.tensor(HISTOGRAM), towers=2, edge_dim=2, pre_layers=2, post_layers=2,
            divide_input=True,
        ),
        lambda: geom.PNAConv(
            4, 4, *PNA, towers=2, edge_channels=2, pre_layers=2, post_layers=2, divide_input=True,
            **MEANS, **F64,
        ),
        "attr",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name):
    torch.manual_seed(0)
    make, own, kind = LAYERS[name]
    rng = np.random.default_rng(1)
    dst = np.concatenate([np.full(6, 2), rng.integers(0, 6, 12)])
    src = rng.integers(0, 6, 18)
    src = np.where(src == dst, (dst + 1) % 6, src)
    n_features = 4 if name == "pna-edges" else 3
    x = rng.standard_normal((7, n_features))
    edge = {
        None: None,
        "weight": rng.uniform(0.5, 1.5, 18),
        "attr": rng.standard_normal((18, 2)),
        "kind": rng.integers(0, 3, 18),
    }[kind]
    layer, other = own(), make().double()
    state = {key: value.numpy() for key, value in other.state_dict().items()}
    layer.load_arrays({k: a.astype("float64") for k, a in state.items()})
    values = [] if edge is None else [edge]
    ours = rx.Tensor(x, requires_grad=True)
    y = layer(geom.Graph.from_edges(src, dst, n_nodes=7), ours, *values)
    g = rng.standard_normal(y.shape)
    y.backward(g)
    t = torch.tensor(x, requires_grad=True)
    want = other(t, torch.tensor(np.stack([src, dst])), *map(torch.tensor, values))
    want.backward(torch.tensor(g))
    # Mean degrees are float32 there.
    close = {"rtol": 1e-6, "atol": 1e-7} if "pna" in name else {"rtol": 1e-10, "atol": 1e-12}
    assert_close(y.data, want.detach().numpy(), **close)
    assert_close(ours.grad, t.grad.numpy(), **close)
    for parameter in other.parameters():
        parameter.data = parameter.grad
    grads = {key: p.grad for key, p in layer.named_parameters()}
    twin = own()
    state = {key: value.numpy() for key, value in other.state_dict().items()}
    twin.load_arrays({k: a.astype("float64") for k, a in state.items()})
    for key, parameter in twin.named_parameters():
        assert_close(grads[key], parameter.data, **close)


NORMS = {
    "graph": (lambda: theirs.GraphNorm(3), lambda: geom.GraphNorm(3, **F64)),
    "instance": (lambda: theirs.InstanceNorm(3), lambda: geom.InstanceNorm(3, **F64)),
    "layer": (lambda: theirs.LayerNorm(3), lambda: geom.GraphLayerNorm(3, **F64)),
    "pair": (lambda: theirs.PairNorm(), geom.PairNorm),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    make, own = NORMS[name]
    x = np.random.default_rng(2).standard_normal((6, 3))
    got = own()(x, np.array([0, 2, 6]))
    want = make().double()(torch.tensor(x), torch.tensor([0, 0, 1, 1, 1, 1]))
    assert_close(rx.Tensor(got).numpy(), want.detach().numpy(), rtol=1e-9, atol=1e-10)


def test_jumping_knowledge():
    a, b = np.random.default_rng(3).standard_normal((2, 5, 4))
    other = theirs.JumpingKnowledge("lstm", 4, 2).double()
    layer = geom.JumpingKnowledge("lstm", channels=4, n_layers=2, **F64)
    layer.load_arrays({key: value.numpy() for key, value in other.state_dict().items()})
    want = other([torch.tensor(a), torch.tensor(b)])
    assert_close(layer([a, b]).data, want.detach().numpy(), rtol=1e-10)


MASKED = {
    **LAYERS,
    "gcn": (lambda: theirs.GCNConv(3, 2), lambda: geom.GCNConv(3, 2, **F64), "weight"),
    "sage": (lambda: theirs.SAGEConv(3, 2), lambda: geom.SAGEConv(3, 2, **F64), None),
    "graph": (lambda: theirs.GraphConv(3, 2), lambda: geom.GraphConv(3, 2, **F64), "weight"),
    "gat": (
        lambda: theirs.GATConv(3, 2, heads=2, edge_dim=2),
        lambda: geom.GATConv(3, 2, heads=2, edge_channels=2, **F64),
        "attr",
    ),
    "transformer-plain": (
        lambda: theirs.TransformerConv(3, 2, heads=2),
        lambda: geom.TransformerConv(3, 2, heads=2, **F64),
        None,
    ),
}
for name in ("rgcn", "rgcn-blocks"):
    del MASKED[name]  # theirs gives each relation the first factors of all


@pytest.mark.parametrize("name", MASKED)
def test_messages_with_factors(name):
    """What explanations are made of: theirs have factors for the messages too."""
    from torch_geometric.explain.algorithm.utils import set_masks

    from rtxarr.geom._masks import MaskedGraph

    make, own, kind = MASKED[name]
    rng = np.random.default_rng(2)
    src, dst = rng.integers(0, 6, 18), rng.integers(0, 6, 18)
    src = np.where(src == dst, (dst + 1) % 6, src)
    x, mask = rng.standard_normal((7, 4 if name == "pna-edges" else 3)), rng.random(18)
    edge = {
        None: (),
        "weight": (rng.uniform(0.5, 1.5, 18),),
        "attr": (rng.standard_normal((18, 2)),),
    }[kind]
    layer, other = own(), make().double()
    state = {key: value.numpy().astype("float64") for key, value in other.state_dict().items()}
    layer.load_arrays(state)
    edge_index = torch.tensor(np.stack([src, dst]))
    set_masks(other, torch.tensor(mask), edge_index, apply_sigmoid=False)
    want = other(torch.tensor(x), edge_index, *map(torch.tensor, edge)).detach().numpy()
    got = layer(MaskedGraph.of(geom.Graph.from_edges(src, dst, n_nodes=7), mask), x, *edge)
    close = {"rtol": 1e-6, "atol": 1e-7} if "pna" in name else {"rtol": 1e-10, "atol": 1e-12}
    assert_close(rx.Tensor(got).numpy(), want, **close)


@pytest.mark.parametrize("make", [torch.nn.BatchNorm1d, theirs.BatchNorm])
def test_batch_norms_with_their_statistics(make):
    rng = np.random.default_rng(4)
    other = make(3).double()
    for _ in range(3):
        other(torch.tensor(rng.standard_normal((20, 3)) * 3 + 1))
    layer = nn.BatchNorm(3, **F64)
    geom.load_arrays(layer, {key: value.numpy() for key, value in other.state_dict().items()})
    x = rng.standard_normal((5, 3))
    want = other.eval()(torch.tensor(x)).detach().numpy()
    assert_close(layer.eval()(x).data, want, rtol=1e-10)


@pytest.mark.parametrize("with_features", [False, True])
def test_point_convolutions(with_features):
    rng = np.random.default_rng(5)
    pos, x = rng.random((12, 3)), rng.standard_normal((12, 2))
    n_in = 5 if with_features else 3
    other = theirs.PointNetConv(theirs.MLP([n_in, 4, 2], norm=None), add_self_loops=False).double()
    layer = geom.PointNetSetAbstraction(network(n_in, 2, nn), n_points=4, r=0.6)
    layer.load_arrays({key: value.numpy() for key, value in other.state_dict().items()})
    given = x if with_features else None
    got, centres, _ = layer(given, pos)
    graph = geom.radius_graph(pos, 0.6, y=rx.Tensor(centres).numpy())
    edges = torch.tensor(np.stack([graph.src, graph.dst]))
    torches = None if given is None else (torch.tensor(x), None)
    places = torch.tensor(pos), torch.tensor(rx.Tensor(centres).numpy())
    want = other(torches, places, edges).detach().numpy()
    assert_close(rx.Tensor(got).numpy(), want, rtol=1e-10)


KGE = {
    "DistMult": (theirs.DistMult, lambda: geom.DistMult(4, 3, **F64)),
    "ComplEx": (theirs.ComplEx, lambda: geom.ComplEx(8, 3, **F64)),
    "TransE": (theirs.TransE, lambda: geom.TransE(4, 3, **F64)),
    "RotatE": (theirs.RotatE, lambda: geom.RotatE(8, 3, **F64)),
}


@pytest.mark.parametrize("name", KGE)
def test_scores_of_relations(name):
    make, own = KGE[name]
    other = make(6, 3, hidden_channels=4).double()
    arrays = {key: value.numpy() for key, value in other.state_dict().items()}
    decoder = own()
    decoder.load_arrays(arrays)
    x = np.concatenate([arrays[k] for k in arrays if k.startswith("node_emb")], axis=1)
    if name == "TransE":
        x = x / np.abs(x).sum(axis=1, keepdims=True)
    pairs, kinds = np.array([[0, 5, 2], [1, 1, 4]]), np.array([2, 0, 1])
    got = rx.Tensor(decoder(x, pairs, kinds)).numpy()
    if name == "RotatE":  # theirs is one root over all features
        src, dst = (x[i, :4] + 1j * x[i, 4:] for i in pairs)
        want = -np.abs(src * np.exp(1j * arrays["rel_emb.weight"][kinds]) - dst).sum(axis=1)
    else:
        want = other(*map(torch.tensor, (pairs[0], kinds, pairs[1]))).detach().numpy()
    assert_close(got, want, rtol=1e-10)
