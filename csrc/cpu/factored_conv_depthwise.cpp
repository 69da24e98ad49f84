// The factored convolution of one input and one output channel a group. W [channels][taps] is small: it is made, and
// the channels are in the lanes. An image's plane of one register of channels is brought into [row][column][lane], with
// the zeros around it, whatever the memory format; then
//   y[p] = Σ_t W[t] · x[p + offset(t)]
//   dx       the same of dy, for each phase of the stride with the taps that reach it
//   dW[t] = Σ_p dy[p] · x[p + offset(t)]
#include "factored_conv.h"
#include "packed.h"

namespace fastfact {
namespace {

constexpr int64_t kItems = 16;  // wanted of work, for the threads
constexpr int64_t kFewest = 4;  // channels that are worth a register
constexpr int kTaps = 10;       // sums of dW in registers

// A plane [rows][columns] of registers of which [top, top + h) × [left, left + w) is an image of h × w; what lies
// outside the plane is left out.
struct Plane {
  int64_t h, w, top, left, rows, columns;
  int64_t size() const { return rows * columns; }
};

// What an output takes of a plane: weight[weight] · plane[offset].
struct Tap {
  int64_t weight, offset;
};

template <class C>
struct Work {
  Conv conv;
  int64_t channels, taps, lanes, blocks;  // blocks: registers of channels
  int64_t parts, splits;                  // of the images, of the blocks
  Plane x, dy;
  std::vector<Tap> forward;                // in x
  std::vector<std::vector<Tap>> backward;  // in dy, of each phase (row, column) of dx
  const C *weight, *bias;                  // [block][tap][lane], [block][lane] or null
};

template <class C>
Work<C> plan(const Conv& c) {
  Work<C> w{};
  w.conv = c, w.channels = c.groups, w.taps = c.kh * c.kw, w.lanes = register_bytes() / sizeof(C);
  w.blocks = ceil_div(w.channels, w.lanes);
  w.parts = std::clamp<int64_t>(c.n, 1, kItems), w.splits = std::min(w.blocks, ceil_div(kItems, w.parts));
  const int64_t reach[2] = {(c.kh - 1) * c.dilation[0], (c.kw - 1) * c.dilation[1]};
  w.x = {c.h,
         c.w,
         c.padding[0],
         c.padding[1],
         (c.oh - 1) * c.stride[0] + reach[0] + 1,
         (c.ow - 1) * c.stride[1] + reach[1] + 1};
  const int64_t top = reach[0] / c.stride[0], left = reach[1] / c.stride[1];
  w.dy = {c.oh,
          c.ow,
          top,
          left,
          top + std::max(c.oh, (c.h - 1 + c.padding[0]) / c.stride[0] + 1),
          left + std::max(c.ow, (c.w - 1 + c.padding[1]) / c.stride[1] + 1)};
  w.backward.resize(c.stride[0] * c.stride[1]);
  for (int64_t ky = 0; ky < c.kh; ++ky) {
    for (int64_t kx = 0; kx < c.kw; ++kx) {
      const int64_t down = ky * c.dilation[0], across = kx * c.dilation[1], weight = (ky * c.kw + kx) * w.lanes;
      const int64_t up = down / c.stride[0], back = across / c.stride[1];
      w.forward.push_back({weight, (down * w.x.columns + across) * w.lanes});
      w.backward[down % c.stride[0] * c.stride[1] + across % c.stride[1]].push_back(
          {weight, -(up * w.dy.columns + back) * w.lanes});
    }
  }
  return w;
}

template <class T, int B>
struct Lanes {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr int kOutputs = B == 64 ? 16 : 8;  // sums in registers

  // Elements of a channel of an image on its way between [channel][pixel] and [pixel][lane].
  static int64_t panel_step(int64_t pixels) { return (ceil_div(pixels, L) + 1) * L; }

  FF_INLINE static void to_lanes(const T* from, int64_t count, C* to) {
    for (int64_t l = 0; l < L; ++l) to[l] = l < count ? to_compute(from[l]) : C(0);
  }
  FF_INLINE static void from_lanes(const C* from, int64_t count, T* to) {
    for (int64_t l = 0; l < count; ++l) to[l] = from_compute<T>(from[l]);
  }

  // Channels [first, first + count) of an image [channels, h, w] to a plane that has zeros around it.
  FF_INLINE static void read(const T* image, int64_t channels, bool last, int64_t first, int64_t count, const Plane& p,
                             C* panel, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t step = panel_step(p.h * p.w), low = std::max<int64_t>(0, -p.left);
      const int64_t columns = std::min(p.w, p.columns - p.left) - low;
      if (columns <= 0) return;
      for (int64_t l = 0; l < L && !last; ++l) {
        if (l < count) {
          copy<B>(image + (first + l) * p.h * p.w, p.h * p.w, panel + l * step);
        } else {
          std::fill(panel + l * step, panel + l * step + p.h * p.w, C(0));
        }
      }
      for (int64_t y = std::max<int64_t>(0, -p.top); y < std::min(p.h, p.rows - p.top); ++y) {
        C* const row = to + ((y + p.top) * p.columns + p.left + low) * L;
        if (!last) {
          transpose<B>(panel + y * p.w + low, step, L, columns, panel + L * step, row, L);
          continue;
        }
        const T* at = image + (y * p.w + low) * channels + first;
        if (count == L) {
          for (int64_t x = 0; x < columns; ++x, at += channels) store<B>(row + x * L, load<B>(at));
        } else {
          for (int64_t x = 0; x < columns; ++x, at += channels) to_lanes(at, count, row + x * L);
        }
      }
    });
  }

  // The inverse, for all pixels of an image.
  FF_INLINE static void write(const C* from, int64_t pixels, int64_t channels, bool last, int64_t first, int64_t count,
                              C* panel, T* image) {
    if (last) {
      T* to = image + first;
      for (int64_t p = 0; p < pixels; ++p, from += L, to += channels) from_lanes(from, count, to);
      return;
    }
    const int64_t step = panel_step(pixels);
    transpose<B>(from, L, pixels, L, from + pixels * L, panel, step);
    for (int64_t l = 0; l < count; ++l) copy<B>(panel + l * step, pixels, image + (first + l) * pixels);
  }

  // f.template operator()<N>(first) for pieces of n, N of them each, at most `most`.
  template <int most, class F>
  FF_INLINE static void pieces(int64_t n, const F& f) {
    int64_t first = 0;
    for (; first + most <= n; first += most) f.template operator()<most>(first);
    rest<most - 1>(n - first, first, f);
  }
  template <int N, class F>
  FF_INLINE static void rest(int64_t n, int64_t first, const F& f) {
    if constexpr (N > 0) {
      if (n == N) return f.template operator()<N>(first);
      rest<N - 1>(n, first, f);
    }
  }

  // Rows of N outputs each, `advance` and `row` apart in the plane: y[p] = start + Σ weight · at[p·advance + offset].
  template <int Rows, int N, bool Next, class To>
  FF_INLINE static void convolve_block(const C* at, int64_t advance_, int64_t row, const C* weight,
                                       const std::vector<Tap>& taps, V start, To* y, int64_t y_advance, int64_t y_row) {
    const int64_t advance = Next ? L : advance_;
    V sums[Rows * N];
#pragma GCC unroll 16
    for (int n = 0; n < Rows * N; ++n) sums[n] = start;
    for (const Tap *tap = taps.data(), *const last = tap + taps.size(); tap < last; ++tap) {
      const V factor = load<B>(weight + tap->weight);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const C* x = at + tap->offset + r * row;
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          sums[r * N + n] += factor * load<B>(x + n % 4 * advance);
          if (n % 4 == 3) x += 4 * advance;
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) store<B>(y + r * y_row + n * y_advance, sums[r * N + n]);
    }
  }

  // The same for any number of rows and columns. Several short rows at once keep more sums.
  template <class To>
  FF_INLINE static void convolve(const C* at, int64_t advance, int64_t row, const C* weight,
                                 const std::vector<Tap>& taps, V start, int64_t rows, int64_t columns, To* y,
                                 int64_t y_advance, int64_t y_row) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      auto rows_of = [&]<int Rows>(int64_t first_row) FF_INLINE_LAMBDA {
        constexpr int most = kOutputs / Rows;
        const int64_t pieces = ceil_div(columns, most);
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const int64_t first = piece * columns / pieces, n = (piece + 1) * columns / pieces - first;
          rest<most>(n, first, [&]<int N>(int64_t) FF_INLINE_LAMBDA {
            const C* const from = at + first_row * row + first * advance;
            To* const to = y + first_row * y_row + first * y_advance;
            if (advance == L) {
              convolve_block<Rows, N, true>(from, advance, row, weight, taps, start, to, y_advance, y_row);
            } else {
              convolve_block<Rows, N, false>(from, advance, row, weight, taps, start, to, y_advance, y_row);
            }
          });
        }
      };
      int64_t first = 0;
      if (columns <= kOutputs / 4) {
        for (; first + 4 <= rows; first += 4) rows_of.template operator()<4>(first);
      }
      if (columns <= kOutputs / 2) {
        for (; first + 2 <= rows; first += 2) rows_of.template operator()<2>(first);
      }
      for (; first < rows; ++first) rows_of.template operator()<1>(first);
    });
  }

  // sums[t] += Σ_p dy[p] · x[p + offset(t)], rows `dy_row` and `x_row` apart.
  FF_INLINE static void correlate(const C* dy, int64_t dy_row, const C* x, int64_t x_row, int64_t advance, int64_t rows,
                                  int64_t columns, const std::vector<Tap>& taps, C* sums) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t all = taps.size(), chunks = ceil_div(all, kTaps);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t begin = chunk * all / chunks, count = (chunk + 1) * all / chunks - begin;
        pieces<kTaps>(count, [&]<int N>(int64_t) FF_INLINE_LAMBDA {
          V sum[N];
          int64_t offset[N];
#pragma GCC unroll 10
          for (int t = 0; t < N; ++t) sum[t] = load<B>(sums + (begin + t) * L), offset[t] = taps[begin + t].offset;
          for (int64_t row = 0; row < rows; ++row) {
            const C *from = dy + row * dy_row, *at = x + row * x_row;
            for (int64_t p = 0; p < columns; ++p, from += L, at += advance) {
              const V gradient = load<B>(from);
#pragma GCC unroll 10
              for (int t = 0; t < N; ++t) sum[t] += gradient * load<B>(at + offset[t]);
            }
          }
#pragma GCC unroll 10
          for (int t = 0; t < N; ++t) store<B>(sums + (begin + t) * L, sum[t]);
        });
      }
    });
  }
};

template <class T>
struct Forward : Work<Compute<T>> {
  const T* image;
  T* y;
};

template <class T>
struct Backward : Work<Compute<T>> {
  using C = Compute<T>;
  const T *image, *gradient;
  T* input;  // dx and whether it is channels_last; null where not asked for
  bool input_last;
  C* sums;  // dW [part][block][tap][lane]; null where not asked for
};

// f(image, block) for the images and blocks of an item (part, split).
template <class W, class F>
FF_INLINE void each_block(const W& w, int64_t item, const F& f) {
  const int64_t part = item / w.splits, split = item % w.splits, n = w.conv.n;
  for (int64_t image = part * n / w.parts; image < (part + 1) * n / w.parts; ++image) {
    for (int64_t b = split * w.blocks / w.splits; b < (split + 1) * w.blocks / w.splits; ++b) f(image, b, part);
  }
}

template <class T, int B>
struct RunForward {
  using C = Compute<T>;
  using Ops = Lanes<T, B>;
  static constexpr int L = Ops::L;

  FF_INLINE static void run(const Forward<T>& w, int64_t begin, int64_t end) {
    const Conv& c = w.conv;
    const int64_t plane = c.oh * c.ow;
    const Zeros<C> x(w.x.size() * L);
    const Scratch<C> y(plane * L), panel(L * Ops::panel_step(std::max(c.h * c.w, plane)));
    for (int64_t item = begin; item < end; ++item) {
      each_block(w, item, [&](int64_t n, int64_t b, int64_t) FF_INLINE_LAMBDA {
        const int64_t first = b * L, count = std::min<int64_t>(L, w.channels - first);
        const typename Ops::V start = w.bias ? load<B>(w.bias + first) : typename Ops::V{};
        T* const image = w.y + n * w.channels * plane;
        Ops::read(w.image + n * w.channels * c.h * c.w, w.channels, c.x_channels_last, first, count, w.x, panel.get(),
                  x.get());
        auto convolve = [&](auto* to, int64_t pixel) FF_INLINE_LAMBDA {
          Ops::convolve(x.get(), c.stride[1] * L, c.stride[0] * w.x.columns * L, w.weight + b * w.taps * L, w.forward,
                        start, c.oh, c.ow, to, pixel, c.ow * pixel);
        };
        if (c.y_channels_last && count == L) return convolve(image + first, w.channels);
        convolve(y.get(), L);
        Ops::write(y.get(), plane, w.channels, c.y_channels_last, first, count, panel.get(), image);
      });
    }
  }
};

template <class T, int B>
struct RunBackward {
  using C = Compute<T>;
  using Ops = Lanes<T, B>;
  static constexpr int L = Ops::L;

  FF_INLINE static void run(const Backward<T>& w, int64_t begin, int64_t end) {
    const Conv& c = w.conv;
    const int64_t pixels = c.h * c.w, plane = c.oh * c.ow;
    const Zeros<C> x(w.sums ? w.x.size() * L : 0), dy(w.dy.size() * L);
    const Scratch<C> dx(w.input ? pixels * L : 0);
    const Scratch<C> panel(L * Ops::panel_step(std::max(pixels, plane)));
    for (int64_t item = begin; item < end; ++item) {
      each_block(w, item, [&](int64_t n, int64_t b, int64_t part) FF_INLINE_LAMBDA {
        const int64_t first = b * L, count = std::min<int64_t>(L, w.channels - first);
        const C* const weight = w.weight + b * w.taps * L;
        Ops::read(w.gradient + n * w.channels * plane, w.channels, c.y_channels_last, first, count, w.dy, panel.get(),
                  dy.get());
        const C* const own = dy.get() + (w.dy.top * w.dy.columns + w.dy.left) * L;
        if (w.sums) {
          Ops::read(w.image + n * w.channels * pixels, w.channels, c.x_channels_last, first, count, w.x, panel.get(),
                    x.get());
          Ops::correlate(own, w.dy.columns * L, x.get(), c.stride[0] * w.x.columns * L, c.stride[1] * L, c.oh, c.ow,
                         w.forward, w.sums + (part * w.blocks + b) * w.taps * L);
        }
        if (!w.input) return;
        T* const image = w.input + n * w.channels * pixels;
        auto convolve = [&](auto* to, int64_t pixel) FF_INLINE_LAMBDA {
          // The rows and columns of dx, padded, that are so much beyond a multiple of the stride.
          for (int64_t down = 0; down < c.stride[0]; ++down) {
            const int64_t row = (down + c.stride[0] - c.padding[0] % c.stride[0]) % c.stride[0];
            for (int64_t across = 0; across < c.stride[1]; ++across) {
              const int64_t column = (across + c.stride[1] - c.padding[1] % c.stride[1]) % c.stride[1];
              if (row >= c.h || column >= c.w) continue;
              const int64_t top = (row + c.padding[0]) / c.stride[0], left = (column + c.padding[1]) / c.stride[1];
              Ops::convolve(own + (top * w.dy.columns + left) * L, L, w.dy.columns * L, weight,
                            w.backward[down * c.stride[1] + across], typename Ops::V{},
                            ceil_div(c.h - row, c.stride[0]), ceil_div(c.w - column, c.stride[1]),
                            to + (row * c.w + column) * pixel, c.stride[1] * pixel, c.stride[0] * c.w * pixel);
            }
          }
        };
        if (w.input_last && count == L) return convolve(image + first, w.channels);
        convolve(dx.get(), L);
        Ops::write(dx.get(), pixels, w.channels, w.input_last, first, count, panel.get(), image);
      });
    }
  }
};

// [block][tap][lane], zeros in lanes without a channel.
template <class T, class C>
void make_weight(const Work<C>& w, int64_t rank, const void* u_, const void* v_, const Sparse& mu, C* weight) {
  const T *u = static_cast<const T*>(u_), *v = static_cast<const T*>(v_), *values = static_cast<const T*>(mu.values);
  std::fill(weight, weight + w.blocks * w.taps * w.lanes, C(0));
  auto at = [&](int64_t channel, int64_t tap) -> C& {
    return weight[(channel / w.lanes * w.taps + tap) * w.lanes + channel % w.lanes];
  };
  for (int64_t r = 0; r < rank; ++r) {
    for (int64_t t = 0; t < w.taps; ++t) {
      const C factor = to_compute(u[r * w.taps + t]);
      for (int64_t k = 0; k < w.channels; ++k) at(k, t) += factor * to_compute(v[r * w.channels + k]);
    }
  }
  for (int64_t nz = 0; nz < mu.count; ++nz) {
    const int64_t position = mu.index ? mu.index[nz] : nz;
    at(position / w.taps, position % w.taps) += to_compute(values[nz]);
  }
}

// du, dv and dμ on its support from dW, the sum of its parts.
template <class T, class C>
void give_gradients(const FactoredConvBackward& op, const Work<C>& w, C* sums) {
  const int64_t size = w.blocks * w.taps * w.lanes;
  for (int64_t part = 1; part < w.parts; ++part) {
    for (int64_t k = 0; k < size; ++k) sums[k] += sums[part * size + k];
  }
  auto at = [&](int64_t channel, int64_t tap) {
    return sums[(channel / w.lanes * w.taps + tap) * w.lanes + channel % w.lanes];
  };
  const T *u = static_cast<const T*>(op.u), *v = static_cast<const T*>(op.v);
  T *du = static_cast<T*>(op.du), *dv = static_cast<T*>(op.dv), *dvalues = static_cast<T*>(op.dvalues);
  for (int64_t r = 0; r < op.rank; ++r) {
    for (int64_t t = 0; t < w.taps && du; ++t) {
      C sum = 0;
      for (int64_t k = 0; k < w.channels; ++k) sum += to_compute(v[r * w.channels + k]) * at(k, t);
      du[r * w.taps + t] = from_compute<T>(sum);
    }
    for (int64_t k = 0; k < w.channels && dv; ++k) {
      C sum = 0;
      for (int64_t t = 0; t < w.taps; ++t) sum += to_compute(u[r * w.taps + t]) * at(k, t);
      dv[r * w.channels + k] = from_compute<T>(sum);
    }
  }
  for (int64_t nz = 0; nz < op.mu.count && dvalues; ++nz) {
    const int64_t position = op.mu.index ? op.mu.index[nz] : nz;
    dvalues[nz] = from_compute<T>(at(position / w.taps, position % w.taps));
  }
}

}  // namespace

bool is_depthwise(const Conv& c) { return c.i == 1 && c.o == 1 && c.groups >= kFewest; }

bool factored_conv_depthwise(const FactoredConv& op, ParallelFor parallel_for) {
  if (!is_depthwise(op.conv)) return false;
  with_conv_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    Forward<T> w{plan<C>(op.conv), static_cast<const T*>(op.x), static_cast<T*>(op.y)};
    const Scratch<C> weight(w.blocks * w.taps * w.lanes), bias(op.bias ? w.blocks * w.lanes : 0);
    make_weight<T>(w, op.rank, op.u, op.v, op.mu, weight.get());
    for (int64_t k = 0; op.bias && k < w.blocks * w.lanes; ++k) {
      bias.get()[k] = k < w.channels ? to_compute(static_cast<const T*>(op.bias)[k]) : C(0);
    }
    w.weight = weight.get(), w.bias = op.bias ? bias.get() : nullptr;
    parallel(parallel_for, w.parts * w.splits, 1,
             [&](int64_t begin, int64_t end) { dispatch<RunForward, T>(w, begin, end); });
  });
  return true;
}

bool factored_conv_backward_depthwise(const FactoredConvBackward& op, ParallelFor parallel_for) {
  if (!is_depthwise(op.conv)) return false;
  with_conv_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const bool needs_weight = op.du || op.dv || op.dvalues;
    Backward<T> w{plan<C>(op.conv),       static_cast<const T*>(op.x), static_cast<const T*>(op.dy),
                  static_cast<T*>(op.dx), op.dx_channels_last,         nullptr};
    const int64_t size = w.blocks * w.taps * w.lanes;
    const Scratch<C> weight(size), sums(needs_weight ? w.parts * size : 0);
    make_weight<T>(w, op.rank, op.u, op.v, op.mu, weight.get());
    w.weight = weight.get();
    if (needs_weight) {
      w.sums = sums.get();
      std::fill(w.sums, w.sums + w.parts * size, C(0));
    }
    parallel(parallel_for, w.parts * w.splits, 1,
             [&](int64_t begin, int64_t end) { dispatch<RunBackward, T>(w, begin, end); });
    if (needs_weight) give_gradients<T>(op, w, sums.get());
  });
  return true;
}

}  // namespace fastfact
