"""Convolutions and their transposes over one to three spatial axes.

Three operations close under differentiation: with ``T(x, weight, g)`` the sum of the products
that a convolution of ``x`` by ``weight`` forms with ``g``, ``_convolution`` is its derivative by
``g``, ``_convolution_input`` by ``x`` and ``_convolution_weight`` by ``weight``. On a GPU cuDNN
computes them; otherwise all unfold the windows, a few samples at a time, and multiply matrices.
"""

import math

from rtxarr._device import is_device_array, namespace
from rtxarr._override import overridable
from rtxarr.autograd._autocast import active_dtype
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import raw
from rtxarr.libs._conv_plans import channels_last
from rtxarr.libs.dnn import try_convolution, try_convolution_input, try_convolution_weight
from rtxarr.ops._activated import _stored_relu, check_activation, is_tracked
from rtxarr.ops._activations import relu, silu
from rtxarr.ops._check import check_floating
from rtxarr.ops._elementwise import add
from rtxarr.ops._gates import on_gpu
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._linalg import matmul
from rtxarr.ops._manipulate import reshape
from rtxarr.ops._reduce import sum
from rtxarr.ops._windows import AXES, batches, check_spatial, for_axes, make_windows, per_axis

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
]

ACTIVATIONS = {"relu": relu, "silu": silu}


def _batch_last(x):
    """Copy ``(n, channels, *spatial)`` to ``(channels, *spatial, n)``: long runs to copy from."""
    xp = namespace(x)
    moved = xp.moveaxis(x, 0, -1)
    out = xp.empty(moved.shape, dtype=x.dtype)
    out[...] = moved
    return out


def _unfold(x, windows):
    """Copy what each tap reads, ``(n, channels, *spatial)``, to ``(channels, tap, *counts, n)``."""
    x = _batch_last(x)
    if windows.trivial:
        return x
    xp = namespace(x)
    channels, *spatial, n = x.shape
    columns = xp.zeros((channels, windows.n_taps, *windows.counts(spatial), n), dtype=x.dtype)
    for tap, places, elements in windows.taps(spatial):
        columns[(slice(None), tap, *places, ...)] = x[(slice(None), *elements, ...)]
    return columns


def _fold(columns, windows, spatial):
    """Add up what each tap read, the transpose of :func:`_unfold`."""
    xp = namespace(columns)
    channels, n = columns.shape[0], columns.shape[-1]
    if windows.trivial:
        x = xp.reshape(columns, (channels, *spatial, n))
    else:
        x = xp.zeros((channels, *spatial, n), dtype=columns.dtype)
        for tap, places, elements in windows.taps(spatial):
            x[(slice(None), *elements, ...)] += columns[(slice(None), tap, *places, ...)]
    return xp.moveaxis(x, -1, 0)


def _result(xp, shape, *arrays):
    """Make the array for a result computed from ``arrays`` (or None)."""
    return xp.empty(shape, dtype=xp.result_type(*(a for a in arrays if a is not None)))


def _add_bias(out, bias):
    if bias is not None:
        out += namespace(bias).reshape(bias, (-1,) + (1,) * (out.ndim - 2))
    return out


@differentiable
@overridable
def _convolution(x, weight, bias=None, residual=None, *, windows, groups, activation=None):
    """Convolve ``x (batch, in_channels, *spatial)``: ``(batch, out_channels, *counts)``.

    Then comes what is added to that, and an activation, of which the rules know nothing: the
    result stands in for its argument, as ReLU lets it.
    """
    options = {"windows": windows, "groups": groups}
    fuses = residual is None or residual.dtype == x.dtype
    out = None
    if is_device_array(x):
        more = {"residual": residual, "activation": activation} if fuses else {}
        out = try_convolution(x, weight, bias, **options, **more)
        if out is not None and fuses:
            return out
    if out is None:
        out = _unfolded(x, weight, bias, **options)
    return _finished(out, residual, activation)


def _finished(out, residual, activation):
    """Add to a convolution what comes after it."""
    out = out if residual is None else add(out, residual)
    return out if activation is None else ACTIVATIONS[activation](out)


@rounded_once
def _unfolded(x, weight, bias, *, windows, groups):
    xp = namespace(x, weight, bias)
    n_batch, n_in, *spatial = x.shape
    n_out, counts = weight.shape[0], windows.counts(spatial)
    n_rows = n_in // groups * windows.n_taps
    matrices = xp.reshape(weight, (groups, n_out // groups, n_rows))
    out = _result(xp, (n_batch, n_out, *counts), x, weight, bias)
    for part in batches(n_batch, n_in * windows.n_taps * math.prod(counts), x):
        columns = _unfold(x[part, ...], windows)
        columns = xp.reshape(columns, (groups, n_rows, -1))
        product = xp.reshape(matmul(matrices, columns), (n_out, *counts, -1))
        out[part, ...] = xp.moveaxis(product, -1, 0)
    return _add_bias(out, bias)


@differentiable
@overridable
def _convolution_input(y, weight, bias=None, *, windows, groups, spatial):
    """Spread ``y (batch, out_channels, *counts)`` over what it is made from, of ``spatial``."""
    if is_device_array(y) and (bias is None or bias.dtype == y.dtype):
        out = try_convolution_input(y, weight, windows=windows, groups=groups, spatial=spatial)
        if out is not None:
            return _add_bias(out, bias)
    return _unfolded_input(y, weight, bias, windows=windows, groups=groups, spatial=spatial)


@rounded_once
def _unfolded_input(y, weight, bias, *, windows, groups, spatial):
    xp = namespace(y, weight, bias)
    n_batch, n_out, *counts = y.shape
    n_in = weight.shape[1] * groups
    n_rows = n_in // groups * windows.n_taps
    matrices = xp.matrix_transpose(xp.reshape(weight, (groups, n_out // groups, n_rows)))
    out = _result(xp, (n_batch, n_in, *spatial), y, weight, bias)
    for part in batches(n_batch, n_in * windows.n_taps * math.prod(counts), y):
        rows = xp.reshape(_batch_last(y[part, ...]), (groups, n_out // groups, -1))
        columns = matmul(matrices, rows)
        columns = xp.reshape(columns, (n_in, windows.n_taps, *counts, -1))
        out[part, ...] = _fold(columns, windows, spatial)
    return _add_bias(out, bias)


@differentiable
@overridable
def _convolution_weight(x, y, *, windows, groups, last=None):
    """Sum, over samples and places, what each tap read times ``y``: the shape of a weight.

    On a GPU, channels are ``last`` in its memory or not; None leaves it open.
    """
    out = None
    if is_device_array(x):
        out = try_convolution_weight(x, y, windows=windows, groups=groups, channels_last=last)
    return _unfolded_weight(x, y, windows=windows, groups=groups) if out is None else out


@rounded_once
def _unfolded_weight(x, y, *, windows, groups):
    xp = namespace(x, y)
    n_batch, n_in = x.shape[:2]
    n_out, counts = y.shape[1], y.shape[2:]
    n_rows = n_in // groups * windows.n_taps
    total = xp.zeros((groups, n_out // groups, n_rows), dtype=xp.result_type(x, y))
    for part in batches(n_batch, n_in * windows.n_taps * math.prod(counts), x):
        columns = xp.reshape(_unfold(x[part, ...], windows), (groups, n_rows, -1))
        rows = xp.reshape(_batch_last(y[part, ...]), (groups, n_out // groups, -1))
        total += matmul(rows, xp.matrix_transpose(columns))
    return xp.reshape(total, (n_out, n_in // groups, *windows.kernel))


def _weight_like(g, x, weight, windows, groups):
    """Give the gradient by a weight, in the memory order of the weight."""
    weight = raw(weight)
    last = channels_last(weight) if is_device_array(weight) else None
    return _convolution_weight(x, g, windows=windows, groups=groups, last=last)


def _sum_over_places(g):
    return sum(widen(g), axis=(0, *range(2, g.ndim)))


_convolution.defvjps(
    x=lambda g, x_shape, weight, windows, groups: _convolution_input(
        g, weight, windows=windows, groups=groups, spatial=tuple(x_shape[2:])
    ),
    weight=_weight_like,
    bias=_sum_over_places,
    residual=lambda g: g,
)
_convolution_input.defvjps(
    y=lambda g, weight, windows, groups: _convolution(g, weight, windows=windows, groups=groups),
    weight=lambda g, y, weight, windows, groups: _weight_like(y, g, weight, windows, groups),
    bias=_sum_over_places,
)
_convolution_weight.defvjps(
    x=lambda g, x_shape, y, windows, groups: _convolution_input(
        y, g, windows=windows, groups=groups, spatial=tuple(x_shape[2:])
    ),
    y=lambda g, x, windows, groups: _convolution(x, g, windows=windows, groups=groups),
)


def _weight_per_sample(x, y, windows, groups):
    """Give ``_convolution_weight`` of each sample: samples are groups of one large sample."""
    n, n_in = x.shape[:2]
    n_out = y.shape[1]
    shape = (n, n_out, n_in // groups, *windows.kernel)
    if n == 0:
        return namespace(raw(x)).zeros(shape, dtype=x.dtype)
    x = reshape(x, (1, n * n_in, *x.shape[2:]))
    y = reshape(y, (1, n * n_out, *y.shape[2:]))
    return reshape(_convolution_weight(x, y, windows=windows, groups=n * groups), shape)


def _bias_per_sample(g):
    return sum(widen(g), axis=tuple(range(2, g.ndim)))


_convolution.defper_sample(
    weight=lambda g, x, windows, groups: _weight_per_sample(x, g, windows, groups),
    bias=_bias_per_sample,
)
_convolution_input.defper_sample(
    weight=lambda g, y, windows, groups: _weight_per_sample(g, y, windows, groups),
    bias=_bias_per_sample,
)


def _check(n_axes, x, weight, bias, groups, layout):
    """Refuse arrays that do not fit together, except in the channels of ``x``."""
    check_floating(x=x, weight=weight, bias=bias)
    check_spatial(x, n_axes)
    if not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups must be an int >= 1, got {groups!r}")
    if weight.ndim != n_axes + 2 or 0 in weight.shape:
        raise ValueError(
            f"weight must have shape ({layout}, {AXES[n_axes]}), none of them 0, got {weight.shape}"
        )
    if weight.shape[0] % groups:
        raise ValueError(
            f"the first axis of weight must be a multiple of groups ({groups}), got {weight.shape}"
        )


def _check_bias(bias, n_out):
    if bias is not None and bias.shape != (n_out,):
        raise ValueError(f"bias must have shape ({n_out},), got {bias.shape}")


def _conv(
    n_axes, x, weight, bias, stride, padding, dilation, groups, residual=None, activation=None
):
    _check(n_axes, x, weight, bias, groups, "out_channels, in_channels / groups")
    if x.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"x must have {weight.shape[1] * groups} channels for weight of shape {weight.shape} "
            f"and groups {groups}, got shape {x.shape}"
        )
    _check_bias(bias, weight.shape[0])
    windows = make_windows(weight.shape[2:], x.shape[2:], stride, padding, dilation)
    windows.check_fit(x.shape[2:], "weight")
    if residual is None and activation is None:
        return _convolution(x, weight, bias, None, windows=windows, groups=groups)
    check_activation(activation, tuple(ACTIVATIONS))
    shape = x.shape[0], weight.shape[0], *windows.counts(x.shape[2:])
    check_floating(residual=residual)
    if residual is not None and residual.shape != shape:
        raise ValueError(
            f"residual must have the shape of the result, {shape}, got {residual.shape}"
        )
    options = {"windows": windows, "groups": groups}
    if on_gpu(x):
        return _in_plan((x, weight, bias, residual), activation, **options)
    if active_dtype() is not None:  # a residual is cast with the others, as on a GPU
        return _finished(_convolution(x, weight, bias, residual, **options), None, activation)
    return _finished(_convolution(x, weight, bias, None, **options), residual, activation)


def _in_plan(arrays, activation, **options):
    if activation == "relu":
        return _stored_relu(_convolution(*arrays, **options, activation="relu"))
    if activation == "silu" and is_tracked(*arrays):  # its rule needs what comes before it
        return silu(_convolution(*arrays, **options))
    return _convolution(*arrays, **options, activation=activation)


def _conv_transpose(n_axes, x, weight, bias, stride, padding, output_padding, dilation, groups):
    _check(n_axes, x, weight, bias, groups, "in_channels, out_channels / groups")
    if x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"x must have {weight.shape[0]} channels for weight of shape {weight.shape}, got "
            f"shape {x.shape}"
        )
    _check_bias(bias, weight.shape[1] * groups)
    padding = per_axis("padding", padding, n_axes, 0)
    extra = per_axis("output_padding", output_padding, n_axes, 0)
    windows = make_windows(weight.shape[2:], x.shape[2:], stride, padding, dilation)
    if any(e >= s for e, s in zip(extra, windows.stride, strict=True)):
        raise ValueError(
            f"output_padding must be smaller than stride {windows.stride}, got {output_padding}"
        )
    spatial = tuple(
        (n - 1) * s - 2 * p + span + e
        for n, s, p, span, e in zip(
            x.shape[2:], windows.stride, padding, windows.spans(), extra, strict=True
        )
    )
    if min(x.shape[2:]) < 1 or min(spatial) < 1:
        raise ValueError(
            f"padding must leave an output, got spatial shape {spatial} from {x.shape[2:]}"
        )
    return _convolution_input(x, weight, bias, windows=windows, groups=groups, spatial=spatial)


def _conv_function(n_axes):
    def conv(
        x,
        weight,
        bias=None,
        *,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        residual=None,
        activation: str | None = None,
    ):
        return _conv(
            n_axes, x, weight, bias, stride, padding, dilation, groups, residual, activation
        )

    return for_axes(conv, f"conv{n_axes}d", _DOC, n_axes)


def _conv_transpose_function(n_axes):
    def conv_transpose(
        x,
        weight,
        bias=None,
        *,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ):
        return _conv_transpose(
            n_axes, x, weight, bias, stride, padding, output_padding, dilation, groups
        )

    return for_axes(conv_transpose, f"conv_transpose{n_axes}d", _DOC_TRANSPOSE, n_axes)


_DOC = """Slide a bank of filters over {axes} (correlation: the filters are not flipped).

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, in_channels, {axes})
    weight : array or Tensor, shape (out_channels, in_channels / groups, {axes})
    bias : array or Tensor, shape (out_channels,), optional
    stride, dilation : int or one for each axis, at least 1, default 1
        Step between windows, and between the elements of one window.
    padding : int, one for each axis, "same" or "valid", default 0
        Zeros on both sides. "same" gives ``ceil(n / stride)`` windows; where the sum is odd the
        additional zero is at the end.
    groups : int, default 1
        Groups of channels that do not see each other.
    residual : array or Tensor, the shape of the result, optional
        Added to the result.
    activation : {{"relu", "silu"}}, optional
        Of all that.

    Returns
    -------
    array or Tensor, shape (batch, out_channels, {axes})
        An axis of ``n`` has ``(n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1``.

    Notes
    -----
    Differentiable in all arrays to any order. Half precision accumulates in float32. On a GPU cuDNN
    does the work where it can (see :func:`rtxarr.libs.show`), with channels last in the memory of
    the result if they are in that of ``x``; bias, residual and activation are part of it, but for
    SiLU where a gradient is recorded. Elsewhere unfolded windows take a buffer of up to 2**19
    elements on the CPU and 2**26 on a GPU, or of one sample's where that is more.
    """

_DOC_TRANSPOSE = """Spread each element over the window that :func:`conv{n_axes}d` makes it from.

    The gradient of a convolution by its input, also called a deconvolution.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, in_channels, {axes})
    weight : array or Tensor, shape (in_channels, out_channels / groups, {axes})
    bias : array or Tensor, shape (out_channels,), optional
    stride, dilation : int or one for each axis, at least 1, default 1
        Those of the convolution that is transposed.
    padding : int or one for each axis, default 0
        Elements to leave out on both sides of the result.
    output_padding : int or one for each axis, less than the stride, default 0
        Elements to add at the end: which of the inputs that give ``n`` windows to return.
    groups : int, default 1
        Groups of channels that do not see each other.

    Returns
    -------
    array or Tensor, shape (batch, out_channels, {axes})
        An axis of ``n`` has ``(n - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 +
        output_padding``.

    Notes
    -----
    Differentiable in ``x``, ``weight`` and ``bias`` to any order.
    """

conv1d, conv2d, conv3d = (explained(_conv_function(n)) for n in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    explained(_conv_transpose_function(n)) for n in (1, 2, 3)
)
