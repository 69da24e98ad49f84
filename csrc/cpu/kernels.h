// The CPU kernels: plain C++ on raw pointers. Shapes and layouts are those of fastfact/ops/reference.py.
//
// Each tensor is given as a pointer and the distance between two clients in elements, 0 where clients share it;
// one client's part is contiguous, or channels_last where a field says so.
#pragma once

#include <cstdint>

namespace fastfact {

enum class Type { f32, f64, bf16, f16 };
enum Layout { kLinear, kSpatial, kKernel, kView, kSeparable };

// Calls body(begin, end, context) on parts of [0, n), none smaller than `grain` but the last, and waits for them.
using ParallelFor = void (*)(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

struct In {
  const void* data;  // null where an optional tensor is not given
  int64_t client_stride;
};

// A weight [o, i, kh, kw]; linear weights have kh = kw = 1.
struct Size {
  int64_t o, i, kh, kw;
  int64_t taps() const { return kh * kw; }
  int64_t numel() const { return o * i * kh * kw; }
};

// The positions of compact μ: int32 [count], ascending, flat in [o, i, kh, kw] whatever the format of the weight.
struct Support {
  In index;
  int64_t count;  // 0 where μ is dense or not there
};

struct Rank1 {
  Type type;
  int layout;
  bool channels_last;  // the format of w, μ and dW
  int64_t clients, rank;
  Size size;
  In mu, u, v;  // μ dense, or the values [count] of a support
  void* w;
  Support support;
};

struct Rank1Backward {
  Type type;
  int layout;
  bool channels_last;
  int64_t clients, rank;
  Size size;
  In grad, u, v;
  void *du, *dv;  // null where not asked for
  Support support;
  void* dvalues;  // [count], null where not asked for
};

struct LowRank {
  Type type;
  int layout;
  bool channels_last;  // not with the view layout
  int64_t clients, rank;
  Size size;
  double scaling;
  In sigma, a, b;
  void* w;
};

// to [clients, m, n], dense, = scaling · a matrix of each client by its steps.
struct Scaled {
  Type type;
  int64_t clients, m, n;
  In from;
  int64_t row, column;
  double scaling;
  void* to;
};

struct LowRankBackward {
  Type type;
  int layout;
  bool channels_last;
  int64_t clients, rank;
  Size size;
  double scaling;
  In grad, a, b;
  void *da, *db;
};

struct Hadamard {
  Type type;
  bool channels_last, personalized;
  int64_t clients, rank1, rank2;
  Size size;
  In x1, y1, x2, y2;
  void* w;
};

struct HadamardBackward {
  Type type;
  bool channels_last, personalized;
  int64_t clients, rank1, rank2;
  Size size;
  In grad, x1, y1, x2, y2;
  void *dx1, *dy1, *dx2, *dy2;
};

// One tensor of a group; all pointers run over its elements in the same order.
struct Step {
  Type type;
  int64_t numel;
  void* param;
  const void* grad;
  void* momentum;  // null when momentum is 0
  double l1;
};

struct ProxSgd {
  double lr, momentum, weight_decay;
  bool proximal;
};

// A linear layer of frozen weight σ [outputs, inputs] and factors a [rank, inputs], b [outputs, rank]; x and grad are
// [clients, rows, …], contiguous but for what clients share.
struct Adapter {
  Type type;
  int64_t clients, rows, inputs, outputs, rank;
  double scaling;
  In x, seen, sigma, a, b, bias;    // seen null: x
  int64_t sigma_row, sigma_column;  // the steps of σ
  void *y, *hidden;                 // [clients, rows, outputs], [clients, rows, rank]
  int64_t threads;                  // how many `parallel_for` has; no number depends on it
};

struct AdapterBackward {
  Type type;
  int64_t clients, rows, inputs, outputs, rank;
  double scaling;
  In grad, seen, sigma, a, b, hidden;
  int64_t sigma_row, sigma_column;
  bool own;                    // the factors' part of dx is in dseen alone
  void *dx, *dseen, *da, *db;  // null where not asked for
  int64_t threads;
};

// A tensor [clients, samples, heads, rows, columns] by its steps; columns are next to each other.
struct Heads {
  void* data;
  int64_t client, sample, head, row;
};

// out = softmax(scale · q kᵀ + mask) v for each head, and the logarithms of what the softmax divides by.
struct Attention {
  Type type;
  int64_t clients, samples, heads, queries, keys, depth;
  bool causal;  // a query sees the keys up to its own place
  double scale;
  Heads q, k, v, mask, out;  // mask: data null where there is none
  int64_t mask_column;       // the step of its columns
  void* sums;                // [clients, samples, heads, queries], contiguous
  void* weights;             // of each query its keys', [clients, samples, heads, queries, keys], contiguous; or null
};

struct AttentionGradients {
  Heads grad, dq, dk, dv;
};

enum class Value { f32, bf16, i8 };

// These two return false, without a result, where a support is not ascending positions in the weight.
bool rank1_weight(const Rank1& op, ParallelFor parallel_for);
bool rank1_weight_backward(const Rank1Backward& op, ParallelFor parallel_for);
void lowrank_weight(const LowRank& op, ParallelFor parallel_for);
void lowrank_weight_backward(const LowRankBackward& op, ParallelFor parallel_for);
void scaled(const Scaled& op, ParallelFor parallel_for);
void hadamard_weight(const Hadamard& op, ParallelFor parallel_for);
void hadamard_weight_backward(const HadamardBackward& op, ParallelFor parallel_for);
void adapter(const Adapter& op, ParallelFor parallel_for);
void adapter_backward(const AdapterBackward& op, ParallelFor parallel_for);
void attention(const Attention& op, ParallelFor parallel_for);
void attention_backward(const Attention& op, const AttentionGradients& gradients, ParallelFor parallel_for);
void prox_sgd_step(const ProxSgd& op, const Step* steps, int64_t count, ParallelFor parallel_for);

// AdamW (decoupled weight decay) of one tensor, all pointers over its elements in the same order, and the soft
// threshold by lr · l1 in Adam's metric. step: which one this is, from 1 on.
struct AdamW {
  Type type;
  int64_t numel;
  void* param;
  const void* grad;
  void *first, *second;  // moments
  double lr, beta1, beta2, eps, weight_decay, l1, step;
};

void adamw_step(const AdamW* steps, int64_t count, ParallelFor parallel_for);

// Bitmaps of x [rows, n]. A row is worked on in chunks; `offsets` [rows · bitmap_chunks(n) + 1] counts the nonzeros
// before each, so that its last element is the size of `values`.
int64_t bitmap_chunks(int64_t n);
// x → bits [rows, ceil(n / 8)] and offsets.
void pack_bits(Type type, const void* x, int64_t rows, int64_t n, uint8_t* bits, int64_t* offsets, ParallelFor);
// The nonzeros of x in `values`; for int8 values also scale [rows] = max|row| / 127.
void pack_values(Type type, const void* x, int64_t rows, int64_t n, const uint8_t* bits, const int64_t* offsets,
                 Value value, void* values, float* scale, ParallelFor);
// bits → offsets; bits beyond n are not counted.
void count_bits(const uint8_t* bits, int64_t rows, int64_t n, int64_t* offsets, ParallelFor);
// x from bits and values, times scale [rows] where it is given.
void unpack_values(const uint8_t* bits, const int64_t* offsets, int64_t rows, int64_t n, Value value,
                   const void* values, const float* scale, float* x, ParallelFor);

// Products of keys [rows, columns] that become mixing weights in place.
struct Similarity {
  Type type;      // f32 or f64, of the weights
  bool integers;  // the products are int32, of int8 keys, the weights f32
  int64_t rows, columns;
  void* tile;
  const double *row_inverse, *column_inverse;  // 1 / norm of the keys
  int64_t own;                                 // (r, r + own) is a client and itself, which has weight 0
  double epsilon, tau;
  const uint8_t *row_valid, *column_valid;  // null: all
  int64_t *row_counts, *column_counts;      // the matches of each are added to these, where they are not null
};
// Returns whether any weight is not 0.
bool similarity_weights(const Similarity& op, ParallelFor);
// Σ x² of each row of keys [rows, n], of the type or int8.
void squared_norms(Type type, bool integers, const void* keys, int64_t rows, int64_t n, double* out, ParallelFor);

// Subsampled randomized Hadamard transforms of x [clients, n], n signs, of which m rows are kept.
struct Srht {
  Type type;  // of x
  int64_t clients, n, m;
  const void* x;
  const int8_t* signs;
  const int64_t* rows;
  void* out;     // [clients, m]: int8 with a scale, else f32 (f64 where x is)
  float* scale;  // [clients], or null
};
void srht(const Srht& op, ParallelFor);

// Some rows of each client's samples [any number, width]: the n-th of client k is row index[k·index_stride + n].
struct SampleRows {
  int64_t clients, batch, width;
  const void* const* samples;  // [clients]
  const int64_t* index;
  int64_t index_stride;
};
// out [clients, batch]: the rows, of so many bytes each, whatever their width.
void gather_rows(const SampleRows& rows, int64_t bytes, void* out, ParallelFor);
// y [clients, batch, outputs] = rows · weightᵀ, weight [clients, outputs, width]
void rows_linear(const SampleRows& rows, Type type, const In& weight, int64_t outputs, void* y, ParallelFor);
// dw [clients, outputs, width] = gradᵀ · rows, grad [clients, batch, outputs]
void rows_linear_backward(const SampleRows& rows, Type type, const In& grad, int64_t outputs, void* dw, ParallelFor);

// The mean cross-entropy [clients] of logits [clients, batch, classes] and labels in range, and its gradient.
struct SoftmaxLoss {
  Type type;
  int64_t clients, batch, classes;
  const void* logits;
  const int64_t* labels;
  void *losses, *grad;
};
void softmax_loss(const SoftmaxLoss& op, ParallelFor);

// The same for logits = rows · weightᵀ + bias, with dw as `rows_linear_backward` gives it: a client after another, so
// that its rows are read from memory once. `op.logits` is not read; bias [clients, classes] may be null. threads: how
// many `parallel_for` has; with fewer clients each product is shared by all of them.
void rows_softmax_loss(const SampleRows& rows, const SoftmaxLoss& op, const In& weight, const In& bias, void* dw,
                       int64_t threads, ParallelFor);

// out [channels]: the sums over all else of [n, channels, plane] numbers.
struct ChannelSums {
  Type type;
  int64_t n, channels, plane;
  const void* data;
  void* out;
};
void channel_sums(const ChannelSums& op, ParallelFor);

// y [n, channels] += bias [channels]; float32 and float64.
struct AddBias {
  Type type;
  int64_t n, channels;
  const void* bias;
  void* y;
};
void add_bias(const AddBias& op, ParallelFor);

// y [n, o] = x [n, i] · Wᵀ + bias (or null), float32 or float64, W (o, i) at i · row + o.
struct DenseRows {
  Type type;
  int64_t n, i, o, row;
  const void *x, *w, *bias;
  void* y;
};
void dense_rows(const DenseRows& op, ParallelFor);

// W [o, i] of a linear layer in the order in which products of many rows read it, [panel of columns][i][its width], in
// bfloat16 in pairs, [panel][i / 2][width][2]; the last panel is filled with zeros, and for AMX each, to a multiple of
// 32 inputs. panels_numel: of how many numbers, -1 where there is no such form.
int64_t panels_numel(Type type, int64_t o, int64_t i);
void pack_panels(Type type, int64_t o, int64_t i, const void* w, void* to, ParallelFor);

// y [n, o] = x [n, i] · Wᵀ + bias (or null), W as `pack_panels` has it.
struct LinearOfPanels {
  Type type;
  int64_t n, i, o;
  const void *x, *panels, *bias;
  void* y;
  int64_t threads = 1;  // how many `parallel_for` has; no number depends on it
};
void linear_of_panels(const LinearOfPanels& op, ParallelFor);

// A number that depends on every byte, and on `seed`; two contents have the same one by accident once in 2^64.
uint64_t digest(const void* data, int64_t bytes, uint64_t seed, ParallelFor);

struct Stretch {
  const void* data;
  int64_t bytes;
};
// The same of several stretches of memory of known sizes.
uint64_t digest(const Stretch* stretches, int64_t count, uint64_t seed, ParallelFor);

// From here on nothing changes this memory, until it is released as often as it was held: its digest is computed now
// and not again, but by `read_anew`. False where it is not kept. Callers of these three take turns.
bool hold(const void* data, int64_t bytes, ParallelFor);
void read_anew(const void* data, int64_t bytes, ParallelFor);
void release(const void* data, int64_t bytes);

// Which instruction set the kernels use: "x86-64-v4", "x86-64-v3" or "baseline".
const char* instruction_set();

}  // namespace fastfact
