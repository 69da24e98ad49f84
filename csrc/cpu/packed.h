// Packed images of the factored convolutions, and the way into and out of them.
//
// A row of a packed image holds rows of several images (or strips of rows of an image) side by side, so that any width
// fills the registers. Each channel is packed once for each column a tap may have, shifted by it, with zeros where the
// tap falls outside the image; rows outside it are zeros too. A tap then is one offset, in whole registers, for all
// outputs of a channel.
#pragma once

#include <algorithm>
#include <vector>

#include "factored_conv.h"
#include "vec.h"

namespace fastfact {

// FF_CONV_TYPE leaves one element type, for tests that would take minutes to compile.
template <class F>
void with_conv_type(Type type, const F& f) {
#ifdef FF_CONV_TYPE
  f(FF_CONV_TYPE{});
#else
  with_type(type, f);
#endif
}

constexpr int64_t kQuad = 4;      // registers in which the kernels take outputs
constexpr int64_t kTogether = 4;  // channels packed at a time, of contiguous images

// Images [n, channels, h, w] in memory.
template <class T>
struct Images {
  T* data;
  int64_t n, channels, h, w;
  bool channels_last;
};

// Taps of a kernel and their places (row, column) relative to the first pixel an output reads.
struct Taps {
  std::vector<int64_t> tap, row, column;
};

// A convolution as the kernels run it, from `i` to `o` channels of each group. Output (row, column) of phase (y, x)
// reads from (row, column) · stride − origin on, and is pixel (row, column) · step + (y, x) of the images.
struct Geometry {
  int64_t groups, i, o, oh, ow;
  int64_t stride[2], origin[2], reach[2], step[2];
  std::vector<Taps> phases;  // [step[0] · step[1]]
};

inline Geometry forward_geometry(const Conv& c) {
  Geometry s{c.groups, c.i, c.o, c.oh, c.ow, {}, {}, {}, {1, 1}, std::vector<Taps>(1)};
  const int64_t kernel[2] = {c.kh, c.kw};
  for (int d = 0; d < 2; ++d) {
    s.stride[d] = c.stride[d], s.origin[d] = c.padding[d], s.reach[d] = (kernel[d] - 1) * c.dilation[d];
  }
  for (int64_t k = 0; k < c.kh * c.kw; ++k) {
    s.phases[0].tap.push_back(k);
    s.phases[0].row.push_back(k / c.kw * c.dilation[0]), s.phases[0].column.push_back(k % c.kw * c.dilation[1]);
  }
  return s;
}

// From dy to dx: each phase of the stride is a convolution of stride 1 with some of the taps.
inline Geometry transposed_geometry(const Conv& c) {
  Geometry s{c.groups, c.o, c.i, 0, 0, {1, 1}, {}, {}, {}, std::vector<Taps>(c.stride[0] * c.stride[1])};
  const int64_t kernel[2] = {c.kh, c.kw}, size[2] = {c.h, c.w};
  auto place = [&](int d, int64_t phase, int64_t k) {
    const int64_t away = phase + c.padding[d] - k * c.dilation[d];
    return away % c.stride[d] ? INT64_MAX : away / c.stride[d];
  };
  for (int d = 0; d < 2; ++d) {
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int64_t phase = 0; phase < c.stride[d]; ++phase) {
      for (int64_t k = 0; k < kernel[d]; ++k) {
        const int64_t at = place(d, phase, k);
        if (at != INT64_MAX) low = std::min(low, at), high = std::max(high, at);
      }
    }
    s.origin[d] = -low, s.reach[d] = high - low, s.step[d] = c.stride[d];
    (d ? s.ow : s.oh) = ceil_div(size[d], c.stride[d]);
  }
  for (size_t phase = 0; phase < s.phases.size(); ++phase) {
    for (int64_t k = 0; k < c.kh * c.kw; ++k) {
      const int64_t y = place(0, phase / c.stride[1], k / c.kw), x = place(1, phase % c.stride[1], k % c.kw);
      if (y == INT64_MAX || x == INT64_MAX) continue;
      Taps& taps = s.phases[phase];
      taps.tap.push_back(k), taps.row.push_back(y + s.origin[0]), taps.column.push_back(x + s.origin[1]);
    }
  }
  return s;
}

// How outputs are cut into units of work: blocks of `segments` strips side by side, each in bands of rows.
struct Grid {
  int64_t n, segments, strips, strip_rows;  // images, strips side by side, strips of an image, rows of a strip
  int64_t blocks, rows, bands;              // rows of a band
  int64_t units() const { return blocks * bands; }
  // Rows of a band that are this band's own.
  int64_t own(int64_t band) const { return std::min(rows, strip_rows - band * rows); }
  // Image of a segment, or −1, and its first row.
  int64_t image(int64_t unit, int64_t segment) const {
    const int64_t image = (unit / bands * segments + segment) / strips;
    return image < n ? image : -1;
  }
  int64_t first_row(int64_t unit, int64_t segment) const {
    return (unit / bands * segments + segment) % strips * strip_rows + unit % bands * rows;
  }
};

// `row_elements(segments)`: what a unit keeps for each of its rows.
template <class RowElements>
Grid make_grid(int64_t n, int64_t rows, int64_t columns, int64_t lanes, int64_t groups,
               const RowElements& row_elements) {
  constexpr int64_t kKept = 1 << 19, kUnits = 4;  // elements of a unit, for the second cache; units, for the threads
  Grid g{};
  double best = 0;
  for (int64_t segments = 1; segments <= lanes; ++segments) {
    const int64_t strips = std::clamp<int64_t>(segments / std::max<int64_t>(n, 1), 1, rows);
    const int64_t strip_rows = ceil_div(rows, strips), vectors = ceil_div(segments * columns, lanes);
    const int64_t blocks = ceil_div(n * strips, segments), quads = ceil_div(strip_rows * vectors, kQuad);
    const double work = blocks * (quads + 0.25) * (1 + 0.05 * vectors) * (strips > 1 ? 1.05 : 1);
    if (segments > 1 && (work >= best || row_elements(segments) * std::min<int64_t>(strip_rows, 8) > kKept)) continue;
    best = work, g = {n, segments, strips, strip_rows, blocks, 0, 0};
  }
  const int64_t vectors = ceil_div(g.segments * columns, lanes);
  g.bands = ceil_div(g.strip_rows, std::clamp<int64_t>(kKept / row_elements(g.segments), 1, g.strip_rows));
  while (g.blocks * g.bands * groups < kUnits && ceil_div(g.strip_rows, g.bands + 1) * vectors >= 2 * kQuad) ++g.bands;
  g.rows = ceil_div(g.strip_rows, g.bands);
  g.bands = ceil_div(g.strip_rows, g.rows);
  return g;
}

// Rows of outputs of a channel, `columns` of each segment side by side.
struct Band {
  int64_t columns, rows, row, pixels, channel;  // elements: of a row, of all rows, from one channel to the next
  int64_t quads(int64_t lanes) const { return ceil_div(pixels, kQuad * lanes); }
};

inline Band make_band(int64_t segments, int64_t columns, int64_t rows, int64_t lanes) {
  const int64_t row = ceil_div(segments * columns, lanes) * lanes;
  // An odd number of registers spreads the channels over the sets of the caches.
  return {columns, rows, row, rows * row, (ceil_div(rows * row, kQuad * lanes) * kQuad + 1) * lanes};
}

// The packed input of one channel, [copy][slot][row]: a copy for each column of a tap, the rows ordered by their phase
// of the stride.
template <class C>
struct Slab {
  using Bits = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  int64_t segments, columns, stride, width, row, copy, phases;
  int64_t channel;                           // from one channel to the next; a store may run over by a register
  std::vector<int64_t> places;               // the columns of the copies, less the origin
  std::vector<int64_t> source;               // the input row of each slot, from the first that is read
  std::vector<Bits> masks;                   // zeros, then [copy][columns]: all ones inside the image; whole registers
  std::vector<std::vector<int64_t>> offset;  // of each tap of each phase of the geometry
  int64_t slack;
};

// For `rows` rows of outputs from images of width `width`.
template <class C>
Slab<C> make_slab(const Geometry& s, int64_t segments, int64_t rows, int64_t width, int64_t lanes) {
  Slab<C> out{};
  out.segments = segments, out.columns = s.ow, out.stride = s.stride[1], out.width = width;
  out.row = ceil_div(segments * s.ow, lanes) * lanes, out.slack = kQuad * lanes;
  std::vector<int64_t> first(s.stride[0], -1);
  for (int64_t phase = 0; phase < s.stride[0]; ++phase) {
    int64_t last = -1;
    for (const Taps& taps : s.phases) {
      for (int64_t y : taps.row) {
        if (y % s.stride[0] == phase) last = std::max(last, y / s.stride[0]);
      }
    }
    if (last < 0) continue;
    first[phase] = out.source.size(), ++out.phases;
    for (int64_t y = 0; y < rows + last; ++y) out.source.push_back(y * s.stride[0] + phase);
  }
  for (const Taps& taps : s.phases) {
    for (int64_t x : taps.column) {
      if (std::find(out.places.begin(), out.places.end(), x - s.origin[1]) == out.places.end()) {
        out.places.push_back(x - s.origin[1]);
      }
    }
  }
  out.copy = out.source.size() * out.row, out.channel = out.places.size() * out.copy + lanes;
  out.masks.assign(lanes, 0);
  for (int64_t place : out.places) {
    for (int64_t x = 0; x < ceil_div(s.ow, lanes) * lanes; ++x) {
      const int64_t at = x * s.stride[1] + place;
      out.masks.push_back(x < s.ow && at >= 0 && at < width ? -1 : 0);
    }
  }
  for (const Taps& taps : s.phases) {
    out.offset.emplace_back();
    for (size_t k = 0; k < taps.tap.size(); ++k) {
      const auto copy = std::find(out.places.begin(), out.places.end(), taps.column[k] - s.origin[1]);
      const int64_t slot = first[taps.row[k] % s.stride[0]] + taps.row[k] / s.stride[0];
      out.offset.back().push_back((copy - out.places.begin()) * out.copy + slot * out.row);
    }
  }
  return out;
}

// Rows of images as pack() reads them: row y of channel c of a segment begins at segment.top + c·channel + y·pitch, and
// is zeros outside [low, high). Row 0 is the first that the unit reads.
template <class S>
struct Planes {
  struct Segment {
    int64_t top, low, high;
  };
  // A register of the slab: where its elements are, less c·channel, and their mask.
  struct Move {
    int64_t from;
    int32_t to, mask;
  };
  const S* data;
  int64_t size, channel, pitch;  // elements that may be read, from one channel, row to the next
  std::vector<Segment> segments;
  std::vector<Move> moves;  // the same for all channels
  int64_t first, last;      // what they read

  // In the order in which stores may run over into the next segment, row or copy.
  template <class C>
  void plan(const Slab<C>& slab, int64_t lanes) {
    const int64_t in_mask = ceil_div(slab.columns, lanes) * lanes;
    moves.clear(), first = 0, last = slab.stride * lanes;
    int64_t row = 0;
    for (size_t copy = 0; copy < slab.places.size(); ++copy) {
      for (int64_t y : slab.source) {
        for (int64_t k = 0; k < slab.segments; ++k) {
          const Segment& segment = segments[k];
          const bool inside = y >= segment.low && y < segment.high;
          for (int64_t j = 0; j < slab.columns; j += lanes) {
            const int64_t at = segment.top + y * pitch + slab.places[copy] + j * slab.stride;
            moves.push_back({inside ? at : 0, int32_t(row + k * slab.columns + j),
                             int32_t(inside ? lanes + copy * in_mask + j : 0)});
            if (inside) first = std::min(first, at), last = std::max(last, at + slab.stride * lanes);
          }
        }
        row += slab.row;
      }
    }
  }
};

template <class C>
struct Zeros : Scratch<C> {
  explicit Zeros(int64_t n) : Scratch<C>(n) { std::memset(static_cast<void*>(this->get()), 0, n * sizeof(C)); }
};

// Swaps lanes so that, after all distances D = 1, 2, 4 …, a square of registers is transposed.
template <int D, class V, int... lane>
FF_INLINE void exchange(V& a, V& b, std::integer_sequence<int, lane...>) {
  constexpr int n = sizeof...(lane);
  const V low = shuffle<(lane & D ? n + lane - D : lane)...>(a, b);
  b = shuffle<(lane & D ? n + lane : lane + D)...>(a, b);
  a = low;
}

template <int D, int N, class V>
FF_INLINE void transpose_from(V* rows) {
  if constexpr (D < N) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      if (!(j & D)) exchange<D>(rows[j], rows[j + D], std::make_integer_sequence<int, N>{});
    }
    transpose_from<2 * D, N>(rows);
  }
}

template <class T, int B>
struct Packing {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;

  // Elements 0, step, 2·step, … (second = false) or from the middle on.
  template <class W, int... lane>
  FF_INLINE static W evens(W a, W b, std::integer_sequence<int, lane...>) {
    return shuffle<(2 * lane)...>(a, b);
  }
  template <bool second, int... lane>
  FF_INLINE static V interleaved(V a, V b, std::integer_sequence<int, lane...>) {
    return shuffle<((lane + (second ? L : 0)) / 2 + lane % 2 * L)...>(a, b);
  }

  // All copies of the channels [channel, channel + count), count ≤ kTogether.
  template <class S>
  FF_INLINE static void pack(const Slab<C>& slab, const Planes<S>& planes, int64_t channel, int64_t count, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t stride = slab.stride, base = channel * planes.channel, end = (count - 1) * planes.channel;
      constexpr int kHalf = std::max(B / 2, 16);
      if (stride > 2 || base + planes.first < 0 || base + end + planes.last > planes.size) {
        move<0, B>(slab, planes, base, count, to);
      } else if (stride == 2) {
        move<2, B>(slab, planes, base, count, to);
      } else if (slab.columns * int64_t(sizeof(C)) <= kHalf) {
        // What a whole register would write of the next segment crosses a line of the cache.
        move<1, kHalf>(slab, planes, base, count, to);
      } else {
        move<1, B>(slab, planes, base, count, to);
      }
    });
  }

  // The first `channels` channels, `together` at a time, each few handed to take(first, count, packed) and each block
  // of them, packed at `to`, to take_block(number).
  template <class From, class Take, class TakeBlock>
  FF_INLINE static void pack_blocks(const Slab<C>& slab, const From& from, int64_t channels, int64_t block,
                                    int64_t together, C* to, const Take& take, const TakeBlock& take_block) {
    for (int64_t first = 0; first < channels; first += block) {
      const int64_t last = std::min(first + block, channels);
      for (int64_t c = first; c < last; c += together) {
        const int64_t count = std::min(together, last - c);
        C* packed = to + (c - first) * slab.channel;
        pack(slab, from, c, count, packed);
        take(c, count, packed);
      }
      take_block(first / block);
    }
  }

  // W bytes at a time. Stride 0 stands for any, and for channels at the ends of what may be read.
  template <int stride, int W, class S>
  FF_INLINE static void move(const Slab<C>& slab, const Planes<S>& planes, int64_t base, int64_t count, C* to) {
    if (stride > 0 && count == kTogether) return move<stride, W, kTogether>(slab, planes, base, to);
    for (int64_t c = 0; c < count; ++c, base += planes.channel, to += slab.channel) {
      move<stride, W, 1>(slab, planes, base, to);
    }
  }

  template <int stride, int W, int channels, class S>
  FF_INLINE static void move(const Slab<C>& slab, const Planes<S>& planes, int64_t base, C* to) {
    using Bits = typename Slab<C>::Bits;
    using Mask = typename VecOf<Bits, W>::Type;
    using Part = typename VecOf<C, W>::Type;
    const Bits* masks = slab.masks.data();
    const S* data = planes.data + base;
    for (const auto& move : planes.moves) {
      if constexpr (stride == 0) {
        for (int l = 0; l < L; ++l) {
          to[move.to + l] = masks[move.mask + l] ? to_compute(data[move.from + l * slab.stride]) : C(0);
        }
      } else {
        Mask mask;
        std::memcpy(&mask, masks + move.mask, W);
#pragma GCC unroll 4
        for (int c = 0; c < channels; ++c) {
          const S* from = data + move.from + c * planes.channel;
          Part x = load<W>(from);
          if constexpr (stride == 2) x = evens(x, load<B>(from + L), std::make_integer_sequence<int, L>{});
          store<W>(to + move.to + c * slab.channel, bit_cast<Part>(bit_cast<Mask>(x) & mask));
        }
      }
    }
  }

  // The rows [first, first + rows) that a unit reads, relative to the rows of its outputs times `stride`, of channels
  // [channel, channel + channels) of contiguous images.
  FF_INLINE static void find(const Images<const T>& x, const Grid& g, int64_t unit, int64_t stride, int64_t first,
                             const Slab<C>& slab, int64_t channel, Planes<T>& out) {
    const int64_t plane = x.h * x.w;
    out.data = x.data, out.size = x.n * x.channels * plane, out.channel = plane, out.pitch = x.w;
    out.segments.resize(g.segments);
    for (int64_t k = 0; k < g.segments; ++k) {
      const int64_t image = g.image(unit, k), top = g.first_row(unit, k) * stride + first;
      out.segments[k] = {(image * x.channels + channel) * plane + top * x.w, -top, image < 0 ? -top : x.h - top};
    }
    out.plan(slab, L);
  }

  static constexpr int64_t kLine = 64 / sizeof(C);

  // Where each element of the slab's first channel is in channels_last images. Whole lines of the channels after it may
  // be read there: outside the images of zeros, and at their end, beyond which nothing may be read, of a copy.
  struct Pixels {
    int64_t channels, line;  // of a group; in whole lines
    Scratch<const T*> at;
    Scratch<T> zeros, tail;

    Pixels(const Images<const T>& x, int64_t group_channels, int64_t elements)
        : channels(group_channels),
          line(ceil_div(group_channels, kLine) * kLine),
          at(x.channels_last ? elements : 0),
          zeros(x.channels_last ? line : 0),
          tail(x.channels_last ? 2 * line + x.channels : 0) {
      if (x.channels_last) std::memset(static_cast<void*>(zeros.get()), 0, line * sizeof(T));
    }

    // From channel `channel` on, of the rows that a unit reads; see the other `find`.
    void find(const Images<const T>& x, const Grid& g, int64_t unit, int64_t stride, int64_t first, const Slab<C>& slab,
              int64_t channel) const {
      const T* const data = x.data + channel;
      const int64_t size = x.n * x.h * x.w * x.channels - channel;
      const int64_t safe = size < line ? 0 : ((size - line) / x.channels + 1) * x.channels;  // pixels before this one
      std::memset(static_cast<void*>(tail.get()), 0, (2 * line + x.channels) * sizeof(T));
      if (safe < size) std::copy(data + safe, data + size, tail.get());
      const T** to = at.get();
      for (int64_t place : slab.places) {
        for (int64_t y : slab.source) {
          std::fill(to, to + slab.row, zeros.get());
          for (int64_t k = 0; k < g.segments; ++k) {
            const int64_t image = g.image(unit, k), row = g.first_row(unit, k) * stride + first + y;
            if (image < 0 || row < 0 || row >= x.h) continue;
            const int64_t begin = place < 0 ? ceil_div(-place, slab.stride) : 0, step = slab.stride * x.channels;
            const int64_t end = std::min(slab.columns, ceil_div(std::max<int64_t>(0, x.w - place), slab.stride));
            int64_t from = ((image * x.h + row) * x.w + place + begin * slab.stride) * x.channels;
            for (int64_t j = begin; j < end; ++j, from += step) {
              to[k * slab.columns + j] = from < safe ? data + from : tail.get() + (from - safe);
            }
          }
          to += slab.row;
        }
      }
    }
  };

  // All copies of the channels [channel, channel + count), count ≤ kLine: a square of pixels and channels at a time.
  FF_INLINE static void pack(const Slab<C>& slab, const Pixels& pixels, int64_t channel, int64_t count, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t p = 0; p < slab.copy; p += L) {
        for (size_t copy = 0; copy < slab.places.size(); ++copy) {
          const int64_t first = copy * slab.copy + p;
          const T* const* at = pixels.at.get() + first;
          for (int64_t c = 0; c < count; c += L) {
            V lines[L];
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) lines[l] = load<B>(at[l] + channel + c);
            transpose_from<1, L>(lines);
            C* line = to + c * slab.channel + first;
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) {
              if (c + l < count) store<B>(line + l * slab.channel, lines[l]);
            }
          }
        }
      }
    });
  }

  // pack_blocks for the rows that `find` finds, of `channels` channels from `channel` on.
  template <class Take, class TakeBlock>
  FF_INLINE static void pack_images(const Images<const T>& images, const Grid& g, int64_t unit, int64_t stride,
                                    int64_t first, const Slab<C>& slab, int64_t channel, int64_t channels,
                                    const Pixels& pixels, int64_t block, C* to, const Take& take,
                                    const TakeBlock& take_block) {
    if (images.channels_last) {
      pixels.find(images, g, unit, stride, first, slab, channel);
      pack_blocks(slab, pixels, channels, block, kLine, to, take, take_block);
    } else {
      Planes<T> planes;
      find(images, g, unit, stride, first, slab, channel, planes);
      pack_blocks(slab, planes, channels, block, kTogether, to, take, take_block);
    }
  }

  // to[c][p] = from[p][c]
  FF_INLINE static void from_channels_last(const T* from, int64_t step, int64_t pixels, int64_t channels, C* to,
                                           int64_t to_step) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t p = 0; p < pixels; p += L) {
        const int64_t count = std::min<int64_t>(L, pixels - p);
        const T* at = from + p * step;
        int64_t c = 0;
        for (; c + L <= channels && count == L; c += L) {
          V lines[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) lines[l] = load<B>(at + l * step + c);
          transpose_from<1, L>(lines);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(to + (c + l) * to_step + p, lines[l]);
        }
        for (; c < channels; ++c) {
          for (int64_t l = 0; l < count; ++l) to[c * to_step + p + l] = to_compute(at[l * step + c]);
        }
      }
    });
  }

  // n < L elements.
  template <int W = B / 2>
  FF_INLINE static void store_some(const C* from, int64_t n, T* to) {
    if constexpr (W >= 16) {
      constexpr int count = W / int(sizeof(C));
      if (n >= count) {
        store<W>(to, load<W>(from));
        from += count, to += count, n -= count;
      }
      store_some<W / 2>(from, n, to);
    } else {
      for (int64_t j = 0; j < n; ++j) to[j] = from_compute<T>(from[j]);
    }
  }

  // Writes a band, [phase][tile][channel][`tile` elements], of a unit to the images y, from channel `channel` on.
  FF_INLINE static void unpack(const Geometry& s, const Grid& g, const Band& band, int64_t unit, const C* from,
                               int64_t tile, int64_t phase_step, int64_t channel, const Images<T>& y) {
    const int64_t own = g.own(unit % g.bands);
    auto rows_of = [&](int64_t segment, int64_t phase_row) {
      const int64_t below = y.h - phase_row - g.first_row(unit, segment) * s.step[0];
      return g.image(unit, segment) < 0 ? 0 : std::min(own, ceil_div(std::max<int64_t>(0, below), s.step[0]));
    };
    const int64_t phases = s.step[0] * s.step[1], registers = ceil_div(own * band.row, L);
    if (y.channels_last) {
      const Scratch<int64_t> places(registers * L);
      for (int64_t phase = 0; phase < phases; ++phase, from += phase_step) {
        std::fill(places.get(), places.get() + registers * L, -1);
        const int64_t first = phase / s.step[1], column = phase % s.step[1];
        for (int64_t k = 0; k < g.segments; ++k) {
          for (int64_t row = 0; row < rows_of(k, first); ++row) {
            const int64_t line = (g.first_row(unit, k) + row) * s.step[0] + first;
            int64_t place = ((g.image(unit, k) * y.h + line) * y.w + column) * y.channels + channel;
            int64_t* at = places.get() + row * band.row + k * band.columns;
            for (int64_t x = column; x < y.w; x += s.step[1], place += s.step[1] * y.channels) *at++ = place;
          }
        }
        outline<B>([&]() FF_INLINE_LAMBDA { to_channels_last(from, tile, s.o, registers, places.get(), y.data); });
      }
      return;
    }
    const bool whole = band.row == y.w && band.columns == y.w && phases == 1;
    const Scratch<C> line(phases * registers * L);
    for (int64_t o = 0; o < s.o; ++o, from += tile) {
      outline<B>([&]() FF_INLINE_LAMBDA {
        for (int64_t phase = 0; phase < phases; ++phase) {
          C* to = line.get() + phase * registers * L;
          for (int64_t p = 0; p < registers * L; p += L) {
            store<B>(to + p, load<B>(from + phase * phase_step + p / tile * tile * s.o + p % tile));
          }
        }
        for (int64_t k = 0; k < g.segments; ++k) {
          T* image = y.data + (g.image(unit, k) * y.channels + channel + o) * y.h * y.w;
          for (int64_t phase_row = 0; phase_row < s.step[0]; ++phase_row) {
            const int64_t rows = rows_of(k, phase_row), first = g.first_row(unit, k) * s.step[0] + phase_row;
            const C* at = line.get() + phase_row * s.step[1] * registers * L + k * band.columns;
            for (int64_t row = 0; row < (whole ? std::min<int64_t>(rows, 1) : rows); ++row) {
              to_rows(at + row * band.row, registers * L, s.step[1], whole ? rows * y.w : y.w,
                      image + (first + row * s.step[0]) * y.w);
            }
          }
        }
      });
    }
  }

  // to[places[p] + c] = from[p / tile][c][p % tile] of all pixels p that have a place.
  FF_INLINE static void to_channels_last(const C* from, int64_t tile, int64_t channels, int64_t registers,
                                         const int64_t* places, T* to) {
    for (int64_t r = 0; r < registers; ++r, places += L) {
      const C* at = from + r * L / tile * tile * channels + r * L % tile;
      bool all = true, some = false;
      for (int l = 0; l < L; ++l) all &= places[l] >= 0, some |= places[l] >= 0;
      if (!some) continue;
      int64_t c = 0;
      for (; c + L <= channels; c += L) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(at + (c + l) * tile);
        transpose_from<1, L>(lines);
        if (all) {
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(to + places[l] + c, lines[l]);
        } else {
          for (int l = 0; l < L; ++l) {
            if (places[l] >= 0) store<B>(to + places[l] + c, lines[l]);
          }
        }
      }
      for (; c < channels; ++c) {
        for (int l = 0; l < L; ++l) {
          if (places[l] >= 0) to[places[l] + c] = from_compute<T>(at[c * tile + l]);
        }
      }
    }
  }

  // n elements of a row, made of those of `step` phases.
  FF_INLINE static void to_rows(const C* from, int64_t phase_step, int64_t step, int64_t n, T* to) {
    int64_t j = 0;
    if (step == 1) {
      for (; j + L <= n; j += L) store<B>(to + j, load<B>(from + j));
      return store_some(from + j, n - j, to + j);
    }
    if (step == 2) {
      for (; j + 2 * L <= n; j += 2 * L) {
        const V a = load<B>(from + j / 2), b = load<B>(from + phase_step + j / 2);
        store<B>(to + j, interleaved<false>(a, b, std::make_integer_sequence<int, L>{}));
        store<B>(to + j + L, interleaved<true>(a, b, std::make_integer_sequence<int, L>{}));
      }
    }
    for (; j < n; ++j) to[j] = from_compute<T>(from[j % step * phase_step + j / step]);
  }

  // to[p][c] = from[c][p]
  FF_INLINE static void to_channels_last(const C* from, int64_t step, int64_t channels, int64_t pixels, T* to,
                                         int64_t to_step) {
    for (int64_t p = 0; p < pixels; p += L) {
      const int64_t count = std::min<int64_t>(L, pixels - p);
      int64_t c = 0;
      for (; c + L <= channels; c += L) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(from + (c + l) * step + p);
        transpose_from<1, L>(lines);
        if (count == L) {
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(to + (p + l) * to_step + c, lines[l]);
        } else {
          for (int l = 0; l < count; ++l) store<B>(to + (p + l) * to_step + c, lines[l]);
        }
      }
      for (; c < channels; ++c) {
        for (int64_t l = 0; l < count; ++l) {
          to[(p + l) * to_step + c] = from_compute<T>(from[c * step + p + l]);
        }
      }
    }
  }
};

}  // namespace fastfact
