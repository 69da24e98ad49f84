// Products of floats by AMX: operands as sums of three numbers of bfloat16 (amx.h), in the order in which it reads
// them.
#pragma once

#include "amx.h"
#include "gemm.h"

namespace fastfact {

// Rows of a tile by AMX.
inline constexpr int64_t kRowsByAmx = 2 * kAmxRows;

inline int64_t whole(int64_t count, int64_t of) { return ceil_div(count, of) * of; }

// How many numbers of bfloat16 so many floats are as terms of a product.
inline int64_t in_pieces(int64_t terms) { return kPieces * whole(terms, kAmxTerms); }

// A panel [term][32 columns] as [block][piece][pair][32 columns], zeros behind the last term.
template <class, int B>
struct SplitPanel {
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  static constexpr int64_t kBlock = kAmxRows * NR;  // pairs of a piece

  FF_INLINE static void run(const float* from, int64_t terms, float* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t t = 0; t < whole(terms, kAmxTerms); t += 2, from += 2 * NR) {
        const bool both = t + 1 < terms;
        split_pairs(t < terms ? from : nullptr, both ? from + NR : nullptr, NR, to + place(t));
      }
    });
  }

  FF_INLINE static int64_t place(int64_t term) {
    return term / kAmxTerms * kPieces * kBlock + term % kAmxTerms / 2 * NR;
  }

  // 32 numbers of two rows that follow each other, either of which may not be there, zeros behind `count` of them.
  FF_INLINE static void split_pairs(const float* one, const float* other, int64_t count, float* to) {
    alignas(B) float rows[2][NR];
    if (!one || !other || count < NR) {
      std::memset(rows, 0, sizeof(rows));
      if (one) std::memcpy(rows[0], one, std::min<int64_t>(count, NR) * sizeof(float));
      if (other) std::memcpy(rows[1], other, std::min<int64_t>(count, NR) * sizeof(float));
      one = rows[0], other = rows[1];
    }
#pragma GCC unroll 2
    for (int part = 0; part < NR; part += L) {
      Vec<float, B> first[kPieces], second[kPieces];
      split<B>(load<B>(one + part), first);
      split<B>(load<B>(other + part), second);
#pragma GCC unroll 3
      for (int k = 0; k < kPieces; ++k) {
        const auto pairs = pairs_of<B>(first[k], second[k]);
        std::memcpy(to + k * kBlock + part, &pairs, B);
      }
    }
  }

  // A register of `count` floats, zeros where there are no more.
  FF_INLINE static Vec<float, B> some(const float* from, int64_t count) {
    if (from && count >= L) return load<B>(from);
    alignas(B) float numbers[L] = {};
    if (from && count > 0) std::memcpy(numbers, from, count * sizeof(float));
    return load<B>(numbers);
  }
};

// Numbers `first` to `first` + 15 of 32 rows of `count`, which may not be there, turned: [piece][number][pair of rows],
// zeros where there are none. number, piece: how far apart those are, in pairs.
template <class, int B>
struct TurnRows {
  static constexpr int L = B / int(sizeof(float));

  FF_INLINE static void run(const float* const (&rows)[kAmxTerms], int64_t first, int64_t count, float* to,
                            int64_t number, int64_t piece) {
    using V = Vec<float, B>;
    V lines[kPieces][L];
    for (int l = 0; l < L; ++l) {
      const float *const one = rows[2 * l], *const other = rows[2 * l + 1];
      V low[kPieces], high[kPieces];
      split<B>(SplitPanel<float, B>::some(one ? one + first : nullptr, count - first), low);
      split<B>(SplitPanel<float, B>::some(other ? other + first : nullptr, count - first), high);
#pragma GCC unroll 3
      for (int k = 0; k < kPieces; ++k) lines[k][l] = bit_cast<V>(pairs_of<B>(low[k], high[k]));
    }
    for (int k = 0; k < kPieces; ++k) {
      PackPanels<float, B>::template transpose_lanes<L / 2>(lines[k]);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<B>(to + k * piece + l * number, lines[k][l]);
    }
  }
};

// Rows of so many terms, `step` apart, as [tile of rows][block][piece][row][term], zeros where there are none.
template <class, int B>
struct SplitRows {
  static constexpr int L = B / int(sizeof(float));
  FF_INLINE static void run(const float* from, int64_t step, int64_t rows, int64_t terms, BFloat16* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t first = 0; first < rows; first += kRowsByAmx, from += kRowsByAmx * step) {
        const int64_t there = std::min(kRowsByAmx, rows - first);
        for (int64_t t = 0; t < terms; t += kAmxTerms, to += kPieces * kRowsByAmx * kAmxTerms) {
          split_block(from + t, step, there, std::min(kAmxTerms, terms - t), to);
        }
      }
    });
  }

  FF_INLINE static void split_block(const float* from, int64_t step, int64_t rows, int64_t terms, BFloat16* to) {
    if (terms == kAmxTerms && rows == kRowsByAmx) {
      for (int64_t m = 0; m < kRowsByAmx; ++m) split_terms(from + m * step, to + m * kAmxTerms, kPiece);
      return;
    }
    for (int64_t m = 0; m < kRowsByAmx; ++m) {
      alignas(B) float some[kAmxTerms] = {};
      if (m < rows) std::memcpy(some, from + m * step, terms * sizeof(float));
      split_terms(some, to + m * kAmxTerms, kPiece);
    }
  }

  static constexpr int64_t kPiece = kRowsByAmx * kAmxTerms;

  // 32 numbers, their pieces so far apart.
  FF_INLINE static void split_terms(const float* from, BFloat16* to, int64_t apart) {
    Vec<float, B> first[kPieces], second[kPieces];
    split<B>(load<B>(from), first);
    split<B>(load<B>(from + L), second);
#pragma GCC unroll 3
    for (int k = 0; k < kPieces; ++k) {
      const auto both = round_in_order<B>(first[k], second[k]);
      std::memcpy(static_cast<void*>(to + k * apart), &both, B);
    }
  }
};

// What is fetched to the second cache meanwhile, a few lines at a time: rows of so many bytes, `step` apart.
struct Upcoming {
  const char* at = nullptr;
  int64_t rows = 0, bytes = 0, step = 0, lines = 0, within = 0;

  FF_INLINE void fetch() {
    for (int64_t k = 0; k < lines && rows > 0; ++k) {
      __builtin_prefetch(at + within, 0, 2);
      if ((within += 64) >= bytes) within = 0, at += step, --rows;
    }
  }
};

}  // namespace fastfact
