"""Neighbours in space against plain searches, and what is made of them."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

import rtxarr as rx
from rtxarr import geom
from rtxarr.testing import assert_close, gradcheck


def squares(x, y):
    """Give squared distances, added in the order of the axes."""
    total = np.zeros((len(y), len(x)), x.dtype)
    for axis in range(x.shape[1]):
        difference = y[:, None, axis] - x[None, :, axis]
        total = total + difference * difference
    return total


def nearest(x, y, k, others=False):
    d = squares(x, y)
    if others:
        np.fill_diagonal(d, np.inf)
    order = np.argsort(d, axis=1, kind="stable")[:, :k]
    return order, np.sqrt(np.take_along_axis(d, order, 1))


rng = np.random.default_rng(3)
CLOUDS = {
    "ball": rng.normal(size=(700, 3)),
    "line": rng.random((300, 1)),
    "plane": rng.random((400, 2)) * [100, 1],
    "lattice": np.stack(np.meshgrid(*[np.arange(7.0)] * 3), -1).reshape(-1, 3),  # all ties
    "equal": np.ones((150, 3)),
    "flat": rng.random((500, 3)) * [1, 1, 0],
    "thin": rng.random((500, 3)) * [1, 1, 1e-6],
    "far": rng.random((300, 3)) + 1e5,
    "clustered": np.concatenate([rng.random((300, 3)) * 1e-3, rng.random((30, 3))]),
    "outlier": np.concatenate([rng.random((300, 3)), [[1e6, 0, 0]]]),
    "scales": rng.normal(size=(400, 3)) * 10.0 ** rng.uniform(-8, 8, size=(400, 1)),
    "tiny": rng.random((200, 3)) * 1e-30,  # squares that float32 does not hold
    "many-axes": rng.normal(size=(150, 9)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CLOUDS)
def test_neighbours_are_exact(name, dtype):
    x = CLOUDS[name].astype(dtype)
    for k in (1, 9):
        for loops in (True, False):
            indices, distances = nearest(x, x, k, not loops)
            got = geom.knn(x, k, loops=loops)
            assert_close(got.indices, indices, exact=True)
            assert_close(got.distances, distances, exact=True)
    y = (x[::3] + x[:1] * 2).astype(dtype)  # many of them outside the cloud
    indices, distances = nearest(x, y, 5)
    got = geom.knn(x, 5, y=y)
    assert_close(got.indices, indices, exact=True)
    assert_close(got.distances, distances, exact=True)


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("cap", [None, 3, 40])
def test_points_within_a_radius_are_exact(name, cap):
    x = CLOUDS[name].astype("float32")
    d = squares(x, x)
    for r in (0.0, float(np.sqrt(np.median(d)) / 3), float(np.sqrt(d.max()))):
        got = geom.radius(x, r, max_neighbors=cap, loops=False)
        limit = np.float32(r) * np.float32(r)
        order, distances = nearest(x, x, len(x), True)
        inside = np.take_along_axis(d, order, 1) <= limit
        inside[:, -1] = False  # itself, moved to the end
        if cap is not None:
            inside &= np.arange(len(x)) < cap
        assert_close(np.diff(got.indptr), inside.sum(1), exact=True)
        assert_close(got.indices, order[inside], exact=True)
        assert_close(got.distances, distances[inside], exact=True)


def test_agrees_with_a_tree_on_many_points():
    x = np.random.default_rng(0).random((20_000, 3))
    distances, indices = cKDTree(x).query(x, 8)
    got = geom.knn(x, 8)
    assert_close(got.indices, indices, exact=True)
    assert_close(got.distances, distances)
    pairs = cKDTree(x).query_pairs(0.02, output_type="ndarray")
    graph = geom.radius_graph(x, 0.02)
    want = np.sort(np.concatenate([pairs, pairs[:, ::-1]]) @ [20_000, 1])
    assert_close(np.sort(graph.src * 20_000 + graph.dst), want, exact=True)


def test_clouds_are_searched_by_themselves():
    generator = np.random.default_rng(5)
    x, y = generator.random((900, 3)), generator.random((50, 3))
    ptr, y_ptr = np.array([0, 400, 400, 410, 900]), np.array([0, 20, 20, 50, 50])
    got = geom.knn(x, 4, y=y, ptr=ptr, y_ptr=y_ptr)
    within = geom.radius(x, 0.2, ptr=ptr)
    for cloud in range(4):
        part, mine = slice(*ptr[cloud : cloud + 2]), slice(*y_ptr[cloud : cloud + 2])
        if y[mine].size:
            indices, _ = nearest(x[part], y[mine], 4)
            assert_close(got.indices[mine], indices + ptr[cloud], exact=True)
        alone = geom.radius(x[part], 0.2)
        begin, end = within.indptr[ptr[cloud]], within.indptr[ptr[cloud + 1]]
        assert_close(within.indices[begin:end], alone.indices + ptr[cloud], exact=True)


@pytest.mark.parametrize("scale", [1e2, 1e6])
def test_queries_may_be_far_away(scale):
    x = CLOUDS["ball"].astype("float32")
    y = (CLOUDS["ball"][::5] * scale).astype("float32")
    indices, distances = nearest(x, y, 6)
    got = geom.knn(x, 6, y=y)
    assert_close(got.indices, indices, exact=True)
    assert_close(got.distances, distances, exact=True)


def test_order_of_points_does_not_matter():
    x = CLOUDS["ball"]
    order = np.random.default_rng(1).permutation(len(x))
    turned = geom.knn(x[order], 6).indices
    assert_close(order[turned], geom.knn(x, 6).indices[order], exact=True)


def test_capped_radius_keeps_the_nearest():
    """PyG 9036 and 9076: the CPU kept one quadrant and the GPU another set."""
    x = np.random.default_rng(0).random((512, 2)).astype("float32")
    y = np.full((1, 2), 0.5, "float32")
    got = geom.radius(x, 0.45, y=y, max_neighbors=128)
    assert_close(got.indices, nearest(x, y, 128)[0][0], exact=True)


def test_graphs_have_k_edges_a_point():
    """PyG 4906: some points got fewer than k."""
    x = np.random.default_rng(0).random((32, 3)).astype("float32")
    graph = geom.knn_graph(x, 8)
    assert graph.n_edges == 256
    assert_close(graph.in_degrees, np.full(32, 8), exact=True)
    assert np.all(graph.src != graph.dst)
    assert graph.indices.dtype == np.int32
    assert_close(graph.edges["distance"], np.linalg.norm(x[graph.src] - x[graph.dst], axis=1))
    between = geom.knn_graph(x, 2, y=x[:5])
    assert (between.n_src, between.n_dst, between.n_edges) == (32, 5, 10)


def test_few_points():
    none, one = np.zeros((0, 3)), np.zeros((1, 3))
    assert geom.knn(none, 2).indices.shape == (0, 2)
    assert geom.radius(none, 1.0).indptr.tolist() == [0]
    assert geom.knn(one, 1).indices.tolist() == [[0]]
    assert geom.radius_graph(one, 1.0).n_edges == 0
    assert geom.radius(one, 0.0, max_neighbors=5).indices.tolist() == [0]
    assert geom.knn(one, 1, y=none).indices.shape == (0, 1)
    assert geom.radius(none, 1.0, y=one).indptr.tolist() == [0, 0]


@pytest.mark.skip_xp("dask.array", reason="a search looks at its points")
@pytest.mark.parametrize("name", ["ball", "line", "many-axes"])
def test_takes_arrays_of_any_library(xp, name):
    x, ptr = CLOUDS[name][:150], np.array([0, 70, 150])
    there = {"x": xp.asarray(x), "ptr": xp.asarray(ptr)}
    for function, options in (
        (geom.knn, {"k": 4}),
        (geom.radius, {"r": 0.3}),
        (geom.radius, {"r": 0.3, "max_neighbors": 2}),
        (geom.farthest_point_sampling, {"n": 9}),
        (geom.voxel_grid, {"size": 0.4}),
    ):
        got, want = function(**there, **options), function(x, ptr=ptr, **options)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, exact=True)


def test_half_types_are_widened():
    x = CLOUDS["ball"].astype("float16")
    got = geom.knn(x, 3)
    assert got.distances.dtype == np.float32
    assert_close(got.indices, geom.knn(x.astype("float32"), 3).indices, exact=True)


def test_refuses():
    x = np.random.default_rng(0).random((10, 3))
    bad = x.copy()
    bad[4, 1] = np.nan
    with pytest.raises(ValueError, match="finite coordinates, got .* at point 4"):
        geom.knn(bad, 2)
    bad[4, 1] = np.inf
    with pytest.raises(ValueError, match="y must have finite coordinates"):
        geom.radius(x, 1.0, y=bad)
    with pytest.raises(ValueError, match="k must be at most 10, the number of points that cloud 0"):
        geom.knn(x, 11)
    with pytest.raises(ValueError, match="k must be at most 9, .* beside each, got 10"):
        geom.knn(x, 10, loops=False)
    with pytest.raises(ValueError, match="k must be at most 1, the number of points that cloud 1"):
        geom.knn(x, 2, ptr=np.array([0, 9, 10]))
    with pytest.raises(ValueError, match="k must lie in"):
        geom.knn(x, 0)
    with pytest.raises(ValueError, match="ptr must rise from 0 to the number of points, 10"):
        geom.knn(x, 1, ptr=np.array([0, 9]))
    with pytest.raises(ValueError, match="ptr must rise"):
        geom.knn(x, 1, ptr=np.array([0, 6, 4, 10]))
    with pytest.raises(ValueError, match="given together"):
        geom.knn(x, 1, y=x, ptr=np.array([0, 10]))
    with pytest.raises(ValueError, match="y must be float64 with 3 axes"):
        geom.knn(x, 1, y=x[:, :2])
    with pytest.raises(TypeError, match="array of floats"):
        geom.knn(x.astype(int), 1)
    with pytest.raises(ValueError, match="r must be finite and not negative, got -1"):
        geom.radius(x, -1)


# ------------------------------------------------------------------------- fewer points, surfaces


def test_far_points_are_those_of_the_plain_algorithm():
    x = CLOUDS["ball"]
    ptr = np.array([0, 300, 700])
    got = geom.farthest_point_sampling(x, 20, ptr=ptr, start=np.array([7, 0])).reshape(2, 20)
    for cloud, first in enumerate((7, 0)):
        part = x[ptr[cloud] : ptr[cloud + 1]]
        chosen = [first]
        while len(chosen) < 20:
            chosen.append(int(np.argmax(squares(part[chosen], part).min(1))))
        assert_close(got[cloud] - ptr[cloud], np.array(chosen), exact=True)


def test_far_points_are_all_different():
    got = geom.farthest_point_sampling(np.ones((5, 3)), 5)
    assert sorted(got.tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="n must be at most 2, the number of points of cloud 1"):
        geom.farthest_point_sampling(np.ones((5, 3)), 3, ptr=np.array([0, 3, 5]))
    with pytest.raises(ValueError, match="start must be a point of each of 1 clouds"):
        geom.farthest_point_sampling(np.ones((5, 3)), 3, start=np.array([5]))


def test_voxels_number_the_cubes_with_points():
    x = np.array([[0.2, 0.2], [1.7, 0.1], [0.9, 0.9], [0.3, -0.1], [0.2, 0.2]])
    got = geom.voxel_grid(x, 1.0)
    assert got.ids.tolist() == [1, 2, 1, 0, 1]
    assert got.ptr.tolist() == [0, 3]
    clouds = geom.voxel_grid(x, 1.0, ptr=np.array([0, 2, 2, 5]))
    assert clouds.ids.tolist() == [0, 1, 3, 2, 3]
    assert clouds.ptr.tolist() == [0, 2, 2, 4]
    assert geom.voxel_grid(np.zeros((0, 3)), 1.0).ptr.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"fewer than 2\*\*63 cubes"):
        geom.voxel_grid(np.array([[0.0] * 3, [1.0] * 3]), 1e-10)


def test_normals_of_a_sphere():
    x = np.random.default_rng(2).normal(size=(2000, 3))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    inward = geom.estimate_normals(x, 12, towards=np.zeros(3))
    assert np.all(np.sum(inward * x, axis=1) < -0.97)
    assert_close(np.linalg.norm(inward, axis=1), np.ones(2000))
    upward = geom.estimate_normals(x, 12)
    assert np.all(upward[np.arange(2000), np.argmax(np.abs(upward), axis=1)] > 0)


def test_chamfer_distance_is_that_of_the_formula_and_differentiable():
    generator = np.random.default_rng(4)
    x, y = generator.normal(size=(6, 3)), generator.normal(size=(9, 3))
    d = squares(x, y)
    assert_close(geom.chamfer_distance(x, y), d.min(0).mean() + d.min(1).mean())
    gradcheck(geom.chamfer_distance, (x, y))
    ptr, y_ptr = np.array([0, 2, 6]), np.array([0, 5, 9])
    got = geom.chamfer_distance(x, y, ptr=ptr, y_ptr=y_ptr)
    parts = [geom.chamfer_distance(x[:2], y[:5]), geom.chamfer_distance(x[2:], y[5:])]
    assert_close(got, np.array(parts))
    gradcheck(lambda x, y: geom.chamfer_distance(x, y, ptr=ptr, y_ptr=y_ptr), (x, y))
    assert isinstance(geom.chamfer_distance(rx.Tensor(x, requires_grad=True), y), rx.Tensor)
    with pytest.raises(ValueError, match="x must have points, got none in cloud 0"):
        geom.chamfer_distance(x[:0], y)
    with pytest.raises(ValueError, match="y must have points, got none in cloud 1"):
        geom.chamfer_distance(x, y, ptr=ptr, y_ptr=np.array([0, 9, 9]))
    with pytest.raises(TypeError, match="y must be an array of floats"):
        geom.chamfer_distance(x, [[1.0]])
