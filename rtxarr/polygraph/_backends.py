"""Which back end makes the kernels of a program."""

from __future__ import annotations

from typing import Any

from rtxarr.polygraph import _interpret
from rtxarr.polygraph._ir import Graph
from rtxarr.polygraph._trace import Trace


class Interpreted:
    """A program that runs one operation of the array library after the other."""

    def __init__(self, graph: Graph, xp: Any) -> None:
        self.graph = graph
        self._xp = xp

    def __call__(self, *inputs: Any) -> list[Any]:
        return _interpret.run(self.graph, inputs, self._xp)


def program_for(fused: Any, trace: Trace, graph: Graph) -> Any:
    """Return what runs a graph: takes its inputs, gives its outputs."""
    return Interpreted(graph, trace.xp)
