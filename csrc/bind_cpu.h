// What the files of the CPU binding share: the ops of a layer.
#pragma once

#include <tuple>

#include "bind.h"

namespace fastfact::ops {

using bind::OptionalTensor;
using bind::Shape;
using bind::Tensor;
using bind::transposed;
using bind::viewed;

// The factors a [(k,) r, columns] and b [(k,) rows, r] of a weight σ + scaling · BA of `size` as those of a rank-1
// weight Σ u ⊗ v + σ, where a layout of that is the same: not in the layout "view" of kernels with several taps.
class LowRankFactors {
 public:
  static bool exist(const Shape& size, int64_t layout);

  // Checks a and b.
  LowRankFactors(const char* op, const Tensor& a, const Tensor& b, int64_t layout, const Shape& size, double scaling);

  Tensor u, v;
  int64_t layout;

  // The gradients of a and b from those of u and v, of those that are there.
  Tensor of_a(const Tensor& du, const Tensor& dv) const;
  Tensor of_b(const Tensor& du, const Tensor& dv) const;

  // Bits 0 and 1, which ask for the gradients of a and b, as those that ask for u's and v's.
  int64_t needs(int64_t of_a_and_b) const;

 private:
  const char* op_;
  bool b_is_u_;
  double scaling_;
  Shape a_, b_;
};

Tensor lowrank_weight(OptionalTensor sigma, Tensor a, Tensor b, int64_t layout, Shape size, double scaling,
                      bool channels_last);
std::tuple<Tensor, Tensor> lowrank_weight_backward(Tensor grad, Tensor a, Tensor b, int64_t layout, Shape size,
                                                   double scaling, int64_t needs);

Tensor rank1_weight(OptionalTensor mu, Tensor u, Tensor v, int64_t layout, bool channels_last);
Tensor compact_weight(Tensor u, Tensor v, Tensor values, Tensor index, int64_t layout, bool channels_last);
std::tuple<Tensor, Tensor> rank1_weight_backward(Tensor grad, Tensor u, Tensor v, int64_t layout, int64_t needs);
std::tuple<Tensor, Tensor, Tensor> compact_weight_backward(Tensor grad, Tensor u, Tensor v, Tensor values, Tensor index,
                                                           int64_t layout, int64_t needs);

Tensor factored_conv2d(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values, OptionalTensor index,
                       OptionalTensor bias, Shape size, Shape stride, Shape padding, Shape dilation, int64_t groups,
                       bool repeated);
std::tuple<Tensor, Tensor, Tensor, Tensor> factored_conv2d_backward(Tensor grad, Tensor x, OptionalTensor u,
                                                                    OptionalTensor v, OptionalTensor values,
                                                                    OptionalTensor index, Shape size, Shape stride,
                                                                    Shape padding, Shape dilation, int64_t groups,
                                                                    int64_t needs);
Tensor factored_linear(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values, OptionalTensor index,
                       OptionalTensor bias, Shape size);
std::tuple<Tensor, Tensor, Tensor, Tensor> factored_linear_backward(Tensor grad, Tensor x, OptionalTensor u,
                                                                    OptionalTensor v, OptionalTensor values,
                                                                    OptionalTensor index, Shape size, int64_t needs);

}  // namespace fastfact::ops
