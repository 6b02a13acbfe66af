// swiglu on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/swiglu/swiglu.h"

namespace tle {
namespace {

static inline f32x16 swiglu_one(f32x16 g, f32x16 u) { return mul(div(g, add(set1(1.0f), exp(neg(g)))), u); }

template <DType T>
static inline void swiglu_rows(const SwigluArgs& a) {
  using E = typename Element<T>::type;
  const int64_t whole = a.n / 16 * 16, rest = a.n - whole;
  for (int64_t row = 0; row < a.rows; ++row) {
    const E* gate = static_cast<const E*>(a.gate) + row * a.gate_stride;
    const E* up = static_cast<const E*>(a.up) + row * a.up_stride;
    E* out = static_cast<E*>(a.out) + row * a.out_stride;
    for (int64_t i = 0; i < whole; i += 16) store_as<T>(out, i, swiglu_one(load_as<T>(gate, i), load_as<T>(up, i)));
    if (rest > 0)
      store_tail<T>(out, whole, rest, swiglu_one(load_tail<T>(gate, whole, rest), load_tail<T>(up, whole, rest)));
  }
}

static inline void swiglu_lanes(const SwigluArgs& a) {
  switch (a.dtype) {
    case DType::kF32: return swiglu_rows<DType::kF32>(a);
    case DType::kBF16: return swiglu_rows<DType::kBF16>(a);
    default: return swiglu_rows<DType::kF16>(a);
  }
}

}  // namespace
}  // namespace tle
