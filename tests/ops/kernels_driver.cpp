// Runs the CPU kernels on random shapes, on buffers of exactly the right size, against plain loops in double precision.
// Usage: kernels_driver SEED ROUNDS. Prints the instruction set and "ok", or the first mismatch.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/factored_conv.h"
#include "../../csrc/cpu/vec.h"

using namespace fastfact;

namespace {

std::mt19937 random_engine;

int64_t pick_int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_engine); }
int64_t one_of(std::initializer_list<int64_t> values) { return values.begin()[pick_int(0, values.size() - 1)]; }

// Threads of its own, so that a sanitizer sees what is shared.
void threads(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  const int64_t parts = std::min<int64_t>(3, ceil_div(n, std::min<int64_t>(grain, 64))), size = ceil_div(n, parts);
  std::vector<std::thread> running;
  for (int64_t begin = 0; begin < n; begin += size) {
    running.emplace_back(body, begin, std::min(n, begin + size), context);
  }
  for (auto& thread : running) thread.join();
}

template <class T>
constexpr double kEpsilon = std::is_same_v<T, double>     ? 1e-15
                            : std::is_same_v<T, float>    ? 5e-7
                            : std::is_same_v<T, BFloat16> ? 8e-3
                                                          : 1e-3;
template <class T>
constexpr Type kType = std::is_same_v<T, double>     ? Type::f64
                       : std::is_same_v<T, float>    ? Type::f32
                       : std::is_same_v<T, BFloat16> ? Type::bf16
                                                     : Type::f16;

// A tensor [clients, numel] that clients may share, and its values in double precision.
template <class T>
struct Input {
  std::vector<T> data;
  int64_t stride;

  Input(int64_t clients, int64_t numel) {
    const bool shared = pick_int(0, 3) == 0;
    stride = shared ? 0 : numel;
    data.resize(shared ? numel : clients * numel);
    std::normal_distribution<float> normal;
    for (T& x : data) x = from_compute<T>(normal(random_engine));
  }
  In in() const { return {data.data(), stride}; }
  double operator()(int64_t k, int64_t at) const { return to_compute(data[k * stride + at]); }
};

template <class T>
std::vector<T> unwritten(int64_t n) {
  return std::vector<T>(n, from_compute<T>(std::numeric_limits<float>::quiet_NaN()));
}

// A sum and the sum of the magnitudes, which bounds its rounding error.
struct Sum {
  double value = 0, magnitude = 0;
  void add(double x) { value += x, magnitude += std::abs(x); }
};

[[noreturn]] void fail(const std::string& what, int64_t at, double got, double wanted) {
  std::printf("%s: element %ld is %g, must be %g\n", what.c_str(), long(at), got, wanted);
  std::exit(1);
}

template <class T>
void compare(const std::string& what, const std::vector<T>& got, const std::vector<Sum>& wanted) {
  for (size_t at = 0; at < got.size(); ++at) {
    const double x = to_compute(got[at]);
    if (!(std::abs(x - wanted[at].value) <= kEpsilon<T> * (wanted[at].magnitude + 1e-3))) {
      fail(what, at, x, wanted[at].value);
    }
  }
}

Size random_size(bool conv) {
  if (!conv) return {pick_int(1, 70), pick_int(1, 90), 1, 1};
  return {pick_int(1, 40), pick_int(1, 50), one_of({1, 2, 3, 5}), one_of({1, 3, 4, 5})};
}

std::string describe(const char* op, const Size& s, int64_t clients, int64_t rank, int layout, bool last) {
  std::string out = op;
  for (int64_t n : {s.o, s.i, s.kh, s.kw, clients, rank, int64_t(layout), int64_t(last)})
    out += " " + std::to_string(n);
  return out;
}

// Element (o, i, y, x) of a weight in memory.
int64_t place(const Size& s, bool last, int64_t o, int64_t i, int64_t y, int64_t x) {
  return last ? ((o * s.kh + y) * s.kw + x) * s.i + i : ((o * s.i + i) * s.kh + y) * s.kw + x;
}

template <class F>
void each(const Size& s, const F& f) {
  for (int64_t o = 0; o < s.o; ++o)
    for (int64_t i = 0; i < s.i; ++i)
      for (int64_t y = 0; y < s.kh; ++y)
        for (int64_t x = 0; x < s.kw; ++x) f(o, i, y, x);
}

template <class T>
void rank1() {
  const int layout = pick_int(kLinear, kView);
  const bool conv = layout != kLinear, last = conv && pick_int(0, 1);
  const Size s = random_size(conv);
  const int64_t k = pick_int(1, 3), rank = pick_int(1, 3), n = s.numel();
  const int64_t un = layout == kLinear ? s.i : layout == kKernel ? s.i * s.kh : s.taps();
  const int64_t vn = layout == kLinear ? s.o : layout == kKernel ? s.o * s.kw : s.o * s.i;
  const Input<T> u(k, rank * un), v(k, rank * vn), mu(k, n);
  auto at = [&](int64_t o, int64_t i, int64_t y, int64_t x) -> std::pair<int64_t, int64_t> {
    if (layout == kLinear) return {i, o};
    if (layout == kKernel) return {i * s.kh + y, o * s.kw + x};
    if (layout == kSpatial) return {y * s.kw + x, o * s.i + i};
    const int64_t flat = place(s, false, o, i, y, x);
    return {flat / (s.o * s.i), flat % (s.o * s.i)};
  };
  const bool has_mu = pick_int(0, 2) > 0, backward_last = last && layout != kView;
  std::vector<T> w = unwritten<T>(k * n), du = unwritten<T>(k * rank * un), dv = unwritten<T>(k * rank * vn);
  std::vector<Sum> w_true(w.size()), du_true(du.size()), dv_true(dv.size());
  for (int64_t c = 0; c < k; ++c) {
    each(s, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
      const auto [a, b] = at(o, i, y, x);
      const int64_t to = place(s, last, o, i, y, x);
      if (has_mu) w_true[c * n + to].add(mu(c, to));
      const double g = mu(c, place(s, backward_last, o, i, y, x));
      for (int64_t r = 0; r < rank; ++r) {
        w_true[c * n + to].add(u(c, r * un + a) * v(c, r * vn + b));
        du_true[(c * rank + r) * un + a].add(g * v(c, r * vn + b));
        dv_true[(c * rank + r) * vn + b].add(g * u(c, r * un + a));
      }
    });
  }
  const In none{nullptr, 0};
  rank1_weight({kType<T>, layout, last, k, rank, s, has_mu ? mu.in() : none, u.in(), v.in(), w.data(), {}}, threads);
  const std::string name = describe("rank1", s, k, rank, layout, last);
  compare(name, w, w_true);
  const bool needs_u = pick_int(0, 3) > 0, needs_v = pick_int(0, 3) > 0;
  rank1_weight_backward({kType<T>,
                         layout,
                         backward_last,
                         k,
                         rank,
                         s,
                         mu.in(),
                         u.in(),
                         v.in(),
                         needs_u ? du.data() : nullptr,
                         needs_v ? dv.data() : nullptr,
                         {},
                         nullptr},
                        threads);
  if (needs_u) compare(name + " du", du, du_true);
  if (needs_v) compare(name + " dv", dv, dv_true);

  const int64_t count = pick_int(0, n);
  std::vector<int32_t> index;
  for (int64_t c = 0; c < k; ++c) {
    std::vector<int32_t> all(n);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_engine);
    std::sort(all.begin(), all.begin() + count);
    index.insert(index.end(), all.begin(), all.begin() + count);
  }
  const Input<T> values(k, count);
  std::vector<T> dvalues = unwritten<T>(k * count);
  std::vector<Sum> dvalues_true(dvalues.size());
  for (int64_t c = 0; c < k; ++c) {
    std::map<int64_t, int64_t> of;
    for (int64_t j = 0; j < count; ++j) of[index[c * count + j]] = j;
    each(s, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
      const int64_t to = place(s, last, o, i, y, x);
      if (has_mu) w_true[c * n + to].add(-mu(c, to));
      if (const auto found = of.find(place(s, false, o, i, y, x)); found != of.end()) {
        w_true[c * n + to].add(values(c, found->second));
        dvalues_true[c * count + found->second].add(mu(c, place(s, backward_last, o, i, y, x)));
      }
    });
  }
  const Support support{{index.data(), k > 1 ? count : 0}, count};
  std::fill(w.begin(), w.end(), unwritten<T>(1)[0]);
  bool valid = rank1_weight(
      {kType<T>, layout, last, k, rank, s, count ? values.in() : none, u.in(), v.in(), w.data(), support}, threads);
  compare(name + " compact", w, w_true);
  valid &=
      rank1_weight_backward({kType<T>, layout, backward_last, k, rank, s, mu.in(), u.in(), v.in(),
                             needs_u ? du.data() : nullptr, needs_v ? dv.data() : nullptr, support, dvalues.data()},
                            threads);
  if (needs_u) compare(name + " compact du", du, du_true);
  if (needs_v) compare(name + " compact dv", dv, dv_true);
  compare(name + " dvalues", dvalues, dvalues_true);
  if (!valid) fail(name + " support", 0, 0, 1);
  if (count < 2) return;
  const int64_t wrong = pick_int(0, k * count - 1);
  index[wrong] = one_of({-1, int(n), 1 << 30, wrong % count ? index[wrong - 1] : index[wrong + 1]});
  if (rank1_weight({kType<T>, layout, last, k, rank, s, values.in(), u.in(), v.in(), w.data(), support}, threads) ||
      rank1_weight_backward({kType<T>, layout, backward_last, k, rank, s, mu.in(), u.in(), v.in(), nullptr, nullptr,
                             support, dvalues.data()},
                            threads)) {
    fail(name + " wrong support", wrong, 1, 0);
  }
}

template <class T>
void lowrank() {
  const int layout = one_of({kView, kSeparable});
  const bool conv = pick_int(0, 3) > 0, last = conv && layout == kSeparable && pick_int(0, 1);
  const Size s = random_size(conv);
  const int64_t k = pick_int(1, 3), rank = one_of({1, 2, 13, 40}), n = s.numel();
  const int64_t rows = (layout == kView ? s.o : s.i) * s.kh, columns = (layout == kView ? s.i : s.o) * s.kw;
  const Input<T> a(k, rank * columns), b(k, rows * rank), sigma(k, n);
  std::vector<T> w = unwritten<T>(k * n), da = unwritten<T>(k * rank * columns), db = unwritten<T>(k * rows * rank);
  std::vector<Sum> w_true(w.size()), da_true(da.size()), db_true(db.size());
  const double scaling = 0.5;
  for (int64_t c = 0; c < k; ++c) {
    each(s, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
      const int64_t flat = place(s, false, o, i, y, x), to = place(s, last, o, i, y, x);
      const int64_t row = layout == kView ? flat / columns : i * s.kh + y;
      const int64_t column = layout == kView ? flat % columns : o * s.kw + x;
      w_true[c * n + to].add(sigma(c, to));
      for (int64_t r = 0; r < rank; ++r) {
        w_true[c * n + to].add(scaling * b(c, row * rank + r) * a(c, r * columns + column));
        da_true[(c * rank + r) * columns + column].add(scaling * b(c, row * rank + r) * sigma(c, to));
        db_true[(c * rows + row) * rank + r].add(scaling * a(c, r * columns + column) * sigma(c, to));
      }
    });
  }
  lowrank_weight({kType<T>, layout, last, k, rank, s, scaling, sigma.in(), a.in(), b.in(), w.data()}, threads);
  const std::string name = describe("lowrank", s, k, rank, layout, last);
  compare(name, w, w_true);
  lowrank_weight_backward(
      {kType<T>, layout, last, k, rank, s, scaling, sigma.in(), a.in(), b.in(), da.data(), db.data()}, threads);
  compare(name + " da", da, da_true);
  compare(name + " db", db, db_true);
  std::vector<T> turned = unwritten<T>(k * rows * rank);
  std::vector<Sum> turned_true(turned.size());
  for (int64_t at = 0; at < k * rank * rows; ++at) {
    const int64_t c = at / (rank * rows), r = at / rows % rank, row = at % rows;
    turned_true[at].add(scaling * b(c, row * rank + r));
  }
  scaled({kType<T>, k, rank, rows, b.in(), 1, rank, scaling, turned.data()}, threads);
  compare(name + " turned", turned, turned_true);
}

template <class T>
void hadamard() {
  const bool conv = pick_int(0, 3) > 0, last = conv && pick_int(0, 1), personalized = pick_int(0, 1);
  const Size s = random_size(conv);
  const int64_t k = pick_int(1, 3), n = s.numel(), width = s.i * s.taps(),
                ranks[2] = {one_of({1, 7, 17}), one_of({2, 16})};
  const Input<T> x[2] = {{k, s.o * ranks[0]}, {k, s.o * ranks[1]}},
                 y[2] = {{k, width * ranks[0]}, {k, width * ranks[1]}};
  const Input<T> grad(k, n);
  std::vector<T> w = unwritten<T>(k * n), dx[2], dy[2];
  std::vector<Sum> w_true(k * n), dx_true[2], dy_true[2];
  for (int p : {0, 1}) {
    dx[p] = unwritten<T>(k * s.o * ranks[p]), dy[p] = unwritten<T>(k * width * ranks[p]);
    dx_true[p].resize(dx[p].size()), dy_true[p].resize(dy[p].size());
  }
  for (int64_t c = 0; c < k; ++c) {
    each(s, [&](int64_t o, int64_t i, int64_t ky, int64_t kx) {
      const int64_t column = place(s, false, 0, i, ky, kx), to = place(s, last, o, i, ky, kx);
      Sum product[2];
      for (int p : {0, 1}) {
        for (int64_t r = 0; r < ranks[p]; ++r) {
          product[p].add(x[p](c, o * ranks[p] + r) * y[p](c, column * ranks[p] + r));
        }
      }
      if (personalized) product[1].add(1);
      w_true[c * n + to] = {product[0].value * product[1].value, product[0].magnitude * product[1].magnitude};
      for (int p : {0, 1}) {
        const double g = grad(c, to);
        for (int64_t r = 0; r < ranks[p]; ++r) {
          const int64_t at_x = o * ranks[p] + r, at_y = column * ranks[p] + r;
          Sum& sum_x = dx_true[p][c * s.o * ranks[p] + at_x];
          Sum& sum_y = dy_true[p][c * width * ranks[p] + at_y];
          sum_x.value += g * product[1 - p].value * y[p](c, at_y);
          sum_x.magnitude += std::abs(g * product[1 - p].magnitude * y[p](c, at_y));
          sum_y.value += g * product[1 - p].value * x[p](c, at_x);
          sum_y.magnitude += std::abs(g * product[1 - p].magnitude * x[p](c, at_x));
        }
      }
    });
  }
  hadamard_weight(
      {kType<T>, last, personalized, k, ranks[0], ranks[1], s, x[0].in(), y[0].in(), x[1].in(), y[1].in(), w.data()},
      threads);
  const std::string name = describe("hadamard", s, k, ranks[0], personalized, last);
  compare(name, w, w_true);
  hadamard_weight_backward({kType<T>, last, personalized, k, ranks[0], ranks[1], s, grad.in(), x[0].in(), y[0].in(),
                            x[1].in(), y[1].in(), dx[0].data(), dy[0].data(), dx[1].data(), dy[1].data()},
                           threads);
  for (int p : {0, 1}) {
    compare(name + " dx", dx[p], dx_true[p]);
    compare(name + " dy", dy[p], dy_true[p]);
  }
}

template <class T>
void prox() {
  const int count = pick_int(0, 12);
  const double momentum = pick_int(0, 1) * 0.9, decay = pick_int(0, 1) * 0.1, lr = 0.1;
  const bool proximal = pick_int(0, 1);
  std::vector<Input<T>> p, g, m;
  std::vector<std::vector<Sum>> p_true, m_true;
  std::vector<Step> steps;
  for (int n = 0; n < count; ++n) {
    const int64_t numel = one_of({0, 1, 5, 16, 33, 1000});
    for (auto* group : {&p, &g, &m}) {
      group->emplace_back(1, numel);
      group->back().stride = numel;
    }
  }
  for (int n = 0; n < count; ++n) {
    const int64_t numel = p[n].data.size();
    const double l1 = pick_int(0, 2) * 0.7;
    p_true.emplace_back(numel), m_true.emplace_back(numel);
    for (int64_t j = 0; j < numel; ++j) {
      double x = p[n](0, j);
      Sum d;
      d.add(g[n](0, j));
      d.add(decay * x);
      if (l1 && !proximal) d.add(l1 * ((x > 0) - (x < 0)));
      if (momentum) d.add(momentum * m[n](0, j));
      const double size = std::abs(x) + lr * (d.magnitude + l1);
      x -= lr * d.value;
      if (l1 && proximal) x = std::copysign(std::max(std::abs(x) - lr * l1, 0.0), x);
      p_true[n][j] = {x, size};
      m_true[n][j] = {momentum ? d.value : m[n](0, j), d.magnitude + 1};
    }
    steps.push_back({kType<T>, numel, p[n].data.data(), g[n].data.data(), momentum ? m[n].data.data() : nullptr, l1});
  }
  prox_sgd_step({lr, momentum, decay, proximal}, steps.data(), count, threads);
  for (int n = 0; n < count; ++n) {
    compare("prox", p[n].data, p_true[n]);
    compare("prox momentum", m[n].data, m_true[n]);
  }
}

template <class T>
void adamw() {
  const int count = pick_int(0, 5), step = pick_int(1, 40);
  const double lr = 0.05, beta1 = 0.9, beta2 = 0.95, eps = 1e-3, decay = pick_int(0, 1) * 0.1;
  std::vector<Input<T>> p, g, m, v;
  std::vector<std::vector<Sum>> wanted[3];
  std::vector<AdamW> steps;
  for (int n = 0; n < count; ++n) {
    const int64_t numel = one_of({0, 1, 5, 16, 33, 300, 1000});
    for (auto* group : {&p, &g, &m, &v}) group->emplace_back(1, numel);
    for (T& x : v.back().data) x = from_compute<T>(std::abs(to_compute(x)) + Compute<T>(0.1));
  }
  for (int n = 0; n < count; ++n) {
    const int64_t numel = p[n].data.size();
    const double l1 = pick_int(0, 1) * 0.7;
    for (auto& of : wanted) of.emplace_back(numel);
    for (int64_t j = 0; j < numel; ++j) {
      const double x = p[n](0, j), d = g[n](0, j);
      const double first = beta1 * m[n](0, j) + (1 - beta1) * d, second = beta2 * v[n](0, j) + (1 - beta2) * d * d;
      const double metric = std::sqrt(second / (1 - std::pow(beta2, step))) + eps, by = lr * l1 / metric;
      const double moved = lr * first / (1 - std::pow(beta1, step)) / metric, y = x * (1 - lr * decay) - moved;
      wanted[0][n][j] = {std::copysign(std::max(std::abs(y) - by, 0.0), y), std::abs(x) + std::abs(moved) + by + 1};
      wanted[1][n][j] = {first, std::abs(d) + std::abs(m[n](0, j)) + 1};
      wanted[2][n][j] = {second, second + 1};
    }
    steps.push_back({kType<T>, numel, p[n].data.data(), g[n].data.data(), m[n].data.data(), v[n].data.data(), lr, beta1,
                     beta2, eps, decay, l1, double(step)});
  }
  adamw_step(steps.data(), count, threads);
  for (int n = 0; n < count; ++n) {
    compare("adamw", p[n].data, wanted[0][n]);
    compare("adamw first", m[n].data, wanted[1][n]);
    compare("adamw second", v[n].data, wanted[2][n]);
  }
}

template <class T>
void sums_of_channels() {
  const int64_t n = one_of({0, 1, 3, 100, 1100}), channels = one_of({0, 1, 5, 16, 33, 130});
  const int64_t plane = n > 3 ? one_of({1, 1, 3}) : one_of({1, 7, 49, 1030});
  const Input<T> x(1, n * channels * plane);
  std::vector<Sum> wanted(channels);
  for (int64_t at = 0; at < n * channels * plane; ++at) wanted[at / plane % channels].add(to_compute(x.data[at]));
  std::vector<T> out = unwritten<T>(channels);
  channel_sums({kType<T>, n, channels, plane, x.data.data(), out.data()}, threads);
  compare("channel sums", out, wanted);
}

template <class T>
void products_of_few_rows() {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    const int64_t n = pick_int(1, 9), i = one_of({1, 2, 7, 64, 300}), o = one_of({1, 3, 5, 15, 16, 17, 130, 300});
    const int64_t row = o + one_of({0, 0, 3});
    const Input<T> x(1, n * i), w(1, (i - 1) * row + o), bias(1, o);
    const bool biased = pick_int(0, 1);
    std::vector<Sum> wanted(n * o);
    for (int64_t at = 0; at < n * o; ++at) {
      if (biased) wanted[at].add(bias.data[at % o]);
      for (int64_t k = 0; k < i; ++k) wanted[at].add(double(x.data[at / o * i + k]) * w.data[k * row + at % o]);
    }
    std::vector<T> y = unwritten<T>(n * o);
    dense_rows({kType<T>, n, i, o, row, x.data.data(), w.data.data(), biased ? bias.data.data() : nullptr, y.data()},
               threads);
    compare("dense rows", y, wanted);
  }
}

template <class T>
void biases() {
  if (!std::is_same_v<T, Compute<T>>) return;
  const int64_t n = one_of({0, 1, 5, 17, 300}), channels = one_of({0, 1, 3, 4, 8, 15, 16, 33});
  Input<T> y(1, n * channels);
  const Input<T> bias(1, channels);
  std::vector<Sum> wanted(n * channels);
  for (int64_t at = 0; at < n * channels; ++at) {
    wanted[at].add(to_compute(y.data[at]));
    wanted[at].add(to_compute(bias.data[at % channels]));
  }
  add_bias({kType<T>, n, channels, bias.data.data(), y.data.data()}, threads);
  compare("bias", y.data, wanted);
}

template <class T>
void products_in_panels() {
  const int64_t n = one_of({0, 1, 5, 12, 30, 300}), i = one_of({1, 2, 7, 64, 514, 1030});
  const int64_t o = one_of({0, 1, 5, 16, 33, 130}), numel = panels_numel(kType<T>, o, i);
  if (numel < 0) return;
  const Input<T> x(1, n * i), w(1, o * i), bias(1, o);
  const bool biased = pick_int(0, 1);
  std::vector<Sum> wanted(n * o);
  for (int64_t at = 0; at < n * o; ++at) {
    if (biased) wanted[at].add(to_compute(bias.data[at % o]));
    for (int64_t k = 0; k < i; ++k) {
      wanted[at].add(double(to_compute(x.data[at / o * i + k])) * to_compute(w.data[at % o * i + k]));
    }
  }
  std::vector<T> panels = unwritten<T>(numel), y = unwritten<T>(n * o);
  pack_panels(kType<T>, o, i, w.data.data(), panels.data(), threads);
  linear_of_panels({kType<T>, n, i, o, x.data.data(), panels.data(), biased ? bias.data.data() : nullptr, y.data(), 2},
                   threads);
  compare("products in panels", y, wanted);
}

// By AMX, or what stands for it, in float.
void dense_convolutions() {
  Conv c{};
  c.groups = 1, c.x_channels_last = c.y_channels_last = true;
  const bool large = pick_int(0, 9) == 0;  // panels in groups, several bands
  c.n = large ? 1 : one_of({1, 3, 9}), c.i = large ? 300 : one_of({24, 30, 64, 70});
  c.o = large ? 130 : one_of({31, 32, 48, 66});
  c.kh = pick_int(1, 3), c.kw = c.kh == 1 ? 3 : pick_int(1, 4);
  for (int d = 0; d < 2; ++d) {
    const int64_t reach = (d ? c.kw : c.kh) - 1;
    c.stride[d] = 1, c.dilation[d] = pick_int(1, 2), c.padding[d] = pick_int(0, int(reach * c.dilation[d]));
    int64_t& side = d ? c.w : c.h;
    side = pick_int(int(reach * c.dilation[d]) + 1, large ? 40 : 20);
    (d ? c.ow : c.oh) = side + 2 * c.padding[d] - reach * c.dilation[d];
  }
  if (!convolves_in_pieces(c, true)) return;
  const int64_t taps = c.kh * c.kw;
  const Input<float> x(1, c.n * c.h * c.w * c.i), w(1, c.o * taps * c.i), bias(1, c.o);
  const Input<float> dy(1, c.n * c.oh * c.ow * c.o);
  const bool biased = pick_int(0, 1), packed = pick_int(0, 1), needs_x = pick_int(0, 3), needs_w = pick_int(0, 3);
  std::vector<Sum> y_true(dy.data.size()), dx_true(x.data.size()), dw_true(w.data.size());
  for (int64_t p = 0; p < c.n * c.oh * c.ow; ++p) {
    for (int64_t o = 0; o < c.o && biased; ++o) y_true[p * c.o + o].add(bias.data[o]);
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t h = p / c.ow % c.oh - c.padding[0] + tap / c.kw * c.dilation[0];
      const int64_t from = p % c.ow - c.padding[1] + tap % c.kw * c.dilation[1];
      if (h < 0 || h >= c.h || from < 0 || from >= c.w) continue;
      const int64_t pixel = ((p / (c.oh * c.ow) * c.h + h) * c.w + from) * c.i;
      for (int64_t o = 0; o < c.o; ++o) {
        for (int64_t i = 0; i < c.i; ++i) {
          const double of_w = w.data[(o * taps + tap) * c.i + i], of_x = x.data[pixel + i],
                       of_dy = dy.data[p * c.o + o];
          y_true[p * c.o + o].add(of_w * of_x);
          dx_true[pixel + i].add(of_w * of_dy);
          dw_true[(o * taps + tap) * c.i + i].add(of_x * of_dy);
        }
      }
    }
  }
  std::vector<float> panels = unwritten<float>(conv_panels_numel(c.o, c.i, taps));
  if (packed) pack_conv_panels(c.o, c.i, taps, w.data.data(), panels.data(), threads);
  auto y = unwritten<float>(y_true.size()), dx = unwritten<float>(dx_true.size()),
       dw = unwritten<float>(dw_true.size());
  dense_conv({c, x.data.data(), packed ? nullptr : w.data.data(), biased ? bias.data.data() : nullptr, y.data(), 2,
              packed ? panels.data() : nullptr},
             threads);
  compare("dense convolution", y, y_true);
  dense_conv_backward({c, x.data.data(), dy.data.data(), w.data.data(), needs_x ? dx.data() : nullptr,
                       needs_w ? dw.data() : nullptr, 2},
                      threads);
  if (needs_x) compare("dense convolution, dx", dx, dx_true);
  if (needs_w) compare("dense convolution, dw", dw, dw_true);
}

template <class T>
void adapters() {
  const bool tall = pick_int(0, 5) == 0;  // more rows than a chunk has
  const int64_t k = tall ? 1 : pick_int(1, 5), n = tall ? one_of({513, 700}) : pick_int(1, 40);
  const int64_t i = one_of({1, 5, 16, 33, 70, 300}), o = tall ? one_of({3, 300, 600}) : one_of({1, 4, 17, 48, 90, 600});
  const int64_t r = one_of({1, 2, 3, 5, 8, 11, 17, 40});
  const bool own = pick_int(0, 1), apart = pick_int(0, 1), turned = pick_int(0, 1);
  const double scaling = 0.7;
  const Input<T> x(k, n * i), seen(k, n * i), a(k, r * i), b(k, o * r), bias(k, o), grad(k, n * o), hidden(k, n * r);
  const Input<T> sigma(pick_int(0, 1) ? k : 1, o * i);
  const int64_t row = turned ? 1 : i, column = turned ? o : 1;
  const Input<T>& in = apart ? seen : x;
  std::vector<Sum> y_true(k * n * o), h_true(k * n * r), dx_true(k * n * i), ds_true(dx_true);
  std::vector<Sum> da_true(k * r * i), db_true(k * o * r);
  auto y = unwritten<T>(k * n * o), h = unwritten<T>(k * n * r), dx = unwritten<T>(k * n * i), ds = dx;
  auto da = unwritten<T>(k * r * i), db = unwritten<T>(k * o * r);
  const In frozen{sigma.data.data(), int64_t(sigma.data.size()) == k * o * i ? o * i : 0};
  for (int64_t c = 0; c < k; ++c) {
    auto weight = [&](int64_t p, int64_t q) {
      return to_compute(sigma.data[c * frozen.client_stride + p * row + q * column]);
    };
    for (int64_t m = 0; m < n; ++m) {
      std::vector<Sum> few(r), back(r);
      for (int64_t f = 0; f < r; ++f) {
        for (int64_t q = 0; q < i; ++q) few[f].add(scaling * in(c, m * i + q) * a(c, f * i + q));
        for (int64_t p = 0; p < o; ++p) back[f].add(scaling * grad(c, m * o + p) * b(c, p * r + f));
        h_true[(c * n + m) * r + f] = few[f];
        for (int64_t q = 0; q < i; ++q) {
          Sum& sum = da_true[(c * r + f) * i + q];
          sum.value += back[f].value * in(c, m * i + q),
              sum.magnitude += back[f].magnitude * std::abs(in(c, m * i + q));
        }
        for (int64_t p = 0; p < o; ++p) db_true[(c * o + p) * r + f].add(grad(c, m * o + p) * hidden(c, m * r + f));
      }
      auto thin = [&](Sum& sum, const Sum& left, double right) {
        sum.value += left.value * right, sum.magnitude += left.magnitude * std::abs(right);
      };
      for (int64_t p = 0; p < o; ++p) {
        Sum& sum = y_true[(c * n + m) * o + p];
        sum.add(bias(c, p));
        for (int64_t q = 0; q < i; ++q) sum.add(x(c, m * i + q) * weight(p, q));
        for (int64_t f = 0; f < r; ++f) thin(sum, few[f], b(c, p * r + f));
      }
      for (int64_t q = 0; q < i; ++q) {
        Sum &sum = dx_true[(c * n + m) * i + q], &part = ds_true[(c * n + m) * i + q];
        for (int64_t p = 0; p < o; ++p) sum.add(grad(c, m * o + p) * weight(p, q));
        for (int64_t f = 0; f < r; ++f) {
          thin(part, back[f], a(c, f * i + q));
          if (!own) thin(sum, back[f], a(c, f * i + q));
        }
      }
    }
  }
  const int64_t threads_there = pick_int(1, 3);
  adapter({kType<T>, k, n, i, o, r, scaling, x.in(), apart ? seen.in() : In{nullptr, 0}, frozen, a.in(), b.in(),
           bias.in(), row, column, y.data(), h.data(), threads_there},
          threads);
  compare("adapter", y, y_true);
  compare("adapter hidden", h, h_true);
  adapter_backward(
      {kType<T>, k,           n,   i,      o,   r,         scaling,   grad.in(), in.in(),   frozen,       a.in(),
       b.in(),   hidden.in(), row, column, own, dx.data(), ds.data(), da.data(), db.data(), threads_there},
      threads);
  compare("adapter dx", dx, dx_true);
  compare("adapter dseen", ds, ds_true);
  compare("adapter da", da, da_true);
  compare("adapter db", db, db_true);
  auto again = unwritten<T>(k * r * i);
  adapter_backward(
      {kType<T>, k,           n,   i,      o,   r,       scaling, grad.in(),    in.in(), frozen,           a.in(),
       b.in(),   hidden.in(), row, column, own, nullptr, nullptr, again.data(), nullptr, threads_there + 1},
      threads);
  for (size_t at = 0; at < da.size(); ++at) {
    const double got = to_compute(again[at]), wanted = to_compute(da[at]);
    if (got != wanted) fail("adapter da by other threads", at, got, wanted);
  }
}

// Queries, keys and values in one buffer where they are as many.
template <class T>
void attentions() {
  const int64_t k = pick_int(1, 2), n = pick_int(1, 2), h = pick_int(1, 3), d = one_of({1, 3, 8, 16, 20, 32});
  const int64_t l = one_of({1, 2, 5, 17, 50, 100}), m = pick_int(0, 1) ? l : one_of({1, 8, 9, 18, 33, 60});
  const bool causal = pick_int(0, 1), masks = pick_int(0, 1), together = l == m;
  const double scale = 0.4;
  const int64_t most = std::max(l, m), parts = together ? 3 : 1, row = parts * h * d, size = k * n * most * row;
  std::normal_distribution<float> normal;
  auto fill = [&](int64_t numel) {
    std::vector<T> data(numel);
    for (T& x : data) x = from_compute<T>(normal(random_engine));
    return data;
  };
  // [clients, samples, rows, heads, depth] or, of what lies together, [clients, samples, rows, 3, heads, depth]
  auto heads = [&](std::vector<T>& data, int64_t rows, int64_t step, int64_t at) {
    return Heads{data.data() + at, n * rows * step, rows * step, d, step};
  };
  auto q = fill(together ? size : k * n * l * row), keys = fill(k * n * m * row), values = fill(k * n * m * row);
  auto grad = fill(k * n * l * h * d), mask = fill(l * m);
  if (masks) mask[0] = from_compute<T>(-std::numeric_limits<float>::infinity());
  auto out = unwritten<T>(grad.size()), sums = unwritten<T>(k * n * h * l), dq = unwritten<T>(q.size());
  auto dk = unwritten<T>(keys.size()), dv = unwritten<T>(values.size());
  Attention op{kType<T>, k, n, h, l, m, d, causal, scale, heads(q, l, row, 0)};
  op.k = together ? heads(q, l, row, h * d) : heads(keys, m, row, 0);
  op.v = together ? heads(q, l, row, 2 * h * d) : heads(values, m, row, 0);
  op.mask = {masks ? mask.data() : nullptr, 0, 0, 0, m}, op.mask_column = 1;
  op.out = heads(out, l, h * d, 0), op.sums = sums.data();
  auto shown = unwritten<T>(pick_int(0, 1) ? sums.size() * m : 0);
  if (!shown.empty()) op.weights = shown.data();
  AttentionGradients to{heads(grad, l, h * d, 0), heads(dq, l, row, 0), heads(dk, m, row, 0), heads(dv, m, row, 0)};
  if (together) to.dk = heads(dq, l, row, h * d), to.dv = heads(dq, l, row, 2 * h * d);
  attention(op, threads);

  auto value = [&](const Heads& of, int64_t c, int64_t s, int64_t head, int64_t at, int64_t e) {
    return double(
        to_compute(static_cast<T*>(of.data)[c * of.client + s * of.sample + head * of.head + at * of.row + e]));
  };
  auto place = [&](const Heads& of, const std::vector<T>& data, int64_t c, int64_t s, int64_t head, int64_t at) {
    return static_cast<T*>(of.data) - data.data() + c * of.client + s * of.sample + head * of.head + at * of.row;
  };
  std::vector<Sum> out_true(out.size()), sums_true(sums.size()), dq_true(dq.size()), dk_true(dk.size()),
      dv_true(dv.size()), shown_true(shown.size());
  auto &dk_of = together ? dq_true : dk_true, &dv_of = together ? dq_true : dv_true;
  const auto &dk_in = together ? dq : dk, &dv_in = together ? dq : dv;
  auto add = [](Sum& sum, double x, double magnitude) { sum.value += x, sum.magnitude += magnitude; };
  for (int64_t at = 0; at < k * n * h; ++at) {
    const int64_t c = at / (n * h), s = at / h % n, head = at % h;
    for (int64_t i = 0; i < l; ++i) {
      std::vector<Sum> scores(m);
      double most = -std::numeric_limits<double>::infinity(), large = 0, sum = 0;
      for (int64_t j = 0; j < m; ++j) {
        for (int64_t e = 0; e < d; ++e)
          scores[j].add(scale * value(op.q, c, s, head, i, e) * value(op.k, c, s, head, j, e));
        const double added = causal && j > i ? -std::numeric_limits<double>::infinity()
                             : masks         ? to_compute(mask[i * m + j])
                                             : 0;
        scores[j].value += added, scores[j].magnitude += std::isinf(added) ? 0 : std::abs(added);
        most = std::max(most, scores[j].value), large = std::max(large, scores[j].magnitude);
      }
      for (int64_t j = 0; j < m; ++j) sum += std::isinf(most) ? 0 : std::exp(scores[j].value - most);
      const double log = sum ? most + std::log(sum) : 0;
      large += 1 + std::abs(log);
      add(sums_true[at * l + i], log, large);
      std::vector<double> weight(m);
      double mean = 0, means = 0;
      for (int64_t j = 0; j < m; ++j) {
        weight[j] = std::exp(scores[j].value - log);
        if (!shown.empty()) add(shown_true[(at * l + i) * m + j], weight[j], weight[j] * large);
        for (int64_t e = 0; e < d; ++e) {
          const double x = value(op.v, c, s, head, j, e), g = value(to.grad, c, s, head, i, e);
          add(out_true[place(op.out, out, c, s, head, i) + e], weight[j] * x, weight[j] * std::abs(x) * large);
          mean += g * weight[j] * x, means += std::abs(g * weight[j] * x);
        }
      }
      for (int64_t j = 0; j < m; ++j) {
        Sum change;
        for (int64_t e = 0; e < d; ++e) {
          const double g = value(to.grad, c, s, head, i, e);
          change.add(g * value(op.v, c, s, head, j, e));
          add(dv_of[place(to.dv, dv_in, c, s, head, j) + e], weight[j] * g, weight[j] * std::abs(g) * large);
        }
        const double x = scale * weight[j] * (change.value - mean);
        const double magnitude = scale * weight[j] * (change.magnitude + means) * large;
        for (int64_t e = 0; e < d; ++e) {
          const double a = value(op.k, c, s, head, j, e), b = value(op.q, c, s, head, i, e);
          add(dq_true[place(to.dq, dq, c, s, head, i) + e], x * a, magnitude * std::abs(a));
          add(dk_of[place(to.dk, dk_in, c, s, head, j) + e], x * b, magnitude * std::abs(b));
        }
      }
    }
  }
  compare("attention", out, out_true);
  compare("attention sums", sums, sums_true);
  compare("attention weights", shown, shown_true);
  attention_backward(op, to, threads);
  compare("attention dq", dq, dq_true);
  if (!together) compare("attention dk", dk, dk_true), compare("attention dv", dv, dv_true);
}

template <class T>
void products_with_rows() {
  const int64_t k = pick_int(1, 3), batch = pick_int(1, 12), outputs = pick_int(1, 22), width = one_of({1, 7, 33, 600});
  std::vector<Input<T>> samples;
  std::vector<const void*> data;
  std::vector<int64_t> index, labels;
  for (int64_t c = 0; c < k; ++c) {
    const int64_t there = pick_int(1, 9);
    samples.emplace_back(1, there * width);
    for (int64_t n = 0; n < batch; ++n)
      index.push_back(pick_int(0, there - 1)), labels.push_back(pick_int(0, outputs - 1));
  }
  for (const auto& some : samples) data.push_back(some.data.data());
  const SampleRows rows{k, batch, width, data.data(), index.data(), batch};
  const Input<T> weight(k, outputs * width), grad(k, batch * outputs);
  std::vector<Sum> y_true(k * batch * outputs), dw_true(k * outputs * width), gathered_true(k * batch * width);
  for (int64_t c = 0; c < k; ++c) {
    for (int64_t n = 0; n < batch; ++n) {
      for (int64_t i = 0; i < width; ++i) {
        const double x = to_compute(samples[c].data[index[c * batch + n] * width + i]);
        gathered_true[(c * batch + n) * width + i].add(x);
        for (int64_t o = 0; o < outputs; ++o) {
          y_true[(c * batch + n) * outputs + o].add(x * weight(c, o * width + i));
          dw_true[(c * outputs + o) * width + i].add(x * grad(c, n * outputs + o));
        }
      }
    }
  }
  auto gathered = unwritten<T>(k * batch * width), y = unwritten<T>(k * batch * outputs);
  auto dw = unwritten<T>(k * outputs * width), losses = unwritten<T>(k), dlogits = unwritten<T>(k * batch * outputs);
  gather_rows(rows, width * sizeof(T), gathered.data(), threads);
  compare("gather_rows", gathered, gathered_true);
  rows_linear(rows, kType<T>, weight.in(), outputs, y.data(), threads);
  compare("rows_linear", y, y_true);
  rows_linear_backward(rows, kType<T>, grad.in(), outputs, dw.data(), threads);
  compare("rows_linear_backward", dw, dw_true);
  const Input<T> logits(1, k * batch * outputs);
  softmax_loss({kType<T>, k, batch, outputs, logits.data.data(), labels.data(), losses.data(), dlogits.data()},
               threads);
  std::vector<Sum> losses_true(k), dlogits_true(k * batch * outputs);
  for (int64_t n = 0; n < k * batch; ++n) {
    double sum = 0;
    for (int64_t o = 0; o < outputs; ++o) sum += std::exp(logits(0, n * outputs + o));
    losses_true[n / batch].add(std::log(sum) / batch);
    losses_true[n / batch].add(-logits(0, n * outputs + labels[n]) / batch);
    for (int64_t o = 0; o < outputs; ++o) {
      dlogits_true[n * outputs + o].add(std::exp(logits(0, n * outputs + o)) / sum / batch);
      dlogits_true[n * outputs + o].add(o == labels[n] ? -1.0 / batch : 0);
    }
  }
  compare("softmax_loss", losses, losses_true);
  compare("softmax_loss gradient", dlogits, dlogits_true);
  auto joint_losses = unwritten<T>(k), joint_grad = unwritten<T>(k * batch * outputs);
  auto joint_dw = unwritten<T>(k * outputs * width);
  const SoftmaxLoss loss{kType<T>, k, batch, outputs, nullptr, labels.data(), joint_losses.data(), joint_grad.data()};
  rows_softmax_loss(rows, loss, weight.in(), {}, joint_dw.data(), pick_int(1, 3), threads);
  softmax_loss({kType<T>, k, batch, outputs, y.data(), labels.data(), losses.data(), dlogits.data()}, threads);
  rows_linear_backward(rows, kType<T>, {dlogits.data(), batch * outputs}, outputs, dw.data(), threads);
  for (int64_t c = 0; c < k; ++c) {
    const double got = to_compute(joint_losses[c]), wanted = to_compute(losses[c]);
    if (got != wanted) fail("rows_softmax_loss", c, got, wanted);
  }
  for (size_t at = 0; at < dw.size(); ++at) {
    const double got = to_compute(joint_dw[at]), wanted = to_compute(dw[at]);
    if (got != wanted) fail("rows_softmax_loss dw", at, got, wanted);
  }
}

template <class T, class V>
void bitmap(Value type) {
  const int64_t rows = pick_int(0, 4), n = one_of({0, 1, 7, 8, 63, 64, 65, 700, 8192, 20001});
  const int64_t bytes = ceil_div(n, 8), density = pick_int(0, 4);
  Input<T> x(1, rows * n);
  for (T& element : x.data) {
    if (pick_int(0, 3) >= density) element = from_compute<T>(0);
  }
  std::vector<uint8_t> bits(rows * bytes, 0xaa);
  std::vector<int64_t> offsets(rows * bitmap_chunks(n) + 1, -1), counted(offsets);
  std::vector<float> scale(rows), back(rows * n, NAN);
  pack_bits(kType<T>, x.data.data(), rows, n, bits.data(), offsets.data(), threads);
  std::vector<V> values(offsets.back());
  const bool scaled = type == Value::i8;
  pack_values(kType<T>, x.data.data(), rows, n, bits.data(), offsets.data(), type, values.data(),
              scaled ? scale.data() : nullptr, threads);
  count_bits(bits.data(), rows, n, counted.data(), threads);
  if (counted != offsets) fail("count_bits", 0, counted.back(), offsets.back());
  unpack_values(bits.data(), offsets.data(), rows, n, type, values.data(), scaled ? scale.data() : nullptr, back.data(),
                threads);
  const double tolerance = scaled ? 0.02 : type == Value::bf16 ? 8e-3 : 1e-7;
  for (int64_t at = 0; at < rows * n; ++at) {
    const double wanted = x(0, at);
    if ((bits[at / n * bytes + at % n / 8] >> (at % n % 8) & 1) != (wanted != 0)) fail("bits", at, 0, wanted);
    if (!(std::abs(back[at] - wanted) <= tolerance * (scaled ? 5 : std::abs(wanted))))
      fail("bitmap", at, back[at], wanted);
  }
}

template <class T>
void similarity() {
  constexpr bool kHalf = sizeof(T) == 2;  // stands for int8 keys: their products are int32
  using C = Compute<T>;
  const int64_t rows = pick_int(0, 40), columns = pick_int(0, 90), own = pick_int(-60, 60);
  const double epsilon = one_of({0, 1, 20}), tau = one_of({-1, 0, 1}) * 0.5;
  std::vector<C> tile(rows * columns);
  std::vector<double> row_inverse(rows), column_inverse(columns), wanted(rows * columns);
  std::vector<uint8_t> row_valid(rows), column_valid(columns);
  for (double& x : row_inverse) x = pick_int(0, 9) / 300.0;
  for (double& x : column_inverse) x = pick_int(1, 9) / 300.0;
  for (uint8_t& x : row_valid) x = pick_int(0, 1);
  for (uint8_t& x : column_valid) x = pick_int(0, 1);
  std::vector<int64_t> row_counts(rows, 5), column_counts(columns, 7), rows_true(row_counts),
      columns_true(column_counts);
  const bool masked = pick_int(0, 1), mirrored = pick_int(0, 1);
  bool any = false;
  for (int64_t at = 0; at < rows * columns; ++at) {
    const int64_t r = at / columns, c = at % columns;
    int32_t product = pick_int(-1000, 1000);
    double cosine = product * row_inverse[r] * column_inverse[c];
    // so near to tau rounding would decide; 0 is exact
    if (std::abs(cosine - tau) < 1e-5) product = 0, cosine = 0;
    if (kHalf) {
      std::memcpy(&tile[at], &product, 4);
    } else {
      tile[at] = product;
    }
    const bool matched = r + own != c && cosine >= tau;
    wanted[at] = matched ? std::exp(epsilon * (std::min(cosine, 1.0) - 1)) : 0;
    any = any || matched;
    rows_true[r] += matched && (!masked || column_valid[c]);
    columns_true[c] += mirrored && matched && (!masked || row_valid[r]);
  }
  const bool some = similarity_weights(
      {kHalf ? Type::f32 : kType<T>, kHalf, rows, columns, tile.data(), row_inverse.data(), column_inverse.data(), own,
       epsilon, tau, masked ? row_valid.data() : nullptr, masked ? column_valid.data() : nullptr, row_counts.data(),
       mirrored ? column_counts.data() : nullptr},
      threads);
  if (some != any) fail("similarity any", 0, some, any);
  for (int64_t at = 0; at < rows * columns; ++at) {
    if (!(std::abs(tile[at] - wanted[at]) <= 1e-5)) fail("similarity", at, tile[at], wanted[at]);
  }
  if (row_counts != rows_true || column_counts != columns_true) fail("similarity counts", 0, 0, 0);
}

template <class T>
void sketch() {
  const int64_t clients = pick_int(0, 4), n = one_of({1, 2, 7, 16, 70, 2048, 5000}), m = pick_int(1, 40);
  int64_t points = 1;
  while (points < n) points *= 2;
  Input<T> x(1, clients * n);
  std::vector<int8_t> signs(n), integers(clients * m);
  std::vector<int64_t> rows(m);
  for (int8_t& sign : signs) sign = pick_int(0, 1) ? 1 : -1;
  for (int64_t& row : rows) row = pick_int(0, points - 1);
  std::vector<Compute<T>> out(clients * m, NAN);
  std::vector<float> scale(clients, NAN);
  std::vector<Sum> wanted(clients * m);
  for (int64_t at = 0; at < clients * m; ++at) {
    for (int64_t j = 0; j < n; ++j) {
      const double sign = __builtin_popcountll(rows[at % m] & j) % 2 ? -1 : 1;
      wanted[at].add(sign * signs[j] * x(0, at / m * n + j) / std::sqrt(double(m)));
    }
  }
  srht({kType<T>, clients, n, m, x.data.data(), signs.data(), rows.data(), out.data(), nullptr}, threads);
  compare("srht", out, wanted);
  srht({kType<T>, clients, n, m, x.data.data(), signs.data(), rows.data(), integers.data(), scale.data()}, threads);
  for (int64_t at = 0; at < clients * m; ++at) {
    const double step = scale[at / m], got = integers[at] * step;
    if (!(std::abs(got - wanted[at].value) <= 0.51 * step + 1e-5)) fail("srht int8", at, got, wanted[at].value);
  }
}

void digests() {
  std::vector<char> bytes(one_of({0, 1, 7, 255, 256, 257, 4096, 65535, 65536, 65537, 200000}));
  for (char& byte : bytes) byte = pick_int(-128, 127);
  const uint64_t seed = pick_int(0, 1 << 30), all = digest(bytes.data(), bytes.size(), seed, threads);
  if (digest(std::vector<char>(bytes).data(), bytes.size(), seed, threads) != all) fail("digest of a copy", 0, 0, 0);
  if (digest(bytes.data(), bytes.size(), seed + 1, threads) == all) fail("digest by another seed", 0, 0, 0);
  for (int n = 0; n < 8 && !bytes.empty(); ++n) {
    const int64_t at = n ? pick_int(0, bytes.size() - 1) : bytes.size() - 1;
    const char bit = 1 << pick_int(0, 7);
    bytes[at] ^= bit;
    if (digest(bytes.data(), bytes.size(), seed, threads) == all) fail("digest of a change", at, 0, 0);
    bytes[at] ^= bit;
  }
  if (!bytes.empty() && digest(bytes.data(), bytes.size() - 1, seed, threads) == all) fail("digest of less", 0, 0, 0);
  const int64_t part = bytes.empty() ? 0 : pick_int(0, bytes.size() - 1);
  const Stretch parts[] = {{bytes.data(), part}, {bytes.data() + part, int64_t(bytes.size()) - part}};
  const uint64_t both = digest(parts, 2, seed, threads);
  if (digest(parts, 2, seed + 1, threads) == both) fail("digest of parts by another seed", 0, 0, 0);
  for (int n = 0; n < 4 && !bytes.empty(); ++n) {
    const int64_t at = pick_int(0, bytes.size() - 1);
    bytes[at] ^= 1;
    if (digest(parts, 2, seed, threads) == both) fail("digest of a change of a part", at, 0, 0);
    bytes[at] ^= 1;
  }
  if (digest(parts, 2, seed, threads) != both) fail("digest of the same parts", 0, 0, 0);
  if (!hold(bytes.data(), bytes.size(), threads)) return;
  hold(bytes.data(), bytes.size(), threads);
  release(bytes.data(), bytes.size());
  if (digest(bytes.data(), bytes.size(), seed, threads) != all) fail("digest of what is held", 0, 0, 0);
  bytes[0] ^= 1;
  if (digest(bytes.data(), bytes.size() - 1, seed, threads) == all) fail("digest of a part of it", 0, 0, 0);
  if (digest(bytes.data(), bytes.size(), seed, threads) != all) fail("held memory was read", 0, 0, 0);
  release(bytes.data(), bytes.size());
  if (digest(bytes.data(), bytes.size(), seed, threads) == all) fail("digest of what is no more held", 0, 0, 0);
}

// Element (channel, y, x) of image n in memory.
int64_t pixel(int64_t channels, int64_t h, int64_t w, bool last, int64_t n, int64_t c, int64_t y, int64_t x) {
  return last ? ((n * h + y) * w + x) * channels + c : ((n * channels + c) * h + y) * w + x;
}

template <class T>
void factored_convolution() {
  Conv c{};
  c.n = one_of({1, 2, 3, 5, 17}), c.groups = pick_int(1, 2), c.i = one_of({1, 3, 4, 7, 17}),
  c.o = one_of({1, 5, 8, 13, 16});
  c.kh = pick_int(1, 4), c.kw = pick_int(1, 5), c.h = pick_int(1, 11), c.w = one_of({1, 4, 7, 8, 16, 19});
  const bool channels_in_lanes = pick_int(0, 1);
  const bool planes_in_lanes = !channels_in_lanes && pick_int(0, 1),
             nothing_packed = channels_in_lanes || planes_in_lanes;
  const int64_t kind = channels_in_lanes ? pick_int(0, 2) : 0;
  if (kind == 1) {  // more channels than a panel has
    c.i = one_of({4, 16, 33, 66}), c.o = one_of({8, 17, 48, 70}), c.n = pick_int(1, 2), c.h = pick_int(1, 4);
    c.w = one_of({1, 3, 8});
  }
  if (kind == 2) {  // bands of an image
    c.n = pick_int(1, 2), c.h = pick_int(20, 40), c.w = 16, c.i = one_of({1, 3, 17}), c.o = one_of({1, 5});
  }
  if (planes_in_lanes) {  // as large as they were, in rows that registers divide, or the other way round
    c.kh = one_of({1, 3, 5}), c.kw = one_of({1, 3, 5}), c.h = one_of({4, 8, 16, 20}), c.w = one_of({2, 4, 8, 16, 32});
    c.o = one_of({1, 5, 8, 13}), c.n = pick_int(1, 3);
  }
  if (pick_int(0, 3) == 0) c.groups = one_of({4, 9, 16, 35}), c.i = c.o = 1;  // depthwise
  const bool patches = !nothing_packed && pick_int(0, 3) == 0;
  if (patches) c.groups = 1, c.i = pick_int(1, 4), c.h = std::max(c.h, c.kh), c.w = std::max(c.w, c.kw);
  for (int d : {0, 1}) {
    const int64_t kernel = d ? c.kw : c.kh, size = d ? c.w : c.h;
    c.stride[d] = planes_in_lanes ? 1 : pick_int(1, 3), c.dilation[d] = pick_int(1, 2);
    const int64_t least = std::max<int64_t>(0, ceil_div(c.dilation[d] * (kernel - 1) + 1 - size, 2));
    c.padding[d] = planes_in_lanes ? c.dilation[d] * (kernel - 1) / 2 : least + pick_int(0, 2);
    if (patches) c.stride[d] = kernel + pick_int(0, 1), c.dilation[d] = 1, c.padding[d] = 0;
    (d ? c.ow : c.oh) = (size + 2 * c.padding[d] - c.dilation[d] * (kernel - 1) - 1) / c.stride[d] + 1;
  }
  c.x_channels_last = pick_int(0, 1), c.y_channels_last = pick_int(0, 1);
  if (nothing_packed) c.x_channels_last = c.y_channels_last = channels_in_lanes;
  const bool dx_last = channels_in_lanes || pick_int(0, 1), biased = pick_int(0, 1), needs_x = pick_int(0, 3);
  const int64_t rank = pick_int(nothing_packed, 2), taps = c.kh * c.kw, inputs = c.groups * c.i,
                outputs = c.groups * c.o;
  const int64_t weights = outputs * c.i * taps;
  const double density = nothing_packed ? 0 : one_of({0, 5, 30, 100}) / 100.0;
  std::vector<int32_t> index;
  for (int64_t at = 0; at < weights; ++at) {
    if (std::bernoulli_distribution(density)(random_engine)) index.push_back(at);
  }
  Input<T> x(1, c.n * inputs * c.h * c.w), dy(1, c.n * outputs * c.oh * c.ow), u(1, rank * taps);
  Input<T> v(1, rank * outputs * c.i), values(1, index.size()), bias(1, outputs);
  std::vector<Sum> w(weights), dw(weights);
  for (int64_t at = 0; at < weights; ++at) {
    for (int64_t r = 0; r < rank; ++r) w[at].add(u(0, r * taps + at % taps) * v(0, r * outputs * c.i + at / taps));
  }
  for (size_t nz = 0; nz < index.size(); ++nz) w[index[nz]].add(values(0, nz));
  std::vector<T> y = unwritten<T>(dy.data.size()), dx = unwritten<T>(x.data.size()), du = unwritten<T>(u.data.size());
  std::vector<T> dv = unwritten<T>(v.data.size()), dvalues = unwritten<T>(index.size());
  std::vector<Sum> y_true(y.size()), dx_true(dx.size()), du_true(du.size()), dv_true(dv.size()), dvalues_true;
  auto add = [](Sum& to, double a, const Sum& b) {
    to.value += a * b.value, to.magnitude += std::abs(a) * b.magnitude;
  };
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t row = 0; row < c.oh; ++row) {
        for (int64_t column = 0; column < c.ow; ++column) {
          Sum& out = y_true[pixel(outputs, c.oh, c.ow, c.y_channels_last, n, o, row, column)];
          const double g = dy(0, pixel(outputs, c.oh, c.ow, c.y_channels_last, n, o, row, column));
          if (biased) out.add(bias(0, o));
          for (int64_t at = 0; at < c.i * taps; ++at) {
            const int64_t i = o / c.o * c.i + at / taps, from_row = row * c.stride[0] - c.padding[0];
            const int64_t py = from_row + at % taps / c.kw * c.dilation[0];
            const int64_t px = column * c.stride[1] - c.padding[1] + at % c.kw * c.dilation[1];
            if (py < 0 || px < 0 || py >= c.h || px >= c.w) continue;
            const double value = x(0, pixel(inputs, c.h, c.w, c.x_channels_last, n, i, py, px));
            add(out, value, w[o * c.i * taps + at]);
            add(dx_true[pixel(inputs, c.h, c.w, dx_last, n, i, py, px)], g, w[o * c.i * taps + at]);
            dw[o * c.i * taps + at].add(g * value);
          }
        }
      }
    }
  }
  for (int64_t at = 0; at < weights; ++at) {
    for (int64_t r = 0; r < rank; ++r) {
      add(du_true[r * taps + at % taps], v(0, r * outputs * c.i + at / taps), dw[at]);
      add(dv_true[r * outputs * c.i + at / taps], u(0, r * taps + at % taps), dw[at]);
    }
  }
  for (int32_t at : index) dvalues_true.push_back(dw[at]);

  std::string name = "factored";
  for (int64_t n : {c.n, c.groups, c.i, c.o, c.h, c.w, c.kh, c.kw, c.stride[0], c.stride[1], c.padding[0], c.padding[1],
                    c.dilation[0], c.dilation[1], rank, int64_t(index.size())}) {
    name += " " + std::to_string(n);
  }
  Sparse mu{index.data(), values.data.data(), int64_t(index.size())};
  std::vector<T> turned;
  if (mu.count == weights && takes_dense(kType<T>, c, false) && takes_dense(kType<T>, c, true) && pick_int(0, 2)) {
    mu.index = nullptr, mu.channels_last = c.i > 1 && pick_int(0, 1),
    name += mu.channels_last ? " dense last" : " dense";
    if (mu.channels_last) {
      const std::vector<Sum> before = dvalues_true;
      turned.resize(weights), mu.values = turned.data();
      for (int64_t at = 0; at < weights; ++at) {
        const int64_t o = at / (c.i * taps), i = at / taps % c.i, to = (o * taps + at % taps) * c.i + i;
        turned[to] = values.data[at], dvalues_true[to] = before[at];
      }
    }
  }
  const bool repeated = pick_int(0, 1);
  const int64_t shared_by = one_of({1, 2, 5}), calls = pick_int(1, 2);
  const bool columns = in_columns(kType<T>, c, mu.count, false),
             back_in_columns = in_columns(kType<T>, c, mu.count, true);
  if (columns) {
    const FactoredConv op{
        kType<T>, c,       rank, x.data.data(), u.data.data(), v.data.data(), biased ? bias.data.data() : nullptr,
        mu,       y.data()};
    if (!factored_conv_columns(op, threads)) fail(name + " columns", 0, 0, 1);
    compare(name + " columns", y, y_true);
  }
  const bool others = mu.index || !mu.count || is_depthwise(c);  // whether the other engines serve
  for (int call = 0; call < calls && others; ++call) {
    y = unwritten<T>(y.size());
    factored_conv({kType<T>, c, rank, x.data.data(), u.data.data(), v.data.data(), biased ? bias.data.data() : nullptr,
                   mu, y.data(), repeated, shared_by},
                  threads);
    compare(name, y, y_true);
  }
  const bool needs_u = pick_int(0, 3), needs_v = pick_int(0, 3), needs_values = pick_int(0, 3);
  const FactoredConvBackward back{kType<T>,
                                  c,
                                  rank,
                                  x.data.data(),
                                  dy.data.data(),
                                  u.data.data(),
                                  v.data.data(),
                                  mu,
                                  dx_last,
                                  needs_x ? dx.data() : nullptr,
                                  needs_u ? du.data() : nullptr,
                                  needs_v ? dv.data() : nullptr,
                                  needs_values ? dvalues.data() : nullptr,
                                  shared_by};
  for (int call = back_in_columns ? -1 : 0; call < calls; ++call) {
    if (call < 0) {
      if (!factored_conv_backward_columns(back, threads)) fail(name + " columns", 0, 0, 1);
    } else if (others) {
      factored_conv_backward(back, threads);
    }
    if (needs_x) compare(name + " dx", dx, dx_true);
    if (needs_u) compare(name + " du", du, du_true);
    if (needs_v) compare(name + " dv", dv, dv_true);
    if (needs_values) compare(name + " dvalues", dvalues, dvalues_true);
  }
}

// Element (n, c) of rows [n, channels] in memory.
int64_t place(const Matrix<const void>& m, int64_t n, int64_t c) {
  return m.plane ? (n / m.plane * m.channels + c) * m.plane + n % m.plane : n * m.channels + c;
}

template <class T>
void linear_from_factors() {
  const int64_t images = one_of({1, 2, 5}), plane = one_of({0, 1, 7, 33}), i = one_of({1, 5, 40, 300});
  const int64_t n = plane ? images * plane : one_of({1, 3, 6, 16, 37, 150, 1100}), o = one_of({1, 7, 65, 130});
  const int64_t rank = !plane && pick_int(0, 2) ? one_of({1, 2, 7, 20}) : 0;
  const double density = one_of({0, 3, 30, 100}) / 100.0;
  std::vector<int32_t> index;
  for (int64_t at = 0; at < o * i; ++at) {
    if (std::bernoulli_distribution(density)(random_engine)) index.push_back(at);
  }
  const int64_t count = index.size();
  const Input<T> x(1, n * i), dy(1, n * o), u(1, rank * i), v(1, rank * o), values(1, count), bias(1, o);
  const bool biased = pick_int(0, 1), needs_x = pick_int(0, 3), needs_values = pick_int(0, 3);
  const bool needs_u = pick_int(0, 1) && rank, needs_v = pick_int(0, 1) && rank;
  const Matrix<const void> rows{x.data.data(), i, plane}, grads{dy.data.data(), o, plane};
  std::vector<T> y = unwritten<T>(n * o), dx = unwritten<T>(n * i);
  std::vector<T> dvalues = unwritten<T>(count), du = unwritten<T>(rank * i), dv = unwritten<T>(rank * o);
  std::vector<Sum> y_true(n * o), dx_true(n * i), h_true(n * rank), dh_true(n * rank), dvalues_true(count);
  std::vector<Sum> du_true(rank * i), dv_true(rank * o);
  for (int64_t row = 0; row < n; ++row) {
    auto x_at = [&](int64_t c) { return x(0, place(rows, row, c)); };
    auto dy_at = [&](int64_t c) { return dy(0, place(grads, row, c)); };
    for (int64_t c = 0; c < o && biased; ++c) y_true[place(grads, row, c)].add(bias(0, c));
    for (int64_t r = 0; r < rank; ++r) {
      Sum &hidden = h_true[row * rank + r], &grad = dh_true[row * rank + r];
      for (int64_t c = 0; c < i; ++c) hidden.add(x_at(c) * u(0, r * i + c));
      for (int64_t c = 0; c < o; ++c) grad.add(dy_at(c) * v(0, r * o + c));
      auto add = [](Sum& to, double a, const Sum& b) {
        to.value += a * b.value, to.magnitude += std::abs(a) * b.magnitude;
      };
      for (int64_t c = 0; c < o; ++c) add(y_true[place(grads, row, c)], v(0, r * o + c), hidden);
      for (int64_t c = 0; c < i; ++c) add(dx_true[place(rows, row, c)], u(0, r * i + c), grad);
      for (int64_t c = 0; c < i; ++c) add(du_true[r * i + c], x_at(c), grad);
      for (int64_t c = 0; c < o; ++c) add(dv_true[r * o + c], dy_at(c), hidden);
    }
    for (int64_t nz = 0; nz < count; ++nz) {
      const int64_t to = index[nz] / i, from = index[nz] % i;
      y_true[place(grads, row, to)].add(values(0, nz) * x_at(from));
      dx_true[place(rows, row, from)].add(values(0, nz) * dy_at(to));
      dvalues_true[nz].add(dy_at(to) * x_at(from));
    }
  }
  std::string name = "linear";
  for (int64_t number : {n, plane, i, o, rank, count}) name += " " + std::to_string(number);
  const bool dense = count && count == o * i && !plane && takes_dense(kType<T>, n, i, o, false) &&
                     takes_dense(kType<T>, n, i, o, true) && pick_int(0, 2);
  const Sparse mu{dense ? nullptr : index.data(), values.data.data(), count};
  const FactoredLinear op{kType<T>,
                          n,
                          i,
                          o,
                          rank,
                          rows,
                          u.data.data(),
                          v.data.data(),
                          biased ? bias.data.data() : nullptr,
                          mu,
                          {y.data(), o, plane}};
  if (!factored_linear(op, threads)) fail(name, 0, 0, 1);
  compare(name, y, y_true);
  const FactoredLinearBackward back{kType<T>,
                                    n,
                                    i,
                                    o,
                                    rank,
                                    rows,
                                    grads,
                                    u.data.data(),
                                    v.data.data(),
                                    mu,
                                    {needs_x ? dx.data() : nullptr, i, plane},
                                    needs_u ? du.data() : nullptr,
                                    needs_v ? dv.data() : nullptr,
                                    needs_values && count ? dvalues.data() : nullptr};
  if (!factored_linear_backward(back, threads)) fail(name, 0, 0, 1);
  if (needs_x) compare(name + " dx", dx, dx_true);
  if (needs_u) compare(name + " du", du, du_true);
  if (needs_v) compare(name + " dv", dv, dv_true);
  if (needs_values && count) compare(name + " dvalues", dvalues, dvalues_true);
  if (count > 1 && !dense) {  // what is not ascending is refused before anything is read by it
    std::swap(index[0], index[count - 1]);
    if (factored_linear(op, threads) || factored_linear_backward(back, threads)) fail(name + " swapped", 0, 1, 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  random_engine.seed(std::atoi(argv[1]));
  for (int round = 0; round < std::atoi(argv[2]); ++round) {
    digests();
    with_type(static_cast<Type>(round % 4), [](auto type) {
      using T = decltype(type);
      rank1<T>();
      lowrank<T>();
      hadamard<T>();
      prox<T>();
      adamw<T>();
      sums_of_channels<T>();
      biases<T>();
      products_of_few_rows<T>();
      products_in_panels<T>();
      if (std::is_same_v<T, float>) dense_convolutions();
      adapters<T>();
      attentions<T>();
      products_with_rows<T>();
#ifdef FF_CONV_TYPE
      factored_convolution<FF_CONV_TYPE>();
      linear_from_factors<FF_CONV_TYPE>();
#else
      factored_convolution<T>();
      linear_from_factors<T>();
#endif
      bitmap<T, float>(Value::f32);
      bitmap<T, BFloat16>(Value::bf16);
      bitmap<T, int8_t>(Value::i8);
      similarity<T>();
      sketch<T>();
    });
  }
  std::printf("%s ok\n", instruction_set());
}
