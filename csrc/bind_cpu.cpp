// The CPU library: checks the tensors of each op, makes outputs, and calls the kernels of csrc/cpu.
#include "bind_cpu.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/kernels.h"

namespace {

using namespace fastfact::bind;
using namespace fastfact::ops;

// Whether a weight [(k,) o, i, kh, kw] is channels_last; `clients` is the number of its client axes, 1 or 0.
bool is_channels_last(const Tensor& t, int64_t clients) {
  return is_dense(t, clients ? Shape{1, 3, 4, 2} : Shape{0, 2, 3, 1});
}

fastfact::Type type_of(const char* op, const Tensor& t) { return fastfact::bind::type_of<fastfact::Type>(op, t); }

// A tensor whose parts are dense: `t` itself, or a copy. Clients that share a part go on sharing it.
Tensor dense(const Tensor& t) { return is_dense(t) ? t : torch::stable::contiguous(t); }

// A view of a weight [(k,) o, i, kh, kw] as [(k,) o, kh, kw, i].
Tensor inputs_last(const Tensor& t, int64_t clients = 1) {
  return torch::stable::transpose(torch::stable::transpose(t, clients + 1, clients + 2), clients + 2, clients + 3);
}

Tensor dense(const Tensor& t, bool channels_last, int64_t clients = 1) {
  if (!channels_last) return is_dense(t, clients) ? t : torch::stable::contiguous(t);
  return is_channels_last(t, clients) ? t : torch::stable::contiguous(inputs_last(t, clients));
}

fastfact::In in(const Tensor& t, int64_t clients = 1) {
  return {data_of(t), clients && t.size(0) > 1 ? t.stride(0) : 0};
}
fastfact::In in(const OptionalTensor& t, int64_t clients = 1) { return t ? in(*t, clients) : fastfact::In{nullptr, 0}; }

// An uninitialised weight [(k,) o, i, kh, kw] or [(k,) o, i]; only the former may be channels_last.
Tensor empty_weight(const Tensor& like, const Shape& shape, bool channels_last) {
  if (!channels_last) return empty(like, shape);
  return empty(like, shape, shape.size() == 5 ? Shape{0, 1, 3, 4, 2} : Shape{0, 2, 3, 1});
}

// The format in which dW is read: channels_last if it is laid out so and not contiguous as well.
bool reads_channels_last(const Tensor& grad, int64_t clients = 1) {
  return grad.dim() == clients + 4 && !is_dense(grad, clients) && is_channels_last(grad, clients);
}

void* wanted(const Tensor& out, int64_t needs, int bit) { return needs >> bit & 1 ? out.data_ptr() : nullptr; }
Tensor empty_if(const Tensor& like, int64_t needs, int bit) {
  return empty(like, needs >> bit & 1 ? shape_of(like) : Shape{0});
}

Shape weight_shape(int64_t clients, const fastfact::Size& s, bool conv) {
  return conv ? Shape{clients, s.o, s.i, s.kh, s.kw} : Shape{clients, s.o, s.i};
}

// What u and v of a rank-1 weight say. These ops take tensors with the client axis or, all of them, without it: the
// views that add it and take it off take longer than a small weight does.
struct Factors {
  const char* op;
  int64_t axes, clients, rank;  // axes: 1, or 0 without clients
  bool conv;
  fastfact::Size size;

  Factors(const char* op, const Tensor& u, const Tensor& v, int64_t layout)
      : op(op), conv(layout != fastfact::kLinear) {
    if (layout < fastfact::kLinear || layout > fastfact::kView)
      fail(op, "layout=" + std::to_string(layout) + ", must be 0 to 3");
    const int64_t dim = conv ? 4 : 3;
    axes = u.dim() == dim - 1 ? 0 : 1;
    expect_dim(op, "u", u, dim - 1 + axes);
    expect_dim(op, "v", v, dim - 1 + axes);
    Shape v_shape = shape_of(v);
    for (int64_t d = 0; d <= axes; ++d) v_shape[d] = u.size(d);
    expect(op, "v", v, v_shape, u);
    clients = axes ? u.size(0) : 1, rank = u.size(axes);
    if (rank == 0) fail(op, "rank is 0");
    const int64_t a = axes + 1, b = axes + 2;
    if (!conv) {
      size = {v.size(a), u.size(a), 1, 1};
    } else if (layout == fastfact::kKernel) {
      size = {v.size(a), u.size(a), u.size(b), v.size(b)};
    } else {
      size = {v.size(a), v.size(b), u.size(a), u.size(b)};
    }
  }

  Shape weight() const {
    Shape shape = weight_shape(clients, size, conv);
    if (!axes) shape.erase(shape.begin());
    return shape;
  }

  // A support of [(k,) nnz] positions, with its values where they are given, each client's part in one stretch.
  fastfact::Support support(const Tensor& u, Tensor& index, Tensor* values) const {
    expect_dim(op, "index", index, axes + 1);
    if ((axes && index.size(0) != clients) || index.scalar_type() != ScalarType::Int || !index.is_cpu()) {
      fail(op, "index has shape " + to_string(shape_of(index)) + ", must be int32 [" + std::to_string(clients) +
                   ", nnz], on the CPU");
    }
    if (values) expect(op, "values", *values, shape_of(index), u);
    for (Tensor* t : {&index, values}) {
      if (t && t->size(axes) > 1 && t->stride(axes) != 1) *t = torch::stable::contiguous(*t);
    }
    return {in(index, axes), index.size(axes)};
  }
};

[[noreturn]] void fail_support(const char* op) { fail(op, "index must be ascending positions in the weight"); }

// W with μ dense, or as values with their index.
Tensor rank1_weight_of(const char* op, OptionalTensor mu, Tensor* index, Tensor u, Tensor v, int64_t layout,
                       bool channels_last) {
  const Factors of(op, u, v, layout);
  channels_last = channels_last && of.conv;
  fastfact::Support support{};
  if (index) {
    support = of.support(u, *index, &*mu);
    if (support.count == 0) mu.reset();
  } else if (mu) {
    expect(op, "mu", *mu, of.weight(), u);
    mu = dense(*mu, channels_last, of.axes);
  }
  u = dense(u, false, of.axes), v = dense(v, false, of.axes);
  Tensor w = empty_weight(u, of.weight(), channels_last);
  const bool done = fastfact::rank1_weight({type_of(op, u), int(layout), channels_last, of.clients, of.rank, of.size,
                                            in(mu, of.axes), in(u, of.axes), in(v, of.axes), w.data_ptr(), support},
                                           parallel_for);
  if (!done) fail_support(op);
  return w;
}

// (du, dv, dW on the support `index`); bits 0–2 of `needs` ask for them.
std::tuple<Tensor, Tensor, Tensor> rank1_gradients(const char* op, Tensor grad, Tensor u, Tensor v, Tensor* index,
                                                   int64_t layout, int64_t needs) {
  const Factors of(op, u, v, layout);
  expect(op, "grad", grad, of.weight(), u);
  fastfact::Support support{};
  if (index) support = of.support(u, *index, nullptr);
  const bool channels_last = layout != fastfact::kView && reads_channels_last(grad, of.axes);
  u = dense(u, false, of.axes), v = dense(v, false, of.axes), grad = dense(grad, channels_last, of.axes);
  Tensor du = empty_if(u, needs, 0), dv = empty_if(v, needs, 1);
  Tensor dvalues = empty(u, needs & 4 ? shape_of(*index) : Shape{0});
  const bool done = fastfact::rank1_weight_backward(
      {type_of(op, u), int(layout), channels_last, of.clients, of.rank, of.size, in(grad, of.axes), in(u, of.axes),
       in(v, of.axes), wanted(du, needs, 0), wanted(dv, needs, 1), support, wanted(dvalues, needs, 2)},
      parallel_for);
  if (!done) fail_support(op);
  return {du, dv, dvalues};
}

}  // namespace

namespace fastfact::ops {

Tensor rank1_weight(OptionalTensor mu, Tensor u, Tensor v, int64_t layout, bool channels_last) {
  return rank1_weight_of("rank1_weight", std::move(mu), nullptr, u, v, layout, channels_last);
}

Tensor compact_weight(Tensor u, Tensor v, Tensor values, Tensor index, int64_t layout, bool channels_last) {
  return rank1_weight_of("compact_weight", values, &index, u, v, layout, channels_last);
}

std::tuple<Tensor, Tensor> rank1_weight_backward(Tensor grad, Tensor u, Tensor v, int64_t layout, int64_t needs) {
  auto [du, dv, none] = rank1_gradients("rank1_weight_backward", grad, u, v, nullptr, layout, needs & 3);
  return {du, dv};
}

std::tuple<Tensor, Tensor, Tensor> compact_weight_backward(Tensor grad, Tensor u, Tensor v, Tensor, Tensor index,
                                                           int64_t layout, int64_t needs) {
  return rank1_gradients("compact_weight_backward", grad, u, v, &index, layout, needs);
}

}  // namespace fastfact::ops

namespace {

// `size` of a weight as an op has it: [o, i, kh, kw] or [o, i].
fastfact::Size weight_size(const char* op, const Shape& size) {
  bool valid = size.size() == 2 || size.size() == 4;
  for (int64_t extent : size) valid = valid && extent >= 0;
  if (!valid) fail(op, "size=" + to_string(size) + ", must be [o, i] or [o, i, kh, kw]");
  return size.size() == 2 ? fastfact::Size{size[0], size[1], 1, 1} : fastfact::Size{size[0], size[1], size[2], size[3]};
}

// What a and b of a low-rank weight say, with the client axis or without it, as those of a rank-1 weight.
struct LowRankShapes {
  int64_t axes, clients, rank;
  fastfact::Size size;
  bool conv;

  LowRankShapes(const char* op, const Tensor& a, const Tensor& b, int64_t layout, const Shape& of)
      : axes(a.dim() == 2 ? 0 : 1), size(weight_size(op, of)), conv(of.size() == 4) {
    if (layout != fastfact::kView && layout != fastfact::kSeparable) {
      fail(op, "layout=" + std::to_string(layout) + ", must be 3 or 4");
    }
    expect_dim(op, "a", a, 2 + axes);
    clients = axes ? a.size(0) : 1, rank = a.size(axes);
    const bool view = layout == fastfact::kView;
    expect(op, "a", a, with_clients({rank, (view ? size.i : size.o) * size.kw}), a);
    expect(op, "b", b, with_clients({(view ? size.o : size.i) * size.kh, rank}), a);
  }

  Shape with_clients(Shape shape) const {
    if (axes) shape.insert(shape.begin(), clients);
    return shape;
  }
  Shape weight() const { return with_clients(conv ? Shape{size.o, size.i, size.kh, size.kw} : Shape{size.o, size.i}); }
};

// `weight` [(k,) o, i, kh, kw] in the memory order of channels_last.
Tensor to_channels_last(const Tensor& weight, int64_t axes) {
  const Tensor inner = torch::stable::contiguous(inputs_last(weight, axes));
  return torch::stable::transpose(torch::stable::transpose(inner, 2 + axes, 3 + axes), 1 + axes, 2 + axes);
}

// Each client's part of t, dense, in another shape.
Tensor reshaped(const Tensor& t, int64_t axes, const Shape& shape) {
  Shape strides(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > size_t(axes); step *= shape[d]) strides[d] = step;
  if (axes) strides[0] = t.stride(0);
  return viewed(t, shape, strides);
}

// scaling · t, the matrix [rows, columns] of each client `turned` if asked, in this shape.
Tensor scaled_factor(const char* op, const Tensor& t, bool turned, double scaling, const Shape& shape, int64_t axes) {
  const Tensor from = is_dense(t, axes) ? t : torch::stable::contiguous(t);
  if (!turned && scaling == 1) return reshaped(from, axes, shape);
  const int64_t rows = t.size(axes), columns = t.size(axes + 1);
  const Tensor out = empty(t, shape);
  fastfact::scaled({type_of(op, t), axes ? t.size(0) : 1, turned ? columns : rows, turned ? rows : columns,
                    in(from, axes), turned ? 1 : columns, turned ? columns : 1, scaling, out.data_ptr()},
                   parallel_for);
  return out;
}

// Whether the weight, or its factors' gradients, take less as those of a rank-1 weight than as products of matrices.
// Not of float16, in which scaling · a factor may be out of range where the product is not.
bool has_few_ranks(const LowRankShapes& of, fastfact::Type type, bool backward) {
  const bool in_rows = of.size.taps() == 1;
  return of.rank && of.rank <= (backward ? 8 : 16) && type != fastfact::Type::f16 &&
         (in_rows || type != fastfact::Type::bf16);
}

}  // namespace

namespace fastfact::ops {

bool LowRankFactors::exist(const Shape& size, int64_t layout) {
  return layout != kView || size.size() == 2 || size[2] * size[3] == 1;
}

LowRankFactors::LowRankFactors(const char* op, const Tensor& a, const Tensor& b, int64_t layout, const Shape& size,
                               double scaling)
    : layout(size.size() == 4 ? kKernel : kLinear),
      op_(op),
      b_is_u_(layout != kView),
      scaling_(scaling),
      a_(shape_of(a)),
      b_(shape_of(b)) {
  const LowRankShapes of(op, a, b, layout, size);
  const auto& [o, i, kh, kw] = of.size;
  const Shape us = of.conv ? Shape{of.rank, i, kh} : Shape{of.rank, i};
  const Shape vs = of.conv ? Shape{of.rank, o, kw} : Shape{of.rank, o};
  u = scaled_factor(op, b_is_u_ ? b : a, b_is_u_, 1, of.with_clients(us), of.axes);
  v = scaled_factor(op, b_is_u_ ? a : b, !b_is_u_, scaling, of.with_clients(vs), of.axes);
}

Tensor LowRankFactors::of_a(const Tensor& du, const Tensor& dv) const {
  const int64_t axes = a_.size() - 2;
  if (!b_is_u_) return reshaped(du, axes, a_);
  return scaled_factor(op_, reshaped(dv, axes, a_), false, scaling_, a_, axes);
}

Tensor LowRankFactors::of_b(const Tensor& du, const Tensor& dv) const {
  const int64_t axes = b_.size() - 2;
  Shape turned = b_;
  std::swap(turned[axes], turned[axes + 1]);
  return scaled_factor(op_, reshaped(b_is_u_ ? du : dv, axes, turned), true, b_is_u_ ? 1 : scaling_, b_, axes);
}

int64_t LowRankFactors::needs(int64_t of_a_and_b) const {
  return b_is_u_ ? of_a_and_b >> 1 | (of_a_and_b & 1) << 1 : of_a_and_b;
}

Tensor lowrank_weight(OptionalTensor sigma, Tensor a, Tensor b, int64_t layout, Shape size, double scaling,
                      bool channels_last) {
  const char* op = "lowrank_weight";
  const LowRankShapes of(op, a, b, layout, size);
  if (sigma) expect(op, "sigma", *sigma, of.weight(), a);
  if (LowRankFactors::exist(size, layout) && has_few_ranks(of, type_of(op, a), false)) {
    const LowRankFactors factors(op, a, b, layout, size, scaling);
    return rank1_weight_of(op, std::move(sigma), nullptr, factors.u, factors.v, factors.layout, channels_last);
  }
  const bool permutes = channels_last && of.conv && layout == fastfact::kView;
  channels_last = channels_last && of.conv && !permutes;
  a = dense(a, false, of.axes), b = dense(b, false, of.axes);
  if (sigma) sigma = dense(*sigma, channels_last, of.axes);
  Tensor w = empty_weight(a, of.weight(), channels_last);
  fastfact::lowrank_weight({type_of(op, a), int(layout), channels_last, of.clients, of.rank, of.size, scaling,
                            in(sigma, of.axes), in(a, of.axes), in(b, of.axes), w.data_ptr()},
                           parallel_for);
  return permutes ? to_channels_last(w, of.axes) : w;
}

std::tuple<Tensor, Tensor> lowrank_weight_backward(Tensor grad, Tensor a, Tensor b, int64_t layout, Shape size,
                                                   double scaling, int64_t needs) {
  const char* op = "lowrank_weight_backward";
  const LowRankShapes of(op, a, b, layout, size);
  expect(op, "grad", grad, of.weight(), a);
  if (LowRankFactors::exist(size, layout) && has_few_ranks(of, type_of(op, a), true)) {
    const LowRankFactors factors(op, a, b, layout, size, scaling);
    const auto [du, dv, none] =
        rank1_gradients(op, grad, factors.u, factors.v, nullptr, factors.layout, factors.needs(needs & 3));
    return {needs & 1 ? factors.of_a(du, dv) : empty(a, {0}), needs & 2 ? factors.of_b(du, dv) : empty(b, {0})};
  }
  const bool channels_last = layout != fastfact::kView && reads_channels_last(grad, of.axes);
  a = dense(a, false, of.axes), b = dense(b, false, of.axes), grad = dense(grad, channels_last, of.axes);
  Tensor da = empty_if(a, needs, 0), db = empty_if(b, needs, 1);
  fastfact::lowrank_weight_backward(
      {type_of(op, a), int(layout), channels_last, of.clients, of.rank, of.size, scaling, in(grad, of.axes),
       in(a, of.axes), in(b, of.axes), wanted(da, needs, 0), wanted(db, needs, 1)},
      parallel_for);
  return {da, db};
}

}  // namespace fastfact::ops

namespace {

// What x [k, n, i], σ [o, i] or [k, o, i], a [k, r, i] and b [k, o, r] say together; `like` is x, or dy [k, n, o].
struct Adapted {
  int64_t clients, rows, inputs, outputs, rank, sigma_row, sigma_column;
  fastfact::In sigma;

  Adapted(const char* op, const char* name, const Tensor& like, bool backward, const Tensor& frozen, const Tensor& a,
          const Tensor& b) {
    expect_dim(op, name, like, 3), expect_dim(op, "a", a, 3);
    if (frozen.dim() != 2) expect_dim(op, "sigma", frozen, 3);
    const int64_t own = frozen.dim() - 2;
    clients = like.size(0), rows = like.size(1), rank = a.size(1);
    outputs = frozen.size(own), inputs = frozen.size(own + 1);
    sigma_row = frozen.stride(own), sigma_column = frozen.stride(own + 1);
    sigma = in(frozen, own);
    expect(op, name, like, {clients, rows, backward ? outputs : inputs}, like);
    expect(op, "sigma", frozen, own ? Shape{clients, outputs, inputs} : Shape{outputs, inputs}, like);
    expect(op, "a", a, {clients, rank, inputs}, like);
    expect(op, "b", b, {clients, outputs, rank}, like);
  }
};

std::tuple<Tensor, Tensor> lowrank_linear(Tensor x, OptionalTensor seen, Tensor sigma, Tensor a, Tensor b,
                                          OptionalTensor bias, double scaling) {
  const char* op = "lowrank_linear";
  const Adapted of(op, "x", x, false, sigma, a, b);
  if (seen) expect(op, "seen", *seen, shape_of(x), x);
  if (bias) expect(op, "bias", *bias, bias->dim() == 1 ? Shape{of.outputs} : Shape{of.clients, of.outputs}, x);
  x = dense(x), a = dense(a), b = dense(b);
  if (seen) seen = dense(*seen);
  const int64_t own = bias ? bias->dim() - 1 : 0;
  if (bias && !is_dense(*bias, own)) bias = torch::stable::contiguous(*bias);
  Tensor y = empty(x, {of.clients, of.rows, of.outputs}), hidden = empty(x, {of.clients, of.rows, of.rank});
  fastfact::adapter({type_of(op, x), of.clients, of.rows, of.inputs, of.outputs, of.rank, scaling, in(x), in(seen),
                     of.sigma, in(a), in(b), in(bias, own), of.sigma_row, of.sigma_column, y.data_ptr(),
                     hidden.data_ptr(), torch::stable::get_num_threads()},
                    parallel_for);
  return {y, hidden};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> lowrank_linear_backward(Tensor grad, Tensor seen, Tensor sigma, Tensor a,
                                                                   Tensor b, Tensor hidden, double scaling,
                                                                   int64_t needs) {
  const char* op = "lowrank_linear_backward";
  const Adapted of(op, "grad", grad, true, sigma, a, b);
  expect(op, "seen", seen, {of.clients, of.rows, of.inputs}, grad);
  expect(op, "hidden", hidden, {of.clients, of.rows, of.rank}, grad);
  grad = dense(grad), seen = dense(seen), a = dense(a), b = dense(b), hidden = dense(hidden);
  const Shape inputs = {of.clients, of.rows, of.inputs}, none = {0};
  Tensor dx = empty(grad, needs & 1 ? inputs : none), dseen = empty(grad, needs & 2 ? inputs : none);
  Tensor da = empty_if(a, needs, 2), db = empty_if(b, needs, 3);
  fastfact::adapter_backward({type_of(op, grad),
                              of.clients,
                              of.rows,
                              of.inputs,
                              of.outputs,
                              of.rank,
                              scaling,
                              in(grad),
                              in(seen),
                              of.sigma,
                              in(a),
                              in(b),
                              in(hidden),
                              of.sigma_row,
                              of.sigma_column,
                              (needs & 16) != 0,
                              wanted(dx, needs, 0),
                              wanted(dseen, needs, 1),
                              wanted(da, needs, 2),
                              wanted(db, needs, 3),
                              torch::stable::get_num_threads()},
                             parallel_for);
  return {dx, dseen, da, db};
}

void check_hadamard(const char* op, const Tensor& x1, const Tensor& y1, const Tensor& x2, const Tensor& y2,
                    const fastfact::Size& s) {
  expect_dim(op, "x1", x1, 3);
  expect_dim(op, "x2", x2, 3);
  const int64_t k = x1.size(0), rank1 = x1.size(2), rank2 = x2.size(2), columns = s.i * s.taps();
  expect(op, "x1", x1, {k, s.o, rank1}, x1);
  expect(op, "y1", y1, {k, columns, rank1}, x1);
  expect(op, "x2", x2, {k, s.o, rank2}, x1);
  expect(op, "y2", y2, {k, columns, rank2}, x1);
}

Tensor hadamard_weight(Tensor x1, Tensor y1, Tensor x2, Tensor y2, Shape size, bool personalized, bool channels_last) {
  const char* op = "hadamard_weight";
  const fastfact::Size s = weight_size(op, size);
  check_hadamard(op, x1, y1, x2, y2, s);
  const bool conv = size.size() == 4;
  channels_last = channels_last && conv;
  x1 = dense(x1), y1 = dense(y1), x2 = dense(x2), y2 = dense(y2);
  Tensor w = empty_weight(x1, weight_shape(x1.size(0), s, conv), channels_last);
  fastfact::hadamard_weight({type_of(op, x1), channels_last, personalized, x1.size(0), x1.size(2), x2.size(2), s,
                             in(x1), in(y1), in(x2), in(y2), w.data_ptr()},
                            parallel_for);
  return w;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hadamard_weight_backward(Tensor grad, Tensor x1, Tensor y1, Tensor x2,
                                                                    Tensor y2, Shape size, bool personalized,
                                                                    int64_t needs) {
  const char* op = "hadamard_weight_backward";
  const fastfact::Size s = weight_size(op, size);
  check_hadamard(op, x1, y1, x2, y2, s);
  expect(op, "grad", grad, weight_shape(x1.size(0), s, size.size() == 4), x1);
  const bool channels_last = reads_channels_last(grad);
  x1 = dense(x1), y1 = dense(y1), x2 = dense(x2), y2 = dense(y2), grad = dense(grad, channels_last);
  Tensor dx1 = empty_if(x1, needs, 0), dy1 = empty_if(y1, needs, 1);
  Tensor dx2 = empty_if(x2, needs, 2), dy2 = empty_if(y2, needs, 3);
  fastfact::hadamard_weight_backward(
      {type_of(op, x1), channels_last, personalized, x1.size(0), x1.size(2), x2.size(2), s, in(grad), in(x1), in(y1),
       in(x2), in(y2), wanted(dx1, needs, 0), wanted(dy1, needs, 1), wanted(dx2, needs, 2), wanted(dy2, needs, 3)},
      parallel_for);
  return {dx1, dy1, dx2, dy2};
}

void prox_sgd_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> momenta,
                   std::vector<double> l1, double lr, double momentum, double weight_decay, bool proximal) {
  const char* op = "prox_sgd_step";
  const size_t count = params.size();
  if (grads.size() != count || l1.size() != count || (momentum != 0 && momenta.size() != count)) {
    fail(op, std::to_string(count) + " params, " + std::to_string(grads.size()) + " grads, " +
                 std::to_string(l1.size()) + " l1, " + std::to_string(momenta.size()) + " momenta: must be as many");
  }
  for (size_t n = 0; n < count; ++n) {
    type_of(op, params[n]);
    expect(op, "a param", params[n], shape_of(params[n]), params[n]);
    expect(op, "a grad", grads[n], shape_of(params[n]), params[n]);
    if (momentum != 0) expect(op, "a momentum", momenta[n], shape_of(params[n]), params[n]);
  }
  std::vector<fastfact::Step> steps;
  std::vector<Tensor> kept;                          // temporary copies
  std::vector<std::pair<Tensor, Tensor>> copy_back;  // (to, from)
  for (size_t n = 0; n < count; ++n) {
    Tensor p = params[n], g = grads[n];
    std::optional<Tensor> m;
    if (momentum != 0) m = momenta[n];
    if (!fills_memory(p) || (m && !same_strides(p, *m))) {
      p = torch::stable::clone(torch::stable::contiguous(p));
      copy_back.emplace_back(params[n], p);
      if (m) {
        m = torch::stable::clone(torch::stable::contiguous(*m));
        copy_back.emplace_back(momenta[n], *m);
      }
    }
    if (!same_strides(p, g)) {
      Tensor copy = torch::stable::empty_like(p);
      g = torch::stable::copy_(copy, g);
    }
    kept.push_back(g);
    steps.push_back({type_of(op, p), p.numel(), p.data_ptr(), g.data_ptr(), m ? m->data_ptr() : nullptr, l1[n]});
  }
  fastfact::prox_sgd_step({lr, momentum, weight_decay, proximal}, steps.data(), steps.size(), parallel_for);
  for (auto& [to, from] : copy_back) torch::stable::copy_(to, from);
}

std::tuple<Tensor, Tensor, Tensor> pack_bitmap(Tensor x, int64_t value_type) {
  const char* op = "pack_bitmap";
  expect_dim(op, "x", x, 3);
  if (value_type < 0 || value_type > 2) fail(op, "value_type=" + std::to_string(value_type) + ", must be 0, 1 or 2");
  const fastfact::Type type = type_of(op, x);
  const auto value = static_cast<fastfact::Value>(value_type);
  constexpr ScalarType value_types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Char};
  x = torch::stable::contiguous(x);
  const int64_t k = x.size(0), rows = x.size(1), n = x.size(2);
  Tensor bits = torch::stable::new_empty(x, {k, rows, (n + 7) / 8}, ScalarType::Byte);
  std::vector<int64_t> offsets(k * rows * fastfact::bitmap_chunks(n) + 1);
  auto* bits_data = static_cast<uint8_t*>(bits.data_ptr());
  fastfact::pack_bits(type, x.data_ptr(), k * rows, n, bits_data, offsets.data(), parallel_for);
  Tensor values = torch::stable::new_empty(x, {offsets.back()}, value_types[value_type]);
  const bool scaled = value == fastfact::Value::i8;
  Tensor scale = torch::stable::new_empty(x, scaled ? Shape{k, rows} : Shape{0}, ScalarType::Float);
  fastfact::pack_values(type, x.data_ptr(), k * rows, n, bits_data, offsets.data(), value, values.data_ptr(),
                        scaled ? static_cast<float*>(scale.data_ptr()) : nullptr, parallel_for);
  return {bits, values, scale};
}

// Always checked: on the CPU nothing waits for it.
Tensor unpack_bitmap(Tensor bits, Tensor values, Tensor scale, int64_t n, bool) {
  const char* op = "unpack_bitmap";
  expect_dim(op, "bits", bits, 3);
  const int64_t k = bits.size(0), rows = bits.size(1);
  if (n < 0 || bits.size(2) != (n + 7) / 8 || bits.scalar_type() != ScalarType::Byte) {
    fail(op, "bits has shape " + to_string(shape_of(bits)) + " with n=" + std::to_string(n) +
                 ", must be uint8 with ceil(n / 8) bytes a row");
  }
  expect_dim(op, "values", values, 1);
  if (!values.is_cpu() || !scale.is_cpu()) fail(op, "tensors must be on the CPU");
  if (scale.numel() != 0 && shape_of(scale) != Shape{k, rows}) {
    fail(op, "scale has shape " + to_string(shape_of(scale)) + ", must be " + to_string({k, rows}) + " or empty");
  }
  fastfact::Value value = fastfact::Value::f32;
  if (values.scalar_type() == ScalarType::BFloat16) {
    value = fastfact::Value::bf16;
  } else if (values.scalar_type() == ScalarType::Char) {
    value = fastfact::Value::i8;
  } else if (values.scalar_type() != ScalarType::Float) {
    values = torch::stable::to(values, ScalarType::Float);
  }
  if (scale.scalar_type() != ScalarType::Float) scale = torch::stable::to(scale, ScalarType::Float);
  bits = torch::stable::contiguous(bits), values = torch::stable::contiguous(values);
  scale = torch::stable::contiguous(scale);
  std::vector<int64_t> offsets(k * rows * fastfact::bitmap_chunks(n) + 1);
  const auto* bits_data = static_cast<const uint8_t*>(bits.data_ptr());
  fastfact::count_bits(bits_data, k * rows, n, offsets.data(), parallel_for);
  if (offsets.back() != values.numel()) {
    fail(op,
         std::to_string(offsets.back()) + " bits are set but there are " + std::to_string(values.numel()) + " values");
  }
  Tensor x = torch::stable::new_empty(bits, {k, rows, n}, ScalarType::Float);
  fastfact::unpack_values(bits_data, offsets.data(), k * rows, n, value, values.data_ptr(),
                          scale.numel() ? static_cast<const float*>(scale.data_ptr()) : nullptr,
                          static_cast<float*>(x.data_ptr()), parallel_for);
  return x;
}

// Rows of the samples [any number, …] of each client; `data` keeps what the kernels are given pointers into.
struct RowsOf {
  std::vector<Tensor> samples;
  std::vector<const void*> data;
  Tensor index;
  fastfact::SampleRows rows;

  RowsOf(const char* op, std::vector<Tensor> of, const Tensor& at) : samples(std::move(of)), index(at) {
    expect_dim(op, "index", index, 2);
    const int64_t clients = index.size(0), batch = index.size(1);
    if (index.scalar_type() != ScalarType::Long || !index.is_cpu()) fail(op, "index must be int64, on the CPU");
    if (samples.empty() || static_cast<int64_t>(samples.size()) != clients) {
      fail(op, std::to_string(samples.size()) + " samples, index has " + std::to_string(clients) +
                   " clients: must be as many, at least 1");
    }
    if (index.stride(1) != 1 && batch > 1) index = torch::stable::contiguous(index);
    rows.index = static_cast<const int64_t*>(index.data_ptr()), rows.index_stride = index.stride(0);
    const Shape shape = row_shape(op, samples[0]);
    rows.clients = clients, rows.batch = batch, rows.width = 1;
    for (int64_t n : shape) rows.width *= n;
    for (int64_t k = 0; k < clients; ++k) {
      Tensor& some = samples[k];
      const int64_t there = some.dim() ? some.size(0) : 0;
      if (row_shape(op, some) != shape || some.scalar_type() != samples[0].scalar_type() || !some.is_cpu()) {
        fail(op, "samples " + std::to_string(k) + " have shape " + to_string(shape_of(some)) +
                     ", must have rows of shape " + to_string(shape) + " and the type of the others, on the CPU");
      }
      for (int64_t n = 0; n < batch; ++n) {
        const int64_t row = rows.index[k * rows.index_stride + n];
        if (row < 0 || row >= there) {
          fail(op, "index has " + std::to_string(row) + " for client " + std::to_string(k) + ", must be 0 to " +
                       std::to_string(there - 1));
        }
      }
      if (!some.is_contiguous()) some = torch::stable::contiguous(some);
      data.push_back(some.data_ptr());
    }
    rows.samples = data.data();
  }
  RowsOf(const RowsOf&) = delete;
  RowsOf& operator=(const RowsOf&) = delete;

  static Shape row_shape(const char* op, const Tensor& t) {
    if (t.dim() == 0) fail(op, "samples must have at least 1 dimension");
    const Shape shape = shape_of(t);
    return Shape(shape.begin() + 1, shape.end());
  }
};

Tensor gather_rows(std::vector<Tensor> samples, Tensor index) {
  const char* op = "gather_rows";
  const RowsOf of(op, std::move(samples), index);
  Shape shape = shape_of(of.samples[0]);
  shape[0] = of.rows.batch;
  shape.insert(shape.begin(), of.rows.clients);
  Tensor out = empty(of.samples[0], shape);
  fastfact::gather_rows(of.rows, of.rows.width * out.element_size(), out.data_ptr(), parallel_for);
  return out;
}

Tensor rows_linear(std::vector<Tensor> samples, Tensor index, Tensor weight) {
  const char* op = "rows_linear";
  const RowsOf of(op, std::move(samples), index);
  expect_dim(op, "weight", weight, 3);
  const int64_t outputs = weight.size(1);
  expect(op, "weight", weight, {of.rows.clients, outputs, of.rows.width}, of.samples[0]);
  weight = dense(weight);
  Tensor y = empty(weight, {of.rows.clients, of.rows.batch, outputs});
  fastfact::rows_linear(of.rows, type_of(op, weight), in(weight), outputs, y.data_ptr(), parallel_for);
  return y;
}

Tensor rows_linear_backward(std::vector<Tensor> samples, Tensor index, Tensor grad) {
  const char* op = "rows_linear_backward";
  const RowsOf of(op, std::move(samples), index);
  expect_dim(op, "grad", grad, 3);
  const int64_t outputs = grad.size(2);
  expect(op, "grad", grad, {of.rows.clients, of.rows.batch, outputs}, of.samples[0]);
  grad = dense(grad);
  Tensor dw = empty(grad, {of.rows.clients, outputs, of.rows.width});
  fastfact::rows_linear_backward(of.rows, type_of(op, grad), in(grad), outputs, dw.data_ptr(), parallel_for);
  return dw;
}

// The labels [clients, batch] in memory; `labels` keeps them.
const int64_t* labels_of(const char* op, Tensor& labels, int64_t clients, int64_t batch, int64_t classes) {
  if (shape_of(labels) != Shape{clients, batch} || labels.scalar_type() != ScalarType::Long || !labels.is_cpu()) {
    fail(op, "labels has shape " + to_string(shape_of(labels)) + ", must be int64 " + to_string({clients, batch}) +
                 ", on the CPU");
  }
  labels = torch::stable::contiguous(labels);
  const auto* label = static_cast<const int64_t*>(labels.data_ptr());
  for (int64_t n = 0; n < clients * batch; ++n) {
    if (label[n] < 0 || label[n] >= classes) {
      fail(op, "labels has " + std::to_string(label[n]) + ", must be 0 to " + std::to_string(classes - 1));
    }
  }
  return label;
}

std::tuple<Tensor, Tensor> softmax_loss(Tensor logits, Tensor labels) {
  const char* op = "softmax_loss";
  expect_dim(op, "logits", logits, 3);
  const int64_t clients = logits.size(0), batch = logits.size(1), classes = logits.size(2);
  const fastfact::Type type = type_of(op, logits);
  const int64_t* label = labels_of(op, labels, clients, batch, classes);
  logits = torch::stable::contiguous(logits);
  Tensor losses = empty(logits, {clients}), grad = empty(logits, {clients, batch, classes});
  fastfact::softmax_loss({type, clients, batch, classes, logits.data_ptr(), label, losses.data_ptr(), grad.data_ptr()},
                         parallel_for);
  return {losses, grad};
}

std::tuple<Tensor, Tensor, Tensor> rows_softmax_loss(std::vector<Tensor> samples, Tensor index, Tensor weight,
                                                     std::optional<Tensor> bias, Tensor labels) {
  const char* op = "rows_softmax_loss";
  const RowsOf of(op, std::move(samples), index);
  const auto [clients, batch, width] = std::tuple(of.rows.clients, of.rows.batch, of.rows.width);
  expect_dim(op, "weight", weight, 3);
  const int64_t classes = weight.size(1);
  const fastfact::Type type = type_of(op, weight);
  expect(op, "weight", weight, {clients, classes, width}, of.samples[0]);
  if (bias) expect(op, "bias", *bias, {clients, classes}, weight);
  const int64_t* label = labels_of(op, labels, clients, batch, classes);
  weight = dense(weight);
  if (bias) bias = torch::stable::contiguous(*bias);
  Tensor losses = empty(weight, {clients}), grad = empty(weight, {clients, batch, classes});
  Tensor dw = empty(weight, {clients, classes, width});
  fastfact::rows_softmax_loss(of.rows,
                              {type, clients, batch, classes, nullptr, label, losses.data_ptr(), grad.data_ptr()},
                              in(weight), bias ? fastfact::In{bias->data_ptr(), classes} : fastfact::In{},
                              dw.data_ptr(), torch::stable::get_num_threads(), parallel_for);
  return {losses, grad, dw};
}

// Of the shapes, types, memory formats and numbers of all tensors.
int64_t digest(std::vector<Tensor> tensors) {
  uint64_t out = tensors.size();
  for (const Tensor& t : tensors) {
    if (!t.is_cpu()) fail("digest", "tensors must be on the CPU");
    Shape facts = {t.dim(), static_cast<int64_t>(t.scalar_type())};
    bool gaps = t.numel() == 0;
    std::vector<std::pair<int64_t, int64_t>> axes;  // (stride, size)
    for (int64_t d = 0; d < t.dim(); ++d) {
      facts.push_back(t.size(d)), facts.push_back(t.stride(d));
      if (t.size(d) != 1) axes.emplace_back(t.stride(d), t.size(d));
    }
    std::sort(axes.begin(), axes.end());
    int64_t expected = 1;
    for (const auto& [stride, size] : axes) gaps |= stride != expected, expected *= size;
    const Tensor whole = gaps ? torch::stable::contiguous(t) : t;
    out = fastfact::digest(facts.data(), facts.size() * sizeof(int64_t), out, parallel_for);
    out = fastfact::digest(data_of(whole), whole.numel() * whole.element_size(), out, parallel_for);
  }
  return static_cast<int64_t>(out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("rank1_weight", TORCH_BOX(&rank1_weight));
  m.impl("rank1_weight_backward", TORCH_BOX(&rank1_weight_backward));
  m.impl("compact_weight", TORCH_BOX(&compact_weight));
  m.impl("compact_weight_backward", TORCH_BOX(&compact_weight_backward));
  m.impl("lowrank_weight", TORCH_BOX(&lowrank_weight));
  m.impl("lowrank_weight_backward", TORCH_BOX(&lowrank_weight_backward));
  m.impl("lowrank_linear", TORCH_BOX(&lowrank_linear));
  m.impl("lowrank_linear_backward", TORCH_BOX(&lowrank_linear_backward));
  m.impl("hadamard_weight", TORCH_BOX(&hadamard_weight));
  m.impl("hadamard_weight_backward", TORCH_BOX(&hadamard_weight_backward));
  m.impl("digest", TORCH_BOX(&digest));
  m.impl("prox_sgd_step", TORCH_BOX(&prox_sgd_step));
  m.impl("pack_bitmap", TORCH_BOX(&pack_bitmap));
  m.impl("unpack_bitmap", TORCH_BOX(&unpack_bitmap));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("rows_linear", TORCH_BOX(&rows_linear));
  m.impl("rows_linear_backward", TORCH_BOX(&rows_linear_backward));
  m.impl("softmax_loss", TORCH_BOX(&softmax_loss));
  m.impl("rows_softmax_loss", TORCH_BOX(&rows_softmax_loss));
}
