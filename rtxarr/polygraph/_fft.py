"""Fourier transforms over tracers: one node for each axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr.polygraph import _ir
from rtxarr.polygraph._elementwise import as_array, cast, elementwise, from_numpy
from rtxarr.polygraph._trace import Tracer, current


def _along(op: str, x: Any, n: int | None, axis: int, norm: str | None) -> Tracer:
    """Transform along one axis, cut or filled up with zeros to ``n``."""
    x = as_array(x)
    axis = np.lib.array_utils.normalize_axis_index(axis, x.ndim)
    norm = "backward" if norm is None else norm
    if norm not in ("backward", "ortho", "forward"):
        raise ValueError(f'Invalid norm value {norm}; should be "backward", "ortho" or "forward".')
    if op in ("fft", "ifft", "irfft"):
        x = cast(x, _complex(x.dtype))
    elif x.dtype.kind in "iub":
        x = cast(x, np.float64)
    if n is None:
        n = 2 * (x.shape[axis] - 1) if op == "irfft" else x.shape[axis]
    n = int(n)
    if n < 1:
        raise ValueError(f"Invalid number of FFT data points ({n}) specified.")
    length = n // 2 + 1 if op == "irfft" else n
    x = _fitted(x, axis, length)
    return current().fresh(_ir.transform(op, x.node, axis, n, norm))


def _complex(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.complex64 if dtype.name in ("float32", "complex64") else np.complex128)


def _fitted(x: Tracer, axis: int, length: int) -> Tracer:
    have = x.shape[axis]
    if have == length:
        return x
    if have > length:
        return x[(*(slice(None),) * axis, slice(0, length), Ellipsis)]
    shape = (*x.shape[:axis], length - have, *x.shape[axis + 1 :])
    zeros = _ir.broadcast(_ir.constant(0, x.dtype), shape)
    return current().fresh(_ir.concat((x.node, zeros), axis))


def fft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform along one axis."""
    return _along("fft", x, n, axis, norm)


def ifft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back along one axis."""
    return _along("ifft", x, n, axis, norm)


def rfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform a real array along one axis, to the half that is not redundant."""
    return _along("rfft", x, n, axis, norm)


def irfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back to a real array of ``n`` elements along one axis."""
    return _along("irfft", x, n, axis, norm)


def hfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform an array of Hermitian symmetry, whose spectrum is real."""
    x = as_array(x)
    n = 2 * (x.shape[axis] - 1) if n is None else n
    return _along(
        "irfft", elementwise(np.conjugate, cast(x, _complex(x.dtype))), n, axis, _SWAPPED[norm]
    )


def ihfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back what :func:`hfft` gives."""
    return elementwise(np.conjugate, _along("rfft", x, n, axis, _SWAPPED[norm]))


_SWAPPED = {"backward": "forward", None: "forward", "ortho": "ortho", "forward": "backward"}


def _over(x: Any, s: Any, axes: Any) -> tuple[Tracer, list]:
    x = as_array(x)
    if axes is None:
        axes = range(x.ndim) if s is None else range(-len(s), 0)
    axes = [a % x.ndim for a in axes]
    lengths = [None] * len(axes) if s is None else list(s)
    return x, list(zip(axes, lengths, strict=True))


def _several(op: str) -> Any:
    def function(x, /, *, s=None, axes=None, norm="backward"):
        x, pairs = _over(x, s, axes)
        for axis, n in reversed(pairs):
            x = _along(op, x, n, axis, norm)
        return x

    return function


fftn, ifftn = _several("fft"), _several("ifft")


def rfftn(x, /, *, s=None, axes=None, norm="backward"):
    """Transform a real array along several axes."""
    x, pairs = _over(x, s, axes)
    *rest, (axis, n) = pairs
    x = _along("rfft", x, n, axis, norm)
    for axis, n in reversed(rest):
        x = _along("fft", x, n, axis, norm)
    return x


def irfftn(x, /, *, s=None, axes=None, norm="backward"):
    """Transform back to a real array along several axes."""
    x, pairs = _over(x, s, axes)
    *rest, (axis, n) = pairs
    for a, m in rest:
        x = _along("ifft", x, m, a, norm)
    return _along("irfft", x, n, axis, norm)


def fftfreq(n, /, *, d=1.0, dtype=None, device=None):
    """Return the frequencies of a transform of ``n`` elements ``d`` apart."""
    return from_numpy(
        np.fft.fftfreq(int(n), float(d)).astype(np.float64 if dtype is None else dtype)
    )


def rfftfreq(n, /, *, d=1.0, dtype=None, device=None):
    """Return the frequencies of a real transform of ``n`` elements ``d`` apart."""
    return from_numpy(
        np.fft.rfftfreq(int(n), float(d)).astype(np.float64 if dtype is None else dtype)
    )


def fftshift(x, /, *, axes=None):
    """Move the zero frequency to the middle."""
    return _shifted(x, axes, 1)


def ifftshift(x, /, *, axes=None):
    """Undo :func:`fftshift`."""
    return _shifted(x, axes, -1)


def _shifted(x: Any, axes: Any, sign: int) -> Tracer:
    from rtxarr.polygraph._namespace import roll

    x = as_array(x)
    axes = (
        tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    )
    shifts = tuple(sign * (x.shape[a] // 2) if sign > 0 else -(x.shape[a] // 2) for a in axes)
    return roll(x, shifts, axis=axes)
