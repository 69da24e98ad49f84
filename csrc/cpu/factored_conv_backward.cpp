// dx, du, dv and dμ on its support, a band of packed rows at a time; no dense gradient is made. With s_r = v_rᵀ dy:
// dx = Σ_r the transposed depthwise convolution of s_r by u_r (and the nonzeros of μ, transposed), du_r the correlation
// of x and s_r, dv_r = dy t_rᵀ with t_r the depthwise convolution of x by u_r.
#include "tiles.h"

namespace fastfact {
namespace {

template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s, back;                      // from x to y, and from dy to dx
  Grid grid;                             // of the rows of dy and of each phase of dx alike
  int64_t flat_low, flat_rows;           // the rows of dy a unit reads, from the first of its own on
  Slab<C> x_slab, flat_slab, back_slab;  // x; dy and s in the rows of dy; dy or s for the transposed convolution
  Band own, flat, dx_band;
  Plan plan, back_plan;
  int64_t rank, parts;
  Images<const T> x, dy;
  Images<T> dx;
  const C *u, *v;  // v [rank][group]: o → i
  const Nonzero<C>* back_nonzeros;
  const int32_t* offsets;        // of the nonzeros in x
  std::vector<const C*> back_u;  // of each phase
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

  // Items are (group, part).
  FF_INLINE static void run(const Prepared<T>& p, int64_t begin, int64_t end) {
    const Geometry& s = p.s;
    const Grid& g = p.grid;
    const int64_t taps = s.phases[0].tap.size(), depth = p.rank * s.i, own_first = -p.flat_low * p.flat.row;
    const int64_t phases = p.back.phases.size();
    const int64_t flat_channel = p.flat.channel, dx_phase = Ops::size(s.i, p.dx_band.quads(L));
    const Stride of_flat = Ops::rows(flat_channel), of_t = Ops::tiles(depth), of_dx = Ops::tiles(s.i);
    const bool needs_weights = p.needs_u || p.needs_v || p.dvalues, sparse_dx = p.needs_x && p.back_nonzeros;
    const bool needs_s = p.rank && (p.needs_x || p.needs_u);
    const Zeros<C> dy(s.o * flat_channel), back(needs_s ? depth * flat_channel : 0);
    const int64_t together = p.x.channels_last ? Pack::kLine : kTogether;
    const int64_t x_block = p.dvalues ? p.plan.block : together, dy_block = sparse_dx ? p.back_plan.block : kTogether;
    // Of x first, then of s and dy.
    const Zeros<C> slab(
        std::max(needs_weights ? x_block * p.x_slab.channel + p.x_slab.slack : 0,
                 p.needs_x ? std::max<int64_t>(dy_block, kTogether) * p.back_slab.channel + p.back_slab.slack : 0));
    const Scratch<C> t(p.needs_v ? Ops::size(depth, p.own.quads(L)) : 0),
        panels(p.needs_v ? p.dv_row * p.own.pixels : 0);
    const Scratch<C> dx(p.needs_x ? phases * dx_phase : 0), sums(p.rank * taps * L);
    const typename Pack::Pixels x_pixels(p.x, s.i, p.x_slab.places.size() * p.x_slab.copy);
    const typename Pack::Pixels dy_pixels(p.dy, s.o, p.flat_slab.copy);
    // Rows of dy or s as the input of the transposed convolution.
    Planes<C> flat{nullptr, 0, flat_channel, p.flat.row, {}, {}, 0, 0};
    const int64_t before = p.back.origin[0] + p.flat_low;
    for (int64_t k = 0; k < g.segments; ++k) {
      flat.segments.push_back({k * s.ow - before * p.flat.row, before, before + p.flat_rows});
    }
    flat.plan(p.back_slab, L);

    const auto nothing = [](auto&&...) {};
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / p.parts, part = item % p.parts;
      const int64_t first = part * g.units() / p.parts, last = (part + 1) * g.units() / p.parts;
      C* dv = p.needs_v ? p.dv + (part * s.groups + group) * p.dv_size() : nullptr;
      C* dvalues = p.dvalues ? p.dvalues + part * p.plan.count : nullptr;
      if (dv) std::memset(static_cast<void*>(dv), 0, p.dv_size() * sizeof(C));
      if (dvalues) {
        const int64_t from = p.plan.start(0, group, 0)[0], to = p.plan.start(0, group, p.plan.blocks - 1)[s.o];
        std::memset(static_cast<void*>(dvalues + from), 0, (to - from) * sizeof(C));
      }
      std::memset(static_cast<void*>(sums.get()), 0, p.rank * taps * L * sizeof(C));
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t registers = g.own(unit % g.bands) * p.own.row / L;
        Pack::pack_images(p.dy, g, unit, 1, p.flat_low, p.flat_slab, group * s.o, s.o, dy_pixels, s.o, dy.get(),
                          nothing, nothing);
        for (int64_t r = 0; r < p.rank && needs_s; ++r) {
          Ops::multiply(p.v + (r * s.groups + group) * s.i * s.o, s.i, s.o, dy.get(), of_flat, p.flat.quads(L), false,
                        nullptr, back.get() + r * s.i * flat_channel, of_flat,
                        r == 0 && needs_weights ? ahead(p.x, g, s.groups, unit) : Ahead{}, {});
        }
        if (needs_weights) {
          auto take = [&](int64_t i, int64_t count, const C* x) FF_INLINE_LAMBDA {
            const int64_t* offsets = p.x_slab.offset[0].data();
            for (int64_t r = 0; r < p.rank; ++r) {
              const int64_t channel = r * s.i + i;
              if (p.needs_v) {
                Ops::depthwise(x, p.x_slab.channel, count, offsets, p.u + r * taps, taps, p.own.quads(L), false,
                               t.get() + channel * of_t.channel, of_t);
              }
              if (p.needs_u) {
                Ops::correlate(x, p.x_slab.channel, count, back.get() + channel * flat_channel + own_first,
                               flat_channel, offsets, taps, registers, sums.get() + r * taps * L);
              }
            }
          };
          auto take_block = [&](int64_t k) FF_INLINE_LAMBDA {
            if (!dvalues) return;
            Ops::sampled(p.plan, p.plan.start(0, group, k), slab.get(), p.offsets, dy.get() + own_first, flat_channel,
                         registers, dvalues);
          };
          Pack::pack_images(p.x, g, unit, s.stride[0], -s.origin[0], p.x_slab, group * s.i, s.i, x_pixels, x_block,
                            slab.get(), take, take_block);
        }
        if (dv) {
          Ops::transpose_panels(t.get(), of_t, depth, registers, panels.get());
          Ops::multiply_transposed(dy.get() + own_first, flat_channel, s.o, panels.get(), depth, registers * L, dv,
                                   ahead(p.dy, g, s.groups, unit + 1),
                                   p.needs_x ? ahead(p.dx, g, s.groups, unit) : Ahead{});
        }
        if (!p.needs_x) continue;
        flat.data = back.get(), flat.size = depth * flat_channel;
        if (needs_s) {
          auto take = [&](int64_t channel, int64_t count, const C* packed) FF_INLINE_LAMBDA {
            for (int64_t c = channel; c < channel + count; ++c, packed += p.back_slab.channel) {
              const int64_t r = c / s.i, i = c % s.i;
              for (int64_t phase = 0; phase < phases; ++phase) {
                const std::vector<int64_t>& offsets = p.back_slab.offset[phase];
                Ops::depthwise(packed, 0, 1, offsets.data(), p.back_u[phase] + r * offsets.size(), offsets.size(),
                               p.dx_band.quads(L), r > 0, dx.get() + phase * dx_phase + i * of_dx.channel, of_dx);
              }
            }
          };
          Pack::pack_blocks(p.back_slab, flat, depth, kTogether, kTogether, slab.get(), take, nothing);
        }
        if (!needs_s) std::memset(static_cast<void*>(dx.get()), 0, phases * dx_phase * sizeof(C));
        if (sparse_dx) {
          flat.data = dy.get(), flat.size = s.o * flat_channel;
          auto take_block = [&](int64_t k) FF_INLINE_LAMBDA {
            for (int64_t phase = 0; phase < phases; ++phase) {
              Ops::sparse(p.back_plan, p.back_plan.start(phase, group, k), slab.get(), p.back_nonzeros,
                          kQuad * p.dx_band.quads(L), false, nullptr, dx.get() + phase * dx_phase, of_dx);
            }
          };
          Pack::pack_blocks(p.back_slab, flat, s.o, dy_block, kTogether, slab.get(), nothing, take_block);
        }
        Pack::unpack(p.back, g, p.dx_band, unit, dx.get(), of_dx.channel, dx_phase, group * s.i, p.dx);
      }
      for (int64_t k = 0; k < p.rank * taps && p.needs_u; ++k) {
        C sum = 0;
        for (int lane = 0; lane < L; ++lane) sum += sums.get()[k * L + lane];
        p.du[(part * s.groups + group) * p.rank * taps + k] = sum;
      }
    }
  }
};

template <class T>
void backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), tile = sparse_registers(bytes) * lanes;
  const int64_t taps = c.kh * c.kw, outputs = c.groups * c.o, depth = op.rank * c.i, phases = c.stride[0] * c.stride[1];
  T *du = static_cast<T*>(op.du), *dv = static_cast<T*>(op.dv), *dvalues = static_cast<T*>(op.dvalues);
  if (c.n * outputs * c.i * c.oh * c.ow == 0) {
    if (op.dx) std::memset(op.dx, 0, c.n * c.groups * c.i * c.h * c.w * sizeof(T));
    if (du) std::memset(static_cast<void*>(du), 0, op.rank * taps * sizeof(T));
    if (dv) std::memset(static_cast<void*>(dv), 0, outputs * depth * sizeof(T));
    if (dvalues) std::memset(static_cast<void*>(dvalues), 0, op.mu.count * sizeof(T));
    return;
  }
  if (channels_in_lanes(c, op.rank, op.mu) && (op.dx_channels_last || !op.dx)) {
    return factored_conv_backward_channels_last(op, parallel_for);
  }
  if (planes_in_lanes(c, op.type, op.rank, op.mu) && !op.dx_channels_last && c.h * c.w * (c.o + 3 * depth) <= 1 << 19) {
    return factored_conv_backward_planes(op, parallel_for);
  }
  Prepared<T> p{};
  p.s = forward_geometry(c), p.back = transposed_geometry(c), p.rank = op.rank;
  p.needs_x = op.dx, p.needs_u = du && op.rank, p.needs_v = dv && op.rank;
  const int64_t count = dvalues ? op.mu.count : 0;
  p.x = {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last};
  p.dy = {static_cast<const T*>(op.dy), c.n, outputs, c.oh, c.ow, c.y_channels_last};
  p.dx = {static_cast<T*>(op.dx), c.n, c.groups * c.i, c.h, c.w, op.dx_channels_last};
  p.grid = make_grid(c.n, p.needs_x ? std::max(c.oh, p.back.oh) : c.oh, std::max(c.ow, p.back.ow), lanes, c.groups,
                     [&](int64_t segments) {
                       const int64_t dx = p.needs_x ? c.i * phases : 0;
                       return ceil_div(segments * c.ow, lanes) * lanes * (c.o + 3 * depth + dx);
                     });
  const Grid& g = p.grid;
  // Whole images have zeros only beyond the rows of their own.
  const bool halo = p.needs_x && g.strips * g.bands > 1;
  p.flat_low = halo ? std::min<int64_t>(0, -p.back.origin[0]) : 0;
  p.flat_rows = (halo ? std::max(g.rows, g.rows - p.back.origin[0] + p.back.reach[0]) : g.rows) - p.flat_low;
  const Geometry same{c.groups, c.o, c.o, c.oh, c.ow, {1, 1}, {}, {}, {1, 1}, {{{0}, {0}, {0}}}};
  p.x_slab = make_slab<C>(p.s, g.segments, g.rows, c.w, lanes);
  p.flat_slab = make_slab<C>(same, g.segments, p.flat_rows, c.ow, lanes);
  p.back_slab = make_slab<C>(p.back, g.segments, g.rows, c.ow, lanes);
  p.own = make_band(g.segments, c.ow, g.rows, lanes), p.flat = make_band(g.segments, c.ow, p.flat_rows, lanes);
  p.flat_slab.channel = p.flat.channel;
  p.dx_band = make_band(g.segments, p.back.ow, g.rows, lanes);
  p.dv_row = ceil_div(depth, lanes) * lanes;
  // The number of partial sums depends on the shape only, so that results repeat.
  const int64_t most = std::clamp<int64_t>((1 << 19) / (p.dv_size() * c.groups + count + 1), 8, 64);
  p.parts = std::min(p.needs_u || p.needs_v || count ? most : INT64_MAX, g.units());

  const Scratch<C> u(op.rank * taps), back_u(op.rank * taps), v(outputs * depth), values(p.parts * count);
  const Scratch<C> du_parts(p.parts * c.groups * op.rank * taps);
  const Scratch<C> dv_parts(p.needs_v ? p.parts * c.groups * p.dv_size() : 0);
  const Scratch<Nonzero<C>> back_nonzeros(p.needs_x ? op.mu.count : 0);
  p.plan = make_plan(p.s, p.x_slab, count, tile, c.x_channels_last ? lanes : kTogether);
  p.back_plan = make_plan(p.back, p.back_slab, p.needs_x ? op.mu.count : 0, tile, kTogether);
  const Scratch<int32_t> starts(p.plan.keys), offsets(count), back_starts(p.back_plan.keys);
  if (count) {
    find_order(p.plan, p.s, p.x_slab, op.mu, taps, starts.get(), offsets.get(), parallel_for);
    p.plan.starts = starts.get();
    p.offsets = offsets.get();
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
    transpose_nonzeros<T>(p.back_plan, p.back, p.back_slab, op.mu, taps, back_starts.get(), back_nonzeros.get(),
                          parallel_for);
    p.back_plan.starts = back_starts.get();
    p.back_nonzeros = back_nonzeros.get();
  }
  for (int64_t r = 0; r < op.rank; ++r) {
    pack_v(static_cast<const T*>(op.v) + r * outputs * c.i, c.groups, c.o, c.i, 1, true, kProductRows, false,
           v.get() + r * outputs * c.i, parallel_for);
  }
  p.u = u.get(), p.v = v.get();
  p.du = du_parts.get(), p.dv = dv_parts.get(), p.dvalues = count ? values.get() : nullptr;
  parallel(parallel_for, c.groups * p.parts, 1, [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });

  add_parts(p.parts, c.groups, op.rank, c.o, c.i, taps, p.dv_row, p.du, p.needs_u ? du : nullptr, p.dv,
            p.needs_v ? dv : nullptr, parallel_for);
  if (!count) return;
  parallel(parallel_for, count, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < p.parts; ++part) {
      for (int64_t j = begin; j < end; ++j) p.dvalues[j] += p.dvalues[part * count + j];
    }
  });
  each_run(p.plan, p.s, op.mu, taps, parallel_for, [&](int64_t nz, int64_t first, int64_t n) {
    for (int64_t j = 0; j < n; ++j) dvalues[nz + j] = from_compute<T>(p.dvalues[first + j]);
  });
}

}  // namespace

void factored_conv_backward(const FactoredConvBackward& op, ParallelFor parallel_for) {
  if (factored_conv_backward_depthwise(op, parallel_for) || factored_conv_backward_1x1(op, parallel_for)) return;
  with_conv_type(op.type, [&](auto type) { backward<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
