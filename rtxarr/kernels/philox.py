"""Counter-based random numbers: Philox-4x32-10 on NumPy, numba's CPU and CUDA code, the same bits.

A stream of 32-bit words is given by two 64-bit numbers, ``key`` and ``stream``. Word ``j`` is word
``j % 4`` of the block whose counter is ``(j // 4, stream)``; a 64-bit word is two of them, low half
first, from an even ``j``. Value ``i`` of a draw at ``offset`` is made of word ``offset + i``, or of
words ``offset + 2 i`` and ``offset + 2 i + 1``, and of nothing else: a draw may be cut anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, Device, _device_namespace, launch, namespace
from rtxarr._out_of_memory import explains_out_of_memory
from rtxarr.dtypes import is_half
from rtxarr.kernels._philox_core import Arithmetic, build, kinds, product

__all__ = ["derive", "fill", "fill_from_memory", "philox", "stream_words", "words_per_value"]

# Below this NumPy is faster than loading numba, and fast enough.
_COMPILED_FROM = 65_536

_U = np.uint64
_NUMPY = Arithmetic(
    np.multiply, np.add, np.divide, np.sqrt, np.frexp, np.where, np.multiply, np.add, product
)


@explains_out_of_memory
def fill(
    kind: str,
    n: int,
    dtype: np.dtype,
    params: tuple,
    *,
    key: np.uint64,
    stream: np.uint64,
    offset: int,
    device: Device,
    words: Callable[[int, int], np.ndarray] | None = None,
) -> Any:
    """Return ``n`` values of one kind.

    Parameters
    ----------
    kind : str
        A name in ``_philox_core.kinds``: "uniform32", "normal64", "signed64", ...
    n : int
    dtype : NumPy dtype
        Of the result; half types hold the float32 value rounded to them.
    params : tuple
        Up to six numbers, of the type that the kind computes in.
    key, stream : np.uint64
    offset : int
        Index of the first 32-bit word; even for kinds of 64-bit words.
    device : Device
    words : callable, optional
        ``words(offset, n)`` gives words of this stream for small draws on the CPU, from a
        store of the caller's.

    Returns
    -------
    array, shape (n,), on ``device``
    """
    if device.kind == "cuda" or _SIMULATING:
        from rtxarr.kernels._philox_cuda import kernel

        with device:
            out = _device_namespace(device).empty(n, dtype=dtype)
            n_threads = _n_blocks(kind, n, offset)
            launch(kernel(kind, dtype), n_threads, (out, _U(offset), stream, key, *_six(params)))
        return out
    params = _six(params)
    if n > _COMPILED_FROM:
        return _fill_compiled(kind, n, dtype, params, key, stream, offset)
    words = words or functools.partial(stream_words, key=key, stream=stream)
    drawn = words(offset, n * words_per_value(kind))
    return _fill_numpy(kind, drawn, dtype, params, key, stream)


@explains_out_of_memory
def fill_from_memory(
    kind: str, n: int, dtype: np.dtype, params: tuple, *, place: Any, shift: int = 0
) -> Any:
    """Return ``n`` values on the GPU of a stream whose place is read there.

    Parameters
    ----------
    kind, n, dtype, params : as in :func:`fill`
    place : array of uint64, shape (3,)
        Offset, stream and key, as :func:`fill` takes them, on the current GPU.
    shift : int, default 0
        Added to the offset.

    Returns
    -------
    array, shape (n,)
    """
    from rtxarr.kernels._philox_cuda import kernel

    out = namespace(place).empty(n, dtype=dtype)
    n_threads = _n_blocks(kind, n, 3)  # wherever in a block the draw begins
    arguments = (out, place, _U(shift), *_six(params))
    launch(kernel(kind, dtype, from_memory=True), n_threads, arguments)
    return out


def _six(params: tuple) -> tuple:
    return (*params, *(params[-1:] or (_U(0),)) * (6 - len(params)))


def words_per_value(kind: str) -> int:
    """Return how many 32-bit words a value of ``kind`` takes."""
    return 2 if kind.endswith("64") else 1


def _n_blocks(kind: str, n: int, offset: int) -> int:
    """Return how many blocks of four words a draw touches."""
    return (offset % 4 + n * words_per_value(kind) + 3) // 4


# -------------------------------------------------------------------------------------- NumPy

_core = build(lambda function: function, _NUMPY)


def philox(block: Any, stream: Any, key: Any) -> tuple:
    """Return the four words of each counter.

    Parameters
    ----------
    block, stream, key : uint64 or array of uint64
        The counter's words are, lowest first, the halves of ``block`` and of ``stream``.

    Returns
    -------
    tuple of 4 uint64 arrays, each below 2**32
    """
    return _core.philox(block, stream, key)


def derive(key: np.uint64, stream: np.uint64, number: int) -> tuple[np.uint64, np.uint64]:
    """Return the (key, stream) of child ``number`` (0 to 2**64 - 1), unlike any other's."""
    # The changed key keeps children apart from the parent's own words.
    words = _core.philox(_U(number), stream, key ^ _U(0x5851F42D4C957F2D))
    c0, c1, c2, c3 = (int(w) for w in words)
    return _U(c0 | c1 << 32), _U(c2 | c3 << 32)


def _quantile(p: np.ndarray) -> np.ndarray:
    """Return standard normal quantiles; element by element as ``_core.quantile``."""
    q = p - 0.5
    z = _core.central(q)
    tail = np.flatnonzero(np.abs(q) > 0.425)
    p, q = p[tail], q[tail]
    r = np.sqrt(-_core.log(np.where(q < 0.0, p, 1.0 - p)))
    upper = _core.middle(r)
    far = r > 5.0
    upper[far] = _core.far(r[far])
    z[tail] = np.where(q < 0.0, -upper, upper)
    return z


def _bounded(words: np.ndarray, stream: Any, key: Any, span: np.uint64) -> np.ndarray:
    """Return integers in [0, span); element by element as ``_core.bounded``."""
    if span == 0:
        return words
    values, rest = _core.multiply(words, span)
    # Rejection hits with a probability of span / 2**64.
    for i in np.flatnonzero(rest < span):
        values[i] = _core.bounded(words[i], stream, key, span)
    return values


_kinds = kinds(
    lambda function: function,
    _NUMPY,
    SimpleNamespace(quantile=_quantile, log=_core.log, bounded=_bounded),
)

KINDS = frozenset(_kinds)


def stream_words(offset: int, n: int, *, key: np.uint64, stream: np.uint64) -> np.ndarray:
    """Return words ``offset`` to ``offset + n - 1`` of a stream, as uint64."""
    first = offset // 4
    blocks = np.arange(first, -(-(offset + n) // 4), dtype=_U)
    return np.stack(philox(blocks, stream, key), axis=1).reshape(-1)[offset % 4 :][:n]


def _fill_numpy(kind, words, dtype, params, key, stream):
    if words_per_value(kind) == 2:
        words = words[::2] | (words[1::2] << _U(32))
    return _narrow(_kinds[kind](words, stream, key, *params), dtype)


def _narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round to the result's type; to a half type by way of float32, as the GPU does."""
    if is_half(dtype):
        values = values.astype(np.float32, copy=False)
    return values.astype(dtype, copy=False)


# ------------------------------------------------------------------------------ numba's CPU code


def _fill_compiled(kind, n, dtype, params, key, stream, offset):
    from rtxarr.kernels import _philox_njit

    per_block = 4 // words_per_value(kind)
    n_blocks = _n_blocks(kind, n, offset)
    out = np.empty(n_blocks * per_block, dtype=np.float32 if is_half(dtype) else dtype)
    getattr(_philox_njit, kind)(_U(offset // 4), out, stream, key, *params)
    start = offset % 4 // words_per_value(kind)
    return out[start : start + n].astype(dtype, copy=False)
