// y = x W^T + bias for dense row-major weights of bf16, fp16 or fp32, in place, any number of rows.
//
//   y[m, n] = round(dot(x[m], W[n]) + bias[n])
//
// dot is fp32 in the 16 canonical lanes: lane j takes k = j (mod 16) in increasing order with fma, K padded with zeros,
// then the fixed tree (scalar.h). So a row's result depends neither on its neighbours nor on the machine.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct LinearDenseArgs {
  const void* x;      // [rows, k]
  const void* w;      // [n, k]
  const void* bias;   // [n] of bias_dtype, or null
  void* out;          // [rows, n] of out_dtype
  int64_t rows, n, k;
  int64_t x_stride, w_stride, out_stride;  // elements from row to row; elements of a row are adjacent
  DType dtype;        // of x and w
  DType bias_dtype, out_dtype;
};

typedef void LinearDenseFn(const LinearDenseArgs&);
LinearDenseFn linear_dense_ref, linear_dense_neon, linear_dense_avx2, linear_dense_avx512;

}  // namespace tle
