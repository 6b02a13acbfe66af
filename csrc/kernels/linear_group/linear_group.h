// y = x W^T where activations are quantised in groups of k, and weights in the same groups or per channel; int8
// activation codes, 8-bit or 4-bit weight codes, weights packed in panels (runtime/packed_weight.h), any number of
// rows.
//
//   isum[g] = sum over the k of group g of x[m, k] q[n, k]                 exact in int32
//   weights by groups, in increasing g, acc from 0 in fp32:
//     acc = fma(float(isum[g]), x_scale[m, g] * w_scale[g, n], acc)
//     acc = fma(float(x_sum[m, g]), x_scale[m, g] * w_min[g, n], acc)      only with minima
//   weights per channel:
//     acc = fma(float(isum[g]), x_scale[m, g], acc) in increasing g, then acc = acc * w_scale[n]
//   y[m, n] = round(acc + bias[n])
//
// q is the code: signed (8 bits), code - 8 (4 bits, symmetric), code (4 bits with minima).
//
// A panel holds 16 channels in lines of 64 bytes, [16 channels][4 consecutive k] of 8 bits or [16][8] of 4 bits (the
// low nibble of byte i is k + i, the high one k + 4 + i). Per channel: all lines, then 16 fp32 scales at scale_offset.
// By groups, for every two of them: 2 x 16 scales, 2 x 16 minima if there are minima, the lines of the two groups; of a
// last group that stands alone, the same with its lines only.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

enum class GroupCodes : int { kInt8 = 0, kInt4 = 1, kInt4Min = 2 };

struct LinearGroupArgs {
  const uint8_t* panels;  // the first panel; at least 8-byte aligned
  int64_t panel_stride;   // bytes
  int64_t scale_offset;   // of the scales per channel
  int64_t k;      // in features; groups = ceil(k / group), the last one may be short
  int64_t group;  // 32, 64 or 128
  int64_t n;      // channels wanted, counted from the first panel; the last panel may be partial
  GroupCodes codes;
  bool channel_scale;  // one fp32 scale per channel instead of scales (and minima) per group; kInt8 only
  DType scale_type;    // of scales and minima by groups: kF16, kBF16 or kF32
  bool hints;          // whether to ask for weights ahead even where one row's products are few (weight_hints_pay())

  const int8_t* x;       // [rows, x_stride] codes within +-127, 0 from k to the end of the last line
  int64_t x_stride;      // bytes
  const float* x_scale;  // [rows, groups]
  const int32_t* x_sum;  // [rows, groups] sum of the group's codes
  int64_t rows;

  const void* bias;  // [n] of bias_dtype, or null
  DType bias_dtype;

  void* out;           // [rows, n] of out_dtype
  int64_t out_stride;  // elements
  DType out_dtype;
};

typedef void LinearGroupFn(const LinearGroupArgs&);
LinearGroupFn linear_group_ref, linear_group_neon, linear_group_dotprod, linear_group_i8mm, linear_group_sve2;
LinearGroupFn linear_group_avx2, linear_group_avx512, linear_group_vnni, linear_group_amx;

}  // namespace tle
