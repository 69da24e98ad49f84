// y = conv(x, Σ_r u_r ⊗ v_r + μ), a unit of packed segments at a time: t_r = the depthwise convolution of x by u_r, y =
// v t, and the nonzeros of μ added to it.
#include <memory>
#include <vector>

#include "tiles.h"

namespace fastfact {
namespace {

constexpr int64_t kSecond = 1 << 19;  // bytes of the second cache for what is used again
constexpr int64_t kSlab = 640 << 10;  // bytes of packed x, at most, where outputs are written by tile
constexpr int64_t kTogether = 64;     // channels of x that are packed together where x is larger than y

// The factors and μ as the kernels read them, for all groups; made once a call.
template <class T>
struct Prepared {
  using C = Compute<T>;
  Geometry s;
  Grid grid;
  Slab slab;
  Tilings tilings;
  Plan plan;
  Shares shares;        // of the outputs
  int64_t rank, chunk;  // input channels packed at a time
  bool by_tile;         // whether outputs are written so, all channels of x packed
  Images<const T> x;
  Images<T> y;
  bool pairs, x_pairs;    // products in pairs; x and the nonzeros
  const T* taps;          // u as it is
  const C *u, *v, *bias;  // bias: a register for each output
  const Nonzero<C>* nonzeros;
  const void* values;      // of the nonzeros, where they are in pairs,
  const int32_t* offsets;  // and where they are
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
    const Slab& slab = p.slab;
    const bool sparse = p.nonzeros || p.values;
    const int64_t taps = s.phases[0].tap.size(), depth = p.rank * s.i;
    const int64_t registers = p.by_tile ? Ops::kMost : p.tilings.whole.registers();
    const int64_t factors = p.pairs ? 2 : 1;
    const Scratch<C> slabs(p.chunk * slab.channel), t(p.chunk * Ops::kMost * L), y(p.shares.most() * registers * L);
    const Scratch<C> single(p.pairs ? p.chunk * Ops::kMost * L : 0);
    typename Pack::Source source(p.x, g, slab, s.i);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t unit = item / p.shares.count / s.groups, group = item / p.shares.count % s.groups;
      const int64_t share = item % p.shares.count, o = p.shares.first(share), outputs = p.shares.size(share);
      const Tiling& tiling = p.tilings.of(unit, g);
      const C* start = p.bias ? p.bias + (group * s.o + o) * L : nullptr;
      const Ahead next = ahead(p.x, g, s.groups, unit + 1, s.stride[0]), out = ahead(p.y, g, s.groups, unit, 1);
      source.find(unit, group * s.i);
      const int64_t tiles = tiling.tiles.size();
      // Of a tile of y what these channels give.
      auto add_channels = [&](int64_t k, int64_t first, int64_t count) FF_INLINE_LAMBDA {
        const Tile& tile = tiling.tiles[k];
        const int64_t n = tile.registers();
        const bool last = first + count == s.i;
        const C* const x = slabs.get() + tile.row * slab.row + tile.column * L;
        const Tile part = tiling.part(tile, p.by_tile);
        C* const to = y.get() + (tile.first - part.first) * outputs * L;
        const Panels panels = Ops::panels(count / factors, n);
        for (int64_t r = 0; r < p.rank; ++r) {
          auto depthwise = [&](C* to, Panels ts) FF_INLINE_LAMBDA {
            auto by = [&](auto u) FF_INLINE_LAMBDA {
              Ops::depthwise(tile, x, slab.channel, slab.row, count, slab.offset[0].data(), u + r * taps, taps, false,
                             to, ts);
            };
            with_operand<T, B>(p.x_pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
              if constexpr (std::is_same_v<decltype(operand), Pair>) {
                by(p.taps);
              } else {
                by(p.u);
              }
            });
          };
          with_operand<T, B>(p.pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
            using E = decltype(operand);
            if constexpr (std::is_same_v<E, Pair>) {
              depthwise(single.get(), Ops::rows(n * L));
              for (int64_t j = 0; j < n; j += Ops::kWide) {
                const int64_t width = std::min(Ops::kWide, n - j) * L;
                auto floats = [](C* at) { return reinterpret_cast<float*>(at); };  // C, where this is taken
                make_pairs<B>(floats(single.get() + j * L), n * L, count, width,
                              floats(t.get() + j / Ops::kWide * panels.panel), width);
              }
            } else {
              depthwise(t.get(), panels);
            }
            const bool ahead = last && r + 1 == p.rank;
            Ops::multiply(reinterpret_cast<const E*>(p.v) + (group * s.o + o) * depth / factors, outputs,
                          count / factors, reinterpret_cast<const E*>(t.get()), panels, n, first + r > 0, start, to,
                          n * L, ahead ? next.part(k, tiles) : Ahead{}, ahead ? out.part(k, tiles) : Ahead{},
                          (r * s.i + first) / factors, depth / factors);
          });
        }
        if (!p.rank && !first) Ops::fill(start, outputs, n, to);
        for (int64_t c = 0; c < count && sparse; c += p.plan.block) {
          const int32_t* const starts = p.plan.start(0, group, (first + c) / p.plan.block) + o;
          with_operand<T, B>(p.x_pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
            if constexpr (std::is_same_v<decltype(operand), Pair>) {
              Ops::sparse(tile, x + c * slab.channel, slab.row,
                          NonzeroPairs{static_cast<const BFloat16*>(p.values), p.offsets}, starts, outputs, to);
            } else {
              Ops::sparse(tile, x + c * slab.channel, slab.row, p.nonzeros, starts, outputs, to);
            }
          });
        }
        if (last && tile.ends(part)) {
          Pack::unpack(s, g, tiling, part, unit, y.get(), 0, outputs, group * s.o + o, p.y);
        }
      };
      for (int64_t first = 0; first < s.i; first += p.chunk) {
        const int64_t count = std::min(p.chunk, s.i - first);
        source.pack(first, count, slabs.get(), p.x_pairs);
        for (int64_t k = 0; k < tiles; ++k) add_channels(k, first, count);
      }
    }
  }
};

template <class T>
Prepared<T> prepare(const FactoredConv& op) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t bytes = register_bytes(), lanes = bytes / sizeof(C), most = tile_registers(bytes);
  Prepared<T> p{};
  p.s = forward_geometry(c), p.rank = op.rank, p.pairs = in_pairs<T>(c.i), p.x_pairs = in_pairs<T>(c, op.mu);
  p.x = {static_cast<const T*>(op.x), c.n, c.groups * c.i, c.h, c.w, c.x_channels_last};
  p.y = {static_cast<T*>(op.y), c.n, c.groups * c.o, c.oh, c.ow, c.y_channels_last};
  const Cost cost{most, packing_cost(c, op.rank, op.mu), 0, !c.y_channels_last};
  const auto grid_of = [&](const auto& kept, int64_t limit, int64_t threads = 1) {
    return make_grid(p.s, c.n, c.oh, c.ow, lanes, kept, limit, cost, threads);
  };
  const auto of_slab = [&](int64_t rows, int64_t columns) { return packed(p.s, rows, columns) * c.i * bytes; };
  const auto of_all = [&](int64_t rows, int64_t columns) {
    return double(rows) * columns * (c.i * op.rank + c.o) * bytes;
  };
  Grid grid{};
  if (c.y_channels_last) {
    grid = grid_of(of_slab, kSlab);
    p.by_tile = of_slab(grid.rows, grid.width) <= kSlab;
  }
  if (!p.by_tile) grid = grid_of(of_all, kUnit);
  // The order of the sums comes from here, the threads have no say in it.
  p.plan = make_plan(p.s, make_tilings(grid, most).whole, op.mu.count, p.x_pairs);
  // All channels at once keep a tile of y in the caches between them, some at a time keep x there, where it is larger.
  const int64_t outputs = grid.rows * grid.width * lanes, of_x = c.i * c.stride[0] * c.stride[1] * outputs;
  const int64_t step = std::max(p.plan.block, kChunk);
  p.chunk = c.i;
  if (!p.by_tile && of_x > c.o * outputs && of_x * int64_t(sizeof(C)) >= kSecond) {
    p.chunk = ceil_div(ceil_div(c.i, ceil_div(c.i, kTogether)), step) * step;
  }
  // Threads that write lines beside each other, as those of an image's channel are, wait for one another.
  if (!c.y_channels_last && grid.blocks < op.threads) grid = grid_of(of_all, kUnit, op.threads);
  p.grid = share_out(grid, p.s, cost, op.threads);
  p.slab = make_slab(p.s, p.grid.rows, p.grid.width, lanes);
  p.tilings = make_tilings(p.grid, most);
  p.shares = make_shares(c.o, lanes, op.threads, [&](const Shares& shares) {
    std::vector<double> times;
    for (int64_t item = 0; item < p.grid.units() * c.groups * shares.count; ++item) {
      times.push_back(p.grid.own(item / shares.count / c.groups) * time_of(shares, item % shares.count, 0.2));
    }
    return times;
  });
  return p;
}

// v and μ as the kernels read them.
template <class T>
struct Weights {
  using C = Compute<T>;
  std::vector<int64_t> plan;  // all numbers they depend on besides
  uint64_t digest;
  int64_t count;
  std::shared_ptr<const KeptOrder> order;  // null without nonzeros
  bool pairs;
  Buffer<Nonzero<C>> nonzeros;
  Buffer<T> values;  // in their place where they are in pairs
  int64_t factors;
  Buffer<C> v;

  Weights(std::vector<int64_t> plan, uint64_t digest, int64_t count, bool pairs, int64_t factors)
      : plan(std::move(plan)),
        digest(digest),
        count(count),
        pairs(pairs),
        nonzeros(pairs ? 0 : count + kPlaces),
        values(pairs ? count : 0),
        factors(factors),
        v(factors) {}
  int64_t bytes() const {
    return plan.size() * sizeof(int64_t) + (order ? order->bytes() : 0) +
           count * (pairs ? sizeof(T) : sizeof(Nonzero<C>)) + factors * sizeof(C);
  }
};

template <class T>
std::vector<int64_t> numbers_of(const Prepared<T>& p, int64_t taps) {
  std::vector<int64_t> out = {p.s.groups, p.s.i,          p.s.o,        p.rank,        p.pairs,     p.x_pairs,
                              taps,       p.slab.channel, p.plan.block, p.plan.blocks, p.plan.keys, p.plan.count};
  if (p.rank) out.push_back(p.shares.count);
  const auto &tap = p.s.phases[0].tap, &offset = p.slab.offset[0];
  out.insert(out.end(), tap.begin(), tap.end()), out.insert(out.end(), offset.begin(), offset.end());
  return out;
}

// Where μ comes again they are kept, up to kKept bytes, and found by the digest of all numbers they were made of.
template <class T>
std::shared_ptr<const Weights<T>> weights_of(const Prepared<T>& p, const FactoredConv& op, ParallelFor parallel_for) {
  using W = Weights<T>;
  constexpr int64_t kKept = 256 << 20;
  static Recent<W>& recent = *new Recent<W>(kKept);  // never destroyed: threads may outlive main
  const Conv& c = op.conv;
  const int64_t taps = c.kh * c.kw, count = op.mu.count, factors = op.rank * c.groups * c.o * c.i;
  std::vector<int64_t> plan;
  uint64_t key = 0;
  if (op.repeated) {
    plan = numbers_of(p, taps);
    key = positions_digest(op.mu, parallel_for);
    key = digest(op.mu.values, count * sizeof(T), key, parallel_for);
    key = digest(op.v, factors * sizeof(T), key, parallel_for);
    const auto same = [&](const W& e) { return e.digest == key && e.plan == plan; };
    if (auto found = recent.find(same)) return found;
  }
  const auto out = std::make_shared<W>(std::move(plan), key, count, p.x_pairs, factors);
  if (factors) {
    pack_v(static_cast<const T*>(op.v), c.groups, c.i, c.o, op.rank, false, kProductRows, p.pairs, out->v.get(),
           parallel_for, p.shares);
  }
  auto sort = [&](const KeptOrder& order) {
    if (p.x_pairs) return sort_nonzeros<T>(p.plan, p.s, op.mu, taps, order, out->values.get(), parallel_for);
    sort_nonzeros<T>(p.plan, p.s, op.mu, taps, order, out->nonzeros.get(), parallel_for);
  };
  if (count && op.repeated) {
    const auto order = make_order(p.plan, p.s, p.slab, op.mu, taps, false, parallel_for);
    sort(*order);
    if (!p.x_pairs) order->offsets = {};
    out->order = order;
  } else if (count) {
    out->order = recent_order(p.plan, p.s, p.slab, op.mu, taps, false, parallel_for);
    sort(*out->order);
  }
  if (op.repeated) recent.add(out);
  return out;
}

template <class T>
void convolve(const FactoredConv& op, ParallelFor parallel_for) {
  using C = Compute<T>;
  const Conv& c = op.conv;
  const int64_t lanes = register_bytes() / sizeof(C), taps = c.kh * c.kw, outputs = c.groups * c.o;
  Prepared<T> p = prepare<T>(op);
  const auto weights = weights_of(p, op, parallel_for);
  const Scratch<C> u(op.rank * taps), bias(op.bias ? outputs * lanes : 0);
  for (int64_t k = 0; k < op.rank * taps; ++k) u.get()[k] = to_compute(static_cast<const T*>(op.u)[k]);
  for (int64_t k = 0; k < outputs * lanes && op.bias; ++k) {
    bias.get()[k] = to_compute(static_cast<const T*>(op.bias)[k / lanes]);
  }
  if (op.mu.count) p.plan.starts = weights->order->starts.data();
  if (op.mu.count && p.x_pairs) p.values = weights->values.get(), p.offsets = weights->order->offsets.data();
  if (op.mu.count && !p.x_pairs) p.nonzeros = weights->nonzeros.get();
  p.taps = static_cast<const T*>(op.u);
  p.u = u.get(), p.v = weights->v.get(), p.bias = op.bias ? bias.get() : nullptr;
  parallel(parallel_for, p.grid.units() * c.groups * p.shares.count, 1,
           [&](int64_t begin, int64_t end) { dispatch<Run, T>(p, begin, end); });
}

}  // namespace

void factored_conv(const FactoredConv& op, ParallelFor parallel_for) {
  if (op.conv.n * op.conv.groups * op.conv.o == 0) return;
  if (factored_conv_depthwise(op, parallel_for) || factored_conv_1x1(op, parallel_for)) return;
  if (planes_in_lanes(op.conv, op.type, op.rank, op.mu)) return factored_conv_planes(op, parallel_for);
  if (op.rank && !op.mu.count) return factored_conv_channels(op, parallel_for);
  with_conv_type(op.type, [&](auto type) { convolve<decltype(type)>(op, parallel_for); });
}

}  // namespace fastfact
