// Products over a client axis with rows of the clients' samples, read where they are, and the loss of a cohort.
#include <algorithm>
#include <limits>

#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kPiece = 512;  // elements of a row that are worked on at a time

template <class T>
FF_INLINE const T* row_of(const SampleRows& rows, int64_t k, int64_t n) {
  return static_cast<const T*>(rows.samples[k]) + rows.index[k * rows.index_stride + n] * rows.width;
}

// The sum of the lanes, by halves of the register.
template <class T, int B>
FF_INLINE Compute<T> total(Vec<T, B> x) {
  if constexpr (B == 16) {
    return sum_lanes(x);
  } else {
    Vec<T, B / 2> low, high;
    std::memcpy(&low, &x, B / 2);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + B / 2, B / 2);
    return total<T, B / 2>(low + high);
  }
}

// The rows of x in groups of R, the outputs in groups of N; a group that is not full repeats its last member. A piece
// of the weights is packed: rows a multiple of 4 KiB apart, as those of x and of W often are, share their place in the
// first cache, and ten of them would leave none for x.
template <class T, int B>
struct RowsLinear {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, R = B == 64 ? 4 : 2, N = 5;

  struct Tile {
    const T *x[R], *next[R];
    const V* w;  // [registers][N]
    V* sums;
    int64_t count;  // registers
  };

  template <bool ahead>
  FF_INLINE static void accumulate(const Tile& t) {
    V sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] = t.sums[r * N + n];
    }
    for (int64_t i = 0; i < t.count; ++i) {
      for (int r = 0; r < R; ++r) {
        if (ahead) __builtin_prefetch(t.next[r] + i * L, 0, 2);
        const V x = load<B>(t.x[r] + i * L);
        for (int n = 0; n < N; ++n) sums[r][n] += x * t.w[i * N + n];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) t.sums[r * N + n] = sums[r][n];
    }
  }

  FF_INLINE static void run(const SampleRows& rows, const In& weight, int64_t outputs, T* y, int64_t begin,
                            int64_t end) {
    const int64_t groups = ceil_div(rows.batch, R), blocks = ceil_div(outputs, N), width = rows.width;
    const int64_t whole = width / L * L, most = kPiece / L * N;
    Scratch<V> all(std::min(end - begin, groups) * blocks * R * N), packed(blocks * most);
    while (begin < end) {
      const int64_t k = begin / groups, first = begin % groups, last = std::min(groups, first + end - begin);
      const T* w = client<T>(weight, k);
      for (int64_t n = 0; n < (last - first) * blocks * R * N; ++n) all.get()[n] = V{};
      for (int64_t piece = 0; piece < whole; piece += kPiece) {
        Tile t;
        t.count = std::min(whole - piece, kPiece) / L;
        for (int64_t n = 0; n < blocks * N; ++n) {
          const T* from = w + std::min(n, outputs - 1) * width + piece;
          V* to = packed.get() + n / N * most + n % N;
          for (int64_t i = 0; i < t.count; ++i) {
            __builtin_prefetch(from + kPiece + i * L, 0, 2);
            to[i * N] = load<B>(from + i * L);
          }
        }
        for (int64_t group = first; group < last; ++group) {
          // The group that comes next is fetched meanwhile: after the last one the first, a piece further.
          const int64_t ahead = group + 1 < last ? group + 1 : first, skip = group + 1 < last ? 0 : kPiece;
          for (int r = 0; r < R; ++r) {
            t.x[r] = row_of<T>(rows, k, std::min(group * R + r, rows.batch - 1)) + piece;
            t.next[r] = row_of<T>(rows, k, std::min(ahead * R + r, rows.batch - 1)) + piece + skip;
          }
          for (int64_t block = 0; block < blocks; ++block) {
            t.w = packed.get() + block * most;
            t.sums = all.get() + ((group - first) * blocks + block) * R * N;
            if (block == 0) {
              outline<B>([&]() FF_INLINE_LAMBDA { accumulate<true>(t); });
            } else {
              outline<B>([&]() FF_INLINE_LAMBDA { accumulate<false>(t); });
            }
          }
        }
      }
      for (int64_t row = first * R; row < std::min(last * R, rows.batch); ++row) {
        const T* x = row_of<T>(rows, k, row);
        for (int64_t o = 0; o < outputs; ++o) {
          C sum = total<T, B>(all.get()[((row / R - first) * blocks + o / N) * R * N + row % R * N + o % N]);
          for (int64_t i = whole; i < width; ++i) sum += to_compute(x[i]) * to_compute(w[o * width + i]);
          y[(k * rows.batch + row) * outputs + o] = from_compute<T>(sum);
        }
      }
      begin += last - first;
    }
  }
};

// A tile of dW are N outputs and two registers of columns; the rows of x go by, the gradients are broadcast.
template <class T, int B>
struct RowsLinearBackward {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, N = B == 64 ? 10 : 5, kColumns = 2 * L, kSoon = 4;

  struct Tile {
    const T* const* x;
    const C* grad;  // [batch][N]
    int64_t batch, column;
    V sums[N][2];
  };

  FF_INLINE static void accumulate(Tile& t) {
    V sums[N][2] = {};
    for (int64_t row = 0; row < t.batch; ++row) {
      const T* x = t.x[row] + t.column;
      // Rows a multiple of 4 KiB apart share their place in the first cache: they are fetched shortly before use.
      const T* soon = t.x[std::min(row + kSoon, t.batch - 1)] + t.column;
      __builtin_prefetch(soon);
      __builtin_prefetch(soon + L);
      __builtin_prefetch(x + 4 * kColumns, 0, 2);
      __builtin_prefetch(x + 4 * kColumns + L, 0, 2);
      const V left = load<B>(x), right = load<B>(x + L);
      for (int n = 0; n < N; ++n) {
        const C g = t.grad[row * N + n];
        sums[n][0] += left * g;
        sums[n][1] += right * g;
      }
    }
    for (int n = 0; n < N; ++n) t.sums[n][0] = sums[n][0], t.sums[n][1] = sums[n][1];
  }

  FF_INLINE static void run(const SampleRows& rows, const In& grad, int64_t outputs, T* dw, int64_t begin,
                            int64_t end) {
    const int64_t pieces = ceil_div(rows.width, kPiece), blocks = ceil_div(outputs, N), batch = rows.batch;
    Scratch<const T*> x(batch), rest(batch);
    Scratch<C> grads(blocks * batch * N);
    Scratch<T> ends(batch * kColumns);
    // The clients backwards: what the forward pass read last is still in cache.
    for (int64_t k = (end - 1) / pieces; k >= begin / pieces; --k) {
      const T* from = client<T>(grad, k);
      for (int64_t row = 0; row < batch; ++row) {
        x.get()[row] = row_of<T>(rows, k, row);
        for (int64_t n = 0; n < blocks * N; ++n) {
          grads.get()[(n / N * batch + row) * N + n % N] = n < outputs ? to_compute(from[row * outputs + n]) : C(0);
        }
      }
      const int64_t first = std::max<int64_t>(0, begin - k * pieces) * kPiece;
      const int64_t last = std::min(rows.width, (end - k * pieces) * kPiece);
      for (int64_t column = first; column < last; column += kColumns) {
        const int64_t count = std::min<int64_t>(kColumns, last - column);
        if (count < kColumns) {
          for (int64_t row = 0; row < batch; ++row) {
            T* to = ends.get() + row * kColumns;
            std::memset(static_cast<void*>(to), 0, kColumns * sizeof(T));
            std::memcpy(static_cast<void*>(to), x.get()[row] + column, count * sizeof(T));
            rest.get()[row] = to;
          }
        }
        for (int64_t block = 0; block < blocks; ++block) {
          Tile t{x.get(), grads.get() + block * batch * N, batch, column, {}};
          if (count < kColumns) t.x = rest.get(), t.column = 0;
          outline<B>([&]() FF_INLINE_LAMBDA { accumulate(t); });
          for (int n = 0; n < N && block * N + n < outputs; ++n) {
            T* to = dw + (k * outputs + block * N + n) * rows.width + column;
            if (count == kColumns) {
              store<B>(to, t.sums[n][0]);
              store<B>(to + L, t.sums[n][1]);
            } else {
              T both[kColumns];
              store<B>(both, t.sums[n][0]);
              store<B>(both + L, t.sums[n][1]);
              std::memcpy(static_cast<void*>(to), both, count * sizeof(T));
            }
          }
        }
      }
    }
  }
};

// How many rows of x `RowsLinear` takes at a time.
int64_t rows_together() { return register_bytes() == 64 ? 4 : 2; }

// The logits of a client may be where its gradient is to be.
template <class T>
void softmax(const SoftmaxLoss& op, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t classes = op.classes, batch = op.batch;
  Scratch<C> power(classes);
  C* e = power.get();
  for (int64_t k = begin; k < end; ++k) {
    C loss = 0;
    for (int64_t n = k * batch; n < (k + 1) * batch; ++n) {
      const T* x = static_cast<const T*>(op.logits) + n * classes;
      T* g = static_cast<T*>(op.grad) + n * classes;
      const int64_t label = op.labels[n];
      C most = to_compute(x[0]), sum = 0;
      for (int64_t c = 1; c < classes; ++c) most = std::max(most, to_compute(x[c]));
      for (int64_t c = 0; c < classes; ++c) sum += e[c] = std::exp(to_compute(x[c]) - most);
      loss += std::log(sum) + most - to_compute(x[label]);
      for (int64_t c = 0; c < classes; ++c) g[c] = from_compute<T>((e[c] / sum - C(c == label)) / C(batch));
    }
    static_cast<T*>(op.losses)[k] = from_compute<T>(loss / C(batch));
  }
}

template <class T>
void add_bias(const SoftmaxLoss& op, const In& bias, T* logits, int64_t begin, int64_t end) {
  for (int64_t k = begin; bias.data && k < end; ++k) {
    const T* b = client<T>(bias, k);
    T* y = logits + k * op.batch * op.classes;
    for (int64_t n = 0; n < op.batch; ++n, y += op.classes) {
      for (int64_t c = 0; c < op.classes; ++c) y[c] = from_compute<T>(to_compute(y[c]) + to_compute(b[c]));
    }
  }
}

}  // namespace

void gather_rows(const SampleRows& rows, int64_t bytes, void* out, ParallelFor parallel_for) {
  parallel(parallel_for, rows.clients * rows.batch, ceil_div(16384, std::max<int64_t>(bytes, 1)),
           [&](int64_t begin, int64_t end) {
             for (int64_t n = begin; n < end; ++n) {
               const int64_t k = n / rows.batch, row = rows.index[k * rows.index_stride + n % rows.batch];
               std::memcpy(static_cast<char*>(out) + n * bytes, static_cast<const char*>(rows.samples[k]) + row * bytes,
                           bytes);
             }
           });
}

void rows_linear(const SampleRows& rows, Type type, const In& weight, int64_t outputs, void* y,
                 ParallelFor parallel_for) {
  if (outputs == 0 || rows.batch == 0) return;
  const int64_t tile = rows_together();
  const int64_t groups = ceil_div(rows.batch, tile), work = tile * outputs * (rows.width + 1);
  parallel(parallel_for, rows.clients * groups, ceil_div(1 << 17, work), [&](int64_t begin, int64_t end) {
    with_type(type, [&](auto t) {
      using T = decltype(t);
      dispatch<RowsLinear, T>(rows, weight, outputs, static_cast<T*>(y), begin, end);
    });
  });
}

void rows_linear_backward(const SampleRows& rows, Type type, const In& grad, int64_t outputs, void* dw,
                          ParallelFor parallel_for) {
  if (outputs == 0) return;
  const int64_t pieces = ceil_div(rows.width, kPiece), work = kPiece * outputs * (rows.batch + 1);
  parallel(parallel_for, rows.clients * pieces, ceil_div(1 << 17, work), [&](int64_t begin, int64_t end) {
    with_type(type, [&](auto t) {
      using T = decltype(t);
      dispatch<RowsLinearBackward, T>(rows, grad, outputs, static_cast<T*>(dw), begin, end);
    });
  });
}

void softmax_loss(const SoftmaxLoss& op, ParallelFor parallel_for) {
  parallel(
      parallel_for, op.clients, ceil_div(2048, std::max<int64_t>(op.batch * op.classes, 1)),
      [&](int64_t begin, int64_t end) { with_type(op.type, [&](auto t) { softmax<decltype(t)>(op, begin, end); }); });
}

void rows_softmax_loss(const SampleRows& rows, const SoftmaxLoss& op, const In& weight, const In& bias, void* dw,
                       int64_t threads, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    // The logits are where their gradient will be.
    SoftmaxLoss loss = op;
    loss.logits = op.grad;
    T* logits = static_cast<T*>(op.grad);
    const In grad{op.grad, op.batch * op.classes};
    if (rows.clients < threads) {
      rows_linear(rows, op.type, weight, op.classes, logits, parallel_for);
      add_bias(op, bias, logits, 0, op.clients);
      softmax_loss(loss, parallel_for);
      rows_linear_backward(rows, op.type, grad, op.classes, dw, parallel_for);
      return;
    }
    const int64_t groups = ceil_div(rows.batch, rows_together()), pieces = ceil_div(rows.width, kPiece);
    parallel(parallel_for, rows.clients, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        if (groups) dispatch<RowsLinear, T>(rows, weight, op.classes, logits, k * groups, (k + 1) * groups);
        add_bias(op, bias, logits, k, k + 1);
        softmax<T>(loss, k, k + 1);
        if (pieces)
          dispatch<RowsLinearBackward, T>(rows, grad, op.classes, static_cast<T*>(dw), k * pieces, (k + 1) * pieces);
      }
    });
  });
}

}  // namespace fastfact
