// The factored linear layer (factored_linear.cpp) where μ is dense enough for products of dense matrices.
//
// W = Σ_r v_r ⊗ u_r + μ is made a panel at a time, from values spread out by the bits of their support, in the layout
// in which a product reads it, and multiplied by all rows while it is in cache; nothing of the size of W is written to
// memory. Rows of x (dy) are packed in panels of a tile's height.
//
// Where rows are few W is μ alone, and factors are further terms of the product: h = x uᵀ beside x, and v beside μ. So
// it is where bfloat16 is multiplied in pairs, h being the sum of two numbers of bfloat16.
//
// By AMX floats are multiplied in pieces (pieces.h), W split where it is made, rows for each part of the product.
#include "linear_tiles.h"

#include <cmath>
#include <memory>
#include <vector>

#include "items.h"
#include "linear_weight.h"
#include "transpose.h"

namespace fastfact {
namespace {

// Of the depth of a product of rows and W, multiples of 64. Longer is a little faster and less accurate (`kDepth`).
constexpr int64_t kSlice = 512, kSliceOfPairs = kMostTerms, kSliceByAmx = 512;
constexpr int64_t kFewInPairs = 6;  // rows that are multiplied in float
constexpr int64_t kPass = 252;      // rows whose slice the second cache holds, at most
constexpr int64_t kGroup = 64;      // columns of W made together, at most; n · 64
constexpr int64_t kGroupByAmx = 1 << 19,
                  kMostByAmx = 256;   // numbers and columns of W by AMX, which takes rows in faster
constexpr int64_t kPacked = 1 << 21;  // numbers of x packed at once
constexpr int64_t kNarrow = 384;      // columns of W for which rows are read where they lie in any case, and
constexpr int64_t kPage = 4096;       // otherwise only if they are no multiple of so many bytes apart

// Terms with those that fill a block of AMX.
int64_t whole_blocks(int64_t terms, bool amx) { return amx ? whole(terms, kAmxTerms) : terms; }

int64_t slice_of(int64_t depth, int64_t most) {
  const int64_t slices = ceil_div(std::max<int64_t>(depth, 1), most);
  return ceil_div(ceil_div(std::max<int64_t>(depth, 1), slices), 64) * 64;
}

// A part of a product of rows and W, of whole tiles and panels. No number depends on how a product is cut into parts.
struct Part {
  int64_t row, rows, column, columns;
};

// y [n, columns] = x [n, depth] · right, which is W or, `turned`, Wᵀ.
template <class T>
struct RowsProduct {
  TiledWeight<T> w;
  bool turned;
  int64_t n, depth, columns, slice, group, range, pass;  // columns and rows of an item at most, rows of a pass
  const Part* parts;                                     // the items
  const float* panels;                                   // W as `pack_panels` has it, or null: it is made
  const float *packed, *bias;  // x [tile][depth][tile's height], or null: it is read where it is; bias padded, or null
  const T* x;
  T* y;
  // Factors of more ranks than are added to W's panels one by one, w.rank being 0: [slice][tile of terms][rank][tile's
  // height] and [panel of columns][rank][its width].
  int64_t rank;
  const float *of_terms, *of_columns;
  // Factors that are further terms of the product stand so: h = x uᵀ [row][rank] and [panel of columns][rank][its
  // width], in pairs where x and W are, of which there are half as many terms then.
  bool pairs;
  int64_t beside_rank;
  const void *hidden, *beside;
  // By AMX terms are padded with zeros to whole blocks; rows [n][row] are read where they are, but for the last tile of
  // fewer than `kRowsByAmx`, which `rest` has.
  bool amx;
  const BFloat16 *rows, *rest;
  int64_t row;

  // Where a tile of R · 16 rows begins.
  template <int R>
  FF_INLINE const BFloat16* tile(int64_t first) const {
    return first + R * kAmxRows <= n ? rows + first * row : rest;
  }
  int64_t padded(int64_t terms) const { return whole_blocks(terms, amx); }
};

// Of a product by pieces (pieces.h): the depth of a slice, numbers of W and columns of a part, rows that are split
// together.
constexpr int64_t kSliceInPieces = 1024, kGroupInPieces = 1 << 18, kMostInPieces = 512, kSplitRows = 96;

// Whether y and dx are multiplied in pairs.
template <class T>
bool rows_in_pairs(int64_t depth) {
#if defined(FF_DISPATCH) && !defined(__clang__)
  if (!expands()) return false;
#endif
  return in_pairs<T>(depth);
}

// Whether rows of x (dy), T as it lies in memory, can be operands E where they are.
template <class T, class E>
constexpr bool kReadsRows = std::is_same_v<T, E> || std::is_same_v<E, Pair>;

template <class T, int B>
struct RunProduct {
  using V = Vec<float, B>;
  static constexpr int L = B / int(sizeof(float)), MR = tile_rows(B), NR = 2 * L;

  // Items are `parts`.
  FF_INLINE static void run(const RowsProduct<T>& p, const Items& items) {
    const int64_t all = ceil_div(std::min(p.group, p.columns), NR);
    const bool again = p.range > p.pass;
    const int64_t factors = p.pairs ? 2 : 1, tile = p.amx ? kRowsByAmx : MR;
    const Scratch<float> slab(p.panels ? 0 : p.padded(again ? p.depth : p.slice) * all * NR);
    const Scratch<float> kept(all * whole(p.pass, tile) * NR);
    const AmxTiles tiles(p.amx);
    for (int64_t item; (item = items.take()) < items.count();) {
      const Part& part = p.parts[item];
      const int64_t first = part.row, last = first + part.rows;
      const int64_t column = part.column, panels = ceil_div(part.columns, NR);
      for (int64_t row = first; row < last; row += p.pass) {
        const int64_t rows = std::min(p.pass, last - row), of_panel = whole(rows, tile) * NR;
        for (int64_t d = 0; d < p.depth; d += p.slice) {
          const int64_t terms = std::min(p.slice, p.depth - d);
          float* const made = slab.get() + (again ? d / factors * panels * NR : 0);
          const float* const right = p.panels ? p.panels + (column * p.padded(p.depth) + d * NR) / factors : made;
          const int64_t step = p.padded(p.panels ? p.depth : terms) / factors * NR;
          if (row == first && !p.panels) {
            using Make = MakePanels<T, B>;
            if (p.pairs) {
              Make::make_pairs(p.w, p.turned, column, panels, d, terms, p.padded(terms), made);
            } else if (p.turned) {
              Make::make_turned(p.w, column, panels, d, terms, made);
            } else {
              Make::make(p.w, column, panels, d, terms, made);
            }
            if (p.rank) add_factors(p, column, panels, d, terms, made);
          }
          for (int64_t panel = 0; panel < panels; ++panel) {
            if (p.amx) {
              multiply_by_amx(p, row, rows, column + panel * NR, d, terms, right + panel * step,
                              kept.get() + panel * of_panel);
              continue;
            }
            with_operand<T, B>(p.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
              using E = decltype(operand);
              const int64_t first = column + panel * NR;
              auto by = [&]<int N>() FF_INLINE_LAMBDA {
                const float* const of_columns = right + panel * step;
                float* const sums = kept.get() + panel * of_panel;
                const int64_t of_tiles = rows / MR * MR;
                outline<B>([&]() FF_INLINE_LAMBDA {
                  multiply<E, N, MR>(p, row, of_tiles, first, d, terms, of_columns, sums);
                });
                if (of_tiles == rows) return;
                MultiplyTiles<float, B>::with_height(rows - of_tiles, [&]<int M>() FF_INLINE_LAMBDA {
                  outline<B>([&]() FF_INLINE_LAMBDA {
                    multiply<E, N, M>(p, row + of_tiles, rows - of_tiles, first, d, terms, of_columns,
                                      sums + of_tiles * NR);
                  });
                });
              };
              p.columns - first > L ? by.template operator()<2>() : by.template operator()<1>();
            });
          }
        }
      }
    }
  }

  // count < 2 · kPiece numbers, in pieces of powers of two.
  template <int kPiece>
  FF_INLINE static void copy_some(const T* from, int64_t count, T* to) {
    if (count & kPiece) std::memcpy(static_cast<void*>(to), from, kPiece * sizeof(T)), from += kPiece, to += kPiece;
    if constexpr (kPiece > 1) copy_some<kPiece / 2>(from, count, to);
  }

  // A panel of W times a slice of some rows by AMX: sums to `kept`, [row][column], and of the last slice to y.
  FF_INLINE static void multiply_by_amx(const RowsProduct<T>& p, int64_t row, int64_t rows, int64_t column, int64_t d,
                                        int64_t terms, const float* right, float* kept) {
    if constexpr (std::is_same_v<T, BFloat16> && B == 64) {
      const bool wide = p.columns - column > L;
      outline<B>([&]() FF_INLINE_LAMBDA {
        for (const int64_t last = row + rows; row < last; row += kRowsByAmx, kept += kRowsByAmx * NR) {
          if (last - row > kAmxRows) {
            wide ? multiply_tile<2, 2>(p, row, column, d, terms, right, kept)
                 : multiply_tile<2, 1>(p, row, column, d, terms, right, kept);
          } else {
            wide ? multiply_tile<1, 2>(p, row, column, d, terms, right, kept)
                 : multiply_tile<1, 1>(p, row, column, d, terms, right, kept);
          }
        }
      });
    }
  }

  template <int R, int N>
  FF_INLINE static void multiply_tile(const RowsProduct<T>& p, int64_t row, int64_t column, int64_t d, int64_t terms,
                                      const float* right, float* kept) {
    using S = AmxSums<R, N>;
    constexpr int64_t kSize = sizeof(BFloat16);
    const BFloat16* const left = p.template tile<R>(row) + d;
    d ? S::load(kept, NR) : S::clear();
    S::multiply(reinterpret_cast<const char*>(left), p.row * kSize, kAmxRows * p.row * kSize, kAmxTerms * kSize, right,
                ceil_div(terms, kAmxTerms));
    if (d + terms < p.depth) return S::store(kept, NR);
    if (const int64_t rank = p.beside_rank; rank) {
      const int64_t bytes = rank * sizeof(Pair);
      S::multiply(static_cast<const char*>(p.hidden) + row * bytes, bytes, kAmxRows * bytes, kAmxTerms * kSize,
                  static_cast<const float*>(p.beside) + column * rank, rank / kAmxRows);
    }
    alignas(64) float sums[R * kAmxRows * NR];
    S::store(sums, NR);
    V bias[2]{};
    for (int k = 0; k < N && p.bias; ++k) bias[k] = load<B>(p.bias + column + k * L);
    const int64_t columns = p.columns, rows = std::min(R * kAmxRows, p.n - row);
    const int64_t count = std::min<int64_t>(NR, columns - column);
    T* y = p.y + row * columns + column;
    for (int64_t m = 0; m < rows; ++m, y += columns) {
      const V first = load<B>(sums + m * NR) + bias[0];
      const Operands<Pair, B> both = round_in_order<B>(first, N == 2 ? load<B>(sums + m * NR + L) + bias[1] : first);
      if (count == NR) {
        std::memcpy(static_cast<void*>(y), &both, B);
      } else {
        T numbers[NR];
        std::memcpy(static_cast<void*>(numbers), &both, B);
        copy_some<NR / 2>(numbers, count, y);
      }
    }
  }

  // To panels of W.
  FF_INLINE static void add_factors(const RowsProduct<T>& p, int64_t column, int64_t panels, int64_t d, int64_t terms,
                                    float* to) {
    const float* const left = p.of_terms + d / p.slice * whole(p.slice, MR) * p.rank;
    for (int64_t panel = 0; panel < panels; ++panel, to += terms * NR) {
      const float* const right = p.of_columns + (column / NR + panel) * p.rank * NR;
      outline<B>([&]() FF_INLINE_LAMBDA {
        int64_t t = 0;
        for (; t + MR <= terms; t += MR) {
          MultiplyTiles<float, B>::accumulate(left + t * p.rank, right, p.rank, to + t * NR);
        }
        if (t == terms) return;
        alignas(64) float rest[MR * NR] = {};
        std::memcpy(rest, to + t * NR, (terms - t) * NR * sizeof(float));
        MultiplyTiles<float, B>::accumulate(left + t * p.rank, right, p.rank, rest);
        std::memcpy(to + t * NR, rest, (terms - t) * NR * sizeof(float));
      });
    }
  }

  // A panel of W, or its first N registers of columns, times a slice of some rows, M at a time: sums to `kept`,
  // [tile][row][column], and of the last slice to y.
  template <class E, int N, int M>
  FF_INLINE static void multiply(const RowsProduct<T>& p, int64_t row, int64_t rows, int64_t column, int64_t d,
                                 int64_t terms, const float* right, float* kept) {
    constexpr int kFactors = std::is_same_v<E, Pair> ? 2 : 1;
    const int64_t last = row + rows, count = std::min<int64_t>(NR, p.columns - column), step = p.depth / kFactors * MR;
    const float* left = p.packed ? p.packed + row / MR * step + d / kFactors * MR : nullptr;
    const bool ends = d + terms == p.depth;
    V bias[N]{};
    for (int k = 0; k < N && ends && p.bias; ++k) bias[k] = load<B>(p.bias + column + k * L);
    T* y = p.y + row * p.columns + column;
    for (; row < last; row += M, left += step, kept += M * NR, y += M * p.columns) {
      V sum[M][N];
      if constexpr (kReadsRows<T, E>) {
        if (!p.packed) {
          const T* rows_of_x[M];
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) rows_of_x[m] = p.x + std::min(row + m, last - 1) * p.depth + d;
          MultiplyTiles<float, B>::multiply_rows(rows_of_x, reinterpret_cast<const E*>(right), terms / kFactors, sum);
        }
      }
      if (!kReadsRows<T, E> || p.packed) {
        MultiplyTiles<float, B>::multiply(reinterpret_cast<const E*>(left), reinterpret_cast<const E*>(right),
                                          terms / kFactors, sum);
      }
      if (const int64_t rank = p.beside_rank; ends && rank) {
        MultiplyTiles<float, B>::add_rows(static_cast<const E*>(p.hidden) + row * rank, rank,
                                          static_cast<const E*>(p.beside) + column * rank, rank, sum);
      }
      if (d) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
          for (int k = 0; k < N; ++k) sum[m][k] += load<B>(kept + m * NR + k * L);
        }
      }
      const bool whole = ends && count == N * L && row + M <= last;
      const auto put = [&](auto* to, int64_t step) FF_INLINE_LAMBDA {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
          for (int k = 0; k < N; ++k) store<B>(to + m * step + k * L, sum[m][k] + bias[k]);
        }
      };
      if (whole) {
        put(y, p.columns);
        continue;
      }
      put(kept, NR);
      for (int64_t m = 0; ends && m < std::min<int64_t>(M, last - row); ++m) {
        T numbers[NR];
#pragma GCC unroll 2
        for (int k = 0; k < NR; k += L) store<B>(numbers + k, load<B>(kept + m * NR + k));
        T* const row_of_y = y + m * p.columns;
        if (count == NR) {
          std::memcpy(static_cast<void*>(row_of_y), numbers, sizeof(numbers));
        } else {
          copy_some<NR / 2>(numbers, count, row_of_y);
        }
      }
    }
  }
};

// The same of floats by AMX, in pieces: W is split where it is made, rows before they are multiplied.
template <class, int B>
struct RunInPieces {
  using T = float;
  using V = Vec<float, B>;
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  static constexpr int64_t kMadeTogether = 4;  // panels

  // Items are `parts`.
  FF_INLINE static void run(const RowsProduct<T>& p, const Items& items) {
    if constexpr (B == 64) {
      const int64_t all = p.panels ? 0 : ceil_div(p.group, NR) * NR, terms_of_slice = in_pieces(p.slice);
      const Scratch<float> floats(p.slice * std::min(all, kMadeTogether * NR)), slab(terms_of_slice / 2 * all);
      const Scratch<BFloat16> left(p.pass * terms_of_slice);
      const AmxTiles tiles(true);
      for (int64_t item; (item = items.take()) < items.count();) {
        const Part& part = p.parts[item];
        const int64_t last = part.row + part.rows, panels = ceil_div(part.columns, NR);
        for (int64_t d = 0; d < p.depth; d += p.slice) {
          const int64_t terms = std::min(p.slice, p.depth - d), step = in_pieces(p.panels ? p.depth : terms) / 2 * NR;
          const float* right = slab.get();
          if (p.panels) {
            right = p.panels + part.column / NR * step + in_pieces(d) / 2 * NR;
          } else {
            for (int64_t k = 0; k < panels; k += kMadeTogether) {
              make(p, part.column + k * NR, std::min(kMadeTogether, panels - k), d, terms, floats.get(),
                   slab.get() + k * step);
            }
          }
          for (int64_t row = part.row; row < last; row += p.pass) {
            const int64_t rows = std::min(p.pass, last - row);
            SplitRows<T, B>::run(p.x + row * p.depth + d, p.depth, rows, terms, left.get());
            const float* const next = p.x + (row + rows) * p.depth + d;
            Upcoming upcoming{reinterpret_cast<const char*>(next), std::min(p.pass, last - row - rows), terms * 4,
                              p.depth * 4, ceil_div(64, panels)};
            for (int64_t panel = 0; panel < panels; ++panel) {
              multiply(p, left.get(), row, rows, part.column + panel * NR, d, terms, right + panel * step, upcoming);
            }
          }
        }
      }
    }
  }

  FF_INLINE static void make(const RowsProduct<T>& p, int64_t column, int64_t panels, int64_t d, int64_t terms,
                             float* made, float* to) {
    if (p.turned) {
      MakePanels<T, B>::make_turned(p.w, column, panels, d, terms, made);
    } else {
      MakePanels<T, B>::make(p.w, column, panels, d, terms, made);
    }
    if (p.rank) RunProduct<T, B>::add_factors(p, column, panels, d, terms, made);
    for (int64_t k = 0; k < panels; ++k, made += terms * NR, to += in_pieces(terms) / 2 * NR) {
      SplitPanel<T, B>::run(made, terms, to);
    }
  }

  // A panel of W times a slice of some rows.
  FF_INLINE static void multiply(const RowsProduct<T>& p, const BFloat16* left, int64_t row, int64_t rows,
                                 int64_t column, int64_t d, int64_t terms, const float* right, Upcoming& upcoming) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (const int64_t last = row + rows; row < last; row += kRowsByAmx, left += kRowsByAmx * in_pieces(terms)) {
        auto by = [&]<int R, int N>() FF_INLINE_LAMBDA {
          using S = AmxSums<R, N>;
          constexpr int64_t kRow = kAmxTerms * sizeof(BFloat16);
          S::clear();
          S::multiply_pieces(reinterpret_cast<const char*>(left), kRow, kAmxRows * kRow, kRowsByAmx * kRow,
                             kPieces * kRowsByAmx * kRow, right, ceil_div(terms, kAmxTerms),
                             [&]() FF_INLINE_LAMBDA { upcoming.fetch(); });
          alignas(64) float sums[R * kAmxRows * NR];
          S::store(sums, NR);
          give<N>(p, row, std::min(R * kAmxRows, last - row), column, d, d + terms == p.depth, sums);
        };
        const bool wide = p.columns - column > L;
        if (last - row > kAmxRows) {
          wide ? by.template operator()<2, 2>() : by.template operator()<2, 1>();
        } else {
          wide ? by.template operator()<1, 2>() : by.template operator()<1, 1>();
        }
      }
    });
  }

  // What a slice of terms from d on adds to a tile of y; `ends`: it is the last slice.
  template <int N>
  FF_INLINE static void give(const RowsProduct<T>& p, int64_t row, int64_t rows, int64_t column, int64_t d, bool ends,
                             const float* sums) {
    constexpr int M = 4;
    const int64_t columns = p.columns, count = std::min<int64_t>(N * L, columns - column);
    const int64_t rank = ends ? p.beside_rank : 0;
    const float* const hidden = static_cast<const float*>(p.hidden) + row * rank;
    const float* const beside = static_cast<const float*>(p.beside) + column * rank;
    for (int64_t m = 0; m < rows; m += M) {
      T* y = p.y + (row + m) * columns + column;
      int64_t step = columns;
      const bool inside = count == N * L && m + M <= rows;
      alignas(64) float edge[M * NR] = {};
      auto each_row = [&](const auto& f) FF_INLINE_LAMBDA {
        for (int64_t k = 0; k < std::min<int64_t>(M, rows - m); ++k) f(y + k * columns, edge + k * NR);
      };
      if (!inside) {
        if (d) each_row([&](const T* of_y, float* of_edge) { std::memcpy(of_edge, of_y, count * sizeof(T)); });
        y = edge, step = NR;
      }
      V sum[M][N];
#pragma GCC unroll 4
      for (int k = 0; k < M; ++k) {
#pragma GCC unroll 2
        for (int part = 0; part < N; ++part) {
          sum[k][part] = load<B>(sums + (m + k) * NR + part * L);
          if (d) sum[k][part] += load<B>(y + k * step + part * L);
          if (ends && p.bias) sum[k][part] += load<B>(p.bias + column + part * L);
        }
      }
      if (rank) MultiplyTiles<float, B>::add_rows(hidden + m * rank, rank, beside, rank, sum);
#pragma GCC unroll 4
      for (int k = 0; k < M; ++k) {
#pragma GCC unroll 2
        for (int part = 0; part < N; ++part) store<B>(y + k * step + part * L, sum[k][part]);
      }
      if (inside) continue;
      y = p.y + (row + m) * columns + column;
      each_row([&](T* of_y, const float* of_edge)
                   FF_INLINE_LAMBDA { RunProduct<T, B>::template copy_some<NR>(of_edge, count, of_y); });
    }
  }
};

// h = x uᵀ of rows, [row][rank]; in pairs each number is two of bfloat16 that add up to it.
template <class T>
struct Hidden {
  const T* x;
  const void* u;  // in rows of `u_row` numbers: floats, or T in pairs, zeros from `depth` to the end of a register
  int64_t n, depth, u_row, rank;
  bool pairs;
  void* out;
  static constexpr int64_t kRows = 4;  // together
};

template <class T, int B>
struct RunHidden {
  using V = Vec<float, B>;
  static constexpr int L = B / int(sizeof(float));
  static constexpr int64_t kRows = Hidden<T>::kRows, kRanks = B == 64 ? 4 : 2;

  // Items are kRows rows.
  FF_INLINE static void run(const Hidden<T>& h, int64_t begin, int64_t end) {
    with_operand<T, B>(h.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
      outline<B>([&]() FF_INLINE_LAMBDA { multiply<decltype(operand)>(h, begin, end); });
    });
  }

  template <class E>
  FF_INLINE static void multiply(const Hidden<T>& h, int64_t begin, int64_t end) {
    using U = std::conditional_t<std::is_same_v<E, Pair>, T, float>;
    constexpr int64_t kTerms = B / int64_t(sizeof(U));
    const int64_t whole = h.depth / kTerms * kTerms;
    for (int64_t m = begin * kRows; m < std::min(end * kRows, h.n); m += kRows) {
      const T* rows[kRows];
      alignas(64) T rest[kRows][kTerms] = {};
      for (int64_t k = 0; k < kRows; ++k) {
        rows[k] = h.x + std::min(m + k, h.n - 1) * h.depth;
        std::memcpy(static_cast<void*>(rest[k]), rows[k] + whole, (h.depth - whole) * sizeof(T));
      }
      for (int64_t r = 0; r < h.rank; r += kRanks) {
        const U* u[kRanks];
        for (int64_t l = 0; l < kRanks; ++l) u[l] = static_cast<const U*>(h.u) + std::min(r + l, h.rank - 1) * h.u_row;
        V sum[kRanks][kRows]{};
        for (int64_t d = 0; d < whole; d += kTerms) {
          add<E>([&](int64_t k) FF_INLINE_LAMBDA { return rows[k] + d; }, u, d, sum);
        }
        if (whole < h.depth) add<E>([&](int64_t k) FF_INLINE_LAMBDA { return rest[k]; }, u, whole, sum);
        E sums[kRows][kRanks];
        auto at = [&](int n) FF_INLINE_LAMBDA { return sum[n % kRanks][n / kRanks]; };
#pragma GCC unroll 4
        for (int n = 0; n < kRanks * kRows; n += L) put(sums_of_rows<L, V>(at, n), &sums[0][0] + n);
        for (int64_t k = 0; k < std::min(kRows, h.n - m); ++k) {
          E* const to = static_cast<E*>(h.out) + (m + k) * h.rank + r;
          for (int64_t l = 0; l < std::min(kRanks, h.rank - r); ++l) to[l] = sums[k][l];
        }
      }
    }
  }

  template <class E, class U, class F>
  FF_INLINE static void add(const F& row, const U* const (&u)[kRanks], int64_t d, V (&sum)[kRanks][kRows]) {
    auto load_of = [](const auto* from) FF_INLINE_LAMBDA {
      if constexpr (std::is_same_v<E, Pair>) {
        return load_operands<B>(reinterpret_cast<const Pair*>(from));
      } else {
        return load<B>(from);
      }
    };
    Operands<E, B> factors[kRanks];
#pragma GCC unroll 4
    for (int64_t l = 0; l < kRanks; ++l) factors[l] = load_of(u[l] + d);
#pragma GCC unroll 4
    for (int64_t k = 0; k < kRows; ++k) {
      const Operands<E, B> numbers = load_of(row(k));
#pragma GCC unroll 4
      for (int64_t l = 0; l < kRanks; ++l) {
        V total = sum[l][k];
        add_product<E, B>(total, numbers, factors[l]);
        sum[l][k] = total;
      }
    }
  }

  FF_INLINE static void put(V x, float* to) { store<B>(to, x); }
  FF_INLINE static void put(V x, Pair* to) {
    using U = Operands<Pair, B>;
    const U first = float_to_bf16<V, U>(x), rest = float_to_bf16<V, U>(x - bit_cast<V>(first << 16));
    const U both = first | rest << 16;
    std::memcpy(to, &both, B);
  }
};

// Of one product, or of two.
template <class T>
void make_hidden(const Hidden<T>& h, ParallelFor parallel_for, const Hidden<T>& other = {}) {
  const auto items = [](const Hidden<T>& of) { return of.rank ? ceil_div(of.n, Hidden<T>::kRows) : 0; };
  const int64_t first = items(h), all = first + items(other);
  const int64_t depth = std::max(h.depth, other.depth), rank = std::max(h.rank, other.rank);
  parallel(parallel_for, all, ceil_div(1 << 16, (rank + 4) * (depth + 64)), [&](int64_t begin, int64_t end) {
    dispatch<RunHidden, T>(h, begin, std::min(end, first));
    dispatch<RunHidden, T>(other, std::max(begin, first) - first, end - first);
  });
}

// h of n rows, zeros behind it as far as tiles of its rows and of its ranks are read.
struct OwnHidden : Scratch<float> {
  OwnHidden(int64_t n, int64_t rank, int64_t tile) : Scratch(rank ? whole(n, tile) * rank + kMostTile : 0) {
    if (rank) std::fill(get() + n * rank, get() + whole(n, tile) * rank + kMostTile, 0.f);
  }
};

// Rows [rows, depth] with zeros behind each, up to `row`, and whole rows of them up to `tile`.
template <class T>
void pad_rows(const T* from, int64_t rows, int64_t depth, int64_t row, int64_t tile, T* to, ParallelFor parallel_for) {
  parallel(parallel_for, whole(rows, tile), ceil_div(1 << 16, row), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int64_t count = m < rows ? depth : 0;
      std::copy(from + m * depth, from + m * depth + count, to + m * row);
      std::fill(to + m * row + count, to + (m + 1) * row, T{});
    }
  });
}

// Rows [rows, depth] in panels of so many, [panel][term][width], where two numbers that follow each other are a term in
// pairs, as they lie.
template <class T>
void pack_rows(const T* data, int64_t rows, int64_t depth, bool pairs, int64_t width, float* to,
               ParallelFor parallel_for) {
  const int64_t terms = pairs ? depth / 2 : depth;
  const Operand from{{data, 0}, steps(rows, terms), steps(terms, 1)};
  parallel(parallel_for, ceil_div(rows, width), ceil_div(16384, width * terms), [&](int64_t begin, int64_t end) {
    if (pairs) return dispatch<PackPanels, float>(from, int64_t(0), int(width), to, begin, end);
    dispatch<PackPanels, T>(from, int64_t(0), int(width), to, begin, end);
  });
}

// The same by AMX: panels of u, [panel of ranks][pair][its width]; h is [row][`ranks`], zeros beyond the last.
struct HiddenByAmx {
  const RowsProduct<BFloat16>& p;
  const float* u;
  int64_t panel, ranks;  // numbers of a panel
  Pair* out;
};

template <class, int B>
struct RunHiddenByAmx {
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;

  // Items are kRowsByAmx rows.
  FF_INLINE static void run(const HiddenByAmx& h, int64_t begin, int64_t end) {
    if constexpr (B == 64) {
      const AmxTiles tiles(true);
      outline<B>([&]() FF_INLINE_LAMBDA {
        using S = AmxSums<2, 2>;
        constexpr int64_t kSize = sizeof(BFloat16);
        const int64_t blocks = ceil_div(h.p.depth, kAmxTerms), step = h.p.row * kSize;
        for (int64_t row = begin * kRowsByAmx; row < end * kRowsByAmx; row += kRowsByAmx) {
          for (int64_t r = 0; r < h.ranks; r += NR) {
            alignas(64) float sums[kRowsByAmx * NR];
            S::clear();
            S::multiply(reinterpret_cast<const char*>(h.p.template tile<2>(row)), step, kAmxRows * step,
                        kAmxTerms * kSize, h.u + r / NR * h.panel, blocks);
            S::store(sums, NR);
            for (int64_t m = 0; m < kRowsByAmx; ++m) {
              Pair* const to = h.out + (row + m) * h.ranks + r;
              for (int64_t k = 0; k < NR && r + k < h.ranks; k += L) {
                RunHidden<BFloat16, B>::put(load<B>(sums + m * NR + k), to + k);
              }
            }
          }
        }
      });
    }
  }
};

// What is multiplied in pairs beside x and W: h, and each number of the other factor twice.
class Beside {
 public:
  Beside(const TiledWeight<BFloat16>& w, bool turned, bool amx, int64_t rows, int64_t depth, int64_t columns,
         ParallelFor parallel_for)
      : amx_(amx),
        depth_(depth),
        rank_(w.rank),
        ranks_(amx ? whole(w.rank, kAmxRows) : w.rank),
        u_row_(ceil_div(depth + 1, 64) * 64),
        rows_(whole(rows, tile_of(amx))),
        u_(w.rank * u_row_),
        panels_(amx ? whole(w.rank, register_bytes() / 2) * u_row_ / 2 : 0),
        hidden_(rows_ * ranks_),
        factors_(ceil_div(columns, 64) * 64 * ranks_) {
    const BFloat16* const from = turned ? w.u_in_memory : w.v_in_memory;
    pad_rows(from, rank_, depth, u_row_, 1, u_.get(), parallel_for);
    if (amx) pack_rows(u_.get(), rank_, u_row_, true, register_bytes() / 2, panels_.get(), parallel_for);
    const float* const other = turned ? w.v : w.u;
    const int64_t row = turned ? w.v_row : w.u_row, width = register_bytes() / 2;
    for (int64_t at = 0; at < ceil_div(columns, width) * ranks_; ++at) {
      for (int64_t k = 0; k < width; ++k) {
        const bool there = at % ranks_ < rank_;
        const auto bits = there ? bit_cast<uint32_t>(other[at % ranks_ * row + at / ranks_ * width + k]) : 0;
        factors_.get()[at * width + k].bits = bits | bits >> 16;
      }
    }
  }

  // Of the rows of a product.
  const Pair* hidden(const RowsProduct<BFloat16>& p, ParallelFor parallel_for) const {
    if (amx_) {
      const HiddenByAmx h{p, panels_.get(), register_bytes() / 2 * u_row_ / 2, ranks_, hidden_.get()};
      parallel(parallel_for, rank_ ? ceil_div(p.n, kRowsByAmx) : 0, 1,
               [&](int64_t begin, int64_t end) { dispatch<RunHiddenByAmx, BFloat16>(h, begin, end); });
      return hidden_.get();
    }
    std::fill(hidden_.get() + p.n * rank_, hidden_.get() + rows_ * rank_, Pair{});
    make_hidden<BFloat16>({p.x, u_.get(), p.n, depth_, u_row_, rank_, true, hidden_.get()}, parallel_for);
    return hidden_.get();
  }
  const Pair* factors() const { return factors_.get(); }
  int64_t ranks() const { return ranks_; }

 private:
  const bool amx_;
  const int64_t depth_, rank_, ranks_, u_row_, rows_;
  const Scratch<BFloat16> u_;
  const Scratch<float> panels_;
  const Scratch<Pair> hidden_, factors_;
};

// The parts of a product, for threads that take them one by one: several panels of W at a time, fewer towards the end.
// Panels that each thread has as many of are made once, for all rows, unless these are so many that it costs little to
// make them again; those that are left over, or are not full, are cut by rows, and so is all of a narrow W. `element`:
// bytes of a number of y, whose rows, where they begin within a line of memory, are rather cut than columns: threads
// that write to one line wait for each other.
// split: the rows are for each part, of which there are no more than needed.
std::vector<Part> share_out(int64_t rows, int64_t columns, int64_t element, int64_t group, bool amx, bool split,
                            int64_t threads) {
  const double made = split ? 52 : amx ? 128 : 32;  // rows that take as long to be multiplied as W to be made
  const double taken = split ? 0.7 : 0;             // panels that take as long as the rows to be split
  constexpr double kHeldUp = 0.25;                  // of a part that a thread is left with
  const int64_t tile = tile_of(amx), width = register_bytes() / 2, most = group / width;
  const int64_t tiles = ceil_div(rows, tile), panels = ceil_div(columns, width);
  const bool narrow = panels <= kGroup / width, half = threads > 1 && panels * width - columns >= width / 2;
  const int64_t left = (panels - half) % threads + half;
  const double more_ranges = columns * element % 64 ? 1.05 : 0.98;  // of the least time, at most
  std::vector<Part> parts;
  auto add = [&](int64_t first, int64_t last, double full, double held_up) {
    int64_t range = tiles, count = 1;
    double least = 0;
    for (int64_t ranges = 1; ranges <= std::min(tiles, 4 * threads); ++ranges) {
      const int64_t some = ceil_div(tiles, ranges), of_rows = ceil_div(tiles, some);
      const double of_thread = std::ceil(full * double(of_rows) / double(threads));
      const double again = std::ceil(of_thread / double(most)) * taken;
      const double time = (of_thread + held_up + again) * (double(some * tile) + made);
      if (least && time > more_ranges * least) continue;
      least = least ? std::min(least, time) : time, range = some, count = of_rows;
    }
    int64_t to_come = (last - first) * count;
    const int64_t of_thread = std::max<int64_t>(ceil_div(to_come, threads), 1);
    const int64_t even = ceil_div(of_thread, ceil_div(of_thread, most));
    for (int64_t row = 0; row < rows; row += range * tile) {
      for (int64_t panel = first; panel < last;) {
        const int64_t fair = split ? even : threads == 1 || narrow ? most : to_come / (2 * threads);
        const int64_t together = std::min(std::clamp<int64_t>(fair, 1, most), last - panel), column = panel * width;
        parts.push_back(
            {row, std::min(range * tile, rows - row), column, std::min(together * width, columns - column)});
        panel += together, to_come -= together;
      }
    }
  };
  if (narrow) {
    add(0, panels, 1, kHeldUp);
    return parts;
  }
  add(0, panels - left, double(panels - left), threads > 1 && !left ? kHeldUp : 0);
  add(panels - left, panels, double(left) - 0.5 * half, kHeldUp);
  return parts;
}

// `size` numbers of each rank as [piece][rank][its width], zeros at the end; pieces of a tile's height or a panel's
// width.
template <class, int B>
struct PackFactors {
  FF_INLINE static void run(const float* from, int64_t size, int64_t row, int64_t rank, bool of_tiles, float* to) {
    of_tiles ? pack<tile_rows(B)>(from, size, row, rank, to) : pack<B / 2>(from, size, row, rank, to);
  }

  template <int kWidth>
  FF_INLINE static void pack(const float* from, int64_t size, int64_t row, int64_t rank, float* to) {
    for (int64_t at = 0; at < size; at += kWidth) {
      for (int64_t r = 0; r < rank; ++r, to += kWidth) {
        if (at + kWidth <= size) {
          std::memcpy(to, from + r * row + at, kWidth * sizeof(float));
          continue;
        }
        for (int64_t k = 0; k < kWidth; ++k) to[k] = at + k < size ? from[r * row + at + k] : 0;
      }
    }
  }
};

template <class T>
void multiply_rows(const TiledWeight<T>& w, bool turned, int64_t n, const T* x, const float* bias, T* y,
                   int64_t threads, ParallelFor parallel_for, const float* panels = nullptr,
                   const float* own_hidden = nullptr) {
  const int64_t depth = turned ? w.i : w.o, columns = turned ? w.o : w.i;
  const bool split = splits<T>(depth) && (panels || n >= kLeastInPieces);
  const bool pairs = rows_in_pairs<T>(depth), amx = by_amx(pairs);
  const int64_t mr = tile_of(amx || split), pass = split ? kSplitRows : kPass, rows_of_pass = pass / mr * mr;
  const int64_t most =
      std::max<int64_t>(kPacked / std::max<int64_t>(depth, 1) / (2 * rows_of_pass), 1) * 2 * rows_of_pass;
  const int64_t in_floats = split ? kSliceInPieces : kSlice, nr = register_bytes() / 2;
  const int64_t slice = slice_of(depth, amx ? kSliceByAmx : pairs ? kSliceOfPairs : in_floats);
  // Further terms of the product where rows are few, or in pairs; otherwise added to W.
  const int64_t beside_rank = pairs || are_thin(n, w.i, w.o) ? w.rank : 0;
  const int64_t rank = w.rank > kFewRanks && !beside_rank ? w.rank : 0, of_floats = pairs ? 0 : beside_rank;
  const int64_t of_slice = whole(slice, tile_rows(register_bytes())) * rank;
  const Scratch<float> of_terms(ceil_div(depth, slice) * of_slice),
      of_columns(ceil_div(columns, nr) * nr * (rank + of_floats));
  const OwnHidden hidden(n, own_hidden ? 0 : of_floats, mr);
  const float *const terms = turned ? w.u : w.v, *const across = turned ? w.v : w.u;
  const int64_t terms_row = turned ? w.u_row : w.v_row, across_row = turned ? w.v_row : w.u_row;
  if (rank) {
    for (int64_t d = 0; d < depth; d += slice) {
      dispatch<PackFactors, float>(terms + d, std::min(slice, depth - d), terms_row, rank, true,
                                   of_terms.get() + d / slice * of_slice);
    }
  }
  if (rank || of_floats) dispatch<PackFactors, float>(across, columns, across_row, w.rank, false, of_columns.get());
  if (of_floats && !own_hidden)
    make_hidden<T>({x, terms, n, depth, terms_row, of_floats, false, hidden.get()}, parallel_for);
  const float* const h = own_hidden ? own_hidden : hidden.get();
  std::unique_ptr<const Beside> beside;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (pairs && !panels)
      beside = std::make_unique<const Beside>(w, turned, amx, std::min(n, most), depth, columns, parallel_for);
  }
  // Rows a multiple of a page apart share sets of the first cache, from which each panel has to read them again.
  const bool meet = columns > kNarrow && depth * int64_t(sizeof(T)) % kPage == 0;
  const bool packs = !split && (!(kReadsRows<T, float> || pairs) || meet || (amx && depth % kAmxTerms));
  const int64_t row = amx && packs ? whole(depth, kAmxTerms) + (meet ? kAmxTerms : 0) : depth;
  const Scratch<float> packed(packs && !amx ? whole(std::min(n, most), mr) * depth + 16 : 0);
  const Scratch<BFloat16> padded(amx ? (packs ? whole(std::min(n, most), mr) : mr) * row : 0);
  for (int64_t first = 0; first < n; first += most) {
    const int64_t rows = std::min(most, n - first);
    RowsProduct<T> p{w, turned, rows, depth, columns, slice};
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (amx) {
        const int64_t of_tiles = rows / mr * mr, there = packs ? 0 : of_tiles;
        pad_rows(x + (first + there) * depth, rows - there, depth, row, mr, padded.get(), parallel_for);
        p.amx = true, p.row = row, p.rows = packs ? padded.get() : x + first * depth;
        p.rest = padded.get() + (of_tiles - there) * row;
      }
    }
    if (packs && !amx) pack_rows(x + first * depth, rows, depth, pairs, mr, packed.get(), parallel_for);
    if (rank) p.w.rank = 0, p.rank = rank, p.of_terms = of_terms.get(), p.of_columns = of_columns.get();
    p.beside_rank = beside_rank;
    if (of_floats) p.w.rank = 0, p.hidden = h + first * of_floats, p.beside = of_columns.get();
    p.packed = packs && !amx ? packed.get() : nullptr, p.bias = bias, p.x = x + first * depth,
    p.y = y + first * columns;
    p.pairs = pairs, p.panels = panels;
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (beside) {
        p.hidden = beside->hidden(p, parallel_for), p.beside = beside->factors();
        p.beside_rank = beside->ranks();
      }
    }
    const int64_t group = split ? std::min(kGroupInPieces / slice / nr * nr, kMostInPieces)
                          : amx ? std::clamp(kGroupByAmx / depth / nr * nr, kGroup, kMostByAmx)
                                : kGroup;
    const std::vector<Part> parts = share_out(rows, columns, sizeof(T), group, amx || split, split, threads);
    p.parts = parts.data();
    for (const Part& part : parts) p.range = std::max(p.range, part.rows), p.group = std::max(p.group, part.columns);
    p.pass = whole(ceil_div(p.range, ceil_div(p.range, pass)), mr);
    parallel_items(parallel_for, parts.size(), 1, [&](const Items& items) {
      if constexpr (std::is_same_v<T, float>) {
        if (split) return dispatch<RunInPieces, T>(p, items);
      }
      dispatch<RunProduct, T>(p, items);
    });
  }
}

// The weight of a call.
template <class T>
struct Made {
  Padded<T> u, v;
  TiledWeight<T> w;

  template <class Op>
  Made(const Op& op, const Bits& support)
      : u(op.u, op.rank, op.i), v(op.v, op.rank, op.o), w{op.i, op.o, op.rank, u.row, v.row, u.data, v.data} {
    w.values = static_cast<const T*>(op.mu.values), w.last = w.values + op.mu.count - 8, w.support = support;
    w.u_in_memory = static_cast<const T*>(op.u), w.v_in_memory = static_cast<const T*>(op.v);
  }
};

// multiply(W), or few(W) where rows are few; false where the positions of μ do not ascend. `depth`: of the product.
template <class Op, class Multiply, class Few>
bool with_weight(const Op& op, int64_t depth, ParallelFor parallel_for, const Multiply& multiply, const Few& few) {
  bool valid = true;
  with_type(op.type, [&](auto one) {
    using T = decltype(one);
    if constexpr (!std::is_same_v<T, double>) {
      const auto support = find_bits(op.o, op.i, op.mu, parallel_for);
      if (!(valid = bool(support))) return;
      const Made<T> made(op, *support);
      op.n <= (rows_in_pairs<T>(depth) ? kFewInPairs : kFewRows) ? few(made.w) : multiply(made.w);
    }
  });
  return valid;
}

// f(T{}) where W of that type may be kept in panels.
template <class F>
void with_panels(Type type, int64_t i, const F& f) {
  with_type(type, [&](auto one) {
    using T = decltype(one);
    if constexpr (!std::is_same_v<T, double>) {
      if (std::is_same_v<T, float> || rows_in_pairs<T>(i)) f(one);
    }
  });
}

}  // namespace

int64_t panels_numel(Type type, int64_t o, int64_t i) {
  int64_t numel = -1;
  if (!i) return numel;
  with_panels(type, i, [&]<class T>(T) {
    const int64_t terms = splits<T>(i) ? in_pieces(i) / 2 : whole_blocks(i, by_amx(!std::is_same_v<T, float>));
    numel = whole(o, register_bytes() / 2) * terms;
  });
  return numel;
}

void pack_panels(Type type, int64_t o, int64_t i, const void* w, void* to, ParallelFor parallel_for) {
  with_panels(type, i, [&]<class T>(T) {
    constexpr bool pairs = !std::is_same_v<T, float>;
    const int64_t depth = whole_blocks(i, by_amx(pairs));
    const Scratch<T> padded(depth > i ? o * depth : 0);
    const T* rows = static_cast<const T*>(w);
    if (depth > i) pad_rows(rows, o, i, depth, 1, padded.get(), parallel_for), rows = padded.get();
    const int64_t width = register_bytes() / 2;
    if (!splits<T>(i)) return pack_rows(rows, o, depth, pairs, width, static_cast<float*>(to), parallel_for);
    const Scratch<float> floats(whole(o, width) * i);
    pack_rows(rows, o, i, false, width, floats.get(), parallel_for);
    parallel(parallel_for, ceil_div(o, width), 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin * width; k < end * width; k += width) {
        dispatch<SplitPanel, float>(floats.get() + k * i, i, static_cast<float*>(to) + k * (in_pieces(i) / 2));
      }
    });
  });
}

void linear_of_panels(const LinearOfPanels& op, ParallelFor parallel_for) {
  if (!op.n || !op.o) return;
  with_panels(op.type, op.i, [&]<class T>(T) {
    const Padded<T> bias(op.bias, op.bias ? 1 : 0, op.o);
    multiply_rows<T>({op.i, op.o}, true, op.n, static_cast<const T*>(op.x), op.bias ? bias.data : nullptr,
                     static_cast<T*>(op.y), op.threads, parallel_for, static_cast<const float*>(op.panels));
  });
}

bool in_tiles(Type type, int64_t n, int64_t i, int64_t o, int64_t count, bool backward) {
  if (type == Type::f64 || !spreads(register_bytes())) return false;
  // Where the products of nonzeros take as long; backward they are sorted first, which many rows repay.
  const bool wide = register_bytes() == 64;
  double density = n <= 4 ? .15 : .33;
  if (wide && n <= kFewRows) density = backward ? .12 : n <= 6 ? .04 : n <= 12 ? .19 : .25;
  if (backward && n < 512 && !(wide && n <= kFewRows)) {
    density = n <= 4 ? .15 : n <= kFewRows || !wide ? .24 : n <= 64 ? .17 : .29;
  }
  // Few rows are computed in float, for which values of half precision take longer to spread.
  if (wide && n <= kFewRows && !backward && type != Type::f32) {
    density = n <= 2 ? .11 : n <= 6 ? .15 : n <= 12 ? .45 : .6;
  }
  const bool pairs = type == Type::bf16 && rows_in_pairs<BFloat16>(backward ? o : i);
  if (n > kFewInPairs && pairs) {
    density = backward ? n <= 64 ? .12 : n < 512 ? .22 : .3 : n > kFewRows && n < 512 ? .24 : .3;
  }
  if (n > kFewRows && by_amx(pairs)) density = backward || n > 256 ? .06 : .2;
  if (n > 256 && !backward && type == Type::f32 && splits<float>(i)) density = .26;
  return n && double(count) > density * double(i) * double(o);
}

bool linear_in_tiles(const FactoredLinear& op, ParallelFor parallel_for) {
  auto multiply = [&]<class T>(const TiledWeight<T>& w) {
    const Padded<T> bias(op.bias, op.bias ? 1 : 0, op.o);
    multiply_rows(w, true, op.n, static_cast<const T*>(op.x.data), op.bias ? bias.data : nullptr,
                  static_cast<T*>(op.y.data), op.threads, parallel_for);
  };
  return with_weight(op, op.i, parallel_for, multiply, [&](const auto& w) { multiply_few(w, op, parallel_for); });
}

bool linear_in_tiles_backward(const FactoredLinearBackward& op, ParallelFor parallel_for) {
  auto multiply = [&]<class T>(const TiledWeight<T>& w) {
    const T *x = static_cast<const T*>(op.x.data), *dy = static_cast<const T*>(op.dy.data);
    T *const dx = static_cast<T*>(op.dx.data), *const dvalues = static_cast<T*>(op.dvalues);
    T *const du = static_cast<T*>(op.du), *const dv = static_cast<T*>(op.dv);
    const bool thin = (du || dv) && are_thin(op.n, op.i, op.o);
    const int64_t tile = tile_rows(register_bytes()), of_h = thin && dv ? op.rank : 0, of_dh = thin && du ? op.rank : 0;
    const OwnHidden h(op.n, of_h, tile), dh(op.n, of_dh, tile);
    make_hidden<T>({x, w.u, op.n, op.i, w.u_row, of_h, false, h.get()}, parallel_for,
                   {dy, w.v, op.n, op.o, w.v_row, of_dh, false, dh.get()});
    if (dx) {
      const float* const of_dx = of_dh ? dh.get() : nullptr;
      multiply_rows(w, false, op.n, dy, nullptr, dx, op.threads, parallel_for, nullptr, of_dx);
    }
    if (dvalues || ((du || dv) && !thin)) {
      sum_gradients(w, op.n, x, dy, dvalues, thin ? nullptr : du, thin ? nullptr : dv, op.threads, parallel_for);
    }
    if (thin) sum_factors<T>({x, op.i, dh.get(), du}, {dy, op.o, h.get(), dv}, op.n, op.rank, parallel_for);
  };
  auto few = [&](const auto& w) { multiply_few_backward(w, op, parallel_for); };
  return with_weight(op, op.o, parallel_for, multiply, few);
}

}  // namespace fastfact
