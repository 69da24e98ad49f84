// W = Σ_r u_r ⊗ v_r + μ and its gradients, one pass over memory each.
//
// Two shapes of loop cover all layouts and formats. Where one factor runs along the innermost axis of W, a row of W is
// that factor times a number. Where that axis holds the few taps of a kernel (contiguous W), W is read as [p, q] with
// small q, and a register of p's is spread over the q registers it fills.
//
// Compact μ is made dense a tile at a time, in cache, for the same loops: one by one, or where it is dense enough by
// registers, from its support as bits.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "gemm.h"
#include "rank1_pairs.h"
#include "rank1_rows.h"
#include "support.h"
#include "transpose.h"
#include "vec.h"

namespace fastfact {
namespace {

constexpr int64_t kGrain = 16384;   // elements worth a thread
constexpr int64_t kTile = 8192;     // elements of compact μ made dense at a time
constexpr int64_t kSegment = 8192;  // columns of a row written at a time, where rows share nothing

// The same, channels_last only where that is another order in memory.
template <class Op>
Op normal(Op op) {
  op.channels_last = op.channels_last && op.size.taps() > 1 && op.size.i > 1;
  return op;
}

// How one client's contiguous or channels_last weight is read: as rows of `columns` elements, or (fine) as [p, q].
struct Plan {
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
Plan make_plan(const Op& op) {
  const Size& s = op.size;
  Plan plan{Plan::kRows, 0, 0, kSegment, 1, 0, 0, op.layout == kKernel, s.taps(), s.o * s.i, false};
  const int64_t lanes = register_bytes() / (op.type == Type::f64 ? 8 : 4);
  switch (op.layout) {
    case kLinear:
      plan.rows = s.o, plan.columns = s.i, plan.u_numel = s.i, plan.v_numel = s.o;
      break;
    case kSpatial:
      if (s.taps() == 1) {
        plan.rows = 1, plan.columns = s.o * s.i;
      } else if (op.channels_last && s.i < lanes && s.taps() >= 2 * lanes) {
        plan.kind = Plan::kFine, plan.u_is_x = true, plan.blocks = s.o, plan.p = s.taps(), plan.q = s.i;
      } else if (op.channels_last) {
        plan.rows = s.o * s.taps(), plan.columns = s.i;
      } else {
        plan.kind = Plan::kFine, plan.p = s.o * s.i, plan.q = s.taps();
      }
      break;
    case kKernel:
      plan.u_numel = s.i * s.kh, plan.v_numel = s.o * s.kw;
      if (op.channels_last) {
        plan.rows = s.o * s.taps(), plan.columns = s.i, plan.transpose_u = s.kh > 1;
      } else if (s.kw == 1) {
        plan.rows = s.o, plan.columns = s.i * s.kh;
      } else {
        plan.kind = Plan::kFine, plan.blocks = s.o, plan.p = s.i * s.kh, plan.q = s.kw;
      }
      break;
    default:
      plan.rows = s.taps(), plan.columns = s.o * s.i;
      if (op.channels_last) plan.kind = Plan::kViewChannelsLast;
  }
  if (are_alike(op)) plan.segment = plan.columns;
  return plan;
}

// Row m of the weight is scale[r][scale_at] · along[r][along_at …]: which factor is which, and where in it.
struct Row {
  bool u_along;
  int64_t scale_at, along_at;
};

template <class Op>
FF_INLINE Row row_of(const Op& op, int64_t m) {
  const Size& s = op.size;
  switch (op.layout) {
    case kLinear:
      return {true, m, 0};
    case kSpatial:
      return s.taps() == 1 ? Row{false, 0, 0} : Row{false, m % s.taps(), m / s.taps() * s.i};
    case kKernel:
      if (!op.channels_last) return {true, m, 0};
      return {true, m / s.taps() * s.kw + m % s.kw, m / s.kw % s.kh * s.i};
    default:
      return {false, m, 0};
  }
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

// μ of one client from a position on, as the loops that write W read it.
template <class T>
struct Mu {
  In mu;
  int64_t begins;                      // the position of the first number of `mu`
  const Supports* supports = nullptr;  // if given, `mu` has values on them

  FF_INLINE const T* at(int64_t k, int64_t position) const {
    return mu.data ? client<T>(mu, k) + (position - begins) : nullptr;
  }
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

// The same of a dense μ, which may be null.
template <class T, int B>
struct DenseFrom {
  static constexpr int L = kLanes<T, B>;

  const T* from;

  template <int kUnrolled, class F>
  FF_INLINE void take(int64_t n, const F& f) {
    if (!from) return each<kUnrolled>(n, [&](int64_t j) FF_INLINE_LAMBDA { f(j, Vec<T, B>{}); });
    each<kUnrolled>(n, [&](int64_t j) FF_INLINE_LAMBDA { f(j, load<B>(from + j * L)); });
    from += n * L;
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

template <class T, int B>
FF_INLINE void write_row(T* w, const T* mu, int64_t n, int64_t rank, const T* scale, int64_t scale_stride,
                         const T* along, int64_t along_stride) {
  using V = Vec<T, B>;
  constexpr int L = kLanes<T, B>;
  const auto first = to_compute(scale[0]);
  int64_t j = 0;
  auto write = [&](int64_t j) FF_INLINE_LAMBDA {
    V sum = load<B>(along + j) * first;
    for (int64_t r = 1; r < rank; ++r)
      sum += load<B>(along + r * along_stride + j) * to_compute(scale[r * scale_stride]);
    if (mu) sum += load<B>(mu + j);
    store<B>(w + j, sum);
  };
  for (; j + L <= n; j += L) write(j);
  // The last register has some numbers of the one before.
  if (j < n && n >= L) return write(n - L);
  for (; j < n; ++j) {
    auto sum = to_compute(along[j]) * first;
    for (int64_t r = 1; r < rank; ++r)
      sum += to_compute(along[r * along_stride + j]) * to_compute(scale[r * scale_stride]);
    if (mu) sum += to_compute(mu[j]);
    w[j] = from_compute<T>(sum);
  }
}

constexpr int kTogether = 4;  // rows whose sums share what is read along them

// The same for rows of `stride` that differ in their scale alone, [rank][kTogether].
template <class T, int B>
FF_INLINE void write_rows(T* w, const T* mu, int64_t stride, int64_t n, int64_t rank, const Compute<T>* scale,
                          const T* along, int64_t along_stride) {
  using V = Vec<T, B>;
  constexpr int L = kLanes<T, B>;
  auto write = [&]<int H>(int64_t j) FF_INLINE_LAMBDA {
    V sum[kTogether][H];
    for (int64_t r = 0; r < rank; ++r) {
      const T* from = along + r * along_stride + j;
      V a[H];
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) a[h] = in_register(load<B>(from + h * L));
#pragma GCC unroll 4
      for (int m = 0; m < kTogether; ++m) {
        const V by = V{} + scale[r * kTogether + m];
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) sum[m][h] = r == 0 ? a[h] * by : sum[m][h] + a[h] * by;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kTogether; ++m) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        if (mu) sum[m][h] += load<B>(mu + m * stride + j + h * L);
        store<B>(w + m * stride + j + h * L, sum[m][h]);
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 * L <= n; j += 2 * L) write.template operator()<2>(j);
  if (n >= L) {
    // The last register has some numbers of the one before.
    for (; j < n; j += L) write.template operator()<1>(std::min(j, n - L));
  }
  for (int64_t m = 0; m < kTogether && j < n; ++m) {
    for (int64_t i = j; i < n; ++i) {
      auto sum = to_compute(along[i]) * scale[m];
      for (int64_t r = 1; r < rank; ++r) sum += to_compute(along[r * along_stride + i]) * scale[r * kTogether + m];
      if (mu) sum += to_compute(mu[m * stride + i]);
      w[m * stride + i] = from_compute<T>(sum);
    }
  }
}

// Items are (client, row, segment of a row).
template <class T, int B>
struct WriteRows {
  FF_INLINE static void run(const Rank1& op, const Plan& plan, const Mu<T>& mu, const T* u_transposed, int64_t begin,
                            int64_t end) {
    const int64_t segments = ceil_div(plan.columns, plan.segment);
    if constexpr (std::is_same_v<T, BFloat16> && kMultipliesPairs<B>) {
      if (are_alike(op) && multiplies_pairs()) return run_pairs(op, plan, mu, begin, end);
    }
    const bool together = are_alike(op) && op.rank > 1;
    const Scratch<Compute<T>> scales(together ? op.rank * kTogether : 0);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / (plan.rows * segments), m = item / segments % plan.rows;
      if (together && item + kTogether <= end && m + kTogether <= plan.rows) {
        const T *u = client<T>(op.u, k), *v = client<T>(op.v, k);
        const int64_t at = m * plan.columns;
        for (int64_t r = 0; r < op.rank; ++r)
          copy<B>(v + r * plan.v_numel + m, kTogether, scales.get() + r * kTogether);
        outline<B>([&]() FF_INLINE_LAMBDA {
          write_rows<T, B>(static_cast<T*>(op.w) + k * op.size.numel() + at, mu.at(k, at), plan.columns, plan.columns,
                           op.rank, scales.get(), u, plan.u_numel);
        });
        item += kTogether - 1;
        continue;
      }
      const int64_t start = item % segments * plan.segment, n = std::min(plan.segment, plan.columns - start);
      const T* u = u_transposed ? u_transposed + k * op.rank * plan.u_numel : client<T>(op.u, k);
      const T* v = client<T>(op.v, k);
      const int64_t at = m * plan.columns + start;
      const Row row = row_of(op, m);
      const T *scale = row.u_along ? v : u, *along = row.u_along ? u : v;
      const int64_t scale_stride = row.u_along ? plan.v_numel : plan.u_numel;
      const int64_t along_stride = row.u_along ? plan.u_numel : plan.v_numel;
      write_row<T, B>(static_cast<T*>(op.w) + k * op.size.numel() + at, mu.at(k, at), n, op.rank, scale + row.scale_at,
                      scale_stride, along + row.along_at + start, along_stride);
    }
  }

  FF_INLINE static void run_pairs(const Rank1& op, const Plan& plan, const Mu<T>& mu, int64_t begin, int64_t end) {
    using Rows = PairedRows<B>;
    const int64_t n = plan.columns, un = plan.u_numel, rank = op.rank;
    const Scratch<T> scale((rank + 1) * Rows::kRows), u_last(rank * Rows::kColumns);
    const auto left = Rows::lanes_left(n);
    for (int64_t item = begin; item < end;) {
      const int64_t k = item / plan.rows, m = item % plan.rows, at = m * n;
      const int64_t rows = std::min({Rows::kRows, end - item, plan.rows - m});
      const T *u = client<T>(op.u, k), *v = client<T>(op.v, k), *from = mu.at(k, at);
      if (item == begin || m == 0) Rows::copy_last(u, un, rank, n, left, u_last.get());
      Rows::pair_scales(v + m, plan.v_numel, rank, rows, scale.get());
      T* w = static_cast<T*>(op.w) + k * op.size.numel() + at;
      outline<B>([&]() FF_INLINE_LAMBDA {
        auto write = [&]<int Count>(int64_t j) FF_INLINE_LAMBDA {
          Rows::template write<Count>(u, un, u_last.get(), rank, scale.get() + 2 * j, from ? from + j * n : nullptr,
                                      w + j * n, n, n);
          return j + Count;
        };
        int64_t j = 0;
        if (rows == Rows::kRows) j = write.template operator()<Rows::kRows>(j);
        if (j + 4 <= rows) j = write.template operator()<4>(j);
        while (j < rows) j = write.template operator()<1>(j);
      });
      item += rows;
    }
  }
};

constexpr int64_t kGroup = 512;  // p's of one item

// Items are (client, block, group of p's): W[p, q] = Σ_r x[r, p] · y[r, q] + μ[p, q].
template <class T, int B>
struct WriteFine {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using Lane = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  using Index = IndexVec<T, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Rank1& op, const Plan& plan, const Mu<T>& dense, const T*, int64_t begin,
                            int64_t end) {
    const int64_t q = plan.q, groups = ceil_div(plan.p, kGroup);
    const bool u_is_x = plan.u_is_x;
    const int64_t x_stride = u_is_x ? plan.u_numel : plan.v_numel, y_stride = u_is_x ? plan.v_numel : plan.u_numel;
    constexpr bool may_spread = spreads(B) && !std::is_same_v<T, double>;
    const Scratch<T> room(may_spread && dense.supports ? (q + 1) * L : 0);
    // L p's fill q registers: lane n of them belongs to p = n / q and takes y[n % q].
    const Scratch<Lane> which(q * L);
    const Scratch<C> spread(op.rank * q * L);
    for (int64_t lane = 0, n = 0; lane < L; ++lane) {
      for (int64_t j = 0; j < q; ++j) which.get()[n++] = lane;
    }
    int64_t spread_is_for = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / groups, k = block / plan.blocks, b = block % plan.blocks;
      const T *u = client<T>(op.u, k), *v = client<T>(op.v, k);
      const T *x = u_is_x ? u : v, *y = u_is_x ? v + b * q : u;
      if (spread_is_for != (u_is_x ? block : k)) {
        spread_is_for = u_is_x ? block : k;
        for (int64_t r = 0; r < op.rank; ++r) {
          C* to = spread.get() + r * q * L;
          for (int64_t lane = 0; lane < L; ++lane) {
            for (int64_t j = 0; j < q; ++j) *to++ = to_compute(y[r * y_stride + j]);
          }
        }
      }
      int64_t p = item % groups * kGroup;
      const int64_t last = std::min(plan.p, p + kGroup), at = (b * plan.p + p) * q;
      T* w = static_cast<T*>(op.w) + k * op.size.numel() + at;
      const int64_t whole = (last - p) / L * L;
      const T* mu = dense.at(k, at);
      const Bits* bits = nullptr;
      if constexpr (may_spread) {
        if (dense.supports) {
          bits = dense.supports->at(k);
          ValuesFrom<T, B> values(*bits, client<T>(dense.mu, k), op.support.count, at, room.get());
          write(x + p, x_stride, whole, q, op.rank, which.get(), spread.get(), w, values);
          mu = values.from;
        }
      }
      if (!bits) {
        DenseFrom<T, B> from{mu};
        write(x + p, x_stride, whole, q, op.rank, which.get(), spread.get(), w, from);
        mu = from.from;
      }
      p += whole, w += whole * q;
      for (int64_t position = at + whole * q; p < last; ++p) {
        for (int64_t j = 0; j < q; ++j, ++w, ++position) {
          C sum = 0;
          for (int64_t r = 0; r < op.rank; ++r) sum += to_compute(x[r * x_stride + p]) * spread.get()[r * q * L + j];
          if (mu && (!bits || bits->has(position))) sum += to_compute(*mu++);
          *w = from_compute<T>(sum);
        }
      }
    }
  }

  // W of n p's, whole registers of them.
  template <class From>
  FF_INLINE static void write(const T* x, int64_t x_stride, int64_t n, int64_t q, int64_t rank, const Lane* which,
                              const C* spread, T* w, From& mu) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      if (q == 9) return write_some<9>(x, x_stride, n, q, rank, which, spread, w, mu);
      if (q == 3) return write_some<3>(x, x_stride, n, q, rank, which, spread, w, mu);
      write_some<0>(x, x_stride, n, q, rank, which, spread, w, mu);
    });
  }

  template <int Q, class From>
  FF_INLINE static void write_some(const T* x, int64_t x_stride, int64_t n, int64_t q, int64_t rank, const Lane* which,
                                   const C* spread, T* w, From& mu) {
    From from = mu;
    // In registers where none are needed to spread values.
    constexpr bool held = Q && std::is_same_v<From, DenseFrom<T, B>>;
    Index lanes[held ? Q : 1];
    V first[held ? Q : 1];
    if constexpr (held) {
      std::memcpy(lanes, which, sizeof(lanes));
      std::memcpy(first, spread, sizeof(first));
    }
    for (int64_t p = 0; p < n; p += L, w += L * q) {
      const V x0 = load<B>(x + p);
      from.template take<Q>(q, [&](int64_t j, V sum) FF_INLINE_LAMBDA {
        Index lane;
        if constexpr (held) {
          lane = lanes[j];
          sum += permute(x0, lane) * first[j];
        } else {
          std::memcpy(&lane, which + j * L, B);
          sum += permute(x0, lane) * load<B>(spread + j * L);
        }
        for (int64_t r = 1; r < rank; ++r) {
          sum += permute(load<B>(x + r * x_stride + p), lane) * load<B>(spread + (r * q + j) * L);
        }
        store<B>(w + j * L, sum);
      });
    }
    mu = from;
  }
};

// Items are (client, o). The view layout permutes nothing, so channels_last has to.
template <class T, int B>
struct WriteViewChannelsLast {
  FF_INLINE static void run(const Rank1& op, const Plan& plan, const Mu<T>& dense, const T*, int64_t begin,
                            int64_t end) {
    using C = Compute<T>;
    const int64_t taps = op.size.taps(), inputs = op.size.i;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / op.size.o, at = item % op.size.o * inputs * taps;
      const T *u = client<T>(op.u, k), *v = client<T>(op.v, k), *mu = dense.at(k, at);
      T* w = static_cast<T*>(op.w) + k * op.size.numel() + at;
      for (int64_t tap = 0; tap < taps; ++tap) {
        for (int64_t i = 0; i < inputs; ++i) {
          const int64_t n = at + i * taps + tap, to = tap * inputs + i;
          C sum = mu ? to_compute(mu[to]) : C(0);
          for (int64_t r = 0; r < op.rank; ++r) {
            sum +=
                to_compute(u[r * plan.u_numel + n / plan.columns]) * to_compute(v[r * plan.v_numel + n % plan.columns]);
          }
          w[to] = from_compute<T>(sum);
        }
      }
    }
  }
};

// What the items of the kernels above are: so many of a client, one after the other in memory.
struct Items {
  int64_t count, largest;  // of a client; the elements of the largest
  int64_t in_row, row, step;

  // The position of the first element of an item, or of the end.
  int64_t start(int64_t item) const { return item / in_row * row + item % in_row * step; }
};

template <class Op>
Items make_items(const Op& op, const Plan& plan) {
  const int64_t output = op.size.i * op.size.taps();
  if (plan.kind == Plan::kViewChannelsLast) return {op.size.o, output, 1, output, 0};
  const bool fine = plan.kind == Plan::kFine;
  const int64_t row = fine ? plan.p * plan.q : plan.columns, step = fine ? kGroup * plan.q : plan.segment;
  const int64_t in_row = ceil_div(row, step);
  return {(fine ? plan.blocks : plan.rows) * in_row, std::min(row, step), in_row, row, step};
}

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
bool fills_by_columns(const Op& op, const Plan& plan) {
  return op.channels_last && plan.kind == Plan::kRows && has_columns(op.size.taps()) &&
         op.size.i >= register_bytes() / int64_t(sizeof(float));
}

// How many positions by registers take as long as a value that is placed alone, as measured.
template <class Op>
int64_t placed_alone(const Op& op, const Plan& plan) {
  constexpr bool backward = std::is_same_v<Op, Rank1Backward>;
  const bool half = op.type != Type::f32;
  if (plan.kind == Plan::kRows && !op.channels_last) return half ? expands() ? 12 : 3 : backward ? 3 : 8;
  if (fills_by_columns(op, plan)) return !backward ? 20 : half ? 5 : 9;
  if (plan.kind == Plan::kFine && !op.channels_last) return !backward ? 20 : half ? 3 : 5;
  return half ? 3 : 4;
}

template <class Op>
Supports find_supports(const Op& op, const Plan& plan, ParallelFor parallel_for) {
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

// A tile of μ from its compact form: positions [begin, end) of a client, from `bits` if that is given. So many elements
// as `BySupport` spares may be written before and after them.
template <class T, int B>
struct FillTile {
  FF_INLINE static void run(const Rank1& op, const Bits* bits, int64_t k, int64_t begin, int64_t end, T* tile,
                            std::atomic<bool>* valid) {
    const T* values = client<T>(op.mu, k);
    if constexpr (spreads(B) && !std::is_same_v<T, double>) {
      using By = BySupport<T, B>;
      if (bits && !op.channels_last) {
        return By::fill(*bits, values, op.support.count, begin, end, tile);
      }
      if (bits) {
        const int64_t output = op.size.i * op.size.taps();
        const Scratch<float> some(output + 2 * By::kSpare);
        float* x = some.get() + By::kSpare;
        std::memset(x + output, 0, By::kSpare * sizeof(float));
        for (int64_t o = begin; o < end; o += output) {
          By::fill(*bits, values, op.support.count, o, o + output, x);
          outline<B>([&]() FF_INLINE_LAMBDA { By::turn(x, op.size.i, op.size.taps(), tile + (o - begin)); });
        }
        return;
      }
    }
    std::memset(static_cast<void*>(tile), 0, (end - begin) * sizeof(T));
    const bool ordered = each_place(op.support, k, op.size, op.channels_last, begin, end,
                                    [&](int64_t j, int64_t place) FF_INLINE_LAMBDA { tile[place] = values[j]; });
    if (!ordered) *valid = false;
  }
};

// W in channels_last whose support is given as bits. Items are (client, output).
template <class T, int B>
struct WriteColumns {
  FF_INLINE static void run(const Rank1& op, const Plan& plan, const Supports& supports, const T* u_transposed,
                            int64_t begin, int64_t end) {
    if constexpr (spreads(B) && !std::is_same_v<T, double>) {
      with_columns(op.size.taps(), [&](auto taps) FF_INLINE_LAMBDA {
        if (op.layout == kSpatial) {
          write<taps.value, true>(op, plan, supports, nullptr, begin, end);
        } else {
          write<taps.value, false>(op, plan, supports, u_transposed, begin, end);
        }
      });
    }
  }

  template <int Q, bool spatial>
  FF_INLINE static void write(const Rank1& op, const Plan& plan, const Supports& supports, const T* u_transposed,
                              int64_t begin, int64_t end) {
    using V = Vec<float, B>;
    const int64_t inputs = op.size.i, kw = op.size.kw, rank = op.rank, un = plan.u_numel, vn = plan.v_numel;
    const Scratch<float> scales(rank * Q);
    float* const scale = scales.get();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / op.size.o, o = item % op.size.o, at = o * inputs * Q;
      const T *u = client<T>(op.u, k), *v = client<T>(op.v, k), *values = client<T>(op.mu, k);
      T* const w = static_cast<T*>(op.w) + k * op.size.numel() + at;
      if (!spatial || o == 0 || item == begin) {
        for (int64_t r = 0; r < rank; ++r) {
          for (int64_t c = 0; c < Q; ++c) {
            scale[r * Q + c] = to_compute(spatial ? u[r * un + c] : v[r * vn + o * kw + c % kw]);
          }
        }
      }
      const T* const turned_u = u_transposed ? u_transposed + k * rank * un : u;
      const T* along[spatial ? 1 : Q];
      for (int64_t c = 0; c < (spatial ? 1 : Q); ++c) {
        along[c] = spatial ? v + o * inputs : turned_u + c / kw * inputs;
      }
      const int64_t stride = spatial ? vn : un;
      outline<B>([&]() FF_INLINE_LAMBDA {
        ByColumns<T, B, Q>::fill(
            *supports.at(k), values, op.support.count, at, inputs, [&](int64_t i, V(&x)[Q]) FF_INLINE_LAMBDA {
              for (int64_t r = 0; r < rank; ++r) {
                const V first = load<B>(along[0] + r * stride + i);
#pragma GCC unroll 32
                for (int c = 0; c < Q; ++c) {
                  x[c] += (spatial ? first : load<B>(along[c] + r * stride + i)) * scale[r * Q + c];
                }
              }
#pragma GCC unroll 32
              for (int c = 0; c < Q; ++c) store<B>(w + c * inputs + i, x[c]);
            });
      });
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

// The backward pass. The gradient of v is finished within a part of dW, that of u gathers over all of it: each chunk of
// dW has a partial sum of its own, and the partial sums are added in order. The chunks depend on the shape only, so
// the result does not depend on the threads.
struct Chunks {
  int64_t units, per_chunk, count;  // the axis cut into chunks
};

// What the kernels share. Their items are (client, chunk); `partial` is [item][rank][u_numel].
template <class T>
struct ChunkOf {
  int64_t k, first, last;  // the client, and the units of the chunk
  const T *g, *u, *v;
  Compute<T>* du;
  T* dv;

  // u in the order of u_transposed if that is given.
  FF_INLINE ChunkOf(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const T* u_transposed,
                    Compute<T>* partial, int64_t item)
      : k(item / chunks.count),
        first(item % chunks.count * chunks.per_chunk),
        last(std::min(chunks.units, first + chunks.per_chunk)),
        g(client<T>(op.grad, k)),
        u(u_transposed ? u_transposed + k * op.rank * plan.u_numel : client<T>(op.u, k)),
        v(client<T>(op.v, k)),
        du(partial + item * op.rank * plan.u_numel),
        dv(op.dv ? static_cast<T*>(op.dv) + k * op.rank * plan.v_numel : nullptr) {}
};

// For the rows g[m] of n elements: row_sums[m] += lanes of Σ_j g[m, j] along[j], and column_sums[j] (+)= Σ_m g[m, j]
// scale[m].
template <class T, int B>
FF_INLINE void sum_rows_and_columns(const T* g, int64_t stride, int64_t rows, int64_t n, const Compute<T>* scale,
                                    const T* along, Vec<T, B>* row_sums, Compute<T>* column_sums, bool add) {
  using C = Compute<T>;
  using V = Vec<T, B>;
  constexpr int L = kLanes<T, B>;
  int64_t j = 0;
  for (; j + 2 * L <= n; j += 2 * L) {
    const V a0 = load<B>(along + j), a1 = load<B>(along + j + L);
    V c0 = add ? load<B>(column_sums + j) : V{}, c1 = add ? load<B>(column_sums + j + L) : V{};
    for (int64_t m = 0; m < rows; ++m) {
      __builtin_prefetch(g + (m + rows) * stride + j);
      __builtin_prefetch(g + (m + rows) * stride + j + L);
      const V g0 = load<B>(g + m * stride + j), g1 = load<B>(g + m * stride + j + L);
      row_sums[m] = row_sums[m] + g0 * a0 + g1 * a1;
      c0 += g0 * scale[m];
      c1 += g1 * scale[m];
    }
    store<B>(column_sums + j, c0);
    store<B>(column_sums + j + L, c1);
  }
  for (; j + L <= n; j += L) {
    const V a = load<B>(along + j);
    V sum = add ? load<B>(column_sums + j) : V{};
    for (int64_t m = 0; m < rows; ++m) {
      const V x = load<B>(g + m * stride + j);
      row_sums[m] += x * a;
      sum += x * scale[m];
    }
    store<B>(column_sums + j, sum);
  }
  for (; j < n; ++j) {
    const C a = to_compute(along[j]);
    C sum = add ? column_sums[j] : C(0);
    for (int64_t m = 0; m < rows; ++m) {
      const C x = to_compute(g[m * stride + j]);
      row_sums[m][j % L] += x * a;
      sum += x * scale[m];
    }
    column_sums[j] = sum;
  }
}

// Linear and kernel layouts where v is a number for each row and u runs along it.
template <class T, int B>
struct BackwardRows {
  FF_INLINE static void run(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const T* u_transposed,
                            Compute<T>* partial, int64_t begin, int64_t end) {
    if (!are_alike(op)) return run_sets(op, plan, chunks, u_transposed, partial, begin, end);
    if constexpr (std::is_same_v<T, BFloat16> && kMultipliesPairs<B>) {
      if (multiplies_pairs()) return run_blocks<PairedRows<B>>(op, plan, chunks, partial, begin, end);
    }
    run_blocks<SingleRows<Compute<T>, B>>(op, plan, chunks, partial, begin, end);
  }

  // Rows that differ in their scale alone.
  template <class Rows>
  FF_INLINE static void run_blocks(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, Compute<T>* partial,
                                   int64_t begin, int64_t end) {
    using C = Compute<T>;
    using E = typename Rows::T;
    constexpr int64_t kRows = Rows::kRows, kColumns = Rows::kColumns;
    constexpr bool converts = !std::is_same_v<T, E>;
    const int64_t n = plan.columns, un = plan.u_numel, vn = plan.v_numel, rank = op.rank;
    const int64_t whole = ceil_div(n, kColumns) * kColumns;
    const Scratch<E> none(n), g_last(kRows * kColumns), u_last(rank * kColumns), scale(rank * kRows);
    const Scratch<E> g_own(converts ? kRows * n : 0), u_own(converts ? rank * un : 0);
    const auto left = Rows::lanes_left(n);
    const Scratch<C> du(rank * whole), sums(rank * kRows + B / 4);
    std::memset(static_cast<void*>(none.get()), 0, n * sizeof(E));
    for (int64_t item = begin; item < end; ++item) {
      const ChunkOf<T> c(op, plan, chunks, nullptr, partial, item);
      const E* u = u_own.get();
      if constexpr (converts) {
        copy<B>(c.u, rank * un, u_own.get());
      } else {
        u = c.u;
      }
      Rows::copy_last(u, un, rank, n, left, u_last.get());
      std::memset(du.get(), 0, rank * whole * sizeof(C));
      for (int64_t m = c.first; m < c.last; m += kRows) {
        const int64_t rows = std::min(kRows, c.last - m);
        const E* from = g_own.get();
        if constexpr (converts) {
          copy<B>(c.g + m * n, rows * n, g_own.get());
        } else {
          from = c.g + m * n;
        }
        const E* g[kRows];
        for (int64_t j = 0; j < kRows; ++j) {
          g[j] = j < rows ? from + j * n : none.get();
          Rows::copy_last(g[j], n, 1, n, left, g_last.get() + j * kColumns);
        }
        Rows::copy_scales(c.v + m, vn, rank, rows, scale.get());
        for (int64_t r = 0; r < rank;) {
          auto add = [&]<int Ranks>() FF_INLINE_LAMBDA {
            outline<B>([&]() FF_INLINE_LAMBDA {
              Rows::template add<Ranks>(g, g_last.get(), n, u + r * un, un, u_last.get() + r * kColumns,
                                        scale.get() + r * kRows, sums.get() + r * kRows, du.get() + r * whole, whole);
            });
            r += Ranks;
          };
          rank - r >= 2 ? add.template operator()<2>() : add.template operator()<1>();
        }
        for (int64_t r = 0; c.dv && r < rank; ++r) copy<B>(sums.get() + r * kRows, rows, c.dv + r * vn + m);
      }
      for (int64_t r = 0; r < rank; ++r) Rows::in_order(du.get() + r * whole, n, c.du + r * un);
    }
  }

  // The kernel layout in channels_last: kh sets of kw rows for each output.
  FF_INLINE static void run_sets(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const T* u_transposed,
                                 Compute<T>* partial, int64_t begin, int64_t end) {
    using C = Compute<T>;
    const int64_t n = plan.columns, rank = op.rank, un = plan.u_numel, vn = plan.v_numel, sets = op.size.kh,
                  rows = op.size.kw;
    const Scratch<Vec<T, B>> sums(rows);
    const Scratch<C> scale(rows);
    for (int64_t item = begin; item < end; ++item) {
      const ChunkOf<T> c(op, plan, chunks, u_transposed, partial, item);
      std::fill(c.du, c.du + rank * un, C(0));
      for (int64_t m = c.first; m < c.last; ++m) {
        for (int64_t r = 0; r < rank; ++r) {
          for (int64_t j = 0; j < rows; ++j) {
            sums.get()[j] = Vec<T, B>{};
            scale.get()[j] = to_compute(c.v[r * vn + m * rows + j]);
          }
          for (int64_t set = 0; set < sets; ++set) {
            const int64_t along = r * un + set * n;
            sum_rows_and_columns<T, B>(c.g + (m * sets + set) * rows * n, n, rows, n, scale.get(), c.u + along,
                                       sums.get(), c.du + along, true);
          }
          for (int64_t j = 0; c.dv && j < rows; ++j) {
            c.dv[r * vn + m * rows + j] = from_compute<T>(sum_lanes(sums.get()[j]));
          }
        }
      }
    }
  }
};

// View, and spatial layouts where u is a number for each row and v runs along it; spatial channels_last has a set of
// rows for each output.
template <class T, int B>
struct BackwardColumns {
  FF_INLINE static void run(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const T*,
                            Compute<T>* partial, int64_t begin, int64_t end) {
    using C = Compute<T>;
    using V = Vec<T, B>;
    constexpr int64_t kColumns = 1024;
    const int64_t taps = op.size.taps(), inputs = op.size.i, rank = op.rank, vn = plan.v_numel;
    const bool in_sets = op.layout == kSpatial && taps > 1;
    const Scratch<V> sums(rank * taps);
    const Scratch<C> scale(rank * taps), columns(kColumns);
    for (int64_t item = begin; item < end; ++item) {
      const ChunkOf<T> c(op, plan, chunks, nullptr, partial, item);
      for (int64_t j = 0; j < rank * taps; ++j) {
        sums.get()[j] = V{};
        scale.get()[j] = to_compute(c.u[j]);
      }
      const int64_t last = in_sets ? c.last * inputs : c.last;
      for (int64_t at = in_sets ? c.first * inputs : c.first; at < last;) {
        const int64_t n = std::min(kColumns, (in_sets ? (at / inputs + 1) * inputs : last) - at);
        const T* rows = in_sets ? c.g + at / inputs * taps * inputs + at % inputs : c.g + at;
        for (int64_t r = 0; r < rank; ++r) {
          T* out = c.dv ? c.dv + r * vn + at : nullptr;
          C* to = columns.get();
          if constexpr (std::is_same_v<T, C>) to = out ? out : to;
          sum_rows_and_columns<T, B>(rows, plan.columns, taps, n, scale.get() + r * taps, c.v + r * vn + at,
                                     sums.get() + r * taps, to, false);
          if constexpr (!std::is_same_v<T, C>) {
            if (out) copy<B>(to, n, out);
          }
        }
        at += n;
      }
      for (int64_t j = 0; j < rank * taps; ++j) c.du[j] = sum_lanes(sums.get()[j]);
    }
  }
};

// What BackwardColumns and GatherChunk do, in one pass over a spatial weight in channels_last whose support is given as
// bits.
constexpr int kMostAtOnce = 9;  // taps whose registers and sums stay in registers

template <class T, int B>
struct BackwardByColumns {
  FF_INLINE static void run(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const Supports& supports,
                            Compute<T>* partial, int64_t item) {
    if constexpr (spreads(B) && !std::is_same_v<T, double>) {
      const ChunkOf<T> chunk(op, plan, chunks, nullptr, partial, item);
      with_columns(op.size.taps(), [&](auto taps) FF_INLINE_LAMBDA {
        if constexpr (taps.value <= kMostAtOnce) {
          if (op.rank == 1) {
            sum<taps.value, true>(op, plan, *supports.at(chunk.k), chunk);
          } else {
            sum<taps.value, false>(op, plan, *supports.at(chunk.k), chunk);
          }
        }
      });
    }
  }

  template <int Q, bool one>
  FF_INLINE static void sum(const Rank1Backward& op, const Plan& plan, const Bits& bits, const ChunkOf<T>& chunk) {
    using V = Vec<float, B>;
    using I = IndexVec<float, B>;
    using By = ByColumns<T, B, Q>;
    const int64_t inputs = op.size.i, output = inputs * Q, rank = one ? 1 : op.rank, vn = plan.v_numel;
    const Scratch<V> sums(rank * Q);
    const Scratch<float> scale(rank * Q);
    for (int64_t j = 0; j < rank * Q; ++j) sums.get()[j] = V{}, scale.get()[j] = to_compute(chunk.u[j]);
    T* const values = static_cast<T*>(op.dvalues) + chunk.k * op.support.count;
    T* const stop = values + bits.before_position(chunk.last * output);
    outline<B>([&]() FF_INLINE_LAMBDA {
      V kept[one ? Q : 1];
      if constexpr (one) std::memset(kept, 0, sizeof(kept));
      V* const all = one ? kept : sums.get();
      const float* const u = scale.get();
      I lane;
      for (int l = 0; l < By::L; ++l) lane[l] = l;
      for (int64_t o = chunk.first; o < chunk.last; ++o) {
        const T* const v = chunk.v + o * inputs;
        T* const dv = chunk.dv ? chunk.dv + o * inputs : nullptr;
        By::take(bits, chunk.g + o * output, o * output, inputs, values, stop,
                 [&](int64_t i, int64_t done, const V(&x)[Q]) FF_INLINE_LAMBDA {
                   const I fresh = lane >= int32_t(done);
                   for (int64_t r = 0; r < rank; ++r) {
                     const V along = load<B>(v + r * vn + i);
                     V part[3]{};
#pragma GCC unroll 32
                     for (int c = 0; c < Q; ++c) {
                       part[c % 3] += x[c] * u[r * Q + c];
                       all[r * Q + c] += bit_cast<V>(bit_cast<I>(x[c]) & fresh) * along;
                     }
                     if (dv) store<B>(dv + r * vn + i, part[0] + part[1] + part[2]);
                   }
                 });
      }
      if constexpr (one) std::memcpy(sums.get(), kept, sizeof(kept));
    });
    for (int64_t j = 0; j < rank * Q; ++j) chunk.du[j] = sum_lanes(sums.get()[j]);
  }
};

// W[p, q] = Σ_r x[r, p] y[r, q], with x = v and y = u in the spatial layout, x = u and y = v[o] in the kernel layout.
template <class T, int B>
struct BackwardFine {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using Index = IndexVec<T, B>;
  static constexpr int L = kLanes<T, B>;
  static constexpr bool kTakes = spreads(B) && !std::is_same_v<T, double>;

  // `count` numbers, up to L, zeros behind them.
  FF_INLINE static void some(const T* from, int64_t count, C* to) {
    if (count == L) return store<B>(to, load<B>(from));
    for (int64_t lane = 0; lane < L; ++lane) to[lane] = lane < count ? to_compute(from[lane]) : C(0);
  }

  // So many sums, from p on, to dx, or to what dx_sum holds; null: nowhere.
  FF_INLINE static void give(V sum, int64_t p, int64_t count, T* dx, C* dx_sum) {
    if (count == L) {
      if (dx_sum) store<B>(dx_sum + p, load<B>(dx_sum + p) + sum);
      if (dx) store<B>(dx + p, sum);
      return;
    }
    for (int64_t lane = 0; lane < count; ++lane) {
      if (dx_sum) dx_sum[p + lane] += sum[lane];
      if (dx) dx[p + lane] = from_compute<T>(sum[lane]);
    }
  }

  // For first ≤ p < last: dx[p] = Σ_q g[p, q] y[q], written to `dx` or added to `dx_sum` if one is given, and
  // y_sums += the lanes of Σ_p g[p, q] x[p], even and odd p apart. NV registers hold q elements (0: any number); y is
  // padded with zeros to whole registers; `left` elements of g may be read.
  template <int NV>
  FF_INLINE static void sums(const T* g, int64_t left, int64_t q, int64_t first, int64_t last, const T* x, const C* y,
                             V* y_sums, T* buffer, T* dx, C* dx_sum) {
    const int nv = NV ? NV : int(ceil_div(q, L));
    Index valid;
    for (int lane = 0; lane < L; ++lane) valid[lane] = lane < q - (nv - 1) * L ? -1 : 0;
    for (int64_t p = first; p < last; p += L) {
      const int64_t count = std::min<int64_t>(L, last - p);
      const T* rows = g + p * q;
      C xs[L];
      some(x + p, count, xs);
      if (count < L || (p + L - 1) * q + nv * L > left) {
        std::memcpy(buffer, rows, count * q * sizeof(T));
        std::memset(static_cast<void*>(buffer + count * q), 0, ((L - count) * q + nv * L) * sizeof(T));
        rows = buffer;
      }
      V kept[NV ? 2 * NV : 1];
      if constexpr (NV > 0) std::memcpy(kept, y_sums, sizeof(kept));
      auto row = [&](int lane) __attribute__((always_inline)) {
        V z{};
        for (int n = 0; n < nv; ++n) {
          V part = load<B>(rows + lane * q + n * L);
          (NV ? kept : y_sums)[2 * n + lane % 2] += part * xs[lane];
          part *= load<B>(y + n * L);
          if (n == nv - 1) part = (V)((Index)part & valid);
          z += part;
        }
        return z;
      };
      V sum = sums_of_rows<L, V>(row, 0);
      if constexpr (NV > 0) std::memcpy(y_sums, kept, sizeof(kept));
      give(sum, p, count, dx, dx_sum);
    }
  }

  // The same for q = Q, which is odd: L p's are Q registers, parted into columns. y_sums [Q]. The values' gradient is
  // taken from them, too, where there are `values`.
  template <int Q>
  FF_INLINE static void sums_of_columns(const T* g, int64_t first, int64_t last, const T* x, const C* y, V* y_sums,
                                        T* dx, C* dx_sum, [[maybe_unused]] ValuesTo<T, B>* values) {
    outline<B>([&]() FF_INLINE_LAMBDA {
      V kept[Q];
      std::memcpy(kept, y_sums, sizeof(kept));
      T padded[Q * L];
      for (int64_t p = first; p < last; p += L) {
        const int64_t count = std::min<int64_t>(L, last - p);
        const T* from = g + p * Q;
        C along[L];
        some(x + p, count, along);
        if (count < L) {
          std::memset(static_cast<void*>(padded), 0, sizeof(padded));
          std::memcpy(static_cast<void*>(padded), from, count * Q * sizeof(T));
          from = padded;
        }
        V z[Q], part[3]{};
#pragma GCC unroll 32
        for (int j = 0; j < Q; ++j) {
          __builtin_prefetch(from + kAhead + j * L);
          z[j] = in_register(load<B>(from + j * L));
        }
        if constexpr (kTakes) {
          if (values) values->put(z);
        }
        Columns<Q, L>::part(z);
        const V a = load<B>(along);
#pragma GCC unroll 32
        for (int j = 0; j < Q; ++j) {
          part[j % 3] += z[j] * y[j];
          kept[j] += z[j] * a;
        }
        give(part[0] + part[1] + part[2], p, count, dx, dx_sum);
      }
      std::memcpy(y_sums, kept, sizeof(kept));
    });
  }

  FF_INLINE static void run(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const T*, C* partial,
                            int64_t begin, int64_t end, const Supports* supports) {
    const int64_t q = plan.q, nv = ceil_div(q, L), rank = op.rank, un = plan.u_numel, vn = plan.v_numel;
    const bool u_is_x = plan.u_is_x, few = has_columns(q);
    const int64_t y_size = nv * L, sums_size = few ? q : 2 * nv;  // of one rank
    const Scratch<V> y_sums(rank * sums_size);
    const Scratch<C> y(rank * y_size);
    const Scratch<T> buffer((q + nv) * L);
    for (int64_t item = begin; item < end; ++item) {
      const ChunkOf<T> c(op, plan, chunks, nullptr, partial, item);
      if (u_is_x) std::fill(c.du, c.du + rank * un, C(0));
      for (int64_t o = u_is_x ? c.first : 0; o < (u_is_x ? c.last : 1); ++o) {
        for (int64_t j = 0; j < rank * sums_size; ++j) y_sums.get()[j] = V{};
        for (int64_t r = 0; r < rank; ++r) {
          const T* from = u_is_x ? c.v + r * vn + o * q : c.u + r * un;
          for (int64_t j = 0; j < y_size; ++j) {
            y.get()[r * y_size + j] = j < q ? to_compute(from[j]) : C(0);
          }
        }
        const T* g = c.g + o * plan.p * q;
        std::optional<ValuesTo<T, B>> values;
        if constexpr (kTakes) {
          if (supports) {
            const Bits& bits = *supports->at(c.k);
            const int64_t from = (o * plan.p + (u_is_x ? 0 : c.first)) * q,
                          to = (o * plan.p + (u_is_x ? plan.p : c.last)) * q;
            T* const all = static_cast<T*>(op.dvalues) + c.k * op.support.count;
            values.emplace(bits, all, all + bits.before_position(to), from);
          }
        }
        const int64_t left = op.size.numel() - o * plan.p * q, last = u_is_x ? plan.p : c.last;
        for (int64_t p = u_is_x ? 0 : c.first; p < last; p += kGroup) {
          const int64_t stop = std::min(last, p + kGroup);
          for (int64_t r = 0; r < rank; ++r) {
            const T* x = u_is_x ? c.u + r * un : c.v + r * vn;
            T* dx = u_is_x || !c.dv ? nullptr : c.dv + r * vn;
            C* dx_sum = u_is_x ? c.du + r * un : nullptr;
            const C* y_r = y.get() + r * y_size;
            V* sums_r = y_sums.get() + r * sums_size;
            auto* const taken = r == 0 && values ? &*values : nullptr;
            if (with_columns(q, [&](auto columns) FF_INLINE_LAMBDA {
                  sums_of_columns<columns.value>(g, p, stop, x, y_r, sums_r, dx, dx_sum, taken);
                })) {
            } else if (nv == 1) {
              sums<1>(g, left, q, p, stop, x, y_r, sums_r, buffer.get(), dx, dx_sum);
            } else if (nv == 2) {
              sums<2>(g, left, q, p, stop, x, y_r, sums_r, buffer.get(), dx, dx_sum);
            } else {
              sums<0>(g, left, q, p, stop, x, y_r, sums_r, buffer.get(), dx, dx_sum);
            }
          }
        }
        for (int64_t r = 0; r < rank; ++r) {
          for (int64_t j = 0; j < q; ++j) {
            const V* at = y_sums.get() + r * sums_size;
            C sum = 0;
            if (few) {
              sum = sum_lanes(at[j]);
            } else {
              sum = at[j / L * 2][j % L] + at[j / L * 2 + 1][j % L];
            }
            if (!u_is_x) {
              c.du[r * un + j] = sum;
            } else if (c.dv) {
              c.dv[r * vn + o * q + j] = from_compute<T>(sum);
            }
          }
        }
      }
    }
  }
};

template <class Op>
Chunks make_chunks(const Op& op, const Plan& plan) {
  int64_t units = op.size.o, align = 1, least = 1;
  if (are_alike(op) && plan.kind == Plan::kRows) {
    align = 8, least = 2 * op.rank;  // the sums of a chunk are no larger than half of its rows
  } else if (op.layout == kSpatial && plan.kind == Plan::kFine && !plan.u_is_x) {
    units = plan.p, align = 64;
  } else if (op.layout == kView || (op.layout == kSpatial && op.size.taps() == 1)) {
    units = plan.columns, align = 64;
  }
  const int64_t wanted = std::clamp<int64_t>(op.size.numel() / kGrain, 1, 16);
  const int64_t per_chunk = ceil_div(std::max(ceil_div(units, wanted), least), align) * align;
  return {units, per_chunk, ceil_div(units, per_chunk)};
}

// du from the sums of its chunks; of all clients, `size` numbers each, those from `begin` to `end`.
template <class T, int B>
struct AddChunks {
  FF_INLINE static void run(const Compute<T>* partial, int64_t count, int64_t size, T* du, int64_t begin, int64_t end) {
    using V = Vec<T, B>;
    constexpr int64_t L = kLanes<T, B>;
    while (begin < end) {
      const int64_t at = begin % size, n = std::min(size - at, end - begin);
      const Compute<T>* const from = partial + begin / size * count * size + at;
      T* const to = du + begin;
      int64_t j = 0;
      for (; j + L <= n; j += L) {
        V sum = load<B>(from + j);
        for (int64_t c = 1; c < count; ++c) sum += load<B>(from + c * size + j);
        store<B>(to + j, sum);
      }
      for (; j < n; ++j) {
        Compute<T> sum = from[j];
        for (int64_t c = 1; c < count; ++c) sum += from[c * size + j];
        to[j] = from_compute<T>(sum);
      }
      begin += n;
    }
  }
};

// The gradient of the values of compact μ, of the positions in one chunk.
template <class T, int B>
struct GatherChunk {
  FF_INLINE static void run(const Rank1Backward& op, const Plan& plan, const Chunks& chunks, const Supports& supports,
                            int64_t item, std::atomic<bool>* valid) {
    const int64_t k = item / chunks.count, first = item % chunks.count * chunks.per_chunk;
    const int64_t last = std::min(chunks.units, first + chunks.per_chunk);
    // A unit of the view layout is a column of its matrix, any other a stretch of memory.
    const int64_t rows = op.layout == kView ? plan.rows : 1, row = op.size.numel() / rows, unit = row / chunks.units;
    T* out = static_cast<T*>(op.dvalues) + k * op.support.count;
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t begin = m * row + first * unit, end = m * row + last * unit;
      const T* g = client<T>(op.grad, k) + begin;
      if constexpr (spreads(B) && !std::is_same_v<T, double>) {
        using By = BySupport<T, B>;
        const Bits* bits = supports.at(k);
        if (bits && !op.channels_last) {
          By::take(*bits, g, begin, end, out);
          continue;
        }
        if (bits) {
          const int64_t output = op.size.i * op.size.taps();
          if (fills_by_columns(op, plan) && with_columns(op.size.taps(), [&](auto taps) FF_INLINE_LAMBDA {
                T* const stop = out + bits->before_position(end);
                outline<B>([&]() FF_INLINE_LAMBDA {
                  for (int64_t o = begin; o < end; o += output)
                    ByColumns<T, B, taps.value>::take(*bits, g + (o - begin), o, op.size.i, out, stop,
                                                      [](auto...) FF_INLINE_LAMBDA {});
                });
              }))
            continue;
          const Scratch<float> some(output + By::kSpare);
          for (int64_t o = begin; o < end; o += output) {
            outline<B>([&]()
                           FF_INLINE_LAMBDA { By::turn_back(g + (o - begin), op.size.i, op.size.taps(), some.get()); });
            By::take(*bits, some.get(), o, o + output, out);
          }
          continue;
        }
      }
      const bool ordered = each_place(op.support, k, op.size, op.channels_last, begin, end,
                                      [&](int64_t j, int64_t place) FF_INLINE_LAMBDA { out[j] = g[place]; });
      if (!ordered) *valid = false;
    }
  }
};

}  // namespace

bool rank1_weight(const Rank1& given, ParallelFor parallel_for) {
  const Rank1 op = normal(given);
  if (op.clients == 0) return true;
  if (op.size.numel() == 0) return op.support.count == 0;
  const Plan plan = make_plan(op);
  const Items items = make_items(op, plan);
  std::atomic<bool> valid{true};
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    const Scratch<T> transposed(plan.transpose_u ? op.clients * op.rank * plan.u_numel : 0);
    if (plan.transpose_u) transpose_u(op.u, op.clients, op.rank, op.size.i, op.size.kh, transposed.get());
    const T* u = plan.transpose_u ? transposed.get() : nullptr;
    auto write = [&](const Mu<T>& mu, int64_t begin, int64_t end) {
      if (plan.kind == Plan::kViewChannelsLast) {
        dispatch<WriteViewChannelsLast, T>(op, plan, mu, u, begin, end);
      } else if (plan.kind == Plan::kFine) {
        dispatch<WriteFine, T>(op, plan, mu, u, begin, end);
      } else {
        dispatch<WriteRows, T>(op, plan, mu, u, begin, end);
      }
    };
    if (op.support.count == 0) {
      parallel(parallel_for, op.clients * items.count, ceil_div(kGrain, items.largest),
               [&](int64_t begin, int64_t end) { write({op.mu, 0}, begin, end); });
      return;
    }
    const Supports supports = find_supports(op, plan, parallel_for);
    if (!supports.valid) {
      valid = false;
      return;
    }
    if (supports.at(0) && plan.kind == Plan::kFine && !op.channels_last) {
      parallel(parallel_for, op.clients * items.count, ceil_div(kGrain, items.largest),
               [&](int64_t begin, int64_t end) { write({op.mu, 0, &supports}, begin, end); });
      return;
    }
    if (supports.at(0) && fills_by_columns(op, plan)) {
      parallel(parallel_for, op.clients * op.size.o, ceil_div(kGrain, op.size.i * op.size.taps()),
               [&](int64_t begin, int64_t end) { dispatch<WriteColumns, T>(op, plan, supports, u, begin, end); });
      return;
    }
    // A tile has whole outputs in channels_last, where the positions of an output are in no order, and as many rows as
    // share what is read along them.
    int64_t together = 1;
    if (op.channels_last) {
      together = items.in_row * (plan.kind == Plan::kRows ? op.size.taps() : 1);
    } else if (plan.kind == Plan::kRows && are_alike(op)) {
      together = PairedRows<64>::kRows;
    }
    const int64_t per_tile = together * std::max<int64_t>(1, kTile / (together * items.largest));
    const int64_t tiles = ceil_div(items.count, per_tile), elements = per_tile * items.largest;
    parallel(parallel_for, op.clients * tiles, ceil_div(kGrain, elements), [&](int64_t begin, int64_t end) {
      constexpr int64_t spare = BySupport<T, 32>::kSpare;
      const Scratch<T> room(elements + 2 * spare);
      T* tile = room.get() + spare;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t k = n / tiles, first = n % tiles * per_tile, last = std::min(items.count, first + per_tile);
        const int64_t at = items.start(first);
        dispatch<FillTile, T>(op, supports.at(k), k, at, items.start(last), tile, &valid);
        write({{tile, 0}, at}, k * items.count + first, k * items.count + last);
      }
    });
  });
  return valid;
}

bool rank1_weight_backward(const Rank1Backward& given, ParallelFor parallel_for) {
  const Rank1Backward op = normal(given);
  const Plan plan = make_plan(op);
  std::atomic<bool> valid{true};
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const int64_t un = plan.u_numel, ranks = op.clients * op.rank;
    if (ranks == 0 || op.size.numel() == 0) {
      if (op.du) std::memset(op.du, 0, ranks * un * sizeof(T));
      if (op.dv) std::memset(op.dv, 0, ranks * plan.v_numel * sizeof(T));
      valid = !op.dvalues || op.support.count == 0 || op.clients == 0;
      return;
    }
    const Chunks chunks = make_chunks(op, plan);
    const bool factors = op.du || op.dv, values = op.dvalues && op.support.count > 0;
    if (!factors && !values) return;
    const Supports supports = values ? find_supports(op, plan, parallel_for) : Supports{};
    if (!supports.valid) {
      valid = false;
      return;
    }
    const Scratch<C> partial(factors ? chunks.count * ranks * un : 0);
    const Scratch<T> transposed(plan.transpose_u ? ranks * un : 0);
    if (plan.transpose_u) transpose_u(op.u, op.clients, op.rank, op.size.i, op.size.kh, transposed.get());
    const T* u = plan.transpose_u ? transposed.get() : nullptr;
    const bool at_once =
        factors && values && supports.at(0) &&
        (op.channels_last ? op.layout == kSpatial && fills_by_columns(op, plan) && op.size.taps() <= kMostAtOnce
                          : plan.kind == Plan::kFine && has_columns(plan.q));
    auto sum = [&](int64_t begin, int64_t end) {
      if (plan.kind == Plan::kFine) {
        dispatch<BackwardFine, T>(op, plan, chunks, u, partial.get(), begin, end, at_once ? &supports : nullptr);
      } else if (op.layout == kLinear || op.layout == kKernel) {
        dispatch<BackwardRows, T>(op, plan, chunks, u, partial.get(), begin, end);
      } else {
        dispatch<BackwardColumns, T>(op, plan, chunks, u, partial.get(), begin, end);
      }
    };
    parallel(parallel_for, op.clients * chunks.count, ceil_div(kGrain * chunks.count, op.size.numel()),
             [&](int64_t begin, int64_t end) {
               if (!values) return sum(begin, end);
               // One chunk at a time, so that it is in cache for both.
               for (int64_t item = begin; item < end; ++item) {
                 if (at_once && op.channels_last) {
                   dispatch<BackwardByColumns, T>(op, plan, chunks, supports, partial.get(), item);
                   continue;
                 }
                 if (factors) sum(item, item + 1);
                 if (!at_once) dispatch<GatherChunk, T>(op, plan, chunks, supports, item, &valid);
               }
             });
    if (!op.du) return;
    if (!plan.transpose_u) {
      parallel(parallel_for, ranks * un, ceil_div(kGrain, chunks.count), [&](int64_t begin, int64_t end) {
        dispatch<AddChunks, T>(partial.get(), chunks.count, op.rank * un, static_cast<T*>(op.du), begin, end);
      });
      return;
    }
    parallel(parallel_for, ranks * un, ceil_div(kGrain, chunks.count), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t k = at / (op.rank * un), n = at % un, within = at % (op.rank * un) - n;
        const int64_t from = n % op.size.kh * op.size.i + n / op.size.kh;
        C sum = 0;
        for (int64_t c = 0; c < chunks.count; ++c) {
          sum += partial.get()[(k * chunks.count + c) * op.rank * un + within + from];
        }
        static_cast<T*>(op.du)[at] = from_compute<T>(sum);
      }
    });
  });
  return valid;
}

}  // namespace fastfact
