// The support of a sparse μ as bits, one a position, by which values are spread out and gathered eight at a time.
#pragma once

#include <array>
#include <atomic>
#include <memory>

#include "factored_conv.h"
#include "vec.h"

namespace fastfact {

// Bits of μ [rows, columns]: bit j of word w of a row is column 64 w + j, bits beyond the last column are 0.
// `before` [rows · words + 1] counts the nonzeros before each word. whole: all bits are 1.
struct Bits {
  int64_t rows, columns, words;
  const uint64_t* bits;
  const int32_t* before;
  bool whole;

  static int64_t words_of(int64_t columns) { return ceil_div(columns, 64); }
  const uint8_t* bytes(int64_t row, int64_t column) const {
    return reinterpret_cast<const uint8_t*>(bits + row * words) + column / 8;
  }
  // The nonzeros before a column that is a multiple of 8.
  int64_t start(int64_t row, int64_t column) const {
    const int64_t at = row * words + column / 64, word = before[at];
    return column % 64 ? word + __builtin_popcountll(bits[at] & ((uint64_t(1) << column % 64) - 1)) : word;
  }
  // Of rows without a gap between them, the nonzeros before a position, and whether one is there.
  int64_t before_position(int64_t at) const {
    const int64_t word = before[at / 64];
    return at % 64 ? word + __builtin_popcountll(bits[at / 64] & ((uint64_t(1) << at % 64) - 1)) : word;
  }
  bool has(int64_t at) const { return bits[at / 64] >> at % 64 & 1; }
};

// Whether values are spread by shuffles of registers; elsewhere lane by lane.
inline constexpr bool spreads(int bytes) { return bytes >= 32; }

// For a byte of bits, four bits for each lane.
using SpreadTable = std::array<uint32_t, 256>;

// Which of the values that follow goes to the lane; 8 where the bit is 0.
inline constexpr SpreadTable kSpread = [] {
  SpreadTable table{};
  for (int bits = 0; bits < 256; ++bits) {
    for (int lane = 0, next = 0; lane < 8; ++lane) table[bits] |= (bits >> lane & 1 ? next++ : 8u) << 4 * lane;
  }
  return table;
}();

// The lane of each of the values that follow.
inline constexpr SpreadTable kGather = [] {
  SpreadTable table{};
  for (int bits = 0; bits < 256; ++bits) {
    for (unsigned lane = 0, next = 0; lane < 8; ++lane) {
      if (bits >> lane & 1) table[bits] |= lane << 4 * next++;
    }
  }
  return table;
}();

using Eight = VecOf<float, 32>::Type;
using EightLanes = VecOf<uint32_t, 32>::Type;

FF_INLINE EightLanes lanes_of(const SpreadTable& table, unsigned byte) {
  return (EightLanes{} + table[byte]) >> EightLanes{0, 4, 8, 12, 16, 20, 24, 28};
}

// The next values where bits are 1, 0 elsewhere. Eight are read, unless that would be beyond `last` + 7.
template <class T>
FF_INLINE Eight spread(unsigned byte, const T* from, const T* last) {
  T some[8];
  if (__builtin_expect(from > last, 0)) {
    std::memset(static_cast<void*>(some), 0, sizeof(some));
    for (int k = 0; from + k < last + 8; ++k) some[k] = from[k];
    from = some;
  }
  using Signed = VecOf<int32_t, 32>::Type;
  const EightLanes lanes = lanes_of(kSpread, byte);
  const Signed none = bit_cast<Signed>(lanes << 28) >> 31;
  return bit_cast<Eight>(bit_cast<Signed>(permute(load<32>(from), lanes)) & ~none);
}

// Those of eight numbers whose bits are 1, one after the other. What lies behind them, before `end`, may change.
template <class T>
FF_INLINE void gather(unsigned byte, Eight x, T* to, const T* end) {
  const Eight found = permute(x, lanes_of(kGather, byte));
  if (__builtin_expect(to + 8 <= end, 1)) return store<32>(to, found);
  T some[8];
  store<32>(some, found);
  std::memcpy(static_cast<void*>(to), some, __builtin_popcount(byte) * sizeof(T));
}

// For a byte of bits, a byte for each lane: which of the values that follow goes there, 16 where the bit is 0.
inline constexpr std::array<uint64_t, 256> kSpreadBytes = [] {
  std::array<uint64_t, 256> table{};
  for (int bits = 0; bits < 256; ++bits) {
    for (int lane = 0, next = 0; lane < 8; ++lane) {
      table[bits] |= uint64_t(bits >> lane & 1 ? next++ : 16) << 8 * lane;
    }
  }
  return table;
}();

// For n, n in each byte of the upper half.
inline constexpr std::array<std::array<uint64_t, 2>, 9> kLater = [] {
  std::array<std::array<uint64_t, 2>, 9> table{};
  for (int n = 0; n < 9; ++n) table[n][1] = n * 0x0101010101010101u;
  return table;
}();

// As `spread`, a register of B bytes, eight numbers after the other; last(from) is what `spread` takes for each.
template <int B, class T, class Last>
FF_INLINE Vec<float, B> spread_bytes(const uint8_t* bits, const T*& from, const Last& last) {
  Vec<float, B> out{};
  for (int k = 0; k < B / 32; ++k) {
    const Eight part = spread(bits[k], from, last(from));
    std::memcpy(reinterpret_cast<char*>(&out) + 32 * k, &part, 32);
    from += __builtin_popcount(bits[k]);
  }
  return out;
}

// As `spread`, a register of B bytes, of which all are read, and `from` moves on to the values that come next.
#if defined(FF_DISPATCH) && !defined(__clang__)
// Whether VEXPANDPS is the faster way; on AMD's CPUs it takes a fifth longer.
inline const bool kExpandsFloats = [] {
  __builtin_cpu_init();
  return bool(__builtin_cpu_is("intel"));
}();

template <class T>
FF_INLINE Vec<float, 64> spread_sixteen(uint32_t bits, const T*& from) {
  const Vec<float, 64> values = in_register(load<64>(from));
  if (kExpandsFloats) {
    Vec<float, 64> out;
    asm("vexpandps %1, %0%{%2%}%{z%}" : "=v"(out) : "v"(values), "Yk"(uint16_t(bits)));
    from += __builtin_popcount(bits);
    return out;
  }
  using Two = VecOf<uint64_t, 16>::Type;
  const unsigned first = bits & 0xff, second = bits >> 8;
  const int64_t low = __builtin_popcount(first);
  from += low + __builtin_popcount(second);
  Two which = {kSpreadBytes[first], kSpreadBytes[second]}, later;
  std::memcpy(&later, &kLater[low], sizeof(later));
  which += later;
  // The compiler would widen bytes one by one.
  VecOf<int32_t, 64>::Type lanes;
  asm("vpmovzxbd %1, %0" : "=v"(lanes) : "v"(which));
  return __builtin_shuffle(values, Vec<float, 64>{}, lanes);
}
#endif
template <int B, class T>
FF_INLINE Vec<float, B> spread_next(const uint8_t* bits, const T*& from) {
#if defined(FF_DISPATCH) && !defined(__clang__)
  if constexpr (B == 64) {
    uint16_t there;
    std::memcpy(&there, bits, sizeof(there));
    return spread_sixteen(there, from);
  }
#endif
  return spread_bytes<B>(bits, from, [](const T* at) FF_INLINE_LAMBDA { return at; });
}

// As `spread_next`, but nothing is read beyond `last` + 7.
template <int B, class T>
FF_INLINE Vec<float, B> spread_within(const uint8_t* bits, const T*& from, const T* last) {
  if constexpr (B == 64) {
    if (__builtin_expect(from + 8 <= last, 1)) return spread_next<B>(bits, from);
  }
  return spread_bytes<B>(bits, from, [last](const T*) FF_INLINE_LAMBDA { return last; });
}

// The same by the lowest bits of a number.
template <int B, class T>
FF_INLINE Vec<float, B> spread_next(uint32_t bits, const T*& from) {
#if defined(FF_DISPATCH) && !defined(__clang__)
  if constexpr (B == 64) return spread_sixteen(bits & 0xffff, from);
#endif
  const uint8_t bytes[2] = {uint8_t(bits), uint8_t(bits >> 8)};
  return spread_next<B>(bytes, from);
}

// Whether bytes and numbers of 16 bits are spread and gathered a register at a time (AVX512_VBMI2).
#if defined(FF_DISPATCH) && !defined(__clang__)
template <int B>
inline constexpr bool kExpands = B == 64;
inline bool expands() {
  static const bool there = instruction_set_level() == kV4 && __builtin_cpu_supports("avx512vbmi2");
  return there;
}
#else
template <int B>
inline constexpr bool kExpands = false;
inline bool expands() { return false; }
#endif

template <int B>
using HalvesOf = typename VecOf<uint16_t, B>::Type;

// The next numbers of 16 bits where bits are 1, 0 elsewhere, and `from` moves on. A register of them is read.
template <int B, class T>
FF_INLINE HalvesOf<B> spread_halves([[maybe_unused]] const uint8_t* bits, const T*& from) {
  HalvesOf<B> out{};
#if defined(FF_DISPATCH) && !defined(__clang__)
  uint32_t there;
  std::memcpy(&there, bits, sizeof(there));
  HalvesOf<B> values;
  std::memcpy(&values, from, B);
  asm("vpexpandw %1, %0%{%2%}%{z%}" : "=v"(out) : "v"(values), "Yk"(there));
  from += __builtin_popcount(there);
#endif
  return out;
}

// Those of a register of numbers of 16 bits whose bits, from bit `shift` on, are 1, and `to` moves on. A register of
// them is written.
template <int B, class T>
FF_INLINE void gather_halves([[maybe_unused]] const uint8_t* bits, [[maybe_unused]] int shift,
                             [[maybe_unused]] const T* from, [[maybe_unused]] T*& to) {
#if defined(FF_DISPATCH) && !defined(__clang__)
  uint64_t word;
  std::memcpy(&word, bits, sizeof(word));
  const auto there = uint32_t(word >> shift);
  HalvesOf<B> values, out;
  std::memcpy(&values, from, B);
  asm("vpcompressw %1, %0%{%2%}%{z%}" : "=v"(out) : "v"(values), "Yk"(there));
  std::memcpy(static_cast<void*>(to), &out, B);
  to += __builtin_popcount(there);
#endif
}

#if defined(FF_DISPATCH) && !defined(__clang__)
// The first `count` numbers of a register.
template <class T>
FF_INLINE void store_some(T* to, Vec<float, 64> x, int count) {
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("vmovups %0, (%1)%{%2%}" : : "v"(x), "r"(to), "Yk"(uint16_t((1u << count) - 1)) : "memory");
  } else {
    T some[16];
    store<64>(some, x);
    std::memcpy(static_cast<void*>(to), some, count * sizeof(T));
  }
}
#endif

// As `gather`, a register of B bytes, and `to` moves on.
template <int B, class T>
FF_INLINE void gather_next(const uint8_t* bits, Vec<float, B> x, T*& to, const T* end) {
#if defined(FF_DISPATCH) && !defined(__clang__)
  if constexpr (B == 64) {
    uint16_t there;
    std::memcpy(&there, bits, sizeof(there));
    Vec<float, 64> found;
    asm("vcompressps %1, %0%{%2%}%{z%}" : "=v"(found) : "v"(x), "Yk"(there));
    const int count = __builtin_popcount(there);
    if (__builtin_expect(to + 16 <= end, 1)) {
      store<64>(to, found);
    } else {
      store_some(to, found, count);
    }
    to += count;
    return;
  }
#endif
  for (int k = 0; k < B / 32; ++k) {
    Eight part;
    std::memcpy(&part, reinterpret_cast<const char*>(&x) + 32 * k, 32);
    gather(bits[k], part, to, end);
    to += __builtin_popcount(bits[k]);
  }
}

// The same by the lowest bits of a number. As much as the register has may be written.
template <int B, class T>
FF_INLINE void gather_next(uint32_t bits, Vec<float, B> x, T*& to) {
  for (int k = 0; k < B / 32; ++k, bits >>= 8) {
    Eight part;
    std::memcpy(&part, reinterpret_cast<const char*>(&x) + 32 * k, 32);
    store<32>(to, permute(part, lanes_of(kGather, bits & 0xff)));
    to += __builtin_popcount(bits & 0xff);
  }
}

// The bits of one register after the other, from any position on.
template <int B>
struct BitsFrom {
  const uint8_t* at;
  int shift;

  FF_INLINE BitsFrom(const Bits& bits, int64_t position) : at(bits.bytes(0, position)), shift(position % 8) {}
  FF_INLINE uint32_t next() {
    uint32_t word;
    std::memcpy(&word, at, sizeof(word));
    at += B / 32;
    return word >> shift;
  }
};

// The support of positions in [0, rows · columns), or all of them for a dense μ, in memory of its own.
class OwnBits : public Bits {
 public:
  OwnBits(int64_t rows, int64_t columns, const Sparse& mu, ParallelFor parallel_for);
  bool valid() const { return valid_; }  // whether the positions ascend in this range
  int64_t bytes() const { return rows * words * (sizeof(uint64_t) + sizeof(int32_t)); }

 private:
  static constexpr int64_t kSpare = 16;  // words that may be read beyond the last
  Buffer<uint64_t> words_;
  Buffer<int32_t> counts_;
  std::atomic<bool> valid_{true};
};

// The bits of μ [rows, columns], null where its positions do not ascend in this range. Those used last are kept, up to
// 128 MiB, and given out again where the digest of all positions is that of those they were found for.
std::shared_ptr<const OwnBits> find_bits(int64_t rows, int64_t columns, const Sparse& mu, ParallelFor parallel_for);

}  // namespace fastfact
