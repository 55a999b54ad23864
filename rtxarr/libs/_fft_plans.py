"""Which of cuFFT's plans make up a Fourier transform of an array.

A plan transforms a run of up to three neighbouring axes of a C-contiguous array. Where the run is
at the end, its transforms lie side by side, and cuFFT is as fast as memory. Where it is not, it is
moved there: one copy, after which the result lies in memory with the run at the end.

cuFFT could also go over elements that lie apart (its "advanced data layout"), but takes several
times as long for real transforms, and for each of a stack of arrays. Only complex ones along the
first axes of a large array are done so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Pass", "inverse", "kept_axes", "passes", "scale_of"]

_MOST_AXES = 3  # cuFFT's
_LARGE = 1 << 22  # elements from which on complex ones along the first axes are not moved


class Layout(NamedTuple):
    """Where the elements of a batch of transforms are, in elements.

    Element (y, x) of transform b lies ``b dist + (y embed[1] + x) stride`` from the start.
    """

    embed: tuple[int, ...]
    stride: int
    dist: int


class Pass(NamedTuple):
    """A plan and what it is executed on.

    Attributes
    ----------
    kind : {"C2C", "R2C", "C2R"}
    n : tuple of int
        Points along each axis of the run.
    source, result : Layout
    batch : int
        How many transforms.
    order : tuple of int or None
        The axes of the array in the order in which they must lie; None if they do.
    shape : tuple of int
        Of the result, its axes in that order.
    """

    kind: str
    n: tuple[int, ...]
    source: Layout
    result: Layout
    batch: int
    order: tuple[int, ...] | None
    shape: tuple[int, ...]


def kept_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes of more than one element: the others make no difference to a transform."""
    return [i for i, n in enumerate(shape) if n != 1]


def passes(name: str, shape: Sequence[int], s: Sequence[int], axes: Sequence[int]) -> list[Pass]:
    """Return the plans of a transform, in the order of their executions.

    Parameters
    ----------
    name : {"fftn", "ifftn", "rfftn", "irfftn"}
    shape : sequence of int
        Of the array, as long along ``axes`` as the transform takes it.
    s : sequence of int, greater than 1
        Points along each of ``axes``. Of a real transform the last one is the one that is halved.
    axes : sequence of int, all different

    Returns
    -------
    list of Pass
    """
    points = dict(zip(axes, s, strict=True))
    shape = tuple(shape)
    found = []
    for kind, run in _runs(name, axes):
        one = _pass(kind, shape, run, tuple(points[a] for a in run))
        found.append(one)
        shape = tuple(one.shape[place] for place in inverse(one.order or range(len(shape))))
    return found


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes another."""
    return tuple(sorted(range(len(order)), key=lambda i: order[i]))


def scale_of(forward: bool, s: Sequence[int], norm: str) -> float:
    """Return the number that a transform without scales is multiplied by; 1.0 for "none"."""
    if norm == "ortho":
        return 1 / math.sqrt(math.prod(s))
    return 1 / math.prod(s) if norm == ("forward" if forward else "backward") else 1.0


def _runs(name: str, axes: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Split axes into runs of neighbours; the real axis is the last of its own."""
    rest = sorted(axes)
    real = []
    if name in ("rfftn", "irfftn"):
        real = _taken(rest, axes[-1])
    others = []
    while rest:
        others.append(("C2C", _taken(rest, rest[-1])))
    if name == "rfftn":
        return [("R2C", real), *others]
    return [*others, ("C2R", real)] if real else others


def _taken(rest: list[int], last: int) -> list[int]:
    """Take a run that ends in ``last`` out of ``rest``."""
    run = [last]
    while len(run) < _MOST_AXES and run[0] - 1 in rest:
        run.insert(0, run[0] - 1)
    rest[:] = [a for a in rest if a not in run]
    return run


def _pass(kind: str, shape: tuple[int, ...], run: list[int], n: tuple[int, ...]) -> Pass:
    first, last = run[0], run[-1]
    outer, inner = math.prod(shape[:first]), math.prod(shape[last + 1 :])
    half = (*n[:-1], n[-1] // 2 + 1)
    taken = half if kind == "C2R" else n
    given = half if kind == "R2C" else n
    if kind == "C2C" and outer == 1 and inner > 1 and inner * math.prod(n) >= _LARGE:
        layout = Layout(n, inner, 1)
        return Pass(kind, n, layout, layout, inner, None, shape)
    order = (*range(first), *range(last + 1, len(shape)), *run)
    result = (*(shape[a] for a in order[: -len(run)]), *given)
    a, b = (Layout(dims, 1, math.prod(dims)) for dims in (taken, given))
    return Pass(kind, n, a, b, outer * inner, order if inner > 1 else None, result)
