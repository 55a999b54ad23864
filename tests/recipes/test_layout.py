"""The layouts that pictures are drawn from."""

import numpy as np

from rtxarr.recipes._layout import distance_layout, neighbor_layout


def make_groups(n_groups=4, size=40, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.eye(n_groups, 6) * 5
    labels = np.repeat(np.arange(n_groups), size)
    return (centres[labels] + rng.normal(size=(labels.size, 6))).astype(np.float32), labels


def test_points_of_a_group_stay_together():
    x, labels = make_groups()
    y = neighbor_layout(x, n_steps=150)
    assert y.shape == (160, 2)
    distance = np.linalg.norm(y[:, None] - y[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1)[:, :10]
    assert np.mean(labels[nearest] == labels[:, None]) > 0.95


def test_layout_is_the_same_each_time_and_finite_for_equal_points():
    x, _ = make_groups()
    np.testing.assert_array_equal(neighbor_layout(x, n_steps=5), neighbor_layout(x, n_steps=5))
    assert np.isfinite(neighbor_layout(np.zeros((5, 3), np.float32), n_steps=20)).all()


def distances(edges):
    y = distance_layout(np.array([*edges, *(edge[::-1] for edge in edges)]).T)
    return np.linalg.norm(y[:, None] - y[None], axis=-1)


def test_paths_and_rings_are_drawn_as_such():
    path = distances([(i, i + 1) for i in range(5)])
    wanted = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    np.testing.assert_allclose(path, wanted, atol=1e-3)
    ring = distances([(i, (i + 1) % 6) for i in range(6)])
    sides = ring[np.arange(6), (np.arange(6) + 1) % 6]
    np.testing.assert_allclose(sides, sides[0], rtol=1e-3)  # regular
    np.testing.assert_allclose(ring[np.arange(6), (np.arange(6) + 3) % 6], 2 * sides[0], rtol=1e-3)
    assert 0.8 < sides[0] < 1.2
    assert np.isclose(distances([(0, 1)])[0, 1], 1)


def test_nodes_with_the_same_neighbours_lie_apart():
    star = distances([(0, 1), (0, 2), (0, 3), (0, 4), (4, 5), (4, 6)])
    assert star[np.triu_indices(7, 1)].min() > 0.5


def test_rings_in_a_row_are_not_twisted_however_they_are_numbered():
    rings = [[(6 * r + i, 6 * r + (i + 1) % 6) for i in range(6)] for r in range(2)]
    edges = np.array([*rings[0], *rings[1], (12, 0), (3, 6), (9, 13), (13, 14), (13, 15)]).T
    edges = np.concatenate([edges, edges[::-1]], axis=1)
    for seed in range(20):
        number = np.random.default_rng(seed).permutation(16)
        y = distance_layout(number[edges])[number]
        for r in (0, 6):
            one, other = y[[r + 1, r + 2]].mean(axis=0), y[[r + 4, r + 5]].mean(axis=0)
            assert np.linalg.norm(one - other) > 1
