// Attention of sequences that are short enough for all of a head to lie in the second cache.
//
// A thread takes one head of one sample at a time: queries, keys and values are read where they are, by their steps
// (parts of a packed projection), and the gradients are written by theirs. A product's right operand lies in panels of
// two registers of columns, packed where it has to be transposed, and the left one is read element by element. Backward
// the weights are made again from the logarithms of their sums, block of rows by block of rows.
#include <algorithm>
#include <limits>

#include "gemm.h"
#include "items.h"

namespace fastfact {
namespace {

constexpr int64_t kBlock = 48;           // rows whose weights are there at once; a multiple of a tile's height
constexpr int64_t kLeastWork = 1 << 18;  // multiplications for a thread
constexpr int64_t kFetched = 1024;       // bytes fetched ahead with each tile

// Rows that are read along their columns as the right operand of a product: in panels [columns / N][rows][N], the last
// one as wide as it must be, or, where `step` is given, as they are, rows so far apart.
template <class C>
struct Right {
  const C* data;
  int64_t rows, step;
};

// Elements (row, term), so far apart.
template <class C>
struct Left {
  const C* data;
  int64_t row, term;
};

// The rows that the next head reads and writes, fetched some at a time while this one is worked on: they lie far apart.
class Ahead {
 public:
  explicit Ahead(int64_t bytes)
      : bytes_(bytes), at_once_(std::max<int64_t>(kFetched / std::max<int64_t>(bytes, 1), 1)) {}

  void begin() { count_ = left_ = 0; }
  void add(const void* data, int64_t step, int64_t rows, bool written) {
    if (!rows) return;
    rows_[count_++] = {static_cast<const char*>(data), step, rows, written};
    left_ += rows;
  }
  void fetch() {
    for (int64_t n = std::min(left_, at_once_); n > 0; --n, --left_) {
      Rows& rows = rows_[count_ - 1];
      if (rows.written) {
        for (int64_t byte = 0; byte < bytes_; byte += 64) __builtin_prefetch(rows.data + byte, 1, 2);
      } else {
        for (int64_t byte = 0; byte < bytes_; byte += 64) __builtin_prefetch(rows.data + byte, 0, 2);
      }
      rows.data += rows.step;
      if (--rows.left == 0) --count_;
    }
  }

 private:
  struct Rows {
    const char* data;
    int64_t step, left;
    bool written;
  };
  const int64_t bytes_, at_once_;
  int64_t count_ = 0, left_ = 0;
  Rows rows_[8];
};

template <class C, int B>
struct Products {
  using V = Vec<C, B>;
  static constexpr int L = kLanes<C, B>, N = 2 * L, M = tile_rows(B);

  // out [R, W registers] = scale · Σ left · right, or as much more
  template <int R, int W>
  FF_INLINE static void tile(const Left<C>& left, const C* right, int64_t step, int64_t terms, C scale, bool adds,
                             C* out, int64_t out_step) {
    V sums[R][W];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) sums[r][w] = V{};
    }
    const C* from = left.data;
    for (int64_t t = 0; t < terms; ++t, from += left.term, right += step) {
      V b[W];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) b[w] = load<B>(right + w * L);
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) sums[r][w] += b[w] * from[r * left.row];
      }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        C* to = out + r * out_step + w * L;
        sums[r][w] *= scale;
        if (adds) sums[r][w] += load<B>(to);
        store<B>(to, sums[r][w]);
      }
    }
  }

  template <int R, int W>
  FF_INLINE static void tile_of(int64_t rows, const Left<C>& left, const C* right, int64_t step, int64_t terms, C scale,
                                bool adds, C* out, int64_t out_step) {
    if (rows == R) {
      outline<B>([&]() FF_INLINE_LAMBDA { tile<R, W>(left, right, step, terms, scale, adds, out, out_step); });
    } else if constexpr (R > 1) {
      tile_of<R - 1, W>(rows, left, right, step, terms, scale, adds, out, out_step);
    }
  }

  // Columns a multiple of L. One register of columns takes twice the rows, so that there are sums enough to wait for.
  FF_INLINE static void run(int64_t rows, int64_t columns, int64_t terms, const Left<C>& left, const Right<C>& right,
                            C scale, bool adds, C* out, int64_t out_step, Ahead& ahead) {
    for (int64_t column = 0; column < columns; column += N) {
      const bool two = columns - column >= N;
      const C* from = right.data + (right.step ? column : column * right.rows);
      const int64_t step = right.step ? right.step : two ? N : L;
      const int64_t tiles = ceil_div(rows, two ? M : 2 * M), least = rows / tiles, more = rows - least * tiles;
      for (int64_t tile = 0, first = 0, count; tile < tiles; ++tile, first += count) {
        count = least + (tile < more);
        ahead.fetch();
        const Left<C> some{left.data + first * left.row, left.row, left.term};
        C* to = out + first * out_step + column;
        if (two) {
          tile_of<M, 2>(count, some, from, step, terms, scale, adds, to, out_step);
        } else {
          tile_of<2 * M, 1>(count, some, from, step, terms, scale, adds, to, out_step);
        }
      }
    }
  }
};

// What the head of an item, which is one of one sample, has of a tensor; null where that is not there.
template <class T>
T* head_of(const Attention& op, const Heads& heads, int64_t item) {
  const int64_t head = item % op.heads, sample = item / op.heads % op.samples, client = item / op.heads / op.samples;
  return heads.data ? static_cast<T*>(heads.data) + client * heads.client + sample * heads.sample + head * heads.head
                    : nullptr;
}

template <class T>
void add_head(const Attention& op, const Heads& heads, int64_t item, int64_t rows, Ahead& ahead, bool written = false) {
  ahead.add(head_of<T>(op, heads, item), heads.row * sizeof(T), rows, written);
}

template <class T, int B>
struct Attend {
  using C = Compute<T>;
  using V = Vec<T, B>;
  using I = IndexVec<T, B>;
  using P = Products<C, B>;
  static constexpr int L = kLanes<T, B>, N = 2 * L;
  static constexpr C kNothing = -std::numeric_limits<C>::infinity();

  const Attention& op;
  const int64_t wide, across;  // depth and keys as multiples of a register
  const bool direct;           // whether rows can be read and written as they are
  const int64_t block;
  const int64_t few;  // the last keys, where they are too few for a register of columns

  FF_INLINE explicit Attend(const Attention& op)
      : op(op),
        wide(ceil_div(op.depth, L) * L),
        across(ceil_div(op.keys, L) * L),
        direct(std::is_same_v<T, C> && op.depth % L == 0),
        block(std::min(op.queries, kBlock)),
        few(direct && dots_are_faster(op.keys % L) ? op.keys % L : 0) {}

  // Of so many keys: L rows at once take `depth` multiplications for each, and to add up the lanes as much as 8 · L.
  bool dots_are_faster(int64_t keys) const { return keys * ceil_div(block, L) * (op.depth + 8 * L) < block * op.depth; }

  // Keys or values, but for the `few` last ones, as columns: panels [keys / N][depth][N].
  FF_INLINE Right<C> turned(const T* data, int64_t step, C* to) const {
    const Right<C> out{to, op.depth, 0};
    const int64_t rows = op.keys - few;
    for (int64_t first = 0; first < rows; first += N) {
      const int64_t width = rows - first > L ? N : L;
      int64_t d = 0;
      for (; d + L <= op.depth; d += L, to += L * width) {
        for (int64_t j = 0; j < width; j += L) {
          V lines[L];
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) {
            lines[l] = first + j + l < rows ? load<B>(data + (first + j + l) * step + d) : V{};
          }
          PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
          for (int l = 0; l < L; ++l) store<B>(to + l * width + j, lines[l]);
        }
      }
      for (; d < op.depth; ++d, to += width) {
        for (int64_t j = 0; j < width; ++j) {
          to[j] = first + j < rows ? to_compute(data[(first + j) * step + d]) : C(0);
        }
      }
    }
    return out;
  }

  // out [rows, across] = scale · rows of `left` times all keys or values, whose `turned` ones are `right`
  FF_INLINE void multiply(int64_t rows, const Left<C>& left, const Right<C>& right, const T* data, int64_t step,
                          C scale, C* out, Ahead& ahead) const {
    P::run(rows, few ? op.keys - few : across, op.depth, left, right, scale, false, out, across, ahead);
    if constexpr (std::is_same_v<T, C>) {
      for (int64_t key = op.keys - few; key < op.keys; ++key) {
        for (int64_t row = 0; row < rows; row += L) {
          outline<B>([&]() FF_INLINE_LAMBDA {
            dots(left.data + row * left.row, left.row, data + key * step, std::min<int64_t>(L, rows - row), scale,
                 out + row * across + key);
          });
        }
      }
    }
  }

  // out[r · across] = scale · row r · one
  FF_INLINE void dots(const C* rows, int64_t step, const C* one, int64_t count, C scale, C* out) const {
    V sums[L];
    int64_t row[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) sums[r] = V{}, row[r] = std::min<int64_t>(r, count - 1) * step;
    for (int64_t d = 0; d < op.depth; d += L) {
      const V x = load<B>(one + d);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) sums[r] += load<B>(rows + row[r] + d) * x;
    }
    const V found = sum_of_each(sums) * scale;
    for (int64_t r = 0; r < count; ++r) out[r * across] = found[r];
  }

  // Rows as they are, or as panels [depth / N][rows][N].
  FF_INLINE Right<C> along(const T* data, int64_t step, int64_t rows, C* to) const {
    if constexpr (std::is_same_v<T, C>) {
      if (direct) return {data, rows, step};
    }
    const Right<C> out{to, rows, 0};
    for (int64_t column = 0; column < wide; column += N) {
      const int64_t width = std::min<int64_t>(wide - column, N), count = std::min(op.depth - column, width);
      for (int64_t row = 0; row < rows; ++row, to += width) {
        copy<B>(data + row * step + column, count, to);
        for (int64_t j = count; j < width; ++j) to[j] = 0;
      }
    }
    return out;
  }

  // Rows whose elements are read one by one.
  FF_INLINE Left<C> single(const T* data, int64_t step, int64_t rows, C* to) const {
    if constexpr (std::is_same_v<T, C>) {
      return {data, step, 1};
    } else {
      for (int64_t row = 0; row < rows; ++row) copy<B>(data + row * step, op.depth, to + row * op.depth);
      return {to, op.depth, 1};
    }
  }

  // Rows that products write: those of a tensor, or of `scratch` [rows, wide], from which `write` copies them.
  FF_INLINE std::pair<C*, int64_t> place(T* data, int64_t step, C* scratch) const {
    if constexpr (std::is_same_v<T, C>) {
      if (direct) return {data, step};
    }
    return {scratch, wide};
  }
  FF_INLINE void write(const C* scratch, int64_t rows, T* data, int64_t step) const {
    if (direct) return;
    for (int64_t row = 0; row < rows; ++row) copy<B>(scratch + row * wide, op.depth, data + row * step);
  }

  int64_t seen_by(int64_t query) const { return op.causal ? std::min(query + 1, op.keys) : op.keys; }

  // The mask is added to a row of products, and what the query does not see is nothing.
  FF_INLINE void cover(C* row, const T* mask, int64_t query) const {
    if (mask) {
      const T* from = mask + query * op.mask.row;
      int64_t j = 0;
      if (op.mask_column == 1) {
        for (; j + L <= op.keys; j += L) store<B>(row + j, load<B>(row + j) + load<B>(from + j));
      }
      for (; j < op.keys; ++j) row[j] += to_compute(from[j * op.mask_column]);
    }
    for (int64_t j = seen_by(query); j < across; ++j) row[j] = kNothing;
  }

  FF_INLINE static V exponential_or_0(V x) {
    const auto gone = x < smallest_exponent<C>;
    return bit_cast<V>(bit_cast<I>(exponential<B>(x)) & ~mask_of<I>(gone));
  }

  // Up to L rows of products become weights; `sums`: the logarithms of the sums of their exponentials, those of queries
  // that see nothing 0. What is found of each row is put into lanes, so that rows do not wait for their lanes' sums.
  FF_INLINE void softmax(C* rows, int64_t count, T* sums) const {
    V lines[L];
    for (int64_t r = 0; r < L; ++r) {
      V many = V{} + kNothing;
      for (int64_t j = 0; r < count && j < across; j += L) many = larger(many, load<B>(rows + r * across + j));
      lines[r] = many;
    }
    PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
    V most = lines[0];
#pragma GCC unroll 16
    for (int l = 1; l < L; ++l) most = larger(most, lines[l]);
    most = bit_cast<V>(bit_cast<I>(most) & ~mask_of<I>(most == kNothing));
    alignas(64) C of_row[L];
    store<B>(of_row, most);
    for (int64_t r = 0; r < L; ++r) {
      V sum{};
      for (int64_t j = 0; r < count && j < across; j += L) {
        const V e = exponential_or_0(load<B>(rows + r * across + j) - of_row[r]);
        store<B>(rows + r * across + j, e);
        sum += e;
      }
      lines[r] = sum;
    }
    const V sum = sum_of_each(lines);
    const I nothing = mask_of<I>(sum == C(0));
    store<B>(of_row, bit_cast<V>(bit_cast<I>(1 / sum) & ~nothing));
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < across; j += L) {
        store<B>(rows + r * across + j, load<B>(rows + r * across + j) * of_row[r]);
      }
    }
    for (int64_t r = 0; r < count; ++r) sums[r] = from_compute<T>(sum[r] == 0 ? C(0) : most[r] + std::log(sum[r]));
  }

  // The larger of each lane; NaN stays.
  FF_INLINE static V larger(V a, V b) {
#if defined(__x86_64__) && !defined(__clang__)
    // GCC makes one comparison for each lane here.
    if constexpr (B == 64 && sizeof(C) == 4) {
      V out;
      asm("vcmpps $3, %1, %1, %%k1\n\tvmaxps %2, %1, %0\n\tvmovaps %1, %0%{%%k1%}"
          : "=&v"(out)
          : "v"(b), "v"(a)
          : "k1");
      return out;
    }
#endif
    return bit_cast<V>(pick<I>(mask_of<I>(b > a) | mask_of<I>(b != b), bit_cast<I>(b), bit_cast<I>(a)));
  }

  // Lane l: the sum of the lanes of lines[l].
  FF_INLINE static V sum_of_each(V (&lines)[L]) {
    PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
    V sum = lines[0];
#pragma GCC unroll 16
    for (int l = 1; l < L; ++l) sum += lines[l];
    return sum;
  }

  // Up to L rows of products become weights, and those of dout and v the changes of the products.
  FF_INLINE void backward(C* weights, C* changes, int64_t count, const T* sums, const T* grad, int64_t grad_step,
                          const T* out) const {
    V lines[L];
    for (int64_t r = 0; r < L; ++r) {
      V sum{};
      if (r < count) {
        const T *a = grad + r * grad_step, *b = out + r * op.out.row;
        int64_t j = 0;
        for (; j + L <= op.depth; j += L) sum += load<B>(a + j) * load<B>(b + j);
        for (; j < op.depth; ++j) sum[0] += to_compute(a[j]) * to_compute(b[j]);
      }
      lines[r] = sum;
    }
    alignas(64) C mean[L];
    store<B>(mean, sum_of_each(lines));
    for (int64_t r = 0; r < count; ++r, weights += across, changes += across) {
      const C sum = to_compute(sums[r]);
      for (int64_t j = 0; j < across; j += L) {
        const V weight = exponential_or_0(load<B>(weights + j) - sum);
        store<B>(weights + j, weight);
        store<B>(changes + j, weight * (load<B>(changes + j) - mean[r]));
      }
    }
  }
};

template <class T, int B>
struct RunAttention {
  FF_INLINE static void run(const Attention& op, const Items& items) {
    using C = Compute<T>;
    using A = Attend<T, B>;
    const A of(op);
    constexpr bool converts = !std::is_same_v<T, C>;
    const Scratch<C> turned(of.across * op.depth), along(of.direct ? 0 : op.keys * of.wide);
    const Scratch<C> single(converts ? of.block * op.depth : 0), weights(of.block * of.across);
    const Scratch<C> found(of.direct ? 0 : of.block * of.wide);
    Ahead ahead(op.depth * sizeof(T));
    for (int64_t item = items.take(); item < items.count(); item = items.take()) {
      const T* q = head_of<T>(op, op.q, item);
      const T* mask = head_of<T>(op, op.mask, item);
      T* out = head_of<T>(op, op.out, item);
      ahead.begin();
      if (item + 1 < items.count()) {
        add_head<T>(op, op.out, item + 1, op.queries, ahead, true);
        add_head<T>(op, op.q, item + 1, op.queries, ahead);
        for (const Heads& some : {op.v, op.k}) add_head<T>(op, some, item + 1, op.keys, ahead);
      }
      T* sums = static_cast<T*>(op.sums) + item * op.queries;
      const T* k = head_of<T>(op, op.k, item);
      const Right<C> turned_keys = of.turned(k, op.k.row, turned.get());
      const Right<C> v = of.along(head_of<T>(op, op.v, item), op.v.row, op.keys, along.get());
      for (int64_t row = 0; row < op.queries; row += of.block) {
        const int64_t rows = std::min(of.block, op.queries - row);
        const Left<C> left = of.single(q + row * op.q.row, op.q.row, rows, single.get());
        of.multiply(rows, left, turned_keys, k, op.k.row, op.scale, weights.get(), ahead);
        for (int64_t r = 0; r < rows; ++r) of.cover(weights.get() + r * of.across, mask, row + r);
        for (int64_t r = 0; r < rows; r += A::L) {
          of.softmax(weights.get() + r * of.across, std::min<int64_t>(A::L, rows - r), sums + row + r);
        }
        if (op.weights) {
          T* shown = static_cast<T*>(op.weights) + (item * op.queries + row) * op.keys;
          for (int64_t r = 0; r < rows; ++r, shown += op.keys) {
            copy<B>(weights.get() + r * of.across, op.keys, shown);
          }
        }
        const auto [to, step] = of.place(out + row * op.out.row, op.out.row, found.get());
        A::P::run(rows, of.wide, of.seen_by(row + rows - 1), {weights.get(), of.across, 1}, v, 1, false, to, step,
                  ahead);
        of.write(found.get(), rows, out + row * op.out.row, op.out.row);
      }
    }
  }
};

template <class T, int B>
struct RunAttentionBackward {
  FF_INLINE static void run(const Attention& op, const AttentionGradients& to, const Items& items) {
    using C = Compute<T>;
    using A = Attend<T, B>;
    using P = typename A::P;
    const A of(op);
    constexpr bool converts = !std::is_same_v<T, C>;
    const int64_t copied = of.direct ? 0 : of.wide, singles = converts ? of.block * op.depth : 0;
    const Scratch<C> k_turned(of.across * op.depth), v_turned(of.across * op.depth), k_along(op.keys * copied);
    const Scratch<C> q_along(of.block * copied), grad_along(of.block * copied), q_single(singles), grad_single(singles);
    const Scratch<C> weights(of.block * of.across), changes(of.block * of.across);
    const Scratch<C> dq_found(of.block * copied), dk_found(op.keys * copied), dv_found(op.keys * copied);
    Ahead ahead(op.depth * sizeof(T));
    for (int64_t item = items.take(); item < items.count(); item = items.take()) {
      const T* q = head_of<T>(op, op.q, item);
      const T* k = head_of<T>(op, op.k, item);
      const T* v = head_of<T>(op, op.v, item);
      const T* mask = head_of<T>(op, op.mask, item);
      const T* out = head_of<T>(op, op.out, item);
      const T* grad = head_of<T>(op, to.grad, item);
      T* dq = head_of<T>(op, to.dq, item);
      T* dk = head_of<T>(op, to.dk, item);
      T* dv = head_of<T>(op, to.dv, item);
      const T* sums = static_cast<const T*>(op.sums) + item * op.queries;
      ahead.begin();
      if (item + 1 < items.count()) {
        for (const Heads& some : {to.dv, to.dk}) add_head<T>(op, some, item + 1, op.keys, ahead, true);
        add_head<T>(op, to.dq, item + 1, op.queries, ahead, true);
        for (const Heads& some : {op.out, to.grad, op.q}) add_head<T>(op, some, item + 1, op.queries, ahead);
        for (const Heads& some : {op.v, op.k}) add_head<T>(op, some, item + 1, op.keys, ahead);
      }
      const Right<C> keys = of.turned(k, op.k.row, k_turned.get());
      const Right<C> values = of.turned(v, op.v.row, v_turned.get());
      const Right<C> keys_along = of.along(k, op.k.row, op.keys, k_along.get());
      const auto [dk_to, dk_step] = of.place(dk, to.dk.row, dk_found.get());
      const auto [dv_to, dv_step] = of.place(dv, to.dv.row, dv_found.get());
      for (int64_t row = 0; row < op.queries; row += of.block) {
        const int64_t rows = std::min(of.block, op.queries - row), seen = of.seen_by(row + rows - 1);
        const T *some = q + row * op.q.row, *some_grad = grad + row * to.grad.row;
        of.multiply(rows, of.single(some, op.q.row, rows, q_single.get()), keys, k, op.k.row, op.scale, weights.get(),
                    ahead);
        of.multiply(rows, of.single(some_grad, to.grad.row, rows, grad_single.get()), values, v, op.v.row, 1,
                    changes.get(), ahead);
        for (int64_t r = 0; r < rows; ++r) of.cover(weights.get() + r * of.across, mask, row + r);
        for (int64_t r = 0; r < rows; r += A::L) {
          of.backward(weights.get() + r * of.across, changes.get() + r * of.across, std::min<int64_t>(A::L, rows - r),
                      sums + row + r, some_grad + r * to.grad.row, to.grad.row, out + (row + r) * op.out.row);
        }
        const auto [dq_to, dq_step] = of.place(dq + row * to.dq.row, to.dq.row, dq_found.get());
        P::run(rows, of.wide, seen, {changes.get(), of.across, 1}, keys_along, op.scale, false, dq_to, dq_step, ahead);
        of.write(dq_found.get(), rows, dq + row * to.dq.row, to.dq.row);
        P::run(op.keys, of.wide, rows, {changes.get(), 1, of.across}, of.along(some, op.q.row, rows, q_along.get()),
               op.scale, row > 0, dk_to, dk_step, ahead);
        P::run(op.keys, of.wide, rows, {weights.get(), 1, of.across},
               of.along(some_grad, to.grad.row, rows, grad_along.get()), 1, row > 0, dv_to, dv_step, ahead);
      }
      of.write(dk_found.get(), op.keys, dk, to.dk.row);
      of.write(dv_found.get(), op.keys, dv, to.dv.row);
    }
  }
};

// body(items), the heads of all samples, by as many threads as the work is for
template <class F>
void in_turn(const Attention& op, int64_t products, ParallelFor parallel_for, const F& body) {
  const int64_t items = op.clients * op.samples * op.heads;
  if (items == 0 || op.queries == 0) return;
  const int64_t work = std::max<int64_t>(products * op.queries * op.keys * op.depth, 1);
  parallel_items(parallel_for, items, ceil_div(kLeastWork, work), body);
}

}  // namespace

void attention(const Attention& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    in_turn(op, 2, parallel_for, [&](const Items& items) { dispatch<RunAttention, decltype(type)>(op, items); });
  });
}

void attention_backward(const Attention& op, const AttentionGradients& gradients, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    in_turn(op, 5, parallel_for,
            [&](const Items& items) { dispatch<RunAttentionBackward, decltype(type)>(op, gradients, items); });
  });
}

}  // namespace fastfact
