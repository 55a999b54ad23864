"""How neighbours are drawn, written once for numba's CPU and GPU code, so that both draw the same.

Word ``j`` of a node is half ``j % 2`` of the Philox block of counter ``(node, stream ^ j // 2)``
under ``key``; ``key`` and ``stream`` follow from the seed, the epoch and the hop. So what is drawn
at a node depends on nothing but these and the node's own edges.

References
----------
Bentley and Floyd, "A sample of brilliance", CACM 30 (1987), doi:10.1145/30401.315746 (``subset``).
Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006,
doi:10.1016/j.ipl.2005.11.003 (``first_arrivals``). Grover and Leskovec, "node2vec: scalable feature
learning for networks", 2016, arXiv:1607.00653 (``walk``). Balin and Catalyurek, "Layer-neighbor
sampling", 2023, arXiv:2210.13339 (``is_kept``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

_U = np.uint64  # numba turns a uint64 with a bare integer into a float64
_S32, _ONE = _U(32), _U(1)
_MASK = LOW_HALF = _U(0xFFFFFFFF)
_LAST = _U(0xFFFFFFFFFFFFFFFF)
SPREAD, MIX = _U(0x9E3779B1), _U(0x85EBCA77)

# Candidates that a walk looks at before all are weighed, which at a hub costs as much as thousands.
TRIES = 128


def build(jit: Callable, core: SimpleNamespace, div: Callable) -> SimpleNamespace:
    """Return the functions below, each passed through ``jit``; ``core`` is _philox_core's."""
    philox, bounded, multiply, log = core.philox, core.bounded, core.multiply, core.log

    @jit
    def words(node, block, stream, key):
        """Return the two 64-bit words of one block of a node."""
        w0, w1, w2, w3 = philox(_U(node), stream ^ _U(block), key)
        return w0 | (w1 << _S32), w2 | (w3 << _S32)

    @jit
    def word(node, j, stream, key):
        low, high = words(node, j >> 1, stream, key)
        return high if j & 1 else low

    @jit
    def subset(out, begin, n, first, degree, node, stream, key):
        """Write ``n`` of the edges from ``first`` on, in order; each set is as likely."""
        low, high = _ONE, _ONE
        for j in range(n):
            if j & 1:
                low = high
            else:
                low, high = words(node, j >> 1, stream, key)
            last = degree - n + j
            edge = first + np.int64(bounded(low, stream, key, _U(last + 1)))
            place = begin + j
            while place > begin and out[place - 1] > edge:
                place -= 1
            if place > begin and out[place - 1] == edge:
                out[begin + j] = first + last  # further on than all drawn so far
                continue
            for i in range(begin + j, place, -1):
                out[i] = out[i - 1]
            out[place] = edge

    @jit
    def arrival_of(word, rate):
        """Return when a clock of the rate ``rate`` rings first."""
        u = (np.float64(word >> _U(12)) + 0.5) * 2.0**-52
        return div(-log(u), rate)

    @jit
    def first_arrivals(out, arrivals, begin, n, first, degree, weights, node, stream, key):
        """Write the ``n`` edges whose clocks, running at the rates ``weights``, ring first."""
        if n == 0:
            return
        low, high = _ONE, _ONE
        count = 0
        for j in range(degree):
            if j & 1:
                low = high
            else:
                low, high = words(node, j >> 1, stream, key)
            rate = weights[first + j]
            if rate <= 0.0:
                continue
            arrival = arrival_of(low, rate)
            if count == n:
                if arrival >= arrivals[begin + n - 1]:
                    continue
            else:
                count += 1
            place = begin + count - 1
            while place > begin and arrivals[place - 1] > arrival:
                arrivals[place], out[place] = arrivals[place - 1], out[place - 1]
                place -= 1
            arrivals[place], out[place] = arrival, first + j
        for j in range(begin + 1, begin + count):
            edge = out[j]
            place = j
            while place > begin and out[place - 1] > edge:
                out[place] = out[place - 1]
                place -= 1
            out[place] = edge

    @jit
    def positive(out, begin, first, degree, weights):
        """Write the edges with a weight."""
        for j in range(first, first + degree):
            if weights[j] > 0.0:
                out[begin] = j
                begin += 1

    @jit
    def one_of(j, first, degree, node, stream, key):
        """Return draw ``j`` of the edges, which may come again."""
        return first + np.int64(bounded(word(node, j, stream, key), stream, key, _U(degree)))

    @jit
    def weighted_one_of(j, first, degree, sums, node, stream, key):
        """Return the same by weight; ``sums`` are the weights added up along each row."""
        u = np.float64(word(node, j, stream, key) >> _U(11)) * 2.0**-53
        u = u * sums[first + degree - 1]
        low, high = first, first + degree - 1
        while low < high:  # the first whose sum is above u, so none of weight zero
            middle = (low + high) >> 1
            if sums[middle] > u:
                high = middle
            else:
                low = middle + 1
        return low

    @jit
    def is_kept(src, n, degree, stream, key):
        """Tell whether LABOR keeps an edge from ``src``: its number is below ``n / degree``."""
        return n >= degree or multiply(word(src, 0, stream, key), _U(degree))[0] < _U(n)

    @jit
    def row_between(indptr, low, high, i):
        """Return the same of the rows ``low`` to ``high - 1``, of which one does."""
        while high - low > 1:
            middle = (low + high) >> 1
            if indptr[middle] <= i:
                low = middle
            else:
                high = middle
        return low

    @jit
    def row_of(indptr, i):
        """Return the last row that begins at ``i`` or before: the one that holds entry ``i``."""
        return row_between(indptr, np.int64(0), np.int64(indptr.size - 1), i)

    @jit
    def lower_bound(values, low, high, wanted):
        """Return where the rising ``values[low:high]`` are no longer below ``wanted``."""
        while low < high:
            middle = (low + high) >> 1
            if values[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low

    @jit
    def absent(values, low, high, rank):
        """Return number ``rank`` of those from 0 on that the rising ``values[low:high]`` lack."""
        first = low
        while low < high:  # values[i] - (i - first) of them are below values[i]
            middle = (low + high) >> 1
            if values[middle] - (middle - first) <= rank:
                low = middle + 1
            else:
                high = middle
        return rank + low - first

    @jit
    def negative(edge, j, src, indptr, indices, n_nodes, stream, key):
        """Return a node that ``src`` has no edge to; -1 if it has one to each."""
        low, high = indptr[src], indptr[src + 1]
        free = n_nodes - (high - low)
        if free <= 0:
            return np.int64(-1)
        rank = np.int64(bounded(word(edge, j, stream, key), stream, key, _U(free)))
        return absent(indices, low, high, rank)

    @jit
    def slot_of(item, n_slots):
        """Return where a table of ``n_slots``, a power of two, begins to look for ``item``."""
        low, high = _U(item) & _MASK, _U(item) >> _S32
        mixed = (low * SPREAD) ^ (high * MIX)
        return np.int64((mixed ^ (mixed >> _U(29))) & _U(n_slots - 1))

    @jit
    def chance(candidate, before, indices, low, high, back, near, far):
        """Return the weight of going on from ``before`` by way of the present node.

        ``indices[low:high]`` are those of ``before``, or a part which has ``candidate`` if they do.
        """
        if candidate == before:
            return back
        place = lower_bound(indices, low, high, candidate)
        return near if place < high and indices[place] == candidate else far

    @jit
    def accepts(u, candidate, before, indices, low, high, back, near, far):
        """Tell whether ``u`` is below ``chance``; most values of it need no search."""
        if candidate == before:
            return u < back
        if u < min(near, far):
            return True
        return u < max(near, far) and u < chance(
            candidate, before, indices, low, high, back, near, far
        )

    @jit
    def weigh(here, before, indptr, indices, back, near, far, target):
        """Return the first edge at which the summed weights pass ``target``, and their sum."""
        total = _U(0)
        low, high = indptr[before], indptr[before + 1]
        for edge in range(indptr[here], indptr[here + 1]):
            candidate = np.int64(indices[edge])
            total += chance(candidate, before, indices, low, high, back, near, far)
            if total > target:
                return edge, total
        return indptr[here], total

    @jit
    def walk(out, row, start, number, indptr, indices, back, near, far, stream, key):
        """Write a walk: ``out[row, 0]`` is the start, what follows a dead end is -1.

        The weights are integers of which the largest is 2**32. A candidate is accepted in
        proportion to its weight; after too many refusals all candidates are weighed. Each way
        alone is exact, so both together are. ``indices`` rise within each row.
        """
        here, before = np.int64(start), np.int64(-1)
        out[row, 0] = here
        draw = np.int64(number) << 32  # of this walk among those from the same start
        equal = back == near and near == far
        for step in range(1, out.shape[1]):
            first = indptr[here]
            degree = indptr[here + 1] - first
            if degree == 0:
                for rest in range(step, out.shape[1]):
                    out[row, rest] = -1
                return
            edge, found, tries = first, False, 0
            while not found:
                low, high = words(start, draw, stream, key)
                draw += 1
                if tries < TRIES:
                    edge = first + np.int64(bounded(low, stream, key, _U(degree)))
                    found = equal or before < 0
                    if not found:
                        candidate = np.int64(indices[edge])
                        ends = indptr[before], indptr[before + 1]
                        u = high >> _S32
                        found = accepts(u, candidate, before, indices, *ends, back, near, far)
                else:
                    total = weigh(here, before, indptr, indices, back, near, far, _LAST)[1]
                    target = bounded(low, stream, key, total)
                    edge = weigh(here, before, indptr, indices, back, near, far, target)[0]
                    found = True
                tries += 1
            before, here = here, np.int64(indices[edge])
            out[row, step] = here

    return SimpleNamespace(**locals())
