"""Graphs that break what was written for simple ones."""

import numpy as np
import pytest

from rtxarr import geom


def random_graph(n_nodes, n_edges, seed=0, n_dst=None):
    """Draw edges among all nodes but the last: duplicates, loops, and a node without any."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, max(n_nodes - 1, 1), n_edges)
    dst = rng.integers(0, max((n_dst or n_nodes) - 1, 1), n_edges)
    weight = rng.standard_normal(n_edges)
    x = rng.standard_normal((n_nodes, 3))
    if n_dst is not None:
        return geom.Graph.from_edges(src, dst, n_src=n_nodes, n_dst=n_dst, edges={"weight": weight})
    edges = {"weight": weight, "number": np.arange(n_edges)}
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes, nodes={"x": x}, edges=edges)


MULTIGRAPHS = {
    "dense": (4, 40),
    "loops-of-one-node": (1, 3),
    "sparse": (9, 11),
    "one-edge": (3, 1),
    "no-edges": (3, 0),
    "nothing": (0, 0),
}


@pytest.fixture(params=MULTIGRAPHS)
def multigraph(request):
    """A graph with several edges between two nodes, loops and nodes without edges, or less."""
    return random_graph(*MULTIGRAPHS[request.param])


@pytest.fixture
def multigraphs():
    return [random_graph(*sizes, seed=i) for i, sizes in enumerate(MULTIGRAPHS.values())]


def edge_list(graph):
    """Give ``(src, dst, number)`` of each edge in the order of numbers, as a list."""
    return list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))


def assert_same(got, want):
    """Check that two graphs have the same edges under the same numbers, and the same arrays."""
    assert (got.n_src, got.n_dst, got.n_edges) == (want.n_src, want.n_dst, want.n_edges)
    np.testing.assert_array_equal(got.indptr, want.indptr)
    np.testing.assert_array_equal(got.src, want.src)
    np.testing.assert_array_equal(got.dst, want.dst)
    assert got.indptr.dtype == np.int64
    assert got.indices.dtype == want.indices.dtype
    for kind in ("nodes", "edges"):
        held, wanted = getattr(got, kind), getattr(want, kind)
        assert set(held) == set(wanted)
        for name, x in held.items():
            np.testing.assert_array_equal(x, wanted[name])


@pytest.fixture
def same():
    return assert_same


@pytest.fixture
def pairs():
    return edge_list


@pytest.fixture
def random():
    return random_graph
