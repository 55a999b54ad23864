"""GPU kernels that go through many arrays in one launch.

The arrays are known by their addresses. ``words``, int64, has a column of ``n_rows`` addresses for
each role that an array plays, then a column of sizes. A block takes ``CHUNK`` elements of one row:
``blocks[b]`` is the row, times 2**32, plus the number of the chunk.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from rtxarr._device import cuda
from rtxarr.dtypes import accumulator
from rtxarr.kernels._vector import by_address
from rtxarr.kernels.multi_tensor import CHUNK, FOUND, THREADS

LOW = 2**32 - 1


def width_of(*dtypes: np.dtype) -> int:
    """Return how many neighbours one access of at most 16 bytes may take of all the types."""
    sizes = [np.dtype(dtype).itemsize for dtype in dtypes]
    return 1 if max(sizes) > 4 else 16 // min(sizes)


def read(count: int):
    """Return the device function that gives ``numbers[at : at + count]`` as a tuple."""
    last = count - 1
    if count == 1:

        @cuda.jit(device=True)
        def first(numbers, at):
            return (numbers[at],)

        return first
    rest = read(last)

    @cuda.jit(device=True)
    def numbers_at(numbers, at):
        return rest(numbers, at) + (numbers[at + last],)  # noqa: RUF005

    return numbers_at


def lift(update, width: int):
    """Return ``update(p, g, a, b, c, n)`` over tuples of ``width`` of all but ``n``."""
    last = width - 1
    if width == 1:

        @cuda.jit(device=True)
        def first(p, g, a, b, c, n):
            p0, a0, b0, c0 = update(p[0], g[0], a[0], b[0], c[0], n)
            return (p0,), (a0,), (b0,), (c0,)

        return first
    rest = lift(update, last)

    @cuda.jit(device=True)
    def lifted(p, g, a, b, c, n):
        ps, as_, bs, cs = rest(p, g, a, b, c, n)
        p0, a0, b0, c0 = update(p[last], g[last], a[last], b[last], c[last], n)
        return ps + (p0,), as_ + (a0,), bs + (b0,), cs + (c0,)  # noqa: RUF005

    return lifted


def fold(combine, width: int):
    """Return the device function ``(total, x)`` that combines the ``width`` values of ``x``."""
    last = width - 1
    if width == 1:

        @cuda.jit(device=True)
        def first(total, x):
            return combine(total, x[0])

        return first
    rest = fold(combine, last)

    @cuda.jit(device=True)
    def folded(total, x):
        return combine(rest(total, x), x[last])

    return folded


@cuda.jit(device=True)
def chunk_of(words, sizes_at, block):
    """Return the row of a block and the range of its elements."""
    row = block >> 32
    start = (block & LOW) * CHUNK
    return row, start, min(start + CHUNK, words[sizes_at + row])


@cuda.jit(device=True)
def wide_until(addresses, start, stop, width):
    """Return where accesses of ``width`` elements end: at once if an address is not aligned."""
    if width == 1 or addresses & 15:
        return start
    return stop - (stop - start) % width


def walk(update, n_states: int, target: np.dtype, source: np.dtype, *, reads_target: bool = True):
    """Return the device function that applies ``update`` to all elements of a block.

    Parameters
    ----------
    update : device function
        ``update(p, g, a, b, c, n)`` gives the new ``p``, ``a``, ``b`` and ``c`` from an element
        of the target, the source and up to three arrays of state, and the numbers ``n``.
    n_states : int
        How many of ``a``, ``b``, ``c`` there are; the others are copies of ``p``.
    target, source : dtype
        State is of the type that ``target`` is accumulated in.
    reads_target : bool
        Otherwise ``p`` is a copy of ``g``.
    """
    state = accumulator(target)
    n_columns = 2 + n_states

    def access(width):
        load_p, store_p = by_address(target, width)[1:]
        load_g = by_address(source, width)[1]
        load_s, store_s = by_address(state, width)[1:]
        return load_p, store_p, load_g, load_s, store_s, lift(update, width)

    def pass_over(width):
        load_p, store_p, load_g, load_s, store_s, apply = access(width)
        p_bytes, g_bytes, s_bytes = (
            np.int64(np.dtype(t).itemsize) for t in (target, source, state)
        )

        @cuda.jit(device=True)
        def run(p_at, g_at, a_at, b_at, c_at, i, stop, n):
            while i < stop:
                g = load_g(g_at + i * g_bytes)
                p = load_p(p_at + i * p_bytes) if reads_target else g
                a = load_s(a_at + i * s_bytes) if n_states > 0 else p
                b = load_s(b_at + i * s_bytes) if n_states > 1 else p
                c = load_s(c_at + i * s_bytes) if n_states > 2 else p
                p, a, b, c = apply(p, g, a, b, c, n)
                store_p(p_at + i * p_bytes, p)
                if n_states > 0:
                    store_s(a_at + i * s_bytes, a)
                if n_states > 1:
                    store_s(b_at + i * s_bytes, b)
                if n_states > 2:
                    store_s(c_at + i * s_bytes, c)
                i += cuda.blockDim.x * width

        return run

    width = width_of(target, source, state)
    wide, narrow = pass_over(width), pass_over(1)

    @cuda.jit(device=True)
    def go(words, n_rows, block, n):
        row, start, stop = chunk_of(words, n_columns * n_rows, block)
        p_at, g_at = words[row], words[n_rows + row]
        a_at = words[2 * n_rows + row] if n_states > 0 else p_at
        b_at = words[3 * n_rows + row] if n_states > 1 else p_at
        c_at = words[4 * n_rows + row] if n_states > 2 else p_at
        middle = wide_until(p_at | g_at | a_at | b_at | c_at, start, stop, width)
        if width > 1:
            wide(p_at, g_at, a_at, b_at, c_at, start + cuda.threadIdx.x * width, middle, n)
        narrow(p_at, g_at, a_at, b_at, c_at, middle + cuda.threadIdx.x, stop, n)

    return go


def accumulate(combine, source: np.dtype):
    """Return the device function that folds each thread's elements of a block, in order."""
    scalar = np.dtype(accumulator(source)).type
    g_bytes = np.int64(np.dtype(source).itemsize)
    width = width_of(source)

    def pass_over(width):
        load, folded = by_address(source, width).load, fold(combine, width)

        @cuda.jit(device=True)
        def run(total, g_at, i, stop):
            while i < stop:
                total = folded(total, load(g_at + i * g_bytes))
                i += cuda.blockDim.x * width
            return total

        return run

    wide, narrow = pass_over(width), pass_over(1)

    @cuda.jit(device=True)
    def go(words, n_rows, block):
        row, start, stop = chunk_of(words, n_rows, block)
        g_at = words[row]
        middle = wide_until(g_at, start, stop, width)
        total = scalar(0)
        if width > 1:
            total = wide(total, g_at, start + cuda.threadIdx.x * width, middle)
        return narrow(total, g_at, middle + cuda.threadIdx.x, stop)

    return go


@cuda.jit(device=True)
def _add_square(total, x):
    return cuda.fma(x, x, total)


def note_not_finite(scalar):
    """Return the device function that gives 1 instead of ``total`` if ``x`` is not finite."""
    one, largest = scalar(1), np.finfo(scalar).max

    @cuda.jit(device=True)
    def note(total, x):
        return total if abs(x) <= largest else one  # also when x is NaN

    return note


def block_sum(scalar):
    """Return the device function that adds up ``shared``, a value a thread, pairwise."""

    @cuda.jit(device=True)
    def total_of(shared):
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()  # the sums of the last round, or the threads' own, are in place
            if cuda.threadIdx.x < half:
                shared[cuda.threadIdx.x] += shared[cuda.threadIdx.x + half]
            half >>= 1
        return shared[0]  # thread 0 has written it itself

    return total_of


@functools.cache
def squares(source: np.dtype):
    """Return the kernel that sums the squares of each block into ``partial[first + block]``."""
    go, scalar = accumulate(_add_square, source), np.dtype(accumulator(source)).type
    total_of = block_sum(scalar)

    @cuda.jit
    def sums(words, n_rows, blocks, partial, first):
        shared = cuda.shared.array(THREADS, scalar)
        shared[cuda.threadIdx.x] = go(words, n_rows, blocks[cuda.blockIdx.x])
        total = total_of(shared)
        if cuda.threadIdx.x == 0:
            partial[first + cuda.blockIdx.x] = total

    return sums


@functools.cache
def finish_norm(dtype: np.dtype):
    """Return the kernel, of one block, that makes the norm and the factor of ``partial``."""
    scalar = np.dtype(dtype).type
    total_of, one, tiny = block_sum(scalar), scalar(1), scalar(1e-6)

    @cuda.jit
    def finish(partial, max_norm, out):
        shared = cuda.shared.array(THREADS, scalar)
        total = scalar(0)
        for i in range(cuda.threadIdx.x, partial.size, THREADS):
            total += partial[i]
        shared[cuda.threadIdx.x] = total
        total = total_of(shared)
        if cuda.threadIdx.x == 0:
            norm = math.sqrt(total)
            factor = max_norm / (norm + tiny)
            out[0] = norm
            out[1] = one if factor > one else factor  # NaN stays

    return finish


@functools.cache
def check(source: np.dtype):
    """Return the kernel that sets ``state[FOUND + slot]`` if an element is not finite."""
    scalar = np.dtype(accumulator(source)).type
    go, zero = accumulate(note_not_finite(scalar), source), scalar(0)

    @cuda.jit
    def find(words, n_rows, blocks, state, slot):
        if go(words, n_rows, blocks[cuda.blockIdx.x]) != zero:
            state[FOUND + slot] = np.float32(1)  # whichever thread does it

    return find


@cuda.jit(device=True)
def _times(p, g, a, b, c, n):
    return g * n[0], a, b, c


@functools.cache
def scale(dtype: np.dtype, *, inverse: bool):
    """Return the kernel that gives the targets the sources times ``factor[at]``, or over it."""
    go = walk(_times, 0, dtype, dtype, reads_target=False)
    scalar = np.dtype(accumulator(dtype)).type
    one = scalar(1)

    @cuda.jit
    def multiply(words, n_rows, blocks, factor, at):
        by = scalar(factor[at])
        go(words, n_rows, blocks[cuda.blockIdx.x], (one / by if inverse else by,))

    return multiply


@functools.cache
def update_scale():
    """Return the kernel, of one thread, that moves the loss scale on; see ``optim.LossScaler``."""
    zero, one, largest = np.float32(0), np.float32(1), np.finfo(np.float32).max

    @cuda.jit
    def move(state, growth, backoff, interval):
        if cuda.grid(1) > 0:
            return
        found = False
        for slot in range(FOUND, state.size):
            found = found or state[slot] != zero
            state[slot] = zero
        scale, n_good = state[0], state[1] + one
        if found:
            scale, n_good = scale * backoff, zero
        elif n_good >= interval:
            scale, n_good = min(scale * growth, largest), zero
        state[0] = scale
        state[1] = n_good

    return move


@cuda.jit(device=True)
def _mean(p, g, a, b, c, n):
    return cuda.fma(n[0], p, n[1] * g), a, b, c


@functools.cache
def average(target: np.dtype, source: np.dtype):
    """Return the kernel that moves the targets to ``numbers[0] * target + numbers[1] * source``."""
    go, numbers_at = walk(_mean, 0, target, source), read(2)

    @cuda.jit
    def move(words, n_rows, blocks, numbers):
        go(words, n_rows, blocks[cuda.blockIdx.x], numbers_at(numbers, 0))

    return move
