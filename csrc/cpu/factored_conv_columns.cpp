// The factored convolution of few pixels with a dense μ: the pixels that an output reads are laid side by side, and μ
// is a linear layer of such rows, whose tiles are made and multiplied in cache. Neither W nor dW is ever in memory.
//
// Rows are [pixel][channel][tap], the order of μ, or [pixel][tap][channel] where μ is so. What the factors add is made
// apart, as in the other engines: of t [pixel][rank, channel], the depthwise convolution by u, and s = vᵀ dy.
//
// So are patches of few channels, however many pixels and nonzeros there are; their factors are the linear layer's own.
#include "factored_conv.h"
#include "gemm.h"
#include "transpose.h"

namespace fastfact {
namespace {

constexpr int64_t kLarge = 1 << 19;   // numbers of a W that leaves the second cache
constexpr int64_t kThin = 4;          // channels that are few
constexpr int64_t kPixels = 1 << 10;  // up to which density alone may decide, without registers of 64 bytes

// Images with their channels last, and what an output pixel reads of them.
struct Images {
  Conv c;
  int64_t taps, pixels, row;  // row: numbers of one pixel's row

  explicit Images(const Conv& c) : c(c), taps(c.kh * c.kw), pixels(c.n * c.oh * c.ow), row(c.i * taps) {}

  // The offset of each tap's pixel, −1 outside the image.
  void offsets(int64_t pixel, int64_t* out) const {
    const int64_t image = pixel / (c.oh * c.ow), y = pixel / c.ow % c.oh, x = pixel % c.ow;
    for (int64_t a = 0; a < c.kh; ++a) {
      const int64_t from = y * c.stride[0] - c.padding[0] + a * c.dilation[0];
      for (int64_t b = 0; b < c.kw; ++b) {
        const int64_t at = x * c.stride[1] - c.padding[1] + b * c.dilation[1];
        const bool inside = from >= 0 && from < c.h && at >= 0 && at < c.w;
        *out++ = inside ? ((image * c.h + from) * c.w + at) * c.i : -1;
      }
    }
  }
};

template <class T>
struct Work {
  using C = Compute<T>;
  Images of;
  int64_t rank;
  const int64_t* offsets;  // [pixel][tap]
  const T* x;
  const C* u;
  T* rows;  // null where not wanted, as t
  C* t;
  // Backward.
  const T* drows;
  const C* s;
  C *dx, *du;       // dx: zeros; du [item][rank, tap]
  bool taps_first;  // in rows
};

template <class T, int B>
struct Turn {
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;

  // Channels of an item side by side, the last ones as zeros.
  template <class S>
  FF_INLINE static V channels(const S* from, int64_t n) {
    if (__builtin_expect(n >= L, 1)) return load<B>(from);
    S some[L] = {};
    std::memcpy(static_cast<void*>(some), from, n * sizeof(S));
    return load<B>(some);
  }

  template <class S>
  FF_INLINE static void put(S* to, V x, int64_t n) {
    if (__builtin_expect(n >= L, 1)) return store<B>(to, x);
    S some[L];
    store<B>(some, x);
    std::memcpy(static_cast<void*>(to), some, n * sizeof(S));
  }

  FF_INLINE static V read(const Work<T>& w, int64_t at, int64_t first, int64_t n) {
    return at < 0 ? V{} : channels(w.x + at + first, n);
  }

  // Items are channels, a register at a time.
  FF_INLINE static void run(const Work<T>& w, int64_t begin, int64_t end) {
    const Images& of = w.of;
    const int64_t taps = of.taps, inputs = of.c.i, depth = w.rank * inputs;
    const Scratch<T> block(L * taps + L);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item * L, n = std::min<int64_t>(L, inputs - first);
      for (int64_t p = 0; p < of.pixels; ++p) {
        const int64_t* const at = w.offsets + p * taps;
        for (int64_t r = 0; r < w.rank && w.t; ++r) {
          V sum{};
          for (int64_t tap = 0; tap < taps; ++tap) sum += read(w, at[tap], first, n) * w.u[r * taps + tap];
          put(w.t + p * depth + r * inputs + first, sum, n);
        }
        if (!w.rows) continue;
        if (w.taps_first) {
          for (int64_t tap = 0; tap < taps; ++tap) {
            put(w.rows + p * of.row + tap * inputs + first, read(w, at[tap], first, n), n);
          }
          continue;
        }
        for (int64_t tap = (taps - 1) / L * L; tap >= 0; tap -= L) {
          V lines[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) lines[l] = tap + l < taps ? read(w, at[tap + l], first, n) : V{};
          PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(block.get() + l * taps + tap, lines[l]);
        }
        std::memcpy(static_cast<void*>(w.rows + p * of.row + first * taps), block.get(), n * taps * sizeof(T));
      }
    }
  }
};

template <class T, int B>
struct TurnBack {
  using V = Vec<T, B>;
  using Of = Turn<T, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Work<T>& w, int64_t begin, int64_t end) {
    const Images& of = w.of;
    const int64_t taps = of.taps, inputs = of.c.i, depth = w.rank * inputs;
    const Scratch<T> block((L + 1) * taps + L);
    const Scratch<V> sums(w.rank * taps);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item * L, n = std::min<int64_t>(L, inputs - first);
      std::fill_n(sums.get(), w.rank * taps, V{});
      std::memset(static_cast<void*>(block.get()), 0, ((L + 1) * taps + L) * sizeof(T));
      for (int64_t p = 0; p < of.pixels; ++p) {
        const int64_t* const at = w.offsets + p * taps;
        for (int64_t r = 0; r < w.rank && w.du; ++r) {
          const V s = Of::channels(w.s + p * depth + r * inputs + first, n);
          for (int64_t tap = 0; tap < taps; ++tap) sums.get()[r * taps + tap] += Of::read(w, at[tap], first, n) * s;
        }
        if (!w.dx) continue;
        const T* const drows = w.drows + p * of.row;
        if (!w.taps_first) std::memcpy(static_cast<void*>(block.get()), drows + first * taps, n * taps * sizeof(T));
        for (int64_t tap = 0; tap < taps; tap += L) {
          V lines[L];
          if (w.taps_first) {
            for (int l = 0; l < L && tap + l < taps; ++l) {
              lines[l] = Of::channels(drows + (tap + l) * inputs + first, n);
            }
          } else {
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) lines[l] = load<B>(block.get() + l * taps + tap);
            PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
          }
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            if (tap + l >= taps || at[tap + l] < 0) continue;
            Compute<T>* const to = w.dx + at[tap + l] + first;
            V sum = Of::channels(to, n) + lines[l];
            for (int64_t r = 0; r < w.rank; ++r) {
              sum += Of::channels(w.s + p * depth + r * inputs + first, n) * w.u[r * taps + tap + l];
            }
            Of::put(to, sum, n);
          }
        }
      }
      for (int64_t k = 0; k < w.rank * taps && w.du; ++k) {
        Compute<T> sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += sums.get()[k][lane];
        w.du[item * w.rank * taps + k] = sum;
      }
    }
  }
};

// Where the numbers of a patch are in images [n, i, h, w], or [n, h, w, i] with `last`: `of_row` for those of a row,
// from its first pixel on.
struct Places {
  Conv c;
  bool last;
  const int64_t* of_row;
  int64_t row;

  // f(where a patch begins) for each pixel of an item, a line of them.
  template <class F>
  FF_INLINE void each_patch(int64_t begin, int64_t end, const F& f) const {
    for (int64_t line = begin; line < end; ++line) {
      const int64_t image = line / c.oh * c.i * c.h * c.w, y = line % c.oh * c.stride[0];
      for (int64_t x = 0; x < c.ow; ++x) f(image + (y * c.w + x * c.stride[1]) * (last ? c.i : 1));
    }
  }
};

template <class T, int B>
struct MakeRows {
  FF_INLINE static void run(const Places& places, const T* x, T* rows, int64_t begin, int64_t end) {
    T* to = rows + begin * places.c.ow * places.row;
    places.each_patch(begin, end, [&](int64_t at) FF_INLINE_LAMBDA {
      for (int64_t k = 0; k < places.row; ++k) *to++ = x[at + places.of_row[k]];
    });
  }
};

// dx from the gradients of the rows; no two patches have a pixel in common.
template <class T, int B>
struct TakeRows {
  FF_INLINE static void run(const Places& places, const T* rows, Compute<T>* dx, int64_t begin, int64_t end) {
    const T* from = rows + begin * places.c.ow * places.row;
    places.each_patch(begin, end, [&](int64_t at) FF_INLINE_LAMBDA {
      for (int64_t k = 0; k < places.row; ++k) dx[at + places.of_row[k]] = to_compute(*from++);
    });
  }
};

template <class From, int B>
struct TurnMatrices {
  static constexpr int64_t kSide = 64;

  // Items are blocks of a matrix.
  template <class To>
  FF_INLINE static void run(const From* from, int64_t rows, int64_t columns, To* to, int64_t begin, int64_t end) {
    const int64_t across = ceil_div(columns, kSide), blocks = ceil_div(rows, kSide) * across;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / blocks * rows * columns, m = item % blocks / across * kSide;
      const int64_t n = item % blocks % across * kSide;
      transpose<B>(from + first + m * columns + n, columns, std::min(kSide, rows - m), std::min(kSide, columns - n),
                   from + first + rows * columns, to + first + n * rows + m, rows);
    }
  }
};

// [n][rows][columns] → [n][columns][rows]
template <class From, class To>
void turn_matrices(const From* from, int64_t n, int64_t rows, int64_t columns, To* to, ParallelFor parallel_for) {
  constexpr int64_t side = TurnMatrices<From, 16>::kSide;
  parallel(parallel_for, n * ceil_div(rows, side) * ceil_div(columns, side), 8,
           [&](int64_t begin, int64_t end) { dispatch<TurnMatrices, From>(from, rows, columns, to, begin, end); });
}

// Images as rows of their channels, in memory of their own where they lie otherwise.
template <class T>
struct Rows {
  Scratch<T> own;
  const T* data;

  Rows(const void* from, int64_t n, int64_t channels, int64_t plane, bool channels_last, ParallelFor parallel_for)
      : own(channels_last ? 0 : n * channels * plane), data(static_cast<const T*>(from)) {
    if (channels_last) return;
    turn_matrices(data, n, channels, plane, own.get(), parallel_for);
    data = own.get();
  }
};

// out [rows, run of each] = left · right, added to what is there if asked.
template <class Out, class Left, class Right>
void product(const Operand& left, const Operand& right, Out* out, int64_t row, int64_t run, int64_t run_stride,
             bool adds, ParallelFor parallel_for) {
  const Target target{out, 0, steps(left.row.size(), row), run, run_stride, 1};
  const Factors<Left, Right> factors[1] = {{left, right}};
  multiply<Out>(parallel_for, 1, factors, WriteTile{target, 1.0, {adds ? out : nullptr, 0}});
}

std::vector<int64_t> all_offsets(const Images& of) {
  std::vector<int64_t> out(of.pixels * of.taps);
  for (int64_t p = 0; p < of.pixels; ++p) of.offsets(p, out.data() + p * of.taps);
  return out;
}

template <class T>
void turn(const Work<T>& w, ParallelFor parallel_for) {
  const int64_t lanes = register_bytes() / sizeof(Compute<T>);
  parallel(parallel_for, ceil_div(w.of.c.i, lanes), ceil_div(16384, lanes * w.of.pixels * w.of.taps),
           [&](int64_t begin, int64_t end) { dispatch<Turn, T>(w, begin, end); });
}

// A small tensor in the type that is computed in.
template <class T>
struct Computed : Scratch<Compute<T>> {
  Computed(const void* from, int64_t count) : Scratch<Compute<T>>(count) {
    for (int64_t k = 0; k < count; ++k) this->get()[k] = to_compute(static_cast<const T*>(from)[k]);
  }
};

// Patches of few channels. Each channel of a factor is a factor of the linear layer: u where the row has that channel,
// zeros elsewhere.
template <class T>
class Patches {
 public:
  Patches(const Conv& c, int64_t rank, const Sparse& mu, const void* u, const void* v)
      : of_(c),
        rank_(rank),
        taps_first_(mu.channels_last),
        in_x_(of_.row),
        in_dx_(of_.row),
        u_(rank * c.i * of_.row),
        v_(rank * c.i * c.o) {
    each_number([&](int64_t channel, int64_t tap, int64_t k) {
      const int64_t pixel = tap / c.kw * c.w + tap % c.kw;
      in_dx_.get()[k] = pixel * c.i + channel;
      in_x_.get()[k] = c.x_channels_last ? in_dx_.get()[k] : channel * c.h * c.w + pixel;
    });
    std::memset(static_cast<void*>(u_.get()), 0, rank * c.i * of_.row * sizeof(T));
    each_u([&](int64_t whole, int64_t own) { u_.get()[own] = static_cast<const T*>(u)[whole]; });
    each_v([&](int64_t whole, int64_t own) { v_.get()[own] = static_cast<const T*>(v)[whole]; });
  }

  bool forward(const FactoredConv& op, T* y, ParallelFor parallel_for) const {
    const Scratch<T> rows(of_.pixels * of_.row);
    make_rows(op.x, rows.get(), parallel_for);
    return factored_linear({op.type,
                            of_.pixels,
                            of_.row,
                            of_.c.o,
                            ranks(),
                            {rows.get(), of_.row, 0},
                            u_.get(),
                            v_.get(),
                            op.bias,
                            op.mu,
                            {y, of_.c.o, 0},
                            op.threads},
                           parallel_for);
  }

  // dx [n, h, w, i]: zeros, or null
  bool backward(const FactoredConvBackward& op, const T* dy, Compute<T>* dx, ParallelFor parallel_for) const {
    const bool needs_rows = op.dvalues || op.du || op.dv;
    const Scratch<T> rows(needs_rows ? of_.pixels * of_.row : 0), drows(dx ? of_.pixels * of_.row : 0);
    const Scratch<T> du(op.du ? ranks() * of_.row : 0), dv(op.dv ? ranks() * of_.c.o : 0);
    if (needs_rows) make_rows(op.x, rows.get(), parallel_for);
    if (!factored_linear_backward({op.type,
                                   of_.pixels,
                                   of_.row,
                                   of_.c.o,
                                   ranks(),
                                   {rows.get(), of_.row, 0},
                                   {dy, of_.c.o, 0},
                                   u_.get(),
                                   v_.get(),
                                   op.mu,
                                   {dx ? drows.get() : nullptr, of_.row, 0},
                                   op.du ? du.get() : nullptr,
                                   op.dv ? dv.get() : nullptr,
                                   op.dvalues,
                                   op.threads},
                                  parallel_for)) {
      return false;
    }
    if (op.du) {
      const Computed<T> all(du.get(), ranks() * of_.row);
      const Scratch<Compute<T>> sums(rank_ * of_.taps);
      std::fill(sums.get(), sums.get() + rank_ * of_.taps, Compute<T>(0));
      each_u([&](int64_t whole, int64_t own) { sums.get()[whole] += all.get()[own]; });
      for (int64_t k = 0; k < rank_ * of_.taps; ++k) static_cast<T*>(op.du)[k] = from_compute<T>(sums.get()[k]);
    }
    if (op.dv) each_v([&](int64_t whole, int64_t own) { static_cast<T*>(op.dv)[whole] = dv.get()[own]; });
    if (!dx) return true;
    const Places places{of_.c, true, in_dx_.get(), of_.row};
    in_lines(parallel_for,
             [&](int64_t begin, int64_t end) { dispatch<TakeRows, T>(places, drows.get(), dx, begin, end); });
    return true;
  }

 private:
  const Images of_;
  const int64_t rank_;
  const bool taps_first_;
  const Scratch<int64_t> in_x_, in_dx_;
  const Scratch<T> u_, v_;

  int64_t ranks() const { return rank_ * of_.c.i; }

  // f(channel, tap, which number of a row that is)
  template <class F>
  void each_number(const F& f) const {
    for (int64_t channel = 0; channel < of_.c.i; ++channel) {
      for (int64_t tap = 0; tap < of_.taps; ++tap) {
        f(channel, tap, taps_first_ ? tap * of_.c.i + channel : channel * of_.taps + tap);
      }
    }
  }
  // f(place in u [rank, tap], place in that of the linear layer) for what is no zero there, and for v.
  template <class F>
  void each_u(const F& f) const {
    for (int64_t r = 0; r < rank_; ++r) {
      each_number([&](int64_t channel, int64_t tap, int64_t k) {
        f(r * of_.taps + tap, (r * of_.c.i + channel) * of_.row + k);
      });
    }
  }
  template <class F>
  void each_v(const F& f) const {
    const int64_t o = of_.c.o, i = of_.c.i;
    for (int64_t at = 0; at < rank_ * o * i; ++at) f(at, (at / (o * i) * i + at % i) * o + at / i % o);
  }

  template <class F>
  void in_lines(ParallelFor parallel_for, const F& f) const {
    parallel(parallel_for, of_.c.n * of_.c.oh, ceil_div(16384, of_.c.ow * of_.row), f);
  }
  void make_rows(const void* x, T* rows, ParallelFor parallel_for) const {
    const Places places{of_.c, of_.c.x_channels_last, in_x_.get(), of_.row};
    in_lines(parallel_for, [&](int64_t begin, int64_t end) {
      dispatch<MakeRows, T>(places, static_cast<const T*>(x), rows, begin, end);
    });
  }
};

// Whether an output reads pixels that no other one reads, of so few channels that most of a register would be empty.
bool are_thin_patches(const Conv& c) {
  const bool apart = c.kh <= c.stride[0] && c.kw <= c.stride[1] && c.dilation[0] == 1 && c.dilation[1] == 1;
  return apart && !c.padding[0] && !c.padding[1] && c.i <= kThin;
}

template <class T>
bool forward(const FactoredConv& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Images of(op.conv);
  const Conv& c = op.conv;
  const Scratch<T> own(c.y_channels_last ? 0 : of.pixels * c.o);
  T* const y = c.y_channels_last ? static_cast<T*>(op.y) : own.get();
  const auto turn_back = [&] {
    if (!c.y_channels_last) turn_matrices(y, c.n, c.oh * c.ow, c.o, static_cast<T*>(op.y), parallel_for);
    return true;
  };
  if (are_thin_patches(c)) {
    return Patches<T>(c, op.rank, op.mu, op.u, op.v).forward(op, y, parallel_for) && turn_back();
  }
  const auto offsets = all_offsets(of);
  const Rows<T> x(op.x, c.n, c.i, c.h * c.w, c.x_channels_last, parallel_for);
  const Computed<T> u(op.u, op.rank * of.taps);
  const Scratch<C> t(op.rank * of.pixels * c.i);
  const Scratch<T> rows(of.pixels * of.row);
  Work<T> work{of, op.rank, offsets.data(), x.data, u.get(), rows.get(), t.get()};
  work.taps_first = op.mu.channels_last;
  turn(work, parallel_for);
  if (!factored_linear({op.type,
                        of.pixels,
                        of.row,
                        c.o,
                        0,
                        {rows.get(), of.row, 0},
                        nullptr,
                        nullptr,
                        op.bias,
                        op.mu,
                        {y, c.o, 0},
                        op.threads},
                       parallel_for)) {
    return false;
  }
  if (op.rank) {
    const Operand left{{t.get(), 0}, steps(of.pixels, op.rank * c.i), steps(op.rank * c.i, 1)};
    const Operand right{{op.v, 0}, steps(c.o, c.i), steps(op.rank, c.o * c.i, c.i, 1)};
    product<T, C, T>(left, right, y, c.o, c.o, 0, true, parallel_for);
  }
  return turn_back();
}

template <class T>
bool backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Images of(op.conv);
  const Conv& c = op.conv;
  const Rows<T> dy(op.dy, c.n, c.o, c.oh * c.ow, c.y_channels_last, parallel_for);
  const bool own = op.dx && (!op.dx_channels_last || !std::is_same_v<T, C>);
  const Scratch<C> own_dx(own ? c.n * c.h * c.w * c.i : 0);
  C* const dx = own ? own_dx.get() : static_cast<C*>(op.dx);
  if (op.dx) std::memset(static_cast<void*>(dx), 0, c.n * c.h * c.w * c.i * sizeof(C));
  const auto put_dx = [&] {
    T* const to = static_cast<T*>(op.dx);
    if (own && !op.dx_channels_last) {
      turn_matrices(dx, c.n, c.h * c.w, c.i, to, parallel_for);
    } else if (own) {
      parallel(parallel_for, c.n * c.h * c.w * c.i, 1 << 15, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) to[k] = from_compute<T>(dx[k]);
      });
    }
    return true;
  };
  if (are_thin_patches(c)) {
    return Patches<T>(c, op.rank, op.mu, op.u, op.v).backward(op, dy.data, op.dx ? dx : nullptr, parallel_for) &&
           put_dx();
  }
  const int64_t depth = op.rank * c.i, items = ceil_div(c.i, register_bytes() / int64_t(sizeof(C)));
  const auto offsets = all_offsets(of);
  const Rows<T> x(op.x, c.n, c.i, c.h * c.w, c.x_channels_last, parallel_for);
  const bool needs_t = op.dv && op.rank, needs_s = (op.dx || op.du) && op.rank;
  const Computed<T> u(op.u, op.rank * of.taps);
  const Scratch<T> rows(op.dvalues ? of.pixels * of.row : 0), drows(op.dx ? of.pixels * of.row : 0);
  const Scratch<C> t(needs_t ? of.pixels * depth : 0), s(needs_s ? of.pixels * depth : 0);
  const Scratch<C> du(op.du ? items * op.rank * of.taps : 0);
  if (op.dvalues || needs_t) {
    T* const wanted = op.dvalues ? rows.get() : nullptr;
    Work<T> work{of, op.rank, offsets.data(), x.data, u.get(), wanted, needs_t ? t.get() : nullptr};
    work.taps_first = op.mu.channels_last;
    turn(work, parallel_for);
  }
  if ((op.dx || op.dvalues) && !factored_linear_backward({op.type,
                                                          of.pixels,
                                                          of.row,
                                                          c.o,
                                                          0,
                                                          {rows.get(), of.row, 0},
                                                          {dy.data, c.o, 0},
                                                          nullptr,
                                                          nullptr,
                                                          op.mu,
                                                          {op.dx ? drows.get() : nullptr, of.row, 0},
                                                          nullptr,
                                                          nullptr,
                                                          op.dvalues,
                                                          op.threads},
                                                         parallel_for)) {
    return false;
  }
  if (needs_t) {
    const Operand left{{dy.data, 0}, steps(c.o, 1), steps(of.pixels, c.o)};
    const Operand right{{t.get(), 0}, steps(depth, 1), steps(of.pixels, depth)};
    product<T, T, C>(left, right, static_cast<T*>(op.dv), c.i, c.i, c.o * c.i, false, parallel_for);
  }
  if (needs_s) {
    const Operand left{{dy.data, 0}, steps(of.pixels, c.o), steps(c.o, 1)};
    const Operand right{{op.v, 0}, steps(op.rank, c.o * c.i, c.i, 1), steps(c.o, c.i)};
    product<C, T, T>(left, right, s.get(), depth, depth, 0, false, parallel_for);
  }
  if (!op.dx && !(op.du && op.rank)) return true;
  const Work<T> back{of,
                     op.rank,
                     offsets.data(),
                     x.data,
                     u.get(),
                     nullptr,
                     nullptr,
                     drows.get(),
                     s.get(),
                     op.dx ? dx : nullptr,
                     op.du ? du.get() : nullptr,
                     op.mu.channels_last};
  parallel(parallel_for, items, ceil_div(16384, of.pixels * of.row / items + 1),
           [&](int64_t begin, int64_t end) { dispatch<TurnBack, T>(back, begin, end); });
  for (int64_t k = 0; k < op.rank * of.taps && op.du; ++k) {
    C sum = 0;
    for (int64_t item = 0; item < items; ++item) sum += du.get()[item * op.rank * of.taps + k];
    static_cast<T*>(op.du)[k] = from_compute<T>(sum);
  }
  return put_dx();
}

// f(T{}) for the types that tiles are multiplied in.
template <class F>
bool with_tiled_type(Type type, const F& f) {
  bool done = false;
  with_type(type, [&](auto one) {
    if constexpr (!std::is_same_v<decltype(one), double>) done = f(one);
  });
  return done;
}

}  // namespace

bool in_columns(Type type, const Conv& c, int64_t count, bool backward) {
  const int64_t pixels = c.n * c.oh * c.ow, row = c.i * c.kh * c.kw, numel = row * c.o;
  if (c.groups != 1 || c.kh * c.kw == 1) return false;
  if (are_thin_patches(c) && count && pixels && type != Type::f64) return true;
  if (!in_tiles(type, pixels, row, c.o, count, backward)) return false;
  // What the nonzeros cost one by one grows with their number, what tiles cost does not, and a W is read for each call.
  const double density = double(count) / double(numel);
  const bool wide = register_bytes() == 64;
  // With 16 registers a nonzero costs 2.2–2.7 times a number of a tile, whatever the pixels; rows have to be copied.
  const double dense = (backward ? .375 : .45) * (1 + 135. / double(c.o));
  if (!wide && type == Type::f32 && pixels <= kPixels && density > dense) return true;
  double most = numel < kLarge ? (backward ? 350 : 150) : backward ? 620 : wide ? 500 : 300;
  // Tiles are multiplied in pairs, nonzeros in float.
  if (type == Type::bf16 && in_pairs<BFloat16>(2)) most = numel < kLarge ? (backward ? 700 : 500) : 2300;
  return double(pixels) < most * density * density;
}

bool takes_dense(Type type, const Conv& c, bool backward) {
  const Images of(c);
  const int64_t numel = of.row * c.o;
  return is_depthwise(c) ||
         (in_columns(type, c, numel, backward) && in_tiles(type, of.pixels, of.row, c.o, numel, backward));
}

bool factored_conv_columns(const FactoredConv& op, ParallelFor parallel_for) {
  return with_tiled_type(op.type, [&](auto type) { return forward<decltype(type)>(op, parallel_for); });
}

bool factored_conv_backward_columns(const FactoredConvBackward& op, ParallelFor parallel_for) {
  return with_tiled_type(op.type, [&](auto type) { return backward<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
