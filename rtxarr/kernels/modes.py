"""Real Fourier transforms of which only low frequencies are wanted, or not zero, as sums.

Along an axis that is not the last, cuFFT needs a copy of the array with that axis at its end; and a
transform of all frequencies moves all of them through memory. Where few are needed, adding them up
is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import constant, launch, namespace, runs_kernels
from rtxarr._override import overridable

__all__ = ["MAX_MODES", "fits", "irfft_low", "rfft_low", "rounded"]

MAX_MODES = 32  # more do not fit into the registers of two threads
_INNER = 4  # what is along the last axis is a multiple of this
_FEW = 1 << 13  # threads; with fewer a GPU is mostly idle


def rounded(n_modes: int) -> int:
    """Return the next number of frequencies that there are kernels for, up to ``MAX_MODES``."""
    multiple = 4 if n_modes <= 16 else 8
    return -(-n_modes // multiple) * multiple


def fits(outer: int, n: int, inner: int, n_modes: int) -> bool:
    """Tell whether the kernels are for arrays of shape (outer, n, inner)."""
    return (
        0 < n_modes <= MAX_MODES
        and n_modes == rounded(n_modes)
        and 4 * n_modes <= n
        and inner % _INNER == 0
        and outer * inner // _INNER >= _FEW
    )


@overridable
def rfft_low(x: Any, *, n_modes: int) -> Any:
    """Give the first frequencies of a transform along the middle axis, not scaled.

    Parameters
    ----------
    x : array of float32, shape (outer, n, inner)
        ``inner`` is a multiple of 4.
    n_modes : int
        As :func:`rounded` gives it, at most 32 and at most ``n / 4``.

    Returns
    -------
    array of complex64, shape (outer, n_modes, inner)
    """
    xp = namespace(x)
    outer, n, inner = x.shape
    if not runs_kernels(x):
        return xp.fft.rfft(x, axis=1)[:, :n_modes, :]
    from rtxarr.kernels._modes_cuda import THREADS, WIDTH, forward, n_groups

    out = xp.empty((outer, n_modes, inner), dtype=xp.complex64)
    table = constant(x, _waves, n, n_modes, dtype=np.float32)
    arguments = _flat(xp, x), table, _flat(xp, out).view(xp.float32), n, inner
    blocks = -(-(outer * inner // WIDTH) // THREADS) * n_groups(n_modes)
    launch(forward(n_modes), blocks, arguments, block=THREADS)
    return out


@overridable
def irfft_low(spectrum: Any, *, n: int) -> Any:
    """Give the ``n`` real points of a spectrum that ends early, not scaled.

    Parameters
    ----------
    spectrum : array of complex64, shape (outer, n_modes, inner)
        The first frequencies; the others are zero. ``inner`` is a multiple of 4, and ``n_modes``
        as for :func:`rfft_low`.
    n : int

    Returns
    -------
    array of float32, shape (outer, n, inner)
    """
    xp = namespace(spectrum)
    outer, n_modes, inner = spectrum.shape
    if not runs_kernels(spectrum):
        return xp.fft.irfft(spectrum, n=n, axis=1, norm="forward")
    from rtxarr.kernels._modes_cuda import THREADS, back, width_back

    out = xp.empty((outer, n, inner), dtype=xp.float32)
    table = constant(spectrum, _waves, n, n_modes, dtype=np.float32)
    arguments = _flat(xp, spectrum).view(xp.float32), table, _flat(xp, out), n, inner
    blocks = -(-(outer * inner // width_back(n_modes)) // THREADS)
    launch(back(n_modes), blocks, arguments, block=THREADS)
    return out


def _waves(n: int, n_modes: int) -> np.ndarray:
    """Return for each point of the first half the cosines of all frequencies, then their sines."""
    turns = np.outer(np.arange((n + 1) // 2), np.arange(n_modes)) % n * (2 * np.pi / n)
    return np.concatenate([np.cos(turns), np.sin(turns)], axis=1).reshape(-1)


def _flat(xp: Any, x: Any) -> Any:
    """Return the elements in memory order, at an address that is a multiple of 16 bytes."""
    flat = xp.reshape(x, (-1,))
    address = flat.data.ptr if hasattr(flat.data, "ptr") else flat.ctypes.data
    return flat if address % 16 == 0 else xp.asarray(flat, copy=True)
