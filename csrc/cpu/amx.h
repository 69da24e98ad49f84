// Products of matrices in bfloat16 by Intel's AMX: eight tiles of 16 rows of 64 bytes. A tile of sums has 16 × 16
// floats, a left operand 16 rows of 32 numbers, a right one 16 pairs (pairs.h) of each of 16 columns.
//
// Floats are multiplied as sums of three numbers of bfloat16, which they are exactly: of the nine products the six
// largest. The others are less than 2⁻²⁵ of the product, half of what rounding it to a float may take. AMX takes
// numbers below 2⁻¹²⁶ for 0, so that floats below 1e-33 lose their last pieces; beyond 3.39e38 they count as infinite,
// and what is infinite may come out as NaN.
#pragma once

#include "pairs.h"

namespace fastfact {

// Rows and columns of a tile of sums, and terms of a product of two tiles.
inline constexpr int64_t kAmxRows = 16, kAmxTerms = 32;

// Whether this machine has it and lets this process use it.
bool has_amx();

#if defined(FF_EMULATE_PAIRS)
inline thread_local uint32_t emulated_tiles[8][16][16];

template <int tile>
FF_INLINE void clear_tile() {
  std::memset(emulated_tiles[tile], 0, sizeof(emulated_tiles[tile]));
}
template <int tile>
FF_INLINE void load_tile(const void* at, int64_t bytes) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(emulated_tiles[tile][row], static_cast<const char*>(at) + row * bytes, 64);
  }
}
template <int tile>
FF_INLINE void store_tile(float* at, int64_t bytes) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(reinterpret_cast<char*>(at) + row * bytes, emulated_tiles[tile][row], 64);
  }
}
template <int sums, int left, int right>
FF_INLINE void multiply_tiles() {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      // Added up by themselves first, as the instruction does.
      float first = 0, second = 0;
      for (int pair = 0; pair < 16; ++pair) {
        const uint32_t a = emulated_tiles[left][row][pair], b = emulated_tiles[right][pair][column];
        first += bit_cast<float>(a << 16) * bit_cast<float>(b << 16);
        second += bit_cast<float>(a & 0xffff0000u) * bit_cast<float>(b & 0xffff0000u);
      }
      const float sum = bit_cast<float>(emulated_tiles[sums][row][column]) + (first + second);
      emulated_tiles[sums][row][column] = bit_cast<uint32_t>(sum);
    }
  }
}
inline void configure_tiles() {}
inline void release_tiles() {}
#elif defined(FF_DISPATCH) && !defined(__clang__)
template <int tile>
FF_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
// `bytes` from one row to the next.
template <int tile>
FF_INLINE void load_tile(const void* at, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(bytes), "i"(tile) : "memory");
}
template <int tile>
FF_INLINE void store_tile(float* at, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(bytes), "i"(tile) : "memory");
}
// sums += left · right
template <int sums, int left, int right>
FF_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(left), "i"(right));
}
inline void configure_tiles() {
  alignas(64) uint8_t configuration[64] = {1};
  for (int tile = 0; tile < 8; ++tile) configuration[16 + 2 * tile] = 64, configuration[48 + tile] = 16;
  asm volatile("ldtilecfg %0" : : "m"(configuration));
}
inline void release_tiles() { asm volatile("tilerelease"); }
#else
template <int tile>
void clear_tile() {}
template <int tile>
void load_tile(const void*, int64_t) {}
template <int tile>
void store_tile(float*, int64_t) {}
template <int sums, int left, int right>
void multiply_tiles() {}
inline void configure_tiles() {}
inline void release_tiles() {}
#endif

// All tiles of the calling thread, for as long as this lives; nothing where they are not used.
class AmxTiles {
 public:
  explicit AmxTiles(bool used) : used_(used) {
    if (used_) configure_tiles();
  }
  ~AmxTiles() {
    if (used_) release_tiles();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  const bool used_;
};

// Up to four tiles of sums, R × N: cleared, loaded, multiplied, stored.
template <int R, int N>
struct AmxSums {
  FF_INLINE static void clear() {
    clear_tile<0>();
    if constexpr (N == 2) clear_tile<1>();
    if constexpr (R == 2) clear_tile<2>();
    if constexpr (R == 2 && N == 2) clear_tile<3>();
  }

  // [rows][step floats]
  FF_INLINE static void load(const float* from, int64_t step) {
    const int64_t bytes = step * int64_t(sizeof(float));
    load_tile<0>(from, bytes);
    if constexpr (N == 2) load_tile<1>(from + kAmxRows, bytes);
    if constexpr (R == 2) load_tile<2>(from + kAmxRows * step, bytes);
    if constexpr (R == 2 && N == 2) load_tile<3>(from + kAmxRows * step + kAmxRows, bytes);
  }
  FF_INLINE static void store(float* to, int64_t step) {
    const int64_t bytes = step * int64_t(sizeof(float));
    store_tile<0>(to, bytes);
    if constexpr (N == 2) store_tile<1>(to + kAmxRows, bytes);
    if constexpr (R == 2) store_tile<2>(to + kAmxRows * step, bytes);
    if constexpr (R == 2 && N == 2) store_tile<3>(to + kAmxRows * step + kAmxRows, bytes);
  }

  // Adds the sums to others, [rows][32].
  FF_INLINE static void add_to(float* to) {
    constexpr int kStep = 2 * kAmxRows;
    alignas(64) float sums[R * kAmxRows * kStep];
    store(sums, kStep);
    for (int m = 0; m < R * kAmxRows * kStep; m += kStep) {
#pragma GCC unroll 2
      for (int k = 0; k < N * kAmxRows; k += kAmxRows) {
        fastfact::store<64>(to + m + k, fastfact::load<64>(to + m + k) + fastfact::load<64>(sums + m + k));
      }
    }
  }

  // sums += left · right, so many blocks of terms. Tiles of `left` are `next_rows` bytes apart, their rows `row` and
  // their blocks `block`; `right` is [pair][32 columns].
  FF_INLINE static void multiply(const char* left, int64_t row, int64_t next_rows, int64_t block, const float* right,
                                 int64_t blocks) {
    constexpr int64_t kColumns = 2 * kAmxRows, kBytes = kColumns * sizeof(float);
    for (; blocks > 0; --blocks, left += block, right += kAmxRows * kColumns) {
      load_tile<4>(left, row);
      load_tile<6>(right, kBytes);
      if constexpr (N == 2) load_tile<7>(right + kAmxRows, kBytes);
      multiply_tiles<0, 4, 6>();
      if constexpr (R == 2) load_tile<5>(left + next_rows, row);
      if constexpr (N == 2) multiply_tiles<1, 4, 7>();
      if constexpr (R == 2) multiply_tiles<2, 5, 6>();
      if constexpr (R == 2 && N == 2) multiply_tiles<3, 5, 7>();
    }
  }

  // The same of floats, both operands in pieces, `piece` bytes apart in `left`, [block][piece][pair][32 columns] in
  // `right`. meanwhile(): done for each block.
  template <class F>
  FF_INLINE static void multiply_pieces(const char* left, int64_t row, int64_t next_rows, int64_t piece, int64_t block,
                                        const float* right, int64_t blocks, const F& meanwhile) {
    constexpr int64_t kStep = kAmxRows * 2 * kAmxRows;
    for (; blocks > 0; --blocks, left += block, right += kPieces * kStep) {
      // A sixth of what comes next is fetched each time.
      auto add = [&](int k) FF_INLINE_LAMBDA {
        multiply_loaded();
        const char* const of_left = left + block + k / 2 * piece + k % 2 * 8 * row;
        const float* const of_right = right + kPieces * kStep + k * kStep / 2;
#pragma GCC unroll 16
        for (int line = 0; line < 16; ++line) {
          // Rows of `left` may begin within a line.
          if (line < 8 * R) __builtin_prefetch(of_left + line / 8 * next_rows + line % 8 * row + 63);
          __builtin_prefetch(of_right + line * kAmxRows);
        }
      };
      load_left(left, row, next_rows);
      load_right(right);
      add(0);
      load_right(right + 2 * kStep);
      add(1);
      load_right(right + kStep);
      add(2);
      load_left(left + piece, row, next_rows);
      add(3);
      load_right(right);
      add(4);
      load_left(left + 2 * piece, row, next_rows);
      add(5);
      meanwhile();
    }
  }

 private:
  FF_INLINE static void load_left(const char* left, int64_t row, int64_t next_rows) {
    load_tile<4>(left, row);
    if constexpr (R == 2) load_tile<5>(left + next_rows, row);
  }
  FF_INLINE static void load_right(const float* right) {
    constexpr int64_t kBytes = 2 * kAmxRows * sizeof(float);
    load_tile<6>(right, kBytes);
    if constexpr (N == 2) load_tile<7>(right + kAmxRows, kBytes);
  }
  FF_INLINE static void multiply_loaded() {
    multiply_tiles<0, 4, 6>();
    if constexpr (N == 2) multiply_tiles<1, 4, 7>();
    if constexpr (R == 2) multiply_tiles<2, 5, 6>();
    if constexpr (R == 2 && N == 2) multiply_tiles<3, 5, 7>();
  }
};

}  // namespace fastfact
