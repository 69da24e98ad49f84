#include "support.h"

#include <algorithm>
#include <vector>

#include "recent.h"

namespace fastfact {
namespace {

// Bits and counts of rows [begin, end) whose nonzeros are `index` from `nz` to `stop`. Returns whether these are
// ascending positions in the rows; if not, bits and counts are of no use.
template <class T, int B>
struct FindBits {
  static constexpr int64_t kSegment = 4096;

  FF_INLINE static void run(const int32_t* index, int64_t nz, int64_t stop, int64_t columns, int64_t begin, int64_t end,
                            uint64_t* bits, int32_t* before, std::atomic<bool>* valid) {
    using Lanes = VecOf<int32_t, 32>::Type;
    alignas(64) uint8_t seen[kSegment];
    const int64_t words = Bits::words_of(columns), first_nz = nz;
    bool sorted = nz == stop || index[nz] >= begin * columns;
    Lanes wrong{};
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < columns; first += kSegment) {
        const int64_t base = row * columns + first, size = std::min(kSegment, columns - first);
        int64_t count = nz;
        std::memset(seen, 0, ceil_div(size, 64) * 64);
        auto mark = [&](int64_t at) FF_INLINE_LAMBDA { seen[(index[at] - uint32_t(base)) % kSegment] = 1; };
        if (nz == first_nz && nz < stop && index[nz] - base < size) mark(nz++);
        for (; nz > first_nz && nz + 8 <= stop && index[nz + 7] - base < size; nz += 8) {
          Lanes previous, now;
          std::memcpy(&previous, index + nz - 1, 32);
          std::memcpy(&now, index + nz, 32);
          wrong |= previous >= now;
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) mark(nz + k);
        }
        for (; nz > first_nz && nz < stop && index[nz] - base < size; ++nz) {
          sorted &= index[nz - 1] < index[nz];
          mark(nz);
        }
        for (int64_t w = 0; w < ceil_div(size, 64); ++w) {
          uint64_t word = 0;
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            uint64_t eight;
            std::memcpy(&eight, seen + 64 * w + 8 * k, 8);
            word |= (eight * 0x0102040810204080u >> 56) << 8 * k;
          }
          bits[row * words + first / 64 + w] = word;
          before[row * words + first / 64 + w] = int32_t(count);
          count += __builtin_popcountll(word);
        }
      }
    }
    for (int k = 0; k < 8; ++k) sorted &= !wrong[k];
    if (!sorted || nz != stop) *valid = false;
  }
};

struct Entry {
  bool dense;
  uint64_t digest;
  int64_t count;
  std::shared_ptr<const OwnBits> found;
  int64_t bytes() const { return found->bytes(); }
};

}  // namespace

OwnBits::OwnBits(int64_t rows, int64_t columns, const Sparse& mu, ParallelFor parallel_for)
    : Bits{rows, columns, words_of(columns), nullptr, nullptr, mu.count == rows * columns},
      words_(rows * words + kSpare),
      counts_(rows * words + 1) {
  bits = words_.get(), before = counts_.get();
  counts_.get()[rows * words] = int32_t(mu.count);
  if (!mu.index) {
    for (int64_t at = 0; at < rows * words; ++at) {
      const int64_t first = at % words * 64, last = columns - first;
      words_.get()[at] = last < 64 ? (uint64_t(1) << last) - 1 : ~uint64_t(0);
      counts_.get()[at] = int32_t(at / words * columns + first);
    }
    return;
  }
  const int64_t chunks = std::clamp<int64_t>((mu.count + rows * words) >> 14, 1, std::clamp<int64_t>(rows, 1, 64));
  std::vector<int64_t> starts(chunks + 1);
  for (int64_t k = 1; k < chunks; ++k) {
    const int32_t *const from = mu.index + starts[k - 1], *const end = mu.index + mu.count;
    starts[k] = std::lower_bound(from, end, k * rows / chunks * columns) - mu.index;
  }
  starts[chunks] = mu.count;
  parallel(parallel_for, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      dispatch<FindBits, float>(mu.index, starts[k], starts[k + 1], columns, k * rows / chunks, (k + 1) * rows / chunks,
                                words_.get(), counts_.get(), &valid_);
    }
  });
}

std::shared_ptr<const OwnBits> find_bits(int64_t rows, int64_t columns, const Sparse& mu, ParallelFor parallel_for) {
  static auto* const recent = new Recent<Entry>(int64_t(1) << 27);  // for as long as there are threads
  const bool dense = !mu.index;
  const uint64_t key = dense ? 0 : positions_digest(mu, parallel_for);
  const auto same = [&](const Entry& e) {
    return e.dense == dense && e.digest == key && e.count == mu.count && e.found->rows == rows &&
           e.found->columns == columns;
  };
  if (const auto entry = recent->find(same)) return entry->found;
  const auto bits = std::make_shared<const OwnBits>(rows, columns, mu, parallel_for);
  if (!bits->valid()) return nullptr;
  recent->add(std::make_shared<const Entry>(Entry{dense, key, mu.count, bits}));
  return bits;
}

}  // namespace fastfact
