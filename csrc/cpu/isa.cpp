#include <cstdlib>
#include <cstring>

#include "vec.h"

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

const char* instruction_set() {
  const char* const names[] = {"baseline", "x86-64-v3", "x86-64-v4"};
  return names[instruction_set_level()];
}

}  // namespace fastfact
