#include <arm_neon.h>

#include "benchmarks/kernels/peak.h"

namespace tle::bench {

int64_t int8_peak_dotprod(int64_t rounds) {
  int32x4_t acc[16];
  for (int32x4_t& a : acc) a = vdupq_n_s32(0);
  const int8x16_t w = vdupq_n_s8(1), x = w;
  for (int64_t i = 0; i < rounds; ++i)
    for (int32x4_t& a : acc) {
      a = vdotq_s32(a, w, x);
      __asm__ volatile("" : "+w"(a));
    }
  return rounds * 16 * 16;
}

}  // namespace tle::bench
