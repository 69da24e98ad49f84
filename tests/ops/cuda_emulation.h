// Runs the CUDA kernels on the CPU, to test them where there is no GPU: included before each .cu file (-include).
//
// A block is a set of fibers, switched at barriers and warp shuffles, so that shared memory, barriers and collectives
// behave as on the device; blocks run one after the other. Shared memory starts as NaN. A fragment of wmma is the whole
// 16 x 16 matrix in every thread. On request the banks of shared memory are counted that each warp meets in.
#pragma once
#define FASTFACT_EMULATED
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulation {

enum State { kReady, kAtWarp, kAtBlock, kDone };
constexpr size_t kStack = 128 * 1024, kSharedBytes = 227 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
};

// What a thread does for the n-th time at a place in the source, its warp does at once.
struct Access {
  std::string where;
  unsigned warp, turn;
  auto operator<=>(const Access&) const = default;
};
struct Lane {
  unsigned lane;
  size_t at, bytes;
};
struct Banks {
  bool counted = false;
  std::map<std::pair<std::string, unsigned>, unsigned> turns;
  std::map<Access, std::vector<Lane>> block;
  // by place: the most times longer than without conflicts that an access took
  std::map<std::string, double> worst;
};
inline Banks banks;

// 32 banks of 4 bytes: lanes with 8 bytes go by halves of a warp, with 16 by quarters; each goes once for the most
// different words of a bank.
inline double conflicts(const std::vector<Lane>& lanes) {
  const size_t bytes = lanes[0].bytes, at_once = bytes <= 4 ? 32 : 128 / bytes;
  double cycles = 0, least = 0;
  for (size_t first = 0; first < 32; first += at_once) {
    std::vector<size_t> words[32];
    size_t most = 0;
    for (const Lane& one : lanes) {
      if (one.lane < first || one.lane >= first + at_once) continue;
      for (size_t word = one.at / 4; word * 4 < one.at + bytes; ++word) {
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    }
    cycles += most;
    least += most > 0;
  }
  return cycles / least;
}

struct Block {
  std::vector<Fiber> fibers;
  std::function<void()> body;
  ucontext_t scheduler;
  uint64_t slots[1024];
  unsigned thread, index;
  alignas(32) unsigned char shared[kSharedBytes];
};
inline Block block;

inline void note(const void* pointer, size_t bytes, const char* what, const std::source_location& here) {
  const size_t at = static_cast<const unsigned char*>(pointer) - block.shared;
  if (!banks.counted || at >= kSharedBytes) return;
  const std::string file = here.file_name();
  const std::string where =
      file.substr(file.rfind('/') + 1) + ":" + std::to_string(here.line()) + " " + what + " " + std::to_string(bytes);
  const unsigned turn = banks.turns[{where, block.thread}]++;
  banks.block[{where, block.thread / 32, turn}].push_back({block.thread % 32, at, bytes});
}
inline void count_banks() {
  for (const auto& [access, lanes] : banks.block) {
    double& worst = banks.worst[access.where];
    worst = std::max(worst, conflicts(lanes));
  }
  banks.block.clear();
  banks.turns.clear();
}

inline void enter() {
  block.body();
  block.fibers[block.thread].state = kDone;
}

inline void wait(State state) {
  Fiber& fiber = block.fibers[block.thread];
  fiber.state = state;
  swapcontext(&fiber.context, &block.scheduler);
}

// Fibers first … last go on if all that still run wait for `state`.
inline bool release(size_t first, size_t last, State state) {
  bool any = false;
  for (size_t j = first; j < last; ++j) {
    if (block.fibers[j].state == kReady) return false;
    if (block.fibers[j].state != kDone && block.fibers[j].state != state) return false;
    any = any || block.fibers[j].state == state;
  }
  for (size_t j = first; any && j < last; ++j) {
    if (block.fibers[j].state == state) block.fibers[j].state = kReady;
  }
  return any;
}

inline void run(unsigned index, size_t threads, size_t shared, std::function<void()> body) {
  // every other block runs its threads from the last to the first, so that a missing barrier shows
  static bool backwards = true;
  backwards = !backwards;
  block.index = index;
  block.body = std::move(body);
  std::memset(block.shared, 0xff, shared);
  if (block.fibers.size() < threads) block.fibers.resize(threads);
  for (size_t j = 0; j < threads; ++j) {
    Fiber& fiber = block.fibers[j];
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &block.scheduler;
    makecontext(&fiber.context, enter, 0);
    fiber.state = kReady;
  }
  for (bool going = true; going;) {
    going = false;
    for (size_t turn = 0; turn < threads; ++turn) {
      const size_t j = backwards ? threads - 1 - turn : turn;
      if (block.fibers[j].state != kReady) continue;
      block.thread = static_cast<unsigned>(j);
      swapcontext(&block.scheduler, &block.fibers[j].context);
      going = true;
    }
    for (size_t j = 0; j < threads; j += 32) going |= release(j, j + 32 < threads ? j + 32 : threads, kAtWarp);
    going |= release(0, threads, kAtBlock);
  }
  if (banks.counted) count_banks();
  for (size_t j = 0; j < threads; ++j) {
    if (block.fibers[j].state != kDone) {
      std::fprintf(stderr, "thread %zu of block %u waits for ever\n", j, index);
      std::abort();
    }
  }
}

struct Thread {
  struct X {
    operator unsigned() const { return block.thread; }
  } x;
};
struct Index {
  struct X {
    operator unsigned() const { return block.index; }
  } x;
};

template <typename T>
T exchange(T value, int source) {
  const unsigned warp = block.thread / 32 * 32;
  std::memcpy(&block.slots[block.thread], &value, sizeof(T));
  wait(kAtWarp);
  std::memcpy(&value, &block.slots[source < 0 || source > 31 ? block.thread : warp + source], sizeof(T));
  wait(kAtWarp);
  return value;
}

}  // namespace emulation

// Half precision as its bits, converted to and from float with rounding to nearest, ties to even.
struct __nv_bfloat16 {
  uint16_t bits;
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
inline float __bfloat162float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline __nv_bfloat16 __float2bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
  uint16_t bits;
  explicit operator float() const {
    const float sign = bits & 0x8000 ? -1 : 1;
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
  }
};
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return {0x7fff};
  if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return {static_cast<uint16_t>(sign + mantissa + (size < 0x1p-14f ? 0 : (exponent + 14) * 1024))};
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
using cudaStream_t = void*;

inline emulation::Thread threadIdx;
inline emulation::Index blockIdx;

inline void __syncthreads() { emulation::wait(emulation::kAtBlock); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulation::exchange(value, source);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  return emulation::exchange(value, static_cast<int>(threadIdx.x % 32) - delta);
}
inline unsigned long long atomicAdd(unsigned long long* sum, unsigned long long x) {
  *sum += x;
  return *sum - x;
}
inline unsigned atomicOr(unsigned* word, unsigned x) {
  *word |= x;
  return *word;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __dp4a(int x, int y, int sum) {
  for (int l = 0; l < 4; ++l) sum += static_cast<int8_t>(x >> 8 * l) * static_cast<int8_t>(y >> 8 * l);
  return sum;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __float2int_rn(float x) { return std::isnan(x) ? 0 : static_cast<int>(std::nearbyint(x)); }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline int min(int x, int y) { return x < y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "error";
}

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static constexpr int num_elements = 256;
  float x[num_elements];
};

// x[16 r + c] holds row r, column c.
template <typename F>
void fill_fragment(F& f, float value) {
  for (float& x : f.x) x = value;
}
template <typename Use, typename T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, row_major>& f, const T* from, unsigned lead) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) f.x[16 * r + c] = static_cast<float>(from[r * lead + c]);
}
template <typename Use, typename T>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, col_major>& f, const T* from, unsigned lead) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) f.x[16 * r + c] = static_cast<float>(from[c * lead + r]);
}
template <typename D, typename A, typename B>
void mma_sync(D& d, const A& a, const B& b, const D& c) {
  D sum = c;
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 16; ++j) sum.x[16 * i + j] += a.x[16 * i + k] * b.x[16 * k + j];
  d = sum;
}
template <typename D>
void store_matrix_sync(float* to, const D& d, unsigned lead, layout_t layout) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) to[layout == mem_row_major ? r * lead + c : c * lead + r] = d.x[16 * r + c];
}

}  // namespace nvcuda::wmma

namespace fastfact_cuda {

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, void*, Arguments... arguments) {
  if (shared > emulation::kSharedBytes || blocks > UINT32_MAX) return cudaErrorInvalidValue;
  for (int64_t b = 0; b < blocks; ++b) {
    emulation::run(static_cast<unsigned>(b), threads, shared, [&] { kernel(static_cast<Parameters>(arguments)...); });
  }
  return cudaSuccess;
}
template <typename K>
int allow_shared(K, size_t) {
  return cudaSuccess;
}
inline size_t most_shared() { return emulation::kSharedBytes; }
inline unsigned char* dynamic_shared() { return emulation::block.shared; }

template <typename P, typename T>
P load_shared(const T* at, const std::source_location& here = std::source_location::current()) {
  emulation::note(at, sizeof(P), "load", here);
  return *reinterpret_cast<const P*>(at);
}
template <typename P, typename T>
void store_shared(T* at, const P& pack, const std::source_location& here = std::source_location::current()) {
  emulation::note(at, sizeof(P), "store", here);
  *reinterpret_cast<P*>(at) = pack;
}

}  // namespace fastfact_cuda

// Begins to count banks; the worst of each access to shared memory since then, a line each.
extern "C" __attribute__((used)) inline void emulation_count_banks() {
  emulation::banks.worst.clear(), emulation::banks.counted = true;
}
extern "C" __attribute__((used)) inline const char* emulation_worst_banks() {
  static std::string text;
  text.clear();
  for (const auto& [where, ways] : emulation::banks.worst) text += where + " " + std::to_string(ways) + "\n";
  emulation::banks.counted = false;
  return text.c_str();
}
// Of 32 lanes with `bytes` each at `at`.
extern "C" __attribute__((used)) inline double emulation_conflicts(const int64_t* at, int64_t bytes) {
  std::vector<emulation::Lane> lanes;
  for (unsigned lane = 0; lane < 32; ++lane) {
    lanes.push_back({lane, static_cast<size_t>(at[lane]), static_cast<size_t>(bytes)});
  }
  return emulation::conflicts(lanes);
}
