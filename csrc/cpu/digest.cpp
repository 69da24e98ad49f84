// A number that tells contents of memory apart.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace fastfact {
namespace {

constexpr int kLanesOfDigest = 8;
constexpr uint64_t kKeys[] = {0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xAEF17502108EF2D9, 0xDB4F0B9175AE2165,
                              0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3};
constexpr int64_t kPiece = 1 << 16;  // bytes; the pieces do not depend on the number of threads

// The two halves of a · b, mixed: changes with every bit of a and b.
inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t load(const char* at) {
  uint64_t out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

uint64_t digest_piece(const char* at, int64_t bytes, uint64_t seed) {
  uint64_t state[kLanesOfDigest];
  for (int k = 0; k < kLanesOfDigest; ++k) state[k] = seed ^ kKeys[k];
  constexpr int64_t step = 2 * sizeof(uint64_t) * kLanesOfDigest;
  auto take = [&](const char* from) {
    for (int k = 0; k < kLanesOfDigest; ++k) {
      state[k] = mix(load(from + 16 * k) ^ kKeys[k], load(from + 16 * k + 8) ^ state[k]);
    }
  };
  int64_t done = 0;
  for (; done + step <= bytes; done += step) take(at + done);
  if (done < bytes) {
    char rest[step] = {};
    std::memcpy(rest, at + done, bytes - done);
    take(rest);
  }
  uint64_t out = uint64_t(bytes) ^ kKeys[0];
  for (int k = 0; k < kLanesOfDigest; ++k) out = mix(out ^ kKeys[1], state[k] ^ kKeys[k]);
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
      parts[k] = digest_piece(at + k * kPiece, std::min(kPiece, bytes - k * kPiece), kKeys[2]);
    }
  });
  return digest_piece(reinterpret_cast<const char*>(parts.data()), pieces * sizeof(uint64_t), seed ^ kKeys[3]);
}

}  // namespace fastfact
