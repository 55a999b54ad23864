"""Pooling against plain loops and PyTorch."""

import itertools

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(8)
MAX = {1: rx.max_pool1d, 2: rx.max_pool2d, 3: rx.max_pool3d}
AVG = {1: rx.avg_pool1d, 2: rx.avg_pool2d, 3: rx.avg_pool3d}
ADAPTIVE = {1: rx.adaptive_avg_pool1d, 2: rx.adaptive_avg_pool2d, 3: rx.adaptive_avg_pool3d}

# kernel size, stride, padding; tuples are cut to the number of axes
GEOMETRIES = {
    "disjoint": (2, None, 0),
    "overlapping": (3, 1, 1),
    "gaps": (2, 3, 1),
    "uneven": ((3, 2, 4), (2, 1, 3), (1, 1, 2)),
}


def draw(n):
    """Give an image without ties."""
    return rng.permutation(6 * 5 * 6 * 4).reshape(2, 3, 5, 6, 4)[(..., *(0,) * (3 - n))] / 7.0


def per_axis(value, n):
    return value[:n] if isinstance(value, tuple) else (value,) * n


def windows(x, kernel, stride, padding, dilation=1):
    """Yield each window's place and the elements in it, those in the padding left out."""
    n = x.ndim - 2
    kernel, padding = per_axis(kernel, n), per_axis(padding, n)
    stride = kernel if stride is None else per_axis(stride, n)
    counts = [
        (size + 2 * p - dilation * (k - 1) - 1) // s + 1
        for size, k, s, p in zip(x.shape[2:], kernel, stride, padding, strict=True)
    ]
    for place in itertools.product(*map(range, counts)):
        found = []
        for tap in itertools.product(*map(range, kernel)):
            element = [
                o * s + dilation * k - p
                for o, s, k, p in zip(place, stride, tap, padding, strict=True)
            ]
            if all(0 <= i < size for i, size in zip(element, x.shape[2:], strict=True)):
                found.append(x[(..., *element)])
        yield place, np.stack(found, axis=-1)


def options(geometry, n):
    kernel, stride, padding = GEOMETRIES[geometry]
    stride = None if stride is None else per_axis(stride, n)
    return per_axis(kernel, n), {"stride": stride, "padding": per_axis(padding, n)}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_values(xp, n, geometry):
    x = draw(n)
    kernel, more = options(geometry, n)
    largest = MAX[n](xp.asarray(x), kernel, **more)
    padded = AVG[n](xp.asarray(x), kernel, **more)
    inside = AVG[n](xp.asarray(x), kernel, count_padding=False, **more)
    found = dict(windows(x, *GEOMETRIES[geometry]))
    for got, reduce in (
        (largest, lambda w: w.max(-1)),
        (padded, lambda w: w.sum(-1) / np.prod(kernel)),
        (inside, lambda w: w.mean(-1)),
    ):
        want = np.zeros(got.shape)
        for place, window in found.items():
            want[(..., *place)] = reduce(window)
        assert_close(got, want)


def test_dilation():
    x = draw(2)
    got = rx.max_pool2d(x, 2, stride=1, padding=1, dilation=3)
    for place, window in windows(x, 2, 1, 1, dilation=3):
        assert_close(got[(..., *place)], window.max(-1))


def test_same_padding():
    x = np.arange(1.0, 6)[None, None]
    assert_close(rx.max_pool1d(x, 2, stride=2, padding="same"), [[[2, 4, 5]]])
    assert_close(
        rx.avg_pool1d(x, 2, stride=2, padding="same", count_padding=False), [[[1.5, 3.5, 5]]]
    )


def test_ties_share_the_gradient_evenly():
    x = rx.Tensor(np.array([[[1.0, 1.0, 0.0, 2.0, 2.0, 2.0]]]), requires_grad=True)
    rx.sum(rx.max_pool1d(x, 3) * np.array([6.0, 12.0])).backward()
    assert_close(x.grad, [[[3, 3, 0, 4, 4, 4]]])


def test_the_padding_is_never_the_largest():
    x = rx.Tensor(np.full((1, 1, 2), -np.inf), requires_grad=True)
    out = rx.max_pool1d(x, 2, stride=2, padding=1)
    assert_close(out, [[[-np.inf, -np.inf]]])
    rx.sum(out).backward()
    assert_close(x.grad, [[[1, 1]]])


def test_nan_is_handed_on():
    x = np.array([[[np.nan, 1.0, 2.0, 3.0]]])
    assert_close(rx.max_pool1d(x, 2), [[[np.nan, 3.0]]])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_adaptive_average(xp, n):
    x = draw(n)
    for size in (1, 2, 4, (5, 6, 4)[:n]):
        got = ADAPTIVE[n](xp.asarray(x), size)
        want = x
        for axis, m in enumerate(per_axis(size, n), start=2):
            length = x.shape[axis]
            parts = [
                want.take(range(i * length // m, -(-(i + 1) * length // m)), axis=axis).mean(axis)
                for i in range(m)
            ]
            want = np.stack(parts, axis=axis)
        assert_close(got, want)


def test_global_pooling(xp):
    x = draw(2)
    assert_close(rx.global_avg_pool(xp.asarray(x)), x.mean((2, 3)))
    assert_close(rx.global_max_pool(xp.asarray(x), keepdims=True), x.max((2, 3), keepdims=True))


POOLS = {
    "max": lambda x: rx.max_pool2d(x, 2, padding=1),
    "avg": lambda x: rx.avg_pool2d(x, 3, stride=2, padding=1),
    "adaptive": lambda x: rx.adaptive_avg_pool2d(x, (2, 4)),
    "global avg": rx.global_avg_pool,
    "global max": rx.global_max_pool,
}


@pytest.mark.parametrize("name", POOLS)
def test_half_precision(check_half, name):
    check_half(POOLS[name], rng.standard_normal((2, 3, 5, 6)))


def test_the_average_of_large_float16_does_not_overflow():
    x = np.full((1, 1, 64), 60000, dtype="float16")
    assert_close(rx.avg_pool1d(x, 32), [[[60000, 60000]]])
    assert_close(rx.adaptive_avg_pool1d(x, 1), [[[60000]]], rtol=1e-3)


@pytest.mark.parametrize("name", POOLS)
def test_empty_batches_and_strided_views(name):
    x = rx.Tensor(np.zeros((0, 3, 5, 6)), requires_grad=True)
    rx.sum(POOLS[name](x)).backward()
    assert x.grad.shape == x.shape
    view = rng.standard_normal((3, 4, 10, 6))[::-1, ::2, ::-2]
    assert_close(POOLS[name](view), POOLS[name](np.ascontiguousarray(view)))


X = draw(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rx.max_pool2d(X[0], 2),
            ValueError,
            r"x must have shape \(batch, channels, height",
        ),
        (lambda: rx.max_pool2d(X, 0), ValueError, "kernel_size must be an int >= 1 or 2 of them"),
        (lambda: rx.avg_pool2d(X, 2, stride=0), ValueError, "stride must be an int >= 1 or 2"),
        (
            lambda: rx.avg_pool2d(X, (2, 2, 2)),
            ValueError,
            r"kernel_size must be .* got \(2, 2, 2\)",
        ),
        (
            lambda: rx.max_pool2d(X, 2, padding=2),
            ValueError,
            r"padding must be at most half of kernel_size \(2, 2\), got 2",
        ),
        (lambda: rx.max_pool2d(X, 6), ValueError, "kernel_size must fit into the padded input"),
        (lambda: rx.max_pool2d(X.astype("int64"), 2), TypeError, "x must have a real floating"),
        (lambda: rx.adaptive_avg_pool2d(X, 0), ValueError, "output_size must be an int >= 1 or 2"),
        (
            lambda: rx.adaptive_avg_pool2d(X[:, :, :0], 1),
            ValueError,
            "x must have elements along its spatial axes",
        ),
        (lambda: rx.global_avg_pool(X[0, 0]), ValueError, r"x must have shape \(batch, channels"),
        (lambda: rx.global_max_pool(X[:, :, :0]), ValueError, "with elements along at least one"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_agreement_with_torch(against_torch, n, geometry):
    from torch.nn import functional as F

    x = draw(n)
    kernel, more = options(geometry, n)
    theirs = getattr(F, f"max_pool{n}d")
    against_torch(lambda x: MAX[n](x, kernel, **more), lambda x: theirs(x, kernel, **more), x)
    average = getattr(F, f"avg_pool{n}d")
    for count in (True, False):
        against_torch(
            lambda x, c=count: AVG[n](x, kernel, count_padding=c, **more),
            lambda x, c=count: average(x, kernel, count_include_pad=c, **more),
            x,
        )
    adaptive = getattr(F, f"adaptive_avg_pool{n}d")
    against_torch(lambda x: ADAPTIVE[n](x, 3), lambda x: adaptive(x, 3), x)
