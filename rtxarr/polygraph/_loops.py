"""Kernels as loops: what the code generators print.

A kernel is one :class:`Loops`. Its statements are straight-line code on scalars; the code generator
decides which thread runs which of them, how wide memory is read, and how a reduction is carried
out. Five kinds share the form:

========  ==========================  ==============================================
kind      counters of a statement     loops
========  ==========================  ==============================================
map       i in [0, cols)              one, all elements independent; one phase, rows is 1
rows      r in [0, rows),             elements of a row lie side by side: threads share a row
          c in [0, cols)
columns   r, c                        neighbouring r lie side by side: a thread keeps its r
segments  r, f in [0, features), c    c runs over the edges of row r, from
                                      ``indptr[r]`` to ``indptr[r + 1]``
maps      those of its members        maps of one pattern: buffers are those of all members, which
                                      read nothing that another writes; no phases
========  ==========================  ==============================================

Numbers in index expressions belong to one shape. A code generator prints each distinct one above
1 as a parameter of the kernel, so that shapes of the same pattern share the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtxarr.polygraph._ir import Node


@dataclass(frozen=True)
class Buffer:
    """An array that a kernel reads or writes; ``name`` is ``in0``, ``out0`` and so on.

    Elements are addressed in units of the dtype from the array's first element, so that an address
    in an array with negative strides can be negative.
    """

    name: str
    dtype: np.dtype
    node: Node
    is_output: bool = False
    # A number that is a parameter of the kernel, not memory: a constant or a Python scalar.
    is_scalar: bool = False


@dataclass(frozen=True)
class Statement:
    """``name = op(args)`` of ``dtype``.

    =========  ================================  ==================================================
    op         args                              meaning
    =========  ================================  ==================================================
    load       (buffer name, Expr, mask)         mask: name of a bool, or None; zero where false
    scalar     (buffer name,)                    the value of a scalar buffer
    index      (Expr,)                           the number itself, cast to ``dtype``
    in_range   (Expr, low, high)                 ``low <= expr < high``, a bool
    divides    (Expr, n)                         whether ``n`` divides the expression
    cast       (name,)                           rounded to ``dtype``
    scanned    ()                                what the scan of this name gives the element
    a map      names                             one of ``_ir.MAPS`` on values of one dtype
    store      (buffer name, Expr, name)         dtype is that of the buffer
    =========  ================================  ==================================================
    """

    name: str
    op: str
    args: tuple
    dtype: np.dtype


@dataclass(frozen=True)
class Accumulator:
    """A reduction over ``c`` of the value ``of``, called ``name`` after its phase.

    ``op`` is one of ``_ir.REDUCES``, or "mean" in segments. The running value has ``dtype``; the
    statements after the phase see ``result`` (int64 for argmax and argmin).
    """

    name: str
    op: str
    of: str
    dtype: np.dtype
    result: np.dtype


@dataclass(frozen=True)
class Scan:
    """What ``op`` ("sum", "prod", "max", "min") gives along ``c`` of the values ``of`` so far.

    Later phases have ``name`` for each element, as a statement "scanned". If ``backwards``, the
    last element comes first. Of kernels of kind "rows" alone.
    """

    name: str
    op: str
    of: str
    dtype: np.dtype
    backwards: bool


@dataclass(frozen=True)
class Phase:
    """A pass over ``c``: ``body`` for each, then ``after`` once a row, when totals are known.

    Each body is complete by itself: what an earlier phase computed for the same ``(r, c)`` and this
    one needs too is listed again, under the same name. A code generator may keep it on chip; what
    ``scans`` give it must. A phase without body is no pass.
    """

    body: tuple[Statement, ...]
    accumulators: tuple[Accumulator, ...] = ()
    after: tuple[Statement, ...] = ()
    scans: tuple[Scan, ...] = ()


@dataclass(frozen=True)
class Loops:
    """One kernel; ``before`` holds statements of a row that the first pass needs."""

    kind: str
    rows: int
    cols: int
    buffers: tuple[Buffer, ...]
    phases: tuple[Phase, ...]
    before: tuple[Statement, ...] = ()
    features: int = 1
    indptr: str | None = None  # segments: name of the buffer of row pointers
    notes: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)
    members: tuple[Loops, ...] = ()  # maps: what shares the launch

    @property
    def statements(self) -> list[Statement]:
        """All statements, in the order in which they are first run."""
        of_phases = [s for p in self.phases for s in (*p.body, *p.after)]
        return [*self.before, *of_phases]

    @property
    def scans(self) -> list[Scan]:
        return [s for p in self.phases for s in p.scans]
