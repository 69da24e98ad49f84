// The CPU library's attention.
#include <tuple>

#include "bind.h"
#include "cpu/kernels.h"

namespace {

using namespace fastfact::bind;

// A tensor [(clients,) samples, heads, rows, columns] whose last axis is dense, by its steps; those of one element are
// 0.
fastfact::Heads heads(const Tensor& t) {
  const int64_t axes = t.dim() - 4;
  auto step = [&](int64_t axis) { return axis >= 0 && t.size(axis) > 1 ? t.stride(axis) : 0; };
  return {t.data_ptr(), step(axes - 1), step(axes), step(axes + 1), step(axes + 2)};
}

// A step of 0 between rows has another meaning to the kernel.
Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  const bool dense = last < 1 || t.stride(last) == 1 || t.size(last) == 1;
  const bool repeated = last > 0 && t.size(last - 1) > 1 && t.stride(last - 1) == 0;
  return dense && !repeated ? t : torch::stable::contiguous(t);
}

fastfact::Attention describe(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptionalTensor& mask, bool causal, double scale) {
  if (q.dim() != 4) expect_dim(op, "q", q, 5);
  expect_dim(op, "k", k, q.dim());
  const int64_t axes = q.dim() - 4;
  Shape shape = shape_of(q);
  fastfact::Attention out{};
  out.type = type_of<fastfact::Type>(op, q), out.clients = axes ? shape[0] : 1, out.samples = shape[axes];
  out.heads = shape[axes + 1], out.queries = shape[axes + 2], out.keys = k.size(axes + 2), out.depth = shape[axes + 3];
  shape[axes + 2] = out.keys;
  expect(op, "k", k, shape, q), expect(op, "v", v, shape, q);
  out.causal = causal, out.scale = scale;
  out.q = heads(q), out.k = heads(k), out.v = heads(v);
  if (mask) {
    expect_dim(op, "mask", *mask, q.dim());
    shape[axes + 2] = out.queries, shape[axes + 3] = out.keys;
    for (int64_t d = 0; d < q.dim(); ++d) shape[d] = mask->size(d) == 1 ? 1 : shape[d];
    expect(op, "mask", *mask, shape, q);
    out.mask = heads(*mask), out.mask_column = mask->size(axes + 3) > 1 ? mask->stride(axes + 3) : 0;
  }
  return out;
}

Shape without_depth(const Tensor& q) {
  Shape shape = shape_of(q);
  shape.pop_back();
  return shape;
}

// What attention gives, and the logarithms of its sums or, if `shows`, its weights.
std::tuple<Tensor, Tensor> attend(const char* name, bool shows, Tensor q, Tensor k, Tensor v,
                                  const OptionalTensor& mask, bool causal, double scale) {
  q = with_dense_rows(q), k = with_dense_rows(k), v = with_dense_rows(v);
  fastfact::Attention op = describe(name, q, k, v, mask, causal, scale);
  Tensor out = empty(q, shape_of(q), q.dim() == 5 ? Shape{0, 1, 3, 2, 4} : Shape{0, 2, 1, 3});
  Shape shape = without_depth(q);
  Tensor sums = empty(q, shape), weights = sums;
  if (shows) {
    shape.push_back(op.keys);
    weights = empty(q, shape);
    op.weights = weights.data_ptr();
  }
  op.out = heads(out), op.sums = sums.data_ptr();
  fastfact::attention(op, parallel_for);
  return {out, weights};
}

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, OptionalTensor mask, bool causal, double scale) {
  return attend("attention", false, q, k, v, mask, causal, scale);
}

std::tuple<Tensor, Tensor> attention_weights(Tensor q, Tensor k, Tensor v, OptionalTensor mask, bool causal,
                                             double scale) {
  return attend("attention_weights", true, q, k, v, mask, causal, scale);
}

void attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, OptionalTensor mask, Tensor out, Tensor sums,
                        Tensor dq, Tensor dk, Tensor dv, bool causal, double scale) {
  const char* name = "attention_backward";
  q = with_dense_rows(q), k = with_dense_rows(k), v = with_dense_rows(v);
  grad = with_dense_rows(grad), out = with_dense_rows(out);
  fastfact::Attention op = describe(name, q, k, v, mask, causal, scale);
  const Shape shape = shape_of(k);
  expect(name, "grad", grad, shape_of(q), q), expect(name, "out", out, shape_of(q), q);
  expect(name, "sums", sums, without_depth(q), q), expect(name, "dq", dq, shape_of(q), q);
  expect(name, "dk", dk, shape, q), expect(name, "dv", dv, shape, q);
  for (const Tensor* t : {&dq, &dk, &dv}) {
    const int64_t last = t->dim() - 1;
    require(t->size(last) == 1 || t->stride(last) == 1, name, "the last axes of dq, dk and dv must be dense");
  }
  if (!is_dense(sums, 0)) sums = torch::stable::contiguous(sums);
  op.out = heads(out), op.sums = sums.data_ptr();
  fastfact::attention_backward(op, {heads(grad), heads(dq), heads(dk), heads(dv)}, parallel_for);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_weights", TORCH_BOX(&attention_weights));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
