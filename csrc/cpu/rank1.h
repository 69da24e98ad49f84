// What making W = Σ_r u_r ⊗ v_r + μ (rank1.cpp) and taking its gradients (rank1_backward.cpp) share: how a weight is
// read, and the values of a compact μ on its support.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "support.h"
#include "transpose.h"
#include "vec.h"

namespace fastfact {

constexpr int64_t kGrain = 16384;   // elements worth a thread
constexpr int64_t kSegment = 8192;  // columns of a row written at a time, where rows share nothing
constexpr int64_t kGroup = 512;     // p's of one item, where a weight is read as [p, q]

// The same, channels_last only where that is another order in memory.
template <class Op>
Op normal(Op op) {
  op.channels_last = op.channels_last && op.size.taps() > 1 && op.size.i > 1;
  return op;
}

// How one client's contiguous or channels_last weight is read: as rows of `columns` elements, or (fine) as [p, q].
struct WeightPlan {
  enum { kRows, kFine, kViewChannelsLast } kind;
  int64_t rows, columns;     // kRows
  int64_t segment;           // kRows: so many columns are written at a time
  int64_t blocks, p, q;      // kFine
  bool u_is_x;               // kFine: whether u is a number for each p
  int64_t u_numel, v_numel;  // of one rank
  bool transpose_u;          // u [i, kh] is wanted as [kh, i]
};

// Whether rows of the weight, where it is read by rows, differ in their scale alone.
template <class Op>
bool are_alike(const Op& op) {
  return op.layout == kLinear || (op.layout == kKernel && !op.channels_last);
}

template <class Op>
WeightPlan make_plan(const Op& op) {
  const Size& s = op.size;
  WeightPlan plan{WeightPlan::kRows, 0, 0, kSegment, 1, 0, 0, op.layout == kKernel, s.taps(), s.o * s.i, false};
  const int64_t lanes = register_bytes() / (op.type == Type::f64 ? 8 : 4);
  switch (op.layout) {
    case kLinear:
      plan.rows = s.o, plan.columns = s.i, plan.u_numel = s.i, plan.v_numel = s.o;
      break;
    case kSpatial:
      if (s.taps() == 1) {
        plan.rows = 1, plan.columns = s.o * s.i;
      } else if (op.channels_last && s.i < lanes && s.taps() >= 2 * lanes) {
        plan.kind = WeightPlan::kFine, plan.u_is_x = true, plan.blocks = s.o, plan.p = s.taps(), plan.q = s.i;
      } else if (op.channels_last) {
        plan.rows = s.o * s.taps(), plan.columns = s.i;
      } else {
        plan.kind = WeightPlan::kFine, plan.p = s.o * s.i, plan.q = s.taps();
      }
      break;
    case kKernel:
      plan.u_numel = s.i * s.kh, plan.v_numel = s.o * s.kw;
      if (op.channels_last) {
        plan.rows = s.o * s.taps(), plan.columns = s.i, plan.transpose_u = s.kh > 1;
      } else if (s.kw == 1) {
        plan.rows = s.o, plan.columns = s.i * s.kh;
      } else {
        plan.kind = WeightPlan::kFine, plan.blocks = s.o, plan.p = s.i * s.kh, plan.q = s.kw;
      }
      break;
    default:
      plan.rows = s.taps(), plan.columns = s.o * s.i;
      if (op.channels_last) plan.kind = WeightPlan::kViewChannelsLast;
  }
  if (are_alike(op)) plan.segment = plan.columns;
  return plan;
}

// f(q) as a constant where registers are parted into so many columns.
template <class F>
FF_INLINE bool with_columns(int64_t q, const F& f) {
  if (q == 9) return f(std::integral_constant<int, 9>{}), true;
  if (q == 25) return f(std::integral_constant<int, 25>{}), true;
  if (q == 3) return f(std::integral_constant<int, 3>{}), true;
  if (q == 5) return f(std::integral_constant<int, 5>{}), true;
  if (q == 7) return f(std::integral_constant<int, 7>{}), true;
  return false;
}

inline bool has_columns(int64_t q) {
  return with_columns(q, [](auto) {});
}

// The supports of all clients as bits, each a row after the other of kBitsInRow positions.
struct Supports {
  static constexpr int64_t kBitsInRow = 4096;
  std::vector<std::shared_ptr<const OwnBits>> of;  // each client's; empty where values are placed one by one
  bool valid = true;

  const Bits* at(int64_t k) const { return of.empty() ? nullptr : of[of.size() == 1 ? 0 : k].get(); }
};

constexpr int64_t kAhead = 512;  // values that are fetched ahead

// f(j) for j < n, which is `kUnrolled` if that is not 0.
template <int kUnrolled, class F>
FF_INLINE void each(int64_t n, const F& f) {
  if constexpr (kUnrolled) {
#pragma GCC unroll 32
    for (int j = 0; j < kUnrolled; ++j) f(j);
  } else {
    for (int64_t j = 0; j < n; ++j) f(j);
  }
}

// The values of a support from a position on.
template <class T, int B>
struct ValuesFrom {
  using V = Vec<float, B>;
  static constexpr int L = kLanes<float, B>;

  const T *from, *end;
  BitsFrom<B> which;
  T* room;  // for (n + 1) · L where n registers are taken at once

  FF_INLINE ValuesFrom(const Bits& bits, const T* values, int64_t count, int64_t position, T* room)
      : from(values + bits.before_position(position)), end(values + count), which(bits, position), room(room) {}

  // Calls f(j, x) for j < n, x being the weight at the next positions, a register of them.
  template <int kUnrolled, class F>
  FF_INLINE void take(int64_t n, const F& f) {
    const T* next = from;
    if (__builtin_expect(end - from < n * L, 0)) {
      std::memcpy(static_cast<void*>(room), from, (end - from) * sizeof(T));
      next = room;
    }
    const T* const first = next;
    each<kUnrolled>(n, [&](int64_t j) FF_INLINE_LAMBDA {
      __builtin_prefetch(next + kAhead);
      f(j, spread_next<B>(which.next(), next));
    });
    from += next - first;
  }
};

// The gradient of the values of a support from a position on. What lies before `stop` may be written, nothing else is.
template <class T, int B>
struct ValuesTo {
  static constexpr int L = kLanes<float, B>;

  T *to, *stop;
  BitsFrom<B> which;

  FF_INLINE ValuesTo(const Bits& bits, T* values, T* stop, int64_t position)
      : to(values + bits.before_position(position)), stop(stop), which(bits, position) {}

  // Of the gradient of the weight at the next positions, n registers.
  template <int n>
  FF_INLINE void put(const Vec<float, B> (&x)[n]) {
    T room[n * L];
    const bool last = stop - to < n * L;
    T* next = last ? room : to;
    T* const first = next;
#pragma GCC unroll 32
    for (int j = 0; j < n; ++j) {
      __builtin_prefetch(next + kAhead);
      gather_next<B>(which.next(), x[j], next);
    }
    if (last) std::memcpy(static_cast<void*>(to), room, std::min(next - first, stop - to) * sizeof(T));
    to += next - first;
  }
};

// Calls f(j, place) for each position index[j] of a support in [begin, end), place being where it lies in memory, from
// that of `begin` on. Returns whether they are ascending and within bounds; f sees none that is not. In channels_last
// `begin` and `end` are those of outputs.
template <class F>
FF_INLINE bool each_place(const Support& support, int64_t k, const Size& s, bool channels_last, int64_t begin,
                          int64_t end, const F& f) {
  const int32_t *index = client<int32_t>(support.index, k), *stop = index + support.count;
  // Every number of the index is seen for one of the stretches of a weight, if it is ascending or not.
  const int64_t last = end == s.numel() ? support.count : std::lower_bound(index, stop, end) - index;
  int64_t j = begin == 0 ? 0 : std::lower_bound(index, stop, begin) - index, before = begin - 1;
  if (!channels_last) {
    for (; j < last; ++j) {
      const int64_t position = index[j];
      if (position <= before || position >= end) return false;
      f(j, position - begin);
      before = position;
    }
  } else {
    const int64_t taps = s.taps(), output = s.i * taps;
    const double per_tap = 1.0 / taps;
    for (int64_t o = begin; o < end; o += output) {
      for (; j < last && index[j] < o + output; ++j) {
        const int64_t position = index[j], n = position - o;
        if (position <= before) return false;
        const auto i = static_cast<int64_t>((n + 0.5) * per_tap);
        f(j, o - begin + (n - i * taps) * s.i + i);
        before = position;
      }
    }
  }
  return j == last;
}

// Whether a weight in channels_last is filled by columns.
template <class Op>
bool fills_by_columns(const Op& op, const WeightPlan& plan) {
  return op.channels_last && plan.kind == WeightPlan::kRows && has_columns(op.size.taps()) &&
         op.size.i >= register_bytes() / int64_t(sizeof(float));
}

// How many positions by registers take as long as a value that is placed alone, as measured.
template <class Op>
int64_t placed_alone(const Op& op, const WeightPlan& plan) {
  constexpr bool backward = std::is_same_v<Op, Rank1Backward>;
  const bool half = op.type != Type::f32;
  if (plan.kind == WeightPlan::kRows && !op.channels_last) return half ? expands() ? 12 : 3 : backward ? 3 : 8;
  if (fills_by_columns(op, plan)) return !backward ? 20 : half ? 5 : 9;
  if (plan.kind == WeightPlan::kFine && !op.channels_last) return !backward ? 20 : half ? 3 : 5;
  return half ? 3 : 4;
}

template <class Op>
Supports find_supports(const Op& op, const WeightPlan& plan, ParallelFor parallel_for) {
  const Support& support = op.support;
  const Size& s = op.size;
  Supports out;
  if (!spreads(register_bytes()) || op.type == Type::f64) return out;
  if (support.count * placed_alone(op, plan) < s.numel()) return out;
  const int64_t rows = ceil_div(s.numel(), Supports::kBitsInRow);
  for (int64_t k = 0; k < (support.index.client_stride ? op.clients : 1); ++k) {
    const int32_t* index = client<int32_t>(support.index, k);
    out.of.push_back(find_bits(rows, Supports::kBitsInRow, {index, nullptr, support.count}, parallel_for));
    out.valid = out.valid && out.of.back() && index[support.count - 1] < s.numel();
  }
  return out;
}

// Values by their support as bits. Positions are taken eight at a time, from a multiple of eight on.
template <class T, int B>
struct BySupport {
  using V = Vec<float, B>;
  static constexpr int L = kLanes<float, B>;
  static constexpr int64_t kSpare = 32;  // elements before and after a stretch that may be read and written

  // The weight at positions [begin, end), from `to` on.
  template <class To>
  FF_INLINE static void fill(const Bits& bits, const T* values, int64_t count, int64_t begin, int64_t end, To* to) {
    int64_t at = begin / 8 * 8;
    const T *from = values + bits.before_position(at), *last = values + count - 8;
    to -= begin - at;
    if constexpr (kExpands<B> && sizeof(T) == 2 && std::is_same_v<T, To>) {
      if (expands()) {
        for (; at + 2 * L <= end && from + 2 * L <= values + count; at += 2 * L, to += 2 * L) {
          const auto some = spread_halves<B>(bits.bytes(0, at), from);
          std::memcpy(static_cast<void*>(to), &some, B);
        }
      }
    }
    for (; at + L <= end && from + (L - 8) <= last; at += L, to += L)
      store<B>(to, spread_next<B>(bits.bytes(0, at), from));
    for (; at < end; at += 8, to += 8) {
      const unsigned some = *bits.bytes(0, at);
      store<32>(to, spread(some, from, last));
      from += __builtin_popcount(some);
    }
  }

  // The values at positions [begin, end) of a weight, g from `begin` on.
  template <class From>
  FF_INLINE static void take(const Bits& bits, const From* g, int64_t begin, int64_t end, T* values) {
    int64_t at = begin;
    T* const stop = values + bits.before_position(end);
    if constexpr (kExpands<B> && sizeof(T) == 2 && std::is_same_v<T, From>) {
      if (expands()) {
        T* next = values + bits.before_position(begin);
        for (; at + 2 * L <= end && next + 2 * L <= stop; at += 2 * L, g += 2 * L)
          gather_halves<B>(bits.bytes(0, at), at % 8, g, next);
      }
    }
    ValuesTo<T, B> to(bits, values, stop, at);
    for (; at + L <= end; at += L, g += L) {
      const V some[1] = {load<B>(g)};
      to.put(some);
    }
    if (at == end) return;
    From left[L] = {};
    std::memcpy(static_cast<void*>(left), g, (end - at) * sizeof(From));
    const V some[1] = {load<B>(left)};
    to.put(some);
  }

  // Registers `step` elements apart.
  template <int Q, class From>
  FF_INLINE static void move(const From* from, int64_t step, V (&to)[Q]) {
#pragma GCC unroll 32
    for (int c = 0; c < Q; ++c) to[c] = load<B>(from + c * step);
  }
  template <int Q, class To>
  FF_INLINE static void move(const V (&from)[Q], To* to, int64_t step) {
#pragma GCC unroll 32
    for (int c = 0; c < Q; ++c) store<B>(to + c * step, from[c]);
  }

  // f(columns, tap), a register of taps from `tap` on for each input, where these are few; returns the taps that it
  // had.
  template <class F>
  FF_INLINE static int64_t turn_few(int64_t inputs, int64_t taps, const F& f) {
    int64_t tap = 0;
    if (inputs >= L) return tap;
    with_columns(inputs, [&](auto few) FF_INLINE_LAMBDA {
      for (; tap + L <= taps; tap += L) {
        V columns[few.value];
        f(columns, tap);
      }
    });
    return tap;
  }

  // x [inputs, taps] to y [taps, inputs].
  template <class To>
  FF_INLINE static void turn(const float* x, int64_t inputs, int64_t taps, To* y) {
    int64_t i = 0;
    const int64_t first = turn_few(inputs, taps, [&]<int Q>(V(&columns)[Q], int64_t tap) FF_INLINE_LAMBDA {
      move(x + tap, taps, columns);
      Columns<Q, L>::join(columns);
      move(columns, y + tap * Q, L);
    });
    for (; i + L <= inputs; i += L) {
      for (int64_t tap = 0; tap < taps; tap += L) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(x + (i + l) * taps + tap);
        PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) {
          if (tap + l < taps) store<B>(y + (tap + l) * inputs + i, lines[l]);
        }
      }
    }
    for (int64_t tap = first; tap < taps; ++tap) {
      for (int64_t n = i; n < inputs; ++n) y[tap * inputs + n] = from_compute<To>(x[n * taps + tap]);
    }
  }

  // y [taps, inputs] to x [inputs, taps]. What is stored beyond the last tap is written over by the next input's.
  FF_INLINE static void turn_back(const T* y, int64_t inputs, int64_t taps, float* x) {
    int64_t i = 0;
    const int64_t first = turn_few(inputs, taps, [&]<int Q>(V(&columns)[Q], int64_t tap) FF_INLINE_LAMBDA {
      move(y + tap * Q, L, columns);
      Columns<Q, L>::part(columns);
      move(columns, x + tap, taps);
    });
    for (; i + L <= inputs; i += L) {
      for (int64_t tap = (taps - 1) / L * L; tap >= 0; tap -= L) {
        V lines[L];
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) lines[l] = load<B>(y + std::min(tap + l, taps - 1) * inputs + i);
        PackPanels<float, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) store<B>(x + (i + l) * taps + tap, lines[l]);
      }
    }
    for (; i < inputs; ++i) {
      for (int64_t tap = first; tap < taps; ++tap) x[i * taps + tap] = to_compute(y[tap * inputs + i]);
    }
  }
};

// Channels_last weights of Q taps by the bits of their support, a register of inputs at a time: what Q registers have
// in the order of positions is parted into taps, or joined from them, in registers.
template <class T, int B, int Q>
struct ByColumns {
  using V = Vec<float, B>;
  static constexpr int L = kLanes<float, B>;
  using Parts = Columns<Q, L>;
  using From = ValuesFrom<T, B>;
  using To = ValuesTo<T, B>;

  // Position `at` is the first of an output. f(i, x) has μ of tap c at inputs i … i + L in x[c].
  template <class F>
  FF_INLINE static void fill(const Bits& bits, const T* values, int64_t count, int64_t at, int64_t inputs, const F& f) {
    T room[(Q + 1) * L];
    From from(bits, values, count, at, room);
    for (int64_t i = 0; i < inputs; i += L) {
      if (i + L > inputs) {
        i = inputs - L;
        from = From(bits, values, count, at + i * Q, room);
      }
      V x[Q];
      from.template take<Q>(Q, [&](int64_t c, V some) FF_INLINE_LAMBDA { x[c] = some; });
      Parts::part(x);
      f(i, x);
    }
  }

  // The values of the output at `at`, of which g is the gradient, and those up to `stop` may be written. f(i, done, x)
  // has the gradient of tap c at inputs i … i + L in x[c], of which it has had the first `done` before.
  template <class F>
  FF_INLINE static void take(const Bits& bits, const T* g, int64_t at, int64_t inputs, T* values, T* stop, const F& f) {
    To to(bits, values, stop, at);
    for (int64_t i = 0; i < inputs; i += L) {
      int64_t done = 0;
      if (i + L > inputs) {
        done = i + L - inputs;
        i = inputs - L;
        to = To(bits, values, stop, at + i * Q);
      }
      V x[Q];
#pragma GCC unroll 32
      for (int c = 0; c < Q; ++c) {
        const T* const from = g + c * inputs + i;
        __builtin_prefetch(from + Q * inputs);
        x[c] = in_register(load<B>(from));
      }
      f(i, done, x);
      Parts::join(x);
      to.put(x);
    }
  }
};

template <class T>
void transpose_u(const In& u, int64_t clients, int64_t rank, int64_t inputs, int64_t kh, T* out) {
  for (int64_t k = 0; k < clients; ++k) {
    for (int64_t r = 0; r < rank; ++r) {
      const T* from = client<T>(u, k) + r * inputs * kh;
      for (int64_t y = 0; y < kh; ++y) {
        for (int64_t i = 0; i < inputs; ++i) *out++ = from[i * kh + y];
      }
    }
  }
}

}  // namespace fastfact
