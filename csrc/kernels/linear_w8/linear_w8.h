// y = x W^T for int8 codes of both, weights packed in panels (runtime/packed_weight.h), any number of rows.
//
//   acc[m, n] = sum_k x[m, k] W[n, k]                        exact in int32
//   y[m, n]   = round((float(acc) * x_scale[m]) * w_scale[n] + bias[n])      fp32 with one rounding per operation
//
// A panel holds 16 channels: `lines` lines of 64 bytes, [16 channels][4 consecutive k], then 16 fp32 scales at
// scale_offset.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct LinearW8Args {
  const uint8_t* panels;  // the first panel; at least 8-byte aligned
  int64_t panel_stride, scale_offset;  // bytes
  int64_t lines;                       // ceil(K / 4)
  int64_t n;                           // channels wanted, counted from the first panel; the last panel may be partial

  const int8_t* x;         // [rows, x_stride] codes within +-127, 0 from K to 4 * lines
  int64_t x_stride;        // bytes
  const float* x_scale;    // [rows]
  const int32_t* x_sum;    // [rows] sum of the row's codes
  int64_t rows;

  const void* bias;  // [n] of bias_dtype, or null
  DType bias_dtype;

  void* out;           // [rows, n] of out_dtype
  int64_t out_stride;  // elements
  DType out_dtype;
};

typedef void LinearW8Fn(const LinearW8Args&);
LinearW8Fn linear_w8_ref, linear_w8_neon, linear_w8_dotprod, linear_w8_i8mm, linear_w8_sve2;
LinearW8Fn linear_w8_avx2, linear_w8_avx512, linear_w8_vnni, linear_w8_amx;

}  // namespace tle
