// The weights that are matrix products, in tiles with the epilogue into W's own order, and their gradients.
// Half precision multiplies on the tensor cores (wmma), float and double in registers, exactly.
#ifndef FASTFACT_EMULATED
#include <mma.h>
#endif

#include <utility>

#include "tile.cuh"

namespace fastfact_cuda {
namespace {

namespace wmma = nvcuda::wmma;

// A tile of sums over r of a[row, r] b[column, r]; a and b lie in shared memory as [kTile][kLead], r last, or turned, r
// first: `place` says where. Operands are turned where that lets neighbouring threads write neighbouring memory; float
// and double have an odd lead instead.
template <typename T>
struct Tile {
  using A = Acc<T>;
  static constexpr int kTile = kTileOf<T>, kLead = kTile + 1, kLeadOut = kLead;
  static constexpr int kRows = kTile / 8, kColumns = kTile / 16;
  // the sums can be written over a
  static constexpr bool kInPlace = true, kTurns = false;
  A sum[kRows][kColumns];

  static __device__ __forceinline__ int place(int position, int r, bool) { return position * kLead + r; }
  static __device__ __forceinline__ int place_out(int row, int column, bool) { return row * kLeadOut + column; }

  __device__ __forceinline__ void clear() {
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kColumns; ++j) sum[i][j] = 0;
  }
  __device__ __forceinline__ void multiply(const T* a, bool, const T* b, bool, int extent) {
    const int row = threadIdx.x / 16 * kRows, column = threadIdx.x % 16;
    for (int r = 0; r < extent; ++r) {
      A left[kRows], right[kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) left[i] = a[(row + i) * kLead + r];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) right[j] = b[(column + 16 * j) * kLead + r];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[i][j] += left[i] * right[j];
    }
  }
  __device__ __forceinline__ void combine(const Tile& other, A plus) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[i][j] *= other.sum[i][j] + plus;
  }
  __device__ __forceinline__ void store(A* out, bool) const {
    const int row = threadIdx.x / 16 * kRows, column = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) out[(row + i) * kLeadOut + column + 16 * j] = sum[i][j];
  }
};

// Four warps, each a quarter of the tile in 2 × 2 fragments.
template <typename T>
struct TensorCoreTile {
  using A = float;
  static constexpr int kTile = 64, kLead = kTile + 8, kLeadOut = kTile + 8;
  static constexpr bool kInPlace = false, kTurns = true;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];

  static __device__ __forceinline__ int place(int position, int r, bool turned) {
    return turned ? r * kLead + position : position * kLead + r;
  }
  static __device__ __forceinline__ int place_out(int row, int column, bool turned) {
    return turned ? column * kLeadOut + row : row * kLeadOut + column;
  }
  __device__ __forceinline__ void clear() {
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) wmma::fill_fragment(sum[i][j], 0.0f);
  }
  template <bool kTurnedA, bool kTurnedB>
  __device__ __forceinline__ void multiply(const T* a, const T* b, int extent) {
    const int row = threadIdx.x / 64 * 32, column = threadIdx.x / 32 % 2 * 32;
    using LayoutA = std::conditional_t<kTurnedA, wmma::col_major, wmma::row_major>;
    using LayoutB = std::conditional_t<kTurnedB, wmma::row_major, wmma::col_major>;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> left[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> right[2];
    for (int r = 0; r < extent; r += 16) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        wmma::load_matrix_sync(left[i], a + place(row + 16 * i, r, kTurnedA), kLead);
        wmma::load_matrix_sync(right[i], b + place(column + 16 * i, r, kTurnedB), kLead);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], left[i], right[j], sum[i][j]);
    }
  }
  __device__ __forceinline__ void multiply(const T* a, bool turned_a, const T* b, bool turned_b, int extent) {
    if (turned_a) {
      turned_b ? multiply<true, true>(a, b, extent) : multiply<true, false>(a, b, extent);
    } else {
      turned_b ? multiply<false, true>(a, b, extent) : multiply<false, false>(a, b, extent);
    }
  }
  __device__ __forceinline__ void combine(const TensorCoreTile& other, float plus) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        for (int l = 0; l < sum[i][j].num_elements; ++l) sum[i][j].x[l] *= other.sum[i][j].x[l] + plus;
  }
  __device__ __forceinline__ void store(float* out, bool turned) const {
    const int row = threadIdx.x / 64 * 32, column = threadIdx.x / 32 % 2 * 32;
    const auto layout = turned ? wmma::mem_col_major : wmma::mem_row_major;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        wmma::store_matrix_sync(out + place_out(row + 16 * i, column + 16 * j, turned), sum[i][j], kLeadOut, layout);
      }
  }
};
template <>
struct Tile<__nv_bfloat16> : TensorCoreTile<__nv_bfloat16> {};
template <>
struct Tile<__half> : TensorCoreTile<__half> {};

// Where the positions of a tile lie: the index of each in its factor (-1 outside), and its offset in W.
template <int kTile>
struct Positions {
  int32_t m_index[kTile], n_index[kTile];
  int64_t m_offset[kTile], n_offset[kTile];
};

// Whether the neighbours in memory are neighbouring positions, so that r comes first in shared memory too.
template <typename T>
__device__ __forceinline__ bool is_turned(const Operand<T>& x) {
  return Tile<T>::kTurns && x.rank_stride != 1;
}

// The operand for the next `1 << shift` of r, zero outside.
template <typename T>
__device__ __forceinline__ void load_operand(T* shared, const T* data, const Operand<T>& x, const int32_t* index,
                                             int first, int shift) {
  constexpr int kTile = Tile<T>::kTile;
  const int extent = 1 << shift;
  for (int e = threadIdx.x; e < kTile << shift; e += kThreads) {
    const int position = x.rank_stride == 1 ? e >> shift : e % kTile;
    const int r = x.rank_stride == 1 ? e & (extent - 1) : e / kTile;
    const bool inside = index[position] >= 0 && first + r < x.rank;
    store_shared(shared + Tile<T>::place(position, r, is_turned(x)),
                 inside ? data[index[position] * x.row + (first + r) * x.rank_stride] : convert<T>(0.0f));
  }
}

// tile += x yᵀ, `a` and `b` being shared memory for the operands.
template <typename T>
__device__ __forceinline__ void add_product(Tile<T>& tile, T* a, T* b, const Operand<T>& x, const Operand<T>& y,
                                            int64_t client, const int32_t* m_index, const int32_t* n_index) {
  for (int first = 0; first < x.rank; first += Tile<T>::kTile) {
    const int left = min(x.rank - first, Tile<T>::kTile);
    const int shift = left <= 16 ? 4 : left <= 32 ? 5 : 6;
    load_operand(a, x.data + client * x.client, x, m_index, first, shift);
    load_operand(b, y.data + client * y.client, y, n_index, first, shift);
    __syncthreads();
    tile.multiply(a, is_turned(x), b, is_turned(y), 1 << shift);
    __syncthreads();
  }
}

template <typename T>
struct Shared {
  using A = Acc<T>;
  using G = Tile<T>;
  static constexpr size_t kOperand = sizeof(T) * G::kTile * G::kLead;
  static constexpr size_t kOut = G::kInPlace ? 0 : sizeof(A) * G::kTile * G::kLeadOut;
  static constexpr size_t kBytes = sizeof(Positions<G::kTile>) + 2 * kOperand + kOut;

  Positions<G::kTile>* at;
  T *a, *b;
  A* out;

  __device__ __forceinline__ Shared() {
    unsigned char* base = dynamic_shared();
    at = reinterpret_cast<Positions<G::kTile>*>(base);
    base += sizeof(Positions<G::kTile>);
    a = reinterpret_cast<T*>(base);
    b = reinterpret_cast<T*>(base + kOperand);
    out = G::kInPlace ? reinterpret_cast<A*>(a) : reinterpret_cast<A*>(base + 2 * kOperand);
  }
};

template <typename T>
struct Product {
  T* out;
  const T* dense;
  int64_t out_client, dense_client;
  Operand<T> x1, y1, x2, y2;
  Acc<T> scaling, plus;
  Axis m, n;
  Walk walk;
  uint32_t m_blocks, n_blocks;
};

template <typename T, int N>
__device__ __forceinline__ void write_weight(const Product<T>& p, const Shared<T>& s, T* out, const T* dense) {
  using G = Tile<T>;
  for (uint32_t e = threadIdx.x * N; e < p.walk.count(G::kTile); e += kThreads * N) {
    uint32_t m, n;
    p.walk.at(e, G::kTile, &m, &n);
    if (s.at->m_index[m] < 0 || s.at->n_index[n] < 0) continue;
    const int64_t at = s.at->m_offset[m] + s.at->n_offset[n];
    Pack<T, N> before, after;
    if (dense) before = *reinterpret_cast<const Pack<T, N>*>(dense + at);
    Acc<T> made[N];
    if constexpr (G::kTurns) {
      read_row(made, s.out + m * G::kLeadOut + n);
    } else {
#pragma unroll
      for (int l = 0; l < N; ++l) made[l] = s.out[m * G::kLeadOut + n + l];
    }
#pragma unroll
    for (int l = 0; l < N; ++l) {
      Acc<T> sum = p.scaling * made[l];
      if (dense) sum += convert<Acc<T>>(before.x[l]);
      after.x[l] = convert<T>(sum);
    }
    *reinterpret_cast<Pack<T, N>*>(out + at) = after;
  }
}

template <typename T, bool kSecond>
__global__ void __launch_bounds__(kThreads) product_kernel(Product<T> p) {
  using G = Tile<T>;
  const Shared<T> s;
  const uint32_t blocks = p.m_blocks * p.n_blocks;
  const int64_t client = blockIdx.x / blocks;
  const uint32_t block = blockIdx.x % blocks;
  locate<G::kTile>(s.at->m_index, s.at->m_offset, p.m, block % p.m_blocks * p.walk.block_m, p.walk.block_m);
  locate<G::kTile>(s.at->n_index, s.at->n_offset, p.n, block / p.m_blocks * p.walk.block_n, p.walk.block_n);
  __syncthreads();
  G tile;
  tile.clear();
  add_product(tile, s.a, s.b, p.x1, p.y1, client, s.at->m_index, s.at->n_index);
  if (kSecond) {
    G second;
    second.clear();
    add_product(second, s.a, s.b, p.x2, p.y2, client, s.at->m_index, s.at->n_index);
    tile.combine(second, p.plus);
  }
  tile.store(s.out, false);
  __syncthreads();
  T* out = p.out + client * p.out_client;
  const T* dense = p.dense ? p.dense + client * p.dense_client : nullptr;
  if (p.walk.packed) {
    write_weight<T, kPack<T>>(p, s, out, dense);
  } else {
    write_weight<T, 1>(p, s, out, dense);
  }
}

template <typename T>
struct Contract {
  const T* grad;
  int64_t grad_client, out_row, out_column, n_row;
  T* out;
  Acc<T>* parts;
  Operand<T> x, y, factor;
  Acc<T> scaling, plus;
  Axis m, n;
  Walk walk;
  uint32_t m_blocks, c_blocks, splits, width;
};

// a = dW[m, n] (q[m, n] + plus), or dW[m, n], both turned where the rows are the fast side.
template <typename T, int N, bool kOther>
__device__ __forceinline__ void load_packs(const Walk& walk, T* a, const Acc<T>* q, Acc<T> plus, const int32_t* m_index,
                                           const int64_t* m_offset, const int32_t* n_index, const int64_t* n_offset,
                                           const T* grad) {
  using G = Tile<T>;
  const bool turned = G::kTurns && !walk.fast_columns;
  for (uint32_t e = threadIdx.x * N; e < walk.count(G::kTile); e += kThreads * N) {
    uint32_t m, n;
    walk.at(e, G::kTile, &m, &n);
    const bool inside = m_index[m] >= 0 && n_index[n] >= 0;
    Pack<T, N> pack;
    if (inside) {
      pack = *reinterpret_cast<const Pack<T, N>*>(grad + m_offset[m] + n_offset[n]);
    } else {
#pragma unroll
      for (int l = 0; l < N; ++l) pack.x[l] = convert<T>(0.0f);
    }
    if constexpr (G::kTurns) {
      if constexpr (kOther) {
        float other[N];
        read_row(other, q + G::place_out(m, n, turned));
#pragma unroll
        for (int l = 0; l < N; ++l) {
          // zero times a product that overflowed is not zero
          if (inside) pack.x[l] = convert<T>(convert<float>(pack.x[l]) * (other[l] + plus));
        }
      }
      store_shared(a + G::place(m, n, turned), pack);
    } else {
#pragma unroll
      for (int l = 0; l < N; ++l) {
        Acc<T> g = convert<Acc<T>>(pack.x[l]);
        if (kOther && inside) g *= q[m * G::kLeadOut + n] + plus;
        a[m * G::kLead + n] = convert<T>(g);
        n += walk.fast_columns;
        m += !walk.fast_columns;
      }
    }
  }
}

template <typename T, bool kOther>
__device__ __forceinline__ void load_gradient(const Walk& walk, T* a, const Acc<T>* q, Acc<T> plus,
                                              const int32_t* m_index, const int64_t* m_offset, const int32_t* n_index,
                                              const int64_t* n_offset, const T* grad) {
  using G = Tile<T>;
  // positions past the block, which the walk leaves out, must count as zero
  for (int e = threadIdx.x; e < G::kTile * G::kTile; e += kThreads) {
    const uint32_t m = e / G::kTile, n = e % G::kTile;
    if (m >= walk.block_m || n >= walk.block_n) {
      a[G::place(m, n, G::kTurns && !walk.fast_columns)] = convert<T>(0.0f);
    }
  }
  if (walk.packed) {
    load_packs<T, kPack<T>, kOther>(walk, a, q, plus, m_index, m_offset, n_index, n_offset, grad);
  } else {
    load_packs<T, 1, kOther>(walk, a, q, plus, m_index, m_offset, n_index, n_offset, grad);
  }
}

template <typename T, bool kOther>
__global__ void __launch_bounds__(kThreads) contract_kernel(Contract<T> p) {
  using G = Tile<T>;
  constexpr int kTile = G::kTile;
  const Shared<T> s;
  const bool turned = G::kTurns && !p.walk.fast_columns, out_turned = G::kTurns && p.out_column != 1;
  // its positions are what the product sums over
  const bool factor_turned = G::kTurns && p.factor.rank_stride == 1;
  uint32_t block = blockIdx.x;
  const uint32_t mb = block % p.m_blocks;
  block /= p.m_blocks;
  const uint32_t c0 = block % p.c_blocks * kTile;
  block /= p.c_blocks;
  const uint32_t split = block % p.splits;
  const int64_t client = block / p.splits;
  const T* grad = p.grad + client * p.grad_client;
  const T* factor = p.factor.data + client * p.factor.client;

  locate<kTile>(s.at->m_index, s.at->m_offset, p.m, mb * p.walk.block_m, p.walk.block_m);
  G sum;
  sum.clear();
  for (uint32_t n0 = split * p.walk.block_n; n0 < p.n.size; n0 += p.splits * p.walk.block_n) {
    locate<kTile>(s.at->n_index, s.at->n_offset, p.n, n0, p.walk.block_n);
    __syncthreads();
    if (kOther) {
      G other;
      other.clear();
      add_product(other, s.a, s.b, p.x, p.y, client, s.at->m_index, s.at->n_index);
      other.store(s.out, turned);
      __syncthreads();
    }
    load_gradient<T, kOther>(p.walk, s.a, s.out, p.plus, s.at->m_index, s.at->m_offset, s.at->n_index, s.at->n_offset,
                             grad);
    for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
      const uint32_t n = p.factor.rank_stride == 1 ? e / kTile : e % kTile;
      const uint32_t c = p.factor.rank_stride == 1 ? e % kTile : e / kTile;
      const bool inside = s.at->n_index[n] >= 0 && c0 + c < p.width;
      store_shared(
          s.b + G::place(c, n, factor_turned),
          inside ? factor[s.at->n_index[n] * p.factor.row + (c0 + c) * p.factor.rank_stride] : convert<T>(0.0f));
    }
    __syncthreads();
    sum.multiply(s.a, turned, s.b, factor_turned, kTile);
    __syncthreads();
  }
  sum.store(s.out, out_turned);
  __syncthreads();
  const int64_t base = (client * p.splits + split) * p.m.size * p.width;
  for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
    const uint32_t m = p.out_column == 1 ? e / kTile : e % kTile;
    const uint32_t c = p.out_column == 1 ? e % kTile : e / kTile;
    if (s.at->m_index[m] < 0 || c0 + c >= p.width) continue;
    const Acc<T> value = p.scaling * load_shared<Acc<T>>(s.out + G::place_out(m, c, out_turned));
    const int64_t at = base + s.at->m_index[m] * p.out_row + (c0 + c) * p.out_column;
    if (p.splits == 1) {
      p.out[at] = convert<T>(value);
    } else {
      p.parts[at] = value;
    }
  }
}

// Enough blocks to fill a large GPU even for one model, without going below four tiles each.
int64_t count_splits(int64_t tile, const View& view, int64_t width, int64_t clients) {
  const int64_t blocks = clients * ceil_div(view.rows.size, tile) * ceil_div(width, tile);
  const int64_t most = view.columns.size / (4 * tile), wanted = ceil_div(264, blocks);
  return most < 1 ? 1 : (wanted < most ? wanted : most);
}

}  // namespace

int product(Type type, Slices out, Slices dense, Factor x1, Factor y1, Factor x2, Factor y2, double scaling,
            double plus, const View& view_, int64_t clients, void* stream) {
  // columns are the fast side of W, transposed if need be
  View view = view_;
  if (!has_fast_columns(view)) {
    std::swap(view.rows, view.columns);
    std::swap(x1, y1);
    std::swap(x2, y2);
  }
  if (view.rows.size >= kLimit || view.columns.size >= kLimit) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    Product<T> p;
    p.out = static_cast<T*>(out.data);
    p.dense = static_cast<const T*>(dense.data);
    p.out_client = out.client;
    p.dense_client = dense.client;
    p.x1 = Operand<T>(x1);
    p.y1 = Operand<T>(y1);
    p.x2 = Operand<T>(x2);
    p.y2 = Operand<T>(y2);
    p.scaling = static_cast<Acc<T>>(scaling);
    p.plus = static_cast<Acc<T>>(plus);
    p.m = Axis(view.rows);
    p.n = Axis(view.columns);
    p.walk = make_walk<T>(view, out);
    p.walk.packed = p.walk.packed && dense.client % kPack<T> == 0 && reinterpret_cast<uintptr_t>(dense.data) % 16 == 0;
    p.m_blocks = static_cast<uint32_t>(ceil_div(view.rows.size, p.walk.block_m));
    p.n_blocks = static_cast<uint32_t>(ceil_div(view.columns.size, p.walk.block_n));
    auto kernel = x2.data ? product_kernel<T, true> : product_kernel<T, false>;
    const size_t shared = Shared<T>::kBytes;
    if (const int error = allow_shared(kernel, shared)) return error;
    return launch(kernel, clients * p.m_blocks * p.n_blocks, kThreads, shared, stream, p);
  });
}

int64_t contract_workspace(Type type, const View& view, int64_t width, int64_t clients) {
  const int64_t splits = count_splits(type == kDouble ? 32 : 64, view, width, clients);
  return splits == 1 ? 0 : clients * splits * view.rows.size * width * (type == kDouble ? 8 : 4);
}

int contract(Type type, void* out, int64_t out_row, int64_t out_column, Slices grad, Factor x, Factor y, Factor factor,
             double scaling, double plus, const View& view, void* workspace, int64_t clients, void* stream) {
  if (view.rows.size >= kLimit || view.columns.size >= kLimit) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int64_t kTile = Tile<T>::kTile;
    Contract<T> p;
    p.grad = static_cast<const T*>(grad.data);
    p.grad_client = grad.client;
    p.out = static_cast<T*>(out);
    p.out_row = out_row;
    p.out_column = out_column;
    p.parts = static_cast<Acc<T>*>(workspace);
    p.x = Operand<T>(x);
    p.y = Operand<T>(y);
    p.factor = Operand<T>(factor);
    p.scaling = static_cast<Acc<T>>(scaling);
    p.plus = static_cast<Acc<T>>(plus);
    p.m = Axis(view.rows);
    p.n = Axis(view.columns);
    p.walk = make_walk<T>(view, grad);
    p.width = static_cast<uint32_t>(factor.rank);
    p.m_blocks = static_cast<uint32_t>(ceil_div(view.rows.size, p.walk.block_m));
    p.c_blocks = static_cast<uint32_t>(ceil_div(factor.rank, kTile));
    p.splits = static_cast<uint32_t>(count_splits(kTile, view, factor.rank, clients));
    auto kernel = x.data ? contract_kernel<T, true> : contract_kernel<T, false>;
    const size_t shared = Shared<T>::kBytes;
    if (const int error = allow_shared(kernel, shared)) return error;
    const int error = launch(kernel, clients * p.splits * p.c_blocks * p.m_blocks, kThreads, shared, stream, p);
    if (error || p.splits == 1) return error;
    return reduce_parts<T>({p.parts, p.out, p.splits, view.rows.size * factor.rank}, {}, clients, stream);
  });
}

}  // namespace fastfact_cuda
