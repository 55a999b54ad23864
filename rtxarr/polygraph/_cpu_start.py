"""Machine code of kernels on the CPU, started in several threads.

What makes the code is in ``codegen``; nothing here needs a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rtxarr.polygraph._loops import Buffer, Loops

# Numbers that every kernel takes, before those of its index expressions.
FIXED = (
    "begin end step tile chunk rows cols lanes row_lanes leaves items array tuple tables".split()
)

# Fewer elements than this a thread are not worth a thread.
_PER_THREAD = 32768


def n_threads() -> int:
    """Return how many threads share a large kernel: ``RTXARR_NUM_THREADS``, or all processors."""
    chosen = os.environ.get("RTXARR_NUM_THREADS")
    return max(1, int(chosen)) if chosen else len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, n_threads() - 1), thread_name_prefix="rtxarr")


os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads are the parent's


def starter(
    module: Any,
    name: str,
    numbers: Sequence[int],
    loops: Loops,
    steps: Sequence[tuple[str, int]],
) -> Callable:
    """Return what calls a function of machine code on arrays and numbers, in several threads.

    Parameters
    ----------
    module : object
        With ``function(name, argtypes)``.
    name : str
    numbers : sequence of int
        Those of ``FIXED``, then the kernel's own.
    loops : Loops
        Of which the sizes and buffers count.
    steps : sequence of (str, int)
        Where rows are taken in parts: over what each step goes, "rows" or "parts", and its number.
    """
    buffers = loops.buffers
    if steps:
        return _stepper(module, name, numbers, loops, steps)
    function = module.function(name, (ctypes.py_object, ctypes.c_void_p))
    count = loops.cols if loops.kind == "map" else loops.rows
    per_thread = max(1, _PER_THREAD * count // max(1, loops.rows * loops.cols * loops.features))
    held = _for_parts(numbers, _parts(count, per_thread, _grain(loops)))
    addresses = [x.ctypes.data for x in held]
    address, *others = addresses

    def run(*arrays, _keep=(module, held)):
        if function(arrays, address):
            function(tuple(map(_exact, buffers, arrays)), address)

    def run_in_threads(*arrays, _keep=(module, held)):
        if _in_threads(function, arrays, addresses):
            _in_threads(function, tuple(map(_exact, buffers, arrays)), addresses)

    return run_in_threads if others else run


def _for_parts(numbers: Sequence[int], parts: Sequence[tuple], step: int = 0) -> list[np.ndarray]:
    """Return a kernel's numbers for each part of the work."""
    made = []
    for begin, end in parts:
        held = np.array(numbers, np.int64)
        held[[FIXED.index(name) for name in ("begin", "end", "step")]] = begin, end, step
        made.append(held)
    return made


def _stepper(
    module: Any, name: str, numbers: Sequence[int], loops: Loops, steps: Sequence[tuple[str, int]]
) -> Callable:
    """Return what runs the steps of a kernel that takes rows in parts."""
    function = module.function(name, (ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p))
    buffers, n_shared, leaves = loops.buffers, numbers[-1], numbers[FIXED.index("leaves")]
    of_rows = _parts(loops.rows, _PER_THREAD, 1)
    of_parts = _parts(loops.rows * leaves, max(1, _PER_THREAD * leaves // loops.cols), 1)
    over = {"rows": of_rows, "parts": of_parts}
    held = [_for_parts(numbers, over[kind], number) for kind, number in steps]
    calls = [[x.ctypes.data for x in parts] for parts in held]

    def run(*arrays, _keep=(module, held)):
        shared = np.empty(n_shared, np.uint8)
        memory = shared.ctypes.data
        for addresses in calls:
            if _in_threads(function, arrays, addresses, memory):
                run(*map(_exact, buffers, arrays))
                return

    return run


def _in_threads(function: Any, arrays: tuple, addresses: Sequence[int], *more: int) -> int:
    """Call a kernel for each part; what no other thread has begun is done in this one."""
    address, *others = addresses
    if not others:
        return function(arrays, address, *more)
    submit = _pool().submit
    waiting = [(submit(function, arrays, a, *more), a) for a in others]
    failed = function(arrays, address, *more)
    for future, a in waiting:
        failed |= function(arrays, a, *more) if future.cancel() else future.result()
    return failed


def _exact(buffer: Buffer, x: Any) -> Any:
    """Return an array or number as the type that kernels read: no subclass, nor 0-d as a scalar."""
    return buffer.dtype.type(x) if buffer.is_scalar else np.asarray(x)


def _grain(loops: Loops) -> int:
    """Return how many elements or rows should stay together: a cache line's, or one."""
    return 64 if loops.kind == "map" else 16 if loops.kind == "columns" else 1


def _parts(count: int, per_thread: int, grain: int) -> list[tuple[int, int]]:
    """Cut ``count`` into a part for each thread that is worth it."""
    n = max(1, min(n_threads(), count // max(per_thread, grain)))
    edges = [count * i // n // grain * grain for i in range(n)] + [count]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a] or [(0, count)]
