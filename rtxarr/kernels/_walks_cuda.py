"""GPU code of walks that look at the node before: threads share a walk, and a block its hubs."""

from __future__ import annotations

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._numbering_cuda import running
from rtxarr.kernels._philox_cuda import _core, _device
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._sampling_core import TRIES
from rtxarr.kernels._sampling_cuda import _sampling

# Threads of a walk, which look at a candidate each, and walks of a block.
LANES, WALKS = (2, 2) if _SIMULATING else (16, 16)
THREADS = LANES * WALKS

_U = np.uint64
_S32 = _U(32)
_words, _chance, _bounded = _sampling.words, _sampling.chance, _core.bounded
_add_up = running(THREADS)


@_device
def _part(low, high):
    """Return the thread's part of ``range(low, high)``."""
    t, each = np.int64(cuda.threadIdx.x), (high - low + THREADS - 1) // THREADS
    return min(low + t * each, high), min(low + (t + 1) * each, high)


@_device
def _weigh(sums, here, before, word, indptr, indices, back, near, far, stream, key):
    """Return the edge that ``word`` draws among all; the threads of the block call it together."""
    found = cuda.shared.array(3, np.int64)
    base, target = np.int64(-1), _U(0)
    low, high = indptr[here], indptr[here + 1]
    while True:
        start, stop = _part(low, high)
        total = _U(0)
        for edge in range(start, stop):
            total += _chance(np.int64(indices[edge]), before, indptr, indices, back, near, far)
        mine = np.int64(total)
        sum_before, total_of_all = _add_up(sums, mine)
        if base < 0:
            base = np.int64(0)
            target = _bounded(word, stream, key, _U(total_of_all))
        sum_before += base
        wanted = np.int64(target)
        if sum_before <= wanted and wanted < sum_before + mine:
            found[0], found[1], found[2] = start, stop, sum_before
        cuda.syncthreads()  # the part with the edge is found
        low, high, base = found[0], found[1], found[2]
        cuda.syncthreads()  # all have read it
        if high - low == 1:
            return low


@bounded(THREADS)
def walks_of_blocks(out, starts, per_start, indptr, indices, back, near, far, stream, key):
    """Write walks as ``walk`` of ``_sampling_core`` does."""
    least = cuda.shared.array(WALKS, np.int32)  # the first candidate that is accepted
    chosen = cuda.shared.array((WALKS, TRIES), np.int64)  # the edges to those that are
    places = cuda.shared.array((WALKS, 4), np.int64)  # of walks that accept none
    sums = cuda.shared.array(THREADS, np.int64)
    t = np.int64(cuda.threadIdx.x)
    lane, group = t % LANES, t // LANES
    row = np.int64(cuda.blockIdx.x) * WALKS + group
    live = row < out.shape[0]
    start, draw = np.int64(0), np.int64(0)
    if live:
        start, draw = starts[row // per_start], (row % per_start) << 32
        if lane == 0:
            out[row, 0] = start
    here, before, edge = start, np.int64(-1), np.int64(0)
    for step in range(1, out.shape[1]):
        first, degree = np.int64(0), np.int64(0)
        if live:
            first = indptr[here]
            degree = indptr[here + 1] - first
            if degree == 0:
                live = False
                for rest in range(step + lane, out.shape[1], LANES):
                    out[row, rest] = -1
        if lane == 0:
            least[group] = TRIES if live else 0
            places[group, 0], places[group, 1] = here, before
            places[group, 2], places[group, 3] = start, draw + TRIES
        cuda.syncthreads()  # the places are known, and no candidate is accepted yet
        if live:
            for attempt in range(lane, TRIES, LANES):
                low, high = _words(start, draw + attempt, stream, key)
                edge = first + np.int64(_bounded(low, stream, key, _U(degree)))
                accepted = before < 0
                if not accepted:
                    candidate = np.int64(indices[edge])
                    weight = _chance(candidate, before, indptr, indices, back, near, far)
                    accepted = (high >> _S32) < weight
                if accepted:
                    chosen[group, attempt] = edge
                    cuda.atomic.min(least, group, attempt)
                    break
        cuda.syncthreads()  # all candidates are looked at
        accepted_first = np.int64(least[group])
        if live and accepted_first < TRIES:
            edge = chosen[group, accepted_first]
        for other in range(WALKS):
            if least[other] == TRIES:  # the same for all of the block
                word, _ = _words(places[other, 2], places[other, 3], stream, key)
                weighed = _weigh(sums, places[other, 0], places[other, 1], word, indptr, indices,
                                 back, near, far, stream, key)  # fmt: skip
                if group == other:
                    edge = weighed
        draw += accepted_first + 1
        if live:
            before, here = here, np.int64(indices[edge])
            if lane == 0:
                out[row, step] = here
        cuda.syncthreads()  # all have read before the next step overwrites
