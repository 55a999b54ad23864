"""GPU code of the samplers: a thread for each row where rows are scanned, else for each edge."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _core, _device, _div
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._sampling_core import build

# Rows of a block that draws few edges in each, and edges of one that goes through edges.
ROWS, EDGES = (4, 4) if _SIMULATING else (128, 256)

_sampling = build(_device, _core, _div)
_subset, _one_of, _weighted_one_of = (
    _sampling.subset,
    _sampling.one_of,
    _sampling.weighted_one_of,
)
_row_of, _row_between = _sampling.row_of, _sampling.row_between
_walk, _negative = _sampling.walk, _sampling.negative


@functools.cache
def draw_few(most: int):
    """Return the kernel that draws up to ``most`` edges a row, or keeps all; a block some rows."""

    @bounded(ROWS)
    def kernel(nodes, first, degrees, offsets, out, stream, key):
        chosen = cuda.shared.array((most, ROWS), np.int64)
        t = np.int64(cuda.threadIdx.x)
        base = np.int64(cuda.blockIdx.x) * ROWS
        end = min(base + ROWS, np.int64(nodes.size))
        if base + t < end:  # a thread a row
            row = base + t
            n = offsets[row + 1] - offsets[row]
            if n != degrees[row]:
                _subset(chosen[:, t], 0, n, 0, degrees[row], nodes[row], stream, key)
        cuda.syncthreads()  # all rows are drawn
        for i in range(offsets[base] + t, offsets[end], ROWS):  # a thread an edge
            row = _row_between(offsets, base, end, i)
            j = i - offsets[row]
            if offsets[row + 1] - offsets[row] != degrees[row]:
                j = chosen[j, row - base]
            out[i] = first[row] + j

    return kernel


@_device
def _entry(ends, offsets):
    """Return the entry of this thread and the row that holds it; row -1 if there is none.

    The threads of the block, ``EDGES``, call it together, with ``ends`` of shape (2,) in shared
    memory: between the rows of the first and the last entry there are few others.
    """
    t, n = np.int64(cuda.threadIdx.x), offsets[offsets.size - 1]
    i = np.int64(cuda.blockIdx.x) * EDGES + t
    if t < 2:
        ends[t] = _row_of(offsets, min(i - t + t * (EDGES - 1), n - 1))
    cuda.syncthreads()  # both rows are found
    return i, _row_between(offsets, ends[0], ends[1] + 1, i) if i < n else np.int64(-1)


@bounded(EDGES)
def keep(first, degrees, offsets, out):
    """Write the edges of rows that keep all; a thread an edge."""
    i, row = _entry(cuda.shared.array(2, np.int64), offsets)
    if row >= 0 and offsets[row + 1] - offsets[row] == degrees[row]:
        out[i] = first[row] + i - offsets[row]


@cuda.jit
def draw_subsets(nodes, first, degrees, offsets, out, stream, key):
    """Draw in the rows that do not keep all; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < nodes.size:
        begin = offsets[row]
        n = offsets[row + 1] - begin
        if n != degrees[row]:
            _subset(out, begin, n, first[row], degrees[row], nodes[row], stream, key)


@bounded(EDGES)
def draw_again(nodes, first, degrees, offsets, out, stream, key):
    """Draw what may come again; a thread an edge."""
    i, row = _entry(cuda.shared.array(2, np.int64), offsets)
    if row >= 0:
        out[i] = _one_of(i - offsets[row], first[row], degrees[row], nodes[row], stream, key)


@bounded(EDGES)
def draw_weighted_again(nodes, first, degrees, offsets, sums, out, stream, key):
    """Draw by weight what may come again; a thread an edge."""
    i, row = _entry(cuda.shared.array(2, np.int64), offsets)
    if row >= 0:
        out[i] = _weighted_one_of(
            i - offsets[row], first[row], degrees[row], sums, nodes[row], stream, key
        )


@cuda.jit
def sum_rows(indptr, weights, sums, available):
    """Add up the weights of a row, in order; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < available.size:
        total, count = np.float64(0.0), np.int64(0)
        for edge in range(indptr[row], indptr[row + 1]):
            total += weights[edge]
            sums[edge] = total
            count += weights[edge] > 0.0
        available[row] = count


@cuda.jit
def walks(out, starts, per_start, indptr, indices, back, near, far, stream, key):
    """Walk; a thread a walk."""
    row = np.int64(cuda.grid(1))
    if row < out.shape[0]:
        start, which = starts[row // per_start], row % per_start
        _walk(out, row, start, which, indptr, indices, back, near, far, stream, key)


@cuda.jit
def negatives(out, edges, src, indptr, indices, n_nodes, stream, key):
    """Write nodes that sources have no edge to; a thread each."""
    i = np.int64(cuda.grid(1))
    if i < out.size:
        row, j = i // out.shape[1], i % out.shape[1]
        out[row, j] = _negative(edges[row], j, src[row], indptr, indices, n_nodes, stream, key)
