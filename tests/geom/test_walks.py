"""Random walks."""

import numpy as np
import pytest

from rtxarr import geom
from rtxarr.testing import assert_close

# Both ways: a triangle 0-1-2, a tail 2-3-4, two edges from 1 to 2, and a node without edges.
PAIRS = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4)]
SRC = np.array([a for a, _ in PAIRS] + [b for _, b in PAIRS] + [1])
DST = np.array([b for _, b in PAIRS] + [a for a, _ in PAIRS] + [2])
GRAPH = geom.Graph.from_edges(SRC, DST, n_nodes=6)
COUNTS = np.zeros((6, 6))
np.add.at(COUNTS, (SRC, DST), 1)


def test_steps_go_along_edges():
    walks = geom.random_walk(GRAPH, np.arange(6), 30, p=0.5, q=3.0, walks_per_node=4)
    assert walks.shape == (24, 31)
    assert_close(walks[:, 0], np.repeat(np.arange(6), 4), exact=True)
    assert (walks[20:, 1:] == -1).all()
    assert (COUNTS[walks[:20, :-1], walks[:20, 1:]] > 0).all()


def test_steps_follow_the_direction():
    path = geom.Graph.from_edges(np.array([0, 1]), np.array([1, 2]), n_nodes=3)
    assert geom.random_walk(path, np.array([0]), 4).tolist() == [[0, 1, 2, -1, -1]]
    assert geom.random_walk(path.T, np.array([2]), 2).tolist() == [[2, 1, 0]]


@pytest.mark.parametrize(
    ("p", "q"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25), (1e-4, 1.0), (1e4, 1e4)]
)
def test_steps_have_the_chances_of_node2vec(p, q):
    """Each step, given the two nodes before, against the paper's eq. in section 3.2.2."""
    n = 40_000
    walks = geom.random_walk(GRAPH, np.array([0, 1, 3]), 3, p=p, q=q, walks_per_node=n, seed=2)
    for before in range(5):
        for here in np.flatnonzero(COUNTS[before]):
            bias = np.where(COUNTS[before] > 0, 1.0, 1 / q)
            bias[before] = 1 / p
            chances = COUNTS[here] * bias
            chances /= chances.sum()
            for step in (2, 3):
                mine = (walks[:, step - 2] == before) & (walks[:, step - 1] == here)
                total = np.count_nonzero(mine)
                got = np.bincount(walks[mine, step], minlength=6)
                spread = 6 * np.sqrt(total * chances * (1 - chances)) + 1e-9
                assert np.all(np.abs(got - total * chances) <= spread)


def test_first_steps_are_equally_likely_an_edge():
    walks = geom.random_walk(GRAPH, np.array([1]), 1, walks_per_node=30_000)
    got = np.bincount(walks[:, 1], minlength=6)
    assert np.all(np.abs(got - 10_000 * np.array([1, 0, 2, 0, 0, 0])) < 6 * 82)


def test_walks_do_not_depend_on_the_others():
    options = {"p": 0.5, "q": 2.0, "walks_per_node": 3, "seed": 9, "epoch": 4}
    whole = geom.random_walk(GRAPH, np.array([3, 0, 2]), 12, **options)
    assert_close(geom.random_walk(GRAPH, np.array([2]), 12, **options), whole[6:], exact=True)
    shorter = geom.random_walk(GRAPH, np.array([3, 0, 2]), 5, **options)
    assert_close(shorter, whole[:, :6], exact=True)
    again = geom.random_walk(GRAPH, np.array([3, 0, 2]), 12, **{**options, "epoch": 5})
    assert not np.array_equal(again, whole)


def test_edges_in_another_order_give_the_same_walks():
    order = np.random.default_rng(0).permutation(SRC.size)
    other = geom.Graph.from_edges(SRC[order], DST[order], n_nodes=6)
    for graph in (other, other.T.T):
        for q in (1.0, 3.0):
            assert_close(
                geom.random_walk(graph, np.arange(6), 9, q=q),
                geom.random_walk(GRAPH, np.arange(6), 9, q=q),
                exact=True,
            )


def test_nothing_to_walk():
    empty = geom.Graph.from_edges(np.zeros(0, int), np.zeros(0, int), n_nodes=1)
    assert geom.random_walk(empty, np.array([0]), 2).tolist() == [[0, -1, -1]]
    assert geom.random_walk(GRAPH, np.zeros(0, int), 2).shape == (0, 3)
    assert geom.random_walk(GRAPH, np.array([2]), 0).tolist() == [[2]]


@pytest.mark.parametrize("tiny", [1e-310, 5e-324])
def test_parameters_whose_inverses_are_no_numbers(tiny):
    # Back and forth where p is all that counts; to new nodes alone where q is.
    path = geom.Graph.from_edges(np.array([0, 1, 1, 2]), np.array([1, 0, 2, 1]), n_nodes=3)
    there = geom.random_walk(path, np.array([0]), 6, p=tiny)
    assert there.tolist() == [[0, 1, 0, 1, 0, 1, 0]]
    assert geom.random_walk(path, np.array([0]), 4, q=tiny).tolist() == [[0, 1, 2, 1, 0]]
    both = geom.random_walk(GRAPH, np.arange(6), 9, p=tiny, q=tiny)
    assert_close(both, geom.random_walk(GRAPH, np.arange(6), 9, p=1e-30, q=1e-30), exact=True)


def test_refuses():
    start = np.array([0])
    with pytest.raises(ValueError, match="p must be positive and finite, got 0"):
        geom.random_walk(GRAPH, start, 2, p=0)
    with pytest.raises(ValueError, match="q must be positive and finite, got inf"):
        geom.random_walk(GRAPH, start, 2, q=np.inf)
    with pytest.raises(ValueError, match="walks_per_node must lie in"):
        geom.random_walk(GRAPH, start, 2, walks_per_node=0)
    with pytest.raises(IndexError, match="start must lie in"):
        geom.random_walk(GRAPH, np.array([6]), 2)
