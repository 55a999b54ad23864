"""A GPU kernel that multiplies sums of gathered rows with a matrix, while it adds up the next ones.

Gathering waits for memory and multiplying for arithmetic. So some warps of a block add up the rows
of a tile in shared memory, while others multiply those of the tile before with the matrix, which
stays there too. Two tiles change places; a named barrier tells that one is full, another that it
may be filled again.

Long rows have little to multiply and short ones little to gather. So at first most of the warps
that gather add up the pieces of long rows, while a few of them add up short ones.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_address, by_offset

_F32 = np.dtype(np.float32)
# Threads that share a row, of four features each, and groups of them.
LANES, GROUPS = (2, 2) if _SIMULATING else (32, 16)
# Groups that add up short rows at first, of so many entries at most; and entries of a row that a
# group knows before it reads.
FETCHERS, SHORT, BATCH = (1, 3, 16) if _SIMULATING else (4, 3, LANES)
# Threads that multiply: those along y have four rows each, along x eight columns.
ACROSS, DOWN = (1, 1) if _SIMULATING else (16, 16)
MULTIPLIERS = ACROSS * DOWN
THREADS = LANES * GROUPS + MULTIPLIERS
ROWS = 4 * DOWN  # of a tile
LAST = ROWS // GROUPS - 1  # of the rows of a tile for each group
_EACH = ROWS // FETCHERS  # rows of a tile for each of those groups
MOST = 4 * LANES  # features, and columns of the matrix
# Between rows of a tile: two rows that a warp reads together are in other banks.
_PITCH = MOST + 4
SHARED_BYTES = 4 * (MOST * MOST + 2 * ROWS * _PITCH)
_FIRST = MOST * MOST  # where tiles begin, after the matrix
_FULL, _EMPTY = 1, 3  # the first of two barriers each

if _SIMULATING:
    # The simulator has one barrier: there all threads gather, and then all multiply.
    def _memory(array):
        return array

    def _load(memory, at):
        return tuple(memory[at : at + 4])

    def _store(memory, at, values):
        memory[at : at + 4] = values

    def _of_lane(value, lane, array, at):
        return array[at]

    def _load_row(array, row, n, place):
        at = row * n + place
        return array[at], array[at + 1], array[at + 2], array[at + 3]

    def _prefetch(array, at):
        pass

else:
    from llvmlite import ir

    from rtxarr._device import intrinsic, types

    _I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()

    @intrinsic
    def _memory(typingctx, array):
        """Give the address of an array in shared memory."""

        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            kind = ir.FunctionType(_I32, [_I64])
            text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
            asm = ir.InlineAsm(kind, text, "=r,l", side_effect=False)
            return builder.call(asm, [builder.ptrtoint(data, _I64)])

        return types.uint32(array), codegen

    def _place(builder, memory, at):
        """Give the address of element ``at``."""
        return builder.add(memory, builder.shl(builder.trunc(at, _I32), ir.Constant(_I32, 2)))

    @intrinsic
    def _load(typingctx, memory, at):
        """Give four float32 in shared memory; ``at`` is a multiple of four."""
        signature = types.UniTuple(types.float32, 4)(types.uint32, types.int64)

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.LiteralStructType([_FLOAT] * 4), [_I32])
            text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            # Not to be moved across barriers.
            asm = ir.InlineAsm(kind, text, "=f,=f,=f,=f,r", side_effect=True)
            words = builder.call(asm, [_place(builder, *args)])
            numbers = [builder.extract_value(words, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return signature, codegen

    @intrinsic
    def _store(typingctx, memory, at, values):
        signature = types.void(types.uint32, types.int64, types.UniTuple(types.float32, 4))

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(ir.VoidType(), [_I32] + [_FLOAT] * 4)
            text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
            asm = ir.InlineAsm(kind, text, "r,f,f,f,f", side_effect=True)
            numbers = [builder.extract_value(args[2], i) for i in range(4)]
            builder.call(asm, [_place(builder, *args[:2]), *numbers])
            return context.get_dummy_value()

        return signature, codegen

    def _barrier(name):
        """Return an intrinsic that is an instruction at a barrier, for so many threads."""

        @intrinsic
        def barrier(typingctx, number, threads):
            def codegen(context, builder, signature, args):
                kind = ir.FunctionType(ir.VoidType(), [_I32, _I32])
                asm = ir.InlineAsm(kind, f"bar.{name} $0, $1;", "r,r", side_effect=True)
                given = [builder.trunc(a, _I32) for a in args]
                builder.call(asm, given).attributes.add("convergent")
                return context.get_dummy_value()

            return types.void(types.int64, types.int64), codegen

        return barrier

    _meet, _arrive = _barrier("sync"), _barrier("arrive")

    @cuda.jit(device=True)
    def _of_lane(value, lane, array, at):
        """Give element ``at`` of an array, which a thread of the group has."""
        return cuda.shfl_sync(0xFFFFFFFF, value, lane)

    @intrinsic
    def _address_in_row(typingctx, array, row, n, place):
        """Give the address of an element of a row of ``n``."""

        def codegen(context, builder, signature, args):
            array, row, n, place = args
            data = context.make_array(signature.args[0])(context, builder, array).data
            start = builder.ptrtoint(builder.gep(data, [place]), _I64)
            n_bytes = builder.shl(n, ir.Constant(_I64, 2))
            if row.type == _I64:
                return builder.add(builder.mul(row, n_bytes), start)
            # A third of the instructions that a product of two int64 takes.
            kind = ir.FunctionType(_I64, [_I32, _I32, _I64])
            asm = ir.InlineAsm(kind, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l")
            return builder.call(asm, [row, builder.trunc(n_bytes, _I32), start])

        return types.int64(array, row, types.int64, types.int64), codegen

    _load_four = by_address(_F32, 4)[1]

    @cuda.jit(device=True)
    def _load_row(array, row, n, place):
        """Give four elements of a row of ``n``, from ``place`` on."""
        return _load_four(_address_in_row(array, row, n, place))

    @intrinsic
    def _prefetch(typingctx, array, at):
        """Bring an element near that is read later."""

        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            place = builder.ptrtoint(builder.gep(data, [args[1]]), _I64)
            kind = ir.FunctionType(ir.VoidType(), [_I64])
            asm = ir.InlineAsm(kind, "prefetch.global.L1 [$0];", "l", side_effect=True)
            builder.call(asm, [place])
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen


@cuda.jit(device=True)
def _plus(total, a):
    """Add a row times its factor."""
    row, factor = a
    return (
        total[0] + factor * row[0],
        total[1] + factor * row[1],
        total[2] + factor * row[2],
        total[3] + factor * row[3],
    )


@cuda.jit(device=True)
def _plus_if(wanted, total, a):
    """Add it if it is wanted, where it is read in any case: reading does not wait for a test."""
    p, q, r, s = _plus(total, a)
    return (
        p if wanted else total[0],
        q if wanted else total[1],
        r if wanted else total[2],
        s if wanted else total[3],
    )


@cuda.jit(device=True)
def _outer(totals, a, b, c):
    """Add the product of a number of each of four rows with eight of the matrix's columns."""
    p, q, r, s = totals
    return _row(p, a[0], b, c), _row(q, a[1], b, c), _row(r, a[2], b, c), _row(s, a[3], b, c)


@cuda.jit(device=True)
def _row(total, a, b, c):
    left, right = total
    return _plus(left, (b, a)), _plus(right, (c, a))


_NONE = (np.float32(0),) * 4
_NONES = (_NONE,) * 4
_NOTHING = ((_NONE, _NONE),) * 4


@functools.cache
def summed_products(*, gathered: bool, biased: bool, keeps: bool):
    """Return the kernel.

    Parameters
    ----------
    gathered : bool
        False takes entries themselves as rows of ``x``, not what ``indices`` has for them, and
        without their factors.
    biased : bool
        Whether a row ``bias`` is added to the products.
    keeps : bool
        Whether the sums are written too.

    Notes
    -----
    Items are those of a :class:`rtxarr.geom._bins.Level` from ``first`` on, which are whole rows
    with those of many entries first. ``x`` has ``n_in`` features and the matrix as many rows, and
    ``n_out`` columns; element ``(k, n)`` is ``matrix[k * down + n * across]``. Each block takes
    every so many tiles, and it may have as many threads as there are, ``SHARED_BYTES`` of memory.
    """
    load, store = by_offset(_F32, 4)
    one = np.float32(1)

    @cuda.jit(device=True)
    def own_entry(indices, weight, start, i, length):
        """Give the source and the factor of an entry from ``i`` on: each thread has its own."""
        if not gathered:
            return np.int64(0), one
        j = start + min(i + np.int32(cuda.threadIdx.x % LANES), length - 1)
        j = np.uint64(j if length > 0 else np.int64(0))
        return indices[j], weight[j]

    @cuda.jit(device=True)
    def fetch(indices, weight, x, own, k, j, place, n_in):
        """Give the row and the factor of entry ``j + k``, which thread ``k`` of the group has."""
        if not gathered:
            return _load_row(x, j + k, n_in, place), one
        source = _of_lane(own[0], k, indices, j + k)
        return _load_row(x, source, n_in, place), _of_lane(own[1], k, weight, j + k)

    @cuda.jit(device=True)
    def summed(indices, weight, x, start, length, own, place, n_in):
        total = _NONE
        i = np.int32(0)
        while i < length:
            following = own
            if i + BATCH < length:  # under way while rows are added up
                following = own_entry(indices, weight, start, np.int32(i + BATCH), length)
            j, count = start + i, np.int32(min(length - i, BATCH))
            k, last = np.int32(0), np.int32(count - 1)
            while k + 7 < count:  # eight loads in flight
                a = fetch(indices, weight, x, own, k, j, place, n_in)
                b = fetch(indices, weight, x, own, k + 1, j, place, n_in)
                c = fetch(indices, weight, x, own, k + 2, j, place, n_in)
                d = fetch(indices, weight, x, own, k + 3, j, place, n_in)
                e = fetch(indices, weight, x, own, k + 4, j, place, n_in)
                f = fetch(indices, weight, x, own, k + 5, j, place, n_in)
                g = fetch(indices, weight, x, own, k + 6, j, place, n_in)
                h = fetch(indices, weight, x, own, k + 7, j, place, n_in)
                total = _plus(_plus(_plus(_plus(total, a), b), c), d)
                total = _plus(_plus(_plus(_plus(total, e), f), g), h)
                k = np.int32(k + 8)
            while k < count:  # the rest, four at once: the last is read again if need be
                a = fetch(indices, weight, x, own, k, j, place, n_in)
                b = fetch(indices, weight, x, own, min(k + 1, last), j, place, n_in)
                c = fetch(indices, weight, x, own, min(k + 2, last), j, place, n_in)
                d = fetch(indices, weight, x, own, min(k + 3, last), j, place, n_in)
                total = _plus_if(k < last, _plus(total, a), b)
                total = _plus_if(k + 1 < last, total, c)
                total = _plus_if(k + 2 < last, total, d)
                k = np.int32(k + 4)
            own = following
            i = np.int32(i + BATCH)
        return total

    @cuda.jit(device=True)
    def span(starts, lengths, rows, item):
        """Give the first entry of an item, how many it has, and the row of the result."""
        if item >= starts.size:
            return np.int64(0), np.int32(0), np.int64(0)
        return starts[item], lengths[item], np.int64(rows[item]) if keeps else np.int64(0)

    @cuda.jit(device=True)
    def own_span(starts, lengths, rows, tile):
        """Give that of one of the group's items in a tile: its first threads have one each."""
        group, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        item = tile + group + GROUPS * min(lane, LAST)
        return span(starts, lengths, rows, item)

    @cuda.jit(device=True)
    def short_spans(starts, lengths, rows, tile):
        """Give that where a group has items one after the other."""
        group, lane = np.int64(cuda.threadIdx.x // LANES), cuda.threadIdx.x % LANES
        return span(starts, lengths, rows, tile + group * _EACH + min(lane, _EACH - 1))

    @cuda.jit(device=True)
    def span_of(own, k, starts, lengths, rows, item):
        if _SIMULATING:
            return span(starts, lengths, rows, item)
        number = _of_lane(own[2], k, own, 2) if keeps else np.int64(0)
        return _of_lane(own[0], k, own, 0), _of_lane(own[1], k, own, 1), number

    @cuda.jit(device=True)
    def put(memory, to, row, place, total, is_item, number, sums, n_in):
        if keeps and is_item:
            store(sums, number * n_in + place, total)
        _store(memory, to + row * _PITCH + place, total)

    @cuda.jit(device=True)
    def gather(memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums, n_in):
        """Add up the rows of a tile."""
        # Threads of no features do what the last does: a warp meets barriers as one.
        place = min(4 * np.int64(cuda.threadIdx.x % LANES), n_in - 4)
        row = np.int64(cuda.threadIdx.x // LANES)
        k = np.int32(0)
        while row < ROWS:
            item = tile + row
            start, length, number = span_of(spans, k, starts, lengths, rows, item)
            own = own_entry(indices, weight, start, np.int32(0), length)
            if gathered and k < LAST:  # the next row's entries come near meanwhile
                near = span_of(spans, k + 1, starts, lengths, rows, item + GROUPS)[0]
                near = min(near + cuda.threadIdx.x % LANES, indices.size - 1)
                _prefetch(indices, near)
                _prefetch(weight, near)
            total = summed(indices, weight, x, start, length, own, place, n_in)
            put(memory, to, row, place, total, item < starts.size, number, sums, n_in)
            row += GROUPS
            k = np.int32(k + 1)

    @cuda.jit(device=True)
    def entry(indices, weight, start, i, length):
        """Give the source and the factor of an entry, of any where an item has fewer."""
        j = start + i if i < length else np.int64(0)
        if not gathered:
            return j, one
        return indices[j], weight[j]

    @cuda.jit(device=True)
    def row_of(own, k, i, spans, starts, lengths, rows, indices, weight, x, item, place, n_in):
        """Tell whether item ``k`` of the group has an entry ``i``; give its row and its factor."""
        if _SIMULATING:
            spans = span(starts, lengths, rows, item)
            own = entry(indices, weight, spans[0], i, spans[1])
        row = _load_row(x, _of_lane(own[0], k, own, 0), n_in, place)
        return i < _of_lane(spans[1], k, spans, 1), (row, _of_lane(own[1], k, own, 1))

    @cuda.jit(device=True)
    def plus_four(
        totals, own, k, i, spans, starts, lengths, rows, indices, weight, x, item, place, n_in
    ):  # fmt: skip
        """Add entry ``i`` of four items."""
        given = starts, lengths, rows, indices, weight, x
        p = row_of(own, k, i, spans, *given, item, place, n_in)
        q = row_of(own, k + 1, i, spans, *given, item + 1, place, n_in)
        r = row_of(own, k + 2, i, spans, *given, item + 2, place, n_in)
        s = row_of(own, k + 3, i, spans, *given, item + 3, place, n_in)
        return (
            _plus_if(p[0], totals[0], p[1]),
            _plus_if(q[0], totals[1], q[1]),
            _plus_if(r[0], totals[2], r[1]),
            _plus_if(s[0], totals[3], s[1]),
        )

    @cuda.jit(device=True)
    def put_short(memory, to, tile, row, k, spans, total, starts, lengths, rows, sums, place, n_in):
        item = tile + row
        if _SIMULATING:
            spans = span(starts, lengths, rows, item)
        number = _of_lane(spans[2], k, spans, 2) if keeps else np.int64(0)
        put(memory, to, row, place, total, item < starts.size, number, sums, n_in)

    @cuda.jit(device=True)
    def fetch_tile(memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums, n_in):
        """Add up the rows of a tile whose items have few entries, four items at once."""
        place = min(4 * np.int64(cuda.threadIdx.x % LANES), n_in - 4)
        row = np.int64(cuda.threadIdx.x // LANES) * _EACH
        most = span_of(spans, 0, starts, lengths, rows, tile + row)[1]  # they are sorted
        first = entry(indices, weight, spans[0], 0, spans[1])
        second = entry(indices, weight, spans[0], 1, spans[1])
        third = entry(indices, weight, spans[0], 2, spans[1])
        for k in range(0, _EACH, 4):
            item, r = tile + row + k, row + k
            given = spans, starts, lengths, rows, indices, weight, x, item, place, n_in
            totals = plus_four(_NONES, first, k, 0, *given)
            if most > 1:
                totals = plus_four(totals, second, k, 1, *given)
            if most > 2:
                totals = plus_four(totals, third, k, 2, *given)
            into = starts, lengths, rows, sums, place, n_in
            put_short(memory, to, tile, r, k, spans, totals[0], *into)
            put_short(memory, to, tile, r + 1, k + 1, spans, totals[1], *into)
            put_short(memory, to, tile, r + 2, k + 2, spans, totals[2], *into)
            put_short(memory, to, tile, r + 3, k + 3, spans, totals[3], *into)

    @cuda.jit(device=True)
    def sum_pieces(group, first, starts, lengths, rows, indices, weight, x, parts, n_in):
        """Add up the pieces of long rows, which are the items before the first whole row."""
        place = min(4 * np.int64(cuda.threadIdx.x % LANES), n_in - 4)
        item = np.int64(cuda.blockIdx.x) * (GROUPS - FETCHERS) + group - FETCHERS
        step = np.int64(cuda.gridDim.x) * (GROUPS - FETCHERS)
        while item < first:
            start, length, _ = span(starts, lengths, rows, item)
            own = own_entry(indices, weight, start, np.int32(0), length)
            total = summed(indices, weight, x, start, length, own, place, n_in)
            store(parts, item * n_in + place, total)
            item += step

    @cuda.jit(device=True)
    def multiply(memory, at, n_in, column):
        """Give the products of four rows of a tile with eight columns of the matrix."""
        totals = _NOTHING
        k = np.int64(0)
        while k < n_in:
            a = _load(memory, at + k)
            b = _load(memory, at + _PITCH + k)
            c = _load(memory, at + 2 * _PITCH + k)
            d = _load(memory, at + 3 * _PITCH + k)
            m = k * MOST + column
            left, right = _load(memory, m), _load(memory, m + MOST // 2)
            totals = _outer(totals, (a[0], b[0], c[0], d[0]), left, right)
            left, right = _load(memory, m + MOST), _load(memory, m + MOST + MOST // 2)
            totals = _outer(totals, (a[1], b[1], c[1], d[1]), left, right)
            left, right = _load(memory, m + 2 * MOST), _load(memory, m + 2 * MOST + MOST // 2)
            totals = _outer(totals, (a[2], b[2], c[2], d[2]), left, right)
            left, right = _load(memory, m + 3 * MOST), _load(memory, m + 3 * MOST + MOST // 2)
            totals = _outer(totals, (a[3], b[3], c[3], d[3]), left, right)
            k += 4
        return totals

    @cuda.jit(device=True)
    def write(item, total, column, starts, rows, bias, out, n_out):
        """Write eight columns of a row."""
        if item >= starts.size:
            return
        at = np.int64(rows[item]) * n_out
        left, right = total
        if column < n_out:
            if biased:
                left = _plus(left, (load(bias, column), one))
            store(out, at + column, left)
        column += MOST // 2
        if column < n_out:
            if biased:
                right = _plus(right, (load(bias, column), one))
            store(out, at + column, right)

    @cuda.jit(device=True)
    def busy(starts, lengths, tile):
        """Tell whether a tile has rows with entries; those before it do."""
        return tile < starts.size and lengths[tile] > 0

    @cuda.jit(device=True)
    def multiplied(
        memory, to, tile, starts, rows, bias, out, n_in, n_out, side, again, threads
    ):  # fmt: skip
        """Multiply a tile when it is full, and say so if it is to be filled again."""
        thread = cuda.threadIdx.x - LANES * GROUPS
        column, row = 4 * np.int64(thread % ACROSS), 4 * np.int64(thread // ACROSS)
        item = tile + row
        if not _SIMULATING:
            _prefetch(rows, min(item, rows.size - 1))
            _meet(_FULL + side, threads)
        totals = multiply(memory, to + row * _PITCH, n_in, column)
        if again:
            _arrive(_EMPTY + side, threads)
        write(item, totals[0], column, starts, rows, bias, out, n_out)
        write(item + 1, totals[1], column, starts, rows, bias, out, n_out)
        write(item + 2, totals[2], column, starts, rows, bias, out, n_out)
        write(item + 3, totals[3], column, starts, rows, bias, out, n_out)

    @cuda.jit(device=True)
    def write_empty(thread, threads, tile, starts, rows, bias, out, sums, n_in, n_out):
        """Write the rows of a tile that have no entries."""
        place = 4 * np.int64(thread % LANES)
        item = tile + thread // LANES
        while item < min(tile + ROWS, starts.size):
            row = np.int64(rows[item])
            if place < n_out:
                store(out, row * n_out + place, load(bias, place) if biased else _NONE)
            if keeps and place < n_in:
                store(sums, row * n_in + place, _NONE)
            item += threads // LANES

    @cuda.jit(device=True)
    def first_short(first, lengths):
        """Give the first tile all of whose items are short; they are sorted."""
        low, high = np.int64(0), (lengths.size - first + ROWS - 1) // ROWS
        while low < high:
            middle = (low + high) // 2
            if lengths[first + middle * ROWS] > SHORT:
                low = middle + 1
            else:
                high = middle
        return first + low * ROWS

    @cuda.jit(device=True)
    def multiply_tiles(
        memory, tile, end, step, starts, lengths, rows, bias, out, n_in, n_out, threads
    ):  # fmt: skip
        """Multiply every so many tiles as they are filled; give the first one without entries."""
        to, both, side = _FIRST, 2 * _FIRST + ROWS * _PITCH, 0
        more = tile < end and busy(starts, lengths, tile)
        following = tile + step < end and busy(starts, lengths, tile + step)
        while more:
            again = tile + 2 * step < end and busy(starts, lengths, tile + 2 * step)
            multiplied(memory, to, tile, starts, rows, bias, out, n_in, n_out, side, again, threads)
            more, following = following, again
            to, side = both - to, 1 - side
            tile += step
        return tile

    @bounded(THREADS)
    def kernel(
        starts, lengths, rows, first, indices, weight, x, matrix, bias, out, sums, parts,
        n_in, n_out, down, across,
    ):  # fmt: skip
        array = cuda.shared.array(SHARED_BYTES // 4 if _SIMULATING else 0, np.float32)
        memory = _memory(array)
        group, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for k in range(group, n_in, THREADS // LANES):
            for n in range(lane, n_out, LANES):
                array[k * MOST + n] = matrix[k * down + n * across]
        short = first_short(first, lengths)
        cuda.syncthreads()  # the matrix is in place
        step, size = np.int64(cuda.gridDim.x) * ROWS, starts.size
        begin = np.int64(cuda.blockIdx.x) * ROWS
        few = LANES * FETCHERS + MULTIPLIERS
        to, both = _FIRST, 2 * _FIRST + ROWS * _PITCH  # where tiles begin
        if _SIMULATING:
            if FETCHERS <= group < GROUPS:
                sum_pieces(group, first, starts, lengths, rows, indices, weight, x, parts, n_in)
            tile = short + begin
            spans = short_spans(starts, lengths, rows, tile)
            while busy(starts, lengths, tile):
                if group < FETCHERS:
                    fetch_tile(
                        memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums,
                        n_in,
                    )  # fmt: skip
                cuda.syncthreads()
                if group >= GROUPS:
                    multiplied(
                        memory, to, tile, starts, rows, bias, out, n_in, n_out, 0, False, few
                    )
                cuda.syncthreads()
                tile += step
            while tile < size:
                write_empty(
                    cuda.threadIdx.x, THREADS, tile, starts, rows, bias, out, sums, n_in, n_out
                )
                tile += step
            tile = first + begin
            while tile < short:
                if group < GROUPS:
                    spans = own_span(starts, lengths, rows, tile)
                    gather(
                        memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums,
                        n_in,
                    )  # fmt: skip
                cuda.syncthreads()
                if group >= GROUPS:
                    multiplied(
                        memory, to, tile, starts, rows, bias, out, n_in, n_out, 0, False, THREADS
                    )
                cuda.syncthreads()
                tile += step
        elif group < GROUPS:
            side, turn = 0, 0
            if group < FETCHERS:
                tile = short + begin
                spans = short_spans(starts, lengths, rows, tile)
                while busy(starts, lengths, tile):
                    following = short_spans(starts, lengths, rows, tile + step)
                    if turn > 1:
                        _meet(_EMPTY + side, few)
                    fetch_tile(
                        memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums,
                        n_in,
                    )  # fmt: skip
                    spans = following
                    _arrive(_FULL + side, few)
                    to, side = both - to, 1 - side
                    tile += step
                    turn += 1
            else:
                sum_pieces(group, first, starts, lengths, rows, indices, weight, x, parts, n_in)
            cuda.syncthreads()  # the barriers are as at the beginning
            to, side, turn = _FIRST, 0, 0
            tile = first + begin
            while tile < short:
                spans = own_span(starts, lengths, rows, tile)
                near = min(tile + step + group + GROUPS * min(lane, LAST), size - 1)
                _prefetch(starts, near)
                _prefetch(lengths, near)
                if keeps:
                    _prefetch(rows, near)
                if turn > 1:
                    _meet(_EMPTY + side, THREADS)
                gather(
                    memory, to, tile, spans, starts, lengths, rows, indices, weight, x, sums, n_in
                )
                _arrive(_FULL + side, THREADS)
                to, side = both - to, 1 - side
                tile += step
                turn += 1
        else:
            thread = cuda.threadIdx.x - LANES * GROUPS
            tile = multiply_tiles(
                memory,
                short + begin,
                size,
                step,
                starts,
                lengths,
                rows,
                bias,
                out,
                n_in,
                n_out,
                few,
            )
            while tile < size:
                write_empty(thread, MULTIPLIERS, tile, starts, rows, bias, out, sums, n_in, n_out)
                tile += step
            cuda.syncthreads()
            multiply_tiles(
                memory, first + begin, short, step, starts, lengths, rows, bias, out, n_in, n_out,
                THREADS,
            )  # fmt: skip

    kernel.shared_bytes = SHARED_BYTES
    return kernel
