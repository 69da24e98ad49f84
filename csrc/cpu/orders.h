// Orders of nonzeros that were found, for calls that repeat the same μ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace fastfact {

// An order depends on the positions of the nonzeros and on some numbers, the plan. It is given out only where both are
// equal, number by number, to what it was found for, so that no caller can hold a wrong one. Kept are the orders used
// last, up to `limit` bytes. A lock that is taken (by another thread, or one that a fork left behind) is not waited
// for: the order is then found anew.
class Orders {
 public:
  using Order = std::shared_ptr<const std::vector<int32_t>>;

  explicit Orders(int64_t limit) : limit_(limit) {}

  Order find(const std::vector<int64_t>& plan, const int32_t* index, int64_t count) {
    std::vector<std::shared_ptr<const Entry>> alike;
    if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) {
      for (const auto& entry : entries_) {
        if (entry->sample == sample(index, count) && entry->plan == plan) alike.push_back(entry);
      }
    }
    for (const auto& entry : alike) {
      if (int64_t(entry->index.size()) != count || std::memcmp(entry->index.data(), index, count * sizeof(int32_t))) {
        continue;
      }
      if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) {
        const auto at = std::find(entries_.begin(), entries_.end(), entry);
        if (at != entries_.end()) entries_.splice(entries_.begin(), entries_, at);
      }
      return Order(entry, &entry->order);
    }
    return nullptr;
  }

  Order add(std::vector<int64_t> plan, const int32_t* index, int64_t count, std::vector<int32_t> order) {
    auto entry = std::make_shared<Entry>();
    entry->sample = sample(index, count), entry->plan = std::move(plan);
    entry->index.assign(index, index + count), entry->order = std::move(order);
    if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock && entry->bytes() <= limit_) {
      entries_.push_front(entry);
      for (bytes_ += entry->bytes(); bytes_ > limit_; entries_.pop_back()) bytes_ -= entries_.back()->bytes();
    }
    return Order(entry, &entry->order);
  }

 private:
  struct Entry {
    uint64_t sample;
    std::vector<int64_t> plan;
    std::vector<int32_t> index, order;
    int64_t bytes() const { return (index.size() + order.size()) * sizeof(int32_t) + plan.size() * sizeof(int64_t); }
  };

  // Of a few positions, to tell most supports apart at once.
  static uint64_t sample(const int32_t* index, int64_t count) {
    uint64_t out = count;
    for (int64_t k = 0; k < 16 && count; ++k) out = (out ^ uint64_t(index[k * (count - 1) / 15])) * 0x9E3779B97F4A7C15u;
    return out;
  }

  const int64_t limit_;
  int64_t bytes_ = 0;
  std::mutex mutex_;
  std::list<std::shared_ptr<const Entry>> entries_;  // the one used last is the first
};

}  // namespace fastfact
