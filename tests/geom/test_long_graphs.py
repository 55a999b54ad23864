"""More edges than 31 bits count, on a graph whose right values are known.

Edge ``e`` leads from node ``e % n`` to node ``e // k``: the sources of a node are ``k`` neighbours
in a ring, and sums and maxima over them follow from running ones. The same tests run on a short
graph on the CPU.
"""

import functools
import os

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import _device, geom
from rtxarr.testing import assert_close

SHORT, LONG = (1009, 21), (4_194_319, 513)
FREE, MOST = 100e9, 120e9  # bytes that there must be, and that may be held at a time
STEP = 1 << 28  # edges that are made at once


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", *SHORT), id="short"),
        pytest.param(("cuda:0", *LONG), id="long", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def ring(request):
    place, n, k = request.param
    if place != "cpu":
        if "PYTEST_XDIST_WORKER" in os.environ:
            pytest.skip("holds most of a GPU's memory: runs alone")
        pool = _device.cupy.get_default_memory_pool()
        pool.free_all_blocks()
        free = _device.cupy.cuda.runtime.memGetInfo()[0]
        if free < FREE:
            pytest.skip(f"needs {FREE / 1e9:.0f} GB of free memory on a GPU, has {free / 1e9:.0f}")
        assert n * k > 2**31
    with rx.device(place):
        yield Ring(place, n, k)
    if place != "cpu":
        pool.free_all_blocks()


class Ring:
    """The graph, and what is known of it."""

    def __init__(self, place, n, k):
        self.place, self.n, self.k = place, n, k
        self.indices = self.by_edge(lambda e: e % n, "int32")
        # Blocks of 64 nodes have one value; 513 of them times 6 add up exactly in float32.
        rng = np.random.default_rng(0)
        self.x = rng.integers(0, 2048, (n // 64 + 1, 4)).repeat(64, axis=0)[:n]

    def graph(self):
        """Give a graph of which nothing was worked out."""
        return geom.Graph(rx.arange(self.n + 1, dtype="int64") * self.k, self.indices)

    def by_edge(self, value, dtype):
        """Make an array of a value for each edge, some edges at a time."""
        out = rx.empty(self.n * self.k, dtype=dtype)
        for start in range(0, out.shape[0], STEP):
            stop = min(start + STEP, out.shape[0])
            out[start:stop] = value(rx.arange(start, stop, dtype="int64"))
        return out

    def put(self, x, dtype):
        # Arrays stay where they are, whatever the current device is.
        return rx.asarray(x.astype(dtype), device=self.place)

    @functools.cached_property
    def first(self):
        """The first source of each node."""
        return np.arange(self.n) * self.k % self.n

    def sums(self, x):
        """Add up the rows of each node's sources."""
        total = np.cumsum(np.concatenate([np.zeros_like(x[:1]), x, x[: self.k]]), axis=0)
        return total[self.first + self.k] - total[self.first]

    def maxima(self, x):
        reach = 1
        while 2 * reach <= self.k:
            x, reach = np.maximum(x, np.roll(x, -reach, axis=0)), 2 * reach
        return np.maximum(x, np.roll(x, reach - self.k, axis=0))[self.first]


@pytest.fixture(autouse=True)
def memory(ring, request):
    """Bound what a test holds at a time."""
    with rx.memory.peak(ring.place) as peak:
        yield
    print(f"{request.node.name}: {peak}")
    if ring.place != "cpu":
        assert peak.bytes < MOST, str(peak)


def back(x):
    return _device.to_device(rx.Tensor(x).data, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_means_and_maxima(ring, dtype):
    graph, x = ring.graph(), ring.put(ring.x, dtype)
    assert graph.indices.dtype == np.int32 and graph.indptr.dtype == np.int64
    means = ring.sums(ring.x).astype("f4") / np.float32(ring.k)
    rtol = 1e-6 if dtype == "float32" else 1e-3
    assert_close(back(geom.aggregate(graph, x, "mean")), means.astype(dtype), rtol=rtol)
    largest = ring.maxima(ring.x).astype(dtype)
    assert_close(back(geom.aggregate(graph, x, "max")), largest, exact=True)


def test_weighted_sums(ring):
    n, k = ring.n, ring.k
    weight = ring.by_edge(lambda e: (1 + e % n % 3) * (1 + e // k % 2), "float32")
    got = back(geom.aggregate(ring.graph(), ring.put(ring.x, "float32"), weight=weight))
    node = np.arange(n)[:, None]
    want = (1 + node % 2) * ring.sums((1 + node % 3) * ring.x)
    assert_close(got, want.astype("f4"), exact=True)


def test_the_gradient_of_a_sum(ring):
    n, k = ring.n, ring.k
    x = rx.Tensor(ring.put(ring.x, "float32"), requires_grad=True)
    out = geom.aggregate(ring.graph(), x)
    assert_close(back(out.data), ring.sums(ring.x).astype("f4"), exact=True)
    g = np.random.default_rng(1).integers(0, 16, (n, 4))
    out.backward(ring.put(g, "float32"))
    got = back(x.grad)
    rows = np.unique(
        np.concatenate([np.arange(9), n - 1 - np.arange(9), np.arange(0, n, n // 999)])
    )
    of_rows = rows[:, None] + n * np.arange(k)  # the edges from each of them
    assert_close(got[rows], g[of_rows // k].sum(axis=1).astype("f4"), exact=True)
    assert got.sum(dtype="f8", axis=0).tolist() == (k * g.sum(axis=0)).tolist()


@pytest.mark.parametrize("replace", [False, True])
def test_neighbours(ring, replace):
    n, k = ring.n, ring.k
    seeds = np.array([n - 1, 0, n // 2, n - 1, n - 2])
    sampler = geom.NeighborSampler(ring.graph(), [7, 3], seed=2, replace=replace)
    sample = sampler(ring.put(seeds, "int64"))
    nodes = back(sample.nodes)
    assert nodes[: seeds.size].tolist() == seeds.tolist()
    for part, ids, fanout in zip(sample.graphs, sample.edge_ids, (3, 7), strict=True):
        src, dst, ids = (back(a) for a in (part.src, part.dst, ids))
        assert back(part.in_degrees).tolist() == [fanout] * part.n_dst
        assert_close(nodes[src], ids % n, exact=True)
        assert_close(nodes[dst], ids // k, exact=True)
        if not replace:
            assert np.unique(np.stack([ids, dst]), axis=1).shape[1] == ids.size
    assert n * k < 2**31 or ids.max() >= 2**31


def test_neighbours_by_weight(ring):
    """One edge of each node has a weight: the last one, or one before."""
    n, k = ring.n, ring.k
    weight = ring.by_edge(lambda e: e % k == k - 1 - e // k % 2, "float32")
    sampler = geom.NeighborSampler(ring.graph(), [3, -1], seed=2, weight=weight)
    seeds = np.array([n - 1, 0, n // 2, n - 2])
    sample = sampler(ring.put(seeds, "int64"))
    assert back(sample.edge_ids[1]).tolist() == (seeds * k + k - 1 - seeds % 2).tolist()
    assert sample.edge_ids[0].shape[0] == sample.graphs[0].n_dst  # all that can be drawn
