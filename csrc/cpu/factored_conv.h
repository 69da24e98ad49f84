// The factored convolution and linear layer: conv(x, u ⊗ v + μ) and x (v ⊗ u + μ)ᵀ without making the weight.
#pragma once

#include "kernels.h"

namespace fastfact {

// Sizes of a convolution; `i` and `o` are the channels of one group, pairs are (vertical, horizontal).
struct Conv {
  int64_t n, groups, i, o, h, w, kh, kw, oh, ow;
  int64_t stride[2], padding[2], dilation[2];
  bool x_channels_last, y_channels_last;
};

// The nonzeros of μ [groups·o, i, kh, kw]: ascending flat positions and their values. Without positions values are all
// of a dense μ, `channels_last` [groups·o, kh, kw, i]; see `takes_dense`.
struct Sparse {
  const int32_t* index;
  const void* values;
  int64_t count;
  bool channels_last = false;
};

// By which what was found for the positions of μ is found again.
inline uint64_t positions_digest(const Sparse& mu, ParallelFor parallel_for) {
  return digest(mu.index, mu.count * sizeof(int32_t), 0x2545F4914F6CDD1D, parallel_for);
}

struct FactoredConv {
  Type type;  // of all tensors; half precision is computed in float32, but for what pairs.h says of bfloat16
  Conv conv;
  int64_t rank;                  // 0: no rank-1 part
  const void *x, *u, *v, *bias;  // u [rank, kh, kw], v [rank, groups·o, i], bias [groups·o] or null
  Sparse mu;
  void* y;
  bool repeated = false;  // whether v and μ come again: as the kernels read them they are then kept
  int64_t threads = 1;    // how many `parallel_for` has; no number depends on it
};

struct FactoredConvBackward {
  Type type;
  Conv conv;
  int64_t rank;
  const void *x, *dy, *u, *v;
  Sparse mu;
  bool dx_channels_last;
  void *dx, *du, *dv, *dvalues;  // null where not asked for
  int64_t threads = 1;           // as above
};

void factored_conv(const FactoredConv& op, ParallelFor parallel_for);
void factored_conv_backward(const FactoredConvBackward& op, ParallelFor parallel_for);

// The same without μ, but with factors.
void factored_conv_channels(const FactoredConv& op, ParallelFor parallel_for);
void factored_conv_backward_channels(const FactoredConvBackward& op, ParallelFor parallel_for);

// The same for contiguous images without μ whose planes keep their size and are whole panels of registers.
bool planes_in_lanes(const Conv& c, Type type, int64_t rank, const Sparse& mu);
void factored_conv_planes(const FactoredConv& op, ParallelFor parallel_for);
void factored_conv_backward_planes(const FactoredConvBackward& op, ParallelFor parallel_for);

// The same for kernels of one tap; false, without a result, where the convolution is better done otherwise.
bool factored_conv_1x1(const FactoredConv& op, ParallelFor parallel_for);
bool factored_conv_backward_1x1(const FactoredConvBackward& op, ParallelFor parallel_for);

// The same for depthwise convolutions, `is_depthwise`.
bool is_depthwise(const Conv& c);
bool factored_conv_depthwise(const FactoredConv& op, ParallelFor parallel_for);
bool factored_conv_backward_depthwise(const FactoredConvBackward& op, ParallelFor parallel_for);

// The same for few pixels and dense μ, `in_columns`; false, without a result, where the nonzeros are not ascending
// positions in μ.
bool in_columns(Type type, const Conv& c, int64_t count, bool backward);
bool factored_conv_columns(const FactoredConv& op, ParallelFor parallel_for);
bool factored_conv_backward_columns(const FactoredConvBackward& op, ParallelFor parallel_for);

// Whether these take a dense μ without positions.
bool takes_dense(Type type, const Conv& c, bool backward);

// A convolution with its weight, of float32, by AMX: images with their channels last, w and dw [o, kh, kw, i]; only
// where `convolves_in_pieces`: there is AMX, and of what is so little is padded, split anew or split for few pixels.
struct DenseConv {
  Conv conv;
  const float *x, *w, *bias;  // bias [o] or null
  float* y;
  int64_t threads = 1;            // how many `parallel_for` has; no number depends on it
  const float* panels = nullptr;  // W as `pack_conv_panels` has it, or null: it is made of w
};
struct DenseConvBackward {
  Conv conv;
  const float *x, *dy, *w;
  float *dx, *dw;  // null where not asked for
  int64_t threads = 1;
};
bool convolves_in_pieces(const Conv& c, bool backward);
int64_t conv_panels_numel(int64_t o, int64_t i, int64_t taps);
void pack_conv_panels(int64_t o, int64_t i, int64_t taps, const float* w, float* to, ParallelFor parallel_for);
void dense_conv(const DenseConv& op, ParallelFor parallel_for);
void dense_conv_backward(const DenseConvBackward& op, ParallelFor parallel_for);

// Rows [n, channels] in memory: the channels of a row side by side, or, with `plane`, images of so many rows each,
// [n / plane, channels, plane], for layers without factors.
template <class D>
struct Matrix {
  D* data;
  int64_t channels, plane;
};

struct FactoredLinear {
  Type type;
  int64_t n, i, o, rank;  // rank 0: no factors
  Matrix<const void> x;
  const void *u, *v, *bias;  // u [rank, i], v [rank, o], bias [o] or null
  Sparse mu;                 // [o, i]
  Matrix<void> y;
  int64_t threads = 1;  // how many `parallel_for` has; no number depends on it
};

struct FactoredLinearBackward {
  Type type;
  int64_t n, i, o, rank;
  Matrix<const void> x, dy;
  const void *u, *v;
  Sparse mu;
  Matrix<void> dx;  // null where not asked for, as those below
  void *du, *dv, *dvalues;
  int64_t threads = 1;  // as above
};

// These two return false, without a result, where the nonzeros are not ascending positions in μ.
bool factored_linear(const FactoredLinear& op, ParallelFor parallel_for);
bool factored_linear_backward(const FactoredLinearBackward& op, ParallelFor parallel_for);

// Whether they multiply tiles of W, made in cache, in place of nonzeros (linear_tiles.cpp); not for planes.
bool in_tiles(Type type, int64_t n, int64_t i, int64_t o, int64_t count, bool backward);
inline bool takes_dense(Type type, int64_t n, int64_t i, int64_t o, bool backward) {
  return !n || in_tiles(type, n, i, o, o * i, backward);
}
constexpr int64_t kFewRanks = 4;  // up to which factors are worth no product of their own
bool linear_in_tiles(const FactoredLinear& op, ParallelFor parallel_for);
bool linear_in_tiles_backward(const FactoredLinearBackward& op, ParallelFor parallel_for);

}  // namespace fastfact
