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
    with pytest.raises(ValueError, match="DGL has no layer that gives what TransformerConv does"):
        geom.TransformerConv(3, 2).load_arrays({}, convention="dgl")
    geom.APPNP().load_arrays({}, convention="dgl")  # without parameters in both


# ----------------------------------------------------------- what DGL's layers give, edge by edge


F64 = {"dtype": "float64"}
SRC, DST = (
    np.array([0, 1, 1, 2, 3, 4, 4, 0, 2, 2, 3]),
    np.array([1, 0, 2, 1, 4, 3, 4, 4, 0, 2, 2]),
)
KINDS = np.array([0, 1, 2, 0, 1, 2, 0, 0, 2, 1, 1])
GRAPH = geom.Graph.from_edges(SRC, DST, n_nodes=6)
RNG = np.random.default_rng(12)
X = RNG.standard_normal((6, 3))


def drawn(**shapes):
    """Give arrays by name, with dots for two underscores."""
    return {k.replace("__", "."): RNG.standard_normal(shape) for k, shape in shapes.items()}


def outputs(layer, arrays, *args, graph=GRAPH):
    layer.load_arrays(arrays, convention="dgl")
    return rx.Tensor(layer(graph, X, *args)).numpy()


def summed(rows):
    out = np.zeros((6, rows.shape[1]))
    np.add.at(out, DST, rows)
    return out


@pytest.mark.parametrize("norm", [False, True])
def test_edge_convolution_of_dgl(norm):
    arrays = drawn(theta__weight=(2, 3), theta__bias=2, phi__weight=(2, 3), phi__bias=2)
    theta, phi = arrays["theta.weight"], arrays["phi.weight"]
    rows = (X[DST] - X[SRC]) @ theta.T + X[DST] @ phi.T + arrays["theta.bias"] + arrays["phi.bias"]
    net = nn.Linear(6, 2, **F64)
    if norm:
        net = nn.Sequential(net, nn.BatchNorm(2, **F64))
        arrays |= drawn(bn__weight=2, bn__bias=2, bn__running_mean=2)
        arrays |= {"bn.running_var": np.array([1.0, 2.0]), "bn.num_batches_tracked": np.array(3)}
        rows = (rows - arrays["bn.running_mean"]) / np.sqrt(arrays["bn.running_var"] + 1e-5)
        rows = rows * arrays["bn.weight"] + arrays["bn.bias"]
    want = np.full((6, 2), -np.inf)
    np.maximum.at(want, DST, rows)
    got = outputs(geom.EdgeConv(net).eval(), arrays)
    assert_close(got, np.where(np.isinf(want), 0, want))


def test_chebyshev_convolution_of_dgl():
    """Of a graph both ways and without loops, where degrees and Laplacian are the same."""
    src, dst = np.array([0, 1, 2, 3]), np.array([1, 2, 0, 4])
    src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    graph = geom.Graph.from_edges(src, dst, n_nodes=6)
    arrays = drawn(linear__weight=(2, 9), linear__bias=2)
    matrix = np.zeros((6, 6))
    np.add.at(matrix, (dst, src), 1)
    root = np.maximum(matrix.sum(axis=1), 1) ** -0.5
    matrix = root[:, None] * matrix * root
    one = -matrix @ X  # with 2 for the largest eigenvalue
    two = -2 * matrix @ one - X
    want = np.concatenate([X, one, two], axis=1) @ arrays["linear.weight"].T + arrays["linear.bias"]
    assert_close(outputs(geom.ChebConv(3, 2, k=3, **F64), arrays, graph=graph), want)
    with pytest.raises(ValueError, match=r"linear.weight must have shape \(2, 6\), got \(2, 9\)"):
        geom.ChebConv(3, 2, k=2, **F64).load_arrays(arrays, convention="dgl")


def test_simple_convolution_of_dgl():
    arrays = drawn(fc__weight=(2, 3), fc__bias=2)
    norm = np.maximum(np.bincount(DST, minlength=6), 1)[:, None] ** -0.5
    x = X
    for _ in range(2):
        x = summed((x * norm)[SRC]) * norm
    # A source without edges that end there has degree 1 there, and gives nothing here.
    layer = geom.SGConv(3, 2, k=2, add_self_loops=False, **F64)
    assert_close(outputs(layer, arrays), x @ arrays["fc.weight"].T + arrays["fc.bias"])


@pytest.mark.parametrize("kind", ["gin", "gine"])
def test_isomorphism_layers_of_dgl(kind):
    arrays = drawn(apply_func__weight=(2, 3), apply_func__bias=2, eps=1)
    edges = RNG.standard_normal((11, 3))
    rows = X[SRC] if kind == "gin" else np.maximum(X[SRC] + edges, 0)
    x = (1 + arrays["eps"]) * X + summed(rows)
    make = geom.GINConv if kind == "gin" else geom.GINEConv
    got = outputs(make(nn.Linear(3, 2, **F64), **F64), arrays, *([edges] if kind == "gine" else []))
    assert_close(got, x @ arrays["apply_func.weight"].T + arrays["apply_func.bias"])


@pytest.mark.parametrize("kind", ["plain", "bases", "blocks"])
def test_relations_of_dgl(kind):
    arrays = drawn(h_bias=6, loop_weight=(3, 6))
    if kind == "bases":
        arrays |= drawn(linear_r__W=(2, 3, 6), linear_r__coeff=(3, 2))
        weight = np.einsum("rb,bio->rio", arrays["linear_r.coeff"], arrays["linear_r.W"])
    elif kind == "blocks":
        arrays |= drawn(linear_r__W=(3, 3 * 1 * 2))
        weight = np.zeros((3, 3, 6))
        for i in range(3):
            weight[:, i, 2 * i : 2 * i + 2] = arrays["linear_r.W"][:, 2 * i : 2 * i + 2]
    else:
        arrays |= drawn(linear_r__W=(3, 3, 6))
        weight = arrays["linear_r.W"]
    options = {"bases": {"n_bases": 2}, "blocks": {"n_blocks": 3}}.get(kind, {})
    layer = geom.RGCNConv(3, 6, 3, aggr="sum", **options, **F64)
    want = summed(np.einsum("ei,eio->eo", X[SRC], weight[KINDS]))
    want += arrays["h_bias"] + X @ arrays["loop_weight"]
    assert_close(outputs(layer, arrays, KINDS), want)


def attended(values, logits):
    """Attend, by head, to values of shape (n, heads, features) with leaky ReLUs of logits."""
    power = np.exp(np.where(logits > 0, logits, 0.2 * logits))
    total = summed(power)
    rows = values[SRC] * (power / total[DST])[:, :, None]
    return summed(rows.reshape(11, -1))


@pytest.mark.parametrize("residual", ["none", "mapped", "identity", "with its bias"])
def test_attention_of_dgl(residual):
    width = 1 if residual == "identity" else 2
    heads = 3 if residual == "identity" else 2
    shape = (1, heads, width)
    arrays = drawn(fc__weight=(heads * width, 3), attn_l=shape, attn_r=shape)
    z = (X @ arrays["fc.weight"].T).reshape(6, heads, width)
    left, right = ((z * arrays[k]).sum(axis=-1) for k in ("attn_l", "attn_r"))
    want = attended(z, left[SRC] + right[DST])
    arrays |= drawn(**{"res_fc__bias" if "bias" in residual else "bias": heads * width})
    want = want + arrays.get("bias", 0) + arrays.get("res_fc.bias", 0)
    if residual == "identity":
        want = want + X
    elif residual != "none":
        arrays |= drawn(res_fc__weight=(heads * width, 3))
        want = want + X @ arrays["res_fc.weight"].T
    layer = geom.GATConv(
        3, width, heads=heads, residual=residual != "none", add_self_loops=False, **F64
    )
    assert_close(outputs(layer, arrays), want)


def test_second_attention_of_dgl():
    arrays = drawn(fc_src__weight=(4, 3), fc_dst__weight=(4, 3), attn=(1, 2, 2))
    arrays |= drawn(fc_src__bias=4, fc_dst__bias=4, res_fc__weight=(4, 3))
    left, right = (
        (X @ arrays[f"{k}.weight"].T + arrays[f"{k}.bias"]).reshape(6, 2, 2)
        for k in ("fc_src", "fc_dst")
    )
    both = left[SRC] + right[DST]
    logits = (np.where(both > 0, both, 0.2 * both) * arrays["attn"]).sum(axis=-1)
    power = np.exp(logits)
    want = summed((left[SRC] * (power / summed(power)[DST])[:, :, None]).reshape(11, 4))
    layer = geom.GATv2Conv(3, 2, heads=2, residual=True, add_self_loops=False, **F64)
    assert_close(outputs(layer, arrays), want + X @ arrays["res_fc.weight"].T)


@pytest.mark.parametrize("aggr", ["mean", "pool"])
def test_sage_of_dgl(aggr):
    arrays = drawn(fc_neigh__weight=(2, 3), fc_self__weight=(2, 3), fc_self__bias=2)
    if aggr == "pool":
        arrays |= drawn(fc_pool__weight=(3, 3), fc_pool__bias=3)
        rows = np.maximum(X @ arrays["fc_pool.weight"].T + arrays["fc_pool.bias"], 0)[SRC]
        own = np.zeros((6, 3))
        np.maximum.at(own, DST, rows)
    else:
        own = summed(X[SRC]) / np.maximum(np.bincount(DST, minlength=6), 1)[:, None]
    want = own @ arrays["fc_neigh.weight"].T + X @ arrays["fc_self.weight"].T
    got = outputs(geom.SAGEConv(3, 2, aggr=aggr, **F64), arrays)
    assert_close(got, want + arrays["fc_self.bias"])


def test_translations_of_dgl():
    arrays = drawn(rel_emb__weight=(3, 3))
    decoder = geom.TransE(3, 3, p=2, **F64)
    decoder.load_arrays(arrays, convention="dgl")
    want = -np.linalg.norm(X[[0, 5]] + arrays["rel_emb.weight"][[2, 0]] - X[[1, 2]], axis=1)
    got = decoder(X, np.array([[0, 5], [1, 2]]), np.array([2, 0]))
    assert_close(rx.Tensor(got).numpy(), want)


PNA = ["mean", "max", "min", "sum", "var", "std"], ["attenuation", "identity", "amplification"]
MEANS = {"mean_degree": 2.0, "mean_log_degree": 0.8}


def neighbourhoods(x, arrays, stem, edges):
    """Give what a tower of DGL's adds to its nodes: operations, then those scaled."""
    rows = [x[SRC], x[DST]] + ([edges] if edges is not None else [])
    messages = np.concatenate(rows, axis=1) @ arrays[f"{stem}M.weight"].T + arrays[f"{stem}M.bias"]
    found = np.zeros((6, 18 * x.shape[1]))
    for node in range(6):
        m = messages[node == DST]
        if len(m):
            parts = [m.mean(0), m.max(0), m.min(0), m.sum(0), m.var(0), m.std(0)]
            log = np.log(len(m) + 1)
            found[node] = np.outer([0.8 / log, 1, log / 0.8], np.concatenate(parts)).reshape(-1)
    return np.concatenate([x, found], axis=1)


@pytest.mark.parametrize("n_edge", [0, 1, 2])
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_principal_neighbourhoods_of_dgl(towers, n_edge, batched):
    width, n_out = 4 // towers, 6 // towers
    x, edges = RNG.standard_normal((6, 4)), RNG.standard_normal((11, n_edge)) if n_edge else None
    arrays, parts = drawn(mixing_layer__0__weight=(6, 6), mixing_layer__0__bias=6), []
    # One node has a graph of its own.
    size = np.array([5.0, 5, 5, 5, 5, 1]) if batched else np.full(6, 6.0)
    for i in range(towers):
        stem = f"towers.{i}."
        own = drawn(M__weight=(width, 2 * width + n_edge), M__bias=width, U__bias=n_out)
        own |= drawn(U__weight=(n_out, 19 * width), batchnorm__weight=n_out, batchnorm__bias=n_out)
        own |= drawn(batchnorm__running_mean=n_out)
        own |= {"batchnorm.running_var": 1 + RNG.random(n_out)}
        own |= {"batchnorm.num_batches_tracked": np.array(3)}
        arrays |= {f"{stem}{name}": a for name, a in own.items()}
        rows = neighbourhoods(x[:, i * width : (i + 1) * width], arrays, stem, edges)
        rows = (rows @ own["U.weight"].T + own["U.bias"]) / np.sqrt(size)[:, None]
        rows = (rows - own["batchnorm.running_mean"]) / np.sqrt(own["batchnorm.running_var"] + 1e-5)
        parts.append(rows * own["batchnorm.weight"] + own["batchnorm.bias"])
    want = np.concatenate(parts, axis=1) @ arrays["mixing_layer.0.weight"].T
    options = {"towers": towers, "edge_channels": n_edge or None, "batch_norm": True, **MEANS}
    layer = geom.PNAConv(4, 6, *PNA, divide_input=True, **options, **F64).eval()
    layer.load_arrays(arrays, convention="dgl")
    graph = geom.Batch(GRAPH, np.array([0, 5, 6])) if batched else GRAPH
    got = layer(graph, x, *([edges] if n_edge else []))
    want = want + arrays["mixing_layer.0.bias"]
    assert_close(rx.Tensor(got).numpy(), want, rtol=1e-6, atol=1e-7)  # the roots of variances


def test_what_principal_neighbourhoods_of_dgl_need():
    for options, message in (
        ({}, "must have batch_norm=True and divide_input=True .* got batch_norm=False"),
        ({"batch_norm": True, "towers": 2}, "divide_input=False"),
        ({"batch_norm": True, "edge_channels": 5}, "edge_channels must be at most the 4 features"),
    ):
        layer = geom.PNAConv(4, 4, *PNA, **options, **MEANS)
        with pytest.raises(ValueError, match=message):
            layer.load_arrays({}, convention="dgl")


@pytest.mark.parametrize("in_a_model", [False, True])
@pytest.mark.parametrize(
    ("make", "arrays", "message"),
    [
        (
            lambda: geom.ChebConv(3, 2, k=2, **F64),
            {"linear.weight": (2, 9), "linear.bias": (2,)},
            r"linear.weight must have shape \(2, 6\), got \(2, 9\)",
        ),
        (
            lambda: geom.ChebConv(3, 2, k=2, **F64),
            {"linear.weight": (2, 6), "linear.bias": (3,)},
            r"linear.bias, here (conv\.)?bias: must have shape \(2,\), got \(3,\)",
        ),
        (
            lambda: geom.EdgeConv(nn.Linear(6, 2, **F64)),
            {"theta.weight": (2, 3), "theta.bias": (2,), "phi.weight": (2, 4), "phi.bias": (2,)},
            r"phi.weight must have shape \(2, 3\), got \(2, 4\)",
        ),
        (
            lambda: geom.EdgeConv(nn.Sequential(nn.Linear(6, 2, **F64))),
            {"theta.weight": (2, 3), "theta.bias": (1,), "phi.weight": (2, 3), "phi.bias": (2,)},
            r"theta.bias must have shape \(2,\), got \(1,\)",
        ),
        (
            lambda: geom.TransE(3, 3, **F64),
            {"rel_emb.weight": (4, 3)},
            r"rel_emb.weight, here (conv\.)?weight: must have shape \(3, 3\), got \(4, 3\)",
        ),
        (
            lambda: geom.PNAConv(4, 4, *PNA, batch_norm=True, **MEANS, **F64),
            {"towers.0.M.weight": (4, 9)},
            r"towers.0.M.weight must have shape \(4, 8\), got \(4, 9\)",
        ),
        (
            lambda: geom.GINConv(nn.Linear(3, 2, **F64), **F64),
            {"apply_func.weight": (3, 2), "apply_func.bias": (2,), "eps": (1,)},
            r"apply_func.weight, here (conv\.)?nn.weight: must have shape \(2, 3\)",
        ),
    ],
    ids=["cheb", "cheb-bias", "edge", "edge-bias", "translation", "pna", "gin"],
)
def test_errors_name_arrays_as_they_are_called_there(make, arrays, message, in_a_model):
    class Model(nn.Module):
        def __init__(self):
            self.conv = make()

    arrays = {name: np.ones(shape) for name, shape in arrays.items()}
    target, stem = (Model(), "conv.") if in_a_model else (make(), "")
    given = {f"{stem}{name}": x for name, x in arrays.items()}
    with pytest.raises(CheckpointError, match=("conv." if in_a_model else "") + message):
        geom.load_arrays(target, given, convention="dgl")
