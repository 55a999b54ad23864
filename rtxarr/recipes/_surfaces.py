"""Points on surfaces and balls of them, for the recipe that tells surfaces apart."""

import math

import numpy as np

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator

CENTRES, NEAR = (64, 16), 16  # of each level, and the points of a ball


def _circle(angle):
    return np.stack([np.cos(2 * math.pi * angle), np.sin(2 * math.pi * angle)], axis=1)


def _disc(u):
    return _circle(u[:, 0]) * np.sqrt(u[:, 1:2])


def sphere(u):
    z = 2 * u[:, 0] - 1
    return np.concatenate([_circle(u[:, 1]) * np.sqrt(1 - z * z)[:, None], z[:, None]], axis=1)


def torus(u):
    around = _circle(u[:, 0])
    tube = 0.4 * _circle(u[:, 1])
    return np.concatenate([around * (1 + tube[:, :1]), tube[:, 1:]], axis=1)


def cuboid(u):
    face = np.floor(6 * u[:, 2]).astype(int)
    points = 2 * np.insert(u[:, :2], 2, 0.5, axis=1) - 1
    points[:, 2] = 1 - 2 * (face % 2)
    turns = (np.arange(3) + face[:, None] // 2) % 3
    return np.take_along_axis(points, turns, axis=1)


def _lid(u, side, share):
    """Put a share of the points on a disc below, the others where they are on the side."""
    base = np.insert(_disc(u), 2, -1.0, axis=1)
    return np.where(u[:, 2:] < share, base, side)


def cone(u):
    height = np.sqrt(u[:, 1:2])  # from the tip: as much surface as the ring there is long
    side = np.concatenate([_circle(u[:, 0]) * height, 1 - 2 * height], axis=1)
    return _lid(u, side, 1 / (1 + math.sqrt(5)))


def cylinder(u):
    side = np.concatenate([_circle(u[:, 0]), 2 * u[:, 1:2] - 1], axis=1)
    points = _lid(u, side, 1 / 3)
    points[u[:, 2] < 1 / 6] *= [1, 1, -1]
    return points


def octahedron(u):
    root = np.sqrt(u[:, :1])
    corners = np.concatenate([1 - root, root * (1 - u[:, 1:2]), root * u[:, 1:2]], axis=1)
    octant = np.floor(8 * u[:, 2]).astype(int)[:, None]
    return corners * (1 - 2 * (octant >> np.arange(3) & 1))


def saddle(u):
    xy = 2 * u[:, :2] - 1
    return np.insert(xy, 2, xy[:, 0] ** 2 - xy[:, 1] ** 2, axis=1)


def band(u):
    """Give points of a Moebius strip."""
    across = 0.8 * (u[:, 1:2] - 0.5)
    half = _circle(u[:, 0] / 2)
    flat = _circle(u[:, 0]) * (1 + across * half[:, :1])
    return np.concatenate([flat, across * half[:, 1:]], axis=1)


SURFACES = {
    "sphere": sphere,
    "torus": torus,
    "cuboid": cuboid,
    "cone": cone,
    "cylinder": cylinder,
    "octahedron": octahedron,
    "saddle": saddle,
    "Moebius strip": band,
}


def sample_surfaces(n: int, n_points: int, rng: Generator, *, noise: float) -> tuple:
    """Give points on surfaces of all kinds in turn, stretched, turned, noisy, and of one size.

    Parameters
    ----------
    n : int
    n_points : int
    rng : Generator
    noise : float
        Standard deviation off the surface, before scaling to a ball of radius 1.

    Returns
    -------
    points : array of float64, shape (n, n_points, 3)
    labels : array of int64, shape (n,)
    """
    labels = np.arange(n) % len(SURFACES)
    u = rng.uniform((n, n_points, 3), device="cpu")
    makers = tuple(SURFACES.values())
    points = np.concatenate([makers[label](u[i]) for i, label in enumerate(labels)])
    ptr = np.arange(n + 1) * n_points
    points = geom.scale_points(points, rng, low=0.7, high=1.3, per_axis=True, ptr=ptr)
    if noise > 0:
        points = geom.jitter_points(points, rng, std=noise, limit=4 * noise)
    points = geom.normalize_points(geom.rotate_points(points, rng, ptr=ptr), ptr=ptr)
    return points.reshape(n, n_points, 3), labels


def find_balls(points):
    """Give for each level the centres, and the nearest points of each, as places in its cloud."""
    balls = []
    for n_centres in CENTRES:
        n_clouds, n = points.shape[:2]
        flat, ptr = rx.reshape(points, (n_clouds * n, -1)), rx.arange(n_clouds + 1) * n
        bounds = rx.arange(n_clouds + 1) * n_centres
        centres = geom.farthest_point_sampling(flat, n_centres, ptr=ptr)
        chosen = rx.take(flat, centres, axis=0)
        near = geom.knn(flat, NEAR, y=chosen, ptr=ptr, y_ptr=bounds).indices
        shape = n_clouds, n_centres
        balls.append((rx.reshape(centres % n, shape), rx.reshape(near % n, (*shape, NEAR))))
        points = rx.reshape(chosen, (*shape, -1))
    return balls
