// How many multiply-adds a level's instructions can do in registers alone: the bound that a GEMM is held against.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/isa.h"

namespace tle::bench {

// Runs `rounds` rounds and returns the number of multiply-adds that were done.
typedef int64_t PeakFn(int64_t rounds);
PeakFn int8_peak_amx, int8_peak_vnni, int8_peak_avx512, int8_peak_avx2;
PeakFn int8_peak_neon, int8_peak_dotprod, int8_peak_i8mm;
PeakFn fp32_peak_avx512, fp32_peak_avx2, fp32_peak_neon;

}  // namespace tle::bench
