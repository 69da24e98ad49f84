// The factored linear layer of few rows (linear_tiles.h): values are spread out by the bits of their support and
// multiplied by all rows at once; what the factors add is made apart, of what is thin.
#include "gemm.h"
#include "linear_tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kRowsOfW = 4;        // taken together
constexpr int64_t kOfX = 1 << 15;      // numbers of x that stay in the second cache
constexpr int64_t kLeastOutputs = 64;  // of an item
constexpr int64_t kLeastInputs = 256;  // of an item, backward
constexpr int64_t kMostInputs = 512;   // backward, so that x and dx stay in the first two caches
constexpr int64_t kItems = 16;

struct Dots {
  const float *left, *right;  // [rows, left_row], [columns, right_row], padded with zeros
  int64_t left_row, right_row, rows, columns, depth;
  float* out;  // [rows, columns]
};

// out = left · rightᵀ
template <class T, int B>
struct RunDots {
  FF_INLINE static void run(const Dots& d) {
    for (int64_t m = 0; m < d.rows; ++m) {
      for (int64_t n = 0; n < d.columns; ++n) {
        const float *a = d.left + m * d.left_row, *b = d.right + n * d.right_row;
        Vec<float, B> sums[4]{};
        for (int64_t k = 0; k < d.depth; k += 64) {
#pragma GCC unroll 16
          for (int64_t j = 0; j < 64; j += kLanes<float, B>) {
            sums[j / kLanes<float, B> % 4] += load<B>(a + k + j) * load<B>(b + k + j);
          }
        }
        d.out[m * d.columns + n] = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
      }
    }
  }
};

template <class T>
struct Forward {
  TiledWeight<T> w;
  int64_t n, x_row, chunk, outputs;  // inputs taken together, outputs of an item
  const float *x, *hidden, *bias;    // x with an even number of rows; hidden [n, rank]; bias or null
  T* y;
};

template <class T, int B>
struct RunFew {
  FF_INLINE static void run(const Forward<T>& f, int64_t begin, int64_t end) {
    const TiledWeight<T>& w = f.w;
    const int64_t row = ceil_div(f.outputs, kRowsOfW) * kRowsOfW, rows = ceil_div(f.n, 2) * 2;
    const Scratch<float> sums(rows * row), spread_out(kRowsOfW * (f.chunk + 16));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t o = item * f.outputs, count = std::min(f.outputs, w.o - o);
      for (int64_t m = 0; m < rows; ++m) {
        float* const to = sums.get() + m * row;
        for (int64_t k = 0; k < row; ++k) to[k] = f.bias && k < count ? f.bias[o + k] : 0;
        for (int64_t r = 0; r < w.rank && m < f.n; ++r) {
          const float h = f.hidden[m * w.rank + r];
          for (int64_t k = 0; k < count; ++k) to[k] += h * w.v[r * w.v_row + o + k];
        }
      }
      for (int64_t c = 0; c < w.i; c += f.chunk) {
        const int64_t width = ceil_div(std::min(f.chunk, w.i - c), 8) * 8;
        for (int64_t k = 0; k < count; k += kRowsOfW) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            spread_rows(w, o + k, std::min(kRowsOfW, count - k), c, width, f.chunk + 16, spread_out.get());
            multiply(f, rows, row, c, width, spread_out.get(), sums.get() + k);
          });
        }
      }
      for (int64_t m = 0; m < f.n; ++m) copy<B>(sums.get() + m * row, count, f.y + m * w.o + o);
    }
  }

  FF_INLINE static void spread_rows(const TiledWeight<T>& w, int64_t o, int64_t rows, int64_t c, int64_t width,
                                    int64_t step, float* to) {
    const T* const last = w.last;
    for (int64_t k = 0; k < kRowsOfW; ++k, to += step) {
      if (k >= rows) {
        std::memset(to, 0, width * sizeof(float));
        continue;
      }
      const T* from = w.values + w.support.start(o + k, c);
      const T* ahead = o + k + kRowsOfW < w.o ? w.values + w.support.start(o + k + kRowsOfW, c) : from;
      const uint8_t* const bits = w.support.bytes(o + k, c);
      for (int64_t j = 0; j < width; j += 8) {
        const unsigned byte = bits[j / 8];
        store<32>(to + j, spread(byte, from, last));
        __builtin_prefetch(ahead);
        from += __builtin_popcount(byte), ahead += __builtin_popcount(byte);
      }
    }
  }

  // sums[m][k] += Σ_j x[m][c + j] · right[k][j]
  FF_INLINE static void multiply(const Forward<T>& f, int64_t rows, int64_t row, int64_t c, int64_t width,
                                 const float* right, float* sums) {
    const int64_t step = f.chunk + 16;
    for (int64_t m = 0; m < rows; m += 2, sums += 2 * row) {
      const float *const first = f.x + m * f.x_row + c, *const second = first + f.x_row;
      Eight sum[8]{};
      for (int64_t j = 0; j < width; j += 8) {
        const Eight a = load<32>(first + j), b = load<32>(second + j);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const Eight weight = load<32>(right + k * step + j);
          sum[k] += a * weight;
          sum[4 + k] += b * weight;
        }
      }
      PackPanels<float, 32>::template transpose_lanes<4>(sum);
      const Eight all = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sums[k] += all[k], sums[row + k] += all[4 + k];
    }
  }
};

template <class T>
struct Backward {
  TiledWeight<T> w;
  int64_t n, row, inputs;             // of x and dx; inputs of an item
  const float *x, *dy, *grad_hidden;  // dy [o, n], [n, rank]
  float* sums;                        // dx as float
  T *dx, *dvalues;
};

template <class T, int B>
struct RunFewBackward {
  FF_INLINE static void run(const Backward<T>& g, int64_t begin, int64_t end) {
    const TiledWeight<T>& w = g.w;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t c = item * g.inputs, count = std::min(g.inputs, w.i - c), width = ceil_div(count, 8) * 8;
      if (g.dx) start(g, c, width);
      for (int64_t o = 0; o < w.o; o += kRowsOfW) {
        outline<B>([&]() FF_INLINE_LAMBDA {
          if (g.dx && g.dvalues) add<true, true>(g, o, c, width);
          if (g.dx && !g.dvalues) add<true, false>(g, o, c, width);
          if (!g.dx) add<false, true>(g, o, c, width);
        });
      }
      for (int64_t m = 0; g.dx && m < g.n; ++m) copy<B>(g.sums + m * g.row + c, count, g.dx + m * w.i + c);
    }
  }

  // What the factors add to dx.
  FF_INLINE static void start(const Backward<T>& g, int64_t c, int64_t width) {
    const TiledWeight<T>& w = g.w;
    for (int64_t m = 0; m < g.n; ++m) {
      float* const to = g.sums + m * g.row + c;
      std::memset(to, 0, width * sizeof(float));
      for (int64_t r = 0; r < w.rank; ++r) {
        const float h = g.grad_hidden[m * w.rank + r];
        for (int64_t k = 0; k < width; ++k) to[k] += h * w.u[r * w.u_row + c + k];
      }
    }
  }

  template <bool kInput, bool kValues>
  FF_INLINE static void add(const Backward<T>& g, int64_t o, int64_t c, int64_t width) {
    static const uint8_t none[kMostInputs / 8] = {};
    const TiledWeight<T>& w = g.w;
    const T* const last = w.last;
    const uint8_t* bits[4];
    const T *from[4], *stop[4];
    T* to[4];
    T none_there[8];   // for rows beyond the last
    int64_t ahead[4];  // from a row to the one that comes next
    const int64_t next = c + g.inputs;
    for (int k = 0; k < 4; ++k) {
      const bool there = o + k < w.o;
      const int64_t at = there ? w.support.start(o + k, c) : 0;
      bits[k] = there ? w.support.bytes(o + k, c) : none, from[k] = w.values + at, to[k] = none_there,
      stop[k] = none_there + 8;
      if (kValues && there) {
        to[k] = g.dvalues + at;
        stop[k] = g.dvalues + (next < w.i ? w.support.start(o + k, next) : w.support.start(o + k + 1, 0));
      }
      ahead[k] = o + k + 4 < w.o ? w.support.start(o + k + 4, c) - at : 0;
    }
    const int64_t n = g.n, row = g.row;
    const float* const dy = g.dy + o * n;
    for (int64_t j = 0; j < width; j += 8) {
      Eight weights[4], grads[4]{};
      unsigned bytes[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        bytes[k] = bits[k][j / 8];
        if constexpr (kInput) {
          weights[k] = spread(bytes[k], from[k], last);
          __builtin_prefetch(from[k] + ahead[k]);
          from[k] += __builtin_popcount(bytes[k]);
        }
      }
      const float* x = g.x + c + j;
      float* dx = g.sums + c + j;
      for (int64_t m = 0; m < n; ++m, x += row, dx += row) {
        Eight sum{}, in{};
        if constexpr (kInput) sum = load<32>(dx);
        if constexpr (kValues) in = load<32>(x);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const float out = dy[k * n + m];
          if constexpr (kInput) sum += weights[k] * out;
          if constexpr (kValues) grads[k] += in * out;
        }
        if constexpr (kInput) store<32>(dx, sum);
      }
      if constexpr (kValues) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          gather(bytes[k], grads[k], to[k], stop[k]);
          __builtin_prefetch(to[k] + ahead[k], 1);
          to[k] += __builtin_popcount(bytes[k]);
        }
      }
    }
  }
};

// [rows, row] as float, the rest zeros. Rows a power of two apart would share few sets of the first cache.
template <class T>
struct Copied {
  int64_t row;
  Scratch<float> data;
  Copied(const void* from, int64_t n, int64_t size, int64_t rows)
      : row(ceil_div(size, 64) * 64 + 16), data(rows * row) {
    for (int64_t m = 0; m < rows; ++m) {
      float* const to = data.get() + m * row;
      const int64_t there = m < n ? size : 0;
      dispatch<CopyRow, T>(static_cast<const T*>(from) + (m < n ? m * size : 0), there, to);
      std::fill(to + there, to + row, 0.f);
    }
  }

 private:
  template <class S, int B>
  struct CopyRow {
    FF_INLINE static void run(const S* from, int64_t n, float* to) { copy<B>(from, n, to); }
  };
};

template <class T>
void make_dots(const float* left, int64_t left_row, int64_t rows, const float* right, int64_t right_row,
               int64_t columns, int64_t depth, float* out) {
  if (columns) dispatch<RunDots, T>(Dots{left, right, left_row, right_row, rows, columns, depth, out});
}

// out [rank, size] = hiddenᵀ rows
template <class T>
void sum_products(const float* hidden, int64_t n, int64_t rank, const float* rows, int64_t row, int64_t size, T* out) {
  for (int64_t r = 0; r < rank && out; ++r) {
    for (int64_t k = 0; k < size; ++k) {
      float sum = 0;
      for (int64_t m = 0; m < n; ++m) sum += hidden[m * rank + r] * rows[m * row + k];
      out[r * size + k] = from_compute<T>(sum);
    }
  }
}

}  // namespace

template <class T>
void multiply_few(const TiledWeight<T>& w, const FactoredLinear& op, ParallelFor parallel_for) {
  const Copied<T> x(op.x.data, op.n, w.i, ceil_div(op.n, 2) * 2);
  const Padded<T> bias(op.bias, op.bias ? 1 : 0, w.o);
  const Scratch<float> hidden(op.n * w.rank);
  make_dots<T>(x.data.get(), x.row, op.n, w.u, w.u_row, w.rank, w.i, hidden.get());
  Forward<T> f{w, op.n, x.row};
  f.chunk = std::clamp<int64_t>(kOfX / op.n, 512, 2048) / 64 * 64;
  f.outputs = std::max(ceil_div(ceil_div(w.o, kItems), kRowsOfW) * kRowsOfW, kLeastOutputs);
  f.x = x.data.get(), f.hidden = hidden.get(), f.bias = op.bias ? bias.data.get() : nullptr;
  f.y = static_cast<T*>(op.y.data);
  parallel(parallel_for, ceil_div(w.o, f.outputs), 1,
           [&](int64_t begin, int64_t end) { dispatch<RunFew, T>(f, begin, end); });
}

template <class T>
void multiply_few_backward(const TiledWeight<T>& w, const FactoredLinearBackward& op, ParallelFor parallel_for) {
  const int64_t n = op.n;
  const Copied<T> x(op.x.data, n, w.i, n), dy(op.dy.data, n, w.o, n);
  const Scratch<float> turned(ceil_div(w.o, kRowsOfW) * kRowsOfW * n), sums(op.dx.data ? n * x.row : 0);
  const Scratch<float> hidden(n * w.rank), grad_hidden(n * w.rank);
  for (int64_t o = 0; o < ceil_div(w.o, kRowsOfW) * kRowsOfW; ++o) {
    for (int64_t m = 0; m < n; ++m) turned.get()[o * n + m] = o < w.o ? dy.data.get()[m * dy.row + o] : 0;
  }
  if (op.dx.data || op.du) {
    make_dots<T>(dy.data.get(), dy.row, n, w.v, w.v_row, w.rank, w.o, grad_hidden.get());
  }
  if (op.dv) make_dots<T>(x.data.get(), x.row, n, w.u, w.u_row, w.rank, w.i, hidden.get());
  Backward<T> g{w, n, x.row};
  g.inputs = std::clamp(ceil_div(ceil_div(w.i, kItems), 64) * 64, kLeastInputs, kMostInputs);
  g.x = x.data.get(), g.dy = turned.get(), g.grad_hidden = grad_hidden.get(), g.sums = sums.get();
  g.dx = static_cast<T*>(op.dx.data), g.dvalues = static_cast<T*>(op.dvalues);
  if (g.dx || g.dvalues) {
    parallel(parallel_for, ceil_div(w.i, g.inputs), 1,
             [&](int64_t begin, int64_t end) { dispatch<RunFewBackward, T>(g, begin, end); });
  }
  sum_products(grad_hidden.get(), n, w.rank, x.data.get(), x.row, w.i, static_cast<T*>(op.du));
  sum_products(hidden.get(), n, w.rank, dy.data.get(), dy.row, w.o, static_cast<T*>(op.dv));
}

template void multiply_few(const TiledWeight<float>&, const FactoredLinear&, ParallelFor);
template void multiply_few(const TiledWeight<BFloat16>&, const FactoredLinear&, ParallelFor);
template void multiply_few(const TiledWeight<Half>&, const FactoredLinear&, ParallelFor);
template void multiply_few_backward(const TiledWeight<float>&, const FactoredLinearBackward&, ParallelFor);
template void multiply_few_backward(const TiledWeight<BFloat16>&, const FactoredLinearBackward&, ParallelFor);
template void multiply_few_backward(const TiledWeight<Half>&, const FactoredLinearBackward&, ParallelFor);

}  // namespace fastfact
