"""Which back end makes the kernels of a program."""

from __future__ import annotations

import functools
from typing import Any

from rtxarr.polygraph import _interpret
from rtxarr.polygraph._fft_layout import move_axes
from rtxarr.polygraph._ir import Graph, text
from rtxarr.polygraph._low_modes import shorten
from rtxarr.polygraph._program import Program
from rtxarr.polygraph._trace import Trace


class Interpreted:
    """A program that runs one operation of the array library after the other."""

    def __init__(self, graph: Graph, xp: Any) -> None:
        self.graph = graph
        self._xp = xp

    def run(self, *inputs: Any) -> list[Any]:
        return _interpret.run(self.graph, inputs, self._xp)

    def explain(self) -> str:
        """Return the graph, one line a node."""
        return text(self.graph)


@functools.cache
def default_backend(on_numpy: bool, mode: str) -> Any:
    """Return the back end of the arrays' library."""
    if on_numpy:
        from rtxarr.polygraph._cpu_backend import CpuBackend

        return CpuBackend(mode)
    from rtxarr.polygraph._cuda_backend import CudaBackend

    return CudaBackend(mode)


def program_for(fused: Any, trace: Trace, graph: Graph, strides: list[Any] | None) -> Any:
    """Return what runs a graph: takes its inputs, gives its outputs.

    ``strides`` are those of the inputs, as :func:`input_strides` gives them.
    """
    if fused.backend == "interpreter" or strides is None:
        return Interpreted(graph, trace.xp)
    backend = fused.backend or default_backend(trace.on_numpy, fused.mode)
    if fused.mode == "fast" and _shortens(trace):
        graph = shorten(graph)
    if _moves(trace):
        graph = move_axes(graph)
    return Program(graph, backend, strides=strides)


def _shortens(trace: Trace) -> bool:
    """Tell whether transforms of low frequencies are faster in parts: NumPy's were not measured."""
    return not trace.on_numpy


def _moves(trace: Trace) -> bool:
    """Tell whether transforms are along the last axes: NumPy's move axes on their own."""
    return not trace.on_numpy


def input_strides(trace: Trace) -> list[Any] | None:
    """Return the strides of each input in elements (None: contiguous), if they are whole."""
    found: list[Any] = [None] * len(trace.inputs)
    for cell in trace.cells:
        node = trace.inputs[cell.number]
        if not node.dtype.isnative:
            return None
        if cell.strides != "C":
            if any(s % node.dtype.itemsize for s in cell.strides):
                return None
            found[cell.number] = tuple(s // node.dtype.itemsize for s in cell.strides)
    return found
