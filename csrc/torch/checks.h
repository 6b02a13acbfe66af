// Argument checks and conversions that the operators share. Errors name the operator, the argument, what was wanted and
// what came.
#pragma once

#include <optional>

#include "csrc/engine/linear.h"
#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/rms_norm/rms_norm.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

// bf16, fp16 or fp32 on the CPU, strided; anything else raises.
DType float_dtype(const char* op, const char* name, const at::Tensor& t);
at::ScalarType scalar_type(DType t);

void check_cpu(const char* op, const char* name, const at::Tensor& t);
void check_dtype(const char* op, const char* name, const at::Tensor& t, at::ScalarType wanted);
void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t wanted);
void check_size(const char* op, const char* name, const at::Tensor& t, int64_t dim, int64_t wanted, const char* why);

// t as [rows, last dimension] whose rows are evenly spaced and whose elements are adjacent: t itself where its strides
// allow, otherwise a contiguous copy. A dimension of size 1 may have any stride.
struct Rows {
  at::Tensor tensor;  // keeps the memory alive
  const void* data;
  int64_t rows, size, stride;  // stride in elements
};
Rows rows_of(const at::Tensor& t);

// A 1-D vector of `size` elements, made contiguous: a bias or a norm's weight. Its dtype is `dtype` or fp32.
at::Tensor vector_of(const char* op, const char* name, const at::Tensor& t, int64_t size, DType dtype);

// A linear weight (packed or dense) with its bias, for inputs of `dtype` with k features. Keeps tensors that it had to
// copy in `keep`.
LinearWeight linear_weight(const char* op, const char* name, const at::Tensor& weight, int64_t out_features, int64_t k,
                           const std::optional<at::Tensor>& bias, DType dtype, std::vector<at::Tensor>& keep);

// What keys or values [.., slots, size] hold for a model of `dtype`: that, or int8 codes with a scale behind them
// (kernels/attention/attention.h). Anything else raises.
DType kv_dtype(const char* op, const char* name, const at::Tensor& t, DType dtype);

NormKind norm_kind(const char* op, std::string_view kind);

}  // namespace tle
