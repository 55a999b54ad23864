"""GPU code of walks that look at the node before: threads share a walk, and a block its hubs."""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import cuda
from rtxarr.kernels._numbering_cuda import running
from rtxarr.kernels._philox_cuda import _core, _device
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._sampling_core import TRIES
from rtxarr.kernels._sampling_cuda import _sampling

_U = np.uint64
_S32 = _U(32)
_words, _chance, _lower_bound = _sampling.words, _sampling.chance, _sampling.lower_bound
_accepts = _sampling.accepts
_bounded = _core.bounded


@functools.cache
def walks_of_blocks(lanes: int, n_walks: int):
    """Return the kernel that writes walks as ``walk`` of ``_sampling_core`` does.

    Blocks of ``lanes * n_walks`` threads, the walks side by side. Each thread of a walk looks at
    another candidate; where all are refused the block weighs the edges. ``lanes`` divides
    ``TRIES``.
    """
    threads = lanes * n_walks
    add_up = running(threads)

    @_device
    def weigh(sums, here, before, word, indptr, indices, back, near, far, stream, key):
        """Return the edge that ``word`` draws among all; the threads of the block call it."""
        found = cuda.shared.array(3, np.int64)
        base, target = np.int64(-1), np.int64(0)
        low, high = indptr[here], indptr[here + 1]
        while True:
            each = (high - low + threads - 1) // threads
            start = min(low + cuda.threadIdx.x * each, high)
            stop = min(start + each, high)
            total, first, last = _U(0), np.int64(0), np.int64(0)
            if start < stop:  # what the node before has an edge to, among what these lead to
                end = indptr[before + 1]
                first = _lower_bound(indices, indptr[before], end, indices[start])
                last = _lower_bound(indices, first, end, indices[stop - 1] + 1)
            for edge in range(start, stop):
                candidate = np.int64(indices[edge])
                total += _chance(candidate, before, indices, first, last, back, near, far)
            mine = np.int64(total)
            sum_before, total_of_all = add_up(sums, mine)
            if base < 0:
                base = np.int64(0)
                target = np.int64(_bounded(word, stream, key, _U(total_of_all)))
            sum_before += base
            if sum_before <= target and target < sum_before + mine:
                found[0], found[1], found[2] = start, stop, sum_before
            cuda.syncthreads()  # the part with the edge is found
            low, high, base = found[0], found[1], found[2]
            cuda.syncthreads()  # all have read it
            if high - low == 1:
                return low

    @bounded(threads)
    def kernel(out, starts, per_start, indptr, indices, back, near, far, stream, key):
        least = cuda.shared.array(n_walks, np.int32)  # the first candidate that is accepted
        chosen = cuda.shared.array((n_walks, lanes), np.int64)  # the edges to those that are
        places = cuda.shared.array((n_walks, 4), np.int64)  # of walks, should they accept none
        sums = cuda.shared.array(threads, np.int64)
        lane = np.int64(cuda.threadIdx.x % lanes)
        group = np.int64(cuda.threadIdx.x // lanes)
        row = np.int64(cuda.blockIdx.x) * n_walks + group
        live = row < out.shape[0]
        start, draw = np.int64(0), np.int64(0)
        if live:
            start, draw = starts[row // per_start], (row % per_start) << 32
            if lane == 0:
                out[row, 0] = start
        here, before, edge = start, np.int64(-1), np.int64(0)
        for step in range(1, out.shape[1]):
            first, degree, ends = np.int64(0), np.int64(0), (np.int64(0), np.int64(0))
            if live:
                if before >= 0:
                    ends = np.int64(indptr[before]), np.int64(indptr[before + 1])
                first = np.int64(indptr[here])
                degree = indptr[here + 1] - first
                if degree == 0:
                    live = False
                    for rest in range(step + lane, out.shape[1], lanes):
                        out[row, rest] = -1
            if lane == 0:
                least[group] = TRIES if live else 0
                places[group, 0], places[group, 1] = here, before
                places[group, 2], places[group, 3] = start, draw + TRIES
            attempt, pending = lane, live
            # Also until the places are known, and no candidate is accepted yet.
            while cuda.syncthreads_or(np.int32(pending and attempt < TRIES)):
                if pending:
                    low, high = _words(start, draw + attempt, stream, key)
                    edge = first + np.int64(_bounded(low, stream, key, _U(degree)))
                    accepted = before < 0
                    if not accepted:
                        candidate, u = np.int64(indices[edge]), high >> _S32
                        accepted = _accepts(u, candidate, before, indices, *ends, back, near, far)
                    if accepted:
                        chosen[group, lane] = edge
                        cuda.atomic.min(least, group, attempt)
                attempt += lanes
                cuda.syncthreads()  # these candidates are looked at
                pending = live and least[group] == TRIES
            accepted_first = np.int64(least[group])
            if live and accepted_first < TRIES:
                edge = chosen[group, accepted_first % lanes]
            if attempt >= TRIES:  # the same for all of the block
                for other in range(n_walks):
                    if least[other] == TRIES:
                        word, _ = _words(places[other, 2], places[other, 3], stream, key)
                        weighed = weigh(sums, places[other, 0], places[other, 1], word, indptr,
                                        indices, back, near, far, stream, key)  # fmt: skip
                        if group == other:
                            edge = weighed
            draw += accepted_first + 1
            if live:
                before, here = here, np.int64(indices[edge])
                if lane == 0:
                    out[row, step] = here
            cuda.syncthreads()  # all have read before the next step overwrites

    return kernel
