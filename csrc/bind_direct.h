// What layers without PyTorch's dispatcher share, whatever the device: see bind_cpu_direct.cpp and
// bind_cuda_direct.cpp. A tensor is what `Tensor._cdata` gives: all that PyTorch's own tensor holds, so that its
// address is a handle. Outputs are handles that belong to the caller. A function returns whether it computed; where it
// refuses or fails nothing is given out, and the ops are to be called, which say why.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "bind.h"

namespace fastfact::direct {

using bind::OptionalTensor;
using bind::Shape;
using bind::Tensor;

// What a layer is asked for besides tensors; `Layer` of fastfact/ops/direct.py.
struct Layer {
  enum : int64_t { kLinear, kPixels, kConvolution, kReordered, kPacked, kPanels } kind;
  int64_t layout, channels_last;  // of the weight
  int64_t size[4], stride[2], padding[2], dilation[2], groups;
  // Whether u, v and μ are A, B and σ of σ + scaling · BA, their layout that of `lowrank_weight`; kAdapter: of a linear
  // layer whose σ takes no gradient.
  enum : int64_t { kNone, kLowRank, kAdapter } low_rank;
  double scaling;
  enum : int64_t { kAsItIs, kHalf, kBFloat16 } cast;  // the type that autocast has layers computed in
};

struct Group {
  double lr, momentum, weight_decay;
  bool proximal;
};

// Tensors of a layer as they lie in memory, to be looked at again.
struct Watched {
  static constexpr int64_t kMost = 16, kAxes = 8;
  int64_t count, bytes;
  uint64_t form, numbers;
  bool reads;               // the numbers; not on another device than the CPU
  int64_t versions[kMost];  // that they must have, −1 for any
  void* tensors[kMost];
};

struct Memory {
  const void* data;
  int64_t bytes;
};

// What the library of a device gives out as `fastfact_direct`, for one client's plain tensors on one such device.
struct Library {
  int64_t size;  // of this, by which libraries know each other
  int32_t device_type;
  // Whether what is computed now on the device of x is only recorded, to be run later. Null: never.
  bool (*records)(void* x);
  // out: y of the dense layer with the weight that u, v and μ make, and that weight. μ dense (no index), compact or
  // null. support: of compact μ, as `Plan` of fastfact/ops/direct.py has it, or null.
  bool (*layer)(AtenTensorHandle out[2], const Layer& of, void* x, void* bias, void* mu, void* index, void* support,
                void* u, void* v);
  // out: the gradients of x, the bias, μ, u and v, of those that bits 0–4 of `needs` ask for.
  bool (*layer_backward)(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* w,
                         void* index, void* support, void* u, void* v);
  // out: y of the dense layer with the weight w, which is in oneDNN's form for kReordered, a convolution, and for
  // kPacked, a linear layer, and what `panels` makes for kPanels, a linear layer or, with `channels_last`, a
  // convolution: a 1×1 one, or one for which `convolves`.
  bool (*dense)(AtenTensorHandle out[1], const Layer& of, void* x, void* w, void* bias);
  // The step where all tensors are of one stretch of memory each, those of a parameter of one form. momenta: null where
  // momentum is 0.
  bool (*prox_sgd_step)(const Group& group, int64_t count, void* const* params, void* const* grads,
                        void* const* momenta, const double* l1) noexcept;

  // Of the CPU alone, null for another device.

  // out: y of the factored layer. repeated: see `factored_conv2d`. kept: null, or where the values go if they are cast,
  // null if they are not; backward they can stand in place of these. index: of `Layer::kAdapter` what the adapter sees
  // in place of x, which backward stands in place of x.
  bool (*factored)(AtenTensorHandle out[1], const Layer& of, bool repeated, void* x, void* u, void* v, void* values,
                   void* index, void* bias, AtenTensorHandle* kept);
  // out: the gradients of x, u, v, the values (of `Layer::kAdapter` of what stands for index) and the bias, of those
  // that bits 0–4 of `needs` ask for.
  bool (*factored_backward)(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad, void* x, void* u,
                            void* v, void* values, void* index);
  // out: the weight of a linear layer as `fastfact::pack_panels` has it, or of a convolution as `pack_conv_panels`.
  bool (*panels)(AtenTensorHandle out[1], void* w);
  // Whether a convolution of x can be computed with such a weight.
  bool (*convolves)(const Layer& of, void* x) noexcept;
  // `fastfact::adamw_step` of tensors as for `prox_sgd_step`. steps: how many each has made, one number of float32 or
  // float64, which is counted on. how: (lr, β₁, β₂, eps, weight decay, l1) of each.
  bool (*adamw_step)(int64_t count, void* const* params, void* const* grads, void* const* firsts, void* const* seconds,
                     void* const* steps, const double* how) noexcept;
  // Notes where these tensors lie, in which form, and the digest of their numbers. False where that cannot be. The
  // versions are the caller's.
  bool (*watch)(Watched& out, void* const* tensors, int64_t count) noexcept;
  // Whether they lie where they lay, in the same form, with the same numbers. These are read only if the rest is as it
  // was, so that nothing is read that may be gone.
  bool (*still)(const Watched& watched) noexcept;
  // The memory of a tensor without gaps, held (`fastfact::hold`) until it is given back. Null where it is not; the
  // caller keeps the memory from being freed meanwhile.
  Memory (*hold)(void* tensor) noexcept;
  void (*give_back)(const Memory& held) noexcept;
  // What is held of a tensor was written to, by who had asked for its memory before.
  void (*read_anew)(void* tensor) noexcept;
};

inline Shape weight_size(const Layer& of) {
  return of.kind == Layer::kLinear ? Shape{of.size[0], of.size[1]} : Shape(of.size, of.size + 4);
}

// In which a layer is computed.
inline bind::ScalarType type_for(const Layer& of, const Tensor& x) {
  using bind::ScalarType;
  bind::require(!of.cast || x.scalar_type() != ScalarType::Double, "layer", "float64 is not cast");
  return of.cast == Layer::kHalf       ? ScalarType::Half
         : of.cast == Layer::kBFloat16 ? ScalarType::BFloat16
                                       : x.scalar_type();
}

inline Tensor in_type(const Tensor& t, bind::ScalarType type) {
  return t.scalar_type() == type ? t : torch::stable::to(t, type);
}

// As autocast casts, which leaves float64 as it is.
inline Tensor by_autocast(const Tensor& t, bind::ScalarType type) {
  bind::require(t.scalar_type() != bind::ScalarType::Double, "layer", "float64 is not cast");
  return in_type(t, type);
}

// A tensor that PyTorch's own code alone reads.
inline Tensor opaque(void* tensor) {
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(reinterpret_cast<AtenTensorHandle>(&tensor), &out));
  return Tensor(out);
}

inline void give(const Tensor& t, AtenTensorHandle* to) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(t.get(), to));
}

template <class F>
bool done(AtenTensorHandle* out, int count, const F& body) noexcept {
  std::fill(out, out + count, nullptr);
  try {
    body();
    return true;
  } catch (...) {
    for (int n = 0; n < count; ++n) {
      if (out[n]) aoti_torch_delete_tensor_object(out[n]);
    }
    return false;
  }
}

struct Gradients {
  OptionalTensor x, w, bias;
};

// The convolution with the weight w, by PyTorch's function for the device.
template <class F>
Tensor convolution(F by, const Layer& of, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  const int64_t none[2] = {0, 0};
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr, y;
  TORCH_ERROR_CODE_CHECK(by(x.get(), w.get(), bias ? &of_bias : nullptr, of.stride, 2, of.padding, 2, of.dilation, 2, 0,
                            none, 2, of.groups, &y));
  return Tensor(y);
}

// Its gradients, of those that are asked for.
template <class F>
Gradients convolution_backward(F by, const Layer& of, const Tensor& grad, const Tensor& x, const Tensor& w, bool of_x,
                               bool of_w, bool of_bias) {
  const int64_t none[2] = {0, 0}, o[1] = {w.size(0)}, *sizes = o;
  const int32_t mask[3] = {of_x, of_w, of_bias};
  AtenTensorHandle dx, dw, dbias;
  TORCH_ERROR_CODE_CHECK(by(grad.get(), x.get(), w.get(), of_bias ? &sizes : nullptr, 1, of.stride, 2, of.padding, 2,
                            of.dilation, 2, 0, none, 2, of.groups, mask, 3, &dx, &dw, &dbias));
  const Tensor found[3] = {Tensor(dx), Tensor(dw), Tensor(dbias)};
  Gradients out;
  if (of_x) out.x = found[0];
  if (of_w) out.w = found[1];
  if (of_bias) out.bias = found[2];
  return out;
}

// A tensor as it lies in memory.
struct Form {
  int32_t type, device, number;  // the device's
  int64_t dim, numel, *sizes, *strides;
  void* data;

  bool read(void* tensor) {
    const auto handle = reinterpret_cast<AtenTensorHandle>(&tensor);
    return !aoti_torch_get_data_ptr(handle, &data) && !aoti_torch_get_dim(handle, &dim) &&
           !aoti_torch_get_numel(handle, &numel) && !aoti_torch_get_sizes(handle, &sizes) &&
           !aoti_torch_get_strides(handle, &strides) && !aoti_torch_get_dtype(handle, &type) &&
           !aoti_torch_get_device_type(handle, &device) && !aoti_torch_get_device_index(handle, &number) &&
           dim <= Watched::kAxes && (data || !numel);
  }

  bool is_like(const Form& other) const {
    if (type != other.type || device != other.device || number != other.number || dim != other.dim) return false;
    for (int64_t d = 0; d < dim; ++d) {
      if (sizes[d] != other.sizes[d] || (sizes[d] > 1 && strides[d] != other.strides[d])) return false;
    }
    return true;
  }

  // Whether the elements fill one stretch of memory, in whatever order.
  bool fills_memory() const {
    if (numel == 0) return true;
    int64_t expected = 1;
    for (int64_t found = 0, axes = 0; axes < dim; axes += found, found = 0) {
      for (int64_t d = dim; d-- > 0;) {
        if (sizes[d] > 1 && strides[d] == expected) {
          expected *= sizes[d], found = 1;
          break;
        }
      }
      if (!found) return expected == numel;
    }
    return expected == numel;
  }
};

// The type of a tensor as the kernels name it (see `bind::type_of`).
template <class Type>
std::optional<Type> kind_of(const Form& tensor) {
  const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_bfloat16(),
                           aoti_torch_dtype_float16()};
  for (int n = 0; n < 4; ++n) {
    if (tensor.type == known[n]) return Type(n);
  }
  return std::nullopt;
}

// A parameter of `prox_sgd_step`, as it and what belongs to it lie in memory.
struct Stepped {
  Form param, grad, momentum;

  // The one of this number; false where it cannot be stepped.
  bool read(int64_t n, void* const* params, void* const* grads, void* const* momenta, const double* l1) {
    if (!param.read(params[n]) || !grad.read(grads[n]) || !param.fills_memory() || !grad.is_like(param)) return false;
    if (momenta && (!momentum.read(momenta[n]) || !momentum.is_like(param))) return false;
    if (!momenta) momentum.data = nullptr;
    return l1[n] >= 0 && std::isfinite(l1[n]);
  }
};

}  // namespace fastfact::direct
