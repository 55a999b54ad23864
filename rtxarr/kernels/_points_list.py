"""The nearest points of one query, kept in the registers of a thread by GPU code.

A list is a tuple of squared distances and one of numbers, sorted by distance and then by number.
All its entries have constant places, which a loop in numba would not give them; so its functions
are written out by the compiler's builder.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from rtxarr._device import _SIMULATING, cuda, intrinsic, types

# The number of an entry that holds no point.
NONE = 2**31 - 1


class List(NamedTuple):
    """What a kernel does with lists of a given length.

    Attributes
    ----------
    start : device function
        ``start(n_unused, limit)`` gives a list without points: its first entries are never
        replaced, the others by points up to the squared distance ``limit``.
    insert : device function
        ``insert(distances, numbers, d, i)`` gives the list with a point more, and without the
        last entry.
    write : device function
        ``write(distances, numbers, n_unused, base, best_d, best_i)`` writes what was found from
        ``base`` on, and gives how many points that are.
    """

    start: object
    insert: object
    write: object


if _SIMULATING:

    @functools.cache
    def of_length(n: int, dtype: np.dtype) -> List:
        """Return the functions for lists of ``n`` entries."""
        scalar = np.dtype(dtype).type

        def start(n_unused, limit):
            distances = [scalar(-1)] * n_unused + [scalar(limit)] * (n - n_unused)
            return tuple(distances), (np.int32(NONE),) * n

        def insert(distances, numbers, d, i):
            entries = sorted([*zip(distances, numbers, strict=True), (d, i)])
            return tuple(zip(*entries[:n], strict=True))

        def write(distances, numbers, n_unused, base, best_d, best_i):
            found = 0
            for d, i in list(zip(distances, numbers, strict=True))[n_unused:]:
                if i != NONE:
                    best_d[base + found], best_i[base + found] = d, i
                    found += 1
            return np.int64(found)

        return List(start, insert, write)

    def words(dtype):
        """Return ``number_of(word)`` and ``word_of(number)``: an integer as the bits of a float."""
        scalar = np.dtype(dtype).type
        whole = np.int32 if scalar is np.float32 else np.int64
        return lambda word: np.int32(word.view(whole)), lambda number: whole(number).view(scalar)

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    _I32, _I64 = ir.IntType(32), ir.IntType(64)

    @functools.cache
    def of_length(n: int, dtype: np.dtype) -> List:
        """Return the functions for lists of ``n`` entries."""
        name = np.dtype(dtype).name
        scalar = getattr(types, name)
        real = ir.FloatType() if name == "float32" else ir.DoubleType()
        both = types.Tuple((types.UniTuple(scalar, n), types.UniTuple(types.int32, n)))

        def parts(builder, value):
            return [builder.extract_value(value, j) for j in range(n)]

        def pair(context, builder, distances, numbers):
            made = [
                context.make_tuple(builder, kind, entries)
                for kind, entries in zip(both.types, (distances, numbers), strict=True)
            ]
            return context.make_tuple(builder, both, made)

        @intrinsic
        def start(typingctx, n_unused, limit):
            def codegen(context, builder, signature, args):
                n_unused, limit = args
                distances = [
                    builder.select(
                        builder.icmp_signed("<", ir.Constant(_I64, j), n_unused),
                        ir.Constant(real, -1.0),
                        limit,
                    )
                    for j in range(n)
                ]
                return pair(context, builder, distances, [ir.Constant(_I32, NONE)] * n)

            return both(types.int64, scalar), codegen

        @intrinsic
        def insert(typingctx, distances, numbers, d, i):
            def codegen(context, builder, signature, args):
                distances, numbers = (parts(builder, value) for value in args[:2])
                new = args[2:]
                out, earlier = [], None
                for entry in zip(distances, numbers, strict=True):
                    # Whether the new one comes before this entry; none waits for another's answer.
                    same = builder.fcmp_ordered("==", new[0], entry[0])
                    lower = builder.and_(same, builder.icmp_signed("<", new[1], entry[1]))
                    before = builder.or_(builder.fcmp_ordered("<", new[0], entry[0]), lower)
                    moved = new
                    if earlier is not None:
                        moved = [
                            builder.select(earlier[0], last, value)
                            for last, value in zip(earlier[1], new, strict=True)
                        ]
                    pieces = zip(moved, entry, strict=True)
                    out.append([builder.select(before, *piece) for piece in pieces])
                    earlier = before, entry
                return pair(context, builder, *zip(*out, strict=True))

            return both(*both.types, scalar, types.int32), codegen

        @intrinsic
        def write(typingctx, distances, numbers, n_unused, base, best_d, best_i):
            def codegen(context, builder, signature, args):
                distances, numbers = (parts(builder, value) for value in args[:2])
                n_unused, base = args[2:4]
                targets = [
                    context.make_array(kind)(context, builder, value).data
                    for kind, value in zip(signature.args[4:], args[4:], strict=True)
                ]
                start = builder.sub(base, n_unused)
                count = ir.Constant(_I64, 0)
                for j, (d, i) in enumerate(zip(distances, numbers, strict=True)):
                    found = builder.and_(
                        builder.icmp_signed("<=", n_unused, ir.Constant(_I64, j)),
                        builder.icmp_signed("!=", i, ir.Constant(_I32, NONE)),
                    )
                    count = builder.add(count, builder.zext(found, _I64))
                    with builder.if_then(found):
                        place = [builder.add(start, ir.Constant(_I64, j))]
                        builder.store(d, builder.gep(targets[0], place))
                        builder.store(builder.sext(i, _I64), builder.gep(targets[1], place))
                return count

            signature = types.int64(*both.types, types.int64, types.int64, best_d, best_i)
            return signature, codegen

        return List(start, insert, write)

    def _bits(source, target, llvm_type):
        """Return an intrinsic that takes the bits of a number for one of another type."""

        @intrinsic
        def convert(typingctx, value):
            def codegen(context, builder, signature, args):
                return builder.bitcast(args[0], llvm_type)

            return target(source), codegen

        return convert

    @functools.cache
    def words(dtype: np.dtype):
        """Return ``number_of(word)`` and ``word_of(number)``: an integer as the bits of a float."""
        name, size = np.dtype(dtype).name, np.dtype(dtype).itemsize
        whole, real = (types.int32, types.float32) if size == 4 else (types.int64, types.float64)
        number = np.int32 if size == 4 else np.int64
        to_whole = _bits(real, whole, ir.IntType(8 * size))
        to_real = _bits(whole, real, ir.FloatType() if name == "float32" else ir.DoubleType())

        @cuda.jit(device=True)
        def number_of(word):
            return np.int32(to_whole(word))

        @cuda.jit(device=True)
        def word_of(value):
            return to_real(number(value))

        return number_of, word_of
