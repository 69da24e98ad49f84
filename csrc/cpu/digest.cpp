// A number that tells contents of memory apart.
#include <algorithm>
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

uint64_t digest_piece(const char* at, int64_t bytes, uint64_t seed) {
  uint32_t states[kStates];
  for (int k = 0; k < kStates; ++k) states[k] = static_cast<uint32_t>(seed >> (k & 1 ? 32 : 0)) + 0x85EBCA77u * (k + 1);
  const int64_t whole = bytes / kStripe;
  dispatch<Stripes, float>(at, whole, &states[0]);
  if (bytes % kStripe) {
    char rest[kStripe] = {};
    std::memcpy(rest, at + whole * kStripe, bytes % kStripe);
    dispatch<Stripes, float>(static_cast<const char*>(rest), int64_t{1}, &states[0]);
  }
  constexpr uint64_t key = 0x9E3779B97F4A7C15, other = 0xD1B54A32D192ED03;
  uint64_t out = uint64_t(bytes) ^ seed ^ key;
  for (int k = 0; k < kStates; k += 4) {
    uint64_t pair[2];
    std::memcpy(pair, states + k, sizeof pair);
    out = mix(out ^ pair[0], pair[1] ^ other) + key;
  }
  return out;
}

}  // namespace

uint64_t digest(const void* data, int64_t bytes, uint64_t seed, ParallelFor parallel_for) {
  const auto* at = static_cast<const char*>(data);
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  if (pieces <= 1) return digest_piece(at, bytes, seed);
  std::vector<uint64_t> parts(pieces);
  parallel(parallel_for, pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      parts[k] = digest_piece(at + k * kPiece, std::min(kPiece, bytes - k * kPiece), 0xAEF17502108EF2D9);
    }
  });
  return digest_piece(reinterpret_cast<const char*>(parts.data()), pieces * sizeof(uint64_t), ~seed);
}

}  // namespace fastfact
