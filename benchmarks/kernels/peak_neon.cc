#include <arm_neon.h>

#include "benchmarks/kernels/peak.h"

namespace tle::bench {

// Two 16-bit products are added before the pair goes to 32 bits, as linear_w8_neon.cc does it.
int64_t int8_peak_neon(int64_t rounds) {
  int32x4_t acc[8];
  for (int32x4_t& a : acc) a = vdupq_n_s32(0);
  int8x16_t w = vdupq_n_s8(1), x = vdupq_n_s8(1);
  for (int64_t i = 0; i < rounds; ++i)
    for (int32x4_t& a : acc) {
      __asm__ volatile("" : "+w"(w), "+w"(x));
      a = vpadalq_s16(a, vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x));
      __asm__ volatile("" : "+w"(a));
    }
  return rounds * 8 * 16;
}

int64_t fp32_peak_neon(int64_t rounds) {
  float32x4_t acc[16];
  for (float32x4_t& a : acc) a = vdupq_n_f32(0.0f);
  const float32x4_t w = acc[0], x = acc[1];
  for (int64_t i = 0; i < rounds; ++i)
    for (float32x4_t& a : acc) {
      a = vfmaq_f32(a, w, x);
      __asm__ volatile("" : "+w"(a));
    }
  return rounds * 16 * 4;
}

}  // namespace tle::bench
