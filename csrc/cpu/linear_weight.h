// W of a product of rows (linear_tiles.cpp), made a panel at a time from values spread out by the bits of their
// support, in the order in which the product reads it.
#pragma once

#include "linear_tiles.h"
#include "transpose.h"

namespace fastfact {

inline constexpr int64_t kMostTerms = 1536;  // made at once

template <class T, int B>
struct MakePanels {
  using V = Vec<float, B>;
  static constexpr int L = B / int(sizeof(float)), NR = 2 * L;
  static constexpr int kWide = std::max(B, 32), W = kWide / int(sizeof(float));  // what values are spread to

  // Panels [term][NR columns] of W from `column` and term d on, its rows being the terms.
  FF_INLINE static void make(const TiledWeight<T>& w, int64_t column, int64_t panels, int64_t d, int64_t terms,
                             float* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      const int64_t columns = panels * NR;
      const bool whole = w.support.whole && w.values + (d + terms - 1) * w.i + column + columns <= w.last + 8;
      if (w.rank) {
        whole ? make_terms<true, true>(w, column, columns, d, terms, to)
              : make_terms<true, false>(w, column, columns, d, terms, to);
      } else {
        whole ? make_terms<false, true>(w, column, columns, d, terms, to)
              : make_terms<false, false>(w, column, columns, d, terms, to);
      }
    });
  }

  // kWhole: all of μ is there, and so much can be read. What columns beyond the last hold is multiplied for nothing.
  template <bool kFactors, bool kWhole>
  FF_INLINE static void make_terms(const TiledWeight<T>& w, int64_t column, int64_t columns, int64_t d, int64_t terms,
                                   float* to) {
    const T* const last = w.last;
    const float* const u = w.u + column;
    const int64_t panel = terms * NR;
    for (int64_t t = 0; t < terms; ++t, to += NR) {
      const T* const from = w.values + w.support.start(d + t, column);
      if (d + t + kAhead < w.o) fetch(w.values + w.support.start(d + t + kAhead, column), columns);
      const uint8_t* const bits = w.support.bytes(d + t, column);
      const float v = kFactors ? w.v[d + t] : 0;
      if (kWhole || from + columns <= last) {
        make_row<kFactors, kWhole>(from, bits, columns, u, v, panel, to,
                                   [](const uint8_t* bits, const T*& from)
                                       FF_INLINE_LAMBDA { return spread_next<kWide>(bits, from); });
      } else {
        make_row<kFactors, kWhole>(from, bits, columns, u, v, panel, to,
                                   [&](const uint8_t* bits, const T*& from)
                                       FF_INLINE_LAMBDA { return spread_within<kWide>(bits, from, last); });
      }
      for (int64_t r = 1; r < w.rank; ++r) {
        const float v = w.v[r * w.v_row + d + t];
        const float* const u = w.u + r * w.u_row + column;
        float* out = to;
        for (int64_t k = 0; k < columns; k += NR, out += panel) {
#pragma GCC unroll 2
          for (int part = 0; part < NR; part += L) {
            store<B>(out + part, load<B>(out + part) + load<B>(u + k + part) * v);
          }
        }
      }
    }
  }

  // One row of panels, of the first factor alone; `spread` as `spread_next`.
  template <bool kFactors, bool kWhole, class Spread>
  FF_INLINE static void make_row(const T* from, const uint8_t* bits, int64_t columns, const float* u, float v,
                                 int64_t panel, float* to, const Spread& spread) {
    for (int64_t k = 0; k < columns; k += NR, to += panel, bits += NR / 8) {
#pragma GCC unroll 2
      for (int part = 0; part < NR; part += 16) __builtin_prefetch(to + kLater * NR + part, 1);
#pragma GCC unroll 2
      for (int part = 0; part < NR; part += W) {
        Vec<float, kWide> x;
        if constexpr (kWhole) {
          x = load<kWide>(from), from += W;
        } else {
          x = spread(bits + part / 8, from);
        }
        if constexpr (kFactors) x += load<kWide>(u + k + part) * v;
        store<kWide>(to + part, x);
      }
    }
  }

  static constexpr int64_t kAhead = 8;  // rows of W whose values are fetched before they are spread
  static constexpr int64_t kLater = 4;  // rows of a panel that are fetched before they are written
  static constexpr int64_t kNext = 64;  // values of each row that are, where the rows are the columns

  // The same, its columns being the terms.
  FF_INLINE static void make_turned(const TiledWeight<T>& w, int64_t column, int64_t panels, int64_t d, int64_t terms,
                                    float* to) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      for (int64_t o = column; o < std::min(column + panels * NR, w.o); o += NR, to += terms * NR) {
        const int64_t rows = std::min<int64_t>(NR, w.o - o);
        const T* const end = w.values + w.support.start(o + rows - 1, d) + terms + W;
        if (end > w.last + 8) {
          make_columns<kNearEnd>(w, o, d, terms, to);
        } else if (w.support.whole && rows == NR) {
          make_columns<kAll>(w, o, d, terms, to);
        } else {
          make_columns<kInside>(w, o, d, terms, to);
        }
      }
    });
  }

  // Near the end no more is read than there is, elsewhere a register's bytes; kAll: all of μ is there.
  enum End { kNearEnd, kInside, kAll };

  template <End kEnd>
  FF_INLINE static void make_columns(const TiledWeight<T>& w, int64_t o, int64_t d, int64_t terms, float* to) {
    static const uint8_t none[kMostTerms / 8] = {};
    const T* const last = w.last;
    const int64_t rows = ceil_div(std::min<int64_t>(NR, w.o - o), W) * W;
    const T* from[NR];
    const uint8_t* bits[NR];
    for (int l = 0; l < rows; ++l) {
      const bool there = o + l < w.o;
      from[l] = w.values + (there ? w.support.start(o + l, d) : 0);
      bits[l] = there ? w.support.bytes(o + l, d) : none;
      if (o + l + NR < w.o) fetch(w.values + w.support.start(o + l + NR, d), std::min(terms, kNext));
    }
    const int64_t rank = w.rank, u_row = w.u_row, v_row = w.v_row;
    const float* u = w.u + d;
    for (int64_t t = 0; t < terms; t += W, u += W, to += W * NR) {
      for (int64_t part = 0; part < rows; part += W) {
        const T** const next = from + part;
        const uint8_t** const which = bits + part;
        const float* const v = w.v + o + part;
#pragma GCC unroll 16
        for (int k = 0; k < W * W; k += 16) __builtin_prefetch(to + W * (NR + part) + k, 1);
        Vec<float, kWide> lines[W];
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) {
          if constexpr (kEnd == kAll) {
            lines[l] = load<kWide>(next[l]), next[l] += W;
          } else if constexpr (kEnd == kInside) {
            lines[l] = spread_next<kWide>(which[l], next[l]), which[l] += W / 8;
          } else {
            lines[l] = spread_within<kWide>(which[l], next[l], last), which[l] += W / 8;
          }
          __builtin_prefetch(next[l] + kNext);
        }
        for (int64_t r = 0; r < rank; ++r) {
          const Vec<float, kWide> factor = load<kWide>(u + r * u_row);
#pragma GCC unroll 16
          for (int l = 0; l < W; ++l) lines[l] += factor * v[r * v_row + l];
        }
        PackPanels<float, kWide>::template transpose_lanes<W / 2>(lines);
        float* const out = to + part;
        if (t + W <= terms) {
#pragma GCC unroll 16
          for (int l = 0; l < W; ++l) store<kWide>(out + l * NR, lines[l]);
        } else {
          alignas(kWide) float rest[W * W];
          for (int l = 0; l < W; ++l) store<kWide>(rest + W * l, lines[l]);
          for (int64_t l = 0; l < terms - t; ++l) std::memcpy(out + l * NR, rest + W * l, kWide);
        }
      }
    }
  }

  // Panels of μ in pairs, [pair of `padded` terms][NR columns], zeros behind the last term; turned or not.
  FF_INLINE static void make_pairs(const TiledWeight<T>& w, bool turned, int64_t column, int64_t panels, int64_t d,
                                   int64_t terms, int64_t padded, float* to) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      outline<B>([&]() FF_INLINE_LAMBDA {
        const int64_t panel = padded / 2 * NR;
        for (int64_t k = 0; k < panels; ++k) {
          std::fill(to + k * panel + terms / 2 * NR, to + (k + 1) * panel, 0.f);
        }
        if (!turned) return pair_rows(w, column, panels * NR, d, terms, panel, to);
        for (int64_t k = 0; k < panels * NR; k += L) {
          const bool ends = k + L == panels * NR;
          pair_columns(w, column + k, d, terms, ends ? column : column + k + L, ends ? d + terms : d,
                       to + k / NR * panel + k % NR);
        }
      });
    }
  }

  using Halves = typename VecOf<uint16_t, B>::Type;

  // The next numbers of μ, two in 32 bits, and `from` moves on.
  template <End kEnd>
  FF_INLINE static Halves next(const uint8_t* bits, const T*& from) {
    Halves out{};
    if constexpr (kEnd == kAll) {
      std::memcpy(&out, from, B);
      from += B / 2;
      return out;
    }
    if constexpr (kExpands<B> && kEnd == kInside) return spread_halves<B>(bits, from);
    for (int k = 0; k < B / 2; ++k) {
      if (bits[k / 8] >> k % 8 & 1) out[k] = from++->bits;
    }
    return out;
  }

  static constexpr int64_t kPairsAhead = 32;

  // f.operator()<End>(), where `from` goes on by up to so many values. rows: whether all rows are there.
  template <class F>
  FF_INLINE static void with_end(const TiledWeight<T>& w, const T* from, int64_t count, bool rows, const F& f) {
    if (from + count + NR > w.last + 8) return f.template operator()<kNearEnd>();
    w.support.whole&& rows ? f.template operator()<kAll>() : f.template operator()<kInside>();
  }

  FF_INLINE static void pair_rows(const TiledWeight<T>& w, int64_t column, int64_t columns, int64_t d, int64_t terms,
                                  int64_t panel, float* to) {
    for (int64_t t = 0; t < terms; t += 2, to += NR) {
      const T* from[2] = {w.values + w.support.start(d + t, column), w.values + w.support.start(d + t + 1, column)};
      for (int64_t row = d + t + kPairsAhead; row < std::min(d + t + kPairsAhead + 2, w.o); ++row) {
        const int64_t start = w.support.start(row, column), word = std::min(column + columns, w.support.words * 64);
        fetch(w.values + start, w.support.start(row, word) - start);
      }
      const uint8_t *const first = w.support.bytes(d + t, column), *const second = w.support.bytes(d + t + 1, column);
      with_end(w, from[1], columns, true, [&]<End kEnd>() FF_INLINE_LAMBDA {
        float* out = to;
        for (int64_t k = 0; k < columns; k += NR, out += panel) {
          const Halves low = next<kEnd>(first + k / 8, from[0]), high = next<kEnd>(second + k / 8, from[1]);
          constexpr std::make_integer_sequence<int, NR> lanes;
          const Halves left = interleaved<0>(low, high, lanes), right = interleaved<NR / 2>(low, high, lanes);
          std::memcpy(out, &left, B);
          std::memcpy(out + L, &right, B);
        }
      });
    }
  }

  // Numbers of a and b in turn, from number `first` on.
  template <int first, int... lane>
  FF_INLINE static Halves interleaved(Halves a, Halves b, std::integer_sequence<int, lane...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (lane % 2 * NR + first + lane / 2)...);
#else
    return __builtin_shuffle(a, b, Halves{(lane % 2 * NR + first + lane / 2)...});
#endif
  }

  // What is made next, from output `next_o` and term `next_d` on, is fetched meanwhile.
  FF_INLINE static void pair_columns(const TiledWeight<T>& w, int64_t o, int64_t d, int64_t terms, int64_t next_o,
                                     int64_t next_d, float* to) {
    static const uint8_t none[kMostTerms / 8] = {};
    const T* from[L];
    const uint8_t* bits[L];
    for (int l = 0; l < L; ++l) {
      const bool there = o + l < w.o;
      from[l] = w.values + (there ? w.support.start(o + l, d) : 0);
      bits[l] = there ? w.support.bytes(o + l, d) : none;
    }
    int64_t ahead[L];
    for (int l = 0; l < L; ++l) {
      const bool there = next_o + l < w.o && next_d < w.i;
      ahead[l] = there ? w.values + w.support.start(next_o + l, next_d) - from[l] : 0;
    }
    with_end(w, from[std::clamp<int64_t>(w.o - o, 1, L) - 1], terms, o + L <= w.o, [&]<End kEnd>() FF_INLINE_LAMBDA {
      for (int64_t t = 0; t < terms; t += 2 * L, to += L * NR) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) {
          __builtin_prefetch(from[l] + ahead[l]);
          lines[l] = bit_cast<V>(next<kEnd>(bits[l] + t / 8, from[l]));
        }
        PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
        const int64_t left = std::min<int64_t>(L, (terms - t) / 2);
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) {
          if (l < left) store<B>(to + l * NR, lines[l]);
        }
      }
    });
  }
};

}  // namespace fastfact
