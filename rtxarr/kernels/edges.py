"""Functions of the two nodes of each edge, sums over edges and their softmax, on a GPU."""

from __future__ import annotations

from typing import Any

from rtxarr import _device
from rtxarr._device import _SIMULATING, launch, launch_planned, runs_kernels
from rtxarr.dtypes import FLOATING, accumulator
from rtxarr.kernels._dense import packed
from rtxarr.kernels.edge_attention import Edges, fits, join_sums, join_tops, pieces
from rtxarr.kernels.segment import can_be_wide, column_sums, row_by_row
from rtxarr.kernels.small import leading_sum

__all__ = [
    "edge_dot",
    "edge_softmax",
    "edge_softmax_gradient",
    "fit",
    "gated_dot",
    "gated_sum",
    "head_dots",
    "head_sums",
]

_LANES = 4 if _SIMULATING else 8  # threads that share the edges of a node and a head
_PARTS = 16_384  # sums over nodes that are kept apart


def fit(*arrays: Any) -> bool:
    """Tell whether the kernels take these arrays of nodes (or None): alike, and of a size."""
    first, *others = (x for x in arrays if x is not None)
    return fits(first) and all(
        x.ndim == 3 and x.dtype == first.dtype and x.shape[1:] == first.shape[1:] for x in others
    )


def edge_dot(u: Any, v: Any, edges: Edges) -> Any:
    """Give, for each edge and head, the inner product of its two nodes' rows.

    Parameters
    ----------
    u, v : array, shape (n_src, n_heads, n_features) and (n_dst, n_heads, n_features)
        Arrays that :func:`fit`.
    edges : Edges
        The rows are destinations.

    Returns
    -------
    array of their dtype, shape (n_edges, n_heads)
        In the order of the edges' numbers.
    """
    return _dots(u, v, None, None, edges, 0.0)


def gated_dot(
    y_src: Any, y_dst: Any, key_src: Any, key_dst: Any, edges: Edges, *, slope: float
) -> Any:
    """Give, for each edge and head, the sum of ``(y_src + y_dst) * slope at key_src + key_dst``.

    All arrays are as in :func:`edge_dot`; ``y_src`` may be None. The slope is that of a leaky ReLU.
    """
    return _dots(y_src, y_dst, key_src, key_dst, edges, slope)


def _dots(src, dst, key_src, key_dst, edges, slope):
    from rtxarr.kernels._edges_cuda import dots

    out = _device.empty(dst, (edges.indices.shape[0], dst.shape[1]), dst.dtype)
    gated, both = key_dst is not None, src is not None
    plan, (src, dst, key_src, key_dst) = _plan(dst, src, dst, key_src, key_dst)
    first = edges.levels[0]
    launch(
        dots(dst.dtype, plan, gated, both, edges.ids is not None),
        plan.grid(first.rows.shape[0]),
        (
            *first, edges.indices, _ids(edges), src, dst, key_src, key_dst, out.reshape(-1),
            _scalar(dst)(slope),
        ),
        block=plan.block,
    )  # fmt: skip
    return out


def gated_sum(values: Any, key_src: Any, key_dst: Any, edges: Edges, *, slope: float) -> Any:
    """Add up, for each destination, its edges' values times the slopes of :func:`gated_dot`.

    Parameters
    ----------
    values : array of the dtype of the keys, shape (n_edges, n_heads)
    key_src, key_dst : array
    edges : Edges
    slope : float

    Returns
    -------
    array, shape and dtype of ``key_dst``
    """
    from rtxarr.kernels._edges_cuda import gated_sums

    out = _device.empty(key_dst, key_dst.shape, key_dst.dtype)
    flat = out.reshape(-1)
    plan, (key_src, key_dst) = _plan(key_dst, key_src, key_dst)
    first = edges.levels[0]
    (sums,) = pieces(out, _scalar(key_dst), edges, plan.n_heads * plan.n_features)
    launch(
        gated_sums(key_dst.dtype, plan, edges.ids is not None),
        plan.grid(first.rows.shape[0]),
        (
            *first, edges.indices, _ids(edges), row_by_row(values), key_src, key_dst,
            flat, sums, _scalar(key_dst)(slope),
        ),
        block=plan.block,
    )  # fmt: skip
    join_sums(edges, sums, out)
    return out


def edge_softmax(logits: Any, edges: Edges) -> Any:
    """Give the softmax over the edges of each row, head by head.

    Parameters
    ----------
    logits : array of a real floating dtype, shape (n_edges, n_heads)
    edges : Edges

    Returns
    -------
    array, shape and dtype of ``logits``
        Zeros where all logits of a row are -inf.
    """
    from rtxarr.kernels._edges_cuda import softmax

    out = _device.empty(logits, logits.shape, logits.dtype)
    flat = out.reshape(-1)
    plan = _edge_plan(logits.shape[1])
    whole, rest = softmax(logits.dtype, plan, edges.ids is not None)
    first = edges.levels[0]
    (tops,) = pieces(out, _scalar(logits), edges, 2 * plan.n_heads)
    arguments = (*first, _ids(edges), row_by_row(logits), flat)
    launch(whole, plan.grid(first.rows.shape[0]), (*arguments, tops), block=plan.block)
    if first.n_pieces:
        tops = join_tops(logits.dtype, edges, tops, plan.n_heads)
        launch(rest, plan.grid(first.n_pieces), (*arguments, tops), block=plan.block)
    return out


def edge_softmax_gradient(grad: Any, out: Any, edges: Edges) -> Any:
    """Give the gradient of what :func:`edge_softmax` takes, from that of its result ``out``."""
    from rtxarr.kernels._edges_cuda import softmax_gradient

    of_logits = _device.empty(out, out.shape, out.dtype)
    flat = of_logits.reshape(-1)
    plan = _edge_plan(out.shape[1])
    whole, rest = softmax_gradient(out.dtype, plan, edges.ids is not None)
    first = edges.levels[0]
    (sums,) = pieces(out, _scalar(out), edges, plan.n_heads)
    given = (*first, _ids(edges), row_by_row(grad), row_by_row(out), flat)
    launch(whole, plan.grid(first.rows.shape[0]), (*given, sums), block=plan.block)
    if first.n_pieces:
        totals = _device.empty(out, (edges.indptr.shape[0] - 1, plan.n_heads), sums.dtype)
        join_sums(edges, sums, totals)
        launch(rest, plan.grid(first.n_pieces), (*given, totals.reshape(-1)), block=plan.block)
    return of_logits


def fits_softmax(logits: Any) -> bool:
    """Tell whether the softmax takes an array of edges and heads."""
    right = runs_kernels(logits) and logits.dtype in FLOATING
    return right and logits.ndim == 2 and logits.size > 0


def head_dots(x: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Give the inner products of nodes' heads with two vectors of each head.

    Parameters
    ----------
    x : array, shape (n_nodes, n_heads, n_features)
        One that fits.
    first, second : array of its dtype, shape (n_heads, n_features)

    Returns
    -------
    pair of arrays of float32 (float64 for float64), shape (n_nodes, n_heads)
    """
    n_nodes, n_heads, n_features = x.shape
    dtype = accumulator(x.dtype)
    out = [_device.empty(x, (n_nodes, n_heads), dtype) for _ in range(2)]
    given = *map(packed, (x, first, second)), *out, n_nodes
    launch_planned(_dots_plan, (n_nodes, n_heads, n_features), given)
    return out[0], out[1]


def _dots_plan(sizes, args):
    from rtxarr.kernels._edges_cuda import head_dots as kernel

    plan = _heads_plan(sizes, *args[:3])
    return kernel(args[0].dtype, plan), plan.grid(sizes[0]), plan.block


def head_sums(x: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Give the sums of nodes' heads, each times a number: the gradients of :func:`head_dots`.

    Parameters
    ----------
    x : array, shape (n_nodes, n_heads, n_features)
    first, second : array of float32 (float64 for float64), shape (n_nodes, n_heads)
        The second may be of the first nodes alone.

    Returns
    -------
    pair of arrays of float32 (float64 for float64), shape (n_heads, n_features)
    """
    from rtxarr.kernels._edges_cuda import head_sums as kernel

    x, n_nodes = packed(x), x.shape[0]
    plan = _heads_plan(x.shape, x)
    n_blocks, n_groups = plan.grid(n_nodes)
    n_blocks = max(1, min(n_blocks, _PARTS // plan.items))
    shape = n_blocks * plan.items, 2, *x.shape[1:]
    parts = _device.empty(x, shape, accumulator(x.dtype))
    given = x, row_by_row(first), row_by_row(second), parts, n_nodes
    launch_planned(_as_given, (kernel(x.dtype, plan), (n_blocks, n_groups), plan.block), given)
    both = leading_sum(parts, 0, False)
    if both is None:
        both = column_sums(parts.reshape(shape[0], -1)).reshape(shape[1:])
    return both[0], both[1]


def _as_given(options, args):
    return options


def _heads_plan(shape, *arrays):
    """Deal the heads of nodes out, for arrays of so many heads and features."""
    from rtxarr.kernels._heads import plan_heads

    wide = all(can_be_wide(x, shape[2]) for x in arrays)
    return plan_heads(arrays[0].dtype, *shape[1:], wide=wide)


def _plan(like, *arrays):
    """Deal the heads of arrays of nodes out; give the arrays flat, one of them for None."""
    flat = [None if x is None else row_by_row(x) for x in arrays]
    known = [x for x in flat if x is not None]
    return _heads_plan(like.shape, *known), [known[0] if x is None else x for x in flat]


def _edge_plan(n_heads):
    from rtxarr.kernels._heads import share_edges

    return share_edges(n_heads, _LANES)


def _ids(edges):
    return edges.indptr if edges.ids is None else edges.ids


def _scalar(x):
    return accumulator(x.dtype).type
