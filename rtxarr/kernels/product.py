"""Products of the rows of segments, none of which leaves the range of its type on the way.

Each is a number from 1 to 2 (or less than -1), and a code that holds the exponent of two, times 16,
then four times the zeros among the factors, then the infinities, of each up to two. What is left
without one of the factors is known from them, be it zero or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import launch_planned, namespace, runs_kernels
from rtxarr._override import overridable
from rtxarr.dtypes import accumulator
from rtxarr.kernels._dense import _address, packed

__all__ = ["factors", "fits", "segment_product", "without"]

# Rows that one thread multiplies on a GPU, and those that are multiplied as they are on the CPU.
_CHUNK, _HOST = 1024, 512
_FAR = 1 << 19  # of exponents: float32 holds the codes exactly


def fits(values: Any) -> bool:
    """Tell whether these functions take an array of a real floating type."""
    return runs_kernels(values) or isinstance(values, np.ndarray)


@overridable
def segment_product(values: Any, indptr: Any, *, indices: Any = None) -> Any:
    """Multiply the rows of each segment.

    Parameters
    ----------
    values : array of a real floating dtype, shape (n_values, n_features)
        One that :func:`fits`. Half types are multiplied in float32.
    indptr : array of int64, shape (n_segments + 1,)
        Segment ``i`` owns rows ``indptr[i]:indptr[i + 1]``.
    indices : array of int32 or int64, shape (n_indices,), optional
        If given, ``indptr`` points into it: segment ``i`` owns the rows of ``values`` that
        ``indices[indptr[i]:indptr[i + 1]]`` names.

    Returns
    -------
    array, shape (n_segments, n_features), dtype of ``values``
        1 for a segment without rows.

    Notes
    -----
    Rows are multiplied in a fixed order, so equal inputs give equal bits. On a GPU no index is
    checked, and nothing waits for it.
    """
    if runs_kernels(values):
        return _on_gpu(values, indptr, indices, False)[0]
    number, code = _on_host(values if indices is None else values[indices], indptr)
    with np.errstate(over="ignore"):  # of half types
        return _scaled(np, number, *_decoded(np, code)).astype(values.dtype, copy=False)


@overridable
def factors(values: Any, indptr: Any, *, indices: Any = None) -> tuple[Any, Any]:
    """Give what :func:`without` takes of the products of each segment.

    Parameters are those of :func:`segment_product`.

    Returns
    -------
    number, code : array of float32 (float64 for float64), shape (n_segments, n_features)
    """
    if runs_kernels(values):
        return _on_gpu(values, indptr, indices, True)
    return _on_host(values if indices is None else values[indices], indptr)


@overridable
def without(number: Any, code: Any, x: Any) -> Any:
    """Give products without their factor ``x``, element by element."""
    xp = namespace(number)
    exponent, zeros, infinities = _decoded(xp, code)
    is_zero, is_infinite = x == 0, xp.isinf(x)
    fraction, shift = _unit(xp, xp.astype(x, number.dtype, copy=False), is_zero, is_infinite)
    with np.errstate(all="ignore"):
        number = number / fraction
        zeros, infinities = zeros - is_zero, infinities - is_infinite
        return _scaled(xp, number, exponent - shift, zeros, infinities)


def _unit(xp, x, is_zero, is_infinite):
    """Give fractions and exponents: of ones for zeros, and for infinities of ones with the sign."""
    one = xp.ones_like(x)
    return xp.frexp(xp.where(is_infinite, xp.copysign(one, x), xp.where(is_zero, one, x)))


def _decoded(xp, code):
    code = xp.astype(code, xp.int32)
    return code >> 4, (code >> 2) & 3, code & 3


def _scaled(xp, number, exponent, zeros, infinities):
    with np.errstate(all="ignore"):
        number = xp.where(zeros > 0, 0 * number, number)
        number = xp.where(infinities > 0, number * xp.inf, number)
        return xp.ldexp(number, exponent)


# ----------------------------------------------------------------------------------- on a GPU


def _on_gpu(values, indptr, indices, in_parts):
    n_segments, n_features = indptr.shape[0] - 1, values.shape[1]
    scalar, shape = accumulator(values.dtype), (n_segments, n_features)
    first = _device.empty(values, shape, scalar if in_parts else values.dtype)
    second = _device.empty(values, shape if in_parts else (0,), scalar)
    if not first.size:
        return first, second
    options = indices is not None, in_parts, n_features
    n_rows = values.shape[0] if indices is None else indices.shape[0]
    given = packed(values), indptr, indptr if indices is None else indices
    launch_planned(_plan, (*options, "rows"), (*given, first, second, n_features, _CHUNK))
    if n_rows > _CHUNK:  # else no segment can be long
        n_slots = 2 * (n_rows // _CHUNK)
        parts = [_device.empty(values, (n_slots, n_features), scalar) for _ in range(2)]
        launch_planned(_plan, (*options, "chunks"), (*given, *parts, n_features, _CHUNK))
        arguments = indptr, *parts, first, second, n_features, _CHUNK
        launch_planned(_join_plan, (*options, values.dtype), arguments)
    return first, second


def _plan(options, args):
    from rtxarr.kernels._product_cuda import products

    *options, n_features, part = options
    values, *_, first = args[:4]
    width = 16 // max(4, values.itemsize)
    while n_features % width or _address(values) % (width * values.itemsize):
        width //= 2
    rows, chunks, _ = products(values.dtype, width, *options)
    return rows if part == "rows" else chunks, first.size // width, None


def _join_plan(options, args):
    from rtxarr.kernels._product_cuda import JOIN_BLOCK, products

    *options, n_features, dtype = options
    n_slots = args[1].size // n_features
    grid = -(-n_slots // JOIN_BLOCK[0]), -(-n_features // JOIN_BLOCK[0])
    return products(dtype, 1, *options)[2], grid, JOIN_BLOCK


# ---------------------------------------------------------------------------------- on the CPU


def _on_host(rows, indptr):
    scalar = accumulator(rows.dtype)
    rows = rows[indptr[0] : indptr[-1]].astype(scalar, copy=False)
    is_zero, is_infinite = rows == 0, np.isinf(rows)
    number, exponent = _unit(np, rows, is_zero, is_infinite)
    sums = [x.astype(np.int64) for x in (exponent, is_zero, is_infinite)]
    number, lengths = number.astype(np.float64), np.diff(indptr)
    shape, owned = (lengths.size, rows.shape[1]), lengths > 0
    lengths = lengths[owned]
    while lengths.size and number.shape[0] > lengths.size:
        n_pieces = -(-lengths // _HOST)
        first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        piece = np.arange(n_pieces.sum()) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
        starts = np.repeat(first, n_pieces) + _HOST * piece
        number, shift = np.frexp(np.multiply.reduceat(number, starts, axis=0))
        sums = [np.add.reduceat(x, starts, axis=0) for x in sums]
        sums[0] += shift
        lengths = n_pieces
    numbers, codes = np.ones(shape, scalar), np.zeros(shape, scalar)
    exponent, zeros, infinities = sums
    numbers[owned] = 2 * number  # from 1 to 2
    exponent = np.clip(exponent - 1, -_FAR, _FAR - 1)
    codes[owned] = 16 * exponent + 4 * np.minimum(zeros, 2) + np.minimum(infinities, 2)
    return numbers, codes
