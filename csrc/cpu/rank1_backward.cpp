// The gradients of W = Σ_r u_r ⊗ v_r + μ, in one pass over dW, in the shapes of loop of rank1.cpp.
//
// The gradient of v is finished within a part of dW, that of u gathers over all of it: each chunk of dW has a partial
// sum of its own, and the partial sums are added in order. The chunks depend on the shape only, so the result does not
// depend on the threads.
#include <atomic>
#include <optional>

#include "rank1.h"
#include "rank1_pairs.h"
#include "rank1_rows.h"

namespace fastfact {
namespace {

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
  FF_INLINE ChunkOf(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks, const T* u_transposed,
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
  FF_INLINE static void run(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks,
                            const T* u_transposed, Compute<T>* partial, int64_t begin, int64_t end) {
    if (!are_alike(op)) return run_sets(op, plan, chunks, u_transposed, partial, begin, end);
    if constexpr (std::is_same_v<T, BFloat16> && kMultipliesPairs<B>) {
      if (multiplies_pairs()) return run_blocks<PairedRows<B>>(op, plan, chunks, partial, begin, end);
    }
    run_blocks<SingleRows<Compute<T>, B>>(op, plan, chunks, partial, begin, end);
  }

  // Rows that differ in their scale alone.
  template <class Rows>
  FF_INLINE static void run_blocks(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks,
                                   Compute<T>* partial, int64_t begin, int64_t end) {
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
  FF_INLINE static void run_sets(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks,
                                 const T* u_transposed, Compute<T>* partial, int64_t begin, int64_t end) {
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
  FF_INLINE static void run(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks, const T*,
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
  FF_INLINE static void run(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks,
                            const Supports& supports, Compute<T>* partial, int64_t item) {
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
  FF_INLINE static void sum(const Rank1Backward& op, const WeightPlan& plan, const Bits& bits,
                            const ChunkOf<T>& chunk) {
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

  FF_INLINE static void run(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks, const T*, C* partial,
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
Chunks make_chunks(const Op& op, const WeightPlan& plan) {
  int64_t units = op.size.o, align = 1, least = 1;
  if (are_alike(op) && plan.kind == WeightPlan::kRows) {
    align = 8, least = 2 * op.rank;  // the sums of a chunk are no larger than half of its rows
  } else if (op.layout == kSpatial && plan.kind == WeightPlan::kFine && !plan.u_is_x) {
    units = plan.p, align = 64;
  } else if (op.layout == kView || (op.layout == kSpatial && op.size.taps() == 1)) {
    units = plan.columns, align = 64;
  }
  const int64_t wanted = std::clamp<int64_t>(op.size.numel() / kGrain, 1, 16);
  const int64_t per_chunk = ceil_div(std::max(ceil_div(units, wanted), least), align) * align;
  return {units, per_chunk, ceil_div(units, per_chunk)};
}

// The gradient of the values of compact μ, of the positions in one chunk.
template <class T, int B>
struct GatherChunk {
  FF_INLINE static void run(const Rank1Backward& op, const WeightPlan& plan, const Chunks& chunks,
                            const Supports& supports, int64_t item, std::atomic<bool>* valid) {
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

bool rank1_weight_backward(const Rank1Backward& given, ParallelFor parallel_for) {
  const Rank1Backward op = normal(given);
  const WeightPlan plan = make_plan(op);
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
                          : plan.kind == WeightPlan::kFine && has_columns(plan.q));
    auto sum = [&](int64_t begin, int64_t end) {
      if (plan.kind == WeightPlan::kFine) {
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
      const int64_t size = op.rank * un;
      parallel(parallel_for, ranks * un, ceil_div(kGrain, chunks.count), [&](int64_t begin, int64_t end) {
        while (begin < end) {
          const int64_t at = begin % size, n = std::min(size - at, end - begin);
          dispatch<AddChunks, T>(partial.get() + begin / size * chunks.count * size + at, chunks.count, size, n,
                                 static_cast<T*>(op.du) + begin);
          begin += n;
        }
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
