// The factored convolution without μ on contiguous images, where outputs are as large as inputs: the pixels of a plane
// in the lanes, in the order in which they lie. x is staged a few channels at a time, with zeros around it, t_r = the
// depthwise convolution of that by u_r goes into panels of a few registers of pixels, and y = v t where it belongs.
#include "tiles.h"

namespace fastfact {
namespace {

// Elements of t at once, for the second cache; pixels of dy, so that sums over them are worth their loads; units, for
// the threads.
constexpr int64_t kKept = 1 << 18, kLeast = 256, kUnits = 4;

constexpr int64_t kFew = 4;  // channels of s and t for which one pass over dy does

// The least number of rows of a plane that are whole panels of registers and divide it; 0 if there is none.
int64_t rows_of_panels(const Conv& c, int64_t lanes) {
  if (!c.w || (c.w % lanes && lanes % c.w)) return 0;
  for (int64_t rows = 1; rows <= c.h; ++rows) {
    if (c.h % rows == 0 && rows * c.w % (wide(register_bytes()) * lanes) == 0) return rows;
  }
  return 0;
}

constexpr int64_t kTogether = 4;  // channels staged at a time

// A band of rows of a plane with zeros around it, as the depthwise part reads it. Rows of whole registers have zeros
// between them; shorter ones lie end to end, `rows_together` to a register, and a mask for each column of taps tells
// what lies inside.
template <class C>
struct Stage {
  using Bits = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  int64_t row_registers, rows_together;  // one of them is 1
  int64_t pitch, before, channel;        // elements: from one row to the next, to the first, from channel to channel
  int64_t lines, below;                  // registers of the band, one above the other; rows staged beyond it
  std::vector<int64_t> offset;           // of each tap
  std::vector<int64_t> place;            // of each register of the first channel of t
  std::vector<Bits> masks;               // [column of taps][lane]
};

template <class C>
Stage<C> make_stage(const Conv& c, int64_t rows, int64_t lanes, int64_t panel, int64_t depth) {
  Stage<C> s{};
  const int64_t gap = ceil_div(c.padding[1], lanes);
  s.row_registers = ceil_div(c.w, lanes), s.rows_together = ceil_div(lanes, c.w);
  s.pitch = c.w + (s.rows_together == 1 ? gap * lanes : 0), s.before = gap * lanes;
  s.lines = rows / s.rows_together, s.below = (c.kh - 1) * c.dilation[0];
  s.channel = s.before + (rows + s.below) * s.pitch + (gap + 1) * lanes;
  for (int64_t k = 0; k < c.kh * c.kw; ++k) {
    s.offset.push_back(s.before + k / c.kw * c.dilation[0] * s.pitch + k % c.kw * c.dilation[1] - c.padding[1]);
  }
  for (int64_t r = 0; r < s.lines * s.row_registers; ++r) {
    s.place.push_back((r / panel * panel * depth + r % panel) * lanes);
  }
  for (int64_t k = 0; k < c.kw * lanes; ++k) {
    const int64_t x = k % lanes % c.w + k / lanes * c.dilation[1] - c.padding[1];
    s.masks.push_back(x >= 0 && x < c.w ? -1 : 0);
  }
  return s;
}

template <class T, int B>
struct Kernels {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using Ops = Tiles<C, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr int kPanel = wide(B);

  // Rows [top, bottom) of `channels` planes, `plane` elements apart, and zeros where there are none: those are in `to`.
  template <class S>
  FF_INLINE static void fill(const Stage<C>& stage, const Conv& c, const S* x, int64_t plane, int64_t channels,
                             int64_t top, int64_t bottom, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t low = std::max<int64_t>(0, top), high = std::min(c.h, bottom);
      const bool apart = stage.rows_together == 1;
      const int64_t lines = apart ? high - low : 1, n = apart ? c.w : (high - low) * c.w;
      for (int64_t k = 0; k < channels; ++k, x += plane, to += stage.channel) {
        const S* from = x + low * c.w;
        C* line = to + stage.before + (low - top) * stage.pitch;
        for (int64_t y = 0; y < lines; ++y, from += c.w, line += stage.pitch) copy<B>(from, n, line);
      }
    });
  }

  // What `depthwise` makes of a channel, and what it adds to: planes `channel` elements apart. With s, also
  // grads[tap] (lane by lane) += Σ_c Σ_j s[c][j] · x[c][j + tap].
  struct Result {
    C* t;
    int64_t channel;
    bool add;
    const C* s;
    C* grads;
  };

  FF_INLINE static void depthwise(const Stage<C>& stage, const Conv& c, const C* x, int64_t channels, const C* u,
                                  const Result& to) {
    to.s ? depthwise<true>(stage, c, x, channels, u, to) : depthwise<false>(stage, c, x, channels, u, to);
  }

  template <bool correlated>
  FF_INLINE static void depthwise(const Stage<C>& stage, const Conv& c, const C* x, int64_t channels, const C* u,
                                  const Result& to) {
    const bool three = c.kh == 3 && c.dilation[0] == 1;
    if (stage.rows_together == 1) {
      three ? taps<correlated, 3, 1>(stage, c, x, channels, u, to)
            : taps<correlated, 0, 1>(stage, c, x, channels, u, to);
    } else if (three && stage.rows_together == 2) {
      taps<correlated, 3, 2>(stage, c, x, channels, u, to);
    } else {
      taps<correlated, 0, 0>(stage, c, x, channels, u, to);
    }
  }

  // For kernels of KH rows, if not 0, where each row of x is loaded once for all of them; `Together` rows to a
  // register, 0: any number.
  template <bool correlated, int KH, int Together>
  FF_INLINE static void taps(const Stage<C>& stage, const Conv& c, const C* x, int64_t channels, const C* u,
                             const Result& result) {
    using Mask = typename VecOf<typename Stage<C>::Bits, B>::Type;
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t width = stage.row_registers, together = stage.rows_together, pitch = stage.pitch, kw = c.kw;
      const int64_t *offset = stage.offset.data(), *place = stage.place.data();
      C* const grads = result.grads;
      for (int64_t k = 0; k < channels * width; ++k) {
        const int64_t column = k % width;
        const C* from = x + k / width * stage.channel + column * L;
        C* to = result.t + k / width * result.channel;
        const C* s = correlated ? result.s + k / width * result.channel : nullptr;
        Ops::template pieces<(correlated && B < 64 ? 4 : 8)>(
            0, stage.lines, [&]<int N>(int64_t first) FF_INLINE_LAMBDA {
              V sums[N]{}, held[N];
              if (result.add) {
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sums[n] = load<B>(to + place[(first + n) * width + column]);
              }
              if constexpr (correlated) {
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) held[n] = load<B>(s + place[(first + n) * width + column]);
              }
              const C* at = from + first * together * pitch;
              for (int64_t kx = 0; kx < kw; ++kx) {
                Mask mask;
                std::memcpy(&mask, stage.masks.data() + kx * L, B);
                auto inside = [&](const C* from) FF_INLINE_LAMBDA {
                  V value = load<B>(from);
                  if constexpr (Together != 1) value = bit_cast<V>(bit_cast<Mask>(value) & mask);
                  return in_register(value);
                };
                if constexpr (KH > 0) {
                  V weights[KH], sum[KH];
#pragma GCC unroll 3
                  for (int ky = 0; ky < KH; ++ky) {
                    weights[ky] = load<B>(u + (ky * kw + kx) * L);
                    if constexpr (correlated) sum[ky] = load<B>(grads + (ky * kw + kx) * L);
                  }
#pragma GCC unroll 17
                  for (int row = 0; row < Together * (N - 1) + KH; ++row) {
                    const V value = inside(at + offset[kx] + row * pitch);
#pragma GCC unroll 3
                    for (int ky = 0; ky < KH; ++ky) {
                      const int n = (row - ky) / Together;
                      if (row < ky || n >= N || n * Together + ky != row) continue;
                      sums[n] += weights[ky] * value;
                      if constexpr (correlated) sum[ky] += held[n] * value;
                    }
                  }
                  if constexpr (correlated) {
#pragma GCC unroll 3
                    for (int ky = 0; ky < KH; ++ky) store<B>(grads + (ky * kw + kx) * L, sum[ky]);
                  }
                } else {
                  for (int64_t ky = 0; ky < c.kh; ++ky) {
                    const V weight = load<B>(u + (ky * kw + kx) * L);
                    const C* from = at + offset[ky * kw + kx];
                    V sum[2]{};
                    if constexpr (correlated) sum[0] = load<B>(grads + (ky * kw + kx) * L);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) {
                      const V value = inside(from + n * together * pitch);
                      sums[n] += weight * value;
                      if constexpr (correlated) sum[n % 2] += held[n] * value;
                    }
                    if constexpr (correlated) store<B>(grads + (ky * kw + kx) * L, sum[0] + sum[1]);
                  }
                }
              }
#pragma GCC unroll 8
              for (int n = 0; n < N; ++n) {
                store<B>(to + place[(first + n) * width + column], sums[n]);
              }
            });
      }
    });
  }

  // y[o][j] = bias[o] + Σ_k v[o][k] · t[k][j] for a panel.
  template <class E>
  FF_INLINE static void multiply(const E* v, int64_t outputs, int64_t depth, const E* t, const C* bias, C* y,
                                 int64_t y_channel, Ahead& next, Ahead& out) {
    constexpr int kM = Ops::kM;
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t o = 0; o < outputs; o += kM) {
        const int64_t rows = std::min<int64_t>(kM, outputs - o);
        Ops::template rows_of_product<kPanel, kM, E>(rows, {v + o * depth, 1, rows}, t, kPanel * L, depth,
                                                     bias ? bias + o * L : nullptr, L, 0, y + o * y_channel, y_channel,
                                                     next, out);
      }
    });
  }

  // With few channels of s and t, both from one reading of a plane's dy [outputs][plane]: s[k] = Σ_o v[o][k] · dy[o],
  // and dv[o][k] (lane by lane) += dy[o] · t[k]. s and t are `channel` elements apart.
  FF_INLINE static void few(int64_t depth, const T* dy, int64_t plane, int64_t outputs, const C* v, const C* t, C* s,
                            int64_t channel, C* dv) {
    if (depth == 1) few<1>(dy, plane, outputs, v, t, s, channel, dv);
    if (depth == 2) few<2>(dy, plane, outputs, v, t, s, channel, dv);
    if (depth == 3) few<3>(dy, plane, outputs, v, t, s, channel, dv);
    if (depth == 4) few<4>(dy, plane, outputs, v, t, s, channel, dv);
  }

  template <int D>
  FF_INLINE static void few(const T* dy, int64_t plane, int64_t outputs, const C* v, const C* t, C* s, int64_t channel,
                            C* dv) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      Ops::template pieces<(B == 64 ? 2 : 1)>(0, plane / L, [&]<int N>(int64_t first) FF_INLINE_LAMBDA {
        V sums[D][N]{}, held[D][N];
#pragma GCC unroll 4
        for (int k = 0; k < D; ++k) {
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) held[k][n] = load<B>(t + k * channel + (first + n) * L);
        }
        for (int64_t o = 0; o < outputs; ++o) {
          const T* from = dy + o * plane + first * L;
          C* to = dv + o * D * L;
          V value[N];
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) {
            value[n] = load<B>(from + n * L);
            __builtin_prefetch(from + (2 * N + n) * L, 0, 2);
          }
#pragma GCC unroll 4
          for (int k = 0; k < D; ++k) {
            const V weight = v[o * D + k] - V{};
            V grad = load<B>(to + k * L);
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) sums[k][n] += weight * value[n], grad += held[k][n] * value[n];
            store<B>(to + k * L, grad);
          }
        }
#pragma GCC unroll 4
        for (int k = 0; k < D; ++k) {
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) store<B>(s + k * channel + (first + n) * L, sums[k][n]);
        }
      });
    });
  }
};

template <class T>
struct Forward {
  using C = Compute<T>;
  Conv c;
  Stage<C> stage;
  int64_t rank, rows, bands;  // rows of a band, bands of an image
  bool pairs;                 // products in pairs
  const T* x;
  T* y;
  const C *u, *v, *bias;  // u and bias: a register for each element
};

template <class T, int B>
struct RunForward {
  using C = Compute<T>;
  using K = Kernels<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr int64_t kPanel = K::kPanel;
  static constexpr bool kInPlace = std::is_same_v<T, C>;

  // Items are bands of images.
  FF_INLINE static void run(const Forward<T>& p, int64_t begin, int64_t end) {
    const Conv& c = p.c;
    const Stage<C>& stage = p.stage;
    const int64_t plane = c.h * c.w, depth = p.rank * c.i, in_group = c.i * plane * sizeof(T);
    const Zeros<C> staged(kTogether * stage.channel);
    const Scratch<C> t(p.rows * c.w * depth), rounded(kInPlace ? 0 : c.o * kPanel * L);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t image = item / p.bands, row = item % p.bands * p.rows, rows = std::min(p.rows, c.h - row);
      const int64_t top = row - c.padding[0], bottom = row + rows + stage.below - c.padding[0];
      const int64_t panels = rows * c.w / (kPanel * L);
      for (int64_t k = 0; k < kTogether && p.bands > 1; ++k) {
        std::memset(static_cast<void*>(staged.get() + k * stage.channel), 0, stage.channel * sizeof(C));
      }
      for (int64_t g = 0; g < c.groups; ++g) {
        const int64_t first = (image * c.groups + g) * c.i;
        for (int64_t i = 0; i < c.i; i += kTogether) {
          const int64_t count = std::min(kTogether, c.i - i);
          K::fill(stage, c, p.x + (first + i) * plane, plane, count, top, bottom, staged.get());
          for (int64_t r = 0; r < p.rank; ++r) {
            K::depthwise(stage, c, staged.get(), count, p.u + r * c.kh * c.kw * L,
                         {t.get() + (r * c.i + i) * kPanel * L, kPanel * L, false, nullptr, nullptr});
          }
        }
        const C* bias = p.bias ? p.bias + g * c.o * L : nullptr;
        T* y = p.y + (image * c.groups + g) * c.o * plane + row * c.w;
        Ahead next{}, out{};
        if (p.bands == 1) {
          const int64_t steps = panels * ceil_div(c.o, K::Ops::kM) * (1 + depth / K::Ops::kStep);
          const T* x = p.x + (first + c.i) * plane;
          if (image + 1 < c.n || g + 1 < c.groups) next = {reinterpret_cast<const char*>(x), in_group};
          out = {reinterpret_cast<const char*>(y), int64_t(c.o * plane * sizeof(T))};
          next.spread(steps), out.spread(steps);
        }
        for (int64_t n = 0; n < panels; ++n, y += kPanel * L) {
          C* panel = t.get() + n * depth * kPanel * L;
          C* to;
          if constexpr (kInPlace) {
            to = y;
          } else {
            to = rounded.get();
          }
          if constexpr (std::is_same_v<T, BFloat16>) {
            if (p.pairs) make_pairs<B>(panel, kPanel * L, depth, kPanel * L, panel, kPanel * L);
          }
          with_operand<T, B>(p.pairs, [&](auto operand, int64_t factors) FF_INLINE_LAMBDA {
            using E = decltype(operand);
            K::multiply(reinterpret_cast<const E*>(p.v) + g * c.o * depth / factors, c.o, depth / factors,
                        reinterpret_cast<const E*>(panel), bias, to, kInPlace ? plane : kPanel * L, next, out);
          });
          for (int64_t k = 0; k < c.o * kPanel && !kInPlace; ++k) {
            store<B>(y + k / kPanel * plane + k % kPanel * L, load<B>(to + k * L));
          }
        }
      }
    }
  }
};

template <class T>
void forward(const FactoredConv& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), taps = c.kh * c.kw, outputs = c.groups * c.o;
  const Scratch<C> u(op.rank * taps * lanes), v(outputs * op.rank * c.i), bias(op.bias ? outputs * lanes : 0);
  Forward<T> p{};
  p.c = c, p.rank = op.rank, p.x = static_cast<const T*>(op.x), p.y = static_cast<T*>(op.y);
  p.u = u.get(), p.v = v.get(), p.bias = op.bias ? bias.get() : nullptr;
  const int64_t whole = rows_of_panels(c, lanes);
  const int64_t most = std::min(kKept / (op.rank * c.i * c.w), c.h / ceil_div(kUnits, c.n));
  p.rows = std::max<int64_t>(1, most / whole) * whole, p.pairs = in_pairs<T>(op.rank * c.i);
  p.bands = ceil_div(c.h, p.rows), p.stage = make_stage<C>(c, p.rows, lanes, wide(bytes), op.rank * c.i);
  for (int64_t k = 0; k < op.rank * taps * lanes; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k / lanes]);
  for (int64_t k = 0; k < outputs * lanes && op.bias; ++k) {
    bias.get()[k] = to_compute(static_cast<const T*>(op.bias)[k / lanes]);
  }
  pack_v(static_cast<const T*>(op.v), c.groups, c.i, c.o, op.rank, false, kProductRows, p.pairs, v.get(), parallel_for,
         Shares{1, c.o});
  parallel(parallel_for, c.n * p.bands, 1, [&](int64_t begin, int64_t end) { dispatch<RunForward, T>(p, begin, end); });
}

template <class T>
struct Backward {
  using C = Compute<T>;
  Conv c;
  Stage<C> stage;
  int64_t rank, images, units, parts;  // images of a unit
  int64_t channel;                     // elements from one channel of dy, s and t to the next: of all pixels of a unit
  const T *x, *dy;
  T* dx;
  const C *u, *back_u, *v;  // u: a register for each element; back_u: the same for the transposed convolution
  bool needs_u, needs_v, few;
  C *du, *dv;  // partial sums [part][…]
  int64_t dv_row;
  int64_t dv_size() const { return c.o * dv_row; }
};

template <class T, int B>
struct RunBackward {
  using C = Compute<T>;
  using K = Kernels<T, B>;
  using Ops = Tiles<C, B>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr bool kInPlace = std::is_same_v<T, C>;

  // Items are (group, part).
  FF_INLINE static void run(const Backward<T>& p, int64_t begin, int64_t end) {
    const Conv& c = p.c;
    const Stage<C>& stage = p.stage;
    const int64_t plane = c.h * c.w, depth = p.rank * c.i, taps = c.kh * c.kw, channel = p.channel;
    const int64_t top = -c.padding[0], bottom = c.h + stage.below - c.padding[0];
    const bool few = p.few, needs_s = p.dx || p.needs_u || few;
    const Zeros<C> staged(kTogether * stage.channel), dy(few ? 0 : c.o * channel), lanes(few ? c.o * depth * L : 0);
    const Scratch<C> s(needs_s ? depth * channel : 0), t(p.needs_u || p.needs_v || few ? depth * channel : 0);
    const Scratch<C> turned(p.needs_v && !few ? p.dv_row * p.images * plane : 0);
    const Zeros<C> sums(p.rank * taps * L), total(p.rank * taps * L);
    const Scratch<C> rounded(kInPlace ? 0 : kTogether * plane);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / p.parts, part = item % p.parts;
      C* dv = p.needs_v ? p.dv + (part * c.groups + group) * p.dv_size() : nullptr;
      if (dv) std::memset(static_cast<void*>(dv), 0, p.dv_size() * sizeof(C));
      std::memset(static_cast<void*>(total.get()), 0, p.rank * taps * L * sizeof(C));
      for (int64_t unit = part * p.units / p.parts; unit < (part + 1) * p.units / p.parts; ++unit) {
        const int64_t image = unit * p.images, images = std::min(p.images, c.n - image), pixels = images * plane;
        auto in_group = [&](auto* data, int64_t image, int64_t channels)
                            FF_INLINE_LAMBDA { return data + (image * c.groups + group) * channels * plane; };
        // All of a unit where groups do not lie between.
        auto ahead = [&](const T* data, int64_t image, int64_t channels) FF_INLINE_LAMBDA {
          const int64_t count = std::min(p.images, c.n - image) * channels * plane;
          if (c.groups > 1 || !data || image >= c.n) return Ahead{};
          return Ahead{reinterpret_cast<const char*>(data + image * channels * plane), int64_t(count * sizeof(T))};
        };
        // t, and du if s is there already.
        auto read_x = [&](bool correlated) FF_INLINE_LAMBDA {
          for (int64_t k = 0; k < images; ++k) {
            for (int64_t i = 0; i < c.i; i += kTogether) {
              const int64_t count = std::min(kTogether, c.i - i);
              K::fill(stage, c, in_group(p.x, image + k, c.i) + i * plane, plane, count, top, bottom, staged.get());
              for (int64_t r = 0; r < p.rank; ++r) {
                const int64_t at = (r * c.i + i) * channel + k * plane;
                K::depthwise(
                    stage, c, staged.get(), count, p.u + r * taps * L,
                    {t.get() + at, channel, false, correlated ? s.get() + at : nullptr, sums.get() + r * taps * L});
              }
            }
          }
        };
        if (few) {
          read_x(false);
          for (int64_t k = 0; k < images; ++k) {
            K::few(c.i, in_group(p.dy, image + k, c.o), plane, c.o, p.v + group * c.i * c.o, t.get() + k * plane,
                   s.get() + k * plane, channel, lanes.get());
          }
          if (p.needs_u) read_x(true);
        } else {
          for (int64_t k = 0; k < images; ++k) {
            const T* from = in_group(p.dy, image + k, c.o);
            for (int64_t o = 0; o < c.o; ++o) copy<B>(from + o * plane, plane, dy.get() + o * channel + k * plane);
          }
          for (int64_t r = 0; r < p.rank && needs_s; ++r) {
            Ops::template multiply<C>(p.v + (r * c.groups + group) * c.i * c.o, c.i, c.o, dy.get(), Ops::rows(channel),
                                      ceil_div(pixels, L), false, nullptr, s.get() + r * c.i * channel, channel,
                                      r ? Ahead{} : ahead(p.x, image, c.i), {});
          }
          if (p.needs_u || dv) read_x(p.needs_u);
        }
        // For each unit apart: sums of sums round less.
        for (int64_t k = 0; k < p.rank * taps * L && p.needs_u; ++k) {
          total.get()[k] += sums.get()[k], sums.get()[k] = 0;
        }
        if (dv && !few) {
          Ops::transpose_panels(t.get(), channel, depth, pixels / L, turned.get());
          Ops::multiply_transposed(dy.get(), channel, c.o, turned.get(), depth, pixels, dv, ceil_div(depth, L) * L,
                                   ahead(p.dy, image + p.images, c.o), ahead(p.dx, image, c.i));
        }
        for (int64_t k = 0; k < images && p.dx; ++k) {
          for (int64_t i = 0; i < c.i; i += kTogether) {
            const int64_t count = std::min(kTogether, c.i - i);
            T* dx = in_group(p.dx, image + k, c.i) + i * plane;
            C* to;
            if constexpr (kInPlace) {
              to = dx;
            } else {
              to = rounded.get();
            }
            for (int64_t r = 0; r < p.rank; ++r) {
              K::fill(stage, c, s.get() + (r * c.i + i) * channel + k * plane, channel, count, top, bottom,
                      staged.get());
              K::depthwise(stage, c, staged.get(), count, p.back_u + r * taps * L,
                           {to, plane, r > 0, nullptr, nullptr});
            }
            if constexpr (!kInPlace) copy<B>(to, count * plane, dx);
          }
        }
      }
      for (int64_t k = 0; k < c.o * c.i && few; ++k) {
        C* from = lanes.get() + k * L;
        if (dv) dv[k / c.i * p.dv_row + k % c.i] = sum_lanes(load<B>(from));
        store<B>(from, V{});
      }
      for (int64_t k = 0; k < p.rank * taps && p.needs_u; ++k) {
        C sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += total.get()[k * L + lane];
        p.du[(part * c.groups + group) * p.rank * taps + k] = sum;
      }
    }
  }
};

template <class T>
void backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), taps = c.kh * c.kw, plane = c.h * c.w;
  const int64_t depth = op.rank * c.i, outputs = c.groups * c.o;
  Backward<T> p{};
  p.c = c, p.rank = op.rank, p.needs_u = op.du, p.needs_v = op.dv;
  p.few = op.rank == 1 && c.i <= kFew;
  p.x = static_cast<const T*>(op.x), p.dy = static_cast<const T*>(op.dy), p.dx = static_cast<T*>(op.dx);
  p.stage = make_stage<C>(c, c.h, lanes, plane / lanes, 1);
  p.images = std::clamp<int64_t>(kLeast / plane, 1, ceil_div(c.n, kUnits)), p.units = ceil_div(c.n, p.images);
  p.channel = (ceil_div(p.images * plane, lanes) | 1) * lanes;
  p.dv_row = ceil_div(depth, lanes) * lanes;
  // The number of partial sums depends on the shape only, so that results repeat.
  const int64_t most = std::clamp<int64_t>((1 << 19) / (p.dv_size() * c.groups + 1), 8, 64);
  p.parts = std::min(p.needs_u || p.needs_v ? most : INT64_MAX, p.units);

  const Scratch<C> u(op.rank * taps * lanes), back_u(op.rank * taps * lanes), v(outputs * depth);
  const Scratch<C> du_parts(p.parts * c.groups * op.rank * taps);
  const Scratch<C> dv_parts(p.needs_v ? p.parts * c.groups * p.dv_size() : 0);
  for (int64_t k = 0; k < op.rank * taps * lanes; ++k) {
    const int64_t r = k / lanes / taps, tap = k / lanes % taps;
    u.get()[k] = to_compute(static_cast<const T*>(op.u)[r * taps + tap]);
    back_u.get()[k] = to_compute(static_cast<const T*>(op.u)[r * taps + taps - 1 - tap]);
  }
  for (int64_t r = 0; r < op.rank && (p.dx || p.needs_u || p.few); ++r) {
    pack_v(static_cast<const T*>(op.v) + r * outputs * c.i, c.groups, c.o, c.i, 1, true, p.few ? c.i : kProductRows,
           false, v.get() + r * outputs * c.i, parallel_for, Shares{1, c.i});
  }
  p.u = u.get(), p.back_u = back_u.get(), p.v = v.get(), p.du = du_parts.get(), p.dv = dv_parts.get();
  parallel(parallel_for, c.groups * p.parts, 1,
           [&](int64_t begin, int64_t end) { dispatch<RunBackward, T>(p, begin, end); });
  add_parts(p.parts, c.groups, op.rank, c.o, c.i, taps, p.dv_row, p.du, static_cast<T*>(op.du), p.dv,
            static_cast<T*>(op.dv), parallel_for);
}

}  // namespace

bool planes_in_lanes(const Conv& c, Type type, int64_t rank, const Sparse& mu) {
  return !c.x_channels_last && !c.y_channels_last && rank && c.i && !mu.count && c.stride[0] == 1 && c.stride[1] == 1 &&
         c.oh == c.h && c.ow == c.w && rows_of_panels(c, register_bytes() / (type == Type::f64 ? 8 : 4));
}

void factored_conv_planes(const FactoredConv& op, ParallelFor parallel_for) {
  with_conv_type(op.type, [&](auto type) { forward<decltype(type)>(op, parallel_for); });
}

void factored_conv_backward_planes(const FactoredConvBackward& op, ParallelFor parallel_for) {
  with_conv_type(op.type, [&](auto type) { backward<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
