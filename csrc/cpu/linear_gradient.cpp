// The gradients of a factored linear layer where μ is dense (linear_tiles.cpp): dW = dyᵀ x is summed a block at a time,
// and the gradients of the values are gathered from the block, those of the factors summed from it.
#include "items.h"
#include "linear_tiles.h"
#include "rank1_rows.h"
#include "transpose.h"

namespace fastfact {
namespace {

constexpr int64_t kItems = 16;                          // wanted of work, for the threads
constexpr int64_t kOutputs = 252, kOutputsByAmx = 256;  // of a block of dW, at most
constexpr int64_t kInputs = 768;
constexpr int64_t kInPlace = 3072;                         // bytes of a row of dy; longer ones take a page each
constexpr int64_t kLeastOutputs = 96, kLeastInputs = 192;  // of one of several, or nearly
constexpr int64_t kRowsOfSum = 256;                        // added to dW at once,
constexpr int64_t kRowsOfSumByAmx = 512;                   // by AMX
constexpr int64_t kLeastSum = 4 * kRowsOfSum;              // rows of a part of dW
constexpr int64_t kShortSum = 3 * kRowsOfSum / 4;          // where there are few blocks
constexpr int64_t kRowsOfFactors = 128;                    // added to the gradients of factors at once

// dW = dyᵀ x, of which the values' gradients are gathered, and du, dv summed.
template <class T>
struct Gradient {
  TiledWeight<T> w;
  int64_t n;
  const T *x, *dy;
  bool amx, in_place;  // dy is read where it lies, but for the last tile of a block
  int64_t together() const { return amx && sizeof(T) == 2 ? kRowsOfSumByAmx : kRowsOfSum; }  // rows
  int64_t outputs, inputs, rows, row_blocks, column_blocks, parts;  // of a block, and how many there are
  int64_t size;                                                     // of the sums of a block
  float* sums;  // [block][part], null where an item is all parts of a block
  T* dvalues;
  float *du, *dv;  // [row block][rank, u_row] and [column block][rank, v_row], or both null
};

template <class T, int B>
struct RunGradient {
  static constexpr int L = B / int(sizeof(float)), MR = tile_rows(B), NR = 2 * L;
  static constexpr int kWide = std::max(B, 32), W = kWide / int(sizeof(float));  // what values are gathered from
  static constexpr int64_t kAhead = 12;  // rows of dy that are fetched before they are copied
  using Rows = SingleRows<float, B>;

  struct Block {
    int64_t o, outputs, i, inputs, rows, panels;
    FF_INLINE Block(const Gradient<T>& g, int64_t at)
        : o(at / g.column_blocks * g.outputs),
          outputs(std::min(g.outputs, g.w.o - o)),
          i(at % g.column_blocks * g.inputs),
          inputs(std::min(g.inputs, g.w.i - i)),
          rows(whole(outputs, g.amx ? kAmxRows : MR)),
          panels(ceil_div(inputs, NR)) {}

    // The sums of a panel of columns; not a power of two, so that its rows do not share sets of the first cache.
    FF_INLINE int64_t panel() const { return rows * NR + NR; }
    FF_INLINE int64_t size() const { return panels * panel(); }
  };

  // Where the gradients of the values of some rows of a block go.
  struct Values {
    T* to[kOutputsByAmx];
    const T* end[kOutputsByAmx];

    FF_INLINE void start(const Gradient<T>& g, const Block& block, int64_t first, int64_t count) {
      const Bits& support = g.w.support;
      const int64_t next = block.i + g.inputs;
      for (int64_t m = 0; m < count; ++m) {
        const int64_t o = block.o + first + m;
        to[m] = g.dvalues + support.start(o, block.i);
        end[m] = g.dvalues + (next < g.w.i ? support.start(o, next) : support.start(o + 1, 0));
      }
    }

    // Those of a panel of columns, of `count` rows from the `first` that is here, which is row o of W; sums [row][NR].
    FF_INLINE void take(const TiledWeight<T>& w, int64_t o, int64_t column, int64_t first, int64_t count,
                        const float* sums) {
      const uint8_t* bits = w.support.bytes(o, column);
      const int64_t row = w.support.words * 8;
      for (int64_t m = first; m < first + count; ++m, sums += NR, bits += row) {
        T* next = to[m];
#pragma GCC unroll 2
        for (int k = 0; k < NR; k += W) {
          const Vec<float, kWide> x = load<kWide>(sums + k);
          if (w.support.whole && next + W <= end[m]) {
            store<kWide>(next, x), next += W;
          } else {
            gather_next<kWide>(bits + k / 8, x, next, end[m]);
          }
        }
        to[m] = next;
      }
    }

    // What the next of them are written to.
    FF_INLINE void fetch(int64_t first, int64_t count) const {
      for (int64_t m = first; m < first + count; ++m) {
        __builtin_prefetch(to[m], 1);
        __builtin_prefetch(to[m] + 64 / sizeof(T), 1);
      }
    }
  };

  // Items are (block, part) or, without `sums`, blocks.
  FF_INLINE static void run(const Gradient<T>& g, const Items& items) {
    const bool pairs = in_pairs<T>(kRowsOfSum), pieces = g.amx && !pairs;
    const int64_t height = g.amx ? kAmxRows : MR, together = g.together();
    // A store of a register runs over the end of a row of a tile.
    const int64_t step = (pieces ? together / 2 * kPieces : together / (pairs ? 2 : 1)) * height + L;
    const Scratch<float> left(ceil_div(g.outputs, height) * step), right(together * (pieces ? kPieces : 2) / 2 * NR);
    const AmxTiles tiles(g.amx);
    // Values of a single step are taken from each tile when it is done.
    const bool direct = g.parts == 1 && g.n <= together && g.dvalues && !g.du && !g.dv;
    // Added to the first part in place the numbers are the same as added from memory, but for those of AMX.
    const bool one_step = g.rows <= together && !g.amx;
    const Scratch<float> own(g.sums || direct ? 0 : g.size), part(g.sums || g.parts == 1 || one_step ? 0 : g.size);
    Values values;
    for (int64_t item; (item = items.take()) < items.count();) {
      const int64_t at = g.sums ? item / g.parts : item;
      const Block block(g, at);
      if (direct) values.start(g, block, 0, block.outputs);
      auto add_part = [&](int64_t which, bool fresh, float* sums) FF_INLINE_LAMBDA {
        const int64_t first = which * g.rows, last = std::min(g.n, first + g.rows);
        for (int64_t row = first; row < last; row += together, fresh = false) {
          const int64_t terms = std::min(together, last - row);
          Values* const to = direct ? &values : nullptr;
          if (g.amx) {
            add_rows_by_amx(g, block, row, terms, fresh, step, left.get(), right.get(), sums, to);
            continue;
          }
          with_operand<T, B>(pairs, [&](auto operand, int64_t) FF_INLINE_LAMBDA {
            add_rows<decltype(operand)>(g, block, row, terms, last, fresh, step, left.get(), right.get(), sums, to);
          });
        }
      };
      for (int64_t which = 0; which < (g.sums ? 1 : g.parts); ++which) {
        float* const sums = g.sums ? g.sums + item * g.size : which && !one_step ? part.get() : own.get();
        add_part(g.sums ? item % g.parts : which, !which || !one_step, sums);
        if (which && !one_step) add(part.get(), block.size(), own.get());
      }
      if (!g.sums && !direct) take(g, block, at, own.get());
    }
  }

  FF_INLINE static void add(const float* from, int64_t size, float* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t k = 0; k < size; k += L) store<B>(to + k, load<B>(to + k) + load<B>(from + k));
    });
  }

  // sums += what `terms` rows from `row` on add to a block; with `fresh` they are that, and `values`, where given, have
  // them in place of `sums`.
  template <class E>
  FF_INLINE static void add_rows(const Gradient<T>& g, const Block& block, int64_t row, int64_t terms, int64_t last,
                                 bool fresh, int64_t step, float* left, float* right, float* sums, Values* values) {
    constexpr int kFactors = std::is_same_v<E, Pair> ? 2 : 1;
    const int64_t whole_tiles = block.outputs / MR, rest = block.outputs % MR;
    const int64_t copied = g.in_place ? whole_tiles * MR : 0;  // from here on
    const T* const dy = g.dy + row * g.w.o + block.o;
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t t = 0; t < terms && copied < block.outputs; t += kFactors) {
        const T* const from = dy + t * g.w.o + copied;
        for (int k = 0; k < kFactors; ++k) {
          if (row + t + k + kAhead < last) fetch(from + (k + kAhead) * g.w.o, block.outputs - copied);
        }
        float* const to = left + copied / MR * step + t / kFactors * MR;
        if constexpr (kFactors == 2) {
          copy_pairs(from, t + 1 < terms ? from + g.w.o : nullptr, block.outputs, step, to);
        } else {
          copy_row(from, block.outputs - copied, step, to);
        }
      }
    });
    for (int64_t panel = 0; panel < block.panels; ++panel) {
      const int64_t column = panel * NR, count = std::min<int64_t>(NR, block.inputs - column);
      const T* const from = g.x + row * g.w.i + block.i + column;
      outline<B>([&]() FF_INLINE_LAMBDA {
        if constexpr (kFactors == 2) {
          for (int64_t t = 0; t < terms; t += 2) {
            const T *const one = from + t * g.w.i, *const other = t + 1 < terms ? one + g.w.i : nullptr;
            __builtin_prefetch(one + NR, 0, 2);
            __builtin_prefetch(one + g.w.i + NR, 0, 2);
            copy_pairs<NR>(one, other, count, 0, right + t / 2 * NR);
          }
        } else {
          copy_columns(from, g.w.i, terms, count, right);
        }
        alignas(64) float own[MR * NR];
        auto with_sums = [&](int64_t tile, int64_t rows, const auto& f) FF_INLINE_LAMBDA {
          if (!values) return f(sums + panel * block.panel() + tile * MR * NR);
          values->fetch(tile * MR, rows);
          f(own);
          values->take(g.w, block.o + tile * MR, block.i + column, tile * MR, rows, own);
        };
        auto multiply = [&]<int N>() FF_INLINE_LAMBDA {
          auto add = [&]<int M>(int64_t tile) FF_INLINE_LAMBDA {
            with_sums(tile, std::min<int64_t>(MR, block.outputs - tile * MR), [&](float* to) FF_INLINE_LAMBDA {
              MultiplyTiles<float, B>::template accumulate<N, M>(reinterpret_cast<const E*>(left + tile * step),
                                                                 reinterpret_cast<const E*>(right),
                                                                 ceil_div(terms, kFactors), to, fresh);
            });
          };
          if constexpr (std::is_same_v<T, float>) {
            for (int64_t tile = 0; tile * MR < copied; ++tile) {
              with_sums(tile, MR, [&](float* to) FF_INLINE_LAMBDA {
                MultiplyTiles<float, B>::template accumulate_columns<N, MR>(dy + tile * MR, g.w.o, right, terms, to,
                                                                            fresh);
              });
            }
          }
          for (int64_t tile = copied / MR; tile < whole_tiles; ++tile) add.template operator()<MR>(tile);
          if (!rest) return;
          MultiplyTiles<float, B>::with_height(rest, [&]<int M>() FF_INLINE_LAMBDA {
            outline<B>([&]() FF_INLINE_LAMBDA { add.template operator()<M>(whole_tiles); });
          });
        };
        count > L ? multiply.template operator()<2>() : multiply.template operator()<1>();
      });
    }
  }

  // The same by AMX.
  FF_INLINE static void add_rows_by_amx(const Gradient<T>& g, const Block& block, int64_t row, int64_t terms,
                                        bool fresh, int64_t step, float* left, float* right, float* sums,
                                        Values* values) {
    if constexpr (!std::is_same_v<T, Half> && B == 64) {
      const int64_t blocks = ceil_div(terms, kAmxTerms);
      outline<B>([&]() FF_INLINE_LAMBDA {
        for (int64_t k = 0; k < blocks; ++k) {
          turn_rows(g.dy + (row + k * kAmxTerms) * g.w.o + block.o, g.w.o, std::min(kAmxTerms, terms - k * kAmxTerms),
                    block.outputs, step, left + k * kPiecesOfT * kAmxRows * L);
        }
      });
      for (int64_t panel = 0; panel < block.panels; ++panel) {
        const int64_t column = panel * NR, count = std::min<int64_t>(NR, block.inputs - column);
        const T* const from = g.x + row * g.w.i + block.i + column;
        float* const to = sums + panel * block.panel();
        outline<B>([&]() FF_INLINE_LAMBDA {
          for (int64_t t = 0; t < terms; t += 2) {
            const T *const one = from + t * g.w.i, *const other = t + 1 < terms ? one + g.w.i : nullptr;
            if constexpr (kPiecesOfT == 1) {
              __builtin_prefetch(one + NR, 0, 2);
              __builtin_prefetch(one + g.w.i + NR, 0, 2);
              copy_pairs<NR>(one, other, count, 0, right + t / 2 * NR);
            } else {
              SplitPanel<T, B>::split_pairs(one, other, count, right + of_pair(t));
            }
          }
          for (int64_t t = whole(terms, 2); t < blocks * kAmxTerms; t += 2) {
            for (int k = 0; k < kPiecesOfT; ++k) std::fill_n(right + of_pair(t) + k * kBlock, NR, 0.f);
          }
          // The next panel's columns meanwhile.
          Upcoming upcoming{reinterpret_cast<const char*>(from + NR), panel + 1 < block.panels ? terms : 0,
                            NR * sizeof(T), g.w.i * int64_t(sizeof(T)),
                            ceil_div(kRowsByAmx * kAmxTerms * 2, block.rows)};
          alignas(64) float own[kRowsByAmx * NR];
          for (int64_t m = 0; m < block.rows; m += kRowsByAmx) {
            const float* const of_rows = left + m / kAmxRows * step;
            float* const tile = values ? own : to + m * NR;
            auto add = [&]<int R, int N>() FF_INLINE_LAMBDA {
              using S = AmxSums<R, N>;
              const auto* const turned = reinterpret_cast<const char*>(of_rows);
              if constexpr (kPiecesOfT == 1) {
                fresh ? S::clear() : S::load(tile, NR);
                S::multiply(turned, B, step * sizeof(float), kAmxRows * B, right, blocks);
                S::store(tile, NR);
              } else {
                S::clear();
                S::multiply_pieces(turned, B, step * sizeof(float), kAmxRows * B, kPieces * kAmxRows * B, right, blocks,
                                   [&]() FF_INLINE_LAMBDA { upcoming.fetch(); });
                fresh ? S::store(tile, NR) : S::add_to(tile);
              }
              for (int64_t k = 0; N == 1 && fresh && k < R * kAmxRows; ++k)
                store<B>(tile + k * NR + L, Vec<float, B>{});
            };
            if (block.rows - m > kAmxRows) {
              count > L ? add.template operator()<2, 2>() : add.template operator()<2, 1>();
            } else {
              count > L ? add.template operator()<1, 2>() : add.template operator()<1, 1>();
            }
            if (!values) continue;
            values->take(g.w, block.o + m, block.i + column, m, std::min(kRowsByAmx, block.outputs - m), tile);
          }
        });
      }
    }
  }

  static constexpr int kPiecesOfT = std::is_same_v<T, float> ? kPieces : 1;
  static constexpr int64_t kBlock = kAmxRows * NR;  // of pairs, of 32 columns
  // Where a pair of rows is, as [block of terms][piece][pair][NR].
  FF_INLINE static int64_t of_pair(int64_t term) {
    return term / kAmxTerms * kPiecesOfT * kBlock + term % kAmxTerms / 2 * NR;
  }

  // `terms` rows of `count` numbers, `row` apart, as tiles [number][pair of rows], or [piece][number][pair], each
  // `step` behind the last.
  FF_INLINE static void turn_rows(const T* from, int64_t row, int64_t terms, int64_t count, int64_t step, float* to) {
    if constexpr (kPiecesOfT > 1) {
      const float* rows[kAmxTerms];
      for (int64_t term = 0; term < kAmxTerms; ++term) rows[term] = term < terms ? from + term * row : nullptr;
      for (int64_t at = 0; at < count; at += L, to += step) TurnRows<T, B>::run(rows, at, count, to, L, L * L);
    } else {
      turn_narrow_rows(from, row, terms, count, step, to);
    }
  }
  FF_INLINE static void turn_narrow_rows(const T* from, int64_t row, int64_t terms, int64_t count, int64_t step,
                                         float* to) {
    using Narrow = typename VecOf<uint16_t, B / 2>::Type;
    using Wide = typename VecOf<uint32_t, B>::Type;
    for (int64_t at = 0; at < count; at += L, to += step) {
      const int64_t bytes = std::min<int64_t>(L, count - at) * sizeof(T);
      auto numbers = [&](int64_t term) FF_INLINE_LAMBDA {
        Narrow narrow{};
        if (term >= terms) return Wide{};
        const T* const line = from + term * row + at;
        bytes == B / 2 ? std::memcpy(&narrow, line, B / 2) : std::memcpy(&narrow, line, bytes);
        return __builtin_convertvector(narrow, Wide);
      };
      Vec<float, B> lines[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) lines[l] = bit_cast<Vec<float, B>>(numbers(2 * l) | numbers(2 * l + 1) << 16);
      PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<B>(to + l * L, lines[l]);
    }
  }

  // `count` pairs of two rows in pieces of `kPiece`, each `step` behind the last; the last is filled with zeros, as is
  // a row that is not there. A store of a register may run over the end of a piece.
  template <int kPiece = MR>
  FF_INLINE static void copy_pairs(const T* one, const T* other, int64_t count, int64_t step, float* to) {
    using Wide = typename VecOf<uint32_t, B>::Type;
    auto bits = [](const T* from) FF_INLINE_LAMBDA {
      typename VecOf<uint16_t, B / 2>::Type narrow;
      std::memcpy(&narrow, from, sizeof(narrow));
      return __builtin_convertvector(narrow, Wide);
    };
    for (int64_t at = 0; at < count; at += kPiece, to += step) {
#pragma GCC unroll 2
      for (int k = 0; k < kPiece; k += L) {
        const int64_t first = at + k;
        if (first + L <= count) {
          const Wide both = other ? bits(one + first) | bits(other + first) << 16 : bits(one + first);
          std::memcpy(to + k, &both, B);
          continue;
        }
        for (int lane = 0; lane < std::min(L, kPiece - k); ++lane) {
          const bool there = first + lane < count;
          const Pair pair{there ? one[first + lane].bits | (other ? uint32_t(other[first + lane].bits) << 16 : 0) : 0};
          std::memcpy(to + k + lane, &pair, sizeof(pair));
        }
      }
    }
  }

  // `count` numbers in pieces of MR, each `step` behind the last; the last is filled with zeros.
  FF_INLINE static void copy_row(const T* from, int64_t count, int64_t step, float* to) {
    int64_t at = 0;
    for (; at + L <= count; at += MR, to += step) store<B>(to, load<B>(from + at));
    for (; at < count; at += MR, to += step) {
      for (int k = 0; k < MR; ++k) to[k] = at + k < count ? to_compute(from[at + k]) : 0;
    }
  }

  // NR numbers of each row, of which `count` are there.
  FF_INLINE static void copy_columns(const T* from, int64_t row, int64_t rows, int64_t count, float* to) {
    for (int64_t t = 0; t < rows; ++t, from += row, to += NR) {
      if (count == NR) {
        __builtin_prefetch(from + NR, 0, 2);
        store<B>(to, load<B>(from));
        store<B>(to + L, load<B>(from + L));
      } else {
        for (int k = 0; k < NR; ++k) to[k] = k < count ? to_compute(from[k]) : 0;
      }
    }
  }

  // What is wanted of a block of dW.
  FF_INLINE static void take(const Gradient<T>& g, const Block& block, int64_t at, const float* sums) {
    const TiledWeight<T>& w = g.w;
    const int64_t row_block = at / g.column_blocks, column_block = at % g.column_blocks;
    float* const du = g.du ? g.du + row_block * w.rank * w.u_row : nullptr;
    float* const dv = g.dv ? g.dv + column_block * w.rank * w.v_row : nullptr;
    for (int64_t r = 0; du && r < w.rank; ++r) {
      std::memset(du + r * w.u_row + block.i, 0, std::min(block.panels * NR, w.u_row - block.i) * sizeof(float));
    }
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t first = 0; first < block.outputs; first += Rows::kRows) {
        const int64_t count = std::min(Rows::kRows, block.outputs - first);
        Values values;
        if (g.dvalues) values.start(g, block, first, count);
        for (int64_t m = 0; g.dvalues && m < count; ++m) {
          for (T* line = values.to[m]; line < values.end[m]; line += 64 / int64_t(sizeof(T)))
            __builtin_prefetch(line, 1);
        }
        for (int64_t r = 0; du && r < w.rank; r += 2) {
          if (w.rank - r >= 2) {
            take_factors<2>(w, block, sums + first * NR, block.o + first, count, r, du, dv);
          } else {
            take_factors<1>(w, block, sums + first * NR, block.o + first, count, r, du, dv);
          }
        }
        for (int64_t panel = 0; g.dvalues && panel < block.panels; ++panel) {
          values.take(w, block.o + first, block.i + panel * NR, 0, count, sums + panel * block.panel() + first * NR);
        }
      }
    });
  }

  // What `count` rows of a block from row o on add to the gradients of ranks from r on.
  template <int Ranks>
  FF_INLINE static void take_factors(const TiledWeight<T>& w, const Block& block, const float* sums, int64_t o,
                                     int64_t count, int64_t r, float* du, float* dv) {
    constexpr int kRows = Rows::kRows;
    alignas(64) static const float none[NR] = {};
    const float* rows[kRows];
    int64_t next[kRows];
    Vec<float, B> lanes[Ranks][kRows]{};
    alignas(64) float scale[Ranks * kRows], of_rows[Ranks * kRows + L];
    for (int m = 0; m < kRows; ++m) {
      const bool there = m < count;
      rows[m] = there ? sums + m * NR : none, next[m] = there ? block.panel() - L : -L;
      for (int k = 0; k < Ranks; ++k) scale[k * kRows + m] = there ? w.v[(r + k) * w.v_row + o + m] : 0;
    }
    const float* u = w.u + r * w.u_row + block.i;
    du += r * w.u_row + block.i;
    for (int64_t panel = 0; panel < block.panels; ++panel, u += NR, du += NR) {
      Rows::template add_block<Ranks>(rows, u, w.u_row, scale, lanes, du, w.u_row);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) rows[m] += L;
      Rows::template add_block<Ranks>(rows, u + L, w.u_row, scale, lanes, du + L, w.u_row);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) rows[m] += next[m];
    }
    Rows::sum_lanes_of(lanes, of_rows);
    for (int64_t k = 0; k < Ranks; ++k) {
      std::memcpy(dv + (r + k) * w.v_row + o, of_rows + k * kRows, count * sizeof(float));
    }
  }
};

template <class T, int B>
struct SumFactors {
  static constexpr int L = B / int(sizeof(float)), MR = tile_rows(B), NR = 2 * L;
  static_assert(MR <= kMostTile);

  // Items are panels of columns.
  FF_INLINE static void run(const FactorGradient<T>& f, int64_t n, int64_t rank, int64_t begin, int64_t end) {
    const Scratch<float> right(kRowsOfFactors * NR), sums(whole(rank, MR) * NR);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item * NR, count = std::min<int64_t>(NR, f.columns - column);
      for (int64_t row = 0; row < n; row += kRowsOfFactors) {
        const int64_t terms = std::min(kRowsOfFactors, n - row);
        outline<B>([&]() FF_INLINE_LAMBDA {
          RunGradient<T, B>::copy_columns(f.rows + row * f.columns + column, f.columns, terms, count, right.get());
          for (int64_t r = 0; r < rank; r += MR) {
            MultiplyTiles<float, B>::with_height(rank - r, [&]<int M>() FF_INLINE_LAMBDA {
              MultiplyTiles<float, B>::template accumulate_columns<2, M>(f.hidden + row * rank + r, rank, right.get(),
                                                                         terms, sums.get() + r * NR, row == 0);
            });
          }
        });
      }
      for (int64_t r = 0; r < rank; ++r) copy<B>(sums.get() + r * NR, count, f.out + r * f.columns + column);
    }
  }
};

template <class T, int B>
struct TakeParts {
  FF_INLINE static void run(const Gradient<T>& g, int64_t begin, int64_t end) {
    const Scratch<float> total(g.size);
    for (int64_t at = begin; at < end; ++at) {
      const typename RunGradient<T, B>::Block block(g, at);
      const int64_t size = block.size();
      const float* from = g.sums + at * g.parts * g.size;
      std::memcpy(total.get(), from, size * sizeof(float));
      for (int64_t part = 1; part < g.parts; ++part) {
        from += g.size;
        RunGradient<T, B>::add(from, size, total.get());
      }
      RunGradient<T, B>::take(g, block, at, total.get());
    }
  }
};

// Blocks of dW [outputs, inputs], each in so many parts, by which few threads, however many, end together or nearly.
// The sums of the factors' gradients depend on them.
template <class T>
void cut_into_blocks(Gradient<T>& g, int64_t outputs, int64_t inputs, int64_t parts) {
  const int64_t tile = tile_of(g.amx);
  const auto least_of = [](int64_t size, int64_t most) { return std::max<int64_t>(1, ceil_div(size, most)); };
  double least = 0;
  for (int64_t across = least_of(inputs, kInputs); across <= least_of(inputs, kLeastInputs); ++across) {
    const int64_t width = ceil_div(ceil_div(inputs, across), 64) * 64;
    for (int64_t down = least_of(outputs, g.amx ? kOutputsByAmx : kOutputs); down <= least_of(outputs, kLeastOutputs);
         ++down) {
      const int64_t height = ceil_div(ceil_div(outputs, down), tile) * tile;
      const int64_t items = ceil_div(outputs, height) * ceil_div(inputs, width) * parts;
      double time = 0;
      for (int64_t threads : {2, 4, 8}) time += ceil_div(items, threads) * threads;
      // Rows of x are copied for each block, and of dy, unless they are read in place.
      time *= double(height * width + 4 * ((g.in_place ? 0 : height) + width)) / double(parts);
      if (least && time >= 0.98 * least) continue;
      least = time, g.outputs = height, g.inputs = width;
    }
  }
  g.row_blocks = ceil_div(outputs, g.outputs), g.column_blocks = ceil_div(inputs, g.inputs);
}

}  // namespace

template <class T>
void sum_gradients(const TiledWeight<T>& w, int64_t n, const T* x, const T* dy, T* dvalues, T* du, T* dv,
                   int64_t threads, ParallelFor parallel_for) {
  Gradient<T> g{w, n, x, dy};
  g.amx = by_amx(in_pairs<T>()) || (n >= kLeastInPieces && splits<T>(n));
  g.in_place = std::is_same_v<T, float> && !g.amx && register_bytes() == 64 && w.o * int64_t(sizeof(T)) <= kInPlace;
  const int64_t mr = tile_of(g.amx), nr = register_bytes() / 2;
  const int64_t parts = std::clamp<int64_t>(n / kLeastSum, 1, kItems / 2);
  cut_into_blocks(g, w.o, w.i, parts);
  g.parts = std::min(parts, ceil_div(kItems / 2, g.row_blocks * g.column_blocks));
  // Few blocks in shorter parts, rather than threads without one.
  const int64_t shorter = std::min(n / kShortSum, ceil_div(kItems / 4, g.row_blocks * g.column_blocks));
  g.parts = std::max(g.parts, shorter);
  g.rows = ceil_div(ceil_div(n, g.parts), kRowsOfSum) * kRowsOfSum, g.parts = ceil_div(n, g.rows);
  const int64_t blocks = g.row_blocks * g.column_blocks;
  g.size = (ceil_div(g.outputs, mr) * mr + 1) * nr * ceil_div(g.inputs, nr);
  // Threads that have as many blocks each, or nearly, need no parts from others.
  const bool apart = g.parts > 1 && ceil_div(blocks, threads) * threads * 8 > blocks * 9;
  const Scratch<float> sums(apart ? blocks * g.parts * g.size : 0);
  const bool factors = du || dv;
  const Scratch<float> du_parts(factors ? g.row_blocks * w.rank * w.u_row : 0);
  const Scratch<float> dv_parts(factors ? g.column_blocks * w.rank * w.v_row : 0);
  g.sums = apart ? sums.get() : nullptr, g.dvalues = dvalues;
  if (factors) g.du = du_parts.get(), g.dv = dv_parts.get();
  parallel_items(parallel_for, apart ? blocks * g.parts : blocks, 1,
                 [&](const Items& items) { dispatch<RunGradient, T>(g, items); });
  if (g.sums) {
    parallel(parallel_for, blocks, 1, [&](int64_t begin, int64_t end) { dispatch<TakeParts, T>(g, begin, end); });
  }
  auto add = [&](const float* parts, int64_t count, int64_t row, int64_t size, T* out) {
    for (int64_t r = 0; out && r < w.rank; ++r) {
      dispatch<AddChunks, T>(parts + r * row, count, w.rank * row, size, out + r * size);
    }
  };
  add(du_parts.get(), g.row_blocks, w.u_row, w.i, du);
  add(dv_parts.get(), g.column_blocks, w.v_row, w.o, dv);
}

template <class T>
void sum_factors(const FactorGradient<T>& du, const FactorGradient<T>& dv, int64_t n, int64_t rank,
                 ParallelFor parallel_for) {
  const int64_t nr = register_bytes() / 2;
  const auto panels = [&](const auto& of) { return of.out ? ceil_div(of.columns, nr) : 0; };
  const int64_t first = panels(du), all = first + panels(dv);
  parallel(parallel_for, all, ceil_div(1 << 16, n * (rank + 4) * nr), [&](int64_t begin, int64_t end) {
    dispatch<SumFactors, T>(du, n, rank, begin, std::min(end, first));
    dispatch<SumFactors, T>(dv, n, rank, std::max(begin, first) - first, end - first);
  });
}

template void sum_factors(const FactorGradient<float>&, const FactorGradient<float>&, int64_t, int64_t, ParallelFor);
template void sum_factors(const FactorGradient<BFloat16>&, const FactorGradient<BFloat16>&, int64_t, int64_t,
                          ParallelFor);
template void sum_factors(const FactorGradient<Half>&, const FactorGradient<Half>&, int64_t, int64_t, ParallelFor);
template void sum_gradients(const TiledWeight<float>&, int64_t, const float*, const float*, float*, float*, float*,
                            int64_t, ParallelFor);
template void sum_gradients(const TiledWeight<BFloat16>&, int64_t, const BFloat16*, const BFloat16*, BFloat16*,
                            BFloat16*, BFloat16*, int64_t, ParallelFor);
template void sum_gradients(const TiledWeight<Half>&, int64_t, const Half*, const Half*, Half*, Half*, Half*, int64_t,
                            ParallelFor);

}  // namespace fastfact
