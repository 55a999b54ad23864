"""A GPU kernel that multiplies sums of gathered rows with a matrix, while it adds up the next ones.

Gathering waits for memory and multiplying for arithmetic. So some warps of a block add up the rows
of a tile in shared memory, while others multiply those of the tile before with the matrix, which
stays there too. Two tiles change places; a named barrier tells that one is full, another that it
may be filled again.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset

_F32 = np.dtype(np.float32)
# Threads that share a row, of four features each, and groups of them.
LANES, GROUPS = (2, 2) if _SIMULATING else (32, 16)
# Threads that multiply: those along y have four rows each, along x eight columns.
ACROSS, DOWN = (1, 1) if _SIMULATING else (16, 16)
THREADS = LANES * GROUPS + ACROSS * DOWN
ROWS = 4 * DOWN  # of a tile
MOST = 4 * LANES  # features, and columns of the matrix
# Between rows of a tile: two rows that a warp reads together are in other banks.
_PITCH = MOST + 4
SHARED_BYTES = 4 * (MOST * MOST + 2 * ROWS * _PITCH)
_FULL, _EMPTY = 1, 3  # the first of two barriers each

if _SIMULATING:
    # The simulator has one barrier: there all threads gather, and then all multiply.
    def _memory(array):
        return array

    def _load(memory, at):
        return tuple(memory[at : at + 4])

    def _store(memory, at, values):
        memory[at : at + 4] = values

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
        """Return an intrinsic that is an instruction at the barrier of a number."""

        @intrinsic
        def barrier(typingctx, number):
            def codegen(context, builder, signature, args):
                kind = ir.FunctionType(ir.VoidType(), [_I32])
                asm = ir.InlineAsm(kind, f"bar.{name} $0, {THREADS};", "r", side_effect=True)
                number = builder.trunc(args[0], _I32)
                builder.call(asm, [number]).attributes.add("convergent")
                return context.get_dummy_value()

            return types.void(types.int64), codegen

        return barrier

    _meet, _arrive = _barrier("sync"), _barrier("arrive")


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
    def fetch(indices, weight, x, j, place, n_in):
        source = np.int64(indices[np.uint64(j)]) if gathered else j
        factor = weight[np.uint64(j)] if gathered else one
        return load(x, source * n_in + place), factor

    @cuda.jit(device=True)
    def summed(indices, weight, x, start, stop, place, n_in):
        total = _NONE
        j, last = start, stop - 1
        while j + 7 < stop:  # eight loads in flight
            a = fetch(indices, weight, x, j, place, n_in)
            b = fetch(indices, weight, x, j + 1, place, n_in)
            c = fetch(indices, weight, x, j + 2, place, n_in)
            d = fetch(indices, weight, x, j + 3, place, n_in)
            e = fetch(indices, weight, x, j + 4, place, n_in)
            f = fetch(indices, weight, x, j + 5, place, n_in)
            g = fetch(indices, weight, x, j + 6, place, n_in)
            h = fetch(indices, weight, x, j + 7, place, n_in)
            total = _plus(_plus(_plus(_plus(total, a), b), c), d)
            total = _plus(_plus(_plus(_plus(total, e), f), g), h)
            j += 8
        while j < stop:  # the rest, four at once: the last is read again if need be
            a = fetch(indices, weight, x, j, place, n_in)
            b = fetch(indices, weight, x, min(j + 1, last), place, n_in)
            c = fetch(indices, weight, x, min(j + 2, last), place, n_in)
            d = fetch(indices, weight, x, min(j + 3, last), place, n_in)
            total = _plus_if(j < last, _plus(total, a), b)
            total = _plus_if(j + 1 < last, total, c)
            total = _plus_if(j + 2 < last, total, d)
            j += 4
        return total

    @cuda.jit(device=True)
    def span(starts, lengths, item):
        """Give the first entry of an item, and the one after its last."""
        if item >= starts.size:
            return np.int64(0), np.int64(0)
        return starts[item], starts[item] + lengths[item]

    @cuda.jit(device=True)
    def gather(memory, to, tile, starts, lengths, rows, indices, weight, x, sums, n_in):
        """Add up the rows of a tile."""
        # Threads of no features do what the last does: a warp meets barriers as one.
        place = min(4 * np.int64(cuda.threadIdx.x % LANES), n_in - 4)
        row = np.int64(cuda.threadIdx.x // LANES)
        start, stop = span(starts, lengths, tile + row)
        while row < ROWS:
            item = tile + row
            following = span(starts, lengths, item + GROUPS)  # under way while rows are added up
            total = summed(indices, weight, x, start, stop, place, n_in)
            if keeps and item < starts.size:
                store(sums, np.int64(rows[item]) * n_in + place, total)
            _store(memory, to + row * _PITCH + place, total)
            start, stop = following
            row += GROUPS

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
    def multiplied(memory, to, tile, starts, rows, bias, out, n_in, n_out, side, again):
        """Multiply a tile when it is full, and say so if it is to be filled again."""
        thread = cuda.threadIdx.x - LANES * GROUPS
        column, row = 4 * np.int64(thread % ACROSS), 4 * np.int64(thread // ACROSS)
        if not _SIMULATING:
            _meet(_FULL + side)
        totals = multiply(memory, to + row * _PITCH, n_in, column)
        if again:
            _arrive(_EMPTY + side)
        item = tile + row
        write(item, totals[0], column, starts, rows, bias, out, n_out)
        write(item + 1, totals[1], column, starts, rows, bias, out, n_out)
        write(item + 2, totals[2], column, starts, rows, bias, out, n_out)
        write(item + 3, totals[3], column, starts, rows, bias, out, n_out)

    @cuda.jit(device=True)
    def write_empty(tile, starts, rows, bias, out, sums, n_in, n_out):
        """Write the rows of a tile that have no entries."""
        place = 4 * np.int64(cuda.threadIdx.x % LANES)
        item = tile + cuda.threadIdx.x // LANES
        while item < min(tile + ROWS, starts.size):
            row = np.int64(rows[item])
            if place < n_out:
                store(out, row * n_out + place, load(bias, place) if biased else _NONE)
            if keeps and place < n_in:
                store(sums, row * n_in + place, _NONE)
            item += THREADS // LANES

    @bounded(THREADS)
    def kernel(
        starts, lengths, rows, first, indices, weight, x, matrix, bias, out, sums, n_in, n_out,
        down, across,
    ):  # fmt: skip
        array = cuda.shared.array(SHARED_BYTES // 4 if _SIMULATING else 0, np.float32)
        memory = _memory(array)
        group = cuda.threadIdx.x // LANES
        for k in range(group, n_in, THREADS // LANES):
            for n in range(cuda.threadIdx.x % LANES, n_out, LANES):
                array[k * MOST + n] = matrix[k * down + n * across]
        cuda.syncthreads()  # the matrix is in place
        step = np.int64(cuda.gridDim.x) * ROWS
        tile = first + np.int64(cuda.blockIdx.x) * ROWS
        to, both = MOST * MOST, 2 * MOST * MOST + ROWS * _PITCH  # where tiles begin
        side = 0
        more = busy(starts, lengths, tile)
        if _SIMULATING:
            while more:
                if group < GROUPS:
                    gather(memory, to, tile, starts, lengths, rows, indices, weight, x, sums, n_in)
                cuda.syncthreads()
                if group >= GROUPS:
                    multiplied(memory, to, tile, starts, rows, bias, out, n_in, n_out, 0, False)
                cuda.syncthreads()
                tile += step
                more = busy(starts, lengths, tile)
        elif group < GROUPS:
            turn = 0
            while more:
                more = busy(starts, lengths, tile + step)
                if turn > 1:
                    _meet(_EMPTY + side)
                gather(memory, to, tile, starts, lengths, rows, indices, weight, x, sums, n_in)
                _arrive(_FULL + side)
                to, side = both - to, 1 - side
                tile += step
                turn += 1
        else:
            following = busy(starts, lengths, tile + step)
            while more:
                again = busy(starts, lengths, tile + 2 * step)
                multiplied(memory, to, tile, starts, rows, bias, out, n_in, n_out, side, again)
                more, following = following, again
                to, side = both - to, 1 - side
                tile += step
        while tile < starts.size:  # those of many entries come first
            write_empty(tile, starts, rows, bias, out, sums, n_in, n_out)
            tile += step

    kernel.shared_bytes = SHARED_BYTES
    return kernel
