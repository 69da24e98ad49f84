// Orders of nonzeros that were found, for calls that repeat the same μ.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "recent.h"

namespace fastfact {

// An order depends on the positions of the nonzeros and on some numbers, the plan. It is given out only where both are
// equal, number by number, to what it was found for, so that no caller can hold a wrong one.
class Orders {
 public:
  using Order = std::shared_ptr<const std::vector<int32_t>>;

  explicit Orders(int64_t limit) : recent_(limit) {}

  Order find(const std::vector<int64_t>& plan, const int32_t* index, int64_t count) {
    const uint64_t sampled = sample(index, count);
    const auto alike = [&](const Entry& e) {
      return e.sample == sampled && e.plan == plan && int64_t(e.index.size()) == count;
    };
    const auto same = [&](const Entry& e) { return !std::memcmp(e.index.data(), index, count * sizeof(int32_t)); };
    const auto entry = recent_.find(alike, same);
    return entry ? Order(entry, &entry->order) : nullptr;
  }

  Order add(std::vector<int64_t> plan, const int32_t* index, int64_t count, std::vector<int32_t> order) {
    const auto entry = std::make_shared<const Entry>(
        Entry{sample(index, count), std::move(plan), {index, index + count}, std::move(order)});
    recent_.add(entry);
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

  Recent<Entry> recent_;
};

}  // namespace fastfact
