// What generated CUDA text needs to run on the CPU: each thread of a block is a fibre of fibres.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATED
#define __global__
#define __device__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__
#define __cluster_dims__(...)

struct Place { unsigned x, y, z; };
extern "C" {
extern Place threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char *gpu_shared;
void gpu_barrier();
// Give `bytes` of `from` to the warp and take those that lane `lane` of it gave.
void gpu_exchange(void *to, const void *from, int bytes, int lane);
int gpu_lane();
void gpu_cluster_arrive();
void gpu_cluster_wait();
// Boxes, in shared memory: what is sent to one lies at its place when a thread has waited for it.
void gpu_open_box(void *box, unsigned bytes);
void gpu_send(void *own, const void *from, int bytes, unsigned rank, void *box);
void gpu_wait_for_box(void *box);
// Copies that a thread asks for are made when it waits for their group, and not before.
void gpu_ask(void *to, const void *from, int bytes);
void gpu_end_copies();
void gpu_wait_copies(int n);
}

static inline void __syncthreads() { gpu_barrier(); }
static inline void __syncwarp(unsigned = 0) { char none = 0; gpu_exchange(&none, &none, 1, 0); }
template<class T> static inline T __shfl_xor_sync(unsigned, T a, int apart) {
  T out;
  gpu_exchange(&out, &a, sizeof(T), gpu_lane() ^ apart);
  return out;
}
template<class T> static inline T __shfl_xor(T a, int apart, int) {
  return __shfl_xor_sync(0, a, apart);
}
template<class T> static inline T __shfl_sync(unsigned, T a, int lane) {
  T out;
  gpu_exchange(&out, &a, sizeof(T), lane & 31);
  return out;
}
template<class T> static inline T __shfl(T a, int lane, int) { return __shfl_sync(0, a, lane); }

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
template<class To, class From> static inline To gpu_bits(From a) {
  To out;
  static_assert(sizeof(To) == sizeof(From), "bits of one type in another");
  memcpy(&out, &a, sizeof(To));
  return out;
}
static inline int __float_as_int(float a) { return gpu_bits<int>(a); }
static inline float __int_as_float(int a) { return gpu_bits<float>(a); }
static inline long long __double_as_longlong(double a) { return gpu_bits<long long>(a); }
static inline double __longlong_as_double(long long a) { return gpu_bits<double>(a); }

#define CLUSTER_ARRIVE() gpu_cluster_arrive()
#define CLUSTER_WAIT() gpu_cluster_wait()
#define BOXES_OPEN()
static inline void open_box(void *box, unsigned bytes) { gpu_open_box(box, bytes); }
static inline void wait_for_box(void *box) { gpu_wait_for_box(box); }
// Touches the ends, so that a place outside of memory shows.
#define FETCH(from, n) ((void)*(const volatile char *)(from), (void)*((const volatile char *)((from) + (n)) - 1))
template<class Place, class T>
static inline void send(Place *own, T value, unsigned rank, void *box) {
  Place sent = {};
  sent.value = value;
  gpu_send(own, &sent, sizeof sent, rank, box);
}

#define COPIES_END() gpu_end_copies()
#define COPIES_WAIT(n) gpu_wait_copies(n)
template<int BYTES> static inline void copy_bytes(void *to, const void *from) {
  gpu_ask(to, from, BYTES);
}

// IEEE half by its bits; `odd` says that something was cut off before.
static inline unsigned short gpu_half(double a) {
  const uint64_t bits = gpu_bits<uint64_t>(a);
  const unsigned sign = (unsigned)(bits >> 48) & 0x8000;
  const int exponent = (int)(bits >> 52 & 0x7ff) - 1023;
  const uint64_t fraction = bits & 0xfffffffffffffull;
  if (exponent == 1024) return (unsigned short)(sign | 0x7c00 | (fraction ? 0x200 : 0));
  if (exponent > 15) return (unsigned short)(sign | 0x7c00);
  if (exponent < -26) return (unsigned short)sign;
  const int cut = exponent < -14 ? 42 + (-14 - exponent) : 42;
  const uint64_t whole = fraction | (1ull << 52);
  uint64_t kept = whole >> cut;
  const uint64_t rest = whole & ((1ull << cut) - 1), middle = 1ull << (cut - 1);
  if (rest > middle || (rest == middle && (kept & 1))) ++kept;
  if (exponent >= -14) kept += (uint64_t)(exponent + 14) << 10;  // the leading one carries into it
  return (unsigned short)(sign | kept);
}
static inline unsigned short half_bits(float a) { return gpu_half(a); }
static inline unsigned short half_bits_d(double a) { return gpu_half(a); }
static inline float half_value(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float a = exponent == 31 ? (fraction ? NAN : INFINITY)
          : exponent ? ldexpf((float)(1024 + fraction), exponent - 25)
                     : ldexpf((float)fraction, -24);
  return bits & 0x8000 ? -a : a;
}
static inline unsigned short bfloat_bits(float a) {
  const unsigned bits = gpu_bits<unsigned>(a);
  return a != a ? 0x7fff : (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// A GPU's is right to the last bit or the one before, and zero where it would not be normal. Of a
// fraction of ones it is right: else its own division, which refines it once, would be wrong.
static inline float gpu_reciprocal(float b) {
  const float a = 1.0f / b;
  if (!(fabsf(a) < INFINITY)) return a;
  if (fabsf(a) < 1.17549435e-38f) return copysignf(0, a);
  return gpu_bits<float>(gpu_bits<int>(a) + ((gpu_bits<int>(b) & 0x7fffff) != 0x7fffff));
}
#define RECIPROCAL(b) gpu_reciprocal(b)
#define ROUGH_EXP(a) exp2f((a) * 1.44269504f)
static inline float bfloat_value(unsigned short bits) { return gpu_bits<float>((unsigned)bits << 16); }
static inline float bfloat_rounded(float a) { return bfloat_value(bfloat_bits(a)); }
