#include <immintrin.h>

#include "benchmarks/kernels/peak.h"

namespace tle::bench {

int64_t int8_peak_avx2(int64_t rounds) {
  __m256i acc[12] = {}, w = {}, x = {};
  for (int64_t i = 0; i < rounds; ++i)
    for (__m256i& a : acc) {
      __asm__ volatile("" : "+x"(w), "+x"(x));  // unknown values each time, so that the product is not computed once
      const __m256i products = _mm256_madd_epi16(w, x);
      a = _mm256_add_epi32(a, products);
      __asm__ volatile("" : "+x"(a));
    }
  return rounds * 12 * 16;
}

int64_t fp32_peak_avx2(int64_t rounds) {
  __m256 acc[12] = {}, w = {}, x = {};
  for (int64_t i = 0; i < rounds; ++i)
    for (__m256& a : acc) {
      a = _mm256_fmadd_ps(w, x, a);
      __asm__ volatile("" : "+x"(a));
    }
  return rounds * 12 * 8;
}

}  // namespace tle::bench
