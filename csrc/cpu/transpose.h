// Matrices turned, a square of registers at a time.
#pragma once

#include <algorithm>

#include "vec.h"

namespace fastfact {

// Swaps lanes so that, after all distances D = 1, 2, 4 …, a square of registers is transposed.
template <int D, class V, int... lane>
FF_INLINE void exchange(V& a, V& b, std::integer_sequence<int, lane...>) {
  constexpr int n = sizeof...(lane);
  const V low = shuffle<(lane & D ? n + lane - D : lane)...>(a, b);
  b = shuffle<(lane & D ? n + lane : lane + D)...>(a, b);
  a = low;
}

template <int D, int N, class V>
FF_INLINE void transpose_from(V* rows) {
  if constexpr (D < N) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      if (!(j & D)) exchange<D>(rows[j], rows[j + D], std::make_integer_sequence<int, N>{});
    }
    transpose_from<2 * D, N>(rows);
  }
}

// Lane i of the result is the sum over the lanes ≡ i (mod Span) of row(first + i), for i < Span: with Span = all lanes,
// the sum of row(first + i). With Least, row(first) is that for Span = Least.
template <int Span, class V, int Least = 1, class Row>
FF_INLINE V sums_of_rows(Row& row, int first) {
  if constexpr (Span == Least) {
    return row(first);
  } else {
    constexpr int n = sizeof(V) / sizeof(V{}[0]);
    V a = sums_of_rows<Span / 2, V, Least>(row, first), b = sums_of_rows<Span / 2, V, Least>(row, first + Span / 2);
    exchange<Span / 2>(a, b, std::make_integer_sequence<int, n>{});
    return a + b;
  }
}

// Q registers hold a matrix [lanes, Q] row by row, Q odd. What a lane has in them is of Q different columns, and what a
// column has is in different lanes: registers are rotated, lane l by l places, so that each holds a column, whose lanes
// are then put in order: Q log2(Q) blends and Q permutations.
template <int Q, int lanes>
struct Columns {
  static constexpr std::make_integer_sequence<int, lanes> kLane{};
  static constexpr std::make_integer_sequence<int, Q> kColumn{};

  // x with a · x = 1 modulo m.
  static constexpr int inverse(int a, int m) {
    int x = 0;
    while ((a * x - 1) % m) ++x;
    return x;
  }
  static constexpr int kOfRegister = inverse(lanes, Q), kOfColumn = inverse(Q, lanes);

  // Lane l of register c is element [l, c].
  template <class V>
  FF_INLINE static void part(V (&x)[Q]) {
    V some[Q];
#pragma GCC unroll 32
    for (int s = 0; s < Q; ++s) some[s] = x[s * kOfRegister % Q];
    rotate<1, false>(some);
    order<false>(some, x, kColumn);
  }

  // The other way.
  template <class V>
  FF_INLINE static void join(V (&x)[Q]) {
    V some[Q];
    order<true>(x, some, kColumn);
    rotate<1, true>(some);
#pragma GCC unroll 32
    for (int s = 0; s < Q; ++s) x[s * kOfRegister % Q] = some[s];
  }

 private:
  template <int D, class V, int... lane>
  FF_INLINE static V blend(V stays, V comes, std::integer_sequence<int, lane...>) {
    return shuffle<(lane % Q & D ? lanes + lane : lane)...>(stays, comes);
  }

  template <int D, bool back, class V>
  FF_INLINE static void rotate(V (&x)[Q]) {
    if constexpr (D < Q && D < lanes) {
      V some[Q];
#pragma GCC unroll 32
      for (int s = 0; s < Q; ++s) some[s] = blend<D>(x[s], x[(back ? s + D : s + Q - D) % Q], kLane);
#pragma GCC unroll 32
      for (int s = 0; s < Q; ++s) x[s] = some[s];
      rotate<2 * D, back>(x);
    }
  }

  template <bool back, int c, class V, int... lane>
  FF_INLINE static V order_one(V x, std::integer_sequence<int, lane...>) {
    if constexpr (back) return shuffle<((lane - c + Q * lanes) * kOfColumn % lanes)...>(x, x);
    return shuffle<((Q * lane + c) % lanes)...>(x, x);
  }

  template <bool back, class V, int... c>
  FF_INLINE static void order(const V (&x)[Q], V (&out)[Q], std::integer_sequence<int, c...>) {
    ((out[c] = order_one<back, c>(x[c], kLane)), ...);
  }
};

// n numbers, fewer than a register of B bytes has.
template <int B, class C, class T>
FF_INLINE void store_some(const C* from, int64_t n, T* to) {
  if constexpr (B / 2 >= 16) {
    constexpr int count = B / 2 / int(sizeof(C));
    if (n >= count) {
      store<B / 2>(to, load<B / 2>(from));
      from += count, to += count, n -= count;
    }
    store_some<B / 2>(from, n, to);
  } else {
    for (int64_t j = 0; j < n; ++j) to[j] = from_compute<T>(from[j]);
  }
}

// to[n][m] = from[m][n]. Nothing is read from `end` on.
template <int B, class From, class To>
FF_INLINE void transpose(const From* from, int64_t from_step, int64_t rows, int64_t columns, const From* end, To* to,
                         int64_t to_step) {
  using C = Compute<From>;
  using V = Vec<From, B>;
  constexpr int L = kLanes<From, B>;
  outline<B>([&]() FF_INLINE_LAMBDA {
    const int64_t height = std::min<int64_t>(rows, L), width = std::min<int64_t>(columns, L);
    for (int64_t row = 0; row < rows; row += L) {
      for (int64_t column = 0; column < columns; column += L) {
        // The last square has some rows and columns of the one before.
        const int64_t m = std::min(row, rows - height), n = std::min(column, columns - width);
        const From* at = from + m * from_step + n;
        To* out = to + n * to_step + m;
        V lines[L];
        if (height == L && (width == L || end - at >= (L - 1) * from_step + L)) {
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) lines[l] = load<B>(at + l * from_step);
          transpose_from<1, L>(lines);
          if (width == L) {
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) store<B>(out + l * to_step, lines[l]);
          } else {
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) {
              if (l < width) store<B>(out + l * to_step, lines[l]);
            }
          }
          continue;
        }
        alignas(64) C block[L][L]{};
        for (int l = 0; l < L && l < height; ++l) {
          if (end - at >= l * from_step + L) {
            store<B>(block[l], load<B>(at + l * from_step));
          } else {
            for (int64_t k = 0; k < width; ++k) block[l][k] = to_compute(at[l * from_step + k]);
          }
        }
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(block[l]);
        transpose_from<1, L>(lines);
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) store<B>(block[l], lines[l]);
        for (int l = 0; l < L && l < width; ++l) {
          if (height == L) {
            store<B>(out + l * to_step, load<B>(block[l]));
          } else {
            store_some<B>(block[l], height, out + l * to_step);
          }
        }
      }
    }
  });
}

}  // namespace fastfact
