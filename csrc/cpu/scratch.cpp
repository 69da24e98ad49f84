// Memory that a thread needs again in each call. From malloc its pages would be given back to the kernel and faulted in
// anew, a fifth of the time of a short call.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "pages.h"
#include "vec.h"

namespace fastfact {
namespace {

constexpr std::align_val_t kLine{64};
constexpr int64_t kMost = 16 << 20;  // bytes that a thread keeps
constexpr int64_t kSmall = 4 << 10;  // less is left to malloc, which keeps it, and more than kMost / 2

// A thread's blocks, one after the other as on a stack. What does not fit is memory of its own, and the next time that
// nothing is in use the stack grows to what was needed.
class Stack {
 public:
  ~Stack() {
    std::free(data_);
    data_ = nullptr, size_ = -1;  // what is destroyed after it has memory of its own
  }

  void* take(int64_t bytes) {
    if (!blocks_ && needed_ > size_ && size_ >= 0) grow();
    demand_ += bytes;
    needed_ = std::max(needed_, std::min(demand_, kMost));
    if (used_ + bytes > size_) return ::operator new(bytes, kLine);
    ++blocks_;
    void* const out = data_ + used_;
    used_ += bytes;
    return out;
  }

  void give(void* block, int64_t bytes) {
    demand_ -= bytes;
    char* const at = static_cast<char*>(block);
    if (!data_ || at < data_ || at >= data_ + size_) return ::operator delete(block, kLine);
    if (--blocks_ == 0) {
      used_ = 0;
    } else if (at + bytes == data_ + used_) {
      used_ -= bytes;
    }
  }

 private:
  void grow() {
    std::free(data_);
    size_ = (needed_ + kLargePage - 1) / kLargePage * kLargePage;
    data_ = static_cast<char*>(std::aligned_alloc(kLargePage, size_));
    if (!data_) {
      size_ = needed_ = 0;
      return;
    }
    map_by_large_pages(data_, size_);
  }

  char* data_ = nullptr;
  int64_t size_ = 0, used_ = 0, blocks_ = 0;
  int64_t demand_ = 0, needed_ = 0;  // bytes in use, in the stack or not; the most there were
};

thread_local Stack stack;

#if defined(__GLIBC__)
// By default glibc gives the end of the heap back to the kernel when twice the largest tensor is free there, and the
// next step takes it anew, a page fault for each page. It has settings of its own for whoever wants that.
[[maybe_unused]] const bool keeps_freed = [] {
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") || std::getenv("MALLOC_MMAP_THRESHOLD_")) return false;
  if (tunables && std::strstr(tunables, "glibc.malloc.")) return false;
  // The largest that it allows, and would come to by itself: larger blocks are given back as they are freed.
  return mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, INT32_MAX);
}();
#endif

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
[[maybe_unused]] bool kept(int64_t bytes) { return bytes >= kSmall && bytes <= kMost / 2; }

}  // namespace

void* take_scratch(int64_t bytes) {
#ifdef FF_EXACT_SCRATCH
  void* const out = ::operator new(bytes ? bytes : 1, kLine);
  std::memset(out, 0xff, bytes);  // NaN, that what is read before it is written shows
  return out;
#else
  return kept(bytes) ? stack.take(whole_lines(bytes)) : ::operator new(bytes ? bytes : 1, kLine);
#endif
}

void give_scratch(void* block, int64_t bytes) {
#ifdef FF_EXACT_SCRATCH
  ::operator delete(block, kLine);
#else
  kept(bytes) ? stack.give(block, whole_lines(bytes)) : ::operator delete(block, kLine);
#endif
}

}  // namespace fastfact
