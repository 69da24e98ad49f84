// What took time to find, kept for calls that repeat.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

namespace fastfact {

// The entries used last, up to `limit` bytes in all; `Entry::bytes()` says what each takes. A lock that is taken (by
// another thread, or one that a fork left behind) is not waited for: nothing is then found, or kept.
template <class Entry>
class Recent {
 public:
  using Kept = std::shared_ptr<const Entry>;

  explicit Recent(int64_t limit) : limit_(limit) {}

  // The entry used last of those for which same(entry) is true; null where there is none.
  template <class Same>
  Kept find(const Same& same) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Kept& entry) { return same(*entry); });
    if (at == entries_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, at);
    return *at;
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
