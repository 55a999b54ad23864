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
from rtxarr.polygraph.codegen._cpu_text import Writer

# Fewer elements than this a thread are not worth a thread.
_PER_THREAD = 32768


def n_threads() -> int:
    """Return how many threads share a large kernel: ``RTXARR_NUM_THREADS``, or all processors."""
    chosen = os.environ.get("RTXARR_NUM_THREADS")
    return max(1, int(chosen)) if chosen else len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, n_threads() - 1), thread_name_prefix="rtxarr")


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
        writer, fixed = self._written(loops)
        return writer.text, [*fixed, *writer.numbers]

    def _written(self, loops: Loops) -> tuple[Writer, tuple[int, ...]]:
        in_parts = loops.kind == "rows" and loops.cols > _cpu.LONG_ROW
        plan = _cpu.Plan(loops, in_parts)
        writer = Writer(plan, contract=self.mode == "fast")
        lanes = _cpu.TILE_BYTES // max((b.dtype.itemsize for b in loops.buffers), default=1)
        rows, cols, width = loops.rows, loops.cols, 1
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
        elif in_parts:
            tile, chunk = 1, lanes
        else:
            tile, chunk = max(1, lanes // max(cols, 1)), cols
        lanes = width * chunk * (1 if loops.kind == "segments" else tile)
        array = _ufuncs.address("array")
        return writer, (tile, chunk, rows, cols, array, lanes, tile * width)


def starter(module: Any, name: str, numbers: Sequence[int], loops: Loops) -> Callable:
    """Return what calls a function of machine code on arrays and numbers, in several threads."""
    held = np.array(numbers, np.int64)
    count = loops.cols if loops.kind == "map" else loops.rows
    argtypes = [ctypes.py_object] * len(loops.buffers)
    argtypes += [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function = module.function(name, argtypes)
    address = held.ctypes.data
    per_thread = max(1, _PER_THREAD * count // max(1, loops.rows * loops.cols))
    parts = _parts(count, per_thread, _grain(loops))
    buffers = loops.buffers
    if len(parts) == 1:

        def run(*arrays, _keep=(module, held)):
            if function(*arrays, address, 0, count):
                function(*map(_exact, buffers, arrays), address, 0, count)

        return run
    (first_begin, first_end), *others = parts

    def run_in_threads(*arrays, _keep=(module, held)):
        pool = _pool()
        waiting = [pool.submit(function, *arrays, address, a, b) for a, b in others]
        function(*arrays, address, first_begin, first_end)
        if sum([w.result() for w in waiting]):
            run_in_threads(*map(_exact, buffers, arrays))

    return run_in_threads


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
