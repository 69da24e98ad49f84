// rank1_weight: one elementwise pass. Its backward: one read of dW, a tile a block, then the sum of the tiles' parts.
#include "common.cuh"

namespace fastfact_cuda {
namespace {

constexpr int kThreads = 256;
// Packs a thread makes; with a support one, whose reads wait for each other in any case.
__host__ __device__ constexpr int unroll(bool support) { return support ? 1 : 2; }

// The digits (d0, d1, d2, d3) of a position in W in memory order, and their weights in the positions in u and v.
struct Digits {
  Divisor d1, d2, d3;
  uint32_t u0 = 0, u1 = 0, u2 = 0, u3 = 0, v0 = 0, v2 = 0, v3 = 0;

  __device__ __forceinline__ void locate(uint32_t p, uint32_t* u, uint32_t* v) const {
    uint32_t e1, e2, e3;
    const uint32_t e0 = d1.divide(d2.divide(d3.divide(p, &e3), &e2), &e1);
    *u = e0 * u0 + e1 * u1 + e2 * u2 + e3 * u3;
    *v = e0 * v0 + e2 * v2 + e3 * v3;
  }
};

Digits make_digits(int64_t layout, bool channels_last, const Size& n) {
  Digits x;
  const int64_t taps = n.kh * n.kw;
  if (layout == kLinear) {
    x.d3 = Divisor(n.i);
    x.u3 = x.v0 = 1;
  } else if (layout == kView) {
    x.d3 = Divisor(n.o * n.i);
    x.u0 = x.v3 = 1;
  } else if (layout == kSpatial && channels_last) {
    x.d2 = Divisor(taps);
    x.d3 = Divisor(n.i);
    x.u2 = x.v3 = 1;
    x.v0 = static_cast<uint32_t>(n.i);
  } else if (layout == kSpatial) {
    x.d3 = Divisor(taps);
    x.u3 = x.v0 = 1;
  } else if (channels_last) {
    x.d1 = Divisor(n.kh);
    x.d2 = Divisor(n.kw);
    x.d3 = Divisor(n.i);
    x.u1 = x.v2 = 1;
    x.u3 = static_cast<uint32_t>(n.kh);
    x.v0 = static_cast<uint32_t>(n.kw);
  } else {
    x.d2 = Divisor(n.i * n.kh);
    x.d3 = Divisor(n.kw);
    x.u2 = x.v3 = 1;
    x.v0 = static_cast<uint32_t>(n.kw);
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

// A client's support, one word of it at a time.
struct Word {
  const uint32_t *bits, *starts;
  uint32_t at = ~0u, set = 0, start = 0;

  // The place of the value at `flat`, -1 off the support.
  __device__ __forceinline__ int64_t place(uint32_t flat) {
    if (flat / 32 != at) {
      at = flat / 32;
      set = bits[at];
      start = starts[at];
    }
    const uint32_t bit = 1u << flat % 32;
    return set & bit ? static_cast<int64_t>(start) + __popc(set & (bit - 1)) : -1;
  }
};

template <typename T, int N, bool kSupport>
__global__ void __launch_bounds__(kThreads)
    rank1_weight_kernel(T* __restrict__ out, const T* __restrict__ mu, const T* __restrict__ u, const T* __restrict__ v,
                        int64_t mu_client, int64_t u_client, int64_t v_client, Support support, Flat flat,
                        Digits digits, uint32_t n, uint32_t blocks, int rank, uint32_t u_size, uint32_t v_size) {
  constexpr int kSteps = unroll(kSupport);
  const int64_t client = blockIdx.x / blocks;
  const uint32_t first = (blockIdx.x % blocks) * (kThreads * kSteps) + threadIdx.x;
  out += client * n;
  if (mu) mu += client * mu_client;
  u += client * u_client;
  v += client * v_client;
  Word word{support.bits + client * support.client, support.starts + client * support.client};
  Pack<T, N> dense[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t p = (first + j * kThreads) * N;
    if (!kSupport && mu && p < n) dense[j] = *reinterpret_cast<const Pack<T, N>*>(mu + p);
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t p = (first + j * kThreads) * N;
    if (p >= n) return;
    Pack<T, N> result;
#pragma unroll
    for (int l = 0; l < N; ++l) {
      uint32_t iu, iv;
      digits.locate(p + l, &iu, &iv);
      Acc<T> sum = 0;
      for (int r = 0; r < rank; ++r) sum += convert<Acc<T>>(u[r * u_size + iu]) * convert<Acc<T>>(v[r * v_size + iv]);
      if constexpr (kSupport) {
        const int64_t at = word.place(flat.of_u(iu) + flat.of_v(iv));
        if (at >= 0) sum += convert<Acc<T>>(mu[at]);
      } else {
        if (mu) sum += convert<Acc<T>>(dense[j].x[l]);
      }
      result.x[l] = convert<T>(sum);
    }
    *reinterpret_cast<Pack<T, N>*>(out + p) = result;
  }
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
  Word word{a.support.bits + client * a.support.client, a.support.starts + client * a.support.client};
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
        const int64_t at = word.place(u_flat[eu] + v_flat[ev]);
        if (at >= 0) a.dmu[client * a.dmu_client + at] = pack.x[l];
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
    reduce_kernel(const Acc<T>* parts, T* out, int64_t blocks, int64_t n, int64_t columns) {
  __shared__ Acc<T> sums[32][9];
  const int64_t client = blockIdx.x / columns;
  const uint32_t tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const int64_t j = blockIdx.x % columns * 8 + tx;
  Acc<T> sum = 0;
  if (j < n) {
    for (int64_t b = ty; b < blocks; b += 32) sum += parts[(client * blocks + b) * n + j];
  }
  sums[ty][tx] = sum;
  __syncthreads();
  if (ty == 0 && j < n) {
    for (int b = 1; b < 32; ++b) sum += sums[b][tx];
    out[client * n + j] = convert<T>(sum);
  }
}

}  // namespace

template <typename T>
int reduce_parts(const Acc<T>* parts, T* out, int64_t clients, int64_t blocks, int64_t n, void* stream) {
  const int64_t columns = ceil_div(n, 8);
  return launch(reduce_kernel<T>, clients * columns, kThreads, 0, stream, parts, out, blocks, n, columns);
}
template int reduce_parts<float>(const float*, float*, int64_t, int64_t, int64_t, void*);
template int reduce_parts<double>(const double*, double*, int64_t, int64_t, int64_t, void*);
template int reduce_parts<__nv_bfloat16>(const float*, __nv_bfloat16*, int64_t, int64_t, int64_t, void*);
template int reduce_parts<__half>(const float*, __half*, int64_t, int64_t, int64_t, void*);

int rank1_weight(Type type, void* out, Slices mu, Support support, Slices u, Slices v, int64_t layout,
                 bool channels_last, Size size, int64_t rank, int64_t clients, void* stream) {
  const int64_t n = size.numel();
  const Digits digits = make_digits(layout, channels_last, size);
  const int64_t unused[4] = {};
  const View sizes = rank1_view(layout, size, unused);
  const int64_t u_size = sizes.rows.size, v_size = sizes.columns.size;
  if (n >= kLimit || rank * u_size >= kLimit || rank * v_size >= kLimit) return cudaErrorInvalidValue;
  return with_type(type, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = kPack<T>;
    const bool on_support = support.bits != nullptr;
    const bool aligned = mu.client % N == 0 && reinterpret_cast<uintptr_t>(mu.data) % 16 == 0;
    const bool packed = n % N == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0 && (on_support || aligned);
    const int64_t blocks = ceil_div(n, (packed ? N : 1) * kThreads * unroll(on_support));
    const auto kernel = on_support ? (packed ? rank1_weight_kernel<T, N, true> : rank1_weight_kernel<T, 1, true>)
                                   : (packed ? rank1_weight_kernel<T, N, false> : rank1_weight_kernel<T, 1, false>);
    return launch(kernel, clients * blocks, kThreads, 0, stream, static_cast<T*>(out), static_cast<const T*>(mu.data),
                  static_cast<const T*>(u.data), static_cast<const T*>(v.data), mu.client, u.client, v.client, support,
                  make_flat(layout, size), digits, n, blocks, rank, u_size, v_size);
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
    const auto kernel = support.bits ? backward_kernel<T, true>(flat, along_v, packed)
                                     : backward_kernel<T, false>(flat, along_v, packed);
    int error = launch(kernel, clients * t.blocks_u * t.blocks_v, kThreads, t.shared, stream, a);
    if (!error && a.need_u && t.blocks_v > 1) {
      error = reduce_parts<T>(a.du_parts, a.du, clients, t.blocks_v, rank * rows.size, stream);
    }
    if (!error && a.need_v && t.blocks_u > 1) {
      error = reduce_parts<T>(a.dv_parts, a.dv, clients, t.blocks_u, rank * columns.size, stream);
    }
    return error;
  });
}

const char* error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace fastfact_cuda
