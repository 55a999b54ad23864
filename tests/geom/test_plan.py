"""Plans: bytes by hand, memory as measured, slices to the bit."""

import contextlib
import gc
import tracemalloc

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom, nn
from rtxarr.geom import _plan, _trace
from rtxarr.geom._speed import Speed
from rtxarr.testing import assert_close

N, E, F = 4_000, 40_000, 32


@pytest.fixture(autouse=True)
def fixed_speed(monkeypatch):
    """A device with round figures and no cache."""
    monkeypatch.setattr(geom._plan, "speed_of", lambda place: Speed(1e9, 1e12, 0))


@pytest.fixture(scope="module")
def graph():
    rng = np.random.default_rng(0)
    hubs = np.floor(N * rng.random(E) ** 4).astype(int)
    return geom.Graph.from_edges(hubs, rng.integers(0, N, E), n_nodes=N)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bytes_of_a_sum_are_those_of_the_formula(graph, dtype):
    row = F * np.dtype(dtype).itemsize
    (step,) = geom.plan(graph, "sum", F, dtype=dtype).steps
    assert step.most_bytes == E * (4 + row) + (N + 1) * 8 + N * row
    assert step.least_bytes == E * 4 + (N + 1) * 8 + 2 * N * row
    assert step.likely_bytes == step.most_bytes


def test_weights_are_read_once(graph):
    (step,) = geom.plan(graph, "sum", F, weighted=True).steps
    (plain,) = geom.plan(graph, "sum", F).steps
    assert step.name == "weighted_sum"
    assert step.most_bytes - plain.most_bytes == 4 * E


def test_the_backward_pass_of_a_sum_is_a_sum_over_the_graph_turned_round(graph):
    forward, backward = geom.plan(graph, "sum", F, backward=True).steps
    assert (forward.name, forward.is_backward) == ("gather_sum", False)
    assert backward == forward._replace(is_backward=True)


def test_a_cache_keeps_the_rows_of_hubs(graph, monkeypatch):
    row, n_kept = 4 * F, 10
    monkeypatch.setattr(geom._plan, "speed_of", lambda place: Speed(1e9, 1e12, n_kept * row))
    (step,) = geom.plan(graph, "sum", F).steps
    kept = np.sort(np.bincount(graph.src, minlength=N))[-n_kept:].sum()
    assert step.most_bytes - step.likely_bytes == (kept - n_kept) * row
    monkeypatch.setattr(geom._plan, "speed_of", lambda place: Speed(1e9, 1e12, 2 * N * row))
    (step,) = geom.plan(graph, "sum", F).steps
    assert step.likely_bytes == step.least_bytes


def test_times_are_bytes_over_the_bandwidth(graph):
    plan = geom.plan(graph, "max", F, backward=True)
    most = sum(step.most_bytes for step in plan.steps)
    assert plan.most_seconds == pytest.approx(most / 1e9)
    assert plan.least_seconds < plan.seconds == pytest.approx(plan.most_seconds)  # without a cache


def test_a_gcn_aggregates_after_the_product_that_makes_rows_shorter(graph):
    plan = geom.plan(graph, geom.GCNConv(F, 8), F)
    edges = next(step for step in plan.steps if step.name == "weighted_sum")
    assert edges.width == 8
    assert any(step.name == "products" for step in plan.steps)
    plan = geom.plan(graph, geom.GCNConv(8, F), 8)
    assert next(step for step in plan.steps if step.name == "weighted_sum").width == 8


def works():
    return [
        *("sum", "mean", "max", "var", "std"),
        geom.GCNConv(F, 16),
        geom.SAGEConv(F, 16),
        geom.SAGEConv(F, 16, aggr="max"),
        geom.GATConv(F, 8, heads=4),
        geom.GATv2Conv(F, 8, heads=4),
        geom.TransformerConv(F, 8, heads=4),
        geom.GINConv(nn.Linear(F, F)),
    ]


def runner(graph, work, x, backward):
    """Give a function that does the work, and its gradients."""

    def run():
        with contextlib.nullcontext() if backward else rx.no_grad():
            t = rx.Tensor(x, requires_grad=backward)
            y = geom.aggregate(graph, t, work) if isinstance(work, str) else work(graph, t)
            if backward:
                rx.sum(y).backward()

    return run


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("work", works(), ids=lambda work: str(work).split("(")[0])
def test_the_peak_is_near_the_measured_one(graph, work, backward):
    x = np.random.default_rng(1).standard_normal((N, F)).astype("float32")
    run = runner(graph, work, x, backward)

    def measure():
        tracemalloc.start()
        try:
            run()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    run()  # what is kept with the graph
    plan = geom.plan(graph, work, F, backward=backward)
    assert 0.7 * measure() < plan.peak_bytes - plan.kept_bytes < 1.6 * measure()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("i", range(len(works())), ids=lambda i: str(works()[i]).split("(")[0])
def test_the_peak_is_within_twice_the_measured_one_of_a_gpu(i, backward):
    held, planned = held_on_gpu(i, backward)
    assert 0.49 * held < planned.peak_bytes - planned.kept_bytes < 2 * held


def held_on_gpu(i, backward, n=1 << 17):
    """Give what a call holds at most, when what stays with the graph is there, and the plan."""
    rng = np.random.default_rng(0)
    ends = (
        np.floor(n * rng.random(16 * n) ** 4).astype("int32"),
        rng.integers(0, n, 16 * n, "int32"),
    )
    with rx.device("cuda:0"):
        work = works()[i]  # its parameters are there
        src, dst = (rx.asarray(x, device="cuda:0") for x in ends)
        graph = geom.Graph.from_edges(src, dst, n_nodes=n)
        x = rx.asarray(rng.standard_normal((n, F), "float32"), device="cuda:0")
        run = runner(graph, work, x, backward)
        run()
        gc.collect()
        with rx.memory.peak("cuda:0") as peak:
            run()
        planned = geom.plan(graph, work, F, backward=backward)
    return peak.bytes - peak.before, planned


@pytest.mark.parametrize("op", ["sum", "mean", "max", "std", "median", "softmax"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_slices_give_the_same_bits(graph, op, weighted):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((N, F)).astype("float32")
    weight = rng.standard_normal(E).astype("float32") if weighted else None
    whole = geom.aggregate(graph, x, op, weight=weight)
    for n_slices in (2, 3, F, 10 * F):
        part = geom.aggregate(graph, x, op, weight=weight, n_slices=n_slices)
        assert_close(part, whole, exact=True)


def test_an_operation_over_the_limit_is_done_in_slices_with_the_same_bits(graph):
    x = np.random.default_rng(3).standard_normal((N, F))
    free = geom.plan(graph, "std", F, dtype="float64")
    assert (free.n_slices, free.fits) == (1, True)
    limited = geom.plan(graph, "std", F, dtype="float64", memory_limit=free.peak_bytes // 2)
    assert limited.n_slices > 1
    assert limited.fits
    assert_close(limited(x), free(x), exact=True)
    # The index is read once for each slice.
    assert sum(s.least_bytes for s in limited.steps) > sum(s.least_bytes for s in free.steps)


def test_gradients_go_through_slices(graph):
    def of(n_slices):
        x = rx.Tensor(np.random.default_rng(4).standard_normal((N, 5)), requires_grad=True)
        rx.sum(geom.aggregate(graph, x, "max", n_slices=n_slices) ** 2).backward()
        return x.grad

    assert_close(of(3), of(1), exact=True)


def test_from_the_host_only_slices_are_on_the_device(graph):
    x = np.random.default_rng(5).standard_normal((N, F)).astype("float32")
    limit = geom.plan(graph, "mean", F, from_host=True).peak_bytes // 2
    planned = geom.plan(graph, "mean", F, memory_limit=limit, from_host=True)
    assert planned.n_slices > 1
    assert planned.fits
    assert_close(planned(x), geom.aggregate(graph, x, "mean"), exact=True)


def test_a_limit_below_one_feature_is_refused(graph):
    with pytest.raises(ValueError, match="bytes of one feature at a time, got 1000"):
        geom.plan(graph, "sum", F, memory_limit=1000)


def test_a_layer_over_the_limit_says_so(graph):
    plan = geom.plan(graph, geom.GCNConv(F, 8), F, memory_limit=1000)
    assert not plan.fits
    assert "over the limit of 1,000 B" in repr(plan)
    with pytest.raises(ValueError, match="only plans of operations can be called"):
        plan(np.zeros((N, F)))


def test_planning_changes_nothing(graph):
    layer = geom.GINConv(nn.Sequential(nn.Linear(F, F), nn.BatchNorm(F), nn.Dropout(0.5)))
    before = {name: x.copy() for name, x in layer.state_dict().items()}
    drawn = rx.random.default_generator().state_dict()
    geom.plan(graph, layer, F, backward=True)
    assert layer.training
    assert rx.random.default_generator().state_dict() == drawn
    for name, x in layer.state_dict().items():
        assert_close(x, before[name], exact=True)
    assert all(p.grad is None for p in layer.parameters())


def test_models_and_functions_are_planned(graph):
    conv = geom.GCNConv(F, F)
    twice = geom.plan(graph, lambda graph, x: conv(graph, conv(graph, x)), F)
    assert sum(step.name == "weighted_sum" for step in twice.steps) == 2
    edges = geom.plan(graph, geom.GATConv(F, 8, edge_channels=5), F, edge_channels=5)
    assert edges.seconds > 0


def test_messages_are_counted_as_made_in_runs(graph):
    layer = geom.EdgeConv(nn.Linear(2 * F, 8))
    plan = geom.plan(graph, layer, F, backward=True)
    assert {"messages", "products"} <= {step.name for step in plan.steps}


def test_the_table_has_a_line_for_each_step(graph):
    plan = geom.plan(graph, "sum", 128)
    assert repr(plan).splitlines()[0] == (
        "'sum' over 128 features of float32 on Graph(4000 nodes, 40000 edges)"
    )
    assert "gather_sum" in repr(plan)
    assert "moving the bytes takes" in repr(plan) and "ms at 1 GB/s of cpu" in repr(plan)


def test_a_plan_needs_a_known_operation_and_a_square_graph(graph):
    with pytest.raises(ValueError, match="op must be one of"):
        geom.plan(graph, "total", F)
    across = geom.Graph.from_edges(np.array([0]), np.array([0]), n_src=2, n_dst=1)
    with pytest.raises(ValueError, match="sources that are its destinations"):
        geom.plan(across, "sum", F)
    with pytest.raises(ValueError, match="cannot be given both"):
        geom.plan(graph, "sum", F, weighted=True, edge_channels=2)
    with pytest.raises(ValueError, match="for operations, without backward"):
        geom.plan(graph, "sum", F, backward=True, from_host=True)


def test_an_empty_graph_costs_nothing():
    nothing = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=0)
    plan = geom.plan(nothing, "sum", F)
    assert plan.steps[0].most_bytes == 8


def test_the_speed_of_the_cpu_is_measured_once():
    from rtxarr._device import device
    from rtxarr.geom._speed import speed_of

    first = speed_of(device("cpu"))
    assert first is speed_of(device("cpu"))
    assert 1e8 < first.bandwidth < 1e13
    assert 1e8 < first.flops < 1e15


def test_attention_goes_over_the_edges_twice_in_its_gradient():
    """Once by destinations and once by sources; of the weights nothing is kept."""
    n, e = 1000, 9000
    node, head = (_trace.Held("", shape, 2, "nodes") for shape in [(n, 4, 8), (n, 4)])
    arrays = [node._replace(name="values"), node._replace(name="dst")]
    forward = _trace.Step("mlp_attention", False, False, True, tuple(arrays), (node, head))
    by_dst, by_src = _trace.passes_back(forward)
    assert [x.name for x in by_dst.arrays] == ["values", "dst", "own", "own", "own"]
    assert [x.name for x in by_src.arrays] == ["own", "grad", "found", "found", "theirs"]
    assert [x.name for x in (*by_dst.outputs, *by_src.outputs)] == ["dst", "", "", "values"]
    graph = geom.Graph.from_edges(np.arange(e) % n, np.arange(e) // 9, n_nodes=n)
    speed = Speed(1e9, 1e9, 0)
    plans = _plan._planned(graph, [by_dst, by_src], speed, 1)
    gathered = [step.most_bytes - step.least_bytes for step in plans]
    assert gathered == [(e - n) * 64, (e - n) * (64 + 64 + 8 + 8)]


def test_what_a_backward_pass_makes_of_edges_is_not_kept_with_the_graph(graph):
    planned = geom.plan(graph, geom.GATConv(F, 8, heads=4, add_self_loops=False), F, backward=True)
    assert planned.kept_bytes == E * (4 + 8) + 8 * (N + 1)  # the graph turned round
    planned = geom.plan(graph, "sum", F, weighted=True, backward=True)
    assert planned.kept_bytes == E * (4 + 8) + 8 * (N + 1)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float16", 4), ("float32", 4), ("float64", 8)])
@pytest.mark.parametrize("on_host", [True, False], ids=["cpu", "gpu"])
def test_a_variance_holds_the_means(graph, on_host, dtype, itemsize, monkeypatch):
    meter = _trace._Meter(graph, {N: (N, "nodes"), E: (E, "edges")}, graph.indptr)
    monkeypatch.setattr(meter, "_on_host", on_host)
    x = _trace.Held("x", (N, F), np.dtype(dtype).itemsize, "nodes")
    steps = [_trace.Step(n, False, False, True, (x,), (x,)) for n in ("gather_var", "edge_dot")]
    means, others = map(meter._extra, steps)
    if on_host:  # chunks of messages in both
        assert means >= N * F * itemsize
    else:
        assert (means, others) == (N * F * itemsize, 0)


def test_a_plan_keeps_nothing_alive(graph):
    def alive():
        gc.collect()
        return rx.memory.report(device="cpu").by_operation()

    before = alive()
    geom.plan(graph, geom.GATConv(F, 8), F, backward=True)
    with pytest.raises(KeyError):
        geom.plan(graph, lambda graph, x: {}[rx.sum(rx.exp(x))], F)
    assert alive() == before


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("mul", {"cpu": "runs of destinations", "cuda:0": "products of segments"}),
        ("median", {"cpu": "runs of destinations", "cuda:0": "ranks in segments"}),
        ("max", {"cpu": "rows side by side (NumPy)", "cuda:0": "rows by their degrees"}),
        ("var", {"cpu": "chunks of edges", "cuda:0": "rows by their degrees, twice"}),
    ],
)
def test_kernels_have_their_names(graph, op, names, device):
    steps = geom.plan(graph.to_device(device), op, F, backward=op != "mul").steps
    assert steps[0].kernel == names[device]
    if device != "cpu":
        assert "array functions" not in {step.kernel for step in steps}
        assert geom.plan(graph.to_device(device), "mean", F, backward=True).steps[1].kernel == (
            "rows by their degrees"
        )


@pytest.mark.parametrize("op", ["mul", "median", "max", "mean", "var"])
def test_a_gpu_runs_no_array_functions_for_operations_with_kernels(graph, op, monkeypatch):
    steps = geom.plan(graph, op, F, backward=True).steps
    monkeypatch.setattr(_plan._device, "is_device_array", lambda x: True)
    own = [step.name for step in steps if step.name not in ("messages", "others")]
    assert "array functions" not in {_plan._kernel(name, graph) for name in own}
