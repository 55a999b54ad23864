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
del MASKED["rgcn"]  # theirs gives each relation the first factors of all


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
