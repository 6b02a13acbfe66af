// The tables of rotary position embedding.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

// cos[t, i] and sin[t, i] for tokens t and 0 <= i < 2 * frequencies (the second half repeats the first):
//   angle = fp32(position) * inv_freq[i], rounded to fp32 as Hugging Face rounds it
//   value = round(fp32(cos(angle)) * scaling), cos and sin in double and rounded once, so that the bits do not depend
//   on a C library
void rotary_tables(const int64_t* positions, int64_t tokens, const float* inv_freq, int64_t frequencies, float scaling,
                   DType dtype, void* cos, void* sin);

// cos and sin of an angle in radians by argument reduction and the Taylor series in plain double arithmetic: within
// 1.5e-16 for |angle| <= 2^20, and the same bits on every machine.
void cos_sin(double angle, double* cos, double* sin);

}  // namespace tle
