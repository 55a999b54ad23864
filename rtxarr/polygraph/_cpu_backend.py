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
        fixed["tables"] = len(FIXED) + len(writer.numbers)
        if plan.separate:
            tables.append(writer.shared_bytes(loops.rows, fixed["items"]))
        return writer.text, [*(fixed[name] for name in FIXED), *writer.numbers, *tables]


def _sizes(loops: Loops) -> tuple[dict[str, int], list[int]]:
    """Return the numbers of ``FIXED``, and a table: see ``_cpu.halves``."""
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
    leaves = len(edges) - 1
    sizes = {"begin": 0, "end": 0, "step": 0, "tile": tile, "chunk": chunk}
    sizes |= {"rows": rows, "cols": cols, "lanes": lanes, "row_lanes": tile * width}
    sizes |= {"leaves": leaves, "items": rows * leaves}
    sizes |= {"array": _ufuncs.address("array"), "tuple": _ufuncs.address("tuple")}
    return sizes, [*edges, *pairs]


def starter(module: Any, name: str, numbers: Sequence[int], loops: Loops) -> Callable:
    """Return what calls a function of machine code on arrays and numbers, in several threads."""
    buffers = loops.buffers
    if _cpu.in_parts(loops):
        return _stepper(module, name, numbers, loops)
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


def _stepper(module: Any, name: str, numbers: Sequence[int], loops: Loops) -> Callable:
    """Return what runs the steps of a kernel that takes rows in parts."""
    function = module.function(name, (ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p))
    buffers, n_shared, leaves = loops.buffers, numbers[-1], numbers[FIXED.index("leaves")]
    of_rows = _parts(loops.rows, _PER_THREAD, 1)
    of_parts = _parts(loops.rows * leaves, max(1, _PER_THREAD * leaves // loops.cols), 1)
    held = [_for_parts(numbers, of_rows)] if loops.before else []
    for k, phase in enumerate(loops.phases):
        held.append(_for_parts(numbers, of_parts, 2 * k + 1))
        if phase.accumulators or phase.after:
            held.append(_for_parts(numbers, of_rows, 2 * k + 2))
    steps = [[x.ctypes.data for x in parts] for parts in held]

    def run(*arrays, _keep=(module, held)):
        shared = np.empty(n_shared, np.uint8)
        memory = shared.ctypes.data
        for addresses in steps:
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
