// W = (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ + p) and its gradients. Forward, the two products meet in registers' tiles; backward, dW times
// the other product is kept, one matrix for each of the two.
#include "gemm.h"

namespace fastfact {
namespace {

// The rows of y in the order of the elements of W[o].
template <class Op>
std::vector<int64_t> y_rows(const Op& op, int64_t rank) {
  const Size& s = op.size;
  return op.channels_last ? steps(s.taps(), rank, s.i, s.taps() * rank) : steps(s.i * s.taps(), rank);
}

struct WriteProduct {
  void* w;
  Size size;
  double plus;

  template <class T, int B>
  FF_INLINE void write(int64_t k, int64_t m0, int64_t rows, int64_t n0, int64_t columns,
                       const Compute<T>* tiles) const {
    using C = Compute<T>;
    constexpr int L = kLanes<T, B>, NR = 2 * L, kTile = tile_rows(B) * NR;
    const C p = plus;
    const int64_t width = size.i * size.taps();
    for (int64_t m = 0; m < rows; ++m) {
      T* out = static_cast<T*>(w) + k * size.numel() + (m0 + m) * width + n0;
      const C* from = tiles + m * NR;
      int64_t j = 0;
      for (; j + L <= columns; j += L) {
        store<B>(out + j, load<B>(from + j) * (load<B>(from + kTile + j) + p));
      }
      for (; j < columns; ++j) out[j] = from_compute<T>(from[j] * (from[kTile + j] + p));
    }
  }
};

// out [client, o, n], which is not in half precision, = dW · (tile + p).
struct WriteGradient {
  void* out;
  In grad;
  Size size;
  int64_t first_client;
  double plus;

  template <class T, int B>
  FF_INLINE void write(int64_t k, int64_t m0, int64_t rows, int64_t n0, int64_t columns, const Compute<T>* tile) const {
    using C = Compute<T>;
    constexpr int L = kLanes<T, B>, NR = 2 * L;
    const C p = plus;
    const int64_t width = size.i * size.taps();
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t at = (m0 + m) * width + n0;
      C* to = static_cast<C*>(out) + k * size.numel() + at;
      const T* g = client<T>(grad, first_client + k) + at;
      const C* from = tile + m * NR;
      int64_t j = 0;
      for (; j + L <= columns; j += L) store<B>(to + j, load<B>(g + j) * (load<B>(from + j) + p));
      for (; j < columns; ++j) to[j] = to_compute(g[j]) * (from[j] + p);
    }
  }
};

In from_client(const In& in, int64_t k, int64_t element) {
  return {static_cast<const char*>(in.data) + k * in.client_stride * element, in.client_stride};
}

// dx [o, r] = G Y and dy [n, r] = Gᵀ X for one product, where G = dW ⊙ the other product (+ p).
template <class T>
void backward_of_product(const HadamardBackward& op, const In& x, const In& y, int64_t rank, const In& other_x,
                         const In& other_y, int64_t other_rank, double plus, void* dx, void* dy,
                         ParallelFor parallel_for) {
  using C = Compute<T>;
  const Size& s = op.size;
  const int64_t width = s.i * s.taps();
  constexpr int64_t kWorkspace = 1 << 22;  // elements
  const int64_t batch = std::clamp<int64_t>(kWorkspace / std::max<int64_t>(s.numel(), 1), 1, op.clients);
  const Scratch<C> gradient(batch * s.numel());
  for (int64_t k = 0; k < op.clients; k += batch) {
    const int64_t count = std::min(batch, op.clients - k);
    {
      const Operand left{from_client(other_x, k, sizeof(T)), steps(s.o, other_rank), steps(other_rank, 1)};
      const Operand right{from_client(other_y, k, sizeof(T)), y_rows(op, other_rank), steps(other_rank, 1)};
      multiply<T, T, T>(parallel_for, count, {Factors<T, T>{left, right}},
                        WriteGradient{gradient.get(), op.grad, s, k, plus});
    }
    const In g{gradient.get(), s.numel()};
    if (dx) {
      const Operand left{from_client(y, k, sizeof(T)), steps(rank, 1), y_rows(op, rank)};
      const Operand right{g, steps(s.o, width), steps(width, 1)};
      const Target target{static_cast<T*>(dx) + k * s.o * rank, s.o * rank, steps(rank, 1), s.o, 0, rank};
      multiply<T, T, C>(parallel_for, count, {Factors<T, C>{left, right}}, WriteTile{target, 1.0, {}});
    }
    if (dy) {
      const Operand left{from_client(x, k, sizeof(T)), steps(rank, 1), steps(s.o, rank)};
      const Operand right{g, steps(width, 1), steps(s.o, width)};
      Target target{static_cast<T*>(dy) + k * width * rank, width * rank, steps(rank, 1), width, 0, rank};
      if (op.channels_last) target.run = s.i, target.run_stride = rank, target.column_stride = s.taps() * rank;
      multiply<T, T, C>(parallel_for, count, {Factors<T, C>{left, right}}, WriteTile{target, 1.0, {}});
    }
  }
}

}  // namespace

void hadamard_weight(const Hadamard& op, ParallelFor parallel_for) {
  const Size& s = op.size;
  const Operand x1{op.x1, steps(s.o, op.rank1), steps(op.rank1, 1)}, y1{op.y1, y_rows(op, op.rank1), x1.depth};
  const Operand x2{op.x2, steps(s.o, op.rank2), steps(op.rank2, 1)}, y2{op.y2, y_rows(op, op.rank2), x2.depth};
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    multiply<T, T, T>(parallel_for, op.clients, {Factors<T, T>{x1, y1}, Factors<T, T>{x2, y2}},
                      WriteProduct{op.w, s, op.personalized ? 1.0 : 0.0});
  });
}

void hadamard_weight_backward(const HadamardBackward& op, ParallelFor parallel_for) {
  if (op.clients == 0) return;
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    if (op.dx1 || op.dy1) {
      backward_of_product<T>(op, op.x1, op.y1, op.rank1, op.x2, op.y2, op.rank2, op.personalized ? 1.0 : 0.0, op.dx1,
                             op.dy1, parallel_for);
    }
    if (op.dx2 || op.dy2) {
      backward_of_product<T>(op, op.x2, op.y2, op.rank2, op.x1, op.y1, op.rank1, 0.0, op.dx2, op.dy2, parallel_for);
    }
  });
}

}  // namespace fastfact
