"""Recursive-matrix graphs have the chances that they are drawn with."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close


def edges_of(chunks):
    return np.concatenate([np.stack(chunk) for chunk in chunks], axis=1)


def test_quarters_are_as_likely_as_asked():
    chances = (0.5, 0.1, 0.15, 0.25)
    edges = geom.RMATEdges(
        6, 2000, chances=chances, rename=False, size=10_000, seed=3, device="cpu"
    )
    src, dst = edges_of(edges)
    assert src.shape == (edges.n_edges,) == (128_000,)
    for level in range(6):  # each bit of the numbers is one choice
        quarter = 2 * (src >> level & 1) + (dst >> level & 1)
        assert_close(np.bincount(quarter) / src.size, np.array(chances), atol=0.006)
    low = np.mean((src & 1) == 0) * np.mean((src >> 5 & 1) == 0)
    assert abs(np.mean(((src & 1) == 0) & ((src >> 5 & 1) == 0)) - low) < 0.006  # independent


def test_they_are_the_same_each_time_and_others_with_another_seed():
    edges = geom.RMATEdges(5, 7, size=50, seed=1, device="cpu")
    first = edges_of(edges)
    assert_close(edges_of(edges), first, exact=True)
    assert (edges_of(geom.RMATEdges(5, 7, size=50, seed=2, device="cpu")) != first).any()
    graph = geom.from_chunks(edges, n_nodes=edges.n_nodes, device="cpu")
    assert (graph.n_nodes, graph.n_edges) == (32, 224)
    assert_close(np.stack([graph.src, graph.dst]), first, exact=True)


def test_names_are_permuted():
    plain = edges_of(geom.RMATEdges(7, 5, rename=False, device="cpu"))
    named = edges_of(geom.RMATEdges(7, 5, device="cpu"))
    counts = [np.sort(np.bincount(x[1], minlength=128)) for x in (plain, named)]
    assert_close(*counts, exact=True)
    assert np.bincount(plain[1], minlength=128).argmax() == 0
    assert (plain != named).any()


def test_none_and_bad_ones():
    assert list(geom.RMATEdges(3, 0, device="cpu")) == []
    (one,) = geom.RMATEdges(0, 2, device="cpu")
    assert [x.tolist() for x in one] == [[0, 0], [0, 0]]
    with pytest.raises(ValueError, match="chances must be four that sum to 1"):
        geom.RMATEdges(3, chances=(0.5, 0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"scale must lie in \[0, 48\), got 48"):
        geom.RMATEdges(48)
    assert repr(geom.RMATEdges(3, device="cpu")) == "RMATEdges(3, 16, seed=0)"


@pytest.mark.gpu
def test_the_same_on_a_gpu():
    here, there = (
        edges_of(
            [np.asarray(x.get() if hasattr(x, "get") else x) for x in chunk]
            for chunk in geom.RMATEdges(10, 8, size=3000, device=device)
        )
        for device in ("cpu", "cuda:0")
    )
    assert_close(there, here, exact=True)
