// rotary on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/rotary/rotary.h"

namespace tle {
namespace {

template <DType T>
static inline f32x16 rotate(f32x16 x, f32x16 partner, f32x16 cos, f32x16 sin) {
  return add(round_to<T>(mul(x, cos)), round_to<T>(mul(partner, sin)));
}

template <DType T>
static inline void rotary_heads(const RotaryArgs& a) {
  using E = typename Element<T>::type;
  const int64_t half = a.r / 2, whole = half / 16 * 16, rest = half - whole;
  for (int64_t h = 0; h < a.heads; ++h) {
    const E* x = static_cast<const E*>(a.x) + h * a.x_stride;
    E* out = static_cast<E*>(a.out) + h * a.out_stride;
    for (int64_t i = 0; i < whole; i += 16) {
      const f32x16 low = load_as<T>(x, i), high = load_as<T>(x, i + half);
      store_as<T>(out, i, rotate<T>(low, neg(high), load_as<T>(a.cos, i), load_as<T>(a.sin, i)));
      store_as<T>(out, i + half, rotate<T>(high, low, load_as<T>(a.cos, i + half), load_as<T>(a.sin, i + half)));
    }
    if (rest > 0) {
      const int64_t i = whole, j = whole + half;
      const f32x16 low = load_tail<T>(x, i, rest), high = load_tail<T>(x, j, rest);
      store_tail<T>(out, i, rest,
                    rotate<T>(low, neg(high), load_tail<T>(a.cos, i, rest), load_tail<T>(a.sin, i, rest)));
      store_tail<T>(out, j, rest, rotate<T>(high, low, load_tail<T>(a.cos, j, rest), load_tail<T>(a.sin, j, rest)));
    }
    const int64_t kept = a.d - a.r, kept_whole = kept / 16 * 16;
    for (int64_t i = a.r; i < a.r + kept_whole; i += 16) store_as<T>(out, i, load_as<T>(x, i));
    if (kept > kept_whole) {
      const int64_t i = a.r + kept_whole, n = kept - kept_whole;
      store_tail<T>(out, i, n, load_tail<T>(x, i, n));
    }
  }
}

static inline void rotary_lanes(const RotaryArgs& a) {
  switch (a.dtype) {
    case DType::kF32: return rotary_heads<DType::kF32>(a);
    case DType::kBF16: return rotary_heads<DType::kBF16>(a);
    default: return rotary_heads<DType::kF16>(a);
  }
}

}  // namespace
}  // namespace tle
