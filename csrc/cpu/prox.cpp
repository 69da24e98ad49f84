// SGD with momentum and the soft threshold, over all tensors of a group in one parallel region.
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
struct ThresholdRange {
  FF_INLINE static void run(const Threshold& of, int64_t begin, int64_t end) {
    T* const param = static_cast<T*>(of.param);
    const T* const second = static_cast<const T*>(of.second);
    const T correction = of.correction, scale = of.scale, eps = of.eps;
    for (int64_t j = begin; j < end; ++j) {
      const T by = scale / (std::sqrt(second[j] / correction) + eps), p = param[j];
      // NaN stays NaN.
      param[j] = p - (p > by ? by : p < -by ? -by : p);
    }
  }
};

// Calls body(n, begin, end) for parts of tensors of so many numbers each.
template <class Body>
void over_tensors(int64_t count, const std::vector<int64_t>& ends, ParallelFor parallel_for, const Body& body) {
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

void adam_threshold(const Threshold* parts, int64_t count, ParallelFor parallel_for) {
  std::vector<int64_t> ends(count);
  for (int64_t n = 0, total = 0; n < count; ++n) ends[n] = total += parts[n].numel;
  over_tensors(count, ends, parallel_for, [&](int64_t n, int64_t begin, int64_t end) {
    if (parts[n].type == Type::f64) {
      dispatch<ThresholdRange, double>(parts[n], begin, end);
    } else {
      dispatch<ThresholdRange, float>(parts[n], begin, end);
    }
  });
}

void prox_sgd_step(const ProxSgd& op, const Step* steps, int64_t count, ParallelFor parallel_for) {
  std::vector<int64_t> ends(count);
  for (int64_t n = 0, total = 0; n < count; ++n) ends[n] = total += steps[n].numel;
  over_tensors(count, ends, parallel_for, [&](int64_t n, int64_t begin, int64_t end) {
    with_type(steps[n].type, [&](auto type) { dispatch<StepRange, decltype(type)>(steps[n], op, begin, end); });
  });
}

}  // namespace fastfact
