// quantize_rows on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/quantize_rows/quantize_rows.h"

namespace tle {
namespace {

template <DType T>
static inline void quantize_rows_typed(const QuantizeRowsArgs& a) {
  const int64_t whole = a.k / 16 * 16, rest = a.k - whole;
  for (int64_t row = 0; row < a.rows; ++row) {
    const typename Element<T>::type* x = static_cast<const typename Element<T>::type*>(a.x) + row * a.x_stride;
    int8_t* codes = a.codes + row * a.code_stride;

    i32x16 largest = zero_i32();
    for (int64_t i = 0; i < whole; i += 16) largest = max(largest, abs_bits(load_as<T>(x, i)));
    if (rest > 0) largest = max(largest, abs_bits(load_tail<T>(x, whole, rest)));
    int32_t lane[16], bits = 0;
    store(lane, largest);
    for (int j = 0; j < 16; ++j) bits = lane[j] > bits ? lane[j] : bits;

    float amax;
    memcpy(&amax, &bits, 4);
    const bool finite = bits < 0x7F800000;
    float inv = 127.0f / amax;
    if (!finite || !(inv <= 0x1.fffffep127f)) inv = 0.0f;
    if (!finite) {
      const uint32_t nan = 0x7FC00000u;
      memset(codes, 0, size_t(a.code_stride));
      a.sums[row] = 0;
      memcpy(&a.scales[row], &nan, 4);
      continue;
    }

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
    memset(codes + a.k, 0, size_t(a.code_stride - a.k));
    store(lane, sums);
    int32_t sum = 0;
    for (int j = 0; j < 16; ++j) sum += lane[j];
    a.sums[row] = sum;
    a.scales[row] = amax / 127.0f;
  }
}

static inline void quantize_rows_lanes(const QuantizeRowsArgs& a) {
  switch (a.dtype) {
    case DType::kF32: return quantize_rows_typed<DType::kF32>(a);
    case DType::kBF16: return quantize_rows_typed<DType::kBF16>(a);
    case DType::kF16: return quantize_rows_typed<DType::kF16>(a);
  }
}

}  // namespace
}  // namespace tle
