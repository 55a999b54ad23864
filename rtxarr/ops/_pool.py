"""Pooling over one to three spatial axes, and its derivative rules."""

import numpy as np

from rtxarr._device import constant, namespace
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import raw
from rtxarr.ops._check import check_floating
from rtxarr.ops._elementwise import astype
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import moveaxis
from rtxarr.ops._reduce import max, mean
from rtxarr.ops._windows import check_spatial, for_axes, make_windows, per_axis

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "global_avg_pool",
    "global_max_pool",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]


def _taps(windows, spatial):
    """Give, for each tap, the indices of the windows and of the elements that it reads."""
    for _, places, elements in windows.taps(spatial):
        yield (..., *places), (..., *elements)


def _outputs(xp, x, windows, fill):
    """Make the array with one element a window."""
    return xp.full((*x.shape[:2], *windows.counts(x.shape[2:])), fill, dtype=x.dtype)


# ------------------------------------------------------------------------------ maximum


@differentiable
@rounded_once
def _max_pool(x, *, windows):
    """Give the largest element of each window."""
    xp = namespace(x)
    out = _outputs(xp, x, windows, -np.inf)
    for places, elements in _taps(windows, x.shape[2:]):
        out[places] = xp.maximum(out[places], x[elements])
    return out


def _tied(x, largest):
    """Tell which elements are the largest of their window; in one with a NaN all are."""
    return ~(x < largest)


def _shares(x, largest, windows, dtype):
    """Give one over the number of tied elements of each window."""
    xp = namespace(x)
    count = xp.zeros(largest.shape, dtype=dtype)
    for places, elements in _taps(windows, x.shape[2:]):
        count[places] += xp.astype(_tied(x[elements], largest[places]), dtype)
    return 1 / xp.maximum(count, xp.ones_like(count))


@differentiable
@rounded_once
def _spread_to_largest(y, x, largest, *, windows):
    """Hand the values ``y`` of the windows back to their largest elements, in equal shares."""
    xp = namespace(y, x, largest)
    y = y * _shares(x, largest, windows, y.dtype)
    total = xp.zeros(x.shape, dtype=y.dtype)
    zero = xp.zeros((), dtype=y.dtype)
    for places, elements in _taps(windows, x.shape[2:]):
        total[elements] += xp.where(_tied(x[elements], largest[places]), y[places], zero)
    return total


@differentiable
@rounded_once
def _mean_of_largest(y, x, largest, *, windows):
    """Average ``y`` over the elements where ``x`` is the largest of its window."""
    xp = namespace(y, x, largest)
    total = _outputs(xp, y, windows, 0)
    zero = xp.zeros((), dtype=y.dtype)
    for places, elements in _taps(windows, x.shape[2:]):
        total[places] += xp.where(_tied(x[elements], largest[places]), y[elements], zero)
    return total * _shares(x, largest, windows, y.dtype)


# Which elements are the largest does not change with a small change of x, so the two maps below,
# each other's transposes, take x and the largest elements as constants.
_max_pool.defvjps(
    x=lambda g, x, out, windows: _spread_to_largest(g, raw(x), raw(out), windows=windows)
)
_spread_to_largest.defvjps(
    y=lambda g, x, largest, windows: _mean_of_largest(g, x, largest, windows=windows)
)
_mean_of_largest.defvjps(
    y=lambda g, x, largest, windows: _spread_to_largest(g, x, largest, windows=windows)
)

# ------------------------------------------------------------------------------ average


def _sizes(x, windows, spatial, count_padding):
    """Give the number of elements that each window averages."""
    if count_padding:
        return windows.n_taps
    return constant(x, _real_sizes, windows, tuple(spatial), dtype=x.dtype)


def _real_sizes(windows, spatial):
    sizes = np.zeros(windows.counts(spatial))
    for places, _ in _taps(windows, spatial):
        sizes[places] += 1
    return sizes


@differentiable
@rounded_once
def _avg_pool(x, *, windows, count_padding):
    """Average the elements of each window."""
    xp = namespace(x)
    out = _outputs(xp, x, windows, 0)
    for places, elements in _taps(windows, x.shape[2:]):
        out[places] += x[elements]
    return out / _sizes(x, windows, x.shape[2:], count_padding)


@differentiable
@rounded_once
def _spread_evenly(y, *, windows, count_padding, spatial):
    """Hand the value of each window back to its elements in equal shares."""
    xp = namespace(y)
    y = y / _sizes(y, windows, spatial, count_padding)
    total = xp.zeros((*y.shape[:2], *spatial), dtype=y.dtype)
    for places, elements in _taps(windows, spatial):
        total[elements] += y[places]
    return total


_avg_pool.defvjps(
    x=lambda g, x_shape, windows, count_padding: _spread_evenly(
        g, windows=windows, count_padding=count_padding, spatial=tuple(x_shape[2:])
    )
)
_spread_evenly.defvjps(
    y=lambda g, windows, count_padding: _avg_pool(g, windows=windows, count_padding=count_padding)
)

# ---------------------------------------------------------------------- public functions


def _windows(n_axes, x, kernel_size, stride, padding, dilation):
    check_floating(x=x)
    check_spatial(x, n_axes)
    kernel = per_axis("kernel_size", kernel_size, n_axes, 1)
    windows = make_windows(
        kernel, x.shape[2:], kernel if stride is None else stride, padding, dilation
    )
    if not isinstance(padding, str) and any(
        2 * p > k for (p, _), k in zip(windows.padding, kernel, strict=True)
    ):
        raise ValueError(
            f"padding must be at most half of kernel_size {kernel}, got {padding}: a window "
            "must see an element"
        )
    windows.check_fit(x.shape[2:], "kernel_size")
    return windows


def _max_pool_function(n_axes):
    def max_pool(
        x,
        /,
        kernel_size: int | tuple[int, ...],
        *,
        stride: int | tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
    ):
        windows = _windows(n_axes, x, kernel_size, stride, padding, dilation)
        return _max_pool(x, windows=windows)

    return for_axes(max_pool, f"max_pool{n_axes}d", _MAX_DOC, n_axes)


def _avg_pool_function(n_axes):
    def avg_pool(
        x,
        /,
        kernel_size: int | tuple[int, ...],
        *,
        stride: int | tuple[int, ...] | None = None,
        padding: int | tuple[int, ...] | str = 0,
        count_padding: bool = True,
    ):
        windows = _windows(n_axes, x, kernel_size, stride, padding, 1)
        return _avg_pool(x, windows=windows, count_padding=count_padding)

    return for_axes(avg_pool, f"avg_pool{n_axes}d", _AVG_DOC, n_axes)


def _adaptive_function(n_axes):
    def adaptive_avg_pool(x, /, output_size: int | tuple[int, ...]):
        check_floating(x=x)
        check_spatial(x, n_axes)
        sizes = per_axis("output_size", output_size, n_axes, 1)
        if 0 in x.shape[2:]:
            raise ValueError(f"x must have elements along its spatial axes, got shape {x.shape}")
        out = widen(x)
        for axis, size in enumerate(sizes, start=2):
            out = _average_parts(out, axis, size)
        return astype(out, x.dtype, copy=False)

    return for_axes(adaptive_avg_pool, f"adaptive_avg_pool{n_axes}d", _ADAPTIVE_DOC, n_axes)


def _average_parts(x, axis, n_parts):
    """Average ``n_parts`` parts of an axis: from ``i * n // n_parts``, the ends rounded up."""
    weights = constant(raw(x), _part_weights, x.shape[axis], n_parts, dtype=x.dtype)
    return moveaxis(matmul(moveaxis(x, axis, -1), weights), -1, axis)


def _part_weights(n, n_parts):
    weights = np.zeros((n, n_parts))
    for i in range(n_parts):
        start, stop = i * n // n_parts, -(-(i + 1) * n // n_parts)
        weights[start:stop, i] = 1 / (stop - start)
    return weights


@explained
def global_avg_pool(x, /, *, keepdims: bool = False):
    """Average over all spatial axes.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, ...)
    keepdims : bool, default False
        Keep the spatial axes with length one.

    Returns
    -------
    array or Tensor, shape (batch, channels)
    """
    return _global(mean, x, keepdims)


@explained
def global_max_pool(x, /, *, keepdims: bool = False):
    """Give the largest element over all spatial axes; ties share the gradient evenly.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, ...)
    keepdims : bool, default False
        Keep the spatial axes with length one.

    Returns
    -------
    array or Tensor, shape (batch, channels)
    """
    return _global(max, x, keepdims)


def _global(reduce, x, keepdims):
    check_floating(x=x)
    if x.ndim < 3 or 0 in x.shape[2:]:
        raise ValueError(
            f"x must have shape (batch, channels, ...) with elements along at least one spatial "
            f"axis, got {x.shape}"
        )
    return reduce(x, axis=tuple(range(2, x.ndim)), keepdims=keepdims)


_WINDOW_DOC = """

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, {axes})
    kernel_size : int or one for each axis, at least 1
    stride : int or one for each axis, at least 1, default ``kernel_size``
        Step between windows.
    padding : int, one for each axis, "same" or "valid", default 0
        Elements to add on both sides, at most half of ``kernel_size``."""

_MAX_DOC = (
    """Give the largest element of each window over {axes}."""
    + _WINDOW_DOC
    + """ They are never the
        largest.
    dilation : int or one for each axis, at least 1, default 1
        Step between the elements of one window.

    Returns
    -------
    array or Tensor, shape (batch, channels, {axes})

    Notes
    -----
    Tied elements share the gradient evenly; a NaN is handed on.
    """
)

_AVG_DOC = (
    """Average the elements of each window over {axes}."""
    + _WINDOW_DOC
    + """
    count_padding : bool, default True
        Average the padding's zeros too.

    Returns
    -------
    array or Tensor, shape (batch, channels, {axes})
    """
)

_ADAPTIVE_DOC = """Average as many parts of each axis ({axes}) as the result is to have.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, {axes})
    output_size : int or one for each axis, at least 1
        Part ``i`` of ``m`` of an axis of ``n`` runs from ``floor(i * n / m)`` to
        ``ceil((i + 1) * n / m)``.

    Returns
    -------
    array or Tensor, shape (batch, channels, *output_size)
    """

max_pool1d, max_pool2d, max_pool3d = (explained(_max_pool_function(n)) for n in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (explained(_avg_pool_function(n)) for n in (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    explained(_adaptive_function(n)) for n in (1, 2, 3)
)
