// Row quantisation to int8: the "A8" of W8A8.
//
//   amax = max |x|;  inv = 127 / amax, or 0 where that is not finite;  q = round_half_even(x inv);  scale = amax / 127
//
// A row that holds a NaN or an infinity gets codes 0 and scale NaN, so that every output of that row is NaN and no other row notices.
// Codes past k up to code_stride are 0: weights are padded to whole lines, activations must not see it.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct QuantizeRowsArgs {
  const void* x;  // [rows, k]
  int8_t* codes;  // [rows, code_stride]
  float* scales;  // [rows]
  int32_t* sums;  // [rows]: the sum of a row's codes
  int64_t rows, k;
  int64_t x_stride;     // elements
  int64_t code_stride;  // bytes, >= k
  DType dtype;
};

typedef void QuantizeRowsFn(const QuantizeRowsArgs&);
QuantizeRowsFn quantize_rows_ref, quantize_rows_neon, quantize_rows_avx2, quantize_rows_avx512;

}  // namespace tle
