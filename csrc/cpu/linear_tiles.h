// What the products of a factored linear layer where μ is dense (linear_tiles.cpp, linear_gradient.cpp,
// linear_rows.cpp) have in common: its weight, and the tiles they are computed in.
#pragma once

#include "pieces.h"
#include "support.h"

namespace fastfact {

// W [o, i] = Σ_r v_r ⊗ u_r + μ, factors as float in rows padded with zeros.
template <class T>
struct TiledWeight {
  int64_t i, o, rank, u_row, v_row;
  const float *u, *v;
  const T *values, *last;  // from `last` on fewer than eight values can be read
  Bits support;
  const T *u_in_memory, *v_in_memory;  // u [rank, i], v [rank, o]
};

// n numbers as float, zeros behind them up to `row`.
template <class T, int B>
struct CopyRow {
  FF_INLINE static void run(const T* from, int64_t n, int64_t row, float* to) {
    copy<B>(from, n, to);
    std::fill(to + n, to + row, 0.f);
  }
};

// Rows [rank, size] as float, each padded with zeros to a multiple of 64 numbers; where they lie if they are that.
template <class T>
struct Padded {
  int64_t row;
  const float* data;

  Padded(const void* from, int64_t rows, int64_t size)
      : row(ceil_div(size, 64) * 64), data(static_cast<const float*>(from)), own_(lies_so(size) ? 0 : rows * row) {
    if (lies_so(size)) return;
    data = own_.get();
    for (int64_t r = 0; r < rows; ++r) {
      dispatch<CopyRow, T>(static_cast<const T*>(from) + r * size, size, row, own_.get() + r * row);
    }
  }

 private:
  const Scratch<float> own_;

  bool lies_so(int64_t size) const { return std::is_same_v<T, float> && size == row; }
};

// Rows of a tile of a product.
inline int64_t tile_of(bool amx) { return amx ? kRowsByAmx : tile_rows(register_bytes()); }

// Whether products in pairs are those of AMX.
inline bool by_amx(bool pairs) { return pairs && register_bytes() == 64 && has_amx(); }

// Whether products of floats with so many terms are, in pieces, where what is padded takes less than is won.
template <class T>
bool splits(int64_t terms) {
  return std::is_same_v<T, float> && by_amx(true) && whole(terms, kAmxTerms) <= terms + terms / 3;
}
inline constexpr int64_t kLeastInPieces = 192;  // rows that repay that W, or blocks of dW, are split for one product

// Whether thin products of n rows and the factors take less than what the factors take beside W or dW.
inline bool are_thin(int64_t n, int64_t i, int64_t o) { return double(n) * double(i + o) < double(i) * double(o); }

// Values of a row of W that are read next.
template <class T>
FF_INLINE void fetch(const T* from, int64_t count) {
  for (int64_t k = 0; k < count; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k);
}

// The gradients of the values and the factors, of dW = dyᵀ x, null where not asked for (linear_gradient.cpp).
template <class T>
void sum_gradients(const TiledWeight<T>& w, int64_t n, const T* x, const T* dy, T* dvalues, T* du, T* dv,
                   int64_t threads, ParallelFor parallel_for);

// A gradient [rank, columns] of factors: Σ over the rows of hidden [n, rank], with kMostTile numbers behind the last,
// and rows [n, columns]. Nothing where `out` is null.
template <class T>
struct FactorGradient {
  const T* rows;
  int64_t columns;
  const float* hidden;
  T* out;
};
inline constexpr int64_t kMostTile = 12;
template <class T>
void sum_factors(const FactorGradient<T>& du, const FactorGradient<T>& dv, int64_t n, int64_t rank,
                 ParallelFor parallel_for);

// The products where the rows are so few that what counts is how W is read.
inline constexpr int64_t kFewRows = 16;
template <class T>
void multiply_few(const TiledWeight<T>& w, const FactoredLinear& op, ParallelFor parallel_for);
template <class T>
void multiply_few_backward(const TiledWeight<T>& w, const FactoredLinearBackward& op, ParallelFor parallel_for);

}  // namespace fastfact
