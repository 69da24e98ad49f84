// dx, du, dv and dμ on its support, a unit of packed segments at a time; no dense gradient is made. With s_r = v_rᵀ dy:
// dx = Σ_r the transposed depthwise convolution of s_r by u_r (and the nonzeros of μ, transposed), du_r the correlation
// of x and s_r, dv_r = dy t_rᵀ with t_r the depthwise convolution of x by u_r.
#include "tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kFewUnits = 4;

template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s, back;                 // from x to y, and from dy to dx
  Grid grid;                        // of the rows and columns of dy and of each phase of dx alike
  Slab x_slab, y_slab;              // of x; of dy and s, with all that dx reads
  int64_t own;                      // in y_slab, the first output of a segment
  int64_t s_rows[2], s_columns[2];  // in y_slab, where s is computed
  std::vector<Around> s_around;     // where it comes from other lanes; elsewhere it is zero
  Tilings tilings;
  Plan plan, back_plan;
  Shares shares;                       // of the input channels
  int64_t rank, parts, chunk, chunks;  // input channels packed at a time, and of a group how many times
  Images<const T> x, dy;
  Images<T> dx;
  bool pairs;      // x, dy and the nonzeros
  const T* taps;   // u as it is
  const C *u, *v;  // v [rank][group]: o → i
  const Nonzero<C>* back_nonzeros;
  const void* back_values;                // of the nonzeros, where they are in pairs
  const int32_t *offsets, *back_offsets;  // of the nonzeros in x and in dy
  std::vector<const C*> back_u;           // of each phase
  bool needs_x, needs_u, needs_v;
  C *du, *dv, *dvalues;  // partial sums [part][…]
  int64_t dv_row;
  int64_t dv_size() const { return s.o * dv_row; }
};

template <class T, int B>
struct Run {
  using C = Compute<T>;
  using Ops = Tiles<C, B>;
  using Pack = Packing<T, B>;
  static constexpr int L = kLanes<T, B>;

  // Items are (group, share of the input channels, part of the units).
  FF_INLINE static void run(const Prepared<T>& p, int64_t begin, int64_t end) {
    const Geometry& s = p.s;
    const Grid& g = p.grid;
    const Slab &x_slab = p.x_slab, &y_slab = p.y_slab;
    const int64_t taps = s.phases[0].tap.size(), phases = p.back.phases.size(), most = p.shares.most();
    const int64_t registers = p.tilings.whole.registers();
    const bool by_tile = p.dx.channels_last;
    const int64_t dx_phase = most * (by_tile ? Ops::kMost : registers) * L;
    const bool needs_weights = p.needs_u || p.needs_v || p.dvalues, sparse_dx = p.needs_x && p.back_offsets;
    const bool needs_s = p.rank && (p.needs_x || p.needs_u);
    const bool needs_dy = needs_s || p.needs_v || !p.pairs, needs_pairs = p.pairs && (sparse_dx || p.dvalues);
    const Scratch<C> dy(needs_dy ? s.o * y_slab.channel : 0), dy_pairs(needs_pairs ? s.o * y_slab.channel : 0);
    const C* const of_nonzeros = p.pairs ? dy_pairs.get() : dy.get();  // dy for μ
    const Zeros<C> back(needs_s ? p.rank * most * y_slab.channel : 0);
    const Scratch<C> slabs(needs_weights ? p.chunk * x_slab.channel : 0);
    const Scratch<C> t(p.needs_v ? p.rank * most * registers * L : 0);
    const Scratch<C> panels(p.needs_v ? ceil_div(p.rank * most, L) * L * Ops::kMost * L : 0);
    const Scratch<C> dx(p.needs_x ? phases * dx_phase : 0), sums(p.rank * taps * L);
    const Scratch<C> total(p.chunks * p.rank * taps * L);
    typename Pack::Source x_source(p.x, g, x_slab, s.i), dy_source(p.dy, g, y_slab, s.o);
    Surroundings<C, B> surroundings(g, y_slab, p.s_around);

    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % p.parts, share = item / p.parts % p.shares.count;
      const int64_t group = item / p.parts / p.shares.count;
      const int64_t i0 = p.shares.first(share), count = p.shares.size(share), depth = p.rank * count;
      const int64_t first_unit = part * g.units() / p.parts, last_unit = (part + 1) * g.units() / p.parts;
      C* dv = p.needs_v ? p.dv + (part * s.groups + group) * p.dv_size() + i0 : nullptr;
      C* dvalues = p.dvalues ? p.dvalues + part * p.plan.count : nullptr;
      for (int64_t o = 0; o < s.o && dv; ++o) {
        std::memset(static_cast<void*>(dv + o * p.dv_row), 0, ceil_div(depth, L) * L * sizeof(C));
      }
      if (dvalues) {
        const int64_t block = p.plan.block, last = (i0 + count - 1) / block;
        const int64_t from = p.plan.start(0, group, i0 / block)[0], to = p.plan.start(0, group, last)[s.o];
        std::memset(static_cast<void*>(dvalues + from), 0, (to - from) * sizeof(C));
      }
      std::memset(static_cast<void*>(total.get()), 0, p.chunks * p.rank * taps * L * sizeof(C));
      for (int64_t unit = first_unit; unit < last_unit; ++unit) {
        const Tiling& tiling = p.tilings.of(unit, g);
        const int64_t tiles = tiling.tiles.size();
        dy_source.find(unit, group * s.o);
        // The lines of a pixel one after the other.
        if (needs_dy) dy_source.pack(0, s.o, dy.get());
        if (needs_pairs) dy_source.pack(0, s.o, dy_pairs.get(), true);
        if (needs_s) {
          surroundings.find(unit);
          surroundings.gather(dy.get(), s.o);
        }
        for (int64_t r = 0; r < p.rank && needs_s; ++r) {
          const C* v = p.v + ((r * s.groups + group) * s.i + i0) * s.o;
          C* const to = back.get() + r * count * y_slab.channel;
          const Ahead next = needs_weights && r == 0 ? ahead(p.x, g, s.groups, unit, s.stride[0]) : Ahead{};
          auto multiply = [&](int64_t at, int64_t n, Ahead next) FF_INLINE_LAMBDA {
            Ops::multiply(v, count, s.o, dy.get() + at, Ops::rows(y_slab.channel), n, false, nullptr, to + at,
                          y_slab.channel, next, Ahead{});
          };
          for (int64_t row = p.s_rows[0]; row < p.s_rows[1]; ++row) {
            multiply(row * y_slab.row + p.s_columns[0] * L, p.s_columns[1] - p.s_columns[0],
                     next.part(row - p.s_rows[0], p.s_rows[1] - p.s_rows[0]));
          }
          multiply(y_slab.registers() * L, surroundings.edges(), Ahead{});
          surroundings.fill(to, count);
        }
        if (needs_weights) x_source.find(unit, group * s.i + i0);
        for (int64_t first = 0; first < count && needs_weights; first += p.chunk) {
          const int64_t channels = std::min(p.chunk, count - first);
          x_source.pack(first, channels, slabs.get(), p.pairs);
          std::memset(static_cast<void*>(sums.get()), 0, p.rank * taps * L * sizeof(C));
          for (const Tile& tile : tiling.tiles) {
            const C* x = slabs.get() + tile.row * x_slab.row + tile.column * L;
            const int64_t* offsets = x_slab.offset[0].data();
            for (int64_t r = 0; r < p.rank; ++r) {
              const int64_t channel = r * count + first, n = tile.registers();
              with_operand<T, B>(p.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
                using E = decltype(operand);
                auto depthwise = [&](auto u) FF_INLINE_LAMBDA {
                  Ops::depthwise(tile, x, x_slab.channel, x_slab.row, channels, offsets, u + r * taps, taps, false,
                                 t.get() + tile.first * depth * L, Ops::rows(n * L), channel);
                };
                if constexpr (std::is_same_v<E, Pair>) {
                  if (p.needs_v) depthwise(p.taps);
                } else {
                  if (p.needs_v) depthwise(p.u);
                }
                if (p.needs_u) {
                  Ops::template correlate<E>(
                      tile, x, x_slab.channel, x_slab.row, channels,
                      back.get() + channel * y_slab.channel + p.own + tile.row * y_slab.row + tile.column * L,
                      y_slab.channel, y_slab.row, offsets, taps, sums.get() + r * taps * L);
                }
              });
            }
          }
          // Apart for a few channels: sums of sums round less, and do not depend on the shares.
          C* const to = total.get() + first / p.chunk * p.rank * taps * L;
          for (int64_t k = 0; k < p.rank * taps * L && p.needs_u; ++k) to[k] += sums.get()[k];
          for (int64_t c = 0; c < channels && dvalues; c += p.plan.block) {
            const int32_t* starts = p.plan.start(0, group, (i0 + first + c) / p.plan.block);
            for (const Tile& tile : tiling.tiles) {
              with_operand<T, B>(p.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
                Ops::template sampled<decltype(operand)>(
                    tile, slabs.get() + c * x_slab.channel + tile.row * x_slab.row + tile.column * L, x_slab.row,
                    p.offsets, starts, s.o, of_nonzeros + p.own + tile.row * y_slab.row + tile.column * L,
                    y_slab.channel, y_slab.row, dvalues);
              });
            }
          }
        }
        const Ahead next = ahead(p.dy, g, s.groups, unit + 1, 1);
        const Ahead out = p.needs_x ? ahead(p.dx, g, s.groups, unit, p.back.step[0]) : Ahead{};
        for (int64_t k = 0; k < tiles && dv; ++k) {
          const Tile& tile = tiling.tiles[k];
          const int64_t n = tile.registers();
          for (int64_t row = 0; row < tile.rows; ++row) {
            Ops::transpose_panels(t.get() + (tile.first * depth + row * tile.columns) * L, n * L, depth, tile.columns,
                                  panels.get());
            Ops::multiply_transposed(dy.get() + p.own + (tile.row + row) * y_slab.row + tile.column * L, y_slab.channel,
                                     s.o, panels.get(), depth, tile.columns * L, dv, p.dv_row, next.part(k, tiles),
                                     out.part(k, tiles));
          }
        }
        if (!p.needs_x) continue;
        for (const Tile& tile : tiling.tiles) {
          const Tile written = tiling.part(tile, by_tile);
          const int64_t at = tile.row * y_slab.row + tile.column * L;
          for (int64_t phase = 0; phase < phases; ++phase) {
            C* const to = dx.get() + phase * dx_phase + (tile.first - written.first) * count * L;
            const std::vector<int64_t>& offsets = y_slab.offset[phase];
            for (int64_t r = 0; r < p.rank; ++r) {
              Ops::depthwise(tile, back.get() + r * count * y_slab.channel + at, y_slab.channel, y_slab.row, count,
                             offsets.data(), p.back_u[phase] + r * offsets.size(), offsets.size(), r > 0, to,
                             Ops::rows(tile.registers() * L));
            }
            if (!p.rank) std::memset(static_cast<void*>(to), 0, count * tile.registers() * L * sizeof(C));
            for (int64_t o = 0; o < s.o && sparse_dx; o += p.back_plan.block) {
              const int32_t* starts = p.back_plan.start(phase, group, o / p.back_plan.block) + i0;
              auto sparse = [&](auto nonzeros) FF_INLINE_LAMBDA {
                Ops::sparse(tile, of_nonzeros + o * y_slab.channel + at, y_slab.row, nonzeros, starts, count, to);
              };
              with_operand<T, B>(p.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
                if constexpr (std::is_same_v<decltype(operand), Pair>) {
                  sparse(NonzeroPairs{static_cast<const BFloat16*>(p.back_values), p.back_offsets});
                } else {
                  sparse(p.back_nonzeros);
                }
              });
            }
          }
          if (tile.ends(written)) {
            Pack::unpack(p.back, g, tiling, written, unit, dx.get(), dx_phase, count, group * s.i + i0, p.dx);
          }
        }
      }
      C* du = p.du + ((part * s.groups + group) * p.chunks + i0 / p.chunk) * p.rank * taps;
      for (int64_t k = 0; k < ceil_div(count, p.chunk) * p.rank * taps && p.needs_u; ++k) {
        C sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += total.get()[k * L + lane];
        du[k] = sum;
      }
    }
  }
};

template <class T>
void backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), most_registers = tile_registers(bytes);
  const int64_t taps = c.kh * c.kw, outputs = c.groups * c.o, depth = op.rank * c.i, phases = c.stride[0] * c.stride[1];
  T *du = static_cast<T*>(op.du), *dv = static_cast<T*>(op.dv), *dvalues = static_cast<T*>(op.dvalues);
  if (c.n * outputs * c.i * c.oh * c.ow == 0) {
    if (op.dx) std::memset(op.dx, 0, c.n * c.groups * c.i * c.h * c.w * sizeof(T));
    if (du) std::memset(static_cast<void*>(du), 0, op.rank * taps * sizeof(T));
    if (dv) std::memset(static_cast<void*>(dv), 0, outputs * depth * sizeof(T));
    if (dvalues) std::memset(static_cast<void*>(dvalues), 0, op.mu.count * sizeof(T));
    return;
  }
  if (planes_in_lanes(c, op.type, op.rank, op.mu) && !op.dx_channels_last && c.h * c.w * (c.o + 3 * depth) <= 1 << 19) {
    return factored_conv_backward_planes(op, parallel_for);
  }
  if (op.rank && !op.mu.count) return factored_conv_backward_channels(op, parallel_for);
  Prepared<T> p{};
  p.s = forward_geometry(c), p.back = transposed_geometry(c), p.rank = op.rank, p.pairs = in_pairs<T>(c, op.mu);
  p.needs_x = op.dx, p.needs_u = du && op.rank, p.needs_v = dv && op.rank;
  const int64_t count = dvalues ? op.mu.count : 0;
  p.x = {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last};
  p.dy = {static_cast<const T*>(op.dy), c.n, outputs, c.oh, c.ow, c.y_channels_last};
  p.dx = {static_cast<T*>(op.dx), c.n, c.groups * c.i, c.h, c.w, op.dx_channels_last};
  // The last phase reads what an output itself is.
  Geometry reads{c.groups, c.o, c.i, c.oh, c.ow, {1, 1}, {0, 0}, {0, 0}, {1, 1}, {}};
  if (p.needs_x) reads = p.back;
  reads.phases.push_back({{0}, {reads.origin[0]}, {reads.origin[1]}});
  const double nonzeros = double(op.mu.count) / (c.groups * c.i);
  // Bands of a segment compute s = vᵀ dy anew around what they have of their own, one of two products.
  const double again = op.rank * c.o / (op.rank * (2. * c.o + 3 * taps) + 2 * nonzeros + 1);
  const int64_t of_dx = p.needs_x && !op.dx_channels_last ? c.i * phases : 0;
  const auto kept = [&](int64_t rows, int64_t columns) {
    return (packed(reads, rows, columns) * (c.o + depth) + double(rows) * columns * (depth + of_dx)) * bytes;
  };
  const int64_t rows = p.needs_x ? std::max(c.oh, p.back.oh) : c.oh;
  const int64_t columns = p.needs_x ? std::max(c.ow, p.back.ow) : c.ow;
  const Cost cost{most_registers, packing_cost(c, op.rank, op.mu), again, !op.dx_channels_last};
  p.grid = make_grid(reads, c.n, rows, columns, lanes, kept, kUnit, cost);
  const Grid& g = p.grid;
  p.x_slab = make_slab(p.s, g.rows, g.width, lanes);
  p.y_slab = make_slab(reads, g.rows, g.width, lanes);
  p.own = p.y_slab.offset.back()[0];
  const int64_t own_row = p.own / p.y_slab.row, own_column = p.own % p.y_slab.row / lanes;
  // Bands of a segment compute what they need of each other.
  p.s_rows[0] = g.bands > 1 ? 0 : own_row, p.s_rows[1] = g.bands > 1 ? p.y_slab.rows.size() : own_row + g.rows;
  p.s_columns[0] = own_column, p.s_columns[1] = own_column + g.width;
  p.s_around = around(g, p.y_slab, p.own);
  p.y_slab.channel = ((p.y_slab.registers() + most_edges(g, p.s_around)) | 1) * lanes;
  p.tilings = make_tilings(g, most_registers);
  p.dv_row = ceil_div(depth, lanes) * lanes;
  // Few units are shared out by channels, in whole blocks.
  const int64_t most_block = g.units() * c.groups < kFewUnits ? std::max(ceil_div(c.i, 2), kChunk) : INT64_MAX;
  p.plan = make_plan(p.s, p.tilings.whole, count, p.pairs, most_block);
  p.back_plan = make_plan(p.back, p.tilings.whole, p.needs_x ? op.mu.count : 0, p.pairs);
  p.chunk = std::max(p.plan.block, kChunk);
  // The number of partial sums depends on the shape only, so that results repeat.
  const int64_t most = std::clamp<int64_t>((1 << 19) / (p.dv_size() * c.groups + count + 1), 8, 64);
  p.parts = std::min(p.needs_u || p.needs_v || count ? most : INT64_MAX, g.units());
  const auto times = [&](const Shares& shares) {
    std::vector<double> out(c.groups * shares.count * p.parts);
    for (int64_t item = 0; item < int64_t(out.size()); ++item) {
      const int64_t part = item % p.parts;
      for (int64_t unit = part * g.units() / p.parts; unit < (part + 1) * g.units() / p.parts; ++unit) {
        out[item] += g.own(unit) * time_of(shares, item / p.parts % shares.count, 0.1);
      }
    }
    return out;
  };
  p.shares = op.rank > 1 ? Shares{1, c.i, p.chunk} : make_shares(c.i, p.chunk, op.threads, times);
  p.chunks = ceil_div(c.i, p.chunk);

  const Scratch<C> u(op.rank * taps), back_u(op.rank * taps), v(outputs * depth), values(p.parts * count);
  const Scratch<C> du_parts(p.parts * c.groups * p.chunks * op.rank * taps);
  const Scratch<C> dv_parts(p.needs_v ? p.parts * c.groups * p.dv_size() : 0);
  const Scratch<Nonzero<C>> back_nonzeros(p.needs_x && !p.pairs ? op.mu.count + kPlaces : 0);
  const Scratch<T> back_values(p.needs_x && p.pairs ? op.mu.count : 0);
  std::shared_ptr<const KeptOrder> order, back_order;
  if (count) {
    order = recent_order(p.plan, p.s, p.x_slab, op.mu, taps, false, parallel_for);
    p.plan.starts = order->starts.data(), p.offsets = order->offsets.data();
  }
  for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
  C* next_u = back_u.get();
  for (int64_t phase = 0; phase < phases && p.needs_x; ++phase) {
    p.back_u.push_back(next_u);
    for (int64_t r = 0; r < op.rank; ++r) {
      for (int64_t tap : p.back.phases[phase].tap) *next_u++ = u.get()[r * taps + tap];
    }
  }
  if (p.needs_x && op.mu.count) {
    back_order = recent_order(p.back_plan, p.back, p.y_slab, op.mu, taps, true, parallel_for);
    auto sort = [&](auto* to) {
      sort_nonzeros<T>(p.back_plan, p.back, op.mu, taps, *back_order, to, parallel_for);
      return to;
    };
    if (p.pairs) {
      p.back_values = sort(back_values.get());
    } else {
      p.back_nonzeros = sort(back_nonzeros.get());
    }
    p.back_plan.starts = back_order->starts.data(), p.back_offsets = back_order->offsets.data();
  }
  for (int64_t r = 0; r < op.rank; ++r) {
    pack_v(static_cast<const T*>(op.v) + r * outputs * c.i, c.groups, c.o, c.i, 1, true, kProductRows, false,
           v.get() + r * outputs * c.i, parallel_for, p.shares);
  }
  p.taps = static_cast<const T*>(op.u), p.u = u.get(), p.v = v.get();
  p.du = du_parts.get(), p.dv = dv_parts.get(), p.dvalues = count ? values.get() : nullptr;
  parallel(parallel_for, c.groups * p.shares.count * p.parts, 1,
           [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });

  add_parts(p.parts, c.groups, op.rank, c.o, c.i, taps, p.dv_row, p.du, p.needs_u ? du : nullptr, p.dv,
            p.needs_v ? dv : nullptr, parallel_for, p.chunks);
  if (!count) return;
  parallel(parallel_for, count, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < p.parts; ++part) {
      for (int64_t j = begin; j < end; ++j) p.dvalues[j] += p.dvalues[part * count + j];
    }
  });
  each_run(p.plan, p.plan.starts, p.s, op.mu, taps, parallel_for, [&](int64_t nz, int64_t first, int64_t n) {
    for (int64_t j = 0; j < n; ++j) dvalues[nz + j] = from_compute<T>(p.dvalues[first + j]);
  });
}

}  // namespace

void factored_conv_backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  if (factored_conv_backward_depthwise(op, parallel_for) || factored_conv_backward_1x1(op, parallel_for)) return;
  with_conv_type(op.type, [&](auto type) { backward<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
