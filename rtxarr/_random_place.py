"""Where a stream of random numbers stands, on the host or on the GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rtxarr import _device, _replay
from rtxarr.kernels import philox

_U = np.uint64


class Place:
    """A key, and how far its stream has been used."""

    __slots__ = ("key", "stream", "_offset", "_cursor", "spawned", "_ahead")

    def __init__(self, key: np.uint64, stream: np.uint64, offset: int = 0, spawned: int = 0):
        self.key = key
        self.stream = stream
        self.offset = offset
        self.spawned = spawned
        self._ahead = (0, np.empty(0, _U))  # where the stored words begin, and they

    def __reduce__(self) -> tuple:
        return Place, (self.key, self.stream, self.offset, self.spawned)

    @property
    def offset(self) -> int:
        if self._cursor is not None:
            self.offset = self._cursor.read()
        return self._offset

    @offset.setter
    def offset(self, value: int) -> None:
        self._offset = value
        self._cursor: _replay.Cursor | None = None

    def hand_over(self, cursor: _replay.Cursor) -> np.ndarray:
        """Let a captured step count on, on the GPU, until the host asks; the lock is held."""
        cursor.begin(self.offset)
        found = np.array([self.offset, self.stream, self.key], _U)
        self._cursor = cursor
        return found

    def copy(self) -> Place:
        return Place(self.key, self.stream, self.offset, self.spawned)

    def go_to(self, other: Place) -> None:
        self.key, self.stream = other.key, other.stream
        self.offset, self.spawned = other.offset, other.spawned

    def advance(self, kind: str, n: int) -> int:
        """Move past ``n`` values and return where they begin; the lock is held."""
        width, start = philox.words_per_value(kind), self.offset
        start += start % width
        self.offset = start + n * width
        return start

    def words(self, start: int, n: int) -> np.ndarray:
        """Return ``n`` words from ``start``, made ahead in growing pieces.

        Making few words takes as long as making a thousand.
        """
        first, words = self._ahead
        if start < first or start + n > first + words.size:
            size = max(n, min(2 * words.size, 4096))
            first, words = start, philox.stream_words(start, size, key=self.key, stream=self.stream)
            self._ahead = first, words
        return words[start - first : start - first + n]


def advanced(cursor: Any, n: int, width: int) -> Any:
    """Move a place on the GPU past ``n`` values, as ``Place.advance`` does; return where they are.

    Both lie there as three words: offset, stream and key.
    """
    out = _device.cupy.empty(3, _U)
    _advance_kernel()(_U(n * width), _U(width), out, cursor, size=1)
    return out


@functools.cache
def _advance_kernel() -> Any:
    return _device.cupy.ElementwiseKernel(
        "uint64 words, uint64 width",
        "raw uint64 start, raw uint64 cursor",
        """
        start[0] = cursor[0] + cursor[0] % width;
        start[1] = cursor[1];
        start[2] = cursor[2];
        cursor[0] = start[0] + words;
        """,
        "rtxarr_advance",
    )
