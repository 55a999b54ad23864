"""Drawing edges, numbering and walks: GPU code against numba's CPU code, to the bit."""

import numpy as np
import pytest

from rtxarr import _device
from rtxarr.kernels import sampling
from rtxarr.testing import assert_close

PLACE = {"key": np.uint64(0x0123456789ABCDEF), "stream": np.uint64(0xFEDCBA9876543210)}


@pytest.fixture
def both(place, monkeypatch):
    """Give a function that calls another on the host and where kernels run, and compares."""

    def call(function, *arrays, **options):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "runs_kernels", lambda x: False)
            want = function(*arrays, **options)
        moved = [_device.to_device(x, place) if isinstance(x, np.ndarray) else x for x in arrays]
        options = {
            name: _device.to_device(x, place) if isinstance(x, np.ndarray) else x
            for name, x in options.items()
        }
        got = function(*moved, **options)
        pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
        for expected, found in pairs:
            assert expected.dtype == found.dtype
            assert_close(_device.to_device(found, "cpu"), expected, exact=True)
        return want

    return call


def rows(place, seed=0):
    """Give some rows of a graph with isolated nodes, a hub and edges of weight zero."""
    rng = np.random.default_rng(seed)
    n_nodes, most = (12, 9) if place == "cpu" else (5000, 70)
    degrees = rng.integers(0, most, n_nodes)
    degrees[[0, 3]], degrees[5] = 0, 4 * most
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    indices = rng.integers(0, n_nodes, indptr[-1]).astype(np.int32)
    weights = np.round(rng.random(indptr[-1]) * 4) / 4
    nodes = np.concatenate([[5, 0], rng.permutation(n_nodes)[: n_nodes - 2]])
    return indptr, indices, weights, nodes


@pytest.mark.parametrize("n", [-1, 0, 1, 3, 8])
def test_draws_are_those_of_the_host(place, both, n):
    indptr, indices, weights, nodes = rows(place)
    first, degrees = indptr[nodes], np.diff(indptr)[nodes]
    sums, available = both(sampling.sum_rows, indptr, weights)
    for replace in (False, True):
        both(sampling.draw, nodes, first, degrees, n, replace=replace, **PLACE)
        weighted = {"weights": weights, "sums": sums, "available": available[nodes]}
        both(sampling.draw, nodes, first, degrees, n, replace=replace, **weighted, **PLACE)
    both(sampling.draw_labor, first, degrees, indices, n, **PLACE)


def test_numbers_are_those_of_the_host(place, both):
    indptr, indices, _, nodes = rows(place, seed=1)
    cuts = [0, 2, 2, 7, nodes.size]
    first, degrees = indptr[nodes], np.diff(indptr)[nodes]
    offsets, edges = both(sampling.draw, nodes, first, degrees, 3, **PLACE)
    nodes[1] = nodes[0]  # a seed that comes twice
    ptr = np.array(cuts)
    local, reached, out_ptr = both(
        sampling.renumber, nodes, ptr, indices[edges], offsets[ptr], indptr.size - 1
    )
    for batch, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        mine = reached[out_ptr[batch] : out_ptr[batch + 1]]
        assert_close(mine[: end - begin], nodes[begin:end], exact=True)
        part = slice(offsets[begin], offsets[end])
        assert_close(mine[local[part]], indices[edges[part]].astype(np.int64), exact=True)
        assert len(set(mine[end - begin :])) == len(mine[end - begin :])


@pytest.mark.parametrize("weights", [(2**32, 2**32, 2**32), (1, 2**20, 2**32), (2**32, 1, 1)])
def test_walks_are_those_of_the_host(place, both, weights):
    indptr, indices, _, nodes = rows(place, seed=2)
    for begin, end in zip(indptr[:-1], indptr[1:], strict=True):
        indices[begin:end].sort()
    weights = tuple(np.uint64(w) for w in weights)
    both(sampling.walks, nodes, 2, 6, indptr, indices, weights=weights, **PLACE)


def test_negatives_are_those_of_the_host(place, both):
    indptr, indices, _, nodes = rows(place, seed=3)
    n_nodes = nodes.size
    linked = [np.unique(indices[a:b]) for a, b in zip(indptr[:-1], indptr[1:], strict=True)]
    linked[2] = np.arange(n_nodes)  # has edges to all
    indptr = np.concatenate([[0], np.cumsum([x.size for x in linked])])
    flat = np.concatenate(linked).astype(np.int64)
    src = np.concatenate([nodes, [2]])
    found = both(
        sampling.negatives, 7 + np.arange(src.size), src, 3, indptr, flat, n_nodes, **PLACE
    )
    for node, others in zip(src, found, strict=True):
        free = np.setdiff1d(np.arange(n_nodes), linked[node])
        assert np.isin(others, free).all() if free.size else (others == -1).all()
