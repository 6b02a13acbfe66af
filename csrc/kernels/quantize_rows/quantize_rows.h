// Quantisation of activations to int8, a scale for each row or for each group of consecutive k: the "A8" of W8A8.
//
//   amax = max |x| over the group;  inv = 127 / amax, or 0 where that is not finite
//   q = round_half_even(x inv);  scale = amax / 127
//
// A group that holds a NaN or an infinity gets codes 0 and scale NaN, so that every output of that row is NaN and no
// other row notices. Codes past k up to code_stride are 0: weights are padded to whole lines, activations must not see
// it.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct QuantizeRowsArgs {
  const void* x;  // [rows, k]
  int8_t* codes;  // [rows, code_stride]
  float* scales;  // [rows, groups], groups = group ? ceil(k / group) : 1
  int32_t* sums;  // [rows, groups]: the sum of a group's codes
  int64_t rows, k;
  int64_t group;        // a multiple of 16, or 0: the whole row. The last group may be short
  int64_t x_stride;     // elements
  int64_t code_stride;  // bytes, >= k
  DType dtype;
};

typedef void QuantizeRowsFn(const QuantizeRowsArgs&);
QuantizeRowsFn quantize_rows_ref, quantize_rows_neon, quantize_rows_avx2, quantize_rows_avx512;

}  // namespace tle
