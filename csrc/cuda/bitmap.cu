// Bitmap and values: bits and counts of each chunk of a row, their running sum within segments of chunks and over the
// segments, then the values at their places.
#include "common.cuh"

namespace fastfact_cuda {
namespace {

// a thread takes the 8 elements of one byte
constexpr int kThreads = kChunk / 8;
constexpr int kWarps = kThreads / 32;
constexpr int kScanThreads = kSegment;

// The values before a chunk.
__device__ __forceinline__ int64_t values_before(const Offsets& offsets, int64_t chunk) {
  return offsets.of_segment[chunk / kSegment] + offsets.in_segment[chunk];
}

// The sum of `value` over the threads before this one, and over all of them in `total`.
template <int kCount>
__device__ __forceinline__ int block_scan(int value, int* total) {
  __shared__ int sums[kCount / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int first = 0, all = 0;
  for (int w = 0; w < kCount / 32; ++w) {
    if (w < warp) first += sums[w];
    all += sums[w];
  }
  __syncthreads();
  *total = all;
  return first + sum - value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) count_kernel(const T* x, uint8_t* bits, int32_t* counts, float* maxima,
                                                         int64_t n, int64_t row_bytes, int64_t chunks) {
  __shared__ float sizes[kWarps];
  __shared__ int broken_warps[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int64_t byte = blockIdx.x % chunks * kThreads + threadIdx.x;
  unsigned set = 0;
  float size = 0;
  int broken = 0;
  for (int j = 0; j < 8; ++j) {
    const int64_t at = byte * 8 + j;
    if (at >= n) break;
    const Acc<T> value = convert<Acc<T>>(x[row * n + at]);
    if (value != Acc<T>(0)) set |= 1u << j;
    const float magnitude = fabsf(static_cast<float>(value));
    if (magnitude > size) size = magnitude;
    broken |= value != value;
  }
  if (byte < row_bytes) bits[row * row_bytes + byte] = static_cast<uint8_t>(set);
  int total;
  block_scan<kThreads>(__popc(set), &total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
  if (!maxima) return;
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, size, step);
    if (other > size) size = other;
    broken |= __shfl_xor_sync(0xffffffffu, broken, step);
  }
  if (threadIdx.x % 32 == 0) {
    sizes[threadIdx.x / 32] = size;
    broken_warps[threadIdx.x / 32] = broken;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) {
      if (sizes[w] > size) size = sizes[w];
      broken |= broken_warps[w];
    }
    maxima[blockIdx.x] = broken ? nanf("") : size;
  }
}

// The bits of a byte that stand for elements before n.
__device__ __forceinline__ unsigned byte_of(const uint8_t* bits, int64_t row, int64_t byte, int64_t row_bytes,
                                            int64_t n) {
  if (byte >= row_bytes) return 0;
  const unsigned set = bits[row * row_bytes + byte];
  return byte == row_bytes - 1 && n % 8 ? set & ((1u << n % 8) - 1) : set;
}

__global__ void __launch_bounds__(kThreads)
    popcount_kernel(const uint8_t* bits, int32_t* counts, int64_t n, int64_t row_bytes, int64_t chunks) {
  const int64_t byte = blockIdx.x % chunks * kThreads + threadIdx.x;
  int total;
  block_scan<kThreads>(__popc(byte_of(bits, blockIdx.x / chunks, byte, row_bytes, n)), &total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// In each segment the running sum of the counts, and their sum.
__global__ void __launch_bounds__(kScanThreads)
    scan_segment_kernel(const int32_t* counts, Offsets offsets, int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSegment + threadIdx.x;
  int total;
  const int before = block_scan<kScanThreads>(at < count ? counts[at] : 0, &total);
  if (at < count) offsets.in_segment[at] = before;
  if (threadIdx.x == 0) offsets.of_segment[blockIdx.x] = total;
}

// The running sum of the segments' sums, in place; the last is the number of all values.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(int64_t* of_segment, int64_t count) {
  int64_t before = 0;
  for (int64_t first = 0; first < count; first += kScanThreads) {
    const int64_t at = first + threadIdx.x;
    int total;
    // a segment has at most 2²⁰ elements, so that the sum of a thousand is an int
    const int sum = block_scan<kScanThreads>(at < count ? static_cast<int>(of_segment[at]) : 0, &total);
    if (at < count) of_segment[at] = before + sum;
    before += total;
  }
  if (threadIdx.x == 0) of_segment[count] = before;
}

// NaN where one of the maxima is.
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const float* maxima, float* scale, int64_t rows, int64_t chunks) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  float size = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    const float other = maxima[row * chunks + c];
    if (!(other <= size)) size = other;
    if (size != size) break;
  }
  scale[row] = size / 127;
}

template <typename T>
__device__ __forceinline__ int8_t quantize(T x, float inverse) {
  const int value = __float2int_rn(__fmul_rn(static_cast<float>(convert<Acc<T>>(x)), inverse));
  return static_cast<int8_t>(value > 127 ? 127 : value < -127 ? -127 : value);
}

template <typename T, typename V>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const T* x, Offsets offsets, const float* scale, V* values, int64_t n, int64_t chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t first = (blockIdx.x % chunks * kThreads + threadIdx.x) * 8;
  T element[8];
  unsigned set = 0;
  for (int j = 0; j < 8; ++j) {
    if (first + j >= n) break;
    element[j] = x[row * n + first + j];
    if (convert<Acc<T>>(element[j]) != Acc<T>(0)) set |= 1u << j;
  }
  float inverse = 0;
  if constexpr (std::is_same_v<V, int8_t>) inverse = scale[row] > 0 ? 1 / scale[row] : 0;
  int total;
  int64_t at = values_before(offsets, blockIdx.x) + block_scan<kThreads>(__popc(set), &total);
  for (int j = 0; j < 8; ++j) {
    if (!(set >> j & 1)) continue;
    if constexpr (std::is_same_v<V, int8_t>) {
      values[at++] = quantize(element[j], inverse);
    } else {
      values[at++] = convert<V>(convert<Acc<T>>(element[j]));
    }
  }
}

// A lane has one of the 32 words of a chunk; then each warp takes a quarter of the words, a lane an element of each, so
// that neighbouring lanes write neighbouring elements. What is read past the values, where there are fewer than bits,
// is NaN.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint8_t* bits, Offsets offsets, const V* values, int64_t value_count, const float* scale,
                float* x, int64_t n, int64_t row_bytes, int64_t chunks) {
  const int64_t row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int lane = threadIdx.x % 32;
  unsigned mine = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    mine |= byte_of(bits, row, chunk * (kChunk / 8) + 4 * lane + j, row_bytes, n) << 8 * j;
  }
  int sum = __popc(mine);
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  sum -= __popc(mine);
  const float factor = scale ? scale[row] : 1;
  const int64_t first = values_before(offsets, blockIdx.x);
  x += row * n;
#pragma unroll
  for (int j = 0; j < 32 / kWarps; ++j) {
    const int word = threadIdx.x / 32 * (32 / kWarps) + j;
    const unsigned set = __shfl_sync(0xffffffffu, mine, word);
    const int64_t from = first + __shfl_sync(0xffffffffu, sum, word) + __popc(set & ((1u << lane) - 1));
    float value = 0;
    if (set >> lane & 1) value = from < value_count ? convert<float>(values[from]) : nanf("");
    const int64_t at = chunk * kChunk + 32 * word + lane;
    // zero times a broken scale is not zero, as in the reference
    if (at < n) x[at] = value * factor;
  }
}

// A block makes the words of 32 kThreads elements.
__global__ void __launch_bounds__(kThreads) support_kernel(const int32_t* index, int64_t index_client, int64_t count,
                                                           SupportWord* support, int64_t words, int64_t blocks) {
  __shared__ unsigned set[kThreads];
  const int64_t client = blockIdx.x / blocks, word = blockIdx.x % blocks * kThreads + threadIdx.x;
  const int64_t begin = blockIdx.x % blocks * kThreads * 32, end = begin + kThreads * 32;
  index += client * index_client;
  set[threadIdx.x] = 0;
  int64_t low = 0;
  for (int64_t high = count; low < high;) {
    const int64_t middle = (low + high) / 2;
    if (index[middle] < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  __syncthreads();
  for (int64_t j = low + threadIdx.x; j < count; j += kThreads) {
    const int64_t at = index[j] - begin;
    if (at < 0 || at >= end - begin) break;
    atomicOr(&set[at / 32], 1u << at % 32);
  }
  __syncthreads();
  int total;
  const int place = block_scan<kThreads>(__popc(set[threadIdx.x]), &total);
  if (word < words) {
    support[client * words + word] = {set[threadIdx.x], static_cast<uint32_t>(low + place)};
  }
}

}  // namespace

int support(Slices index, int64_t count, SupportWord* words, int64_t clients, int64_t n, void* stream) {
  const int64_t each = support_words(n), blocks = ceil_div(each, kThreads);
  return launch(support_kernel, clients * blocks, kThreads, 0, stream, static_cast<const int32_t*>(index.data),
                index.client, count, words, each, blocks);
}

int bitmap_count(Type type, const void* x, uint8_t* bits, int32_t* counts, float* maxima, int64_t rows, int64_t n,
                 void* stream) {
  const int64_t chunks = bitmap_chunks(n);
  return with_type(type, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    return launch(count_kernel<T>, rows * chunks, kThreads, 0, stream, static_cast<const T*>(x), bits, counts, maxima,
                  n, ceil_div(n, 8), chunks);
  });
}

int bitmap_popcount(const uint8_t* bits, int32_t* counts, int64_t rows, int64_t n, void* stream) {
  const int64_t chunks = bitmap_chunks(n);
  return launch(popcount_kernel, rows * chunks, kThreads, 0, stream, bits, counts, n, ceil_div(n, 8), chunks);
}

int bitmap_scan(const int32_t* counts, Offsets offsets, int64_t count, void* stream) {
  const int64_t segments = bitmap_segments(count);
  if (const int error = launch(scan_segment_kernel, segments, kScanThreads, 0, stream, counts, offsets, count)) {
    return error;
  }
  return launch(scan_kernel, 1, kScanThreads, 0, stream, offsets.of_segment, segments);
}

int bitmap_total(Offsets offsets, int64_t count, int64_t* total, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t* from = offsets.of_segment + bitmap_segments(count);
  if (const int error = cudaMemcpyAsync(total, from, sizeof(int64_t), cudaMemcpyDeviceToHost, on)) return error;
  return cudaStreamSynchronize(on);
}

int bitmap_scale(const float* maxima, float* scale, int64_t rows, int64_t chunks, void* stream) {
  return launch(scale_kernel, ceil_div(rows, kThreads), kThreads, 0, stream, maxima, scale, rows, chunks);
}

int bitmap_write(Type type, const void* x, Offsets offsets, const float* scale, void* values, int value_type,
                 int64_t rows, int64_t n, void* stream) {
  const int64_t chunks = bitmap_chunks(n);
  return with_type(type, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const auto run = [&](auto* value) {
      using V = std::remove_pointer_t<decltype(value)>;
      return launch(write_kernel<T, V>, rows * chunks, kThreads, 0, stream, static_cast<const T*>(x), offsets, scale,
                    static_cast<V*>(values), n, chunks);
    };
    if (value_type == 0) return run(static_cast<float*>(nullptr));
    if (value_type == 1) return run(static_cast<__nv_bfloat16*>(nullptr));
    return run(static_cast<int8_t*>(nullptr));
  });
}

int bitmap_read(const uint8_t* bits, Offsets offsets, const void* values, int64_t value_count, int value_type,
                const float* scale, float* x, int64_t rows, int64_t n, void* stream) {
  const int64_t chunks = bitmap_chunks(n);
  const auto run = [&](auto* value) {
    using V = std::remove_pointer_t<decltype(value)>;
    return launch(read_kernel<V>, rows * chunks, kThreads, 0, stream, bits, offsets, static_cast<const V*>(values),
                  value_count, scale, x, n, ceil_div(n, 8), chunks);
  };
  if (value_type == 0) return run(static_cast<float*>(nullptr));
  if (value_type == 1) return run(static_cast<__nv_bfloat16*>(nullptr));
  return run(static_cast<int8_t*>(nullptr));
}

}  // namespace fastfact_cuda
