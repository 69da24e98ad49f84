// rank1_weight: one elementwise pass. Its backward: one read of dW, a tile a block, then the sum of the tiles' parts.
#include "common.cuh"

namespace fastfact_cuda {
namespace {

constexpr int kThreads = 256;
// Packs a thread makes; with a support one, whose reads wait for each other in any case.
__host__ __device__ constexpr int packs_of(int support) { return support ? 1 : 2; }

// Where the memory order of W has position p: up to four digits, e3 the fastest, below d1, d2 and d3 (e0 without end),
// and what each adds to the position in u, in v and in W [o, i, kh, kw].
struct Place {
  uint32_t u, v, flat;

  __device__ __forceinline__ void add(uint32_t times, const Place& step) {
    u += times * step.u;
    v += times * step.v;
    flat += times * step.flat;
  }
};
struct Digits {
  Divisor d1, d2, d3;
  Place of0{}, of1{}, of2{}, of3{};
  int count = 4;  // of digits; the first of fewer has no end

  __device__ __forceinline__ Place locate(uint32_t p, uint32_t* e1, uint32_t* e2, uint32_t* e3) const {
    Place at{};
    *e1 = 0;
    *e2 = d3.divide(p, e3);
    at.add(*e3, of3);
    if (count > 2) *e1 = d2.divide(*e2, e2);
    if (count > 3) at.add(d1.divide(*e1, e1), of0);
    if (count > 2) at.add(*e1, of1);
    at.add(*e2, of2);
    return at;
  }
};

Digits make_digits(int64_t layout, bool channels_last, const Size& n) {
  const auto small = [](int64_t x) { return static_cast<uint32_t>(x); };
  Digits x;
  const int64_t taps = n.kh * n.kw;
  if (layout == kSpatial && taps > 1 && channels_last) {
    x.count = 3;
    x.d3 = Divisor(n.i);
    x.d2 = Divisor(taps);
    x.of3 = {0, 1, small(taps)};
    x.of2 = {1, 0, 1};
    x.of1 = {0, small(n.i), small(n.i * taps)};
  } else if (layout == kKernel && channels_last) {
    x.d3 = Divisor(n.i);
    x.d2 = Divisor(n.kw);
    x.d1 = Divisor(n.kh);
    x.of3 = {small(n.kh), 0, small(taps)};
    x.of2 = {0, 1, 1};
    x.of1 = {1, 0, small(n.kw)};
    x.of0 = {0, small(n.kw), small(n.i * taps)};
  } else if (layout == kKernel) {
    x.count = 3;
    x.d3 = Divisor(n.kw);
    x.d2 = Divisor(n.i * n.kh);
    x.of3 = {0, 1, 1};
    x.of2 = {1, 0, small(n.kw)};
    x.of1 = {0, small(n.kw), small(n.i * taps)};
  } else if (layout == kView || (layout == kSpatial && taps == 1)) {
    x.count = 2;
    x.d3 = Divisor(n.o * n.i);
    x.of3 = {0, 1, 1};
    x.of2 = {1, 0, small(n.o * n.i)};
  } else {
    x.count = 2;
    x.d3 = Divisor(layout == kLinear ? n.i : taps);
    x.of3 = {1, 0, 1};
    x.of2 = {0, 1, x.d3.d};
  }
  return x;
}

// The flat position in W [o, i, kh, kw] of the element at positions (p, q) in u and v: its part of each.
struct Flat {
  uint32_t u = 1, v1 = 0, v0 = 0;
  Divisor radix;

  __device__ __forceinline__ uint32_t of_u(uint32_t p) const { return p * u; }
  __device__ __forceinline__ uint32_t of_v(uint32_t q) const {
    uint32_t low;
    const uint32_t high = radix.divide(q, &low);
    return high * v1 + low * v0;
  }
};

Flat make_flat(int64_t layout, const Size& n) {
  Flat x;
  const int64_t taps = n.kh * n.kw;
  if (layout == kLinear) {
    x.v1 = static_cast<uint32_t>(n.i);
  } else if (layout == kView) {
    x.u = static_cast<uint32_t>(n.o * n.i);
    x.v1 = 1;
  } else if (layout == kSpatial) {
    x.v1 = static_cast<uint32_t>(taps);
  } else {
    x.radix = Divisor(n.kw);
    x.u = static_cast<uint32_t>(n.kw);
    x.v1 = static_cast<uint32_t>(n.i * taps);
    x.v0 = 1;
  }
  return x;
}

// Whether `flat` is on a client's support, and the place of its value, of so many.
__device__ __forceinline__ bool find(const SupportWord* words, uint32_t count, uint32_t flat, uint32_t* place) {
  const SupportWord word = words[flat / 32];
  const uint32_t up_to = word.set << (31 - flat % 32);
  *place = word.start + __popc(up_to << 1);
  return up_to >> 31 && *place < count;
}

template <typename T>
struct Weight {
  T* out;
  const T *mu, *u, *v;
  int64_t mu_client, u_client, v_client;
  Support support;
  Digits digits;
  Divisor blocks;
  uint32_t n, u_size, v_size;
  int rank;
};

// What the elements of a pack have in common.
enum Run : int {
  kSteps,    // nothing
  kPackU,    // one v, neighbours in u
  kPackV,    // one u, neighbours in v
  kStrideU,  // one v, elements of u at equal distances
  kTwoRuns,  // neighbours in u up to its end, then from its start on with the next v
};
// μ: dense or none; on a support that a pack sees 8 bits or less of one word of; on one that it sees bits here and
// there.
enum Sparse : int { kDense, kSupport, kScattered };

// sum += Σ_r u_r v_r for a pack.
template <typename T, int N, int kRun>
__device__ __forceinline__ void add_factors(Acc<T> (&sum)[N], const Weight<T>& a, const T* u, const T* v,
                                            const Place (&at)[N], const Place& step) {
  using A = Acc<T>;
#pragma unroll 1
  for (int r = 0; r < a.rank; ++r, u += a.u_size, v += a.v_size) {
    if constexpr (kRun == kPackU || kRun == kPackV) {
      const A one = convert<A>(kRun == kPackV ? u[at[0].u] : v[at[0].v]);
      A others[N];
      using Raw = typename RawPack<T, N>::type;
      widen<T>(others, *reinterpret_cast<const Raw*>(kRun == kPackV ? v + at[0].v : u + at[0].u));
#pragma unroll
      for (int l = 0; l < N; ++l) sum[l] += one * others[l];
    } else if constexpr (kRun == kStrideU) {
      const A one = convert<A>(v[at[0].v]);
#pragma unroll
      for (int l = 0; l < N; ++l) sum[l] += one * convert<A>(u[at[0].u + l * step.u]);
    } else if constexpr (kRun == kTwoRuns) {
      const uint32_t left = a.u_size - at[0].u;
      const A first = convert<A>(v[at[0].v]), second = left < N ? convert<A>(v[at[0].v + 1]) : first;
#pragma unroll
      for (uint32_t l = 0; l < N; ++l) {
        const uint32_t from = at[0].u + l - (l < left ? 0 : a.u_size);
        sum[l] += (l < left ? first : second) * convert<A>(u[from]);
      }
    } else {
#pragma unroll
      for (int l = 0; l < N; ++l) sum[l] += convert<A>(u[at[l].u]) * convert<A>(v[at[l].v]);
    }
  }
}

template <typename T, int N, int kRun, int kSparse>
__global__ void __launch_bounds__(kThreads) rank1_weight_kernel(Weight<T> a) {
  using A = Acc<T>;
  constexpr int kPacks = packs_of(kSparse);
  uint32_t block;
  const int64_t client = a.blocks.divide(blockIdx.x, &block);
  const uint32_t first = block * (kThreads * kPacks) + threadIdx.x;
  const T* const mu = a.mu ? a.mu + client * a.mu_client : nullptr;
  const T *const u = a.u + client * a.u_client, *const v = a.v + client * a.v_client;
  const SupportWord* const words = a.support.words + client * a.support.client;
  using Raw = typename RawPack<T, N>::type;
  Raw dense[kPacks];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const uint32_t p = (first + j * kThreads) * N;
    dense[j] = !kSparse && mu && p < a.n ? *reinterpret_cast<const Raw*>(mu + p) : Raw{};
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const uint32_t p = (first + j * kThreads) * N;
    if (p >= a.n) return;
    A sum[N];
    widen<T>(sum, dense[j]);
    Place at[N];
    uint32_t e1, e2, e3;
    at[0] = a.digits.locate(p, &e1, &e2, &e3);
#pragma unroll
    for (int l = 1; l < N; ++l) {
      at[l] = at[l - 1];
      if constexpr (kRun != kSteps) {
        at[l].flat += a.digits.of3.flat;
      } else {
        // the next in memory, digit by digit
        at[l].add(1, a.digits.of3);
        if (++e3 == a.digits.d3.d) {
          e3 = 0;
          at[l].add(-a.digits.d3.d, a.digits.of3);
          at[l].add(1, a.digits.of2);
          if (a.digits.count > 2 && ++e2 == a.digits.d2.d) {
            e2 = 0;
            at[l].add(-a.digits.d2.d, a.digits.of2);
            at[l].add(1, a.digits.of1);
            if (a.digits.count > 3 && ++e1 == a.digits.d1.d) {
              e1 = 0;
              at[l].add(-a.digits.d1.d, a.digits.of1);
              at[l].add(1, a.digits.of0);
            }
          }
        }
      }
    }
    add_factors<T, N, kRun>(sum, a, u, v, at, a.digits.of3);
    if constexpr (kSparse == kSupport) {
      const SupportWord word = words[p / 32];
      uint32_t next = word.start + __popc(word.set & ((1u << p % 32) - 1));
      const uint32_t set = word.set >> p % 32;
#pragma unroll
      for (int l = 0; l < N; ++l) {
        if (set >> l & 1 && next < a.support.count) sum[l] += convert<A>(mu[next++]);
      }
    } else if constexpr (kSparse == kScattered) {
#pragma unroll
      for (int l = 0; l < N; ++l) {
        uint32_t from;
        if (find(words, a.support.count, at[l].flat, &from)) sum[l] += convert<A>(mu[from]);
      }
    }
    *reinterpret_cast<Pack<T, N>*>(a.out + client * a.n + p) = narrow<T>(sum);
  }
}

// What packs of N elements of W have in common.
template <typename T, int N>
Run run_of(const Weight<T>& a) {
  const Digits& d = a.digits;
  const auto in_packs = [](const T* data, int64_t client, uint32_t size, uint32_t step0, uint32_t step1,
                           uint32_t step2) {
    return reinterpret_cast<uintptr_t>(data) % (N * sizeof(T)) == 0 && client % N == 0 && size % N == 0 &&
           step0 % N == 0 && step1 % N == 0 && step2 % N == 0;
  };
  if (d.d3.d % N == 0) {
    if (d.of3.v == 1 && d.of3.u == 0 && in_packs(a.v, a.v_client, a.v_size, d.of0.v, d.of1.v, d.of2.v)) return kPackV;
    if (d.of3.u == 1 && d.of3.v == 0 && in_packs(a.u, a.u_client, a.u_size, d.of0.u, d.of1.u, d.of2.u)) return kPackU;
    if (d.of3.v == 0) return kStrideU;
  }
  if (d.count == 2 && d.of3.u == 1 && d.d3.d >= N) return kTwoRuns;
  return kSteps;
}

template <typename T, int N, int kSparse>
auto weight_kernel(Run run) {
  if constexpr (N > 1) {
    if (run == kPackV) return rank1_weight_kernel<T, N, kPackV, kSparse>;
    if constexpr (kSparse != kSupport) {
      if (run == kStrideU) return rank1_weight_kernel<T, N, kStrideU, kSparse>;
    }
    if constexpr (kSparse != kScattered) {
      if (run == kPackU) return rank1_weight_kernel<T, N, kPackU, kSparse>;
      if (run == kTwoRuns) return rank1_weight_kernel<T, N, kTwoRuns, kSparse>;
    }
  }
  return rank1_weight_kernel<T, N, kSteps, kSparse>;
}

// How a block reads its tile of dW: `flat` as one stretch of memory, else along the axis whose neighbours are closest.
enum Reading : int { kFlat, kAlongU, kAlongV };

struct Tiles {
  int64_t block_u, block_v, blocks_u, blocks_v;
  size_t shared;
};

Tiles make_tiles(Type type, const View& view) {
  const int64_t nu = view.rows.size, nv = view.columns.size, wide = type == kDouble ? 128 : 256;
  Tiles t;
  t.block_u = nu <= 32 ? nu : (nv <= 32 ? wide : 64);
  t.block_v = nu <= 32 ? wide : (nv <= 32 ? nv : 64);
  t.blocks_u = ceil_div(nu, t.block_u);
  t.blocks_v = ceil_div(nv, t.block_v);
  const size_t size = type == kDouble ? 8 : 4;
  // the positions of the tile in u and v, and what they add to that in W
  t.shared = (t.block_u * (t.block_v + 1) + kThreads) * size + 2 * (t.block_u + t.block_v) * sizeof(uint32_t);
  return t;
}

template <typename T>
struct Backward {
  const T *grad, *u, *v;
  int64_t grad_client, u_client, v_client;
  T *du, *dv;                  // where one block covers the other axis
  Acc<T>*du_parts, *dv_parts;  // else
  T* dmu;                      // on the support
  int64_t dmu_client;
  Support support;
  Flat flat;
  bool need_u, need_v;
  Axis au, av;
  Divisor block_u, block_v;
  uint32_t blocks_u, blocks_v;
  int rank;
};

template <typename T, int N, int kReading, bool kSupport>
__global__ void __launch_bounds__(kThreads, 4) rank1_backward_kernel(Backward<T> a) {
  using A = Acc<T>;
  const uint32_t bu = a.block_u.d, bv = a.block_v.d, ld = bv + 1;
  A* tile = reinterpret_cast<A*>(dynamic_shared());  // [bu][ld]
  A* sums = tile + bu * ld;                          // [kThreads]
  uint32_t* u_index = reinterpret_cast<uint32_t*>(sums + kThreads);
  uint32_t* v_index = u_index + bu;
  uint32_t* u_flat = v_index + bv;
  uint32_t* v_flat = u_flat + bu;

  const uint32_t tiles = a.blocks_u * a.blocks_v;
  const int64_t client = blockIdx.x / tiles;
  const uint32_t block = blockIdx.x % tiles;
  const uint32_t ub = block % a.blocks_u, vb = block / a.blocks_u;
  const uint32_t u0 = ub * bu, v0 = vb * bv;
  const uint32_t nu = min(bu, a.au.size - u0), nv = min(bv, a.av.size - v0);
  const T* grad = a.grad + client * a.grad_client;

  for (uint32_t j = threadIdx.x; j < bu + bv; j += kThreads) {
    if (j < bu) {
      u_index[j] = j < nu ? a.au.factor(u0 + j) : 0;
      if (kSupport) u_flat[j] = a.flat.of_u(u_index[j]);
    } else {
      v_index[j - bu] = j - bu < nv ? a.av.factor(v0 + j - bu) : 0;
      if (kSupport) v_flat[j - bu] = a.flat.of_v(v_index[j - bu]);
    }
  }
  if (kSupport) __syncthreads();
  const SupportWord* const words = a.support.words + client * a.support.client;
  for (uint32_t e = threadIdx.x * N; e < bu * bv; e += kThreads * N) {
    uint32_t eu, ev;
    if (kReading == kAlongV) {
      eu = a.block_v.divide(e, &ev);
    } else {
      ev = a.block_u.divide(e, &eu);
    }
    // packs lie wholly inside or outside: N divides the sizes
    const bool inside = eu < nu && ev < nv;
    Pack<T, N> pack;
    if (inside) {
      const int64_t at =
          kReading == kFlat ? static_cast<int64_t>(v0) * nu + e : a.au.offset(u0 + eu) + a.av.offset(v0 + ev);
      pack = *reinterpret_cast<const Pack<T, N>*>(grad + at);
    }
#pragma unroll
    for (int l = 0; l < N; ++l) {
      tile[eu * ld + ev] = inside ? convert<A>(pack.x[l]) : A(0);
      if (kSupport && inside) {
        uint32_t at;
        if (find(words, a.support.count, u_flat[eu] + v_flat[ev], &at)) a.dmu[client * a.dmu_client + at] = pack.x[l];
      }
      if (kReading == kAlongV) {
        ++ev;
      } else if (++eu == bu) {
        eu = 0;
        ++ev;
      }
    }
  }
  __syncthreads();

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // columns rounded up to warps; the threads left over split the rows
  const uint32_t columns = (bv + 31) / 32 * 32;
  const uint32_t groups = max(1u, kThreads / columns);
  const uint32_t group = threadIdx.x / columns, column = threadIdx.x % columns;
  for (int r = 0; r < a.rank; ++r) {
    if (a.need_u) {
      const T* v = a.v + client * a.v_client + static_cast<int64_t>(r) * a.av.size;
      for (uint32_t eu = warp; eu < nu; eu += kThreads / 32) {
        A sum = 0;
        for (uint32_t ev = lane; ev < nv; ev += 32) sum += tile[eu * ld + ev] * convert<A>(v[v_index[ev]]);
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) {
          const int64_t at = ((client * a.blocks_v + vb) * a.rank + r) * a.au.size + u_index[eu];
          if (a.blocks_v == 1) {
            a.du[at] = convert<T>(sum);
          } else {
            a.du_parts[at] = sum;
          }
        }
      }
    }
    if (a.need_v) {
      const T* u = a.u + client * a.u_client + static_cast<int64_t>(r) * a.au.size;
      A sum = 0;
      if (group < groups && column < nv) {
        for (uint32_t eu = group; eu < nu; eu += groups) sum += tile[eu * ld + column] * convert<A>(u[u_index[eu]]);
      }
      __syncthreads();
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (group == 0 && column < nv) {
        for (uint32_t g = 1; g < groups; ++g) sum += sums[g * columns + column];
        const int64_t at = ((client * a.blocks_u + ub) * a.rank + r) * a.av.size + v_index[column];
        if (a.blocks_u == 1) {
          a.dv[at] = convert<T>(sum);
        } else {
          a.dv_parts[at] = sum;
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(Parts<T> first, Parts<T> second, int64_t columns, int64_t first_columns) {
  __shared__ Acc<T> sums[32][9];
  const int64_t client = blockIdx.x / columns, column = blockIdx.x % columns;
  const bool of_first = column < first_columns;
  const Parts<T> of = of_first ? first : second;
  const uint32_t tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const int64_t j = (of_first ? column : column - first_columns) * 8 + tx;
  Acc<T> sum = 0;
  if (j < of.n) {
    for (int64_t b = ty; b < of.blocks; b += 32) sum += of.parts[(client * of.blocks + b) * of.n + j];
  }
  sums[ty][tx] = sum;
  __syncthreads();
  if (ty == 0 && j < of.n) {
    for (int b = 1; b < 32; ++b) sum += sums[b][tx];
    of.out[client * of.n + j] = convert<T>(sum);
  }
}

}  // namespace

template <typename T>
int reduce_parts(const Parts<T>& first, const Parts<T>& second, int64_t clients, void* stream) {
  const int64_t of_first = ceil_div(first.n, 8), columns = of_first + ceil_div(second.n, 8);
  return launch(reduce_kernel<T>, clients * columns, kThreads, 0, stream, first, second, columns, of_first);
}
template int reduce_parts(const Parts<float>&, const Parts<float>&, int64_t, void*);
template int reduce_parts(const Parts<double>&, const Parts<double>&, int64_t, void*);
template int reduce_parts(const Parts<__nv_bfloat16>&, const Parts<__nv_bfloat16>&, int64_t, void*);
template int reduce_parts(const Parts<__half>&, const Parts<__half>&, int64_t, void*);

int rank1_weight(Type type, void* out, Slices mu, Support support, Slices u, Slices v, int64_t layout,
                 bool channels_last, Size size, int64_t rank, int64_t clients, void* stream) {
  const int64_t n = size.numel();
  const int64_t unused[4] = {};
  const View sizes = rank1_view(layout, size, unused);
  const int64_t u_size = sizes.rows.size, v_size = sizes.columns.size;
  if (n >= kLimit || rank * u_size >= kLimit || rank * v_size >= kLimit) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = kPack<T>;
    Weight<T> a;
    a.out = static_cast<T*>(out);
    a.mu = static_cast<const T*>(mu.data);
    a.u = static_cast<const T*>(u.data);
    a.v = static_cast<const T*>(v.data);
    a.mu_client = mu.client;
    a.u_client = u.client;
    a.v_client = v.client;
    a.support = support;
    a.digits = make_digits(layout, channels_last, size);
    a.n = static_cast<uint32_t>(n);
    a.u_size = static_cast<uint32_t>(u_size);
    a.v_size = static_cast<uint32_t>(v_size);
    a.rank = static_cast<int>(rank);
    const bool on_support = support.words != nullptr;
    const bool aligned = mu.client % N == 0 && reinterpret_cast<uintptr_t>(mu.data) % 16 == 0;
    const bool packed = n % N == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0 && (on_support || aligned);
    // contiguous W has its own order
    const bool in_order = packed && a.digits.of3.flat == 1;
    const Run run = packed ? run_of<T, N>(a) : kSteps;
    auto kernel = packed ? weight_kernel<T, N, kDense>(run) : weight_kernel<T, 1, kDense>(run);
    if (on_support && !packed) kernel = weight_kernel<T, 1, kScattered>(run);
    if (on_support && packed) {
      kernel = in_order ? weight_kernel<T, N, kSupport>(run) : weight_kernel<T, N, kScattered>(run);
    }
    const int64_t blocks = ceil_div(n, (packed ? N : 1) * kThreads * packs_of(on_support));
    a.blocks = Divisor(blocks);
    return launch(kernel, clients * blocks, kThreads, 0, stream, a);
  });
}

int64_t rank1_workspace(Type type, const View& view, int64_t rank, int64_t clients, bool need_u, bool need_v) {
  const Tiles t = make_tiles(type, view);
  const int64_t u = need_u && t.blocks_v > 1 ? t.blocks_v * view.rows.size : 0;
  const int64_t v = need_v && t.blocks_u > 1 ? t.blocks_u * view.columns.size : 0;
  return clients * rank * (u + v) * (type == kDouble ? 8 : 4);
}

template <typename T, bool kSupport>
auto backward_kernel(bool flat, bool along_v, bool packed) {
  constexpr int N = kPack<T>;
  if (flat) return rank1_backward_kernel<T, N, kFlat, kSupport>;
  if (along_v) {
    return packed ? rank1_backward_kernel<T, N, kAlongV, kSupport> : rank1_backward_kernel<T, 1, kAlongV, kSupport>;
  }
  return packed ? rank1_backward_kernel<T, N, kAlongU, kSupport> : rank1_backward_kernel<T, 1, kAlongU, kSupport>;
}

int rank1_weight_backward(Type type, Slices grad, Slices u, Slices v, void* du, void* dv, Slices dmu, Support support,
                          void* workspace, const View& view, int64_t layout, const Size& size, int64_t rank,
                          int64_t clients, void* stream) {
  const Side &rows = view.rows, &columns = view.columns;
  const Tiles t = make_tiles(type, view);
  if (rows.size * columns.size >= kLimit) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = kPack<T>;
    Backward<T> a;
    a.grad = static_cast<const T*>(grad.data);
    a.u = static_cast<const T*>(u.data);
    a.v = static_cast<const T*>(v.data);
    a.grad_client = grad.client;
    a.u_client = u.client;
    a.v_client = v.client;
    a.du = static_cast<T*>(du);
    a.dv = static_cast<T*>(dv);
    a.need_u = du != nullptr;
    a.need_v = dv != nullptr;
    a.du_parts = static_cast<Acc<T>*>(workspace);
    a.dv_parts = a.du_parts + (a.need_u && t.blocks_v > 1 ? clients * t.blocks_v * rank * rows.size : 0);
    a.dmu = static_cast<T*>(dmu.data);
    a.dmu_client = dmu.client;
    a.support = support;
    a.flat = make_flat(layout, size);
    a.au = Axis(rows);
    a.av = Axis(columns);
    a.block_u = Divisor(t.block_u);
    a.block_v = Divisor(t.block_v);
    a.blocks_u = static_cast<uint32_t>(t.blocks_u);
    a.blocks_v = static_cast<uint32_t>(t.blocks_v);
    a.rank = static_cast<int>(rank);

    const bool aligned = grad.client % N == 0 && reinterpret_cast<uintptr_t>(grad.data) % 16 == 0;
    const bool flat = aligned && t.block_u == rows.size && rows.stride0 == 1 && rows.radix == rows.size &&
                      columns.radix == columns.size && columns.stride0 == rows.size && t.block_v * rows.size % N == 0 &&
                      columns.size * rows.size % N == 0;
    const bool along_v = columns.stride0 < rows.stride0;
    const bool packed = along_v ? packs(columns, rows, grad, N, sizeof(T)) && t.block_v % N == 0
                                : packs(rows, columns, grad, N, sizeof(T)) && t.block_u % N == 0;
    const auto kernel = support.words ? backward_kernel<T, true>(flat, along_v, packed)
                                      : backward_kernel<T, false>(flat, along_v, packed);
    int error = launch(kernel, clients * t.blocks_u * t.blocks_v, kThreads, t.shared, stream, a);
    Parts<T> of_u{}, of_v{};
    if (a.need_u && t.blocks_v > 1) of_u = {a.du_parts, a.du, t.blocks_v, rank * rows.size};
    if (a.need_v && t.blocks_u > 1) of_v = {a.dv_parts, a.dv, t.blocks_u, rank * columns.size};
    if (!error) error = reduce_parts<T>(of_u, of_v, clients, stream);
    return error;
  });
}

const char* error_string(int error) {
#ifndef FASTFACT_EMULATED
  if (error == cudaErrorNoKernelImageForDevice) {
    return "the library has no code for this GPU: it is compiled for compute capability 8.0 and newer";
  }
#endif
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

#ifndef FASTFACT_EMULATED
bool is_recorded(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) || status != cudaStreamCaptureStatusNone;
}
#endif

}  // namespace fastfact_cuda
