"""GPU kernels that combine rows by their index: two launches sort entries, and two add up.

The first groups the entries of a *tile* by the lowest bits of their rows. Then a block for each
value of those bits, its *run*, puts the entries of its rows in order. The third launch adds up
neighbouring places in that order, and fills the rows that no entry names. A row's entries are cut
into *units* of ``chunk``, counted from its first; the last launch adds up the sums of a row with
several units, in the order of ``_segment_cuda``.

``places`` holds, in parts as long as the entries, for each place in the order: the entry, its row,
and where that begins and ends. ``longs`` holds how many rows have several units, how many entries
are of a row that exists, and for each of those rows its number and where it begins and ends.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded, window
from rtxarr.kernels._segment_cuda import JOIN_BLOCK, OPERATIONS, _divide, _keep, first_slot
from rtxarr.kernels._vector import access, each, lift, packed
from rtxarr.kernels.segment import identity

# Threads of a block that groups entries, how many each takes, and by how many bits.
GROUP_THREADS, GROUP_EACH, RUN_BITS = (8, 2, 2) if _SIMULATING else (512, 8, 7)
# Threads of a block that orders them, its counters of rows, and the most tiles.
ORDER_THREADS, COUNTERS, MOST_TILES = (8, 64, 8) if _SIMULATING else (1024, 1 << 14, 512)
LANES = 4 if _SIMULATING else 32
# Rows whose loads a thread has under way together, threads that add up, and blocks of those on a
# multiprocessor.
AT_ONCE, SUM_THREADS, PER_PROCESSOR = (2, 8, 1) if _SIMULATING else (8, 256, 4)
# Places of a group of threads that adds up, at most, and of a block; and rows of the result that a
# group fills.
PLACES_EACH, PLACES, ROWS_EACH = (4, 64, 2) if _SIMULATING else (32, 2048, 8)
_U = np.uint32

if _SIMULATING:  # which has no warps

    @cuda.jit(device=True)
    def _of_warp(shared, number):
        t = cuda.threadIdx.x
        shared[t] = number
        cuda.syncthreads()
        first = t // LANES * LANES
        numbers = [int(shared[first + i]) for i in range(LANES)]
        cuda.syncthreads()
        return numbers

    @cuda.jit(device=True)
    def ballot(shared, flag):
        return _U(sum(x << i for i, x in enumerate(_of_warp(shared, flag))))

    @cuda.jit(device=True)
    def match(shared, number):
        return _U(sum((x == number) << i for i, x in enumerate(_of_warp(shared, number))))

    @cuda.jit(device=True)
    def meet():
        cuda.syncthreads()

else:

    @cuda.jit(device=True)
    def ballot(shared, flag):
        """Return a word with a bit for each thread of the warp."""
        return _U(cuda.ballot_sync(0xFFFFFFFF, flag))

    @cuda.jit(device=True)
    def match(shared, number):
        """Return a word with a bit for each thread of the warp that has this number."""
        return _U(cuda.match_any_sync(0xFFFFFFFF, np.int32(number)))

    @cuda.jit(device=True)
    def meet():
        """Wait for the threads of the warp."""
        cuda.syncwarp()


@functools.cache
def sums_before(threads: int):
    """Return the device function ``before(sums, value)``, which all threads of a block call.

    It gives the sum of the values of the threads before this one.
    """

    @cuda.jit(device=True)
    def before(sums, value):
        t, away = _U(cuda.threadIdx.x), _U(1)
        sums[t] = value
        cuda.syncthreads()  # all values are in place
        while away < _U(threads):
            other = sums[_U(t - away)] if t >= away else _U(0)
            cuda.syncthreads()  # all have read them
            sums[t] = _U(sums[t] + other)
            cuda.syncthreads()  # the longer sums are in place
            away = _U(away * _U(2))
        return _U(sums[t] - value)

    return before


@functools.cache
def group(entry_bits: int):
    """Return the kernel ``(index, grouped, starts, longs, n_rows)``, a block for each tile.

    It groups entries by the lowest ``RUN_BITS`` bits of their rows, in their order, as words of the
    other bits and the entry. ``starts`` gets where groups begin in a tile, and where the last ends.
    """
    threads, per_thread = GROUP_THREADS, GROUP_EACH
    warps, n_runs, tile = threads // LANES, 1 << RUN_BITS, threads * per_thread
    per_scan = -(-(n_runs + 1) * warps // threads)
    n_counts, n_votes = per_scan * threads, threads if _SIMULATING else 1
    sum_before = sums_before(threads)

    @bounded(threads)
    def kernel(index, grouped, starts, longs, n_rows):
        counts = cuda.shared.array(n_counts, _U)  # of each run and warp
        sums = cuda.shared.array(threads, _U)
        votes = cuda.shared.array(n_votes, np.int32)
        found = cuda.local.array(per_thread, np.int64)
        places = cuda.local.array(per_thread, _U)
        t, n = _U(cuda.threadIdx.x), _U(index.size)
        warp, lane = _U(t // _U(LANES)), _U(t % _U(LANES))
        first = _U(_U(cuda.blockIdx.x) * _U(tile))
        begin = _U(first + _U(_U(warp * _U(LANES * per_thread)) + lane))
        for k in range(per_thread):  # no branch around the loads
            entry = _U(begin + _U(k * LANES))
            found[k] = np.int64(index[entry if entry < n else _U(0)])
        for k in range(per_scan):
            counts[_U(t + _U(k * threads))] = _U(0)
        if cuda.blockIdx.x == 0 and t == _U(0):
            longs[0] = np.int32(0)
        cuda.syncthreads()  # all counts are zero
        below = _U(_U(_U(1) << lane) - _U(1))
        for k in range(per_thread):
            # Without signs: a negative row is a large one. What is of no row comes last.
            inside = _U(begin + _U(k * LANES)) < n and np.uint64(found[k]) < np.uint64(n_rows)
            run = _U(_U(found[k]) & _U(n_runs - 1)) if inside else _U(n_runs)
            counter = _U(_U(run * _U(warps)) + warp)
            same, seen = match(votes, run), counts[counter]
            before = _U(cuda.popc(_U(same & below)))
            meet()  # all have read
            if before == _U(0):
                counts[counter] = _U(seen + _U(cuda.popc(same)))
            meet()  # the first of each run have written
            places[k] = _U(seen + before)
        cuda.syncthreads()  # all counts are in place
        total = _U(0)
        for k in range(per_scan):
            total = _U(total + counts[_U(_U(t * _U(per_scan)) + _U(k))])
        start = sum_before(sums, total)
        for k in range(per_scan):
            at = _U(_U(t * _U(per_scan)) + _U(k))
            here = counts[at]
            counts[at] = start
            start = _U(start + here)
        cuda.syncthreads()  # where those of each run and warp begin is in place
        if t <= _U(n_runs):
            starts[_U(_U(_U(cuda.blockIdx.x) * _U(n_runs + 1)) + t)] = counts[_U(t * _U(warps))]
        for k in range(per_thread):
            entry, row = _U(begin + _U(k * LANES)), _U(found[k])
            if entry < n and np.uint64(found[k]) < np.uint64(n_rows):
                run = _U(row & _U(n_runs - 1))
                place = _U(places[k] + counts[_U(_U(run * _U(warps)) + warp)])
                word = _U(_U(_U(row >> _U(RUN_BITS)) << _U(entry_bits)) | entry)
                grouped[_U(first + place)] = word

    return kernel


@functools.cache
def order(entry_bits: int, most_rows: int, chunk: int):
    """Return the kernel ``(grouped, starts, places, longs, counts, n_rows, n_tiles)``.

    A block for each run, of up to ``most_rows`` rows. ``counts`` gets the entries of each row.
    """
    threads, n_runs, tile_size = ORDER_THREADS, 1 << RUN_BITS, GROUP_THREADS * GROUP_EACH
    n_ranges = COUNTERS // most_rows  # of the tiles, each with counters and threads of its own
    per_range, entry_of = threads // n_ranges, (1 << entry_bits) - 1
    # In shared memory: where rows begin, and counters of rows in each range.
    counters = most_rows + 1
    n_shared = counters * (n_ranges + 1)
    size = n_shared if _SIMULATING else 0
    sum_before = sums_before(threads)

    @cuda.jit(device=True)
    def put(memory, places, m, run, word, place):
        own = _U(word >> _U(entry_bits))
        places[place] = np.int32(_U(word & _U(entry_of)))
        places[_U(m + place)] = np.int32(_U(_U(own << _U(RUN_BITS)) | run))
        places[_U(_U(m + m) + place)] = np.int32(memory[own])
        places[_U(_U(_U(m + m) + m) + place)] = np.int32(memory[_U(own + _U(1))])

    if _SIMULATING:

        def put_in_order(memory, grouped, places, begins, ends, at, stop, m, run):
            if cuda.threadIdx.x % per_range == 0:
                for tile in range(at, stop):
                    for i in range(begins[tile], ends[tile]):
                        own = int(grouped[i]) >> entry_bits
                        to = counters * (1 + cuda.threadIdx.x // per_range) + own
                        put(memory, places, m, run, grouped[i], memory[to])
                        memory[to] += _U(1)

    else:

        @cuda.jit(device=True)
        def put_in_order(memory, grouped, places, begins, ends, at, stop, m, run):
            """Put the entries of a range of tiles, by the first warp of its threads."""
            lane = _U(_U(cuda.threadIdx.x) % _U(per_range))
            if lane >= _U(LANES):
                return
            below, mine = _U(_U(_U(1) << lane) - _U(1)), _U(_U(cuda.threadIdx.x) // _U(per_range))
            while at < stop:
                first, end = begins[at], ends[at]
                i, at = _U(first + lane), _U(at + _U(1))
                coming = grouped[i if i < end else _U(0)]
                while first < end:
                    word, inside = coming, i < end
                    i, first = _U(i + _U(LANES)), _U(first + _U(LANES))
                    coming = grouped[i if i < end else _U(0)]  # under way meanwhile
                    own = _U(word >> _U(entry_bits)) if inside else _U(most_rows)
                    same = _U(cuda.match_any_sync(0xFFFFFFFF, np.int32(own)))
                    before = _U(cuda.popc(_U(same & below)))
                    counter = _U(_U(_U(counters) * _U(mine + _U(1))) + own)
                    seen = memory[counter]
                    cuda.syncwarp()  # all have read
                    if inside:
                        put(memory, places, m, run, word, _U(seen + before))
                        if before == _U(0):
                            memory[counter] = _U(seen + _U(cuda.popc(same)))
                    cuda.syncwarp()  # the first of each row have written

    @bounded(threads)
    def kernel(grouped, starts, places, longs, counts, n_rows, n_tiles):
        memory = cuda.shared.array(size, _U)
        begins = cuda.shared.array(MOST_TILES, _U)
        ends = cuda.shared.array(MOST_TILES, _U)
        sums = cuda.shared.array(threads, _U)
        base_ = cuda.shared.array(1, _U)
        t, n_rows, n_tiles, m = _U(cuda.threadIdx.x), _U(n_rows), _U(n_tiles), _U(grouped.size)
        run = _U(cuda.blockIdx.x)
        n_own = _U(_U(_U(n_rows - _U(run + _U(1))) >> _U(RUN_BITS)) + _U(1))
        if t == _U(0):
            base_[0] = _U(0)
        own = t
        while own < _U(n_shared - counters):
            memory[_U(_U(counters) + own)] = _U(0)
            own = _U(own + _U(threads))
        cuda.syncthreads()  # counts are zero
        tile = t
        while tile < n_tiles:
            at = _U(_U(tile * _U(n_runs + 1)) + run)
            first, last, before = starts[at], starts[_U(at + _U(1))], _U(tile * _U(tile_size))
            begins[tile], ends[tile] = _U(before + first), _U(before + last)
            cuda.atomic.add(base_, 0, first)  # integers, in any order
            tile = _U(tile + _U(threads))
        cuda.syncthreads()  # where this run is in each tile is in place
        base = base_[0]
        range_, size_ = _U(t // _U(per_range)), _U(_U(n_tiles + _U(n_ranges - 1)) // _U(n_ranges))
        at = min(n_tiles, _U(range_ * size_))
        stop = min(n_tiles, _U(_U(range_ + _U(1)) * size_))
        tile = at
        while tile < stop:
            i = _U(begins[tile] + _U(t % _U(per_range)))
            while i < ends[tile]:
                own = _U(grouped[i] >> _U(entry_bits))
                cuda.atomic.add(memory, _U(_U(_U(counters) * _U(range_ + _U(1))) + own), _U(1))
                i = _U(i + _U(per_range))
            tile = _U(tile + _U(1))
        cuda.syncthreads()  # the counts are in place

        per_row = _U(_U(n_own + _U(threads - 1)) // _U(threads))
        first, total = _U(t * per_row), _U(0)
        last = min(_U(first + per_row), n_own)
        own = first
        while own < last:
            count = _U(0)
            for k in range(n_ranges):
                count = _U(count + memory[_U(own + _U(counters * (k + 1)))])
            counts[_U(_U(own << _U(RUN_BITS)) | run)] = np.int32(count)
            total = _U(total + count)
            own = _U(own + _U(1))
        start, own = _U(base + sum_before(sums, total)), first
        while own < last:
            memory[own], begin = start, start
            for k in range(n_ranges):
                counter = _U(own + _U(counters * (k + 1)))
                count = memory[counter]
                memory[counter] = start
                start = _U(start + count)
            if _U(start - begin) > _U(chunk):
                i = 2 + 3 * np.int64(cuda.atomic.add(longs, 0, 1))  # in any order
                longs[i] = np.int32(_U(_U(own << _U(RUN_BITS)) | run))
                longs[i + 1], longs[i + 2] = np.int32(begin), np.int32(start)
            own = _U(own + _U(1))
        if t == _U(threads - 1):
            memory[n_own] = _U(base + sums[t])
            if run == _U(cuda.gridDim.x - 1):
                longs[1] = np.int32(_U(base + sums[t]))
        cuda.syncthreads()  # where rows begin is in place
        put_in_order(memory, grouped, places, begins, ends, at, stop, m, run)

    if not _SIMULATING:
        kernel.shared_bytes = 4 * n_shared
    return kernel


def places_each(groups: int) -> int:
    """Give the places of each of the groups of threads that add up."""
    return min(PLACES_EACH, max(1, PLACES // groups))


@functools.cache
def finished(op: str, width: int):
    """Return the device function ``finish(total, count)``."""
    return each(_divide if op == "mean" else _keep, width, with_number=True)


@functools.cache
def combined(op: str, dtype: np.dtype, wide: bool, n: int):
    """Return the device function ``combine(total, words)`` for ``n`` rows' pieces, in order."""
    width, scalar, _, _, _ = access(dtype, wide=wide)
    n_words, _, _, numbers = packed(dtype, wide=wide)
    operation, neighbours, per_word = lift(OPERATIONS[op], width), window(width), width // n_words
    before = combined(op, dtype, wide, n - 1) if n > 1 else None
    first = (n - 1) * n_words

    @cuda.jit(device=True)
    def combine_last(total, words):
        values = cuda.local.array(width, scalar)
        for i in range(n_words):
            found = numbers(words[first + i])
            for j in range(per_word):
                values[i * per_word + j] = found[j]
        return operation(total, neighbours(values, 0))

    if before is None:
        return combine_last

    @cuda.jit(device=True)
    def combine(total, words):
        return combine_last(before(total, words), words)

    return combine


@functools.cache
def add_up(op: str, dtype: np.dtype, wide: bool, chunk: int, groups: int):
    """Return the kernel that adds up units.

    ``(values, places, longs, counts, partial, out, n_features, n_sums)``: neighbouring threads (x)
    take neighbouring features; y, of which there are ``groups``, and the grid run over places in
    the first ``n_sums`` blocks, and then over rows: those that no entry names are filled. The sums
    of the units of rows with several go to ``partial``.
    """
    width, scalar, _, store, store_sums = access(dtype, wide=wide)
    n_words, word, load, _ = packed(dtype, wide=wide)
    finish = finished(op, width)
    combine_all, combine_one = (combined(op, dtype, wide, n) for n in (AT_ONCE, 1))
    nothing = (scalar(identity(op, dtype)),) * width
    at_once, n_kept = AT_ONCE, AT_ONCE * n_words
    per_group = places_each(groups)
    n_places = groups * per_group + chunk  # units that begin among a block's places end here

    @cuda.jit(device=True)
    def fill(counts, out, first, n_features):
        """Fill those of a group's rows that no entry names."""
        found = cuda.local.array(ROWS_EACH, np.int32)
        for k in range(ROWS_EACH):  # no branch around the loads
            found[k] = counts[min(first + k, counts.size - 1)]
        for feature in range(cuda.threadIdx.x * width, n_features, cuda.blockDim.x * width):
            for k in range(ROWS_EACH):
                if first + k < counts.size and found[k] == 0:
                    store(out, (first + k) * n_features + feature, nothing)

    @cuda.jit(device=True)
    def next_unit(begins, ends, place, first, m):
        """Give the first place from this one on where a unit begins, as all do from ``first``."""
        if place >= m:
            return m
        start, end = begins[_U(place - first)], ends[_U(place - first)]
        n_before = _U(_U(_U(place - start) + _U(chunk - 1)) // _U(chunk))
        return min(_U(start + _U(n_before * _U(chunk))), end)

    # Divisions take registers.
    @bounded(SUM_THREADS, 2 if op == "mean" else PER_PROCESSOR)
    def kernel(values, places, longs, counts, partial, out, n_features, n_sums):
        entries = cuda.shared.array(n_places, _U)
        rows = cuda.shared.array(n_places, _U)
        begins = cuda.shared.array(n_places, _U)
        ends = cuda.shared.array(n_places, _U)
        y, lanes = _U(cuda.threadIdx.y), _U(cuda.blockDim.x)
        if cuda.blockIdx.x >= n_sums:
            number = (np.int64(cuda.blockIdx.x) - n_sums) * groups + np.int64(y)
            fill(counts, out, number * ROWS_EACH, n_features)
            return
        n, first = _U(places.size // 4), _U(_U(cuda.blockIdx.x) * _U(groups * per_group))
        m = _U(longs[1])  # those of rows that exist
        i = _U(_U(y * lanes) + _U(cuda.threadIdx.x))
        while i < _U(n_places):
            place = min(_U(first + i), _U(n - _U(1)))
            entries[i], rows[i] = _U(places[place]), _U(places[_U(n + place)])
            begins[i] = _U(places[_U(_U(n + n) + place)])
            ends[i] = _U(places[_U(_U(_U(n + n) + n) + place)])
            i = _U(i + _U(lanes * _U(groups)))
        cuda.syncthreads()  # what is known of the places is in place
        begin = next_unit(begins, ends, _U(first + _U(y * _U(per_group))), first, m)
        last = next_unit(begins, ends, _U(first + _U(_U(y + _U(1)) * _U(per_group))), first, m)
        kept = cuda.local.array(n_kept, word)
        feature = np.int64(cuda.threadIdx.x) * width
        while feature < n_features:
            place, unit_end, total = begin, begin, nothing
            start, end, row = _U(0), _U(0), _U(0)
            while place < last:
                for k in range(at_once):  # no branch around the loads
                    entry = np.int64(entries[_U(min(_U(place + _U(k)), _U(last - _U(1))) - first)])
                    loaded = load(values, entry * n_features + feature)
                    for i in range(n_words):
                        kept[k * n_words + i] = loaded[i]
                batch_end = min(_U(place + _U(at_once)), last)
                while place < batch_end:
                    if place == unit_end:  # here begins another
                        here = _U(place - first)
                        start, end, row = begins[here], ends[here], rows[here]
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
                    if place != unit_end:
                        continue
                    n_of_row = np.int32(_U(end - start))
                    if n_of_row > chunk:
                        slot = first_slot(np.int64(start), chunk)
                        unit = np.int64(_U(_U(place - _U(1) - start) // _U(chunk)))
                        store_sums(partial, (slot + unit) * n_features + feature, total)
                        total = nothing
                        break  # the next begins with a whole batch
                    result = finish(total, scalar(n_of_row))
                    store(out, np.int64(row) * n_features + feature, result)
                    total = nothing
            feature += lanes * width

    return kernel


@functools.cache
def join(op: str, dtype: np.dtype, chunk: int):
    """Return the kernel ``(longs, partial, out, n_features)`` of the last launch.

    The grid's x runs over rows with several units, and its y over blocks of features; in a block x
    runs over those, and y over parts of the units.
    """
    _, scalar, _, store, _ = access(dtype, wide=False)
    operation, finish = OPERATIONS[op], _divide if op == "mean" else _keep
    nothing, (n_lanes, n_parts) = scalar(identity(op, dtype)), JOIN_BLOCK

    @bounded(n_lanes * n_parts)
    def kernel(longs, partial, out, n_features):
        shared = cuda.shared.array((n_parts, n_lanes), scalar)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        feature = np.int64(cuda.blockIdx.y) * n_lanes + x
        for i in range(cuda.blockIdx.x, longs[0], cuda.gridDim.x):
            row, start, end = longs[2 + 3 * i], longs[3 + 3 * i], longs[4 + 3 * i]
            first, total = first_slot(np.int64(start), chunk), nothing
            j, stop = first + y, first + (end - start + chunk - 1) // chunk
            if feature < n_features:
                while j + 3 * n_parts < stop:  # four loads in flight
                    a = partial[j * n_features + feature]
                    b = partial[(j + n_parts) * n_features + feature]
                    c = partial[(j + 2 * n_parts) * n_features + feature]
                    d = partial[(j + 3 * n_parts) * n_features + feature]
                    total = operation(operation(operation(operation(total, a), b), c), d)
                    j += 4 * n_parts
                while j < stop:
                    total = operation(total, partial[j * n_features + feature])
                    j += n_parts
            shared[y, x] = total
            cuda.syncthreads()  # the sums of all parts are in place
            if y == 0 and feature < n_features:
                for other in range(1, n_parts):
                    total = operation(total, shared[other, x])
                result = finish(total, scalar(end - start))
                store(out, np.int64(row) * n_features + feature, (result,))
            cuda.syncthreads()  # they have been read

    return kernel
