"""Pooling and layers over relations against PyTorch Geometric, with its parameters loaded."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close

pytestmark = pytest.mark.compare
torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch_geometric").nn
utils = pytest.importorskip("torch_geometric").utils

F64 = {"dtype": "float64"}
rng = np.random.default_rng(0)


@pytest.fixture
def batch(multigraphs):
    return geom.Batch.from_graphs(multigraphs)


def load(ours, their):
    geom.load_arrays(ours, {name: x.numpy() for name, x in their.state_dict().items()})


def torches(batch):
    x = torch.tensor(batch.nodes["x"], requires_grad=True)
    edge_index = torch.tensor(np.stack([batch.src, batch.dst]))
    return x, edge_index, torch.tensor(batch.graph_ids)


def test_global_pooling_and_dense_arrays(batch):
    x, edge_index, ids = torches(batch)
    size = batch.n_graphs
    for name, ours in (
        ("add", geom.global_sum),
        ("mean", geom.global_mean),
        ("max", geom.global_max),
    ):
        want = getattr(theirs, f"global_{name}_pool")(x, ids, size=size)
        assert_close(ours(batch.nodes["x"], batch.ptr), want.detach().numpy())
    dense, present = geom.to_dense_batch(batch.nodes["x"], batch.ptr)
    want, mask = utils.to_dense_batch(x, ids, batch_size=size)
    assert_close(dense, want.detach().numpy())
    assert_close(present, mask.numpy(), exact=True)
    want = utils.to_dense_adj(edge_index, ids, batch_size=size)  # rows are sources there
    assert_close(geom.to_dense_adj(batch), want.numpy().swapaxes(1, 2))


def test_set2set(batch):
    their = theirs.Set2Set(3, processing_steps=4).double()
    ours = geom.Set2Set(3, n_steps=4, **F64)
    load(ours, their)
    x, _, ids = torches(batch)
    want = their(x, ids, dim_size=batch.n_graphs)
    given = rx.Tensor(batch.nodes["x"], requires_grad=True)
    got = ours(given, batch.ptr)
    assert_close(got.numpy(), want.detach().numpy(), rtol=1e-9)
    (want**2).sum().backward()
    rx.sum(got**2).backward()
    assert_close(given.grad, x.grad.numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("ratio", [0.5, 0.3, 2])
@pytest.mark.parametrize("kind", ["topk", "sag"])
@pytest.mark.parametrize("seed", range(3))
def test_choosing_nodes(batch, kind, ratio, seed):
    torch.manual_seed(seed)
    if kind == "topk":
        their = theirs.TopKPooling(3, ratio=ratio).double()
        ours = geom.TopKPooling(3, ratio=ratio, **F64)
    else:
        their = theirs.SAGPooling(3, ratio=ratio, GNN=theirs.GraphConv).double()
        ours = geom.SAGPooling(geom.GraphConv(3, 1, **F64), ratio=ratio)
    load(ours, their)
    x, edge_index, ids = torches(batch)
    want, edges, _, want_ids, nodes, _ = their(x, edge_index, batch=ids)
    given = rx.Tensor(batch.nodes["x"], requires_grad=True)
    pooled, got, chosen = ours(batch, given)
    assert_close(chosen, nodes.numpy(), exact=True)
    assert_close(got.numpy(), want.detach().numpy())
    assert_close(pooled.graph_ids, want_ids.numpy(), exact=True)
    assert_close(np.stack([pooled.src, pooled.dst]), edges.numpy(), exact=True)
    (want**2).sum().backward()
    rx.sum(got**2).backward()
    assert_close(given.grad, x.grad.numpy())


@pytest.mark.filterwarnings("ignore:There exist node types")
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_layers_over_relations(aggr):
    relations = [("a", "r.1", "b"), ("a", "s", "b"), ("b", "r.1", "b")]
    counts = {"a": 4, "b": 5}
    edges = {
        (src, name, dst): (rng.integers(0, counts[src], 6), rng.integers(0, counts[dst], 6))
        for src, name, dst in relations
    }
    x = {kind: rng.standard_normal((n, 3)) for kind, n in counts.items()}
    their = theirs.HeteroConv({r: theirs.SAGEConv((3, 3), 2) for r in relations}, aggr=aggr)
    their = their.double()
    ours = geom.HeteroConv(
        {r: geom.SAGEConv(3, 2, **F64) for r in relations}, aggr=aggr, skip_empty=False
    )
    load(ours, their)
    index = {r: torch.tensor(np.stack(pair)) for r, pair in edges.items()}
    want = their({kind: torch.tensor(v) for kind, v in x.items()}, index)
    got = ours(geom.HeteroGraph.from_edges(edges, counts), x)
    assert list(got) == list(want) == ["b"]
    assert_close(got["b"].numpy(), want["b"].detach().numpy())
