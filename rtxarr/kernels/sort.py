"""Sorting row numbers on a GPU without waiting for it, as a captured step must."""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, launch, namespace

__all__ = ["group_rows"]

# Up to so many entries each is compared with all others: one launch, where a radix sort takes three
# for each digit.
_FEW = 8192
# Bits of a digit, threads of a block and entries of a thread, of a radix sort; and the block of the
# comparison.
_RADIX = (2, 4, 2) if _SIMULATING else (6, 256, 16)
_RANK = (4, 2) if _SIMULATING else (64, 16)


def group_rows(index: Any, n_rows: int) -> tuple[Any, Any]:
    """Group entries by the row that they go to.

    Parameters
    ----------
    index : array of int, shape (n_entries,), on a GPU
        Entries that are not in [0, n_rows) are left out.
    n_rows : int

    Returns
    -------
    order : array of int32 (int64 from 2**31 entries on), shape (n_entries,)
        Entry numbers: those of row 0 in their order, then those of row 1, ...; last what is left
        out.
    indptr : array of int64, shape (n_rows + 1,)
        Row ``i`` gets the entries ``order[indptr[i]:indptr[i + 1]]``.
    """
    from rtxarr.kernels._sort_cuda import bounds, by_rank

    xp = namespace(index)
    n = index.size
    dtype = np.int32 if n < 2**31 else np.int64
    keys, order = xp.empty(n, dtype=np.int64), xp.empty(n, dtype=dtype)
    if n <= _FEW:
        kernel = by_rank(*_RANK, np.int32 if (n_rows + 1) * n < 2**31 else np.int64)
        launch(kernel, -(-n // _RANK[0]), (index, keys, order, n_rows), block=_RANK)
    else:
        keys, order = _radix_sort(xp, index, keys, order, n_rows)
    indptr = xp.empty(n_rows + 1, dtype=np.int64)
    launch(bounds, n_rows + 1, (keys, indptr))
    return order, indptr


def _radix_sort(xp: Any, index: Any, keys: Any, order: Any, n_rows: int) -> tuple[Any, Any]:
    from rtxarr.kernels._sort_cuda import radix

    bits, threads, per_thread = _RADIX
    n_tiles = -(-index.size // (threads * per_thread))
    counts = xp.empty((1 << bits, n_tiles), dtype=np.int64)
    totals = xp.empty(1 << bits, dtype=np.int64)
    arrays = (keys, order), (xp.empty_like(keys), xp.empty_like(order))
    source = index, order  # the first pass does not read the order
    for i, shift in enumerate(range(0, max(1, n_rows.bit_length()), bits)):
        _, count, scan, scatter = radix(bits, threads, per_thread, i == 0)
        target = arrays[i % 2]
        launch(count, n_tiles, (source[0], counts, shift, n_rows), block=threads)
        launch(scan, 1 << bits, (counts, totals), block=threads)
        arguments = (*source, counts, totals, *target, shift, n_rows)
        launch(scatter, n_tiles, arguments, block=threads)
        source = target
    return source
