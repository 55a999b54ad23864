"""Attention over the edges that end at a node, forward and backward, without arrays of edges."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import (
    constant,
    empty,
    launch,
    launch_planned,
    nothing,
    runs_kernels,
)
from rtxarr.dtypes import FLOATING, accumulator
from rtxarr.kernels._dense import packed
from rtxarr.kernels.dropout import threshold
from rtxarr.kernels.segment import can_be_wide, column_sums

__all__ = ["Edges", "Scores", "attend", "attend_gradient", "fits"]

# Threads that join pieces, and nodes whose parts of the gradient of a vector are kept apart.
_JOIN_THREADS = 128
_PARTS = 16_384


class Edges(NamedTuple):
    """The edges of a graph, row by row.

    Attributes
    ----------
    indptr : array of int64, shape (n_rows + 1,)
    indices : array of int32 or int64, shape (n_edges,)
    ids : array of int64, shape (n_edges,), or None
        Their numbers, if those are not the order in which they are stored.
    levels : sequence of Level
        How they are dealt out: ``rtxarr.geom._bins.deal_out(indptr)``.
    """

    indptr: Any
    indices: Any
    ids: Any
    levels: Any


class Scores(NamedTuple):
    """What the scores of edges are made of; see ``_edge_attention_cuda.py`` for the kinds.

    Attributes
    ----------
    kind : {"additive", "mlp", "dot"}
    src, dst : array or None
        "additive": of float32 (float64 for float64), shape (n, n_heads), or None for both. "mlp":
        ``dst`` alone, and "dot": both, of the dtype and the shape of the values of nodes.
    vector : array, shape (n_heads, n_features), for "mlp"; else None
    edge : array of the values' dtype, or None
        In the order of the edges' numbers: for "additive" of shape (n_edges, n_heads), else
        (n_edges, n_heads, n_features).
    factor : float
        Slope of the leaky ReLU below zero, or factor of the products.
    """

    kind: str
    src: Any
    dst: Any
    vector: Any
    edge: Any
    factor: float


def fits(values: Any) -> bool:
    """Tell whether the kernels take values of nodes, of shape (n, n_heads, n_features)."""
    if not (runs_kernels(values) and values.ndim == 3 and values.dtype in FLOATING):
        return False
    return _fit(values.dtype, *values.shape[1:])


@functools.cache
def _fit(dtype, n_heads, n_features):
    from rtxarr.kernels._heads import plan_heads

    wanted = n_heads and n_features
    return bool(wanted) and plan_heads(dtype, n_heads, n_features, wide=False) is not None


def attend(
    scores: Scores, values: Any, edges: Edges, *, place: Any = None, rate: float = 0.0
) -> tuple[Any, Any]:
    """Average the values of sources with the softmax of the scores over a destination's edges.

    Parameters
    ----------
    scores : Scores
    values : array of float16, bfloat16, float32 or float64, shape (n_src, n_heads, n_features)
        Of the sources; one that :func:`fits`.
    edges : Edges
        The rows are destinations.
    place : tuple of 3 np.uint64, or array of uint64, shape (3,), optional
        Where the random words of dropout are: edge ``e`` and head ``h`` have word
        ``e * n_heads + h``. Without it nothing is dropped.
    rate : float in [0, 1)

    Returns
    -------
    out : array of the values' dtype, shape (n_dst, n_heads, n_features)
        Zero without edges, or with scores of ``-inf`` alone.
    lse : array of float32 (float64 for float64), shape (n_dst, n_heads)
        Logarithm of the sum of the scores' exponentials, before dropout.

    Notes
    -----
    Edges are taken in order, those of long rows piece by piece: equal inputs give equal bits.
    """
    dtype, scalar = values.dtype, accumulator(values.dtype)
    n_dst, (n_heads, n_features) = edges.indptr.shape[0] - 1, values.shape[1:]
    out = empty(values, (n_dst, n_heads, n_features), dtype)
    lse = empty(values, (n_dst, n_heads), scalar)
    given = _Given(scores, values, edges, place, rate)
    sums, tops = pieces(values, scalar, edges, n_heads * n_features, 2 * n_heads)
    first, *further = edges.levels
    launch_planned(
        _forward,
        (given.variant, n_heads, n_features),
        (*first, edges.indices, given.ids, *given.arrays, out, lse, sums, tops, *given.drop),
    )
    for level in further:
        from rtxarr.kernels._edge_attention_cuda import join

        sizes = (level.n_pieces * n_heads * n_features, level.n_pieces * 2 * n_heads)
        following = tuple([empty(values, (n,), scalar) for n in sizes])
        launch(
            join(dtype, False),
            (level.rows.shape[0], n_heads),
            (*level, sums, tops, _flat(out), _flat(lse), *following, n_heads, n_features),
            block=min(_JOIN_THREADS, n_features),
        )
        sums, tops = following
    return out, lse


def _forward(options, args):
    """Choose the kernel, the grid and the block."""
    from rtxarr.kernels._edge_attention_cuda import forward

    plan = _plan(options, *args[6:11], args[12])
    return forward(args[8].dtype, plan, options[0]), plan.grid(args[2].shape[0]), plan.block


def attend_gradient(
    grad: Any,
    out: Any,
    lse: Any,
    scores: Scores,
    values: Any,
    edges: Edges,
    turned: Edges,
    *,
    place: Any = None,
    rate: float = 0.0,
    projections: tuple | None = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Give the gradients of what :func:`attend` takes, from that of its first result.

    Parameters
    ----------
    grad, out, lse : array
        The gradient of the first result, and both results.
    scores, values, edges, place, rate
        As there.
    turned : Edges
        Those of the graph turned round: the rows are sources.
    projections : pair of arrays, shape (n_heads, n_features), optional
        For "additive" with destinations that are the first sources: ``src`` and ``dst`` are the
        inner products of the values with these, and the gradient of the values is whole.

    Returns
    -------
    of_values, of_src, of_dst, of_vector, of_edge : array, or None where there is nothing
        With the shapes of what they belong to, and their dtypes but for ``of_vector`` and
        the ``of_edge`` of numbers, which have that of ``lse``.
    """
    dtype, scalar, (n_heads, n_features) = values.dtype, lse.dtype, values.shape[1:]
    width, kind = n_heads * n_features, scores.kind
    given = _Given(scores, values, edges, place, rate)
    grad, out, lse = packed(grad), packed(out), packed(lse)
    of_values = empty(values, values.shape, dtype)
    of_src, of_dst = (None if x is None else empty(x, x.shape, x.dtype) for x in scores[1:3])
    of_edge = None
    if scores.edge is not None:
        dtype_of_edge = dtype if given.variant.rows else scalar
        of_edge = empty(values, scores.edge.shape, dtype_of_edge)
    found = empty(values, (given.variant.n_found * lse.size,), scalar)
    numbers = n_heads if kind == "additive" else width  # of a node's part in a score
    options = given.variant, n_heads, n_features

    first, parts = edges.levels[0], lse
    if kind == "mlp":
        plan = _plan(options, *given.arrays[:5], grad, out)
        n_parts = _grid(plan, kind, first.rows.shape[0])[0] * plan.items
        parts = empty(values, (n_parts, width), scalar)
    (sums,) = pieces(values, scalar, edges, numbers)
    launch_planned(
        _by_destinations,
        options,
        (
            *first, edges.indptr, edges.indices, given.ids, *given.arrays, grad, out, lse, found,
            _or(of_dst, given.arrays[1]), _or(of_edge, lse), sums, parts, *given.drop,
        ),
    )  # fmt: skip
    if of_dst is not None:
        join_sums(edges, sums, of_dst)
    of_vector = None
    if kind == "mlp":
        of_vector = column_sums(parts).reshape(n_heads, n_features)

    given = given.over(turned)
    vectors = given.arrays[3:4] * 2 if projections is None else map(packed, projections)
    vector, vector_dst = vectors
    arrays = (*given.arrays[:3], vector, *given.arrays[4:])
    sums, sums_src = pieces(values, scalar, turned, width, numbers)
    launch_planned(
        _by_sources,
        (given.variant, n_heads, n_features, projections is not None),
        (
            *turned.levels[0], turned.indptr, turned.indices, given.ids, *arrays, grad, found,
            _or(of_dst, given.arrays[1]), vector_dst, of_values,
            _or(of_src, given.arrays[0]), sums, sums_src, *given.drop,
        ),
    )  # fmt: skip
    join_sums(turned, sums, of_values)
    if of_src is not None:
        join_sums(turned, sums_src, of_src)
    return of_values, of_src, of_dst, of_vector, of_edge


def _by_destinations(options, args):
    from rtxarr.kernels._edge_attention_back_cuda import by_destinations

    variant, values = options[0], args[9]
    plan = _plan(options, *args[7:12], *args[13:15])
    kernel = by_destinations(values.dtype, plan, variant)
    return kernel, _grid(plan, variant.kind, args[2].shape[0]), plan.block


def _by_sources(options, args):
    from rtxarr.kernels._edge_attention_back_cuda import by_sources

    *options, projected = options
    plan = _plan(options, *args[7:12], args[13], args[16])
    kernel = by_sources(args[9].dtype, plan, options[0], projected)
    return kernel, plan.grid(args[2].shape[0]), plan.block


def _plan(options, src, dst, values, vector, edge, *rows):
    """Deal the heads out, for these arrays of rows too."""
    from rtxarr.kernels._heads import plan_heads

    variant, n_heads, n_features = options
    given = (values, vector) if variant.kind == "additive" else (src, dst, values, vector, edge)
    wide = all(can_be_wide(x, n_features) for x in (*given, *rows))
    return plan_heads(values.dtype, n_heads, n_features, wide=wide)


def _grid(plan, kind, n_items):
    """Give the blocks of the pass by destinations: few where each leaves a part of a sum."""
    n_blocks, n_groups = plan.grid(n_items)
    if kind == "mlp":
        n_blocks = min(n_blocks, max(1, _PARTS // plan.items))
    return n_blocks, n_groups


class _Given:
    """What the kernels are given besides their items and results."""

    def __init__(self, scores, values, edges, place, rate):
        from rtxarr.kernels._edge_attention_cuda import Variant

        self.source = scores, values, edges, place, rate
        scalar = accumulator(values.dtype)
        kind, *given, factor = scores
        src, dst, vector, edge = [None if x is None else packed(x) for x in given]
        rows = packed(values)
        drops = place is not None
        numbered = edges.ids is not None and (drops or edge is not None)
        nodes = src is not None or dst is not None
        far = edges.indices.dtype != np.int32
        self.variant = Variant(kind, nodes, edge is not None, numbered, drops, far)
        self.ids = edges.ids if numbered else edges.indptr
        # What is left out is not read; any array of its type will do.
        alike = rows
        if kind == "additive" and (src is None or dst is None):
            alike = nothing(values, scalar)
        number = scalar.type
        self.arrays = (
            _or(src, alike), _or(dst, alike), rows, _or(vector, rows), _or(edge, rows),
            number(factor),
        )  # fmt: skip
        # Three numbers and an array of three, of which one are zeros.
        words = _ZEROS
        if isinstance(place, tuple):
            words, place = place, constant(values, np.zeros, 3, dtype=np.uint64)
        elif place is None:
            place = nothing(values, np.uint64)
        self.drop = (place, *words, threshold(rate), number(1 / (1 - rate)))

    def over(self, edges):
        """Give the same with the edges in another order."""
        scores, values, _, place, rate = self.source
        return _Given(scores, values, edges, place, rate)


_ZEROS = (np.uint64(0),) * 3


def _or(x, other):
    return other if x is None else x


def _flat(x):
    return x.reshape(-1)


def pieces(like: Any, scalar: Any, edges: Edges, *widths: int) -> tuple[Any, ...]:
    """Make arrays for what is left of the pieces of long rows, ``widths`` numbers of each."""
    n_pieces = edges.levels[0].n_pieces
    if not n_pieces:
        return (nothing(like, scalar),) * len(widths)
    return tuple([empty(like, (n_pieces * n,), scalar) for n in widths])


def join_sums(edges: Edges, sums: Any, out: Any) -> None:
    """Add the pieces of long rows up into their rows of ``out``."""
    if len(edges.levels) == 1:
        return
    from rtxarr.kernels._edge_attention_cuda import join_sums as kernel

    width = out.size // max(1, out.shape[0])
    threads = min(_JOIN_THREADS, width)
    for level in edges.levels[1:]:
        following = empty(out, (level.n_pieces * width,), sums.dtype)
        launch(
            kernel(out.dtype),
            (level.rows.shape[0], -(-width // threads)),
            (*level, sums, _flat(out), following, width),
            block=threads,
        )
        sums = following


def join_tops(dtype: Any, edges: Edges, tops: Any, n_heads: int) -> Any:
    """Join the largest score of each piece and its sum of exponentials; give those of rows."""
    from rtxarr.kernels._edge_attention_cuda import join

    found = empty(tops, ((edges.indptr.shape[0] - 1) * n_heads * 2,), tops.dtype)
    unread, out = nothing(tops, tops.dtype), nothing(tops, dtype)
    for level in edges.levels[1:]:
        following = empty(tops, (level.n_pieces * 2 * n_heads,), tops.dtype)
        launch(
            join(dtype, True),
            (level.rows.shape[0], n_heads),
            (*level, unread, tops, out, found, unread, following, n_heads, 0),
            block=1,
        )
        tops = following
    return found
