// W = Σ_r u_r ⊗ v_r + μ, written in one pass over memory.
//
// Two shapes of loop cover all layouts and formats. Where one factor runs along the innermost axis of W, a row of W is
// that factor times a number. Where that axis holds the few taps of a kernel (contiguous W), W is read as [p, q] with
// small q, and a register of p's is spread over the q registers it fills.
//
// Compact μ is made dense a tile at a time, in cache, for the same loops: one by one, or where it is dense enough by
// registers, from its support as bits.
#include "rank1.h"

#include <atomic>

#include "rank1_pairs.h"

namespace fastfact {
namespace {

constexpr int64_t kTile = 8192;  // elements of compact μ made dense at a time

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
  FF_INLINE static void run(const Rank1& op, const WeightPlan& plan, const Mu<T>& mu, const T* u_transposed,
                            int64_t begin, int64_t end) {
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

  FF_INLINE static void run_pairs(const Rank1& op, const WeightPlan& plan, const Mu<T>& mu, int64_t begin,
                                  int64_t end) {
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

// Items are (client, block, group of p's): W[p, q] = Σ_r x[r, p] · y[r, q] + μ[p, q].
template <class T, int B>
struct WriteFine {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using Lane = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  using Index = IndexVec<T, B>;
  static constexpr int L = kLanes<T, B>;

  FF_INLINE static void run(const Rank1& op, const WeightPlan& plan, const Mu<T>& dense, const T*, int64_t begin,
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
  FF_INLINE static void run(const Rank1& op, const WeightPlan& plan, const Mu<T>& dense, const T*, int64_t begin,
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
Items make_items(const Op& op, const WeightPlan& plan) {
  const int64_t output = op.size.i * op.size.taps();
  if (plan.kind == WeightPlan::kViewChannelsLast) return {op.size.o, output, 1, output, 0};
  const bool fine = plan.kind == WeightPlan::kFine;
  const int64_t row = fine ? plan.p * plan.q : plan.columns, step = fine ? kGroup * plan.q : plan.segment;
  const int64_t in_row = ceil_div(row, step);
  return {(fine ? plan.blocks : plan.rows) * in_row, std::min(row, step), in_row, row, step};
}

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
  FF_INLINE static void run(const Rank1& op, const WeightPlan& plan, const Supports& supports, const T* u_transposed,
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
  FF_INLINE static void write(const Rank1& op, const WeightPlan& plan, const Supports& supports, const T* u_transposed,
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

}  // namespace

bool rank1_weight(const Rank1& given, ParallelFor parallel_for) {
  const Rank1 op = normal(given);
  if (op.clients == 0) return true;
  if (op.size.numel() == 0) return op.support.count == 0;
  const WeightPlan plan = make_plan(op);
  const Items items = make_items(op, plan);
  std::atomic<bool> valid{true};
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    const Scratch<T> transposed(plan.transpose_u ? op.clients * op.rank * plan.u_numel : 0);
    if (plan.transpose_u) transpose_u(op.u, op.clients, op.rank, op.size.i, op.size.kh, transposed.get());
    const T* u = plan.transpose_u ? transposed.get() : nullptr;
    auto write = [&](const Mu<T>& mu, int64_t begin, int64_t end) {
      if (plan.kind == WeightPlan::kViewChannelsLast) {
        dispatch<WriteViewChannelsLast, T>(op, plan, mu, u, begin, end);
      } else if (plan.kind == WeightPlan::kFine) {
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
    if (supports.at(0) && plan.kind == WeightPlan::kFine && !op.channels_last) {
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
      together = items.in_row * (plan.kind == WeightPlan::kRows ? op.size.taps() : 1);
    } else if (plan.kind == WeightPlan::kRows && are_alike(op)) {
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

}  // namespace fastfact
