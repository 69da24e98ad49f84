// Layers on one client's plain CPU tensors without PyTorch's dispatcher, through which a call takes longer than a small
// layer computes. What the functions take and give: see bind_direct.h.
#pragma once

#include "bind_direct.h"

namespace fastfact::direct {

// out: y of the dense layer with the weight that u, v and μ make, and that weight. μ dense (no index), compact or null.
bool layer(AtenTensorHandle out[2], const Layer& of, void* x, void* bias, void* mu, void* index, void* u, void* v);

// out: the gradients of x, the bias, μ, u and v, of those that bits 0–4 of `needs` ask for.
bool layer_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* w, void* index,
                    void* u, void* v);

// out: y of the factored layer. repeated: see `factored_conv2d`. kept: null, or where the values go if they are cast,
// null if they are not; backward they can stand in place of these. index: of `Layer::kAdapter` what the adapter sees in
// place of x, which backward stands in place of x.
bool factored(AtenTensorHandle out[1], const Layer& of, bool repeated, void* x, void* u, void* v, void* values,
              void* index, void* bias, AtenTensorHandle* kept = nullptr);

// out: the gradients of x, u, v, the values (of `Layer::kAdapter` of what stands for index) and the bias, of those that
// bits 0–4 of `needs` ask for.
bool factored_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* u, void* v,
                       void* values, void* index);

// out: y of the dense layer with the weight w, which is in oneDNN's form for kReordered, a convolution, and for
// kPacked, a linear layer, and what `panels` makes for kPanels, a linear layer or, with `channels_last`, a 1×1
// convolution.
bool dense(AtenTensorHandle out[1], const Layer& of, void* x, void* w, void* bias);

// out: the weight of a linear layer as `fastfact::pack_panels` has it.
bool panels(AtenTensorHandle out[1], void* w);

// See `Library`.
bool prox_sgd_step(const Group& group, int64_t count, void* const* params, void* const* grads, void* const* momenta,
                   const double* l1) noexcept;

// `fastfact::adamw_step` of tensors as for `prox_sgd_step`. steps: how many each has made, one number of float32 or
// float64, which is counted on. how: (lr, β₁, β₂, eps, weight decay, l1) of each.
bool adamw_step(int64_t count, void* const* params, void* const* grads, void* const* firsts, void* const* seconds,
                void* const* steps, const double* how) noexcept;

// Tensors of a layer as they lie in memory, to be looked at again.
struct Watched {
  static constexpr int64_t kMost = 16, kAxes = kMostAxes;
  int64_t count, bytes;
  uint64_t form, numbers;
  bool reads;               // the numbers; not on another device than the CPU
  int64_t versions[kMost];  // that they must have, −1 for any
  void* tensors[kMost];
};

// Notes where these tensors lie, in which form, and the digest of their numbers. False where that cannot be. The
// versions are the caller's.
bool watch(Watched& out, void* const* tensors, int64_t count) noexcept;

// Whether they lie where they lay, in the same form, with the same numbers. These are read only if the rest is as it
// was, so that nothing is read that may be gone.
bool still(const Watched& watched) noexcept;

// The memory of a tensor without gaps, held (`fastfact::hold`) until it is given back. Null where it is not; the caller
// keeps the memory from being freed meanwhile.
struct Memory {
  const void* data;
  int64_t bytes;
};
Memory hold(void* tensor) noexcept;
void give_back(const Memory& held) noexcept;

// What is held of a tensor was written to, by who had asked for its memory before.
void read_anew(void* tensor) noexcept;

}  // namespace fastfact::direct
