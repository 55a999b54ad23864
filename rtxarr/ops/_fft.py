"""Fourier transforms over any axes, and their derivative rules.

Three operations carry the rest: ``fftn`` (also backwards, and of one axis), ``rfftn`` and
``irfftn``. Transforms are linear, so a rule is the transposed transform. That of ``fftn`` is
itself; ``rfftn`` and ``irfftn`` change places, and with them "backward" and "forward".
"""

import numpy as np

from rtxarr import _device, dtypes
from rtxarr._device import namespace
from rtxarr.autograd._op import differentiable
from rtxarr.autograd._tape import raw
from rtxarr.libs.fft import transform
from rtxarr.ops._check import check_number
from rtxarr.ops._elementwise import conj
from rtxarr.ops._half import widen
from rtxarr.ops._manipulate import listed_axes, normalize_axes, pad, roll
from rtxarr.ops._matrix import places

_SWAPPED = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _prepare(x, s, axes, norm, *, half_spectrum=False):
    """Check the options; give ``x`` in a type that can be transformed, ``s`` and ``axes``."""
    if norm not in _SWAPPED:
        raise ValueError(f"norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    if axes is None:
        count = x.ndim if s is None else len(s)
        if count > x.ndim:
            raise ValueError(f"s must have at most {x.ndim} lengths, got {tuple(s)}")
        axes = range(x.ndim - count, x.ndim)
    axes = listed_axes(axes, x.ndim)
    if not axes:
        raise ValueError(f"axes must name at least one axis of x, got shape {x.shape}")
    if s is None:
        s = [x.shape[a] for a in axes]
        if half_spectrum:
            s[-1] = 2 * (s[-1] - 1)
    if len(s) != len(axes):
        raise ValueError(f"s and axes must have one length, got s={tuple(s)} and axes={axes}")
    if not all(isinstance(n, (int, np.integer)) for n in s):
        raise TypeError(f"n and s must be integers, got {tuple(s)}")
    if any(n < 1 for n in s):
        raise ValueError(f"a transform needs at least one point along each axis, got {tuple(s)}")
    # There is no half-precision complex type.
    return widen(x), tuple(int(n) for n in s), axes


def _refuse_complex(x):
    if dtypes.is_complex(x.dtype):
        raise TypeError(f"x must be real, got dtype {x.dtype}; use fft, or take the real part")


def _fit(x, shape):
    """Cut or fill up with zeros at the end of each axis."""
    if x.shape == tuple(shape):
        return x
    if any(m > n for m, n in zip(x.shape, shape, strict=True)):
        x = x[tuple(slice(0, n) for n in shape)]
    if x.shape == tuple(shape):
        return x
    return pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


def _transform(name, x, s, axes, norm):
    if _device.is_device_array(x):
        return transform(name, x, s, tuple(axes), norm)
    return getattr(namespace(x).fft, name)(x, s=s, axes=axes, norm=norm)


@differentiable
def _fftn(x, /, *, s, axes, norm, inverse):
    return _transform("ifftn" if inverse else "fftn", x, s, axes, norm)


# The matrix of a transform is symmetric: transposed, it is itself.
_fftn.defvjps(
    x=lambda g, x_shape, s, axes, norm, inverse: _fit(
        _fftn(g, s=s, axes=axes, norm=norm, inverse=inverse), x_shape
    )
)


@differentiable(holomorphic=False)
def _rfftn(x, /, *, s, axes, norm):
    return _transform("rfftn", x, s, axes, norm)


@differentiable(holomorphic=False)
def _irfftn(x, /, *, s, axes, norm):
    return _transform("irfftn", x, s, axes, norm)


def _counts(like, n, axis):
    """How often each stored frequency of ``n`` real points stands in the whole spectrum."""
    data = raw(like)
    xp = namespace(data)
    frequency = places(data, n // 2 + 1)
    once = (frequency == 0) | (2 * frequency == n)
    dtype = xp.float32 if data.dtype in (xp.float32, xp.complex64) else xp.float64
    shape = tuple(-1 if i == axis else 1 for i in range(data.ndim))
    return xp.reshape(2 - xp.astype(once, dtype), shape)


def _rfftn_rule(g, x_shape, s, axes, norm):
    g = g / _counts(g, s[-1], axes[-1])
    return _fit(_irfftn(g, s=s, axes=axes, norm=_SWAPPED[norm]), x_shape)


def _irfftn_rule(g, x_shape, s, axes, norm):
    spectrum = _rfftn(g, s=s, axes=axes, norm=_SWAPPED[norm])
    return _fit(spectrum * _counts(g, s[-1], axes[-1]), x_shape)


_rfftn.defvjps(x=_rfftn_rule)
_irfftn.defvjps(x=_irfftn_rule)


def fft_any(x, s, axes, norm, inverse):
    """Transform complex (or real) arrays."""
    x, s, axes = _prepare(x, s, axes, norm)
    return _fftn(x, s=s, axes=axes, norm=norm, inverse=inverse)


def rfft_any(x, s, axes, norm):
    """Transform real arrays to half of their spectrum."""
    _refuse_complex(x)
    x, s, axes = _prepare(x, s, axes, norm)
    return _rfftn(x, s=s, axes=axes, norm=norm)


def irfft_any(x, s, axes, norm):
    """Transform half spectra back to real arrays."""
    x, s, axes = _prepare(x, s, axes, norm, half_spectrum=True)
    return _irfftn(x, s=s, axes=axes, norm=norm)


def hfft_any(x, s, axes, norm):
    """Transform half of a signal whose spectrum is real."""
    return irfft_any(conj(x), s, axes, _swap(norm))


def ihfft_any(x, s, axes, norm):
    """Transform a real spectrum back to half of its signal."""
    return conj(rfft_any(x, s, axes, _swap(norm)))


def _swap(norm):
    return _SWAPPED.get(norm, norm)


def frequencies(name, n, d, dtype, device):
    """Create sample frequencies on the current device, or on ``device``."""
    if not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n must be an int of at least 1, got {n!r}")
    check_number("d", d)
    if d == 0:
        raise ValueError("d must not be 0")
    with _device.device(device):
        xp = _device.namespace()
        return xp.astype(getattr(xp.fft, name)(n, d=d), dtype or xp.float64, copy=False)


def shift(x, axes, sign):
    """Roll axes by half their length, forwards (``sign`` 1) or backwards (-1)."""
    axes = normalize_axes(axes, x.ndim)
    steps = tuple(sign * (x.shape[a] // 2) for a in axes)
    return roll(x, steps, axis=axes)
