"""Dropout, alone or with a bias and a residual, and the derivative rules."""

import math

import numpy as np

from rtxarr._device import device_of, namespace
from rtxarr._override import tracing
from rtxarr.autograd._op import differentiable, explained
from rtxarr.autograd._tape import raw
from rtxarr.dtypes import result_type
from rtxarr.kernels import dropout as kernels
from rtxarr.kernels import philox
from rtxarr.ops._check import check_floating, check_rate, drawing_device, generator_or_default
from rtxarr.ops._elementwise import astype
from rtxarr.ops._half import rounded_once, widen
from rtxarr.ops._reduce import sum

__all__ = ["dropout", "dropout_add"]


@explained
def dropout(x, rate: float, /, *, generator=None):
    """Set elements to zero at random and scale the others up, so that the mean is kept.

    Parameters
    ----------
    x : array or Tensor of a real floating dtype, any shape
    rate : float in [0, 1)
        Probability that an element is dropped.
    generator : rtxarr.random.Generator, optional
        The default one when left out.

    Notes
    -----
    For the backward pass only the mask is kept, a byte for each element; on a GPU not even that,
    as it is drawn again. At rate 0 ``x`` itself is returned and nothing is drawn.

    References
    ----------
    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
    JMLR 15, 2014.
    """
    check_floating(x=x)
    check_rate(rate)
    if rate == 0:
        return x
    data = raw(x)
    source = generator_or_default(generator)
    if kernels.fits(data):
        return _dropout_add(x, None, None, place=source.dropout_place(data.size), rate=float(rate))
    kept = source.dropout_mask(data.shape, rate, device=drawing_device(data))
    if tracing() is None:  # a generator makes arrays of NumPy, or CuPy
        kept = namespace(data).asarray(kept)
    return _dropout(x, kept, rate=float(rate))


@differentiable(elementwise=True)
@rounded_once
def _dropout(x, kept, /, *, rate):
    xp = namespace(x)
    return xp.where(kept, x / (1 - rate), 0)


_dropout.defvjps(x=lambda g, kept, rate: _dropout(g, kept, rate=rate))


@explained
def dropout_add(x, residual, rate: float, /, bias=None, *, generator=None):
    """Give ``residual + dropout(x + bias)``.

    Parameters
    ----------
    x, residual : array or Tensor of a real floating dtype, of one shape
    rate : float in [0, 1)
        Probability that an element is dropped.
    bias : array or Tensor, shape of the last axis of ``x``, optional
    generator : rtxarr.random.Generator, optional
        The default one when left out.

    Returns
    -------
    array or Tensor, shape of ``x``
        Half precision is computed in float32 and rounded once.

    Notes
    -----
    What is dropped is the same as in :func:`dropout`. On a GPU it is all done in one pass over
    memory, forward and backward, and no mask is kept. At rate 0 nothing is drawn.

    Examples
    --------
    >>> import numpy as np
    >>> import rtxarr as rx
    >>> rx.dropout_add(np.ones(3), np.ones(3), 0.0)
    array([2., 2., 2.])
    """
    check_floating(x=x, residual=residual, bias=bias)
    check_rate(rate)
    if x.shape != residual.shape:
        raise ValueError(
            f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    if bias is not None and tuple(bias.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"bias must have shape {tuple(x.shape[-1:])}, got {tuple(bias.shape)}")
    if rate == 0:
        return residual + (x if bias is None else x + bias)
    data = raw(x)
    if kernels.fits(data, raw(residual), raw(bias)):
        place = generator_or_default(generator).dropout_place(data.size)
        return _dropout_add(x, residual, bias, place=place, rate=float(rate))
    dtype = result_type(*(a.dtype for a in (x, residual, bias) if a is not None))
    x = widen(x) if bias is None else widen(x) + widen(bias)
    out = widen(residual) + dropout(x, rate, generator=generator)
    return out if out.dtype == dtype else astype(out, dtype)


@differentiable
def _dropout_add(x, residual, bias, /, *, place, rate):
    """Give ``residual + dropout(x + bias)`` with the words at ``place``; both may be None."""
    if kernels.fits(x, residual, bias):
        return kernels.dropout_add(x, residual, bias, place=place, rate=rate)
    xp, n, params = namespace(x, residual, bias), math.prod(x.shape), (kernels.threshold(rate),)
    if callable(place):
        kept = place(n, np.dtype(bool), params, device_of(x))
    else:
        offset, stream, key = place
        options = {"key": key, "stream": stream, "offset": int(offset), "device": device_of(x)}
        kept = philox.fill("below32", n, xp.bool, params, **options)
    x = x if bias is None else x + bias
    out = xp.where(xp.reshape(kept, x.shape), x / (1 - rate), 0)
    return out if residual is None else residual + out


def _dropout_add_rule(g, place, rate, needs):
    of_x = None
    if needs[0] or needs[2]:
        of_x = _dropout_add(g, None, None, place=place, rate=rate)
    # The engine sums the gradient of the bias to its shape.
    return of_x, g, widen(of_x) if needs[2] else None


_dropout_add.defvjp(_dropout_add_rule)


def _dropout_add_per_sample(g, place, rate):
    g = widen(_dropout_add(g, None, None, place=place, rate=rate))
    return sum(g, axis=tuple(range(1, g.ndim - 1)))


_dropout_add.defper_sample(bias=_dropout_add_per_sample)
