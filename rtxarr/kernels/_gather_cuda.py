"""GPU kernels that reduce, for each row of a result, functions of the rows it gathers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda
from rtxarr.dtypes import accumulator
from rtxarr.kernels._product_cuda import others
from rtxarr.kernels._rows import bounded
from rtxarr.kernels._vector import by_offset, maximum, minimum

# Threads of a block at most.
THREADS = 16 if _SIMULATING else 256


class Types(NamedTuple):
    """Element types of the arrays of a kernel; those of arrays that it does not read are None.

    Attributes
    ----------
    x : dtype
        Of the rows that are gathered.
    own : dtype
        Of the row of the result's own place.
    extra : dtype
        Of the factors, of the second rows that are gathered or, with "share", of the gradient.
    out : dtype
    """

    x: Any
    own: Any
    extra: Any
    out: Any


@cuda.jit(device=True)
def _same(a, b):
    return (a == b) | ((a != a) & (b != b))  # NaN is like NaN


@functools.cache
def _combination(kind: str, width: int, dtype: Any):
    """Return ``combine(total, mine, row, factor, place, extra)``, for ``width`` features.

    ``dtype`` is that of ``extra``. ``total`` changes in place.
    """
    if kind == "sum":

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            for i in range(width):
                total[i] += row[i]

    elif kind in ("weighted", "scaled"):

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            for i in range(width):
                total[i] += factor * row[i]

    elif kind in ("max", "min"):
        choose = maximum if kind == "max" else minimum

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            for i in range(width):
                total[i] = choose(total[i], row[i])

    elif kind == "squares":

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            for i in range(width):
                deviation = row[i] - mine[i]
                total[i] += deviation * deviation

    elif kind == "ties":

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            for i in range(width):
                if _same(row[i], mine[i]):
                    total[i] += factor  # which is one

    elif kind == "matched":
        load, _ = by_offset(dtype, width)

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            found = False
            for i in range(width):
                found = found | _same(row[i], mine[i])
            if found:  # few are, and the values of others are not read
                values = load(extra, place)
                for i in range(width):
                    if _same(row[i], mine[i]):
                        total[i] += values[i]

    elif kind == "others":
        (load, _), without = by_offset(dtype, width), others(np.dtype(dtype).type)

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            codes = load(extra, place)
            for i in range(width):
                total[i] += without(row[i], codes[i], mine[i])

    else:
        load, _ = by_offset(dtype, width)

        @cuda.jit(device=True)
        def combine(total, mine, row, factor, place, extra):
            other = load(extra, place)
            for i in range(width):
                total[i] += row[i] * (mine[i] - other[i])

    return combine


@functools.cache
def _finish(kind: str, width: int, dtype: Any, scalar: type):
    """Return ``finish(total, count, mine, empty, place, extra)``, which changes ``total``."""
    one = scalar(1)
    if kind == "mean":

        @cuda.jit(device=True)
        def finish(total, count, mine, empty, place, extra):
            divisor = scalar(max(count, 1))
            for i in range(width):
                total[i] /= divisor

    elif kind == "share":
        load, _ = by_offset(dtype, width)

        @cuda.jit(device=True)
        def finish(total, count, mine, empty, place, extra):
            whole = load(extra, place)
            for i in range(width):
                total[i] = whole[i] / max(total[i], one)

    elif kind == "biased":

        @cuda.jit(device=True)
        def finish(total, count, mine, empty, place, extra):
            for i in range(width):
                total[i] += mine[i]

    elif kind == "filled":

        @cuda.jit(device=True)
        def finish(total, count, mine, empty, place, extra):
            if count == 0:
                for i in range(width):
                    total[i] = empty

    else:

        @cuda.jit(device=True)
        def finish(total, count, mine, empty, place, extra):
            pass

    return finish


@functools.cache
def reduction(
    kind: str,
    end: str,
    width: int,
    types: Types,
    *,
    gathered: bool,
    ordered: bool = False,
    headed: bool = False,
):
    """Return the kernel of one operation.

    Parameters
    ----------
    kind : str
        What is added up for each entry ``j`` of an item, with ``s = pointers[j]``: "sum", ``x[s]``;
        "weighted", ``x[s]`` times the factor of the edge and head; "scaled", ``x[s] * extra[s]``;
        "squares", ``(x[s] - own) ** 2``; "ties", 1 where ``x[s]`` is ``own``; "matched",
        ``extra[s]`` where it is; "difference", ``x[s] * (own - extra[s])``; "others", the product
        of which ``x[s]`` is the number and ``extra[s]`` the code, without its factor ``own``. "max"
        and "min" of ``x[s]``.
    end : str
        What becomes of the total of a row: "mean" divides by the number of entries, "share" gives
        ``extra`` of the row over it, "filled" gives ``empty`` for rows without entries, "biased"
        adds ``own``, which is then one row for all, "plain" leaves it.
    width : int
        Neighbouring features of a thread.
    gathered : bool
        False takes the entries themselves as ``s``; ``pointers`` are then those of the rows.
    ordered : bool
        The factor of entry ``j`` is that of edge ``order[j]``, not ``j``.
    headed : bool
        Whether edges have more factors than one, each for ``head_size`` features.

    Notes
    -----
    Arrays are flat and C-contiguous; of those that an operation does not need, it takes any.
    """
    scalar: Any = np.dtype(accumulator(types.x)).type
    load_x, _ = by_offset(types.x, width)
    _, store = by_offset(types.out, width)
    _, store_part = by_offset(scalar, width)
    with_own, weighted, scaled = types.own is not None, kind == "weighted", kind == "scaled"
    biased = end == "biased"
    load_own, _ = by_offset(types.own or scalar, width)
    load_factor, _ = by_offset(types.extra or scalar, 1)
    combine = _combination(kind, width, types.extra or scalar)
    finish = _finish(end, width, types.extra or scalar, scalar)
    neutral = scalar({"max": -np.inf, "min": np.inf}.get(kind, 0))
    nothing, one = (scalar(0),) * width, scalar(1)
    packed = _pack(width)
    # Sums wait for memory: of their registers no more than let six blocks wait together.
    lean = gathered and kind in ("sum", "weighted", "scaled") and scalar is np.float32

    @cuda.jit(device=True)
    def fetch(x, extra, pointers, order, j, feature, n_features, head, n_heads):
        # An unsigned index is not looked at for being negative.
        source = np.int64(pointers[np.uint64(j)]) if gathered else j
        # A product of two numbers of 32 bits, where both are, is one instruction.
        place = source * np.int64(np.int32(n_features)) + feature
        factor = one
        if weighted:
            edge = np.int64(order[np.uint64(j)]) if ordered else j
            factor = load_factor(extra, edge * n_heads + head)[0]
        if scaled:
            factor = load_factor(extra, source)[0]
        return load_x(x, place), factor, place

    @bounded(THREADS, 6 if lean else 1)
    def kernel(
        starts, lengths, rows, n_pieces, pointers, order, x, own, extra, out, parts, n_features,
        n_heads, head_size, empty,
    ):  # fmt: skip
        # Neighbouring threads (x) take neighbouring features; y and the grid run over items.
        item = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
        if item >= starts.size:
            return
        start, row = starts[item], np.int64(rows[item])
        stop = start + lengths[item]
        total = cuda.local.array(width, scalar)
        feature = np.int64(cuda.threadIdx.x) * width
        while feature < n_features:
            at = row * n_features + feature
            head = feature // head_size if headed else np.int64(0)
            mine = load_own(own, feature if biased else at) if with_own else nothing
            for i in range(width):
                total[i] = neutral
            j = start
            while j + 3 < stop:  # four loads in flight
                a, u, p = fetch(x, extra, pointers, order, j, feature, n_features, head, n_heads)
                b, v, q = fetch(
                    x, extra, pointers, order, j + 1, feature, n_features, head, n_heads
                )
                c, w, r = fetch(
                    x, extra, pointers, order, j + 2, feature, n_features, head, n_heads
                )
                d, z, s = fetch(
                    x, extra, pointers, order, j + 3, feature, n_features, head, n_heads
                )
                combine(total, mine, a, u, p, extra)
                combine(total, mine, b, v, q, extra)
                combine(total, mine, c, w, r, extra)
                combine(total, mine, d, z, s, extra)
                j += 4
            if j < stop:  # the last one to three, at once too: the last is read again if need be
                k, m = min(j + 1, stop - 1), min(j + 2, stop - 1)
                a, u, p = fetch(x, extra, pointers, order, j, feature, n_features, head, n_heads)
                b, v, q = fetch(x, extra, pointers, order, k, feature, n_features, head, n_heads)
                c, w, r = fetch(x, extra, pointers, order, m, feature, n_features, head, n_heads)
                combine(total, mine, a, u, p, extra)
                if j + 1 < stop:
                    combine(total, mine, b, v, q, extra)
                if j + 2 < stop:
                    combine(total, mine, c, w, r, extra)
            if item < n_pieces:
                store_part(parts, item * n_features + feature, packed(total))
            else:
                count = stop - start if gathered else pointers[row + 1] - pointers[row]
                finish(total, count, mine, empty, at, extra)
                store(out, at, packed(total))
            feature += np.int64(cuda.blockDim.x) * width

    return kernel


def _pack(width: int):
    """Return the device function that gives an array of ``width`` numbers as a tuple."""
    if width == 1:

        @cuda.jit(device=True)
        def packed(a):
            return (a[0],)

    elif width == 2:

        @cuda.jit(device=True)
        def packed(a):
            return (a[0], a[1])

    elif width == 4:

        @cuda.jit(device=True)
        def packed(a):
            return (a[0], a[1], a[2], a[3])

    else:

        @cuda.jit(device=True)
        def packed(a):
            return (a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])

    return packed
