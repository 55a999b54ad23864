// What generated HIP text needs to be compiled by a clang without ROCm; functions are not defined.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(n) __attribute__((launch_bounds(n)))
#define __align__(n) __attribute__((aligned(n)))
struct Axis { unsigned x, y, z; };
#define PLACE(what) Axis{__builtin_amdgcn_##what##_x(), __builtin_amdgcn_##what##_y(), 0}
#define threadIdx PLACE(workitem_id)
#define blockIdx PLACE(workgroup_id)
#define blockDim Axis{__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), 1}
#define __syncthreads() __builtin_amdgcn_s_barrier()
template<class T> __device__ T __shfl_xor(T a, int apart, int width);
template<class T> __device__ T __shfl(T a, int lane, int width);
__device__ inline unsigned __umulhi(unsigned a, unsigned b) {
  return ((unsigned long long)a * b) >> 32;
}
__device__ inline int __float_as_int(float a) { return __builtin_bit_cast(int, a); }
__device__ inline float __int_as_float(int a) { return __builtin_bit_cast(float, a); }
__device__ inline long long __double_as_longlong(double a) { return __builtin_bit_cast(long long, a); }
__device__ inline double __longlong_as_double(long long a) { return __builtin_bit_cast(double, a); }
#define F1(n) extern "C" __device__ float n##f(float); extern "C" __device__ double n(double);
#define F2(n) extern "C" __device__ float n##f(float, float); extern "C" __device__ double n(double, double);
F1(acos) F1(acosh) F1(asin) F1(asinh) F1(atan) F1(atanh) F1(ceil) F1(cos) F1(cosh) F1(erf) F1(exp)
F1(expm1) F1(fabs) F1(floor) F1(log) F1(log10) F1(log1p) F1(log2) F1(rint) F1(sin) F1(sinh) F1(sqrt)
F1(tan) F1(tanh) F1(trunc)
F2(atan2) F2(copysign) F2(fmod) F2(hypot) F2(nextafter) F2(pow)
extern "C" __device__ float fmaf(float, float, float);
extern "C" __device__ float __expf(float);
