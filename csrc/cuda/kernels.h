// The CUDA kernels as plain functions on device pointers and a stream. Each returns a cudaError_t.
#pragma once
#include <cstdint>

namespace fastfact_cuda {

enum Type : int { kFloat, kDouble, kBFloat16, kHalf };
enum Layout : int64_t { kLinear, kSpatial, kKernel, kView, kSeparable };

// A tensor whose slice of each client is dense; the client stride is 0 where the clients share it.
struct Slices {
  void* data;
  int64_t client;
};

struct Size {
  int64_t o, i, kh, kw;
  int64_t numel() const { return o * i * kh * kw; }
};

// Every weight op sees W as a matrix: rows are the index of one factor, columns that of the other. Position e of a
// side has digits (e / radix, e % radix); its address is digits * (stride1, stride0), and it belongs to element
// digits * (factor1, factor0) of the factor. Positions are numbered so that neighbours lie close in memory.
struct Side {
  int64_t size, radix, stride1, stride0, factor1, factor0;
};

// The side whose factor index is major_digit * minor + minor_digit.
inline Side make_side(int64_t major, int64_t minor, int64_t stride1, int64_t stride0) {
  const int64_t size = major * minor, whole = size > 0 ? size : 1;
  if (major == 1 || stride1 == minor * stride0) return {size, whole, 0, stride0, whole, 1};
  if (minor == 1) return {size, whole, 0, stride1, whole, 1};
  if (stride1 < stride0) return {size, major, stride0, stride1, 1, minor};
  return {size, minor, stride1, stride0, minor, 1};
}

struct View {
  Side rows, columns;
};

// `strides` are those of W[o, i, ky, kx]; the view layouts need W contiguous.
inline View rank1_view(int64_t layout, const Size& n, const int64_t strides[4]) {
  const int64_t so = strides[0], si = strides[1], sh = strides[2], sw = strides[3];
  if (layout == kLinear) return {make_side(1, n.i, 0, si), make_side(1, n.o, 0, so)};
  if (layout == kSpatial) return {make_side(n.kh, n.kw, sh, sw), make_side(n.o, n.i, so, si)};
  if (layout == kKernel) return {make_side(n.i, n.kh, si, sh), make_side(n.o, n.kw, so, sw)};
  return {make_side(1, n.kh * n.kw, 0, n.o * n.i), make_side(1, n.o * n.i, 0, 1)};
}

inline View lowrank_view(int64_t layout, const Size& n, const int64_t strides[4]) {
  if (layout == kSeparable) {
    return {make_side(n.i, n.kh, strides[1], strides[2]), make_side(n.o, n.kw, strides[0], strides[3])};
  }
  return {make_side(1, n.o * n.kh, 0, n.i * n.kw), make_side(1, n.i * n.kw, 0, 1)};
}

// The two kernel axes must lie as one in memory.
inline View hadamard_view(const Size& n, const int64_t strides[4]) {
  return {make_side(1, n.o, 0, strides[0]),
          make_side(n.i, n.kh * n.kw, strides[1], n.kw > 1 ? strides[3] : strides[2])};
}

// Where mu is not zero: bit j of word w is set where element 32 w + j of a client's W [o, i, kh, kw] is, `start` is the
// number of those before word w. The client stride counts words; it is 0 where the clients share it.
struct alignas(8) SupportWord {
  uint32_t set, start;
};
struct Support {
  const SupportWord* words;
  int64_t client;
  uint32_t count;  // of each client's values: positions that are not ascending may count more
};
inline int64_t support_words(int64_t n) { return (n + 31) / 32; }
// The support of ascending positions [count] of each client in a W of n elements.
int support(Slices index, int64_t count, SupportWord* words, int64_t clients, int64_t n, void* stream);

// W = sum_r u v + mu into `out` (dense slices, contiguous or channels_last); `mu` lies like `out`, or its data is null,
// or where `support.words` is set it has the values there.
int rank1_weight(Type type, void* out, Slices mu, Support support, Slices u, Slices v, int64_t layout,
                 bool channels_last, Size size, int64_t rank, int64_t clients, void* stream);

// Bytes that rank1_weight_backward needs for its partial sums.
int64_t rank1_workspace(Type type, const View& view, int64_t rank, int64_t clients, bool need_u, bool need_v);
// `du`, `dv` (each may be null) from dW laid out as `view` says, and dW on the support where `support.words` is set.
int rank1_weight_backward(Type type, Slices grad, Slices u, Slices v, void* du, void* dv, Slices dmu, Support support,
                          void* workspace, const View& view, int64_t layout, const Size& size, int64_t rank,
                          int64_t clients, void* stream);

// A factor: element (position, r) at position * row + r * rank_stride.
struct Factor {
  void* data;
  int64_t client, row, rank_stride, rank;
};

// W = dense + scaling * x1 y1, or (x1 y1)(x2 y2 + plus) where x2.data is set; `dense` lies like `out`, or is null.
int product(Type type, Slices out, Slices dense, Factor x1, Factor y1, Factor x2, Factor y2, double scaling,
            double plus, const View& view, int64_t clients, void* stream);

// Bytes that contract needs for its partial sums.
int64_t contract_workspace(Type type, const View& view, int64_t width, int64_t clients);
// out[m, c] = scaling * sum_n dW[m, n] Q[m, n] factor[n, c] with Q = x y + plus, or 1 where x.data is null;
// out[m, c] is written at m * out_row + c * out_column.
int contract(Type type, void* out, int64_t out_row, int64_t out_column, Slices grad, Factor x, Factor y, Factor factor,
             double scaling, double plus, const View& view, void* workspace, int64_t clients, void* stream);

// A product m nᵀ of two factors, and where its gradients go, each laid out as its factor, which is contiguous.
struct Outer {
  Factor m, n;
  void *m_out, *n_out;
};
// Whether thin_backward, which reads dW once, costs less than contract for each factor and fits the current device.
bool thin_pays(Type type, int64_t rank, int count);
// Bytes that thin_backward needs for its partial sums.
int64_t thin_workspace(Type type, Slices grad, const View& view, const Outer* products, int count, int64_t clients);
// The gradients of W = scaling * m nᵀ, or (count 2) of W = scaling * (m nᵀ of the first) (m nᵀ of the second + plus).
int thin_backward(Type type, Slices grad, const Outer* products, int count, double scaling, double plus,
                  const View& view, void* workspace, int64_t clients, void* stream);

struct Step {
  double lr, momentum, weight_decay;
  bool proximal;
};
// One tensor of a group: dense, all three laid out alike; `momentum` may be null.
struct Group {
  void* param;
  const void* grad;
  void* momentum;
  int64_t numel;
  double l1;
};
int prox_sgd_step(Type type, const Group* groups, int64_t count, Step step, void* stream);

constexpr int64_t kChunk = 1024;
inline int64_t bitmap_chunks(int64_t n) { return (n + kChunk - 1) / kChunk; }
constexpr int kSegment = 1024;
inline int64_t bitmap_segments(int64_t chunks) { return (chunks + kSegment - 1) / kSegment; }
// Where the values of a chunk begin: [chunks] within its segment of `kSegment` chunks, [segments + 1] that of the
// segment.
struct Offsets {
  int32_t* in_segment;
  int64_t* of_segment;
};

// Bits and nonzeros of each chunk of each row; with `maxima` also the largest magnitude, NaN where one is.
int bitmap_count(Type type, const void* x, uint8_t* bits, int32_t* counts, float* maxima, int64_t rows, int64_t n,
                 void* stream);
int bitmap_popcount(const uint8_t* bits, int32_t* counts, int64_t rows, int64_t n, void* stream);
// The offsets of `count` chunks, and how many values there are in all (waits).
int bitmap_scan(const int32_t* counts, Offsets offsets, int64_t count, void* stream);
int bitmap_total(Offsets offsets, int64_t count, int64_t* total, void* stream);
// scale = max / 127 of each row from its chunks' `maxima`.
int bitmap_scale(const float* maxima, float* scale, int64_t rows, int64_t chunks, void* stream);
// `value_type` 0 float32, 1 bfloat16, 2 int8 (with `scale`).
int bitmap_write(Type type, const void* x, Offsets offsets, const float* scale, void* values, int value_type,
                 int64_t rows, int64_t n, void* stream);
// Values that are missing are read as NaN.
int bitmap_read(const uint8_t* bits, Offsets offsets, const void* values, int64_t value_count, int value_type,
                const float* scale, float* x, int64_t rows, int64_t n, void* stream);

// unit = keys [m, d] divided by their norms (float or double).
int unit_keys(Type type, const void* keys, void* unit, int64_t m, int64_t d, void* stream);
// 1 / norm of int8 keys, 0 of a key of zeros.
int inverse_norms(const int8_t* keys, float* inverse, int64_t m, int64_t d, void* stream);

// Rows first … first + rows − 1 of the keys [m, d], of norm 1 (float or double) or int8 with `inverse`, against all.
struct Similarity {
  Type type;
  const void* keys;
  const float* inverse;
  const void* x;         // [m, n], or null
  const uint8_t* valid;  // [m], or null: all count
  void* out;             // sums of x [rows, n]; without x the weights [rows, m]
  int64_t* counts;       // [rows] of zeros, or null
  int64_t first, rows, m, d, n;
  double epsilon, tau;
};
int similarity(const Similarity& op, void* stream);

// The points that are transformed at once, of n.
int64_t srht_chunk(int64_t n);
struct Srht {
  Type type;
  const void* x;  // [clients, n]
  const int8_t* signs;
  const int64_t* rows;
  void *work, *kept;  // [clients, n rounded up to chunks] and [clients, m], float (double where x is)
  int8_t* out;        // [clients, m], and
  float* scale;       // [clients], or null
  int64_t clients, n, m;
};
int srht(const Srht& op, void* stream);

const char* error_string(int error);

// Whether what is launched on a stream now is only recorded into a graph.
bool is_recorded(void* stream);

}  // namespace fastfact_cuda
