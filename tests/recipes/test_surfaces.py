"""The surfaces that clouds are drawn from."""

import numpy as np
import pytest

from rtxarr.random import Generator
from rtxarr.recipes import _surfaces

U = np.random.default_rng(0).random((4000, 3))

# What is zero on each surface, of x, y and z.
ON = {
    "sphere": lambda x, y, z: x * x + y * y + z * z - 1,
    "torus": lambda x, y, z: (np.hypot(x, y) - 1) ** 2 + z * z - 0.16,
    "cuboid": lambda x, y, z: np.max(np.abs([x, y, z]), axis=0) - 1,
    "cone": lambda x, y, z: np.minimum(abs(z + 1), abs(np.hypot(x, y) - (1 - z) / 2)),
    "cylinder": lambda x, y, z: np.minimum(abs(abs(z) - 1), abs(np.hypot(x, y) - 1)),
    "octahedron": lambda x, y, z: abs(x) + abs(y) + abs(z) - 1,
    "saddle": lambda x, y, z: x * x - y * y - z,
    "Moebius strip": lambda x, y, z: y * (x * x + y * y + z * z - 1) - 2 * z * (x * x + y * y + x),
}


@pytest.mark.parametrize("name", _surfaces.SURFACES)
def test_points_are_on_the_surface(name):
    points = _surfaces.SURFACES[name](U)
    assert points.shape == (4000, 3)
    assert np.max(np.abs(ON[name](*points.T))) < 1e-9


@pytest.mark.parametrize("name", ["sphere", "cuboid", "octahedron"])
def test_points_are_spread_evenly(name):
    """Half of them on each side of any plane through the middle, by the planes of the axes."""
    points = _surfaces.SURFACES[name](U)
    octants = np.bincount((points > 0) @ [1, 2, 4], minlength=8)
    assert np.all(np.abs(octants - 500) < 6 * np.sqrt(4000 * 7 / 64))


def test_areas_decide_how_many_points_are_on_a_lid():
    cone, cylinder = _surfaces.cone(U), _surfaces.cylinder(U)
    assert abs(np.mean(cone[:, 2] == -1) - 1 / (1 + 5**0.5)) < 6 * np.sqrt(0.21 / 4000)
    for side in (-1, 1):
        assert abs(np.mean(cylinder[:, 2] == side) - 1 / 6) < 6 * np.sqrt(5 / 36 / 4000)


def test_balls_hold_the_nearest_points():
    clouds, labels = _surfaces.sample_surfaces(3, 70, Generator(1), noise=0.0)
    assert labels.tolist() == [0, 1, 2]
    assert np.allclose(np.linalg.norm(clouds, axis=2).max(axis=1), 1)
    points = clouds
    for centres, near in _surfaces.find_balls(clouds):
        for cloud, chosen, balls in zip(points, centres, near, strict=True):
            for centre, ball in zip(chosen, balls, strict=True):
                d = ((cloud - cloud[centre]) ** 2).sum(axis=1)
                assert set(ball) == set(np.argsort(d, kind="stable")[:16])
        points = np.take_along_axis(points, centres[:, :, None], axis=1)
