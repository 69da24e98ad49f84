// The factored linear layer of few rows (linear_tiles.h): values are spread out by the bits of their support and
// multiplied by all rows at once; what the factors add is made apart, of what is thin.
#include "gemm.h"
#include "items.h"
#include "linear_tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kRowsOfW = 4;                             // taken together
constexpr int64_t kOfX = 1 << 15;                           // numbers of x that stay in the second cache
constexpr int64_t kMostInputs = 2048;                       // taken together
constexpr int64_t kSlack = 16;                              // values read beyond the last
constexpr int64_t kLeastOutputs = 16, kLeastBackward = 32;  // of an item
constexpr int64_t kItems = 16;
constexpr int64_t kMostBackward = 512;   // inputs of an item, backward
constexpr int64_t kOfFirst = 1 << 12;    // numbers of x that stay with those of dx in the first cache
constexpr int64_t kSummed = 64;          // columns summed together
constexpr int64_t kLeastWork = 1 << 16;  // multiplications that are worth a thread

struct Dots {
  const float *left, *right;  // [rows, left_row], [columns, right_row], padded with zeros
  int64_t left_row, right_row, rows, columns, depth;
  float* out;  // [rows, columns]
};

// out = left · rightᵀ. Items are numbers of out.
template <class T, int B>
struct RunDots {
  FF_INLINE static void run(const Dots& d, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const float *a = d.left + item / d.columns * d.left_row, *b = d.right + item % d.columns * d.right_row;
      Vec<float, B> sums[4]{};
      for (int64_t k = 0; k < d.depth; k += 64) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < 64; j += kLanes<float, B>) {
          sums[j / kLanes<float, B> % 4] += load<B>(a + k + j) * load<B>(b + k + j);
        }
      }
      d.out[item] = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
    }
  }
};

// Some columns of kRowsOfW rows of W; those beyond the last are zeros.
template <class T>
struct Piece {
  // The last rows as they are read, for up to a register of values is read beyond their own.
  struct Last {
    T values[kRowsOfW][kMostInputs + kSlack];
    uint8_t bits[kRowsOfW][kMostInputs / 8];
  };

  const T* from[kRowsOfW];
  const uint8_t* bits;
  int64_t bits_row,
      ahead;  // from a row's bits, and roughly its values, to those of the next row, and of the next piece
  int64_t count[kRowsOfW];

  FF_INLINE Piece(const TiledWeight<T>& w, int64_t o, int64_t c, int64_t width, Last& last) {
    auto start = [&](int64_t row) FF_INLINE_LAMBDA { return w.support.start(row, c); };
    const int64_t rows = std::min(kRowsOfW, w.o - o), next = o + kRowsOfW;
    for (int64_t k = 0; k < rows; ++k) {
      from[k] = w.values + start(o + k);
      count[k] = (c + width < w.i ? w.support.start(o + k, c + width) : w.support.start(o + k + 1, 0)) - start(o + k);
    }
    bits = w.support.bytes(o, c), bits_row = w.support.words * 8;
    ahead = next < w.o ? start(next) - start(o) : 0;
    if (rows == kRowsOfW && from[rows - 1] + count[rows - 1] + kSlack <= w.last + 8) return;
    std::memset(last.bits, 0, sizeof(last.bits));
    for (int64_t k = 0; k < kRowsOfW; ++k) {
      if (k < rows) {
        std::memcpy(static_cast<void*>(last.values[k]), from[k], count[k] * sizeof(T));
        std::memcpy(last.bits[k], bits + k * bits_row, width / 8);
      }
      from[k] = last.values[k];
    }
    bits = last.bits[0], bits_row = kMostInputs / 8, ahead = 0;
  }
};

template <class T>
struct Forward {
  TiledWeight<T> w;
  int64_t n, x_row, chunk, outputs;  // inputs taken together, outputs of an item
  const float *x, *hidden, *bias;    // hidden [n, rank]; bias or null
  T* y;
  bool words;  // bits are taken 64 at a time
};

template <class T, int B>
struct RunFew {
  using V = Vec<float, B>;
  static constexpr int kLane = B / int(sizeof(float));
  static constexpr int kRows =
      B == 64 ? 6 : 2;  // of x multiplied at once: with those of W their sums fill the registers

  FF_INLINE static void run(const Forward<T>& f, int64_t begin, int64_t end) {
    const TiledWeight<T>& w = f.w;
    const int64_t row = ceil_div(f.outputs, kRowsOfW) * kRowsOfW, blocks = ceil_div(f.n, kRows);
    const Scratch<float> sums(f.n * row), spread_out(blocks > 1 ? kRowsOfW * (f.chunk + 16) : 0);
    const Scratch<typename Piece<T>::Last> last(1);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t o = item * f.outputs, count = std::min(f.outputs, w.o - o);
      for (int64_t m = 0; m < f.n; ++m) {
        float* const to = sums.get() + m * row;
        for (int64_t k = 0; k < row; ++k) to[k] = f.bias && k < count ? f.bias[o + k] : 0;
        for (int64_t r = 0; r < w.rank; ++r) {
          const float h = f.hidden[m * w.rank + r];
          for (int64_t k = 0; k < count; ++k) to[k] += h * w.v[r * w.v_row + o + k];
        }
      }
      for (int64_t c = 0; c < w.i; c += f.chunk) {
        const int64_t together = f.words ? 64 : kLane;
        const int64_t width = ceil_div(std::min(f.chunk, w.i - c), together) * together;
        for (int64_t k = 0; k < count; k += kRowsOfW) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            const Piece<T> piece(w, o + k, c, width, *last.get());
            for (int64_t b = 0; b < blocks; ++b) {
              const int64_t m = b * f.n / blocks, rows = (b + 1) * f.n / blocks - m;
              const float* const x = f.x + m * f.x_row + c;
              float* const to = sums.get() + m * row + k;
              if (blocks == 1) {
                multiply_rows<true, false>(f, rows, piece, width, x, spread_out.get(), row, to);
              } else if (b == 0) {
                multiply_rows<true, true>(f, rows, piece, width, x, spread_out.get(), row, to);
              } else {
                multiply_rows<false, false>(f, rows, piece, width, x, spread_out.get(), row, to);
              }
            }
          });
        }
      }
      for (int64_t m = 0; m < f.n; ++m) copy<B>(sums.get() + m * row, count, f.y + m * w.o + o);
    }
  }

  template <bool kSpread, bool kKeep>
  FF_INLINE static void multiply_rows(const Forward<T>& f, int64_t rows, const Piece<T>& piece, int64_t width,
                                      const float* x, float* spread_out, int64_t row, float* sums) {
    auto multiply_some = [&]<int M>() FF_INLINE_LAMBDA {
      multiply<M, kSpread, kKeep>(f, piece, width, x, spread_out, row, sums);
    };
    if constexpr (kRows == 6) {
      if (rows == 6) return multiply_some.template operator()<6>();
      if (rows == 5) return multiply_some.template operator()<5>();
      if (rows == 4) return multiply_some.template operator()<4>();
      if (rows == 3) return multiply_some.template operator()<3>();
    }
    rows == 1 ? multiply_some.template operator()<1>() : multiply_some.template operator()<2>();
  }

  // sums[m][k] += Σ_j x[m][j] · W[k][j]; W is spread, or read from where it was kept.
  template <int M, bool kSpread, bool kKeep>
  FF_INLINE static void multiply(const Forward<T>& f, const Piece<T>& piece, int64_t width, const float* x,
                                 float* spread_out, int64_t row, float* sums) {
    static_assert(kRowsOfW == 4);
    if constexpr (kExpands<B> && kSpread && !kKeep && M == 1) {
      if (f.words) return multiply_words<M>(f, piece, width, x, row, sums);
    }
    const int64_t step = f.chunk + 16, x_row = f.x_row, ahead = piece.ahead, bits_row = piece.bits_row;
    const T* from[4];
    for (int k = 0; k < 4; ++k) from[k] = piece.from[k];
    V sum[M][4]{};
    const uint8_t* bits = piece.bits;
    for (int64_t j = 0; j < width; j += kLane, bits += kLane / 8) {
      V weights[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        if constexpr (kSpread) {
          __builtin_prefetch(from[k] + ahead);
          weights[k] = spread_next<B>(bits + k * bits_row, from[k]);
          if constexpr (kKeep) store<B>(spread_out + k * step + j, weights[k]);
        } else {
          weights[k] = load<B>(spread_out + k * step + j);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const V a = load<B>(x + m * x_row + j);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum[m][k] += a * weights[k];
      }
    }
    add_sums<M>(sum, row, sums);
  }

  // The same, the lanes of 64 columns found at once.
  template <int M>
  FF_INLINE static void multiply_words([[maybe_unused]] const Forward<T>& f, [[maybe_unused]] const Piece<T>& piece,
                                       [[maybe_unused]] int64_t width, [[maybe_unused]] const float* x,
                                       [[maybe_unused]] int64_t row, [[maybe_unused]] float* sums) {
#if defined(FF_DISPATCH) && !defined(__clang__)
    using Bytes = VecOf<uint8_t, 64>::Type;
    using Lanes = VecOf<uint32_t, 64>::Type;
    using Some = VecOf<uint8_t, 16>::Type;
    Bytes ascending;
    for (int k = 0; k < 64; ++k) ascending[k] = k;
    const Lanes zero = Lanes{} + 16;  // the lane of a register of zeros
    const int64_t ahead = piece.ahead, x_row = f.x_row;
    const T* from[4];
    for (int k = 0; k < 4; ++k) from[k] = piece.from[k];
    V sum[M][4]{};
    const uint8_t* bits = piece.bits;
    for (int64_t j = 0; j < width; j += 64, bits += 8) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        uint64_t word;
        std::memcpy(&word, bits + k * piece.bits_row, 8);
        const T* const values = from[k];
        from[k] += __builtin_popcountll(word);
        Bytes which = ~Bytes{};
        asm("vpexpandb %1, %0%{%2%}" : "+v"(which) : "v"(ascending), "Yk"(word));
        auto add = [&]<int Q>() FF_INLINE_LAMBDA {
          const int before = Q ? __builtin_popcountll(word << (64 - 16 * Q) % 64) : 0;
          Some some;
          if constexpr (Q) {
            asm("vextracti32x4 %2, %1, %0" : "=v"(some) : "v"(which), "i"(Q));
          } else {
            std::memcpy(&some, &which, 16);
          }
          Lanes lanes;
          asm("vpmovzxbd %1, %0" : "=v"(lanes) : "v"(some));
          lanes -= before;
          asm("vpminud %1, %0, %0" : "+v"(lanes) : "v"(zero));
          __builtin_prefetch(values + before + ahead);
          const V weights =
              __builtin_shuffle(load<64>(values + before), V{}, bit_cast<VecOf<int32_t, 64>::Type>(lanes));
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) sum[m][k] += load<64>(x + m * x_row + j + 16 * Q) * weights;
        };
        add.template operator()<0>(), add.template operator()<1>();
        add.template operator()<2>(), add.template operator()<3>();
      }
    }
    add_sums<M>(sum, row, sums);
#endif
  }

  template <int M>
  FF_INLINE static void add_sums(const V (&sum)[M][4], int64_t row, float* sums) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V all = add_exchanged<2>(add_exchanged<1>(sum[m][0], sum[m][1]), add_exchanged<1>(sum[m][2], sum[m][3]));
      float* const to = sums + m * row;
      alignas(64) float lanes[kLane];
      store<B>(lanes, all);
      for (int k = 0; k < 4; ++k) {
        float total = 0;
#pragma GCC unroll 4
        for (int lane = k; lane < kLane; lane += 4) total += lanes[lane];
        to[k] += total;
      }
    }
  }

  // Lanes l of the result with l & D are sums of b's, the others of a's.
  template <int D>
  FF_INLINE static V add_exchanged(V a, V b) {
    using Pack = PackPanels<float, B>;
    constexpr std::make_integer_sequence<int, kLane> lanes;
    return Pack::template exchange<D, false>(a, b, lanes) + Pack::template exchange<D, true>(a, b, lanes);
  }
};

template <class T>
struct Backward {
  TiledWeight<T> w;
  int64_t n, row, dy_row;
  int64_t inputs, chunks, outputs, parts;  // of an item, and how many there are
  const float *x, *dy, *grad_hidden;       // [n, row], [n, dy_row], [n, rank]
  float* sums;                             // what an item adds to dx, [chunk][part][n, width]
  T *dx, *dvalues;

  // Not a power of two, whose rows would share few sets of the first cache.
  int64_t width() const { return inputs + 16; }
  float* of(int64_t chunk, int64_t part) const { return sums + (chunk * parts + part) * n * width(); }
};

template <class T, int B>
struct RunFewBackward {
  using V = Vec<float, B>;
  static constexpr int kLane = B / int(sizeof(float));

  // Items are (part of the outputs, chunk of the inputs).
  FF_INLINE static void run(const Backward<T>& g, const Items& items) {
    const TiledWeight<T>& w = g.w;
    const Scratch<typename Piece<T>::Last> last(1);
    const Scratch<float> recent(g.dx ? g.n * g.width() : 0);
    for (int64_t item; (item = items.take()) < items.count();) {
      const int64_t part = item / g.chunks, chunk = item % g.chunks;
      const int64_t c = chunk * g.inputs, count = std::min(g.inputs, w.i - c);
      const int64_t width = ceil_div(count, kLane) * kLane, first = part * g.outputs;
      const int64_t end = std::min(first + g.outputs, w.o);
      float* const sums = g.of(chunk, part);
      for (int64_t begin = first; begin < end; begin += kDepth) {
        float* const to = begin == first ? sums : recent.get();
        if (g.dx) start(g, c, width, begin == 0, to);
        for (int64_t o = begin; o < std::min(begin + kDepth, end); o += kRowsOfW) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            if (g.dx && g.dvalues) add<true, true>(g, o, c, count, width, to, *last.get());
            if (g.dx && !g.dvalues) add<true, false>(g, o, c, count, width, to, *last.get());
            if (!g.dx) add<false, true>(g, o, c, count, width, to, *last.get());
          });
        }
        for (int64_t k = 0; g.dx && to != sums && k < g.n * g.width(); ++k) sums[k] += to[k];
      }
    }
  }

  // Zeros, or what the factors add to dx.
  FF_INLINE static void start(const Backward<T>& g, int64_t c, int64_t width, bool factors, float* to) {
    const TiledWeight<T>& w = g.w;
    for (int64_t m = 0; m < g.n; ++m, to += g.width()) {
      std::memset(to, 0, g.width() * sizeof(float));
      for (int64_t r = 0; factors && r < w.rank; ++r) {
        const float h = g.grad_hidden[m * w.rank + r];
        for (int64_t k = 0; k < width; ++k) to[k] += h * w.u[r * w.u_row + c + k];
      }
    }
  }

  template <bool kInput, bool kValues>
  FF_INLINE static void add(const Backward<T>& g, int64_t o, int64_t c, int64_t count, int64_t width, float* sums,
                            typename Piece<T>::Last& last) {
    const TiledWeight<T>& w = g.w;
    const Piece<T> piece(w, o, c, width, last);
    const T* from[4];
    T none[1], *to[4], *end[4];
    for (int k = 0; k < 4; ++k) {
      const bool there = kValues && o + k < w.o;
      from[k] = piece.from[k], to[k] = there ? g.dvalues + w.support.start(o + k, c) : none;
      end[k] = to[k] + (there ? piece.count[k] : 0);
    }
    const int64_t n = g.n, row = g.row, dy_row = g.dy_row, dx_row = g.width();
    const int64_t ahead = piece.ahead, bits_row = piece.bits_row;
    const uint8_t* bits = piece.bits;
    // Registers of which all numbers are there are read and written in place.
    const int64_t whole = w.support.whole && o + kRowsOfW <= w.o ? count / kLane * kLane : 0;
    // J registers of columns from j on.
    auto columns = [&]<int J>(int64_t j, auto in_place) FF_INLINE_LAMBDA {
      V weights[4][J], grads[4][J]{};
#pragma GCC unroll 4
      for (int k = 0; kInput && k < 4; ++k) {
#pragma GCC unroll 2
        for (int l = 0; l < J; ++l) {
          __builtin_prefetch(from[k] + ahead);
          if constexpr (in_place()) {
            weights[k][l] = load<B>(from[k]), from[k] += kLane;
          } else {
            weights[k][l] = spread_next<B>(bits + k * bits_row + l * (kLane / 8), from[k]);
          }
        }
      }
      const float *x = g.x + c + j, *dy = g.dy + o;
      float* dx = sums + j;
      for (int64_t m = 0; m < n; ++m, x += row, dx += dx_row, dy += dy_row) {
        V sum[J]{}, in[J]{};
#pragma GCC unroll 2
        for (int l = 0; l < J; ++l) {
          if constexpr (kInput) sum[l] = load<B>(dx + l * kLane);
          if constexpr (kValues) in[l] = load<B>(x + l * kLane);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const float out = dy[k];
#pragma GCC unroll 2
          for (int l = 0; l < J; ++l) {
            if constexpr (kInput) sum[l] += weights[k][l] * out;
            if constexpr (kValues) grads[k][l] += in[l] * out;
          }
        }
#pragma GCC unroll 2
        for (int l = 0; kInput && l < J; ++l) store<B>(dx + l * kLane, sum[l]);
      }
#pragma GCC unroll 4
      for (int k = 0; kValues && k < 4; ++k) {
#pragma GCC unroll 2
        for (int l = 0; l < J; ++l) {
          __builtin_prefetch(to[k] + ahead, 1);
          if constexpr (in_place()) {
            store<B>(to[k], grads[k][l]), to[k] += kLane;
          } else {
            gather_next<B>(bits + k * bits_row + l * (kLane / 8), grads[k][l], to[k], end[k]);
          }
        }
      }
      bits += J * (kLane / 8);
    };
    constexpr int J = B == 64 ? 2 : 1;  // as many as there are registers for
    int64_t j = 0;
    for (; j + J * kLane <= whole; j += J * kLane) columns.template operator()<J>(j, std::true_type{});
    for (; j < whole; j += kLane) columns.template operator()<1>(j, std::true_type{});
    for (; j + J * kLane <= width; j += J * kLane) columns.template operator()<J>(j, std::false_type{});
    for (; j < width; j += kLane) columns.template operator()<1>(j, std::false_type{});
  }
};

// [rows, row] as float, the rest zeros. Rows a power of two apart would share few sets of the first cache.
template <class T>
struct Copied {
  int64_t row;
  Scratch<float> data;
  Copied(const void* from, int64_t rows, int64_t size, ParallelFor parallel_for)
      : row(ceil_div(size, 64) * 64 + 16), data(rows * row) {
    parallel(parallel_for, rows, ceil_div(1 << 14, row), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        dispatch<CopyRow, T>(static_cast<const T*>(from) + m * size, size, row, data.get() + m * row);
      }
    });
  }
};

template <class T>
void make_dots(const float* left, int64_t left_row, int64_t rows, const float* right, int64_t right_row,
               int64_t columns, int64_t depth, float* out, ParallelFor parallel_for) {
  const Dots d{left, right, left_row, right_row, rows, columns, depth, out};
  parallel(parallel_for, rows * columns, ceil_div(kLeastWork, depth + 1),
           [&](int64_t begin, int64_t end) { dispatch<RunDots, T>(d, begin, end); });
}

template <class T>
struct Sums {
  const float* hidden;  // [n, rank]
  int64_t n, rank;
  const float* rows;  // [n, row]
  int64_t row, size;
  T* out;
};

// out [rank, size] = hiddenᵀ rows. Items are columns of out, kSummed of them.
template <class T, int B>
struct RunSums {
  FF_INLINE static void run(const Sums<T>& s, int64_t begin, int64_t end) {
    constexpr int L = kLanes<float, B>;
    for (int64_t first = begin * kSummed; first < std::min(end * kSummed, s.size); first += kSummed) {
      for (int64_t r = 0; r < s.rank; ++r) {
        Vec<float, B> sums[kSummed / L]{};
        for (int64_t m = 0; m < s.n; ++m) {
          const float h = s.hidden[m * s.rank + r];
#pragma GCC unroll 16
          for (int k = 0; k < kSummed / L; ++k) sums[k] += load<B>(s.rows + m * s.row + first + k * L) * h;
        }
        alignas(64) float found[kSummed];
#pragma GCC unroll 16
        for (int k = 0; k < kSummed / L; ++k) store<B>(found + k * L, sums[k]);
        copy<B>(found, std::min(kSummed, s.size - first), s.out + r * s.size + first);
      }
    }
  }
};

template <class T>
void sum_products(const Sums<T>& s, ParallelFor parallel_for) {
  parallel(parallel_for, s.out ? ceil_div(s.size, kSummed) : 0, ceil_div(kLeastWork, s.n * s.rank * kSummed + 1),
           [&](int64_t begin, int64_t end) { dispatch<RunSums, T>(s, begin, end); });
}

// dx = what the parts of the outputs add to it. Items are rows.
template <class T, int B>
struct SumParts {
  FF_INLINE static void run(const Backward<T>& g, int64_t begin, int64_t end) {
    const Scratch<float> sum(g.width());
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t c = 0, chunk = 0; c < g.w.i; c += g.inputs, ++chunk) {
        const float* from = g.of(chunk, 0) + m * g.width();
        std::memcpy(sum.get(), from, g.width() * sizeof(float));
        for (int64_t part = 1; part < g.parts; ++part) {
          from = g.of(chunk, part) + m * g.width();
          for (int64_t k = 0; k < g.width(); k += kLanes<float, B>) {
            store<B>(sum.get() + k, load<B>(sum.get() + k) + load<B>(from + k));
          }
        }
        copy<B>(sum.get(), std::min(g.inputs, g.w.i - c), g.dx + m * g.w.i + c);
      }
    }
  }
};

}  // namespace

template <class T>
void multiply_few(const TiledWeight<T>& w, const FactoredLinear& op, ParallelFor parallel_for) {
  const Copied<T> x(op.x.data, op.n, w.i, parallel_for);
  const Padded<T> bias(op.bias, op.bias ? 1 : 0, w.o);
  const Scratch<float> hidden(op.n * w.rank);
  make_dots<T>(x.data.get(), x.row, op.n, w.u, w.u_row, w.rank, w.i, hidden.get(), parallel_for);
  Forward<T> f{w, op.n, x.row};
  f.chunk = std::clamp<int64_t>(kOfX / op.n, 512, kMostInputs) / 64 * 64;
  f.outputs = std::max(ceil_div(ceil_div(w.o, kItems), kRowsOfW) * kRowsOfW, kLeastOutputs);
  f.x = x.data.get(), f.hidden = hidden.get(), f.bias = op.bias ? bias.data : nullptr;
  f.y = static_cast<T*>(op.y.data), f.words = expands();
  parallel(parallel_for, ceil_div(w.o, f.outputs), 1,
           [&](int64_t begin, int64_t end) { dispatch<RunFew, T>(f, begin, end); });
}

template <class T>
void multiply_few_backward(const TiledWeight<T>& w, const FactoredLinearBackward& op, ParallelFor parallel_for) {
  const int64_t n = op.n;
  // For dx alone there may be no x.
  const bool reads_x = op.dvalues || op.du || op.dv;
  const Copied<T> x(op.x.data, reads_x ? n : 0, w.i, parallel_for), dy(op.dy.data, n, w.o, parallel_for);
  const Scratch<float> hidden(n * w.rank), grad_hidden(n * w.rank);
  if (op.dx.data || op.du) {
    make_dots<T>(dy.data.get(), dy.row, n, w.v, w.v_row, w.rank, w.o, grad_hidden.get(), parallel_for);
  }
  if (op.dv) make_dots<T>(x.data.get(), x.row, n, w.u, w.u_row, w.rank, w.i, hidden.get(), parallel_for);
  Backward<T> g{w, n, x.row, dy.row};
  // The sums depend on the number of parts, so it depends on the shape only.
  g.chunks = ceil_div(w.i, std::clamp<int64_t>(kOfFirst / n, 64, kMostBackward));
  g.inputs = ceil_div(ceil_div(w.i, g.chunks), 64) * 64;
  g.chunks = ceil_div(w.i, g.inputs);
  g.parts = std::clamp<int64_t>(w.o / kLeastBackward, 1, ceil_div(kItems / 2, g.chunks));
  g.outputs = ceil_div(ceil_div(w.o, g.parts), kRowsOfW) * kRowsOfW, g.parts = ceil_div(w.o, g.outputs);
  const Scratch<float> sums(op.dx.data ? g.chunks * g.parts * n * g.width() : 0);
  g.x = x.data.get(), g.dy = dy.data.get(), g.grad_hidden = grad_hidden.get(), g.sums = sums.get();
  g.dx = static_cast<T*>(op.dx.data), g.dvalues = static_cast<T*>(op.dvalues);
  if (g.dx || g.dvalues) {
    parallel_items(parallel_for, g.chunks * g.parts, 1,
                   [&](const Items& items) { dispatch<RunFewBackward, T>(g, items); });
  }
  parallel(parallel_for, g.dx ? n : 0, ceil_div(kLeastWork, g.parts * w.i + 1),
           [&](int64_t begin, int64_t end) { dispatch<SumParts, T>(g, begin, end); });
  sum_products(Sums<T>{grad_hidden.get(), n, w.rank, x.data.get(), x.row, w.i, static_cast<T*>(op.du)}, parallel_for);
  sum_products(Sums<T>{hidden.get(), n, w.rank, dy.data.get(), dy.row, w.o, static_cast<T*>(op.dv)}, parallel_for);
}

template void multiply_few(const TiledWeight<float>&, const FactoredLinear&, ParallelFor);
template void multiply_few(const TiledWeight<BFloat16>&, const FactoredLinear&, ParallelFor);
template void multiply_few(const TiledWeight<Half>&, const FactoredLinear&, ParallelFor);
template void multiply_few_backward(const TiledWeight<float>&, const FactoredLinearBackward&, ParallelFor);
template void multiply_few_backward(const TiledWeight<BFloat16>&, const FactoredLinearBackward&, ParallelFor);
template void multiply_few_backward(const TiledWeight<Half>&, const FactoredLinearBackward&, ParallelFor);

}  // namespace fastfact
