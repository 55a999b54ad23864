"""Clusters of blocks inside kernels: their barrier, their shared memory, and copies into it.

The blocks of a cluster are neighbours along x, run at the same time, and read each other's shared
memory. A kernel with the attribute ``cluster`` is launched in clusters of so many blocks, on
devices of compute capability 9.0 and later. The simulator runs one block at a time: there a
cluster is one.

Only kernel files import this module: it imports numba.
"""

from __future__ import annotations

import numpy as np

from rtxarr._device import _SIMULATING, cuda, intrinsic, types

# Blocks of a cluster: the most that every device has that has clusters.
BLOCKS = 1 if _SIMULATING else 8

if _SIMULATING:

    @cuda.jit(device=True)
    def arrive():
        cuda.syncthreads()

    @cuda.jit(device=True)
    def wait():
        cuda.syncthreads()

    def number_of(array, i, block):
        return array[i]

    def place_of(array):
        return array

    def copy_piece(memory, at, array, offset):
        n = 16 // array.itemsize
        memory[4 * at : 4 * at + 4] = np.asarray(array[int(offset) : int(offset) + n]).view("u4")

    def commit():
        pass

    def wait_for_all():
        pass

    def words_of(memory, at):
        return tuple(memory[4 * at : 4 * at + 4])

    def floats_of(memory, at):
        return tuple(memory[4 * at : 4 * at + 4].view(np.float32))

else:
    from llvmlite import ir

    from rtxarr.kernels._vector import _address

    _I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

    def _instruction(text, *, convergent=False):
        """Return an intrinsic that is an instruction without operands."""

        @intrinsic
        def instruction(typingctx):
            def codegen(context, builder, signature, args):
                kind = ir.FunctionType(ir.VoidType(), [])
                asm = ir.InlineAsm(kind, text, "~{memory}", side_effect=True)
                call = builder.call(asm, [])
                if convergent:
                    call.attributes.add("convergent")
                return context.get_dummy_value()

            return types.void(), codegen

        return instruction

    # What a thread of the cluster wrote before it arrived is there for all that have waited.
    arrive = _instruction("barrier.cluster.arrive.release.aligned;", convergent=True)
    wait = _instruction("barrier.cluster.wait.acquire.aligned;", convergent=True)
    commit = _instruction("cp.async.commit_group;")
    wait_for_all = _instruction("cp.async.wait_group 0;")

    @intrinsic  # type: ignore[misc]
    def number_of(typingctx, array, i, block):
        """Give element ``i``, a float32, of an array in the shared memory of a block."""

        def codegen(context, builder, signature, args):
            array, i, block = args
            kind = ir.FunctionType(_F32, [_I64, _I32])
            text = "{ .reg .u64 a; mapa.u64 a, $1, $2; ld.f32 $0, [a]; }"
            asm = ir.InlineAsm(kind, text, "=f,l,r,~{memory}", side_effect=True)
            address = _address(context, builder, signature.args[0], array, i)
            return builder.call(asm, [address, builder.trunc(block, _I32)])

        return types.float32(array, types.int64, types.int64), codegen

    @intrinsic  # type: ignore[misc]
    def place_of(typingctx, array):
        """Give the first multiple of 16 bytes in an array in shared memory."""

        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            kind = ir.FunctionType(_I32, [_I64])
            text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
            asm = ir.InlineAsm(kind, text, "=r,l", side_effect=False)
            address = builder.call(asm, [builder.ptrtoint(data, _I64)])
            return builder.and_(builder.add(address, ir.Constant(_I32, 15)), ir.Constant(_I32, -16))

        return types.uint32(array), codegen

    def _piece(builder, memory, at):
        return builder.add(memory, builder.shl(builder.trunc(at, _I32), ir.Constant(_I32, 4)))

    @intrinsic  # type: ignore[misc]
    def copy_piece(typingctx, memory, at, array, offset):
        """Start to copy 16 bytes from an array in global memory to a piece of shared memory."""

        def codegen(context, builder, signature, args):
            memory, at, array, offset = args
            kind = ir.FunctionType(ir.VoidType(), [_I32, _I64])
            text = "cp.async.cg.shared.global [$0], [$1], 16;"
            asm = ir.InlineAsm(kind, text, "r,l,~{memory}", side_effect=True)
            address = _address(context, builder, signature.args[2], array, offset)
            builder.call(asm, [_piece(builder, memory, at), address])
            return context.get_dummy_value()

        return types.void(types.uint32, types.int64, array, types.int64), codegen

    def _load(register, kind, word, bits):
        @intrinsic
        def load(typingctx, memory, at):
            signature = types.UniTuple(word, 4)(types.uint32, types.int64)

            def codegen(context, builder, signature, args):
                function = ir.FunctionType(ir.LiteralStructType([bits] * 4), [_I32])
                text = f"ld.shared.v4.{kind} {{$0, $1, $2, $3}}, [$4];"
                asm = ir.InlineAsm(function, text, f"={register}," * 4 + "r", side_effect=True)
                found = builder.call(asm, [_piece(builder, *args)])
                parts = [builder.extract_value(found, i) for i in range(4)]
                return context.make_tuple(builder, signature.return_type, parts)

            return signature, codegen

        return load

    words_of = _load("r", "b32", types.uint32, _I32)
    floats_of = _load("f", "f32", types.float32, _F32)
