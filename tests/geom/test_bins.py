"""How edges are dealt out: every edge once, in order, and no item longer than it may be."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.geom._bins import bins, deal_out

LENGTHS = {
    "none": [],
    "empty": [0, 0],
    "short": [3, 0, 4, 1],
    "long": [5, 0, 4, 100, 33, 8],
    "one hub": [1000],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("n_edges", "n_parts"), [(4, 2), (4, 64), (512, 64)])
def test_every_entry_of_a_row_is_in_its_items_once_and_in_order(lengths, n_edges, n_parts):
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # What each entry of a level stands for: an edge, then the edges of a piece.
    entries = [[edge] for edge in range(int(indptr[-1]))]
    whole, limit = {}, n_edges
    for level in deal_out(indptr, n_edges, n_parts):
        assert (level.lengths <= limit).all()
        assert (np.diff(level.lengths[level.n_pieces :]) <= 0).all()  # the longest first
        assert level.starts.dtype == np.int64
        assert level.lengths.dtype == level.rows.dtype == np.int32
        joined = []
        for start, length, row in zip(level.starts, level.lengths, level.rows, strict=True):
            joined.append([e for part in entries[start : start + length] for e in part])
            if len(joined) > level.n_pieces:
                whole[int(row)] = joined[-1]
            else:
                assert indptr[row] <= joined[-1][0] < indptr[row + 1]
        entries, limit = joined[: level.n_pieces], n_parts
    assert whole == {i: list(range(indptr[i], indptr[i + 1])) for i in range(len(lengths))}


def test_they_are_made_once():
    graph = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 1]), n_nodes=3)
    assert bins(graph) is bins(graph.replace(nodes={"x": np.zeros(3)}))
    assert bins(graph) is not bins(graph.T)
