"""Changes of point clouds."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr import geom
from rtxarr.random import Generator
from rtxarr.testing import assert_close

X = np.random.default_rng(0).normal(size=(40, 3)) + 5
PTR = np.array([0, 15, 15, 40])

RANDOM = {
    "rotate": geom.rotate_points,
    "rotate-axis": lambda x, rng, **kw: geom.rotate_points(x, rng, axis=1, **kw),
    "shear": geom.shear_points,
    "scale": geom.scale_points,
    "scale-axes": lambda x, rng, **kw: geom.scale_points(x, rng, per_axis=True, **kw),
    "translate": geom.translate_points,
    "flip": lambda x, rng, **kw: geom.flip_points(x, rng, axis=0, **kw),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RANDOM)
def test_clouds_change_as_a_whole(name, dtype):
    """An affine map of each cloud: the same for all of its points."""
    x = X.astype(dtype)
    got = RANDOM[name](x, Generator(1), ptr=PTR)
    assert got.dtype == x.dtype
    for begin, end in ((0, 15), (15, 40)):
        ones = np.concatenate([x[begin:end], np.ones((end - begin, 1), dtype)], axis=1)
        matrix, residual, _, _ = np.linalg.lstsq(ones, got[begin:end], rcond=None)
        assert np.all(
            np.abs(ones @ matrix - got[begin:end]) < (1e-4 if dtype == "float32" else 1e-9)
        )
    assert_close(RANDOM[name](x, Generator(1), ptr=PTR), got, exact=True)
    whole = RANDOM[name](rx.Tensor(x), Generator(3))
    assert isinstance(whole, rx.Tensor)
    assert whole.shape == (40, 3)


def test_rotations_keep_distances_and_handedness():
    basis = np.eye(3)
    for seed in range(20):
        turned = geom.rotate_points(basis, Generator(seed))
        assert_close(turned @ turned.T, np.eye(3), atol=1e-12)
        assert abs(np.linalg.det(turned) - 1) < 1e-12
        about = geom.rotate_points(basis, Generator(seed), axis=2)
        assert_close(about[2], basis[2], atol=1e-12)
    flat = geom.rotate_points(basis[:2, :2], Generator(0))
    assert_close(flat @ flat.T, np.eye(2), atol=1e-12)


def test_rotations_are_uniform():
    """The image of a fixed vector is uniform on the sphere: each coordinate on [-1, 1]."""
    n = 4000
    points = np.tile([[0.0, 0.6, 0.8]], (n, 1))
    turned = geom.rotate_points(points, Generator(5), ptr=np.arange(n + 1))
    for axis in range(3):
        assert abs(turned[:, axis].mean()) < 6 / np.sqrt(3 * n)
        assert abs((turned[:, axis] ** 2).mean() - 1 / 3) < 6 * np.sqrt(4 / 45 / n)


def test_amounts_stay_within_their_limits():
    n = 500
    ones, ptr = np.ones((n, 3)), np.arange(n + 1)
    scaled = geom.scale_points(ones, Generator(0), low=0.5, high=2.0, ptr=ptr)
    assert np.all((scaled >= 0.5) & (scaled < 2.0))
    assert scaled.max() > 1.9
    assert_close(scaled[:, 0], scaled[:, 1], exact=True)
    moved = geom.translate_points(ones, Generator(0), limit=0.3, ptr=ptr) - 1
    assert 0.28 < np.abs(moved).max() <= 0.3 + 1e-12
    jittered = geom.jitter_points(ones, Generator(0), std=0.05, limit=0.1) - 1
    assert np.abs(jittered).max() <= 0.1 + 1e-12
    assert 0.03 < jittered.std() < 0.05
    flipped = geom.flip_points(ones, Generator(0), axis=1, p=0.25, ptr=ptr)
    assert np.all(flipped[:, [0, 2]] == 1)
    assert abs(np.mean(flipped[:, 1] == -1) - 0.25) < 6 * np.sqrt(0.1875 / n)


def test_centre_and_size():
    for ptr, parts in ((None, [(0, 40)]), (PTR, [(0, 15), (15, 40)])):
        centred, unit = geom.center_points(X, ptr=ptr), geom.normalize_points(X, ptr=ptr)
        for begin, end in parts:
            assert_close(centred[begin:end], X[begin:end] - X[begin:end].mean(0), atol=1e-12)
            assert abs(np.linalg.norm(unit[begin:end], axis=1).max() - 1) < 1e-12
    assert_close(geom.normalize_points(np.ones((3, 2))), np.zeros((3, 2)), exact=True)
    assert geom.normalize_points(np.zeros((0, 3))).shape == (0, 3)


def test_points_are_dropped_and_sampled():
    kept = geom.drop_points(np.zeros((4000, 3)), Generator(0), rate=0.3)
    assert abs(len(kept) - 2800) < 6 * np.sqrt(840)
    assert np.all(np.diff(kept) > 0)
    last = geom.drop_points(X, Generator(0), rate=0.999, ptr=PTR)
    assert {0, 15} <= set(last.tolist())
    chosen = geom.sample_points(X, 5, Generator(2), ptr=np.array([0, 15, 40]))
    assert np.all(chosen[:5] < 15)
    assert np.all(chosen[5:] >= 15)
    assert len(set(chosen)) == 10
    counts = np.zeros(6)
    generator = Generator(3)
    for _ in range(3000):
        counts[geom.sample_points(np.zeros((6, 1)), 2, generator)] += 1
    assert np.all(np.abs(counts - 1000) < 6 * np.sqrt(3000 * 2 / 9))


def test_refuses():
    with pytest.raises(ValueError, match="n must be at most 0, the number of points of cloud 1"):
        geom.sample_points(X, 1, Generator(0), ptr=PTR)
    with pytest.raises(ValueError, match="rate must lie in"):
        geom.drop_points(X, Generator(0), rate=1.0)
    with pytest.raises(ValueError, match="x must have two axes, or three"):
        geom.rotate_points(X, Generator(0), axis=3)
    with pytest.raises(ValueError, match="low must be less than high"):
        geom.scale_points(X, Generator(0), low=2.0, high=1.0)
    with pytest.raises(ValueError, match="limit must be positive"):
        geom.shear_points(X, Generator(0), limit=0)
    with pytest.raises(ValueError, match=r"axis must lie in \[-3, 3\), got 3"):
        geom.flip_points(X, Generator(0), axis=3)
    with pytest.raises(ValueError, match="shape"):
        geom.center_points(X[0])


@pytest.mark.parametrize(
    "change",
    [
        *RANDOM.values(),
        geom.jitter_points,
        lambda x, rng: geom.drop_points(x, rng, rate=0.5),
        lambda x, rng: geom.sample_points(x, 2, rng),
    ],
)
def test_refuses_the_generator_of_numpy(change):
    with pytest.raises(TypeError, match=r"rng must be an rtxarr.random.Generator, got numpy\."):
        change(X, np.random.default_rng(0))
