// y = conv(x, Σ_r u_r ⊗ v_r + μ), a band of packed rows at a time: t_r = the depthwise convolution of x by u_r, y = v
// t, and the nonzeros of μ added to it.
#include "orders.h"
#include "tiles.h"

namespace fastfact {
namespace {

// The factors and μ as the kernels read them, for all groups; made once a call.
template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s;
  Grid grid;
  Slab<C> slab;
  Band band;
  Plan plan;
  int64_t rank;
  Images<const T> x;
  Images<T> y;
  bool pairs;             // products in pairs
  const C *u, *v, *bias;  // bias: a register for each output
  const Nonzero<C>* nonzeros;
};

template <class T, int B>
struct Run {
  using C = Compute<T>;
  using Ops = Tiles<C, B>;
  using Pack = Packing<T, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Prepared<T>& p, int64_t begin, int64_t end) {
    const Geometry& s = p.s;
    const Grid& g = p.grid;
    const Slab<C>& slab = p.slab;
    const bool sparse = p.nonzeros;
    const int64_t taps = s.phases[0].tap.size(), depth = p.rank * s.i, quads = p.band.quads(L);
    const int64_t together = p.x.channels_last ? Pack::kLine : kTogether, block = sparse ? p.plan.block : together;
    const Zeros<C> slabs(block * slab.channel + slab.slack);
    const Scratch<C> t(Ops::size(depth, quads)), band(Ops::size(s.o, quads));
    const Scratch<C> single(p.pairs ? Ops::size(together, quads) : 0);
    const Stride of_t = Ops::tiles(depth / (p.pairs ? 2 : 1)), of_band = Ops::tiles(s.o);
    const typename Pack::Pixels pixels(p.x, s.i, slab.places.size() * slab.copy);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t unit = item / s.groups, group = item % s.groups;
      const C* start = p.bias ? p.bias + group * s.o * L : nullptr;
      auto take = [&](int64_t i, int64_t count, const C* x) FF_INLINE_LAMBDA {
        for (int64_t r = 0; r < p.rank; ++r) {
          C* to = t.get() + (r * s.i + i) / (p.pairs ? 2 : 1) * of_t.channel;
          Ops::depthwise(x, slab.channel, count, slab.offset[0].data(), p.u + r * taps, taps, quads, false,
                         p.pairs ? single.get() : to, p.pairs ? Ops::tiles(together) : of_t);
          if constexpr (std::is_same_v<T, BFloat16>) {
            const Stride of_single = Ops::tiles(together);
            for (int64_t k = 0; p.pairs && k < ceil_div(kQuad * quads, Ops::kTile); ++k) {
              make_pairs<B>(single.get() + k * of_single.tile, of_single.channel, count, Ops::kTile * L,
                            to + k * of_t.tile, of_t.channel);
            }
          }
        }
      };
      auto take_block = [&](int64_t k) FF_INLINE_LAMBDA {
        if (!sparse) return;
        Ops::sparse(p.plan, p.plan.start(0, group, k), slabs.get(), p.nonzeros, kQuad * quads, k == 0, start,
                    band.get(), of_band);
      };
      Pack::pack_images(p.x, g, unit, s.stride[0], -s.origin[0], slab, group * s.i, s.i, pixels, block, slabs.get(),
                        take, take_block);
      if (!sparse && !p.rank) Ops::fill(start, s.o, kQuad * quads, band.get(), of_band);
      if (p.rank) {
        with_operand<T, B>(p.pairs, [&](auto operand, int64_t factors) FF_INLINE_LAMBDA {
          using E = decltype(operand);
          Ops::multiply(reinterpret_cast<const E*>(p.v) + group * s.o * depth / factors, s.o, depth / factors,
                        reinterpret_cast<const E*>(t.get()), of_t, quads, sparse, start, band.get(), of_band,
                        ahead(p.x, g, s.groups, unit + 1), ahead(p.y, g, s.groups, unit));
        });
      }
      Pack::unpack(s, g, p.band, unit, band.get(), of_band.channel, 0, group * s.o, p.y);
    }
  }
};

template <class T>
Prepared<T> prepare(const FactoredConv& op) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), outputs = c.groups * c.o;
  Prepared<T> p{};
  p.s = forward_geometry(c), p.rank = op.rank, p.pairs = in_pairs<T>(c.i);
  p.x = {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last};
  p.y = {static_cast<T*>(op.y), c.n, outputs, c.oh, c.ow, c.y_channels_last};
  p.grid = make_grid(c.n, c.oh, c.ow, lanes, c.groups, [&](int64_t segments) {
    return ceil_div(segments * c.ow, lanes) * lanes * (c.i * op.rank + c.o);
  });
  p.slab = make_slab<C>(p.s, p.grid.segments, p.grid.rows, c.w, lanes);
  p.band = make_band(p.grid.segments, c.ow, p.grid.rows, lanes);
  p.plan = make_plan(p.s, p.slab, op.mu.count, sparse_registers(bytes) * lanes, c.x_channels_last ? lanes : kTogether);
  return p;
}

constexpr int64_t kOrderBytes = 256 << 20;

// All numbers but the positions that find_order reads.
template <class C>
std::vector<int64_t> numbers_of(const Prepared<C>& p, int64_t taps) {
  std::vector<int64_t> out = {sizeof(typename Prepared<C>::C),
                              p.s.groups,
                              p.s.i,
                              p.s.o,
                              taps,
                              p.slab.channel,
                              p.plan.block,
                              p.plan.blocks,
                              p.plan.keys};
  for (size_t phase = 0; phase < p.s.phases.size(); ++phase) {
    const auto &tap = p.s.phases[phase].tap, &offset = p.slab.offset[phase];
    out.push_back(tap.size());
    out.insert(out.end(), tap.begin(), tap.end()), out.insert(out.end(), offset.begin(), offset.end());
  }
  return out;
}

// The starts of the plan, and the offsets.
template <class T>
Orders::Order order_of(const Prepared<T>& p, const FactoredConv& op, ParallelFor parallel_for) {
  static Orders& orders = *new Orders(kOrderBytes);  // never destroyed: threads may outlive main
  const int64_t taps = op.conv.kh * op.conv.kw;
  std::vector<int64_t> numbers;
  if (op.repeated) {
    numbers = numbers_of(p, taps);
    if (auto found = orders.find(numbers, op.mu.index, op.mu.count)) return found;
  }
  std::vector<int32_t> order(p.plan.keys + op.mu.count);
  find_order(p.plan, p.s, p.slab, op.mu, taps, order.data(), order.data() + p.plan.keys, parallel_for);
  if (numbers.empty()) return std::make_shared<const std::vector<int32_t>>(std::move(order));
  return orders.add(std::move(numbers), op.mu.index, op.mu.count, std::move(order));
}

template <class T>
void convolve(const FactoredConv& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), taps = c.kh * c.kw, outputs = c.groups * c.o;
  Prepared<T> p = prepare<T>(op);
  const Orders::Order order = op.mu.count ? order_of(p, op, parallel_for) : nullptr;
  const Scratch<C> u(op.rank * taps), v(outputs * op.rank * c.i), bias(op.bias ? outputs * lanes : 0);
  const Scratch<Nonzero<C>> nonzeros(op.mu.count);
  for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
  if (op.rank) {
    pack_v(static_cast<const T*>(op.v), c.groups, c.i, c.o, op.rank, false, kProductRows, p.pairs, v.get(),
           parallel_for);
  }
  for (int64_t k = 0; k < outputs * lanes && op.bias; ++k) {
    bias.get()[k] = to_compute(static_cast<const T*>(op.bias)[k / lanes]);
  }
  if (op.mu.count) {
    p.plan.starts = order->data(), p.nonzeros = nonzeros.get();
    sort_nonzeros<T>(p.plan, p.s, op.mu, taps, order->data() + p.plan.keys, nonzeros.get(), parallel_for);
  }
  p.u = u.get(), p.v = v.get(), p.bias = op.bias ? bias.get() : nullptr;
  parallel(parallel_for, p.grid.units() * c.groups, 1,
           [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });
}

}  // namespace

void factored_conv(const FactoredConv& op, ParallelFor parallel_for) {
  if (op.conv.n * op.conv.groups * op.conv.o == 0) return;
  if (factored_conv_depthwise(op, parallel_for) || factored_conv_1x1(op, parallel_for)) return;
  if (channels_in_lanes(op.conv, op.rank, op.mu)) return factored_conv_channels_last(op, parallel_for);
  if (planes_in_lanes(op.conv, op.type, op.rank, op.mu)) return factored_conv_planes(op, parallel_for);
  with_conv_type(op.type, [&](auto type) { convolve<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
