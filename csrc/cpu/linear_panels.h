// y = x Wᵀ + bias with W = Σ_r v_r ⊗ u_r + μ, μ sparse, and its gradients: linear layers and 1×1 convolutions.
//
// The rows of x are in the lanes. A unit of work is up to 8 registers of rows. Its part of x is turned into a panel
// [input][row], and then
//   h = u x, y = v h + bias       thin products,
//   y[o] += μ[o, i] · x[i]        for each nonzero, the sums of an output kept in registers;
// backward
//   dh = v dy, dx = uᵀ dh         thin products; of h and dh, when all rows have them, du = dhᵀ x and dv = hᵀ dy,
//   dx[i] += μ[o, i] · dy[o], dμ[o, i] += dy[o] · x[i]    for each nonzero, x and dx of an input kept in registers.
// In bfloat16 panels of x and dy are in halves where the machine multiplies pairs, and nonzeros are taken by two.
// So nothing of the size of W is made. Forward the nonzeros are taken in their own order; backward they are sorted by
// inputs first, unless there are so few rows that this would take longer than the rest: then dy of an output is kept.
// Panels that the second cache does not hold are taken in blocks. The threads end together: units are shared out by
// outputs, backward by inputs, where one has a part of them, and each thread makes the panels that it reads.
#include <atomic>
#pragma once

#include <atomic>
#include <limits>
#include <memory>
#include <vector>

#include "gemm.h"
#include "items.h"
#include "recent.h"
#include "tiles.h"

namespace fastfact::panels {

constexpr int64_t kRegisters = 8;        // of rows of a unit
constexpr int64_t kLeastWork = 1 << 17;  // multiplications of an item
constexpr int64_t kSorted = 64;          // more rows repay nonzeros that are sorted
constexpr double kTurning = 6;           // what it takes to turn a channel of a register, in nonzeros
constexpr int64_t kFewRows = 16;         // up to these, factors are read where they lie

// Bytes of a panel that the second cache holds beside others: with AVX-512 it has 1 MB at least.
inline int64_t second_cache() { return register_bytes() == 64 ? 1 << 19 : 1 << 17; }

// Rows [n, channels] in memory, see `Matrix`.
template <class T>
struct Rows {
  T* data;
  int64_t channels, plane;
  Rows from_channel(int64_t c) const { return {data + (plane ? c * plane : c), channels, plane}; }
};

template <class T>
Rows<const T> rows_of(const Matrix<const void>& m) {
  return {static_cast<const T*>(m.data), m.channels, m.plane};
}
template <class T>
Rows<T> rows_of(const Matrix<void>& m) {
  return {static_cast<T*>(m.data), m.channels, m.plane};
}

struct Unit {
  int64_t first, rows;
};

inline std::vector<Unit> make_units(int64_t n, int64_t lanes, int64_t most) {
  std::vector<Unit> units;
  for (int64_t first = 0; first < n; first += units.back().rows) {
    const int64_t left = n - first, registers = ceil_div(left, lanes);
    units.push_back({first, std::min(left, registers == 5 ? 4 * lanes : most * lanes)});
  }
  return units;
}

// Registers of a unit whose nonzeros are taken by inputs: twice as many, x and dx, are held at once. Half of what
// AVX-512 can hold, where the panels of x, dx and dy would be more than twice what the second cache has.
inline int64_t registers_by_inputs(int64_t i, int64_t o, bool pairs) {
  const int64_t bytes = (pairs ? 3 * i + o : 4 * i + 2 * o) * kRegisters * 32;
  return register_bytes() == 64 && bytes <= 4 * second_cache() ? 8 : 4;
}

// The work of a call, forward and backward.
template <class C>
struct Work {
  struct Factor {  // element (m, k) is at m·row + k·step
    const C* data;
    int64_t row, step;
    const void* own = nullptr;  // the same in bfloat16, step 1: for panels in halves
  };
  int64_t i, o, rank, row;  // `row`: elements of a row of a panel, in memory that all items share
  bool pairs;               // whether x and dy are in halves
  int64_t half;             // elements of a row of theirs
  std::vector<Unit> units;
  // By outputs: bounds [o][blocks + 1], the first nonzero of each block of inputs. By inputs: the nonzeros sorted by
  // block of outputs, then inputs; bounds [blocks][i] and one more, the first of each input; and their outputs.
  bool by_inputs;
  int64_t block, blocks;  // inputs (outputs) of a block, blocks
  const int32_t *index, *bounds, *outputs;
  const C* values;
  Factor u_rows, u_columns, v_rows, v_columns;      // u [rank, i], uᵀ, v [rank, o], vᵀ
  int64_t rows_of_dy() const { return o + pairs; }  // the last of zeros
};

// Channels [first, last) of the units of a part.
struct Piece {
  int64_t part, first, last;
};

// What the items of a call do.
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> starts{0};  // of the items, and the end
  int64_t count() const { return int64_t(starts.size()) - 1; }
};

// `count` items of equal work. Each piece of a part takes weights[part] · (before + work(last) - work(first)), work(c)
// being that of channels [0, c).
template <class F>
Pieces cut(const std::vector<double>& weights, int64_t channels, double before, const F& work, int64_t count) {
  const int64_t step = channels < 128 ? 4 : 16;  // whole lines of memory
  double total = 0;
  for (double weight : weights) total += weight * (before + work(channels));
  for (bool again = false;; again = true) {
    Pieces out;
    int64_t part = 0, channel = 0;
    double repeated = 0;
    for (int64_t item = 0; item < count; ++item) {
      double left = item + 1 < count ? total / double(count) : std::numeric_limits<double>::infinity();
      while (part < int64_t(weights.size())) {
        const auto time = [&](int64_t last) { return weights[part] * (before + work(last) - work(channel)); };
        int64_t last = channels;
        if (time(channels) > left) {
          int64_t low = channel / step, high = ceil_div(channels, step);
          while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (time(middle * step) <= left ? low : high) = middle;
          }
          last = low * step;
          if (channels - last < channels / 16) last = channels;
          if (last - channel <= channels / 16) break;
        }
        out.all.push_back({part, channel, last});
        left -= time(last);
        if (channel) repeated += weights[part] * before;
        channel = last;
        if (channel < channels) break;
        ++part, channel = 0;
      }
      out.starts.push_back(int64_t(out.all.size()));
    }
    if (again || repeated == 0) return out;
    total += repeated;
  }
}

// Items for so many threads, of parts of the rows.
inline int64_t items_for(int64_t threads, int64_t parts, double multiplications) {
  const int64_t most = int64_t(multiplications / double(kLeastWork));
  return threads < 2 ? 1
                     : std::clamp<int64_t>(threads * std::clamp<int64_t>(parts / (8 * threads), 1, 4), 1,
                                           std::max<int64_t>(most, 1));
}

// Whether positions ascend and are in [0, size).
inline bool ascending(const Sparse& mu, int64_t size, ParallelFor parallel_for) {
  if (!mu.index) return true;
  if (!mu.count) return true;
  std::atomic<bool> valid{mu.index[0] >= 0 && mu.index[mu.count - 1] < size};
  parallel(parallel_for, mu.count - 1, 1 << 15, [&](int64_t begin, int64_t end) {
    bool sorted = true;
    for (int64_t j = begin; j < end; ++j) sorted &= mu.index[j] < mu.index[j + 1];
    if (!sorted) valid = false;
  });
  return valid;
}

// The first of ascending positions that is not below `position`, looked for from `from` on.
inline const int32_t* find_near(const int32_t* from, const int32_t* last, int64_t position) {
  int64_t step = 16;
  for (; last - from > step && from[step] < position; step *= 2) from += step;
  return std::lower_bound(from, last - from > step ? from + step + 1 : last, position);
}

template <class C>
void find_bounds(const Work<C>& p, const Sparse& mu, int32_t* bounds, ParallelFor parallel_for) {
  parallel(parallel_for, p.o, 1 + 1024 / (p.blocks + 1), [&](int64_t begin, int64_t end) {
    const int32_t *const last = mu.index + mu.count, *nz = std::lower_bound(mu.index, last, begin * p.i);
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t b = 0; b <= p.blocks; ++b) {
        if (b) nz = find_near(nz, last, o * p.i + std::min(b * p.block, p.i));
        bounds[o * (p.blocks + 1) + b] = int32_t(nz - mu.index);
      }
    }
  });
}

// The nonzeros by inputs: `bounds` and `outputs` of the work, `places` where each comes from. For pairs, of a row
// beyond the outputs one more where an input would have an odd number.
template <class C>
void sort_by_inputs(const Work<C>& p, const Sparse& mu, int32_t* bounds, int32_t* outputs, int32_t* places,
                    ParallelFor parallel_for) {
  std::vector<int32_t> rows(p.o + 1);
  for (int64_t o = 0; o <= p.o; ++o) {
    rows[o] = int32_t(find_near(mu.index + (o ? rows[o - 1] : 0), mu.index + mu.count, o * p.i) - mu.index);
  }
  int32_t place = 0;
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int64_t first = b * p.block, last = std::min(p.o, first + p.block);
    const int64_t chunks = std::clamp<int64_t>((rows[last] - rows[first]) >> 12, 1, 16);
    std::vector<int32_t> next(chunks * p.i);  // of each chunk and input: how many, then where the next one goes
    auto each = [&](const auto& body) {
      parallel(parallel_for, chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          int32_t* const of_chunk = next.data() + chunk * p.i;
          const int64_t to = first + (last - first) * (chunk + 1) / chunks;
          for (int64_t o = first + (last - first) * chunk / chunks; o < to; ++o) {
            for (int32_t nz = rows[o]; nz < rows[o + 1]; ++nz) body(of_chunk[mu.index[nz] - o * p.i], o, nz);
          }
        }
      });
    };
    each([](int32_t& count, int64_t, int32_t) { ++count; });
    for (int64_t i = 0; i < p.i; ++i) {
      bounds[b * p.i + i] = place;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        place += std::exchange(next[chunk * p.i + i], place);
      }
      if (p.pairs && place % 2) outputs[place] = int32_t(p.o), places[place] = -1, ++place;
    }
    each([&](int32_t& to, int64_t o, int32_t nz) {
      outputs[to] = int32_t(o), places[to] = nz;
      ++to;
    });
  }
  bounds[p.blocks * p.i] = place;
}

// What a call finds out about the positions of μ.
struct Order {
  int64_t i, o, by_inputs, pairs, block, count;
  uint64_t digest;     // of the positions
  int64_t size, most;  // of `bounds`; of the others, at most
  Buffer<int32_t> bounds, outputs, places;

  template <class C>
  Order(const Work<C>& w, int64_t count, uint64_t digest)
      : i(w.i),
        o(w.o),
        by_inputs(w.by_inputs),
        pairs(w.pairs),
        block(w.block),
        count(count),
        digest(digest),
        size(w.by_inputs ? w.blocks * w.i + 1 : w.o * (w.blocks + 1)),
        most(w.by_inputs ? count + (w.pairs ? std::min(count, w.blocks * w.i) : 0) : 0),
        bounds(size),
        outputs(most),
        places(most) {}
  int64_t sorted() const { return bounds.get()[size - 1]; }  // nonzeros by inputs
  int64_t bytes() const { return (size + 2 * most) * int64_t(sizeof(int32_t)); }
};

// The order of the nonzeros, null where their positions do not ascend in μ. Those used last are kept, up to 64 MiB, and
// found by the digest of all positions.
template <class C>
std::shared_ptr<const Order> find_order(const Work<C>& w, const Sparse& mu, ParallelFor parallel_for) {
  static auto* const recent = new Recent<Order>(int64_t(1) << 26);  // for as long as there are threads
  const uint64_t key = positions_digest(mu, parallel_for);
  const auto same = [&](const Order& e) {
    return e.digest == key && e.count == mu.count && e.i == w.i && e.o == w.o && e.by_inputs == w.by_inputs &&
           e.pairs == w.pairs && e.block == w.block;
  };
  if (auto found = recent->find(same)) return found;
  if (!ascending(mu, w.o * w.i, parallel_for)) return nullptr;
  const auto out = std::make_shared<Order>(w, mu.count, key);
  if (w.by_inputs) {
    sort_by_inputs(w, mu, out->bounds.get(), out->outputs.get(), out->places.get(), parallel_for);
  } else {
    find_bounds(w, mu, out->bounds.get(), parallel_for);
  }
  recent->add(out);
  return out;
}

// f.template operator()<W, N>() for panels that hold so many rows: N registers of W bytes, two for each of halves.
template <class C, int B, class F>
FF_INLINE void with_panel(int64_t rows, bool pairs, const F& f) {
  constexpr int64_t L = B / sizeof(C);
  if (!pairs) {
    if (rows == 1) return f.template operator()<int(sizeof(C)), 1>();
    if constexpr (B > 16) {
      if (rows <= int64_t(16 / sizeof(C))) return f.template operator()<16, 1>();
    }
    if constexpr (B > 32) {
      if (rows <= int64_t(32 / sizeof(C))) return f.template operator()<32, 1>();
    }
    if (rows <= L) return f.template operator()<B, 1>();
  }
  if (rows <= 2 * L) return f.template operator()<B, 2>();
  if (rows <= 4 * L) return f.template operator()<B, 4>();
  f.template operator()<B, 8>();
}

// The elements of a row of such a panel.
template <class C, int B>
FF_INLINE int64_t row_of_panel(int64_t rows, bool pairs) {
  int64_t row = 0;
  with_panel<C, B>(rows, pairs, [&]<int W, int N>() FF_INLINE_LAMBDA { row = N * W / int64_t(sizeof(C)); });
  return row;
}

// What is done with panels [channel][N registers of W bytes].
template <class C, int B, int W, int N>
struct Panels {
  using V = typename VecOf<C, W>::Type;
  using Ops = Tiles<C, W>;
  using Factor = typename Work<C>::Factor;
  static constexpr int L = W / int(sizeof(C)), P = N * L;
  template <class T>
  static constexpr bool kPairs = std::is_same_v<T, BFloat16> && kMultipliesPairs<B> && W == B && N % 2 == 0;
  static constexpr int kHalf = P / 2;

  // f(pixels before, first element of channel 0, pixels) for the images that the rows of a unit lie in.
  template <class S, class F>
  FF_INLINE static void each_image(const Rows<S>& m, const Unit& unit, const F& f) {
    for (int64_t done = 0; done < unit.rows;) {
      const int64_t at = unit.first + done, pixel = at % m.plane, count = std::min(unit.rows - done, m.plane - pixel);
      f(done, m.data + at / m.plane * m.channels * m.plane + pixel, count);
      done += count;
    }
  }

  static constexpr int64_t kBlock = kLanes<C, B>;  // rows and channels that are turned together

  // Lines of `kBlock` rows from `row` on that are turned after these.
  template <class T>
  FF_INLINE static void fetch_rows(const T* from, int64_t channels, int64_t row, int64_t rows, bool writes) {
#pragma GCC unroll 16
    for (int64_t l = 0; l < kBlock; ++l) {
      if (row + l >= rows) break;
      if (writes) {
        __builtin_prefetch(from + l * channels, 1);
      } else {
        __builtin_prefetch(from + l * channels);
      }
    }
  }

  // From rows that are `row` elements apart.
  template <class T>
  FF_INLINE static void from_rows(const T* from, int64_t row, int64_t rows, int64_t channels, C* panel) {
    for (int64_t p = 0; p < rows; p += kBlock, from += kBlock * row) {
      const int64_t count = std::min(kBlock, rows - p);
      int64_t c = 0;
      for (; c + kBlock <= channels && count == kBlock; c += kBlock) {
        fetch_rows(from + kBlock * row + c, row, p + kBlock, rows, false);
        Vec<C, B> lines[kBlock];
#pragma GCC unroll 16
        for (int64_t l = 0; l < kBlock; ++l) lines[l] = load<B>(from + l * row + c);
        transpose_from<1, kBlock>(lines);
#pragma GCC unroll 16
        for (int64_t l = 0; l < kBlock; ++l) store<B>(panel + (c + l) * P + p, lines[l]);
      }
      for (; c < channels; ++c) {
        for (int64_t l = 0; l < count; ++l) panel[c * P + p + l] = to_compute(from[l * row + c]);
      }
    }
  }

  // To rows that are `row` elements apart.
  template <class T>
  FF_INLINE static void to_rows(const C* panel, int64_t rows, int64_t channels, T* to, int64_t row) {
    for (int64_t p = 0; p < rows; p += kBlock, to += kBlock * row) {
      const int64_t count = std::min(kBlock, rows - p);
      int64_t c = 0;
      for (; c + kBlock <= channels; c += kBlock) {
        fetch_rows(to + kBlock * row + c, row, p + kBlock, rows, true);
        Vec<C, B> lines[kBlock];
#pragma GCC unroll 16
        for (int64_t l = 0; l < kBlock; ++l) lines[l] = load<B>(panel + (c + l) * P + p);
        transpose_from<1, kBlock>(lines);
        if (count == kBlock) {
#pragma GCC unroll 16
          for (int64_t l = 0; l < kBlock; ++l) store<B>(to + l * row + c, lines[l]);
        } else {
          for (int64_t l = 0; l < count; ++l) store<B>(to + l * row + c, lines[l]);
        }
      }
      for (; c < channels; ++c) {
        for (int64_t l = 0; l < count; ++l) to[l * row + c] = from_compute<T>(panel[c * P + p + l]);
      }
    }
  }

  // Halves of a panel of rows: squares of 2 kBlock rows, which are joined two by two and turned as numbers of 32 bits.
  FF_INLINE static void halves_from_rows(const BFloat16* from, int64_t step, int64_t rows, int64_t channels, C* panel) {
    constexpr int64_t kSquare = 2 * kBlock;
    using Line = Operands<Pair, B>;
    for (int64_t c = 0; c < channels; c += kSquare) {
      // The last one begins earlier where the channels are no multiple of it.
      const int64_t first = std::max<int64_t>(std::min(c, channels - kSquare), 0), count = std::min(kSquare, channels);
      for (int64_t p = 0; p < P; p += kSquare) {
        auto line = [&](int64_t row) FF_INLINE_LAMBDA {
          Line out{};
          if (row >= rows) return out;
          const BFloat16* const at = from + row * step + first;
          if (c + kSquare < channels) __builtin_prefetch(at + kSquare, 0, 2);
          if (count == kSquare) return load_operands<B>(reinterpret_cast<const Pair*>(at));
          std::memcpy(&out, at, count * sizeof(BFloat16));
          return out;
        };
        Line low[kBlock], high[kBlock];
#pragma GCC unroll 16
        for (int64_t l = 0; l < kBlock; ++l) {
          const Line a = line(p + l), b = line(p + l + kBlock);
          low[l] = unpack_low(a, b), high[l] = unpack_high(a, b);
        }
        auto turn = [&](Line* lines, int64_t next) FF_INLINE_LAMBDA {
          transpose_from<1, kBlock>(lines);
#pragma GCC unroll 16
          for (int64_t l = 0; l < kBlock; ++l) {
            const int64_t channel = l / 4 * 8 + l % 4 + next;
            if (channel < count) store<B>(panel + (first + channel) * kHalf + p / 2, bit_cast<V>(put_apart(lines[l])));
          }
        };
        turn(low, 0), turn(high, 4);
      }
    }
  }

  // Halves of a panel. Rows of a plane lie one after the other and are put in fours.
  FF_INLINE static void read_halves(const Rows<const BFloat16>& m, const Unit& unit, int64_t channels, C* panel) {
    if (!m.plane) {
      return outline<B>([&]() FF_INLINE_LAMBDA {
        halves_from_rows(m.data + unit.first * m.channels, m.channels, unit.rows, channels, panel);
      });
    }
    outline<B>([&]() FF_INLINE_LAMBDA {
      each_image(m, unit, [&](int64_t done, const BFloat16* from, int64_t count) FF_INLINE_LAMBDA {
        for (int64_t c = 0; c < channels; ++c) {
          std::memcpy(reinterpret_cast<BFloat16*>(panel + c * kHalf) + done, from + c * m.plane,
                      count * sizeof(BFloat16));
        }
      });
      const int64_t left = (P - unit.rows) * sizeof(BFloat16);
      for (int64_t c = 0; c < channels; ++c, panel += kHalf) {
        std::memset(reinterpret_cast<BFloat16*>(panel) + unit.rows, 0, left);
#pragma GCC unroll 4
        for (int64_t p = 0; p < kHalf; p += L) store<B>(panel + p, fours_of(load<B>(panel + p)));
      }
    });
  }

  // A panel of `channels` channels from memory, zeros beyond the rows of the unit.
  template <class T>
  FF_INLINE static void read(const Work<C>& w, const Rows<const T>& m, const Unit& unit, int64_t channels, C* panel) {
    if constexpr (kPairs<T>) {
      if (w.pairs) return read_halves(m, unit, channels, panel);
    }
    if (m.plane) {
      outline<B>([&]() FF_INLINE_LAMBDA {
        each_image(m, unit, [&](int64_t done, const T* from, int64_t count) FF_INLINE_LAMBDA {
          for (int64_t c = 0; c < channels; ++c) copy<B>(from + c * m.plane, count, panel + c * P + done);
        });
      });
    } else {
      outline<B>([&]() FF_INLINE_LAMBDA {
        from_rows(m.data + unit.first * m.channels, m.channels, unit.rows, channels, panel);
      });
    }
    if (unit.rows == P) return;
    for (int64_t c = 0; c < channels; ++c) std::fill(panel + c * P + unit.rows, panel + (c + 1) * P, C(0));
  }

  // A panel to memory. Up to a register of B bytes beyond it is read.
  template <class T>
  FF_INLINE static void write(const C* panel, const Unit& unit, int64_t channels, const Rows<T>& m) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      if (m.plane) {
        each_image(m, unit, [&](int64_t done, T* to, int64_t count) FF_INLINE_LAMBDA {
          for (int64_t c = 0; c < channels; ++c) copy<B>(panel + c * P + done, count, to + c * m.plane);
        });
      } else {
        to_rows(panel, unit.rows, channels, m.data + unit.first * m.channels, m.channels);
      }
    });
  }

  // to[m] = Σ_k factor(m, k) · right[k], right in halves, for M rows and the columns of N registers.
  template <int M, int kColumns>
  FF_INLINE static void multiply_halves(const BFloat16* factor, int64_t row, const C* right, int64_t depth, C* to) {
    V sums[M][kColumns]{};
    auto add = [&](const C* second, const auto& weight) FF_INLINE_LAMBDA {
      Operands<Pair, B> x[kColumns];
#pragma GCC unroll 4
      for (int p = 0; p < kColumns; p += 2) {
        unpack_both(right + p * L / 2, second ? second + p * L / 2 : nullptr, x[p], x[p + 1]);
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const V pair = weight(factor + m * row) - V{};
#pragma GCC unroll 4
        for (int p = 0; p < kColumns; ++p) add_product<Pair, B>(sums[m][p], x[p], bit_cast<Operands<Pair, B>>(pair));
      }
    };
    for (; depth > 1; depth -= 2, right += 2 * kHalf, factor += 2) {
      add(right + kHalf, [](const BFloat16* at) FF_INLINE_LAMBDA { return pair_at(at); });
    }
    if (depth) add(nullptr, [](const BFloat16* at) FF_INLINE_LAMBDA { return single_at(at); });
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int p = 0; p < kColumns; ++p) store<B>(to + m * P + p * L, sums[m][p]);
    }
  }

  template <int M, int kColumns>
  FF_INLINE static void rows_of_halves(int64_t rows, const BFloat16* factor, int64_t row, const C* right, int64_t depth,
                                       C* to) {
    if constexpr (M > 1) {
      if (rows < M) return rows_of_halves<M - 1, kColumns>(rows, factor, row, right, depth, to);
    }
    multiply_halves<M, kColumns>(factor, row, right, depth, to);
  }

  // to[m] = start[m] + Σ_k factor(m, k) · right[k]; start: B bytes for each m, null: 0. With a factor's own numbers
  // right is in halves.
  FF_INLINE static void multiply(Factor factor, int64_t rows, const C* right, int64_t depth, const C* start, C* to) {
    if constexpr (kPairs<BFloat16> && std::is_same_v<C, float>) {
      if (factor.own) {
        constexpr int kRows = 6, kColumns = std::min(N, 4);
        const BFloat16* const own = static_cast<const BFloat16*>(factor.own);
        return outline<B>([&]() FF_INLINE_LAMBDA {
          for (int64_t p = 0; p < P; p += kColumns * L) {
            for (int64_t m = 0; m < rows; m += kRows) {
              rows_of_halves<kRows, kColumns>(std::min<int64_t>(kRows, rows - m), own + m * factor.row, factor.row,
                                              right + p / 2, depth, to + m * P + p);
            }
          }
        });
      }
    }
    constexpr int kRows = 6, kColumns = std::min(N, B == 64 ? 4 : 2);
    outline<B>([&]() FF_INLINE_LAMBDA {
      Ahead none{};
      alignas(64) C more[kRows][kColumns * L];
      for (int64_t p = 0; p < P; p += kColumns * L) {
        for (int64_t m = 0; m < rows; m += kRows) {
          const int64_t count = std::min<int64_t>(kRows, rows - m);
          for (int64_t k = 0; k == 0 || k < depth; k += kDepth) {
            const C* const from = k || !start ? nullptr : start + m * (B / sizeof(C));
            C* const out = k ? more[0] : to + m * P + p;
            Ops::template rows_of_product<kColumns, kRows, C>(
                count, {factor.data + m * factor.row + k * factor.step, factor.row, factor.step}, right + k * P + p, P,
                std::min(kDepth, depth - k), from, B / sizeof(C), 0, out, k ? kColumns * L : P, none, none);
            for (int64_t row = 0; k && row < count; ++row) {
              C* const sums = to + (m + row) * P + p;
#pragma GCC unroll 4
              for (int j = 0; j < kColumns * L; j += L) store<W>(sums + j, load<W>(sums + j) + load<W>(more[row] + j));
            }
          }
        }
      }
    });
  }

  FF_INLINE static const Pair* pairs_at(const C* p) { return reinterpret_cast<const Pair*>(p); }
  // Of two channels in halves, the second null where there is one, a register of each in pairs.
  FF_INLINE static void unpack_both(const C* first, const C* second, Operands<Pair, B>& low, Operands<Pair, B>& high) {
    const V a = load<B>(first), b = second ? load<B>(second) : V{};
    low = bit_cast<Operands<Pair, B>>(unpack_low(a, b)), high = bit_cast<Operands<Pair, B>>(unpack_high(a, b));
  }
  FF_INLINE static void add_two(const C* first, const C* second, float weights, V* sums) {
    const auto weight = bit_cast<Operands<Pair, B>>(weights - V{});
#pragma GCC unroll 8
    for (int p = 0; p < N; p += 2) {
      Operands<Pair, B> low, high;
      unpack_both(first + p * L / 2, second ? second + p * L / 2 : nullptr, low, high);
      add_product<Pair, B>(sums[p], low, weight);
      add_product<Pair, B>(sums[p + 1], high, weight);
    }
  }

  // y[o] (+)= Σ μ[o, i] · x[i] over the nonzeros of outputs [first, last) in block b of the inputs. With `fresh`, to
  // start[o], B bytes each, null: 0. Values in half precision are converted as they come.
  template <class T>
  FF_INLINE static void add_products(const Work<C>& w, const T* values, int64_t b, int64_t first, int64_t last,
                                     const C* x, bool fresh, const C* start, C* y) {
    if constexpr (kPairs<T>) {
      if (w.pairs) return add_products<true>(w, values, b, first, last, x, fresh, start, y);
    }
    add_products<false>(w, values, b, first, last, x, fresh, start, y);
  }
  template <bool pairs, class T>
  FF_INLINE static void add_products(const Work<C>& w, const T* values, int64_t b, int64_t first, int64_t last,
                                     const C* x, bool fresh, const C* start, C* y) {
    constexpr int kChains = N >= 4 || pairs ? 1 : 4 / N;  // of sums, for the latency of an addition
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int32_t* bounds = w.bounds + first * (w.blocks + 1) + b;
      for (int64_t o = first; o < last; ++o, bounds += w.blocks + 1, y += P) {
        const int64_t base = o * w.i;
        int32_t nz = bounds[0];
        for (bool begins = fresh; begins || nz < bounds[1]; begins = false) {
          const int32_t end = std::min<int32_t>(bounds[1], nz + kDepth);
          V sums[kChains][N]{};
          auto add = [&](V* sums, C value) FF_INLINE_LAMBDA {
            const C* from = x + (w.index[nz++] - base) * P;
            const V weight = value - V{};
#pragma GCC unroll 8
            for (int p = 0; p < N; ++p) sums[p] += weight * load<W>(from + p * L);
          };
          auto add_all = [&](const auto& value) FF_INLINE_LAMBDA {
            while (nz + kChains <= end) {
#pragma GCC unroll 4
              for (int chain = 0; chain < kChains; ++chain) add(sums[chain], value());
            }
            while (nz < end) add(sums[0], value());
          };
          if constexpr (pairs) {
            auto from = [&](int32_t nz) FF_INLINE_LAMBDA { return x + (w.index[nz] - base) * kHalf; };
            for (; nz + 2 <= end; nz += 2) add_two(from(nz), from(nz + 1), pair_at(values + nz), sums[0]);
            if (nz < end) add_two(from(nz), nullptr, single_at(values + nz), sums[0]), ++nz;
          } else if constexpr (std::is_same_v<T, C>) {
            add_all([&]() FF_INLINE_LAMBDA { return values[nz]; });
          } else {
            alignas(64) C converted[kDepth];
            const int32_t begin = nz;
            copy<B>(values + nz, end - nz, converted);
            add_all([&]() FF_INLINE_LAMBDA { return converted[nz - begin]; });
          }
#pragma GCC unroll 8
          for (int p = 0; p < N; ++p) {
#pragma GCC unroll 4
            for (int chain = 1; chain < kChains; ++chain) sums[0][p] += sums[chain][p];
            if (!begins) {
              sums[0][p] += load<W>(y + p * L);
            } else if (start) {
              sums[0][p] += load<W>(start + o * (B / sizeof(C)));
            }
            store<W>(y + p * L, sums[0][p]);
          }
        }
      }
    });
  }

  // dx[i] += μ[o, i] · dy[o] and grads[nz] += dy[o] · x[i], the second summed over the lanes of L nonzeros at once, for
  // inputs [first, last) and block b of the outputs.
  template <bool kInput, bool kValues>
  FF_INLINE static void add_gradients_by_inputs(const Work<C>& w, int64_t b, int64_t first, int64_t last, const C* x,
                                                const C* dy, C* dx, C* grads) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      alignas(64) C lanes[L * L] = {};
      auto waiting = [&](int n) FF_INLINE_LAMBDA { return load<W>(lanes + n * L); };
      const int32_t *const bounds = w.bounds + b * w.i, *const outputs = w.outputs;  // in registers
      const C *const values = w.values, *const from = dy;
      int32_t nz = bounds[first], held = 0;
      for (int64_t i = first; i < last; ++i) {
        if (nz == bounds[i + 1]) continue;
        V in[N];
#pragma GCC unroll 8
        for (int p = 0; p < N && kValues; ++p) in[p] = load<W>(x + i * P + p * L);
        while (nz < bounds[i + 1]) {
          const int32_t end = std::min<int32_t>(bounds[i + 1], nz + kDepth);
          V sums[N]{};
          for (; nz < end; ++nz) {
            const C* const out = from + outputs[nz] * int64_t(P);
            const V weight = values[nz] - V{};
            V dots[2]{};
#pragma GCC unroll 8
            for (int p = 0; p < N; ++p) {
              V gradient = load<W>(out + p * L);
              if constexpr (kInput && kValues) gradient = in_register(gradient);
              if constexpr (kInput) sums[p] += weight * gradient;
              if constexpr (kValues) dots[p % 2] += in[p] * gradient;
            }
            if constexpr (kValues) {
              store<W>(lanes + held * L, dots[0] + dots[1]);
              if (++held == L) {
                C* const to = grads + nz + 1 - L;
                store<W>(to, load<W>(to) + sums_of_rows<L, V>(waiting, 0));
                held = 0;
              }
            }
          }
          if constexpr (kInput) {
#pragma GCC unroll 8
            for (int p = 0; p < N; ++p) store<W>(dx + i * P + p * L, load<W>(dx + i * P + p * L) + sums[p]);
          }
        }
      }
      // As above, so that no sum depends on where the inputs are cut.
      alignas(64) C rest[L];
      if (kValues && held) store<W>(rest, sums_of_rows<L, V>(waiting, 0));
      for (int n = 0; n < held; ++n) grads[nz - held + n] += rest[n];
    });
  }

  // The same from halves; an input has an even number of nonzeros, the last of which may be of a row of zeros.
  template <bool kInput, bool kValues>
  FF_INLINE static void add_gradients_of_halves(const Work<C>& w, const BFloat16* values, int64_t b, int64_t first,
                                                int64_t last, const C* x, const C* dy, C* dx, C* grads) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      alignas(64) C lanes[L * L / 2] = {};  // of two nonzeros, whose sums alternate
      auto waiting = [&](int n) FF_INLINE_LAMBDA { return load<W>(lanes + n / 2 * L); };
      const int32_t *const bounds = w.bounds + b * w.i, *const outputs = w.outputs;
      const BFloat16* const of = values;  // in registers
      const C* const from = dy;
      int32_t nz = bounds[first], held = 0;
      for (int64_t i = first; i < last; ++i) {
        const int32_t end = bounds[i + 1];
        if (nz == end) continue;
        Operands<Pair, B> in[N / 2];
        V sums[N];
#pragma GCC unroll 4
        for (int p = 0; p < N / 2 && kValues; ++p) in[p] = load_operands<B>(pairs_at(x + i * kHalf + p * L));
#pragma GCC unroll 8
        for (int p = 0; p < N && kInput; ++p) sums[p] = load<W>(dx + i * P + p * L);
        for (; nz < end; nz += 2) {
          const C *const one = from + outputs[nz] * int64_t(kHalf), *const two =
                                                                        from + outputs[nz + 1] * int64_t(kHalf);
          const auto weight = bit_cast<Operands<Pair, B>>(pair_at(of + nz) - V{});
          V dots[2]{};
#pragma GCC unroll 4
          for (int p = 0; p < N / 2; ++p) {
            const auto a = in_register(load_operands<B>(pairs_at(one + p * L)));
            const auto b = in_register(load_operands<B>(pairs_at(two + p * L)));
            if constexpr (kInput) {
              add_product<Pair, B>(sums[2 * p], unpack_low(a, b), weight);
              add_product<Pair, B>(sums[2 * p + 1], unpack_high(a, b), weight);
            }
            if constexpr (kValues) {
              add_product<Pair, B>(dots[0], in[p], a);
              add_product<Pair, B>(dots[1], in[p], b);
            }
          }
          if constexpr (kValues) {
            exchange<1>(dots[0], dots[1], std::make_integer_sequence<int, L>{});
            store<W>(lanes + held * L, dots[0] + dots[1]);
            if (++held == L / 2) {
              C* const to = grads + nz + 2 - L;
              store<W>(to, load<W>(to) + sums_of_rows<L, V, 2>(waiting, 0));
              held = 0;
            }
          }
        }
#pragma GCC unroll 8
        for (int p = 0; p < N && kInput; ++p) store<W>(dx + i * P + p * L, sums[p]);
      }
      alignas(64) C rest[L];
      if (kValues && held) store<W>(rest, sums_of_rows<L, V, 2>(waiting, 0));
      for (int n = 0; n < 2 * held; ++n) grads[nz - 2 * held + n] += rest[n];
    });
  }

  // The same for outputs [first, last) and block b of the inputs, from the nonzeros in their own order.
  template <bool kInput, bool kValues>
  FF_INLINE static void add_gradients(const Work<C>& w, int64_t b, int64_t first, int64_t last, const C* x, const C* dy,
                                      C* dx, C* grads) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      alignas(64) C lanes[L * L];
      auto waiting = [&](int n) FF_INLINE_LAMBDA { return load<W>(lanes + n * L); };
      int held = 0;
      int32_t held_from = 0;
      auto flush = [&]() FF_INLINE_LAMBDA {
        for (int n = 0; n < held; ++n) grads[held_from + n] += sum_lanes(waiting(n));
        held = 0;
      };
      const int32_t* bounds = w.bounds + first * (w.blocks + 1) + b;
      for (int64_t o = first; o < last; ++o, bounds += w.blocks + 1) {
        const int64_t base = o * w.i;
        int32_t nz = bounds[0];
        const int32_t end = bounds[1];
        if (nz == end) continue;
        if (kValues && held_from + held != nz) {
          flush();
          held_from = nz;
        }
        V out[N];
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) out[p] = load<W>(dy + o * P + p * L);
        for (; nz < end; ++nz) {
          const int64_t at = (w.index[nz] - base) * P;
          if constexpr (kInput) {
            const V weight = w.values[nz] - V{};
#pragma GCC unroll 8
            for (int p = 0; p < N; ++p) store<W>(dx + at + p * L, load<W>(dx + at + p * L) + weight * out[p]);
          }
          if constexpr (kValues) {
            V sums[2]{};
#pragma GCC unroll 8
            for (int p = 0; p < N; ++p) sums[p % 2] += out[p] * load<W>(x + at + p * L);
            store<W>(lanes + held * L, sums[0] + sums[1]);
            if (++held == L) {
              C* const to = grads + held_from;
              store<W>(to, load<W>(to) + sums_of_rows<L, V>(waiting, 0));
              held = 0, held_from += L;
            }
          }
        }
      }
      flush();
    });
  }
};

// to[c][r] = from[r][c]
template <class C, int B>
struct Turn {
  FF_INLINE static void run(const C* from, int64_t step, int64_t rows, int64_t columns, C* to) {
    transpose<B>(from, step, rows, columns, from + (rows - 1) * step + columns, to, rows);
  }
};

// The factors as C, and, where there are many rows, with the rank innermost too.
template <class T>
struct Factors {
  using C = Compute<T>;
  using Factor = typename Work<C>::Factor;
  Scratch<C> converted, turned;
  Factor rows, columns;

  Factors(const void* factor, int64_t rank, int64_t size, bool turns, ParallelFor parallel_for)
      : converted(std::is_same_v<T, C> ? 0 : rank * size), turned(turns ? rank * size : 0) {
    const T* const from = static_cast<const T*>(factor);
    const C* data = converted.get();
    if constexpr (std::is_same_v<T, C>) {
      data = from;
    } else {
      for (int64_t k = 0; k < rank * size; ++k) converted.get()[k] = to_compute(from[k]);
    }
    rows = {data, size, 1}, columns = {data, 1, size};
    if (!turns || !rank) return;
    parallel(parallel_for, ceil_div(size, 64), ceil_div(1024, rank), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * 64, count = std::min(size, end * 64) - first;
      dispatch<Turn, C>(data + first, size, rank, count, turned.get() + first * rank);
    });
    columns = {turned.get(), rank, 1};
  }
};

// What a call does before its rows are looked at.
template <class T, class W>
struct Prepared {
  using C = Compute<T>;
  W w;
  Factors<T> u, v;
  Scratch<C> values;
  std::shared_ptr<const Order> order;  // null where positions do not ascend

  template <class Op>
  static W plan(const Op& op) {
    W w{};
    const int64_t lanes = register_bytes() / sizeof(C);
    w.i = op.i, w.o = op.o, w.rank = op.rank;
    w.by_inputs = W::kBackward && op.n > std::min(kRegisters * lanes, kSorted);
    w.pairs = in_pairs<T>() && (W::kBackward ? w.by_inputs : op.n > lanes);
    const int64_t fewer = registers_by_inputs(op.i, op.o, w.pairs);
    w.units = make_units(op.n, lanes, w.by_inputs ? fewer : kRegisters);
    const int64_t registers = ceil_div(w.units[0].rows, lanes);
    w.row = (registers > 4 ? 8 : registers > 2 ? 4 : registers) * lanes, w.half = w.pairs ? w.row / 2 : w.row;
    // Of halves a block of dy has half of the cache, for x and dx pass through it as well.
    const int64_t kept = w.pairs && w.by_inputs ? second_cache() / 2 : second_cache();
    w.block = std::max<int64_t>(32, kept / int64_t(w.half * sizeof(C)));
    w.blocks = std::max<int64_t>(1, ceil_div(w.by_inputs ? op.o : op.i, w.block));
    return w;
  }

  static bool converts(const W& w) { return w.by_inputs || (!std::is_same_v<T, C> && W::kBackward); }

  template <class Op>
  Prepared(const Op& op, ParallelFor parallel_for)
      : w(plan(op)),
        u(op.u, op.rank, op.i, W::kBackward && op.n > kFewRows, parallel_for),
        v(op.v, op.rank, op.o, !W::kBackward && op.n > kFewRows, parallel_for),
        values(converts(w) ? op.mu.count : 0),
        order(find_order(w, op.mu, parallel_for)) {
    if (!order) return;
    w.u_rows = u.rows, w.u_columns = u.columns, w.v_rows = v.rows, w.v_columns = v.columns;
    if (w.pairs) w.u_rows.own = op.u, w.v_rows.own = op.v;
    w.index = op.mu.index, w.bounds = order->bounds.get(), w.outputs = order->outputs.get();
    const T* const from = static_cast<const T*>(op.mu.values);
    if constexpr (std::is_same_v<T, C>) w.values = from;
    if (!converts(w)) return;
    const int32_t* const places = order->places.get();
    T* const own = reinterpret_cast<T*>(values.get());
    parallel(parallel_for, w.by_inputs ? order->sorted() : op.mu.count, 4096, [&](int64_t begin, int64_t end) {
      if (w.pairs) {
        for (int64_t nz = begin; nz < end; ++nz) own[nz] = places[nz] < 0 ? T{} : from[places[nz]];
      } else {
        for (int64_t nz = begin; nz < end; ++nz) values.get()[nz] = to_compute(from[w.by_inputs ? places[nz] : nz]);
      }
    });
    w.values = values.get(), w.own_values = own;
  }
};

// What each unit takes beside another.
template <class C>
std::vector<double> weights_of(const Work<C>& w, int64_t lanes) {
  std::vector<double> out;
  for (const Unit& unit : w.units) {
    int64_t registers = 1;
    while (registers * lanes < unit.rows) registers *= 2;
    out.push_back(double(registers) + 2);  // what a nonzero takes beside them
  }
  return out;
}

}  // namespace fastfact::panels
