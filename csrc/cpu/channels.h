// The kernels of the factored convolutions without μ. Channels are in the lanes: images are matrices of pixels ×
// channels, as those in channels_last lie in memory, read and written in place; of contiguous images a part at a time
// is turned.
#pragma once

#include "tiles.h"

namespace fastfact {

// Which taps the places of one axis read, and where. Places of one phase, `every` apart, have the same taps for as long
// as none leaves the source, which then moves by `advance` from one to the next.
struct Axis {
  int64_t every, advance;
  std::vector<int64_t> start, end;  // a place's first tap; the first place of its phase with other taps
  std::vector<int64_t> tap, from;
};

// From `sources` to `places`, or, transposed, for the gradient of that convolution.
inline Axis make_axis(int64_t places, int64_t sources, int64_t taps, int64_t stride, int64_t padding, int64_t dilation,
                      bool transposed) {
  Axis axis{transposed ? stride : 1, transposed ? 1 : stride, {0}, {}, {}, {}};
  for (int64_t place = 0; place < places; ++place) {
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t at = transposed ? place + padding - k * dilation : place * stride - padding + k * dilation;
      const int64_t from = transposed ? at / stride : at;
      if (at < 0 || (transposed && at % stride) || from >= sources) continue;
      axis.tap.push_back(k), axis.from.push_back(from);
    }
    axis.start.push_back(axis.tap.size());
  }
  axis.end.resize(places);
  for (int64_t place = places - 1; place >= 0; --place) {
    const int64_t next = place + axis.every;
    const auto tap = axis.tap.begin();
    const bool same = next < places && std::equal(tap + axis.start[place], tap + axis.start[place + 1],
                                                  tap + axis.start[next], tap + axis.start[next + 1]);
    axis.end[place] = same ? axis.end[next] : next;
  }
  return axis;
}

// From images of source[0] × source[1] pixels to images of size[0] × size[1]. Pixels are counted through all images.
struct Walk {
  Axis axes[2];
  int64_t size[2], source[2], taps, kw;
  int64_t pixels() const { return size[0] * size[1]; }
  int64_t sources() const { return source[0] * source[1]; }
};

// Whether rows of x are copied, with zeros for the padding, so that the pixels of a row of y have all taps and those
// that a tap reads lie side by side. Few channels fill the lanes only together with those of their neighbours.
inline bool side_by_side(const Conv& c) { return c.groups * c.i < 16; }

// Where the columns of x and its padding then are: those of one phase of the stride follow one another.
struct SideBySide {
  int64_t stride, each;  // columns of a phase
  int64_t width() const { return stride * each; }
  int64_t place(int64_t column) const { return column % stride * each + column / stride; }
};

inline SideBySide make_side_by_side(const Conv& c) {
  return {c.stride[1], c.ow + (c.kw - 1) * c.dilation[1] / c.stride[1]};
}

inline Walk make_walk(const Conv& c, bool transposed) {
  const int64_t kernel[2] = {c.kh, c.kw}, in[2] = {c.h, c.w}, out[2] = {c.oh, c.ow};
  Walk walk{{}, {}, {}, c.kh * c.kw, c.kw};
  for (int d = 0; d < 2; ++d) {
    walk.size[d] = transposed ? in[d] : out[d], walk.source[d] = transposed ? out[d] : in[d];
    walk.axes[d] =
        make_axis(walk.size[d], walk.source[d], kernel[d], c.stride[d], c.padding[d], c.dilation[d], transposed);
  }
  if (!transposed && side_by_side(c)) {
    const SideBySide columns = make_side_by_side(c);
    Axis axis{1, 1, {0}, std::vector<int64_t>(c.ow, c.ow), {}, {}};
    for (int64_t place = 0; place < c.ow; ++place) {
      for (int64_t k = 0; k < c.kw; ++k) {
        axis.tap.push_back(k), axis.from.push_back(columns.place(place * c.stride[1] + k * c.dilation[1]));
      }
      axis.start.push_back(axis.tap.size());
    }
    walk.axes[1] = axis, walk.source[1] = columns.width();
  }
  return walk;
}

// What the first of `pixels` pixels, walk.axes[1].every apart, reads: from which elements, with which taps. The next
// ones read `advance` elements further on.
struct Run {
  int64_t first, pixels, advance, count, last;  // the furthest of `offset`
  std::vector<int64_t> offset, tap;
};

// f(run) for runs that make up the pixels [first, last), from a source of `row` elements a pixel, its pixel `origin`
// on.
template <class F>
void walk_runs(const Walk& walk, int64_t first, int64_t last, int64_t origin, int64_t row, const F& f) {
  const Axis &rows = walk.axes[0], &columns = walk.axes[1];
  Run run{0, 0, columns.advance * row, 0, 0, std::vector<int64_t>(walk.taps), std::vector<int64_t>(walk.taps)};
  while (first < last) {
    const int64_t image = first / walk.pixels(), y = first / walk.size[1] % walk.size[0], x0 = first % walk.size[1];
    const int64_t x1 = std::min(walk.size[1], x0 + last - first), top = image * walk.sources() - origin;
    for (int64_t phase = 0; phase < columns.every; ++phase) {
      for (int64_t x = x0 + phase; x < x1; x = columns.end[x]) {
        run.first = first + x - x0, run.pixels = ceil_div(std::min(columns.end[x], x1) - x, columns.every);
        run.count = run.last = 0;
        for (int64_t j = rows.start[y]; j < rows.start[y + 1]; ++j) {
          for (int64_t k = columns.start[x]; k < columns.start[x + 1]; ++k) {
            const int64_t offset = (top + rows.from[j] * walk.source[1] + columns.from[k]) * row;
            run.offset[run.count] = offset, run.tap[run.count++] = rows.tap[j] * walk.kw + columns.tap[k];
            run.last = std::max(run.last, offset);
          }
        }
        f(run);
      }
    }
    first += x1 - x0;
  }
}

// Elements of a row of a matrix in scratch memory. An odd number of registers spreads the rows over the sets of the
// caches; short rows lie side by side, so that those of neighbouring pixels are one for what takes channels alike.
inline int64_t scratch_row(int64_t n, int64_t lanes) {
  return n % lanes || n < 8 * lanes ? n : (n / lanes | 1) * lanes;
}

// f(image, its first pixel, pixels, those before them) for the images, of so many pixels, that pixels [first, last) are
// of.
template <class F>
void each_image(int64_t first, int64_t last, int64_t pixels, const F& f) {
  for (int64_t at = first, count; at < last; at += count) {
    count = std::min(pixels - at % pixels, last - at);
    f(at / pixels, at % pixels, count, at - first);
  }
}

template <class C, int B>
struct Rows {
  using Ops = Tiles<C, B>;
  template <class E>
  using Left = typename Ops::template Left<E>;
  using V = Vec<C, B>;
  static constexpr int L = kLanes<C, B>, kM = Ops::kM;
  static constexpr int64_t kPanel = wide(B) * L;

  FF_INLINE static V first_lanes(V x, int64_t n) {
    using Index = IndexVec<C, B>;
    Index lane;
    for (int l = 0; l < L; ++l) lane[l] = l;
    return bit_cast<V>(bit_cast<Index>(x) & (Index)(lane < Index{} + int32_t(n)));
  }

  // Pixels [first, last) of contiguous images, of so many channels and pixels, as rows, and back.
  template <class From>
  FF_INLINE static void to_rows(const From* images, int64_t n, int64_t channels, int64_t pixels, int64_t first,
                                int64_t last, C* to, int64_t to_row) {
    each_image(first, last, pixels, [&](int64_t image, int64_t at, int64_t count, int64_t before) {
      transpose<B>(images + image * channels * pixels + at, pixels, channels, count, images + n * channels * pixels,
                   to + before * to_row, to_row);
    });
  }
  template <class To>
  FF_INLINE static void from_rows(const C* from, int64_t from_row, int64_t channels, int64_t pixels, int64_t first,
                                  int64_t last, To* images) {
    each_image(first, last, pixels, [&](int64_t image, int64_t at, int64_t count, int64_t before) {
      transpose<B>(from + before * from_row, from_row, count, channels, from + (last - first) * from_row,
                   images + image * channels * pixels + at, pixels);
    });
  }

  // to[pixel][c] = Σ_r Σ_k u[r][tap[k]] · from[offset[k] + r·rank_step + pixel·advance + c], `size` elements at `from`.
  template <class S, class D>
  FF_INLINE static void depthwise(const Run& run, const S* from, int64_t size, int64_t channels, const C* u,
                                  int64_t ranks, int64_t rank_step, int64_t taps, D* to, int64_t to_step) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t *offset = run.offset.data(), *tap = run.tap.data(), count = run.count;
      const bool flat = run.advance == channels && to_step == channels;
      const int64_t pixels = flat ? 1 : run.pixels, elements = flat ? run.pixels * channels : channels;
      const int64_t tail = elements % L, whole = elements - tail;
      const int64_t end = run.last + (ranks - 1) * rank_step + whole + L;
      const S* at = from;
      for (int64_t p = 0; p < pixels; ++p, at += run.advance, to += to_step) {
        auto sums_of = [&]<int N>(const S* x, V* sums) FF_INLINE_LAMBDA {
          const C* weights = u;
          for (int64_t r = 0; r < ranks; ++r, x += rank_step, weights += taps) {
            for (int64_t k = 0; k < count; ++k) {
              const V weight = weights[tap[k]] - V{};
#pragma GCC unroll 8
              for (int j = 0; j < N; ++j) sums[j] += weight * load<B>(x + offset[k] + j * L);
            }
          }
        };
        Ops::template pieces<8>(0, whole / L, [&]<int N>(int64_t first) FF_INLINE_LAMBDA {
          V sums[N]{};
          sums_of.template operator()<N>(at + first * L, sums);
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) store<B>(to + (first + j) * L, sums[j]);
        });
        if (!tail) continue;
        alignas(64) C last[L];
        if (end + p * run.advance <= size) {
          V sums[1]{};
          sums_of.template operator()<1>(at + whole, sums);
          store<B>(last, sums[0]);
        } else {
          for (int64_t c = 0; c < tail; ++c) {
            last[c] = 0;
            for (int64_t k = 0; k < ranks * count; ++k) {
              const int64_t r = k / count, j = k % count;
              last[c] += u[r * taps + tap[j]] * to_compute(at[offset[j] + r * rank_step + whole + c]);
            }
          }
        }
        store_some<B>(last, tail, to + whole);
      }
    });
  }

  // grads[tap[k]] (lane by lane) += Σ_pixel Σ_c s[pixel][c] · x[offset[k] + pixel·advance + c], `size` elements at x,
  // and, where t is asked for, what `depthwise` makes of x. Rows of s and t are `row` elements apart; a register may be
  // read from the end of s on.
  template <bool with_t, class S>
  FF_INLINE static void correlate(const Run& run, const S* x, int64_t size, int64_t channels, const C* u, const C* s,
                                  C* t, int64_t row, C* grads) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t *offset = run.offset.data(), *tap = run.tap.data(), count = run.count;
      const bool flat = run.advance == channels && row == channels;
      const int64_t pixels = flat ? 1 : run.pixels, elements = flat ? run.pixels * channels : channels;
      const int64_t tail = elements % L, whole = elements - tail, end = run.last + whole + L;
      const S* at = x;
      const C* held_at = s;
      C* to = t;
      for (int64_t p = 0; p < pixels; ++p, at += run.advance, held_at += row, to += row) {
        Ops::template pieces<(B == 64 ? 8 : 4)>(0, whole / L, [&]<int N>(int64_t first) FF_INLINE_LAMBDA {
          V held[N], sums[N]{};
#pragma GCC unroll 8
          for (int j = 0; j < N; ++j) held[j] = load<B>(held_at + (first + j) * L);
          for (int64_t k = 0; k < count; ++k) {
            V grad[2] = {load<B>(grads + tap[k] * L), V{}};
            const V weight = u[tap[k]] - V{};
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) {
              const V value = load<B>(at + offset[k] + (first + j) * L);
              grad[j % 2] += held[j] * value;
              if constexpr (with_t) sums[j] += weight * value;
            }
            store<B>(grads + tap[k] * L, grad[0] + grad[1]);
          }
          if constexpr (with_t) {
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) store<B>(to + (first + j) * L, sums[j]);
          }
        });
        if (!tail) continue;
        alignas(64) C last[L]{};
        if (end + p * run.advance <= size) {
          const V held = first_lanes(load<B>(held_at + whole), tail);
          V sums{};
          for (int64_t k = 0; k < count; ++k) {
            const V value = first_lanes(load<B>(at + offset[k] + whole), tail);
            C* grad = grads + tap[k] * L;
            store<B>(grad, load<B>(grad) + held * value);
            sums += u[tap[k]] * value;
          }
          store<B>(last, sums);
        } else {
          for (int64_t k = 0; k < count; ++k) {
            for (int64_t c = 0; c < tail; ++c) {
              const C value = to_compute(at[offset[k] + whole + c]);
              grads[tap[k] * L] += held_at[whole + c] * value, last[c] += u[tap[k]] * value;
            }
          }
        }
        if constexpr (with_t) store_some<B>(last, tail, to + whole);
      }
    });
  }

  // The right operand of a product: its registers in panels of kPanel, `panel` elements apart; rows `step` elements
  // apart, or, if that is 0, as wide as the panel.
  template <class E>
  struct Right {
    const E* data;
    int64_t step, panel;
  };

  // v [rank, groups·o, i] as a right operand from i to o channels, [group][panel][rank · i][panel's width], or,
  // swapped, from o to i, [group][rank][panel][o][panel's width]; filled up with zeros to whole registers. Of pairs a
  // panel has half as many rows. Items are panels.
  template <class T>
  FF_INLINE static void pack(const T* v, const Conv& c, int64_t rank, bool swapped, bool pairs, C* to, int64_t begin,
                             int64_t end) {
    const int64_t columns = swapped ? c.i : c.o, panels = ceil_div(columns, kPanel), filled = ceil_div(columns, L) * L;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / panels, n = item % panels * kPanel, count = std::min(kPanel, columns - n);
      const int64_t width = ceil_div(count, L) * L, depth = swapped ? c.o : rank * c.i;
      C *const first = to + (block * filled + n) * depth, *panel = first;
      if (count < width) std::memset(static_cast<void*>(panel), 0, depth * width * sizeof(C));
      if (swapped) {
        const T* from = v + (block % rank * c.groups + block / rank) * c.o * c.i + n;
        for (int64_t o = 0; o < c.o; ++o, from += c.i, panel += width) {
          for (int64_t k = 0; k < count; ++k) panel[k] = to_compute(from[k]);
        }
      } else {
        for (int64_t r = 0; r < rank; ++r, panel += c.i * width) {
          const T* from = v + ((r * c.groups + block) * c.o + n) * c.i;
          transpose<B>(from, c.i, count, c.i, from + count * c.i, panel, width);
        }
      }
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (pairs) make_pairs<B>(first, width, depth, width, first, width);
      }
    }
  }

  // to[pixel][k] = Σ_o from[pixel][o] · v[k][o] for D columns k, too few for the lanes of a product: o, in whole
  // registers, is in them.
  template <int D>
  FF_INLINE static void dots(const C* from, int64_t from_row, int64_t pixels, const C* v, int64_t outputs, C* to,
                             int64_t to_row) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      alignas(64) C sums[D * L];
      for (int64_t first = 0; first < pixels; first += L) {
        const int64_t count = std::min<int64_t>(L, pixels - first);
        const C* at = from + first * from_row;
#pragma GCC unroll 4
        for (int k = 0; k < D; ++k) {
          auto dot = [&](int pixel) FF_INLINE_LAMBDA {
            const C* row = at + std::min<int64_t>(pixel, count - 1) * from_row;
            V sum{};
            for (int64_t o = 0; o < outputs; o += L) sum += load<B>(row + o) * load<B>(v + k * outputs + o);
            return sum;
          };
          store<B>(sums + k * L, sums_of_rows<L, V>(dot, 0));
        }
        for (int64_t pixel = 0; pixel < count; ++pixel) {
          for (int k = 0; k < D; ++k) to[(first + pixel) * to_row + k] = sums[k * L + pixel];
        }
      }
    });
  }
  FF_INLINE static void dots(int64_t columns, const C* from, int64_t from_row, int64_t pixels, const C* v,
                             int64_t outputs, C* to, int64_t to_row) {
    if (columns == 1) dots<1>(from, from_row, pixels, v, outputs, to, to_row);
    if (columns == 2) dots<2>(from, from_row, pixels, v, outputs, to, to_row);
    if (columns == 3) dots<3>(from, from_row, pixels, v, outputs, to, to_row);
    if (columns == 4) dots<4>(from, from_row, pixels, v, outputs, to, to_row);
  }

  // y[m][n] = start[m][n] + Σ_k left(m, k) · right[k][n] for `rows` rows; start null: 0, and read in whole registers.
  template <class E>
  FF_INLINE static void multiply(Left<E> left, int64_t rows, Right<E> right, int64_t columns, int64_t depth,
                                 const C* start, int64_t start_row, C* y, int64_t y_row, Ahead next, Ahead out) {
    const int64_t steps = ceil_div(rows, kM) * ceil_div(columns, kPanel) * (1 + depth / Ops::kStep);
    next.spread(steps), out.spread(steps);
    for (int64_t n = 0; n < columns; n += kPanel, right.data += right.panel) {
      auto panel = [&]<int N>(std::integral_constant<int, N>) FF_INLINE_LAMBDA {
        outline<B>([&]() FF_INLINE_LAMBDA {
          constexpr int kTall = B == 64 && N <= 2 ? 2 * kM : kM;
          alignas(64) C part[kTall * N * L];
          const bool whole = n + N * L <= columns;
          int64_t m = 0;
          for (int64_t tiles = ceil_div(rows, kTall); tiles > 0; --tiles) {
            const int64_t count = ceil_div(rows - m, tiles);
            C* to = y + m * y_row + n;
            Ops::template rows_of_product<N, kTall, E>(count, {left.data + m * left.row, left.row, left.step},
                                                       right.data, right.step ? right.step : N * L, depth,
                                                       start ? start + m * start_row + n : nullptr, start_row, L,
                                                       whole ? to : part, whole ? y_row : N * L, next, out);
            for (int64_t j = 0; j < count && !whole; ++j) {
              const C* from = part + j * N * L;
              int64_t k = 0;
              for (; n + k + L <= columns; k += L) store<B>(to + j * y_row + k, load<B>(from + k));
              store_some<B>(from + k, columns - n - k, to + j * y_row + k);
            }
            m += count;
          }
        });
      };
      const int64_t width = std::min<int64_t>(wide(B), ceil_div(columns - n, L));
      if constexpr (wide(B) == 4) {
        if (width == 4) panel(std::integral_constant<int, 4>{});
        if (width == 3) panel(std::integral_constant<int, 3>{});
      }
      if (width == 2) panel(std::integral_constant<int, 2>{});
      if (width == 1) panel(std::integral_constant<int, 1>{});
    }
  }
};

}  // namespace fastfact
