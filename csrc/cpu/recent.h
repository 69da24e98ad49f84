// What took time to find, kept for calls that repeat.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fastfact {

// The entries used last, up to `limit` bytes in all; `Entry::bytes()` says what each takes. A lock that is taken (by
// another thread, or one that a fork left behind) is not waited for: nothing is then found, or kept.
template <class Entry>
class Recent {
 public:
  using Kept = std::shared_ptr<const Entry>;

  explicit Recent(int64_t limit) : limit_(limit) {}

  // The entry used last of those for which alike(entry), asked while the lock is held, and same(entry), asked without
  // it, are true; null where there is none.
  template <class Alike, class Same>
  Kept find(const Alike& alike, const Same& same) {
    std::vector<Kept> candidates;
    if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) {
      for (const Kept& entry : entries_) {
        if (alike(*entry)) candidates.push_back(entry);
      }
    }
    for (const Kept& entry : candidates) {
      if (!same(*entry)) continue;
      if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) {
        const auto at = std::find(entries_.begin(), entries_.end(), entry);
        if (at != entries_.end()) entries_.splice(entries_.begin(), entries_, at);
      }
      return entry;
    }
    return nullptr;
  }

  void add(Kept entry) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock || entry->bytes() > limit_) return;
    entries_.push_front(std::move(entry));
    for (bytes_ += entries_.front()->bytes(); bytes_ > limit_; entries_.pop_back()) {
      bytes_ -= entries_.back()->bytes();
    }
  }

 private:
  const int64_t limit_;
  int64_t bytes_ = 0;
  std::mutex mutex_;
  std::list<Kept> entries_;  // the one used last is the first
};

}  // namespace fastfact
