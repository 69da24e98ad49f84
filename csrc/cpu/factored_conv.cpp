// y = conv(x, Σ_r u_r ⊗ v_r + μ): the depthwise and 1×1 convolutions and the sparse one, band by band of packed input.
// dx is the same with the weights transposed, for each phase of the stride.
#include "tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kSlabBytes = 1 << 20;  // packed input a thread keeps

// The factors and μ as the tile kernels read them, for all groups; made once a call.
template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s;
  Grid grid;
  Plan plan;
  int64_t rank;
  Images<const T> x;
  Images<T> y;
  const C *u, *v, *bias, *values;  // u [rank][taps in use]
  const int64_t* taps;
};

template <class T, int B>
struct Run {
  using C = Compute<T>;
  using Ops = Tiles<T, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Prepared<T>& p, int64_t begin, int64_t end) {
    const Geometry& s = p.s;
    const Grid& g = p.grid;
    const int64_t band_step = g.tile_rows * s.stride[0], row_bytes = g.row * sizeof(C), taps = s.tap.size();
    const int64_t strip_rows = (g.bands - 1) * band_step + g.band_rows, depth = p.rank * s.i;
    const int64_t capacity = std::min(strip_rows, std::max(2 * g.band_rows, kSlabBytes / row_bytes));
    const int64_t y_row = g.columns * L, y_channel = g.tile_rows * y_row, half = 4 * L * depth;
    const Scratch<C> slab(capacity * g.row), t(2 * g.tile_rows * half), band(s.o * y_channel + L * L);
    std::memset(static_cast<void*>(slab.get()), 0, capacity * row_bytes);
    Source source{g.strips, g.strip_rows * s.stride[0], INT64_MAX, {s.origin[0], s.origin[1]}, 0, s.i};
    int64_t packed_first = 0, packed_last = 0, current = -1;  // the rows of `current` that the slab holds
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit % g.bands, image = unit / g.bands, group = image % s.groups, block = image / s.groups;
      const int64_t first = b * band_step, last = first + g.band_rows;
      if (image != current || packed_last < first) packed_first = packed_last = first;
      current = image;
      if (last - packed_first > capacity) {
        std::memmove(static_cast<void*>(slab.get()), slab.get() + (first - packed_first) * g.row,
                     (packed_last - first) * row_bytes);
        packed_first = first;
      }
      source.channel = group * s.i;
      Ops::pack(p.x, source, g, block, packed_last, last, slab.get() + (packed_last - packed_first) * g.row);
      packed_last = last;
      const C* x = slab.get() + (first - packed_first) * g.row;

      if (p.rank == 0) std::memset(static_cast<void*>(band.get()), 0, s.o * y_channel * sizeof(C));
      for (int64_t column = 0; column < g.columns && p.rank; column += kTileColumns) {
        for (int64_t k = 0; k < p.rank; ++k) {
          Ops::depthwise(x + column * L, s.stride[0] * g.row, g.channel, s.i, p.u + k * taps, p.taps, taps,
                         t.get() + k * s.i * 4 * L, 2 * half, 4 * L, half);
        }
        for (int64_t quarter = 0; quarter < 2 * g.tile_rows; ++quarter) {
          Ops::products(p.v + group * s.o * depth, s.o, t.get() + quarter * half, 4 * L, depth,
                        band.get() + quarter / 2 * y_row + (column + quarter % 2 * 4) * L, y_channel);
        }
      }
      for (int64_t column = 0; column < g.columns && p.values; column += kTileColumns) {
        for (int64_t k = 0; k < p.plan.blocks; ++k) {
          Ops::sparse(x + column * L, s.stride[0] * g.row, p.plan.offsets.get(), p.values, p.plan.start(s, group, k),
                      s.o, band.get() + column * L, y_row, y_channel);
        }
      }
      Ops::unpack(s, g, band.get(), p.bias ? p.bias + group * s.o : nullptr, block, group * s.o, b, p.y);
    }
  }
};

template <class T>
void convolve(const FactoredConv& op, Geometry geometry, bool swapped, Images<const T> x, Images<T> y,
              ParallelFor parallel_for) {
  using C = Compute<T>;
  if (geometry.oh <= 0 || geometry.ow <= 0) return;
  const int64_t bytes = register_bytes(), tile_rows = bytes == 64 ? 2 : 1, width = bytes == 64 ? 6 : 3;
  const int64_t kernel = op.conv.kh * op.conv.kw, taps = geometry.tap.size(), outputs = geometry.groups * geometry.o;
  Prepared<T> p{std::move(geometry), {}, {}, op.rank, x, y, nullptr, nullptr, nullptr, nullptr, nullptr};
  p.grid = make_grid(p.s, bytes / sizeof(C), tile_rows);
  p.plan = make_plan(p.s, p.grid, op.mu, kernel, swapped, tile_rows);
  const Scratch<C> u(op.rank * taps), v(outputs * op.rank * p.s.i), bias(outputs), values(op.mu.count);
  const Scratch<int64_t> offsets(taps);
  for (int64_t k = 0; k < taps; ++k) {
    offsets.get()[k] = p.s.row[k] * p.grid.row + p.grid.packed_column(p.s.column[k]);
    for (int64_t r = 0; r < op.rank; ++r) {
      u.get()[r * taps + k] = to_compute(static_cast<const T*>(op.u)[r * kernel + p.s.tap[k]]);
    }
  }
  if (op.rank) pack_v(p.s, static_cast<const T*>(op.v), op.rank, swapped, width, v.get());
  if (op.bias && !swapped) {
    for (int64_t o = 0; o < outputs; ++o) bias.get()[o] = to_compute(static_cast<const T*>(op.bias)[o]);
    p.bias = bias.get();
  }
  if (op.mu.count) {
    const int64_t used = p.plan.starts[p.s.groups * p.plan.blocks * (p.s.o + 1) - 1];
    for (int64_t nz = 0; nz < used; ++nz) {
      values.get()[nz] = to_compute(static_cast<const T*>(op.mu.values)[p.plan.source[nz]]);
    }
    p.values = values.get();
  }
  p.u = u.get(), p.v = v.get(), p.taps = offsets.get();
  parallel(parallel_for, p.grid.blocks * p.s.groups * p.grid.bands, 1,
           [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });
}

}  // namespace

void factored_conv(const FactoredConv& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  if (c.n * c.groups * c.o == 0) return;
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    convolve<T>(op, geometry(c), false, {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last},
                {static_cast<T*>(op.y), c.n, c.groups * c.o, c.oh, c.ow, c.y_channels_last}, parallel_for);
  });
}

void factored_conv_dx(const FactoredConv& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  if (c.n * c.groups * c.i == 0) return;
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    for (int64_t phase = 0; phase < c.stride[0] * c.stride[1]; ++phase) {
      convolve<T>(op, transposed(c, phase / c.stride[1], phase % c.stride[1]), true,
                  {static_cast<const T*>(op.x), c.n, c.groups * c.o, c.oh, c.ow, c.y_channels_last},
                  {static_cast<T*>(op.y), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last}, parallel_for);
    }
  });
}

}  // namespace fastfact
