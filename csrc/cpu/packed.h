// Packed images of the factored convolutions, and the way into and out of them.
//
// Images are cut into segments, all of one size, and each lane of the registers has a segment of its own: a whole image
// where there are many, a part of one where there are few. A register then is one pixel of all segments, packed with as
// much around the segment as the taps read, zeros outside the image, and a tap is one offset in whole registers for all
// outputs of a channel.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "factored_conv.h"
#include "pairs.h"
#include "transpose.h"
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

// How outputs are cut. A register has an output of each of so many segments, parts of images that are cut alike; a unit
// of work is a block of segments, one a lane, or a band of their rows.
struct Grid {
  int64_t n, down, across;  // images; segments of an image, one below the other and side by side
  int64_t height, width;    // outputs of a segment
  int64_t lanes, blocks;
  int64_t rows, bands;  // rows of a band
  struct Segment {
    int64_t image, row, column;  // −1: there is none; its first output
  };

  int64_t units() const { return blocks * bands; }
  // Rows of a unit that are its own.
  int64_t own(int64_t unit) const { return std::min(rows, height - unit % bands * rows); }
  Segment segment(int64_t unit, int64_t lane) const {
    const int64_t index = unit / bands * lanes + lane, image = index / (down * across);
    return {image < n ? image : -1, index / across % down * height + unit % bands * rows, index % across * width};
  }
};

// A tile of outputs that the kernels hold in registers, and how many registers the tiles before it have.
struct Tile {
  int64_t rows, columns, row, column, first;
  int64_t registers() const { return rows * columns; }
  // Whether it is the last one of a part.
  bool ends(const Tile& part) const {
    return row + rows == part.row + part.rows && column + columns == part.column + part.columns;
  }
};

constexpr int64_t kTileColumns = 10;
inline constexpr int tile_registers(int bytes) { return bytes == 64 ? 20 : 10; }

// Rows of a tile, 4, 2 or 1, so that they are few, and how many those are.
inline std::pair<int64_t, int64_t> tile_rows(int64_t rows, int64_t columns, int64_t most) {
  std::pair<int64_t, int64_t> best{0, INT64_MAX};
  for (int64_t r = 4; r > 0; r /= 2) {
    const int64_t pieces = ceil_div(columns, std::min(most / r, kTileColumns));
    const int64_t tiles = pieces * (rows / r + rows % r / 2 + rows % r % 2);
    if (tiles < best.second) best = {r, tiles};
  }
  return best;
}

// Outputs cut into tiles, and where they are.
struct Tiling {
  struct Place {
    int64_t first, index, registers;  // registers before the tile, of the tile before this one, and of the tile
  };
  int64_t rows, columns;
  std::vector<Tile> tiles;
  std::vector<Place> places;  // [row][column]
  int64_t registers() const { return rows * columns; }
  // What is written to the images at once: a tile, or all of them.
  Tile part(const Tile& tile, bool by_tile) const { return by_tile ? tile : Tile{rows, columns, 0, 0, 0}; }
};

inline Tiling make_tiling(int64_t rows, int64_t columns, int64_t most) {
  Tiling out{rows, columns, {}, std::vector<Tiling::Place>(rows * columns)};
  const int64_t high = tile_rows(rows, columns, most).first;
  const int64_t pieces = ceil_div(columns, std::min(most / high, kTileColumns));
  int64_t first = 0;
  for (int64_t row = 0, r = high; row < rows; row += r) {
    while (r > rows - row) r /= 2;
    for (int64_t k = 0; k < pieces; ++k) {
      const int64_t column = columns * k / pieces, width = columns * (k + 1) / pieces - column;
      for (int64_t j = 0; j < r * width; ++j) {
        out.places[(row + j / width) * columns + column + j % width] = {first, j, r * width};
      }
      out.tiles.push_back({r, width, row, column, first});
      first += r * width;
    }
  }
  return out;
}

// Of a whole unit, and of the last band of a segment.
struct Tilings {
  Tiling whole, last;
  const Tiling& of(int64_t unit, const Grid& g) const { return g.own(unit) < g.rows ? last : whole; }
};

inline Tilings make_tilings(const Grid& g, int64_t most) {
  return {make_tiling(g.rows, g.width, most), make_tiling(g.height - (g.bands - 1) * g.rows, g.width, most)};
}

// Rows (0) or columns (1) that so many of the outputs read.
inline int64_t read_by(const Geometry& s, int d, int64_t outputs) {
  return (outputs - 1) * s.stride[d] + 1 + s.reach[d];
}

// Registers of a channel that `rows` × `columns` outputs read.
inline double packed(const Geometry& s, int64_t rows, int64_t columns) {
  return double(read_by(s, 0, rows)) * read_by(s, 1, columns);
}

// What a unit costs beside what is computed for a register of outputs.
struct Cost {
  int64_t most;     // registers of a tile
  double packing;   // to pack a register of the input
  double again;     // that a band has a register of another's
  bool contiguous;  // whether the images are: of these, a square of as many pixels of a row as lanes is packed at once
};

// Of `rows` × `columns` registers of segments of which an image has so many `across`.
inline double unit_cost(const Geometry& s, int64_t rows, int64_t columns, int64_t across, int64_t lanes, Cost cost) {
  constexpr double kTile = 3;  // registers that a tile costs beside its own
  auto squares = [&](int64_t columns) { return ceil_div(columns, lanes) * lanes; };
  double moved = packed(s, rows, columns);
  if (cost.contiguous) {
    moved = read_by(s, 0, rows) * squares(read_by(s, 1, columns)) + rows * (across > 1 ? squares(columns) : columns);
  }
  return rows * columns + kTile * tile_rows(rows, columns, cost.most).second + cost.packing * moved;
}

constexpr int64_t kUnit = 4 << 20;  // bytes of a unit that keeps its outputs, or its gradients

// kept(rows, columns): bytes of a unit that are read more than once, at most `limit` of them if a tile has no more.
// `threads`: which share blocks, at a cost, where there are fewer.
template <class Kept>
Grid make_grid(const Geometry& s, int64_t n, int64_t rows, int64_t columns, int64_t lanes, const Kept& kept,
               int64_t limit, Cost cost, int64_t threads = 1) {
  constexpr double kShared = 1.3;  // of the time of blocks of threads' own
  Grid g{};
  double best = 0;
  for (int64_t down = 1; down <= std::min(rows, lanes); ++down) {
    const int64_t height = ceil_div(rows, down);
    if ((down - 1) * height >= rows) continue;
    for (int64_t across = 1; down * across <= lanes && across <= columns; ++across) {
      const int64_t width = ceil_div(columns, across), blocks = ceil_div(n * down * across, lanes);
      if ((across - 1) * width >= columns) continue;
      auto of_unit = [&](int64_t height) { return unit_cost(s, height, width, across, lanes, cost); };
      int64_t bands = 1;
      for (int64_t band = height; bands < height && band * width > cost.most && kept(band, width) > limit;) {
        band = ceil_div(height, ++bands);
      }
      for (int64_t end = bands > 1 ? std::min(height, bands + 2) : 1; bands <= end; ++bands) {
        const int64_t band = ceil_div(height, bands), whole = height / band, rest = height % band;
        double work = whole * of_unit(band);
        if (rest) work += of_unit(rest);
        work += (whole + (rest > 0) - 1) * s.reach[0] * width * cost.again;
        work *= blocks < threads ? kShared * blocks : blocks;
        if (g.lanes && work >= best) continue;
        best = work, g = {n, down, across, height, width, lanes, blocks, band, ceil_div(height, band)};
      }
    }
  }
  return g;
}

// In more bands where threads would wait for others. Results that are summed over units change with it.
inline Grid share_out(Grid g, const Geometry& s, Cost cost, int64_t threads) {
  double least = 0;
  for (int64_t bands = g.bands, last = std::min(g.height, g.bands + threads - 1); bands <= last; ++bands) {
    const int64_t rows = ceil_div(g.height, bands), units = g.blocks * ceil_div(g.height, rows) * s.groups;
    const double time = ceil_div(units, threads) * unit_cost(s, rows, g.width, g.across, g.lanes, cost);
    if (least && time >= 0.95 * least) continue;
    least = time, g.rows = rows, g.bands = ceil_div(g.height, rows);
  }
  return g;
}

// The packed input of one channel, [row][column] registers: all rows and columns that the taps read, those of a phase
// of the stride side by side, so that from an output to the next one it is one register and one row for any stride.
struct Slab {
  int64_t stride[2], origin[2];
  std::vector<int64_t> rows, columns;        // as far from where a segment begins, its first output times the stride
  int64_t end[2];                            // the first row and column of an image beyond all that are read
  int64_t row, channel;                      // elements from one row, one channel to the next
  std::vector<std::vector<int64_t>> offset;  // of each tap of each phase of the geometry
  int64_t registers() const { return rows.size() * columns.size(); }
};

// What `count` outputs read by taps at `taps`, in the order of a slab.
inline std::vector<int64_t> rows_read(const std::vector<Taps>& phases, std::vector<int64_t> Taps::* at, int64_t stride,
                                      int64_t count) {
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (const Taps& taps : phases) {
    for (int64_t k : taps.*at) low = std::min(low, k), high = std::max(high, k + (count - 1) * stride);
  }
  std::vector<int64_t> out;
  if (low > high) return out;
  std::vector<bool> read(high - low + 1);
  for (const Taps& taps : phases) {
    for (int64_t k : taps.*at) {
      for (int64_t y = 0; y < count; ++y) read[k - low + y * stride] = true;
    }
  }
  for (int64_t phase = 0; phase < stride; ++phase) {
    for (int64_t y = phase; y <= high - low; y += stride) {
      if (read[y]) out.push_back(low + y);
    }
  }
  return out;
}

// For `rows` × `columns` outputs of a segment.
inline Slab make_slab(const Geometry& s, int64_t rows, int64_t columns, int64_t lanes) {
  Slab out{};
  for (int d = 0; d < 2; ++d) {
    out.stride[d] = s.stride[d], out.origin[d] = s.origin[d];
    out.end[d] = read_by(s, d, d ? s.ow : s.oh) - s.origin[d];
  }
  out.rows = rows_read(s.phases, &Taps::row, s.stride[0], rows);
  out.columns = rows_read(s.phases, &Taps::column, s.stride[1], columns);
  out.row = out.columns.size() * lanes;
  out.channel = (out.registers() | 1) * lanes;  // an odd number spreads the channels over the sets of the caches
  auto slot = [](const std::vector<int64_t>& of, int64_t at) {
    return std::find(of.begin(), of.end(), at) - of.begin();
  };
  for (const Taps& taps : s.phases) {
    out.offset.emplace_back();
    for (size_t k = 0; k < taps.tap.size(); ++k) {
      out.offset.back().push_back(slot(out.rows, taps.row[k]) * out.row + slot(out.columns, taps.column[k]) * lanes);
    }
  }
  return out;
}

// The registers of a slab around what segments have of their own, by the segment that has them: `down` below and
// `across` to the right of the one that they are around. Where no image has a segment they are left out.
struct Around {
  struct Place {
    int64_t at, from;  // elements from the first of a channel; in the other segment
  };
  int64_t down, across;
  std::vector<Place> places;
  int64_t away(const Grid& g) const { return down * g.across + across; }  // lanes
};

// `own`: where in a slab of stride 1 the first output of a segment is. Bands of a segment have all rows that they read.
inline std::vector<Around> around(const Grid& g, const Slab& slab, int64_t own) {
  std::vector<Around> out;
  const int64_t lanes = slab.row / slab.columns.size(), own_row = own / slab.row, own_column = own % slab.row / lanes;
  auto segments = [](int64_t at, int64_t size) { return at < 0 ? -ceil_div(-at, size) : at / size; };
  for (int64_t row = 0; row < int64_t(slab.rows.size()); ++row) {
    for (int64_t column = 0; column < int64_t(slab.columns.size()); ++column) {
      const int64_t y = slab.rows[row] - slab.rows[own_row], x = slab.columns[column] - slab.columns[own_column];
      const int64_t down = g.bands > 1 ? 0 : segments(y, g.height), across = segments(x, g.width);
      if ((!down && !across) || std::abs(down) >= g.down || std::abs(across) >= g.across) continue;
      const int64_t from = g.bands > 1 ? row : own_row + y - down * g.height;
      auto same = [&](const Around& a) { return a.down == down && a.across == across; };
      auto at = std::find_if(out.begin(), out.end(), same);
      if (at == out.end()) at = out.insert(out.end(), {down, across, {}});
      at->places.push_back(
          {row * slab.row + column * lanes, from * slab.row + (own_column + x - across * g.width) * lanes});
    }
  }
  return out;
}

// Fills the registers of a slab around what a unit's segments have of their own from other lanes: each of these
// registers is what another segment has. Lanes of segments that are not in the unit come from `edges`, registers at the
// end of each channel.
template <class C, int B>
class Surroundings {
 public:
  using V = Vec<C, B>;
  using Index = IndexVec<C, B>;
  static constexpr int L = kLanes<C, B>;

  Surroundings(const Grid& g, const Slab& slab, const std::vector<Around>& around)
      : g_(g), slab_(slab), around_(around), inside_(around.size() * L) {}

  void find(int64_t unit) {
    edges_.clear();
    const int64_t first = unit / g_.bands * L;
    for (size_t k = 0; k < around_.size(); ++k) {
      const Around& a = around_[k];
      const int64_t away = a.away(g_);
      for (int64_t lane = 0; lane < L; ++lane) {
        const int64_t index = first + lane, column = index % g_.across + a.across;
        const int64_t row = index / g_.across % g_.down + a.down;
        const bool there =
            index / (g_.across * g_.down) < g_.n && row >= 0 && row < g_.down && column >= 0 && column < g_.across;
        const bool inside = there && lane + away >= 0 && lane + away < L;
        inside_.get()[k * L + lane] = inside ? -1 : 0;
        if (!there || inside) continue;
        for (const Around::Place& place : a.places) edges_.push_back(place.at + lane);
      }
    }
  }

  // Registers of edges.
  int64_t edges() const { return ceil_div(int64_t(edges_.size()), L); }

  // The edges of so many channels of which all is known.
  void gather(C* at, int64_t channels) const {
    for (int64_t c = 0; c < channels && !edges_.empty(); ++c, at += slab_.channel) {
      C* to = at + slab_.registers() * L;
      for (int64_t from : edges_) *to++ = at[from];
      std::fill(to, at + (slab_.registers() + edges()) * L, C(0));
    }
  }

  // The registers around, of so many channels of which the others and the edges are known.
  FF_INLINE void fill(C* at, int64_t channels) const {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t c = 0; c < channels; ++c, at += slab_.channel) {
        const Integer* inside = inside_.get();
        for (const Around& a : around_) {
          Index mask;
          std::memcpy(&mask, inside, B), inside += L;
          const int64_t away = a.away(g_);
          if (away <= -L || away >= L) {
            for (const Around::Place& place : a.places) store<B>(at + place.at, V{});
            continue;
          }
          for (const Around::Place& place : a.places) {
            store<B>(at + place.at, bit_cast<V>(bit_cast<Index>(load<B>(at + place.from + away)) & mask));
          }
        }
        const C* edge = at + slab_.registers() * L;
        for (int64_t to : edges_) at[to] = *edge++;
      }
    });
  }

 private:
  using Integer = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  const Grid& g_;
  const Slab& slab_;
  const std::vector<Around>& around_;
  Scratch<Integer> inside_;     // [around][lane]: −1 where another lane has it
  std::vector<int64_t> edges_;  // where in a channel each is
};

// Registers that the edges of a unit take at the most.
inline int64_t most_edges(const Grid& g, const std::vector<Around>& around) {
  int64_t sum = 0;
  for (const Around& a : around) sum += std::min(std::abs(a.away(g)), g.lanes) * a.places.size();
  return ceil_div(sum, g.lanes);
}

template <class C>
struct Zeros : Scratch<C> {
  explicit Zeros(int64_t n) : Scratch<C>(n) { std::memset(static_cast<void*>(this->get()), 0, n * sizeof(C)); }
};

// Each of so many registers becomes two in one, itself and that of the next row; those of the last row come twice.
template <int B>
FF_INLINE void pair_rows(float* at, int64_t registers, int64_t row) {
  constexpr int L = kLanes<float, B>;
  const float* const last = at + registers * L - row;
  for (const float* const end = at + registers * L; at < end; at += L) {
    const auto two = pack_two<B>(load<B>(at), load<B>(at < last ? at + row : at));
    store<B>(at, bit_cast<Vec<float, B>>(two));
  }
}

template <class T, int B>
struct Packing {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr int64_t kLine = 64 / sizeof(C);

  // Where the inputs of a unit are, for `pack`.
  class Source {
   public:
    // Of images of groups of so many channels.
    Source(const Images<const T>& images, const Grid& grid, const Slab& slab, int64_t group_channels)
        : x_(images),
          g_(grid),
          slab_(slab),
          line_(x_.channels_last ? ceil_div(group_channels, kLine) * kLine : 0),
          at_(x_.channels_last ? slab.registers() * L : 0),
          zeros_(line_),
          tail_(x_.channels_last ? 2 * line_ + x_.channels : 0),
          height_(std::min(x_.h, slab.end[0])),
          width_(std::min(x_.w, slab.end[1])) {
      std::memset(static_cast<void*>(zeros_.get()), 0, line_ * sizeof(T));
      if (x_.channels_last) return;
      const auto [low, high] = std::minmax_element(slab.columns.begin(), slab.columns.end());
      left_ = *low, chunks_ = ceil_div(*high - *low + 1, L);
      columns_.assign(chunks_ * L, -1);
      for (size_t k = 0; k < slab.columns.size(); ++k) columns_[slab.columns[k] - left_] = k * L;
      chunk_.resize(slab.rows.size() * chunks_ * L), whole_.resize(slab.rows.size() * chunks_);
    }

    // Of a unit, from channel `channel` of the images on.
    void find(int64_t unit, int64_t channel) {
      x_.channels_last ? find_pixels(unit, channel) : find_chunks(unit, channel);
    }

    // The channels [channel, channel + count), each slab.channel elements after the one before. With `pairs`, a
    // register is two in one (`pack_two`): itself and that of the next row.
    FF_INLINE void pack(int64_t channel, int64_t count, C* to, bool pairs = false) const {
      if constexpr (std::is_same_v<T, BFloat16> && kMultipliesPairs<B>) {
        if (pairs) return pack_all<true>(channel, count, to);
      }
      pack_all<false>(channel, count, to);
    }

   private:
    template <bool Pairs>
    FF_INLINE void pack_all(int64_t channel, int64_t count, C* to) const {
      outline<B>([&]() FF_INLINE_LAMBDA {
        if (x_.channels_last) return pack_pixels<Pairs>(channel, count, to);
        for (int64_t c = 0; c < count; ++c, to += slab_.channel) {
          pack_chunks((channel + c) * x_.h * x_.w, to);
          if constexpr (Pairs) pair_rows<B>(to, slab_.registers(), slab_.row);
        }
      });
    }

    // Part of a row of an image: where its first element is, and which of its elements are inside the image.
    struct Chunk {
      int64_t from;
      int32_t low, high;
    };

    // Whole lines of the channels may be read of each pixel: outside the images of zeros, and at their end, beyond
    // which nothing may be read, of a copy.
    void find_pixels(int64_t unit, int64_t channel) {
      const T* const data = x_.data + channel;
      const int64_t size = x_.n * x_.h * x_.w * x_.channels - channel;
      const int64_t safe = size < line_ ? 0 : ((size - line_) / x_.channels + 1) * x_.channels;
      std::memset(static_cast<void*>(tail_.get()), 0, (2 * line_ + x_.channels) * sizeof(T));
      if (safe < size) std::copy(data + safe, data + size, tail_.get());
      for (int64_t lane = 0; lane < L; ++lane) {
        const Grid::Segment segment = g_.segment(unit, lane);
        const int64_t left = segment.column * slab_.stride[1] - slab_.origin[1];
        const T** to = at_.get() + lane;
        for (int64_t y : slab_.rows) {
          const int64_t row = segment.row * slab_.stride[0] - slab_.origin[0] + y;
          const bool there = segment.image >= 0 && row >= 0 && row < height_;
          const int64_t first = (segment.image * x_.h + row) * x_.w + left;
          for (int64_t x : slab_.columns) {
            const int64_t from = (first + x) * x_.channels;
            const bool inside = there && left + x >= 0 && left + x < width_;
            *to = !inside ? zeros_.get() : from < safe ? data + from : tail_.get() + (from - safe);
            to += L;
          }
        }
      }
    }

    // A square of segments and channels at a time.
    template <bool Pairs>
    FF_INLINE void pack_pixels(int64_t channel, int64_t count, C* to) const {
      const T* const* at = at_.get();
      const int64_t last = slab_.registers() - slab_.columns.size();  // the last row
      for (int64_t r = 0; r < slab_.registers(); ++r, at += L, to += L) {
        [[maybe_unused]] const T* const* next = r < last ? at + slab_.row : at;
        for (int64_t c = 0; c < count; c += L) {
          V lines[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            lines[l] = load<B>(at[l] + channel + c);
            if constexpr (Pairs) lines[l] = bit_cast<V>(pairs_of<B>(lines[l], load<B>(next[l] + channel + c)));
          }
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) __builtin_prefetch(at[l] + channel + c + count, 0, 2);  // what is packed next
          transpose_from<1, L>(lines);
          C* line = to + c * slab_.channel;
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            if constexpr (Pairs) lines[l] = bit_cast<V>(put_apart(bit_cast<Operands<Pair, B>>(lines[l])));
            if (c + l < count) store<B>(line + l * slab_.channel, lines[l]);
          }
        }
      }
    }

    void find_chunks(int64_t unit, int64_t channel) {
      Chunk* to = chunk_.data();
      first_ = 0, last_ = L;
      Grid::Segment segments[L];
      for (int lane = 0; lane < L; ++lane) segments[lane] = g_.segment(unit, lane);
      for (size_t row = 0; row < slab_.rows.size(); ++row) {
        for (int64_t k = 0; k < chunks_; ++k) {
          bool whole = true;
          for (const Grid::Segment& segment : segments) {
            const int64_t y = segment.row * slab_.stride[0] - slab_.origin[0] + slab_.rows[row];
            const int64_t x = segment.column * slab_.stride[1] - slab_.origin[1] + left_ + k * L;
            const int64_t low = std::clamp<int64_t>(-x, 0, L), high = std::clamp<int64_t>(width_ - x, low, L);
            if (segment.image < 0 || y < 0 || y >= height_ || low == high) {
              *to++ = {0, 0, 0}, whole = false;
              continue;
            }
            const int64_t from = ((segment.image * x_.channels + channel) * x_.h + y) * x_.w + x;
            first_ = std::min(first_, from), last_ = std::max(last_, from + L);
            whole &= low == 0 && high == L;
            *to++ = {from, int32_t(low), int32_t(high)};
          }
          whole_[row * chunks_ + k] = whole;
        }
      }
    }

    // A square of segments and columns at a time, of the channel that begins `base` elements on.
    FF_INLINE void pack_chunks(int64_t base, C* to) const {
      using Index = IndexVec<T, B>;
      constexpr int kSign = 8 * sizeof(C) - 1;
      Index number;
      for (int l = 0; l < L; ++l) number[l] = l;
      const bool inside = base + first_ >= 0 && base + last_ <= x_.n * x_.channels * x_.h * x_.w;
      const T* const next = x_.data + base + x_.h * x_.w;  // the channel that is packed next
      const Chunk* at = chunk_.data();
      for (size_t row = 0; row < slab_.rows.size(); ++row, to += slab_.row) {
        for (int64_t k = 0; k < chunks_; ++k, at += L) {
          V lines[L];
          if (!inside) {
            alignas(64) C block[L][L]{};
            for (int l = 0; l < L; ++l) {
              for (int64_t j = at[l].low; j < at[l].high; ++j) block[l][j] = to_compute(x_.data[base + at[l].from + j]);
            }
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) lines[l] = load<B>(block[l]);
          } else if (whole_[row * chunks_ + k]) {
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) lines[l] = load<B>(x_.data + base + at[l].from);
          } else {
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) {
              // Not two comparisons, of which the compiler makes one instruction for each lane.
              const Index mask = ((at[l].low - 1 - number) & (number - at[l].high)) >> kSign;
              lines[l] = bit_cast<V>(bit_cast<Index>(load<B>(x_.data + base + at[l].from)) & mask);
            }
          }
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) __builtin_prefetch(next + at[l].from, 0, 2);
          transpose_from<1, L>(lines);
          const int64_t* columns = columns_.data() + k * L;
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            if (columns[l] >= 0) store<B>(to + columns[l], lines[l]);
          }
        }
      }
    }

    const Images<const T>& x_;
    const Grid& g_;
    const Slab& slab_;
    const int64_t line_;    // channels of a group, in whole lines
    Scratch<const T*> at_;  // [register][lane]
    Scratch<T> zeros_, tail_;
    const int64_t height_, width_;   // of the images, of which something is read
    int64_t left_ = 0, chunks_ = 0;  // the first column that is read; chunks of a row
    std::vector<int64_t> columns_;   // where a column read goes, −1: nowhere
    std::vector<Chunk> chunk_;       // [row][chunk][lane]
    std::vector<uint8_t> whole_;     // whether all of a chunk is inside the images, in all lanes
    int64_t first_ = 0, last_ = 0;   // what is read of the first channel
  };

  // Writes `channels` channels of a part of a unit, [phase][tile][channel][registers of the tile], to the images y from
  // channel `channel` on.
  FF_INLINE static void unpack(const Geometry& s, const Grid& g, const Tiling& tiling, const Tile& part, int64_t unit,
                               const C* from, int64_t phase_step, int64_t channels, int64_t channel,
                               const Images<T>& y) {
    Grid::Segment segments[L];
    for (int lane = 0; lane < L; ++lane) {
      segments[lane] = g.segment(unit, lane);
      segments[lane].column += part.column;
    }
    from -= part.first * channels * L;
    if (!y.channels_last && g.across == 1 && part.columns == tiling.columns) {
      return outline<B>(
          [&]() FF_INLINE_LAMBDA { unpack_rows(s, segments, tiling, part, from, phase_step, channels, channel, y); });
    }
    for (int64_t row = part.row; row < part.row + part.rows; ++row) {
      for (int64_t phase = 0; phase < s.step[0]; ++phase) {
        int64_t lines[L];  // of y, −1: none
        for (int lane = 0; lane < L; ++lane) {
          const int64_t line = (segments[lane].row + row) * s.step[0] + phase;
          lines[lane] = segments[lane].image < 0 || line >= y.h ? -1 : line;
        }
        outline<B>([&]() FF_INLINE_LAMBDA {
          const C* first = from + phase * s.step[1] * phase_step;
          const Tiling::Place* places = tiling.places.data() + row * tiling.columns + part.column;
          if (y.channels_last) {
            unpack_pixels(s, segments, lines, places, part.columns, first, phase_step, channels, channel, y);
          } else {
            unpack_row(s, segments, lines, places, part.columns, first, phase_step, channels, channel, y);
          }
        });
      }
    }
  }

  FF_INLINE static void unpack_pixels(const Geometry& s, const Grid::Segment* segments, const int64_t* lines,
                                      const Tiling::Place* places, int64_t columns, const C* from, int64_t phase_step,
                                      int64_t channels, int64_t channel, const Images<T>& y) {
    for (int64_t x = 0; x < columns * s.step[1]; ++x) {
      const Tiling::Place place = places[x / s.step[1]];
      const C* at = from + x % s.step[1] * phase_step + (place.first * channels + place.index) * L;
      const int64_t step = place.registers * L;
      T* to[L];
      bool all = true, some = false;
      for (int lane = 0; lane < L; ++lane) {
        const int64_t column = segments[lane].column * s.step[1] + x;
        const bool there = lines[lane] >= 0 && column < y.w;
        to[lane] = there ? y.data + ((segments[lane].image * y.h + lines[lane]) * y.w + column) * y.channels + channel
                         : nullptr;
        all &= there, some |= there;
      }
      if (!some) continue;
      int64_t c = 0;
      for (; c + L <= channels; c += L) {
        V square[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) square[l] = load<B>(at + (c + l) * step);
        transpose_from<1, L>(square);
        if (all) {
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(to[l] + c, square[l]);
        } else {
          for (int l = 0; l < L; ++l) {
            if (to[l]) store<B>(to[l] + c, square[l]);
          }
        }
      }
      for (; c < channels; ++c) {
        for (int l = 0; l < L; ++l) {
          if (to[l]) to[l][c] = from_compute<T>(at[c * step + l]);
        }
      }
    }
  }

  FF_INLINE static void unpack_row(const Geometry& s, const Grid::Segment* segments, const int64_t* lines,
                                   const Tiling::Place* places, int64_t columns, const C* from, int64_t phase_step,
                                   int64_t channels, int64_t channel, const Images<T>& y) {
    const int64_t width = columns * s.step[1];
    for (int64_t x = 0; x < width; x += L) {
      const C* at[L];
      int64_t step[L], count[L];
      T* to[L]{};
      for (int l = 0; l < L; ++l) {
        const int64_t k = std::min(x + l, width - 1), column = segments[l].column * s.step[1] + x;
        const Tiling::Place place = places[k / s.step[1]];
        at[l] = from + k % s.step[1] * phase_step + (place.first * channels + place.index) * L;
        step[l] = place.registers * L;
        count[l] = lines[l] < 0 ? 0 : std::min(std::min(width - x, y.w - column), int64_t(L));
        if (count[l] > 0) to[l] = y.data + ((segments[l].image * y.channels + channel) * y.h + lines[l]) * y.w + column;
      }
      for (int64_t c = 0; c < channels; ++c) unpack_square(at, step, c, to, count, c * y.h * y.w);
    }
  }

  // Rows of whole images' width, which follow each other.
  FF_INLINE static void unpack_rows(const Geometry& s, const Grid::Segment* segments, const Tiling& tiling,
                                    const Tile& part, const C* from, int64_t phase_step, int64_t channels,
                                    int64_t channel, const Images<T>& y) {
    const int64_t rows = part.rows * s.step[0], pixels = rows * y.w, chunks = ceil_div(pixels, L);
    const Scratch<const C*> at(chunks * L);
    const Scratch<int64_t> step(chunks * L);
    // The last chunk has some pixels of the one before.
    auto begin = [&](int64_t k) { return std::min(k * L, std::max<int64_t>(pixels - L, 0)); };
    T* images[L];
    int64_t count[L];
    for (int l = 0; l < L; ++l) {
      const int64_t image = segments[l].image, row = std::min((segments[l].row + part.row) * s.step[0], y.h);
      images[l] = y.data + ((std::max<int64_t>(image, 0) * y.channels + channel) * y.h + row) * y.w;
      count[l] = image < 0 ? 0 : std::min(y.h - row, rows) * y.w;
    }
    for (int64_t k = 0; k < chunks; ++k) {
      for (int l = 0; l < L; ++l) {
        const int64_t pixel = std::min(begin(k) + l, pixels - 1), line = pixel / y.w, column = pixel % y.w;
        const int64_t row = part.row + line / s.step[0];
        const int64_t phase = line % s.step[0] * s.step[1] + column % s.step[1];
        const Tiling::Place place = tiling.places[row * tiling.columns + column / s.step[1]];
        at.get()[k * L + l] = from + phase * phase_step + (place.first * channels + place.index) * L;
        step.get()[k * L + l] = place.registers * L;
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t k = 0; k < chunks; ++k) {
        T* to[L];
        int64_t some[L];
        for (int l = 0; l < L; ++l) {
          to[l] = images[l] + begin(k), some[l] = std::clamp<int64_t>(count[l] - begin(k), 0, L);
          __builtin_prefetch(to[l] + (c + 1) * y.h * y.w, 1, 2);
        }
        unpack_square(at.get() + k * L, step.get() + k * L, c, to, some, c * y.h * y.w);
      }
    }
  }

  // A square of pixels, and of segments that have so many of them.
  FF_INLINE static void unpack_square(const C* const* from, const int64_t* step, int64_t c, T* const* to,
                                      const int64_t* count, int64_t away) {
    V square[L];
    bool whole = true;
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) square[l] = load<B>(from[l] + c * step[l]), whole &= count[l] == L;
    transpose_from<1, L>(square);
    if (whole) {
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<B>(to[l] + away, square[l]);
      return;
    }
    alignas(64) C block[L][L];
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) store<B>(block[l], square[l]);
    for (int l = 0; l < L; ++l) {
      if (count[l] == L) {
        store<B>(to[l] + away, load<B>(block[l]));
      } else if (count[l] > 0) {
        store_some<B>(block[l], count[l], to[l] + away);
      }
    }
  }
};

}  // namespace fastfact
