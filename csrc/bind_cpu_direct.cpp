// Layers on one client's plain CPU tensors without PyTorch's dispatcher, through which a call takes longer than a small
// layer computes. What the functions take and give: see `Library` in bind_direct.h.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <cmath>
#include <cstring>

#include "bind_cpu.h"
#include "bind_direct.h"
#include "cpu/factored_conv.h"

// Not there in a PyTorch without oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_mkldnn__convolution_pointwise(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, const int64_t* padding, int64_t,
    const int64_t* stride, int64_t, const int64_t* dilation, int64_t, int64_t groups, const char* then, const double**,
    int64_t, const char**, AtenTensorHandle* out);
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(AtenTensorHandle x, AtenTensorHandle w,
                                                                                 AtenTensorHandle* bias,
                                                                                 const char* then, const double**,
                                                                                 int64_t, const char**,
                                                                                 AtenTensorHandle* out);

namespace fastfact::direct {
namespace {

using namespace fastfact::bind;
using namespace fastfact::ops;

Tensor borrowed(void* tensor) {
  const Tensor t = opaque(tensor);
  require(data_of(t) || t.numel() == 0, "layer", "a tensor has no memory");
  return t;
}

OptionalTensor borrowed_if(void* tensor) { return tensor ? OptionalTensor(borrowed(tensor)) : std::nullopt; }

// What a layer is computed from: in autocast's type, if it casts.
class Operands {
 public:
  Operands(const Layer& of, void* x) : casts_(of.cast), x_(borrowed(x)), type_(type_for(of, x_)) {}

  Tensor x() const { return cast(x_); }
  Tensor operator()(void* tensor) const { return cast(borrowed(tensor)); }
  OptionalTensor if_given(void* tensor) const { return tensor ? OptionalTensor((*this)(tensor)) : std::nullopt; }

 private:
  const bool casts_;
  const Tensor x_;
  const ScalarType type_;

  Tensor cast(const Tensor& t) const { return casts_ ? by_autocast(t, type_) : t; }
};

void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

constexpr int64_t kSmall = 1 << 18;  // bytes

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  if (!bias) return multiply(out, a, b);
  const int64_t rows = out.size(0), width = out.size(1), bytes = width * bias->element_size();
  const bool fits = bias->dim() == 1 && bias->size(0) == width && bias->scalar_type() == out.scalar_type();
  if (fits && rows * bytes <= kSmall && is_dense(*bias, 0) && is_dense(out, 0)) {
    // As PyTorch does, for whose copies a few rows are too short.
    char* const to = static_cast<char*>(out.data_ptr());
    if (rows) std::memcpy(to, data_of(*bias), bytes);
    for (int64_t done = 1; done < rows; done *= 2) {
      std::memcpy(to + done * bytes, to, std::min(done, rows - done) * bytes);
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, 1));
    return;
  }
  const auto type = out.scalar_type();
  if (fits && (type == ScalarType::Float || type == ScalarType::Double) && is_dense(*bias, 0) && is_dense(out, 0)) {
    // PyTorch's begins with copies of the bias, on one thread.
    multiply(out, a, b);
    fastfact::add_bias({type_of<fastfact::Type>("layer", out), rows, width, data_of(*bias), out.data_ptr()},
                       parallel_for);
    return;
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1, 1));
}

// By how much the rows of x […, channels] are apart, 0 if not all by the same or neither rows nor columns lie in order.
int64_t step_of_rows(const Tensor& x) {
  const int64_t c = x.size(x.dim() - 1), across = x.stride(x.dim() - 1);
  int64_t step = c, rows = 1;
  for (int64_t d = x.dim() - 1; d-- > 0;) {
    if (x.size(d) == 1) continue;
    if (rows == 1) step = x.stride(d);
    if (x.stride(d) != step * rows) return 0;
    rows *= x.size(d);
  }
  const bool in_rows = (across == 1 || c == 1) && step >= c, in_columns = step == 1 && across >= rows;
  return in_rows || in_columns ? step : 0;
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
  const int64_t c = x.size(x.dim() - 1), n = c ? x.numel() / c : 0;
  if (const int64_t step = step_of_rows(x)) return viewed(x, {n, c}, {step, x.stride(x.dim() - 1)});
  return viewed(torch::stable::contiguous(x), {n, c}, {c, 1});
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

// Rows [n, channels] as those of x […, channels of x] stand.
Tensor as_rows_of(const Tensor& x, const Tensor& rows) {
  Shape sizes = shape_of(x), strides(sizes.size());
  sizes.back() = rows.size(1);
  for (int64_t d = sizes.size(), step = 1; d-- > 0; step *= sizes[d]) strides[d] = step;
  return viewed(rows, sizes, strides);
}

// W [o, i] or [o, i, 1, 1] as a matrix.
Tensor matrix(const Tensor& w) { return viewed(w, {w.size(0), w.size(1)}, {w.stride(0), w.stride(1)}); }

constexpr int64_t kFewRows = 16;

// y from W by columns, where it is small; whether it is.
bool multiply_few(const Layer& layer, const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Tensor& y) {
  const int64_t o = w.size(0), i = w.size(1), row = w.stride(1), n = o ? y.numel() / o : 0;
  const auto type = x.scalar_type();
  if (!n || n > kFewRows || !i || i * o > 1 << 16 || w.stride(0) != 1 || row < o) return false;
  if ((type != ScalarType::Float && type != ScalarType::Double) || w.scalar_type() != type) return false;
  if (layer.kind == Layer::kPixels ? !is_dense(x, {0, 2, 3, 1}) : !is_dense(x, 0)) return false;
  if (bias && (bias->scalar_type() != type || bias->dim() != 1 || bias->size(0) != o || !is_dense(*bias, 0))) {
    return false;
  }
  fastfact::dense_rows({type_of<fastfact::Type>("layer", x), n, i, o, row, data_of(x), data_of(w),
                        bias ? data_of(*bias) : nullptr, y.data_ptr()},
                       parallel_for);
  return true;
}

// w in PyTorch's form or in oneDNN's.
AtenTensorHandle linear_by_onednn(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr, y;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu__linear_pointwise(x.get(), w.get(), bias ? &of_bias : nullptr, "none", nullptr, 0, nullptr, &y));
  return y;
}

// Whether oneDNN's linear layer serves: PyTorch's product in bfloat16 takes up to half as long again with a bias, with
// which it begins.
bool adds_bias_last(const Layer& layer, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  static const bool has_bfloat16 =
      aoti_torch_cpu__linear_pointwise && !std::strcmp(fastfact::instruction_set(), "x86-64-v4");
  constexpr auto kType = ScalarType::BFloat16;
  return has_bfloat16 && bias && layer.kind == Layer::kLinear && x.scalar_type() == kType && x.numel() &&
         w.scalar_type() == kType && is_dense(w, 0) && bias->scalar_type() == kType && bias->dim() == 1 &&
         bias->size(0) == w.size(0) && is_dense(*bias, 0);
}

// Whether a convolution with W made, or, `backward`, its gradients are computed by this library, W being a dense μ
// without factors: PyTorch takes up to three times as long for depthwise kernels and contiguous images, and backward up
// to twenty times, but for 3×3 ones of float32 in channels_last.
bool is_own_depthwise(const Layer& of, const Tensor& x, bool backward) {
  constexpr int64_t kFewest = 8;
  if (of.kind != Layer::kConvolution || of.size[1] != 1 || of.groups != of.size[0] || of.groups < kFewest) return false;
  if (x.dim() != 4 || x.scalar_type() == ScalarType::Double) return false;
  const bool narrow = x.scalar_type() != ScalarType::Float;
  return !is_dense(x, {0, 2, 3, 1}) || (backward && (narrow || of.size[2] * of.size[3] > 9));
}

// The settings of a convolution as ops take them.
struct Steps {
  explicit Steps(const Layer& of)
      : stride(of.stride, of.stride + 2), padding(of.padding, of.padding + 2), dilation(of.dilation, of.dilation + 2) {}

  const Shape stride, padding, dilation;
};

// The convolution of x where this library computes it by AMX.
std::optional<fastfact::Conv> conv_in_pieces(const Layer& of, const Tensor& x, bool backward) {
  const int64_t* const size = of.size;
  const bool fits = x.dim() == 4 && of.groups == 1 && x.scalar_type() == ScalarType::Float &&
                    is_dense(x, {0, 2, 3, 1}) && x.size(1) == size[1];
  if (!fits) return std::nullopt;
  fastfact::Conv c{x.size(0), 1, size[1], size[0], x.size(2), x.size(3), size[2], size[3]};
  c.x_channels_last = c.y_channels_last = true;
  for (int d = 0; d < 2; ++d) {
    // What PyTorch refuses is left to it.
    if (of.stride[d] != 1 || of.padding[d] < 0 || of.dilation[d] < 1) return std::nullopt;
    c.stride[d] = 1, c.padding[d] = of.padding[d], c.dilation[d] = of.dilation[d];
    (d ? c.ow : c.oh) = x.size(2 + d) + 2 * of.padding[d] - of.dilation[d] * (size[2 + d] - 1);
    if (c.oh < 1 || (d && c.ow < 1)) return std::nullopt;
  }
  return fastfact::convolves_in_pieces(c, backward) ? std::optional(c) : std::nullopt;
}

// The same by w.
std::optional<fastfact::Conv> conv_in_pieces(const Layer& of, const Tensor& x, const Tensor& w, bool backward) {
  const bool fits = of.kind == Layer::kConvolution && w.dim() == 4 && w.scalar_type() == ScalarType::Float &&
                    is_dense(w, {0, 2, 3, 1}) && shape_of(w) == Shape(of.size, of.size + 4);
  return fits ? conv_in_pieces(of, x, backward) : std::nullopt;
}

const float* floats_of(const Tensor& t) { return static_cast<const float*>(data_of(t)); }

// packed: w is what `pack_conv_panels` made of W.
Tensor conv_by_amx(const fastfact::Conv& c, const Tensor& x, const Tensor& w, const OptionalTensor& bias, bool packed) {
  if (bias) expect("layer", "bias", *bias, {c.o}, x);
  const Tensor y = empty(x, {c.n, c.o, c.oh, c.ow}, {0, 2, 3, 1});
  const OptionalTensor added = bias && !is_dense(*bias, 0) ? torch::stable::contiguous(*bias) : bias;
  fastfact::dense_conv(
      {c, floats_of(x), packed ? nullptr : floats_of(w), added ? floats_of(*added) : nullptr,
       static_cast<float*>(y.data_ptr()), torch::stable::get_num_threads(), packed ? floats_of(w) : nullptr},
      parallel_for);
  return y;
}

Tensor dense_layer(const Layer& layer, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (layer.kind != Layer::kConvolution) {
    require(x.size(layer.kind == Layer::kPixels ? 1 : x.dim() - 1) == w.size(1), "layer", "x does not fit");
    if (adds_bias_last(layer, x, w, bias)) return Tensor(linear_by_onednn(x, w, bias));
    const Tensor y = like_rows(layer, x, w.size(0));
    if (multiply_few(layer, x, w, bias, y)) return y;
    multiply(rows_of(layer, y), rows_of(layer, x), transposed(matrix(w)), bias);
    return y;
  }
  if (is_own_depthwise(layer, x, false)) {
    const Steps by(layer);
    return factored_conv2d(x, std::nullopt, std::nullopt, w, std::nullopt, bias, weight_size(layer), by.stride,
                           by.padding, by.dilation, layer.groups, false);
  }
  if (const auto c = conv_in_pieces(layer, x, w, false)) return conv_by_amx(*c, x, w, bias, false);
  return convolution(aoti_torch_cpu_convolution, layer, x, w, bias);
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

Gradients dense_layer_backward(const Layer& layer, const Tensor& grad, const Tensor& x, const Tensor& w, bool of_x,
                               bool of_w, bool of_bias) {
  if (layer.kind != Layer::kConvolution) {
    Gradients out;
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
  if ((of_x || of_w) && is_own_depthwise(layer, x, true)) {
    const Steps by(layer);
    auto [dx, du, dv, dw] =
        factored_conv2d_backward(grad, x, std::nullopt, std::nullopt, w, std::nullopt, weight_size(layer), by.stride,
                                 by.padding, by.dilation, layer.groups, of_x | of_w << 3);
    Gradients out;
    if (of_x) out.x = dx;
    if (of_w) out.w = dw;
    if (of_bias) out.bias = channel_sums(grad);
    return out;
  }
  if (const auto c = conv_in_pieces(layer, x, w, true); c && is_dense(grad, {0, 2, 3, 1})) {
    Gradients out;
    if (of_x) out.x = empty(x, {c->n, c->i, c->h, c->w}, {0, 2, 3, 1});
    if (of_w) out.w = empty(x, {c->o, c->i, c->kh, c->kw}, {0, 2, 3, 1});
    const auto to = [](const OptionalTensor& t) { return t ? static_cast<float*>(t->data_ptr()) : nullptr; };
    fastfact::dense_conv_backward(
        {*c, floats_of(x), floats_of(grad), floats_of(w), to(out.x), to(out.w), torch::stable::get_num_threads()},
        parallel_for);
    if (of_bias) out.bias = channel_sums(grad);
    return out;
  }
  return convolution_backward(aoti_torch_cpu_convolution_backward, layer, grad, x, w, of_x, of_w, of_bias);
}

// The factors of a layer as those of a rank-1 weight, and their gradients as its own.
class Factors {
 public:
  Factors(const Layer& of, OptionalTensor u_, OptionalTensor v_) : u(std::move(u_)), v(std::move(v_)) {
    if (!of.low_rank) return;
    low_rank_.emplace("layer", *u, *v, of.layout, weight_size(of), of.scaling);
    u = low_rank_->u, v = low_rank_->v;
  }

  OptionalTensor u, v;

  // Bits 0 and 1, which ask for the gradients of the layer's two factors, as those that ask for u's and v's.
  int64_t needs(int64_t of_layer) const { return low_rank_ ? low_rank_->needs(of_layer) : of_layer; }

  void give(int64_t of_layer, const Tensor& du, const Tensor& dv, AtenTensorHandle* first,
            AtenTensorHandle* second) const {
    if (of_layer & 1) direct::give(low_rank_ ? low_rank_->of_a(du, dv) : du, first);
    if (of_layer & 2) direct::give(low_rank_ ? low_rank_->of_b(du, dv) : dv, second);
  }

 private:
  std::optional<LowRankFactors> low_rank_;
};

void add_product(const Tensor& out, const Tensor& a, const Tensor& b, double scaling) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, scaling));
}

Tensor product(const Tensor& a, const Tensor& b, double scaling) {
  const Tensor out = empty(a, {a.size(0), b.size(1)});
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 0, scaling));
  return out;
}

// A linear layer y = x σᵀ + scaling · (seen aᵀ) bᵀ + bias. seen: what the adapter sees in place of x, if given.
class Adapter {
 public:
  Adapter(const Layer& of, const Tensor& a, const Tensor& b, const Tensor& sigma)
      : of_(of),
        turned_(of.layout != fastfact::kView),
        a_(turned_ ? transposed(b) : a),
        b_(turned_ ? transposed(a) : b),
        sigma_(sigma) {
    const int64_t o = of.size[0], i = of.size[1], rank = a.size(0);
    require(of.kind == Layer::kLinear, "layer", "an adapter is one of a linear layer");
    expect("layer", "sigma", sigma, {o, i}, a);
    expect("layer", "a", a_, {rank, i}, sigma);
    expect("layer", "b", b_, {o, rank}, sigma);
  }

  Tensor forward(const Tensor& x, const OptionalTensor& seen, const OptionalTensor& bias) const {
    if (seen) expect("layer", "seen", *seen, shape_of(x), x);
    const Tensor y = dense_layer(of_, x, sigma_, bias), rows = rows_of(of_, seen ? *seen : x);
    add_product(rows_of(of_, y), product(rows, transposed(a_), 1), transposed(b_), of_.scaling);
    return y;
  }

  // out: the gradients of x, A, B and what the adapter sees in place of x, of those that bits 0–3 of `needs` ask for.
  // x: what the adapter sees.
  void backward(int64_t needs, const Tensor& grad, const Tensor& x, bool in_place_of_x, AtenTensorHandle* out) const {
    const Tensor dy = rows_of(of_, grad), rows = rows_of(of_, x);
    const bool of_a = needs >> (turned_ ? 2 : 1) & 1, of_b = needs >> (turned_ ? 1 : 2) & 1;
    const bool of_seen = needs & (in_place_of_x ? 8 : 1);
    OptionalTensor of_hidden;
    if (of_seen || of_a) of_hidden = product(dy, b_, of_.scaling);
    if (needs & 1) {
      const Tensor dx = like_rows(of_, x, of_.size[1]);
      multiply(rows_of(of_, dx), dy, sigma_);
      if (!in_place_of_x) add_product(rows_of(of_, dx), *of_hidden, a_, 1);
      give(dx, out);
    }
    if (in_place_of_x && of_seen) {
      const Tensor dseen = like_rows(of_, x, of_.size[1]);
      multiply(rows_of(of_, dseen), *of_hidden, a_);
      give(dseen, out + 3);
    }
    if (of_a) give_product(*of_hidden, rows, 1, out + (turned_ ? 2 : 1));
    if (of_b) give_product(dy, product(rows, transposed(a_), 1), of_.scaling, out + (turned_ ? 1 : 2));
  }

 private:
  const Layer& of_;
  const bool turned_;  // A is bᵀ and B is aᵀ
  const Tensor a_, b_, sigma_;

  // leftᵀ right, or rightᵀ left where the factors are turned.
  void give_product(const Tensor& left, const Tensor& right, double scaling, AtenTensorHandle* to) const {
    direct::give(turned_ ? product(transposed(right), left, scaling) : product(transposed(left), right, scaling), to);
  }
};

// Whether a linear layer has so few rows that du = (dy vᵀ)ᵀ x and dv = (x uᵀ)ᵀ dy take less than sums over dW.
bool has_few_rows(const Layer& of, const Tensor& grad) {
  constexpr int64_t kDearer = 3;  // than a product over dW, one over the rows
  const int64_t o = of.size[0], i = of.size[1];
  return of.kind == Layer::kLinear && kDearer * grad.numel() * (i + o) < i * o * o;
}

bool layer(AtenTensorHandle out[2], const Layer& of, void* x_, void* bias_, void* mu_, void* index, void*, void* u,
           void* v) {
  return done(out, 2, [&] {
    const Operands in(of, x_);
    const OptionalTensor mu = in.if_given(mu_), bias = in.if_given(bias_);
    const Tensor w = of.low_rank
                         ? lowrank_weight(mu, in(u), in(v), of.layout, weight_size(of), of.scaling, of.channels_last)
                     : index ? compact_weight(in(u), in(v), *mu, borrowed(index), of.layout, of.channels_last)
                             : rank1_weight(mu, in(u), in(v), of.layout, of.channels_last);
    give(dense_layer(of, in.x(), w, bias), out);
    give(w, out + 1);
  });
}

bool layer_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad_, void* x_, void* w,
                    void* index, void*, void* u_, void* v_) {
  return done(out, 5, [&] {
    const Operands in(of, x_);
    const Tensor grad = borrowed(grad_), x = in.x();
    int64_t of_factors = needs >> 3 & 3;
    if (of_factors && has_few_rows(of, grad)) {
      const Factors factors(of, in(u_), in(v_));
      const auto [none, du, dv, values] =
          factored_linear_backward(rows_of(of, grad), rows_of(of, x), factors.u, factors.v, std::nullopt, std::nullopt,
                                   weight_size(of), factors.needs(of_factors) << 1);
      factors.give(of_factors, du, dv, out + 3, out + 4);
      of_factors = 0, needs &= 7;
    }
    const Gradients found = dense_layer_backward(of, grad, x, borrowed(w), needs & 1, needs >> 2, needs & 2);
    if (found.x) give(*found.x, out);
    if (found.bias) give(*found.bias, out + 1);
    if (!found.w) return;
    const Tensor u = in(u_), v = in(v_);
    if (index) {
      const auto [du, dv, dvalues] =
          compact_weight_backward(*found.w, u, v, u, borrowed(index), of.layout, of_factors | (needs & 4));
      if (needs & 4) give(dvalues, out + 2);
      if (needs & 8) give(du, out + 3);
      if (needs & 16) give(dv, out + 4);
      return;
    }
    if (needs & 4) give(*found.w, out + 2);
    if (!of_factors) return;
    const auto [du, dv] =
        of.low_rank ? lowrank_weight_backward(*found.w, u, v, of.layout, weight_size(of), of.scaling, of_factors)
                    : rank1_weight_backward(*found.w, u, v, of.layout, of_factors);
    if (needs & 8) give(du, out + 3);
    if (needs & 16) give(dv, out + 4);
  });
}

bool factored(AtenTensorHandle out[1], const Layer& of, bool repeated, void* x_, void* u_, void* v_, void* values_,
              void* index_, void* bias_, AtenTensorHandle* kept) {
  if (kept) *kept = nullptr;
  return done(out, 1, [&] {
    const Operands in(of, x_);
    const Tensor x = in.x();
    if (of.low_rank == Layer::kAdapter) {
      const Tensor sigma = in(values_);
      give(Adapter(of, in(u_), in(v_), sigma).forward(x, in.if_given(index_), in.if_given(bias_)), out);
      if (kept && of.cast) give(sigma, kept);
      return;
    }
    const Factors factors(of, in.if_given(u_), in.if_given(v_));
    const OptionalTensor &u = factors.u, &v = factors.v, values = in.if_given(values_), index = borrowed_if(index_),
                         bias = in.if_given(bias_);
    const Shape size = weight_size(of);
    if (of.kind == Layer::kLinear) {
      const Tensor y = factored_linear(rows_of(of, x), u, v, values, index, bias, size);
      give(x.dim() == 2 ? y : as_rows_of(x, y), out);
    } else {
      const Steps by(of);
      give(factored_conv2d(x, u, v, values, index, bias, size, by.stride, by.padding, by.dilation, of.groups, repeated),
           out);
    }
    if (kept && of.cast && values) give(*values, kept);
  });
}

bool factored_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad_, void* x_, void* u_,
                       void* v_, void* values_, void* index_) {
  return done(out, 5, [&] {
    const Operands in(of, x_);
    const Tensor grad = borrowed(grad_), x = in.x();
    if (needs & 16) give(channel_sums(of.kind == Layer::kLinear ? rows_of(of, grad) : grad), out + 4);
    if (of.low_rank == Layer::kAdapter) {
      return Adapter(of, in(u_), in(v_), in(values_)).backward(needs, grad, x, index_, out);
    }
    const Factors factors(of, in.if_given(u_), in.if_given(v_));
    const OptionalTensor &u = factors.u, &v = factors.v, values = in.if_given(values_), index = borrowed_if(index_);
    const Shape size = weight_size(of);
    if (needs & 15) {
      const int64_t asked = (needs & 9) | factors.needs(needs >> 1 & 3) << 1;
      const Steps by(of);
      auto [dx, du, dv, dvalues] =
          of.kind == Layer::kLinear
              ? factored_linear_backward(rows_of(of, grad), rows_of(of, x), u, v, values, index, size, asked)
              : factored_conv2d_backward(grad, x, u, v, values, index, size, by.stride, by.padding, by.dilation,
                                         of.groups, asked);
      if (needs & 1) give(of.kind == Layer::kLinear && x.dim() != 2 ? as_rows_of(x, dx) : dx, out);
      factors.give(needs >> 1, du, dv, out + 1, out + 2);
      if (needs & 8) give(dvalues, out + 3);
    }
  });
}

// By a weight in a form of oneDNN, which takes a bias as it comes.
AtenTensorHandle by_form(const Layer& of, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (bias) expect("layer", "bias", *bias, {of.size[0]}, x);
  // Its strides are not asked for.
  require(!bias || is_dense(*bias, 0), "layer", "the bias has gaps");
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr, y;
  AtenTensorHandle* const with_bias = bias ? &of_bias : nullptr;
  if (of.kind == Layer::kReordered) {
    require(aoti_torch_cpu_mkldnn__convolution_pointwise, "layer", "there is no oneDNN");
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mkldnn__convolution_pointwise(x.get(), w.get(), with_bias, of.padding, 2,
                                                                        of.stride, 2, of.dilation, 2, of.groups, "none",
                                                                        nullptr, 0, nullptr, &y));
    return y;
  }
  require(x.dim() > 0 && x.size(x.dim() - 1) == of.size[1], "layer", "x does not fit");
  require(aoti_torch_cpu__linear_pointwise, "layer", "there is no oneDNN");
  return linear_by_onednn(x, w, bias);
}

Tensor by_panels(const Layer& of, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (of.channels_last && of.size[2] * of.size[3] > 1) {
    const auto c = conv_in_pieces(of, x, false);
    require(c && w.scalar_type() == ScalarType::Float && is_dense(w, 0) &&
                w.numel() == fastfact::conv_panels_numel(c->o, c->i, c->kh * c->kw),
            "layer", "W does not fit");
    return conv_by_amx(*c, x, w, bias, true);
  }
  Layer rows = of;
  rows.kind = of.channels_last ? Layer::kPixels : Layer::kLinear;
  const auto type = type_of<fastfact::Type>("layer", x);
  const int64_t o = of.size[0], i = of.size[1], numel = fastfact::panels_numel(type, o, i);
  require(x.dim() > of.channels_last && x.size(of.channels_last ? 1 : x.dim() - 1) == i && numel >= 0, "layer",
          "x does not fit");
  require(w.scalar_type() == x.scalar_type() && is_dense(w, 0) && w.numel() == numel, "layer", "W does not fit");
  if (bias) expect("layer", "bias", *bias, {o}, x);
  const Tensor of_x = rows_of(rows, x), whole = is_dense(of_x, 0) ? of_x : torch::stable::contiguous(of_x);
  const OptionalTensor added = bias && !is_dense(*bias, 0) ? torch::stable::contiguous(*bias) : bias;
  const Tensor y = like_rows(rows, x, o);
  fastfact::linear_of_panels({type, x.numel() / i, i, o, data_of(whole), data_of(w), added ? data_of(*added) : nullptr,
                              y.data_ptr(), torch::stable::get_num_threads()},
                             parallel_for);
  return y;
}

bool panels(AtenTensorHandle out[1], void* w_) {
  return done(out, 1, [&] {
    const Tensor w = borrowed(w_);
    if (w.dim() == 4) {
      require(w.scalar_type() == ScalarType::Float && is_dense(w, {0, 2, 3, 1}), "panels", "W has no such form");
      const int64_t o = w.size(0), i = w.size(1), taps = w.size(2) * w.size(3);
      const Tensor found = empty(w, {fastfact::conv_panels_numel(o, i, taps)});
      fastfact::pack_conv_panels(o, i, taps, floats_of(w), static_cast<float*>(found.data_ptr()), parallel_for);
      return give(found, out);
    }
    const auto type = type_of<fastfact::Type>("panels", w);
    require(w.dim() == 2 && is_dense(w, 0), "panels", "W must be a matrix without gaps");
    const int64_t o = w.size(0), i = w.size(1), numel = fastfact::panels_numel(type, o, i);
    require(numel >= 0, "panels", "W has no such form");
    const Tensor found = empty(w, {numel});
    fastfact::pack_panels(type, o, i, data_of(w), found.data_ptr(), parallel_for);
    give(found, out);
  });
}

bool convolves(const Layer& of, void* x) noexcept try {
  return conv_in_pieces(of, borrowed(x), false).has_value();
} catch (...) {
  return false;
}

bool dense(AtenTensorHandle out[1], const Layer& of, void* x_, void* w, void* bias_) {
  return done(out, 1, [&] {
    const Operands in(of, x_);
    const Tensor x = in.x();
    const OptionalTensor bias = in.if_given(bias_);
    if (of.kind == Layer::kPanels) {
      give(by_panels(of, x, borrowed(w), bias), out);
    } else if (of.kind == Layer::kReordered || of.kind == Layer::kPacked) {
      out[0] = by_form(of, x, opaque(w), bias);
    } else {
      give(dense_layer(of, x, borrowed(w), bias), out);
    }
  });
}

// Where the tensors lie and in which form; false where that cannot be told.
bool form_of(const Watched& watched, fastfact::Stretch* parts, uint64_t& form) {
  int64_t facts[Watched::kMost * (3 + 2 * Watched::kAxes)], *to = facts;
  for (int64_t n = 0; n < watched.count; ++n) {
    const auto handle = reinterpret_cast<AtenTensorHandle>(const_cast<void**>(watched.tensors + n));
    const void* data = nullptr;
    int64_t dim = 0, numel = 0, *sizes = nullptr, *strides = nullptr;
    int32_t type = 0, device = 0;
    if (torch_get_const_data_ptr(handle, &data) || aoti_torch_get_dim(handle, &dim) || dim > Watched::kAxes ||
        aoti_torch_get_numel(handle, &numel) || aoti_torch_get_sizes(handle, &sizes) ||
        aoti_torch_get_strides(handle, &strides) || aoti_torch_get_dtype(handle, &type) ||
        aoti_torch_get_device_type(handle, &device) || (device == aoti_torch_device_type_cpu()) != watched.reads) {
      return false;
    }
    *to++ = reinterpret_cast<int64_t>(data), *to++ = type, *to++ = dim;
    to = std::copy_n(strides, dim, std::copy_n(sizes, dim, to));
    parts[n] = {data, watched.reads ? numel * static_cast<int64_t>(aoti_torch_dtype_element_size(type)) : 0};
  }
  form = fastfact::digest(facts, (to - facts) * sizeof(int64_t), watched.count, parallel_for);
  return true;
}

uint64_t numbers_of(const fastfact::Stretch* parts, int64_t count) {
  return fastfact::digest(parts, count, count, parallel_for);
}

bool prox_sgd_step(const Group& group, int64_t count, void* const* params, void* const* grads, void* const* momenta,
                   const double* l1) noexcept try {
  std::vector<fastfact::Step> steps(count);
  for (int64_t n = 0; n < count; ++n) {
    Stepped of;
    if (!of.read(n, params, grads, momenta, l1)) return false;
    const auto type = kind_of<fastfact::Type>(of.param);
    if (!type || of.param.device != aoti_torch_device_type_cpu()) return false;
    steps[n] = {*type, of.param.numel, of.param.data, of.grad.data, of.momentum.data, l1[n]};
  }
  fastfact::prox_sgd_step({group.lr, group.momentum, group.weight_decay, group.proximal}, steps.data(), count,
                          parallel_for);
  return true;
} catch (...) {
  return false;
}

bool adamw_step(int64_t count, void* const* params, void* const* grads, void* const* firsts, void* const* seconds,
                void* const* steps, const double* how) noexcept try {
  std::vector<fastfact::AdamW> parts(count);
  std::vector<Form> counts(count);
  for (int64_t n = 0; n < count; ++n, how += 6) {
    Form param, grad, first, second;
    if (!param.read(params[n]) || !grad.read(grads[n]) || !first.read(firsts[n]) || !second.read(seconds[n]) ||
        !counts[n].read(steps[n]) || !param.fills_memory() || !grad.is_like(param) || !first.is_like(param) ||
        !second.is_like(param))
      return false;
    const auto type = kind_of<fastfact::Type>(param), of_count = kind_of<fastfact::Type>(counts[n]);
    const int32_t cpu = aoti_torch_device_type_cpu();
    if (!type || !of_count || param.device != cpu || counts[n].device != cpu || counts[n].numel != 1) return false;
    if (*of_count != fastfact::Type::f32 && *of_count != fastfact::Type::f64) return false;
    const double made =
        *of_count == fastfact::Type::f32 ? *static_cast<float*>(counts[n].data) : *static_cast<double*>(counts[n].data);
    parts[n] = {*type,  param.numel, param.data, grad.data, first.data, second.data, how[0],
                how[1], how[2],      how[3],     how[4],    how[5],     made + 1};
  }
  fastfact::adamw_step(parts.data(), count, parallel_for);
  for (int64_t n = 0; n < count; ++n) {
    if (counts[n].type == aoti_torch_dtype_float32()) {
      *static_cast<float*>(counts[n].data) = float(parts[n].step);
    } else {
      *static_cast<double*>(counts[n].data) = parts[n].step;
    }
  }
  return true;
} catch (...) {
  return false;
}

bool watch(Watched& out, void* const* tensors, int64_t count) noexcept try {
  fastfact::Stretch parts[Watched::kMost];
  if (count > Watched::kMost) return false;
  out.count = count;
  std::copy_n(tensors, count, out.tensors);
  int32_t device = aoti_torch_device_type_cpu();
  if (count && aoti_torch_get_device_type(reinterpret_cast<AtenTensorHandle>(out.tensors), &device)) return false;
  out.reads = device == aoti_torch_device_type_cpu();
  if (!form_of(out, parts, out.form)) return false;
  out.bytes = 0;
  for (int64_t n = 0; n < count; ++n) out.bytes += parts[n].bytes;
  out.numbers = numbers_of(parts, count);
  return true;
} catch (...) {
  return false;
}

bool still(const Watched& watched) noexcept try {
  fastfact::Stretch parts[Watched::kMost];
  uint64_t form;
  return form_of(watched, parts, form) && form == watched.form && numbers_of(parts, watched.count) == watched.numbers;
} catch (...) {
  return false;
}

Memory hold(void* tensor) noexcept try {
  const Tensor t = opaque(tensor);
  const Memory out{data_of(t), t.numel() * int64_t(t.element_size())};
  return t.is_cpu() && fills_memory(t) && fastfact::hold(out.data, out.bytes, parallel_for) ? out : Memory{};
} catch (...) {
  return {};
}

void read_anew(void* tensor) noexcept try {
  const Tensor t = opaque(tensor);
  fastfact::read_anew(data_of(t), t.numel() * int64_t(t.element_size()), parallel_for);
} catch (...) {
}

void give_back(const Memory& held) noexcept { fastfact::release(held.data, held.bytes); }

}  // namespace
}  // namespace fastfact::direct

// Its address is asked for by fastfact/ops/direct.py.
extern "C" __attribute__((visibility("default"))) const fastfact::direct::Library* fastfact_direct() {
  using namespace fastfact::direct;
  static const Library library = {sizeof(Library),
                                  aoti_torch_device_type_cpu(),
                                  nullptr,
                                  layer,
                                  layer_backward,
                                  dense,
                                  prox_sgd_step,
                                  factored,
                                  factored_backward,
                                  panels,
                                  convolves,
                                  adamw_step,
                                  watch,
                                  still,
                                  hold,
                                  give_back,
                                  read_anew};
  return &library;
}
