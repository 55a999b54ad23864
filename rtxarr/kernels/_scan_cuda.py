"""GPU kernels of running sums, products, extrema: along rows, shared by threads, and columns."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import Plan, bounded, rows_of
from rtxarr.kernels._vector import access, by_offset, lift
from rtxarr.kernels.segment import identity

# Threads that exchange values without a barrier; a few in the simulator, so that blocks have more.
WARP = 2 if _SIMULATING else 32


@cuda.jit(device=True)
def _add(a, b):
    return a + b


@cuda.jit(device=True)
def _multiply(a, b):
    return a * b


@cuda.jit(device=True)
def _greater(a, b):  # NaN wins, then the first of equals
    return a if a >= b or a != a else b


@cuda.jit(device=True)
def _less(a, b):
    return a if a <= b or a != a else b


def operation_of(op: str, scalar: Any) -> tuple[Any, Any]:
    """Return the operation on two numbers of a type, and what leaves the other as it is."""
    is_complex = np.dtype(scalar).kind == "c"
    if op in ("max", "min"):
        return (_greater if op == "max" else _less), scalar(identity(op, np.dtype(scalar)))
    if op == "sum":  # 0.0 would change the sign of -0.0
        return _add, scalar(complex(-0.0, -0.0) if is_complex else -0.0)
    if not is_complex:
        return _multiply, scalar(1)
    part = np.empty(0, scalar).real.dtype.type
    one, zero = part(1), part(0)

    @cuda.jit(device=True)
    def multiply(a, b):
        real, imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
        # Times one is exact: the formula makes NaN of an infinity.
        left, right = a.real == one and a.imag == zero, b.real == one and b.imag == zero
        real = b.real if left else (a.real if right else real)
        return complex(real, b.imag if left else (a.imag if right else imag))

    return multiply, scalar(1)


# ----------------------------------------------------------------------------- along rows


class RowKernels(NamedTuple):
    """Kernels over rows that are cut into chunks of whole tiles, a group of threads each.

    Attributes
    ----------
    totals : kernel
        ``totals(values, out, n, n_chunks, n_tiles)`` reduces each chunk of ``n_tiles`` tiles.
    scan : kernel
        ``scan(values, ends, out, n, n_chunks, n_tiles)``; a chunk begins with what the one before
        it ends with, according to ``ends``, where there are more chunks than one.
    """

    totals: Any
    scan: Any


@functools.cache
def along_rows(op: str, dtype: np.dtype, plan: Plan, reverse: bool) -> RowKernels:
    """Return the kernels for flat C-contiguous arrays of rows of ``n`` elements.

    In reverse, all orders are turned round, and "before" and "first" are meant so.
    """
    scalar: Any = access(dtype, wide=False).scalar
    operation, nothing = operation_of(op, scalar)
    begin, tiles, _, fetch, put = rows_of(dtype, plan)
    size, chunks, width = plan.kept, plan.chunks, plan.width
    step = -1 if reverse else 1
    prefix = _prefix(operation, nothing, scalar, plan, chunks, reverse)
    total_of = _prefix(operation, nothing, scalar, plan, 1, reverse)

    @cuda.jit(device=True)
    def turned(i, n):
        return n - 1 - i if reverse else i

    @cuda.jit(device=True)
    def bounds(item, first, n, n_chunks, n_tiles):
        """Give the tiles of a chunk; a row that begins late in its first piece may have fewer."""
        start = (item % n_chunks) * n_tiles
        return start, min(start + n_tiles, tiles(first, n))

    @bounded(plan.threads)
    def totals(values, out, n, n_chunks, n_tiles):
        kept, total = cuda.local.array(size, scalar), cuda.local.array(1, scalar)
        item, live = begin(out.size)
        first = (item // n_chunks if live else 0) * n  # idle threads take part in the exchange
        start, stop = bounds(item, first, n, n_chunks, n_tiles)
        total[0] = nothing
        for tile in range(start, stop):  # which comes first does not matter here
            fetch(values, first, tile, n, nothing, kept)
            for i in range(size):
                total[0] = operation(total[0], kept[i])
        every = total_of(total, nothing)
        if live and cuda.threadIdx.x == 0:
            out[item] = every

    @bounded(plan.threads)
    def scan(values, ends, out, n, n_chunks, n_tiles):
        kept, pieces = cuda.local.array(size, scalar), cuda.local.array(chunks, scalar)
        item, live = begin((values.size // n) * n_chunks)
        item = item if live else np.int64(0)
        first, chunk = (item // n_chunks) * n, item % n_chunks
        start, stop = bounds(item, first, n, n_chunks, n_tiles)
        before = nothing
        if turned(chunk, n_chunks) > 0:
            before = ends[item + 1 if reverse else item - 1]
        for j in range(stop - start):
            tile = start + turned(j, stop - start)
            fetch(values, first, tile, n, nothing, kept)
            for k in range(chunks):
                for i in range(1, width):
                    here = k * width + turned(i, width)
                    kept[here] = operation(kept[here - step], kept[here])
                pieces[k] = kept[k * width + turned(width - 1, width)]
            before = prefix(pieces, before)
            for k in range(chunks):
                for i in range(width):
                    kept[k * width + i] = operation(pieces[k], kept[k * width + i])
            if live:
                put(out, first, tile, n, kept)

    return RowKernels(totals, scan)


def _prefix(operation, nothing, scalar, plan, chunks, reverse):
    """Return the device function that combines what lies before each piece of a tile.

    ``prefix(pieces, before)`` replaces the totals of a thread's pieces, an array of ``chunks``, by
    that of all before it, and gives the total of all. ``before`` comes before the whole tile. All
    threads of the block call it.
    """
    lanes, groups = plan.lanes, plan.groups
    together = min(lanes, WARP)
    warps = lanes // together
    n_ends = chunks * warps
    each = -(-n_ends // together)
    shape = (groups, n_ends + 1)
    value_of = _exchange(scalar, lanes, groups)
    back = 1 if reverse else -1

    @cuda.jit(device=True)
    def within(value, lane):
        """Combine a value of each thread of a warp with those before it."""
        distance = 1
        while distance < together:
            other = value_of(value, back * distance)
            value = operation(other, value) if lane >= distance else value
            distance *= 2
        return value

    @cuda.jit(device=True)
    def before_lane(value, lane):
        other = value_of(value, back)
        return other if lane > 0 else nothing

    @cuda.jit(device=True)
    def prefix(pieces, before):
        ends = cuda.shared.array(shape, scalar)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        lane, warp = x % together, x // together
        if reverse:
            lane, warp = together - 1 - lane, warps - 1 - warp
        for i in range(chunks):
            k = chunks - 1 - i if reverse else i
            value = within(pieces[k], lane)
            pieces[k] = before_lane(value, lane)
            if lane == together - 1:
                ends[y, i * warps + warp] = value
        cuda.syncthreads()  # the ends of all pieces of all warps are in place
        first, value = lane * each, nothing
        if warp == 0:
            for i in range(first, min(first + each, n_ends)):
                value = operation(value, ends[y, i])
        value = operation(before, before_lane(within(value, lane), lane))
        if warp == 0:
            for i in range(first, min(first + each, n_ends)):
                end = ends[y, i]
                ends[y, i] = value
                value = operation(value, end)
            if lane == together - 1:
                ends[y, n_ends] = value
        cuda.syncthreads()  # so is what lies before each
        for i in range(chunks):
            k = chunks - 1 - i if reverse else i
            pieces[k] = operation(ends[y, i * warps + warp], pieces[k])
        return ends[y, n_ends]

    return prefix


@functools.cache
def _exchange(scalar, lanes, groups):
    """Return ``value_of(value, away)``: the value of the thread so many lanes away.

    All threads of the block call it. Beyond the warp it is that of any thread.
    """
    threads = lanes * groups
    if _SIMULATING:  # which has no shuffles

        @cuda.jit(device=True)
        def through_memory(value, away):
            shared = cuda.shared.array(threads, scalar)
            thread = cuda.threadIdx.y * lanes + cuda.threadIdx.x
            shared[thread] = value
            cuda.syncthreads()  # all values are in place
            found = shared[(thread + away) % threads]
            cuda.syncthreads()  # all have read them
            return found

        return through_memory

    @cuda.jit(device=True)
    def part_of(part, away):
        thread = cuda.threadIdx.y * lanes + cuda.threadIdx.x
        return cuda.shfl_sync(0xFFFFFFFF, part, (thread + away) & 31)

    if np.dtype(scalar).kind != "c":
        return part_of

    @cuda.jit(device=True)
    def value_of(value, away):
        return complex(part_of(value.real, away), part_of(value.imag, away))

    return value_of


# -------------------------------------------------------------------------- along columns


class ColumnKernels(NamedTuple):
    """Kernels over matrices whose columns are cut into chunks of ``length``, a thread each.

    A thread may have several neighbouring columns.

    Attributes
    ----------
    totals : kernel
        ``totals(values, out, n, n_columns, n_chunks, length)`` reduces each chunk.
    scan : kernel
        ``scan(values, ends, out, n, n_columns, n_chunks, length)``; as that along rows.
    """

    totals: Any
    scan: Any


@functools.cache
def along_columns(op: str, dtype: np.dtype, wide: bool, reverse: bool) -> ColumnKernels:
    """Return the kernels for flat C-contiguous arrays of matrices, shape (n, n_columns)."""
    width, scalar, load, store, store_scalars = access(dtype, wide=wide)
    operation, nothing = operation_of(op, scalar)
    combine, nothing_all = lift(operation, width), (nothing,) * width
    kind: np.dtype = np.dtype(scalar)
    load_scalars = (by_offset(kind, width) if width > 1 else access(kind, wide=False)).load

    @cuda.jit(device=True)
    def begin(n, n_columns, n_chunks, length):
        """Give this thread's chunk and place in it, where it begins, and its rows."""
        thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        pieces = n_columns // width
        item = thread // pieces
        chunk = item % n_chunks
        start = chunk * length
        at = (item // n_chunks * n + start) * n_columns + thread % pieces * width
        return thread * width, chunk, at, min(length, n - start)

    @cuda.jit
    def totals(values, out, n, n_columns, n_chunks, length):
        place, _, at, left = begin(n, n_columns, n_chunks, length)
        if place >= out.size:
            return
        total = nothing_all
        while left >= 4:  # four loads in flight hide most of the memory's latency
            a = load(values, at)
            b = load(values, at + n_columns)
            c = load(values, at + 2 * n_columns)
            d = load(values, at + 3 * n_columns)
            total = combine(combine(combine(combine(total, a), b), c), d)
            at += 4 * n_columns
            left -= 4
        while left > 0:
            total = combine(total, load(values, at))
            at += n_columns
            left -= 1
        store_scalars(out, place, total)

    @cuda.jit
    def scan(values, ends, out, n, n_columns, n_chunks, length):
        place, chunk, at, left = begin(n, n_columns, n_chunks, length)
        if place >= (values.size // n) * n_chunks:
            return
        step, total = n_columns, nothing_all
        if reverse:
            at, step = at + (left - 1) * n_columns, -n_columns
        if reverse and chunk < n_chunks - 1:
            total = load_scalars(ends, place + n_columns)
        elif not reverse and chunk > 0:
            total = load_scalars(ends, place - n_columns)
        while left >= 4:
            a = load(values, at)
            b = load(values, at + step)
            c = load(values, at + 2 * step)
            d = load(values, at + 3 * step)
            a = combine(total, a)
            b = combine(a, b)
            c = combine(b, c)
            total = combine(c, d)
            store(out, at, a)
            store(out, at + step, b)
            store(out, at + 2 * step, c)
            store(out, at + 3 * step, total)
            at += 4 * step
            left -= 4
        while left > 0:
            total = combine(total, load(values, at))
            store(out, at, total)
            at += step
            left -= 1

    return ColumnKernels(totals, scan)
