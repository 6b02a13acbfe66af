// quantize_rows on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/quantize_rows/quantize_rows.h"

namespace tle {
namespace {

// k elements that share a scale.
template <DType T>
static inline void quantize_group(const typename Element<T>::type* x, int64_t k, int8_t* codes, float* scale,
                                  int32_t* sum) {
  const int64_t whole = k / 16 * 16, rest = k - whole;
  i32x16 largest = zero_i32();
  for (int64_t i = 0; i < whole; i += 16) largest = max(largest, abs_bits(load_as<T>(x, i)));
  if (rest > 0) largest = max(largest, abs_bits(load_tail<T>(x, whole, rest)));
  const int32_t bits = reduce_max(largest);

  float amax;
  memcpy(&amax, &bits, 4);
  if (bits >= 0x7F800000) {
    const uint32_t nan = 0x7FC00000u;
    memset(codes, 0, size_t(k));
    memcpy(scale, &nan, 4);
    *sum = 0;
    return;
  }
  float inv = 127.0f / amax;
  if (!(inv <= 0x1.fffffep127f)) inv = 0.0f;

  const f32x16 factor = set1(inv);
  i32x16 sums = zero_i32();
  for (int64_t i = 0; i < whole; i += 16) {
    const i32x16 q = round_to_int(mul(load_as<T>(x, i), factor));
    sums = add(sums, q);
    store_i8(codes + i, q);
  }
  if (rest > 0) {
    int8_t tail[16];
    const i32x16 q = round_to_int(mul(load_tail<T>(x, whole, rest), factor));
    sums = add(sums, q);
    store_i8(tail, q);
    memcpy(codes + whole, tail, size_t(rest));
  }
  *sum = reduce_add(sums);
  *scale = amax / 127.0f;
}

template <DType T>
static inline void quantize_rows_typed(const QuantizeRowsArgs& a) {
  const int64_t size = a.group ? a.group : a.k, groups = a.group ? (a.k + a.group - 1) / a.group : 1;
  for (int64_t row = 0; row < a.rows; ++row) {
    const typename Element<T>::type* x = static_cast<const typename Element<T>::type*>(a.x) + row * a.x_stride;
    int8_t* codes = a.codes + row * a.code_stride;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * size, k = first + size < a.k ? size : a.k - first;
      quantize_group<T>(x + first, k, codes + first, a.scales + row * groups + g, a.sums + row * groups + g);
    }
    memset(codes + a.k, 0, size_t(a.code_stride - a.k));
  }
}

static inline void quantize_rows_lanes(const QuantizeRowsArgs& a) {
  switch (a.dtype) {
    case DType::kF32: return quantize_rows_typed<DType::kF32>(a);
    case DType::kBF16: return quantize_rows_typed<DType::kBF16>(a);
    default: return quantize_rows_typed<DType::kF16>(a);
  }
}

}  // namespace
}  // namespace tle
