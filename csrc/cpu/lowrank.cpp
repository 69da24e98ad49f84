// W = σ + scaling · reshape(B A) and its gradients: the reshape is in the packing and in the writing of tiles.
#include "gemm.h"

namespace fastfact {
namespace {

// How the product B A [rows, columns] lies in a weight. The rows of a separable product are (i, ky); for channels_last
// they are taken as (ky, i), in which their places are consecutive.
struct Sides {
  std::vector<int64_t> row, column;  // where row m and column n are in the weight
  std::vector<int64_t> row_of_b;     // which row of B is row m, times the rank
  bool by_tap;
};

template <class Op>
Sides make_sides(const Op& op) {
  const Size& s = op.size;
  const int64_t rank = op.rank;
  if (op.layout == kView) {
    const int64_t rows = s.o * s.kh, columns = s.i * s.kw;
    return {steps(rows, columns), steps(columns, 1), steps(rows, rank), false};
  }
  if (op.channels_last) {
    return {steps(s.kh, s.kw * s.i, s.i, 1), steps(s.o, s.i * s.taps(), s.kw, s.i), steps(s.kh, rank, s.i, s.kh * rank),
            true};
  }
  return {steps(s.i * s.kh, s.kw), steps(s.o, s.i * s.taps(), s.kw, 1), steps(s.i * s.kh, rank), false};
}

template <class T, int>
struct CopyScaled {
  // Items are (client, row).
  static void run(const Scaled& op, int64_t begin, int64_t end) {
    const auto scaling = Compute<T>(op.scaling);
    for (int64_t item = begin; item < end; ++item) {
      const T* const from = client<T>(op.from, item / op.m) + item % op.m * op.row;
      T* const to = static_cast<T*>(op.to) + item * op.n;
      for (int64_t j = 0; j < op.n; ++j) to[j] = from_compute<T>(scaling * to_compute(from[j * op.column]));
    }
  }
};

}  // namespace

void scaled(const Scaled& op, ParallelFor parallel_for) {
  constexpr int64_t kGrain = 1 << 14;  // numbers that are worth another thread
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    parallel(parallel_for, op.clients * op.m, kGrain / std::max<int64_t>(op.n, 1) + 1,
             [&](int64_t begin, int64_t end) { dispatch<CopyScaled, T>(op, begin, end); });
  });
}

void lowrank_weight(const LowRank& op, ParallelFor parallel_for) {
  const Size& s = op.size;
  const Sides sides = make_sides(op);
  const int64_t columns = sides.column.size();
  const Operand b{op.b, sides.row_of_b, steps(op.rank, 1)}, a{op.a, steps(columns, 1), steps(op.rank, columns)};
  // A separable product is computed transposed: its rows follow the input channels, the inner axis of W.
  const bool transposed = op.layout != kView;
  Target target{op.w, s.numel(), transposed ? sides.column : sides.row, columns, 0, 1};
  if (sides.by_tap) {
    target.run = s.i, target.run_stride = s.kw * s.i;
  } else if (transposed) {
    target.run = s.i * s.kh, target.column_stride = s.kw;
  }
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    multiply<T, T, T>(parallel_for, op.clients, {Factors<T, T>{transposed ? a : b, transposed ? b : a}},
                      WriteTile{target, op.scaling, op.sigma});
  });
}

void lowrank_weight_backward(const LowRankBackward& op, ParallelFor parallel_for) {
  const Size& s = op.size;
  const Sides sides = make_sides(op);
  const int64_t rank = op.rank, rows = sides.row.size(), columns = sides.column.size();
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    if (op.da) {
      const Operand b{op.b, steps(rank, 1), sides.row_of_b}, grad{op.grad, sides.column, sides.row};
      const Target target{op.da, rank * columns, steps(rank, columns), columns, 0, 1};
      multiply<T, T, T>(parallel_for, op.clients, {Factors<T, T>{b, grad}}, WriteTile{target, op.scaling, {}});
    }
    if (op.db) {
      const Operand a{op.a, steps(rank, columns), steps(columns, 1)}, grad{op.grad, sides.row, sides.column};
      Target target{op.db, rows * rank, steps(rank, 1), rows, 0, rank};
      if (sides.by_tap) target.run = s.i, target.run_stride = rank, target.column_stride = s.kh * rank;
      multiply<T, T, T>(parallel_for, op.clients, {Factors<T, T>{a, grad}}, WriteTile{target, op.scaling, {}});
    }
  });
}

}  // namespace fastfact
