// SGD with momentum and AdamW, each with the soft threshold, over all tensors in one parallel region.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace fastfact {
namespace {

enum Penalty { kNone, kThreshold, kSubgradient };

template <class T, int B>
struct StepRange {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using I = IndexVec<T, B>;
  static constexpr int L = kLanes<T, B>;

  template <int penalty, bool has_momentum>
  FF_INLINE static void step(V& p, V& m, V g, C lr, C momentum, C decay, C l1, bool decays) {
    if (decays) g += decay * p;
    const V sign = (V)((I)(p > 0) & (I)(V{} + 1)) - (V)((I)(p < 0) & (I)(V{} + 1));
    if (penalty == kSubgradient) g += l1 * sign;
    if (has_momentum) m = g = momentum * m + g;
    p -= lr * g;
    if (penalty == kThreshold) {
      // |p| − lr·l1 with the sign of p where that is positive, 0 where it is not; NaN stays NaN.
      const I sign_bit = I{} + std::numeric_limits<std::decay_t<decltype(I{}[0])>>::min();
      const V size = (V)((I)p & ~sign_bit) - l1;
      p = (V)(((I)size | ((I)p & sign_bit)) & ~(I)(size <= 0));
    }
  }

  template <int penalty, bool has_momentum>
  FF_INLINE static void range(const Step& s, const ProxSgd& op, int64_t j, int64_t end) {
    T *param = static_cast<T*>(s.param), *momenta = static_cast<T*>(s.momentum);
    const T* grad = static_cast<const T*>(s.grad);
    const C lr = op.lr, momentum = op.momentum, decay = op.weight_decay;
    const C l1 = penalty == kThreshold ? op.lr * s.l1 : s.l1;
    const bool decays = op.weight_decay != 0;
    for (; j + L <= end; j += L) {
      V p = load<B>(param + j), m = has_momentum ? load<B>(momenta + j) : V{};
      step<penalty, has_momentum>(p, m, load<B>(grad + j), lr, momentum, decay, l1, decays);
      store<B>(param + j, p);
      if (has_momentum) store<B>(momenta + j, m);
    }
    if (j == end) return;
    T rest[3][L] = {};
    const size_t bytes = (end - j) * sizeof(T);
    std::memcpy(rest[0], param + j, bytes);
    std::memcpy(rest[1], grad + j, bytes);
    if (has_momentum) std::memcpy(rest[2], momenta + j, bytes);
    V p = load<B>(rest[0]), m = load<B>(rest[2]);
    step<penalty, has_momentum>(p, m, load<B>(rest[1]), lr, momentum, decay, l1, decays);
    store<B>(rest[0], p);
    store<B>(rest[2], m);
    std::memcpy(param + j, rest[0], bytes);
    if (has_momentum) std::memcpy(momenta + j, rest[2], bytes);
  }

  FF_INLINE static void run(const Step& s, const ProxSgd& op, int64_t begin, int64_t end) {
    const bool momentum = s.momentum != nullptr;
    if (s.l1 == 0) {
      momentum ? range<kNone, true>(s, op, begin, end) : range<kNone, false>(s, op, begin, end);
    } else if (op.proximal) {
      momentum ? range<kThreshold, true>(s, op, begin, end) : range<kThreshold, false>(s, op, begin, end);
    } else {
      momentum ? range<kSubgradient, true>(s, op, begin, end) : range<kSubgradient, false>(s, op, begin, end);
    }
  }
};

template <class T, int B>
struct AdamWRange {
  using C = Compute<T>;
  static constexpr int64_t kMost = 256;  // numbers of half precision at once

  FF_INLINE static void run(const AdamW& of, int64_t begin, int64_t end) {
    T *param = static_cast<T*>(of.param), *first = static_cast<T*>(of.first), *second = static_cast<T*>(of.second);
    const T* const grad = static_cast<const T*>(of.grad);
    if constexpr (std::is_same_v<T, C>) {
      step(of, end - begin, param + begin, grad + begin, first + begin, second + begin);
    } else {
      for (int64_t j = begin; j < end; j += kMost) {
        alignas(64) C p[kMost], g[kMost], m[kMost], v[kMost];
        const int64_t count = std::min(kMost, end - j);
        copy<B>(param + j, count, p), copy<B>(grad + j, count, g), copy<B>(first + j, count, m);
        copy<B>(second + j, count, v);
        step(of, count, p, g, m, v);
        copy<B>(p, count, param + j), copy<B>(m, count, first + j), copy<B>(v, count, second + j);
      }
    }
  }

  FF_INLINE static void step(const AdamW& of, int64_t count, C* __restrict param, const C* __restrict grad,
                             C* __restrict first, C* __restrict second) {
    const C kept = 1 - of.lr * of.weight_decay, beta1 = 1 - of.beta1, beta2 = of.beta2, rest = 1 - of.beta2;
    const C eps = of.eps, length = of.lr / (1 - std::pow(of.beta1, of.step)), l1 = of.lr * of.l1;
    const C scale = std::sqrt(1 - std::pow(of.beta2, of.step));
    for (int64_t j = 0; j < count; ++j) {
      const C g = grad[j], m = first[j] + beta1 * (g - first[j]), v = beta2 * second[j] + rest * g * g;
      const C metric = std::sqrt(v) / scale + eps, by = l1 / metric;
      const C p = param[j] * kept - length * m / metric;
      first[j] = m, second[j] = v;
      // NaN stays NaN.
      param[j] = p - (p > by ? by : p < -by ? -by : p);
    }
  }
};

// Calls body(n, begin, end) for parts of tensors of so many numbers each.
template <class Part, class Body>
void over_tensors(const Part* parts, int64_t count, ParallelFor parallel_for, const Body& body) {
  std::vector<int64_t> ends(count);
  for (int64_t n = 0, total = 0; n < count; ++n) ends[n] = total += parts[n].numel;
  parallel(parallel_for, count ? ends[count - 1] : 0, 16384, [&](int64_t begin, int64_t end) {
    int64_t n = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++n) {
      const int64_t start = n ? ends[n - 1] : 0, stop = std::min(end, ends[n]);
      body(n, begin - start, stop - start);
      begin = stop;
    }
  });
}

}  // namespace

void adamw_step(const AdamW* steps, int64_t count, ParallelFor parallel_for) {
  over_tensors(steps, count, parallel_for, [&](int64_t n, int64_t begin, int64_t end) {
    with_type(steps[n].type, [&](auto type) { dispatch<AdamWRange, decltype(type)>(steps[n], begin, end); });
  });
}

void prox_sgd_step(const ProxSgd& op, const Step* steps, int64_t count, ParallelFor parallel_for) {
  over_tensors(steps, count, parallel_for, [&](int64_t n, int64_t begin, int64_t end) {
    with_type(steps[n].type, [&](auto type) { dispatch<StepRange, decltype(type)>(steps[n], op, begin, end); });
  });
}

}  // namespace fastfact
