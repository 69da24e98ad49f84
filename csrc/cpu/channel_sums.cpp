// A bias added to rows, and its gradient: sums over all but the channels. Sums of up to kTogether numbers are added up,
// so that rounding grows little with their number.
#include <algorithm>

#include "rank1_rows.h"
#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kTogether = 256;
constexpr int64_t kGrain = 16384;  // numbers worth a thread
constexpr int64_t kChannels = 8;   // planes that an item sums
constexpr int64_t kColumns = 256;  // of rows that an item sums

// Channels [begin, end) of planes.
template <class T, int B>
struct SumPlanes {
  FF_INLINE static void run(const ChannelSums& op, int64_t begin, int64_t end) {
    using C = Compute<T>;
    using V = Vec<T, B>;
    constexpr int L = kLanes<T, B>;
    for (int64_t c = begin; c < end; ++c) {
      C total = 0;
      for (int64_t m = 0; m < op.n; ++m) {
        const T* const plane = static_cast<const T*>(op.data) + (m * op.channels + c) * op.plane;
        for (int64_t first = 0; first < op.plane; first += kTogether) {
          const int64_t last = std::min(op.plane, first + kTogether);
          V sums{};
          int64_t p = first;
          for (; p + L <= last; p += L) sums += load<B>(plane + p);
          C sum = 0;
          for (; p < last; ++p) sum += to_compute(plane[p]);
          for (int lane = 0; lane < L; ++lane) sum += sums[lane];
          total += sum;
        }
      }
      static_cast<T*>(op.out)[c] = from_compute<T>(total);
    }
  }
};

// So many rows of `step` numbers, of which `columns` are summed.
template <class T, int B>
struct SumRows {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;

  template <int W>
  FF_INLINE static void sum(const T* from, int64_t step, int64_t rows, C* to) {
    V sums[W]{};
    for (int64_t m = 0; m < rows; ++m, from += step) {
#pragma GCC unroll 8
      for (int k = 0; k < W; ++k) sums[k] += load<B>(from + k * L);
    }
    for (int k = 0; k < W; ++k) store<B>(to + k * L, sums[k]);
  }

  FF_INLINE static void run(const T* from, int64_t step, int64_t rows, int64_t columns, C* to) {
    int64_t c = 0;
    for (; c + 8 * L <= columns; c += 8 * L) sum<8>(from + c, step, rows, to + c);
    for (; c + 2 * L <= columns; c += 2 * L) sum<2>(from + c, step, rows, to + c);
    for (; c + L <= columns; c += L) sum<1>(from + c, step, rows, to + c);
    if (c == columns) return;
    for (int64_t k = c; k < columns; ++k) to[k] = 0;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = c; k < columns; ++k) to[k] += to_compute(from[m * step + k]);
    }
  }
};

// Rows [begin, end) += bias.
template <class T, int B>
struct AddToRows {
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const AddBias& op, int64_t begin, int64_t end) {
    const T* bias = static_cast<const T*>(op.bias);
    T* y = static_cast<T*>(op.y) + begin * op.channels;
    int64_t length = op.channels, count = end - begin;
    // So many narrow rows together are whole registers.
    alignas(64) T several[L * L];
    if (length < L) {
      for (int64_t k = 0; k < L * length; ++k) several[k] = bias[k % length];
      for (; count >= L; count -= L, y += L * length) add(several, L * length, y);
    }
    for (; count > 0; --count, y += length) add(bias, length, y);
  }

  FF_INLINE static void add(const T* bias, int64_t length, T* y) {
    int64_t k = 0;
    for (; k + L <= length; k += L) store<B>(y + k, load<B>(y + k) + load<B>(bias + k));
    for (; k < length; ++k) y[k] += bias[k];
  }
};

}  // namespace

void add_bias(const AddBias& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, Compute<T>>) {
      parallel(parallel_for, op.channels ? op.n : 0, ceil_div(kGrain, std::max<int64_t>(op.channels, 1)),
               [&](int64_t begin, int64_t end) { dispatch<AddToRows, T>(op, begin, end); });
    }
  });
}

void channel_sums(const ChannelSums& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    if (op.plane > 1) {
      const int64_t numbers = std::max<int64_t>(1, op.n * op.plane * kChannels);
      parallel(parallel_for, ceil_div(op.channels, kChannels), ceil_div(kGrain, numbers),
               [&](int64_t begin, int64_t end) {
                 dispatch<SumPlanes, T>(op, begin * kChannels, std::min(op.channels, end * kChannels));
               });
      return;
    }
    const int64_t parts = ceil_div(op.n, kTogether), pieces = ceil_div(op.channels, kColumns);
    if (!parts) return void(std::fill_n(static_cast<T*>(op.out), op.channels, from_compute<T>(C(0))));
    const int64_t rows = ceil_div(op.n, parts);
    const int64_t numbers = std::max<int64_t>(1, rows * std::min(op.channels, kColumns));
    const Scratch<C> sums(parts * op.channels);
    parallel(parallel_for, parts * pieces, ceil_div(kGrain, numbers), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / pieces * rows, column = item % pieces * kColumns;
        dispatch<SumRows, T>(static_cast<const T*>(op.data) + row * op.channels + column, op.channels,
                             std::min(rows, op.n - row), std::min(kColumns, op.channels - column),
                             sums.get() + item / pieces * op.channels + column);
      }
    });
    dispatch<AddChunks, T>(sums.get(), parts, op.channels, op.channels, static_cast<T*>(op.out));
  });
}

}  // namespace fastfact
