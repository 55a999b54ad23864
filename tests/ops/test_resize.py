"""Interpolation against plain sums over elements and PyTorch."""

import math

import numpy as np
import pytest

import rtxarr as rx
from rtxarr.testing import assert_close

rng = np.random.default_rng(9)
SIGNAL = rng.standard_normal((2, 3, 5))
IMAGE = rng.standard_normal((2, 3, 5, 6))
VOLUME = rng.standard_normal((2, 2, 3, 4, 5))
TARGETS = [{"size": 8}, {"size": 3}, {"size": 1}, {"scale": 2}, {"scale": 1.7}, {"scale": 0.6}]


def hat(d):
    return max(0.0, 1 - abs(d))


def cubic(d, a=-0.75):
    d = abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def plain_axis(row, n_out, step, kernel, reach, align_corners):
    """Sum the elements around each place, the outermost ones repeated."""
    out = []
    for i in range(n_out):
        at = (i + 0.5) * step - 0.5
        if align_corners:
            at = i * (len(row) - 1) / (n_out - 1) if n_out > 1 else 0.0
        elif kernel is hat:
            at = max(at, 0.0)
        first = math.floor(at)
        near = range(first - reach + 1, first + reach + 1)
        out.append(sum(kernel(at - j) * row[min(max(j, 0), len(row) - 1)] for j in near))
    return out


def plain(x, mode, align_corners=False, size=None, scale=None):
    kernel, reach = (cubic, 2) if mode == "bicubic" else (hat, 1)
    for axis in range(2, x.ndim):
        n = x.shape[axis]
        n_out = size if scale is None else math.floor(n * scale)
        step = n / size if scale is None else 1 / scale
        if mode == "nearest":
            x = x.take([min(math.floor(i * step), n - 1) for i in range(n_out)], axis=axis)
        else:
            x = np.apply_along_axis(plain_axis, axis, x, n_out, step, kernel, reach, align_corners)
    return x


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(
    ("x", "mode"),
    [
        (SIGNAL, "nearest"),
        (IMAGE, "nearest"),
        (SIGNAL, "linear"),
        (IMAGE, "bilinear"),
        (VOLUME, "trilinear"),
        (IMAGE, "bicubic"),
    ],
    ids=["nearest1", "nearest2", "linear", "bilinear", "trilinear", "bicubic"],
)
def test_values(xp, x, mode, target):
    got = rx.interpolate(xp.asarray(x), mode=mode, **target)
    assert_close(got, plain(x, mode, **target))
    if mode != "nearest":
        got = rx.interpolate(xp.asarray(x), mode=mode, align_corners=True, **target)
        assert_close(got, plain(x, mode, align_corners=True, **target))


def test_linear_is_for_any_number_of_axes():
    for x, mode in ((IMAGE, "bilinear"), (VOLUME, "trilinear")):
        got = rx.interpolate(x, size=4, mode="linear")
        assert_close(got, rx.interpolate(x, size=4, mode=mode), exact=True)


def test_corners_and_constants_are_kept():
    out = rx.interpolate(IMAGE, size=(9, 11), mode="bicubic", align_corners=True)
    assert_close(out[..., ::8, ::10], IMAGE[..., ::4, ::5])
    flat = np.full((1, 1, 3, 4), 2.5)
    for mode in ("nearest", "bilinear", "bicubic"):
        assert_close(rx.interpolate(flat, size=7, mode=mode), np.full((1, 1, 7, 7), 2.5))


def test_the_same_size_changes_nothing():
    assert rx.interpolate(IMAGE, size=(5, 6), mode="bicubic") is IMAGE


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_half_precision(check_half, mode):
    check_half(lambda x: rx.interpolate(x, size=(7, 4), mode=mode), IMAGE)


def test_empty_batches_and_strided_views():
    x = rx.Tensor(IMAGE[:0], requires_grad=True)
    rx.sum(rx.interpolate(x, scale=2, mode="bilinear")).backward()
    assert x.grad.shape == x.shape
    view = np.moveaxis(IMAGE, 1, -1)[::-1, ::2]
    got = rx.interpolate(view, size=4, mode="bicubic")
    assert_close(got, rx.interpolate(np.ascontiguousarray(view), size=4, mode="bicubic"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rx.interpolate(IMAGE), ValueError, "either size or scale must be given"),
        (lambda: rx.interpolate(IMAGE, size=2, scale=2), ValueError, "either size or scale"),
        (
            lambda: rx.interpolate(IMAGE, size=0),
            ValueError,
            "size must be an int >= 1 or 2 of them",
        ),
        (lambda: rx.interpolate(IMAGE, scale=0.0), ValueError, "scale must be above 0"),
        (lambda: rx.interpolate(IMAGE, scale=(1, 2, 3)), ValueError, "scale must be above 0, one"),
        (lambda: rx.interpolate(IMAGE, scale=np.inf), ValueError, "scale must be finite, got inf"),
        (lambda: rx.interpolate(IMAGE, scale="2"), TypeError, "scale must be a number, got str"),
        (lambda: rx.interpolate(IMAGE, scale=0.1), ValueError, "scale must leave elements"),
        (lambda: rx.interpolate(IMAGE, size=2, mode="area"), ValueError, "mode must be one of"),
        (
            lambda: rx.interpolate(SIGNAL, size=2, mode="bilinear"),
            ValueError,
            "with 2 spatial axes for mode 'bilinear'",
        ),
        (lambda: rx.interpolate(IMAGE[:, :, :0], size=2), ValueError, "none of them empty"),
        (
            lambda: rx.interpolate(IMAGE, size=2, align_corners=True),
            ValueError,
            "align_corners must be False for mode 'nearest'",
        ),
        (
            lambda: rx.interpolate(IMAGE.astype("int64"), size=2),
            TypeError,
            "x must have a real floating-point dtype",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.compare
@pytest.mark.parametrize("target", [*TARGETS, {"size": (7, 2)}, {"scale": (0.5, 3.3)}], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_agreement_with_torch(against_torch, mode, target):
    from torch.nn import functional as F

    theirs = {"scale_factor" if name == "scale" else name: v for name, v in target.items()}
    for corners in (False, True) if mode != "nearest" else (None,):
        against_torch(
            lambda x, c=corners: rx.interpolate(x, mode=mode, align_corners=bool(c), **target),
            lambda x, c=corners: F.interpolate(x, mode=mode, align_corners=c, **theirs),
            IMAGE,
        )
