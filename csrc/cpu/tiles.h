// The kernels of the factored convolutions on packed images (see packed.h), and the nonzeros of μ in their order.
#pragma once

#include <unistd.h>

#include <memory>

#include "packed.h"
#include "pairs.h"
#include "recent.h"

namespace fastfact {

// Nonzeros whose places are known before they are multiplied; so many more than there are can be read.
inline constexpr int kPlaces = 6;

// The order in which the kernels take the nonzeros of μ: [phase of the geometry][group][block of input channels][output
// channel]. Offsets are from the first channel of the block on.
struct Plan {
  int64_t outputs, groups, block, blocks, keys, count;  // input channels of a block, blocks of a group
  const int32_t* starts;                                // [phases][groups][blocks][o + 1]: `keys` numbers
  const int32_t* start(int64_t phase, int64_t group, int64_t k) const {
    return starts + ((phase * groups + group) * blocks + k) * (outputs + 1);
  }
};

template <class C>
struct Nonzero {
  C value;
  int32_t offset;
};

// The same where they are multiplied in pairs.
struct NonzeroPairs {
  const BFloat16* values;
  const int32_t* offsets;
};

// Rows and registers of columns of a product's tile: as many sums as leave room for the operands.
inline constexpr int kProductRows = 6;
inline constexpr int64_t wide(int bytes) { return bytes == 64 ? 4 : 2; }

// Memory to be brought into the second cache while a product is computed.
struct Ahead {
  const char* at;
  int64_t bytes;
  int64_t at_once = 0;  // lines
  Ahead part(int64_t k, int64_t parts) const {
    const int64_t size = ceil_div(bytes, parts * 64) * 64, first = std::min(k * size, bytes);
    return {at + first, std::min(size, bytes - first)};
  }
  void spread(int64_t steps) { at_once = ceil_div(bytes / 64, std::max<int64_t>(steps, 1)); }
  FF_INLINE void fetch() {
    for (int64_t n = std::min(at_once, bytes / 64); n > 0; --n, at += 64, bytes -= 64) __builtin_prefetch(at, 0, 2);
  }
};

// What a unit reads or writes of `images`, which have `scale` rows for each of the grid's: whole images, or of
// channels_last ones the rows of its segments. Nothing where it is not one piece.
template <class T>
Ahead ahead(const Images<T>& images, const Grid& g, int64_t groups, int64_t unit, int64_t scale) {
  const int64_t of_image = g.down * g.across, first = unit * g.lanes;
  const int64_t last = std::min(first + g.lanes, g.n * of_image) - 1;
  if (g.bands * groups != 1 || last < first || !(of_image == 1 || images.channels_last)) return {nullptr, 0};
  auto row = [&](int64_t segment, int64_t more) {
    const int64_t down = segment / g.across % g.down + more;
    return segment / of_image * images.h + std::min(down * g.height * scale, images.h);
  };
  const int64_t begin = row(first, 0), size = images.channels * images.w;
  return {reinterpret_cast<const char*>(images.data + begin * size),
          int64_t((row(last, 1) - begin) * size * sizeof(T))};
}

// Where the operand of a product is that has its sums' registers: panels of so many registers, in each the steps of the
// sum one after the other; in elements. The last panel may be narrower.
struct Panels {
  int64_t panel, step, last;  // from one panel to the next, from one step to the next, in the last panel
};

template <class T, int B>
struct Tiles {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, kM = kProductRows, kMost = tile_registers(B);
  static constexpr int64_t kStep = 8;                              // steps of a product between fetches
  static constexpr int64_t kWide = wide(B), kDepth = 512 / kWide;  // a panel of so many steps in the first cache

  // f.operator()<N>(first) for pieces of N registers, N = Most, Most / 2, … 1, that make up `count`.
  template <int N, class F>
  FF_INLINE static void pieces(int64_t first, int64_t count, const F& f) {
    for (; first + N <= count; first += N) f.template operator()<N>(first);
    if constexpr (N > 1) pieces<N / 2>(first, count, f);
  }

  // f.operator()<R, W>() for a tile of R rows of W registers.
  template <int R, int W, class F>
  FF_INLINE static void with_columns(int64_t columns, const F& f) {
    if constexpr (W > 1) {
      if (columns < W) return with_columns<R, W - 1>(columns, f);
    }
    f.template operator()<R, W>();
  }
  template <class F>
  FF_INLINE static void with_shape(const Tile& tile, const F& f) {
    constexpr int most = kTileColumns;
    if (tile.rows == 4) return with_columns<4, std::min(kMost / 4, most)>(tile.columns, f);
    if (tile.rows == 2) return with_columns<2, std::min(kMost / 2, most)>(tile.columns, f);
    with_columns<1, std::min(kMost, most)>(tile.columns, f);
  }

  // So many steps of a sum in pieces of like size.
  static constexpr int64_t piece(int64_t depth) {
    const int64_t pieces = std::max<int64_t>(ceil_div(4 * depth, 5 * kDepth), 1);
    return std::max(ceil_div(ceil_div(depth, pieces), kStep) * kStep, kStep);
  }

  // Registers of a channel one after the other, channels so many elements apart.
  static constexpr Panels rows(int64_t channel) { return {kWide * L, channel, channel}; }
  // Panels in which the channels of a register follow each other.
  static constexpr Panels panels(int64_t channels, int64_t registers) {
    return {kWide * channels * L, kWide * L, registers % kWide * L};
  }

  // A register of a packed image in pairs, and each of the two it has: that of a row and that of the next one.
  FF_INLINE static Operands<Pair, B> load_two(const C* at) {
    return in_register(bit_cast<Operands<Pair, B>>(load<B>(at)));
  }
  FF_INLINE static V first_of(Operands<Pair, B> two) { return bit_cast<V>(unpack_low(Operands<Pair, B>{}, two)); }
  FF_INLINE static V second_of(Operands<Pair, B> two) { return bit_cast<V>(unpack_high(Operands<Pair, B>{}, two)); }

  // sums += values[0] · a + values[1] · b for the registers of a tile of images in pairs.
  template <int R, int W>
  FF_INLINE static void add_two(V (&sums)[R * W], const C* a, const C* b, int64_t row, const BFloat16* values) {
    using U = Operands<Pair, B>;
    const U weights = bit_cast<U>(pair_at(values) - V{});
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2, a = in_one_register(a + 2 * row), b = in_one_register(b + 2 * row)) {
#pragma GCC unroll 10
      for (int w = 0; w < W; ++w) {
        const U one = load_two(a + w * L), other = load_two(b + w * L);
        if constexpr (std::is_same_v<C, float>) {  // compilers may look at it for others, too
          add_product<Pair, B>(sums[r * W + w], unpack_low(one, other), weights);
          if (r + 1 < R) add_product<Pair, B>(sums[(r + 1) * W + w], unpack_high(one, other), weights);
        }
      }
    }
  }

  // sums += value · a, the same.
  template <int R, int W>
  FF_INLINE static void add_one(V (&sums)[R * W], const C* a, int64_t row, BFloat16 value) {
    const V weight = to_compute(value) - V{};
#pragma GCC unroll 4
    for (int r = 0; r < R; r += 2, a = in_one_register(a + 2 * row)) {
#pragma GCC unroll 10
      for (int w = 0; w < W; ++w) {
        const auto two = load_two(a + w * L);
        sums[r * W + w] += weight * first_of(two);
        if (r + 1 < R) sums[(r + 1) * W + w] += weight * second_of(two);
      }
    }
  }

  // t[first + c][j] = Σ_tap u[tap] · x[c][offsets[tap] + j] for the registers j of a tile, the first of which is at x,
  // added to t if asked. `row`: elements from one row of x to the next. u of bfloat16: x is in pairs.
  template <class U>
  FF_INLINE static void depthwise(const Tile& tile, const C* x, int64_t x_channel, int64_t row, int64_t channels,
                                  const int64_t* offsets, const U* u, int64_t taps, bool add, C* t, Panels ts,
                                  int64_t first = 0) {
    with_shape(tile, [&]<int R, int W>() FF_INLINE_LAMBDA {
      outline<B>([&]() FF_INLINE_LAMBDA {
        [[maybe_unused]] const C* next = taps ? x + offsets[0] : x;  // known ahead, as in Places
        for (int64_t c = 0; c < channels; ++c) {
          V sums[R * W]{};
          auto each = [&](auto&& f) FF_INLINE_LAMBDA {
#pragma GCC unroll 20
            for (int p = 0; p < R * W; ++p) {
              const int64_t step = p / kWide * kWide + kWide <= R * W ? ts.step : ts.last;
              f(sums[p], t + p / kWide * ts.panel + (first + c) * step + p % kWide * L);
            }
          };
          if (add) each([](V& sum, const C* at) FF_INLINE_LAMBDA { sum = load<B>(at); });
          int64_t tap = 0;
          if constexpr (std::is_same_v<U, BFloat16>) {
            for (; tap + 1 < taps; tap += 2) {
              add_two<R, W>(sums, x + offsets[tap], x + offsets[tap + 1], row, u + tap);
            }
            if (tap < taps) add_one<R, W>(sums, x + offsets[tap], row, u[tap]);
          } else {
            for (; tap < taps; ++tap) {
              const V weight = u[tap] - V{};
              const C* at = next;
              next = in_one_register(tap + 1 < taps ? x + offsets[tap + 1] : x + x_channel + offsets[0]);
#pragma GCC unroll 4
              for (int r = 0; r < R; ++r, at = in_one_register(at + row)) {
#pragma GCC unroll 10
                for (int w = 0; w < W; ++w) sums[r * W + w] += weight * load<B>(at + w * L);
              }
            }
          }
          each([](V sum, C* at) FF_INLINE_LAMBDA { store<B>(at, sum); });
          x += x_channel;
        }
      });
    });
  }

  // grads[tap] (lane by lane) += Σ_c Σ_j s[c][j] · x[c][offsets[tap] + j]: the gradient of u in `depthwise`; s in rows
  // too. E: Pair where x is in pairs.
  template <class E>
  FF_INLINE static void correlate(const Tile& tile, const C* x, int64_t x_channel, int64_t x_row, int64_t channels,
                                  const C* s, int64_t s_channel, int64_t s_row, const int64_t* offsets, int64_t taps,
                                  C* grads) {
    with_shape(tile, [&]<int R, int W>() FF_INLINE_LAMBDA {
      outline<B>([&]() FF_INLINE_LAMBDA {
        const C* next = taps ? x + offsets[0] : x;  // known ahead, as in Places
        for (int64_t c = 0; c < channels; ++c, x += x_channel, s += s_channel) {
          V weights[R][W];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 10
            for (int w = 0; w < W; ++w) weights[r][w] = load<B>(s + r * s_row + w * L);
          }
          for (int64_t tap = 0; tap < taps; ++tap) {
            constexpr int step = std::is_same_v<E, Pair> ? 2 : 1;
            const C* at = next;
            next = in_one_register(tap + 1 < taps ? x + offsets[tap + 1] : x + x_channel + offsets[0]);
            V sums[2] = {load<B>(grads + tap * L), V{}};
#pragma GCC unroll 4
            for (int r = 0; r < R; r += step, at = in_one_register(at + step * x_row)) {
#pragma GCC unroll 10
              for (int w = 0; w < W; ++w) {
                if constexpr (step == 2) {
                  const auto two = load_two(at + w * L);
                  sums[0] += weights[r][w] * first_of(two);
                  if (r + 1 < R) sums[1] += weights[r + 1][w] * second_of(two);
                } else {
                  sums[(r * W + w) % 2] += weights[r][w] * load<B>(at + w * L);
                }
              }
            }
            store<B>(grads + tap * L, sums[0] + sums[1]);
          }
        }
      });
    });
  }

  // The left operand of a product: element (m, k) is at m·row + k·step.
  template <class E>
  struct Left {
    const E* data;
    int64_t row, step;
  };

  // y[m][N registers] = start[m][N registers] + Σ_k left(m, k) · right[k][N registers] for M rows; start null: 0. The
  // registers of a row of `start` are start_step elements apart.
  template <int M, int N, class E>
  FF_INLINE static void product(Left<E> left, const E* right, int64_t right_step, int64_t depth, const C* start,
                                int64_t start_row, int64_t start_step, C* y, int64_t y_row, Ahead& next, Ahead& out) {
    V sums[M][N]{};
    if (start) {
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int p = 0; p < N; ++p) sums[m][p] = load<B>(start + m * start_row + p * start_step);
      }
    }
    auto step = [&]() FF_INLINE_LAMBDA {
      Operands<E, B> x[N];
#pragma GCC unroll 4
      for (int p = 0; p < N; ++p) x[p] = load_operands<B>(right + p * L);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        // Here, not in a function that returns it: of that the compiler makes one instruction for each lane.
        const auto weight = as_number(left.data + m * left.row) - V{};
#pragma GCC unroll 4
        for (int p = 0; p < N; ++p) {
          if constexpr (std::is_same_v<E, C>) {
            sums[m][p] += weight * x[p];
          } else {
            add_product<E, B>(sums[m][p], bit_cast<Operands<E, B>>(weight), x[p]);
          }
        }
      }
      left.data += left.step, right += right_step;
    };
    next.fetch(), out.fetch();
    for (; depth >= kStep; depth -= kStep) {
      next.fetch(), out.fetch();
      for (int64_t k = 0; k < kStep; ++k) step();
    }
    for (; depth > 0; --depth) step();
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int p = 0; p < N; ++p) store<B>(y + m * y_row + p * L, sums[m][p]);
    }
  }

  // The product for `rows` rows, at most Most.
  template <int N, int Most, class E>
  FF_INLINE static void rows_of_product(int64_t rows, Left<E> left, const E* right, int64_t right_step, int64_t depth,
                                        const C* start, int64_t start_row, int64_t start_step, C* y, int64_t y_row,
                                        Ahead& next, Ahead& out) {
    if constexpr (Most > 1) {
      if (rows < Most) {
        return rows_of_product<N, Most - 1>(rows, left, right, right_step, depth, start, start_row, start_step, y,
                                            y_row, next, out);
      }
    }
    product<Most, N>(left, right, right_step, depth, start, start_row, start_step, y, y_row, next, out);
  }

  // y[o][j] = start[o] + Σ_k v[o][first_step + k] · t[k][j] for so many registers j, v packed by pack_v with `of` steps
  // (0: depth), `start` a register for each output; null: 0. With `add`, to what y holds.
  template <class E>
  FF_INLINE static void multiply(const E* v, int64_t outputs, int64_t depth, const E* t, Panels ts, int64_t registers,
                                 bool add, const C* start, C* y, int64_t y_channel, Ahead next, Ahead out,
                                 int64_t first_step = 0, int64_t of = 0) {
    const int64_t most = piece(depth), whole = of ? of : depth;
    const int64_t steps = ceil_div(registers, kWide) * ceil_div(outputs, kM) * (ceil_div(depth, most) + depth / kStep);
    next.spread(steps), out.spread(steps);
    for (int64_t first = 0; first < registers; first += kWide, t += ts.panel) {
      auto panel = [&]<int N>() FF_INLINE_LAMBDA {
        outline<B>([&]() FF_INLINE_LAMBDA {
          const int64_t step = N == kWide ? ts.step : ts.last;
          for (int64_t k = 0; k < depth; k += most) {
            for (int64_t o = 0; o < outputs; o += kM) {
              const int64_t rows = std::min<int64_t>(kM, outputs - o);
              C* to = y + o * y_channel + first * L;
              const bool on = add || k > 0;
              rows_of_product<N, kM, E>(rows, {v + o * whole + (first_step + k) * rows, 1, rows}, t + k * step, step,
                                        std::min(most, depth - k), on ? to : (start ? start + o * L : nullptr),
                                        on ? y_channel : L, on ? L : 0, to, y_channel, next, out);
            }
          }
        });
      };
      with_width(std::min(kWide, registers - first), panel);
    }
  }

  // f.operator()<N>() for a panel of N registers.
  template <class F>
  FF_INLINE static void with_width(int64_t width, const F& f) {
    if constexpr (kWide == 4) {
      if (width == 4) return f.template operator()<4>();
      if (width == 3) return f.template operator()<3>();
    }
    if (width == 2) return f.template operator()<2>();
    f.template operator()<1>();
  }

  // to[k / kWide registers][pixel][kWide registers of k] = t[k][pixel], zeros for k ≥ depth; the last panel may be
  // narrower.
  FF_INLINE static void transpose_panels(const C* t, int64_t t_channel, int64_t depth, int64_t registers, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t k0 = 0; k0 < depth; k0 += kWide * L) {
        const int64_t width = std::min(kWide, ceil_div(depth - k0, L));
        for (int64_t j = 0; j < registers; ++j) {
          for (int64_t w = 0; w < width; ++w) {
            V lines[L];
            const int64_t k = k0 + w * L;
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) lines[l] = k + l < depth ? load<B>(t + (k + l) * t_channel + j * L) : V{};
            transpose_from<1, L>(lines);
#pragma GCC unroll 16
            for (int l = 0; l < L; ++l) store<B>(to + (l * width + w) * L, lines[l]);
          }
          to += width * L * L;
        }
      }
    });
  }

  // dv[o][k] += Σ_pixel dy[o][pixel] · t[k][pixel], t transposed by transpose_panels; rows of dv, dv_row elements
  // apart, in whole registers.
  FF_INLINE static void multiply_transposed(const C* dy, int64_t dy_channel, int64_t outputs, const C* t, int64_t depth,
                                            int64_t pixels, C* dv, int64_t dv_row, Ahead next, Ahead out) {
    const int64_t row = ceil_div(depth, L) * L, most = piece(pixels);
    const int64_t steps = ceil_div(row, kWide * L) * ceil_div(outputs, kM) * (ceil_div(pixels, most) + pixels / kStep);
    next.spread(steps), out.spread(steps);
    for (int64_t k = 0; k < row; k += kWide * L) {
      const int64_t width = std::min(kWide, (row - k) / L);
      with_width(width, [&]<int N>() FF_INLINE_LAMBDA {
        outline<B>([&]() FF_INLINE_LAMBDA {
          for (int64_t first = 0; first < pixels; first += most) {
            for (int64_t o = 0; o < outputs; o += kM) {
              C* to = dv + o * dv_row + k;
              rows_of_product<N, kM, C>(std::min<int64_t>(kM, outputs - o),
                                        {dy + o * dy_channel + first, dy_channel, 1}, t + first * N * L, N * L,
                                        std::min(most, pixels - first), to, dv_row, L, to, dv_row, next, out);
            }
          }
        });
      });
      t += pixels * width * L;
    }
  }

  // Where the next nonzeros are in x. A load that an address needs would else wait for those of the sums before it.
  struct Places {
    const C* at[kPlaces];
    template <class F>
    FF_INLINE explicit Places(const F& place) {
#pragma GCC unroll 8
      for (int k = 0; k < kPlaces; ++k) at[k] = place(k);
    }
    // The first of them; `last` is the one after the others.
    FF_INLINE const C* next(const C* last) {
      const C* const first = at[0];
#pragma GCC unroll 8
      for (int k = 0; k + 1 < kPlaces; ++k) at[k] = at[k + 1];
      at[kPlaces - 1] = in_one_register(last);
      return first;
    }
  };

  // y[o][j] += Σ_nz value · x[offset + j] over the nonzeros starts[o] … starts[o + 1] of each output channel, for the
  // registers j of a tile, of which y has a channel after the other. The kPlaces nonzeros beyond the last are read.
  template <int R, int W>
  FF_INLINE static void sparse_tile(const C* x, int64_t row, const Nonzero<C>* nonzeros, const int32_t* starts,
                                    int64_t outputs, C* y) {
    const Nonzero<C>* nz = nonzeros + starts[0];
    Places places([&](int k) FF_INLINE_LAMBDA { return x + nz[k].offset; });
    for (int64_t o = 0; o < outputs; ++o, y += R * W * L) {
      const Nonzero<C>* const end = nonzeros + starts[o + 1];
      if (nz == end) continue;
      V sums[R][W];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 10
        for (int w = 0; w < W; ++w) sums[r][w] = in_register(load<B>(y + (r * W + w) * L));
      }
      while (nz < end) {
        const V weight = nz->value - V{};
        const C* at = places.next(x + nz[kPlaces].offset);
        ++nz;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r, at = in_one_register(at + row)) {
#pragma GCC unroll 10
          for (int w = 0; w < W; ++w) sums[r][w] += weight * load<B>(at + w * L);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 10
        for (int w = 0; w < W; ++w) store<B>(y + (r * W + w) * L, sums[r][w]);
      }
    }
  }

  // The same for images and nonzeros in pairs.
  template <int R, int W>
  FF_INLINE static void sparse_tile(const C* x, int64_t row, NonzeroPairs nonzeros, const int32_t* starts,
                                    int64_t outputs, C* y) {
    const int32_t* place = nonzeros.offsets + starts[0];
    const BFloat16* value = nonzeros.values + starts[0];
    Places places([&](int k) FF_INLINE_LAMBDA { return x + place[k]; });
    for (int64_t o = 0; o < outputs; ++o, y += R * W * L) {
      const int32_t* const end = nonzeros.offsets + starts[o + 1];
      if (place == end) continue;
      V sums[R * W];
#pragma GCC unroll 20
      for (int k = 0; k < R * W; ++k) sums[k] = in_register(load<B>(y + k * L));
      for (; place + 1 < end; place += 2, value += 2) {
        int64_t both;  // offsets, by one load
        std::memcpy(&both, place + kPlaces, sizeof(both));
        const C* const first = places.next(x + int32_t(both));
        const C* const second = places.next(x + (both >> 32));
        add_two<R, W>(sums, first, second, row, value);
      }
      if (place < end) {
        add_one<R, W>(sums, places.next(x + place[kPlaces]), row, *value);
        ++place, ++value;
      }
#pragma GCC unroll 20
      for (int k = 0; k < R * W; ++k) store<B>(y + k * L, sums[k]);
    }
  }

  // y[o][j] = start[o], a register for each output; null: 0.
  FF_INLINE static void fill(const C* start, int64_t outputs, int64_t registers, C* y) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t o = 0; o < outputs; ++o) {
        const V value = start ? load<B>(start + o * L) : V{};
        for (int64_t k = 0; k < registers; ++k, y += L) store<B>(y, value);
      }
    });
  }

  // Of nonzeros of either kind.
  template <class N>
  FF_INLINE static void sparse(const Tile& tile, const C* x, int64_t row, N nonzeros, const int32_t* starts,
                               int64_t outputs, C* y) {
    with_shape(tile, [&]<int R, int W>() FF_INLINE_LAMBDA {
      outline<B>([&]() FF_INLINE_LAMBDA { sparse_tile<R, W>(x, row, nonzeros, starts, outputs, y); });
    });
  }

  // grads[nz] += Σ_j y[o][j] · x[offsets[nz] + j]: the gradient of the values in `sparse`, y in rows too. The lanes of
  // L nonzeros, of whatever outputs, are summed at once. E: Pair where x and y are in pairs.
  template <class E, int R, int W>
  FF_INLINE static void sampled_tile(const C* x, int64_t row, const int32_t* offsets, const int32_t* starts,
                                     int64_t outputs, const C* y, int64_t y_channel, int64_t y_row, C* grads) {
    constexpr int step = std::is_same_v<E, Pair> ? 2 : 1;  // rows that a register has
    alignas(64) C lanes[L * L];
    auto waiting = [&](int n) FF_INLINE_LAMBDA { return in_register(load<B>(lanes + n * L)); };
    const int32_t* place = offsets + starts[0];
    Places places([&](int k) FF_INLINE_LAMBDA { return x + place[k]; });
    grads += starts[0];
    C* held = lanes;
    for (int64_t o = 0; o < outputs; ++o, y += y_channel) {
      const int32_t* const end = offsets + starts[o + 1];
      if (place == end) continue;
      auto part = [&](const C* at, int r) FF_INLINE_LAMBDA {
        const auto all = bit_cast<Operands<E, B>>(load<B>(at));
        if constexpr (step == 2) {
          if (r + 1 == R) return unpack_low(all, Operands<E, B>{});  // the next row is not of the tile
        }
        return all;
      };
      Operands<E, B> dy[R][W];
#pragma GCC unroll 4
      for (int r = 0; r < R; r += step) {
#pragma GCC unroll 10
        for (int w = 0; w < W; ++w) dy[r][w] = part(y + r * y_row + w * L, r);
      }
      do {
        const C* at = places.next(x + place[kPlaces]);
        ++place;
        V sums[4]{};
#pragma GCC unroll 4
        for (int r = 0; r < R; r += step, at = in_one_register(at + step * row)) {
#pragma GCC unroll 10
          for (int w = 0; w < W; ++w) {
            add_product<E, B>(sums[(r / step * W + w) % 4], dy[r][w], part(at + w * L, r));
          }
        }
        store<B>(held, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        held += L;
        if (held == lanes + L * L) {
          store<B>(grads, load<B>(grads) + sums_of_rows<L, V>(waiting, 0));
          held = lanes, grads += L;
        }
      } while (place < end);
    }
    for (const C* at = lanes; at < held; at += L) *grads++ += sum_lanes(load<B>(at));
  }

  template <class E>
  FF_INLINE static void sampled(const Tile& tile, const C* x, int64_t row, const int32_t* offsets,
                                const int32_t* starts, int64_t outputs, const C* y, int64_t y_channel, int64_t y_row,
                                C* grads) {
    with_shape(tile, [&]<int R, int W>() FF_INLINE_LAMBDA {
      outline<B>([&]() FF_INLINE_LAMBDA {
        sampled_tile<E, R, W>(x, row, offsets, starts, outputs, y, y_channel, y_row, grads);
      });
    });
  }
};

// Input channels packed at a time, at least: lines of channels_last images, one after the other.
constexpr int64_t kChunk = 16;

// What it costs to pack a register beside all that is computed for a register of outputs, in instructions.
inline double packing_cost(const Conv& c, int64_t rank, const Sparse& mu) {
  const double nonzeros = double(mu.count) / std::max<int64_t>(c.groups * c.i, 1);
  return 12 / (rank * (c.kh * c.kw + c.o) + 1.5 * nonzeros + 1);
}

// The channels of a group, shared out among items of work where there are few units; each item then packs for itself.
struct Shares {
  int64_t count = 1, channels = 0, step = 1;  // all channels; of which a share begins at a multiple of `step`
  int64_t first(int64_t share) const {
    return share == count ? channels : (2 * share * channels + count * step) / (2 * count * step) * step;
  }
  int64_t size(int64_t share) const { return first(share + 1) - first(share); }
  // Channels of the largest share.
  int64_t most() const {
    int64_t out = 1;
    for (int64_t share = 0; share < count; ++share) out = std::max(out, size(share));
    return out;
  }
};

// Shares by which threads end together, or nearly. times(shares): of all items, one thread taking those of a stretch.
template <class F>
Shares make_shares(int64_t channels, int64_t step, int64_t threads, const F& times) {
  const auto longest = [&](const Shares& shares) {
    const std::vector<double> items = times(shares);
    const int64_t stretch = ceil_div(int64_t(items.size()), threads);
    double most = 0, sum = 0;
    for (int64_t k = 0; k < int64_t(items.size()); ++k) most = std::max(most, sum = (k % stretch ? sum : 0) + items[k]);
    return std::pair{most, int64_t(items.size())};
  };
  Shares best{1, channels, step};
  auto [least, whole] = threads > 1 ? longest(best) : std::pair{0., INT64_MAX / 2};
  for (int64_t count = 2; count <= threads && count * step < channels + step && whole * (count - 1) < 4 * threads;
       ++count) {
    const Shares shares{count, channels, step};
    if (const double time = longest(shares).first; time < 0.95 * least) least = time, best = shares;
  }
  return best;
}

// What a share of them takes of the time of all channels, of which a part is that for packing.
inline double time_of(const Shares& shares, int64_t share, double packing) {
  return packing + (1 - packing) * double(shares.size(share)) / double(std::max<int64_t>(shares.channels, 1));
}

// Bytes of the first cache.
inline int64_t first_cache() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t bytes = std::clamp<int64_t>(sysconf(_SC_LEVEL1_DCACHE_SIZE), 32768, 65536);
  return bytes;
#else
  return 32768;
#endif
}

// Whether images and nonzeros are taken in pairs. It takes longer to pack them so, which a channel's few nonzeros do
// not repay.
template <class T>
bool in_pairs(const Conv& c, const Sparse& mu) {
#ifdef FF_EMULATE_PAIRS
  constexpr int64_t kLeast = 0;
#else
  constexpr int64_t kLeast = 20;
#endif
  return in_pairs<T>() && mu.count >= kLeast * c.groups * std::max(c.i, c.o);
}

// For so many nonzeros, whose order is still to be given: blocks of input channels of which the first cache holds what
// a tile reads, and more where a row of a block would have few nonzeros, but no more than `most`.
inline Plan make_plan(const Geometry& s, const Tiling& tiling, int64_t count, bool pairs, int64_t most = INT64_MAX) {
  Plan plan{s.o, s.groups, 0, 0, 0, count, nullptr};
  if (!count) return plan;
  constexpr int64_t kMost = 81920;
  const double nonzeros = pairs ? 24 : 12;
  int64_t columns = 0;  // of the widest tile
  for (const Tile& tile : tiling.tiles) columns = std::max(columns, tile.columns);
  const int64_t registers = rows_read(s.phases, &Taps::row, s.stride[0], tiling.tiles[0].rows).size() *
                            rows_read(s.phases, &Taps::column, s.stride[1], columns).size();
  const int64_t bytes = std::max<int64_t>(registers, 1) * register_bytes();
  const double per_channel = double(count) / (s.phases.size() * s.groups * s.o * s.i);
  const int64_t wanted = std::max<int64_t>(
      first_cache() / bytes, std::min<int64_t>(kMost / bytes, int64_t(std::min(nonzeros / per_channel, 1e6))));
  // A power of two, so that whole lines of channels are whole blocks.
  plan.block = 1;
  while (plan.block * 3 <= wanted * 2 && plan.block * 2 <= most) plan.block *= 2;
  plan.block = std::min(plan.block, s.i);
  plan.blocks = ceil_div(s.i, plan.block);
  plan.keys = s.phases.size() * s.groups * plan.blocks * (s.o + 1);
  return plan;
}

// Calls take(row, nz) for each row of μ, the output channels of s, with its first nonzero; it returns that of the next.
template <class Take>
void each_row(const Geometry& s, const Sparse& mu, int64_t taps, ParallelFor parallel_for, const Take& take) {
  const int64_t rows = s.groups * s.o;
  parallel(parallel_for, rows, ceil_div(8192 * rows, mu.count), [&](int64_t begin, int64_t end) {
    int64_t nz = std::lower_bound(mu.index, mu.index + mu.count, begin * s.i * taps) - mu.index;
    for (int64_t row = begin; row < end; ++row) nz = take(row, nz);
  });
}

// The start of the first block of a row of μ in a plan; from block to block it is `outputs` + 1 further.
inline int64_t row_of_starts(const Plan& plan, int64_t row) {
  return row / plan.outputs * plan.blocks * (plan.outputs + 1) + row % plan.outputs;
}

inline void sum_starts(const Plan& plan, int32_t* starts) {
  int32_t sum = 0;
  for (int64_t at = 0; at < plan.keys; ++at) sum += std::exchange(starts[at], sum);
}

// The order of the nonzeros of μ, of `taps` taps, for s from the input channels of μ to its output channels: the plan's
// `starts` and, in that order, the offset of each. A row of μ has the nonzeros of a block one after the other.
inline void find_order(const Plan& plan, const Geometry& s, const Slab& slab, const Sparse& mu, int64_t taps,
                       int32_t* starts, int32_t* offsets, ParallelFor parallel_for) {
  const int64_t columns = s.i * taps;
  const Scratch<int32_t> of(columns);
  for (int64_t k = 0; k < columns; ++k) {
    of.get()[k] = int32_t(slab.offset[0][k % taps] + k / taps % plan.block * slab.channel);
  }
  std::memset(starts, 0, plan.keys * sizeof(int32_t));
  each_row(s, mu, taps, parallel_for, [&](int64_t row, int64_t nz) {
    int32_t* at = starts + row_of_starts(plan, row);
    for (int64_t k = 0; k < plan.blocks; ++k, at += plan.outputs + 1) {
      const int64_t first = nz, stop = row * columns + std::min((k + 1) * plan.block, s.i) * taps;
      while (nz < mu.count && mu.index[nz] < stop) ++nz;
      *at = int32_t(nz - first);
    }
    return nz;
  });
  sum_starts(plan, starts);
  each_row(s, mu, taps, parallel_for, [&](int64_t row, int64_t nz) {
    const int32_t* at = starts + row_of_starts(plan, row);
    for (int64_t k = 0; k < plan.blocks; ++k, at += plan.outputs + 1) {
      for (int32_t j = at[0]; j < at[1]; ++j) offsets[j] = of.get()[mu.index[nz++] - row * columns];
    }
    return nz;
  });
}

// The same for s from the output channels of μ to its input channels, and in that order the number of each nonzero.
inline void transpose_order(const Plan& plan, const Geometry& s, const Slab& slab, const Sparse& mu, int64_t taps,
                            int32_t* starts, int32_t* offsets, int32_t* from, ParallelFor parallel_for) {
  struct Column {
    int32_t key, offset;
  };
  const int64_t rows = s.i, columns = s.o * taps, pieces = s.groups * plan.blocks;
  const Scratch<Column> of(columns);
  for (size_t phase = 0; phase < s.phases.size(); ++phase) {
    const std::vector<int64_t>& tap = s.phases[phase].tap;
    for (size_t n = 0; n < tap.size(); ++n) {
      for (int64_t o = 0; o < s.o; ++o) {
        of.get()[o * taps + tap[n]] = {int32_t(phase * (plan.keys / s.phases.size()) + o),
                                       int32_t(slab.offset[phase][n])};
      }
    }
  }
  // Blocks of rows share no key.
  auto each = [&](auto&& take) {
    parallel(parallel_for, pieces, ceil_div(8192 * pieces, mu.count), [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece % plan.blocks * plan.block, count = std::min(plan.block, rows - first);
        int64_t position = (piece / plan.blocks * rows + first) * columns;
        int64_t nz = std::lower_bound(mu.index, mu.index + mu.count, position) - mu.index;
        for (int64_t row = 0; row < count; ++row, position += columns) {
          for (; nz < mu.count && mu.index[nz] < position + columns; ++nz) {
            const Column& column = of.get()[mu.index[nz] - position];
            take(nz, piece * (s.o + 1) + column.key, row * slab.channel + column.offset);
          }
        }
      }
    });
  };
  std::memset(starts, 0, plan.keys * sizeof(int32_t));
  each([&](int64_t, int64_t key, int64_t) FF_INLINE_LAMBDA { ++starts[key]; });
  sum_starts(plan, starts);
  const Scratch<int32_t> next(plan.keys);
  std::copy(starts, starts + plan.keys, next.get());
  each([&](int64_t nz, int64_t key, int64_t offset) FF_INLINE_LAMBDA {
    const int32_t at = next.get()[key]++;
    offsets[at] = int32_t(offset), from[at] = int32_t(nz);
  });
}

// The order of the nonzeros of μ by a plan.
struct KeptOrder {
  std::vector<int64_t> numbers;                // all that it depends on beside the positions
  uint64_t digest;                             // of the positions
  std::vector<int32_t> starts, offsets, from;  // kPlaces offsets more; `from` if transposed
  int64_t bytes() const {
    return numbers.size() * sizeof(int64_t) + (starts.size() + offsets.size() + from.size()) * sizeof(int32_t);
  }
};

inline std::shared_ptr<KeptOrder> make_order(const Plan& plan, const Geometry& s, const Slab& slab, const Sparse& mu,
                                             int64_t taps, bool transposed, ParallelFor parallel_for) {
  const auto out = std::make_shared<KeptOrder>();
  out->starts.resize(plan.keys), out->offsets.resize(mu.count + kPlaces);
  if (transposed) {
    out->from.resize(mu.count);
    transpose_order(plan, s, slab, mu, taps, out->starts.data(), out->offsets.data(), out->from.data(), parallel_for);
  } else {
    find_order(plan, s, slab, mu, taps, out->starts.data(), out->offsets.data(), parallel_for);
  }
  return out;
}

// Positions seldom change from one step to the next: the orders used last are kept, up to 128 MiB, and given out again
// where the digest of all positions is that of those they were found for.
inline std::shared_ptr<const KeptOrder> recent_order(const Plan& plan, const Geometry& s, const Slab& slab,
                                                     const Sparse& mu, int64_t taps, bool transposed,
                                                     ParallelFor parallel_for) {
  static Recent<KeptOrder>& recent =
      *new Recent<KeptOrder>(int64_t(128) << 20);  // never destroyed: threads may outlive main
  std::vector<int64_t> numbers = {transposed,   s.groups,   s.i,         s.o,       taps,
                                  slab.channel, plan.block, plan.blocks, plan.keys, plan.count};
  for (size_t phase = 0; phase < s.phases.size(); ++phase) {
    const auto &tap = s.phases[phase].tap, &offset = slab.offset[phase];
    numbers.push_back(tap.size());
    numbers.insert(numbers.end(), tap.begin(), tap.end());
    numbers.insert(numbers.end(), offset.begin(), offset.begin() + tap.size());
  }
  const uint64_t key = positions_digest(mu, parallel_for);
  const auto same = [&](const KeptOrder& e) { return e.digest == key && e.numbers == numbers; };
  if (auto found = recent.find(same)) return found;
  const auto out = make_order(plan, s, slab, mu, taps, transposed, parallel_for);
  out->numbers = std::move(numbers), out->digest = key;
  recent.add(out);
  return out;
}

// Calls run(nz, j, n) for the nonzeros nz … nz + n that are j … j + n of an order that is not transposed.
template <class Run>
void each_run(const Plan& plan, const int32_t* starts, const Geometry& s, const Sparse& mu, int64_t taps,
              ParallelFor parallel_for, const Run& run) {
  each_row(s, mu, taps, parallel_for, [&](int64_t row, int64_t nz) {
    const int32_t* at = starts + row_of_starts(plan, row);
    for (int64_t k = 0; k < plan.blocks; ++k, at += plan.outputs + 1) {
      run(nz, at[0], at[1] - at[0]);
      nz += at[1] - at[0];
    }
    return nz;
  });
}

// The values of μ in their order: put(j, value) for each.
template <class T, class Put>
void sort_values(const Plan& plan, const Geometry& s, const Sparse& mu, int64_t taps, const KeptOrder& order,
                 ParallelFor parallel_for, const Put& put) {
  const T* const values = static_cast<const T*>(mu.values);
  const int32_t* const from = order.from.data();
  if (order.from.empty()) {
    return each_run(plan, order.starts.data(), s, mu, taps, parallel_for, [&](int64_t nz, int64_t first, int64_t n) {
      for (int64_t j = 0; j < n; ++j) put(first + j, values[nz + j]);
    });
  }
  parallel(parallel_for, mu.count, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) put(j, values[from[j]]);
  });
}

// The nonzeros of μ in their order, kPlaces more of zero.
template <class T>
void sort_nonzeros(const Plan& plan, const Geometry& s, const Sparse& mu, int64_t taps, const KeptOrder& order,
                   Nonzero<Compute<T>>* to, ParallelFor parallel_for) {
  const int32_t* const offsets = order.offsets.data();
  std::fill_n(to + mu.count, kPlaces, Nonzero<Compute<T>>{});
  sort_values<T>(plan, s, mu, taps, order, parallel_for,
                 [&](int64_t j, T value) { to[j] = {to_compute(value), offsets[j]}; });
}

// Where they are multiplied in pairs, their values alone.
template <class T>
void sort_nonzeros(const Plan& plan, const Geometry& s, const Sparse& mu, int64_t taps, const KeptOrder& order, T* to,
                   ParallelFor parallel_for) {
  sort_values<T>(plan, s, mu, taps, order, parallel_for, [&](int64_t j, T value) { to[j] = value; });
}

// v [rank, groups·o, i] for Tiles::multiply, from `inputs` to `outputs` channels: [group][outputs / width][rank ·
// inputs][width], the last block narrower, as that of each of the `shares` of the outputs. With `swapped`, from the
// output channels of v to its input channels. Of pairs, a block has half as many.
template <class T>
void pack_v(const T* v, int64_t groups, int64_t inputs, int64_t outputs, int64_t rank, bool swapped, int64_t width,
            bool pairs, Compute<T>* to, ParallelFor parallel_for, const Shares& shares) {
  const int64_t rows = swapped ? inputs : outputs, columns = swapped ? outputs : inputs;
  const int64_t in_share = ceil_div(shares.most(), width), blocks = shares.count * in_share, depth = rank * inputs;
  parallel(parallel_for, groups * blocks, ceil_div(16384, width * depth), [&](int64_t begin, int64_t end) {
    const Scratch<Compute<T>> single(pairs ? width * depth : 0);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t group = block / blocks, share = block % blocks / in_share;
      const int64_t o = shares.first(share) + block % in_share * width,
                    m = std::min(width, shares.first(share + 1) - o);
      if (m <= 0) continue;
      Compute<T>* const packed = to + (group * outputs + o) * depth / (pairs ? 2 : 1);
      Compute<T>* next = pairs ? single.get() : packed;
      for (int64_t r = 0; r < rank; ++r) {
        const T* from = v + (r * groups + group) * rows * columns;
        for (int64_t i = 0; i < inputs; ++i) {
          for (int64_t k = 0; k < m; ++k) {
            *next++ = to_compute(swapped ? from[i * columns + o + k] : from[(o + k) * columns + i]);
          }
        }
      }
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (pairs) make_pairs<16>(single.get(), m, depth, m, packed, m);
      }
    }
  });
}

// du [rank, taps] and dv [rank, groups·o, i], null where not asked for, from their partial sums du_parts
// [part][group][chunk of the input channels][rank · taps] and dv_parts [part][group][o][rank · i, in rows of `row`],
// which are lost.
template <class T>
void add_parts(int64_t parts, int64_t groups, int64_t rank, int64_t o, int64_t i, int64_t taps, int64_t row,
               const Compute<T>* du_parts, T* du, Compute<T>* dv_parts, T* dv, ParallelFor parallel_for,
               int64_t chunks = 1) {
  using C = Compute<T>;
  for (int64_t k = 0; k < rank * taps && du; ++k) {
    C sum = 0;
    for (int64_t item = 0; item < parts * groups * chunks; ++item) sum += du_parts[item * rank * taps + k];
    du[k] = from_compute<T>(sum);
  }
  if (!dv) return;
  const int64_t outputs = groups * o, depth = rank * i;
  parallel(parallel_for, outputs, ceil_div(16384, depth * parts), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      C* sums = dv_parts + at * row;
      for (int64_t part = 1; part < parts; ++part) {
        const C* from = sums + part * outputs * row;
        for (int64_t k = 0; k < depth; ++k) sums[k] += from[k];
      }
      for (int64_t r = 0; r < rank; ++r, sums += i) {
        T* const to = dv + (r * outputs + at) * i;
        for (int64_t k = 0; k < i; ++k) to[k] = from_compute<T>(sums[k]);
      }
    }
  });
}

}  // namespace fastfact
