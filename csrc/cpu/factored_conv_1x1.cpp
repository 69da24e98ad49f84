// The factored convolution of one tap. μ alone, at stride 1, is a linear layer with the pixels as rows. With factors
// v_r has the size of W already: W = Σ_r u_r v_r + μ is made, and the convolution is one of rank 1 with v = W, u = 1.
#include "factored_conv.h"
#include "packed.h"

namespace fastfact {
namespace {

bool is_linear(const Conv& c, int64_t rank) {
  return !rank && c.kh == 1 && c.kw == 1 && c.groups == 1 && c.stride[0] == 1 && c.stride[1] == 1 &&
         c.padding[0] == 0 && c.padding[1] == 0;
}

bool has_own_weight(const Conv& c, int64_t rank, const Sparse& mu) {
  return c.kh == 1 && c.kw == 1 && (rank > 1 || (rank && mu.count));
}

template <class D>
Matrix<D> pixels_of(D* data, const Conv& c, int64_t channels, bool channels_last) {
  return {data, channels, channels_last ? 0 : c.h * c.w};
}

// W [groups·o, i].
template <class T>
void make_weight(const Conv& c, int64_t rank, const void* u_, const void* v_, const Sparse& mu, T* w,
                 ParallelFor parallel_for) {
  using C = Compute<T>;
  const int64_t n = c.groups * c.o * c.i;
  const T *u = static_cast<const T*>(u_), *v = static_cast<const T*>(v_), *values = static_cast<const T*>(mu.values);
  parallel(parallel_for, n, 16384, [&](int64_t begin, int64_t end) {
    int64_t nz = std::lower_bound(mu.index, mu.index + mu.count, begin) - mu.index;
    for (int64_t at = begin; at < end; ++at) {
      C sum = 0;
      for (int64_t r = 0; r < rank; ++r) sum += to_compute(u[r]) * to_compute(v[r * n + at]);
      if (nz < mu.count && mu.index[nz] == at) sum += to_compute(values[nz++]);
      w[at] = from_compute<T>(sum);
    }
  });
}

// du, dv and dμ on its support, from dW.
template <class T>
void give_gradients(const FactoredConvBackward& op, const T* dw, ParallelFor parallel_for) {
  using C = Compute<T>;
  const int64_t n = op.conv.groups * op.conv.o * op.conv.i, columns = op.conv.i;
  const T *u = static_cast<const T*>(op.u), *v = static_cast<const T*>(op.v);
  T *du = static_cast<T*>(op.du), *dv = static_cast<T*>(op.dv), *dvalues = static_cast<T*>(op.dvalues);
  for (int64_t r = 0; r < op.rank; ++r) {
    const Scratch<C> sums(n / columns);
    parallel(parallel_for, n / columns, ceil_div(16384, columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        C sum = 0;
        for (int64_t at = row * columns; at < (row + 1) * columns; ++at) {
          if (du) sum += to_compute(v[r * n + at]) * to_compute(dw[at]);
          if (dv) dv[r * n + at] = from_compute<T>(to_compute(u[r]) * to_compute(dw[at]));
        }
        sums.get()[row] = sum;
      }
    });
    double sum = 0;
    for (int64_t row = 0; row < n / columns; ++row) sum += sums.get()[row];
    if (du) du[r] = from_compute<T>(C(sum));
  }
  for (int64_t nz = 0; nz < op.mu.count && dvalues; ++nz) dvalues[nz] = dw[op.mu.index[nz]];
}

}  // namespace

bool factored_conv_1x1(const FactoredConv& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  if (is_linear(c, op.rank)) {
    factored_linear({op.type, c.n * c.h * c.w, c.i, c.o, 0, pixels_of(op.x, c, c.i, c.x_channels_last), nullptr,
                     nullptr, op.bias, op.mu, pixels_of(op.y, c, c.o, c.y_channels_last), op.threads},
                    parallel_for);
    return true;
  }
  if (!has_own_weight(c, op.rank, op.mu)) return false;
  with_conv_type(op.type, [&](auto type) {
    using T = decltype(type);
    const Scratch<T> w(c.groups * c.o * c.i);
    make_weight<T>(c, op.rank, op.u, op.v, op.mu, w.get(), parallel_for);
    const T one = from_compute<T>(1);
    factored_conv({op.type, c, 1, op.x, &one, w.get(), op.bias, {}, op.y}, parallel_for);
  });
  return true;
}

bool factored_conv_backward_1x1(const FactoredConvBackward& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  if (is_linear(c, op.rank)) {
    factored_linear_backward({op.type, c.n * c.h * c.w, c.i, c.o, 0, pixels_of(op.x, c, c.i, c.x_channels_last),
                              pixels_of(op.dy, c, c.o, c.y_channels_last), nullptr, nullptr, op.mu,
                              pixels_of(op.dx, c, c.i, op.dx_channels_last), nullptr, nullptr, op.dvalues, op.threads},
                             parallel_for);
    return true;
  }
  if (!has_own_weight(c, op.rank, op.mu)) return false;
  with_conv_type(op.type, [&](auto type) {
    using T = decltype(type);
    const bool needs_weight = op.du || op.dv || (op.dvalues && op.mu.count);
    const Scratch<T> w(c.groups * c.o * c.i), dw(needs_weight ? c.groups * c.o * c.i : 0);
    make_weight<T>(c, op.rank, op.u, op.v, op.mu, w.get(), parallel_for);
    const T one = from_compute<T>(1);
    factored_conv_backward({op.type,
                            c,
                            1,
                            op.x,
                            op.dy,
                            &one,
                            w.get(),
                            {},
                            op.dx_channels_last,
                            op.dx,
                            nullptr,
                            needs_weight ? dw.get() : nullptr,
                            nullptr},
                           parallel_for);
    if (needs_weight) give_gradients(op, dw.get(), parallel_for);
  });
  return true;
}

}  // namespace fastfact
