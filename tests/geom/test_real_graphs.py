"""Real graphs with dirty lists of edges.

`RTXARR_SHARED_DATA` names a folder with `geom/musae/NAME/edges.csv` of Rozemberczki, Allen and
Sarkar, "Multi-Scale Attributed Node Embedding", 2021, arXiv:1909.13021; without it these are
skipped. Data of a licence of its own is not part of the package.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.random import Generator
from rtxarr.testing import assert_close

FOLDER = Path(os.environ.get("RTXARR_SHARED_DATA", "not-given")) / "geom"
needs_musae = pytest.mark.skipif(
    not (FOLDER / "musae").is_dir(), reason="needs RTXARR_SHARED_DATA with geom/musae"
)

# nodes, edges listed, pairs of nodes with an edge or a loop, loops
COUNTS = {
    "facebook": (22_470, 171_002, 171_002, 179),
    "wikipedia": (11_631, 180_020, 170_918, 145),
}


@pytest.fixture(params=COUNTS, scope="module")
def real(request):
    path = FOLDER / "musae" / request.param / "edges.csv"
    src, dst = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, unpack=True)
    n_nodes = COUNTS[request.param][0]
    return geom.Graph.from_edges(src, dst, n_nodes=n_nodes), COUNTS[request.param]


@needs_musae
def test_what_is_dirty_is_kept_until_it_is_cleaned(real):
    graph, (_, listed, pairs, loops) = real
    assert graph.n_edges == listed
    assert listed - geom.remove_self_loops(graph).n_edges == loops
    both = geom.coalesce(geom.to_undirected(graph))
    assert both.n_edges == 2 * (pairs - loops) + loops
    clean = geom.remove_self_loops(both)
    assert_close(clean.in_degrees, clean.out_degrees, exact=True)
    assert geom.to_undirected(both).n_edges == both.n_edges


@needs_musae
def test_they_are_in_one_piece(real):
    graph, (n_nodes, *_) = real
    assert not geom.connected_components(graph).any()
    assert geom.largest_component(graph)[0].n_nodes == n_nodes
    found, steps = geom.k_hop(graph, np.array([0]), 100, direction="both")
    assert len(found) == n_nodes
    assert (np.diff(steps) >= 0).all()


@needs_musae
def test_links_are_split_without_leaks(real):
    graph, (n_nodes, _, pairs, loops) = real
    split = geom.random_link_split(
        graph, val=0.05, test=0.1, undirected=True, generator=Generator(0)
    )

    def keys(pairs):
        return np.minimum(*pairs) * n_nodes + np.maximum(*pairs)

    known = set(keys(np.stack([graph.src, graph.dst])).tolist())
    parts = [split.train, split.val.positive, split.test.positive]
    every = np.concatenate([keys(part) for part in parts])
    assert len(every) == len(np.unique(every)) == pairs - loops
    negative = np.concatenate([keys(split.val.negative), keys(split.test.negative)])
    assert len(np.unique(negative)) == len(negative)
    assert not known & set(negative.tolist())
    kept = set(keys(np.stack([split.graph.src, split.graph.dst])).tolist())
    assert not kept & set(keys(split.test.positive).tolist())
