// The subsampled randomized Hadamard transform. H of n = a * b points is the Kronecker product of H_a and H_b: chunks
// of b points that fit the first cache are transformed, and of H_a only the rows that are kept are summed up.
#include <algorithm>
#include <cmath>

#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kChunk = 2048;

template <class T, int B>
struct Transform {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;

  // Lane l becomes x[l] + x[l ^ H], or x[l ^ H] - x[l] where l has the bit H.
  template <int H, int... lane>
  FF_INLINE static V butterfly(V x, std::integer_sequence<int, lane...>) {
    return shuffle<(lane ^ H)...>(x, x) + V{(lane & H ? C(-1) : C(1))...} * x;
  }
  template <int H>
  FF_INLINE static V within(V x) {
    if constexpr (H < L) {
      return within<2 * H>(butterfly<H>(x, std::make_integer_sequence<int, L>{}));
    } else {
      return x;
    }
  }

  FF_INLINE static void transform(C* z, int64_t n) {
    if (n < L) {
      for (int64_t h = 1; h < n; h *= 2) {
        for (int64_t j = 0; j < n; ++j) {
          if (j & h) continue;
          const C a = z[j], b = z[j + h];
          z[j] = a + b, z[j + h] = a - b;
        }
      }
      return;
    }
    for (int64_t j = 0; j < n; j += L) store<B>(z + j, within<1>(load<B>(z + j)));
    int64_t h = L;
    for (; 4 * h <= n; h *= 4) {
      for (int64_t block = 0; block < n; block += 4 * h) {
        for (int64_t j = block; j < block + h; j += L) {
          const V a = load<B>(z + j), b = load<B>(z + j + h), c = load<B>(z + j + 2 * h), d = load<B>(z + j + 3 * h);
          const V ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
          store<B>(z + j, ab + cd);
          store<B>(z + j + h, a_b + c_d);
          store<B>(z + j + 2 * h, ab - cd);
          store<B>(z + j + 3 * h, a_b - c_d);
        }
      }
    }
    for (; 2 * h <= n; h *= 2) {
      for (int64_t block = 0; block < n; block += 2 * h) {
        for (int64_t j = block; j < block + h; j += L) {
          const V a = load<B>(z + j), b = load<B>(z + j + h);
          store<B>(z + j, a + b);
          store<B>(z + j + h, a - b);
        }
      }
    }
  }

  // Items are (client, chunk); `work` holds the chunks of each client from `first` on.
  FF_INLINE static void run(const Srht& op, int64_t first, int64_t chunk, int64_t chunks, C* work, int64_t begin,
                            int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const T* x = static_cast<const T*>(op.x) + (first + item / chunks) * op.n;
      const int64_t at = item % chunks * chunk, count = std::clamp<int64_t>(op.n - at, 0, chunk);
      C* z = work + item * chunk;
      for (int64_t j = 0; j < count; ++j) z[j] = to_compute(x[at + j]) * C(op.signs[at + j]);
      std::fill(z + count, z + chunk, C(0));
      if (count) transform(z, chunk);
    }
  }
};

// The kept rows of each client, quantized where there is a scale. Items are clients.
template <class C>
void keep(const Srht& op, int64_t first, int64_t chunk, int64_t chunks, const C* work, C* kept, int64_t begin,
          int64_t end) {
  const C factor = 1 / std::sqrt(C(op.m));
  for (int64_t item = begin; item < end; ++item) {
    const C* z = work + item * chunk * chunks;
    C* out = op.scale ? kept + item * op.m : static_cast<C*>(op.out) + (first + item) * op.m;
    C largest = 0;
    for (int64_t j = 0; j < op.m; ++j) {
      const int64_t row = op.rows[j] / chunk;
      const C* from = z + op.rows[j] % chunk;
      C sum = 0;
      for (int64_t c = 0; c < chunks; ++c) {
        const C value = from[c * chunk];
        sum += __builtin_parityll(row & c) ? -value : value;
      }
      out[j] = sum * factor;
      largest = std::max(largest, std::abs(out[j]));
    }
    if (op.scale) {
      const float scale = float(largest) / 127;
      const C inverse = scale > 0 ? C(1 / scale) : C(0);
      int8_t* to = static_cast<int8_t*>(op.out) + (first + item) * op.m;
      for (int64_t j = 0; j < op.m; ++j) to[j] = int8_t(std::clamp<C>(std::nearbyint(out[j] * inverse), -127, 127));
      op.scale[first + item] = scale;
    }
  }
}

}  // namespace

void srht(const Srht& op, ParallelFor parallel_for) {
  if (op.clients == 0 || op.m == 0) return;
  with_type(op.type, [&](auto element) {
    using T = decltype(element);
    using C = Compute<T>;
    int64_t n = 1;
    while (n < op.n) n *= 2;
    const int64_t chunk = std::min(n, kChunk), chunks = n / chunk;
    const int64_t batch = std::clamp<int64_t>((1 << 21) / n, 1, op.clients);
    const Scratch<C> work(batch * n), kept(op.scale ? batch * op.m : 0);
    for (int64_t first = 0; first < op.clients; first += batch) {
      const int64_t count = std::min(batch, op.clients - first);
      parallel(parallel_for, count * chunks, ceil_div(1 << 14, chunk), [&](int64_t begin, int64_t end) {
        dispatch<Transform, T>(op, first, chunk, chunks, work.get(), begin, end);
      });
      parallel(parallel_for, count, ceil_div(1 << 14, op.m * chunks),
               [&](int64_t begin, int64_t end) { keep(op, first, chunk, chunks, work.get(), kept.get(), begin, end); });
    }
  });
}

}  // namespace fastfact
