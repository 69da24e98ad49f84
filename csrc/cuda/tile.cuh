// What the kernels on tiles of W share: where the positions of a tile lie, its factors, the order of its elements.
#pragma once
#include "common.cuh"

namespace fastfact_cuda {
namespace {

constexpr int kThreads = 128;

// Rows and columns of a tile.
template <typename T>
constexpr int kTileOf = sizeof(T) == 8 ? 32 : 64;

// The index of each position in its factor (-1 outside), and its offset in W.
template <int kTile, int kBlock = kThreads>
__device__ __forceinline__ void locate(int32_t* index, int64_t* offset, const Axis& axis, uint32_t first,
                                       uint32_t block) {
  for (uint32_t j = threadIdx.x; j < kTile; j += kBlock) {
    const bool inside = j < block && first + j < axis.size;
    index[j] = inside ? static_cast<int32_t>(axis.factor(first + j)) : -1;
    offset[j] = inside ? axis.offset(first + j) : 0;
  }
}

// A factor: element (position, r) at position * row + r * rank.
template <typename T>
struct Operand {
  const T* data;
  int64_t client, row, rank_stride;
  int rank;

  Operand() : data(nullptr), client(0), row(0), rank_stride(0), rank(0) {}
  explicit Operand(const Factor& f)
      : data(static_cast<const T*>(f.data)),
        client(f.client),
        row(f.row),
        rank_stride(f.rank_stride),
        rank(static_cast<int>(f.rank)) {}
};

// The order in which the positions of a tile are visited, so that neighbouring threads touch neighbouring memory:
// `inner` positions of the fast side, then all of the slow side, then the rest of the fast side.
struct Walk {
  bool fast_columns, packed;
  uint32_t block_m, block_n;
  Divisor inner;

  __device__ __forceinline__ void at(uint32_t e, uint32_t tile, uint32_t* m, uint32_t* n) const {
    uint32_t low;
    const uint32_t rest = inner.divide(e, &low);
    // values are chosen, not places to write to, which would be in memory
    const uint32_t slow = rest % tile, fast = rest / tile * inner.d + low;
    *m = fast_columns ? slow : fast;
    *n = fast_columns ? fast : slow;
  }
  __device__ __forceinline__ uint32_t count(uint32_t tile) const { return tile * (fast_columns ? block_n : block_m); }
};

inline bool has_fast_columns(const View& view) { return view.columns.stride0 <= view.rows.stride0; }

// N neighbours in a row of a tile that the lanes of a warp read one beside the other. 32 bytes are read by halves, half
// of the lanes beginning with the second, so that no two meet in a bank.
template <int N>
__device__ __forceinline__ void read_row(float (&x)[N], const float* at) {
  constexpr int kHalf = N < 4 ? N : 4;
  if constexpr (N <= kHalf) {
    const auto pack = load_shared<Pack<float, N>>(at);
#pragma unroll
    for (int l = 0; l < N; ++l) x[l] = pack.x[l];
  } else {
    static_assert(N == 2 * kHalf);
    const bool turned = threadIdx.x & 4;
    const auto first = load_shared<Pack<float, kHalf>>(at + (turned ? kHalf : 0));
    const auto second = load_shared<Pack<float, kHalf>>(at + (turned ? 0 : kHalf));
#pragma unroll
    for (int l = 0; l < kHalf; ++l) {
      x[l] = turned ? second.x[l] : first.x[l];
      x[kHalf + l] = turned ? first.x[l] : second.x[l];
    }
  }
}

template <typename T>
Walk make_walk(const View& view, Slices data) {
  constexpr int64_t kTile = kTileOf<T>;
  Walk w;
  w.fast_columns = has_fast_columns(view);
  const Side& fast = w.fast_columns ? view.columns : view.rows;
  const Side& slow = w.fast_columns ? view.rows : view.columns;
  const int64_t inner = fast.radix < fast.size && fast.radix < 16 ? fast.radix : kTile;
  const int64_t block = kTile / inner * inner;
  w.inner = Divisor(inner);
  w.block_m = static_cast<uint32_t>(w.fast_columns ? kTile : block);
  w.block_n = static_cast<uint32_t>(w.fast_columns ? block : kTile);
  w.packed = inner == kTile && packs(fast, slow, data, kPack<T>, sizeof(T));
  return w;
}

}  // namespace
}  // namespace fastfact_cuda
