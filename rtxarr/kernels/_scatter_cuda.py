"""GPU kernels that combine rows by their index: a sort beside a fill, then sums over it.

Of few entries, the first launch fills the result; one block of it sorts the entries by row in
shared memory meanwhile. More are sorted by digits before, and marked. The last launch adds up runs
of sorted entries, and then fills what is not filled yet. A row's entries are cut into *units* of
``chunk``, counted from its first; the sums of a row with several units are added up by the thread
that ends the last of them, in the order of ``_segment_cuda``.

``scratch`` holds, in parts of ``scratch_part(n)``: a mark for each place in the order (its entry,
and whether a unit begins or ends there), the row, where the row begins, at those places where it
ends, and counters of the units that have ended.
"""

from __future__ import annotations

import functools

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.kernels._rows import bounded, window
from rtxarr.kernels._segment_cuda import JOIN_BLOCK, OPERATIONS, _divide, _keep, first_slot
from rtxarr.kernels._vector import access, by_offset, each, lift, packed
from rtxarr.kernels.segment import identity

# Blocks that sort: threads, and entries that each takes. A digit has so many bits that each of its
# values finds a thread.
SORTS = ((8, 2), (4, 8)) if _SIMULATING else ((512, 4), (512, 16))
_LANES, DIGIT_BITS = (4, 2) if _SIMULATING else (32, 8)
# Rows whose loads a thread has under way together, and threads that add up.
AT_ONCE, SUM_THREADS = (2, 8) if _SIMULATING else (8, 256)
# Rows of the result that it fills.
ROWS_EACH = 2 if _SIMULATING else 8
_AHEAD = 2 * AT_ONCE  # marks that are read beyond the last
_BEGINS, _ENDS, _LONG = 1 << 28, 1 << 29, 1 << 30
_ENTRY = _BEGINS - 1
_U = np.uint32


def scratch_part(n_entries: int) -> int:
    """Give the size of a part of ``scratch``."""
    return n_entries + _AHEAD


if _SIMULATING:  # which has no warps

    def _ballot(shared, flag):
        t = cuda.threadIdx.x
        shared[t] = flag
        cuda.syncthreads()
        first = t // _LANES * _LANES
        mask = sum(int(shared[first + i]) << i for i in range(_LANES))
        cuda.syncthreads()
        return mask

    def _meet():
        cuda.syncthreads()

else:

    @cuda.jit(device=True)
    def _ballot(shared, flag):
        """Return a word with a bit for each thread of the warp."""
        return _U(cuda.ballot_sync(0xFFFFFFFF, flag))

    @cuda.jit(device=True)
    def _meet():
        """Wait for the threads of the warp."""
        cuda.syncwarp()


@cuda.jit(device=True)
def _highest(mask):
    return _U(_U(31) - _U(cuda.clz(mask)))


@functools.cache
def fill_and_sort(op: str, dtype: np.dtype, wide: bool, chunk: int, threads: int, per_thread: int):
    """Return the kernel ``(index, out, scratch, n_counters, n_rows, n_passes, n_each)``.

    It sorts up to ``threads * per_thread`` entries, by a digit of ``DIGIT_BITS`` in each pass.
    ``n_each`` is ``per_thread``, which the compiler must not know: loops that it unrolls take
    longer to read than to run.
    """
    width, scalar, _, store, _ = access(dtype, wide=wide)
    nothing = (scalar(identity(op, dtype)),) * width
    n_digits, most = 1 << DIGIT_BITS, threads * per_thread
    warps = threads // _LANES
    entry_bits = (most - 1).bit_length()
    every = (1 << 32) - 1
    size, n_some = max(most, warps * n_digits), min(8, warps)

    @cuda.jit(device=True)
    def digit_of(word, shift):
        return _U(_U(word >> _U(shift)) & _U(n_digits - 1))

    @cuda.jit(device=True)
    def same_digit(votes, digit):
        """Return a word with a bit for each thread of the warp that has this digit."""
        same = _U((1 << _LANES) - 1)
        for i in range(DIGIT_BITS):
            flag = _U(digit & _U(1 << i)) != _U(0)
            others = _U(_ballot(votes, flag))
            same = _U(same & (others if flag else _U(others ^ _U(every))))
        return same

    @cuda.jit(device=True)
    def turn(numbers, last):
        """Move numbers down by one, and put another at their end: registers have no index."""
        for k in range(per_thread - 1):
            numbers[k] = numbers[k + 1]
        numbers[per_thread - 1] = last

    @cuda.jit(device=True)
    def sort(index, scratch, n_rows, n_passes, n_each):
        # First the counts of each warp and digit, then entries that change places.
        shared = cuda.shared.array(size, _U)
        sums = cuda.shared.array(threads, _U)
        lasts = cuda.shared.array(warps, np.int32)
        words, places = cuda.local.array(per_thread, _U), cuda.local.array(per_thread, _U)
        t, n = cuda.threadIdx.x, index.size
        warp, lane, n_warps = t // _LANES, t % _LANES, cuda.blockDim.x // _LANES
        first = _U(warp * _LANES * per_thread + lane)
        up_to_here = _U(_U(every) >> _U(31 - lane))
        below = _U(up_to_here >> _U(1))
        counts_of_warp = _U(warp * n_digits)
        some = cuda.local.array(n_some, _U)
        if lane == 0:
            lasts[warp] = np.int32(-1)
        for k in range(per_thread):
            # What is not there comes last.
            i, word = np.int64(first + _U(k * _LANES)), np.int64(every)
            if i < n:
                row = np.int64(index[i])
                row = row if row >= 0 and row < n_rows else np.int64(n_rows)
                word = row << entry_bits | i
            words[k] = _U(word)

        for digit_number in range(n_passes):
            shift = entry_bits + digit_number * DIGIT_BITS
            for j in range(t, warps * n_digits, threads):
                shared[j] = _U(0)
            cuda.syncthreads()  # all counts are zero
            for _ in range(n_each):
                digit = digit_of(words[0], shift)
                same = same_digit(sums, digit)
                before, at = _U(cuda.popc(_U(same & below))), _U(counts_of_warp + digit)
                seen = shared[at]
                _meet()  # all have read
                if before == _U(0):
                    shared[at] = _U(seen + _U(cuda.popc(same)))
                _meet()  # the first of each digit have written
                turn(words, words[0])
                turn(places, _U(seen + before))
            cuda.syncthreads()  # all counts are in place
            total = _U(0)
            if t < n_digits:
                for other in range(0, n_warps, n_some):
                    for k in range(n_some):
                        total = _U(total + shared[(other + k) * n_digits + t])
                sums[t] = total
            cuda.syncthreads()  # the counts of all digits are in place
            step = 1
            while step < min(n_digits, cuda.blockDim.x):
                lower = sums[t - step] if t >= step and t < n_digits else _U(0)
                cuda.syncthreads()  # all have read them
                if t < n_digits:
                    sums[t] = _U(sums[t] + lower)
                cuda.syncthreads()  # the longer sums are in place
                step *= 2
            if t < n_digits:
                begins = _U(sums[t] - total)
                for other in range(0, n_warps, n_some):
                    for k in range(n_some):
                        some[k] = shared[(other + k) * n_digits + t]
                    for k in range(n_some):
                        shared[(other + k) * n_digits + t] = begins
                        begins = _U(begins + some[k])
            cuda.syncthreads()  # where those of each warp and digit begin is in place
            for k in range(per_thread):
                begins = shared[_U(counts_of_warp + digit_of(words[k], shift))]
                places[k] = _U(places[k] + begins)
            cuda.syncthreads()  # all have read what is overwritten
            for k in range(per_thread):
                shared[places[k]] = words[k]
            cuda.syncthreads()  # all are in their places
            for k in range(per_thread):
                words[k] = shared[_U(first + _U(k * _LANES))]
            cuda.syncthreads()  # all have read them before counts overwrite them

        # In 32 bits and without signs, which takes a fraction of the instructions.
        m, n_here, end = _U(scratch_at(n)), _U(n), _U(n - 1)
        # Whether a place is its row's first, and its last: a bit for each k.
        are_first, are_last = _U(0), _U(0)
        for k in range(per_thread):  # no branches around the loads
            place, row = _U(first + _U(k * _LANES)), _U(words[k] >> _U(entry_bits))
            lower = _U(place - _U(1)) if place > _U(0) else place
            upper = _U(place + _U(1)) if place < _U(most - 1) else place
            before, after = _U(shared[lower] >> _U(entry_bits)), _U(shared[upper] >> _U(entry_bits))
            is_first = ((place == _U(0)) | (before != row)) & (place < n_here)
            is_last = (place == end) | (after != row)
            are_first = _U(are_first | (_U(1 << k) if is_first else _U(0)))
            are_last = _U(are_last | (_U(1 << k) if is_last else _U(0)))
        if are_first != _U(0):
            last = _U(first + _highest(are_first) * _U(_LANES))
            cuda.atomic.max(lasts, warp, np.int32(last))  # of integers: in any order
        cuda.syncthreads()  # where the last row of each warp begins is in place
        begun = _U(0)
        for other in range(warp):
            begun = _U(lasts[other]) if lasts[other] >= 0 else begun
        for k in range(n_each):
            place, word = _U(first + _U(k * _LANES)), words[0]
            turn(words, word)
            flag = _U(are_first & _U(_U(1) << _U(k))) != _U(0)
            heads, base = _U(_ballot(sums, flag)), _U(place - _U(lane))
            to_here, before = _U(heads & up_to_here), _U(heads & below)
            start = _U(base + _highest(to_here)) if to_here != _U(0) else begun
            if place < n_here:
                ends = _U(are_last & _U(_U(1) << _U(k))) != _U(0)
                nth = _U(place - start)
                of_unit = _U(nth % _U(chunk))
                full = of_unit == _U(chunk - 1)
                mark = _U(word & _U((1 << entry_bits) - 1))
                mark = _U(mark | (_U(_BEGINS) if of_unit == _U(0) else _U(0)))
                mark = _U(mark | (_U(_ENDS) if full or ends else _U(0)))
                is_long = nth >= _U(chunk) or (full and not ends)
                mark = _U(mark | (_U(_LONG) if is_long else _U(0)))
                scratch[place] = np.int32(mark)
                scratch[_U(m + place)] = np.int32(word >> _U(entry_bits))
                scratch[_U(m + m + place)] = np.int32(start)
                if flag and place > _U(0):
                    earlier = _U(base + _highest(before)) if before != _U(0) else begun
                    scratch[_U(m + m + m + earlier)] = np.int32(place)
                if place == end:
                    scratch[_U(m + m + m + start)] = np.int32(n)
            begun = _U(base + _highest(heads)) if heads != _U(0) else begun
        for i in range(n + t, np.int64(m), threads):
            scratch[i] = np.int32(0)

    @bounded(threads)
    def kernel(index, out, scratch, n_counters, n_rows, n_passes, n_each):
        if cuda.blockIdx.x == 0:
            sort(index, scratch, n_rows, n_passes, n_each)
            return
        i = (np.int64(cuda.blockIdx.x) - 1) * threads + cuda.threadIdx.x
        step = (np.int64(cuda.gridDim.x) - 1) * threads
        first_counter = 4 * scratch_at(index.size)
        for j in range(i, n_counters, step):
            scratch[first_counter + j] = np.int32(0)
        for j in range(i * width, out.size, step * width):
            store(out, j, nothing)

    return kernel


scratch_at = cuda.jit(device=True)(scratch_part)


@functools.cache
def mark(chunk: int):
    """Return the kernel ``(order, starts, scratch, n_counters)`` for entries sorted already.

    It writes what :func:`add_up` reads, a thread for each place and each counter.
    """

    @cuda.jit
    def kernel(order, starts, scratch, n_counters):
        place, n = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x, order.size
        m = scratch_at(n)
        if place < n_counters:
            scratch[4 * m + place] = np.int32(0)
        if place >= m:
            return
        if place >= starts[starts.size - 1]:
            scratch[place] = np.int32(0)
            return
        # The last row that begins here or before.
        low, high = np.int64(0), np.int64(starts.size - 2)
        while low < high:
            middle = (low + high + 1) >> 1
            if starts[middle] <= place:
                low = middle
            else:
                high = middle - 1
        start, end = starts[low], starts[low + 1]
        nth = place - start
        of_unit = nth % chunk
        full, ends = of_unit == chunk - 1, place == end - 1
        found = np.int64(order[place])
        found |= _BEGINS if of_unit == 0 else 0
        found |= _ENDS if full or ends else 0
        found |= _LONG if nth >= chunk or (full and not ends) else 0
        scratch[place] = np.int32(found)
        scratch[m + place] = np.int32(low)
        scratch[2 * m + place] = np.int32(start)
        if nth == 0:
            scratch[3 * m + place] = np.int32(end)

    return kernel


@functools.cache
def add_up(op: str, dtype: np.dtype, wide: bool, chunk: int):
    """Return the kernel of the last launch.

    ``(values, scratch, starts, partial, out, n_entries, n_features, n_rows, n_sums)``: neighbouring
    threads (x) take neighbouring features; y and the grid run over runs of places in the first
    ``n_sums`` blocks, and then over rows: those that no entry names are filled.
    """
    width, scalar, _, store, store_sums = access(dtype, wide=wide)
    n_words, word, load, numbers = packed(dtype, wide=wide)
    # Sums that another block has written must not come from the read-only cache.
    sums_type = np.dtype(scalar)
    load_sums = (by_offset(sums_type, width) if wide else access(sums_type, wide=False)).load
    combine = lift(OPERATIONS[op], width)
    finish = each(_divide if op == "mean" else _keep, width, with_number=True)
    zero = scalar(identity(op, dtype))
    nothing, neighbours, per_word = (zero,) * width, window(width), width // n_words
    at_once, n_parts = min(AT_ONCE, chunk), JOIN_BLOCK[1]
    flight = 4 if width > 4 else 8  # sums of units whose loads are under way together
    n_kept, n_flight, n_begins = at_once * n_words, flight * width, ROWS_EACH + 1

    @cuda.jit(device=True)
    def unpack(words, k):
        values = cuda.local.array(width, scalar)
        for i in range(n_words):
            found = numbers(words[k * n_words + i])
            for j in range(per_word):
                values[i * per_word + j] = found[j]
        return neighbours(values, 0)

    @cuda.jit(device=True)
    def join(partial, first, count, n_features):
        """Add up the sums of units: of every ``n_parts``-th, and then those."""
        found, units = cuda.local.array(n_flight, scalar), cuda.local.array(flight, np.int32)
        sums, total = nothing, nothing
        unit, part = np.int32(0), np.int32(0)
        for done in range(0, count, flight):
            for k in range(flight):  # no branch around the loads
                units[k] = unit
                loaded = load_sums(partial, first + (unit if done + k < count else 0) * n_features)
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

    @cuda.jit(device=True)
    def fill(starts, out, first, n_features):
        """Fill those of a group's rows that no entry names."""
        begins = cuda.local.array(n_begins, np.int32)
        for k in range(n_begins):  # no branch around the loads
            begins[k] = starts[min(first + k, starts.size - 1)]
        for feature in range(cuda.threadIdx.x * width, n_features, cuda.blockDim.x * width):
            for k in range(n_begins - 1):
                if first + k < starts.size - 1 and begins[k] == begins[k + 1]:
                    store(out, (first + k) * n_features + feature, nothing)

    @bounded(SUM_THREADS)
    def kernel(
        values, scratch, starts, partial, out, n_entries, n_features, n_rows, n_sums
    ):  # fmt: skip
        if cuda.blockIdx.x >= n_sums:
            group = (np.int64(cuda.blockIdx.x) - n_sums) * cuda.blockDim.y + cuda.threadIdx.y
            fill(starts, out, group * ROWS_EACH, n_features)
            return
        rows = cuda.local.array(n_kept, word)
        marks, coming = cuda.local.array(at_once, np.int32), cuda.local.array(at_once, np.int32)
        m, pieces = scratch_at(n_entries), n_features // width
        begin = (np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y) * at_once
        end = min(begin + at_once, n_entries)
        if begin >= n_entries:
            return
        feature = np.int64(cuda.threadIdx.x * width)
        while feature < n_features:
            place, since, active, total = begin, begin, False, nothing
            for k in range(at_once):
                marks[k] = scratch[place + k]
            while True:
                flags, needed = np.int32(0), active
                for k in range(at_once):
                    flags |= marks[k]
                    needed = needed or (place + k < end and marks[k] & _BEGINS != 0)
                if not needed:
                    break  # what is left belongs to a unit that began before
                for k in range(at_once):
                    row = np.int64(marks[k] & _ENTRY)
                    found = load(values, row * n_features + feature)
                    for i in range(n_words):
                        rows[k * n_words + i] = found[i]
                for k in range(at_once):
                    coming[k] = scratch[place + at_once + k]
                if active and flags < _BEGINS:  # the middle of a unit
                    for k in range(at_once):
                        total = combine(total, unpack(rows, k))
                        marks[k] = coming[k]
                    place += at_once
                    continue
                # Units of no more than one row with several of them end among these.
                ended, at = np.int32(0), place
                # The compiler must not know how often: unrolled, it takes longer to read.
                for here in range(place, place + min(at_once, n_rows * at_once)):
                    mark = marks[0]
                    if here < end and mark & _BEGINS != 0:
                        active, total, since = True, nothing, here
                    if active:
                        total = combine(total, unpack(rows, 0))
                        if mark & _ENDS != 0:
                            active = False
                            if mark & _LONG != 0:
                                start = np.int64(scratch[2 * m + here])
                                slot = first_slot(start, chunk) + (here - start) // chunk
                                store_sums(partial, slot * n_features + feature, total)
                                ended, at = np.int32(ended + 1), here
                            else:
                                row = np.int64(scratch[m + here])
                                if row < n_rows:
                                    result = finish(total, scalar(here + 1 - since))
                                    store(out, row * n_features + feature, result)
                    for k in range(at_once - 1):
                        marks[k] = marks[k + 1]
                    for k in range(n_kept - n_words):
                        rows[k] = rows[k + n_words]
                if ended > 0:
                    start = np.int64(scratch[2 * m + at])
                    n_of_row, slot = scratch[3 * m + start] - start, first_slot(start, chunk)
                    n_units = (n_of_row + chunk - 1) // chunk
                    cuda.threadfence()  # the sums are written before they are counted
                    counter = 4 * m + slot * pieces + feature // width
                    earlier = cuda.atomic.add(scratch, counter, ended)
                    row = np.int64(scratch[m + at])
                    if earlier + ended == n_units and row < n_rows:
                        cuda.threadfence()  # and read after that
                        whole = join(partial, slot * n_features + feature, n_units, n_features)
                        result = finish(whole, scalar(n_of_row))
                        store(out, row * n_features + feature, result)
                for k in range(at_once):
                    marks[k] = coming[k]
                place += at_once
            feature += cuda.blockDim.x * width

    return kernel
