"""Small results on a GPU, used again: making an array takes as long as starting a kernel.

For each thread the array that a kernel wrote last is kept, and is what it writes next if nobody
else has it by then, nor looks whether it is still there, nor has given it another shape. That is
what a memory pool does, with the array itself beside its memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rtxarr._replay import recorder
from rtxarr.polygraph._arena import KEPT

MOST = 1 << 18  # bytes of an array; larger ones are left to the pool
# A block lasts while results are made, which a pool would put where others were by then.
ARENA_LIMIT = 1.05


class _Thread(threading.local):
    kept: Any = None  # an array, its pointer and its memory
    place: Any = None
    alone: Any = None  # the state in which nobody else has it


def keeping(
    empty: Callable, shape: tuple[int, ...], dtype: Any, place: Callable[[], Any]
) -> Callable[[], Any]:
    """Return a function that gives arrays that hold anything.

    Parameters
    ----------
    empty : callable
        Makes a CuPy array of a shape and dtype.
    shape : tuple of int
    dtype : dtype
    place : callable
        Gives the device and stream that are current: only there an array is given again.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # references are counted elsewhere
        return lambda: empty(shape, dtype)
    thread = _Thread()

    def state() -> tuple:
        x, pointer, memory = thread.kept
        counts = sys.getrefcount(x), sys.getrefcount(pointer), sys.getrefcount(memory)
        return counts, weakref.getweakrefcount(x), x.shape

    def new() -> Any:
        if recorder() is not None:  # of a captured graph, whose memory is its own
            return empty(shape, dtype)
        now = place()
        if thread.kept is not None and state() == thread.alone and now == thread.place:
            return thread.kept[0]
        x = empty(shape, dtype)
        thread.kept, thread.place = (x, x.data, x.data.mem), now
        del x
        thread.alone = state()
        return thread.kept[0]

    return new


class _Held(threading.local):
    arrays: list | None = None
    place: Any = None


def arena(
    empty: Callable,
    n_bytes: int,
    parts: Sequence[tuple[int, tuple[int, ...], Any]],
    place: Callable[[], Any],
) -> tuple[Callable[[], list], Callable[[list], None] | None]:
    """Return what gives arrays that lie in one block, and what takes them back.

    Parameters
    ----------
    empty : callable
        Makes a CuPy array of a shape and dtype, in given memory.
    n_bytes : int
        Of the block. A large one is not kept: None takes it back.
    parts : sequence of (int, tuple of int, dtype)
        Where each array begins, its shape and dtype. What begins at one place with one shape and
        dtype is one array.
    place : callable
        Gives the device and stream that are current: only there a block is given again.
    """
    thread = _Held()

    def make() -> list:
        memory = empty((n_bytes,), np.dtype(np.uint8)).data
        made = {p: empty(*p[1:], memory + p[0]) for p in dict.fromkeys(parts)}
        return [made[part] for part in parts]

    def take() -> list:
        if recorder() is not None:
            return make()
        found, thread.arrays = thread.arrays, None  # the program may be called while it runs
        return found if found is not None and thread.place == place() else make()

    def give(arrays: list) -> None:
        if recorder() is None:  # the memory of a captured graph is its own
            thread.arrays, thread.place = arrays, place()

    return (take, give) if n_bytes <= KEPT else (make, None)
