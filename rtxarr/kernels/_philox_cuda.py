"""GPU code of the random numbers."""

from __future__ import annotations

import functools
import math

import numpy as np

from rtxarr._device import _SIMULATING, cuda, intrinsic, types
from rtxarr.kernels._philox_core import Arithmetic, build, kinds, product
from rtxarr.kernels._vector import access, store4


def _device(function):
    return cuda.jit(device=True)(function)


if _SIMULATING:  # which has no libdevice and no contraction either

    def _mul(a, b):
        return a * b

    def _add(a, b):
        return a + b

    def _div(a, b):
        return a / b

    _sqrt, _mul32, _add32, _product = math.sqrt, _mul, _add, product

else:
    from llvmlite import ir  # type: ignore[import-untyped]

    _I32, _I64 = ir.IntType(32), ir.IntType(64)
    # One instruction; a product of numbers of 64 bits takes three, or two if halves are known.
    _WIDE = ir.InlineAsm(
        ir.FunctionType(ir.LiteralStructType([_I32] * 2), [_I32] * 2),
        "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$1, $0}, p; }",
        "=r,=r,r,r",
        side_effect=False,
    )

    @intrinsic  # type: ignore[misc]
    def _product(typingctx, a, b):
        def codegen(context, builder, signature, args):
            halves = builder.call(_WIDE, [builder.trunc(x, _I32) for x in args])
            words = [builder.zext(builder.extract_value(halves, i), _I64) for i in range(2)]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), codegen

    # The compiler fuses a bare product and sum into one rounding; it leaves these alone.
    _mul, _add = cuda.libdevice.dmul_rn, cuda.libdevice.dadd_rn
    _div, _sqrt = cuda.libdevice.ddiv_rn, cuda.libdevice.dsqrt_rn
    _mul32, _add32 = cuda.libdevice.fmul_rn, cuda.libdevice.fadd_rn


@_device
def _frexp(x):
    return math.frexp(x)


@_device
def _select(condition, x, y):
    return x if condition else y


_ARITHMETIC = Arithmetic(_mul, _add, _div, _sqrt, _frexp, _select, _mul32, _add32, _product)
_core = build(_device, _ARITHMETIC)
_kinds = kinds(_device, _ARITHMETIC, _core)


@functools.cache
def kernel(kind: str, dtype: np.dtype, *, from_memory: bool = False):
    """Return ``fill(out, offset, stream, key, p0, ..., p5)``: one thread for each block it touches.

    ``out`` is 1-D and C-contiguous. ``from_memory`` gives ``fill(out, place, shift, p0, ..., p5)``
    with ``offset - shift``, ``stream`` and ``key`` in the array ``place``.
    """
    fill = _fill(kind, dtype)
    if not from_memory:

        @cuda.jit
        def from_arguments(out, offset, stream, key, p0, p1, p2, p3, p4, p5):
            fill(out, offset, stream, key, p0, p1, p2, p3, p4, p5)

        return from_arguments

    @cuda.jit
    def from_array(out, place, shift, p0, p1, p2, p3, p4, p5):
        fill(out, place[0] + shift, place[1], place[2], p0, p1, p2, p3, p4, p5)

    return from_array


def _fill(kind, dtype):
    value = _kinds[kind]
    philox = _core.philox
    _, scalar, _, store, _ = access(dtype, wide=False)
    wide = np.dtype(dtype) == np.float32

    @_device
    def fill32(out, offset, stream, key, p0, p1, p2, p3, p4, p5):
        # Thread t makes block offset // 4 + t, whose first word is for out[first].
        thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        first = thread * 4 - np.int64(offset & np.uint64(3))
        if first >= out.size:
            return
        w0, w1, w2, w3 = philox((offset >> np.uint64(2)) + np.uint64(thread), stream, key)
        v0 = scalar(value(w0, stream, key, p0, p1, p2, p3, p4, p5))
        v1 = scalar(value(w1, stream, key, p0, p1, p2, p3, p4, p5))
        v2 = scalar(value(w2, stream, key, p0, p1, p2, p3, p4, p5))
        v3 = scalar(value(w3, stream, key, p0, p1, p2, p3, p4, p5))
        if wide and first % 4 == 0 and first + 4 <= out.size:
            store4(out, first, (v0, v1, v2, v3))
            return
        if first >= 0:
            store(out, first, (v0,))
        if first + 1 >= 0 and first + 1 < out.size:
            store(out, first + 1, (v1,))
        if first + 2 >= 0 and first + 2 < out.size:
            store(out, first + 2, (v2,))
        if first + 3 < out.size:
            store(out, first + 3, (v3,))

    @_device
    def fill64(out, offset, stream, key, p0, p1, p2, p3, p4, p5):
        # Thread t makes block offset // 4 + t, whose first 64-bit word is for out[first].
        thread = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        first = thread * 2 - np.int64((offset >> np.uint64(1)) & np.uint64(1))
        if first >= out.size:
            return
        w0, w1, w2, w3 = philox((offset >> np.uint64(2)) + np.uint64(thread), stream, key)
        if first >= 0:
            low = w0 | (w1 << np.uint64(32))
            store(out, first, (scalar(value(low, stream, key, p0, p1, p2, p3, p4, p5)),))
        if first + 1 < out.size:
            high = w2 | (w3 << np.uint64(32))
            store(out, first + 1, (scalar(value(high, stream, key, p0, p1, p2, p3, p4, p5)),))

    return fill64 if kind.endswith("64") else fill32
