"""Parameters of other libraries, by their names and in their layouts."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.data import CheckpointError
from rtxarr.testing import assert_close


def network(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, 4, dtype="float64"), rx.tanh, nn.Linear(4, n_out, dtype="float64")
    )


def test_gcn_of_dgl():
    rng = np.random.default_rng(9)
    weight, bias = rng.standard_normal((3, 2)), rng.standard_normal(2)
    layer = geom.GCNConv(3, 2, dtype="float64")
    layer.load_arrays({"weight": weight, "bias": bias}, convention="dgl")
    assert_close(layer.lin.weight.data, weight.T, exact=True)
    assert_close(layer.bias.data, bias, exact=True)


@pytest.mark.parametrize("names", [["bias"], ["fc_self.bias"], ["fc_self.bias", "fc_neigh.bias"]])
def test_sage_of_dgl_has_its_bias_in_different_places(names):
    rng = np.random.default_rng(10)
    arrays = {name: rng.standard_normal((2, 3)) for name in ("fc_self.weight", "fc_neigh.weight")}
    biases = {name: rng.standard_normal(2) for name in names}
    layer = geom.SAGEConv(3, 2, dtype="float64")
    layer.load_arrays({**arrays, **biases}, convention="dgl")
    assert_close(layer.lin_l.weight.data, arrays["fc_neigh.weight"], exact=True)
    assert_close(layer.lin_r.weight.data, arrays["fc_self.weight"], exact=True)
    assert_close(layer.lin_l.bias.data, sum(biases.values()))


def test_lstm_and_pool_of_other_libraries():
    for convention, stem in (("pyg", "aggr_module.lstm"), ("dgl", "lstm")):
        layer = geom.SAGEConv(3, 2, aggr="lstm", dtype="float64")
        lin = ("lin_l", "lin_r") if convention == "pyg" else ("fc_neigh", "fc_self")
        arrays = {
            f"{stem}.weight_ih_l0": np.ones((12, 3)),
            f"{stem}.weight_hh_l0": np.full((12, 3), 2.0),
            f"{stem}.bias_ih_l0": np.full(12, 3.0),
            f"{stem}.bias_hh_l0": np.full(12, 4.0),
            f"{lin[0]}.weight": np.ones((2, 3)),
            f"{lin[0]}.bias": np.ones(2),
            f"{lin[1]}.weight": np.ones((2, 3)),
        }
        layer.load_arrays(arrays, convention=convention)
        assert layer.lstm.layers[0][0].weight_hh.data[0, 0] == 2
    pool = geom.SAGEConv(3, 2, aggr="pool", dtype="float64")
    for convention, names in (
        ("pyg", ("lin", "lin_l", "lin_r")),
        ("dgl", ("fc_pool", "fc_neigh", "fc_self")),
    ):
        arrays = {
            f"{names[0]}.weight": np.full((3, 3), 7.0),
            f"{names[0]}.bias": np.zeros(3),
            f"{names[1]}.weight": np.ones((2, 3)),
            f"{names[1]}.bias": np.ones(2),
            f"{names[2]}.weight": np.ones((2, 3)),
        }
        pool.load_arrays(arrays, convention=convention)
        assert pool.lin_pool.weight.data[0, 0] == 7


def test_attention_of_dgl_and_of_earlier_versions():
    rng = np.random.default_rng(11)
    weight, left, right = (rng.standard_normal(s) for s in ((4, 3), (1, 2, 2), (1, 2, 2)))
    bias = rng.standard_normal(4)
    layer = geom.GATConv(3, 2, heads=2, dtype="float64")
    layer.load_arrays(
        {"fc.weight": weight, "attn_l": left, "attn_r": right, "bias": bias}, convention="dgl"
    )
    assert_close(layer.att_src.data, left, exact=True)
    assert_close(layer.att_dst.data, right, exact=True)
    old = {"lin_src.weight": 2 * weight, "lin_dst.weight": 2 * weight}
    layer.load_arrays({**old, "att_src": left, "att_dst": right, "bias": bias})
    assert_close(layer.lin.weight.data, 2 * weight, exact=True)
    second = geom.GATv2Conv(3, 2, heads=2, share_weights=True, bias=False, dtype="float64")
    second.load_arrays(
        {"fc_src.weight": weight, "fc_dst.weight": weight, "attn": left}, convention="dgl"
    )
    assert_close(second.lin_r.weight.data, weight, exact=True)


def test_whole_models_are_loaded():
    class Model(nn.Module):
        def __init__(self):
            self.convs = [geom.GINConv(network(3, 3), dtype="float64") for _ in range(2)]
            self.out = geom.GCNConv(3, 2, dtype="float64")

    model = Model()
    arrays = {}
    for i in range(2):
        for j, shape in ((0, (4, 3)), (2, (3, 4))):
            arrays[f"convs.{i}.apply_func.{j}.weight"] = np.full(shape, 10.0 * i + j)
            arrays[f"convs.{i}.apply_func.{j}.bias"] = np.zeros(shape[0])
        arrays[f"convs.{i}.eps"] = np.ones(1)
    arrays |= {"out.weight": np.zeros((3, 2)), "out.bias": np.zeros(2)}
    geom.load_arrays(model, arrays, convention="dgl")
    assert model.convs[1].nn[2].weight.data[0, 0] == 12
    with pytest.raises(CheckpointError, match="convs.0.gamma"):
        geom.load_arrays(model, {**arrays, "convs.0.gamma": np.ones(1)}, convention="dgl")
    with pytest.raises(ValueError, match="convention must be 'pyg' or 'dgl', got 'jraph'"):
        geom.load_arrays(model, arrays, convention="jraph")
    with pytest.raises(ValueError, match="EdgeConv has no counterpart in DGL"):
        geom.EdgeConv(rx.tanh).load_arrays({}, convention="dgl")
