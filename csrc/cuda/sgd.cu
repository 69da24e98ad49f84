// prox_sgd_step: one pass over all tensors of a group, which travel as launch arguments.
#include "common.cuh"

namespace fastfact_cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = 48;
// blocks a tensor; larger tensors take several rounds
constexpr int64_t kBlocks = 2048;

// Blocks [first[j], first[j + 1]) step tensor j.
struct Table {
  Group group[kGroups];
  uint32_t first[kGroups + 1];
  int count;
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) prox_sgd_kernel(const __grid_constant__ Table table, Acc<T> lr,
                                                            Acc<T> momentum, Acc<T> weight_decay, bool proximal) {
  using A = Acc<T>;
  int j = 0;
  while (blockIdx.x >= table.first[j + 1]) ++j;
  const Group& group = table.group[j];
  T* params = static_cast<T*>(group.param);
  const T* grads = static_cast<const T*>(group.grad);
  T* momenta = static_cast<T*>(group.momentum);
  const A penalty = static_cast<A>(group.l1), threshold = lr * penalty;
  const int64_t stride = static_cast<int64_t>(table.first[j + 1] - table.first[j]) * kThreads * N;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x - table.first[j]) * kThreads + threadIdx.x) * N; at < group.numel;
       at += stride) {
    Pack<T, N> param = *reinterpret_cast<const Pack<T, N>*>(params + at);
    const Pack<T, N> grad = *reinterpret_cast<const Pack<T, N>*>(grads + at);
    Pack<T, N> state;
    if (momenta) state = *reinterpret_cast<const Pack<T, N>*>(momenta + at);
#pragma unroll
    for (int l = 0; l < N; ++l) {
      A p = convert<A>(param.x[l]);
      A g = convert<A>(grad.x[l]) + weight_decay * p;
      if (!proximal) g += penalty * A((p > 0) - (p < 0));
      if (momenta) {
        g += momentum * convert<A>(state.x[l]);
        state.x[l] = convert<T>(g);
      }
      p -= lr * g;
      if (proximal) {
        // written so that NaN stays NaN
        A size = (p < 0 ? -p : p) - threshold;
        if (size < 0) size = 0;
        p = p < 0 ? -size : size;
      }
      param.x[l] = convert<T>(p);
    }
    *reinterpret_cast<Pack<T, N>*>(params + at) = param;
    if (momenta) *reinterpret_cast<Pack<T, N>*>(momenta + at) = state;
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

int prox_sgd_step(Type type, const Group* groups, int64_t count, Step step, void* stream) {
  return with_type(type, [&](auto* element) -> int {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = kPack<T>;
    for (int packed = 0; packed < 2; ++packed) {
      Table table;
      table.count = 0;
      table.first[0] = 0;
      for (int64_t j = 0; j < count; ++j) {
        const Group& g = groups[j];
        const bool fits = g.numel % N == 0 && aligned(g.param) && aligned(g.grad) && aligned(g.momentum);
        if (g.numel > 0 && fits == (packed == 1)) {
          int64_t blocks = ceil_div(g.numel, kThreads * (packed ? N : 1));
          if (blocks > kBlocks) blocks = kBlocks;
          table.group[table.count] = g;
          table.first[table.count + 1] = table.first[table.count] + static_cast<uint32_t>(blocks);
          ++table.count;
        }
        if (table.count == kGroups || (j == count - 1 && table.count > 0)) {
          const int error =
              launch(packed ? prox_sgd_kernel<T, N> : prox_sgd_kernel<T, 1>, table.first[table.count], kThreads, 0,
                     stream, table, static_cast<Acc<T>>(step.lr), static_cast<Acc<T>>(step.momentum),
                     static_cast<Acc<T>>(step.weight_decay), step.proximal);
          if (error) return error;
          table.count = 0;
        }
      }
    }
    return cudaSuccess;
  });
}

}  // namespace fastfact_cuda
