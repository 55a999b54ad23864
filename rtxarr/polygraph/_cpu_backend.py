"""Kernels on the CPU: built by LLVM, run by several threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rtxarr.polygraph import _cpu_memory
from rtxarr.polygraph._cpu_start import FIXED, starter
from rtxarr.polygraph._ir import Graph, Node
from rtxarr.polygraph._loops import Loops
from rtxarr.polygraph._passes import sums_in_parts
from rtxarr.polygraph.codegen import _cpu, _llvm, _ufuncs
from rtxarr.polygraph.codegen._cpu_text import Writer


class CpuBackend:
    """Runs kernels on NumPy arrays.

    Results have NumPy's bits in mode "strict"; see ``codegen._cpu``. In mode "fast" a product and a
    sum may be rounded together, exponentials are within 3 units in the last place
    (``codegen._fast``), and rows are added up in another order, the same in each run.
    """

    # A block that is not kept saves nothing: the system takes back what is free.
    arena_limit = 0.0

    def __init__(self, mode: str = "strict") -> None:
        self.mode = mode

    def fuses(self, op: str, dtype: Any) -> bool:
        """Tell whether a map, cast or reduction of values of ``dtype`` can be in a kernel."""
        return _llvm.is_available() and _cpu.fuses(op, np.dtype(dtype))

    def rewrite(self, graph: Graph, strides: Mapping[Node, tuple]) -> tuple[Graph, list[str]]:
        """Return a graph to run in a graph's place, and what is different about it."""
        return graph if self.mode == "fast" else sums_in_parts(graph), []

    def scan_refusal(self, scans: Any, rows: int, cols: int) -> str:
        """Return why a kernel cannot contain scans, (operation, dtype), of such rows, or ""."""
        return _cpu.scan_refusal(scans, rows, cols) if _llvm.is_available() else "there is no LLVM"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return _cpu_memory.empty(shape, dtype)

    def arena(self, n_bytes: int, parts: Sequence) -> tuple[Callable, Callable | None]:
        """Return what gives arrays that lie in one block, and what takes them back."""
        return _cpu_memory.arena(n_bytes, parts)

    def source(self, loops: Loops) -> str:
        """Return the LLVM assembly of a kernel."""
        return self.written(loops)[0]

    def build(self, loops: Loops) -> Callable:
        """Return a function of the arrays and NumPy scalars of ``loops.buffers``, in order.

        An output may share memory with an input in a map only, and there at the same places.
        """
        text, numbers = self.written(loops)
        return starter(_llvm.compiled(text), "kernel", numbers, loops, steps_of(loops))

    def build_text(self, loops: Loops, text: str) -> Callable:
        """Build a kernel from assembly that was changed by hand."""
        numbers = self.written(loops)[1]
        return starter(_llvm.compiled(text), "kernel", numbers, loops, steps_of(loops))

    def written(self, loops: Loops) -> tuple[str, list[int]]:
        """Return the assembly of a kernel, and the numbers that it takes."""
        fast = self.mode == "fast"
        plan = _cpu.Plan(loops, _cpu.in_parts(loops), fast=fast)
        writer = Writer(plan, contract=fast)
        if writer.divides:
            writer = Writer(plan, contract=fast, literal=True)
        fixed, tables = _sizes(loops)
        fixed["tables"] = len(FIXED) + len(writer.numbers)
        if plan.separate:
            tables.append(writer.shared_bytes(loops.rows, fixed["items"]))
        return writer.text, [*(fixed[name] for name in FIXED), *writer.numbers, *tables]


def steps_of(loops: Loops) -> list[tuple[str, int]]:
    """Return the steps of a kernel that takes rows in parts: over what each goes, its number."""
    if not _cpu.in_parts(loops):
        return []
    steps = [("rows", 0)] if loops.before else []
    for k, phase in enumerate(loops.phases):
        steps.append(("parts", 2 * k + 1))
        if phase.accumulators or phase.after:
            steps.append(("rows", 2 * k + 2))
    return steps


def _sizes(loops: Loops) -> tuple[dict[str, int], list[int]]:
    """Return the numbers of ``FIXED``, and a table: see ``_cpu.halves``."""
    lanes = _cpu.TILE_BYTES // max((b.dtype.itemsize for b in loops.buffers), default=1)
    rows, cols, width = loops.rows, loops.cols, 1
    edges = [0, cols]
    pairs: list[int] = []
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
