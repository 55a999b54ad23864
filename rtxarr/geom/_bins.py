"""How the edges of a graph are dealt out to the threads of a GPU, whatever their degrees are.

A group of threads reduces the edges of one destination, one after the other. A destination with
many is cut into pieces of equal size, which are reduced first and then joined, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rtxarr._device import namespace

# Edges that one group of threads reduces, and partial results that one joins.
_EDGES = 512
_PARTS = 64


class Level(NamedTuple):
    """Work of one launch: pieces of long rows, then whole rows, those with many entries first.

    Attributes
    ----------
    starts : array of int64, shape (n_items,)
        First entry of each item; edges on the first level, then pieces of the level before.
    lengths : array of int32, shape (n_items,)
    rows : array of int32, or of int64 where their number needs it, shape (n_items,)
        Row that each item belongs to.
    n_pieces : int
        How many items are pieces. The next level joins them: piece ``i`` is its entry ``i``.
    """

    starts: Any
    lengths: Any
    rows: Any
    n_pieces: int


def bins(graph: Any) -> tuple[Level, ...]:
    """Give the levels of a graph's destinations; made once for each graph, which waits for it."""
    return graph.once("bins", lambda: _dealt_out(graph))


def _dealt_out(graph):
    from rtxarr.geom._graph import _like

    return _like(graph, deal_out, graph.indptr)


def deal_out(indptr: Any, n_edges: int | None = None, n_parts: int | None = None) -> tuple:
    """Give the levels for rows ``indptr[i]:indptr[i + 1]`` of entries.

    ``n_edges`` is how many an item of the first level has at most, ``n_parts`` of the others.
    """
    xp = namespace(indptr)
    n_rows, limit = indptr.shape[0] - 1, n_edges or _EDGES
    rows = xp.arange(n_rows, dtype=xp.int32 if n_rows < 2**31 else xp.int64)
    levels: list[Level] = []
    while not levels or levels[-1].n_pieces:
        lengths = indptr[1:] - indptr[:-1]
        order = xp.argsort(-lengths, stable=True)
        n_long = int(xp.count_nonzero(lengths > limit))
        long, whole = order[:n_long], order[n_long:]
        each = (xp.take(lengths, long) + (limit - 1)) // limit
        pointers = xp.concat([xp.zeros(1, dtype=xp.int64), xp.cumulative_sum(each)])
        n_pieces = int(pointers[-1])
        piece = xp.arange(n_pieces, dtype=xp.int64)
        owner = xp.searchsorted(pointers, piece, side="right") - 1
        cut = xp.take(long, owner)
        done = (piece - xp.take(pointers, owner)) * limit
        left = xp.take(lengths, cut) - done
        levels.append(
            Level(
                xp.concat([xp.take(indptr, cut) + done, xp.take(indptr, whole)]),
                xp.astype(xp.concat([xp.minimum(left, limit), xp.take(lengths, whole)]), xp.int32),
                xp.take(rows, xp.concat([cut, whole])),
                n_pieces,
            )
        )
        indptr, rows, limit = pointers, xp.take(rows, long), n_parts or _PARTS
    return tuple(levels)
