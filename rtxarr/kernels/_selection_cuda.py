"""GPU code of draws that look at all edges of a node: by weight without replacement, and LABOR.

What a node draws does not depend on its batch, so rows of the same node, which many batches reach,
are drawn once: the first of them is drawn, the others copy it. The rows that are drawn go by
their degree onto lists: a group of threads draws a short row, a block each piece of a longer one.
The order of a list is left to chance, but nothing depends on it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._numbering_cuda import enter_word, find_place, running
from rtxarr.kernels._philox_cuda import _device
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._sampling_cuda import EDGES, _entry, _sampling

# Short rows: how many edges at most, threads that share one, and rows of a block. Pieces: edges,
# threads of the block, and bits of a digit of the keys, of which each thread counts one.
SHORT, LANES, GROUPS = (4, 2, 2) if _SIMULATING else (128, 32, 8)
PIECE, THREADS, _BITS = (8, 4, 2) if _SIMULATING else (2048, 256, 8)
_ROUNDS = SHORT // LANES
_DIGITS = 1 << _BITS
assert _DIGITS == THREADS

# How many rows are on the lists, and pieces, long rows and their pieces.
SHORT_ROWS, PIECES, LONG_ROWS, LONG_PIECES = range(4)
N_COUNTERS = 4

_NEVER = np.int64(0x7FFFFFFFFFFFFFFF)  # the key of an edge that cannot be drawn
_words, _arrival_of, _is_kept = _sampling.words, _sampling.arrival_of, _sampling.is_kept
_positive, _first_arrivals = _sampling.positive, _sampling.first_arrivals
_add_up = running(THREADS)

if _SIMULATING:  # which has neither libdevice nor warps

    def _bits_of(x):
        return np.float64(x).view(np.int64)

    def _wait():
        cuda.syncthreads()

    def _mask(shared, lane, flag):
        shared[lane] = flag
        cuda.syncthreads()
        mask = sum(int(shared[i]) << i for i in range(LANES))
        cuda.syncthreads()
        return mask

else:
    _bits_of = cuda.libdevice.double_as_longlong

    @_device
    def _wait():
        """Wait for the threads of the row."""
        cuda.syncwarp()

    @_device
    def _mask(shared, lane, flag):
        """Return a word with a bit for each thread of the row."""
        return cuda.ballot_sync(0xFFFFFFFF, flag)


class Lists(NamedTuple):
    """What is to be done; arrays of int64 for kernels.

    Attributes
    ----------
    same : shape (n_rows,)
        The first row of the same node.
    counters : shape (N_COUNTERS,)
    short_rows : shape (n_rows,)
    pieces : shape (n_pieces,)
        The row of each piece.
    begin : shape (n_rows,)
        Which is the first piece of a row.
    long_rows : shape (n_long_rows,)
        Those of several pieces.
    begin_long : shape (n_rows,)
        How many pieces the long rows before it on their list have.
    """

    same: Any
    counters: Any
    short_rows: Any
    pieces: Any
    begin: Any
    long_rows: Any
    begin_long: Any


@cuda.jit
def enter_rows(first, degrees, offsets, n, slots, bits):
    """Enter rows that choose among their edges into the table; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < first.size and _chooses(degrees, offsets, n, row):
        enter_word(slots, 0, slots.size, first[row], row, bits)


@_device
def _chooses(degrees, offsets, n, row):
    """Tell whether a row draws some of its edges; LABOR has no offsets yet."""
    if offsets.size == 0:
        return degrees[row] > n
    count = offsets[row + 1] - offsets[row]
    return count > 0 and count < degrees[row]


@bounded(THREADS)
def list_rows(first, degrees, offsets, n, slots, bits, same, counters, short_rows, pieces, begin,
              long_rows, begin_long):  # fmt: skip
    """Find the first row of the same node, and put such rows on the lists; a thread a row."""
    counts = cuda.shared.array(N_COUNTERS, np.int64)  # of the block, then where they begin
    t = np.int64(cuda.threadIdx.x)
    row = np.int64(cuda.blockIdx.x) * THREADS + t
    if t < N_COUNTERS:
        counts[t] = 0
    cuda.syncthreads()  # all counts are zero
    n_pieces = np.int64(-1)  # none for a row that is not drawn, 0 for a short one
    if row < first.size:
        least = row
        if _chooses(degrees, offsets, n, row):
            if slots.size > 0:  # else all are of different nodes
                least = find_place(slots, 0, slots.size, first[row], bits)
            if least == row:
                is_short = degrees[row] <= SHORT
                n_pieces = np.int64(0) if is_short else (degrees[row] + PIECE - 1) // PIECE
        same[row] = least
    at, at_long, at_long_pieces = np.int64(0), np.int64(0), np.int64(0)
    if n_pieces == 0:
        at = cuda.atomic.add(counts, SHORT_ROWS, 1)
    if n_pieces > 0:
        at = cuda.atomic.add(counts, PIECES, n_pieces)
    if n_pieces > 1:
        at_long = cuda.atomic.add(counts, LONG_ROWS, 1)
        at_long_pieces = cuda.atomic.add(counts, LONG_PIECES, n_pieces)
    cuda.syncthreads()  # all of the block are counted
    if t < N_COUNTERS and counts[t] > 0:
        counts[t] = cuda.atomic.add(counters, t, counts[t])
    cuda.syncthreads()  # the block has its places
    if n_pieces == 0:
        short_rows[counts[SHORT_ROWS] + at] = row
    if n_pieces > 0:
        at += counts[PIECES]
        begin[row] = at
        for i in range(n_pieces):
            pieces[at + i] = row
    if n_pieces > 1:
        long_rows[counts[LONG_ROWS] + at_long] = row
        begin_long[row] = counts[LONG_PIECES] + at_long_pieces


@bounded(EDGES)
def copy_rows(first, degrees, offsets, same, out):
    """Write the edges of rows that keep all, or draw what another draws; a thread an edge."""
    i, row = _entry(cuda.shared.array(2, np.int64), offsets)
    if row < 0:
        return
    j = i - offsets[row]
    if offsets[row + 1] - offsets[row] == degrees[row]:
        out[i] = first[row] + j
    elif same[row] != row:
        out[i] = out[offsets[same[row]] + j]


# ------------------------------------------------------------------------------ by weight


@_device
def _key(word, rate):
    """Return a number that rises with when the clock of an edge rings first."""
    return np.int64(_bits_of(_arrival_of(word, rate))) if rate > 0.0 else _NEVER


@_device
def _write_keys(keys, begin, j, m, first, weights, node, stream, key):
    """Write the keys of the edges ``j`` and ``j + 1`` of a row, of those below ``m``."""
    low, high = _words(node, j >> 1, stream, key)
    if j < m:
        keys[begin] = _key(low, weights[first + j])
    if j + 1 < m:
        keys[begin + 1] = _key(high, weights[first + j + 1])


@bounded(LANES * GROUPS)
def select_short(nodes, first, degrees, offsets, weights, counters, rows, out, stream, key):
    """Draw in short rows; a group of threads a row at a time."""
    keys = cuda.shared.array((GROUPS, SHORT), np.int64)
    shared = cuda.shared.array((GROUPS, LANES), np.int32)
    mine = cuda.local.array(_ROUNDS, np.int64)
    before = cuda.local.array(_ROUNDS, np.int32)  # how many keys are below each of those
    lane, group = np.int64(cuda.threadIdx.x), np.int64(cuda.threadIdx.y)
    n_rows = counters[SHORT_ROWS]
    for base in range(np.int64(cuda.blockIdx.x) * GROUPS, n_rows, cuda.gridDim.x * GROUPS):
        row, degree, n = np.int64(0), np.int64(0), np.int64(0)
        if base + group < n_rows:
            row = rows[base + group]
            degree, n = degrees[row], offsets[row + 1] - offsets[row]
            for j in range(2 * lane, degree, 2 * LANES):
                _write_keys(keys[group], j, j, degree, first[row], weights, nodes[row], stream, key)
        _wait()  # until all keys are in place
        for k in range(_ROUNDS):
            j = k * LANES + lane
            mine[k], before[k] = keys[group, j] if j < degree else _NEVER, 0
        for i in range(degree):
            other = keys[group, i]
            for k in range(_ROUNDS):
                if k * LANES < degree:  # the same for all of the row
                    is_before = i < k * LANES + lane
                    before[k] += 1 if other < mine[k] or (other == mine[k] and is_before) else 0
        place = offsets[row]
        for k in range(_ROUNDS):
            j = k * LANES + lane
            is_drawn = j < degree and before[k] < n
            mask = _mask(shared[group], lane, is_drawn)
            if is_drawn:
                out[place + cuda.popc(mask & ((1 << lane) - 1))] = first[row] + j
            place += cuda.popc(mask)
        _wait()  # until all have read, before the next row overwrites


@_device
def _choose(keys, counts, sums, m, n):
    """Return ``mask, limit, n_equal``: the ``n`` least of ``keys[:m]``, the earlier of equal ones.

    They are those that are below ``limit`` under the mask, and the first ``n_equal`` that equal it.
    All threads of the block call it, with ``counts`` and ``sums`` in shared memory.
    """
    found = cuda.shared.array(3, np.int64)
    t = np.int64(cuda.threadIdx.x)
    mask, limit, wanted = np.int64(0), np.int64(0), np.int64(n)
    shift = np.int64(64 - _BITS)
    while shift >= 0:
        counts[t] = 0
        cuda.syncthreads()  # all counts are zero
        for i in range(t, m, THREADS):
            if keys[i] & mask == limit:
                # The order of these additions of integers does not matter.
                cuda.atomic.add(counts, (keys[i] >> shift) & (_DIGITS - 1), 1)
        cuda.syncthreads()  # all keys are counted
        count = np.int64(counts[t])
        before, _ = _add_up(sums, count)
        if before < wanted and wanted <= before + count:
            found[0], found[1], found[2] = t, before, count
        cuda.syncthreads()  # the digit is found
        limit |= found[0] << shift
        mask |= np.int64(_DIGITS - 1) << shift
        wanted -= found[1]
        count = found[2]
        cuda.syncthreads()  # all have read it
        if count == wanted:
            break
        shift -= _BITS
    return mask, limit, wanted


@_device
def _taken(key, mask, limit, n_equal, n_before):
    """Tell whether a key is one of those, given how many equal ones come before it."""
    key = key & mask
    return key < limit or (key == limit and n_before < n_equal)


@_device
def _select(keys, counts, sums, m, n, ids, start, key_out, id_out, place):
    """Write the ``n`` least of ``keys[:m]`` and whose they are from ``place`` on, in order.

    Key ``i`` is edge ``start + i``, or ``ids[start + i]`` if there are ids. Keys are written only
    if there is room. All threads of the block call it.
    """
    mask, limit, n_equal = _choose(keys, counts, sums, m, n)
    # An odd number of neighbouring keys for each thread, so that a warp reads from all banks.
    each = ((m + THREADS - 1) // THREADS) | 1
    low = min(np.int64(cuda.threadIdx.x) * each, m)
    high = min(low + each, m)
    n_less, n_same = np.int64(0), np.int64(0)
    for i in range(low, high):
        key = keys[i] & mask
        n_less += 1 if key < limit else 0
        n_same += 1 if key == limit else 0
    both, _ = _add_up(sums, (n_less << 32) | n_same)
    n_less, n_same = both >> 32, both & 0xFFFFFFFF
    for i in range(low, high):
        key = keys[i]
        if _taken(key, mask, limit, n_equal, n_same):
            at = place + n_less + min(n_same, n_equal)
            id_out[at] = ids[start + i] if ids.size > 0 else start + i
            if key_out.size > 0:
                key_out[at] = key
        n_less += 1 if key & mask < limit else 0
        n_same += 1 if key & mask == limit else 0
    cuda.syncthreads()  # what was written can be read, and the keys overwritten


@bounded(THREADS)
def select_pieces(nodes, first, degrees, offsets, weights, counters, pieces, begin, begin_long, n,
                  none, best_keys, best_edges, out, stream, key):  # fmt: skip
    """Draw in pieces of rows, a block a piece at a time.

    What a piece of a long row draws goes to its ``n`` places of ``best_keys`` and ``best_edges``.
    """
    keys = cuda.shared.array(PIECE, np.int64)
    counts = cuda.shared.array(_DIGITS, np.int32)
    sums = cuda.shared.array(THREADS, np.int64)
    t = np.int64(cuda.threadIdx.x)
    n_pieces = counters[PIECES]
    for piece in range(np.int64(cuda.blockIdx.x), n_pieces, cuda.gridDim.x):
        row = pieces[piece]
        which = piece - begin[row]
        start, degree = which * PIECE, degrees[row]
        count = offsets[row + 1] - offsets[row]
        is_long = degree > PIECE
        if is_long and n > PIECE // 2:
            continue  # drawn by a thread; the same for all of the block
        m = min(degree - start, PIECE)
        for j in range(2 * t, m, 2 * THREADS):
            _write_keys(keys, j, start + j, degree, first[row], weights, nodes[row], stream, key)
        cuda.syncthreads()  # all keys are in place
        if not is_long:
            _select(keys, counts, sums, m, count, none, first[row], none, out, offsets[row])
            continue
        place = (begin_long[row] + which) * n
        count = min(count, m)
        _select(
            keys, counts, sums, m, count, none, first[row] + start, best_keys, best_edges, place
        )
        for i in range(count + t, n, THREADS):
            best_keys[place + i] = _NEVER


@bounded(THREADS)
def select_long(degrees, offsets, counters, rows, begin_long, n, none, best_keys, best_edges, half,
                out):  # fmt: skip
    """Draw in long rows among what was drawn in their pieces; a block a row at a time.

    The second halves of ``best_keys`` and ``best_edges``, from ``half`` on, are for what is left
    when there is more than fits into a block's memory.
    """
    keys = cuda.shared.array(PIECE, np.int64)
    counts = cuda.shared.array(_DIGITS, np.int32)
    sums = cuda.shared.array(THREADS, np.int64)
    t = np.int64(cuda.threadIdx.x)
    most = PIECE // n * n
    for which in range(np.int64(cuda.blockIdx.x), counters[LONG_ROWS], cuda.gridDim.x):
        row = rows[which]
        count = offsets[row + 1] - offsets[row]
        here, there = begin_long[row] * n, begin_long[row] * n + half
        length = (degrees[row] + PIECE - 1) // PIECE * n
        while length > PIECE:
            n_chunks = (length + most - 1) // most
            for chunk in range(n_chunks):
                m = min(length - chunk * most, most)
                for i in range(t, m, THREADS):
                    keys[i] = best_keys[here + chunk * most + i]
                cuda.syncthreads()  # all keys are in place
                start, place = here + chunk * most, there + chunk * n
                _select(keys, counts, sums, m, n, best_edges, start, best_keys, best_edges, place)
            length = n_chunks * n
            here, there = there, here
        for i in range(t, length, THREADS):
            keys[i] = best_keys[here + i]
        cuda.syncthreads()  # all keys are in place
        _select(keys, counts, sums, length, count, best_edges, here, none, out, offsets[row])


@cuda.jit
def draw_long(nodes, first, degrees, offsets, available, weights, counters, rows, arrivals, out,
              stream, key):  # fmt: skip
    """Draw more edges in long rows than a block selects; a thread a row."""
    which = np.int64(cuda.grid(1))
    if which < counters[LONG_ROWS]:
        row = rows[which]
        begin, start, degree = offsets[row], first[row], degrees[row]
        n = offsets[row + 1] - begin
        if n == available[row]:
            _positive(out, begin, start, degree, weights)
        else:
            _first_arrivals(
                out, arrivals, begin, n, start, degree, weights, nodes[row], stream, key
            )


# ------------------------------------------------------------------------------ LABOR


@functools.cache
def kept_short(writes: bool):
    """Return the kernel that counts the edges that short rows keep, or writes them.

    A group of threads a row at a time.
    """

    @bounded(LANES * GROUPS)
    def kernel(first, degrees, indices, n, counters, rows, counts, offsets, out, stream, key):
        shared = cuda.shared.array((GROUPS, LANES), np.int32)
        lane, group = np.int64(cuda.threadIdx.x), np.int64(cuda.threadIdx.y)
        n_rows = counters[SHORT_ROWS]
        for base in range(np.int64(cuda.blockIdx.x) * GROUPS, n_rows, cuda.gridDim.x * GROUPS):
            row, degree, place = np.int64(0), np.int64(0), np.int64(0)
            if base + group < n_rows:
                row = rows[base + group]
                degree = degrees[row]
                if writes:
                    place = offsets[row]
            for k in range(_ROUNDS):
                j = k * LANES + lane
                is_kept = j < degree and _is_kept(indices[first[row] + j], n, degree, stream, key)
                mask = _mask(shared[group], lane, is_kept)
                if writes and is_kept:
                    out[place + cuda.popc(mask & ((1 << lane) - 1))] = first[row] + j
                place += cuda.popc(mask)
            if not writes and lane == 0 and degree > 0:
                counts[row] = place

    return kernel


@functools.cache
def kept_pieces(writes: bool):
    """Return the kernel that counts the edges that pieces of rows keep, or writes them.

    A block a piece at a time; ``counts`` are of pieces, and when they are written of those before
    in the same row.
    """
    each = PIECE // THREADS

    @bounded(THREADS)
    def kernel(
        first, degrees, indices, n, counters, pieces, begin, counts, offsets, out, stream, key
    ):
        sums = cuda.shared.array(THREADS, np.int64)
        t = np.int64(cuda.threadIdx.x)
        for piece in range(np.int64(cuda.blockIdx.x), counters[PIECES], cuda.gridDim.x):
            row = pieces[piece]
            degree, start = degrees[row], first[row]
            low = (piece - begin[row]) * PIECE
            total = np.int64(0)
            if writes:
                # Which of a thread's edges are kept, bit by bit: neighbours, to be in order.
                mine, low = np.int64(0), low + t * each
                for i in range(each):
                    if low + i < degree and _is_kept(
                        indices[start + low + i], n, degree, stream, key
                    ):
                        mine |= np.int64(1) << i
                        total += 1
                place, _ = _add_up(sums, total)
                place += offsets[row] + counts[piece]
                for i in range(each):
                    if (mine >> i) & 1 == 1:
                        out[place] = start + low + i
                        place += 1
            else:
                for j in range(low + t, min(low + PIECE, degree), THREADS):
                    total += 1 if _is_kept(indices[start + j], n, degree, stream, key) else 0
                _, total = _add_up(sums, total)
                if t == 0:
                    counts[piece] = total

    return kernel


@cuda.jit
def count_rows(degrees, n, same, begin, counts_of_pieces, counts, out):
    """Count what each row keeps; a thread a row.

    Replace the counts of a row's pieces by those of the pieces before, which only the first row of
    a node does.
    """
    row = np.int64(cuda.grid(1))
    if row >= degrees.size:
        return
    degree = degrees[row]
    if degree <= n:
        out[row] = degree
    elif degree <= SHORT:
        out[row] = counts[same[row]]
    elif same[row] == row:
        total = np.int64(0)
        for piece in range(begin[row], begin[row] + (degree + PIECE - 1) // PIECE):
            here = counts_of_pieces[piece]
            counts_of_pieces[piece] = total
            total += here
        out[row] = total


@cuda.jit
def copy_counts(degrees, n, same, out):
    """Write what rows keep of which another row is the first; a thread a row."""
    row = np.int64(cuda.grid(1))
    if row < degrees.size and degrees[row] > n and same[row] != row:
        out[row] = out[same[row]]
