"""Fourier transforms over tracers: one node for all axes.

cuFFT does not scale. What ``norm`` asks for is a multiplication after it, in ``libs.fft`` as here,
where it is a node that shares a kernel with what follows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from rtxarr.libs._fft_plans import scale_of
from rtxarr.polygraph import _ir
from rtxarr.polygraph._elementwise import as_array, cast, elementwise, from_numpy
from rtxarr.polygraph._trace import Tracer, current


def _transform(
    op: str, x: Any, pairs: Sequence[tuple[int, int | None]], norm: str | None
) -> Tracer:
    """Transform along axes, each cut or filled up with zeros to a number of elements."""
    x = as_array(x)
    norm = "backward" if norm is None else norm
    if norm not in _SWAPPED:
        raise ValueError(f'Invalid norm value {norm}; should be "backward", "ortho" or "forward".')
    if op in ("fft", "ifft", "irfft"):
        x = cast(x, _complex(x.dtype))
    elif x.dtype.kind in "iub":
        x = cast(x, np.float64)
    if not pairs:
        return x
    axes, lengths = [], []
    for i, (given, n) in enumerate(pairs):
        axis = np.lib.array_utils.normalize_axis_index(given, x.ndim)
        halved = op == "irfft" and i == len(pairs) - 1
        if n is None:
            n = 2 * (x.shape[axis] - 1) if halved else x.shape[axis]
        n = operator.index(n)
        if n < 1:
            raise ValueError(f"Invalid number of FFT data points ({n}) specified.")
        x = _fitted(x, axis, n // 2 + 1 if halved else n)
        axes.append(axis)
        lengths.append(n)
    if not _scales_apart():
        return current().fresh(_ir.transform(op, x.node, axes, lengths, norm))
    node = _ir.transform(op, x.node, axes, lengths, "none")
    scale = scale_of(op in ("fft", "rfft"), lengths, norm)
    if scale != 1:
        number = _ir.broadcast(_ir.constant(scale, node.dtype), node.shape)
        node = _ir.map_node("multiply", node, number)
    return current().fresh(node)


def _scales_apart() -> bool:
    """Tell whether transforms are cuFFT's; NumPy's scale on their way."""
    return current().xp.__name__.endswith("cupy")


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


_SWAPPED = {"backward": "forward", None: "forward", "ortho": "ortho", "forward": "backward"}


def fft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform along one axis."""
    return _transform("fft", x, [(axis, n)], norm)


def ifft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back along one axis."""
    return _transform("ifft", x, [(axis, n)], norm)


def rfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform a real array along one axis, to the half that is not redundant."""
    return _transform("rfft", x, [(axis, n)], norm)


def irfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back to a real array of ``n`` elements along one axis."""
    return _transform("irfft", x, [(axis, n)], norm)


def hfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform an array of Hermitian symmetry, whose spectrum is real."""
    x = as_array(x)
    x = elementwise(np.conjugate, cast(x, _complex(x.dtype)))
    return _transform("irfft", x, [(axis, n)], _SWAPPED[norm])


def ihfft(x, /, *, n=None, axis=-1, norm="backward"):
    """Transform back what :func:`hfft` gives."""
    return elementwise(np.conjugate, _transform("rfft", x, [(axis, n)], _SWAPPED[norm]))


def _several(op: str) -> Any:
    def function(x, /, *, s=None, axes=None, norm="backward"):
        x = as_array(x)
        if axes is None:
            axes = range(x.ndim) if s is None else range(-len(s), 0)
        axes = tuple(axes)
        lengths = (None,) * len(axes) if s is None else tuple(s)
        pairs = list(zip(axes, lengths, strict=True))
        if len({a % x.ndim for a in axes}) < len(axes):  # one after the other
            if op in ("rfft", "irfft"):
                raise ValueError(f"axes must differ, got {axes}")
            for pair in reversed(pairs):
                x = _transform(op, x, [pair], norm)
            return x
        return _transform(op, x, pairs, norm)

    return function


fftn, ifftn, rfftn, irfftn = map(_several, ("fft", "ifft", "rfft", "irfft"))


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
    shifts = tuple(sign * (x.shape[a] // 2) for a in axes)
    return roll(x, shifts, axis=axes)
