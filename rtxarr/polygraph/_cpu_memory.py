"""Memory for large results on the CPU, used again.

The C library gives large blocks back to the system when they are freed, and the system clears the
pages of new ones: for an array of 32 MB that takes longer than to compute it. Here a block of an
array that is gone is kept for the next of about its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr.polygraph._arena import ALIGNMENT, KEPT

LEAST = 1 << 20  # bytes of an array for which a block is worth it
MOST_KEPT = 256 << 20  # bytes of blocks that no array uses

# By id, the oldest first. Single operations on a dict need no lock: a block may come back at any
# moment, in the middle of another function here too.
_kept: dict[int, _Block] = {}


class _Block(np.ndarray):
    """Memory; of a type of its own, since NumPy lets views look past bases of their type."""


class _Lent(np.ndarray):
    """A view of a block, which is kept when the last array on it is gone."""

    def __del__(self) -> None:
        block = self.base
        if isinstance(block, _Block) and n_kept() + block.nbytes <= MOST_KEPT:
            _kept[id(block)] = block


def n_kept() -> int:
    """Return the bytes of blocks that no array uses."""
    return sum(block.nbytes for block in list(_kept.values()))


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array that holds anything."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    for block in reversed(list(_kept.values())):
        # Another thread may have taken it meanwhile.
        if size <= block.nbytes <= size + size // 4 and _kept.pop(id(block), None) is block:
            break
    else:
        while n_kept() > MOST_KEPT // 2:  # of sizes that nobody asks for
            _kept.pop(next(iter(list(_kept)), 0), None)
        block = np.empty(size, np.uint8).view(_Block)
    return np.ndarray(shape, dtype, block.view(_Lent))


def arena(
    n_bytes: int, parts: Sequence[tuple[int, tuple[int, ...], Any]]
) -> tuple[Callable[[], list], Callable[[list], None] | None]:
    """Return what gives arrays that lie in one block, and what takes them back.

    Parameters
    ----------
    n_bytes : int
        Of the block. A large one is not kept: None takes it back.
    parts : sequence of (int, tuple of int, dtype)
        Where each array begins, its shape and dtype. What begins at one place with one shape and
        dtype is one array.
    """
    free: list[list] = []  # as many as there were calls at one time

    def make() -> list:
        block = empty((n_bytes + ALIGNMENT,), np.dtype(np.uint8))
        start = -block.ctypes.data % ALIGNMENT
        made = {
            part: np.ndarray(*part[1:], block, start + part[0]) for part in dict.fromkeys(parts)
        }
        return [made[part] for part in parts]

    def take() -> list:
        try:
            return free.pop()
        except IndexError:
            return make()

    return (take, free.append) if n_bytes <= KEPT else (make, None)


def release() -> None:
    """Give the blocks that no array uses back to the system."""
    _kept.clear()
