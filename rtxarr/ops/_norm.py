"""Normalizations: one operation behind all, and its joint derivative rule.

For the backward pass it keeps the input, the weight and the statistics of each group of elements.
"""

import math

from rtxarr._device import namespace, runs_kernels
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import Tensor, raw
from rtxarr.dtypes import accumulator, result_type
from rtxarr.kernels import group_norm as group_kernels
from rtxarr.kernels import norm as kernels
from rtxarr.ops._activations import _silu_slope, silu
from rtxarr.ops._check import check_floating, check_number
from rtxarr.ops._half import widen
from rtxarr.ops._manipulate import broadcast_to, reshape
from rtxarr.ops._reduce import any as any_along
from rtxarr.ops._reduce import mean, sum

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]


def _statistics(x, axes, centred):
    """Give the mean (None unless ``centred``) and the mean square from it, float32 or wider."""
    x = widen(x)
    centre = mean(x, axis=axes, keepdims=True) if centred else None
    deviation = x - centre if centred else x
    return centre, mean(deviation * deviation, axis=axes, keepdims=True)


@differentiable
def _normalize(x, weight, bias, centre, inverse, /, *, axes, affine, eps, fill):
    """Centre ``x`` and multiply it by ``inverse``, then by the weight, and add the bias.

    ``centre`` (or None) and ``inverse``, one over the deviation, are those of ``x`` over
    ``axes``, or constants when that is empty; with ``fill`` they are found here and written into
    these arrays. The weight and the bias are reshaped to ``affine``, which broadcasts against
    ``x``.
    """
    xp = namespace(x, weight, bias)
    if fill:
        n = math.prod(affine)
        return kernels.normalize(x, weight, bias, centre, inverse, n_features=n, eps=eps)
    dtype = result_type(*(a.dtype for a in (x, weight, bias) if a is not None))
    wide = accumulator(dtype)
    x = xp.astype(x, wide, copy=False)
    out = x * inverse if centre is None else (x - centre) * inverse
    if weight is not None:
        out *= xp.reshape(xp.astype(weight, wide, copy=False), affine)
    if bias is not None:
        out += xp.reshape(xp.astype(bias, wide, copy=False), affine)
    return xp.astype(out, dtype, copy=False)


def _hat(x, centre, inverse):
    x = widen(x)
    return x * inverse if centre is None else (x - centre) * inverse


def _normalize_rule(g, x, weight, bias_shape, centre, inverse, axes, affine, eps, fill, needs):
    if fill and not any(isinstance(a, Tensor) for a in (g, x, weight)) and kernels.fits(g, x):
        n = math.prod(affine)
        of_x, of_weight, of_bias = kernels.normalize_gradient(
            g, x, weight, centre, inverse, n_features=n, needs=needs[1:3]
        )
        of_weight = reshape(of_weight, weight.shape) if needs[1] else None
        return of_x, of_weight, reshape(of_bias, bias_shape) if needs[2] else None, None, None
    g = widen(g)
    if axes and isinstance(x, Tensor):
        # The saved statistics are constants; for higher orders they must depend on x.
        centre, square = _statistics(x, axes, centre is not None)
        inverse = (square + eps) ** -0.5
    hat = _hat(x, centre, inverse)
    of_x = of_weight = of_bias = None
    if needs[0]:
        of_hat = g if weight is None else g * reshape(widen(weight), affine)
        of_x = of_hat
        if axes:
            of_x = of_x - hat * mean(of_hat * hat, axis=axes, keepdims=True)
            if centre is not None:
                of_x = of_x - mean(of_hat, axis=axes, keepdims=True)
        of_x = of_x * inverse
    if needs[1]:
        of_weight = _sum_to(g * hat, affine, weight.shape)
    if needs[2]:
        of_bias = _sum_to(g, affine, bias_shape)
    return of_x, of_weight, of_bias, None, None


def _sum_to(g, affine, shape, first=0):
    """Add up all axes from ``first`` on along which a parameter is broadcast."""
    extra = g.ndim - len(affine)
    axes = tuple(i for i in range(first, g.ndim) if i < extra or affine[i - extra] == 1)
    return reshape(sum(g, axis=axes) if axes else g, g.shape[:first] + tuple(shape))


_normalize.defvjp(_normalize_rule)
_normalize.defrows(lambda mask, axes: any_along(mask, axis=axes, keepdims=True))


def _per_sample(g, axes, affine, shape):
    if 0 in axes:
        raise ValueError(
            "statistics over the batch axis mix its samples, so there are no gradients of each "
            "sample; normalize over other axes (layer_norm, group_norm)"
        )
    return _sum_to(g, affine, shape, first=1)


_normalize.defper_sample(
    weight=lambda g, x, weight_shape, centre, inverse, axes, affine: _per_sample(
        widen(g) * _hat(x, centre, inverse), axes, affine, weight_shape
    ),
    bias=lambda g, bias_shape, axes, affine: _per_sample(widen(g), axes, affine, bias_shape),
)


def _check(x, weight, bias, shape, eps):
    check_floating(x=x, weight=weight, bias=bias)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and tuple(parameter.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(parameter.shape)}")
    check_number("eps", eps, above=0)


def _in_one_dtype(*arrays):
    """Widen half precision that meets float32 for the kernels, which take one dtype."""
    dtypes = {a.dtype for a in arrays if a is not None}
    if len(dtypes) > 1 and runs_kernels(raw(arrays[0])):
        return tuple(a if a is None else widen(a) for a in arrays)
    return arrays


def _apply(x, weight, bias, axes, affine, eps, centred=True):
    x, weight, bias = _in_one_dtype(x, weight, bias)
    data = raw(x)
    fill = affine == data.shape[axes[0] :] and kernels.fits(data, raw(weight), raw(bias))
    if 0 in data.shape:  # nothing to normalize, and no statistics
        centre, inverse, axes = None, 1.0, ()
    elif fill:
        centre, inverse = kernels.empty_statistics(data, axes, centred=centred)
    else:
        centre, square = _statistics(data, axes, centred)
        inverse = (square + eps) ** -0.5
    return _normalize(
        x, weight, bias, centre, inverse, axes=axes, affine=affine, eps=eps, fill=fill
    )


def _last_axes(x, n_axes):
    if not isinstance(n_axes, int) or not 1 <= n_axes <= x.ndim:
        raise ValueError(f"n_axes must lie in [1, {x.ndim}] for x of shape {x.shape}, got {n_axes}")
    return tuple(range(x.ndim - n_axes, x.ndim)), tuple(x.shape[x.ndim - n_axes :])


@explained
def layer_norm(x, weight=None, bias=None, *, n_axes: int = 1, eps: float = 1e-5):
    """Normalize to zero mean and unit variance over the last axes.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., *features)
    weight, bias : array or Tensor, shape of the features, optional
    n_axes : int, at least 1, default 1
        How many last axes are the features.
    eps : float, above 0, default 1e-5
        Added to the variance.

    Returns
    -------
    array or Tensor, shape of ``x``

    References
    ----------
    Ba et al., "Layer Normalization", 2016, arXiv:1607.06450, eq. 4.
    """
    check_floating(x=x)
    axes, shape = _last_axes(x, n_axes)
    _check(x, weight, bias, shape, eps)
    return _apply(x, weight, bias, axes, shape, eps)


@explained
def rms_norm(x, weight=None, *, n_axes: int = 1, eps: float = 1e-6):
    """Scale to unit root mean square over the last axes.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (..., *features)
    weight : array or Tensor, shape of the features, optional
    n_axes : int, at least 1, default 1
        How many last axes are the features.
    eps : float, above 0, default 1e-6
        Added to the mean square; keeps an all-zero row finite.

    Returns
    -------
    array or Tensor, shape of ``x``

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467, eq. 4.
    """
    check_floating(x=x)
    axes, shape = _last_axes(x, n_axes)
    _check(x, weight, None, shape, eps)
    return _apply(x, weight, None, axes, shape, eps, centred=False)


def _channels(x):
    check_floating(x=x)
    if x.ndim < 2:
        raise ValueError(f"x must have shape (batch, channels, ...), got {x.shape}")
    return x.shape[1]


def _in_groups(x, n_groups):
    """Split the channels of ``x``; give also the shape of its parameters against that."""
    shape = x.shape
    groups = reshape(x, (shape[0], n_groups, shape[1] // n_groups, *shape[2:]))
    return groups, (n_groups, shape[1] // n_groups) + (1,) * (len(shape) - 2)


def _group_formula(x, weight, bias, n_groups, eps):
    groups, affine = _in_groups(x, n_groups)
    out = _apply(groups, weight, bias, tuple(range(2, groups.ndim)), affine, eps)
    return reshape(out, x.shape)


@differentiable
def _group_norm(x, weight, bias, centre, inverse, /, *, n_groups, eps, activation):
    """Normalize in groups, with kernels that fill in the statistics if these are given."""
    options = {"n_groups": n_groups, "eps": eps, "silu": activation == "silu"}
    if centre is not None:
        return group_kernels.group_normalize(x, weight, bias, centre, inverse, **options)
    return _activated(_group_formula(x, weight, bias, n_groups, eps), activation)


def _activated(x, activation):
    return silu(x) if activation == "silu" else x


def _before_activation(g, x, weight, bias, n_groups, eps, activation):
    if activation == "silu":
        return _silu_slope(_group_formula(x, weight, bias, n_groups, eps), g)
    return g


def _group_norm_rule(
    g, x, weight, bias, centre, inverse, n_groups, eps, activation, needs, bias_shape
):
    tensors = any(isinstance(a, Tensor) for a in (g, x, weight, bias))
    if centre is not None and not tensors and kernels.fits(g, x):
        options = {"n_groups": n_groups, "silu": activation == "silu", "needs": needs[1:3]}
        gradients = group_kernels.group_normalize_gradient(
            g, x, weight, bias, centre, inverse, **options
        )
        return (*gradients, None, None)
    g = _before_activation(g, x, weight, bias, n_groups, eps, activation)
    groups, affine = _in_groups(x, n_groups)
    axes = tuple(range(2, groups.ndim))
    centre, square = _statistics(groups, axes, True)
    inverse = (square + eps) ** -0.5
    of_x, *rest = _normalize_rule(
        reshape(g, groups.shape),
        groups,
        weight,
        bias_shape,
        centre,
        inverse,
        axes,
        affine,
        eps,
        False,
        needs,
    )
    return of_x if of_x is None else reshape(of_x, x.shape), *rest


_group_norm.defvjp(_group_norm_rule)


@_group_norm.defrows
def _group_norm_rows(mask, n_groups):
    """Give the groups with an element in ``mask``, for each channel and as the statistics lie."""
    parts, affine = _in_groups(mask, n_groups)
    groups = any_along(parts, axis=tuple(range(2, parts.ndim)), keepdims=True)
    channels = mask.shape[:2] + (1,) * (mask.ndim - 2)
    return reshape(broadcast_to(groups, (mask.shape[0], *affine)), channels), groups


def _group_norm_per_sample(g, x, weight, bias, n_groups, eps, activation, hat):
    """Give the gradients of the weight (or without ``hat`` the bias) for each sample."""
    g = widen(_before_activation(g, x, weight, bias, n_groups, eps, activation))
    if hat:
        g = g * widen(_group_formula(widen(x), None, None, n_groups, eps))
    return sum(g, axis=tuple(range(2, g.ndim))) if g.ndim > 2 else g


_group_norm.defper_sample(
    weight=lambda g, x, weight, bias, n_groups, eps, activation: _group_norm_per_sample(
        g, x, weight, bias, n_groups, eps, activation, True
    ),
    bias=lambda g, x, weight, bias, n_groups, eps, activation: _group_norm_per_sample(
        g, x, weight, bias, n_groups, eps, activation, False
    ),
)


@explained
def group_norm(
    x,
    n_groups: int,
    weight=None,
    bias=None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
):
    """Normalize to zero mean and unit variance over each group of channels of a sample.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, ...)
    n_groups : int, at least 1
        Must divide the number of channels; equal to it, this is instance normalization.
    weight, bias : array or Tensor, shape (channels,), optional
    eps : float, above 0, default 1e-5
        Added to the variance.
    activation : {None, "silu"}, default None
        To apply to the result: :func:`silu` in the same pass over memory.

    Returns
    -------
    array or Tensor, shape of ``x``
        On a GPU with channels first or last in memory, as they are in ``x``.

    References
    ----------
    Wu and He, "Group Normalization", 2018, arXiv:1803.08494, eq. 7.
    """
    channels = _channels(x)
    if not isinstance(n_groups, int) or n_groups < 1 or channels % n_groups:
        raise ValueError(f"n_groups must divide the {channels} channels of x, got {n_groups!r}")
    _check(x, weight, bias, (channels,), eps)
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    x, weight, bias = _in_one_dtype(x, weight, bias)
    data = raw(x)
    if not group_kernels.fits(data, raw(weight), raw(bias)):
        return _activated(_group_formula(x, weight, bias, n_groups, eps), activation)
    xp, shape = namespace(data), (x.shape[0], n_groups) + (1,) * (x.ndim - 1)
    centre, inverse = (xp.empty(shape, dtype=accumulator(x.dtype)) for _ in range(2))
    options = {"n_groups": n_groups, "eps": eps, "activation": activation}
    return _group_norm(x, weight, bias, centre, inverse, **options)


@explained
def batch_norm(x, weight=None, bias=None, *, mean=None, var=None, eps: float = 1e-5):
    """Normalize each channel to zero mean and unit variance over the batch.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, shape (batch, channels, ...)
    weight, bias : array or Tensor, shape (channels,), optional
    mean, var : array, shape (channels,), optional
        Statistics to use, as in inference, in place of those of ``x``. Constants: no gradient
        reaches them.
    eps : float, above 0, default 1e-5
        Added to the variance.

    Returns
    -------
    out : array or Tensor, shape of ``x``
    mean, var : array of float32 or wider, shape (channels,)
        The statistics used; that of ``x`` is the biased variance, over ``n`` and not ``n - 1``
        elements. Raw arrays also for a Tensor.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, arXiv:1502.03167, algorithm 1.
    """
    channels = _channels(x)
    _check(x, weight, bias, (channels,), eps)
    affine = (channels,) + (1,) * (x.ndim - 2)
    if (mean is None) != (var is None):
        raise ValueError("mean and var must be given together")
    if mean is not None:
        mean, var = raw(mean), raw(var)
        for name, value in (("mean", mean), ("var", var)):
            if tuple(value.shape) != (channels,):
                raise ValueError(f"{name} must have shape ({channels},), got {value.shape}")
        xp = namespace(mean, var)
        centre, inverse = xp.reshape(mean, affine), xp.reshape((var + eps) ** -0.5, affine)
        out = _normalize(
            x, weight, bias, centre, inverse, axes=(), affine=affine, eps=eps, fill=False
        )
        return out, mean, var
    axes = (0, *range(2, x.ndim))
    if math.prod(x.shape[i] for i in axes) == 0:
        raise ValueError(f"x must have elements in each channel, got shape {x.shape}")
    centre, square = _statistics(raw(x), axes, True)
    inverse = (square + eps) ** -0.5
    out = _normalize(
        x, weight, bias, centre, inverse, axes=axes, affine=affine, eps=eps, fill=False
    )
    return out, reshape(centre, (channels,)), reshape(square, (channels,))
