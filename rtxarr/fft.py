"""Fourier transforms: the standard's extension, over arrays and tensors.

``norm`` says which direction is divided by the number of points n: "backward" (the default)
the inverse transform, "forward" the forward one, "ortho" each by the square root of n. Single
precision stays single; half precision is transformed in single.
"""

from collections.abc import Sequence
from typing import Literal

from rtxarr.autograd._op import explained
from rtxarr.ops import _fft

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]

Norm = Literal["backward", "ortho", "forward"]


def _length(n):
    return None if n is None else (n,)


@explained
def fft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the discrete Fourier transform along one axis.

    Parameters
    ----------
    x : array or Tensor
    n : int, optional
        Number of points: cut ``x`` or fill it up with zeros at the end of ``axis``; by default
        the length of ``axis``.
    axis : int, default -1
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of complex dtype, of length ``n`` along ``axis``
    """
    return _fft.fft_any(x, _length(n), (axis,), norm, inverse=False)


@explained
def ifft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the inverse discrete Fourier transform along one axis; parameters as :func:`fft`."""
    return _fft.fft_any(x, _length(n), (axis,), norm, inverse=True)


@explained
def fftn(
    x,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Norm = "backward",
):
    """Give the discrete Fourier transform along several axes.

    Parameters
    ----------
    x : array or Tensor
    s : sequence of int, optional
        Number of points along each of ``axes``; see ``n`` of :func:`fft`.
    axes : sequence of int, optional
        All by default, or the last ``len(s)`` when ``s`` is given.
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of complex dtype
    """
    return _fft.fft_any(x, s, axes, norm, inverse=False)


@explained
def ifftn(
    x,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Norm = "backward",
):
    """Give the inverse transform along several axes; parameters as :func:`fftn`."""
    return _fft.fft_any(x, s, axes, norm, inverse=True)


@explained
def rfft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the non-negative frequencies of the transform of real data along one axis.

    Parameters
    ----------
    x : array or Tensor of real dtype
    n : int, optional
        Number of points; see :func:`fft`.
    axis : int, default -1
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of complex dtype, of length ``n // 2 + 1`` along ``axis``
    """
    return _fft.rfft_any(x, _length(n), (axis,), norm)


@explained
def irfft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the real data whose :func:`rfft` along one axis is ``x``.

    Parameters
    ----------
    x : array or Tensor
        The imaginary parts at frequency zero and, for even ``n``, at ``n // 2`` are taken for
        zero.
    n : int, optional
        Number of points of the result, by default ``2 * (m - 1)`` for an axis of length m.
    axis : int, default -1
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of real dtype, of length ``n`` along ``axis``
    """
    return _fft.irfft_any(x, _length(n), (axis,), norm)


@explained
def rfftn(
    x,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Norm = "backward",
):
    """Give the transform of real data along several axes, half of it along the last one.

    Parameters
    ----------
    x : array or Tensor of real dtype
    s, axes : sequence of int, optional
        As :func:`fftn` takes them.
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of complex dtype
    """
    return _fft.rfft_any(x, s, axes, norm)


@explained
def irfftn(
    x,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Norm = "backward",
):
    """Give the real data whose :func:`rfftn` is ``x``.

    Parameters
    ----------
    x : array or Tensor
    s : sequence of int, optional
        Number of points of the result along each of ``axes``; along the last one
        ``2 * (m - 1)`` by default.
    axes : sequence of int, optional
        As :func:`fftn` takes them.
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of real dtype
    """
    return _fft.irfft_any(x, s, axes, norm)


@explained
def hfft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the real transform of a signal of which ``x`` is the non-negative half.

    Parameters
    ----------
    x : array or Tensor
        The other half is its complex conjugate, mirrored.
    n : int, optional
        Number of points of the result, by default ``2 * (m - 1)`` for an axis of length m.
    axis : int, default -1
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of real dtype, of length ``n`` along ``axis``
    """
    return _fft.hfft_any(x, _length(n), (axis,), norm)


@explained
def ihfft(x, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"):
    """Give the non-negative half of the signal whose :func:`hfft` is ``x``.

    Parameters
    ----------
    x : array or Tensor of real dtype
    n : int, optional
        Number of points; see :func:`fft`.
    axis : int, default -1
    norm : {"backward", "ortho", "forward"}, default "backward"

    Returns
    -------
    array or Tensor of complex dtype, of length ``n // 2 + 1`` along ``axis``
    """
    return _fft.ihfft_any(x, _length(n), (axis,), norm)


@explained
def fftfreq(n: int, /, *, d: float = 1.0, dtype=None, device=None):
    """Create the frequencies of an ``n``-point transform, in its order.

    Parameters
    ----------
    n : int
    d : float, default 1.0
        Distance between samples; the frequencies are in cycles per unit of it.
    dtype : dtype, optional
        float64 by default.
    device : Device or str, optional
        The current device by default.

    Returns
    -------
    array of float64 or ``dtype``, shape (n,)
    """
    return _fft.frequencies("fftfreq", n, d, dtype, device)


@explained
def rfftfreq(n: int, /, *, d: float = 1.0, dtype=None, device=None):
    """Create the frequencies of :func:`rfft`; parameters as :func:`fftfreq`.

    Returns
    -------
    array of float64 or ``dtype``, shape (n // 2 + 1,)
    """
    return _fft.frequencies("rfftfreq", n, d, dtype, device)


@explained
def fftshift(x, /, *, axes: int | Sequence[int] | None = None):
    """Move frequency zero to the middle of each of ``axes`` (all by default)."""
    return _fft.shift(x, axes, 1)


@explained
def ifftshift(x, /, *, axes: int | Sequence[int] | None = None):
    """Undo :func:`fftshift`."""
    return _fft.shift(x, axes, -1)
