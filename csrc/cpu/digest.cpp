// A number that tells contents of memory apart.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace fastfact {
namespace {

constexpr int kStripe = 256;          // bytes, whatever the registers
constexpr int64_t kPiece = 1 << 16;   // bytes; the pieces do not depend on the number of threads
constexpr int kStates = kStripe / 4;  // of 32 bits each

// The two halves of a · b, mixed: changes with every bit of a and b.
inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// state ← f(state ^ numbers) for stripe after stripe, where f is one to one: a change of one number is never lost, and
// the shift brings what the product has in its upper bits to the lower ones, so that changes of signs do not cancel.
template <class, int B>
struct Stripes {
  using V = typename VecOf<uint32_t, B>::Type;

  FF_INLINE static void run(const char* at, int64_t stripes, uint32_t* states) {
    V state[kStripe / B];
    std::memcpy(state, states, kStripe);
    for (int64_t n = 0; n < stripes; ++n, at += kStripe) {
      for (int k = 0; k < kStripe / B; ++k) {
        V numbers;
        std::memcpy(&numbers, at + k * B, B);
        const V product = (state[k] ^ numbers) * 0x9E3779B1u;
        state[k] = product ^ (product >> 15);
      }
    }
    std::memcpy(states, state, kStripe);
  }
};

class Digest {
 public:
  explicit Digest(uint64_t seed) : seed_(seed) {
    for (int k = 0; k < kStates; ++k) states_[k] = uint32_t(seed >> (k & 1 ? 32 : 0)) + 0x85EBCA77u * (k + 1);
  }

  void add(const char* at, int64_t bytes) {
    const int64_t whole = bytes / kStripe;
    if (whole) dispatch<Stripes, float>(at, whole, &states_[0]);
    if (bytes % kStripe) {
      char rest[kStripe] = {};
      std::memcpy(rest, at + whole * kStripe, bytes % kStripe);
      dispatch<Stripes, float>(static_cast<const char*>(rest), int64_t{1}, &states_[0]);
    }
    bytes_ += bytes;
  }

  uint64_t value() const {
    constexpr uint64_t key = 0x9E3779B97F4A7C15, other = 0xD1B54A32D192ED03;
    uint64_t out = bytes_ ^ seed_ ^ key;
    for (int k = 0; k < kStates; k += 4) {
      uint64_t pair[2];
      std::memcpy(pair, states_ + k, sizeof pair);
      out = mix(out ^ pair[0], pair[1] ^ other) + key;
    }
    return out;
  }

 private:
  const uint64_t seed_;
  uint64_t bytes_ = 0;
  uint32_t states_[kStates];
};

uint64_t digest_piece(const char* at, int64_t bytes, uint64_t seed) {
  Digest out(seed);
  out.add(at, bytes);
  return out.value();
}

uint64_t digest_all(const char* at, int64_t bytes, ParallelFor parallel_for) {
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  constexpr uint64_t seed = 0xAEF17502108EF2D9;
  if (pieces <= 1) return digest_piece(at, bytes, seed);
  std::vector<uint64_t> parts(pieces);
  parallel(parallel_for, pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      parts[k] = digest_piece(at + k * kPiece, std::min(kPiece, bytes - k * kPiece), seed);
    }
  });
  return digest_piece(reinterpret_cast<const char*>(parts.data()), pieces * sizeof(uint64_t), ~seed);
}

// Memory that is held, without locks for those who look: they have a tensor there, so that their entry can only come
// or go meanwhile, or be one of other bytes.
struct Held {
  std::atomic<const void*> data{nullptr};
  std::atomic<int64_t> bytes{0};
  std::atomic<uint64_t> digest{0};
  int64_t holders = 0;

  bool is(const void* wanted, int64_t size) const {
    return data.load(std::memory_order_acquire) == wanted && bytes.load(std::memory_order_acquire) == size;
  }
};

constexpr int64_t kLeastHeld = 1 << 12;  // bytes that take longer to read than to be looked up
constexpr int kPlaces = 1 << 14, kTried = 8;
Held held[kPlaces];

template <class F>
Held* find_held(const void* data, int64_t bytes, const F& fits) {
  const uint64_t first = mix(reinterpret_cast<uintptr_t>(data) ^ 0x9E3779B97F4A7C15, bytes ^ 0xD1B54A32D192ED03);
  for (int k = 0; k < kTried; ++k) {
    Held& entry = held[(first + k) % kPlaces];
    if (fits(entry)) return &entry;
  }
  return nullptr;
}

uint64_t digest_of_contents(const void* data, int64_t bytes, ParallelFor parallel_for) {
  const auto same = [&](const Held& entry) { return entry.is(data, bytes); };
  if (const Held* const entry = find_held(data, bytes, same)) {
    const uint64_t found = entry->digest.load(std::memory_order_acquire);
    if (same(*entry)) return found;
  }
  return digest_all(static_cast<const char*>(data), bytes, parallel_for);
}

}  // namespace

uint64_t digest(const void* data, int64_t bytes, uint64_t seed, ParallelFor parallel_for) {
  if (bytes < kLeastHeld) return digest_piece(static_cast<const char*>(data), bytes, seed);
  const uint64_t found = digest_of_contents(data, bytes, parallel_for);
  return mix(found ^ seed, 0x9E3779B97F4A7C15 - seed) + found;
}

uint64_t digest(const Stretch* stretches, int64_t count, uint64_t seed, ParallelFor parallel_for) {
  Digest small(seed);
  uint64_t large = seed;
  for (const Stretch* one = stretches; one < stretches + count; ++one) {
    if (one->bytes < kLeastHeld) {
      small.add(static_cast<const char*>(one->data), one->bytes);
    } else {
      large = digest(one->data, one->bytes, large, parallel_for);
    }
  }
  return mix(small.value() ^ large, 0x9E3779B97F4A7C15 - large) + large;
}

bool hold(const void* data, int64_t bytes, ParallelFor parallel_for) {
  if (bytes < kLeastHeld) return false;
  if (Held* const entry = find_held(data, bytes, [&](const Held& e) { return e.is(data, bytes); })) {
    ++entry->holders;
    return true;
  }
  Held* const entry = find_held(data, bytes, [](const Held& e) { return !e.data.load(std::memory_order_relaxed); });
  if (!entry) return false;
  entry->holders = 1;
  entry->digest.store(digest_all(static_cast<const char*>(data), bytes, parallel_for), std::memory_order_release);
  entry->bytes.store(bytes, std::memory_order_release);
  entry->data.store(data, std::memory_order_release);
  return true;
}

void read_anew(const void* data, int64_t bytes, ParallelFor parallel_for) {
  Held* const entry = find_held(data, bytes, [&](const Held& e) { return e.is(data, bytes); });
  if (entry) {
    entry->digest.store(digest_all(static_cast<const char*>(data), bytes, parallel_for), std::memory_order_release);
  }
}

void release(const void* data, int64_t bytes) {
  Held* const entry = find_held(data, bytes, [&](const Held& e) { return e.is(data, bytes); });
  if (entry && !--entry->holders) entry->data.store(nullptr, std::memory_order_release);
}

}  // namespace fastfact
