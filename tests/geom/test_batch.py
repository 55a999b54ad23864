"""Batches of graphs, and what is pooled over them."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close, gradcheck, gradgradcheck

EMPTY = np.array([], int)


def plain(n_nodes, pairs=(), **arrays):
    src, dst = np.array(pairs, int).reshape(-1, 2).T
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes, **arrays)


def test_graphs_come_back_as_they_went_in(multigraphs, same):
    y = np.arange(len(multigraphs))
    batch = geom.Batch.from_graphs(multigraphs, graph={"y": y})
    assert batch.n_graphs == len(multigraphs)
    assert batch.ptr.dtype == np.int64
    sizes = [graph.n_nodes for graph in multigraphs]
    assert batch.ptr.tolist() == [0, *np.cumsum(sizes)]
    assert batch.edge_ptr.tolist() == [0, *np.cumsum([graph.n_edges for graph in multigraphs])]
    assert batch.graph_ids.tolist() == np.repeat(y, sizes).tolist()
    assert batch.graph["y"] is y
    back = batch.unbatch()
    assert len(back) == len(multigraphs)
    for got, want in zip(back, multigraphs, strict=True):
        same(got, want)
    same(batch[-1], multigraphs[-1])
    with pytest.raises(IndexError, match="the batch has 6 graphs, got 6"):
        batch[6]


def test_no_edge_leads_from_one_graph_to_another(multigraphs):
    batch = geom.Batch.from_graphs(multigraphs)
    assert (batch.graph_ids[batch.src] == batch.graph_ids[batch.dst]).all()
    x = batch.nodes["x"]
    wanted = np.concatenate([graph @ graph.nodes["x"] for graph in multigraphs])
    assert_close(batch @ x, wanted)
    assert_close(batch.T @ x, np.concatenate([graph.T @ graph.nodes["x"] for graph in multigraphs]))


def test_trailing_graphs_without_edges_stay():
    """PyG#10815."""
    batch = geom.Batch.from_graphs([plain(2, [(0, 1), (1, 0)]), plain(1)])
    parts = batch.unbatch()
    assert [(part.n_nodes, part.n_edges) for part in parts] == [(2, 2), (1, 0)]


def test_trailing_graphs_without_nodes_are_pooled():
    """PyG#2895."""
    batch = geom.Batch.from_graphs([plain(0), plain(2), plain(0)])
    assert_close(geom.global_sum(np.ones(2), batch.ptr), np.array([0.0, 2.0, 0.0]))


def test_unsorted_nodes_are_sorted_not_misread():
    """PyG#10534."""
    x = np.arange(4.0)
    pairs = plain(4, [(0, 3), (3, 0), (1, 2), (2, 1)], nodes={"x": x})
    batch = geom.Batch.from_ids(pairs, np.array([0, 1, 1, 0]), n_graphs=2)
    swap = np.array([[0.0, 1.0], [1.0, 0.0]], np.float32)
    assert_close(geom.to_dense_adj(batch), np.stack([swap, swap]), exact=True)
    dense, present = geom.to_dense_batch(batch.nodes["x"], batch.ptr)
    assert_close(dense, np.array([[0.0, 3.0], [1.0, 2.0]]), exact=True)
    assert present.all()


def test_arrays_are_what_they_are_declared_to_be():
    """PyG#9912: one edge, one node and one graph, and three arrays of one entry."""
    y, x, w = np.array([7]), np.array([1.0]), np.array([2.0])
    one = plain(1, [(0, 0)], nodes={"x": x}, edges={"w": w})
    batch = geom.Batch.from_graphs([one, one], graph={"y": np.array([7, 8])})
    assert batch.nodes["x"].tolist() == [1.0, 1.0]
    assert batch.edges["w"].tolist() == [2.0, 2.0]
    assert batch.graph["y"].tolist() == [7, 8]
    assert geom.Batch.from_graphs([one], graph={"y": y}).graph["y"] is y


@pytest.mark.parametrize("seed", range(5))
def test_from_ids_permutes_nodes_alone(random, seed):
    graph = random(8, 0, seed)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, 8)
    candidates = [(s, d) for s in range(8) for d in range(8) if ids[s] == ids[d]]
    chosen = rng.integers(0, len(candidates), 15)
    src, dst = np.array(candidates)[chosen].T
    graph = geom.Graph.from_edges(
        src, dst, n_nodes=8, nodes=graph.nodes, edges={"number": np.arange(15)}
    )
    batch = geom.Batch.from_ids(graph, ids, n_graphs=5)
    order = np.argsort(ids, kind="stable")
    assert (batch.nodes["x"] == graph.nodes["x"][order]).all()
    assert (order[batch.src] == src).all()
    assert (order[batch.dst] == dst).all()
    assert batch.edges["number"].tolist() == list(range(15))
    parts = batch.unbatch()
    assert parts[4].n_nodes == 0
    for g, part in enumerate(parts):
        mine = np.flatnonzero(ids == g)
        kept = np.flatnonzero(ids[src] == g)
        assert part.edges["number"].tolist() == kept.tolist()
        assert (mine[part.src] == src[kept]).all()
        assert (mine[part.dst] == dst[kept]).all()
        assert_close(part.nodes["x"], graph.nodes["x"][mine], exact=True)


def test_nothing_is_a_batch():
    batch = geom.Batch.from_graphs([])
    assert (batch.n_graphs, batch.n_nodes, batch.n_edges) == (0, 0, 0)
    assert batch.unbatch() == []
    assert geom.global_sum(np.ones((0, 2)), batch.ptr).shape == (0, 2)
    assert geom.to_dense_adj(batch).shape == (0, 0, 0)
    assert geom.to_dense_batch(np.ones((0, 2)), batch.ptr)[0].shape == (0, 0, 2)


def test_batches_of_batches_and_of_tensors(multigraphs, same):
    inner = geom.Batch.from_graphs(multigraphs)
    outer = geom.Batch.from_graphs([inner, inner])
    same(outer[1], inner)
    x = rx.Tensor(np.ones((2, 1)), requires_grad=True)
    batch = geom.Batch.from_graphs([plain(2, nodes={"x": x}), plain(2, nodes={"x": x})])
    rx.sum(batch.nodes["x"] * 3).backward()
    assert_close(x.grad, np.full((2, 1), 6.0))


def test_which_arrays_are_joined():
    a = plain(1, nodes={"x": np.ones(1), "z": np.ones((1, 2))})
    b = plain(1, nodes={"x": np.ones(1)})
    with pytest.raises(ValueError, match=r"same arrays of nodes, got .* say with nodes="):
        geom.Batch.from_graphs([a, b])
    assert list(geom.Batch.from_graphs([a, b], nodes=["x"]).nodes) == ["x"]
    with pytest.raises(ValueError, match=r"graphs\[1\] has no nodes\['z'\]"):
        geom.Batch.from_graphs([a, b], nodes=["z"])
    c = plain(1, nodes={"x": np.ones((1, 3))})
    with pytest.raises(ValueError, match=r"rows of one shape, got \(\) and, for graphs\[1\], \(3,"):
        geom.Batch.from_graphs([b, c])


def test_replace_keeps_the_graphs():
    batch = geom.Batch.from_graphs([plain(2, [(0, 1)]), plain(1)], graph={"y": np.zeros(2)})
    other = batch.replace(nodes={"x": np.ones(3)})
    assert isinstance(other, geom.Batch)
    assert repr(other) == "Batch(2 graphs, 3 nodes, 1 edges, nodes: x, graph: y)"
    assert list(batch.replace(graph={}).graph) == []
    assert batch.to_device("cpu") is batch


def test_bad_batches():
    graph = plain(3, [(0, 1)])
    for ptr in ([0, 2], [1, 3], [0, 2, 1, 3], []):
        with pytest.raises(ValueError, match="rise from 0 to the number of nodes, 3"):
            geom.Batch(graph, np.array(ptr, int))
    with pytest.raises(TypeError, match="ptr must be a one-dimensional array of integers"):
        geom.Batch(graph, np.array([0.0, 3.0]))
    with pytest.raises(ValueError, match="no edge from one of its graphs to another"):
        geom.Batch(graph, np.array([0, 1, 3]))
    with pytest.raises(ValueError, match="graph\\['y'\\] must have an entry for each of 1 graph"):
        geom.Batch(graph, np.array([0, 3]), graph={"y": np.ones(2)})
    with pytest.raises(IndexError, match=r"graph_ids must lie in \[0, 2\)"):
        geom.Batch.from_ids(graph, np.array([0, 0, 2]), n_graphs=2)
    with pytest.raises(ValueError, match=r"graph_ids must have shape \(3,\)"):
        geom.Batch.from_ids(graph, np.array([0, 0]), n_graphs=2)
    with pytest.raises(TypeError, match=r"graphs\[0\] must be a Graph, got int"):
        geom.Batch.from_graphs([3])
    with pytest.raises(ValueError, match="nodes of one kind"):
        geom.Batch.from_graphs([geom.Graph.from_edges(EMPTY, EMPTY, n_src=1, n_dst=2)])
    with pytest.raises(TypeError, match=r"then Batch\(graph, ptr\)"):
        geom.Batch.from_edges(EMPTY, EMPTY, n_nodes=1)
    with pytest.raises(ValueError, match="max_nodes must be at least 2, the size of the largest"):
        geom.to_dense_batch(np.ones(3), np.array([0, 2, 3]), max_nodes=1)
    with pytest.raises(ValueError, match="rise from 0 to the number of nodes, 4"):
        geom.global_sum(np.ones(4), np.array([0, 2, 3]))
    batch = geom.Batch(graph, np.array([0, 3]))
    with pytest.raises(ValueError, match=r"weight must have shape \(1,\)"):
        geom.to_dense_adj(batch, np.ones(3))


# ---------------------------------------------------------------------------------- pooling

SIZES = [2, 0, 3, 1, 0]
PTR = np.concatenate([[0], np.cumsum(SIZES)])


@pytest.mark.skip_xp("dask.array", reason="row pointers are read")
def test_pooling_matches_slices(xp):
    x = np.random.default_rng(0).standard_normal((6, 2))
    blocks = [x[a:b] for a, b in zip(PTR[:-1], PTR[1:], strict=True)]
    zero = np.zeros(2)
    args = xp.asarray(x), xp.asarray(PTR)
    assert_close(geom.global_sum(*args), np.stack([block.sum(axis=0) for block in blocks]))
    means = np.stack([block.mean(axis=0) if len(block) else zero for block in blocks])
    assert_close(geom.global_mean(*args), means)
    tops = np.stack([block.max(axis=0) if len(block) else zero - 5 for block in blocks])
    assert_close(geom.global_max(*args, empty=-5.0), tops)
    score = xp.asarray(np.log(np.arange(1.0, 7.0)))
    shares = np.arange(1.0, 7.0)[:, None]
    wanted = [
        (x[a:b] * shares[a:b]).sum(axis=0) / max(shares[a:b].sum(), 1)
        for a, b in zip(PTR[:-1], PTR[1:], strict=True)
    ]
    assert_close(geom.global_attention(args[0], score, args[1]), np.stack(wanted))
    dense, present = geom.to_dense_batch(*args, max_nodes=4, fill=9.0)
    assert dense.shape == (5, 4, 2)
    for g, block in enumerate(blocks):
        assert_close(dense[g, : len(block), :], block)
        assert_close(dense[g, len(block) :, :], np.full((4 - len(block), 2), 9.0))
        assert_close(present[g, :], np.arange(4) < len(block))


def test_infinities_are_no_empty_graphs():
    """dgl#2849: a largest entry of inf or -inf is what it is."""
    x = np.array([np.inf, 1.0, -np.inf])
    assert_close(geom.global_max(x, np.array([0, 2, 3, 3])), np.array([np.inf, -np.inf, 0.0]))


def test_scores_of_minus_infinity_have_no_weight():
    x = np.array([[1.0], [2.0], [3.0]])
    score = np.array([-np.inf, -np.inf, -np.inf])
    ptr = np.array([0, 2, 3])
    assert_close(geom.global_attention(x, score, ptr), np.zeros((2, 1)))
    tracked = rx.Tensor(score, requires_grad=True)
    rx.sum(geom.global_attention(x, tracked, ptr)).backward()
    assert_close(tracked.grad, np.zeros(3))


def test_gradients_of_pooling():
    rng = np.random.default_rng(1)
    x, score, weight = rng.standard_normal((6, 2)), rng.standard_normal(6), rng.standard_normal(2)
    for pool in (geom.global_sum, geom.global_mean, geom.global_max):
        gradcheck(lambda x, pool=pool: pool(x, PTR), (x,))
    gradcheck(lambda x, s: geom.global_attention(x, s, PTR), (x, score))
    gradgradcheck(lambda x, s: geom.global_attention(x, s, PTR), (x, score))
    gradcheck(lambda x: geom.to_dense_batch(x, PTR)[0], (x,))
    batch = geom.Batch.from_graphs([plain(2, [(0, 1), (0, 1)])])
    gradcheck(lambda w: geom.to_dense_adj(batch, w), (weight,))
    assert_close(geom.to_dense_adj(batch, weight)[0], np.array([[0, 0], [weight.sum(), 0]]))


def test_dense_adjacency_multiplies_like_the_batch(multigraphs):
    batch = geom.Batch.from_graphs(multigraphs)
    dense, present = geom.to_dense_batch(batch.nodes["x"], batch.ptr)
    product = geom.to_dense_adj(batch) @ dense
    assert_close(product[present], batch @ batch.nodes["x"], rtol=1e-6)


# ---------------------------------------------------------------------------------- modules


def test_set2set_of_one_step_is_attention_with_the_first_query():
    rng = np.random.default_rng(2)
    pool = geom.Set2Set(3, n_steps=1, dtype="float64")
    x = rng.standard_normal((6, 3))
    out = pool(x, PTR).numpy()
    q, _ = pool.lstm(np.zeros((5, 1, 6)))
    q = q.numpy()[:, 0]
    assert_close(out[:, :3], q)
    for g, (a, b) in enumerate(zip(PTR[:-1], PTR[1:], strict=True)):
        power = np.exp(x[a:b] @ q[g])
        assert_close(out[g, 3:], power @ x[a:b] / max(power.sum(), 1e-300))
    assert_close(pool(x[::-1].copy(), np.array([0, 6])).numpy(), pool(x, np.array([0, 6])).numpy())


def test_topk_keeps_the_best_of_each_graph():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, 2))
    graph = plain(6, [(2, 3), (3, 4), (4, 2), (0, 0)], edges={"number": np.arange(4)})
    batch = geom.Batch(graph, PTR, graph={"y": np.arange(5)})
    pool = geom.TopKPooling(2, ratio=0.5, dtype="float64")
    p = pool.weight.numpy()
    score = np.tanh(x @ p / np.linalg.norm(p))
    pooled, kept, nodes = pool(batch, x)
    assert pooled.ptr.tolist() == [0, 1, 1, 3, 4, 4]
    assert nodes.tolist() == [
        i
        for a, b in zip(PTR[:-1], PTR[1:], strict=True)
        for i in (a + np.argsort(-score[a:b], kind="stable"))[: -(-(b - a) // 2)]
    ]
    assert_close(kept.numpy(), x[nodes] * score[nodes, None])
    assert pooled.graph["y"] is batch.graph["y"]
    for src, dst, number in zip(pooled.src, pooled.dst, pooled.edges["number"], strict=True):
        assert (nodes[src], nodes[dst]) == (graph.src[number], graph.dst[number])
    rx.sum(kept**2).backward()
    assert np.abs(pool.weight.grad).sum() > 0


def test_topk_counts_and_ties():
    batch = geom.Batch.from_graphs([plain(30), plain(5)])
    x = np.ones((35, 1), np.float32)
    for ratio, counts in ((0.1, [3, 1]), (1.0, [30, 5]), (4, [4, 4]), (7, [7, 5])):
        pooled, _, nodes = geom.TopKPooling(1, ratio=ratio)(batch, x)
        assert pooled.ptr.tolist() == [0, counts[0], sum(counts)]
        assert nodes.tolist() == [*range(counts[0]), *range(30, 30 + counts[1])]
    for ratio in (0, 1.5, 0.0, -1, "half"):
        with pytest.raises(ValueError, match="ratio must be a float in"):
            geom.TopKPooling(1, ratio=ratio)


def test_sag_pooling_scores_with_its_layer():
    batch = geom.Batch.from_graphs([plain(3, [(0, 2), (1, 2), (2, 1)]), plain(1)])
    x = np.array([[1.0], [2.0], [3.0], [4.0]])
    pool = geom.SAGPooling(lambda graph, x: graph @ x, ratio=1)
    pooled, kept, nodes = pool(batch, x)
    assert nodes.tolist() == [1, 3]  # node 1 receives 3, as does node 2; node 3 nothing
    assert_close(kept, np.array([[2 * np.tanh(3.0)], [0.0]]))
    assert pooled.n_edges == 0


@pytest.mark.gpu
def test_batches_on_a_gpu(multigraphs):
    batch = geom.Batch.from_graphs(multigraphs, graph={"y": np.arange(6)})
    there = batch.to_device("cuda:0")
    again = geom.Batch.from_graphs([graph.to_device("cuda:0") for graph in multigraphs])
    x = batch.nodes["x"]
    for moved in (there, again):
        assert moved.ptr.get().tolist() == batch.ptr.tolist()
        pooled = geom.global_max(moved.nodes["x"], moved.ptr)
        assert_close(pooled.get(), geom.global_max(x, batch.ptr))
        assert_close(geom.to_dense_adj(moved).get(), geom.to_dense_adj(batch))
        assert_close(moved[0].src.get(), batch[0].src)
