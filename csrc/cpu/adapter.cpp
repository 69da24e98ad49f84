// A frozen linear layer with the low-rank factors of many clients: σ, which they share, a [r, i] and b [o, r] of each.
//
// The rows of all clients are worked on in chunks that stay in cache: some whole clients, or a part of one. Of a chunk
// first the few numbers of each row are made, h = scaling · x aᵀ, then tiles of rows × columns, in whose registers the
// product with σ meets that of h and b, so that y is written once; backward also the sums over rows that are the
// gradients of the factors. A tile may hold rows of several clients. How rows are cut into chunks changes no sum.
#include "gemm.h"

namespace fastfact {
namespace {

constexpr int64_t kSum = 128;            // rows summed in registers before they are added to a factor's gradient
constexpr int64_t kChunk = 1 << 19;      // bytes of the rows that a thread works on
constexpr int64_t kSecond = 1 << 18;     // bytes of those that the second cache holds beside the rest
constexpr int64_t kLeastWork = 1 << 19;  // multiplications of an item
constexpr int64_t kClientsOfChunk = 16;  // a thread

// Rows of some clients, all of each or a part of one.
struct Chunk {
  int64_t client, clients, row, rows_of_client;
  int64_t rows() const { return clients * rows_of_client; }
};

template <class F>
void in_chunks(int64_t clients, int64_t rows, int64_t most_rows, int64_t most_clients, const F& body) {
  const int64_t together = std::clamp<int64_t>(most_rows / std::max<int64_t>(rows, 1), 1, most_clients);
  for (int64_t k = 0; k < clients; k += together) {
    const int64_t count = std::min(together, clients - k);
    for (int64_t row = 0; row < rows; row += most_rows) {
      body(Chunk{k, count, row, std::min(most_rows, rows - row)});
    }
  }
}

// Panels of columns of one matrix a client, as `PackPanels` makes them; those of all clients are one where they share
// it.
template <class T>
class Panels {
  using C = Compute<T>;

 public:
  // Element (column j, depth d) is j · column_step + d · depth_step behind the first.
  Panels(const In& data, int64_t columns, int64_t column_step, int64_t depth, int64_t depth_step, int width,
         int64_t most_clients)
      : from_{data, steps(columns, column_step), steps(depth, depth_step)},
        width_(width),
        size_(ceil_div(columns, width) * width * depth),
        shared_(data.client_stride == 0),
        memory_(size_ * (shared_ ? 1 : most_clients)) {}

  // Makes those of `count` clients, unless they are there.
  void pack(ParallelFor parallel_for, int64_t first, int64_t count) {
    if (first_ >= 0 && (shared_ || (first_ == first && count == 1))) return;
    first_ = first;
    const int64_t panels = (shared_ ? 1 : count) * ceil_div(from_.row.size(), width_), depth = from_.depth.size();
    parallel(
        parallel_for, panels, ceil_div(16384, width_ * std::max<int64_t>(depth, 1)),
        [&](int64_t begin, int64_t end) { dispatch<PackPanels, T>(from_, first, width_, memory_.get(), begin, end); });
  }

  const C* data() const { return memory_.get(); }
  int64_t stride() const { return shared_ ? 0 : size_; }

 private:
  Operand from_;
  int width_;
  int64_t size_, first_ = -1;
  bool shared_;
  Scratch<C> memory_;
};

// A tile of R rows × W registers of columns, whose sums are kept in registers.
template <class T, int B, int W, int R>
struct Tile {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, N = W * L;

  V sums[R * W];

  FF_INLINE void clear() {
#pragma GCC unroll 32
    for (int e = 0; e < R * W; ++e) sums[e] = V{};
  }

  // += Σ_d left[row][d] · right[d]
  FF_INLINE void add(const C* const* left, const C* right, int64_t terms) {
    const C* row[R];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) row[r] = left[r];
    for (int64_t d = 0; d < terms; ++d, right += N) {
      const V first = load<B>(right), second = load<B>(right + N - L);
#pragma GCC unroll 32
      for (int e = 0; e < R * W; ++e) sums[e] += (e % W ? second : first) * row[e / W][d];
    }
  }

  FF_INLINE void add(const C* from) {
#pragma GCC unroll 32
    for (int e = 0; e < R * W; ++e) sums[e] += load<B>(from + e * L);
  }

  FF_INLINE void put(C* to) const {
#pragma GCC unroll 32
    for (int e = 0; e < R * W; ++e) store<B>(to + e * L, sums[e]);
  }

  // += the terms [from, to). Of many, parts are summed in `memory`; returns whether it holds any.
  FF_INLINE bool add_parts(const C* const* left, const C* right, int64_t from, int64_t to, bool used, C* memory) {
    const C* at[R];
    for (int64_t d = from; d < to; d += kDepth) {
      if (d > from) {
        if (used) add(memory);
        put(memory);
        clear();
        used = true;
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) at[r] = left[r] + d;
      add(at, right + d * N, std::min(kDepth, to - d));
    }
    return used;
  }
};

// few [rows, rank] = scale · x downᵀ of the rows of a chunk. Items are (client, block of rows).
template <class T>
struct FewOf {
  using C = Compute<T>;
  const C* const* x;
  int64_t rows, depth, rank, block;  // rows: of one client
  const C* down;
  int64_t down_stride;
  C scale;
  C* few;
  T* kept;  // the same in memory, or null
};

template <class T, int B>
struct Few {
  using C = Compute<T>;
  static constexpr int L = kLanes<T, B>, M = tile_rows(B);

  // Of one register of columns twice the rows, so that there are sums enough to wait for.
  template <int W>
  FF_INLINE static void tiles(const FewOf<T>& op, int64_t client, int64_t first, int64_t last) {
    constexpr int R = W == 1 && B < 64 ? 2 * M : M;
    for (int64_t column = 0; column < op.rank; column += W * L) {
      const C* down = op.down + client * op.down_stride + column * op.depth;
      const int64_t count = std::min<int64_t>(W * L, op.rank - column);
      for (int64_t row = first; row < last; row += R) {
        const C* left[R];
        for (int64_t r = 0; r < R; ++r) left[r] = op.x[client * op.rows + std::min(row + r, last - 1)];
        alignas(64) C sums[R * W * L];
        outline<B>([&]() FF_INLINE_LAMBDA {
          Tile<T, B, W, R> tile;
          tile.clear();
          if (tile.add_parts(left, down, 0, op.depth, false, sums)) tile.add(sums);
#pragma GCC unroll 32
          for (int e = 0; e < R * W; ++e) tile.sums[e] *= op.scale;
          tile.put(sums);
        });
        for (int64_t r = 0; r < R && row + r < last; ++r) {
          const int64_t to = (client * op.rows + row + r) * op.rank + column;
          const C* from = sums + r * W * L;
          if (op.kept) copy<B>(from, count, op.kept + to);
          for (int64_t j = 0; j < count; ++j) op.few[to + j] = to_compute(from_compute<T>(from[j]));
        }
      }
    }
  }

  FF_INLINE static void run(const FewOf<T>& op, int64_t begin, int64_t end) {
    const int64_t blocks = ceil_div(op.rows, op.block);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % blocks * op.block, last = std::min(op.rows, first + op.block);
      if (op.rank <= L) {
        tiles<1>(op, item / blocks, first, last);
      } else {
        tiles<2>(op, item / blocks, first, last);
      }
    }
  }
};

// out [rows, columns] = x sigma + few up + bias of the rows of a chunk. Items are (block of rows, panel of columns).
template <class T>
struct ThroughOf {
  using C = Compute<T>;
  const C* const* x;
  const C* few;
  int64_t rows, rows_of_client, depth, rank, columns;
  int64_t block, group, pass;  // rows and panels of an item, and terms of σ before it goes on to the next tile
  const C* sigma;              // or null
  const C* up;                 // or null
  int64_t up_stride;
  const T* bias;  // or null
  int64_t bias_stride;
  const C* zeros;  // [rank]
  T* out;
};

template <class T, int B>
struct Through {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, M = tile_rows(B), N = 2 * L;

  // The terms [from, to) of σ; `memory` has the sums of those before, and gets them back unless these are the last.
  FF_INLINE static void tile(const ThroughOf<T>& op, int64_t row, int64_t panel, int64_t from, int64_t to, C* memory) {
    const int64_t last = std::min(row + M, op.rows), column = panel * N;
    const C* left[M];
    Tile<T, B, 2, M> tile;
    tile.clear();
    bool used = from > 0;
    if (from < to) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) left[m] = op.x[std::min(row + m, last - 1)];
      used = tile.add_parts(left, op.sigma + column * op.depth, from, to, used, memory);
      if (to < op.depth) {
        if (used) tile.add(memory);
        return tile.put(memory);
      }
    }
    const int64_t first_client = row / op.rows_of_client, last_client = (last - 1) / op.rows_of_client;
    for (int64_t k = first_client; op.up && k <= last_client; ++k) {
      const int64_t begin = k * op.rows_of_client, end = std::min(last, begin + op.rows_of_client);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        left[m] = row + m >= begin && row + m < end ? op.few + (row + m) * op.rank : op.zeros;
      }
      tile.add(left, op.up + k * op.up_stride + column * op.rank, op.rank);
    }
    if (used) tile.add(memory);
    const int64_t count = std::min<int64_t>(N, op.columns - column);
    T* out = op.out + row * op.columns + column;
    const T* bias = op.bias ? op.bias + first_client * op.bias_stride + column : nullptr;
    if (count == N && row + M == last && (!bias || !op.bias_stride || first_client == last_client)) {
      V b0 = {}, b1 = {};
      if (bias) b0 = load<B>(bias), b1 = load<B>(bias + L);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        store<B>(out + m * op.columns, tile.sums[2 * m] + b0);
        store<B>(out + m * op.columns + L, tile.sums[2 * m + 1] + b1);
      }
      return;
    }
    alignas(64) C all[M * N];
    tile.put(all);
    for (int64_t m = 0; row + m < last; ++m) {
      if (bias) bias = op.bias + (row + m) / op.rows_of_client * op.bias_stride + column;
      for (int64_t j = 0; j < count; ++j) {
        out[m * op.columns + j] = from_compute<T>(all[m * N + j] + (bias ? to_compute(bias[j]) : C(0)));
      }
    }
  }

  FF_INLINE static void run(const ThroughOf<T>& op, int64_t begin, int64_t end) {
    const int64_t panels = ceil_div(op.columns, N), groups = ceil_div(panels, op.group);
    const int64_t depth = op.sigma ? op.depth : 0, size = op.pass < depth ? op.group * (op.block / M) : 1;
    const Scratch<C> kept(size * M * N);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / groups * op.block, last = std::min(op.rows, first + op.block);
      const int64_t from = item % groups * op.group, to = std::min(panels, from + op.group);
      int64_t d = 0;
      do {
        for (int64_t panel = from; panel < to; ++panel) {
          for (int64_t row = first; row < last; row += M) {
            const int64_t place = ((panel - from) * op.block + row - first) / M;
            C* memory = kept.get() + (size > 1 ? place * M * N : 0);
            outline<B>([&]() FF_INLINE_LAMBDA { tile(op, row, panel, d, std::min(d + op.pass, depth), memory); });
          }
        }
        d += op.pass;
      } while (d < depth);
    }
  }
};

// sums[client][group of columns][rank][columns of a group] += Σ_rows few[row, rank] wide[row, column] over a chunk, and
// out after the last. Items are (client, group).
template <class T>
struct FactorOf {
  using C = Compute<T>;
  const C* few;
  In wide;
  int64_t client, row, rows, rank, columns;  // client, row: the chunk's first; rows: of one client
  bool first, last;                          // whether the chunk has the first and the last of a client's rows
  bool transposed;                           // out is [columns, rank], else [rank, columns]
  C* sums;
  T* out;  // of the chunk's first client
};

template <class T, int B>
struct Factor {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, N = 3 * L, R = 4;

  template <int ranks, class Wide>
  FF_INLINE static void tile(const C* few, int64_t rank, const Wide* wide, int64_t stride, int64_t rows, C* sums) {
    V sum[ranks][3] = {};
    for (int64_t row = 0; row < rows; ++row, few += rank, wide += stride) {
      V x[3];
#pragma GCC unroll 3
      for (int w = 0; w < 3; ++w) x[w] = load<B>(wide + w * L);
#pragma GCC unroll 4
      for (int r = 0; r < ranks; ++r) {
#pragma GCC unroll 3
        for (int w = 0; w < 3; ++w) sum[r][w] += x[w] * few[r];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ranks; ++r) {
#pragma GCC unroll 3
      for (int w = 0; w < 3; ++w) {
        C* to = sums + r * N + w * L;
        store<B>(to, load<B>(to) + sum[r][w]);
      }
    }
  }

  template <class Wide>
  FF_INLINE static void tiles(const C* few, int64_t rank, const Wide* wide, int64_t stride, int64_t rows, C* sums) {
    int64_t r = 0;
    for (; r + R <= rank; r += R) {
      outline<B>([&]() FF_INLINE_LAMBDA { tile<R>(few + r, rank, wide, stride, rows, sums + r * N); });
    }
    if (r == rank) return;
    outline<B>([&]() FF_INLINE_LAMBDA {
      switch (rank - r) {
        case 3:
          return tile<3>(few + r, rank, wide, stride, rows, sums + r * N);
        case 2:
          return tile<2>(few + r, rank, wide, stride, rows, sums + r * N);
        default:
          return tile<1>(few + r, rank, wide, stride, rows, sums + r * N);
      }
    });
  }

  FF_INLINE static void run(const FactorOf<T>& op, int64_t begin, int64_t end) {
    const int64_t groups = ceil_div(op.columns, N);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / groups, column = item % groups * N, count = std::min<int64_t>(N, op.columns - column);
      C* sums = op.sums + item * op.rank * N;
      if (op.first) std::memset(sums, 0, op.rank * N * sizeof(C));
      const C* few = op.few + k * op.rows * op.rank;
      const T* wide = client<T>(op.wide, op.client + k) + op.row * op.columns + column;
      for (int64_t row = 0; row < op.rows; row += kSum) {
        const int64_t rows = std::min(kSum, op.rows - row);
        if (count == N) {
          tiles(few + row * op.rank, op.rank, wide + row * op.columns, op.columns, rows, sums);
        } else {
          alignas(64) C rest[kSum * N] = {};
          for (int64_t n = 0; n < rows; ++n) copy<B>(wide + (row + n) * op.columns, count, rest + n * N);
          tiles(few + row * op.rank, op.rank, rest, N, rows, sums);
        }
      }
      if (!op.last) continue;
      T* out = op.out + k * op.rank * op.columns;
      for (int64_t r = 0; r < op.rank; ++r) {
        if (!op.transposed) {
          copy<B>(sums + r * N, count, out + r * op.columns + column);
        } else {
          for (int64_t j = 0; j < count; ++j) out[(column + j) * op.rank + r] = from_compute<T>(sums[r * N + j]);
        }
      }
    }
  }
};

// The rows of a chunk as numbers to compute with: where they are or, of half precision, converted.
template <class T, int B>
struct ConvertRows {
  FF_INLINE static void run(const In& from, const Chunk& chunk, int64_t width, Compute<T>* out, int64_t begin,
                            int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const T* row = client<T>(from, chunk.client + n / chunk.rows_of_client);
      copy<B>(row + (chunk.row + n % chunk.rows_of_client) * width, width, out + n * width);
    }
  }
};

template <class T>
class RowsOf {
  using C = Compute<T>;
  static constexpr bool kConverts = !std::is_same_v<T, C>;

 public:
  RowsOf(const In& from, int64_t width, int64_t most)
      : from_(from), width_(width), rows_(most), converted_(kConverts ? most * width : 0) {}

  const C* const* of(ParallelFor parallel_for, const Chunk& chunk) {
    for (int64_t n = 0; n < chunk.rows(); ++n) {
      if constexpr (kConverts) {
        rows_[n] = converted_.get() + n * width_;
      } else {
        rows_[n] =
            client<T>(from_, chunk.client + n / chunk.rows_of_client) + (chunk.row + n % chunk.rows_of_client) * width_;
      }
    }
    if constexpr (kConverts) {
      parallel(parallel_for, chunk.rows(), ceil_div(16384, std::max<int64_t>(width_, 1)),
               [&](int64_t begin, int64_t end) {
                 dispatch<ConvertRows, T>(from_, chunk, width_, converted_.get(), begin, end);
               });
    }
    return rows_.data();
  }

 private:
  In from_;
  int64_t width_;
  std::vector<const C*> rows_;
  Scratch<C> converted_;
};

template <class T>
int64_t lanes() {
  return register_bytes() / sizeof(Compute<T>);
}

// How many rows of so many bytes the threads work on together: whole sums.
int64_t chunk_rows(int64_t bytes, int64_t threads) {
  const int64_t most = std::max<int64_t>(kSum, kChunk / std::max<int64_t>(bytes, 1));
  return ceil_div(most, kSum) * kSum * std::max<int64_t>(threads, 1);
}

template <class T>
void run(ParallelFor parallel_for, FewOf<T> op, int64_t clients) {
  op.block = 4 * tile_rows(register_bytes());
  const int64_t work = op.block * op.rank * (op.depth + 1);
  parallel(parallel_for, clients * ceil_div(op.rows, op.block), ceil_div(kLeastWork, work),
           [&](int64_t begin, int64_t end) { dispatch<Few, T>(op, begin, end); });
}

template <class T>
void run(ParallelFor parallel_for, ThroughOf<T> op) {
  const int64_t tile = tile_rows(register_bytes()), panel = 2 * lanes<T>();
  const int64_t terms = op.sigma ? op.depth : 0;
  op.pass = 2 * kDepth;
  const int64_t fit = kSecond / (std::clamp<int64_t>(terms, 1, op.pass) * sizeof(Compute<T>));
  op.block = std::max<int64_t>(fit / tile, 4) * tile;
  op.group = terms > op.pass ? 4 : 1;
  const int64_t work = op.block * op.group * panel * (terms + op.rank + 1);
  parallel(parallel_for, ceil_div(op.rows, op.block) * ceil_div(ceil_div(op.columns, panel), op.group),
           ceil_div(kLeastWork, work), [&](int64_t begin, int64_t end) { dispatch<Through, T>(op, begin, end); });
}

template <class T>
void run(ParallelFor parallel_for, const FactorOf<T>& op, int64_t clients) {
  const int64_t group = 3 * lanes<T>(), work = group * op.rank * (op.rows + 1);
  parallel(parallel_for, clients * ceil_div(op.columns, group), ceil_div(kLeastWork, work),
           [&](int64_t begin, int64_t end) { dispatch<Factor, T>(op, begin, end); });
}

}  // namespace

void adapter(const Adapter& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const int64_t i = op.inputs, o = op.outputs, r = op.rank, most = chunk_rows((i + o) * sizeof(C), op.threads);
    const int64_t rows = std::min(most, op.clients * op.rows);
    const int64_t together = op.sigma.client_stride ? 1 : std::min(op.clients, kClientsOfChunk * op.threads);
    const int64_t few_columns = (r <= lanes<T>() ? 1 : 2) * lanes<T>();
    Panels<T> sigma(op.sigma, o, op.sigma_row, i, op.sigma_column, 2 * lanes<T>(), 1);
    Panels<T> down(op.a, r, i, i, 1, few_columns, together), up(op.b, o, r, r, 1, 2 * lanes<T>(), together);
    RowsOf<T> x(op.x, i, rows), seen(op.seen, i, op.seen.data ? rows : 0);
    const Scratch<C> few(rows * r);
    const std::vector<C> zeros(r);
    in_chunks(op.clients, op.rows, most, together, [&](const Chunk& chunk) {
      const int64_t first = chunk.client * op.rows + chunk.row;
      const C* const* rows = x.of(parallel_for, chunk);
      if (r) {
        down.pack(parallel_for, chunk.client, chunk.clients);
        up.pack(parallel_for, chunk.client, chunk.clients);
        run(parallel_for,
            FewOf<T>{op.seen.data ? seen.of(parallel_for, chunk) : rows, chunk.rows_of_client, i, r, 0, down.data(),
                     down.stride(), C(op.scaling), few.get(), static_cast<T*>(op.hidden) + first * r},
            chunk.clients);
      }
      sigma.pack(parallel_for, chunk.client, 1);
      run(parallel_for,
          ThroughOf<T>{rows, few.get(), chunk.rows(), chunk.rows_of_client, i, r, o, 0, 0, 0, sigma.data(),
                       r ? up.data() : nullptr, up.stride(), client<T>(op.bias, chunk.client), op.bias.client_stride,
                       zeros.data(), static_cast<T*>(op.y) + first * o});
    });
  });
}

void adapter_backward(const AdapterBackward& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const int64_t i = op.inputs, o = op.outputs, r = op.rank, most = chunk_rows((i + o) * sizeof(C), op.threads);
    if (op.rows == 0 && op.da) std::memset(op.da, 0, op.clients * r * i * sizeof(T));
    if (op.rows == 0 && op.db) std::memset(op.db, 0, op.clients * r * o * sizeof(T));
    const int64_t rows = std::min(most, op.clients * op.rows);
    const int64_t together = op.sigma.client_stride ? 1 : std::min(op.clients, kClientsOfChunk * op.threads);
    const int64_t few_columns = (r <= lanes<T>() ? 1 : 2) * lanes<T>();
    Panels<T> sigma(op.sigma, i, op.sigma_column, o, op.sigma_row, 2 * lanes<T>(), 1);
    Panels<T> down(op.b, r, 1, o, r, few_columns, together), up(op.a, i, 1, r, i, 2 * lanes<T>(), together);
    RowsOf<T> grad(op.grad, o, rows);
    const int64_t group = 3 * lanes<T>();
    const Scratch<C> few(rows * r), hidden(op.db ? rows * r : 0);
    const Scratch<C> da(op.da ? together * ceil_div(i, group) * group * r : 0);
    const Scratch<C> db(op.db ? together * ceil_div(o, group) * group * r : 0);
    const std::vector<C> zeros(r);
    in_chunks(op.clients, op.rows, most, together, [&](const Chunk& chunk) {
      const int64_t first = chunk.client * op.rows + chunk.row;
      const C* const* rows = grad.of(parallel_for, chunk);
      if (r && (op.dx || op.dseen || op.da)) {
        down.pack(parallel_for, chunk.client, chunk.clients);
        run(parallel_for,
            FewOf<T>{rows, chunk.rows_of_client, o, r, 0, down.data(), down.stride(), C(op.scaling), few.get(),
                     nullptr},
            chunk.clients);
      }
      auto through = [&](bool with_sigma, bool with_factors, void* out) {
        if (!out) return;
        if (with_sigma) sigma.pack(parallel_for, chunk.client, 1);
        if (with_factors) up.pack(parallel_for, chunk.client, chunk.clients);
        run(parallel_for, ThroughOf<T>{rows, few.get(), chunk.rows(), chunk.rows_of_client, o, r, i, 0, 0, 0,
                                       with_sigma ? sigma.data() : nullptr, with_factors ? up.data() : nullptr,
                                       up.stride(), nullptr, 0, zeros.data(), static_cast<T*>(out) + first * i});
      };
      through(true, r && !op.own, op.dx);
      through(false, r, op.dseen);
      auto factor = [&](const C* few, const In& wide, int64_t columns, bool transposed, C* sums, void* out) {
        if (!out || !r) return;
        run(parallel_for,
            FactorOf<T>{few, wide, chunk.client, chunk.row, chunk.rows_of_client, r, columns, chunk.row == 0,
                        chunk.row + chunk.rows_of_client == op.rows, transposed, sums,
                        static_cast<T*>(out) + chunk.client * r * columns},
            chunk.clients);
      };
      factor(few.get(), op.seen, i, false, da.get(), op.da);
      if (op.db) {
        for (int64_t k = 0; k < chunk.clients; ++k) {
          const T* from = client<T>(op.hidden, chunk.client + k) + chunk.row * r;
          const int64_t count = chunk.rows_of_client * r;
          for (int64_t n = 0; n < count; ++n) hidden.get()[k * count + n] = to_compute(from[n]);
        }
      }
      factor(hidden.get(), op.grad, o, true, db.get(), op.db);
    });
  });
}

}  // namespace fastfact
