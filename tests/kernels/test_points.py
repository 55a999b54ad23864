"""Neighbours in space: GPU code against numba's CPU code, to the bit."""

import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import _points_gpu, points
from rtxarr.kernels._points_tree import build_tree
from rtxarr.testing import assert_close

DTYPES = ["float32", "float64"]


@pytest.fixture
def both(place, monkeypatch):
    """Give a function that calls another on the host and where kernels run."""
    if place == "cpu":
        monkeypatch.setattr(_points_gpu, "_FEW", 2)

    def moved(x):
        return _device.to_device(x, place) if isinstance(x, np.ndarray) else x

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(points, "runs_kernels", lambda x: False)
            want = function(*arguments, **options)
        got = function(*map(moved, arguments), **options)
        return want, got

    return call


def equal(want, got):
    assert want.dtype == got.dtype
    assert_close(_device.to_device(got, "cpu"), want, exact=True)


def cloud(place, dtype, n_axes, seed=0):
    """Give points of three clouds, some of which coincide, and one cloud without any."""
    rng = np.random.default_rng(seed)
    n = 16 if place == "cpu" else 3000
    x = rng.normal(size=(n, n_axes))
    x[1::5] = x[::5][: x[1::5].shape[0]]
    ptr = np.array([0, n // 2, n // 2, n - 5, n])
    return x.astype(dtype), ptr, np.repeat(np.arange(4), np.diff(ptr))


def prepare(x, batches, y, y_batches, n_batches, k, r):
    xp = _device.namespace(x)
    ptr = xp.searchsorted(batches, xp.arange(n_batches + 1))
    return points.prepare(x, batches, ptr, points.ends(x), y, y_batches, k=k, r=r)


def nearest(x, batches, y, y_batches, n_batches, k, r=None, **options):
    search = prepare(x, batches, y, y_batches, n_batches, k, r)
    limit = np.inf if r is None else r * r
    counts, distances, indices = points.nearest(search, k, limit=limit, **options)
    found = np.arange(k) < _device.to_device(counts, "cpu")[:, None]
    return counts, *(_device.to_device(a, "cpu")[found] for a in (distances, indices))


def all_within(x, batches, y, y_batches, n_batches, r, **options):
    search = prepare(x, batches, y, y_batches, n_batches, None, r)
    return points.all_within(search, r * r, **options)


def same(found):
    for want, got in zip(*found, strict=True):
        equal(want, got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_axes", [1, 2, 3, 5])
def test_neighbours_are_those_of_the_host(place, both, dtype, n_axes):
    x, _, batches = cloud(place, dtype, n_axes)
    for others in (False, True):
        own = x, batches, x, batches, 4
        same(both(nearest, *own, 6, others=others))
        same(both(all_within, *own, 0.9, others=others))
    y = (2 * x[::3] - x[:1]).astype(dtype)  # many of them outside
    same(both(nearest, x, batches, y, batches[::3].copy(), 4, 3, others=False))
    same(both(all_within, x, batches, y, batches[::3].copy(), 4, 0.5, others=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_many_points(place, both, dtype):
    n = 400 if place == "cpu" else 100_000
    x = np.random.default_rng(0).random((n, 3)).astype(dtype)
    step = n // 9
    y = x[::step].copy()
    batches = np.repeat([0, 1, 2], [n // 5, n // 2, n - n // 5 - n // 2])
    for of in (np.zeros(n, np.int64), batches):
        there = x, of, y, of[::step].copy(), 3
        same(both(nearest, *there, 3, others=False))
        same(both(all_within, *there, 0.1, others=False))


SHAPES = {
    "equal": lambda rng, n: np.ones((n, 3)),
    "lattice": lambda rng, n: rng.integers(0, 3, (n, 3)),  # ties and duplicates
    "flat": lambda rng, n: rng.random((n, 3)) * [1, 0, 1],
    "outlier": lambda rng, n: np.concatenate([rng.random((n - 1, 3)), [[1e6, 0, 0]]]),
    "far": lambda rng, n: rng.random((n, 3)) + 1e4,
    "large": lambda rng, n: rng.random((n, 3)) * 1e30,  # squares overflow
    "small": lambda rng, n: rng.random((n, 3)) * 1e-30,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_neighbours_are_those_of_the_host_whatever_the_shape(place, both, dtype, shape):
    n = 14 if place == "cpu" else 2000
    x = SHAPES[shape](np.random.default_rng(1), n).astype(dtype)
    batches = np.zeros(n, np.int64)
    own = x, batches, x, batches, 1
    same(both(nearest, *own, 5, others=True))
    y = x + (x - x[:1]) * x.dtype.type(1e3)
    same(both(nearest, x, batches, y, batches, 1, 2, others=False))
    r = min(float(np.ptp(x, axis=0).max()) / 8, 1e19)
    same(both(all_within, *own, r, others=False))


@pytest.mark.parametrize("numbers", [[0, 700, 1399], [3000]], ids=["lowest", "beside"])
def test_of_points_in_one_place_few_are_looked_at(numbers):
    """Those with the lowest numbers are the nearest, and boxes know the lowest below them."""
    host, k = pytest.importorskip("rtxarr.kernels._points_njit"), 16

    @_device.njit
    def insert(d, place, count, keep):
        keep[5][-1] += 1
        return host._insert(d, place, count, keep)

    walk = host._searcher("counted", insert, host._worst_kept, host._nearer)
    x = np.ones((4096, 3), np.float32)
    x[1400:] = 2
    batches = np.zeros(x.shape[0], np.int64)
    tree = build_tree(x, batches, 1, (x.min(axis=0), x.max(axis=0)))
    sides = tree.points, tree.boxes, tree.n_leaves, tree.highest
    for number in numbers:
        best_d, best_i = np.empty(k, np.float32), np.zeros(k + 1, np.int64)
        keep = -1, np.float32(np.inf), k, 0, best_d, best_i, tree.order
        query = (*x[number], np.float32(0))
        near = int(np.flatnonzero(tree.order == number)[0])
        assert walk(query, 0, x.shape[0], near, sides, 0, keep) == k
        first = 0 if number < 1400 else 1400
        assert best_i[:-1].tolist() == list(range(first, first + k))
        assert best_i[-1] < 400  # of 1400 or 2696


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_axes", [3, 4])
@pytest.mark.parametrize("k", [1, 4, 5, 9, 11, 30])
def test_lists_of_any_length(place, both, monkeypatch, dtype, n_axes, k):
    """Long ones take several searches, each for what comes after that before."""
    x, _, batches = cloud(place, dtype, n_axes)
    monkeypatch.setattr(_points_gpu, "_LENGTHS", (1, 4, 8))
    own = x, batches, x, batches, 4
    same(both(nearest, *own, k, others=True))
    same(both(nearest, *own, k, 1.0, others=False))
    same(both(all_within, *own, 0.3, others=True))  # some have more than a list


CLUSTERS = {  # of different density: cells have from none to nearly all of the points
    "clusters": lambda rng, n: rng.normal(size=(n, 3)) * 10.0 ** -rng.integers(0, 4, (n, 1)),
    "one dense": lambda rng, n: rng.random((n, 3)) * np.where(np.arange(n) % 8, 1e-3, 1)[:, None],
    "two far": lambda rng, n: rng.random((n, 3)) + 1e6 * (np.arange(n)[:, None] % 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *CLUSTERS])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_tree_finds_the_same(place, both, monkeypatch, dtype, shape):
    monkeypatch.setattr(_points_gpu, "_UNEVEN", -1.0)
    monkeypatch.setattr(_points_gpu, "_LENGTHS", (1, 4, 8))
    n = 70 if place == "cpu" else 20_000
    x = (SHAPES | CLUSTERS)[shape](np.random.default_rng(1), n).astype(dtype)
    batches = np.repeat([0, 2, 3], [n // 3, n // 3, n - 2 * (n // 3)])
    y = (x + (x - x[:1]) / 3)[::7].astype(dtype)
    given = x, batches, y, batches[::7].copy(), 4
    for k in (1, 5) if place == "cpu" else (1, 7, 30):
        same(both(nearest, x, batches, x, batches, 4, k, others=True))
        same(both(nearest, *given, k, others=False))
    r = min(float(np.ptp(x, axis=0).max()) / 8, 1e19)
    same(both(nearest, *given, 3, r, others=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["cube", "sphere", "flat", "far", "small", "outlier", *CLUSTERS])
def test_uneven_points_are_searched_in_a_tree(place, monkeypatch, dtype, shape):
    """A tree where the points are much denser in some places than in others, else a grid."""
    monkeypatch.setattr(_points_gpu, "_FEW", 2)
    rng, n = np.random.default_rng(2), 600 if place == "cpu" else 100_000
    even = {"cube": lambda rng, n: rng.random((n, 3)), "sphere": lambda rng, n: on_sphere(rng, n)}
    x = (SHAPES | CLUSTERS | even)[shape](rng, n).astype(dtype)
    x, batches = (_device.to_device(a, place) for a in (x, np.zeros(n, np.int64)))
    found = prepare(x, batches, x, batches, 1, 16, None).where[0]
    assert isinstance(found, _points_gpu.Tree) == (shape in {*CLUSTERS, "outlier"})


def on_sphere(rng, n):
    x = rng.normal(size=(n, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_axes", [1, 2, 3, 4])
def test_ends_of_points(place, dtype, n_axes):
    n = 20 if place == "cpu" else 100_000
    x = np.random.default_rng(0).normal(size=(n, n_axes)).astype(dtype)
    for bad in (None, np.nan, np.inf):
        if bad is not None:
            x[n // 2, n_axes - 1] = bad
        low, high = points.ends(_device.to_device(x, place))
        assert_close(low, np.min(x, axis=0), exact=True)
        assert_close(high, np.max(x, axis=0), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_axes", [1, 3, 5])
@pytest.mark.parametrize("n", [1, 4])
def test_far_points_are_those_of_the_host(place, both, dtype, n_axes, n):
    x, _, _ = cloud(place, dtype, n_axes)
    x[:6] = x[0]  # equally far, all of them
    ptr = np.array([0, 6, x.shape[0]])
    want, got = both(points.farthest, x, ptr, np.array([2, 7]), n)
    equal(want, got)
    assert all(len(set(row)) == n for row in want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_axes", [2, 4])
def test_far_points_of_clouds_with_several_blocks(place, both, monkeypatch, dtype, n_axes):
    n, n_chosen = (70, 5) if place == "cpu" else (100_000, 100)
    x = np.random.default_rng(2).normal(size=(n, n_axes)).round(1).astype(dtype)
    for ptr, n_blocks in ([0, n], 4), ([0, n // 3, n], 2):
        if place == "cpu":
            monkeypatch.setattr(_points_gpu, "_BLOCKS", n_blocks * (len(ptr) - 1))
        ptr = np.array(ptr)
        equal(*both(points.farthest, x, ptr, ptr[:-1] + 3, n_chosen))


def test_compiled_code_that_was_kept_cannot_be_taken_for_another():
    """Of functions with one name numba linked any: a search that kept all for one that sorts."""
    from rtxarr.kernels import _points_njit as host

    made = {f for f in vars(host).values() if hasattr(f, "py_func")}
    cells = [cell.cell_contents for f in made for cell in f.py_func.__closure__ or ()]
    made |= {f for f in cells if hasattr(f, "py_func")}
    names = [f.py_func.__qualname__ for f in made]
    assert len(names) > 30
    assert len(set(names)) == len(names)
