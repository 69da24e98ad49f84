#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "amx.h"

namespace fastfact {

Isa instruction_set_level() {
#ifdef FF_DISPATCH
  __builtin_cpu_init();
  Isa level = kBaseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    level = kV3;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      level = kV4;
    }
  }
  if (const char* wanted = std::getenv("ATEN_CPU_CAPABILITY")) {
    if (!std::strcmp(wanted, "default")) level = kBaseline;
    if (!std::strcmp(wanted, "avx2") && level > kV3) level = kV3;
  }
  return level;
#else
  return kWidth == 64 ? kV4 : kWidth == 32 ? kV3 : kBaseline;
#endif
}

bool has_amx() {
#if defined(FF_EMULATE_PAIRS)
  return true;
#elif defined(FF_DISPATCH) && !defined(__clang__) && defined(__linux__)
  static const bool there = [] {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of leaf 7
    constexpr int kAskForTiles = 0x1023, kTileData = 18;    // of arch_prctl
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!multiplies_pairs() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kBf16 | kTile)) return false;
    return !syscall(SYS_arch_prctl, kAskForTiles, kTileData);
  }();
  return there;
#else
  return false;
#endif
}

const char* instruction_set() {
  const char* const names[] = {"baseline", "x86-64-v3", "x86-64-v4"};
  return names[instruction_set_level()];
}

}  // namespace fastfact
