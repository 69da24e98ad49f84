// The gradients of u and v where u runs along the rows of W and v is a number for each, a few ranks of a few rows at a
// time, so that what is read of dW serves all of them.
#pragma once

#include "transpose.h"
#include "vec.h"

namespace fastfact {

// Sums of `count` chunks of n numbers, `step` numbers from one to the next, in order.
template <class T, int B>
struct AddChunks {
  FF_INLINE static void run(const Compute<T>* from, int64_t count, int64_t step, int64_t n, T* to) {
    using V = Vec<T, B>;
    constexpr int64_t L = kLanes<T, B>;
    int64_t j = 0;
    for (; j + L <= n; j += L) {
      V sum = load<B>(from + j);
      for (int64_t c = 1; c < count; ++c) sum += load<B>(from + c * step + j);
      store<B>(to + j, sum);
    }
    for (; j < n; ++j) {
      Compute<T> sum = from[j];
      for (int64_t c = 1; c < count; ++c) sum += from[c * step + j];
      to[j] = from_compute<T>(sum);
    }
  }
};

// `PairedRows` (rank1_pairs.h) has the same functions for bfloat16 in pairs.
template <class C, int B>
struct SingleRows {
  using T = C;
  using V = Vec<C, B>;
  static constexpr int L = kLanes<C, B>;
  static constexpr int64_t kColumns = L, kRows = B == 64 ? 8 : 4;  // of a block

  // The columns that no whole block has had.
  FF_INLINE static int64_t lanes_left(int64_t n) { return n % kColumns; }

  // The last of n columns of so many rows, zeros behind them.
  FF_INLINE static void copy_last(const C* from, int64_t stride, int64_t rows, int64_t n, int64_t left, C* to) {
    if (!left) return;
    for (int64_t m = 0; m < rows; ++m, to += kColumns) {
      store<B>(to, V{});
      std::memcpy(to, from + m * stride + n - left, left * sizeof(C));
    }
  }

  // v [rank][stride] at so many rows as [rank][kRows], zeros where there are no more.
  template <class S>
  FF_INLINE static void copy_scales(const S* v, int64_t stride, int64_t rank, int64_t rows, C* to) {
    for (int64_t r = 0; r < rank; ++r, to += kRows) {
      for (int64_t m = 0; m < kRows; ++m) to[m] = m < rows ? to_compute(v[r * stride + m]) : C(0);
    }
  }

  // The gradients of `Ranks` ranks at kColumns columns of kRows rows g: lanes of those of v are added to dv
  // [rank][row], those of u to du [rank][kColumns]. scale [rank][row].
  template <int Ranks>
  FF_INLINE static void add_block(const C* const* g, const C* u, int64_t u_stride, const C* scale,
                                  V (&dv)[Ranks][kRows], C* du, int64_t du_stride) {
    V along[Ranks], sum[Ranks];
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) {
      along[r] = in_register(load<B>(u + r * u_stride)), sum[r] = in_register(load<B>(du + r * du_stride));
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const V x = in_register(load<B>(g[m]));
#pragma GCC unroll 4
      for (int r = 0; r < Ranks; ++r) {
        sum[r] += x * scale[r * kRows + m];
        dv[r][m] += x * along[r];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) store<B>(du + r * du_stride, sum[r]);
  }

  // The same of all columns, from rank r on, with a register more of `sums` than there are; g_last and u_last are what
  // `copy_last` makes of g and u.
  template <int Ranks>
  FF_INLINE static void add(const C* const (&g)[kRows], const C* g_last, int64_t n, const C* u, int64_t u_stride,
                            const C* u_last, const C* scale, C* sums, C* du, int64_t du_stride) {
    V dv[Ranks][kRows]{};
    const C* rows[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) rows[m] = g[m];
    int64_t j = 0;
    for (; j + kColumns <= n; j += kColumns) {
      add_block<Ranks>(rows, u + j, u_stride, scale, dv, du + j, du_stride);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) rows[m] += kColumns;
    }
    if (j < n) {
      for (int m = 0; m < kRows; ++m) rows[m] = g_last + m * kColumns;
      add_block<Ranks>(rows, u_last, kColumns, scale, dv, du + j, du_stride);
    }
    sum_lanes_of(dv, sums);
  }

  // The sums over the lanes of dv, with a register more of `sums` than there are.
  template <int Ranks>
  FF_INLINE static void sum_lanes_of(const V (&dv)[Ranks][kRows], C* sums) {
    auto row = [&](int k) FF_INLINE_LAMBDA { return dv[k / kRows % Ranks][k % kRows]; };
#pragma GCC unroll 8
    for (int first = 0; first < Ranks * kRows; first += L) store<B>(sums + first, sums_of_rows<L, V>(row, first));
  }

  FF_INLINE static void in_order(const C* from, int64_t n, C* to) { std::memcpy(to, from, n * sizeof(C)); }
};

}  // namespace fastfact
