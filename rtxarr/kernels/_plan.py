"""How rows of an array are dealt out to threads; see ``_rows``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING
from rtxarr.dtypes import accumulator, is_half

_MOST_LANES = 512


class Plan(NamedTuple):
    """How rows of one length are dealt out.

    Attributes
    ----------
    loose : bool
        Whether rows may begin between multiples of 16 bytes though pieces do not.
    width, chunks : int
        Elements in a piece, and pieces that a thread holds.
    lanes, groups : int
        Threads that share a row, a power of two, and rows in a block.
    resident : bool
        Whether a whole row fits into the registers of its threads.
    exact : bool
        Whether rows are whole tiles.
    """

    loose: bool
    width: int
    chunks: int
    lanes: int
    groups: int
    resident: bool
    exact: bool

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    @property
    def kept(self) -> int:
        """Elements that a thread holds."""
        return self.width * self.chunks

    @property
    def tile(self) -> int:
        """Elements that the threads of a row hold together."""
        return self.kept * self.lanes

    @property
    def block(self) -> tuple[int, int]:
        return self.lanes, self.groups

    def blocks(self, n_rows: int) -> int:
        return -(-n_rows // self.groups)


def plan_rows(
    n: int,
    dtype: Any,
    *,
    wide: bool,
    loose: bool = False,
    pieces: int = 4,
    most: int = 32,
    threads: int = 128,
    lanes: int = 512,
) -> Plan:
    """Deal rows of ``n`` elements out.

    Parameters
    ----------
    n : int
    dtype : dtype
    wide : bool
        Whether all rows begin at multiples of 16 bytes.
    loose : bool
        Whether only the arrays do.
    pieces : int
        Pieces of 16 bytes to give to a thread before a second warp shares the row: the more, the
        more loads are under way.
    most : int
        Registers of 4 bytes for elements that a thread may hold.
    threads : int
        Of a block, where a row takes no more.
    lanes : int
        The most threads of a row: with fewer, each has more registers.
    """
    return _plan(n, dtype, wide, loose, pieces, most, threads, min(lanes, _MOST_LANES))


@functools.lru_cache(maxsize=1024)
def _plan(n, dtype, wide, loose, pieces, most, threads, most_lanes):
    dtype = np.dtype(dtype)
    has_wide = is_half(dtype) or dtype == np.float32  # as in ``_vector.access``
    width = 16 // dtype.itemsize if has_wide and (wide or loose) else 1
    loose = loose and not wide and n >= 8 * width > 8
    width = width if wide or loose else 1
    most //= accumulator(dtype).itemsize // 4
    pieces = pieces if width > 1 else 2 * pieces
    # A loose row may touch one piece more at its beginning.
    n_pieces = max(1, -(-(n + (width - 1) * loose) // width))
    # Two threads read the 32 bytes that memory moves at least; elements one by one are best read
    # by all threads of a warp.
    fewest = min(2 if width > 1 else 32, _power_of_two(n_pieces))
    lanes = min(most_lanes, max(fewest, _power_of_two(-(-n_pieces // pieces))))
    chunks = -(-n_pieces // lanes)
    resident = chunks * width <= most
    if not resident:
        chunks = min(most // width, pieces)
    threads = min(threads, 32) if _SIMULATING else threads
    exact = not loose and n % (chunks * width * lanes) == 0
    return Plan(loose, width, chunks, lanes, max(1, threads // lanes), resident, exact)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
