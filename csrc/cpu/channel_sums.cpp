// The gradient of a bias: sums over all but the channels. Sums of up to kTogether numbers are added up, so that
// rounding grows little with their number.
#include <algorithm>

#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kTogether = 512;
constexpr int64_t kGrain = 16384;  // numbers worth a thread

template <class T, int B>
struct SumChannels {
  FF_INLINE static void run(const ChannelSums& op, int64_t begin, int64_t end) {
    using C = Compute<T>;
    using V = Vec<T, B>;
    constexpr int L = kLanes<T, B>;
    const T* const data = static_cast<const T*>(op.data);
    T* const out = static_cast<T*>(op.out);
    if (op.plane > 1) {
      for (int64_t c = begin; c < end; ++c) {
        C total = 0;
        for (int64_t m = 0; m < op.n; ++m) {
          const T* const plane = data + (m * op.channels + c) * op.plane;
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
        out[c] = from_compute<T>(total);
      }
      return;
    }
    for (int64_t c = begin; c < end; c += L) {
      const int64_t lanes = std::min<int64_t>(L, end - c);
      V total{};
      for (int64_t first = 0; first < op.n; first += kTogether) {
        const int64_t last = std::min(op.n, first + kTogether);
        V sums{};
        for (int64_t m = first; m < last; ++m) {
          const T* const row = data + m * op.channels + c;
          if (lanes == L) {
            sums += load<B>(row);
          } else {
            for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] += to_compute(row[lane]);
          }
        }
        total += sums;
      }
      for (int64_t lane = 0; lane < lanes; ++lane) out[c + lane] = from_compute<T>(C(total[lane]));
    }
  }
};

}  // namespace

void channel_sums(const ChannelSums& op, ParallelFor parallel_for) {
  const int64_t of_one = std::max<int64_t>(1, op.n * op.plane), block = 64;
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    parallel(parallel_for, (op.channels + block - 1) / block, 1 + kGrain / (of_one * block),
             [&](int64_t begin, int64_t end) {
               dispatch<SumChannels, T>(op, begin * block, std::min(op.channels, end * block));
             });
  });
}

}  // namespace fastfact
