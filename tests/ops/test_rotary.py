"""The rotary embedding against complex products."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(22)
X = rng.standard_normal((2, 3, 5, 8))


def turned(x, angles, interleaved):
    """Turn pairs as complex numbers; angles of shape (..., n_pairs)."""
    n = angles.shape[-1]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :n], x[..., n:])
    z = (a + 1j * b) * np.exp(1j * angles)
    if interleaved:
        return np.stack((z.real, z.imag), axis=-1).reshape(x.shape)
    return np.concatenate((z.real, z.imag), axis=-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_turned(xp, interleaved):
    angles = np.arange(5)[:, None] * 10_000.0 ** (-2 * np.arange(4) / 8)
    cos, sin = rx.rotary_angles(xp.asarray(np.arange(5)), 8)
    assert_close(cos, np.cos(angles).astype("float32"))
    assert_close(sin, np.sin(angles).astype("float32"))
    cos, sin = (xp.asarray(f(angles)) for f in (np.cos, np.sin))
    got = rx.rotary_embedding(xp.asarray(X), cos, sin, interleaved=interleaved)
    assert_close(got, turned(X, angles, interleaved))


def test_features_beyond_the_pairs_stay(xp):
    angles = rng.standard_normal((5, 2))
    got = rx.rotary_embedding(*(xp.asarray(a) for a in (X, np.cos(angles), np.sin(angles))))
    assert_close(got[..., :4], turned(X[..., :4], angles, False))
    assert_close(got[..., 4:], X[..., 4:])


def test_products_depend_on_the_distance_alone():
    q, k = rng.standard_normal((2, 1, 64))

    def product(i, j):
        sides = ((q, i), (k, j))
        a, b = (rx.rotary_embedding(v, *rx.rotary_angles(np.asarray([p]), 64)) for v, p in sides)
        return float(a[0] @ b[0])

    assert product(3, 1) == pytest.approx(product(1002, 1000), rel=1e-5)


def test_half_precision_is_rounded_once():
    angles = rng.standard_normal((5, 4)).astype("float32")
    cos, sin = np.cos(angles), np.sin(angles)
    x = X.astype("float16")
    got = rx.rotary_embedding(x, cos, sin)
    assert got.dtype == x.dtype
    assert_close(got, turned(x.astype("float32"), angles, False).astype("float16"))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((5, 5), "cos and sin must turn 2 features of x or more"),
        ((4, 4), r"cos and sin must broadcast to \(2, 3, 5, 4\), got \(4, 4\)"),
        ((2, 2, 3, 5, 4), "cos and sin must broadcast to"),
    ],
)
def test_wrong_angles_are_refused(shape, match):
    with pytest.raises(ValueError, match=match):
        rx.rotary_embedding(X, np.ones(shape), np.ones(shape))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="head_dim must be even and at least 2, got 3"):
        rx.rotary_angles(np.arange(3), 3)
    with pytest.raises(ValueError, match="cos and sin must have one shape"):
        rx.rotary_embedding(X, np.ones((5, 4)), np.ones((1, 4)))
