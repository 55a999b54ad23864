"""Loads and stores of 16 bytes, and half-precision numbers as float32, inside numba kernels.

``access(dtype)`` gives a kernel what it needs to read and write arrays of one element type; the
kernel body then stays the same for all of them. A lane that moves 16 bytes at once reaches the
memory bandwidth, one that moves 4 bytes about half of it.

float16 and bfloat16 arrays are arrays of uint16 inside a kernel (``launch`` sees to it): numba's
own float16 arithmetic calls library functions that a plain kernel is not linked with. All
arithmetic on them is done in float32.

Only kernel files import this module: it imports numba. Loads go through the read-only cache, so
a kernel must not load what another thread of the same launch writes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rtxarr._device import _SIMULATING, cuda, intrinsic, types


class Access(NamedTuple):
    """How a kernel reads and writes arrays of one element type, ``width`` neighbours at a time.

    Attributes
    ----------
    width : int
        Neighbouring elements in one access. Wider than one needs 1-D C-contiguous arrays and
        addresses that are multiples of 16 bytes.
    scalar : type
        NumPy type that sums are kept in: float32 for the half types.
    load : device function
        ``load(array, offset)`` gives ``width`` values of ``scalar``, as a tuple.
    store : device function
        ``store(array, offset, values)`` rounds them to the array's type.
    store_scalars : device function
        The same into an array of ``scalar``.
    """

    width: int
    scalar: type
    load: object
    store: object
    store_scalars: object


@functools.cache
def access(dtype: np.dtype, *, wide: bool) -> Access:
    """Return how to read and write arrays of ``dtype``; 16 bytes at a time if ``wide``.

    Types without a wide form (float64 and the integers) are accessed one by one.
    """
    name = np.dtype(dtype).name
    if name == "float32" and wide:
        return Access(4, np.float32, load4, store4, store4)
    if name == "float16":
        if wide:
            return Access(8, np.float32, load8_f16, store8_f16, store8)
        return Access(1, np.float32, _load_f16, _store_f16, _store)
    if name == "bfloat16":
        if wide:
            return Access(8, np.float32, load8_bf16, store8_bf16, store8)
        return Access(1, np.float32, _load_bf16, _store_bf16, _store)
    return Access(1, np.dtype(dtype).type, _load, _store, _store)


class Packed(NamedTuple):
    """How a kernel keeps a piece as it lies in memory: two numbers of a half type in a register.

    Attributes
    ----------
    n_words, word : int, type
        Registers of a piece of 16 bytes, or of one element, and their NumPy type.
    load : device function
        ``load(array, offset)`` gives them as a tuple.
    numbers : device function
        ``numbers(word)`` gives the one or two numbers of ``scalar`` in it, as a tuple.
    """

    n_words: int
    word: type
    load: object
    numbers: object


@functools.cache
def packed(dtype: np.dtype, *, wide: bool) -> Packed:
    """Return how to keep pieces of ``access(dtype, wide=wide)``."""
    width, scalar, load, _, _ = access(dtype, wide=wide)
    if width == 8:
        return Packed(4, np.uint32, load_words, _numbers_of(np.dtype(dtype).name))

    @cuda.jit(device=True)
    def itself(word):
        return (word,)

    return Packed(width, scalar, load, itself)


class ByAddress(NamedTuple):
    """How a kernel reads and writes memory whose address it knows, ``width`` elements at a time.

    Attributes
    ----------
    n_bytes : int
        Of one element in memory.
    load : device function
        ``load(address)`` gives ``width`` values of ``scalar``, as a tuple. The address is an
        int64, a multiple of ``width * n_bytes`` or of 16.
    store : device function
        ``store(address, values)`` rounds them to the type in memory.
    """

    n_bytes: int
    load: object
    store: object


def by_address(dtype: np.dtype, width: int) -> ByAddress:
    """Return how to read and write ``width`` neighbours of ``dtype`` at an address.

    Wider than one: 4 or 8 of float32, 8 of the half types.
    """
    name = np.dtype(dtype).name
    return ByAddress(np.dtype(dtype).itemsize, _load_at(name, width), _store_at(name, width))


class ByOffset(NamedTuple):
    """How a kernel reads and writes ``width`` neighbours of a 1-D C-contiguous array.

    Attributes
    ----------
    load : device function
        ``load(array, offset)`` gives ``width`` numbers, those of half types as float32, as a
        tuple. The offset is a multiple of ``width``, and the array begins at one of 16 bytes.
    store : device function
        ``store(array, offset, values)`` rounds them to the array's type.
    """

    load: object
    store: object


@functools.cache
def by_offset(dtype: np.dtype, width: int) -> ByOffset:
    """Return how to read and write ``width`` neighbours of ``dtype``, a power of two."""
    if _SIMULATING:
        return ByOffset(*_simulated(np.dtype(dtype).name, width))
    _, load_at, store_at = by_address(dtype, width)

    @cuda.jit(device=True)
    def load(array, offset):
        return load_at(_address_of(array, offset))

    @cuda.jit(device=True)
    def store(array, offset, values):
        store_at(_address_of(array, offset), values)

    return ByOffset(load, store)


if _SIMULATING:
    # The simulator runs Python on NumPy scalars; these do what the PTX below does.

    def _simulated(name, width):
        if name in ("float16", "bfloat16"):
            kind = np.dtype(getattr(ml_dtypes, name, name))
            number, element = (lambda x: _number(x, kind)), (lambda x: _bits(x, kind))
        else:
            number = element = np.dtype(name).type

        def load(array, offset):
            return tuple(number(array[i]) for i in _places(offset, width, width))

        def store(array, offset, values):
            for i, value in zip(_places(offset, width, width), values, strict=True):
                array[i] = element(value)

        return load, store

    def maximum(a, b):
        return np.maximum(a, b)

    def minimum(a, b):
        return np.minimum(a, b)

    def rounded_product(a, b):
        return a * b

    def _memory(address, name, width):
        kind = np.dtype(getattr(ml_dtypes, name, name))
        n_bytes = kind.itemsize * width
        if address % min(n_bytes, 16):
            raise ValueError(f"address {address} is no multiple of {min(n_bytes, 16)}")
        return np.frombuffer((ctypes.c_char * n_bytes).from_address(int(address)), kind)

    def _load_at(name, width):
        scalar = np.float32 if name in ("float16", "bfloat16") else np.dtype(name).type
        return lambda address: tuple(_memory(address, name, width).astype(scalar))

    def _store_at(name, width):
        def store(address, values):
            _memory(address, name, width)[:] = values

        return store

    def _places(offset, n, multiple):
        if offset < 0 or offset % multiple:
            raise ValueError(f"offset {offset} is no multiple of {multiple}")
        return range(int(offset), int(offset) + n)

    def load4(array, offset):
        return tuple(array[i] for i in _places(offset, 4, 4))

    def load_words(array, offset):
        places = _places(offset, 8, 8)[::2]
        return tuple(np.uint32(array[i]) | np.uint32(array[i + 1]) << np.uint32(16) for i in places)

    def _numbers_of(name):
        kind = np.dtype(getattr(ml_dtypes, name, name))
        halves = np.uint32(0), np.uint32(16)
        return lambda word: tuple(_number((word >> n) & np.uint32(0xFFFF), kind) for n in halves)

    def store4(array, offset, values):
        for i, value in zip(_places(offset, 4, 4), values, strict=True):
            array[i] = value

    def store8(array, offset, values):
        for i, value in zip(_places(offset, 8, 4), values, strict=True):
            array[i] = value

    def _number(bits, kind):
        return np.float32(np.uint16(bits).view(kind))

    def _bits(value, kind):
        return np.float32(value).astype(kind).view(np.uint16)

    def f16_to_f32(bits):
        return _number(bits, np.float16)

    def f32_to_f16(value):
        return _bits(value, np.float16)

    def bf16_to_f32(bits):
        return _number(bits, ml_dtypes.bfloat16)

    def f32_to_bf16(value):
        return _bits(value, ml_dtypes.bfloat16)

    def load8_f16(array, offset):
        return tuple(f16_to_f32(array[i]) for i in _places(offset, 8, 8))

    def load8_bf16(array, offset):
        return tuple(bf16_to_f32(array[i]) for i in _places(offset, 8, 8))

    def store8_f16(array, offset, values):
        for i, value in zip(_places(offset, 8, 8), values, strict=True):
            array[i] = f32_to_f16(value)

    def store8_bf16(array, offset, values):
        for i, value in zip(_places(offset, 8, 8), values, strict=True):
            array[i] = f32_to_bf16(value)

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    _F32, _I16, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(64)

    def _convert(text, constraints, numba_types, llvm_types):
        """Return an intrinsic of one operand that is the PTX instruction ``text``."""

        @intrinsic
        def convert(typingctx, value):
            def codegen(context, builder, signature, args):
                kind = ir.FunctionType(llvm_types[0], [llvm_types[1]])
                return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=False), args)

            return numba_types[0](numba_types[1]), codegen

        return convert

    _TO_F32 = "=f,h", (types.float32, types.uint16), (_F32, _I16)
    _FROM_F32 = "=h,f", (types.uint16, types.float32), (_I16, _F32)
    f16_to_f32 = _convert("cvt.f32.f16 $0, $1;", *_TO_F32)
    f32_to_f16 = _convert("cvt.rn.f16.f32 $0, $1;", *_FROM_F32)
    # A bfloat16 is the upper half of a float32.
    bf16_to_f32 = _convert("mov.b32 $0, {0, $1};", *_TO_F32)
    f32_to_bf16 = _convert("cvt.rn.bf16.f32 $0, $1;", *_FROM_F32)
    two_to = _convert("ex2.approx.ftz.f32 $0, $1;", "=f,f", (types.float32,) * 2, (_F32,) * 2)

    def _address(context, builder, array_type, array, offset):
        data = context.make_array(array_type)(context, builder, array).data
        return builder.ptrtoint(builder.gep(data, [offset]), _I64)

    @intrinsic  # type: ignore[misc]
    def _address_of(typingctx, array, offset):
        """Give the address of ``array[offset]``."""

        def codegen(context, builder, signature, args):
            return _address(context, builder, signature.args[0], *args)

        return types.int64(array, types.int64), codegen

    def _wide_load(n, text, register="f"):
        """Return an intrinsic that gives ``n`` float32, or words, from ``array[offset:]``."""
        word, bits = (types.float32, _F32) if register == "f" else (types.uint32, ir.IntType(32))

        @intrinsic
        def load(typingctx, array, offset):
            signature = types.UniTuple(word, n)(array, types.int64)

            def codegen(context, builder, signature, args):
                kind = ir.FunctionType(ir.LiteralStructType([bits] * n), [_I64])
                asm = ir.InlineAsm(kind, text, f"={register}," * n + "l", side_effect=False)
                words = builder.call(asm, [_address(context, builder, signature.args[0], *args)])
                numbers = [builder.extract_value(words, i) for i in range(n)]
                return context.make_tuple(builder, signature.return_type, numbers)

            return signature, codegen

        return load

    def _wide_store(n, text):
        """Return an intrinsic that rounds ``n`` float32 into ``array[offset:offset + n]``."""

        @intrinsic
        def store(typingctx, array, offset, values):
            signature = types.void(array, types.int64, types.UniTuple(types.float32, n))

            def codegen(context, builder, signature, args):
                array, offset, values = args
                kind = ir.FunctionType(ir.VoidType(), [_I64] + [_F32] * n)
                asm = ir.InlineAsm(kind, text, "l" + ",f" * n, side_effect=True)
                address = _address(context, builder, signature.args[0], array, offset)
                numbers = [builder.extract_value(values, i) for i in range(n)]
                builder.call(asm, [address, *numbers])
                return context.get_dummy_value()

            return signature, codegen

        return store

    _I32 = ir.IntType(32)

    def _rounded_product():
        @intrinsic
        def multiply(typingctx, a, b):
            """Multiply, and round before anything is added: it is not fused into ``a * b + c``."""

            def codegen(context, builder, signature, args):
                kind = context.get_value_type(signature.return_type)
                letter, bits = ("d", 64) if signature.return_type == types.float64 else ("f", 32)
                asm = ir.InlineAsm(
                    ir.FunctionType(kind, [kind, kind]),
                    f"mul.rn.f{bits} $0, $1, $2;",
                    f"={letter},{letter},{letter}",
                    side_effect=False,
                )
                return builder.call(asm, args)

            return a(a, a), codegen

        return multiply

    rounded_product = _rounded_product()

    def _extremum(name, comparison):
        @intrinsic
        def choose(typingctx, a, b):
            """Give the larger or smaller of two numbers; NaN wins."""

            def codegen(context, builder, signature, args):
                kind = context.get_value_type(signature.return_type)
                if signature.return_type == types.float32:
                    text = f"{name}.NaN.f32 $0, $1, $2;"
                    function = ir.FunctionType(kind, [kind, kind])
                    asm = ir.InlineAsm(function, text, "=f,f,f", side_effect=False)
                    return builder.call(asm, args)
                # There is no such instruction for float64.
                first = builder.fcmp_unordered(comparison, *args)
                first = builder.and_(first, builder.fcmp_ordered("ord", args[1], args[1]))
                return builder.select(first, *args)

            return a(a, a), codegen

        return choose

    maximum, minimum = _extremum("max", ">"), _extremum("min", "<")

    _PACK = {
        kind: ir.InlineAsm(
            ir.FunctionType(_I32, [_F32, _F32]),
            # The first operand goes to the upper half.
            f"cvt.rn.{short}x2.f32 $0, $2, $1;",
            "=r,f,f",
            side_effect=False,
        )
        for kind, short in (("float16", "f16"), ("bfloat16", "bf16"))
    }
    _F16_TO_F32 = ir.InlineAsm(
        ir.FunctionType(_F32, [_I16]), "cvt.f32.f16 $0, $1;", "=f,h", side_effect=False
    )

    def _vectors(builder, address, kind, n_bytes):
        """Give pointers to global memory for the accesses of at most 16 bytes, and their size."""
        each = min(n_bytes, 16)
        for start in range(0, n_bytes, each):
            at = builder.add(address, ir.Constant(_I64, start)) if start else address
            yield builder.inttoptr(at, kind.as_pointer(1)), each

    def _words(name, width):
        """Return the LLVM element of one access, how many make it up, and of how many bytes."""
        if name in ("float16", "bfloat16"):
            return (_I16, 1, 2) if width == 1 else (_I32, width // 2, 4)
        return {"float32": (_F32, width, 4), "float64": (ir.DoubleType(), width, 8)}[name]

    def _unpack(builder, name, word):
        """Give the numbers in a word, in the order of memory."""
        if name not in ("float16", "bfloat16"):
            return [word]
        halves = [word]
        if word.type == _I32:
            upper = builder.lshr(word, ir.Constant(_I32, 16))
            halves = [builder.trunc(x, _I16) for x in (word, upper)]
        if name == "float16":
            return [builder.call(_F16_TO_F32, [x]) for x in halves]
        sixteen = ir.Constant(_I32, 16)  # a bfloat16 is the upper half of a float32
        return [builder.bitcast(builder.shl(builder.zext(x, _I32), sixteen), _F32) for x in halves]

    def _numbers_of(name):
        @intrinsic
        def numbers(typingctx, word):
            signature = types.UniTuple(types.float32, 2)(types.uint32)

            def codegen(context, builder, signature, args):
                halves = _unpack(builder, name, args[0])
                return context.make_tuple(builder, signature.return_type, halves)

            return signature, codegen

        return numbers

    def _load_at(name, width):
        scalar = types.float64 if name == "float64" else types.float32
        element, n_words, n_bytes = _words(name, width)

        @intrinsic
        def load(typingctx, address):
            signature = types.UniTuple(scalar, width)(types.int64)

            def codegen(context, builder, signature, args):
                each = min(n_words, 16 // n_bytes)
                kind = ir.VectorType(element, each) if each > 1 else element
                numbers = []
                for pointer, size in _vectors(builder, args[0], kind, n_words * n_bytes):
                    value = builder.load(pointer, align=size)
                    for i in range(each):
                        index = ir.Constant(_I32, i)
                        word = builder.extract_element(value, index) if each > 1 else value
                        numbers += _unpack(builder, name, word)
                return context.make_tuple(builder, signature.return_type, numbers)

            return signature, codegen

        return load

    def _store_at(name, width):
        scalar = types.float64 if name == "float64" else types.float32
        element, n_words, n_bytes = _words(name, width)

        @intrinsic
        def store(typingctx, address, values):
            signature = types.void(types.int64, types.UniTuple(scalar, width))

            def codegen(context, builder, signature, args):
                address, values = args
                words = [builder.extract_value(values, i) for i in range(width)]
                if name in _PACK:
                    words += words[:1] * (width == 1)  # the upper half is dropped again
                    pairs = zip(words[::2], words[1::2], strict=True)
                    words = [builder.call(_PACK[name], pair) for pair in pairs]
                    words = [builder.trunc(x, _I16) for x in words] if width == 1 else words
                each = min(n_words, 16 // n_bytes)
                kind = ir.VectorType(element, each) if each > 1 else element
                for pointer, size in _vectors(builder, address, kind, n_words * n_bytes):
                    value = ir.Constant(kind, ir.Undefined) if each > 1 else words.pop(0)
                    for i in range(each if each > 1 else 0):
                        value = builder.insert_element(value, words.pop(0), ir.Constant(_I32, i))
                    builder.store(value, pointer, align=size)
                return context.get_dummy_value()

            return signature, codegen

        return store

    # A load's operands are its n results, then the address; a store's the address, then n values.
    _UNPACK_F16 = " ".join(
        f"mov.b32 {{lo, hi}}, r{i}; cvt.f32.f16 ${2 * i}, lo; cvt.f32.f16 ${2 * i + 1}, hi;"
        for i in range(4)
    )
    _UNPACK_BF16 = " ".join(
        f"shl.b32 r4, r{i}, 16; mov.b32 ${2 * i}, r4; "
        f"and.b32 r4, r{i}, 0xffff0000; mov.b32 ${2 * i + 1}, r4;"
        for i in range(4)
    )
    _LOAD_WORDS = "ld.global.nc.v4.b32 {r0, r1, r2, r3}, [$8];"
    _STORE_WORDS = "st.global.v4.b32 [$0], {r0, r1, r2, r3};"

    def _pack(kind):
        # The first operand of cvt.x2 goes to the upper half.
        return " ".join(f"cvt.rn.{kind}x2.f32 r{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))

    load4 = _wide_load(4, "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];")
    load_words = _wide_load(4, "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "r")
    store4 = _wide_store(4, "st.global.v4.f32 [$0], {$1, $2, $3, $4};")
    store8 = _wide_store(
        8,
        "st.global.v4.f32 [$0], {$1, $2, $3, $4}; st.global.v4.f32 [$0 + 16], {$5, $6, $7, $8};",
    )
    load8_f16 = _wide_load(
        8, f"{{ .reg .b32 r<5>; .reg .b16 lo, hi; {_LOAD_WORDS} {_UNPACK_F16} }}"
    )
    load8_bf16 = _wide_load(8, f"{{ .reg .b32 r<5>; {_LOAD_WORDS} {_UNPACK_BF16} }}")
    store8_f16 = _wide_store(8, f"{{ .reg .b32 r<4>; {_pack('f16')} {_STORE_WORDS} }}")
    store8_bf16 = _wide_store(8, f"{{ .reg .b32 r<4>; {_pack('bf16')} {_STORE_WORDS} }}")


@cuda.jit(device=True)
def _load(array, offset):
    return (array[offset],)


@cuda.jit(device=True)
def _store(array, offset, values):
    array[offset] = values[0]


@cuda.jit(device=True)
def _load_f16(array, offset):
    return (f16_to_f32(array[offset]),)


@cuda.jit(device=True)
def _store_f16(array, offset, values):
    array[offset] = f32_to_f16(values[0])


@cuda.jit(device=True)
def _load_bf16(array, offset):
    return (bf16_to_f32(array[offset]),)


@cuda.jit(device=True)
def _store_bf16(array, offset, values):
    array[offset] = f32_to_bf16(values[0])


def each(operation, width, *, with_number=False):
    """Return the device function that applies ``operation`` to a tuple of ``width`` numbers.

    ``with_number``: it takes another number, which is the second operand of all of them.
    """
    if with_number:
        lifted = lift(operation, width)
        if width == 1:

            @cuda.jit(device=True)
            def mapped(a, n):
                return lifted(a, (n,))

        elif width == 4:

            @cuda.jit(device=True)
            def mapped(a, n):
                return lifted(a, (n, n, n, n))

        else:

            @cuda.jit(device=True)
            def mapped(a, n):
                return lifted(a, (n, n, n, n, n, n, n, n))

        return mapped

    if width == 1:

        @cuda.jit(device=True)
        def mapped(a):
            return (operation(a[0]),)

    elif width == 4:

        @cuda.jit(device=True)
        def mapped(a):
            return (operation(a[0]), operation(a[1]), operation(a[2]), operation(a[3]))

    else:

        @cuda.jit(device=True)
        def mapped(a):
            return (
                operation(a[0]),
                operation(a[1]),
                operation(a[2]),
                operation(a[3]),
                operation(a[4]),
                operation(a[5]),
                operation(a[6]),
                operation(a[7]),
            )

    return mapped


def lift(operation, width):
    """Return the device function that applies ``operation`` to two tuples of ``width`` numbers."""
    if width == 1:

        @cuda.jit(device=True)
        def lifted(a, b):
            return (operation(a[0], b[0]),)

    elif width == 4:

        @cuda.jit(device=True)
        def lifted(a, b):
            return (
                operation(a[0], b[0]),
                operation(a[1], b[1]),
                operation(a[2], b[2]),
                operation(a[3], b[3]),
            )

    else:

        @cuda.jit(device=True)
        def lifted(a, b):
            return (
                operation(a[0], b[0]),
                operation(a[1], b[1]),
                operation(a[2], b[2]),
                operation(a[3], b[3]),
                operation(a[4], b[4]),
                operation(a[5], b[5]),
                operation(a[6], b[6]),
                operation(a[7], b[7]),
            )

    return lifted
