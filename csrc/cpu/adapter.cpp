// A frozen linear layer with the low-rank factors of many clients: σ, which they share, a [r, i] and b [o, r] of each.
//
// A thread takes some whole clients, or a part of one, at a time. It packs their rows into panels of a tile's height,
// of which a slice of the depth stays in the second cache while a panel of σ stays in the first. From the panels it
// makes the few numbers of each row, h = scaling · x aᵀ, then tiles of rows × columns, in whose registers the product
// with σ meets that of h and b, so that y is written once; backward also the sums over rows that are the gradients of
// the factors. A tile may hold rows of several clients.
#include <atomic>

#include "gemm.h"

namespace fastfact {
namespace {

constexpr int64_t kSum = 128;              // rows summed in registers before they are added to a factor's gradient
constexpr int64_t kSecond = 1 << 18;       // bytes of a slice of rows, which the second cache holds
constexpr int64_t kMostRows = 512;         // that are packed at once
constexpr int64_t kLeastRows = 96;         // of a part, where a client is cut for want of others
constexpr int64_t kParts = 8, kMost = 64;  // into which a lone client is cut; at most
constexpr int64_t kClientsOfBlock = 16;
constexpr int64_t kTogether = 4;         // panels of columns whose sums are kept from slice to slice
constexpr int64_t kLeastColumns = 128;   // of a group, where the columns are cut for want of rows
constexpr int64_t kLeastWork = 1 << 19;  // multiplications for a thread

// What is multiplied at once: the rows of some whole clients, or of a part of one.
struct Block {
  int64_t client, clients, row, rows_of_client;
  int64_t rows() const { return clients * rows_of_client; }
};

// How work is handed out: items of `together` clients or `parts` items of a client, times groups of columns. No sum
// depends on `together` and `groups`, which follow the threads; `parts` follows from the shape alone.
struct Cut {
  int64_t clients, rows, tile, together, parts, groups, most_rows;

  Cut(int64_t clients, int64_t rows, int64_t depth, int64_t columns, int64_t rank, int64_t element, int64_t tile,
      int64_t threads)
      : clients(clients), rows(rows), tile(tile) {
    const int64_t slice = ceil_div(std::max<int64_t>(depth, 1), ceil_div(std::max<int64_t>(depth, 1), kDepth));
    most_rows = std::max(std::min(kSecond / (slice * element), kMostRows) / tile, int64_t(1)) * tile;
    parts = std::clamp<int64_t>(rows / kLeastRows, 1, std::max<int64_t>(kParts / std::max<int64_t>(clients, 1), 1));
    while (parts & (parts - 1)) parts &= parts - 1;
    parts = std::clamp(ceil_div(rows, most_rows), parts, std::max(parts, kMost));
    together = parts > 1 ? 1 : std::clamp<int64_t>(most_rows / std::max<int64_t>(rows, 1), 1, kClientsOfBlock);
    if (together > 1) {
      const int64_t items = ceil_div(ceil_div(clients, together), threads) * threads;
      together = std::max<int64_t>(ceil_div(clients, items), 1);
    }
    const int64_t most = std::max<int64_t>(columns / std::max(kLeastColumns, 4 * rank), 1);
    groups = 1;
    while (groups < most && blocks() * groups % threads && blocks() * groups < 8 * threads) ++groups;
  }

  int64_t blocks() const { return parts > 1 ? clients * parts : ceil_div(clients, together); }
  int64_t items() const { return blocks() * groups; }
  int64_t group_of(int64_t item) const { return item % groups; }
  int64_t part_of(int64_t item) const { return item / groups % parts; }

  Block block(int64_t item) const {
    const int64_t at = item / groups;
    if (parts == 1) return {at * together, std::min(together, clients - at * together), 0, rows};
    return {at / parts, 1, begin(at % parts), begin(at % parts + 1) - begin(at % parts)};
  }

  // The first row of a part: parts are whole tiles but for the last row's.
  int64_t begin(int64_t part) const { return std::min(rows, ceil_div(ceil_div(rows, tile) * part, parts) * tile); }
  int64_t rows_of_part() const { return std::min(rows, ceil_div(ceil_div(rows, tile), parts) * tile); }

  int64_t most_clients() const { return parts > 1 ? 1 : together; }
};

// A matrix a client whose columns are packed into panels.
struct Packing {
  Operand from;
  int width;
  int64_t panels, depth;

  // Element (column j, depth d) is j · column_step + d · depth_step behind the first.
  Packing(const In& data, int64_t columns, int64_t column_step, int64_t depth, int64_t depth_step, int width)
      : from{data, steps(columns, column_step), steps(depth, depth_step)},
        width(width),
        panels(ceil_div(columns, width)),
        depth(depth) {}

  int64_t panel() const { return width * depth; }
  int64_t size() const { return panels * panel(); }
};

// The rows of a block, `depth` long, as [slice of the depth][tile][depth of the slice][rows of a tile].
template <class T, int B>
struct PackRows {
  using C = Compute<T>;
  static constexpr int L = kLanes<T, B>, M = tile_rows(B);

  FF_INLINE static void run(const In& from, const Block& block, int64_t depth, int64_t slice, C* to) {
    outline<B>([&]() FF_INLINE_LAMBDA { pack(from, block, depth, slice, to); });
  }

  FF_INLINE static void pack(const In& from, const Block& block, int64_t depth, int64_t slice, C* to) {
    const int64_t rows = block.rows(), tiles = ceil_div(rows, M);
    const T* data = client<T>(from, block.client) + block.row * depth;
    for (int64_t d0 = 0; d0 < depth; d0 += slice) {
      const int64_t n = std::min(slice, depth - d0);
      for (int64_t tile = 0; tile < tiles; ++tile, to += n * M) {
        const int64_t count = std::min<int64_t>(M, rows - tile * M);
        int64_t row[M];
        for (int64_t m = 0; m < count; ++m) {
          const int64_t k = (tile * M + m) / block.rows_of_client, at = (tile * M + m) % block.rows_of_client;
          row[m] = k * from.client_stride + at * depth;
        }
        int64_t d = 0;
        if (count == M) {
          for (; d + L <= n; d += L) {
            for (int64_t m = 0; m < M; ++m) __builtin_prefetch(data + row[m] + d0 + d + M * depth);
            transpose(data + d0 + d, row, to + d * M);
          }
        }
        for (; d < n; ++d) {
          for (int64_t m = 0; m < M; ++m) to[d * M + m] = m < count ? to_compute(data[row[m] + d0 + d]) : C(0);
        }
      }
    }
  }

  // L elements of each row to L rows of M. What a store writes beyond its row is written again later.
  FF_INLINE static void transpose(const T* data, const int64_t* row, C* to) {
#pragma GCC unroll 4
    for (int j = (M - 1) / L * L; j >= 0; j -= L) {
      Vec<T, B> lines[L];
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) lines[l] = j + l < M ? load<B>(data + row[j + l]) : Vec<T, B>{};
      PackPanels<T, B>::template transpose_lanes<L / 2>(lines);
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) store<B>(to + l * M + j, lines[l]);
    }
  }
};

// A tile of R packed panels of M rows × W registers of columns, whose sums are kept in registers.
template <class T, int B, int W, int R>
struct Tile {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, N = W * L, M = tile_rows(B), All = R * M * W;

  V sums[All];

  FF_INLINE void clear() {
#pragma GCC unroll 32
    for (int e = 0; e < All; ++e) sums[e] = V{};
  }

  // += Σ_d left[d][row] · right[d], the panels of rows `step` apart
  FF_INLINE void add(const C* left, int64_t step, const C* right, int64_t terms) {
    for (int64_t d = 0; d < terms; ++d, left += M, right += N) {
      const V first = load<B>(right), second = load<B>(right + N - L);
#pragma GCC unroll 32
      for (int e = 0; e < All; ++e) {
        const int row = e / W;
        sums[e] += (e % W ? second : first) * left[(row < M ? 0 : step) + row % M];
      }
    }
  }

  FF_INLINE void add(const C* from) {
#pragma GCC unroll 32
    for (int e = 0; e < All; ++e) sums[e] += load<B>(from + e * L);
  }

  FF_INLINE void put(C* to) const {
#pragma GCC unroll 32
    for (int e = 0; e < All; ++e) store<B>(to + e * L, sums[e]);
  }
};

// What one pass over the rows does: forward, or backward with dy in the place of x, b in that of a and a in that of b.
template <class T>
struct Pass {
  using C = Compute<T>;
  int64_t rows, depth, columns, rank;  // rows: of one client
  In x, seen;                          // [clients, rows, depth]; h is of `seen` or, where that is null, of x
  const Packing &down, &up;            // h = scale · seen downᵀ, and what it is multiplied by
  const Packing* frozen;               // σ, or null
  const C* sigma;                      // its panels, or null: each is made when it is used, which is once
  int64_t slice;                       // depth of x worked on at once
  C scale;
  In bias;
  T* hidden;       // h [clients, rows, rank], or null
  T *out, *apart;  // [clients, rows, columns]: with σ, and that of h alone; or null
  bool joined;     // whether what h adds is in `out`
  // backward, or null: da [clients, rank, columns] of h and `inputs`, db [clients, depth, rank] of `kept` and x
  In inputs, kept;
  T *da, *db;
  C *da_parts, *db_parts;  // sums [client][part][group of columns][rank][columns of a group] where clients are cut
};

// sums [rank][columns of a group] += Σ_rows few[row, rank] wide[row, column]
template <class T, int B>
struct Factor {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, N = 3 * L, R = 4;

  // `ahead`: whether the columns that come next are not in the first cache yet
  template <int ranks, bool ahead, class Wide>
  FF_INLINE static void tile(const C* few, int64_t rank, const Wide* wide, int64_t stride, int64_t rows, C* sums) {
    V sum[ranks][3] = {};
    for (int64_t row = 0; row < rows; ++row, few += rank, wide += stride) {
      if (ahead) __builtin_prefetch(wide + N), __builtin_prefetch(wide + 2 * N - 1);
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
      outline<B>([&]() FF_INLINE_LAMBDA {
        if (r == 0) {
          tile<R, true>(few + r, rank, wide, stride, rows, sums + r * N);
        } else {
          tile<R, false>(few + r, rank, wide, stride, rows, sums + r * N);
        }
      });
    }
    if (r == rank) return;
    outline<B>([&]() FF_INLINE_LAMBDA {
      switch (rank - r) {
        case 3:
          return tile<3, false>(few + r, rank, wide, stride, rows, sums + r * N);
        case 2:
          return tile<2, false>(few + r, rank, wide, stride, rows, sums + r * N);
        default:
          return tile<1, false>(few + r, rank, wide, stride, rows, sums + r * N);
      }
    });
  }

  FF_INLINE static void add(const C* few, int64_t rank, const T* wide, int64_t columns, int64_t column, int64_t rows,
                            C* sums) {
    const int64_t count = std::min<int64_t>(N, columns - column);
    for (int64_t row = 0; row < rows; row += kSum) {
      const int64_t n = std::min(kSum, rows - row);
      const T* from = wide + row * columns + column;
      if (count == N) {
        tiles(few + row * rank, rank, from, columns, n, sums);
      } else {
        alignas(64) C rest[kSum * N] = {};
        for (int64_t m = 0; m < n; ++m) copy<B>(from + m * columns, count, rest + m * N);
        tiles(few + row * rank, rank, rest, N, n, sums);
      }
    }
  }

  // out [rank, columns], or transposed [columns, rank]
  FF_INLINE static void write(const C* sums, int64_t rank, int64_t columns, int64_t column, bool transposed, T* out) {
    const int64_t count = std::min<int64_t>(N, columns - column);
    for (int64_t r = 0; r < rank; ++r) {
      if (!transposed) {
        copy<B>(sums + r * N, count, out + r * columns + column);
      } else {
        for (int64_t j = 0; j < count; ++j) out[(column + j) * rank + r] = from_compute<T>(sums[r * N + j]);
      }
    }
  }
};

template <class T, int B>
struct Work {
  using C = Compute<T>;
  using V = Vec<T, B>;
  static constexpr int L = kLanes<T, B>, M = tile_rows(B), N = 2 * L, kLine = 64 / sizeof(C);

  const Pass<T>& op;
  const Cut& cut;
  const int64_t most_tiles, segments;
  // Packed rows and those of `seen`; h of each row, and of each tile and client it has rows of [tile +
  // client][rank][M], zeros for rows of others; the packed factors; panels of σ; sums of tiles; of a factor.
  const Scratch<C> x, seen, few, few_of_tile, down, up, panels, kept, sums;

  FF_INLINE Work(const Pass<T>& op, const Cut& cut)
      : op(op),
        cut(cut),
        most_tiles(ceil_div(most_rows(cut), M)),
        segments(most_tiles + cut.most_clients()),
        x(most_tiles * M * op.depth + L),
        seen(op.seen.data ? most_tiles * M * op.depth + L : 0),
        few(most_rows(cut) * op.rank),
        few_of_tile(segments * op.rank * M),
        down(cut.most_clients() * op.down.size()),
        up(cut.most_clients() * op.up.size()),
        panels(op.frozen && !op.sigma ? kTogether * N * op.depth : 0),
        kept(op.slice < op.depth ? most_tiles * kTogether * M * N : 1),
        sums(op.rank * Factor<T, B>::N) {}

  static int64_t most_rows(const Cut& cut) {
    return cut.parts > 1 ? std::min(cut.most_rows, cut.rows_of_part()) : cut.together * cut.rows;
  }

  // h of the rows of a block, one client after another. Of one register of columns two tiles at a time, so that there
  // are sums enough to wait for.
  template <int W>
  FF_INLINE void make_few(const Block& block, const C* from, T* hidden) const {
    constexpr int R = W == 1 && B < 64 ? 2 : 1;
    const int64_t all = ceil_div(block.rows(), M);
    for (int64_t k = 0; k < block.clients; ++k) {
      const int64_t begin = k * block.rows_of_client, end = begin + block.rows_of_client;
      for (int64_t column = 0; column < op.rank; column += W * L) {
        const C* right = down.get() + k * op.down.size() + column * op.depth;
        const int64_t count = std::min<int64_t>(W * L, op.rank - column);
        for (int64_t tile = begin / M; tile * M < end; tile += R) {
          const bool pair = R == 2 && (tile + 1) * M < end;
          alignas(64) C found[R * M * N];
          outline<B>([&]() FF_INLINE_LAMBDA {
            Tile<T, B, W, R> sum;
            sum.clear();
            for (int64_t d = 0; d < op.depth; d += op.slice) {
              const int64_t terms = std::min(op.slice, op.depth - d);
              if (d) sum.put(found), sum.clear();
              sum.add(from + d * all * M + tile * terms * M, pair ? terms * M : 0, right + d * W * L, terms);
              if (d) sum.add(found);
            }
#pragma GCC unroll 32
            for (int e = 0; e < R * M * W; ++e) sum.sums[e] *= op.scale;
            sum.put(found);
          });
          for (int64_t t = tile; t < tile + 1 + pair; ++t) {
            C* packed = few_of_tile.get() + ((t + k) * op.rank + column) * M;
            for (int64_t m = 0; m < M; ++m) {
              const int64_t row = t * M + m;
              const C* sum = found + ((t - tile) * M + m) * W * L;
              const bool mine = row >= begin && row < end;
              for (int64_t j = 0; j < count; ++j) packed[j * M + m] = mine ? to_compute(from_compute<T>(sum[j])) : C(0);
              if (!mine) continue;
              if (hidden) copy<B>(sum, count, hidden + row * op.rank + column);
              for (int64_t j = 0; j < count; ++j) few.get()[row * op.rank + column + j] = packed[j * M + m];
            }
          }
        }
      }
    }
  }

  // One tile of `out` from the slice `now` of σ at d, `memory` holding the sums of those before it.
  FF_INLINE void make_tile(const Block& block, const C* now, int64_t tile, int64_t panel, int64_t d, bool joined,
                           C* memory, T* out) const {
    const int64_t rows = block.rows(), column = panel * N, first = tile * M, last = std::min(first + M, rows);
    Tile<T, B, 2, 1> sum;
    sum.clear();
    if (now) {
      const int64_t terms = std::min(op.slice, op.depth - d);
      sum.add(x.get() + d * ceil_div(rows, M) * M + tile * terms * M, 0, now, terms);
      if (d) sum.add(memory);
      if (d + terms < op.depth) return sum.put(memory);
    }
    const int64_t first_client = first / block.rows_of_client, last_client = (last - 1) / block.rows_of_client;
    if (joined) {
      for (int64_t k = first_client; k <= last_client; ++k) {
        sum.add(few_of_tile.get() + (tile + k) * op.rank * M, 0, up.get() + k * op.up.size() + column * op.rank,
                op.rank);
      }
    }
    const int64_t count = std::min<int64_t>(N, op.columns - column);
    const T* bias = now && op.bias.data ? client<T>(op.bias, block.client + first_client) + column : nullptr;
    out += first * op.columns + column;
    if (count == N && first + M == last && (!bias || !op.bias.client_stride || first_client == last_client)) {
      V b0 = {}, b1 = {};
      if (bias) b0 = load<B>(bias), b1 = load<B>(bias + L);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        store<B>(out + m * op.columns, sum.sums[2 * m] + b0);
        store<B>(out + m * op.columns + L, sum.sums[2 * m + 1] + b1);
      }
      return;
    }
    alignas(64) C all[M * N];
    sum.put(all);
    for (int64_t m = 0; first + m < last; ++m) {
      if (bias) bias = client<T>(op.bias, block.client + (first + m) / block.rows_of_client) + column;
      for (int64_t j = 0; j < count; ++j) {
        out[m * op.columns + j] = from_compute<T>(all[m * N + j] + (bias ? to_compute(bias[j]) : C(0)));
      }
    }
  }

  FF_INLINE void make_columns(const Block& block, bool with_sigma, bool joined, int64_t from, int64_t to,
                              T* out) const {
    const int64_t tiles = ceil_div(block.rows(), M), depth = with_sigma ? std::max<int64_t>(op.depth, 1) : 1;
    for (int64_t some = from; some < to; some += kTogether) {
      const int64_t end = std::min(to, some + kTogether);
      const C* sigma = op.sigma ? op.sigma + some * N * op.depth : panels.get();
      if (with_sigma && !op.sigma)
        PackPanels<T, B>::run(op.frozen->from, block.client, N, panels.get() - some * N * op.depth, some, end);
      for (int64_t d = 0; d < depth; d += op.slice) {
        const int64_t terms = std::min(op.slice, op.depth - d);
        for (int64_t panel = some; panel < end; ++panel) {
          const C* now = with_sigma ? sigma + ((panel - some) * op.depth + d) * N : nullptr;
          // The part of σ that comes next is fetched while this one is used.
          const C* next =
              with_sigma ? sigma + (panel + 1 < end ? (panel + 1 - some) * op.depth + d : d + terms) * N : nullptr;
          const int64_t share = with_sigma ? ceil_div(terms * N, tiles) : 0;
          for (int64_t tile = 0; tile < tiles; ++tile) {
            C* memory = kept.get() + (op.slice < depth ? ((panel - some) * most_tiles + tile) * M * N : 0);
            for (int64_t at = 0; at < share; at += kLine) __builtin_prefetch(next + tile * share + at);
            outline<B>([&]() FF_INLINE_LAMBDA { make_tile(block, now, tile, panel, d, joined, memory, out); });
          }
        }
      }
    }
  }

  // The columns of group `at` of the gradient of a factor from a block, `few` its rows.
  FF_INLINE void make_factor(const Block& block, const In& wide, int64_t columns, bool transposed, int64_t at, C* parts,
                             bool starts, T* out) const {
    using F = Factor<T, B>;
    const int64_t groups = ceil_div(columns, F::N);
    for (int64_t k = 0; k < block.clients; ++k) {
      for (int64_t group = groups * at / cut.groups; group < groups * (at + 1) / cut.groups; ++group) {
        C* to = parts ? parts + group * op.rank * F::N : sums.get();
        if (!parts || starts) std::memset(to, 0, op.rank * F::N * sizeof(C));
        F::add(few.get() + k * block.rows_of_client * op.rank, op.rank,
               client<T>(wide, block.client + k) + block.row * columns, columns, group * F::N, block.rows_of_client,
               to);
        if (!parts) F::write(to, op.rank, columns, group * F::N, transposed, out + k * op.rank * columns);
      }
    }
  }

  FF_INLINE void run(const Block& block, int64_t group, int64_t part, bool starts) const {
    const int64_t first = block.client * op.rows + block.row, rows = block.rows();
    const int64_t from = op.up.panels * group / cut.groups, to = op.up.panels * (group + 1) / cut.groups;
    if (rows) PackRows<T, B>::run(op.x, block, op.depth, op.slice, x.get());
    if (rows && op.rank) {
      const C* source = x.get();
      if (op.seen.data) {
        PackRows<T, B>::run(op.seen, block, op.depth, op.slice, seen.get());
        source = seen.get();
      }
      if (starts) {
        PackPanels<T, B>::run(op.down.from, block.client, op.down.width, down.get(), 0, block.clients * op.down.panels);
        if (op.out || op.apart) {
          for (int64_t k = 0; k < block.clients; ++k) {
            PackPanels<T, B>::run(op.up.from, block.client, op.up.width, up.get(), k * op.up.panels + from,
                                  k * op.up.panels + to);
          }
        }
      }
      T* hidden = op.hidden && group == 0 ? op.hidden + first * op.rank : nullptr;
      if (op.rank <= L) {
        make_few<1>(block, source, hidden);
      } else {
        make_few<2>(block, source, hidden);
      }
    }
    auto columns = [&](bool with_sigma, bool joined, T* out) FF_INLINE_LAMBDA {
      if (!out || !rows) return;
      outline<B>([&]()
                     FF_INLINE_LAMBDA { make_columns(block, with_sigma, joined, from, to, out + first * op.columns); });
    };
    columns(op.frozen, op.rank && op.joined, op.out);
    columns(false, op.rank, op.apart);
    if (!op.rank) return;
    const int64_t item = block.client * cut.parts + part;
    auto parts = [&](C* sums, int64_t columns) {
      const int64_t size = ceil_div(columns, Factor<T, B>::N) * Factor<T, B>::N * op.rank;
      return cut.parts > 1 ? sums + item * size : nullptr;
    };
    if (op.da) {
      make_factor(block, op.inputs, op.columns, false, group, parts(op.da_parts, op.columns), starts,
                  op.da + block.client * op.rank * op.columns);
    }
    if (op.db) {
      const int64_t size = block.rows_of_client * op.rank;
      for (int64_t k = 0; k < block.clients; ++k) {
        copy<B>(client<T>(op.kept, block.client + k) + block.row * op.rank, size, few.get() + k * size);
      }
      make_factor(block, op.x, op.depth, true, group, parts(op.db_parts, op.depth), starts,
                  op.db + block.client * op.rank * op.depth);
    }
  }
};

template <class T, int B>
struct RunPass {
  FF_INLINE static void run(const Pass<T>& op, const Cut& cut, std::atomic<int64_t>* next) {
    const Work<T, B> work(op, cut);
    for (int64_t item = (*next)++; item < cut.items(); item = (*next)++) {
      const Block all = cut.block(item);
      if (cut.parts == 1) {
        work.run(all, cut.group_of(item), 0, true);
        continue;
      }
      int64_t row = 0;
      do {
        const int64_t rows = std::min(cut.most_rows, all.rows_of_client - row);
        work.run({all.client, 1, all.row + row, rows}, cut.group_of(item), cut.part_of(item), row == 0);
        row += cut.most_rows;
      } while (row < all.rows_of_client);
    }
  }
};

// The gradient of a factor from the sums of parts, added in order. Items are (client, group of columns).
template <class T, int B>
struct AddParts {
  FF_INLINE static void run(const Compute<T>* sums, int64_t parts, int64_t rank, int64_t columns, bool transposed,
                            T* out, int64_t begin, int64_t end) {
    using F = Factor<T, B>;
    const int64_t groups = ceil_div(columns, F::N), size = rank * F::N;
    const Scratch<Compute<T>> total(size);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = item / groups, group = item % groups;
      const Compute<T>* from = sums + (k * parts * groups + group) * size;
      std::memcpy(total.get(), from, size * sizeof(Compute<T>));
      for (int64_t part = 1; part < parts; ++part) {
        for (int64_t j = 0; j < size; ++j) total.get()[j] += from[part * groups * size + j];
      }
      F::write(total.get(), rank, columns, group * F::N, transposed, out + k * rank * columns);
    }
  }
};

template <class T>
int64_t lanes() {
  return register_bytes() / sizeof(Compute<T>);
}

// The panels of σ, made by all threads.
template <class T>
void pack_all(ParallelFor parallel_for, const Packing& packing, Compute<T>* to) {
  parallel(
      parallel_for, packing.panels, ceil_div(16384, std::max<int64_t>(packing.panel(), 1)),
      [&](int64_t begin, int64_t end) { dispatch<PackPanels, T>(packing.from, 0, packing.width, to, begin, end); });
}

// Clients that share σ.
template <class T>
void run(ParallelFor parallel_for, Pass<T> op, int64_t clients, int64_t threads) {
  using C = Compute<T>;
  if (clients == 0) return;
  const int64_t work =
      clients * op.rows * ((op.frozen ? op.depth : 0) * op.columns + op.rank * (op.depth + op.columns));
  threads = std::clamp<int64_t>(work / kLeastWork, 1, std::max<int64_t>(threads, 1));
  const Cut cut(clients, op.rows, op.depth, op.columns, op.rank, sizeof(C), tile_rows(register_bytes()), threads);
  op.slice = ceil_div(std::max<int64_t>(op.depth, 1), ceil_div(std::max<int64_t>(op.depth, 1), kDepth));
  const int64_t group = 3 * lanes<T>(), parts = cut.parts > 1 ? clients * cut.parts : 0;
  const bool shared = op.frozen && cut.blocks() > 1;
  const Scratch<C> packed(shared ? op.frozen->size() : 0);
  const Scratch<C> da(op.da ? parts * ceil_div(op.columns, group) * group * op.rank : 0);
  const Scratch<C> db(op.db ? parts * ceil_div(op.depth, group) * group * op.rank : 0);
  if (shared) pack_all<T>(parallel_for, *op.frozen, packed.get());
  op.sigma = shared ? packed.get() : nullptr, op.da_parts = da.get(), op.db_parts = db.get();
  std::atomic<int64_t> next{0};
  parallel(parallel_for, std::min(threads, cut.items()), 1,
           [&](int64_t, int64_t) { dispatch<RunPass, T>(op, cut, &next); });
  auto add_parts = [&](const C* sums, int64_t columns, bool transposed, T* out) {
    if (!out || !parts) return;
    parallel(parallel_for, clients * ceil_div(columns, group), ceil_div(kLeastWork, group * op.rank * cut.parts + 1),
             [&](int64_t begin, int64_t end) {
               dispatch<AddParts, T>(sums, cut.parts, op.rank, columns, transposed, out, begin, end);
             });
  };
  add_parts(da.get(), op.columns, false, op.da);
  add_parts(db.get(), op.depth, true, op.db);
}

template <class T>
T* offset(void* data, int64_t elements) {
  return data ? static_cast<T*>(data) + elements : nullptr;
}

In from_client(const In& in, int64_t k, int64_t element) {
  return {in.data ? static_cast<const char*>(in.data) + k * in.client_stride * element : nullptr, in.client_stride};
}

// body(first client, how many) for all that share σ
template <class F>
void of_one_sigma(const In& sigma, int64_t clients, const F& body) {
  if (!sigma.client_stride) return body(0, clients);
  for (int64_t k = 0; k < clients; ++k) body(k, 1);
}

}  // namespace

void adapter(const Adapter& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    const int64_t i = op.inputs, o = op.outputs, r = op.rank, wide = 2 * lanes<T>();
    of_one_sigma(op.sigma, op.clients, [&](int64_t k, int64_t clients) {
      auto in = [&](const In& data) { return from_client(data, k, sizeof(T)); };
      const Packing sigma(in(op.sigma), o, op.sigma_row, i, op.sigma_column, wide);
      const Packing down(in(op.a), r, i, i, 1, r <= lanes<T>() ? lanes<T>() : wide), up(in(op.b), o, r, r, 1, wide);
      Pass<T> pass{op.rows, i, o, r, in(op.x), in(op.seen), down, up};
      pass.scale = op.scaling, pass.bias = in(op.bias), pass.joined = true;
      pass.hidden = offset<T>(op.hidden, k * op.rows * r), pass.out = offset<T>(op.y, k * op.rows * o);
      pass.frozen = &sigma;
      run(parallel_for, pass, clients, op.threads);
    });
  });
}

void adapter_backward(const AdapterBackward& op, ParallelFor parallel_for) {
  with_type(op.type, [&](auto type) {
    using T = decltype(type);
    const int64_t i = op.inputs, o = op.outputs, r = op.rank, wide = 2 * lanes<T>();
    of_one_sigma(op.sigma, op.clients, [&](int64_t k, int64_t clients) {
      auto in = [&](const In& data) { return from_client(data, k, sizeof(T)); };
      const Packing sigma(in(op.sigma), i, op.sigma_column, o, op.sigma_row, wide);
      const Packing down(in(op.b), r, 1, o, r, r <= lanes<T>() ? lanes<T>() : wide), up(in(op.a), i, 1, r, i, wide);
      Pass<T> pass{op.rows, o, i, r, in(op.grad), {}, down, up};
      pass.scale = op.scaling, pass.joined = !op.own;
      pass.out = offset<T>(op.dx, k * op.rows * i), pass.apart = offset<T>(op.dseen, k * op.rows * i);
      pass.inputs = in(op.seen), pass.kept = in(op.hidden);
      pass.da = offset<T>(op.da, k * r * i), pass.db = offset<T>(op.db, k * r * o);
      pass.frozen = op.dx ? &sigma : nullptr;
      run(parallel_for, pass, clients, op.threads);
    });
  });
}

}  // namespace fastfact
