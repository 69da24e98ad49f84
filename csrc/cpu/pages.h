#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastfact {

inline constexpr int64_t kLargePage = 2 << 20;

// The whole large pages within so much memory are mapped as such when they are first written: a page at a time, half of
// the time that it takes to fill them would go into the faults.
inline void map_by_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr auto kPage = static_cast<uintptr_t>(kLargePage);
  const auto at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (at + kPage - 1) / kPage * kPage, last = (at + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace fastfact
