// What the bindings share: looking at PyTorch's tensors, making outputs, threads, errors. They use its stable ABI only.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/pages.h"

namespace fastfact::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

inline std::string to_string(const Shape& shape) {
  std::string out = "[";
  for (size_t d = 0; d < shape.size(); ++d) out += (d ? ", " : "") + std::to_string(shape[d]);
  return out + "]";
}

// A ValueError in Python.
[[noreturn]] inline void fail(const char* op, const std::string& message) {
  throw std::invalid_argument(std::string(op) + ": " + message);
}

inline void require(bool condition, const char* op, const std::string& message) {
  if (!condition) fail(op, message);
}

// The memory of a tensor that is read, or was made here: what is copied on a write stays where it is.
inline void* data_of(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

inline Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

// The type of a tensor as the kernels name it: Type is an enumeration of float32, float64, bfloat16 and float16.
template <class Type>
Type type_of(const char* op, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Type(0);
    case ScalarType::Double:
      return Type(1);
    case ScalarType::BFloat16:
      return Type(2);
    case ScalarType::Half:
      return Type(3);
    default:
      fail(op, "tensors must be float32, float64, bfloat16 or float16");
  }
}

// Whether `t` is dense along these axes, outermost first.
inline bool is_dense(const Tensor& t, const Shape& order) {
  int64_t expected = 1;
  for (size_t j = order.size(); j-- > 0;) {
    if (t.size(order[j]) != 1 && t.stride(order[j]) != expected) return false;
    expected *= t.size(order[j]);
  }
  return true;
}

// Whether `t` is dense along all axes but the first `clients`.
inline bool is_dense(const Tensor& t, int64_t clients = 1) {
  int64_t expected = 1;
  for (int64_t axis = t.dim(); axis-- > clients;) {
    if (t.size(axis) != 1 && t.stride(axis) != expected) return false;
    expected *= t.size(axis);
  }
  return true;
}

inline bool same_strides(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Whether the elements of `t` fill one stretch of memory, in whatever order.
inline bool fills_memory(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) axes.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(axes.begin(), axes.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : axes) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// An uninitialised tensor on the CPU, of the type of `like`, dense with its axes in this order.
inline Tensor empty(const Tensor& like, const Shape& sizes, const Shape& order) {
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
  const Tensor made(out);
  constexpr int64_t kLeast = 2 * kLargePage;  // what malloc may map anew each time
  const int64_t bytes = made.numel() * made.element_size();
  if (bytes >= kLeast) map_by_large_pages(made.mutable_data_ptr(), bytes);
  return made;
}

inline Tensor empty(const Tensor& like, const Shape& sizes) {
  Shape order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  return empty(like, sizes, order);
}

inline void parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, grain, body, context));
}

// Checks one argument against the shape the others imply, and their type.
inline void expect(const char* op, const char* name, const Tensor& t, const Shape& shape, const Tensor& like) {
  if (shape_of(t) != shape)
    fail(op, std::string(name) + " has shape " + to_string(shape_of(t)) + ", must be " + to_string(shape));
  if (t.scalar_type() != like.scalar_type() || !t.is_cpu())
    fail(op, std::string(name) + " must have the type of the other tensors, on the CPU");
}

inline void expect(const char* op, const char* name, const OptionalTensor& t, const Shape& shape, const Tensor& like) {
  if (t) expect(op, name, *t, shape, like);
}

inline void expect_dim(const char* op, const char* name, const Tensor& t, int64_t dim) {
  if (t.dim() != dim)
    fail(op, std::string(name) + " has shape " + to_string(shape_of(t)) + ", must have " + std::to_string(dim) +
                 " dimensions");
}

// The same memory in another form, as no view of autograd's: `torch::stable::transpose` takes longer than a small
// product.
inline Tensor viewed(const Tensor& t, const Shape& sizes, const Shape& strides) {
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), sizes.size(), sizes.data(), strides.data(), 0, &out));
  return Tensor(out);
}

// tᵀ of a matrix.
inline Tensor transposed(const Tensor& t) { return viewed(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)}); }

}  // namespace fastfact::bind
