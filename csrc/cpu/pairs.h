// Operands of a product in bfloat16: two that follow each other in the sum are one number of 32 bits, which AVX512_BF16
// multiplies and adds to a sum in float by one instruction.
#pragma once

#include "vec.h"

namespace fastfact {

struct Pair {
  uint32_t bits;
};

// Whether kernels with registers of B bytes can multiply pairs, and whether this machine can. FF_EMULATE_PAIRS does
// without the instruction, for tests. clang refuses the instruction's operands where it checks them, in functions that
// are not themselves for AVX-512.
#if defined(FF_EMULATE_PAIRS)
template <int B>
inline constexpr bool kMultipliesPairs = true;
inline bool multiplies_pairs() { return true; }
#elif defined(FF_DISPATCH) && !defined(__clang__)
template <int B>
inline constexpr bool kMultipliesPairs = B == 64;
inline bool multiplies_pairs() {
  static const bool there = instruction_set_level() == kV4 && __builtin_cpu_supports("avx512bf16");
  return there;
}
#else
template <int B>
inline constexpr bool kMultipliesPairs = false;
inline bool multiplies_pairs() { return false; }
#endif

// Whether products of T with so many factors take them in pairs.
template <class T>
bool in_pairs(int64_t depth = 2) {
  return std::is_same_v<T, BFloat16> && depth % 2 == 0 && multiplies_pairs();
}

// f(E{}, factors) with what operands are read as, Pair or Compute<T>, and how many factors one has.
template <class T, int B, class F>
FF_INLINE void with_operand(bool pairs, const F& f) {
  if constexpr (std::is_same_v<T, BFloat16> && kMultipliesPairs<B>) {
    if (pairs) return f(Pair{}, 2);
  }
  f(Compute<T>{}, 1);
}

// A register of operands.
template <class E, int B>
using Operands = typename VecOf<std::conditional_t<std::is_same_v<E, Pair>, uint32_t, E>, B>::Type;

template <int B, class E>
FF_INLINE Operands<E, B> load_operands(const E* p) {
  Operands<E, B> out;
  std::memcpy(&out, p, B);
  return out;
}

// A pair as a number of as many bits, of which the compiler makes a register by one instruction.
FF_INLINE float as_number(const Pair* p) { return bit_cast<float>(*p); }
template <class E>
FF_INLINE E as_number(const E* p) {
  return *p;
}

// Two numbers that follow each other, and one with a zero, as a number of as many bits.
FF_INLINE float pair_at(const BFloat16* p) {
  float bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}
FF_INLINE float single_at(const BFloat16* p) { return bit_cast<float>(uint32_t(p->bits)); }

// sum += a · b, of pairs the sum of two products.
template <class E, int B>
FF_INLINE void add_product(Vec<E, B>& sum, Operands<E, B> a, Operands<E, B> b) {
  if constexpr (!std::is_same_v<E, Pair>) {
    sum += a * b;
  } else {
#ifdef FF_EMULATE_PAIRS
    using V = Vec<float, B>;
    sum += bit_cast<V>(a & 0xffff0000u) * bit_cast<V>(b & 0xffff0000u);
    sum += bit_cast<V>(a << 16) * bit_cast<V>(b << 16);
#elif defined(FF_DISPATCH) && !defined(__clang__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
  }
}

// Two registers of floats that are bfloat16 fit into one: in each 16 bytes four numbers of the first, then four of the
// second. Of two such registers, `unpack_low` has the numbers of their first ones in pairs and in their order,
// `unpack_high` those of their second ones; with a register of zeros before it, they are the floats themselves.
template <int First, class U, int... n>
FF_INLINE U unpack(U a, U b, std::integer_sequence<int, n...>) {
  using Halves = typename VecOf<uint16_t, sizeof(U)>::Type;
  constexpr int count = sizeof...(n);
  return bit_cast<U>(
      shuffle<(n / 8 * 8 + First + n % 8 / 2 + n % 2 * count)...>(bit_cast<Halves>(a), bit_cast<Halves>(b)));
}
template <class U>
FF_INLINE U unpack_low(U a, U b) {
  return unpack<0>(a, b, std::make_integer_sequence<int, sizeof(U) / 2>{});
}
template <class U>
FF_INLINE U unpack_high(U a, U b) {
  return unpack<4>(a, b, std::make_integer_sequence<int, sizeof(U) / 2>{});
}

// Two registers of floats that are bfloat16 as pairs, and such pairs as the register of two that has the first numbers
// apart from the second ones.
template <int B>
FF_INLINE Operands<Pair, B> pairs_of(Vec<float, B> first, Vec<float, B> second) {
  using U = Operands<Pair, B>;
  return bit_cast<U>(first) >> 16 | (bit_cast<U>(second) & 0xffff0000u);
}
template <class U, int... n>
FF_INLINE U put_apart(U pairs, std::integer_sequence<int, n...>) {
  using Halves = typename VecOf<uint16_t, sizeof(U)>::Type;
  const Halves halves = bit_cast<Halves>(pairs);
  return bit_cast<U>(shuffle<(n / 8 * 8 + n % 4 * 2 + n % 8 / 4)...>(halves, halves));
}
template <class U>
FF_INLINE U put_apart(U pairs) {
  return put_apart(pairs, std::make_integer_sequence<int, sizeof(U) / 2>{});
}
template <int B>
FF_INLINE Operands<Pair, B> pack_two(Vec<float, B> first, Vec<float, B> second) {
  return put_apart(pairs_of<B>(first, second));
}

// The same of twice as many numbers in their order, those of the first register before those of the second.
template <class V, int... four>
FF_INLINE V fours_of(V x, std::integer_sequence<int, four...>) {
  constexpr int n = sizeof...(four);
  using Fours = typename VecOf<uint64_t, sizeof(V)>::Type;
  const Fours fours = bit_cast<Fours>(x);
  return bit_cast<V>(shuffle<(four / 2 + four % 2 * (n / 2))...>(fours, fours));
}
template <class V>
FF_INLINE V fours_of(V x) {
  return fours_of(x, std::make_integer_sequence<int, sizeof(V) / 8>{});
}

// Two registers of floats, rounded, in one: in their order, and as `pack_two` has them.
template <int B>
FF_INLINE Operands<Pair, B> round_in_order(Vec<float, B> first, Vec<float, B> second) {
  Operands<Pair, B> out;
#if defined(FF_DISPATCH) && !defined(__clang__) && !defined(FF_EMULATE_PAIRS)
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(first), "v"(second));
#else
  BFloat16 numbers[B / 2];
  fastfact::store<B>(numbers, first);
  fastfact::store<B>(numbers + B / 4, second);
  std::memcpy(&out, numbers, B);
#endif
  return out;
}
template <int B>
FF_INLINE Operands<Pair, B> round_two(Vec<float, B> first, Vec<float, B> second) {
#if defined(FF_DISPATCH) && !defined(__clang__) && !defined(FF_EMULATE_PAIRS)
  return fours_of(round_in_order<B>(first, second));
#else
  using V = Vec<float, B>;
  using U = Operands<Pair, B>;
  return put_apart(float_to_bf16<V, U>(first) | float_to_bf16<V, U>(second) << 16);
#endif
}

// A float is the sum of three numbers of bfloat16, of which each has the next eight bits.
inline constexpr int kPieces = 3;

template <int B>
FF_INLINE Vec<float, B> rounded(Vec<float, B> x) {
  return bit_cast<Vec<float, B>>((bit_cast<Operands<Pair, B>>(x) + 0x8000u) & 0xffff0000u);
}
template <int B>
FF_INLINE void split(Vec<float, B> x, Vec<float, B> (&pieces)[kPieces]) {
  pieces[0] = rounded<B>(x);
  const Vec<float, B> rest = x - pieces[0];
  pieces[1] = rounded<B>(rest);
  pieces[2] = rest - pieces[1];
}

// Rows 2k and 2k + 1 of n numbers become row k of n pairs. `to` may be `from`.
template <int B>
FF_INLINE void make_pairs(const float* from, int64_t from_step, int64_t rows, int64_t n, float* to, int64_t to_step) {
  using V = Vec<float, B>;
  using U = Operands<Pair, B>;
  for (; rows > 0; rows -= 2, from += 2 * from_step, to += to_step) {
    const float* odd = from + from_step;
    int64_t j = 0;
    for (; j + kLanes<float, B> <= n; j += kLanes<float, B>) {
      const U pairs = float_to_bf16<V, U>(load<B>(from + j)) | float_to_bf16<V, U>(load<B>(odd + j)) << 16;
      store<B>(to + j, bit_cast<V>(pairs));
    }
    for (; j < n; ++j) {
      const uint32_t pair = from_compute<BFloat16>(from[j]).bits | uint32_t(from_compute<BFloat16>(odd[j]).bits) << 16;
      to[j] = bit_cast<float>(pair);
    }
  }
}

}  // namespace fastfact
