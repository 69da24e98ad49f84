// Mixing weights from products of keys: exp(epsilon (cos - 1)) where cos >= tau. As the cosine is at most 1 this cannot
// overflow and needs no running maximum, so that tiles can be summed up in any order.
#include <algorithm>
#include <atomic>
#include <vector>

#include "vec.h"

namespace fastfact {
namespace {

// The weights of some rows. T is the type of the weights; the products are int32 where P is.
template <class P>
struct Weights {
  template <class T, int B>
  struct Kernel {
    using V = Vec<T, B>;
    using I = IndexVec<T, B>;
    using Lane = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    static constexpr int L = kLanes<T, B>;

    // `column` and `valid` belong to the columns; `counts` (of the columns) may be null.
    FF_INLINE static void run(const Similarity& op, const T* column, const Lane* valid, Lane* counts, int64_t begin,
                              int64_t end, bool* any) {
      I seen{};
      for (int64_t r = begin; r < end; ++r) {
        void* row = static_cast<char*>(op.tile) + r * op.columns * sizeof(T);
        const int64_t own = r + op.own;
        Lane* counted = counts && (!op.row_valid || op.row_valid[r]) ? counts : nullptr;
        I matches{};
        if (own < 0 || own >= op.columns) {
          span(op, row, T(op.row_inverse[r]), column, valid, counted, 0, op.columns, matches, seen);
        } else {
          span(op, row, T(op.row_inverse[r]), column, valid, counted, 0, own, matches, seen);
          static_cast<T*>(row)[own] = 0;
          span(op, row, T(op.row_inverse[r]), column, valid, counted, own + 1, op.columns, matches, seen);
        }
        if (op.row_counts) op.row_counts[r] -= sum_lanes(matches);
      }
      for (int l = 0; l < L; ++l) *any |= seen[l] != 0;
    }

    FF_INLINE static void span(const Similarity& op, void* row, T inverse, const T* column, const Lane* valid,
                               Lane* counts, int64_t begin, int64_t end, I& matches, I& seen) {
      const T tau = op.tau, epsilon = op.epsilon;
      int64_t c = begin;
      for (; c + L <= end; c += L) step(row, inverse, column, valid, counts, c, tau, epsilon, ~I{}, matches, seen);
      if (c == end) return;
      // The last columns, in copies as long as a register.
      const int64_t n = end - c;
      T cells[L] = {}, others[L] = {};
      Lane usable[L] = {}, counted[L] = {};
      std::memcpy(cells, static_cast<T*>(row) + c, n * sizeof(T));
      std::memcpy(others, column + c, n * sizeof(T));
      if (valid) std::memcpy(usable, valid + c, n * sizeof(T));
      I inside;
      for (int l = 0; l < L; ++l) inside[l] = l < n ? -1 : 0;
      step(cells, inverse, others, valid ? usable : nullptr, counts ? counted : nullptr, 0, tau, epsilon, inside,
           matches, seen);
      std::memcpy(static_cast<T*>(row) + c, cells, n * sizeof(T));
      for (int l = 0; counts && l < n; ++l) counts[c + l] += counted[l];
    }

    FF_INLINE static void step(void* row, T inverse, const T* column, const Lane* valid, Lane* counts, int64_t c, T tau,
                               T epsilon, I inside, I& matches, I& seen) {
      V product;
      if constexpr (std::is_same_v<P, int32_t>) {
        I integers;
        std::memcpy(&integers, static_cast<const P*>(row) + c, B);
        product = __builtin_convertvector(integers, V);
      } else {
        std::memcpy(&product, static_cast<const P*>(row) + c, B);
      }
      V sigma = product * inverse * load<B>(column + c);
      const I matched = (sigma >= tau) & inside;
      sigma = bit_cast<V>(pick<I>(sigma > 1, bit_cast<I>(V{} + 1), bit_cast<I>(sigma)));
      const V x = (sigma - 1) * epsilon;
      // Smaller weights are no normal numbers.
      const V weight = bit_cast<V>(bit_cast<I>(exponential<B>(x)) & (matched & (x > smallest_exponent<T>)));
      std::memcpy(static_cast<T*>(row) + c, &weight, B);
      seen |= matched;
      I mask = matched;
      if (valid) {
        std::memcpy(&mask, valid + c, B);
        mask &= matched;
      }
      matches += mask;
      if (counts) {
        I sum;
        std::memcpy(&sum, counts + c, B);
        sum -= matched;
        std::memcpy(counts + c, &sum, B);
      }
    }
  };
};

template <class P, class T>
bool weights(const Similarity& op, ParallelFor parallel_for) {
  using Lane = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  std::vector<T> column(op.column_inverse, op.column_inverse + op.columns);
  std::vector<Lane> valid;
  if (op.column_valid && op.row_counts) {
    for (int64_t c = 0; c < op.columns; ++c) valid.push_back(op.column_valid[c] ? -1 : 0);
  }
  const int64_t parts = std::min<int64_t>(16, op.rows);
  std::vector<Lane> counts(op.column_counts ? parts * op.columns : 0);
  std::atomic<bool> any = false;
  parallel(parallel_for, parts, ceil_div(parts << 13, op.rows * op.columns), [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      bool some = false;
      dispatch<Weights<P>::template Kernel, T>(op, column.data(), valid.empty() ? nullptr : valid.data(),
                                               counts.empty() ? nullptr : counts.data() + part * op.columns,
                                               part * op.rows / parts, (part + 1) * op.rows / parts, &some);
      if (some) any = true;
    }
  });
  for (size_t at = 0; at < counts.size(); ++at) op.column_counts[at % op.columns] += counts[at];
  return any;
}

template <class P>
struct Norms {
  template <class T, int B>
  struct Kernel {
    FF_INLINE static void run(const P* keys, int64_t n, double* out, int64_t begin, int64_t end) {
      constexpr int L = B / sizeof(double);
      using V = Vec<double, B>;
      for (int64_t r = begin; r < end; ++r) {
        const P* row = keys + r * n;
        V sums[4] = {};
        int64_t j = 0;
        for (; j + 4 * L <= n; j += 4 * L) {
#pragma GCC unroll 4
          for (int u = 0; u < 4; ++u) {
            typename VecOf<P, L * sizeof(P)>::Type narrow;
            std::memcpy(&narrow, row + j + u * L, sizeof(narrow));
            const V x = __builtin_convertvector(narrow, V);
            sums[u] += x * x;
          }
        }
        double sum = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
        for (; j < n; ++j) sum += double(row[j]) * row[j];
        out[r] = sum;
      }
    }
  };
};

template <class P>
void norms(const void* keys, int64_t rows, int64_t n, double* out, ParallelFor parallel_for) {
  parallel(parallel_for, rows, ceil_div(1 << 16, std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
    dispatch<Norms<P>::template Kernel, double>(static_cast<const P*>(keys), n, out, begin, end);
  });
}

}  // namespace

bool similarity_weights(const Similarity& op, ParallelFor parallel_for) {
  if (op.rows == 0 || op.columns == 0) return false;
  if (op.integers) return weights<int32_t, float>(op, parallel_for);
  return op.type == Type::f64 ? weights<double, double>(op, parallel_for) : weights<float, float>(op, parallel_for);
}

void squared_norms(Type type, bool integers, const void* keys, int64_t rows, int64_t n, double* out,
                   ParallelFor parallel_for) {
  if (integers) return norms<int8_t>(keys, rows, n, out, parallel_for);
  return type == Type::f64 ? norms<double>(keys, rows, n, out, parallel_for)
                           : norms<float>(keys, rows, n, out, parallel_for);
}

}  // namespace fastfact
