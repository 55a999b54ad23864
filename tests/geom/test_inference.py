"""Whole graphs in runs of destinations and in parts: what the layers give at once."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom, nn
from rtxarr.geom._blocks import cut
from rtxarr.random import Generator
from rtxarr.testing import assert_close

N, E = 60, 500


def whole_numbers(module):
    """Give parameters small whole numbers, with which float64 rounds nothing."""
    rng = np.random.default_rng(7)
    for p in module.parameters():
        p.assign(rng.integers(-2, 3, p.shape).astype("float64"))
    return module


@pytest.fixture(params=["ordered", "stored-otherwise", "directed-hub"])
def graph(request):
    """Duplicates, loops, nodes without edges; edges of rows in and out of the numbers' order."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, N - 2, E), rng.integers(0, N - 2, E)
    if request.param == "directed-hub":
        dst[:200] = 3
    edges = {"weight": rng.random(E), "kind": rng.integers(-2, 3, (E, 2)).astype("float64")}
    if request.param == "ordered":
        order = np.argsort(dst, kind="stable")
        src, dst = src[order], dst[order]
    made = geom.Graph.from_edges(src, dst, n_nodes=N, edges=edges)
    if request.param == "stored-otherwise":
        numbers = rng.permutation(E)
        made = geom.Graph(made.indptr, made.indices, edge_ids=numbers, edges=edges)
    return made


F = 6
x64 = np.random.default_rng(2).integers(-3, 4, (N, F)).astype("float64")


def gine():
    lin = nn.Linear(F, F, dtype="float64")
    conv = geom.GINEConv(lin, in_channels=F, edge_channels=2, dtype="float64")
    whole_numbers(conv)
    return lambda g, x: conv(g, x, g.edges["kind"])


LAYERS = {
    "sum": lambda: lambda g, x: g @ x,
    "max": lambda: lambda g, x: geom.aggregate(g, x, "max"),
    "sage": lambda: whole_numbers(geom.SAGEConv(F, F, aggr="sum", dtype="float64")),
    "pool": lambda: whole_numbers(geom.SAGEConv(F, F, aggr="pool", dtype="float64")),
    "gin": lambda: whole_numbers(geom.GINConv(nn.Linear(F, F, dtype="float64"))),
    "weights": lambda: lambda g, x: geom.aggregate(g, x, weight=g.edges["weight"]),
    "gine": lambda: gine(),
}


def two(make):
    first, second = make(), make()
    return [lambda g, x: rx.relu(first(g, x)), second]


def at_once(layers, graph, x):
    with rx.no_grad():
        for layer in layers:
            x = layer(graph, x)
    return rx.Tensor(x).numpy()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("limit", [1, 20 * 2 * 8 * F, 2**30], ids=["rows", "some", "all"])
def test_runs_give_the_same_bits_where_products_round_nothing(graph, name, limit):
    layers = two(LAYERS[name])
    got = geom.infer_layerwise(layers, graph, x64, memory_limit=limit)
    assert_close(got, at_once(layers, graph, x64), exact=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ["ranges", "greedy", "random", "one", "empty"])
def test_parts_give_the_same_bits_where_products_round_nothing(graph, name, method):
    parts = {
        "ranges": lambda: geom.partition(graph, 4, method="ranges"),
        "greedy": lambda: geom.partition(graph, 4),
        "random": lambda: np.random.default_rng(3).integers(0, 5, N),
        "one": lambda: np.zeros(N, dtype=int),
        "empty": lambda: np.where(np.arange(N) < 9, 0, 3),  # nothing in parts 1 and 2
    }[method]()
    layers = two(LAYERS[name])
    got = geom.PartitionedGraph(graph, parts).infer(layers, x64)
    assert_close(got, at_once(layers, graph, x64), exact=True)


CONVS = {
    "gcn": lambda: geom.GCNConv(F, F),
    "gcn-improved": lambda: geom.GCNConv(F, F, improved=True),
    "gcn-without-loops": lambda: geom.GCNConv(F, F, add_self_loops=False),
    "sgc": lambda: geom.SGConv(F, F),
    "gat": lambda: geom.GATConv(F, F // 2, heads=2),
    "gatv2": lambda: geom.GATv2Conv(F, F // 2, heads=2),
    "transformer": lambda: geom.TransformerConv(F, F // 2, heads=2),
    "sage-lstm": lambda: geom.SAGEConv(F, F, aggr="lstm"),
    "graph": lambda: geom.GraphConv(F, F),
    "edge": lambda: geom.EdgeConv(nn.Linear(2 * F, F)),
}


@pytest.mark.parametrize("name", CONVS)
def test_layers_see_the_whole_graph(graph, name):
    layers = two(CONVS[name])
    x = x64.astype("float32")
    want = at_once(layers, graph, x)
    got = geom.infer_layerwise(layers, graph, x, memory_limit=2000)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    got = geom.PartitionedGraph(graph, geom.partition(graph, 3)).infer(layers, x)
    assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_layer_of_several_steps_is_refused(graph):
    for layer in (geom.APPNP(k=2), geom.SGConv(F, F, k=2), geom.ChebConv(F, F, k=3)):
        with pytest.raises(ValueError, match="whose sources are its destinations"):
            geom.infer_layerwise([layer], graph, x64, memory_limit=1)


def test_given_weights_are_normalised_over_the_whole_graph(graph):
    conv = geom.GCNConv(F, F)
    with pytest.raises(ValueError, match="give the weights of gcn_norm"):
        geom.infer_layerwise(
            [lambda g, x: conv(g, x, g.edges["weight"])], graph, x64, memory_limit=1
        )
    normal, weight = geom.gcn_norm(graph, graph.edges["weight"])
    normal = normal.replace(edges={"weight": weight})
    plain = geom.GCNConv(F, F, normalize=False, dtype="float64")
    layers = [lambda g, x: plain(g, x, g.edges["weight"])]
    got = geom.infer_layerwise(layers, normal, x64, memory_limit=1000)
    assert_close(got, at_once(layers, normal, x64))


def test_files_for_features_scratch_and_result(graph, tmp_path):
    layers = two(LAYERS["sage"])
    np.save(tmp_path / "x.npy", x64)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.float64, (N, F))
    got = geom.infer_layerwise(layers, graph, mapped, out=out, scratch=tmp_path, memory_limit=999)
    assert got is out
    assert_close(got, at_once(layers, graph, x64), exact=True)
    assert_close(np.load(tmp_path / "layer-1.npy"), at_once(layers[:1], graph, x64), exact=True)


def test_progress_is_shown(graph, capsys):
    told = []
    layers = two(LAYERS["sum"])
    geom.infer_layerwise(
        layers, graph, x64, memory_limit=2000, progress=lambda *seen: told.append(seen)
    )
    assert told == sorted(told)
    assert [layer for layer, fraction in told if fraction == 1.0] == [0, 1]
    geom.infer_layerwise(layers, graph, x64, progress=True)
    assert capsys.readouterr().err.endswith("\rlayer 2 of 2  100 %\n")


def test_gradients_go_over_the_borders_of_parts(graph):
    conv = geom.GATConv(F, F)
    parts = geom.PartitionedGraph(graph, geom.partition(graph, 3, method="ranges"))

    def gradient(function):
        x = rx.Tensor(x64.astype("float32"), requires_grad=True)
        rx.sum(function(x) ** 2).backward()
        return x.grad

    got = gradient(lambda x: parts.gather(parts.propagate(conv, parts.scatter(x))))
    assert_close(got, gradient(lambda x: conv(graph, x)), rtol=1e-4, atol=1e-5)


def test_another_exchange_has_only_its_own_part(graph):
    """Two processes, played one after the other: what each sends is what the other gets."""
    parts = geom.partition(graph, 2, method="ranges")

    class OneOfTwo:
        n_parts = 2

        def __init__(self, rank):
            self.local, self.sent, self.got = [rank], None, None

        def __call__(self, pieces):
            self.sent = pieces[self.local[0]]
            return {self.local[0]: self.got or [x[:0] for x in self.sent]}

    ranks = [geom.PartitionedGraph(graph, parts, exchange=OneOfTwo(rank)) for rank in (0, 1)]
    rows = [part.scatter(x64) for part in ranks]
    for rank, part in enumerate(ranks):
        piece = {rank: [np.take(rows[rank][rank], s, axis=0) for s in part.shards[rank].sends]}
        part.exchange(piece)
    for rank, part in enumerate(ranks):
        part.exchange.got = [ranks[q].exchange.sent[rank] for q in (0, 1)]
        found = part.propagate(lambda g, x: g @ x, rows[rank])[rank]
        assert_close(found, (graph @ x64)[part.shards[rank].nodes], exact=True)
        with pytest.raises(RuntimeError, match="this process has 1 of 2 parts"):
            part.gather({rank: found})


def test_a_cut_keeps_the_edges_of_its_destinations(graph):
    own = np.array([3, 7, 8, N - 1])
    part = cut(graph, own)
    block = geom.Graph(part.indptr, part.indices, n_src=part.sources.size, edge_ids=part.edge_ids)
    got = set(zip(part.sources[block.src], own[block.dst], part.numbers, strict=True))
    mine = np.isin(graph.dst, own)
    assert got == set(zip(graph.src[mine], graph.dst[mine], np.flatnonzero(mine), strict=True))
    assert (np.diff(part.halo) > 0).all()
    assert (np.diff(part.numbers) > 0).all()


def test_halos_are_sent_by_those_who_own_them(graph):
    parts = geom.partition(graph, 3)
    shards = geom.PartitionedGraph(graph, parts).shards
    for p, shard in shards.items():
        got = np.concatenate([shards[q].nodes[shards[q].sends[p]] for q in shards])
        assert_close(got, shard.halo, exact=True)
        assert not set(shard.halo) & set(shard.nodes)


def test_ranges_are_runs_of_about_the_same_work(graph):
    parts = geom.partition(graph, 4, method="ranges")
    assert (np.diff(parts) >= 0).all()
    work = np.bincount(parts, weights=graph.in_degrees + 1, minlength=4)
    assert work.max() <= (E + N) / 4 + graph.in_degrees.max() + 1
    assert work.sum() == E + N
    nothing = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=0)
    assert geom.partition(nothing, 3, method="ranges").shape == (0,)
    with pytest.raises(ValueError, match="method must be 'greedy' or 'ranges', got 'metis'"):
        geom.partition(graph, 2, method="metis")


def test_what_does_not_fit_is_refused(graph):
    with pytest.raises(ValueError, match="x must be a NumPy array with a row for each of 60"):
        geom.infer_layerwise([], graph, x64[:3])
    with pytest.raises(ValueError, match="a layer must give a row for each of 60 destinations"):
        geom.infer_layerwise([lambda g, x: x[:2]], graph, x64)
    with pytest.raises(ValueError, match="out must be a NumPy array of shape"):
        geom.infer_layerwise([lambda g, x: g @ x], graph, x64, out=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="parts must have an entry for each of 60 nodes"):
        geom.PartitionedGraph(graph, np.zeros(3, int))
    with pytest.raises(TypeError, match="parts must be an array of integers"):
        geom.PartitionedGraph(graph, np.zeros(N))
    with pytest.raises(IndexError, match="parts"):
        geom.PartitionedGraph(graph, np.full(N, -1))
    across = geom.Graph.from_edges(np.array([0]), np.array([0]), n_src=2, n_dst=1)
    with pytest.raises(ValueError, match="sources that are its destinations"):
        geom.infer_layerwise([], across, np.zeros((1, 1)))


def test_no_nodes():
    nothing = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=0)
    layers = [geom.SAGEConv(3, 2)]
    x = np.zeros((0, 3), "float32")
    assert geom.infer_layerwise(layers, nothing, x).shape == (0, 2)
    assert geom.PartitionedGraph(nothing, np.zeros(0, int)).infer(layers, x).shape == (0, 2)


def test_models_with_batch_norm_and_dropout_in_evaluation(graph):
    model = nn.Module()
    model.conv, model.norm = geom.SAGEConv(F, F, dtype="float64"), nn.BatchNorm(F, dtype="float64")
    model.drop = nn.Dropout(0.5, generator=Generator(0))
    model.eval()
    layers = [lambda g, x: model.drop(model.norm(model.conv(g, x)))]
    got = geom.infer_layerwise(layers, graph, x64, memory_limit=2000)
    assert_close(got, at_once(layers, graph, x64))


@pytest.mark.gpu
def test_on_a_gpu(graph):
    layers = two(lambda: geom.GCNConv(F, F, device="cuda:0"))
    x, there = x64.astype("float32"), graph.to_device("cuda:0")
    want = layers[1](there, layers[0](there, _device.to_device(x, "cuda:0"))).numpy()
    got = geom.infer_layerwise(layers, graph, x, device="cuda:0", memory_limit=2000)
    assert isinstance(got, np.ndarray)
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    parts = geom.PartitionedGraph(there, geom.partition(there, 3))
    got = parts.infer(layers, _device.to_device(x, "cuda:0"))
    assert_close(rx.Tensor(got).numpy(), want, rtol=1e-4, atol=1e-4)
    sums = geom.infer_layerwise([lambda g, x: g @ x], there, x, memory_limit=2000)
    assert_close(sums, (there @ _device.to_device(x, "cuda:0")).get(), exact=True)
