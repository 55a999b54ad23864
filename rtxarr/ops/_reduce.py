"""Reductions and cumulative sums, and their derivative rules.

Half-precision sums accumulate in float32 and are rounded once, at the end.
"""

import math

import numpy as np

from rtxarr._device import is_device_array, namespace, runs_kernels
from rtxarr.autograd._op import differentiable, nondifferentiable
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import isdtype
from rtxarr.kernels.scan import fits, running_extrema, scan
from rtxarr.kernels.small import leading_sum
from rtxarr.ops._check import check_number
from rtxarr.ops._elementwise import astype, exp, isnan, where
from rtxarr.ops._half import rounded_once
from rtxarr.ops._manipulate import (
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    normalize_axes,
    only_axis,
    part_along,
    permute_dims,
    reshape,
)

__all__ = [
    "all",
    "any",
    "count_nonzero",
    "cumulative_max",
    "cumulative_min",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "logsumexp",
    "max",
    "mean",
    "min",
    "prod",
    "std",
    "sum",
    "var",
]


_OPTIONS = """

    Parameters
    ----------
    x : array or Tensor
    axis : int, tuple of int or None
        Axes to reduce; all of them by default.
    keepdims : bool, default False
        Keep the reduced axes with length one.
"""


def _restore(g, x_shape, axis, keepdims):
    """Put the reduced axes back with length one."""
    if keepdims or g.ndim == len(x_shape):
        return g
    axes = normalize_axes(axis, len(x_shape))
    return reshape(g, tuple(1 if i in axes else n for i, n in enumerate(x_shape)))


def _count(x_shape, axis):
    return math.prod(x_shape[a] for a in normalize_axes(axis, len(x_shape)))


def _spread(g, x_shape, axis, keepdims):
    # A number needs no axes to be spread along all.
    return broadcast_to(_restore(g, x_shape, axis, keepdims) if g.ndim else g, x_shape)


@differentiable(movement=True)
@rounded_once
def sum(x, /, *, axis=None, dtype=None, keepdims=False):
    """Sum over axes; integers widen to int64."""
    if dtype is None and is_device_array(x):
        out = leading_sum(x, axis, keepdims)
        if out is not None:
            return out
    return namespace(x).sum(x, axis=axis, dtype=dtype, keepdims=keepdims)


sum.defvjps(x=_spread)


@differentiable(movement=True)
@rounded_once
def mean(x, /, *, axis=None, keepdims=False):
    """Give the arithmetic mean over axes; of nothing it is NaN."""
    return namespace(x).mean(x, axis=axis, keepdims=keepdims)


mean.defvjps(
    x=lambda g, x_shape, axis, keepdims: _spread(
        g / (_count(x_shape, axis) or 1), x_shape, axis, keepdims
    )
)


@differentiable(holomorphic=False)
@rounded_once
def var(x, /, *, axis=None, correction=0.0, keepdims=False):
    """Give the variance over axes: squared deviations over ``n - correction``."""
    check_number("correction", correction)
    return namespace(x).var(x, axis=axis, correction=correction, keepdims=keepdims)


def _var_rule(g, x, x_shape, axis, correction, keepdims):
    freedom = _count(x_shape, axis) - correction
    scale = 2 / freedom if freedom > 0 else math.nan  # as the variance itself
    return scale * _restore(g, x_shape, axis, keepdims) * (x - mean(x, axis=axis, keepdims=True))


var.defvjps(x=_var_rule)


@differentiable(holomorphic=False)
@rounded_once
def std(x, /, *, axis=None, correction=0.0, keepdims=False):
    """Give the standard deviation over axes; see :func:`var`."""
    check_number("correction", correction)
    return namespace(x).std(x, axis=axis, correction=correction, keepdims=keepdims)


def _std_rule(g, out, x, x_shape, axis, correction, keepdims):
    # Where all elements are equal the deviation has a kink; zero is a subgradient.
    half = where(out == 0, 0, 0.5 * g / where(out == 0, 1, out))
    return _var_rule(half, x, x_shape, axis, correction, keepdims)


std.defvjps(x=_std_rule)


@differentiable
@rounded_once
def prod(x, /, *, axis=None, dtype=None, keepdims=False):
    """Multiply over axes."""
    return namespace(x).prod(x, axis=axis, dtype=dtype, keepdims=keepdims)


def _prod_rule(g, x, x_shape, axis, keepdims):
    """Multiply the products of what comes before and after each element: right with zeros too."""
    axes = normalize_axes(axis, len(x_shape))
    rest = tuple(i for i in range(len(x_shape)) if i not in axes)
    n = _count(x_shape, axis)
    order = (*rest, *axes)
    rows = reshape(permute_dims(x, order), (*(x_shape[i] for i in rest), n))
    one = namespace(raw(rows)).ones_like(raw(rows)[..., :1])
    before = cumulative_prod(concat((one, rows[..., :-1]), axis=-1), axis=-1)
    after = flip(
        cumulative_prod(concat((one, flip(rows[..., 1:], axis=-1)), axis=-1), axis=-1), axis=-1
    )
    others = reshape(before * after, tuple(x_shape[i] for i in order))
    back = tuple(order.index(i) for i in range(len(order)))
    return _restore(g, x_shape, axis, keepdims) * permute_dims(others, back)


prod.defvjps(x=_prod_rule)


def attained(x, extremum, dtype):
    """Give ones where ``x`` is the extremum (a NaN being one) and zeros elsewhere."""
    return astype((x == extremum) | (isnan(x) & isnan(extremum)), dtype)


def _extremum_rule(g, x, out, x_shape, axis, keepdims):
    chosen = attained(x, _restore(out, x_shape, axis, keepdims), g.dtype)
    share = chosen / sum(chosen, axis=axis, keepdims=True)
    return _restore(g, x_shape, axis, keepdims) * share


@differentiable
def max(x, /, *, axis=None, keepdims=False):
    """Give the largest element; ties share the gradient evenly, NaN wins."""
    return namespace(x).max(x, axis=axis, keepdims=keepdims)


@differentiable
def min(x, /, *, axis=None, keepdims=False):
    """Give the smallest element; ties share the gradient evenly, NaN wins."""
    return namespace(x).min(x, axis=axis, keepdims=keepdims)


max.defvjps(x=_extremum_rule)
min.defvjps(x=_extremum_rule)


def _running(op, x, axis, dtype, include_initial):
    """Scan by kernels of our own where they take the array: CuPy's order varies between runs."""
    axis = only_axis(axis, x.ndim)
    if runs_kernels(x):
        total = np.dtype(_TOTALS.get(x.dtype.kind, x.dtype) if dtype is None else dtype)
        if fits(x, total) and (x.dtype.kind != "c" or total.kind == "c"):
            xp = namespace(x)
            out = scan(op, xp.astype(x, total, copy=False), axis=axis)
            if not include_initial:
                return out
            shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            first = (xp.zeros if op == "sum" else xp.ones)(shape, dtype=total)
            return concat((first, out), axis=axis)
    options = {"dtype": dtype, "include_initial": include_initial}
    return _running_elsewhere(x, op=op, axis=axis, **options)


# What integers are added up in.
_TOTALS = {"b": np.int64, "i": np.int64, "u": np.uint64}


@rounded_once
def _running_elsewhere(x, /, *, op, **options):
    return getattr(namespace(x), f"cumulative_{op}")(x, **options)


@differentiable
def cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False):
    """Give the running sums along one axis.

    Parameters
    ----------
    x : array or Tensor
    axis : int, optional
        May be left out for a 1-D array.
    dtype : dtype, optional
        To sum in.
    include_initial : bool, default False
        Start with a zero, so that the result is one longer.
    """
    return _running("sum", x, axis, dtype, include_initial)


def _drop_initial(g, axis, include_initial):
    return part_along(g, axis, 1, None) if include_initial else g


def _cumulative_sum_rule(g, x_shape, axis, include_initial):
    axis = only_axis(axis, len(x_shape))
    g = _drop_initial(g, axis, include_initial)
    return flip(cumulative_sum(flip(g, axis=axis), axis=axis), axis=axis)


cumulative_sum.defvjps(x=_cumulative_sum_rule)


@differentiable
def cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False):
    """Give the running products along one axis.

    Parameters
    ----------
    x : array or Tensor
    axis : int, optional
        May be left out for a 1-D array.
    dtype : dtype, optional
        To multiply in.
    include_initial : bool, default False
        Start with a one, so that the result is one longer.
    """
    return _running("prod", x, axis, dtype, include_initial)


def _cumulative_prod_rule(g, x, axis, include_initial):
    """Sum, over what follows, of its gradient times the product without this element.

    Written as a triangular table of products, O(n^2) along the axis, so that zeros need no
    division.
    """
    axis = only_axis(axis, x.ndim)
    g = moveaxis(_drop_initial(g, axis, include_initial), axis, -1)
    rows = moveaxis(x, axis, -1)
    n = rows.shape[-1]
    xp = namespace(raw(rows))
    # table[..., i, k] = prod of x[..i..k] without x[i], for k >= i.
    k = xp.arange(n)
    own = k[:, None] == k[None, :]
    table = cumulative_prod(where(own, 1, expand_dims(rows, axis=-2)), axis=-1)
    table = where(k[None, :] >= k[:, None], table, 0)
    return moveaxis(sum(table * expand_dims(g, axis=-2), axis=-1), -1, axis)


cumulative_prod.defvjps(x=_cumulative_prod_rule)


def _running_extremum(op, x, axis):
    if not isdtype(x.dtype, ("integral", "real floating")):
        raise TypeError(f"x must hold real numbers, got {x.dtype}")
    axis = only_axis(axis, x.ndim)
    traced = getattr(namespace(x), f"cumulative_{op}", None)
    return running_extrema(op, x, axis=axis) if traced is None else traced(x, axis=axis)


_EXTREMUM_DOC = """

    Parameters
    ----------
    x : array or Tensor
        Of real numbers.
    axis : int, optional
        May be left out for a 1-D array.

    Returns
    -------
    array or Tensor, shape and dtype of ``x``
        NaN wins. The first element of those that are equal gets the gradient.

    Raises
    ------
    TypeError
        When ``x`` holds bools or complex numbers.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> rx.cumulative_{}(np.asarray([2, 3, 1, 5]))
    array({})
"""


@differentiable
def cumulative_max(x, /, *, axis=None):
    """Give the largest element so far along one axis."""
    return _running_extremum("max", x, axis)


@differentiable
def cumulative_min(x, /, *, axis=None):
    """Give the least element so far along one axis."""
    return _running_extremum("min", x, axis)


def _cumulative_extremum_rule(g, out, x_shape, axis):
    """Give each gradient to where the result was first what it is."""
    from rtxarr.ops._index import take_along_axis_gradient

    axis = only_axis(axis, len(x_shape))
    out = raw(out)
    xp = namespace(out)
    before, after = part_along(out, axis, None, -1), part_along(out, axis, 1, None)
    is_new = before != after
    if not isdtype(out.dtype, "integral"):
        is_new = is_new & (before == before)  # after a NaN nothing is
    places = xp.arange(1, x_shape[axis]) if x_shape[axis] else xp.arange(0)
    places = xp.reshape(places, (-1, *(1,) * (len(x_shape) - axis - 1)))
    first = xp.zeros_like(part_along(out, axis, None, 1), dtype=xp.int64)
    changes = xp.where(is_new, xp.astype(places, xp.int64), xp.zeros((), dtype=xp.int64))
    index = cumulative_max(xp.concat([first, changes], axis=axis), axis=axis)
    return take_along_axis_gradient(g, index, x_shape, axis)


for _function, _shown in ((cumulative_max, "[2, 3, 3, 5]"), (cumulative_min, "[2, 2, 1, 1]")):
    _function.defvjps(x=_cumulative_extremum_rule)
    _function.__doc__ += _EXTREMUM_DOC.format(
        _function.__name__.removeprefix("cumulative_"), _shown
    )
del _function, _shown


def _runs(mask, x_shape, axis):
    return namespace(mask).any(mask, axis=only_axis(axis, len(x_shape)), keepdims=True)


cumulative_sum.defrows(_runs)
cumulative_prod.defrows(_runs)
cumulative_max.defrows(_runs)
cumulative_min.defrows(_runs)


@differentiable
def diff(x, /, *, axis=-1, n=1, prepend=None, append=None):
    """Give the differences of neighbours along one axis, ``n`` times.

    Parameters
    ----------
    x : array or Tensor
    axis : int, default -1
    n : int, default 1
    prepend, append : array, optional
        Values joined to ``x`` before differencing.
    """
    ends = {"prepend": prepend, "append": append}
    given = {name: end for name, end in ends.items() if end is not None}
    return namespace(x).diff(x, axis=axis, n=n, **given)


def _diff_rule(g, x_shape, axis, n, prepend):
    axis %= len(x_shape)
    for _ in range(n):
        data = raw(g)
        edge = namespace(data).zeros(
            (*data.shape[:axis], 1, *data.shape[axis + 1 :]), dtype=data.dtype
        )
        g = concat((edge, g), axis=axis) - concat((g, edge), axis=axis)
    first = 0 if prepend is None else prepend.shape[axis]
    return part_along(g, axis, first, first + x_shape[axis])


diff.defvjps(x=_diff_rule)


@nondifferentiable
def all(x, /, *, axis=None, keepdims=False):
    """Tell whether all elements are true."""
    return namespace(x).all(x, axis=axis, keepdims=keepdims)


@nondifferentiable
def any(x, /, *, axis=None, keepdims=False):
    """Tell whether any element is true."""
    return namespace(x).any(x, axis=axis, keepdims=keepdims)


@nondifferentiable
def count_nonzero(x, /, *, axis=None, keepdims=False):
    """Count the elements that are not zero."""
    return namespace(x).count_nonzero(x, axis=axis, keepdims=keepdims)


@differentiable
@rounded_once
def logsumexp(x, /, *, axis=None, keepdims=False):
    """Give ``log(sum(exp(x)))`` over axes without overflow; -inf for nothing."""
    xp = namespace(x)
    axes = normalize_axes(axis, x.ndim)
    if 0 in (x.shape[a] for a in axes):
        return xp.sum(x, axis=axes, keepdims=keepdims) - xp.asarray(np.inf, dtype=x.dtype)
    top = xp.max(x, axis=axes, keepdims=True)
    shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    total = xp.sum(xp.exp(x - shift), axis=axes, keepdims=True)
    # log(0) is the right -inf for a row of -inf, without NumPy's warning.
    out = shift + xp.log(xp.where(total == 0, xp.ones_like(total), total))
    out = xp.where(total == 0, top, out)
    return out if keepdims else xp.squeeze(out, axis=axes)


def _logsumexp_rule(g, x, out, x_shape, axis, keepdims):
    out = _restore(out, x_shape, axis, keepdims)
    difference = x - where(out == -np.inf, 0, out)
    return _restore(g, x_shape, axis, keepdims) * exp(difference)


logsumexp.defvjps(x=_logsumexp_rule)

for _function in (var, std, prod, max, min, logsumexp):
    _function.defrows(_restore)  # a row for each element of the result

for _function in (sum, mean, var, std, prod, max, min, all, any, count_nonzero, logsumexp):
    _function.__doc__ = (_function.__doc__ or "") + _OPTIONS
for _function in (sum, prod):
    _function.__doc__ += "    dtype : dtype, optional\n        To compute in.\n"
for _function in (var, std):
    _function.__doc__ += "    correction : float, default 0.0\n"
del _function
