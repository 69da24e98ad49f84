#pragma once

#include <atomic>
#include <cstdint>

namespace fastfact {

// Items of work that threads take one by one, for one may take longer than another.
class Items {
 public:
  explicit Items(int64_t count) : count_(count) {}
  int64_t count() const { return count_; }
  // The next item, `count` or more where none is left.
  int64_t take() const { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  const int64_t count_;
  mutable std::atomic<int64_t> next_{0};
};

}  // namespace fastfact
