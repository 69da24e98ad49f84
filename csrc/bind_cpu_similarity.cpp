// The CPU library's similarity matching: the products of blocks of keys and the weighted sums are PyTorch's own matrix
// products, which run at the peak of the machine; what is between them, from products to weights, is csrc/cpu's.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "bind.h"
#include "cpu/kernels.h"

namespace {

using namespace fastfact::bind;

Tensor rows_of(const Tensor& t, int64_t first, int64_t count) {
  Tensor all = t;
  return torch::stable::narrow(all, 0, first, count);
}

// out = x y
void multiply(Tensor& out, const Tensor& x, const Tensor& y) {
  const auto function = x.scalar_type() == ScalarType::Char ? aoti_torch_cpu__int_mm_out : aoti_torch_cpu_mm_out;
  TORCH_ERROR_CODE_CHECK(function(out.get(), x.get(), y.get()));
}

// out += x y
void add_product(const Tensor& out, const Tensor& x, const Tensor& y) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), x.get(), y.get(), 1, 1));
}

// 1 / norm of each key; 0 of a key of norm 0. Keys whose products float32 could not hold are scaled first, in a copy.
std::vector<double> inverse_norms(Tensor& keys, fastfact::Type type) {
  const int64_t m = keys.size(0), d = keys.size(1);
  const bool integers = keys.scalar_type() == ScalarType::Char;
  std::vector<double> inverse(m);
  fastfact::squared_norms(type, integers, keys.data_ptr(), m, d, inverse.data(), parallel_for);
  bool copied = false;
  for (int64_t k = 0; k < m; ++k) {
    double norm = std::sqrt(inverse[k]);
    if (type == fastfact::Type::f32 && !integers && std::isfinite(norm) && norm > 0 &&
        (norm > 0x1p40 || norm < 0x1p-40)) {
      if (!copied) keys = torch::stable::clone(keys);
      copied = true;
      const int exponent = std::ilogb(norm);
      float* row = static_cast<float*>(keys.data_ptr()) + k * d;
      for (int64_t j = 0; j < d; ++j) row[j] = std::ldexp(row[j], -exponent);
      norm = std::ldexp(norm, -exponent);
    }
    inverse[k] = norm == 0 ? 0 : 1 / norm;
  }
  return inverse;
}

std::tuple<std::vector<Tensor>, Tensor> similarity_sums(Tensor keys, std::vector<Tensor> uploads,
                                                        std::optional<Tensor> valid, int64_t first, int64_t rows,
                                                        double epsilon, double tau, bool count) {
  const char* op = "similarity_sums";
  require(keys.dim() == 2 && keys.is_cpu(), op, "keys must have 2 dimensions, on the CPU");
  const int64_t m = keys.size(0), depth = keys.size(1);
  const ScalarType kind = keys.scalar_type();
  const bool integers = kind == ScalarType::Char;
  require(integers || kind == ScalarType::Float || kind == ScalarType::Double, op,
          "keys must be float32, float64 or int8");
  require(!integers || depth <= 133144, op, "int8 keys have " + std::to_string(depth) + " numbers, at most 133144");
  require(first >= 0 && rows >= 0 && first + rows <= m, op,
          "first=" + std::to_string(first) + ", rows=" + std::to_string(rows) + " of " + std::to_string(m));
  const ScalarType compute = integers ? ScalarType::Float : kind;
  for (const Tensor& x : uploads) {
    require(x.dim() == 2 && x.size(0) == m && x.scalar_type() == compute && x.is_cpu(), op,
            "uploads must be [" + std::to_string(m) + ", n] in the type of the weights, on the CPU");
  }
  const uint8_t* usable = nullptr;
  if (valid) {
    require(valid->dim() == 1 && valid->size(0) == m && valid->scalar_type() == ScalarType::Bool && valid->is_cpu(), op,
            "valid must be bool [" + std::to_string(m) + "], on the CPU");
    valid = torch::stable::contiguous(*valid);
    usable = static_cast<const uint8_t*>(valid->data_ptr());
  }
  std::vector<Tensor> sums;
  for (const Tensor& x : uploads) sums.push_back(torch::stable::new_zeros(x, {rows, x.size(1)}));
  Tensor counts = torch::stable::new_zeros(keys, {count ? rows : 0}, ScalarType::Long);
  if (rows == 0) return {sums, counts};

  keys = torch::stable::contiguous(keys);
  const auto type = compute == ScalarType::Double ? fastfact::Type::f64 : fastfact::Type::f32;
  const std::vector<double> inverse = inverse_norms(keys, type);
  if (integers && depth == 1) {
    // With both strides of one column 1, PyTorch's product of int8 takes keys for transposed ones (seen with 2.14).
    Tensor columns = torch::stable::new_zeros(keys, {m, 2}), first_column = torch::stable::narrow(columns, 1, 0, 1);
    torch::stable::copy_(first_column, keys);
    keys = columns;
  }
  auto* counted = count ? static_cast<int64_t*>(counts.data_ptr()) : nullptr;
  // A tile and what is read with it should stay in the second cache; long keys pay for wider ones with wasted halves
  // of the blocks on the diagonal.
  const int64_t height = depth > 8192 ? 256 : 512, width = 1024;
  Tensor memory = torch::stable::new_empty(keys, {height * width}, compute);

  for (int64_t b = 0; b < rows; b += height) {
    const int64_t r = std::min(height, rows - b), me = first + b;
    const Tensor own = rows_of(keys, me, r);
    // Columns [begin, end) for these rows and, if mirrored, these rows for those columns, which have the same cosines.
    auto block = [&](int64_t begin, int64_t end, bool mirrored) {
      for (int64_t c0 = begin; c0 < end; c0 += width) {
        const int64_t c = std::min(width, end - c0);
        Tensor tile = torch::stable::view(rows_of(memory, 0, r * c), {r, c});
        Tensor products = tile;
        if (integers) {
          AtenTensorHandle handle;
          const int64_t sizes[] = {r, c}, strides[] = {c, 1};
          TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(tile.data_ptr(), 2, sizes, strides, 0,
                                                                    aoti_torch_dtype_int32(),
                                                                    aoti_torch_device_type_cpu(), 0, &handle));
          products = Tensor(handle);
        }
        multiply(products, own, torch::stable::transpose(rows_of(keys, c0, c), 0, 1));
        const bool any = fastfact::similarity_weights(
            {type, integers, r, c, tile.data_ptr(), inverse.data() + me, inverse.data() + c0, me - c0, epsilon, tau,
             usable ? usable + me : nullptr, usable ? usable + c0 : nullptr, counted ? counted + b : nullptr,
             counted && mirrored ? counted + c0 - first : nullptr},
            parallel_for);
        if (!any) continue;
        for (size_t t = 0; t < uploads.size(); ++t) {
          add_product(rows_of(sums[t], b, r), tile, rows_of(uploads[t], c0, c));
          if (mirrored) {
            add_product(rows_of(sums[t], c0 - first, c), torch::stable::transpose(tile, 0, 1),
                        rows_of(uploads[t], me, r));
          }
        }
      }
    };
    block(0, first, false);
    block(me, me + r, false);
    block(me + r, first + rows, true);
    block(first + rows, m, false);
  }
  return {sums, counts};
}

std::tuple<Tensor, Tensor> srht(Tensor x, Tensor signs, Tensor rows, bool quantize) {
  const char* op = "srht";
  require(x.dim() == 2 && x.is_cpu(), op, "x must have 2 dimensions, on the CPU");
  const int64_t k = x.size(0), n = x.size(1), m = rows.numel();
  const auto type = type_of<fastfact::Type>(op, x);
  require(signs.dim() == 1 && signs.size(0) == n && signs.scalar_type() == ScalarType::Char && signs.is_cpu(), op,
          "signs must be int8 [" + std::to_string(n) + "], on the CPU");
  require(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long && rows.is_cpu(), op,
          "rows must be int64 [m], on the CPU");
  x = torch::stable::contiguous(x), signs = torch::stable::contiguous(signs), rows = torch::stable::contiguous(rows);
  const auto* kept = static_cast<const int64_t*>(rows.data_ptr());
  int64_t points = 1;
  while (points < n) points *= 2;
  for (int64_t j = 0; j < m; ++j) {
    require(kept[j] >= 0 && kept[j] < points, op,
            "rows has " + std::to_string(kept[j]) + ", must be 0 to " + std::to_string(points - 1));
  }
  const ScalarType wide = type == fastfact::Type::f64 ? ScalarType::Double : ScalarType::Float;
  Tensor out = torch::stable::new_empty(x, {k, m}, quantize ? ScalarType::Char : wide);
  Tensor scale = torch::stable::new_empty(x, {quantize ? k : 0}, ScalarType::Float);
  fastfact::srht({type, k, n, m, x.data_ptr(), static_cast<const int8_t*>(signs.data_ptr()), kept, out.data_ptr(),
                  quantize ? static_cast<float*>(scale.data_ptr()) : nullptr},
                 parallel_for);
  return {out, scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("similarity_sums", TORCH_BOX(&similarity_sums));
  m.impl("srht", TORCH_BOX(&srht));
}
