"""What other libraries are reported to get wrong, with the right values, on the CPU and on a GPU.

Each test names the reports. ``put`` brings arrays to the device, ``back`` gives them as NumPy's.
"""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.random import Generator
from rtxarr.testing import assert_close

F64 = {"dtype": "float64"}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def put(request):
    def move(x, dtype=None):
        return _device.to_device(np.asarray(x, dtype=dtype), request.param)

    move.device = request.param
    with rx.device(request.param):
        yield move


def back(x):
    return rx.Tensor(x).numpy()


def graph_of(put, src, dst, n_nodes=None, **options):
    src, dst = (put(x, np.int64) for x in (src, dst))
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes, **options)


def test_isolated_nodes_have_rows_and_stay_seeds(put):
    """cugraph#4326."""
    graph = graph_of(put, [0], [1], 3)
    for op in ("sum", "mean"):
        assert_close(
            back(geom.aggregate(graph, put(np.ones((3, 1))), op))[:, 0], np.array([0, 1.0, 0])
        )
    sample = geom.NeighborSampler(graph, [5])(put([2]))
    assert back(sample.nodes).tolist() == [2]
    assert (sample.graphs[0].n_dst, sample.graphs[0].n_edges) == (1, 0)


def test_means_of_graphs_without_edges_are_finite(put):
    """dgl#2777."""
    graph, layer = graph_of(put, [], [], 2), geom.SAGEConv(3, 2, **F64)
    x = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    want = x @ back(layer.lin_r.weight).T + back(layer.lin_l.bias)
    assert_close(back(layer(graph, put(x))), want)


def test_edge_convolution_of_isolated_nodes_is_zero(put):
    """PyG#1129."""
    layer = geom.EdgeConv(rx.nn.Linear(128, 8))
    out = layer(graph_of(put, [], [], 1), put(np.zeros((1, 64), np.float32)))
    assert_close(back(out), np.zeros((1, 8), np.float32), exact=True)


def test_trailing_graphs_without_edges_stay(put):
    """PyG#10815."""
    graphs = [graph_of(put, [0, 1], [1, 0], 2), graph_of(put, [], [], 1)]
    parts = geom.Batch.from_graphs(graphs).unbatch()
    assert [(part.n_nodes, part.n_edges) for part in parts] == [(2, 2), (1, 0)]


def test_trailing_graphs_without_nodes_are_pooled(put):
    """PyG#2895."""
    none, two = graph_of(put, [], [], 0), graph_of(put, [], [], 2)
    batch = geom.Batch.from_graphs([none, two, none])
    assert_close(back(geom.global_sum(put(np.ones(2)), batch.ptr)), np.array([0.0, 2.0, 0.0]))


def test_unsorted_nodes_are_sorted_not_misread(put):
    """PyG#10534."""
    pairs = graph_of(put, [0, 3, 1, 2], [3, 0, 2, 1], 4, nodes={"x": put(np.arange(4.0))})
    batch = geom.Batch.from_ids(pairs, put([0, 1, 1, 0]), n_graphs=2)
    swap = np.array([[0, 1], [1, 0]], np.float32)
    assert_close(back(geom.to_dense_adj(batch)), np.stack([swap, swap]), exact=True)
    dense, present = geom.to_dense_batch(batch.nodes["x"], batch.ptr)
    assert_close(back(dense), np.array([[0.0, 3.0], [1.0, 2.0]]), exact=True)
    assert back(present).all()


def test_a_capped_radius_keeps_the_nearest(put):
    """PyG#9036, #9076."""
    x = np.random.default_rng(0).random((512, 2))
    found = geom.radius(put(x), 0.45, y=put([[0.5, 0.5]]), max_neighbors=128)
    square = np.sum((x - 0.5) ** 2, axis=1)
    assert np.count_nonzero(square < 0.45**2) > 128
    assert_close(back(found.indices), np.argsort(square, kind="stable")[:128], exact=True)


def test_every_point_has_k_neighbours(put):
    """PyG#4906."""
    graph = geom.knn_graph(put(np.random.default_rng(0).random((32, 3)), np.float32), 8)
    assert graph.n_edges == 256
    assert_close(back(graph.in_degrees), np.full(32, 8), exact=True)


def test_negative_weights_are_refused_by_name(put):
    """PyG#795, #61; on a GPU too, when weights are first seen or where values are checked."""
    graph, x = graph_of(put, [0, 1], [1, 0], 2), put(np.ones((2, 2), np.float32))
    layer, cheb = geom.GCNConv(2, 2), geom.ChebConv(2, 2, k=2)
    for weight in (put([-3.0, 1.0], np.float32), rx.Tensor(put([-3.0, 1.0], np.float32))):
        with pytest.raises(ValueError, match="end at a node must .* got -2 at node 1"):
            layer(graph, x, weight)
        with pytest.raises(ValueError, match="begin at a node must .* got -3 at node 0"):
            cheb(graph, x, weight)
    for weight in ([np.inf, 1.0], [3e38, 3e38]):
        twice = graph_of(put, [0, 1], [1, 1], 2)
        with pytest.raises(
            ValueError, match="end at a node must .* less than infinity, got inf at node 1"
        ):
            layer(twice, x, put(weight, np.float32))
    weight = rx.Tensor(put([np.nan, 1.0], np.float32), requires_grad=True)
    with rx.testing.check_values(), pytest.raises(ValueError, match="got nan at node 1"):
        layer(graph, x, weight * 2)
    assert layer(graph, x, put([3.0, 1.0], np.float32)).shape == (2, 2)


def test_boundaries_that_do_not_fit_are_refused_by_name(put):
    """Of norms and pooling; values on a GPU where they are checked."""
    x = put(np.ones((6, 2)))
    for make in (geom.GraphNorm, geom.InstanceNorm, geom.GraphLayerNorm):
        assert make(2, **F64)(x, put([0, 2, 6])).shape == (6, 2)
    calls = [geom.PairNorm(), geom.GraphNorm(2, **F64), geom.global_sum, geom.global_max]
    for call in (*calls, geom.Set2Set(2, n_steps=1, **F64)):
        for ptr in ([0, 2.5, 6], [[0, 6]]):
            with pytest.raises(TypeError, match="ptr must be a one-dimensional array of integers"):
                call(x, put(ptr))
        with pytest.raises(ValueError, match="ptr must rise from 0 to the number of nodes, 6"):
            call(x, put([0]))
        for ptr in ([0, 2], [1, 6], [0, 4, 2, 6]):
            with rx.testing.check_values(), pytest.raises(ValueError, match="ptr must rise"):
                call(x, put(ptr))


def test_moments_that_are_no_numbers_are_refused(put):
    graph = graph_of(put, [0, 1], [1, 0], 2, edges={"time": put([1.0, 2.0])})
    sampler = geom.TemporalSampler(graph, [-1])
    for call in (sampler, lambda *args: sampler.bulk(*args, 1)):
        with pytest.raises(ValueError, match="times must not be NaN"):
            call(put([0, 1]), put([3.0, np.nan]))


def test_infinities_are_numbers(put):
    """dgl#2849, #761, #3564."""
    graph = graph_of(put, [0, 1, 2], [0, 0, 1], 3)
    for op, sign in (("max", 1), ("min", -1)):
        x = put(sign * np.array([np.inf, 1.0, -2.0]))
        assert_close(back(geom.aggregate(graph, x, op)), np.array([sign * np.inf, sign * -2, 0]))
        got = geom.aggregate(graph, x, op, empty=7.0)
        assert_close(back(got), np.array([sign * np.inf, sign * -2.0, 7.0]))


def test_no_edge_of_a_relation_is_no_zero(put):
    """dgl#3564."""
    one, two = ("a", "r", "b"), ("b", "s", "b")
    ends = {one: (put([0]), put([0])), two: (put([], np.int64), put([], np.int64))}
    graph = geom.HeteroGraph.from_edges(ends, {"a": 1, "b": 1})

    class Sum(rx.nn.Module):
        def forward(self, graph, x):
            return geom.aggregate(graph, x[0] if isinstance(x, tuple) else x)

    layer = geom.HeteroConv({one: Sum(), two: Sum()}, aggr="max")
    out = layer(graph, {"a": put([[-2.0]]), "b": put([[0.0]])})
    assert_close(back(out["b"]), np.array([[-2.0]]))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_means_of_halves_are_those_of_wide_numbers(kind, put):
    """pytorch_scatter#269: with many more edges than a half type can count."""
    n = 1_000_000
    x = np.random.default_rng(4).standard_normal((n, 1)).astype(getattr(rx, kind))
    graph = graph_of(put, np.arange(n), np.zeros(n), n_src=n, n_dst=1)
    got = back(geom.aggregate(graph, put(x), "mean")).astype(np.float64)
    assert abs(got[0, 0] - x.astype(np.float64).mean()) < 1e-3


@pytest.mark.gpu
def test_more_edges_than_31_bits_count():
    """dgl#7850, #3766, #6585; cupy#9490, #3513: 2283 million edges between few nodes."""
    n_dst, degree, n_src = 1 << 16, 34_836, 1000
    with rx.device("cuda:0"):
        indptr = rx.arange(n_dst + 1, dtype="int64") * degree
        indices = rx.empty(n_dst * degree, dtype="int32")
        for start in range(0, n_dst * degree, 1 << 28):
            stop = min(start + (1 << 28), n_dst * degree)
            indices[start:stop] = rx.arange(start, stop, dtype="int64") % n_src
        graph = geom.Graph(indptr, indices, n_src=n_src)
        assert graph.n_edges == 2_283_012_096 > 2**31
        assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)
        x = rx.arange(n_src, dtype="float32")[:, None] / n_src
        got = back(geom.aggregate(graph, x))[:, 0]
    first = np.arange(n_dst, dtype=np.int64) * degree
    rows = [0, 1, n_dst // 2, n_dst - 1]
    want = [np.sum((first[row] + np.arange(degree)) % n_src / n_src) for row in rows]
    assert_close(got[rows], np.array(want, np.float32), rtol=1e-5)


def test_improved_without_weights(put):
    """PyG's gcn_norm."""
    src, dst = np.array([0, 1, 2, 3, 1, 2, 3, 0]), np.array([1, 2, 3, 0, 0, 1, 2, 3])
    layer = geom.GCNConv(4, 4, improved=True, **F64)
    x, graph = np.random.default_rng(8).standard_normal((4, 4)), graph_of(put, src, dst, 4)
    matrix = 2 * np.eye(4)
    matrix[dst, src] += 1
    want = matrix @ x @ back(layer.lin.weight).T / 4
    assert_close(back(layer(graph, put(x))), want)
    assert_close(back(layer(graph, put(x), put(np.ones(8)))), want)


def test_loops_have_one_rule_for_all_representations(put):
    """PyG's gcn_norm: 5.50 for edge lists, 4.75 for compressed rows."""
    layer = geom.GCNConv(1, 1, bias=False, **F64)
    layer.lin.weight.assign(put([[1.0]]))
    by_rows = geom.Graph(put([0, 2, 3]), put([1, 0, 0]))
    for graph in (graph_of(put, [0, 0, 1], [0, 1, 0], 2), by_rows):
        assert_close(back(layer(graph, put([[1.0], [10.0]]))), np.array([[5.5], [5.5]]))


def test_samples_depend_on_the_node_alone(put):
    """pyg-lib#527, dgl#1110, #5099, cugraph#2761."""
    rng = np.random.default_rng(1)
    graph = graph_of(put, rng.integers(0, 50, 900), rng.integers(0, 50, 900), 50)

    def drawn(seeds):
        sample = geom.NeighborSampler(graph, [5], seed=3)(put(seeds))
        degrees = back(sample.graphs[0].in_degrees)
        ids = np.split(back(sample.edge_ids[0]), np.cumsum(degrees)[:-1])
        return dict(zip(seeds.tolist(), map(sorted, map(np.ndarray.tolist, ids)), strict=True))

    nodes = np.arange(40)
    whole = drawn(nodes)
    assert drawn(nodes[::-1]) == whole
    assert drawn(nodes[:7]) | drawn(nodes[7:]) == whole


def test_seeds_come_first_and_numbers_are_of_the_edges(put):
    """PyG#9924, #10144, #7953."""
    graph = graph_of(put, [2, 0, 1], [1, 2, 0], 3)
    sample = geom.NeighborSampler(graph, [1])(put([2, 0, 2]))
    assert back(sample.nodes)[:3].tolist() == [2, 0, 2]
    assert back(sample.edge_ids[0]).tolist() == [1, 2, 1]


def test_seeds_come_first_among_several_kinds(put):
    """PyG#9924, #10144."""
    one, two = ("a", "r", "b"), ("b", "s", "a")
    ends = {one: (put([1, 0, 2]), put([0, 1, 1])), two: (put([0, 1]), put([2, 0]))}
    graph = geom.HeteroGraph.from_edges(ends, {"a": 3, "b": 2})
    seeds = {"a": put([2, 0, 2]), "b": put([1])}
    sample = geom.HeteroNeighborSampler(graph, [-1, -1])(seeds)
    assert back(sample.nodes["a"])[:3].tolist() == [2, 0, 2]
    assert back(sample.nodes["b"])[:1].tolist() == [1]
    assert {kind: sample.n_seeds[kind] for kind in "ab"} == {"a": 3, "b": 1}


def test_arrays_are_not_told_apart_by_their_length(put):
    """PyG#9912, #3265, #3626, #5818."""
    batch = geom.Batch.from_graphs([graph_of(put, [0], [1], 2)], graph={"y": put([7])})
    assert geom.to_undirected(batch).n_edges == 2
    assert back(batch.graph["y"]).tolist() == [7]


def test_no_negative_pair_is_in_two_parts(put):
    """PyG#10706."""
    path = graph_of(put, [0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2], 4)
    for seed in range(20):
        split = geom.random_link_split(
            path, val=0.4, test=0.4, undirected=True, generator=Generator(seed)
        )
        val, test = (back(part.negative).T.tolist() for part in (split.val, split.test))
        assert len(val) == len(test) == 1
        assert val != test


def test_training_attention_takes_little_memory(put):
    """PyG#527, #459, #2074, #8316: many arrays as large as all messages there."""
    on_gpu = put.device != "cpu"
    n, n_edges, width = (1 << 16, 1 << 20, 128) if on_gpu else (1 << 12, 1 << 18, 64)
    dtype = np.dtype("float16" if on_gpu else "float32")
    rng = np.random.default_rng(2)
    graph = graph_of(put, rng.integers(0, n, n_edges), rng.integers(0, n, n_edges), n)
    layer = geom.GATConv(width, width // 4, heads=4, dtype=dtype)
    x = rx.Tensor(put(rng.standard_normal((n, width)), dtype), requires_grad=True)
    ones = put(np.ones((n, width)), dtype)
    layer(graph, x).backward(ones)  # what graphs keep is made once
    x.grad = None
    layer.zero_grad()
    with rx.memory.peak(put.device) as peak:
        layer(graph, x).backward(ones)
    held = peak.bytes - peak.before
    assert held < n_edges * width * dtype.itemsize
    if on_gpu:
        inputs = x.data.nbytes + ones.nbytes + graph.indptr.nbytes + graph.indices.nbytes
        assert held < 2.5 * inputs  # 1.14 times on a graph of 67 million edges


def test_equal_inputs_give_equal_bits(put):
    """PyG#446, #2788, #3175, #8866; pytorch#23151."""
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, 300, 9000), rng.integers(0, 300, 9000) % 37
    graph = graph_of(put, src, dst, 300)
    x, g = (put(rng.standard_normal((300, 16)), np.float32) for _ in range(2))
    layer = geom.GATConv(16, 4, heads=4, generator=Generator(0))

    def run():
        layer.zero_grad()
        t = rx.Tensor(x, requires_grad=True)
        out = layer(graph, t)
        out.backward(g)
        return [back(a) for a in (out, t.grad, *(p.grad for p in layer.parameters()))]

    first = run()
    for _ in range(20):
        for got, want in zip(run(), first, strict=True):
            assert_close(got, want, exact=True)


def test_variances_do_not_cancel(put):
    """PyG's VarAggregation: 0."""
    graph = graph_of(put, [0, 1, 2], [0, 0, 0], n_src=3, n_dst=1)
    got = geom.aggregate(graph, put([1e4, 1e4 + 1, 1e4 + 2], np.float32), "var")
    assert_close(back(got), np.array([2 / 3], np.float32), rtol=1e-6)


def test_a_group_that_is_masked_out_gets_zeros(put):
    """PyG's softmax: NaN."""
    graph = graph_of(put, [0, 1, 0], [0, 0, 1], 2)
    logits = rx.Tensor(put([-np.inf, -np.inf, 3.0]), requires_grad=True)
    out = geom.edge_softmax(graph, logits)
    assert_close(back(out), np.array([0.0, 0.0, 1.0]), exact=True)
    out.backward(put([1.0, 2.0, 3.0]))
    assert_close(back(logits.grad), np.zeros(3), exact=True)
