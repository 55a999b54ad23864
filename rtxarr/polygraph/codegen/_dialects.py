"""The languages that kernels are written in: CUDA, HIP and Metal.

Kernels are written in terms of the macros and names that ``head`` defines; a :class:`Dialect` says
how the rest differs. ``$name`` in a text stands for the function ``name`` of the C library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TYPES = """
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
"""
_HALVES = """
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
"""
_COMPLEX = """
struct alignas(8) c64 { f32 re, im; };
struct alignas(16) c128 { f64 re, im; };
"""
# Rounds to nearest, ties to even; NaN stays NaN.
_BFLOAT_BY_BITS = """
FUNCTION u16 bfloat_bits(f32 a) {
  const u32 bits = BITS_OF_F32(a);
  return a != a ? 0x7fff : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
FUNCTION f32 bfloat_value(u16 bits) { return F32_OF_BITS((u32)bits << 16); }
FUNCTION f32 bfloat_rounded(f32 a) { return bfloat_value(bfloat_bits(a)); }
"""

_CUDA = f"""
#define FUNCTION static __device__ __forceinline__
#define FUNCTION_ __device__ __forceinline__
#define GLOBAL
#define SHARED
#define PRIVATE
#define RESTRICT __restrict__
#define UNROLL _Pragma("unroll")
#define BARRIER() __syncthreads()
#define SHUFFLE(a, apart) __shfl_xor_sync(0xffffffffu, a, apart)
#define SHUFFLE_FROM(a, lane) __shfl_sync(0xffffffffu, a, lane)
#define HIGH_PRODUCT(a, b) __umulhi(a, b)
#define BITS_OF_F32(a) ((u32)__float_as_int(a))
#define F32_OF_BITS(a) __int_as_float((int)(a))
#define BITS_OF_F64(a) ((u64)__double_as_longlong(a))
#define F64_OF_BITS(a) __longlong_as_double((i64)(a))
#define MAGNITUDE(a) ((a) < 0 ? -(a) : (a) + 0)
{_TYPES}{_HALVES}{_COMPLEX}
#ifndef EMULATED
FUNCTION f32 rough_reciprocal(f32 b) {{
  f32 a; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(b)); return a;
}}
FUNCTION f32 rough_power(f32 b) {{
  f32 a; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(b)); return a;
}}
#define RECIPROCAL(b) rough_reciprocal(b)
#define ROUGH_EXP(a) rough_power((a) * 1.44269504f)
#endif
""".replace("\n\n", "\n")
# Of the conversions to bfloat16, that of a pair is the fast one: those of one number share a unit.
_CUDA_HALVES = """
#ifndef EMULATED
FUNCTION u16 half_bits(f32 a) { u16 b; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(a)); return b; }
FUNCTION u16 half_bits_d(f64 a) {
  u16 b; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(b) : "d"(a)); return b;
}
FUNCTION f32 half_value(u16 b) { f32 a; asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(b)); return a; }
FUNCTION u32 bfloat_pair(f32 high, f32 low) {
  u32 b; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(high), "f"(low)); return b;
}
FUNCTION u16 bfloat_bits(f32 a) { return (u16)bfloat_pair(0.0f, a); }
FUNCTION f32 bfloat_value(u16 bits) { return F32_OF_BITS((u32)bits << 16); }
FUNCTION f32 bfloat_rounded(f32 a) { return F32_OF_BITS(bfloat_pair(a, 0.0f)); }
#endif
"""
# Copies to shared memory that go on by themselves, in groups.
_CUDA_COPIES = """
#ifndef EMULATED
#define COPIES_END() asm volatile("cp.async.commit_group;" ::: "memory")
#define COPIES_WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
template<int BYTES> FUNCTION void copy_bytes(void* to, const void* from) {
  const u32 place = (u32)__cvta_generic_to_shared(to);
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :: "r"(place), "l"(from), "n"(BYTES == 8 ? 8 : 4) : "memory");
  }
}
#endif
"""
# Blocks of a cluster send one another values. A box counts the bytes that have come, and is full
# when those that it was opened for are there. Memory can be fetched into the cache ahead of use.
_CUDA_CLUSTERS = """
template<class T> struct alignas(sizeof(T) > 8 ? 16 : sizeof(T) > 4 ? 8 : 4) Sent { T value; };
#ifndef EMULATED
#define CLUSTER_ARRIVE() asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory")
#define CLUSTER_WAIT() asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory")
#define BOXES_OPEN() asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")
#define FETCH(from, n) fetch(from, (u32)((n) * sizeof(*(from))))
FUNCTION void fetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}
FUNCTION void open_box(u64* box, u32 bytes) {
  const u32 place = (u32)__cvta_generic_to_shared(box);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(place) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(place), "r"(bytes) : "memory");
}
FUNCTION void wait_for_box(u64* box) {
  u32 is_full = 0;
  while (!is_full) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_full) : "r"((u32)__cvta_generic_to_shared(box)) : "memory");
  }
}
FUNCTION u32 in_block(void* own, u32 rank) {
  u32 place;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(place) : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank));
  return place;
}
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
template<class T> FUNCTION void send(Sent<T>* own, T value, u32 rank, u64* box) {
  union { Sent<T> sent; u32 words[4]; } u;
  u.sent.value = value;
  const u32 to = in_block(own, rank), its_box = in_block(box, rank);
  if (sizeof(Sent<T>) == 4) {
    asm volatile(SEND ".b32 [%0], %1, [%2];" :: "r"(to), "r"(u.words[0]), "r"(its_box) : "memory");
  } else if (sizeof(Sent<T>) == 8) {
    asm volatile(SEND ".v2.b32 [%0], {%1, %2}, [%3];"
                 :: "r"(to), "r"(u.words[0]), "r"(u.words[1]), "r"(its_box) : "memory");
  } else {
    asm volatile(SEND ".v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "r"(u.words[0]), "r"(u.words[1]), "r"(u.words[2]), "r"(u.words[3]),
                    "r"(its_box) : "memory");
  }
}
#endif
"""

_HIP = f"""
#define FUNCTION static __device__ __forceinline__
#define FUNCTION_ __device__ __forceinline__
#define GLOBAL
#define SHARED
#define PRIVATE
#define RESTRICT __restrict__
#define UNROLL _Pragma("unroll")
#define BARRIER() __syncthreads()
#define SHUFFLE(a, apart) __shfl_xor(a, apart, 32)
#define SHUFFLE_FROM(a, lane) __shfl(a, lane, 32)
#define HIGH_PRODUCT(a, b) __umulhi(a, b)
#define BITS_OF_F32(a) ((u32)__float_as_int(a))
#define F32_OF_BITS(a) __int_as_float((int)(a))
#define BITS_OF_F64(a) ((u64)__double_as_longlong(a))
#define F64_OF_BITS(a) __longlong_as_double((i64)(a))
#define MAGNITUDE(a) ((a) < 0 ? -(a) : (a) + 0)
{_TYPES}{_HALVES}{_COMPLEX}
#ifndef EMULATED
#define RECIPROCAL(b) __builtin_amdgcn_rcpf(b)
#define ROUGH_EXP(a) __expf(a)
#endif
""".replace("\n\n", "\n")
_HIP_HALVES = f"""
#ifndef EMULATED
union HalfBits {{ _Float16 number; u16 bits; }};
FUNCTION u16 half_bits(f32 a) {{ HalfBits b; b.number = (_Float16)a; return b.bits; }}
FUNCTION u16 half_bits_d(f64 a) {{ HalfBits b; b.number = (_Float16)a; return b.bits; }}
FUNCTION f32 half_value(u16 a) {{ HalfBits b; b.bits = a; return (f32)b.number; }}
{_BFLOAT_BY_BITS.strip()}
#endif
"""

_METAL = f"""
#include <metal_stdlib>
using namespace metal;
#define FUNCTION static inline
#define FUNCTION_ inline
#define GLOBAL device
#define SHARED threadgroup
#define PRIVATE thread
#define RESTRICT
#define UNROLL _Pragma("unroll")
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE(a, apart) exchanged(a, (ushort)(apart))
#define SHUFFLE_FROM(a, lane) fetched(a, (ushort)((lane) & 31))
#define HIGH_PRODUCT(a, b) mulhi(a, b)
#define BITS_OF_F32(a) as_type<u32>(a)
#define F32_OF_BITS(a) as_type<f32>((u32)(a))
#define MAGNITUDE(a) ((a) < 0 ? -(a) : (a) + 0)
#undef RECIPROCAL
#undef ROUGH_EXP
#define RECIPROCAL(b) fast::divide(1.0f, b)
#define ROUGH_EXP(a) fast::exp(a)
typedef char i8;
typedef uchar u8;
typedef short i16;
typedef ushort u16;
typedef int i32;
typedef uint u32;
typedef long i64;
typedef ulong u64;
typedef float f32;
{_HALVES}
struct alignas(8) c64 {{ f32 re, im; }};
template<class T> FUNCTION T exchanged(T a, ushort apart) {{ return simd_shuffle_xor(a, apart); }}
FUNCTION bool exchanged(bool a, ushort apart) {{ return simd_shuffle_xor((int)a, apart); }}
FUNCTION i64 exchanged(i64 a, ushort apart) {{
  return as_type<i64>(simd_shuffle_xor(as_type<uint2>(a), apart));
}}
FUNCTION u64 exchanged(u64 a, ushort apart) {{
  return as_type<u64>(simd_shuffle_xor(as_type<uint2>(a), apart));
}}
template<class T> FUNCTION T fetched(T a, ushort lane) {{ return simd_shuffle(a, lane); }}
FUNCTION bool fetched(bool a, ushort lane) {{ return simd_shuffle((int)a, lane); }}
FUNCTION i64 fetched(i64 a, ushort lane) {{
  return as_type<i64>(simd_shuffle(as_type<uint2>(a), lane));
}}
FUNCTION u64 fetched(u64 a, ushort lane) {{
  return as_type<u64>(simd_shuffle(as_type<uint2>(a), lane));
}}
""".replace("\n\n", "\n")
_METAL_HALVES = f"""
#ifndef EMULATED
FUNCTION u16 half_bits(f32 a) {{ return as_type<u16>((half)a); }}
FUNCTION f32 half_value(u16 b) {{ return (f32)as_type<half>(b); }}
{_BFLOAT_BY_BITS.strip()}
#endif
"""


@dataclass(frozen=True)
class Dialect:
    """A language: what stands before all kernels, and the names of a thread's place.

    Attributes
    ----------
    name : str
    head : str
    halves, copies, clusters : str
        What kernels of float16 and bfloat16, those that copy to shared memory, and those whose
        blocks share rows need besides.
    thread_x, thread_y, threads_x, threads_y, block_x, block_y : str
        A thread's place in its block, the block's size, the block's place in the grid.
    shared_memory : str
        The statement that declares a block's memory.
    lacks : frozenset of str
        Operations and dtypes that there is no text for.
    """

    name: str
    head: str
    halves: str
    thread_x: str = "threadIdx.x"
    thread_y: str = "threadIdx.y"
    threads_x: str = "blockDim.x"
    threads_y: str = "blockDim.y"
    block_x: str = "blockIdx.x"
    block_y: str = "blockIdx.y"
    shared_memory: str = "extern __shared__ __align__(16) unsigned char shared_memory[];"
    lacks: frozenset[str] = frozenset()
    copies: str = ""
    clusters: str = ""

    def library(self, text: str) -> str:
        """Put the names of functions of the C library in for ``$name``."""
        if self.name == "metal":
            return _LIBRARY.sub(lambda m: f"precise::{m[1].removesuffix('f')}", text)
        return _LIBRARY.sub(r"\1", text)


_LIBRARY = re.compile(r"\$(\w+)")
CUDA = Dialect(
    "cuda", _CUDA.lstrip(), _CUDA_HALVES.lstrip(),
    copies=_CUDA_COPIES.lstrip(), clusters=_CUDA_CLUSTERS.lstrip(),
)  # fmt: skip
HIP = Dialect("hip", _HIP.lstrip(), _HIP_HALVES.lstrip())
METAL = Dialect(
    "metal", _METAL.lstrip(), _METAL_HALVES.lstrip(),
    "thread_at.x", "thread_at.y", "block_size.x", "block_size.y", "block_at.x", "block_at.y",
    "",
    frozenset("expm1 log1p erf logaddexp hypot nextafter float64 complex128".split()),
)  # fmt: skip
DIALECTS = {d.name: d for d in (CUDA, HIP, METAL)}
