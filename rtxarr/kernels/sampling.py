"""Drawing edges of the nodes of a graph, numbering what was reached, and walks.

Counter-based: what is drawn at a node follows from ``key``, ``stream``, the node and its edges, so
the CPU and a GPU draw the same, in whatever pieces. See ``_sampling_core`` for how.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rtxarr._device import launch, namespace, runs_kernels

__all__ = ["draw", "draw_labor", "negatives", "partition", "renumber", "sum_rows", "walks"]


def draw(
    nodes: Any,
    first: Any,
    degrees: Any,
    n: int,
    *,
    key: np.uint64,
    stream: np.uint64,
    replace: bool = False,
    weights: Any = None,
    sums: Any = None,
    available: Any = None,
) -> tuple[Any, Any]:
    """Draw edges of each node.

    Parameters
    ----------
    nodes : array of int64, shape (n_rows,)
    first, degrees : array of int64, shape (n_rows,)
        The edges ``first[i]`` to ``first[i] + degrees[i] - 1`` are those of ``nodes[i]``.
    n : int
        Edges for each node, at most; -1 for all.
    key, stream : np.uint64
    replace : bool, default False
        Whether an edge may be drawn again.
    weights, sums : array of float64, shape (n_edges,), optional
        Weights of the edges, and these added up along each row, by :func:`sum_rows`. An edge of
        weight zero is not drawn.
    available : array of int64, shape (n_rows,)
        How many edges of each row have a weight; with ``weights``.

    Returns
    -------
    offsets : array of int64, shape (n_rows + 1,)
    edges : array of int64, shape (n_drawn,)
        ``edges[offsets[i]:offsets[i + 1]]`` are those of ``nodes[i]``: rising, unless drawn with
        replacement.
    """
    xp = namespace(nodes, first, degrees)
    available = degrees if available is None else available
    if n < 0:
        counts, replace = available, False
    elif replace:
        counts = xp.where(available > 0, n, 0)
    else:
        counts = xp.where(available < n, available, n)
    offsets = offsets_of(xp, counts)
    out = xp.empty(int(offsets[-1]), dtype=np.int64)
    rows, place = (nodes, first, degrees), (stream, key)
    if not runs_kernels(nodes):
        from rtxarr.kernels import _sampling_njit as host

        if weights is None and n < 0:
            host.keep(offsets, first, out)
        elif weights is None and replace:
            host.draw_again(*rows, offsets, out, *place)
        elif weights is None:
            host.draw_subsets(*rows, offsets, out, *place)
        elif replace:
            host.draw_weighted_again(*rows, offsets, sums, out, *place)
        else:
            arrivals = np.empty(out.size)
            host.draw_weighted(*rows, available, offsets, weights, arrivals, out, *place)
        return offsets, out
    from rtxarr.kernels import _sampling_cuda as gpu

    if weights is None and replace:
        launch(gpu.draw_again, out.size, (*rows, offsets, out, *place))
    elif weights is None:
        launch(gpu.keep, out.size, (first, degrees, offsets, out))
        if n > 0:
            launch(gpu.draw_subsets, nodes.size, (*rows, offsets, out, *place))
    elif replace:
        launch(gpu.draw_weighted_again, out.size, (*rows, offsets, sums, out, *place))
    else:
        arrivals = xp.empty(out.size, dtype=np.float64)
        arguments = (*rows, available, offsets, weights, arrivals, out, *place)
        launch(gpu.draw_weighted, nodes.size, arguments)
    return offsets, out


def sum_rows(indptr: Any, weights: Any) -> tuple[Any, Any]:
    """Add up the weights of each row.

    Parameters
    ----------
    indptr : array of int64, shape (n_rows + 1,)
    weights : array of float64, shape (n_edges,)

    Returns
    -------
    sums : array of float64, shape (n_edges,)
        Of the row's weights up to and with this one, added in order.
    available : array of int64, shape (n_rows,)
        How many weights of each row are above zero.
    """
    xp = namespace(indptr, weights)
    n_rows = indptr.shape[0] - 1
    sums, available = xp.empty_like(weights), xp.empty(n_rows, dtype=np.int64)
    if runs_kernels(weights):
        from rtxarr.kernels import _sampling_cuda as gpu

        launch(gpu.sum_rows, n_rows, (indptr, weights, sums, available))
    else:
        from rtxarr.kernels import _sampling_njit as host

        host.sum_rows(indptr, weights, sums, available)
    return sums, available


def draw_labor(
    first: Any, degrees: Any, indices: Any, n: int, *, key: np.uint64, stream: np.uint64
) -> tuple[Any, Any]:
    """Keep each edge whose source has a number, the same for all rows, below ``n / degree``.

    Parameters
    ----------
    first, degrees : array of int64, shape (n_rows,)
    indices : array of int, shape (n_edges,)
        Sources.
    n : int
        How many edges a row keeps on average, if it has as many; -1 for all.
    key, stream : np.uint64

    Returns
    -------
    offsets, edges : as of :func:`draw`
    """
    xp = namespace(first, degrees, indices)
    n = 2**62 if n < 0 else n
    counts = xp.empty(first.shape[0], dtype=np.int64)
    head = first, degrees, indices, n
    if runs_kernels(first):
        from rtxarr.kernels import _sampling_cuda as gpu

        launch(gpu.count_kept, first.size, (*head, counts, stream, key))
        offsets = offsets_of(xp, counts)
        out = xp.empty(int(offsets[-1]), dtype=np.int64)
        launch(gpu.write_kept, first.size, (*head, offsets, out, stream, key))
        return offsets, out
    from rtxarr.kernels import _sampling_njit as host

    host.count_kept(*head, counts, stream, key)
    offsets = offsets_of(xp, counts)
    out = np.empty(int(offsets[-1]), dtype=np.int64)
    host.write_kept(*head, offsets, out, stream, key)
    return offsets, out


def renumber(nodes: Any, ptr: Any, src: Any, edge_ptr: Any, n_nodes: int) -> tuple[Any, Any, Any]:
    """Number the nodes of each batch: those it begins with, then the others as they first come.

    Parameters
    ----------
    nodes : array of int64, shape (n_begun,)
        Batch ``b`` begins with ``nodes[ptr[b]:ptr[b + 1]]``, which may have a node twice; it is
        then known by its first place.
    ptr : array of int64, shape (n_batches + 1,)
    src : array of int, shape (n_edges,)
        The nodes that the edges ``edge_ptr[b]:edge_ptr[b + 1]`` of batch ``b`` come from.
    edge_ptr : array of int64, shape (n_batches + 1,)
    n_nodes : int
        Of the graph.

    Returns
    -------
    local : array of int32, shape (n_edges,)
        Their numbers; int64 where a batch has 2**31 nodes or edges.
    nodes : array of int64, shape (n_reached,)
    ptr : array of int64, shape (n_batches + 1,)
        Of the nodes of each batch.
    """
    xp = namespace(nodes, ptr, src, edge_ptr)
    n_items = nodes.shape[0] + src.shape[0]
    local = xp.empty(src.shape[0], dtype=np.int32 if n_items < 2**31 else np.int64)
    out = xp.empty(n_items, dtype=np.int64)
    if not runs_kernels(nodes):
        from rtxarr.kernels import _sampling_njit as host

        sizes = np.diff(ptr) + np.diff(edge_ptr)
        n_slots = _table_size(min(int(sizes.max(initial=0)), n_nodes))
        slots, places = np.empty(n_slots, dtype=np.int64), np.empty(n_slots, dtype=local.dtype)
        out_ptr = np.empty_like(ptr)
        host.renumber(nodes, ptr, src, edge_ptr, slots, places, local, out, out_ptr)
        return local, out[: out_ptr[-1]].copy(), out_ptr
    from rtxarr.kernels import _sampling_cuda as gpu

    n_slots = _table_size(n_items)
    slots = xp.full(n_slots, -1, dtype=np.int64)
    places = xp.full(n_slots, n_items, dtype=np.int64)
    table, batches = (slots, places), (nodes, ptr, src, edge_ptr)
    launch(gpu.enter, n_items, (*batches, *table, n_nodes))
    fresh = xp.empty(src.shape[0], dtype=np.int64)
    launch(gpu.mark_first, src.size, (*batches, *table, fresh, n_nodes))
    before = offsets_of(xp, fresh)
    out_ptr = ptr + xp.take(before, edge_ptr)
    arguments = (*batches, *table, before, out_ptr, local, out, n_nodes)
    launch(gpu.number, n_items, arguments)
    return local, out[: int(out_ptr[-1])], out_ptr


def walks(
    starts: Any,
    per_start: int,
    length: int,
    indptr: Any,
    indices: Any,
    *,
    key: np.uint64,
    stream: np.uint64,
    weights: tuple[np.uint64, np.uint64, np.uint64] = (np.uint64(2**32),) * 3,
) -> Any:
    """Walk from each start, from a row to one of its entries at each step.

    Parameters
    ----------
    starts : array of int64, shape (n_starts,)
    per_start, length : int
    indptr, indices : array of int, shape (n_nodes + 1,) and (n_edges,)
        Rising within each row if ``weights`` differ.
    key, stream : np.uint64
    weights : tuple of 3 np.uint64
        Of going back, of going to a neighbour of the node before, and of any other: at least
        1, the largest 2**32.

    Returns
    -------
    array of int64, shape (n_starts * per_start, length + 1)
        -1 after a dead end.
    """
    xp = namespace(starts, indptr, indices)
    out = xp.empty((starts.shape[0] * per_start, length + 1), dtype=np.int64)
    arguments = (out, starts, per_start, indptr, indices, *weights, stream, key)
    if runs_kernels(starts):
        from rtxarr.kernels import _sampling_cuda as gpu

        launch(gpu.walks, out.shape[0], arguments)
    else:
        from rtxarr.kernels import _sampling_njit as host

        host.walks(*arguments)
    return out


def negatives(
    edges: Any,
    src: Any,
    n: int,
    indptr: Any,
    indices: Any,
    n_nodes: int,
    *,
    key: np.uint64,
    stream: np.uint64,
) -> Any:
    """Draw for each edge nodes that its source has no edge to.

    Parameters
    ----------
    edges, src : array of int64, shape (n_edges,)
        The number of each edge, which the draws depend on, and its source.
    n : int
        Nodes an edge.
    indptr, indices : array of int64, shape (n_sources + 1,) and (n_entries,)
        What each source has an edge to: rising, none twice.
    n_nodes : int
        Numbers below this are drawn.
    key, stream : np.uint64

    Returns
    -------
    array of int64, shape (n_edges, n)
        -1 where a source has edges to all nodes.
    """
    xp = namespace(edges, src, indptr, indices)
    out = xp.empty((edges.shape[0], n), dtype=np.int64)
    arguments = (out, edges, src, indptr, indices, n_nodes, stream, key)
    if runs_kernels(edges):
        from rtxarr.kernels import _sampling_cuda as gpu

        launch(gpu.negatives, out.size, arguments)
    else:
        from rtxarr.kernels import _sampling_njit as host

        host.negatives(*arguments)
    return out


def partition(
    rows: tuple[np.ndarray, np.ndarray],
    turned: tuple[np.ndarray, np.ndarray],
    n_parts: int,
    n_passes: int,
) -> np.ndarray:
    """Cut a graph into parts of nearly one size with few edges between them, on the host.

    Parameters
    ----------
    rows, turned : tuple of 2 NumPy arrays of int
        ``indptr`` and ``indices`` of the graph and of the one turned round.
    n_parts, n_passes : int

    Returns
    -------
    NumPy array of int64, shape (n_nodes,)
        The part of each node.
    """
    from rtxarr.kernels import _sampling_njit as host

    n_nodes = rows[0].size - 1
    order = np.empty(n_nodes, np.int64)
    host.breadth_first(*rows, *turned, order)
    parts, sizes = np.full(n_nodes, -1, np.int64), np.zeros(n_parts, np.int64)
    most = -(-11 * n_nodes // (10 * n_parts))  # room to move in
    for _ in range(n_passes):
        host.partition(order, *rows, *turned, parts, sizes, most)
    return parts


def offsets_of(xp: Any, counts: Any) -> Any:
    """Return where each row begins, and the end; int64."""
    out = xp.zeros(counts.shape[0] + 1, dtype=np.int64)
    out[1:] = xp.cumulative_sum(counts, dtype=np.int64)
    return out


def _table_size(n: int) -> int:
    """Return a power of two, so that a table with ``n`` entries is at most half full."""
    return 2 << max(n, 1).bit_length()
