// du, dv and dμ on its support, from x and dy packed side by side, band by band; no dense gradient is made.
#include "tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kSlabBytes = 1 << 20;  // packed input a thread keeps
constexpr int64_t kParts = 8;            // partial sums; their number depends on the shape only, so results repeat

template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s;
  Grid grid;
  Plan plan;
  int64_t rank, parts, o_padded, depth_padded;
  Images<const T> x, dy;
  const C *u, *v;  // v [rank][group]: o → i
  const int64_t* taps;
  bool needs_u, needs_v;
  // Partial sums: [part][…].
  C *du, *dv, *dvalues;
  int64_t nonzeros;
  int64_t dv_size() const { return o_padded * depth_padded; }
};

template <class T, int B>
struct Run {
  using C = Compute<T>;
  using Ops = Tiles<T, B>;
  static constexpr int L = kLanes<T, B>;

  // Items are (group, part).
  FF_INLINE static void run(const Prepared<T>& p, int64_t begin, int64_t end) {
    const Geometry& s = p.s;
    const Grid& g = p.grid;
    const int64_t taps = s.tap.size(), depth = p.rank * s.i, pixels = g.tile_rows * g.columns;
    const int64_t band_step = g.tile_rows * s.stride[0], row_bytes = g.row * sizeof(C);
    const int64_t strip_rows = (g.bands - 1) * band_step + g.band_rows;
    const int64_t capacity = std::min(strip_rows, std::max(2 * g.band_rows, kSlabBytes / row_bytes));
    Grid gy = g;
    gy.stride = 1, gy.phase = gy.width = g.columns, gy.row = g.columns * L, gy.channel = pixels * L;
    const Scratch<C> slab(capacity * g.row), dy(p.o_padded * gy.channel), sums(p.rank * taps * L);
    const Scratch<C> t(p.needs_v ? p.depth_padded * gy.channel : 0), back(p.needs_u ? depth * gy.channel : 0);
    std::memset(static_cast<void*>(slab.get()), 0, capacity * row_bytes);
    std::memset(static_cast<void*>(dy.get()), 0, p.o_padded * gy.channel * sizeof(C));
    if (p.needs_v) {
      std::memset(static_cast<void*>(t.get() + depth * gy.channel), 0,
                  (p.depth_padded - depth) * gy.channel * sizeof(C));
    }
    Source source{g.strips, g.strip_rows * s.stride[0], INT64_MAX, {s.origin[0], s.origin[1]}, 0, s.i};
    Source source_y{g.strips, g.strip_rows, g.strip_rows, {0, 0}, 0, s.o};

    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / p.parts, part = item % p.parts, units = g.blocks * g.bands;
      const int64_t per_part = ceil_div(units, p.parts);
      C* dv = p.needs_v ? p.dv + (part * s.groups + group) * p.dv_size() : nullptr;
      C* dvalues = p.dvalues ? p.dvalues + part * p.nonzeros : nullptr;
      if (dv) std::memset(static_cast<void*>(dv), 0, p.dv_size() * sizeof(C));
      if (dvalues) {
        const int64_t from = p.plan.start(s, group, 0)[0], to = p.plan.start(s, group, p.plan.blocks - 1)[s.o];
        std::memset(static_cast<void*>(dvalues + from), 0, (to - from) * sizeof(C));
      }
      std::memset(static_cast<void*>(sums.get()), 0, p.rank * taps * L * sizeof(C));
      source.channel = group * s.i, source_y.channel = group * s.o;
      int64_t packed_first = 0, packed_last = 0, current = -1;
      for (int64_t unit = part * per_part; unit < std::min(units, (part + 1) * per_part); ++unit) {
        const int64_t b = unit % g.bands, block = unit / g.bands, first = b * band_step, last = first + g.band_rows;
        if (block != current || packed_last < first) packed_first = packed_last = first;
        current = block;
        if (last - packed_first > capacity) {
          std::memmove(static_cast<void*>(slab.get()), slab.get() + (first - packed_first) * g.row,
                       (packed_last - first) * row_bytes);
          packed_first = first;
        }
        Ops::pack(p.x, source, g, block, packed_last, last, slab.get() + (packed_last - packed_first) * g.row);
        packed_last = last;
        Ops::pack(p.dy, source_y, gy, block, b * g.tile_rows, (b + 1) * g.tile_rows, dy.get());
        const C* x = slab.get() + (first - packed_first) * g.row;

        for (int64_t r = 0; r < g.tile_rows; r += Ops::kRows) {
          for (int64_t column = 0; column < g.columns && dvalues; column += kTileColumns) {
            for (int64_t k = 0; k < p.plan.blocks; ++k) {
              Ops::sampled(x + r * s.stride[0] * g.row + column * L, s.stride[0] * g.row, p.plan.offsets.get(),
                           p.plan.start(s, group, k), s.o, dy.get() + (r * g.columns + column) * L, gy.row, gy.channel,
                           dvalues);
            }
          }
        }
        for (int64_t r = 0; r < g.tile_rows; r += Ops::kRows) {
          for (int64_t column = 0; column < g.columns; column += kTileColumns) {
            const C* at = x + r * s.stride[0] * g.row + column * L;
            const int64_t tile = r * g.columns + column;
            for (int64_t k = 0; k < p.rank && p.needs_v; ++k) {
              Ops::depthwise(at, s.stride[0] * g.row, g.channel, s.i, p.u + k * taps, p.taps, taps,
                             t.get() + k * s.i * gy.channel + tile * L, gy.row, gy.channel, 4 * L);
            }
          }
        }
        for (int64_t tile = 0; tile < pixels && p.needs_u; tile += kTileColumns) {
          const C* at = x + tile / g.columns * s.stride[0] * g.row + tile % g.columns * L;
          for (int64_t k = 0; k < p.rank; ++k) {
            C* to = back.get() + k * s.i * gy.channel + tile * L;
            for (int64_t half = 0; half < 2; ++half) {
              Ops::products(p.v + (k * s.groups + group) * s.i * s.o, s.i, dy.get() + (tile + 4 * half) * L, gy.channel,
                            s.o, to + 4 * half * L, gy.channel);
            }
            Ops::correlate(at, g.channel, s.i, to, gy.channel, p.taps, taps, sums.get() + k * taps * L);
          }
        }
        if (dv) Ops::dots(dy.get(), p.o_padded, t.get(), p.depth_padded, pixels, dv);
      }
      for (int64_t k = 0; k < p.rank * taps && p.needs_u; ++k) {
        C sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += sums.get()[k * L + lane];
        p.du[(part * s.groups + group) * p.rank * taps + k] = sum;
      }
    }
  }
};

}  // namespace

void factored_conv_dw(const FactoredConvBackward& op, ParallelFor parallel_for) {
  const Conv& c = op.conv;
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), width = bytes == 64 ? 6 : 3;
    const int64_t dot_rows = lanes >= 8 ? 4 : 2, dot_columns = lanes / dot_rows, tile_rows = bytes == 64 ? 2 : 1;
    const int64_t taps = c.kh * c.kw, outputs = c.groups * c.o, depth = op.rank * c.i;
    T *du = static_cast<T*>(op.du), *dv = static_cast<T*>(op.dv), *dvalues = static_cast<T*>(op.dvalues);
    if (c.n * outputs * c.i * c.oh * c.ow == 0) {
      if (du) std::memset(static_cast<void*>(du), 0, op.rank * taps * sizeof(T));
      if (dv) std::memset(static_cast<void*>(dv), 0, outputs * depth * sizeof(T));
      if (dvalues) std::memset(static_cast<void*>(dvalues), 0, op.mu.count * sizeof(T));
      return;
    }
    Prepared<T> p{};
    p.s = geometry(c);
    p.grid = make_grid(p.s, lanes, 2 * tile_rows);
    p.rank = op.rank;
    p.x = {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last};
    p.dy = {static_cast<const T*>(op.dy), c.n, outputs, c.oh, c.ow, c.y_channels_last};
    p.needs_u = du && op.rank, p.needs_v = dv && op.rank;
    p.parts = std::min(kParts, p.grid.blocks * p.grid.bands);
    p.o_padded = ceil_div(c.o, dot_rows) * dot_rows, p.depth_padded = ceil_div(depth, dot_columns) * dot_columns;
    p.nonzeros = dvalues ? op.mu.count : 0;
    if (p.nonzeros) p.plan = make_plan(p.s, p.grid, op.mu, taps, false, tile_rows);

    const Scratch<C> u(op.rank * taps), v(p.needs_u ? outputs * depth : 0), values(p.parts * p.nonzeros);
    const Scratch<C> du_parts(p.parts * c.groups * op.rank * taps);
    const Scratch<C> dv_parts(p.needs_v ? p.parts * c.groups * p.dv_size() : 0);
    const Scratch<int64_t> offsets(taps);
    for (int64_t k = 0; k < taps; ++k) {
      offsets.get()[k] = p.s.row[k] * p.grid.row + p.grid.packed_column(p.s.column[k]);
    }
    for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
    if (p.needs_u) {
      Geometry back{};
      back.groups = c.groups, back.i = c.o, back.o = c.i;
      for (int64_t r = 0; r < op.rank; ++r) {
        pack_v(back, static_cast<const T*>(op.v) + r * outputs * c.i, 1, true, width, v.get() + r * outputs * c.i);
      }
    }
    p.u = u.get(), p.v = v.get(), p.taps = offsets.get();
    p.du = du_parts.get(), p.dv = dv_parts.get(), p.dvalues = p.nonzeros ? values.get() : nullptr;
    parallel(parallel_for, c.groups * p.parts, 1, [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });

    for (int64_t k = 0; k < op.rank * taps && p.needs_u; ++k) {
      C sum = 0;
      for (int64_t item = 0; item < p.parts * c.groups; ++item) sum += p.du[item * op.rank * taps + k];
      du[k] = from_compute<T>(sum);
    }
    if (p.needs_v) {
      parallel(parallel_for, outputs, ceil_div(16384, depth * p.parts), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t group = row / c.o, o = row % c.o;
          const C* from =
              p.dv + group * p.dv_size() + o / dot_rows * dot_rows * p.depth_padded + o % dot_rows * dot_columns;
          for (int64_t k = 0; k < depth; ++k) {
            const C* at = from + k / dot_columns * lanes + k % dot_columns;
            C sum = 0;
            for (int64_t part = 0; part < p.parts; ++part) sum += at[part * c.groups * p.dv_size()];
            dv[(k / c.i * outputs + row) * c.i + k % c.i] = from_compute<T>(sum);
          }
        }
      });
    }
    parallel(parallel_for, p.nonzeros, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t nz = begin; nz < end; ++nz) {
        C sum = 0;
        for (int64_t part = 0; part < p.parts; ++part) sum += p.dvalues[part * p.nonzeros + nz];
        dvalues[p.plan.source[nz]] = from_compute<T>(sum);
      }
    });
  });
}

}  // namespace fastfact
