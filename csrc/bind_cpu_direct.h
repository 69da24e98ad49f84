// Layers on one client's plain CPU tensors without PyTorch's dispatcher, through which a call takes longer than a small
// layer computes. A tensor is what `Tensor._cdata` gives: all that PyTorch's own tensor holds, so that its address is a
// handle. Outputs are handles that belong to the caller. A function returns whether it computed; where it refuses or
// fails nothing is given out, and the ops are to be called, which say why.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

namespace fastfact::direct {

// What a layer is asked for besides tensors; `Layer` of fastfact/ops/direct.py.
struct Layer {
  enum : int64_t { kLinear, kPixels, kConvolution, kReordered, kPacked } kind;
  int64_t layout, channels_last;  // of the weight
  int64_t size[4], stride[2], padding[2], dilation[2], groups;
};

// out: y of the dense layer with the weight that u, v and μ make, and that weight. μ dense (no index), compact or null.
bool layer(AtenTensorHandle out[2], const Layer& of, void* x, void* bias, void* mu, void* index, void* u, void* v);

// out: the gradients of x, the bias, μ, u and v, of those that bits 0–4 of `needs` ask for.
bool layer_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* w, void* index,
                    void* u, void* v);

// out: y of the factored layer. repeated: see `repeated_factored_conv2d`.
bool factored(AtenTensorHandle out[1], const Layer& of, bool repeated, void* x, void* u, void* v, void* values,
              void* index, void* bias);

// out: the gradients of x, u, v, the values and the bias, of those that bits 0–4 of `needs` ask for.
bool factored_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* u, void* v,
                       void* values, void* index);

// out: y of the dense layer with the weight w, which is in oneDNN's form for kReordered, a convolution, and for
// kPacked, a linear layer; in float32 that one is in MKL's, for as many rows as `groups` says.
bool dense(AtenTensorHandle out[1], const Layer& of, void* x, void* w, void* bias);

// `prox_sgd_step` where all tensors are of one stretch of memory each, those of a parameter of one form. momenta: null
// where momentum is 0.
struct Group {
  double lr, momentum, weight_decay;
  bool proximal;
};

bool prox_sgd_step(const Group& group, int64_t count, void* const* params, void* const* grads, void* const* momenta,
                   const double* l1) noexcept;

// `fastfact::adam_threshold` of tensors as for `prox_sgd_step`. how: (correction, scale, eps) of each.
bool adam_threshold(int64_t count, void* const* params, void* const* seconds, const double* how) noexcept;

// Tensors of a layer as they lie in memory, to be looked at again.
struct Watched {
  static constexpr int64_t kMost = 16, kAxes = 8;
  int64_t count, bytes;
  uint64_t form, numbers;
  void* tensors[kMost];
};

// Notes where these tensors lie, in which form, and the digest of their numbers. False where that cannot be.
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

}  // namespace fastfact::direct
