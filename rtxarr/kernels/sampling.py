"""Drawing edges of the nodes of a graph, numbering what was reached, and walks.

Counter-based: what is drawn at a node follows from ``key``, ``stream``, the node and its edges, so
the CPU and a GPU draw the same, in whatever pieces. See ``_sampling_core`` for how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rtxarr._device import _SIMULATING, launch, namespace, runs_kernels

__all__ = [
    "are_below",
    "begin_draw",
    "begin_labor",
    "cut_offsets",
    "draw",
    "draw_labor",
    "gather_edges",
    "look_up",
    "negatives",
    "number_reached",
    "partition",
    "renumber",
    "room",
    "sum_rows",
    "walks",
]

# A block draws in shared memory up to so many edges a row.
_FEW = 32

# Threads of a walk that looks at the node before, and walks of a block.
_WALKS = (2, 2) if _SIMULATING else (8, 16)

# Blocks of kernels that go through lists of rows, however long.
_BLOCKS = 2 if _SIMULATING else 2048


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
    prefixes: bool = False,
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
    prefixes : bool, default False
        Whether rows of one node may have different numbers of its edges. A GPU then draws by weight
        for each of them, which waits once.

    Returns
    -------
    offsets : array of int64, shape (n_rows + 1,)
    edges : array of int64, shape (n_drawn,)
        ``edges[offsets[i]:offsets[i + 1]]`` are those of ``nodes[i]``: rising, unless drawn with
        replacement.
    """
    offsets, write = begin_draw(
        nodes, first, degrees, n, key=key, stream=stream, replace=replace, weights=weights,
        sums=sums, available=available, prefixes=prefixes,
    )  # fmt: skip
    n_drawn = int(offsets[-1])
    return offsets, write(n_drawn)[:n_drawn]


def begin_draw(
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
    prefixes: bool = False,
) -> tuple[Any, Callable[[int], Any]]:
    """Do as :func:`draw`, but return ``offsets`` and a function, which takes ``offsets[-1]``.

    It returns the edges, and on a GPU some entries more. So nothing waits.
    """
    xp = namespace(nodes, first, degrees)
    available = degrees if available is None else available
    replace = replace and n >= 0
    offsets = offsets_of(xp, available, n, replace)
    rows, place = (nodes, first, degrees), (stream, key)

    def write(n_drawn: int) -> Any:
        out = _empty_for(xp, nodes, n_drawn)
        if runs_kernels(nodes):
            if weights is None or replace:
                _write_on_gpu(rows, offsets, n, replace, sums, out, place)
            elif out.size:
                n_edges = int(xp.sum(degrees)) if prefixes else None
                _write_weighted_on_gpu(
                    xp, rows, available, offsets, n, weights, out, place, n_edges
                )
            return out
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
        return out

    return offsets, write


def _write_on_gpu(
    rows: tuple, offsets: Any, n: int, replace: bool, sums: Any, out: Any, place: tuple
) -> None:
    from rtxarr.kernels import _sampling_cuda as gpu

    nodes, first, degrees = rows
    n_blocks = -(-out.size // gpu.EDGES)
    if replace and sums is None:
        launch(gpu.draw_again, n_blocks, (*rows, offsets, out, *place), block=gpu.EDGES)
    elif replace:
        arguments = (*rows, offsets, sums, out, *place)
        launch(gpu.draw_weighted_again, n_blocks, arguments, block=gpu.EDGES)
    elif 0 <= n <= _FEW:
        kernel = gpu.draw_few(max(8, 1 << max(n - 1, 0).bit_length()))
        launch(kernel, -(-nodes.size // gpu.ROWS), (*rows, offsets, out, *place), block=gpu.ROWS)
    else:
        launch(gpu.keep, n_blocks, (first, degrees, offsets, out), block=gpu.EDGES)
        if n > 0:
            launch(gpu.draw_subsets, nodes.size, (*rows, offsets, out, *place))


def _write_weighted_on_gpu(
    xp: Any,
    rows: tuple,
    available: Any,
    offsets: Any,
    n: int,
    weights: Any,
    out: Any,
    place: tuple,
    n_edges: int | None,
) -> None:
    """Draw; ``n_edges`` is of all rows where those of one node may be different ones."""
    from rtxarr.kernels import _selection_cuda as gpu

    nodes, first, degrees = rows
    apart, n_edges = n_edges is not None, weights.size if n_edges is None else n_edges
    lists = _list_rows(xp, first, degrees, offsets, n, n_edges, apart)
    done = (offsets, weights, lists.counters)
    launch(
        gpu.select_short,
        _BLOCKS,
        (*rows, *done, lists.short_rows, out, *place),
        block=(gpu.LANES, gpu.GROUPS),
    )
    fits = 0 < n <= gpu.PIECE // 2
    # Rows that are drawn have so many edges, and those of several pieces fill more than half.
    half = 2 * n_edges // gpu.PIECE * n if fits else 0
    none = xp.empty(0, dtype=np.int64)
    best = xp.empty((2, 2 * half), dtype=np.int64)
    best_keys, best_edges = best[0], best[1]
    launch(
        gpu.select_pieces,
        _BLOCKS,
        (*rows, *done, lists.pieces, lists.begin, lists.begin_long, n if fits else gpu.PIECE,
         none, best_keys, best_edges, out, *place),
        block=gpu.THREADS,
    )  # fmt: skip
    long_rows = lists.long_rows
    if fits and half:
        launch(
            gpu.select_long,
            min(_BLOCKS, long_rows.size),
            (degrees, offsets, lists.counters, long_rows, lists.begin_long, n, none, best_keys,
             best_edges, half, out),
            block=gpu.THREADS,
        )  # fmt: skip
    elif not fits:
        arrivals = xp.empty(out.size, dtype=np.float64)
        launch(
            gpu.draw_long,
            long_rows.size,
            (*rows, offsets, available, weights, lists.counters, long_rows, arrivals, out, *place),
        )
    _copy_rows(first, degrees, offsets, lists.same, out)


def _list_rows(
    xp: Any, first: Any, degrees: Any, offsets: Any, n: int, n_edges: int, apart: bool = False
) -> Any:
    """Find rows of the same node, and put those that must choose among their edges on lists.

    ``apart`` takes all rows as different ones. Those that are drawn have ``n_edges`` at most.
    """
    from rtxarr.kernels import _selection_cuda as gpu

    n_rows = first.shape[0]
    bits = 0 if apart else _place_bits(n_rows, n_edges)
    slots = xp.full(0 if apart else 2 * n_rows, -1, dtype=np.int64)
    head = (first, degrees, offsets, n, slots, bits)
    if not apart:
        launch(gpu.enter_rows, n_rows, head)
    n_long = n_edges // gpu.PIECE + 1
    lists = gpu.Lists(
        same=xp.empty(n_rows, dtype=np.int64),
        counters=xp.zeros(gpu.N_COUNTERS, dtype=np.int64),
        short_rows=xp.empty(n_rows, dtype=np.int64),
        pieces=xp.empty(n_rows + n_long, dtype=np.int64),
        begin=xp.empty(n_rows, dtype=np.int64),
        long_rows=xp.empty(n_long, dtype=np.int64),
        begin_long=xp.empty(n_rows, dtype=np.int64),
    )
    launch(gpu.list_rows, -(-n_rows // gpu.THREADS), (*head, *lists), block=gpu.THREADS)
    return lists


def _copy_rows(first: Any, degrees: Any, offsets: Any, same: Any, out: Any) -> None:
    """Write the edges of rows that need not be drawn."""
    from rtxarr.kernels import _selection_cuda as gpu

    n_blocks = -(-out.size // gpu.EDGES)
    launch(gpu.copy_rows, n_blocks, (first, degrees, offsets, same, out), block=gpu.EDGES)


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
    offsets, write = begin_labor(first, degrees, indices, n, key=key, stream=stream)
    n_drawn = int(offsets[-1])
    return offsets, write(n_drawn)[:n_drawn]


def begin_labor(
    first: Any, degrees: Any, indices: Any, n: int, *, key: np.uint64, stream: np.uint64
) -> tuple[Any, Callable[[int], Any]]:
    """Do so as :func:`begin_draw` does."""
    xp = namespace(first, degrees, indices)
    n = 2**62 if n < 0 else n
    if runs_kernels(first):
        return _labor_on_gpu(xp, first, degrees, indices, n, (stream, key))
    from rtxarr.kernels import _sampling_njit as host

    counts = xp.empty(first.shape[0], dtype=np.int64)
    head = first, degrees, indices, n
    host.count_kept(*head, counts, stream, key)
    offsets = offsets_of(xp, counts)

    def write(n_drawn: int) -> Any:
        out = np.empty(n_drawn, dtype=np.int64)
        host.write_kept(*head, offsets, out, stream, key)
        return out

    return offsets, write


def _labor_on_gpu(
    xp: Any, first: Any, degrees: Any, indices: Any, n: int, place: tuple
) -> tuple[Any, Callable[[int], Any]]:
    from rtxarr.kernels import _selection_cuda as gpu

    n_rows = first.shape[0]
    none = xp.empty(0, dtype=np.int64)
    lists = _list_rows(xp, first, degrees, none, n, indices.size)
    counts = xp.empty(n_rows, dtype=np.int64)
    counts_of_pieces = xp.empty_like(lists.pieces)
    head = (first, degrees, indices, n, lists.counters)

    def look(writes: bool, offsets: Any, out: Any) -> None:
        launch(
            gpu.kept_short(writes),
            _BLOCKS,
            (*head, lists.short_rows, counts, offsets, out, *place),
            block=(gpu.LANES, gpu.GROUPS),
        )
        launch(
            gpu.kept_pieces(writes),
            _BLOCKS,
            (*head, lists.pieces, lists.begin, counts_of_pieces, offsets, out, *place),
            block=gpu.THREADS,
        )

    look(False, none, none)
    kept = xp.empty(n_rows, dtype=np.int64)
    arguments = (degrees, n, lists.same, lists.begin, counts_of_pieces, counts, kept)
    launch(gpu.count_rows, n_rows, arguments)
    launch(gpu.copy_counts, n_rows, (degrees, n, lists.same, kept))
    offsets = offsets_of(xp, kept)

    def write(n_drawn: int) -> Any:
        out = _empty_for(xp, first, n_drawn)
        look(True, offsets, out)
        _copy_rows(first, degrees, offsets, lists.same, out)
        return out

    return offsets, write


def are_below(x: Any, n: int) -> bool:
    """Tell whether all of the integers ``x`` lie in [0, n), in one wait for a GPU."""
    if x.size == 0:
        return True
    if not runs_kernels(x):
        return bool(x.min() >= 0) and bool(x.max() < n)
    from rtxarr.kernels import _numbering_cuda as gpu

    xp = namespace(x)
    x = xp.ascontiguousarray(xp.astype(x, np.int64, copy=False))  # the largest become negative
    outside = xp.zeros(1, dtype=np.int32)
    launch(gpu.find_outside, x.size, (x, n, outside))
    return not int(outside[0])


def look_up(indptr: Any, nodes: Any, ptr: Any, available: Any = None) -> tuple[Any, Any, Any]:
    """Return of each node where its edges begin, how many they are and how many have a weight.

    Parameters
    ----------
    indptr : array of int64, shape (n_nodes + 1,)
    nodes : array of int64, shape (n_rows,)
    ptr : array of int64, shape (n_batches + 1,)
        Nodes from ``ptr[-1]`` on are none, and have no edges.
    available : array of int64, shape (n_nodes,), optional
        How many edges of each node have a weight: by default all.

    Returns
    -------
    first, degrees, usable : array of int64, shape (n_rows,)
    """
    xp = namespace(indptr, nodes, ptr)
    if runs_kernels(nodes):
        from rtxarr.kernels import _numbering_cuda as gpu

        found = tuple(xp.empty_like(nodes) for _ in range(3))
        available = indptr[:0] if available is None else available
        launch(gpu.look_up, nodes.size, (nodes, ptr, indptr, available, *found))
        return found
    first = xp.take(indptr, nodes)
    degrees = xp.take(indptr, nodes + 1) - first
    return first, degrees, degrees if available is None else xp.take(available, nodes)


def gather_edges(edges: Any, n: int, indices: Any, edge_ids: Any) -> tuple[Any, Any]:
    """Return the source and the number of each of the first ``n`` edges, in arrays as long."""
    xp = namespace(edges, indices, edge_ids)
    if not runs_kernels(edges):
        return xp.take(indices, edges), xp.take(edge_ids, edges)
    from rtxarr.kernels import _numbering_cuda as gpu

    src = xp.empty(edges.shape[0], dtype=indices.dtype)
    ids = xp.empty(edges.shape[0], dtype=edge_ids.dtype)
    launch(gpu.gather_edges, edges.size, (edges, n, indices, edge_ids, src, ids))
    return src, ids


def cut_offsets(offsets: Any, ptr: Any) -> tuple[Any, Any]:
    """Cut the offsets of all rows into those of batches.

    Parameters
    ----------
    offsets : array of int64, shape (n_rows + 1,)
    ptr : array of int64, shape (n_batches + 1,)
        Of the rows of each batch.

    Returns
    -------
    cut : array of int64, shape (n_rows + n_batches,)
        Those of batch ``b``, which begin at zero, are ``cut[ptr[b] + b:ptr[b + 1] + b + 1]``.
    bounds : array of int64, shape (2, n_batches + 1)
        ``ptr`` again, and where the edges of each batch begin among all.
    """
    xp = namespace(offsets, ptr)
    n_batches = ptr.shape[0] - 1
    if runs_kernels(offsets):
        from rtxarr.kernels import _numbering_cuda as gpu

        cut = xp.empty(offsets.shape[0] - 1 + n_batches, dtype=np.int64)
        bounds = xp.empty((2, n_batches + 1), dtype=np.int64)
        launch(gpu.cut_offsets, max(cut.size, n_batches + 1), (offsets, ptr, cut, bounds))
        return cut, bounds
    bounds = xp.stack([ptr, xp.take(offsets, ptr)])
    parts = [offsets[ptr[b] : ptr[b + 1] + 1] - bounds[1, b] for b in range(n_batches)]
    return xp.concat(parts) if parts else offsets[:0], bounds


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
    local, out, out_ptr = number_reached(nodes, ptr, src, edge_ptr, n_nodes)
    if out.shape[0] > 0:
        out = out[: int(out_ptr[-1])]
    return local, out, out_ptr


def number_reached(
    nodes: Any, ptr: Any, src: Any, edge_ptr: Any, n_nodes: int
) -> tuple[Any, Any, Any]:
    """Do as :func:`renumber`, but arrays may go on after the last batch: so nothing waits."""
    xp = namespace(nodes, ptr, src, edge_ptr)
    n_items = nodes.shape[0] + src.shape[0]
    local = xp.empty(src.shape[0], dtype=np.int32 if n_items < 2**31 else np.int64)
    out = xp.empty(n_items, dtype=np.int64)
    out_ptr = xp.empty_like(ptr)
    if not runs_kernels(nodes):
        from rtxarr.kernels import _sampling_njit as host

        sizes = np.diff(ptr) + np.diff(edge_ptr)
        n_slots = _table_size(min(int(sizes.max(initial=0)), n_nodes))
        slots, places = np.empty(n_slots, dtype=np.int64), np.empty(n_slots, dtype=local.dtype)
        host.renumber(nodes, ptr, src, edge_ptr, slots, places, local, out, out_ptr)
        return local, out[: out_ptr[-1]].copy(), out_ptr
    from rtxarr.kernels import _numbering_cuda as gpu

    bits = _place_bits(n_items, n_nodes)
    slots = xp.full(2 * n_items, -1, dtype=np.int64)
    before = xp.empty(src.shape[0] + 1, dtype=local.dtype)
    totals = xp.empty(n_tiles := -(-before.size // gpu.TILE), dtype=np.int64)
    launch(gpu.enter, n_items, (nodes, ptr, src, edge_ptr, slots, bits))
    launch(gpu.find, n_tiles, (ptr, src, edge_ptr, slots, bits, local, totals), block=gpu.BLOCK)
    launch(gpu.sum_totals, 1, (totals,), block=gpu.SUMMING)
    launch(gpu.rank, n_tiles, (ptr, src, edge_ptr, local, totals, before, out), block=gpu.BLOCK)
    n_threads = max(n_items, ptr.size)
    launch(gpu.number, n_threads, (nodes, ptr, edge_ptr, before, local, out, out_ptr))
    return local, out, out_ptr


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
        from rtxarr.kernels import _sampling_cuda, _walks_cuda

        if len(set(weights)) == 1:
            launch(_sampling_cuda.walks, out.shape[0], arguments)
        else:
            lanes, n_walks = _WALKS
            kernel = _walks_cuda.walks_of_blocks(lanes, n_walks)
            launch(kernel, -(-out.shape[0] // n_walks), arguments, block=lanes * n_walks)
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


def offsets_of(xp: Any, counts: Any, n: int = -1, again: bool = False) -> Any:
    """Return where each row begins, and the end; int64.

    With ``n`` of what is drawn from ``counts``: as many, again and again, or no more than there
    are.
    """
    if runs_kernels(counts):
        from rtxarr.kernels import _numbering_cuda as gpu

        out = xp.empty(counts.shape[0] + 1, dtype=np.int64)
        totals = xp.zeros(n_tiles := -(-out.size // gpu.TILE), dtype=np.int64)
        if n_tiles > 1:
            launch(gpu.sum_counts, n_tiles, (counts, n, int(again), totals), block=gpu.BLOCK)
            launch(gpu.sum_totals, 1, (totals,), block=gpu.SUMMING)
        launch(gpu.write_offsets, n_tiles, (counts, n, int(again), totals, out), block=gpu.BLOCK)
        return out
    if n >= 0:
        counts = xp.where(counts > 0, n, 0) if again else xp.where(counts < n, counts, n)
    out = xp.zeros(counts.shape[0] + 1, dtype=np.int64)
    out[1:] = xp.cumulative_sum(counts, dtype=np.int64)
    return out


def room(x: Any, n: int) -> int:
    """Return how long an array beside ``x`` is to be for ``n`` entries.

    On a GPU up to an eighth longer, so that arrays are of a few sizes: then launches are like
    former ones, which costs less, and memory fits that was used before.
    """
    if not runs_kernels(x) or n < 16:
        return n
    step = 1 << (n.bit_length() - 4)
    return -(-n // step) * step


def _empty_for(xp: Any, x: Any, n: int) -> Any:
    return xp.empty(room(x, n), dtype=np.int64)


def _table_size(n: int) -> int:
    """Return a power of two, so that a table with ``n`` entries is at most half full."""
    return 2 << max(n, 1).bit_length()


def _place_bits(n_places: int, n_keys: int) -> int:
    """Return how many bits of a table's words hold places; the others hold keys."""
    bits = n_places.bit_length()
    if bits + n_keys.bit_length() > 63:
        raise ValueError(
            f"nodes and edges that are sampled at once must fit into words of 64 bits, got "
            f"{n_places} of {n_keys}: sample fewer batches at once"
        )
    return bits
