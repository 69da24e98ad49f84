// Layers on one client's plain tensors on one GPU without PyTorch's dispatcher, see bind_direct.h: a training step of a
// network waits for the processor that launches it, so that every call counts.
#ifdef FASTFACT_EMULATED
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#define OF_DEVICE(name) aoti_torch_cpu_##name
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#define OF_DEVICE(name) aoti_torch_cuda_##name
#endif

#include <array>
#include <vector>

#include "bind_cuda.h"
#include "bind_direct.h"

namespace fastfact::direct {
namespace {

using namespace fastfact::bind;
using fastfact_cuda::Size;
using fastfact_cuda::Slices;
using fastfact_cuda::Support;
using fastfact_cuda::SupportWord;

int32_t device_type() {
#ifdef FASTFACT_EMULATED
  return aoti_torch_device_type_cpu();
#else
  return aoti_torch_device_type_cuda();
#endif
}

// Tensors of a call, all on one device.
class Operands {
 public:
  explicit Operands(void* first) : first_(opaque(first)) {
    require(device_of(first_) == device_type(), "layer", "is of another device");
  }

  const Tensor& first() const { return first_; }

  Tensor of_device(void* tensor) const {
    const Tensor t = opaque(tensor);
    require(device_of(t) == device_type() && t.get_device_index() == first_.get_device_index(), "layer",
            "a tensor is on another device");
    return t;
  }
  Tensor of_type(void* tensor, ScalarType type) const {
    const Tensor t = of_device(tensor);
    require(t.scalar_type() == type, "layer", "a tensor is of another type");
    return t;
  }

 private:
  static int32_t device_of(const Tensor& t) {
    int32_t type;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
    return type;
  }

  Tensor first_;
};

// A tensor for it, which is of that type but where it may be cast.
Tensor cast(const Operands& operands, const Layer& of, void* tensor, ScalarType type) {
  return of.cast ? by_autocast(operands.of_device(tensor), type) : operands.of_type(tensor, type);
}

OptionalTensor cast_if(const Operands& operands, const Layer& of, void* tensor, ScalarType type) {
  return tensor ? OptionalTensor(cast(operands, of, tensor, type)) : std::nullopt;
}

Tensor empty(const Tensor& like, const Shape& sizes, const Shape& strides, ScalarType type) {
  AtenTensorHandle out;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code, device_type(),
                                                  like.get_device_index(), &out));
  return Tensor(out);
}

Tensor empty(const Tensor& like, const Shape& sizes) {
  Shape strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  return empty(like, sizes, strides, like.scalar_type());
}

Tensor bytes(const Tensor& like, int64_t count) { return empty(like, {count}, {1}, ScalarType::Byte); }

Tensor empty_weight(const Layer& of, const Tensor& like) {
  if (of.kind == Layer::kLinear || !of.channels_last) return empty(like, weight_size(of));
  const auto [o, i, kh, kw] = of.size;
  return empty(like, {o, i, kh, kw}, {i * kh * kw, 1, kw * i, i}, like.scalar_type());
}

Size size_of(const Layer& of) { return {of.size[0], of.size[1], of.size[2], of.size[3]}; }

Slices slices(const Tensor& t) { return {data_of(t), 0}; }

// u and v of one type, each in one stretch of memory and of the shape that the layer implies.
struct Factors {
  Tensor u, v;

  Factors(const Operands& operands, const Layer& of, void* u_, void* v_)
      : u(operands.of_device(u_)), v(operands.of_type(v_, u.scalar_type())) {
    const auto [o, i, kh, kw] = of.size;
    const int64_t rank = u.dim() > 0 ? u.size(0) : -1;
    Shape us{rank, kh, kw}, vs{rank, o, i};
    if (of.layout == fastfact_cuda::kLinear) us = {rank, i}, vs = {rank, o};
    if (of.layout == fastfact_cuda::kKernel) us = {rank, i, kh}, vs = {rank, o, kw};
    require(shape_of(u) == us && shape_of(v) == vs && is_dense(u, 0) && is_dense(v, 0), "layer", "factors do not fit");
  }
};

// Where compact μ is, as the kernels take it.
struct HeldSupport {
  Tensor words;
  Support support;

  HeldSupport(const Operands& operands, const Layer& of, const Tensor& index, void* given, void* stream)
      : words(given ? operands.of_device(given) : empty(index, {count_of(of)}, {1}, ScalarType::Long)) {
    require(words.scalar_type() == ScalarType::Long && words.numel() == count_of(of) && is_dense(words, 0), "layer",
            "the support does not fit");
    auto* const data = static_cast<SupportWord*>(data_of(words));
    if (!given) {
      check_error("layer", fastfact_cuda::support(slices(index), index.numel(), data, 1, size_of(of).numel(), stream));
    }
    support = {data, 0, static_cast<uint32_t>(index.numel())};
  }

  static int64_t count_of(const Layer& of) { return fastfact_cuda::support_words(size_of(of).numel()); }
};

Tensor positions(const Operands& operands, void* index_) {
  const Tensor index = operands.of_device(index_);
  require(index.scalar_type() == ScalarType::Int && index.dim() == 1 && is_dense(index, 0), "layer",
          "positions do not fit");
  return index;
}

// The kernels write the layout "view" in PyTorch's order only.
void require_format(const Layer& of) {
  const bool reordered = of.channels_last && of.kind != Layer::kLinear && of.layout == fastfact_cuda::kView;
  require(!reordered, "layer", "no kernel has this format");
}

Tensor weight(const Operands& operands, const Layer& of, void* mu_, void* index_, void* support, void* u, void* v) {
  require_format(of);
  const Factors factors(operands, of, u, v);
  OptionalTensor mu;
  if (mu_) mu = operands.of_type(mu_, factors.u.scalar_type());
  const Tensor out = empty_weight(of, factors.u);
  if (out.numel() == 0) return out;
  const On on(factors.u);
  std::optional<HeldSupport> held;
  if (index_) {
    const Tensor index = positions(operands, index_);
    require(mu && mu->dim() == 1 && mu->numel() == index.numel() && is_dense(*mu, 0), "layer", "μ does not fit");
    held.emplace(operands, of, index, support, on.stream());
  } else if (mu) {
    require(shape_of(*mu) == shape_of(out) && same_strides(*mu, out), "layer", "μ does not fit");
  }
  check_error("layer",
              fastfact_cuda::rank1_weight(type_of(out), data_of(out), mu ? slices(*mu) : Slices{nullptr, 0},
                                          held ? held->support : Support{}, slices(factors.u), slices(factors.v),
                                          of.layout, of.channels_last && of.kind != Layer::kLinear, size_of(of),
                                          factors.u.size(0), 1, on.stream()));
  return out;
}

// x […, channels] as a matrix of its rows.
Tensor rows_of(const Tensor& x) {
  require(x.dim() >= 2, "layer", "x has no rows");
  if (x.dim() == 2) return x;
  const int64_t c = x.size(x.dim() - 1), n = c ? x.numel() / c : 0;
  return viewed(is_dense(x, 0) ? x : torch::stable::contiguous(x), {n, c}, {c, 1});
}

// An uninitialised tensor for rows of so many channels, where x has rows of others.
Tensor like_rows(const Tensor& x, int64_t channels) {
  Shape sizes = shape_of(x);
  sizes.back() = channels;
  return empty(x, sizes);
}

Tensor dense_layer(const Layer& of, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (of.kind == Layer::kLinear) {
    const Tensor rows = rows_of(x), y = like_rows(x, w.size(0)), by = transposed(w);
    require(rows.size(1) == w.size(1), "layer", "x does not fit");
    if (bias) {
      TORCH_ERROR_CODE_CHECK(OF_DEVICE(addmm_out)(rows_of(y).get(), bias->get(), rows.get(), by.get(), 1, 1));
    } else {
      TORCH_ERROR_CODE_CHECK(OF_DEVICE(mm_out)(rows_of(y).get(), rows.get(), by.get()));
    }
    return y;
  }
  require(of.kind == Layer::kConvolution, "layer", "is of no kind that a GPU has");
  return convolution(OF_DEVICE(convolution), of, x, w, bias);
}

Gradients dense_layer_backward(const Layer& of, const Tensor& grad, const Tensor& x, const Tensor& w, bool of_x,
                               bool of_w, bool of_bias) {
  if (of.kind == Layer::kLinear) {
    Gradients out;
    const Tensor rows = rows_of(grad);
    if (of_x) {
      out.x = like_rows(x, w.size(1));
      TORCH_ERROR_CODE_CHECK(OF_DEVICE(mm_out)(rows_of(*out.x).get(), rows.get(), w.get()));
    }
    if (of_w) {
      out.w = empty(w, shape_of(w));
      TORCH_ERROR_CODE_CHECK(OF_DEVICE(mm_out)(out.w->get(), transposed(rows).get(), rows_of(x).get()));
    }
    const int64_t all[1] = {0};
    // autocast has a sum in float32 else
    if (of_bias) {
      out.bias = torch::stable::sum(rows, torch::headeronly::IntHeaderOnlyArrayRef(all, 1), false, rows.scalar_type());
    }
    return out;
  }
  require(of.kind == Layer::kConvolution, "layer", "is of no kind that a GPU has");
  return convolution_backward(OF_DEVICE(convolution_backward), of, grad, x, w, of_x, of_w, of_bias);
}

bool records([[maybe_unused]] void* x) {
#ifdef FASTFACT_EMULATED
  return false;
#else
  const auto handle = reinterpret_cast<AtenTensorHandle>(&x);
  int32_t device;
  void* stream;
  // What cannot be told is taken for recorded, and left to the ops.
  if (aoti_torch_get_device_index(handle, &device) || aoti_torch_get_current_cuda_stream(device, &stream)) return true;
  return fastfact_cuda::is_recorded(stream);
#endif
}

bool layer(AtenTensorHandle out[2], const Layer& of, void* x_, void* bias_, void* mu, void* index, void* support,
           void* u, void* v) {
  return done(out, 2, [&] {
    const Operands operands(x_);
    const Tensor& x = operands.first();
    const auto type = type_for(of, x);
    const OptionalTensor bias = cast_if(operands, of, bias_, type);
    Tensor w = weight(operands, of, mu, index, support, u, v);
    require(of.cast ? w.scalar_type() != ScalarType::Double : w.scalar_type() == type, "layer", "x does not fit");
    w = in_type(w, type);
    give(dense_layer(of, in_type(x, type), w, bias), out);
    give(w, out + 1);
  });
}

bool layer_backward(AtenTensorHandle out[5], const Layer& of, int64_t needs, void* grad_, void* x_, void* w,
                    void* index_, void* support, void* u, void* v) {
  return done(out, 5, [&] {
    require_format(of);
    const Operands operands(x_);
    const auto type = type_for(of, operands.first());
    const Tensor grad = operands.of_type(grad_, type), x = in_type(operands.first(), type);
    // those of x and the bias are cast by autograd
    const Gradients found =
        dense_layer_backward(of, grad, x, operands.of_type(w, type), needs & 1, needs >> 2, needs & 2);
    if (found.x) give(*found.x, out);
    if (found.bias) give(*found.bias, out + 1);
    if (!found.w) return;
    const bool of_mu = needs & 4, of_u = needs & 8, of_v = needs & 16;
    const Factors factors(operands, of, u, v);
    Tensor dw = in_type(*found.w, factors.u.scalar_type());
    if (of_mu && !index_) give(dw, out + 2);
    if (!of_u && !of_v && !(of_mu && index_)) return;
    const On on(dw);
    const bool split = dw.dim() == 4 && dw.size(2) > 1 && dw.size(3) > 1 && dw.stride(2) != dw.size(3) * dw.stride(3);
    if ((split || of.layout == fastfact_cuda::kView) && !is_dense(dw, 0)) dw = torch::stable::contiguous(dw);
    int64_t strides[4] = {0, 0, 0, 0};
    for (int64_t d = 0; d < dw.dim(); ++d) strides[d] = dw.stride(d);
    const Size size = size_of(of);
    const auto view = fastfact_cuda::rank1_view(of.layout, size, strides);
    const auto kind = type_of(dw);
    const int64_t rank = factors.u.size(0);
    OptionalTensor du, dv, dmu;
    if (of_u) du = empty(dw, shape_of(factors.u));
    if (of_v) dv = empty(dw, shape_of(factors.v));
    std::optional<HeldSupport> held;
    if (of_mu && index_) {
      const Tensor index = positions(operands, index_);
      dmu = empty(dw, {index.numel()});
      if (index.numel()) held.emplace(operands, of, index, support, on.stream());
    }
    if (dw.numel()) {
      const Tensor parts = bytes(dw, fastfact_cuda::rank1_workspace(kind, view, rank, 1, of_u, of_v));
      check_error("layer",
                  fastfact_cuda::rank1_weight_backward(
                      kind, slices(dw), slices(factors.u), slices(factors.v), du ? data_of(*du) : nullptr,
                      dv ? data_of(*dv) : nullptr, held ? slices(*dmu) : Slices{nullptr, 0},
                      held ? held->support : Support{}, data_of(parts), view, of.layout, size, rank, 1, on.stream()));
    } else {
      for (const OptionalTensor* one : {&du, &dv, &dmu}) {
        if (*one && (*one)->numel()) fail("layer", "W has no numbers");
      }
    }
    if (dmu) give(*dmu, out + 2);
    if (du) give(*du, out + 3);
    if (dv) give(*dv, out + 4);
  });
}

bool dense(AtenTensorHandle out[1], const Layer& of, void* x_, void* w, void* bias_) {
  return done(out, 1, [&] {
    const Operands operands(x_);
    const auto type = type_for(of, operands.first());
    const OptionalTensor bias = cast_if(operands, of, bias_, type);
    give(dense_layer(of, in_type(operands.first(), type), operands.of_type(w, type), bias), out);
  });
}

bool prox_sgd_step(const Group& group, int64_t count, void* const* params, void* const* grads, void* const* momenta,
                   const double* l1) noexcept try {
  std::array<std::vector<fastfact_cuda::Group>, 4> of_type;
  if (!count) return true;
  const Tensor first = opaque(params[0]);
  // What is held is copied when memory to write to is asked for, on the device that is current then.
  const On on(first);
  for (int64_t n = 0; n < count; ++n) {
    Stepped of;
    if (!of.read(n, params, grads, momenta, l1)) return false;
    const auto type = kind_of<fastfact_cuda::Type>(of.param);
    if (!type || of.param.device != device_type() || of.param.number != first.get_device_index()) return false;
    if (of.param.numel) {
      of_type[*type].push_back({of.param.data, of.grad.data, of.momentum.data, of.param.numel, l1[n]});
    }
  }
  for (int type = 0; type < 4; ++type) {
    if (of_type[type].empty()) continue;
    check_error("prox_sgd_step", fastfact_cuda::prox_sgd_step(
                                     fastfact_cuda::Type(type), of_type[type].data(), of_type[type].size(),
                                     {group.lr, group.momentum, group.weight_decay, group.proximal}, on.stream()));
  }
  return true;
} catch (...) {
  return false;
}

}  // namespace
}  // namespace fastfact::direct

// Its address is asked for by fastfact/ops/direct.py.
extern "C" __attribute__((visibility("default"))) const fastfact::direct::Library* fastfact_direct() {
  using namespace fastfact::direct;
  static const Library library = {sizeof(Library), device_type(), records, layer, layer_backward, dense, prox_sgd_step};
  return &library;
}
