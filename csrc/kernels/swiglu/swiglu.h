// SwiGLU: out = round(silu(gate) * up), silu(g) = g / (1 + exp(-g)), fp32 inside with one rounding at the end.
// Source: Shazeer, "GLU Variants Improve Transformer", 2020.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct SwigluArgs {
  const void* gate;  // [rows, n]
  const void* up;    // [rows, n]
  void* out;         // [rows, n]; may be gate or up
  int64_t rows, n;
  int64_t gate_stride, up_stride, out_stride;  // elements from row to row; elements of a row are adjacent
  DType dtype;
};

typedef void SwigluFn(const SwigluArgs&);
SwigluFn swiglu_ref, swiglu_neon, swiglu_avx2, swiglu_avx512;

}  // namespace tle
