// What the factored convolutions share: activations packed with images in the lanes, and the tile kernels on them.
//
// A packed image is [row][channel][column][lane]: each lane is another image of the batch or, where the batch does not
// fill the lanes, another strip of rows of an image. Columns are stored by their phase of the stride, so that
// neighbouring outputs always read neighbouring columns, and every tap is one offset for all pixels of a tile.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "factored_conv.h"
#include "vec.h"

namespace fastfact {

constexpr int kTileColumns = 8;

// A batch of images in memory.
template <class T>
struct Images {
  T* data;
  int64_t n, channels, h, w;
  bool channels_last;
};

// A convolution of stride `stride` as the tile kernels run it, from `i` to `o` channels of each group. Its taps are any
// set of places (row, column) relative to the first pixel an output reads, which is at output · stride − origin. Output
// (row, column) is stored at (row, column) · step + first of the output images.
struct Geometry {
  int64_t n, groups, i, o, h, w, oh, ow;
  int64_t stride[2], origin[2], reach[2], step[2], first[2];
  std::vector<int64_t> tap, row, column;  // the kernel's taps in use, and their places
};

// The forward convolution.
inline Geometry geometry(const Conv& c) {
  Geometry s{c.n, c.groups, c.i, c.o, c.h, c.w, c.oh, c.ow, {}, {}, {}, {1, 1}, {0, 0}, {}, {}, {}};
  const int64_t kernel[2] = {c.kh, c.kw};
  for (int d = 0; d < 2; ++d) {
    s.stride[d] = c.stride[d], s.origin[d] = c.padding[d], s.reach[d] = (kernel[d] - 1) * c.dilation[d];
  }
  for (int64_t k = 0; k < c.kh * c.kw; ++k) {
    s.tap.push_back(k), s.row.push_back(k / c.kw * c.dilation[0]), s.column.push_back(k % c.kw * c.dilation[1]);
  }
  return s;
}

// The part of the transposed convolution that makes pixels (row, column) · stride + phase of dx, from dy.
inline Geometry transposed(const Conv& c, int64_t phase_row, int64_t phase_column) {
  Geometry s{c.n, c.groups, c.o, c.i, c.oh, c.ow, 0, 0, {1, 1}, {}, {}, {}, {phase_row, phase_column}, {}, {}, {}};
  const int64_t kernel[2] = {c.kh, c.kw}, size[2] = {c.h, c.w};
  std::vector<int64_t> taps[2], places[2];
  for (int d = 0; d < 2; ++d) {
    int64_t low = 0, high = 0;
    for (int64_t k = 0; k < kernel[d]; ++k) {
      const int64_t away = s.first[d] + c.padding[d] - k * c.dilation[d];
      if (away % c.stride[d]) continue;
      const int64_t place = away / c.stride[d];
      low = places[d].empty() ? place : std::min(low, place), high = places[d].empty() ? place : std::max(high, place);
      taps[d].push_back(k), places[d].push_back(place);
    }
    for (int64_t& place : places[d]) place -= low;
    s.origin[d] = -low, s.reach[d] = high - low, s.step[d] = c.stride[d];
    (d ? s.ow : s.oh) = size[d] > s.first[d] ? ceil_div(size[d] - s.first[d], c.stride[d]) : 0;
  }
  for (size_t y = 0; y < taps[0].size(); ++y) {
    for (size_t x = 0; x < taps[1].size(); ++x) {
      s.tap.push_back(taps[0][y] * c.kw + taps[1][x]), s.row.push_back(places[0][y]), s.column.push_back(places[1][x]);
    }
  }
  return s;
}

// Where the lanes' pixels are, and how a packed image is laid out.
struct Grid {
  int64_t lanes, strips, strip_rows;  // strips of an image, output rows of a strip
  int64_t blocks;                     // of `lanes` strips
  int64_t tile_rows, bands;           // a band is tile_rows output rows of a strip
  int64_t columns;                    // output columns, in whole tiles
  int64_t stride, phase, width;       // packed columns: of one phase of the stride, of all
  int64_t channel, row;               // elements from one packed channel, row to the next
  int64_t band_rows;                  // packed rows a band reads
  int64_t packed_column(int64_t column) const {
    return stride == 1 ? column * lanes : (column % stride * phase + column / stride) * lanes;
  }
};

inline Grid make_grid(const Geometry& s, int64_t lanes, int64_t tile_rows) {
  Grid g{};
  g.lanes = lanes, g.tile_rows = tile_rows, g.stride = s.stride[1];
  double best = 0;
  for (int64_t strips = 1; strips <= std::max<int64_t>(1, std::min(s.oh, lanes)); ++strips) {
    const int64_t rows = ceil_div(s.oh, strips), blocks = ceil_div(s.n * strips, lanes);
    const double work = double(blocks) * ceil_div(rows, tile_rows) * (strips > 1 ? 1.03 : 1);
    if (strips == 1 || work < best) best = work, g.strips = strips;
  }
  g.strip_rows = ceil_div(s.oh, g.strips);
  g.blocks = ceil_div(s.n * g.strips, lanes);
  g.bands = ceil_div(g.strip_rows, tile_rows);
  g.columns = ceil_div(s.ow, kTileColumns) * kTileColumns;
  g.phase = std::max(g.columns + s.reach[1] / g.stride, ceil_div(std::max<int64_t>(s.origin[1], 0) + s.w, g.stride));
  g.width = g.phase * g.stride;
  g.channel = g.width * lanes;
  g.row = g.channel * s.i;
  g.band_rows = (tile_rows - 1) * s.stride[0] + s.reach[0] + 1;
  return g;
}

// How the rows of a strip of input are found: strip k begins at row k · strip_step − origin; rows from `limit` on, and
// those outside the image, are zeros.
struct Source {
  int64_t strips, strip_step, limit, origin[2], channel, channels;
};

// Swaps lanes so that, after all distances D = 1, 2, 4 …, a square of registers is transposed.
template <int D, class V, int... lane>
FF_INLINE void exchange(V& a, V& b, std::integer_sequence<int, lane...>) {
  constexpr int n = sizeof...(lane);
#ifdef __clang__
  const V low = __builtin_shufflevector(a, b, (lane & D ? n + lane - D : lane)...);
  b = __builtin_shufflevector(a, b, (lane & D ? n + lane : lane + D)...);
#else
  using Index = typename VecOf<std::conditional_t<sizeof(a[0]) == 8, int64_t, int32_t>, sizeof(V)>::Type;
  const V low = __builtin_shuffle(a, b, Index{(lane & D ? n + lane - D : lane)...});
  b = __builtin_shuffle(a, b, Index{(lane & D ? n + lane : lane + D)...});
#endif
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

// Pairwise fold at distance D: lane i of the result holds a[i] + a[i + D] or b[i] + b[i − D].
template <int D, class V, int... lane>
FF_INLINE V folded(V a, V b, std::integer_sequence<int, lane...> lanes) {
  exchange<D>(a, b, lanes);
  return a + b;
}

// Lane i of the result is the sum over the lanes ≡ i (mod Span) of row(first + i), for i < Span; for Span = all lanes,
// the sum of row(first + i).
template <int Span, class V, class Row>
FF_INLINE V sums_of_rows(Row& row, int first) {
  if constexpr (Span == 1) {
    return row(first);
  } else {
    constexpr int n = sizeof(V) / sizeof(V{}[0]);
    const V a = sums_of_rows<Span / 2, V>(row, first), b = sums_of_rows<Span / 2, V>(row, first + Span / 2);
    return folded<Span / 2>(a, b, std::make_integer_sequence<int, n>{});
  }
}

template <class T, int B>
struct Tiles {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr int kRows = B == 64 ? 2 : 1;  // of a tile of the sparse kernel, 8 columns wide
  static constexpr int kAhead = 4;
  static constexpr int kM = B == 64 ? 6 : 3;  // output channels × 4 pixels of the matrix product

  // Registers from lane[j] + at, transposed: out[e] holds element at + e of all lanes. What lies `ahead` is prefetched;
  // the lanes are too many streams for the hardware to follow.
  FF_INLINE static void gather(const T* const* lane, int64_t at, int64_t ahead, V* out) {
#pragma GCC unroll 16
    for (int j = 0; j < L; ++j) {
      __builtin_prefetch(lane[j] + at + ahead);
      out[j] = load<B>(lane[j] + at);
    }
    transpose_from<1, L>(out);
  }

  // The same for `count` < L elements, or where a lane is null (reads as zeros).
  FF_INLINE static void gather_some(const T* const* lane, int64_t at, int64_t count, V* out) {
    alignas(64) C buffer[L][L];
    for (int j = 0; j < L; ++j) {
      for (int64_t e = 0; e < L; ++e) buffer[j][e] = lane[j] && e < count ? to_compute(lane[j][at + e]) : C(0);
    }
    for (int j = 0; j < L; ++j) std::memcpy(&out[j], buffer[j], B);
    transpose_from<1, L>(out);
  }

  // Packs rows [first, last) of the strips of block `block`; `to` is packed row `first`. Columns beyond the image must
  // be zero already.
  FF_INLINE static void pack(const Images<const T>& x, const Source& s, const Grid& g, int64_t block, int64_t first,
                             int64_t last, C* to) {
    const int64_t plane = x.h * x.w, skip = std::max<int64_t>(0, -s.origin[1]);
    int64_t image[L], top[L];
    for (int j = 0; j < L; ++j) {
      const int64_t strip = block * L + j;
      image[j] = strip / s.strips < x.n ? strip / s.strips : -1;
      top[j] = strip % s.strips * s.strip_step - s.origin[0];
    }
    const T* lane[L];
    V regs[L];
    C* column[L];
    for (int64_t row = first; row < last;) {
      bool all = true, any = false;
      for (int j = 0; j < L; ++j) {
        const int64_t y = top[j] + row;
        const bool valid = image[j] >= 0 && y >= 0 && y < x.h && row < s.limit;
        all &= valid, any |= valid;
        lane[j] = !valid            ? nullptr
                  : x.channels_last ? x.data + (image[j] * plane + y * x.w) * x.channels + s.channel
                                    : x.data + (image[j] * x.channels + s.channel) * plane + y * x.w;
      }
      int64_t rows = 1;
      if (!any) {
        for (int64_t i = 0; i < s.channels; ++i) {
          std::memset(static_cast<void*>(to + i * g.channel), 0, g.width * L * sizeof(C));
        }
      } else if (x.channels_last) {
        for (int64_t at = skip; at < x.w; ++at) {
          C* out = to + g.packed_column(at + s.origin[1]);
          const int64_t base = at * x.channels;
          for (int64_t i = 0; i < s.channels; i += L) {
            const int64_t count = std::min<int64_t>(L, s.channels - i);
            if (all && count == L) {
              gather(lane, base + i, kAhead * L, regs);
#pragma GCC unroll 16
              for (int e = 0; e < L; ++e) std::memcpy(out + (i + e) * g.channel, &regs[e], B);
            } else {
              gather_some(lane, base + i, count, regs);
              for (int e = 0; e < count; ++e) std::memcpy(out + (i + e) * g.channel, &regs[e], B);
            }
          }
        }
      } else {
        // Rows shorter than a register are taken together with those that follow in memory.
        if (s.strips == 1 && x.w < L) {
          rows = std::min({last - row, x.h - (top[0] + row), s.limit - row, ceil_div(L, x.w)});
        }
        const int64_t run = rows * x.w;
        C cropped[L];
        for (int64_t at = 0; at < run; at += L) {
          const int64_t count = std::min<int64_t>(L, run - at);
          for (int64_t e = 0; e < count; ++e) {
            const int64_t y = (at + e) / x.w, place = at + e - y * x.w;
            column[e] = place < skip ? nullptr : to + y * g.row + g.packed_column(place + s.origin[1]);
          }
          for (int64_t i = 0; i < s.channels; ++i) {
            if (all && count == L) {
              gather(lane, i * plane + at, kAhead * plane, regs);
#pragma GCC unroll 16
              for (int e = 0; e < L; ++e) std::memcpy(column[e] ? column[e] + i * g.channel : cropped, &regs[e], B);
            } else {
              gather_some(lane, i * plane + at, count, regs);
              for (int e = 0; e < count; ++e) {
                if (column[e]) std::memcpy(column[e] + i * g.channel, &regs[e], B);
              }
            }
          }
        }
      }
      row += rows, to += rows * g.row;
    }
  }

  // Writes a band [channel][tile_rows][columns][lane] of s.o channels to the images y, from channel `channel`.
  FF_INLINE static void unpack(const Geometry& s, const Grid& g, const C* band, const C* bias, int64_t block,
                               int64_t channel, int64_t band_index, const Images<T>& y) {
    const int64_t plane = y.h * y.w, step = g.tile_rows * g.columns * L;
    T* lane[L];
    int64_t rows[L];
    bool all = true;
    for (int j = 0; j < L; ++j) {
      const int64_t strip = block * L + j, image = strip / g.strips;
      const int64_t top = band_index * g.tile_rows, row = strip % g.strips * g.strip_rows + top;
      rows[j] = image < s.n ? std::max<int64_t>(0, std::min({g.tile_rows, g.strip_rows - top, s.oh - row})) : 0;
      all &= rows[j] == g.tile_rows;
      const int64_t pixel = (row * s.step[0] + s.first[0]) * y.w + s.first[1];
      lane[j] = rows[j] == 0      ? nullptr
                : y.channels_last ? y.data + (image * plane + pixel) * y.channels + channel
                                  : y.data + (image * y.channels + channel) * plane + pixel;
    }
    V regs[L];
    if (y.channels_last) {
      for (int64_t row = 0; row < g.tile_rows; ++row) {
        for (int64_t column = 0; column < s.ow; ++column) {
          const C* from = band + (row * g.columns + column) * L;
          const int64_t base = (row * s.step[0] * y.w + column * s.step[1]) * y.channels;
          for (int64_t o = 0; o < s.o; o += L) {
            const int count = int(std::min<int64_t>(L, s.o - o));
            if (count == L) {
#pragma GCC unroll 16
              for (int e = 0; e < L; ++e) std::memcpy(&regs[e], from + (o + e) * step, B);
              if (bias) {
#pragma GCC unroll 16
                for (int e = 0; e < L; ++e) regs[e] += bias[o + e];
              }
            } else {
              for (int e = 0; e < L; ++e) {
                regs[e] = V{};
                if (e < count) std::memcpy(&regs[e], from + (o + e) * step, B);
                if (e < count && bias) regs[e] += bias[o + e];
              }
            }
            transpose_from<1, L>(regs);
            if (all && count == L) {
#pragma GCC unroll 16
              for (int j = 0; j < L; ++j) {
                __builtin_prefetch(lane[j] + base + o + kAhead * L, 1);
                store<B>(lane[j] + base + o, regs[j]);
              }
            } else {
              for (int j = 0; j < L; ++j) {
                if (row < rows[j]) store_some(lane[j] + base + o, count, 1, regs[j]);
              }
            }
          }
        }
      }
      return;
    }
    const bool dense = s.step[0] == 1 && s.step[1] == 1, whole = dense && g.columns == y.w;
    const int64_t run = whole ? g.tile_rows * s.ow : s.ow;
    for (int64_t o = 0; o < s.o; ++o) {
      const C add = bias ? bias[o] : C(0);
      for (int64_t row = 0; row < (whole ? 1 : g.tile_rows); ++row) {
        const C* from = band + o * step + row * g.columns * L;
        for (int64_t at = 0; at < run; at += L) {
          const int64_t to = o * plane + row * s.step[0] * y.w + at * s.step[1];
#pragma GCC unroll 16
          for (int e = 0; e < L; ++e) {
            std::memcpy(&regs[e], from + (at + e) * L, B);
            regs[e] += add;
          }
          transpose_from<1, L>(regs);
          if (all && dense && at + L <= run) {
#pragma GCC unroll 16
            for (int j = 0; j < L; ++j) {
              __builtin_prefetch(lane[j] + to + kAhead * plane, 1);
              store<B>(lane[j] + to, regs[j]);
            }
          } else {
            for (int j = 0; j < L; ++j) {
              const int64_t left = whole ? rows[j] * s.ow - at : row < rows[j] ? s.ow - at : 0;
              if (left > 0) store_some(lane[j] + to, std::min<int64_t>(L, left), s.step[1], regs[j]);
            }
          }
        }
      }
    }
  }

  FF_INLINE static void store_some(T* to, int64_t count, int64_t step, V x) {
    if (count == L && step == 1) return store<B>(to, x);
    for (int64_t e = 0; e < count; ++e) to[e * step] = from_compute<T>(x[e]);
  }

  // t[channel][pixel] = Σ_tap u[tap] · x[channel][pixel + tap] for a tile of kRows × 8 pixels. The rows of t are
  // `t_row` apart, and pixels 4 to 7 of a row `half` after the others.
  FF_INLINE static void depthwise(const C* x, int64_t x_row, int64_t x_channel, int64_t channels, const C* u,
                                  const int64_t* taps, int64_t count, C* t, int64_t t_row, int64_t t_channel,
                                  int64_t half) {
    for (int64_t i = 0; i < channels; ++i, x += x_channel, t += t_channel) {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        V sums[kTileColumns]{};
        for (int64_t tap = 0; tap < count; ++tap) {
          const C* from = x + r * x_row + taps[tap];
          const V weight = u[tap] - V{};
#pragma GCC unroll 8
          for (int p = 0; p < kTileColumns; ++p) sums[p] += weight * load<B>(from + p * L);
        }
#pragma GCC unroll 8
        for (int p = 0; p < kTileColumns; ++p) store<B>(t + r * t_row + p / 4 * half + p % 4 * L, sums[p]);
      }
    }
  }

  // y[m][4 pixels] = Σ_k v[k][m] t[k][4 pixels] for M output channels.
  template <int M>
  FF_INLINE static void product(const C* v, const C* t, int64_t t_channel, int64_t depth, C* y, int64_t y_channel) {
    V sums[M][4]{};
    for (int64_t k = 0; k < depth; ++k, v += M, t += t_channel) {
      V x[4];
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) x[p] = load<B>(t + p * L);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const V weight = v[m] - V{};
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) sums[m][p] += weight * x[p];
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) store<B>(y + m * y_channel + p * L, sums[m][p]);
    }
  }

  // v is packed as [channels / kM][depth][kM], the last block narrower.
  FF_INLINE static void products(const C* v, int64_t channels, const C* t, int64_t t_channel, int64_t depth, C* y,
                                 int64_t y_channel) {
    int64_t o = 0;
    for (; o + kM <= channels; o += kM) product<kM>(v + o * depth, t, t_channel, depth, y + o * y_channel, y_channel);
    v += o * depth, y += o * y_channel;
    switch (channels - o) {
      case 1:
        return product<1>(v, t, t_channel, depth, y, y_channel);
      case 2:
        return product<2>(v, t, t_channel, depth, y, y_channel);
      case 3:
        if constexpr (kM > 3) return product<3>(v, t, t_channel, depth, y, y_channel);
        break;
      case 4:
        if constexpr (kM > 4) return product<4>(v, t, t_channel, depth, y, y_channel);
        break;
      case 5:
        if constexpr (kM > 5) return product<5>(v, t, t_channel, depth, y, y_channel);
        break;
    }
  }

  // y[o][pixel] += Σ_nz values[nz] · x[offsets[nz] + pixel] over the nonzeros starts[o] … starts[o + 1] of each output
  // channel, for a tile of kRows × 8 pixels.
  FF_INLINE static void sparse(const C* x, int64_t x_row, const int32_t* offsets, const C* values,
                               const int32_t* starts, int64_t channels, C* y, int64_t y_row, int64_t y_channel) {
    for (int64_t o = 0; o < channels; ++o, y += y_channel) {
      int32_t nz = starts[o];
      const int32_t end = starts[o + 1];
      if (nz == end) continue;
      V sums[kRows][kTileColumns];
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kTileColumns; ++p) sums[r][p] = load<B>(y + r * y_row + p * L);
      }
      do {
        const C* from = x + offsets[nz];
        const V weight = values[nz] - V{};
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int p = 0; p < kTileColumns; ++p) sums[r][p] += weight * load<B>(from + p * L);
          from += x_row;
        }
      } while (++nz < end);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kTileColumns; ++p) store<B>(y + r * y_row + p * L, sums[r][p]);
      }
    }
  }

  // grads[nz] += Σ_pixel y[o][pixel] · x[offsets[nz] + pixel]: the gradient of `values` in `sparse`, for the same tile.
  FF_INLINE static void sampled(const C* x, int64_t x_row, const int32_t* offsets, const int32_t* starts,
                                int64_t channels, const C* y, int64_t y_row, int64_t y_channel, C* grads) {
    for (int64_t o = 0; o < channels; ++o, y += y_channel) {
      int32_t nz = starts[o];
      const int32_t end = starts[o + 1];
      if (nz == end) continue;
      V dy[kRows][kTileColumns];
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < kTileColumns; ++p) dy[r][p] = load<B>(y + r * y_row + p * L);
      }
      auto row = [&](int n) __attribute__((always_inline)) {
        const C* from = x + offsets[nz + n];
        V sums[2]{};
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int p = 0; p < kTileColumns; ++p) sums[p % 2] += dy[r][p] * load<B>(from + r * x_row + p * L);
        }
        return sums[0] + sums[1];
      };
      for (; nz + L <= end; nz += L) store<B>(grads + nz, load<B>(grads + nz) + sums_of_rows<L, V>(row, 0));
      for (; nz + 4 <= end; nz += 4) {
        V four = sums_of_rows<4, V>(row, 0);
        for (int n = 0; n < 4; ++n) {
          C sum = 0;
          for (int lane = n; lane < L; lane += 4) sum += four[lane];
          grads[nz + n] += sum;
        }
      }
      for (; nz < end; ++nz) grads[nz] += sum_lanes(row(0));
    }
  }

  // The gradient of v, in blocks of kDotRows × kDotColumns = one register: [o / kDotRows][k / kDotColumns][lane], lane
  // (m, n) += Σ_pixel y[m][pixel] · t[n][pixel]. Channels come in whole blocks, `pixels` registers each.
  static constexpr int kDotRows = L >= 8 ? 4 : 2, kDotColumns = L / kDotRows;
  FF_INLINE static void dots(const C* y, int64_t outputs, const C* t, int64_t depth, int64_t pixels, C* grad) {
    for (int64_t o = 0; o < outputs; o += kDotRows) {
      for (int64_t k = 0; k < depth; k += kDotColumns, grad += L) {
        const C *rows = y + o * pixels * L, *columns = t + k * pixels * L;
        V sums[kDotRows][kDotColumns]{};
        for (int64_t p = 0; p < pixels; ++p, rows += L, columns += L) {
          V right[kDotColumns];
#pragma GCC unroll 4
          for (int n = 0; n < kDotColumns; ++n) right[n] = load<B>(columns + n * pixels * L);
#pragma GCC unroll 4
          for (int m = 0; m < kDotRows; ++m) {
            const V left = load<B>(rows + m * pixels * L);
#pragma GCC unroll 4
            for (int n = 0; n < kDotColumns; ++n) sums[m][n] += left * right[n];
          }
        }
        auto row = [&](int n) __attribute__((always_inline)) { return sums[n / kDotColumns][n % kDotColumns]; };
        store<B>(grad, load<B>(grad) + sums_of_rows<L, V>(row, 0));
      }
    }
  }

  // grads[tap] (lane by lane) += Σ_channel Σ_pixel s[channel][pixel] · x[channel][pixel + tap]: the gradient of u in
  // `depthwise`, for the same pixels.
  FF_INLINE static void correlate(const C* x, int64_t x_channel, int64_t channels, const C* s, int64_t s_channel,
                                  const int64_t* taps, int64_t count, C* grads) {
    for (int64_t i = 0; i < channels; ++i, x += x_channel, s += s_channel) {
      V weights[kTileColumns];
#pragma GCC unroll 8
      for (int p = 0; p < kTileColumns; ++p) weights[p] = load<B>(s + p * L);
      for (int64_t tap = 0; tap < count; ++tap) {
        const C* from = x + taps[tap];
        V sums[2] = {load<B>(grads + tap * L), V{}};
#pragma GCC unroll 8
        for (int p = 0; p < kTileColumns; ++p) sums[p % 2] += weights[p] * load<B>(from + p * L);
        store<B>(grads + tap * L, sums[0] + sums[1]);
      }
    }
  }
};

// The nonzeros of μ in the order in which the tile kernels take them: [group][block of input channels][output channel].
// The offsets of one block's nonzeros stay within what L1 holds of a tile's input.
struct Plan {
  int64_t block, blocks;                               // input channels of a block, blocks of a group
  std::unique_ptr<int32_t[]> offsets, starts, source;  // starts [groups][blocks][o + 1], source: which nonzero
  const int32_t* start(const Geometry& s, int64_t group, int64_t k) const {
    return starts.get() + (group * blocks + k) * (s.o + 1);
  }
};

// `kernel` is the number of taps of μ. With `swapped`, s goes from the output channels of μ to its input channels.
inline Plan make_plan(const Geometry& s, const Grid& g, const Sparse& mu, int64_t kernel, bool swapped,
                      int64_t tile_rows) {
  Plan plan{};
  if (!mu.count) return plan;
  const int64_t rows = swapped ? s.i : s.o, inner = swapped ? s.o : s.i, columns = inner * kernel;
  const int64_t tile = ((tile_rows - 1) * s.stride[0] + s.reach[0] + 1) *
                       ((kTileColumns - 1) * s.stride[1] + s.reach[1] + 1) * g.lanes * 4;
  const double per_channel = double(mu.count) / (s.groups * s.o * s.i);
  plan.block = std::max<int64_t>({1, 32768 / tile, std::min<int64_t>(81920 / tile, int64_t(8 / per_channel))});
  plan.block = std::min(plan.block, s.i);
  plan.blocks = ceil_div(s.i, plan.block);
  const int64_t keys = s.groups * plan.blocks * (s.o + 1);
  plan.offsets.reset(new int32_t[mu.count]), plan.source.reset(new int32_t[mu.count]);
  plan.starts.reset(new int32_t[keys]());
  // For each column of a row of μ: its offset and key, without the part that depends on the row; −1: not a tap of s.
  const std::unique_ptr<int32_t[]> offset(new int32_t[columns]), key(new int32_t[columns]), cursor(new int32_t[keys]);
  for (int64_t k = 0; k < columns; ++k) {
    const auto found = std::find(s.tap.begin(), s.tap.end(), k % kernel);
    offset[k] = -1;
    if (found == s.tap.end()) continue;
    const int64_t at = found - s.tap.begin(), i = k / kernel;
    offset[k] = int32_t(s.row[at] * g.row + g.packed_column(s.column[at]) + (swapped ? 0 : i * g.channel));
    key[k] = int32_t(swapped ? i : i / plan.block * (s.o + 1));
  }
  auto each = [&](auto&& take) {
    int64_t nz = 0;
    for (int64_t row = 0; row < s.groups * rows; ++row) {
      const int64_t group = row / rows, r = row % rows, first = row * columns;
      const int64_t key_of_row = (group * plan.blocks + (swapped ? r / plan.block : 0)) * (s.o + 1) + (swapped ? 0 : r);
      const int64_t offset_of_row = swapped ? r * g.channel : 0;
      for (; nz < mu.count && mu.index[nz] < first + columns; ++nz) {
        const int64_t k = mu.index[nz] - first;
        if (offset[k] >= 0) take(nz, key_of_row + key[k], offset_of_row + offset[k]);
      }
    }
  };
  each([&](int64_t, int64_t at, int64_t) { ++plan.starts[at]; });
  int32_t sum = 0;
  for (int64_t at = 0; at < keys; ++at) {
    const int32_t n = plan.starts[at];
    plan.starts[at] = cursor[at] = sum;
    sum += n;
  }
  each([&](int64_t nz, int64_t at, int64_t place) {
    const int32_t to = cursor[at]++;
    plan.offsets[to] = int32_t(place), plan.source[to] = int32_t(nz);
  });
  return plan;
}

// v [rank, groups·o, i] for Tiles::products, from s.i to s.o channels: [group][s.o / width][rank · s.i][width].
template <class T>
void pack_v(const Geometry& s, const T* v, int64_t rank, bool swapped, int64_t width, Compute<T>* to) {
  const int64_t outputs = s.groups * (swapped ? s.i : s.o), inputs = swapped ? s.o : s.i;
  for (int64_t group = 0; group < s.groups; ++group) {
    for (int64_t o = 0; o < s.o; o += width) {
      const int64_t m = std::min(width, s.o - o);
      for (int64_t r = 0; r < rank; ++r) {
        const T* from = v + (r * outputs + group * (swapped ? s.i : s.o)) * inputs;
        for (int64_t i = 0; i < s.i; ++i) {
          for (int64_t k = 0; k < m; ++k) {
            *to++ = to_compute(swapped ? from[i * inputs + o + k] : from[(o + k) * inputs + i]);
          }
        }
      }
    }
  }
}

}  // namespace fastfact
