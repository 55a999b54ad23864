"""Interpolation of images and volumes, one axis after the other."""

import functools
import math

import numpy as np

from rtxarr._device import constant, namespace
from rtxarr.autograd._op import differentiable, explained
from rtxarr.ops._check import check_floating, check_number
from rtxarr.ops._elementwise import astype
from rtxarr.ops._half import widen
from rtxarr.ops._segment import scatter_add_rows
from rtxarr.ops._windows import per_axis

__all__ = ["interpolate"]

# For each mode, what it does along an axis and how many spatial axes it is for.
_MODES = {
    "nearest": ("nearest", (1, 2, 3)),
    "linear": ("linear", (1, 2, 3)),
    "bilinear": ("linear", (2,)),
    "trilinear": ("linear", (3,)),
    "bicubic": ("cubic", (2,)),
}
_CUBIC = -0.75  # the slope parameter that OpenCV and PyTorch use


@functools.lru_cache(maxsize=64)
def _stencil(kind, n_in, n_out, step, align_corners):
    """Give the elements that each result is made of and their weights, both (n_taps, n_out)."""
    place = np.arange(n_out)
    if kind == "nearest":
        # Rounded down in float32, like PyTorch: its grids agree at the edges of elements.
        index = np.floor(place.astype("float32") * np.float32(step)).astype("int64")
        return np.minimum(index, n_in - 1)[None], np.ones((1, n_out))
    if align_corners:
        at = place * ((n_in - 1) / (n_out - 1) if n_out > 1 else 0.0)
    else:
        at = (place + 0.5) * step - 0.5
        if kind == "linear":
            at = np.maximum(at, 0.0)
    first = np.floor(at)
    t = at - first
    if kind == "linear":
        taps, weights = (0, 1), (1 - t, t)
    else:
        # Keys, "Cubic convolution interpolation", 1981, eq. 4 with this slope at distance 1.
        taps = (-1, 0, 1, 2)
        weights = [_cubic(np.abs(t - tap)) for tap in taps]
    index = first.astype("int64") + np.array(taps)[:, None]
    return np.clip(index, 0, n_in - 1), np.stack(weights)


def _cubic(d):
    a = _CUBIC
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, a * (((d - 5) * d + 8) * d - 4))


def _taps(x, stencil, axis):
    """Yield the elements of each tap, and its weights, shaped to go along an axis of ``x``."""
    for tap in range(len(_stencil(*stencil)[0])):
        index = constant(x, _tap_index, stencil, tap)
        weights = constant(x, _tap_weights, stencil, tap, x.ndim - 1 - axis, dtype=x.dtype)
        yield index, weights


def _tap_index(stencil, tap):
    return _stencil(*stencil)[0][tap]


def _tap_weights(stencil, tap, n_axes_after):
    return _stencil(*stencil)[1][tap].reshape((-1,) + (1,) * n_axes_after)


@differentiable
def _resample(x, *, axis, stencil):
    """Replace an axis by weighted sums of its elements."""
    xp = namespace(x)
    total = 0
    for index, weights in _taps(x, stencil, axis):
        total = total + xp.take(x, index, axis=axis) * weights
    return total


@differentiable
def _resample_transpose(y, *, axis, stencil):
    """Hand each sum back to the elements that it is made of."""
    xp = namespace(y)
    rest = y.shape[:axis] + y.shape[axis + 1 :]
    n_in, total = stencil[1], 0
    for index, weights in _taps(y, stencil, axis):
        part = y * weights
        rows = xp.reshape(xp.moveaxis(part, axis, 0), (part.shape[axis], math.prod(rest)))
        total = total + scatter_add_rows(rows, index, n_in)
    return xp.moveaxis(xp.reshape(total, (n_in, *rest)), 0, axis)


_resample.defvjps(x=lambda g, axis, stencil: _resample_transpose(g, axis=axis, stencil=stencil))
_resample_transpose.defvjps(y=lambda g, axis, stencil: _resample(g, axis=axis, stencil=stencil))


@explained
def interpolate(
    x,
    /,
    *,
    size: int | tuple[int, ...] | None = None,
    scale: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
):
    """Resize signals, images or volumes.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, *spatial)
        One to three spatial axes.
    size : int or one for each spatial axis, at least 1, optional
        Lengths of the result. Either this or ``scale`` must be given.
    scale : float or one for each spatial axis, above 0, optional
        Factor on the lengths, which are rounded down.
    mode : {"nearest", "linear", "bilinear", "trilinear", "bicubic"}, default "nearest"
        "linear" is for any number of axes, "bilinear" and "bicubic" for two, "trilinear" for
        three. "nearest" takes element ``floor(i / scale)``.
    align_corners : bool, default False
        Put the first and last elements of the result on those of ``x``, and not the outer edges
        of the elements on each other. Not for "nearest".

    Returns
    -------
    array or Tensor, shape (batch, channels, *size)

    Notes
    -----
    Beyond the outermost elements their values are repeated. Nothing is smoothed when shrinking.

    References
    ----------
    Keys, "Cubic Convolution Interpolation for Digital Image Processing", IEEE TASSP 29, 1981.
    """
    check_floating(x=x)
    n_axes = x.ndim - 2
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
    kind, supported = _MODES[mode]
    if n_axes not in supported or 0 in x.shape[2:]:
        count = " or ".join(map(str, supported))
        raise ValueError(
            f"x must have shape (batch, channels, *spatial) with {count} spatial axes for mode "
            f"{mode!r}, none of them empty, got {x.shape}"
        )
    if align_corners and kind == "nearest":
        raise ValueError("align_corners must be False for mode 'nearest'")
    sizes, steps = _target(x.shape[2:], size, scale)
    out = widen(x)
    for axis, (n_in, n_out, step) in enumerate(zip(x.shape[2:], sizes, steps, strict=True), 2):
        if n_in != n_out or step != 1:
            stencil = (kind, n_in, n_out, step, align_corners)
            out = _resample(out, axis=axis, stencil=stencil)
    return out if out.dtype == x.dtype else astype(out, x.dtype)


def _target(spatial, size, scale):
    """Give the new lengths, and how far apart in ``x`` the elements of the result are."""
    if (size is None) == (scale is None):
        raise ValueError(f"either size or scale must be given, got {size} and {scale}")
    if size is not None:
        sizes = per_axis("size", size, len(spatial), 1)
        return sizes, [n / m for n, m in zip(spatial, sizes, strict=True)]
    scales = scale if isinstance(scale, (tuple, list)) else (scale,) * len(spatial)
    if len(scales) != len(spatial):
        raise ValueError(f"scale must be above 0, one number or {len(spatial)}, got {scale}")
    for one in scales:
        check_number("scale", one, above=0)
    sizes = [math.floor(n * s) for n, s in zip(spatial, scales, strict=True)]
    if min(sizes) < 1:
        raise ValueError(f"scale must leave elements along each axis of {spatial}, got {scale}")
    return sizes, [1 / s for s in scales]
