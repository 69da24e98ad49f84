// Vectors of one register, loads and stores that convert half precision, and the choice of instruction set.
//
// A kernel is a template over the element type T and the register width B in bytes, `dispatch` runs it compiled for
// this machine. (Function templates cannot have target_clones, and a matrix product wants other tiles per width.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels.h"

#define FF_INLINE __attribute__((always_inline)) inline

namespace fastfact {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// What T is computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class C, int B>
struct VecOf {
  typedef C Type __attribute__((vector_size(B)));
};
// A register of one lane, of which compilers make integers in memory, is a number.
template <>
struct VecOf<float, sizeof(float)> {
  typedef float Type;
};
template <>
struct VecOf<double, sizeof(double)> {
  typedef double Type;
};
template <class T, int B>
using Vec = typename VecOf<Compute<T>, B>::Type;
// Integers of the same width as the elements of Vec<T, B>.
template <class T, int B>
using IndexVec = typename VecOf<std::conditional_t<sizeof(Compute<T>) == 8, int64_t, int32_t>, B>::Type;
template <class T, int B>
inline constexpr int kLanes = B / sizeof(Compute<T>);

template <class To, class From>
FF_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The conversions work on uint32_t and on vectors of it alike. `pick` is a mask of all ones or zeros.
template <class U>
FF_INLINE U pick(U mask, U yes, U no) {
  return (mask & yes) | (~mask & no);
}
template <class U>
FF_INLINE U mask_of(bool condition) {
  return condition ? ~U(0) : U(0);
}
template <class U, class M>
FF_INLINE U mask_of(M condition) {
  return (U)condition;
}

template <class F, class U>
FF_INLINE F bf16_to_float(U bits) {
  return bit_cast<F>(bits << 16);
}

template <class F, class U>
FF_INLINE U float_to_bf16(F value) {
  const U bits = bit_cast<U>(value);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return pick<U>(mask_of<U>((bits & 0x7fffffffu) > 0x7f800000u), U{} + 0x7fc0u, rounded);
}

template <class F, class U>
FF_INLINE F half_to_float(U bits) {
  const U magnitude = bits & 0x7fffu, shifted = magnitude << 13;
  const U normal = shifted + (112u << 23);
  const U tiny = bit_cast<U>(bit_cast<F>(shifted + (113u << 23)) - bit_cast<F>(U{} + (113u << 23)));
  const U special = shifted | 0x7f800000u;
  U out = pick<U>(mask_of<U>(magnitude < 0x400u), tiny, normal);
  out = pick<U>(mask_of<U>(magnitude >= 0x7c00u), special, out);
  return bit_cast<F>(out | ((bits & 0x8000u) << 16));
}

template <class F, class U>
FF_INLINE U float_to_half(F value) {
  const U bits = bit_cast<U>(value), magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const U tiny = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;
  const U special = pick<U>(mask_of<U>(magnitude > 0x7f800000u), U{} + 0x7e00u, U{} + 0x7c00u);
  U out = pick<U>(mask_of<U>(magnitude < 0x38800000u), tiny, normal);
  out = pick<U>(mask_of<U>(magnitude >= 0x47800000u), special, out);
  return out | ((bits >> 16) & 0x8000u);
}

template <class T>
FF_INLINE Compute<T> to_compute(T x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return bf16_to_float<float, uint32_t>(x.bits);
  } else if constexpr (std::is_same_v<T, Half>) {
    return half_to_float<float, uint32_t>(x.bits);
  } else {
    return x;
  }
}

template <class T>
FF_INLINE T from_compute(Compute<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return T{(uint16_t)float_to_bf16<float, uint32_t>(x)};
  } else if constexpr (std::is_same_v<T, Half>) {
    return T{(uint16_t)float_to_half<float, uint32_t>(x)};
  } else {
    return x;
  }
}

// One register of elements from `p`, which need not be aligned.
template <int B, class T>
FF_INLINE Vec<T, B> load(const T* p) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    Vec<T, B> out;
    std::memcpy(&out, p, B);
    return out;
  } else {
    using Narrow = typename VecOf<uint16_t, B / 2>::Type;
    using Wide = typename VecOf<uint32_t, B>::Type;
    Narrow bits;
    std::memcpy(&bits, p, B / 2);
    const Wide wide = __builtin_convertvector(bits, Wide);
    return std::is_same_v<T, BFloat16> ? bf16_to_float<Vec<T, B>, Wide>(wide) : half_to_float<Vec<T, B>, Wide>(wide);
  }
}

template <int B, class T>
FF_INLINE void store(T* p, Vec<T, B> x) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    std::memcpy(p, &x, B);
  } else {
    using Narrow = typename VecOf<uint16_t, B / 2>::Type;
    using Wide = typename VecOf<uint32_t, B>::Type;
    const Wide wide =
        std::is_same_v<T, BFloat16> ? float_to_bf16<Vec<T, B>, Wide>(x) : float_to_half<Vec<T, B>, Wide>(x);
    const Narrow bits = __builtin_convertvector(wide, Narrow);
    std::memcpy(p, &bits, B / 2);
  }
}

// x, which the compiler will not load anew for each use: an operand in memory that crosses a line of the cache costs as
// much as four that do not. (clang refuses registers of 64 bytes in a function that is not itself for AVX-512.)
template <class V>
FF_INLINE V in_register(V x) {
#if defined(__x86_64__) && !defined(__clang__)
  asm("" : "+v"(x));
#endif
  return x;
}

// An address that is to be in a register of its own: of those that differ by a known number the compiler would
// otherwise keep each, more of them than there are registers.
template <class C>
FF_INLINE const C* in_one_register(const C* at) {
#if defined(__GNUC__)
  asm("" : "+r"(at));
#endif
  return at;
}

// e^x of a register, for x from smallest_exponent to as much above 0.
template <class C>
inline constexpr C smallest_exponent = std::is_same_v<C, double> ? -708 : -87;

template <int B>
FF_INLINE Vec<float, B> exponential(Vec<float, B> x) {
  using V = Vec<float, B>;
  using I = IndexVec<float, B>;
  const V shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const V n = shifted - 12582912.0f;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  const I scale = (bit_cast<I>(shifted) - 0x4b400000 + 127) << 23;
  return p * bit_cast<V>(scale);
}

template <int B>
FF_INLINE Vec<double, B> exponential(Vec<double, B> x) {
  using V = Vec<double, B>;
  using I = IndexVec<double, B>;
  const V shifted = x * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52
  const V n = shifted - 6755399441055744.0;
  const V r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  V p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = (p * r) * r + r + 1.0;
  const I scale = (bit_cast<I>(shifted) - 0x4338000000000000 + 1023) << 52;
  return p * bit_cast<V>(scale);
}

// n elements, converted.
template <int B, class From, class To>
FF_INLINE void copy(const From* from, int64_t n, To* to) {
  constexpr int L = kLanes<From, B>;
  int64_t j = 0;
  for (; j + L <= n; j += L) store<B>(to + j, load<B>(from + j));
  for (; j < n; ++j) to[j] = from_compute<To>(to_compute(from[j]));
}

// Lane l of the result is lane lane[l] of (a, b).
template <int... lane, class V>
FF_INLINE V shuffle(V a, V b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, lane...);
#else
  constexpr int bytes = sizeof(a[0]);
  using Lane = std::conditional_t<bytes == 8, int64_t, std::conditional_t<bytes == 4, int32_t, int16_t>>;
  return __builtin_shuffle(a, b, typename VecOf<Lane, sizeof(V)>::Type{lane...});
#endif
}

// Lane l of the result is lane index[l] of x, modulo the number of lanes.
template <class V, class I>
FF_INLINE V permute(V x, I index) {
#ifdef __clang__
  constexpr int n = sizeof(V) / sizeof(x[0]);
  V out;
  for (int lane = 0; lane < n; ++lane) out[lane] = x[index[lane] & (n - 1)];
  return out;
#else
  return __builtin_shuffle(x, index);
#endif
}

template <class V>
FF_INLINE auto sum_lanes(V x) {
  if constexpr (std::is_arithmetic_v<V>) {
    return x;
  } else if constexpr (sizeof(V) > 16) {
    typename VecOf<std::decay_t<decltype(x[0])>, int(sizeof(V) / 2)>::Type low, high;
    std::memcpy(&low, &x, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
    return sum_lanes(low + high);
  } else {
    constexpr int n = sizeof(x) / sizeof(x[0]);
    for (int half = n / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
    }
    return x[0];
  }
}

// Uninitialised memory, aligned to cache lines.
template <class C>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : data_(static_cast<C*>(::operator new(sizeof(C) * (n > 0 ? n : 1), std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  C* get() const { return data_; }

 private:
  C* data_;
};

// Of the calling thread, which has it until its next call (`scratch.cpp`).
void* take_scratch(int64_t bytes);
void give_scratch(void* block, int64_t bytes);

// The same for no longer than a call: to be destroyed by the thread that made it.
template <class C>
class Scratch {
 public:
  explicit Scratch(int64_t n)
      : bytes_(n > 0 ? n * int64_t(sizeof(C)) : 0), data_(static_cast<C*>(take_scratch(bytes_))) {}
  ~Scratch() { give_scratch(data_, bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  C* get() const { return data_; }

 private:
  const int64_t bytes_;
  C* data_;
};

template <class F>
void parallel(ParallelFor parallel_for, int64_t n, int64_t grain, const F& body) {
  if (n <= 0) return;
  parallel_for(
      n, grain > 0 ? grain : 1,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
FF_INLINE const T* client(const In& in, int64_t k) {
  return in.data ? static_cast<const T*>(in.data) + k * in.client_stride : nullptr;
}

// Instruction sets are chosen at run time unless FF_NO_DISPATCH is defined; then the compiler's flags decide.
// ATEN_CPU_CAPABILITY=default or avx2 in the environment lowers the choice, as it does for PyTorch itself.
enum Isa { kBaseline, kV3, kV4 };
Isa instruction_set_level();

#if defined(__x86_64__) && !defined(FF_NO_DISPATCH)
#define FF_DISPATCH 1
#define FF_V3 __attribute__((target("avx2,fma,bmi,bmi2,f16c,lzcnt,popcnt")))
#define FF_V4 __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c,lzcnt,popcnt")))

template <template <class, int> class Kernel, class T, class... A>
FF_V3 void run_v3(const A&... args) {
  Kernel<T, 32>::run(args...);
}
template <template <class, int> class Kernel, class T, class... A>
FF_V4 void run_v4(const A&... args) {
  Kernel<T, 64>::run(args...);
}
#elif defined(__AVX512F__)
inline constexpr int kWidth = 64;
#elif defined(__AVX2__)
inline constexpr int kWidth = 32;
#else
inline constexpr int kWidth = 16;
#endif

// Kernel<T, B>::run(args...) compiled for the best instruction set of this machine, with registers of B bytes.
// `run` must be FF_INLINE, and so must all it calls on vectors.
template <template <class, int> class Kernel, class T, class... A>
void dispatch(const A&... args) {
#ifdef FF_DISPATCH
  static const Isa isa = instruction_set_level();
  if (isa == kV4) return run_v4<Kernel, T>(args...);
  if (isa == kV3) return run_v3<Kernel, T>(args...);
  Kernel<T, 16>::run(args...);
#else
  Kernel<T, kWidth>::run(args...);
#endif
}

// f() as a function of its own, compiled for registers of B bytes. In a function into which all of a kernel is inlined
// the compiler runs out of ways to keep accumulators in registers. f must be a lambda marked FF_INLINE_LAMBDA.
#define FF_INLINE_LAMBDA __attribute__((always_inline))
#ifdef FF_DISPATCH
template <class F>
FF_V3 __attribute__((noinline)) void outlined_v3(const F& f) {
  f();
}
template <class F>
FF_V4 __attribute__((noinline)) void outlined_v4(const F& f) {
  f();
}
#endif
template <class F>
__attribute__((noinline)) void outlined(const F& f) {
  f();
}
template <int B, class F>
FF_INLINE void outline(const F& f) {
#ifdef FF_DISPATCH
  if constexpr (B == 64) return outlined_v4(f);
  if constexpr (B == 32) return outlined_v3(f);
#endif
  outlined(f);
}

// The register width `dispatch` uses.
inline int register_bytes() {
#ifdef FF_DISPATCH
  static const int bytes = 16 << static_cast<int>(instruction_set_level());
  return bytes;
#else
  return kWidth;
#endif
}

// f(T{}) for the element type named by `type`.
template <class F>
void with_type(Type type, const F& f) {
  switch (type) {
    case Type::f32:
      return f(float{});
    case Type::f64:
      return f(double{});
    case Type::bf16:
      return f(BFloat16{});
    case Type::f16:
      return f(Half{});
  }
}

}  // namespace fastfact
