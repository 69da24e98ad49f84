// The server's step: cosines of a block of rows with the columns and their weights, which meet the uploads in the same
// kernel, all columns in one block so that the sums have a fixed order, or go to memory, some columns a block; and the
// transform of sketches.
#include "common.cuh"

namespace fastfact_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;  // threads along each side of a tile
constexpr int kWords = 32;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Keys are compared as words: one number, or four of int8.
template <typename K>
struct Words {
  using Word = K;
  using Product = K;
  static constexpr int kPer = 1;
  static __device__ __forceinline__ Word load(const K* key, int64_t at, int64_t d) { return at < d ? key[at] : K(0); }
  static __device__ __forceinline__ Product add(Word a, Word b, Product sum) { return sum + a * b; }
};
template <>
struct Words<int8_t> {
  using Word = int;
  using Product = int;
  static constexpr int kPer = 4;
  static __device__ __forceinline__ Word load(const int8_t* key, int64_t at, int64_t d) {
    unsigned word = 0;
    for (int l = 0; l < 4 && at + l < d; ++l) word |= static_cast<unsigned>(static_cast<uint8_t>(key[at + l])) << 8 * l;
    return static_cast<int>(word);
  }
  static __device__ __forceinline__ Product add(Word a, Word b, Product sum) { return __dp4a(a, b, sum); }
};

template <typename K>
struct Match {
  using A = Acc<K>;
  const K* keys;
  const float* inverse;  // 1 / norm of int8 keys; others have norm 1
  const A* x;            // null: the weights themselves go into out [rows, m]
  const uint8_t* valid;
  A* out;
  int64_t* counts;
  int64_t first, rows, m, d, n;
  A epsilon, tau;
  uint32_t row_blocks;
  int64_t chunk;  // columns a block without x goes through
};

template <typename K>
struct Tiles {
  using A = Acc<K>;
  using Word = typename Words<K>::Word;
  static constexpr int kTile = sizeof(K) == 8 ? 32 : 64, kEach = kTile / kSide;
  static constexpr size_t kKeys = sizeof(Word) * kTile * (kWords + 1), kWeights = sizeof(A) * kTile * (kTile + 1);
  static constexpr size_t kBytes = 2 * kKeys + 2 * kWeights;
};

template <typename K>
__global__ void __launch_bounds__(kThreads) similarity_kernel(Match<K> p) {
  using A = Acc<K>;
  using W = Words<K>;
  using S = Tiles<K>;
  constexpr int kTile = S::kTile, kEach = S::kEach, kLead = kWords + 1, kLeadOut = kTile + 1;
  unsigned char* shared = dynamic_shared();
  auto* a = reinterpret_cast<typename W::Word*>(shared);
  auto* b = reinterpret_cast<typename W::Word*>(shared + S::kKeys);
  A* weights = reinterpret_cast<A*>(shared + 2 * S::kKeys);
  A* upload = reinterpret_cast<A*>(shared + 2 * S::kKeys + S::kWeights);
  const int row = threadIdx.x / kSide, column = threadIdx.x % kSide;
  const int64_t r0 = static_cast<int64_t>(blockIdx.x % p.row_blocks) * kTile;
  const int64_t n0 = p.x ? static_cast<int64_t>(blockIdx.x / p.row_blocks) * kTile : 0;
  const int64_t begin = p.x ? 0 : blockIdx.x / p.row_blocks * p.chunk;
  const int64_t end = p.x || begin + p.chunk > p.m ? p.m : begin + p.chunk;
  A sums[kEach][kEach];
  int counts[kEach];
  for (int i = 0; i < kEach; ++i) {
    counts[i] = 0;
    for (int j = 0; j < kEach; ++j) sums[i][j] = 0;
  }
  for (int64_t c0 = begin; c0 < end; c0 += kTile) {
    typename W::Product product[kEach][kEach];
    for (int i = 0; i < kEach; ++i)
      for (int j = 0; j < kEach; ++j) product[i][j] = 0;
    for (int64_t d0 = 0; d0 < p.d; d0 += kWords * W::kPer) {
      for (int e = threadIdx.x; e < kTile * kWords; e += kThreads) {
        const int line = e / kWords, word = e % kWords;
        const int64_t r = r0 + line, c = c0 + line, at = d0 + word * W::kPer;
        a[line * kLead + word] = r < p.rows ? W::load(p.keys + (p.first + r) * p.d, at, p.d) : typename W::Word(0);
        b[line * kLead + word] = c < p.m ? W::load(p.keys + c * p.d, at, p.d) : typename W::Word(0);
      }
      __syncthreads();
      for (int word = 0; word < kWords; ++word) {
        typename W::Word left[kEach], right[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) left[i] = a[(row + kSide * i) * kLead + word];
#pragma unroll
        for (int j = 0; j < kEach; ++j) right[j] = b[(column + kSide * j) * kLead + word];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j) product[i][j] = W::add(left[i], right[j], product[i][j]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t r = r0 + row + kSide * i;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t c = c0 + column + kSide * j;
        A weight = 0;
        if (r < p.rows && c < p.m && p.first + r != c) {
          A sigma = static_cast<A>(product[i][j]);
          if (p.inverse) sigma *= static_cast<A>(p.inverse[p.first + r]) * static_cast<A>(p.inverse[c]);
          if (sigma >= p.tau) {
            weight = exponential(p.epsilon * ((sigma > 1 ? A(1) : sigma) - 1));
            counts[i] += !p.valid || p.valid[c];
          }
        }
        if (p.x) {
          weights[(row + kSide * i) * kLeadOut + column + kSide * j] = weight;
        } else if (r < p.rows && c < p.m) {
          p.out[r * p.m + c] = weight;
        }
      }
    }
    if (p.x) {
      for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
        const int64_t c = c0 + e / kTile, n = n0 + e % kTile;
        upload[e / kTile * kLeadOut + e % kTile] = c < p.m && n < p.n ? p.x[c * p.n + n] : A(0);
      }
      __syncthreads();
      for (int c = 0; c < kTile; ++c) {
        A left[kEach], right[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) left[i] = weights[(row + kSide * i) * kLeadOut + c];
#pragma unroll
        for (int j = 0; j < kEach; ++j) right[j] = upload[c * kLeadOut + column + kSide * j];
#pragma unroll
        for (int i = 0; i < kEach; ++i)
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[i][j] += left[i] * right[j];
      }
      __syncthreads();
    }
  }
  for (int i = 0; i < kEach && p.x; ++i) {
    const int64_t r = r0 + row + kSide * i;
    for (int j = 0; j < kEach; ++j) {
      const int64_t n = n0 + column + kSide * j;
      if (r < p.rows && n < p.n) p.out[r * p.n + n] = sums[i][j];
    }
  }
  if (!p.counts || n0 > 0) return;
  // the sixteen threads of a row are half a warp
  for (int i = 0; i < kEach; ++i) {
    for (int step = kSide / 2; step; step /= 2) counts[i] += __shfl_xor_sync(0xffffffffu, counts[i], step);
    const int64_t r = r0 + row + kSide * i;
    // of whole numbers: any order gives the same
    if (column == 0 && r < p.rows)
      atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + r), static_cast<unsigned long long>(counts[i]));
  }
}

// The sum, or the largest, of one value of each thread, to all of them.
template <typename A, bool kLargest>
__device__ __forceinline__ A block_reduce(A value) {
  __shared__ A parts[kThreads / 32];
  for (int step = 16; step; step /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, value, step);
    value = kLargest ? (other > value ? other : value) : value + other;
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int w = 1; w < kThreads / 32; ++w) {
    value = kLargest ? (parts[w] > value ? parts[w] : value) : value + parts[w];
  }
  __syncthreads();
  return value;
}

// unit = key / norm, divided by the largest number first so that no square overflows; a key of zeros stays.
template <typename T>
__global__ void __launch_bounds__(kThreads) unit_kernel(const T* keys, T* unit, int64_t d) {
  const T* key = keys + blockIdx.x * d;
  T largest = 0;
  for (int64_t j = threadIdx.x; j < d; j += kThreads) {
    const T size = key[j] < 0 ? -key[j] : key[j];
    // NaN counts as infinite, which makes the whole key NaN
    if (!(size <= largest)) largest = size == size ? size : T(INFINITY);
  }
  largest = block_reduce<T, true>(largest);
  double square = 0;
  for (int64_t j = threadIdx.x; j < d; j += kThreads) {
    const T x = largest > 0 ? key[j] / largest : T(0);
    square += static_cast<double>(x) * static_cast<double>(x);
  }
  square = block_reduce<double, false>(square);
  const double norm = sqrt(square);
  for (int64_t j = threadIdx.x; j < d; j += kThreads) {
    const T x = largest > 0 ? key[j] / largest : T(0);
    unit[blockIdx.x * d + j] = square == 0 ? T(0) : static_cast<T>(static_cast<double>(x) / norm);
  }
}

__global__ void __launch_bounds__(kThreads) inverse_kernel(const int8_t* keys, float* inverse, int64_t d) {
  double square = 0;
  for (int64_t j = threadIdx.x; j < d; j += kThreads) {
    const double x = keys[blockIdx.x * d + j];
    square += x * x;
  }
  square = block_reduce<double, false>(square);
  if (threadIdx.x == 0) inverse[blockIdx.x] = square > 0 ? static_cast<float>(1 / sqrt(square)) : 0.0f;
}

template <typename K>
int run(const Similarity& op, void* stream) {
  using A = Acc<K>;
  Match<K> p;
  p.keys = static_cast<const K*>(op.keys);
  p.inverse = op.inverse;
  p.x = static_cast<const A*>(op.x);
  p.valid = op.valid;
  p.out = static_cast<A*>(op.out);
  p.counts = op.counts;
  p.first = op.first, p.rows = op.rows, p.m = op.m, p.d = op.d, p.n = op.n;
  p.epsilon = static_cast<A>(op.epsilon), p.tau = static_cast<A>(op.tau);
  constexpr int64_t kTile = Tiles<K>::kTile;
  p.row_blocks = static_cast<uint32_t>(ceil_div(op.rows, kTile));
  // enough blocks to fill a large GPU, each with some tiles of columns
  const int64_t tiles = ceil_div(op.m, kTile), chunks = ceil_div(528, static_cast<int64_t>(p.row_blocks));
  p.chunk = kTile * ceil_div(tiles, chunks < tiles ? chunks : tiles);
  const int64_t column_blocks = op.x ? ceil_div(op.n, kTile) : ceil_div(op.m, p.chunk);
  if (const int error = allow_shared(similarity_kernel<K>, Tiles<K>::kBytes)) return error;
  return launch(similarity_kernel<K>, p.row_blocks * column_blocks, kThreads, Tiles<K>::kBytes, stream, p);
}

constexpr int64_t kPoints = 4096;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    srht_chunk_kernel(const T* x, const int8_t* signs, Acc<T>* work, int64_t n, int64_t chunk, int64_t chunks) {
  using A = Acc<T>;
  A* z = reinterpret_cast<A*>(dynamic_shared());
  const int64_t row = blockIdx.x / chunks, first = blockIdx.x % chunks * chunk;
  for (int64_t j = threadIdx.x; j < chunk; j += kThreads) {
    z[j] = first + j < n ? convert<A>(x[row * n + first + j]) * static_cast<A>(signs[first + j]) : A(0);
  }
  __syncthreads();
  for (int64_t half = 1; half < chunk; half *= 2) {
    for (int64_t pair = threadIdx.x; pair < chunk / 2; pair += kThreads) {
      const int64_t low = (pair & ~(half - 1)) * 2 + (pair & (half - 1));
      const A above = z[low], below = z[low + half];
      z[low] = above + below;
      z[low + half] = above - below;
    }
    __syncthreads();
  }
  for (int64_t j = threadIdx.x; j < chunk; j += kThreads) work[blockIdx.x * chunk + j] = z[j];
}

// The rows that are kept of the transform across the chunks, quantized where there is a scale; a block a client.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    srht_keep_kernel(const A* work, const int64_t* rows, A* kept, int8_t* out, float* scale, int64_t m, int64_t chunk,
                     int64_t chunks, A factor) {
  const A* z = work + blockIdx.x * chunk * chunks;
  kept += blockIdx.x * m;
  A largest = 0;
  for (int64_t j = threadIdx.x; j < m; j += kThreads) {
    const unsigned across = static_cast<unsigned>(rows[j] / chunk);
    const A* from = z + rows[j] % chunk;
    A sum = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      sum += __popc(across & static_cast<unsigned>(c)) & 1 ? -from[c * chunk] : from[c * chunk];
    }
    sum *= factor;
    kept[j] = sum;
    const A size = sum < 0 ? -sum : sum;
    if (size > largest) largest = size;
  }
  if (!scale) return;
  const float step = static_cast<float>(block_reduce<A, true>(largest)) / 127;
  const A inverse = step > 0 ? static_cast<A>(1 / step) : A(0);
  for (int64_t j = threadIdx.x; j < m; j += kThreads) {
    const int rounded = __float2int_rn(static_cast<float>(kept[j] * inverse));
    out[blockIdx.x * m + j] = static_cast<int8_t>(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded);
  }
  if (threadIdx.x == 0) scale[blockIdx.x] = step;
}

}  // namespace

int unit_keys(Type type, const void* keys, void* unit, int64_t m, int64_t d, void* stream) {
  if (type == kDouble) {
    return launch(unit_kernel<double>, m, kThreads, 0, stream, static_cast<const double*>(keys),
                  static_cast<double*>(unit), d);
  }
  return launch(unit_kernel<float>, m, kThreads, 0, stream, static_cast<const float*>(keys), static_cast<float*>(unit),
                d);
}

int inverse_norms(const int8_t* keys, float* inverse, int64_t m, int64_t d, void* stream) {
  return launch(inverse_kernel, m, kThreads, 0, stream, keys, inverse, d);
}

int similarity(const Similarity& op, void* stream) {
  if (op.inverse) return run<int8_t>(op, stream);
  return op.type == kDouble ? run<double>(op, stream) : run<float>(op, stream);
}

int64_t srht_chunk(int64_t n) {
  int64_t chunk = 1;
  while (chunk < n && chunk < kPoints) chunk *= 2;
  return chunk;
}

int srht(const Srht& op, void* stream) {
  return with_type(op.type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    using A = Acc<T>;
    const int64_t chunk = srht_chunk(op.n), chunks = ceil_div(op.n, chunk);
    A* work = static_cast<A*>(op.work);
    if (const int error = launch(srht_chunk_kernel<T>, op.clients * chunks, kThreads, chunk * sizeof(A), stream,
                                 static_cast<const T*>(op.x), op.signs, work, op.n, chunk, chunks)) {
      return error;
    }
    return launch(srht_keep_kernel<A>, op.clients, kThreads, 0, stream, work, op.rows, static_cast<A*>(op.kept), op.out,
                  op.scale, op.m, chunk, chunks, static_cast<A>(1 / sqrt(static_cast<double>(op.m))));
  });
}

}  // namespace fastfact_cuda
