#include <immintrin.h>

#include "benchmarks/kernels/peak.h"

namespace tle::bench {

int64_t int8_peak_vnni(int64_t rounds) {
  __m512i acc[12] = {}, w = {}, x = {};
  for (int64_t i = 0; i < rounds; ++i)
    for (__m512i& a : acc) {
      a = _mm512_dpbusd_epi32(a, w, x);
      __asm__ volatile("" : "+v"(a));
    }
  return rounds * 12 * 64;
}

}  // namespace tle::bench
