// A layer as one call forward and one backward, without PyTorch's dispatcher, through which a call takes longer than a
// small layer computes. Called through ctypes from fastfact/ops/direct.py, where nothing transforms: on plain tensors
// of one client. A tensor is what `Tensor._cdata` gives: all that PyTorch's own tensor holds, so that its address is a
// handle. Outputs are handles that belong to the caller. A call returns 1, or 0 where it refuses or fails: then the ops
// are to be called, which say why.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>

#include "bind_cpu.h"
#include "cpu/kernels.h"

namespace {

using namespace fastfact::bind;
using namespace fastfact::ops;

// What a layer is asked for besides tensors; `Layer` of fastfact/ops/direct.py.
struct Layer {
  enum : int64_t { kLinear, kPixels, kConvolution } kind;
  int64_t layout, channels_last;  // of the weight
  int64_t size[4], stride[2], padding[2], dilation[2], groups;

  Shape weight_size() const { return kind == kLinear ? Shape{size[0], size[1]} : Shape(size, size + 4); }
};

Tensor borrowed(void* tensor) {
  const auto of_caller = reinterpret_cast<AtenTensorHandle>(&tensor);
  void* data = nullptr;
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(of_caller, &data));
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(of_caller, &out));
  const Tensor t(out);
  require(data || t.numel() == 0, "layer", "a tensor has no memory");
  return t;
}

OptionalTensor borrowed_if(void* tensor) { return tensor ? OptionalTensor(borrowed(tensor)) : std::nullopt; }

void give(const Tensor& t, AtenTensorHandle* to) { TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(t.get(), to)); }

template <class F>
int32_t done(AtenTensorHandle* out, int count, const F& body) noexcept {
  std::fill(out, out + count, nullptr);
  try {
    body();
    return 1;
  } catch (...) {
    for (int n = 0; n < count; ++n) {
      if (out[n]) aoti_torch_delete_tensor_object(out[n]);
    }
    return 0;
  }
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  if (!bias) return multiply(out, a, b);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1, 1));
}

// x […, channels], or images with their channels last, as a matrix of its rows, or pixels.
Tensor rows_of(const Layer& layer, const Tensor& x) {
  if (layer.kind == Layer::kPixels) {
    const int64_t c = x.size(1);
    if (is_dense(x, {0, 2, 3, 1})) return viewed(x, {x.size(0) * x.size(2) * x.size(3), c}, {c, 1});
    const Tensor last = torch::stable::transpose(torch::stable::transpose(x, 1, 2), 2, 3);
    return viewed(torch::stable::contiguous(last), {x.size(0) * x.size(2) * x.size(3), c}, {c, 1});
  }
  if (x.dim() == 2) return x;
  const int64_t c = x.size(x.dim() - 1);
  const Tensor dense = is_dense(x, 0) ? x : torch::stable::contiguous(x);
  return viewed(dense, {c ? x.numel() / c : 0, c}, {c, 1});
}

// An uninitialised tensor for rows of so many channels, where x has rows of others.
Tensor like_rows(const Layer& layer, const Tensor& x, int64_t channels) {
  Shape sizes = shape_of(x);
  if (layer.kind != Layer::kPixels) {
    sizes.back() = channels;
    return empty(x, sizes);
  }
  // PyTorch tells the format of one pixel by its strides.
  const int64_t h = sizes[2], w = sizes[3], gap = h == 1 && w == 1 && x.stride(3) == 1 ? 1 : channels;
  sizes[1] = channels;
  return viewed(empty(x, {sizes[0], h, w, channels}), sizes, {h * w * channels, 1, w * gap, gap});
}

// W [o, i] or [o, i, 1, 1] as a matrix.
Tensor matrix(const Tensor& w) { return viewed(w, {w.size(0), w.size(1)}, {w.stride(0), w.stride(1)}); }

Tensor dense_layer(const Layer& layer, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (layer.kind != Layer::kConvolution) {
    require(x.size(layer.kind == Layer::kPixels ? 1 : x.dim() - 1) == w.size(1), "layer", "x does not fit");
    const Tensor y = like_rows(layer, x, w.size(0));
    multiply(rows_of(layer, y), rows_of(layer, x), transposed(matrix(w)), bias);
    return y;
  }
  const int64_t none[2] = {0, 0};
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr, y;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(x.get(), w.get(), bias ? &of_bias : nullptr, layer.stride, 2,
                                                    layer.padding, 2, layer.dilation, 2, 0, none, 2, layer.groups, &y));
  return Tensor(y);
}

// The gradient of a bias, from that of rows or images.
Tensor channel_sums(const Tensor& grad) {
  const bool images = grad.dim() == 4, last = images && is_dense(grad, {0, 2, 3, 1});
  const Tensor dense = last || is_dense(grad, 0) ? grad : torch::stable::contiguous(grad);
  const int64_t channels = grad.size(images ? 1 : grad.dim() - 1), plane = images ? grad.size(2) * grad.size(3) : 1;
  const int64_t n = images ? grad.size(0) : channels ? grad.numel() / channels : 0;
  const Tensor out = empty(grad, {channels});
  const auto type = type_of<fastfact::Type>("layer", grad);
  fastfact::channel_sums({type, last ? n * plane : n, channels, last ? 1 : plane, dense.data_ptr(), out.data_ptr()},
                         parallel_for);
  return out;
}

struct Gradients {
  OptionalTensor x, w, bias;
};

Gradients dense_layer_backward(const Layer& layer, const Tensor& grad, const Tensor& x, const Tensor& w, bool of_x,
                               bool of_w, bool of_bias) {
  Gradients out;
  if (layer.kind != Layer::kConvolution) {
    const Tensor rows = rows_of(layer, grad), by = matrix(w);
    if (of_x) {
      out.x = like_rows(layer, x, w.size(1));
      multiply(rows_of(layer, *out.x), rows, by);
    }
    if (of_w) {
      out.w = empty(x, shape_of(w));
      multiply(matrix(*out.w), transposed(rows), rows_of(layer, x));
    }
    if (of_bias) out.bias = channel_sums(rows);
    return out;
  }
  const int64_t none[2] = {0, 0}, o[1] = {w.size(0)}, *sizes = o;
  const int32_t mask[3] = {of_x, of_w, of_bias};
  AtenTensorHandle dx, dw, dbias;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution_backward(grad.get(), x.get(), w.get(), of_bias ? &sizes : nullptr,
                                                             1, layer.stride, 2, layer.padding, 2, layer.dilation, 2, 0,
                                                             none, 2, layer.groups, mask, 3, &dx, &dw, &dbias));
  const Tensor found[3] = {Tensor(dx), Tensor(dw), Tensor(dbias)};
  if (of_x) out.x = found[0];
  if (of_w) out.w = found[1];
  if (of_bias) out.bias = found[2];
  return out;
}

}  // namespace

#define DIRECT extern "C" __attribute__((visibility("default"))) int32_t

// out: y of the dense layer with the weight that u, v and μ make, and that weight. μ dense (no index), compact or null.
DIRECT fastfact_layer(AtenTensorHandle out[2], const Layer* layer, void* x_, void* bias_, void* mu_, void* index,
                      void* u, void* v) noexcept {
  return done(out, 2, [&] {
    const OptionalTensor mu = borrowed_if(mu_), bias = borrowed_if(bias_);
    const Tensor x = borrowed(x_);
    const Tensor w =
        index ? compact_weight(borrowed(u), borrowed(v), *mu, borrowed(index), layer->layout, layer->channels_last)
              : rank1_weight(mu, borrowed(u), borrowed(v), layer->layout, layer->channels_last);
    give(dense_layer(*layer, x, w, bias), out);
    give(w, out + 1);
  });
}

// out: the gradients of x, the bias, μ, u and v, of those that bits 0–4 of `needs` ask for.
DIRECT fastfact_layer_backward(AtenTensorHandle out[5], const Layer* layer, int64_t needs, void* grad, void* x, void* w,
                               void* index, void* u_, void* v_) noexcept {
  return done(out, 5, [&] {
    const Gradients found =
        dense_layer_backward(*layer, borrowed(grad), borrowed(x), borrowed(w), needs & 1, needs >> 2, needs & 2);
    if (found.x) give(*found.x, out);
    if (found.bias) give(*found.bias, out + 1);
    if (!found.w) return;
    const Tensor u = borrowed(u_), v = borrowed(v_);
    const int64_t of_factors = needs >> 3 & 3;
    if (index) {
      const auto [du, dv, dvalues] =
          compact_weight_backward(*found.w, u, v, u, borrowed(index), layer->layout, of_factors | (needs & 4));
      if (needs & 4) give(dvalues, out + 2);
      if (needs & 8) give(du, out + 3);
      if (needs & 16) give(dv, out + 4);
      return;
    }
    if (needs & 4) give(*found.w, out + 2);
    if (!of_factors) return;
    const auto [du, dv] = rank1_weight_backward(*found.w, u, v, layer->layout, of_factors);
    if (needs & 8) give(du, out + 3);
    if (needs & 16) give(dv, out + 4);
  });
}

// out: y of the factored layer. repeated: see `repeated_factored_conv2d`.
DIRECT fastfact_factored(AtenTensorHandle out[1], const Layer* layer, int32_t repeated, void* x_, void* u_, void* v_,
                         void* values_, void* index_, void* bias_) noexcept {
  return done(out, 1, [&] {
    const Tensor x = borrowed(x_);
    const OptionalTensor u = borrowed_if(u_), v = borrowed_if(v_), values = borrowed_if(values_),
                         index = borrowed_if(index_), bias = borrowed_if(bias_);
    const Shape size = layer->weight_size();
    if (layer->kind == Layer::kLinear) {
      give(factored_linear(x, u, v, values, index, bias, size), out);
    } else {
      const auto convolve = repeated ? repeated_factored_conv2d : factored_conv2d;
      const Shape stride(layer->stride, layer->stride + 2), padding(layer->padding, layer->padding + 2),
          dilation(layer->dilation, layer->dilation + 2);
      give(convolve(x, u, v, values, index, bias, size, stride, padding, dilation, layer->groups), out);
    }
  });
}

// out: the gradients of x, u, v, the values and the bias, of those that bits 0–4 of `needs` ask for.
DIRECT fastfact_factored_backward(AtenTensorHandle out[5], const Layer* layer, int64_t needs, void* grad_, void* x_,
                                  void* u_, void* v_, void* values_, void* index_) noexcept {
  return done(out, 5, [&] {
    const Tensor grad = borrowed(grad_), x = borrowed(x_);
    const OptionalTensor u = borrowed_if(u_), v = borrowed_if(v_), values = borrowed_if(values_),
                         index = borrowed_if(index_);
    const Shape size = layer->weight_size();
    const bool linear = layer->kind == Layer::kLinear;
    if (needs & 15) {
      const auto [dx, du, dv, dvalues] =
          linear ? factored_linear_backward(grad, x, u, v, values, index, size, needs & 15)
                 : factored_conv2d_backward(grad, x, u, v, values, index, size, Shape(layer->stride, layer->stride + 2),
                                            Shape(layer->padding, layer->padding + 2),
                                            Shape(layer->dilation, layer->dilation + 2), layer->groups, needs & 15);
      if (needs & 1) give(dx, out);
      if (needs & 2) give(du, out + 1);
      if (needs & 4) give(dv, out + 2);
      if (needs & 8) give(dvalues, out + 3);
    }
    if (needs & 16) give(channel_sums(grad), out + 4);
  });
}
