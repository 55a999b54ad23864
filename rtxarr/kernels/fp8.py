"""Rounding to 8-bit floating point with one scale a tensor, and scales from the sizes of the past.

Two formats: e4m3 has three bits of fraction and reaches 448, e5m2 has two and reaches 57344. Codes
are kept as uint8. Values that are not finite become NaN; finite ones too large for the format
become its largest.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rtxarr import _device
from rtxarr._device import launch, namespace, runs_kernels
from rtxarr.kernels._dense import _address
from rtxarr.kernels._limits import capability

__all__ = ["LARGEST", "advance", "decode", "quantize"]

KINDS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {name: float(ml_dtypes.finfo(kind).max) for name, kind in KINDS.items()}

TILE = 128  # rows and columns of the part of a matrix that a block of threads takes


def quantize(x: Any, scale: Any, kind: str, amax: Any, *, turned: bool = False) -> Any:
    """Give the codes of ``x / scale``, and raise ``amax`` to the largest size in ``x``.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16, shape (m, n), NumPy or CuPy
    scale : array of float32, shape (1,)
    kind : {"e4m3", "e5m2"}
    amax : array of float32, shape (1,)
        Changed in place; values that are not finite do not count.
    turned : bool, default False
        Also give the codes of the transpose, stored row by row.

    Returns
    -------
    array of uint8, shape (m, n), or two, shapes (m, n) and (n, m)
    """
    xp = namespace(x, scale, amax)
    if not runs_kernels(x):
        return _on_host(x, scale, kind, amax, turned)
    from rtxarr.kernels._fp8_cuda import THREADS
    from rtxarr.kernels._fp8_cuda import quantize as kernel

    m, n = x.shape
    codes = xp.empty((m, n), dtype=xp.uint8)
    # An array must not be passed twice: the simulator works on copies.
    transposed = xp.empty((n, m) if turned else (4,), dtype=xp.uint8)
    if not turned and x.size % (4 * TILE) == 0:
        m, n = x.size // TILE, TILE  # the same in memory, in whole parts
    wide = m % 4 == 0 and n % 8 == 0 and _address(x) % 16 == 0
    across = -(-n // TILE)
    flat = codes.reshape(-1), transposed.reshape(-1)
    if wide:
        flat = flat[0].view(np.uint64), flat[1].view(np.uint32)
    launch(
        kernel(x.dtype, kind, turned, wide, _converts(x)),
        across * -(-m // TILE),
        (xp.reshape(x, (-1,)), scale, *flat, amax.view(np.int32), m, n, across),
        block=THREADS,
    )
    return (codes, transposed) if turned else codes


def _converts(x):
    """Tell whether the GPU has instructions that round to 8 bits."""
    return _device._SIMULATING or capability(x.data.device_id) >= 89


def _on_host(x, scale, kind, amax, turned):
    wide = np.asarray(x, np.float32)
    sizes = np.abs(wide)
    largest = np.max(sizes, initial=0.0, where=np.isfinite(sizes))
    amax[0] = max(amax[0], largest)
    # One rounding for the reciprocal and one for the product, as in the kernel.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = wide * (np.float32(1) / scale[0])
        limited = np.clip(scaled, -LARGEST[kind], LARGEST[kind])
    limited[~np.isfinite(scaled)] = np.nan
    codes = limited.astype(KINDS[kind]).view(np.uint8)
    return (codes, np.ascontiguousarray(codes.T)) if turned else codes


def decode(codes: Any, kind: str) -> Any:
    """Give the values of codes as float32."""
    xp = namespace(codes)
    table = np.arange(256, dtype=np.uint8).view(KINDS[kind]).astype(np.float32)
    return xp.take(xp.asarray(table), xp.astype(codes, xp.int64).reshape(-1)).reshape(codes.shape)


def advance(history: Any, amax: Any, scales: Any, limits: tuple[float, float, float]) -> None:
    """Move the largest sizes into their history, and make the scales from it; all in place.

    Parameters
    ----------
    history : array of float32, shape (3, n_steps), C-contiguous
        The largest size of each of three tensors in the steps of the past, the newest last.
    amax : array of float32, shape (3, 4)
        The newest in the first column; set to zero.
    scales : array of float32, shape (3, 4)
        The first column becomes the largest of the history over ``limits``; one of nothing but
        zeros stays.
    limits : tuple of float
        What the largest size of each is to become.
    """
    if runs_kernels(history):
        from rtxarr.kernels._fp8_cuda import advance as kernel

        arrays = (history.reshape(-1), amax.reshape(-1), scales.reshape(-1))
        launch(kernel(), 3, (*arrays, *map(np.float32, limits), history.shape[1]))
        return
    history[:, :-1] = history[:, 1:].copy()
    history[:, -1] = amax[:, 0]
    amax[:, 0] = 0
    largest = history.max(axis=1)
    seen = largest > 0
    scales[seen, 0] = largest[seen] / np.asarray(limits, np.float32)[seen]
