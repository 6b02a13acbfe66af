// RMS normalisation of rows, optionally of the sum of two rows (the residual stream).
//
//   s = x, or round(x + residual) when there is a residual;  r = 1 / sqrt(sum(s^2) / D + eps)
//   kF32:    out = round((s r) w)                 one rounding at the end (OLMo's and the documented operator)
//   kLlama:  out = round(round(s r) w)            rounded before the weight as well (Llama, Qwen, Mistral)
//   kGemma:  out = round((s r) (1 + w))           Gemma
//
// round: to the rows' type, nearest even, NaN canonical. sum(s^2) is added in the 16 canonical lanes (scalar.h), D
// padded with zeros.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

enum class NormKind : int { kF32 = 0, kLlama = 1, kGemma = 2 };

struct RmsNormArgs {
  const void* x;         // [rows, d]
  const void* residual;  // [rows, d] or null
  const void* weight;    // [d]
  void* sum;             // [rows, d] or null: s; may be x or residual
  void* out;             // [rows, d]; may be none of the inputs
  int64_t rows, d;
  // Elements from row to row; the elements of a row are adjacent.
  int64_t x_stride, residual_stride, sum_stride, out_stride;
  float eps;
  NormKind kind;
  DType dtype;         // of x, residual, sum and out
  DType weight_dtype;  // the same, or kF32
};

typedef void RmsNormFn(const RmsNormArgs&);
RmsNormFn rms_norm_ref, rms_norm_neon, rms_norm_avx2, rms_norm_avx512;

}  // namespace tle
