"""Which of cuFFT's plans make up a Fourier transform of a C-contiguous array.

A plan transforms a run of up to three neighbouring axes in cuFFT's advanced data layout: element
(y, x) of transform b lies ``b dist + (y embed[1] + x) stride`` elements from the start. With the
axes after the run taken together (``inner``) and those before it (``outer``), the array is

- one batch of ``outer`` transforms side by side, where ``inner`` is 1;
- else a batch of ``inner`` transforms, whose elements lie ``inner`` apart, for each of ``outer``
  pieces. The plan is executed on one piece after the other, so nothing is copied.

Where the pieces are many and small, starting a kernel for each would take longer than moving the
run to the end in a copy of the array, and moving it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Pass", "kept_axes", "passes", "scale_of"]

_MOST_AXES = 3  # cuFFT's
# Two kernels take at least 4 us from start to end. Both copies of a piece cost about three times
# as much as the plan's own passes over it, which go at 2 bytes a ps: even at about 1 MiB.
_FEW_PIECES, _SMALL_PIECE = 4, 1 << 20


class Layout(NamedTuple):
    """Where the elements of a batch of transforms are, in elements."""

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
        Transforms of one execution.
    n_pieces : int
        Executions: on pieces that lie ``steps`` elements apart in the source and the result.
    steps : tuple of int
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
    n_pieces: int
    steps: tuple[int, int]
    order: tuple[int, ...] | None
    shape: tuple[int, ...]


def kept_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes of more than one element: the others make no difference to a transform."""
    return [i for i, n in enumerate(shape) if n != 1]


def passes(
    name: str, shape: Sequence[int], s: Sequence[int], axes: Sequence[int], itemsize: int
) -> list[Pass]:
    """Return the plans of a transform, in the order of their executions.

    Parameters
    ----------
    name : {"fftn", "ifftn", "rfftn", "irfftn"}
    shape : sequence of int
        Of the array, C-contiguous, as long along ``axes`` as the transform takes it.
    s : sequence of int, greater than 1
        Points along each of ``axes``. Of a real transform the last one is the one that is halved.
    axes : sequence of int, all different
    itemsize : int
        Bytes of a complex element of that precision.

    Returns
    -------
    list of Pass
    """
    points = dict(zip(axes, s, strict=True))
    shape = tuple(shape)
    found = []
    for kind, run in _runs(name, axes):
        one = _pass(kind, shape, run, tuple(points[a] for a in run), itemsize)
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


def _pass(
    kind: str, shape: tuple[int, ...], run: list[int], n: tuple[int, ...], itemsize: int
) -> Pass:
    first, last = run[0], run[-1]
    outer, inner = math.prod(shape[:first]), math.prod(shape[last + 1 :])
    half = (*n[:-1], n[-1] // 2 + 1)
    taken = half if kind == "C2R" else n
    given = half if kind == "R2C" else n
    piece = math.prod(n) * inner
    # Each piece of reals must start where a complex number may.
    aligned = kind == "C2C" or piece % 2 == 0
    worth = outer <= _FEW_PIECES or piece * itemsize >= _SMALL_PIECE
    order = None
    if inner > 1 and outer > 1 and not (aligned and worth):
        order = (*range(first), *range(last + 1, len(shape)), *run)
        outer, inner = outer * inner, 1
    if order is None:
        result = (*shape[:first], *given, *shape[last + 1 :])
    else:
        result = (*(shape[a] for a in order[: -len(run)]), *given)
    if inner == 1:
        a, b = (Layout(dims, 1, math.prod(dims)) for dims in (taken, given))
        return Pass(kind, n, a, b, outer, 1, (0, 0), order, result)
    a, b = (Layout(dims, inner, 1) for dims in (taken, given))
    steps = math.prod(taken) * inner, math.prod(given) * inner
    return Pass(kind, n, a, b, inner, outer, steps, order, result)
