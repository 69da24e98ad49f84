// Matrix products whose operands are packed from any order and whose tiles are written in any order.
//
// C[m, n] = Σ_d left[m, d] · right[n, d]. Both operands are packed into panels of the tile's height and width; a tile
// is accumulated in registers, spilled to the stack, and an epilogue writes it where it belongs.
#pragma once

#include <algorithm>
#include <vector>

#include "pairs.h"

namespace fastfact {

// Element (j, d) of client k is data[k·client_stride + row[j] + depth[d]].
struct Operand {
  In data;
  std::vector<int64_t> row, depth;
};

// n offsets 0, step, 2·step, …
inline std::vector<int64_t> steps(int64_t n, int64_t step) {
  std::vector<int64_t> out(n);
  for (int64_t j = 0; j < n; ++j) out[j] = j * step;
  return out;
}

// The offsets of an axis made of two, (outer, inner).
inline std::vector<int64_t> steps(int64_t outer, int64_t outer_step, int64_t inner, int64_t inner_step) {
  std::vector<int64_t> out;
  out.reserve(outer * inner);
  for (int64_t j = 0; j < outer; ++j) {
    for (int64_t l = 0; l < inner; ++l) out.push_back(j * outer_step + l * inner_step);
  }
  return out;
}

// Sixteen vector registers hold 6 × 2 accumulators, two of the right operand and one of the left; AVX-512 has 32.
inline constexpr int tile_rows(int bytes) { return bytes == 64 ? 12 : bytes == 32 ? 6 : 4; }
inline constexpr int tile_columns(int bytes, int element) { return 2 * bytes / element; }

constexpr int64_t kDepth = 256;  // terms added in registers before they are added to the tile, for accuracy

template <class T, int B>
struct PackPanels {
  using C = Compute<T>;
  static constexpr int L = kLanes<T, B>;

  // Panel p holds rows [p·width, (p + 1)·width) as [depth][width], missing rows as zeros. Items are (client, panel).
  FF_INLINE static void run(const Operand& from, int64_t first_client, int width, C* out, int64_t begin, int64_t end) {
    outline<B>([&]() FF_INLINE_LAMBDA { pack(from, first_client, width, out, begin, end); });
  }

  FF_INLINE static void pack(const Operand& from, int64_t first_client, int width, C* out, int64_t begin, int64_t end) {
    const int64_t rows = from.row.size(), depth = from.depth.size(), panels = ceil_div(rows, width);
    const int64_t *row = from.row.data(), *at = from.depth.data();
    for (int64_t item = begin; item < end; ++item) {
      const T* data = client<T>(from.data, first_client + item / panels);
      const int64_t first = item % panels * width, count = std::min<int64_t>(width, rows - first);
      C* to = out + item * width * depth;
      if (count == width && consecutive(row + first, width)) {
        // Neighbouring panels together: what lies side by side in memory is read at once.
        int64_t together = 1;
        while (together < kPackTogether && item + together < end && (item + together) % panels &&
               first + (together + 1) * width <= rows && consecutive(row + first, (together + 1) * width)) {
          ++together;
        }
        for (int64_t d = 0; d < depth; ++d) {
          const T *from = data + row[first] + at[d],
                  *later = data + row[first] + at[std::min(d + kPackAhead, depth - 1)];
          for (int64_t p = 0; p < together; ++p) {
            __builtin_prefetch(later + p * width);
            copy<B>(from + p * width, width, to + (p * depth + d) * width);
          }
        }
        item += together - 1;
        continue;
      }
      for (int64_t d0 = 0; d0 < depth; d0 += kPackDepth) {
        const int64_t n = std::min(kPackDepth, depth - d0);
        const bool along_depth = consecutive(at + d0, n);
        int64_t d = 0;
        for (; along_depth && d + L <= n; d += L) {
          transpose(data, row + first, at[d0 + d], count, width, depth - d0 - d, to + (d0 + d) * width);
        }
        for (int64_t j = 0; j < width; ++j) {
          const T* source = data + (j < count ? row[first + j] : 0);
          C* column = to + d0 * width + j;
          if (j >= count) {
            for (int64_t e = d; e < n; ++e) column[e * width] = 0;
          } else {
            for (int64_t e = d; e < n; ++e) column[e * width] = to_compute(source[at[d0 + e]]);
          }
        }
      }
    }
  }

  // L consecutive elements of each row to L rows of a panel, of which `left` are to come.
  FF_INLINE static void transpose(const T* data, const int64_t* row, int64_t at, int64_t count, int width, int64_t left,
                                  C* to) {
    // Where the width is no multiple of L a store runs over into the next row of the panel, which is written later.
    for (int64_t j = (width - 1) / L * L; j >= 0; j -= L) {
      Vec<T, B> lines[L];
      if (j + L <= count) {
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) {
          __builtin_prefetch(data + row[j + l] + at + kPackDepth);
          lines[l] = load<B>(data + row[j + l] + at);
        }
        transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) store<B>(to + l * width + j, lines[l]);
        continue;
      }
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) lines[l] = j + l < count ? load<B>(data + row[j + l] + at) : Vec<T, B>{};
      transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) {
        if (j + L <= width || l + 1 < left) {
          store<B>(to + l * width + j, lines[l]);
        } else {
          std::memcpy(to + l * width + j, &lines[l], (width - j) * sizeof(C));
        }
      }
    }
  }

  template <int D>
  FF_INLINE static void transpose_lanes(Vec<T, B> (&lines)[L]) {
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) {
      if (l & D) continue;
      const Vec<T, B> a = lines[l], b = lines[l | D];
      lines[l] = exchange<D, false>(a, b, std::make_integer_sequence<int, L>{});
      lines[l | D] = exchange<D, true>(a, b, std::make_integer_sequence<int, L>{});
    }
    if constexpr (D > 1) transpose_lanes<D / 2>(lines);
  }

  template <int D, bool second, int... lane>
  FF_INLINE static Vec<T, B> exchange(Vec<T, B> a, Vec<T, B> b, std::integer_sequence<int, lane...>) {
    if constexpr (second) {
      return shuffle<(lane & D ? L + lane : lane ^ D)...>(a, b);
    } else {
      return shuffle<(lane & D ? L + (lane ^ D) : lane)...>(a, b);
    }
  }

  static constexpr int64_t kPackDepth = 64;  // keeps the part of a panel being written in the first cache
  static constexpr int64_t kPackTogether = 4;
  static constexpr int64_t kPackAhead = 16;  // rows that are fetched before they are copied

  FF_INLINE static bool consecutive(const int64_t* offsets, int64_t n) {
    for (int64_t j = 1; j < n; ++j) {
      if (offsets[j] != offsets[j - 1] + 1) return false;
    }
    return true;
  }
};

// The packed operands of one product.
template <class C>
struct Product {
  const C *left, *right;
  int64_t left_stride, right_stride;  // between clients
  int64_t depth;
};

// Computes N products of the same size tile by tile and hands each tile [m0 …][n0 …] to
// epilogue.template write<T, B>(client, m0, rows, n0, columns, tiles), tiles C [N][tile_rows][tile_columns].
// Items are (client, column panel, row panel).
template <class T, int B>
struct MultiplyTiles {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, MR = tile_rows(B), NR = 2 * L;

  // f.operator()<M>() for a tile of which so many rows are there, 1 to MR.
  template <class F>
  FF_INLINE static void with_height(int64_t rows, const F& f) {
    constexpr int kThird = std::max(MR / 3, 1);
    if (rows <= kThird) return f.template operator()<kThird>();
    rows <= 2 * kThird ? f.template operator()<2 * kThird>() : f.template operator()<MR>();
  }

  // sum[m] = Σ_d a[d][m] · b[d], for the first M rows of a tile and the first W registers of a panel's columns.
  template <int M, int W>
  FF_INLINE static void multiply(const C* a, const C* b, int64_t depth, V (&sum)[M][W]) {
    clear(sum);
    add(a, b, depth, sum);
  }

  // The same of pairs, `depth` of them.
  template <int M, int W>
  FF_INLINE static void multiply(const Pair* a, const Pair* b, int64_t depth, V (&sum)[M][W]) {
    clear(sum);
    add(a, b, depth, sum);
  }

  template <int M, int W>
  FF_INLINE static void add(const Pair* a, const Pair* b, int64_t depth, V (&sum)[M][W]) {
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return as_number(a + d * MR + m); });
  }

  // sum[m] += Σ_d a[m][d] · b[d], a [M, step]
  template <int M, int W>
  FF_INLINE static void add_rows(const Pair* a, int64_t step, const Pair* b, int64_t depth, V (&sum)[M][W]) {
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return as_number(a + m * step + d); });
  }
  template <int M, int W>
  FF_INLINE static void add_rows(const C* a, int64_t step, const C* b, int64_t depth, V (&sum)[M][W]) {
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return a + m * step + d; });
  }

  // left(d, m): a pair as a number.
  template <int M, int W, class Left>
  FF_INLINE static void add_terms(int64_t depth, const Pair* b, V (&sum)[M][W], const Left& left) {
    for (int64_t d = 0; d < depth; ++d) {
      Operands<Pair, B> right[W];
#pragma GCC unroll 2
      for (int p = 0; p < W; ++p) right[p] = load_operands<B>(b + d * NR + p * L);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const V of_row = left(d, m) - V{};
#pragma GCC unroll 2
        for (int p = 0; p < W; ++p) {
          V total = sum[m][p];
          add_product<Pair, B>(total, bit_cast<Operands<Pair, B>>(of_row), right[p]);
          sum[m][p] = total;
        }
      }
    }
  }

  // sum[m] = Σ_d a[m][d] · b[d]
  template <int M, int W>
  FF_INLINE static void multiply_rows(const C* const (&a)[M], const C* b, int64_t depth, V (&sum)[M][W]) {
    clear(sum);
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return a[m] + d; });
  }

  // The same of pairs, which are numbers that follow each other in a row.
  template <int M, int W>
  FF_INLINE static void multiply_rows(const BFloat16* const (&a)[M], const Pair* b, int64_t depth, V (&sum)[M][W]) {
    clear(sum);
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return pair_at(a[m] + 2 * d); });
  }

  template <int M, int W>
  FF_INLINE static void clear(V (&sum)[M][W]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int p = 0; p < W; ++p) sum[m][p] = V{};
    }
  }

  // sum[m] += Σ_d a[d][m] · b[d]
  template <int M, int W>
  FF_INLINE static void add(const C* a, const C* b, int64_t depth, V (&sum)[M][W]) {
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return a + (d * MR + m); });
  }

  // left(d, m): where a number is. Of every third row it is an operand in memory of each product, which is an
  // instruction less, and for all rows would be more loads than there are products.
  template <int M, int W, class Left>
  FF_INLINE static void add_terms(int64_t depth, const C* b, V (&sum)[M][W], const Left& left) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < depth; ++d) {
      V right[W];
#pragma GCC unroll 2
      for (int p = 0; p < W; ++p) right[p] = load<B>(b + d * NR + p * L);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const C* const a = left(d, m);
#pragma GCC unroll 2
        for (int p = 0; p < W; ++p) {
          V total = sum[m][p];
          m % 3 == 0 ? add_from_memory(total, right[p], a) : void(total += right[p] * *a);
          sum[m][p] = total;
        }
      }
    }
  }

  FF_INLINE static void add_from_memory(V& sum, V right, const C* a) {
#if defined(FF_DISPATCH) && !defined(__clang__)
    if constexpr (B == 64 && std::is_same_v<C, float>) {
      asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(right), "m"(*a));
      return;
    }
#endif
    sum += right * *a;
  }

  // M rows of tile += Σ_d a[d] ⊗ b[d]; with `fresh` it is that. Columns beyond W registers are zeros.
  template <int W = 2, int M = MR, class E>
  FF_INLINE static void accumulate(const E* a, const E* b, int64_t depth, C* tile, bool fresh = false) {
    V sum[M][W];
    multiply(a, b, depth, sum);
    add_to_tile(sum, tile, fresh);
  }

  // The same, the numbers of a term `step` behind those of the last.
  template <int W, int M>
  FF_INLINE static void accumulate_columns(const C* a, int64_t step, const C* b, int64_t depth, C* tile, bool fresh) {
    V sum[M][W];
    clear(sum);
    add_terms(depth, b, sum, [&](int64_t d, int m) FF_INLINE_LAMBDA { return a + (d * step + m); });
    add_to_tile(sum, tile, fresh);
  }

  template <int M, int W>
  FF_INLINE static void add_to_tile(const V (&sum)[M][W], C* tile, bool fresh) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m, tile += NR) {
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        if (p >= W) {
          if (fresh) store<B>(tile + p * L, V{});
        } else {
          store<B>(tile + p * L, fresh ? sum[m][p % W] : load<B>(tile + p * L) + sum[m][p % W]);
        }
      }
    }
  }

  template <int N, class Epilogue>
  FF_INLINE static void run(const Product<C> (&products)[N], int64_t rows, int64_t columns, int64_t first_client,
                            const Epilogue& epilogue, int64_t begin, int64_t end) {
    const int64_t row_panels = ceil_div(rows, MR), column_panels = ceil_div(columns, NR);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / (row_panels * column_panels);
      const int64_t n = item / row_panels % column_panels, m = item % row_panels;
      alignas(64) C tiles[N][MR * NR] = {};
      for (int p = 0; p < N; ++p) {
        const Product<C>& product = products[p];
        const C* a = product.left + k * product.left_stride + m * MR * product.depth;
        const C* b = product.right + k * product.right_stride + n * NR * product.depth;
        for (int64_t d = 0; d < product.depth; d += kDepth) {
          accumulate(a + d * MR, b + d * NR, std::min(kDepth, product.depth - d), tiles[p]);
        }
      }
      epilogue.template write<T, B>(first_client + k, m * MR, std::min<int64_t>(MR, rows - m * MR), n * NR,
                                    std::min<int64_t>(NR, columns - n * NR), tiles[0]);
    }
  }
};

template <class Left, class Right>
struct Factors {
  const Operand &left, &right;
};

// N products of clients × rows × columns. Left and Right are the element types of the operands, T that of the epilogue.
template <class T, class Left, class Right, int N, class Epilogue>
void multiply(ParallelFor parallel_for, int64_t clients, const Factors<Left, Right> (&factors)[N],
              const Epilogue& epilogue) {
  using C = Compute<T>;
  const int64_t rows = factors[0].left.row.size(), columns = factors[0].right.row.size();
  if (clients == 0 || rows == 0 || columns == 0) return;
  const int mr = tile_rows(register_bytes()), nr = tile_columns(register_bytes(), sizeof(C));
  const int64_t row_panels = ceil_div(rows, mr), column_panels = ceil_div(columns, nr);
  int64_t depths = 0;
  for (const auto& f : factors) depths += f.left.depth.size();

  const int64_t per_client = depths * (row_panels * mr + column_panels * nr);
  constexpr int64_t kWorkspace = 1 << 21;  // elements
  const int64_t batch = std::clamp<int64_t>(kWorkspace / std::max<int64_t>(per_client, 1), 1, clients);
  const Scratch<C> workspace(batch * per_client);
  for (int64_t first = 0; first < clients; first += batch) {
    const int64_t count = std::min(batch, clients - first);
    Product<C> products[N];
    C* at = workspace.get();
    auto pack = [&](auto type, const Operand& operand, int width) {
      const int64_t panels = ceil_div(operand.row.size(), width), depth = operand.depth.size();
      const int64_t packed_clients = operand.data.client_stride == 0 ? 1 : count;
      C* out = at;
      at += packed_clients * panels * width * depth;
      parallel(parallel_for, packed_clients * panels, ceil_div(16384, width * std::max<int64_t>(depth, 1)),
               [&](int64_t begin, int64_t end) {
                 dispatch<PackPanels, decltype(type)>(operand, first, width, out, begin, end);
               });
      return std::pair<const C*, int64_t>(out, packed_clients == 1 && count > 1 ? 0 : panels * width * depth);
    };
    for (int p = 0; p < N; ++p) {
      std::tie(products[p].left, products[p].left_stride) = pack(Left{}, factors[p].left, mr);
      std::tie(products[p].right, products[p].right_stride) = pack(Right{}, factors[p].right, nr);
      products[p].depth = factors[p].left.depth.size();
    }
    parallel(parallel_for, count * row_panels * column_panels, ceil_div(1 << 19, mr * nr * (depths + 8)),
             [&](int64_t begin, int64_t end) {
               dispatch<MultiplyTiles, T>(products, rows, columns, first, epilogue, begin, end);
             });
  }
}

// Where the elements of a product go: (m, n) of client k to
// data[k·client_stride + row[m] + (n / run)·run_stride + (n % run)·column_stride].
struct Target {
  void* data;
  int64_t client_stride;
  std::vector<int64_t> row;
  int64_t run, run_stride, column_stride;
};

// target = scaling · tile, plus `add` (in the order of the target) where it is given.
struct WriteTile {
  const Target& target;
  double scaling;
  In add;

  template <class T, int NR>
  FF_INLINE static void interleave(T* out, const T* sigma, const Compute<T>* tile, int64_t count, int64_t step,
                                   int64_t together, Compute<T> scale) {
    if (sigma) {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t x = 0; x < together; ++x) {
          out[step * j + x] = from_compute<T>(tile[x * NR + j] * scale + to_compute(sigma[step * j + x]));
        }
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t x = 0; x < together; ++x) out[step * j + x] = from_compute<T>(tile[x * NR + j] * scale);
      }
    }
  }

  template <class T, int B>
  FF_INLINE void write(int64_t k, int64_t m0, int64_t rows, int64_t n0, int64_t columns, const Compute<T>* tile) const {
    using C = Compute<T>;
    constexpr int L = kLanes<T, B>, NR = 2 * L;
    const C scale = scaling;
    T* out = static_cast<T*>(target.data) + k * target.client_stride;
    const T* sigma = client<T>(add, k);
    const int64_t step = target.column_stride;
    for (int64_t n = 0; n < columns;) {
      const int64_t within = (n0 + n) % target.run, count = std::min(columns - n, target.run - within);
      const int64_t at = (n0 + n) / target.run * target.run_stride + within * step;
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t to = target.row[m0 + m] + at;
        const C* from = tile + m * NR + n;
        if (step == 1) {
          int64_t j = 0;
          for (; j + L <= count; j += L) {
            Vec<T, B> x = load<B>(from + j) * scale;
            if (sigma) x += load<B>(sigma + to + j);
            store<B>(out + to + j, x);
          }
          for (; j < count; ++j) {
            out[to + j] = from_compute<T>(from[j] * scale + (sigma ? to_compute(sigma[to + j]) : C(0)));
          }
        } else {
          // Rows that interleave, as those of a kernel of three columns do, are written together.
          int64_t together = 1;
          while (m + together < rows && target.row[m0 + m + together] == target.row[m0 + m] + together) ++together;
          together = std::min(together, step);
          if (step == 3 && together == 3) {
            interleave<T, NR>(out + to, sigma ? sigma + to : nullptr, from, count, 3, 3, scale);
          } else if (step == 5 && together == 5) {
            interleave<T, NR>(out + to, sigma ? sigma + to : nullptr, from, count, 5, 5, scale);
          } else {
            interleave<T, NR>(out + to, sigma ? sigma + to : nullptr, from, count, step, together, scale);
          }
          m += together - 1;
        }
      }
      n += count;
    }
  }
};

}  // namespace fastfact
