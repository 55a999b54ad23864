"""Where to draw the parts of a graph: in layers, each below what it reads from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Point = tuple[float, float]

_LINE_WIDTH = 14  # that a line takes where it passes a layer


class Layout(NamedTuple):
    """Corners of the items, points that each line passes, and the size of the whole.

    A line goes straight down from its first point to the second, and from then on along every other
    stretch.
    """

    corners: dict[Any, Point]
    routes: dict[tuple[Any, Any], list[Point]]
    width: float
    height: float


class _Pass(NamedTuple):
    """A place in a layer that a line passes."""

    source: Any
    item: Any
    level: int


def arrange(
    items: Sequence[Any],
    sources: Mapping[Any, Sequence[Any]],
    sizes: Mapping[Any, tuple[float, float]],
    *,
    across: float,
    between: float,
) -> Layout:
    """Place items in layers, so that few lines cross.

    Parameters
    ----------
    items : sequence
        Each after its sources.
    sources : mapping
        What each reads from, without repeats.
    sizes : mapping
        Width and height of each.
    across, between : float
        Space between neighbours, and between layers.
    """
    users: dict[Any, list[Any]] = {item: [] for item in items}
    for item in items:
        for source in sources[item]:
            users[source].append(item)
    level: dict[Any, int] = {}
    for item in items:
        level[item] = 1 + max((level[s] for s in sources[item]), default=-1)
    for item in items:  # what reads nothing stands above what reads it first
        if not sources[item] and users[item]:
            level[item] = min(level[u] for u in users[item]) - 1
    rows: list[list[Any]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    above: dict[Any, list[Any]] = {}
    for item in items:
        rows[level[item]].append(item)
        above[item] = []
        for source in sources[item]:
            last = source
            for k in range(level[source] + 1, level[item]):
                step = _Pass(source, item, k)
                rows[k].append(step)
                above[step], last = [last], step
            above[item].append(last)
    below: dict[Any, list[Any]] = {item: [] for item in above}
    for item, found in above.items():
        for source in found:
            below[source].append(item)
    _order(rows, above, below)
    size = {**sizes, **{p: (_LINE_WIDTH, 0.0) for p in above if isinstance(p, _Pass)}}
    middles = _middles(rows, above, below, size, across)
    return _placed(rows, above, below, size, middles, between)


def _order(rows: list[list[Any]], above: Mapping, below: Mapping) -> None:
    """Sort each layer by where its neighbours stand, downwards and upwards in turn."""
    for sweep in range(6):
        near, order = (above, rows) if sweep % 2 == 0 else (below, rows[::-1])
        place: dict[Any, float] = {}
        for row in order:
            for i, item in enumerate(row):
                place[item] = (i + 1) / (len(row) + 1)
        for row in order:
            row.sort(key=lambda item: _mean([place[n] for n in near[item]], place[item]))
            for i, item in enumerate(row):
                place[item] = (i + 1) / (len(row) + 1)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _middles(
    rows: list[list[Any]], above: Mapping, below: Mapping, size: Mapping, across: float
) -> dict[Any, float]:
    """Return the horizontal middle of each item, near those of its neighbours."""
    middle: dict[Any, float] = {}
    for row in rows:
        x = -(sum(size[i][0] for i in row) + across * (len(row) - 1)) / 2
        for item in row:
            middle[item] = x + size[item][0] / 2
            x += size[item][0] + across
    near = {item: [*above[item], *below[item]] for item in above}
    for sweep in range(24):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = [_mean([middle[n] for n in near[item]], middle[item]) for item in row]
            widths = [size[item][0] for item in row]
            middle |= dict(zip(row, _spread(wanted, widths, across), strict=True))
    return middle


def _spread(wanted: list[float], widths: list[float], across: float) -> list[float]:
    """Return places that are not too near each other, as near to the wanted ones as can be."""
    offsets, total = [], 0.0
    for k, width in enumerate(widths):
        if k:
            total += (widths[k - 1] + width) / 2 + across
        offsets.append(total)
    # Without the least distances they must not decrease: neighbours that do share their mean.
    runs: list[tuple[float, int]] = []
    for x, offset in zip(wanted, offsets, strict=True):
        mean, n = x - offset, 1
        while runs and runs[-1][0] > mean:
            other, m = runs.pop()
            mean, n = (mean * n + other * m) / (n + m), n + m
        runs.append((mean, n))
    flat = [mean for mean, n in runs for _ in range(n)]
    return [x + offset for x, offset in zip(flat, offsets, strict=True)]


def _placed(
    rows: list[list[Any]],
    above: Mapping,
    below: Mapping,
    size: Mapping,
    middle: Mapping,
    between: float,
) -> Layout:
    left = min((middle[i] - size[i][0] / 2 for row in rows for i in row), default=0.0)
    right = max((middle[i] + size[i][0] / 2 for row in rows for i in row), default=0.0)
    corners: dict[Any, Point] = {}
    heights: dict[Any, float] = {}
    bottoms: dict[Any, float] = {}  # of their layers
    y = 0.0
    for row in rows:
        height = max(size[i][1] for i in row)
        for item in row:
            corners[item] = middle[item] - size[item][0] / 2 - left, y
            heights[item] = height if isinstance(item, _Pass) else size[item][1]
            bottoms[item] = y + height
        y += height + between

    def end(item: Any, other: Any, others: Sequence[Any], down: bool) -> Point:
        """Return where the line to or from ``other`` meets an item."""
        x, top = corners[item]
        order = sorted(others, key=lambda n: middle[n])
        share = (order.index(other) + 1) / (len(order) + 1)
        return x + size[item][0] * share, top + (heights[item] if down else 0)

    routes: dict[tuple[Any, Any], list[Point]] = {}
    for item, found in above.items():
        if isinstance(item, _Pass):
            continue
        for last in found:
            points = [end(item, last, found, down=False)]
            at, reader = last, item
            while isinstance(at, _Pass):
                x, top = corners[at][0] + _LINE_WIDTH / 2, corners[at][1]
                points += [(x, top + heights[at]), (x, top)]
                reader, (at,) = at, above[at]
            start = end(at, reader, below[at], down=True)
            points += [(start[0], bottoms[at]), start]
            routes[at, item] = points[::-1]
    return Layout(corners, routes, right - left, y - between if rows else 0.0)
