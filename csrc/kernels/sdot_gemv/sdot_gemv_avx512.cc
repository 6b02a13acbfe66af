// By 16-bit products, two registers a line (see linear_w8_int16.h): every pair of codes is exact.
#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

using Sums = __m512i;
using Codes = __m512i;
constexpr int kSums = 2;

static inline Codes four_codes(const int8_t* a) {
  int32_t codes;
  memcpy(&codes, a, 4);
  return _mm512_cvtepi8_epi16(_mm256_set1_epi32(codes));
}
static inline Sums start(int32_t) { return _mm512_setzero_si512(); }
static inline void dot(Sums (&acc)[kSums], const int8_t* line, Codes four) {
  TLE_UNROLL for (int i = 0; i < kSums; ++i) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32 * i)));
    acc[i] = _mm512_add_epi32(acc[i], _mm512_madd_epi16(words, four));
  }
}
static inline i32x16 channel_sums(const Sums (&acc)[kSums]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_epi32(_mm512_permutex2var_epi32(acc[0], even, acc[1]),
                           _mm512_permutex2var_epi32(acc[0], odd, acc[1]))};
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/sdot_gemv/sdot_gemv_lines.h"

namespace tle {

void sdot_gemv_avx512(const SdotGemvArgs& s) { sdot_gemv_lines(s); }

}  // namespace tle
