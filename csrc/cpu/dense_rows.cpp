// y = x Wᵀ + bias of so few rows that a call of a library of matrix products takes longer than the product. Outputs are
// in the lanes; W is by columns.
#include <algorithm>

#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kOutputs = 128;    // of an item of work
constexpr int64_t kGrain = 1 << 15;  // multiplications worth a thread

template <class T, int B>
struct RunDenseRows {
  // kRows rows of y from output o on, kWide registers of each. Inputs go to kChains sums in turn, so that enough of
  // them are on their way at once.
  template <int W, int kRows, int kWide, int kChains>
  FF_INLINE static void multiply(const DenseRows& op, int64_t n, int64_t o) {
    using V = Vec<T, W>;
    constexpr int L = kLanes<T, W>;
    const T* const x = static_cast<const T*>(op.x) + n * op.i;
    const T* w = static_cast<const T*>(op.w) + o;
    V sums[kChains][kRows][kWide]{};
    auto add = [&](int chain, int64_t i) FF_INLINE_LAMBDA {
#pragma GCC unroll 8
      for (int k = 0; k < kWide; ++k) {
        const V column = load<W>(w + k * L);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[chain][r][k] += column * x[r * op.i + i];
      }
      w += op.row;
    };
    int64_t i = 0;
    for (; i + kChains <= op.i; i += kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) add(chain, i + chain);
    }
    for (; i < op.i; ++i) add(0, i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      T* const y = static_cast<T*>(op.y) + (n + r) * op.o + o;
#pragma GCC unroll 8
      for (int k = 0; k < kWide; ++k) {
        V sum = sums[0][r][k];
#pragma GCC unroll 4
        for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][r][k];
        if (op.bias) sum += load<W>(static_cast<const T*>(op.bias) + o + k * L);
        store<W>(y + k * L, sum);
      }
    }
  }

  template <int W, int kWide>
  FF_INLINE static void rows(const DenseRows& op, int64_t o) {
    int64_t n = 0;
    if constexpr (B == 64) {
      for (; n + 4 <= op.n; n += 4) multiply<W, 4, kWide, kWide == 1 ? 2 : 1>(op, n, o);
      if (n + 3 == op.n) return multiply<W, 3, kWide, kWide == 1 ? 2 : 1>(op, n, o);
    }
    for (; n + 2 <= op.n; n += 2) multiply<W, 2, kWide, kWide == 1 ? 4 : 1>(op, n, o);
    if (n < op.n) multiply<W, 1, kWide, kWide == 1 ? 4 : 2>(op, n, o);
  }

  // Outputs [o, end); the last registers may begin among outputs that are written already.
  template <int W>
  FF_INLINE static void columns(const DenseRows& op, int64_t o, int64_t end) {
    constexpr int64_t L = kLanes<T, W>;
    if constexpr (W >= 32) {
      for (; op.n == 1 && o + 8 * L <= end; o += 8 * L) multiply<W, 1, 8, W / 32>(op, 0, o);
    }
    for (; o + 4 * L <= end; o += 4 * L) rows<W, 4>(op, o);
    for (; o < end; o += L) rows<W, 1>(op, std::min(o, op.o - L));
  }

  FF_INLINE static void run(const DenseRows& op, int64_t begin, int64_t end) {
    if (op.o >= kLanes<T, B>) return columns<B>(op, begin, end);
    if (op.o >= kLanes<T, 16>) return columns<16>(op, begin, end);
    columns<int(sizeof(T))>(op, begin, end);
  }
};

}  // namespace

void dense_rows(const DenseRows& op, ParallelFor parallel_for) {
  const int64_t numbers = std::max<int64_t>(1, op.n * op.i * kOutputs);
  auto run = [&](int64_t begin, int64_t end) {
    begin *= kOutputs, end = std::min(op.o, end * kOutputs);
    if (op.type == Type::f64) return dispatch<RunDenseRows, double>(op, begin, end);
    dispatch<RunDenseRows, float>(op, begin, end);
  };
  const int64_t items = ceil_div(op.o, kOutputs);
  if (items * numbers <= kGrain) return run(0, items);
  parallel(parallel_for, items, ceil_div(kGrain, numbers), run);
}

}  // namespace fastfact
