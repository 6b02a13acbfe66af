// rms_norm on the 16 canonical lanes; include after one of common/lanes_*.h.
#pragma once

#include <math.h>

#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {
namespace {

template <DType T, DType W, NormKind kKind>
static inline f32x16 rms_norm_scale(f32x16 s, f32x16 r, f32x16 w) {
  f32x16 normed = mul(s, r);
  if constexpr (kKind == NormKind::kLlama) normed = round_to<T>(normed);
  return mul(normed, kKind == NormKind::kGemma ? add(set1(1.0f), w) : w);
}

template <DType T, DType W, NormKind kKind>
static inline void rms_norm_rows(const RmsNormArgs& a) {
  const int64_t whole = a.d / 16 * 16, rest = a.d - whole;
  for (int64_t row = 0; row < a.rows; ++row) {
    using E = typename Element<T>::type;
    const E* x = static_cast<const E*>(a.x) + row * a.x_stride;
    const E* residual = a.residual ? static_cast<const E*>(a.residual) + row * a.residual_stride : nullptr;
    E* out = static_cast<E*>(a.out) + row * a.out_stride;
    E* sum = a.sum ? static_cast<E*>(a.sum) + row * a.sum_stride : nullptr;

    // s is stored before it is used again, so the second pass reads what the first one wrote.
    f32x16 squares = zero();
    for (int64_t i = 0; i < whole; i += 16) {
      f32x16 s = load_as<T>(x, i);
      if (residual) s = round_to<T>(add(s, load_as<T>(residual, i)));
      if (residual) store_as<T>(out, i, s);
      squares = fma(s, s, squares);
    }
    if (rest > 0) {
      f32x16 s = load_tail<T>(x, whole, rest);
      if (residual) s = round_to<T>(add(s, load_tail<T>(residual, whole, rest)));
      if (residual) store_tail<T>(out, whole, rest, s);
      squares = fma(s, s, squares);
    }
    const E* from = residual ? out : x;
    const f32x16 r = set1(1.0f / sqrtf(reduce_add(squares) / float(a.d) + a.eps));
    for (int64_t i = 0; i < whole; i += 16) {
      const f32x16 s = load_as<T>(from, i);
      if (sum) store_as<T>(sum, i, s);
      store_as<T>(out, i, rms_norm_scale<T, W, kKind>(s, r, load_as<W>(a.weight, i)));
    }
    if (rest > 0) {
      const f32x16 s = load_tail<T>(from, whole, rest);
      if (sum) store_tail<T>(sum, whole, rest, s);
      store_tail<T>(out, whole, rest, rms_norm_scale<T, W, kKind>(s, r, load_tail<W>(a.weight, whole, rest)));
    }
  }
}

template <DType T, DType W>
static inline void rms_norm_kinds(const RmsNormArgs& a) {
  switch (a.kind) {
    case NormKind::kF32: return rms_norm_rows<T, W, NormKind::kF32>(a);
    case NormKind::kLlama: return rms_norm_rows<T, W, NormKind::kLlama>(a);
    case NormKind::kGemma: return rms_norm_rows<T, W, NormKind::kGemma>(a);
  }
}

static inline void rms_norm_lanes(const RmsNormArgs& a) {
  const bool f32_weight = a.weight_dtype == DType::kF32;
  switch (a.dtype) {
    case DType::kF32: return rms_norm_kinds<DType::kF32, DType::kF32>(a);
    case DType::kBF16:
      return f32_weight ? rms_norm_kinds<DType::kBF16, DType::kF32>(a) : rms_norm_kinds<DType::kBF16, DType::kBF16>(a);
    default:
      return f32_weight ? rms_norm_kinds<DType::kF16, DType::kF32>(a) : rms_norm_kinds<DType::kF16, DType::kF16>(a);
  }
}

}  // namespace
}  // namespace tle
