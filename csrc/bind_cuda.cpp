// The CUDA library: registers the kernels of csrc/cuda with PyTorch's dispatcher, on PyTorch's stable ABI.
#include "bind_cuda.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

// The tests build this file with the kernels emulated on the CPU, under names of their own.
#ifndef FASTFACT_NAMESPACE
#define FASTFACT_NAMESPACE fastfact
#define FASTFACT_DEVICE CUDA
#endif

namespace {

using fastfact::bind::check_error;
using fastfact::bind::fills_memory;
using fastfact::bind::is_dense;
using fastfact::bind::On;
using fastfact::bind::same_strides;
using fastfact::bind::shape_of;
using fastfact::bind::type_of;
using fastfact_cuda::Factor;
using fastfact_cuda::Side;
using fastfact_cuda::Size;
using fastfact_cuda::Slices;
using fastfact_cuda::View;
using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = fastfact::bind::Shape;

// Every tensor of a call has the type and the device of the first.
void check_alike(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
  for (const Tensor* other : others) {
    STD_TORCH_CHECK(
        other->scalar_type() == first.scalar_type() && other->get_device_index() == first.get_device_index(), op,
        ": the tensors must have one dtype and lie on one device");
  }
}

Tensor empty(const Tensor& like, const Sizes& size, std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, IntHeaderOnlyArrayRef(size.data(), size.size()), dtype);
}

Tensor zeros(const Tensor& like, const Sizes& size) {
  return torch::stable::new_zeros(like, IntHeaderOnlyArrayRef(size.data(), size.size()));
}

Tensor workspace(const Tensor& like, int64_t bytes) { return empty(like, {bytes}, ScalarType::Byte); }

// A tensor kept alive together with what the kernels see of it.
struct Held {
  Tensor tensor;
  Slices slices;
};

Slices view_of(const Tensor& x) {
  // const_data_ptr, as the inputs may be copy-on-write; the kernels write only to outputs
  return {const_cast<void*>(x.const_data_ptr()), x.stride(0)};
}

// The strides of one client's slice, those of axes of one element set to 0.
Sizes inner_strides(const Tensor& x) {
  Sizes strides;
  for (int64_t d = 1; d < x.dim(); ++d) strides.push_back(x.size(d) == 1 ? 0 : x.stride(d));
  return strides;
}

// `x` with each client's slice contiguous; one slice where the clients share it.
Held slices(const Tensor& x) {
  if (x.numel() == 0 || is_dense(x)) return {x, view_of(x)};
  const bool shared = x.stride(0) == 0;
  Tensor whole = x;
  Tensor copy = torch::stable::contiguous(shared ? torch::stable::narrow(whole, 0, 0, 1) : whole);
  Slices seen = view_of(copy);
  if (shared) seen.client = 0;
  return {copy, seen};
}

// Uninitialised [k, …size], each client's slice contiguous or channels_last.
Tensor empty_weight(const Tensor& like, int64_t clients, const Sizes& size, bool channels_last) {
  if (size.size() == 4 && channels_last) {
    Tensor out = empty(like, {clients, size[0], size[2], size[3], size[1]});
    return torch::stable::transpose(torch::stable::transpose(out, 2, 4), 3, 4);
  }
  Sizes whole{clients};
  whole.insert(whole.end(), size.begin(), size.end());
  return empty(like, whole);
}

// `x` with each client's slice laid out as those of `like`.
Held laid_out_as(const std::optional<Tensor>& x, const Tensor& like, const Sizes& size, bool channels_last) {
  if (!x) return {like, {nullptr, 0}};
  if (inner_strides(*x) == inner_strides(like)) return {*x, view_of(*x)};
  const bool shared = x->stride(0) == 0;
  Tensor whole = *x;
  Tensor copy = empty_weight(like, shared ? 1 : x->size(0), size, channels_last);
  torch::stable::copy_(copy, shared ? torch::stable::narrow(whole, 0, 0, 1) : whole);
  Slices seen = view_of(copy);
  if (shared) seen.client = 0;
  return {copy, seen};
}

// dW as the backward kernels read it: contiguous if asked for or if its two kernel axes do not lie as one in memory.
Held gradient(const Tensor& grad, bool contiguous) {
  const bool split =
      grad.dim() == 5 && grad.size(3) > 1 && grad.size(4) > 1 && grad.stride(3) != grad.size(4) * grad.stride(4);
  return contiguous || split ? slices(grad) : Held{grad, view_of(grad)};
}

std::array<int64_t, 4> strides_of(const Tensor& weight) {
  std::array<int64_t, 4> strides{};
  for (int64_t d = 1; d < weight.dim(); ++d) strides[d - 1] = weight.stride(d);
  return strides;
}

Size to_size(const Sizes& size) {
  return {size[0], size[1], size.size() > 2 ? size[2] : 1, size.size() > 3 ? size[3] : 1};
}

// In channels_last if the kernels wrote the weight contiguous because its layout is a view.
Tensor to_format(const Tensor& weight, const Sizes& size, bool convert) {
  if (!convert) return weight;
  Tensor out = empty_weight(weight, weight.size(0), size, true);
  torch::stable::copy_(out, weight);
  return out;
}

Sizes rank1_size(const Tensor& u, const Tensor& v, int64_t layout) {
  if (layout == fastfact_cuda::kLinear) return {v.size(2), u.size(2)};
  if (layout == fastfact_cuda::kKernel) return {v.size(2), u.size(2), u.size(3), v.size(3)};
  return {v.size(2), v.size(3), u.size(2), u.size(3)};
}

// A support as the kernels take it, made from its positions [k, count].
struct HeldSupport {
  Tensor words;
  fastfact_cuda::Support support;
};

HeldSupport support_of(const char* op, const Tensor& index_, int64_t n, void* stream) {
  STD_TORCH_CHECK(index_.scalar_type() == ScalarType::Int, op, ": index must be int32");
  const Held index = slices(index_);
  const int64_t clients = index.slices.client == 0 ? 1 : index_.size(0), words = fastfact_cuda::support_words(n);
  Tensor made = empty(index_, {clients, words}, ScalarType::Long);
  auto* data = static_cast<fastfact_cuda::SupportWord*>(made.mutable_data_ptr());
  check_error(op, fastfact_cuda::support(index.slices, index_.size(1), data, clients, n, stream));
  return {made, {data, index.slices.client == 0 ? 0 : words, static_cast<uint32_t>(index_.size(1))}};
}

// `mu` dense, or values on the support `index`.
Tensor rank1_weight_of(const char* op, const std::optional<Tensor>& mu, const Tensor* index, const Tensor& u,
                       const Tensor& v, int64_t layout, bool channels_last) {
  check_alike(op, u, {&v, mu ? &*mu : &v});
  const Sizes size = rank1_size(u, v, layout);
  const bool last = channels_last && size.size() == 4, convert = last && layout == fastfact_cuda::kView;
  const int64_t clients = u.size(0);
  Tensor out = empty_weight(u, clients, size, last && !convert);
  if (out.numel() == 0) return to_format(out, size, convert);
  const On on(u);
  const Held left = slices(u), right = slices(v);
  const Held added = index ? slices(*mu) : laid_out_as(mu, out, size, last && !convert);
  std::optional<HeldSupport> held;
  if (index) held = support_of(op, *index, to_size(size).numel(), on.stream());
  check_error(op, fastfact_cuda::rank1_weight(
                      type_of(u), out.mutable_data_ptr(), added.slices, held ? held->support : fastfact_cuda::Support{},
                      left.slices, right.slices, layout, last, to_size(size), u.size(1), clients, on.stream()));
  return to_format(out, size, convert);
}

Tensor rank1_weight(const std::optional<Tensor>& mu, const Tensor& u, const Tensor& v, int64_t layout,
                    bool channels_last) {
  return rank1_weight_of("rank1_weight", mu, nullptr, u, v, layout, channels_last);
}

Tensor compact_weight(const Tensor& u, const Tensor& v, const Tensor& values, const Tensor& index, int64_t layout,
                      bool channels_last) {
  return rank1_weight_of("compact_weight", values, &index, u, v, layout, channels_last);
}

// (du, dv, dW on the support `index`); bits 0-2 of `needs` ask for them.
std::tuple<Tensor, Tensor, Tensor> rank1_gradients(const char* op, const Tensor& grad, const Tensor& u, const Tensor& v,
                                                   const Tensor* index, int64_t layout, int64_t needs) {
  check_alike(op, u, {&v, &grad});
  const bool need_u = needs & 1, need_v = needs & 2, need_mu = needs & 4;
  const Sizes none{0}, u_size = need_u ? shape_of(u) : none, v_size = need_v ? shape_of(v) : none,
                       mu_size = need_mu ? shape_of(*index) : none;
  if (grad.numel() == 0 || !(needs & 7)) return {zeros(u, u_size), zeros(v, v_size), zeros(u, mu_size)};
  const On on(u);
  const int64_t clients = u.size(0), rank = u.size(1);
  Tensor du = empty(u, u_size), dv = empty(v, v_size), dmu = empty(u, mu_size);
  const Held dw = gradient(grad, layout == fastfact_cuda::kView), left = slices(u), right = slices(v);
  const Size size = to_size(rank1_size(u, v, layout));
  const View view = rank1_view(layout, size, strides_of(dw.tensor).data());
  const auto type = type_of(u);
  std::optional<HeldSupport> held;
  if (need_mu && index->size(1) > 0) held = support_of(op, *index, size.numel(), on.stream());
  Tensor parts = workspace(u, fastfact_cuda::rank1_workspace(type, view, rank, clients, need_u, need_v));
  check_error(op, fastfact_cuda::rank1_weight_backward(
                      type, dw.slices, left.slices, right.slices, need_u ? du.mutable_data_ptr() : nullptr,
                      need_v ? dv.mutable_data_ptr() : nullptr, held ? view_of(dmu) : Slices{nullptr, 0},
                      held ? held->support : fastfact_cuda::Support{}, parts.mutable_data_ptr(), view, layout, size,
                      rank, clients, on.stream()));
  return {du, dv, dmu};
}

std::tuple<Tensor, Tensor> rank1_weight_backward(const Tensor& grad, const Tensor& u, const Tensor& v, int64_t layout,
                                                 int64_t needs) {
  auto [du, dv, none] = rank1_gradients("rank1_weight_backward", grad, u, v, nullptr, layout, needs & 3);
  return {du, dv};
}

std::tuple<Tensor, Tensor, Tensor> compact_weight_backward(const Tensor& grad, const Tensor& u, const Tensor& v,
                                                           const Tensor&, const Tensor& index, int64_t layout,
                                                           int64_t needs) {
  return rank1_gradients("compact_weight_backward", grad, u, v, &index, layout, needs);
}

// A factor of a product whose element (position, r) lies at position * row + r * rank_stride.
Factor factor_of(const Held& x, int64_t row, int64_t rank_stride, int64_t rank) {
  return {x.slices.data, x.slices.client, row, rank_stride, rank};
}
constexpr Factor kNone{nullptr, 0, 0, 0, 0};

Tensor lowrank_weight(const std::optional<Tensor>& sigma, const Tensor& a, const Tensor& b, int64_t layout, Sizes size,
                      double scaling, bool channels_last) {
  const char* op = "lowrank_weight";
  check_alike(op, a, {&b, sigma ? &*sigma : &b});
  const bool last = channels_last && size.size() == 4, convert = last && layout == fastfact_cuda::kView;
  const int64_t clients = a.size(0), rank = a.size(1), columns = a.size(2);
  Tensor out = empty_weight(a, clients, size, last && !convert);
  if (out.numel() == 0) return to_format(out, size, convert);
  const On on(a);
  const Held dense = laid_out_as(sigma, out, size, last && !convert), left = slices(b), right = slices(a);
  const View view = lowrank_view(layout, to_size(size), strides_of(out).data());
  check_error(op, fastfact_cuda::product(type_of(a), view_of(out), dense.slices, factor_of(left, rank, 1, rank),
                                         factor_of(right, 1, columns, rank), kNone, kNone, scaling, 0, view, clients,
                                         on.stream()));
  return to_format(out, size, convert);
}

// One gradient, shaped as `like`: dW (times another product) against `factor`, whose rows are the columns of `view`.
Tensor contract(const char* op, const Tensor& like, const Held& dw, const Factor& x, const Factor& y,
                const Factor& factor, int64_t out_row, int64_t out_column, double scaling, double plus,
                const View& view, void* stream) {
  if (like.numel() == 0 || dw.tensor.numel() == 0) return zeros(like, shape_of(like));
  Tensor out = empty(like, shape_of(like));
  const auto type = type_of(like);
  const int64_t clients = like.size(0);
  Tensor parts = workspace(like, fastfact_cuda::contract_workspace(type, view, factor.rank, clients));
  check_error(op, fastfact_cuda::contract(type, out.mutable_data_ptr(), out_row, out_column, dw.slices, x, y, factor,
                                          scaling, plus, view, parts.mutable_data_ptr(), clients, stream));
  return out;
}

// Every gradient of one or two products of thin factors from one reading of dW.
void thin(const char* op, const Tensor& like, const Held& dw, const std::vector<fastfact_cuda::Outer>& products,
          double scaling, double plus, const View& view, void* stream) {
  const auto type = type_of(like);
  const int64_t clients = like.size(0);
  const int count = static_cast<int>(products.size());
  Tensor parts = workspace(like, fastfact_cuda::thin_workspace(type, dw.slices, view, products.data(), count, clients));
  check_error(op, fastfact_cuda::thin_backward(type, dw.slices, products.data(), count, scaling, plus, view,
                                               parts.mutable_data_ptr(), clients, stream));
}

std::tuple<Tensor, Tensor> lowrank_weight_backward(const Tensor& grad, const Tensor& a, const Tensor& b, int64_t layout,
                                                   Sizes size, double scaling, int64_t needs) {
  const char* op = "lowrank_weight_backward";
  check_alike(op, a, {&b, &grad});
  const On on(a);
  const int64_t rank = a.size(1), columns = a.size(2);
  const Held dw = gradient(grad, layout == fastfact_cuda::kView), left = slices(b), right = slices(a);
  const View view = lowrank_view(layout, to_size(size), strides_of(dw.tensor).data());
  const auto type = type_of(a);
  if ((needs & 3) == 3 && dw.tensor.numel() > 0 && rank > 0 && fastfact_cuda::thin_pays(type, rank, 1)) {
    Tensor da = empty(a, shape_of(a)), db = empty(b, shape_of(b));
    thin(op, a, dw,
         {{factor_of(left, rank, 1, rank), factor_of(right, 1, columns, rank), db.mutable_data_ptr(),
           da.mutable_data_ptr()}},
         scaling, 0, view, on.stream());
    return {da, db};
  }
  Tensor da = empty(a, {0}), db = empty(b, {0});
  if (needs & 1) {
    da = contract(op, a, dw, kNone, kNone, factor_of(left, rank, 1, rank), 1, columns, scaling, 0,
                  {view.columns, view.rows}, on.stream());
  }
  if (needs & 2) {
    db = contract(op, b, dw, kNone, kNone, factor_of(right, 1, columns, rank), rank, 1, scaling, 0, view, on.stream());
  }
  return {da, db};
}

Tensor hadamard_weight(const Tensor& x1, const Tensor& y1, const Tensor& x2, const Tensor& y2, Sizes size,
                       bool personalized, bool channels_last) {
  const char* op = "hadamard_weight";
  check_alike(op, x1, {&y1, &x2, &y2});
  const int64_t clients = x1.size(0), r1 = x1.size(2), r2 = x2.size(2);
  Tensor out = empty_weight(x1, clients, size, channels_last);
  if (out.numel() == 0) return out;
  const On on(x1);
  const Held f1 = slices(x1), g1 = slices(y1), f2 = slices(x2), g2 = slices(y2);
  const View view = hadamard_view(to_size(size), strides_of(out).data());
  check_error(op, fastfact_cuda::product(type_of(x1), view_of(out), {nullptr, 0}, factor_of(f1, r1, 1, r1),
                                         factor_of(g1, r1, 1, r1), factor_of(f2, r2, 1, r2), factor_of(g2, r2, 1, r2),
                                         1, personalized, view, clients, on.stream()));
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hadamard_weight_backward(const Tensor& grad, const Tensor& x1,
                                                                    const Tensor& y1, const Tensor& x2,
                                                                    const Tensor& y2, Sizes size, bool personalized,
                                                                    int64_t needs) {
  const char* op = "hadamard_weight_backward";
  check_alike(op, x1, {&y1, &x2, &y2, &grad});
  const On on(x1);
  const Held dw = gradient(grad, false);
  const Held held[4] = {slices(x1), slices(y1), slices(x2), slices(y2)};
  const Tensor* like[4] = {&x1, &y1, &x2, &y2};
  const View view = hadamard_view(to_size(size), strides_of(dw.tensor).data());
  Tensor grads[4];
  const int64_t r1 = x1.size(2), r2 = x2.size(2);
  if ((needs & 15) == 15 && dw.tensor.numel() > 0 && std::min(r1, r2) > 0 &&
      fastfact_cuda::thin_pays(type_of(x1), std::max(r1, r2), 2)) {
    for (int j = 0; j < 4; ++j) grads[j] = empty(*like[j], shape_of(*like[j]));
    thin(op, x1, dw,
         {{factor_of(held[0], r1, 1, r1), factor_of(held[1], r1, 1, r1), grads[0].mutable_data_ptr(),
           grads[1].mutable_data_ptr()},
          {factor_of(held[2], r2, 1, r2), factor_of(held[3], r2, 1, r2), grads[2].mutable_data_ptr(),
           grads[3].mutable_data_ptr()}},
         1, personalized, view, on.stream());
    return {grads[0], grads[1], grads[2], grads[3]};
  }
  for (int j = 0; j < 4; ++j) {
    if (!(needs >> j & 1)) {
      grads[j] = empty(*like[j], {0});
      continue;
    }
    // dW times the product of the other pair, against the other factor of this pair
    const int other = j < 2 ? 2 : 0, row = j % 2;
    const int64_t rank = like[j]->size(2), other_rank = like[other]->size(2);
    const View sides = row ? View{view.columns, view.rows} : view;
    grads[j] = contract(op, *like[j], dw, factor_of(held[other + row], other_rank, 1, other_rank),
                        factor_of(held[other + 1 - row], other_rank, 1, other_rank),
                        factor_of(held[j ^ 1], rank, 1, rank), rank, 1, 1, j < 2 && personalized, sides, on.stream());
  }
  return {grads[0], grads[1], grads[2], grads[3]};
}

Tensor copy_like(const Tensor& x, const Tensor& like) {
  Tensor copy = torch::stable::empty_like(like);
  torch::stable::copy_(copy, x);
  return copy;
}

void prox_sgd_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> momenta,
                   std::vector<double> l1, double lr, double momentum, double weight_decay, bool proximal) {
  const char* op = "prox_sgd_step";
  // one launch (or a few) for each device and type
  std::map<std::pair<int32_t, int>, std::vector<fastfact_cuda::Group>> groups;
  std::map<int32_t, Tensor> devices;
  std::vector<Tensor> alive;
  std::vector<std::pair<Tensor, Tensor>> written_back;
  std::optional<On> on;
  int32_t current = -1;
  for (size_t j = 0; j < params.size(); ++j) {
    if (params[j].numel() == 0) continue;
    check_alike(op, params[j], {&grads[j]});
    Tensor param = params[j];
    // What is copied on a write is copied when memory to write to is asked for, on the device that is current then.
    const int32_t device = param.get_device_index();
    if (std::exchange(current, device) != device) on.emplace(param);
    if (!fills_memory(param)) {
      param = torch::stable::contiguous(param);
      written_back.emplace_back(params[j], param);
    }
    const Tensor grad = same_strides(grads[j], param) ? grads[j] : copy_like(grads[j], param);
    fastfact_cuda::Group group{param.mutable_data_ptr(), grad.const_data_ptr(), nullptr, param.numel(), l1[j]};
    if (momentum != 0) {
      check_alike(op, params[j], {&momenta[j]});
      Tensor state = momenta[j];
      if (!same_strides(state, param)) {
        state = copy_like(state, param);
        written_back.emplace_back(momenta[j], state);
      }
      group.momentum = state.mutable_data_ptr();
      alive.push_back(state);
    }
    alive.push_back(grad);
    groups[{device, type_of(param)}].push_back(group);
    devices.emplace(device, param);
  }
  for (const auto& [key, group] : groups) {
    const On on(devices.at(key.first));
    check_error(op, fastfact_cuda::prox_sgd_step(static_cast<fastfact_cuda::Type>(key.second), group.data(),
                                                 static_cast<int64_t>(group.size()),
                                                 {lr, momentum, weight_decay, proximal}, on.stream()));
  }
  for (auto& [target, source] : written_back) torch::stable::copy_(target, source);
}

// Of `count` chunks of a bitmap: their nonzeros, and where these begin.
struct Chunks {
  int64_t count;
  Tensor numbers, segments;

  Chunks(const Tensor& like, int64_t count)
      : count(count),
        numbers(empty(like, {2, count}, ScalarType::Int)),
        segments(empty(like, {fastfact_cuda::bitmap_segments(count) + 1}, ScalarType::Long)) {}
  int32_t* counts() { return static_cast<int32_t*>(numbers.mutable_data_ptr()); }
  fastfact_cuda::Offsets offsets() { return {counts() + count, static_cast<int64_t*>(segments.mutable_data_ptr())}; }
};

constexpr ScalarType kValueTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Char};

std::tuple<Tensor, Tensor, Tensor> pack_bitmap(const Tensor& x, int64_t value_type) {
  const char* op = "pack_bitmap";
  STD_TORCH_CHECK(value_type >= 0 && value_type < 3, op, ": value_type=", value_type, ", must be 0, 1 or 2");
  const int64_t k = x.size(0), rows = k * x.size(1), n = x.size(2), chunks = fastfact_cuda::bitmap_chunks(n);
  const bool quantized = value_type == 2;
  Tensor bits = empty(x, {k, x.size(1), (n + 7) / 8}, ScalarType::Byte);
  if (rows * n == 0) {
    const Sizes scales = quantized ? Sizes{k, x.size(1)} : Sizes{0};
    return {bits, empty(x, {0}, kValueTypes[value_type]),
            torch::stable::new_zeros(x, IntHeaderOnlyArrayRef(scales.data(), scales.size()), ScalarType::Float)};
  }
  Tensor scale = empty(x, quantized ? Sizes{k, x.size(1)} : Sizes{0}, ScalarType::Float);
  const On on(x);
  const Tensor dense = torch::stable::contiguous(x);
  const auto type = type_of(x);
  Chunks some(x, rows * chunks);
  Tensor maxima = empty(x, {quantized ? rows * chunks : 0}, ScalarType::Float);
  auto* largest = quantized ? static_cast<float*>(maxima.mutable_data_ptr()) : nullptr;
  auto* factor = quantized ? static_cast<float*>(scale.mutable_data_ptr()) : nullptr;
  check_error(op,
              fastfact_cuda::bitmap_count(type, dense.const_data_ptr(), static_cast<uint8_t*>(bits.mutable_data_ptr()),
                                          some.counts(), largest, rows, n, on.stream()));
  int64_t total = 0;
  check_error(op, fastfact_cuda::bitmap_scan(some.counts(), some.offsets(), some.count, on.stream()));
  check_error(op, fastfact_cuda::bitmap_total(some.offsets(), some.count, &total, on.stream()));
  if (quantized) check_error(op, fastfact_cuda::bitmap_scale(largest, factor, rows, chunks, on.stream()));
  Tensor values = empty(x, {total}, kValueTypes[value_type]);
  check_error(
      op, fastfact_cuda::bitmap_write(type, dense.const_data_ptr(), some.offsets(), factor, values.mutable_data_ptr(),
                                      static_cast<int>(value_type), rows, n, on.stream()));
  return {bits, values, scale};
}

Tensor unpack_bitmap(const Tensor& bits, const Tensor& values, const Tensor& scale, int64_t n, bool check) {
  const char* op = "unpack_bitmap";
  const int64_t k = bits.size(0), rows = k * bits.size(1), chunks = fastfact_cuda::bitmap_chunks(n);
  STD_TORCH_CHECK(bits.size(2) == (n + 7) / 8, op, ": bits has ", bits.size(2), " bytes a row, must have ",
                  (n + 7) / 8);
  const auto* found = std::find(std::begin(kValueTypes), std::end(kValueTypes), values.scalar_type());
  STD_TORCH_CHECK(found != std::end(kValueTypes), op, ": values must be float32, bfloat16 or int8");
  STD_TORCH_CHECK(scale.numel() == 0 || scale.numel() == rows, op, ": scale has ", scale.numel(),
                  " elements, must have ", rows);
  Tensor x = empty(bits, {k, bits.size(1), n}, ScalarType::Float);
  const On on(bits);
  const Tensor b = torch::stable::contiguous(bits), v = torch::stable::contiguous(values),
               s = torch::stable::contiguous(scale);
  const auto* bytes = static_cast<const uint8_t*>(b.const_data_ptr());
  Chunks some(bits, rows * chunks);
  const auto* factor = scale.numel() ? static_cast<const float*>(s.const_data_ptr()) : nullptr;
  check_error(op, fastfact_cuda::bitmap_popcount(bytes, some.counts(), rows, n, on.stream()));
  check_error(op, fastfact_cuda::bitmap_scan(some.counts(), some.offsets(), some.count, on.stream()));
  check_error(op, fastfact_cuda::bitmap_read(bytes, some.offsets(), v.const_data_ptr(), values.numel(),
                                             static_cast<int>(found - std::begin(kValueTypes)), factor,
                                             static_cast<float*>(x.mutable_data_ptr()), rows, n, on.stream()));
  if (!check) return x;
  int64_t total = 0;
  check_error(op, fastfact_cuda::bitmap_total(some.offsets(), some.count, &total, on.stream()));
  STD_TORCH_CHECK(total == values.numel(), op, ": values has ", values.numel(), " elements, must have ", total,
                  ", the bits set");
  return x;
}

// Weights of more rows than this are not in memory at once.
constexpr int64_t kPanel = int64_t{1} << 26;

std::tuple<std::vector<Tensor>, Tensor> similarity_sums(const Tensor& keys_, std::vector<Tensor> uploads,
                                                        const std::optional<Tensor>& valid_, int64_t first,
                                                        int64_t rows, double epsilon, double tau, bool count) {
  const char* op = "similarity_sums";
  const int64_t m = keys_.size(0), d = keys_.size(1);
  const bool integers = keys_.scalar_type() == ScalarType::Char;
  const ScalarType compute = integers ? ScalarType::Float : keys_.scalar_type();
  STD_TORCH_CHECK(compute == ScalarType::Float || compute == ScalarType::Double, op,
                  ": keys must be float32, float64 or int8");
  STD_TORCH_CHECK(!integers || d <= 133144, op, ": int8 keys have ", d, " numbers, at most 133144");
  STD_TORCH_CHECK(first >= 0 && rows >= 0 && first + rows <= m, op, ": first=", first, ", rows=", rows, " of ", m);
  std::vector<Tensor> sums;
  for (Tensor& x : uploads) {
    STD_TORCH_CHECK(x.scalar_type() == compute && x.dim() == 2 && x.size(0) == m, op, ": uploads must be [", m,
                    ", n] in the type of the weights");
    x = torch::stable::contiguous(x);
    sums.push_back(zeros(x, {rows, x.size(1)}));
  }
  const Sizes counted{count ? rows : 0};
  Tensor counts =
      torch::stable::new_zeros(keys_, IntHeaderOnlyArrayRef(counted.data(), counted.size()), ScalarType::Long);
  if (rows == 0 || (uploads.empty() && !count)) return {sums, counts};
  const On on(keys_);
  const auto type = compute == ScalarType::Double ? fastfact_cuda::kDouble : fastfact_cuda::kFloat;
  Tensor keys = torch::stable::contiguous(keys_);
  Tensor inverse = empty(keys, {integers ? m : 0}, ScalarType::Float);
  if (integers) {
    check_error(op, fastfact_cuda::inverse_norms(static_cast<const int8_t*>(keys.const_data_ptr()),
                                                 static_cast<float*>(inverse.mutable_data_ptr()), m, d, on.stream()));
  } else {
    Tensor unit = empty(keys, {m, d});
    check_error(op, fastfact_cuda::unit_keys(type, keys.const_data_ptr(), unit.mutable_data_ptr(), m, d, on.stream()));
    keys = unit;
  }
  std::optional<Tensor> valid;
  if (valid_) valid = torch::stable::contiguous(*valid_);
  // Else the weights of a panel of rows go to memory: where each would be made for several tiles of uploads, and where
  // there are too few blocks of 64 rows to fill a large GPU.
  const bool fused = uploads.size() == 1 && uploads[0].size(1) <= 64 && (m <= 256 || rows >= 264 * 64);
  const int64_t height = fused ? rows : std::max<int64_t>(1, std::min(rows, kPanel / m));
  for (int64_t b = 0; b < rows; b += height) {
    const int64_t some = std::min(height, rows - b);
    Tensor target = fused ? sums[0] : empty(keys, {some, m}, compute);
    check_error(
        op, fastfact_cuda::similarity(
                {type, keys.const_data_ptr(), integers ? static_cast<const float*>(inverse.const_data_ptr()) : nullptr,
                 fused ? uploads[0].const_data_ptr() : nullptr,
                 valid ? static_cast<const uint8_t*>(valid->const_data_ptr()) : nullptr, target.mutable_data_ptr(),
                 count ? static_cast<int64_t*>(counts.mutable_data_ptr()) + b : nullptr, first + b, some, m, d,
                 fused ? uploads[0].size(1) : 0, epsilon, tau},
                on.stream()));
    for (size_t t = 0; t < uploads.size() && !fused; ++t) {
      Tensor part = torch::stable::narrow(sums[t], 0, b, some);
      torch::stable::copy_(part, torch::stable::matmul(target, uploads[t]));
    }
  }
  return {sums, counts};
}

std::tuple<Tensor, Tensor> srht(const Tensor& x_, const Tensor& signs_, const Tensor& rows_, bool quantize) {
  const char* op = "srht";
  const int64_t k = x_.size(0), n = x_.size(1), m = rows_.numel();
  STD_TORCH_CHECK(signs_.scalar_type() == ScalarType::Char && signs_.numel() == n, op, ": signs must be int8 [", n,
                  "]");
  STD_TORCH_CHECK(rows_.scalar_type() == ScalarType::Long, op, ": rows must be int64");
  const auto type = type_of(x_);
  const ScalarType compute = type == fastfact_cuda::kDouble ? ScalarType::Double : ScalarType::Float;
  Tensor kept = empty(x_, {k, m}, compute), out = empty(x_, {quantize ? k : 0, m}, ScalarType::Char);
  Tensor scale = empty(x_, {quantize ? k : 0}, ScalarType::Float);
  if (k > 0 && m > 0) {
    const On on(x_);
    const Tensor x = torch::stable::contiguous(x_), signs = torch::stable::contiguous(signs_),
                 rows = torch::stable::contiguous(rows_);
    const int64_t chunk = fastfact_cuda::srht_chunk(n);
    Tensor work = empty(x, {k, (n + chunk - 1) / chunk * chunk}, compute);
    check_error(op, fastfact_cuda::srht(
                        {type, x.const_data_ptr(), static_cast<const int8_t*>(signs.const_data_ptr()),
                         static_cast<const int64_t*>(rows.const_data_ptr()), work.mutable_data_ptr(),
                         kept.mutable_data_ptr(), quantize ? static_cast<int8_t*>(out.mutable_data_ptr()) : nullptr,
                         quantize ? static_cast<float*>(scale.mutable_data_ptr()) : nullptr, k, n, m},
                        on.stream()));
  }
  return {quantize ? out : kept, scale};
}

}  // namespace

#define FASTFACT_EXPAND(name, device, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)
FASTFACT_EXPAND(FASTFACT_NAMESPACE, FASTFACT_DEVICE, m) {
  m.impl("rank1_weight", TORCH_BOX(&rank1_weight));
  m.impl("rank1_weight_backward", TORCH_BOX(&rank1_weight_backward));
  m.impl("compact_weight", TORCH_BOX(&compact_weight));
  m.impl("compact_weight_backward", TORCH_BOX(&compact_weight_backward));
  m.impl("lowrank_weight", TORCH_BOX(&lowrank_weight));
  m.impl("lowrank_weight_backward", TORCH_BOX(&lowrank_weight_backward));
  m.impl("hadamard_weight", TORCH_BOX(&hadamard_weight));
  m.impl("hadamard_weight_backward", TORCH_BOX(&hadamard_weight_backward));
  m.impl("prox_sgd_step", TORCH_BOX(&prox_sgd_step));
  m.impl("pack_bitmap", TORCH_BOX(&pack_bitmap));
  m.impl("unpack_bitmap", TORCH_BOX(&unpack_bitmap));
  m.impl("similarity_sums", TORCH_BOX(&similarity_sums));
  m.impl("srht", TORCH_BOX(&srht));
}
