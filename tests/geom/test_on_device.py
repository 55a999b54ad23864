"""Samplers and points on a GPU give what they give on the CPU, to the bit."""

import numpy as np
import pytest

from rtxarr import _device, geom
from rtxarr.random import Generator
from rtxarr.testing import assert_close

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


def equal(got, want):
    """Compare arrays and graphs, however deep in tuples and dicts."""
    if isinstance(want, geom.Graph):
        got, want = ((g.indptr, g.indices, g.edge_ids, dict(g.edges)) for g in (got, want))
    if isinstance(want, dict):
        got, want = tuple(got[key] for key in want), tuple(want.values())
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            equal(a, b)
    elif isinstance(want, np.ndarray):
        assert _device.is_device_array(got)
        assert got.dtype == want.dtype
        assert_close(got, want, exact=True)
    else:
        assert got == want


@pytest.fixture
def graph():
    rng = np.random.default_rng(0)
    src = rng.integers(0, 2990, 40_000)
    dst = np.where(rng.random(40_000) < 0.2, 1, rng.integers(0, 2990, 40_000))
    return geom.Graph.from_edges(src, dst, n_nodes=3000)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replace": True},
        {"directional": False},
        {"weight": True},
        {"weight": True, "replace": True},
        {"labor": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_neighbourhoods(graph, options):
    seeds = np.random.default_rng(1).integers(0, 3000, 500)
    options = dict(options)
    kind = geom.LaborSampler if options.pop("labor", False) else geom.NeighborSampler
    if options.pop("weight", False):
        options["weight"] = np.random.default_rng(2).integers(0, 5, 40_000) / 4
    for fanout in ([5, 3], [-1]):
        want = kind(graph, fanout, **options).bulk(seeds, 200, epoch=1)
        if "weight" in options:
            options["weight"] = _device.to_device(options["weight"], GPU)
        sampler = kind(graph.to_device(GPU), fanout, **options)
        equal(sampler.bulk(_device.to_device(seeds, GPU), 200, epoch=1), want)
        if "weight" in options:
            options["weight"] = _device.to_device(options["weight"], "cpu")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_moments(graph, replace, weighted):
    rng = np.random.default_rng(4)
    time, seeds, times = rng.integers(0, 99, 40_000), rng.integers(0, 3000, 300), rng.random(300)
    found, weight = [], rng.integers(0, 5, 40_000) / 4
    for device in (GPU, "cpu"):
        options = {"weight": _device.to_device(weight, device)} if weighted else {}
        sampler = geom.TemporalSampler(
            graph.to_device(device), [5, 3], time=_device.to_device(time, device), replace=replace,
            **options,
        )  # fmt: skip
        given = [_device.to_device(x, device) for x in (seeds, 99 * times)]
        found.append((sampler(*given), sampler.bulk(*given, 64, epoch=1)))
    equal(*found)


def test_walks_parts_and_links(graph):
    moved = graph.to_device(GPU)
    start = np.arange(0, 3000, 7)
    for p, q in ((1.0, 1.0), (0.3, 4.0)):
        want = geom.random_walk(graph, start, 9, p=p, q=q, walks_per_node=2)
        equal(
            geom.random_walk(moved, _device.to_device(start, GPU), 9, p=p, q=q, walks_per_node=2),
            want,
        )
    for method in ("node", "edge", "walk"):
        parts = [geom.SaintSampler(g, 40, method=method)(3) for g in (moved, graph)]
        equal(*parts)
    equal(*(geom.ClusterSampler(g, 5)(1) for g in (moved, graph)))
    edges = np.arange(0, 40_000, 11)
    links = [
        geom.LinkSampler(geom.NeighborSampler(g, [4]), n_negatives=3)(e)
        for g, e in ((moved, _device.to_device(edges, GPU)), (graph, edges))
    ]
    equal(*links)
    bulk = [
        geom.LinkSampler(geom.LaborSampler(g, [4, 2])).bulk(e, 500)
        for g, e in ((moved, _device.to_device(edges, GPU)), (graph, edges))
    ]
    equal(*bulk)


@pytest.mark.parametrize("features", ["host", "pinned", "device"])
def test_loaders(graph, features):
    x = np.random.default_rng(3).random((3000, 6), np.float32)
    seeds = np.arange(0, 3000, 5)
    want = geom.NeighborLoader(
        geom.NeighborSampler(graph, [4, 3]), seeds, 128, nodes={"x": x}, targets={"y": x}
    )
    x = _device.to_device(x, GPU) if features == "device" else x
    sampler = geom.NeighborSampler(graph.to_device(GPU), [4, 3])
    seeds = _device.to_device(seeds, GPU)
    got = geom.NeighborLoader(
        sampler, seeds, 128, nodes={"x": x}, targets={"y": x}, pin=features == "pinned"
    )
    for a, b in zip(got, want, strict=True):
        equal(a, b)


@pytest.mark.parametrize("pin", [False, True])
def test_loaders_of_links_and_kinds(graph, pin):
    x, w = (np.random.default_rng(3).random((n, 6), np.float32) for n in (3000, 40_000))
    edges = np.arange(0, 40_000, 37)
    relation = ("a", "r", "a")
    found = []
    for device in (GPU, "cpu"):
        there = graph.to_device(device)
        sampler = geom.LinkSampler(geom.NeighborSampler(there, [4]), n_negatives=2)
        given = _device.to_device(edges, device)
        one = geom.LinkLoader(sampler, given, 128, nodes={"x": x}, links={"w": w}, pin=pin)
        hetero = geom.HeteroGraph({relation: there}, {"a": 3000})
        weight = {relation: _device.to_device(w[:, 0].astype("f8"), device)} if pin else {}
        sampler = geom.HeteroNeighborSampler(hetero, [4, 3], weight=weight)
        two = geom.HeteroNeighborLoader(
            sampler, "a", given % 3000, 128, nodes={"a": {"x": x}}, targets={"y": x}, pin=pin
        )
        three = sampler.bulk("a", given % 3000, 200)
        parts = [(s.nodes, s.edge_ids, *more) for s, *more in two]
        found.append(([*one], parts, [(s.nodes, s.edge_ids, s.n_seeds) for s in three]))
    equal(*found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n_axes", [1, 2, 3, 8])
def test_points(dtype, n_axes):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4000, n_axes)).astype(dtype)
    x[:300] = np.round(x[:300] * 4) / 4  # ties
    x[300:] /= np.linalg.norm(x[300:], axis=1, keepdims=True) + 1
    y, ptr, y_ptr = x[::5] * 2, np.array([0, 1000, 1000, 4000]), np.array([0, 300, 300, 800])
    arrays = {"x": x, "y": y, "ptr": ptr, "y_ptr": y_ptr}
    there = {name: _device.to_device(a, GPU) for name, a in arrays.items()}
    own = [{"x": part["x"], "ptr": part["ptr"]} for part in (there, arrays)]
    equal(*(geom.knn(**part, k=7) for part in (there, arrays)))
    equal(*(geom.knn_graph(**part, k=7) for part in own))
    for cap in (None, 5):
        equal(*(geom.radius(**part, r=0.2, max_neighbors=cap) for part in (there, arrays)))
        equal(*(geom.radius_graph(**part, r=0.1, max_neighbors=cap) for part in own))
    ptr = np.array([0, 1000, 4000])
    equal(
        geom.farthest_point_sampling(there["x"], 50, ptr=_device.to_device(ptr, GPU)),
        geom.farthest_point_sampling(x, 50, ptr=ptr),
    )
    equal(*(tuple(geom.voxel_grid(**part, size=0.25)) for part in own))


def test_changes_of_clouds_and_distances():
    x = np.random.default_rng(5).normal(size=(500, 3))
    ptr = np.array([0, 200, 500])
    there = [_device.to_device(a, GPU) for a in (x, ptr)]
    for change in (geom.rotate_points, geom.shear_points, geom.scale_points):
        got = change(there[0], Generator(0), ptr=there[1])
        assert_close(got, change(x, Generator(0), ptr=ptr), rtol=1e-12, atol=1e-12)
    for choose in (
        lambda x, ptr: geom.sample_points(x, 20, Generator(0), ptr=ptr),
        lambda x, ptr: geom.drop_points(x, Generator(0), rate=0.4, ptr=ptr),
    ):
        equal(choose(*there), choose(x, ptr))
    assert_close(geom.normalize_points(there[0], ptr=there[1]), geom.normalize_points(x, ptr=ptr))
    got = geom.estimate_normals(there[0], 9, towards=_device.to_device(np.zeros(3), GPU))
    assert_close(got, geom.estimate_normals(x, 9, towards=np.zeros(3)), atol=1e-6)
    turned = x[:, ::-1].copy()
    got = geom.chamfer_distance(there[0], _device.to_device(turned, GPU))
    assert_close(got, geom.chamfer_distance(x, turned))
