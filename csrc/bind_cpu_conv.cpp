// The CPU library's factored convolutions and linear layers: checks the tensors of each op, makes outputs, calls the
// kernels client by client.
#include <tuple>

#include "bind_cpu.h"
#include "cpu/factored_conv.h"

namespace {

using namespace fastfact::bind;
using namespace fastfact::ops;

const char* const kConv = "factored_conv2d";

void require(bool condition, const std::string& message) { fastfact::bind::require(condition, kConv, message); }

fastfact::Type type_of(const Tensor& t) { return fastfact::bind::type_of<fastfact::Type>(kConv, t); }

// All tensors come with the client axis, or all without it, for one client.
Shape with_axis(bool axis, int64_t clients, Shape shape) {
  if (axis) shape.insert(shape.begin(), clients);
  return shape;
}

// Images [k, n, channels, h, w] or [n, channels, h, w], copied unless each client's are contiguous or channels_last;
// those of one channel are both, and what PyTorch takes them for by their strides.
struct Batch {
  Tensor tensor;
  bool channels_last;
  explicit Batch(const Tensor& t) : tensor(t), channels_last(false) {
    const int64_t first = t.dim() - 4;
    const bool one = t.size(first + 1) == 1 && t.stride(first + 1) == 1 && t.size(first + 2) * t.size(first + 3) > 1;
    if (!one && is_dense(t, {first, first + 1, first + 2, first + 3})) return;
    channels_last = is_dense(t, {first, first + 2, first + 3, first + 1});
    if (!channels_last) tensor = torch::stable::contiguous(t);
  }
};

Tensor empty_images(const Tensor& like, const Shape& sizes, bool channels_last) {
  if (!channels_last) return empty(like, sizes);
  return sizes.size() == 5 ? empty(like, sizes, {0, 1, 3, 4, 2}) : empty(like, sizes, {0, 2, 3, 1});
}

// A small tensor of every client, contiguous.
struct Rows {
  OptionalTensor tensor;
  explicit Rows(const OptionalTensor& t) : tensor(t) {
    if (t && !is_dense(*t, 0)) tensor = torch::stable::contiguous(*t);
  }
  explicit operator bool() const { return bool(tensor); }
  void* part(int64_t k) const {
    if (!tensor) return nullptr;
    const int64_t bytes = tensor->element_size() * (tensor->size(0) ? tensor->numel() / tensor->size(0) : 0);
    return static_cast<char*>(data_of(*tensor)) + k * bytes;
  }
};

void* part(const Tensor& t, int64_t k) { return static_cast<char*>(data_of(t)) + k * t.stride(0) * t.element_size(); }

// μ of every client: values at positions or, without these, all of a dense one, of the shape of W.
struct Mu {
  OptionalTensor values, index;
  int64_t clients, count = 0;
  bool axis, channels_last = false, turned = false;

  Mu(const char* op, const OptionalTensor& values_, const OptionalTensor& index_, const Shape& size, bool axis,
     int64_t clients, const Tensor& x)
      : values(values_), index(index_), clients(clients), axis(axis) {
    fastfact::bind::require(values || !index, op, "values and index go together");
    if (!values) return;
    if (index) {
      expect_dim(op, "index", *index, 1 + axis);
      count = index->size(axis);
      fastfact::bind::require(
          (!axis || index->size(0) == clients) && index->scalar_type() == ScalarType::Int && index->is_cpu(), op,
          "index must be int32 [k, nnz], on the CPU");
      expect(op, "values", values, with_axis(axis, clients, {count}), x);
      if (!is_dense(*index, 0)) index = torch::stable::contiguous(*index);
    } else {
      expect(op, "values", values, with_axis(axis, clients, size), x);
      count = 1;
      for (const int64_t side : size) count *= side;
      fastfact::bind::require(count <= INT32_MAX, op, "W has too many numbers");
      if (size.size() == 4 && !is_dense(*values, 0)) {
        channels_last = is_dense(*values, axis ? Shape{0, 1, 3, 4, 2} : Shape{0, 2, 3, 1});
      }
    }
    if (!channels_last && !is_dense(*values, 0)) values = torch::stable::contiguous(*values);
  }

  bool is_dense_itself() const { return values && !index; }

  // For kernels that take no dense μ.
  void list_positions() {
    AtenTensorHandle made;
    const int64_t sizes[] = {clients * count}, strides[] = {1};
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(1, sizes, strides, aoti_torch_dtype_int32(), aoti_torch_device_type_cpu(), 0, &made));
    index = Tensor(made);
    auto* const at = static_cast<int32_t*>(data_of(*index));
    for (int64_t k = 0; k < clients * count; ++k) at[k] = int32_t(k % count);
    if (channels_last) values = torch::stable::contiguous(*values);
    turned = std::exchange(channels_last, false);
  }

  // Of a client.
  void* of(const OptionalTensor& t, int64_t k) const {
    return t ? static_cast<char*>(data_of(*t)) + k * count * t->element_size() : nullptr;
  }
  fastfact::Sparse part(int64_t k) const {
    return {static_cast<const int32_t*>(of(index, k)), of(values, k), count, channels_last};
  }

  // An uninitialised tensor for the gradient of the values, as these lie here; `given`: as they were given.
  Tensor like_values(bool given = false) const {
    if (!(channels_last || (given && turned))) return empty(*values, shape_of(*values));
    return empty(*values, shape_of(*values), axis ? Shape{0, 1, 3, 4, 2} : Shape{0, 2, 3, 1});
  }
};

struct Checked {
  fastfact::Conv conv;
  bool axis;
  int64_t clients, rank;
  Shape shape(Shape of_one) const { return with_axis(axis, clients, std::move(of_one)); }
};

Checked check(const Tensor& x, const OptionalTensor& u, const OptionalTensor& v, const Shape& size, const Shape& stride,
              const Shape& padding, const Shape& dilation, int64_t groups) {
  Shape image = shape_of(x);
  require(image.size() == 4 || image.size() == 5, "x must have 5 dimensions, or 4 for one client");
  Checked out{};
  out.axis = image.size() == 5;
  if (!out.axis) image.insert(image.begin(), 1);
  require(size.size() == 4 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2,
          "size must have 4 numbers; stride, padding and dilation 2 each");
  require(groups > 0 && size[0] % groups == 0 && image[2] == groups * size[1], "size, groups and x do not fit");
  out.clients = image[0];
  fastfact::Conv& c = out.conv;
  c.n = image[1], c.groups = groups, c.i = size[1], c.o = size[0] / groups, c.h = image[3], c.w = image[4];
  c.kh = size[2], c.kw = size[3];
  for (int d = 0; d < 2; ++d) {
    require(stride[d] > 0 && dilation[d] > 0 && padding[d] >= 0 && size[2 + d] > 0,
            "stride, padding, dilation or size");
    c.stride[d] = stride[d], c.padding[d] = padding[d], c.dilation[d] = dilation[d];
    const int64_t reach = image[3 + d] + 2 * padding[d] - dilation[d] * (size[2 + d] - 1) - 1;
    require(reach >= 0 && image[3 + d] > 0, "the kernel is larger than the padded image, or that has no pixels");
    (d ? c.ow : c.oh) = reach / stride[d] + 1;
  }
  require(bool(u) == bool(v), "u and v go together");
  if (u) {
    require(u->dim() == 3 + out.axis, "u must be [k, rank, kh, kw]");
    out.rank = u->size(out.axis);
    expect(kConv, "u", u, out.shape({out.rank, size[2], size[3]}), x);
    expect(kConv, "v", v, out.shape({out.rank, size[0], size[1]}), x);
  }
  return out;
}

const char* const kNotAscending = "index must be ascending positions in the weight";

// μ for a convolution; of nonzeros whose positions the kernel does not look at itself they are looked at.
Mu mu_of(const Checked& checked, const OptionalTensor& values, const OptionalTensor& index, const Shape& size,
         const Tensor& x, bool backward) {
  const fastfact::Conv& c = checked.conv;
  Mu mu(kConv, values, index, size, checked.axis, checked.clients, x);
  if (mu.is_dense_itself()) {
    if (!fastfact::takes_dense(type_of(x), c, backward)) mu.list_positions();
    return mu;
  }
  if (fastfact::in_columns(type_of(x), c, mu.count, backward)) return mu;
  for (int64_t k = 0; k < checked.clients; ++k) {
    const fastfact::Sparse part = mu.part(k);
    const int64_t count = part.count, numel = c.groups * c.o * c.i * c.kh * c.kw;
    bool ascending = count == 0 || (part.index[0] >= 0 && part.index[count - 1] < numel);
    for (int64_t j = 1; j < count; ++j) ascending &= part.index[j - 1] < part.index[j];
    require(ascending, kNotAscending);
  }
  return mu;
}

Tensor convolve(const Tensor& x_, const OptionalTensor& u_, const OptionalTensor& v_, const OptionalTensor& values_,
                const OptionalTensor& index_, const OptionalTensor& bias_, const Shape& size, const Shape& stride,
                const Shape& padding, const Shape& dilation, int64_t groups, bool repeated) {
  const Checked checked = check(x_, u_, v_, size, stride, padding, dilation, groups);
  fastfact::Conv c = checked.conv;
  expect(kConv, "bias", bias_, checked.shape({size[0]}), x_);
  const Batch x(x_);
  Tensor y = empty_images(x_, checked.shape({c.n, size[0], c.oh, c.ow}), x.channels_last);
  c.x_channels_last = c.y_channels_last = x.channels_last;
  const Rows u(u_), v(v_), bias(bias_);
  const Mu mu = mu_of(checked, values_, index_, size, x_, false);
  const bool columns = fastfact::in_columns(type_of(x_), c, mu.count, false);
  for (int64_t j = 0; j < checked.clients; ++j) {
    const fastfact::FactoredConv op{type_of(x_),
                                    c,
                                    checked.rank,
                                    part(x.tensor, j),
                                    u.part(j),
                                    v.part(j),
                                    bias.part(j),
                                    mu.part(j),
                                    part(y, j),
                                    repeated,
                                    torch::stable::get_num_threads()};
    if (!columns) {
      fastfact::factored_conv(op, parallel_for);
    } else {
      require(fastfact::factored_conv_columns(op, parallel_for), kNotAscending);
    }
  }
  return y;
}

// A factored linear layer [k, n, i] → [k, n, o], or without k; all tensors dense.
struct Linear {
  const char* op;
  bool axis;
  int64_t clients, n, i, o, rank = 0;
  Tensor x;
  Rows u, v;
  Mu mu;

  Linear(const char* op, const Tensor& x_, const OptionalTensor& u_, const OptionalTensor& v_,
         const OptionalTensor& values, const OptionalTensor& index, const Shape& size, bool backward)
      : op(op),
        axis(x_.dim() == 3),
        clients(axis ? x_.size(0) : 1),
        x(is_dense(x_, axis) ? x_ : torch::stable::contiguous(x_)),
        u(u_),
        v(v_),
        mu(op, values, index, size, axis, clients, x_) {
    expect_dim(op, "x", x_, 2 + axis);
    fastfact::bind::require(size.size() == 2 && size[0] >= 0 && size[1] == x_.size(1 + axis), op,
                            "size=" + to_string(size) + ", must be [o, " + std::to_string(x_.size(1 + axis)) + "]");
    n = x_.size(axis), i = size[1], o = size[0];
    fastfact::bind::require(bool(u_) == bool(v_), op, "u and v go together");
    if (mu.is_dense_itself() && !fastfact::takes_dense(type(), n, i, o, backward)) mu.list_positions();
    if (u_) {
      expect_dim(op, "u", *u_, 2 + axis);
      rank = u_->size(axis);
      expect(op, "u", u_, shape({rank, i}), x_);
      expect(op, "v", v_, shape({rank, o}), x_);
    }
  }

  Shape shape(Shape of_one) const { return with_axis(axis, clients, std::move(of_one)); }

  fastfact::Type type() const { return fastfact::bind::type_of<fastfact::Type>(op, x); }
  void check(bool ascending) const {
    fastfact::bind::require(ascending, op, "index must be ascending positions in the weight");
  }
};

// A convolution of one tap as the linear layer of its pixels: images [n, channels, h, w] as rows.
struct Pixels {
  Shape size, step;  // [o, i], and of the pixels that are taken, down and across
  bool channels_last;

  static bool serves(const Tensor& x, const OptionalTensor& u, const Shape& size, const Shape& padding,
                     int64_t groups) {
    if (!u || x.dim() != 4 || u->dim() != 3 || size.size() != 4 || size[2] != 1 || size[3] != 1 || groups != 1) {
      return false;
    }
    // Those of the spatial layout have one number for the tap.
    return u->size(1) == size[1] && u->size(2) == 1 && size[1] > 1 && padding == Shape{0, 0};
  }

  Pixels(const Tensor& x, const Shape& size_, const Shape& stride) : size{size_[0], size_[1]}, step(stride) {
    require(x.size(1) == size[1] && step.size() == 2 && step[0] > 0 && step[1] > 0 && x.size(2) > 0 && x.size(3) > 0,
            "x does not fit");
    // PyTorch tells the format of one pixel by its strides.
    const bool one = x.size(2) == 1 && x.size(3) == 1;
    channels_last = is_dense(x, {0, 2, 3, 1}) && !(one && x.stride(3) == 1);
  }

  static OptionalTensor factor(const OptionalTensor& t) {
    if (!t) return t;
    require(t->dim() == 3 && t->size(2) == 1, "u and v must be [rank, channels, 1]");
    return viewed(*t, {t->size(0), t->size(1)}, {t->stride(0), t->stride(1)});
  }

  // A dense μ [o, i, 1, 1] as [o, i].
  static OptionalTensor matrix(const OptionalTensor& values) {
    if (!values || values->dim() != 4) return values;
    require(values->size(2) == 1 && values->size(3) == 1, "a dense μ must have the shape of the weight");
    return viewed(*values, {values->size(0), values->size(1)}, {values->stride(0), values->stride(1)});
  }

  // Pixels [n, rows, columns, channels] of images, those that are taken.
  Tensor taken(const Tensor& t) const {
    return viewed(t, {t.size(0), (t.size(2) - 1) / step[0] + 1, (t.size(3) - 1) / step[1] + 1, t.size(1)},
                  {t.stride(0), t.stride(2) * step[0], t.stride(3) * step[1], t.stride(1)});
  }

  static Tensor rows(const Tensor& pixels) {
    const Tensor dense = is_dense(pixels, 0) ? pixels : torch::stable::contiguous(pixels);
    const int64_t channels = pixels.size(3);
    return viewed(dense, {pixels.size(0) * pixels.size(1) * pixels.size(2), channels}, {channels, 1});
  }

  // Rows as images of so many pixels, in the format of x.
  Tensor images(const Tensor& rows, int64_t n, int64_t h, int64_t w) const {
    const int64_t c = rows.size(1), gap = h * w == 1 && !channels_last ? 1 : c;
    const Tensor out = viewed(rows, {n, c, h, w}, {h * w * c, 1, w * gap, gap});
    return channels_last || h * w == 1 ? out : torch::stable::contiguous(out);
  }

  Tensor forward(const Tensor& x, const OptionalTensor& u, const OptionalTensor& v, const OptionalTensor& values,
                 const OptionalTensor& index, const OptionalTensor& bias) const {
    const Tensor of = taken(x);
    return images(fastfact::ops::factored_linear(rows(of), factor(u), factor(v), matrix(values), index, bias, size),
                  of.size(0), of.size(1), of.size(2));
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const OptionalTensor& u,
                                                      const OptionalTensor& v, const OptionalTensor& values,
                                                      const OptionalTensor& index, int64_t needs) const {
    const Tensor of = taken(x), dy = viewed(grad, {grad.size(0), grad.size(2), grad.size(3), grad.size(1)},
                                            {grad.stride(0), grad.stride(2), grad.stride(3), grad.stride(1)});
    expect(kConv, "grad", dy, {of.size(0), of.size(1), of.size(2), size[0]}, x);
    auto [dx, du, dv, dvalues] = fastfact::ops::factored_linear_backward(rows(dy), rows(of), factor(u), factor(v),
                                                                         matrix(values), index, size, needs);
    if (needs & 1) {
      if (step == Shape{1, 1}) {
        dx = images(dx, x.size(0), x.size(2), x.size(3));
      } else {
        Tensor whole = empty_images(x, shape_of(x), channels_last);
        torch::stable::zero_(whole);
        Tensor to = taken(whole);
        const int64_t channels = to.size(3), row = to.size(2) * channels;
        torch::stable::copy_(to, viewed(dx, shape_of(to), {to.size(1) * row, row, channels, 1}));
        dx = whole;
      }
    }
    auto as_factor = [](const Tensor& t) {
      return t.dim() == 2 ? viewed(t, {t.size(0), t.size(1), 1}, {t.size(1), 1, 1}) : t;
    };
    if (dvalues.dim() == 2) dvalues = viewed(dvalues, {size[0], size[1], 1, 1}, {size[1], 1, 1, 1});
    return {dx, as_factor(du), as_factor(dv), dvalues};
  }
};

}  // namespace

namespace fastfact::ops {

Tensor factored_conv2d(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values, OptionalTensor index,
                       OptionalTensor bias, Shape size, Shape stride, Shape padding, Shape dilation, int64_t groups,
                       bool repeated) {
  if (Pixels::serves(x, u, size, padding, groups)) {
    return Pixels(x, size, stride).forward(x, u, v, values, index, bias);
  }
  return convolve(x, u, v, values, index, bias, size, stride, padding, dilation, groups, repeated);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> factored_conv2d_backward(Tensor grad, Tensor x_, OptionalTensor u_,
                                                                    OptionalTensor v_, OptionalTensor values_,
                                                                    OptionalTensor index_, Shape size, Shape stride,
                                                                    Shape padding, Shape dilation, int64_t groups,
                                                                    int64_t needs) {
  if (Pixels::serves(x_, u_, size, padding, groups)) {
    return Pixels(x_, size, stride).backward(grad, x_, u_, v_, values_, index_, needs);
  }
  const Checked checked = check(x_, u_, v_, size, stride, padding, dilation, groups);
  fastfact::Conv c = checked.conv;
  expect(kConv, "grad", grad, checked.shape({c.n, size[0], c.oh, c.ow}), x_);
  const Batch x(x_), dy(grad);
  c.x_channels_last = x.channels_last, c.y_channels_last = size[0] == 1 ? x.channels_last : dy.channels_last;
  const Rows u(u_), v(v_);
  const Mu mu = mu_of(checked, values_, index_, size, x_, true);
  const bool wants[4] = {bool(needs & 1), (needs & 2) && u, (needs & 4) && v, (needs & 8) && values_};
  Tensor dx = wants[0] ? empty_images(x_, shape_of(x_), x.channels_last) : empty(x_, {0});
  Tensor du = empty(x_, wants[1] ? shape_of(*u_) : Shape{0}), dv = empty(x_, wants[2] ? shape_of(*v_) : Shape{0});
  Tensor dvalues = wants[3] ? mu.like_values() : empty(x_, {0});
  const bool columns = fastfact::in_columns(type_of(x_), c, mu.count, true);
  for (int64_t j = 0; j < checked.clients; ++j) {
    const fastfact::FactoredConvBackward op{type_of(x_),
                                            c,
                                            checked.rank,
                                            part(x.tensor, j),
                                            part(dy.tensor, j),
                                            u.part(j),
                                            v.part(j),
                                            mu.part(j),
                                            x.channels_last,
                                            wants[0] ? part(dx, j) : nullptr,
                                            wants[1] ? part(du, j) : nullptr,
                                            wants[2] ? part(dv, j) : nullptr,
                                            wants[3] ? mu.of(dvalues, j) : nullptr,
                                            torch::stable::get_num_threads()};
    if (!columns) {
      fastfact::factored_conv_backward(op, parallel_for);
    } else {
      require(fastfact::factored_conv_backward_columns(op, parallel_for), kNotAscending);
    }
  }
  if (wants[3] && mu.turned) {
    Tensor given = mu.like_values(true);
    torch::stable::copy_(given, dvalues);
    dvalues = given;
  }
  return {dx, du, dv, dvalues};
}

Tensor factored_linear(Tensor x, OptionalTensor u, OptionalTensor v, OptionalTensor values, OptionalTensor index,
                       OptionalTensor bias_, Shape size) {
  const Linear of("factored_linear", x, u, v, values, index, size, false);
  expect(of.op, "bias", bias_, of.shape({of.o}), x);
  const Rows bias(bias_);
  Tensor y = empty(x, of.shape({of.n, of.o}));
  for (int64_t k = 0; k < of.clients; ++k) {
    of.check(fastfact::factored_linear({of.type(),
                                        of.n,
                                        of.i,
                                        of.o,
                                        of.rank,
                                        {part(of.x, k), of.i, 0},
                                        of.u.part(k),
                                        of.v.part(k),
                                        bias.part(k),
                                        of.mu.part(k),
                                        {part(y, k), of.o, 0},
                                        torch::stable::get_num_threads()},
                                       parallel_for));
  }
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> factored_linear_backward(Tensor grad, Tensor x, OptionalTensor u,
                                                                    OptionalTensor v, OptionalTensor values,
                                                                    OptionalTensor index, Shape size, int64_t needs) {
  const Linear of("factored_linear_backward", x, u, v, values, index, size, true);
  expect(of.op, "grad", grad, of.shape({of.n, of.o}), x);
  const Tensor dy = is_dense(grad, of.axis) ? grad : torch::stable::contiguous(grad);
  const bool wants[4] = {bool(needs & 1), (needs & 2) && u, (needs & 4) && v, (needs & 8) && values};
  auto made = [&](bool wanted, const Shape& shape) { return empty(x, wanted ? shape : Shape{0}); };
  Tensor dx = made(wants[0], of.shape({of.n, of.i})), du = made(wants[1], of.shape({of.rank, of.i}));
  Tensor dv = made(wants[2], of.shape({of.rank, of.o})), dvalues = wants[3] ? of.mu.like_values() : made(false, {});
  for (int64_t k = 0; k < of.clients; ++k) {
    of.check(fastfact::factored_linear_backward({of.type(),
                                                 of.n,
                                                 of.i,
                                                 of.o,
                                                 of.rank,
                                                 {part(of.x, k), of.i, 0},
                                                 {part(dy, k), of.o, 0},
                                                 of.u.part(k),
                                                 of.v.part(k),
                                                 of.mu.part(k),
                                                 {wants[0] ? part(dx, k) : nullptr, of.i, 0},
                                                 wants[1] ? part(du, k) : nullptr,
                                                 wants[2] ? part(dv, k) : nullptr,
                                                 wants[3] ? of.mu.of(dvalues, k) : nullptr,
                                                 torch::stable::get_num_threads()},
                                                parallel_for));
  }
  return {dx, du, dv, dvalues};
}

}  // namespace fastfact::ops

STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) {
  m.impl("factored_conv2d", TORCH_BOX(&factored_conv2d));
  m.impl("factored_conv2d_backward", TORCH_BOX(&factored_conv2d_backward));
  m.impl("factored_linear", TORCH_BOX(&factored_linear));
  m.impl("factored_linear_backward", TORCH_BOX(&factored_linear_backward));
}
