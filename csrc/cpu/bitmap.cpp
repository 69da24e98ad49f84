// The nonzeros of a matrix as a bitmap and values, and back. Work is cut into chunks of rows, first counted, then
// written, so that threads know where their values begin.
#include <algorithm>

#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kChunk = 8192;  // a multiple of 64

struct Chunk {
  int64_t row, first, n;  // elements [first, first + n) of the row
};

Chunk chunk_of(int64_t item, int64_t n) {
  const int64_t chunks = bitmap_chunks(n), first = item % chunks * kChunk;
  return {item / chunks, first, std::min(kChunk, n - first)};
}

// 64 bits from p of which `n` exist; those beyond are cleared.
FF_INLINE uint64_t bits_at(const uint8_t* p, int64_t n) {
  uint64_t word = 0;
  std::memcpy(&word, p, std::min<int64_t>(8, ceil_div(n, 8)));
  return n < 64 ? word & ((uint64_t(1) << n) - 1) : word;
}

void running_sums(int64_t* offsets, int64_t items) {
  int64_t sum = 0;
  for (int64_t item = 0; item <= items; ++item) {
    const int64_t count = item < items ? offsets[item] : 0;
    offsets[item] = sum;
    sum += count;
  }
}

template <class T, int B>
struct PackBits {
  static constexpr int L = kLanes<T, B>;

  // Items are chunks; offsets [item] becomes the number of nonzeros in the chunk.
  FF_INLINE static void run(const T* x, int64_t n, uint8_t* bits, int64_t* offsets, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Chunk c = chunk_of(item, n);
      const T* from = x + c.row * n + c.first;
      uint8_t* to = bits + c.row * ceil_div(n, 8) + c.first / 8;
      int64_t count = 0;
      for (int64_t j = 0; j < c.n; j += 64) {
        alignas(64) int8_t nonzero[64] = {};
        const int64_t m = std::min<int64_t>(64, c.n - j);
        int64_t l = 0;
        for (; l + L <= m; l += L) {
          const auto some = __builtin_convertvector(load<B>(from + j + l) != 0, typename VecOf<int8_t, L>::Type);
          std::memcpy(nonzero + l, &some, L);
        }
        for (; l < m; ++l) nonzero[l] = to_compute(from[j + l]) != 0 ? -1 : 0;
        uint8_t bytes[8];
        for (int byte = 0; byte < 8; ++byte) {
          uint64_t eight;
          std::memcpy(&eight, nonzero + 8 * byte, 8);
          // The product moves bit 8·j to bit 56 + j.
          bytes[byte] = ((eight & 0x0101010101010101u) * 0x0102040810204080u) >> 56;
        }
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        count += __builtin_popcountll(word);
        std::memcpy(to + j / 8, bytes, ceil_div(m, 8));
      }
      offsets[item] = count;
    }
  }
};

template <class T, int B>
struct MaxMagnitude {
  // The bits of the largest |x| of each chunk as a float; among bits NaN is the largest.
  FF_INLINE static void run(const T* x, int64_t n, uint32_t* largest, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Chunk c = chunk_of(item, n);
      const T* from = x + c.row * n + c.first;
      uint32_t most = 0;
      for (int64_t j = 0; j < c.n; ++j) {
        most = std::max(most, bit_cast<uint32_t>(float(to_compute(from[j]))) & 0x7fffffffu);
      }
      largest[item] = most;
    }
  }
};

int8_t quantize(float x) {
  constexpr float magic = 12582912.0f;  // 1.5·2²³: adding it rounds to an integer, ties to even
  return x != x ? 0 : int8_t(std::clamp(x, -127.0f, 127.0f) + magic - magic);
}

template <class T, class V>
void write_values(const T* x, int64_t n, const uint8_t* bits, const int64_t* offsets, V* values, const float* scale,
                  int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const Chunk c = chunk_of(item, n);
    const T* from = x + c.row * n + c.first;
    const uint8_t* mask = bits + c.row * ceil_div(n, 8) + c.first / 8;
    V* to = values + offsets[item];
    const float inverse = scale && scale[c.row] > 0 ? 1 / scale[c.row] : 0;
    for (int64_t j = 0; j < c.n; j += 64) {
      for (uint64_t word = bits_at(mask + j / 8, c.n - j); word; word &= word - 1) {
        const float value = float(to_compute(from[j + __builtin_ctzll(word)]));
        if constexpr (std::is_same_v<V, int8_t>) {
          *to++ = quantize(value * inverse);
        } else {
          *to++ = from_compute<V>(value);
        }
      }
    }
  }
}

template <class V>
void read_values(const uint8_t* bits, const int64_t* offsets, int64_t n, const V* values, const float* scale, float* x,
                 int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const Chunk c = chunk_of(item, n);
    const uint8_t* mask = bits + c.row * ceil_div(n, 8) + c.first / 8;
    const V* from = values + offsets[item];
    float* to = x + c.row * n + c.first;
    const float factor = scale ? scale[c.row] : 1;
    std::fill(to, to + c.n, 0 * factor);
    for (int64_t j = 0; j < c.n; j += 64) {
      for (uint64_t word = bits_at(mask + j / 8, c.n - j); word; word &= word - 1) {
        float value;
        if constexpr (std::is_same_v<V, int8_t>) {
          value = *from++;
        } else {
          value = to_compute(*from++);
        }
        to[j + __builtin_ctzll(word)] = value * factor;
      }
    }
  }
}

int64_t grain(int64_t n) { return ceil_div(16384, std::max<int64_t>(1, std::min(n, kChunk))); }

template <class F>
void with_value(Value value, const F& f) {
  switch (value) {
    case Value::f32:
      return f(float{});
    case Value::bf16:
      return f(BFloat16{});
    case Value::i8:
      return f(int8_t{});
  }
}

}  // namespace

int64_t bitmap_chunks(int64_t n) { return ceil_div(n, kChunk); }

void pack_bits(Type type, const void* x, int64_t rows, int64_t n, uint8_t* bits, int64_t* offsets,
               ParallelFor parallel_for) {
  const int64_t items = rows * bitmap_chunks(n);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    parallel(parallel_for, items, grain(n), [&](int64_t begin, int64_t end) {
      dispatch<PackBits, T>(static_cast<const T*>(x), n, bits, offsets, begin, end);
    });
  });
  running_sums(offsets, items);
}

void pack_values(Type type, const void* x, int64_t rows, int64_t n, const uint8_t* bits, const int64_t* offsets,
                 Value value, void* values, float* scale, ParallelFor parallel_for) {
  const int64_t chunks = bitmap_chunks(n), items = rows * chunks;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const T* from = static_cast<const T*>(x);
    if (value == Value::i8) {
      const Scratch<uint32_t> largest(items);
      parallel(parallel_for, items, grain(n),
               [&](int64_t begin, int64_t end) { dispatch<MaxMagnitude, T>(from, n, largest.get(), begin, end); });
      for (int64_t row = 0; row < rows; ++row) {
        const uint32_t* first = largest.get() + row * chunks;
        scale[row] = chunks ? bit_cast<float>(*std::max_element(first, first + chunks)) / 127 : 0;
      }
    }
    with_value(value, [&](auto v) {
      using V = decltype(v);
      parallel(parallel_for, items, grain(n), [&](int64_t begin, int64_t end) {
        write_values(from, n, bits, offsets, static_cast<V*>(values), scale, begin, end);
      });
    });
  });
}

void count_bits(const uint8_t* bits, int64_t rows, int64_t n, int64_t* offsets, ParallelFor parallel_for) {
  const int64_t items = rows * bitmap_chunks(n);
  parallel(parallel_for, items, 8 * grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Chunk c = chunk_of(item, n);
      const uint8_t* mask = bits + c.row * ceil_div(n, 8) + c.first / 8;
      int64_t count = 0;
      for (int64_t j = 0; j < c.n; j += 64) count += __builtin_popcountll(bits_at(mask + j / 8, c.n - j));
      offsets[item] = count;
    }
  });
  running_sums(offsets, items);
}

void unpack_values(const uint8_t* bits, const int64_t* offsets, int64_t rows, int64_t n, Value value,
                   const void* values, const float* scale, float* x, ParallelFor parallel_for) {
  with_value(value, [&](auto v) {
    using V = decltype(v);
    parallel(parallel_for, rows * bitmap_chunks(n), grain(n), [&](int64_t begin, int64_t end) {
      read_values(bits, offsets, n, static_cast<const V*>(values), scale, x, begin, end);
    });
  });
}

}  // namespace fastfact
