"""Layers give what PyTorch Geometric 2.8.1 gives: outputs and gradients, in float64."""

from pathlib import Path

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.geom import _edges
from rtxarr.testing import assert_close

REFERENCE = np.load(Path(__file__).parent / "data" / "pyg_reference.npz")
F64 = {"dtype": "float64"}


def network():
    return nn.Sequential(nn.Linear(5, 8, **F64), rx.relu, nn.Linear(8, 6, **F64))


LAYERS = {
    "gcn": lambda: geom.GCNConv(5, 6, **F64),
    "gcn_w": lambda: geom.GCNConv(5, 6, **F64),
    # PyTorch Geometric ignores `improved` where there are no weights.
    "gcn_improved": lambda: geom.GCNConv(5, 6, **F64),
    "gcn_improved_w": lambda: geom.GCNConv(5, 6, improved=True, **F64),
    "gcn_noloop": lambda: geom.GCNConv(5, 6, add_self_loops=False, **F64),
    "sage_mean": lambda: geom.SAGEConv(5, 6, **F64),
    "sage_max": lambda: geom.SAGEConv(5, 6, aggr="max", **F64),
    "sage_norm": lambda: geom.SAGEConv(5, 6, normalize=True, **F64),
    "gin": lambda: geom.GINConv(network(), train_eps=True, **F64),
    "gat": lambda: geom.GATConv(5, 6, heads=3, **F64),
    "gat_mean": lambda: geom.GATConv(5, 6, heads=3, concat=False, **F64),
    "gat_edge": lambda: geom.GATConv(5, 6, heads=3, edge_channels=4, **F64),
    "gatv2": lambda: geom.GATv2Conv(5, 6, heads=3, **F64),
    "graphconv": lambda: geom.GraphConv(5, 6, **F64),
    "transformer": lambda: geom.TransformerConv(5, 6, heads=3, **F64),
    "gine": lambda: geom.GINEConv(network(), in_channels=5, edge_channels=4, **F64),
}


def test_all_configurations_are_compared():
    names = {key.split("/")[0] for key in REFERENCE if "/" in key}
    assert names == set(LAYERS)


def parts(name, kind):
    start = f"{name}/{kind}/"
    return {key.removeprefix(start): REFERENCE[key] for key in REFERENCE if key.startswith(start)}


def edge_values(name):
    if name.endswith("_w") or name == "graphconv":
        return REFERENCE["edge_weight"]
    return REFERENCE["edge_attr"] if name in ("gat_edge", "gine") else None


def graphs():
    src, dst = REFERENCE["edge_index"]
    n = REFERENCE["x"].shape[0]
    order = np.argsort(dst, kind="stable")
    counts = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))])
    yield geom.Graph.from_edges(src, dst, n_nodes=n)
    # The same from compressed rows: one rule for loops, whatever the graph is made from.
    yield geom.Graph(counts, src[order], edge_ids=order)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk", [2**20, 8], ids=["whole", "in runs"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name, chunk, device, monkeypatch):
    monkeypatch.setattr(_edges, "CHUNK", {"cpu": chunk, "cuda": chunk})
    for graph in graphs():
        layer = LAYERS[name]()
        arrays = parts(name, "p")
        if name == "gine":  # not trained there
            arrays["eps"] = np.zeros(1)
        layer.load_arrays(arrays)
        layer.to_device(device)
        x = rx.Tensor(rx.asarray(REFERENCE["x"], device=device), requires_grad=True)
        values = edge_values(name)
        values = [] if values is None else [rx.asarray(values, device=device)]
        out = layer(graph.to_device(device), x, *values)
        out.backward(rx.asarray(REFERENCE[f"{name}/gy"], device=device))
        close = {"rtol": 1e-12, "atol": 1e-12}
        assert_close(out.numpy(), REFERENCE[f"{name}/y"], **close)
        assert_close(rx.Tensor(x.grad).numpy(), REFERENCE[f"{name}/gx"], **close)
        want = parts(name, "g")
        for key, parameter in layer.named_parameters():
            theirs = key.replace("nn.layers.", "nn.")
            assert_close(rx.Tensor(parameter.grad).numpy(), want.pop(theirs), **close)
        assert not want
