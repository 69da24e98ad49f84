// The CPU library's attention.
#include <tuple>

#include "bind.h"
#include "cpu/kernels.h"

namespace {

using namespace fastfact::bind;

// A tensor [clients, samples, heads, rows, columns] whose last axis is dense, by its steps; those of one element are 0.
fastfact::Heads heads(const Tensor& t) {
  auto step = [&](int64_t axis) { return t.size(axis) > 1 ? t.stride(axis) : 0; };
  return {t.data_ptr(), step(0), step(1), step(2), step(3)};
}

Tensor with_dense_rows(const Tensor& t) {
  return t.stride(4) == 1 || t.size(4) == 1 ? t : torch::stable::contiguous(t);
}

fastfact::Attention describe(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptionalTensor& mask, bool causal, double scale) {
  expect_dim(op, "q", q, 5), expect_dim(op, "k", k, 5);
  fastfact::Attention out{};
  out.type = type_of<fastfact::Type>(op, q), out.clients = q.size(0), out.samples = q.size(1), out.heads = q.size(2);
  out.queries = q.size(3), out.keys = k.size(3), out.depth = q.size(4);
  expect(op, "k", k, {out.clients, out.samples, out.heads, out.keys, out.depth}, q);
  expect(op, "v", v, shape_of(k), q);
  out.causal = causal, out.scale = scale;
  out.q = heads(q), out.k = heads(k), out.v = heads(v);
  if (mask) {
    expect_dim(op, "mask", *mask, 5);
    Shape shape = {out.clients, out.samples, out.heads, out.queries, out.keys};
    for (int64_t d = 0; d < 5; ++d) shape[d] = mask->size(d) == 1 ? 1 : shape[d];
    expect(op, "mask", *mask, shape, q);
    out.mask = heads(*mask), out.mask_column = mask->size(4) > 1 ? mask->stride(4) : 0;
  }
  out.threads = torch::stable::get_num_threads();
  return out;
}

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, OptionalTensor mask, bool causal, double scale) {
  q = with_dense_rows(q), k = with_dense_rows(k), v = with_dense_rows(v);
  fastfact::Attention op = describe("attention", q, k, v, mask, causal, scale);
  Tensor out = empty(q, shape_of(q), {0, 1, 3, 2, 4});
  Tensor sums = empty(q, {op.clients, op.samples, op.heads, op.queries});
  op.out = heads(out), op.sums = sums.data_ptr();
  fastfact::attention(op, parallel_for);
  return {out, sums};
}

void attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, OptionalTensor mask, Tensor out, Tensor sums,
                        Tensor dq, Tensor dk, Tensor dv, bool causal, double scale) {
  const char* name = "attention_backward";
  q = with_dense_rows(q), k = with_dense_rows(k), v = with_dense_rows(v);
  grad = with_dense_rows(grad), out = with_dense_rows(out);
  fastfact::Attention op = describe(name, q, k, v, mask, causal, scale);
  expect(name, "grad", grad, shape_of(q), q), expect(name, "out", out, shape_of(q), q);
  expect(name, "sums", sums, {op.clients, op.samples, op.heads, op.queries}, q);
  expect(name, "dq", dq, shape_of(q), q), expect(name, "dk", dk, shape_of(k), q),
      expect(name, "dv", dv, shape_of(k), q);
  for (const Tensor* t : {&dq, &dk, &dv}) {
    require(t->size(4) == 1 || t->stride(4) == 1, name, "the last axes of dq, dk and dv must be dense");
  }
  if (!is_dense(sums, 0)) sums = torch::stable::contiguous(sums);
  op.out = heads(out), op.sums = sums.data_ptr();
  fastfact::attention_backward(op, {heads(grad), heads(dq), heads(dk), heads(dv)}, parallel_for);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
