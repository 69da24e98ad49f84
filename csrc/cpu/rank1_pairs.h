// W = Σ_r u_r ⊗ v_r + μ in bfloat16 where u runs along the rows of W and v is a number for each, and the gradients of u
// and v, two numbers at a time (`pairs.h`).
#pragma once

#include "pairs.h"
#include "transpose.h"

namespace fastfact {

template <int B>
struct PairedRows {
  using T = BFloat16;
  using V = Vec<float, B>;
  using U = Operands<Pair, B>;
  static constexpr int L = kLanes<float, B>;
  static constexpr int64_t kColumns = B / 2, kRows = 8;  // of a block

  FF_INLINE static U numbers(const T* p) { return load_operands<B>(reinterpret_cast<const Pair*>(p)); }

  FF_INLINE static U both(const T* scale) { return bit_cast<U>(pair_at(scale) - V{}); }

  // W at kColumns columns of so many rows, `stride` numbers apart; scale [pair of ranks][kRows][2].
  template <int Rows>
  FF_INLINE static void write_block(const T* u, int64_t u_stride, int64_t rank, const T* scale, const T* mu, T* w,
                                    int64_t stride) {
    V sum[Rows][2];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const U x = mu ? numbers(mu + m * stride) : U{};
      sum[m][0] = bit_cast<V>(unpack_low(U{}, x)), sum[m][1] = bit_cast<V>(unpack_high(U{}, x));
    }
    for (int64_t r = 0; r < rank; r += 2, scale += 2 * kRows) {
      const T* const from = u + r * u_stride;
      const U first = in_register(numbers(from)), second = r + 1 < rank ? in_register(numbers(from + u_stride)) : U{};
      const U low = in_register(unpack_low(first, second)), high = in_register(unpack_high(first, second));
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        const U by = both(scale + 2 * m);
        add_product<Pair, B>(sum[m][0], low, by), add_product<Pair, B>(sum[m][1], high, by);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const U out = round_two<B>(sum[m][0], sum[m][1]);
      std::memcpy(static_cast<void*>(w + m * stride), &out, B);
    }
  }

  // The lanes of the last block of n columns that no whole block has had.
  FF_INLINE static U lanes_left(int64_t n) {
    alignas(64) uint16_t lanes[kColumns];
    for (int64_t k = 0; k < kColumns; ++k) lanes[k] = k + n % kColumns >= kColumns ? 0xffff : 0;
    U out;
    std::memcpy(&out, lanes, B);
    return out;
  }

  // The last kColumns of n columns of so many rows, zeros where not `lanes_left`.
  FF_INLINE static void copy_last(const T* from, int64_t stride, int64_t rows, int64_t n, U left, T* to) {
    for (int64_t m = 0; m < rows; ++m, to += kColumns) {
      U some{};
      if (from && n >= kColumns) {
        some = numbers(from + m * stride + n - kColumns) & left;
      } else if (from) {
        std::memcpy(reinterpret_cast<T*>(&some) + kColumns - n, from + m * stride, n * sizeof(T));
      }
      std::memcpy(static_cast<void*>(to), &some, B);
    }
  }

  // n columns of so many rows; u_last [rank][kColumns] is what `copy_last` makes of u.
  template <int Rows>
  FF_INLINE static void write(const T* u, int64_t u_stride, const T* u_last, int64_t rank, const T* scale, const T* mu,
                              T* w, int64_t stride, int64_t n) {
    if (n < kColumns) {
      T some[Rows * kColumns], out[Rows * kColumns];
      copy_last(mu, stride, Rows, n, U{}, some);
      write_block<Rows>(u_last, kColumns, rank, scale, some, out, kColumns);
      for (int m = 0; m < Rows; ++m) {
        std::memcpy(static_cast<void*>(w + m * stride), out + (m + 1) * kColumns - n, n * sizeof(T));
      }
      return;
    }
    auto block = [&](int64_t j) FF_INLINE_LAMBDA {
      write_block<Rows>(u + j, u_stride, rank, scale, mu ? mu + j : nullptr, w + j, stride);
    };
    for (int64_t j = 0; j + kColumns <= n; j += kColumns) block(j);
    // The last block has some columns of the one before.
    if (n % kColumns) block(n - kColumns);
  }

  // v [rank][stride] at so many rows as [rank][kRows], zeros where there are no more.
  FF_INLINE static void copy_scales(const T* v, int64_t stride, int64_t rank, int64_t rows, T* to) {
    for (int64_t r = 0; r < rank; ++r, to += kRows) {
      if (rows == kRows) {
        std::memcpy(static_cast<void*>(to), v + r * stride, kRows * sizeof(T));
      } else {
        for (int64_t m = 0; m < kRows; ++m) to[m] = m < rows ? v[r * stride + m] : T{0};
      }
    }
  }

  // The same as [pair of ranks][kRows][2].
  FF_INLINE static void pair_scales(const T* v, int64_t stride, int64_t rank, int64_t rows, T* to) {
    for (int64_t r = 0; r < rank; r += 2) {
      for (int64_t m = 0; m < kRows; ++m, to += 2) {
        to[0] = m < rows ? v[r * stride + m] : T{0};
        to[1] = m < rows && r + 1 < rank ? v[(r + 1) * stride + m] : T{0};
      }
    }
  }

  // The gradients of `Ranks` ranks at kColumns columns of kRows rows g: lanes of those of v are added to dv
  // [rank][row], those of u to du [rank][kColumns] in the order of `unpack_low` and `unpack_high`.
  // scale [rank][pair of rows][2].
  template <int Ranks>
  FF_INLINE static void add_block(const T* const* g, const T* u, int64_t u_stride, const T* scale,
                                  V (&dv)[Ranks][kRows], float* du, int64_t du_stride) {
    U along[Ranks];
    V left[Ranks], right[Ranks];
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) {
      const float* const from = du + r * du_stride;
      along[r] = in_register(numbers(u + r * u_stride));
      left[r] = in_register(load<B>(from)), right[r] = in_register(load<B>(from + kColumns / 2));
    }
    // Two rows at a time, so that all sums stay in registers.
#pragma GCC unroll 4
    for (int p = 0; p < kRows / 2; ++p) {
      const U first = in_register(numbers(g[2 * p])), second = in_register(numbers(g[2 * p + 1]));
      const U low = in_register(unpack_low(first, second)), high = in_register(unpack_high(first, second));
#pragma GCC unroll 4
      for (int r = 0; r < Ranks; ++r) {
        const U by = both(scale + (r * kRows + 2 * p));
        add_product<Pair, B>(left[r], low, by), add_product<Pair, B>(right[r], high, by);
        add_product<Pair, B>(dv[r][2 * p], first, along[r]), add_product<Pair, B>(dv[r][2 * p + 1], second, along[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) {
      float* const to = du + r * du_stride;
      store<B>(to, left[r]), store<B>(to + kColumns / 2, right[r]);
    }
  }

  // The same of all columns, from rank r on, with a register more of `sums` than there are; g_last and u_last are what
  // `copy_last` makes of g and u.
  template <int Ranks>
  FF_INLINE static void add(const T* const (&g)[kRows], const T* g_last, int64_t n, const T* u, int64_t u_stride,
                            const T* u_last, const T* scale, float* sums, float* du, int64_t du_stride) {
    V dv[Ranks][kRows]{};
    int64_t j = 0;
    for (; j + kColumns <= n; j += kColumns) {
      const T* rows[kRows];
      for (int m = 0; m < kRows; ++m) rows[m] = g[m] + j;
      add_block<Ranks>(rows, u + j, u_stride, scale, dv, du + j, du_stride);
    }
    if (j < n) {
      const T* rows[kRows];
      for (int m = 0; m < kRows; ++m) rows[m] = g_last + m * kColumns;
      add_block<Ranks>(rows, u_last, kColumns, scale, dv, du + j, du_stride);
    }
    auto row = [&](int k) FF_INLINE_LAMBDA { return dv[k / kRows % Ranks][k % kRows]; };
#pragma GCC unroll 8
    for (int first = 0; first < Ranks * kRows; first += L) store<B>(sums + first, sums_of_rows<L, V>(row, first));
  }

  // Sums in the order of `unpack_low` and `unpack_high` in their own order, n of them.
  FF_INLINE static void in_order(const float* from, int64_t n, float* to) {
    constexpr std::make_integer_sequence<int, L> lanes;
    alignas(64) float rest[kColumns];
    for (int64_t j = 0; j < n; j += kColumns, from += kColumns) {
      const bool whole = j + kColumns <= n;
      const V low = load<B>(from), high = load<B>(from + kColumns / 2);
      float* const out = whole ? to + j : rest;
      store<B>(out, joined<0>(low, high, lanes)), store<B>(out + kColumns / 2, joined<L>(low, high, lanes));
      if (!whole) std::memcpy(to + j, rest + kColumns - (n - j), (n - j) * sizeof(float));
    }
  }

  // Columns from `first` on of sums in that order.
  template <int first, int... lane>
  FF_INLINE static V joined(V low, V high, std::integer_sequence<int, lane...>) {
    return shuffle<((first + lane) / 8 * 4 + lane % 4 + (first + lane) / 4 % 2 * L)...>(low, high);
  }
};

}  // namespace fastfact
