#pragma once

#include <atomic>
#include <memory>

#include "vec.h"

namespace fastfact {

// Items of work that threads take one by one, for one may take longer than another: each its own share first, the same
// in every call, so that it finds in its caches what it read and wrote before.
class Items {
 public:
  using Taken = std::atomic<bool>;

  // For the thread whose share is [begin, end).
  Items(int64_t count, Taken* taken, int64_t begin, int64_t end)
      : count_(count), taken_(taken), next_(begin), end_(end), last_(count) {}

  int64_t count() const { return count_; }

  // The next item, `count` where none is left.
  int64_t take() const {
    while (next_ < end_) {
      if (const int64_t item = next_++; claim(item)) return item;
    }
    while (last_ > 0) {
      if (claim(--last_)) return last_;
    }
    return count_;
  }

 private:
  const int64_t count_;
  Taken* const taken_;
  mutable int64_t next_;
  const int64_t end_;
  mutable int64_t last_;  // from here on all are taken

  bool claim(int64_t item) const {
    return !taken_[item].load(std::memory_order_relaxed) && !taken_[item].exchange(true, std::memory_order_relaxed);
  }
};

// body(items) in each thread, of which none has fewer than `grain` items as its share.
template <class F>
void parallel_items(ParallelFor parallel_for, int64_t count, int64_t grain, const F& body) {
  if (count <= 0) return;
  const std::unique_ptr<Items::Taken[]> taken(new Items::Taken[count]());
  parallel(parallel_for, count, grain,
           [&](int64_t begin, int64_t end) { body(Items(count, taken.get(), begin, end)); });
}

}  // namespace fastfact
