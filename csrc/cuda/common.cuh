// What the kernels share: element types, packs of 16 bytes, division by launch-time constants, launching.
#pragma once
#ifndef FASTFACT_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <cstdint>
#include <type_traits>

#include "kernels.h"

namespace fastfact_cuda {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using Acc = typename Accumulator<T>::type;

template <typename To, typename From>
__device__ __forceinline__ To convert(From x) {
  return static_cast<To>(x);
}
template <>
__device__ __forceinline__ float convert<float, __nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ __forceinline__ float convert<float, __half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, float>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half convert<__half, float>(float x) {
  return __float2half(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, double>(double x) {
  return __float2bfloat16(static_cast<float>(x));
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, __half>(__half x) {
  return __float2bfloat16(__half2float(x));
}

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

// What a pack is loaded as.
template <typename T, int N>
struct RawPack {
  using type = Pack<T, N>;
};
template <typename T, int N>
__device__ __forceinline__ void widen(Acc<T> (&x)[N], const Pack<T, N>& pack) {
#pragma unroll
  for (int l = 0; l < N; ++l) x[l] = convert<Acc<T>>(pack.x[l]);
}
#ifndef FASTFACT_EMULATED
template <>
struct RawPack<__nv_bfloat16, 8> {
  using type = Pack<uint32_t, 4>;
};
// Of two in a word the second has its bits where those of a float are.
template <typename T>
__device__ __forceinline__ void widen(float (&x)[8], const Pack<uint32_t, 4>& words) {
#pragma unroll
  for (int l = 0; l < 4; ++l) {
    x[2 * l] = __uint_as_float(words.x[l] << 16);
    x[2 * l + 1] = __uint_as_float(words.x[l] & 0xffff0000u);
  }
}
#endif

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const Acc<T> (&x)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int l = 0; l < N; ++l) pack.x[l] = convert<T>(x[l]);
  return pack;
}

// Elements in 16 bytes.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

#ifndef FASTFACT_EMULATED
// A pack from shared memory, and to it; the tests count the banks that the threads of a warp meet in.
template <typename P, typename T>
__device__ __forceinline__ P load_shared(const T* at) {
  return *reinterpret_cast<const P*>(at);
}
template <typename P, typename T>
__device__ __forceinline__ void store_shared(T* at, const P& pack) {
  *reinterpret_cast<P*>(at) = pack;
}
#endif

// x / d for 0 ≤ x < 2³¹, d ≥ 1 by a multiplication: with 2^(s-1) < d ≤ 2^s and m = ceil(2^(31+s) / d), x / d = x m >>
// (31 + s).
struct Divisor {
  uint32_t d, multiplier, shift;

  explicit Divisor(int64_t by = 1) : d(static_cast<uint32_t>(by)), multiplier(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + d - 1) / d);
  }
  __host__ __device__ __forceinline__ uint32_t divide(uint32_t x) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(x) * multiplier) >> 31) >> shift;
  }
  __host__ __device__ __forceinline__ uint32_t divide(uint32_t x, uint32_t* rest) const {
    const uint32_t q = divide(x);
    *rest = x - q * d;
    return q;
  }
};

// A side with its division ready.
struct Axis {
  int64_t stride1, stride0;
  uint32_t size, factor1, factor0;
  Divisor radix;

  Axis() = default;
  explicit Axis(const Side& side)
      : stride1(side.stride1),
        stride0(side.stride0),
        size(static_cast<uint32_t>(side.size)),
        factor1(static_cast<uint32_t>(side.factor1)),
        factor0(static_cast<uint32_t>(side.factor0)),
        radix(side.radix) {}
  __device__ __forceinline__ int64_t offset(uint32_t e) const {
    uint32_t low;
    const uint32_t high = radix.divide(e, &low);
    return high * stride1 + low * stride0;
  }
  __device__ __forceinline__ uint32_t factor(uint32_t e) const {
    uint32_t low;
    const uint32_t high = radix.divide(e, &low);
    return high * factor1 + low * factor0;
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether packs of `pack` consecutive positions of `fast` are aligned 16-byte stretches of memory.
inline bool packs(const Side& fast, const Side& slow, Slices data, int pack, int type_size) {
  return fast.stride0 == 1 && fast.radix % pack == 0 && fast.size % pack == 0 && fast.stride1 % pack == 0 &&
         slow.stride1 % pack == 0 && (slow.stride0 % pack == 0 || slow.size == 1) && data.client % pack == 0 &&
         reinterpret_cast<uintptr_t>(data.data) % (pack * type_size) == 0;
}

inline int type_size(Type type) { return type == kDouble ? 8 : type == kFloat ? 4 : 2; }

constexpr int64_t kLimit = int64_t{1} << 31;

#ifndef FASTFACT_EMULATED
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, void* stream,
           Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks >= kLimit) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(blocks), threads, shared, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

template <typename K>
int allow_shared(K kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Shared memory that a block may ask for on the current device.
inline size_t most_shared() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return 48 * 1024;
  }
  return static_cast<size_t>(bytes);
}

__device__ __forceinline__ unsigned char* dynamic_shared() {
  // wmma asks for 32 bytes
  extern __shared__ __align__(32) unsigned char fastfact_shared[];
  return fastfact_shared;
}
#endif

// Calls f with a null pointer of the element type.
template <typename F>
int with_type(Type type, F&& f) {
  switch (type) {
    case kFloat:
      return f(static_cast<float*>(nullptr));
    case kDouble:
      return f(static_cast<double*>(nullptr));
    case kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return f(static_cast<__half*>(nullptr));
  }
}

// out[client, j] = sum over blocks of parts[client, block, j], in a fixed order; of none where n is 0.
template <typename T>
struct Parts {
  const Acc<T>* parts;
  T* out;
  int64_t blocks, n;
};
// Of both in one launch.
template <typename T>
int reduce_parts(const Parts<T>& first, const Parts<T>& second, int64_t clients, void* stream);

}  // namespace fastfact_cuda
