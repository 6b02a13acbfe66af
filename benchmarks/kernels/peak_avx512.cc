#include <immintrin.h>

#include "benchmarks/kernels/peak.h"

namespace tle::bench {

int64_t int8_peak_avx512(int64_t rounds) {
  __m512i acc[12] = {}, w = {}, x = {};
  for (int64_t i = 0; i < rounds; ++i)
    for (__m512i& a : acc) {
      __asm__ volatile("" : "+v"(w), "+v"(x));  // unknown values each time, so that the product is not computed once
      const __m512i products = _mm512_madd_epi16(w, x);
      a = _mm512_add_epi32(a, products);
      __asm__ volatile("" : "+v"(a));
    }
  return rounds * 12 * 32;
}

int64_t fp32_peak_avx512(int64_t rounds) {
  __m512 acc[12] = {}, w = {}, x = {};
  for (int64_t i = 0; i < rounds; ++i)
    for (__m512& a : acc) {
      a = _mm512_fmadd_ps(w, x, a);
      __asm__ volatile("" : "+v"(a));
    }
  return rounds * 12 * 16;
}

}  // namespace tle::bench
