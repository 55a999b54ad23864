"""GPU code for neighbours in space: a thread for each query.

The arithmetic is that of ``_points_core``. Up to three axes are searched with points that
``_points_grid_cuda`` has sorted and packed, with queries in such an order too: those of a warp look
at the same cells. With more axes all points of a batch are looked at.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._philox_cuda import _add, _add32, _device, _mul, _mul32
from rtxarr.kernels._points_core import MOST, SLACK, TINY, sorting
from rtxarr.kernels._points_list import of_length, words
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset

# Threads of a block that searches.
THREADS = 8 if _SIMULATING else 128
# Rows of cells around the query's own, that one first, then those that share a side with it: what
# to add to the cell's second and third coordinate, plus one, two bits each.
_SECOND = sum(step << 2 * i for i, step in enumerate((1, 0, 2, 1, 1, 0, 2, 0, 2)))
_THIRD = sum(step << 2 * i for i, step in enumerate((1, 1, 1, 0, 2, 0, 0, 2, 2)))


def arithmetic(dtype: np.dtype):
    """Return the product and the sum, each rounded by itself."""
    return (_mul32, _add32) if np.dtype(dtype) == np.float32 else (_mul, _add)


@functools.cache
def _walker(dtype: np.dtype, take, worst):
    """Return what looks at the packed points around a query, near ones first.

    ``take(d, number, state, keep)`` gives the state after a point, and ``worst(state, keep)`` the
    squared distance above which none is taken.
    """
    scalar = np.dtype(dtype).type
    zero, infinity, slack = scalar(0), scalar(np.inf), scalar(SLACK)
    most, tiny = scalar(MOST), scalar(TINY[np.dtype(dtype).itemsize // 8])
    mul, add = arithmetic(dtype)
    load = by_offset(dtype, 4).load
    number_of, _ = words(dtype)

    @_device
    def scan(query, points, begin, end, state, keep):
        place = begin
        while place < end:
            x, y, z, word = load(points, 4 * place)
            a, b, c = query[0] - x, query[1] - y, query[2] - z
            d = add(add(mul(a, a), mul(b, b)), mul(c, c))
            if d <= worst(state, keep):
                state = take(d, number_of(word), state, keep)
            place += 1
        return state

    @_device
    def position(value, low, inverse, n_cells):
        """Return where a query is along an axis, in cells, and its cell."""
        if n_cells == 1:
            return zero, np.int64(0)
        t = (value - low) * inverse
        if not t > zero:
            return t, np.int64(0)
        if t >= scalar(n_cells):
            return t, n_cells - 1
        return t, np.int64(t)

    @_device
    def side(t, cell, ring, n_cells):
        """Return how far, in cells, the nearest side of the cube is that has cells behind it."""
        nearest = infinity
        if cell - ring > 0:
            nearest = t - scalar(cell - ring)
        if cell + ring < n_cells - 1:
            nearest = min(nearest, scalar(cell + ring + 1) - t)
        return nearest

    @_device
    def apart(t, cell, n_cells, width):
        """Return how far, at least, points of a cell are along an axis."""
        if n_cells == 1:
            return zero
        return max(max(scalar(cell) - t, t - scalar(cell + 1)) * most - slack, zero) * width

    @_device
    def walk(query, batch, points, cells, box, state, keep):
        l0, l1, l2, inverse, width, nx, ny, nz = box
        tx, cx = position(query[0], l0, inverse, nx)
        ty, cy = position(query[1], l1, inverse, ny)
        tz, cz = position(query[2], l2, inverse, nz)
        left, right = max(cx - 1, 0), min(cx + 1, nx - 1)
        for i in range(9):
            row = cy + ((_SECOND >> 2 * i) & 3) - 1
            z = cz + ((_THIRD >> 2 * i) & 3) - 1
            if row >= 0 and row < ny and z >= 0 and z < nz:
                gy, gz = apart(ty, row, ny, width), apart(tz, z, nz, width)
                if gy * gy + gz * gz <= worst(state, keep) + tiny:
                    # Cells of a row follow each other, and so do their points.
                    first = ((batch * nz + z) * ny + row) * nx
                    begin, end = np.int64(cells[first + left]), np.int64(cells[first + right + 1])
                    state = scan(query, points, begin, end, state, keep)
        ring = np.int64(1)
        while True:
            reach = min(side(tx, cx, ring, nx), side(ty, cy, ring, ny), side(tz, cz, ring, nz))
            if not reach < infinity:
                return state
            reach = (reach * most - slack) * width
            if reach > zero and reach * reach > worst(state, keep) + tiny:
                return state
            ring += 1
            left, right = max(cx - ring, 0), min(cx + ring, nx - 1)
            for z in range(max(cz - ring, 0), min(cz + ring, nz - 1) + 1):
                gz = apart(tz, z, nz, width)
                if gz * gz <= worst(state, keep) + tiny:
                    for row in range(max(cy - ring, 0), min(cy + ring, ny - 1) + 1):
                        gy = apart(ty, row, ny, width)
                        if gy * gy + gz * gz <= worst(state, keep) + tiny:
                            first = ((batch * nz + z) * ny + row) * nx
                            whole = abs(z - cz) == ring or abs(row - cy) == ring
                            # All of the row, or its two ends.
                            for part in range(1 if whole else 2):
                                begin = left if whole else cx + (2 * part - 1) * ring
                                end = right if whole else begin
                                if begin >= 0 and end < nx:
                                    begin = np.int64(cells[first + begin])
                                    end = np.int64(cells[first + end + 1])
                                    state = scan(query, points, begin, end, state, keep)

    return walk


@functools.cache
def _looker(dtype: np.dtype, take, worst):
    """Return what looks at points with any number of axes, ``xt`` of shape (n_axes, n_points)."""
    mul, add = arithmetic(dtype)

    @_device
    def look(y, query, xt, begin, end, state, keep):
        for place in range(begin, end):
            difference = y[query, 0] - xt[0, place]
            d = mul(difference, difference)
            for axis in range(1, y.shape[1]):
                difference = y[query, axis] - xt[axis, place]
                d = add(d, mul(difference, difference))
            if d <= worst(state, keep):
                state = take(d, np.int32(place), state, keep)
        return state

    return look


# What is kept of a query. ``keep`` is what does not change during a search, the number to leave out
# first; a state is ...


@functools.cache
def _nearest(dtype: np.dtype, n: int):
    """... a list of up to ``n`` points that come after another, itself the last of a list."""
    insert = of_length(n, dtype).insert

    @_device
    def take(d, number, state, keep):
        skip, last_d, last = keep
        if number != skip and (d > last_d or (d == last_d and number > last)):
            return insert(state[0], state[1], d, number)
        return state

    @_device
    def worst(state, keep):
        return state[0][n - 1]

    return take, worst


@_device
def _tally(d, number, state, keep):
    """... how many there are."""
    return state + np.int64(number != keep[0])


@_device
def _append(d, number, state, keep):
    """... where the next goes, in the order in which they are met."""
    skip, _, best_d, best_i = keep
    if number != skip:
        best_d[state], best_i[state] = d, number
        state += 1
    return state


@_device
def _within(state, keep):
    return keep[1]


@functools.cache
def search(dtype: np.dtype, n: int, packed: bool):
    """Return the search of the nearest points, up to ``n`` at once.

    ``first`` points of each query have been found before; ``k`` more are looked for, if there are
    so many that count. Those of a query go to ``starts[query] + first`` and on.
    """
    start, _, write = of_length(n, dtype)
    scalar = np.dtype(dtype).type
    before = scalar(-1)
    take, worst = _nearest(dtype, n)

    @_device
    def last_of(query, first, starts, counts, best_d, best_i):
        """Return the last point that was found before; a distance of -1 if there is none."""
        if first == 0:
            return before, np.int32(0)
        last = starts[query] + first - 1
        return best_d[last], np.int32(best_i[last])

    if not packed:
        look = _looker(dtype, take, worst)

        @bounded(THREADS)
        def high(y, batches, xt, cells, others, limit, k, first, starts, counts, best_d, best_i):
            query = np.int64(cuda.grid(1))
            if query < counts.size and (first == 0 or counts[query] == first):
                last_d, last = last_of(query, first, starts, counts, best_d, best_i)
                keep = np.int32(query if others else -1), last_d, last
                begin, end = cells[batches[query]], cells[batches[query] + 1]
                state = look(y, query, xt, begin, end, start(n - k, limit), keep)
                base = starts[query] + first
                counts[query] = first + write(state[0], state[1], n - k, base, best_d, best_i)

        return high

    walk = _walker(dtype, take, worst)
    load = by_offset(dtype, 4).load
    number_of, _ = words(dtype)

    @bounded(THREADS)
    def in_space(
        queries, batches, points, cells, l0, l1, l2, inverse, width, n0, n1, n2,
        others, limit, k, first, starts, counts, best_d, best_i,
    ):  # fmt: skip
        v = np.int64(cuda.grid(1))
        if v < counts.size:
            place = load(queries, 4 * v)
            number = number_of(place[3])
            query = np.int64(number)
            if first == 0 or counts[query] == first:
                last_d, last = last_of(query, first, starts, counts, best_d, best_i)
                keep = number if others else np.int32(-1), last_d, last
                box = l0, l1, l2, inverse, width, n0, n1, n2
                state = start(n - k, limit)
                state = walk(place, batches[query], points, cells, box, state, keep)
                base = starts[query] + first
                counts[query] = first + write(state[0], state[1], n - k, base, best_d, best_i)

    return in_space


@functools.cache
def tally(dtype: np.dtype, packed: bool):
    """Return the count of the points within a distance."""
    return _radius(dtype, packed, _tally)


@functools.cache
def append(dtype: np.dtype, packed: bool):
    """Return what writes all points within a distance, those of a query in any order."""
    return _radius(dtype, packed, _append)


def _radius(dtype, packed, take):
    counting = take is _tally
    if not packed:
        look = _looker(dtype, take, _within)

        @bounded(THREADS)
        def high(y, batches, xt, cells, others, limit, starts, counts, best_d, best_i):
            query = np.int64(cuda.grid(1))
            if query < counts.size:
                keep = np.int32(query if others else -1), limit, best_d, best_i
                begin, end = cells[batches[query]], cells[batches[query] + 1]
                base = np.int64(0) if counting else starts[query]
                found = look(y, query, xt, begin, end, base, keep)
                if counting:
                    counts[query] = found

        return high

    walk = _walker(dtype, take, _within)
    load = by_offset(dtype, 4).load
    number_of, _ = words(dtype)

    @bounded(THREADS)
    def in_space(
        queries, batches, points, cells, l0, l1, l2, inverse, width, n0, n1, n2,
        others, limit, starts, counts, best_d, best_i,
    ):  # fmt: skip
        v = np.int64(cuda.grid(1))
        if v < counts.size:
            place = load(queries, 4 * v)
            number = number_of(place[3])
            query = np.int64(number)
            keep = number if others else np.int32(-1), limit, best_d, best_i
            box = l0, l1, l2, inverse, width, n0, n1, n2
            base = np.int64(0) if counting else starts[query]
            found = walk(place, batches[query], points, cells, box, base, keep)
            if counting:
                counts[query] = found

    return in_space


@functools.cache
def sort_rows(dtype: np.dtype):
    """Return the sorting of rows; a thread a row."""
    sort = sorting(_device)

    @cuda.jit
    def kernel(offsets, best_d, best_i):
        row = np.int64(cuda.grid(1))
        if row < offsets.size - 1:
            sort(offsets[row], offsets[row + 1], best_d, best_i)

    return kernel
