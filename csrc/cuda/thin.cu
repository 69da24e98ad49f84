// All gradients of one product of thin factors, or of two multiplied with each other, from one reading of dW: a block
// takes a stripe of tiles of rows through all columns (or each splits-th tile of them). The sums of its rows stay in
// registers; those of a tile of columns are a part for each stripe, and the parts are summed in a fixed order. Each
// product has four warps, and a warp 16 rows of a tile. Columns are the fast side of W, transposed if need be, so that
// packs from memory are packs in shared memory.
#ifndef FASTFACT_EMULATED
#include <mma.h>
#endif

#include <utility>

#include "tile.cuh"

namespace fastfact_cuda {
namespace {

namespace wmma = nvcuda::wmma;

// A warp's 16 × kWidth sums over k of a[row][k] b[k][column]; with kFlipA a lies as [k][row], with kFlipB b as
// [column][k]. Half precision on the tensor cores.
template <typename T, int kWidth, bool kFlipA, bool kFlipB>
struct Sums {
  using LayoutA = std::conditional_t<kFlipA, wmma::col_major, wmma::row_major>;
  using LayoutB = std::conditional_t<kFlipB, wmma::col_major, wmma::row_major>;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[kWidth / 16];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c) wmma::fill_fragment(sum[c], 0.0f);
  }
  // The next 16 of k.
  __device__ __forceinline__ void add(const T* a, int a_lead, const T* b, int b_lead) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> right;
    wmma::load_matrix_sync(left, a, a_lead);
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c) {
      wmma::load_matrix_sync(right, b + 16 * c * (kFlipB ? b_lead : 1), b_lead);
      wmma::mma_sync(sum[c], left, right, sum[c]);
    }
  }
  __device__ __forceinline__ void store(float* out, int lead) const {
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c) wmma::store_matrix_sync(out + 16 * c, sum[c], lead, wmma::mem_row_major);
  }
};

// float in registers, 4 rows × 2 columns a thread, numbered so that 16 bytes are read at once and from different banks.
template <int kWidth, bool kFlipA, bool kFlipB>
struct Sums<float, kWidth, kFlipA, kFlipB> {
  float sum[kWidth / 16][4][2];

  static __device__ __forceinline__ int row(int i) {
    const int lane = threadIdx.x % 32 / 8;
    return kFlipA ? 4 * lane + i : lane + 4 * i;
  }
  static __device__ __forceinline__ int column(int j) {
    const int lane = threadIdx.x % 8;
    return kFlipB ? lane + 8 * j : 2 * lane + j;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[c][i][0] = sum[c][i][1] = 0;
  }
  __device__ __forceinline__ void add(const float* a, int a_lead, const float* b, int b_lead) {
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
      Pack<float, 4> left[4];  // of each row, or, flipped, of each k
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* at = kFlipA ? a + (k + i) * a_lead + row(0) : a + row(i) * a_lead + k;
        left[i] = *reinterpret_cast<const Pack<float, 4>*>(at);
      }
#pragma unroll
      for (int c = 0; c < kWidth / 16; ++c) {
        float right[4][2];
#pragma unroll
        for (int j = 0; j < (kFlipB ? 2 : 4); ++j) {
          if constexpr (kFlipB) {
            const auto pack = *reinterpret_cast<const Pack<float, 4>*>(b + (16 * c + column(j)) * b_lead + k);
#pragma unroll
            for (int l = 0; l < 4; ++l) right[l][j] = pack.x[l];
          } else {
            const auto pack = *reinterpret_cast<const Pack<float, 2>*>(b + (k + j) * b_lead + 16 * c + column(0));
            right[j][0] = pack.x[0];
            right[j][1] = pack.x[1];
          }
        }
#pragma unroll
        for (int l = 0; l < 4; ++l)
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) sum[c][i][j] += (kFlipA ? left[l].x[i] : left[i].x[l]) * right[l][j];
      }
    }
  }
  __device__ __forceinline__ void store(float* out, int lead) const {
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) out[row(i) * lead + 16 * c + column(j)] = sum[c][i][j];
  }
};

template <typename T>
struct Gradients {
  Operand<T> m_factor, n_factor;
  T *m_out, *n_out;
  float *m_parts, *n_parts;  // null where there is one part
};

template <typename T, int kProducts>
struct Thin {
  const T* grad;
  int64_t grad_client;
  Gradients<T> product[kProducts];
  float scaling, plus;
  Axis m, n;
  Walk walk;
  uint32_t stripes, splits;
};

constexpr int kTile = 64;
// Tiles of rows in a stripe.
constexpr int kStripe = 4, kRows = kStripe * kTile;

// Of sums on their way out.
template <int kWidth>
constexpr int kLeadSumsOf = kWidth + 4;

template <typename T, int kWidth, int kProducts>
struct ThinShared {
  static constexpr int kLead = kTile + 8, kLeadThin = kWidth + 16 / sizeof(T);
  static constexpr int kLeadOut = kTile + 8, kLeadSums = kLeadSumsOf<kWidth>;
  static constexpr bool kTwo = kProducts == 2, kInPlace = kTwo && sizeof(T) == 4;
  int64_t m_offset[kRows], n_offset[2][kTile];
  int32_t m_index[kRows], n_index[2][kTile];
  // the tiles of the products themselves, and sums on their way out
  alignas(32) float out[kTwo ? 2 * kTile * kLeadOut : kTile * kLeadSums];
  // dW, times the other product where there are two: float over the products
  alignas(32) T own[kInPlace ? 1 : kProducts * kTile * kLead];
  alignas(32) T m_factor[kProducts][kRows * kLeadThin];
  alignas(32) T n_factor[kProducts][kTile * kLeadThin];

  __device__ __forceinline__ T* a(int product) {
    if constexpr (kInPlace) {
      return out + (1 - product) * kTile * kLead;
    } else {
      return own + product * kTile * kLead;
    }
  }
};

// The element of a thin operand that comes at e: neighbours in memory first. Where these are positions they come by
// eights, for four of c, which lie in different banks.
template <int kWidth, int kPositions, typename T>
__device__ __forceinline__ void order_thin(int e, const Operand<T>& x, int* position, int* c) {
  if (x.rank_stride == 1) {
    *position = e / kWidth;
    *c = e % kWidth;
  } else {
    *position = e / 32 % (kPositions / 8) * 8 + e % 8;
    *c = e / (4 * kPositions) * 4 + e / 8 % 4;
  }
}

// shared[position][c] for c below kWidth, zero outside.
template <typename T, int kWidth, int kPositions>
__device__ __forceinline__ void load_thin(T* shared, int lead, const Operand<T>& x, int64_t client,
                                          const int32_t* index) {
  const T* data = x.data + client * x.client;
  for (int e = threadIdx.x % kThreads; e < kPositions * kWidth; e += kThreads) {
    int position, c;
    order_thin<kWidth, kPositions>(e, x, &position, &c);
    const bool inside = index[position] >= 0 && c < x.rank;
    store_shared(shared + position * lead + c,
                 inside ? data[index[position] * x.row + c * x.rank_stride] : convert<T>(0.0f));
  }
}

// What the warps hold of a tile of positions, to its place in the gradient or in its part.
template <typename T, int kWidth, typename Held>
__device__ __forceinline__ void write_thin(const Held& sums, float* staged, const int32_t* index, const Operand<T>& x,
                                           T* out, float* part, float scaling) {
  constexpr int kLead = kLeadSumsOf<kWidth>;
  __syncthreads();
  sums.store(staged + threadIdx.x % kThreads / 32 * 16 * kLead, kLead);
  __syncthreads();
  for (int e = threadIdx.x % kThreads; e < kTile * kWidth; e += kThreads) {
    int position, c;
    order_thin<kWidth, kTile>(e, x, &position, &c);
    if (index[position] < 0 || c >= x.rank) continue;
    const float value = scaling * load_shared<float>(staged + position * kLead + c);
    const int64_t at = index[position] * x.row + c * x.rank_stride;
    if (part) {
      part[at] = value;
    } else {
      out[at] = convert<T>(value);
    }
  }
  __syncthreads();
}

// A tile of dW on its way to shared memory: read into registers while the one before is multiplied, where it lies in
// packs of 16 bytes.
template <typename T, int kBlock>
struct Arriving {
  static constexpr int N = kPack<T>, kCount = kTile * kTile / (kBlock * N);
  Pack<T, N> packs[kCount];

  __device__ __forceinline__ void fetch(const Walk& walk, const T* grad, const int32_t* m_index,
                                        const int64_t* m_offset, const int32_t* n_index, const int64_t* n_offset) {
    if (!walk.packed) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      uint32_t m, n;
      walk.at((threadIdx.x + j * kBlock) * N, kTile, &m, &n);
      if (m_index[m] >= 0 && n_index[n] >= 0) {
        packs[j] = *reinterpret_cast<const Pack<T, N>*>(grad + m_offset[m] + n_offset[n]);
      } else {
#pragma unroll
        for (int l = 0; l < N; ++l) packs[j].x[l] = convert<T>(0.0f);
      }
    }
  }
  // put(m, n, pack of dW from [m, n] on, whether inside W) for all of the tile, outside with zeros.
  template <typename Put>
  __device__ __forceinline__ void deliver(const Walk& walk, const T* grad, const int32_t* m_index,
                                          const int64_t* m_offset, const int32_t* n_index, const int64_t* n_offset,
                                          Put&& put) {
    if (walk.packed) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        uint32_t m, n;
        walk.at((threadIdx.x + j * kBlock) * N, kTile, &m, &n);
        put(m, n, packs[j], m_index[m] >= 0 && n_index[n] >= 0);
      }
      return;
    }
    // positions past the block, which the walk leaves out
    for (int e = threadIdx.x; e < kTile * kTile; e += kBlock) {
      const uint32_t m = e / kTile, n = e % kTile;
      if (m >= walk.block_m || n >= walk.block_n) put(m, n, Pack<T, 1>{convert<T>(0.0f)}, false);
    }
    for (uint32_t e = threadIdx.x; e < walk.count(kTile); e += kBlock) {
      uint32_t m, n;
      walk.at(e, kTile, &m, &n);
      const bool inside = m_index[m] >= 0 && n_index[n] >= 0;
      put(m, n, Pack<T, 1>{inside ? grad[m_offset[m] + n_offset[n]] : convert<T>(0.0f)}, inside);
    }
  }
};

// a1 = dW (second + plus) and a2 = dW first; where they are float, a1 may be `second` and a2 `first`.
template <typename T, int N>
__device__ __forceinline__ void multiply_into(T* a1, T* a2, const float* first, const float* second, float plus,
                                              const Pack<T, N>& pack, bool inside) {
  float product[N];
  Pack<T, N> g;
  read_row(product, first);
  // zero times a product that overflowed is not zero
#pragma unroll
  for (int l = 0; l < N; ++l) g.x[l] = convert<T>(inside ? convert<float>(pack.x[l]) * product[l] : 0.0f);
  store_shared(a2, g);
  read_row(product, second);
#pragma unroll
  for (int l = 0; l < N; ++l) g.x[l] = convert<T>(inside ? convert<float>(pack.x[l]) * (product[l] + plus) : 0.0f);
  store_shared(a1, g);
}

// Blocks for which a multiprocessor must have registers.
constexpr int blocks(size_t type_size, int width, int products) {
  return products == 1 || (type_size == 2 && width == 16) ? 2 : 1;
}

template <typename T, int kWidth, int kProducts>
__global__ void __launch_bounds__(kThreads* kProducts, blocks(sizeof(T), kWidth, kProducts))
    thin_kernel(const __grid_constant__ Thin<T, kProducts> p) {
  using S = ThinShared<T, kWidth, kProducts>;
  constexpr int kBlock = kThreads * kProducts;
  constexpr int kLead = S::kLead, kLeadThin = S::kLeadThin, kLeadOut = S::kLeadOut;
  S& s = *reinterpret_cast<S*>(dynamic_shared());
  const uint32_t stripe = blockIdx.x % p.stripes, split = blockIdx.x / p.stripes % p.splits;
  const int64_t client = blockIdx.x / p.stripes / p.splits;
  const T* grad = p.grad + client * p.grad_client;
  const uint32_t step = p.splits * p.walk.block_n, left = p.m.size - stripe * kStripe * p.walk.block_m;
  const int tiles = min(static_cast<uint32_t>(kStripe), (left + p.walk.block_m - 1) / p.walk.block_m);
  const int mine = S::kTwo ? threadIdx.x / kThreads : 0, row = threadIdx.x % kThreads / 32 * 16;
  const Gradients<T>& to = p.product[mine];
  T *const m_factor = s.m_factor[mine], *const n_factor = s.n_factor[mine];
  float* const staged = s.out + mine * kTile * S::kLeadSums;

  for (int t = 0; t < kStripe; ++t) {
    locate<kTile, kBlock>(s.m_index + t * kTile, s.m_offset + t * kTile, p.m, (stripe * kStripe + t) * p.walk.block_m,
                          p.walk.block_m);
  }
  uint32_t n0 = split * p.walk.block_n;
  locate<kTile, kBlock>(s.n_index[0], s.n_offset[0], p.n, n0, p.walk.block_n);
  __syncthreads();
  load_thin<T, kWidth, kRows>(m_factor, kLeadThin, to.m_factor, client, s.m_index);
  Sums<T, kWidth, false, false> m_sum[kStripe];
  Sums<T, kWidth, true, false> n_sum;
#pragma unroll
  for (int t = 0; t < kStripe; ++t) m_sum[t].clear();
  Arriving<T, kBlock> tile;
  tile.fetch(p.walk, grad, s.m_index, s.m_offset, s.n_index[0], s.n_offset[0]);

  for (int turn = 0; n0 < p.n.size; n0 += step, turn ^= 1) {
    const int32_t* n_index = s.n_index[turn];
    const int64_t* n_offset = s.n_offset[turn];
    load_thin<T, kWidth, kTile>(n_factor, kLeadThin, to.n_factor, client, n_index);
    locate<kTile, kBlock>(s.n_index[turn ^ 1], s.n_offset[turn ^ 1], p.n, n0 + step, p.walk.block_n);
    n_sum.clear();
#pragma unroll
    for (int t = 0; t < kStripe; ++t) {
      if (t >= tiles) break;
      const int32_t* m_index = s.m_index + t * kTile;
      __syncthreads();
      if constexpr (S::kTwo) {
        Sums<T, kTile, false, true> product;
        product.clear();
#pragma unroll
        for (int k = 0; k < kWidth; k += 16) {
          product.add(m_factor + (t * kTile + row) * kLeadThin + k, kLeadThin, n_factor + k, kLeadThin);
        }
        product.store(s.out + (mine * kTile + row) * kLeadOut, kLeadOut);
        __syncthreads();
      }
      tile.deliver(p.walk, grad, m_index, s.m_offset + t * kTile, n_index, n_offset,
                   [&](uint32_t m, uint32_t n, const auto& pack, bool inside) {
                     if constexpr (S::kTwo) {
                       multiply_into<T>(s.a(0) + m * kLead + n, s.a(1) + m * kLead + n, s.out + m * kLeadOut + n,
                                        s.out + (kTile + m) * kLeadOut + n, p.plus, pack, inside);
                     } else {
                       store_shared(s.a(0) + m * kLead + n, pack);
                     }
                   });
      if (t + 1 < tiles) {
        tile.fetch(p.walk, grad, m_index + kTile, s.m_offset + (t + 1) * kTile, n_index, n_offset);
      } else {
        tile.fetch(p.walk, grad, s.m_index, s.m_offset, s.n_index[turn ^ 1], s.n_offset[turn ^ 1]);
      }
      __syncthreads();
      const T* a = s.a(mine);
#pragma unroll
      for (int k = 0; k < kTile; k += 16) {
        m_sum[t].add(a + row * kLead + k, kLead, n_factor + k * kLeadThin, kLeadThin);
        n_sum.add(a + k * kLead + row, kLead, m_factor + (t * kTile + k) * kLeadThin, kLeadThin);
      }
    }
    const int64_t size = static_cast<int64_t>(p.n.size) * to.n_factor.rank, part = client * p.stripes + stripe;
    write_thin<T, kWidth>(n_sum, staged, n_index, to.n_factor, to.n_out + client * size,
                          to.n_parts ? to.n_parts + part * size : nullptr, p.scaling);
  }
  const int64_t size = static_cast<int64_t>(p.m.size) * to.m_factor.rank, part = client * p.splits + split;
#pragma unroll
  for (int t = 0; t < kStripe; ++t) {
    write_thin<T, kWidth>(m_sum[t], staged, s.m_index + t * kTile, to.m_factor, to.m_out + client * size,
                          to.m_parts ? to.m_parts + part * size : nullptr, p.scaling);
  }
}

// W and its products with columns as the fast side, transposed if need be.
struct Oriented {
  View view;
  Outer products[2];

  Oriented(const View& from, const Outer* some, int count) : view(from) {
    for (int q = 0; q < count; ++q) products[q] = some[q];
    if (has_fast_columns(from)) return;
    std::swap(view.rows, view.columns);
    for (int q = 0; q < count; ++q) {
      std::swap(products[q].m, products[q].n);
      std::swap(products[q].m_out, products[q].n_out);
    }
  }
};

int64_t widest(const Outer* products, int count) {
  int64_t rank = 0;
  for (int q = 0; q < count; ++q) rank = products[q].m.rank > rank ? products[q].m.rank : rank;
  return rank;
}

// The stripes of rows, and the splits of columns that fill a large GPU without going below four tiles each.
struct Grid {
  int64_t stripes, splits;
};
Grid make_grid(const Walk& walk, const View& view, int64_t clients) {
  const int64_t stripes = ceil_div(view.rows.size, kStripe * walk.block_m), most = view.columns.size / (4 * kTile);
  const int64_t wanted = ceil_div(264, clients * stripes);
  return {stripes, most < 1 ? 1 : (wanted < most ? wanted : most)};
}

template <typename T, int kWidth, int kProducts>
int run(const Outer* products, Slices grad, double scaling, double plus, const View& view, void* workspace,
        int64_t clients, void* stream) {
  Thin<T, kProducts> p;
  p.grad = static_cast<const T*>(grad.data);
  p.grad_client = grad.client;
  p.scaling = static_cast<float>(scaling);
  p.plus = static_cast<float>(plus);
  p.m = Axis(view.rows);
  p.n = Axis(view.columns);
  p.walk = make_walk<T>(view, grad);
  const Grid grid = make_grid(p.walk, view, clients);
  p.stripes = static_cast<uint32_t>(grid.stripes);
  p.splits = static_cast<uint32_t>(grid.splits);
  float* parts = static_cast<float*>(workspace);
  const auto take = [&](int64_t count, int64_t size) {
    float* const taken = count > 1 ? parts : nullptr;
    parts += count > 1 ? clients * count * size : 0;
    return taken;
  };
  for (int q = 0; q < kProducts; ++q) {
    Gradients<T>& to = p.product[q];
    to.m_factor = Operand<T>(products[q].m);
    to.n_factor = Operand<T>(products[q].n);
    to.m_out = static_cast<T*>(products[q].m_out);
    to.n_out = static_cast<T*>(products[q].n_out);
    to.m_parts = take(grid.splits, view.rows.size * products[q].m.rank);
    to.n_parts = take(grid.stripes, view.columns.size * products[q].n.rank);
  }
  constexpr size_t kShared = sizeof(ThinShared<T, kWidth, kProducts>);
  if (const int error = allow_shared(thin_kernel<T, kWidth, kProducts>, kShared)) return error;
  int error = launch(thin_kernel<T, kWidth, kProducts>, clients * grid.splits * grid.stripes, kThreads * kProducts,
                     kShared, stream, p);
  for (const Gradients<T>& to : p.product) {
    Parts<T> of_m{}, of_n{};
    if (to.m_parts) of_m = {to.m_parts, to.m_out, grid.splits, view.rows.size * to.m_factor.rank};
    if (to.n_parts) of_n = {to.n_parts, to.n_out, grid.stripes, view.columns.size * to.n_factor.rank};
    if (!error) error = reduce_parts<T>(of_m, of_n, clients, stream);
  }
  return error;
}

}  // namespace

bool thin_pays(Type type, int64_t rank, int count) {
  if (type == kDouble || rank > 32) return false;
  size_t bytes = 0;
  with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool narrow = rank <= 16;
    bytes = count == 1 ? (narrow ? sizeof(ThinShared<T, 16, 1>) : sizeof(ThinShared<T, 32, 1>))
                       : (narrow ? sizeof(ThinShared<T, 16, 2>) : sizeof(ThinShared<T, 32, 2>));
    return cudaSuccess;
  });
  return bytes <= most_shared();
}

int64_t thin_workspace(Type type, Slices grad, const View& view, const Outer* products, int count, int64_t clients) {
  const Oriented w(view, products, count);
  int64_t floats = 0;
  with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    const Grid grid = make_grid(make_walk<T>(w.view, grad), w.view, clients);
    for (int q = 0; q < count; ++q) {
      if (grid.splits > 1) floats += grid.splits * w.view.rows.size * w.products[q].m.rank;
      if (grid.stripes > 1) floats += grid.stripes * w.view.columns.size * w.products[q].n.rank;
    }
    return cudaSuccess;
  });
  return 4 * floats * clients;
}

int thin_backward(Type type, Slices grad, const Outer* products, int count, double scaling, double plus,
                  const View& view, void* workspace, int64_t clients, void* stream) {
  const Oriented w(view, products, count);
  const int64_t rank = widest(products, count);
  if (view.rows.size >= kLimit || view.columns.size >= kLimit || rank > 32) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    if constexpr (sizeof(T) == 8) {
      return cudaErrorInvalidValue;
    } else {
      const auto kernel =
          count == 1 ? (rank <= 16 ? run<T, 16, 1> : run<T, 32, 1>) : (rank <= 16 ? run<T, 16, 2> : run<T, 32, 2>);
      return kernel(w.products, grad, scaling, plus, w.view, workspace, clients, stream);
    }
  });
}

}  // namespace fastfact_cuda
