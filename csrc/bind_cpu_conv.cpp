// The CPU library's factored convolutions: checks the tensors of each op, makes outputs, calls the kernels client by
// client.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/factored_conv.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(std::string("factored_conv2d: ") + message);
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

fastfact::Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return fastfact::Type::f32;
    case ScalarType::Double:
      return fastfact::Type::f64;
    case ScalarType::BFloat16:
      return fastfact::Type::bf16;
    default:
      require(t.scalar_type() == ScalarType::Half, "tensors must be float32, float64, bfloat16 or float16");
      return fastfact::Type::f16;
  }
}

// Whether each client's part of `t` [k, a, b, c, d] is dense with its axes in this order, outermost first.
bool is_dense(const Tensor& t, const Shape& order) {
  int64_t expected = 1;
  for (size_t j = order.size(); j-- > 0;) {
    if (t.size(order[j]) != 1 && t.stride(order[j]) != expected) return false;
    expected *= t.size(order[j]);
  }
  return true;
}

const Shape kContiguous = {1, 2, 3, 4}, kChannelsLast = {1, 3, 4, 2};

// Images [k, n, channels, h, w], copied unless each client's are contiguous or channels_last.
struct Batch {
  Tensor tensor;
  bool channels_last;
  explicit Batch(const Tensor& t) : tensor(t), channels_last(!is_dense(t, kContiguous) && is_dense(t, kChannelsLast)) {
    if (!channels_last && !is_dense(t, kContiguous)) tensor = torch::stable::contiguous(t);
  }
};

Tensor empty(const Tensor& like, const Shape& sizes, bool channels_last = false) {
  Shape order;
  for (size_t d = 0; d < sizes.size(); ++d) order.push_back(d);
  if (channels_last) order = {0, 1, 3, 4, 2};
  Shape strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = order.size(); d-- > 0;) {
    strides[order[d]] = stride;
    stride *= sizes[order[d]] > 1 ? sizes[order[d]] : 1;
  }
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(like.scalar_type())),
                               aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

void parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, grain, body, context));
}

void expect(const OptionalTensor& t, const Shape& shape, const Tensor& like, const char* message) {
  require(!t || (shape_of(*t) == shape && t->scalar_type() == like.scalar_type() && t->is_cpu()), message);
}

// A small tensor of every client, contiguous.
struct Rows {
  OptionalTensor tensor;
  explicit Rows(const OptionalTensor& t) : tensor(t ? OptionalTensor(torch::stable::contiguous(*t)) : t) {}
  explicit operator bool() const { return bool(tensor); }
  void* at(int64_t k) const {
    if (!tensor) return nullptr;
    const int64_t bytes = tensor->element_size() * (tensor->size(0) ? tensor->numel() / tensor->size(0) : 0);
    return static_cast<char*>(tensor->data_ptr()) + k * bytes;
  }
};

void* at(const Tensor& t, int64_t k) { return static_cast<char*>(t.data_ptr()) + k * t.stride(0) * t.element_size(); }

struct Checked {
  fastfact::Conv conv;
  int64_t clients, rank, nonzeros;
};

Checked check(const Tensor& x, const OptionalTensor& u, const OptionalTensor& v, const OptionalTensor& values,
              const OptionalTensor& index, const Shape& size, const Shape& stride, const Shape& padding,
              const Shape& dilation, int64_t groups) {
  const Shape image = shape_of(x);
  require(image.size() == 5, "x must have 5 dimensions");
  require(size.size() == 4 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2,
          "size must have 4 numbers; stride, padding and dilation 2 each");
  require(groups > 0 && size[0] % groups == 0 && image[2] == groups * size[1], "size, groups and x do not fit");
  Checked out{};
  out.clients = image[0];
  fastfact::Conv& c = out.conv;
  c.n = image[1], c.groups = groups, c.i = size[1], c.o = size[0] / groups, c.h = image[3], c.w = image[4];
  c.kh = size[2], c.kw = size[3];
  for (int d = 0; d < 2; ++d) {
    require(stride[d] > 0 && dilation[d] > 0 && padding[d] >= 0 && size[2 + d] > 0,
            "stride, padding, dilation or size");
    c.stride[d] = stride[d], c.padding[d] = padding[d], c.dilation[d] = dilation[d];
    const int64_t reach = image[3 + d] + 2 * padding[d] - dilation[d] * (size[2 + d] - 1) - 1;
    require(reach >= 0, "the kernel is larger than the padded image");
    (d ? c.ow : c.oh) = reach / stride[d] + 1;
  }
  require(bool(u) == bool(v), "u and v go together");
  if (u) {
    require(u->dim() == 4, "u must be [k, rank, kh, kw]");
    out.rank = u->size(1);
    expect(u, {out.clients, out.rank, size[2], size[3]}, x, "u must be [k, rank, kh, kw]");
    expect(v, {out.clients, out.rank, size[0], size[1]}, x, "v must be [k, rank, o, i]");
  }
  require(bool(values) == bool(index), "values and index go together");
  if (index) {
    require(index->dim() == 2 && index->size(0) == out.clients && index->scalar_type() == ScalarType::Int &&
                index->is_cpu(),
            "index must be int32 [k, nnz]");
    out.nonzeros = index->size(1);
    expect(values, {out.clients, out.nonzeros}, x, "values must be [k, nnz]");
  }
  return out;
}

fastfact::Sparse nonzeros(const Checked& checked, const Rows& values, const Rows& index, int64_t k) {
  const fastfact::Conv& c = checked.conv;
  const int64_t count = checked.nonzeros, numel = c.groups * c.o * c.i * c.kh * c.kw;
  const auto* at = static_cast<const int32_t*>(index.at(k));
  bool ascending = count == 0 || (at[0] >= 0 && at[count - 1] < numel);
  for (int64_t j = 1; j < count; ++j) ascending &= at[j - 1] < at[j];
  require(ascending, "index must be ascending positions in the weight");
  return {at, values.at(k), count};
}

Tensor convolve(const Tensor& x_, const OptionalTensor& u_, const OptionalTensor& v_, const OptionalTensor& values_,
                const OptionalTensor& index_, const OptionalTensor& bias_, const Shape& size, const Shape& stride,
                const Shape& padding, const Shape& dilation, int64_t groups, bool repeated) {
  const Checked checked = check(x_, u_, v_, values_, index_, size, stride, padding, dilation, groups);
  fastfact::Conv c = checked.conv;
  const int64_t k = checked.clients;
  expect(bias_, {k, size[0]}, x_, "bias must be [k, o]");
  const Batch x(x_);
  Tensor y = empty(x_, {k, c.n, size[0], c.oh, c.ow}, x.channels_last);
  c.x_channels_last = c.y_channels_last = x.channels_last;
  const Rows u(u_), v(v_), values(values_), index(index_), bias(bias_);
  for (int64_t j = 0; j < k; ++j) {
    fastfact::factored_conv({type_of(x_), c, checked.rank, at(x.tensor, j), u.at(j), v.at(j), bias.at(j),
                             nonzeros(checked, values, index, j), at(y, j), repeated},
                            parallel_for);
  }
  return y;
}

Tensor factored_conv2d(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values, OptionalTensor index,
                       OptionalTensor bias, Shape size, Shape stride, Shape padding, Shape dilation, int64_t groups) {
  return convolve(x, u, v, values, index, bias, size, stride, padding, dilation, groups, false);
}

Tensor repeated_factored_conv2d(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values,
                                OptionalTensor index, OptionalTensor bias, Shape size, Shape stride, Shape padding,
                                Shape dilation, int64_t groups) {
  return convolve(x, u, v, values, index, bias, size, stride, padding, dilation, groups, true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> factored_conv2d_backward(Tensor grad, Tensor x_, OptionalTensor u_,
                                                                    OptionalTensor v_, OptionalTensor values_,
                                                                    OptionalTensor index_, Shape size, Shape stride,
                                                                    Shape padding, Shape dilation, int64_t groups,
                                                                    int64_t needs) {
  const Checked checked = check(x_, u_, v_, values_, index_, size, stride, padding, dilation, groups);
  fastfact::Conv c = checked.conv;
  expect(grad, {checked.clients, c.n, size[0], c.oh, c.ow}, x_, "grad does not have the shape of the output");
  const Batch x(x_), dy(grad);
  c.x_channels_last = x.channels_last, c.y_channels_last = dy.channels_last;
  const Rows u(u_), v(v_), values(values_), index(index_);
  const bool wants[4] = {bool(needs & 1), (needs & 2) && u, (needs & 4) && v, (needs & 8) && index};
  Tensor dx = wants[0] ? empty(x_, shape_of(x_), x.channels_last) : empty(x_, {0});
  Tensor du = empty(x_, wants[1] ? shape_of(*u_) : Shape{0}), dv = empty(x_, wants[2] ? shape_of(*v_) : Shape{0});
  Tensor dvalues = empty(x_, wants[3] ? shape_of(*index_) : Shape{0});
  for (int64_t j = 0; j < checked.clients; ++j) {
    fastfact::factored_conv_backward(
        {type_of(x_), c, checked.rank, at(x.tensor, j), at(dy.tensor, j), u.at(j), v.at(j),
         nonzeros(checked, values, index, j), x.channels_last, wants[0] ? at(dx, j) : nullptr,
         wants[1] ? at(du, j) : nullptr, wants[2] ? at(dv, j) : nullptr, wants[3] ? at(dvalues, j) : nullptr},
        parallel_for);
  }
  return {dx, du, dv, dvalues};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("factored_conv2d", TORCH_BOX(&factored_conv2d));
  m.impl("repeated_factored_conv2d", TORCH_BOX(&repeated_factored_conv2d));
  m.impl("factored_conv2d_backward", TORCH_BOX(&factored_conv2d_backward));
}
