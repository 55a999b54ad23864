"""Sums of gathered rows, times a matrix, on a GPU: the product runs beside the gathering."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr import _device
from rtxarr._device import _SIMULATING, device_of, launch_planned, runs_here
from rtxarr.kernels._dense import _address, contiguous, packed
from rtxarr.kernels._limits import shared_memory

__all__ = ["fits", "gather_product"]

_F32 = np.dtype("float32")
# Narrower rows leave threads idle, and fewer are multiplied faster on their own.
_NARROW, _FEW = (0, 0) if _SIMULATING else (64, 1 << 20)


def fits(x: Any, matrix: Any, n_rows: int) -> bool:
    """Tell whether the kernel is for these arrays, and worth it."""
    if not (runs_here(x) and x.ndim == matrix.ndim == 2 and n_rows >= _FEW):
        return False
    if not x.dtype == matrix.dtype == _F32 or _address(x) % 16 or x.shape[1] != matrix.shape[0]:
        return False
    from rtxarr.kernels._gather_product_cuda import MOST

    widths = all(_NARROW < n <= MOST and n % 4 == 0 for n in matrix.shape)
    return widths and _blocks(str(device_of(x))) > 0


@functools.cache
def _blocks(device: str) -> int:
    """Give how many blocks to start: one on each multiprocessor, if their memory is enough."""
    if _SIMULATING:
        return 2
    from rtxarr.kernels._gather_product_cuda import SHARED_BYTES

    runtime, index = _device.cupy.cuda.runtime, int(device.partition(":")[2])
    count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
    return count if shared_memory(index) >= SHARED_BYTES else 0


def gather_product(
    x: Any,
    indptr: Any,
    indices: Any,
    levels: Any,
    weight: Any,
    matrix: Any,
    *,
    bias: Any = None,
    keep: bool = False,
) -> tuple[Any, Any]:
    """Sum, for each row ``i``, ``weight[j] * x[indices[j]]``, and multiply with a matrix.

    Parameters
    ----------
    x : array of float32, shape (n_values, n_in)
    indptr : array of int64, shape (n_rows + 1,)
        Row ``i`` has the entries ``j`` from ``indptr[i]`` to ``indptr[i + 1] - 1``.
    indices : array of int32 or int64, shape (n_entries,)
    levels : sequence of Level
        How the rows are dealt out: ``rtxarr.geom._bins.deal_out(indptr)``.
    weight : array of float32, shape (n_entries,)
    matrix : array of float32, shape (n_in, n_out)
        One that :func:`fits`.
    bias : array of float32, shape (n_out,), optional
        Added to each row.
    keep : bool, default False
        Whether to give the sums too.

    Returns
    -------
    products : array of float32, shape (n_rows, n_out)
        Of a row without entries zeros, and the bias.
    sums : array of float32, shape (n_rows, n_in); without ``keep`` of no rows

    Notes
    -----
    The sums are those of :func:`rtxarr.kernels.gather.gather_reduce` to the bit, and the products
    add up in the order of the features: equal inputs give equal bits.
    """
    n_rows, (n_in, n_out) = indptr.shape[0] - 1, matrix.shape
    out = _device.empty(indptr, (n_rows, n_out), _F32)
    sums = _device.empty(indptr, (n_rows if keep else 0, n_in), _F32)
    if not out.size:
        return out, sums
    if contiguous(matrix):
        strides = n_out, 1
    else:
        matrix, strides = packed(matrix.T), (1, n_in)
    if bias is not None:
        bias = packed(bias)
        bias = bias.copy() if _address(bias) % 16 else bias
    parts, gathered = packed(x), True
    for level in levels:
        joined, n_pieces = parts, level.n_pieces
        given = indices if gathered else indptr
        parts = _device.empty(indptr, (n_pieces * n_in,), _F32)
        flags = gathered, bias is not None, keep
        arguments = (
            *level[:3], n_pieces, given, weight, joined, matrix,
            weight if bias is None else bias, out, sums, parts,
            n_in, n_out, *strides,
        )  # fmt: skip
        launch_planned(_products, flags, arguments)
        gathered = False
    return out, sums


def _products(options, args):
    """Choose the kernel of a level, the blocks and the threads of one."""
    from rtxarr.kernels._gather_product_cuda import ROWS, THREADS, summed_products

    gathered, biased, keeps = options
    kernel = summed_products(gathered=gathered, biased=biased, keeps=keeps)
    n_tiles = -(-args[0].shape[0] // ROWS)  # pieces are more than tiles of them
    return kernel, min(n_tiles, _blocks(str(device_of(args[6])))), THREADS
