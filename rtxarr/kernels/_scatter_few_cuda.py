"""GPU kernel that combines few rows by their index in one launch, in blocks that own rows.

A block owns some rows of the result, every ``2 ** bits``-th *run* of ``2 ** low`` of them, and of
those a *piece*: as many neighbouring features as ``lanes`` threads take at once. It reads the whole
index, keeps the entries of its rows, puts them in the order of rows, adds them up, and fills the
rows that no entry names. No block waits for another, and each element is written by the block that
owns it. A row's entries are cut into *units* of ``chunk``, counted from its first; the sums of a
row with several are added up in the order of ``_segment_cuda``.

Shared memory holds a block's entries as they come, from ``most`` on in the order of rows, and then
where rows begin among those. An entry is a word: the row of the block above the lowest
``entry_bits``, the entry below.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded, window
from rtxarr.kernels._scatter_cuda import LANES, ballot, combined, finished, match, sums_before
from rtxarr.kernels._segment_cuda import JOIN_BLOCK, OPERATIONS, first_slot
from rtxarr.kernels._vector import access, by_offset, lift, packed
from rtxarr.kernels.segment import identity

# Threads of a block, and blocks on a multiprocessor; the most rows that one owns.
THREADS, PER_PROCESSOR, MOST_ROWS = (8, 1, 16) if _SIMULATING else (512, 2, 2048)
# Rows whose loads a thread has under way together.
AT_ONCE = 2 if _SIMULATING else 8
# Entries that a thread looks at.
EACH = (2, 4) if _SIMULATING else (4, 16)
# Ranges of a block's entries that are put in order side by side, two of them in a counter.
_RANGES = 2 if _SIMULATING else 4
_U = np.uint32


@functools.cache
def joined(op: str, dtype: np.dtype, wide: bool):
    """Return the device function ``join(partial, first, count, n_features)``.

    It adds up the sums of ``count`` units: of every ``n_parts``-th, and then those.
    """
    width, scalar, _, _, _ = access(dtype, wide=wide)
    # Sums that another thread has written must not come from the read-only cache.
    sums_type = np.dtype(scalar)
    load = (by_offset(sums_type, width) if wide else access(sums_type, wide=False)).load
    combine, neighbours = lift(OPERATIONS[op], width), window(width)
    nothing, n_parts = (scalar(identity(op, dtype)),) * width, JOIN_BLOCK[1]
    flight = 2 if width > 4 else 4  # sums of units whose loads are under way together
    n_flight = flight * width

    @cuda.jit(device=True)
    def join(partial, first, count, n_features):
        found, units = cuda.local.array(n_flight, scalar), cuda.local.array(flight, np.int32)
        sums, total = nothing, nothing
        unit, part = np.int32(0), np.int32(0)
        for done in range(0, count, flight):
            for k in range(flight):  # no branch around the loads
                units[k] = unit
                loaded = load(partial, first + (unit if done + k < count else 0) * n_features)
                for i in range(width):
                    found[k * width + i] = loaded[i]
                unit = np.int32(unit + n_parts)
                if unit >= count:
                    part = np.int32(part + 1)
                    unit = part
            for k in range(flight):
                if done + k < count:
                    sums = combine(sums, neighbours(found, k * width))
                    if units[k] + n_parts >= count:  # the last of its part
                        total, sums = combine(total, sums), nothing
        return total

    return join


class Owner(NamedTuple):
    """What a block does with its rows.

    Attributes
    ----------
    fill : device function
        ``fill(memory, out, feature, n_features, n_rows, run, bits, first, last, blindly)`` fills
        those of the rows ``first:last`` that no entry names, or all.
    add_up : device function
        ``add_up(memory, values, partial, base, m, n_long, long, out, feature, n_features, run,
        bits)`` combines the ``m`` entries of the block; ``base`` belong to blocks before.
        ``n_long`` says whether rows have several units, and how many have more than there are
        parts: ``long``. All of the block call it.
    """

    fill: Any
    add_up: Any


@functools.cache
def owner(
    op: str, dtype: np.dtype, wide: bool, chunk: int, lanes: int, low: int, most: int
) -> Owner:
    """Return what a block does with its rows."""
    width, scalar, _, store, store_sums = access(dtype, wide=wide)
    n_words, word, load, _ = packed(dtype, wide=wide)
    join, finish = joined(op, dtype, wide), finished(op, width)
    combine_all, combine_one = (combined(op, dtype, wide, n) for n in (AT_ONCE, 1))
    nothing = (scalar(identity(op, dtype)),) * width
    groups, at_once, n_parts = THREADS // lanes, AT_ONCE, JOIN_BLOCK[1]
    combine, neighbours = lift(OPERATIONS[op], width), window(width)
    n_kept, of_part = at_once * n_words, lanes * width
    n_of_parts, entry_bits, rows_at = n_parts * of_part, (most - 1).bit_length(), 2 * most
    # Sums that another thread has written must not come from the read-only cache.
    sums_type = np.dtype(scalar)
    load_sums = (by_offset(sums_type, width) if wide else access(sums_type, wide=False)).load
    entry_of, in_run = (1 << entry_bits) - 1, (1 << low) - 1

    @cuda.jit(device=True)
    def row_of(own, run, bits):
        """Give the row of the result that is a block's ``own``-th; ``run`` is its first run."""
        return _U(_U(_U(_U(_U(own >> _U(low)) << bits) | run) << _U(low)) | _U(own & _U(in_run)))

    @cuda.jit(device=True)
    def begin_of(memory, own):
        """Give where a row's entries begin, or the row's before end."""
        return memory[_U(_U(rows_at) + own)]

    @cuda.jit(device=True)
    def own_of(memory, place):
        """Give the row of the block that the entry at a place belongs to."""
        return _U(memory[_U(_U(most) + place)] >> _U(entry_bits))

    @cuda.jit(device=True)
    def fill(memory, out, feature, n_features, n_rows, run, bits, first, last, blindly):
        own = _U(first + _U(_U(cuda.threadIdx.x) // _U(lanes)))
        while own < last:
            if blindly or begin_of(memory, own) == begin_of(memory, _U(own + _U(1))):
                row = row_of(own, run, bits)
                if row < n_rows:
                    store(out, np.int64(row) * n_features + feature, nothing)
            own = _U(own + _U(groups))

    @cuda.jit(device=True)
    def next_unit(memory, place, m):
        """Give the first place from this one on where a unit begins."""
        if place >= m:
            return m
        own = own_of(memory, place)
        start, end = begin_of(memory, own), begin_of(memory, _U(own + _U(1)))
        n_before = _U(_U(_U(place - start) + _U(chunk - 1)) // _U(chunk))
        return _U(min(_U(start + _U(n_before * _U(chunk))), end))

    @cuda.jit(device=True)
    def add_up(
        memory, values, partial, base, m, n_long, long, out, feature, n_features, run, bits
    ):  # fmt: skip
        # Each group of threads takes the units that begin among as many places.
        group = _U(_U(cuda.threadIdx.x) // _U(lanes))
        share = _U(_U(m + _U(groups - 1)) // _U(groups))
        first = next_unit(memory, _U(group * share), m)
        last = next_unit(memory, _U(_U(group + _U(1)) * share), m)
        if feature < n_features:
            kept = cuda.local.array(n_kept, word)
            place, total = first, nothing
            own, start, end, unit_end = _U(0), _U(0), _U(0), first
            while place < last:
                for k in range(at_once):  # no branch around the loads
                    here = min(_U(place + _U(k)), _U(last - _U(1)))
                    entry = np.int64(_U(memory[_U(_U(most) + here)] & _U(entry_of)))
                    loaded = load(values, entry * n_features + feature)
                    for i in range(n_words):
                        kept[k * n_words + i] = loaded[i]
                batch_end = min(_U(place + _U(at_once)), last)
                while place < batch_end:
                    if place == unit_end:  # here begins another
                        own = own_of(memory, place)
                        start, end = begin_of(memory, own), begin_of(memory, _U(own + _U(1)))
                        unit_end = min(_U(place + _U(chunk)), end)
                    stop = min(unit_end, batch_end)
                    if _U(stop - place) == _U(at_once):
                        total, place = combine_all(total, kept), stop
                    # The compiler must not know how often: unrolled, it takes longer to read.
                    while place < stop:
                        total = combine_one(total, kept)
                        place = _U(place + _U(1))
                        for k in range(n_kept - n_words):
                            kept[k] = kept[k + n_words]
                    if place == unit_end:
                        if _U(end - start) > _U(chunk):
                            slot = first_slot(np.int64(_U(base + start)), chunk)
                            slot += np.int64(_U(_U(place - _U(1) - start) // _U(chunk)))
                            store_sums(partial, slot * n_features + feature, total)
                        else:
                            result = finish(total, scalar(np.int32(end - start)))
                            row = np.int64(row_of(own, run, bits))
                            store(out, row * n_features + feature, result)
                        total = nothing
        if n_long[0] == _U(0):
            return  # so do all threads of the block
        cuda.syncthreads()  # the sums of all units are in place
        if feature < n_features:
            place = first
            while place < last:
                own = own_of(memory, place)
                start, end = begin_of(memory, own), begin_of(memory, _U(own + _U(1)))
                size = _U(end - start)
                if place == start and size > _U(chunk) and size <= _U(chunk * n_parts):
                    slot = first_slot(np.int64(_U(base + start)), chunk)
                    n_units = np.int32(_U(size + _U(chunk - 1)) // _U(chunk))
                    whole = join(partial, slot * n_features + feature, n_units, n_features)
                    result = finish(whole, scalar(np.int32(size)))
                    row = np.int64(row_of(own, run, bits))
                    store(out, row * n_features + feature, result)
                place = next_unit(memory, _U(place + _U(1)), m)
        # Rows of many units take as many groups of threads as there are parts.
        parts = cuda.shared.array(n_of_parts, scalar)
        piece = cuda.local.array(width, scalar)
        here = _U(_U(cuda.threadIdx.x) * _U(width))
        for number in range(n_long[1]):
            own = long[number]
            start, end = begin_of(memory, own), begin_of(memory, _U(own + _U(1)))
            slot = first_slot(np.int64(_U(base + start)), chunk)
            n_units, total = _U(_U(_U(end - start) + _U(chunk - 1)) // _U(chunk)), nothing
            if group < _U(n_parts):
                unit = group
                while unit < n_units and feature < n_features:
                    sums = load_sums(partial, (slot + np.int64(unit)) * n_features + feature)
                    total = combine(total, sums)
                    unit = _U(unit + _U(n_parts))
                for i in range(width):
                    parts[_U(here + _U(i))] = total[i]
            cuda.syncthreads()  # the sums of all parts are in place
            if group == _U(0) and feature < n_features:
                total = nothing
                for part in range(n_parts):
                    for i in range(width):
                        piece[i] = parts[_U(_U(here + _U(i)) + _U(part * of_part))]
                    total = combine(total, neighbours(piece, 0))
                result = finish(total, scalar(np.int32(_U(end - start))))
                row = np.int64(row_of(own, run, bits))
                store(out, row * n_features + feature, result)
            cuda.syncthreads()  # they have been read

    return Owner(fill, add_up)


@functools.cache
def combine_few(
    op: str, dtype: np.dtype, wide: bool, chunk: int, lanes: int, low: int, per_thread: int
):
    """Return the kernel for up to ``THREADS * per_thread`` entries.

    ``(index, values, partial, out, n_features, n_rows, bits, n_each, n_blind)``: the grid's x runs
    over pieces, and its y over the first runs of blocks. ``n_each`` entries are a thread's. Of a
    block's rows the first ``n_blind`` are filled before it knows which are named.
    """
    threads, warps, most = THREADS, THREADS // LANES, THREADS * per_thread
    entry_bits = (most - 1).bit_length()
    rows_at, counters = 2 * most, 2 * most + MOST_ROWS + 1
    n_shared = counters + _RANGES // 2 * MOST_ROWS
    fill, add_up = owner(op, dtype, wide, chunk, lanes, low, most)
    in_run, sum_before = (1 << low) - 1, sums_before(threads)
    most_long, n_parts = most // (chunk * JOIN_BLOCK[1]) + 1, JOIN_BLOCK[1]
    n_votes, size = (threads, n_shared) if _SIMULATING else (1, 0)
    width = access(dtype, wide=wide).width

    @cuda.jit(device=True)
    def of_warp(votes, number):
        """Add up numbers below 32 of the threads of a warp."""
        total = _U(0)
        for i in range(5):
            votes_ = ballot(votes, _U(number & _U(1 << i)) != _U(0))
            total = _U(total + _U(_U(cuda.popc(votes_)) << _U(i)))
        return total

    @cuda.jit(device=True)
    def counter_of(own, part):
        """Give where entries of a row in a range are counted."""
        return _U(_U(_U(counters) + own) + _U(_U(part >> _U(1)) * _U(MOST_ROWS)))

    @cuda.jit(device=True)
    def half_of(part):
        return _U(_U(part & _U(1)) * _U(16))

    if _SIMULATING:

        def order(memory, part, at, stop):
            if cuda.threadIdx.x % LANES == 0:
                for i in range(at, stop):
                    own = memory[i] >> _U(entry_bits)
                    counter, half = counter_of(own, part), half_of(part)
                    memory[most + (memory[counter] >> half & _U(0xFFFF))] = memory[i]
                    memory[counter] += _U(1) << half

    else:

        @cuda.jit(device=True)
        def order(memory, part, at, stop):
            """Put the entries of a range in the order of rows, by one warp."""
            lane, half = _U(_U(cuda.threadIdx.x) % _U(LANES)), half_of(part)
            below, i = _U(_U(_U(1) << lane) - _U(1)), _U(at + lane)
            while at < stop:
                found = memory[i if i < stop else _U(0)]
                own = _U(found >> _U(entry_bits)) if i < stop else _U(MOST_ROWS)
                same = _U(cuda.match_any_sync(0xFFFFFFFF, np.int32(own)))
                before = _U(cuda.popc(_U(same & below)))
                if i < stop:
                    counter = counter_of(own, part)
                    seen = _U(_U(memory[counter] >> half) & _U(0xFFFF))
                cuda.syncwarp()  # all have read
                if i < stop:
                    memory[_U(_U(_U(most) + seen) + before)] = found
                    if before == _U(0):  # others count in the other half
                        cuda.atomic.add(memory, counter, _U(_U(cuda.popc(same)) << half))
                cuda.syncwarp()  # the first of each row have counted
                i, at = _U(i + _U(LANES)), _U(at + _U(LANES))

    # Divisions take registers.
    @bounded(threads, 1 if op == "mean" else PER_PROCESSOR)
    def kernel(index, values, partial, out, n_features, n_rows, bits, n_each, n_blind):
        memory = cuda.shared.array(size, _U)
        sums = cuda.shared.array(threads, _U)
        lower = cuda.shared.array(warps, _U)  # entries of other blocks' rows, and of this one's
        kept = cuda.shared.array(warps, _U)
        n_long = cuda.shared.array(2, _U)  # whether there are rows of several units, and of many
        long = cuda.shared.array(most_long, _U)
        votes = cuda.shared.array(n_votes, np.int32)
        rows, words = cuda.local.array(per_thread, np.int64), cuda.local.array(per_thread, _U)
        t, n, n_rows, bits = _U(cuda.threadIdx.x), _U(index.size), _U(n_rows), _U(bits)
        warp, lane, run = _U(t // _U(LANES)), _U(t % _U(LANES)), _U(cuda.blockIdx.y)
        feature = np.int64(_U(_U(cuda.blockIdx.x) * _U(lanes) + t % _U(lanes)) * _U(width))
        n_runs = _U(_U(n_rows + _U(in_run)) >> _U(low))
        n_own = _U(_U(_U(_U(n_runs - _U(run + _U(1))) >> bits) + _U(1)) << _U(low))
        n_blind = min(_U(n_blind), n_own)
        begin = _U(_U(_U(warp * _U(n_each)) * _U(LANES)) + lane)
        end = min(n, _U(_U(_U(warp + _U(1)) * _U(n_each)) * _U(LANES)))
        for k in range(per_thread):  # no branch around the loads
            entry = _U(begin + _U(k * LANES))
            rows[k] = np.int64(index[entry if entry < end else _U(0)])
        own = t
        while own < _U(n_shared - counters):
            memory[_U(_U(counters) + own)] = _U(0)
            own = _U(own + _U(threads))
        if t == _U(0):
            n_long[0], n_long[1] = _U(0), _U(0)
        if feature < n_features:
            fill(memory, out, feature, n_features, n_rows, run, bits, _U(0), n_blind, True)

        mine, n_lower, stride = _U(0), _U(0), _U(_U(1) << bits)
        for k in range(per_thread):
            # Without signs: a negative row is a large one.
            inside = _U(begin + _U(k * LANES)) < end and np.uint64(rows[k]) < np.uint64(n_rows)
            row = _U(rows[k])
            of_run = _U(_U(row >> _U(low)) & _U(stride - _U(1)))
            own = _U(_U(_U(_U(row >> _U(low)) >> bits) << _U(low)) | _U(row & _U(in_run)))
            words[k] = _U(_U(own << _U(entry_bits)) | _U(begin + _U(k * LANES)))
            mine = _U(mine | (_U(1 << k) if inside and of_run == run else _U(0)))
            n_lower = _U(n_lower + (_U(1) if inside and of_run < run else _U(0)))
        n_lower, n_mine = of_warp(votes, n_lower), of_warp(votes, _U(cuda.popc(mine)))
        if lane == _U(0):
            lower[warp], kept[warp] = n_lower, n_mine
        cuda.syncthreads()  # the counts of all warps are in place, and those of rows zero
        base, place, m = _U(0), _U(0), _U(0)
        for other in range(warps):
            base = _U(base + lower[other])
            place = _U(place + (kept[other] if other < warp else _U(0)))
            m = _U(m + kept[other])
        below = _U(_U(_U(1) << lane) - _U(1))
        for k in range(per_thread):
            is_mine = _U(mine & _U(1 << k)) != _U(0)
            same = ballot(votes, is_mine)
            if is_mine:
                memory[_U(place + _U(cuda.popc(_U(same & below))))] = words[k]
            place = _U(place + _U(cuda.popc(same)))
        cuda.syncthreads()  # the entries are in place
        size_of_range, done = _U(_U(m + _U(_RANGES - 1)) // _U(_RANGES)), _U(0)
        while done < m:
            i, done = _U(done + t), _U(done + _U(threads))
            own = _U(memory[i if i < m else _U(0)] >> _U(entry_bits))
            part = _U(i // size_of_range)
            number = _U(_U(part * _U(MOST_ROWS)) + own)
            same = match(votes, number if i < m else _U(_RANGES * MOST_ROWS))
            if i < m and _U(same & below) == _U(0):
                number = _U(_U(cuda.popc(same)) << half_of(part))
                cuda.atomic.add(memory, counter_of(own, part), number)  # in any order
        cuda.syncthreads()  # so are the counts of rows

        per_row = _U(_U(n_own + _U(threads - 1)) // _U(threads))
        first, total = _U(t * per_row), _U(0)
        last = min(_U(first + per_row), n_own)
        own = first
        while own < last:
            count = _U(0)
            for k in range(_RANGES // 2):
                both = memory[counter_of(own, _U(2 * k))]
                count = _U(count + _U(_U(both & _U(0xFFFF)) + _U(both >> _U(16))))
            total = _U(total + count)
            if count > _U(chunk):
                n_long[0] = _U(1)
            if count > _U(chunk * n_parts):
                long[cuda.atomic.add(n_long, 1, _U(1))] = own  # in any order
            own = _U(own + _U(1))
        start, own = sum_before(sums, total), first
        while own < last:
            memory[_U(_U(rows_at) + own)] = start
            for k in range(_RANGES // 2):
                counter = counter_of(own, _U(2 * k))
                both = memory[counter]
                middle = _U(start + _U(both & _U(0xFFFF)))
                memory[counter] = _U(_U(middle << _U(16)) | start)
                start = _U(middle + _U(both >> _U(16)))
            own = _U(own + _U(1))
        if t == _U(0):
            memory[_U(_U(rows_at) + n_own)] = m
        cuda.syncthreads()  # where rows begin is in place
        if warp < _U(_RANGES):
            stop = min(m, _U(_U(warp + _U(1)) * size_of_range))
            order(memory, warp, _U(warp * size_of_range), stop)
        cuda.syncthreads()  # the order is in place

        add_up(
            memory, values, partial, base, m, n_long, long, out, feature, n_features, run, bits
        )  # fmt: skip
        if feature < n_features:
            fill(memory, out, feature, n_features, n_rows, run, bits, n_blind, n_own, False)

    if not _SIMULATING:
        kernel.shared_bytes = 4 * n_shared
    return kernel
