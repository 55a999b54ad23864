"""Shape changes, joining and splitting over every backend."""

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

X = np.arange(24.0).reshape(2, 3, 4)


def test_shape_changes(xp):
    x = xp.asarray(X)
    for got, want in (
        (rx.reshape(x, (4, -1)), X.reshape(4, -1)),
        (rx.reshape(x, (24,), copy=True), X.ravel()),
        (rx.permute_dims(x, (2, 0, -2)), X.transpose(2, 0, 1)),
        (rx.moveaxis(x, 0, -1), np.moveaxis(X, 0, -1)),
        (rx.matrix_transpose(x), X.swapaxes(1, 2)),
        (rx.transpose(x), X.T),
        (rx.expand_dims(x, axis=-1), X[..., None]),
        (rx.expand_dims(x, axis=(0, 2)), np.expand_dims(X, (0, 2))),
        (rx.squeeze(rx.expand_dims(x, axis=1), axis=1), X),
        (rx.broadcast_to(x[:1, ...], (5, 3, 4)), np.broadcast_to(X[:1], (5, 3, 4))),
        (rx.flip(x), np.flip(X)),
        (rx.flip(x, axis=(0, 2)), np.flip(X, (0, 2))),
        (rx.roll(x, 5), np.roll(X, 5)),
        (rx.roll(x, (1, -1), axis=(0, 1)), np.roll(X, (1, -1), (0, 1))),
        (rx.tile(x, (2, 1)), np.tile(X, (2, 1))),
        (rx.tile(x, (2, 1, 1, 2)), np.tile(X, (2, 1, 1, 2))),
        (rx.repeat(x, 2, axis=1), np.repeat(X, 2, 1)),
        (
            rx.pad(x, ((0, 0), (1, 2), (0, 3)), constant_values=7.0),
            np.pad(X, ((0, 0), (1, 2), (0, 3)), constant_values=7.0),
        ),
    ):
        assert_close(got, want, exact=True)


def test_joining_and_splitting(xp):
    x, y = xp.asarray(X), xp.asarray(X + 100)
    for axis in (0, 1, -1):
        assert_close(rx.concat([x, y], axis=axis), np.concatenate([X, X + 100], axis))
        assert_close(rx.stack((x, y), axis=axis), np.stack([X, X + 100], axis))
        parts = rx.unstack(x, axis=axis)
        assert isinstance(parts, tuple) and len(parts) == X.shape[axis]
        assert_close(parts[1], np.take(X, 1, axis))
    assert_close(rx.concat([x, y[0, ...]], axis=None), np.concatenate([X, X[0] + 100], None))


def test_broadcast_arrays_and_meshgrid(xp):
    a, b = rx.broadcast_arrays(xp.asarray([[1.0], [2.0]]), xp.asarray([3.0, 4.0, 5.0]))
    assert a.shape == b.shape == (2, 3)
    assert rx.broadcast_shapes((2, 1), (3,)) == (2, 3)
    u, v, w = np.arange(2.0), np.arange(3.0), np.arange(4.0)
    for indexing in ("xy", "ij"):
        got = rx.meshgrid(*map(xp.asarray, (u, v, w)), indexing=indexing)
        for g, want in zip(got, np.meshgrid(u, v, w, indexing=indexing), strict=True):
            assert_close(g, want)


def test_views_share_memory_and_do_not_copy():
    x = np.arange(6.0).reshape(2, 3)
    for view in (rx.reshape(x, (6,)), rx.transpose(x), rx.flip(x), rx.expand_dims(x), x[1:]):
        assert np.shares_memory(view, x)
    with pytest.raises(ValueError, match="copy"):
        rx.reshape(rx.transpose(x), (6,), copy=False)


def test_dtypes_are_promoted_when_joined():
    a, b = np.ones(2, "float32"), np.ones(2, "int64")
    assert rx.concat([a, b]).dtype == np.float64
    assert rx.stack([a, a]).dtype == np.float32


REFUSED = [
    (lambda: rx.reshape(X, (5, 5)), ValueError, r"shape must hold 24 elements"),
    (lambda: rx.permute_dims(X, (0, 0, 1)), ValueError, "axes must name each of the 3 axes once"),
    (lambda: rx.squeeze(X, 0), ValueError, "axis must name axes of length one, got 0"),
    (lambda: rx.broadcast_to(X, (3, 4, 2)), ValueError, r"does not broadcast to shape \(3, 4, 2\)"),
    (lambda: rx.concat([X, X[0]]), ValueError, "arrays must have equal"),
    (lambda: rx.concat([]), ValueError, "at least one array"),
    (lambda: rx.stack([X, X[0]]), ValueError, "arrays must have one shape"),
    (lambda: rx.stack([X], axis=7), ValueError, r"axis must lie in \[-4, 4\), got 7"),
    (lambda: rx.unstack(X, axis="0"), TypeError, "axis must be an integer, got '0'"),
    (lambda: rx.meshgrid(X[0, 0], indexing="yx"), ValueError, "indexing must be 'xy' or 'ij'"),
    (lambda: rx.pad(X, ((1, 1),)), ValueError, "widths must give 3 pairs"),
    (lambda: rx.pad(X, ((0, 0), (0, -1), (0, 0))), ValueError, "counts >= 0"),
    (lambda: rx.pad(X, 1), TypeError, "widths must be a pair of counts for each axis, got 1"),
    (lambda: rx.roll(X, 1.5), TypeError, "shift must be an int or a tuple of them, got 1.5"),
    (lambda: rx.tile(X, 2), TypeError, "repetitions must be a tuple of ints, got 2"),
    (lambda: rx.tile(X, (-1,)), ValueError, "repetitions must be at least 0, got -1"),
    (lambda: rx.repeat(X, -1), ValueError, "repeats must be at least 0, got -1"),
    (lambda: rx.repeat(X, 1.5), TypeError, "repeats must be an int, got float"),
    (lambda: rx.repeat(X[0, 0], np.ones(4)), TypeError, "repeats must hold integers, got float64"),
]


@pytest.mark.parametrize("which", range(len(REFUSED)))
def test_refusals_name_arguments(which):
    call, kind, message = REFUSED[which]
    with pytest.raises(kind, match=message):
        call()
