"""Kernels on the CPU: built by LLVM, run by several threads."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rtxarr.polygraph._loops import Buffer, Loops
from rtxarr.polygraph.codegen import _cpu, _llvm, _ufuncs
from rtxarr.polygraph.codegen._cpu_text import FIXED, Writer

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


class CpuBackend:
    """Runs kernels on NumPy arrays.

    Results have NumPy's bits in mode "strict"; see ``codegen._cpu``. In mode "fast" a product and a
    sum may be rounded together.
    """

    def __init__(self, mode: str = "strict") -> None:
        self.mode = mode

    def fuses(self, op: str, dtype: Any) -> bool:
        """Tell whether a map, cast or reduction of values of ``dtype`` can be in a kernel."""
        return _llvm.is_available() and _cpu.fuses(op, np.dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def source(self, loops: Loops) -> str:
        """Return the LLVM assembly of a kernel."""
        return self.written(loops)[0]

    def build(self, loops: Loops) -> Callable:
        """Return a function of the arrays and NumPy scalars of ``loops.buffers``, in order.

        An output may share memory with an input in a map only, and there at the same places.
        """
        text, numbers = self.written(loops)
        return starter(_llvm.compiled(text), "kernel", numbers, loops)

    def build_text(self, loops: Loops, text: str) -> Callable:
        """Build a kernel from assembly that was changed by hand."""
        return starter(_llvm.compiled(text), "kernel", self.written(loops)[1], loops)

    def written(self, loops: Loops) -> tuple[str, list[int]]:
        """Return the assembly of a kernel, and the numbers that it takes."""
        plan = _cpu.Plan(loops, _cpu.in_parts(loops))
        writer = Writer(plan, contract=self.mode == "fast")
        fixed, tables = _sizes(loops)
        where = len(fixed) + 1 + len(writer.numbers)
        if plan.separate:
            tables.append(writer.shared_bytes(loops.rows, fixed[-1]))
        return writer.text, [*fixed, where, *writer.numbers, *tables]


def _sizes(loops: Loops) -> tuple[list[int], list[int]]:
    """Return the numbers of ``FIXED`` but the last, and a table: see ``_cpu.halves``."""
    lanes = _cpu.TILE_BYTES // max((b.dtype.itemsize for b in loops.buffers), default=1)
    rows, cols, width = loops.rows, loops.cols, 1
    edges, pairs = [0, cols], []
    if loops.kind == "map":
        tile, chunk = 1, lanes
    elif loops.kind == "columns":
        tile = max(1, min(rows, lanes))
        chunk = max(1, min(cols, lanes // tile))
    elif loops.kind == "segments":
        chunk = max(1, lanes // loops.features)
        per_row = -(-loops.cols // rows) * loops.features
        tile = max(1, min(rows, chunk, lanes // max(1, per_row)))
        width = loops.features
    elif _cpu.in_parts(loops):
        is_complex = any(a.dtype.kind == "c" for p in loops.phases for a in p.accumulators)
        edges, pairs = _cpu.halves(cols, lanes, 4 if is_complex else 8)
        tile, chunk = 1, lanes
    else:
        tile, chunk = max(1, lanes // max(cols, 1)), cols
    lanes = width * chunk * (1 if loops.kind == "segments" else tile)
    array, leaves = _ufuncs.address("array"), len(edges) - 1
    return [tile, chunk, rows, cols, array, lanes, tile * width, leaves, rows * leaves], [
        *edges,
        *pairs,
    ]


def starter(module: Any, name: str, numbers: Sequence[int], loops: Loops) -> Callable:
    """Return what calls a function of machine code on arrays and numbers, in several threads."""
    held = np.array(numbers, np.int64)
    argtypes = [ctypes.py_object] * len(loops.buffers)
    argtypes += [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    address, buffers = held.ctypes.data, loops.buffers
    if _cpu.in_parts(loops):
        argtypes += [ctypes.c_int64, ctypes.c_void_p]
        function = module.function(name, argtypes)
        return _stepper(function, held, loops, module)
    function = module.function(name, argtypes)
    count = loops.cols if loops.kind == "map" else loops.rows
    per_thread = max(1, _PER_THREAD * count // max(1, loops.rows * loops.cols * loops.features))
    parts = _parts(count, per_thread, _grain(loops))
    if len(parts) == 1:

        def run(*arrays, _keep=(module, held)):
            if function(*arrays, address, 0, count):
                function(*map(_exact, buffers, arrays), address, 0, count)

        return run

    def run_in_threads(*arrays, _keep=(module, held)):
        if _in_threads(function, (*arrays, address), parts):
            _in_threads(function, (*map(_exact, buffers, arrays), address), parts)

    return run_in_threads


def _stepper(function: Any, held: np.ndarray, loops: Loops, module: Any) -> Callable:
    """Return what runs the steps of a kernel that takes rows in parts."""
    address, buffers, n_shared = held.ctypes.data, loops.buffers, int(held[-1])
    leaves = int(held[FIXED.index("leaves")])
    of_rows = _parts(loops.rows, _PER_THREAD, 1)
    of_parts = _parts(loops.rows * leaves, max(1, _PER_THREAD * leaves // loops.cols), 1)
    steps = [(0, of_rows)] if loops.before else []
    for k, phase in enumerate(loops.phases):
        steps.append((2 * k + 1, of_parts))
        if phase.accumulators or phase.after:
            steps.append((2 * k + 2, of_rows))

    def run(*arrays, _keep=(module, held)):
        shared = np.empty(n_shared, np.uint8)
        memory = shared.ctypes.data
        for step, parts in steps:
            if _in_threads(function, (*arrays, address), parts, step, memory):
                run(*map(_exact, buffers, arrays))
                return

    return run


def _in_threads(function: Any, arguments: tuple, parts: Sequence, *more: Any) -> int:
    """Call a kernel on each part; what no other thread has begun is done in this one."""
    (begin, end), *others = parts
    if not others:
        return function(*arguments, begin, end, *more)
    submit = _pool().submit
    waiting = [(submit(function, *arguments, a, b, *more), a, b) for a, b in others]
    failed = function(*arguments, begin, end, *more)
    for future, a, b in waiting:
        failed |= function(*arguments, a, b, *more) if future.cancel() else future.result()
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
