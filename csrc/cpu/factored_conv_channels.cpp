// The factored convolution without μ, some pixels at a time. Forward: t_r = the depthwise
// convolution of x by u_r, y = v t. Backward, with s_r = v_rᵀ dy: dx = Σ_r the transposed depthwise convolution of s_r
// by u_r, du_r the correlation of x and s_r, dv_r = dyᵀ t_r. Rows of s and t are [group][rank][channel].
#include "channels.h"

namespace fastfact {
namespace {

// The rows of pixels [first, last) of images of `channels` channels and so many pixels in memory, as much of them as
// there is; nothing of parts of contiguous images.
template <class T>
Ahead ahead_of(const T* data, bool channels_last, int64_t first, int64_t last, int64_t pixels, int64_t channels,
               int64_t image) {
  if (!channels_last && (first % image || last % image)) return {};
  first = std::min(first, pixels), last = std::min(last, pixels);
  return {reinterpret_cast<const char*>(data + first * channels), int64_t((last - first) * channels * sizeof(T))};
}

// Parts of the channels of s and t that depthwise convolutions take at once: all, where they lie side by side.
template <class F>
void each_block(const Conv& c, int64_t rank, const F& f) {
  const int64_t blocks = rank == 1 ? 1 : c.groups, channels = c.groups / blocks * c.i;
  for (int64_t block = 0; block < blocks; ++block) f(block * channels, block * rank * channels, channels);
}

// Elements worked on at once, for the second cache; pixels, so that sums over them are worth their loads; units, for
// the threads.
constexpr int64_t kKept = 1 << 16, kLeast = 64, kUnits = 4;
constexpr int64_t kWhole = 1 << 19;  // the same of contiguous images, where that are whole ones

template <class T, int B>
struct PackV {
  FF_INLINE static void run(const T* v, const Conv& c, int64_t rank, bool swapped, bool pairs, Compute<T>* to,
                            int64_t begin, int64_t end) {
    Rows<Compute<T>, B>::pack(v, c, rank, swapped, pairs, to, begin, end);
  }
};

template <class T>
void pack_v(const void* v, const Conv& c, int64_t rank, bool swapped, bool pairs, Compute<T>* to,
            ParallelFor parallel_for) {
  const int64_t panel = wide(register_bytes()) * register_bytes() / sizeof(Compute<T>);
  const int64_t items = swapped ? c.groups * rank * ceil_div(c.i, panel) : c.groups * ceil_div(c.o, panel);
  parallel(parallel_for, items, ceil_div(32768 * items, c.groups * c.o * c.i * rank), [&](int64_t begin, int64_t end) {
    dispatch<PackV, T>(static_cast<const T*>(v), c, rank, swapped, pairs, to, begin, end);
  });
}

// The pixels of x that pixels of y read, as the kernels read them: where they are, or copied once for all taps:
// converted, in half precision, turned, of contiguous images, or laid side by side.
template <class T, int B>
class Source {
 public:
  using C = Compute<T>;
  const C* data;
  int64_t origin, row, size;  // the pixel at `data`; elements of a pixel, and of all

  FF_INLINE void find(const T* x, const Conv& c, int64_t first, int64_t last) {
    const int64_t inputs = c.groups * c.i;
    const bool laid = side_by_side(c);
    if constexpr (std::is_same_v<T, C>) {
      if (!laid && c.x_channels_last) {
        data = x, origin = 0, row = inputs, size = c.n * c.h * c.w * inputs;
        return;
      }
    }
    auto line = [&](int64_t pixel, int64_t beyond) {
      const int64_t y = pixel / c.ow % c.oh * c.stride[0] - c.padding[0] + beyond;
      return pixel / (c.oh * c.ow) * c.h + std::clamp<int64_t>(y, 0, c.h);
    };
    const int64_t top = line(first, 0), bottom = std::max(top, line(last - 1, (c.kh - 1) * c.dilation[0] + 1));
    const SideBySide columns = make_side_by_side(c);
    const int64_t width = laid ? columns.width() : c.w;
    row = laid || c.x_channels_last ? inputs : scratch_row(inputs, kLanes<C, B>);
    origin = top * width, size = (bottom - top) * width * row + kLanes<C, B>;
    if (int64_t(kept_.size()) < size) kept_.resize(size);
    data = kept_.data();
    if (laid) {
      line_.resize(width * inputs);
      for (int64_t y = top; y < bottom; ++y) {
        copy_line(x, c, y);
        apart(line_.data(), columns, inputs, kept_.data() + (y - top) * width * inputs);
      }
    } else if (c.x_channels_last) {
      copy<B>(x + top * width * inputs, (bottom - top) * width * inputs, kept_.data());
    } else {
      Rows<C, B>::to_rows(x, c.n, inputs, c.h * c.w, top * c.w, bottom * c.w, kept_.data(), row);
    }
  }

 private:
  // Row y of all images, as pixels of channels between those of the padding.
  FF_INLINE void copy_line(const T* x, const Conv& c, int64_t y) {
    const int64_t inputs = c.groups * c.i, padding = c.padding[1] * inputs;
    const int64_t count = std::min<int64_t>(c.w * inputs, line_.size() - padding);
    if (count <= 0) return;
    C* to = line_.data() + padding;
    if (c.x_channels_last) return copy<B>(x + y * c.w * inputs, count, to);
    for (int64_t channel = 0; channel < inputs; ++channel) {
      const T* from = x + ((y / c.h * inputs + channel) * c.h + y % c.h) * c.w;
      for (int64_t k = 0; k * inputs < count; ++k) to[k * inputs + channel] = to_compute(from[k]);
    }
  }

  FF_INLINE static void apart(const C* line, const SideBySide& columns, int64_t inputs, C* to) {
    auto some = [&](auto n) FF_INLINE_LAMBDA {
      for (int64_t phase = 0; phase < columns.stride; ++phase, to += columns.each * n) {
        const C* from = line + phase * n;
        for (int64_t k = 0; k < columns.each; ++k, from += columns.stride * n) std::copy_n(from, +n, to + k * n);
      }
    };
    if (inputs == 1) return some(std::integral_constant<int64_t, 1>{});
    if (inputs == 2) return some(std::integral_constant<int64_t, 2>{});
    if (inputs == 3) return some(std::integral_constant<int64_t, 3>{});
    if (inputs == 4) return some(std::integral_constant<int64_t, 4>{});
    some(inputs);
  }

  std::vector<C> kept_, line_;
};

// So many pixels of contiguous images, or a few more: whole images of up to `most` pixels, which follow each other in
// memory, or parts of them that are few squares of registers.
int64_t whole_registers(int64_t pixels, int64_t image, int64_t most, int64_t lanes) {
  const int64_t of = image <= std::max(pixels, most) ? image : std::min(image, lanes);
  return ceil_div(pixels, of) * of;
}

template <class T>
struct Forward {
  using C = Compute<T>;
  Conv c;
  Walk walk;
  int64_t rank, band;
  bool pairs;  // products in pairs
  const T* x;
  T* y;
  const C *u, *v, *bias;
};

template <class T, int B>
struct RunForward {
  using C = Compute<T>;
  using Kernels = Rows<C, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Forward<T>& p, int64_t begin, int64_t end) {
    const Conv& c = p.c;
    const int64_t inputs = c.groups * c.i, outputs = c.groups * c.o, depth = p.rank * c.i,
                  padded = ceil_div(c.o, L) * L;
    const int64_t row = scratch_row(c.groups * depth / (p.pairs ? 2 : 1), L);
    const int64_t pixels = c.n * c.oh * c.ow, read = c.n * c.h * c.w;
    const bool in_place = std::is_same_v<T, C> && c.y_channels_last;
    const int64_t y_row = c.y_channels_last ? outputs : scratch_row(outputs, L);
    const Scratch<C> t(p.band * row), own(in_place ? 0 : p.band * y_row);
    Source<T, B> x;
    for (int64_t band = begin; band < end; ++band) {
      const int64_t first = band * p.band, count = std::min(p.band, pixels - first);
      x.find(p.x, c, first, first + count);
      walk_runs(p.walk, first, first + count, x.origin, x.row, [&](const Run& run) {
        each_block(c, p.rank, [&](int64_t from, int64_t to, int64_t channels) {
          auto into = [&](auto* t, int64_t row) FF_INLINE_LAMBDA {
            for (int64_t r = 0; r < p.rank; ++r) {
              Kernels::depthwise(run, x.data + from, x.size - from, channels, p.u + r * p.walk.taps, 1, 0, 0,
                                 t + (run.first - first) * row + to + r * channels, p.walk.axes[1].every * row);
            }
          };
          if constexpr (std::is_same_v<T, BFloat16>) {
            if (p.pairs) return into(reinterpret_cast<T*>(t.get()), 2 * row);
          }
          into(t.get(), row);
        });
      });
      C* y = own.get();
      if constexpr (std::is_same_v<T, C>) {
        if (in_place) y = p.y + first * outputs;
      }
      for (int64_t g = 0; g < c.groups; ++g) {
        const int64_t next = first + p.band, from = next * read / pixels, to = (next + p.band) * read / pixels;
        with_operand<T, B>(p.pairs, [&](auto operand, int64_t factors) FF_INLINE_LAMBDA {
          using E = decltype(operand);
          Kernels::template multiply<E>(
              {reinterpret_cast<const E*>(t.get()) + g * depth / factors, row, 1}, count,
              {reinterpret_cast<const E*>(p.v) + g * padded * depth, 0, Kernels::kPanel * depth}, c.o, depth / factors,
              p.bias ? p.bias + g * padded : nullptr, 0, y + g * c.o, y_row,
              g ? Ahead{} : ahead_of(p.x, c.x_channels_last, from, to, read, inputs, c.h * c.w),
              g ? Ahead{} : ahead_of(p.y, c.y_channels_last, next, next + p.band, pixels, outputs, c.oh * c.ow));
        });
      }
      if (!c.y_channels_last) {
        Kernels::from_rows(y, y_row, outputs, c.oh * c.ow, first, first + count, p.y);
      } else if (!in_place) {
        copy<B>(y, count * outputs, p.y + first * outputs);
      }
    }
  }
};

template <class T>
void forward(const FactoredConv& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), padded = ceil_div(c.o, lanes) * lanes;
  const int64_t taps = c.kh * c.kw, depth = op.rank * c.i, pixels = c.n * c.oh * c.ow;
  const Scratch<C> u(op.rank * taps), v(c.groups * padded * depth), bias(c.groups * padded);
  Forward<T> p{c,
               make_walk(c, false),
               op.rank,
               0,
               in_pairs<T>(depth),
               static_cast<const T*>(op.x),
               static_cast<T*>(op.y),
               u.get(),
               v.get(),
               op.bias ? bias.get() : nullptr};
  for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
  for (int64_t k = 0; k < c.groups * padded && op.bias; ++k) {
    const int64_t group = k / padded, o = k % padded;
    bias.get()[k] = o < c.o ? to_compute(static_cast<const T*>(op.bias)[group * c.o + o]) : C(0);
  }
  pack_v<T>(op.v, c, op.rank, false, p.pairs, v.get(), parallel_for);
  p.band = std::min(ceil_div(kKept, c.groups * (depth + c.o)), ceil_div(pixels, kUnits));
  if (!c.y_channels_last) {
    const bool shared_out = 10 * ceil_div(c.n, op.threads) * op.threads <= 11 * c.n;
    const int64_t most = shared_out ? kWhole / (c.groups * (depth + c.o)) : 0;
    p.band = whole_registers(p.band, c.oh * c.ow, most, lanes);
  }
  parallel(parallel_for, ceil_div(pixels, p.band), 1,
           [&](int64_t begin, int64_t end) { dispatch<RunForward, T>(p, begin, end); });
}

template <class T>
struct Backward {
  using C = Compute<T>;
  Conv c;
  Walk walk, back;                                         // from x to y and from dy to dx
  int64_t rank, images, rows, bands, units, parts, block;  // of a unit: images, or rows of bands; pixels at once
  const T *x, *dy;
  T* dx;
  bool dx_channels_last;
  const C *u, *v;
  bool few;                        // channels of s: `v` as [i][o]
  bool needs_u, needs_v, swapped;  // swapped: dv as [i][o], where that fills the registers better
  C *du, *dv;                      // partial sums [part][…]
  int64_t dv_rows, dv_row;
  int64_t dv_size() const { return c.groups * rank * dv_rows * dv_row; }
};

template <class T, int B>
struct RunBackward {
  using C = Compute<T>;
  using Kernels = Rows<C, B>;
  static constexpr int L = kLanes<T, B>;

  // Items are parts.
  FF_INLINE static void run(const Backward<T>& p, int64_t begin, int64_t end) {
    const Conv& c = p.c;
    const int64_t inputs = c.groups * c.i, outputs = c.groups * c.o, depth = c.groups * p.rank * c.i;
    const int64_t taps = p.walk.taps, in_image = c.h * c.w, out_image = c.oh * c.ow;
    const int64_t pixels = c.n * out_image, read = c.n * in_image, padded = ceil_div(c.i, L) * L;
    const int64_t row = scratch_row(depth, L), dy_row = scratch_row(outputs, L);
    const bool needs_s = p.dx || p.needs_u;
    const int64_t s_rows =
        p.bands > 1 ? std::min(c.oh, p.rows + c.padding[0] + c.kh * c.dilation[0] + 1) * c.ow : p.images * out_image;
    const Zeros<C> s(needs_s ? s_rows * row + L : 0), t(p.needs_v ? p.block * row + L : 0);
    // Rows that no register runs over are read where they lie.
    const bool in_place = std::is_same_v<T, C> && c.y_channels_last && dy_row == outputs && c.o % L == 0;
    // dx of some rows at a time where it is turned.
    const int64_t dx_row = scratch_row(inputs, L), dx_block = ceil_div(ceil_div(kKept / 4, dx_row), c.w) * c.w;
    const Scratch<C> dx_rows(p.dx && !p.dx_channels_last ? dx_block * dx_row : 0);
    const Zeros<C> dy(in_place ? 0 : p.block * dy_row + L), sums(p.rank * taps * L), total(p.rank * taps * L);
    Source<T, B> x;
    for (int64_t part = begin; part < end; ++part) {
      C* dv = p.needs_v ? p.dv + part * p.dv_size() : nullptr;
      if (dv) std::memset(static_cast<void*>(dv), 0, p.dv_size() * sizeof(C));
      std::memset(static_cast<void*>(total.get()), 0, p.rank * taps * L * sizeof(C));
      for (int64_t unit = part * p.units / p.parts; unit < (part + 1) * p.units / p.parts; ++unit) {
        // Pixels of dy: the unit's own [first, last), and those that its pixels of dx read, [low, high).
        const int64_t image = unit / p.bands * p.images, images = std::min(p.images, c.n - image),
                      band = unit % p.bands;
        const int64_t top = band * p.rows, bottom = std::min(c.oh, top + p.rows);
        const bool whole = p.bands == 1;
        const int64_t dx_top = std::min(c.h, top * c.stride[0]);
        const int64_t dx_bottom = bottom == c.oh ? c.h : std::min(c.h, bottom * c.stride[0]);
        int64_t above = top, below = bottom;
        const Axis& axis = p.back.axes[0];
        for (int64_t k = axis.start[dx_top]; k < axis.start[dx_bottom] && p.dx; ++k) {
          above = std::min(above, axis.from[k]), below = std::max(below, axis.from[k] + 1);
        }
        const int64_t first = image * out_image + top * c.ow;
        const int64_t last = whole ? (image + images) * out_image : image * out_image + bottom * c.ow;
        const int64_t low = whole ? first : image * out_image + above * c.ow;
        const int64_t high = whole ? last : image * out_image + below * c.ow;
        auto add = [&](int64_t from, int64_t to, bool own) FF_INLINE_LAMBDA {
          for (int64_t pixel = from; pixel < to; pixel += p.block) {
            const int64_t count = std::min(p.block, to - pixel);
            const int64_t x_from = pixel * read / pixels, x_to = (pixel + count) * read / pixels;
            const C* dy_block = dy.get();
            if constexpr (std::is_same_v<T, C>) {
              if (in_place) dy_block = p.dy + pixel * outputs;
            }
            if (!c.y_channels_last) {
              Kernels::to_rows(p.dy, c.n, outputs, out_image, pixel, pixel + count, dy.get(), dy_row);
            } else if (dy_block == dy.get()) {
              copy_rows(p.dy + pixel * outputs, count, outputs, dy.get(), dy_row);
            }
            C* s_block = s.get() + (pixel - low) * row;
            if (p.few && needs_s) Kernels::dots(c.i, dy_block, dy_row, count, p.v, c.o, s_block, row);
            for (int64_t k = 0; k < c.groups * p.rank && needs_s && !p.few; ++k) {
              Kernels::template multiply<C>(
                  {dy_block + k / p.rank * c.o, dy_row, 1}, count, {p.v + k * padded * c.o, 0, Kernels::kPanel * c.o},
                  c.i, c.o, nullptr, 0, s_block + k * c.i, row,
                  k || !own ? Ahead{} : ahead_of(p.x, c.x_channels_last, x_from, x_to, read, inputs, in_image),
                  k || !p.dx ? Ahead{} : ahead_of(p.dx, p.dx_channels_last, x_from, x_to, read, inputs, in_image));
            }
            if (own && (p.needs_u || dv)) {
              x.find(p.x, c, pixel, pixel + count);
              walk_runs(p.walk, pixel, pixel + count, x.origin, x.row, [&](const Run& run) {
                each_block(c, p.rank, [&](int64_t from, int64_t to, int64_t channels) {
                  const int64_t at = (run.first - pixel) * row + to, size = x.size - from;
                  for (int64_t r = 0; r < p.rank; ++r) {
                    const C *u = p.u + r * taps, *in = s_block + at + r * c.i;
                    C *out = t.get() + at + r * c.i, *grads = sums.get() + r * taps * L;
                    if (p.needs_u && dv) {
                      Kernels::template correlate<true>(run, x.data + from, size, channels, u, in, out, row, grads);
                    } else if (p.needs_u) {
                      Kernels::template correlate<false>(run, x.data + from, size, channels, u, in, out, row, grads);
                    } else {
                      Kernels::depthwise(run, x.data + from, size, channels, u, 1, 0, 0, out, row);
                    }
                  }
                });
              });
            }
            // For each block apart: sums of sums round less.
            for (int64_t k = 0; k < p.rank * taps * L && own && p.needs_u; ++k) {
              total.get()[k] += sums.get()[k], sums.get()[k] = 0;
            }
            for (int64_t k = 0; k < c.groups * p.rank && own && dv; ++k) {
              const C *d = dy_block + k / p.rank * c.o, *in = t.get() + k * c.i;
              C* to = dv + k * p.dv_rows * p.dv_row;
              Kernels::template multiply<C>(
                  {p.swapped ? in : d, 1, p.swapped ? row : dy_row}, p.dv_rows,
                  {p.swapped ? d : in, p.swapped ? dy_row : row, Kernels::kPanel}, p.dv_row, count, to, p.dv_row, to,
                  p.dv_row,
                  k ? Ahead{}
                    : ahead_of(p.dy, c.y_channels_last, pixel + count, pixel + 2 * count, pixels, outputs, out_image),
                  {});
            }
          }
        };
        if (needs_s) add(low, first, false);
        add(first, last, true);
        if (needs_s) add(last, high, false);
        if (!p.dx) continue;
        const int64_t dx_first = image * in_image + dx_top * c.w;
        const int64_t dx_last = whole ? (image + images) * in_image : image * in_image + dx_bottom * c.w;
        auto find_dx = [&](int64_t first, int64_t last, auto* to_rows, int64_t to_row) FF_INLINE_LAMBDA {
          walk_runs(p.back, first, last, low, row, [&](const Run& run) {
            each_block(c, p.rank, [&](int64_t to, int64_t from, int64_t channels) {
              Kernels::depthwise(run, s.get() + from, s_rows * row + L - from, channels, p.u, p.rank, c.i, taps,
                                 to_rows + (run.first - first) * to_row + to, p.back.axes[1].every * to_row);
            });
          });
        };
        if (p.dx_channels_last) find_dx(dx_first, dx_last, p.dx + dx_first * inputs, inputs);
        for (int64_t from = dx_first; from < dx_last && !p.dx_channels_last; from += dx_block) {
          const int64_t to = std::min(dx_last, from + dx_block);
          find_dx(from, to, dx_rows.get(), dx_row);
          Kernels::from_rows(dx_rows.get(), dx_row, inputs, in_image, from, to, p.dx);
        }
      }
      for (int64_t k = 0; k < p.rank * taps && p.needs_u; ++k) {
        C sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += total.get()[k * L + lane];
        p.du[part * p.rank * taps + k] = sum;
      }
    }
  }

  FF_INLINE static void copy_rows(const T* from, int64_t rows, int64_t n, C* to, int64_t to_row) {
    if (n == to_row) n *= rows, rows = 1;
    for (int64_t m = 0; m < rows; ++m) copy<B>(from + m * n, n, to + m * to_row);
  }
};

template <class T>
void backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t lanes = register_bytes() / sizeof(C), taps = c.kh * c.kw, depth = c.groups * op.rank * c.i;
  const int64_t pixels = c.oh * c.ow;
  auto whole = [&](int64_t n) { return ceil_div(n, lanes) * lanes; };
  Backward<T> p{};
  p.c = c, p.walk = make_walk(c, false), p.back = make_walk(c, true), p.rank = op.rank;
  p.x = static_cast<const T*>(op.x), p.dy = static_cast<const T*>(op.dy), p.dx = static_cast<T*>(op.dx);
  p.dx_channels_last = op.dx_channels_last;
  p.needs_u = op.du, p.needs_v = op.dv;
  p.swapped = c.i * whole(c.o) < c.o * whole(c.i);
  p.dv_rows = p.swapped ? c.i : c.o, p.dv_row = whole(p.swapped ? c.o : c.i);
  p.block = std::max<int64_t>(kLeast, ceil_div(side_by_side(c) ? kKept : kKept / 4, depth + c.groups * c.o));
  if (!c.y_channels_last) p.block = whole_registers(p.block, pixels, kWhole / (depth + c.groups * c.o), lanes);
  // Units of as many images as are worked on at once, or of bands of one that leave the second cache to s.
  const int64_t s_image = pixels * depth;
  p.images = std::clamp<int64_t>(std::max<int64_t>(kLeast / pixels, kKept / 2 / s_image), 1, ceil_div(c.n, kUnits));
  p.bands = ceil_div(s_image, 4 * kKept);
  while (c.n * p.bands < kUnits && pixels / (p.bands + 1) >= 128) ++p.bands;
  p.rows = ceil_div(c.oh, p.bands), p.bands = ceil_div(c.oh, p.rows), p.units = ceil_div(c.n, p.images) * p.bands;
  // The number of partial sums depends on the shape only, so that results repeat.
  const int64_t most = std::clamp<int64_t>((1 << 19) / (p.dv_size() + 1), 8, 64);
  p.parts = std::min(p.needs_u || p.needs_v ? most : INT64_MAX, p.units);

  const Scratch<C> u(op.rank * taps), v(c.groups * op.rank * whole(c.i) * c.o);
  const Scratch<C> du_parts(p.parts * op.rank * taps), dv_parts(p.needs_v ? p.parts * p.dv_size() : 0);
  for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
  p.few = op.rank * c.groups == 1 && c.i <= 4 && c.o % lanes == 0;
  if (p.few) {
    for (int64_t k = 0; k < c.i * c.o; ++k)
      v.get()[k] = to_compute(static_cast<const T*>(op.v)[k % c.o * c.i + k / c.o]);
  } else if (p.dx || p.needs_u) {
    pack_v<T>(op.v, c, op.rank, true, false, v.get(), parallel_for);
  }
  p.u = u.get(), p.v = v.get(), p.du = du_parts.get(), p.dv = dv_parts.get();
  parallel(parallel_for, p.parts, 1, [&](int64_t begin, int64_t end) { dispatch<RunBackward, T>(p, begin, end); });

  for (int64_t k = 0; k < op.rank * taps && p.needs_u; ++k) {
    C sum = 0;
    for (int64_t part = 0; part < p.parts; ++part) sum += p.du[part * op.rank * taps + k];
    static_cast<T*>(op.du)[k] = from_compute<T>(sum);
  }
  if (!p.needs_v) return;
  const int64_t rows = c.groups * op.rank * p.dv_rows;
  parallel(parallel_for, rows, ceil_div(16384, p.dv_row * p.parts), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      C* sums = p.dv + row * p.dv_row;
      for (int64_t part = 1; part < p.parts; ++part) {
        for (int64_t k = 0; k < p.dv_row; ++k) sums[k] += sums[part * p.dv_size() + k];
      }
      const int64_t block = row / p.dv_rows, m = row % p.dv_rows;
      T* to = static_cast<T*>(op.dv) + (block % op.rank * c.groups + block / op.rank) * c.o * c.i;
      for (int64_t k = 0; k < (p.swapped ? c.o : c.i); ++k)
        to[p.swapped ? k * c.i + m : m * c.i + k] = from_compute<T>(sums[k]);
    }
  });
}

}  // namespace

void factored_conv_channels(const FactoredConv& op, ParallelFor parallel_for) {
  with_conv_type(op.type, [&](auto type) { forward<decltype(type)>(op, parallel_for); });
}

void factored_conv_backward_channels(const FactoredConvBackward& op, ParallelFor parallel_for) {
  with_conv_type(op.type, [&](auto type) { backward<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
