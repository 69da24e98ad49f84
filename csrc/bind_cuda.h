// What the files of the CUDA binding share: types, errors, the stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "bind.h"
#include "cuda/kernels.h"

namespace fastfact::bind {

inline fastfact_cuda::Type type_of(const torch::stable::Tensor& x) {
  return fastfact::bind::type_of<fastfact_cuda::Type>("fastfact", x);
}

inline void check_error(const char* op, int error) {
  STD_TORCH_CHECK(error == 0, op, ": ", fastfact_cuda::error_string(error));
}

// The device of a tensor made current, and its current stream.
class On {
 public:
#ifdef FASTFACT_EMULATED
  explicit On(const torch::stable::Tensor&) {}
#else
  explicit On(const torch::stable::Tensor& x) : guard_(x.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream_));
  }
#endif
  void* stream() const { return stream_; }

 private:
#ifndef FASTFACT_EMULATED
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

}  // namespace fastfact::bind
