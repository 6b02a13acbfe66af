// Rotary position embedding of one token's heads (the rotate-half form of Llama, Qwen, Mistral ...).
//
//   i < R/2:         out[i] = round(round(x[i] cos[i]) + round(-x[i + R/2] sin[i]))
//   R/2 <= i < R:    out[i] = round(round(x[i] cos[i]) + round( x[i - R/2] sin[i]))
//   R <= i < D:      out[i] = x[i]                                                    (partial rotary)
//
// Three roundings to the elements' type, because the unfused modules have them.
// Source: Su et al., "RoFormer", 2021; the half-split order is GPT-NeoX's.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct RotaryArgs {
  const void* x;           // [heads, d]
  const void *cos, *sin;   // [r]
  void* out;               // [heads, d]; may be x
  int64_t heads, d, r;     // r even, r <= d
  int64_t x_stride, out_stride;  // elements from head to head; elements of a head are adjacent
  DType dtype;
};

typedef void RotaryFn(const RotaryArgs&);
RotaryFn rotary_ref, rotary_neon, rotary_avx2, rotary_avx512;

}  // namespace tle
