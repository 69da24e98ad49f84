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
