// The support of a sparse μ as bits, one a position, by which values are spread out and gathered eight at a time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "factored_conv.h"
#include "vec.h"

namespace fastfact {

// Bits of μ [rows, columns]: bit j of word w of a row is column 64 w + j, bits beyond the last column are 0.
// `before` [rows · words + 1] counts the nonzeros before each word.
struct Bits {
  int64_t rows, columns, words;
  const uint64_t* bits;
  const int32_t* before;

  static int64_t words_of(int64_t columns) { return ceil_div(columns, 64); }
  const uint8_t* bytes(int64_t row, int64_t column) const {
    return reinterpret_cast<const uint8_t*>(bits + row * words) + column / 8;
  }
  // The nonzeros before a column that is a multiple of 64.
  int64_t start(int64_t row, int64_t column) const { return before[row * words + column / 64]; }
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

// Only the lowest three bits of a lane are looked at.
FF_INLINE Eight permute(Eight x, EightLanes lanes) {
#ifdef __clang__
  Eight out;
  for (int lane = 0; lane < 8; ++lane) out[lane] = x[lanes[lane] & 7];
  return out;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

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

// Bits and counts of rows [begin, end) whose nonzeros are `index` from `nz` to `stop`. Returns whether these are
// ascending positions in the rows; if not, bits and counts are of no use.
template <class T, int B>
struct FindBits {
  static constexpr int64_t kSegment = 4096;

  FF_INLINE static void run(const int32_t* index, int64_t nz, int64_t stop, int64_t columns, int64_t begin, int64_t end,
                            uint64_t* bits, int32_t* before, std::atomic<bool>* valid) {
    using Lanes = VecOf<int32_t, 32>::Type;
    alignas(64) uint8_t seen[kSegment];
    const int64_t words = Bits::words_of(columns), first_nz = nz;
    bool sorted = nz == stop || index[nz] >= begin * columns;
    Lanes wrong{};
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < columns; first += kSegment) {
        const int64_t base = row * columns + first, size = std::min(kSegment, columns - first);
        int64_t count = nz;
        std::memset(seen, 0, ceil_div(size, 64) * 64);
        auto mark = [&](int64_t at) FF_INLINE_LAMBDA { seen[(index[at] - uint32_t(base)) % kSegment] = 1; };
        if (nz == first_nz && nz < stop && index[nz] - base < size) mark(nz++);
        for (; nz > first_nz && nz + 8 <= stop && index[nz + 7] - base < size; nz += 8) {
          Lanes previous, now;
          std::memcpy(&previous, index + nz - 1, 32);
          std::memcpy(&now, index + nz, 32);
          wrong |= previous >= now;
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) mark(nz + k);
        }
        for (; nz > first_nz && nz < stop && index[nz] - base < size; ++nz) {
          sorted &= index[nz - 1] < index[nz];
          mark(nz);
        }
        for (int64_t w = 0; w < ceil_div(size, 64); ++w) {
          uint64_t word = 0;
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            uint64_t eight;
            std::memcpy(&eight, seen + 64 * w + 8 * k, 8);
            word |= (eight * 0x0102040810204080u >> 56) << 8 * k;
          }
          bits[row * words + first / 64 + w] = word;
          before[row * words + first / 64 + w] = int32_t(count);
          count += __builtin_popcountll(word);
        }
      }
    }
    for (int k = 0; k < 8; ++k) sorted &= !wrong[k];
    if (!sorted || nz != stop) *valid = false;
  }
};

// The support of positions in [0, rows · columns), in memory of its own.
class OwnBits : public Bits {
 public:
  bool valid() const { return valid_; }  // whether the positions ascend in this range

  OwnBits(int64_t rows, int64_t columns, const Sparse& mu, ParallelFor parallel_for)
      : Bits{rows, columns, words_of(columns), nullptr, nullptr}, words_(rows * words), counts_(rows * words + 1) {
    bits = words_.get(), before = counts_.get();
    const int64_t chunks = std::clamp<int64_t>((mu.count + rows * words) >> 14, 1, std::clamp<int64_t>(rows, 1, 64));
    std::vector<int64_t> starts(chunks + 1);
    for (int64_t k = 1; k < chunks; ++k) {
      const int32_t *const from = mu.index + starts[k - 1], *const end = mu.index + mu.count;
      starts[k] = std::lower_bound(from, end, k * rows / chunks * columns) - mu.index;
    }
    starts[chunks] = mu.count;
    parallel(parallel_for, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        dispatch<FindBits, float>(mu.index, starts[k], starts[k + 1], columns, k * rows / chunks,
                                  (k + 1) * rows / chunks, words_.get(), counts_.get(), &valid_);
      }
    });
    counts_.get()[rows * words] = int32_t(mu.count);
  }

 private:
  Scratch<uint64_t> words_;
  Scratch<int32_t> counts_;
  std::atomic<bool> valid_{true};
};

}  // namespace fastfact
